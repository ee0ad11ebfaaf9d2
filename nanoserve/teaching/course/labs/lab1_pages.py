"""Lab 1: pages that remember.

Write the bodies; the docstring of each is its specification. Everything else is the engine's own:
read nanoserve/block_manager.py first. Then, after each function:

    python -m nanoserve.teaching.course grade . --labs 1
"""

from nanoserve.block_manager import BlockHash, BlockManager, BlockPool
from nanoserve.sequence import Sequence


class MyPool(BlockPool):
    def allocate(self) -> int:
        """Take the block at the front of free_queue, and return its id.

        It has one reference now. Its old content can no longer be found: self.uncache(block_id).
        """
        raise NotImplementedError("Task 1.1")

    def share(self, block_id: int) -> None:
        """Add a reference to a block. A free block leaves the free queue."""
        raise NotImplementedError("Task 1.2")

    def free(self, block_id: int) -> None:
        """Drop a reference. With the last one the block joins the free queue: at the end if it can
        be found by its hash (self.block_hashes[block_id] is not None), at the front if it cannot.
        """
        raise NotImplementedError("Task 1.3")


class MyManager(BlockManager):
    def reset(self) -> None:  # this one is written: the manager uses your pool
        super().reset()
        self.pool = MyPool(self.num_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks of self.block_size tokens hold this many tokens?"""
        raise NotImplementedError("Task 1.4")

    def can_allocate(self, seq: Sequence, cached_blocks: list[int]) -> bool:
        """Do the free blocks hold all known tokens of `seq`, given these cached blocks?

        A cached block is not needed again. But a cached block that is free (reference count 0) will
        leave the free queue: it cannot be taken for new tokens, too. Nothing changes here.
        """
        raise NotImplementedError("Task 1.5")

    def hashes_of(self, seq: Sequence, num_blocks: int) -> list[BlockHash]:
        """seq.block_hashes, made to cover at least its first `num_blocks` blocks (all full).

        Each hash is self.find_hash(parent, the block's tokens as a tuple). The parent of the first
        one is the root, self.find_hash(None, seq.extra_keys); that of any other is the hash of the
        block before it. What seq.block_hashes has already stays: append the rest.
        """
        raise NotImplementedError("Task 1.6")

    def get_computed_blocks(self, seq: Sequence) -> list[int]:
        """The cached blocks of the longest cached prefix of `seq`, in order.

        self.pool.cached_blocks says which block has a hash. The last token of `seq` is never taken
        from the cache: the engine needs its logits, and the cache has none. No block behind the
        first miss counts. [] if self.enable_prefix_caching is False.
        """
        raise NotImplementedError("Task 1.7")

    def free(self, seq: Sequence) -> None:
        """Close the block table of `seq` (self.block_tables), and free its blocks in self.pool.

        The last block is freed first, so that it is reused first: beginnings are shared more often
        than endings. A sequence without a block table has nothing to free.
        """
        raise NotImplementedError("Task 1.8")
