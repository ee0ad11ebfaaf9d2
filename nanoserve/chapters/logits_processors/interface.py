"""What does a logits processor of the engine implement?

vLLM: vllm/v1/sample/logits_processor/: interface.py, __init__.py (V1).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nanoserve.sampling_params import SamplingParams

# (output token ids, logits [vocab_size]) or (prompt ids, output ids, logits) -> logits
RequestLogitsProcessor = Callable[..., Tensor]


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = 1  # row i1 moves to row i2
    SWAP = 2  # rows i1 and i2 change places


@dataclass(frozen=True)
class BatchUpdate:
    """How the rows have changed: first `removed`, then `added`, then `moved`. A request that is
    added may take the row of another one."""

    batch_size: int  # rows after the update
    removed: Seq[int]
    # (row, parameters, prompt token ids, output token ids)
    added: Seq[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Seq[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """One object for each engine. vllm_config has scheduler_config.max_num_seqs,
    model_config.vocab_size and so on."""

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters that this processor cannot serve: the request is refused
        when it is added."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """[num_rows, vocab_size] float32 -> the same shape. It may be changed in place."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """True if the likeliest token stays the same."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before each `apply`; None if the rows are those of the last step."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A function for each request, as in V0."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, partial[Tensor]] = {}  # by row

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function for a new request; None if it needs none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for row in batch_update.removed:
            self.req_info.pop(row, None)
        for row, params, prompt, output in batch_update.added:
            self.req_info.pop(row, None)
            if (function := self.new_req_logits_processor(params)) is not None:
                both = len(inspect.signature(function).parameters) == 3
                self.req_info[row] = partial(function, *([prompt] if both else []), output)
        for source, target, direction in batch_update.moved:
            one, other = self.req_info.pop(source, None), self.req_info.pop(target, None)
            if one is not None:
                self.req_info[target] = one
            if other is not None and direction is MoveDirectionality.SWAP:
                self.req_info[source] = other

    def apply(self, logits: Tensor) -> Tensor:
        for row, function in self.req_info.items():
            logits[row] = function(logits[row])
        return logits
