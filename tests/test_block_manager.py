"""Who owns which block: the free queue, the prefix cache, and the books that must agree.

block_size is 4 throughout, and token ids are letters: tokens("abcd efgh ij") is 10 tokens, of which
8 fill two blocks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
from fakes import FakeEngine, make_sequence, reference_output
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanoserve.block_manager import BlockHashTable, BlockManager, BlockPool, BlockState
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import Sequence

BLOCK_SIZE = 4


def tokens(text: str) -> list[int]:
    """One token per letter; spaces are only there to show the blocks."""
    return [ord(letter) for letter in text.replace(" ", "")]


def admit(manager: BlockManager, seq_id: int, text: str, salt: str | None = None) -> Sequence:
    """A sequence with the tokens of `text`, all of them computed: returns it holding its blocks."""
    seq = make_sequence(seq_id, tokens(text), cache_salt=salt)
    manager.allocate(seq, manager.get_cached_blocks(seq))
    compute(manager, seq)
    return seq


def compute(manager: BlockManager, seq: Sequence) -> list[int]:
    """Let `seq` catch up with its tokens; returns the new block ids."""
    num_tokens = seq.num_tokens - seq.num_computed_tokens
    assert manager.can_append(seq, num_tokens)
    new_block_ids = manager.append(seq, num_tokens)
    seq.num_computed_tokens += num_tokens
    manager.check()
    return new_block_ids


def hits(manager: BlockManager, text: str, salt: str | None = None) -> list[int]:
    """The cached blocks that a new request with this prompt would find."""
    return manager.get_cached_blocks(make_sequence(999, tokens(text), cache_salt=salt))


# -- block tables --


def test_the_example_of_the_module() -> None:
    """Two sequences share one full block and have a tail of their own each."""
    manager = BlockManager(num_blocks=8, block_size=BLOCK_SIZE)
    admit(manager, 0, "abcd efx")
    admit(manager, 1, "abcd efy")
    first, second = manager.block_tables[0], manager.block_tables[1]
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert [manager.pool.ref_counts[i] for i in (first[0], first[1], second[1])] == [2, 1, 1]
    assert manager.num_free_blocks == 5


def test_a_sequence_gets_a_block_only_when_it_needs_one() -> None:
    """5 tokens in blocks of 4 need 2; the next three fit into the second."""
    manager = BlockManager(8, BLOCK_SIZE)
    seq = admit(manager, 0, "abcd e")
    num_new = []
    for letter in "fghij":
        seq.token_ids += tokens(letter)
        num_new.append(len(compute(manager, seq)))
    assert num_new == [0, 0, 0, 1, 0]
    assert [manager.num_blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_block_states() -> None:
    """FREE, ALLOCATED, FREE again."""
    manager = BlockManager(2, BLOCK_SIZE)
    assert manager.pool.get_state(0) is BlockState.FREE
    seq = admit(manager, 0, "abcd")
    assert manager.pool.get_state(manager.block_tables[0][0]) is BlockState.ALLOCATED
    manager.free(seq)
    assert manager.pool.get_state(0) is BlockState.FREE


def test_questions_change_nothing() -> None:
    """can_* and get_* are pure, whatever they answer."""
    manager = BlockManager(4, BLOCK_SIZE)
    seq = admit(manager, 0, "abcd efgh i")
    other = make_sequence(1, tokens("abcd efgh jklm n"))
    before = (dict(manager.block_tables), list(manager.pool.free_queue), manager.num_hit_tokens)
    cached = manager.get_cached_blocks(other)
    assert manager.can_allocate(other, cached) is False
    assert manager.can_append(seq, 3) is True
    assert manager.can_append(seq, 9) is False
    assert before == (
        manager.block_tables,
        list(manager.pool.free_queue),
        manager.num_hit_tokens,
    )
    manager.check()


def test_a_cached_block_in_the_free_queue_is_not_counted_twice() -> None:
    """Taking it back uses up a free block: 3 free, 2 of them the hits, leave 1 for the rest."""
    manager = BlockManager(3, BLOCK_SIZE)
    manager.free(admit(manager, 0, "abcd efgh"))
    fits = make_sequence(1, tokens("abcd efgh ijkl"))
    assert manager.can_allocate(fits, manager.get_cached_blocks(fits))
    does_not = make_sequence(2, tokens("abcd efgh ijkl m"))
    assert not manager.can_allocate(does_not, manager.get_cached_blocks(does_not))


# -- the free queue --


def test_blocks_are_taken_least_recently_used_first() -> None:
    """Three requests come and go; their blocks are reused in the order in which they went."""
    manager = BlockManager(3, BLOCK_SIZE)
    sequences = [admit(manager, i, text) for i, text in enumerate(["aaaa", "bbbb", "cccc"])]
    tables = [manager.block_tables[i][0] for i in range(3)]
    for i in (1, 2, 0):
        manager.free(sequences[i])
    assert [manager.pool.allocate() for _ in range(3)] == [tables[1], tables[2], tables[0]]


def test_of_one_request_the_tail_is_evicted_first() -> None:
    """A beginning is likelier to be shared than what follows it, and of no use without it."""
    manager = BlockManager(4, BLOCK_SIZE)
    manager.free(admit(manager, 0, "abcd efgh ijkl mnop"))
    found = []
    for i in range(4):
        found.append(len(hits(manager, "abcd efgh ijkl mnop q")))
        admit(manager, 10 + i, "xyz")
    assert found == [4, 3, 2, 1]


def test_a_block_that_holds_nothing_findable_goes_first() -> None:
    """A half-filled block is of no more use to anybody: it does not cost a cached one its place."""
    manager = BlockManager(3, BLOCK_SIZE)
    manager.free(admit(manager, 0, "abcd"))
    seq = admit(manager, 1, "xy")
    [half_filled] = manager.block_tables[1]
    manager.free(seq)
    assert next(iter(manager.pool.free_queue)) == half_filled


def test_a_hit_takes_its_block_out_of_the_middle_of_the_queue() -> None:
    """And the order of the others stays."""
    manager = BlockManager(3, BLOCK_SIZE)
    for i, text in enumerate(["aaaa", "bbbb", "cccc"]):
        manager.free(admit(manager, i, text))
    first, middle, last = manager.pool.free_queue
    assert hits(manager, "bbbb b") == [middle]
    seq = make_sequence(3, tokens("bbbb b"))
    manager.allocate(seq, [middle])
    assert list(manager.pool.free_queue) == [first, last]
    manager.check()


def test_using_a_block_makes_it_recently_used() -> None:
    """A prefix that keeps being hit outlives others that came later."""
    manager = BlockManager(3, BLOCK_SIZE)
    manager.free(admit(manager, 0, "aaaa"))
    manager.free(admit(manager, 1, "bbbb"))
    manager.free(admit(manager, 2, "aaaa x"))
    admit(manager, 3, "cccc dddd")
    assert len(hits(manager, "aaaa x")) == 1
    assert hits(manager, "bbbb x") == []


# -- the prefix cache --


@pytest.mark.parametrize(
    ("prompt", "num_hits"),
    [("abc", 0), ("abcd", 0), ("abcd e", 1), ("abcd efgh", 1), ("abcd efgh i", 2)],
)
def test_the_last_token_is_always_computed(prompt: str, num_hits: int) -> None:
    """A prompt of exactly one or two blocks, wholly cached, still has a token to run: its logits
    are needed."""
    manager = BlockManager(8, BLOCK_SIZE)
    manager.free(admit(manager, 0, "abcd efgh ijkl"))
    assert len(hits(manager, prompt)) == num_hits
    seq = make_sequence(1, tokens(prompt))
    manager.allocate(seq, manager.get_cached_blocks(seq))
    assert seq.num_computed_tokens == num_hits * BLOCK_SIZE < seq.num_tokens
    compute(manager, seq)


@pytest.mark.parametrize("num_tokens", [4, 8, 12, 16])
def test_a_wholly_cached_prompt_gives_the_same_tokens(num_tokens: int) -> None:
    """At exact multiples of the block size, cold and warm."""
    engine = FakeEngine(num_blocks=32, block_size=BLOCK_SIZE)
    for cached in (0, num_tokens - 4):
        seq = engine.add(range(num_tokens), max_tokens=6)
        engine.run()
        assert seq.num_cached_tokens == cached
        assert seq.output_token_ids == reference_output(list(range(num_tokens)), 6)


def test_a_recycled_block_is_not_found_under_its_old_content() -> None:
    """Whoever gets the block overwrites it, so its hash goes with its content."""
    manager = BlockManager(2, BLOCK_SIZE)
    manager.free(admit(manager, 0, "abcd efgh"))
    admit(manager, 1, "xxxx yyyy")
    assert hits(manager, "abcd efgh i") == []
    assert hits(manager, "xxxx y") == [manager.block_tables[1][0]]


def test_recycled_blocks_give_no_stale_tokens() -> None:
    """Two prompts take turns in a cache that holds one: every answer is as if alone."""
    engine = FakeEngine(num_blocks=4, block_size=BLOCK_SIZE)
    for turn in range(6):
        prompt = [turn % 2] * 9
        seq = engine.add(prompt, max_tokens=7)
        engine.run()
        assert seq.output_token_ids == reference_output(prompt, 7)


def test_two_requests_of_one_step_share() -> None:
    """A block is findable from the moment it is given out for tokens of the coming step."""
    engine = FakeEngine(block_size=BLOCK_SIZE)
    sequences = [engine.add(range(10), max_tokens=4) for _ in range(2)]
    step = engine.step()
    assert [item.num_scheduled_tokens for item in step.scheduled] == [10, 2]
    assert sequences[1].num_cached_tokens == 8
    engine.run()
    for seq in sequences:
        assert seq.output_token_ids == reference_output(list(range(10)), 4)


def test_the_second_turn_of_a_chat_hits_the_whole_first_turn() -> None:
    """Blocks that generated tokens fill are cached, too."""
    engine = FakeEngine(block_size=BLOCK_SIZE)
    first = engine.add(range(6), max_tokens=11)
    engine.run()
    history = first.token_ids  # 17 tokens; the KV of the last was never computed
    second = engine.add([*history, 7, 8, 9], max_tokens=3)
    engine.run()
    assert second.num_cached_tokens == 16
    assert second.output_token_ids == reference_output([*history, 7, 8, 9], 3)


def test_a_hit_needs_the_whole_prefix() -> None:
    """Equal tokens behind different ones are different content."""
    manager = BlockManager(8, BLOCK_SIZE)
    admit(manager, 0, "abcd efgh")
    assert hits(manager, "efgh i") == []
    assert len(hits(manager, "abcd xxxx efgh i")) == 1


def test_a_cache_salt_separates() -> None:
    """Only who has the same salt shares, so nobody learns from a fast answer what others asked."""
    manager = BlockManager(8, BLOCK_SIZE)
    admit(manager, 0, "abcd efgh", salt="alice")
    assert len(hits(manager, "abcd efgh i", salt="alice")) == 2
    assert hits(manager, "abcd efgh i", salt="bob") == []
    assert hits(manager, "abcd efgh i", salt="") == []
    assert hits(manager, "abcd efgh i") == []


def test_reset_forgets_everything() -> None:
    """A step failed: no promise holds, nobody has blocks, and all of them are free."""
    manager = BlockManager(8, BLOCK_SIZE, num_cpu_blocks=4)
    admit(manager, 0, "abcd efgh ijkl")
    manager.swap_out(admit(manager, 1, "abcd efgh"))
    manager.reset()
    assert hits(manager, "abcd efgh ijkl m") == []
    assert (manager.num_free_blocks, manager.cpu_pool.num_free_blocks) == (8, 4)
    assert not manager.block_tables
    assert not manager.swapped_tables
    manager.check()


def test_reset_refuses_while_a_sequence_holds_blocks() -> None:
    """Then it does nothing; afterwards nothing is found any more."""
    manager = BlockManager(8, BLOCK_SIZE)
    seq = admit(manager, 0, "abcd efgh")
    assert manager.reset_prefix_cache() is False
    assert len(hits(manager, "abcd efgh i")) == 2
    manager.free(seq)
    assert manager.reset_prefix_cache() is True
    assert hits(manager, "abcd efgh i") == []
    manager.check()


def test_without_caching_nothing_is_ever_found() -> None:
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=False)
    admit(manager, 0, "abcd efgh")
    assert hits(manager, "abcd efgh i") == []
    assert not manager.pool.cached_blocks


def test_hits_are_counted_at_admission() -> None:
    """Hit rate = num_hit_tokens / num_queried_tokens."""
    manager = BlockManager(8, BLOCK_SIZE)
    admit(manager, 0, "abcd efgh")
    admit(manager, 1, "abcd efgh i")
    assert (manager.num_queried_tokens, manager.num_hit_tokens) == (8 + 9, 8)


# -- fork and copy-on-write --


def fork(manager: BlockManager, parent: Sequence, seq_id: int, text: str) -> Sequence:
    """A sequence on the blocks of `parent`, whose tokens so far and `text` are its own."""
    child = make_sequence(seq_id, parent.token_ids + tokens(text))
    manager.fork(parent, child)
    manager.check()
    return child


def test_the_copy_on_write_example_of_the_module() -> None:
    """Two branches share [2, 0]; the first to write gets a block of its own, the other keeps it."""
    manager = BlockManager(8, BLOCK_SIZE)
    parent = admit(manager, 0, "abcd ef")
    full, partial = manager.block_tables[0]
    child = fork(manager, parent, 1, "y")
    assert manager.block_tables[1] == [full, partial]
    assert [manager.pool.ref_counts[i] for i in (full, partial)] == [2, 2]
    shared, own = manager.copy_on_write(child) or (-1, -1)
    assert (shared, manager.block_tables[1]) == (partial, [full, own])
    assert [manager.pool.ref_counts[i] for i in (full, partial, own)] == [2, 1, 1]
    parent.token_ids += tokens("x")
    assert manager.copy_on_write(parent) is None
    compute(manager, parent)
    compute(manager, child)
    assert manager.num_free_blocks == 5


def test_a_full_block_is_never_copied() -> None:
    """Nobody writes into it again: the next token opens a new block."""
    manager = BlockManager(8, BLOCK_SIZE)
    parent = admit(manager, 0, "abcd efgh")
    child = fork(manager, parent, 1, "y")
    assert manager.copy_on_write(child) is None
    assert len(compute(manager, child)) == 1
    assert manager.block_tables[1][:2] == manager.block_tables[0]


def test_the_copy_needs_a_block() -> None:
    """can_append counts it: 3 blocks are taken, and the next token needs a copy of the last."""
    manager = BlockManager(3, BLOCK_SIZE)
    parent = admit(manager, 0, "abcd efgh ij")
    child = fork(manager, parent, 1, "y")
    assert not manager.can_append(child, 1)
    manager.free(parent)
    assert manager.can_append(child, 1)
    assert manager.copy_on_write(child) is None


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_shared_blocks_outlive_the_parent(enable_prefix_caching: bool) -> None:
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching)
    parent = admit(manager, 0, "abcd ef")
    child = fork(manager, parent, 1, "")
    manager.free(parent)
    manager.check()
    assert manager.num_free_blocks == 6
    manager.free(child)
    manager.check()
    assert manager.num_free_blocks == 8


def test_what_a_branch_fills_can_be_found() -> None:
    """By its own tokens, behind the parent's."""
    manager = BlockManager(8, BLOCK_SIZE)
    parent = admit(manager, 0, "abcd ef")
    child = fork(manager, parent, 1, "yz")
    manager.copy_on_write(child)
    compute(manager, child)
    assert hits(manager, "abcd efyz !") == manager.block_tables[1]
    assert hits(manager, "abcd efxz !") == manager.block_tables[1][:1]


