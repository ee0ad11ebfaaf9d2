"""What does an adapter add to a product, and how, for many adapters in one step?

LoRA (arXiv 2106.09685) leaves a matrix W as it is and adds two thin ones, A [rank, in] and
B [out, rank]: y = x W^T + (x A^T) B^T * alpha / rank. The tokens of a step may have different
adapters, or none. `add_lora_loop` is the definition: one adapter after the other, each for its own
tokens. A linear layer keeps the A and B of all slots, each padded to max_lora_rank (R):

    lora_a [slots, R, in]    lora_b [out, slots, R]    lora_ids [num_tokens]: slot of each token; -1

There are two fast ways, both held to the definition:

    group by      The rows of each adapter are gathered, multiplied and added; which rows these are
    group         is found on the CPU, once a step. No product is made in vain.
    together      In CUDA graphs, where the CPU may decide nothing: x times all A at once, what
                  belongs to other adapters set to 0, then times all B at once. Two products,
                  whatever the mix of adapters; slots that are not in use are multiplied, too.

(Measured on one core with 8 adapters and the sizes of Qwen3-0.6B: group by group took 0.5 to 0.8 of
the time of together for 8 tokens, and a quarter or less for 128.)

Layers that hold several matrices of the checkpoint (q, k and v) hold an adapter for each of them:
the A's one below the other, the B's along a diagonal. With R = 2, and 3 matrices, one slot:

    A:  q q k k v v   (6 rows)      B:  rows of q   b b . . . .
                                        rows of k   . . b b . .
                                        rows of v   . . . . b b

Ranks cut A and B like W. Where W is cut by outputs, B is, and every rank has all of A; where W is
cut by inputs, A is, and the sum over ranks, which follows anyway, adds up the parts.

The wrapped linear method does the rest of the work: a quantized W has adapters in floating point.

Left out: a Triton kernel. A step without adapters costs nothing, unless it is a CUDA graph, which
multiplies by all slots.

vLLM: vllm/lora/layers/, punica_wrapper/, ops/ (V1); vllm/lora/: layers.py, punica.py (V0).
"""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.chapters.lora.peft_helper import LoRAModel
from nanoserve.kernels.kv_cache import memory_limit
from nanoserve.kernels.memory import check_fits
from nanoserve.layers import ColumnParallelLinear, LinearBase, LinearMethod, RowParallelLinear

if TYPE_CHECKING:
    from nanoserve.kernels.cuda_graph import GraphShape
    from nanoserve.model_runner import ModelRunner

TILE = 1024  # tokens whose rows are gathered at once: memory that the profile run does not see


def add_lora_loop(
    result: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, lora_ids: Tensor
) -> Tensor:
    """The definition. result [num_tokens, out] is x W^T; x [num_tokens, in]. In place. (The scale
    alpha / rank is in lora_b already.)"""
    for slot in range(len(lora_a)):
        tokens = lora_ids == slot
        result[tokens] += x[tokens] @ lora_a[slot].T @ lora_b[:, slot].T
    return result


class LoRAPlan(NamedTuple):
    """Which tokens of a step have which adapter; the same for all layers."""

    lora_ids: Tensor  # [num_tokens] int64
    # Group by group: (slot, its tokens; None: all tokens). None: together.
    groups: tuple[tuple[int, Tensor | None], ...] | None

    def add(self, result: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor) -> Tensor:
        """What add_lora_loop does."""
        if self.groups is None:
            return add_lora_together(result, x, lora_a, lora_b, self.lora_ids)
        for slot, tokens in self.groups:
            a, b = lora_a[slot].T, lora_b[:, slot].T
            if tokens is None:
                result.addmm_(x @ a, b)
            else:
                result.index_add_(0, tokens, x.index_select(0, tokens) @ a @ b)
        return result


def add_lora_together(
    result: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, lora_ids: Tensor
) -> Tensor:
    """What add_lora_loop does, in two products. No call depends on the contents of a tensor."""
    num_slots, rank, _ = lora_a.shape
    hidden = F.linear(x, lora_a.flatten(0, 1)).view(-1, num_slots, rank)
    slots = torch.arange(num_slots, device=x.device)
    is_other = lora_ids[:, None] != slots  # [num_tokens, num_slots]
    hidden = hidden.masked_fill_(is_other[:, :, None], 0)  # not times 0: another's may be inf
    return result.addmm_(hidden.flatten(1), lora_b.flatten(1).T)


class LoRALinearMethod(LinearMethod):
    """The linear method of before, and the adapters in the layer's lora_a and lora_b."""

    def __init__(self, base: LinearMethod, slots: LoRASlots) -> None:
        self.base, self.slots = base, slots

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        result = self.base.apply(layer, x, bias)
        plan = self.slots.plan  # of the step that runs
        return result if plan is None else plan.add(result, x, layer.lora_a, layer.lora_b)


