"""Which sequences run, with how many tokens? First the invariants as properties, then the rules.

The fake model (fakes.py) reads every token that it samples out of its KV cache. So "the same tokens
as alone" tests the block tables, the prefix cache, the pending copies and the counters at once.
"""

from __future__ import annotations

import gc
import sys
from itertools import accumulate
from types import FrameType, SimpleNamespace
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

from nanoserve.fault_isolation import hold
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import (
    ModelOutput,
    RequestMetrics,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
    TokenLogprobs,
)

MAX_MODEL_LEN = 64


# -- invariants 1 to 3, in random histories --


requests = st.builds(
    SimpleNamespace,
    prefix=st.integers(0, 1),  # with which shared text its prompt begins
    num_shared=st.sampled_from([0, 0, 1, 4, 8, 8, 12, 16, 24]),  # tokens of the shared text
    num_own=st.integers(0, 12),  # tokens that no other prompt has
    max_tokens=st.integers(1, 20),
    gap=st.sampled_from([0, 0, 0, 1, 2, 5, 20]),  # steps since the arrival of the request before
    priority=st.integers(-2, 2),
    cache_salt=st.sampled_from([None, None, None, "mine"]),
    seed=st.integers(0, 1),
    num_stop_tokens=st.sampled_from([0, 0, 60]),  # token ids below this number end it
    late_by=st.sampled_from([0, 0, 0, 0, 3, 10]),  # steps until it is ready
    n=st.sampled_from([1, 1, 1, 2, 3, 5]),
    prompt_logprobs=st.sampled_from([None, None, None, 0]),
)
disturbances = st.builds(
    SimpleNamespace,
    step=st.integers(0, 30),
    kind=st.sampled_from(["abort", "abort in flight", "fail", "abort and fail"]),
    victim=st.integers(0, 15),  # which unfinished sequence is aborted
    all_branches=st.booleans(),  # are the other branches of its request aborted too?
)


@st.composite
def engine_options(draw: st.DrawFn) -> dict[str, Any]:
    """Engines with few blocks and with many."""
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
    """The state before a `schedule()`."""

    def __init__(self, scheduler: Scheduler) -> None:
        manager = scheduler.block_manager
        self.running = list(scheduler.running)
        self.swapped = {seq: seq.num_computed_tokens for seq in scheduler.swapped}
        self.block_tables = {i: list(table) for i, table in manager.block_tables.items()}
        self.swapped_tables = dict(manager.swapped_tables)


