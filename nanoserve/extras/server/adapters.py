"""Which models does the server have beside the one that it has loaded?

To a client, a LoRA adapter is a model of its own: it names the adapter as `model`, and /v1/models
lists it with the base model as its parent.

    nanoserve serve --enable-lora --lora-modules pirate=path/to/pirate poet=path/to/poet

    POST /v1/load_lora_adapter    {"lora_name": "poet", "lora_path": "poet-v2"}
    POST /v1/unload_lora_adapter  {"lora_name": "poet"}

The last two change what other clients get, and read files of this machine. So they exist only if
VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 is in the environment and the server has a --lora-folder. A
lora_path is the path of a folder in it; what leads out of it, also by a link, is refused.

Each adapter that is loaded gets a new lora_int_id, so that the prefix cache never mixes two of the
same name. Requests that run go on when their adapter is unloaded.

Left out: load_inplace (unload it first), adapters that a server finds by their name (resolvers).

vLLM: vllm/entrypoints/openai/models/serving.py, vllm/entrypoints/serve/lora/ (V1);
vllm/entrypoints/openai/serving_models.py (V0).
"""

from __future__ import annotations

import os
from itertools import count
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from nanoserve.exceptions import VLLMValidationError, brief
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.server.errors import HTTPError
from nanoserve.extras.server.options import FrontendArgs, read_lora_module
from nanoserve.extras.server.protocol import OpenAIBaseModel, describe_post
from nanoserve.extras.server.reply import read_body
from nanoserve.logger import init_logger

if TYPE_CHECKING:
    from nanoserve.extras.lora import LoRARequest
    from nanoserve.extras.server.app import ServerState

logger = init_logger(__name__)
SETTING = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"


class LoadLoRAAdapterRequest(OpenAIBaseModel):
    """POST /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadLoRAAdapterRequest(OpenAIBaseModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None  # as in vLLM, the name alone decides


def make_router(state: ServerState) -> APIRouter:
    """The endpoints, if this server has them."""
    router = APIRouter()
    adapters = state.adapters
    if not adapters.may_change:
        return router

    @router.post("/v1/load_lora_adapter", **describe_post(LoadLoRAAdapterRequest, str))
    async def load_lora_adapter(raw_request: Request) -> Response:
        """Serve one more adapter."""
        request, _ = await read_body(state, raw_request, LoadLoRAAdapterRequest)
        await adapters.load(request)
        return Response(f"Success: LoRA adapter '{request.lora_name}' added successfully.")

    @router.post("/v1/unload_lora_adapter", **describe_post(UnloadLoRAAdapterRequest, str))
    async def unload_lora_adapter(raw_request: Request) -> Response:
        """Serve an adapter no more."""
        request, _ = await read_body(state, raw_request, UnloadLoRAAdapterRequest)
        await adapters.unload(request.lora_name)
        return Response(f"Success: LoRA adapter '{request.lora_name}' removed successfully.")

    return router


class ServedAdapters:
    """The adapters that clients may name, by name."""

    def __init__(self, async_llm: AsyncLLM, args: FrontendArgs, model_names: list[str]) -> None:
        """Raises ValueError for an adapter of args.lora_modules that cannot be served."""
        self.async_llm = async_llm
        self.model_names = model_names
        self.requests: dict[str, LoRARequest] = {}
        self._numbers = count(1)
        is_set = os.environ.get(SETTING, "").strip().lower() in ("1", "true")
        self.folder = args.lora_folder
        self.may_change = is_set and self.folder is not None and async_llm.config.enable_lora
        if not self.may_change and (is_set or self.folder is not None):
            logger.warning(
                f"adapters cannot be loaded while the server runs: that needs {SETTING}=1 in the "
                "environment, --lora-folder and --enable-lora."
            )
        manager = async_llm.engine.lora_manager
        if args.lora_modules and manager is None:
            raise ValueError("lora_modules needs an engine with enable_lora=True.")
        for name, path in map(read_lora_module, args.lora_modules):
            request = self._make(name, path)
            manager.get_adapter(request)
            self.requests[name] = request

    def _make(self, name: str, path: str) -> LoRARequest:
        """Raises ValueError for a name that is taken."""
        from nanoserve.extras.lora import LoRARequest  # here: a server without that chapter serves

        if name in self.requests or name in self.model_names:
            raise VLLMValidationError(
                f"there is a model {brief(name)} already. Give the adapter another lora_name, or "
                "unload the other one.",
                parameter="lora_name",
            )
        return LoRARequest(name, next(self._numbers), path, self.model_names[0])

    async def load(self, given: LoadLoRAAdapterRequest) -> None:
        """Check an adapter and serve it. Raises ValueError if it cannot be served."""
        if given.load_inplace:
            raise VLLMValidationError(
                "load_inplace is true, and an adapter never changes here. Unload it, then load the "
                "new one.",
                parameter="load_inplace",
            )
        request = self._make(given.lora_name, self._find(given.lora_path))
        await self.async_llm.add_lora(request)
        if given.lora_name in self.requests:  # another client was faster
            await self._forget_others()
            self._make(given.lora_name, request.path)  # raises
        self.requests[given.lora_name] = request

    def _find(self, lora_path: str) -> str:
        """The real path of a folder in the server's folder."""
        assert self.folder is not None, "no endpoint without a folder"
        root, found = os.path.realpath(self.folder), ""
        if "\0" not in lora_path and len(lora_path) < 4096:
            found = os.path.realpath(os.path.join(root, lora_path))
        if not (found.startswith(os.path.join(root, "")) and os.path.isdir(found)):
            raise VLLMValidationError(
                f"lora_path is {brief(lora_path)}; allowed: the path of a folder in the server's "
                "--lora-folder.",
                parameter="lora_path",
            )
        return found

    async def unload(self, name: str) -> None:
        """Raises HTTPError 404 if there is no adapter of this name."""
        if self.requests.pop(name, None) is None:
            raise HTTPError(404, f"there is no LoRA adapter {name!r:.200}.", "lora_name")
        await self._forget_others()

    async def _forget_others(self) -> None:
        """Let the engine know no other adapters than these. More than one may have to go: a request
        that names an adapter while it is unloaded makes it known again."""
        served = {request.lora_int_id for request in self.requests.values()}
        for number in await self.async_llm.list_loras() - served:
            await self.async_llm.remove_lora(number)
