"""What is in an AWQ checkpoint?

For each matrix [outputs, inputs], with 8 codes of 4 bits in an int32:

    qweight  int32 [inputs, outputs / 8]    codes, packed along the outputs
    qzeros   int32 [groups, outputs / 8]    zeros, packed in the same way
    scales   float [groups, outputs]        weight = (code - zero) * scale

The 8 outputs of an int32 lie in it in an order that suited the first kernels: from the lowest bits
on, outputs 0, 2, 4, 6, 1, 3, 5, 7. What gives the method its name was done before: inputs with
large activations were scaled up, and the layer in front of them was scaled down.

Left out: the layouts "gemv" and "marlin".

vLLM: vllm/model_executor/layers/quantization/awq.py (V0), auto_awq.py (V1). The format: AutoAWQ,
awq/modules/linear/gemm.py. Paper: arXiv 2306.00978.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from nanoserve.checkpoint import FLAG, TEXT, whole
from nanoserve.extras.quantization.base_config import (
    GROUP_SIZE,
    QuantizationConfig,
    Section,
    matches,
)
from nanoserve.extras.quantization.linear import (
    INT32,
    SCALES,
    QuantizedLinearMethod,
    Shards,
    as_bytes,
    weight_of,
)
from nanoserve.kernels.quantized import pack_int4, unpack_int4
from nanoserve.layers import LinearBase
from nanoserve.models.shards import Matrix

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in an int32


def unpack_awq(values: Tensor) -> Tensor:
    """int32 [n, outputs / 8] -> uint8 [outputs, n]."""
    numbers = unpack_int4(as_bytes(values))
    return numbers.unflatten(1, (-1, 8))[..., PLACES].flatten(1).t()


def load_qweight(target: Tensor, values: Tensor) -> None:
    target.copy_(pack_int4(unpack_awq(values)))


def load_qzeros(target: Tensor, values: Tensor) -> None:
    target.copy_(unpack_awq(values))


@dataclass(frozen=True)
class AWQLinearMethod(QuantizedLinearMethod):
    def shards(self, layer: LinearBase, matrix: Matrix) -> Shards:
        weight, rows = weight_of(layer), matrix.rows
        if matrix.shape[0] % 8:
            raise ValueError(
                f"{matrix.name} has {matrix.shape[0]} outputs; allowed in an AWQ checkpoint: a "
                "multiple of 8."
            )
        shard = partial(self.shard, layer, matrix, packed=0, is_transposed=True)
        for name, target, dtypes, load, units in (
            ("qweight", weight.codes[rows], INT32, load_qweight, (8, 1)),
            ("qzeros", weight.zeros[rows], INT32, load_qzeros, (8, self.group_size)),
            ("scales", weight.scales[rows].t(), SCALES, Tensor.copy_, (1, self.group_size)),
        ):
            yield f"{matrix.name}.{name}", shard(target, dtypes, load, units)


@dataclass(frozen=True)
class AWQConfig(QuantizationConfig):
    name = "awq"
    method: AWQLinearMethod
    ignored: tuple[str, ...]
    quantizes_head: bool

    @classmethod
    def from_config(cls, section: Section) -> AWQConfig:
        """Raises ValueError for bits or a layout that are not supported."""
        is_old = "w_bit" in section.values  # AutoAWQ's own names, in quant_config.json
        section.require("w_bit" if is_old else "bits", whole(4, 4))
        for key in ("version", "format"):
            if section.get(key, TEXT, "gemm").lower() != "gemm":
                section.refuse(key, "allowed: gemm, the layout that all tools read")
        if not section.get("zero_point", FLAG, True):
            section.refuse("zero_point", "allowed: true, because the files always have zeros")
        group_size = section.require("q_group_size" if is_old else "group_size", GROUP_SIZE)
        method = AWQLinearMethod("int4", group_size, has_zeros=True)
        ignored = section.names("modules_to_not_convert")
        return cls(method, ignored, section.get("lm_head", FLAG, False))

    def method_of(self, name: str) -> AWQLinearMethod | None:
        return None if matches(name, self.ignored) else self.method
