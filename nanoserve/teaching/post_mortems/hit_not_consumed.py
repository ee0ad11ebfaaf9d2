"""A hit is counted, and nobody reads it. (MinivLLM, pull request 98)

    block table   [0, 1]  of A and of B: 8 equal tokens
    the kernel    computes attention over the keys of its own pass: of B only the ninth

The scheduler skips what is cached; the kernel of a prefill never looks there. The second act is the
opposite mistake: the engine computes all of it again. The texts are right, the hit rate is 60%, and
no step is shorter.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nanoserve.attention import AttentionBackend, StepMetadata
from nanoserve.block_manager import BlockManager
from nanoserve.sequence import Sequence
from nanoserve.teaching.course.toy import ToyEngine


class OwnPassOnly(AttentionBackend):
    def plan(self, metadata: StepMetadata, block_size: int, dtype: Any) -> StepMetadata:
        whole = super().plan(metadata, block_size, dtype)
        parts = list(whole.plan)
        for number, (start, end, seq_len, blocks) in enumerate(parts):
            if 1 < end - start < seq_len:  # a prefill that has a cached prefix
                own = blocks[(seq_len - end + start) // block_size :]
                parts[number] = (start, end, end - start, own)
        return replace(whole, plan=parts)


class ForgetfulManager(BlockManager):
    """The second act: the hit is counted, then computed again."""

    def allocate(self, seq: Sequence, cached_blocks: list[int]) -> None:
        super().allocate(seq, cached_blocks)
        self.free(seq)
        self.block_tables[seq.seq_id], seq.num_computed_tokens = [], 0


BROKEN: dict[str, Any] = {"attention_backend": OwnPassOnly()}
SECOND: dict[str, Any] = {"block_manager_cls": ForgetfulManager}


def rule(part: Any, num_computed: int) -> None:
    """A query sees every key up to its own. `part` is one of StepMetadata.plan."""
    start, end, seq_len, _ = part
    keys = num_computed + end - start
    assert seq_len == keys, f"{keys} tokens are known, and the queries see {seq_len}"


def test(**parts: Any) -> None:
    """Two equal prompts, one after the other: equal answers, and the work is the bill."""
    if "attention_backend" in parts:
        texts = story(**parts)
        assert texts["first"] == texts["again"], f"the same question, two answers: {texts}"
        return
    toy, prompt, computed = ToyEngine(**parts), "abcdefghijklm", 0
    for name in ("first", "again"):
        toy.add(name, prompt, max_tokens=1)
        while toy.scheduler.sequences:
            computed += sum(toy.step().values())
    hit = toy.block_manager.num_hit_tokens
    assert hit + computed == 2 * len(prompt), (
        f"2 prompts of {len(prompt)} tokens: {hit} were hit, and {computed} computed all the same"
    )


def story(**parts: Any) -> dict[str, Any]:
    """The same question twice, in one engine; and the tokens that its steps computed."""
    from nanoserve.teaching.lesson import serve, small_llm

    with small_llm(**parts) as llm:
        texts: dict[str, Any] = {name: serve(llm, {"A": 12})["A"] for name in ("first", "again")}
        frames = llm.engine.scheduler.frames
        texts["prompt tokens computed"] = sum(
            frame.num_tokens for frame in frames if frame.num_tokens > 1
        )
        texts["of them hit"] = llm.engine.block_manager.num_hit_tokens
        return texts


def picture() -> Any:
    """Which keys do the queries of the second prompt see?"""
    from nanoserve.teaching.pictures import SLOT, Picture

    drawn = Picture("A hit that nobody reads: 10 tokens, 8 of them cached, blocks of 4")
    for row, (name, first) in enumerate({"right": 0, "MinivLLM": 8}.items()):
        y = 46 + 84 * row
        drawn.text(0, y + 14, name, bold=True)
        for query in (8, 9):
            drawn.text(0, y + 36 + 26 * (query - 8), f"query {query}")
            for key in range(10):
                sees, x = first <= key <= query, 80 + key * SLOT + 8 * (key // 4)
                drawn.box(
                    x, y + 20 + 26 * (query - 8), SLOT, 22, "#0072B2" if sees else "none", 0.4
                )
                drawn.text(
                    x + SLOT / 2, y + 35 + 26 * (query - 8), f"k{key}" * sees, 10, anchor="middle"
                )
    drawn.text(80, 228, "k0 to k7 are in the cache, in blocks that are in the block table")
    return drawn
