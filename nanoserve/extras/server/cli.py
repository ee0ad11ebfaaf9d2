"""How does one start the server? The command `nanoserve serve`.

    $ nanoserve serve --port 8000
    demo is served at http://127.0.0.1:8000 (Ctrl-C ends it). Open it in a browser, or try:
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{...}'

Flags are the engine's options (config.py) and the server's (options.py). The socket listens before
the model is loaded: who connects meanwhile waits for the answer.

This module imports neither FastAPI nor torch before the flags are read.

vLLM: vllm/entrypoints/cli/serve.py, vllm/entrypoints/launchers/api_server/entry.py (V1).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from nanoserve.arg_utils import EngineArgs, load_chat_template
from nanoserve.config import load_chapter
from nanoserve.extras.server.options import FrontendArgs
from nanoserve.logger import configure_logging, init_logger
from nanoserve.tools import cli

if TYPE_CHECKING:
    from nanoserve.extras.server.launcher import Served

logger = init_logger(__name__)


def make_parser() -> cli.Parser:
    usage = "[MODEL] [options]"
    parser = cli.Parser("nanoserve serve", usage, "Answer requests of OpenAI's API over HTTP.")
    parser.add_argument("model_tag", nargs="*", metavar="MODEL", help="the same as --model MODEL")
    group = parser.add_argument_group("server options")
    EngineArgs.add_cli_args(parser)
    cli.add_fields(group, FrontendArgs, "server_", short={"data_parallel_size": "-dp"})
    return parser


def read_frontend(parser: cli.Parser, args: argparse.Namespace) -> FrontendArgs:
    """The server's options; a value that is not allowed ends the command with status 2."""
    values = {each.name: getattr(args, f"server_{each.name}") for each in fields(FrontendArgs)}
    given: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
    if key := os.environ.get("VLLM_API_KEY"):
        given.setdefault("api_key", key)
    try:
        if "allowed_origins" in given:
            given["allowed_origins"] = read_origins(given["allowed_origins"])
        load_chat_template(given.get("chat_template"))
        frontend = FrontendArgs(**given)
        for name in ("ssl_keyfile", "ssl_certfile"):
            if name in given and not os.path.isfile(given[name]):
                raise ValueError(f"{name} is {given[name]!r}; there is no such file.")
        return frontend
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def read_origins(words: list[str]) -> list[Any]:
    """Several words, or vLLM's way to write them: '["http://localhost:3000"]'."""
    origins: list[Any] = []
    for word in words:
        try:
            origins += json.loads(word) if word.startswith("[") else [word]
        except ValueError:
            raise ValueError(f"allowed_origins {word!r} is no JSON list.") from None
    return origins


def read_model(parser: cli.Parser, args: argparse.Namespace) -> None:
    """`serve MODEL` is `serve --model MODEL`."""
    if len(args.model_tag) > 1:
        parser.error(f"{args.model_tag[1]!r} is one word too many.")
    if args.model_tag and args.model not in (None, *args.model_tag):
        parser.error(f"two models: {args.model_tag[0]!r} and --model {args.model!r}.")
    args.model = next(iter(args.model_tag), args.model)


def main(arguments: list[str]) -> int:
    """Serve until a signal ends it. Raises ValueError if the address is in use."""
    parser = make_parser()
    args = parser.parse(arguments)
    read_model(parser, args)
    frontend, config = read_frontend(parser, args), cli.read_config(parser, args)
    if frontend.lora_modules and not config.enable_lora:
        parser.error("--lora-modules needs --enable-lora.")
    more = ("httpx",) if frontend.data_parallel_size > 1 else ()
    for package in ("fastapi", "uvicorn", "prometheus_client", *more):
        if find_spec(package) is None:
            name = package.replace("_", "-")
            raise ValueError(f'{name} is not installed: pip install -e ".[server]" installs it.')

    from nanoserve.extras.server import launcher

    serve: Any = launcher.serve_engine
    if frontend.data_parallel_size > 1:
        serve = load_chapter("data_parallel_size", "replicas.front").serve_replicas
    if frontend.ssl_certfile and frontend.ssl_keyfile:
        launcher.check_certificate(frontend.ssl_certfile, frontend.ssl_keyfile)
    configure_logging()
    log_stats = not getattr(args, "disable_log_stats", False)
    with launcher.bind(frontend) as sock:
        address = launcher.describe_address(frontend, sock)
        if frontend.is_public and not frontend.api_key:
            logger.warning(f"whoever reaches {address} may use it; --api-key KEY asks for a key.")
        launcher.raise_file_limit()
        with serve(config, frontend, log_stats) as (app, served):
            how = "Try:" if frontend.uds or served.pools else "Open it in a browser, or try:"
            cli.note(f"{served.name} is served at {address} (Ctrl-C ends it). {how}")
            cli.note(describe_example(frontend, address, served))
            launcher.Server(app).run(sockets=[sock])
    return 0


def describe_example(args: FrontendArgs, address: str, served: Served) -> str:
    """A command line that asks the server for a completion, or a pooling model for a vector."""
    prompt: Any = "Once upon a time" if served.takes_text else [1, 2, 3]
    asked = {"input": prompt} if served.pools else {"prompt": prompt, "max_tokens": 20}
    body = json.dumps({"model": served.name, **asked})
    path = "embeddings" if served.pools else "completions"
    words = ["curl", f"{address}/v1/{path}", "-H", "Content-Type: application/json"]
    if args.uds is not None:
        words[1:2] = ["--unix-socket", args.uds, f"http://localhost/v1/{path}"]
    if args.api_key:
        words += ["-H", "Authorization: Bearer KEY"]
    if args.ssl_certfile:
        words += ["--cacert", args.ssl_certfile]
    return shlex.join([*words, "-d", body])
