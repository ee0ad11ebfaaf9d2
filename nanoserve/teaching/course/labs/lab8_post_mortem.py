"""Lab 8: post-mortem.

The engine talks, fluently, and is wrong. Write the test that would have known. Each of the first
five functions is for a bug that real engines had: nanoserve/teaching/post_mortems tells them.

`make(**options)` gives a new ToyEngine (nanoserve/teaching/course/toy.py) with a block manager that
may have the bug. A function returns if the engine is right, and raises AssertionError if it is not:

    def catch_something(make):
        toy = make(num_blocks=8)
        toy.add("A", "abcdefghi", max_tokens=3)      a letter is a token, a block has 4
        assert toy.run()["A"] == right_answer("abcdefghi", 3)

It is run with the right engine, too: whoever raises an alarm there has lost.
"""

from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.teaching.course.toy import right_answer  # noqa: F401


def catch_stale_hash(make: Any) -> None:
    """A block was overwritten, and its old hash still finds it. Give the cache few blocks."""
    raise NotImplementedError("Task 8.1")


def catch_whole_prompt_hit(make: Any) -> None:
    """Every token of a prompt is cached, and none is left to compute. Try every length."""
    raise NotImplementedError("Task 8.2")


def catch_hit_not_consumed(make: Any) -> None:
    """The cache is hit, and all is computed again. The text is right: count tokens. toy.step() says
    who computed how many; toy.block_manager.num_hit_tokens is what the cache says it gave.
    """
    raise NotImplementedError("Task 8.3")


def catch_freed_page(make: Any) -> None:
    """A block is free, and a block table still names it. Two equal requests at once begin it."""
    raise NotImplementedError("Task 8.4")


def catch_pinned_too_early(make: Any) -> None:
    """A request that does not fit keeps references of the blocks that it would have hit."""
    raise NotImplementedError("Task 8.5")


def rule(manager: BlockManager) -> None:
    """What is true of a right block manager between any two steps, as asserts: of pool.ref_counts,
    pool.free_queue, pool.cached_blocks, pool.block_hashes, and block_tables.
    """
    raise NotImplementedError("Task 8.6")


def catch_anything(make: Any) -> None:
    """Bugs that you have not seen. Many requests with common beginnings, few blocks, your rule
    between the steps, and right answers: whatever you trust.
    """
    raise NotImplementedError("Task 8.7")
