"""The fused kernels against the plain functions of layers.py, run by Triton's interpreter on a CPU.

What the compiler makes of them is tested in test_aot.py, what a GPU makes of them in
test_gpu_attention.py and test_gpu_engine.py.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_oracle import (
    bfloat16_as_on_a_gpu,
    needs_interpreter,
    one_thread,
    unwritten_memory_is_nan,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton exists on Linux only")
from aot_kernels import GPUS, META, Launch, quantized, recorded, variant_of

from nanoserve import LLM, SamplingParams, layers
from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.extras.trace.launches import OperatorLog
from nanoserve.kernels.attention_triton import GpuInfo, TritonBackend
from nanoserve.kernels.fused_triton import (
    add_rms_norm_triton,
    rope_and_store_triton,
    silu_and_mul_triton,
)
from nanoserve.kernels.selector import make_layer_config
from nanoserve.kv_cache import WARM_UP_LENGTHS, KVCacheSpec, warm_up
from nanoserve.layers import LayerConfig, QKNorm, RotaryEmbedding
from nanoserve.models.base import Model
from nanoserve.models.registry import build_model
from nanoserve.models.rope import rope_frequencies
from nanoserve.parallel import ParallelState

pytestmark = [needs_interpreter, pytest.mark.filterwarnings("ignore:overflow encountered in")]

CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
# Largest error in units in the last place. A sum in another order, rounded: in float32 a few units.
# In half precision a number nearly always rounds to the same one, else to its neighbour, and there
# are up to three such roundings in a row.
ULPS = {torch.float32: 8, torch.float16: 3, torch.bfloat16: 3}


@pytest.fixture(autouse=True)
def as_on_a_gpu() -> Iterator[None]:
    with one_thread(), bfloat16_as_on_a_gpu():
        yield


def assert_within_ulps(output: Tensor, expected: Tensor, size: Tensor | None = None) -> None:
    """`size`: the largest number that was added up to the expected one, if not that itself."""
    dtype = expected.dtype
    assert (output.dtype, output.shape) == (dtype, expected.shape)
    size = expected if size is None else size
    limit = torch.finfo(dtype).eps * size.double().abs() + torch.finfo(dtype).tiny
    error = (output.double() - expected.double()).abs() / limit
    assert not error.numel() or float(error.max()) <= ULPS[dtype]
    if dtype != torch.float32 and error.numel() > 200:  # rounded at the same places
        assert float((output == expected).float().mean()) > 0.97


def randn(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


# ------------------------------------------------------------------------------ residual and norm


@settings(max_examples=15)
@given(
    st.integers(0, 4),
    st.sampled_from([1, 64, 80, 576, 896, 1000, 3584]),
    DTYPES,
    st.sampled_from([1e-3, 1.0, 100.0]),
    st.sampled_from([1e-6, 0.3]),
    st.integers(0, 2**31),
)
def test_add_rms_norm(
    num_tokens: int, size: int, dtype: torch.dtype, scale: float, eps: float, seed: int
) -> None:
    """The sum is equal bit for bit, and takes the place of x; the norm is within ULPS. Rows may be
    parts of longer ones."""
    x, residual = (
        randn(num_tokens, size + 3, dtype=dtype, seed=seed + i, scale=scale)[:, :size]
        for i in range(2)
    )
    weight, before = randn(size, dtype=dtype, seed=seed + 2) + 1, residual.clone()
    normed, total = layers.add_rms_norm(x.clone(), residual, weight, eps)
    with unwritten_memory_is_nan():
        our_normed, our_total = add_rms_norm_triton(x, residual, weight, eps)
    assert our_total is x
    assert torch.equal(our_total, total)
    assert torch.equal(residual, before)
    assert_within_ulps(our_normed, normed)


# ------------------------------------------------------------------------------ activation


@settings(max_examples=20)
@given(
    st.integers(0, 4),
    st.sampled_from([1, 112, 1024, 1025, 2400]),
    DTYPES,
    st.sampled_from([0.1, 3.0, 60.0]),
    st.integers(0, 2**31),
)
def test_silu_and_mul(
    num_tokens: int, size: int, dtype: torch.dtype, scale: float, seed: int
) -> None:
    """Also for gates so low that exp overflows: the result is 0, as it is there."""
    gate_up = randn(num_tokens, 2 * size, dtype=dtype, seed=seed, scale=scale)
    with unwritten_memory_is_nan():
        output = silu_and_mul_triton(gate_up)
    assert_within_ulps(output, layers.silu_and_mul(gate_up))


# ------------------------------------------------------------------------------ rope and store

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},  # scales cos and sin, too
}


@settings(max_examples=20)
@given(
    slots=st.lists(st.integers(0, 31), max_size=4, unique=True),
    num_padding=st.integers(0, 2),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (7, 1), (16, 8)]),
    dims=st.sampled_from([(16, 16), (64, 64), (80, 80), (80, 32), (128, 128), (256, 64)]),
    rope_type=st.sampled_from(list(ROPES)),
    has_norm=st.booleans(),
    dtype=DTYPES,
    seed=st.integers(0, 2**31),
)
def test_rope_and_store(
    slots: list[int],
    num_padding: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    rope_type: str,
    has_norm: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Queries, keys and values of any heads, turned wholly or in part, with and without a norm.
    Padding is not stored. Slots that no token has stay as they are, and so does the product of q,
    k and v."""
    slots = [*slots, *[-1] * num_padding]
    (num_heads, num_kv_heads), (head_dim, rotary_dim) = heads, dims
    layer_config = LayerConfig(dtype)
    num_rows = num_heads + 2 * num_kv_heads
    qkv = randn(len(slots), num_rows * head_dim, dtype=dtype, seed=seed)
    before = qkv.clone()
    rope_settings = {"rope_type": rope_type, "rope_theta": 1e4, **ROPES[rope_type]}
    table = RotaryEmbedding(*rope_frequencies(rotary_dim, rope_settings, 256), 256, layer_config)
    generator = torch.Generator().manual_seed(seed)
    rope = table(torch.randint(256, (len(slots),), generator=generator))
    qk_norm = None
    if has_norm:
        qk_norm = QKNorm(num_heads, num_heads + num_kv_heads, head_dim, 1e-6, layer_config)
        qk_norm.weight.copy_(randn(*qk_norm.weight.shape, dtype=dtype, seed=seed + 1) + 1)
    metadata = StepMetadata(torch.tensor(slots, dtype=torch.int64), *[torch.zeros(0)] * 3)
    results = []
    for function, backend in (
        (layers.rope_and_store, AttentionBackend()),
        (rope_and_store_triton, TritonBackend()),
    ):
        around = KVCacheSpec(num_kv_heads, head_dim, head_dim).allocate(6, 8, dtype, CPU)
        for cache in around:
            cache.fill_(7.0)
        caches = (around[0][1:5], around[1][1:5])
        with unwritten_memory_is_nan():
            query = function(qkv, qk_norm, rope, backend, caches, metadata)
        results.append((query, *around))
    assert torch.equal(qkv, before)
    (query, keys, values), (our_query, our_keys, our_values) = results
    assert torch.equal(our_values, values)
    assert_within_ulps(our_query, query, size=largest_of_pair(query, rotary_dim))
    assert_within_ulps(our_keys, keys, size=largest_of_pair(keys, rotary_dim))


