"""Which adapters are in main memory?

An adapter is read in the thread of the first request that wants it, so no step waits for a file,
and a bad one is refused at the door. Its weights stay while

    a request has it                 the sequences hold the Adapter
    it is one of the max_cpu_loras   that were wanted last
    it is in a slot of the device

and are read again when a request wants the adapter after that. Requests of the same lora_int_id
share one Adapter. Its key, a hash of its files, is a part of the block hashes of its sequences. So
what was computed with other weights is never found, also not by an adapter that gets the number of
a removed one, or after a restart, in blocks that were kept on a disk.

vLLM: vllm/lora/worker_manager.py, model_manager.py (V0 and 0.32).
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from functools import partial
from weakref import WeakValueDictionary

from nanoserve.chapters.lora.peft_helper import LoRAModel, Shape, read_adapter
from nanoserve.chapters.lora.request import LoRARequest
from nanoserve.config import EngineConfig
from nanoserve.layers import ColumnParallelLinear, LayerConfig, RowParallelLinear
from nanoserve.models.config import ModelConfig, resolve_folder
from nanoserve.models.loader import plan_model
from nanoserve.models.registry import build_model


class Adapter:
    """The weights of an adapter, in main memory."""

    def __init__(self, request: LoRARequest, weights: LoRAModel, key: str) -> None:
        self.request, self.weights, self.key = request, weights, key


class Adapters:
    """The adapters of one engine, by lora_int_id. Any thread may call it."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        """Raises ValueError if the model cannot have adapters."""
        self.shapes, self.config = adaptable_shapes(config, model_config), config
        self.known: WeakValueDictionary[int, Adapter] = WeakValueDictionary()
        self.kept: OrderedDict[int, Adapter] = OrderedDict()  # the least recently wanted first
        self.lock = threading.Lock()

    def get(self, request: LoRARequest) -> Adapter:
        """The adapter, read if it is not in memory. Raises ValueError or TypeError for one that
        cannot be used, or whose number another one has."""
        if not isinstance(request, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest, got {request!r}.")
        with self.lock:
            number = request.lora_int_id
            if (adapter := self.known.get(number)) is None:
                folder = resolve_folder(request.lora_path)
                weights = read_adapter(folder, self.shapes, self.config.max_lora_rank)
                files = b"".join(file.read_bytes() for file in sorted(folder.glob("adapter_*")))
                adapter = Adapter(request, weights, hashlib.sha256(files).hexdigest())
            if adapter.request != request:
                raise ValueError(f"{request}: {adapter.request} has this number. Give it another.")
            self.known[number] = self.kept[number] = adapter
            self.kept.move_to_end(number)
            if len(self.kept) > (self.config.max_cpu_loras or self.config.max_loras):
                self.kept.popitem(last=False)
        return adapter

    def remove(self, number: int) -> bool:
        """Forget an adapter; requests that have it go on. False if it is not known."""
        with self.lock:
            self.kept.pop(number, None)
            return self.known.pop(number, None) is not None


def adaptable_shapes(config: EngineConfig, model_config: ModelConfig) -> dict[str, Shape]:
    """(outputs, inputs) of each matrix that can have an adapter, by its name in the checkpoint.
    Raises ValueError for a model that transformers runs."""
    model = plan_model(partial(build_model, model_config), LayerConfig())
    shapes = {
        matrix.name: matrix.shape
        for name, layer in (model.named_modules() if model else ())
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear))
        for matrix in layer.matrices(name)
    }
    if not shapes or config.model_impl == "transformers":
        raise ValueError("enable_lora needs a model whose linear layers are nanoserve's own.")
    return shapes
