"""Files that the package compressed-tensors has written: the numbers that it reads back are ours,
and so are the tokens of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("compressed_tensors")

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import assert_same_greedy
from quantized_checkpoints import (
    PROMPTS,
    SIZES,
    answers,
    any_json,
    change,
    linear_layers,
    load,
    read_or_refuse,
    weight_of,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file
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
def test_the_numbers_of_each_scheme(
    name: str, make_folders: Callable[[str], tuple[Path, Path]]
) -> None:
    quantized, plain = make_folders(name)
    for rank, tp_size in ((0, 1), (0, 2), (1, 2)):
        expected = linear_layers(load(plain, rank, tp_size))
        for key, layer in linear_layers(load(quantized, rank, tp_size)).items():
            assert hasattr(layer, "quantized_weight") == ("layers" in key)
            torch.testing.assert_close(weight_of(layer), weight_of(expected[key]), msg=key)


@pytest.mark.parametrize("name", ["w4a16, zeros", "w8a8", "fp8, static"])
def test_greedy_tokens_are_those_of_transformers(
    name: str, make_folders: Callable[[str], tuple[Path, Path]]
) -> None:
    quantized, plain = make_folders(name)
    with LLM(quantized, num_kv_blocks=32, max_model_len=64) as llm:
        for prompt, tokens in zip(PROMPTS, answers(llm), strict=True):
            assert_same_greedy(plain, prompt, tokens, 12)


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("w4a16", {"format": "marlin-24"}, "format 'marlin-24' with weights of type 'int' and 4"),
        ("w4a16", {"format": "int-quantized"}, "supported: float-quantized: float 8"),
        ("w4a16", {"sparsity_config": {"format": "sparse-24"}}, "sparse and transformed"),
        ("w4a16", {"transform_config": {"config_groups": {}}}, "sparse and transformed"),
        ("w4a16", {"config_groups": None}, "has no 'config_groups'"),
        ("w4a16", {"config_groups": {"group_0": 5}}, r"group_0 is 5; allowed: an object"),
        ("w4a16", {"config_groups": {"g": {"targets": "Linear"}}}, "targets is .*a list"),
        ("w4a16", {"config_groups": {"g": {"targets": ["Linear"]}}}, "has no 'weights'"),
        ("w4a16", {"ignore": ["re:("]}, "no regular expression"),
        ("w4a16", {"ignore": []}, "missing: lm_head.weight_packed"),
        ("w4a16", {"weights": {"num_bits": 3}}, "3 bits is not supported"),
        ("w4a16", {"weights": {"num_bits": 8}}, "weight_packed in .* has shape"),
        ("w4a16", {"weights": {"group_size": 64}}, "weight_scale in .* has shape"),
        ("w4a16", {"weights": {"actorder": "group"}}, "actorder is 'group'; allowed: weight"),
        ("w4a16", {"weights": {"symmetric": False}}, "missing: .*weight_zero_point"),
        (
            "w8a8",
            {"weights": {"strategy": "block", "block_structure": [8, 8]}},
            "strategy is 'block'",
        ),
        ("w8a8", {"input_activations": {"num_bits": 4}}, "num_bits is 4; allowed: 8"),
        ("fp8", {"output_activations": {"num_bits": 8}}, "output_activations is .*allowed: null"),
        ("fp8", {"weights": {"symmetric": False}}, "symmetric is False"),
        ("fp8", {"input_activations": {**STATIC, "type": "float"}}, "missing: .*input_scale"),
    ],
)
def test_what_a_scheme_may_not_say(
    name: str,
    keys: dict[str, Any],
    message: str,
    make_folders: Callable[[str], tuple[Path, Path]],
    tmp_path: Path,
) -> None:
    folder = make_folders(name)[0]
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    group = section["config_groups"]["group_0"]
    inner = {"weights", "input_activations", "output_activations"} & keys.keys()
    for key in inner:  # of the group, not of the whole
        old = (group.get(key) or {}) if key == "weights" else {}
        keys = {"config_groups": {"group_0": {**group, key: {**old, **keys[key]}}}}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        load(change(folder, tmp_path, **keys))


KEYS = [
    *("num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder"),
    *("dynamic", "format", "targets", "weights", "input_activations", "output_activations"),
]


@given(st.dictionaries(st.sampled_from(KEYS), any_json(KEYS), max_size=3), st.booleans())
@settings(max_examples=40)
def test_any_scheme_is_read_or_refused(
    make_folders: Callable[[str], tuple[Path, Path]], keys: dict[str, Any], is_inner: bool
) -> None:
    def edit(section: dict[str, Any]) -> None:
        group = section["config_groups"]["group_0"]
        (group["weights"] if is_inner else group).update(keys)

    read_or_refuse(make_folders("w4a16")[0], edit)


def test_a_shape_that_differs(
    make_folders: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(make_folders("w4a16")[0], tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_shape"
    tensors[name] += 1
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} is \[129, 65\], and config.json describes"):
        load(copy)


def test_schemes_for_some_layers(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    """A name says more than a class; the head may be quantized, too."""
    (config, four), (other, eight) = scheme("w4a16"), scheme("w8a8")
    groups = {
        "group_0": config["config_groups"]["group_0"],
        "group_1": {
            **other["config_groups"]["group_0"],
            "targets": ["re:.*mlp.*", "lm_head"],
            "format": "int-quantized",
        },
    }
    config = {**config, "config_groups": groups, "ignore": [], "kv_cache_scheme": {"num_bits": 8}}

    def write(name: str, weight: Tensor) -> Any:
        return (eight if "mlp" in name or "lm_head" in name else four)(name, weight)

    source = make_checkpoint("llama", **SIZES)
    quantized, plain = write_checkpoint(source, tmp_path, config, write, with_head=True)
    expected = linear_layers(load(plain))
    for key, layer in linear_layers(load(quantized)).items():
        assert hasattr(layer, "quantized_weight") == (key != "model.embed_tokens")
        torch.testing.assert_close(weight_of(layer), weight_of(expected[key]), msg=key)
