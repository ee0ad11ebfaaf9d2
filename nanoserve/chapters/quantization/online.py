"""How are weights in floating point quantized while they are read?

LLM(quantization="fp8" | "int8" | "int4") rounds each number to the nearest code, without looking at
any text:

    int8   a scale for each output: its largest number is code 127 or -127
    fp8    the same with 448
    int4   a scale and a zero for each group of 64 inputs: its smallest and its largest number are
           codes 0 and 15, and 0 is a code exactly

A matrix is quantized as soon as it is read, so that memory holds the codes of all, and the numbers
of one. Every rank reads the whole matrix and keeps its part of the codes: they are the same for any
number of ranks whose inputs are whole groups. The head stays in floating point.

vLLM: vllm/model_executor/layers/quantization/online/ (V1), fp8.py (V0 and V1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.chapters.quantization import linear
from nanoserve.chapters.quantization.base_config import QuantizationConfig, Section
from nanoserve.kernels.quantized import pack_int4
from nanoserve.layers import LinearBase
from nanoserve.models.shards import Matrix, Shard

GROUP_SIZE = 64  # of int4, if it divides the inputs
LARGEST = {"int8": 127.0, "fp8": 448.0}


def quantize(weight: Tensor, kind: str, group_size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """[outputs, inputs] -> codes, scales and zeros, as QuantizedWeight has them."""
    groups = weight.float().unflatten(1, (1, -1) if group_size == -1 else (-1, group_size))
    low, high = groups.amin(dim=2).clamp_(max=0), groups.amax(dim=2).clamp_(min=0)
    scales = (high - low) / 15 if kind == "int4" else torch.maximum(-low, high) / LARGEST[kind]
    scales[scales == 0] = 1.0
    numbers = groups / scales[..., None]
    if kind != "int4":
        numbers = numbers.round_() if kind == "int8" else numbers
        return numbers.flatten(1).to(linear.DTYPES[kind]), scales, None
    zeros = (-low / scales).round_()
    codes = numbers.round_().add_(zeros[..., None]).clamp_(0, 15)
    return pack_int4(codes.flatten(1).to(torch.uint8)), scales, zeros.to(torch.int16)


@dataclass(frozen=True)
class OnlineLinearMethod(linear.QuantizedLinearMethod):
    def size_of_group(self, num_inputs: int) -> int:
        """int4: if no group of 16 or more divides the inputs, a whole row is one (-1)."""
        group_size = math.gcd(GROUP_SIZE, num_inputs)
        return group_size if self.kind == "int4" and group_size >= 16 else -1

    def shards(self, layer: LinearBase, matrix: Matrix) -> linear.Shards:
        """One tensor, whose columns are cut when it is quantized: a row has one scale on any number
        of ranks."""
        weight, rows = linear.weight_of(layer), matrix.rows
        first, end, start, size = 0, matrix.shape[1], matrix.start, rows.stop - rows.start
        if matrix.dim == 1:
            end = matrix.start + weight.num_inputs
            first, start, size = matrix.start, 0, matrix.shape[0]

        def load(target: Tensor, values: Tensor) -> None:
            group_size = self.size_of_group(weight.num_inputs)
            codes, scales, zeros = quantize(values, self.kind, group_size)
            if not scales.isfinite().all():
                raise ValueError(f"{matrix.name}.weight holds a number that is NaN or infinite.")
            places = (
                target,
                weight.scales[rows],
                weight.zeros[rows] if zeros is not None else None,
            )
            for place, numbers in zip(places, (codes, scales, zeros), strict=True):
                if numbers is not None:
                    per_column = matrix.shape[1] // numbers.shape[1]
                    place.copy_(numbers[:, first // per_column : -(-end // per_column)])

        shard = Shard(weight.codes[rows], matrix.shape, 0, start, size, weight_loader=load)
        yield f"{matrix.name}.weight", shard


class OnlineConfig(QuantizationConfig):
    """Every layer but the head."""

    def __init__(self, section: Section) -> None:
        kind, is_fp8 = section["kind"], section["kind"] == "fp8"
        self.method = OnlineLinearMethod(kind, has_zeros=kind == "int4", quantizes_inputs=is_fp8)

    def method_of(self, name: str) -> OnlineLinearMethod:
        return self.method
