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

from nanoserve.config import INT64, check_bool, check_number
from nanoserve.exceptions import VLLMValidationError, brief
from nanoserve.inputs import NAME_LIMIT


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
        check_number("lora_int_id", self.lora_int_id, int, 1, INT64, "1 to 2**63 - 1")
        for name, kinds in (("lora_name", str), ("lora_path", (str, os.PathLike))):
            value = getattr(self, name)
            if not isinstance(value, kinds):
                raise TypeError(f"{name} must be a string, got {brief(value)}.")
        if not 0 < len(self.lora_name) <= NAME_LIMIT:
            allowed = f"a name of 1 to {NAME_LIMIT} characters"
            raise ValueError(f"lora_name is {brief(self.lora_name)}; allowed: {allowed}.")
        object.__setattr__(self, "lora_path", str(self.lora_path))
        if not self.lora_path:
            raise ValueError("lora_path is an empty string. Give the folder of the adapter.")
        if not isinstance(self.base_model_name, (str, type(None))):
            given = brief(self.base_model_name)
            raise TypeError(f"base_model_name must be a string or None, got {given}.")
        check_bool("load_inplace", self.load_inplace)
        if self.load_inplace:
            raise VLLMValidationError(
                "load_inplace is True, and an adapter never changes here. Give the new weights a "
                "new lora_int_id.",
                parameter="load_inplace",
            )

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return str(self.lora_path)
