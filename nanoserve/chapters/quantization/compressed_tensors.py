"""What does llm-compressor write?

compressed-tensors is one description for many ways to quantize. Groups of layers ("targets", by
class or name) have each a scheme, and "ignore" lists exceptions:

    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
     "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": null, "weights":
         {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, ...}}}}

The format says how codes are stored, beside `weight_scale` [outputs, groups] (per channel: 1 group;
per tensor: one number):

    float-quantized   weight fp8 [outputs, inputs]: see fp8.py
    int-quantized     weight int8 [outputs, inputs], and weight_zero_point int8 if not symmetric
    naive-quantized   either of the two
    pack-quantized    weight_packed int32 [outputs, inputs / 8 or / 4], and weight_zero_point int32
                      [outputs / 8 or / 4, groups] if not symmetric: codes and zeros from 0 on

Schemes w8a8 quantize the inputs too. Here this is so for FP8 on GPUs that have FP8 units; else the
inputs stay floating-point, which is more exact.

Left out: other formats (FP4, 2:4 sparsity), transforms, quantized outputs.

vLLM: vllm/model_executor/layers/quantization/compressed_tensors/ (V0 and V1). The format:
compressed_tensors/compressors/ and quantization/quant_args.py of that package.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from nanoserve.chapters.quantization import linear
from nanoserve.chapters.quantization.base_config import QuantizationConfig, Section, check, matches
from nanoserve.chapters.quantization.fp8 import Fp8LinearMethod
from nanoserve.layers import LinearBase
from nanoserve.models.shards import Matrix, Shard

# format -> codes that it can hold
FORMATS = {
    "float-quantized": ("float8",),
    "int-quantized": ("int8",),
    "naive-quantized": ("float8", "int8"),
    "pack-quantized": ("int4", "int8"),
}


@dataclass(frozen=True)
class IntLinearMethod(Fp8LinearMethod):
    """Integers: scales as with FP8; codes and zeros in one of two layouts."""

    is_packed: bool = False

    def shards(self, layer: LinearBase, matrix: Matrix) -> linear.Shards:
        weight, rows, name = linear.weight_of(layer), matrix.rows, matrix.name
        shard = partial(self.shard, layer, matrix)
        per_int32 = 8 if self.kind == "int4" else 4
        if self.is_packed:
            load, units = linear.load_codes, (1, per_int32)
            codes = shard(weight.codes[rows], linear.INT32, load, units=units, packed=1)
            yield f"{name}.weight_packed", codes
            yield linear.optional("weight_shape", matrix, (2,))
        else:
            yield f"{name}.weight", shard(weight.codes[rows], linear.INT8)
        yield f"{name}.weight_scale", self.scale_shard(layer, matrix)
        yield linear.optional("input_scale", matrix)
        yield linear.optional("input_zero_point", matrix)
        if weight.zeros is None:
            return
        load = partial(linear.load_zeros, kind=self.kind)
        zeros = Shard(weight.zeros[rows], (), dtypes=linear.INT8)
        if self.is_packed:
            units = (per_int32, self.group_size)
            zeros = shard(weight.zeros[rows], linear.INT32, load, Tensor.t, units, 0)
        elif self.strategy != "tensor":
            zeros = shard(weight.zeros[rows], linear.INT8, units=(1, self.group_size))
        yield f"{name}.weight_zero_point", zeros


class CompressedTensorsConfig(QuantizationConfig):
    quantizes_head = True  # unless it is ignored

    def __init__(self, section: Section) -> None:
        check(section.get("sparsity_config") or {}, format=("dense",))
        check(section, transform_config=(None, {}))
        self.ignored = section.get("ignore")
        self.groups = [
            (group["targets"], read_method(group, group.get("format") or section.get("format")))
            for group in section["config_groups"].values()
        ]

    def method_of(self, name: str) -> linear.QuantizedLinearMethod | None:
        if matches(name, self.ignored):
            return None
        named = [method for targets, method in self.groups if matches(name, targets)]
        others = [method for targets, method in self.groups if "Linear" in targets]
        return next(iter(named + others), None)  # a name says more than a class


def read_method(group: Section, layout: str) -> linear.QuantizedLinearMethod:
    """The scheme of a group of layers."""
    weights, inputs = group["weights"], group.get("input_activations") or {}
    codes = f"{weights.get('type', 'int')}{weights['num_bits']}"
    group_size = weights.get("group_size")
    default = {None: "tensor", -1: "channel"}.get(group_size, "group")
    strategy, is_symmetric = weights.get("strategy") or default, weights.get("symmetric", True)
    check({"format": layout}, format=tuple(FORMATS))
    check({"num_bits": codes}, num_bits=FORMATS[layout])
    check({"strategy": strategy}, strategy=("tensor", "channel", "group", "block"))
    check(weights, actorder=(None, False, "weight", "static"))
    check({**inputs, **group}, num_bits=(8,), output_activations=(None,))
    block_outputs = 1
    if strategy == "block":
        block_outputs, group_size = weights["block_structure"]
    shape = {
        "group_size": group_size if strategy in ("group", "block") else -1,
        "strategy": strategy,
        "block_outputs": block_outputs,
    }
    if codes == "float8":
        check(weights, symmetric=(True,))
        is_fp8 = inputs.get("type") == "float"
        has_scale = is_fp8 and not inputs.get("dynamic", False)
        return Fp8LinearMethod(quantizes_inputs=is_fp8, has_input_scale=has_scale, **shape)
    is_packed = layout == "pack-quantized"
    return IntLinearMethod(codes, has_zeros=not is_symmetric, is_packed=is_packed, **shape)
