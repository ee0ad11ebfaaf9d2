"""What does a second level of the prefix cache change in the engine? The block manager.

A cached block that is on the CPU stands in a list of cached blocks as ~cpu_block (below 0):

    get_computed_blocks    [5, 2, ~7]     two KV blocks, and a block on the CPU behind them
    allocate               [5, 2, 9]      CPU block 7 will be copied to KV block 9 before the step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanoserve.block_manager import BlockManager
from nanoserve.chapters.kv_offload.policies import POOLS, LRUPool
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.sequence import BlockPair, Sequence


@dataclass(frozen=True)
class OffloadConfig(EngineConfig):
    # GiB of CPU memory, over all ranks, for blocks that the prefix cache would forget.
    kv_offloading_size: float | None = None
    # Which of them is forgotten first: lru, the least recently used one; arc, see policies.py.
    kv_offloading_policy: Literal["lru", "arc"] = "lru"

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.kv_offloading_size / self.num_ranks
        if self.num_cpu_blocks is not None or self.swap_space not in (None, size):
            raise ValueError(
                "kv_offloading_size is the size of the CPU pool, for preemption_mode swap, too: "
                "leave swap_space and num_cpu_blocks out."
            )
        if not self.enable_prefix_caching:
            raise ValueError("kv_offloading_size extends the prefix cache, which is off.")
        object.__setattr__(self, "swap_space", size)

    @property
    def has_cpu_blocks(self) -> bool:
        return True


class OffloadBlockManager(BlockManager):
    cpu_pool: LRUPool
    policy = "lru"
    num_external_hit_tokens = 0  # tokens found on the CPU, over all admissions

    def reset(self) -> None:
        super().reset()
        self.cpu_pool = POOLS[self.policy](self.num_cpu_blocks)
        self.being_read: list[int] = []  # CPU blocks of the pending copies

    def take_block(self) -> int:
        """Keep what the block holds, if it can be found by its hash."""
        block_hash = self.pool.block_hashes[next(iter(self.pool.free_queue))]
        block_id = super().take_block()
        is_new = block_hash is not None and block_hash not in self.cpu_pool.cached_blocks
        if is_new and self.cpu_pool.free_queue:
            cpu_block = self.cpu_pool.allocate_for(block_hash)
            self.blocks_to_swap_out[cpu_block] = (block_id, cpu_block)
            self.cpu_pool.cache(cpu_block, block_hash)
            self.cpu_pool.free(cpu_block)
        return block_id

    def get_computed_blocks(self, seq: Sequence) -> list[int]:
        """Behind those on the device, those on the CPU (and others on the device)."""
        blocks = super().get_computed_blocks(seq)
        if not seq.sampling_params.skip_reading_prefix_cache:
            most = (seq.num_tokens - 1) // self.block_size
            for block_hash in self.hashes_of(seq, most)[len(blocks) : most]:
                block = self.pool.cached_blocks.get(block_hash)
                cpu_block = self.cpu_pool.cached_blocks.get(block_hash)
                if block is None and cpu_block is None:
                    break
                blocks.append(~cpu_block if block is None else block)
        return blocks

    def can_allocate(self, seq: Sequence, cached_blocks: list[int]) -> bool:
        return super().can_allocate(seq, [block for block in cached_blocks if block >= 0])

    def allocate(self, seq: Sequence, cached_blocks: list[int]) -> None:
        """A block table for `seq`, in which a KV block takes the place of each CPU block."""
        on_cpu = [~block for block in cached_blocks if block < 0]
        super().allocate(seq, [block for block in cached_blocks if block >= 0])
        self.keep_until_copied(on_cpu)
        self.block_tables[seq.seq_id] = [
            block if block >= 0 else self.load(~block) for block in cached_blocks
        ]
        seq.num_computed_tokens += len(on_cpu) * self.block_size
        self.num_external_hit_tokens += len(on_cpu) * self.block_size

    def load(self, cpu_block: int) -> int:
        """A KV block, to which the CPU block will be copied. It can be found at once."""
        block_id = self.take_block()
        self.blocks_to_swap_in.append((cpu_block, block_id))
        self.pool.cache(block_id, self.cpu_pool.block_hashes[cpu_block])
        return block_id

    def swap_in(self, seq: Sequence) -> None:
        self.keep_until_copied(self.swapped_tables[seq.seq_id])
        super().swap_in(seq)

    def keep_until_copied(self, cpu_blocks: list[int]) -> None:
        """The step's copies to the CPU are made first: they must not overwrite these blocks. The
        last block of a prefix counts as used first, and is forgotten first."""
        for cpu_block in reversed(cpu_blocks):
            self.cpu_pool.share(cpu_block)
            self.being_read.append(cpu_block)

    def take_copies(self) -> dict[str, tuple[BlockPair, ...]]:
        for cpu_block in self.being_read:
            self.cpu_pool.free(cpu_block)
        self.being_read = []
        return super().take_copies()

    def reset_prefix_cache(self) -> bool:
        is_reset = super().reset_prefix_cache()
        for cpu_block in self.cpu_pool.free_queue if is_reset else ():
            self.cpu_pool.uncache(cpu_block)
        return is_reset


class OffloadEngine(LLMEngine):
    block_manager: OffloadBlockManager

    def __init__(self, config: OffloadConfig) -> None:
        super().__init__(config)
        self.block_manager.policy = config.kv_offloading_policy
        self.block_manager.reset()


PARTS = {
    "config_cls": OffloadConfig,
    "engine_cls": OffloadEngine,
    "block_manager_cls": OffloadBlockManager,
}
