"""What do further levels of the prefix cache change in the engine?

    config          the options; config.py has the keys of kv_transfer_config
    block manager   finds blocks on the CPU, and in files, and says what is to be copied
    scheduler       tells the runner which blocks are read from files or written
    runner          puts the bytes of files into KV blocks, and makes files of KV blocks

In a list of cached blocks, a block on the CPU stands as ~cpu_block (below 0), and one in a file as
its BlockHash:

    get_computed_blocks    [5, 2, ~7, hash]   two KV blocks; behind them one on the CPU, and a file
    allocate               [5, 2, 9, 4]       CPU block 7 will be copied to KV block 9 before the
                                              step, and what is in the file to KV block 4

A file is read when its sequence is admitted. If it is damaged, the list ends before it, and the
rest of the prompt is computed, like any other (in a further step, even without chunked prefill). A
file is written behind the step that completes the block: what a request has computed is in the
folder before its next token is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from nanoserve.attention import KVCache
from nanoserve.block_manager import BlockHash, BlockManager
from nanoserve.chapters.kv_offload.config import KVTransferConfig
from nanoserve.chapters.kv_offload.disk import BlockFiles, fingerprint
from nanoserve.chapters.kv_offload.policies import POOLS, LRUPool
from nanoserve.config import EngineConfig
from nanoserve.distributed.parallel import ParallelState
from nanoserve.engine import LLMEngine
from nanoserve.kernels.kv_cache import copy_blocks
from nanoserve.model_runner import ModelRunner
from nanoserve.models.config import ModelConfig
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import BlockPair, ModelOutput, SchedulerOutput, Sequence


class OffloadNote(NamedTuple):
    """From the scheduler to the runner, with a step that reads or writes files."""

    loads: dict[int, list[np.ndarray]]  # KV block -> its bytes, on each rank
    saves: dict[bytes, int]  # digest -> KV block, which is complete after this step


@dataclass(frozen=True)
class OffloadConfig(EngineConfig):
    # GiB of CPU memory, over all ranks, for blocks that the prefix cache would forget.
    kv_offloading_size: float | None = None
    # Which of them is forgotten first: lru, the least recently used one; arc, see policies.py.
    kv_offloading_policy: Literal["lru", "arc"] = "lru"
    # Files for KV blocks, which outlive the engine, or which another one reads: a dict, whose keys
    # are in chapters/kv_offload/config.py.
    kv_transfer_config: Any = None

    def __post_init__(self) -> None:
        if self.kv_transfer_config:
            self.read_transfer_config()
        super().__post_init__()
        if not self.enable_prefix_caching:
            raise ValueError(
                "kv_offloading_size and kv_transfer_config extend the prefix cache, which is off."
            )
        if not self.kv_offloading_size:
            return
        size = self.kv_offloading_size / self.num_ranks
        if self.num_cpu_blocks is not None or self.swap_space not in (None, size):
            raise ValueError(
                "kv_offloading_size is the size of the CPU pool, for preemption_mode swap, too: "
                "leave swap_space and num_cpu_blocks out."
            )
        object.__setattr__(self, "swap_space", size)

    def read_transfer_config(self) -> None:
        """What kv_transfer_config says of main memory are the other two options."""
        transfer = KVTransferConfig.read(self.kv_transfer_config)
        object.__setattr__(self, "kv_transfer_config", transfer)
        if transfer.eviction_policy != "lru":
            object.__setattr__(self, "kv_offloading_policy", transfer.eviction_policy)
        if self.kv_offloading_size is None and transfer.cpu_bytes_to_use:
            object.__setattr__(self, "kv_offloading_size", transfer.cpu_bytes_to_use / 2**30)
        if not self.kv_offloading_size and transfer.root_dir is None:
            raise ValueError("kv_transfer_config has no cpu_bytes_to_use, and no folder.")

    @property
    def has_cpu_blocks(self) -> bool:
        return bool(self.kv_offloading_size) or super().has_cpu_blocks


class OffloadBlockManager(BlockManager):
    cpu_pool: LRUPool
    policy = "lru"
    loaded_from: BlockFiles | None = None
    saved_to: BlockFiles | None = None
    num_external_hit_tokens = 0  # tokens found on the CPU or in files, over all admissions

    def reset(self) -> None:
        super().reset()
        self.cpu_pool = POOLS[self.policy](self.num_cpu_blocks)
        self.being_read: list[int] = []  # CPU blocks of the pending copies
        self.loads: dict[int, list[np.ndarray]] = {}  # pending: as in OffloadNote
        self.saves: dict[BlockHash, int] = {}

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

    def get_computed_blocks(self, seq: Sequence) -> list[Any]:
        """Behind those on the device, those on the CPU and in files (and others on the device)."""
        blocks: list[Any] = super().get_computed_blocks(seq)
        if not seq.sampling_params.skip_reading_prefix_cache:
            most = (seq.num_tokens - 1) // self.block_size
            for block_hash in self.hashes_of(seq, most)[len(blocks) : most]:
                if (block := self.find(block_hash)) is None:
                    break
                blocks.append(block)
        return blocks

    def find(self, block_hash: BlockHash) -> Any:
        """A block with this content, as it stands in a list of cached blocks; None: nowhere."""
        if (block := self.pool.cached_blocks.get(block_hash)) is not None:
            return block
        if (cpu_block := self.cpu_pool.cached_blocks.get(block_hash)) is not None:
            return ~cpu_block
        has_file = self.loaded_from is not None and self.loaded_from.contains(block_hash)
        return block_hash if has_file else None

    def can_allocate(self, seq: Sequence, cached_blocks: list[Any]) -> bool:
        return super().can_allocate(seq, [block for block in cached_blocks if is_on_device(block)])

    def allocate(self, seq: Sequence, cached_blocks: list[Any]) -> None:
        """A block table for `seq`, in which a KV block takes the place of each CPU block and file.
        It ends before a file that cannot be read."""
        contents: dict[BlockHash, list[np.ndarray]] = {}
        for number, block in enumerate(cached_blocks):
            if isinstance(block, BlockHash):
                if (content := self.loaded_from.read(block)) is None:
                    cached_blocks = cached_blocks[:number]
                    break
                contents[block] = content
        on_device = [block for block in cached_blocks if is_on_device(block)]
        super().allocate(seq, on_device)
        self.keep_until_copied([~block for block in cached_blocks if is_on_cpu(block)])
        self.block_tables[seq.seq_id] = [
            block if is_on_device(block) else self.load(block, contents) for block in cached_blocks
        ]
        num_tokens = (len(cached_blocks) - len(on_device)) * self.block_size
        seq.num_computed_tokens += num_tokens
        self.num_external_hit_tokens += num_tokens

    def load(self, block: Any, contents: dict[BlockHash, list[np.ndarray]]) -> int:
        """A KV block, to which the content of this CPU block or file will be copied. It can be
        found at once."""
        block_id = self.take_block()
        if is_on_cpu(block):
            self.blocks_to_swap_in.append((~block, block_id))
            block = self.cpu_pool.block_hashes[~block]
        else:
            self.loads[block_id] = contents[block]
        self.pool.cache(block_id, block)
        return block_id

    def cache_blocks(self, seq: Sequence, start: int, end: int) -> None:
        """Full blocks become files, too."""
        super().cache_blocks(seq, start, end)
        first, last = start // self.block_size, end // self.block_size
        for block_hash in seq.block_hashes[first:last] if self.saved_to else ():
            block_id = self.pool.cached_blocks.get(block_hash)
            if block_id is not None and not self.saved_to.contains(block_hash):
                self.saves[block_hash] = block_id

    def take_transfers(self) -> OffloadNote:
        """What the step that was just decided reads from files and writes; none are pending
        afterwards. A block that was given to another sequence meanwhile is not written."""
        found = {
            self.saved_to.get_digest(block_hash): block_id
            for block_hash, block_id in self.saves.items()
            if self.pool.cached_blocks.get(block_hash) == block_id
        }
        note, self.loads, self.saves = OffloadNote(self.loads, found), {}, {}
        return note

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


class OffloadScheduler(Scheduler):
    block_manager: OffloadBlockManager

    def make_output(self, step: StepPlan) -> SchedulerOutput:
        step.notes[OffloadNote] = self.block_manager.take_transfers()
        return super().make_output(step)


class OffloadRunner(ModelRunner):
    files: BlockFiles | None = None  # if there are any

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, parallel: ParallelState | None = None
    ) -> None:
        super().__init__(config, model_config, *([parallel] if parallel else ()))
        self.rank = parallel.tp_rank if parallel else 0
        if (transfer := config.kv_transfer_config) and transfer.root_dir is not None:
            key = fingerprint(config, model_config)
            place = (transfer.root_dir, transfer.max_bytes)
            self.files = BlockFiles(*place, key, config.num_ranks)

    def update_batch(self, step: SchedulerOutput) -> np.ndarray:
        """Behind the step's other copies: a KV block that is loaded may just have been saved."""
        if (note := step.notes[OffloadNote]).loads:
            self.write_blocks({block: data[self.rank] for block, data in note.loads.items()})
        return super().update_batch(step)

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> Callable[[], ModelOutput]:
        pending, note = super().launch(step), step.notes[OffloadNote]
        if note.saves:
            data = self.read_blocks([*note.saves.values()])
            self.files.write(self.rank, dict(zip(note.saves, data, strict=True)))
        return pending

    def write_blocks(self, blocks: dict[int, np.ndarray]) -> None:
        """Fill KV blocks: of each its bytes, uint8 [num_bytes], as read_blocks gives them."""
        caches = self.make_host_blocks(len(blocks))
        for number, data in enumerate(blocks.values()):
            start = 0
            for part in bytes_of(caches, number):
                part.copy_(torch.from_numpy(data[start : start + len(part)]))
                start += len(part)
        copy_blocks(caches, self.kv_caches, tuple(enumerate(blocks)))

    def read_blocks(self, block_ids: list[int]) -> list[np.ndarray]:
        """The bytes of KV blocks, uint8 [num_bytes] each: layer by layer, keys, values, scales."""
        caches = self.make_host_blocks(len(block_ids))
        with self.current_gpu:
            pairs = tuple((block, number) for number, block in enumerate(block_ids))
            copy_blocks(self.kv_caches, caches, pairs)
        return [torch.cat(bytes_of(caches, number)).numpy() for number in range(len(block_ids))]

    def make_host_blocks(self, number: int) -> list[KVCache]:
        """Room for KV blocks in main memory."""
        return [
            tuple(torch.empty(number, *each.shape[1:], dtype=each.dtype) for each in cache)
            for cache in self.kv_caches
        ]


class OffloadEngine(LLMEngine):
    block_manager: OffloadBlockManager

    def __init__(self, config: OffloadConfig) -> None:
        super().__init__(config)
        files, transfer = self.executor.runner.files, self.config.kv_transfer_config
        if files is not None:  # those of rank 0's runner
            self.block_manager.loaded_from = files if transfer.is_kv_consumer else None
            self.block_manager.saved_to = files if transfer.is_kv_producer else None
        self.block_manager.policy = config.kv_offloading_policy
        self.block_manager.reset()


def is_on_cpu(block: Any) -> bool:
    return isinstance(block, int) and block < 0


def is_on_device(block: Any) -> bool:
    return isinstance(block, int) and block >= 0


def bytes_of(caches: list[KVCache], number: int) -> list[torch.Tensor]:
    """The bytes of one block, uint8 views, of each tensor of each (contiguous) layer."""
    return [each[number].view(-1).view(torch.uint8) for cache in caches for each in cache]
