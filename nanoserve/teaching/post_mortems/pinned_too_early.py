"""A request that does not fit keeps what it was shown. (vLLM, issue 11562, pull request 11565)

    A runs; B waits, its first two blocks are cached
    each step     may B run?  pin its two blocks;  not enough are free: no.   The pins stay
    A ends        B's blocks have references of nobody, and never come back

A question changes nothing. The second act is the first repair, as a reviewer saw: ask before you
pin, and a block that is cached and free is counted twice, as a hit and as a free block.
"""

from __future__ import annotations

from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.sequence import Sequence
from nanoserve.teaching.course.toy import ToyEngine, right_answer
from nanoserve.teaching.post_mortems import ask, draw_blocks


class PinningManager(BlockManager):
    def can_allocate(self, seq: Sequence, cached_blocks: list[int]) -> bool:
        for block in cached_blocks:
            self.pool.share(block)  # so that nobody takes it meanwhile
        num_new = self.num_blocks_for(seq.num_tokens) - len(cached_blocks)
        return num_new <= len(self.pool.free_queue)  # if False: the pins stay

    def allocate(self, seq: Sequence, cached_blocks: list[int]) -> None:
        super().allocate(seq, cached_blocks)
        for block in cached_blocks:
            self.pool.free(block)  # allocate has a reference of its own


class CountedTwiceManager(BlockManager):
    """The second act."""

    def can_allocate(self, seq: Sequence, cached_blocks: list[int]) -> bool:
        num_new = self.num_blocks_for(seq.num_tokens) - len(cached_blocks)
        return num_new <= len(self.pool.free_queue)  # the cached ones may be among them


BROKEN: dict[str, Any] = {"block_manager_cls": PinningManager}
SECOND: dict[str, Any] = {"block_manager_cls": CountedTwiceManager}


def rule(manager: BlockManager) -> None:
    """A block has as many references as block tables that name it."""
    for block, count in enumerate(manager.pool.ref_counts):
        tables = sum(table.count(block) for table in manager.block_tables.values())
        assert count == tables, f"block {block} has {count} references, and {tables} tables name it"


PROMPTS = {"Z": "abcdefghi", "A": "mnopqrstu", "B": "abcdefghijklmnopqr"}


def start(**parts: Any) -> ToyEngine:
    """Z has ended: two of its blocks can be found. A holds three of six blocks."""
    toy = ToyEngine(num_blocks=6, **parts)
    toy.add("Z", PROMPTS["Z"], max_tokens=1)
    toy.run()
    toy.add("A", PROMPTS["A"], max_tokens=3)
    toy.step()
    toy.add("B", PROMPTS["B"], max_tokens=1)
    return toy


def test(**parts: Any) -> None:
    """B begins like Z, and does not fit while A runs."""
    toy = start(**parts)
    try:
        answers = toy.run()
    except KeyError as error:
        raise AssertionError(f"a block was taken that nobody had: {error}") from error
    for name, max_tokens in {"A": 3, "B": 1}.items():
        right = right_answer(PROMPTS[name], max_tokens)
        assert answers[name] == right, f"{name} says {answers[name]} and should say {right}"
    rule(toy.block_manager)


def story(**parts: Any) -> dict[str, Any]:
    """The demo model with 14 blocks. In each round somebody asks a sum; then a long question runs,
    and the sum comes again, with more behind it."""
    from nanoserve.teaching.lesson import small_llm

    answers: dict[str, Any] = {}
    with small_llm(num_blocks=14, **parts) as llm:
        for number in (25, 36, 47):
            answers[f"{number} + {number}"] = ask(llm, {f"What is {number} + {number}?": 8})
            more = f"What is {number} + {number}? And what is {number} + {number + 1}, please?"
            answers[f"{number} + {number}, with more"] = ask(llm, {"D": 12, more: 8})
            answers["free blocks"] = len(llm.engine.block_manager.pool.free_queue)
    return answers


def picture() -> Any:
    toy = start(**BROKEN)
    toy.step()
    title = "Pinned too early: B waits, was refused once, and holds references"
    counts = enumerate(toy.block_manager.pool.ref_counts)
    tables = [block for table in toy.block_manager.block_tables.values() for block in table]
    return draw_blocks(
        toy,
        title,
        {i: "referenced, and nobody has it" for i, count in counts if count and i not in tables},
    )