# -- two pools --


def test_out_and_back() -> None:
    """Every block moves to a CPU block and to a free KV block again; nothing is computed."""
    manager = BlockManager(4, BLOCK_SIZE, num_cpu_blocks=3)
    seq = admit(manager, 0, "abcd efgh ij")
    held = list(manager.block_tables[0])
    assert manager.can_swap_out(seq)
    out = manager.swap_out(seq)
    manager.check()
    assert [block for block, _ in out] == held
    assert manager.block_tables == {}
    assert manager.num_free_blocks == 4
    assert [manager.cpu_pool.get_state(i) for _, i in out] == [BlockState.SWAPPED] * 3
    assert manager.can_swap_in(seq)
    back = manager.swap_in(seq)
    manager.check()
    assert [cpu_block for cpu_block, _ in back] == [cpu_block for _, cpu_block in out]
    assert manager.block_tables == {0: [block for _, block in back]}
    assert (manager.swapped_tables, manager.cpu_pool.num_free_blocks) == ({}, 3)
    assert seq.num_computed_tokens == 10


def test_swapping_a_branch_leaves_the_other_its_blocks() -> None:
    """A shared block is copied, and only this sequence's reference goes."""
    manager = BlockManager(4, BLOCK_SIZE, num_cpu_blocks=4)
    parent = admit(manager, 0, "abcd ef")
    child = fork(manager, parent, 1, "y")
    table = list(manager.block_tables[0])
    assert [block for block, _ in manager.swap_out(child)] == table
    manager.check()
    assert manager.block_tables == {0: table}
    assert [manager.pool.ref_counts[i] for i in table] == [1, 1]
    back = manager.swap_in(child)
    assert not {block for _, block in back} & set(table), "nothing is shared any more"


