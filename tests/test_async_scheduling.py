"""Overlapped steps: the control plane decides a step before it knows the tokens of the last one.

The real engine over the fake model. Its executor makes a step when it is launched, and gives its
tokens away only in result(), in order: a control plane that reads tokens too early, or skips a
step, fails in fakes.py. The tokens must be those of plain steps. What both kinds of steps have in
common is in test_engine.py; the property at the end covers both.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import engines
import pytest
from engines import (
    VOCAB_SIZE,
    assert_idle,
    change_text,
    check,
    expect,
    fail_row,
    finish,
    in_thread,
    params,
    step,
)
from fakes import FakeEngine, add_beam_search, make_sequence, reference_output
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nanoserve import LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.block_manager import BlockHash
from nanoserve.config import EngineConfig
from nanoserve.engine import StepReport
from nanoserve.fault_isolation import PROBE_SEQ_ID
from nanoserve.sequence import SchedulerOutput, Sequence, SequenceStatus

make_engine = partial(engines.make_engine, async_scheduling=True)


# -- the order of launches and results --


def keep(output_token_ids: list[int], logits: Any) -> Any:
    """A logits processor that changes nothing."""
    return logits


def test_a_step_is_launched_before_the_last_one_is_read() -> None:
    """Three tokens: launch, launch, read, launch, read; the last has nothing to overlap with."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(max_tokens=3))
    finish(engine)
    assert engine.executor.calls == [
        ("launch", 0),
        ("launch", 1),
        ("result", 0),
        ("launch", 2),
        ("result", 1),
        ("result", 2),
    ]


def test_the_tokens_of_a_step_come_one_step_later() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(max_tokens=3))
    came = [[c.token_ids for o in step(engine) for c in o.outputs] for _ in range(4)]
    tokens = expect([1, 2, 3], 3)
    assert came == [[], [tokens[:1]], [tokens[:2]], [tokens]]


