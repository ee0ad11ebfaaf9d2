"""Writers of quantized checkpoints, each beside what it stands for in floating point.

    quantized, plain = write(folder, "gptq", bits=4, group_size=16)

`plain` holds the numbers that the codes mean, (code - zero) * scale, for transformers to run. The
writers are written from the formats' own tools, one number after the other where the readers work
on whole tensors:

    GPTQ   GPTQModel, gptqmodel/nn_modules/qlinear/__init__.py, pack_block, and
           utils/model.py, convert_gptq_v2_to_v1_format
    AWQ    AutoAWQ, awq/modules/linear/gemm.py, WQLinear_GEMM.from_linear
    FP8    transformers, integrations/finegrained_fp8.py; AutoFP8, auto_fp8/quantize.py

Files of compressed-tensors are written by that package: see test_quantization_files.py.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.kernels.quantized import QuantizedWeight
from nanoserve.layers import LayerConfig, LinearBase
from nanoserve.models.base import Model
from nanoserve.models.loader import load_model
from nanoserve.parallel import ParallelState

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = [[5, 6, 7, 8, 9], [11, 12] * 9, [200]]
SIZES = {"hidden_size": 64, "intermediate_size": 128}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map
# (name of the matrix, weight [outputs, inputs]) -> tensors of the checkpoint, what they stand for
Writer = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor]]


def write_checkpoint(
    source: Path,
    folder: Path,
    config: dict[str, Any],
    writer: Writer,
    *ignored: str,
    with_head: bool = False,
) -> tuple[Path, Path]:
    """The folders of a quantized copy of `source` and of what it stands for. The embedding, the
    head (unless `with_head`), routers, and matrices whose name has an `ignored` part stay as they
    are."""
    quantized, plain = folder / "quantized", folder / "plain"
    shutil.copytree(source, plain)
    tensors = load_file(source / "model.safetensors")
    coded: dict[str, Tensor] = {}
    for name, weight in tensors.items():
        matrix = name.removesuffix(".weight")
        kept = ("embed", "mlp.gate.", "moe.gate.", *ignored, *["lm_head"] * (not with_head))
        if weight.dim() == 2 and not any(part in name for part in kept):
            parts, tensors[name] = writer(matrix, weight.float())
            coded.update({f"{matrix}.{key}": part for key, part in parts.items()})
        else:
            coded[name] = weight
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    shutil.copytree(source, quantized)
    save_file(coded, quantized / "model.safetensors", {"format": "pt"})
    settings = json.loads((source / "config.json").read_text())
    settings["quantization_config"] = config
    (quantized / "config.json").write_text(json.dumps(settings))
    return quantized, plain


def round_to_codes(
    weight: Tensor, bits: int, group_of: Tensor, is_symmetric: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [outputs, inputs] from 0 on, scales and zeros [outputs, groups]."""
    num_groups, most = int(group_of.max()) + 1, 2**bits - 1
    scales, zeros = torch.empty(2, len(weight), num_groups).unbind()
    for group in range(num_groups):
        part = weight[:, group_of == group]
        if is_symmetric:
            scales[:, group] = part.abs().amax(1) * 2 / most
            zeros[:, group] = 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / most
            zeros[:, group] = (-low / scales[:, group]).round()
    scales = scales.half().float()  # as the files have them
    codes = (weight / scales[:, group_of]).round() + zeros[:, group_of]
    return codes.clamp(0, most).long(), scales, zeros.long()


