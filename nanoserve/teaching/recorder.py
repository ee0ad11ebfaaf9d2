"""What did each step do?

A subclass of the scheduler writes down every step that it decides, and a subclass of the runner
keeps the tensors that it made of it:

    llm = LLM(scheduler_cls=record(Scheduler), runner_cls=RecordingRunner)
    llm.engine.scheduler.frames[0]           Frame(number=1, views={"A": View(...)}, ...)

A Frame is a copy, so a picture of an old step shows what was true then.

Left out: the contents of the KV cache. (A notebook reads them from runner.kv_caches.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from nanoserve.block_manager import BlockHash, BlockManager
from nanoserve.config import EngineConfig
from nanoserve.input_batch import InputBatch
from nanoserve.model_runner import ModelRunner
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import ModelOutput, SchedulerOutput, Sequence, SequenceUpdate


class View(NamedTuple):
    """One sequence at the moment when a step was decided."""

    name: str  # the request id; of a further branch, with its number: "E.1"
    status: str  # "waiting", "running" or "swapped"
    token_ids: tuple[int, ...]
    num_computed: int  # after the step
    num_scheduled: int  # in the step
    block_table: tuple[int, ...]


@dataclass
class Frame:
    """One step, and the state of the blocks when it was decided."""

    number: int  # from 1
    output: SchedulerOutput
    views: dict[str, View]
    block_size: int
    num_blocks: int
    cached: dict[int, tuple[int, ...]]  # block that can be found by its hash -> its tokens
    preempted: tuple[str, ...] = ()
    sampled: dict[str, list[int]] = field(default_factory=dict)  # known when the step has ended
    finished: list[str] = field(default_factory=list)
    seq_ids: dict[str, int] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(seq.num_scheduled for seq in self.views.values())


def name_of(seq: Sequence) -> str:
    return f"{seq.request_id}.{seq.branch}" if seq.branch else seq.request_id


def tokens_of(key: BlockHash) -> tuple[int, ...]:
    block_hash: Any = key[1] if isinstance(key, tuple) else key  # of a group: (group, hash)
    tokens: Any = block_hash.token_ids
    return tokens


def view(seq: Sequence, manager: BlockManager, num_scheduled: int = 0) -> View:
    table = tuple(manager.block_tables.get(seq.seq_id, ()))
    tokens = tuple(seq.token_ids)
    computed = seq.num_computed_tokens
    return View(name_of(seq), seq.status.value, tokens, computed, num_scheduled, table)


def make_frame(scheduler: Scheduler, output: SchedulerOutput, number: int = 0) -> Frame:
    """The state of the control plane now."""
    manager = scheduler.block_manager
    numbers = {item.seq_id: item.num_scheduled_tokens for item in output.scheduled}
    sequences = sorted(scheduler.sequences.values(), key=scheduler.urgency)
    views = [view(seq, manager, numbers.get(seq.seq_id, 0)) for seq in sequences]
    return Frame(
        number,
        output,
        {each.name: each for each in views},
        manager.block_size,
        manager.num_blocks,
        {block: tokens_of(key) for key, block in manager.pool.cached_blocks.items()},
        seq_ids={name_of(seq): seq.seq_id for seq in sequences},
    )


class Recorder(Scheduler):
    """A scheduler that writes down what it decides."""

    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        super().__init__(config, block_manager)
        self.frames: list[Frame] = []
        self.preempted: list[str] = []

    def schedule(self) -> SchedulerOutput:
        self.preempted = []
        output = super().schedule()
        if output.scheduled:
            self.frames.append(make_frame(self, output, len(self.frames) + 1))
            self.frames[-1].preempted = tuple(self.preempted)
        return output

    def preempt(self, seq: Sequence) -> None:
        self.preempted.append(name_of(seq))
        super().preempt(seq)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        updates = super().update_from_output(scheduler_output, model_output)
        [frame] = [each for each in self.frames if each.output is scheduler_output]
        for update in updates:
            name = name_of(update.sequence)
            frame.sampled[name] = [token.token_id for token in update.tokens]
            if update.sequence.status.finish_reason is not None:
                frame.finished.append(name)
        return updates


def record(scheduler_cls: type[Scheduler]) -> type[Any]:
    """The same scheduler, with a Recorder around it."""
    return type(f"Recorded{scheduler_cls.__name__}", (Recorder, scheduler_cls), {})


class RecordingRunner(ModelRunner):
    """A model runner that keeps the inputs of each step."""

    def prepare_inputs(
        self, step: SchedulerOutput, rows: np.ndarray, shape: Any = None
    ) -> InputBatch:
        batch = super().prepare_inputs(step, rows, shape)
        vars(self).setdefault("batches", []).append(batch)
        return batch