class History:
    """Plays requests and disturbances against a FakeEngine, and checks every step."""

    def __init__(
        self,
        options: dict[str, Any],
        requests: list[SimpleNamespace],
        disturbances: list[SimpleNamespace],
    ) -> None:
        self.engine = FakeEngine(max_model_len=MAX_MODEL_LEN, **options)
        self.scheduler = self.engine.scheduler
        self.arrivals = list(zip(accumulate(r.gap for r in requests), requests, strict=True))
        self.disturbances = {item.step: item for item in disturbances}
        self.sequences: list[Sequence] = []  # branches, too
        self.ready_at: dict[str, int] = {}  # request id -> step
        self.prompt_logprobs: dict[str, list[int]] = {}  # request id -> positions that came

    def play(self) -> None:
        """Step until every request has arrived and ended."""
        step = 0
        while self.arrivals or self.scheduler.has_unfinished():
            while self.arrivals and self.arrivals[0][0] <= step:
                self.arrive(self.arrivals.pop(0)[1], step)
            for seq in self.sequences:
                seq.ready = self.ready_at[seq.request_id] <= step  # type: ignore[attr-defined]
            self.step(self.disturbances.get(step))
            step += 1
            assert step < 5000, "some request does not end"
        self.check_results()

    def arrive(self, request: SimpleNamespace, step: int) -> None:
        text = [100 + request.prefix, *range(1, 24)]  # equal tokens behind a different first one
        shared = text[: request.num_shared]
        own = [500 + 7 * len(self.sequences) + i % 5 for i in range(request.num_own)]
        prompt = (shared + own or [3])[: self.engine.capacity - 1]
        if not prompt:
            return  # one slot cannot hold a prompt and a new token: the InputProcessor refuses
        n = request.n
        known = set(self.scheduler.sequences)
        seq = self.engine.add(
            prompt,
            request.max_tokens,
            n=n,
            cls=LateSequence,
            sampling_params=SamplingParams(n=n, prompt_logprobs=request.prompt_logprobs),
            priority=request.priority,
            cache_salt=request.cache_salt,
            seed=request.seed,
            stop_token_ids=frozenset(range(request.num_stop_tokens)),
        )
        new = [s for seq_id, s in self.scheduler.sequences.items() if seq_id not in known]
        self.sequences += new  # of the branches, those that will not fork off the first
        assert seq is new[0]
        self.ready_at[seq.request_id] = step + request.late_by
        self.prompt_logprobs[seq.request_id] = []

    def step(self, disturbance: SimpleNamespace | None) -> None:
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
        self.engine.executor.fail_next_step = kind in ("fail", "abort and fail")
        self.note(self.engine.execute(scheduler_output))
        scheduled = {item.seq_id for item in scheduler_output.scheduled}
        assert set(self.engine.executor.rows) == scheduled, "a row was not dropped"
        self.check_lists()

    def choose_victims(self, disturbance: SimpleNamespace) -> list[Sequence]:
        """One unfinished sequence, or all of its request."""
        unfinished = list(self.scheduler.sequences.values())
        if not unfinished:
            return []
        victim = unfinished[disturbance.victim % len(unfinished)]
        if not disturbance.all_branches:
            return [victim]
        return [seq for seq in unfinished if seq.request_id == victim.request_id]

    def abort(self, victims: list[Sequence]) -> None:
        for victim in victims:
            event(f"aborted while {victim.status.value}")
            self.engine.abort(victim)

    def note(self, updates: list[SequenceUpdate]) -> None:
        """Record new branches; check and record prompt logprobs."""
        for update in updates:
            seq = update.sequence
            if seq not in self.sequences:
                assert seq.branch > 0
                self.sequences.append(seq)
            if update.prompt_logprobs:
                start, entries = update.prompt_logprobs
                digests = prefix_digests(seq.prompt_token_ids)
                for i, entry in enumerate(entries, start):
                    assert entry.token_ids == (seq.prompt_token_ids[i],)
                    assert entry.logprobs == (-digests[i - 1],)
                    self.prompt_logprobs[seq.request_id].append(i)

    def check_decision(self, output: SchedulerOutput, before: Before) -> None:
        """The rules of every step."""
        scheduler, config = self.scheduler, self.engine.config
        self.check_lists()
        ready = [seq for seq in scheduler.waiting if seq.is_ready()]
        if output.is_empty:
            assert not (scheduler.running or scheduler.swapped or ready), "work and an empty step"
            assert output == SchedulerOutput((), (), (), 0)
            return
        num_tokens = num_tokens_of(output)
        assert len(num_tokens) == len(output.scheduled) <= config.max_num_seqs
        assert sum(num_tokens.values()) == output.total_num_scheduled_tokens
        assert output.total_num_scheduled_tokens <= config.max_num_batched_tokens
        assert min(num_tokens.values()) >= 1
        assert set(num_tokens) == {seq.seq_id for seq in scheduler.running}, "one does not advance"
        for item in output.scheduled:
            seq = scheduler.sequences[item.seq_id]
            assert item.num_computed_tokens + item.num_scheduled_tokens == seq.num_computed_tokens
            if not config.enable_chunked_prefill:
                num_known = seq.num_computed_tokens - len(item.draft_token_ids)
                assert num_known == seq.num_tokens, "a prompt was split"
            elif config.long_prefill_token_threshold:
                assert item.num_scheduled_tokens <= config.long_prefill_token_threshold
            if seq in before.swapped:
                assert item.num_computed_tokens == before.swapped[seq], "computed again"
        preempted = [seq for seq in before.running if seq not in scheduler.running]
        admitted = [seq for seq in scheduler.running if seq not in before.running]
        assert not (preempted and admitted), "a step preempted one sequence and admitted another"
        if preempted:
            event(f"preempted: {preempted[0].status.value}")
            least = min(map(scheduler.urgency, preempted))
            assert max(map(scheduler.urgency, scheduler.running)) < least, "the wrong victim"
        if admitted and (left := ready + scheduler.swapped):
            last = max(map(scheduler.urgency, admitted))
            assert last < min(map(scheduler.urgency, left)), "a more urgent one was overtaken"
        self.check_copies(output, before)

    def check_copies(self, output: SchedulerOutput, before: Before) -> None:
        """The copies of a step are those of its preemptions, admissions and first writes."""
        manager = self.engine.block_manager
        swapped_out = [
            pair
            for seq in self.scheduler.swapped
            if seq.seq_id in before.block_tables
            for pair in zip(
                before.block_tables[seq.seq_id], manager.swapped_tables[seq.seq_id], strict=True
            )
        ]
        assert sorted(output.blocks_to_swap_out) == sorted(swapped_out)
        swapped_in = [
            pair
            for seq_id, cpu_blocks in before.swapped_tables.items()
            if seq_id in manager.block_tables
            for pair in zip(
                cpu_blocks, manager.block_tables[seq_id][: len(cpu_blocks)], strict=True
            )
        ]
        assert sorted(output.blocks_to_swap_in) == sorted(swapped_in)
        own_copies = [
            item.new_block_ids[0]
            for item in output.scheduled
            if item.first_new_block < manager.num_blocks_for(item.num_computed_tokens)
        ]
        assert [own for _, own in output.blocks_to_copy] == own_copies

    def check_lists(self) -> None:
        """The three lists are sorted, disjoint and complete, and agree with statuses and tables."""
        scheduler, manager = self.scheduler, self.engine.block_manager
        ids: dict[SequenceStatus, set[int]] = {}
        for queue, status in (
            (scheduler.waiting, SequenceStatus.WAITING),
            (scheduler.swapped, SequenceStatus.SWAPPED),
            (scheduler.running, SequenceStatus.RUNNING),
        ):
            urgencies = [scheduler.urgency(seq) for seq in queue]
            assert urgencies == sorted(set(urgencies))
            assert all(seq.status is status for seq in queue)
            for seq in queue:
                in_flight = seq.num_output_placeholders
                assert 0 <= seq.num_computed_tokens <= seq.num_tokens + in_flight
            ids[status] = {seq.seq_id for seq in queue}
        assert sum(map(len, ids.values())) == len(set().union(*ids.values()))
        assert set().union(*ids.values()) == set(scheduler.sequences)
        assert ids[SequenceStatus.RUNNING] == set(manager.block_tables)
        assert ids[SequenceStatus.SWAPPED] == set(manager.swapped_tables)
        assert all(seq.num_computed_tokens == 0 for seq in scheduler.waiting)
        num_slots = sum(1 + seq.num_pending_forks for seq in scheduler.running)
        assert num_slots <= scheduler.max_num_seqs

    def check_results(self) -> None:
        """Invariants 1 to 3, after the last step."""
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
        """A request that sampled a token has n branches, and all prompt logprobs, if it asked. As
        many branches as can run fork off the first; the others began on their own."""
        for root in self.sequences:
            if root.branch:
                continue
            n = root.sampling_params.n
            branches = [s.branch for s in self.sequences if s.request_id == root.request_id]
            num_forks = min(n, self.engine.config.max_num_seqs) - 1
            on_their_own = [0, *range(1 + num_forks, n)]
            assert sorted(branches) == (list(range(n)) if root.num_output_tokens else on_their_own)
            assert root.num_output_tokens or root.status.finish_reason == "abort"
            positions = set(self.prompt_logprobs[root.request_id])
            if root.sampling_params.prompt_logprobs is None:
                assert not positions
            elif root.num_output_tokens:
                assert root.num_cached_tokens == 0
                assert positions == set(range(1, root.num_prompt_tokens))


