"""The whole prompt is cached, and nothing is left to compute. (nano-vllm, pull request 199)

    prompt of 9 tokens, blocks of 4     2 blocks are hit, 1 token is computed
    prompt of 8 tokens                  2 blocks are hit, 0 tokens are computed: no query, no logits

The cache holds keys and values. What the next token is sampled from, the logits of the last token,
it does not hold. So one token is computed in any case.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.sequence import Sequence
from nanoserve.teaching.course.toy import ToyEngine, right_answer
from nanoserve.teaching.post_mortems import ask, draw_blocks


class WholeHitManager(BlockManager):
    def get_computed_blocks(self, seq: Sequence) -> list[int]:
        hashes = self.hashes_of(seq, seq.num_tokens // self.block_size)  # not num_tokens - 1
        cached = self.pool.cached_blocks
        return [cached[each] for each in takewhile(cached.__contains__, hashes)]


class WholeBlockManager(WholeHitManager):
    """A repair that is right, and was vLLM's (pull request 11186): on a whole hit, compute the last
    block again. The last token alone would be half of a block, and slots come in blocks."""

    def get_computed_blocks(self, seq: Sequence) -> list[int]:
        blocks = super().get_computed_blocks(seq)
        return blocks[:-1] if len(blocks) * self.block_size == seq.num_tokens else blocks


BROKEN: dict[str, Any] = {"block_manager_cls": WholeHitManager}
REPAIRED: dict[str, Any] = {"block_manager_cls": WholeBlockManager}


def rule(manager: BlockManager, seq: Sequence) -> None:
    """A hit leaves at least one token to compute."""
    hit = len(manager.get_computed_blocks(seq)) * manager.block_size
    assert hit < seq.num_tokens, f"a prompt of {seq.num_tokens} tokens, and {hit} of them are hit"


def test(**parts: Any) -> None:
    """Each prompt twice, of every length from 1 to 17: no single length would do."""
    for length in range(1, 18):
        toy, prompt = ToyEngine(**parts), "abcdefghijklmnopq"[:length]
        for name in ("first", "again"):
            toy.add(name, prompt, max_tokens=3)
            got, right = toy.run()[name], right_answer(prompt, 3)
            assert got == right, f"{length} tokens, {name}: {got}, and should be {right}"


def story(**parts: Any) -> dict[str, str]:
    """A prompt of 18 tokens and one of 16, twice each. (The engine waits for ever: we stop it.)"""
    from nanoserve.teaching.lesson import prompt, small_llm

    answers = {}
    for name in ("A", "C"):
        with small_llm(**parts) as llm:
            length = len(prompt(llm, name))
            for when in ("first", "again"):
                answers[f"{name}, {length} tokens, {when}"] = ask(llm, {name: 12})
    return answers


def picture() -> Any:
    toy = ToyEngine(num_blocks=4, **BROKEN)
    toy.add("A", "abcdefgh", max_tokens=1)
    toy.run()
    title = "Whole-prompt hit: A comes again, and both of its blocks are found"
    return draw_blocks(toy, title, {1: "h is the last token: who computes its logits?"})
