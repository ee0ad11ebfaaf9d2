"""What else may a client ask a server?

    GET  /v1/models, /v1/models/NAME     which models there are; how long a prompt may be
    POST /tokenize, /detokenize          text (or messages) to token ids, and back
    GET  /health, /ping                  200 while requests are served, 503 otherwise: for probes
    GET  /load                           requests that are being served: for load balancers
    GET  /metrics                        the numbers of extras/metrics, for Prometheus
    GET  /version

None of them waits for the engine: they answer while a step runs, and /health when it is dead.

vLLM: vllm/entrypoints/openai/serving_models.py, serving_tokenization.py (V0);
vllm/entrypoints/serve/: instrumentator/, tokenize/; vllm/entrypoints/openai/models/ (V1).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from nanoserve import __version__
from nanoserve.exceptions import EngineDeadError, as_validation_error, brief
from nanoserve.extras.server.chat import render
from nanoserve.extras.server.errors import HTTPError
from nanoserve.extras.server.protocol import DetokenizeRequest, TokenizeRequest, describe_post
from nanoserve.extras.server.reply import read_body
from nanoserve.extras.server.responses import (
    DetokenizeResponse,
    ErrorResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)
from nanoserve.extras.server.streaming import JsonResponse
from nanoserve.inputs import as_token_ids

if TYPE_CHECKING:
    from nanoserve.extras.server.app import ServerState


def make_router(state: ServerState) -> APIRouter:
    """The endpoints."""
    router = APIRouter()

    @router.get("/v1/models")
    async def show_available_models() -> ModelList:
        """The names under which the model is served."""
        names = [*state.model_names, *state.adapters.requests]
        return {"object": "list", "data": [make_card(state, name) for name in names]}

    @router.get("/v1/models/{name:path}", responses={404: {"model": ErrorResponse}})
    async def show_model(name: str) -> ModelCard:
        """One of them."""
        if not state.has_model(name):
            message = f"The model {name!r:.200} does not exist; GET /v1/models lists them."
            raise HTTPError(404, message, "model")
        return make_card(state, name)

    @router.post("/tokenize", **describe_post(TokenizeRequest, TokenizeResponse))
    async def tokenize(raw_request: Request) -> Response:
        """The token ids of a text or a conversation, however many they are."""
        request, _ = await read_body(state, raw_request, TokenizeRequest)
        return await make_tokens(state, request)

    @router.post("/detokenize", **describe_post(DetokenizeRequest, DetokenizeResponse))
    async def detokenize(raw_request: Request) -> Response:
        """The text of token ids."""
        request, _ = await read_body(state, raw_request, DetokenizeRequest)
        token_ids = await asyncio.to_thread(as_token_ids, request.tokens)  # may be a million
        return JsonResponse({"prompt": await state.async_llm.detokenize(token_ids)})

    @router.get("/ping", responses={503: {}})
    @router.get("/health", responses={503: {}})
    async def health() -> Response:
        """Are requests served?"""
        try:
            await state.async_llm.check_health()
        except EngineDeadError:
            return Response(status_code=503)
        return Response()

    @router.get("/load")
    async def load() -> dict[str, int]:
        """How many requests are being served?"""
        return {"server_load": state.num_requests}

    @router.get("/metrics")
    async def metrics() -> Response:
        """All metrics."""
        text = await asyncio.to_thread(state.metrics.render)
        return Response(text, headers={"Content-Type": state.metrics.content_type})

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of nanoserve."""
        return {"version": __version__}

    return router


def make_card(state: ServerState, name: str) -> ModelCard:
    """What /v1/models says of one name."""
    config = state.async_llm.config
    adapter = state.adapters.requests.get(name)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "nanoserve",
        "root": adapter.path if adapter else str(config.model or name),
        "parent": state.model_names[0] if adapter else None,
        "max_model_len": config.max_model_len or 0,
    }


async def make_tokens(state: ServerState, request: TokenizeRequest) -> Response:
    """The answer of /tokenize. Also of a text that is too long for the model: to find that out is
    what one asks for."""
    async_llm = state.async_llm
    tokenizer = async_llm.engine.input_processor.require_tokenizer("/tokenize")
    is_chat = request.prompt is None
    text: Any = await render(state, request) if is_chat else request.prompt
    adds_special = request.add_special_tokens
    adds_special = not is_chat if adds_special is None else adds_special

    def encode() -> Response:
        with as_validation_error("the tokenizer cannot encode", brief(text)):
            tokens = tokenizer.encode(text, add_special_tokens=adds_special)
        shows = request.return_token_strs
        answer: TokenizeResponse = {
            "count": len(tokens),
            "max_model_len": async_llm.config.max_model_len or 0,
            "tokens": tokens,
            "token_strs": tokenizer.convert_ids_to_tokens(tokens) if shows else None,
        }
        return JsonResponse(answer)

    # A million tokens take seconds, and so does their JSON: not in the threads of prompts.
    return await asyncio.to_thread(encode)
