"""Which endpoints does the server have?

    POST /v1/completions, /v1/chat/completions      serving.py
    POST /v1/embeddings, /v1/score                  of a pooling model
    GET  /v1/models                                 the model, and each LoRA adapter as a model
    POST /v1/load_lora_adapter, .../unload_...      if VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
    POST /tokenize, /detokenize
    GET  /health, /version, /metrics, /             the last is a page: page.py

OpenAI's client works with it, and so does what was written for vLLM's server:

    client = OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hello"}])

The engine knows none of this: it runs in a thread of its own (async_llm.py). FastAPI and pydantic
read requests, uvicorn speaks HTTP (launcher.py).

Left out: other APIs (responses, reranking, audio), limits of sizes and rates (a proxy's work).

vLLM: vllm/entrypoints/openai/api_server.py (V0); vllm/entrypoints/launchers/app.py,
vllm/entrypoints/serve/ (V1).
"""

from __future__ import annotations

import asyncio
import base64
import os
import secrets
import time
from collections.abc import Coroutine, Mapping
from itertools import count
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse, Response

from nanoserve import __version__
from nanoserve.entrypoints.async_llm import AsyncLLM
from nanoserve.entrypoints.server.errors import HANDLED, on_error
from nanoserve.entrypoints.server.page import add_page
from nanoserve.entrypoints.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Json,
    LoadLoRAAdapterRequest,
    ScoreRequest,
    TokenizeRequest,
    read_prompts,
)
from nanoserve.entrypoints.server.serving import ChatReply, EngineRequests, Reply, render

SETTING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
MAX_BODY_SIZE = 4 << 20  # bytes; to read a large one holds up all others


class Models:
    """The models of a server: one is loaded, and each adapter is one more."""

    def __init__(self, llm: AsyncLLM, names: list[str], adapters: Mapping[str, str]) -> None:
        """adapters: name -> folder. Raises ValueError for one that cannot be served."""
        self.llm, self.names, self.created = llm, names, int(time.time())
        self.adapters: dict[str, Any] = {}  # name -> LoRARequest
        self._numbers = count(1)  # of adapters: never used twice
        for name, path in adapters.items():
            self.load(name, path)

    def load(self, name: str, path: str) -> None:
        """Serve one more adapter, whose files are read and checked now."""
        from nanoserve.chapters.lora import LoRARequest

        if name in self.names or name in self.adapters:
            raise ValueError(f"there is a model {name!r} already; choose another lora_name.")
        if not hasattr(self.llm.engine, "add_lora"):
            raise ValueError("this server takes no adapters; start it with --enable-lora.")
        request = LoRARequest(name, next(self._numbers), path)
        self.llm.engine.add_lora(request)
        self.adapters[name] = request

    def unload(self, name: str) -> None:
        """Serve an adapter no more. Requests that run go on."""
        if (request := self.adapters.pop(name, None)) is None:
            raise HTTPException(404, f"there is no LoRA adapter {name!r}.")
        self.llm.engine.remove_lora(request.lora_int_id)

    def find(self, name: str | None) -> tuple[str, Any]:
        """(the name in the answer, the adapter or None). Raises HTTPException."""
        if name is None or name in self.names:
            return self.names[0], None
        if name not in self.adapters:
            known = ", ".join([*self.names, *self.adapters])
            raise HTTPException(404, f"The model {name!r} does not exist. There is: {known}.")
        return name, self.adapters[name]

    def cards(self) -> list[Json]:
        """What /v1/models says."""
        shared = {"object": "model", "created": self.created, "owned_by": "nanoserve"}
        shared["max_model_len"] = most_tokens(self.llm)
        parents = dict.fromkeys(self.names) | dict.fromkeys(self.adapters, self.names[0])
        return [{"id": name, **shared, "parent": parent} for name, parent in parents.items()]


def most_tokens(llm: AsyncLLM) -> int:
    """Of a request: the KV cache may hold fewer than max_model_len."""
    config, num_blocks = llm.engine.config, llm.engine.block_manager.num_blocks
    held = min(num_blocks * config.block_size, llm.engine.input_processor.capacity)
    return min(config.max_model_len, held)


