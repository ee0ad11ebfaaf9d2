"""What may the folder of an adapter say?

PEFT writes two files:

    adapter_config.json         {"peft_type": "LORA", "r": 8, "lora_alpha": 16,
                                 "target_modules": ["q_proj", "v_proj"], ...}
    adapter_model.safetensors   base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight
                                [8, in], and ...lora_B.weight [out, 8]; and so on

A model with half of an adapter, or with one that asked for other arithmetic, still talks, only
nonsense. So a tensor that is missing, unexpected or of another shape is an error, and so is each
key that is not in KNOWN, unless its value switches it off: use_dora, modules_to_save, lora_bias,
fan_in_fan_out, layer_replication, ... and whatever PEFT will invent.

Which layers have an adapter is said by the tensors, not by target_modules.

vLLM: vllm/lora/peft_helper.py, lora_model.py (0.32); vllm/lora/peft_helper.py, models.py (V0).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from nanoserve.models.config import read_json

PREFIX = "base_model.model."  # of every tensor: PEFT's own two modules around the model
ADVICE = "Merge the adapter into the checkpoint (peft: merge_and_unload) and give that as model."
# The keys that are used here (up to bias), and those that change nothing when the adapter is used.
KEYS = (
    "peft_type r rank_pattern lora_alpha alpha_pattern use_rslora init_lora_weights bias "
    "task_type auto_mapping base_model_name_or_path inference_mode peft_version revision "
    "lora_dropout target_modules exclude_modules layers_to_transform layers_pattern megatron_core "
    "eva_config velora_config qalora_group_size runtime_config ensure_weight_tying"
)
KNOWN = set(KEYS.split())
# Of init_lora_weights: these change the base model when the training begins.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

Shape = tuple[int, int]  # outputs, inputs


class LoRAWeights(NamedTuple):
    """The adapter of one matrix W [out, in]: W + scaling * B A, as it stands in the file."""

    lora_a: Tensor  # [rank, in]
    lora_b: Tensor  # [out, rank]
    scaling: float


LoRAModel = dict[str, LoRAWeights]  # name of the matrix, "model.layers.0.mlp.up_proj" -> adapter


def read_adapter(folder: Path, shapes: Mapping[str, Shape], max_lora_rank: int) -> LoRAModel:
    """The adapter in a folder, for a model with linear layers of these shapes. Raises ValueError,
    which names the file, for what is missing, damaged, not supported or too large."""
    config, file = read_config(folder), folder / "adapter_model.safetensors"
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}, an adapter's only file of weights, is bad: {error}.") from error
    found: dict[str, dict[str, Tensor]] = {}
    for tensor_name, tensor in tensors.items():
        name, _, part = tensor_name.removeprefix(PREFIX).partition(".lora_")
        name = name if name in shapes else f"model.{name}"  # it was trained on a body
        if name not in shapes or part not in ("A.weight", "B.weight"):
            raise ValueError(f"{file}: no linear layer of the model has {tensor_name}. {ADVICE}")
        found.setdefault(name, {})[part[0]] = tensor
    if not found:
        raise ValueError(f"{file} is an adapter without tensors.")
    return {
        name: make_weights(f"{file}, {name}", pair, shapes[name], config, max_lora_rank)
        for name, pair in found.items()
    }


def read_config(folder: Path) -> dict[str, Any]:
    """adapter_config.json. Raises ValueError, which names the key, for what is not supported."""
    file = folder / "adapter_config.json"
    config = read_json(file)
    asked = {key: value for key, value in config.items() if value and key not in KNOWN}
    patterns = config.get("alpha_pattern") or {}  # names, or regular expressions
    is_bad = {
        "peft_type": config.get("peft_type") != "LORA",
        "lora_alpha": not isinstance(config.get("lora_alpha"), (int, float)),
        "alpha_pattern": not all(key.replace(".", "").isidentifier() for key in patterns),
        "init_lora_weights": str(config.get("init_lora_weights")).lower().startswith(CHANGES_BASE),
        "bias": config.get("bias") not in (None, "none"),
    }
    asked |= {key: config.get(key) for key in is_bad if is_bad[key]}
    for key, value in asked.items():
        raise ValueError(f"{file}: {key} is {value!r}, which is not supported. {ADVICE}")
    return config


def make_weights(
    name: str, pair: dict[str, Tensor], shape: Shape, config: Mapping[str, Any], max_lora_rank: int
) -> LoRAWeights:
    """A, B, and what B A is multiplied by: alpha / r; with rank-stabilized LoRA (arXiv 2312.03732)
    alpha / sqrt(r). Raises ValueError for shapes that do not fit, and for what is no number."""
    if len(pair) < 2:
        raise ValueError(f"{name} lacks lora_{'B' if 'A' in pair else 'A'}. Save it again.")
    shapes, (num_outputs, num_inputs) = [tuple(pair[part].shape) for part in "AB"], shape
    rank = (*shapes[0], 0)[0]
    if shapes != [(rank, num_inputs), (num_outputs, rank)]:
        raise ValueError(f"{name}: shapes {shapes} do not fit a matrix of shape {shape}.")
    if not 1 <= rank <= max_lora_rank:
        raise ValueError(f"{name} has rank {rank}; max_lora_rank is {max_lora_rank}. Raise it.")
    if not config.get("rank_pattern") and rank != config.get("r"):
        raise ValueError(f"{name} has rank {rank}, and r is {config.get('r')}: not its config.")
    if not all(each.is_floating_point() and each.isfinite().all() for each in pair.values()):
        raise ValueError(f"{name}: not all are floating-point numbers (NaN, infinity, or codes).")
    patterns = (config.get("alpha_pattern") or {}).items()  # by the last parts of the name
    alphas = [value for end, value in patterns if name.endswith((f".{end}", f" {end}"))]
    divisor = rank**0.5 if config.get("use_rslora") else rank
    scaling = [*alphas, config["lora_alpha"]][0] / divisor
    return LoRAWeights(pair["A"], pair["B"], scaling)
