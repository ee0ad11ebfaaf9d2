"""Lab 1: who owns which block, and what does a free block remember?"""

from __future__ import annotations

import random
from typing import Any

import pytest

from nanoserve.block_manager import BlockHash, BlockManager, BlockPool
from nanoserve.teaching.course.toy import ToyEngine, make_sequence, right_answer

ABCD = BlockHash(None, "a b c d")


def with_pool(pool_cls: type[BlockPool]) -> type[BlockManager]:
    """The engine's manager with this pool."""

    def reset(self: BlockManager) -> None:
        BlockManager.reset(self)
        self.pool = pool_cls(self.num_blocks)

    return type("Manager", (BlockManager,), {"reset": reset})


def start(manager: BlockManager, prompt: Any, seq_id: int = 0, salt: Any = None) -> Any:
    """Admit a sequence and compute all of it."""
    seq = make_sequence(prompt, seq_id)
    seq.extra_keys = salt
    manager.allocate(seq, manager.get_computed_blocks(seq))
    manager.append_slots(seq, seq.num_tokens - seq.num_computed_tokens)
    seq.num_computed_tokens = seq.num_tokens
    return seq


def test_1_1_allocate_takes_the_front_of_the_free_queue(mine: Any) -> None:
    pool = mine("MyPool", "allocate")(3)
    pool.free_queue.move_to_end(0)
    got = [pool.allocate(), pool.allocate()]
    assert got == [1, 2], f"the free queue was 1 2 0: the first two are 1 and 2, you took {got}"
    assert not {1, 2} & set(pool.free_queue), "a block that was taken is still in the free queue"
    assert pool.ref_counts[1] == 1, (
        f"block 1 has {pool.ref_counts[1]} references, and should have 1"
    )


def test_1_1_its_old_content_can_no_longer_be_found(mine: Any) -> None:
    pool = mine("MyPool", "allocate")(1)
    pool.cache(0, ABCD)
    pool.allocate()
    assert ABCD not in pool.cached_blocks, (
        "block 0 is about to be overwritten, and a later request would still find a b c d in it"
    )
    assert pool.block_hashes[0] is None, "block 0 still says that it holds a b c d"


def test_1_2_a_shared_block_has_one_reference_more(mine: Any) -> None:
    pool = mine("MyPool", "share")(2)
    block = pool.allocate()
    pool.share(block)
    got = pool.ref_counts[block]
    assert got == 2, f"a block of two sequences has {got} references"


def test_1_2_a_free_block_that_is_shared_leaves_the_free_queue(mine: Any) -> None:
    pool = mine("MyPool", "share")(2)
    pool.cache(0, ABCD)
    pool.share(0)
    assert 0 not in pool.free_queue, "the next allocate() would give the block to somebody else"
    assert pool.cached_blocks.get(ABCD) == 0, "its content was forgotten, and is what was wanted"


def test_1_3_only_the_last_reference_frees_a_block(mine: Any) -> None:
    pool = mine("MyPool", "free")(2)
    block = pool.allocate()
    pool.share(block)
    pool.free(block)
    assert block not in pool.free_queue, "one sequence still reads the block, and it is free"
    pool.free(block)
    assert block in pool.free_queue, "nobody reads the block any more, and it is not free"


@pytest.mark.points(2)
def test_1_3_what_can_be_found_is_reused_last(mine: Any) -> None:
    pool = mine("MyPool", "free")(4)
    found, lost = pool.allocate(), pool.allocate()
    pool.cache(found, ABCD)
    pool.free(found), pool.free(lost)
    order = list(pool.free_queue)
    assert order[0] == lost, f"nobody can find block {lost}: it goes to the front of {order}"
    assert order[-1] == found, f"a later request may use block {found}: it goes to the end"
    assert pool.cached_blocks.get(ABCD) == found, "a free block keeps its content"


def test_1_4_a_block_that_is_begun_counts_whole(mine: Any) -> None:
    manager = mine("MyManager", "num_blocks_for")(8, 4)
    for tokens, blocks in [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)]:
        got = manager.num_blocks_for(tokens)
        assert got == blocks, f"{tokens} tokens in blocks of 4 need {blocks} blocks, not {got}"


def test_1_5_cached_blocks_are_not_needed_again(mine: Any) -> None:
    manager = mine("MyManager", "can_allocate")(3, 4)
    start(manager, range(8))
    seq = make_sequence(range(12), 1)
    assert manager.can_allocate(seq, [0, 1]), "3 blocks, 2 of them cached and in use: 1 is free"
    assert not manager.can_allocate(seq, []), "3 blocks are needed, and 1 is free"


def test_1_5_a_free_block_cannot_be_taken_twice(mine: Any) -> None:
    manager = mine("MyManager", "can_allocate")(3, 4)
    manager.free(start(manager, range(9)))
    seq = make_sequence([*range(8), 20, 21, 22, 23, 24], 1)
    cached, before = manager.get_computed_blocks(seq), list(manager.pool.free_queue)
    assert not manager.can_allocate(seq, cached), (
        "3 blocks are free, 2 of them are the cached ones: one is left, and two more are needed"
    )
    assert list(manager.pool.free_queue) == before, "a question changes nothing"


