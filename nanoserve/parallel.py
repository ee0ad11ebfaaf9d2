"""What do ranks say to each other?

Tensor parallelism cuts each layer's matrices among ranks (layers.py shows where). A transformer
block then needs two sums over ranks, after attention and after the MLP, and the embedding one more:

    rank 0:  x @ A0 -> h0;  h0 @ B0 -> p0 \\
                                            all_reduce: p0 + p1 = (x @ A) @ B
    rank 1:  x @ A1 -> h1;  h1 @ B1 -> p1 /

A ParallelState says which rank this is and talks to the others. It is passed to the layers, not
kept in a module variable, so that two engines of different sizes live in one process. With one rank
(all that executor.py starts today) there is nothing to say, and no process group is created.

Left out: pipeline and expert parallelism.

vLLM: vllm/distributed/parallel_state.py, communication_op.py (V0 and V1).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ParallelState:
    """This process among the ranks that share one model."""

    rank: int = 0
    world_size: int = 1
    group: dist.ProcessGroup | None = None  # needed exactly if world_size > 1

    def share_of(self, total: int, what: str) -> tuple[int, int]:
        """(first, size) of this rank's part of `total` rows, heads or tokens.

        Raises ValueError if they cannot be divided evenly.
        """
        if total % self.world_size:
            raise ValueError(
                f"{what}: {total} cannot be divided among {self.world_size} ranks. "
                "Choose a tensor parallel size that divides it."
            )
        size = total // self.world_size
        return self.rank * size, size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, on every rank (in place)."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The ranks' tensors side by side along the last dimension, on every rank."""
        if self.world_size == 1:
            return tensor
        parts = [tensor.new_empty(tensor.shape) for _ in range(self.world_size)]
        dist.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
