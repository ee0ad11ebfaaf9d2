"""nanoserve: vLLM's ideas as running code.

>>> from nanoserve import LLM, SamplingParams
>>> LLM().generate("Once upon a time", SamplingParams(temperature=0))

Importing the package is cheap: torch is loaded when the first LLM is built.
"""

from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.extras.beam_search import BeamSearchParams
from nanoserve.llm import LLM
from nanoserve.output_processor import CompletionOutput, RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LLMEngine",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
]
