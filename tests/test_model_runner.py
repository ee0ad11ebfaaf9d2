"""A step becomes tensors: the numbers of model_runner's docstring, and rows that live on deltas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoserve import SamplingParams
from nanoserve.attention import KVCacheSpec
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.model_runner import (
    InputBatch,
    ModelRunner,
    choose_device,
    choose_dtype,
    free_memory,
    num_blocks_that_fit,
)
from nanoserve.sequence import ModelOutput, NewSequence, ScheduledSequence, SchedulerOutput

GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def runner(make_checkpoint: Callable[..., Path]) -> ModelRunner:
    """A small Llama with block_size 4, 16 blocks, and room for three sequences."""
    return make_runner(make_checkpoint("llama"))


def make_runner(folder: Path) -> ModelRunner:
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(
        str(folder), device="cpu", block_size=4, num_kv_blocks=16, max_num_seqs=3, max_model_len=64
    )
    return ModelRunner(config.resolve(model_config), model_config)


def new(
    seq_id: int,
    token_ids: list[int],
    block_ids: tuple[int, ...] = (),
    params: SamplingParams = GREEDY,
) -> NewSequence:
    return NewSequence(seq_id, tuple(token_ids), block_ids, params, seed=seq_id)


def step(
    *scheduled: tuple[int, int, int, list[int]],
    new: tuple[NewSequence, ...] = (),
    finished: tuple[int, ...] = (),
) -> SchedulerOutput:
    """Each scheduled sequence: (seq_id, computed, scheduled, new block ids)."""
    items = tuple(ScheduledSequence(*item) for item in scheduled)
    total = sum(item.num_scheduled_tokens for item in items)
    return SchedulerOutput(items, new, finished, total)


# -- a step as tensors --


def test_the_example_of_the_docstring(runner: ModelRunner) -> None:
    """Sequence 0 decodes its 6th token, sequence 1 starts a prompt of 3; block_size 4."""
    sequences = (new(0, [10, 11, 12, 13, 14, 15], (7, 3)), new(1, [20, 21, 22]))
    scheduler_output = step((0, 5, 1, []), (1, 0, 3, [2]), new=sequences)
    rows = runner.update_batch(scheduler_output)
    inputs = runner.prepare_inputs(scheduler_output.scheduled, rows)
    assert inputs.input_ids.tolist() == [15, 20, 21, 22]
    assert inputs.positions.tolist() == [5, 0, 1, 2]
    assert inputs.metadata.slot_mapping.tolist() == [3 * 4 + 1, 2 * 4 + 0, 2 * 4 + 1, 2 * 4 + 2]
    assert inputs.metadata.query_start_loc.tolist() == [0, 1, 4]
    assert inputs.metadata.seq_lens.tolist() == [6, 3]
    assert inputs.metadata.block_table[0].tolist() == [7, 3]
    assert inputs.metadata.block_table[1, 0] == 2  # what follows is never read
    assert inputs.sampled_rows.tolist() == rows.tolist()
    assert inputs.last_tokens.tolist() == [0, 3]
    assert inputs.input_ids.dtype == inputs.positions.dtype == torch.int64
    assert inputs.metadata.slot_mapping.dtype == torch.int64
    for tensor in (
        inputs.metadata.block_table,
        inputs.metadata.query_start_loc,
        inputs.metadata.seq_lens,
    ):
        assert tensor.dtype == torch.int32


def test_a_chunk_that_is_not_the_end_samples_nothing(runner: ModelRunner) -> None:
    """A prompt of 6 in chunks of 4 and 2: the token comes with the second."""
    prompt = new(0, [10, 11, 12, 13, 14, 15])
    first = runner.execute_model(step((0, 0, 4, [1]), new=(prompt,)))
    assert first == ModelOutput({}, {})
    second = runner.execute_model(step((0, 4, 2, [2])))
    assert list(second.sampled_token_ids) == [0]


def test_the_order_of_the_batch_is_the_schedulers(runner: ModelRunner) -> None:
    """Rows are found by sequence id, in whatever order a step names them."""
    sequences = tuple(new(i, [10 + i, 20 + i]) for i in range(3))
    runner.execute_model(step(*((i, 0, 2, [i]) for i in range(3)), new=sequences))
    scheduler_output = step((2, 2, 1, []), (0, 2, 1, []))
    rows = runner.update_batch(scheduler_output)
    inputs = runner.prepare_inputs(scheduler_output.scheduled, rows)
    assert inputs.metadata.slot_mapping.tolist() == [2 * 4 + 2, 0 * 4 + 2]
    assert inputs.metadata.block_table[:, 0].tolist() == [2, 0]


# -- rows --


def test_rows_are_reused_and_unknown_ids_forgotten(runner: ModelRunner) -> None:
    """Three rows serve any number of sequences; a newcomer inherits nothing."""
    hot = SamplingParams(temperature=2.0, top_k=3, top_p=0.5, min_p=0.1, logprobs=2, seed=1)
    long = tuple(new(i, [9] * 20, (5, 6, 7, 8, 9), hot) for i in range(3))
    runner.update_batch(step(new=long))
    assert runner.batch.free_rows == []
    newcomer = new(3, [10, 11])
    rows = runner.update_batch(
        step((3, 0, 2, [4]), new=(newcomer,), finished=(1, 99))  # 99 was never there
    )
    assert sorted(runner.batch.row_of) == [0, 2, 3]
    batch, row = runner.batch, rows[0]
    assert (batch.num_tokens[row], batch.num_blocks[row]) == (2, 1)
    assert batch.token_ids[row, :2].tolist() == [10, 11]
    assert batch.block_tables[row, 0] == 4
    assert (batch.temperature[row], batch.top_p[row], batch.min_p[row]) == (0, 1, 0)
    assert batch.top_k[row] == batch.vocab_size  # off
    assert batch.num_logprobs[row] is None


def test_a_sequence_may_leave_and_come_back_in_one_step(runner: ModelRunner) -> None:
    """Preempted and resumed: it is forgotten first, then new, with all that it has generated."""
    runner.update_batch(step(new=(new(0, [10, 11], (1,)),)))
    back = new(0, [10, 11, 12], (2,))
    rows = runner.update_batch(step((0, 0, 3, []), new=(back,), finished=(0,)))
    assert runner.batch.num_tokens[rows[0]] == 3
    assert runner.batch.block_tables[rows[0], 0] == 2
    assert len(runner.batch.free_rows) == 2


def test_a_full_row_takes_no_more() -> None:
    """The last token of a sequence of max_model_len is nobody's input."""
    batch = InputBatch(max_num_seqs=1, max_model_len=3, block_size=4, vocab_size=50)
    batch.add(new(0, [1, 2]))
    batch.append_token(0, 3)
    batch.append_token(0, 4)
    assert batch.token_ids[0].tolist() == [1, 2, 3]
    assert batch.num_tokens[0] == 3


