"""Block tables, reference counts and the prefix cache, at any sequence of calls."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve import SamplingParams
from nanoserve.block_manager import BlockManager
from nanoserve.sequence import RequestMetrics, Sequence
from nanoserve.tools.check_blocks import check_blocks


def sequence(seq_id: int, tokens: Any, salt: Any = None) -> Sequence:
    metrics, nothing = RequestMetrics(0), frozenset[int]()
    params = SamplingParams()
    return Sequence(seq_id, "a", list(tokens), params, 9, nothing, 0, metrics, extra_keys=salt)


def start(manager: BlockManager, seq: Sequence) -> int | None:
    """Admit a sequence and compute all of it: how many tokens the cache had; None: no room."""
    cached = manager.get_computed_blocks(seq)
    if not manager.can_allocate(seq, cached):
        return None
    manager.allocate(seq, cached)
    found = seq.num_computed_tokens
    manager.append_slots(seq, seq.num_tokens - found)
    seq.num_computed_tokens = seq.num_tokens
    return found


def test_a_prefix_is_found_up_to_the_last_whole_block() -> None:
    manager = BlockManager(8, 4)
    assert start(manager, sequence(0, range(10))) == 0
    assert start(manager, sequence(1, range(10))) == 8
    assert start(manager, sequence(2, range(8))) == 4  # the last token's logits are needed
    assert start(manager, sequence(3, range(9), salt="a")) == 0  # a salt shares nothing
    assert manager.pool.ref_counts.count(3) == 1
    check_blocks(manager)


def test_the_block_used_least_recently_goes_first_and_beginnings_last() -> None:
    manager = BlockManager(3, 2)
    old = sequence(0, range(6))
    start(manager, old)
    manager.free(old)
    start(manager, sequence(1, [9, 9]))
    new = sequence(2, range(7))
    cached = manager.get_computed_blocks(new)
    assert len(cached) == 2  # the ending has gone
    assert not manager.can_allocate(new, cached)  # the two free blocks are these


def test_before_a_branch_writes_into_a_shared_block_it_gets_a_copy() -> None:
    manager, parent, child = BlockManager(8, 4), sequence(0, range(6)), sequence(1, range(6))
    start(manager, parent)
    manager.fork(parent, child)
    assert manager.block_tables == {0: [0, 1], 1: [0, 1]}
    assert manager.append_slots(child, 1) == (1, [2])  # from index 1 on, its table is [2]
    assert manager.take_copies()["blocks_to_copy"] == ((1, 2),)
    assert manager.append_slots(parent, 1) == (2, [])  # block 1 is its own now


def test_a_block_without_a_name_is_taken_before_one_of_the_cache() -> None:
    manager, seq = BlockManager(4, 2), sequence(0, range(3))
    start(manager, seq)
    manager.free(seq)
    assert [*manager.pool.free_queue] == [1, 2, 3, 0]


CALLS = ("start", "start", "append", "append", "fork", "swap out", "swap in", "free", "reset")


class Simulated:
    """A manager, and what is in its blocks: block -> tokens."""

    def __init__(self, num_blocks: int, size: int, caching: bool, num_cpu: int) -> None:
        self.manager = BlockManager(num_blocks, size, caching, num_cpu)
        self.size, self.live, self.next_id = size, dict[int, Sequence](), 0
        self.kv, self.cpu = dict[int, Any](), dict[int, Any]()

    def carry_out(self) -> None:
        copies = SimpleNamespace(**self.manager.take_copies())
        self.cpu |= {to: self.kv.get(source) for source, to in copies.blocks_to_swap_out}
        self.kv |= {to: self.cpu.get(source) for source, to in copies.blocks_to_swap_in}
        self.kv |= {to: self.kv.get(source) for source, to in copies.blocks_to_copy}

    def write(self, seq: Sequence, start: int) -> None:
        """Store the tokens from `start` on; those before must be there."""
        self.carry_out()
        for index, block in enumerate(self.manager.block_tables[seq.seq_id]):
            first = index * self.size
            if first + self.size > start:
                before = list(self.kv.get(block) or ())[: max(0, start - first)]
                assert before == seq.token_ids[first:start][: self.size]
                self.kv[block] = seq.token_ids[first : first + self.size]

    def do(self, call: str, which: int, number: int) -> None:
        manager = self.manager
        running = [self.live[i] for i in manager.block_tables]
        swapped = [self.live[i] for i in manager.swapped_tables]
        seq = running[which % len(running)] if running else None
        if call == "start":
            new = [*range(number), *range(50, 50 + which % 4)]
            seq = sequence(self.next_id, new, which % 2)
            if (found := start(manager, seq)) is not None:
                self.live[self.next_id], self.next_id = seq, self.next_id + 1
                self.write(seq, found)
        elif call == "reset":
            assert manager.reset_prefix_cache() is not bool(running)
        elif call == "swap in" and swapped and manager.can_swap_in(swapped[0]):
            manager.swap_in(swapped[0])
        elif seq is None:
            return
        elif call == "append" and manager.can_append_slots(seq, number):
            old = seq.num_tokens
            seq.token_ids += range(100 * self.next_id, 100 * self.next_id + number)
            self.next_id += 1
            manager.append_slots(seq, number)
            seq.num_computed_tokens = seq.num_tokens
            self.write(seq, old)
        elif call == "fork":
            child = sequence(self.next_id, seq.token_ids, seq.extra_keys)
            manager.fork(seq, child)
            self.live[self.next_id], self.next_id = child, self.next_id + 1
        elif call == "swap out" and manager.can_swap_out(seq):
            manager.swap_out(seq)
        elif call == "free":
            manager.free(seq)

    def check(self, call: str) -> None:
        check_blocks(self.manager)
        if call in ("swap out", "free"):
            return  # the copies of several may be pending
        self.carry_out()
        for seq_id, table in self.manager.block_tables.items():
            known = [token for block in table for token in self.kv[block]]
            assert known[: self.live[seq_id].num_tokens] == self.live[seq_id].token_ids


@settings(max_examples=150)
@given(
    st.tuples(st.integers(2, 9), st.integers(1, 4), st.booleans(), st.integers(0, 6)),
    st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 99), st.integers(1, 9)), max_size=40),
)
def test_any_calls(sizes: Any, calls: list[Any]) -> None:
    """What a table says is what its sequence knows, and at the end nothing is held."""
    simulated = Simulated(*sizes)
    for call in calls:
        simulated.do(*call)
        simulated.check(call[0])
    manager = simulated.manager
    for seq in simulated.live.values():
        manager.free(seq)
    assert not any(manager.pool.ref_counts) and not any(manager.cpu_pool.ref_counts)
    assert manager.reset_prefix_cache() and not manager.pool.cached_blocks
