"""The reason why a sequence waits: each reason by an example, then what the scheduler does next."""

from __future__ import annotations

from typing import Any

import pytest
from fakes import FakeEngine, LateSequence, num_tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.sequence import SequenceStatus
from nanoserve.tools.why_waiting import why_waiting

NOTHING = "nothing: the sequence can join the next step"


def test_a_waiting_sequence_needs_blocks() -> None:
    """The example of the module: 10 tokens need 3 of the 2 free blocks."""
    engine = FakeEngine(num_blocks=4, block_size=4, max_num_seqs=2)
    first, second = engine.add(range(7)), engine.add(range(100, 110))
    assert why_waiting(engine.scheduler, first.seq_id) == NOTHING
    assert why_waiting(engine.scheduler, second.seq_id) == "1 more urgent sequences wait too"
    engine.step()
    assert why_waiting(engine.scheduler, first.seq_id) == "the sequence is running"
    reason = why_waiting(engine.scheduler, second.seq_id)
    assert reason == "the sequence needs 3 blocks, 2 are free"
    engine.abort(first)
    assert why_waiting(engine.scheduler, second.seq_id) == NOTHING
    with pytest.raises(KeyError):
        why_waiting(engine.scheduler, first.seq_id)


def test_a_swapped_sequence_needs_blocks_and_a_place() -> None:
    """A later request waits behind the swapped sequence."""
    engine = FakeEngine(num_blocks=5, block_size=4, preemption_mode="swap")
    first, second = [engine.add(range(i, i + 7), max_tokens=9) for i in (0, 100)]
    while second.status is not SequenceStatus.SWAPPED:
        engine.step()
    late = engine.add([1])
    assert why_waiting(engine.scheduler, late.seq_id) == "1 more urgent sequences wait too"
    needed = engine.block_manager.num_blocks_for(second.num_tokens)
    free = engine.block_manager.num_free_blocks
    reason = why_waiting(engine.scheduler, second.seq_id)
    assert reason == f"the sequence needs {needed} blocks, {free} are free"
    engine.scheduler.max_num_seqs = 1
    assert "max_num_seqs=1" in why_waiting(engine.scheduler, second.seq_id)
    engine.abort(first)
    assert why_waiting(engine.scheduler, second.seq_id) == NOTHING


def test_a_sequence_that_is_held() -> None:
    """Sequences behind it do not wait for it."""
    engine = FakeEngine()
    held, other = engine.add([1]), engine.add([2])
    held.is_held = True
    assert "a step failed" in why_waiting(engine.scheduler, held.seq_id)
    assert why_waiting(engine.scheduler, other.seq_id) == NOTHING
    assert num_tokens_of(engine.step()) == {other.seq_id: 1}


def test_a_sequence_is_not_ready() -> None:
    """Sequences behind it do not wait for it."""
    engine = FakeEngine()
    late, other = engine.add([1], cls=LateSequence), engine.add([2])
    assert why_waiting(engine.scheduler, late.seq_id) == "the sequence is not ready"
    assert why_waiting(engine.scheduler, other.seq_id) == NOTHING


def test_a_swapped_sequence_with_a_token_in_flight_is_not_ready() -> None:
    engine = FakeEngine(num_blocks=3, block_size=4, preemption_mode="swap")
    engine.add(range(4), max_tokens=2)
    second = engine.add([7, 8, 9], max_tokens=5)
    engine.step()
    in_flight = engine.scheduler.schedule()
    engine.scheduler.schedule()
    assert second.status is SequenceStatus.SWAPPED
    assert why_waiting(engine.scheduler, second.seq_id) == "the sequence is not ready"
    engine.execute(in_flight)
    assert why_waiting(engine.scheduler, second.seq_id) == NOTHING


def test_pending_branches_count_for_max_num_seqs() -> None:
    engine = FakeEngine(max_num_seqs=4, max_num_batched_tokens=8)
    engine.add(range(20), n=3)
    second, third = engine.add([1]), engine.add([2])
    engine.step()
    assert why_waiting(engine.scheduler, second.seq_id) == NOTHING
    for _ in range(2):
        engine.step()
    reason = why_waiting(engine.scheduler, third.seq_id)
    assert reason == "max_num_seqs=4 sequences are running or about to fork"


@pytest.mark.parametrize(("chunked", "prompt_lens"), [(True, (8, 8)), (False, (10, 2))])
def test_the_token_budget_of_the_last_step(chunked: bool, prompt_lens: tuple[int, ...]) -> None:
    """16 tokens are scheduled; or 12, and a prompt of 5 that may not be split does not fit."""
    engine = FakeEngine(
        max_model_len=16, max_num_batched_tokens=16, max_num_seqs=4, enable_chunked_prefill=chunked
    )
    for i, prompt_len in enumerate(prompt_lens):
        engine.add([i] * prompt_len)
    last = engine.add([9] * 5)
    output = engine.step()
    reason = why_waiting(engine.scheduler, last.seq_id, output)
    assert reason == "the token budget of the last step was used up"
    assert why_waiting(engine.scheduler, last.seq_id) == NOTHING


@settings(max_examples=50)
@given(
    options=st.fixed_dictionaries(
        {
            "num_blocks": st.integers(4, 20),
            "max_num_seqs": st.integers(1, 4),
            "max_num_batched_tokens": st.integers(4, 12),
            "preemption_mode": st.sampled_from(["swap", "recompute"]),
            "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        }
    ),
    lengths=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4)), min_size=2, max_size=8
    ),
)
def test_the_reason_agrees_with_the_next_step(
    options: dict[str, Any], lengths: list[tuple[int, int, int]]
) -> None:
    """The most urgent sequence joins the next step only if it waits for nothing, and must join
    if nothing is running. Each sequence behind it names the number of sequences before it."""
    engine = FakeEngine(block_size=4, **options)
    scheduler = engine.scheduler
    while lengths or scheduler.has_unfinished():
        for prompt_len, max_tokens, n in lengths[:2]:  # two arrivals a step
            engine.add(range(prompt_len), max_tokens, n=n, priority=max_tokens % 3)
        lengths = lengths[2:]
        is_idle = not scheduler.running
        waiting = sorted(scheduler.waiting + scheduler.swapped, key=scheduler.urgency)
        reasons = [why_waiting(scheduler, seq.seq_id) for seq in waiting]
        behind = [f"{i} more urgent sequences wait too" for i in range(1, len(reasons))]
        assert reasons[1:] == behind
        joined = {seq.seq_id for seq in waiting} & num_tokens_of(engine.step()).keys()
        assert not joined or reasons[0] == NOTHING
        assert joined or not (is_idle and waiting)
