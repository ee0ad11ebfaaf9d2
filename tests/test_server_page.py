"""The page at /, and /engine, which feeds it: what it says agrees with the engine, nobody listens
when nobody watches, and all is text in the browser. The last part drives a headless Chromium."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import engines
import httpx
import pytest
import uvicorn
from browser import CHROMIUM, Browser, Page
from engines import EOS, VOCAB_SIZE, params
from fakes import FakeExecutor
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import PATIENCE, request, running, until

from nanoserve import EngineArgs, LLMEngine
from nanoserve.block_manager import BlockManager, BlockState
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.server import build_app
from nanoserve.extras.server import watch as watch_module
from nanoserve.extras.server.page import PAGE, stream
from nanoserve.extras.server.watch import EngineWatch, describe_blocks, describe_sequence
from nanoserve.extras.trace import Recorder
from nanoserve.sequence import SequenceStatus

STREAM = {"Accept": "text/event-stream"}


def watch_of(engine: LLMEngine) -> EngineWatch:
    """A watch of an engine whose steps the test runs itself."""
    shim: Any = SimpleNamespace(
        engine=engine, step_listeners=engine.step_listeners, chat_template=None, errored=False
    )
    return EngineWatch(shim, "fake")


def read(watch: EngineWatch) -> dict[str, Any]:
    watch.read(watch.async_llm.engine)
    message: dict[str, Any] = json.loads(watch.message())
    return message


def cells_of(view: dict[str, Any]) -> set[int]:
    number = int(view["cells"], 16)
    return {cell for cell in range(number.bit_length()) if number >> cell & 1}


# -- what is said --


def check_message(engine: LLMEngine, message: dict[str, Any]) -> None:
    """Every number of a message, by its definition."""
    manager, scheduler, size = engine.block_manager, engine.scheduler, message["blocks_per_cell"]
    pool = manager.pool
    for name in ("running", "waiting", "swapped"):
        assert message[f"num_{name}"] == len(getattr(scheduler, name))
    assert message["num_free_blocks"] == manager.num_free_blocks
    assert len(message["held"]) == -(-manager.num_blocks // size) <= watch_module.MOST_CELLS
    is_held = [pool.get_state(i) is BlockState.ALLOCATED for i in range(manager.num_blocks)]
    shares = {
        "held": is_held,
        "shared": [count > 1 for count in pool.ref_counts],
        "cached": [
            pool.block_hashes[i] is not None and not is_held[i] for i in range(manager.num_blocks)
        ],
    }
    for name, flags in shares.items():
        for cell, digit in enumerate(message[name]):
            part = flags[cell * size : (cell + 1) * size]
            assert 0 <= int(digit, 16) / 15 - sum(part) / len(part) < 1 / 15
    views = {view["seq_id"]: view for view in message["sequences"]}
    assert set(views) == {seq.seq_id for seq in scheduler.sequences.values()}
    for seq_id, view in views.items():
        seq, table = scheduler.sequences[seq_id], manager.block_tables.get(seq_id, [])
        assert view["status"] == seq.status.name
        assert cells_of(view) == {block_id // size for block_id in table}
        held = manager.swapped_tables[seq_id] if view["status"] == "SWAPPED" else table
        assert (view["num_blocks"], view["block_table"]) == (len(held), held[: len(held)])
        assert view["num_computed_tokens"] == seq.num_computed_tokens
        assert view["num_tokens"] == seq.num_tokens


@settings(max_examples=8)
@given(
    seed=st.integers(0, 10**6),
    most_cells=st.sampled_from([7, 1024]),
    num_kv_blocks=st.integers(10, 40),
    overlapped=st.booleans(),
    swaps=st.booleans(),
)
def test_messages_agree_with_the_engine(
    seed: int, most_cells: int, num_kv_blocks: int, overlapped: bool, swaps: bool
) -> None:
    """In every step of random requests, with shared prefixes, forks and preemptions. The recorder
    of extras/trace is the oracle of what a step did."""
    random = Random(seed)
    options = {"num_cpu_blocks": 20, "preemption_mode": "swap"} if swaps else {}
    engine = engines.make_engine(
        num_kv_blocks=num_kv_blocks,
        max_model_len=32,
        max_num_seqs=6,
        async_scheduling=overlapped,
        **options,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(watch_module, "MOST_CELLS", most_cells)
        watch = watch_of(engine)
        recorder = Recorder(engine)
        seen: list[dict[str, Any]] = []
        num_completions = 0
        with watch.listening():
            for number in range(random.randint(1, 6)):
                prompt = [*range(1, random.randint(2, 9)), random.randint(9, 40)]
                fields = {"n": random.randint(1, 2), "max_tokens": random.randint(2, 12)}
                num_completions += fields["n"]
                engine.add_request(f"r{number}", prompt, params(**fields))
            while engine.has_unfinished_requests():
                engine.step()
                if engine.has_unfinished_requests() and random.random() < 0.5:
                    continue  # the next message tells of several steps
                message = read(watch)
                check_message(engine, message)
                seen += [each for each in message["steps"] if each["number"] > len(seen)]
    assert [each["number"] for each in seen] == list(range(1, len(recorder.steps) + 1))
    names = {view.seq_id: view.name for frame in recorder.steps for view in frame.sequences}
    events = [event for frame in recorder.steps for event in frame.events]
    finished = [seq_id for each in seen for seq_id, _ in each["finished"]]
    assert len(finished) == len(set(finished)) == num_completions
    if not overlapped:  # the recorder tells at the end of a step, when the next one is decided
        preempted = sorted(names[i] for each in seen for i in each["preempted"])
        kinds = ("preempted", "swapped out")
        assert preempted == sorted(event.name for event in events if event.kind in kinds)
        hits = sorted((names[i], count) for each in seen for i, count in each["hits"])
        back = [event for event in events if event.kind in ("hit", "back") and event.count]
        expected = sorted((event.name, event.count) for event in back)
        assert set(hits) <= set(expected)
        # A branch that finds all its blocks again looks like one that has just forked off.
        assert [each for each in expected if "." not in each[0]] == [
            each for each in hits if "." not in each[0]
        ]


def test_a_message_is_small_whatever_the_engine_holds() -> None:
    """100,000 blocks, 300 sequences with long names, every block held and many shared."""
    manager = BlockManager(100_000, 16)
    random = Random(0)
    free = list(range(100_000))
    random.shuffle(free)
    views = []
    for number in range(300):
        own = [free.pop() for _ in range(333)]
        seq: Any = SimpleNamespace(
            seq_id=10**12 + number,
            request_id="é" * 500,
            branch=0,
            status=SequenceStatus.RUNNING,
            num_prompt_tokens=10**5,
            num_tokens=10**5,
            num_computed_tokens=10**5,
            num_cached_tokens=10**5,
            max_tokens=10**5,
            metrics=SimpleNamespace(num_preemptions=10**5),
        )
        manager.block_tables[seq.seq_id] = own
        for block_id in own:
            manager.pool.share(block_id)
        if number < watch_module.MOST_SEQUENCES:
            views.append(describe_sequence(seq, manager))
    blocks = describe_blocks(manager)
    assert blocks["blocks_per_cell"] == 98
    assert len(blocks["held"]) == 1021
    assert len(json.dumps({**blocks, "sequences": views})) < 100_000


def test_of_many_sequences_both_running_and_waiting_ones_are_shown() -> None:
    engine = engines.make_engine(num_kv_blocks=400, max_num_seqs=100)
    watch = watch_of(engine)
    for number in range(300):
        engine.add_request(f"r{number}", [1, 2, 3], params())
    engine.step()
    message = read(watch)
    statuses = [view["status"] for view in message["sequences"]]
    assert (statuses.count("RUNNING"), statuses.count("WAITING")) == (48, 16)
    assert (message["num_running"], message["num_waiting"]) == (100, 200)
    waiting = [view for view in message["sequences"] if view["status"] == "WAITING"]
    assert "max_num_seqs=100" in waiting[0]["why_waiting"]
    assert not any("why_waiting" in view for view in waiting[1:])  # they wait for the first


# -- who listens, and for how long --


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def fake_llm(request: pytest.FixtureRequest) -> Iterator[AsyncLLM]:
    model = engines.checkpoint(VOCAB_SIZE, (EOS,))
    fields: dict[str, Any] = {"num_kv_blocks": 64, "block_size": 4}
    engine_args = EngineArgs(model=model, async_scheduling=request.param, **fields)
    with AsyncLLM(engine_args, executor_cls=FakeExecutor) as async_llm:
        yield async_llm


async def run_one(async_llm: AsyncLLM, max_tokens: int = 10) -> None:
    async for _ in async_llm.generate([1, 2, 3], params(max_tokens=max_tokens)):
        pass


def decode(message: bytes) -> dict[str, Any]:
    assert message.startswith(b"data: {")
    assert message.endswith(b"}\n\n")
    decoded: dict[str, Any] = json.loads(message[6:])
    return decoded


def test_nobody_watches_nobody_listens(fake_llm: AsyncLLM) -> None:
    """A listener comes with the first watcher and goes with the last; each watcher gets each step
    once."""

    async def scenario() -> None:
        watch = EngineWatch(fake_llm, "fake")
        await run_one(fake_llm)
        await watch.refresh()
        assert (watch.state["num_steps"], fake_llm.step_listeners) == (0, [])
        streams = [stream(watch, 0.0), stream(watch, 0.0)]
        for each in streams:
            assert decode(await anext(each))["steps"] == []
        assert fake_llm.step_listeners == [watch]
        await run_one(fake_llm)
        for each in streams:
            numbers: list[int] = []
            while not numbers or numbers[-1] < watch.num_steps:
                message = decode(await asyncio.wait_for(anext(each), PATIENCE))
                numbers += [step["number"] for step in message["steps"]]
            assert numbers == list(range(1, watch.num_steps + 1))
            assert message["num_generation_tokens"] == 10
        await streams[0].aclose()
        assert fake_llm.step_listeners == [watch]
        await streams[1].aclose()
        assert fake_llm.step_listeners == []
        await run_one(fake_llm)
        assert watch.num_steps == numbers[-1]

    asyncio.run(scenario())


def test_nothing_new_is_not_sent(fake_llm: AsyncLLM) -> None:
    """An idle engine is not read again."""

    async def scenario() -> None:
        watch = EngineWatch(fake_llm, "fake")
        with watch.listening():
            await watch.refresh()
            state = watch.state
            await asyncio.sleep(2 * watch_module.INTERVAL)
            await watch.refresh()
            assert watch.state is state
            await run_one(fake_llm)
            await watch.refresh()
            assert watch.state is not state

    asyncio.run(scenario())


def test_slow_motion_ends_with_its_watcher(fake_llm: AsyncLLM) -> None:
    async def scenario() -> None:
        watch = EngineWatch(fake_llm, "fake")
        slow, fast = stream(watch, 0.02), stream(watch, 0.0)
        await anext(fast)
        await anext(slow)
        start = time.monotonic()
        await run_one(fake_llm, max_tokens=5)
        assert time.monotonic() - start >= 4 * 0.02
        await slow.aclose()
        message = decode(await asyncio.wait_for(anext(fast), PATIENCE))
        while message["slow_motion"]:
            message = decode(await asyncio.wait_for(anext(fast), PATIENCE))
        await fast.aclose()

    asyncio.run(scenario())


def test_the_stream_ends_with_the_engine(fake_llm: AsyncLLM) -> None:
    """So that it does not hold up the server's shutdown."""

    async def scenario() -> None:
        messages = stream(EngineWatch(fake_llm, "fake"), 0.0)
        await anext(messages)
        await asyncio.to_thread(fake_llm.shutdown)
        last = decode(await asyncio.wait_for(anext(messages), PATIENCE))
        assert last["error"]["code"] == 503
        with pytest.raises(StopAsyncIteration):
            await anext(messages)

    asyncio.run(scenario())


