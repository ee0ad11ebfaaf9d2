"""On which device does the model run?

EngineConfig.device is a name, and "auto" is the usual one. Here it becomes a torch.device:

    "auto"      on a machine with a CUDA GPU: cuda, on any other: cpu
    "cuda:1"    the second GPU, if torch sees it; else a ValueError
    "cpu"       the CPU

What the engine then does on that device, it does within `current_device`.

Left out: devices of other makers.

vLLM: vllm/platforms/__init__.py, vllm/config.py `DeviceConfig` (V0); vllm/config/device.py (V1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch

from nanoserve.config import EngineConfig


def choose_device(wanted: str) -> torch.device:
    """The torch device for EngineConfig.device: "auto" means a CUDA GPU if there is one, else the
    CPU. Raises ValueError if the wanted GPU does not exist."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device is {wanted!r}, but torch sees {torch.cuda.device_count()} CUDA devices. "
            "Use device='cpu' or 'auto', or install a torch built for your driver."
        )
    return device


def with_device(config: EngineConfig) -> EngineConfig:
    """`config` with "auto" replaced by the device that it means on this machine."""
    return replace(config, device=str(choose_device(config.device)))


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which `device` is the current GPU (nothing on a CPU), and torch.autocast of the
    application around it is off: it would give layers a dtype that the KV cache does not have."""
    context = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    return _without_autocast(device, context) if torch.is_autocast_enabled(device.type) else context


@contextmanager
def _without_autocast(
    device: torch.device, context: AbstractContextManager[object]
) -> Iterator[None]:
    with context, torch.autocast(device.type, enabled=False):
        yield
