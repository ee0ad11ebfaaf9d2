"""AsyncLLM: many tasks, one engine. Whatever they do, others get what LLM.generate gives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from nanoserve import LLM, AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams
from nanoserve.entrypoints.async_llm import QueueOverflowError
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import EngineDeadError
from nanoserve.tools.check_blocks import check_blocks

SIZES: dict[str, Any] = {"num_gpu_blocks_override": 96, "max_num_seqs": 16}
LONG = SamplingParams(max_tokens=400, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
PROMPTS = ["Once upon a time", "One day a clever fox", [5, 6, 7], {"prompt": "A kind girl"}]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """A test that waits for ever fails."""
    return asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    with AsyncLLM(**SIZES) as llm:
        yield llm


@pytest.fixture
def make() -> Iterator[Callable[..., AsyncLLM]]:
    """make(...) -> an AsyncLLM of one test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(AsyncLLM(**{**SIZES, **options}))


async def is_idle(llm: AsyncLLM) -> None:
    """Wait until no request is left; then no block may be lost."""
    while llm.get_num_unfinished_requests() or llm.engine.scheduler.sequences:
        await asyncio.sleep(0.001)
    await llm.call_utility(lambda engine: check_blocks(engine.block_manager))
    assert not any(llm.engine.block_manager.pool.ref_counts)


async def collect(llm: AsyncLLM, prompt: Any, params: SamplingParams) -> dict[int, list[int]]:
    """The token ids of each completion, whatever kind of outputs brings them."""
    tokens: dict[int, list[int]] = {}
    async for output in llm.generate(prompt, params):
        for each in output.outputs:
            is_delta = params.output_kind is RequestOutputKind.DELTA
            tokens[each.index] = [
                *(tokens.get(each.index, []) if is_delta else []),
                *each.token_ids,
            ]
    return tokens


def test_a_crowd_gets_what_generate_gives(llm: AsyncLLM) -> None:
    """Of 36 callers every third one leaves: in the loop, cancelled, or before its first token."""
    requests = [
        (prompt, SamplingParams(n=n, seed=n, max_tokens=8, output_kind=kind))
        for prompt in PROMPTS
        for n in (1, 2, 3)
        for kind in RequestOutputKind
    ]
    with LLM(**SIZES) as other:
        prompts, params = zip(*requests, strict=True)
        expected = [
            {each.index: each.token_ids for each in output.outputs}
            for output in other.generate(list(prompts), list(params), use_tqdm=False)
        ]

    async def leave(number: int) -> None:
        stream = llm.generate(PROMPTS[number % 3], LONG)
        if number % 2:
            async for _ in stream:
                break
            await stream.aclose()
        else:
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0.001 * number)
            task.cancel()

    async def crowd() -> Any:
        staying = [collect(llm, *each) for each in requests]
        results = await asyncio.gather(*staying, *map(leave, range(18)))
        await is_idle(llm)
        return results[: len(requests)]

    assert run(crowd()) == expected


