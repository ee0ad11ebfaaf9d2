"""nanoserve: vLLM's ideas as running code.

>>> from nanoserve import LLM, SamplingParams
>>> LLM().generate("Once upon a time", SamplingParams(temperature=0))

Importing the package is cheap: torch is loaded when the first LLM is built.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from nanoserve.arg_utils import AsyncEngineArgs, EngineArgs
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.inputs import PromptType, TextPrompt, TokensPrompt
from nanoserve.llm import LLM
from nanoserve.output_processor import CompletionOutput, RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from nanoserve.extras.async_llm import AsyncLLM as AsyncLLM
    from nanoserve.extras.async_llm import AsyncLLMEngine as AsyncLLMEngine
    from nanoserve.extras.beam_search import BeamSearchParams as BeamSearchParams
    from nanoserve.extras.lora import LoRARequest as LoRARequest
    from nanoserve.extras.pooling import EmbeddingOutput as EmbeddingOutput
    from nanoserve.extras.pooling import EmbeddingRequestOutput as EmbeddingRequestOutput
    from nanoserve.extras.pooling import PoolingOutput as PoolingOutput
    from nanoserve.extras.pooling import PoolingParams as PoolingParams
    from nanoserve.extras.pooling import PoolingRequestOutput as PoolingRequestOutput
    from nanoserve.extras.pooling import ScoringOutput as ScoringOutput
    from nanoserve.extras.pooling import ScoringRequestOutput as ScoringRequestOutput
    from nanoserve.extras.structured_output import (
        StructuredOutputsParams as StructuredOutputsParams,
    )

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "LLMEngine",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
]


CHAPTERS = {
    "AsyncLLM": "async_llm",
    "AsyncLLMEngine": "async_llm",
    "BeamSearchParams": "beam_search",
    "StructuredOutputsParams": "structured_output",
    "LoRARequest": "lora",
    "EmbeddingOutput": "pooling",
    "EmbeddingRequestOutput": "pooling",
    "PoolingOutput": "pooling",
    "PoolingParams": "pooling",
    "PoolingRequestOutput": "pooling",
    "ScoringOutput": "pooling",
    "ScoringRequestOutput": "pooling",
}


def __getattr__(name: str) -> object:
    """What chapters add to this namespace. A chapter is imported when its name is used."""
    if name not in CHAPTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    chapter = f"{__name__}.extras.{CHAPTERS[name]}"
    try:
        return getattr(import_module(chapter), name)
    except ModuleNotFoundError as error:
        raise AttributeError(f"the chapter extras/{CHAPTERS[name]} was deleted") from error
