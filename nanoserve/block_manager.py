"""Who owns which KV block?

The KV cache is an array of blocks of block_size tokens. A sequence's *block table* lists the blocks
that hold its tokens, in order, from anywhere in the array: virtual memory, with blocks for pages.
This module keeps the books (which block belongs to whom) and never touches a tensor.

Two sequences with block_size 4 and a common prompt "a b c d e f" of which one full block is shared:

    sequence 0   a b c d | e f x      block table [2, 0]
    sequence 1   a b c d | e f y      block table [2, 1]
    block        0: e f x .   1: e f y .   2: a b c d      reference counts [1, 1, 2]

A block whose reference count falls to 0 joins the free queue but keeps its content until somebody
takes it: a later request with the same beginning finds it by its *block hash*, and takes it back
out of the middle of the queue. So the cache costs no memory: it is what free blocks still hold.

*When is a block findable?* From the moment it is allocated for tokens that the coming step will
compute: every layer stores keys and values before it attends, so even two requests of one step can
share. Should the step fail, nobody knows what was written, and `reset` forgets everything.

*Who may write into a shared block?* Nobody. Branches of a request share their prompt's blocks; full
ones are never written again, and of a partly filled one the writer first gets a copy of its own
(copy-on-write):

    before the fork    branch 0: [2, 0]                     block 0: e f . .
    after it           branch 0: [2, 0]   branch 1: [2, 0]  reference count of block 0: 2
    branch 1 writes    branch 0: [2, 0]   branch 1: [2, 5]  block 0 copied to 5, then: e f y .

Left out: sliding-window layers could give early blocks back; we keep them until the sequence ends.

vLLM: vllm/core/block_manager.py, core/block/, core/evictor.py (V0); vllm/v1/core/:
kv_cache_manager.py, block_pool.py, kv_cache_utils.py (V1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from enum import Enum
from weakref import WeakValueDictionary

from nanoserve.sequence import BlockPair, Sequence


class BlockState(Enum):
    """The documents' states of a block."""

    FREE = "free"  # reference count 0; may still hold a findable prefix
    ALLOCATED = "allocated"  # in at least one block table
    SWAPPED = "swapped"  # held in the CPU pool


class BlockHash:
    """The content of a sequence from its first token to the end of one block.

    vLLM hashes (parent hash, token ids, extra keys) with SHA-256. We keep that very chain as an
    interned object instead: equal content is the *same* object, so the object itself serves as its
    hash, a lookup costs one dict access a block, and two different prefixes can never collide.
    """

    __slots__ = ("__weakref__", "parent", "token_ids")

    def __init__(self, parent: BlockHash | None, token_ids: Hashable) -> None:
        self.parent = parent
        self.token_ids = token_ids


class BlockHashTable:
    """(parent, token ids) -> BlockHash; forgets what no block and no sequence refers to."""

    def __init__(self) -> None:
        self._interned: WeakValueDictionary[tuple[BlockHash | None, Hashable], BlockHash] = (
            WeakValueDictionary()
        )

    def get(self, parent: BlockHash | None, token_ids: Hashable) -> BlockHash:
        """The one BlockHash of this content. A root (parent None) holds the extra keys."""
        key = (parent, token_ids)
        block_hash = self._interned.get(key)
        if block_hash is None:
            block_hash = self._interned[key] = BlockHash(parent, token_ids)
        return block_hash


class BlockPool:
    """The blocks of one device: reference counts, the free queue, and what is findable.

    Invariant: a block is in the free queue exactly if its reference count is 0.
    """

    def __init__(self, num_blocks: int, held: BlockState = BlockState.ALLOCATED) -> None:
        """`held` is the state of its blocks that somebody refers to."""
        self.num_blocks = num_blocks
        self.held = held
        self.ref_counts = [0] * num_blocks
        # Least recently used first. An OrderedDict is a doubly linked list with an index: O(1) at
        # both ends and in the middle, what vLLM V1 builds by hand as FreeKVCacheBlockQueue.
        self.free_queue: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached_blocks: dict[BlockHash, int] = {}
        self.block_hashes: list[BlockHash | None] = [None] * num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self.free_queue)

    def get_state(self, block_id: int) -> BlockState:
        return self.held if self.ref_counts[block_id] else BlockState.FREE

    def allocate(self) -> int:
        """Take the least recently used free block; what it held can no longer be found."""
        block_id, _ = self.free_queue.popitem(last=False)
        self.uncache(block_id)
        self.ref_counts[block_id] = 1
        return block_id

    def share(self, block_id: int) -> None:
        """Add a reference, taking the block out of the free queue if it is there."""
        if self.ref_counts[block_id] == 0:
            del self.free_queue[block_id]
        self.ref_counts[block_id] += 1

    def free(self, block_id: int) -> None:
        """Drop a reference. The last one puts the block into the queue: at the end if it can still
        be found, at the front (to be taken next) if it is of no more use."""
        assert self.ref_counts[block_id] > 0, f"block {block_id} freed twice"
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.free_queue[block_id] = None
            if self.block_hashes[block_id] is None:
                self.free_queue.move_to_end(block_id, last=False)

    def cache(self, block_id: int, block_hash: BlockHash) -> None:
        """Make the block findable, unless another block with this content already is."""
        if self.block_hashes[block_id] is None and block_hash not in self.cached_blocks:
            self.cached_blocks[block_hash] = block_id
            self.block_hashes[block_id] = block_hash

    def uncache(self, block_id: int) -> None:
        """Make the block unfindable, because its content goes or never came."""
        block_hash = self.block_hashes[block_id]
        if block_hash is not None:
            del self.cached_blocks[block_hash]
            self.block_hashes[block_id] = None


