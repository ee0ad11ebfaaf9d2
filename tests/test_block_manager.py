"""Which sequence owns which block: block tables, the free queue, the prefix cache, pending copies.

block_size is 4, except in the last section. Token ids are letters: tokens("abcd efgh ij") is 10
tokens, of which 8 fill two blocks.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from fakes import FakeEngine, make_sequence, reference_output
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from nanoserve.block_manager import BlockHashTable, BlockManager, BlockPool
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import BlockPair, Sequence

BLOCK_SIZE = 4


def tokens(text: str) -> list[int]:
    """One token per letter. Spaces only show the blocks."""
    return [ord(letter) for letter in text.replace(" ", "")]


def admit(manager: BlockManager, seq_id: int, text: str, salt: str | None = None) -> Sequence:
    """A new sequence that holds blocks for the tokens of `text`; all of them are computed."""
    seq = make_sequence(seq_id, tokens(text), cache_salt=salt)
    manager.allocate(seq, manager.get_cached_blocks(seq))
    compute(manager, seq)
    return seq


def compute(manager: BlockManager, seq: Sequence) -> list[int]:
    """Compute all known tokens of `seq`. Returns its new block ids."""
    num_tokens = seq.num_uncomputed_tokens
    assert manager.can_append(seq, num_tokens)
    first_new_block, new_block_ids = manager.append(seq, num_tokens)
    assert manager.block_tables[seq.seq_id][first_new_block:] == new_block_ids
    seq.num_computed_tokens += num_tokens
    manager.check()
    return new_block_ids


def hits(manager: BlockManager, text: str, salt: str | None = None) -> list[int]:
    """The cached blocks of a new request with this prompt."""
    return manager.get_cached_blocks(make_sequence(999, tokens(text), cache_salt=salt))


# -- block tables --


def test_the_example_of_the_module() -> None:
    """Two sequences share one full block. Each has a last block of its own."""
    manager = BlockManager(num_blocks=8, block_size=BLOCK_SIZE)
    admit(manager, 0, "abcd efx")
    admit(manager, 1, "abcd efy")
    first, second = manager.block_tables[0], manager.block_tables[1]
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert [manager.pool.ref_counts[i] for i in (first[0], first[1], second[1])] == [2, 1, 1]
    assert manager.num_free_blocks == 5


def test_a_sequence_gets_a_block_only_when_it_needs_one() -> None:
    """5 tokens in blocks of 4 need 2 blocks; the next three tokens fit into the second."""
    manager = BlockManager(8, BLOCK_SIZE)
    seq = admit(manager, 0, "abcd e")
    num_new = []
    for letter in "fghij":
        seq.token_ids += tokens(letter)
        num_new.append(len(compute(manager, seq)))
    assert num_new == [0, 0, 0, 1, 0]
    assert [manager.num_blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_block_states() -> None:
    """FREE, ALLOCATED, SWAPPED, FREE again."""
    manager = BlockManager(1, BLOCK_SIZE, num_cpu_blocks=1)

    def states() -> list[str]:
        return [pool.get_state(0).value for pool in (manager.pool, manager.cpu_pool)]

    assert states() == ["free", "free"]
    seq = admit(manager, 0, "abcd")
    assert states() == ["allocated", "free"]
    manager.swap_out(seq)
    assert states() == ["free", "swapped"]
    manager.free(seq)
    assert states() == ["free", "free"]


def test_questions_change_nothing() -> None:
    """can_* and get_* change no state."""
    manager = BlockManager(4, BLOCK_SIZE, num_cpu_blocks=4)
    seq = admit(manager, 0, "abcd efgh i")
    other = make_sequence(1, tokens("abcd efgh jklm n"))

    def state() -> list[Any]:
        return [dict(manager.block_tables), list(manager.pool.free_queue), manager.num_hit_tokens]

    before = state()
    assert manager.can_allocate(other, manager.get_cached_blocks(other)) is False
    assert [manager.can_append(seq, num_tokens) for num_tokens in (3, 7, 8)] == [True, True, False]
    assert manager.can_swap_out(seq)
    assert state() == before


def test_a_cached_block_in_the_free_queue_is_not_counted_twice() -> None:
    """A hit takes its block out of the free queue: of 3 free blocks, 2 hits leave one."""
    manager = BlockManager(3, BLOCK_SIZE)
    manager.free(admit(manager, 0, "abcd efgh"))
    fits = make_sequence(1, tokens("abcd efgh ijkl"))
    assert manager.can_allocate(fits, manager.get_cached_blocks(fits))
    does_not = make_sequence(2, tokens("abcd efgh ijkl m"))
    assert not manager.can_allocate(does_not, manager.get_cached_blocks(does_not))


# -- the free queue --


def test_blocks_are_taken_least_recently_used_first() -> None:
    """Blocks are reused in the order in which they were freed."""
    manager = BlockManager(3, BLOCK_SIZE)
    sequences = [admit(manager, i, text) for i, text in enumerate(["aaaa", "bbbb", "cccc"])]
    tables = [manager.block_tables[i][0] for i in range(3)]
    for i in (1, 2, 0):
        manager.free(sequences[i])
    assert [manager.pool.allocate() for _ in range(3)] == [tables[1], tables[2], tables[0]]


def test_of_one_request_the_tail_is_evicted_first() -> None:
    """A beginning is more likely to be shared than the tail, and the tail is useless without it."""
    manager = BlockManager(4, BLOCK_SIZE)
    manager.free(admit(manager, 0, "abcd efgh ijkl mnop"))
    found = []
    for i in range(4):
        found.append(len(hits(manager, "abcd efgh ijkl mnop q")))
        admit(manager, 10 + i, "xyz")
    assert found == [4, 3, 2, 1]


def test_a_block_that_cannot_be_found_goes_first() -> None:
    """A partly filled block is not in the prefix cache, so it is reused before a cached one."""
    manager = BlockManager(3, BLOCK_SIZE)
    manager.free(admit(manager, 0, "abcd"))
    seq = admit(manager, 1, "xy")
    [half_filled] = manager.block_tables[1]
    manager.free(seq)
    assert next(iter(manager.pool.free_queue)) == half_filled


def test_a_hit_takes_its_block_out_of_the_middle_of_the_queue() -> None:
    """Freed again, the block is the most recently used one."""
    manager = BlockManager(3, BLOCK_SIZE)
    for i, text in enumerate(["aaaa", "bbbb", "cccc"]):
        manager.free(admit(manager, i, text))
    first, middle, last = manager.pool.free_queue
    assert hits(manager, "bbbb b") == [middle]
    seq = make_sequence(3, tokens("bbbb b"))
    manager.allocate(seq, [middle])
    assert list(manager.pool.free_queue) == [first, last]
    manager.free(seq)
    assert list(manager.pool.free_queue) == [first, last, middle]


# -- the prefix cache --


@pytest.mark.parametrize(
    ("prompt", "num_hits"),
    [("abc", 0), ("abcd", 0), ("abcd e", 1), ("abcd efgh", 1), ("abcd efgh i", 2)],
)
def test_the_last_token_is_always_computed(prompt: str, num_hits: int) -> None:
    """Its logits are needed, also if one or two full blocks hold the whole prompt."""
    manager = BlockManager(8, BLOCK_SIZE)
    manager.free(admit(manager, 0, "abcd efgh ijkl"))
    assert len(hits(manager, prompt)) == num_hits
    seq = admit(manager, 1, prompt)
    assert seq.num_computed_tokens == seq.num_tokens
    assert (manager.num_queried_tokens, manager.num_hit_tokens) == (
        12 + len(seq.token_ids),
        4 * num_hits,
    )


@pytest.mark.parametrize("num_tokens", [4, 8, 12, 16])
def test_a_wholly_cached_prompt_gives_the_same_tokens(num_tokens: int) -> None:
    """At exact multiples of the block size, with an empty and with a full prefix cache."""
    engine = FakeEngine(num_blocks=32, block_size=BLOCK_SIZE)
    for cached in (0, num_tokens - 4):
        seq = engine.add(range(num_tokens), max_tokens=6)
        engine.run()
        assert seq.num_cached_tokens == cached
        assert seq.output_token_ids == reference_output(list(range(num_tokens)), 6)


def test_two_requests_of_one_step_share() -> None:
    """A block can be found from the moment when it is allocated for tokens of the coming step."""
    engine = FakeEngine(block_size=BLOCK_SIZE)
    sequences = [engine.add(range(10), max_tokens=4) for _ in range(2)]
    step = engine.step()
    assert [item.num_scheduled_tokens for item in step.scheduled] == [10, 2]
    assert sequences[1].num_cached_tokens == 8
    engine.run()
    for seq in sequences:
        assert seq.output_token_ids == reference_output(list(range(10)), 4)


def test_a_block_filled_by_a_token_in_flight_is_cached_one_step_later() -> None:
    """The hash needs the value of the token, which the step after it knows."""
    manager = BlockManager(8, BLOCK_SIZE)
    seq = admit(manager, 0, "abc")
    seq.num_output_placeholders = 1
    compute(manager, seq)
    assert not manager.pool.cached_blocks
    seq.token_ids += tokens("d")  # the next token is in flight
    compute(manager, seq)
    assert hits(manager, "abcd e") == manager.block_tables[0][:1]


def test_the_second_turn_of_a_chat_hits_the_whole_first_turn() -> None:
    """Blocks filled by generated tokens are cached too."""
    engine = FakeEngine(block_size=BLOCK_SIZE)
    first = engine.add(range(6), max_tokens=11)
    engine.run()
    history = first.token_ids  # 17 tokens; the KV of the last one was never computed
    second = engine.add([*history, 7, 8, 9], max_tokens=3)
    engine.run()
    assert second.num_cached_tokens == 16
    assert second.output_token_ids == reference_output([*history, 7, 8, 9], 3)


def test_a_cache_salt_separates() -> None:
    """Only requests with the same salt share blocks. Otherwise a fast answer would tell a user that
    another user sent the same prompt."""
    manager = BlockManager(8, BLOCK_SIZE)
    admit(manager, 0, "abcd efgh", salt="alice")
    assert len(hits(manager, "abcd efgh i", salt="alice")) == 2
    assert not any(hits(manager, "abcd efgh i", salt=salt) for salt in ("bob", "", None))


def test_prompt_logprobs_hit_nothing() -> None:
    """Cached tokens are not computed, so there would be no logits for their logprobs."""
    manager = BlockManager(8, BLOCK_SIZE)
    admit(manager, 0, "abcd efgh")
    params = SamplingParams(prompt_logprobs=0)
    seq = make_sequence(1, tokens("abcd efgh i"), sampling_params=params)
    assert manager.get_cached_blocks(seq) == []


def test_reset_forgets_everything() -> None:
    """After a failed step all blocks are free, and no copy is pending."""
    manager = BlockManager(8, BLOCK_SIZE, num_cpu_blocks=4)
    compute(manager, fork(manager, admit(manager, 0, "abcd efgh ij"), 1, "k"))
    swapped = admit(manager, 2, "abcd efgh")
    manager.swap_out(swapped)
    manager.swap_out(admit(manager, 3, "abcd"))
    manager.swap_in(swapped)
    manager.reset()
    assert manager.take_copies() == ((), (), ())
    assert hits(manager, "abcd efgh ijkl m") == []
    assert (manager.num_free_blocks, manager.cpu_pool.num_free_blocks) == (8, 4)
    assert not (manager.block_tables or manager.swapped_tables)
    manager.check()


def test_reset_prefix_cache_refuses_while_a_sequence_holds_blocks() -> None:
    """Then nothing changes."""
    manager = BlockManager(8, BLOCK_SIZE)
    seq = admit(manager, 0, "abcd efgh")
    assert manager.reset_prefix_cache() is False
    assert len(hits(manager, "abcd efgh i")) == 2
    manager.free(seq)
    assert manager.reset_prefix_cache() is True
    assert hits(manager, "abcd efgh i") == []
    manager.check()


def test_without_prefix_caching_nothing_is_found() -> None:
    manager = BlockManager(8, BLOCK_SIZE, enable_prefix_caching=False)
    admit(manager, 0, "abcd efgh")
    assert hits(manager, "abcd efgh i") == []
    assert not manager.pool.cached_blocks


# -- fork and copy-on-write --


def fork(manager: BlockManager, parent: Sequence, seq_id: int, text: str) -> Sequence:
    """A branch on the blocks of `parent`: the parent's tokens, then the tokens of `text`."""
    child = make_sequence(seq_id, parent.token_ids + tokens(text))
    manager.fork(parent, child)
    manager.check()
    return child