# -- over HTTP --


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The app's address while it is served. The AsyncLLM lives on, unlike with the launcher's
    server."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def async_llm() -> Iterator[AsyncLLM]:
    with AsyncLLM(EngineArgs(num_kv_blocks=128, max_num_batched_tokens=512)) as llm:
        yield llm
        llm.engine.block_manager.check()
        assert llm.get_num_unfinished_requests() == 0


@pytest.fixture(scope="module")
def app(async_llm: AsyncLLM) -> FastAPI:
    return build_app(async_llm)


@pytest.fixture(scope="module")
def url(app: FastAPI) -> Iterator[str]:
    with serving(app) as address:
        yield address


def test_the_policy_names_the_page_s_own_script_and_style(url: str) -> None:
    """Nothing else runs, nothing else is loaded; and the page needs nothing else."""
    response = httpx.get(url)
    assert response.headers["content-type"].startswith("text/html")
    policy = dict(
        part.split(" ", 1) for part in response.headers["content-security-policy"].split("; ")
    )
    for tag in ("script", "style"):
        [content] = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in response.headers["content-security-policy"]


def test_the_page_is_one_file_and_makes_no_html() -> None:
    page = PAGE.read_text("utf-8")
    for word in ("http:", "https:", "src=", "@import", "url(", " style=", " onclick="):
        assert word not in page
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert word not in page


