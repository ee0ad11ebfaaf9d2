"""Steps to try an implementation of attention on, and what AttentionBackend, the definition, says.

    shape = Shape(((1, 14), (7, 0)), block_size=4)  # a decode after 14 tokens beside a prompt of 7
    step = make_step(shape)
    output = paged_attention(*step.tensors, **shape.options)
    assert_close(output, attention_by_definition(*step.tensors, **shape.options))

All memory that does not belong to a step is poisoned: NaN stands in every slot without a key, and
in every block that a stale entry of the block table names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoserve.attention import AttentionBackend, StepMetadata
from nanoserve.kv_cache import KVCacheSpec


def attention_by_definition(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    **options: Any,
) -> Tensor:
    """AttentionBackend.attend in float64; NaN for tokens that belong to no sequence."""
    no_slots = query_start_loc[:0]
    metadata = StepMetadata(no_slots, block_table, query_start_loc, seq_lens)
    caches = (key_cache, value_cache)
    output = AttentionBackend().attend(query.double(), caches, metadata, **options)
    output[int(query_start_loc[-1]) :] = math.nan
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
    num_padding: int = 0  # tokens after the last sequence

    @property
    def options(self) -> dict[str, Any]:
        return {
            "scale": self.key_dim**-0.5,
            "sliding_window": self.sliding_window,
            "logits_soft_cap": self.logits_soft_cap,
        }


@dataclass(frozen=True)
class Step:
    """The tensors of a step: scattered blocks, and NaN in slots without a key or value."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(vars(self).values())

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        return self.key_cache, self.value_cache

    @property
    def metadata(self) -> StepMetadata:
        """What layers get of the step. Padding has negative slots."""
        block_size, device = self.key_cache.shape[1], self.query.device
        slots = torch.full((len(self.query),), -1, device=device)
        for i, seq_len in enumerate(self.seq_lens.tolist()):
            start, end = self.query_start_loc[i : i + 2].tolist()
            position = torch.arange(seq_len - (end - start), seq_len, device=device)
            block = self.block_table[i, position // block_size].long()
            slots[start:end] = block * block_size + position % block_size
        return StepMetadata(slots, self.block_table, self.query_start_loc, self.seq_lens)


def make_step(
    shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Step:
    """Random numbers for a shape, the same on every device.

    Blocks are in random order, which depends on `seqs`, `block_size` and `seed` alone. Table
    entries beyond the end of a sequence name blocks full of NaN, as stale entries in a real table
    may. Queries are views of a larger product of queries, keys and values, as a model makes them.
    """
    generator = torch.Generator().manual_seed(seed)
    queries = [queries for queries, _ in shape.seqs]
    lengths = [queries + before for queries, before in shape.seqs]
    needed = [-(-length // shape.block_size) for length in lengths]
    num_blocks = sum(needed) + 2  # the last two belong to no sequence
    order = torch.randperm(num_blocks, generator=generator)
    block_table = order[-1].repeat(len(lengths), max(needed, default=0) + 1)
    cpu = torch.device("cpu")
    spec = KVCacheSpec(shape.num_kv_heads, shape.key_dim, shape.value_dim)
    key_cache, value_cache = spec.allocate(num_blocks, shape.block_size, dtype, cpu)
    key_cache.fill_(math.nan)
    value_cache.fill_(math.nan)
    num_dealt = 0
    for seq, length in enumerate(lengths):
        blocks = order[num_dealt : num_dealt + needed[seq]]
        num_dealt += needed[seq]
        block_table[seq, : len(blocks)] = blocks
        position = torch.arange(length)
        index = blocks[position // shape.block_size], position % shape.block_size
        for target, dim in ((key_cache, shape.key_dim), (value_cache, shape.value_dim)):
            noise = torch.randn(length, shape.num_kv_heads, dim, generator=generator)
            target[index] = noise.to(dtype)
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


@contextmanager
def bfloat16_as_on_a_gpu() -> Iterator[None]:
    """Triton's interpreter cuts bfloat16 off instead of rounding it, and multiplies matrices of it
    as if they held integers. Here it rounds to the nearest number, and multiplies in float32."""
    from triton.runtime import interpreter

    convert, create_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
    bfloat16, float32 = interpreter.tl.bfloat16, interpreter.tl.float32

    def round_to_nearest(data: Any, from_type: Any, to_type: Any, mode: Any) -> Any:
        if (from_type, to_type) != (float32, bfloat16):
            return convert(data, from_type, to_type, mode)
        rounded = torch.from_numpy(np.array(data, np.float32)).bfloat16()
        return rounded.view(torch.int16).numpy().view(np.uint16).reshape(np.shape(data))

    def dot_in_float32(builder: Any, a: Any, b: Any, *others: Any) -> Any:
        if a.dtype == bfloat16:
            a, b = builder.cast_impl(a, float32), builder.cast_impl(b, float32)
        return create_dot(builder, a, b, *others)

    with (
        mock.patch.object(interpreter, "_convert_float", round_to_nearest),
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot_in_float32),
    ):
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Tests of small tensors are faster on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