def build_app(
    llm: AsyncLLM,
    names: list[str] | None = None,
    adapters: Mapping[str, str] | None = None,
    api_keys: list[str] | None = None,
    allowed_origins: list[str] | None = None,
) -> FastAPI:
    """The server as an ASGI application. names: of the model; answers have the first."""
    models = Models(llm, names or [str(llm.engine.config.model or "demo")], adapters or {})
    about: Json = {
        "title": "nanoserve",
        "version": __version__,
        "docs_url": None,
        "redoc_url": None,
    }
    app = FastAPI(**about, max_body_size=MAX_BODY_SIZE)
    app.state.model_name = models.names[0]
    if allowed_origins:
        any_of: Json = {"allow_methods": ["*"], "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, **any_of)
    for kind in HANDLED:
        app.add_exception_handler(kind, on_error)

    def check_key(authorization: Annotated[str, Header()] = "") -> None:
        given = authorization.removeprefix("Bearer ").encode()
        if api_keys and not any(secrets.compare_digest(given, key.encode()) for key in api_keys):
            raise HTTPException(401, "the header must be: Authorization: Bearer KEY.")

    keyed = APIRouter(dependencies=[Depends(check_key)])
    add_generation(keyed, llm, models)
    add_pooling(keyed, llm, models)
    add_utilities(keyed, llm, models)
    if os.environ.get(SETTING) == "1":
        add_lora(keyed, models, llm)
    add_page(app, keyed, llm, models.names[0])
    app.include_router(keyed)
    add_probes(app, llm)
    return app


async def until_gone(raw: Request, work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` returns. If the client goes away first, the work is cancelled, and nobody reads
    what is raised."""

    async def wait() -> None:
        while (await raw.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(wait())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        task.cancel()  # has no effect if it has ended
        await asyncio.gather(task, gone, return_exceptions=True)
    if task.cancelled():
        raise HTTPException(408, "the client has gone away.")
    return task.result()


def add_generation(router: APIRouter, llm: AsyncLLM, models: Models) -> None:
    @router.post("/v1/completions")
    async def create_completion(raw: Request, request: CompletionRequest) -> Any:
        reply = Reply(llm, request, *models.find(request.model))
        return await until_gone(raw, reply.respond())

    @router.post("/v1/chat/completions")
    async def create_chat_completion(raw: Request, request: ChatCompletionRequest) -> Any:
        reply = ChatReply(llm, request, *models.find(request.model))
        return await until_gone(raw, reply.respond())


def add_pooling(router: APIRouter, llm: AsyncLLM, models: Models) -> None:
    async def encode(prompts: list[Any], request: Any) -> tuple[list[Any], Json]:
        """The vectors of these prompts, and what all answers have."""
        from nanoserve.chapters.pooling import PoolingParams

        if not hasattr(llm.engine.config, "pooler_config"):
            raise ValueError("this model writes text; start the server with --runner pooling.")
        name, lora_request = models.find(request.model)
        params = PoolingParams(dimensions=getattr(request, "dimensions", None))
        each = {"priority": request.priority, "cache_salt": request.cache_salt}
        requests = EngineRequests(llm, "pool", **each, lora_request=lora_request)
        try:
            for prompt in prompts:
                await requests.add(prompt, params)
            found = {index: output async for index, output in requests.outputs()}
        finally:
            requests.close()
        number = sum(len(output.prompt_token_ids) for output in found.values())
        usage = {"prompt_tokens": number, "total_tokens": number}
        about = {"object": "list", "created": int(time.time()), "model": name, "usage": usage}
        return [found[index].outputs.data for index in range(len(prompts))], about

    @router.post("/v1/embeddings")
    async def create_embedding(raw: Request, request: EmbeddingRequest) -> Any:
        work = encode(read_prompts(request.input), request)
        vectors, about = await until_gone(raw, work)
        return {
            **about,
            "data": [
                {
                    "object": "embedding",
                    "index": i,
                    "embedding": write(vector, request.encoding_format),
                }
                for i, vector in enumerate(vectors)
            ],
        }

    @router.post("/v1/score")
    @router.post("/score")
    async def create_score(raw: Request, request: ScoreRequest) -> Any:
        queries, documents = read_prompts(request.queries), read_prompts(request.documents)
        if len(queries) not in (1, len(documents)):
            raise ValueError(f"{len(queries)} queries, {len(documents)} documents: 1, or as many.")
        vectors, about = await until_gone(raw, encode([*queries, *documents], request))
        first, second = vectors[: len(queries)], vectors[len(queries) :]
        pairs = zip(first * (len(documents) // len(first)), second, strict=True)
        scores = [float(one @ other / (one.norm() * other.norm())) for one, other in pairs]
        data = [{"object": "score", "index": i, "score": score} for i, score in enumerate(scores)]
        return {**about, "data": data}


def write(vector: Any, encoding_format: str) -> list[float] | str:
    """A vector as numbers, or as what OpenAI's client asks for: base64 of little-endian float32."""
    if encoding_format == "float":
        return vector.tolist()
    return base64.b64encode(vector.numpy().astype("<f4").tobytes()).decode()


def add_utilities(router: APIRouter, llm: AsyncLLM, models: Models) -> None:
    @router.get("/v1/models")
    async def show_models() -> Json:
        return {"object": "list", "data": models.cards()}

    @router.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Json:
        models.find(name)
        return next(card for card in models.cards() if card["id"] == name)

    @router.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> Json:
        if (request.prompt is None) == (not request.messages):
            raise ValueError("give either prompt (a text) or messages (a conversation).")
        text = request.prompt
        if text is None:
            text = (await render(llm, request))["prompt"]
        adds = request.add_special_tokens
        adds = not request.messages if adds is None else adds
        tokens = await llm.tokenize(text, add_special_tokens=adds)
        strings = llm.get_tokenizer().convert_ids_to_tokens(tokens)
        found = {"count": len(tokens), "max_model_len": most_tokens(llm), "tokens": tokens}
        return {**found, "token_strs": strings if request.return_token_strs else None}

    @router.post("/detokenize")
    async def detokenize(request: DetokenizeRequest) -> Json:
        return {"prompt": await llm.detokenize(request.tokens)}


def add_lora(router: APIRouter, models: Models, llm: AsyncLLM) -> None:
    @router.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: LoadLoRAAdapterRequest) -> Response:
        await llm.run_in_thread(models.load, request.lora_name, request.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: LoadLoRAAdapterRequest) -> Response:
        models.unload(request.lora_name)
        name = request.lora_name
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def add_probes(app: FastAPI, llm: AsyncLLM) -> None:
    """What needs no key."""

    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        await llm.check_health()
        return Response()

    @app.get("/version")
    async def version() -> Json:
        return {"version": __version__}

    @app.get("/metrics")
    async def metrics() -> Response:
        if not hasattr(llm.engine, "render_metrics"):
            raise HTTPException(404, "this engine counts nothing (collect_metrics).")
        text = await asyncio.to_thread(llm.engine.render_metrics)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
