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

import math
import mmap
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.config import EngineConfig
from nanoserve.kernels.cuda_graph import MEMORY_RESERVE
from nanoserve.kernels.memory import (
    available_memory,
    check_fits,
    describe_size,
    read_meminfo,
    total_memory,
)
from nanoserve.kernels.sampling import choose_tokens
from nanoserve.kernels.seen_tokens import allocate_seen_tokens
from nanoserve.layers import LayerConfig
from nanoserve.sampler import Penalties, SamplingBatch, sample
from nanoserve.sequence import BlockPair

# Tokens: a decode; the shortest prompt, so that attention has few programs and is split first; two
# more, because the tiles of products by quantized weights grow with them.
WARM_UP_LENGTHS = (1, 2, 32, 64)
CPU_CACHE_SHARE = 0.25  # of the free memory; the rest is for other programs on a laptop
MANAGER_BYTES = 160  # of the block manager, for each block
SCALE_DTYPE = torch.float32  # of the scales of keys and values of 8 bits
CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class KVCacheSpec:
    """What one layer keeps per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None  # a query sees this many keys at most, its own included

    def num_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block, keys and values, and their scales if they have 8 bits."""
        per_head = (self.key_dim + self.value_dim) * dtype.itemsize
        per_head += 2 * SCALE_DTYPE.itemsize if dtype.itemsize == 1 else 0
        return block_size * self.num_kv_heads * per_head

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Zeroed tensors [num_blocks, block_size, num_kv_heads, key_dim or value_dim]; and if dtype
        has 8 bits, the scale of each vector, [.., 1] each.

        In memory the heads of a block come before its slots, so that the keys that one head reads
        of a block lie together.
        """
        parts = [(self.key_dim, dtype), (self.value_dim, dtype)]
        parts += [(1, SCALE_DTYPE)] * 2 if dtype.itemsize == 1 else []
        shape = (num_blocks, self.num_kv_heads, block_size)
        return tuple(lazy_zeros((*shape, n), kind, device).transpose(1, 2) for n, kind in parts)


def choose_kv_cache_dtype(wanted: str, dtype: torch.dtype) -> torch.dtype:
    """The type of keys and values for an option kv_cache_dtype; auto: `dtype`, the model's."""
    return CACHE_DTYPES.get(wanted, dtype)


class ProfiledModel(Protocol):
    """The part of models.base.Model that a profile run needs."""

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        metadata: StepMetadata,
    ) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor: ...

    def kv_cache_specs(self) -> list[KVCacheSpec]: ...

    supports_cuda_graphs: bool
    hidden_size: int
    vocab_size: int


def make_kv_caches(
    config: EngineConfig,
    model: ProfiledModel,
    specs: list[KVCacheSpec],
    layer_config: LayerConfig,
    num_rows: int,
) -> tuple[list[KVCache], list[KVCache]]:
    """The KV caches of these layers, on the device and, to swap to, on the CPU. num_rows: of
    logits, in the largest step."""
    dtype = choose_kv_cache_dtype(config.kv_cache_dtype, layer_config.dtype)
    num_blocks = determine_num_kv_blocks(config, model, specs, layer_config, num_rows)
    num_cpu_blocks = size_cpu_pool(config, num_blocks, specs, dtype)
    num_cpu_blocks = layer_config.parallel.all_reduce_min(num_cpu_blocks)
    size, device, cpu = config.block_size, layer_config.device, torch.device("cpu")
    caches = allocate_kv_caches(specs, size, dtype, num_blocks, device)
    return caches, allocate_kv_caches(specs, size, dtype, num_cpu_blocks, cpu)


