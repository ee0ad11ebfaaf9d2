"""The Triton kernel on a GPU: every dtype, sizes that only a GPU computes, CUDA graphs.

    pytest -m gpu       # the first time, some minutes of compiling

The same tests run on a CPU in small, through Triton's interpreter and a stand-in for the graph, so
that their own logic is tested where no GPU is.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_oracle import (
    Shape,
    Step,
    attention_by_definition,
    make_step,
    needs_interpreter,
    one_thread,
    unwritten_memory_is_nan,
)
from torch import Tensor

from nanoserve.kv_cache import lazy_zeros

pytest.importorskip("triton", reason="Triton exists on Linux only")
from aot_kernels import Launch, recorded

from nanoserve.kernels import attention_triton
from nanoserve.kernels.attention_triton import paged_attention_triton, store_kv_triton

# As meant: an empty split's log2(0) is -inf, and a soft cap's exp2(large) is inf.
pytestmark = pytest.mark.filterwarnings("ignore:(divide by zero|overflow) encountered in")

# Largest error, absolute and relative: the sum of rounding the weights of the softmax, then the
# output, to this type. (The reference computes in float64 from the same rounded inputs.)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
DEVICES = [
    pytest.param("cpu", marks=needs_interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
DEVICES_AND_DTYPES = [
    pytest.param("cpu", torch.float32, marks=needs_interpreter),
    *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in TOLERANCE),
]


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def assert_as_defined(step: Step, shape: Shape, num_splits: int | None = None) -> None:
    """Twice: the order of programs must not change a bit of the result."""
    with unwritten_memory_is_nan():
        output, again = (
            paged_attention_triton(*step.tensors, **shape.options, num_splits=num_splits)
            for _ in range(2)
        )
    assert_close(output, attention_by_definition(*step.tensors, **shape.options))
    assert torch.equal(output.nan_to_num(7), again.nan_to_num(7))


def assert_close(output: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[output.dtype]
    torch.testing.assert_close(
        output.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


# ------------------------------------------------------------------------------ random shapes

KINDS = {  # few: each is compiled for each dtype
    "bench": Shape((), 16, 2, 4, 128, 128),
    "window": Shape((), 16, 1, 1, 64, 64, sliding_window=100),
    "a group of 7": Shape((), 32, 2, 7, 80, 80),
    "wide, capped": Shape((), 64, 1, 8, 256, 256, logits_soft_cap=30.0),
    "values narrower": Shape((), 16, 2, 3, 96, 64, sliding_window=33, logits_soft_cap=10.0),
}


def draw_seqs(rng: random.Random, limit: int) -> tuple[tuple[int, int], ...]:
    """Decodes, drafts, chunks and prompts of up to `limit` tokens, in any mixture."""
    most = rng.choice([1, 4, limit])  # queries: a pure decode, verification, anything
    seqs = []
    for _ in range(rng.randint(1, 9 if limit > 100 else 2)):
        queries = rng.choice([0, 1, 1, min(4, most), rng.randint(1, most)])
        seqs.append((queries, rng.choice([0, rng.randint(0, limit)])))
    return tuple(seqs)


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_random_steps(kind: str, device: str, dtype: torch.dtype) -> None:
    rng = random.Random(kind)
    is_gpu = device == "cuda"
    for seed in range(8 if is_gpu else 1):
        seqs = draw_seqs(rng, 600 if is_gpu else 30)
        shape = replace(KINDS[kind], seqs=seqs, num_padding=rng.choice([0, 3]))
        step = make_step(shape, seed, dtype, device)
        for num_splits in (1, 8) if is_gpu else (2,):
            assert_as_defined(step, shape, num_splits)


# ------------------------------------------------------------------------------ large ones


def make_large_step(
    num_seqs: int, context: int, shape: Shape, dtype: torch.dtype, device: str
) -> Step:
    """Decodes of 1 to `context` tokens (the first one has `context`). They share the blocks of a
    pool, as sequences with equal prefixes do: a cache for each would not fit a small GPU."""
    torch.manual_seed(0)
    max_blocks = context // shape.block_size
    cache = (2 * max_blocks, shape.block_size, shape.num_kv_heads, shape.key_dim)
    num_heads = shape.num_kv_heads * shape.group
    lens = torch.randint(1, context + 1, (num_seqs,), device=device)
    lens[0] = context
    return Step(
        2 * torch.randn(num_seqs, num_heads, shape.key_dim, dtype=dtype, device=device),
        torch.randn(cache, dtype=dtype, device=device),
        torch.randn(cache, dtype=dtype, device=device),
        torch.randint(2 * max_blocks, (num_seqs, max_blocks), device=device).int(),
        torch.arange(num_seqs + 1, device=device).int(),
        lens.int(),
    )


@pytest.mark.parametrize(("device", "dtype"), DEVICES_AND_DTYPES)
@pytest.mark.parametrize("num_seqs", [256, 1])
def test_large_decodes(num_seqs: int, device: str, dtype: torch.dtype) -> None:
    """A full batch, and one sequence whose keys are split over the whole GPU."""
    shape = Shape((), 16, 2, 4, 128, 128)
    if device == "cpu":
        num_seqs = min(num_seqs, 4)
    context = {256: 4096, 1: 32768}[num_seqs] if device == "cuda" else 512
    step = make_large_step(num_seqs, context, shape, dtype, device)
    gpu = attention_triton.get_gpu_info(torch.device(device))
    launches = attention_triton.plan_launches(
        step.query, step.key_cache, step.value_cache, step.block_table, gpu
    )
    assert launches[0].constants["IS_SPLIT"] or num_seqs > 4, "one sequence should fill the GPU"
    assert_as_defined(step, shape)


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=[needs_interpreter, pytest.mark.slow]), *DEVICES[1:]]
)
def test_a_cache_of_more_than_two_to_the_31_elements(device: str) -> None:
    """Offsets into it do not fit 32 bits. Sequences have blocks at both ends."""
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free GPU memory")
    heads, dim, block_size = 8, 128, 16
    num_blocks = 2**31 // (heads * dim * block_size) + 8
    place = torch.device(device)
    # Keys and values in one, to save half; a CPU gives memory only to what is written.
    cache = lazy_zeros((num_blocks, block_size, heads, dim), torch.float16, place)
    assert cache.numel() > 2**31
    torch.manual_seed(0)
    lens = torch.tensor([20, 40])
    last = num_blocks - 1
    table = torch.tensor([[last, 1, 0], [last - 3, 0, last - 6]])
    slots = torch.cat(
        [table[s, (p := torch.arange(n)) // 16] * 16 + p % 16 for s, n in enumerate(lens.tolist())]
    )
    assert int(slots.max()) * heads * dim > 2**31
    stored = torch.randn(len(slots), heads, dim).to(place, torch.float16)
    store_kv_triton(stored, stored, cache, cache, slots.to(place))
    flat = cache.view(-1, heads, dim)
    assert torch.equal(flat[slots.to(place)], stored)
    assert int(flat[: 2 * block_size].any(dim=(1, 2)).sum()) == 16 + 4, "written elsewhere too"
    query = torch.randn(2, heads, dim).to(place, torch.float16)
    for starts, num_splits in (([0, 1, 2], 1), ([0, 0, 2], 2)):
        loc = torch.tensor(starts, device=place).int()
        step = Step(query, cache, cache, table.to(place).int(), loc, lens.to(place).int())
        assert_as_defined(step, Shape((), key_dim=dim), num_splits)


# ------------------------------------------------------------------------------ graphs


def capture(function: Callable[[], Tensor], device: str) -> tuple[Tensor, Callable[[], None]]:
    """The result of `function()`, and a function that computes it again from the current contents
    of the inputs: the replay of a CUDA graph, or on a CPU the same launches, made again."""
    if device == "cuda":
        function()  # compiles, which a graph cannot
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = function()
        return output, graph.replay
    launches: list[Launch] = []
    with recorded(launches):
        output = function()

    def replay() -> None:
        for kernel, grid, args, kwargs in launches:
            kernel[grid](*args, **kwargs)

    return output, replay


def copy_padded(target: Tensor, source: Tensor, padding: Any) -> None:
    """`source` into the first rows of a static buffer, `padding` into the others."""
    target.fill_(padding)
    target[tuple(slice(size) for size in source.shape)] = source


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("num_queries", [1, 4])
def test_a_graph_replays_on_changed_contents(
    num_queries: int, num_splits: int, device: str
) -> None:
    """Captured once for 4 sequences, then used for 4, 2, 1 and 3. The rest is padding as the runner
    makes it: no queries, no keys, and slots that are not stored to."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    is_gpu, max_seqs, max_blocks = device == "cuda", 4, 40 if device == "cuda" else 6
    shape = Shape((), 16, 2, 2, 64, 64)
    cache = (max_seqs * max_blocks + 2, 16, 2, 64)
    num_tokens = max_seqs * num_queries

    def zeros(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    query, key, value = zeros(num_tokens, 4, 64), zeros(num_tokens, 2, 64), zeros(num_tokens, 2, 64)
    slots = zeros(num_tokens, dtype=torch.int64).fill_(-1)
    buffers = Step(
        query,
        zeros(*cache),
        zeros(*cache),
        zeros(max_seqs, max_blocks, dtype=torch.int32),
        zeros(max_seqs + 1, dtype=torch.int32),
        zeros(max_seqs, dtype=torch.int32),
    )

    def layer() -> Tensor:
        store_kv_triton(key, value, buffers.key_cache, buffers.value_cache, slots)
        return paged_attention_triton(*buffers.tensors, **shape.options, num_splits=num_splits)

    output, replay = capture(layer, device)
    rng = random.Random(0)
    for seed, num_seqs in enumerate((4, 2, 1, 3) if is_gpu else (3, 1)):
        most = max_blocks * 16 - 20
        seqs = tuple((num_queries, rng.choice([0, rng.randint(1, most)])) for _ in range(num_seqs))
        step = make_step(replace(shape, seqs=seqs), seed, dtype, device)
        expected = attention_by_definition(*step.tensors, **shape.options)

        # The keys and values of the step are not in the cache yet: the graph stores them.
        slot_mapping = step.metadata.slot_mapping
        index = slot_mapping // 16, slot_mapping % 16
        copy_padded(key, step.key_cache[index], 7.0)
        copy_padded(value, step.value_cache[index], 7.0)
        copy_padded(slots, slot_mapping, -1)
        step.key_cache[index] = torch.nan
        step.value_cache[index] = torch.nan

        last = int(step.query_start_loc[-1])
        for target, source, padding in zip(
            buffers.tensors, step.tensors, (7.0, torch.nan, torch.nan, 0, last, 0), strict=True
        ):
            copy_padded(target, source, padding)
        output.fill_(torch.nan)
        replay()
        assert_close(output[:last], expected)
        assert output[last:].isnan().all(), "padding was written"
        assert int(buffers.key_cache.isfinite().any(dim=(2, 3)).sum()) == sum(map(sum, seqs))
