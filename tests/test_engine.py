"""LLMEngine: requests, outputs, errors, threads. The real engine over the fake model (fakes.py).

Every test runs with plain and with overlapped steps. What only overlapped steps have is in
test_async_scheduling.py, and so is the property that covers both. Real models: test_llm.py.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import re
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import engines
import numpy as np
import pytest
from engines import (
    assert_idle,
    change_text,
    check,
    expect,
    fail_in_executor,
    finish,
    in_thread,
    params,
    step,
)
from fakes import FakeExecutor, add_beam_search

from nanoserve import LLMEngine, RequestOutput, RequestOutputKind
from nanoserve import engine as engine_module
from nanoserve.block_manager import BlockManager
from nanoserve.engine import StepReport
from nanoserve.exceptions import QueueOverflowError, RequestError, VLLMValidationError
from nanoserve.output_processor import RequestState
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import SchedulerOutput, Sequence

MakeEngine = Callable[..., LLMEngine]


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    """make_engine(num_kv_blocks=8, ...) -> an engine over the fake model."""
    return partial(engines.make_engine, async_scheduling=request.param)


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def reasons_of(output: RequestOutput) -> list[str | None]:
    return [completion.finish_reason for completion in output.outputs]


def run_until(engine: LLMEngine, is_true: Callable[[], bool]) -> list[RequestOutput]:
    """Step until the condition holds; every output on the way."""
    outputs: list[RequestOutput] = []
    while not is_true():
        assert engine.has_unfinished_requests(), "the engine is idle, and the condition is false"
        outputs += step(engine)
    return outputs


# -- requests and outputs --


def test_the_loop(make_engine: MakeEngine) -> None:
    """Add requests, step until nothing is unfinished."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params())
    engine.add_request("b", [4, 5], params(max_tokens=3))
    assert engine.is_unfinished("a")
    outputs = finish(engine)
    assert tokens_of(outputs["a"]) == [expect([1, 2, 3])]
    assert tokens_of(outputs["b"]) == [expect([4, 5], 3)]
    assert all(output.finished for output in outputs.values())
    assert not engine.is_unfinished("a")


@pytest.mark.parametrize("num_kv_blocks", [64, 6])
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_n_completions_are_one_output(
    make_engine: MakeEngine, preemption_mode: str, num_kv_blocks: int
) -> None:
    """The completions are in the order of their branches, also when blocks are few."""
    engine = make_engine(num_kv_blocks=num_kv_blocks, preemption_mode=preemption_mode)
    engine.add_request("a", [1, 2, 3, 4, 5], params(n=3))
    [output] = finish(engine).values()
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert tokens_of(output) == [expect([1, 2, 3, 4, 5], branch=branch) for branch in range(3)]
    assert reasons_of(output) == ["length"] * 3


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_all_kinds_of_output_bring_the_same_tokens(
    make_engine: MakeEngine, kind: RequestOutputKind
) -> None:
    """Deltas put together are what the last cumulative and the final output hold."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(n=2, output_kind=kind))
    outputs = run_until(engine, lambda: not engine.has_unfinished_requests())
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for output in outputs:
        for completion in output.outputs:
            is_delta = kind is RequestOutputKind.DELTA
            known = tokens[completion.index] if is_delta else []
            tokens[completion.index] = known + completion.token_ids
    assert tokens == {branch: expect([1, 2, 3], branch=branch) for branch in (0, 1)}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert len(outputs) == (1 if kind is RequestOutputKind.FINAL_ONLY else 10)


def test_outputs_of_other_requests_wait(make_engine: MakeEngine) -> None:
    """take_outputs hands out what it is asked for; the rest comes with the next call."""
    engine = make_engine()
    for name in ("a", "b"):
        engine.add_request(name, [1, 2, 3], params(max_tokens=1))
    engine.run_step()
    if engine._in_flight:
        engine.run_step()
    assert [output.request_id for output in engine.take_outputs(["b", "c"])] == ["b"]
    assert engine.has_unfinished_requests()
    assert [output.request_id for output in engine.step()] == ["a"]
    assert_idle(engine)


def test_a_request_id_in_use_is_refused(make_engine: MakeEngine) -> None:
    """Until its request has ended. A refusal changes nothing."""
    engine = make_engine()
    request = engine.make_request("a", [1], params())
    assert not engine.has_unfinished_requests()
    engine.add(request)
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add(request)
    add_beam_search(engine, "beams", [1], 2, 3)
    for name in ("a", "beams"):
        with pytest.raises(ValueError, match=f"'{name}' is in use"):
            engine.add_request(name, [2], params())
        with pytest.raises(ValueError, match=f"'{name}' is in use"):
            add_beam_search(engine, name, [2], 2, 3)
    assert tokens_of(finish(engine)["a"]) == [expect([1])]
    engine.add_request("a", [2], params())
    assert tokens_of(finish(engine)["a"]) == [expect([2])]


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_more_completions_than_places(make_engine: MakeEngine, kind: RequestOutputKind) -> None:
    """Those beyond max_num_seqs wait for a place. The request has one output, in the end with all
    completions. The request behind it gets the place beside the fifth one."""
    engine = make_engine(max_num_seqs=2)
    engine.add_request("a", [1, 2, 3], params(n=5, max_tokens=4, output_kind=kind))
    engine.add_request("b", [4], params(max_tokens=2))
    assert engine.get_num_unfinished_requests() == 2
    tokens: dict[int, list[int]] = {}
    finished = []
    while engine.has_unfinished_requests():
        for output in step(engine):
            finished += [output.request_id] if output.finished else []
            for completion in output.outputs if output.request_id == "a" else ():
                old = tokens.get(completion.index, []) if kind is RequestOutputKind.DELTA else []
                tokens[completion.index] = old + completion.token_ids
    assert_idle(engine)
    assert finished == ["b", "a"]
    assert tokens == {branch: expect([1, 2, 3], 4, branch) for branch in range(5)}


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 5])
def test_abort_with_completions_that_wait(make_engine: MakeEngine, num_steps: int) -> None:
    """All of the request, or one completion that waits for a place."""
    engine = make_engine(max_num_seqs=2)
    for index in (4, None):
        engine.add_request("a", [1, 2, 3], params(n=5, max_tokens=4))
        for _ in range(num_steps):
            step(engine)
        assert engine.abort_request("a", index)
        assert engine.is_unfinished("a") == (index is not None)
        last = finish(engine)
        if index is not None:
            reasons = [completion.finish_reason for completion in last["a"].outputs]
            assert reasons == ["length"] * 4 + ["abort"]


def test_arguments_as_in_vllm(make_engine: MakeEngine) -> None:
    """In vLLM's order; the id comes back. Several requests may be aborted at once."""
    engine = make_engine(scheduling_policy="priority")
    prompts = ([1, 2], {"prompt_token_ids": [1, 2]}, np.array([1, 2]))
    for number, prompt in enumerate(prompts):
        given = (f"{number}", prompt, params(max_tokens=3), 1e9, None, None, None, -number)
        assert engine.add_request(*given) == f"{number}"
    assert [seq.request_id for seq in engine.scheduler.waiting] == ["2", "1", "0"]
    assert {seq.metrics.arrival_time for seq in engine.scheduler.waiting} == {1e9}
    assert engine.abort_request(["0", "unknown"])
    assert not engine.abort_request(["0", "unknown"])
    assert not engine.abort_request([])
    last = finish(engine)
    assert [tokens_of(last[name]) for name in ("1", "2")] == [[expect([1, 2], 3)]] * 2
    with pytest.raises(VLLMValidationError, match="enable_lora=True"):
        engine.add_request("a", [1], params(), lora_request="x")
    for name in ("trace_headers", "tokenization_kwargs"):
        with pytest.raises(VLLMValidationError, match=f"add_request got {name}="):
            engine.add_request("a", [1], params(), **{name: {"a": "b"}})
    assert_idle(engine)


