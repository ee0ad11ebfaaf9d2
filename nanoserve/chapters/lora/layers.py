"""What does an adapter add to a product, and how, for many adapters in one step?

LoRA (arXiv 2106.09685) leaves a matrix W as it is and adds two thin ones, A [rank, in] and
B [out, rank]: y = x W^T + (x A^T) B^T * alpha / rank. The tokens of a step may have different
adapters, or none. A linear layer keeps the A and B of all slots, each padded to max_lora_rank (R):

    lora_a [slots, R, in]    lora_b [out, slots, R]

There are two ways:

    group by      The rows of each adapter are gathered, multiplied and added; which rows these are
    group         is found on the CPU, once a step. No product is made in vain, and none at all in a
                  step without adapters.
    together      In CUDA graphs, where the CPU may decide nothing: x times all A at once, what
                  belongs to other adapters set to 0, then times all B at once. Two products,
                  whatever the mix of adapters; slots that are not in use are multiplied, too. A
                  decode step without adapters has graphs of its own, without any of this.

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

vLLM: vllm/lora/layers/, punica_wrapper/, ops/ (0.32); vllm/lora/: layers.py, punica.py (V0).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.chapters.lora.peft_helper import LoRAModel
from nanoserve.input_batch import Send
from nanoserve.kernels.cuda_graph import GraphShape, pad
from nanoserve.layers import ColumnParallelLinear, LinearBase, LinearMethod, RowParallelLinear
from nanoserve.model_runner import ModelRunner

Groups = list[tuple[int, Tensor | None]]  # (slot, its tokens; None: all tokens of the step)


def add_groups(y: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, groups: Groups) -> Tensor:
    """y [num_tokens, out] is x W^T; x [num_tokens, in]. In place. (The scale alpha / rank is in
    lora_b already.)"""
    for slot, tokens in groups:
        a, b = lora_a[slot].T, lora_b[:, slot].T
        if tokens is None:
            y.addmm_(x @ a, b)
        else:
            y.index_add_(0, tokens, x.index_select(0, tokens) @ a @ b)
    return y


def add_together(y: Tensor, x: Tensor, lora_a: Tensor, lora_b: Tensor, is_other: Tensor) -> Tensor:
    """The same, where is_other [num_tokens, slots] says which adapters a token does not have. No
    call depends on the contents of a tensor."""
    num_slots, rank, _ = lora_a.shape
    hidden = F.linear(x, lora_a.flatten(0, 1)).view(-1, num_slots, rank)
    hidden = hidden.masked_fill_(is_other[:, :, None], 0)  # not times 0: another's may be inf
    return y.addmm_(hidden.flatten(1), lora_b.flatten(1).T)


class LoRALinearMethod(LinearMethod):
    """The linear method of before, and the adapters in the layer's lora_a and lora_b."""

    def __init__(self, base: LinearMethod, slots: LoRASlots) -> None:
        self.base, self.slots = base, slots

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        y, is_other = self.base.apply(layer, x, bias), self.slots.is_other
        if is_other is not None:
            return add_together(y, x, layer.lora_a, layer.lora_b, is_other)
        return add_groups(y, x, layer.lora_a, layer.lora_b, self.slots.groups)


class LoRASlots:
    """The adapters on one rank's device: `max_loras` slots in each linear layer of its model.

    Invariant: a slot holds zeros where its adapter has nothing, and lora_b is finite: together, it
    is multiplied by the zeros of all other tokens.
    """

    def __init__(self, runner: ModelRunner) -> None:
        """Make room, in a model whose weights are loaded."""
        config, options = runner.config, {"dtype": runner.dtype, "device": runner.device}
        self.slot_of_row = np.full(config.max_num_seqs, -1)  # by row of RequestState; -1: none
        # Of the step that runs: its groups; or, if it is a CUDA graph, which adapters a token does
        # not have [num_tokens, slots], at a fixed address.
        self.groups: Groups = []
        self.is_other: Tensor | None = None
        size = (config.max_num_batched_tokens, config.max_loras)
        self.buffer = torch.ones(size, dtype=torch.bool, device=runner.device)
        self.max_rank = config.max_lora_rank
        self.layers: dict[str, Any] = {
            name: layer
            for name, layer in runner.model.named_modules()
            if isinstance(layer, (ColumnParallelLinear, RowParallelLinear))
        }
        for name, layer in self.layers.items():
            matrices, num_slots = list(layer.matrices(name)), config.max_loras
            num_inputs, num_outputs = matrices[0].shape[1], matrices[-1].rows.stop
            if isinstance(layer, RowParallelLinear):
                _, num_inputs = layer.parallel.shard_range(num_inputs, name)
            rank = self.max_rank * len(matrices)
            layer.lora_a = torch.zeros(num_slots, rank, num_inputs, **options)
            layer.lora_b = torch.zeros(num_outputs, num_slots, rank, **options)
            layer.linear_method = LoRALinearMethod(layer.linear_method, self)

    def load(self, slot: int, model: LoRAModel) -> None:
        """Copy this rank's part of an adapter into a slot, whatever was there."""
        for name, layer in self.layers.items():
            lora_a, lora_b = layer.lora_a[slot].zero_(), layer.lora_b[:, slot].zero_()
            for number, matrix in enumerate(layer.matrices(name)):
                if matrix.name not in model:
                    continue
                a, b, scaling = model[matrix.name]
                ranks = slice(number * self.max_rank, number * self.max_rank + len(a))
                part_of_a, part_of_b = lora_a[ranks], lora_b[matrix.rows, ranks]
                a = a.narrow(1, matrix.start, part_of_a.shape[1]) if matrix.dim == 1 else a
                b = b.narrow(0, matrix.start, len(part_of_b)) if matrix.dim == 0 else b
                part_of_a.copy_(a)
                limit = torch.finfo(part_of_b.dtype).max
                part_of_b.copy_((b.float() * scaling).clamp_(-limit, limit))

    def plan_step(self, rows: np.ndarray, shape: GraphShape | None, send: Send) -> None:
        """Find `groups` or `is_other` for a step, of whose tokens these are the rows in the
        RequestState; padded to `shape` if it runs as a graph."""
        slot_of_token = self.slot_of_row[rows]
        self.groups, self.is_other = [], None
        if shape is not None:
            padded = pad(slot_of_token, math.prod(shape) - len(rows), -1)
            sent = send(is_other=padded[:, None] != np.arange(self.buffer.shape[1]))
            self.is_other = self.buffer[: len(padded)].copy_(sent["is_other"])
        elif (slot_of_token >= 0).any():
            slots, counts = np.unique(slot_of_token, return_counts=True)  # -1 among them
            order = np.argsort(slot_of_token, kind="stable")  # the tokens of -1, of slot 0, ...
            parts = send(order=order)["order"].split(counts.tolist())
            groups = zip(slots.tolist(), parts if len(slots) > 1 else [None], strict=True)
            self.groups = [group for group in groups if group[0] >= 0]
