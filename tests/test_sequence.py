"""The nouns: a sequence's counters, statuses, and values that are safe to send away."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest
from fakes import FakeEngine, make_sequence

from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import RequestMetrics, SchedulerOutput, Sequence, SequenceStatus


def test_the_counters() -> None:
    """num_tokens = num_prompt_tokens + num_output_tokens, whatever is computed."""
    seq = make_sequence(0, [5, 6, 7])
    seq.token_ids += [8, 9]
    assert (seq.num_tokens, seq.num_prompt_tokens, seq.num_output_tokens) == (5, 3, 2)
    assert (seq.prompt_token_ids, seq.output_token_ids) == ([5, 6, 7], [8, 9])


def test_output_does_not_grow_the_callers_prompt() -> None:
    prompt = [5, 6, 7]
    engine = FakeEngine()
    seq = engine.add(prompt, max_tokens=2)
    engine.run()
    assert prompt == seq.prompt_token_ids == [5, 6, 7]


@pytest.mark.parametrize("status", SequenceStatus)
def test_only_the_finished_have_a_reason(status: SequenceStatus) -> None:
    """And it is one of the three that vLLM and OpenAI's API know."""
    finished = status.name.startswith("FINISHED")
    assert status.finish_reason in ({"stop", "length", "abort"} if finished else {None})


def test_sequences_are_told_apart_by_identity() -> None:
    """Two requests may be equal in every field, and are two."""
    first, second = make_sequence(0, [1]), make_sequence(0, [1])
    assert first != second
    assert len({first, second}) == 2


def test_a_sequence_has_no_other_fields() -> None:
    """A misspelt attribute is an error, not a silent new one."""
    seq = make_sequence(0, [1])
    with pytest.raises(AttributeError):
        seq.num_computed_token = 1  # type: ignore[attr-defined]


def test_a_step_is_a_value() -> None:
    """It can be sent to another process, is not tied to live sequences, and does not change."""
    engine = FakeEngine()
    seq = engine.add([1, 2, 3])
    output = engine.scheduler.schedule()
    copy = pickle.loads(pickle.dumps(output))
    engine.execute(output)
    seq.token_ids.append(99)
    assert output == copy
    assert not any(isinstance(value, Sequence) for new in output.new_sequences for value in new)
    with pytest.raises(FrozenInstanceError):
        output.scheduled = ()  # type: ignore[misc]


def test_an_empty_step() -> None:
    assert SchedulerOutput((), (), (), 0).is_empty
    assert FakeEngine().step().is_empty


def test_a_step_with_everything_in_it_is_a_value() -> None:
    """New branches, copies, swaps, parameters with every field: all of it can be sent away."""
    engine = FakeEngine(num_blocks=5, block_size=4, preemption_mode="swap")
    params = SamplingParams(
        n=2, stop_token_ids=[7], allowed_token_ids=[1, 2], logit_bias={3: 1.0}, bad_words=["no"]
    )
    engine.add(range(9), max_tokens=9, n=2, sampling_params=params, bad_word_ids=((1, 2), (3,)))
    seen = set()
    while engine.scheduler.has_unfinished():
        output = engine.scheduler.schedule()
        assert pickle.loads(pickle.dumps(output)) == output
        for name in ("new_sequences", "blocks_to_copy", "blocks_to_swap_out", "blocks_to_swap_in"):
            seen |= {name} if getattr(output, name) else set()
        engine.execute(output)
    assert len(seen) == 4


def test_a_new_sequence_says_all_that_the_runner_must_know() -> None:
    engine = FakeEngine()
    seq = engine.add([5, 6, 7], n=3, seed=11, stop_token_ids=frozenset({1}), bad_word_ids=((8, 9),))
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
    }


# -- metrics --


def test_what_the_moments_tell() -> None:
    """Queue time and time to first token count from arrival; latency is a mean over gaps."""
    metrics = RequestMetrics(arrival_time=10.0, first_scheduled_time=11.5)
    for now in (13.0, 13.5, 15.0):
        metrics.record_token(now)
    assert metrics.queue_time == 1.5
    assert metrics.time_to_first_token == 3.0
    assert metrics.last_token_time == 15.0
    assert metrics.inter_token_latency(3) == 1.0


def test_what_has_not_come_is_none() -> None:
    metrics = RequestMetrics(arrival_time=10.0)
    assert (metrics.queue_time, metrics.time_to_first_token) == (None, None)
    assert metrics.inter_token_latency(0) is None
    metrics.record_token(11.0)
    assert metrics.inter_token_latency(1) is None


def test_the_moments_come_in_order() -> None:
    """Of every branch; each has its own record."""
    engine = FakeEngine()
    engine.add([1, 2, 3], max_tokens=3, n=2)
    sequences = [update.sequence for update in engine.execute(engine.scheduler.schedule())]
    engine.run()
    assert len({id(seq.metrics) for seq in sequences}) == 2
    for metrics in (seq.metrics for seq in sequences):
        moments = [
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.last_token_time,
            metrics.finished_time,
        ]
        assert moments == sorted(moments)  # type: ignore[type-var]