def largest_of_pair(turned: Tensor, rotary_dim: int) -> Tensor:
    """The length of each turned pair: at least as large as what was added up in it."""
    half = rotary_dim // 2
    first, second = turned[..., :half].double(), turned[..., half:rotary_dim].double()
    length = first.hypot(second)
    return torch.cat((length, length, turned[..., rotary_dim:].double()), dim=-1)


class OwnStore(TritonBackend):
    """Stores keys of twice the size."""

    def store(self, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: StepMetadata) -> None:
        super().store(2 * key, value, kv_cache, metadata)


def test_a_backend_that_stores_in_its_own_way_keeps_doing_so() -> None:
    qkv, slots = torch.randn(1, 3 * 16), torch.tensor([5])
    rope = RotaryEmbedding(torch.ones(8), 1.0, 9, LayerConfig())(torch.tensor([3]))
    stored = []
    for backend in (TritonBackend(), OwnStore()):
        caches = KVCacheSpec(1, 16, 16).allocate(2, 8, torch.float32, CPU)
        metadata = StepMetadata(slots, slots, slots, slots)
        rope_and_store_triton(qkv, None, rope, backend, caches, metadata)
        stored.append(caches[0][0, 5])
    torch.testing.assert_close(stored[1], 2 * stored[0])


# ------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("custom_ops", ["all", "none"])
def test_they_come_with_the_triton_backend(attention: str, custom_ops: str) -> None:
    chosen = make_layer_config(CPU, torch.float16, ParallelState(), attention, custom_ops)
    found = (chosen.add_rms_norm, chosen.rope_and_store, chosen.silu_and_mul)
    fused = (add_rms_norm_triton, rope_and_store_triton, silu_and_mul_triton)
    plain = (layers.add_rms_norm, layers.rope_and_store, layers.silu_and_mul)
    assert found == (fused if (attention, custom_ops) == ("triton", "all") else plain)


