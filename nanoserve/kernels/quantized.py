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

Each way is a pair of functions: `pack` brings a weight's tensors into the layout that is read
fastest, and returns its `multiply`.

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

from nanoserve.kernels import quantized_cpu
from nanoserve.kernels.native_cpu import load_library
from nanoserve.kernels.quantized_cpu import unpack_int4

FP8_ALIGNMENT = 16  # _scaled_mm wants multiples of it, of inputs and of outputs

# (rows [num_rows, in] sorted by expert, weight [experts, out, in], offsets [experts]) -> rows, out
GroupedMatmul = Callable[[Tensor, Tensor, Tensor], Tensor]
# (packed weight, x [num_rows, in], expert) -> x times the matrix of that expert, [num_rows, out]
Product = Callable[["QuantizedWeight", Tensor, int], Tensor]


def pack_int4(codes: Tensor) -> Tensor:
    """The inverse of unpack_int4; n is even."""
    return codes[..., ::2] | codes[..., 1::2] << 4


class QuantizedWeight(nn.Module):
    """A matrix [out, in] of codes, on the device of its codes.

    After `prepare` the tensors may lie in another way: dequantize is for before.
    """

    codes: Any  # see __init__
    scales: Any
    zeros: Any
    order: Any  # None: the columns are in the inputs' order
    input_scale: Any
    product: Any = None  # the Product that `prepare` has chosen; None: the weight is dequantized

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
        self.kind, self.quantizes_inputs, self.num_experts = kind, quantizes_inputs, num_experts
        self.num_outputs, self.num_groups = scales.shape
        self.num_inputs = codes.shape[1] * (2 if kind == "int4" else 1)
        self.group_size = self.num_inputs // self.num_groups  # columns that share a scale
        tensors = {"codes": codes, "scales": scales, "zeros": zeros, "order": order}
        for name, tensor in {**tensors, "input_scale": input_scale}.items():
            self.register_buffer(name, tensor, persistent=False)

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
        if pack := choose_pack(self):
            self.product = pack(self)

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [num_tokens, in] -> x W^T + b, [num_tokens, out]."""
        if self.product is None:
            return F.linear(x, self.dequantize(x.dtype), bias)
        output = self.product(self, self._ordered(x), 0)
        return output if bias is None else output.add_(bias)

    def multiply_grouped(self, rows: Tensor, offsets: Tensor, matmul: GroupedMatmul) -> Tensor:
        """rows [num_rows, in], sorted by expert, each times the matrix of its expert; the rows of
        expert e end before offsets[e]. `matmul` does it with a weight [experts, out, in]."""
        if self.product is None:
            weight = self.dequantize(rows.dtype).unflatten(0, (self.num_experts, -1))
            return matmul(rows, weight, offsets)
        parts = self._ordered(rows).tensor_split(offsets[:-1].tolist())
        return torch.cat([self.product(self, part, i) for i, part in enumerate(parts)])

    def _ordered(self, x: Tensor) -> Tensor:
        """The inputs in the order of the columns."""
        return x if self.order is None else x.index_select(1, self.order)


def pack_scaled(weight: QuantizedWeight) -> Product:
    """For FP8 units: the scales lie along the outputs."""
    weight.scales = weight.scales.t().contiguous()  # [1, out]
    return multiply_scaled


def multiply_scaled(weight: QuantizedWeight, x: Tensor, expert: int) -> Tensor:
    """Both sides in FP8, multiplied as such; the scales of rows and outputs come afterwards."""
    from nanoserve.kernels import fused_triton  # here: a Mac has no Triton

    numbers, scale = fused_triton.quantize_rows(x, weight.input_scale)
    product = torch._scaled_mm(
        numbers, weight.codes.t(), scale_a=scale, scale_b=weight.scales, out_dtype=torch.bfloat16
    )
    return product.to(x.dtype)


def choose_pack(weight: QuantizedWeight) -> Callable[[QuantizedWeight], Product] | None:
    """What packs this weight on its device; None: it is dequantized for each product."""
    device = weight.codes.device
    if device.type == "cpu":
        return quantized_cpu.pack if load_library(quantized_cpu.SOURCE) else None
    if device.type != "cuda" or weight.num_experts > 1 or not find_spec("triton"):
        return None
    if weight.kind != "fp8":
        from nanoserve.kernels import quantized_triton

        return quantized_triton.pack if quantized_triton.choose_block_k(weight) else None
    sizes = (weight.num_outputs, weight.num_inputs)
    can_scale = torch.cuda.get_device_capability(device) >= (8, 9)
    can_scale = can_scale and weight.num_groups == 1 and not any(n % FP8_ALIGNMENT for n in sizes)
    return pack_scaled if can_scale and weight.quantizes_inputs else None