def test_the_copy_on_write_example_of_the_module() -> None:
    """Two branches share [2, 0]. The first to write gets a copy; the other keeps the block."""
    manager = BlockManager(8, BLOCK_SIZE)
    parent = admit(manager, 0, "abcd ef")
    full, partial = manager.block_tables[0]
    child = fork(manager, parent, 1, "y")
    assert manager.block_tables[1] == [full, partial]
    assert [manager.pool.ref_counts[i] for i in (full, partial)] == [2, 2]
    first_new_block, [own] = manager.append(child, 1)
    assert (first_new_block, manager.block_tables[1]) == (1, [full, own])
    assert [manager.pool.ref_counts[i] for i in (full, partial, own)] == [2, 1, 1]
    parent.token_ids += tokens("x")
    assert manager.append(parent, 1) == (2, [])
    assert manager.take_copies() == ((), (), ((partial, own),))
    assert manager.take_copies() == ((), (), ())
    assert manager.num_free_blocks == 5


def test_a_copy_and_new_blocks_at_once() -> None:
    """The copy replaces the last block, and the new blocks follow."""
    manager = BlockManager(8, BLOCK_SIZE)
    parent = admit(manager, 0, "abcd ef")
    child = fork(manager, parent, 1, "yz efgh i")
    first_new_block, new_block_ids = manager.append(child, 7)
    assert (first_new_block, len(new_block_ids)) == (1, 3)
    assert manager.block_tables[1] == [manager.block_tables[0][0], *new_block_ids]


