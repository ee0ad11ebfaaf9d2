"""Which adapter does a request want?

    llm.generate("Once", params, lora_request=LoRARequest("pirate", 1, "nanoserve/demo/lora"))

A LoRARequest is a name for people, a number for the engine, and a folder. One number always means
one adapter: the blocks of the prefix cache that an adapter has filled are found by it alone.

Left out: `load_inplace` (other weights under the number of before: give a new number).

vLLM: vllm/lora/request.py (V0 and 0.32).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class LoRARequest:
    """An adapter, as vLLM's users name it. Raises ValueError for a value that is not allowed. The
    folder is looked at when the first request wants the adapter."""

    lora_name: str
    lora_int_id: int  # 1 or more
    lora_path: str | Path  # a folder with adapter_config.json and adapter_model.safetensors
    base_model_name: str | None = field(default=None, compare=False)  # for people only

    def __post_init__(self) -> None:
        if not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise ValueError(f"lora_int_id is {self.lora_int_id!r}; allowed: an int, 1 or more.")
        if not isinstance(self.lora_path, (str, Path)) or not (self.lora_name and self.lora_path):
            raise ValueError(f"lora_name and lora_path must be strings, not empty: {self}.")
        object.__setattr__(self, "lora_path", str(self.lora_path))