def test_swapped_blocks_may_still_be_found_until_they_are_taken() -> None:
    """The KV blocks that were left hold what they held."""
    manager = BlockManager(4, BLOCK_SIZE, num_cpu_blocks=4)
    seq = admit(manager, 0, "abcd efgh")
    table = list(manager.block_tables[0])
    manager.swap_out(seq)
    assert hits(manager, "abcd efgh i") == table


def test_swapping_asks_first() -> None:
    """can_swap_out counts CPU blocks; can_swap_in counts KV blocks for all known tokens."""
    manager = BlockManager(4, BLOCK_SIZE, num_cpu_blocks=2)
    seq = admit(manager, 0, "abcd efgh")
    other = admit(manager, 1, "ij")
    manager.swap_out(seq)
    assert not manager.can_swap_out(other)
    assert manager.can_swap_in(seq)
    seq.token_ids += tokens("k")
    assert manager.can_swap_in(seq)
    admit(manager, 2, "x")
    assert not manager.can_swap_in(seq)
    manager.check()


def test_freeing_a_swapped_sequence_frees_its_cpu_blocks() -> None:
    manager = BlockManager(4, BLOCK_SIZE, num_cpu_blocks=2)
    seq = admit(manager, 0, "abcd efgh")
    manager.swap_out(seq)
    assert manager.cpu_pool.num_free_blocks == 0
    manager.free(seq)
    manager.check()
    assert manager.cpu_pool.num_free_blocks == 2


