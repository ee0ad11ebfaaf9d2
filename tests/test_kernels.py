"""Each fast implementation computes what its definition says, for shapes that hypothesis draws.

    attention       kernels/attention_cpu, native_cpu, attention_triton, and attention.py itself,
                    against a softmax over keys that lie in order
    fused           native_cpu and fused_triton, against layers.py
    products        linear_cpu, quantized, quantized_cpu, quantized_triton, against F.linear
    sampling        kernels/sampling, against sampler.py
    caches          kernels/kv_cache
    threads         kernels/threads: how many there are, where, and for how long they spin

Triton's interpreter runs the Triton kernels (tests/test_aot.py compiles them). Memory that does not
belong to a step is poisoned: NaN stands in every slot without a key, and in blocks that stale
entries of a block table name.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nanoserve import LLM, SamplingParams, sampler
from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.kernels import (
    fused,
    linear_cpu,
    memory,
    quantized,
    quantized_cpu,
    sampling,
    selector,
    threads,
)
from nanoserve.kernels.attention_cpu import TorchBackend
from nanoserve.kernels.kv_cache import KVCacheSpec, copy_blocks, limit_num_blocks
from nanoserve.kernels.linear_cpu import (
    BlockedLinearMethod,
    PanelLinearMethod,
    make_linear_method,
)
from nanoserve.kernels.native_cpu import Native, load_library
from nanoserve.kernels.quantized import QuantizedWeight, pack_int4
from nanoserve.kernels.quantized_cache import QuantizedReference, quantize_rows
from nanoserve.kernels.selector import choose_dtype, get_attn_backend
from nanoserve.layers import LayerConfig, RMSNorm, apply_rope, silu_and_mul
from nanoserve.model import Attention
from nanoserve.models.config import DEMO_MODEL, ModelConfig
from nanoserve.models.registry import build_model

pytest.importorskip("triton")
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(load_library() is None, reason="needs a C++ compiler")
few = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
BACKENDS = ["reference", "torch", pytest.param("native", marks=needs_compiler)]


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(found: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1) -> None:
    """Within a few roundings of the type."""
    tolerance = factor * {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


# -- attention --


@dataclass(frozen=True)
class Shape:
    """A step, without its numbers."""

    seqs: tuple[tuple[int, int], ...]  # (queries, keys before them) of each sequence
    block_size: int = 4
    num_kv_heads: int = 2
    group: int = 2  # query heads that share a key head
    key_dim: int = 8
    value_dim: int = 8
    sliding_window: int | None = None
    logits_soft_cap: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        window, cap = self.sliding_window, self.logits_soft_cap
        return {"scale": self.key_dim**-0.5, "sliding_window": window, "logits_soft_cap": cap}


SHAPES = st.builds(
    Shape,
    seqs=st.lists(
        st.one_of(st.tuples(st.just(1), st.integers(0, 40)), st.tuples(*[st.integers(1, 14)] * 2)),
        min_size=1,
        max_size=5,
    ).map(tuple),
    block_size=st.sampled_from([1, 2, 3, 4, 16, 32]),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5, 17, 33]),  # more than a vector has lanes
    key_dim=st.sampled_from([4, 8, 16, 20, 48]),
    value_dim=st.sampled_from([4, 8, 16, 20, 48]),
    sliding_window=st.none() | st.integers(1, 12),
    logits_soft_cap=st.none() | st.just(2.0),
)


class Step:
    """Random keys, values and queries; where they are to lie."""

    def __init__(self, shape: Shape, dtype: torch.dtype, num_padding: int = 0) -> None:
        self.shape, ends = shape, [0]
        heads, size = shape.num_kv_heads, shape.block_size
        lengths = [queries + before for queries, before in shape.seqs]
        self.keys = [rand(n, heads, shape.key_dim, seed=n, dtype=dtype) for n in lengths]
        self.values = [rand(n, heads, shape.value_dim, seed=n + 1, dtype=dtype) for n in lengths]
        needed = [-(-length // size) for length in lengths]
        self.num_blocks = sum(needed) + 2  # the last two belong to no sequence
        blocks = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(0))
        table = blocks[-1].repeat(len(lengths), max(needed) + 1)
        slots = []
        for i, length in enumerate(lengths):
            table[i, : needed[i]] = blocks[sum(needed[:i]) : sum(needed[: i + 1])]
            position = torch.arange(length)
            slots.append(table[i, position // size] * size + position % size)
            ends.append(ends[-1] + shape.seqs[i][0])
        num_tokens = ends[-1] + num_padding
        product = rand(num_tokens, heads * (shape.group + 2), shape.key_dim, seed=7, dtype=dtype)
        self.query = 2 * product[:, : heads * shape.group]  # a view, as a model makes it
        self.before = [slot[: -shape.seqs[i][0]] for i, slot in enumerate(slots)]
        new = [slot[-shape.seqs[i][0] :] for i, slot in enumerate(slots)]
        self.metadata = StepMetadata(
            torch.cat([*new, torch.full((num_padding,), -1)]),
            table.int(),
            torch.tensor(ends).int(),
            torch.tensor(lengths).int(),
            torch.tensor(ends).diff().numpy(),
        )

    def part(self, tensors: list[Tensor], is_new: bool) -> Tensor:
        sizes = [queries for queries, _ in self.shape.seqs]
        cut = [x[-n:] if is_new else x[:-n] for x, n in zip(tensors, sizes, strict=True)]
        padding = [cut[0].new_ones(len(self.query) - sum(sizes), *cut[0].shape[1:])] * is_new
        return torch.cat([*cut, *padding])

    def run(self, backend: AttentionBackend, kv_cache: KVCache) -> Tensor:
        """Store the keys of earlier steps, then this step's, then attend."""
        earlier = replace(self.metadata, slot_mapping=torch.cat(self.before))
        backend.store(self.part(self.keys, False), self.part(self.values, False), kv_cache, earlier)
        metadata = backend.plan(self.metadata, self.shape.block_size, kv_cache[0].dtype)
        backend.store(self.part(self.keys, True), self.part(self.values, True), kv_cache, metadata)
        output = backend.attend(self.query, kv_cache, metadata, **self.shape.options)
        return output[: int(metadata.query_start_loc[-1])]

    def expected(self, cache_dtype: torch.dtype) -> Tensor:
        """softmax(q k) v, one sequence after the other, in float64."""
        outputs, shape = [], self.shape
        starts = self.metadata.query_start_loc.tolist()
        for i, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            if cache_dtype.itemsize == 1:
                pairs = [quantize_rows(each, cache_dtype) for each in (key, value)]
                key, value = (numbers.float() * scale for numbers, scale in pairs)
            key, value = (x.double().repeat_interleave(shape.group, 1) for x in (key, value))
            query = self.query[starts[i] : starts[i + 1]].double()
            score = torch.einsum("qhd,khd->hqk", query, key) * shape.options["scale"]
            if (cap := shape.logits_soft_cap) is not None:
                score = cap * torch.tanh(score / cap)
            at = torch.arange(len(key))
            distance = at[-len(query) :, None] - at
            hidden = (distance < 0) | (distance >= (shape.sliding_window or math.inf))
            score = score.masked_fill(hidden, -math.inf).softmax(-1)
            outputs.append(torch.einsum("hqk,khd->qhd", score, value))
        return torch.cat(outputs)


