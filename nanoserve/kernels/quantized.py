"""How is a weight of small integers stored, and how is it multiplied by?

A quantized weight has a code of 4 or 8 bits for each number, and a scale for each group of numbers
that are neighbours in a row. A matrix of one row of 4 inputs in int4, with groups of 2:

    codes  11  7 | 8  15      zeros  8 | 8      scales  0.5 | 0.25
    weight = (code - zero) * scale = 1.5  -0.5 | 0  1.75

Three kinds of codes: "int4" (0 to 15, two in a byte), "int8" (-128 to 127) and "fp8" (8 bits with
an exponent of their own, float8_e4m3fn). `QuantizedWeight.dequantize` is the definition. `multiply`
is x W^T with that weight, in the fastest way that there is here for its kind:

    CPU, a compiler      all kinds      quantized_cpu.py: C++ that decodes in registers
    GPU                  int4, int8     quantized_triton.py: one kernel that decodes its tiles
    GPU with FP8 units   fp8            torch._scaled_mm, if the inputs may be quantized, too
    anywhere else        all kinds      the weight is dequantized for each product; so are experts
                                        on a GPU

Nothing here knows a checkpoint's format: chapters/quantization brings each one to this form.

vLLM: vllm/model_executor/layers/quantization/utils/w8a8_utils.py (V0);
vllm/model_executor/kernels/linear/: mixed_precision/, scaled_mm/ (V1).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.kernels.native_cpu import load_library
from nanoserve.kernels.quantized_cpu import KINDS, SOURCE, NativeProduct, unpack_int4

FP8_ALIGNMENT = 16  # _scaled_mm wants multiples of it, of inputs and of outputs

# (rows [num_rows, in] sorted by expert, weight [experts, out, in], offsets [experts]) -> rows, out
GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]


def pack_int4(codes: Tensor) -> Tensor:
    """The inverse of unpack_int4; n is even."""
    return codes[..., ::2] | codes[..., 1::2] << 4


class QuantizedWeight(nn.Module):
    """A matrix [out, in] of codes, on the device of its codes.

    After `prepare` the product may have them, in another order: dequantize is for before.
    """

    codes: Any  # see __init__; None when the product has them
    scales: Any
    zeros: Any
    order: Any  # None: the columns are in the inputs' order
    input_scale: Tensor | None

    def __init__(
        self,
        kind: str,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None = None,
        order: Tensor | None = None,
        input_scale: Tensor | None = None,
        quantizes_inputs: bool = False,
        num_experts: int = 1,
    ) -> None:
        """
        codes        int4: uint8 [out, in / 2], see unpack_int4; int8: int8 [out, in]; fp8:
                     float8_e4m3fn [out, in], none of them NaN
        scales       float32 [out, groups]; `groups` divides the inputs
        zeros        integers [out, groups]; None: 8 for int4, else 0
        order        int64 [in]: column j of the codes belongs to input order[j]; None: to input j
        input_scale  float32, one number: with quantizes_inputs, the scale of the inputs; None: each
                     token has its own
        num_experts  of as many matrices, the rows lie below each other
        """
        super().__init__()
        num_inputs = codes.shape[1] * (2 if kind == "int4" else 1)
        if kind not in KINDS or num_inputs % scales.shape[1] or len(scales) != len(codes):
            raise ValueError(
                f"a quantized weight of kind {kind!r} ({', '.join(KINDS)}) has {len(codes)} x "
                f"{num_inputs} codes, and {len(scales)} x {scales.shape[1]} scales. Scales have "
                "as many rows, and their columns divide those of the codes."
            )
        self.kind, self.num_outputs, self.num_inputs = kind, len(codes), num_inputs
        self.num_groups, self.num_experts = scales.shape[1], num_experts
        self.quantizes_inputs = quantizes_inputs
        tensors = {"codes": codes, "scales": scales, "zeros": zeros, "order": order}
        for name, tensor in {**tensors, "input_scale": input_scale}.items():
            self.register_buffer(name, tensor, persistent=False)
        self.group_size = num_inputs // scales.shape[1]  # columns that share a scale
        self.product: Any = None  # a module that multiplies: what `prepare` has chosen

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] that the codes stand for: the definition."""
        codes = unpack_int4(self.codes) if self.kind == "int4" else self.codes
        numbers = codes.float().unflatten(1, (self.num_groups, -1))
        zeros: Any = 8.0 if self.kind == "int4" else 0.0
        if self.zeros is not None:
            zeros = self.zeros.float()[..., None]
        weight = ((numbers - zeros) * self.scales[..., None]).flatten(1).to(dtype)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(1, self.order, weight)

    def prepare(self) -> None:
        """The weight is complete: bring it into the layout that is multiplied fastest."""
        product = choose_product(self)
        if product is not None:
            self.product = product(self)
            self.codes = self.scales = self.zeros = None

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [num_tokens, in] -> x W^T + b, [num_tokens, out]."""
        if self.product is None:
            return F.linear(x, self.dequantize(x.dtype), bias)
        output = self.product(self._ordered(x))
        return output if bias is None else output.add_(bias)

    def multiply_grouped(self, rows: Tensor, offsets: Tensor, matmul: GroupedMatmul) -> Tensor:
        """rows [num_rows, in], sorted by expert, each times the matrix of its expert; the rows of
        expert e end before offsets[e]. `matmul` does it with a weight [experts, out, in]."""
        if self.num_experts == 1:
            return self.multiply(rows)
        if self.product is None:
            weight = self.dequantize(rows.dtype).unflatten(0, (self.num_experts, -1))
            return matmul(rows, weight, offsets)
        rows, of_expert = self._ordered(rows), self.product.of_expert
        parts = rows.tensor_split(offsets[:-1].tolist())
        return torch.cat([of_expert(part, expert) for expert, part in enumerate(parts)])

    def _ordered(self, x: Tensor) -> Tensor:
        """The inputs in the order of the columns."""
        return x if self.order is None else x.index_select(1, self.order)


class ScaledMatmul(nn.Module):
    """Both sides in FP8, multiplied as such; the scales of rows and outputs come afterwards."""

    codes: Tensor
    scales: Tensor
    input_scale: Tensor | None

    def __init__(self, weight: QuantizedWeight) -> None:
        super().__init__()
        scales = weight.scales.t().contiguous()  # [1, out]
        tensors = {"codes": weight.codes, "scales": scales, "input_scale": weight.input_scale}
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        from nanoserve.kernels import fused_triton  # here: a Mac has no Triton

        numbers, scale = fused_triton.quantize_rows(x, self.input_scale)
        product = torch._scaled_mm(
            numbers, self.codes.t(), scale_a=scale, scale_b=self.scales, out_dtype=torch.bfloat16
        )
        return product.to(x.dtype)


def choose_product(weight: QuantizedWeight) -> Callable[[QuantizedWeight], nn.Module] | None:
    """What multiplies by this weight on its device; None: it is dequantized for each product."""
    device = weight.codes.device
    if device.type == "cpu":
        return NativeProduct if load_library(SOURCE) else None
    if device.type != "cuda" or weight.num_experts > 1 or not find_spec("triton"):
        return None
    if weight.kind != "fp8":
        from nanoserve.kernels.quantized_triton import TritonProduct, choose_block_k

        return TritonProduct if choose_block_k(weight) else None
    sizes = (weight.num_outputs, weight.num_inputs)
    can_scale = torch.cuda.get_device_capability(device) >= (8, 9)
    can_scale = can_scale and weight.num_groups == 1 and not any(n % FP8_ALIGNMENT for n in sizes)
    return ScaledMatmul if can_scale and weight.quantizes_inputs else None
