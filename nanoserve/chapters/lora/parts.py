"""What do adapters change in the engine?

    config      the options
    sequence    has an adapter
    engine      make_request takes a lora_request; add_lora, remove_lora, list_loras
    scheduler   a waiting sequence is ready if its adapter has a slot on the device, or gets one
    runner      fills the slots, and knows the slot of each token

With max_loras=2 and adapters A, B, C:

    waiting (by urgency)      slots             what happens
    A1                        A: 0              A gets a free slot
    B1  A2                    A: 0  B: 1        A2 joins at once
    C1  A3  B2  (no adapter)  A: 0  B: 1        no slot for C: that of A, whose last request came
                                                first, is to be drained. So A3 waits; B2 and the
                                                last one run
    C1  A3                    C: 0  B: 1        A1 and A2 have ended: C takes the slot, B is next
                                                to be drained, for A3

So an adapter that does not fit waits and keeps nobody waiting but the requests of one other
adapter, less urgent ones; it gets the slot when the running requests of that adapter have ended.
(vLLM drains nothing: there, two busy adapters can keep a third one waiting for ever.)

vLLM: vllm/v1/core/sched/scheduler.py, vllm/v1/worker/gpu/lora_utils.py (0.32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from nanoserve.block_manager import BlockManager
from nanoserve.chapters.lora.layers import LoRASlots
from nanoserve.chapters.lora.manager import Adapter, Adapters
from nanoserve.chapters.lora.peft_helper import LoRAModel
from nanoserve.chapters.lora.request import LoRARequest
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.input_batch import InputBatch
from nanoserve.kernels.cuda_graph import DecodeGraphs, GraphShape, capture_graphs
from nanoserve.model_runner import ModelRunner
from nanoserve.models.base import Model
from nanoserve.output_processor import Request
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import SchedulerOutput, Sequence, SequenceStatus


class LoRANote(NamedTuple):
    """From the scheduler to the runner, with each step."""

    slots: dict[int, int]  # seq_id of a new sequence -> the slot of its adapter, if it has one
    loads: dict[int, LoRAModel]  # slot -> weights that the runner does not have there yet


@dataclass(frozen=True)
class LoRAConfig(EngineConfig):
    # Requests may have LoRA adapters (lora_request).
    enable_lora: bool = False
    # Adapters in one step at most: slots on the device.
    max_loras: int = 1
    # Largest rank of an adapter; each slot has room for it.
    max_lora_rank: int = 16
    # Adapters that are kept in main memory while no request has them; None: max_loras.
    max_cpu_loras: int | None = None


@dataclass(eq=False)
class LoRASequence(Sequence):
    adapter: Adapter | None = None


class LoRAEngine(LLMEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.adapters = Adapters(self.config, self.model_config)

    def make_request(self, *args: Any, lora_request: Any = None, **each: Any) -> Request:
        """lora_request: a LoRARequest."""
        request = super().make_request(*args, **each)
        if lora_request is not None:
            adapter = self.adapters.get(lora_request)
            for seq in request.sequences:
                seq.adapter, seq.extra_keys = adapter, (seq.extra_keys, adapter.key)
        return request

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check and read an adapter before a request wants it. Raises as make_request does."""
        return self.adapters.get(lora_request) is not None

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that have it go on. False if there is none of this number."""
        return self.adapters.remove(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers of the adapters that are in main memory."""
        return set(self.adapters.known)


class LoRAScheduler(Scheduler):
    """Invariant: the adapter of a running or swapped sequence has a slot; no two have the same."""

    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        super().__init__(config, block_manager)
        self.slots: dict[Adapter, int] = {}  # the one whose last sequence began first is first
        self.may_run: dict[Adapter, bool] = {}  # in this step, of those that were asked for
        self.sent: dict[int, Adapter] = {}  # slot -> what the runners have there

    def schedule(self) -> SchedulerOutput:
        self.may_run.clear()
        return super().schedule()

    def is_ready(self, seq: Sequence) -> bool:
        """Asked in order of urgency. A sequence that was swapped out has kept its slot."""
        is_ready = super().is_ready(seq)
        if not is_ready or seq.adapter is None or seq.status is SequenceStatus.SWAPPED:
            return is_ready
        if seq.adapter not in self.may_run:
            self.may_run[seq.adapter] = self.has_slot(seq.adapter)
        return self.may_run[seq.adapter]

    def has_slot(self, adapter: Adapter) -> bool:
        """Give the adapter a slot, if it has none: a free one, or that of an adapter that is idle.
        If all are busy, let no more sequences of one of them begin in this step."""
        if adapter in self.slots:
            return True
        free = set(range(self.config.max_loras)) - set(self.slots.values())
        if not free:
            busy = {seq.adapter for seq in (*self.running, *self.swapped)}
            others = [each for each in self.slots if not self.may_run.get(each)]
            if idle := [each for each in others if each not in busy]:
                free.add(self.slots.pop(idle[0]))
            elif drained := [each for each in others if each not in self.may_run]:
                self.may_run[drained[0]] = False
        if free:
            self.slots[adapter] = min(free)
        return bool(free)

    def make_output(self, step: StepPlan) -> SchedulerOutput:
        """Tell the runner the slots of new sequences, and the weights that are new in a slot."""
        if self.is_restart:  # whether the last step has loaded anything is not known
            self.sent.clear()
        note = step.notes[LoRANote] = LoRANote({}, {})
        for new in step.new_sequences:
            if (adapter := self.sequences[new.seq_id].adapter) is not None:
                slot = self.slots[adapter] = self.slots.pop(adapter)
                note.slots[new.seq_id] = slot
                if self.sent.get(slot) is not adapter:
                    self.sent[slot], note.loads[slot] = adapter, adapter.weights
        return super().make_output(step)


class LoRARunner(ModelRunner):
    lora_graphs: DecodeGraphs | None = None  # of steps with adapters

    def __init__(self, *arguments: Any) -> None:
        """Capture graphs of steps without adapters, too (vLLM: cudagraph_specialize_lora)."""
        super().__init__(*arguments)
        self.lora_graphs = self.plain_graphs = self.graphs
        if self.graphs is not None:
            with self.no_autocast, self.current_gpu:
                self.plain_graphs = capture_graphs(self)

    def load_model(self) -> Model:
        """The model, with room for adapters in its linear layers."""
        self.model = super().load_model()
        self.slots = LoRASlots(self)
        return self.model

    def update_batch(self, step: SchedulerOutput) -> np.ndarray:
        rows, note = super().update_batch(step), step.notes[LoRANote]
        for slot, weights in note.loads.items():
            self.slots.load(slot, weights)
        for new in step.new_sequences:
            row = self.req_states.row_of[new.seq_id]
            self.slots.slot_of_row[row] = note.slots.get(new.seq_id, -1)
        return rows

    def prepare_inputs(
        self, step: SchedulerOutput, rows: np.ndarray, shape: GraphShape | None = None
    ) -> InputBatch:
        if shape is None and self.lora_graphs is not None:
            has_adapters = (self.slots.slot_of_row[rows] >= 0).any()
            self.graphs = self.lora_graphs if has_adapters else self.plain_graphs
        inputs = super().prepare_inputs(step, rows, shape)
        is_plain = self.lora_graphs is not None and self.graphs is not self.lora_graphs
        padded = None if is_plain else inputs.graph_shape
        self.slots.plan_step(inputs.arrays.token_rows, padded, self.send)
        return inputs