def test_several_event_loops_at_once(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    expected = run(collect(llm, PROMPTS[0], params))
    results: list[Any] = []
    work = [
        threading.Thread(target=lambda: results.append(run(collect(llm, PROMPTS[0], params))))
        for _ in range(4)
    ]
    for act in (threading.Thread.start, threading.Thread.join):
        list(map(act, work))
    assert results == [expected] * 4


@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_gives_the_tokens_so_far(llm: AsyncLLM, n: int) -> None:
    async def abort() -> Any:
        stream = await llm.add_request("mine", "Once", SamplingParams(n=n, seed=0, max_tokens=500))
        twin = await llm.add_request("mine", "One", LONG)  # ids of callers may be equal
        before = await stream.get()
        await llm.abort(["mine", "nobody's"])
        ends = await asyncio.gather(last_of(stream), last_of(twin))
        await is_idle(llm)
        return before, *ends

    before, last, twin = run(abort())
    assert last.request_id == twin.request_id == "mine"
    assert [each.finish_reason for each in (*last.outputs, *twin.outputs)] == ["abort"] * (n + 1)
    for old, new in zip(before.outputs, last.outputs, strict=False):
        assert new.token_ids[: len(old.token_ids)] == old.token_ids != []


async def last_of(stream: Any) -> Any:
    while not (output := await stream.get()).finished:
        pass
    return output


def test_what_can_never_be_served_is_refused(make: Callable[..., AsyncLLM]) -> None:
    llm = make(max_num_queued_reqs=2)

    async def ask() -> None:
        for prompt, params in [("", LONG), ([], LONG), ([10**6], LONG), ("x", "no params")]:
            with pytest.raises((ValueError, TypeError)):
                await anext(llm.generate(prompt, params))
        async for _ in llm.generate("Once", LONG):
            with pytest.raises(QueueOverflowError):
                await anext(llm.generate("Once", SamplingParams(n=2)))
            break
        await is_idle(llm)

    run(ask())
    with pytest.raises(TypeError):
        make(max_num_sequences=3)


def test_the_error_of_one_request_is_its_own(llm: AsyncLLM) -> None:
    def fail(token_ids: list[int], logits: Any) -> Any:
        raise RuntimeError("no")

    async def ask() -> Any:
        bad = SamplingParams(logits_processors=[fail])
        broken = [output async for output in llm.generate("Once", bad)]
        return broken[-1].outputs[0], await collect(llm, "Once", SamplingParams(max_tokens=3))

    broken, good = run(ask())
    assert broken.finish_reason == "error"
    assert len(good[0]) == 3


def test_a_call_between_two_steps(llm: AsyncLLM) -> None:
    async def call() -> None:
        assert await llm.reset_prefix_cache()
        with pytest.raises(ZeroDivisionError):
            await llm.call_utility(lambda engine: 1 / 0)
        busy = asyncio.ensure_future(llm.call_utility(lambda engine: 1))
        busy.cancel()  # the thread must survive it
        async for _ in llm.generate("Once", LONG):
            assert not await llm.reset_prefix_cache()
            break
        await is_idle(llm)

    run(call())


def test_texts(llm: AsyncLLM) -> None:
    async def convert() -> Any:
        prompt = await llm.render_chat(
            [{"role": "user", "content": "Hi"}], add_generation_prompt=True
        )
        ids = await llm.tokenize(prompt["prompt"], add_special_tokens=False)
        return prompt, ids, await llm.detokenize(ids)

    prompt, ids, text = run(convert())
    assert ids == prompt["prompt_token_ids"]
    assert text == prompt["prompt"]


# -- the end --


class Dies(Scheduler):
    """Fails for good when told to."""

    is_dead = False

    def schedule(self) -> Any:
        if self.is_dead:
            raise MemoryError("no more")
        return super().schedule()


@pytest.mark.parametrize("end", ["shutdown", "death"])
def test_everybody_who_waits_learns_of_the_end(end: str, make: Callable[..., AsyncLLM]) -> None:
    llm = make(scheduler_cls=Dies)

    async def wait() -> list[Any]:
        streams = [llm.generate(prompt, LONG) for prompt in PROMPTS * 4]  # some run, some wait
        await anext(streams[0])
        tasks = [asyncio.ensure_future(drain(stream)) for stream in streams]
        if end == "death":
            llm.engine.scheduler.is_dead = True
        else:
            await asyncio.to_thread(llm.shutdown)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(EngineDeadError):
            await anext(llm.generate("Once", LONG))
        with pytest.raises(EngineDeadError):
            await llm.reset_prefix_cache()
        with pytest.raises(EngineDeadError):
            await llm.check_health()
        await llm.abort("nobody's")  # and this does no harm
        return found

    assert {type(each) for each in run(wait())} == {EngineDeadError}
    assert llm.errored
    llm.shutdown()  # once more


async def drain(stream: Any) -> None:
    async for _ in stream:
        pass


def test_shutdown_lets_requests_end_within_its_time(make: Callable[..., AsyncLLM]) -> None:
    llm = make()

    async def ask() -> Any:
        task = asyncio.ensure_future(collect(llm, "Once", SamplingParams(max_tokens=40)))
        while not llm.get_num_unfinished_requests():
            await asyncio.sleep(0)
        await asyncio.to_thread(llm.shutdown, 60)
        return await task

    assert run(ask())[0]


def test_vllms_way_to_build_one() -> None:
    with AsyncLLM.from_engine_args(AsyncEngineArgs(model=None, max_num_seqs=3)) as llm:
        assert llm.engine.config.max_num_seqs == 3