def test_priorities_do_not_count_first_come_first_served(make_engine: MakeEngine) -> None:
    """As in vLLM: only scheduling_policy="priority" reads them."""
    engine = make_engine()
    for name, priority in (("a", 5), ("b", -5)):
        engine.add_request(name, [1], params(max_tokens=2), priority=priority)
    assert [seq.request_id for seq in engine.scheduler.waiting] == ["a", "b"]
    finish(engine)


# -- abort --


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_abort_at_any_moment(make_engine: MakeEngine, n: int, num_steps: int) -> None:
    """Waiting, half prefilled, decoding: the blocks are free at once, and so is the request id. The
    new request of this id gets nothing from a step in flight of the old one."""
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=4)
    engine.add_request("a", list(range(12)), params(n=n))
    for _ in range(num_steps):
        step(engine)
    assert engine.abort_request("a")
    assert engine.block_manager.num_free_blocks == 64
    assert not engine.abort_request("a")
    assert not engine.is_unfinished("a")
    assert engine.has_unfinished_requests() == bool(engine._in_flight)
    engine.add_request("a", [1], params(max_tokens=4))
    assert tokens_of(finish(engine)["a"]) == [expect([1], 4)]


@pytest.mark.parametrize("wrong", [None, 5, [None], [5], b"x", [["a"]]])
def test_what_are_no_request_ids(make_engine: MakeEngine, wrong: Any) -> None:
    engine = make_engine()
    with pytest.raises(TypeError, match=re.escape(f"a list of strings, got {wrong!r}")):
        engine.abort_request(wrong)


def test_abort_of_a_swapped_request(make_engine: MakeEngine) -> None:
    engine = make_engine(num_kv_blocks=5, preemption_mode="swap")
    for name, first in (("stays", 1), ("aborted", 9)):
        engine.add_request(name, list(range(first, first + 7)), params())
    run_until(engine, lambda: bool(engine.scheduler.swapped))
    assert engine.abort_request("aborted")
    assert engine.block_manager.cpu_pool.num_free_blocks == 5
    assert tokens_of(finish(engine)["stays"]) == [expect(list(range(1, 8)))]


@pytest.mark.parametrize("kind", RequestOutputKind)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_abort_of_one_completion(
    make_engine: MakeEngine, index: int, kind: RequestOutputKind
) -> None:
    """Its output is ready at once, with finish_reason "abort". The others go on to their ends."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(n=3, output_kind=kind))
    assert not engine.abort_request("a", 1)  # there is only completion 0 before the fork
    run_until(engine, lambda: len(engine.scheduler.running) == 3)
    step(engine)
    num_known = engine.scheduler.running[index].num_output_tokens
    assert engine.abort_request("a", index)
    assert not engine.abort_request("a", index)
    assert not engine.abort_request("a", 3)
    outputs = engine.take_outputs()
    if kind is RequestOutputKind.FINAL_ONLY:
        assert outputs == []
    else:
        [output] = outputs
        assert not output.finished
        assert [c.index for c in output.outputs if c.finish_reason == "abort"] == [index]
    outputs += run_until(engine, lambda: not engine.has_unfinished_requests())
    assert_idle(engine)
    ends = {c.index: c for output in outputs for c in output.outputs if c.finish_reason}
    assert {i: c.finish_reason for i, c in ends.items()} == {
        i: "abort" if i == index else "length" for i in range(3)
    }
    if kind is not RequestOutputKind.DELTA:
        lengths = [num_known if i == index else 10 for i in range(3)]
        assert tokens_of(outputs[-1]) == [expect([1, 2, 3], k, i) for i, k in enumerate(lengths)]


def test_abort_of_all_completions_one_by_one(make_engine: MakeEngine) -> None:
    """Aborting the last completion ends the request, and its output is ready."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(n=2, output_kind=RequestOutputKind.FINAL_ONLY))
    run_until(engine, lambda: len(engine.scheduler.running) == 2)
    assert engine.abort_request("a", 1)
    assert engine.is_unfinished("a")
    assert engine.abort_request("a", 0)
    assert not engine.is_unfinished("a")
    assert engine.block_manager.num_free_blocks == 64
    [output] = engine.take_outputs()
    assert output.finished
    assert reasons_of(output) == ["abort", "abort"]
    finish(engine)


# -- a step fails --