def test_deltas_are_enough(make_checkpoint: Callable[..., Path]) -> None:
    """A runner told only what changed samples what one told everything anew each step does."""
    by_deltas, in_full = (make_runner(make_checkpoint("llama")) for _ in range(2))
    prompt = [10, 11, 12, 13, 14]
    known = list(prompt)
    blocks = [3, 9, 1, 12]
    output = by_deltas.execute_model(step((0, 0, 5, blocks[:2]), new=(new(0, prompt),)))
    for _ in range(9):
        [token_id] = output.sampled_token_ids[0]
        everything = new(0, known, tuple(blocks))
        repeated = in_full.execute_model(
            step((0, 0, len(known), []), new=(everything,), finished=(0,))
        )
        assert repeated.sampled_token_ids == {0: (token_id,)}
        known.append(token_id)
        computed = len(known) - 1
        new_blocks = [blocks[computed // 4]] if computed % 4 == 0 and computed >= 8 else []
        output = by_deltas.execute_model(step((0, computed, 1, new_blocks)))


def test_logprobs_come_for_those_who_ask(runner: ModelRunner) -> None:
    asking = SamplingParams(temperature=0, logprobs=2)
    sequences = (new(0, [10, 11]), new(1, [12, 13], params=asking))
    output = runner.execute_model(step((0, 0, 2, [0]), (1, 0, 2, [1]), new=sequences))
    assert sorted(output.sampled_token_ids) == [0, 1]
    [entry] = output.logprobs[1]
    assert list(output.logprobs) == [1]
    assert entry.token_ids[0] == output.sampled_token_ids[1][0]
    assert len(entry.token_ids) == len(entry.logprobs) == 3
    assert entry.sampled_rank == 1


def test_a_forward_pass_keeps_no_graph(runner: ModelRunner) -> None:
    """No gradients are recorded, and the caller's own setting stays."""
    assert torch.is_grad_enabled()
    runner.execute_model(step((0, 0, 2, [0]), new=(new(0, [10, 11]),)))
    assert torch.is_grad_enabled()
    assert all(not cache.requires_grad for pair in runner.kv_caches for cache in pair)


# -- choices --


def test_choose_device() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert choose_device("auto").type == expected
    with pytest.raises(ValueError, match=r"'cuda:99', but torch sees \d+ CUDA.*device='cpu'"):
        choose_device("cuda:99")


def test_choose_dtype() -> None:
    """auto: float32 on a CPU, the checkpoint's own on a GPU (no GPU is needed to choose)."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_dtype("auto", "bfloat16", cpu) == torch.float32
    assert choose_dtype("auto", "bfloat16", gpu) == torch.bfloat16
    assert choose_dtype("auto", "float16", gpu) == torch.float16
    assert choose_dtype("bfloat16", "float32", cpu) == torch.bfloat16
    for checkpoint in ("float64", "float8_e4m3fn", "no such type"):
        with pytest.raises(ValueError, match=rf"'{checkpoint}' is not supported; use float32"):
            choose_dtype("auto", checkpoint, gpu)


def blocks_that_fit(**options: Any) -> int:
    """For 2 layers of 3 heads of 8 in float32: 16 tokens * 3 * (8 + 8) * 4 * 2 = 6144 bytes."""
    settings = {"max_model_len": 100, "max_num_seqs": 5, "block_size": 16, **options}
    specs = [KVCacheSpec(num_kv_heads=3, key_dim=8, value_dim=8)] * 2
    cpu = torch.device("cpu")
    return num_blocks_that_fit(EngineConfig(**settings), specs, torch.float32, cpu)


def test_blocks_that_fit() -> None:
    assert blocks_that_fit(num_kv_blocks=2) == 2  # asked for: as few as a test wants
    assert blocks_that_fit(num_kv_blocks=1000) == 1000
    assert blocks_that_fit(kv_cache_memory=10 * 6144) == 10
    assert blocks_that_fit(kv_cache_memory=11 * 6144 - 1) == 10
    assert blocks_that_fit(kv_cache_memory=2**40) == 5 * 7  # 7 blocks hold 100 tokens
    assert 7 <= blocks_that_fit() <= 5 * 7  # from what is free
    assert blocks_that_fit(kv_cache_memory=7 * 6144) == 7
    with pytest.raises(ValueError, match=r"max_model_len=100 tokens needs.*Lower max_model_len"):
        blocks_that_fit(kv_cache_memory=7 * 6144 - 1)


def test_free_memory_is_some() -> None:
    assert free_memory(torch.device("cpu"), 0.9) > 0


def test_kv_caches_are_as_booked(runner: ModelRunner) -> None:
    """One (key, value) pair a layer, [num_blocks, block_size, num_kv_heads, head_dim], zeroed."""
    assert [tuple(cache.shape) for pair in runner.kv_caches for cache in pair] == [
        (16, 4, 2, 16)
    ] * 4
    assert all(np.all(cache.numpy() == 0) for pair in runner.kv_caches for cache in pair)
    assert runner.num_kv_blocks == 16
