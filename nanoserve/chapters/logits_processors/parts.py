"""What do logits processors change in the engine?

    config            one option
    input processor   asks each class whether it can serve a request
    runner            tells them how the rows have changed, and lets them change the logits

The output of each request must be known when they run, so a step is read before the next one is
scheduled.

vLLM: vllm/v1/sample/logits_processor/state.py, v1/worker/gpu_input_batch.py (V1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pkgutil import resolve_name
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
    try:
        found = resolve_name(given) if isinstance(given, str) else given
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
    """Which request has which row of the processors: that of its logits in the step.

    Invariant: the order of `outputs` is the one that the updates so far have told of.
    """

    def __init__(self) -> None:
        self.outputs: dict[int, list[int]] = {}  # by seq_id; each list is also the processors'

    def update(self, requests: dict[int, tuple[Any, Any, list[int]]]) -> BatchUpdate | None:
        """`requests`: by seq_id, in the order of the step, parameters, prompt (a list, or an array,
        of which a list is made once) and output."""
        before, added, moved = self.outputs, [], []
        rows = [i if i in requests else None for i in before]  # None: the request has left its row
        has_left = None in rows
        self.outputs = {i: before.get(i, output) for i, (_, _, output) in requests.items()}
        for seq_id, (params, prompt, output) in requests.items():
            if seq_id in before:
                before[seq_id][:] = output
                continue
            rows += [] if None in rows else [None]
            row = rows.index(None)
            rows[row] = seq_id
            added.append((row, params, list(map(int, prompt)), output))
        removed = [row for row, seq_id in enumerate(rows) if seq_id is None]
        for row, seq_id in enumerate(requests):
            if (there := rows[row]) != seq_id:
                other = rows.index(seq_id)
                how = (
                    MoveDirectionality.UNIDIRECTIONAL if there is None else MoveDirectionality.SWAP
                )
                moved.append((other, row, how))
                rows[other], rows[row] = there, seq_id
        has_changed = has_left or added or moved
        return BatchUpdate(len(requests), removed, added, moved) if has_changed else None


class ProcessingRunner(ModelRunner):
    def __init__(self, *args: Any, **each: Any) -> None:
        super().__init__(*args, **each)
        self.params_of: dict[int, Any] = {}  # by seq_id
        self.make_processors()

    def make_processors(self) -> None:
        names = ("scheduler_config", "cache_config", "parallel_config")
        vllm_config = SimpleNamespace(**dict.fromkeys(names, self.config), speculative_config=None)
        vllm_config.model_config = self.model_config
        classes, is_gpu = self.config.logits_processors, self.device.type == "cuda"
        self.processors = [cls(vllm_config, self.device, is_gpu) for cls in classes]
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
        rows, indices = input_batch.arrays.sampled_rows, input_batch.arrays.logits_indices
        ends, requests = input_batch.arrays.positions[indices] + 1, {}
        # A branch that is about to fork off has the next seq_id already.
        branches = np.arange(len(rows)) - np.searchsorted(indices, indices)
        for row, branch, end in zip(rows, branches, ends, strict=True):
            seq_id, start = int(states.seq_ids[row]), states.num_prompt_tokens[row]
            prompt, output = states.token_ids[row, :start], states.token_ids[row, start:end]
            requests[seq_id + int(branch)] = self.params_of[seq_id], prompt, output.tolist()
        return replace(batch, mask=partial(self.process, requests, batch.mask))

    def process(self, requests: Any, mask: Any, logits: Tensor) -> Tensor:
        """Logits of the step -> what the processors make of them. (A later step may have been
        launched meanwhile.)"""
        batch_update = self.persistent_batch.update(requests)
        for processor in self.processors:
            processor.update_state(batch_update)
        logits = (logits if mask is None else mask(logits)).clone()
        for processor in self.processors:
            logits = processor.apply(logits)
        return logits
