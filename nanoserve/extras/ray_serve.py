"""How do engines on several machines look like one server?

Ray Serve starts them, watches them, and has the port. A replica is an engine with the FastAPI
application of extras/server, which is also what `nanoserve serve` serves:

    serve run nanoserve.extras.ray_serve:app                                      the demo model
    serve run nanoserve.extras.ray_serve:build_app model=Qwen/Qwen3-0.6B \\
        data_parallel_size=4 tensor_parallel_size=2

    client --> Ray Serve's proxy --> Ingress: reads the body --> PrefixAffinityRouter
                                                                    |  which replica?
               the messages of the answer, one by one       <-- EngineReplica   its FastAPI app

The arguments are the engine's options and the server's, data_parallel_size is the number of
replicas. With tensor_parallel_size, each replica has a placement group: rank 0 in the replica's
process, and the other ranks beside it (ray_executor.py).

Ingress is a deployment of its own because the prompt is in the body, which Ray Serve's proxy does
not read before it chooses. The choice is that of replicas/router.py. Ray Serve has a router of this
kind, ray.serve.llm's PrefixCacheAffinityRouter, but its module needs the packages of ray[llm].

A replica whose engine cannot go on is ended and started again by Ray Serve. A request of a replica
that ends is run once more by another one, if nothing of its answer was sent.

Left out: what is of one engine, if there are several: /metrics (Ray has metrics of its own), /load,
/engine, and adapters that clients load. Addresses and certificates are Ray Serve's.

Ray: python/ray/serve/request_router.py; vLLM: vllm/v1/engine/utils.py CoreEngineActorManager (V1),
which puts the engines of one server into Ray actors.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from types import SimpleNamespace
from typing import Any, get_args, get_origin, get_type_hints

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoserve.arg_utils import EngineArgs, as_engine_config, python_value
from nanoserve.config import ALIASES, EngineConfig
from nanoserve.device import choose_device
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.ray_executor import copied_environment, enter
from nanoserve.extras.replicas.front import read_prompt
from nanoserve.extras.replicas.router import PrefixRouter, RoundRobin, Router
from nanoserve.extras.server.app import build_app as build_server
from nanoserve.extras.server.errors import HTTPError
from nanoserve.extras.server.middleware import HostMiddleware, make_middleware
from nanoserve.extras.server.options import FrontendArgs
from nanoserve.extras.server.streaming import DONE, to_event, until_gone
from nanoserve.logger import init_logger

try:
    import ray
    from ray import serve
    from ray.serve.config import RequestRouterConfig
    from ray.serve.handle import DeploymentHandle
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise ImportError(f'Ray Serve is not installed ({error}): pip install -e ".[ray]".') from error

logger = init_logger(__name__)
ATTEMPTS = 2  # replicas that a request may end
MOST_REQUESTS = 10_000  # at a time, of a deployment: the engines have queues of their own
ANY_HOST = "0.0.0.0"  # Ray Serve knows where it listens; see LoopbackMiddleware
OF_RAY_SERVE = {  # what it has in their place, in its config file
    **{name: f"http_options.{name}" for name in ("host", "port", "root_path")},
    **{name: f"http_options.{name}" for name in ("ssl_keyfile", "ssl_certfile")},
    "uds": "http_options.host and http_options.port",
    "shutdown_timeout": "graceful_shutdown_timeout_s of the deployment EngineReplica",
    "uvicorn_log_level": "logging_config.log_level",
    "disable_uvicorn_access_log": "logging_config.enable_access_log",
}
SCOPE = (  # what a replica is told of a request
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)
OF_ONE_ENGINE = ("/metrics", "/load", "/engine")


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """What `serve run` starts: options by name, as text (`NAME=VALUE`) or as values (of a YAML
    file). The replicas have this process's environment variables of vLLM, nanoserve and Hugging
    Face, unless their machines have others. Raises ValueError or TypeError for a wrong option."""
    frontend_names = {each.name for each in fields(FrontendArgs)}
    for name, where in OF_RAY_SERVE.items():
        if name in args:
            raise ValueError(f"{name} is an option of Ray Serve: {where} in its config file.")
    if key := os.environ.get("VLLM_API_KEY"):
        args = {"api_key": key, **args}
    frontend = FrontendArgs(**read_values(FrontendArgs, args, frontend_names), host=ANY_HOST)
    others = read_values(EngineConfig, args, set(args) - frontend_names)
    config = as_engine_config(EngineArgs(**others))
    num_replicas, num_ranks = frontend.data_parallel_size, config.world_size
    if frontend.lora_modules and not config.enable_lora:
        raise ValueError("lora_modules needs enable_lora=true.")
    if frontend.lora_folder is not None and num_replicas > 1:
        raise ValueError(
            f"lora_folder: a client would load an adapter into one of {num_replicas} replicas. "
            "Name the adapters in lora_modules."
        )
    device = config.device.partition(":")[0]  # Ray says which GPU
    if device == "auto" and (device := choose_device("auto").type) == "cpu":
        logger.warning(
            "The replicas will run on CPUs, as this machine has no GPU. With device=cuda, they run "
            "on GPUs of the cluster."
        )
    engine = {**others, "device": device}
    resources = {"num_cpus": int(device == "cpu"), "num_gpus": int(device == "cuda")}
    place: dict[str, Any] = {}
    if num_ranks > 1:
        if config.distributed_executor_backend not in (None, "ray"):
            given = config.distributed_executor_backend
            raise ValueError(f"distributed_executor_backend is {given!r}; a replica needs 'ray'.")
        engine["distributed_executor_backend"] = "ray"
        bundle = {"GPU" if device == "cuda" else "CPU": 1.0}
        place["placement_group_bundles"] = [bundle] * num_ranks
    replicas: Any = EngineReplica  # decorated classes are Deployments
    ingress: Any = Ingress
    routing = RequestRouterConfig(
        request_router_class=PrefixAffinityRouter,  # type: ignore[arg-type]
        request_router_kwargs={"router_policy": frontend.router_policy},
    )
    configured = replicas.options(
        num_replicas=num_replicas,
        ray_actor_options=resources,
        request_router_config=routing,
        **place,
    )
    bound = configured.bind(engine, asdict(frontend), os.getcwd(), copied_environment())
    return ingress.bind(bound, asdict(frontend))


def read_values(cls: type, args: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Those of `args` that are in `names`. Text becomes a number, True or False where the field of
    `cls` is one, and several texts where it has several: '["one", "two"]'.

    >>> read_values(EngineConfig, {"model": "8", "block_size": "8"}, {"model", "block_size"})
    {'model': '8', 'block_size': 8}
    """
    hints, values = get_type_hints(cls), {}
    for name in sorted(names & set(args)):
        value, hint = args[name], hints.get(ALIASES.get(name, name))
        if isinstance(value, str) and {int, float, bool} & {hint, *get_args(hint)}:
            value = python_value(value.title() if hint is bool else value)
        elif isinstance(value, str) and get_origin(hint) is tuple and value.startswith("["):
            value = python_value(value)
        values[name] = value
    return values


