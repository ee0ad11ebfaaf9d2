"""How does each token reach its few experts?

In a mixture of experts the MLP of a layer exists many times over; a router picks, for each token,
the top_k that suit it, and their outputs are added, weighted. A token then costs top_k MLPs,
whatever the number of experts. Three tokens, top_k 2, experts A B C D:

    router   t0 -> A .7  C .3     sorted by expert   A: t0 t2 | B: t1 | C: t0 t1 t2 | D:
             t1 -> C .6  B .4     offsets (ends)     2          3       6             6
             t2 -> C .9  A .1     grouped product    one per group of rows; D costs nothing

`run_experts_grouped` sorts the (token, expert) pairs and multiplies group by group, with either of
two products. (A loop over the experts, which a test compares it with, would be simpler.) The sizes
of the groups are in `offsets`, on the device; the CPU never reads them, because it would wait for
the GPU, and a CUDA graph could not hold the step.

`grouped_matmul_torch` is PyTorch's grouped_mm. On a GPU that is one product only for bfloat16 on
compute capability 9 or 10 (H100, B200); otherwise PyTorch runs a loop that reads the offsets. There
`grouped_matmul_blocks` replaces it: a batched product of blocks, each of rows of one expert, with
as many blocks as the worst case needs.

For tensor parallelism every rank has a part of every expert: some rows of gate and up, some columns
of down, as in decoder.MLP. One sum over ranks follows.

The matrices of all experts are stacked in two layers, gate_up and down, whose linear method may
store them in another way: a chapter has one.

Left out: expert parallelism (each rank has some whole experts), shared experts, and a router with
groups of experts (both in DeepSeek, which runs through the fallback).

vLLM: vllm/model_executor/layers/fused_moe/layer.py, fused_moe.py (V0 and V1). Papers: arXiv
1701.06538 (the idea), 2401.04088 (Mixtral).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.layers import LayerConfig, LinearBase, LinearMethod, silu_and_mul
from nanoserve.models.shards import Matrix, Shard

# (rows [num_rows, in] sorted by expert, weight [experts, out, in], offsets [experts]) -> rows, out
GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]
Weight = TypeVar("Weight", Tensor, "ExpertsLinear")

ALIGNMENT = 16  # bytes: grouped_mm wants every row of a matrix to begin at a multiple of this
BLOCK_BATCH = 8  # blocks in one product of grouped_matmul_blocks: as many experts are copied


@dataclass(frozen=True)
class ExpertsConfig:
    """The choices of a family that concern its experts."""

    num_experts: int
    top_k: int  # experts per token
    intermediate_size: int  # of one expert
    normalize: bool  # True: the weights of the chosen experts are divided by their sum
    # The checkpoint's names of the block and of the three matrices of an expert.
    block_name: str = "mlp"
    gate_name: str = "gate_proj"
    up_name: str = "up_proj"
    down_name: str = "down_proj"

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"num_experts_per_tok is {self.top_k} of {self.num_experts} experts.")


def route(router_logits: Tensor, top_k: int, normalize: bool) -> tuple[Tensor, Tensor]:
    """Logits [num_tokens, num_experts] -> weights (float32) and ids, [num_tokens, top_k] each."""
    weights, expert_ids = router_logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, expert_ids


def run_experts_grouped(
    x: Tensor,
    gate_up: Weight,
    down: Weight,
    weights: Tensor,
    expert_ids: Tensor,
    matmul: Callable[[Tensor, Weight, Tensor], Tensor],
) -> Tensor:
    """Each expert on the tokens that chose it; the CPU reads no number.

    x           [num_tokens, hidden]
    gate_up     [num_experts, 2 * size, hidden]: the expert's gate, then its up matrix
    down        [num_experts, hidden, size]
    weights     [num_tokens, top_k] float32
    expert_ids  [num_tokens, top_k]
    returns     [num_tokens, hidden]
    """
    num_tokens, top_k = expert_ids.shape
    sorted_ids, order = expert_ids.flatten().sort(stable=True)  # [num_tokens * top_k] each
    experts = torch.arange(len(gate_up), device=x.device)
    offsets = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    y = silu_and_mul(matmul(x[order // top_k], gate_up, offsets))
    y = matmul(y, down, offsets) * weights.flatten()[order, None]  # [num_tokens * top_k, hidden]
    unsorted = torch.empty_like(y).index_copy_(0, order, y)
    return unsorted.unflatten(0, (num_tokens, top_k)).sum(dim=1).to(x.dtype)


def grouped_matmul_torch(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """rows [num_rows, in], sorted by expert, times weight [experts, out, in] transposed, each row
    times that of its expert. The rows of expert e end before offsets[e] (int32). Row strides must
    be multiples of ALIGNMENT."""
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)


def grouped_matmul_blocks(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """As grouped_matmul_torch, on any device, for any dtype and shape.

    Every group is cut into blocks of `size` rows; its last block may be partly filled. n groups of
    num_rows rows in all have at most (num_rows + n * (size - 1)) // size blocks. That many blocks
    are multiplied; blocks that do not exist write to a row that is thrown away. 6 rows, groups of
    2, 1 and 3, size 2: blocks [0 1] [2 .] [3 4] [5 .], and (6 + 3) // 2 = 4. With `size` about
    num_rows / experts there are about two blocks for each expert at most.
    """
    (num_rows, _), (num_experts, num_outputs, _) = rows.shape, weight.shape
    size = max(1, num_rows // num_experts)
    num_blocks = (num_rows + min(num_experts, num_rows) * (size - 1)) // size
    starts = F.pad(offsets[:-1], (1, 0))
    blocks_of = (offsets - starts + size - 1) // size  # [num_experts]
    block_ends = blocks_of.cumsum(0)
    blocks = torch.arange(num_blocks, device=rows.device)
    expert = torch.searchsorted(block_ends, blocks, right=True).clamp(max=num_experts - 1)
    first = starts[expert] + (blocks - (block_ends - blocks_of)[expert]) * size
    index = first[:, None] + torch.arange(size, device=rows.device)  # [num_blocks, size]
    index = torch.where(index < offsets[expert, None], index, num_rows)  # beyond: a spare row
    rows = F.pad(rows, (0, 0, 0, 1))
    output = rows.new_empty(num_rows + 1, num_outputs)
    for at in range(0, num_blocks, BLOCK_BATCH):
        some = index[at : at + BLOCK_BATCH]
        weights = weight.index_select(0, expert[at : at + BLOCK_BATCH])
        output[some.flatten()] = (rows[some] @ weights.transpose(1, 2)).flatten(0, 1)
    return output[:num_rows]


def choose_grouped_matmul(device: torch.device, dtype: torch.dtype) -> GroupedMatmul:
    """grouped_mm, except where it makes the CPU wait for the GPU."""
    if device.type == "cuda":
        is_hopper_or_blackwell = torch.cuda.get_device_capability(device)[0] in (9, 10)
        if dtype != torch.bfloat16 or not is_hopper_or_blackwell:
            return grouped_matmul_blocks
    return grouped_matmul_torch


class ExpertsMethod(LinearMethod):
    """How the matrices of all experts are stored and multiplied by: as they stand."""

    def multiply_grouped(
        self, layer: ExpertsLinear, rows: Tensor, offsets: Tensor, matmul: GroupedMatmul
    ) -> Tensor:
        """rows and offsets as in grouped_matmul_torch, times the layer's weight."""
        weight = layer.weight.unflatten(0, (layer.config.num_experts, -1))
        return matmul(rows, weight, offsets)


