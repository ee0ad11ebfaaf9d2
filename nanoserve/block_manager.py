"""Who owns which KV block?

The KV cache is an array of blocks of block_size tokens. A sequence's *block table* lists the blocks
that hold its tokens, in order, from anywhere in the array: virtual memory, with blocks for pages.
This module records which block belongs to which sequence, and never touches a tensor.

Two sequences with block_size 4 and a common prompt "a b c d e f" of which one full block is shared:

    sequence 0   a b c d | e f x      block table [2, 0]
    sequence 1   a b c d | e f y      block table [2, 1]
    block        0: e f x .   1: e f y .   2: a b c d      reference counts [1, 1, 2]

A block whose reference count falls to 0 joins the free queue and keeps its content until another
sequence allocates the block. A later request with the same beginning finds the block by its *block
hash* and takes it back out of the middle of the queue. So the prefix cache costs no memory: the
cache is what free blocks still hold.

*When can a block be found?* From the moment when the block is allocated for tokens that the coming
step will compute. Every layer stores keys and values before it attends, so even two requests of one
step can share the block. If the step fails, the content is unknown, and `reset` forgets everything.
A block that holds drafts is not found before they are accepted (`cache_blocks`).

*Which sequence may write into a shared block?* None. Branches of a request share the blocks of
their prompt. Full blocks are never written again. Before a branch writes into a partly filled
shared block, the branch gets a copy of its own (copy-on-write):

    before the fork    branch 0: [2, 0]                     block 0: e f . .
    after it           branch 0: [2, 0]   branch 1: [2, 0]  reference count of block 0: 2
    branch 1 writes    branch 0: [2, 0]   branch 1: [2, 5]  block 0 copied to 5, then: e f y .

The manager only decides which blocks are copied (copy-on-write, swap out, swap in). Pending copies
wait here until the scheduler puts them into the next step with `take_copies`.

Left out: layers with a sliding window need no early blocks; here all are kept until the sequence
ends. (chapters/hybrid_kv gives them back.)

vLLM: vllm/core/block_manager.py, core/block/, core/evictor.py (V0); vllm/v1/core/:
kv_cache_manager.py, block_pool.py, kv_cache_utils.py (V1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any
from weakref import WeakValueDictionary

from nanoserve.sequence import BlockPair, Sequence


class BlockHash:
    """The content of a sequence from its first token to the end of one block.

    vLLM hashes (parent hash, token ids, extra keys) with SHA-256. We keep the same chain as an
    interned object instead: equal content is the *same* object. So the object itself serves as the
    hash, a lookup costs one dict access a block, and two different prefixes can never collide.
    """

    __slots__ = ("__weakref__", "parent", "token_ids")

    def __init__(self, parent: BlockHash | None, token_ids: Hashable) -> None:
        self.parent = parent
        self.token_ids = token_ids


class BlockPool:
    """The blocks of one device: reference counts, the free queue, and the prefix cache.

    Invariant: a block is in the free queue exactly if its reference count is 0.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        # Least recently used first. An OrderedDict is a doubly linked list with an index: O(1) at
        # both ends and in the middle. vLLM V1 builds the same by hand as FreeKVCacheBlockQueue.
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached_blocks: dict[BlockHash, int] = {}
        self.block_hashes: list[BlockHash | None] = [None] * num_blocks

    def allocate(self) -> int:
        """Take the least recently used free block; its old content can no longer be found."""
        block_id, _ = self.free_queue.popitem(last=False)
        self.uncache(block_id)
        self.ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a reference; a free block leaves the free queue."""
        if self.ref_counts[block_id] == 0:
            del self.free_queue[block_id]
        self.ref_counts[block_id] += 1

    def free(self, block_id: int) -> None:
        """Drop a reference. With the last reference the block joins the free queue: at the end if
        the block can be found by its hash, at the front (to be allocated next) if it cannot."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} freed twice"
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_queue[block_id] = None
            if self.block_hashes[block_id] is None:
                self.free_queue.move_to_end(block_id, last=False)

    def cache(self, block_id: int, block_hash: BlockHash) -> None:
        """Let the block be found by its hash, unless another block has the same content."""
        if self.block_hashes[block_id] is None and block_hash not in self.cached_blocks:
            self.cached_blocks[block_hash] = block_id
            self.block_hashes[block_id] = block_hash

    def uncache(self, block_id: int) -> None:
        """Let the block be found no more: its content is about to be overwritten."""
        block_hash = self.block_hashes[block_id]
        if block_hash is not None:
            del self.cached_blocks[block_hash]
            self.block_hashes[block_id] = None


