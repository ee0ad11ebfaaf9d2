"""How does one start the server, and how does it end?

    $ nanoserve serve --port 8000
    demo is served at http://127.0.0.1:8000 (Ctrl-C ends it). Open it in a browser.

The socket is bound before the model is loaded: a port in use is told at once. By default only this
machine can reach it.

Ctrl-C or SIGTERM: uvicorn takes no more connections. The requests that run have --shutdown-timeout
seconds; then the engine ends, which tells everybody who waits, and each client gets its answer.

vLLM: vllm/entrypoints/cli/serve.py, vllm/entrypoints/launchers/ (V1).
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn

from nanoserve.chapters import CHAPTERS
from nanoserve.entrypoints.async_llm import AsyncLLM
from nanoserve.entrypoints.server.api_server import build_app
from nanoserve.entrypoints.server.page import WatchedScheduler

# Seconds after which Python's threads let each other run (its default: 5 ms). The thread that
# answers and the one that steps wait for each other in each step, of few milliseconds.
SWITCH_INTERVAL = 1e-4


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of the server, under vLLM's names."""
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0: whoever reaches it")
    add("--port", type=int, default=8000, help="0: a free one (default: 8000)")
    add("--uds", help="path of a Unix domain socket, in place of host and port")
    add("--served-model-name", nargs="+", metavar="NAME", help="names of the model")
    add("--api-key", nargs="+", metavar="KEY", help="requests need one; or set VLLM_API_KEY")
    add("--lora-modules", nargs="+", default=[], metavar="NAME=PATH", help="adapters, as models")
    add("--allowed-origins", nargs="+", metavar="ORIGIN", help="web pages that may ask; *: all")
    add("--max-num-queued-reqs", type=int, default=1024, metavar="INT",
        help="completions that may be unfinished; more get status 503 (default: 1024)")  # fmt: skip
    add("--data-parallel-size", type=int, default=1, metavar="INT",
        help="replicas of the engine, in a Ray cluster (default: 1, without Ray)")  # fmt: skip
    add("--shutdown-timeout", type=float, default=0.0, metavar="SECONDS",
        help="for requests that run at the end (default: 0)")  # fmt: skip
    add("--uvicorn-log-level", default="warning", help="info: a line for each request")
    add("--root-path", default="", help="the path under which a proxy shows this server")
    add("--ssl-keyfile", help="with --ssl-certfile: HTTPS")
    add("--ssl-certfile", help="with --ssl-keyfile: HTTPS")
    add("--enable-auto-tool-choice", action="store_true", help="vLLM's; here it is always on")
    add("--tool-call-parser", choices=["hermes"], help="vLLM's; the one format that is known here")


def serve(args: argparse.Namespace, options: dict[str, Any]) -> int:
    """Answer until a signal ends it. options: those of AsyncLLM."""
    args.api_key = args.api_key or list(filter(None, [os.environ.get("VLLM_API_KEY")]))
    if args.data_parallel_size > 1:
        from nanoserve.chapters.ray.parts import import_ray

        return import_ray("serve").serve_replicas(make_app, args, options)
    names = ("host", "port", "uds", "root_path", "ssl_keyfile", "ssl_certfile")
    listen = {name: getattr(args, name) for name in names}
    config = uvicorn.Config("", **listen, log_level=args.uvicorn_log_level, lifespan="off",
                            timeout_graceful_shutdown=int(args.shutdown_timeout) + 5)  # fmt: skip
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    sock = (
        config.bind_socket()
        if args.uds
        else socket.create_server((args.host, args.port), family=family)
    )
    sys.setswitchinterval(SWITCH_INTERVAL)
    logging.getLogger("nanoserve").addHandler(logging.StreamHandler())
    logging.getLogger("nanoserve").setLevel(logging.INFO)
    llm, app = make_app(args, options)
    with llm:
        config.app = app
        gc.collect()
        gc.freeze()  # what is there now stays: later collections need not look at it
        scheme = "https" if args.ssl_certfile else "http"
        at = args.uds or "{}://{}:{}".format(scheme, *sock.getsockname()[:2])
        name = app.state.model_name
        print(f"{name} is served at {at} (Ctrl-C ends it). Open it in a browser.", file=sys.stderr)
        if not args.api_key and args.host not in ("127.0.0.1", "localhost", "::1") and not args.uds:
            print("Whoever reaches it may use it: --api-key KEY asks for a key.", file=sys.stderr)
        Server(config, partial(llm.shutdown, args.shutdown_timeout)).run([sock])
    return 0


def make_app(args: Any, options: dict[str, Any]) -> tuple[AsyncLLM, Any]:
    """An engine that runs, and the application that asks it."""
    llm = make_llm(options, args.max_num_queued_reqs)
    try:
        adapters = dict(read_lora_module(word) for word in args.lora_modules)
        names, keys, origins = args.served_model_name, args.api_key, args.allowed_origins
        return llm, build_app(llm, names, adapters, keys, origins)
    except BaseException:
        llm.shutdown()
        raise


def make_llm(options: dict[str, Any], max_num_queued_reqs: int) -> AsyncLLM:
    """The engine of a server: it counts, and the page can watch its scheduler."""
    options = {"scheduler_cls": WatchedScheduler, **options}
    if options.get("model") is None:  # the demo: few blocks, so that the page has something to show
        options.setdefault("num_gpu_blocks_override", 64)
    if "metrics" in CHAPTERS and "disable_log_stats" not in options:
        options.setdefault("collect_metrics", True)
    return AsyncLLM(max_num_queued_reqs=max_num_queued_reqs, **options)


def read_lora_module(word: str) -> tuple[str, str]:
    """The name and the path in NAME=PATH. Raises ValueError."""
    name, _, path = word.partition("=")
    if not (name and path):
        raise ValueError(f"lora_modules holds {word!r}; allowed: NAME=PATH.")
    return name, path


class Server(uvicorn.Server):
    """uvicorn's server, at whose end the engine ends first: nobody waits for it any more."""

    def __init__(self, config: uvicorn.Config, end_engine: Callable[[], None]) -> None:
        super().__init__(config)
        self.end_engine = end_engine

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        closing = asyncio.create_task(super().shutdown(sockets))  # ends with the last connection
        await asyncio.to_thread(self.end_engine)
        await closing
