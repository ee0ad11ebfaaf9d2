"""What is a transformer made of, and where is it cut for tensor parallelism?

Each layer holds the part of its weights that belongs to its rank, and says through `shards` which
part of which checkpoint tensor fills it (models/shards.py). Matrices that read the same input are
stacked into one (q, k and v; gate and up), because one large product is faster than three small
ones. Two ranks, 4 query heads, 2 key heads:

    checkpoint            rank 0's qkv_proj          rank 1's qkv_proj
    q_proj [q0 q1 q2 q3]  [q0 q1 | k0 | v0]          [q2 q3 | k1 | v1]
    k_proj [k0 k1]        column parallel: each rank has some output rows, and whole heads;
    v_proj [v0 v1]        o_proj is row parallel: each rank multiplies the outputs of its own
                          heads, and the partial results of all ranks are summed.

Layers say what is computed, and which matrices of the checkpoint they are made of. How a weight is
stored, filled and multiplied is up to a `LinearMethod`. All is plain PyTorch, and runs as it stands
for a small model; kernels/selector.py says what takes its place in a large one.

vLLM: vllm/model_executor/layers/: linear.py, layernorm.py, activation.py, rotary_embedding,
vocab_parallel_embedding.py (V0 and V1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.attention import AttentionBackend
from nanoserve.distributed.parallel import ParallelState
from nanoserve.models.shards import Matrix, Shard

Rope = tuple[Tensor, Tensor]  # cos and signed sin of each token, as RotaryEmbedding gives them


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[num_tokens, 2 * size] -> silu(first half) * second half, [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


class LinearMethod:
    """How a layer stores its weight [out, in] and multiplies by it: this one, as it stands.

    The method itself keeps nothing: what it needs of a layer are attributes of that layer. A
    subclass may pack the weight, quantize it, or add an adapter.
    """

    def create_weights(
        self, layer: LinearBase, output_size: int, input_size: int, layer_config: LayerConfig
    ) -> None:
        """Give the layer its unfilled parameters; sizes are those of this rank."""
        layer.weight = layer_config.empty(output_size, input_size)

    def shards(self, layer: LinearBase, matrix: Matrix) -> Iterator[tuple[str, Shard]]:
        """What the checkpoint has of one of the layer's matrices, and where it goes."""
        target = layer.weight[matrix.rows, matrix.columns]
        yield f"{matrix.name}.weight", Shard(target, matrix.shape, matrix.dim, matrix.start)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Called once, when the weights are filled and will not change any more."""

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [num_tokens, in] -> x W^T + b, [num_tokens, out]."""
        return F.linear(x, layer.weight, bias)


@dataclass(frozen=True)
class LayerConfig:
    """What every layer's constructor gets, so that nothing is process-wide."""

    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    parallel: ParallelState = ParallelState()
    attention: AttentionBackend = AttentionBackend()
    # (layer, its name in the checkpoint) -> how it stores its weight
    linear_method: Callable[[LinearBase, str], LinearMethod] = lambda layer, _: layer.method_cls()
    prefix: str = ""  # name in the checkpoint of the module to be built: "model.layers.0.mlp"

    def at(self, name: str) -> LayerConfig:
        """The same, for a module of this name inside the one to be built."""
        return replace(self, prefix=f"{self.prefix}.{name}".lstrip("."))

    def empty(self, *shape: int) -> nn.Parameter:
        """An unfilled parameter."""
        tensor = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, layer_config: LayerConfig) -> None:
        super().__init__()
        self.weight, self.eps = layer_config.empty(size), eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], the mean taken in float32. Not in place: the residual stream
        needs x again."""
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight

    def shards(self, name: str) -> Iterator[tuple[str, Shard]]:
        yield f"{name}.weight", Shard(self.weight, tuple(self.weight.shape))


class LinearBase(nn.Module):
    """A layer with a weight [out, in] and the linear method that multiplies by it."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    method_cls: type[LinearMethod] = LinearMethod  # if a LayerConfig says nothing else
    is_embedding = False  # True: rows of the weight are looked up
    is_lm_head = False  # True: an embedding that is multiplied by, too

    def __init__(self, output_size: int, input_size: int, layer_config: LayerConfig) -> None:
        super().__init__()
        self.bias = None
        self.linear_method = layer_config.linear_method(self, layer_config.prefix)
        self.linear_method.create_weights(self, output_size, input_size, layer_config)

    def matrices(self, name: str) -> Iterator[Matrix]:
        """The checkpoint's matrices in a layer of this name, from the first row to the last."""
        raise NotImplementedError

    def shards(self, name: str) -> Iterator[tuple[str, Shard]]:
        for matrix in self.matrices(name):
            yield from self.linear_method.shards(self, matrix)
            if self.bias is not None:
                start = matrix.start if matrix.dim == 0 else 0
                target = self.bias[matrix.rows]
                yield f"{matrix.name}.bias", Shard(target, matrix.shape[:1], 0, start)


