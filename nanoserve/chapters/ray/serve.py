"""How do several engines look like one server?

Ray Serve starts them, watches them, and has the port. A replica is an engine with the application
of entrypoints/server/, which is also what `nanoserve serve` serves without Ray:

    nanoserve serve --data-parallel-size 4 --tensor-parallel-size 2

    client --> Ray Serve's proxy --> Ingress: reads the body --> PrefixAffinityRouter
                                                                       |  which replica?
               the messages of the answer, one by one          <--  Replica: its application

Ingress is a deployment of its own because the prompt is in the body, which Ray Serve's proxy does
not read before it chooses. With tensor_parallel_size each replica has a placement group: rank 0 in
the replica's process, and the other ranks beside it (executor.py).

A replica whose engine cannot go on is ended and started again by Ray Serve. Who waited for it gets
an error. /metrics, and the page at /, tell of the replica that answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from nanoserve.chapters import compose
from nanoserve.chapters.ray.executor import connect_to_ray
from nanoserve.chapters.ray.router import PrefixRouter
from nanoserve.entrypoints.server.errors import on_error
from nanoserve.kernels.device import choose_device
from nanoserve.sequence import EngineDeadError

MOST_REQUESTS = 10_000  # at a time, of a deployment: the engines have queues of their own
MakeApp = Callable[[Any, dict[str, Any]], tuple[Any, Any]]
SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")


class Call(NamedTuple):
    """A request on its way to a replica."""

    scope: dict[str, Any]  # ASGI's
    body: bytes
    prompt: str  # what the router looks at; "": nothing


class PrefixAffinityRouter(RequestRouter):
    """Ray Serve asks it; PrefixRouter decides."""

    def initialize_state(self) -> None:
        self.policy, self.num_running = PrefixRouter(), Counter[ReplicaID]()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The chosen one, then the others, in case that it takes no more requests."""
        if not candidate_replicas:
            return []
        loads = {each.replica_id: self.num_running[each.replica_id] for each in candidate_replicas}
        chosen = self.policy.choose(prompt_of(pending_request), loads)
        first = [each for each in candidate_replicas if each.replica_id == chosen]
        return [first, [each for each in candidate_replicas if each.replica_id != chosen]]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self.policy.add(prompt_of(pending_request), replica_id)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self.num_running[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self.num_running[replica_id] -= 1

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas have come or gone."""
        for gone in set(self.curr_replicas) - {each.replica_id for each in replicas}:
            self.policy.remove(gone)
        super().update_replicas(replicas)


def prompt_of(request: PendingRequest | None) -> str:
    return request.args[0].prompt if request is not None and request.args else ""


def read_prompt(body: bytes) -> str:
    """What equal prompts begin with equally: the prompt, or the messages of a chat as JSON."""
    try:
        given = json.loads(body)
        found = given.get("messages") or given.get("prompt") or ""
    except (ValueError, AttributeError):
        return ""
    return found if isinstance(found, str) else json.dumps(found)


@serve.deployment(max_ongoing_requests=MOST_REQUESTS)
class Replica:
    """An engine and its application."""

    def __init__(
        self, make_app: MakeApp, args: dict[str, Any], options: dict[str, Any], folder: str
    ) -> None:
        """folder: what relative paths begin at, on a machine that has it."""
        if os.path.isdir(folder):
            os.chdir(folder)
        self.llm, self.app = make_app(argparse.Namespace(**args), options)

    async def answer(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """The messages of the application's answer. If this is cancelled, the client has gone."""
        received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        sent: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        received.put_nowait({"type": "http.request", "body": call.body, "more_body": False})
        task = asyncio.create_task(self.app(dict(call.scope), received.get, sent.put))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:
            received.put_nowait({"type": "http.disconnect"})
            await asyncio.gather(task, return_exceptions=True)

    def check_health(self) -> None:
        """Ray Serve asks now and then, and starts another replica in the place of a dead one."""
        if self.llm.errored:
            raise self.llm.dead_error

    def __del__(self) -> None:
        if hasattr(self, "llm"):
            self.llm.shutdown()


@serve.deployment(max_ongoing_requests=MOST_REQUESTS, ray_actor_options={"num_cpus": 0})
class Ingress:
    """Reads each request and passes it on."""

    def __init__(self, replicas: Any) -> None:
        self.replicas = replicas.options(stream=True)

    async def __call__(self, request: Request) -> Response:
        body = await request.body()
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        messages = self.replicas.answer.remote(Call(scope, body, read_prompt(body)))
        try:
            start = await anext(aiter(messages))
        except ray.exceptions.RayActorError:  # which Ray has logged
            lost = EngineDeadError("the replica of this request has ended; try again.")
            return await on_error(request, lost)

        async def content() -> AsyncIterator[bytes]:
            try:
                async for message in messages:
                    yield message.get("body", b"")
            finally:
                messages.cancel()  # has no effect on one that has ended

        response = StreamingResponse(content(), start["status"])
        response.raw_headers = start["headers"]
        return response


def serve_replicas(make_app: MakeApp, args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Answer until a signal ends it. make_app(args, options): an AsyncLLM and its application."""
    if args.uds or not args.port:
        raise ValueError("--data-parallel-size needs --host and --port: Ray Serve has the socket.")
    engine_cls, given = compose(options)
    num_ranks = engine_cls.config_cls(**given).num_ranks
    resource = "GPU" if choose_device(options.get("device", "auto")).type == "cuda" else "CPU"
    how: dict[str, Any] = {"ray_actor_options": {f"num_{resource.lower()}s": 1}}
    if num_ranks > 1:
        options = {**options, "distributed_executor_backend": "ray"}
        how["placement_group_bundles"] = [{resource: 1.0}] * num_ranks
    connect_to_ray(args.data_parallel_size * num_ranks + 1)
    names = ("host", "port", "root_path", "ssl_keyfile", "ssl_certfile")
    serve.start(http_options={name: getattr(args, name) for name in names})
    replica: Any = Replica  # decorated classes are Deployments
    bound = replica.options(
        num_replicas=args.data_parallel_size,
        request_router_config=RequestRouterConfig(request_router_class=PrefixAffinityRouter),
        **how,
    ).bind(make_app, vars(args), options, os.getcwd())
    ingress: Any = Ingress
    with suppress(KeyboardInterrupt):
        try:
            serve.run(ingress.bind(bound), name="nanoserve")
            what = f"{args.data_parallel_size} replicas are served"
            print(f"{what} at {args.host}:{args.port} (Ctrl-C ends it).", file=sys.stderr)
            threading.Event().wait()
        finally:
            serve.shutdown()
            ray.shutdown()
    return 0
