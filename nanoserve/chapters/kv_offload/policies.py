"""Which block leaves the CPU pool when another one needs its place?

*LRU* forgets the block that was not used for the longest time. A *scan* (many blocks, each used
once: a batch of long documents) then drives out everything, also what is used again and again.

*ARC* (Adaptive Replacement Cache) keeps the blocks in two lists, and remembers what it has
forgotten in two more, the "ghosts", which hold no blocks:

    t1   used once, lately             b1   forgotten from t1
    t2   used at least twice           b2   forgotten from t2

`target` (p in the paper) is how many blocks t1 should have. A block that comes back soon after it
left t1 says that t1 is too small: the target grows. One that comes back from b2 says the contrary.
Three blocks; a and b are used twice, then c, d and e are scanned, then a returns. (The next to be
forgotten stands first; * is a hit.)

    access   LRU           ARC: t1         t2       b1
    a b      a b           a b             -        -
    a b      a b *         -               a b *    -        the second use: to t2
    c        a b c         c               a b      -
    d        b c d         d               a b      c        t1 is larger than its target 0: c goes
    e        c d e         e               a b      c d      again: the scan drives out itself
    a        d e a         e               b a *    c d      LRU has just lost a

vLLM: vllm/v1/kv_offload/cpu/policies/ (V1). ARC: Megiddo and Modha, FAST 2003, figure 4.
"""

from __future__ import annotations

from collections import OrderedDict

from nanoserve.block_manager import BlockHash, BlockPool


class LRUPool(BlockPool):
    def allocate_for(self, block_hash: BlockHash | None) -> int:
        """Take a free block, for the block `block_hash` of the KV pool."""
        return self.allocate()


class ARCPool(LRUPool):
    """Invariant: a cached block is in t1 or t2; len(t1) + len(b1) <= num_blocks; all four lists
    have at most 2 * num_blocks entries; 0 <= target <= num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.target = 0.0
        self.t1: OrderedDict[BlockHash, int] = OrderedDict()  # the next to be forgotten first
        self.t2: OrderedDict[BlockHash, int] = OrderedDict()
        self.b1: OrderedDict[BlockHash, None] = OrderedDict()
        self.b2: OrderedDict[BlockHash, None] = OrderedDict()

    def allocate(self) -> int:
        return self.allocate_for(None)

    def allocate_for(self, block_hash: BlockHash | None) -> int:
        """A block that holds nothing comes first; else one is forgotten (REPLACE in the paper)."""
        b1, b2 = len(self.b1), len(self.b2)
        if block_hash in self.b1:  # the rarer a kind of ghost is, the more one of it counts
            self.target = min(self.target + max(1.0, b2 / b1), float(self.num_blocks))
        elif block_hash in self.b2:
            self.target = max(self.target - max(1.0, b1 / b2), 0.0)
        if self.block_hashes[next(iter(self.free_queue))] is not None:
            size = len(self.t1)
            from_t1 = size > self.target or (size == self.target and block_hash in self.b2)
            victim = self.forget(from_t1)
            self.free_queue.move_to_end(self.cached_blocks[victim], last=False)
        return super().allocate()

    def forget(self, from_t1: bool) -> BlockHash:
        """The first free block of one list, or of the other: it becomes a ghost."""
        lists = [(self.t1, self.b1), (self.t2, self.b2)]
        for blocks, ghosts in lists if from_t1 else reversed(lists):
            for victim, block_id in blocks.items():
                if self.ref_counts[block_id] == 0:
                    ghosts[victim] = None
                    return victim
        raise AssertionError("the free queue has a block that is in no list")

    def cache(self, block_id: int, block_hash: BlockHash) -> None:
        super().cache(block_id, block_hash)
        is_ghost = block_hash in self.b1 or block_hash in self.b2  # then this is its second use
        self.b1.pop(block_hash, None)
        self.b2.pop(block_hash, None)
        (self.t2 if is_ghost else self.t1)[block_hash] = block_id
        if self.b1 and len(self.t1) + len(self.b1) > self.num_blocks:
            self.b1.popitem(last=False)
        num_known = sum(map(len, (self.t1, self.t2, self.b1, self.b2)))
        if self.b2 and num_known > 2 * self.num_blocks:
            self.b2.popitem(last=False)

    def uncache(self, block_id: int) -> None:
        block_hash = self.block_hashes[block_id]
        super().uncache(block_id)
        if block_hash is not None:
            (self.t1 if block_hash in self.t1 else self.t2).pop(block_hash)

    def share(self, block_id: int) -> None:
        """A request uses the block again."""
        super().share(block_id)
        block_hash = self.block_hashes[block_id]
        if block_hash is not None:
            (self.t1 if block_hash in self.t1 else self.t2).pop(block_hash)
            self.t2[block_hash] = block_id


POOLS = {"lru": LRUPool, "arc": ARCPool}