few_requests = given(
    options=engine_options(),
    requests=st.lists(requests, min_size=1, max_size=9),
    disturbances=st.lists(disturbances, max_size=4),
)
a_crowd = given(
    options=engine_options(),
    requests=st.lists(requests, min_size=25, max_size=40),
    disturbances=st.lists(disturbances, max_size=12),
)


@settings(max_examples=120)
@few_requests
def test_same_tokens_no_block_lost_and_everything_ends(**drawn: Any) -> None:
    """For every engine size, arrivals, aborts and failures: each request gets the same tokens as
    alone, all blocks are free at the end, and each request ends with a reason."""
    History(**drawn).play()


@pytest.mark.slow
@settings(max_examples=1000)
@few_requests
def test_the_same_in_many_more_histories(**drawn: Any) -> None:
    History(**drawn).play()


@pytest.mark.slow
@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@a_crowd
def test_the_same_for_a_crowd(**drawn: Any) -> None:
    """Many more requests than run at once."""
    History(**drawn).play()


# -- order --


def started(engine: FakeEngine) -> list[int]:
    """Run to the end; the seq_ids in the order in which the runner learned of them."""
    return [new.seq_id for step in engine.run() for new in step.new_sequences]


def test_first_come_first_served() -> None:
    """Sequences start in the order of arrival, whatever their priorities."""
    engine = FakeEngine(max_num_seqs=2)
    for priority in (5, 0, -3, 7):
        engine.add([1], max_tokens=4, priority=priority)
    assert started(engine) == [0, 1, 2, 3]