@pytest.mark.parametrize("where", ["fail_next_step", "fail_next_result"])
@pytest.mark.parametrize("num_steps", range(7))
def test_a_failed_step_is_made_again(make_engine: MakeEngine, num_steps: int, where: str) -> None:
    """It fails once, at its launch or when it is read: everything in flight is computed again, and
    the same tokens come. Nobody has to know."""
    engine = make_engine(preemption_mode="swap", num_kv_blocks=8)
    engine.add_request("a", [1, 2, 3, 4, 5], params(n=2))
    engine.add_request("b", [1, 2, 3, 4, 6], params(max_tokens=5))
    outputs = [output for _ in range(num_steps) for output in step(engine)]
    setattr(engine.executor, where, True)
    last = {output.request_id: output for output in outputs} | finish(engine)
    assert engine.executor.num_failed == 1
    assert tokens_of(last["a"]) == [expect([1, 2, 3, 4, 5], branch=branch) for branch in (0, 1)]
    assert tokens_of(last["b"]) == [expect([1, 2, 3, 4, 6], 5)]


@pytest.mark.parametrize(
    "name", ["get_cached_blocks", "allocate", "can_append", "append", "copy_on_write", "swap_out"]
)
@pytest.mark.parametrize("is_done", [False, True])
def test_schedule_may_fail_anywhere(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str, is_done: bool
) -> None:
    """Before or after any change of the blocks: no block is lost, and the tokens stay the same."""
    engine = make_engine(num_kv_blocks=6, preemption_mode="swap")
    method, fails = getattr(engine.block_manager, name), iter([0, 0, 1, 0, 1])

    class InjectedError(BaseException):
        pass

    def faulty(*args: Any) -> Any:
        fails_now = next(fails, 0)
        result = method(*args) if is_done or not fails_now else None
        if fails_now:
            raise InjectedError
        return result

    monkeypatch.setattr(engine.block_manager, name, faulty)
    engine.add_request("a", [1, 2, 3, 4, 5], params(n=2))
    engine.add_request("b", [1, 2, 3, 4, 6], params())
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        with contextlib.suppress(InjectedError):
            outputs |= {output.request_id: output for output in engine.step()}
        check(engine)
    assert_idle(engine)
    assert tokens_of(outputs["a"]) == [expect([1, 2, 3, 4, 5], branch=branch) for branch in (0, 1)]
    assert tokens_of(outputs["b"]) == [expect([1, 2, 3, 4, 6])]


# -- Ctrl-C, and other handlers that raise --


@cache
def is_interruptible(file_name: str, line: int) -> bool:
    """False for a line that takes or frees a lock: CPython looks for signals at calls and jumps,
    and there is none between the end of such a block and the call that frees the lock."""
    return "with self._" not in linecache.getline(file_name, line)


