"""What do stages say to each other?

Rank 5 of six has tp_rank 1, tp_size 2, pp_rank 2 (its stage), pp_size 3:

    stage 0: ranks 0 1  --hidden states-->  stage 1: ranks 2 3  -->  stage 2: ranks 4 5
       rank 0  <---------------------------- logits ------------------------- rank 4

Rank 0 tells all others each step. A rank takes the next step in while it still computes the one
before: otherwise rank 0 could not begin its own part of the next step.

vLLM: vllm/distributed/parallel_state.py (V0 and V1).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

from torch import Tensor

from nanoserve.distributed.multiproc import make_group
from nanoserve.distributed.parallel import ParallelState, from_rank_0


class Link:
    """Two ranks, of which the first sends tensors to the second."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.sending: deque[tuple[Any, Tensor]] = deque()  # kept until they have arrived

    def send(self, tensor: Tensor) -> None:
        """Begin to send; nobody waits."""
        while self.sending and self.sending[0][0].is_completed():
            self.sending.popleft()
        self.sending.append((self.start_receive(tensor), tensor))

    def start_receive(self, tensor: Tensor) -> Any:
        """Begin to fill `tensor`; wait() of what is returned waits until it is there."""
        return self.group.broadcast([tensor], from_rank_0())


class Inbox:
    """The steps that rank 0 has told and this rank has not begun."""

    def __init__(self, world: ParallelState) -> None:
        self.world = world
        self.steps: SimpleQueue[Any] = SimpleQueue()
        self.thread = Thread(target=self.receive, daemon=True)
        self.thread.start()

    def receive(self) -> None:
        """In a thread of its own: take in what rank 0 tells, to the None at the end."""
        try:
            while (step := self.world.broadcast_object()) is not None:
                self.steps.put(step)
            self.steps.put(None)
        except RuntimeError as error:  # rank 0 has ended
            self.steps.put(error)

    def get(self) -> Any:
        step = self.steps.get()
        if step is None or isinstance(step, Exception):
            self.thread.join(5)  # before this process ends
        if isinstance(step, Exception):
            raise step
        return step


@dataclass(frozen=True)
class StageState(ParallelState):
    """This process's place in its stage, and the place of its stage."""

    world: ParallelState = ParallelState()  # all ranks
    pp_rank: int = 0
    pp_size: int = 1
    previous: Link | None = None  # with the stage before
    next: Link | None = None  # with the stage behind
    back: Link | None = None  # from the last stage to rank 0
    inbox: Inbox | None = None  # of a rank above 0, once its runner is complete

    @property
    def is_first(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def layer_range(self, num_layers: int) -> range:
        """The stage's layers. Of the rest, the middle stages get one each, the last but one first:
        the outer ones have the embedding and the head, too (vLLM: get_pp_indices)."""
        size, rest = divmod(num_layers, self.pp_size)
        sizes = [size] * self.pp_size
        for number in range(rest):
            sizes[-number - 2] += 1
        return range(sum(sizes[: self.pp_rank]), sum(sizes[: self.pp_rank + 1]))

    def broadcast_object(self, value: Any = None) -> Any:
        return self.inbox.get() if self.inbox else self.world.broadcast_object(value)

    def all_reduce_min(self, value: int) -> int:
        return self.world.all_reduce_min(value)


def connect_stages(world: ParallelState, pp_size: int, device: str) -> StageState:
    """Make the groups of the stages, and the links between them."""
    rank, size = world.tp_rank, world.tp_size // pp_size
    pp_rank, tp_rank = divmod(rank, size)

    def link(sender: int, receiver: int) -> Link | None:
        if rank not in (sender, receiver) or sender < 0 or receiver >= world.tp_size:
            return None
        name = f"link {sender} {receiver}"
        return Link(make_group(world.store, name, int(rank == receiver), 2, device))

    name = f"stage {pp_rank}"
    group = make_group(world.store, name, tp_rank, size, device) if size > 1 else None
    own: dict[str, Any] = {"world": world, "pp_rank": pp_rank, "pp_size": pp_size}
    own |= {"previous": link(rank - size, rank), "next": link(rank, rank + size)}
    return StageState(tp_rank, size, group, **own, back=link(world.tp_size - size, 0))