class BlockManager:
    """The block tables of all sequences that hold blocks. Running sequences hold KV blocks; swapped
    sequences hold blocks of a second pool, in CPU memory.

    Invariant: tools/check_blocks.py passes between any two calls; when no sequence is left, every
    block's reference count is 0.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        num_cpu_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_blocks = num_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.reset()
        # The prefix cache's hit rate is num_hit_tokens / num_queried_tokens, over all admissions.
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self._interned: WeakValueDictionary[Any, BlockHash] = WeakValueDictionary()

    def reset(self) -> None:
        """Forget everything: no block tables, every block free, an empty prefix cache."""
        self.pool = BlockPool(self.num_blocks)
        self.cpu_pool = BlockPool(self.num_cpu_blocks)
        self.block_tables: dict[int, list[int]] = {}  # seq_id -> block ids
        self.swapped_tables: dict[int, list[int]] = {}  # seq_id -> ids of CPU blocks
        # Pending copies. By CPU block: of two copies into one CPU block only the last one counts,
        # because the sequence of the first has ended.
        self.blocks_to_swap_out: dict[int, BlockPair] = {}
        self.blocks_to_swap_in: list[BlockPair] = []
        self.blocks_to_copy: list[BlockPair] = []

    # -- questions (nothing changes) --

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens: 5 tokens in blocks of 4 need 2."""
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, seq: Sequence) -> list[int]:
        """The cached blocks of the longest cached prefix of `seq`, which must hold no blocks yet.

        The last token is never taken from the cache, because its logits are needed. So a prompt of
        exactly two blocks that is wholly cached hits one block: 8 tokens, (8 - 1) // 4 = 1. None
        is taken by a request that skips the cache (sampling_params.skip_reading_prefix_cache): for
        one, prompt logprobs need the logits of every prompt token.
        """
        if not self.enable_prefix_caching or seq.sampling_params.skip_reading_prefix_cache:
            return []
        block_ids: list[int] = []
        max_hits = (seq.num_tokens - 1) // self.block_size
        for block_hash in self.hashes_of(seq, max_hits)[:max_hits]:
            block_id = self.pool.cached_blocks.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def can_allocate(self, seq: Sequence, cached_blocks: list[int]) -> bool:
        """Do the free blocks hold all known tokens of `seq`, given these cached blocks?"""
        num_new = self.num_blocks_for(seq.num_tokens) - len(cached_blocks)
        num_taken_back = sum(self.pool.ref_counts[block_id] == 0 for block_id in cached_blocks)
        return num_new + num_taken_back <= len(self.pool.free_queue)

    def can_append_slots(self, seq: Sequence, num_new_tokens: int) -> bool:
        """Are there blocks for the next `num_new_tokens` tokens of `seq`?"""
        num_blocks = len(self.pool.free_queue) + len(self.block_tables[seq.seq_id])
        room = num_blocks * self.block_size - seq.num_computed_tokens - num_new_tokens
        # Copy-on-write takes one block more.
        return room >= self.block_size or (room >= 0 and not self._must_copy(seq))

    def can_swap_out(self, seq: Sequence) -> bool:
        """Are there CPU blocks for all that `seq` holds?"""
        return len(self.block_tables[seq.seq_id]) <= len(self.cpu_pool.free_queue)

    def can_swap_in(self, seq: Sequence) -> bool:
        """Do the free blocks hold all known tokens of a swapped sequence, and all that was swapped
        out? (That may be more: slots of rejected drafts.)"""
        num_blocks = max(self.num_blocks_for(seq.num_tokens), len(self.swapped_tables[seq.seq_id]))
        return num_blocks <= len(self.pool.free_queue)

    def _must_copy(self, seq: Sequence) -> bool:
        """True if the next token of `seq` goes into a partly filled block that others share."""
        index, offset = divmod(seq.num_computed_tokens, self.block_size)
        if offset == 0:
            return False
        return self.pool.ref_counts[self.block_tables[seq.seq_id][index]] > 1

    # -- changes --

    def take_block(self) -> int:
        """A free KV block; its old content is about to be overwritten."""
        return self.pool.allocate()

    def allocate(self, seq: Sequence, cached_blocks: list[int]) -> None:
        """Open a block table for `seq` with `cached_blocks`, whose tokens count as computed."""
        for block_id in cached_blocks:
            self.pool.share(block_id)
        self.block_tables[seq.seq_id] = list(cached_blocks)
        seq.num_computed_tokens = len(cached_blocks) * self.block_size
        self.num_queried_tokens += seq.num_tokens
        self.num_hit_tokens += seq.num_computed_tokens

    def append_slots(self, seq: Sequence, num_new_tokens: int) -> tuple[int, list[int]]:
        """Give `seq` blocks for its next `num_new_tokens` tokens, after can_append_slots was
        True. (The last ones may be drafts, and slots behind them in which a proposer writes.)

        Returns (index, block ids): the runner writes these ids into the block table of `seq` from
        this index on. A block that these tokens fill can be found by its hash at once. Only a block
        whose last token is in flight has to wait: its hash is known at the next call.
        """
        block_table = self.block_tables[seq.seq_id]
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_new_tokens
        first_new = len(block_table)
        if self._must_copy(seq):
            self.copy_on_write(seq)
            first_new -= 1
        while len(block_table) * self.block_size < end:
            block_table.append(self.take_block())
        # From start - 1: the block of the token before may have been filled in flight.
        if end // self.block_size > max(start - 1, 0) // self.block_size:  # rare in decodes
            self.cache_blocks(seq, max(start - 1, 0), end)
        return first_new, block_table[first_new:]

    def cache_blocks(self, seq: Sequence, start: int, end: int) -> None:
        """Let the blocks be found that the known ones of the tokens [start, end) fill."""
        first, last = start // self.block_size, end // self.block_size
        if self.enable_prefix_caching:
            last = min(last, seq.num_tokens // self.block_size)
            blocks = self.block_tables[seq.seq_id][first:last]
            hashes = self.hashes_of(seq, last)[first:last]
            for block_id, block_hash in zip(blocks, hashes, strict=True):
                self.pool.cache(block_id, block_hash)

    def copy_on_write(self, seq: Sequence) -> None:
        """Before `seq` writes into its last block, which is shared: replace it by a copy of its
        own. The copy is pending."""
        block_table = self.block_tables[seq.seq_id]
        shared, block_table[-1] = block_table[-1], self.take_block()
        self.blocks_to_copy.append((shared, block_table[-1]))
        self.pool.free(shared)

    def take_copies(self) -> dict[str, tuple[BlockPair, ...]]:
        """The pending copies, for the step that was just decided, by the names of the fields of
        SchedulerOutput; none are pending afterwards."""
        copies = {
            "blocks_to_swap_out": tuple(self.blocks_to_swap_out.values()),
            "blocks_to_swap_in": tuple(self.blocks_to_swap_in),
            "blocks_to_copy": tuple(self.blocks_to_copy),
        }
        self.blocks_to_swap_out, self.blocks_to_swap_in, self.blocks_to_copy = {}, [], []
        return copies

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` share the blocks of `parent`. The child's tokens must begin with the computed
        tokens of the parent."""
        block_table = self.block_tables[parent.seq_id]
        for block_id in block_table:
            self.pool.share(block_id)
        self.block_tables[child.seq_id] = list(block_table)
        child.block_hashes = list(parent.block_hashes)
        child.num_computed_tokens = parent.num_computed_tokens

    def swap_out(self, seq: Sequence) -> None:
        """Move `seq` to CPU blocks, after can_swap_out said that they fit. A shared block is copied
        too, and keeps the references of the other sequences."""
        block_table = self.block_tables[seq.seq_id]
        cpu_blocks = [self.cpu_pool.allocate() for _ in block_table]
        self.blocks_to_swap_out |= {
            pair[1]: pair for pair in zip(block_table, cpu_blocks, strict=True)
        }
        self.free(seq)
        self.swapped_tables[seq.seq_id] = cpu_blocks

    def swap_in(self, seq: Sequence) -> None:
        """Move `seq` back to KV blocks, after can_swap_in said that they fit."""
        cpu_blocks = self.swapped_tables[seq.seq_id]
        block_table = [self.take_block() for _ in cpu_blocks]
        self.blocks_to_swap_in += zip(cpu_blocks, block_table, strict=True)
        self.free(seq)
        self.block_tables[seq.seq_id] = block_table

    def free(self, seq: Sequence) -> None:
        """Close the block table of `seq`, in either pool, if it has one. The last block joins the
        queue first, so that the last block is reused first: prefixes are shared more often than
        endings."""
        for block_id in reversed(self.block_tables.pop(seq.seq_id, ())):
            self.pool.free(block_id)
        for block_id in self.swapped_tables.pop(seq.seq_id, ()):
            self.cpu_pool.free(block_id)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and no change, while a sequence holds blocks."""
        if self.block_tables:
            return False
        for block_id in self.pool.free_queue:
            self.pool.uncache(block_id)
        return True

    def hashes_of(self, seq: Sequence, num_blocks: int) -> list[BlockHash]:
        """seq.block_hashes, made to cover at least its first `num_blocks` (full) blocks."""
        hashes, size = seq.block_hashes, self.block_size
        parent = hashes[-1] if hashes else self.find_hash(None, seq.extra_keys)
        for start in range(len(hashes) * size, num_blocks * size, size):
            parent = self.find_hash(parent, tuple(seq.token_ids[start : start + size]))
            hashes.append(parent)
        return hashes

    def find_hash(self, parent: BlockHash | None, token_ids: Hashable) -> BlockHash:
        """The one BlockHash of this content. A root (parent None) holds the extra keys. Hashes that
        no block and no sequence uses are forgotten."""
        key = (parent, token_ids)
        found = self._interned[key] = self._interned.get(key) or BlockHash(*key)
        return found
