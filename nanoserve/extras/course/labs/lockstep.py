"""Ranks without threads, processes or a network, for lab 8.

    results, stats = run_ranks(2, lambda parallel: parallel.all_reduce(...))

`work` runs on rank 0 until it has to wait for the others, then on rank 1, and so on; when all wait
in the same operation, its result is known, and all begin again from the start with what is known so
far. So `work` runs several times, and gives the same each time. A rank that makes another call than
the others, or none, is named; nothing ever hangs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanoserve.extras.course.spec import Wrong, must
from nanoserve.parallel import CommStats, ParallelState

Result = TypeVar("Result")
MOST_CALLS = 100


class Waits(BaseException):
    """A rank needs the others' tensors."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        super().__init__(name)
        self.name, self.tensor = name, tensor


class Wire:
    """What stands in the place of one rank's process group."""

    def __init__(self, rank: int, done: list[list[Tensor]]) -> None:
        self.rank, self.done, self.index = rank, done, 0

    def _exchange(self, name: str, tensor: Tensor) -> list[Tensor]:
        """The tensors of all ranks."""
        if self.index == len(self.done):
            raise Waits(name, tensor.clone())
        self.index += 1
        return self.done[self.index - 1]

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Wire:
        [tensor] = tensors
        tensor.copy_(torch.stack(self._exchange("all_reduce", tensor)).sum(dim=0))
        return self

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> Wire:
        [tensor] = inputs
        must(options.rootRank == 0, f"the parts go to rank 0, not to {options.rootRank}")
        parts = self._exchange("gather", tensor)
        must(
            len(outputs) == (self.rank == 0),
            f"rank {self.rank} gives gather {len(outputs)} lists of tensors to fill: rank 0 gives "
            "one, the others none",
        )
        for targets in outputs:
            must(
                len(targets) == len(parts),
                f"rank 0 has {len(targets)} tensors for the parts of {len(parts)} ranks",
            )
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)
        return self

    def broadcast(self, tensors: list[Tensor], options: Any) -> Wire:
        [tensor] = tensors
        tensor.copy_(self._exchange("broadcast", tensor)[options.rootRank])
        return self

    def wait(self, timeout: Any = None) -> bool:
        return True


def run_ranks(
    tp_size: int, work: Callable[[ParallelState], Result]
) -> tuple[list[Result], list[CommStats]]:
    """work(parallel) on each rank: the results, and what each rank has sent. Raises Wrong if the
    ranks do not make the same calls."""
    done: list[list[Tensor]] = []
    while len(done) < MOST_CALLS:
        results: list[Result] = []
        waiting: dict[int, Waits] = {}
        stats = [CommStats() for _ in range(tp_size)]
        for rank in range(tp_size):
            wire = Wire(rank, done)
            try:
                results.append(
                    work(ParallelState(rank, tp_size, device_group=wire, comm_stats=stats[rank]))
                )
            except Waits as call:
                waiting[rank] = call
        if not waiting:
            return results, stats
        calls = {
            rank: f"{waiting[rank].name} of {list(waiting[rank].tensor.shape)}"
            if rank in waiting
            else "nothing"
            for rank in range(tp_size)
        }
        text = "; ".join(f"rank {rank} calls {call}" for rank, call in calls.items())
        must(
            len(set(calls.values())) == 1,
            f"all ranks make the same calls, or wait for ever: {text}",
        )
        done.append([waiting[rank].tensor for rank in range(tp_size)])
    raise Wrong(f"after {MOST_CALLS} operations the ranks are not done")
