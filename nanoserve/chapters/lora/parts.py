"""What does LoRA change in the engine?

    config      five lines: the options
    sequence    has an adapter
    engine      make_request takes a lora_request
    scheduler   before a step, adapters of waiting sequences get slots; a sequence waits for its own
    runner      keeps the slots on the device, and knows the slot of each token

*Prefix cache.* What an adapter has computed is of use to this adapter only. Its `key` is part of
the root of its sequences' block hashes (Sequence.extra_keys).

vLLM: vllm/v1/core/sched/scheduler.py, vllm/v1/worker/lora_model_runner_mixin.py (V1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nanoserve.block_manager import BlockManager
from nanoserve.chapters.lora.layers import LoRASlots
from nanoserve.chapters.lora.manager import Adapter, Adapters, Slots
from nanoserve.chapters.lora.peft_helper import LoRAModel
from nanoserve.chapters.lora.request import LoRARequest
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.input_batch import InputBatch
from nanoserve.kernels.cuda_graph import GraphShape
from nanoserve.model_runner import ModelRunner
from nanoserve.models.base import Model
from nanoserve.output_processor import Request
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import SchedulerOutput, Sequence


class LoRANote(NamedTuple):
    """From the scheduler to the runner, with each step."""

    slots: dict[int, int]  # seq_id of a new sequence -> the slot of its adapter; -1: none
    loads: dict[int, LoRAModel]  # slot -> weights that the runner does not have there yet


@dataclass(frozen=True)
class LoRAConfig(EngineConfig):
    enable_lora: bool = False
    """Requests may have LoRA adapters (lora_request)."""
    max_loras: int = 1
    """Adapters in one step at most: slots on the device."""
    max_lora_rank: int = 16
    """Largest rank of an adapter; each slot has room for it."""


@dataclass(eq=False)
class LoRASequence(Sequence):
    adapter: Adapter | None = None


class LoRAEngine(LLMEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.adapters = Adapters(self.config, self.model_config)

    def make_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        **each: Any,
    ) -> Request:
        request = super().make_request(request_id, prompt, params, **each)
        if lora_request is not None:
            adapter = self.adapters.get(lora_request)
            for seq in request.sequences:
                seq.adapter, seq.extra_keys = adapter, (seq.extra_keys, adapter.key)
        return request


class LoRAScheduler(Scheduler):
    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        super().__init__(config, block_manager)
        self.slots = Slots(config.max_loras)
        self.sent: dict[int, Adapter] = {}  # slot -> what the runners have there

    def schedule(self) -> SchedulerOutput:
        self.slots.set_gates(self.running, self.swapped, self.waiting)
        return super().schedule()

    def is_ready(self, seq: Sequence) -> bool:
        return super().is_ready(seq) and (seq.adapter is None or seq.adapter.may_run)

    def make_output(self, step: StepPlan) -> SchedulerOutput:
        """Tell the runner the slots of new sequences, and the weights that are new in a slot."""
        if self.is_restart:  # whether the last step has loaded anything is not known
            self.sent.clear()
        note = step.notes[LoRANote] = LoRANote({}, {})
        for new in step.new_sequences:
            adapter = self.sequences[new.seq_id].adapter
            note.slots[new.seq_id] = -1 if adapter is None else adapter.slot
            if adapter is not None and self.sent.get(adapter.slot) is not adapter:
                self.sent[adapter.slot] = adapter
                note.loads[adapter.slot] = adapter.weights
        return super().make_output(step)


class LoRARunner(ModelRunner):
    def load_model(self) -> Model:
        """The model, with room for adapters in its linear layers."""
        self.model = super().load_model()
        self.slots = LoRASlots(self)
        return self.model

    def update_batch(self, step: SchedulerOutput) -> np.ndarray:
        rows = super().update_batch(step)
        for slot, weights in step.notes[LoRANote].loads.items():
            self.slots.load(slot, weights)
        for seq_id, slot in step.notes[LoRANote].slots.items():
            self.slots.row_slots[self.req_states.row_of[seq_id]] = slot
        return rows

    def prepare_inputs(
        self, step: SchedulerOutput, rows: np.ndarray, shape: GraphShape | None = None
    ) -> InputBatch:
        input_batch = super().prepare_inputs(step, rows, shape)
        self.slots.plan_step(input_batch.arrays.token_rows, input_batch.graph_shape)
        return input_batch


PARTS = {
    "config_cls": LoRAConfig,
    "sequence_cls": LoRASequence,
    "engine_cls": LoRAEngine,
    "scheduler_cls": LoRAScheduler,
    "runner_cls": LoRARunner,
}
