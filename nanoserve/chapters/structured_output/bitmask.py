"""How do bits become forbidden tokens?

A grammar says which tokens may come next in one bit for each token of the vocabulary, 32 to a word,
the first token in the lowest bit. So a row of 151,936 tokens is sent to the device in 19 KB:

    bits              ... 0 1 1 0          tokens 1 and 2 are allowed
    added to logits   -inf 0 0 -inf ...

On a CPU one loop of C++ reads bits and logits, and writes the sums. Elsewhere, and where there is
no compiler, the bits become numbers first: eight at a time, from a table with a row for each byte.

vLLM: vllm/v1/structured_output/utils.py apply_grammar_bitmask (V1), which calls xgrammar.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.kernels.native_cpu import load_library


class TokenBitmask(NamedTuple):
    """What grammars allow in k rows of the logits. It is applied in the step it is made for: the
    next one writes over its bits."""

    logits_rows: Tensor  # [k] int64
    bits: Tensor  # [k, num_words] int32
    kernel: BitmaskKernel

    def apply(self, logits: Tensor) -> Tensor:
        """logits [num_rows, vocab_size] float32, with -inf added to those of forbidden tokens."""
        return self.kernel.apply(logits, self.logits_rows, self.bits)


class BitmaskKernel:
    """The loop, or the table."""

    def __init__(self, device: torch.device) -> None:
        numbers, bits = (torch.arange(number, device=device) for number in (256, 8))
        is_allowed = (numbers[:, None] >> bits) & 1 == 1
        self.table = torch.where(is_allowed, 0.0, -torch.inf)  # a byte -> what its bits add
        self.loop: Any = None  # the compiled one; None if there is none
        library = load_library() if device.type == "cpu" else None
        if library is not None:
            self.loop = library.apply_token_bitmask
            self.loop.argtypes = (*[ctypes.c_int] * 3, *[ctypes.c_void_p] * 4)
            self.loop.restype = None

    def apply(self, logits: Tensor, logits_rows: Tensor, bits: Tensor) -> Tensor:
        """See TokenBitmask."""
        num_bits = bits.shape[1] * 32
        fits = logits.dtype == torch.float32 and bits.is_contiguous()
        # The loop trusts them: with fewer bits it would read behind the last row.
        assert fits and logits.shape[1] <= num_bits, "other logits than the bits were made for"
        if self.loop is None:
            values = self.table.index_select(0, bits.view(torch.uint8).reshape(-1).int())
            values = values.view(len(bits), num_bits)[:, : logits.shape[1]]
            return logits.index_add(0, logits_rows, values)
        logits = logits.contiguous()
        output = torch.empty_like(logits)  # of other logits it would lie as they do
        place_of_row = np.full(len(logits), -1, np.int32)
        place_of_row[logits_rows.numpy()] = np.arange(len(bits))
        self.loop(
            *logits.shape, bits.shape[1], logits.data_ptr(), bits.data_ptr(),
            place_of_row.ctypes.data, output.data_ptr(),
        )  # fmt: skip
        return output