def test_priority_first_then_arrival() -> None:
    """Lower values run first; sequences of equal priority run in the order of arrival."""
    engine = FakeEngine(max_num_seqs=1, scheduling_policy="priority")
    for priority in (5, 0, -3, 0, 5):
        engine.add([priority % 7], max_tokens=2, priority=priority)
    assert started(engine) == [2, 1, 3, 0, 4]


def test_a_sequence_that_is_not_ready_is_passed_over() -> None:
    """The sequences behind it run. It keeps its place in the queue."""
    engine = FakeEngine(max_num_seqs=1)
    late = engine.add([1], max_tokens=2, cls=LateSequence)
    others = [engine.add([i], max_tokens=2) for i in (2, 3)]
    assert num_tokens_of(engine.step()) == {others[0].seq_id: 1}
    late.ready = True  # type: ignore[attr-defined]
    engine.run()
    assert late.metrics.finished_ts < others[1].metrics.finished_ts  # type: ignore[operator]


# -- the token budget --


def test_the_example_of_the_module() -> None:
    """Budget 8: 1 token for a decode, a chunk of 6 for a prompt, 1 for the sequence behind it."""
    engine = FakeEngine(max_num_batched_tokens=8, max_num_seqs=3, enable_prefix_caching=False)
    engine.add(range(7))
    engine.step()
    engine.add(range(100, 113))
    assert num_tokens_of(engine.step()) == {0: 1, 1: 7}
    engine.add(range(200, 220))
    assert num_tokens_of(engine.step()) == {0: 1, 1: 6, 2: 1}
    assert num_tokens_of(engine.step()) == {0: 1, 1: 1, 2: 6}


def test_a_chunk_leaves_a_token_to_each_running_sequence_behind_it() -> None:
    """A prefill never stalls a decode, also if the prefill is more urgent."""
    engine = FakeEngine(max_num_batched_tokens=6, max_num_seqs=3, scheduling_policy="priority")
    for i in range(2):
        engine.add([i], max_tokens=50, priority=1)
    engine.step()
    engine.add(range(40), priority=0)
    assert num_tokens_of(engine.step()) == {0: 1, 1: 1, 2: 4}
    for _ in range(5):
        assert num_tokens_of(engine.step()) == {2: 4, 0: 1, 1: 1}


def test_the_long_prefill_threshold_caps_each_sequence() -> None:
    """So one long prompt does not take the whole budget of a step."""
    engine = FakeEngine(max_num_batched_tokens=20, max_num_seqs=4, long_prefill_token_threshold=5)
    engine.add(range(17))
    engine.add(range(100, 103))
    assert num_tokens_of(engine.step()) == {0: 5, 1: 3}
    assert num_tokens_of(engine.step()) == {0: 5, 1: 1}


# -- preemption --


