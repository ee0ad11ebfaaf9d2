"""Each layer against transformers' own module, and each rank's part against the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_partial_rotary

from nanoserve.attention import StepMetadata
from nanoserve.checkpoint import read_rope_parameters
from nanoserve.kernels.linear_cpu import can_pack
from nanoserve.kernels.selector import make_layer_config
from nanoserve.layers import (
    ColumnParallelLinear,
    LayerConfig,
    LinearBase,
    LinearMethod,
    QKNorm,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    apply_rope,
    rms_norm,
    silu_and_mul,
)
from nanoserve.models.rope import rope_frequencies
from nanoserve.parallel import ParallelState

# ------------------------------------------------------------------------------ norm, activation


def make_config(dtype: torch.dtype = torch.float32) -> LayerConfig:
    """As on a CPU: in float32 with packed weights and RMSNormCPU."""
    return make_layer_config(torch.device("cpu"), dtype, ParallelState())


@pytest.mark.parametrize("make", [LayerConfig, make_config], ids=["plain", "chosen"])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 48), (3, 4, 48)], ids=["tokens", "heads"])
def test_rms_norm_is_that_of_transformers(
    dtype: torch.dtype, shape: tuple[int, ...], eps: float, make: Callable[..., LayerConfig]
) -> None:
    """The residual stream is the input: it stays as it is."""
    torch.manual_seed(0)
    theirs = LlamaRMSNorm(48, eps=eps).to(dtype)
    theirs.weight.data = (torch.randn(48) * 0.3 + 1).to(dtype)
    ours = RMSNorm(48, eps, make(dtype=dtype))
    ours.weight.copy_(theirs.weight.data)
    x = (torch.randn(shape) * 3).to(dtype)
    before = x.clone()
    output = ours(x)
    assert output.dtype == dtype
    assert torch.equal(x, before) and output.data_ptr() != x.data_ptr()
    if dtype == torch.float32:
        torch.testing.assert_close(output, theirs(x), rtol=1e-6, atol=1e-6)
    else:  # rounded once or twice, and nearly always to the same number
        torch.testing.assert_close(output, theirs(x))
        assert (output == theirs(x)).float().mean() > 0.98


@pytest.mark.parametrize("make", [LayerConfig, make_config], ids=["plain", "chosen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_adds_to_the_residual_stream(
    dtype: torch.dtype, make: Callable[..., LayerConfig]
) -> None:
    """The sum takes the place of x, and no memory of its own; without a stream, x begins it."""
    norm = RMSNorm(48, 1e-5, make(dtype=dtype))
    norm.weight.copy_(torch.randn(48))
    x, residual = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype)
    total, before = x + residual, residual.clone()
    normed, stream = norm.add_and_norm(x, residual)
    assert stream.data_ptr() == x.data_ptr()
    assert torch.equal(stream, total)
    assert torch.equal(normed, norm(total))
    assert torch.equal(residual, before)
    normed, first = norm.add_and_norm(residual, None)
    assert first is residual and torch.equal(residual, before)
    assert torch.equal(normed, norm(before))


@settings(max_examples=40)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(64, 4096),
    st.sampled_from([1e-3, 1.0, 100.0]),
    st.sampled_from(["whole", "a part", "heads"]),
    st.integers(0, 2**31),
)
def test_rms_norm_computes_in_float32(
    dtype: torch.dtype, size: int, scale: float, layout: str, seed: int
) -> None:
    """Bit for bit what a cast to float32 and back gives, which takes two more kernels on a GPU."""
    torch.manual_seed(seed)
    x = (torch.randn(2, 3, size + 5) * scale).to(dtype)[..., :size]
    x = {"whole": x.flatten(0, 1).contiguous(), "a part": x[0], "heads": x[:, 1:]}[layout]
    weight = torch.randn(size).to(dtype)
    expected = weight * F.rms_norm(x.float(), (size,), eps=1e-6).to(dtype)
    assert torch.equal(rms_norm(x, weight, 1e-6), expected)


def test_one_norm_for_queries_and_keys() -> None:
    """3 query heads with the weight of q_norm, 2 key heads with that of k_norm."""
    torch.manual_seed(0)
    checkpoint = {f"a.{name}_norm.weight": torch.randn(8) for name in "qk"}
    norm = QKNorm(3, 5, 8, 1e-6, make_config())
    for name, shard in norm.shards("a.qk_norm"):
        shard.target.copy_(checkpoint[name][shard.slices])
    qk = torch.randn(4, 5, 8)
    q, k = F.rms_norm(qk, (8,), eps=1e-6).split((3, 2), dim=1)
    expected = (q * checkpoint["a.q_norm.weight"], k * checkpoint["a.k_norm.weight"])
    torch.testing.assert_close(norm(qk), torch.cat(expected, dim=1))


def test_silu_and_mul() -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    expected = gate / (1 + torch.exp(-gate)) * up
    torch.testing.assert_close(silu_and_mul(torch.cat((gate, up), dim=-1)), expected)


# ------------------------------------------------------------------------------ rope

HEAD_DIM = 32
NUM_FACTORS = HEAD_DIM // 2
ORIGINAL = 256
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 9 for i in range(NUM_FACTORS)],
    "long_factor": [3.0 + i for i in range(NUM_FACTORS)],
    "original_max_position_embeddings": ORIGINAL,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.5},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": YARN,
    "yarn-betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-not-truncated": {**YARN, "truncate": False},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2},
    "yarn-factor-below-one": {**YARN, "factor": 1.0},
    "llama3": LLAMA3,
    "llama3-narrow": {**LLAMA3, "low_freq_factor": 2.0, "high_freq_factor": 2.5},
    "longrope": LONGROPE,
    "longrope-factor": {**LONGROPE, "factor": 4.0},
    "longrope-attention-factor": {**LONGROPE, "factor": 4.0, "attention_factor": 1.3},
}


def their_config(rope: dict[str, Any], theta: float = 10000.0) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=4 * ORIGINAL,
        rope_parameters={"rope_theta": theta, **rope},
    )


def our_rope(rope: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    """The dict as the model passes it: read from a config.json, with the model's length."""
    hf = {"rope_parameters": {"rope_theta": theta, **rope}, "max_position_embeddings": 4 * ORIGINAL}
    return {**read_rope_parameters(hf), "max_position_embeddings": 4 * ORIGINAL}


