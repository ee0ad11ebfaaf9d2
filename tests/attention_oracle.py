"""What attention is, and steps to try an implementation on.

    shape = Shape(((1, 14), (7, 0)), block_size=4)  # a decode after 14 tokens beside a prompt of 7
    step = make_step(shape)
    output = paged_attention(*step.tensors, **shape.options)
    assert_close(output, attention_by_definition(*step.tensors, **shape.options))

Whatever a step does not own is poisoned: NaN stands in every slot that no key was written to, and
in every block that a stale entry of the block table names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
import torch
from torch import Tensor


def attention_by_definition(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
) -> Tensor:
    """One query at a time, in float64. NaN for tokens that are no sequence's."""
    num_tokens, num_heads, _ = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    shape = (num_tokens, num_heads, value_cache.shape[-1])
    output = torch.full(shape, math.nan, dtype=torch.float64, device=query.device)
    for seq, seq_len in enumerate(seq_lens.tolist()):
        position = torch.arange(seq_len, device=query.device)
        place = block_table[seq, position // block_size].long(), position % block_size
        keys = key_cache[place].double().repeat_interleave(group, dim=1)  # [seq_len, heads, dim]
        values = value_cache[place].double().repeat_interleave(group, dim=1)
        start, end = query_start_loc[seq : seq + 2].tolist()
        for token in range(start, end):
            last = seq_len - (end - token)  # its own position, and that of the last key it sees
            first = 0 if sliding_window is None else max(0, last - sliding_window + 1)
            seen = slice(first, last + 1)
            scores = (query[token].double() * keys[seen]).sum(dim=-1) * scale  # [keys, heads]
            if logits_soft_cap is not None:
                scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
            output[token] = (scores.softmax(dim=0)[:, :, None] * values[seen]).sum(dim=0)
    return output


@dataclass(frozen=True)
class Shape:
    """A step, without its numbers."""

    seqs: tuple[tuple[int, int], ...]  # (queries, keys before them) of each sequence
    block_size: int = 4
    num_kv_heads: int = 2
    group: int = 2  # query heads that share a key head
    key_dim: int = 8
    value_dim: int = 8
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    num_padding: int = 0  # tokens after the last sequence's

    @property
    def options(self) -> dict[str, Any]:
        return {
            "scale": self.key_dim**-0.5,
            "sliding_window": self.sliding_window,
            "logits_soft_cap": self.logits_soft_cap,
        }


@dataclass(frozen=True)
class Step:
    """The tensors of a step: scattered blocks, and NaN wherever no key or value belongs."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())


def make_step(
    shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Step:
    """Random numbers for a shape, the same on every device.

    Blocks are dealt in random order; table entries beyond a sequence's end name blocks full of NaN,
    as stale entries in a real table may. Queries are views of a larger product of queries, keys and
    values, as a model makes them.
    """
    generator = torch.Generator().manual_seed(seed)
    queries = [queries for queries, _ in shape.seqs]
    lengths = [queries + before for queries, before in shape.seqs]
    needed = [-(-length // shape.block_size) for length in lengths]
    num_blocks = sum(needed) + 2  # the last two belong to nobody
    order = torch.randperm(num_blocks, generator=generator)
    block_table = order[-1].repeat(len(lengths), max(needed, default=0) + 1)
    cache = (num_blocks, shape.block_size, shape.num_kv_heads)
    key_cache = torch.full((*cache, shape.key_dim), math.nan, dtype=dtype)
    value_cache = torch.full((*cache, shape.value_dim), math.nan, dtype=dtype)
    dealt = 0
    for seq, length in enumerate(lengths):
        blocks = order[dealt : dealt + needed[seq]]
        dealt += needed[seq]
        block_table[seq, : len(blocks)] = blocks
        position = torch.arange(length)
        place = blocks[position // shape.block_size], position % shape.block_size
        for target, dim in ((key_cache, shape.key_dim), (value_cache, shape.value_dim)):
            noise = torch.randn(length, shape.num_kv_heads, dim, generator=generator)
            target[place] = noise.to(dtype)
    num_tokens, num_heads = sum(queries) + shape.num_padding, shape.num_kv_heads * shape.group
    rows = num_heads + 2 * shape.num_kv_heads
    product = 2 * torch.randn(num_tokens, rows, shape.key_dim, generator=generator)
    return Step(
        product.to(device, dtype)[:, :num_heads],
        key_cache.to(device),
        value_cache.to(device),
        block_table.to(device, torch.int32),
        torch.tensor([0, *queries]).cumsum(0).to(device, torch.int32),
        torch.tensor(lengths).to(device, torch.int32),
    )


STEPS: dict[str, tuple[tuple[int, int], ...]] = {
    "one token": ((1, 0),),
    "a prompt": ((13, 0),),
    "a chunk of a prompt": ((5, 9),),
    "a cached prefix": ((1, 8), (3, 8)),
    "one decode": ((1, 12),),
    "decodes of all lengths": tuple((1, before) for before in (0, 1, 3, 4, 5, 15, 16, 17, 30)),
    "verification of drafts": ((4, 10), (4, 3), (4, 0), (4, 21)),
    "all at once": ((1, 14), (7, 0), (4, 6), (1, 0), (4, 3), (12, 4), (1, 30)),
}


def _interpreter_is_broken() -> bool:
    """Triton 3.6's interpreter cannot loop up to a number it loaded, since numpy 2.4."""
    try:
        found, numpy_version = version("triton"), version("numpy")
    except PackageNotFoundError:
        return False  # tests of the kernel skip where there is no Triton
    return found.startswith("3.6.") and tuple(map(int, numpy_version.split(".")[:2])) >= (2, 4)


needs_interpreter = pytest.mark.skipif(
    _interpreter_is_broken(), reason="Triton 3.6's interpreter needs pip install 'numpy<2.4'"
)


@contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """torch.empty gives NaN: an element that is never written shows."""
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill
