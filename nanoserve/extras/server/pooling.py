"""What do /v1/embeddings and /v1/score answer?

    POST /v1/embeddings  {"input": ["A dog", "A cat"]}
    -> {"object": "list", "data": [{"index": 0, "object": "embedding",
        "embedding": [0.07, 0.04, ...]}, ...], "usage": {"prompt_tokens": 4, "total_tokens": 4}}

With encoding_format "base64" (what OpenAI's client asks for by itself) an embedding is a text: its
numbers as float32, little-endian, in a third of the bytes.

    POST /v1/score  {"queries": "A dog", "documents": ["A cat", "The sea"]}
    -> {"object": "list", "data": [{"index": 0, "object": "score", "score": 0.29}, ...], ...}

A query with several documents is computed once, and counted once in usage. (vLLM counts it with
each of them.) On a server whose model writes text, both answer 400, as /v1/completions and
/v1/chat/completions do on a server with --runner pooling. So they do where extras/pooling was
deleted.

Left out: conversations as input, vectors as raw bytes, reranking, and Cohere's API.

vLLM: vllm/entrypoints/openai/serving_embedding.py, serving_score.py (V0);
vllm/entrypoints/pooling/: embed/serving.py, scoring/serving.py (V1).
"""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from nanoserve.config import load_chapter
from nanoserve.extras.server.errors import HTTPError
from nanoserve.extras.server.protocol import (
    EmbeddingRequest,
    Json,
    PoolingRequest,
    ScoreRequest,
    describe_post,
)
from nanoserve.extras.server.reply import GONE, TRACE_HEADERS, read_body, to_usage
from nanoserve.extras.server.responses import EmbeddingResponse, ScoreResponse, Usage
from nanoserve.extras.server.streaming import EngineRequests, JsonResponse, until_gone

if TYPE_CHECKING:
    from torch import Tensor

    from nanoserve.extras.pooling import PoolingRequestOutput
    from nanoserve.extras.server.app import ServerState


def make_router(state: ServerState) -> APIRouter:
    """The endpoints."""
    router = APIRouter()

    @router.post("/v1/embeddings", **describe_post(EmbeddingRequest, EmbeddingResponse))
    async def create_embedding(raw_request: Request) -> Response:
        """A vector of each input."""
        request, request_id = await read_body(state, raw_request, EmbeddingRequest)
        answer = PoolingReply(state, raw_request, request, request_id, "embd")
        return await answer.respond(answer.embed(request))

    @router.post("/v1/score", **describe_post(ScoreRequest, ScoreResponse))
    @router.post("/score", **describe_post(ScoreRequest, ScoreResponse))
    async def create_score(raw_request: Request) -> Response:
        """How near are the texts of each pair?"""
        request, request_id = await read_body(state, raw_request, ScoreRequest)
        answer = PoolingReply(state, raw_request, request, request_id, "score")
        return await answer.respond(answer.score(request))

    return router


class PoolingReply:
    """The answer to one HTTP request, as it is made."""

    def __init__(
        self,
        state: ServerState,
        raw_request: Request,
        request: PoolingRequest,
        request_id: str | None,
        id_prefix: str,
    ) -> None:
        """request_id: the client's X-Request-Id. Raises ValueError if the engine makes no vectors,
        or the chapter is not there."""
        self.raw_request, self.request = raw_request, request
        self.async_llm, path = state.async_llm, raw_request.url.path
        self.chapter = load_chapter(path, "pooling.offline")
        self.chapter.check_pools(path, self.async_llm.config)
        self.lora_request = state.adapters.requests.get(request.model or "")
        self.head: Json = {
            "id": f"{id_prefix}-{request_id or request.request_id or uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": request.model if self.lora_request else state.model_names[0],
        }

    async def respond(self, making: Any) -> Response:
        """What `making` returns, as JSON; nothing, if the client has gone away."""
        found = await until_gone(self.raw_request.receive, making)
        return found or Response(status_code=GONE)

    async def embed(self, request: EmbeddingRequest) -> Response:
        """The answer of /v1/embeddings. Raises ValueError or TypeError, HTTPError."""
        params = self.chapter.PoolingParams(request.use_activation, request.dimensions)
        outputs = await self.run(request.prompts, params)
        write = to_base64 if request.encoding_format == "base64" else to_list

        def make_data() -> list[Json]:
            return [{"object": "embedding", "embedding": write(x.outputs.data)} for x in outputs]

        return await self.build(make_data, outputs)

    async def score(self, request: ScoreRequest) -> Response:
        """The answer of /v1/score. Raises ValueError or TypeError, HTTPError."""
        texts_1, texts_2 = request.pairs
        self.chapter.check_pairs(len(texts_1), len(texts_2))
        params = self.chapter.PoolingParams(request.use_activation)
        outputs = await self.run([*texts_1, *texts_2], params)

        def make_data() -> list[Json]:
            make_scores = self.chapter.make_scores
            scores = make_scores(outputs[: len(texts_1)], outputs[len(texts_1) :], [])
            return [{"object": "score", "score": each.outputs.score} for each in scores]

        return await self.build(make_data, outputs)

    async def build(
        self, make_data: Callable[[], list[Json]], outputs: list[PoolingRequestOutput]
    ) -> Response:
        """The answer. It may be long, so it is made in a thread."""

        def build() -> Response:
            data = [{"index": index, **each} for index, each in enumerate(make_data())]
            return JsonResponse({**self.head, "data": data, "usage": count_tokens(outputs)})

        return await asyncio.to_thread(build)

    async def run(self, prompts: list[Any], params: Any) -> list[PoolingRequestOutput]:
        """The vectors of these prompts. All are checked and queued before one is waited for."""
        request, sent = self.request, self.raw_request.headers
        requests = EngineRequests(self.async_llm, self.head["id"])
        try:
            for prompt in prompts:
                await requests.add(
                    prompt,
                    params,
                    bool(request.add_special_tokens),
                    priority=request.priority or 0,
                    cache_salt=request.cache_salt,
                    trace_headers={name: sent[name] for name in TRACE_HEADERS if name in sent},
                    lora_request=self.lora_request,
                )
            # They end in any order; an output waits until it is asked for.
            return [check_output(await collector.get()) for collector in requests.collectors]
        finally:
            await requests.abort()


def check_output(output: Any) -> PoolingRequestOutput:
    """Raise HTTPError if the request has failed."""
    if output is None or output.error is not None:
        why = "it ended without an output" if output is None else output.error.message
        raise HTTPError(500, f"the request failed: {why}")
    return output


def to_list(vector: Tensor) -> list[float]:
    return vector.tolist()


def to_base64(vector: Tensor) -> str:
    """float32, little-endian."""
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


def count_tokens(outputs: list[PoolingRequestOutput]) -> Usage:
    """Of all prompts."""
    usage = to_usage(sum(len(output.prompt_token_ids) for output in outputs), 0)
    cached = sum(output.num_cached_tokens for output in outputs)
    return {**usage, "prompt_tokens_details": {"cached_tokens": cached}}