class LoRASlots:
    """The adapters on one rank's device: `max_loras` slots in each linear layer of its model.

    Invariant: a slot holds zeros where its adapter has nothing, and lora_b is finite: together, it
    is multiplied by the zeros of all other tokens.
    """

    def __init__(self, runner: ModelRunner) -> None:
        """Make room, in a model whose weights are loaded. Raises ValueError if there is too
        little memory for it."""
        config, device = runner.config, runner.device
        self.plan: LoRAPlan | None = None  # of the step that runs
        self.row_slots = np.full(config.max_num_seqs, -1)  # by row of the RequestState; -1: none
        # At a fixed address, where a CUDA graph reads it.
        most = config.max_num_batched_tokens
        self.lora_ids = torch.full((most,), -1, dtype=torch.int64, device=device)
        self.runner: ModelRunner = weakref.proxy(runner)  # the runner holds the slots
        self.max_loras, self.max_rank = runner.config.max_loras, runner.config.max_lora_rank
        self.layers = {
            name: layer
            for name, layer in runner.model.named_modules()
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear))
        }
        shapes = {name: self._shapes(name, layer) for name, layer in self.layers.items()}
        numbers = sum(math.prod(shape) for pair in shapes.values() for shape in pair)
        check_fits(
            f"max_loras={self.max_loras} adapters of max_lora_rank={self.max_rank} take {{size}}",
            numbers,
            runner.dtype.itemsize,
            memory_limit(runner.device),
            "Lower the two.",
        )
        options: dict[str, Any] = {"dtype": runner.dtype, "device": runner.device}
        for name, layer in self.layers.items():
            for buffer, shape in zip(("lora_a", "lora_b"), shapes[name], strict=True):
                layer.register_buffer(buffer, torch.zeros(shape, **options), persistent=False)
            layer.linear_method = LoRALinearMethod(layer.linear_method, self)

    def _shapes(self, name: str, layer: LinearBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of lora_a and lora_b."""
        matrices = list(layer.matrices(name))
        num_inputs = matrices[0].shape[1]
        if isinstance(layer, RowParallelLinear):
            _, num_inputs = layer.parallel.shard_range(num_inputs, "input of a row-parallel layer")
        rank, num_outputs = self.max_rank * len(matrices), matrices[-1].rows.stop
        return (self.max_loras, rank, num_inputs), (num_outputs, self.max_loras, rank)

    def load(self, slot: int, model: LoRAModel) -> None:
        """Copy this rank's part of an adapter into a slot, whatever was there."""
        for name, layer in self.layers.items():
            lora_a: Tensor = layer.lora_a[slot]  # type: ignore[index]
            lora_b: Tensor = layer.lora_b[:, slot]  # type: ignore[index]
            lora_a.zero_()
            lora_b.zero_()
            for number, matrix in enumerate(layer.matrices(name)):
                if matrix.name not in model:
                    continue
                a, b, scaling = model[matrix.name]
                ranks = slice(number * self.max_rank, number * self.max_rank + len(a))
                part_of_a, part_of_b = lora_a[ranks], lora_b[matrix.rows, ranks]
                if matrix.dim == 0:
                    b = b.narrow(0, matrix.start, len(part_of_b))
                else:
                    a = a.narrow(1, matrix.start, part_of_a.shape[1])
                part_of_a.copy_(a)
                limit = torch.finfo(part_of_b.dtype).max
                part_of_b.copy_((b.float() * scaling).clamp_(-limit, limit))

    def plan_step(self, rows: np.ndarray, shape: GraphShape | None) -> None:
        """Set `plan` for a step, of whose tokens these are the rows in the RequestState; padded to
        `shape` if it runs as a graph. None if no token has an adapter."""
        slots_of_tokens = self.row_slots[rows]
        slots, counts = np.unique(slots_of_tokens, return_counts=True)  # -1 among them
        self.plan = None
        if shape is not None:
            padded = np.full(math.prod(shape), -1)
            padded[: len(rows)] = slots_of_tokens
            self.lora_ids[: len(padded)] = torch.from_numpy(padded)
            self.plan = LoRAPlan(self.lora_ids[: len(padded)], None)
        elif len(slots) and slots[-1] >= 0:
            order = np.argsort(slots_of_tokens, kind="stable")  # the tokens of -1, of slot 0, ...
            parts = self.runner.send(order=order)["order"].split(counts.tolist())
            groups = [
                (slot, tokens)
                for slot, part in zip(slots.tolist(), parts, strict=True)
                for tokens in (part.split(TILE) if slot >= 0 else ())
            ]
            self.plan = LoRAPlan(self.lora_ids[: len(rows)], tuple(groups))
