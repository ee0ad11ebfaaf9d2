"""A step becomes tensors: the numbers of model_runner's docstring, and rows that live on deltas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoserve import SamplingParams
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.input_batch import PLACEHOLDER
from nanoserve.kv_cache import (
    KVCacheSpec,
    free_memory,
    num_blocks_that_fit,
    num_cpu_blocks_to_allocate,
)
from nanoserve.model_runner import ModelRunner, choose_dtype
from nanoserve.parallel import choose_device
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
    settings = {"block_size": 4, "num_kv_blocks": 16, "max_num_seqs": 3, "max_model_len": 64}
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
    assert inputs.input_ids.tolist() == [15, 20, 21, 22]
    assert inputs.positions.tolist() == [5, 0, 1, 2]
    assert inputs.metadata.slot_mapping.tolist() == [3 * 4 + 1, 2 * 4 + 0, 2 * 4 + 1, 2 * 4 + 2]
    assert inputs.metadata.query_start_loc.tolist() == [0, 1, 4]
    assert inputs.metadata.seq_lens.tolist() == [6, 3]
    assert inputs.metadata.block_table[0].tolist() == [7, 3]
    assert inputs.metadata.block_table[1, 0] == 2  # what follows is never read
    assert inputs.sampled_rows.tolist() == inputs.host.rows.tolist() == rows.tolist()
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


def test_rows_are_reused_and_unknown_ids_forgotten(runner: ModelRunner) -> None:
    """Three rows serve any number of sequences; a newcomer inherits nothing."""
    hot = SamplingParams(temperature=2.0, top_k=3, top_p=0.5, min_p=0.1, logprobs=2, seed=1)
    long = tuple(new(i, [9] * 20, (5, 6, 7, 8, 9), hot) for i in range(3))
    runner.update_batch(step(new=long))
    assert runner.batch.free_rows == []
    newcomer = new(3, [10, 11])
    rows = runner.update_batch(
        step((3, 0, 2, 0, [4]), new=(newcomer,), finished=(1, 99))  # 99 was never there
    )
    assert sorted(runner.batch.row_of) == [0, 2, 3]
    batch, row = runner.batch, rows[0]
    assert (batch.num_tokens[row], batch.num_prompt_tokens[row]) == (2, 2)
    assert batch.token_ids[row, :2].tolist() == [10, 11]
    assert batch.block_tables[row, 0] == 4
    assert (batch.temperature[row], batch.top_p[row], batch.min_p[row]) == (0, 1, 0)
    assert batch.top_k[row] == batch.vocab_size  # off
    assert batch.num_logprobs[row] is None


def test_a_sequence_may_leave_and_come_back_in_one_step(runner: ModelRunner) -> None:
    """Preempted and resumed: it is forgotten first, then new, with all that it has generated."""
    runner.update_batch(step(new=(new(0, [10, 11], (1,)),)))
    back = new(0, [10, 11, 12], (2,))
    rows = runner.update_batch(step((0, 0, 3, 1, []), new=(back,), finished=(0,)))
    assert runner.batch.num_tokens[rows[0]] == 3
    assert runner.batch.block_tables[rows[0], 0] == 2
    assert len(runner.batch.free_rows) == 2


def test_deltas_are_enough(make_checkpoint: Callable[..., Path]) -> None:
    """A runner told only what changed samples what one told everything anew each step does."""
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


def test_logprobs_come_for_those_who_ask(runner: ModelRunner) -> None:
    asking = SamplingParams(temperature=0, logprobs=2)
    sequences = (new(0, [10, 11]), new(1, [12, 13], params=asking))
    output = runner.execute_model(step((0, 0, 2, 0, [0]), (1, 0, 2, 0, [1]), new=sequences))
    assert sorted(output.sampled_token_ids) == [0, 1]
    [entry] = output.logprobs[1]
    assert list(output.logprobs) == [1]
    assert entry.token_ids[0] == output.sampled_token_ids[1][0]
    assert len(entry.token_ids) == len(entry.logprobs) == 3
    assert entry.sampled_rank == 1


def test_logprobs_of_the_prompt_come_chunk_by_chunk(runner: ModelRunner) -> None:
    """A chunk [a, b) tells of the prompt tokens a + 1 .. b; the last one of one fewer. The same
    numbers as in one step, and in tiles however small."""
    prompt = [10, 11, 12, 13, 14, 15]
    asking = SamplingParams(temperature=0, prompt_logprobs=2)
    whole = runner.execute_model(step((0, 0, 6, 0, [1, 2]), new=(new(0, prompt, params=asking),)))
    entries = whole.prompt_logprobs[0].entries
    assert whole.prompt_logprobs[0].start == 1
    assert [entry.token_ids[0] for entry in entries] == prompt[1:]
    assert all(len(entry.token_ids) == 3 for entry in entries)
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


def test_prompt_logprobs_in_small_tiles(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However few positions' logits are in memory at once."""
    asking = SamplingParams(temperature=0, prompt_logprobs=1)
    prompt = [10, 11, 12, 13, 14, 15]
    results = []
    for seq_id, tile in enumerate((64, 2, 5)):
        monkeypatch.setattr("nanoserve.model_runner.LOGPROB_TILE", tile)
        sequence = new(seq_id, prompt, params=asking)
        output = runner.execute_model(step((seq_id, 0, 6, 0, [1, 2]), new=(sequence,)))
        results.append(output.prompt_logprobs[seq_id].entries)
        runner.batch.forget(seq_id)
    assert len(results[0]) == 5
    for entries in results[1:]:
        assert [entry.token_ids for entry in entries] == [e.token_ids for e in results[0]]


