"""The CPU's attention where tests of any backend (test_attention.py) do not reach."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from attention_oracle import (
    STEPS,
    Shape,
    attention_by_definition,
    make_step,
    one_thread,
    unwritten_memory_is_nan,
)

from nanoserve.attention import StepMetadata
from nanoserve.kernels.attention_cpu import (
    GatheredPrefill,
    SparseDecode,
    TorchBackend,
    as_rows,
    paged_attention_torch,
    split_batch,
)
from nanoserve.kv_cache import KVCacheSpec

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread_and_poisoned_memory() -> Iterator[None]:
    """An output element that is never written is NaN."""
    with one_thread(), unwritten_memory_is_nan():
        yield


def assert_as_defined(shape: Shape, dtype: torch.dtype = torch.float32) -> None:
    step = make_step(shape, dtype=dtype)
    before = [tensor.clone() for tensor in step.tensors]
    output = paged_attention_torch(*step.tensors, **shape.options)
    expected = attention_by_definition(*step.tensors, **shape.options)
    assert output.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    for tensor, was in zip(step.tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(7e7), was.nan_to_num(7e7)), "an input was changed"


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", STEPS)
def test_steps_by_name(name: str, window: int | None) -> None:
    """Without a plan: a function that takes tensors, as DESIGN's contract has it."""
    assert_as_defined(Shape(STEPS[name], sliding_window=window))


@pytest.mark.parametrize("window", [None, 100])
def test_a_long_prompt_beside_decodes(window: int | None) -> None:
    """Longer than QUERY_TILE."""
    seqs = ((1, 20), (530, 70), (1, 333), (530, 0))
    assert_as_defined(Shape(seqs, 16, num_kv_heads=1, group=1, key_dim=4, sliding_window=window))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_half_precision(dtype: torch.dtype, soft_cap: float | None) -> None:
    assert_as_defined(Shape(STEPS["all at once"], logits_soft_cap=soft_cap), dtype=dtype)


def test_a_cache_laid_out_otherwise() -> None:
    """Slots before heads: read all the same, by way of a copy."""
    shape = Shape(STEPS["all at once"])
    step = make_step(shape)
    caches = [cache.contiguous() for cache in step.caches]
    assert caches[0].stride() != step.key_cache.stride()
    output = paged_attention_torch(step.query, *caches, *step.tensors[3:], **shape.options)
    expected = attention_by_definition(*step.tensors, **shape.options)
    torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5)


def test_decodes_are_read_where_they_lie_and_prompts_are_gathered() -> None:
    """In float32 on a CPU. Every query belongs to one part of the step."""
    table = torch.arange(24).view(4, 6).int()
    starts, lengths = torch.tensor([0, 1, 9, 12, 12]).int(), torch.tensor([7, 8, 20, 5]).int()
    decode, prefill = split_batch(table, starts, lengths, 4, torch.float32)
    assert isinstance(decode, SparseDecode) and decode.tokens.tolist() == [0, 9, 10, 11]
    assert isinstance(prefill, GatheredPrefill) and prefill.tokens(0, 8).tolist() == [*range(1, 9)]
    parts = split_batch(table, starts, lengths, 4, torch.bfloat16)
    assert all(isinstance(part, GatheredPrefill) for part in parts)


def test_no_block_is_copied() -> None:
    """A cache as KVCacheSpec allocates it is a table of vectors as it lies in memory."""
    for cache in KVCacheSpec(3, 8, 4).allocate(5, 4, torch.float32, CPU):
        rows = as_rows(cache)
        assert rows.shape == (5 * 3 * 4, cache.shape[-1])
        assert rows.data_ptr() == cache.data_ptr()
        rows[(2 * 3 + 1) * 4 + 3] = 7  # block 2, head 1, slot 3
        assert cache[2, 3, 1].eq(7).all()


def test_a_layer_of_infinite_scores_leaves_nothing_for_the_next() -> None:
    """The memory of the scores is used again, and 0 * inf is NaN."""
    backend = TorchBackend()
    caches = KVCacheSpec(1, 4, 4).allocate(4, 4, torch.float32, CPU)
    for cache in caches:
        torch.nn.init.normal_(cache)
    infinite = caches[0].clone().fill_(math.inf)
    metadata = StepMetadata(
        slot_mapping=torch.tensor([3, 7]),
        block_table=torch.tensor([[0, 0], [1, 2]]).int(),
        query_start_loc=torch.tensor([0, 1, 2]).int(),
        seq_lens=torch.tensor([3, 6]).int(),
    )
    query = torch.randn(2, 1, 4)
    expected = backend.attend(query, caches, metadata, scale=1.0)
    metadata = backend.plan(metadata, 4, torch.float32)
    assert backend.attend(query, (infinite, caches[1]), metadata, scale=1.0).isnan().all()
    assert torch.equal(backend.attend(query, caches, metadata, scale=1.0), expected)


def test_a_process_of_other_defaults_gets_the_same() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert_as_defined(Shape(seqs=((1, 9), (1, 4), (6, 6))))
    finally:
        torch.set_default_dtype(torch.float32)


def test_more_keys_than_32_bits_tell_apart_are_refused() -> None:
    """Rather than read from elsewhere. (The cache is one number, repeated: it takes no memory.)"""
    cache = torch.zeros(1).expand(2**28, 8, 1, 1)
    tables = torch.zeros(1, 1).int(), torch.tensor([0, 1]).int(), torch.tensor([3]).int()
    [decode] = split_batch(*tables, 8, torch.float32)
    assert isinstance(decode, SparseDecode)
    with pytest.raises(ValueError, match=r"32-bit.*num_gpu_blocks_override"):
        decode.make_pattern(len(cache), 1, 1, None)


@pytest.mark.parametrize("num_queries", [1, 6], ids=["decode", "prompt"])
@pytest.mark.parametrize("block", [-1, 3, 2**20, 2**30, -(2**30)])
def test_a_block_that_does_not_exist_is_refused(block: int, num_queries: int) -> None:
    """And not read from the memory around the cache. (2**30 * 4 slots is 0 in 32 bits.) Entries of
    a table behind its sequence's last block may be anything."""
    caches = KVCacheSpec(1, 8, 8).allocate(3, 4, torch.float32, CPU)
    query = torch.ones(2 * num_queries, 1, 8)
    starts, lengths = torch.arange(3).int() * num_queries, torch.tensor([6, 10]).int()

    def attend(*table: list[int]) -> torch.Tensor:
        tables = torch.tensor(table).int(), starts, lengths
        return paged_attention_torch(query, *caches, *tables, scale=1.0)

    for table in ([0, 1, 0], [2, 1, block]), ([0, block, 0], [2, 1, 0]):
        with pytest.raises(IndexError):
            attend(*table)
    assert attend([0, 1, block, block], [2, 1, 0, block]).eq(0).all()


def test_no_warning_of_a_beta_state_is_shown() -> None:
    """PyTorch shows one for the first sparse tensor of a process."""
    code = (
        "import torch; from nanoserve.kernels.attention_cpu import *; "
        "from nanoserve.kv_cache import KVCacheSpec; "
        "c = KVCacheSpec(1, 4, 4).allocate(2, 4, torch.float32, torch.device('cpu')); "
        "t = torch.tensor([[0]]).int(), torch.tensor([0, 1]).int(), torch.tensor([3]).int(); "
        "print(paged_attention_torch(torch.ones(1, 1, 4), *c, *t, scale=1.0).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[[0.0, 0.0, 0.0, 0.0]]]" and "beta" not in done.stderr
