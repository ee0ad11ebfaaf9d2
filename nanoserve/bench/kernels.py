"""How fast is attention alone?

Two steps, in blocks that are scattered at random, as in a cache that has been in use:

    decode    64 sequences, one query each: bound by memory, so GB/s of keys and values
    prefill   one sequence, all queries at once: bound by arithmetic, so TFLOP/s

Every backend that runs on this device gets the same tensors, and its result is compared with that
of the definition (attention.py). `sdpa` is PyTorch's own attention, which gets the same keys and
values without blocks. of_roofline is the least time, by the machine's measured limits, divided by
the time taken: what a CPU finds in its caches can be faster than memory. A GPU is timed by
triton.testing.do_bench, a CPU by the clock.

vLLM: benchmarks/attention_benchmarks/.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanoserve.attention import AttentionBackend, StepMetadata
from nanoserve.bench.cost_model import Machine
from nanoserve.bench.suites import Result
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.kernels.selector import get_attn_backend

HEADS, KV_HEADS, DIM, BLOCK = 16, 8, 128, 16  # of Qwen3-0.6B


@dataclass(frozen=True)
class Case:
    """`num_seqs` sequences of `num_keys` keys, and the last `num_queries` tokens as queries."""

    name: str
    num_seqs: int
    num_queries: int
    num_keys: int

    @property
    def num_bytes(self) -> int:
        return self.num_seqs * self.num_keys * 2 * KV_HEADS * DIM  # times the size of a number

    @property
    def operations(self) -> int:
        """Two products of 2 operations for each pair of a query and a key that it sees."""
        pairs = self.num_queries * self.num_keys - self.num_queries * (self.num_queries - 1) // 2
        return 4 * self.num_seqs * pairs * HEADS * DIM


CASES = {
    "cuda": (Case("decode", 64, 1, 4096), Case("prefill", 1, 4096, 4096)),
    "cpu": (Case("decode", 8, 1, 512), Case("prefill", 1, 512, 512)),
    "quick": (Case("decode", 2, 1, 64), Case("prefill", 1, 32, 32)),
}


def make_inputs(
    case: Case, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, tuple[Tensor, ...], StepMetadata]:
    """Queries, one layer's KV cache, and where everything is."""
    blocks_each, generator = -(-case.num_keys // BLOCK), torch.Generator().manual_seed(0)
    num_blocks, num_tokens = case.num_seqs * blocks_each, case.num_seqs * case.num_queries
    cache = KVCacheSpec(KV_HEADS, DIM, DIM).allocate(num_blocks, BLOCK, dtype, device)
    for tensor in cache:
        tensor.normal_()
    query = torch.randn(num_tokens, HEADS, DIM, generator=generator).to(device, dtype)
    table = torch.randperm(num_blocks, generator=generator).view(case.num_seqs, blocks_each)
    starts = torch.arange(0, num_tokens + 1, case.num_queries)
    lengths = torch.full((case.num_seqs,), case.num_keys)
    table, starts, lengths = (x.to(device, torch.int32) for x in (table, starts, lengths))
    slots = torch.zeros(num_tokens, dtype=torch.long, device=device)  # nothing is stored here
    return query, cache, StepMetadata(slots, table, starts, lengths, starts.diff().cpu().numpy())


def find_backends(device: torch.device) -> dict[str, AttentionBackend]:
    """Those that run on this device; the definition comes first."""
    found = {}
    for name in ("reference", "torch", "native", "triton"):
        try:
            found[name] = get_attn_backend(name, device, torch.float32)
        except (ValueError, OSError):  # no compiler, no GPU
            continue
    return found


def time_call(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Median milliseconds of a call."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, rep=int(1000 * seconds), return_mode="median")
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def prepare_sdpa(
    case: Case, query: Tensor, cache: tuple[Tensor, ...], table: Tensor
) -> Callable[[], Tensor]:
    """PyTorch's attention: the blocks are put in order before the clock starts."""
    queries = query.view(case.num_seqs, case.num_queries, HEADS, DIM).transpose(1, 2)
    rows = [each[table.long()].flatten(1, 2)[:, : case.num_keys] for each in cache]
    keys, values = (each.transpose(1, 2).contiguous() for each in rows)  # [.., heads, tokens, dim]
    attend = partial(scaled_dot_product_attention, queries, keys, values, enable_gqa=True)
    return partial(attend, is_causal=case.num_queries > 1, scale=DIM**-0.5)


def measure_kernels(machine: Machine, dtype: torch.dtype, is_quick: bool) -> dict[str, Result]:
    """case -> backend -> figures."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backends, seconds = find_backends(device), 0.1 if is_quick else 1.0
    cases = CASES["quick" if is_quick else device.type]
    print(f"kernel: {', '.join(backends)}, sdpa; about {2 * seconds * len(backends) + 4:.0f} s")
    results: dict[str, Result] = {}
    for case in cases:
        query, cache, metadata = make_inputs(case, device, dtype)
        num_bytes = case.num_bytes * dtype.itemsize
        least = 1000 * max(num_bytes / machine.bandwidth, case.operations / machine.rate)
        calls: dict[str, Callable[[], Tensor]] = {}
        for name, backend in backends.items():
            planned = backend.plan(metadata, BLOCK, dtype)
            calls[name] = partial(backend.attend, query, cache, planned, scale=DIM**-0.5)
        calls["sdpa"] = prepare_sdpa(case, query, cache, metadata.block_table)
        rows: Result = {}
        defined = None
        for name, call in calls.items():
            with torch.inference_mode():
                output = call()
                ms = time_call(call, device, seconds)
            if name == "sdpa":  # [sequences, heads, queries, dim]
                output = output.transpose(1, 2).reshape(query.shape)
            defined = output if defined is None else defined
            rows[name] = {
                "ms": ms,
                "gb_per_s": num_bytes / ms / 1e6,
                "tflop_per_s": case.operations / ms / 1e9,
                "of_roofline": least / ms,
                "x": rows["reference"]["ms"] / ms if rows else 1.0,
                "largest_difference": (output - defined).abs().max().item(),
            }
        results[f"kernel {case.name}"] = rows
    return results