@pytest.mark.parametrize("num_tokens", [3, 4, 5, 7, 8, 9])
def test_preemption_around_a_block_boundary(num_tokens: int) -> None:
    """A sequence is preempted with block_size - 1, block_size or block_size + 1 known tokens. All
    of them are computed again, except what the prefix cache still holds of the sequence."""
    engine = FakeEngine(num_blocks=5, block_size=4)
    seq = engine.add([5, 6], max_tokens=12)
    while seq.num_tokens < num_tokens:
        engine.step()
    block_table = engine.block_manager.block_tables[0]
    engine.scheduler.preempt(seq)
    assert (seq.status, seq.num_computed_tokens) == (SequenceStatus.WAITING, 0)
    resumed = engine.step()
    [new] = resumed.new_sequences
    assert list(new.token_ids) == seq.token_ids[:num_tokens]
    num_cached = (num_tokens - 1) // 4
    assert list(new.block_ids) == block_table[:num_cached]
    assert num_tokens_of(resumed) == {0: num_tokens - 4 * num_cached}
    assert seq.num_cached_tokens == 0, "only a hit of the first admission counts"


def test_a_step_that_preempts_admits_no_sequence() -> None:
    """The freed blocks are for the running sequences: a more urgent arrival waits for one step."""
    engine = FakeEngine(num_blocks=5, block_size=4, scheduling_policy="priority")
    engine.add(range(7), priority=0)
    engine.add(range(100, 110), priority=2)
    engine.step()
    engine.add([1, 2], priority=1)
    steps = [num_tokens_of(engine.step()) for _ in range(3)]
    assert steps == [{0: 1, 1: 1}, {0: 1}, {0: 1, 2: 2}]


# -- n completions --


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_tokens", [3, 4, 5, 6, 7, 8, 9])
def test_a_shared_block_is_copied_once_per_branch_less_one(
    num_tokens: int, enable_prefix_caching: bool
) -> None:
    """The last branch to write keeps the shared block. Full blocks are never copied: a prompt that
    ends at the end of a block needs no copy."""
    engine = FakeEngine(block_size=4, enable_prefix_caching=enable_prefix_caching)
    root = engine.add(range(num_tokens), max_tokens=6, n=3)
    assert not engine.step().blocks_to_copy
    table = list(engine.block_manager.block_tables[root.seq_id])
    assert [engine.block_manager.block_tables[i] for i in (1, 2)] == [table, table]
    copied = engine.step().blocks_to_copy
    assert [source for source, _ in copied] == ([] if num_tokens % 4 == 0 else [table[-1]] * 2)
    tables = [engine.block_manager.block_tables[i] for i in range(3)]
    num_full = num_tokens // 4
    assert all(t[:num_full] == table[:num_full] for t in tables)
    assert len({t[-1] for t in tables}) == 3
    assert not any(step.blocks_to_copy for step in engine.run())


def test_the_prompt_of_n_completions_is_computed_once() -> None:
    """Then each branch decodes one token a step. A new branch is announced with its blocks."""
    engine = FakeEngine(max_num_batched_tokens=8, max_num_seqs=4)
    engine.add(range(18), max_tokens=3, n=4)
    steps = engine.run()
    assert [step.total_num_scheduled_tokens for step in steps] == [8, 8, 2, 4, 4]
    assert [step.needs_sync for step in steps] == [False, False, True, False, False]
    assert [new.num_samples for step in steps for new in step.new_sequences] == [4, 1, 1, 1]
    assert [new.branch for step in steps for new in step.new_sequences] == [0, 1, 2, 3]
    assert {len(new.block_ids) for new in steps[3].new_sequences} == {5}


@pytest.mark.parametrize("ended", range(3))
def test_a_first_token_may_end_its_branch(ended: int) -> None:
    """The other branches go on."""
    engine = FakeEngine()
    stop_token_id = next_token([1, 2, 3], branch=ended)
    engine.add([1, 2, 3], max_tokens=4, n=3, stop_token_ids=frozenset({stop_token_id}))
    updates = engine.execute(engine.scheduler.schedule())
    reasons = {u.sequence.branch: u.sequence.status.finish_reason for u in updates}
    assert reasons == {branch: "stop" if branch == ended else None for branch in range(3)}
    assert len(engine.scheduler.running) == 2