def test_without_the_option_each_step_is_read_at_once() -> None:
    engine = make_engine(async_scheduling=False)
    engine.add_request("a", [1, 2, 3], params(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.executor.calls == [("launch", 0), ("result", 0), ("launch", 1), ("result", 1)]


@pytest.mark.parametrize(
    ("fields", "needs_sync"),
    [
        ({"logits_processors": [lambda output, logits: logits]}, True),
        ({"repetition_penalty": 1.1, "frequency_penalty": 0.5, "presence_penalty": 0.5}, False),
    ],
)
def test_a_request_whose_sampler_reads_its_tokens(fields: dict[str, Any], needs_sync: bool) -> None:
    """Its steps are read before the next one is decided. When it has ended, the others overlap. A
    penalty needs no reading: the tokens that it counts are on the device."""
    engine = make_engine()
    outputs: list[SchedulerOutput] = []
    engine.step_listeners.append(lambda report: outputs.append(report.scheduler_output))
    engine.add_request("plain", [1, 2, 3], params(max_tokens=8))
    engine.add_request("reads", [4, 5], params(max_tokens=3, **fields))
    result = finish(engine)
    assert result["plain"].outputs[0].token_ids == expect([1, 2, 3], 8)
    assert result["reads"].outputs[0].token_ids == expect([4, 5], 3)
    assert [output.needs_sync for output in outputs] == [needs_sync] * 3 + [False] * 5
    calls = engine.executor.calls
    for number, scheduler_output in enumerate(outputs[:-1]):
        is_read_first = calls.index(("result", number)) < calls.index(("launch", number + 1))
        assert is_read_first == scheduler_output.needs_sync


def test_a_chunk_of_a_prompt_needs_no_sync() -> None:
    """It brings no token. The last chunk does."""
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=4)
    outputs: list[SchedulerOutput] = []
    engine.step_listeners.append(lambda report: outputs.append(report.scheduler_output))
    reads = [lambda output, logits: logits]
    engine.add_request("a", list(range(10)), params(max_tokens=2, logits_processors=reads))
    assert finish(engine)["a"].outputs[0].token_ids == expect(list(range(10)), 2)
    assert [output.needs_sync for output in outputs] == [False, False, True, True]


def test_the_step_that_forks_needs_sync() -> None:
    """Then each branch overlaps."""
    engine = make_engine()
    outputs: list[SchedulerOutput] = []
    engine.step_listeners.append(lambda report: outputs.append(report.scheduler_output))
    engine.add_request("a", [1, 2, 3, 4, 5], params(n=3, max_tokens=5))
    [output] = finish(engine).values()
    for branch, completion in enumerate(output.outputs):
        assert completion.token_ids == expect([1, 2, 3, 4, 5], 5, branch)
    assert [output.needs_sync for output in outputs] == [True, False, False, False, False]


def test_every_step_of_beams_needs_sync() -> None:
    """The next beams are made of its tokens."""
    beams = []
    for is_async in (False, True):
        engine = make_engine(async_scheduling=is_async, num_kv_blocks=12)
        steps: list[SchedulerOutput] = []
        engine.step_listeners.append(lambda report, s=steps: s.append(report.scheduler_output))
        search = add_beam_search(engine, "beams", [1, 2, 3], 3, 5)
        engine.add_request("beside", [1, 2, 3], params())
        assert finish(engine)["beside"].outputs[0].token_ids == expect([1, 2, 3])
        beams.append(search.get_output())
        assert all(step.needs_sync for step in steps[:5])
    assert beams[0] == beams[1]


@pytest.mark.parametrize(
    ("fields", "needs_sync"),
    [
        ({}, False),
        ({"sampling_params": SamplingParams(min_tokens=3, logprobs=2, logit_bias={3: 1.0})}, False),
        ({"sampling_params": SamplingParams(allowed_token_ids=[3], temperature=0)}, False),
        ({"sampling_params": SamplingParams(repetition_penalty=0.9)}, False),
        ({"sampling_params": SamplingParams(logits_processors=[keep])}, True),
        ({"bad_word_ids": ((3,),)}, True),
        ({"always_sync": True}, True),
        ({"n": 2}, True),
    ],
)
def test_which_sequences_a_token_in_flight_blocks(fields: dict[str, Any], needs_sync: bool) -> None:
    """Those whose sampler or forks need its value, and those for which it may be the last one."""
    seq = make_sequence(0, [1, 2, 3], max_tokens=2, **fields)
    assert seq.needs_sync == needs_sync
    assert not seq.blocked_by_in_flight
    assert seq.is_ready()
    seq.num_output_placeholders = 1
    assert seq.blocked_by_in_flight == needs_sync
    assert not seq.is_ready()
    seq.token_ids.append(9)
    assert seq.blocked_by_in_flight  # the token in flight is its second one


# -- what it costs --


def num_computed(engine: LLMEngine) -> int:
    return sum(engine.executor.num_tokens.values())


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_an_end_that_is_known_costs_nothing(block_size: int) -> None:
    """max_tokens is counted, so that no token is computed that plain steps do not compute."""
    computed = []
    for is_async in (False, True):
        engine = make_engine(async_scheduling=is_async, block_size=block_size, num_kv_blocks=128)
        for i in range(6):
            engine.add_request(str(i), [i, 1, 2, 3, 4], params(max_tokens=1 + i % 4))
        outputs = finish(engine)
        computed.append(num_computed(engine))
        for i in range(6):
            assert outputs[str(i)].outputs[0].token_ids == expect([i, 1, 2, 3, 4], 1 + i % 4)
    assert computed[0] == computed[1]


def find_pair(seq: Sequence) -> str | None:
    """A stop string: two tokens whose sum divides by 7. Only the output processor sees it."""
    return "pair" if sum(seq.output_token_ids[-2:]) % 7 == 0 else None


@pytest.mark.parametrize("by_text", [False, True])
def test_an_end_that_is_a_surprise_costs_one_token(
    monkeypatch: pytest.MonkeyPatch, by_text: bool
) -> None:
    """A stop token, or a stop string: the next position was being computed, and is dropped."""
    num_tokens: dict[bool, dict[int, int]] = {}
    results: dict[bool, Any] = {}
    if by_text:
        change_text(monkeypatch, find_pair)
    for is_async in (False, True):
        engine = make_engine(async_scheduling=is_async, enable_prefix_caching=False)
        for i in range(12):
            stop = [] if by_text else list(range(25))
            engine.add_request(str(i), [i, 1, 2], params(stop_token_ids=stop, seed=i))
        results[is_async] = {
            name: (o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].stop_reason)
            for name, o in finish(engine).items()
        }
        num_tokens[is_async] = engine.executor.num_tokens
    assert results[True] == results[False]
    reasons = {i: results[True][str(i)][1] for i in range(12)}
    assert Counter(reasons.values())["stop"] > 5
    for i, reason in reasons.items():
        could_go_on = reason == "stop" and len(results[True][str(i)][0]) < 10
        assert num_tokens[True][i] - num_tokens[False][i] == could_go_on


