"""Attention: its definition against PyTorch's own, and every backend against the definition."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attention_oracle import (
    Shape,
    attention_by_definition,
    make_step,
    needs_interpreter,
    one_thread,
    unwritten_memory_is_nan,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.attention import AttentionBackend
from nanoserve.kernels.attention_cpu import TorchBackend, paged_attention_torch
from nanoserve.kernels.selector import get_attn_backend
from nanoserve.kv_cache import KVCacheSpec, lazy_zeros

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread_and_poisoned_memory() -> Iterator[None]:
    """An output element that is never written is NaN."""
    with one_thread(), unwritten_memory_is_nan():
        yield


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    queries = st.sampled_from([0, 1, 1, 1, 2, 4, 4, 7, 17])  # equal ones often meet in a step
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


# ------------------------------------------------------------------------------ the definition


@settings(max_examples=100)
@given(shapes(), st.integers(0, 2**31))
def test_the_definition_is_attention_of_pytorch_over_gathered_keys(shape: Shape, seed: int) -> None:
    """Each sequence alone: its keys fetched position by position, a mask, PyTorch's product."""
    shape = replace(shape, logits_soft_cap=None)
    step = make_step(shape, seed)
    output = attention_by_definition(*step.tensors, **shape.options)
    for i, (queries, before) in enumerate(shape.seqs):
        if not queries:
            continue
        key, value = (
            torch.stack(
                [
                    cache[int(step.block_table[i, p // shape.block_size]), p % shape.block_size]
                    for p in range(before + queries)
                ],
                dim=1,
            )
            for cache in step.caches
        )
        start, end = step.query_start_loc[i : i + 2].tolist()
        mask = torch.ones(queries, before + queries).tril(before).bool()
        if shape.sliding_window is not None:
            mask &= ~torch.ones_like(mask).tril(before - shape.sliding_window)
        expected = F.scaled_dot_product_attention(
            step.query[start:end].transpose(0, 1).double(),
            key.double(),
            value.double(),
            attn_mask=mask,
            scale=shape.key_dim**-0.5,
            enable_gqa=True,
        )
        torch.testing.assert_close(output[start:end], expected.transpose(0, 1))


def test_a_soft_cap_by_hand() -> None:
    """Scores 100 and 0, capped at 2: tanh(50) = 1, so the weights are e^2 and 1."""
    step = make_step(Shape(((1, 1),), num_kv_heads=1, group=1, key_dim=1, value_dim=1))
    block = int(step.block_table[0, 0])
    step.query[0], step.key_cache[block, 0], step.key_cache[block, 1] = 1.0, 100.0, 0.0
    step.value_cache[block, 0], step.value_cache[block, 1] = 1.0, 0.0
    output = attention_by_definition(*step.tensors, scale=1.0, logits_soft_cap=2.0)
    assert float(output) == pytest.approx(math.exp(2) / (math.exp(2) + 1))


def test_the_example_of_the_docstring() -> None:
    """Block size 4, 6 tokens, blocks 7 and 3: position 5 is slot 13, that is block 3, slot 1."""
    step = make_step(Shape(((6, 0),)))
    metadata = replace(step, block_table=torch.tensor([[7, 3]])).metadata
    assert metadata.slot_mapping.tolist() == [28, 29, 30, 31, 12, 13]
    caches = torch.zeros(9, 4, 1, 1), torch.zeros(9, 4, 1, 1)
    key = torch.arange(1.0, 7.0).view(6, 1, 1)
    AttentionBackend().store(key, -key, caches, metadata)
    assert caches[0][7].flatten().tolist() == [1, 2, 3, 4]
    assert caches[1][3].flatten().tolist() == [-5, -6, 0, 0]


# ------------------------------------------------------------------------------ the backends


def assert_step_through_a_backend(
    backend: AttentionBackend, shapes: list[Shape], seed: int, num_padding: int = 0
) -> None:
    """One step through layers of several shapes, with one plan: the keys and values of the step are
    stored, then its queries attend. Caches and outputs are those of the definition."""
    layers = [make_step(shape, seed) for shape in shapes]
    metadata = layers[0].metadata
    assert all(torch.equal(layer.block_table, metadata.block_table) for layer in layers)
    slots = metadata.slot_mapping
    if num_padding:
        padding = torch.full((num_padding,), -1)
        metadata = replace(metadata, slot_mapping=torch.cat((slots, padding)))
    metadata = backend.plan(metadata, shapes[0].block_size, torch.float32)
    for shape, step in zip(shapes, layers, strict=True):
        index = slots // shape.block_size, slots % shape.block_size
        expected = attention_by_definition(*step.tensors, **shape.options)
        caches = [cache.clone() for cache in step.caches]
        new = []
        for cache in caches:
            product = torch.randn(len(slots) + num_padding, cache.shape[2], cache.shape[3] + 3)
            new.append(product[:, :, : cache.shape[3]])  # views of a larger product
            new[-1][: len(slots)] = cache[index]
            cache[index] = math.nan
        backend.store(new[0], new[1], (caches[0], caches[1]), metadata)
        for cache, stored in zip(caches, step.caches, strict=True):
            torch.testing.assert_close(cache, stored, rtol=0, atol=0, equal_nan=True)
        query = F.pad(step.query, (0, 0, 0, 0, 0, num_padding))
        output = backend.attend(query, (caches[0], caches[1]), metadata, **shape.options)
        assert output.dtype == torch.float32
        assert output.shape == (len(query), step.query.shape[1], shape.value_dim)
        torch.testing.assert_close(output[: len(slots)].double(), expected, rtol=2e-5, atol=2e-5)


@st.composite
def layers_of_one_step(draw: st.DrawFn) -> list[Shape]:
    """Layers with other heads, windows and caps in front of the same block tables."""
    first, *others = draw(st.lists(shapes(), min_size=1, max_size=3))
    same = {"seqs": first.seqs, "block_size": first.block_size}
    return [first, *(replace(shape, **same) for shape in others)]


@settings(max_examples=100)
@given(layers_of_one_step(), st.integers(0, 2**31), st.sampled_from([0, 0, 2]))
def test_the_torch_backend_is_as_defined(layers: list[Shape], seed: int, num_padding: int) -> None:
    assert_step_through_a_backend(TorchBackend(), layers, seed, num_padding)


@settings(max_examples=30)
@given(layers_of_one_step(), st.integers(0, 2**31), st.sampled_from([0, 0, 2]))
def test_the_reference_backend_stores_what_it_reads(
    layers: list[Shape], seed: int, num_padding: int
) -> None:
    assert_step_through_a_backend(AttentionBackend(), layers, seed, num_padding)


@needs_interpreter
@pytest.mark.filterwarnings("ignore:(divide by zero|overflow) encountered in")
@settings(max_examples=8)
@given(layers_of_one_step(), st.integers(0, 2**31))
def test_the_triton_backend_is_as_defined(layers: list[Shape], seed: int) -> None:
    """Run by Triton's interpreter. test_attention_triton.py has more."""
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from nanoserve.kernels.attention_triton import TritonBackend

    assert_step_through_a_backend(TritonBackend(), layers[:2], seed)


@needs_interpreter
def test_an_engine_says_the_same_on_every_backend() -> None:
    """A prompt of 23 tokens in chunks of 12, another beside it, blocks of 4; greedy and seeded."""
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    prompts = [list(range(40, 63)), [300, 301, 302]]
    params = [
        SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
        SamplingParams(temperature=1, seed=7, max_tokens=4, ignore_eos=True),
    ]
    answers: dict[str, list[list[int]]] = {}
    for backend in ("torch", "reference", "triton"):
        with LLM(
            attention_backend=backend,
            dtype="float32",
            block_size=4,
            num_kv_blocks=32,
            max_num_batched_tokens=12,
            max_num_seqs=4,
        ) as llm:
            assert f"attention={backend}" in llm.engine.executor.describe()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers[backend] = [output.outputs[0].token_ids for output in outputs]
    assert [len(answer) for answer in answers["torch"]] == [4, 4]
    assert answers["triton"] == answers["reference"] == answers["torch"]


class MyBackend(AttentionBackend):
    """Attention to the last `reach` tokens only: one method, as in a notebook."""

    name = "mine"

    def __init__(self, reach: int) -> None:
        self.reach = reach
        self.num_calls = 0

    def attend(self, query: Tensor, kv_cache: Any, metadata: Any, **options: Any) -> Tensor:
        self.num_calls += 1
        options["sliding_window"] = self.reach
        return super().attend(query, kv_cache, metadata, **options)


def test_a_subclass_plugs_in() -> None:
    prompt, params = list(range(40, 55)), SamplingParams(temperature=0, max_tokens=5)
    answers = []
    for backend in ("torch", MyBackend(reach=1000), MyBackend(reach=1)):
        with LLM(attention_backend=backend, num_kv_blocks=8, enable_prefix_caching=False) as llm:
            [output] = llm.generate([prompt], params, use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
            num_layers = llm.engine.model_config.num_layers
        if isinstance(backend, MyBackend):
            assert backend.num_calls >= num_layers * len(answers[-1])
    assert answers[0] == answers[1] != answers[2]


def test_choose_backend() -> None:
    own = MyBackend(3)
    assert isinstance(get_attn_backend("auto", CPU), TorchBackend)
    assert type(get_attn_backend("reference", CPU)) is AttentionBackend
    assert get_attn_backend("torch", CPU).name == "torch"
    assert get_attn_backend(own, CPU) is own


def test_a_backend_may_be_a_class() -> None:
    """If it needs no arguments."""
    assert type(get_attn_backend(TorchBackend, CPU)) is TorchBackend
    with pytest.raises(ValueError, match=r"MyBackend'>, a class that needs arguments.*an instance"):
        get_attn_backend(MyBackend, CPU)


@pytest.mark.parametrize("wrong", ["flash", "Torch", "", None, paged_attention_torch, int])
def test_choose_backend_refuses_what_it_does_not_know(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"attention_backend is .*auto, native, reference, torch"):
        get_attn_backend(wrong, CPU)


# ------------------------------------------------------------------------------ the cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_spec_allocates_what_it_says(dtype: torch.dtype) -> None:
    """And layers do not share memory."""
    spec = KVCacheSpec(num_kv_heads=3, key_dim=8, value_dim=5)
    caches = [spec.allocate(7, 4, dtype, CPU) for _ in range(2)]
    for key_cache, value_cache in caches:
        assert key_cache.shape == (7, 4, 3, 8)
        assert value_cache.shape == (7, 4, 3, 5)
        assert key_cache.dtype == value_cache.dtype == dtype
        assert key_cache.nbytes + value_cache.nbytes == 7 * spec.num_bytes(4, dtype)
    tensors = [tensor for pair in caches for tensor in pair]
    assert not any(tensor.any() for tensor in tensors)
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    assert [int(tensor.max()) for tensor in tensors] == [1, 2, 3, 4]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux's /proc")
def test_a_cache_takes_up_room_once_it_is_written() -> None:
    """And a forked process writes to memory of its own."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    cache = lazy_zeros((64, 2**18), torch.float32, CPU)  # 64 MiB
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