def test_n_completions_wait_until_there_are_n_slots() -> None:
    """A later request waits behind them."""
    engine = FakeEngine(max_num_seqs=3)
    for n in (1, 3, 1):
        engine.add([1], max_tokens=2, n=n)
    steps = [sorted(num_tokens_of(step)) for step in engine.run()]
    assert steps == [[0], [0], [1], [1, 2, 3], [4], [4]]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_completions_beyond_max_num_seqs_wait_for_a_place(enable_prefix_caching: bool) -> None:
    """n=5 in three places: three branches fork off the prompt. As soon as one has ended, the next
    begins on its own, and computes only the part of the prompt that is in no cached block."""
    engine = FakeEngine(max_num_seqs=3, block_size=4, enable_prefix_caching=enable_prefix_caching)
    ends_branch_1 = frozenset({next_token([*range(10)], branch=1)})
    engine.add(range(10), max_tokens=4, n=5, stop_token_ids=ends_branch_1)
    steps = engine.run()
    rest = 2 if enable_prefix_caching else 10  # of 10 tokens, 8 are in full blocks
    assert [num_tokens_of(step) for step in steps] == [
        {0: 10},
        {0: 1, 2: 1, 3: rest},
        {0: 1, 2: 1, 3: 1},
        {0: 1, 2: 1, 3: 1},
        {3: 1, 4: rest},
        {4: 1},
        {4: 1},
        {4: 1},
    ]
    assert steps[0].new_sequences[0].num_samples == 3


def test_branches_are_as_urgent_as_their_request() -> None:
    """A request that arrived later is preempted before any branch."""
    engine = FakeEngine(num_blocks=8, block_size=4)
    engine.add(range(6), max_tokens=9, n=2)
    later = engine.add(
        range(100, 106), max_tokens=9, metrics=RequestMetrics(arrival_time=0.0, queued_ts=1.0)
    )
    engine.step()
    assert [seq.seq_id for seq in engine.scheduler.running] == [0, 1, 2]
    engine.run()
    assert later.metrics.num_preemptions > 0


# -- preemption by swap --


def preempt_by_swap(**options: Any) -> tuple[FakeEngine, list[Sequence], SchedulerOutput]:
    """Two sequences; the 5 blocks are too few for both. Returns after the step that preempted the
    second."""
    engine = FakeEngine(num_blocks=5, block_size=4, preemption_mode="swap", **options)
    sequences = [engine.add(range(i, i + 7), max_tokens=9) for i in (0, 100)]
    while True:
        output = engine.step()
        if sequences[1].metrics.num_preemptions:
            return engine, sequences, output


def test_swap_moves_each_block_out_and_back() -> None:
    """Nothing is computed again."""
    engine, [first, second], out = preempt_by_swap()
    assert second.status is SequenceStatus.SWAPPED
    cpu_blocks = [cpu_block for _, cpu_block in out.blocks_to_swap_out]
    assert engine.block_manager.swapped_tables == {second.seq_id: cpu_blocks}
    assert len(cpu_blocks) == engine.block_manager.num_blocks_for(second.num_computed_tokens)
    [back] = [step for step in engine.run() if step.blocks_to_swap_in]
    assert [cpu_block for cpu_block, _ in back.blocks_to_swap_in] == cpu_blocks
    [new] = back.new_sequences
    assert list(new.block_ids) == [block for _, block in back.blocks_to_swap_in]
    for seq in (first, second):
        assert engine.executor.num_tokens[seq.seq_id] == 7 + 9 - 1
        assert seq.output_token_ids == reference_output(seq.prompt_token_ids, 9)


@pytest.mark.parametrize(
    ("num_cpu_blocks", "status"), [(0, "waiting"), (1, "waiting"), (2, "swapped")]
)
def test_swap_falls_back_to_recompute(num_cpu_blocks: int, status: str) -> None:
    """There may be too few CPU blocks for all that the sequence holds: 8 tokens need 2."""
    engine, sequences, _ = preempt_by_swap(num_cpu_blocks=num_cpu_blocks)
    assert sequences[1].status.value == status
    assert engine.block_manager.cpu_pool.num_free_blocks == (
        0 if status == "swapped" else num_cpu_blocks
    )
    engine.run()
    for seq in sequences:
        assert seq.output_token_ids == reference_output(seq.prompt_token_ids, 9)


