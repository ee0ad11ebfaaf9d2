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

Left out: other formats (FP4, 2:4 sparsity), transforms, quantized outputs, scales of a KV cache.

vLLM: vllm/model_executor/layers/quantization/compressed_tensors/ (V0 and V1). The format:
compressed_tensors/compressors/ and quantization/quant_args.py of that package.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanoserve.checkpoint import FLAG, OBJECT, TEXT, Rule, list_of, one_of, whole
from nanoserve.extras.quantization.base_config import (
    GROUP_SIZE,
    QuantizationConfig,
    Section,
    matches,
)
from nanoserve.extras.quantization.fp8 import Fp8LinearMethod
from nanoserve.extras.quantization.linear import (
    INT8,
    INT32,
    SCALES,
    QuantizedLinearMethod,
    Shards,
    load_codes,
    load_zeros,
    optional,
    skip,
    weight_of,
)
from nanoserve.layers import LinearBase
from nanoserve.models.shards import Matrix, Shard

# format -> (type of the codes, bits) that it can hold
FORMATS = {
    "float-quantized": (("float", 8),),
    "int-quantized": (("int", 8),),
    "naive-quantized": (("float", 8), ("int", 8)),
    "pack-quantized": (("int", 4), ("int", 8)),
}
ORDER = Rule("a string, true or false", lambda value: isinstance(value, (str, bool)))
STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True)
class IntLinearMethod(Fp8LinearMethod):
    """Integers: scales as with FP8; codes and zeros in one of two layouts."""

    is_packed: bool = False

    def shards(self, layer: LinearBase, matrix: Matrix) -> Shards:
        weight, rows, name = weight_of(layer), matrix.rows, matrix.name
        shard = partial(self.shard, layer, matrix)
        per_int32 = 8 if self.kind == "int4" else 4
        if self.is_packed:
            codes = shard(weight.codes[rows], INT32, load_codes, (1, per_int32), 1)
            yield f"{name}.weight_packed", codes
            load = partial(_check_shape, name=f"{name}.weight_shape", shape=matrix.shape)
            sizes = Shard(torch.empty(0), (2,), 0, 0, 2, ("I64", "I32"), load)
            yield optional(f"{name}.weight_shape", sizes)
        else:
            yield f"{name}.weight", shard(weight.codes[rows], INT8)
        yield f"{name}.weight_scale", self.scale_shard(layer, matrix)
        for unused in ("input_scale", "input_zero_point"):
            empty = Shard(torch.empty(0), (), dtypes=(*SCALES, *INT8), weight_loader=skip)
            yield optional(f"{name}.{unused}", empty)
        if weight.zeros is None:
            return
        target = weight.zeros[rows]
        if self.is_packed:
            load = partial(_load_zeros, kind=self.kind)
            zeros = shard(target, INT32, load, (per_int32, self.group_size), 0)
        elif self.strategy == "tensor":
            zeros = Shard(target, (), dtypes=INT8)
        else:
            zeros = shard(target, INT8, units=(1, self.group_size))
        yield f"{name}.weight_zero_point", zeros


def _load_zeros(target: Tensor, values: Tensor, kind: str) -> None:
    load_zeros(target, values.t(), kind)


def _check_shape(target: Tensor, values: Tensor, name: str, shape: tuple[int, int]) -> None:
    if tuple(values.tolist()) != shape:
        raise ValueError(f"{name} is {values.tolist()}, and config.json describes {list(shape)}.")


@dataclass(frozen=True)
class CompressedTensorsConfig(QuantizationConfig):
    name = "compressed-tensors"
    groups: tuple[tuple[tuple[str, ...], QuantizedLinearMethod], ...]  # targets, method
    ignored: tuple[str, ...]
    quantizes_head = True  # unless it is ignored

    @classmethod
    def from_config(cls, section: Section) -> CompressedTensorsConfig:
        """Raises ValueError for schemes that are not supported."""
        for key in ("sparsity_config", "transform_config"):
            if (inner := section.get(key, OBJECT)) and inner.get("format") != "dense":
                section.refuse(key, "sparse and transformed weights are not supported")
        layout = section.get("format", TEXT)
        groups = section.at("config_groups")
        found = []
        for key in groups.values:
            group = groups.at(key)
            targets = group.names("targets")
            found.append((targets, _read_method(group, group.get("format", TEXT, layout))))
        return cls(tuple(found), section.names("ignore"))

    def method_of(self, name: str) -> QuantizedLinearMethod | None:
        if matches(name, self.ignored):
            return None
        for is_by_name in (True, False):  # a name says more than a class
            for targets, method in self.groups:
                if ("Linear" in targets) if not is_by_name else matches(name, targets):
                    return method
        return None


def _read_method(group: Section, layout: str | None) -> QuantizedLinearMethod:
    """The scheme of a group of layers."""
    weights = group.at("weights")
    bits = weights.require("num_bits", whole(1, 64))
    codes = weights.get("type", one_of("int", "float"), "int")
    if layout not in FORMATS or (codes, bits) not in FORMATS[layout]:
        allowed = "; ".join(
            f"{name}: {' or '.join(f'{code} {bits}' for code, bits in has)}"
            for name, has in FORMATS.items()
        )
        raise ValueError(
            f"{group.place}: format {layout!r} with weights of type {codes!r} and {bits} bits is "
            f"not supported; supported: {allowed}."
        )
    if group.get("output_activations", OBJECT):
        group.refuse("output_activations", "allowed: null")
    quantizes_inputs, has_input_scale = _read_inputs(group, codes)
    is_symmetric = weights.get("symmetric", FLAG, True)
    group_size, block = weights.get("group_size", GROUP_SIZE), [1, -1]
    default = {None: "tensor", -1: "channel"}.get(group_size, "group")
    strategy = weights.get("strategy", one_of(*STRATEGIES), default)
    if strategy == "group":
        group_size = weights.require("group_size", GROUP_SIZE)
    else:
        group_size = -1
    if strategy == "block":
        block = weights.require("block_structure", list_of(whole(1, 2**16), least=2))
        group_size = block[1]
    if weights.get("actorder", ORDER) in ("group", "dynamic", True):
        weights.refuse("actorder", "allowed: weight, static or null, which leave columns in place")
    if codes == "float":
        if not is_symmetric:
            weights.refuse("symmetric", "allowed with type float: true")
        return Fp8LinearMethod(
            group_size=group_size,
            quantizes_inputs=quantizes_inputs,
            has_input_scale=has_input_scale,
            strategy=strategy,
            block_outputs=block[0],
        )
    if strategy == "block":
        weights.refuse("strategy", "allowed with type int: tensor, channel or group")
    return IntLinearMethod(
        kind="int4" if bits == 4 else "int8",
        group_size=group_size,
        has_zeros=not is_symmetric,
        strategy=strategy,
        is_packed=layout == "pack-quantized",
    )


def _read_inputs(group: Section, codes: str) -> tuple[bool, bool]:
    """Are inputs quantized to FP8, and is there a static scale for them? Integers are not used."""
    if not group.get("input_activations", OBJECT):
        return False, False
    inputs = group.at("input_activations")
    if inputs.get("num_bits", whole(1, 64), 8) != 8:
        inputs.refuse("num_bits", "allowed: 8")
    if inputs.get("type", one_of("int", "float"), "int") != codes or codes == "int":
        return False, False
    return True, not inputs.get("dynamic", FLAG, False)
