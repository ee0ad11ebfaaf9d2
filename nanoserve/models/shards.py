"""Which part of a checkpoint's tensor fills which part of a weight?

A rank holds some rows or columns of a matrix, and one weight can hold several matrices. A layer
names them (`matrices`), and its linear method makes places to be filled of them (`shards`). Rank 1
of 2, which has the second half of 4 query heads and of 2 key heads, each of 16 rows:

    Matrix                                          Shard
    q_proj [64, 64], rows [0, 32) of the weight     weight[0:32]  is filled with rows 32 .. 63
    k_proj [32, 64], rows [32, 48)                  weight[32:48] is filled with rows 16 .. 31

models/loader.py reads the files and fills the places. No request passes here.

vLLM: vllm/model_executor/parameter.py (V0 and V1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class Matrix(NamedTuple):
    """A matrix [outputs, inputs] of the checkpoint, and which part of it a layer holds."""

    name: str  # such as "model.layers.0.self_attn.k_proj"
    shape: tuple[int, int]  # in the checkpoint
    rows: slice  # of the layer's weight, which it fills
    dim: int  # 0: this rank has some of the outputs; 1: some of the inputs
    start: int  # the first of them
    columns: slice = slice(None)  # of the layer's weight


class Shard(NamedTuple):
    """A place to be filled from a checkpoint tensor: its slice [start, start + size) along dim."""

    target: Tensor  # a view of the parameter
    full_shape: tuple[int, ...]  # of the tensor in the checkpoint
    dim: int = 0
    start: int = 0
    # For quantized weights: the slice's size, if the target has another shape; the types that the
    # file may have, if other than floats; how a slice is written to the target, which converts its
    # numbers to those of the target; and True if the files may lack the tensor.
    size: int | None = None
    dtypes: tuple[str, ...] | None = None
    weight_loader: Callable[[Tensor, Tensor], object] = Tensor.copy_
    is_optional: bool = False

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to take of the checkpoint tensor."""
        whole = [slice(None)] * len(self.full_shape)
        if whole:
            size = self.target.shape[self.dim] if self.size is None else self.size
            whole[self.dim] = slice(self.start, self.start + size)
        return tuple(whole)
