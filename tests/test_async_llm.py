"""Many tasks share one engine. Most tests run on the fake model, whose tokens an oracle knows; a
few on the demo model, for the text."""

from __future__ import annotations

import ast
import asyncio
import gc
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import engines
import pytest
from engines import EOS, VOCAB_SIZE, assert_idle, expect, params
from fakes import FakeExecutor
from ranks import ThreadExecutor

import nanoserve
from nanoserve import LLM, EngineArgs, RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.exceptions import EngineDeadError, QueueOverflowError, VLLMValidationError
from nanoserve.extras import async_llm as module
from nanoserve.extras.async_llm import AsyncLLM, join_deltas
from nanoserve.extras.beam_search import BeamSearchParams
from nanoserve.fault_isolation import IDLE_PAUSE
from nanoserve.output_processor import CompletionOutput, RequestState
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import SchedulerOutput

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
PATIENCE = 5.0  # seconds for what takes milliseconds; no test waits for them
STORY = "Once upon a time"


class GatedExecutor(FakeExecutor):
    """Runs as many steps as the test permits."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.permits = threading.Semaphore(0)
        self.is_open = False  # for good
        self.waiting = threading.Event()  # a step has begun and has no permit yet

    def launch(self, scheduler_output: SchedulerOutput) -> Any:
        self.waiting.set()
        if not self.is_open:
            assert self.permits.acquire(timeout=PATIENCE)
        self.waiting.clear()
        return super().launch(scheduler_output)

    def open(self) -> None:
        self.is_open = True
        self.permits.release()


MakeAsync = Callable[..., AsyncLLM]


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def make(request: pytest.FixtureRequest) -> Iterator[MakeAsync]:
    """make(**options): an AsyncLLM on the fake model. Ended after the test, and then idle."""
    made: list[AsyncLLM] = []

    def make_one(**options: Any) -> AsyncLLM:
        fields = {"num_kv_blocks": 64, "block_size": 4, "async_scheduling": request.param}
        seams = {name: options.pop(name) for name in list(options) if name.endswith("_cls")}
        model = engines.checkpoint(VOCAB_SIZE, (EOS,))
        engine_args = EngineArgs(model=model, **{**fields, **options})
        made.append(AsyncLLM(engine_args, **{"executor_cls": FakeExecutor, **seams}))
        return made[-1]

    yield make_one
    for llm in made:
        if isinstance(llm.engine.executor, GatedExecutor):
            llm.engine.executor.open()
        llm.shutdown()
        assert not threads_of(llm)


def threads_of(llm: AsyncLLM) -> bool:
    """Does the engine's thread still run?"""
    thread = llm._core._thread
    return thread is not None and thread.is_alive()


