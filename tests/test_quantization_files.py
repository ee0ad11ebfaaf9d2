"""Files that the package compressed-tensors has written: the numbers that it reads back are ours,
and so are the tokens of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("compressed_tensors")

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from oracle import assert_same_greedy
from quantized_checkpoints import write_checkpoint
from test_quantization import PROMPTS, SIZES, answers, linear_layers, load, weight_of
from torch import Tensor

from nanoserve import LLM

MakeCheckpoint = Callable[..., Path]
DYNAMIC = {"num_bits": 8, "dynamic": True, "strategy": "token"}
STATIC = {"num_bits": 8, "dynamic": False, "strategy": "tensor"}
INT4 = {"num_bits": 4, "type": "int"}
INT8 = {"num_bits": 8, "type": "int"}
FLOAT8 = {"num_bits": 8, "type": "float"}
# format, weights, input_activations
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w4a16": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 32}, None),
    "w4a16, zeros": (
        "pack-quantized",
        {**INT4, "strategy": "group", "group_size": 16, "symmetric": False},
        None,
    ),
    "w4a16, channels": ("pack-quantized", {**INT4, "strategy": "channel"}, None),
    "w8a16": ("pack-quantized", {**INT8, "strategy": "channel"}, None),
    "w8a16, zeros": (
        "pack-quantized",
        {**INT8, "strategy": "group", "group_size": 32, "symmetric": False},
        None,
    ),
    "w8a8": ("int-quantized", {**INT8, "strategy": "channel"}, DYNAMIC),
    "w8a8, zeros": ("int-quantized", {**INT8, "strategy": "channel", "symmetric": False}, STATIC),
    "w8a8, tensors": ("naive-quantized", {**INT8, "strategy": "tensor"}, STATIC),
    "fp8": ("float-quantized", {**FLOAT8, "strategy": "channel"}, {**DYNAMIC, "type": "float"}),
    "fp8, static": (
        "float-quantized",
        {**FLOAT8, "strategy": "tensor"},
        {**STATIC, "type": "float"},
    ),
    "fp8, naive": ("naive-quantized", {**FLOAT8, "strategy": "channel"}, None),
    "fp8, blocks": (
        "float-quantized",
        {**FLOAT8, "strategy": "block", "block_structure": [32, 16]},
        {**DYNAMIC, "type": "float"},
    ),
}


def ranges(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number of what shares a scale."""
    if args.strategy == "tensor":
        parts = weight.reshape(1, -1)
    elif args.strategy == "channel":
        parts = weight
    elif args.strategy == "group":
        parts = weight.unflatten(1, (-1, args.group_size))
    else:
        rows, columns = args.block_structure
        parts = weight.unfold(0, rows, rows).unfold(1, columns, columns).flatten(2)
    low, high = parts.amin(-1), parts.amax(-1)
    return (
        (low, high)
        if args.strategy in ("tensor", "group", "block")
        else (low[:, None], high[:, None])
    )


def scheme(name: str) -> tuple[dict[str, Any], Any]:
    """A config and its writer."""
    layout, weights, inputs = SCHEMES[name]
    args = QuantizationArgs(**weights)
    activations = QuantizationArgs(**inputs) if inputs else None
    whole = QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)
    compressor = BaseCompressor.get_value_from_registry(layout)
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale, zero = calculate_qparams(*ranges(weight, args), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        tensors = compressor.compress(state, whole)
        numbers = compressor.decompress(tensors, whole)["weight"]
        if inputs and not inputs["dynamic"]:
            tensors["input_scale"] = torch.tensor([0.5])
        return {key: tensor.contiguous() for key, tensor in tensors.items()}, numbers.float()

    return config, write


@pytest.fixture(scope="module")
def make_folders(
    make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path]]:
    made: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in made:
            folder = tmp_path_factory.mktemp("compressed")
            made[name] = write_checkpoint(make_checkpoint("llama", **SIZES), folder, *scheme(name))
        return made[name]

    return make


@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_and_tokens(name: str, make_folders: Callable[[str], tuple[Path, Path]]) -> None:
    quantized, plain = make_folders(name)
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        expected = linear_layers(load(plain, rank, world_size))
        for key, layer in linear_layers(load(quantized, rank, world_size)).items():
            assert hasattr(layer, "quantized_weight") == ("layers" in key)
            torch.testing.assert_close(weight_of(layer), weight_of(expected[key]), msg=key)
    with LLM(quantized, num_kv_blocks=32, max_model_len=64) as llm:
        for prompt, tokens in zip(PROMPTS, answers(llm), strict=True):
            assert_same_greedy(plain, prompt, tokens, 12)
