"""How does the application become a process that listens, and ends well?

    bind(args)         the socket, before the model is loaded: a port in use is told at once
    serve_engine()     the application of one engine (that of several: extras/replicas/)
    Server.serve()     uvicorn: HTTP on this event loop; the steps run in the engine's thread

    SIGTERM, Ctrl-C    no new connection and no new request; those that run have shutdown_timeout
                       seconds. Then the engine aborts them, and each stream gets its last chunk
                       (finish_reason "abort") and [DONE]. The exit status is 0.
    once more          they are aborted now

A client that sends its headers slowly, or nothing at all, costs a socket: on_tick closes its
connection after request_timeout seconds. One that sends its body slowly is answered by
middleware.py. One that reads its stream slowly is waited for: chunks that it has not read are
joined, and it misses none.

vLLM: vllm/entrypoints/launchers/launcher.py (V1), vllm/entrypoints/launcher.py (V0).
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import select
import signal
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanoserve.arg_utils import EngineArgs
from nanoserve.extras.server.options import FrontendArgs
from nanoserve.logger import PlainHandler

if TYPE_CHECKING:
    from nanoserve.extras.server.middleware import AnyServerState

MAX_FILES = 65535  # connections are open files, too
# Seconds after which Python's threads let each other run (its default: 5 ms). The thread that
# answers and the one that steps wait for each other in each step, of few milliseconds.
SWITCH_INTERVAL = 1e-4
LAST_CHUNKS = 2.0  # seconds to send what is left when the engine has ended
SIGNALS = uvicorn.server.HANDLED_SIGNALS


class Served(NamedTuple):
    """What is told of a server that begins."""

    name: str  # of the model
    takes_text: bool  # there is a tokenizer
    pools: bool  # it makes vectors


@contextmanager
def serve_engine(
    config: EngineArgs, frontend: FrontendArgs, log_stats: bool
) -> Iterator[tuple[Starlette, Served]]:
    """The application of one engine in this process."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    from nanoserve.extras.async_llm import AsyncLLM
    from nanoserve.extras.metrics import LoggingStatLogger, collect_metrics
    from nanoserve.extras.server.app import build_app

    with AsyncLLM(config, chat_template=frontend.chat_template) as async_llm:
        app = build_app(async_llm, frontend)
        if log_stats:
            collect_metrics(async_llm, LoggingStatLogger(async_llm.engine))
        gc.collect()
        gc.freeze()  # what is there now stays: later collections need not look at it
        name, pools = app.state.server.model_names[0], async_llm.config.runner == "pooling"
        yield app, Served(name, async_llm.tokenizer is not None, pools)


