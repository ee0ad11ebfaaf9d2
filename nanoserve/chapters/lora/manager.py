"""Which adapters are in slots of the device, and who waits for one?

The device has `max_loras` slots, so that many adapters can be in one step. With max_loras=2 and
adapters A, B, C:

    waiting (by urgency)      slots             what happens
    A1                        A: 0              A gets a free slot
    B1  A2                    A: 0  B: 1        A2 joins at once
    C1  A3  B2  (no adapter)  A: 0  B: 1        no slot for C: the slot held longest, A's, is to be
                                                drained. So A3 waits; B2 and the last one run
    C1  A3                    C: 0  B: 1        A1 and A2 have ended: C takes the slot, B is next
                                                to be drained, for A3

So an adapter that does not fit waits and keeps nobody waiting but the requests of one other
adapter, less urgent ones; it gets the slot when the running requests of that adapter have ended.
(vLLM drains nothing: there, two busy adapters can keep a third one waiting for ever.)

vLLM: vllm/lora/worker_manager.py, model_manager.py; vllm/v1/core/sched/scheduler.py (V1).
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from itertools import count, islice

from nanoserve.chapters.lora.peft_helper import LoRAModel, Shape, read_adapter
from nanoserve.chapters.lora.request import LoRARequest
from nanoserve.config import EngineConfig
from nanoserve.layers import ColumnParallelLinear, LayerConfig, RowParallelLinear
from nanoserve.models.config import ModelConfig
from nanoserve.models.loader import plan_model
from nanoserve.models.registry import ModelRegistry, build_model
from nanoserve.sequence import Sequence


def adaptable_shapes(config: EngineConfig, model_config: ModelConfig) -> dict[str, Shape]:
    """(outputs, inputs) of each matrix that can have an adapter, by its name in the checkpoint.
    Raises ValueError for a model that transformers runs."""
    architecture = model_config.architecture
    if config.model_impl == "transformers" or ModelRegistry.get(architecture) is None:
        raise ValueError(
            f"enable_lora is True, but {architecture} runs through transformers here, whose layers "
            "take no adapters. Merge the adapter into the checkpoint (peft: merge_and_unload)."
        )
    plan = plan_model(partial(build_model, model_config), LayerConfig())
    shapes = {
        matrix.name: matrix.shape
        for name, layer in (plan.named_modules() if plan else ())
        if isinstance(layer, (ColumnParallelLinear, RowParallelLinear))
        for matrix in layer.matrices(name)
    }
    if not shapes:
        raise ValueError(
            f"enable_lora is True, but {architecture} has no linear layers of nanoserve.layers, "
            "which alone take adapters."
        )
    return shapes


class Adapter:
    """An adapter that the engine knows. Its weights are on the CPU."""

    def __init__(self, request: LoRARequest, weights: LoRAModel, key: int) -> None:
        self.request, self.weights = request, weights
        self.key = key  # no other adapter of this engine has it, or has had it
        self.slot = -1  # on the device; -1: none
        self.may_run = False  # in the step that is being decided


class Adapters:
    """The adapters that requests may ask for, by lora_int_id. Any thread may call it."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        """Raises ValueError if the model cannot have adapters."""
        self.shapes = adaptable_shapes(config, model_config)
        self.max_lora_rank = config.max_lora_rank
        self.known: dict[int, Adapter] = {}
        self._keys, self._lock = count(1), threading.Lock()

    def get(self, lora_request: LoRARequest) -> Adapter:
        """The adapter, whose files are read if it is new. Raises ValueError or TypeError for one
        that cannot be used, or whose number another one has."""
        if not isinstance(lora_request, LoRARequest):
            raise TypeError(f"lora_request must be a LoRARequest, got {lora_request!r}.")
        with self._lock:
            adapter = self.known.get(lora_request.lora_int_id)
            if adapter is None:
                files = read_adapter(lora_request.path, self.shapes, self.max_lora_rank)
                adapter = Adapter(lora_request, files.load(), next(self._keys))
                self.known[lora_request.lora_int_id] = adapter
        if adapter.request != lora_request:
            raise ValueError(
                f"lora_int_id {lora_request.lora_int_id} is that of {adapter.request}, not of "
                f"{lora_request}. Give each adapter a number of its own."
            )
        return adapter


class Slots:
    """Who has which slot. Invariant: an adapter that a running or swapped sequence wants has one;
    no two adapters have the same."""

    def __init__(self, max_loras: int) -> None:
        self.max_loras = max_loras
        # The adapters that have a slot: idle ones first, the least recently used at the front;
        # then those in use, the first to get its slot at the front.
        self.slots: OrderedDict[Adapter, None] = OrderedDict()

    def set_gates(
        self, running: list[Sequence], swapped: list[Sequence], waiting: list[Sequence]
    ) -> None:
        """Give slots to the adapters of `waiting`, which is sorted by urgency, and open the gates
        of those that can be in the coming step. What runs or is swapped out keeps its slot."""
        taken = {seq.adapter for seq in swapped if seq.adapter is not None}  # not to be drained now
        in_use = {seq.adapter for seq in running if seq.adapter is not None} | taken
        wanted = dict.fromkeys(seq.adapter for seq in waiting if seq.adapter is not None)
        for adapter in [each for each in self.slots if each in in_use]:
            self.slots.move_to_end(adapter)
        for adapter in taken:
            adapter.may_run = True
        drained: set[Adapter] = set()
        for adapter in wanted:
            if adapter in taken:
                continue
            adapter.may_run = False
            if adapter in drained:
                continue
            if adapter in self.slots or self._take_slot(adapter, in_use | taken):
                taken.add(adapter)
                adapter.may_run = True
            else:
                rest = (each for each in self.slots if each not in taken and each not in drained)
                drained.update(islice(rest, 1))

    def _take_slot(self, adapter: Adapter, busy: set[Adapter]) -> bool:
        """Give the adapter a free slot, or that of one that is not busy. False if all are busy."""
        if len(self.slots) == self.max_loras:
            idle = next((each for each in self.slots if each not in busy), None)
            if idle is None:
                return False
            del self.slots[idle]
            idle.slot, idle.may_run = -1, False
        taken = {each.slot for each in self.slots}
        adapter.slot = next(slot for slot in range(self.max_loras) if slot not in taken)
        self.slots[adapter] = None
        return True
