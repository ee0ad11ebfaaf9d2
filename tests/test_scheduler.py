"""Who runs, with how many tokens: the project's invariants as properties, then each rule alone.

The fake model (fakes.py) reads every token it gives out of its KV cache, so "same tokens as alone"
covers the block tables, the prefix cache and the counters at once.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
from fakes import (
    FakeEngine,
    LateSequence,
    next_token,
    num_tokens_of,
    prefix_digests,
    reference_output,
)
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import (
    ModelOutput,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)
from nanoserve.tools.why_waiting import why_waiting

MAX_MODEL_LEN = 64


# -- invariants 1 to 3, under everything that can happen --


@dataclass(frozen=True)
class Request:
    """One request of a random history."""

    prefix: int  # which of the shared texts its prompt begins with
    num_shared: int  # tokens of it
    num_own: int  # tokens that no other prompt has
    max_tokens: int
    gap: int  # steps between the arrival before it and its own
    priority: int
    cache_salt: str | None
    seed: int
    num_stop_tokens: int  # token ids below this end it
    late_by: int  # steps until it is ready
    n: int  # completions
    prompt_logprobs: bool


@dataclass(frozen=True)
class Disturbance:
    """Something that goes wrong in one step."""

    step: int
    kind: str  # "abort" before the step, "abort in flight", "fail", or "abort and fail"
    victim: int  # which unfinished sequence is aborted
    all_branches: bool  # of its request, or it alone


requests = st.builds(
    Request,
    prefix=st.integers(0, 1),
    num_shared=st.sampled_from([0, 0, 1, 4, 8, 8, 12, 16, 24]),
    num_own=st.integers(0, 12),
    max_tokens=st.integers(1, 20),
    gap=st.sampled_from([0, 0, 0, 1, 2, 5, 20]),
    priority=st.integers(-2, 2),
    cache_salt=st.sampled_from([None, None, None, "mine"]),
    seed=st.integers(0, 1),
    num_stop_tokens=st.sampled_from([0, 0, 60]),
    late_by=st.sampled_from([0, 0, 0, 0, 3, 10]),
    n=st.sampled_from([1, 1, 1, 2, 3, 5]),
    prompt_logprobs=st.sampled_from([False, False, False, True]),
)
disturbances = st.builds(
    Disturbance,
    step=st.integers(0, 30),
    kind=st.sampled_from(["abort", "abort in flight", "fail", "abort and fail"]),
    victim=st.integers(0, 15),
    all_branches=st.booleans(),
)


@st.composite
def engine_options(draw: st.DrawFn) -> dict[str, Any]:
    """Engines from cramped to roomy."""
    max_num_seqs = draw(st.integers(1, 6))
    chunked = draw(st.sampled_from([True, True, True, False]))
    least = max_num_seqs if chunked else MAX_MODEL_LEN
    return {
        "block_size": draw(st.sampled_from([1, 2, 3, 4, 8, 16])),
        "num_blocks": draw(st.sampled_from([1, 2, 3, 4, 5, 7, 10, 16, 64])),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": least + draw(st.sampled_from([0, 0, 1, 2, 5, 16, 64])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 3, 9])),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap", "swap"])),
        "num_cpu_blocks": draw(st.sampled_from([0, 1, 2, 3, 5, 10, 64])),
    }


class Before:
    """What `schedule()` is about to change."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.running = list(scheduler.running)
        self.swapped = {seq: seq.num_computed_tokens for seq in scheduler.swapped}


