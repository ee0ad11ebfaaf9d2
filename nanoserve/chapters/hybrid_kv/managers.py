"""Who owns which block, if each group of layers has a block table of its own?

A GroupManager is the core's BlockManager for one group: it allocates, forks, copies on write and
swaps as ever. The groups share one pool. HybridBlockManager is what the scheduler talks to: a
question is about the blocks of all groups, a change is made in each. A sequence of 10 computed
tokens, block_size 4, a window of 6 (-1 is a hole):

    group 0, full       [7, 2, 5]
    group 1, window     [-1, 3, 8]       block 0 lies behind the window of token 10: it is free

*A hole* stands in a block table where a block was. The freed block stays in the prefix cache until
it is taken, like any other.

*A prefix hit* is the longest prefix that all groups still have. A group with a window needs its
last blocks only, those that the next token sees. With "." for what is not found, and a window of 6:

    group 0, full       a b c d e .      5 blocks at most
    group 1, window     . . c d . .      token 20 (behind e) sees blocks d, e: no. Token 16 sees
                                         c, d: yes, the hit has 4 blocks, a hole for a and b.

*May a block be freed while a step in flight still reads it?* With async_scheduling, yes: a step is
scheduled while the GPU computes the one before, whose window begins earlier. The freed block can be
given away, but what is written to it then is launched behind that step, in the order of one stream.

vLLM: vllm/v1/core/: kv_cache_coordinator.py HybridKVCacheCoordinator,
single_type_kv_cache_manager.py SlidingWindowManager (0.32; V0 has none).
"""

from __future__ import annotations

from collections.abc import Sequence as List
from copy import copy
from typing import Any

from nanoserve.block_manager import BlockHash, BlockManager, BlockPool
from nanoserve.chapters.hybrid_kv.groups import KVCacheGroup
from nanoserve.sequence import BlockPair, Sequence

HOLE = -1  # in a block table: the block that stood here lay behind the window
Column = tuple[int, ...]  # of a prefix: one of its blocks in each group


class GroupPool(BlockPool):
    """The one pool, as a group sees it: equal content in another group is another block."""

    group = 0

    def view(self, group: int) -> GroupPool:
        """The same blocks (and the same lists and dicts), for another group."""
        pool = copy(self)
        pool.group = group
        return pool

    def share(self, block_id: int) -> None:
        if block_id != HOLE:
            super().share(block_id)

    def free(self, block_id: int) -> None:
        if block_id != HOLE:
            super().free(block_id)

    def cache(self, block_id: int, block_hash: Any) -> None:
        super().cache(block_id, (self.group, block_hash))

    def find(self, block_hash: Any) -> int | None:
        return self.cached_blocks.get((self.group, block_hash))  # type: ignore[call-overload]


class GroupManager(BlockManager):
    """The block tables of one group of layers. Pools and pending copies are those of all groups."""

    pool: GroupPool

    def __init__(self, number: int, group: KVCacheGroup, manager: HybridBlockManager) -> None:
        super().__init__(0, manager.block_size, manager.enable_prefix_caching)
        self.number, self.group, self.manager = number, group, manager
        self.pool, self.cpu_pool = manager.pool.view(number), manager.cpu_pool

    def hashes_of(self, seq: Sequence, num_blocks: int) -> list[BlockHash]:
        """The same for all groups."""
        return self.manager.hashes_of(seq, num_blocks)

    def find_missing(self, hashes: List[BlockHash], length: int) -> int | None:
        """Of a prefix of `length` blocks, the first that is needed and not in the cache. Between
        there and here no prefix can be a hit: each would need this block, too."""
        needed = range(self.group.num_skipped_blocks(length * self.block_size), length)
        return next((i for i in needed if self.pool.find(hashes[i]) is None), None)

    def find_prefix(self, hashes: List[BlockHash], length: int) -> list[Any]:
        """The blocks of a hit of this length."""
        start = self.group.num_skipped_blocks(length * self.block_size)
        return [HOLE] * start + [self.pool.find(each) for each in hashes[start:length]]

    def num_free_blocks_for(self, seq: Sequence, cached_blocks: list[Column]) -> int:
        """Free blocks that `seq` takes at once, at most. A cached block that others hold is none of
        them; nor does it become free when it falls behind the window."""
        cached = [column[self.number] for column in cached_blocks]
        num_taken_back = sum(self.pool.ref_counts[block] == 0 for block in cached if block != HOLE)
        num_new = self.num_blocks_for(seq.num_tokens) - len(cached)
        most = self.group.most_blocks(seq.num_tokens, len(cached) * self.block_size)
        return min(num_new + num_taken_back, most)

    def num_new_blocks(self, seq: Sequence, num_new_tokens: int) -> int:
        """Blocks that append_slots would take; copy-on-write takes one more."""
        table = self.block_tables[seq.seq_id]
        index, offset = divmod(seq.num_computed_tokens, self.block_size)
        must_copy = offset > 0 and self.pool.ref_counts[table[index]] > 1
        num_blocks = self.num_blocks_for(seq.num_computed_tokens + num_new_tokens)
        return max(0, num_blocks - len(table)) + must_copy

    def free_skipped_blocks(self, seq: Sequence) -> None:
        """Make holes of the blocks behind the window of the next token."""
        table = self.block_tables[seq.seq_id]
        index = self.group.num_skipped_blocks(seq.num_computed_tokens) - 1
        while index >= 0 and table[index] != HOLE:
            self.pool.free(table[index])
            table[index], index = HOLE, index - 1

    def swap_out(self, seq: Sequence) -> None:
        """A hole takes no CPU block."""
        table = self.block_tables[seq.seq_id]
        table[:] = [block_id for block_id in table if block_id != HOLE]
        super().swap_out(seq)

    def swap_in(self, seq: Sequence) -> None:
        super().swap_in(seq)
        num_holes = self.group.num_skipped_blocks(seq.num_computed_tokens)
        self.block_tables[seq.seq_id][:0] = [HOLE] * num_holes


