"""What is raised for a request that can never be served?

Bad values raise VLLMValidationError, bad types raise TypeError. Code written for vLLM may catch a
bad value under either of its two names:

    try:
        llm.generate(prompt, SamplingParams(top_p=2))
    except VLLMValidationError as error:    # or: except ValueError
        print(error.parameter, error.value)     top_p 2

vLLM: vllm/exceptions.py (V1), where the class is no ValueError.
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


class RequestError(ValueError):
    """What a request brought cannot be computed: no token is possible, a logits processor failed.

    The message is for the user of this request; the cause, if there is one, is for the log.
    """


class NoTokenError(RequestError):
    """No token can be chosen for a sequence."""

    def __init__(self) -> None:
        super().__init__(
            "no token is possible: a logit is NaN or infinite (damaged weights do that), or "
            "allowed_token_ids, bad_words, min_tokens, logits processors and the mask together "
            "forbid all tokens."
        )


class Caught:
    """Runs code that is not ours. `with Caught() as caught:` ends what the block raises, if it is
    not a KeyboardInterrupt; then caught.error holds it."""

    error: BaseException | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return not isinstance(error, KeyboardInterrupt)


def describe_error(error: BaseException) -> str:
    """What went wrong, in one line; "ZeroDivisionError: division by zero". Never raises."""
    text = "(str() of it raises an error, too)"
    with Caught():
        text = str(error)
    if isinstance(error, RequestError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def brief(value: Any) -> str:
    """repr(value) for a message, shortened: what was given may have a million characters."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200  # characters
    return short.repr(value)