def test_engine_without_a_stream_is_json(url: str) -> None:
    state = httpx.get(f"{url}/engine").json()
    assert (state["num_blocks"], state["num_free_blocks"]) == (128, 128)
    assert (state["sequences"], state["steps"]) == ([], [])
    assert state["has_chat_template"] is True


@pytest.mark.parametrize("value", ["x", "-1", "1.01", "nan", "inf"])
def test_slow_motion_is_limited(url: str, value: str) -> None:
    response = httpx.get(f"{url}/engine", params={"slow_motion": value}, headers=STREAM)
    assert response.status_code == 400
    assert "0 to 1" in response.json()["error"]["message"]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_sites_cannot_slow_the_engine_down(url: str, site: str) -> None:
    """A browser sends this header with every request of a page, and no page can change it."""
    headers = {**STREAM, "Sec-Fetch-Site": site}
    response = httpx.get(f"{url}/engine?slow_motion=1", headers=headers)
    assert response.status_code == 403


def test_a_watcher_who_vanishes_is_forgotten(url: str, async_llm: AsyncLLM) -> None:
    num_listeners = len(async_llm.step_listeners)
    with httpx.stream("GET", f"{url}/engine", headers=STREAM) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        messages = response.iter_bytes()  # a name: the stream is closed with the iterator
        assert "steps" in decode(next(messages))
        assert len(async_llm.step_listeners) == num_listeners + 1
    until(lambda: len(async_llm.step_listeners) == num_listeners)


