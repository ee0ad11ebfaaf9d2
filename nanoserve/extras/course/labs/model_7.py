"""Lab 7, Model: what is a transformer made of?

Norm, rotary embedding, attention's projections, the residual stream, and how a checkpoint fills
stacked matrices. In the end a random model gives the logits of transformers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from nanoserve import layers
from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.config import ModelConfig
from nanoserve.extras.course.labs.tensors import as_text
from nanoserve.extras.course.spec import Lab, Task, must
from nanoserve.layers import ColumnParallelLinear, LayerConfig, QKNorm, RMSNorm, RotaryEmbedding
from nanoserve.models import loader
from nanoserve.models.base import Model
from nanoserve.models.decoder import DecoderLayer
from nanoserve.models.registry import build_model
from nanoserve.models.shards import Shard
from nanoserve.models.weight_files import TensorInfo
from nanoserve.parallel import ParallelState

LAYERS = "nanoserve.layers"
NORM = Task("7.1", LAYERS, "rms_norm")
TABLE = Task("7.2", LAYERS, "RotaryEmbedding.__init__")
ROPE = Task("7.3", LAYERS, "apply_rope")
QKV = Task("7.4", LAYERS, "rope_and_store")
STREAM = Task("7.5", "nanoserve.models.decoder", "DecoderLayer.forward")
SHARDS = Task("7.6", LAYERS, "ColumnParallelLinear.matrices")
FILL = Task("7.7", "nanoserve.models.loader", "fill_from_checkpoint")
LAB = Lab(
    7,
    "Model",
    [NORM, TABLE, ROPE, QKV, STREAM, SHARDS, FILL],
    needs_torch=True,
    memory=6144,  # of address space: torch and transformers map much and use little
    seconds=30.0,
)


def check_close(got: Tensor, right: Tensor, what: str, tolerance: float = 1e-5) -> None:
    """Raise Wrong, with the first row that differs."""
    must(
        got.shape == right.shape,
        f"{what}: the shape is {list(got.shape)}, and should be {list(right.shape)}",
    )
    for row, (ours, theirs) in enumerate(
        zip(got.flatten(0, -2), right.flatten(0, -2), strict=True)
    ):
        must(
            torch.allclose(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance),
            f"{what}: row {row} is {as_text(ours[:8])} and should be {as_text(theirs[:8])}",
        )


# -- 7.1 --


def check_norm(x: Tensor, eps: float, tolerance: float = 1e-5) -> None:
    weight = (torch.arange(x.shape[-1]) % 5 * 0.25 + 0.5).to(x.dtype)
    before = x.clone()
    got = layers.rms_norm(x, weight, eps)
    must(torch.equal(x, before), "x was written to, and the residual stream needs it again")
    must(got.dtype == x.dtype, f"x is {x.dtype}, the result is {got.dtype}")
    rows = []
    for row in before.double().flatten(0, -2):
        root = math.sqrt(sum(number**2 for number in row.tolist()) / len(row) + eps)
        rows.append(row / root * weight.double())
    check_close(got.flatten(0, -2), torch.stack(rows), f"eps {eps:g}, {x.dtype}", tolerance)


@NORM.behaviour(1, "divided by the root of the mean square, times the weight")
def root_of_mean_square() -> None:
    check_norm(torch.tensor([[3.0, -4.0, 12.0, 0.0], [1.0, 1.0, 1.0, 5.0]]), 1e-6)


@NORM.behaviour(1, "eps is added to the mean square, under the root")
def eps_under_the_root() -> None:
    check_norm(torch.tensor([[0.5, -0.25, 0.0, 1.0]]), 0.3)
    check_norm(torch.tensor([[1e-4, -1e-4]]), 1e-5)


@NORM.behaviour(1, "in half precision, too: the square of 300 is more than float16 can hold")
def in_half_precision() -> None:
    check_norm(torch.tensor([[300.0, -300.0, 500.0]], dtype=torch.float16), 1e-6, 2e-3)
    check_norm(torch.full((1, 4096), 1.0, dtype=torch.bfloat16), 1e-6, 1e-2)


@NORM.behaviour(0.5, "over the last dimension only: also for heads", is_property=True)
def norm_of_any_shape(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for shape in [(5, 8), (2, 3, 16), (1, 1, 4)]:
        check_norm(torch.randn(shape, generator=generator) * 3, 1e-5)


# -- 7.2, 7.3 --


def turn(x: Tensor, position: int, frequencies: list[float], scaling: float = 1.0) -> Tensor:
    """One head [head_dim], pair by pair: i and i + len(frequencies)."""
    half, result = len(frequencies), x.double().clone()
    for i, frequency in enumerate(frequencies):
        a, b, angle = float(x[i]), float(x[i + half]), position * frequency
        result[i] = scaling * (a * math.cos(angle) - b * math.sin(angle))
        result[i + half] = scaling * (b * math.cos(angle) + a * math.sin(angle))
    return result


def check_table(
    frequencies: list[float],
    positions: list[int],
    scaling: float = 1.0,
    dtype: torch.dtype = torch.float32,
    max_model_len: int = 64,
) -> None:
    """What `forward` takes out of the table, beside the cosines and sines of the angles."""
    rope = RotaryEmbedding(
        torch.tensor(frequencies), scaling, max_model_len, LayerConfig(dtype=dtype)
    )
    shape, wanted = list(rope.table.shape), [max_model_len, 4 * len(frequencies)]
    must(shape == wanted, f"the table has the shape {shape}, and should have {wanted}")
    must(rope.table.dtype == dtype, f"the table is {rope.table.dtype}, the model {dtype}")
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for position, cos, sin in zip(positions, *rope(torch.tensor(positions)), strict=True):
        angles = [position * each for each in torch.tensor(frequencies).double().tolist()]
        right = [scaling * math.cos(angle) for angle in angles] * 2
        text = f"position {position}, frequencies {frequencies}, scaling {scaling:g}"
        check_close(cos, torch.tensor([right]), f"{text}: cos", tolerance)
        sines = [scaling * math.sin(angle) for angle in angles]
        right = [-each for each in sines] + sines
        check_close(sin, torch.tensor([right]), f"{text}: sin, negative in front", tolerance)


@TABLE.behaviour(1, "the angle is position * frequency; cos of both halves comes first")
def angles() -> None:
    check_table([1.0, 0.1], [0, 1, 2, 63])


@TABLE.behaviour(0.5, "scaling multiplies cos and sin")
def scaled() -> None:
    check_table([1.0, 0.1, 0.01], [5, 7], scaling=1.25)


@TABLE.behaviour(1, "in bfloat16 the angles are still right: only the table is rounded")
def rounded_once() -> None:
    check_table([1.0, 0.3], [257, 1001], dtype=torch.bfloat16, max_model_len=1024)


@ROPE.behaviour(1, "dimension i is paired with i + head_dim / 2, not with its neighbour")
def pairs_of_halves() -> None:
    check_rope([1.0, 0.1], 4, [1, 3])


@ROPE.behaviour(1, "(a, b) becomes (a cos - b sin, b cos + a sin)")
def direction() -> None:
    check_rope([1.0], 2, [0, 1, 2])


@ROPE.behaviour(1, "dimensions behind rotary_dim stay as they are")
def partial() -> None:
    check_rope([1.0, 0.1], 6, [4, 9])


@ROPE.behaviour(1, "the product of two heads depends on the distance alone", is_property=True)
def distance_alone(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        frequencies = [rng.uniform(0.001, 1) for _ in range(rng.randint(1, 4))]
        head_dim = 2 * len(frequencies) + rng.choice([0, 2])
        check_rope(frequencies, head_dim, [rng.randrange(60)], rng.randrange(2**20))


def check_rope(
    frequencies: list[float], head_dim: int, positions: list[int], seed: int = 0
) -> None:
    """Two heads, beside a loop over pairs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(positions), 2, head_dim, generator=generator)
    turns = torch.tensor([[p * f for f in frequencies] for p in positions])[:, None]
    cos = torch.cat((turns.cos(), turns.cos()), dim=-1)
    sin = torch.cat((-turns.sin(), turns.sin()), dim=-1)
    before = x.clone()
    got = layers.apply_rope(x, cos, sin)
    must(torch.equal(x, before), "x was written to")
    rows = [[turn(head, p, frequencies) for head in x[i]] for i, p in enumerate(positions)]
    right = torch.stack([torch.stack(heads) for heads in rows])
    text = f"positions {positions}, {len(frequencies)} pairs of {head_dim} dimensions"
    check_close(got, right, text, 1e-4)


