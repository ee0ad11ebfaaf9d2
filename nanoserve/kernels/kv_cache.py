"""How many KV blocks does the memory hold, and how do their contents move?

The block manager counts blocks; the tensors that hold their keys and values are here. On a GPU the
cache gets the memory that is left: the weights are loaded, the largest possible step is run once to
measure its own memory (`profile_run`), and the rest of the share that gpu_memory_utilization grants
becomes KV blocks, except what is kept for CUDA graphs.

    0 | weights | largest step | graphs | KV blocks ......... | 1 - gpu_memory_utilization | total

Memory that other processes use is not free when the engine starts, so it is not counted.

vLLM: vllm/worker/cache_engine.py CacheEngine, worker.py determine_num_available_blocks (V0);
vllm/v1/worker/gpu_worker.py determine_available_memory, vllm/v1/core/kv_cache_utils.py (V1).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.config import EngineConfig
from nanoserve.kernels import memory
from nanoserve.kernels.cuda_graph import MEMORY_RESERVE, has_graphs
from nanoserve.kernels.sampling import choose_tokens
from nanoserve.kernels.seen_tokens import allocate_seen_tokens
from nanoserve.sampler import Penalties, SamplingBatch, sample
from nanoserve.sequence import BlockPair

if TYPE_CHECKING:
    from nanoserve.model_runner import ModelRunner

logger = logging.getLogger("nanoserve")

# Tokens: a decode; the shortest prompt, so that attention has few programs and is split first; two
# more, because the tiles of products by quantized weights grow with them.
WARM_UP_LENGTHS = (1, 2, 32, 64)
CPU_CACHE_SHARE = 0.25  # of the free memory; the rest is for other programs on a laptop
SCALE_DTYPE = torch.float32  # of the scales of keys and values of 8 bits
LAZY = 2**26  # bytes from which on a system gives new pages, which are zeros, and no old ones
CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class KVCacheSpec:
    """What one layer keeps per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None  # a query sees this many keys at most, its own included

    def num_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block."""
        parts = self.allocate(1, block_size, dtype, torch.device("meta"))
        return sum(part.nbytes for part in parts)

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Tensors [num_blocks, block_size, num_kv_heads, key_dim or value_dim]; and if dtype
        has 8 bits, the scale of each vector, [.., 1] each.

        In memory the heads of a block come before its slots, so that the keys that one head reads
        of a block lie together. On a CPU they take up memory only where they are written, so a
        cache may be larger than what a run needs of it. All are zeros.
        """
        parts = [(self.key_dim, dtype), (self.value_dim, dtype)]
        parts += [(1, SCALE_DTYPE)] * 2 if dtype.itemsize == 1 else []
        shape = (num_blocks, self.num_kv_heads, block_size)
        tensors = [torch.empty(*shape, n, dtype=kind, device=device) for n, kind in parts]
        for tensor in tensors:  # what is masked is read, too, and must not be NaN
            if device.type == "cuda" or tensor.nbytes < LAZY:
                tensor.zero_()
        return tuple(tensor.transpose(1, 2) for tensor in tensors)


def make_kv_caches(runner: ModelRunner, num_rows: int) -> tuple[list[KVCache], list[KVCache]]:
    """The KV caches of a runner's layers, on the device and, to swap to, on the CPU. num_rows: of
    logits, in the largest step."""
    config, specs = runner.config, runner.kv_cache_specs()
    shape = (config.block_size, CACHE_DTYPES.get(config.kv_cache_dtype, runner.dtype))
    block_bytes = sum(spec.num_bytes(*shape) for spec in specs)
    num_blocks = determine_num_kv_blocks(runner, block_bytes, num_rows)
    num_cpu_blocks = runner.parallel.all_reduce_min(size_cpu_pool(config, num_blocks, block_bytes))
    caches = allocate_kv_caches(specs, *shape, num_blocks, runner.device)
    cpu_caches = allocate_kv_caches(specs, *shape, num_cpu_blocks, torch.device("cpu"))
    if runner.device.type == "cuda" and config.swap_space is not None:
        # A GPU copies from and to pinned memory by itself: the CPU does not wait.
        cpu_caches = [tuple(tensor.pin_memory() for tensor in each) for each in cpu_caches]
    return caches, cpu_caches