@pytest.mark.parametrize(
    ("family", "max_tokens"), [("qwen3", 2), pytest.param("llama", 9, marks=pytest.mark.slow)]
)
def test_an_engine_on_them_gives_the_same_tokens(
    make_checkpoint: Callable[..., Path], family: str, max_tokens: int
) -> None:
    folder = make_checkpoint(family)
    prompts, params = [[7, 8, 9], [11] * 5], SamplingParams(temperature=0, max_tokens=max_tokens)
    answers = []
    for attention_backend in ("torch", "triton"):
        with LLM(folder, num_kv_blocks=16, attention_backend=attention_backend) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]


# ------------------------------------------------------------------------------ how many kernels


@dataclass(frozen=True)
class ModelWithoutContents:
    """A model on the meta device: its steps launch what they would launch on a GPU."""

    model: Model
    layer_config: LayerConfig
    gpu: GpuInfo = GPUS[90]

    def launches(
        self, num_tokens: int, num_seqs: int, max_blocks: int, watch: Any = None
    ) -> list[Launch]:
        """Of one step: so many tokens, sequences and columns of the block table. `watch` is entered
        around the model."""
        specs, dtype = self.model.kv_cache_specs(), self.layer_config.dtype
        caches = [spec.allocate(100, 16, dtype, META) for spec in specs]
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=META)
        table, loc, lens = (
            torch.zeros(size, dtype=torch.int32, device=META)
            for size in ((num_seqs, max_blocks), (num_seqs + 1,), (num_seqs,))
        )
        metadata = self.layer_config.attention.plan(StepMetadata(ids, table, loc, lens), 16, dtype)
        launches: list[Launch] = []
        with torch.inference_mode(), recorded(launches, self.gpu), watch or nullcontext():
            self.model(ids, ids, caches, metadata)
        return launches


def model_without_contents(
    folder: Path,
    family: str,
    num_layers: int,
    custom_ops: str = "all",
    gpu: GpuInfo = GPUS[90],
    dtype: torch.dtype = torch.bfloat16,
    **config: Any,
) -> ModelWithoutContents:
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8}
    sizes |= {"intermediate_size": 3072, "head_dim": 128, "vocab_size": 320}
    config = sizes | config
    config |= {"architectures": [f"{family}ForCausalLM"], "num_hidden_layers": num_layers}
    config |= {"max_position_embeddings": 40_000}
    (folder / "config.json").write_text(json.dumps(config))
    layer_config = make_layer_config(META, dtype, ParallelState(), TritonBackend(), custom_ops)
    model = build_model(ModelConfig.from_folder(folder), 1024, layer_config)
    return ModelWithoutContents(model, layer_config, gpu)


