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

vLLM: vllm/model_executor/layers/quantization/fp8.py (V0 and V1). Paper: arXiv 2209.05433.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from nanoserve.chapters.quantization import linear
from nanoserve.chapters.quantization.base_config import QuantizationConfig, Section, check, matches
from nanoserve.layers import LinearBase
from nanoserve.models.shards import Matrix, Shard


@dataclass(frozen=True)
class Fp8LinearMethod(linear.QuantizedLinearMethod):
    kind: str = "fp8"
    strategy: str = "tensor"  # what has a scale: tensor, channel, group or block
    block_outputs: int = 1  # outputs that share a scale, with "block"
    scale_name: str = "weight_scale"

    def shards(self, layer: LinearBase, matrix: Matrix) -> linear.Shards:
        weight, rows, name = linear.weight_of(layer), matrix.rows, matrix.name
        load = partial(load_fp8, name=f"{name}.weight")
        yield f"{name}.weight", self.shard(layer, matrix, weight.codes[rows], linear.FP8, load)
        yield f"{name}.{self.scale_name}", self.scale_shard(layer, matrix)
        if weight.input_scale is not None:
            scale = Shard(weight.input_scale, (), dtypes=linear.SCALES, weight_loader=largest)
            yield f"{name}.input_scale", scale

    def scale_shard(self, layer: LinearBase, matrix: Matrix) -> Shard:
        """Where the scales go: [outputs, groups], however few there are."""
        target = linear.weight_of(layer).scales[matrix.rows]
        if self.strategy == "tensor":
            return Shard(target, (), dtypes=linear.SCALES)
        block, units = self.block_outputs, (self.block_outputs, self.group_size)
        read = lambda values: values.repeat_interleave(block, 0)[: len(target)]  # noqa: E731
        return self.shard(layer, matrix, target, linear.SCALES, read=read, units=units)


def load_fp8(target: Tensor, values: Tensor, name: str) -> None:
    """Raises ValueError for a code that is no number: decoded in registers, it would be 480."""
    target.copy_(values)
    if (target.view(torch.uint8) & 0x7F == 0x7F).any():
        raise ValueError(f"{name} holds a number that is NaN. Download the checkpoint again.")


def largest(target: Tensor, value: Tensor) -> None:
    """One scale for inputs that several matrices share: the largest of theirs, as in vLLM."""
    target.copy_(torch.maximum(target, value.to(target)))


class Fp8Config(QuantizationConfig):
    def __init__(self, section: Section) -> None:
        check(section, activation_scheme=("dynamic", "static"), fmt=("e4m3", None))
        is_static = section.get("activation_scheme") == "static"
        self.ignored = section.get("ignored_layers") or section.get("modules_to_not_convert")
        self.method = Fp8LinearMethod(quantizes_inputs=True, has_input_scale=is_static)
        if block := section.get("weight_block_size"):
            self.method = Fp8LinearMethod(
                group_size=block[1],
                quantizes_inputs=True,
                strategy="block",
                block_outputs=block[0],
                scale_name="weight_scale_inv",
            )

    def method_of(self, name: str) -> Fp8LinearMethod | None:
        return None if matches(name, self.ignored) else self.method
