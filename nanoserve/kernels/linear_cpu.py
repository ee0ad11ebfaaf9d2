"""How does a CPU multiply by a weight fast?

A matrix product of few rows is bound by reading the weight, so what counts is how the weight lies
in memory. When the weights are loaded, `PackedLinearMethod` brings each one into the layout that is
read fastest:

    large    oneDNN's own blocks: a product of 8 to 64 rows (bfloat16: of 1 row, too) then takes
             about half the time
    small    float32: transposed. A call of oneDNN would take longer than the product, but long runs
             of neighbouring numbers still help. bfloat16: as it is, since PyTorch calls oneDNN

Left out: float16, and bfloat16 on processors for which oneDNN has no such product (it asks for the
instructions avx512bw and newer ones).

vLLM: vllm/model_executor/layers/utils.py dispatch_cpu_unquantized_gemm, csrc/cpu/ (V1).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.kernels.memory import read_text
from nanoserve.layers import LinearBase, LinearMethod

PACKED_FOR_ROWS = 256  # oneDNN's blocks for this many rows were fastest from 2 rows to 1,024
PACKED_SIZE = 2**18  # numbers; smaller weights are not given to oneDNN


def can_pack(dtype: torch.dtype) -> bool:
    """Does oneDNN multiply packed weights of this dtype on this processor?"""
    if not torch.backends.mkldnn.is_available():
        return False
    is_bfloat16 = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or is_bfloat16


def multiplies_bfloat16() -> bool:
    """Has this processor instructions for it? Without, bfloat16 takes longer than float32."""
    words = read_text(Path("/proc/cpuinfo")).split()
    return can_pack(torch.bfloat16) and not {"avx512_bf16", "amx_bf16"}.isdisjoint(words)


class PackedLinearMethod(LinearMethod):
    """Packs weights for a CPU in float32 or bfloat16.

    Invariant: after process_weights_after_loading a large weight is in `packed_weight` alone, so
    that it takes its memory once. Only an embedding keeps `weight` too, to look up its rows.
    """

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        layer.register_buffer("packed_weight", None, persistent=False)
        weight = layer.weight.detach()
        if layer.is_embedding and not layer.is_lm_head:
            return  # looked up only
        if weight.numel() < PACKED_SIZE:
            if not layer.is_embedding and weight.dtype == torch.float32:
                layer.weight.data = weight.t().contiguous().t()
        elif can_pack(weight.dtype):
            reorder = torch.ops.mkldnn._reorder_linear_weight
            layer.packed_weight = reorder(weight, PACKED_FOR_ROWS)
            if not layer.is_embedding:
                layer.weight = nn.Parameter(weight.new_empty(0, 0), requires_grad=False)

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        if layer.packed_weight is None:
            return F.linear(x, layer.weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, layer.packed_weight, bias, "none", [], "")
