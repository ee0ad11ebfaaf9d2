"""Which adapter does a request want?

    llm.generate("Once", params, lora_request=LoRARequest("pirate", 1, "nanoserve/demo/lora"))

A LoRARequest is a name for people, a number for the engine, and a folder. One number always means
one adapter: the blocks of the prefix cache that an adapter has filled are found by it alone.

Left out: `load_inplace` (other weights under the number of before), adapters from the hub, and
vLLM's adapters of experts.

vLLM: vllm/lora/request.py (V0 and V1).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LoRARequest:
    """An adapter, as vLLM's users name it. Raises ValueError or TypeError for a value that is not
    allowed. The folder is looked at when the first request wants the adapter."""

    lora_name: str
    lora_int_id: int  # 1 or more
    lora_path: str | Path  # a folder with adapter_config.json and adapter_model.safetensors
    base_model_name: str | None = None  # for people only
    load_inplace: bool = False  # must be False

    def __post_init__(self) -> None:
        if not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id is {self.lora_int_id!r}; allowed: an int, 1 or more.")
        for name, kinds in (("lora_name", str), ("lora_path", (str, os.PathLike))):
            if not isinstance(value := getattr(self, name), kinds) or not str(value):
                raise TypeError(f"{name} must be a string, not empty, got {value!r}.")
        if self.load_inplace:
            raise ValueError("load_inplace: an adapter never changes here. Give a new lora_int_id.")
        object.__setattr__(self, "lora_path", str(self.lora_path))

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return str(self.lora_path)
