"""How do several servers look like one?

    client --> front.py: the middleware of every server, then a proxy     --> replica 0
                 |  which one?  router.py, by the prompt and the loads    --> replica 1
                 |  is it there?  supervisor.py                           --> replica 2
               client <-- the answer, byte by byte as it comes

A replica is a complete server, so the front knows no endpoint but these:

    /health, /ping          200 while one replica serves
    /load, /metrics         of all replicas; those of replica 1 have the label engine="1"
    /engine?replica=1       one of them (0, if none is named); the page at / asks for it
    /v1/load_lora_adapter   every replica gets the adapter, those that start later, too; or none
    /v1/unload_lora_adapter every replica loses it

If a replica ends before a byte of its answer was sent, the request is run once more, by another
one: a request that ends each engine that runs it must not end them all. If a part was sent, a
stream ends with an error, as that of a server whose engine dies, and any other answer breaks off.
A replica that did not begin, as its queue is full or nobody listens there any more, costs nothing:
each of the others is asked. A client that goes away closes the connection to the replica, which
aborts its requests.

Left out: replicas on other machines (see Ray Serve), more than one front.

vLLM: vllm/v1/engine/core_client.py DPLBAsyncMPClient (V1): one API server, and engines that it
reaches over ZeroMQ; --data-parallel-external-lb leaves the proxy to others, which this one is.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from nanoserve.arg_utils import EngineArgs
from nanoserve.extras.replicas.router import CHUNK_CHARACTERS, MOST_CHUNKS
from nanoserve.extras.replicas.supervisor import NoReplicaError, Replica, Replicas
from nanoserve.extras.server.errors import (
    RETRY_AFTER,
    SHUTTING_DOWN,
    HTTPError,
    error_response,
)
from nanoserve.extras.server.launcher import Served
from nanoserve.extras.server.middleware import make_middleware
from nanoserve.extras.server.options import FrontendArgs, read_lora_module
from nanoserve.extras.server.streaming import DONE, to_event, until_gone

ATTEMPTS = 2  # replicas that a request may end
LONG_BODY = 2**16  # bytes: a longer one is read in a thread
MOST_CHARACTERS = CHUNK_CHARACTERS * MOST_CHUNKS  # of a prompt: the router looks at no more
# Of a body: what decides which blocks of a KV cache it can share, in the order of the prompt.
PROMPT_FIELDS = ("model", "cache_salt", "tools", "messages", "prompt", "input")
# Headers of one connection, and those that the front or its client makes.
NOT_PASSED_ON = {
    *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host"),
    *("content-length", "authorization", "expect", "x-forwarded-proto"),
}
NOT_SENT_BACK = {"connection", "keep-alive", "transfer-encoding", "date"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CONNECT_LIMIT = 10.0  # seconds; a replica is on this machine
METRICS_LIMIT = 5.0  # seconds; a replica that is silent must not hide the others
NONE_THERE = "no replica is there: they are being started again."


@dataclass
class FrontState:
    """What the middleware and the launcher know of a server (compare app.ServerState)."""

    async_llm: Replicas
    args: FrontendArgs
    num_requests: int = 0


@contextmanager
def serve_replicas(
    config: EngineArgs, frontend: FrontendArgs, log_stats: bool
) -> Iterator[tuple[Starlette, Served]]:
    """The application of several engines, each in a process of its own. Raises ValueError."""
    if ":" in config.device:
        raise ValueError(
            f"device {config.device!r} is one GPU, and data_parallel_size is "
            f"{frontend.data_parallel_size}. Use 'cuda' (CUDA_VISIBLE_DEVICES chooses which)."
        )
    replicas = Replicas(config, frontend, log_stats)
    try:
        yield build_front(replicas, frontend), replicas.served
    finally:
        replicas.shutdown()


def build_front(replicas: Replicas, args: FrontendArgs) -> Starlette:
    """The ASGI application; app.state.server is its FrontState."""
    state = FrontState(replicas, args)
    front = Front(state)
    routes = [
        Route("/health", front.health),
        Route("/ping", front.health),
        Route("/load", front.load),
        Route("/metrics", front.metrics),
        *(Route(path, front.change_adapters, methods=["POST"]) for path in (LOAD, UNLOAD)),
        Route("/{path:path}", front),  # an ASGI application: all methods
    ]
    handlers = {HTTPException: refuse}
    app = Starlette(routes=routes, middleware=make_middleware(state), exception_handlers=handlers)
    app.state.server = state
    return app


async def refuse(request: Request, error: Exception) -> Response:
    """The answer to a target that is no path, such as "*"."""
    return error_response(error)


class Front:
    """The endpoints; called itself, it lets a replica answer."""

    def __init__(self, state: FrontState) -> None:
        self.state, self.replicas = state, state.async_llm
        self.client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self.replicas.key}"},
            timeout=httpx.Timeout(None, connect=CONNECT_LIMIT),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,  # no proxy on the way to 127.0.0.1
        )
        self._changing = asyncio.Lock()  # adapters

    # -- any endpoint of a replica --

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await request.body() if request.method == "POST" else b""
        await until_gone(receive, self.forward(request, body, send))

    async def forward(self, request: Request, body: bytes, send: Send) -> None:
        """Send a replica's answer. Raises HTTPError if there is none."""
        prompt = None
        if request.method == "POST":
            prompt = await read_prompt(body) if self.replicas.reads_prompts else ""
        tried: list[Replica] = []
        ended: list[int] = []  # while they ran it
        while len(ended) < ATTEMPTS:
            replica = self.choose(request, prompt, tried)
            tried.append(replica)
            is_last = all(each in tried for each in self.replicas.alive)
            answer, asked = Answer(send), to_request(self.client, request, replica.url, body)
            try:
                with replica.counted(request.method == "POST"):
                    await answer.pass_on(self.client, asked, is_last)
                return
            except BusyError:
                pass
            except httpx.TransportError as error:
                if answer.has_begun:
                    await answer.break_off(replica)
                    return
                if not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
                    ended.append(replica.index)
        names = " and ".join(map(str, ended))
        message = f"replicas {names} ended while they ran this request. It may be the cause"
        raise HTTPError(500, f"{message}, and is not run again.")

    def choose(self, request: Request, prompt: str | None, tried: list[Replica]) -> Replica:
        """Raises HTTPError 503 if no replica is there, or 404 for one that does not exist."""
        try:
            if to_path(request, "path") == "/engine":
                return self.replicas.get(request.query_params.get("replica", "0"), tried)
            return self.replicas.choose(prompt, tried)
        except NoReplicaError:
            why = SHUTTING_DOWN if self.replicas.errored else NONE_THERE
            raise HTTPError(503, why, headers=RETRY_AFTER) from None
        except ValueError as error:
            raise HTTPError(404, str(error), "replica") from None

    # -- endpoints of all replicas --

    async def health(self, request: Request) -> Response:
        """Are requests served?"""
        return Response(status_code=200 if self.replicas.alive else 503)

    async def load(self, request: Request) -> Response:
        """How many requests are being served, and by whom? None: that replica is not there."""
        each = [r.num_requests if r.port else None for r in self.replicas.replicas]
        return JSONResponse({"server_load": self.state.num_requests, "replicas": each})

    async def metrics(self, request: Request) -> Response:
        """All metrics of all replicas."""
        there = self.replicas.alive
        asked = [self.client.get(f"{r.url}/metrics", timeout=METRICS_LIMIT) for r in there]
        found = await asyncio.gather(*asked, return_exceptions=True)
        texts = {
            replica.index: answer.text
            for replica, answer in zip(there, found, strict=True)
            if isinstance(answer, httpx.Response)  # else: it has just ended, or is silent
            and answer.status_code == 200
        }
        return Response(merge_metrics(texts), media_type="text/plain; version=0.0.4")

    async def change_adapters(self, request: Request) -> Response:
        """Load or unload an adapter everywhere, or, if a replica refuses to load it, nowhere."""
        body, path = await request.body(), to_path(request, "path")
        answers: dict[str, httpx.Response] = {}  # of those that serve: one that starts is told then
        async with self._changing:
            there, before = self.replicas.change(with_adapter(self.replicas.frontend, path, body))
            for url in there:
                with suppress(httpx.TransportError):  # ended: another one comes, and is told
                    answer = await ask(self.client, to_request(self.client, request, url, body))
                    answers[url] = answer
                    if path == LOAD and answer.status_code != 200:
                        break
            done = [url for url, answer in answers.items() if answer.status_code == 200]
            is_done = len(done) == len(answers) > 0 if path == LOAD else bool(done)
            if not is_done:
                self.replicas.change_back(before)
                for url in done:
                    name = json.loads(body)["lora_name"]
                    with suppress(httpx.TransportError):
                        await self.client.post(url + UNLOAD, json={"lora_name": name})
        if not answers:  # it may be the adapter that has ended them
            raise HTTPError(503, NONE_THERE, headers=RETRY_AFTER)
        told = [each for each in answers.values() if (each.status_code == 200) == is_done][-1]
        kind = told.headers.get("content-type")
        return Response(told.content, told.status_code, media_type=kind)


