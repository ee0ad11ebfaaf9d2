"""The server under load, with clients that go away, signals, and a rank that is killed.

What is left after each: nothing runs, nothing waits, every block is free.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import engines
import pytest
from engines import EOS, VOCAB_SIZE, expect
from fakes import FakeExecutor
from servers import PATIENCE, Running, join, join_tokens, running, stream, until

from nanoserve import LLM, EngineArgs, SamplingParams
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.server import build_app

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


def draw_tokens(rng: random.Random) -> tuple[dict[str, Any], dict[int, Any]]:
    """A request for the fake model, whose tokens an oracle knows."""
    prompt = [rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.randint(1, 30))]
    n, seed, max_tokens = rng.choice([1, 1, 3]), rng.randrange(100), rng.randint(1, 30)
    stop = rng.sample(range(VOCAB_SIZE), rng.choice([0, 2]))
    body = {"prompt": prompt, "n": n, "seed": seed, "max_tokens": max_tokens}
    body |= {"stop_token_ids": stop, "ignore_eos": True, "return_token_ids": True}
    return body, {j: expect(prompt, max_tokens, j, seed, stop) for j in range(n)}


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
    return await asyncio.wait_for(asyncio.gather(*asking), 10 * PATIENCE)


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
    """Of 24 clients, a third goes away, at any moment. Blocks are few: requests wait, and some are
    preempted."""
    with LLM() as llm:
        clients = draw_clients(24, partial(draw_text, llm))
    config = EngineArgs(num_kv_blocks=32, max_num_seqs=24)
    with AsyncLLM(config) as async_llm, running(build_app(async_llm)) as server:
        found = asyncio.run(ask_all(server.port, clients))
        assert_idle(server)
        assert read_metric(server, "num_preemptions_total") > 0
    for (body, leave_after, expected), events in zip(clients, found, strict=True):
        assert leave_after is not None or join(events) == expected, body


@contextmanager
def fake_server(**options: Any) -> Iterator[Running]:
    """A server whose model is the fake one."""
    fields = {"num_kv_blocks": 64, "block_size": 4, **options}
    config = EngineArgs(model=engines.checkpoint(VOCAB_SIZE, (EOS,)), **fields)
    with (
        AsyncLLM(config, executor_cls=FakeExecutor) as async_llm,
        running(build_app(async_llm, served_model_name="fake")) as server,
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
