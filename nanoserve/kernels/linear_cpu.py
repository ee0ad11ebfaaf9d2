"""How does a CPU multiply by a weight fast?

A matrix product of few rows is bound by reading the weight, so what counts is how the weight lies
in memory. When the weights are loaded, each one is brought into the layout that is read fastest:

    float32; bfloat16 with AVX-512 BF16    panels, for the loop in linear_cpu.cpp
    bfloat16 with AMX; no C++ compiler     blocks of oneDNN, a library in PyTorch
    float16, and what neither can take     as it is, for PyTorch

A product of one row takes two thirds as long in panels as in oneDNN's blocks, one of 16 rows nine
tenths, one of 32 and more as long (within 5%). With AMX, oneDNN multiplies whole matrices at once.

vLLM: vllm/model_executor/layers/utils.py dispatch_cpu_unquantized_gemm, csrc/cpu/ (V1).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.kernels.memory import read_text
from nanoserve.kernels.native_cpu import NAMES, call, load_library
from nanoserve.layers import LinearBase, LinearMethod

SOURCE = Path(__file__).with_suffix(".cpp")
PACKED_FOR_ROWS = 256  # oneDNN's blocks for this many rows were fastest from 2 rows to 1,024


def has_instructions(*names: str) -> bool:
    """Has this processor any of the instructions that Linux calls so?"""
    return not set(names).isdisjoint(read_text(Path("/proc/cpuinfo")).split())


def make_linear_method(dtype: torch.dtype) -> BlockedLinearMethod:
    """The fastest one for large weights on this CPU."""
    is_amx = dtype == torch.bfloat16 and has_instructions("amx_bf16")
    library = None if is_amx else load_library(SOURCE)
    # In bfloat16 the source has one if the compiler knows AVX-512 BF16 (GCC from version 10 on).
    has_product = hasattr(library, f"multiply_{NAMES[dtype]}")
    return PanelLinearMethod(library) if library and has_product else BlockedLinearMethod()


class BlockedLinearMethod(LinearMethod):
    """Packs weights when they are loaded: for oneDNN.

    Invariant: after process_weights_after_loading a packed weight is in `packed_weight` alone, so
    that it takes its memory once: `weight` is [outputs, 0]. Only an embedding keeps its weight too,
    to look up its rows.
    """

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        is_used = layer.is_lm_head or not layer.is_embedding  # or it is looked up only
        packed = self.pack(layer.weight.detach()) if is_used else None
        layer.register_buffer("packed_weight", packed, persistent=False)
        if packed is not None and not layer.is_embedding:
            layer.weight.data = layer.weight.new_empty(len(layer.weight), 0)

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        packed: Any = layer.packed_weight
        if packed is None:
            return F.linear(x, layer.weight, bias)
        return self.multiply(x, packed, len(layer.weight), bias)

    def pack(self, weight: Tensor) -> Tensor | None:
        """A copy of the weight [outputs, inputs] for `multiply`; None if there can be none."""
        mkldnn, can_pack = torch.ops.mkldnn, torch.backends.mkldnn.is_available()
        if weight.dtype == torch.bfloat16:
            can_pack = can_pack and mkldnn._is_mkldnn_bf16_supported()
        return mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS) if can_pack else None

    def multiply(self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        """F.linear."""
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


class PanelLinearMethod(BlockedLinearMethod):
    """Packs weights for the loop in linear_cpu.cpp."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library

    def pack(self, weight: Tensor) -> Tensor | None:
        (outputs, inputs), pair = weight.shape, 4 // weight.element_size()
        panel = ctypes.c_int.in_dll(self.library, "panel").value  # outputs
        if inputs % pair:
            return None
        padded = F.pad(weight, (0, 0, 0, -outputs % panel)) if outputs % panel else weight
        return padded.view(-1, panel, inputs // pair, pair).transpose(1, 2).contiguous()

    def multiply(self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        x, inputs = x.contiguous(), x.shape[-1]
        if (x.dtype, inputs) != (packed.dtype, packed.shape[1] * packed.shape[3]):
            raise ValueError(f"x is {x.dtype} {[*x.shape]}, and the weight is of another size.")
        output = x.new_empty(*x.shape[:-1], outputs)
        name, rows = f"multiply.{NAMES[x.dtype]}", x.numel() // inputs
        call(self.library, name, rows, inputs, outputs, x, packed, bias, output)
        return output
