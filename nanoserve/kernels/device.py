"""On which device does the model run?

EngineConfig.device is a name, and "auto" is the usual one. Here it becomes a torch.device:

    "auto"      on a machine with a CUDA GPU: cuda, on any other: cpu
    "cuda:1"    the second GPU, if torch sees it; else a ValueError
    "cpu"       the CPU

Left out: devices of other makers.

vLLM: vllm/platforms/__init__.py, vllm/config.py `DeviceConfig` (V0); vllm/config/device.py (V1).
"""

from __future__ import annotations

import torch


def choose_device(wanted: str) -> torch.device:
    """The torch device for EngineConfig.device: "auto" means a CUDA GPU if there is one, else the
    CPU. Raises ValueError if the wanted GPU does not exist."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ValueError(f"device is {wanted!r}; allowed: auto, cpu, cuda, cuda:N.") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device is {wanted!r}, but torch sees {torch.cuda.device_count()} CUDA devices. "
            "Use device='cpu' or 'auto', or install a torch built for your driver."
        )
    return device