class ExpertsLinear(LinearBase):
    """One matrix of every expert, or two, one below the other.

    With outputs=("gate_proj", "up_proj"), the rows are: expert 0's gate, its up, expert 1's gate...
    """

    method_cls = ExpertsMethod

    def __init__(
        self,
        config: ExpertsConfig,
        outputs: tuple[str, ...],
        shape: tuple[int, int],
        part: tuple[int, int, int],
        padded: tuple[int, int],
        layer_config: LayerConfig,
    ) -> None:
        """`shape`: of a matrix in the checkpoint. `part`: this rank has `size` rows (dim 0) or
        columns (dim 1) from `start` on: (dim, start, size). `padded`: shape of a matrix here."""
        num_matrices = config.num_experts * len(outputs)
        layer_config = layer_config.at(f"experts.0.{outputs[0]}")
        super().__init__(num_matrices * padded[0], padded[1], layer_config)
        self.config, self.outputs, self.shape, self.part = config, outputs, shape, part
        self.num_rows = padded[0]
        if part[2] != padded[part[0]]:
            self.weight.zero_()  # the padding stays so

    def __len__(self) -> int:
        return self.config.num_experts

    def matrices(self, name: str) -> Iterator[Matrix]:
        """Three for each expert, in two layers: ...mlp.experts.7.gate_proj and so on."""
        block = f"{name.rsplit('.', 2)[0]}.{self.config.block_name}"
        dim, start, size = self.part
        first = 0
        for number in range(self.config.num_experts):
            for output in self.outputs:
                rows = slice(first, first + (size if dim == 0 else self.shape[0]))
                columns = slice(0, self.shape[1] if dim == 0 else size)
                first += self.num_rows
                name = f"{block}.experts.{number}.{output}"
                yield Matrix(name, self.shape, rows, dim, start, columns)


