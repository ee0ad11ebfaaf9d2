"""nanoserve: vLLM's ideas as running code.

>>> from nanoserve import LLM, SamplingParams
>>> LLM().generate("Once upon a time", SamplingParams(temperature=0))

Importing the package is cheap: torch is loaded when the first LLM is built.
"""

from typing import TYPE_CHECKING

from nanoserve.arg_utils import EngineArgs
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.inputs import PromptType, TextPrompt, TokensPrompt
from nanoserve.llm import LLM
from nanoserve.output_processor import CompletionOutput, RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from nanoserve.extras.beam_search import BeamSearchParams as BeamSearchParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
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


def __getattr__(name: str) -> object:
    """What chapters add to this namespace. A chapter is imported when its name is used."""
    if name == "BeamSearchParams":
        try:
            from nanoserve.extras.beam_search import BeamSearchParams
        except ModuleNotFoundError as error:
            raise AttributeError("the chapter extras/beam_search.py was deleted") from error
        return BeamSearchParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
