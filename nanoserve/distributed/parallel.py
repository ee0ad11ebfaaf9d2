"""What do ranks say to each other?

Tensor parallelism cuts each layer's matrices among ranks (layers.py shows where). A transformer
block then needs two sums over ranks, after attention and after the MLP. The embedding needs one:

    rank 0:  x @ A0 -> h0;  h0 @ B0 -> p0 \\
                                            all_reduce: p0 + p1 = (x @ A) @ B
    rank 1:  x @ A1 -> h1;  h1 @ B1 -> p1 /

Each step needs three more messages: rank 0 broadcasts the SchedulerOutput, rank 0 gathers the parts
of the logits, and rank 0 broadcasts the sampled tokens.

A ParallelState holds this process's rank and its two process groups. It is an argument of the
layers, not a module variable, so that two engines of different sizes can live in one process. For
the same reason its groups are its own: torch's default group stays free. With one rank there are
no groups, and every method returns at once.

vLLM: vllm/distributed/parallel_state.py, communication_op.py (V0 and V1).
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ParallelState:
    """This process's place among the ranks that share one model.

    Without groups it tells the shape of each share, and all_reduce, gather and broadcast return
    their own argument. Invariant: all ranks call the same methods in the same order. If one rank
    ends, the calls of the others raise RuntimeError.
    """

    tp_rank: int = 0
    tp_size: int = 1
    device_group: Any = None  # a ProcessGroup for tensors: gloo on CPU, nccl on CUDA
    cpu_group: Any = None  # for values in main memory: always gloo
    store: Any = None  # where all ranks meet, to make further groups

    def shard_range(self, total: int, what: str, unit: int | None = None) -> tuple[int, int]:
        """(first, size) of this rank's part of `total` rows, heads or tokens.

        With `unit`, a part is made of whole units (the rows of one head, say). If there are fewer
        units than ranks, neighbouring ranks hold the same unit: 2 key heads on 4 ranks are held as
        0, 0, 1, 1. Raises ValueError if the units cannot be divided evenly.
        """
        num_units = total // (unit or 1)
        num_parts = min(self.tp_size, num_units) if unit else self.tp_size
        if num_units % num_parts or self.tp_size % num_parts:
            raise ValueError(
                f"{what}: {num_units} cannot be divided among {self.tp_size} ranks. "
                "Choose a tensor parallel size that divides it."
            )
        size = total // num_parts
        return self.tp_rank * num_parts // self.tp_size * size, size

    # -- tensors, on each rank's own device --

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, on every rank (in place)."""
        if self.device_group is not None:
            self.device_group.allreduce([tensor]).wait()
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """On rank 0: all ranks' tensors, concatenated along the last dimension. On other ranks: an
        empty tensor [..., 0]."""
        if self.device_group is None:
            return tensor
        part, options = tensor.contiguous(), dist.GatherOptions()
        options.rootRank = 0
        parts = [[torch.empty_like(part) for _ in range(self.tp_size)]] if self.tp_rank == 0 else []
        self.device_group.gather(parts, [part], options).wait()
        return torch.cat(parts[0], dim=-1) if parts else tensor[..., :0]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's `tensor` on every rank (in place)."""
        if self.device_group is not None:
            self.device_group.broadcast([tensor], from_rank_0()).wait()
        return tensor

    # -- values in main memory --

    def broadcast_object(self, value: Any = None) -> Any:
        """Rank 0's value (a SchedulerOutput, say) on every rank: its length, then its bytes."""
        if self.cpu_group is None:
            return value
        data = bytearray(pickle.dumps(value))
        size = torch.tensor([len(data)])
        self.cpu_group.broadcast([size], from_rank_0()).wait()
        data = data if self.tp_rank == 0 else bytearray(int(size))
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        self.cpu_group.broadcast([tensor], from_rank_0()).wait()
        return pickle.loads(data)  # safe: rank 0 runs the same program

    def all_reduce_min(self, value: int) -> int:
        """The smallest of all ranks' values, on every rank."""
        if self.cpu_group is None:
            return value
        tensor, options = torch.tensor([value]), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self.cpu_group.allreduce([tensor], options).wait()
        return int(tensor)


def from_rank_0() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options