def kernels_of_a_step(folder: Path, *options: Any) -> Counter[str]:
    """What a decode of 256 sequences launches on an H100, by name."""
    model = model_without_contents(folder, *options)
    counted = OperatorLog()
    launches = model.launches(256, 256, 64, watch=counted)
    return Counter([*counted.names, *(launch.kernel.__name__ for launch in launches)])


@pytest.mark.parametrize(("family", "plain"), [("Qwen3", 19), ("Llama", 17)])
def test_a_layer_is_nine_kernels(tmp_path: Path, family: str, plain: int) -> None:
    """Four products, attention, and the three fused kernels, one of them twice."""
    found = {}
    for custom_ops in ("all", "none"):
        three, two = (kernels_of_a_step(tmp_path, family, n, custom_ops) for n in (3, 2))
        found[custom_ops] = three - two
    assert found["all"] == {
        "aten.linear.default": 4,
        "add_rms_norm_kernel": 2,
        "rope_and_store_kernel": 1,
        "paged_attention_kernel": 1,
        "silu_and_mul_kernel": 1,
    }
    assert found["none"].total() == plain


@pytest.fixture(
    scope="module",
    params=[
        (GPUS[90], 16, torch.bfloat16),
        (GpuInfo(90, 16, 227 * 1024), 32, torch.bfloat16),  # a slice of a GPU
        (GpuInfo(89, 24, 99 * 1024), 64, torch.bfloat16),  # a laptop's
        (GpuInfo(89, 24, 99 * 1024), 32, torch.float32),
    ],
    ids=lambda param: f"{param[0].num_sms} SMs, {param[1]} heads, {param[2]}",
)
def warmed_up(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelWithoutContents, set[str]]:
    """A layer with a window and one without, and what is compiled for them at start."""
    gpu, num_heads, dtype = request.param
    options = {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 1}
    options |= {"gpu": gpu, "dtype": dtype, "num_attention_heads": num_heads}
    made = model_without_contents(tmp_path_factory.mktemp("qwen2"), "Qwen2", 2, **options)
    launches: list[Launch] = []
    with recorded(launches, gpu):
        warm_up(EngineConfig(max_model_len=40_000), made.model, made.layer_config)
    return made, {repr((launch.kernel.__name__, variant_of(launch))) for launch in launches}


@settings(max_examples=25)
@given(num_seqs=st.integers(1, 300), more=st.integers(0, 9000), max_blocks=st.integers(1, 2500))
@example(num_seqs=1, more=0, max_blocks=2500)
@example(num_seqs=2, more=40, max_blocks=2500)
@example(num_seqs=1, more=2, max_blocks=2500)
def test_every_step_runs_kernels_that_were_warmed_up(
    warmed_up: tuple[ModelWithoutContents, set[str]], num_seqs: int, more: int, max_blocks: int
) -> None:
    """None is compiled while requests wait for it, whatever the numbers of tokens, sequences and
    blocks."""
    made, warm = warmed_up
    for num_tokens in (num_seqs, num_seqs + more):
        for launch in made.launches(num_tokens, num_seqs, max_blocks):
            assert repr((launch.kernel.__name__, variant_of(launch))) in warm


@pytest.mark.parametrize(("kind", "num_groups"), [("int4", 32), ("int8", 1)])
def test_products_by_quantized_weights_were_warmed_up(kind: str, num_groups: int) -> None:
    """Their tiles grow with the number of tokens."""

    def variants(numbers: Iterable[int]) -> set[str]:
        launches: list[Launch] = []
        with recorded(launches):
            for num_tokens in numbers:
                quantized(kind, num_tokens, num_groups)()
        return {repr(variant_of(launch)) for launch in launches}

    assert variants(WARM_UP_LENGTHS) == variants(range(1, 300))


def test_the_counter_sees_kernels_and_no_views() -> None:
    x = torch.zeros(4, 6)
    with torch.inference_mode(), OperatorLog() as counted:
        x.view(-1, 3).transpose(0, 1).split(2)[0].float()  # all views: float() is x
        x.half(), x.add_(1), x.roll(1), torch.empty(3)
    assert counted.names == ["aten.to.dtype", "aten.add_.Tensor", "aten.roll.default"]