class History:
    """Plays requests and disturbances against a FakeEngine, and checks every step."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.engine = FakeEngine(max_model_len=MAX_MODEL_LEN, **options)
        self.scheduler = self.engine.scheduler
        self.sequences: list[Sequence] = []  # branches, too
        self.ready_at: dict[str, int] = {}  # request id -> step
        self.told_prompt_logprobs: dict[str, set[int]] = {}  # request id -> positions told of

    def play(self, requests: list[Request], disturbances: list[Disturbance]) -> None:
        """Until every request has arrived and ended."""
        arrivals: list[tuple[int, Request]] = []
        for request in requests:
            arrivals.append(((arrivals[-1][0] if arrivals else 0) + request.gap, request))
        disturbed = {item.step: item for item in disturbances}
        step = 0
        while arrivals or self.scheduler.has_unfinished():
            while arrivals and arrivals[0][0] <= step:
                self.arrive(arrivals.pop(0)[1], step)
            for seq in self.sequences:
                seq.ready = self.ready_at[seq.request_id] <= step  # type: ignore[attr-defined]
            self.step(disturbed.get(step))
            step += 1
            assert step < 5000, "no end in sight"

    def arrive(self, request: Request, step: int) -> None:
        text = [100 + request.prefix, *range(1, 24)]  # equal tokens behind a different first one
        shared = text[: request.num_shared]
        own = [500 + 7 * len(self.sequences) + i % 5 for i in range(request.num_own)]
        prompt = (shared + own or [3])[: self.engine.capacity - 1]
        if not prompt:
            return  # one slot holds no prompt with a token after it: refused at the door
        n = min(request.n, self.engine.config.max_num_seqs or 1)  # more are refused at the door
        seq = self.engine.add(
            prompt,
            request.max_tokens,
            n=n,
            cls=LateSequence,
            sampling_params=SamplingParams(
                n=n, prompt_logprobs=0 if request.prompt_logprobs else None
            ),
            priority=request.priority,
            cache_salt=request.cache_salt,
            seed=request.seed,
            stop_token_ids=frozenset(range(request.num_stop_tokens)),
        )
        self.sequences.append(seq)
        self.ready_at[seq.request_id] = step + request.late_by
        self.told_prompt_logprobs[seq.request_id] = set()

    def step(self, disturbance: Disturbance | None) -> None:
        kind = disturbance.kind if disturbance else ""
        victims = self.choose_victims(disturbance) if disturbance else []
        if kind == "abort":
            self.abort(victims)
        before = Before(self.scheduler)
        scheduler_output = self.scheduler.schedule()
        self.engine.block_manager.check()
        self.check_decision(scheduler_output, before)
        if scheduler_output.is_empty:
            return
        if kind in ("abort in flight", "abort and fail"):
            self.abort(victims)
        if kind in ("fail", "abort and fail"):
            self.engine.executor.fail_next_step = True
            event("a step failed")
        self.note(self.engine.execute(scheduler_output))
        told = {item.seq_id for item in scheduler_output.scheduled}
        assert set(self.engine.executor.rows) == told, "the executor was not told what to forget"
        self.check_lists()

    def choose_victims(self, disturbance: Disturbance) -> list[Sequence]:
        """One unfinished sequence, or all of its request."""
        unfinished = list(self.scheduler.sequences.values())
        if not unfinished:
            return []
        victim = unfinished[disturbance.victim % len(unfinished)]
        if not disturbance.all_branches:
            return [victim]
        return [seq for seq in unfinished if seq.request_id == victim.request_id]

    def abort(self, victims: list[Sequence]) -> None:
        """Every block comes home at once."""
        manager = self.engine.block_manager
        for victim in victims:
            event(f"aborted while {victim.status.value}")
            self.engine.abort(victim)
            assert victim.seq_id not in manager.block_tables.keys() | manager.swapped_tables.keys()

    def note(self, updates: list[SequenceUpdate]) -> None:
        """Remember the branches that forked off, and which prompt logprobs came."""
        for update in updates:
            seq = update.sequence
            if seq not in self.sequences:
                event("fork")
                assert seq.branch > 0
                self.sequences.append(seq)
            if update.prompt_logprobs:
                start, entries = update.prompt_logprobs
                told = range(start, start + len(entries))
                self.told_prompt_logprobs[seq.request_id].update(told)
                digests = prefix_digests(seq.prompt_token_ids)
                for i, entry in zip(told, entries, strict=True):
                    assert entry.token_ids == (seq.prompt_token_ids[i],)
                    assert entry.logprobs == (-digests[i - 1],)

    def check_decision(self, output: SchedulerOutput, before: Before) -> None:
        """What every step must keep to."""
        scheduler, config = self.scheduler, self.engine.config
        self.check_lists()
        num_tokens = num_tokens_of(output)
        ready = [seq for seq in scheduler.waiting if seq.is_ready()]
        if output.is_empty:
            assert not scheduler.running
            assert not ready, "ready, and not scheduled"
            assert not scheduler.swapped, "swapped out, and nobody there to make room for"
            assert output == SchedulerOutput((), (), (), 0)
            return
        assert len(num_tokens) == len(output.scheduled) <= config.max_num_seqs
        assert sum(num_tokens.values()) == output.total_num_scheduled_tokens
        assert output.total_num_scheduled_tokens <= config.max_num_batched_tokens
        assert min(num_tokens.values()) >= 1
        assert set(num_tokens) == {seq.seq_id for seq in scheduler.running}, "somebody stands still"
        for item in output.scheduled:
            seq = scheduler.sequences[item.seq_id]
            assert item.num_computed_tokens + item.num_scheduled_tokens == seq.num_computed_tokens
            if not config.enable_chunked_prefill:
                assert seq.num_computed_tokens == seq.num_tokens, "a prompt was split"
            elif config.long_prefill_token_threshold:
                assert item.num_scheduled_tokens <= config.long_prefill_token_threshold
            if seq in before.swapped:
                event("swapped in")
                assert item.num_computed_tokens == before.swapped[seq], "computed again"
        preempted = [seq for seq in before.running if seq not in scheduler.running]
        admitted = [seq for seq in scheduler.running if seq not in before.running]
        assert not (preempted and admitted), "preempted one and admitted another"
        if preempted:
            least = min(map(scheduler._urgency, preempted))
            assert max(map(scheduler._urgency, scheduler.running)) < least, "the wrong one went"
            for seq in preempted:
                event(f"preempted: {seq.status.value}")
        if admitted and (left := ready + scheduler.swapped):
            last = max(map(scheduler._urgency, admitted))
            assert last < min(map(scheduler._urgency, left)), "one overtook a more urgent one"
        if config.preemption_mode == "recompute":
            assert not (output.blocks_to_swap_out or output.blocks_to_swap_in)
        if any(new.block_ids for new in output.new_sequences):
            event("prefix cache hit, fork or swap")
        if output.blocks_to_copy:
            event("copy on write")

    def check_lists(self) -> None:
        """Sorted, disjoint, complete, and true to the block tables and statuses."""
        scheduler, manager = self.scheduler, self.engine.block_manager
        ids: dict[SequenceStatus, set[int]] = {}
        for queue, status in (
            (scheduler.waiting, SequenceStatus.WAITING),
            (scheduler.swapped, SequenceStatus.SWAPPED),
            (scheduler.running, SequenceStatus.RUNNING),
        ):
            urgencies = [scheduler._urgency(seq) for seq in queue]
            assert urgencies == sorted(set(urgencies))
            assert all(seq.status is status for seq in queue)
            assert all(0 <= seq.num_computed_tokens <= seq.num_tokens for seq in queue)
            ids[status] = {seq.seq_id for seq in queue}
        assert sum(map(len, ids.values())) == len(set().union(*ids.values()))
        assert set().union(*ids.values()) == set(scheduler.sequences)
        assert ids[SequenceStatus.RUNNING] == set(manager.block_tables)
        assert ids[SequenceStatus.SWAPPED] == set(manager.swapped_tables)
        assert all(seq.num_computed_tokens == 0 for seq in scheduler.waiting)
        num_places = sum(1 + seq.num_pending_forks for seq in scheduler.running)
        assert num_places <= scheduler.max_num_seqs
        for seq_id in scheduler.sequences:
            assert why_waiting(scheduler, seq_id)

    def check_results(self) -> None:
        """Invariants 1 to 3, when all is over."""
        for seq in self.sequences:
            expected = reference_output(
                seq.prompt_token_ids, seq.max_tokens, seq.stop_token_ids, seq.seed, seq.branch
            )
            reason = seq.status.finish_reason
            if reason == "abort":
                assert seq.output_token_ids == expected[: seq.num_output_tokens]
                continue
            assert seq.output_token_ids == expected
            assert reason == ("stop" if expected[-1] in seq.stop_token_ids else "length")
            assert seq.num_cached_tokens < seq.num_prompt_tokens
        self.check_branches()
        for pool in (self.engine.block_manager.pool, self.engine.block_manager.cpu_pool):
            assert pool.ref_counts == [0] * pool.num_blocks
            assert pool.num_free_blocks == pool.num_blocks
        assert self.engine.block_manager.reset_prefix_cache()
        self.engine.block_manager.check()

    def check_branches(self) -> None:
        """All n are there, unless the request was aborted before they forked; and who asked was
        told of the whole prompt."""
        for root in self.sequences:
            if root.branch:
                continue
            n = root.sampling_params.n
            branches = [s.branch for s in self.sequences if s.request_id == root.request_id]
            assert sorted(branches) == list(range(n if root.num_output_tokens else 1))
            assert root.num_output_tokens or root.status.finish_reason == "abort"
            told = self.told_prompt_logprobs[root.request_id]
            if root.sampling_params.prompt_logprobs is None:
                assert not told
            elif root.num_output_tokens:
                assert root.num_cached_tokens == 0
                assert told == set(range(1, root.num_prompt_tokens))


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    options=engine_options(),
    requests=st.lists(requests, min_size=1, max_size=9),
    disturbances=st.lists(disturbances, max_size=4),
)
def test_same_tokens_no_block_lost_and_everything_ends(
    options: dict[str, Any], requests: list[Request], disturbances: list[Disturbance]
) -> None:
    """Whatever the engine's size, the arrivals, the aborts and the failures: each request gets the
    tokens it would get alone, each block comes home, and each request ends with a reason."""
    history = History(options)
    history.play(requests, disturbances)
    history.check_results()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    options=engine_options(),
    requests=st.lists(requests, min_size=25, max_size=40),
    disturbances=st.lists(disturbances, max_size=12),
)
def test_the_same_for_a_crowd(
    options: dict[str, Any], requests: list[Request], disturbances: list[Disturbance]
) -> None:
    """Many more requests than run at once."""
    history = History(options)
    history.play(requests, disturbances)
    history.check_results()


# -- order --


def test_first_come_first_served() -> None:
    """Sequences start in the order of arrival, and as many as max_num_seqs at a time."""
    engine = FakeEngine(max_num_seqs=2)
    sequences = [engine.add([i], max_tokens=4 - i) for i in range(4)]
    steps = engine.run()
    started = [new.seq_id for step in steps for new in step.new_sequences]
    assert started == [seq.seq_id for seq in sequences]
    assert max(len(step.scheduled) for step in steps) == 2


def test_priority_first_then_arrival() -> None:
    """Lower values run first; of equals, whoever came first."""
    engine = FakeEngine(max_num_seqs=1, scheduling_policy="priority")
    for priority in (5, 0, -3, 0, 5):
        engine.add([priority % 7], max_tokens=2, priority=priority)
    started = [new.seq_id for step in engine.run() for new in step.new_sequences]
    assert started == [2, 1, 3, 0, 4]


def test_fcfs_does_not_look_at_priorities() -> None:
    engine = FakeEngine(max_num_seqs=1)
    for priority in (5, 0, -3):
        engine.add([1], max_tokens=1, priority=priority)
    assert [new.seq_id for step in engine.run() for new in step.new_sequences] == [0, 1, 2]


def test_an_urgent_arrival_takes_its_place_in_the_running_list() -> None:
    """`running` stays sorted, so that whoever must go when blocks run out is the last."""
    engine = FakeEngine(scheduling_policy="priority")
    relaxed = engine.add([1, 2, 3], priority=9)
    engine.step()
    urgent = engine.add([4, 5, 6], priority=0)
    engine.step()
    assert engine.scheduler.running == [urgent, relaxed]


def test_who_does_not_fit_is_not_overtaken() -> None:
    """A long prompt that waits for blocks is not starved by short ones behind it."""
    engine = FakeEngine(num_blocks=4, block_size=4)
    engine.add(range(9), max_tokens=3)
    engine.step()
    engine.add(range(100, 110))
    engine.add([7])
    assert not engine.step().new_sequences


# -- the token budget --


def test_the_example_of_the_module() -> None:
    """Budget 8: a decode takes 1, a chunk of a prompt 6, and the one behind gets the last."""
    engine = FakeEngine(max_num_batched_tokens=8, max_num_seqs=3, enable_prefix_caching=False)
    engine.add(range(7))
    engine.step()
    engine.add(range(100, 113))
    assert num_tokens_of(engine.step()) == {0: 1, 1: 7}
    engine.add(range(200, 220))
    assert num_tokens_of(engine.step()) == {0: 1, 1: 6, 2: 1}
    assert num_tokens_of(engine.step()) == {0: 1, 1: 1, 2: 6}


def test_a_chunk_leaves_a_token_to_each_running_sequence_behind_it() -> None:
    """No prefill ever stalls a decode, even if the prompt is the more urgent."""
    engine = FakeEngine(
        max_num_batched_tokens=6, max_num_seqs=3, scheduling_policy="priority", max_model_len=128
    )
    for i in range(2):
        engine.add([i], max_tokens=50, priority=1)
    engine.step()
    engine.add(range(40), priority=0)
    assert num_tokens_of(engine.step()) == {0: 1, 1: 1, 2: 4}
    for _ in range(5):
        assert num_tokens_of(engine.step()) == {2: 4, 0: 1, 1: 1}


def test_the_long_prefill_threshold_caps_each_sequence() -> None:
    """So that one long prompt does not take a step's whole budget from the others."""
    engine = FakeEngine(max_num_batched_tokens=20, max_num_seqs=4, long_prefill_token_threshold=5)
    engine.add(range(17))
    engine.add(range(100, 103))
    assert num_tokens_of(engine.step()) == {0: 5, 1: 3}
    assert num_tokens_of(engine.step()) == {0: 5, 1: 1}


