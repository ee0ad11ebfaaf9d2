"""What do the clients of a server see, when requests arrive at a rate?

    nanoserve serve --port 8000 &
    nanoserve bench serve --url http://127.0.0.1:8000/v1 --rate 2

Any server of OpenAI's API can be measured. Its first model gets random token ids as prompts, and
streams its tokens; vLLM and nanoserve take ignore_eos, so that each request has its length.

vLLM: vllm/benchmarks/serve.py.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from nanoserve.bench.suites import Result, Settings, compute_figures, draw
from nanoserve.bench.workload import Request


async def ask(client: Any, model: str, request: Request) -> list[float]:
    """Send one request when it arrives: when did its tokens come?"""
    await asyncio.sleep(request.arrival)
    start, times = time.perf_counter(), []
    stream = await client.completions.create(
        model=model,
        prompt=request.prompt,
        max_tokens=request.num_output,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if chunk.choices:  # the last chunk may hold the usage alone
            times.append(time.perf_counter() - start)
    return times


async def measure(url: str, settings: Settings) -> Result:
    """One round; the chunks of the streams count as tokens."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
    model = (await client.models.list()).data[0].id
    requests = draw("serve", settings, round_=0)
    await ask(client, model, Request(requests[0].prompt[::-1], 4))  # warm up
    start = time.perf_counter()
    times = await asyncio.gather(*(ask(client, model, request) for request in requests))
    return {model: compute_figures("serve", requests, times, time.perf_counter() - start)}


def measure_server(url: str, settings: Settings) -> Result:
    seconds = settings.num_requests / settings.rate
    print(f"serve: {settings.num_requests} requests to {url}; {seconds:.0f} s, or more")
    return asyncio.run(measure(url, settings))
