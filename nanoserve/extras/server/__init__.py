"""How does a request come over HTTP to the engine, and its answer back?

    POST /v1/completions {"prompt": "Once", "max_tokens": 5, "stream": true}

    launcher.py      uvicorn, on the event loop: a connection, its headers
    middleware.py    is it a client of ours? the body, within limits
    completions.py   CompletionRequest: JSON with the right types             chat.py: the template
    protocol.py      to_sampling_params: values that are allowed
    reply.py         AsyncLLM.add_request for each prompt  -------->  the engine's thread
    streaming.py     a RequestOutput after each step  <-------------  schedule, execute, update
    reply.py         data: {"choices": [{"index": 0, "text": " upon", ...}], ...}
                     data: [DONE]

    responses.py     what an answer looks like                errors.py   what an error looks like
    response_format.py   what form it must have               tool_parsers.py   its calls of tools
    pooling.py       /v1/embeddings and /v1/score, of pooling models
    adapters.py      LoRA adapters as models
    utilities.py     /v1/models, /tokenize, /health, /metrics, ...
    page.py          the page at /: page.html                 watch.py    what it shows of steps
    options.py, cli.py   the command `nanoserve serve`        app.py      all of it, put together

OpenAI's client works with it, and so does what was written for vLLM's server:

    client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello"}])

The engine knows none of this. It runs in a thread of its own (async_llm.py); here are no threads,
except for what is slow and has nothing to do with the engine: long JSON, tokenizing.

Left out: other APIs (responses, reranking, audio), several base models.

vLLM: vllm/entrypoints/openai/ (V0); vllm/entrypoints/: openai/, serve/, launchers/ (V1).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoserve.extras.server.app import ServerState as ServerState
    from nanoserve.extras.server.app import build_app as build_app
    from nanoserve.extras.server.cli import main as main

MODULES = {"ServerState": "app", "build_app": "app", "main": "cli"}


def __getattr__(name: str) -> object:
    """A module is imported when a name of it is used: the command reads its flags without
    FastAPI."""
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{MODULES[name]}"), name)
