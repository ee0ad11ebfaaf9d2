"""Quantized weights: files of each format mean what their writers say; ranks share them; engines
answer as with the numbers that the codes stand for.

The writers below are written from the formats' own tools (GPTQModel pack_block, AutoAWQ gemm.py,
transformers finegrained_fp8.py, compressed_tensors pack_quantized), matrix by matrix.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoserve import LLM, SamplingParams, chapters
from nanoserve.chapters.quantization.base_config import get_quantization_config
from nanoserve.chapters.quantization.parts import QuantizationOptions
from nanoserve.distributed.parallel import ParallelState
from nanoserve.kernels.quantized import QuantizedWeight
from nanoserve.layers import LayerConfig, LinearBase
from nanoserve.models.config import ModelConfig
from nanoserve.models.loader import load_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
PROMPTS = [[5, 6, 7, 8, 9], [11, 12] * 9, [200]]
SIZES = {"hidden_size": 64, "intermediate_size": 128}
Tensors = dict[str, Tensor]
Written = tuple[Tensors, Tensor]  # tensors of the checkpoint, and the weight that they stand for


def round_to_codes(weight: Tensor, bits: int, group: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [outputs, inputs] from 0 on, scales and zeros [outputs, groups]."""
    parts = [weight[:, group == number] for number in range(int(group.max()) + 1)]
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    scales = ((high - low) / (2**bits - 1)).half().float()  # as the files have them
    zeros = (-low / scales).round()
    codes = (weight / scales[:, group]).round() + zeros[:, group]
    return codes.clamp(0, 2**bits - 1).long(), scales, zeros.long()