def test_a_sequence_about_to_fork_samples_for_each_branch(runner: ModelRunner) -> None:
    """From one logits row: branch 0's token, and the first tokens of branches 1 and 2, which are
    what they would sample in rows of their own. Others in the step are none the wiser."""
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
        runner.batch.forget(0)
        alone = new(0, prompt, params=params, branch=branch)
        output = runner.execute_model(step((0, 0, 3, 0, [1]), new=(alone,)))
        assert output.sampled_token_ids[0] == (token_id,)
        assert output.forks == {}


# -- steps in flight --


def test_a_step_is_launched_on_a_token_that_only_the_device_knows(runner: ModelRunner) -> None:
    """Launch, launch, result, launch, result ...: what one step after another brings. The row is
    filled when a result is read; until then it holds a placeholder."""
    prompt, blocks = [10, 11, 12], (1, 2, 3, 4)
    first = step((0, 0, 3, 4, []), new=(new(0, prompt, blocks),))
    decodes = [step((0, at, 1, 4, [])) for at in range(3, 10)]
    expected = [runner.execute_model(s).sampled_token_ids[0][0] for s in (first, *decodes)]
    runner.batch.forget(0)
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


def test_a_result_that_comes_after_its_sequence_has_gone(runner: ModelRunner) -> None:
    """Its row belongs to another by then, which is left alone."""
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
    """One sequence goes on with a token in flight while another's prompt comes in: the placeholder
    is put in for the one row that has it."""
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
    """All of it: tokens up to the budget, full block tables, every filter, forks, logprobs of the
    prompt. What is sent in a step lies in the one buffer."""
    options = {"max_model_len": 64, "max_num_batched_tokens": 128, "max_num_seqs": 6}
    runner = make_runner(make_checkpoint("llama"), num_kv_blocks=64, **options)
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
    [fits] = runner.staging.send(np.zeros((room - used) // 16 * 16, np.uint8))
    assert runner.staging._on_device.data_ptr() + used == fits.data_ptr(), "nothing went elsewhere"


# -- the largest step --


@pytest.mark.parametrize(("budget", "lengths"), [(24, [24]), (64, [64]), (150, [64, 64, 22])])
def test_the_largest_step(
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    lengths: list[int],
) -> None:
    """The whole budget, in sequences of full length, and max_num_seqs rows with all filters on; it
    has one block of cache of its own, stores nothing, and leaves the engine's cache alone."""
    folder = make_checkpoint("llama")
    runner = make_runner(folder, max_num_batched_tokens=budget)
    config = EngineConfig(
        str(folder), block_size=4, max_num_seqs=3, max_model_len=64, max_num_batched_tokens=budget
    )
    for pair in runner.kv_caches:
        for cache in pair:
            cache.fill_(torch.nan)
    seen: list[Any] = []
    forward = runner.model.forward

    def record(input_ids: Any, positions: Any, kv_caches: Any, metadata: Any) -> Any:
        seen.append((input_ids, positions, kv_caches, metadata))
        return forward(input_ids, positions, kv_caches, metadata)

    def count_rows(logits: Any, batch: Any) -> None:
        seen.append((logits, batch))

    monkeypatch.setattr(runner.model, "forward", record)
    monkeypatch.setattr("nanoserve.model_runner.choose_tokens", count_rows)
    with torch.inference_mode():
        runner.profile_run(config.resolve(ModelConfig.from_folder(folder)), specs_of(runner))
    (input_ids, positions, caches, metadata), (logits, batch) = seen
    assert len(input_ids) == len(positions) == len(metadata.slot_mapping) == budget
    assert metadata.query_start_loc.diff().tolist() == metadata.seq_lens.tolist() == lengths
    assert positions.tolist() == [i for length in lengths for i in range(length)]
    assert set(metadata.slot_mapping.tolist()) == {-1}
    assert not metadata.block_table.any()
    assert {cache.shape[0] for pair in caches for cache in pair} == {1}
    assert all(not cache.any() for pair in caches for cache in pair)
    assert all(cache.isnan().all() for pair in runner.kv_caches for cache in pair)
    assert tuple(logits.shape) == (3, runner.vocab_size)
    assert None not in (batch.top_k, batch.top_p, batch.min_p)
    assert not batch.is_greedy


def specs_of(runner: ModelRunner) -> list[KVCacheSpec]:
    return runner.model.kv_cache_specs()


# -- moving blocks --


def test_blocks_are_swapped_out_in_and_copied_in_this_order(
    make_checkpoint: Callable[..., Path],
) -> None:
    """A block that is swapped out may be filled from the CPU in the same step, and one that came
    back copied on; all layers, keys and values."""
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


def test_a_sequence_goes_on_in_other_blocks(make_checkpoint: Callable[..., Path]) -> None:
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


def test_cpu_blocks_are_for_swapping() -> None:
    """None without it; as many as KV blocks, or as told."""
    assert num_cpu_blocks_to_allocate(EngineConfig(), 7) == 0
    assert num_cpu_blocks_to_allocate(EngineConfig(preemption_mode="swap"), 7) == 7
    told = EngineConfig(preemption_mode="swap", num_cpu_blocks=3)
    assert num_cpu_blocks_to_allocate(told, 7) == 3


def test_a_forward_pass_keeps_no_graph(runner: ModelRunner) -> None:
    """No gradients are recorded, and the caller's own setting stays."""
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


def blocks_that_fit(step_bytes: int = 0, **options: Any) -> int:
    """For 2 layers of 3 heads of 8 in float32: 16 tokens * 3 * (8 + 8) * 4 * 2 = 6144 bytes."""
    settings = {"max_model_len": 100, "max_num_seqs": 5, "block_size": 16, **options}
    specs = [KVCacheSpec(num_kv_heads=3, key_dim=8, value_dim=8)] * 2
    cpu = torch.device("cpu")
    return num_blocks_that_fit(EngineConfig(**settings), specs, torch.float32, cpu, step_bytes)


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


def test_what_a_step_needs_is_not_for_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of free memory; a number that the user gave is the cache's alone."""
    monkeypatch.setattr("nanoserve.kv_cache.free_memory", lambda *_: 20 * 6144)
    assert blocks_that_fit() == 20
    assert blocks_that_fit(step_bytes=6144) == 19
    assert blocks_that_fit(step_bytes=6144 + 1) == 18
    assert blocks_that_fit(step_bytes=13 * 6144) == 7
    assert blocks_that_fit(step_bytes=6144, kv_cache_memory=20 * 6144) == 20
    assert blocks_that_fit(step_bytes=6144, num_kv_blocks=3) == 3
    for step_bytes in (13 * 6144 + 1, 2**40):  # more than there is, even
        message = r"needs 0 MiB of KV cache, and there are 0 MiB.*gpu_memory_utilization"
        with pytest.raises(ValueError, match=message):
            blocks_that_fit(step_bytes=step_bytes)


def test_free_memory_is_some() -> None:
    assert free_memory(torch.device("cpu"), 0.9) > 0


def test_kv_caches_are_as_booked(runner: ModelRunner) -> None:
    """One (key, value) pair a layer, [num_blocks, block_size, num_kv_heads, head_dim], zeroed."""
    assert [tuple(cache.shape) for pair in runner.kv_caches for cache in pair] == [
        (16, 4, 2, 16)
    ] * 4
    assert all(np.all(cache.numpy() == 0) for pair in runner.kv_caches for cache in pair)
    assert runner.num_kv_blocks == 16
