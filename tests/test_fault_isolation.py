"""Faults planted everywhere: the guilty requests end, the others get exactly their tokens.

The real engine over the fake model. A fault sits in the executor (it names no request), in a row of
its output, or in a consumer. What one such step does in detail is in test_engine.py; the tensors
that a real logits processor may return, and NaN, are at the end.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf, log2, nan
from typing import Any

import engines
import pytest
import torch
from engines import assert_idle, change_text, check, expect, fail_row, finish, params, step
from fakes import add_beam_search
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve import LLM, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.exceptions import Caught, RequestError, describe_error
from nanoserve.fault_isolation import PROBE_SEQ_ID, STALL_SECONDS
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import ModelOutput, SchedulerOutput, Sequence, SequenceStatus

MakeEngine = Callable[..., LLMEngine]


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    return partial(engines.make_engine, async_scheduling=request.param)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Hundreds of tracebacks are expected."""
    caplog.set_level(logging.CRITICAL, "nanoserve")


class Planted(Exception):
    """A fault that a test has planted."""


@dataclass(frozen=True)
class Fault:
    """A request fails in each step before which one of its sequences has `position` output tokens
    or more, in the place `where`. A fault with a `kind` is in few of these steps."""

    position: int
    where: str  # "launch", "result", "row" or "text"
    # "decode": the sequence has one token in the step; "prefill": more than one; "third": a decode
    # of each third token; "here": no tokens but these; "once": the first such step.
    kind: str = "always"

    def is_in(self, num_output_tokens: int, num_scheduled_tokens: int) -> bool:
        """Does a sequence fail that has so many output tokens, with so many tokens in the step?"""
        is_decode = num_scheduled_tokens == 1
        found = {
            "decode": is_decode,
            "prefill": not is_decode,
            "third": is_decode and num_output_tokens % 3 == 0,
            "here": num_output_tokens == self.position,
        }
        return num_output_tokens >= self.position and found.get(self.kind, True)


