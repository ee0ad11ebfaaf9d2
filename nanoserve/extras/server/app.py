"""Which parts make up the server, and what do they share?

    build_app(async_llm)
        middleware.py      X-Request-Id, CORS, errors, Host, API key, body
        errors.py          what the handlers of exceptions answer
        completions.py  chat.py  pooling.py  adapters.py  utilities.py  page.py
                           one router each; make_router(state) gets the ServerState

The result is an ASGI application, for `nanoserve serve` (launcher.py) as for any other ASGI server,
and for tests without a socket. It does not own the AsyncLLM: who builds it shuts it down.

FastAPI's own pages of documentation are switched off: they load scripts from another server.
/openapi.json has the schema.

vLLM: vllm/entrypoints/launchers/app.py, api_server/app_state.py, api_server/routers.py (V1);
vllm/entrypoints/openai/api_server.py (V0).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from nanoserve import __version__
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.metrics import PrometheusStatLogger, collect_metrics
from nanoserve.extras.server import adapters, chat, completions, page, pooling, utilities
from nanoserve.extras.server.errors import error_response
from nanoserve.extras.server.middleware import make_middleware
from nanoserve.extras.server.options import FrontendArgs


@dataclass
class ServerState:
    """What the endpoints share."""

    async_llm: AsyncLLM
    args: FrontendArgs
    model_names: list[str]  # the first is the one that answers name
    metrics: PrometheusStatLogger
    adapters: adapters.ServedAdapters
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since 1970
    num_requests: int = 0  # being served, from the first byte of the body to the last of the answer

    def has_model(self, name: str) -> bool:
        """Is there a model, or an adapter, of this name?"""
        return name in self.model_names or name in self.adapters.requests

    @property
    def trust_request_chat_template(self) -> bool:
        """May a request bring a template of its own?"""
        return self.args.trust_request_chat_template


def build_app(async_llm: AsyncLLM, args: FrontendArgs | None = None, **options: Any) -> FastAPI:
    """The server as an ASGI application; app.state.server is its ServerState.

    options: fields of FrontendArgs, if `args` is not given. Those about the socket are the
    launcher's. Raises ValueError or TypeError for a wrong one.
    """
    args = args or FrontendArgs(**options)
    default = "demo" if async_llm.config.model is None else str(async_llm.config.model)
    model_names = list(args.served_model_name or [default])
    metrics = PrometheusStatLogger(async_llm.engine, model_name=model_names[0])
    collect_metrics(async_llm, metrics)
    served = adapters.ServedAdapters(async_llm, args, model_names)
    state = ServerState(async_llm, args, model_names, metrics, served)
    app = FastAPI(
        title="nanoserve",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        middleware=make_middleware(state),
        exception_handlers=dict.fromkeys(HANDLED, answer),
    )
    app.state.server = state
    for module in (completions, chat, pooling, adapters, utilities, page):
        app.include_router(module.make_router(state))
    return app


# HTTPException and RequestValidationError have handlers in FastAPI, with another shape of errors.
# All else passes to ErrorMiddleware.
HANDLED = (HTTPException, RequestValidationError)


async def answer(request: Request, error: Exception) -> JSONResponse:
    """The handler of exceptions."""
    return error_response(error)
