"""The nouns: a sequence's counters, statuses, and values that are safe to send away."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest
from fakes import FakeEngine, make_sequence

from nanoserve.sequence import SchedulerOutput, Sequence, SequenceStatus


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