def check_attention(
    name: str, shape: Shape, dtype: torch.dtype, cache: str = "auto", padding: int = 0
) -> None:
    cache_dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(cache, dtype)
    backend = get_attn_backend(name, CPU, dtype)
    if name == "reference" and cache != "auto":
        backend = QuantizedReference()
    step = Step(shape, dtype, padding)
    spec = KVCacheSpec(shape.num_kv_heads, shape.key_dim, shape.value_dim)
    kv_cache = spec.allocate(step.num_blocks, shape.block_size, cache_dtype, CPU)
    for each in kv_cache:
        each.fill_(99 if each.dtype == torch.int8 else math.nan)
    close(step.run(backend, kv_cache), step.expected(cache_dtype), dtype)


@pytest.mark.parametrize("name", BACKENDS)
@few
@given(shape=SHAPES)
def test_attention(name: str, shape: Shape) -> None:
    check_attention(name, shape, torch.float32)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("cache", ["int8", "fp8"])
@few
@given(shape=SHAPES)
def test_attention_over_8_bits(name: str, cache: str, shape: Shape) -> None:
    check_attention(name, shape, torch.float32, cache)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@few
@given(shape=SHAPES)
def test_attention_in_half_precision(name: str, dtype: torch.dtype, shape: Shape) -> None:
    if name != "native" or dtype != torch.float16:  # which it does not know
        check_attention(name, shape, dtype)


