"""What can be set about the server, beside its engine?

One declaration, of which the flags are made:

    FrontendArgs.max_body_size     --max-body-size 1000000     (tools/cli.py: add_fields)
    FrontendArgs.api_key           --api-key one two           (a tuple)
    FrontendArgs.lora_modules      --lora-modules pirate=path/to/adapter

This module imports neither FastAPI nor torch: `nanoserve serve --help` needs neither.

Left out: several API servers in front of one engine (api_server_count), reasoning parsers, parsers
of calls from other packages (tool_parser_plugin), request logs, a gRPC server.

vLLM: vllm/entrypoints/launchers/cli_args.py (V1).
"""

from __future__ import annotations

import ipaddress
import json
import os
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from nanoserve.exceptions import brief

ToolParserName = Literal["hermes", "qwen3_json"]  # tool_parsers.TOOL_PARSERS
RouterPolicy = Literal["cache_aware", "round_robin"]  # SGLang's names
LogLevel = Literal["critical", "error", "warning", "info", "debug", "trace"]


@dataclass(frozen=True)
class FrontendArgs:
    """The options of the server, under vLLM's names where it has them. One string may stand for a
    tuple of one.

    Raises ValueError or TypeError for a value that is not allowed.
    """

    host: str = "127.0.0.1"  # address to listen at: this machine only; 0.0.0.0: whoever reaches it
    port: int = 8000  # 0: a free one
    uds: str | None = None  # path of a Unix domain socket, in place of host and port
    served_model_name: tuple[str, ...] = ()  # names of the model; answers have the first
    api_key: tuple[str, ...] = ()  # requests need one of them; VLLM_API_KEY may hold one, too
    # LoRA adapters, each a model: NAME=PATH, or '{"name": "NAME", "path": "PATH"}'
    lora_modules: tuple[str, ...] = ()
    # clients may load adapters from this folder; needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, too
    lora_folder: str | None = None
    chat_template: str | None = None  # a Jinja template, or a file with one; None: the model's
    trust_request_chat_template: bool = False  # a request may bring a chat template
    tool_call_parser: ToolParserName | None = None  # format of calls; None: the chat template's
    enable_auto_tool_choice: bool = True  # tools without tool_choice are for the model to choose
    exclude_tools_when_tool_choice_none: bool = False  # such tools do not reach the template
    allowed_origins: tuple[
        str, ...
    ] = ()  # pages of these origins may ask, such as http://localhost:3000
    max_body_size: int = 4 << 20  # bytes of a request; to read a large one holds up all others
    request_timeout: float = 60.0  # seconds in which a request has to arrive, headers and body
    limit_concurrency: int | None = None  # requests at a time, streams too; None: no limit
    shutdown_timeout: float = 5.0  # seconds for running requests after SIGTERM or Ctrl-C
    uvicorn_log_level: LogLevel = "info"  # what is logged of HTTP
    disable_uvicorn_access_log: bool = False  # no line for each request
    ssl_keyfile: str | None = None  # with ssl_certfile: HTTPS
    ssl_certfile: str | None = None  # with ssl_keyfile: HTTPS
    root_path: str = ""  # the path under which a proxy shows this server
    data_parallel_size: int = 1  # replicas: as many engines, each a process of its own
    # which replica gets a request: one that has computed its beginning, or each in turn
    router_policy: RouterPolicy = "cache_aware"

    def __post_init__(self) -> None:
        for name in ("served_model_name", "api_key", "allowed_origins", "lora_modules"):
            object.__setattr__(self, name, as_strings(name, getattr(self, name)))
        for name, (kinds, low, high) in RANGES.items():
            check_number(name, getattr(self, name), kinds, low, high)
        names = [read_lora_module(word)[0] for word in self.lora_modules]
        if len(set(names)) < len(names):
            raise ValueError(f"lora_modules has a name twice: {', '.join(names)}.")
        if self.uds == "":
            raise ValueError("uds is an empty string. Give a path, or leave it out.")
        if self.lora_folder is not None and not os.path.isdir(self.lora_folder):
            raise ValueError(f"lora_folder is {brief(self.lora_folder)}; there is no such folder.")
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ValueError("HTTPS needs both ssl_keyfile and ssl_certfile; one was given.")
        parsers = get_args(ToolParserName)
        if self.tool_call_parser not in (None, *parsers):
            given, allowed = brief(self.tool_call_parser), f"None, {', '.join(parsers)}"
            raise ValueError(f"tool_call_parser is {given}; allowed: {allowed}.")
        if self.router_policy not in get_args(RouterPolicy):
            given, allowed = brief(self.router_policy), ", ".join(get_args(RouterPolicy))
            raise ValueError(f"router_policy is {given}; allowed: {allowed}.")
        for origin in self.allowed_origins:
            if origin != "*" and "://" not in origin:
                allowed = "http://HOST:PORT, https://HOST, or * for all"
                raise ValueError(f"allowed_origins holds {brief(origin)}; allowed: {allowed}.")

    @property
    def is_public(self) -> bool:
        """Can other machines reach it?"""
        if self.uds is not None or self.host == "localhost":
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name
            return True


INT, NUMBER = (int,), (int, float)
RANGES: dict[str, tuple[tuple[type, ...], float, float]] = {
    "port": (INT, 0, 65535),
    "data_parallel_size": (INT, 1, 1024),
    "max_body_size": (INT, 1, 1 << 40),
    "request_timeout": (NUMBER, 0.001, 1e6),
    "limit_concurrency": (INT, 1, 1 << 40),
    "shutdown_timeout": (NUMBER, 0, 1e6),
}


def check_number(name: str, value: Any, kinds: tuple[type, ...], low: float, high: float) -> None:
    """Raise ValueError or TypeError unless it is a number between low and high, or None by
    default."""
    [default] = [each.default for each in fields(FrontendArgs) if each.name == name]
    if value is None and default is None:
        return
    if isinstance(value, bool) or type(value) not in kinds:
        kind = "a number" if float in kinds else "an integer"
        raise TypeError(f"{name} must be {kind}, got {brief(value)}.")
    if not low <= value <= high:
        raise ValueError(f"{name} is {brief(value)}; allowed: {low} to {high}.")


def read_lora_module(word: str) -> tuple[str, str]:
    """The name and the path in "NAME=PATH" or '{"name": "NAME", "path": "PATH"}', as vLLM writes
    them. Raises ValueError for anything else."""
    name, _, path = word.partition("=")
    if word.startswith("{"):
        with suppress(ValueError, TypeError):
            given = json.loads(word)
            name, path = given.get("name"), given.get("path")
    if not (name and path and isinstance(name, str) and isinstance(path, str)):
        allowed = 'NAME=PATH or {"name": "NAME", "path": "PATH"}'
        raise ValueError(f"lora_modules holds {brief(word)}; allowed: {allowed}.")
    return name, path


def as_strings(name: str, value: Any) -> tuple[str, ...]:
    """One string or several, as a tuple. Raises TypeError for anything else, ValueError for an
    empty string: an API key that is empty would protect nothing."""
    values = (value,) if isinstance(value, str) else tuple(value or ())
    for each in values:
        if not isinstance(each, str):
            raise TypeError(f"{name} must be strings, got {brief(each)}.")
        if not each:
            raise ValueError(f"{name} holds an empty string. Give a text, or leave it out.")
    return values
