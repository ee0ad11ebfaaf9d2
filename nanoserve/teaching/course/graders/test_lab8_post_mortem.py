"""Lab 8: a test is graded by the engines that it tells apart."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest

from nanoserve.block_manager import BlockHash, BlockManager
from nanoserve.sequence import Sequence
from nanoserve.teaching.course.toy import ToyEngine


class FreesTheFrontFirst(BlockManager):
    """Beginnings are overwritten before endings."""

    def free(self, seq: Sequence) -> None:
        self.block_tables.get(seq.seq_id, []).reverse()
        super().free(seq)


class NoParent(BlockManager):
    """A block is found by its own tokens alone."""

    def find_hash(self, parent: BlockHash | None, token_ids: Any) -> BlockHash:
        return super().find_hash(None if isinstance(token_ids, tuple) else parent, token_ids)


class NoSalt(BlockManager):
    """extra_keys are ignored."""

    def hashes_of(self, seq: Sequence, num_blocks: int) -> list[BlockHash]:
        seq.extra_keys = None
        return super().hashes_of(seq, num_blocks)


class KeepsTheLast(BlockManager):
    """A sequence that ends keeps its last block, if that is not full."""

    def free(self, seq: Sequence) -> None:
        table = self.block_tables.get(seq.seq_id, [])
        if seq.num_computed_tokens % self.block_size:
            table[-1:] = []
        super().free(seq)


class CachesTooEarly(BlockManager):
    """The last block can be found before it is full."""

    def hashes_of(self, seq: Sequence, num_blocks: int) -> list[BlockHash]:
        return super().hashes_of(seq, num_blocks)

    def get_computed_blocks(self, seq: Sequence) -> list[int]:
        found = super().get_computed_blocks(seq)
        for table in self.block_tables.values():
            if found and table[: len(found)] == found and len(table) > len(found):
                most = (seq.num_tokens - 1) // self.block_size
                return table[: min(most, len(found) + 1)]
        return found


class OneTooFew(BlockManager):
    """Room for one block more than there is."""

    def can_append_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        return super().can_append_slots(seq, max(0, num_new_tokens - 1))


UNSEEN = [FreesTheFrontFirst, NoParent, NoSalt, KeepsTheLast, CachesTooEarly, OneTooFew]


def bug(name: str, act: str = "BROKEN") -> Any:
    return getattr(import_module(f"nanoserve.teaching.post_mortems.{name}"), act)


def judge(catch: Callable[[Any], None], broken: type[BlockManager], what: str) -> None:
    """The right engine passes, the broken one raises."""
    try:
        catch(ToyEngine)
    except AssertionError as error:
        raise AssertionError(f"a false alarm with the right engine: {error}") from error
    try:
        catch(partial(ToyEngine, block_manager_cls=broken))
    except AssertionError:
        return
    raise AssertionError(f"{what}: not caught")


def test_8_1_stale_hash(mine: Any) -> None:
    broken = bug("stale_hash")["block_manager_cls"]
    judge(mine("catch_stale_hash"), broken, "a stale hash is found")


@pytest.mark.points(2)
def test_8_1_and_its_second_act(mine: Any) -> None:
    broken = bug("stale_hash", "SECOND")["block_manager_cls"]
    what = "tokens are compared, and equal tokens behind another beginning pass"
    judge(mine("catch_stale_hash"), broken, what)


def test_8_2_whole_prompt_hit(mine: Any) -> None:
    broken = bug("whole_prompt_hit")["block_manager_cls"]
    judge(mine("catch_whole_prompt_hit"), broken, "nothing is left to compute")


def test_8_3_hit_not_consumed(mine: Any) -> None:
    broken = bug("hit_not_consumed", "SECOND")["block_manager_cls"]
    judge(mine("catch_hit_not_consumed"), broken, "a hit is computed again")


def test_8_4_freed_page(mine: Any) -> None:
    broken = bug("freed_page")["block_manager_cls"]
    judge(mine("catch_freed_page"), broken, "a block table names a free block")


def test_8_4_and_its_second_act(mine: Any) -> None:
    broken = bug("freed_page", "SECOND")["block_manager_cls"]
    judge(mine("catch_freed_page"), broken, "the runner's copy names a free block")


def test_8_5_pinned_too_early(mine: Any) -> None:
    broken = bug("pinned_too_early")["block_manager_cls"]
    judge(mine("catch_pinned_too_early"), broken, "references of nobody")


def test_8_5_and_its_second_act(mine: Any) -> None:
    broken = bug("pinned_too_early", "SECOND")["block_manager_cls"]
    judge(mine("catch_pinned_too_early"), broken, "a free block is counted twice")


STORIES = {  # blocks in all; (prompt, tokens at most, steps until the next one comes)
    3: [("abcdefghi", 1, 9), ("zzzzefgh", 1, 9), ("abcdefghi", 1, 9)],
    12: [("abcdefgh", 8, 0), ("abcdefgh", 8, 1), ("xxxxyyyy", 8, 99)],
    6: [("abcdefghi", 1, 9), ("mnopqrstu", 3, 1), ("abcdefghijklmnopqr", 1, 99)],
}


def with_rule(rule: Callable[[BlockManager], None]) -> Callable[[Any], None]:
    """Three stories, with the rule between any two steps."""

    def catch(make: Any) -> None:
        for num_blocks, requests in STORIES.items():
            toy = make(num_blocks=num_blocks)
            for number, (prompt, max_tokens, steps) in enumerate(requests):
                toy.add(f"R{number}", prompt, max_tokens)
                while steps and toy.scheduler.sequences:
                    toy.step()
                    rule(toy.block_manager)
                    steps -= 1

    return catch


@pytest.mark.parametrize("name", ["stale_hash", "freed_page", "pinned_too_early"])
def test_8_6_your_rule_sees(mine: Any, name: str) -> None:
    judge(with_rule(mine("rule")), bug(name)["block_manager_cls"], name.replace("_", " "))


@pytest.mark.parametrize("broken", UNSEEN)
def test_8_7_a_bug_that_you_have_not_seen(mine: Any, broken: type[BlockManager]) -> None:
    number = UNSEEN.index(broken) + 1
    judge(mine("catch_anything"), broken, f"bug {number} of {len(UNSEEN)}")
