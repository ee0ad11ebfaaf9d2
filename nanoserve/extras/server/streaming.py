"""How do the engine's outputs reach a client that may go away?

    prompts "Once", "A dog"          EngineRequests.add: one request of the engine for each prompt
    -> (0, RequestOutput)            EngineRequests.outputs: as they come, with the prompt's number
    -> (1, RequestOutput), ...
    -> data: {"id": "cmpl-7", "choices": [{"index": 0, "text": " upon", ...}], ...}
       data: {"id": "cmpl-7", "choices": [], "usage": {...}}
       data: [DONE]                  EventStream: server-sent events, each as soon as it is there

A client that goes away aborts its requests, whether it waits for a stream or for one answer:
until_gone waits for the end of the connection beside the work. A client that reads slowly gets
larger chunks: while its socket is full nothing more is sent, and the collector joins what comes.

vLLM: vllm/entrypoints/utils.py (V0); vllm/entrypoints/serve/utils/api_utils.py (V1).
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanoserve.extras.async_llm import AsyncLLM, RequestOutputCollector
from nanoserve.extras.server.errors import HTTPError
from nanoserve.output_processor import RequestOutput
from nanoserve.sampling_params import SamplingParams

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def to_event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {encode_json(data)}\n\n".encode()


async def until_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`. If the client goes away first, `work` is cancelled, and the result is
    None. The body of the request must have been read."""
    task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait((task, waiter), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        task.cancel()  # has no effect if it has ended
        await asyncio.gather(task, waiter, return_exceptions=True)
    return None if task.cancelled() else task.result()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends chunks while the client listens; then calls `close`, however it ended."""

    media_type = "text/event-stream"

    def __init__(
        self, chunks: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.chunks, self.close = chunks, close
        self.init_headers({"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_gone(receive, self._send(send))
        finally:
            await self.chunks.aclose()
            await self.close()

    async def _send(self, send: Send) -> None:
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        async for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class JsonResponse(Response):
    """An answer that is one JSON object."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encode_json(content).encode()


class EngineRequests:
    """The requests of one HTTP request in the engine: one for each prompt.

    Invariant: after abort() none is left.
    """

    def __init__(self, async_llm: AsyncLLM, request_id: str) -> None:
        self.async_llm = async_llm
        self.request_id = f"{request_id}-{uuid.uuid4().hex[:8]}"  # clients may use one id twice
        self.collectors: list[RequestOutputCollector] = []
        self._forwarders: list[asyncio.Task[None]] = []

    async def add(
        self, prompt: Any, params: SamplingParams, add_special_tokens: bool, **options: Any
    ) -> None:
        """Queue one more. options: priority, cache_salt, lora_request, trace_headers. Raises what
        AsyncLLM.generate raises."""
        collector = await self.async_llm.add_request(
            f"{self.request_id}-{len(self.collectors)}",
            prompt,
            params,
            tokenization_kwargs={"add_special_tokens": add_special_tokens},
            **options,
        )
        self.collectors.append(collector)

    async def final_outputs(self) -> list[RequestOutput]:
        """Wait for the end of all. Raises HTTPError if one failed, EngineDeadError."""
        last: dict[int, RequestOutput] = {}
        async for index, output in self.outputs():
            last[index] = output
        return [check_output(last.get(index)) for index in range(len(self.collectors))]

    async def outputs(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(index of the prompt, output), as they come. Raises as final_outputs does."""
        if len(self.collectors) == 1:
            while (output := await self.collectors[0].get()) is not None:
                yield 0, check_output(output)
            return
        queue: asyncio.Queue[tuple[int, RequestOutput | BaseException | None]] = asyncio.Queue(1)
        for index, collector in enumerate(self.collectors):
            self._forwarders.append(asyncio.ensure_future(_forward(index, collector, queue)))
        num_running = len(self.collectors)
        while num_running:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield index, check_output(item)

    async def abort(self) -> None:
        """End what has not ended."""
        for task in self._forwarders:
            task.cancel()
        if self.collectors:
            await self.async_llm.abort([each.request_id for each in self.collectors])


async def _forward(
    index: int, collector: RequestOutputCollector, queue: asyncio.Queue[tuple[int, Any]]
) -> None:
    """Put the outputs of one request into the queue; None or an error is the last item."""
    output: RequestOutput | BaseException | None
    is_over = False
    while not is_over:
        try:
            output = await collector.get()
        except Exception as error:
            output = error
        is_over = output is None or isinstance(output, BaseException)
        await queue.put((index, output))


def check_output(output: RequestOutput | None) -> RequestOutput:
    """Raise HTTPError if the request has failed: 400 if its grammar is the cause."""
    if output is None:
        raise HTTPError(500, "the request ended without an output.")
    for completion in output.outputs:
        if completion.finish_reason == "error":
            why = str(completion.stop_reason)
            status = 400 if "structured_outputs" in why else 500
            raise HTTPError(status, f"the request failed: {why}")
    return output