class FaultyExecutor:
    """Plants faults in an engine's executor and texts, and counts the steps that fail."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.faults: dict[str, Fault] = {}  # by request id
        self.num_transient = 0  # steps that shall fail for no reason
        self.seen: set[str] = set()  # requests whose fault has been in a step
        self.num_failed: dict[str, int] = {}  # request id -> failed steps in which it was
        self.is_broken = False  # every step fails, the engine's own, too
        self._launch, self._read = engine.executor.launch, engine.executor.read
        engine.executor.launch, engine.executor.read = self.launch, self.read

    def launch(self, scheduler_output: SchedulerOutput) -> Any:
        if self.is_broken:
            raise Planted("broken")
        sequences = self.engine.scheduler.sequences
        seqs = [sequences[item.seq_id] for item in scheduler_output.scheduled]
        if seqs[0].seq_id == PROBE_SEQ_ID:
            return self._launch(scheduler_output)
        sizes = [item.num_scheduled_tokens for item in scheduler_output.scheduled]
        pairs = zip(seqs, sizes, strict=True)
        found = {seq.seq_id: fault for seq, size in pairs if (fault := self.find(seq, size))}
        if self.num_transient or any(fault.where == "launch" for fault in found.values()):
            self.num_transient -= self.num_transient > 0
            self.fail(seqs)
        pending = self._launch(scheduler_output)
        pending.seqs, pending.faults = seqs, found
        return pending

    def read(self, pending: Any, output: ModelOutput) -> ModelOutput:
        result = self._read(pending, output)
        found: dict[int, Fault] = getattr(pending, "faults", {})
        if any(fault.where == "result" for fault in found.values()):
            self.fail(pending.seqs)
        for seq_id, fault in found.items():
            if fault.where == "row" and seq_id in result.sampled_token_ids:
                fail_row(result, seq_id, "no token")
        return result

    def find(self, seq: Sequence, num_scheduled_tokens: int) -> Fault | None:
        """The fault that a step with so many tokens of this sequence has."""
        fault = self.faults.get(seq.request_id)
        num_known = seq.num_output_tokens + max(0, seq.num_output_placeholders - 1)
        if fault is None or not fault.is_in(num_known, num_scheduled_tokens):
            return None
        is_over = fault.kind == "once" and seq.request_id in self.seen
        self.seen.add(seq.request_id)
        return None if is_over else fault

    def find_stop(self, seq: Sequence) -> None:
        fault = self.faults.get(seq.request_id)
        if fault and fault.where == "text" and seq.num_output_tokens > fault.position:
            raise Planted

    def fail(self, seqs: list[Sequence]) -> None:
        for request_id in {seq.request_id for seq in seqs}:
            self.num_failed[request_id] = self.num_failed.get(request_id, 0) + 1
        raise Planted("a fault")


def most_failures(num_requests: int, num_guilty: int, max_tokens: int = 1) -> int:
    """Steps that may fail with so many requests in the first of them. Only what does not fail in
    each step needs several searches: then max_tokens counts."""
    num_searches = ceil(log2(max_tokens)) + 1
    return num_guilty * num_searches * (ceil(log2(max(1, num_requests))) + 3)


# -- what a search does --


@pytest.mark.parametrize("where", ["launch", "result"])
@pytest.mark.parametrize("num_requests", [1, 2, 3, 8])
@pytest.mark.parametrize("position", [0, 3])
def test_the_guilty_one_ends_and_the_others_do_not_notice(
    make_engine: MakeEngine, where: str, num_requests: int, position: int
) -> None:
    """step() raises nothing. The error is the request's outcome; few steps fail on the way."""
    for guilty in {0, num_requests // 2, num_requests - 1}:
        engine = make_engine()
        executor = FaultyExecutor(engine)
        executor.faults["guilty"] = Fault(position, where)
        names = [f"{i}" if i != guilty else "guilty" for i in range(num_requests)]
        for i, name in enumerate(names):
            engine.add_request(name, [1, 2, i], params(n=1 + i % 2))
        outputs = finish(engine)
        for i, name in enumerate(names):
            assert len(outputs[name].outputs) == 1 + i % 2
            for completion in outputs[name].outputs:
                whole = expect([1, 2, i], branch=completion.index)
                if name == "guilty":
                    assert completion.token_ids == whole[:position]
                    assert completion.finish_reason == "error"
                    assert completion.stop_reason == "Planted: a fault"
                else:
                    assert (completion.token_ids, completion.finish_reason) == (whole, "length")
        assert max(executor.num_failed.values()) <= most_failures(num_requests, 1)


def test_new_requests_wait_until_the_search_is_over(make_engine: MakeEngine) -> None:
    """They can be aborted meanwhile, and so can a suspect; the search goes on with the others."""
    engine = make_engine()
    executor = FaultyExecutor(engine)
    executor.faults["guilty"] = Fault(0, "launch")
    for i, name in enumerate(("a", "b", "c", "guilty")):
        engine.add_request(name, [1, 2, i], params())
    engine.step()
    engine.add_request("new", [4], params())
    engine.add_request("gone", [5], params())
    step(engine)
    assert "new" not in {seq.request_id for seq in engine.scheduler.running}
    assert engine.abort_request(["gone", "a"])
    outputs = finish(engine)
    assert sorted(outputs) == ["b", "c", "guilty", "new"]
    assert outputs["guilty"].outputs[0].finish_reason == "error"
    for name, prompt in {"b": [1, 2, 1], "c": [1, 2, 2], "new": [4]}.items():
        assert outputs[name].outputs[0].token_ids == expect(prompt)


@pytest.mark.parametrize("kind", ["decode", "third", "prefill"])
@pytest.mark.parametrize("num_requests", [1, 2, 8])
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_what_fails_at_some_steps_only(
    make_engine: MakeEngine, kind: str, num_requests: int, enable_prefix_caching: bool
) -> None:
    """The request is tried by prefill and decode, for longer if a search was in vain. So it ends,
    early, and few steps fail on the way."""
    engine = make_engine(enable_prefix_caching=enable_prefix_caching, num_kv_blocks=256)
    executor = FaultyExecutor(engine)
    executor.faults["guilty"] = Fault(0, "launch", kind)
    names = ["guilty", *map(str, range(1, num_requests))]
    num_searches = 3 if kind == "third" else 1  # by 2, by 4, by 8 tokens
    most = num_searches * most_failures(num_requests, 1)
    for i, name in enumerate(names):
        engine.add_request(name, [1, 2, i], params(max_tokens=50))
    outputs = finish(engine)
    for i, name in enumerate(names):
        [completion], whole = outputs[name].outputs, expect([1, 2, i], 50)
        if name == "guilty":
            assert completion.finish_reason == "error"
            assert completion.token_ids == whole[: len(completion.token_ids)]
            assert len(completion.token_ids) <= (30 if kind == "third" else most + 1)
        else:
            assert completion.token_ids == whole
    assert max(executor.num_failed.values()) <= most


def test_a_beam_search_that_fails_at_decodes_only(make_engine: MakeEngine) -> None:
    """Its sequences are others after each token: all of them are tried."""
    engine = make_engine()
    executor = FaultyExecutor(engine)
    executor.faults["guilty"] = Fault(0, "launch", "decode")
    guilty = add_beam_search(engine, "guilty", [1, 2], 3, 20, ignore_eos=True)
    engine.add_request("a", [4, 5], params())
    assert finish(engine)["a"].outputs[0].token_ids == expect([4, 5])
    with pytest.raises(RuntimeError, match="'guilty' failed: Planted: a fault"):
        guilty.get_output()
    assert executor.num_failed["guilty"] <= most_failures(2, 1)


def fail_if(engine: LLMEngine, error: Exception, is_bad: Callable[[SchedulerOutput], bool]) -> None:
    """Every step for which is_bad raises this error, the engine's own, too."""
    launch = engine.executor.launch

    def launch_or_fail(scheduler_output: SchedulerOutput) -> Any:
        if is_bad(scheduler_output):
            raise error
        return launch(scheduler_output)

    engine.executor.launch = launch_or_fail


def has_decode(step: SchedulerOutput) -> bool:
    return any(item.num_computed_tokens for item in step.scheduled)


def has_prefill(step: SchedulerOutput) -> bool:
    return any(item.num_scheduled_tokens > 1 for item in step.scheduled)


@pytest.mark.parametrize("is_bad", [has_decode, has_prefill])
def test_code_that_fails_for_everybody(
    make_engine: MakeEngine, is_bad: Callable[[SchedulerOutput], bool]
) -> None:
    """At decodes, or at prefills of more than one token: the engine's own request finds it."""
    engine = make_engine()
    for i in range(8):
        engine.add_request(f"{i}", [1, 2, i], params())
    fail_if(engine, Planted(), is_bad)
    with pytest.raises(Planted):
        finish(engine)
    assert engine.get_num_unfinished_requests() == 8


def test_the_engines_own_request_fits() -> None:
    """Into the smallest engines, too: one guilty request ends, and step() raises nothing."""
    for options in ({"max_model_len": 2}, {"num_kv_blocks": 1}, {"max_num_batched_tokens": 1}):
        options = {"max_num_seqs": 1, **options}
        engine = engines.make_engine(**options)
        FaultyExecutor(engine).faults["guilty"] = Fault(0, "launch")
        for name in ("guilty", "b"):
            engine.add_request(name, [1], params(max_tokens=1))
        outputs = finish(engine)
        assert outputs["guilty"].outputs[0].finish_reason == "error"
        assert outputs["b"].outputs[0].token_ids == expect([1], 1)


def test_code_that_is_not_written(make_engine: MakeEngine) -> None:
    """No search: the first step raises. What torch lacks an operator for can be a request's own
    wish, so that is searched for."""
    engine = make_engine()
    for i in range(4):
        engine.add_request(f"{i}", [1, 2, i], params())
    is_large = lambda step: len(step.scheduled) > 1  # noqa: E731
    fail_if(engine, NotImplementedError("write me"), is_large)
    with pytest.raises(NotImplementedError, match="write me"):
        engine.step()
    assert not engine._search.is_on
    assert engine.get_num_unfinished_requests() == 4
    engine = make_engine()
    engine.add_request("a", [1, 2], params())
    fail_if(
        engine,
        NotImplementedError("Could not run 'aten::sort'"),
        lambda step: step.scheduled[0].seq_id != PROBE_SEQ_ID,
    )
    assert finish(engine)["a"].outputs[0].finish_reason == "error"


@pytest.mark.parametrize("num_guilty", [1, 2, 5])
def test_requests_that_all_fail_alone(make_engine: MakeEngine, num_guilty: int) -> None:
    """With the same type of error, and no other request is there: step() raises it, and all of
    them end. With another request beside them they end, and nothing is raised."""
    for has_other in (False, True):
        engine = make_engine()
        executor = FaultyExecutor(engine)
        for i in range(num_guilty):
            executor.faults[f"{i}"] = Fault(0, "launch")
            engine.add_request(f"{i}", [1, 2, i], params())
        if has_other:
            engine.add_request("other", [3], params())
        if num_guilty > 1 and not has_other:
            with pytest.raises(Planted):
                finish(engine)
        outputs = finish(engine)
        for i in range(num_guilty):
            assert outputs[f"{i}"].outputs[0].finish_reason == "error"
        if has_other:
            assert outputs["other"].outputs[0].token_ids == expect([3])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_engine_that_never_lets_a_request_run_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, async_scheduling: bool
) -> None:
    """A warning, once, and again after it has had work meanwhile. Later the step fails, unless the
    request is not ready."""
    clock, is_mute = [100.0], [True]
    monkeypatch.setattr("nanoserve.fault_isolation.time.monotonic", lambda: clock[0])

    class Mute(Scheduler):
        def schedule(self) -> SchedulerOutput:
            return SchedulerOutput((), (), (), 0) if is_mute[0] else super().schedule()

    engine = engines.make_engine(scheduler_cls=Mute, async_scheduling=async_scheduling)
    caplog.set_level(logging.WARNING, "nanoserve")
    for num_warnings in (1, 2):
        engine.step()  # nothing is unfinished
        clock[0] += 60
        engine.add_request("a", {"prompt_token_ids": [1]}, params())
        for seconds, expected in ((0, -1), (4, -1), (1, 0), (54, 0)):
            clock[0] += seconds
            engine.step()
            assert len(caplog.records) == num_warnings + expected
        is_mute[0] = False
        finish(engine)
        is_mute[0] = True
    assert "1 requests are unfinished" in caplog.text
    assert "nanoserve.tools.why_waiting" in caplog.text

    engine.add_request("b", {"prompt_token_ids": [1]}, params())
    engine.step()
    clock[0] += STALL_SECONDS
    with monkeypatch.context() as patch:
        patch.setattr(Sequence, "is_ready", lambda seq: False)
        assert engine.step() == []
    with pytest.raises(RuntimeError, match=r"1 requests are unfinished.*All are ready"):
        engine.step()
    is_mute[0] = False
    assert finish(engine)["b"].outputs[0].token_ids == expect([1])