def test_what_a_branch_fills_can_be_found() -> None:
    """By the tokens of the parent, then those of the branch."""
    manager = BlockManager(8, BLOCK_SIZE)
    parent = admit(manager, 0, "abcd ef")
    compute(manager, fork(manager, parent, 1, "yz"))
    assert hits(manager, "abcd efyz !") == manager.block_tables[1]
    assert hits(manager, "abcd efxz !") == manager.block_tables[1][:1]


# -- two pools --


def test_swap_out_and_in() -> None:
    """Every block moves to a CPU block, and later to a free KV block. Nothing is computed again."""
    manager = BlockManager(4, BLOCK_SIZE, num_cpu_blocks=3)
    seq = admit(manager, 0, "abcd efgh ij")
    block_table = list(manager.block_tables[0])
    assert manager.can_swap_out(seq)
    manager.swap_out(seq)
    manager.check()
    assert (manager.block_tables, manager.num_free_blocks) == ({}, 4)
    cpu_blocks = manager.swapped_tables[0]
    assert manager.take_copies() == (tuple(zip(block_table, cpu_blocks, strict=True)), (), ())
    assert hits(manager, "abcd efgh i") == block_table[:2], "the KV blocks keep their content"
    assert manager.can_swap_in(seq)
    manager.swap_in(seq)
    manager.check()
    back = tuple(zip(cpu_blocks, manager.block_tables[0], strict=True))
    assert manager.take_copies() == ((), back, ())
    assert (manager.swapped_tables, manager.cpu_pool.num_free_blocks) == ({}, 3)
    assert seq.num_computed_tokens == 10


