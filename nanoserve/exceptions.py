"""Which errors have a class of their own?

A request that can never be served is refused: bad values raise VLLMValidationError, bad types
raise TypeError. Code written for vLLM may catch a bad value under either of its two names:

    try:
        llm.generate(prompt, SamplingParams(top_p=2))
    except VLLMValidationError as error:    # or: except ValueError
        print(error.parameter, error.value)     top_p 2

An engine that has lost a part of itself, such as the process of another rank, raises
EngineDeadError from then on, whatever the request: build a new LLM.

vLLM: vllm/exceptions.py, vllm/v1/engine/exceptions.py (V1), where the classes are neither
ValueError nor RuntimeError.
"""

from __future__ import annotations

import reprlib
from typing import Any


class VLLMError(Exception):
    """Any error that has a class of its own."""


class VLLMClientError(VLLMError):
    """The request is wrong, not the engine."""


class VLLMValidationError(VLLMClientError, ValueError):
    """A value that is not allowed. The message says what was given, what is allowed and what to do.

    parameter: the name of the argument or field, value: what was given; None if the error is about
    several of them.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value


class EngineDeadError(VLLMError, RuntimeError):
    """This engine cannot run another step. No request is the cause. Build a new LLM."""


def brief(value: Any) -> str:
    """repr(value) for a message, shortened: what was given may have a million characters."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200  # characters
    return short.repr(value)