class ColumnParallelLinear(LinearBase):
    """y = x W^T + b with the rows of W (the outputs) divided among ranks.

    Several checkpoint matrices can be stacked: outputs={"q_proj": 64, "k_proj": 32, "v_proj": 32}
    reads three and gives [num_tokens, 128 / tp_size], to be split by `sizes`. With `unit` (the
    size of a head) no unit is cut, and if there are fewer than ranks, some hold the same one.
    """

    def __init__(
        self,
        input_size: int,
        outputs: Mapping[str, int],
        *,
        bias: bool,
        layer_config: LayerConfig,
        unit: int | None = None,
    ) -> None:
        shard_range = layer_config.parallel.shard_range
        parts = [shard_range(size, name, unit) for name, size in outputs.items()]
        sizes = [size for _, size in parts]
        super().__init__(sum(sizes), input_size, layer_config)
        self.input_size, self.outputs = input_size, dict(outputs)
        self.parts, self.sizes = parts, sizes
        self.bias = layer_config.empty(sum(sizes)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, input_size] -> [num_tokens, sum(sizes)]."""
        return self.linear_method.apply(self, x, self.bias)

    def matrices(self, name: str) -> Iterator[Matrix]:
        """Named beside this layer: ...self_attn.qkv_proj -> ...self_attn.q_proj."""
        parent, _, _ = name.rpartition(".")
        offset = 0
        for (output, full), (start, size) in zip(self.outputs.items(), self.parts, strict=True):
            rows = slice(offset, offset + size)
            offset += size
            yield Matrix(f"{parent}.{output}", (full, self.input_size), rows, 0, start)


class RowParallelLinear(LinearBase):
    """y = x W^T + b with the columns of W (the inputs) divided among ranks, and y summed."""

    def __init__(
        self, input_size: int, output_size: int, *, bias: bool, layer_config: LayerConfig
    ) -> None:
        parallel = layer_config.parallel
        start, size = parallel.shard_range(input_size, "input of a row-parallel layer")
        super().__init__(output_size, size, layer_config)
        self.parallel, self.start = parallel, start
        self.input_size, self.output_size = input_size, output_size
        self.bias = layer_config.empty(output_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, input_size / tp_size] -> [num_tokens, output_size]; b is added once."""
        bias = self.bias if self.parallel.tp_rank == 0 else None
        y = self.linear_method.apply(self, x, bias)
        return self.parallel.all_reduce(y) if self.parallel.tp_size > 1 else y

    def matrices(self, name: str) -> Iterator[Matrix]:
        """One, of the layer's own name: all of its rows, and this rank's columns."""
        rows = slice(0, self.output_size)
        yield Matrix(name, (self.output_size, self.input_size), rows, 1, self.start)


class VocabParallelEmbedding(LinearBase):
    """Token id -> vector, and vector -> logits, with the vocabulary divided among ranks.

    One class for both ends: models that tie them use one object twice. All ranks hold equally many
    rows; if the vocabulary does not divide, the last ones are padded with zeros, whose logits are
    cut off. 10 tokens on 4 ranks:

        rank 0: t0 t1 t2    rank 1: t3 t4 t5    rank 2: t6 t7 t8    rank 3: t9 -- --
    """

    is_embedding = True
    is_lm_head = True

    def __init__(self, vocab_size: int, hidden_size: int, layer_config: LayerConfig) -> None:
        size = -(-vocab_size // layer_config.parallel.tp_size)
        super().__init__(size, hidden_size, layer_config)
        self.parallel = layer_config.parallel
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.start = min(self.parallel.tp_rank * size, vocab_size)
        self.num_tokens = min(size, vocab_size - self.start)  # without padding
        self.weight[self.num_tokens :].zero_()

    def forward(self, input_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]; ids of other ranks count as zero vectors."""
        if self.parallel.tp_size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.start
        is_foreign = (local < 0) | (local >= self.num_tokens)
        vectors = F.embedding(local.masked_fill(is_foreign, 0), self.weight)
        return self.parallel.all_reduce(vectors.masked_fill(is_foreign[:, None], 0))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] on rank 0, which samples; on the others
        [num_rows, 0]."""
        logits = self.linear_method.apply(self, hidden, None)
        if self.parallel.tp_size > 1:
            logits = self.parallel.gather(logits)
        return logits[:, : self.vocab_size]

    def matrices(self, name: str) -> Iterator[Matrix]:
        rows = slice(0, self.num_tokens)
        yield Matrix(name, (self.vocab_size, self.hidden_size), rows, 0, self.start)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (RoFormer, arXiv 2104.09864) from a table of all positions.

    Dimension i of a head is paired with i + head_dim / 2, and the pair is turned by the angle
    position * frequencies[i] (models/rope.py knows the frequencies of each rope type).
    """

    def __init__(
        self, frequencies: Tensor, scaling: float, max_model_len: int, layer_config: LayerConfig
    ) -> None:
        """frequencies [rotary_dim / 2] in radians a token; `scaling` multiplies cos and sin.

        `table` has a row for each position: cos of both halves, sin of both (minus in the first).
        """
        super().__init__()
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        table = torch.cat((cos, cos, -sin, sin), dim=-1)  # [max_model_len, 2 * rotary_dim]
        self.table = table.to(device=layer_config.device, dtype=layer_config.dtype)

    def forward(self, positions: Tensor) -> Rope:
        """[num_tokens] -> cos and signed sin, [num_tokens, 1, rotary_dim] each: see apply_rope."""
        cos, sin = self.table.index_select(0, positions)[:, None].chunk(2, dim=-1)
        return cos, sin


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first cos.shape[-1] dimensions of x [num_tokens, num_heads, head_dim].

    The pair (a, b) becomes (a cos - b sin, b cos + a sin). A roll exchanges the two halves, `sin`
    has the sign of the first half: so one product and one product-and-sum do.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        turned = apply_rope(x[..., :rotary_dim], cos, sin)
        return torch.cat((turned, x[..., rotary_dim:]), dim=-1)
    return (x * cos).addcmul_(x.roll(rotary_dim // 2, dims=-1), sin)