def bind(args: FrontendArgs) -> socket.socket:
    """A socket that listens. Raises ValueError if another program listens there, or if the address
    is none of this machine's."""
    if args.uds is not None and not hasattr(socket, "AF_UNIX"):
        raise ValueError("uds: this system has no Unix domain sockets. Use --host and --port.")
    where = args.uds or f"{args.host}, port {args.port}"
    try:
        if args.uds is not None:
            return bind_path(args.uds)
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(
            args.host, args.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        sock = socket.socket(family, kind, protocol)
        if os.name == "posix":  # the port is free again when the last server has ended
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
            sock.listen()  # clients may connect, and wait until the model is loaded
        except OSError:
            sock.close()
            raise
        return sock
    except OSError as error:
        is_taken = error.errno == errno.EADDRINUSE
        if args.uds is not None and not (is_taken and is_socket(args.uds)):
            what = "a file that is no socket is there" if is_taken else error.strerror or error
            why = f"{what}. Give --uds a short path, in a folder that exists."
        elif is_taken:
            other = "--port (0: a free one)" if args.uds is None else "--uds"
            why = f"another program listens there. End it, or give another {other}."
        else:
            why = f"{error.strerror}. Give --host and --port of this machine."
        raise ValueError(f"cannot listen at {where}: {why}") from error


def bind_path(path: str) -> socket.socket:
    """A Unix domain socket, for this user. One that an ended server left behind is replaced."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if is_socket(path) and sock.connect_ex(path) == errno.ECONNREFUSED:  # nobody listens
            os.unlink(path)
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen()
    except OSError:
        sock.close()
        raise
    return sock


def is_socket(path: str) -> bool:
    return os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode)


def check_certificate(certfile: str, keyfile: str) -> None:
    """Raise ValueError unless these files hold a certificate and its key, without a password."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certfile, keyfile, password="")
    except OSError as error:
        raise ValueError(
            f"ssl_certfile {certfile!r} and ssl_keyfile {keyfile!r} are not a certificate and its "
            f"key ({error}). Give two PEM files that belong together, the key without a password."
        ) from error


def raise_file_limit(limit: int = MAX_FILES) -> None:
    """Let this process have as many open files, if the system permits."""
    with suppress(ImportError, OSError, ValueError):
        import resource  # Windows has none

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        if soft != resource.RLIM_INFINITY and soft < limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def describe_address(args: FrontendArgs, sock: socket.socket) -> str:
    """For example "http://127.0.0.1:8000"."""
    if args.uds is not None:
        return f"unix:{args.uds}"
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "localhost"
    return f"http{'s' if args.ssl_certfile else ''}://{f'[{host}]' if ':' in host else host}:{port}"


class Connection(h11.Connection):
    """h11's, with a short way for what is sent most often: the next chunk of a streamed answer. It
    takes a sixth off the event loop's work for a token."""

    is_chunked = False  # is the body of the answer that is being sent?

    def send(self, event: Any) -> Any:
        if self.is_chunked and type(event) is h11.Data and event.data:
            return b"%x\r\n%b\r\n" % (len(event.data), event.data)
        sent = super().send(event)
        is_begun = type(event) is h11.Response and self.our_state is h11.SEND_BODY
        self.is_chunked = is_begun and b"\r\ntransfer-encoding: chunked\r\n" in sent.lower()
        return sent


class Protocol(H11Protocol):
    """uvicorn's protocol over such a connection."""

    def __init__(self, config: uvicorn.Config, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        limit = config.h11_max_incomplete_event_size
        size = {} if limit is None else {"max_incomplete_event_size": limit}
        self.conn = Connection(h11.SERVER, **size)


class Server(uvicorn.Server):
    """uvicorn's server, with an end of its own, and a limit for requests that do not arrive.

    Invariant: when it has ended, the engine has, too.
    """

    def __init__(self, app: Starlette) -> None:
        self.state: AnyServerState = app.state.server
        args = self.state.args
        self.num_signals = 0
        self._idle: dict[Any, tuple[Any, float]] = {}  # connection: its last request, since when
        super().__init__(
            uvicorn.Config(
                app,
                http=Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=args.uvicorn_log_level,
                access_log=not args.disable_uvicorn_access_log,
                root_path=args.root_path,
                ssl_keyfile=args.ssl_keyfile,
                ssl_certfile=args.ssl_certfile,
                server_header=False,
            )
        )
        log = logging.getLogger("uvicorn")
        if not log.hasHandlers():
            log.addHandler(PlainHandler())

    # -- signals --

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's sends the signal again when all is over, and so the process would end by it."""
        self.loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():  # which has all signals
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal asks to end."""
        self.num_signals += 1
        self.should_exit = True
        if self.num_signals > 1 and self.started:  # else it ends before it begins
            self.loop.call_soon_threadsafe(self.end_engine, 0.0)

    def end_engine(self, timeout: float) -> asyncio.Future[None]:
        """Shut the engine down in a thread, as it takes a while."""
        return self.loop.run_in_executor(None, self.state.async_llm.shutdown, timeout)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests; wait for those that run, and until they are sent."""
        timeout = 0.0 if self.num_signals > 1 else self.state.args.shutdown_timeout
        closing = asyncio.create_task(super().shutdown(sockets))  # ends with the last connection
        await self.end_engine(timeout)
        await asyncio.wait([closing], timeout=LAST_CHUNKS)  # clients read the end of their answers
        for connection in list(self.server_state.connections):
            connection.transport.abort()  # its client does not read
        await asyncio.wait([closing], timeout=LAST_CHUNKS)  # tasks see that their client is gone
        self.force_exit = True  # uvicorn waits no longer
        await closing

    # -- connections --

    async def on_tick(self, counter: int) -> bool:
        """Called by uvicorn ten times a second. True: end."""
        self.close_idle_connections()
        self.close_gone_connections()
        return await super().on_tick(counter)

    def close_idle_connections(self) -> None:
        """Close those in which no request has arrived for request_timeout seconds."""
        now, before = time.monotonic(), self._idle
        self._idle = {}
        connections: set[Any] = self.server_state.connections
        for connection in connections:
            cycle = connection.cycle  # its newest request
            if cycle is None or cycle.response_complete:
                last, since = before.get(connection, (cycle, now))
                since = since if last is cycle else now
                self._idle[connection] = cycle, since
                if now - since > self.state.args.request_timeout:
                    connection.transport.abort()

    def close_gone_connections(self) -> None:
        """Close those whose client went away after it had sent its next request. uvicorn stops
        reading until the first one is answered, and so does not see that the client is gone."""
        if not hasattr(select, "POLLRDHUP"):  # Linux has it
            return
        ends = select.poll()
        paused = {}
        connections: set[Any] = self.server_state.connections
        for connection in connections:
            sock = connection.transport.get_extra_info("socket")
            if connection.flow.read_paused and sock.fileno() >= 0:
                ends.register(sock.fileno(), select.POLLRDHUP)
                paused[sock.fileno()] = connection
        for number, _ in ends.poll(0) if paused else ():
            paused[number].transport.abort()