@dataclass(frozen=True)
class HTTPCall:
    """A request on its way to a replica."""

    scope: dict[str, Any]  # of ASGI
    body: bytes
    prompt: str  # what the router looks at; "": nothing


class PrefixAffinityRouter(RequestRouter):
    """The replica that knows most of the prompt, unless it has too much to do; see router.py."""

    def initialize_state(self, router_policy: str = "cache_aware", **thresholds: Any) -> None:
        """router_policy: of FrontendArgs. thresholds: of PrefixRouter."""
        is_aware = router_policy == "cache_aware"
        self.policy: Router[ReplicaID] = PrefixRouter(**thresholds) if is_aware else RoundRobin()
        self.num_running: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The chosen one, then the others, in case that it takes no more requests."""
        if not candidate_replicas:
            return []
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # when all are full
        loads = {each.replica_id: self.num_running[each.replica_id] for each in candidate_replicas}
        chosen = self.policy.choose(prompt_of(pending_request), loads)
        ranks: list[list[RunningReplica]] = [[], []]
        for each in candidate_replicas:
            ranks[each.replica_id != chosen].append(each)
        return ranks

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self.num_running[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self.num_running[replica_id] -= 1

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        self.policy.add(prompt_of(pending_request), replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas have come or gone."""
        gone = set(self.curr_replicas) - {each.replica_id for each in replicas}
        super().update_replicas(replicas)
        for replica_id in gone:
            self.policy.remove(replica_id)


def prompt_of(pending_request: PendingRequest | None) -> str:
    return pending_request.args[0].prompt if pending_request and pending_request.args else ""


