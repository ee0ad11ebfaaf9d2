"""nanoserve: vLLM's ideas as running code.

>>> from nanoserve import LLM, SamplingParams
>>> LLM().generate("Once upon a time", SamplingParams(temperature=0))

Importing the package is cheap: torch is loaded when the first LLM is built.
"""

from importlib import import_module

from nanoserve.config import EngineConfig as EngineConfig
from nanoserve.llm import LLM as LLM
from nanoserve.sampling_params import RequestOutputKind as RequestOutputKind
from nanoserve.sampling_params import SamplingParams as SamplingParams
from nanoserve.sequence import CompletionOutput as CompletionOutput
from nanoserve.sequence import RequestOutput as RequestOutput

__version__ = "0.1.0"
LATER = {
    "LLMEngine": "engine",
    "AsyncLLM": "entrypoints.async_llm",
    "AsyncLLMEngine": "entrypoints.async_llm",
    "AsyncEngineArgs": "entrypoints.engine_args",
    "EngineArgs": "entrypoints.engine_args",
    "PromptType": "entrypoints.prompts",
    "TextPrompt": "entrypoints.prompts",
    "TokensPrompt": "entrypoints.prompts",
    "BeamSearchParams": "chapters.beam_search",
    "LoRARequest": "chapters.lora",
    "StructuredOutputsParams": "chapters.structured_output",
    "EmbeddingOutput": "chapters.pooling",
    "EmbeddingRequestOutput": "chapters.pooling",
    "PoolingOutput": "chapters.pooling",
    "PoolingParams": "chapters.pooling",
    "PoolingRequestOutput": "chapters.pooling",
    "ScoringOutput": "chapters.pooling",
    "ScoringRequestOutput": "chapters.pooling",
}  # imported when they are used; the names are vLLM's


def __getattr__(name: str) -> object:
    if name not in LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{LATER[name]}"), name)
