"""What is in a GPTQ checkpoint?

For each matrix [outputs, inputs], with 8 codes of 4 bits (or 4 of 8 bits) in an int32:

    qweight  int32 [inputs / 8, outputs]    codes, packed along the inputs
    qzeros   int32 [groups, outputs / 8]    zeros, packed along the outputs
    scales   float [groups, outputs]        weight = (code - zero) * scale
    g_idx    int32 [inputs]                 the group of each input

In the first version of the format ("gptq"), a zero is stored less 1. "gptq_v2" stores it as it is.
With desc_act (act-order), inputs were quantized in the order of their importance, and groups are
made of inputs that were neighbours in that order.

`dynamic` holds rules for layers by name: "-:regex" leaves them in floating point, "+:regex" gives
them other bits or groups.

Left out: 2 and 3 bits.

vLLM: vllm/model_executor/layers/quantization/gptq.py (V0), auto_gptq.py, utils/gptq_utils.py (V1,
which has dropped act-order). The format: GPTQModel, gptqmodel/nn_modules/qlinear/torch.py. Paper:
arXiv 2210.17323.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanoserve.chapters.quantization import linear
from nanoserve.chapters.quantization.base_config import QuantizationConfig, Section, check
from nanoserve.layers import LinearBase
from nanoserve.models.shards import Matrix, Shard


@dataclass(frozen=True)
class GPTQLinearMethod(linear.QuantizedLinearMethod):
    is_v1: bool = True

    def shards(self, layer: LinearBase, matrix: Matrix) -> linear.Shards:
        weight, rows, name = linear.weight_of(layer), matrix.rows, matrix.name
        per_int32, ones = (8, 0x11111111) if self.kind == "int4" else (4, 0x01010101)

        shard = partial(self.shard, layer, matrix, is_transposed=True)
        load, units, target = linear.load_codes, (1, per_int32), weight.codes[rows]
        yield f"{name}.qweight", shard(target, linear.INT32, load, Tensor.t, units, 1)
        # The tools subtract 1 from whole int32 numbers: adding to them undoes a borrow, too.
        add, units = ones * self.is_v1, (per_int32, self.group_size)
        load, target = partial(linear.load_zeros, kind=self.kind), weight.zeros[rows]
        yield f"{name}.qzeros", shard(target, linear.INT32, load, lambda v: v + add, units, 0)
        units = (1, self.group_size)
        yield f"{name}.scales", shard(weight.scales[rows].t(), linear.SCALES, units=units)
        start, size = (matrix.start, weight.num_inputs) if matrix.dim == 1 else (0, matrix.shape[1])
        order = torch.empty(0) if weight.order is None else weight.order
        arrange = partial(load_order, name=f"{name}.g_idx", group_size=self.group_size, start=start)
        place = Shard(order, matrix.shape[1:], 0, start, size, linear.INT32, arrange)
        yield f"{name}.g_idx", place._replace(is_optional=not self.has_order)
        if layer.bias is None:  # some tools write a bias of zeros for every layer
            yield linear.optional("bias", matrix, matrix.shape[:1], check_zero)


def load_order(target: Tensor, values: Tensor, name: str, group_size: int, start: int) -> None:
    """The group of each input, from number `start` on -> the inputs, sorted by group. Raises
    ValueError unless each group has `group_size` inputs, unless all matrices with this target
    agree, and (if there is none) for an order that config.json does not announce."""
    groups, size = values.long(), len(values) if group_size == -1 else group_size
    order = groups.argsort(stable=True).to(target.device)
    expected = torch.arange(start, start + len(values)) // size
    is_plain = torch.equal(groups, expected) or group_size == -1
    is_other = bool(target.any()) and not torch.equal(order, target)
    is_whole = is_plain or (len(target) > 0 and torch.equal(groups.sort().values, expected))
    if is_other or not is_whole:
        raise ValueError(f"{name} has an order that config.json, or another matrix, has not.")
    target.copy_(order[: len(target)])


def check_zero(target: Tensor, values: Tensor) -> None:
    if values.any():
        raise ValueError("a bias is not zero, but the model that config.json describes has none.")


class GPTQConfig(QuantizationConfig):
    def __init__(self, section: Section) -> None:
        check(section, checkpoint_format=("gptq", "gptq_v2"), is_marlin_format=(False,))
        self.method = read_method(section)
        self.quantizes_head = section.get("lm_head", False)
        self.dynamic = {  # regex -> method of its layers
            name: None if name.startswith("-:") else read_method({**section, **rule})
            for name, rule in (section.get("dynamic") or {}).items()
        }

    def method_of(self, name: str) -> GPTQLinearMethod | None:
        for regex, method in self.dynamic.items():
            if re.match(regex.removeprefix("+:").removeprefix("-:"), name):
                return method
        return self.method


def read_method(section: Section) -> GPTQLinearMethod:
    check(section, bits=(4, 8))
    kind, group_size = f"int{section['bits']}", section["group_size"]
    has_order = section.get("desc_act", False) and group_size != -1
    is_v1 = section.get("checkpoint_format", "gptq") == "gptq"
    return GPTQLinearMethod(kind, group_size, has_zeros=True, has_order=has_order, is_v1=is_v1)
