"""Attention alone: how near does it come to what the memory and the arithmetic units can do?

Three cases of one call, `paged_attention(query, key_cache, value_cache, block_table, ...)` of
attention.py, in the published shape of an 8B model (32 query and 8 key heads of 128, bfloat16):

    decode 64 x 4096    64 sequences, one query each, 4096 keys each: bound by memory
    decode 1 x 32768    one long sequence: can a single one fill the device?
    prefill 1 x 8192    8192 queries over as many keys, causal: bound by arithmetic

Decodes are reported as a share of the measured bandwidth, prefill as a share of the measured rate
of a matrix product; both also against torch's varlen_attn, which is FlashAttention. Blocks are
scattered at random, as a used cache's are.

On a GPU the time is that of a CUDA graph that holds the call several times, between events, so that
launching does not count; the median of many replays. Without a GPU the sizes are tiny and the only
implementation is the plain PyTorch one: that run shows that the suite works, and no figure of it
says anything about the kernel.

vLLM: benchmarks/attention_benchmarks/.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from nanoserve.bench.floor import MachineLimits, measure_limits
from nanoserve.kernels.attention_cpu import paged_attention_torch


@dataclass(frozen=True)
class Case:
    """`num_seqs` sequences with `num_keys` keys each, of which the last `num_queries` ask."""

    name: str
    num_seqs: int
    num_queries: int
    num_keys: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16

    @property
    def is_decode(self) -> bool:
        return self.num_queries == 1

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


def implementations(device: torch.device) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """What can run on this device, by name, and a word on what cannot."""
    found: dict[str, Callable[..., Any]] = {"torch": paged_attention_torch}
    skipped: dict[str, str] = {}
    if device.type != "cuda":
        word = "no CUDA device"
        return found, {"triton": word, "varlen_attn": word}
    try:
        module = importlib.import_module("nanoserve.kernels.attention_triton")
        found = {"triton": module.paged_attention_triton, **found}
    except (ImportError, AttributeError) as error:
        skipped["triton"] = str(error)
    try:
        importlib.import_module("torch.nn.attention.varlen")
        found["varlen_attn"] = varlen_attention
    except ImportError as error:
        skipped["varlen_attn"] = str(error)
    return found, skipped


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
    """torch's FlashAttention under our signature. A prefill gets its keys as one piece, in the
    order of the cache: the best case for it."""
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn
    num_queries = query.shape[0] // len(seq_lens)
    num_keys = block_table.shape[1] * key_cache.shape[1]
    options = {"scale": scale, "window_size": (-1, 0), "enable_gqa": True}
    if num_queries > 1:
        keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
        loc = query_start_loc
        return varlen_attn(query, keys, values, loc, loc, num_queries, num_keys, **options)
    return varlen_attn(
        query,
        key_cache,
        value_cache,
        query_start_loc,
        None,
        1,
        num_keys,
        block_table=block_table,
        seqused_k=seq_lens,
        **options,
    )


VARLEN_BLOCK_SIZE = 256  # FlashAttention 2 asks for pages of a multiple of this size


def kernel_suite(device: str, limits: MachineLimits | None = None, use_tqdm: bool = True) -> dict:
    """Microseconds of each case by each implementation, and its share of the machine's limits."""
    target = torch.device(device)
    is_gpu = target.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    limits = limits or measure_limits(target, dtype)
    found, skipped = implementations(target)
    rows = []
    for case in tqdm(
        GPU_CASES if is_gpu else CPU_CASES, desc="kernel", unit="case", disable=not use_tqdm
    ):
        for name, function in found.items():
            try:
                seconds, block_size = measure(case, name, function, dtype, target)
            except Exception as error:  # another implementation may still run
                skipped[f"{name}, {case.name}"] = f"{type(error).__name__}: {error}"[:200]
                continue
            rows.append(
                {
                    "case": case.name,
                    "implementation": name,
                    "block_size": block_size,
                    "us": seconds * 1e6,
                    "bytes_per_second": case.num_bytes(dtype.itemsize) / seconds,
                    "operations_per_second": case.operations / seconds,
                    "share_of_bandwidth": case.num_bytes(dtype.itemsize)
                    / seconds
                    / limits.bandwidth,
                    "share_of_rate": case.operations / seconds / limits.rate,
                }
            )
    note = "" if is_gpu else "no CUDA device: tiny sizes, plain PyTorch; says nothing of the kernel"
    return {"dtype": str(dtype), "is_gpu": is_gpu, "note": note, "rows": rows, "skipped": skipped}


def measure(
    case: Case,
    name: str,
    function: Callable[..., Any],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[float, int]:
    """Median seconds of one call, and the block size it was given."""
    if name == "varlen_attn":
        from dataclasses import replace

        case = replace(case, block_size=VARLEN_BLOCK_SIZE)
    inputs = make_inputs(case, dtype, device)
    if name == "varlen_attn":  # its pages have the slots first
        caches = ("key_cache", "value_cache")
        inputs |= {cache: inputs[cache].contiguous() for cache in caches}

    def call() -> object:
        return function(**inputs)

    with torch.inference_mode():
        if device.type != "cuda":
            return median_seconds_cpu(call), case.block_size
        try:
            return median_seconds_graph(call), case.block_size
        except RuntimeError:  # such as a function that reads tensors on the host
            torch.cuda.synchronize()
            return median_seconds_events(call), case.block_size


def median_seconds_cpu(call: Callable[[], object], tries: int = 20) -> float:
    times = []
    for _ in range(tries + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def median_seconds_graph(call: Callable[[], object], calls: int = 10, replays: int = 30) -> float:
    """Of one of `calls` calls in a CUDA graph, over `replays` replays between events."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compile, and let it allocate what it keeps
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return median_seconds_events(graph.replay, replays) / calls


def median_seconds_events(call: Callable[[], object], tries: int = 30) -> float:
    """Seconds on the device, launching included."""
    call()
    times = []
    for _ in range(tries):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)
