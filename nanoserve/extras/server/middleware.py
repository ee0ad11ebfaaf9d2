"""What is checked before an endpoint sees a request?

From the outside to the inside; each is an ASGI application around the next:

    XRequestIdMiddleware        the answer gets X-Request-Id: the client's own, or a random one
    ErrorMiddleware             whatever fails inside is a 500 in OpenAI's shape
    HostMiddleware              403 for a web page whose name was made to lead to this machine;
                                only if no key is asked for, and other machines cannot reach it
    AuthenticationMiddleware    401 without one of the API keys
    BodyMiddleware              503 while shutting down, 413 too large, 408 too slow, 400 no JSON;
                                the endpoint gets its body in one piece

A body is read completely before the endpoint begins, so a client that sends slowly costs a socket
and no thread, and at most max_body_size bytes. Nothing here looks at the answer's chunks.

vLLM: vllm/entrypoints/serve/middleware/ (V1). It has no limit of the body.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import uuid
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanoserve.exceptions import brief
from nanoserve.extras.server.errors import (
    ENGINE_DEAD,
    RETRY_AFTER,
    SHUTTING_DOWN,
    HTTPError,
    error_response,
)
from nanoserve.extras.server.options import FrontendArgs
from nanoserve.logger import init_logger

logger = init_logger(__name__)

# Without a key: what probes and scrapers read, and the page, which asks for the key itself.
OPEN_PATHS = {"/", "/health", "/ping", "/version", "/metrics"}
MAX_ID_LENGTH = 200  # of X-Request-Id


class AnyServerState(Protocol):
    """What is known here of a server: app.ServerState, or the state of a front of replicas."""

    async_llm: Any  # has errored, dead_error, shutdown
    args: FrontendArgs
    num_requests: int


class ClientGone(Exception):
    """The connection ended while the request arrived. Nobody reads an answer."""


class XRequestIdMiddleware:
    """Gives each answer a name that the client's log and a bug report can have in common. An
    endpoint finds it in scope["state"]["request_id"]."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")[:MAX_ID_LENGTH]
        request_id = given or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = given or None

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        return await self.app(scope, receive, send_with_id)


class ErrorMiddleware:
    """Answers what fails inside. If the answer has begun, the connection ends without its end, so
    that the client does not take it for complete."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, send_noted)
        except (ClientGone, asyncio.CancelledError):
            pass  # nobody reads an answer: cancelled is what is left when the server ends
        except Exception as error:
            if scope["type"] != "http" or has_begun:
                raise
            await error_response(error)(scope, receive, send)


class HostMiddleware:
    """Protects a server that only this machine reaches, and that asks for no key. Another site may
    have its own name lead to 127.0.0.1 (DNS rebinding). Then the browser takes the site's page for
    one of this server, and lets it read the answers. But its requests have the site's name in the
    header Host, and others have localhost or an address. (vLLM has no such check.)"""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if given and not is_local_host(given):
            allowed = "localhost or an address, unless the server has an --api-key"
            raise HTTPError(403, f"the header Host is {brief(given)}; allowed: {allowed}.")
        await self.app(scope, receive, send)


def is_local_host(host: str) -> bool:
    """Is a Host such as "localhost:8000" or "[::1]:8000" one that needs no name server?"""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:  # "[", for example
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:  # a name
        return False
    return True


class AuthenticationMiddleware:
    """Refuses requests without one of the API keys, except for OPEN_PATHS. (vLLM guards /v1 alone,
    and leaves /tokenize open.)"""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self.app = app
        self.api_keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        root = scope.get("root_path", "")
        if scope["type"] == "http" and scope["path"] not in {root + path for path in OPEN_PATHS}:
            self.check(Headers(scope=scope).get("authorization", ""))
        await self.app(scope, receive, send)

    def check(self, authorization: str) -> None:
        """Raise HTTPError 401 unless it is "Bearer <one of the keys>". It takes as long for a
        nearly right key as for a wrong one."""
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode("latin-1")  # as headers are decoded
        is_right = [hmac.compare_digest(given, each) for each in self.api_keys]
        if scheme.lower() != "bearer" or not any(is_right):
            raise HTTPError(
                401,
                "the header Authorization must be 'Bearer KEY' with a key of this server.",
                headers={"WWW-Authenticate": "Bearer"},
            )


class BodyMiddleware:
    """Reads the body of a POST, within limits, and gives it to the endpoint in one piece.

    Invariant: state.num_requests is the number of requests that are inside.
    """

    def __init__(self, app: ASGIApp, state: AnyServerState) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        self.check_admission()
        self.state.num_requests += 1
        try:
            body = await self.read(Headers(scope=scope), receive)
            messages = [{"type": "http.request", "body": body, "more_body": False}]
            del body  # the endpoint may free it

            async def receive_body() -> Message:
                return messages.pop() if messages else await receive()

            await self.app(scope, receive_body, send)
        finally:
            self.state.num_requests -= 1

    def check_admission(self) -> None:
        """Raise HTTPError 503 if no request is served now."""
        state, limit = self.state, self.state.args.limit_concurrency
        if state.async_llm.errored:
            why = ENGINE_DEAD if state.async_llm.dead_error.__cause__ else SHUTTING_DOWN
            raise HTTPError(503, why)
        if limit is not None and state.num_requests >= limit:
            message = f"{limit} requests are being served already (limit_concurrency)."
            raise HTTPError(503, message, headers=RETRY_AFTER)

    async def read(self, headers: Headers, receive: Receive) -> bytes:
        """The whole body. Raises HTTPError 400, 408, 413 or 415, ClientGone."""
        args = self.state.args
        encoding = headers.get("content-encoding", "identity")
        if encoding.strip().lower() != "identity":
            message = f"the header Content-Encoding is {brief(encoding)}; send the body as it is."
            raise HTTPError(415, message)
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > args.max_body_size:
            raise self.too_large(f"{length[:20]} bytes")
        try:
            body = await asyncio.wait_for(self.read_chunks(receive), args.request_timeout)
        except asyncio.TimeoutError:
            seconds = args.request_timeout
            raise HTTPError(408, f"the body did not arrive within {seconds} seconds.") from None
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if body and media_type != "application/json":
            raise HTTPError(
                400, f"the header Content-Type is {brief(media_type)}; allowed: application/json."
            )
        return body

    async def read_chunks(self, receive: Receive) -> bytes:
        chunks, size, has_more = [], 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self.state.args.max_body_size:
                raise self.too_large("more")
            has_more = message.get("more_body", False)
        return b"".join(chunks)

    def too_large(self, size: str) -> HTTPError:
        limit = self.state.args.max_body_size
        return HTTPError(
            413, f"a body may have {limit} bytes (max_body_size); this one has {size}."
        )


def make_middleware(state: AnyServerState) -> list[Middleware]:
    """From the outside to the inside. Answers to other origins have their headers whatever
    happens."""
    args = state.args
    layers = [Middleware(XRequestIdMiddleware)]
    if args.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=args.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
            )
        )
    layers.append(Middleware(ErrorMiddleware))
    if not (args.is_public or args.uds or args.api_key):
        layers.append(Middleware(HostMiddleware))
    if args.api_key:
        layers.append(Middleware(AuthenticationMiddleware, api_keys=args.api_key))
    return [*layers, Middleware(BodyMiddleware, state=state)]
