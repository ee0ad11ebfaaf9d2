"""Four engines, each with one mistake of a few lines. Do not read this before notebook 07 asks.

    small_llm(**BROKEN["case 1"])            an engine with the mistake
    source(CULPRITS["case 1"])               the mistake

None of them raises an error, and BlockManager.check() finds nothing: every block is accounted for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from nanoserve.block_manager import BlockHash, BlockManager
from nanoserve.distributed.parallel import ParallelState
from nanoserve.input_batch import InputBatch, RequestState, StepArrays
from nanoserve.model_runner import ModelRunner
from nanoserve.models.base import Model
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import SchedulerOutput, Sequence
from nanoserve.teaching.recorder import RecordingRunner


class ShortHash(BlockManager):
    def find_hash(self, parent: BlockHash | None, token_ids: Any) -> BlockHash:
        if parent is not None:
            token_ids = token_ids[:-1]
        return super().find_hash(parent, token_ids)


class Hole(Scheduler):
    def schedule_tokens(self, seq: Sequence, num_tokens: int, step: StepPlan) -> None:
        super().schedule_tokens(seq, num_tokens, step)
        if seq.num_computed_tokens < seq.num_tokens:
            step.scheduled[-1] = step.scheduled[-1]._replace(num_scheduled_tokens=num_tokens - 1)


class OneBack(RecordingRunner):
    def send_inputs(self, step: SchedulerOutput, arrays: StepArrays, shape: Any) -> InputBatch:
        batch = super().send_inputs(step, arrays, shape)
        ends = self.req_states.num_prompt_tokens[arrays.token_rows]
        positions = batch.tensors.positions - torch.from_numpy(arrays.positions >= ends).long()
        return batch._replace(tensors=replace(batch.tensors, positions=positions))


class OldRow(RequestState):
    def remove(self, seq_id: int) -> None:
        row = self.row_of.get(seq_id, -1)
        kept = self.logit_states.get(row)
        super().remove(seq_id)
        if kept is not None:
            self.logit_states[row] = kept


class OldRowRunner(RecordingRunner):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.req_states.__class__ = OldRow


BROKEN: dict[str, dict[str, Any]] = {
    "case 1": {"block_manager_cls": ShortHash},
    "case 2": {"scheduler_cls": Hole},
    "case 3": {"runner_cls": OneBack},
    "case 4": {"runner_cls": OldRowRunner},
}
CULPRITS = {"case 1": ShortHash, "case 2": Hole, "case 3": OneBack, "case 4": OldRow}


# -- of chapter notebooks --


class OneSumLess(ModelRunner):
    """On two ranks (notebook 14): behind one attention, each goes on with its own half."""

    def load_model(self) -> Model:
        model: Any = super().load_model()
        model.model.layers[3].self_attn.o_proj.parallel = ParallelState()  # as if it were alone
        return model
