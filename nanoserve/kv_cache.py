"""How many KV blocks does the memory hold, and how do their contents move?

The block manager keeps the books of blocks; the tensors behind them are here. On a GPU the cache
gets what is left: weights are loaded, the largest possible step is run once to see what it needs
for itself, and of the rest every byte that gpu_memory_utilization grants becomes KV blocks.

    0 |  weights  | the largest step | KV blocks ............. | 1 - gpu_memory_utilization | total

What other processes hold of the GPU was never free, so it is not counted on.

vLLM: vllm/worker/cache_engine.py CacheEngine, worker.py determine_num_available_blocks (V0);
vllm/v1/worker/gpu_worker.py determine_available_memory, vllm/v1/core/kv_cache_utils.py (V1).
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoserve.attention import KVCache
from nanoserve.config import EngineConfig
from nanoserve.sequence import BlockPair

CPU_CACHE_SHARE = 0.25  # of the memory that is free: a laptop has other things to do


@dataclass(frozen=True)
class KVCacheSpec:
    """What one layer keeps per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None  # a query sees this many keys at most, its own included

    def num_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block, keys and values."""
        return block_size * self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Two zeroed tensors [num_blocks, block_size, num_kv_heads, key_dim or value_dim].

        In memory the heads of a block come before its slots, so that the keys that one head reads
        of a block lie together.
        """
        shape = (num_blocks, self.num_kv_heads, block_size)
        return (
            lazy_zeros((*shape, self.key_dim), dtype, device).transpose(1, 2),
            lazy_zeros((*shape, self.value_dim), dtype, device).transpose(1, 2),
        )


def copy_blocks(
    source: list[KVCache], destination: list[KVCache], pairs: tuple[BlockPair, ...]
) -> None:
    """Copy whole blocks, in every layer, between caches or within one."""
    if not pairs:
        return
    sources, destinations = torch.tensor(pairs).unbind(dim=1)
    for source_pair, destination_pair in zip(source, destination, strict=True):
        for from_cache, to_cache in zip(source_pair, destination_pair, strict=True):
            blocks = from_cache.index_select(0, sources.to(from_cache.device))
            to_cache.index_copy_(0, destinations.to(to_cache.device), blocks.to(to_cache.device))


def num_blocks_that_fit(
    config: EngineConfig,
    specs: list[KVCacheSpec],
    dtype: torch.dtype,
    device: torch.device,
    step_bytes: int = 0,
    num_local_ranks: int = 1,
) -> int:
    """How many KV blocks to allocate, over all layers.

    What the user asked for; else what kv_cache_memory (or, by default, free memory, less the
    `step_bytes` that a step needs for itself) holds, but no more than max_num_seqs sequences of
    max_model_len tokens could fill. Raises ValueError if that is less than one such sequence.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    assert config.max_model_len and config.max_num_seqs, "EngineConfig not resolved"
    block_bytes = sum(spec.num_bytes(config.block_size, dtype) for spec in specs)
    memory = config.kv_cache_memory
    if memory is None:
        free = free_memory(device, config.gpu_memory_utilization, num_local_ranks)
        memory = max(0, free - step_bytes)
    per_sequence = -(-config.max_model_len // config.block_size)
    num_blocks = memory // block_bytes
    if num_blocks < per_sequence:
        raise ValueError(
            f"one sequence of max_model_len={config.max_model_len} tokens needs "
            f"{per_sequence * block_bytes / 2**20:.0f} MiB of KV cache, and there are "
            f"{memory / 2**20:.0f} MiB for it. Lower max_model_len, raise kv_cache_memory (or "
            "gpu_memory_utilization), or set num_kv_blocks."
        )
    return min(num_blocks, per_sequence * config.max_num_seqs)


def num_cpu_blocks_to_allocate(config: EngineConfig, num_kv_blocks: int) -> int:
    """Blocks of the CPU pool: none unless preemption swaps; by default as many as KV blocks."""
    if config.preemption_mode != "swap":
        return 0
    return num_kv_blocks if config.num_cpu_blocks is None else config.num_cpu_blocks


def free_memory(
    device: torch.device, gpu_memory_utilization: float, num_local_ranks: int = 1
) -> int:
    """Bytes the KV cache may take on `device` by default. Main memory is shared by the ranks of a
    machine; a GPU is one rank's own."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1 - gpu_memory_utilization)))
    return int(available_memory() * CPU_CACHE_SHARE / num_local_ranks)


def available_memory() -> int:
    """Bytes of main memory that a new process could use; 4 GiB where the system does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # Linux: free pages, and those that caches would give up
        fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max")  # of a container
        text = limit.read_text().strip() if limit.exists() else "max"
        return available if text == "max" else min(available, int(text))
    return 2**32


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros; on a CPU, memory that takes up room only once it is written.

    A KV cache may be larger than what a run needs of it. torch.zeros writes all of it at once, and
    np.zeros asks for huge pages, of which the first write takes up all.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Freed with the last tensor that views it. Private: a forked process has a copy of its own.
    is_unix = hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS")
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if is_unix else {}
    memory = mmap.mmap(-1, num_bytes, **flags)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
