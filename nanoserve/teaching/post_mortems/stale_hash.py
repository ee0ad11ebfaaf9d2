"""A block is overwritten, and its old hash still finds it. (nano-vllm, issue 163)

    A               ends; its blocks are free, and can be found
    another one     takes one of them and writes over it; the hash map is not told
    A again         finds the block under the old hash, and reads another request's keys

Second act: compare the tokens of a block with those that are wanted, as nano-vllm does, and most
wrong hits are gone. Not this one: equal tokens behind another beginning are other keys and values.
"""

from __future__ import annotations

from typing import Any

from nanoserve.block_manager import BlockManager, BlockPool
from nanoserve.sequence import Sequence
from nanoserve.teaching.course.toy import ToyEngine, right_answer
from nanoserve.teaching.post_mortems import draw_blocks


class StalePool(BlockPool):
    def uncache(self, block_id: int) -> None:
        self.block_hashes[block_id] = None  # the block forgets; cached_blocks does not


class StaleManager(BlockManager):
    def reset(self) -> None:
        super().reset()
        self.pool = StalePool(self.num_blocks)


class ComparingManager(StaleManager):
    """The second act: a hit counts only if the block holds the tokens that are wanted."""

    def get_computed_blocks(self, seq: Sequence) -> list[int]:
        blocks = super().get_computed_blocks(seq)
        for number, block in enumerate(blocks):
            held = self.pool.block_hashes[block]
            if held is None or held.token_ids != seq.block_hashes[number].token_ids:
                return blocks[:number]
        return blocks


BROKEN: dict[str, Any] = {"block_manager_cls": StaleManager}
SECOND: dict[str, Any] = {"block_manager_cls": ComparingManager}


def rule(manager: BlockManager) -> None:
    """A hash finds a block exactly if the block has this hash."""
    for block_hash, block in manager.pool.cached_blocks.items():
        assert manager.pool.block_hashes[block] is block_hash, (
            f"block {block} is found under the hash of {block_hash.token_ids}: it holds others"
        )


FIRST, SECOND_PROMPT = "abcdefghi", "zzzzefgh"  # the same block behind two beginnings


def test(**parts: Any) -> None:
    """Three blocks in all; the second request takes the middle block of the first one."""
    toy = ToyEngine(num_blocks=3, **parts)
    for name, prompt in {"A": FIRST, "B": SECOND_PROMPT, "A again": FIRST}.items():
        toy.add(name, prompt, max_tokens=1)
        got, right = toy.run()[name], right_answer(prompt, 1)
        assert got == right, f"{name} says {got} and should say {right}: it read another's block"


def story(**parts: Any) -> dict[str, str]:
    """The demo model, with 9 blocks and one request at a time: a question, another one, and the
    first one again."""
    from nanoserve.teaching.lesson import serve, small_llm

    with small_llm(num_blocks=9, max_num_seqs=1, **parts) as llm:
        first = serve(llm, {"A": 12})["A"]
        other = serve(llm, {"C": 12})["C"]
        return {"A": first, "C": other, "A again": serve(llm, {"A": 12})["A"]}


def picture() -> Any:
    """A has ended, B runs."""
    toy = ToyEngine(num_blocks=3, **BROKEN)
    toy.add("A", FIRST, max_tokens=1)
    toy.run()
    toy.add("B", SECOND_PROMPT, max_tokens=2)
    toy.step()
    title = "Stale hash: A has ended, B has taken two of its blocks"
    return draw_blocks(
        toy, title, {1: "holds e f g h behind z z z z, and is found as e f g h behind a b c d"}
    )
