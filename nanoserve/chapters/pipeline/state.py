"""What do stages say to each other?

Rank 5 of six has tp_rank 1, tp_size 2, pp_rank 2 (its stage), pp_size 3:

    stage 0: ranks 0 1  --hidden states-->  stage 1: ranks 2 3  -->  stage 2: ranks 4 5
       rank 0  <---------------------------- logits ------------------------- rank 4
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanoserve.distributed.multiproc import make_group
from nanoserve.distributed.parallel import ParallelState, from_rank_0


class Link:
    """Two ranks, of which the first sends tensors to the second."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.sending: deque[tuple[Any, Tensor]] = deque()  # until they have arrived

    def send(self, tensor: Tensor) -> None:
        while self.sending and self.sending[0][0].is_completed():
            self.sending.popleft()
        self.sending.append((self.start_receive(tensor), tensor))

    def start_receive(self, tensor: Tensor) -> Any:
        """Begin to fill `tensor`; wait() of what is returned waits until it is there."""
        return self.group.broadcast([tensor], from_rank_0())


@dataclass(frozen=True)
class StageState(ParallelState):
    """This process's place in its stage, and the place of its stage."""

    world: Any = None  # ParallelState of all ranks, for steps
    pp_rank: int = 0
    pp_size: int = 1
    previous: Link | None = None  # with the stage before
    next: Link | None = None  # with the stage behind
    back: Link | None = None  # from the last stage to rank 0

    @property
    def is_rank_0(self) -> bool:
        return self.pp_rank == self.tp_rank == 0

    @property
    def is_first(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def layer_range(self, num_layers: int) -> tuple[int, int]:
        """(first, end) of the stage's layers. Of the rest, the middle stages get one each, the last
        but one first: the outer ones have the embedding and the head, too (get_pp_indices)."""
        if num_layers < self.pp_size:
            raise ValueError(f"{num_layers} layers cannot be divided among {self.pp_size} stages.")
        size, rest = divmod(num_layers, self.pp_size)
        sizes = [size] * self.pp_size
        for number in range(rest):
            sizes[-number - 2] += 1
        return sum(sizes[: self.pp_rank]), sum(sizes[: self.pp_rank + 1])

    def broadcast_object(self, value: Any = None) -> Any:
        return self.world.broadcast_object(value)

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

    group = None
    if size > 1:
        group = make_group(world.store, f"stage {pp_rank}", tp_rank, size, device)
    return StageState(
        tp_rank,
        size,
        group,
        world=world,
        pp_rank=pp_rank,
        pp_size=pp_size,
        previous=link(rank - size, rank),
        next=link(rank, rank + size),
        back=link(world.tp_size - size, 0),
    )
