"""How do a format's tensors become the codes of one layer?

Each format cuts a matrix into tensors in its own way: codes packed along inputs or along outputs,
scales with the outputs first or last, zeros that are packed, too. A QuantizedLinearMethod gives a
layer an empty QuantizedWeight, and says of each tensor of the checkpoint which part of it belongs
here, and how its numbers become codes, scales or zeros. So every tensor is converted when it is
read, and no second form of the weight is kept:

    gptq     k_proj.qweight int32 [inputs / 8, outputs]      rows 64..95 of the codes of qkv_proj's
    awq      k_proj.qweight int32 [inputs, outputs / 8]  ->  QuantizedWeight, uint8
    online   k_proj.weight  float [outputs, inputs]          [outputs, inputs / 2]

A cut for tensor parallelism must not divide what belongs together: outputs that share an int32,
inputs that share a scale. Such a cut is an error that says the sizes.

Act-order: a format may say the group of each input in a list (g_idx). When the weight is complete,
its columns are sorted by group, and from then on the inputs are taken in that order.

vLLM: LinearMethodBase in vllm/model_executor/layers/linear.py, vllm/model_executor/parameter.py (V0
and V1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanoserve.kernels.quantized import QuantizedWeight, pack_int4, unpack_int4
from nanoserve.layers import LayerConfig, LinearBase, RowParallelLinear
from nanoserve.models.moe import ExpertsLinear, ExpertsMethod, GroupedMatmul
from nanoserve.models.shards import Matrix, Shard

Shards = Iterator[tuple[str, Shard]]
Load = Callable[[Tensor, Tensor], object]  # (target, part of a checkpoint tensor)
DTYPES = {"int4": torch.uint8, "int8": torch.int8, "fp8": torch.float8_e4m3fn}  # of codes
# Types of tensors, as safetensors calls them.
SCALES, INT32, INT8, FP8 = ("F32", "F16", "BF16"), ("I32",), ("I8",), ("F8_E4M3",)


@dataclass(frozen=True)
class QuantizedLinearMethod(ExpertsMethod):
    """How layers of one format are stored. A subclass says in `shards` what it reads. Equal methods
    mean layers that are quantized in the same way."""

    kind: str  # of codes: int4, int8 or fp8
    group_size: int = -1  # inputs that share a scale; -1: all
    has_zeros: bool = False
    has_order: bool = False  # act-order
    quantizes_inputs: bool = False  # FP8 products are meant, where there are any
    has_input_scale: bool = False  # then: the scale of all inputs is in the checkpoint

    def size_of_group(self, num_inputs: int) -> int:
        """Inputs that share a scale, in a layer with so many; -1: all."""
        return self.group_size

    def create_weights(
        self, layer: LinearBase, output_size: int, input_size: int, layer_config: LayerConfig
    ) -> None:
        """Raises ValueError if this rank's inputs are no whole groups."""
        ranks, group_size = layer_config.parallel.tp_size, self.size_of_group(input_size)
        group_size = input_size if group_size == -1 else group_size
        what = f"{layer_config.prefix}, with {input_size} inputs on each of {ranks} ranks"
        if input_size % group_size or (self.kind == "int4" and input_size % 2):
            raise ValueError(f"{what}, has no whole groups of {group_size}. Use other ranks.")
        is_cut = ranks > 1 and isinstance(layer, RowParallelLinear)
        if self.has_order and (is_cut or isinstance(layer, ExpertsLinear)):
            raise ValueError(f"{what}: act-order (desc_act) is for whole inputs, and no experts.")
        zeros = partial(torch.zeros, device=layer_config.device)
        num_columns = input_size // 2 if self.kind == "int4" else input_size
        per_group = (output_size, input_size // group_size)
        layer.weight = layer_config.empty(0, 0)  # nobody's; the weight is this:
        layer.quantized_weight = QuantizedWeight(
            self.kind,
            codes=zeros(output_size, num_columns, dtype=DTYPES[self.kind]),
            scales=zeros(per_group, dtype=torch.float32),
            zeros=zeros(per_group, dtype=torch.int16) if self.has_zeros else None,
            order=zeros(input_size, dtype=torch.int64) if self.has_order else None,
            input_scale=zeros(1, dtype=torch.float32) if self.has_input_scale else None,
            quantizes_inputs=self.quantizes_inputs,
        )

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        weight = weight_of(layer)
        if weight.order is not None:
            codes = unpack_int4(weight.codes) if self.kind == "int4" else weight.codes
            codes = codes.index_select(1, weight.order)
            weight.codes = pack_int4(codes) if self.kind == "int4" else codes
        if isinstance(layer, ExpertsLinear):
            weight.num_experts = layer.config.num_experts
        weight.prepare()

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        return weight_of(layer).multiply(x, bias)

    def multiply_grouped(
        self, layer: ExpertsLinear, rows: Tensor, offsets: Tensor, matmul: GroupedMatmul
    ) -> Tensor:
        return weight_of(layer).multiply_grouped(rows, offsets, matmul)

    def shard(
        self,
        layer: LinearBase,
        matrix: Matrix,
        target: Tensor,
        dtypes: tuple[str, ...],
        load: Load = Tensor.copy_,
        read: Callable[[Tensor], Tensor] = lambda values: values,
        units: tuple[int, int] = (1, 1),
        packed: int | None = None,
        is_transposed: bool = False,
    ) -> Shard:
        """This rank's part of a tensor of the checkpoint, which has [outputs / units[0], inputs /
        units[1]] numbers (transposed: inputs first). A unit of -1 stands for all. A unit shares a
        number, or along the axis `packed` it lies side by side in one. `read` comes before `load`.

        Raises ValueError if a unit is cut."""
        each = [full if u == -1 else u for full, u in zip(matrix.shape, units, strict=True)]
        shape = [-(-full // unit) for full, unit in zip(matrix.shape, each, strict=True)]
        axis, start = matrix.dim, matrix.start
        unit, full = each[axis], matrix.shape[axis]
        size = (matrix.rows.stop - matrix.rows.start, weight_of(layer).num_inputs)[axis]
        if shape[axis] == 1 and axis != packed:
            start, size = 0, unit  # one for all
        elif start % unit or (size % unit and start + size < full):
            what = f"{size} of {full} {('outputs', 'inputs')[axis]}, from number {start} on"
            raise ValueError(f"{matrix.name}: a rank has {what}, but {unit} share a number.")
        dim = 1 - axis if is_transposed else axis
        shape = shape[::-1] if is_transposed else shape
        loader = lambda target, values: load(target, read(values))  # noqa: E731
        return Shard(target, tuple(shape), dim, start // unit, -(-size // unit), dtypes, loader)


def weight_of(layer: LinearBase) -> QuantizedWeight:
    """What a quantized layer has in place of `weight`."""
    return layer.quantized_weight  # type: ignore[return-value]


def as_bytes(values: Tensor) -> Tensor:
    """int32 [n, m] -> uint8 [n, 4 * m], the lowest bits first."""
    # Not contiguous(), which leaves a single column with the strides that it has.
    return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def load_codes(target: Tensor, values: Tensor) -> None:
    """int32 [outputs, inputs / 8 or / 4], the first input in the lowest bits -> codes. Codes of 8
    bits count from 0 there, from -128 in the target."""
    numbers = as_bytes(values)[:, : target.shape[1]]
    is_int8 = target.dtype == torch.int8
    target.copy_((numbers ^ 128).view(torch.int8) if is_int8 else numbers)


def load_zeros(target: Tensor, values: Tensor, kind: str) -> None:
    """int32 [groups, outputs / 8 or / 4], the first output in the lowest bits -> [outputs, groups],
    from 0 (int4) or from -128 (int8) on."""
    numbers = unpack_int4(as_bytes(values)) if kind == "int4" else as_bytes(values)
    numbers = numbers[:, : len(target)].t().to(torch.int16)
    target.copy_(numbers if kind == "int4" else numbers - 128)


def skip(target: Tensor, values: Tensor) -> None:
    """For a tensor that is not needed here."""


def optional(
    name: str, matrix: Matrix, shape: tuple[int, ...] = (), load: Load = skip
) -> tuple[str, Shard]:
    """A tensor that a checkpoint may have, and that fills nothing."""
    dtypes, empty = ("F32", "F16", "BF16", "I8", "I32", "I64"), torch.empty(0)
    place = Shard(empty, shape, 0, 0, sum(shape[:1]), dtypes, load, is_optional=True)
    return f"{matrix.name}.{name}", place
