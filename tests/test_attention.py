"""Paged attention against its definition, on every shape a step can have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random
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
    SPARE_BLOCKS,
    TORCH_BACKEND,
    AttentionBackend,
    KVCacheSpec,
    choose_backend,
    paged_attention_torch,
    plan_attention_torch,
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
    assert choose_backend("torch") is TORCH_BACKEND
    assert choose_backend("auto").name
    assert choose_backend(own) is own


@pytest.mark.parametrize("wrong", ["flash", "Torch", "", None, paged_attention_torch])
def test_choose_backend_refuses_what_it_does_not_know(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"attention_backend is .*auto, torch"):
        choose_backend(wrong)


# -- what a decoding batch keeps from step to step --


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.randoms(use_true_random=False), st.sampled_from([1, 4]), st.none() | st.integers(1, 9))
def test_kept_pages_are_the_pages(chance: Random, block_size: int, window: int | None) -> None:
    """Sequences come, go, pause, get chunks and decode; with the last step's plan and without any,
    attention is the same. What no sequence owns is NaN all the time."""
    num_blocks, num_kv_heads, dim = 64, 2, 4
    spec = KVCacheSpec(num_kv_heads, dim, dim)
    cpu = torch.device("cpu")
    caches = spec.allocate(num_blocks, block_size, torch.float32, cpu)
    for cache in caches:
        cache.fill_(math.nan)
    free = list(range(num_blocks))
    tables: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    plan = None
    for step in range(14):
        if not tables or (len(tables) < 4 and chance.random() < 0.3):
            tables[step], lengths[step] = [], 0
        elif len(tables) > 1 and chance.random() < 0.15:
            free += tables.pop(gone := chance.choice(sorted(tables)))
            del lengths[gone]
        seq_ids = [seq_id for seq_id in tables if chance.random() < 0.95] or list(tables)
        queries = [
            1 if lengths[s] and chance.random() < 0.9 else chance.randint(1, 5) for s in seq_ids
        ]
        slots = []
        for seq_id, number in zip(seq_ids, queries, strict=True):
            for position in range(lengths[seq_id], lengths[seq_id] + number):
                if position % block_size == 0:
                    tables[seq_id].append(free.pop(chance.randrange(len(free))))
                    for cache in caches:
                        cache[tables[seq_id][-1]] = math.nan
                slots.append(tables[seq_id][-1] * block_size + position % block_size)
            lengths[seq_id] += number
        store_kv_torch(*torch.randn(2, len(slots), num_kv_heads, dim), *caches, torch.tensor(slots))
        width = max(len(tables[s]) for s in seq_ids)
        block_table = torch.tensor([tables[s] + [0] * (width - len(tables[s])) for s in seq_ids])
        where = (
            block_table.int(),
            torch.tensor([0, *queries]).cumsum(0).int(),
            torch.tensor([lengths[s] for s in seq_ids]).int(),
        )
        query = torch.randn(len(slots), 4, dim)
        plan = plan_attention_torch(*where, block_size, tuple(seq_ids), plan)
        options: dict[str, Any] = {"scale": 0.5, "sliding_window": window}
        for _ in range(2):  # two layers with the same cache: what is kept may be asked for twice
            kept = paged_attention_torch(query, *caches, *where, **options, plan=plan)
        plain = paged_attention_torch(query, *caches, *where, **options)
        torch.testing.assert_close(kept, plain)
        assert not kept.isnan().any()


def test_a_batch_that_goes_on_decoding_gathers_no_more() -> None:
    """40 steps of the same two sequences: the pages are gathered when the room behind them is used
    up, and by whoever was not in the last step."""
    spec, block_size = KVCacheSpec(1, 4, 4), 4
    caches = spec.allocate(64, block_size, torch.float32, torch.device("cpu"))
    table = torch.arange(32).view(2, 16).int()
    plan, gathered = None, []
    for length in range(10, 50):
        where = (table, torch.tensor([0, 1, 2]).int(), torch.tensor([length, length - 3]).int())
        plan = plan_attention_torch(*where, block_size, (7, 8), plan)
        paged_attention_torch(torch.randn(2, 1, 4), *caches, *where, scale=1.0, plan=plan)
        gathered.append(plan[0].gather(caches[0]).data_ptr())
    assert len(set(gathered)) <= 1 + 40 // (SPARE_BLOCKS * block_size)
    for seq_ids, lengths in (((7, 9), (50, 47)), ((7, 8), (51, 48)), ((7, 8), (50, 46))):
        where = (table, torch.tensor([0, 1, 2]).int(), torch.tensor(lengths).int())
        other = plan_attention_torch(*where, block_size, seq_ids, plan)
        assert not other[0].keeps(caches[0])