def test_a_swapped_sequence_needs_a_slot() -> None:
    """There are enough blocks, but more urgent sequences took the slots."""
    engine, [first, second], _ = preempt_by_swap(scheduling_policy="priority", max_num_seqs=2)
    engine.abort(first)
    urgent = [engine.add([i], max_tokens=3, priority=-1) for i in (1, 2)]
    for _ in range(2):
        assert num_tokens_of(engine.step()).keys() == {seq.seq_id for seq in urgent}
        assert engine.block_manager.can_swap_in(second)


def test_pending_copies_wait_for_the_next_step_with_work() -> None:
    """One schedule() preempts the second sequence and schedules nothing, because the last token of
    the first is in flight. The next step swaps the blocks out, and in again."""
    engine = FakeEngine(num_blocks=3, block_size=4, preemption_mode="swap")
    first, second = engine.add(range(4), max_tokens=2), engine.add([7, 8, 9], max_tokens=5)
    engine.step()
    in_flight = engine.scheduler.schedule()
    pending = engine.executor.launch(in_flight)
    [kv_block] = engine.block_manager.block_tables[second.seq_id]
    for _ in range(2):  # a token of the second is in flight, so the second is not swapped in yet
        assert engine.scheduler.schedule().is_empty
    assert second.status is SequenceStatus.SWAPPED
    [cpu_block] = engine.block_manager.swapped_tables[second.seq_id]
    engine.scheduler.update_from_output(in_flight, pending.result())
    output = engine.step()
    assert output.blocks_to_swap_out == ((kv_block, cpu_block),)
    [(source, _)] = output.blocks_to_swap_in
    assert source == cpu_block
    assert engine.step().blocks_to_swap_out == ()
    engine.run()
    for seq in (first, second):
        assert seq.output_token_ids == reference_output(seq.prompt_token_ids, seq.max_tokens)


# -- prompt logprobs --


def test_prompt_logprobs_come_chunk_by_chunk() -> None:
    """The chunk [a, b) brings logprobs of tokens a + 1 .. b, even before the first new token."""
    engine = FakeEngine(max_num_batched_tokens=4, max_num_seqs=1)
    engine.add(range(10), max_tokens=2, sampling_params=SamplingParams(prompt_logprobs=0))
    seen = []
    for _ in range(4):
        [update] = engine.execute(engine.scheduler.schedule())
        start, entries = update.prompt_logprobs or (0, ())
        seen.append(([*range(start, start + len(entries))], update.new_token_ids))
    tokens = reference_output(list(range(10)), 2)
    assert seen == [
        ([1, 2, 3, 4], ()),
        ([5, 6, 7, 8], ()),
        ([9], (tokens[0],)),
        ([], (tokens[1],)),
    ]


# -- a sequence's end --


@pytest.mark.parametrize(
    ("sampled", "output", "stop_reason"),
    [((5, 42, 6), (5, 42), 42), ((8, 5), (8,), 8), ((7, 5), (7,), None)],
)
def test_tokens_behind_a_stop_token_are_dropped(
    sampled: tuple[int, ...], output: tuple[int, ...], stop_reason: int | None
) -> None:
    """A step may bring several tokens. As in vLLM, stop_reason names a stop token of the user (42)
    and a second EOS token (8). It is None after the tokenizer's EOS token (7), also if the user
    gave that too."""
    engine = FakeEngine()
    params = SamplingParams(stop_token_ids=[42, 7])
    stops = frozenset({42, 8, 7})
    seq = engine.add([1, 2], sampling_params=params, stop_token_ids=stops, eos_token_id=7)
    step = engine.scheduler.schedule()
    logprobs = tuple(TokenLogprobs((token_id,), (0.0,), 1) for token_id in sampled)
    model_output = ModelOutput({0: sampled}, {0: logprobs})
    [update] = engine.scheduler.update_from_output(step, model_output)
    assert update.new_token_ids == output == tuple(seq.output_token_ids)
    assert update.logprobs == logprobs[: len(output)]
    assert (seq.status.finish_reason, seq.stop_reason) == ("stop", stop_reason)


