"""How does a CPU multiply by a weight, and normalise, in as few calls as possible?

A matrix product of few rows is bound by reading the weight, so what counts is how the weight lies
in memory. When the weights are loaded, `PackedLinearMethod` brings each one into the layout that is
read fastest:

    large    oneDNN's own blocks: a product of 8 to 64 rows (bfloat16: of 1 row, too) then takes
             about half the time
    small    float32: transposed. A call of oneDNN would take longer than the product, but long runs
             of neighbouring numbers still help. bfloat16: as it is, since PyTorch calls oneDNN

And an operator on a few rows is bound by being called, so `RMSNormCPU` makes few calls.

Left out: float16, and bfloat16 on processors for which oneDNN has no such product (it asks for the
instructions avx512bw and newer ones).

vLLM: vllm/model_executor/layers/utils.py dispatch_cpu_unquantized_gemm, csrc/cpu/ (V1).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.attention import StepMetadata
from nanoserve.layers import LayerConfig, LinearBase, LinearMethod

PACKED_FOR_ROWS = 256  # oneDNN's blocks for this many rows were fastest from 2 rows to 1,024
PACKED_SIZE = 2**18  # numbers; smaller weights are not given to oneDNN


def can_pack(dtype: torch.dtype) -> bool:
    """Does oneDNN multiply packed weights of this dtype on this processor?"""
    if not torch.backends.mkldnn.is_available():
        return False
    is_bfloat16 = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32 or is_bfloat16


class PackedLinearMethod(LinearMethod):
    """Packs weights for a CPU in float32 or bfloat16.

    Invariant: after process_weights_after_loading a large weight is in `packed_weight` alone, so
    that it takes its memory once. Only an embedding keeps `weight` too, to look up its rows.
    """

    def create_weights(
        self, layer: LinearBase, output_size: int, input_size: int, layer_config: LayerConfig
    ) -> None:
        super().create_weights(layer, output_size, input_size, layer_config)
        layer.register_buffer("packed_weight", None, persistent=False)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
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

    def apply(
        self, layer: LinearBase, x: Tensor, bias: Tensor | None, metadata: StepMetadata | None
    ) -> Tensor:
        if layer.packed_weight is None:
            return F.linear(x, layer.weight, bias)
        return torch.ops.mkldnn._linear_pointwise(x, layer.packed_weight, bias, "none", [], "")


class RMSNormCPU:
    """layers.rms_norm for float32: 5 operators, where PyTorch's rms_norm consists of a dozen.

    sqrt(mean(x^2) + eps) is the hypotenuse of a right triangle with sides rms(x) and sqrt(eps), and
    rms(x) is the length of x / sqrt(size).
    """

    def __init__(self) -> None:
        self._side: dict[float, Tensor] = {}  # eps -> sqrt(eps), a tensor because hypot_ needs one

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        side = self._side.get(eps)
        if side is None:
            side = self._side[eps] = torch.tensor(math.sqrt(eps), dtype=x.dtype, device="cpu")
        rms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(x.shape[-1] ** -0.5)
        return (x / rms.hypot_(side)).mul_(weight)

    def add(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """layers.add_rms_norm."""
        residual = x.add_(residual)
        return self(residual, weight, eps), residual