# -- blocks become findable when their tokens are known --


def findable(manager: Any) -> list[tuple[int, ...]]:
    """The texts that the prefix cache would find, each from its beginning."""

    def text(block_hash: BlockHash | None) -> tuple[int, ...]:
        if block_hash is None or block_hash.parent is None:
            return ()
        return (*text(block_hash.parent), *block_hash.token_ids)  # type: ignore[misc]

    return sorted(text(block_hash) for block_hash in manager.pool.cached_blocks)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_a_block_is_findable_when_its_last_token_is_known(block_size: int) -> None:
    """Launched with a token in flight as its last, it is not; with the next step, it is."""
    engine = FakeEngine(block_size=block_size)
    seq = engine.add([1, 2], max_tokens=12)
    scheduler = engine.scheduler
    pending = []
    for _ in range(11):
        scheduler_output = scheduler.schedule()
        computed = seq.num_computed_tokens
        known = min(computed, seq.num_tokens)
        whole = [tuple(seq.token_ids[:end]) for end in range(block_size, known + 1, block_size)]
        assert findable(engine.block_manager) == whole
        pending.append((scheduler_output, engine.executor.launch(scheduler_output)))
        if len(pending) == 2:
            launched, output = pending.pop(0)
            scheduler.update_from_output(launched, output.result())
        engine.block_manager.check()
    assert seq.output_token_ids == reference_output([1, 2], 10)


def test_a_request_finds_what_another_has_in_flight() -> None:
    """Prompts that share a beginning share its blocks, though the step that fills them has not
    been read; a stranger's salt shares nothing."""
    engine = make_engine()
    prompt = list(range(12))
    engine.add_request("a", [*prompt, 20], params())
    step(engine)
    engine.add_request("b", [*prompt, 21], params())
    engine.add_request("salted", [*prompt, 22], params(), cache_salt="other")
    outputs = finish(engine)
    assert [outputs[name].num_cached_tokens for name in ("a", "b", "salted")] == [0, 12, 0]
    for name, last in (("a", 20), ("b", 21), ("salted", 22)):
        assert outputs[name].outputs[0].token_ids == expect([*prompt, last])


# -- preemption with tokens in flight --


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_with_a_token_in_flight(mode: str) -> None:
    """It waits for it; its row is forgotten, and comes back with all that is known by then."""
    engine = FakeEngine(num_blocks=5, block_size=2, preemption_mode=mode, num_cpu_blocks=5)
    scheduler, executor = engine.scheduler, engine.executor
    first, second = engine.add([1, 2, 3], max_tokens=6), engine.add([7, 8, 9], max_tokens=4)
    one = scheduler.schedule()
    in_flight = executor.launch(one)
    assert (first.num_output_placeholders, second.num_output_placeholders) == (1, 1)
    two = scheduler.schedule()  # both write into their second blocks
    in_flight_2 = executor.launch(two)
    scheduler.update_from_output(one, in_flight.result())
    three = scheduler.schedule()  # the first needs a third block, the second, too: one is left
    assert [item.seq_id for item in three.scheduled] == [0]
    waits = SequenceStatus.SWAPPED if mode == "swap" else SequenceStatus.WAITING
    assert (second.status, second.num_output_placeholders) == (waits, 1)
    assert not second.is_ready()
    assert three.finished_seq_ids == (1,)
    assert bool(three.blocks_to_swap_out) == (mode == "swap")
    in_flight_3 = executor.launch(three)
    assert set(executor.rows) == {0}
    scheduler.update_from_output(two, in_flight_2.result())
    assert second.is_ready()
    assert second.output_token_ids == reference_output([7, 8, 9], 2)
    scheduler.update_from_output(three, in_flight_3.result())
    came_back = [new for step in engine.run() for new in step.new_sequences if new.seq_id == 1]
    assert [new.token_ids for new in came_back] == [(7, 8, 9, *reference_output([7, 8, 9], 2))]
    assert first.output_token_ids == reference_output([1, 2, 3], 6)
    assert second.output_token_ids == reference_output([7, 8, 9], 4)
    assert engine.block_manager.num_free_blocks == 5


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_and_then_it_turns_out_to_have_ended(mode: str) -> None:
    """The token in flight was its last: it ends where it waits."""
    tokens = reference_output([7, 8, 9], 2)
    engine = FakeEngine(num_blocks=5, block_size=2, preemption_mode=mode, num_cpu_blocks=5)
    scheduler, executor = engine.scheduler, engine.executor
    engine.add([1, 2, 3], max_tokens=6)
    second = engine.add([7, 8, 9], max_tokens=9, stop_token_ids=frozenset(tokens[1:]))
    pending = []
    for _ in range(3):
        scheduler_output = scheduler.schedule()
        pending.append((scheduler_output, executor.launch(scheduler_output)))
        if len(pending) == 2:
            launched, output = pending.pop(0)
            scheduler.update_from_output(launched, output.result())
    assert second.status is SequenceStatus.FINISHED_STOPPED
    assert second.output_token_ids == tokens
    assert second not in scheduler.waiting + scheduler.swapped
    engine.block_manager.check()