# -- 7.4 --


class Recorder(AttentionBackend):
    """Keeps what is stored."""

    stored: tuple[Tensor, Tensor, KVCache, StepMetadata]

    def store(self, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: StepMetadata) -> None:
        self.stored = key.clone(), value.clone(), kv_cache, metadata


def check_qkv(num_heads: int, num_kv_heads: int, has_norm: bool, turned: bool) -> None:
    """Heads that can be told apart, with angles or without."""
    generator = torch.Generator().manual_seed(num_heads)
    head_dim, tokens, rows = 4, 3, num_heads + 2 * num_kv_heads
    qkv = torch.randn(tokens, rows * head_dim, generator=generator)
    turns = torch.tensor([1.0, 0.1]) * torch.arange(tokens)[:, None, None] * turned
    rope = (
        torch.cat((turns.cos(), turns.cos()), dim=-1),
        torch.cat((-turns.sin(), turns.sin()), dim=-1),
    )
    norm = None
    qk = qkv.view(tokens, rows, head_dim)[:, : num_heads + num_kv_heads]
    if has_norm:
        norm = QKNorm(num_heads, num_heads + num_kv_heads, head_dim, 1e-6, LayerConfig())
        norm.weight.copy_(torch.rand(norm.weight.shape, generator=generator) + 0.5)
        qk = qk * (qk.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.weight
    halves = torch.cat((qk[..., 2:], qk[..., :2]), dim=-1)
    qk = qk * rope[0] + halves * rope[1]
    value = qkv.view(tokens, rows, head_dim)[:, num_heads + num_kv_heads :].clone()
    cache = torch.zeros(2, 4, num_kv_heads, head_dim)
    backend, none = Recorder(), torch.zeros(0, dtype=torch.int32)
    caches, metadata = (cache, cache), StepMetadata(torch.arange(tokens), none, none, none)
    got = layers.rope_and_store(qkv, norm, rope, backend, caches, metadata)
    text = f"{num_heads} query heads, {num_kv_heads} key heads"
    text += ", with norms" * has_norm + ", all at position 0" * (not turned)
    check_close(got, qk[:, :num_heads], f"{text}: queries")
    must(hasattr(backend, "stored"), f"{text}: backend.store was not called")
    key, stored_value, _, _ = backend.stored
    check_close(key, qk[:, num_heads:], f"{text}: keys that are stored")
    check_close(stored_value, value, f"{text}: values that are stored, which are not turned")
    must(backend.stored[2:] == (caches, metadata), "store gets the layer's cache and the metadata")


@QKV.behaviour(1, "q, k and v are divided in this order, by whole heads")
def order_of_qkv() -> None:
    check_qkv(2, 2, has_norm=False, turned=False)
    check_qkv(4, 1, has_norm=False, turned=False)


@QKV.behaviour(1, "queries and keys are turned, values are not")
def turned_qk() -> None:
    check_qkv(4, 2, has_norm=False, turned=True)


@QKV.behaviour(1, "the norms of queries and keys come before the rotation")
def norm_first() -> None:
    check_qkv(4, 2, has_norm=True, turned=False)
    check_qkv(3, 1, has_norm=True, turned=True)


@QKV.behaviour(1, "random models give the logits of transformers", is_property=True)
def qkv_like_transformers(seed: int) -> None:
    check_logits(seed)


# -- 7.5 --


def check_stream(has_residual: bool, seed: int = 0) -> None:
    """A layer whose attention is tanh and whose MLP is a square."""
    generator = torch.Generator().manual_seed(seed)
    layer = DecoderLayer.__new__(DecoderLayer)
    nn.Module.__init__(layer)
    norms = [RMSNorm(6, 1e-5, LayerConfig()) for _ in range(2)]
    for norm in norms:
        norm.weight.copy_(torch.rand(6, generator=generator) + 0.5)
    layer.input_layernorm, layer.post_attention_layernorm = norms
    calls: list[str] = []

    def attention(y: Tensor, *others: object) -> Tensor:
        calls.append("attention")
        must(others == ("rope", "cache", "metadata"), f"self_attn got (y, {others})")
        return 2 * y.tanh()

    def mlp(y: Tensor, *others: object) -> Tensor:
        calls.append("MLP")
        must(others == ("metadata",), f"mlp got (y, {others})")
        return y * y

    layer.__dict__.update(self_attn=attention, mlp=mlp)
    x, other = (torch.randn(3, 6, generator=generator) for _ in range(2))
    residual = other if has_residual else None

    def normed(stream: Tensor, norm: RMSNorm) -> Tensor:
        return stream * (stream.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight

    stream = x.clone() if residual is None else x + residual
    stream = stream + 2 * normed(stream, norms[0]).tanh()
    right = stream + normed(stream, norms[1]) ** 2
    got = layer((x, residual), "rope", "cache", "metadata")
    must(calls == ["attention", "MLP"], f"a layer calls attention, then the MLP; called: {calls}")
    must(
        isinstance(got, tuple) and len(got) == 2 and isinstance(got[1], Tensor),
        "a layer gives a pair: the MLP's output, and the stream that is still to be added",
    )
    text = "x is the first layer's" if residual is None else "x and a residual"
    check_close(got[0] + got[1], right, f"{text}; the sum of the pair")
    check_close(got[1], stream, f"{text}; the stream behind attention")


@STREAM.behaviour(1.5, "each norm is before its block, and the stream goes around both")
def around_both() -> None:
    check_stream(has_residual=True)


@STREAM.behaviour(0.5, "the first layer has no residual yet")
def first_layer() -> None:
    check_stream(has_residual=False)


@STREAM.behaviour(1, "random models give the logits of transformers", is_property=True)
def stream_like_transformers(seed: int) -> None:
    check_logits(seed)


# -- 7.6 --


def check_shards(
    outputs: dict[str, int], unit: int | None, bias: bool, tp_size: int, input_size: int = 3
) -> None:
    """Fill the layer of each rank by what `shards` says, and look at its rows."""
    whole = {}
    for number, (name, size) in enumerate(outputs.items()):
        rows = 100.0 * number + torch.arange(size)
        whole[f"model.attn.{name}.weight"] = rows[:, None].expand(-1, input_size)
        if bias:
            whole[f"model.attn.{name}.bias"] = rows + 0.5
    for rank in range(tp_size):
        config = LayerConfig(parallel=ParallelState(rank, tp_size))
        layer = ColumnParallelLinear(input_size, outputs, bias=bias, layer_config=config, unit=unit)
        text = f"{outputs}, rank {rank} of {tp_size}"
        targets = dict(layer.named_parameters())
        for parameter in targets.values():
            parameter.fill_(-1)
        names = fill(layer.shards("model.attn.qkv_proj"), whole, text)
        must(sorted(names) == sorted(whole), f"{text}: named are {sorted(names)}, not {[*whole]}")
        right = []
        for number, (start, size) in enumerate(layer.parts):
            right += [100.0 * number + row for row in range(start, start + size)]
        got = layer.weight[:, 0].tolist()
        must(got == right, f"{text}: rows of the checkpoint {got}, and should be {right}")
        if layer.bias is not None:
            is_right = layer.bias.tolist() == [row + 0.5 for row in right]
            must(is_right, f"{text}: the bias is {layer.bias.tolist()}")


def fill(shards: Iterator[tuple[str, Shard]], whole: dict[str, Tensor], text: str) -> list[str]:
    """Copy each slice to its place. Returns the names."""
    names = []
    for name, shard in shards:
        names.append(name)
        must(name in whole, f"{text}: the checkpoint has {[*whole]}, and no {name}")
        shape = tuple(whole[name].shape)
        must(shard.full_shape == shape, f"{text}: {name} is {shape}, not {shard.full_shape}")
        part = whole[name][shard.slices]
        must(
            part.shape == shard.target.shape,
            f"{text}: the slice of {name} is {list(part.shape)}, its place "
            f"{list(shard.target.shape)}",
        )
        shard.target.copy_(part)
    return names


@SHARDS.behaviour(1, "each matrix has its own name and its own rows, one behind the other")
def stacked() -> None:
    check_shards({"gate_proj": 4, "up_proj": 4}, None, False, 1)
    check_shards({"q_proj": 8, "k_proj": 4, "v_proj": 4}, 2, False, 1)


@SHARDS.behaviour(1, "a rank reads the rows of its part, and writes from its own beginning")
def of_a_rank() -> None:
    check_shards({"q_proj": 8, "k_proj": 4, "v_proj": 4}, 2, False, 2)
    check_shards({"q_proj": 8, "k_proj": 4, "v_proj": 4}, 2, False, 4)


@SHARDS.behaviour(0.5, "biases, where there are any")
def biases() -> None:
    check_shards({"q_proj": 8, "k_proj": 4, "v_proj": 4}, 2, True, 2)


@SHARDS.behaviour(0.5, "any sizes", is_property=True)
def any_sizes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        tp_size, unit = rng.choice([1, 2, 4]), rng.randint(1, 3)
        outputs = {f"{name}_proj": unit * rng.choice([1, 2, 4, 8]) for name in "qkv"}
        check_shards(outputs, unit, rng.random() < 0.5, tp_size, rng.randint(1, 4))


# -- 7.7 --


class Source:
    """A tensor of a file: remembers which slices were read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.num_read = tensor, 0

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        part = self.tensor[slices]
        self.num_read += part.numel()
        return part


class Places(Model):
    """A model that is a list of places."""

    def __init__(self, places: list[tuple[str, Shard]]) -> None:
        super().__init__()
        self.places = places

    def shards(self) -> Iterator[tuple[str, Shard]]:
        yield from self.places


def load(model: Model, files: dict[str, dict[str, Tensor]]) -> dict[str, Source]:
    """Fill a model from files that are in memory."""
    sources = {
        name: {key: Source(each) for key, each in file.items()} for name, file in files.items()
    }
    tensors = {
        key: TensorInfo(Path(name), "F32", tuple(each.shape))
        for name, file in files.items()
        for key, each in file.items()
    }
    with mock.patch.object(loader, "read_slices", lambda file: iter(sources[file.name].items())):
        loader.fill_from_checkpoint(model, tensors, use_tqdm=False)
    return {key: source for file in sources.values() for key, source in file.items()}


@FILL.behaviour(1, "each place gets its slice, from whichever file has it")
def from_all_files() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(3)
    whole = torch.arange(12.0).view(4, 3)
    places = [("a", Shard(a, (4, 3), 0, 2)), ("b", Shard(b, (3,)))]
    load(Places(places), {"1": {"a": whole}, "2": {"b": torch.tensor([7.0, 8.0, 9.0])}})
    must(torch.equal(a, whole[2:]), f"rows 2 and 3 of a should be there: {a.tolist()}")
    must(b.tolist() == [7.0, 8.0, 9.0], f"b is in the second file: {b.tolist()}")


@FILL.behaviour(1, "one tensor may fill several places")
def several_places() -> None:
    targets = [torch.zeros(2) for _ in range(3)]
    load(Places([("norm", Shard(each, (2,))) for each in targets]), {"1": {"norm": torch.ones(2)}})
    must(all(each.all() for each in targets), f"norm has three places: {targets}")


@FILL.behaviour(0.5, "what the model has no place for is passed over")
def not_wanted() -> None:
    a = torch.zeros(2)
    files = {"1": {"lm_head.weight": torch.ones(2, 2), "a": torch.ones(2)}}
    sources = load(Places([("a", Shard(a, (2,)))]), files)
    must(bool(a.all()), "a was not filled")
    must(not sources["lm_head.weight"].num_read, "lm_head.weight was read, and nobody needs it")


@FILL.behaviour(0.5, "only the slice of this rank is read, and takes the type of its place")
def only_the_slice() -> None:
    a = torch.zeros(1, 3, dtype=torch.bfloat16)
    files = {"1": {"a": torch.arange(12.0).view(4, 3)}}
    sources = load(Places([("a", Shard(a, (4, 3), 0, 1))]), files)
    must(a.tolist() == [[3.0, 4.0, 5.0]], f"row 1 should be there, in bfloat16: {a.tolist()}")
    number = sources["a"].num_read
    must(number == 3, f"{number} numbers were read, the slice has 3")


@FILL.behaviour(1, "random models give the logits of transformers", is_property=True)
def fill_like_transformers(seed: int) -> None:
    check_logits(seed)


# -- a whole model --


def make_theirs(model_type: str, seed: int) -> Any:
    """A random model of transformers, 64 wide."""
    settings: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "head_dim": 16,
    }
    if model_type == "llama":
        from transformers.models.llama import LlamaConfig, LlamaForCausalLM

        config: Any = LlamaConfig(**settings, attention_bias=True)
        theirs: Any = LlamaForCausalLM(config)
    else:
        from transformers.models.qwen3 import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(**settings, tie_word_embeddings=True)
        theirs = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in theirs.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator) * (
            0.3 if parameter.dim() == 1 else 0.15
        )
        parameter.data.copy_(noise + ("norm" in name))
    return theirs.eval()


@torch.inference_mode()
def check_logits(seed: int) -> None:
    """A prompt of 13 tokens: the logits of every token, beside those of transformers."""
    for model_type, architecture in (("llama", "LlamaForCausalLM"), ("qwen3", "Qwen3ForCausalLM")):
        theirs = make_theirs(model_type, seed)
        hf = {**theirs.config.to_dict(), "architectures": [architecture]}
        model = build_model(ModelConfig.from_folder(Path("none"), hf), 64, LayerConfig())
        weights = dict(theirs.named_parameters())
        load(model, {"1": weights})
        caches = [
            spec.allocate(4, 4, torch.float32, torch.device("cpu"))
            for spec in model.kv_cache_specs()
        ]
        tokens = torch.randint(0, 96, (13,), generator=torch.Generator().manual_seed(seed))
        metadata = StepMetadata(
            torch.arange(13),
            torch.arange(4, dtype=torch.int32)[None],
            torch.tensor([0, 13], dtype=torch.int32),
            torch.tensor([13], dtype=torch.int32),
        )
        hidden = model(tokens, torch.arange(13), caches, metadata)
        got, right = model.compute_logits(hidden), theirs(tokens[None]).logits[0]
        gap = float((got - right).abs().max() / right.std())
        must(
            gap < 1e-3,
            f"{architecture}, 64 wide, seed {seed}: the logits differ from those of transformers "
            f"by {gap:.2g} of their standard deviation",
        )