def pack(codes: Tensor, bits: int, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[n, m] -> int32 [n, m * bits / 32]: place i of an int32 has code order[i] of each run."""
    runs = codes.unflatten(1, (-1, 32 // bits))[..., list(order[: 32 // bits])]
    shifts = bits * torch.arange(32 // bits)
    return (runs << shifts).sum(-1).to(torch.int32)  # of numbers from 2**31 on, the bits


def write_gptq(config: dict[str, Any], weight: Tensor) -> Written:
    bits, size = config["bits"], config["group_size"]
    group = torch.arange(weight.shape[1]) // (size if size > 0 else weight.shape[1])
    if config.get("desc_act"):  # one order for all matrices that read the same inputs
        generator = torch.Generator().manual_seed(weight.shape[1])
        group = group[torch.randperm(weight.shape[1], generator=generator)]
    codes, scales, zeros = round_to_codes(weight, bits, group)
    packed = pack(zeros.t(), bits)
    if config.get("checkpoint_format") != "gptq_v2":
        packed -= {4: 0x11111111, 8: 0x01010101}[bits]
    tensors = {"qweight": pack(codes, bits).t(), "qzeros": packed, "scales": scales.t().half()}
    meaning = (codes - zeros[:, group]).float() * scales[:, group]
    return {**tensors, "g_idx": group.to(torch.int32)}, meaning


def write_awq(config: dict[str, Any], weight: Tensor) -> Written:
    group, order = torch.arange(weight.shape[1]) // config["group_size"], (0, 2, 4, 6, 1, 3, 5, 7)
    codes, scales, zeros = round_to_codes(weight, 4, group)
    tensors = {"qweight": pack(codes.t(), 4, order), "qzeros": pack(zeros.t(), 4, order)}
    meaning = (codes - zeros[:, group]).float() * scales[:, group]
    return {**tensors, "scales": scales.t().half()}, meaning


def write_fp8(config: dict[str, Any], weight: Tensor) -> Written:
    rows, columns = config.get("weight_block_size") or weight.shape
    blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    meaning = (codes.float() * scales[:, None, :, None]).view(weight.shape)
    tensors = {"weight": codes.view(weight.shape)}
    if "weight_block_size" in config:
        return {**tensors, "weight_scale_inv": scales}, meaning
    if config["activation_scheme"] == "static":
        tensors["input_scale"] = torch.tensor(0.5)
    return {**tensors, "weight_scale": scales.view(())}, meaning


def write_compressed(config: dict[str, Any], weight: Tensor) -> Written:
    scheme = config["config_groups"]["group_0"]["weights"]
    if scheme["type"] == "float":
        scales = weight.abs().amax(1, keepdim=True) / 448
        numbers = (weight / scales).to(torch.float8_e4m3fn)
        return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales
    bits, size = scheme["num_bits"], scheme.get("group_size") or weight.shape[1]
    group = torch.arange(weight.shape[1]) // size
    codes, scales, zeros = round_to_codes(weight, bits, group)
    if scheme["symmetric"]:
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    meaning = (codes - zeros[:, group]).float() * scales[:, group]
    tensors = {"weight_scale": scales}
    if config["format"] == "int-quantized":
        return {**tensors, "weight": (codes - 128).to(torch.int8)}, meaning
    tensors |= {"weight_packed": pack(codes, bits), "weight_shape": torch.tensor(weight.shape)}
    if not scheme["symmetric"]:
        tensors["weight_zero_point"] = pack(zeros.t(), bits).t()
    return tensors, meaning


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    config = {"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"]}
    return {**config, "config_groups": {"group_0": group}}


GPTQ, AWQ = (
    {"quant_method": "gptq", "bits": 4, "group_size": 16},
    {"quant_method": "awq", "bits": 4},
)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
FORMATS: dict[str, tuple[Callable[..., Written], dict[str, Any]]] = {
    "gptq": (write_gptq, GPTQ),
    "gptq 8 bits, v2": (write_gptq, {**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2"}),
    "gptq one group": (write_gptq, {**GPTQ, "group_size": -1}),
    "gptq act-order": (write_gptq, {**GPTQ, "desc_act": True}),
    "gptq rules": (write_gptq, {**GPTQ, "dynamic": {"-:.*down_proj": {}}}),
    "awq": (write_awq, {**AWQ, "group_size": 32, "modules_to_not_convert": ["o_proj"]}),
    "fp8": (write_fp8, FP8),
    "fp8 static": (write_fp8, {**FP8, "activation_scheme": "static"}),
    "fp8 blocks": (write_fp8, {**FP8, "weight_block_size": [16, 32]}),
    "ct fp8": (
        write_compressed,
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "ct int8": (
        write_compressed,
        compressed("int-quantized", num_bits=8, type="int", symmetric=True, strategy="channel"),
    ),
    "ct int4": (
        write_compressed,
        compressed("pack-quantized", num_bits=4, type="int", symmetric=False, group_size=16),
    ),
}
KEPT = {"gptq rules": "down_proj", "awq": "o_proj"}


@pytest.fixture(scope="module")
def make_quantized(
    make_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Path]]:
    """make_quantized("awq") -> folders of a quantized checkpoint, and of what it stands for."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(name: str, family: str = "llama", **more: Any) -> tuple[Path, Path]:
        if (name, family) in made:
            return made[name, family]
        writer, config = FORMATS[name]
        source = make_checkpoint(family, **SIZES, **more)
        folders = quantized, plain = [tmp_path_factory.mktemp("q") / each for each in "qp"]
        tensors = load_file(source / "model.safetensors")
        coded: Tensors = {}
        kept = ("embed", "lm_head", ".gate.", KEPT.get(name, "lm_head"))
        for key, weight in tensors.items():
            if weight.dim() < 2 or any(part in key for part in kept):
                coded[key] = weight
            else:
                parts, tensors[key] = writer(config, weight)
                stem = key.removesuffix(".weight")
                coded |= {f"{stem}.{part}": one.contiguous() for part, one in parts.items()}
        for folder, content in ((quantized, coded), (plain, tensors)):
            shutil.copytree(source, folder)
            save_file(content, folder / "model.safetensors", {"format": "pt"})
        change(quantized, quantization_config=config)
        made[name, family] = quantized, plain
        return tuple(folders)

    return make


def change(folder: Path, **keys: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    return folder


def read_weights(folder: Path, rank: int = 0, size: int = 1, how: str | None = None) -> Tensors:
    """The weight [out, in] of each layer, whatever the layer keeps, as a rank has loaded it."""
    model_config = ModelConfig.from_folder(folder)
    config = QuantizationOptions(max_model_len=64).resolve(model_config)
    layer_config = LayerConfig(parallel=ParallelState(rank, size))
    if (found := get_quantization_config(how, model_config)) is not None:
        layer_config = LayerConfig(
            parallel=layer_config.parallel, linear_method=found.get_linear_method
        )
    with pytest.MonkeyPatch.context() as patch:  # what is prepared has no weight any more
        patch.setattr(QuantizedWeight, "prepare", lambda self: None)
        model = load_model(config, model_config, layer_config)
    layers = [item for item in model.named_modules() if isinstance(item[1], LinearBase)]
    return {
        name: layer.quantized_weight.dequantize()
        if hasattr(layer, "quantized_weight")
        else layer.weight
        for name, layer in layers
    }


@pytest.mark.parametrize("name", FORMATS)
def test_files_mean_what_their_writer_says(
    name: str, make_quantized: Callable[..., tuple[Path, Path]]
) -> None:
    """On one rank, and on each of two."""
    quantized, plain = make_quantized(name)
    for rank, size in ((0, 1), (0, 2), (1, 2)) if "act-order" not in name else ((0, 1),):
        expected = read_weights(plain, rank, size)
        for layer, weight in read_weights(quantized, rank, size).items():
            torch.testing.assert_close(weight, expected[layer], rtol=1e-6, atol=1e-7)


def answer(folder: Path | None, **options: Any) -> tuple[list[list[int]], Tensor]:
    """Greedy tokens, and their log-probabilities."""
    with LLM(folder, num_gpu_blocks_override=64, block_size=4, max_model_len=64, **options) as llm:
        done = [each.outputs[0] for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    found = [
        one[token].logprob
        for each in done
        for one, token in zip(each.logprobs, each.token_ids, strict=True)
    ]
    return [list(each.token_ids) for each in done], torch.tensor(found)


@pytest.mark.parametrize(
    ("name", "family"),
    [("gptq act-order", "llama"), ("awq", "llama"), ("fp8 static", "llama"), ("gptq", "mixtral")],
)
def test_engines_answer_as_with_the_numbers(
    name: str, family: str, make_quantized: Callable[..., tuple[Path, Path]]
) -> None:
    more = {"num_local_experts": 4} if family == "mixtral" else {}
    quantized, plain = make_quantized(name, family, **more)
    (tokens, found), (expected, logprobs) = answer(quantized), answer(plain)
    assert tokens == expected
    torch.testing.assert_close(found, logprobs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", ["int8", "fp8", "int4"])
def test_weights_are_quantized_while_they_are_read(
    how: str, make_checkpoint: Callable[..., Path]
) -> None:
    """Each number is the nearest that its code can say; two ranks have the codes of one."""
    folder = make_checkpoint("qwen3", **SIZES)
    plain, whole = read_weights(folder), read_weights(folder, how=how)
    halves = [read_weights(folder, rank, 2, how) for rank in (0, 1)]
    for name, weight in whole.items():
        reach = (
            weight.abs().amax(1, keepdim=True) * {"int8": 1 / 127, "fp8": 1 / 8, "int4": 1 / 4}[how]
        )
        assert ((weight - plain[name]).abs() <= reach * 0.6).all()
        assert torch.equal(weight, plain[name]) == name.endswith(("embed_tokens", "lm_head"))
        if name.endswith("down_proj"):
            torch.testing.assert_close(torch.cat([half[name] for half in halves], 1), weight)
    if how == "int8":
        assert answer(folder, quantization=how)[0] == answer(folder)[0]  # near enough, here


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # names: in config.json; options
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, {}),
    "awq": (GPTQ, {"quantization": "awq"}),
    "bits is 3": ({**GPTQ, "bits": 3}, {}),
    "group_size": ({"quant_method": "gptq", "bits": 4}, {}),
    "gemv": ({**AWQ, "group_size": 32, "version": "gemv"}, {}),
    "sparse-24": (compressed("sparse-24", num_bits=8, type="float"), {}),
    "one product": ({**FP8, "ignored_layers": ["q_proj"]}, {}),
    "qweight": (GPTQ, {}),  # but the files are of another format
    "groups of 48": ({**GPTQ, "group_size": 48}, {"load_format": "dummy"}),
    "transformers": (FP8, {"model_impl": "transformers"}),
    "int3": ({}, {"quantization": "int3"}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    config, options = REFUSED[what]
    folder = Path(shutil.copytree(make_checkpoint("llama", **SIZES), tmp_path / "copy"))
    with pytest.raises(ValueError, match=what):
        LLM(change(folder, quantization_config=config), **options)


def test_without_the_chapter(
    make_quantized: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantized checkpoint is refused, and so is the option: nothing is read wrongly."""
    monkeypatch.delitem(chapters.CHAPTERS, "quantization")
    for name in ("gptq", "fp8", "ct int8"):
        for options in ({}, {"model_impl": "transformers"}):
            with pytest.raises(ValueError, match="weight"):
                LLM(make_quantized(name)[0], **options)
    with pytest.raises(ValueError, match="quantization"):
        LLM(quantization="int8")
