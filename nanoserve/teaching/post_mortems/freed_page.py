"""A duplicate page is freed, and a block table still names it. (mini-sglang, pull request 142)

    A and B      the same prompt of 8 tokens; B hits one block and computes the other again
    dedup        B's second block has the content of A's: B's is freed, to save memory
    B's table    still names it; a third request takes the block, and B reads foreign keys

Who frees a page owns every table that names it: the control plane's, and the runner's copy.
"""

from __future__ import annotations

from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.sequence import Sequence
from nanoserve.teaching.course.toy import ToyEngine, right_answer
from nanoserve.teaching.post_mortems import draw_blocks


class DedupManager(BlockManager):
    def reset(self) -> None:
        super().reset()
        self.given_back: set[tuple[int, int]] = set()

    def cache_blocks(self, seq: Sequence, start: int, end: int) -> None:
        super().cache_blocks(seq, start, end)
        for block_hash, block in zip(seq.block_hashes, self.block_tables[seq.seq_id], strict=False):
            owner = self.pool.cached_blocks.get(block_hash, block)
            if owner != block and (seq.seq_id, block) not in self.given_back:
                self.given_back.add((seq.seq_id, block))
                self.pool.free(block)  # the block table of seq still names it

    def free(self, seq: Sequence) -> None:
        table = self.block_tables.get(seq.seq_id, [])
        table[:] = [block for block in table if (seq.seq_id, block) not in self.given_back]
        super().free(seq)


class RemapManager(DedupManager):
    """The second act: the manager's table is corrected, the runner's copy is not."""

    def cache_blocks(self, seq: Sequence, start: int, end: int) -> None:
        super().cache_blocks(seq, start, end)
        table = self.block_tables[seq.seq_id]
        for number, block in enumerate(table):
            if (seq.seq_id, block) in self.given_back:
                table[number] = self.pool.cached_blocks[seq.block_hashes[number]]
                self.pool.share(table[number])


BROKEN: dict[str, Any] = {"block_manager_cls": DedupManager}
SECOND: dict[str, Any] = {"block_manager_cls": RemapManager}


def rule(manager: BlockManager) -> None:
    """No block of a block table is free."""
    for seq_id, table in manager.block_tables.items():
        free = [block for block in table if block in manager.pool.free_queue]
        assert not free, f"the block table of sequence {seq_id} is {table}, and {free} are free"


def start(**parts: Any) -> ToyEngine:
    """A and B have the same prompt, and so the same output; their first step."""
    toy = ToyEngine(num_blocks=12, **parts)
    toy.add("A", "abcdefgh", max_tokens=8)
    toy.add("B", "abcdefgh", max_tokens=8)
    toy.step()
    return toy


def test(**parts: Any) -> None:
    """C comes a step later, and needs blocks."""
    toy = start(**parts)
    toy.add("C", "xxxxyyyy", max_tokens=8)
    for name, got in toy.run().items():
        right = right_answer("xxxxyyyy" if name == "C" else "abcdefgh", 8)
        assert got == right, f"{name} says {got} and should say {right}: it read another's block"


def story(**parts: Any) -> dict[str, str]:
    """The same question twice at once, of 16 tokens; then another one."""
    from nanoserve.teaching.lesson import serve, small_llm

    question = "What is the capital of France?"
    with small_llm(num_blocks=24, **parts) as llm:
        return serve(llm, {f"B1: {question}": 12, f"B2: {question}": 12, "D": (12, 2)})


def picture() -> Any:
    title = "Freed page: A and B have the same prompt; B's second block was given back"
    toy = start(**BROKEN)
    [block] = [block for _, block in toy.block_manager.given_back]  # type: ignore[attr-defined]
    return draw_blocks(toy, title, {block: "the next request takes it"})