@serve.deployment(max_ongoing_requests=MOST_REQUESTS)
class EngineReplica:
    """An engine and its application."""

    def __init__(
        self,
        engine: dict[str, Any],
        frontend: dict[str, Any],
        folder: str,
        environment: dict[str, str],
    ) -> None:
        """folder: what relative paths begin at, on a machine that has it."""
        for name, value in environment.items():
            os.environ.setdefault(name, value)
        enter(folder)
        args = FrontendArgs(**frontend)
        self.async_llm = AsyncLLM(EngineArgs(**engine), chat_template=args.chat_template)
        self.app = build_server(self.async_llm, args)

    async def answer(self, call: HTTPCall) -> AsyncIterator[Message]:
        """The messages of the application's answer. If this is cancelled, the client has gone."""
        self.check_health()
        received: asyncio.Queue[Message] = asyncio.Queue()
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        received.put_nowait({"type": "http.request", "body": call.body, "more_body": False})

        async def run() -> None:
            try:
                await self.app(dict(call.scope), received.get, sent.put)
            finally:
                sent.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            while (message := await sent.get()) is not None:
                yield message
            await task  # its error, if it has one
        finally:
            received.put_nowait({"type": "http.disconnect"})
            await asyncio.gather(task, return_exceptions=True)

    def check_health(self) -> None:
        """Asked by Ray Serve now and then. Without its engine this process ends: then another
        replica is started, and runs the requests. (Ray Serve would take an error for the end of the
        replica at the third time only, which is half a minute later.)"""
        if self.async_llm.errored:
            error = self.async_llm.dead_error
            logger.error("this replica ends, as its engine has: %s", error.__cause__ or error)
            os._exit(1)

    def __del__(self) -> None:
        if hasattr(self, "async_llm"):
            self.async_llm.shutdown()


@serve.deployment(max_ongoing_requests=MOST_REQUESTS, ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Ingress:
    """Reads each request and passes it on. Has the middleware of every server."""

    def __init__(self, replicas: DeploymentHandle, frontend: dict[str, Any]) -> None:
        self.args = FrontendArgs(**frontend)
        self.replicas = replicas.options(stream=True)

    def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Ray Serve."""
        passing: ASGIApp = Passing(self.replicas, self.args)
        if not self.args.api_key:
            passing = LoopbackMiddleware(passing)
        routes = [Route("/{path:path}", passing)]  # all methods
        middleware = make_middleware(IngressState(self.args))
        return Starlette(routes=routes, middleware=middleware)


@dataclass
class IngressState:
    """What the middleware knows of a server (compare app.ServerState)."""

    args: FrontendArgs
    num_requests: int = 0
    # Ray Serve looks after the engines.
    async_llm: Any = field(default_factory=lambda: SimpleNamespace(errored=False))


class LoopbackMiddleware(HostMiddleware):
    """HostMiddleware of what was sent to a loopback address. Ray Serve may listen at others, too,
    where clients know this machine by its name."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = (scope.get("server") or ("127.0.0.1",))[0]
        if FrontendArgs(host=address).is_public:
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


class Passing:
    """The ASGI application that lets a replica answer."""

    def __init__(self, replicas: DeploymentHandle, args: FrontendArgs) -> None:
        self.replicas = replicas
        self.args = args

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path in OF_ONE_ENGINE and self.args.data_parallel_size > 1:
            message = f"{path} is of one engine, and there are several replicas"
            raise HTTPError(404, f"{message}: Ray's dashboard and metrics have them all.")
        request = Request(scope, receive)
        body = await request.body() if scope["method"] == "POST" else b""
        plain = {name: scope[name] for name in SCOPE if name in scope}
        call = HTTPCall(plain, body, await read_prompt(body))
        await until_gone(receive, self.pass_on(call, send))

    async def pass_on(self, call: HTTPCall, send: Send) -> None:
        """Send a replica's answer. Raises HTTPError if there is none."""
        for _ in range(ATTEMPTS):
            messages: Any = self.replicas.answer.remote(call)
            begin: Message | None = None
            try:
                async for message in messages:
                    begin = begin or message
                    await send(message)
                return
            except ray.exceptions.RayActorError as error:
                if begin is not None:
                    return await break_off(begin, send, error)
            finally:
                messages.cancel()  # has no effect on one that has ended
        message = f"{ATTEMPTS} replicas ended while they ran this request. It may be the cause"
        raise HTTPError(500, f"{message}, and is not run again.")


async def break_off(begin: Message, send: Send, error: Exception) -> None:
    """The replica has ended in the middle. A stream tells it; of anything else the end is missing,
    so that the client does not take it for complete."""
    message = "the replica has ended. What it sent is not complete."
    kind = dict(begin.get("headers", ())).get(b"content-type", b"")
    if b"event-stream" not in kind:
        raise ConnectionError(message) from error
    event = to_event(HTTPError(500, message).to_json()) + DONE
    await send({"type": "http.response.body", "body": event})


def __getattr__(name: str) -> serve.Application:
    """app: the demo model. Built when it is asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return build_app({})