def test_of_two_copies_into_one_cpu_block_the_last_one_counts() -> None:
    """The first sequence ended while its copy was pending, and the second got its CPU block."""
    manager = BlockManager(2, BLOCK_SIZE, num_cpu_blocks=1)
    first, second = admit(manager, 0, "abcd"), admit(manager, 1, "efgh")
    [kv_block] = manager.block_tables[1]
    manager.swap_out(first)
    manager.free(first)
    manager.swap_out(second)
    assert manager.take_copies().swap_out == ((kv_block, 0),)


def test_can_swap_counts_the_blocks_of_the_other_pool() -> None:
    """can_swap_in asks for KV blocks for all known tokens."""
    manager = BlockManager(4, BLOCK_SIZE, num_cpu_blocks=2)
    seq = admit(manager, 0, "abcd efgh")
    other = admit(manager, 1, "ij")
    manager.swap_out(seq)
    assert not manager.can_swap_out(other)
    seq.token_ids += tokens("k")
    assert manager.can_swap_in(seq)
    admit(manager, 2, "x")
    assert not manager.can_swap_in(seq)


def test_slots_of_rejected_drafts_are_swapped_too() -> None:
    """A sequence of 6 tokens holds 3 blocks: 4 drafts were computed behind it, and rejected."""
    manager = BlockManager(4, BLOCK_SIZE, num_cpu_blocks=4)
    seq = admit(manager, 0, "abcd ef")
    manager.append(seq, 4)
    manager.check()
    manager.swap_out(seq)
    other = admit(manager, 1, "ghij k")
    assert not manager.can_swap_in(seq), "2 blocks are free, and 3 must come back"
    manager.free(other)
    assert manager.can_swap_in(seq)
    manager.swap_in(seq)
    manager.check()