def test_prompt_logprobs_hit_nothing() -> None:
    """Cached tokens are not computed, so nobody could say how likely they were."""
    manager = BlockManager(8, BLOCK_SIZE)
    admit(manager, 0, "abcd efgh")
    params = SamplingParams(prompt_logprobs=0)
    seq = make_sequence(1, tokens("abcd efgh i"), sampling_params=params)
    assert manager.get_cached_blocks(seq) == []


# -- check() --


def move_reference(manager: BlockManager) -> None:
    manager.pool.ref_counts[manager.block_tables[0][0]] += 1


def lose_free_block(manager: BlockManager) -> None:
    manager.pool.free_queue.popitem()


def free_a_held_block(manager: BlockManager) -> None:
    manager.pool.free_queue[manager.block_tables[0][0]] = None


def drop_from_table(manager: BlockManager) -> None:
    manager.block_tables[0].pop()


def forget_sequence(manager: BlockManager) -> None:
    del manager.block_tables[0]


def hold_a_block_twice(manager: BlockManager) -> None:
    block_id = manager.block_tables[0][0]
    manager.block_tables[0].append(block_id)
    manager.pool.ref_counts[block_id] += 1


def find_the_wrong_block(manager: BlockManager) -> None:
    block_hash = next(iter(manager.pool.cached_blocks))
    manager.pool.cached_blocks[block_hash] = 7


