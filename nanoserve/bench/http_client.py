"""What does a client see of a server under load? Requests over HTTP, each at its own moment.

    arrival   0.0 s    0.4    0.5                    drawn before the run, the same for all servers
    request   |--------t-t-t-t-t                     t: tokens arrive
                       |------t-t-t-t-t-t
                              |-----t-t-t-t

The loop is open: a request is sent at its moment, however many answers are still to come. Times
count from that moment, not from when the client got round to sending; so waits that a slow server
or client causes are all counted. `largest_delay` says how late the client was, `cpu_seconds` what
it took from the server that runs on the same machine.

The client shall cost as little as possible: while requests run, it only notes which bytes came
when. It reads them (HTTP chunks, server-sent events, JSON) when all have ended. Each request has a
connection of its own, which the server closes at the end of the answer.

Only the standard library is imported: the client runs in the environment of every server.

vLLM: vllm/benchmarks/lib/endpoint_request_func.py (with aiohttp), serve.py.
"""

from __future__ import annotations

import asyncio
import json
import time
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

HEAD_START = 0.05  # seconds to make the tasks of all requests, before the first is sent


@dataclass
class Stream:
    """The tokens of one request."""

    times: list[float]  # seconds from its arrival to each token
    token_ids: list[int]


@dataclass
class Load:
    """What a server answered to a number of requests."""

    streams: list[Stream]  # in the order of the requests
    seconds: float  # from the start to the last token
    cpu_seconds: float  # of the client
    largest_delay: float  # seconds from the arrival of a request until the client had sent it


class Exchange(asyncio.Protocol):
    """One connection: the request, and which bytes of the answer came when."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.sent_at = 0.0
        self.received: list[bytes] = []
        self.received_at: list[float] = []  # time.perf_counter()
        self.is_over = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        transport.write(self.request)
        self.sent_at = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        self.received_at.append(time.perf_counter())
        self.received.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.is_over.done():
            self.is_over.set_result(None)


def send_all(
    port: int, path: str, bodies: list[dict[str, Any]], arrivals: list[float], limit: float
) -> Load:
    """Send each body to this machine's `port` at its arrival, in seconds from the start; read the
    streams. Raises ConnectionError for a server that does not answer, or ends within an answer;
    TimeoutError if an answer is not complete `limit` seconds after the last arrival; and
    RuntimeError for an answer that is an error, or that has no token ids."""
    requests = [make_request(path, body) for body in bodies]
    cpu_start = time.process_time()
    start, exchanges = asyncio.run(exchange_all(port, requests, arrivals, limit))
    cpu_seconds = time.process_time() - cpu_start
    streams, ends, delays = [], [], []
    for exchange, arrival in zip(exchanges, arrivals, strict=True):
        arrived_at = start + arrival
        tokens = list(read_tokens(exchange))
        times = [moment - arrived_at for moment, _ in tokens]
        streams.append(Stream(times, [token_id for _, token_id in tokens]))
        ends += times[-1:] and [times[-1] + arrival]
        delays.append(exchange.sent_at - arrived_at)
    return Load(streams, max(ends, default=0.0), cpu_seconds, max(delays))


def make_request(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


async def exchange_all(
    port: int, requests: list[bytes], arrivals: list[float], limit: float
) -> tuple[float, list[Exchange]]:
    """The start (of time.perf_counter()), and the exchanges, all over."""
    loop = asyncio.get_running_loop()
    start = time.perf_counter() + HEAD_START

    async def exchange(request: bytes, arrival: float) -> Exchange:
        await asyncio.sleep(start + arrival - time.perf_counter())
        _, its = await loop.create_connection(lambda: Exchange(request), "127.0.0.1", port)
        await its.is_over
        return its

    tasks = map(exchange, requests, arrivals)
    try:
        exchanges = await asyncio.wait_for(asyncio.gather(*tasks), max(arrivals) + limit)
    except asyncio.TimeoutError as error:  # before Python 3.11, not the built-in one
        message = f"no complete answer {limit:g} s after the last request was sent"
        raise TimeoutError(message) from error
    return start, exchanges


# -- an answer --


def read_tokens(exchange: Exchange) -> Iterator[tuple[float, int]]:
    """(when it came, token id) of each token, from the events of a streamed completion."""
    for moment, event in read_events(exchange):
        if event == b"[DONE]":
            return
        chunk = json.loads(event)
        if "error" in chunk:
            raise RuntimeError(f"the server answered: {chunk['error']}")
        for choice in chunk["choices"]:
            if choice.get("token_ids") is None:
                raise RuntimeError(f"no token ids (return_token_ids) in the answer: {event!r}")
            yield from ((moment, token_id) for token_id in choice["token_ids"])
    raise ConnectionError("the server ended an answer before its [DONE]")


def read_events(exchange: Exchange) -> Iterator[tuple[float, bytes]]:
    """(when it was complete, data) of each server-sent event."""
    buffer = b""
    for moment, chunk in read_chunks(exchange):
        *events, buffer = (buffer + chunk).split(b"\n\n")
        for event in events:
            if event.startswith(b"data:"):
                yield moment, event.removeprefix(b"data:").strip()


def read_chunks(exchange: Exchange) -> Iterator[tuple[float, bytes]]:
    """(when it was complete, content) of each chunk of an answer's body, until the bytes end."""
    content = b"".join(exchange.received)
    ends = list(accumulate(map(len, exchange.received)))  # of what came at each moment
    head, _, body = content.partition(b"\r\n\r\n")
    status = head.split(b"\r\n")[0].decode("latin-1")
    if " 200 " not in f"{status} ":
        shown = body[:1000].decode("utf-8", "replace")
        raise RuntimeError(f"the server answered {status}: {shown}" if status else "no answer")
    at = len(content) - len(body)
    while (line_end := content.find(b"\r\n", at)) >= 0:
        size = int(content[at:line_end], 16)
        at = line_end + 2 + size + 2
        if size == 0 or at > len(content):
            return
        yield exchange.received_at[bisect_right(ends, at - 1)], content[line_end + 2 : at - 2]