async def until(condition: Callable[[], object]) -> None:
    """Let the event loop run until the condition is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def idle(llm: AsyncLLM) -> None:
    """The engine becomes idle: no request, and every block is free."""
    await until(lambda: not llm.engine.has_unfinished_requests() and not llm._core.collectors)
    assert_idle(llm.engine)


async def collect(
    llm: AsyncLLM, prompt: Any, sampling_params: SamplingParams, request_id: str | None = None
) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, sampling_params, request_id)]


def tokens_of(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    """The tokens of one completion, of deltas."""
    completions = [each for output in outputs for each in output.outputs if each.index == index]
    return [token_id for completion in completions for token_id in completion.token_ids]


# -- streams --


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_request_is_an_iterator_of_outputs(make: MakeAsync, kind: RequestOutputKind) -> None:
    """The names of vLLM, and its three kinds of output."""
    llm = make()

    async def main() -> list[RequestOutput]:
        outputs = await collect(llm, [1, 2, 3], params(output_kind=kind), "a")
        await idle(llm)
        return outputs

    outputs = asyncio.run(main())
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"a"}
    assert outputs[-1].outputs[0].finish_reason == "length"
    came = [output.outputs[0].token_ids for output in outputs]
    if kind is DELTA:
        assert tokens_of(outputs) == expect([1, 2, 3])
        assert all(came)
    else:
        assert came[-1] == expect([1, 2, 3])
        assert all(tokens == came[-1][: len(tokens)] for tokens in came)
    assert len(outputs) == 1 or kind is not FINAL_ONLY


def test_many_requests_share_the_steps(make: MakeAsync) -> None:
    llm = make()
    batches: list[int] = []
    llm.step_listeners.append(lambda report: batches.append(len(report.updates)))

    async def main() -> list[Any]:
        prompts = [[i, 2, 3] for i in range(20)]
        return await asyncio.gather(*(collect(llm, prompt, params()) for prompt in prompts))

    results = asyncio.run(main())
    assert [outputs[-1].outputs[0].token_ids for outputs in results] == [
        expect([i, 2, 3]) for i in range(20)
    ]
    assert max(batches) > 1


def test_without_parameters_the_model_decides(make: MakeAsync) -> None:
    llm = make()

    async def main() -> RequestOutput:
        return [output async for output in llm.generate([1, 2, 3])][-1]

    assert len(asyncio.run(main()).outputs[0].token_ids) <= SamplingParams().max_tokens


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_a_slow_caller_misses_nothing(make: MakeAsync, kind: RequestOutputKind, n: int) -> None:
    """It comes when all tokens are there: one output holds what the last one holds, or all deltas
    together."""
    llm = make()
    fields = params(n=n, logprobs=2, output_kind=kind)

    async def main() -> RequestOutput:
        collector = await llm.add_request("a", [1, 2, 3], fields)
        await until(lambda: not llm.get_num_unfinished_requests())
        output = await collector.get()
        assert output is not None
        for _ in range(2):
            assert await asyncio.wait_for(collector.get(), PATIENCE) is None
        return output

    output = asyncio.run(main())
    assert output.finished
    assert [each.index for each in output.outputs] == list(range(n))
    for branch, completion in enumerate(output.outputs):
        assert completion.token_ids == expect([1, 2, 3], branch=branch)
        assert completion.finish_reason == "length"
        assert completion.logprobs is not None
        chosen = zip(completion.token_ids, completion.logprobs, strict=True)
        total = sum(entry[token_id].logprob for token_id, entry in chosen)
        assert completion.cumulative_logprob == pytest.approx(total)


def test_joined_deltas_are_one_delta(demo_llm: LLM) -> None:
    """However they are grouped, they say the same: text, tokens, logprobs, reasons."""
    fields = SamplingParams(
        n=3, seed=3, max_tokens=12, logprobs=1, stop=["."], output_kind=CUMULATIVE
    )

    def deltas() -> list[RequestOutput]:
        return list(demo_llm.stream(STORY, fields))

    [whole] = demo_llm.generate(STORY, fields, use_tqdm=False)
    for size in (2, 5, 100):
        pieces = deltas()
        groups = [pieces[start : start + size] for start in range(0, len(pieces), size)]
        joined = []
        for first, *others in groups:
            for other in others:
                first = join_deltas(first, other)
            joined.append(first)
        result = joined[0]
        for other in joined[1:]:
            result = join_deltas(result, other)
        assert result.outputs == whole.outputs
        assert result.finished


def test_joined_deltas_are_in_the_order_of_their_index() -> None:
    def make_delta(index: int) -> RequestOutput:
        return RequestOutput(
            "a", None, [1], None, [CompletionOutput(index, "", [7], None, None)], False
        )

    joined = join_deltas(make_delta(1), make_delta(0))
    assert [completion.index for completion in joined.outputs] == [0, 1]


def test_a_caller_that_is_never_ahead_lets_others_run(make: MakeAsync) -> None:
    """Each of its outputs waits for it already, so that it never has to wait. Other tasks of the
    event loop get their turns even so."""
    llm = make()
    turns: list[int] = []

    async def count() -> None:
        while True:
            turns.append(len(turns))
            await asyncio.sleep(0)

    async def main() -> None:
        other = asyncio.create_task(count())
        collector = await llm.add_request("a", [1, 2, 3], params(max_tokens=30, output_kind=DELTA))
        there = threading.Event()
        put = collector.put

        def put_and_tell(*args: Any, **options: Any) -> None:
            put(*args, **options)
            there.set()

        collector.put = put_and_tell  # type: ignore[method-assign]
        num_outputs = 0
        while (output := await collector.get()) is not None:
            num_outputs += 1
            before = len(turns)
            if not output.finished:
                assert there.wait(PATIENCE), "blocks the event loop until the next token is there"
                there.clear()
            await asyncio.sleep(0) if output.finished else None
            assert len(turns) >= before
        other.cancel()
        assert len(turns) >= num_outputs

    asyncio.run(main())


# -- requests that nobody waits for --


async def leave_the_loop(stream: Any) -> None:
    async for _ in stream:
        break


async def close_the_iterator(stream: Any) -> None:
    await anext(stream)
    await stream.aclose()


async def fail_inside(stream: Any) -> None:
    with suppress(ZeroDivisionError):
        async with aclosing(stream):
            async for _ in stream:
                raise ZeroDivisionError


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


async def cancel_the_task(stream: Any) -> None:
    """It waits for a token: the steps that are permitted brought a few."""
    task = asyncio.create_task(read(stream))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def run_out_of_time(stream: Any) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(read(stream), 0.01)


async def fail_beside_it(stream: Any) -> None:
    if not hasattr(asyncio, "TaskGroup"):
        pytest.skip("Python 3.10 has no task groups")

    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ZeroDivisionError

    with pytest.raises(BaseException, match="unhandled errors"):  # noqa: PT012
        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(read(stream))


LEAVING = [
    leave_the_loop,
    close_the_iterator,
    fail_inside,
    cancel_the_task,
    run_out_of_time,
    fail_beside_it,
]


def gate(llm: AsyncLLM) -> GatedExecutor:
    executor = llm.engine.executor
    assert isinstance(executor, GatedExecutor)
    return executor


@pytest.mark.parametrize("leave", LEAVING, ids=lambda function: function.__name__)
@pytest.mark.parametrize("kind", [CUMULATIVE, FINAL_ONLY])
def test_who_leaves_ends_the_request(
    make: MakeAsync, leave: Callable[..., Awaitable[None]], kind: RequestOutputKind
) -> None:
    """Its blocks are free, long before its last token. The request beside it is not disturbed."""
    if kind is FINAL_ONLY and leave in LEAVING[:3]:
        pytest.skip("they wait for an output")
    llm = make(executor_cls=GatedExecutor)
    num_tokens: list[int] = []
    llm.step_listeners.append(
        lambda report: num_tokens.extend(
            seq.num_output_tokens for seq in report.sequences.values() if seq.request_id == "left"
        )
    )

    async def main() -> None:
        other = asyncio.create_task(collect(llm, [4, 5], params()))
        stream = llm.generate([1, 2, 3], params(max_tokens=60, output_kind=kind), "left")
        gate(llm).permits.release(4)
        await leave(stream)
        del stream  # the loop that was left has closed the iterator when the event loop comes to it
        await until(lambda: all(each.request_id != "left" for each in llm._core.collectors))
        gate(llm).open()
        assert (await other)[-1].outputs[0].token_ids == expect([4, 5])
        await idle(llm)

    asyncio.run(main())
    assert max(num_tokens, default=0) < 10


def test_a_request_is_cancelled_while_it_is_tokenized(
    make: MakeAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never reaches the engine."""
    llm = make()
    is_tokenizing, may_go_on = threading.Event(), threading.Event()
    make_request = llm.engine.make_request

    def wait(*args: Any) -> Any:
        is_tokenizing.set()
        assert may_go_on.wait(PATIENCE)
        return make_request(*args)

    monkeypatch.setattr(llm.engine, "make_request", wait)

    async def main() -> None:
        task = asyncio.create_task(collect(llm, [1, 2, 3], params()))
        await until(is_tokenizing.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()
        monkeypatch.undo()
        assert (await collect(llm, [4, 5], params()))[-1].outputs[0].token_ids == expect([4, 5])
        await idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize("kind", [DELTA, FINAL_ONLY])
def test_an_event_loop_that_is_closed_ends_its_requests(
    make: MakeAsync, kind: RequestOutputKind
) -> None:
    """Nothing is cancelled then, and nobody closes the iterator. The engine sees that the loop is
    closed, also if there is no output to hand out."""
    llm = make(executor_cls=GatedExecutor)
    loop = asyncio.new_event_loop()
    fields = params(max_tokens=60, output_kind=kind)
    collector = loop.run_until_complete(llm.add_request("a", [1, 2, 3], fields))
    gate(llm).permits.release(3)
    loop.close()
    gate(llm).open()

    async def main() -> None:
        outputs = await collect(llm, [4, 5], params())
        assert outputs[-1].outputs[0].token_ids == expect([4, 5])
        await idle(llm)

    asyncio.run(main())
    assert collector.sequences[0].num_output_tokens < 60  # type: ignore[index]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_abort_gives_the_tokens_so_far(make: MakeAsync, kind: RequestOutputKind) -> None:
    """As in vLLM: whoever waits gets a last output with finish_reason "abort"."""
    llm = make(executor_cls=GatedExecutor)

    async def main() -> list[RequestOutput]:
        task = asyncio.create_task(
            collect(llm, [1, 2, 3], params(max_tokens=60, output_kind=kind), "a")
        )
        gate(llm).permits.release(4)
        await until(lambda: not gate(llm).permits._value and gate(llm).waiting.is_set())
        await llm.abort(["no such request", "a"])
        await llm.abort("a")
        gate(llm).open()
        outputs = await task
        await idle(llm)
        return outputs

    outputs = asyncio.run(main())
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].outputs[0].finish_reason == "abort"
    tokens = tokens_of(outputs) if kind is DELTA else outputs[-1].outputs[0].token_ids
    assert 0 < len(tokens) < 10
    assert tokens == expect([1, 2, 3], 60)[: len(tokens)]


@pytest.mark.parametrize("n", [1, 3])
def test_abort_of_what_has_not_begun(make: MakeAsync, n: int) -> None:
    """One entry for each completion, though none has forked off yet."""
    llm = make(executor_cls=GatedExecutor)

    async def main() -> list[RequestOutput]:
        first = asyncio.create_task(collect(llm, [4, 5], params()))
        await until(gate(llm).waiting.is_set)
        task = asyncio.create_task(collect(llm, [1, 2, 3], params(n=n), "a"))
        await until(lambda: llm.get_num_unfinished_requests() == 2)
        await llm.abort("a")
        gate(llm).open()
        outputs = await task
        assert (await first)[-1].outputs[0].token_ids == expect([4, 5])
        await idle(llm)
        return outputs

    [output] = asyncio.run(main())
    assert [(each.index, each.token_ids) for each in output.outputs] == [(i, []) for i in range(n)]
    assert {each.finish_reason for each in output.outputs} == {"abort"}
    assert output.finished


def test_an_abort_on_the_engine_itself_is_noticed(make: MakeAsync) -> None:
    """A step listener may abort, and the waiting task gets its end."""
    llm = make()
    llm.step_listeners.append(lambda report: llm.engine.abort_request("a") and None)
    outputs = asyncio.run(collect(llm, [1, 2, 3], params(max_tokens=60), "a"))
    assert outputs[-1].outputs[0].finish_reason == "abort"


# -- errors --


