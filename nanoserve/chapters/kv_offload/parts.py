"""What does a second level of the prefix cache change in the engine? The block manager, alone.

A cached block that is on the CPU stands in a list of cached blocks as ~cpu_block (below 0).
"""

from __future__ import annotations

from dataclasses import dataclass

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.sequence import BlockPair, Sequence


@dataclass(frozen=True)
class OffloadConfig(EngineConfig):
    kv_offloading_size: float | None = None
    """GiB of CPU memory for blocks that the prefix cache would forget."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.swap_space is None and self.num_cpu_blocks is None:
            object.__setattr__(self, "swap_space", self.kv_offloading_size)

    @property
    def has_cpu_blocks(self) -> bool:
        return True


class OffloadBlockManager(BlockManager):
    def reset(self) -> None:
        super().reset()
        self.being_read: list[int] = []  # CPU blocks of the pending copies

    def take_block(self) -> int:
        """Keep what the block holds, if it can be found by its hash."""
        block_hash = self.pool.block_hashes[next(iter(self.pool.free_queue))]
        block_id = super().take_block()
        is_new = block_hash is not None and block_hash not in self.cpu_pool.cached_blocks
        if is_new and self.cpu_pool.free_queue:
            cpu_block = self.cpu_pool.allocate()
            self.blocks_to_swap_out[cpu_block] = (block_id, cpu_block)
            self.cpu_pool.cache(cpu_block, block_hash)
            self.cpu_pool.free(cpu_block)
        return block_id

    def get_computed_blocks(self, seq: Sequence) -> list[int]:
        """Behind those on the device, those on the CPU."""
        blocks = super().get_computed_blocks(seq)
        if self.enable_prefix_caching and not seq.sampling_params.skip_reading_prefix_cache:
            most = (seq.num_tokens - 1) // self.block_size
            for block_hash in self.hashes_of(seq, most)[len(blocks) : most]:
                if (cpu_block := self.cpu_pool.cached_blocks.get(block_hash)) is None:
                    break
                blocks.append(~cpu_block)
        return blocks

    def can_allocate(self, seq: Sequence, cached_blocks: list[int]) -> bool:
        return super().can_allocate(seq, [block for block in cached_blocks if block >= 0])

    def allocate(self, seq: Sequence, cached_blocks: list[int]) -> None:
        on_device = [block for block in cached_blocks if block >= 0]
        on_cpu = [~block for block in cached_blocks if block < 0]
        super().allocate(seq, on_device)
        self.keep_until_copied(on_cpu)
        for cpu_block in on_cpu:
            block_id = self.take_block()
            self.blocks_to_swap_in.append((cpu_block, block_id))
            self.pool.cache(block_id, self.cpu_pool.block_hashes[cpu_block])
            self.block_tables[seq.seq_id].append(block_id)
        seq.num_computed_tokens += len(on_cpu) * self.block_size
        self.num_hit_tokens += len(on_cpu) * self.block_size

    def swap_in(self, seq: Sequence) -> None:
        self.keep_until_copied(self.swapped_tables[seq.seq_id])
        super().swap_in(seq)

    def keep_until_copied(self, cpu_blocks: list[int]) -> None:
        """The step's copies to the CPU are made first: they must not overwrite these blocks."""
        for cpu_block in cpu_blocks:
            self.cpu_pool.share(cpu_block)
        self.being_read += cpu_blocks

    def take_copies(self) -> dict[str, tuple[BlockPair, ...]]:
        for cpu_block in self.being_read:
            self.cpu_pool.free(cpu_block)
        self.being_read = []
        return super().take_copies()


PARTS = {"config_cls": OffloadConfig, "block_manager_cls": OffloadBlockManager}
