"""How does a CPU multiply by a quantized weight as fast as it reads it?

quantized_cpu.cpp has the loop; this module brings a weight into the layout that the loop reads, and
calls it. x may be float32, bfloat16 or float16; sums are made in float32.

    codes [outputs, inputs]  ->  panels of 64 outputs: [panels, inputs, 64]
    int4                         two codes in a byte: those of outputs i and i + 32 of a panel

torch has such products, too (_weight_int8pack_mm, _weight_int4pack_mm_for_cpu). In bfloat16 they
are as fast as these; in float32 they took 30 times as long and more (torch 2.13). They know no fp8
and few group sizes.

vLLM: vllm/model_executor/kernels/linear/mixed_precision/cpu.py (V1; the loop is in csrc/cpu/).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.kernels.native_cpu import call, load_library

if TYPE_CHECKING:
    from nanoserve.kernels.quantized import Product, QuantizedWeight

SOURCE = Path(__file__).with_suffix(".cpp")
PANEL = 64  # outputs, as in the source
KINDS = ("int4", "int8", "fp8")  # of codes, in the order of the source


def unpack_int4(codes: Tensor) -> Tensor:
    """uint8 [.., n / 2] -> uint8 [.., n]; a byte holds the code of an even place in its lower half,
    that of the next place in its upper half."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def as_panels(tensor: Tensor, num_experts: int) -> Tensor:
    """[experts * out, n] -> [experts, panels, n, PANEL], with zeros behind the last output."""
    by_expert = tensor.unflatten(0, (num_experts, -1))
    padding = -by_expert.shape[1] % PANEL
    panels = F.pad(by_expert, (0, 0, 0, padding)).unflatten(1, (-1, PANEL))
    return panels.transpose(2, 3).contiguous()


def pack(weight: QuantizedWeight) -> Product:
    """Lay the weight of each expert out in panels; a zero becomes zero * scale."""
    is_int4 = weight.kind == "int4"
    codes = unpack_int4(weight.codes) if is_int4 else weight.codes.view(torch.uint8)
    codes = as_panels(codes, weight.num_experts)
    weight.codes = codes[..., : PANEL // 2] | codes[..., PANEL // 2 :] << 4 if is_int4 else codes
    if weight.zeros is not None:
        zeros = weight.scales * (weight.zeros.float() - (8 if is_int4 else 0))
        weight.zeros = as_panels(zeros, weight.num_experts)
    weight.scales = as_panels(weight.scales, weight.num_experts)
    return multiply


def multiply(weight: QuantizedWeight, x: Tensor, expert: int) -> Tensor:
    """[num_rows, in] -> [num_rows, out], by the matrix of this expert."""
    rows = x.float().contiguous()
    output = rows.new_empty(len(x), weight.num_outputs // weight.num_experts)
    call(
        load_library(SOURCE), "quantized_multiply", *rows.shape, output.shape[1],
        weight.num_groups, KINDS.index(weight.kind), rows, weight.codes[expert],
        weight.scales[expert], None if weight.zeros is None else weight.zeros[expert], output,
    )  # fmt: skip
    return output.to(x.dtype)