def test_a_watcher_does_not_hold_up_the_end(fake_llm: AsyncLLM) -> None:
    with running(build_app(fake_llm)) as server, server.connect() as sock:
        sock.sendall(request("GET", "/engine", headers=STREAM))
        with sock.makefile("rb") as lines:
            until(lambda: lines.readline().startswith(b"data: "))
            server.server.should_exit = True
            assert b'"code": 503' in lines.read()


def test_the_engine_needs_the_key_and_the_page_asks_for_it(async_llm: AsyncLLM) -> None:
    with serving(build_app(async_llm, api_key="secret")) as address:
        assert httpx.get(address).status_code == 200
        for headers in ({}, STREAM):
            assert httpx.get(f"{address}/engine", headers=headers).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert httpx.get(f"{address}/engine", headers=headers).status_code == 200


# -- in a browser --

needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="needs Chromium (apt install chromium)")
IDLE = "document.querySelector('#state').textContent === 'idle'"
LAST = "[...document.querySelectorAll('#log > .assistant .text')].at(-1)"
EVIL = '<img src=x onerror="hacked = 1"><script>hacked = 1</script>'


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    opened = browser.open(url)
    opened.wait_for(IDLE)
    yield opened
    assert opened.problems == []
    opened.close()


def ask(page: Page, text: str) -> None:
    page.type("#prompt", text)
    page.press("Enter", 13, "\r")


def let_the_server_say(page: Page, **fields: object) -> None:
    """Show the last message of /engine with these fields, and so in all that follow it."""
    page.evaluate(
        f"""(() => {{
          const real = take;
          take = message => real({{...message, ...{json.dumps(fields)}}});
          take(state);
        }})()"""
    )


def answer_with(page: Page, *pieces: str, status: int = 200) -> None:
    """Let the completions of this page be made of these pieces, by a script in the page."""
    page.evaluate(
        f"""(() => {{
          const real = window.fetch, pieces = {json.dumps(pieces)};
          window.sent = [];
          window.fetch = (path, options) => {{
            if (!path.startsWith("v1/")) return real(path, options);
            window.sent.push([path, JSON.parse(options.body)]);
            const chunks = pieces.map(text => "data: " + JSON.stringify(
              {{id: "x-1", choices: [{{index: 0, text, delta: {{content: text}}}}]}}) + "\\n\\n");
            return Promise.resolve(new Response({status} === 200 ? chunks.join("")
              : JSON.stringify({{error: {{message: pieces[0]}}}}), {{status: {status}}}));
          }};
        }})()"""
    )


