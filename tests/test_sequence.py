"""The nouns: the counters and statuses of a sequence, and values that can leave the process."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from fakes import FakeEngine, make_sequence

from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import RequestMetrics, SchedulerOutput, Sequence, SequenceStatus


def test_the_counters() -> None:
    """num_tokens = num_prompt_tokens + num_output_tokens. The prompt stays as it was."""
    prompt = [5, 6, 7]
    seq = make_sequence(0, prompt)
    seq.token_ids += [8, 9]
    seq.num_computed_tokens = 3
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_output_tokens) == (5, 3, 2)
    assert (prompt, seq.prompt_token_ids, seq.output_token_ids) == ([5, 6, 7], [5, 6, 7], [8, 9])
    assert seq.num_uncomputed_tokens == 2
    seq.num_output_placeholders = 1
    assert (seq.num_tokens, seq.num_uncomputed_tokens) == (5, 3)


@pytest.mark.parametrize("status", SequenceStatus)
def test_only_finished_sequences_have_a_finish_reason(status: SequenceStatus) -> None:
    """One of vLLM's four."""
    finished = status.name.startswith("FINISHED")
    assert status.finish_reason in ({"stop", "length", "abort", "error"} if finished else {None})


@pytest.mark.parametrize(
    ("num_in_flight", "max_tokens", "fields", "is_blocked"),
    [
        (0, 1, {"always_sync": True}, False),
        (1, 3, {}, False),
        (1, 2, {}, False),
        (1, 1, {}, True),  # the token in flight is the last one
        (1, 3, {"always_sync": True}, True),
        (1, 3, {"num_pending_forks": 1}, True),
        (1, 3, {"bad_word_ids": ((1, 2),)}, True),  # the sampler reads the tokens
        (
            1,
            3,
            {"sampling_params": SamplingParams(logits_processors=[lambda output, logits: logits])},
            True,
        ),
    ],
)
def test_which_sequences_wait_for_a_token_in_flight(
    num_in_flight: int, max_tokens: int, fields: dict[str, Any], is_blocked: bool
) -> None:
    seq = make_sequence(0, [1], max_tokens, num_output_placeholders=num_in_flight, **fields)
    assert seq.blocked_by_in_flight is is_blocked
    assert seq.needs_sync is bool(fields)
    assert seq.is_ready() is (num_in_flight == 0)


def test_sequences_are_compared_by_identity() -> None:
    """Two requests may be equal in every field."""
    first, second = make_sequence(0, [1]), make_sequence(0, [1])
    assert first != second
    assert len({first, second}) == 2


def test_a_sequence_has_no_other_fields() -> None:
    """A misspelt attribute is an error, not a new field."""
    seq = make_sequence(0, [1])
    with pytest.raises(AttributeError):
        seq.num_computed_token = 1  # type: ignore[attr-defined]


def test_a_step_is_a_value() -> None:
    """A step refers to no live sequence, does not change, and can be sent to another process, with
    new branches, copies, swaps and parameters of every kind."""
    engine = FakeEngine(num_blocks=5, block_size=4, preemption_mode="swap")
    params = SamplingParams(
        n=2, stop_token_ids=[7], allowed_token_ids=[1, 2], logit_bias={3: 1.0}, bad_words=["no"]
    )
    engine.add(range(9), max_tokens=9, n=2, sampling_params=params, bad_word_ids=((1, 2), (3,)))
    seen = set()
    while engine.scheduler.has_unfinished():
        output = engine.scheduler.schedule()
        copy = pickle.loads(pickle.dumps(output))
        engine.execute(output)
        assert copy == output
        assert not any(isinstance(value, Sequence) for new in output.new_sequences for value in new)
        for name in ("new_sequences", "blocks_to_copy", "blocks_to_swap_out", "blocks_to_swap_in"):
            seen |= {name} if getattr(output, name) else set()
    assert len(seen) == 4
    with pytest.raises(FrozenInstanceError):
        output.scheduled = ()  # type: ignore[misc]


def test_an_empty_step() -> None:
    assert SchedulerOutput((), (), (), 0).is_empty
    assert FakeEngine().step().is_empty


def test_a_new_sequence_has_all_that_the_runner_needs() -> None:
    engine = FakeEngine()
    fields = {"stop_token_ids": frozenset({1}), "bad_word_ids": ((8, 9),), "cache_salt": "mine"}
    seq = engine.add([5, 6, 7], n=3, seed=11, **fields)
    [new] = engine.scheduler.schedule().new_sequences
    assert new._asdict() == {
        "seq_id": seq.seq_id,
        "token_ids": (5, 6, 7),
        "num_prompt_tokens": 3,
        "block_ids": (),
        "sampling_params": seq.sampling_params,
        "stop_token_ids": frozenset({1}),
        "bad_word_ids": ((8, 9),),
        "seed": 11,
        "branch": 0,
        "num_samples": 3,
        "extra_keys": "mine",
        "lora_slot": -1,
        "structured_output_request": None,
    }


# -- metrics --


def test_times_and_latencies() -> None:
    """Queue time and time to first token count from the arrival. The latency is a mean."""
    metrics = RequestMetrics(arrival_time=7e8, queued_ts=10.0, scheduled_ts=11.5)
    for now in (13.0, 13.5, 15.0):
        metrics.record_tokens(now, 1)
    assert metrics.queue_time == 1.5
    assert metrics.first_token_latency == 3.0
    assert (metrics.last_token_ts, metrics.num_generation_tokens) == (15.0, 3)
    assert metrics.inter_token_latency(3) == 1.0


def test_times_that_have_not_come_are_none() -> None:
    metrics = RequestMetrics(arrival_time=7e8, queued_ts=10.0)
    assert (metrics.queue_time, metrics.first_token_latency) == (None, None)
    assert metrics.inter_token_latency(0) is None
    metrics.record_tokens(11.0, 1)
    assert metrics.inter_token_latency(1) is None


def test_the_times_come_in_order() -> None:
    """Each branch has its own record."""
    engine = FakeEngine()
    engine.add([1, 2, 3], max_tokens=3, n=2)
    sequences = [update.sequence for update in engine.execute(engine.scheduler.schedule())]
    engine.run()
    assert len({id(seq.metrics) for seq in sequences}) == 2
    for metrics in (seq.metrics for seq in sequences):
        names = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "finished_ts")
        times = [getattr(metrics, name) for name in names]
        assert times == sorted(times)
        assert (metrics.num_generation_tokens, metrics.num_preemptions) == (3, 0)


def test_another_branch_shares_nothing_that_changes() -> None:
    """It has the root's request and prompt, no output, and the seq_id that belongs to it."""
    root = make_sequence(10, [5, 6], n=4, seed=3)
    root.token_ids.append(7)
    root.status, root.num_computed_tokens = SequenceStatus.RUNNING, 2
    branch = root.make_branch(2)
    assert (branch.status, branch.num_computed_tokens) == (SequenceStatus.WAITING, 0)
    assert (branch.seq_id, branch.branch, branch.num_pending_forks) == (12, 2, 0)
    assert (branch.token_ids, branch.seed, branch.request_id) == ([5, 6], 3, root.request_id)
    assert branch.make_branch(3).seq_id == 13
    assert branch.metrics is not root.metrics
    assert branch.block_hashes is not root.block_hashes
