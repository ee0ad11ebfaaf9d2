"""Which parts make up the server, and what do they share?"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec

from fastapi import FastAPI

from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.metrics import PrometheusStatLogger, collect_metrics
from nanoserve.extras.server.errors import error_response

ROUTERS = ("completions", "chat", "utilities", "page")


@dataclass
class ServerState:
    """What the endpoints share: `make_router(state)` of each module gets it."""

    async_llm: AsyncLLM
    model_names: list[str]  # the first is the one that answers name
    metrics: PrometheusStatLogger
    trust_request_chat_template: bool = False  # may a request bring a template of its own?
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970
    is_shutting_down: bool = False  # no new requests

    @property
    def max_logprobs(self) -> int:
        """The most logprobs that a request may ask for."""
        return self.async_llm.config.max_logprobs


def build_app(
    async_llm: AsyncLLM,
    *,
    served_model_name: str | Sequence[str] | None = None,
    api_key: str | Sequence[str] | None = None,
    allowed_origins: Sequence[str] = (),
    trust_request_chat_template: bool = False,
) -> FastAPI:
    """The server as an ASGI application. app.state.server is its ServerState."""
    default = str(async_llm.config.model) if async_llm.config.model else "demo"
    names = [served_model_name] if isinstance(served_model_name, str) else served_model_name
    model_names = list(names or [default])
    metrics = PrometheusStatLogger(async_llm.engine, model_name=model_names[0])
    collect_metrics(async_llm, metrics)
    state = ServerState(async_llm, model_names, metrics, trust_request_chat_template)
    app = FastAPI(title="nanoserve", docs_url=None, redoc_url=None)
    app.state.server = state
    for name in ROUTERS:
        if find_spec(f"nanoserve.extras.server.{name}"):
            app.include_router(import_module(f"nanoserve.extras.server.{name}").make_router(state))
    app.add_exception_handler(Exception, lambda request, error: error_response(error))
    return app