def decode(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    return (codes - zeros[:, group_of]).float() * scales[:, group_of]


def pack(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[n, m] -> int32 [n, m * bits / 32]: place i of an int32 has code order[i] of each run."""
    per_int32 = 32 // bits
    order = order or tuple(range(per_int32))
    packed = torch.zeros(len(codes), codes.shape[1] // per_int32, dtype=torch.int64)
    for column in range(packed.shape[1]):
        for place, number in enumerate(order):
            packed[:, column] |= codes[:, column * per_int32 + number] << (bits * place)
    return packed.to(torch.int32)  # of numbers from 2**31 on, the bits


def groups_of(num_inputs: int, group_size: int) -> Tensor:
    return torch.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)


def gptq(
    bits: int = 4,
    group_size: int = 16,
    sym: bool = True,
    desc_act: bool = False,
    version: str = "gptq",
    **more: Any,
) -> tuple[dict[str, Any], Writer]:
    """A GPTQ config and its writer."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "sym": sym}
    config |= {"desc_act": desc_act, "checkpoint_format": version, **more}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        group_of = groups_of(weight.shape[1], group_size)
        if desc_act:  # one order for all matrices that read the same inputs
            generator = torch.Generator().manual_seed(weight.shape[1])
            group_of = group_of[torch.randperm(weight.shape[1], generator=generator)]
        codes, scales, zeros = round_to_codes(weight, bits, group_of, sym)
        packed_zeros = pack(zeros.t(), bits)
        if version == "gptq":
            packed_zeros -= {4: 0x11111111, 8: 0x01010101}[bits]
        return {
            "qweight": pack(codes, bits).t().contiguous(),
            "qzeros": packed_zeros,
            "scales": scales.t().contiguous().half(),
            "g_idx": group_of.to(torch.int32),
        }, decode(codes, scales, zeros, group_of)

    return config, write


def awq(group_size: int = 16, **more: Any) -> tuple[dict[str, Any], Writer]:
    """An AWQ config and its writer."""
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True}
    config |= {"version": "gemm", **more}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        group_of = groups_of(weight.shape[1], group_size)
        codes, scales, zeros = round_to_codes(weight, 4, group_of, False)
        return {
            "qweight": pack(codes.t(), 4, AWQ_ORDER),
            "qzeros": pack(zeros.t(), 4, AWQ_ORDER),
            "scales": scales.t().contiguous().half(),
        }, decode(codes, scales, zeros, group_of)

    return config, write


def fp8(
    activation_scheme: str = "dynamic", block: list[int] | None = None, is_flat: bool = False
) -> tuple[dict[str, Any], Writer]:
    """An FP8 config and its writer. `is_flat`: a scale has shape [1] and not []."""
    config: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": activation_scheme}
    config |= {"weight_block_size": block} if block else {}

    def write(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = block or weight.shape
        scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
        codes, numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn), weight.clone()
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[part].abs().max() / 448
                codes[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
                numbers[part] = codes[part].float() * scales[i, j]
        tensors = {"weight": codes}
        if block:
            return {**tensors, "weight_scale_inv": scales}, numbers
        tensors["weight_scale"] = scales.reshape(1) if is_flat else scales.reshape(())
        if activation_scheme == "static":
            tensors["input_scale"] = torch.tensor(0.5)
        return tensors, numbers

    return config, write


# -- reading them --


def load(folder: Path, rank: int = 0, tp_size: int = 1, **options: Any) -> Model:
    """The model as it is loaded, before weights are packed."""
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(max_model_len=64, **options).resolve(model_config)
    parallel = ParallelState(rank, tp_size)
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


def change(folder: Path, tmp_path: Path, **keys: Any) -> Path:
    """A copy whose quantization_config has other keys; None: without this key."""
    copy = Path(shutil.copytree(folder, tmp_path / "changed", dirs_exist_ok=True))
    settings = json.loads((folder / "config.json").read_text())
    section = {**settings["quantization_config"], **keys}
    settings["quantization_config"] = {k: v for k, v in section.items() if v is not None}
    (copy / "config.json").write_text(json.dumps(settings))
    return copy


def any_json(keys: list[str]) -> st.SearchStrategy[Any]:
    """Values as they may stand in config.json, and near misses of good ones."""
    scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text()
    scalars |= st.sampled_from(["re:(", "re:.*", "+:.*", "gptq", "static", 4, 8, 16, 32, 128])
    objects = st.sampled_from(keys)
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(objects, inner, max_size=3),
        max_leaves=6,
    )


def read_or_refuse(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Build the model with other keys in quantization_config; a ValueError is an answer, too."""
    hf = json.loads((folder / "config.json").read_text())
    edit(hf["quantization_config"])
    config = EngineConfig(max_model_len=64, load_format="dummy")
    with contextlib.suppress(ValueError):
        model_config = ModelConfig.from_folder(folder, hf)
        load_model(config.resolve(model_config), model_config, LayerConfig(), use_tqdm=False)
