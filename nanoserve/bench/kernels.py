"""Attention alone: how much of the memory bandwidth and of the arithmetic rate does it reach?

Three cases of one call, `paged_attention(query, key_cache, value_cache, block_table, ...)` of
attention.py, in the published shape of an 8B model (32 query and 8 key heads of 128, bfloat16):

    decode 64 x 4096    64 sequences, one query each, 4096 keys each: bound by memory
    decode 1 x 32768    one long sequence: can a single one fill the device?
    prefill 1 x 8192    8192 queries over as many keys, causal: bound by arithmetic

Decodes are reported as a share of the measured bandwidth, prefill as a share of the measured rate
of a matrix product; both also against torch's varlen_attn, which is FlashAttention. Blocks are
scattered at random, as in a cache that has been in use.

On a GPU the call is captured several times in one CUDA graph, whose replays are timed between
events, so that launching does not count. The plain PyTorch implementation cannot be captured: it is
timed call by call, launching included, and its rows say so ("timed_by"). Without a GPU it is the
only implementation and the sizes are tiny: then the suite shows that it runs, and nothing about the
kernel.

vLLM: benchmarks/attention_benchmarks/.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanoserve.bench.roofline import MachineLimits, measure_limits, run_seconds
from nanoserve.bench.turns import Settings
from nanoserve.kernels.attention_cpu import paged_attention_torch


@dataclass(frozen=True)
class Case:
    """`num_seqs` sequences with `num_keys` keys each; the last `num_queries` tokens are queries."""

    name: str
    num_seqs: int
    num_queries: int
    num_keys: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    def num_bytes(self, itemsize: int) -> int:
        """Keys and values read once, queries read, results written."""
        kv = 2 * self.num_keys * self.num_kv_heads
        ends = 2 * self.num_queries * self.num_heads
        return self.num_seqs * (kv + ends) * self.head_dim * itemsize

    @property
    def operations(self) -> int:
        """Two products, 2 operations each, per visible pair of query and key."""
        before = self.num_keys - self.num_queries
        pairs = self.num_queries * before + self.num_queries * (self.num_queries + 1) // 2
        return 4 * self.num_seqs * pairs * self.num_heads * self.head_dim


GPU_CASES = (
    Case("decode 64 x 4096", 64, 1, 4096),
    Case("decode 1 x 32768", 1, 1, 32768),
    Case("prefill 1 x 8192", 1, 8192, 8192),
)
TINY = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
CPU_CASES = (
    Case("decode 4 x 64", 4, 1, 64, **TINY),
    Case("decode 1 x 256", 1, 1, 256, **TINY),
    Case("prefill 1 x 64", 1, 64, 64, **TINY),
)


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """The arguments of paged_attention, the caches laid out as KVCacheSpec.allocate does."""
    generator = torch.Generator().manual_seed(0)
    blocks_each = -(-case.num_keys // case.block_size)
    num_blocks = case.num_seqs * blocks_each
    kv_shape = (num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    num_tokens = case.num_seqs * case.num_queries
    table = torch.randperm(num_blocks, generator=generator).view(case.num_seqs, blocks_each)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    return {
        "query": noise(num_tokens, case.num_heads, case.head_dim),
        "key_cache": noise(*kv_shape).transpose(1, 2),
        "value_cache": noise(*kv_shape).transpose(1, 2),
        "block_table": table.to(device, torch.int32),
        "query_start_loc": torch.arange(
            0, num_tokens + 1, case.num_queries, dtype=torch.int32, device=device
        ),
        "seq_lens": torch.full((case.num_seqs,), case.num_keys, dtype=torch.int32, device=device),
        "scale": case.head_dim**-0.5,
    }


def implementations(device: torch.device) -> dict[str, Callable[..., Any]]:
    """What can run on this device, by name."""
    if device.type != "cuda":
        return {"torch": paged_attention_torch}
    from nanoserve.kernels.attention_triton import paged_attention_triton

    return {
        "triton": paged_attention_triton,
        "torch": paged_attention_torch,
        "varlen_attn": varlen_attention,
    }


def varlen_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
) -> Tensor:
    """torch's FlashAttention with the arguments of paged_attention. In a prefill it gets its keys
    as one piece, in the order of the cache, which is the best case for it."""
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn
    num_queries = query.shape[0] // len(seq_lens)
    num_keys = block_table.shape[1] * key_cache.shape[1]
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0), "enable_gqa": True}
    key_loc = None  # decode: a block table instead
    if num_queries > 1:
        key_cache, value_cache = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
        key_loc = query_start_loc
    else:
        options |= {"block_table": block_table, "seqused_k": seq_lens}
    return varlen_attn(
        query, key_cache, value_cache, query_start_loc, key_loc, num_queries, num_keys, **options
    )


VARLEN_BLOCK_SIZE = 256  # FlashAttention 2 requires blocks of a multiple of this size


def kernel_suite(settings: Settings) -> dict[str, Any]:
    """Microseconds of each case by each implementation, and its share of the machine's limits."""
    device = torch.device(settings.device)
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    limits = settings.limits
    if dtype != getattr(torch, settings.dtype):
        limits = measure_limits(device, dtype)
    skipped: dict[str, str] = {}
    rows = []
    cases = GPU_CASES if is_gpu else CPU_CASES
    for case in settings.progress(cases, "kernel"):
        for name, function in implementations(device).items():
            try:
                rows.append(measure(case, name, function, dtype, device, limits))
            except Exception as error:  # the other implementations may still run
                skipped[f"{name}, {case.name}"] = f"{type(error).__name__}: {error}"[:200]
    note = "" if is_gpu else "no CUDA device: tiny sizes, plain PyTorch; says nothing of the kernel"
    return {"dtype": str(dtype), "is_gpu": is_gpu, "note": note, "rows": rows, "skipped": skipped}


def measure(
    case: Case,
    name: str,
    function: Callable[..., Any],
    dtype: torch.dtype,
    device: torch.device,
    limits: MachineLimits,
) -> dict[str, Any]:
    """One row: the median of the time of a call, and what follows from it."""
    if name == "varlen_attn":
        case = replace(case, block_size=VARLEN_BLOCK_SIZE)
    inputs = make_inputs(case, dtype, device)
    if name == "varlen_attn":  # its blocks have the slots before the heads
        inputs["key_cache"] = inputs["key_cache"].contiguous()
        inputs["value_cache"] = inputs["value_cache"].contiguous()
    # torch's implementation reads tensors on the host, which cannot be captured, and a failed
    # capture would spoil the timing of all that follows in this process.
    is_captured = device.type == "cuda" and name != "torch"
    with torch.inference_mode():
        if is_captured:
            seconds = graph_seconds(lambda: function(**inputs), device)
        else:
            seconds = statistics.median(run_seconds(lambda: function(**inputs), device, 20))
    num_bytes = case.num_bytes(dtype.itemsize)
    return {
        "case": case.name,
        "implementation": name,
        "block_size": case.block_size,
        "timed_by": "graph" if is_captured else "calls",
        "us": seconds * 1e6,
        "gb_per_second": num_bytes / seconds / 1e9,
        "gflop_per_second": case.operations / seconds / 1e9,
        "share_of_bandwidth": num_bytes / seconds / limits.bandwidth,
        "share_of_rate": case.operations / seconds / limits.rate,
    }


def graph_seconds(call: Callable[[], object], device: torch.device, calls: int = 10) -> float:
    """The median of the time of one of `calls` calls in a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # kernels are compiled here, and lasting memory is allocated
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return statistics.median(run_seconds(graph.replay, device, 30)) / calls