def allocate_kv_caches(
    specs: list[KVCacheSpec], size: int, dtype: torch.dtype, num_blocks: int, device: torch.device
) -> list[KVCache]:
    """The tensors of each layer, of blocks of this size (KVCacheSpec.allocate). Raises ValueError
    if the device has no room for them: on a CPU it would be missed only when they are written."""
    memory.check_fits(
        f"{num_blocks} blocks of KV cache, on {device},",
        num_blocks * sum(spec.num_bytes(size, dtype) for spec in specs),
        memory_limit(device),
        "Lower num_gpu_blocks_override or kv_cache_memory_bytes; on a CPU, with "
        "preemption_mode='swap', also num_cpu_blocks or swap_space.",
    )
    return [spec.allocate(num_blocks, size, dtype, device) for spec in specs]


def copy_blocks(
    source: list[KVCache], destination: list[KVCache], pairs: tuple[BlockPair, ...]
) -> None:
    """Copy whole blocks one after another, in every layer, between caches or within one. From and
    to pinned memory, a GPU does so when all that was launched before is done; other main memory
    makes the CPU wait."""
    ends = [caches[0][0] for caches in (source, destination)]
    is_late = all(end.device.type != "cpu" or end.is_pinned() for end in ends)
    for from_layer, to_layer in zip(source, destination, strict=True):
        for from_cache, to_cache in zip(from_layer, to_layer, strict=True):
            for from_block, to_block in pairs:
                to_cache[to_block].copy_(from_cache[from_block], non_blocking=is_late)


