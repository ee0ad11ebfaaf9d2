"""The Triton kernel against the definition of attention, run by Triton's interpreter on a CPU.

The interpreter takes some 10 ms for each program and each tile of keys, so steps here are small; to
have many tiles all the same, `tiles(...)` makes the tiles smaller still. What the compiler makes of
the kernel is tested in test_aot.py, what a GPU makes of it in test_gpu_attention.py.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from attention_oracle import (
    STEPS,
    Shape,
    attention_by_definition,
    bfloat16_as_on_a_gpu,
    make_step,
    needs_interpreter,
    one_thread,
    unwritten_memory_is_nan,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton exists on Linux only")
tl = triton.language
import aot_kernels  # noqa: E402

from nanoserve.kernels import attention_triton  # noqa: E402
from nanoserve.kernels.attention_triton import (  # noqa: E402
    INTERPRETER,
    LOG2_E,
    MAX_SPLITS,
    MIN_SPLIT_KEYS,
    MIN_SPLIT_KEYS_MIXED,
    PROGRAMS_PER_SM,
    TILED_PER_SM,
    GpuInfo,
    Tiles,
    TritonBackend,
    choose_num_splits,
    choose_tiles,
    paged_attention_triton,
    plan_launches,
    store_kv_triton,
)

# As meant: an empty split's log2(0) is -inf, and a soft cap's exp2(large) is inf.
pytestmark = [
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:(divide by zero|overflow) encountered in"),
]

GPUS = (INTERPRETER, *(aot_kernels.GPUS[capability] for capability in (80, 89, 90, 100, 120)))
NOWHERE = 2**31 - 1  # a block id far outside every cache


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def tiles(block_m: int, block_n: int) -> AbstractContextManager[Any]:
    """Tiles of so many rows and keys, whatever the shapes."""
    chosen = Tiles(block_m, block_n, num_warps=1, num_stages=1)
    return mock.patch.object(attention_triton, "choose_tiles", return_value=chosen)


def assert_as_defined(
    shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float32, num_splits: int | None = None
) -> None:
    """The output is that of the definition, and the output of padding is not written. No block of
    another sequence is read: the rest of each table names a block that does not exist."""
    step = make_step(shape, seed, dtype)
    expected = attention_by_definition(*step.tensors, **shape.options)
    num_blocks = -(-step.seq_lens // shape.block_size)
    is_unused = torch.arange(step.block_table.shape[1]) >= num_blocks[:, None]
    step = replace(step, block_table=step.block_table.masked_fill(is_unused, NOWHERE))
    before = [tensor.clone() for tensor in step.tensors]
    with unwritten_memory_is_nan():
        output = paged_attention_triton(*step.tensors, **shape.options, num_splits=num_splits)
    assert output.dtype == dtype
    assert output.shape == expected.shape
    tolerance = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(
        output.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    for tensor, was in zip(step.tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(7e7), was.nan_to_num(7e7)), "an input was changed"


# ------------------------------------------------------------------------------ every shape


@pytest.mark.parametrize(("window", "num_splits"), [(6, 1), (None, 4)])
@pytest.mark.parametrize("name", STEPS)
def test_steps_by_name(name: str, window: int | None, num_splits: int) -> None:
    """On tiles of 4 queries and 4 keys: a prompt of 13 is 4 x 4 tiles, some splits are empty."""
    with tiles(8, 4):
        assert_as_defined(Shape(STEPS[name], sliding_window=window), num_splits=num_splits)


@pytest.mark.parametrize("name", STEPS)
def test_steps_by_name_on_the_chosen_tiles(name: str) -> None:
    assert_as_defined(Shape(STEPS[name], 16, num_kv_heads=1, key_dim=32, value_dim=32))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    queries = st.sampled_from([0, 1, 1, 1, 2, 4, 4, 7, 17])
    before = st.one_of(st.just(0), st.integers(1, 40))
    return Shape(
        seqs=tuple(draw(st.lists(st.tuples(queries, before), min_size=1, max_size=4))),
        block_size=draw(st.sampled_from([1, 4, 16, 64])),
        num_kv_heads=draw(st.sampled_from([1, 1, 2])),
        group=draw(st.sampled_from([1, 2, 3, 4])),
        key_dim=draw(st.sampled_from([4, 16, 24])),
        value_dim=draw(st.sampled_from([4, 16, 20])),
        sliding_window=draw(st.none() | st.integers(1, 50)),
        logits_soft_cap=draw(st.none() | st.sampled_from([0.5, 5.0, 50.0])),
        num_padding=draw(st.sampled_from([0, 0, 1, 3])),
    )


@settings(max_examples=8)
@given(
    shapes(),
    st.integers(0, 2**31),
    st.sampled_from([4, 8, 16]),
    st.sampled_from([4, 8, 16]),
    st.sampled_from([None, None, 2, 4]),
)
def test_any_step_is_as_defined(
    shape: Shape, seed: int, block_m: int, block_n: int, num_splits: int | None
) -> None:
    """Tiles narrower and wider than blocks, windows and sequences."""
    with tiles(block_m, block_n):
        assert_as_defined(shape, seed, num_splits=num_splits)


@pytest.mark.parametrize("dim", [64, 80, 128, 192, 256])
def test_head_sizes(dim: int) -> None:
    """Also sizes that are no power of 2: the tile is wider, and its padding must not count."""
    assert_as_defined(Shape(((5, 30), (1, 40)), 16, 1, 2, key_dim=dim, value_dim=dim))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 80), (192, 128)])
def test_keys_and_values_of_different_sizes(key_dim: int, value_dim: int) -> None:
    shape = Shape(((5, 30), (1, 40)), 16, 1, 2, key_dim=key_dim, value_dim=value_dim)
    assert_as_defined(shape)
    assert_as_defined(shape, num_splits=2)


@pytest.mark.parametrize("group", [3, 7, 8])
def test_query_heads_share_key_heads(group: int) -> None:
    """Of 128 rows, 42 queries of a group of 3 leave 2 idle, 18 of a group of 7 leave 2."""
    assert_as_defined(Shape(((45, 3), (1, 9)), 16, 2, group, key_dim=16, value_dim=16))


def test_more_heads_in_a_group_than_a_decode_tile_has_rows() -> None:
    """Multi-query attention: 71 heads on one key head, as Falcon has."""
    assert_as_defined(Shape(((3, 4), (1, 9)), 16, 1, 71, key_dim=16, value_dim=16))


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "soft_cap"),
    [(torch.float16, None), (torch.float16, 5.0), (torch.bfloat16, None)],
)
def test_half_precision(dtype: torch.dtype, soft_cap: float | None, num_splits: int) -> None:
    shape = Shape(STEPS["all at once"], 16, 1, key_dim=32, value_dim=32, logits_soft_cap=soft_cap)
    with tiles(16, 16), bfloat16_as_on_a_gpu():
        assert_as_defined(shape, dtype=dtype, num_splits=num_splits)


# What a plain run tries of them: each pair of tiles, group, head size and dtype.
PLAIN_TILES = {
    "sm_80-group1-dim64-fp16",
    "sm_80-group8-dim256-bf16",
    "sm_89-group4-dim256-fp16",
    "sm_90-group2-dim128-bf16",
    "sm_90-group4-dim80-fp16",
}


def tiles_of_all_gpus() -> Iterator[Any]:
    """(GPU, group, head size, dtype), once for every pair of tiles that a GPU gets for these."""
    seen = set()
    for gpu, group, dim, dtype in itertools.product(
        GPUS[1:], (1, 2, 4, 8), (64, 80, 128, 256), (torch.float16, torch.bfloat16)
    ):
        pair = tuple(choose_tiles(is_short, group, dim, dim, 2, gpu) for is_short in (True, False))
        if (pair, group, dim, dtype) not in seen:
            seen.add((pair, group, dim, dtype))
            name = f"sm_{gpu.capability}-group{group}-dim{dim}-{aot_kernels.TYPES[dtype]}"
            marks = () if name in PLAIN_TILES else pytest.mark.slow
            yield pytest.param(gpu, group, dim, dtype, id=name, marks=marks)


@pytest.mark.parametrize(("gpu", "group", "dim", "dtype"), tiles_of_all_gpus())
def test_the_tiles_of_each_gpu(gpu: GpuInfo, group: int, dim: int, dtype: torch.dtype) -> None:
    """A prompt of more than one tile behind a cached prefix, beside decodes and drafts, in half
    precision; then with splits."""
    block_q = choose_tiles(False, group, dim, dim, 2, gpu).block_m // group
    shape = Shape(((1, 70), (block_q + 3, 30), (2, 9)), 16, 1, group, key_dim=dim, value_dim=dim)
    on_gpu = mock.patch.object(attention_triton, "get_gpu_info", return_value=gpu)
    with on_gpu, bfloat16_as_on_a_gpu():
        assert_as_defined(shape, dtype=dtype)
        assert_as_defined(shape, dtype=dtype, num_splits=2)


def test_scores_too_large_for_exp() -> None:
    """Scores of hundreds, and a soft cap whose tanh saturates: the output is finite."""
    for soft_cap in (None, 0.5, 30.0):
        shape = Shape(((3, 9), (1, 5)), 4, 1, logits_soft_cap=soft_cap)
        step = make_step(shape)
        step.query.mul_(500)
        expected = attention_by_definition(*step.tensors, **shape.options)
        with tiles(8, 4):
            output = paged_attention_triton(*step.tensors, **shape.options)
        torch.testing.assert_close(output.double(), expected, rtol=1e-3, atol=1e-3)


# ------------------------------------------------------------------------------ corners


@pytest.mark.parametrize("num_splits", [None, 2])
@pytest.mark.parametrize(
    "seqs",
    [
        ((1, 0),),
        ((0, 5), (0, 0), (0, 3)),
        ((3, 2), (0, 5), (1, 6), (0, 0), (0, 0)),
        ((0, 0), (0, 7), (9, 2), (0, 0)),
    ],
)
def test_sequences_without_queries(
    seqs: tuple[tuple[int, int], ...], num_splits: int | None
) -> None:
    """As in the padding of a CUDA graph. The output of padding tokens stays unwritten."""
    with tiles(8, 4):
        assert_as_defined(Shape(seqs, num_padding=3), num_splits=num_splits)


@pytest.mark.parametrize("num_splits", [1, 2])
def test_few_tokens_of_one_sequence(num_splits: int) -> None:
    """No more tokens than sequences, as in a decode, but all of one sequence."""
    shape = Shape(((0, 4), (0, 0), (5, 9), (0, 3), (0, 1)))
    step = make_step(shape)
    tensors = step.query, step.key_cache, step.value_cache, step.block_table
    with tiles(4, 4):
        launches = plan_launches(*tensors, INTERPRETER)
        assert [launch.constants["PER_SEQUENCE"] for launch in launches] == [True]
        assert_as_defined(shape, num_splits=num_splits)


def test_nothing_to_do() -> None:
    step = make_step(Shape(((2, 3),)))
    no_tokens = replace(step, query=step.query[:0], query_start_loc=torch.zeros(2).int())
    assert paged_attention_triton(*no_tokens.tensors, scale=1.0).shape == (0, 4, 8)
    no_seqs = replace(
        step,
        block_table=step.block_table[:0],
        query_start_loc=torch.zeros(1).int(),
        seq_lens=step.seq_lens[:0],
    )
    assert paged_attention_triton(*no_seqs.tensors, scale=1.0).shape == (2, 4, 8)
    cache = torch.zeros(2, 4, 2, 8)
    empty = torch.zeros(0, 2, 8)
    store_kv_triton(empty, empty, cache, cache, torch.zeros(0, dtype=torch.int64))
    assert not cache.any()


def test_an_element_that_is_never_written_would_show() -> None:
    """The poison works: without its launches, the function returns NaN."""
    step = make_step(Shape(((2, 3),)))
    nothing = mock.MagicMock()
    with (
        unwritten_memory_is_nan(),
        mock.patch.object(attention_triton, "paged_attention_kernel", nothing),
    ):
        assert paged_attention_triton(*step.tensors, scale=1.0).isnan().all()


# ------------------------------------------------------------------------------ the docstring


@triton.jit
def softmax_kernel(query, key, value, table, maxima, totals, sums, end_tile):
    """Online softmax of 1 row over tiles of 2 keys (blocks of 2, one head of 1 number)."""
    rows, dims = tl.arange(0, 1), tl.arange(0, 4)
    state = (
        tl.full([1], float("-inf"), tl.float32),
        tl.zeros([1], tl.float32),
        tl.zeros([1, 4], tl.float32),
    )
    loaded = tl.load(query + rows[:, None] + tl.arange(0, 1)[None, :])
    m, total, acc = attention_triton._attend_tiles(
        state, loaded, 0, end_tile, rows + 3, 4, table, key, value, key, value, 2, 1, 8, 4, 0, 1.0,
        0.0, HEAD_DIM=1, VALUE_DIM=4, BLOCK_D=1, BLOCK_V=4, BLOCK_SIZE=2, BLOCK_N=2, WINDOW=0,
        HAS_SOFT_CAP=False, BITS_8="", IS_MASKED=False,
    )  # fmt: skip
    tl.store(maxima + rows, m)
    tl.store(totals + rows, total)
    tl.store(sums + rows[:, None] * 4 + dims[None, :], acc)


KEYS = torch.tensor([1.0, 3.0, 4.0, 2.0]).view(2, 2, 1, 1)  # with a query of 1: the scores
VALUES = torch.eye(4).view(2, 2, 1, 4)  # v0 .. v3, so that an output shows its weights
TABLE = torch.tensor([[0, 1]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("num_tiles", "m", "total", "acc"),
    [(1, 3, 5 / 4, [1 / 4, 1, 0, 0]), (2, 4, 15 / 8, [1 / 8, 1 / 2, 1, 1 / 4])],
)
def test_the_docstrings_online_softmax(
    num_tiles: int, m: float, total: float, acc: list[float]
) -> None:
    found = torch.zeros(1), torch.zeros(1), torch.zeros(4)
    softmax_kernel[(1,)](torch.ones(1), KEYS, VALUES, TABLE, *found, num_tiles)
    assert [float(found[0]), float(found[1]), found[2].tolist()] == [m, total, acc]


def test_the_docstrings_splits() -> None:
    """Query 3's two splits have lse log2(10) and log2(20), and weigh 1/3 and 2/3."""
    merge = attention_triton.merge_splits_kernel
    seen: list[Tensor] = []

    class Spy:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launch(partial: Tensor, lse: Tensor, *args: Any, **kwargs: Any) -> None:
                if not seen:  # the tiled launch's; the other computes no sequence here
                    seen.extend((partial[3, 0], lse[3, 0]))
                merge[grid](partial, lse, *args, **kwargs)

            return launch

    loc, lens = torch.tensor([0, 4]).int(), torch.tensor([4]).int()
    arguments = (torch.ones(4, 1, 1), KEYS, VALUES, TABLE, loc, lens)
    softmax = torch.tensor([2.0, 8.0, 16.0, 4.0]) / 30
    with tiles(2, 2), mock.patch.object(attention_triton, "merge_splits_kernel", Spy()):
        whole = paged_attention_triton(*arguments, scale=1 / LOG2_E)[3, 0]
        output = paged_attention_triton(*arguments, scale=1 / LOG2_E, num_splits=2)[3, 0]
    partial, lse = seen
    torch.testing.assert_close(lse, torch.tensor([10.0, 20.0]).log2())
    torch.testing.assert_close(partial, torch.tensor([[0.2, 0.8, 0, 0], [0, 0, 0.8, 0.2]]))
    torch.testing.assert_close(output, partial[0] / 3 + partial[1] * 2 / 3)
    torch.testing.assert_close(output, softmax)
    torch.testing.assert_close(whole, softmax)