# -- the end, and what cannot overlap --


def test_nothing_stays_in_flight_when_all_have_ended() -> None:
    """The step that was launched before the last one's end was known is read with it."""
    engine = make_engine()
    tokens = expect([1, 2, 3])
    engine.add_request("a", [1, 2, 3], params(stop_token_ids=[tokens[2]]))
    outputs = [output for _ in range(4) for output in engine.step()]
    assert outputs[-1].outputs[0].token_ids == tokens[:3]
    assert engine.executor.num_launched == 4
    assert_idle(engine)


def test_an_executor_without_launch_is_refused() -> None:
    """When the engine is built, with what to do; its memory is given back."""
    closed: list[bool] = []

    class Whole:
        num_kv_blocks, num_cpu_blocks = 4, 0

        def __init__(self, *_: Any) -> None:
            pass

        def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
            raise NotImplementedError

        def close(self) -> None:
            closed.append(True)

        def describe(self) -> str:
            return "whole steps"

    message = r"Whole has no launch.*result\(\).*async_scheduling=False"
    with pytest.raises(ValueError, match=message):
        make_engine(executor_cls=Whole)
    assert closed == [True]
    make_engine(executor_cls=Whole, async_scheduling=False)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_option_is_a_bool(value: Any) -> None:
    with pytest.raises(TypeError, match="async_scheduling must be True or False"):
        EngineConfig(async_scheduling=value)


# -- all of it together --


@dataclass(frozen=True)
class Arrival:
    """One request, and when it comes."""

    prefix: int  # tokens of a text that other requests begin with, too
    own: int
    max_tokens: int
    gap: int  # steps after the previous arrival
    priority: int
    seed: int
    n: int
    num_stop_tokens: int  # token ids below this end it
    has_processor: bool
    kind: RequestOutputKind
    salt: str | None


ARRIVALS = st.builds(
    Arrival,
    prefix=st.sampled_from([0, 0, 3, 4, 8, 12]),
    own=st.integers(1, 9),
    max_tokens=st.sampled_from([1, 1, 2, 3, 5, 9, 14]),
    gap=st.sampled_from([0, 0, 0, 1, 2, 6]),
    priority=st.integers(-1, 1),
    seed=st.integers(0, 2),
    n=st.sampled_from([1, 1, 1, 1, 2, 3]),
    num_stop_tokens=st.sampled_from([0, 0, 5, 12]),
    has_processor=st.sampled_from([False, False, False, True]),
    kind=st.sampled_from(RequestOutputKind),
    salt=st.sampled_from([None, None, "mine"]),
)
TROUBLES = [
    *["abort", "abort one", "abort inside", "beams"],
    *["fail launch", "fail result", "fail request", "fail text"],
]
TROUBLE = st.tuples(
    st.integers(0, 20),  # the step
    st.sampled_from(TROUBLES),
    st.integers(0, 9),  # which request
)


@st.composite
def engine_options(draw: st.DrawFn, max_stages: int = 1) -> dict[str, Any]:
    """Engines from cramped to roomy; the longest request has 12 + 9 + 14 = 35 tokens."""
    max_num_seqs = draw(st.integers(1, 6))
    chunked = draw(st.sampled_from([True, True, False]))
    return {
        "async_scheduling": draw(st.sampled_from([True, True, False])),
        "pipeline_parallel_size": min(max_stages, draw(st.sampled_from([1, 1, 1, 2, 3]))),
        "max_model_len": 40,
        "block_size": draw(st.sampled_from([1, 2, 4, 8])),
        "num_kv_blocks": draw(st.sampled_from([5, 6, 8, 11, 20, 64])),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": (max_num_seqs if chunked else 40) + draw(st.integers(0, 20)),
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 2])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap"])),
        "num_cpu_blocks": draw(st.sampled_from([2, 5, 64])),
    }


