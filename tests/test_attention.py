"""Paged attention against its definition, on every shape a step can have."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_oracle import (
    STEPS,
    Shape,
    attention_by_definition,
    make_step,
    unwritten_memory_is_nan,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.attention import (
    TORCH_BACKEND,
    AttentionBackend,
    KVCacheSpec,
    StepMetadata,
    get_attn_backend,
    lazy_zeros,
)
from nanoserve.kernels.attention_cpu import (
    GatheredBatch,
    PagedTokens,
    as_rows,
    divide_step,
    paged_attention_torch,
    store_kv_torch,
)


def assert_as_defined(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
    step = make_step(shape, seed, dtype)
    before = [tensor.clone() for tensor in step.tensors]
    output = paged_attention_torch(*step.tensors, **shape.options)
    expected = attention_by_definition(*step.tensors, **shape.options)
    assert output.dtype == dtype
    assert output.shape == (len(step.query), shape.num_kv_heads * shape.group, shape.value_dim)
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    for tensor, was in zip(step.tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(7e7), was.nan_to_num(7e7)), "an input was changed"


@pytest.fixture(autouse=True)
def one_thread_and_poisoned_memory() -> Iterator[None]:
    """An output element that is never written is NaN."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with unwritten_memory_is_nan():
        yield
    torch.set_num_threads(threads)


# ------------------------------------------------------------------------------ every shape


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("name", STEPS)
def test_steps_by_name(name: str, block_size: int) -> None:
    assert_as_defined(Shape(STEPS[name], block_size))
    assert_as_defined(Shape(STEPS[name], block_size, sliding_window=4))


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    queries = st.sampled_from([1, 1, 1, 2, 4, 4, 7, 17])  # equal ones often meet in a step
    before = st.one_of(st.just(0), st.integers(0, 40))
    return Shape(
        seqs=tuple(draw(st.lists(st.tuples(queries, before), min_size=1, max_size=6))),
        block_size=draw(st.sampled_from([1, 4, 16])),
        num_kv_heads=draw(st.sampled_from([1, 2, 3])),
        group=draw(st.sampled_from([1, 2, 4])),
        key_dim=draw(st.sampled_from([4, 8, 24])),
        value_dim=draw(st.sampled_from([4, 8, 12])),
        sliding_window=draw(st.none() | st.integers(1, 50)),
        logits_soft_cap=draw(st.none() | st.sampled_from([0.5, 5.0, 50.0])),
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(shapes(), st.integers(0, 2**31))
def test_any_step_is_as_defined(shape: Shape, seed: int) -> None:
    assert_as_defined(shape, seed)


@pytest.mark.parametrize("window", [None, 100])
def test_a_long_prompt_beside_decodes(window: int | None) -> None:
    """Longer than any tile an implementation may cut it into."""
    seqs = ((1, 20), (530, 70), (1, 333), (530, 0))
    assert_as_defined(Shape(seqs, 16, num_kv_heads=1, group=1, key_dim=4, sliding_window=window))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_half_precision(dtype: torch.dtype, soft_cap: float | None) -> None:
    assert_as_defined(Shape(STEPS["all at once"], logits_soft_cap=soft_cap), dtype=dtype)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(shapes(), st.integers(0, 2**31))
def test_a_sequence_gets_the_same_alone_and_in_company(shape: Shape, seed: int) -> None:
    step = make_step(shape, seed)
    together = paged_attention_torch(*step.tensors, **shape.options)
    for seq in range(len(shape.seqs)):
        start, end = step.query_start_loc[seq : seq + 2].tolist()
        alone = replace(
            step,
            query=step.query[start:end],
            block_table=step.block_table[seq : seq + 1],
            query_start_loc=torch.tensor([0, end - start]).int(),
            seq_lens=step.seq_lens[seq : seq + 1],
        )
        output = paged_attention_torch(*alone.tensors, **shape.options)
        torch.testing.assert_close(output, together[start:end], rtol=1e-5, atol=1e-6)


def test_chunks_of_a_prompt_add_up_to_the_prompt() -> None:
    """Query j of q stands at position seq_len - q + j: cut anywhere, a prompt gives the same."""
    whole = make_step(Shape(((21, 0),), sliding_window=6))
    options = Shape((), sliding_window=6).options
    expected = paged_attention_torch(*whole.tensors, **options)
    parts = []
    for start, end in ((0, 8), (8, 9), (9, 21)):
        chunk = replace(
            whole,
            query=whole.query[start:end],
            query_start_loc=torch.tensor([0, end - start]).int(),
            seq_lens=torch.tensor([end]).int(),
        )
        parts.append(paged_attention_torch(*chunk.tensors, **options))
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-5, atol=1e-6)