def test_the_error_of_one_request_reaches_its_own_task(make: MakeAsync) -> None:
    """As an output with finish_reason "error", which vLLM has, too. The tokens so far are kept."""
    llm = make()
    engines.fail_in_executor(llm.engine, "bad", num_output_tokens=3)

    async def main() -> list[list[RequestOutput]]:
        requests = [(["bad", [1, 2, 3]]), (["good", [4, 5]])]
        found = await asyncio.gather(*(collect(llm, p, params(), i) for i, p in requests))
        await idle(llm)
        await llm.check_health()
        return list(found)

    bad, good = asyncio.run(main())
    [completion] = bad[-1].outputs
    assert (completion.finish_reason, completion.stop_reason) == ("error", "no token is possible")
    assert completion.token_ids == expect([1, 2, 3])[:3]
    assert good[-1].outputs[0].token_ids == expect([4, 5])


def test_a_consumer_that_cannot_even_say_so(
    make: MakeAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last output fails, too: the task gets an exception, and does not wait for ever."""
    llm = make()
    monkeypatch.setattr(RequestState, "process", lambda *_: 1 / 0)
    monkeypatch.setattr(RequestState, "fail", lambda *_: 1 / 0)

    async def main() -> None:
        with pytest.raises(RuntimeError, match=r"'a' failed: ZeroDivisionError"):
            await collect(llm, [1, 2, 3], params(), "a")
        await idle(llm)

    asyncio.run(main())


def test_a_dead_engine_is_dead_without_requests_too(
    make: MakeAsync, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests of the step have ended: after another error the engine would serve others."""
    llm = make()
    run_step = llm.engine.run_step

    def end_and_fail() -> None:
        for request_id in list(llm.engine.output_processor.requests):
            llm.engine.abort_request(request_id)
        run_step()
        raise EngineDeadError("a rank ended")

    async def main() -> None:
        monkeypatch.setattr(llm.engine, "run_step", end_and_fail)
        with pytest.raises(EngineDeadError, match="a rank ended"):
            await collect(llm, [1, 2, 3], params())
        with pytest.raises(EngineDeadError, match="a rank ended"):
            await llm.check_health()

    asyncio.run(main())


def test_a_request_may_say_when_it_came(make: MakeAsync) -> None:
    llm = make()

    async def main() -> None:
        before = time.time()
        given = await llm.add_request("a", [1, 2], params(), arrival_time=12.5)
        own = await llm.add_request("b", [1, 2], params())
        assert given.request.root.metrics.arrival_time == 12.5
        assert before <= own.request.root.metrics.arrival_time <= time.time()
        await llm.abort(["a", "b"])

    asyncio.run(main())


def break_executor(llm: AsyncLLM, error: Exception) -> None:
    """Every later step fails."""

    def fail(scheduler_output: SchedulerOutput) -> Any:
        raise error

    llm.engine.executor.launch = llm.engine.executor.execute_model = fail


@pytest.mark.parametrize("error", [NotImplementedError("to do"), EngineDeadError("a rank ended")])
def test_an_error_of_the_engine_reaches_everybody(make: MakeAsync, error: Exception) -> None:
    """All that wait, all that come later, and check_health. Tokens that are there already come
    first."""
    llm = make(executor_cls=GatedExecutor)

    async def wait_for(stream: Any) -> int:
        num_outputs = 0
        with pytest.raises(EngineDeadError, match=str(error)) as caught:  # noqa: PT012
            async for _ in stream:
                num_outputs += 1
        assert caught.value.__cause__ is error
        return num_outputs

    async def main() -> None:
        await llm.check_health()
        assert (llm.is_running, llm.is_stopped, llm.errored) == (True, False, False)
        streams = [llm.generate([i, 2], params(max_tokens=60, output_kind=DELTA)) for i in range(4)]
        first = asyncio.gather(*map(anext, streams))
        while not first.done():
            if gate(llm).waiting.is_set() and not gate(llm).permits._value:
                gate(llm).permits.release()
            await asyncio.sleep(0.001)
        broken = asyncio.create_task(llm.call_utility(lambda engine: break_executor(llm, error)))
        await asyncio.sleep(0)
        gate(llm).open()
        await broken
        await asyncio.gather(*map(wait_for, streams))
        await until(lambda: not threads_of(llm))
        assert (llm.is_running, llm.is_stopped, llm.errored) == (False, True, True)
        with pytest.raises(EngineDeadError, match=str(error)):
            await llm.check_health()
        assert await wait_for(llm.generate([1], params())) == 0
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()
        with pytest.raises(EngineDeadError):
            await llm.tokenize([1, 2])
        assert_idle(llm.engine)

    asyncio.run(main())


def test_requests_that_fail_alike_do_not_end_the_engine(make: MakeAsync) -> None:
    """If every request fails with the same error, step() raises it. They have ended with it, each
    for itself, and the engine may serve others."""
    llm = make()
    launch = llm.engine.executor.launch

    def fail(scheduler_output: SchedulerOutput) -> Any:
        if any(new.token_ids[0] == 1 for new in scheduler_output.new_sequences):
            raise KeyError("a bug that such requests meet")
        return launch(scheduler_output)

    llm.engine.executor.launch = fail
    llm.engine.executor.execute_model = lambda step: fail(step).result()

    async def main() -> None:
        both = [collect(llm, [1, i], params()) for i in (2, 3)]
        for outputs in await asyncio.gather(*both):
            assert outputs[-1].outputs[0].finish_reason == "error"
            assert "a bug" in str(outputs[-1].outputs[0].stop_reason)
        await llm.check_health()
        assert (await collect(llm, [4, 5], params()))[-1].outputs[0].token_ids == expect([4, 5])
        await idle(llm)

    asyncio.run(main())


def test_a_request_is_refused(make: MakeAsync) -> None:
    """With what LLM.generate raises; and ids are for one unfinished request at a time."""
    llm = make(executor_cls=GatedExecutor, max_num_waiting=1)

    async def main() -> None:
        with pytest.raises(TypeError, match="request_id must be"):
            await collect(llm, [1], params(), "")
        with pytest.raises(VLLMValidationError, match="out of range"):
            await collect(llm, [VOCAB_SIZE], params())
        with pytest.raises(TypeError, match="SamplingParams"):
            await collect(llm, [1], BeamSearchParams(2, 3))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="lora_request"):
            await anext(llm.generate([1], params(), lora_request=object()))  # type: ignore[arg-type]
        tasks = [asyncio.create_task(collect(llm, [1, 2], params(), "running"))]
        await until(gate(llm).waiting.is_set)
        tasks += [asyncio.create_task(collect(llm, [1, 2], params(), "waiting"))]
        await until(lambda: llm.get_num_unfinished_requests() == 2)
        with pytest.raises(QueueOverflowError):
            await collect(llm, [3], params())
        with pytest.raises(QueueOverflowError):
            await llm.beam_search([3], BeamSearchParams(2, 3))
        gate(llm).open()
        await asyncio.gather(*tasks)
        await idle(llm)

    asyncio.run(main())