def find_what_is_gone(manager: BlockManager) -> None:
    manager.pool.block_hashes[manager.block_tables[0][0]] = None


def lose_a_cpu_block(manager: BlockManager) -> None:
    manager.cpu_pool.free_queue.popitem()


def forget_a_swapped_sequence(manager: BlockManager) -> None:
    del manager.swapped_tables[1]


def be_in_both_pools(manager: BlockManager) -> None:
    manager.swapped_tables[0] = manager.swapped_tables.pop(1)


def lose_from_hash_map(manager: BlockManager) -> None:
    manager.pool.cached_blocks.popitem()


@pytest.mark.parametrize(
    "tamper",
    [
        move_reference,
        lose_free_block,
        free_a_held_block,
        drop_from_table,
        forget_sequence,
        hold_a_block_twice,
        find_the_wrong_block,
        find_what_is_gone,
        lose_from_hash_map,
        lose_a_cpu_block,
        forget_a_swapped_sequence,
        be_in_both_pools,
    ],
)
def test_check_notices(tamper: Callable[[BlockManager], None]) -> None:
    """A checker that never fails checks nothing."""
    manager = BlockManager(8, BLOCK_SIZE, num_cpu_blocks=3)
    admit(manager, 0, "abcd efgh i")
    manager.swap_out(admit(manager, 1, "xyz"))
    manager.check()
    tamper(manager)
    with pytest.raises(AssertionError):
        manager.check()