# ------------------------------------------------------------------------------ the launches


@triton.jit
def find_kernel(query_start_loc, found, num_seqs, BLOCK_Q: tl.constexpr):
    tile = tl.program_id(0)
    seq, first_tile = attention_triton._find_sequence(query_start_loc, tile, num_seqs, BLOCK_Q)
    tl.store(found + 2 * tile, seq)
    tl.store(found + 2 * tile + 1, first_tile)


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """A tensor that has a shape and no contents: reading it fails."""
    return torch.empty(shape, dtype=dtype, device="meta")


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from([0, 0, 1, 1, 2, 3, 5, 8, 13, 30]), min_size=1, max_size=7),
    st.integers(0, 3),
    st.sampled_from([1, 2, 3, 4]),
)
def test_tiles_cover_every_query_once(queries: list[int], num_padding: int, group: int) -> None:
    """The grid of the tiled launch, against all (sequence, first query) pairs."""
    starts = torch.tensor([0, *queries]).cumsum(0)
    num_tokens, num_seqs = sum(queries) + num_padding, len(queries)
    query, cache = meta(num_tokens, group, 16), meta(9, 4, 1, 16)
    with tiles(8, 4):
        tiled, *_ = plan_launches(query, cache, cache, meta(num_seqs, 8), INTERPRETER)
    if num_tokens <= num_seqs:
        assert tiled.constants["PER_SEQUENCE"], "a decode is one launch"
        assert tiled.grid[0] == num_seqs
        assert tiled.max_short >= max(queries)
        return
    block_q = tiled.constants["BLOCK_M"] // group
    num_tiles = tiled.grid[0]
    found = torch.full((num_tiles, 2), -1, dtype=torch.int32)
    find_kernel[(num_tiles,)](starts.int(), found, num_seqs, block_q)
    taken = [
        (seq, first_query)
        for tile, (seq, first_tile) in enumerate(found.tolist())
        if (first_query := (tile - first_tile) * block_q) < queries[seq]
    ]
    assert sorted(taken) == [
        (seq, first) for seq in range(num_seqs) for first in range(0, queries[seq], block_q)
    ]


