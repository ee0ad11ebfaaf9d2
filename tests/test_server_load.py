"""The server under load, with clients that go away, signals, and a rank that is killed.

What is left after each: nothing runs, nothing waits, every block is free.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import random
import shlex
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import engines
import pytest
from engines import EOS, VOCAB_SIZE, expect
from fakes import FakeExecutor
from servers import (
    MOST,
    PATIENCE,
    Command,
    Running,
    join,
    join_tokens,
    request,
    running,
    stream,
    until,
)
from test_async_llm import GatedExecutor

from nanoserve import LLM, EngineArgs, SamplingParams
from nanoserve.distributed.process import process_state
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.server import build_app
from nanoserve.extras.server.launcher import Server, bind
from nanoserve.extras.server.options import FrontendArgs

STORY = "Once upon a time there was a little girl who liked the old garden and her dog"
MARGIN = 1e-3  # between the likeliest token and the next: a batch changes logits by less
Client = tuple[dict[str, Any], int | None, Any]  # what it asks for, when it leaves, what it gets


def draw_clients(number: int, draw: Callable[[random.Random], tuple[Any, Any]]) -> list[Client]:
    """Clients of which a third goes away, after 0 to 8 events; draw: what one asks for, and what it
    has to get."""
    rng = random.Random(number)
    clients: list[Client] = []
    for _ in range(number):
        body, expected = draw(rng)
        clients.append((body, rng.randint(0, 8) if rng.random() < 1 / 3 else None, expected))
    return clients


def draw_body(rng: random.Random) -> dict[str, Any]:
    """A request for the fake model."""
    prompt = [rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.randint(1, 30))]
    n, seed, max_tokens = rng.choice([1, 1, 3]), rng.randrange(100), rng.randint(1, 30)
    stop = rng.sample(range(VOCAB_SIZE), rng.choice([0, 2]))
    body = {"prompt": prompt, "n": n, "seed": seed, "max_tokens": max_tokens}
    return body | {"stop_token_ids": stop, "ignore_eos": True, "return_token_ids": True}


def draw_tokens(rng: random.Random) -> tuple[dict[str, Any], dict[int, Any]]:
    """A request for the fake model, whose tokens an oracle knows."""
    body = draw_body(rng)
    prompt, max_tokens, seed = body["prompt"], body["max_tokens"], body["seed"]
    stop = body["stop_token_ids"]
    return body, {j: expect(prompt, max_tokens, j, seed, stop) for j in range(body["n"])}


def draw_text(llm: LLM, rng: random.Random) -> tuple[dict[str, Any], dict[int, Any]]:
    """A request for the demo model, and the text that LLM.generate gives. Greedy, and without near
    ties, so that no batch changes a token."""
    while True:
        prompt = " ".join(rng.choices(STORY.split(), k=rng.randint(1, 60)))
        options = {"temperature": 0, "max_tokens": rng.randint(1, 25)}
        options |= rng.choice([{}, {"stop": ["the", "dog"]}, {"ignore_eos": True}])
        params = SamplingParams(**options, logprobs=2)
        [output] = llm.generate(prompt, params, use_tqdm=False)
        [completion] = output.outputs
        ranked = [sorted(each.logprob for each in row.values()) for row in completion.logprobs]
        if all(row[-1] - row[-2] > MARGIN for row in ranked):
            expected = {0: (completion.text, completion.finish_reason)}
            return {"prompt": prompt, **options}, expected


async def ask_all(port: int, clients: list[Client]) -> list[list[Any]]:
    asking = [stream(port, body, leave_after) for body, leave_after, _ in clients]
    return await asyncio.wait_for(asyncio.gather(*asking), MOST)


def assert_idle(server: Running) -> None:
    """Soon nothing runs, nothing waits, and every block is free; the metrics say so, too."""
    state = server.server.state
    engine = state.async_llm.engine
    until(lambda: not (state.num_requests or engine.has_unfinished_requests()))
    until(lambda: engine.block_manager.num_free_blocks == engine.executor.num_kv_blocks)
    engine.block_manager.check()
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert read_metric(server, name) == 0


def read_metric(server: Running, name: str) -> float:
    """The number that /metrics has for it."""
    lines = server.ask("GET", "/metrics").body.decode().splitlines()
    [line] = [line for line in lines if line.startswith(f"vllm:{name}{{")]
    return float(line.rpartition(" ")[2])


def test_who_stays_gets_what_generate_gives() -> None:
    """Of 24 clients, a third goes away, at any moment. Blocks are few: some requests wait."""
    with LLM() as llm:
        clients = draw_clients(24, partial(draw_text, llm))
    config = EngineArgs(num_kv_blocks=32, max_num_seqs=24)
    with AsyncLLM(config) as async_llm, running(build_app(async_llm)) as server:
        found = asyncio.run(ask_all(server.port, clients))
        assert_idle(server)
    for (body, leave_after, expected), events in zip(clients, found, strict=True):
        assert leave_after is not None or join(events) == expected, body


@contextmanager
def fake_server(
    executor_cls: type[FakeExecutor] = FakeExecutor, **options: Any
) -> Iterator[Running]:
    """A server whose model is the fake one. Without lines in the log, which pytest keeps."""
    fields = {"num_kv_blocks": 64, "block_size": 4, **options}
    config = EngineArgs(model=engines.checkpoint(VOCAB_SIZE, (EOS,)), **fields)
    with (
        AsyncLLM(config, executor_cls=executor_cls) as async_llm,
        running(
            build_app(async_llm, disable_uvicorn_access_log=True, shutdown_timeout=0.0)
        ) as server,
    ):
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("overlapped", [False, True], ids=["plain", "overlapped"])
def test_200_clients(overlapped: bool) -> None:
    """Of which a third goes away, again and again. The others get the oracle's tokens."""
    with fake_server(async_scheduling=overlapped) as server:
        for seed in range(200, 210):
            clients = draw_clients(seed, draw_tokens)
            found = asyncio.run(ask_all(server.port, clients))
            assert_idle(server)
            for (body, leave_after, expected), events in zip(clients, found, strict=True):
                assert leave_after is not None or join_tokens(events) == expected, body
        assert read_metric(server, "num_preemptions_total") > 0