def their_frequencies(config: LlamaConfig, seq_len: int) -> tuple[Tensor, float]:
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        return LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=seq_len)


@settings(max_examples=25)
@pytest.mark.parametrize("name", ROPES)
@given(
    theta=st.sampled_from([10.0, 100.0, 10000.0, 500000.0, 1e6]),
    max_model_len=st.sampled_from([17, ORIGINAL, ORIGINAL + 1, 4 * ORIGINAL, 9 * ORIGINAL]),
)
def test_frequencies_are_those_of_transformers(name: str, theta: float, max_model_len: int) -> None:
    """Those of transformers for a text of max_model_len tokens."""
    expected, expected_scaling = their_frequencies(their_config(ROPES[name], theta), max_model_len)
    rope = our_rope(ROPES[name], theta)
    frequencies, scaling = rope_frequencies(HEAD_DIM, rope, max_model_len)
    torch.testing.assert_close(frequencies, expected, rtol=1e-5, atol=0)
    assert scaling == pytest.approx(expected_scaling, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["default", "linear", "yarn", "llama3"])
def test_the_table_turns_queries_as_transformers_does(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer_config = LayerConfig(dtype=dtype)
    ours = make_rope(our_rope(ROPES[name]), 4 * ORIGINAL, layer_config)
    theirs = LlamaRotaryEmbedding(their_config(ROPES[name]))
    positions = torch.tensor([0, 1, 2, 77, 76, 1023, 0])
    q, k = torch.randn(7, 4, HEAD_DIM).to(dtype), torch.randn(7, 2, HEAD_DIM).to(dtype)
    cos, sin = theirs(q, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(q[None], k[None], cos, sin, unsqueeze_dim=2)
    rope = ours(positions)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for x, expected in ((q, expected_q[0]), (k, expected_k[0])):
        before = x.clone()
        turned = apply_rope(x, *rope)
        assert turned.dtype == dtype
        assert torch.equal(x, before)
        torch.testing.assert_close(turned, expected, rtol=tolerance, atol=tolerance)


def test_partial_rotary_turns_the_first_dimensions_only() -> None:
    torch.manual_seed(0)
    rope = our_rope({"rope_type": "default", "partial_rotary_factor": 0.25})
    ours = make_rope(rope, 64, LayerConfig())
    assert ours(torch.tensor([0]))[0].shape == (1, 1, 8)
    positions = torch.tensor([0, 5, 63])
    x = torch.randn(3, 2, HEAD_DIM)
    turned = apply_rope(x, *ours(positions))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    cos, sin = (torch.cat((part, part), -1)[None] for part in (angles.cos(), angles.sin()))
    expected, _ = apply_partial_rotary(x[None], x[None], cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(turned, expected[0])


@settings(max_examples=30)
@given(st.integers(0, 400), st.integers(0, 400), st.integers(0, 100))
def test_scores_depend_on_distances_only(query_at: int, key_at: int, shift: int) -> None:
    """The purpose of rope: moving query and key together changes nothing."""
    rope = make_rope(our_rope({"rope_type": "default"}), 512, LayerConfig())
    generator = torch.Generator().manual_seed(query_at)
    q, k = torch.randn(2, 1, 1, HEAD_DIM, generator=generator)

    def score(query_position: int, key_position: int) -> float:
        turned_q = apply_rope(q, *rope(torch.tensor([query_position])))
        turned_k = apply_rope(k, *rope(torch.tensor([key_position])))
        return float((turned_q * turned_k).sum())

    assert score(query_at + shift, key_at + shift) == pytest.approx(
        score(query_at, key_at), abs=2e-3
    )


def test_an_unknown_rope_type_is_named() -> None:
    with pytest.raises(ValueError, match=r"'spiral' is not supported; supported: default, .*yarn"):
        rope_frequencies(8, our_rope({"rope_type": "spiral"}), 64)


# ------------------------------------------------------------------------------ ranks


@dataclass(frozen=True)
class LoneRank(ParallelState):
    """A rank without others: it receives what it sends."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor


def make_rope(
    rope: dict[str, Any], max_model_len: int, layer_config: LayerConfig
) -> RotaryEmbedding:
    rotary_dim = int(HEAD_DIM * rope["partial_rotary_factor"])
    return RotaryEmbedding(
        *rope_frequencies(rotary_dim, rope, max_model_len), max_model_len, layer_config
    )


def ranks(tp_size: int) -> list[LayerConfig]:
    return [LayerConfig(parallel=LoneRank(rank, tp_size)) for rank in range(tp_size)]


def fill(layer: nn.Module, name: str, checkpoint: dict[str, Tensor]) -> None:
    """Load a layer as the loader does, and check that it names exactly these tensors."""
    shards = dict(layer.shards(name))
    for shard in shards.values():
        shard.target.fill_(torch.nan)
    if not isinstance(layer, VocabParallelEmbedding):  # an embedding may be padded
        assert sum(s.target.numel() for s in shards.values()) == sum(
            parameter.numel() for parameter in layer.parameters()
        )
    assert shards.keys() == checkpoint.keys()
    for key, shard in shards.items():
        assert shard.full_shape == tuple(checkpoint[key].shape)
        shard.target.copy_(checkpoint[key][shard.slices])
    assert not any(parameter.isnan().any() for parameter in layer.parameters())


TP_SIZES = pytest.mark.parametrize("tp_size", [1, 2, 4])
BIAS = pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])


@TP_SIZES
@BIAS
def test_column_parallel_outputs_laid_side_by_side(tp_size: int, bias: bool) -> None:
    """q, k and v are stacked on each rank: outputs are put together matrix by matrix."""
    torch.manual_seed(0)
    outputs = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    weights = {f"a.{key}.weight": torch.randn(size, 24) for key, size in outputs.items()}
    biases = {f"a.{key}.bias": torch.randn(size) for key, size in outputs.items()} if bias else {}
    x = torch.randn(5, 24)
    parts: dict[str, list[Tensor]] = {key: [] for key in outputs}
    for layer_config in ranks(tp_size):
        layer = ColumnParallelLinear(24, outputs, bias=bias, layer_config=layer_config)
        fill(layer, "a.qkv_proj", {**weights, **biases})
        assert layer.sizes == [size // tp_size for size in outputs.values()]
        for key, part in zip(outputs, layer(x).split(layer.sizes, dim=-1), strict=True):
            parts[key].append(part)
    for key in outputs:
        expected = F.linear(x, weights[f"a.{key}.weight"], biases.get(f"a.{key}.bias"))
        torch.testing.assert_close(torch.cat(parts[key], dim=-1), expected)


@TP_SIZES
@BIAS
def test_row_parallel_outputs_summed(tp_size: int, bias: bool) -> None:
    """Each rank multiplies its own inputs; the bias is added once, not once a rank."""
    torch.manual_seed(0)
    checkpoint = {"m.down_proj.weight": torch.randn(12, 32)}
    if bias:
        checkpoint["m.down_proj.bias"] = torch.randn(12)
    x = torch.randn(5, 32)
    total = torch.zeros(5, 12)
    for layer_config, part in zip(ranks(tp_size), x.chunk(tp_size, dim=-1), strict=True):
        layer = RowParallelLinear(32, 12, bias=bias, layer_config=layer_config)
        fill(layer, "m.down_proj", checkpoint)
        total += layer(part)
    torch.testing.assert_close(total, F.linear(x, *checkpoint.values()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 7, 8])
def test_the_vocabulary_is_divided(tp_size: int) -> None:
    """Looking up sums vectors over ranks; logits are put side by side. 20 tokens are padded to 21
    or 24, and the padding has no effect. The last of 8 ranks has nothing but padding."""
    torch.manual_seed(0)
    weight = torch.randn(20, 6)
    ids, hidden = torch.tensor([0, 19, 4, 5, 9, 10, 10]), torch.randn(3, 6)
    vectors, logits = torch.zeros(7, 6), []
    for layer_config in ranks(tp_size):
        layer = VocabParallelEmbedding(20, 6, layer_config)
        padding = layer.weight[layer.num_tokens :]
        assert len(padding) == len(layer.weight) - max(0, min(len(layer.weight), 20 - layer.start))
        assert not padding.any()
        fill(layer, "model.embed_tokens", {"model.embed_tokens.weight": weight})
        vectors += layer(ids)
        logits.append(layer.compute_logits(hidden))
        assert logits[-1].shape == (3, -(-20 // tp_size))
    assert torch.equal(vectors, weight[ids])
    torch.testing.assert_close(torch.cat(logits, dim=-1)[:, :20], hidden @ weight.T)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_sizes_that_do_not_divide_are_refused(rank: int) -> None:
    layer_config = LayerConfig(parallel=LoneRank(rank, 3))
    with pytest.raises(ValueError, match=r"k_proj: 16 cannot be divided among 3 ranks"):
        ColumnParallelLinear(8, {"q_proj": 6, "k_proj": 16}, bias=False, layer_config=layer_config)
    with pytest.raises(ValueError, match=r"row-parallel layer: 10 cannot be divided"):
        RowParallelLinear(10, 9, bias=False, layer_config=layer_config)


# ------------------------------------------------------------------------------ linear methods


def process(layer: LinearBase) -> None:
    layer.linear_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [512, 40], ids=["blocks", "transposed"])
def test_packing_changes_the_layout_and_not_the_product(
    num_rows: int, bias: bool, size: int
) -> None:
    """And the weight takes its memory once."""
    torch.manual_seed(0)
    layer = ColumnParallelLinear(size, {"a": 512, "b": 256}, bias=bias, layer_config=make_config())
    torch.nn.init.normal_(layer.weight)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    x = torch.randn(num_rows, size)
    expected, weight = layer(x), layer.weight.clone()
    process(layer)
    if size == 512:
        assert layer.packed_weight is not None and layer.weight.numel() == 0
    else:
        assert layer.packed_weight is None and layer.weight.t().is_contiguous()
        assert torch.equal(layer.weight, weight)
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("vocab_size", [1024, 40], ids=["large", "small"])
def test_packed_embeddings_and_heads(vocab_size: int) -> None:
    """A weight whose rows are looked up keeps them; only a large head is packed."""
    is_large = vocab_size == 1024
    embedding, head, tied = (
        VocabParallelEmbedding(vocab_size, 512, make_config()) for _ in range(3)
    )
    embedding.is_lm_head = head.is_embedding = False
    weight, x = torch.randn(vocab_size, 512), torch.randn(3, 512)
    for layer in (embedding, head, tied):
        layer.weight.copy_(weight)
        process(layer)
    assert embedding.packed_weight is None
    assert (head.packed_weight is not None) == (tied.packed_weight is not None) == is_large
    assert head.weight.numel() == (0 if is_large else weight.numel())
    for layer in (head, tied):
        torch.testing.assert_close(layer.compute_logits(x), x @ weight.T, rtol=1e-4, atol=1e-3)
    for layer in (embedding, tied):
        assert torch.equal(layer(torch.tensor([5])), weight[5:6])


@pytest.mark.skipif(not can_pack(torch.bfloat16), reason="this processor has no such product")
@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("size", [512, 40], ids=["blocks", "as it is"])
def test_packing_changes_bfloat16_by_a_rounding_at_most(num_rows: int, size: int) -> None:
    """Sums are made in float32 and rounded once, in both layouts."""
    torch.manual_seed(0)
    config = make_config(torch.bfloat16)
    layer = ColumnParallelLinear(size, {"a": 512, "b": 256}, bias=True, layer_config=config)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(num_rows, size).bfloat16()
    expected = layer(x)
    process(layer)
    assert (layer.packed_weight is not None) == (size == 512)
    torch.testing.assert_close(layer(x), expected, rtol=2**-7, atol=1e-3)


def test_other_dtypes_are_not_packed() -> None:
    layer_config = make_config(torch.float16)
    assert type(layer_config.linear_method) is LinearMethod


def test_a_linear_method_of_ones_own() -> None:
    """The seam of quantization and LoRA: every linear layer and head goes through it, and it gets
    the metadata of the step."""
    seen: list[StepMetadata | None] = []

    class Halves(LinearMethod):
        def apply(
            self, layer: LinearBase, x: Tensor, bias: Tensor | None, metadata: StepMetadata | None
        ) -> Tensor:
            seen.append(metadata)
            return super().apply(layer, x, bias, metadata) / 2

    layer_config = LayerConfig(linear_method=Halves())
    column = ColumnParallelLinear(8, {"a": 4}, bias=True, layer_config=layer_config)
    row = RowParallelLinear(8, 4, bias=False, layer_config=layer_config)
    head = VocabParallelEmbedding(4, 8, layer_config)
    metadata = StepMetadata(*[torch.zeros(1)] * 4)
    x = torch.randn(2, 8)
    for layer in (column, row, head):
        torch.nn.init.normal_(layer.weight)
    assert column.bias is not None
    torch.nn.init.normal_(column.bias)
    assert torch.equal(column(x, metadata), F.linear(x, column.weight, column.bias) / 2)
    assert torch.equal(row(x, metadata), F.linear(x, row.weight) / 2)
    assert torch.equal(head.compute_logits(x), F.linear(x, head.weight) / 2)
    assert seen[0] is metadata and seen[1] is metadata and seen[2] is None
