"""Quantized weights: every format means what its writer meant, on every rank, and the tokens are
those of transformers on the same numbers in floating point."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import assert_same_greedy
from quantized_checkpoints import awq, fp8, gptq, write_checkpoint
from ranks import ThreadExecutor
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.extras.quantization.config import check_pattern, get_quantization_config, matches
from nanoserve.extras.quantization.online import (
    OnlineConfig,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from nanoserve.kernels.quantized import QuantizedWeight
from nanoserve.layers import LayerConfig, LinearBase
from nanoserve.models.base import Model
from nanoserve.models.loader import load_model
from nanoserve.models.moe import ExpertsLinear
from nanoserve.parallel import ParallelState

MakeCheckpoint = Callable[..., Path]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[5, 6, 7, 8, 9], [11, 12] * 9, [200]]
SIZES = {"hidden_size": 64, "intermediate_size": 128}
FORMATS: dict[str, Any] = {
    "gptq": gptq(),
    "gptq, 8 bits": gptq(bits=8, group_size=32),
    "gptq, zeros": gptq(sym=False),
    "gptq, 8 bits, zeros": gptq(bits=8, sym=False),
    "gptq, one group": gptq(group_size=-1),
    "gptq_v2, zeros": gptq(sym=False, version="gptq_v2"),
    "gptq, act-order": gptq(desc_act=True),
    "gptq, 8 bits, act-order": gptq(bits=8, desc_act=True, sym=False),
    "awq": awq(),
    "awq, large groups": awq(group_size=32),
    "fp8": fp8(),
    "fp8, static": fp8("static", is_flat=True),
    "fp8, blocks": fp8(block=[32, 32]),
}


@pytest.fixture(scope="session")
def make_quantized(
    make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """make_quantized("awq", "llama") -> folders with codes and with the numbers they stand for."""

    @lru_cache(maxsize=None)
    def make(name: str, model_type: str = "llama", **overrides: Any) -> tuple[Path, Path]:
        source = make_checkpoint(model_type, **{**SIZES, **overrides})
        return write_checkpoint(source, tmp_path_factory.mktemp("quantized"), *FORMATS[name])

    return make


def load(folder: Path, rank: int = 0, world_size: int = 1, **options: Any) -> Model:
    """The model as it is loaded, before weights are packed."""
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(max_model_len=64, **options).resolve(model_config)
    parallel = ParallelState(rank, world_size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuantizedWeight, "prepare", lambda self: None)
        return load_model(config, model_config, LayerConfig(parallel=parallel), use_tqdm=False)


def linear_layers(model: Model) -> dict[str, LinearBase]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LinearBase)}


def weight_of(layer: LinearBase) -> Tensor:
    """[out, in], whatever the layer keeps."""
    if hasattr(layer, "quantized_weight"):
        return layer.quantized_weight.dequantize()
    return layer.weight


def answers(llm: LLM) -> list[list[int]]:
    return [list(done.outputs[0].token_ids) for done in llm.generate(PROMPTS, GREEDY)]


# -- formats --


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", [name for name in FORMATS if "order" not in name])
def test_codes_mean_what_was_written(
    name: str, world_size: int, make_quantized: Callable[..., tuple[Path, Path]]
) -> None:
    """Each rank has its part of the numbers, bit for bit."""
    quantized, plain = make_quantized(name)
    for rank in range(world_size):
        expected = linear_layers(load(plain, rank, world_size))
        layers = linear_layers(load(quantized, rank, world_size))
        for key, layer in layers.items():
            assert torch.equal(weight_of(layer), weight_of(expected[key])), key
        names = [key.rpartition(".")[2] for key in layers if hasattr(layers[key], "quantized_weight")]
        assert set(names) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}


@pytest.mark.parametrize("name", [name for name in FORMATS if "order" in name])
def test_with_act_order_columns_are_sorted_by_group(
    name: str, make_quantized: Callable[..., tuple[Path, Path]]
) -> None:
    quantized, plain = make_quantized(name)
    expected, layers = linear_layers(load(plain)), linear_layers(load(quantized))
    for key, layer in layers.items():
        assert torch.equal(weight_of(layer), weight_of(expected[key])), key
    order = layers["model.layers.0.self_attn.qkv_proj"].quantized_weight.order
    assert sorted(order.tolist()) == list(range(64)) != order.tolist()
    with pytest.raises(ValueError, match="o_proj: with act-order.*tensor_parallel_size=1"):
        load(quantized, 0, 2)


@pytest.mark.parametrize("name", ["gptq", "gptq, 8 bits", "awq", "fp8"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_are_quantized(
    name: str, model_type: str, make_quantized: Callable[..., tuple[Path, Path]]
) -> None:
    quantized, plain = make_quantized(name, model_type, num_local_experts=4) if (
        model_type == "mixtral"
    ) else make_quantized(name, model_type, num_experts=4, moe_intermediate_size=64)
    for rank in range(2):
        expected, layers = linear_layers(load(plain, rank, 2)), linear_layers(load(quantized, rank, 2))
        experts = {key for key, layer in layers.items() if isinstance(layer, ExpertsLinear)}
        assert len(experts) == 4
        for key, layer in layers.items():
            assert hasattr(layer, "quantized_weight") or key not in experts
            assert torch.equal(weight_of(layer), weight_of(expected[key])), key
    with LLM(quantized, num_kv_blocks=32, max_model_len=64) as llm:
        for prompt, tokens in zip(PROMPTS, answers(llm), strict=True):
            assert_same_greedy(plain, prompt, tokens, 12)