class BlockManager:
    """The block tables of all sequences that hold blocks: over the pool of KV blocks, and, of
    swapped ones, over a pool of CPU blocks.

    Invariant: `check()` passes between any two calls; when no sequence is left, every block's
    reference count is 0.
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
        self.num_queried_tokens = 0  # of all admissions; with the next one, the cache's hit rate
        self.num_hit_tokens = 0
        self._hash_table = BlockHashTable()

    def reset(self) -> None:
        """Forget everything: no block tables, every block free, nothing findable."""
        self.pool = BlockPool(self.num_blocks)
        self.cpu_pool = BlockPool(self.num_cpu_blocks, held=BlockState.SWAPPED)
        self.block_tables: dict[int, list[int]] = {}  # seq_id -> block ids
        self.swapped_tables: dict[int, list[int]] = {}  # seq_id -> ids of CPU blocks

    # -- questions (nothing changes) --

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens: 5 tokens in blocks of 4 need 2."""
        return -(-num_tokens // self.block_size)

    def get_cached_blocks(self, seq: Sequence) -> list[int]:
        """The findable blocks of the longest prefix of `seq`, which must hold none yet.

        Never all of it: the last token is always computed, for its logits. A prompt of exactly two
        blocks that is wholly cached thus hits one: 8 tokens, (8 - 1) // 4 = 1 block.
        """
        if not self.enable_prefix_caching or seq.sampling_params.prompt_logprobs is not None:
            return []  # cached tokens are not computed, so nobody could say how likely they were
        block_ids: list[int] = []
        max_hits = (seq.num_tokens - 1) // self.block_size
        for block_hash in self._hashes_of(seq, max_hits)[:max_hits]:
            block_id = self.pool.cached_blocks.get(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def can_allocate(self, seq: Sequence, cached_blocks: list[int]) -> bool:
        """Would all known tokens of `seq` fit beside what is there, given these cached blocks?"""
        num_new = self.num_blocks_for(seq.num_tokens) - len(cached_blocks)
        num_taken_back = sum(self.pool.ref_counts[block_id] == 0 for block_id in cached_blocks)
        return num_new + num_taken_back <= self.pool.num_free_blocks

    def can_append(self, seq: Sequence, num_tokens: int) -> bool:
        """Are there blocks for the next `num_tokens` tokens of `seq`?"""
        needed = self.num_blocks_for(seq.num_computed_tokens + num_tokens)
        num_left = self.pool.num_free_blocks + len(self.block_tables[seq.seq_id]) - needed
        return num_left > 0 or (num_left == 0 and not self._must_copy(seq))  # a copy takes one

    def can_swap_out(self, seq: Sequence) -> bool:
        """Are there CPU blocks for all that `seq` holds?"""
        return len(self.block_tables[seq.seq_id]) <= self.cpu_pool.num_free_blocks

    def can_swap_in(self, seq: Sequence) -> bool:
        """Would all known tokens of a swapped sequence fit beside what is there?"""
        return self.num_blocks_for(seq.num_tokens) <= self.pool.num_free_blocks

    def _must_copy(self, seq: Sequence) -> bool:
        """True if the next token of `seq` goes into a partly filled block that others share."""
        index, offset = divmod(seq.num_computed_tokens, self.block_size)
        if offset == 0:
            return False
        return self.pool.ref_counts[self.block_tables[seq.seq_id][index]] > 1

    # -- changes --

    def allocate(self, seq: Sequence, cached_blocks: list[int]) -> None:
        """Open a block table for `seq` with `cached_blocks`, whose tokens count as computed."""
        for block_id in cached_blocks:
            self.pool.share(block_id)
        self.block_tables[seq.seq_id] = list(cached_blocks)
        seq.num_computed_tokens = len(cached_blocks) * self.block_size
        self.num_queried_tokens += seq.num_tokens
        self.num_hit_tokens += seq.num_computed_tokens

    def append(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Give `seq` blocks for its next `num_tokens` tokens; return the ids of the new ones.

        Blocks that these tokens fill become findable at once, but for one that a token still in
        flight fills: it does with the next call. The caller asked can_append.
        """
        block_table = self.block_tables[seq.seq_id]
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        num_new = self.num_blocks_for(end) - len(block_table)
        new_block_ids = [self.pool.allocate() for _ in range(num_new)]
        block_table += new_block_ids
        size = self.block_size
        if self.enable_prefix_caching and end // size > (start - 1) // size:  # rare in decodes
            first, last = max(start - 1, 0) // size, min(end, seq.num_tokens) // size
            for block_id, block_hash in zip(
                block_table[first:last], self._hashes_of(seq, last)[first:last], strict=True
            ):
                self.pool.cache(block_id, block_hash)
        return new_block_ids

    def copy_on_write(self, seq: Sequence) -> BlockPair | None:
        """Before `seq` writes: replace its last block by one of its own, if others share it.

        Returns (shared block, its own), which the runner must copy before the step; None if there
        is nothing to copy. The caller asked can_append.
        """
        if not self._must_copy(seq):
            return None
        block_table = self.block_tables[seq.seq_id]
        shared, own = block_table[-1], self.pool.allocate()
        block_table[-1] = own
        self.pool.free(shared)
        return shared, own

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which begins with what is computed of `parent`, share its blocks."""
        block_table = self.block_tables[parent.seq_id]
        for block_id in block_table:
            self.pool.share(block_id)
        self.block_tables[child.seq_id] = list(block_table)
        child.block_hashes = list(parent.block_hashes)
        child.num_computed_tokens = parent.num_computed_tokens

    def swap_out(self, seq: Sequence) -> list[BlockPair]:
        """Move `seq` to CPU blocks; return (KV block, CPU block) to copy before anything else.

        Shared blocks are copied, too; only this sequence's references go. The caller asked
        can_swap_out.
        """
        block_table = self.block_tables[seq.seq_id]
        cpu_blocks = [self.cpu_pool.allocate() for _ in block_table]
        pairs = list(zip(block_table, cpu_blocks, strict=True))
        self.free(seq)
        self.swapped_tables[seq.seq_id] = cpu_blocks
        return pairs

    def swap_in(self, seq: Sequence) -> list[BlockPair]:
        """Move `seq` back; return (CPU block, KV block) to copy. The caller asked can_swap_in."""
        cpu_blocks = self.swapped_tables[seq.seq_id]
        block_table = [self.pool.allocate() for _ in cpu_blocks]
        self.free(seq)
        self.block_tables[seq.seq_id] = block_table
        return list(zip(cpu_blocks, block_table, strict=True))

    def free(self, seq: Sequence) -> None:
        """Close the block table of `seq`, in either pool. Its tail goes into the free queue first,
        to be reused first: a prefix is more likely to be shared than what follows it."""
        for block_id in reversed(self.block_tables.pop(seq.seq_id, ())):
            self.pool.free(block_id)
        for block_id in self.swapped_tables.pop(seq.seq_id, ()):
            self.cpu_pool.free(block_id)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block. False, and nothing done, while a sequence holds blocks."""
        if self.block_tables:
            return False
        for block_id in self.pool.free_queue:
            self.pool.uncache(block_id)
        return True

    def check(self) -> None:
        """Raise AssertionError unless the books agree: reference counts with block tables, the free
        queue with reference counts, the two directions of the hash map with each other."""
        for pool, tables in (
            (self.pool, self.block_tables),
            (self.cpu_pool, self.swapped_tables),
        ):
            counted = [0] * pool.num_blocks
            for block_table in tables.values():
                assert len(set(block_table)) == len(block_table), f"block twice in {block_table}"
                for block_id in block_table:
                    counted[block_id] += 1
            assert counted == pool.ref_counts, f"counted {counted}, booked {pool.ref_counts}"
            free = {block_id for block_id, count in enumerate(counted) if count == 0}
            assert free == set(pool.free_queue), f"free {free}, queued {set(pool.free_queue)}"
            found = {h: block_id for block_id, h in enumerate(pool.block_hashes) if h is not None}
            assert found == pool.cached_blocks, "hash map and blocks disagree"
        both = self.block_tables.keys() & self.swapped_tables.keys()
        assert not both, f"sequences {both} are in both pools"

    def _hashes_of(self, seq: Sequence, num_blocks: int) -> list[BlockHash]:
        """seq.block_hashes, made to cover at least its first `num_blocks` (full) blocks."""
        hashes, size = seq.block_hashes, self.block_size
        parent = hashes[-1] if hashes else self._hash_table.get(None, seq.cache_salt)
        for start in range(len(hashes) * size, num_blocks * size, size):
            parent = self._hash_table.get(parent, tuple(seq.token_ids[start : start + size]))
            hashes.append(parent)
        return hashes