def test_a_block_is_not_freed_twice() -> None:
    pool = BlockPool(2)
    block_id = pool.allocate()
    pool.free(block_id)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(block_id)


# -- block hashes --


class ConstantHash(int):
    """A token id whose hash() collides with that of every other."""

    def __hash__(self) -> int:
        return 1


def test_equal_content_is_the_same_object() -> None:
    table = BlockHashTable()
    root = table.get(None, None)
    first = table.get(root, (1, 2, 3, 4))
    assert table.get(table.get(None, None), (1, 2, 3, 4)) is first
    assert table.get(first, (1, 2, 3, 4)) is not first
    assert table.get(root, (1, 2, 3, 5)) is not first
    assert table.get(table.get(None, "salt"), (1, 2, 3, 4)) is not first


def test_colliding_hashes_are_told_apart() -> None:
    """Python's hash() of two contents may be equal (here: -1 and -2, and one made to be): it never
    decides alone."""
    assert hash((-1, 5)) == hash((-2, 5))
    table = BlockHashTable()
    root = table.get(None, None)
    assert table.get(root, (-1, 5)) is not table.get(root, (-2, 5))
    crowd = [(ConstantHash(i), ConstantHash(j)) for i in range(8) for j in range(8)]
    assert len(set(map(hash, crowd))) == 1
    assert len({id(block_hash) for block_hash in [table.get(root, t) for t in crowd]}) == 64