class HybridBlockManager(BlockManager):
    """The block tables of all groups.

    Invariant: all groups have tables of the same sequences, of the same length. A sequence holds no
    block behind the window of the next token, after free_skipped_blocks.
    """

    pool: GroupPool  # of all blocks but the last one, which the runner keeps empty
    kv_cache_groups: List[KVCacheGroup] = ()  # before set_groups: no sequence

    def set_groups(self, groups: List[KVCacheGroup]) -> None:
        self.kv_cache_groups = groups
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.pool = GroupPool(self.num_blocks - 1)
        self.groups = [GroupManager(*each, self) for each in enumerate(self.kv_cache_groups)]
        for any_one in self.groups[:1]:  # who holds blocks at all is seen in any group
            self.block_tables, self.swapped_tables = any_one.block_tables, any_one.swapped_tables
        self.link_copies()

    def link_copies(self) -> None:
        """The copies of all groups are in one list: their order matters."""
        for group in self.groups:
            group.blocks_to_swap_out = self.blocks_to_swap_out
            group.blocks_to_swap_in = self.blocks_to_swap_in
            group.blocks_to_copy = self.blocks_to_copy

    # -- questions --

    def get_computed_blocks(self, seq: Sequence) -> list[Any]:
        """The longest prefix that all groups have, as one Column for each of its blocks."""
        if not self.enable_prefix_caching or seq.sampling_params.skip_reading_prefix_cache:
            return []
        length, groups, missing = (seq.num_tokens - 1) // self.block_size, self.groups, [0]
        hashes = self.hashes_of(seq, length)
        while missing:
            found = [each.find_missing(hashes, length) for each in groups]
            missing = [index for index in found if index is not None]
            length = min(missing, default=length)
            groups = [each for each in groups if each.group.window]  # a full one has shorter ones
        return [*zip(*(each.find_prefix(hashes, length) for each in self.groups), strict=True)]

    def can_allocate(self, seq: Sequence, cached_blocks: list[Any]) -> bool:
        """Do the free blocks hold what the groups hold at once of all known tokens?"""
        num_blocks = sum(group.num_free_blocks_for(seq, cached_blocks) for group in self.groups)
        return num_blocks <= len(self.pool.free_queue)

    def most_blocks(self, num_tokens: int) -> int:
        """KVCacheGroup.most_blocks, of all groups."""
        return sum(group.most_blocks(num_tokens) for group in self.kv_cache_groups)

    def can_append_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        num_blocks = sum(group.num_new_blocks(seq, num_new_tokens) for group in self.groups)
        return num_blocks <= len(self.pool.free_queue)

    def can_swap_out(self, seq: Sequence) -> bool:
        tables = [group.block_tables[seq.seq_id] for group in self.groups]
        num_blocks = sum(len(table) - table.count(HOLE) for table in tables)
        return num_blocks <= len(self.cpu_pool.free_queue)

    def can_swap_in(self, seq: Sequence) -> bool:
        num_tokens = (seq.num_tokens, seq.num_computed_tokens)
        most = [group.most_blocks(*num_tokens) for group in self.kv_cache_groups]
        swapped = [len(group.swapped_tables[seq.seq_id]) for group in self.groups]
        return sum(map(max, most, swapped)) <= len(self.pool.free_queue)

    # -- changes --

    def free_skipped_blocks(self, seq: Sequence) -> None:
        """Free the blocks of `seq` that lie behind the windows of its next token."""
        for group in self.groups:
            group.free_skipped_blocks(seq)

    def allocate(self, seq: Sequence, cached_blocks: list[Any]) -> None:
        for group in self.groups:
            group.allocate(seq, [column[group.number] for column in cached_blocks])
        self.num_queried_tokens += seq.num_tokens
        self.num_hit_tokens += seq.num_computed_tokens

    def append_slots(self, seq: Sequence, num_new_tokens: int) -> tuple[int, list[int]]:
        """Returns what concerns group 0."""
        found = [group.append_slots(seq, num_new_tokens) for group in self.groups]
        return found[0]

    def cache_blocks(self, seq: Sequence, start: int, end: int) -> None:
        for group in self.groups:
            group.cache_blocks(seq, start, end)

    def take_copies(self) -> dict[str, tuple[BlockPair, ...]]:
        copies = super().take_copies()
        self.link_copies()
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        for group in self.groups:
            group.fork(parent, child)

    def swap_out(self, seq: Sequence) -> None:
        self.free_skipped_blocks(seq)
        for group in self.groups:
            group.swap_out(seq)

    def swap_in(self, seq: Sequence) -> None:
        for group in self.groups:
            group.swap_in(seq)

    def free(self, seq: Sequence) -> None:
        for group in self.groups:
            group.free(seq)
