"""LoRA adapters as PEFT writes them, and the checkpoints that they make when they are merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
}
PREFIX = "base_model.model."


def write_adapter(
    folder: Path,
    shapes: dict[str, tuple[int, int]],
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8,
    targets: Iterable[str] = ALL,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """An adapter of random numbers. shapes: (outputs, inputs) of the model's matrices, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    targets, tensors = list(targets), {}
    for name, (outputs, inputs) in shapes.items():
        if name.rpartition(".")[2] in targets:
            for part, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                noise = torch.randn(shape, generator=generator) * 0.15
                tensors[f"{PREFIX}{name}.lora_{part}.weight"] = noise.to(dtype)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {**CONFIG, "r": rank, "lora_alpha": alpha, "target_modules": targets, **config}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def shapes_of(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """Of all matrices in the layers of a checkpoint."""
    return {
        name.removesuffix(".weight"): (tensor.shape[0], tensor.shape[1])
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
        if ".layers." in name and tensor.dim() == 2
    }


def merge(checkpoint: Path, adapter: Path, folder: Path, scale: float = 2.0) -> Path:
    """A copy of the checkpoint with W + scale * B A in the place of each W."""
    shutil.copytree(checkpoint, folder)
    weights = load_file(folder / "model.safetensors")
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")].double()
            target = name.removeprefix(PREFIX).replace(".lora_A", "")
            weights[target] = (weights[target].double() + scale * b @ a.double()).float()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