@pytest.mark.slow
def test_memory_stays_flat() -> None:
    """Over 5,000 requests, of every kind: answers, streams, errors, clients that go away."""
    rng = random.Random(0)

    async def ask(port: int) -> None:
        body = draw_body(rng)
        kind = rng.randrange(4)
        if kind == 0:
            await stream(port, body, leave_after=rng.randint(0, 3))
        elif kind == 1:
            [status, answer] = await stream(port, {**body, "stream": False})
            assert (status, len(answer["choices"])) == (200, body["n"])
        elif kind == 2:
            [status, _] = await stream(port, {**body, "n": 0})
            assert status == 400
        else:
            join(await stream(port, body))

    async def ask_many(port: int, number: int) -> None:
        for _ in range(number // 20):
            await asyncio.gather(*(ask(port) for _ in range(20)))

    def measure(server: Running) -> tuple[int, int]:
        """Python objects, and bytes of this process (0 where Linux' /proc is missing)."""
        assert_idle(server)
        gc.collect()
        statm = Path("/proc/self/statm")
        num_pages = int(statm.read_text().split()[1]) if statm.exists() else 0
        return len(gc.get_objects()), num_pages * mmap.PAGESIZE

    with fake_server() as server:
        server.server.config.timeout_keep_alive = 0  # a timer would hold each connection
        asyncio.run(ask_many(server.port, 2_000))
        num_objects, size = measure(server)
        asyncio.run(ask_many(server.port, 5_000))
        later_num_objects, later_size = measure(server)
    assert later_num_objects < num_objects + 2_500  # one for each request were 5,000
    assert later_size < size + 10e6


# -- signals --

LONG = {"prompt": "Once upon a time", "max_tokens": 2000, "ignore_eos": True}


def is_there(pid: int) -> bool:
    """Does this process run?"""
    return process_state(pid) not in (None, "Z")


async def send_under_load(
    server: Command, number: int, num_clients: int, body: dict[str, Any]
) -> list[list[Any]]:
    """The events of as many streams; when each has begun, the server gets this signal."""
    num_begun = 0

    def begin() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == num_clients:
            server.send(number)

    asking = [stream(server.port, body, on_begin=begin) for _ in range(num_clients)]
    return await asyncio.wait_for(asyncio.gather(*asking), MOST)


def test_a_signal_ends_all_streams_well() -> None:
    """Without a process. Each stream gets its last chunk, and nothing is left."""
    body = {"prompt": [1, 2, 3], "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}

    async def main(server: Running) -> list[list[Any]]:
        begun = asyncio.Semaphore(0)
        asking = [stream(server.port, body, on_begin=begun.release) for _ in range(4)]
        found = asyncio.gather(*asking)
        async_llm = server.server.state.async_llm
        while async_llm.get_num_unfinished_requests() < len(asking):
            await asyncio.sleep(0.001)
        async_llm.engine.executor.permits.release(3)  # the first step may have one request alone
        for _ in asking:
            await begun.acquire()
        server.server.handle_exit(signal.SIGTERM, None)
        while not async_llm.errored:
            await asyncio.sleep(0.001)
        async_llm.engine.executor.open()
        return await found

    with fake_server(GatedExecutor) as server:
        for events in asyncio.run(asyncio.wait_for(main(server), PATIENCE)):
            assert [reason for _, reason in join(events).values()] == ["abort"]
            assert join_tokens(events)[0]


def test_signals_that_come_before_it_listens() -> None:
    """A replica may be told to end as soon as it has told its port."""
    config = EngineArgs(model=engines.checkpoint(VOCAB_SIZE, (EOS,)), num_kv_blocks=64)
    with AsyncLLM(config, executor_cls=FakeExecutor) as llm:
        server, sock = Server(build_app(llm, shutdown_timeout=3600.0)), bind(FrontendArgs(port=0))
        for _ in range(2):
            server.handle_exit(signal.SIGTERM, None)
        server.run(sockets=[sock])
        assert llm.errored


@pytest.mark.slow
def test_sigterm_ends_the_process_well() -> None:
    """Within the limit the engine aborts what still runs. The exit status is 0."""
    with Command("--shutdown-timeout", "0.3", "--disable-uvicorn-access-log") as server:
        # it comes just behind the line that says "served at"
        until(lambda: any(line.startswith("curl ") for line in server.lines))
        example = next(line for line in server.lines if line.startswith("curl "))
        [url, *_, body] = shlex.split(example)[1:]
        answer = server.ask("POST", url.partition(str(server.port))[2], body.encode())
        assert answer.json["choices"][0]["text"]
        for events in asyncio.run(send_under_load(server, signal.SIGTERM, 8, LONG)):
            [(text, reason)] = join(events).values()
            assert reason == "abort"
            assert text
        assert server.wait() == 0
        assert "Traceback" not in "".join(server.lines)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--tensor-parallel-size", "2"], ["--async-scheduling"]])
def test_what_can_end_in_time_ends(arguments: list[str]) -> None:
    """Ctrl-C; no rank outlives the server."""
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True}
    with Command("--shutdown-timeout", "60", *arguments) as server:
        ranks = server.ranks
        assert len(ranks) >= bool(arguments[1:])
        for events in asyncio.run(send_under_load(server, signal.SIGINT, 20, body)):
            [(_, reason)] = join(events).values()
            assert reason == "length"
        assert server.wait() == 0
        until(lambda: not any(map(is_there, ranks)))


@pytest.mark.slow
def test_a_second_signal_does_not_wait() -> None:
    """The limit is an hour; the second Ctrl-C aborts. The clients still get their end."""
    with Command("--shutdown-timeout", "3600") as server:

        async def main() -> list[list[Any]]:
            asking = asyncio.create_task(send_under_load(server, signal.SIGINT, 8, LONG))
            while not any("Shutting down" in line for line in server.lines):
                assert not asking.done(), await asking
                await asyncio.sleep(0.01)
            server.send(signal.SIGINT)
            return await asking

        for events in asyncio.run(main()):
            [(_, reason)] = join(events).values()
            assert reason == "abort"
        assert server.wait() == 0


@pytest.mark.slow
def test_a_client_that_does_not_read_keeps_nobody_alive() -> None:
    body = {**LONG, "stream": True, "logprobs": 5, "n": 4, "temperature": 1}  # 3 MB of chunks
    with Command("--shutdown-timeout", "1") as server, server.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(request("POST", "/v1/completions", body))
        assert sock.recv(100)
        server.send(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--async-scheduling"]], ids=["plain", "overlapped"])
def test_a_rank_that_is_killed(arguments: list[str]) -> None:
    """Each stream ends with an error, each later request is refused, and probes know it."""
    with Command("--tensor-parallel-size", "2", *arguments) as server:

        async def main() -> list[Any]:
            [rank] = server.ranks
            begun = asyncio.Semaphore(0)
            bodies = [{**LONG, "stream": number % 2 == 0} for number in range(8)]
            asking = [
                asyncio.create_task(stream(server.port, body, on_begin=begun.release))
                for body in bodies
            ]
            for _ in range(4):
                await begun.acquire()
            os.kill(rank, signal.SIGKILL)
            return await asyncio.gather(*asking)

        for number, events in enumerate(asyncio.run(asyncio.wait_for(main(), MOST))):
            if number % 2 == 0:
                *_, error, done = events
                assert done == "[DONE]"
            else:
                status, error = events
                assert status == 500
            assert error["error"]["code"] == 500
            assert error["error"]["message"].startswith("the engine has failed")
        assert server.ask("GET", "/health").status == 503
        answer = server.ask("POST", "/v1/completions", {"prompt": "a"})
        assert (answer.status, answer.error["type"]) == (503, "ServiceUnavailableError")
        server.send(signal.SIGTERM)
        assert server.wait() == 0