@settings(few, max_examples=8)
@given(
    shape=SHAPES,
    dtype=st.sampled_from([torch.float32, torch.float16]),  # (bfloat16 is cut off, not rounded)
    cache=st.sampled_from(["auto", "int8", "fp8"]),
    num_splits=st.sampled_from([1, 4]),
    num_padding=st.integers(0, 3),
)
@example(Shape(((1, 14), (7, 0), (4, 6), (1, 0))), torch.float32, "auto", 4, 0)
@example(Shape(((1, 30), (1, 3))), torch.float32, "int8", 4, 2)
def test_attention_in_triton(
    shape: Shape, dtype: torch.dtype, cache: str, num_splits: int, num_padding: int
) -> None:
    """With the keys of a sequence divided among programs, too. A graph's padding has a negative
    slot: it is not stored, and nobody reads its output."""
    from nanoserve.kernels import attention_triton

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_triton, "choose_num_splits", lambda *_, **__: num_splits)
        check_attention("triton", shape, dtype, cache, num_padding)


def test_backends_by_name() -> None:
    assert type(get_attn_backend("reference", CPU)) is AttentionBackend
    mine = AttentionBackend()
    assert get_attn_backend(mine, CPU) is mine
    with pytest.raises(ValueError, match="attention_backend"):
        get_attn_backend("flash", CPU)
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        get_attn_backend("native", CPU, torch.float16)


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_a_dtype_that_the_device_has(
    capability: tuple[int, int], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A T4 has no bfloat16, and most CPUs do not multiply in it. What the user asks for stays."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = torch.device("cuda")

    def choose(wanted: str, checkpoint: str, device: torch.device, path: Path = tmp_path) -> Any:
        config = replace(ModelConfig.from_folder(DEMO_MODEL), dtype=checkpoint, path=path)
        return choose_dtype(wanted, config, device)

    assert choose("auto", "bfloat16", cuda) == getattr(torch, expected)
    assert choose("auto", "torch.float32", cuda) == torch.float32
    assert choose("bfloat16", "float32", cuda) == torch.bfloat16
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(threads.SMALL_MODEL)
    for multiplies, large in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(selector, "has_instructions", lambda *_, has=multiplies: has)
        assert choose("auto", "bfloat16", CPU) == large
        assert choose("auto", "bfloat16", CPU, DEMO_MODEL) == torch.float32
        for checkpoint in ("float16", "float32"):
            assert choose("auto", checkpoint, CPU) == torch.float32
    with pytest.raises(ValueError, match="float64"):
        choose("float64", "float32", CPU)


@pytest.mark.parametrize("error", [RuntimeError("no gcc"), CalledProcessError(1, "no Python.h")])
def test_a_machine_that_cannot_compile(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    get_device = mock.Mock(side_effect=error)
    driver = SimpleNamespace(active=SimpleNamespace(get_current_device=get_device))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    for wanted in ("auto", "triton"):
        with pytest.raises(ValueError, match="python3-dev"):
            get_attn_backend(wanted, torch.device("cuda"))
    with pytest.raises(ValueError, match="TRITON_INTERPRET"):
        get_attn_backend("triton", CPU)


# -- what lies between two products --


def make_ops(name: str, dtype: torch.dtype) -> Any:
    if name == "native":
        return Native(load_library(), dtype)
    from nanoserve.kernels.fused_triton import TritonOps

    return TritonOps()


OPS = [
    pytest.param("native", torch.float32, marks=needs_compiler),
    pytest.param("native", torch.bfloat16, marks=needs_compiler),
    ("triton", torch.float32),
    ("triton", torch.float16),
]


@pytest.mark.parametrize(("name", "dtype"), OPS)
@settings(few, max_examples=10)
@given(num_tokens=st.integers(0, 5), size=st.integers(1, 70))
def test_norm_and_activation(name: str, dtype: torch.dtype, num_tokens: int, size: int) -> None:
    ops, norm = make_ops(name, dtype), RMSNorm(size, 1e-6, LayerConfig(dtype))
    norm.weight.copy_(rand(size, seed=1))
    x, residual = rand(num_tokens, size, dtype=dtype), rand(num_tokens, size, seed=2, dtype=dtype)
    both = x + residual
    normalized, total = ops.add_rms_norm(x.clone(), residual, norm.weight, norm.eps)
    close(total, both, dtype)
    close(normalized, norm(both), dtype)
    gate_up = rand(num_tokens, 2 * size, seed=3, dtype=dtype)
    close(ops.silu_and_mul(gate_up), silu_and_mul(gate_up), dtype)


@settings(few, max_examples=10)
@given(st.integers(0, 5), st.integers(1, 70), st.none() | st.floats(0.001, 1))
def test_rows_in_fp8(num_tokens: int, size: int, scale: float | None) -> None:
    from nanoserve.kernels import fused_triton

    x, fp8 = rand(num_tokens, size) * 3, torch.float8_e4m3fn
    numbers, scales = quantize_rows(x, fp8)
    if scale is not None:
        numbers, scales = (x / scale).clamp(-448, 448).to(fp8), torch.full_like(scales, scale)
    given = None if scale is None else torch.tensor([scale])
    found = fused_triton.quantize_rows(x, given)
    torch.testing.assert_close(found[1], scales)
    difference = found[0].view(torch.int8).int() - numbers.view(torch.int8).int()
    assert (difference.abs() <= 1).all()  # perhaps the next code
    assert (difference == 0).float().mean().nan_to_num(1) > 0.95


@pytest.mark.parametrize(("name", "dtype"), OPS)
@pytest.mark.parametrize("cache", ["auto", "int8", "fp8"])
@settings(few, max_examples=10)
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 2), st.integers(1, 3)),
    st.sampled_from([(8, 8), (16, 4), (20, 12), (12, 12)]),  # head_dim, rotary_dim
    st.booleans(),
)
def test_rope_and_store(
    name: str, dtype: torch.dtype, cache: str, numbers: Any, sizes: Any, has_norm: bool
) -> None:
    """Queries, and what the cache holds afterwards: norm, rotation and storing in one pass."""
    (num_tokens, num_kv_heads, group), (head_dim, rotary_dim) = numbers, sizes
    config, num_heads = LayerConfig(dtype), num_kv_heads * group
    rows = num_heads + 2 * num_kv_heads
    norms = [RMSNorm(head_dim, 1e-6, config) for _ in "qk"]
    for i, each in enumerate(norms):
        each.weight.copy_(rand(head_dim, seed=i))
    attention: Any = SimpleNamespace(q_norm=norms[0], k_norm=norms[1])
    attention.num_heads, attention.num_kv_heads = num_heads, num_kv_heads
    attention.qk_norm = fused.QKNorm(attention) if has_norm else None
    rope = rand(num_tokens, 1, 2 * rotary_dim, seed=2, dtype=dtype).chunk(2, dim=-1)
    qkv, slots = rand(num_tokens, rows * head_dim, dtype=dtype), torch.arange(num_tokens) * 3
    metadata = StepMetadata(slots, *[slots.int()] * 3)
    cache_dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(cache, dtype)
    caches = [
        KVCacheSpec(num_kv_heads, head_dim, head_dim).allocate(5, 4, cache_dtype, CPU) for _ in "ab"
    ]
    for tensor in (*caches[0], *caches[1]):
        tensor.zero_()
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q, k = (norm(x) for norm, x in zip(norms, (q, k), strict=True)) if has_norm else (q, k)
    expected = apply_rope(q, *rope)
    plain = QuantizedReference() if len(caches[0]) > 2 else AttentionBackend()
    plain.store(apply_rope(k, *rope), v, caches[0], metadata)
    ops = make_ops(name, dtype)
    found = ops.rope_and_store(qkv.clone(), attention, rope, caches[1], metadata)
    close(found, expected, dtype, 3)
    kept, wanted = (
        [
            numbers.float() * scale
            for numbers, scale in zip(each[:2], each[2:] or (1, 1), strict=True)
        ]
        for each in (caches[1], caches[0])
    )
    code = {"auto": 1e-5, "int8": 0.02, "fp8": 0.1}[cache]  # 8 bits: perhaps the next code
    for one, other in zip(kept, wanted, strict=True):
        assert (
            (one - other).abs() <= (code + 0.03 * (dtype.itemsize == 2)) * (1 + other.abs())
        ).all()