# -- check() --


def hold_a_block_twice(manager: BlockManager) -> None:
    block_id = manager.block_tables[0][0]
    manager.block_tables[0].append(block_id)
    manager.pool.ref_counts[block_id] += 1


def set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value


TAMPERINGS: dict[str, Callable[[BlockManager], object]] = {
    "a reference too many": lambda m: set_item(m.pool.ref_counts, m.block_tables[0][0], 2),
    "a free block is not queued": lambda m: m.pool.free_queue.popitem(),
    "a held block is queued": lambda m: set_item(m.pool.free_queue, m.block_tables[0][0], None),
    "a block is missing in its table": lambda m: m.block_tables[0].pop(),
    "a table is missing": lambda m: m.block_tables.pop(0),
    "a block is held twice by one sequence": hold_a_block_twice,
    "a hash leads to the wrong block": lambda m: set_item(
        m.pool.cached_blocks, next(iter(m.pool.cached_blocks)), 7
    ),
    "a block lacks its hash": lambda m: set_item(m.pool.block_hashes, m.block_tables[0][0], None),
    "a hash is missing in the map": lambda m: m.pool.cached_blocks.popitem(),
    "a free CPU block is not queued": lambda m: m.cpu_pool.free_queue.popitem(),
    "a swapped table is missing": lambda m: m.swapped_tables.pop(1),
    "a sequence is in both pools": lambda m: set_item(m.swapped_tables, 0, m.swapped_tables.pop(1)),
}


@pytest.mark.parametrize("what", TAMPERINGS)
def test_check_notices(what: str) -> None:
    """check() fails for each kind of damage."""
    manager = BlockManager(8, BLOCK_SIZE, num_cpu_blocks=3)
    admit(manager, 0, "abcd efgh i")
    manager.swap_out(admit(manager, 1, "xyz"))
    manager.check()
    TAMPERINGS[what](manager)
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
    """A token id with the same hash() as all others of this class."""

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


def test_colliding_prompts_do_not_share_blocks() -> None:
    """Python's hash() of two contents may be equal; the contents are compared too."""
    manager = BlockManager(16, BLOCK_SIZE)
    prompts = [[ConstantHash(token) for token in tokens(text)] for text in ("abcd e", "efgh e")]
    assert len({hash(tuple(prompt)) for prompt in prompts}) == 1
    for i, prompt in enumerate(prompts):
        seq = make_sequence(i, prompt)
        assert manager.get_cached_blocks(seq) == []
        manager.allocate(seq, [])
        compute(manager, seq)
    again = make_sequence(9, prompts[0])
    assert manager.get_cached_blocks(again) == manager.block_tables[0][:1]


