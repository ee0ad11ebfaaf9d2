"""What is in an FP8 checkpoint?

Weights are floats of 8 bits (e4m3: 4 bits of exponent, 3 of mantissa, up to 448), so that a scale
for a whole matrix is enough:

    weight            fp8 [outputs, inputs]
    weight_scale      float, one number, or [outputs, 1]: weight = code * scale
    weight_scale_inv  in its place, with weight_block_size [128, 128]: [outputs / 128, inputs / 128]
    input_scale       one number, with activation_scheme "static"

Two tools write such files in nearly the same form: transformers and AutoFP8 ("fp8", read by this
module), and llm-compressor (compressed_tensors.py, which uses the same Fp8LinearMethod).

With FP8 units (compute capability 8.9 or newer), inputs become FP8 too: with the static scale, or
each token with one of its own (dynamic). Elsewhere they stay as they are.

Left out: scales of a quantized KV cache (k_scale, v_scale), which are skipped.

vLLM: vllm/model_executor/layers/quantization/fp8.py (V0 and V1). Paper: arXiv 2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanoserve.checkpoint import list_of, one_of, whole
from nanoserve.extras.quantization.base_config import (
    QuantizationConfig,
    Section,
    matches,
)
from nanoserve.extras.quantization.linear import (
    FP8,
    SCALES,
    QuantizedLinearMethod,
    Shards,
    largest,
    weight_of,
)
from nanoserve.layers import LinearBase
from nanoserve.models.shards import Matrix, Shard


@dataclass(frozen=True)
class Fp8LinearMethod(QuantizedLinearMethod):
    kind: str = "fp8"
    strategy: str = "tensor"  # what has a scale: tensor, channel, group or block
    block_outputs: int = 1  # outputs that share a scale, with "block"
    scale_name: str = "weight_scale"

    def shards(self, layer: LinearBase, matrix: Matrix) -> Shards:
        weight, rows, name = weight_of(layer), matrix.rows, matrix.name
        load = partial(load_fp8, name=f"{name}.weight")
        yield f"{name}.weight", self.shard(layer, matrix, weight.codes[rows], FP8, load)
        yield f"{name}.{self.scale_name}", self.scale_shard(layer, matrix)
        if weight.input_scale is not None:
            scale = Shard(weight.input_scale, (), dtypes=SCALES, weight_loader=largest)
            yield f"{name}.input_scale", scale

    def scale_shard(self, layer: LinearBase, matrix: Matrix) -> Shard:
        """Where the scales go: [outputs, groups], however few there are."""
        target = weight_of(layer).scales[matrix.rows]
        if self.strategy == "tensor":
            return Shard(target, (), dtypes=SCALES)

        def repeat(target: Tensor, values: Tensor) -> None:
            target.copy_(values.repeat_interleave(self.block_outputs, 0)[: len(target)])

        units = (self.block_outputs, self.group_size)
        return self.shard(layer, matrix, target, SCALES, repeat, units)


def load_fp8(target: Tensor, values: Tensor, name: str) -> None:
    """Raises ValueError for a code that is no number: decoded in registers, it would be 480."""
    target.copy_(values)
    if (target.view(torch.uint8) & 0x7F == 0x7F).any():
        raise ValueError(f"{name} holds a number that is NaN. Download the checkpoint again.")


@dataclass(frozen=True)
class Fp8Config(QuantizationConfig):
    name = "fp8"
    method: Fp8LinearMethod
    ignored: tuple[str, ...]
    quantizes_head = False

    @classmethod
    def from_config(cls, section: Section) -> Fp8Config:
        """Raises ValueError for values that are not allowed."""
        schemes = one_of("dynamic", "static")
        is_static = section.get("activation_scheme", schemes, "dynamic") == "static"
        section.get("fmt", one_of("e4m3"))
        section.get("scale_fmt", one_of("float"))
        block = section.get("weight_block_size", list_of(whole(1, 2**16), least=1))
        if block is not None and (len(block) != 2 or is_static):
            section.refuse("weight_block_size", "allowed: [outputs, inputs], with dynamic scales")
        ignored = section.names("ignored_layers") + section.names("modules_to_not_convert")
        method = Fp8LinearMethod(quantizes_inputs=True, has_input_scale=is_static)
        if block is not None:
            method = Fp8LinearMethod(
                group_size=block[1],
                quantizes_inputs=True,
                strategy="block",
                block_outputs=block[0],
                scale_name="weight_scale_inv",
            )
        return cls(method, ignored)

    def method_of(self, name: str) -> Fp8LinearMethod | None:
        return None if matches(name, self.ignored) else self.method