@needs_chromium
def test_a_chat_streams_into_the_page(page: Page) -> None:
    """By keyboard alone; the second question brings the first one along."""
    ask(page, "What is the capital of France?")
    page.wait_for("document.querySelector('#log .assistant .faint').textContent.includes('stop')")
    assert "Paris" in page.evaluate(f"{LAST}.textContent")
    ask(page, "What is 17 + 25?")
    page.wait_for(f"!stopping && {LAST}.textContent.includes('42')")
    assert page.evaluate("conversation.map(each => each.role)") == 2 * ["user", "assistant"]
    page.wait_for(
        "steps.length > 0 && !document.querySelector('#last').textContent.includes('No step')"
    )
    page.wait_for("known.size >= 2")  # a short request may have no row: see the samples below


@needs_chromium
def test_what_the_model_writes_is_text(page: Page) -> None:
    """And what the user writes, what an error says, and what a request is called."""
    answer_with(page, EVIL[:9], EVIL[9:])
    ask(page, EVIL)
    page.wait_for(f"!stopping && {LAST}.textContent.length > 20")
    assert page.evaluate(f"{LAST}.textContent") == EVIL
    answer_with(page, EVIL, status=500)
    ask(page, EVIL)
    page.wait_for("document.querySelector('#log .alarm')?.textContent.length > 20")
    view = {"seq_id": 1, "branch": 0, "id": EVIL, "status": EVIL, "cells": "1", "block_table": [0]}
    let_the_server_say(page, created=0, steps=[], sequences=[view])
    page.wait_for("document.querySelector('#requests tbody button').title.includes('onerror')")
    assert page.evaluate("document.querySelectorAll('img, #log script').length") == 0
    assert page.evaluate("typeof hacked") == "undefined"


@needs_chromium
def test_a_model_without_a_template_completes_text(page: Page) -> None:
    answer_with(page, " there was")
    let_the_server_say(page, has_chat_template=False)
    page.evaluate("document.querySelector('#temperature').value = '0.5'")
    page.evaluate("document.querySelector('#seed').value = '7'")
    ask(page, "Once upon a time")
    page.wait_for(f"!stopping && {LAST}.textContent === ' there was'")
    [[path, body]] = page.evaluate("sent")
    assert path == "v1/completions"
    assert (body["prompt"], body["stream"]) == ("Once upon a time", True)
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.5, 7, 200)
    page.wait_for("!document.querySelector('#no-template').hidden")


@needs_chromium
def test_a_model_that_makes_vectors_is_not_talked_to(page: Page) -> None:
    let_the_server_say(page, makes_vectors=True)
    page.wait_for("!document.querySelector('#vectors').hidden")
    assert page.evaluate("document.querySelector('#chat-title').textContent") == "Vectors"
    for name in ("ask", "log", "new", "samples"):
        assert page.evaluate(f"document.querySelector('#{name}').offsetParent === null")
    assert page.evaluate("$('speed-title').textContent") == "Prompt tokens per second"
    assert page.evaluate("$('rate-of').textContent") == "prompt"
    for seconds, num_tokens in ((1e6, 0), (1e6 + 1, 70)):
        told = {"makes_vectors": True, "time": seconds, "num_scheduled_tokens": num_tokens}
        told["num_generation_tokens"] = 0
        page.evaluate(f"measure({json.dumps(told)}), undefined")
    assert page.evaluate("speeds[speeds.length - 1][1]") == 70


@needs_chromium
def test_the_samples_run_at_once_and_stop_stops(page: Page, async_llm: AsyncLLM) -> None:
    """Eight requests run beside each other, some on shared blocks. The block map highlights a
    request that is pointed at; the answer that is stopped leaves the engine."""
    page.evaluate(
        "$('slow').value = '0.1', $('slow').dispatchEvent(new Event('change')), undefined"
    )
    page.wait_for("state.slow_motion === 0.1")
    page.click("#samples")
    page.wait_for("known.size >= 8 && /[1-9a-f]/.test(state.shared)")  # some end after few steps
    page.wait_for("document.querySelectorAll('#requests tbody button').length >= 8")
    name = page.evaluate("document.querySelector('#requests tbody button .chip').textContent")
    page.evaluate("document.querySelector('#requests tbody button').focus()")
    page.wait_for(f"$('about').textContent.startsWith('{name}: RUNNING')")
    page.wait_for("document.querySelector('#requests tr.lit')")
    page.evaluate("$('blocks').focus()")
    page.press("ArrowRight", 39)
    page.wait_for("$('about').textContent.startsWith('Block 0:')")
    ask(page, "Once upon a time")
    asked = "state.sequences.some(each => each.id.startsWith('chatcmpl'))"
    page.wait_for(asked)
    page.click("#stop")
    page.wait_for(f"!stopping && !{asked}")
    assert "stopped by you" in page.evaluate(f"{LAST}.parentNode.textContent")
    page.evaluate("$('slow').value = '0', $('slow').dispatchEvent(new Event('change')), undefined")
    page.wait_for("samplesRunning === 0 && state.num_running === 0 && !state.slow_motion")
    texts = page.evaluate("[...document.querySelectorAll('.samples li')].map(e => e.textContent)")
    assert len(texts) == 8
    assert any("Paris" in text for text in texts)


