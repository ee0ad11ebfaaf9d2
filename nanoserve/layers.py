"""What is a transformer made of, and where is it cut for tensor parallelism?

Each layer holds its rank's part of its weights and says, through `shards`, which part of which
checkpoint tensor fills them. Matrices that read the same input are stacked into one (q, k and v;
gate and up): one large product beats three small ones. Two ranks, 4 query heads, 2 key heads:

    checkpoint            rank 0's qkv_proj          rank 1's qkv_proj
    q_proj [q0 q1 q2 q3]  [q0 q1 | k0 | v0]          [q2 q3 | k1 | v1]
    k_proj [k0 k1]        column parallel: each rank has some output rows, and whole heads;
    v_proj [v0 v1]        o_proj is row parallel: each rank takes its heads' inputs, and the ranks'
                          partial results are summed.

Linear layers take the step's metadata beside their input. They ignore it; what replaces them
(LoRA picks an adapter per token, quantization may pick a kernel by batch) will not.

vLLM: vllm/model_executor/layers/: linear.py, layernorm.py, activation.py, rotary_embedding,
vocab_parallel_embedding.py (V0 and V1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.attention import TORCH_BACKEND, AttentionBackend, StepMetadata
from nanoserve.parallel import ParallelState


@dataclass(frozen=True)
class LayerConfig:
    """What every layer's constructor is told, so that nothing is process-wide."""

    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    parallel: ParallelState = field(default_factory=ParallelState)
    attention: AttentionBackend = TORCH_BACKEND

    def empty(self, *shape: int) -> nn.Parameter:
        """An unfilled parameter."""
        tensor = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(tensor, requires_grad=False)