def test_two_requests_for_one_place(make: MakeAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    """The place is looked for, and taken, before another thread looks."""
    llm = make(executor_cls=GatedExecutor, max_num_waiting=1)
    check = llm.engine.check_admission
    refused: list[BaseException] = []

    async def main() -> None:
        running = asyncio.create_task(collect(llm, [1, 2], params()))
        await until(gate(llm).waiting.is_set)
        requests = [llm.engine.make_request(str(i), [1, 2], params()) for i in range(2)]
        first, second = [module.RequestOutputCollector(each, llm._core) for each in requests]

        def add_second() -> None:
            with pytest.raises(QueueOverflowError) as caught:
                llm._core.add(second)
            refused.append(caught.value)

        other = threading.Thread(target=add_second)

        def look_and_be_overtaken() -> None:
            monkeypatch.setattr(llm.engine, "check_admission", check)
            check()
            other.start()
            other.join(0.05)  # it waits for the lock: this time passes always

        monkeypatch.setattr(llm.engine, "check_admission", look_and_be_overtaken)
        llm._core.add(first)
        await asyncio.to_thread(other.join, PATIENCE)
        assert refused
        assert llm.engine.num_rejected == 1
        gate(llm).open()
        await running
        await idle(llm)

    asyncio.run(main())


def test_an_id_is_for_one_request_at_a_time(make: MakeAsync) -> None:
    llm = make(executor_cls=GatedExecutor)

    async def main() -> None:
        task = asyncio.create_task(collect(llm, [1, 2, 3], params(), "a"))
        await until(gate(llm).waiting.is_set)
        with pytest.raises(ValueError, match="in use"):
            await collect(llm, [4, 5], params(), "a")
        gate(llm).open()
        await task
        outputs = await collect(llm, [4, 5], params(), "a")
        assert outputs[-1].outputs[0].token_ids == expect([4, 5])

    asyncio.run(main())


# -- other kinds of requests --


def test_several_completions(make: MakeAsync) -> None:
    """A step's delta has the completions that changed in it."""
    llm = make()
    outputs = asyncio.run(collect(llm, [1, 2, 3], params(n=3, output_kind=DELTA)))
    for branch in range(3):
        assert tokens_of(outputs, branch) == expect([1, 2, 3], branch=branch)


def test_beam_search(make: MakeAsync) -> None:
    """The beams of LLM.beam_search."""
    search = BeamSearchParams(3, 5)
    model = engines.checkpoint(VOCAB_SIZE, (EOS,))
    with LLM(model, executor_cls=FakeExecutor, block_size=4, num_kv_blocks=64) as sync:
        [expected] = sync.beam_search([[1, 2, 3]], search)
    llm = make()

    async def main() -> None:
        assert await llm.beam_search([1, 2, 3], search) == expected
        with pytest.raises(VLLMValidationError, match="beam_width"):
            await llm.beam_search([1], BeamSearchParams(11, 5))
        await idle(llm)

    asyncio.run(main())


def test_a_beam_search_is_aborted(make: MakeAsync) -> None:
    """By its id, or because its task is cancelled."""
    llm = make(executor_cls=GatedExecutor)
    search = BeamSearchParams(3, 5)

    async def main() -> None:
        aborted = asyncio.create_task(llm.beam_search([4, 5], search, "a"))
        cancelled = asyncio.create_task(llm.beam_search([4, 5], search, "b"))
        await until(lambda: llm.get_num_unfinished_requests() == 2)
        await llm.abort("a")
        cancelled.cancel()
        gate(llm).open()
        with pytest.raises(RuntimeError, match="aborted"):
            await aborted
        await idle(llm)

    asyncio.run(main())


def test_requests_that_are_not_ready(make: MakeAsync) -> None:
    """The engine looks again and again, with pauses between, also when more requests come."""
    may_start, calls = threading.Event(), list[int]()

    class Late(Scheduler):
        """Nothing is ready before the test says so, as if a grammar were compiled."""

        def schedule(self) -> SchedulerOutput:
            calls.append(len(calls))
            return super().schedule() if may_start.is_set() else SchedulerOutput((), (), (), 0)

    llm = make(scheduler_cls=Late)

    async def main() -> None:
        tasks = [asyncio.create_task(collect(llm, [1, 2, 3], params()))]
        await until(lambda: len(calls) > 5)
        tasks += [asyncio.create_task(collect(llm, [1, 2, 3], params()))]
        await until(lambda: llm.get_num_unfinished_requests() == 2)
        before, start = len(calls), time.monotonic()
        await asyncio.sleep(0.1)
        num_calls = len(calls) - before
        assert 2 < num_calls <= (time.monotonic() - start) / IDLE_PAUSE + 2
        may_start.set()
        for task in tasks:
            assert (await task)[-1].outputs[0].token_ids == expect([1, 2, 3])

    asyncio.run(main())


def record_waits(llm: AsyncLLM) -> list[float | None]:
    """The time limit of each wait of the engine's thread."""
    waits: list[float | None] = []

    class Recorder(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            return super().wait(timeout)

    llm._core._wake = Recorder()
    return waits


def test_an_idle_engine_waits_for_an_event(make: MakeAsync) -> None:
    """It does not poll: each wait is without a time limit, and there is one for each request, and
    one for each event that came while it was busy."""
    llm = make()
    waits = record_waits(llm)

    async def main() -> None:
        for _ in range(3):
            await collect(llm, [1, 2, 3], params())
            await until(lambda: not llm._core._wake.is_set())

    asyncio.run(main())
    assert set(waits) == {None}
    assert len(waits) <= 3 * 3


# -- threads and event loops --


def test_requests_of_the_engine_itself(make: MakeAsync) -> None:
    """Nobody takes their outputs, which must not keep the thread busy."""
    llm = make()

    async def main() -> None:
        llm.engine.add_request("a", [1, 2, 3], params())
        assert (await collect(llm, [4, 5], params()))[-1].outputs[0].token_ids == expect([4, 5])
        await idle(llm)

    asyncio.run(main())
    assert llm.engine.take_outputs() == []


def test_one_event_loop_after_another(make: MakeAsync) -> None:
    llm = make()
    for i in range(3):
        outputs = asyncio.run(collect(llm, [i, 2, 3], params()))
        assert outputs[-1].outputs[0].token_ids == expect([i, 2, 3])


def test_event_loops_of_several_threads(make: MakeAsync) -> None:
    """At once: each task is woken in its own loop."""
    llm = make()
    results: dict[int, list[int]] = {}

    async def main(number: int) -> None:
        outputs = await asyncio.gather(
            *(collect(llm, [number, i], params(output_kind=DELTA)) for i in range(5))
        )
        for i, each in enumerate(outputs):
            results[10 * number + i] = tokens_of(each)

    threads = [threading.Thread(target=lambda n=n: asyncio.run(main(n))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == {10 * n + i: expect([n, i]) for n in range(4) for i in range(5)}


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Ctrl-C interrupts Python 3.10's loop itself"
)
def test_ctrl_c_ends_asyncio_run(make: MakeAsync) -> None:
    """The tasks are cancelled, so their requests are aborted; the engine serves the next loop."""
    llm = make(executor_cls=GatedExecutor)
    gate(llm).permits.release(5)

    async def main() -> None:
        async for _ in llm.generate([1, 2, 3], params(max_tokens=60)):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    gate(llm).open()

    async def again() -> None:
        outputs = await collect(llm, [4, 5], params())
        assert outputs[-1].outputs[0].token_ids == expect([4, 5])
        await idle(llm)

    asyncio.run(again())


def test_a_function_between_two_steps(make: MakeAsync) -> None:
    """For what must not see a step half done. Its errors are the caller's."""
    llm = make(executor_cls=GatedExecutor)

    async def main() -> None:
        assert await llm.call_utility(lambda engine: engine.block_manager.num_free_blocks) == 64
        with pytest.raises(ZeroDivisionError):
            await llm.call_utility(lambda engine: 1 / 0)
        task = asyncio.create_task(collect(llm, [1, 2, 3, 4, 5], params()))
        await until(gate(llm).waiting.is_set)
        is_reset = asyncio.create_task(llm.reset_prefix_cache())
        cancelled = asyncio.create_task(llm.call_utility(lambda engine: 1 / 0))
        await asyncio.sleep(0)
        cancelled.cancel()
        gate(llm).open()
        assert await is_reset is False
        await task
        assert await llm.reset_prefix_cache() is True

    asyncio.run(main())


def test_the_prefix_cache_of_running_requests(make: MakeAsync) -> None:
    """They are preempted; their tokens are the same."""
    llm = make(executor_cls=GatedExecutor)
    outputs: list[RequestOutput] = []

    async def read_all() -> None:
        async for output in llm.generate([1, 2, 3, 4, 5], params(max_tokens=20)):
            outputs.append(output)

    async def main() -> None:
        task = asyncio.create_task(read_all())
        gate(llm).permits.release(6)
        await until(lambda: not gate(llm).permits._value and gate(llm).waiting.is_set())
        is_reset = asyncio.create_task(llm.reset_prefix_cache(True, reset_connector=True))
        await until(lambda: llm._core._utilities or is_reset.done())
        gate(llm).permits.release()
        assert await is_reset is True
        gate(llm).open()
        await task
        await idle(llm)

    asyncio.run(main())
    assert outputs[-1].outputs[0].token_ids == expect([1, 2, 3, 4, 5], 20)
    assert outputs[-1].metrics is not None
    assert outputs[-1].metrics.num_preemptions == 1


@pytest.mark.parametrize("clear_cache", [False, True])
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_pause(make: MakeAsync, mode: str, clear_cache: bool) -> None:
    """No step begins. What was running ends or goes on later, what comes meanwhile waits."""
    llm = make(executor_cls=GatedExecutor)

    async def main() -> None:
        with pytest.raises(VLLMValidationError, match="wait_for_requests_to_drain"):
            await llm.pause_generation(mode="wait")
        first = asyncio.create_task(collect(llm, [1, 2, 3], params(max_tokens=30)))
        gate(llm).permits.release(4)
        await until(lambda: not gate(llm).permits._value and gate(llm).waiting.is_set())
        assert not await llm.is_paused()
        pause = asyncio.create_task(llm.pause_generation(mode=mode, clear_cache=clear_cache))
        await until(lambda: llm._core._utilities or pause.done())
        gate(llm).open()
        await pause
        num_launched = llm.engine.executor.num_launched
        assert await llm.is_paused()
        second = asyncio.create_task(collect(llm, [4, 5], params()))
        await until(lambda: llm.get_num_unfinished_requests() == 1 + (mode == "keep"))
        assert await llm.call_utility(lambda engine: engine.executor.num_launched) == num_launched
        with pytest.raises(TimeoutError, match="left"):
            await llm.wait_for_requests_to_drain(0)
        if clear_cache:
            manager = llm.engine.block_manager
            assert manager.num_free_blocks == manager.num_blocks
        await llm.resume_generation()
        await asyncio.wait_for(llm.wait_for_requests_to_drain(), PATIENCE)
        assert (await second)[-1].outputs[0].token_ids == expect([4, 5])
        last = (await first)[-1].outputs[0]
        expected = expect([1, 2, 3], 30)
        assert last.finish_reason == ("abort" if mode == "abort" else "length")
        assert last.token_ids == expected[: len(last.token_ids)]
        assert not await llm.is_paused()
        await idle(llm)

    asyncio.run(main())


@pytest.mark.parametrize("timeout", [0, PATIENCE])
def test_shutdown_ends_a_pause(make: MakeAsync, timeout: float) -> None:
    llm = make()

    async def main() -> None:
        await llm.pause_generation()
        task = asyncio.create_task(collect(llm, [1, 2, 3], params()))
        await until(llm.get_num_unfinished_requests)
        await asyncio.to_thread(llm.shutdown, timeout)
        last = (await asyncio.wait_for(task, PATIENCE))[-1].outputs[0]
        assert last.token_ids == (expect([1, 2, 3]) if timeout else [])

    asyncio.run(main())


# -- the end --


@pytest.mark.parametrize("has_begun", [False, True])
def test_an_engine_that_is_closed_by_hand(make: MakeAsync, has_begun: bool) -> None:
    """It serves nobody, and says so."""
    llm = make()

    async def main() -> None:
        if has_begun:
            await collect(llm, [1], params())
        llm.engine.close()
        with pytest.raises(EngineDeadError, match="shut down"):
            await llm.check_health()
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(llm, [1], params())

    asyncio.run(main())


def test_wrong_arguments(make: MakeAsync) -> None:
    """They change nothing: the AsyncLLM still works."""
    llm = make()
    for timeout in ("a", True, [1]):
        with pytest.raises(TypeError, match="timeout must be"):
            llm.shutdown(timeout)  # type: ignore[arg-type]
    for number in (-1, float("nan"), 10**400):
        with pytest.raises(VLLMValidationError, match="timeout is"):
            llm.shutdown(number)

    async def main() -> None:
        for request_ids in (None, 5, [1], b"a"):
            with pytest.raises(TypeError, match="request_ids must be"):
                await llm.abort(request_ids)  # type: ignore[arg-type]
        for headers in ("traceparent", {"a": 1}, [("a", "b")]):
            with pytest.raises(TypeError, match="trace_headers must be"):
                await anext(llm.generate([1, 2], trace_headers=headers))  # type: ignore[arg-type]
        assert (await collect(llm, [4, 5], params()))[-1].outputs[0].token_ids == expect([4, 5])

    asyncio.run(main())


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_shutdown_ends_what_waits(make: MakeAsync, kind: RequestOutputKind) -> None:
    """With finish_reason "abort" and the tokens so far, running or waiting. From any thread, any
    number of times."""
    llm = make(executor_cls=GatedExecutor, max_num_seqs=1, max_num_batched_tokens=64)
    gate(llm).permits.release(4)

    async def main() -> None:
        running, waiting = [
            asyncio.create_task(collect(llm, [i, 2, 3], params(max_tokens=60, output_kind=kind)))
            for i in range(2)
        ]
        await until(lambda: not gate(llm).permits._value and gate(llm).waiting.is_set())
        await until(lambda: llm.get_num_unfinished_requests() == 2)
        calls = [asyncio.to_thread(llm.shutdown) for _ in range(3)]
        ends = asyncio.gather(*calls)
        await until(lambda: llm.is_stopped)
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(llm, [1], params())
        gate(llm).open()
        await ends
        for task, is_running in ((running, True), (waiting, False)):
            outputs = await task
            assert outputs[-1].finished
            assert outputs[-1].outputs[0].finish_reason == "abort"
            tokens = tokens_of(outputs) if kind is DELTA else outputs[-1].outputs[0].token_ids
            assert bool(tokens) == is_running
        with pytest.raises(EngineDeadError, match="shut down"):
            await llm.check_health()

    asyncio.run(main())
    llm.shutdown()
    assert not threads_of(llm)


def test_shutdown_lets_requests_end_within_its_time(make: MakeAsync) -> None:
    llm = make(executor_cls=GatedExecutor)

    async def main() -> None:
        task = asyncio.create_task(collect(llm, [1, 2, 3], params(max_tokens=60)))
        await until(gate(llm).waiting.is_set)
        end = asyncio.create_task(asyncio.to_thread(llm.shutdown, PATIENCE))
        await until(lambda: llm.is_stopped)
        gate(llm).open()
        await end
        assert (await task)[-1].outputs[0].token_ids == expect([1, 2, 3], 60)

    asyncio.run(main())


def test_shutdown_before_the_first_request(make: MakeAsync) -> None:
    llm = make()
    llm.shutdown()
    llm.shutdown(1.0)
    with pytest.raises(EngineDeadError, match="shut down"):
        asyncio.run(collect(llm, [1], params()))


def test_shutdown_by_a_step_listener(make: MakeAsync) -> None:
    """It cannot wait for its own step. The thread ends after it."""
    llm = make()
    llm.step_listeners.append(lambda report: llm.shutdown())
    outputs = asyncio.run(collect(llm, [1, 2, 3], params(max_tokens=60)))
    assert outputs[-1].outputs[0].finish_reason == "abort"
    llm._core._thread.join(PATIENCE)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="closed"):
        llm.engine.step()


def test_shutdown_while_a_step_hangs(make: MakeAsync, monkeypatch: pytest.MonkeyPatch) -> None:
    """It returns even so, and the tasks get EngineDeadError: nobody knows what the step does."""
    monkeypatch.setattr(module, "EXIT_TIMEOUT", 0.02)
    monkeypatch.setattr(nanoserve.engine, "EXIT_TIMEOUT", 0.02)
    llm = make(executor_cls=GatedExecutor)

    async def main() -> None:
        task = asyncio.create_task(collect(llm, [1, 2, 3], params()))
        await until(gate(llm).waiting.is_set)
        asked = asyncio.create_task(llm.call_utility(lambda engine: None))
        await until(lambda: llm._core._utilities)
        await asyncio.to_thread(llm.shutdown)
        for waiting in (task, asked):  # also what was to be called between two steps
            with pytest.raises(EngineDeadError, match="did not end"):
                await asyncio.wait_for(waiting, PATIENCE)
        gate(llm).open()
        await until(lambda: not threads_of(llm))

    asyncio.run(main())


def test_the_thread_ends_with_the_object(make: MakeAsync) -> None:
    """Without shutdown(). As long as a request is unfinished, its iterator holds the object."""
    model = engines.checkpoint(VOCAB_SIZE, (EOS,))
    llm = AsyncLLM(EngineArgs(model=model, num_kv_blocks=64), executor_cls=FakeExecutor)
    asyncio.run(collect(llm, [1, 2, 3], params()))
    thread, reference = llm._core._thread, weakref.ref(llm)
    assert thread is not None
    del llm
    gc.collect()
    assert reference() is None
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_python_may_exit_at_any_time(tmp_path: Path) -> None:
    """With requests in the engine and nobody to wait for them, and no shutdown()."""
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\n"
        "from nanoserve import AsyncLLMEngine, AsyncEngineArgs, SamplingParams\n"
        "llm = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(num_gpu_blocks_override=256))\n"
        "fields = SamplingParams(max_tokens=1500, ignore_eos=True)\n"
        "async def main():\n"
        "    collector = await llm.add_request('a', 'Once', fields)\n"
        "    print((await collector.get()).request_id)\n"
        "loop = asyncio.new_event_loop()\n"
        "loop.run_until_complete(main())\n"
    )
    root = str(Path(nanoserve.__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "NANOSERVE_LOGGING_LEVEL": "WARNING"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env=environment
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", "")


def test_it_belongs_to_one_process(make: MakeAsync) -> None:
    llm = make()
    with pytest.raises(TypeError, match="AsyncLLM cannot be pickled"):
        pickle.dumps(llm)
    llm._owner_pid += 1
    for call in (collect(llm, [1], params()), llm.abort("a"), llm.check_health()):
        with pytest.raises(RuntimeError, match="belongs to process"):
            asyncio.run(call)
    llm.shutdown()
    llm._owner_pid -= 1
    assert llm.is_running


def test_names_of_vllm() -> None:
    """Where vLLM's users look for them."""
    assert nanoserve.AsyncLLMEngine is nanoserve.AsyncLLM is AsyncLLM is module.AsyncLLMEngine
    assert nanoserve.AsyncEngineArgs is EngineArgs
    with pytest.raises(AttributeError, match="no attribute 'AsyncLLMs'"):
        nanoserve.AsyncLLMs  # noqa: B018
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nanoserve.extras.async_llm", None)
        with pytest.raises(AttributeError, match=r"the chapter extras/async_llm was deleted"):
            nanoserve.AsyncLLMEngine  # noqa: B018


def test_the_ways_of_vllm_to_build_one() -> None:
    """Their arguments are taken; what they ask for is there, or the error says what is."""
    metrics = pytest.importorskip("nanoserve.extras.metrics")
    fields = {"model": engines.checkpoint(VOCAB_SIZE, (EOS,)), "num_kv_blocks": 64}
    seams = {"executor_cls": FakeExecutor}

    def kinds(llm: AsyncLLM) -> list[type]:
        llm.shutdown()
        return [type(one) for each in llm._stat_logger_managers() for one in each.stat_loggers]

    both = [metrics.CountingStatLogger, metrics.LoggingStatLogger]
    own = type("Own", (metrics.CountingStatLogger,), {})
    build = AsyncLLM.from_engine_args
    assert kinds(build(EngineArgs(**fields), True, "API_SERVER", None, **seams)) == []
    counted = EngineArgs(disable_log_stats=False, **fields)
    assert kinds(build(counted, **seams)) == both
    assert kinds(build(counted, stat_loggers=[own], **seams)) == [*both, own]
    assert kinds(build(EngineArgs(**fields), stat_loggers=[own], **seams)) == [own]
    assert kinds(build(counted, disable_log_stats=True, **seams)) == []
    config = counted.create_engine_config()
    llm = AsyncLLM.from_vllm_config(config, usage_context=1, disable_log_stats=False, **seams)
    assert llm.vllm_config is llm.config
    assert kinds(llm) == both
    with pytest.raises(TypeError, match="engine_args must be EngineArgs"):
        build("a model")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="stat_loggers must be"):
        build(counted, stat_loggers=metrics.LoggingStatLogger)  # type: ignore[arg-type]


def test_what_is_asked_of_the_statistics(make: MakeAsync, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("nanoserve.extras.metrics")
    silent, llm = make(), make(disable_log_stats=False)

    async def main() -> None:
        await silent.do_log_stats()
        await collect(llm, [1, 2, 3], params())
        await idle(llm)
        caplog.clear()
        with caplog.at_level("INFO", "nanoserve"):
            await llm.do_log_stats()
        assert "output tokens/s" in caplog.text
        assert not await llm.is_tracing_enabled()
        assert await llm.get_supported_tasks() == ("generate",)
        assert await llm.get_model_config() is llm.model_config
        assert await llm.get_vllm_config() is llm.config
        llm.check_admission(n=2, request_id="a")

    asyncio.run(main())


VLLM = os.environ.get("VLLM_0_32", "")


def test_what_is_left_out_has_a_reason(make: MakeAsync) -> None:
    llm = make()
    for name, reason in module.LEFT_OUT.items():
        assert not hasattr(llm, name)
        with pytest.raises(AttributeError, match=f"no attribute '{name}': "):
            getattr(llm, name)
        assert reason.endswith(".")
    with pytest.raises(AttributeError, match=r"no attribute 'encodes'\.$"):
        llm.encodes  # noqa: B018


@pytest.mark.skipif(not VLLM, reason="VLLM_0_32 does not say where vLLM's package is")
def test_every_name_of_vllms_class_is_known() -> None:
    tree = ast.parse((Path(VLLM) / "v1/engine/async_llm.py").read_text("utf-8"))
    [theirs] = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "AsyncLLM"]
    functions = [n for n in theirs.body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = {each.name for each in functions if not each.name.startswith("_")}
    assert {name for name in names if not hasattr(AsyncLLM, name)} == module.LEFT_OUT.keys()


# -- text --


@pytest.fixture(scope="module")
def demo() -> Iterator[AsyncLLM]:
    """One on the demo model."""
    with AsyncLLM(EngineArgs(num_kv_blocks=512, max_num_batched_tokens=2048)) as llm:
        yield llm
        assert_idle_blocks(llm)


def assert_idle_blocks(llm: AsyncLLM) -> None:
    manager, scheduler = llm.engine.block_manager, llm.engine.scheduler
    manager.check()
    assert not (llm.engine.output_processor.requests or scheduler.sequences)
    assert not (scheduler.running or scheduler.waiting)
    assert manager.num_free_blocks == llm.engine.executor.num_kv_blocks


def test_texts_and_chats(demo: AsyncLLM, demo_llm: LLM) -> None:
    """Those of LLM.generate and LLM.chat."""
    fields = SamplingParams(temperature=0, max_tokens=30)
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    [story] = demo_llm.generate(STORY, fields, use_tqdm=False)
    [answer] = demo_llm.chat(messages, fields, use_tqdm=False)

    async def main() -> None:
        assert (await collect(demo, STORY, fields))[-1].outputs == story.outputs
        text = await demo.render_chat(messages)
        assert text == answer.prompt
        stream = demo.generate(text, fields, tokenization_kwargs={"add_special_tokens": False})
        last = [output async for output in stream][-1]
        assert (last.outputs, last.prompt) == (answer.outputs, answer.prompt)
        assert demo.get_tokenizer() is demo.tokenizer
        ids = await demo.tokenize(STORY)
        assert ids == story.prompt_token_ids
        assert await demo.detokenize(ids) == STORY
        assert await demo.run_in_thread(json.loads, '{"a": [1]}') == {"a": [1]}
        with pytest.raises(ValueError, match="add_generation_prompt"):
            await demo.render_chat(messages, continue_final_message=True)
        with pytest.raises(TypeError, match="tools must be None or a list of dicts, got 5"):
            await demo.render_chat(messages, tools=5)
        with pytest.raises(VLLMValidationError, match="-1 is out of range"):
            await demo.detokenize([-1])

    asyncio.run(main())


@pytest.mark.parametrize("what", ["a prompt", "a chat", "JSON"])
def test_a_long_text_delays_no_stream(
    demo: AsyncLLM, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100,000 characters are worked on for as long as another request needs for 20 tokens: the work
    waits for them, and the tokens come."""
    num_outputs = 0
    came = threading.Event()
    processor = demo.engine.input_processor
    tokenize, render = processor.tokenize, processor.render_chat

    def slowly(function: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any) -> Any:
            if len(str(args[0])) >= 100_000:
                assert came.wait(PATIENCE), "no token came meanwhile"
            return function(*args)

        return wait

    monkeypatch.setattr(processor, "tokenize", slowly(tokenize))
    monkeypatch.setattr(processor, "render_chat", slowly(render))
    text = "once upon " * 10_000

    async def stream() -> None:
        nonlocal num_outputs
        fields = SamplingParams(max_tokens=60, ignore_eos=True, output_kind=DELTA)
        async for _ in demo.generate(STORY, fields):
            num_outputs += 1
            if num_outputs == 20:
                came.set()

    async def work() -> None:
        if what == "a prompt":
            with pytest.raises(VLLMValidationError, match="Shorten it"):
                await collect(demo, text, SamplingParams())
        elif what == "a chat":
            assert text in await demo.render_chat([{"role": "user", "content": text}])
        else:
            assert await demo.run_in_thread(slowly(json.loads), json.dumps([text])) == [text]

    async def main() -> None:
        await asyncio.gather(work(), stream())

    asyncio.run(main())
    assert num_outputs >= 20
    asyncio.run(idle_demo(demo))


async def idle_demo(llm: AsyncLLM) -> None:
    await until(lambda: not llm.get_num_unfinished_requests() and not llm._core.collectors)
    assert_idle_blocks(llm)


# -- several ranks --


def test_several_ranks(make_checkpoint: Callable[..., Path]) -> None:
    """Two ranks, and the tokens of one. A rank that is lost while nothing runs is noticed by
    check_health."""
    folder = make_checkpoint("qwen3")
    fields = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    small = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    with LLM(folder, **small) as sync:
        [expected] = sync.generate([[5, 6, 7]], fields, use_tqdm=False)
    ranks = EngineArgs(folder, tensor_parallel_size=2, async_scheduling=True, **small)
    llm = AsyncLLM(ranks, executor_cls=ThreadExecutor)

    async def main() -> None:
        outputs = await asyncio.gather(*(collect(llm, [5, 6, 7], fields) for _ in range(3)))
        for each in outputs:
            assert each[-1].outputs[0].token_ids == expected.outputs[0].token_ids
        await llm.check_health()
        lost = "rank 1 (process 7) was killed by SIGKILL."
        llm.engine.executor.ranks.find_failure = lambda timeout: lost
        with pytest.raises(EngineDeadError, match=r"rank 1 \(process 7\) was killed"):
            await llm.check_health()
        with pytest.raises(EngineDeadError, match="was killed"):
            await collect(llm, [5, 6, 7], fields)
        await until(lambda: not threads_of(llm))

    asyncio.run(main())
    llm.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_rank_that_is_killed(
    make_checkpoint: Callable[..., Path], async_scheduling: bool
) -> None:
    """Under load: every task gets EngineDeadError, and shutdown() ends the rest."""
    small = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    options = {"tensor_parallel_size": 2, "async_scheduling": async_scheduling, **small}
    llm = AsyncLLM(EngineArgs(make_checkpoint("qwen3"), **options))
    fields = SamplingParams(max_tokens=200, ignore_eos=True)

    async def main() -> None:
        tasks = [asyncio.create_task(collect(llm, [5, 6, i], fields)) for i in range(8)]
        stream = llm.generate([5, 6], fields)
        await anext(stream)
        os.kill(llm.engine.executor.ranks.pids[1], signal.SIGKILL)
        results = await asyncio.gather(*tasks, read(stream), return_exceptions=True)
        for result in results:
            assert isinstance(result, EngineDeadError)
            assert "was killed by SIGKILL" in str(result)
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        await asyncio.to_thread(llm.shutdown)

    asyncio.run(main())
    assert not threads_of(llm)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_shutdown_while_a_rank_stands_still(make_checkpoint: Callable[..., Path]) -> None:
    """The step gets EXIT_TIMEOUT; then the ranks are killed, and the tasks get their end."""
    small = {"num_gpu_blocks_override": 64, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    llm = AsyncLLM(EngineArgs(make_checkpoint("qwen3"), tensor_parallel_size=2, **small))

    async def main() -> None:
        stream = llm.generate([5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(stream)
        os.kill(llm.engine.executor.ranks.pids[1], signal.SIGSTOP)
        task = asyncio.create_task(read_last(stream))
        await asyncio.to_thread(llm.shutdown, 0.1)
        assert (await task).outputs[0].finish_reason == "abort"

    asyncio.run(main())
    assert not threads_of(llm)


async def read_last(stream: Any) -> RequestOutput:
    return [output async for output in stream][-1]


# -- properties --


def mixed(number: int, rng: random.Random) -> tuple[list[int], SamplingParams]:
    """A request of any kind."""
    prompt = [rng.randrange(40) for _ in range(rng.randint(1, 30))]
    fields: dict[str, Any] = {"max_tokens": rng.randint(1, 20), "seed": number}
    fields["n"] = rng.choice([1, 1, 1, 3])
    fields["temperature"] = rng.choice([0, 0.8]) if fields["n"] == 1 else 0.8
    fields["logprobs"] = rng.choice([None, None, 2])
    fields["ignore_eos"] = rng.random() < 0.5
    return prompt, SamplingParams(**fields)


async def run_and_cancel(
    llm: AsyncLLM, prompt: list[int], fields: SamplingParams, leave_after: int | None
) -> list[list[int]] | None:
    """The tokens of each completion; None if it was left after so many outputs."""
    tokens: list[list[int]] = [[] for _ in range(fields.n)]
    num_outputs = 0
    stream = llm.generate(prompt, fields)
    async with aclosing(stream):
        async for output in stream:
            for completion in output.outputs:
                is_delta = fields.output_kind is DELTA
                before = tokens[completion.index] if is_delta else []
                tokens[completion.index] = before + completion.token_ids
            num_outputs += 1
            if num_outputs == leave_after:
                return None
    return tokens


@pytest.mark.parametrize("options", [{}, {"num_kv_blocks": 20, "max_num_batched_tokens": 32}])
def test_200_requests_of_which_a_third_vanishes(make: MakeAsync, options: dict[str, Any]) -> None:
    """The others get exactly what LLM.generate gives, also when there are so few blocks that
    sequences are preempted. Afterwards all blocks are free."""
    rng = random.Random(7)
    requests = [mixed(number, rng) for number in range(200)]
    model = engines.checkpoint(VOCAB_SIZE, (EOS,))
    with LLM(model, executor_cls=FakeExecutor, block_size=4, num_kv_blocks=64) as sync:
        prompts, fields = zip(*requests, strict=True)
        expected = sync.generate(list(prompts), list(fields), use_tqdm=False)
    llm = make(**{"max_num_seqs": 16, **options})

    async def run(number: int) -> None:
        prompt, fields = requests[number]
        fields.output_kind = rng.choice([CUMULATIVE, DELTA])
        way = rng.choice(["stay"] * 4 + ["break", "cancel"])
        leave_after = rng.randint(1, 5) if way == "break" else None
        task = asyncio.create_task(run_and_cancel(llm, prompt, fields, leave_after))
        if way == "cancel":
            await asyncio.sleep(rng.random() * 0.1)
            task.cancel()
        with suppress(asyncio.CancelledError):
            tokens = await task
            if tokens is not None:
                assert tokens == [each.token_ids for each in expected[number].outputs]
                stayed.append(number)

    async def main() -> None:
        await asyncio.gather(*map(run, range(200)))
        await idle(llm)

    stayed: list[int] = []
    asyncio.run(main())
    assert len(stayed) >= 120


def test_the_texts_of_requests_beside_others_that_vanish(demo: AsyncLLM, demo_llm: LLM) -> None:
    """On the demo model, with stop strings and forks: texts, logprobs and reasons, by deltas."""
    rng = random.Random(3)
    starts = [STORY, "One day", "The dragon", "Ada had"]
    requests: list[tuple[str, SamplingParams]] = []
    for number in range(60):
        fields: dict[str, Any] = {"seed": number, "max_tokens": rng.randint(1, 24)}
        fields |= {"n": rng.choice([1, 1, 2]), "logprobs": rng.choice([None, 1])}
        fields |= {"stop": rng.choice([None, [". "], ["e", " the"]]), "temperature": 0.7}
        requests.append((rng.choice(starts), SamplingParams(**fields)))
    prompts, params_of = zip(*requests, strict=True)
    expected = demo_llm.generate(list(prompts), list(params_of), use_tqdm=False)

    async def run(number: int) -> int:
        prompt, fields = requests[number]
        fields.output_kind = DELTA
        outputs: list[RequestOutput] = []
        async with aclosing(demo.generate(prompt, fields)) as stream:
            async for output in stream:
                outputs.append(output)
                if number % 3 == 0 and len(outputs) == 2:
                    return 0
        joined = outputs[0]
        for output in outputs[1:]:
            joined = join_deltas(joined, output)
        for ours, right in zip(joined.outputs, expected[number].outputs, strict=True):
            assert (ours.text, ours.token_ids) == (right.text, right.token_ids)
            assert (ours.finish_reason, ours.stop_reason) == (
                right.finish_reason,
                right.stop_reason,
            )
            if right.logprobs is not None:
                assert [list(entry) for entry in ours.logprobs or []] == [
                    list(entry) for entry in right.logprobs
                ]
        return 1

    async def main() -> int:
        num_finished = sum(await asyncio.gather(*map(run, range(60))))
        await idle_demo(demo)
        return num_finished

    assert asyncio.run(main()) >= 40


# -- what a review found --


def test_closing_an_old_iterator_spares_a_new_request_of_its_id(make: MakeAsync) -> None:
    llm = make()

    async def main() -> None:
        old = llm.generate([1, 2, 3], params(output_kind=FINAL_ONLY), "a")
        assert (await anext(old)).finished
        await idle(llm)
        new = llm.generate([4, 5], params(), "a")
        outputs = [await anext(new)]
        await old.aclose()
        outputs += [output async for output in new]
        assert outputs[-1].outputs[0].token_ids == expect([4, 5])

    asyncio.run(main())


def test_an_id_is_free_once_its_iterator_is_closed(make: MakeAsync) -> None:
    """Although a step is running, at whose end the old request goes."""
    llm = make(executor_cls=GatedExecutor)

    async def main() -> None:
        old = llm.generate([1, 2, 3], params(), "a")
        first = asyncio.ensure_future(anext(old))
        await until(gate(llm).waiting.is_set)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        new = asyncio.create_task(collect(llm, [4, 5], params(), "a"))
        await asyncio.sleep(0.05)
        gate(llm).open()
        assert (await new)[-1].outputs[0].token_ids == expect([4, 5])
        await idle(llm)

    asyncio.run(main())


def test_a_beam_search_ends_within_the_time_of_shutdown(make: MakeAsync) -> None:
    llm = make(executor_cls=GatedExecutor)

    async def main() -> None:
        task = asyncio.create_task(llm.beam_search([1, 2, 3], BeamSearchParams(3, 5)))
        await until(gate(llm).waiting.is_set)
        ending = asyncio.create_task(asyncio.to_thread(llm.shutdown, PATIENCE))
        await until(lambda: llm.is_stopped)
        gate(llm).open()
        assert (await task).sequences
        await ending

    asyncio.run(main())


def test_an_error_within_the_time_of_shutdown_is_no_abort(make: MakeAsync) -> None:
    llm = make(executor_cls=GatedExecutor)

    async def main() -> None:
        task = asyncio.create_task(collect(llm, [1, 2, 3], params()))
        await until(gate(llm).waiting.is_set)
        ending = asyncio.create_task(asyncio.to_thread(llm.shutdown, PATIENCE))
        await until(lambda: llm.is_stopped)
        break_executor(llm, OSError("the device is gone"))
        gate(llm).open()
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await task
        await ending

    asyncio.run(main())


@pytest.mark.parametrize("timeouts", [(0.0, 100.0), (100.0, 0.0)])
def test_the_shortest_time_of_shutdown_counts(
    make: MakeAsync, timeouts: tuple[float, float]
) -> None:
    llm = make()
    for timeout in timeouts:
        llm.shutdown(timeout)
    assert llm._core.stop_at <= time.monotonic()


def test_a_shorter_shutdown_counts(make: MakeAsync) -> None:
    """And what was asked of the thread, and never began, gets the error."""
    llm = make(executor_cls=GatedExecutor)

    async def main() -> None:
        task = asyncio.create_task(collect(llm, [1, 2, 3], params(max_tokens=40)))
        await until(gate(llm).waiting.is_set)
        long = asyncio.create_task(asyncio.to_thread(llm.shutdown, 100))
        await until(lambda: llm.is_stopped)
        short = asyncio.create_task(asyncio.to_thread(llm.shutdown, 0))
        await until(lambda: llm._core.stop_at < time.monotonic() + 50)
        gate(llm).open()
        last = (await asyncio.wait_for(task, PATIENCE))[-1].outputs[0]
        assert last.finish_reason == "abort"
        await asyncio.wait_for(asyncio.gather(long, short), 2 * PATIENCE)

    asyncio.run(main())


def test_a_signal_reaches_the_event_loop_once(make: MakeAsync) -> None:
    from nanoserve.interrupts import delayed_interrupt

    async def main() -> None:
        calls: list[int] = []
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, calls.append, 1)
        with delayed_interrupt():
            signal.raise_signal(signal.SIGUSR1)
        await until(lambda: calls)
        await asyncio.sleep(0.01)
        loop.remove_signal_handler(signal.SIGUSR1)
        assert calls == [1]

    asyncio.run(main())