@needs_chromium
def test_a_page_that_nobody_looks_at_does_not_watch(page: Page, async_llm: AsyncLLM) -> None:
    num_listeners = len(async_llm.step_listeners)
    page.evaluate(
        """Object.defineProperty(document, 'hidden', {get: () => isHidden, configurable: true}),
        isHidden = true, document.dispatchEvent(new Event('visibilitychange')), undefined"""
    )
    until(lambda: len(async_llm.step_listeners) == num_listeners - 1)
    page.evaluate("isHidden = false, document.dispatchEvent(new Event('visibilitychange'))")
    until(lambda: len(async_llm.step_listeners) == num_listeners)


@needs_chromium
def test_the_page_asks_for_the_key(browser: Browser, async_llm: AsyncLLM) -> None:
    with serving(build_app(async_llm, api_key="secret")) as address:
        page = browser.open(address)
        page.wait_for("!document.querySelector('#key').hidden")
        page.type("#key-text", "wrong")
        page.press("Enter", 13, "\r")
        page.wait_for("document.querySelector('#key-text').value === '' && !$('key').hidden")
        page.type("#key-text", "secret")
        page.press("Enter", 13, "\r")
        page.wait_for(IDLE)
        assert page.evaluate("$('key').hidden")
        assert all("401" in problem for problem in page.problems)
        page.close()


# Of each visible text: its contrast with what is behind it (WCAG 2), and its size.
CONTRASTS = """(() => {
  const parse = text => text.match(/[\\d.]+/g).map(Number);
  const channel = part => (part /= 255) <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const bright = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    const isShown = element.checkVisibility() && !element.closest("script, :disabled");
    if (!text || !isShown) continue;
    let behind = element;
    const backOf = each => parse(getComputedStyle(each).backgroundColor);
    while (behind !== document.body && backOf(behind)[3] === 0) behind = behind.parentElement;
    const [a, b] = [parse(getComputedStyle(element).color), backOf(behind)].map(bright);
    found.push([text, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)]);
  }
  return found;
})()"""


@needs_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_can_be_read_at_every_width(page: Page, dark: bool) -> None:
    """No horizontal scrolling from 320 to 2560 pixels, every control has a name, and all text has
    the contrast of WCAG AA."""
    page.set_dark(dark)
    answer_with(page, "word" * 200, " and more")
    ask(page, "x" * 500)
    page.wait_for(f"!stopping && {LAST}.textContent.length > 800")
    view = {
        "seq_id": 0,
        "branch": 0,
        "cells": "f",
        "block_table": list(range(24)),
        "num_blocks": 99,
    }
    counts = dict.fromkeys(("num_prompt_tokens", "num_tokens", "num_computed_tokens"), 10**6)
    counts |= dict.fromkeys(("num_cached_tokens", "max_tokens", "num_preemptions"), 10**6)
    views = [
        {**view, **counts, "seq_id": 10**6 + i, "id": "long" * 16 + str(i), "status": "RUNNING"}
        for i in range(10)
    ]
    let_the_server_say(page, sequences=views)
    for width in (320, 360, 700, 979, 980, 1440, 2560):
        page.resize(width, 800)
        page.wait_for("document.querySelectorAll('#requests tbody button').length === 10")
        needed, given = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert needed <= given, f"{width} pixels"
    poor = [pair for pair in page.evaluate(CONTRASTS) if pair[1] < 4.5]
    assert poor == []
    unnamed = page.evaluate(
        """[...document.querySelectorAll("button, input, select, textarea, canvas, ol[role]")]
        .filter(e => !(e.textContent.trim() || e.labels?.length || e.ariaLabel)).map(e => e.id)"""
    )
    assert unnamed == []