async def ask(
    client: httpx.AsyncClient, request: httpx.Request, stream: bool = False
) -> httpx.Response:
    """A replica's answer. Raises httpx.TransportError."""
    try:
        return await client.send(request, stream=stream)
    except AttributeError as error:  # anyio's, if it has ended when it was just connected
        raise httpx.ConnectError(str(error)) from error


class BusyError(Exception):
    """A replica has not begun a request: its queue is full."""


class Answer:
    """An answer on its way from a replica to the client."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.has_begun = False  # the client has a part of it
        self._is_stream = False
        self._rest = b""  # of a stream: the beginning of an event, whose end is still to come

    async def pass_on(
        self, client: httpx.AsyncClient, request: httpx.Request, is_last: bool = True
    ) -> None:
        """Send all of it. Raises httpx.TransportError if the replica ends, BusyError if it takes no
        request now and is not the last one to be asked."""
        response = await ask(client, request, stream=True)
        try:
            if response.status_code == 503 and not is_last:
                raise BusyError
            async for chunk in response.aiter_raw():
                await self._begin(response)
                if self._is_stream:  # whole events, so that an error can follow
                    whole, end, self._rest = (self._rest + chunk).rpartition(b"\n\n")
                    chunk = whole + end
                await self.send({"type": "http.response.body", "body": chunk, "more_body": True})
            await self._begin(response)
        finally:
            await response.aclose()
        await self.send({"type": "http.response.body", "body": self._rest})

    async def _begin(self, response: httpx.Response) -> None:
        """Send status and headers, unless that is done: with the first bytes of the body, so that a
        request whose replica ends before can still be run again."""
        if self.has_begun:
            return
        self.has_begun = True
        self._is_stream = "event-stream" in response.headers.get("content-type", "")
        headers = [each for each in response.headers.raw if is_kept(each[0], NOT_SENT_BACK)]
        status = response.status_code
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def break_off(self, replica: Replica) -> None:
        """The replica has ended in the middle. A stream tells it; of anything else the end is
        missing, so that the client does not take it for complete."""
        message = f"replica {replica.index} has ended. What it sent is not complete."
        if not self._is_stream:
            raise ConnectionError(message)
        event = to_event(HTTPError(500, message).to_json()) + DONE
        await self.send({"type": "http.response.body", "body": event})


def to_request(client: httpx.AsyncClient, request: Request, url: str, body: bytes) -> httpx.Request:
    """The same request for the replica at this address. It is told by which name and scheme it was
    asked for, as it may answer with an address; the path is passed on as it was written."""
    query = request.scope["query_string"]
    path = to_path(request, "raw_path") + (b"?" + query if query else b"")
    headers = [each for each in request.headers.raw if is_kept(each[0], NOT_PASSED_ON)]
    headers += [
        (b"host", request.headers.get("host", "localhost").encode("latin-1")),
        (b"x-forwarded-proto", request.scope.get("scheme", "http").encode()),
    ]
    asked = client.build_request(
        request.method, url, headers=headers, content=body or None, extensions={"target": path}
    )
    asked.method = request.method  # httpx writes it in capitals: "get" is not GET
    return asked


def to_path(request: Request, kind: str) -> Any:
    """The "path" of a request, or its "raw_path" (bytes), as a replica knows it: behind the path
    under which a proxy shows this server."""
    path, root = request.scope[kind], request.scope.get("root_path", "")
    return path.removeprefix(root if isinstance(path, str) else root.encode())


def is_kept(name: bytes, dropped: set[str]) -> bool:
    return name.decode("latin-1").lower() not in dropped


async def read_prompt(body: bytes) -> str:
    """A text by which the router knows a prompt, as it stands in the body: requests whose prompts
    begin alike have texts that begin alike. "" if there is none."""
    if len(body) > LONG_BODY:
        return await asyncio.to_thread(make_prefix, body)
    return make_prefix(body)


def make_prefix(body: bytes) -> str:
    """
    >>> make_prefix(b'{"prompt": "Once upon", "model": "demo", "top_p": 0.5}')
    '"demo""Once upon"'
    """
    try:
        given = json.loads(body)
        if not isinstance(given, dict):
            return ""
        found = [
            json.dumps(shorten(given[each]), ensure_ascii=False)
            for each in PROMPT_FIELDS
            if each in given
        ]
    except (ValueError, RecursionError):
        return ""
    return "".join(found)


def shorten(value: Any) -> Any:
    """What the router looks at of a long text or list."""
    return value[:MOST_CHARACTERS] if isinstance(value, (str, list)) else value


def with_adapter(frontend: FrontendArgs, path: str, body: bytes) -> FrontendArgs:
    """The options of a replica that starts when this request was answered with 200. The same object
    if it never will be."""
    try:
        given = json.loads(body)
        name, folder = given["lora_name"], frontend.lora_folder or ""
        others = [each for each in frontend.lora_modules if read_lora_module(each)[0] != name]
        if path != LOAD:
            return replace(frontend, lora_modules=tuple(others))
        module = {"name": name, "path": os.path.join(folder, given["lora_path"])}
        return replace(frontend, lora_modules=(*others, json.dumps(module)))
    except (ValueError, TypeError, KeyError, RecursionError):
        return frontend


def merge_metrics(texts: Mapping[int, str]) -> str:
    """One text of several replicas' /metrics: the comments of each metric once, then the samples of
    all replicas, each with its number as the label "engine"."""
    comments: dict[str, list[str]] = {}  # metric: its HELP and TYPE
    samples: dict[str, list[str]] = {}
    for index, text in texts.items():
        name = ""
        for line in text.splitlines():
            if line.startswith("#"):
                name = line.split()[2]
                found = comments.setdefault(name, [])
                found += [line] * (line not in found)
            else:
                samples.setdefault(name, []).append(with_engine(line, index))
    lines = [line for name in comments for line in (*comments[name], *samples.get(name, ()))]
    return "".join(f"{line}\n" for line in lines)


def with_engine(sample: str, index: int) -> str:
    """
    >>> with_engine('a_total{engine="0",x="y"} 3.0', 1), with_engine("b 4.0", 1)
    ('a_total{engine="1",x="y"} 3.0', 'b{engine="1"} 4.0')
    """
    label = f'engine="{index}"'
    if 'engine="0"' in sample:
        return sample.replace('engine="0"', label, 1)
    if "{" in sample:
        return sample.replace("{", f"{{{label},", 1)
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