class MixtureOfExperts(nn.Module):
    """A router and its experts; replaces an MLP."""

    def __init__(self, hidden_size: int, config: ExpertsConfig, layer_config: LayerConfig) -> None:
        super().__init__()
        self.config = config
        self.parallel = layer_config.parallel
        full, hidden = config.intermediate_size, hidden_size
        start, size = layer_config.parallel.shard_range(full, "intermediate size of an expert")
        per_row = ALIGNMENT // layer_config.dtype.itemsize
        if hidden % per_row:
            raise ValueError(f"hidden_size is {hidden}; with experts: a multiple of {per_row}.")
        # A part of any size is padded with rows and columns of zeros: silu(0) * 0 = 0 adds nothing.
        padded = -(-size // per_row) * per_row
        self.router = layer_config.empty(config.num_experts, hidden)  # the same on every rank
        names, part = (config.gate_name, config.up_name), (0, start, size)
        sizes = (full, hidden), part, (padded, hidden)
        self.gate_up = ExpertsLinear(config, names, *sizes, layer_config)
        sizes = (hidden, full), (1, start, size), (hidden, padded)
        self.down = ExpertsLinear(config, (config.down_name,), *sizes, layer_config)
        if padded != size and type(self.down.linear_method) is not ExpertsMethod:
            raise ValueError(
                f"each expert has {size} of {full} rows on each rank, which must be a multiple of "
                f"{per_row} if it is quantized. Choose another tensor_parallel_size."
            )
        self.matmul = choose_grouped_matmul(layer_config.device, layer_config.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden] -> [num_tokens, hidden]."""
        router_logits = F.linear(x, self.router)
        chosen = route(router_logits, self.config.top_k, self.config.normalize)
        output = run_experts_grouped(x, self.gate_up, self.down, *chosen, self.multiply_grouped)
        return self.parallel.all_reduce(output)

    def multiply_grouped(self, rows: Tensor, layer: ExpertsLinear, offsets: Tensor) -> Tensor:
        """rows [num_rows, in], sorted by expert, times the layer's matrices, transposed."""
        method = layer.linear_method
        assert isinstance(method, ExpertsMethod), f"{type(method).__name__} is not for experts"
        return method.multiply_grouped(layer, rows, offsets, self.matmul)

    def shards(self, name: str) -> Iterator[tuple[str, Shard]]:
        """Of the router; the experts have their own."""
        block = f"{name.rpartition('.')[0]}.{self.config.block_name}"
        yield f"{block}.gate.weight", Shard(self.router, tuple(self.router.shape))
