"""What do logits processors change in the engine?

    config            one option
    input processor   asks each class whether it can serve a request
    runner            tells them how the rows have changed, and lets them change the logits

The output of each request must be known when they run, so a step is read before the next one is
scheduled.

vLLM: vllm/v1/sample/logits_processor/state.py, v1/worker/gpu_input_batch.py (V1).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from nanoserve.chapters.logits_processors.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from nanoserve.config import EngineConfig
from nanoserve.input_batch import InputBatch
from nanoserve.input_processor import InputProcessor
from nanoserve.model_runner import ModelRunner
from nanoserve.sampler import SamplingBatch
from nanoserve.sequence import SchedulerOutput, Sequence


@dataclass(frozen=True)
class LogitsProcessorsConfig(EngineConfig):
    # Classes that change the logits of a batch; each one, or its name: "package.module:Class".
    logits_processors: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        classes = tuple(map(load_class, self.logits_processors))
        object.__setattr__(self, "logits_processors", classes)


def load_class(given: Any) -> type[LogitsProcessor]:
    """The class, or the one of this name. Raises ValueError if there is none."""
    found = given
    if isinstance(given, str):
        module, _, name = given.partition(":")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"logits_processors: no class {given!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ValueError(f"logits_processors: {given!r} is no subclass of LogitsProcessor.")
    return found


class ProcessedInputs(InputProcessor):
    def process(self, *args: Any, **each: Any) -> Sequence:
        seq = super().process(*args, **each)
        for processor_cls in self.config.logits_processors:
            processor_cls.validate_params(seq.sampling_params)
        seq.reads_output = True
        return seq


class PersistentBatch:
    """Which request has which row of the processors.

    Invariant: `rows` are those that the updates so far have told of.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []  # seq_id of each
        self.outputs: dict[int, list[int]] = {}  # by seq_id; each list is also the processors'

    def update(self, requests: dict[int, tuple[Any, Any, list[int]]]) -> BatchUpdate | None:
        """`requests`: by seq_id, parameters, prompt (a list, or an array, of which a list is made
        once) and output of those in this step."""
        free = [row for row, seq_id in enumerate(self.rows) if seq_id not in requests]
        self.outputs = {i: out for i, out in self.outputs.items() if i in requests}
        has_left, added, moved = bool(free), [], []
        for seq_id, (params, prompt, output) in requests.items():
            if seq_id in self.outputs:
                self.outputs[seq_id][:] = output
                continue
            row = free.pop(0) if free else len(self.rows)
            self.rows[row : row + 1] = [seq_id]
            self.outputs[seq_id] = output
            added.append((row, params, list(map(int, prompt)), output))
        removed = list(free)
        while free:  # the last rows fill the holes
            if free[-1] == len(self.rows) - 1:
                self.rows.pop(free.pop())
            else:
                moved.append((len(self.rows) - 1, free[0], MoveDirectionality.UNIDIRECTIONAL))
                self.rows[free.pop(0)] = self.rows.pop()
        has_changed = has_left or added
        return BatchUpdate(len(self.rows), removed, added, moved) if has_changed else None


class ProcessingRunner(ModelRunner):
    def __init__(self, *args: Any, **each: Any) -> None:
        super().__init__(*args, **each)
        self.params_of: dict[int, Any] = {}  # by seq_id
        self.make_processors()

    def make_processors(self) -> None:
        config: Any = self.config
        names = ("scheduler_config", "cache_config", "parallel_config")
        vllm_config = SimpleNamespace(**dict.fromkeys(names, config), speculative_config=None)
        vllm_config.model_config = self.model_config
        is_gpu = self.device.type == "cuda"
        self.processors = [
            cls(vllm_config, self.device, is_gpu) for cls in config.logits_processors
        ]
        self.persistent_batch = PersistentBatch()

    def update_batch(self, step: SchedulerOutput) -> np.ndarray:
        if step.is_restart:  # the processors may have heard a half of the last step
            self.params_of.clear()
            self.make_processors()
        for seq_id in step.dropped_seq_ids:
            self.params_of.pop(seq_id, None)
        self.params_of |= {new.seq_id: new.sampling_params for new in step.new_sequences}
        return super().update_batch(step)

    def make_sampling_batch(self, input_batch: InputBatch) -> SamplingBatch:
        batch, states = super().make_sampling_batch(input_batch), self.req_states
        arrays = input_batch.arrays
        rows, indices = arrays.sampled_rows, arrays.logits_indices
        # A branch that is about to fork off has the next seq_id already.
        seq_ids = states.seq_ids[rows]
        branch_ids = seq_ids + np.arange(len(rows)) - np.searchsorted(indices, indices)
        requests = {}
        for row, seq_id, branch_id, index in zip(rows, seq_ids, branch_ids, indices, strict=True):
            start, end = states.num_prompt_tokens[row], arrays.positions[index] + 1
            prompt, output = states.token_ids[row, :start], states.token_ids[row, start:end]
            requests[int(branch_id)] = (self.params_of[seq_id], prompt, output.tolist())
        batch_update = self.persistent_batch.update(requests)
        for processor in self.processors:
            processor.update_state(batch_update)
        row_of = {seq_id: row for row, seq_id in enumerate(requests)}
        order = np.array([row_of[seq_id] for seq_id in self.persistent_batch.rows])
        sent = self.send(order=order, back=order.argsort())
        return replace(batch, mask=partial(self.process, batch.mask, sent["order"], sent["back"]))

    def process(
        self,
        mask: Callable[[Tensor], Tensor] | None,
        order: Tensor,
        back: Tensor,
        logits: Tensor,
    ) -> Tensor:
        """Logits of the step -> what the processors make of them."""
        logits = logits if mask is None else mask(logits)
        logits = logits.index_select(0, order)  # a copy
        for processor in self.processors:
            logits = processor.apply(logits)
        return logits.index_select(0, back)


PARTS = {
    "config_cls": LogitsProcessorsConfig,
    "input_processor_cls": ProcessedInputs,
    "runner_cls": ProcessingRunner,
}