def test_without_chunked_prefill_a_prompt_is_never_split() -> None:
    """What does not fit into what is left of the budget waits for the next step."""
    engine = FakeEngine(
        max_model_len=16, max_num_batched_tokens=16, max_num_seqs=4, enable_chunked_prefill=False
    )
    engine.add(range(10))
    engine.add(range(100, 110))
    assert num_tokens_of(engine.step()) == {0: 10}
    assert num_tokens_of(engine.step()) == {0: 1, 1: 10}


def test_a_chunk_that_does_not_reach_the_last_token_samples_nothing() -> None:
    """A token comes when num_computed_tokens has caught up with num_tokens, not before."""
    engine = FakeEngine(max_num_batched_tokens=4, max_num_seqs=1)
    seq = engine.add(range(9))
    assert [engine.step() and seq.num_output_tokens for _ in range(4)] == [0, 0, 1, 2]


# -- preemption --


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_least_urgent_goes_and_comes_back_with_the_same_tokens(policy: str) -> None:
    """Recompute: the victim loses its blocks, waits in front, and goes on where it was."""
    engine = FakeEngine(num_blocks=6, block_size=4, scheduling_policy=policy)
    first = engine.add(range(7), max_tokens=12, priority=1)
    second = engine.add(range(100, 107), max_tokens=12, priority=0)
    victim, winner = (second, first) if policy == "fcfs" else (first, second)
    engine.run()
    assert (victim.metrics.num_preemptions, winner.metrics.num_preemptions) == (1, 0)
    for seq in (first, second):
        assert seq.output_token_ids == reference_output(seq.prompt_token_ids, 12)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_preemption_around_a_block_boundary(num_tokens: int, enable_prefix_caching: bool) -> None:
    """A sequence dropped with block_size - 1, block_size or block_size + 1 tokens known is
    recomputed in full: nothing depends on whether it has generated before."""
    engine = FakeEngine(
        num_blocks=5, block_size=4, max_num_seqs=2, enable_prefix_caching=enable_prefix_caching
    )
    seq = engine.add([5, 6], max_tokens=12)
    while seq.num_tokens < num_tokens:
        engine.step()
    engine.scheduler._preempt(seq)
    assert (seq.status, seq.num_computed_tokens) == (SequenceStatus.WAITING, 0)
    resumed = engine.step()
    [new] = resumed.new_sequences
    assert list(new.token_ids) == seq.token_ids[:num_tokens]
    cached = len(new.block_ids) * 4
    assert cached == ((num_tokens - 1) // 4 * 4 if enable_prefix_caching else 0)
    assert num_tokens_of(resumed) == {0: num_tokens - cached}
    engine.run()
    assert seq.output_token_ids == reference_output([5, 6], 12)


def test_a_resumed_sequence_hits_its_own_blocks() -> None:
    """What it computed stays findable until somebody needs the blocks, and it is not counted as a
    cache hit of its prompt."""
    engine = FakeEngine(num_blocks=16, block_size=4)
    seq = engine.add(range(10), max_tokens=6)
    engine.step()
    table = list(engine.block_manager.block_tables[0])
    engine.scheduler._preempt(seq)
    [new] = engine.step().new_sequences
    assert list(new.block_ids) == table[:2]
    assert seq.num_cached_tokens == 0


def test_a_step_that_preempts_admits_nobody() -> None:
    """Or the blocks just taken from one would go to the next, and back again."""
    engine = FakeEngine(num_blocks=4, block_size=4)
    engine.add(range(7), max_tokens=8)
    engine.add(range(100, 107), max_tokens=8)
    engine.step()
    engine.add([1])
    engine.step()
    preempting = engine.step()
    assert num_tokens_of(preempting) == {0: 1}
    assert not preempting.new_sequences
    assert preempting.finished_seq_ids == (1,)


# -- n completions --


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_tokens", [3, 4, 5, 6, 7, 8, 9])
def test_a_shared_block_is_copied_once_per_branch_less_one(
    num_tokens: int, enable_prefix_caching: bool
) -> None:
    """The last branch to write has the block for itself. Full blocks are never copied: a prompt
    that ends at a block's end needs no copy at all."""
    engine = FakeEngine(block_size=4, enable_prefix_caching=enable_prefix_caching)
    root = engine.add(range(num_tokens), max_tokens=6, n=3)
    assert not engine.step().blocks_to_copy
    table = list(engine.block_manager.block_tables[root.seq_id])
    assert [engine.block_manager.block_tables[i] for i in (1, 2)] == [table, table]
    writing = engine.step()
    copied = list(writing.blocks_to_copy)
    assert [source for source, _ in copied] == ([] if num_tokens % 4 == 0 else [table[-1]] * 2)
    tables = [engine.block_manager.block_tables[i] for i in range(3)]
    num_full = num_tokens // 4
    assert all(t[:num_full] == table[:num_full] for t in tables)
    assert len({t[-1] for t in tables}) == 3
    assert not any(step.blocks_to_copy for step in engine.run())


def test_the_prompt_of_n_completions_is_computed_once() -> None:
    """Then each branch decodes one token a step; the new ones are told of with their blocks."""
    engine = FakeEngine(max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(range(18), max_tokens=3, n=4)
    steps = engine.run()
    assert [step.total_num_scheduled_tokens for step in steps] == [8, 8, 2, 4, 4]
    assert [new.num_samples for step in steps for new in step.new_sequences] == [4, 1, 1, 1]
    assert [new.branch for step in steps for new in step.new_sequences] == [0, 1, 2, 3]
    assert {len(new.block_ids) for new in steps[3].new_sequences} == {5}


def test_each_branch_goes_its_own_way() -> None:
    """What each gives depends on the prompt, the seed and the branch alone."""
    engine = FakeEngine()
    engine.add(range(6), max_tokens=5, n=3, seed=7)
    output = engine.scheduler.schedule()
    branches = [update.sequence for update in engine.execute(output)]
    engine.run()
    assert sorted(seq.branch for seq in branches) == [0, 1, 2]
    for seq in branches:
        expected = reference_output(list(range(6)), 5, seed=7, branch=seq.branch)
        assert seq.output_token_ids == expected
        assert seq.metrics.num_preemptions == 0
    assert len({id(seq.metrics) for seq in branches}) == 3


def test_branches_end_on_their_own() -> None:
    """A first token may end one of them at once, whichever it is; the others go on."""
    firsts = [next_token([1, 2, 3], branch=branch) for branch in range(3)]
    for ended in range(3):
        engine = FakeEngine()
        engine.add([1, 2, 3], max_tokens=4, n=3, stop_token_ids=frozenset({firsts[ended]}))
        updates = engine.execute(engine.scheduler.schedule())
        reasons = {u.sequence.branch: u.sequence.status.finish_reason for u in updates}
        assert reasons == {b: "stop" if b == ended else None for b in range(3)}
        assert len(engine.scheduler.running) == 2
        engine.run()
        assert engine.block_manager.num_free_blocks == 64


def test_all_branches_may_end_with_their_first_token() -> None:
    engine = FakeEngine()
    engine.add([1, 2, 3], max_tokens=1, n=3)
    assert len(engine.execute(engine.scheduler.schedule())) == 3
    assert not engine.scheduler.has_unfinished()
    assert engine.block_manager.num_free_blocks == 64


def test_the_places_of_branches_are_kept_for_them() -> None:
    """While a prompt is computed in chunks, nobody takes the places of its branches."""
    engine = FakeEngine(max_num_seqs=4, max_num_batched_tokens=8)
    engine.add(range(20), max_tokens=3, n=3)
    engine.add([1], max_tokens=9)
    late = engine.add([2], max_tokens=9)
    assert num_tokens_of(engine.step()) == {0: 8}
    assert num_tokens_of(engine.step()) == {0: 8}
    assert num_tokens_of(engine.step()) == {0: 4, 3: 1}
    assert "about to fork" in why_waiting(engine.scheduler, late.seq_id)
    assert num_tokens_of(engine.step()) == {0: 1, 1: 1, 2: 1, 3: 1}


def test_n_completions_wait_until_there_are_n_places() -> None:
    """And whoever came later waits behind them."""
    engine = FakeEngine(max_num_seqs=3)
    engine.add([1], max_tokens=2)
    engine.add([2], max_tokens=2, n=3)
    engine.add([3], max_tokens=2)
    assert [sorted(num_tokens_of(step)) for step in engine.run()] == [
        [0],
        [0],
        [1],
        [1, 2, 3],
        [4],
        [4],
    ]


def test_branches_are_as_urgent_as_their_request() -> None:
    """They arrived with it: a later request is preempted before any of them."""
    engine = FakeEngine(num_blocks=8, block_size=4)
    engine.add(range(6), max_tokens=9, n=2)
    later = engine.add(range(100, 106), max_tokens=9)
    later.metrics.arrival_time = 1.0
    engine.step()
    assert [seq.seq_id for seq in engine.scheduler.running] == [0, 1, 2]
    engine.run()
    assert later.metrics.num_preemptions > 0


def test_a_branch_that_is_aborted_leaves_the_blocks_to_the_others() -> None:
    """Its own come home at once, of the shared ones only its references."""
    engine = FakeEngine(block_size=4)
    root = engine.add(range(9), max_tokens=8, n=3)
    engine.step()
    engine.step()
    shared = engine.block_manager.block_tables[0][:2]
    assert [engine.block_manager.pool.ref_counts[i] for i in shared] == [3, 3]
    assert engine.block_manager.num_free_blocks == 64 - 2 - 3
    engine.abort(root)
    assert [engine.block_manager.pool.ref_counts[i] for i in shared] == [2, 2]
    assert engine.block_manager.num_free_blocks == 64 - 2 - 2
    engine.run()


def test_a_request_aborted_in_the_step_in_which_it_would_fork() -> None:
    """Its branches are never born."""
    engine = FakeEngine()
    root = engine.add([1, 2, 3], n=3)
    output = engine.scheduler.schedule()
    engine.abort(root)
    assert engine.execute(output) == []
    assert not engine.scheduler.has_unfinished()


def test_a_failed_step_forks_later() -> None:
    """The branches fork off when the prompt is computed anew."""
    engine = FakeEngine()
    root = engine.add([1, 2, 3], max_tokens=4, n=3)
    engine.executor.fail_next_step = True
    engine.step()
    assert root.num_pending_forks == 2
    assert [new.num_samples for new in engine.step().new_sequences] == [3]
    assert len(engine.scheduler.running) == 3


def test_a_failed_step_with_copies_in_flight() -> None:
    """Whether the copies were made, nobody knows: all is computed again."""
    engine = FakeEngine(block_size=4)
    engine.add(range(6), max_tokens=6, n=2)
    sequences = [u.sequence for u in engine.execute(engine.scheduler.schedule())]
    engine.executor.fail_next_step = True
    assert engine.step().blocks_to_copy
    engine.run()
    for seq in sequences:
        assert seq.output_token_ids == reference_output(list(range(6)), 6, branch=seq.branch)


# -- preemption by swap --


def preempt_by_swap(**options: Any) -> tuple[FakeEngine, list[Sequence], SchedulerOutput]:
    """Two sequences on blocks for one and a half; returns with the second just swapped out."""
    engine = FakeEngine(num_blocks=5, block_size=4, preemption_mode="swap", **options)
    sequences = [engine.add(range(i, i + 7), max_tokens=9) for i in (0, 100)]
    while True:
        output = engine.step()
        if output.blocks_to_swap_out:
            return engine, sequences, output


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_swap_moves_each_block_out_and_back(enable_prefix_caching: bool) -> None:
    """And computes nothing again: every token is scheduled exactly once."""
    engine, [first, second], out = preempt_by_swap(enable_prefix_caching=enable_prefix_caching)
    assert second.status is SequenceStatus.SWAPPED
    assert second.metrics.num_preemptions == 1
    cpu_blocks = [cpu_block for _, cpu_block in out.blocks_to_swap_out]
    assert engine.block_manager.swapped_tables == {second.seq_id: cpu_blocks}
    num_computed = second.num_computed_tokens
    assert len(cpu_blocks) == engine.block_manager.num_blocks_for(num_computed)
    assert engine.executor.rows.keys() == {first.seq_id}
    steps = engine.run()
    [back] = [step for step in steps if step.blocks_to_swap_in]
    assert [cpu_block for cpu_block, _ in back.blocks_to_swap_in] == cpu_blocks
    [new] = back.new_sequences
    assert list(new.block_ids) == [block for _, block in back.blocks_to_swap_in]
    assert back.scheduled[-1].num_computed_tokens == num_computed
    assert num_tokens_of(back)[second.seq_id] == 1
    for seq in (first, second):
        assert seq.output_token_ids == reference_output(seq.prompt_token_ids, 9)


def test_swap_schedules_every_token_once() -> None:
    """Recompute, on the same blocks, schedules some twice."""
    num_scheduled = {}
    for mode in ("swap", "recompute"):
        engine = FakeEngine(
            num_blocks=5, block_size=4, preemption_mode=mode, enable_prefix_caching=False
        )
        for i in (0, 100):
            engine.add(range(i, i + 7), max_tokens=9)
        num_scheduled[mode] = sum(step.total_num_scheduled_tokens for step in engine.run())
    assert num_scheduled["swap"] == 2 * (7 + 9 - 1)
    assert num_scheduled["recompute"] > num_scheduled["swap"]


def test_a_shared_block_is_copied_out_and_stays() -> None:
    """Only the reference of the sequence that goes is released."""
    engine = FakeEngine(num_blocks=5, block_size=4, preemption_mode="swap")
    engine.add(range(9), max_tokens=8, n=2)
    engine.step()
    while not (output := engine.step()).blocks_to_swap_out:
        shared = engine.block_manager.block_tables[0][:2]
        assert [engine.block_manager.pool.ref_counts[i] for i in shared] == [2, 2]
    assert [block for block, _ in output.blocks_to_swap_out[:2]] == shared
    assert engine.block_manager.block_tables[0][:2] == shared
    assert [engine.block_manager.pool.ref_counts[i] for i in shared] == [1, 1]
    [branch] = engine.scheduler.swapped
    engine.run()
    assert branch.output_token_ids == reference_output(list(range(9)), 8, branch=1)


@pytest.mark.parametrize(
    ("num_cpu_blocks", "status"), [(0, "waiting"), (1, "waiting"), (2, "swapped")]
)
def test_swap_falls_back_to_recompute(num_cpu_blocks: int, status: str) -> None:
    """When there are too few CPU blocks for all that the sequence holds: 8 tokens need 2."""
    engine = FakeEngine(
        num_blocks=5, block_size=4, preemption_mode="swap", num_cpu_blocks=num_cpu_blocks
    )
    sequences = [engine.add(range(i, i + 7), max_tokens=9) for i in (0, 100)]
    while not sequences[1].metrics.num_preemptions:
        engine.step()
    assert sequences[1].status.value == status
    assert engine.block_manager.cpu_pool.num_free_blocks == (
        0 if status == "swapped" else num_cpu_blocks
    )
    engine.run()
    for seq in sequences:
        assert seq.output_token_ids == reference_output(seq.prompt_token_ids, 9)


def test_who_was_swapped_comes_back_before_who_is_not_more_urgent() -> None:
    """An arrival that would fit does not take the blocks it waits for."""
    engine, [first, second], _ = preempt_by_swap()
    late = engine.add([1], max_tokens=2)
    assert num_tokens_of(engine.step()).keys() == {first.seq_id}
    assert "1 more urgent" in why_waiting(engine.scheduler, late.seq_id)
    started = [new.seq_id for step in engine.run() for new in step.new_sequences]
    assert started == [second.seq_id, late.seq_id]


def test_who_is_more_urgent_goes_before_who_was_swapped() -> None:
    """Under the priority policy."""
    engine, [_, second], _ = preempt_by_swap(scheduling_policy="priority")
    urgent = engine.add(range(200, 213), max_tokens=2, priority=-1)
    assert "1 more urgent" in why_waiting(engine.scheduler, second.seq_id)
    assert "blocks" in why_waiting(engine.scheduler, urgent.seq_id)
    started = [new.seq_id for step in engine.run() for new in step.new_sequences]
    assert started == [urgent.seq_id, second.seq_id]


def test_who_was_swapped_needs_a_place_too() -> None:
    """There are blocks enough, but more urgent ones took all the places."""
    engine, [first, second], _ = preempt_by_swap(scheduling_policy="priority", max_num_seqs=2)
    engine.abort(first)
    urgent = [engine.add([i], max_tokens=3, priority=-1) for i in (1, 2)]
    assert num_tokens_of(engine.step()).keys() == {seq.seq_id for seq in urgent}
    assert engine.block_manager.can_swap_in(second)
    assert "max_num_seqs=2" in why_waiting(engine.scheduler, second.seq_id)
    assert second.seq_id not in num_tokens_of(engine.step())
    engine.run()
    assert second.output_token_ids == reference_output(second.prompt_token_ids, 9)


def test_why_a_swapped_sequence_waits() -> None:
    """For blocks, for a place, or for nothing any more."""
    engine, [first, second], _ = preempt_by_swap()
    needed = engine.block_manager.num_blocks_for(second.num_tokens)
    free = engine.block_manager.num_free_blocks
    reason = why_waiting(engine.scheduler, second.seq_id)
    assert reason == f"it is swapped out and needs {needed} blocks, {free} are free"
    engine.scheduler.max_num_seqs = 1
    assert "max_num_seqs=1" in why_waiting(engine.scheduler, second.seq_id)
    engine.abort(first)
    assert "next step" in why_waiting(engine.scheduler, second.seq_id)
    assert num_tokens_of(engine.step()) == {second.seq_id: 1}


def test_an_aborted_swapped_sequence_gives_its_cpu_blocks_back() -> None:
    engine, [first, second], _ = preempt_by_swap()
    engine.abort(second)
    assert engine.block_manager.cpu_pool.num_free_blocks == 5
    assert not engine.scheduler.swapped
    engine.run()
    assert first.output_token_ids == reference_output(first.prompt_token_ids, 9)


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_failed_step_with_a_swap_in_flight(way: str) -> None:
    """Whether the blocks were copied, nobody knows: what was on its way is computed again."""
    engine = FakeEngine(num_blocks=5, block_size=4, preemption_mode="swap")
    sequences = [engine.add(range(i, i + 7), max_tokens=9) for i in (0, 100)]
    while True:
        output = engine.scheduler.schedule()
        if output.blocks_to_swap_out if way == "out" else output.blocks_to_swap_in:
            break
        engine.execute(output)
    engine.executor.fail_next_step = True
    engine.execute(output)
    assert not engine.scheduler.swapped
    assert engine.block_manager.cpu_pool.num_free_blocks == 5
    assert all(seq.num_computed_tokens == 0 for seq in engine.scheduler.waiting)
    engine.run()
    for seq in sequences:
        assert seq.output_token_ids == reference_output(seq.prompt_token_ids, 9)


def test_a_failed_step_sends_swapped_sequences_back_too() -> None:
    """Everybody waits and is computed anew; both pools are free."""
    engine, [_, second], _ = preempt_by_swap()
    engine.executor.fail_next_step = True
    engine.step()
    assert (second.status, second.num_computed_tokens) == (SequenceStatus.WAITING, 0)
    assert engine.block_manager.cpu_pool.num_free_blocks == 5
    engine.run()
    assert second.output_token_ids == reference_output(second.prompt_token_ids, 9)


# -- prompt logprobs --


def test_prompt_logprobs_read_no_cached_blocks() -> None:
    """What is not computed cannot be told of. Others may use the blocks that this one fills."""
    engine = FakeEngine()
    params = SamplingParams(prompt_logprobs=0)
    engine.add(range(10), max_tokens=2)
    engine.run()
    asking = engine.add(range(10), max_tokens=2, sampling_params=params)
    assert num_tokens_of(engine.step()) == {asking.seq_id: 10}
    assert asking.num_cached_tokens == 0
    engine.run()
    assert asking.output_token_ids == reference_output(list(range(10)), 2)


def test_prompt_logprobs_come_chunk_by_chunk() -> None:
    """A chunk [a, b) tells of the tokens a + 1 .. b; there is news before the first token."""
    engine = FakeEngine(max_num_batched_tokens=4, max_num_seqs=1)
    engine.add(range(10), max_tokens=2, sampling_params=SamplingParams(prompt_logprobs=0))
    told = []
    for _ in range(4):
        [update] = engine.execute(engine.scheduler.schedule())
        news = update.prompt_logprobs
        told.append(
            (news and range(news.start, news.start + len(news.entries)), update.new_token_ids)
        )
    tokens = reference_output(list(range(10)), 2)
    assert told == [
        (range(1, 5), ()),
        (range(5, 9), ()),
        (range(9, 10), (tokens[0],)),
        (None, (tokens[1],)),
    ]


# -- a sequence's end --


def test_tokens_behind_a_stop_token_are_dropped() -> None:
    """A step may bring several tokens at once; what follows the end is not output."""
    engine = FakeEngine()
    params = SamplingParams(stop_token_ids=[42])
    seq = engine.add([1, 2], sampling_params=params, stop_token_ids=frozenset({42, 7}))
    output = engine.scheduler.schedule()
    [update] = engine.scheduler.update_from_output(output, ModelOutput({0: (5, 42, 6)}, {}))
    assert update.new_token_ids == (5, 42)
    assert (seq.output_token_ids, seq.status.finish_reason) == ([5, 42], "stop")
    assert seq.stop_reason == 42


def test_an_eos_token_is_no_stop_reason() -> None:
    """As in vLLM: stop_reason names the user's own stop token, None means EOS."""
    engine = FakeEngine()
    seq = engine.add([1, 2], stop_token_ids=frozenset({7}))
    output = engine.scheduler.schedule()
    engine.scheduler.update_from_output(output, ModelOutput({0: (7,)}, {}))
    assert (seq.status.finish_reason, seq.stop_reason) == ("stop", None)


def test_max_tokens_ends_with_length() -> None:
    engine = FakeEngine()
    seq = engine.add([1], max_tokens=3)
    engine.run()
    assert (seq.num_output_tokens, seq.status.finish_reason) == (3, "length")


def test_what_was_aborted_in_flight_is_passed_over() -> None:
    """Its tokens come too late; the others of the step get theirs."""
    engine = FakeEngine()
    gone, stays = engine.add([1, 2]), engine.add([3, 4])
    output = engine.scheduler.schedule()
    engine.abort(gone)
    updates = engine.execute(output)
    assert [update.sequence for update in updates] == [stays]
    assert (gone.num_output_tokens, gone.status.finish_reason) == (0, "abort")
    assert engine.step().finished_seq_ids == (gone.seq_id,)


def test_finish_says_whether_there_was_anything_to_finish() -> None:
    engine = FakeEngine()
    seq = engine.add([1])
    aborted = SequenceStatus.FINISHED_ABORTED
    assert engine.scheduler.finish(seq.seq_id, aborted) is seq
    assert engine.scheduler.finish(seq.seq_id, aborted) is None
    assert not engine.scheduler.has_unfinished()


# -- a step that fails --


def test_a_failed_step_keeps_none_of_its_promises() -> None:
    """Its blocks come home and are not findable: what they were to hold never came."""
    engine = FakeEngine()
    sequences = [engine.add(range(9)), engine.add(range(9))]
    output = engine.scheduler.schedule()
    assert output.new_sequences[1].block_ids, "the second shares what the first will compute"
    engine.scheduler.preempt_all()
    assert engine.block_manager.num_free_blocks == 64
    assert engine.block_manager.get_cached_blocks(sequences[0]) == []
    engine.run()
    for seq in sequences:
        assert seq.output_token_ids == reference_output(list(range(9)), 8)


def test_a_failed_step_forgets_what_earlier_steps_computed_too() -> None:
    """Nobody knows what it wrote where, so nothing is found any more; tokens are kept."""
    engine = FakeEngine(max_num_batched_tokens=8, max_num_seqs=1)
    seq = engine.add(range(20))
    engine.step()
    engine.executor.fail_next_step = True
    engine.step()
    assert engine.block_manager.get_cached_blocks(seq) == []
    assert num_tokens_of(engine.step()) == {0: 8}
    engine.run()
    assert seq.output_token_ids == reference_output(list(range(20)), 8)


def test_a_failed_step_of_an_aborted_sequence_leaves_nothing_to_find() -> None:
    """Aborted while the step ran, then the step failed: its blocks are free, and hold nothing."""
    engine = FakeEngine()
    gone = engine.add(range(9))
    output = engine.scheduler.schedule()
    engine.abort(gone)
    engine.executor.fail_next_step = True
    engine.execute(output)
    seq = engine.add(range(9))
    assert engine.block_manager.get_cached_blocks(seq) == []
    engine.run()
    assert seq.output_token_ids == reference_output(list(range(9)), 8)


def test_after_a_failed_step_the_runner_forgets_everything() -> None:
    """The executor failed, who knows where; the next step, and only that one, says so."""
    engine = FakeEngine()
    gone, stays = engine.add([1, 2]), engine.add([3, 4])
    engine.step()
    engine.abort(gone)
    engine.scheduler.schedule()
    engine.scheduler.preempt_all()
    assert engine.step().is_restart
    assert not engine.step().is_restart
    engine.run()
    assert stays.output_token_ids == reference_output([3, 4], 8)


# -- what waits, and why --


def test_a_sequence_that_is_not_ready_is_passed_over() -> None:
    """Without holding up those behind it; it keeps its place."""
    engine = FakeEngine(max_num_seqs=1)
    late = engine.add([1], max_tokens=2, cls=LateSequence)
    others = [engine.add([i], max_tokens=2) for i in (2, 3)]
    assert num_tokens_of(engine.step()) == {others[0].seq_id: 1}
    assert why_waiting(engine.scheduler, late.seq_id) == "the sequence is not ready"
    late.ready = True  # type: ignore[attr-defined]
    engine.run()
    assert late.metrics.finished_time < others[1].metrics.finished_time  # type: ignore[operator]


def test_nothing_ready_is_an_empty_step() -> None:
    engine = FakeEngine()
    engine.add([1], cls=LateSequence)
    assert engine.step().is_empty
    assert engine.scheduler.has_unfinished()


def test_why_waiting_tells_the_truth() -> None:
    """Each reason, where it is the reason."""
    engine = FakeEngine(num_blocks=4, block_size=4, max_num_seqs=2)
    first, second = engine.add(range(7)), engine.add(range(100, 110))
    assert "next step" in why_waiting(engine.scheduler, first.seq_id)
    assert "1 more urgent" in why_waiting(engine.scheduler, second.seq_id)
    engine.step()
    assert why_waiting(engine.scheduler, first.seq_id) == "the sequence is running"
    reason = why_waiting(engine.scheduler, second.seq_id)
    assert reason == "it needs 3 blocks, 2 are free"
    engine.abort(first)
    assert "next step" in why_waiting(engine.scheduler, second.seq_id)


def test_why_waiting_names_max_num_seqs() -> None:
    engine = FakeEngine(max_num_seqs=1)
    engine.add([1])
    second = engine.add([2])
    engine.step()
    assert "max_num_seqs=1" in why_waiting(engine.scheduler, second.seq_id)


@pytest.mark.parametrize("chunked", [True, False])
def test_why_waiting_names_the_token_budget(chunked: bool) -> None:
    engine = FakeEngine(
        max_model_len=16,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        enable_chunked_prefill=chunked,
    )
    engine.add(range(8 if not chunked else 15))
    engine.add(range(100, 101 if not chunked else 104))
    third = engine.add(range(200, 215))
    engine.step()
    assert "token budget" in why_waiting(engine.scheduler, third.seq_id)


# -- what a step costs --


class CountingList(list[int]):
    """Token ids that count how many of them somebody looked at."""

    num_seen = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_seen += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Any:
        self.num_seen += len(self)
        return super().__iter__()


def count_work(context_len: int, num_steps: int = 8) -> tuple[int, int]:
    """(lines of Python run, token ids looked at) by `num_steps` decodes behind such a context."""
    engine = FakeEngine(num_blocks=600, block_size=16, max_model_len=9000)
    seq = engine.add([i % 900 for i in range(context_len)], max_tokens=num_steps + 2)
    output = engine.scheduler.schedule()
    engine.scheduler.update_from_output(output, ModelOutput({0: (1,)}, {}))
    seq.token_ids = tokens = CountingList(seq.token_ids)
    num_lines = 0

    def trace(frame: FrameType, what: str, argument: object) -> Any:
        nonlocal num_lines
        num_lines += what == "line"
        return trace

    before = sys.gettrace()
    gc.collect()
    gc.disable()  # what it finds of other tests' garbage is not this step's work
    sys.settrace(trace)
    try:
        for _ in range(num_steps):
            output = engine.scheduler.schedule()
            engine.scheduler.update_from_output(output, ModelOutput({0: (1,)}, {}))
    finally:
        sys.settrace(before)
        gc.enable()
    return num_lines, tokens.num_seen


def test_a_step_costs_the_same_whatever_the_context_length() -> None:
    """Decoding behind 40 tokens and behind 8040 runs the same lines on as many token ids."""
    assert count_work(40) == count_work(8040)