def test_colliding_prompts_do_not_share_blocks() -> None:
    """The same through the manager: a request never gets the KV of another's tokens."""
    manager = BlockManager(16, BLOCK_SIZE)
    prompts = [[ConstantHash(token) for token in tokens(text)] for text in ("abcd e", "efgh e")]
    for i, prompt in enumerate(prompts):
        seq = make_sequence(i, prompt)
        assert manager.get_cached_blocks(seq) == []
        manager.allocate(seq, [])
        compute(manager, seq)
    again = make_sequence(9, prompts[0])
    assert manager.get_cached_blocks(again) == manager.block_tables[0][:1]


def test_hashes_are_forgotten_when_nobody_refers_to_them() -> None:
    """An engine that runs for a year does not remember a year of prompts."""
    manager = BlockManager(4, BLOCK_SIZE)
    for i in range(50):
        manager.free(admit(manager, i, chr(ord("A") + i) * 9))
    gc.collect()
    num_held = len(manager.pool.cached_blocks)
    assert 0 < num_held <= 4
    num_parents = 1 + num_held  # of each held hash at most one more, and the common root
    assert len(manager._hash_table._interned) <= num_held + num_parents
    assert manager.reset_prefix_cache()
    gc.collect()
    assert len(manager._hash_table._interned) == 0


def test_a_very_long_chain_is_forgotten_without_a_deep_recursion() -> None:
    """Each hash holds its parent: a context of a million tokens is a chain of that many blocks."""
    table = BlockHashTable()
    block_hash = table.get(None, None)
    for token in range(100_000):
        block_hash = table.get(block_hash, (token,))
    del block_hash
    gc.collect()
    assert len(table._interned) == 0


# -- all of it together, against a model --