def determine_num_kv_blocks(runner: ModelRunner, block_bytes: int, num_rows: int) -> int:
    """How many KV blocks every rank allocates: the user's num_gpu_blocks_override; else as many as
    kv_cache_memory_bytes or the free memory hold, on the rank that has the least.

    On a GPU the kernels are warmed up first. Then, unless the user has set the size of the cache,
    the largest step is profiled, and memory is kept for CUDA graphs.
    """
    config, device, parallel = runner.config, runner.device, runner.parallel
    if device.type == "cuda":
        warm_up(runner)
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    if (room := config.kv_cache_memory_bytes) is None:
        other = profile_memory(runner, num_rows) if device.type == "cuda" else 0
        other += MEMORY_RESERVE if has_graphs(runner) else 0
        room = free_memory(device, config.gpu_memory_utilization, parallel.tp_size) - other
    num_blocks = parallel.all_reduce_min(max(0, room) // block_bytes)
    can_shorten = config.max_model_len == runner.model_config.max_model_len
    per_sequence = runner.blocks_per_sequence()
    return limit_num_blocks(config, num_blocks, block_bytes, per_sequence, can_shorten)


def limit_num_blocks(
    config: EngineConfig, num_blocks: int, block_bytes: int, per_sequence: int, can_shorten: bool
) -> int:
    """Of num_blocks that fit, as many as max_num_seqs sequences of max_model_len tokens could fill;
    each needs per_sequence.

    If not even one such sequence fits: with can_shorten, sequences end when the cache is full, and
    a warning says so; else ValueError.
    """
    if num_blocks < per_sequence:
        needed, found = (memory.describe_size(n * block_bytes) for n in (per_sequence, num_blocks))
        message = (
            f"one sequence of max_model_len={config.max_model_len} tokens needs {needed} of KV "
            f"cache, and there are {found}: {num_blocks} blocks. Lower "
            "max_model_len, or raise kv_cache_memory_bytes or gpu_memory_utilization."
        )
        if not (can_shorten and num_blocks):
            raise ValueError(message)
        logger.warning("requests are limited to what the KV cache holds: %s", message)
    return min(num_blocks, per_sequence * config.max_num_seqs)


def profile_memory(runner: ModelRunner, num_rows: int) -> int:
    """Bytes of GPU memory that the largest step needs beside weights and KV cache: it is run, and
    the allocator knows its peak."""
    torch.cuda.reset_peak_memory_stats(runner.device)
    before = torch.cuda.memory_allocated(runner.device)
    profile_run(runner, num_rows)
    torch.cuda.synchronize(runner.device)
    peak = torch.cuda.max_memory_allocated(runner.device)
    torch.cuda.empty_cache()
    return peak - before


def dummy_forward(runner: ModelRunner, lengths: list[int], max_blocks: int) -> Tensor:
    """Run prompts of these lengths, all zeros; return the hidden states. The KV cache is one block,
    and nothing is stored in it. The block table has room for `max_blocks`."""
    config, device = runner.config, runner.device
    shape = (config.block_size, CACHE_DTYPES.get(config.kv_cache_dtype, runner.dtype))
    caches = allocate_kv_caches(runner.model.kv_cache_specs(), *shape, 1, device)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    slots = torch.full((sum(lengths),), -1, device=device)
    table = torch.zeros(len(lengths), max_blocks, dtype=torch.int32, device=device)
    metadata = StepMetadata(slots, table, ends.int(), ends.diff().int(), np.array(lengths))
    metadata = runner.backend.plan(metadata, *shape)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    return runner.model(torch.zeros_like(positions), positions, caches, metadata)


@torch.inference_mode()
def warm_up(runner: ModelRunner) -> None:
    """Run small steps, which between them compile every kernel that a step may launch. Otherwise
    requests would wait for the compiler while they are served.

    Which kernels are launched depends on shapes: a decode, or a prompt, and how many blocks the
    block table has room for, because attention splits long contexts into more parts.
    """
    longest, size = runner.config.max_model_len, runner.config.block_size
    widest = -(-longest // size)
    widths = {widest, *(2**i for i in range(widest.bit_length()))}
    for num_tokens in sorted({min(length, longest) for length in WARM_UP_LENGTHS}):
        for max_blocks in sorted({max(width, -(-num_tokens // size)) for width in widths}):
            runner.model.compute_logits(dummy_forward(runner, [num_tokens], max_blocks))


@torch.inference_mode()
def profile_run(runner: ModelRunner, num_rows: int) -> None:
    """Run the largest step: as many tokens as the budget allows, and as many rows to sample, with
    every filter on, and with penalties for as many tokens as a row can have.

    What SeenTokens allocates when the first request with a penalty comes is there meanwhile.
    """
    config, vocab_size, device = runner.config, runner.model.vocab_size, runner.device
    budget, length = config.max_num_batched_tokens, config.max_model_len
    lengths = [min(length, budget - start) for start in range(0, budget, length)]
    seen = allocate_seen_tokens(config.max_num_seqs, length, vocab_size, device)
    hidden = dummy_forward(runner, lengths, -(-length // config.block_size))
    num_rows = min(num_rows, budget)
    logits = runner.model.compute_logits(hidden[:num_rows])
    if runner.parallel.tp_rank != 0:
        return
    ones = torch.ones(num_rows, device=device)
    num_seqs = min(config.max_num_seqs, budget)  # a sequence with penalties has no drafts: one row
    token_ids = torch.zeros(num_seqs, length, dtype=torch.int64, device=device)
    rows, weights = torch.arange(num_seqs, device=device), [ones[:num_seqs]] * 3
    batch = SamplingBatch(
        temperature=ones,
        top_k=torch.full_like(ones, vocab_size, dtype=torch.long),
        top_p=ones * 0.9,
        min_p=ones * 0.01,
        uniform=ones.double() * 0.5,
        penalties=Penalties(rows, token_ids, token_ids.int(), *weights),
    )
    sample(logits, batch, choose_tokens)
    del seen  # not before


def size_cpu_pool(config: EngineConfig, num_kv_blocks: int, block_bytes: int) -> int:
    """Blocks of the CPU pool: none unless preemption swaps; by default as many as KV blocks.

    Raises ValueError if swap_space (GiB) is given and holds no block.
    """
    if not config.has_cpu_blocks:
        return 0
    num_blocks = config.num_cpu_blocks or num_kv_blocks
    if config.swap_space is not None:
        num_blocks = int(config.swap_space * 2**30) // block_bytes
    if not num_blocks:
        raise ValueError(f"swap_space is {config.swap_space} GiB: no block of {block_bytes} bytes.")
    return num_blocks


def free_memory(device: torch.device, share: float, num_local_ranks: int) -> int:
    """Bytes the KV cache may take on `device` by default: of a GPU, this share of all, less what is
    in use. The ranks of one machine share its main memory; each rank has a GPU of its own."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(free - total * (1 - share))
    return int(memory.available_memory() * CPU_CACHE_SHARE / num_local_ranks)


def memory_limit(device: torch.device) -> int | None:
    """Bytes that tensors on `device` can fill at most, with what is in use now: free GPU memory,
    and what torch keeps for reuse; or free main memory, swap included. None if it is not known."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    meminfo = memory.read_meminfo() if device.type == "cpu" else {}
    return meminfo["MemAvailable"] + meminfo["SwapFree"] if meminfo else None