@pytest.mark.points(2)
def test_1_6_a_hash_holds_the_whole_prefix(mine: Any) -> None:
    manager = mine("MyManager", "hashes_of")(8, 2)
    first = manager.hashes_of(make_sequence([1, 2, 3, 4]), 2)
    same = manager.hashes_of(make_sequence([1, 2, 3, 4, 5]), 2)
    other = manager.hashes_of(make_sequence([9, 9, 3, 4]), 2)
    assert first == same, "equal beginnings have equal hashes"
    assert first[1] is not other[1], "3 4 behind 1 2, and 3 4 behind 9 9: two hashes, not one"
    assert first[1].parent is first[0], "the parent of the second hash is the first one"


def test_1_6_a_salt_shares_nothing(mine: Any) -> None:
    manager, one, two = (
        mine("MyManager", "hashes_of")(8, 2),
        make_sequence("ab"),
        make_sequence("ab"),
    )
    two.extra_keys = "salt"
    left, right = manager.hashes_of(one, 1), manager.hashes_of(two, 1)
    assert left[0] is not right[0], "equal tokens under another salt have the same hash"


def test_1_6_what_is_known_is_kept(mine: Any) -> None:
    manager, seq = mine("MyManager", "hashes_of")(8, 2), make_sequence([1, 2, 3, 4, 5, 6])
    manager.hashes_of(seq, 1)
    got = manager.hashes_of(seq, 3)
    assert len(got) == 3, f"the sequence has 3 full blocks and {len(got)} hashes"
    assert manager.hashes_of(seq, 2) is seq.block_hashes, "the result is seq.block_hashes itself"


def test_1_7_the_longest_prefix_is_found(mine: Any) -> None:
    manager = mine("MyManager", "get_computed_blocks")(8, 4)
    first = start(manager, range(10))
    table = manager.block_tables[first.seq_id]
    for prompt, blocks in [(range(10), 2), ([0, 1, 2, 3, 9, 9], 1), ([9, *range(1, 10)], 0)]:
        got = manager.get_computed_blocks(make_sequence(prompt, 1))
        assert got == table[:blocks], f"of {list(prompt)} {table[:blocks]} are cached, not {got}"


@pytest.mark.points(2)
def test_1_7_the_last_token_is_computed_in_any_case(mine: Any) -> None:
    manager = mine("MyManager", "get_computed_blocks")(9, 4)
    start(manager, range(16))
    for length in range(1, 17):
        got = len(manager.get_computed_blocks(make_sequence(range(length), 1)))
        assert got == (length - 1) // 4, (
            f"a prompt of {length} tokens, all cached: {got} blocks are hit, and the last token "
            "has to be computed, because its logits are needed"
        )


def test_1_7_nothing_behind_a_miss_or_without_a_cache(mine: Any) -> None:
    manager, seq = mine("MyManager", "get_computed_blocks")(8, 4), make_sequence(range(12), 1)
    start(manager, range(12))
    manager.pool.uncache(manager.block_tables[0][0])
    got = manager.get_computed_blocks(seq)
    assert got == [], f"the first block is not cached, so no block is: you found {got}"
    manager = mine("MyManager", "get_computed_blocks")(8, 4)
    start(manager, range(12))
    manager.enable_prefix_caching = False
    got = manager.get_computed_blocks(make_sequence(range(12), 1))
    assert got == [], f"enable_prefix_caching is False: nothing is hit, and you found {got}"


def test_1_8_the_last_block_is_reused_first(mine: Any) -> None:
    manager = mine("MyManager", "free")(3, 4)
    seq = start(manager, range(12))
    table = list(manager.block_tables[0])
    manager.free(seq)
    order = list(manager.pool.free_queue)
    assert order == table[::-1], f"block table {table}: they are to be reused as {table[::-1]}"
    assert seq.seq_id not in manager.block_tables, "the block table is still open"
    manager.free(seq)  # a sequence without a table: nothing happens


@pytest.mark.points(2)
def test_1_9_your_pages_carry_an_engine(mine: Any) -> None:
    rng = random.Random(1)
    toy = ToyEngine(block_manager_cls=mine("MyManager"), num_blocks=12)
    prompts = {f"R{i}": [rng.randrange(2) for _ in range(rng.randint(1, 20))] for i in range(40)}
    for name, prompt in prompts.items():
        toy.add(name, prompt)
    for name, got in toy.run().items():
        right = right_answer(prompts[name], 4)
        assert got == right, f"{name} says {got} and should say {right}: it has read a wrong block"
    left = [block for block, count in enumerate(toy.block_manager.pool.ref_counts) if count]
    assert not left, f"all requests have ended, and blocks {left} are still held"