class Workload:
    """Plays arrivals and troubles against an engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.room = engine.executor.num_kv_blocks * engine.block_manager.block_size
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.searches: dict[str, Any] = {}
        self.aborted: set[str] = set()
        self.bad: dict[str, str] = {}  # request that shall fail -> where, "executor" or "text"
        self.to_abort: list[str] = []  # inside the next step, by another thread
        self.last: dict[str, RequestOutput] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}  # (request id, index), from outputs
        self.updates: dict[tuple[str, int], list[int]] = {}  # the same, from reports
        self.launched: list[SchedulerOutput] = []
        self.reported: list[SchedulerOutput] = []
        self.launch, self.read = engine.executor.launch, engine.executor.read
        engine.executor.launch, engine.executor.read = self.launch_and_note, self.read_or_fail
        engine.step_listeners.append(self.listen)

    # -- what the engine calls --

    def launch_and_note(self, scheduler_output: SchedulerOutput) -> Any:
        pending = self.launch(scheduler_output)
        if scheduler_output.scheduled[0].seq_id != PROBE_SEQ_ID:
            self.launched.append(scheduler_output)
        pending.seq_ids = [item.seq_id for item in scheduler_output.scheduled]
        return pending

    def read_or_fail(self, pending: Any, output: Any) -> Any:
        result = self.read(pending, output)
        for seq_id in pending.seq_ids:
            seq = self.engine.scheduler.sequences.get(seq_id)
            if seq is not None and self.bad.get(seq.request_id) == "executor":
                fail_row(result, seq_id)
        return result

    def find_stop(self, seq: Sequence) -> None:
        if self.bad.get(seq.request_id) == "text":
            raise ZeroDivisionError

    def listen(self, report: StepReport) -> None:
        self.reported.append(report.scheduler_output)
        for update in report.updates:
            key = (update.sequence.request_id, update.sequence.branch)
            self.updates.setdefault(key, []).extend(update.new_token_ids)
        names = {seq.request_id for seq in report.sequences.values()}
        assert names <= self.requests.keys() | self.searches.keys()
        while self.to_abort:
            self.abort(self.to_abort.pop(), in_other_thread=True)

    # -- what happens to it --

    def play(self, arrivals: list[Arrival], troubles: dict[int, tuple[str, int]]) -> None:
        """Until every request has arrived and ended."""
        due, at = [], 0
        for arrival in arrivals:
            at += arrival.gap
            due.append((at, arrival))
        number = 0
        while due or self.engine.has_unfinished_requests():
            while due and due[0][0] <= number:
                self.arrive(due.pop(0)[1])
            self.disturb(*troubles.get(number, ("", 0)))
            self.step()
            number += 1
            assert number < 3000, "no end in sight"

    def step(self) -> None:
        """One step. Each launched step is reported, is in flight, or has failed."""
        num_failed = self.engine.executor.num_failed
        self.take(self.engine.step())
        check(self.engine)
        if self.engine.executor.num_failed > num_failed:  # what was in flight is computed again
            reported = set(map(id, self.reported))
            self.launched = [output for output in self.launched if id(output) in reported]
        in_flight = [launched.scheduler_output for launched in self.engine._in_flight]
        assert list(map(id, self.reported + in_flight)) == list(map(id, self.launched))

    def arrive(self, arrival: Arrival) -> None:
        name = f"request {len(self.requests)}"
        own = [(20 + len(self.requests) + i) % VOCAB_SIZE for i in range(arrival.own)]
        prompt = [*range(arrival.prefix), *own][: self.room - 1]
        wanted = params(
            max_tokens=arrival.max_tokens,
            seed=arrival.seed,
            n=arrival.n,
            stop_token_ids=list(range(arrival.num_stop_tokens)),
            logits_processors=[keep] if arrival.has_processor else None,
            output_kind=arrival.kind,
        )
        self.requests[name] = (prompt, wanted)
        fields: dict[str, Any] = {"priority": arrival.priority, "cache_salt": arrival.salt}
        self.engine.add_request(name, prompt, wanted, **fields)

    def disturb(self, what: str, number: int) -> None:
        names = list(self.requests)
        name = names[number % len(names)] if names else ""
        if what == "abort":
            self.abort(name)
        elif what == "abort one":
            self.abort(name, index=number % 3)
        elif what == "abort inside":
            self.to_abort.append(name)
        elif what in ("fail launch", "fail result"):
            executor = self.engine.executor  # twice in one search, and a request would be blamed
            is_soon = executor.fail_next_step or executor.fail_next_result
            if not (is_soon or self.engine._search.is_on):
                executor.fail_next_step = what == "fail launch"
                executor.fail_next_result = what == "fail result"
        elif what in ("fail request", "fail text"):
            self.bad[name] = "executor" if what == "fail request" else "text"
        elif what == "beams":
            beams = f"beams {len(self.searches)}"
            with contextlib.suppress(ValueError):  # too little room
                self.searches[beams] = add_beam_search(self.engine, beams, [1, 2, number], 2, 3)

    def abort(self, name: str, index: int | None = None, in_other_thread: bool = False) -> None:
        call = partial(self.engine.abort_request, name, index)
        [is_aborted] = in_thread(call) if in_other_thread else [call()]
        if is_aborted:
            event("aborted one" if index is not None else "aborted")
            self.aborted.add(name)

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert not (output.request_id in self.last and self.last[output.request_id].finished)
            self.last[output.request_id] = output
            is_delta = self.requests[output.request_id][1].output_kind is RequestOutputKind.DELTA
            for completion in output.outputs:
                key = (output.request_id, completion.index)
                known = self.tokens.get(key, []) if is_delta else []
                self.tokens[key] = known + completion.token_ids

    # -- what must come of it --

    def check_results(self) -> None:
        """Every request that was not aborted has ended, with what it gets alone; one that failed,
        with the beginning of it. Every token was reported."""
        assert_idle(self.engine)
        for name, (prompt, wanted) in self.requests.items():
            if name in self.aborted:
                continue
            assert self.last[name].finished
            reasons = {completion.finish_reason for completion in self.last[name].outputs}
            has_failed = "error" in reasons
            assert not has_failed or name in self.bad
            event("error" if has_failed else "end")
            max_tokens = min(wanted.max_tokens or 0, min(40, self.room) - len(prompt))
            stop = wanted.stop_token_ids or ()
            for branch in range(wanted.n):
                whole = expect(prompt, max_tokens, branch, wanted.seed or 0, stop)
                tokens = self.tokens.get((name, branch), [])
                assert tokens == (whole[: len(tokens)] if has_failed else whole)
                assert self.updates.get((name, branch), []) == tokens
        for search in self.searches.values():
            assert search.get_output().sequences


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    options=engine_options(max_stages=3),
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=10),
    troubles=st.lists(TROUBLE, max_size=6),
)
def test_same_tokens_no_block_lost_and_everything_ends(
    options: dict[str, Any], arrivals: list[Arrival], troubles: list[tuple[int, str, int]]
) -> None:
    """Whatever comes, whenever, with plain and with overlapped steps, and with a pipeline."""
    workload = Workload(make_engine(**options))
    with pytest.MonkeyPatch.context() as monkeypatch:
        change_text(monkeypatch, workload.find_stop)
        workload.play(arrivals, {step: (what, number) for step, what, number in troubles})
    workload.check_results()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(arrivals=st.lists(ARRIVALS, min_size=1, max_size=10), by_text=st.booleans())
def test_at_most_one_token_is_computed_and_dropped(arrivals: list[Arrival], by_text: bool) -> None:
    """Where there is room for all, no sequence computes more than one token more than with plain
    steps, and a sequence that ends by its length computes none."""
    results = []
    for is_async in (False, True):
        engine = make_engine(async_scheduling=is_async, enable_prefix_caching=False)
        workload = Workload(engine)
        for arrival in arrivals:
            workload.arrive(replace(arrival, kind=RequestOutputKind.FINAL_ONLY))
        with pytest.MonkeyPatch.context() as monkeypatch:
            if by_text:
                change_text(monkeypatch, find_pair)
            outputs = finish(engine)
        ends = [  # in the order of the seq_ids
            (completion.token_ids, completion.finish_reason)
            for name in workload.requests
            for completion in outputs[name].outputs
        ]
        results.append((ends, engine.executor.num_tokens))
    (ends, computed), (ends_ahead, computed_ahead) = results
    assert ends == ends_ahead
    for seq_id, (_, reason) in enumerate(ends):
        extra = computed_ahead.get(seq_id, 0) - computed.get(seq_id, 0)  # 0: it never ran
        assert 0 <= extra <= (reason == "stop")