class BlockManagerMachine(RuleBasedStateMachine):
    """Random calls, as a scheduler may make them, beside the simplest possible bookkeeping.

    The model: `content` says what a cache of perfect memory would hold in each block, namely the
    whole prefix up to that block's end. Whatever the manager calls cached must be exactly that.
    `cpu_content` says the same of CPU blocks.
    """

    NUM_BLOCKS = 6
    NUM_CPU_BLOCKS = 5

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(self.NUM_BLOCKS, 2, num_cpu_blocks=self.NUM_CPU_BLOCKS)
        self.sequences: dict[int, Sequence] = {}
        self.swapped: dict[int, Sequence] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.cpu_content: dict[int, tuple[int, ...]] = {}
        self.num_made = 0

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9), chunk=st.integers(1, 9))
    def admit(self, prompt: list[int], chunk: int) -> None:
        """Admit a sequence if it fits, and compute its first chunk."""
        seq = make_sequence(self.num_made, prompt)
        cached = self.manager.get_cached_blocks(seq)
        for i, block_id in enumerate(cached):
            assert self.content[block_id] == tuple(prompt[: 2 * i + 2]), "a hit on other content"
        free_before = self.manager.num_free_blocks
        if not self.manager.can_allocate(seq, cached):
            return
        self.num_made += 1
        self.manager.allocate(seq, cached)
        self.sequences[seq.seq_id] = seq
        self.compute(seq, min(chunk, seq.num_tokens - seq.num_computed_tokens))
        assert free_before - self.manager.num_free_blocks <= self.manager.num_blocks_for(
            len(prompt)
        )

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1), chunk=st.integers(1, 4))
    def advance(self, data: st.DataObject, token: int, chunk: int) -> None:
        """A chunk more, or a sampled token and its decode."""
        seq = self.sequences[data.draw(st.sampled_from(sorted(self.sequences)))]
        if seq.num_computed_tokens == seq.num_tokens:
            seq.token_ids.append(token)
        chunk = min(chunk, seq.num_tokens - seq.num_computed_tokens)
        if self.manager.can_append(seq, chunk):
            self.compute(seq, chunk)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def fork(self, data: st.DataObject, token: int) -> None:
        """A branch, with a token of its own, on the blocks of a sequence that is all computed."""
        parent = self.sequences[data.draw(st.sampled_from(sorted(self.sequences)))]
        if parent.num_computed_tokens < parent.num_tokens:
            return
        child = make_sequence(self.num_made, parent.token_ids)
        self.num_made += 1
        free_before = self.manager.num_free_blocks
        self.manager.fork(parent, child)
        child.token_ids.append(token)
        self.sequences[child.seq_id] = child
        assert self.manager.num_free_blocks == free_before

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.sequences)))
        if self.manager.can_swap_out(self.sequences[seq_id]):
            self.swapped[seq_id] = self.sequences.pop(seq_id)
            pairs = self.manager.swap_out(self.swapped[seq_id])
            self.cpu_content |= {cpu_block: self.content[block] for block, cpu_block in pairs}

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.swapped)))
        if self.manager.can_swap_in(self.swapped[seq_id]):
            self.sequences[seq_id] = self.swapped.pop(seq_id)
            pairs = self.manager.swap_in(self.sequences[seq_id])
            self.content |= {block: self.cpu_content[cpu_block] for cpu_block, block in pairs}

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), chunk=st.integers(1, 9))
    def fail(self, data: st.DataObject, chunk: int) -> None:
        """A step that failed: whatever it promised, everything is forgotten."""
        seq = self.sequences[data.draw(st.sampled_from(sorted(self.sequences)))]
        chunk = min(chunk, seq.num_tokens - seq.num_computed_tokens)
        if chunk and self.manager.can_append(seq, chunk):
            self.copy_on_write(seq)
            self.manager.append(seq, chunk)
        self.manager.reset()
        for dictionary in (self.sequences, self.swapped, self.content, self.cpu_content):
            dictionary.clear()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A sequence ends, or is preempted."""
        self.manager.free(self.sequences.pop(data.draw(st.sampled_from(sorted(self.sequences)))))

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def free_swapped(self, data: st.DataObject) -> None:
        self.manager.free(self.swapped.pop(data.draw(st.sampled_from(sorted(self.swapped)))))

    @rule()
    def reset(self) -> None:
        assert self.manager.reset_prefix_cache() is not bool(self.sequences)

    def compute(self, seq: Sequence, chunk: int) -> None:
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + chunk
        self.copy_on_write(seq)
        self.manager.append(seq, chunk)
        seq.num_computed_tokens = end
        table = self.manager.block_tables[seq.seq_id]
        for i in range(start // 2, self.manager.num_blocks_for(end)):
            self.content[table[i]] = tuple(seq.token_ids[: min(2 * i + 2, end)])

    def copy_on_write(self, seq: Sequence) -> None:
        copied = self.manager.copy_on_write(seq)
        if copied is not None:
            assert seq.num_computed_tokens % 2, "a full block was copied"
            self.content[copied[1]] = self.content[copied[0]]
        block_table = self.manager.block_tables[seq.seq_id]
        if seq.num_computed_tokens % 2:
            assert self.manager.pool.ref_counts[block_table[-1]] == 1, "others would see the write"

    @invariant()
    def the_books_agree(self) -> None:
        self.manager.check()
        for seq_id, seq in self.sequences.items():
            table = self.manager.block_tables[seq_id]
            assert len(table) == self.manager.num_blocks_for(seq.num_computed_tokens)
            for i, block_id in enumerate(table):
                end = min(2 * i + 2, seq.num_computed_tokens)
                assert self.content[block_id] == tuple(seq.token_ids[:end]), "overwritten"
        for seq_id, seq in self.swapped.items():
            for i, block_id in enumerate(self.manager.swapped_tables[seq_id]):
                end = min(2 * i + 2, seq.num_computed_tokens)
                assert self.cpu_content[block_id] == tuple(seq.token_ids[:end]), "overwritten"

    def teardown(self) -> None:
        """When no sequence is left, every block is free."""
        for seq in [*self.sequences.values(), *self.swapped.values()]:
            self.manager.free(seq)
        self.manager.check()
        assert self.manager.pool.ref_counts == [0] * self.NUM_BLOCKS
        assert self.manager.cpu_pool.ref_counts == [0] * self.NUM_CPU_BLOCKS


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
