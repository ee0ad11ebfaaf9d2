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

from nanoserve.chapters.quantization import linear
from nanoserve.chapters.quantization.base_config import QuantizationConfig, Section, check, matches
from nanoserve.kernels.quantized import pack_int4, unpack_int4
from nanoserve.layers import LinearBase
from nanoserve.models.shards import Matrix

PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of outputs 0 to 7 in an int32


def unpack_awq(values: Tensor) -> Tensor:
    """int32 [n, outputs / 8] -> uint8 [outputs, n]."""
    numbers = unpack_int4(linear.as_bytes(values))
    return numbers.unflatten(1, (-1, 8))[..., PLACES].flatten(1).t()


@dataclass(frozen=True)
class AWQLinearMethod(linear.QuantizedLinearMethod):
    def shards(self, layer: LinearBase, matrix: Matrix) -> linear.Shards:
        weight, rows, name = linear.weight_of(layer), matrix.rows, matrix.name
        if matrix.shape[0] % 8:
            raise ValueError(f"{name} has {matrix.shape[0]} outputs; AWQ needs a multiple of 8.")
        shard = partial(self.shard, layer, matrix, packed=0, is_transposed=True)
        codes, zeros = weight.codes[rows], weight.zeros[rows]
        units = (8, self.group_size)
        load = lambda target, values: target.copy_(pack_int4(values))  # noqa: E731
        yield f"{name}.qweight", shard(codes, linear.INT32, load, unpack_awq, (8, 1))
        yield f"{name}.qzeros", shard(zeros, linear.INT32, read=unpack_awq, units=units)
        units = (1, self.group_size)
        yield f"{name}.scales", shard(weight.scales[rows].t(), linear.SCALES, units=units)


class AWQConfig(QuantizationConfig):
    def __init__(self, section: Section) -> None:
        check(section, bits=(4,), zero_point=(True,), version=("gemm", "GEMM", None))
        self.method = AWQLinearMethod("int4", section["group_size"], has_zeros=True)
        self.ignored = section.get("modules_to_not_convert")
        self.quantizes_head = section.get("lm_head", False)

    def method_of(self, name: str) -> AWQLinearMethod | None:
        return None if matches(name, self.ignored) else self.method