class Tracer:
    """Notes the lines run in nanoserve/, and sends this process a signal at one of them."""

    def __init__(
        self, interrupt_at: int | None = None, number: signal.Signals = signal.SIGINT
    ) -> None:
        self.interrupt_at = interrupt_at
        self.number = number
        self.lines: list[tuple[str, int]] = []  # (file name, line number)
        self.num_interrupts = 0

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if "nanoserve" not in code.co_filename or code.co_name == "_call_alone":
            return None
        if event == "line" and is_interruptible(code.co_filename, frame.f_lineno):
            self.lines.append((code.co_filename, frame.f_lineno))
            if len(self.lines) == self.interrupt_at:
                sys.settrace(None)
                signal.raise_signal(self.number)
        return self

    def run(self, engine: LLMEngine) -> list[RequestOutput]:
        """Step until the interrupt or the end; every output on the way."""
        outputs: list[RequestOutput] = []
        previous = sys.gettrace()
        sys.settrace(self)
        try:
            while not self.num_interrupts and engine.has_unfinished_requests():
                try:
                    outputs += engine.step()
                except (KeyboardInterrupt, TimeoutError):
                    self.num_interrupts += 1
        except (KeyboardInterrupt, TimeoutError):  # between two steps
            self.num_interrupts += 1
        finally:
            sys.settrace(previous)
        return outputs

    def choose_lines(self) -> list[int]:
        """Where to interrupt: the middle one of all runs of each line of engine.py, and 20 other
        lines."""
        runs: dict[int, list[int]] = {}
        for number, (file_name, line) in enumerate(self.lines, start=1):
            if file_name.endswith("engine.py"):
                runs.setdefault(line, []).append(number)
        middles = {numbers[len(numbers) // 2] for numbers in runs.values()}
        return sorted(middles | set(range(1, len(self.lines), len(self.lines) // 20)))


def check_ctrl_c(make_engine: MakeEngine, tracer: Tracer) -> None:
    """Completions, a request that fails, and another thread that adds one request and aborts one:
    after an interrupt all go on, every delta comes once, and the listeners hear of no step
    twice."""
    engine = make_engine(num_kv_blocks=7, preemption_mode="swap")
    deltas = params(max_tokens=5, output_kind=RequestOutputKind.DELTA)
    engine.add_request("a", [1, 2, 3, 4, 5], replace(deltas, n=2))
    engine.add_request("b", [1, 2, 3, 4, 6], deltas)
    engine.add_request("bad", [7, 8], deltas)
    engine.add_request("aborted", [7, 8, 9], deltas)
    fail_in_executor(engine, "bad", num_output_tokens=2)
    reports: list[StepReport] = []

    def add_and_abort(_: StepReport) -> None:
        engine.step_listeners.remove(add_and_abort)
        in_thread(
            lambda: engine.add_request("c", [1, 2, 3, 4, 7], deltas),
            lambda: engine.abort_request("aborted"),
        )

    engine.step_listeners += [add_and_abort, reports.append]
    outputs = tracer.run(engine)
    check(engine)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    outputs += in_thread(engine.step)[0]  # the interrupted thread does not hold the lock
    outputs += run_until(engine, lambda: not engine.has_unfinished_requests())
    assert_idle(engine)
    tokens: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        for completion in output.outputs:
            key = (output.request_id, completion.index)
            tokens.setdefault(key, []).extend(completion.token_ids)
    for branch in (0, 1):
        assert tokens["a", branch] == expect([1, 2, 3, 4, 5], 5, branch)
    assert tokens["b", 0] == expect([1, 2, 3, 4, 6], 5)
    assert tokens["c", 0] == expect([1, 2, 3, 4, 7], 5)
    assert tokens["bad", 0] == expect([7, 8], 2)
    ends = [o.request_id for o in outputs if o.finished]
    assert sorted(ends) == ["a", "b", "bad", "c"]
    assert len({id(report.scheduler_output) for report in reports}) == len(reports)


def test_ctrl_c_at_any_line(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "nanoserve")
    recorder = Tracer()
    check_ctrl_c(make_engine, recorder)
    for number in recorder.choose_lines():
        tracer = Tracer(interrupt_at=number)
        try:
            check_ctrl_c(make_engine, tracer)
            assert tracer.num_interrupts == 1
        except BaseException as error:
            error.add_note(f"interrupted at {recorder.lines[number - 1]}, line event {number}")
            raise


def time_is_over(number: int, frame: Any) -> None:
    raise TimeoutError


def check_time_limits(make_engine: MakeEngine, most: int) -> None:
    """As with Ctrl-C: the error of a handler arrives wherever it strikes, and harms nobody."""
    recorder = Tracer()
    check_ctrl_c(make_engine, recorder)
    before = signal.signal(signal.SIGTERM, time_is_over)
    try:
        for number in range(1, len(recorder.lines), max(1, len(recorder.lines) // most)):
            tracer = Tracer(number, signal.SIGTERM)
            try:
                check_ctrl_c(make_engine, tracer)
                assert tracer.num_interrupts == 1
                assert signal.getsignal(signal.SIGTERM) is time_is_over
            except BaseException as error:
                error.add_note(f"at {recorder.lines[number - 1]}, line event {number}")
                raise
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_time_limit_at_any_line(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "nanoserve")
    check_time_limits(make_engine, 100)


@pytest.mark.slow
def test_a_time_limit_at_many_lines(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "nanoserve")
    check_time_limits(make_engine, 1000)


def test_a_second_ctrl_c_before_the_first_is_dealt_with(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step begins with it."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3, 4, 5], params(n=2))
    step(engine)
    launch, recover = engine.executor.launch, engine.recover
    pressed: list[int] = []

    def press(call: Callable[..., Any], *args: Any) -> Any:
        result = call(*args)
        pressed.append(1)
        if len(pressed) == 1:
            raise KeyboardInterrupt
        return result

    def recover_or_leave() -> None:
        if len(pressed) == 1:
            pressed.append(1)
            raise KeyboardInterrupt
        recover()

    monkeypatch.setattr(engine.executor, "launch", partial(press, launch))
    monkeypatch.setattr(engine, "recover", recover_or_leave)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    outputs = engine.step()
    last = {output.request_id: output for output in outputs} | finish(engine)
    assert tokens_of(last["a"]) == [expect([1, 2, 3, 4, 5], branch=branch) for branch in (0, 1)]


@pytest.mark.parametrize("name", ["get_cached_blocks", "can_append", "append", "free"])
def test_an_abort_in_the_middle_of_scheduling(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By a signal handler, or by a generator that is collected: it waits for the next step, for the
    lists are in use."""
    engine = make_engine(num_kv_blocks=6)
    method, calls = getattr(engine.block_manager, name), iter(range(100))

    def abort_first(*args: Any) -> Any:
        if next(calls) in (1, 2):
            engine.abort_request(["a", "c"])
        return method(*args)

    monkeypatch.setattr(engine.block_manager, name, abort_first)
    for name_of, first in (("a", 1), ("b", 2), ("c", 3)):
        engine.add_request(name_of, [first, 2, 3, 4, 5], params())
    assert tokens_of(finish(engine)["b"]) == [expect([2, 2, 3, 4, 5])]


# -- one request fails: an outcome --


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_error_before_the_fork_is_told_of_all_completions(
    make_engine: MakeEngine, kind: RequestOutputKind
) -> None:
    """Of those that would have forked off, and of those that wait for a place; in their order."""
    engine = make_engine(max_num_seqs=3)
    engine.add_request("bad", [1, 2, 3], params(n=5, output_kind=kind))
    fail_in_executor(engine, "bad")
    last = finish(engine)["bad"]
    assert [completion.index for completion in last.outputs] == list(range(5))
    assert set(reasons_of(last)) == {"error"}
    assert {completion.stop_reason for completion in last.outputs} == {"no token is possible"}
    assert last.finished


def test_a_consumer_that_aborts_itself_and_then_fails(make_engine: MakeEngine) -> None:
    """It has no output; the others of the step lose nothing."""
    engine = make_engine()

    class Odd(RequestState):
        def process(self, updates: Any) -> RequestOutput | None:
            engine.abort_request(self.request_id)
            raise SystemExit

    for name in ("a", "odd", "b"):
        request = engine.make_request(name, [1, 2, 3], params(max_tokens=3))
        request.__class__ = Odd if name == "odd" else RequestState
        engine.add(request)
    outputs = finish(engine)
    assert {name: tokens_of(output) for name, output in outputs.items()} == {
        name: [expect([1, 2, 3], 3)] for name in ("a", "b")
    }


def test_each_output_has_its_own_prompt_logprobs(make_engine: MakeEngine) -> None:
    """What the user does with one of them changes no other."""
    engine = make_engine()
    kept = RequestOutputKind.CUMULATIVE
    engine.add_request("a", [1, 2, 3], params(prompt_logprobs=1, output_kind=kept, max_tokens=4))
    outputs = run_until(engine, lambda: not engine.has_unfinished_requests())
    for output in outputs:
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == 3
        output.prompt_logprobs.clear()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_output_tokens", [0, 1, 4])
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_request_that_fails_in_the_executor(
    make_engine: MakeEngine, kind: RequestOutputKind, num_output_tokens: int, n: int
) -> None:
    """Its tokens so far and the message are its output. The others get exactly their tokens."""
    engine = make_engine(preemption_mode="swap", num_kv_blocks=12)
    engine.add_request("good", [4, 5, 6], params(n=2))
    engine.add_request("bad", [1, 2, 3], params(n=n, output_kind=kind))
    search = add_beam_search(engine, "beams", [1, 2, 3], 2, 5)
    fail_in_executor(engine, "bad", num_output_tokens)
    outputs = run_until(engine, lambda: not engine.has_unfinished_requests())
    assert_idle(engine)
    last = {output.request_id: output for output in outputs}
    assert tokens_of(last["good"]) == [expect([4, 5, 6], branch=branch) for branch in (0, 1)]
    assert search.get_output().sequences
    assert last["bad"].finished
    assert {c.finish_reason for c in last["bad"].outputs} == {"error"}
    assert {c.stop_reason for c in last["bad"].outputs} == {"no token is possible"}
    tokens = Counter[int]()
    for output in outputs:
        for completion in output.outputs if output.request_id == "bad" else ():
            if kind is not RequestOutputKind.DELTA:
                tokens[completion.index] = 0
            tokens[completion.index] += len(completion.token_ids)
    branches = range(n) if num_output_tokens else range(1)  # no branch forks before the first token
    assert tokens == Counter(dict.fromkeys(branches, num_output_tokens))
    for completion in last["bad"].outputs if kind is not RequestOutputKind.DELTA else ():
        assert completion.token_ids == expect([1, 2, 3], num_output_tokens, completion.index)


@pytest.mark.parametrize("branch", [0, 1, 2])
@pytest.mark.parametrize("num_output_tokens", [1, 4, 10])
@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_request_that_fails_in_detokenization(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: RequestOutputKind,
    num_output_tokens: int,
    branch: int,
) -> None:
    """All its unfinished completions end, those that have just forked off too. The traceback is in
    the log. Nothing is computed again."""
    engine = make_engine(enable_prefix_caching=False)
    engine.add_request("bad", [1, 2, 3], params(n=3, output_kind=kind))
    engine.add_request("good", [4, 5, 6], params(max_tokens=4))

    def find_stop(seq: Sequence) -> None:
        is_bad = seq.request_id == "bad" and seq.branch == branch
        if is_bad and seq.num_output_tokens == num_output_tokens:
            raise ZeroDivisionError("no text")

    change_text(monkeypatch, find_stop)
    last = finish(engine)
    assert tokens_of(last["good"]) == [expect([4, 5, 6], 4)]
    assert engine.executor.num_tokens[3] == 3 + 3  # computed once
    assert last["bad"].finished
    assert reasons_of(last["bad"]) == ["error"] * 3
    assert {c.stop_reason for c in last["bad"].outputs} == {"ZeroDivisionError: no text"}
    if kind is not RequestOutputKind.DELTA:
        expected = [expect([1, 2, 3], num_output_tokens, index) for index in range(3)]
        assert tokens_of(last["bad"]) == expected
    [record] = caplog.records[-1:]
    assert record.exc_info
    assert record.exc_info[0] is ZeroDivisionError


@pytest.mark.parametrize("fails_in_executor", [False, True])
def test_a_completion_that_has_ended_keeps_its_end(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, fails_in_executor: bool
) -> None:
    """The error of a later step is not told of it, and no delta tells its end twice."""
    engine = make_engine()
    stop = expect([1, 2, 3], branch=0)[2]
    assert stop not in expect([1, 2, 3], branch=1)[:7]
    wanted = params(n=2, stop_token_ids=[stop], output_kind=RequestOutputKind.DELTA)
    engine.add_request("bad", [1, 2, 3], wanted)
    if fails_in_executor:
        fail_in_executor(engine, "bad", num_output_tokens=6)
    else:

        def find_stop(seq: Sequence) -> None:
            if seq.num_output_tokens == 6:
                raise ZeroDivisionError

        change_text(monkeypatch, find_stop)
    outputs = run_until(engine, lambda: not engine.has_unfinished_requests())
    assert_idle(engine)
    ends = [(c.index, c.finish_reason) for o in outputs for c in o.outputs if c.finish_reason]
    assert ends == [(0, "stop"), (1, "error")]
    assert outputs[-1].finished


def test_a_consumer_that_cannot_tell_its_error(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no output. The other requests of the step lose nothing."""
    engine = make_engine()
    engine.add_request("bad", [1, 2, 3], params())
    engine.add_request("good", [4, 5, 6], params())
    request = engine.output_processor.requests["bad"]

    def fail(*_: Any) -> RequestOutput | None:
        raise ZeroDivisionError

    monkeypatch.setattr(request, "_build_output", fail)
    outputs = finish(engine)
    assert list(outputs) == ["good"]
    assert tokens_of(outputs["good"]) == [expect([4, 5, 6])]


@pytest.mark.parametrize("width", [1, 3])
def test_a_beam_search_that_fails(make_engine: MakeEngine, width: int) -> None:
    """Its blocks are free; get_output says why; the others get their tokens."""
    engine = make_engine()
    search = add_beam_search(engine, "beams", [1, 2, 3], width, 6)
    broken = add_beam_search(engine, "broken", [1, 2, 3], width, 6)
    engine.add_request("good", [4, 5, 6], params())
    fail_in_executor(engine, "beams", num_output_tokens=3)

    def select() -> Any:
        if any(len(beam.beam.tokens) == 5 for beam in broken.beams.values()):
            raise ZeroDivisionError("no score")
        return type(broken)._select(broken)

    broken._select = select  # type: ignore[method-assign]
    assert tokens_of(finish(engine)["good"]) == [expect([4, 5, 6])]
    with pytest.raises(RuntimeError, match="'beams' failed: no token is possible"):
        search.get_output()
    with pytest.raises(RuntimeError, match="'broken' failed: ZeroDivisionError: no score"):
        broken.get_output()


def test_the_error_of_a_request_that_was_aborted(make_engine: MakeEngine) -> None:
    """Aborted while the step that fails was in flight: there is no output. The others go on."""
    engine = make_engine()
    engine.add_request("bad", [1, 2, 3], params())
    engine.add_request("good", [4, 5, 6], params())
    fail_in_executor(engine, "bad", num_output_tokens=2)
    run_until(engine, lambda: engine.scheduler.sequences[0].num_output_tokens == 1)
    launch = engine.executor.launch

    def abort_meanwhile(scheduler_output: SchedulerOutput) -> Any:
        pending = launch(scheduler_output)
        engine.abort_request("bad")
        return pending

    engine.executor.launch = abort_meanwhile
    outputs = finish(engine)
    assert list(outputs) == ["good"]
    assert tokens_of(outputs["good"]) == [expect([4, 5, 6])]


# -- listeners --


def test_a_report_says_what_a_step_did(make_engine: MakeEngine) -> None:
    """Each step once, in order: every new token, also of requests that hand out no output yet and
    of beams; the request of each sequence; three times."""
    engine = make_engine(num_kv_blocks=14, preemption_mode="swap")
    reports: list[StepReport] = []
    engine.step_listeners.append(reports.append)
    final_only = RequestOutputKind.FINAL_ONLY
    engine.add_request("a", [1, 2, 3], params(n=2, output_kind=final_only))
    search = add_beam_search(engine, "beams", [4, 5], 3, 6, ignore_eos=True)
    outputs = finish(engine)
    assert len(reports) == engine.executor.num_launched
    tokens: dict[tuple[str, int], list[int]] = {}
    num_tokens = Counter[str]()
    for report in reports:
        scheduled = [item.seq_id for item in report.scheduler_output.scheduled]
        assert set(report.sequences) <= set(scheduled)
        assert {seq.request_id for seq in report.sequences.values()} <= {"a", "beams"}
        assert all(seq.seq_id == seq_id for seq_id, seq in report.sequences.items())
        assert min(report.schedule_time, report.execute_time, report.update_time) >= 0
        for update in report.updates:
            key = (update.sequence.request_id, update.sequence.branch)
            tokens.setdefault(key, []).extend(update.new_token_ids)
            num_tokens[update.sequence.request_id] += len(update.new_token_ids)
        if not engine.config.async_scheduling:
            assert set(report.sequences) == set(scheduled)
    assert [tokens["a", branch] for branch in (0, 1)] == tokens_of(outputs["a"])
    assert num_tokens["beams"] == 1 + 5 * 3  # the first step has one beam
    assert len(search.get_output().sequences) == 3


def test_a_listener_that_raises_costs_nothing(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged; the other listeners hear of every step, and no step is made again."""
    engine = make_engine()
    reports: list[StepReport] = []

    def complain(_: StepReport) -> None:
        raise ValueError("no")

    engine.step_listeners += [complain, reports.append]
    engine.add_request("a", [1, 2, 3], params(max_tokens=4))
    assert tokens_of(finish(engine)["a"]) == [expect([1, 2, 3], 4)]
    assert len(reports) == engine.executor.num_launched == 4
    assert caplog.text.count("ValueError: no") == 4


def test_a_listener_cannot_end_the_engine(make_engine: MakeEngine) -> None:
    """SystemExit is logged, too. Ctrl-C goes through."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(max_tokens=4))

    def leave(_: StepReport) -> None:
        raise SystemExit

    engine.step_listeners.append(leave)
    assert tokens_of(finish(engine)["a"]) == [expect([1, 2, 3], 4)]


def test_a_listener_may_abort(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.step_listeners.append(lambda _: engine.abort_request("a") and None)
    engine.add_request("a", [1, 2, 3], params())
    engine.add_request("b", [4, 5, 6], params())
    outputs = finish(engine)
    assert list(outputs) == ["b"]
    assert tokens_of(outputs["b"]) == [expect([4, 5, 6])]


def test_a_consumer_may_abort_another_request(make_engine: MakeEngine) -> None:
    """In the middle of a step: whichever comes first in it ends the other."""
    engine = make_engine()

    class Rival(RequestState):
        def process(self, updates: Any) -> RequestOutput | None:
            engine.abort_request({"a": "b", "b": "a"}[self.request_id])
            return super().process(updates)

    for name in ("a", "b"):
        request = engine.make_request(name, [1, 2, 3], params(output_kind=RequestOutputKind.DELTA))
        request.__class__ = Rival
        engine.add(request)
    outputs = run_until(engine, lambda: not engine.has_unfinished_requests())
    assert_idle(engine)
    assert {output.request_id for output in outputs} == {"a"}
    assert [t for output in outputs for t in output.outputs[0].token_ids] == expect([1, 2, 3])


# -- gates: what a sequence waits for --


class FakeGate:
    """Opens when the test says so."""

    is_it_open = False

    def start(self, fail: Callable[[BaseException], object]) -> None:
        self.fail = fail

    def is_open(self) -> bool:
        return self.is_it_open


def add_with_gate(engine: LLMEngine, request_id: str, n: int = 1) -> FakeGate:
    request = engine.make_request(request_id, [1, 2], params(n=n, temperature=1.0))
    gate = FakeGate()
    for sequence in request.sequences:
        sequence.gates = (gate,)
    engine.add(request)
    return gate


@pytest.mark.parametrize("n", [1, 3])  # with max_num_seqs 2, one of the completions waits alone
def test_a_request_waits_until_its_gate_opens(make_engine: MakeEngine, n: int) -> None:
    """Others run meanwhile. Then it gets its own tokens."""
    engine = make_engine(max_num_seqs=2)
    gate = add_with_gate(engine, "a", n)
    engine.add_request("b", [3], params(max_tokens=2))
    done = [output.request_id for _ in range(5) for output in step(engine) if output.finished]
    assert done == ["b"]
    assert engine.get_num_unfinished_requests() == 1
    gate.is_it_open = True
    assert tokens_of(finish(engine)["a"]) == [expect([1, 2], branch=i) for i in range(n)]


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("end", ["fail", "abort"])
def test_a_request_may_end_at_its_gate(make_engine: MakeEngine, end: str, num_steps: int) -> None:
    """By an error of what it waits for, which another thread reports, or by an abort, also if both
    come."""
    engine = make_engine()
    gate = add_with_gate(engine, "a", n=2)
    engine.add_request("b", [3], params())
    for _ in range(num_steps):
        step(engine)
    if end == "abort":
        engine.abort_request("a")
    in_thread(partial(gate.fail, RequestError("no such adapter")))
    last = finish(engine)
    assert tokens_of(last["b"]) == [expect([3])]
    if end == "abort":
        assert "a" not in last
    else:
        assert reasons_of(last["a"]) == ["error"] * 2
        assert last["a"].outputs[0].stop_reason == "no such adapter"


# -- a limit of waiting requests --


def test_more_requests_than_may_wait_are_refused(make_engine: MakeEngine) -> None:
    """Running ones do not count. The refused one can be added when another begins to run."""
    engine = make_engine(max_num_waiting=2, max_num_seqs=2)
    for number in range(2):
        engine.add_request(f"first {number}", [1, 2, number], params())
    with pytest.raises(QueueOverflowError, match="2 requests wait already"):
        engine.add_request("first 2", [1, 2, 2], params())
    step(engine)
    assert len(engine.scheduler.running) == 2
    for number in range(2):
        engine.add_request(f"second {number}", [4, 5, number], params())
    for prompt in ([4, 5, 2], "no tokenizer is asked"):
        with pytest.raises(QueueOverflowError):
            engine.add_request("second 2", prompt, params())
    engine.abort_request("second 1")
    engine.add_request("second 2", [4, 5, 2], params())
    outputs = finish(engine)
    assert sorted(outputs) == ["first 0", "first 1", "second 0", "second 2"]
    for name, output in outputs.items():
        prompt = [1, 2] if name.startswith("first") else [4, 5]
        assert tokens_of(output) == [expect([*prompt, int(name[-1])])]


def test_whole_calls_are_not_limited(make_engine: MakeEngine) -> None:
    """Their caller waits for them. But they count: the engine is busy."""
    engine = make_engine(max_num_waiting=1)
    add_beam_search(engine, "beams", [1, 2, 3], 2, 4)
    engine.add(engine.make_request("whole", [4, 5, 6], params()))
    with pytest.raises(QueueOverflowError):
        engine.add_request("one more", [1], params())
    assert tokens_of(finish(engine)["whole"]) == [expect([4, 5, 6])]


def test_threads_that_add_at_once_respect_the_limit(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two threads that found the queue empty, one is refused: both look again, one by one."""
    engine = make_engine(max_num_waiting=1)
    both_have_looked = threading.Barrier(2, timeout=0.1)
    check_queue = engine.check_admission

    def look_and_wait() -> None:
        check_queue()
        with contextlib.suppress(threading.BrokenBarrierError):
            both_have_looked.wait()
            return
        both_have_looked.reset()

    monkeypatch.setattr(engine, "check_admission", look_and_wait)
    results: list[Any] = []

    def add(name: str) -> None:
        try:
            results.append(engine.add_request(name, [1, 2], params()))
        except QueueOverflowError as error:
            results.append(error)

    threads = [threading.Thread(target=add, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [added] = [result for result in results if isinstance(result, str)]
    assert len(results) == 2
    assert list(finish(engine)) == [added]


# -- threads --


def during_a_step(engine: LLMEngine, *calls: Callable[[], Any]) -> list[Any]:
    """Make these calls in another thread while one step runs, once; see in_thread."""
    results: list[Any] = []

    def listener(_: StepReport) -> None:
        engine.step_listeners.remove(listener)
        results.extend(in_thread(*calls))

    engine.step_listeners.append(listener)
    run_until(engine, lambda: bool(results))
    return results


def test_another_thread_may_add_and_abort(make_engine: MakeEngine) -> None:
    """While a step runs. The next step begins with it."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params())
    engine.add_request("b", [4, 5, 6], params())
    state: list[bool] = []
    results = during_a_step(
        engine,
        lambda: engine.abort_request("b"),
        lambda: state.append(engine.scheduler.sequences.keys() >= {0, 1}),
        lambda: engine.add_request("c", [7, 8], params()),
        lambda: engine.add_request("a", [1], params()),
        lambda: engine.add_request("d", [], params()),
        lambda: engine.add_request("e", [1], params()),
        lambda: engine.abort_request("e"),
        lambda: engine.abort_request("b", 1),
        lambda: engine.abort_request("nobody"),
    )
    assert state == [True]  # b has not ended yet
    in_use, empty = results[3], results[4]
    assert isinstance(in_use, ValueError)
    assert "in use" in str(in_use)
    assert isinstance(empty, ValueError)
    assert [r for r in results if not isinstance(r, ValueError)] == [
        *[True, None, "c", "e", True, False, False]
    ]
    outputs = finish(engine)
    assert sorted(outputs) == ["a", "c"]
    assert tokens_of(outputs["a"]) == [expect([1, 2, 3])]
    assert tokens_of(outputs["c"]) == [expect([7, 8])]


def test_an_abort_may_overtake_the_add(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread aborts a request whose sequences are not queued yet: no sequence stays behind."""
    engine = make_engine()
    add = engine.output_processor.add

    def add_and_abort(request: Any) -> None:
        add(request)
        assert in_thread(lambda: engine.abort_request(request.request_id)) == [True]

    monkeypatch.setattr(engine.output_processor, "add", add_and_abort)
    engine.add_request("a", [1, 2, 3], params())
    assert_idle(engine)


def test_a_request_id_is_free_when_its_request_has_failed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that takes the id at this very moment has a request that runs to its end."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params())
    request = engine.output_processor.requests["a"]
    build = request.fail  # type: ignore[union-attr]

    def fail(message: str) -> RequestOutput | None:
        assert in_thread(lambda: engine.add_request("a", [4, 5, 6], params())) == ["a"]
        return build(message)

    def find_stop(seq: Sequence) -> None:
        if seq.seq_id == 0:
            raise ZeroDivisionError

    monkeypatch.setattr(request, "fail", fail)
    change_text(monkeypatch, find_stop)
    failed = run_until(engine, lambda: 1 in engine.scheduler.sequences)
    assert [reasons_of(output) for output in failed][:1] == [["error"]]
    assert tokens_of(finish(engine)["a"]) == [expect([4, 5, 6])]


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_threads_add_and_abort_while_one_steps(
    make_engine: MakeEngine, preemption_mode: str
) -> None:
    """No block is lost, and every request that was not aborted gets exactly its tokens."""
    engine = make_engine(num_kv_blocks=20, max_num_seqs=6, preemption_mode=preemption_mode)
    num_threads, num_requests = 4, 16
    start = threading.Barrier(num_threads + 1)
    aborted: set[str] = set()
    errors: list[BaseException] = []

    def prompt_of(name: str) -> list[int]:
        thread, number = map(int, name.split("-"))
        return [1, 2, 3, 4, thread, number]

    def work(thread: int) -> None:
        start.wait()
        for number in range(num_requests):
            name, other = f"{thread}-{number}", f"{(thread + 1) % num_threads}-{number // 2}"
            engine.add_request(name, prompt_of(name), params(n=1 + number % 3))
            if number % 4 == 1 and engine.abort_request(name):
                aborted.add(name)
            if number % 4 == 2 and engine.abort_request(other):
                aborted.add(other)
            if number % 4 == 3 and engine.abort_request(other, number % 3):
                aborted.add(other)

    def work_and_tell(thread: int) -> None:
        try:
            work(thread)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work_and_tell, args=(i,)) for i in range(num_threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    last: dict[str, RequestOutput] = {}
    try:
        for thread in threads:
            thread.start()
        start.wait()
        while any(thread.is_alive() for thread in threads) or engine.has_unfinished_requests():
            last |= {output.request_id: output for output in engine.step()}
    finally:
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    last |= finish(engine)
    assert not errors
    engine.block_manager.check()
    names = {f"{i}-{number}" for i in range(num_threads) for number in range(num_requests)}
    assert names - aborted <= last.keys()
    for name, output in last.items():
        n = 1 + int(name.split("-")[1]) % 3
        whole = [expect(prompt_of(name), branch=branch) for branch in range(n)]
        for completion in output.outputs:
            so_far = completion.token_ids
            assert so_far == whole[completion.index][: len(so_far)]
        if name not in aborted:
            assert tokens_of(output) == whole


def test_two_threads_are_noticed(make_engine: MakeEngine) -> None:
    """The second one to call step() is told, or to change the prefix cache; the first one goes
    on."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(max_tokens=4))
    for raised in during_a_step(engine, engine.step, engine.reset_prefix_cache):
        assert isinstance(raised, RuntimeError)
        assert "another thread" in str(raised)
        assert "one thread" in str(raised)
    assert tokens_of(finish(engine)["a"]) == [expect([1, 2, 3], 4)]


@pytest.mark.parametrize("timeout", [60, 0.05])
def test_close_while_another_thread_steps(
    timeout: float, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """close() waits for the end of the step, up to a limit, and no other step begins."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(max_tokens=4))
    is_inside, may_end = threading.Event(), threading.Event()
    order: list[str] = []

    def listener(_: StepReport) -> None:
        is_inside.set()
        assert may_end.wait(60)
        order.append("step ended")

    def step_for_ever() -> None:
        while True:
            engine.step()

    def close() -> None:
        if timeout == 60:  # otherwise the step ends after close() has given up
            may_end.set()
        engine.close()
        order.append("closed")
        may_end.set()

    engine.step_listeners.append(listener)
    monkeypatch.setattr(engine_module, "EXIT_TIMEOUT", timeout)
    errors: list[Any] = []
    stepping = threading.Thread(target=lambda: errors.extend(in_thread(step_for_ever)))
    stepping.start()
    assert is_inside.wait(60)
    close()
    stepping.join(60)
    assert order[0] == ("step ended" if timeout == 60 else "closed")
    assert "closed; build a new LLM" in str(errors[0])
    assert (engine.block_manager.num_free_blocks == 64) == (timeout == 60)


def test_an_add_that_close_overtakes_raises(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread closes the engine after add() has looked whether it is open, and before the
    request is queued: add() raises, instead of queueing what nobody will compute."""
    engine = make_engine()
    queue = engine.output_processor.add

    def add(request: Any) -> None:
        in_thread(engine.close)
        queue(request)

    monkeypatch.setattr(engine.output_processor, "add", add)
    with pytest.raises(RuntimeError, match="closed"):
        engine.add_request("a", [1, 2, 3], params())


def test_close(make_engine: MakeEngine) -> None:
    """All requests are aborted, and no more are taken. Closing twice is fine."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(n=2))
    add_beam_search(engine, "beams", [1, 2, 3], 2, 4)
    step(engine)
    engine.close()
    engine.close()
    assert engine.block_manager.num_free_blocks == 64
    assert not engine.has_unfinished_requests()
    for call in (engine.step, lambda: engine.add_request("b", [1], params())):
        with pytest.raises(RuntimeError, match="closed"):
            call()


# -- beam search --


def test_beam_search_beside_others(make_engine: MakeEngine) -> None:
    """step() advances it. Its results are in the object returned, not in RequestOutputs."""
    engine = make_engine(num_kv_blocks=8)
    search = add_beam_search(engine, "beams", [1, 2, 3], 1, 4, ignore_eos=True)
    [root] = engine.scheduler.waiting
    engine.add_request("a", [1, 2, 3], params())
    outputs = finish(engine)
    assert list(outputs) == ["a"]
    assert tokens_of(outputs["a"]) == [expect([1, 2, 3])]
    [beam] = search.get_output().sequences
    greedy = expect([1, 2, 3], 4, seed=root.seed)
    assert (beam.tokens[3:], beam.finish_reason) == (greedy, None)


@pytest.mark.parametrize("index", [None, 0])
@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_beam_search_can_be_aborted(
    make_engine: MakeEngine, num_steps: int, index: int | None
) -> None:
    """A search has no completions of its own: aborting one of its beams ends it, too."""
    engine = make_engine()
    search = add_beam_search(engine, "beams", [1, 2, 3], 3, 4, ignore_eos=True)
    for _ in range(num_steps):
        step(engine)
    assert engine.abort_request("beams", index)
    assert_idle(engine)
    with pytest.raises(RuntimeError, match="the search was aborted"):
        search.get_output()


def test_a_beam_search_that_cannot_be_served(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match="empty"):
        add_beam_search(engine, "beams", [], 2, 3)
    assert not engine.is_unfinished("beams")


# -- seams --


def test_a_class_of_your_own_takes_the_place_of_ours() -> None:
    """The scheduler, the block manager, the executor."""
    calls: list[str] = []

    class MyScheduler(Scheduler):
        def schedule(self) -> Any:
            calls.append("schedule")
            return super().schedule()

    class MyBlockManager(BlockManager):
        def append(self, seq: Any, num_tokens: int) -> tuple[int, list[int]]:
            calls.append("append")
            return super().append(seq, num_tokens)

    class MyExecutor(FakeExecutor):
        def execute_model(self, scheduler_output: Any) -> Any:
            calls.append("execute")
            return super().execute_model(scheduler_output)

    engine = engines.make_engine(
        scheduler_cls=MyScheduler, block_manager_cls=MyBlockManager, executor_cls=MyExecutor
    )
    engine.add_request("a", [1], params(max_tokens=1))
    finish(engine)
    assert calls == ["schedule", "append", "execute"]