def test_each_failed_step_is_in_the_log_once(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """In one line; an error that is new with its traceback, which shows where it was raised."""
    caplog.set_level(logging.ERROR, "nanoserve")
    engine = make_engine()
    executor = FaultyExecutor(engine)
    executor.faults["guilty"] = Fault(1, "launch")
    for name in ("a", "guilty", "b"):
        engine.add_request(name, [1, 2], params())
    finish(engine)
    first, *others, last = caplog.records
    assert len(caplog.records) == executor.num_failed["guilty"] + 1
    assert first.getMessage().startswith("a step failed: Planted: a fault. Its 3 sequences are ")
    assert first.exc_info
    again = "a step failed: the same error again (Planted: a fault)."
    assert {record.getMessage() for record in others} == {again}
    assert last.getMessage() == "request 'guilty' failed: Planted: a fault"
    assert not any(record.exc_info for record in (*others, last))
    caplog.clear()
    executor.num_transient = 1
    engine.add_request("a", [1, 2], params())
    fail_if(engine, Planted("another"), lambda step: step.scheduled[0].seq_id != PROBE_SEQ_ID)
    finish(engine)
    assert "another. The one sequence in it is computed" in caplog.records[0].getMessage()
    assert caplog.records[0].exc_info


def test_a_broken_executor_is_nobodys_fault(make_engine: MakeEngine) -> None:
    """step() raises the error each time. All requests stay, and get their tokens in the end."""
    engine = make_engine()
    executor = FaultyExecutor(engine)
    for i in range(3):
        engine.add_request(f"{i}", [1, 2, i], params(n=2))
    step(engine)
    executor.is_broken = True
    for _ in range(3):
        with pytest.raises(Planted, match="broken"):
            engine.step()
        check(engine)
    executor.is_broken = False
    outputs = finish(engine)
    for i in range(3):
        assert [c.token_ids for c in outputs[f"{i}"].outputs] == [
            expect([1, 2, i], branch=branch) for branch in (0, 1)
        ]


def test_a_scheduler_that_fails_for_one_request(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any step with it exists: all that wait are suspects."""
    engine = make_engine()
    look_up = engine.block_manager.get_cached_blocks

    def get_cached_blocks(seq: Sequence) -> list[int]:
        if seq.request_id == "guilty":
            raise Planted
        return look_up(seq)

    monkeypatch.setattr(engine.block_manager, "get_cached_blocks", get_cached_blocks)
    for i, name in enumerate(("a", "guilty", "b")):
        engine.add_request(name, [1, 2, i], params())
    outputs = finish(engine)
    assert outputs["guilty"].outputs[0].finish_reason == "error"
    assert outputs["a"].outputs[0].token_ids == expect([1, 2, 0])
    assert outputs["b"].outputs[0].token_ids == expect([1, 2, 2])


def test_a_guilty_beam_search(make_engine: MakeEngine) -> None:
    """get_output says why; the search beside it finds what it finds without a fault."""
    found = []
    for faults in ({}, {"guilty": Fault(2, "launch")}):
        engine = make_engine()
        FaultyExecutor(engine).faults = faults
        guilty = add_beam_search(engine, "guilty", [1, 2], 3, 6, ignore_eos=True)
        innocent = add_beam_search(engine, "innocent", [1, 2, 3], 3, 6, ignore_eos=True)
        engine.add_request("a", [4, 5], params())
        assert finish(engine)["a"].outputs[0].token_ids == expect([4, 5])
        found.append([beam.tokens for beam in innocent.get_output().sequences])
    assert found[0] == found[1]
    with pytest.raises(RuntimeError, match="'guilty' failed: Planted: a fault"):
        guilty.get_output()


# -- a scheduler and an executor of one's own --

UPDATE_FAULTS = ("before", "append", "fork", "finish", "after")


def faulty_scheduler(where: str) -> type[Scheduler]:
    """It fails for one request: when its third token is appended, when it forks, or at its end."""

    class Faulty(Scheduler):
        def is_guilty(self, seq_id: int, num_output_tokens: int) -> bool:
            seq = self.sequences.get(seq_id)
            is_here = seq is not None and seq.request_id == "guilty"
            return is_here and seq.num_output_tokens >= num_output_tokens

        def update_from_output(self, step: SchedulerOutput, output: ModelOutput) -> Any:
            fails = any(self.is_guilty(item.seq_id, 2) for item in step.scheduled)
            if fails and where == "before":
                raise Planted
            updates = super().update_from_output(step, output)
            if fails and where == "after":
                raise Planted
            return updates

        def _append_tokens(self, seq: Sequence, sampled: tuple[int, ...]) -> int:
            if where == "append" and self.is_guilty(seq.seq_id, 2):
                raise Planted
            return super()._append_tokens(seq, sampled)

        def add_fork(self, parent: Sequence, child: Sequence, ends_parent: bool = False) -> None:
            super().add_fork(parent, child, ends_parent)
            if where == "fork" and child.request_id == "guilty" and child.branch == 2:
                raise Planted

        def finish(self, seq_id: int, status: SequenceStatus, reason: Any = None) -> Any:
            seq = super().finish(seq_id, status, reason)
            ended = (SequenceStatus.FINISHED_LENGTH, SequenceStatus.FINISHED_STOPPED)
            if where == "finish" and seq and seq.request_id == "guilty" and status in ended:
                raise Planted
            return seq

    return Faulty


@pytest.mark.parametrize("where", UPDATE_FAULTS)
@pytest.mark.parametrize("first", ["guilty", "innocent"])
def test_an_update_that_fails_is_taken_back(
    make_engine: MakeEngine, where: str, first: str
) -> None:
    """The innocent ones have all tokens once, with their logprobs, whenever they end: some in the
    very step that fails."""
    engine = make_engine(scheduler_cls=faulty_scheduler(where))
    innocent = [f"{i}" for i in range(1, 6)]
    for name in ["guilty", *innocent] if first == "guilty" else [*innocent, "guilty"]:
        wanted = params(n=3, max_tokens=8 if name == "guilty" else int(name), logprobs=1)
        engine.add_request(name, [1, 2, 3], wanted)
    outputs = finish(engine)
    assert {c.finish_reason for c in outputs["guilty"].outputs} == {"error"}
    for name in innocent:
        for branch, completion in enumerate(outputs[name].outputs):
            assert completion.token_ids == expect([1, 2, 3], int(name), branch)
            assert completion.finish_reason == "length"
            assert [len(entry) >= 1 for entry in completion.logprobs] == [True] * int(name)
        assert outputs[name].metrics.num_generation_tokens == 3 * int(name)


@pytest.mark.parametrize("what", ["no token", "no forks", "None", "a float"])
def test_an_output_without_a_token(make_engine: MakeEngine, what: str) -> None:
    """Of a broken executor, for one request: this one ends, and nothing waits for ever."""
    engine = make_engine()
    read = engine.executor.read

    def spoil(pending: Any, output: ModelOutput) -> ModelOutput:
        result = read(pending, output)
        for seq_id, seq in engine.scheduler.sequences.items():
            if seq.request_id == "guilty" and seq_id in result.sampled_token_ids:
                if what == "no forks":
                    result.forks.pop(seq_id, None)
                elif what == "no token":
                    del result.sampled_token_ids[seq_id]
                else:
                    result.sampled_token_ids[seq_id] = (None if what == "None" else 1.0,)
        return result

    engine.executor.read = spoil
    for name in ("a", "guilty", "b"):
        engine.add_request(name, [1, 2, 3], params(n=2, prompt_logprobs=1))
    outputs = finish(engine)
    assert {c.finish_reason for c in outputs["guilty"].outputs} == {"error"}
    for name in ("a", "b"):
        tokens = [completion.token_ids for completion in outputs[name].outputs]
        assert tokens == [expect([1, 2, 3], branch=branch) for branch in (0, 1)]


@pytest.mark.parametrize("is_known", [False, True])
def test_a_consumer_that_cannot_be_ended(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """It fails, and so does the scheduler, once, when it is to end the sequence (before or after
    the sequence is forgotten). The others of the step have their texts, and it ends."""
    engine = make_engine()
    finish_sequence, failed = engine.scheduler.finish, []

    def fail_once(seq_id: int, *args: Any) -> Any:
        seq = engine.scheduler.sequences.get(seq_id)
        fails = seq is not None and seq.request_id == "guilty" and not failed
        result = None if fails and is_known else finish_sequence(seq_id, *args)
        if fails:
            failed.append(seq_id)
            raise Planted
        return result

    seen: dict[str, int] = {}

    def find_stop(seq: Sequence) -> None:
        seen[seq.request_id] = seen.get(seq.request_id, 0) + 1
        if seq.request_id == "guilty" and seq.num_output_tokens >= 3:
            raise Planted

    change_text(monkeypatch, find_stop)
    engine.output_processor.finish = fail_once
    for name in ("a", "guilty", "b"):
        state = engine.make_request(name, [1, 2, 3], params())
        state.branches[0].detokenizer = None
        engine.add(state)
    outputs = finish(engine)
    assert failed
    assert outputs["guilty"].outputs[0].finish_reason == "error"
    for name in ("a", "b"):
        assert outputs[name].outputs[0].token_ids == expect([1, 2, 3])
        assert seen[name] == 10


# -- all of it together --


@dataclass(frozen=True)
class Arrival:
    """One request, when it comes, and what is wrong with it."""

    own: int  # tokens of the prompt that no other request has
    max_tokens: int
    n: int
    gap: int  # steps after the previous arrival
    kind: RequestOutputKind
    fault: Fault | None


FAULTS = st.builds(
    Fault,
    position=st.integers(0, 6),
    where=st.sampled_from(["launch", "launch", "result", "row", "text"]),
    kind=st.sampled_from(["always"] * 4 + ["decode", "prefill", "third", "here", "once"]),
)
ARRIVALS = st.builds(
    Arrival,
    own=st.integers(1, 8),
    max_tokens=st.sampled_from([1, 2, 4, 8]),
    n=st.sampled_from([1, 1, 2, 3]),
    gap=st.sampled_from([0, 0, 0, 1, 3]),
    kind=st.sampled_from(RequestOutputKind),
    fault=st.one_of(st.none(), st.none(), FAULTS),
)
OPTIONS = st.fixed_dictionaries(
    {
        "async_scheduling": st.booleans(),
        "num_kv_blocks": st.sampled_from([6, 9, 14, 64]),
        "preemption_mode": st.sampled_from(["recompute", "swap"]),
        "num_cpu_blocks": st.sampled_from([3, 64]),
        "max_num_seqs": st.sampled_from([2, 3, 8]),
        "max_num_batched_tokens": st.sampled_from([8, 11, 64]),
        "enable_prefix_caching": st.booleans(),
    }
)
TROUBLES = st.lists(
    st.tuples(
        st.integers(0, 25),  # the step
        st.sampled_from(["a failure for no reason", "abort", "abort one", "beams"]),
        st.integers(0, 9),  # which request
    ),
    max_size=4,
)


class Workload:
    """Plays arrivals with faults, and troubles, against an engine."""

    def __init__(self, engine: LLMEngine, arrivals: list[Arrival]) -> None:
        self.engine = engine
        self.arrivals = dict(enumerate(arrivals))
        self.executor = FaultyExecutor(engine)
        self.last: dict[str, RequestOutput] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.aborted: set[str] = set()
        self.searches: list[Any] = []
        self.num_transient = 0
        self.had_one = False  # a failure for no reason, in this search

    def prompt_of(self, number: int) -> list[int]:
        return [1, 2, 3, 4, *[10 + number] * self.arrivals[number].own]

    def play(self, troubles: list[tuple[int, str, int]]) -> None:
        due = []
        for number, arrival in self.arrivals.items():
            due.append((arrival.gap + (due[-1][0] if due else 0), number))
        at = 0
        while due or self.engine.has_unfinished_requests():
            while due and due[0][0] <= at:
                self.arrive(due.pop(0)[1])
            for when, what, number in troubles:
                if when == at:
                    self.disturb(what, f"{number}", number)
            outputs: list[RequestOutput] = []
            try:
                outputs = step(self.engine)
            except Planted:  # all that are left failed one by one
                assert len(self.executor.faults) > 1
                assert not self.engine.get_num_unfinished_requests()
            for output in outputs:
                self.take(output)
            at += 1
            assert at < 2000, "no end in sight"

    def arrive(self, number: int) -> None:
        arrival = self.arrivals[number]
        if arrival.fault:
            self.executor.faults[f"{number}"] = arrival.fault
        wanted = params(max_tokens=arrival.max_tokens, n=arrival.n, output_kind=arrival.kind)
        self.engine.add_request(f"{number}", self.prompt_of(number), wanted)

    def disturb(self, what: str, name: str, number: int) -> None:
        if what == "beams":
            name = f"beams {len(self.searches)}"
            self.searches.append(add_beam_search(self.engine, name, [1, number], 2, 3))
        elif what == "a failure for no reason":
            # Two of them could hit the same request alone, and then it would be blamed.
            self.had_one &= self.engine._search.is_on or self.executor.num_transient > 0
            self.executor.num_transient += not self.had_one
            self.num_transient += not self.had_one
            self.had_one = True
        elif self.engine.abort_request(name, number % 3 if what == "abort one" else None):
            self.aborted.add(name)

    def take(self, output: RequestOutput) -> None:
        name = output.request_id
        assert name not in self.last or not self.last[name].finished, "an output after the last"
        self.last[name] = output
        is_delta = self.arrivals[int(name)].kind is RequestOutputKind.DELTA
        for completion in output.outputs:
            known = self.tokens.get((name, completion.index), []) if is_delta else []
            self.tokens[name, completion.index] = known + completion.token_ids

    def check_results(self) -> None:
        engine = self.engine
        assert_idle(engine)
        for number, arrival in self.arrivals.items():
            name, prompt = f"{number}", self.prompt_of(number)
            if name in self.aborted:
                continue
            room = engine.executor.num_kv_blocks * engine.block_manager.block_size - len(prompt)
            num_tokens = min(arrival.max_tokens, room)
            is_guilty = arrival.fault is not None and arrival.fault.position < num_tokens
            reasons = {completion.finish_reason for completion in self.last[name].outputs}
            event(f"{arrival.fault.where if arrival.fault and is_guilty else 'innocent'}")
            assert self.last[name].finished
            is_certain = arrival.fault is None or arrival.fault.kind == "always"
            is_guilty &= is_certain or "error" in reasons  # a short one may end before it is found
            assert ("error" in reasons) == is_guilty
            has_one = arrival.fault is not None and arrival.fault.kind == "once"
            if is_guilty and has_one and arrival.fault.where in ("launch", "result"):
                assert self.num_transient, "one failure that does not come again ends nobody"
            for branch in range(arrival.n):
                whole = expect(prompt, num_tokens, branch)
                tokens = self.tokens[name, branch]
                assert tokens == (whole[: len(tokens)] if is_guilty else whole)
        for search in self.searches:
            assert search.get_output().sequences
        num_faults = self.num_transient + len(self.executor.faults)
        most = most_failures(len(self.arrivals) + len(self.searches), num_faults, 8)
        assert all(number <= most for number in self.executor.num_failed.values())
        engine.add_request("afterwards", [5, 6], params())
        assert finish(engine)["afterwards"].outputs[0].token_ids == expect([5, 6])


def check_planted_faults(
    options: dict[str, Any], arrivals: list[Arrival], troubles: list[tuple[int, str, int]]
) -> None:
    workload = Workload(engines.make_engine(**options), arrivals)
    with pytest.MonkeyPatch.context() as monkeypatch:
        change_text(monkeypatch, workload.executor.find_stop)
        workload.play(troubles)
        workload.check_results()


CASES = given(
    options=OPTIONS, arrivals=st.lists(ARRIVALS, min_size=1, max_size=7), troubles=TROUBLES
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])


@quick
@CASES
def test_planted_faults(
    options: dict[str, Any], arrivals: list[Arrival], troubles: list[tuple[int, str, int]]
) -> None:
    """Wherever the faults are: the guilty requests end with an error, and the others get exactly
    their tokens. Few steps fail, no block is lost, and the engine serves on."""
    check_planted_faults(options, arrivals, troubles)


@pytest.mark.slow
@settings(quick, max_examples=1000)
@CASES
def test_many_planted_faults(
    options: dict[str, Any], arrivals: list[Arrival], troubles: list[tuple[int, str, int]]
) -> None:
    check_planted_faults(options, arrivals, troubles)


# -- real logits --


class Unspeakable(Exception):
    """Neither its text nor that of an object of this class can be shown."""

    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__

    def __call__(self, output: list[int], logits: Tensor) -> Any:
        return self


class Subclass(Tensor):
    """A tensor that is not a plain one."""


def raises(error: BaseException) -> Callable[..., Tensor]:
    def processor(output: list[int], logits: Tensor) -> Tensor:
        raise error

    return processor


BAD_PROCESSORS: dict[str, Callable[..., Any]] = {
    "an exception": raises(ZeroDivisionError("no")),
    "SystemExit": raises(SystemExit(1)),
    "KeyboardInterrupt": raises(KeyboardInterrupt()),
    "GeneratorExit": raises(GeneratorExit()),
    "an exception of its own kind": raises(type("Mine", (BaseException,), {})()),
    "an exception without a text": raises(Unspeakable()),
    "None": lambda output, logits: None,
    "an object without a repr": Unspeakable(),
    "NumPy": lambda output, logits: logits.numpy(),
    "a list": lambda output, logits: logits.tolist(),
    "another shape": lambda output, logits: logits[None],
    "sparse": lambda output, logits: logits.to_sparse(),
    "meta": lambda output, logits: logits.to("meta"),
    "quantized": lambda output, logits: torch.quantize_per_tensor(logits, 0.1, 0, torch.qint8),
    "nested": lambda output, logits: torch.nested.nested_tensor([logits]),
    "bool": lambda output, logits: logits > 0,
    "int": lambda output, logits: logits.long(),
    "complex": lambda output, logits: logits.to(torch.complex64),
    "a subclass": lambda output, logits: logits.as_subclass(Subclass),
    "NaN": lambda output, logits: logits * nan,
    "one NaN": lambda output, logits: logits.index_fill(0, torch.tensor([7]), nan),
    "infinite": lambda output, logits: logits.index_fill(0, torch.tensor([7]), inf),
    "nothing allowed": lambda output, logits: logits.fill_(-inf),
}
STORY = "Once upon a time"
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlapped"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(num_kv_blocks=256, async_scheduling=request.param) as llm:
        yield llm
        llm.engine.block_manager.check()


@pytest.mark.filterwarnings("ignore:.*quantized tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_whatever_a_logits_processor_does(llm: LLM) -> None:
    """It ends its own request, with a message and no token. All in the same steps: none fails, and
    nothing is computed again."""
    [alone] = llm.generate(STORY, GREEDY, use_tqdm=False)
    reports: list[Any] = []
    llm.engine.step_listeners.append(reports.append)
    wanted = [
        SamplingParams(temperature=0, n=1, logits_processors=[f]) for f in BAD_PROCESSORS.values()
    ]
    sampled = SamplingParams(temperature=1.0, n=3, logits_processors=[BAD_PROCESSORS["bool"]])
    params_of_all = [GREEDY, *wanted, sampled, GREEDY]
    outputs = llm.generate([STORY] * len(params_of_all), params_of_all, use_tqdm=False)
    llm.engine.step_listeners.clear()
    for output in (outputs[0], outputs[-1]):
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        assert output.metrics.num_preemptions == 0
    assert len(reports) == GREEDY.max_tokens
    for name, output in zip([*BAD_PROCESSORS, "bool"], outputs[1:-1], strict=True):
        for completion in output.outputs:
            assert (completion.finish_reason, completion.token_ids) == ("error", []), name
            reason = completion.stop_reason
            assert "a logits processor failed" in reason or "no token is possible" in reason, name
    assert [completion.index for completion in outputs[-2].outputs] == [0, 1, 2]


@pytest.mark.parametrize("what", ["generate", "step"])
def test_a_logits_processor_that_runs_its_own_engine(llm: LLM, what: str) -> None:
    """It ends its request; the one beside it does not notice."""

    def run(output: list[int], logits: Tensor) -> Tensor:
        if len(output) == 2:
            llm.generate(STORY, GREEDY, use_tqdm=False) if what == "generate" else llm.step()
        return logits

    [alone] = llm.generate(STORY, GREEDY, use_tqdm=False)
    given = [GREEDY, replace(GREEDY, logits_processors=[run])]
    good, bad = llm.generate([STORY] * 2, given, use_tqdm=False)
    assert good.outputs[0].token_ids == alone.outputs[0].token_ids
    assert (bad.outputs[0].finish_reason, len(bad.outputs[0].token_ids)) == ("error", 2)
    assert "cannot run another one" in str(bad.outputs[0].stop_reason)
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 1, "n": 2},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0, "allowed_token_ids": [5, 9], "logprobs": 2},
        {"temperature": 0, "logit_bias": {5: 1}, "presence_penalty": 1.0},
    ],
)
def test_logits_that_are_no_numbers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], bad: float
) -> None:
    """One such logit, anywhere in the row: the request ends with an error, the one beside it does
    not. -inf is a number."""
    model = llm.engine.executor.runner.model
    compute_logits = model.compute_logits

    def spoil(hidden: Tensor) -> Tensor:
        logits = compute_logits(hidden).clone()
        logits[:, 3] = -inf
        logits[1:, 9] = bad
        return logits

    [alone] = llm.generate(STORY, GREEDY, use_tqdm=False)
    monkeypatch.setattr(model, "compute_logits", spoil)
    given = [GREEDY, SamplingParams(max_tokens=4, **fields)]
    good, broken = llm.generate([STORY, STORY], given, use_tqdm=False)
    assert good.outputs[0].token_ids == alone.outputs[0].token_ids
    assert good.metrics.num_preemptions == 0  # no step failed, no step in flight either
    for completion in broken.outputs:
        assert (completion.finish_reason, completion.token_ids) == ("error", [])
        assert "the model's logits are NaN or infinite" in str(completion.stop_reason)


def nan_of_mine(output: list[int], logits: Tensor) -> Tensor:
    return logits * nan


class NamelessProcessor:
    """Its name cannot be asked for."""

    def __getattr__(self, name: str) -> Any:
        raise SystemExit if name == "__qualname__" else AttributeError(name)

    def __call__(self, output: list[int], logits: Tensor) -> Tensor:
        return logits * inf


WHY_NO_TOKEN: list[tuple[dict[str, Any], str]] = [
    ({"logits_processors": [nan_of_mine]}, "NaN or infinity (test_fault_isolation.nan_of_mine)."),
    ({"logits_processors": [NamelessProcessor()]}, "(test_fault_isolation.NamelessProcessor)."),
    (
        {
            "allowed_token_ids": [0],
            "logit_bias": {1: 5},
            "logits_processors": [lambda output, logits: logits.fill_(-inf)],
        },
        "possible: allowed_token_ids, logit_bias, logits_processors forbid all tokens.",
    ),
    (
        {"allowed_token_ids": [0], "min_tokens": 2, "stop_token_ids": [0]},
        "possible: allowed_token_ids, min_tokens forbid all tokens.",
    ),
]


@pytest.mark.parametrize(("fields", "message"), WHY_NO_TOKEN)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_why_no_token_is_possible(
    llm: LLM, fields: dict[str, Any], message: str, temperature: float
) -> None:
    """The request's own settings are named, in a batch with requests that have none."""
    wanted = SamplingParams(temperature=temperature, **fields)
    good, bad = llm.generate([STORY] * 2, [GREEDY, wanted], use_tqdm=False)
    assert good.outputs[0].finish_reason == "length"
    assert message in str(bad.outputs[0].stop_reason)


def test_damaged_weights(llm: LLM) -> None:
    """NaN in the last norm: all requests end with an error. When it is repaired, the next ones get
    their tokens."""
    [before] = llm.generate(STORY, GREEDY, use_tqdm=False)
    model = llm.engine.executor.runner.model
    [norm] = [tensor for name, tensor in model.named_parameters() if name == "model.norm.weight"]
    kept = norm.detach().clone()
    with torch.no_grad():
        norm.fill_(nan)
    outputs = llm.generate([STORY] * 2, use_tqdm=False)
    with torch.no_grad():
        norm.copy_(kept)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 2
    assert "Damaged weights do that" in str(outputs[0].outputs[0].stop_reason)
    llm.reset_prefix_cache()
    [after] = llm.generate(STORY, GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_an_error_keeps_the_bytes_of_an_unfinished_character(llm: LLM) -> None:
    """As any end of a text does: they become U+FFFD."""
    tokenizer = llm.get_tokenizer()
    byte = tokenizer.convert_tokens_to_ids("\u00e4")  # how a byte-level vocabulary writes 0xe4
    assert tokenizer.decode([byte]) == "\ufffd"

    def fail_at_second(output: list[int], logits: Tensor) -> Tensor:
        if output:
            raise Planted
        return logits

    given = SamplingParams(allowed_token_ids=[byte], logits_processors=[fail_at_second])
    [output] = llm.generate(STORY, given, use_tqdm=False)
    assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [byte])
    assert output.outputs[0].text == "\ufffd"


# -- the text of errors --


def test_the_text_of_any_error() -> None:
    """describe_error never raises, and Caught lets through only Ctrl-C."""
    assert describe_error(ZeroDivisionError("no")) == "ZeroDivisionError: no"
    assert describe_error(KeyError()) == "KeyError"
    assert describe_error(RequestError("the message")) == "the message"
    assert describe_error(Unspeakable()) == "Unspeakable: (str() of it raises an error, too)"
    with Caught() as caught:
        raise SystemExit
    assert isinstance(caught.error, SystemExit)
    with Caught() as caught:
        pass
    assert caught.error is None
    with pytest.raises(KeyboardInterrupt), Caught():
        signal.raise_signal(signal.SIGINT)