@pytest.mark.parametrize("seqs", [((1, 4), (9, 0), (2, 3), (4, 1), (5, 5), (0, 2), (3, 0))])
def test_each_sequence_is_computed_by_one_launch(seqs: tuple[tuple[int, int], ...]) -> None:
    """Run one at a time over poisoned memory: long sequences by the first, short by the second."""
    shape = Shape(seqs)
    step = make_step(shape)
    lens = [
        queries for queries, _ in seqs for _ in range(queries)
    ]  # queries in the sequence of each token
    with tiles(8, 4):
        both = plan_launches(
            step.query, step.key_cache, step.value_cache, step.block_table, INTERPRETER
        )
        assert len(both) == 2
        for launch, is_computed in zip(both, (lambda n: n > 4, lambda n: n <= 4), strict=True):
            with (
                unwritten_memory_is_nan(),
                mock.patch.object(attention_triton, "plan_launches", lambda *_, x=launch: [x]),
            ):
                output = paged_attention_triton(*step.tensors, **shape.options)
            written = [not row.isnan().any() for row in output]
            untouched = [bool(row.isnan().all()) for row in output]
            assert written == [is_computed(n) for n in lens]
            assert untouched == [not is_computed(n) for n in lens]


@settings(max_examples=100)
@given(
    num_tokens=st.integers(1, 20_000),
    num_seqs=st.integers(1, 512),
    max_blocks=st.integers(1, 2048),
    num_kv_heads=st.sampled_from([1, 2, 8, 32]),
    group=st.sampled_from([1, 2, 3, 4, 7, 8, 64]),
    dim=st.sampled_from([32, 80, 128, 256]),
    gpu=st.sampled_from(GPUS),
)
def test_launches_depend_on_shapes_only(
    num_tokens: int,
    num_seqs: int,
    max_blocks: int,
    num_kv_heads: int,
    group: int,
    dim: int,
    gpu: GpuInfo,
) -> None:
    """Planned on tensors without contents: what a CUDA graph may hold."""
    cache = meta(64, 16, num_kv_heads, dim)
    query, table = meta(num_tokens, num_kv_heads * group, dim), meta(num_seqs, max_blocks)
    launches = plan_launches(query, cache, cache, table, gpu)
    assert [launch.constants["PER_SEQUENCE"] for launch in launches] == (
        [True] if num_tokens <= num_seqs else [False, True]
    )
    assert len({launch.max_short for launch in launches}) == 1, "a sequence twice, or not at all"
    assert launches[-1].grid[0] == num_seqs
    for launch in launches:
        _, kv_heads, num_splits = launch.grid
        assert kv_heads == num_kv_heads
        assert launch.constants["IS_SPLIT"] == (num_splits > 1)
        assert launch.constants["BLOCK_M"] >= group
        assert launch.grid[0] * max(launch.grid[1:]) < 2**31 and max(launch.grid[1:]) < 2**16


