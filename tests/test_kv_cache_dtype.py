"""kv_cache_dtype: keys and values of 8 bits, through every backend and every way of a block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_oracle import (
    Shape,
    attention_by_definition,
    make_step,
    needs_interpreter,
    one_thread,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_attention import shapes
from torch import Tensor

from nanoserve import LLM, EngineArgs, SamplingParams
from nanoserve.attention import AttentionBackend
from nanoserve.kernels.attention_cpu import TorchBackend
from nanoserve.kernels.native_cpu import NativeBackend, load_library
from nanoserve.kv_cache import CACHE_DTYPES, KVCacheSpec, copy_blocks

CPU = torch.device("cpu")
LIBRARY: Any = load_library()
needs_compiler = pytest.mark.skipif(LIBRARY is None, reason="no C++ compiler with OpenMP")
NAMES = sorted(CACHE_DTYPES)
dtypes = st.sampled_from([CACHE_DTYPES[name] for name in NAMES])
STORY = "Once upon a time there was a kind dog named Tom. He lived near the"


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def assert_step_in_8_bits(
    backend: AttentionBackend,
    shape: Shape,
    dtype: torch.dtype,
    seed: int,
    query_dtype: torch.dtype = torch.float32,
) -> None:
    """Keys and values are stored through the backend. Then it attends to them as the definition
    does to what the numbers and their scales stand for; empty slots hold NaN."""
    step = make_step(shape, seed)
    spec = KVCacheSpec(shape.num_kv_heads, shape.key_dim, shape.value_dim)
    kv_cache = spec.allocate(len(step.key_cache), shape.block_size, dtype, CPU)
    for scales in kv_cache[2:]:
        scales.fill_(math.nan)
    slots = (~step.key_cache.isnan().any(-1).any(-1)).flatten().nonzero()[:, 0]  # that hold a key
    index = slots // shape.block_size, slots % shape.block_size
    filling = backend.plan(replace(step.metadata, slot_mapping=slots), shape.block_size, dtype)
    backend.store(step.key_cache[index], step.value_cache[index], kv_cache, filling)
    key, value = (n.float() * s for n, s in zip(kv_cache[:2], kv_cache[2:], strict=True))
    torch.testing.assert_close(key[index], step.key_cache[index], rtol=0.07, atol=0.05)
    tensors = (step.query, key, value, step.block_table, step.query_start_loc, step.seq_lens)
    expected = attention_by_definition(*tensors, **shape.options)
    metadata = backend.plan(step.metadata, shape.block_size, dtype)
    output = backend.attend(step.query.to(query_dtype), kv_cache, metadata, **shape.options)
    assert output.dtype == query_dtype
    tolerance = 2e-5 if query_dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=25)
@given(shapes(), dtypes, st.integers(0, 99))
def test_the_definition(shape: Shape, dtype: torch.dtype, seed: int) -> None:
    assert_step_in_8_bits(AttentionBackend(), shape, dtype, seed)


@settings(max_examples=40)
@given(shapes(), dtypes, st.integers(0, 99))
def test_the_torch_backend(shape: Shape, dtype: torch.dtype, seed: int) -> None:
    assert_step_in_8_bits(TorchBackend(), shape, dtype, seed)


@needs_compiler
@settings(max_examples=40)
@given(shapes(), dtypes, st.integers(0, 99))
def test_the_native_backend(shape: Shape, dtype: torch.dtype, seed: int) -> None:
    assert_step_in_8_bits(NativeBackend(LIBRARY), shape, dtype, seed)


@needs_compiler
@pytest.mark.parametrize("query_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", CACHE_DTYPES.values())
def test_queries_of_16_bits(dtype: torch.dtype, query_dtype: torch.dtype) -> None:
    shape = Shape(((1, 100), (1, 0), (3, 47)), 16, key_dim=64, value_dim=64)
    assert_step_in_8_bits(NativeBackend(LIBRARY), shape, dtype, 0, query_dtype)


@needs_interpreter
@pytest.mark.parametrize("dtype", CACHE_DTYPES.values())
@pytest.mark.parametrize(
    "shape",
    [
        Shape(((1, 14), (7, 0), (4, 6)), 4, key_dim=16, value_dim=16),
        Shape(((1, 40), (3, 9)), 16, 1, 4, 24, 12, sliding_window=9, logits_soft_cap=5.0),
    ],
)
def test_the_triton_kernel(shape: Shape, dtype: torch.dtype) -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from nanoserve.kernels.attention_triton import TritonBackend

    assert_step_in_8_bits(TritonBackend(), shape, dtype, 0)


@pytest.mark.parametrize("dtype", CACHE_DTYPES.values())
def test_a_spec_allocates_what_it_says_and_blocks_are_copied_whole(dtype: torch.dtype) -> None:
    spec = KVCacheSpec(num_kv_heads=3, key_dim=8, value_dim=5)
    source, target = (spec.allocate(7, 4, dtype, CPU) for _ in range(2))
    assert sum(cache.nbytes for cache in source) == 7 * spec.num_bytes(4, dtype)
    shapes_of_all = [tuple(cache.shape) for cache in source]
    assert shapes_of_all == [(7, 4, 3, 8), (7, 4, 3, 5), (7, 4, 3, 1), (7, 4, 3, 1)]
    for cache in source:
        cache.copy_(torch.randn(cache.shape).mul(9))
    copy_blocks([source], [target], ((0, 5), (3, 1)))
    for ours, theirs in zip(source, target, strict=True):
        assert torch.equal(theirs[5].float(), ours[0].float())
        assert torch.equal(theirs[1].float(), ours[3].float())
        assert not theirs[2].float().any()


# -- the engine --


def tokens(llm: LLM, num_requests: int = 4, n: int = 1) -> list[list[int]]:
    """Requests with a common beginning, longer than the cache of a small engine holds at once."""
    prompts = [f"{STORY} {word}" for word in ("sea", "hill", "old mill", "town")[:num_requests]]
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True, n=n)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [branch.token_ids for output in outputs for branch in output.outputs]


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest) -> tuple[str, list[list[int]], list[list[int]]]:
    """A kv_cache_dtype, and what an engine with room for everything says: one and two each."""
    options: dict[str, Any] = {"kv_cache_dtype": request.param, "enable_prefix_caching": False}
    with LLM(num_kv_blocks=200, max_model_len=128, **options) as llm:
        caches = llm.engine.executor.runner.kv_caches[0]
        assert [c.dtype for c in caches] == [CACHE_DTYPES[request.param]] * 2 + [torch.float32] * 2
        return request.param, tokens(llm), tokens(llm, 2, n=2)


SWAP: dict[str, Any] = {"num_kv_blocks": 14, "preemption_mode": "swap"}


@pytest.mark.parametrize(
    ("alone", "options"),
    [
        ("int8", SWAP),
        ("fp8", SWAP),
        ("int8", {"num_kv_blocks": 14}),
        ("int8", {"max_num_batched_tokens": 7, "max_num_seqs": 3, "block_size": 4}),
        ("int8", {"async_scheduling": True}),
        ("int8", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
        ("fp8", {"attention_backend": "torch"}),
        pytest.param("fp8", {"tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
    indirect=["alone"],
)
def test_whatever_happens_to_its_blocks_a_request_gets_its_tokens(
    alone: Any, options: dict[str, Any]
) -> None:
    """Swapped out and in, computed again, found in the prefix cache, copied on write."""
    name, single, double = alone
    with LLM(**{"num_kv_blocks": 200, "max_model_len": 128, **options}, kv_cache_dtype=name) as llm:
        assert tokens(llm) == single
        assert tokens(llm, 2, n=2) == double
        llm.engine.block_manager.check()


@pytest.mark.parametrize(
    ("name", "model_impl"),
    [
        ("int8", "auto"),
        ("fp8", "auto"),
        pytest.param("int8", "transformers", marks=pytest.mark.slow),
    ],
)
def test_its_error_is_small(name: str, model_impl: str, demo_llm: LLM) -> None:
    """Of the log-probabilities of a story, with our own model and with that of transformers. (Each
    number has an error of 1/254 of the largest of its vector, or of 1/16 of itself.)"""

    def logprobs(llm: LLM) -> Tensor:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        [output] = llm.generate([STORY * 3], params, use_tqdm=False)
        entries = (output.prompt_logprobs or [])[1:]
        assert all(entries)
        return torch.tensor([next(iter(each.values())).logprob for each in entries if each])

    options: dict[str, Any] = {"num_kv_blocks": 64, "max_model_len": 256, "kv_cache_dtype": name}
    with LLM(model_impl=model_impl, **options) as llm:
        error = (logprobs(llm) - logprobs(demo_llm)).abs()
    assert 0 < error.mean() < {"int8": 0.01, "fp8": 0.03}[name]


def test_the_option() -> None:
    """vLLM's names of the same type; and what it is not."""
    assert EngineArgs(kv_cache_dtype="fp8_e4m3").kv_cache_dtype == "fp8"
    assert EngineArgs(kv_cache_dtype="int8_per_token_head").kv_cache_dtype == "int8"
    with pytest.raises(ValueError, match="kv_cache_dtype is 'fp4'; allowed: auto, fp8, int8"):
        EngineArgs(kv_cache_dtype="fp4")


def test_more_blocks_fit() -> None:
    """In the same memory: a head of 32 numbers takes 128 bytes in float32, and 36 in int8."""
    found = {}
    for name in ("auto", "int8"):
        options: dict[str, Any] = {"kv_cache_memory_bytes": 2**21, "max_model_len": 128}
        with LLM(kv_cache_dtype=name, max_num_seqs=256, **options) as llm:
            found[name] = llm.engine.executor.num_kv_blocks
            config = llm.engine.model_config
    dim = config.head_dim
    assert found["int8"] == pytest.approx(found["auto"] * 4 * dim / (dim + 4), rel=0.02)
