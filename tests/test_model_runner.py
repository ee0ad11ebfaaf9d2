"""A step becomes tensors, with the numbers of model_runner's docstring; then tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoserve import SamplingParams
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.device import choose_device
from nanoserve.input_batch import PLACEHOLDER
from nanoserve.kernels.selector import choose_dtype
from nanoserve.model_runner import ModelRunner
from nanoserve.sequence import (
    BlockPair,
    ModelOutput,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
)

GREEDY = SamplingParams(temperature=0)


@pytest.fixture
def runner(make_checkpoint: Callable[..., Path]) -> ModelRunner:
    """A small Llama with block_size 4, 16 blocks, and room for three sequences."""
    return make_runner(make_checkpoint("llama"))


def make_runner(folder: Path, **options: Any) -> ModelRunner:
    model_config = ModelConfig.from_folder(folder)
    settings = {
        "block_size": 4,
        "num_gpu_blocks_override": 16,
        "max_num_seqs": 3,
        "max_model_len": 64,
    }
    config = EngineConfig(str(folder), device="cpu", **{**settings, **options})
    return ModelRunner(config.resolve(model_config), model_config)


def new(
    seq_id: int,
    token_ids: list[int],
    block_ids: tuple[int, ...] = (),
    params: SamplingParams = GREEDY,
    num_prompt_tokens: int | None = None,
    num_samples: int = 1,
    branch: int = 0,
) -> NewSequence:
    """All of a sequence's tokens are its prompt, unless told otherwise."""
    return NewSequence(
        seq_id=seq_id,
        token_ids=tuple(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        block_ids=block_ids,
        sampling_params=params,
        stop_token_ids=frozenset({1}),
        bad_word_ids=(),
        seed=seq_id if params.seed is None else params.seed,
        branch=branch,
        num_samples=num_samples,
    )


def step(
    *scheduled: tuple[int, int, int, int, list[int]],
    new: tuple[NewSequence, ...] = (),
    finished: tuple[int, ...] = (),
    **moves: tuple[BlockPair, ...],
) -> SchedulerOutput:
    """Each scheduled sequence: (seq_id, computed, scheduled, first new block, new block ids)."""
    items = tuple(ScheduledSequence(*item) for item in scheduled)
    total = sum(item.num_scheduled_tokens for item in items)
    return SchedulerOutput(items, new, finished, total, **moves)


# -- a step as tensors --


def test_the_example_of_the_docstring(runner: ModelRunner) -> None:
    """Sequence 0 decodes its 6th token, sequence 1 starts a prompt of 3; block_size 4."""
    sequences = (new(0, [10, 11, 12, 13, 14, 15], (7, 3)), new(1, [20, 21, 22]))
    scheduler_output = step((0, 5, 1, 2, []), (1, 0, 3, 0, [2]), new=sequences)
    rows = runner.update_batch(scheduler_output)
    inputs = runner.prepare_inputs(scheduler_output.scheduled, rows)
    tensors = inputs.tensors
    assert tensors.input_ids.tolist() == [15, 20, 21, 22]
    assert tensors.positions.tolist() == [5, 0, 1, 2]
    assert tensors.token_rows.tolist() == [rows[0], rows[1], rows[1], rows[1]]
    assert tensors.slot_mapping.tolist() == [3 * 4 + 1, 2 * 4 + 0, 2 * 4 + 1, 2 * 4 + 2]
    assert tensors.query_start_loc.tolist() == [0, 1, 4]
    assert tensors.seq_lens.tolist() == [6, 3]
    assert tensors.block_table[0].tolist() == [7, 3]
    assert tensors.block_table[1, 0] == 2  # the next entry is never read
    assert tensors.sampled_rows.tolist() == rows.tolist()
    assert tensors.logits_indices.tolist() == [0, 3]
    for name, tensor in vars(tensors).items():
        is_short = name in ("query_start_loc", "seq_lens", "block_table")
        assert tensor.dtype == (torch.int32 if is_short else torch.int64)
        assert tensor.tolist() == getattr(inputs.arrays, name).tolist()
    for name in ("slot_mapping", "query_start_loc", "seq_lens", "block_table"):
        assert getattr(inputs.metadata, name) is getattr(tensors, name)


def test_a_chunk_that_is_not_the_end_samples_nothing(runner: ModelRunner) -> None:
    """A prompt of 6 in chunks of 4 and 2: the token comes with the second."""
    prompt = new(0, [10, 11, 12, 13, 14, 15])
    first = runner.execute_model(step((0, 0, 4, 0, [1]), new=(prompt,)))
    assert first == ModelOutput({}, {})
    second = runner.execute_model(step((0, 4, 2, 1, [2])))
    assert list(second.sampled_token_ids) == [0]


def test_the_order_of_the_batch_is_the_schedulers(runner: ModelRunner) -> None:
    """Rows are found by sequence id, in whatever order a step names them."""
    sequences = tuple(new(i, [10 + i, 20 + i]) for i in range(3))
    runner.execute_model(step(*((i, 0, 2, 0, [i]) for i in range(3)), new=sequences))
    scheduler_output = step((2, 2, 1, 1, []), (0, 2, 1, 1, []))
    rows = runner.update_batch(scheduler_output)
    inputs = runner.prepare_inputs(scheduler_output.scheduled, rows)
    assert inputs.metadata.slot_mapping.tolist() == [2 * 4 + 2, 0 * 4 + 2]
    assert inputs.metadata.block_table[:, 0].tolist() == [2, 0]


# -- rows --


def test_a_sequence_may_leave_and_come_back_in_one_step(runner: ModelRunner) -> None:
    """Preempted and resumed: the runner removes its row, then adds it with all its tokens."""
    runner.update_batch(step(new=(new(0, [10, 11], (1,)),)))
    back = new(0, [10, 11, 12], (2,))
    rows = runner.update_batch(step((0, 0, 3, 1, []), new=(back,), finished=(0,)))
    assert runner.batch.num_tokens[rows[0]] == 3
    assert runner.batch.block_tables[rows[0], 0] == 2
    assert len(runner.batch.free_rows) == 2


def test_deltas_are_enough(make_checkpoint: Callable[..., Path]) -> None:
    """A runner that gets only changes samples the tokens of one that gets everything each step."""
    by_deltas, in_full = (make_runner(make_checkpoint("llama")) for _ in range(2))
    prompt = [10, 11, 12, 13, 14]
    known = list(prompt)
    blocks = [3, 9, 1, 12]
    output = by_deltas.execute_model(step((0, 0, 5, 0, blocks[:2]), new=(new(0, prompt),)))
    for _ in range(9):
        [token_id] = output.sampled_token_ids[0]
        everything = new(0, known, tuple(blocks))
        repeated = in_full.execute_model(
            step((0, 0, len(known), len(blocks), []), new=(everything,), finished=(0,))
        )
        assert repeated.sampled_token_ids == {0: (token_id,)}
        known.append(token_id)
        computed = len(known) - 1
        new_blocks = [blocks[computed // 4]] if computed % 4 == 0 and computed >= 8 else []
        output = by_deltas.execute_model(step((0, computed, 1, computed // 4, new_blocks)))


def test_logprobs_come_for_sequences_that_ask(runner: ModelRunner) -> None:
    asking = SamplingParams(temperature=0, logprobs=2)
    sequences = (new(0, [10, 11]), new(1, [12, 13], params=asking))
    output = runner.execute_model(step((0, 0, 2, 0, [0]), (1, 0, 2, 0, [1]), new=sequences))
    assert sorted(output.sampled_token_ids) == [0, 1]
    [entry] = output.logprobs[1]
    assert list(output.logprobs) == [1]
    assert entry.token_ids[0] == output.sampled_token_ids[1][0]
    assert len(entry.token_ids) == len(entry.logprobs) == 3
    assert entry.sampled_rank == 1


@pytest.mark.parametrize("tile", [64, 2, 3])
def test_logprobs_of_the_prompt_come_chunk_by_chunk(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, tile: int
) -> None:
    """A chunk [a, b) has those of prompt tokens a + 1 .. b, but the last chunk has one fewer. The
    numbers are those of one step, in tiles of any size."""
    prompt = [10, 11, 12, 13, 14, 15]
    asking = SamplingParams(temperature=0, prompt_logprobs=2)
    whole = runner.execute_model(step((0, 0, 6, 0, [1, 2]), new=(new(0, prompt, params=asking),)))
    entries = whole.prompt_logprobs[0].entries
    assert whole.prompt_logprobs[0].start == 1
    assert [entry.token_ids[0] for entry in entries] == prompt[1:]
    assert all(len(entry.token_ids) == 3 for entry in entries)
    monkeypatch.setattr("nanoserve.prompt_logprobs.LOGPROB_TILE", tile)
    found = []
    beside = new(2, [20, 21, 22])  # does not ask, and comes first in the step
    for output, start in (
        (runner.execute_model(step((1, 0, 4, 0, [3]), new=(new(1, prompt, params=asking),))), 1),
        (runner.execute_model(step((2, 0, 3, 0, [5]), (1, 4, 2, 1, [4]), new=(beside,))), 5),
    ):
        assert list(output.prompt_logprobs) == [1]
        assert output.prompt_logprobs[1].start == start
        found += output.prompt_logprobs[1].entries
    assert [entry.token_ids for entry in found] == [entry.token_ids for entry in entries]
    for entry, other in zip(found, entries, strict=True):
        assert entry.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert entry.sampled_rank == other.sampled_rank


def test_a_sequence_about_to_fork_samples_for_each_branch(runner: ModelRunner) -> None:
    """One row of logits gives the first tokens of branches 0, 1 and 2: the tokens that sequences of
    their own would sample. Another sequence of the step is not affected."""
    params = SamplingParams(temperature=3.0, seed=5, logprobs=1)
    prompt = [10, 11, 12]
    forking, greedy = new(0, prompt, params=params, num_samples=3), new(9, prompt)
    output = runner.execute_model(step((9, 0, 3, 0, [8]), (0, 0, 3, 0, [1]), new=(greedy, forking)))
    assert sorted(output.sampled_token_ids) == [0, 9]
    assert list(output.forks) == [0]
    tokens = [output.sampled_token_ids[0][0], *(fork.token_id for fork in output.forks[0])]
    assert len(tokens) == 3
    assert all(fork.logprobs[0].token_ids[0] == fork.token_id for fork in output.forks[0])
    for branch, token_id in enumerate(tokens):
        runner.batch.remove(0)
        alone = new(0, prompt, params=params, branch=branch)
        output = runner.execute_model(step((0, 0, 3, 0, [1]), new=(alone,)))
        assert output.sampled_token_ids[0] == (token_id,)
        assert output.forks == {}


# -- steps in flight --


def test_a_step_is_launched_on_a_token_that_only_the_device_knows(runner: ModelRunner) -> None:
    """Launch, launch, result, launch, result ... brings the tokens of one step after another. A row
    holds a placeholder until the result is read."""
    prompt, blocks = [10, 11, 12], (1, 2, 3, 4)
    first = step((0, 0, 3, 4, []), new=(new(0, prompt, blocks),))
    decodes = [step((0, at, 1, 4, [])) for at in range(3, 10)]
    expected = [runner.execute_model(s).sampled_token_ids[0][0] for s in (first, *decodes)]
    runner.batch.remove(0)
    tokens = []
    pending = runner.launch(first)
    for at, scheduler_output in enumerate(decodes, start=3):
        row = runner.batch.row_of[0]
        assert runner.batch.token_ids[row, at] == PLACEHOLDER
        following = runner.launch(scheduler_output)
        tokens += pending.result().sampled_token_ids[0]
        assert runner.batch.token_ids[row, at] == tokens[-1]
        pending = following
    assert [*tokens, *pending.result().sampled_token_ids[0]] == expected


def test_a_result_that_comes_after_its_sequence_was_removed(runner: ModelRunner) -> None:
    """Its row belongs to another sequence by then, and is not written to."""
    runner.execute_model(step((0, 0, 2, 0, [1]), new=(new(0, [10, 11]),)))
    late = runner.launch(step((0, 2, 1, 1, [])))
    row = runner.batch.row_of[0]
    newcomer = new(1, [20, 21, 22, 23])
    runner.launch(step((1, 0, 4, 0, [2]), new=(newcomer,), finished=(0,))).result()
    assert runner.batch.row_of == {1: row}
    before = runner.batch.token_ids[row, :5].tolist()
    assert list(late.result().sampled_token_ids) == [0]
    assert runner.batch.token_ids[row, :5].tolist() == before


def test_two_in_flight_beside_a_prompt(runner: ModelRunner) -> None:
    """One sequence continues with a token in flight while another starts its prompt: the token
    replaces the one placeholder."""
    alone = [
        runner.execute_model(step((i, 0, len(p), 1, []), new=(new(i, p, (9 + i,)),)))
        for i, p in enumerate(([10, 11], [20, 21, 22]))
    ]
    second = runner.execute_model(step((0, 2, 1, 1, []))).sampled_token_ids[0]
    runner.update_batch(step(finished=(0, 1)))
    one = runner.launch(step((0, 0, 2, 0, [1]), new=(new(0, [10, 11]),)))
    both = step((1, 0, 3, 0, [2]), (0, 2, 1, 1, []), new=(new(1, [20, 21, 22]),))
    two = runner.launch(both)
    assert one.result() == alone[0]
    output = two.result()
    assert output.sampled_token_ids == {0: second, 1: alone[1].sampled_token_ids[1]}


def test_what_was_sampled_is_not_overwritten_by_the_next_step(runner: ModelRunner) -> None:
    """Tokens, logprobs and prompt logprobs of a step are read after the next was launched."""
    asking = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2)
    first = step((0, 0, 4, 1, []), new=(new(0, [10, 11, 12, 13], (1, 2), asking),))
    expected = runner.execute_model(first)
    runner.update_batch(step(finished=(0,)))
    pending = runner.launch(first)
    other = new(1, [30, 31, 32], (4,), asking)
    following = runner.launch(step((0, 4, 1, 2, []), (1, 0, 3, 1, []), new=(other,)))
    assert pending.result() == expected
    assert sorted(following.result().sampled_token_ids) == [0, 1]


def test_staging_has_room_for_the_largest_step(make_checkpoint: Callable[..., Path]) -> None:
    """Tokens up to the budget, full block tables, every filter, forks, logprobs of the prompt: all
    arrays of the step have room in the buffer."""
    options = {"max_model_len": 64, "max_num_batched_tokens": 128, "max_num_seqs": 6}
    runner = make_runner(make_checkpoint("llama"), num_gpu_blocks_override=64, **options)
    asking = SamplingParams(
        temperature=1.0, top_k=5, top_p=0.9, min_p=0.01, seed=1, prompt_logprobs=1
    )
    sequences = tuple(
        new(i, [9 + i] * 60, tuple(range(16)), asking, num_samples=2 if i == 0 else 1)
        for i in range(2)
    )
    ones = tuple(new(i, [7] * 63, tuple(range(16)), asking, 62) for i in range(2, 5))
    scheduled = [(i, 0, 60, 16, []) for i in range(2)] + [(i, 62, 1, 16, []) for i in range(2, 5)]
    runner.execute_model(step(*scheduled, new=(*sequences, *ones)))
    used, room = runner.staging._offset, len(runner.staging._on_device)
    assert 123 * 40 < used <= room
    fits = runner.staging.send(rest=np.zeros((room - used) // 16 * 16, np.uint8))["rest"]
    assert runner.staging._on_device.data_ptr() + used == fits.data_ptr(), "an array had no room"


# -- moving blocks --


def test_blocks_are_swapped_out_in_and_copied_in_this_order(
    make_checkpoint: Callable[..., Path],
) -> None:
    """A step may fill a block that it swaps out, and copy a block that it swaps in. All layers are
    copied, keys and values."""
    runner = make_runner(make_checkpoint("llama"), preemption_mode="swap", num_cpu_blocks=5)
    assert (runner.num_cpu_blocks, len(runner.cpu_kv_caches)) == (5, len(runner.kv_caches))
    for caches in (runner.kv_caches, runner.cpu_kv_caches):
        for i, cache in enumerate(cache for pair in caches for cache in pair):
            cache.copy_(torch.randn_like(cache) + i)
    before = [[cache.clone() for cache in pair] for pair in runner.kv_caches]
    on_cpu = [[cache.clone() for cache in pair] for pair in runner.cpu_kv_caches]
    runner.execute_model(
        step(
            (0, 0, 2, 0, [15]),
            new=(new(0, [10, 11]),),
            blocks_to_swap_out=((3, 4), (5, 0)),
            blocks_to_swap_in=((2, 3), (1, 7)),
            blocks_to_copy=((7, 9), (1, 2)),
        )
    )
    for layer, (kv, cpu) in enumerate(zip(runner.kv_caches, runner.cpu_kv_caches, strict=True)):
        for i in range(2):
            assert torch.equal(cpu[i][4], before[layer][i][3])
            assert torch.equal(cpu[i][0], before[layer][i][5])
            assert torch.equal(kv[i][3], on_cpu[layer][i][2])
            assert torch.equal(kv[i][7], on_cpu[layer][i][1])
            assert torch.equal(kv[i][9], on_cpu[layer][i][1])
            assert torch.equal(kv[i][2], before[layer][i][1])
            for untouched in (0, 1, 4, 5, 6, 8, 10):
                assert torch.equal(kv[i][untouched], before[layer][i][untouched])


def test_a_sequence_continues_in_other_blocks(make_checkpoint: Callable[..., Path]) -> None:
    """Swapped out and in again, or on copies: the token is the one it would have sampled."""
    runner = make_runner(make_checkpoint("llama"), preemption_mode="swap")
    assert runner.num_cpu_blocks == runner.num_kv_blocks == 16
    prompt = [10, 11, 12, 13, 14]
    first = runner.execute_model(step((0, 0, 5, 0, [1, 2]), new=(new(0, prompt),)))
    [token_id] = first.sampled_token_ids[0]
    [expected] = runner.execute_model(step((0, 5, 1, 2, []))).sampled_token_ids[0]
    runner.execute_model(
        step(
            (8, 0, 3, 0, [5]),
            new=(new(8, [7, 8, 9]),),
            finished=(0,),
            blocks_to_swap_out=((1, 9), (2, 3)),
        )
    )
    for pair in runner.kv_caches:
        for cache in pair:
            cache[[1, 2]] = 0
    back = new(0, [*prompt, token_id], (6, 4), num_prompt_tokens=5)
    swapped_in = step((0, 5, 1, 2, []), new=(back,), blocks_to_swap_in=((9, 6), (3, 4)))
    assert runner.execute_model(swapped_in).sampled_token_ids[0] == (expected,)
    copied = new(1, [*prompt, token_id], (6, 4), num_prompt_tokens=5)
    on_a_copy = step((1, 5, 1, 1, [12]), new=(copied,), blocks_to_copy=((4, 12),))
    assert runner.execute_model(on_a_copy).sampled_token_ids[1] == (expected,)


def test_a_forward_pass_records_no_gradients(runner: ModelRunner) -> None:
    """The caller's own setting stays."""
    assert torch.is_grad_enabled()
    runner.execute_model(step((0, 0, 2, 0, [0]), new=(new(0, [10, 11]),)))
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


def test_kv_caches_have_the_shape_of_the_spec(runner: ModelRunner) -> None:
    """One (key, value) pair a layer, [num_blocks, block_size, num_kv_heads, head_dim], zeroed."""
    assert [tuple(cache.shape) for pair in runner.kv_caches for cache in pair] == [
        (16, 4, 2, 16)
    ] * 4
    assert all(np.all(cache.numpy() == 0) for pair in runner.kv_caches for cache in pair)
    assert runner.num_kv_blocks == 16
