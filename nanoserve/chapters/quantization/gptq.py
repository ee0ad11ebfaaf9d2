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
from typing import Any

import torch
from torch import Tensor

from nanoserve.checkpoint import FLAG, OBJECT, TEXT, Rule, list_of
from nanoserve.extras.quantization.base_config import (
    GROUP_SIZE,
    QuantizationConfig,
    Section,
)
from nanoserve.extras.quantization.linear import (
    INT32,
    SCALES,
    QuantizedLinearMethod,
    Shards,
    load_codes,
    load_order,
    load_zeros,
    optional,
    weight_of,
)
from nanoserve.layers import LinearBase
from nanoserve.models.shards import Matrix, Shard

BITS = Rule("4 or 8", lambda value: value in (4, 8) and type(value) is int)
ONES = {4: 0x11111111, 8: 0x01010101}  # 1 for each zero in an int32


@dataclass(frozen=True)
class GPTQLinearMethod(QuantizedLinearMethod):
    is_v1: bool = True

    def shards(self, layer: LinearBase, matrix: Matrix) -> Shards:
        weight, rows, name = weight_of(layer), matrix.rows, matrix.name
        per_int32, one = (8, ONES[4]) if self.kind == "int4" else (4, ONES[8])

        def load_qweight(target: Tensor, values: Tensor) -> None:
            load_codes(target, values.t())

        def load_qzeros(target: Tensor, values: Tensor) -> None:
            # The tools subtract from whole int32 numbers: adding to them undoes a borrow, too.
            load_zeros(target, values + one if self.is_v1 else values, self.kind)

        shard = partial(self.shard, layer, matrix, is_transposed=True)
        units = (1, per_int32)
        yield f"{name}.qweight", shard(weight.codes[rows], INT32, load_qweight, units, 1)
        units = (per_int32, self.group_size)
        yield f"{name}.qzeros", shard(weight.zeros[rows], INT32, load_qzeros, units, 0)
        units = (1, self.group_size)
        yield f"{name}.scales", shard(weight.scales[rows].t(), SCALES, units=units)
        g_idx = f"{name}.g_idx"
        start, size = (matrix.start, weight.num_inputs) if matrix.dim == 1 else (0, matrix.shape[1])
        first = 0 if self.group_size == -1 else start // self.group_size
        load = partial(
            load_order,
            name=g_idx,
            group_size=self.group_size,
            first=first,
            is_free=self.has_order,
        )
        order = torch.empty(0) if weight.order is None else weight.order
        place = Shard(order, matrix.shape[1:], 0, start, size, INT32, load)
        yield (g_idx, place) if self.has_order else optional(g_idx, place)
        if layer.bias is None:
            # Some tools write a bias of zeros for every layer.
            load = partial(_check_zero, name=f"{name}.bias")
            empty = Shard(
                torch.empty(0), matrix.shape[:1], 0, 0, matrix.shape[0], weight_loader=load
            )
            yield optional(f"{name}.bias", empty)


def _check_zero(target: Tensor, values: Tensor, name: str) -> None:
    if values.any():
        raise ValueError(f"{name} is not zero, but the model that config.json describes has none.")


@dataclass(frozen=True)
class GPTQConfig(QuantizationConfig):
    name = "gptq"
    method: GPTQLinearMethod
    quantizes_head: bool
    dynamic: tuple[tuple[str, GPTQLinearMethod | None], ...]  # (regex, method of its layers)
    only: tuple[str, ...]  # names within a block; (): all

    @classmethod
    def from_config(cls, section: Section) -> GPTQConfig:
        """Raises ValueError for bits or a layout that are not supported."""
        layout = section.get("checkpoint_format", TEXT, "gptq")
        if layout not in ("gptq", "gptq_v2") or section.get("is_marlin_format", FLAG, False):
            key = "is_marlin_format" if layout in ("gptq", "gptq_v2") else "checkpoint_format"
            section.refuse(key, "allowed: gptq or gptq_v2, the layouts that all tools read")
        is_v1 = layout == "gptq"
        base = _read_method(section, None, is_v1)
        rules = []
        for pattern in section.get("dynamic", OBJECT, {}):
            sign, regex = pattern[:2], pattern[2:] if pattern[:2] in ("-:", "+:") else pattern
            section.check_pattern(regex)
            inner = section.at("dynamic")
            method = None if sign == "-:" else _read_method(inner.at(pattern), section, is_v1)
            rules.append((regex, method))
        blocks = section.get("modules_in_block_to_quantize", list_of(list_of(TEXT)), [])
        return cls(
            base,
            section.get("lm_head", FLAG, False),
            tuple(rules),
            tuple(name for names in blocks for name in names),
        )

    def method_of(self, name: str) -> GPTQLinearMethod | None:
        for regex, method in self.dynamic:
            if re.match(regex, name):
                return method
        is_one = not self.only or name == "lm_head" or any(each in name for each in self.only)
        return self.method if is_one else None


def _read_method(section: Section, base: Section | None, is_v1: bool) -> GPTQLinearMethod:
    """The keys of the whole config, or of one rule of it, which may leave out what `base` says."""

    def read(key: str, rule: Rule, default: Any) -> Any:
        if base is None:
            return (
                section.require(key, rule) if default is None else section.get(key, rule, default)
            )
        return section.get(key, rule, base.get(key, rule, default))

    group_size = read("group_size", GROUP_SIZE, None)
    return GPTQLinearMethod(
        "int4" if read("bits", BITS, None) == 4 else "int8",
        group_size,
        has_zeros=True,
        has_order=read("desc_act", FLAG, False) and group_size != -1,
        is_v1=is_v1,
    )