def test_a_sequence_may_bring_no_query() -> None:
    """Rows that only pad a batch have query_start_loc[i] == query_start_loc[i + 1]."""
    assert_as_defined(Shape(((3, 2), (0, 5), (1, 6), (0, 1))))


def test_a_window_of_one_sees_only_itself() -> None:
    shape = Shape(((3, 2),), num_kv_heads=1, group=1, sliding_window=1)
    step = make_step(shape)
    output = paged_attention_torch(*step.tensors, **shape.options)
    blocks = step.block_table[0]
    own = [step.value_cache[blocks[p // 4], p % 4] for p in (2, 3, 4)]
    torch.testing.assert_close(output, torch.stack(own))


# ------------------------------------------------------------------------------ storing


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_store_kv_writes_the_slots_and_nothing_else(data: st.DataObject) -> None:
    """Negative slots mean: do not store (padding of a batch)."""
    num_blocks, block_size, heads = 5, data.draw(st.sampled_from([1, 4, 16])), 2
    slots = data.draw(
        st.lists(
            st.integers(-3, num_blocks * block_size - 1),
            unique_by=lambda s: s if s >= 0 else object(),
        )
    )
    key, value = torch.randn(len(slots), heads, 6), torch.randn(len(slots), heads, 3)
    key_cache = torch.randn(num_blocks, block_size, heads, 6)
    value_cache = torch.randn(num_blocks, block_size, heads, 3)
    expected_keys, expected_values = key_cache.clone(), value_cache.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected_keys[slot // block_size, slot % block_size] = key[token]
            expected_values[slot // block_size, slot % block_size] = value[token]
    store_kv_torch(key, value, key_cache, value_cache, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(key_cache, expected_keys)
    assert torch.equal(value_cache, expected_values)


def test_store_kv_takes_slices_of_a_larger_product() -> None:
    """Keys and values come as views of the stacked qkv product."""
    product = torch.randn(3, 2, 8)
    key, value = product[..., :4], product[..., 4:]
    key_cache, value_cache = torch.zeros(2, 4, 2, 4), torch.zeros(2, 4, 2, 4)
    store_kv_torch(key, value, key_cache, value_cache, torch.tensor([6, -1, 0]))
    assert torch.equal(key_cache[1, 2], key[0])
    assert torch.equal(value_cache[0, 0], value[2])
    assert int(key_cache.count_nonzero()) == 2 * key[0].numel()


def test_what_is_stored_is_what_is_attended_to() -> None:
    """Token by token through store_kv and paged_attention: a decode loop by hand."""
    shape = Shape(((9, 0),), num_kv_heads=2)
    step = make_step(shape)
    expected = attention_by_definition(*step.tensors, **shape.options)
    blocks = step.block_table[0].tolist()
    key_cache = torch.full_like(step.key_cache, math.nan)
    value_cache = torch.full_like(step.value_cache, math.nan)
    for position in range(9):
        place = blocks[position // 4], position % 4
        key, value = step.key_cache[place][None], step.value_cache[place][None]
        slot = torch.tensor([place[0] * 4 + place[1]])
        store_kv_torch(key, value, key_cache, value_cache, slot)
        output = paged_attention_torch(
            step.query[position : position + 1],
            key_cache,
            value_cache,
            step.block_table,
            torch.tensor([0, 1]).int(),
            torch.tensor([position + 1]).int(),
            **shape.options,
        )
        torch.testing.assert_close(output[0].double(), expected[position], rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------ the cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_spec_allocates_what_it_says(dtype: torch.dtype) -> None:
    spec = KVCacheSpec(num_kv_heads=3, key_dim=8, value_dim=5)
    key_cache, value_cache = spec.allocate(7, 4, dtype, torch.device("cpu"))
    assert key_cache.shape == (7, 4, 3, 8)
    assert value_cache.shape == (7, 4, 3, 5)
    assert key_cache.dtype == value_cache.dtype == dtype
    assert not key_cache.any()
    assert not value_cache.any()
    assert key_cache.nbytes + value_cache.nbytes == 7 * spec.num_bytes(4, dtype)


def test_layers_do_not_share_memory() -> None:
    spec = KVCacheSpec(1, 2, 2)
    tensors = [t for _ in range(2) for t in spec.allocate(2, 2, torch.float32, torch.device("cpu"))]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [int(tensor.max()) for tensor in tensors] == [1, 2, 3, 4]


# ------------------------------------------------------------------------------ the choice


def test_choose_backend() -> None:
    own = AttentionBackend("own", store_kv_torch, paged_attention_torch)
    assert get_attn_backend("torch") is TORCH_BACKEND
    assert get_attn_backend("auto").name
    assert get_attn_backend(own) is own


@pytest.mark.parametrize("wrong", ["flash", "Torch", "", None, paged_attention_torch])
def test_choose_backend_refuses_what_it_does_not_know(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"attention_backend is .*auto, torch"):
        get_attn_backend(wrong)


# ------------------------------------------------------------------- pages read where they lie


def test_decodes_are_read_where_they_lie_and_prompts_are_gathered() -> None:
    """In float32 on a CPU. Every query belongs to one part of the step."""
    table = torch.arange(24).view(4, 6).int()
    starts, lengths = torch.tensor([0, 1, 9, 12, 12]).int(), torch.tensor([7, 8, 20, 5]).int()
    paged, gathered = divide_step(table, starts, lengths, 4, torch.float32)
    assert isinstance(paged, PagedTokens) and paged.tokens.tolist() == [0, 9, 10, 11]
    assert isinstance(gathered, GatheredBatch) and gathered.tokens(0, 8).tolist() == [*range(1, 9)]
    parts = divide_step(table, starts, lengths, 4, torch.bfloat16)
    assert all(isinstance(part, GatheredBatch) for part in parts)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_one_plan_serves_layers_of_all_kinds(data: st.DataObject) -> None:
    """Decodes, drafts of a few tokens and prompts in one step; layers with other windows, head
    counts and caps share its plan. What no sequence owns is NaN."""
    block_size = data.draw(st.sampled_from([1, 4, 16]))
    query_lens = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    lengths = [number + data.draw(st.integers(0, 40)) for number in query_lens]
    num_blocks = [-(-length // block_size) for length in lengths]
    chance = data.draw(st.randoms(use_true_random=False))
    free = list(range(sum(num_blocks) + 3))
    chance.shuffle(free)
    tables = [[free.pop() for _ in range(number)] for number in num_blocks]
    width = max(num_blocks)
    metadata = StepMetadata(
        slot_mapping=torch.tensor(
            [
                table[position // block_size] * block_size + position % block_size
                for table, length, number in zip(tables, lengths, query_lens, strict=True)
                for position in range(length - number, length)
            ]
        ),
        block_table=torch.tensor([table + [0] * (width - len(table)) for table in tables]).int(),
        query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
        seq_lens=torch.tensor(lengths).int(),
    )
    metadata = TORCH_BACKEND.plan_step(metadata, block_size, torch.float32)
    for _ in range(4):
        num_kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 2), (1, 4)]))
        options: dict[str, Any] = {
            "scale": 0.4,
            "sliding_window": data.draw(st.none() | st.integers(1, 30)),
            "logits_soft_cap": data.draw(st.none() | st.just(1.5)),
        }
        spec = KVCacheSpec(num_kv_heads, 8, 4)
        caches = spec.allocate(sum(num_blocks) + 3, block_size, torch.float32, torch.device("cpu"))
        for cache in caches:
            cache.fill_(math.nan)
        for table, length in zip(tables, lengths, strict=True):
            for position in range(length):
                for cache in caches:
                    row = cache[table[position // block_size], position % block_size]
                    torch.nn.init.normal_(row)
        num_tokens = sum(query_lens)
        key, value = (
            torch.randn(num_tokens, num_kv_heads, 8),
            torch.randn(num_tokens, num_kv_heads, 4),
        )
        query = torch.randn(num_tokens, num_kv_heads * group, 8)
        TORCH_BACKEND.store(key, value, caches, metadata)
        output = TORCH_BACKEND.attend(query, caches, metadata, **options)
        tables_of_step = metadata.block_table, metadata.query_start_loc, metadata.seq_lens
        expected = attention_by_definition(query, *caches, *tables_of_step, **options)
        torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5)


def test_a_layer_of_infinite_scores_leaves_nothing_for_the_next() -> None:
    """The scores' memory is used again, and 0 * inf is NaN."""
    caches = KVCacheSpec(1, 4, 4).allocate(4, 4, torch.float32, torch.device("cpu"))
    for cache in caches:
        torch.nn.init.normal_(cache)
    wild = caches[0].clone().fill_(math.inf)
    metadata = StepMetadata(
        slot_mapping=torch.tensor([3, 7]),
        block_table=torch.tensor([[0, 0], [1, 2]]).int(),
        query_start_loc=torch.tensor([0, 1, 2]).int(),
        seq_lens=torch.tensor([3, 6]).int(),
    )
    query = torch.randn(2, 1, 4)
    expected = TORCH_BACKEND.attend(query, caches, metadata, scale=1.0)
    metadata = TORCH_BACKEND.plan_step(metadata, 4, torch.float32)
    assert TORCH_BACKEND.attend(query, (wild, caches[1]), metadata, scale=1.0).isnan().all()
    assert torch.equal(TORCH_BACKEND.attend(query, caches, metadata, scale=1.0), expected)


def test_no_page_is_copied() -> None:
    """A cache as it is allocated is a table of vectors as it lies there."""
    for cache in KVCacheSpec(3, 8, 4).allocate(5, 4, torch.float32, torch.device("cpu")):
        rows = as_rows(cache)
        assert rows.shape == (5 * 3 * 4, cache.shape[-1])
        assert rows.data_ptr() == cache.data_ptr()
        rows[(2 * 3 + 1) * 4 + 3] = 7  # block 2, head 1, slot 3
        assert cache[2, 3, 1].eq(7).all()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux's /proc")
def test_a_cache_takes_up_room_once_it_is_written() -> None:
    """And a forked process writes to memory of its own."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache = lazy_zeros((64, 2**18), torch.float32, torch.device("cpu"))  # 64 MiB
    assert resident() - before < 2**23
    assert not cache[:32].any()
    cache[32:] = 1
    assert resident() - before > 2**24
    child = os.fork()
    if not child:
        cache[40] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert cache[32:].eq(1).all()


def test_a_process_of_other_defaults_gets_the_same() -> None:
    shape = Shape(seqs=((1, 9), (1, 4), (6, 6)))
    torch.set_default_dtype(torch.float64)
    try:
        assert_as_defined(shape)
    finally:
        torch.set_default_dtype(torch.float32)


def test_more_keys_than_32_bits_tell_apart_are_refused() -> None:
    """Rather than read from elsewhere. (The cache is one number, repeated: it takes no memory.)"""
    cache = torch.zeros(1).expand(2**28, 8, 1, 1)
    tables = torch.zeros(1, 1).int(), torch.tensor([0, 1]).int(), torch.tensor([3]).int()
    [tokens] = divide_step(*tables, 8, torch.float32)
    assert isinstance(tokens, PagedTokens)
    with pytest.raises(ValueError, match=r"32-bit.*num_kv_blocks"):
        tokens.find_pages(len(cache), 1, 1, None)


@pytest.mark.parametrize("num_queries", [1, 6], ids=["decode", "prompt"])
@pytest.mark.parametrize("block", [-1, 3, 2**20, 2**30, -(2**30)])
def test_a_block_that_is_not_there_is_refused(block: int, num_queries: int) -> None:
    """And not looked for in the memory around the cache. (2**30 * 4 slots is 0 in 32 bits.) What a
    table holds behind its sequence's last block is nobody's business."""
    caches = KVCacheSpec(1, 8, 8).allocate(3, 4, torch.float32, torch.device("cpu"))
    query = torch.ones(2 * num_queries, 1, 8)
    starts, lengths = torch.arange(3).int() * num_queries, torch.tensor([6, 10]).int()

    def attend(*table: list[int]) -> torch.Tensor:
        tables = torch.tensor(table).int(), starts, lengths
        return paged_attention_torch(query, *caches, *tables, scale=1.0)

    for table in ([0, 1, 0], [2, 1, block]), ([0, block, 0], [2, 1, 0]):
        with pytest.raises(IndexError):
            attend(*table)
    assert attend([0, 1, block, block], [2, 1, 0, block]).eq(0).all()


def test_pytorch_says_nothing_of_its_beta_state() -> None:
    """Nor does it in a fresh process, whose first sparse tensor this is."""
    code = (
        "import torch; from nanoserve.attention import *\n"
        "from nanoserve.kernels.attention_cpu import *\n"
        "c = KVCacheSpec(1, 4, 4).allocate(2, 4, torch.float32, torch.device('cpu')); "
        "t = torch.tensor([[0]]).int(), torch.tensor([0, 1]).int(), torch.tensor([3]).int(); "
        "print(paged_attention_torch(torch.ones(1, 1, 4), *c, *t, scale=1.0).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[[0.0, 0.0, 0.0, 0.0]]]" and "beta" not in done.stderr