def allocate_kv_caches(
    specs: list[KVCacheSpec],
    block_size: int,
    dtype: torch.dtype,
    num_blocks: int,
    device: torch.device,
) -> list[KVCache]:
    """The zeroed tensors of each layer (KVCacheSpec.allocate). Raises ValueError if the device has
    no room for them."""
    try:
        return [spec.allocate(num_blocks, block_size, dtype, device) for spec in specs]
    except (OSError, MemoryError, OverflowError, RuntimeError) as error:
        num_bytes = num_blocks * sum(spec.num_bytes(block_size, dtype) for spec in specs)
        raise ValueError(
            f"{num_blocks} blocks of KV cache need {num_bytes / 2**30:.1f} GiB on {device}, which "
            f"cannot be allocated ({error}). Lower num_gpu_blocks_override or "
            "kv_cache_memory_bytes; on a CPU, with preemption_mode='swap', also num_cpu_blocks or "
            "swap_space."
        ) from error


def copy_blocks(
    source: list[KVCache], destination: list[KVCache], pairs: tuple[BlockPair, ...]
) -> None:
    """Copy whole blocks, in every layer, between caches or within one."""
    if not pairs:
        return
    from_device, to_device = source[0][0].device, destination[0][0].device
    sources = index_on([pair[0] for pair in pairs], from_device)
    destinations = index_on([pair[1] for pair in pairs], to_device)
    for source_pair, destination_pair in zip(source, destination, strict=True):
        for from_cache, to_cache in zip(source_pair, destination_pair, strict=True):
            if from_cache.dtype == torch.float8_e4m3fn:  # PyTorch copies no rows of this type
                from_cache, to_cache = from_cache.view(torch.int8), to_cache.view(torch.int8)
            blocks = from_cache.index_select(0, sources)
            to_cache.index_copy_(0, destinations, blocks.to(to_device))


def index_on(numbers: list[int], device: torch.device) -> Tensor:
    """An index [len(numbers)]. On a GPU it arrives later, and the CPU does not wait: in pinned
    memory, the allocator keeps the source until then."""
    if device.type == "cpu":
        return torch.tensor(numbers, device="cpu")
    return torch.tensor(numbers, device="cpu", pin_memory=True).to(device, non_blocking=True)


def determine_num_kv_blocks(
    config: EngineConfig,
    model: ProfiledModel,
    specs: list[KVCacheSpec],
    layer_config: LayerConfig,
    num_rows: int,
) -> int:
    """How many KV blocks every rank allocates: as many as fit on the rank with the least
    memory.

    On a GPU the kernels are warmed up first. Then, unless the user has set the size of the cache,
    the largest step is profiled, and memory is kept for CUDA graphs.
    """
    is_user_set = bool(config.num_gpu_blocks_override or config.kv_cache_memory_bytes)
    dtype = choose_kv_cache_dtype(config.kv_cache_dtype, layer_config.dtype)
    device, parallel = layer_config.device, layer_config.parallel
    other_bytes = 0
    if device.type == "cuda":
        warm_up(config, model, layer_config)
        if not is_user_set:
            other_bytes = profile_memory(config, model, layer_config, num_rows)
            has_graphs = layer_config.attention.supports_cuda_graphs and model.supports_cuda_graphs
            other_bytes += MEMORY_RESERVE if has_graphs and not config.enforce_eager else 0
    return parallel.all_reduce_min(
        num_blocks_that_fit(config, specs, dtype, device, other_bytes, parallel.tp_size)
    )


def profile_memory(
    config: EngineConfig, model: ProfiledModel, layer_config: LayerConfig, num_rows: int
) -> int:
    """Bytes of GPU memory that the largest step needs beside weights and KV cache.

    The step is run, and the allocator knows its peak.
    """
    device = layer_config.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    profile_run(config, model, layer_config, num_rows)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return peak - before


def dummy_forward(
    config: EngineConfig,
    model: ProfiledModel,
    layer_config: LayerConfig,
    lengths: list[int],
    max_blocks: int,
) -> Tensor:
    """Run prompts of these lengths, all zeros; return the hidden states. The KV cache is one block,
    and nothing is stored in it. The block table has room for `max_blocks`."""
    dtype = choose_kv_cache_dtype(config.kv_cache_dtype, layer_config.dtype)
    device, block_size = layer_config.device, config.block_size
    caches = allocate_kv_caches(model.kv_cache_specs(), block_size, dtype, 1, device)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0)
    metadata = StepMetadata(
        slot_mapping=torch.full((sum(lengths),), -1, device=device),
        block_table=torch.zeros(len(lengths), max_blocks, dtype=torch.int32, device=device),
        query_start_loc=ends.int(),
        seq_lens=ends.diff().int(),
    )
    metadata = layer_config.attention.plan(metadata, block_size, dtype)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    inputs = torch.zeros_like(positions)
    return model(inputs, positions, caches, metadata)