@given(
    num_programs=st.integers(1, 5000),
    max_seq_len=st.integers(1, 200_000),
    gpu=st.sampled_from(GPUS),
    per_sm=st.sampled_from([PROGRAMS_PER_SM, TILED_PER_SM]),
    min_keys=st.sampled_from([MIN_SPLIT_KEYS, MIN_SPLIT_KEYS_MIXED]),
)
def test_as_many_splits_as_fill_a_gpu(
    num_programs: int, max_seq_len: int, gpu: GpuInfo, per_sm: int, min_keys: int
) -> None:
    num_splits = choose_num_splits(num_programs, max_seq_len, gpu, per_sm, min_keys)
    is_full = num_programs * num_splits >= per_sm * gpu.num_sms
    assert num_splits in [2**i for i in range(7)] and num_splits <= MAX_SPLITS
    assert is_full or num_splits == MAX_SPLITS or max_seq_len // num_splits < 2 * min_keys
    if num_splits > 1:
        assert max_seq_len // num_splits >= min_keys, "pieces got too short"
        assert num_programs * num_splits // 2 < per_sm * gpu.num_sms, "half would do"


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "context", "splits"),
    [
        (512, 512, 4096, {True: 1}),  # decodes that fill the GPU
        (1, 1, 32768, {True: 64}),  # one that does not: 8 kv heads * 64 programs
        (8192, 1, 4096, {False: 1, True: 1}),  # a long prompt fills it with 128 tiles * 8
        (2048, 9, 4096, {False: 1, True: 1}),  # so do 32 * 8 on 132 multiprocessors
        (300, 4, 4096, {False: 4, True: 1}),  # a short one does not: 5 tiles * 8
        (8192, 3, 131072, {False: 1, True: 32}),  # a decode of 100k keys beside a long prompt
    ],
)
def test_splits_are_for_launches_that_do_not_fill_the_gpu(
    num_tokens: int, num_seqs: int, context: int, splits: dict[bool, int]
) -> None:
    """On an H100, for 8 kv heads of groups of 2."""
    cache, table = meta(99, 16, 8, 128), meta(num_seqs, context // 16)
    launches = plan_launches(meta(num_tokens, 16, 128), cache, cache, table, aot_kernels.GPUS[90])
    found = {launch.constants["PER_SEQUENCE"]: launch.grid[2] for launch in launches}
    assert found == splits


def test_a_short_sequence_has_splits_of_its_own_beside_a_prompt() -> None:
    """Decodes and drafts are merged by sequence, the prompt's tokens are not split."""
    shape = Shape(((1, 40), (9, 4), (0, 3), (3, 30), (6, 0)), num_padding=2)
    step = make_step(shape)
    expected = attention_by_definition(*step.tensors, **shape.options)
    settings = {"MIN_SPLIT_KEYS_MIXED": 4, "PROGRAMS_PER_SM": 1, "TILED_PER_SM": 0}
    with tiles(8, 4), mock.patch.multiple(attention_triton, **settings):
        launches = plan_launches(*step.tensors[:4], INTERPRETER)
        assert [launch.grid[2] for launch in launches] == [1, 8]
        with unwritten_memory_is_nan():
            output = paged_attention_triton(*step.tensors, **shape.options)
    torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_each_launch_merges_its_own_sequences() -> None:
    """In whatever order the two run: neither writes what is the other's."""
    shape = Shape(((1, 40), (9, 4), (0, 3), (3, 30), (6, 0)), num_padding=2)
    step = make_step(shape)
    expected = attention_by_definition(*step.tensors, **shape.options)
    with tiles(8, 4):
        launches = plan_launches(*step.tensors[:4], INTERPRETER, num_splits=4)
    reversed_plan = mock.patch.object(
        attention_triton, "plan_launches", return_value=launches[::-1]
    )
    with reversed_plan, unwritten_memory_is_nan():
        output = paged_attention_triton(*step.tensors, **shape.options)
    torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_launches_are_planned_once_a_step() -> None:
    """Three layers, of which the last has other heads."""
    backend = TritonBackend()
    steps = [make_step(Shape(((1, 5), (6, 2)), num_kv_heads=n)) for n in (2, 2, 1)]
    metadata = backend.plan(steps[0].metadata, 4, torch.float32)
    with (
        tiles(8, 4),
        mock.patch.object(attention_triton, "plan_launches", wraps=plan_launches) as plan,
    ):
        for step in steps:
            output = backend.attend(step.query, step.caches, metadata, scale=0.3)
            alone = backend.attend(step.query, step.caches, step.metadata, scale=0.3)
            assert torch.equal(output, alone)
    assert plan.call_count == 2 + 3, "two shapes of layers, and three times without a plan"
    assert backend.plan(metadata, 4, torch.float32).plan == {}, "the next step has another plan"


@pytest.mark.parametrize("gpu", GPUS, ids=str)
@pytest.mark.parametrize("num_bytes", [2, 4])
@pytest.mark.parametrize("per_sequence", [True, False])
def test_tiles_fit_the_gpu(per_sequence: bool, num_bytes: int, gpu: GpuInfo) -> None:
    """A tile of keys and one of values, beside the queries, in shared memory. (test_aot.py asks
    the compiler.)"""
    for dim in (16, 32, 64, 80, 96, 128, 192, 256):
        for group in (1, 2, 3, 4, 7, 8, 16):
            found = choose_tiles(per_sequence, group, dim, dim, num_bytes, gpu)
            assert found.block_m >= group, "a group's heads are rows of one tile"
            for number in (found.block_m, found.block_n, found.num_warps):
                assert number & (number - 1) == 0
            assert found.block_n >= 16, "tensor cores take no less"
            width = 2 * max(16, triton.next_power_of_2(dim))
            size = (found.block_m + found.block_n) * width * num_bytes
            assert size <= gpu.shared_memory


# ------------------------------------------------------------------------------ storing


@settings(max_examples=25)
@given(st.data())
def test_store_kv_writes_the_slots_and_nothing_else(data: st.DataObject) -> None:
    """From views of a larger product, into a cache whose other slots stay as they are."""
    num_blocks, block_size = 4, data.draw(st.sampled_from([1, 4, 16]))
    heads = data.draw(st.sampled_from([1, 2, 3]))
    key_dim, value_dim = data.draw(st.sampled_from([(4, 4), (6, 3), (80, 16)]))
    slots = data.draw(
        st.lists(
            st.integers(-3, num_blocks * block_size - 1),
            unique_by=lambda s: s if s >= 0 else object(),
            max_size=5,
        )
    )
    product = torch.randn(len(slots), 3 + heads, key_dim + value_dim)
    key, value = product[:, 1 : 1 + heads, :key_dim], product[:, 1 : 1 + heads, key_dim:]
    caches = [torch.randn(num_blocks, block_size, heads, d) for d in (key_dim, value_dim)]
    expected = [cache.clone() for cache in caches]
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[0][slot // block_size, slot % block_size] = key[token]
            expected[1][slot // block_size, slot % block_size] = value[token]
    store_kv_triton(key, value, *caches, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])


# ------------------------------------------------------------------------------ the choice


def test_a_cpu_without_the_interpreter_refuses_triton() -> None:
    """And "auto" takes torch there."""
    code = """
import torch
from nanoserve import LLM
from nanoserve.kernels.selector import get_attn_backend
assert get_attn_backend("auto", torch.device("cpu")).name != "triton"
try:
    LLM(attention_backend="triton", num_kv_blocks=16)
except ValueError as error:
    print(error)
"""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "attention_backend is 'triton', which needs a CUDA GPU. Use 'auto', or set "
        "TRITON_INTERPRET=1 in the environment to have Triton's interpreter run it (slowly)."
    )