def test_unused_hashes_are_dropped() -> None:
    """An engine that runs for a year does not keep the prompts of a year."""
    manager = BlockManager(4, BLOCK_SIZE)
    for i in range(50):
        manager.free(admit(manager, i, chr(ord("A") + i) * 9))
    gc.collect()
    num_held = len(manager.pool.cached_blocks)
    assert 0 < num_held <= 4
    num_parents = 1 + num_held  # at most one for each held hash, and the common root
    assert len(manager._hash_table._interned) <= num_held + num_parents
    assert manager.reset_prefix_cache()
    gc.collect()
    assert len(manager._hash_table._interned) == 0


def test_a_very_long_chain_is_dropped_without_a_deep_recursion() -> None:
    """Each hash holds its parent: a context of a million tokens is a long chain of blocks."""
    table = BlockHashTable()
    block_hash = table.get(None, None)
    for token in range(50_000):
        block_hash = table.get(block_hash, (token,))
    del block_hash
    gc.collect()
    assert len(table._interned) == 0


# -- random calls, against a model --


Content = dict[int, tuple[int, ...]]  # block id -> the prefix up to the end of the block


class BlockManagerMachine(RuleBasedStateMachine):
    """Random calls, as a scheduler may make them, beside the simplest model of a KV cache.

    `content` holds what a data plane would have in each KV block: the whole prefix up to the end of
    the block. `cpu_content` holds the same for CPU blocks. A step makes the pending copies, then it
    writes the tokens of one sequence. Swap-outs stay pending until the next step.
    """

    NUM_BLOCKS = 6
    NUM_CPU_BLOCKS = 5

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(self.NUM_BLOCKS, 2, num_cpu_blocks=self.NUM_CPU_BLOCKS)
        self.sequences: dict[int, Sequence] = {}
        self.swapped: dict[int, Sequence] = {}
        self.content: Content = {}
        self.cpu_content: Content = {}
        self.num_made = 0

    def draw(self, data: st.DataObject, sequences: dict[int, Sequence]) -> Sequence:
        return sequences[data.draw(st.sampled_from(sorted(sequences)))]

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9), chunk=st.integers(1, 9))
    def admit(self, prompt: list[int], chunk: int) -> None:
        """Admit a sequence if it fits, and compute its first chunk."""
        seq = make_sequence(self.num_made, prompt)
        cached = self.manager.get_cached_blocks(seq)
        for i, block_id in enumerate(cached):
            assert self.content[block_id] == tuple(prompt[: 2 * i + 2]), "a hit on other content"
        num_free = self.manager.num_free_blocks
        if not self.manager.can_allocate(seq, cached):
            return
        self.num_made += 1
        self.manager.allocate(seq, cached)
        self.sequences[seq.seq_id] = seq
        self.compute(seq, chunk)
        num_taken = num_free - self.manager.num_free_blocks
        assert num_taken <= self.manager.num_blocks_for(len(prompt))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1), chunk=st.integers(1, 4))
    def advance(self, data: st.DataObject, token: int, chunk: int) -> None:
        """Compute a chunk, or append a sampled token and decode."""
        seq = self.draw(data, self.sequences)
        if seq.num_uncomputed_tokens == 0:
            seq.token_ids.append(token)
        if self.manager.can_append(seq, min(chunk, seq.num_uncomputed_tokens)):
            self.compute(seq, chunk)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), token=st.integers(0, 1))
    def fork(self, data: st.DataObject, token: int) -> None:
        """A branch with one token of its own, if all tokens of the parent are computed."""
        parent = self.draw(data, self.sequences)
        if parent.num_uncomputed_tokens:
            return
        child = make_sequence(self.num_made, parent.token_ids)
        self.num_made += 1
        num_free = self.manager.num_free_blocks
        self.manager.fork(parent, child)
        child.token_ids.append(token)
        self.sequences[child.seq_id] = child
        assert self.manager.num_free_blocks == num_free

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        seq = self.draw(data, self.sequences)
        if self.manager.can_swap_out(seq):
            self.swapped[seq.seq_id] = self.sequences.pop(seq.seq_id)
            self.manager.swap_out(seq)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        seq = self.draw(data, self.swapped)
        if self.manager.can_swap_in(seq):
            self.sequences[seq.seq_id] = self.swapped.pop(seq.seq_id)
            self.manager.swap_in(seq)
            self.make_copies()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), chunk=st.integers(1, 9))
    def fail(self, data: st.DataObject, chunk: int) -> None:
        """A step fails: everything is forgotten, and nothing is left to copy."""
        seq = self.draw(data, self.sequences)
        chunk = min(chunk, seq.num_uncomputed_tokens)
        if chunk and self.manager.can_append(seq, chunk):
            self.manager.append(seq, chunk)
        self.manager.reset()
        for dictionary in (self.sequences, self.swapped, self.content, self.cpu_content):
            dictionary.clear()
        assert not any(self.manager.take_copies())

    @precondition(lambda self: self.sequences or self.swapped)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """A sequence ends, or is preempted."""
        seq = self.draw(data, self.sequences | self.swapped)
        (self.sequences if seq.seq_id in self.sequences else self.swapped).pop(seq.seq_id)
        self.manager.free(seq)

    @rule()
    def reset_prefix_cache(self) -> None:
        assert self.manager.reset_prefix_cache() is not bool(self.sequences)

    def compute(self, seq: Sequence, chunk: int) -> None:
        """One step of one sequence."""
        chunk = min(chunk, seq.num_uncomputed_tokens)
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + chunk
        old_table = list(self.manager.block_tables[seq.seq_id])
        first_new, new_block_ids = self.manager.append(seq, chunk)
        table = self.manager.block_tables[seq.seq_id]
        assert table == old_table[:first_new] + new_block_ids
        copied = self.make_copies()
        pairs = zip(old_table, table[: len(old_table)], strict=True)
        assert copied == [(old, new) for old, new in pairs if old != new]
        assert start % 2 or not copied, "a full block was copied"
        for i in range(start // 2, self.manager.num_blocks_for(end)):
            assert self.manager.pool.ref_counts[table[i]] == 1, "written, and shared"
            self.content[table[i]] = tuple(seq.token_ids[: min(2 * i + 2, end)])
        seq.num_computed_tokens = end

    def make_copies(self) -> list[BlockPair]:
        """The first part of a step. Returns the copies on write."""
        copies = self.manager.take_copies()
        for pairs, source, destination in (
            (copies.swap_out, self.content, self.cpu_content),
            (copies.swap_in, self.cpu_content, self.content),
            (copies.copy_on_write, self.content, self.content),
        ):
            assert len({to for _, to in pairs}) == len(pairs), "a block is written twice"
            destination |= {to: source[block_id] for block_id, to in pairs}
        assert not any(self.manager.take_copies())
        return list(copies.copy_on_write)

    @invariant()
    def every_block_holds_what_its_sequences_need(self) -> None:
        self.manager.check()
        for seq_id, seq in self.sequences.items():
            table = self.manager.block_tables[seq_id]
            assert len(table) == self.manager.num_blocks_for(seq.num_computed_tokens)
            for i, block_id in enumerate(table):
                end = min(2 * i + 2, seq.num_computed_tokens)
                assert self.content[block_id] == tuple(seq.token_ids[:end]), "overwritten"

    def teardown(self) -> None:
        """When no sequence is left, every block is free."""
        for seq in [*self.sequences.values(), *self.swapped.values()]:
            self.manager.free(seq)
        self.manager.check()
        assert self.manager.pool.ref_counts == [0] * self.NUM_BLOCKS
        assert self.manager.cpu_pool.ref_counts == [0] * self.NUM_CPU_BLOCKS


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=40)