@torch.inference_mode()
def warm_up(config: EngineConfig, model: ProfiledModel, layer_config: LayerConfig) -> None:
    """Run small steps, which between them compile every kernel that a step may launch. Otherwise
    requests would wait for the compiler while they are served.

    Which kernels are launched depends on shapes: a decode, or a prompt, and how many blocks the
    block table has room for, because attention splits long contexts into more parts.
    """
    assert config.max_model_len, "EngineConfig not resolved"
    widest = -(-config.max_model_len // config.block_size)
    widths = {widest, *(2**i for i in range(widest.bit_length()))}
    for num_tokens in sorted({min(length, config.max_model_len) for length in WARM_UP_LENGTHS}):
        least = -(-num_tokens // config.block_size)
        for max_blocks in sorted({max(width, least) for width in widths}):
            hidden = dummy_forward(config, model, layer_config, [num_tokens], max_blocks)
            model.compute_logits(hidden)


@torch.inference_mode()
def profile_run(
    config: EngineConfig, model: ProfiledModel, layer_config: LayerConfig, num_rows: int
) -> None:
    """Run the largest step: as many tokens as the budget allows, and as many rows to sample, with
    every filter on, and with penalties for as many tokens as a row can have.

    What SeenTokens allocates when the first request with a penalty comes is there meanwhile.
    """
    assert config.max_num_batched_tokens and config.max_model_len and config.max_num_seqs
    budget, length = config.max_num_batched_tokens, config.max_model_len
    lengths = [min(length, budget - start) for start in range(0, budget, length)]
    max_blocks = -(-length // config.block_size)
    parallel, vocab_size = layer_config.parallel, model.vocab_size
    seen = allocate_seen_tokens(config.max_num_seqs, length, vocab_size, layer_config.device)
    hidden = dummy_forward(config, model, layer_config, lengths, max_blocks)
    num_rows = min(num_rows, budget)
    logits = model.compute_logits(hidden[:num_rows])
    if parallel.tp_rank != 0:
        return
    ones = torch.ones(num_rows, device=logits.device)
    num_seqs = min(config.max_num_seqs, budget)  # a sequence with penalties has no drafts: one row
    token_ids = torch.zeros(num_seqs, length, dtype=torch.int64, device=logits.device)
    penalties = Penalties(
        logits_rows=torch.arange(num_seqs, device=logits.device),
        token_ids=token_ids,
        output_counts=token_ids.int(),
        repetition=ones[:num_seqs],
        frequency=ones[:num_seqs],
        presence=ones[:num_seqs],
    )
    batch = SamplingBatch(
        temperature=ones,
        top_k=torch.full_like(ones, vocab_size, dtype=torch.long),
        top_p=ones * 0.9,
        min_p=ones * 0.01,
        uniform=ones.double() * 0.5,
        num_logprobs=(None,) * num_rows,
        penalties=penalties,
    )
    sample(logits, batch, choose_tokens)
    del seen  # not before


def num_blocks_that_fit(
    config: EngineConfig,
    specs: list[KVCacheSpec],
    dtype: torch.dtype,
    device: torch.device,
    peak_activation_bytes: int = 0,
    num_local_ranks: int = 1,
) -> int:
    """How many KV blocks to allocate, over all layers.

    The user's num_gpu_blocks_override; else as many as kv_cache_memory_bytes holds; else as many as
    free memory holds, after `peak_activation_bytes` for the largest step. The last two are limited
    to what max_num_seqs sequences of max_model_len tokens could fill. Raises ValueError if not even
    one such sequence fits, or if the user asks for more than any memory holds.
    """
    block_bytes = sum(spec.num_bytes(config.block_size, dtype) for spec in specs)
    if (num_blocks := config.num_gpu_blocks_override) is not None:
        check_num_blocks(
            "num_gpu_blocks_override", num_blocks, block_bytes, device, num_local_ranks
        )
        return num_blocks
    assert config.max_model_len and config.max_num_seqs, "EngineConfig not resolved"
    memory = config.kv_cache_memory_bytes
    if memory is None:
        free = free_memory(device, config.gpu_memory_utilization, num_local_ranks)
        memory = max(0, free - peak_activation_bytes)
    per_sequence = -(-config.max_model_len // config.block_size)
    num_blocks = memory // block_bytes
    if num_blocks < per_sequence:
        raise ValueError(
            f"one sequence of max_model_len={config.max_model_len} tokens needs "
            f"{describe_size(per_sequence * block_bytes)} of KV cache, and there are "
            f"{describe_size(memory)} for it. Lower max_model_len (and block_size, which is "
            f"{config.block_size}, if that is more), raise kv_cache_memory_bytes (or "
            "gpu_memory_utilization), or set num_gpu_blocks_override."
        )
    num_blocks = min(num_blocks, per_sequence * config.max_num_seqs)
    check_num_blocks("kv_cache_memory_bytes", num_blocks, block_bytes, device, num_local_ranks)
    return num_blocks


def size_cpu_pool(
    config: EngineConfig, num_kv_blocks: int, specs: list[KVCacheSpec], dtype: torch.dtype
) -> int:
    """Blocks of the CPU pool: none unless preemption swaps; by default as many as KV blocks.

    Raises ValueError if swap_space (GiB) is given and holds no block, or if no memory holds them.
    """
    if not config.has_cpu_blocks:
        return 0
    block_bytes = sum(spec.num_bytes(config.block_size, dtype) for spec in specs)
    if config.swap_space is None:
        num_blocks = num_kv_blocks if config.num_cpu_blocks is None else config.num_cpu_blocks
        check_num_blocks("num_cpu_blocks", num_blocks, block_bytes, torch.device("cpu"))
        return num_blocks
    num_blocks = int(config.swap_space * 2**30) // block_bytes
    if not num_blocks:
        raise ValueError(
            f"swap_space is {config.swap_space} GiB, less than one block of {block_bytes} bytes. "
            "Raise it, or set preemption_mode='recompute'."
        )
    check_num_blocks("swap_space", num_blocks, block_bytes, torch.device("cpu"))
    return num_blocks


def free_memory(
    device: torch.device, gpu_memory_utilization: float, num_local_ranks: int = 1
) -> int:
    """Bytes the KV cache may take on `device` by default. The ranks of one machine share its main
    memory; each rank has a GPU of its own."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - total * (1 - gpu_memory_utilization)))
    return int(available_memory() * CPU_CACHE_SHARE / num_local_ranks)


def memory_limit(device: torch.device) -> int | None:
    """Bytes that tensors on `device` can fill at most, with what is in use now: free GPU memory,
    and what torch keeps for reuse; or free main memory, swap included. None if it is not known."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type != "cpu" or not (meminfo := read_meminfo()):
        return None
    return available_memory() + meminfo.get("SwapFree", 0)


def check_num_blocks(
    option: str, num_blocks: int, block_bytes: int, device: torch.device, num_local_ranks: int = 1
) -> None:
    """Raise ValueError, which names the option, if so many blocks can never be filled.

    Main memory for blocks is taken only when they are written, so all of the machine's memory
    counts, in use or not. The block manager's own numbers are there from the beginning.
    """
    memory = memory_limit(device) if device.type == "cuda" else total_memory()
    if device.type == "cpu":
        block_bytes = (block_bytes + MANAGER_BYTES) * num_local_ranks
    what = f"{option} asks for {num_blocks} blocks of KV cache, {{size}} on {device}"
    advice = "Lower it or block_size: at most {most} blocks of this size would fit."
    check_fits(what, num_blocks, block_bytes, memory, advice)


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