class Shard(NamedTuple):
    """A place to be filled from a checkpoint tensor: its slice [start, start + size) along dim."""

    target: Tensor  # a view of the parameter
    full_shape: tuple[int, ...]  # of the tensor in the checkpoint
    dim: int = 0
    start: int = 0

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to take of the checkpoint tensor."""
        whole = [slice(None)] * len(self.full_shape)
        whole[self.dim] = slice(self.start, self.start + self.target.shape[self.dim])
        return tuple(whole)


class Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32; what the
    weight is, a subclass says in `pack`.

    Out of place: the residual stream is also an input, and must survive. arXiv 1910.07467.

    torch's rms_norm is a dozen calls on a CPU. With the length |x| of a row it is four: sqrt(mean +
    eps) is sqrt(|x|^2 + size * eps) / sqrt(size), a right triangle's hypotenuse, and sqrt(size) can
    be put into the weight beforehand.
    """

    def __init__(self, size: int, eps: float, layer_config: LayerConfig) -> None:
        super().__init__()
        self.size, self.eps = size, eps
        self.is_by_length = (
            layer_config.device.type == "cpu" and layer_config.dtype == torch.float32
        )
        side = math.sqrt(size * eps)
        self.other_side = torch.tensor(side, dtype=layer_config.dtype, device=layer_config.device)
        self.packed: Tensor | None = None

    def pack(self) -> None:
        """The weights are filled, and will not be changed any more: call set_weight. (Or else at
        the first call.)"""
        raise NotImplementedError

    def set_weight(self, weight: Tensor) -> None:
        """[size], or what broadcasts to x."""
        weight = weight.detach()
        self.packed = weight * math.sqrt(self.size) if self.is_by_length else weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size]."""
        if self.packed is None:
            self.pack()
        assert self.packed is not None, "pack() calls set_weight"
        if self.is_by_length:
            length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            return (x / length.hypot_(self.other_side)).mul_(self.packed)
        return self.packed * F.rms_norm(x.float(), (self.size,), eps=self.eps).to(x.dtype)


class RMSNorm(Norm):
    """With a weight [size]."""

    def __init__(self, size: int, eps: float, layer_config: LayerConfig) -> None:
        super().__init__(size, eps, layer_config)
        self.weight = layer_config.empty(size)

    def pack(self) -> None:
        self.set_weight(self.weight)

    def shards(self, name: str) -> Iterator[tuple[str, Shard]]:
        yield f"{name}.weight", Shard(self.weight, tuple(self.weight.shape))


class QKNorm(Norm):
    """On each head of queries and keys, which stand side by side: one call for both, of
    [num_tokens, num_heads + num_kv_heads, head_dim]."""

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        layer_config: LayerConfig,
    ) -> None:
        super().__init__(head_dim, eps, layer_config)
        self.q_weight, self.k_weight = layer_config.empty(head_dim), layer_config.empty(head_dim)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads

    def pack(self) -> None:
        """A row for each head."""
        queries = self.q_weight.expand(self.num_heads, -1)
        keys = self.k_weight.expand(self.num_kv_heads, -1)
        self.set_weight(torch.cat((queries, keys)))

    def shards(self, name: str) -> Iterator[tuple[str, Shard]]:
        parent, _, _ = name.rpartition(".")
        for norm, weight in (("q_norm", self.q_weight), ("k_norm", self.k_weight)):
            yield f"{parent}.{norm}.weight", Shard(weight, tuple(weight.shape))


PACKED_FOR_ROWS = 256  # the layout that was fastest from 2 rows to 1,024
PACKED_SIZE = 2**18  # numbers; smaller matrices are multiplied sooner than oneDNN is called


class Packable(nn.Module):
    """A layer that multiplies by its `weight` [out, in]."""

    weight: nn.Parameter
    packed: Tensor | None = None
    is_multiplied_by = True  # False: an embedding that is nobody's head
    is_looked_up = False  # True: an embedding

    def pack(self) -> None:
        """On a CPU, lay the weight out in memory as it is multiplied fastest.

        A large one in the blocks in which oneDNN wants it: on a 2-core AVX-512 machine products of
        8 to 64 rows then take about half the time. A small one transposed: its numbers are read in
        longer runs (one row of 128 by [768, 128], not in the cache: 30 microseconds instead of 57).

        To be called when the weight is filled, and not to be changed any more: a large `weight` is
        empty afterwards, so that it takes its memory once (an embedding is looked up, and stays).
        """
        weight = self.weight.detach()
        if weight.device.type != "cpu" or weight.dtype != torch.float32:
            return
        if weight.numel() < PACKED_SIZE:
            if not self.is_looked_up:
                self.weight.data = weight.t().contiguous().t()
        elif self.is_multiplied_by and torch.backends.mkldnn.is_available():
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
            if not self.is_looked_up:
                self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [num_rows, in] -> x W^T + b, [num_rows, out]."""
        if self.packed is None:
            return F.linear(x, self.weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")


class ColumnParallelLinear(Packable):
    """y = x W^T + b with the rows of W (the outputs) divided among ranks.

    Several checkpoint matrices can be stacked: outputs={"q_proj": 64, "k_proj": 32, "v_proj": 32}
    reads three and gives [num_tokens, 128 / world_size], to be split by `sizes`. With `unit` (the
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
        super().__init__()
        self.input_size = input_size
        self.outputs = dict(outputs)
        self.parts = [
            layer_config.parallel.shard_range(size, name, unit) for name, size in outputs.items()
        ]
        self.sizes = [size for _, size in self.parts]
        self.weight = layer_config.empty(sum(self.sizes), input_size)
        self.bias = layer_config.empty(sum(self.sizes)) if bias else None

    def forward(self, x: Tensor, metadata: StepMetadata | None = None) -> Tensor:
        """[num_tokens, input_size] -> [num_tokens, sum(sizes)]."""
        return self.product(x, self.bias)

    def shards(self, name: str) -> Iterator[tuple[str, Shard]]:
        """Names each matrix beside this layer: ...self_attn.qkv_proj -> ...self_attn.q_proj."""
        parent, _, _ = name.rpartition(".")
        row = 0
        for (output, full), (start, size) in zip(self.outputs.items(), self.parts, strict=True):
            rows = slice(row, row + size)
            row += size
            shape = (full, self.input_size)
            yield f"{parent}.{output}.weight", Shard(self.weight[rows], shape, 0, start)
            if self.bias is not None:
                yield f"{parent}.{output}.bias", Shard(self.bias[rows], (full,), 0, start)


class RowParallelLinear(Packable):
    """y = x W^T + b with the columns of W (the inputs) divided among ranks, and y summed."""

    def __init__(
        self, input_size: int, output_size: int, *, bias: bool, layer_config: LayerConfig
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.parallel = layer_config.parallel
        self.start, size = layer_config.parallel.shard_range(
            input_size, "input of a row-parallel layer"
        )
        self.weight = layer_config.empty(output_size, size)
        self.bias = layer_config.empty(output_size) if bias else None

    def forward(self, x: Tensor, metadata: StepMetadata | None = None) -> Tensor:
        """[num_tokens, input_size / world_size] -> [num_tokens, output_size]; b is added once."""
        bias = self.bias if self.parallel.rank == 0 else None
        return self.parallel.all_reduce(self.product(x, bias))

    def shards(self, name: str) -> Iterator[tuple[str, Shard]]:
        shape = (self.weight.shape[0], self.input_size)
        yield f"{name}.weight", Shard(self.weight, shape, 1, self.start)
        if self.bias is not None:
            yield f"{name}.bias", Shard(self.bias, tuple(self.bias.shape))


class VocabParallelEmbedding(Packable):
    """Token id -> vector, and vector -> logits, with the vocabulary divided among ranks.

    One class for both ends: models that tie them use one object twice. All ranks hold equally many
    rows; if the vocabulary does not divide, the last ones are padded with zeros, whose logits are
    cut off. 10 tokens on 4 ranks:

        rank 0: t0 t1 t2    rank 1: t3 t4 t5    rank 2: t6 t7 t8    rank 3: t9 -- --
    """

    is_looked_up = True

    def __init__(self, vocab_size: int, hidden_size: int, layer_config: LayerConfig) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.parallel = layer_config.parallel
        size = -(-vocab_size // layer_config.parallel.world_size)
        self.start = min(layer_config.parallel.rank * size, vocab_size)
        self.num_tokens = min(size, vocab_size - self.start)  # without padding
        self.weight = layer_config.empty(size, hidden_size)
        self.weight[self.num_tokens :].zero_()

    def forward(self, input_ids: Tensor) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]; other ranks' ids count as zero vectors."""
        if self.parallel.world_size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.start
        is_foreign = (local < 0) | (local >= self.num_tokens)
        vectors = F.embedding(local.masked_fill(is_foreign, 0), self.weight)
        return self.parallel.all_reduce(vectors.masked_fill(is_foreign[:, None], 0))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size] on rank 0, which samples; on the others
        [num_rows, 0]."""
        return self.parallel.gather(self.product(hidden))[:, : self.vocab_size]

    def shards(self, name: str) -> Iterator[tuple[str, Shard]]:
        shape = (self.vocab_size, self.weight.shape[1])
        yield f"{name}.weight", Shard(self.weight[: self.num_tokens], shape, 0, self.start)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[num_tokens, 2 * size] -> silu(first half) * second half, [num_tokens, size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding (RoFormer, arXiv 2104.09864) from a table of all positions.

    Dimension i of a head is paired with i + head_dim / 2, and the pair is turned by the angle
    position * frequencies[i] (models/rope.py knows the frequencies of each rope type).
    """

    def __init__(
        self, frequencies: Tensor, scaling: float, max_model_len: int, layer_config: LayerConfig
    ) -> None:
        """frequencies [rotary_dim / 2] in radians a token; `scaling` multiplies cos and sin."""
        super().__init__()
        angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * scaling, angles.sin() * scaling
        table = torch.cat((cos, cos, -sin, sin), dim=-1)  # [max_model_len, 2 * rotary_dim]
        self.table = table.to(device=layer_config.device, dtype=layer_config.dtype)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[num_tokens] -> cos and signed sin, [num_tokens, 1, rotary_dim] each: see apply_rope."""
        cos, sin = self.table.index_select(0, positions)[:, None].chunk(2, dim=-1)
        return cos, sin


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first cos.shape[-1] dimensions of x [num_tokens, num_heads, head_dim].

    The pair (a, b) becomes (a cos - b sin, b cos + a sin). With the halves exchanged by a roll, and
    the sign of the first half in `sin`, that is one product and one product-and-sum.
    """
    rotary_dim = cos.shape[-1]
    if rotary_dim < x.shape[-1]:
        turned = apply_rope(x[..., :rotary_dim], cos, sin)
        return torch.cat((turned, x[..., rotary_dim:]), dim=-1)
    return (x * cos).addcmul_(x.roll(rotary_dim // 2, dims=-1), sin)