def test_a_backend_that_stores_in_its_own_way_keeps_doing_so() -> None:
    """Then the modules that attend stay as they are; the others are exchanged."""

    class Mine(TorchBackend):
        def store(self, *args: Any) -> None:
            super().store(*args)

    config, ops = ModelConfig.from_folder(DEMO_MODEL), SimpleNamespace(backend_cls=TorchBackend)
    for backend, kind in ((TorchBackend(), fused.FusedAttention), (Mine(), Attention)):
        model = build_model(config, 64, LayerConfig(attention=backend))
        fused.fuse(model, ops)
        kinds = [type(module) for module in model.modules()]
        assert kinds.count(kind) == kinds.count(fused.FusedMLP) == config.num_layers


# -- products --


def make_linear(method: BlockedLinearMethod, weight: Tensor, **flags: bool) -> Any:
    layer: Any = nn.Module()
    layer.is_embedding, layer.is_lm_head = flags.get("embeds", False), flags.get("is_head", False)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["best here", "oneDNN"])
@few
@given(*[st.integers(1, 70)] * 3, st.sampled_from([(), (3,)]), st.booleans())
def test_packed_weights(
    kind: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, more: Any, biased: bool
) -> None:
    """As F.linear, whatever the shapes; the bits of a row do not depend on the rows beside it."""
    weight, bias = rand(outputs, inputs, dtype=dtype), rand(outputs, seed=1, dtype=dtype)
    method = make_linear_method(dtype) if kind == "best here" else BlockedLinearMethod()
    layer, x = make_linear(method, weight), rand(*more, rows, inputs, seed=2, dtype=dtype)
    found = method.apply(layer, x, bias if biased else None)
    close(found, F.linear(x, weight, bias if biased else None), dtype, 10)
    if isinstance(method, PanelLinearMethod) and layer.packed_weight is not None:
        with pytest.raises(ValueError, match="another size"):
            method.apply(layer, x[..., : inputs - 1], None)
        assert torch.equal(
            found[..., :1, :], method.apply(layer, x[..., :1, :], bias if biased else None)
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_rows_and_many(dtype: torch.dtype) -> None:
    """More than one task has: inputs of a panel, and rows."""
    method, weight = make_linear_method(dtype), rand(40, 2500, dtype=dtype)
    layer, x = make_linear(method, weight), rand(531, 2500, seed=2, dtype=dtype)
    close(method.apply(layer, x, None) / 50, F.linear(x, weight) / 50, dtype, 2)


def test_a_compiler_may_not_know_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the library has no such product, whatever the processor has."""
    monkeypatch.setattr(linear_cpu, "load_library", lambda _: SimpleNamespace(multiply_f32=None))
    assert type(make_linear_method(torch.bfloat16)) is BlockedLinearMethod
    assert type(make_linear_method(torch.float32)) is PanelLinearMethod


def test_a_packed_weight_takes_its_memory_once() -> None:
    method = BlockedLinearMethod()
    assert make_linear(method, rand(8, 8)).weight.numel() == 0
    head = make_linear(method, rand(8, 8), embeds=True, is_head=True)  # and its rows are looked up
    assert head.weight.numel() == 64 and head.packed_weight is not None
    assert make_linear(method, rand(8, 8), embeds=True).packed_weight is None


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_request_computes_the_same_bits_in_any_company(dtype: str) -> None:
    """With compiled kernels: no sum depends on the rows beside it."""
    if not isinstance(make_linear_method(getattr(torch, dtype)), PanelLinearMethod):
        pytest.skip("oneDNN multiplies here, and rounds as the number of rows wants it")
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
    prompts = [{"prompt_token_ids": [*range(20, 20 + 7 * n)]} for n in range(1, 8)]
    with LLM(kernels="fast", dtype=dtype, enable_prefix_caching=False) as llm:
        together = llm.generate(prompts, params, use_tqdm=False)
        alone = [llm.generate([each], params, use_tqdm=False)[0] for each in prompts]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs


def make_weight(kind: str, outputs: int, size: int, groups: int, **options: Any) -> QuantizedWeight:
    generator, num_inputs = torch.Generator().manual_seed(outputs), size * groups
    shape = (outputs * options.get("num_experts", 1), num_inputs)
    codes = torch.randint(0, 16, shape, generator=generator)
    scales = rand(shape[0], groups).abs() / 16
    zeros = torch.randint(2, 9, scales.shape, generator=generator) if options.pop("zeros") else None
    if options.pop("order"):
        options["order"] = torch.randperm(num_inputs, generator=generator)
    kinds = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
    stored = pack_int4(codes.to(torch.uint8)) if kind == "int4" else codes.float().to(kinds[kind])
    return QuantizedWeight(kind, stored, scales, zeros, **options)


def make_product(name: str, weight: QuantizedWeight) -> quantized.Product:
    if name == "native":
        return quantized_cpu.pack(weight)
    from nanoserve.kernels import quantized_triton

    assume(weight.kind != "fp8" and quantized_triton.choose_block_k(weight))
    return quantized_triton.pack(weight)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "native",
            marks=pytest.mark.skipif(load_library(quantized_cpu.SOURCE) is None, reason=""),
        ),
        "triton",
    ],
)
@settings(few, max_examples=20)
@given(
    st.sampled_from(["int4", "int8", "fp8"]),
    st.tuples(st.integers(1, 70), st.sampled_from([2, 16, 32, 48]), st.integers(1, 3)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 5),
)
def test_quantized_products(
    name: str, kind: str, sizes: Any, zeros: bool, order: bool, num_tokens: int
) -> None:
    weight = make_weight(kind, *sizes, zeros=zeros and kind != "fp8", order=order)
    x = rand(num_tokens, weight.num_inputs, seed=1)
    expected = F.linear(x, weight.dequantize())
    weight.product = make_product(name, weight)
    close(weight.multiply(x), expected, torch.float32, 10)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_quantized_experts(is_prepared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, sorted by expert, each times the matrix of its expert."""
    if not is_prepared:
        monkeypatch.setattr(quantized, "choose_pack", lambda weight: None)
    weight = make_weight("int8", 6, 16, 2, zeros=True, order=False, num_experts=3)
    matrices, rows = weight.dequantize().unflatten(0, (3, 6)), rand(5, 32)
    offsets, experts = torch.tensor([2, 2, 5]), [0, 0, 2, 2, 2]
    weight.prepare()
    expected = torch.stack([matrices[e] @ row for e, row in zip(experts, rows, strict=True)])

    def matmul(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return torch.stack([weight[e] @ row for e, row in zip(experts, rows, strict=True)])

    close(weight.multiply_grouped(rows, offsets, matmul), expected, torch.float32, 10)


# -- sampling --


@pytest.mark.parametrize("is_tiny", [False, True])
@settings(few, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**30), rows=st.integers(1, 6), data=st.data())
def test_chosen_tokens(
    is_tiny: bool, seed: int, rows: int, data: st.DataObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of sampler.choose_tokens, with any filters: over a large vocabulary, and with tiny
    chunks, which take every way through the code."""
    if is_tiny:
        sizes = {"CHUNK": 4, "SMALL": -1, "BLOCK": 50, "SPARSE": 1, "MAX_TOP_K": 9}
        for name, value in sizes.items():
            monkeypatch.setattr(sampling, name, value)
    vocab_size = data.draw(st.integers(1, 50)) if is_tiny else 40_003
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab_size, generator=generator) * 4
    logits = logits.round() if data.draw(st.booleans()) else logits  # many are equal
    logits[torch.rand(logits.shape, generator=generator) < 0.1] = -math.inf
    logits[:, -1] = 0.5

    def row_of(strategy: st.SearchStrategy[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor([data.draw(strategy) for _ in range(rows)], dtype=dtype)

    top_k = row_of(st.sampled_from([1, 2, 7, vocab_size]), torch.int64)
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    batch = sampler.SamplingBatch(
        temperature=row_of(st.sampled_from([0.0, 0.3, 1.0]), torch.float32),
        top_k=top_k.clamp(max=vocab_size) if data.draw(st.booleans()) else None,
        top_p=row_of(st.floats(0.1, 1), torch.float32) if data.draw(st.booleans()) else None,
        min_p=row_of(st.floats(0, 0.5), torch.float32) if data.draw(st.booleans()) else None,
        uniform=uniform * data.draw(st.sampled_from([0, 1])),
    )
    expected = sampler.choose_tokens(logits, batch)
    is_greedy = batch.temperature < sampler.GREEDY_TEMPERATURE
    drawn = (~is_greedy).nonzero()[:, 0]
    sent = replace(  # as the RequestState sends it
        batch,
        is_greedy=bool(is_greedy.all()),
        drawn_rows=drawn if is_greedy.any() and not is_greedy.all() else None,
        temperature=batch.temperature.masked_fill(is_greedy, 1.0),
    )
    found = sampling.choose_tokens(logits.clone(), sent)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert found.is_possible.all()
    if len(drawn):  # the way of a GPU, where nothing waits for the largest
        some = sampling.select(sent, drawn)
        on_gpu = sampling.draw_from_all(logits[drawn], some)
        assert torch.equal(on_gpu.token_ids, expected.token_ids[drawn])


def test_no_token_is_possible() -> None:
    logits = torch.zeros(3, 200)
    logits[0], logits[1, 3] = -math.inf, math.nan
    for choose in (sampler.choose_tokens, sampling.choose_tokens):
        greedy = sampler.SamplingBatch(is_greedy=True)
        assert choose(logits.clone(), greedy).is_possible.tolist() == [False, False, True]


# -- caches --


@given(
    spec=st.builds(KVCacheSpec, st.integers(1, 3), st.integers(1, 9), st.integers(1, 9)),
    pairs=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), unique_by=lambda pair: pair[1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]),
)
def test_blocks_and_their_copies(
    spec: KVCacheSpec, pairs: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """The bytes that a spec tells are those of its tensors; blocks move whole, in every layer."""
    source, target = ([spec.allocate(5, 4, dtype, CPU) for _ in range(2)] for _ in "st")
    assert sum(each.nbytes for each in source[0]) == 5 * spec.num_bytes(4, dtype)
    for each in (each for layer in target for each in layer):
        each.zero_()
    for i, each in enumerate(each for layer in source for each in layer):
        each.copy_(rand(*each.shape, seed=i).to(dtype if each.dtype == dtype else each.dtype))
    copy_blocks(source, target, tuple(pairs))
    for from_layer, to_layer in zip(source, target, strict=True):
        for from_cache, to_cache in zip(from_layer, to_layer, strict=True):
            expected = torch.zeros(to_cache.shape)
            for block, other in pairs:
                expected[other] = from_cache[block].float()
            assert torch.equal(to_cache.float(), expected)


@given(
    block_size=st.sampled_from([1, 4, 16]),
    max_model_len=st.integers(1, 100),
    max_num_seqs=st.integers(1, 9),
    num_blocks=st.integers(0, 300),
    can_shorten=st.booleans(),
)
def test_as_many_blocks_as_fit(
    block_size: int, max_model_len: int, max_num_seqs: int, num_blocks: int, can_shorten: bool
) -> None:
    """And no more than the longest sequences could fill; an error if not even one of them fits,
    unless sequences may be shorter."""
    config: Any = SimpleNamespace(
        block_size=block_size, max_model_len=max_model_len, max_num_seqs=max_num_seqs
    )
    per_sequence = -(-max_model_len // block_size)
    if num_blocks < per_sequence and not (can_shorten and num_blocks):
        with pytest.raises(ValueError, match="max_model_len"):
            limit_num_blocks(config, num_blocks, 1024, per_sequence, can_shorten)
    else:
        found = limit_num_blocks(config, num_blocks, 1024, per_sequence, can_shorten)
        assert found == min(num_blocks, per_sequence * max_num_seqs)


def test_a_cache_takes_memory_where_it_is_written() -> None:
    if not (statm := Path("/proc/self/statm")).exists():
        pytest.skip("only Linux says how much")
    before = int(statm.read_text().split()[1])
    cache = KVCacheSpec(8, 64, 64).allocate(2**13, 16, torch.float32, CPU)
    assert sum(each.nbytes for each in cache) == 2**29
    cache[0][:16] = 1.0
    assert (int(statm.read_text().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE") < 2**26


def test_a_cache_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "read_meminfo", lambda: {"MemAvailable": 2**31, "SwapFree": 0})
    with pytest.raises(ValueError, match=r"GiB, and 2.0 GiB are there. Lower num_gpu_blocks_over"):
        LLM(num_gpu_blocks_override=10**7)


# -- threads --


@pytest.mark.parametrize(
    ("quota", "reserved", "expected"),
    [("max 100000", "", 3), ("250000 100000", "", 2), ("50000 100000", "", 1), ("", "2", 1)],
)
def test_cores_within_a_quota(
    quota: str, reserved: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", reserved)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "cpu.max").write_text(quota)
    assert threads.num_cores(tmp_path) == expected


def test_waiting_threads_spin_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in threads.WAITING:
        monkeypatch.delenv(name, raising=False)
    assert threads.wait_policy() == threads.WAITING
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")  # what the user sets wins
    assert threads.wait_policy() == {}


def test_a_forked_process_computes_with_one_thread() -> None:
    """The threads of its parent would never answer."""
    program = """
import os
from nanoserve.kernels.threads import load_torch
load_torch()
import torch
torch.set_num_threads(2)
numbers = torch.ones(10**6)
before = numbers.exp().sum()  # by two threads
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    assert torch.get_num_threads() == 2
else:
    os._exit(torch.get_num_threads() != 1 or not torch.allclose(numbers.exp().sum(), before))
"""
    folder = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", program], check=True, cwd=folder, timeout=300)


def test_a_team_leaves_other_programs_their_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, others, bound = [0.0], [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(threads, "seconds_of_others", lambda: others[0])
    monkeypatch.setattr(threads, "num_cores", lambda: 4)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    team = threads.Team(bound.append)
    team.most = 3

    def wait(seconds: float, in_use: float) -> None:
        clock[0] += seconds
        others[0] += seconds * in_use

    for in_use, expected in ((0.2, 3), (1.1, 3), (1.8, 2), (9.0, 1), (-0.1, 3)):
        team.call(wait, 1, in_use)
        assert team.call(torch.get_num_threads) == expected == bound[-1]
    team.call(wait, 0.1, 9)
    assert team.call(torch.get_num_threads) == 3  # until the next look
    team.call(wait, 1, 9)
    assert team.call(torch.get_num_threads) == 1
    wait(60, 9)  # while nothing is computed here
    assert team.call(torch.get_num_threads) == 3
    for name in (*threads.NUMBER_VARIABLES, *threads.PLACE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    assert threads.most_threads(2**30) == 4
    monkeypatch.setenv("OMP_PROC_BIND", "true")  # what the user sets wins
    assert threads.most_threads(2**30) is None


def test_what_other_programs_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 1.5)
    monkeypatch.setattr(os, "sysconf", lambda name: 100)
    file = tmp_path / "stat"
    file.write_text("cpu  100 20 80 5000 70 10 40 900 0 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    assert threads.seconds_of_others(file) == 2.5 - 1.5
    assert threads.seconds_of_others(tmp_path / "none") == 0  # not Linux


def test_each_thread_keeps_to_a_core() -> None:
    """In a process of its own: its threads stay where they are put."""
    program = """
import os
import subprocess
import sys
import time
import torch
from nanoserve.kernels.native_cpu import bind_threads, load_library
before = os.sched_getaffinity(0)
torch.set_num_threads(2)
if load_library() and len(before) > 1:
    bind_threads(2)
    masks = [os.sched_getaffinity(int(each)) for each in os.listdir("/proc/self/task")]
    assert {sorted(before)[1]} in masks, masks
bind_threads(999)  # more threads than cores: none is put anywhere
assert os.sched_getaffinity(0) == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent.parent)


def test_a_call_with_threads_of_its_own() -> None:
    before = torch.get_num_threads()
    assert threads.call_with_threads(before + 1, torch.get_num_threads) == before + 1
    with pytest.raises(ZeroDivisionError):
        threads.call_with_threads(before + 1, lambda: 1 / 0)
    assert torch.get_num_threads() == before


def test_a_request_may_be_as_long_as_the_cache_holds() -> None:
    """Where max_model_len is not given; given, it is a promise."""
    block = LLM(num_gpu_blocks_override=1).llm_engine.executor.runner.kv_caches
    num_bytes = 5 * sum(each.nbytes for layer in block for each in layer)
    with LLM(kv_cache_memory_bytes=num_bytes) as llm:
        greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)
        [output] = llm.generate([[5] * 70], greedy, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 5 * 16 - 70
    with pytest.raises(ValueError, match="max_model_len"):
        LLM(kv_cache_memory_bytes=num_bytes, max_model_len=96)
