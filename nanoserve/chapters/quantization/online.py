"""How are weights in floating point quantized while they are read?

LLM(quantization="fp8" | "int8" | "int4") rounds each number to the nearest code, without looking at
any text:

    int8   a scale for each output: its largest number is code 127 or -127
    fp8    the same with 448
    int4   a scale and a zero for each group of 64 inputs: its smallest and its largest number are
           codes 0 and 15, and 0 is a code exactly

A matrix is quantized as soon as it is read, so that memory holds the codes of all, and the numbers
of one. Every rank reads the whole matrix and keeps its part of the codes: they are the same for any
number of ranks. The head stays in floating point.

vLLM: vllm/model_executor/layers/quantization/online/ (V1), fp8.py (V0 and V1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nanoserve.extras.quantization.base_config import QuantizationConfig, Section
from nanoserve.extras.quantization.linear import QuantizedLinearMethod, Shards, weight_of
from nanoserve.kernels.quantized import pack_int4
from nanoserve.layers import LayerConfig, LinearBase
from nanoserve.models.shards import Matrix, Shard

GROUP_SIZE = 64  # of int4, if it divides the inputs
LARGEST = {"int8": 127.0, "fp8": 448.0}

Quantized = tuple[
    Tensor, Tensor, Tensor | None
]  # codes, scales, zeros, as QuantizedWeight has them


def quantize_int8(weight: Tensor) -> Quantized:
    """[outputs, inputs] -> codes, and one scale for each output."""
    numbers, scales = _scale(weight, LARGEST["int8"])
    return numbers.round_().to(torch.int8), scales, None


def quantize_fp8(weight: Tensor) -> Quantized:
    """[outputs, inputs] -> codes, and one scale for each output."""
    numbers, scales = _scale(weight, LARGEST["fp8"])
    return numbers.to(torch.float8_e4m3fn), scales, None


def _scale(weight: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """The weight with `largest` as the largest number of each row, and the scales of the rows."""
    scales = weight.float().abs().amax(dim=1, keepdim=True) / largest
    scales[scales == 0] = 1.0
    return weight.float() / scales, scales


def quantize_int4(weight: Tensor, group_size: int = GROUP_SIZE) -> Quantized:
    """[outputs, inputs] -> codes [outputs, inputs / 2], and a scale and a zero for each group."""
    groups = weight.float().unflatten(1, (-1, weight.shape[1] if group_size == -1 else group_size))
    low, high = groups.amin(dim=2).clamp_(max=0), groups.amax(dim=2).clamp_(min=0)
    scales = (high - low) / 15
    scales[scales == 0] = 1.0
    zeros = (-low / scales).round_()
    codes = (groups / scales[..., None]).round_().add_(zeros[..., None]).clamp_(0, 15)
    return pack_int4(codes.flatten(1).to(torch.uint8)), scales, zeros.to(torch.int16)


QUANTIZE: dict[str, Callable[[Tensor], Quantized]] = {
    "int4": quantize_int4,
    "int8": quantize_int8,
    "fp8": quantize_fp8,
}


@dataclass(frozen=True)
class OnlineLinearMethod(QuantizedLinearMethod):
    def create_weights(
        self, layer: LinearBase, output_size: int, input_size: int, layer_config: LayerConfig
    ) -> None:
        """int4: if no group of 16 or more divides the inputs, a whole row is one."""
        method = self
        if self.kind == "int4":
            group_size = math.gcd(GROUP_SIZE, input_size)
            method = replace(self, group_size=group_size if group_size >= 16 else -1)
            layer.linear_method = method
        super(OnlineLinearMethod, method).create_weights(
            layer, output_size, input_size, layer_config
        )

    def shards(self, layer: LinearBase, matrix: Matrix) -> Shards:
        """One tensor, whose columns are cut when it is quantized: a row has one scale on any number
        of ranks."""
        weight, rows = weight_of(layer), matrix.rows
        first, end = 0, matrix.shape[1]
        start, size = matrix.start, rows.stop - rows.start
        if matrix.dim == 1:
            first, end = matrix.start, matrix.start + weight.num_inputs
            start, size = 0, matrix.shape[0]

        def load(target: Tensor, values: Tensor) -> None:
            quantize = QUANTIZE[self.kind]
            if self.kind == "int4":
                quantize = partial(quantize_int4, group_size=self.group_size)
            codes, scales, zeros = quantize(values)
            if not scales.isfinite().all():
                raise ValueError(
                    f"quantization={self.kind!r}: {matrix.name}.weight holds a number that is NaN "
                    "or infinite. Download the checkpoint again."
                )
            for place, numbers in ((target, codes), (weight.scales, scales), (weight.zeros, zeros)):
                if numbers is not None:
                    per_column = matrix.shape[1] // numbers.shape[1]
                    columns = slice(first // per_column, -(-end // per_column))
                    part = place if place is target else place[rows]
                    part.copy_(numbers[:, columns])

        shard = Shard(weight.codes[rows], matrix.shape, 0, start, size, weight_loader=load)
        yield f"{matrix.name}.weight", shard


@dataclass(frozen=True)
class OnlineConfig(QuantizationConfig):
    """Every layer but the head."""

    kind: str
    name = "online"
    quantizes_head = False

    @classmethod
    def from_config(cls, section: Section) -> OnlineConfig:
        """Not read from a file."""
        raise NotImplementedError

    def method_of(self, name: str) -> OnlineLinearMethod:
        is_int4, is_fp8 = self.kind == "int4", self.kind == "fp8"
        return OnlineLinearMethod(self.kind, has_zeros=is_int4, quantizes_inputs=is_fp8)