def test_max_tokens_ends_with_length() -> None:
    """Tokens behind the last one are dropped, here 7 and 8."""
    engine = FakeEngine()
    seq = engine.add([1], max_tokens=3)
    engine.step()
    step = engine.scheduler.schedule()
    [update] = engine.scheduler.update_from_output(step, ModelOutput({0: (5, 6, 7, 8)}, {}))
    assert update.new_token_ids == (5, 6)
    assert (seq.num_output_tokens, seq.status.finish_reason) == (3, "length")


def test_finish_returns_the_sequence_that_it_finished() -> None:
    """For example one that failed, with the message of the error. A second call finds none."""
    engine = FakeEngine()
    seq = engine.add([1])
    error = SequenceStatus.FINISHED_ERROR
    assert engine.scheduler.finish(seq.seq_id, error, "a message") is seq
    assert (seq.status.finish_reason, seq.stop_reason) == ("error", "a message")
    assert engine.scheduler.finish(seq.seq_id, error) is None
    assert not engine.scheduler.has_unfinished()


# -- a step that fails --


def test_only_what_is_kept_runs() -> None:
    """hold(): the others give their blocks back, swapped ones too, until hold(None)."""
    engine, seqs, _ = preempt_by_swap(num_cpu_blocks=3)
    kept = engine.add([9])
    assert {"RUNNING", "SWAPPED"} <= {seq.status.name for seq in seqs}
    hold(engine.scheduler, {kept.seq_id})
    engine.block_manager.check()
    assert {seq.status.name for seq in seqs} == {"WAITING"}
    assert num_tokens_of(engine.step()) == {kept.seq_id: 1}
    later = engine.add([8])
    assert num_tokens_of(engine.step()).keys() == {kept.seq_id, later.seq_id}
    hold(engine.scheduler, None)
    engine.run()
    for seq in (*seqs, kept, later):
        expected = reference_output(seq.prompt_token_ids, seq.max_tokens)
        assert seq.output_token_ids == expected


def test_preempt_all_trusts_only_the_tokens() -> None:
    """All sequences wait and are computed again. Both pools are free; the prefix cache is empty.
    The next step, and only this one, tells the runner to drop its rows."""
    engine, sequences, _ = preempt_by_swap()
    sequences.append(engine.add([1]))
    engine.scheduler.schedule()
    engine.scheduler.preempt_all()
    assert engine.scheduler.waiting == sequences
    assert all(seq.status is SequenceStatus.WAITING for seq in sequences)
    assert all(seq.num_uncomputed_tokens == seq.num_tokens for seq in sequences)
    assert [seq.metrics.num_preemptions for seq in sequences] == [1, 2, 0]
    assert engine.block_manager.num_free_blocks == 5
    assert engine.block_manager.cpu_pool.num_free_blocks == 5
    assert engine.block_manager.get_cached_blocks(sequences[0]) == []
    assert [engine.step().is_restart for _ in range(2)] == [True, False]
    engine.run()
    for seq in sequences:
        assert seq.output_token_ids == reference_output(seq.prompt_token_ids, seq.max_tokens)


# -- what a step costs --


class CountingList(list[int]):
    """Token ids that count how many of them are read."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Any:
        self.num_read += len(self)
        return super().__iter__()


def count_work(context_len: int, num_steps: int = 8) -> tuple[int, int]:
    """(lines of Python run, token ids read) in `num_steps` decodes after `context_len` tokens."""
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
    gc.disable()  # collecting the garbage of other tests is not the work of this step
    sys.settrace(trace)
    try:
        for _ in range(num_steps):
            output = engine.scheduler.schedule()
            engine.scheduler.update_from_output(output, ModelOutput({0: (1,)}, {}))
    finally:
        sys.settrace(before)
        gc.enable()
    return num_lines, tokens.num_read


def test_a_step_costs_the_same_whatever_the_context_length() -> None:
    """Decodes after 40 tokens and after 8040 tokens run the same lines and read as many tokens."""
    assert count_work(40) == count_work(8040)
