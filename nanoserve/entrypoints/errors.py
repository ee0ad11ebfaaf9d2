"""What is raised for a request that is refused?

Bad values raise VLLMValidationError, bad types raise TypeError; a request that finds the queue full
raises QueueOverflowError. Code written for vLLM may catch a bad value under either of its two
names:

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

import functools
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from nanoserve.sampling_params import SamplingParams


def is_from_signal(error: BaseException | None) -> bool:
    """Ctrl-C and the like are not ours to catch."""
    return error is not None and not isinstance(error, Exception)


Class = TypeVar("Class")


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


class QueueOverflowError(VLLMError, RuntimeError):
    """As many requests wait as max_num_waiting allows. The request is right: it may be added later,
    or to another engine (a server answers 503)."""

    def __init__(self, max_num_waiting: int) -> None:
        super().__init__(
            f"{max_num_waiting} requests wait already (max_num_waiting). Add this one later, or "
            "build the engine with a larger max_num_waiting (None: no limit)."
        )


class EngineDeadError(VLLMError, RuntimeError):
    """This engine cannot run another step. No request is the cause. Build a new LLM."""


class RequestError(ValueError):
    """What a request brought cannot be computed: no token is possible, a logits processor failed.

    The message is for the user of this request; the cause, if there is one, is for the log.
    """


class NoTokenError(RequestError):
    """No token can be chosen for a sequence."""

    # Why: also the number that stands in the place of the token id.
    FORBIDDEN = -1  # all logits are -inf
    BAD_LOGITS = -2  # the model's own logits are NaN or infinite
    BAD_CHANGES = -3  # the logits are NaN or infinite after the request's settings changed them

    def __init__(self, why: int, params: SamplingParams | None = None) -> None:
        """params: those of the request, if they change logits."""
        text = "the model's logits are NaN or infinite. Damaged weights do that."
        changes = [name for name in CHANGES_LOGITS if getattr(params, name, None)]
        processors = [
            _name(function) for function in getattr(params, "logits_processors", ()) or ()
        ]
        if why == self.FORBIDDEN:
            text = f"{', '.join(changes)} forbid all tokens." if changes else "all are forbidden."
        elif why == self.BAD_CHANGES and processors:
            text = f"a logits processor returned NaN or infinity ({', '.join(processors)})."
        elif why == self.BAD_CHANGES:
            text = "logit_bias or penalties make logits infinite."
        super().__init__(f"no token is possible: {text}")


# The fields of SamplingParams that can forbid tokens.
CHANGES_LOGITS = (
    *("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens", "logit_bias"),
    "logits_processors",
)


def _name(function: Any) -> str:
    """The "module.name" of a function, or that of the class of a callable object."""
    with Caught():
        return f"{function.__module__}.{function.__qualname__}"[:200]
    return f"{type(function).__module__}.{type(function).__qualname__}"


class Caught:
    """Runs code that is not ours. `with Caught() as caught:` ends what the block raises, if it is
    not from the handler of a signal, such as Ctrl-C; then caught.error holds it."""

    error: BaseException | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        self.error = error
        return not is_from_signal(error)


def describe_error(error: BaseException) -> str:
    """What went wrong, in one line; "ZeroDivisionError: division by zero". Never raises."""
    text = "(str() of it raises an error, too)"
    with Caught():
        text = str(error)
    if isinstance(error, RequestError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def brief(value: Any) -> str:
    """repr(value) for a message, shortened: what was given may have a million characters. A value
    that cannot be written is named by its type."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200  # characters
    with Caught():  # such as an int of more than 4300 digits, or a __repr__ that fails
        return short.repr(value)
    return f"<{type(value).__name__}>"


@contextmanager
def as_validation_error(what: str, value: Any) -> Iterator[None]:
    """Whatever fails inside becomes a VLLMValidationError: "<what> <value>: <the error>.".

    For calls of a tokenizer: a bug in its Rust code arrives as PanicException, which is no
    Exception. Ctrl-C stays Ctrl-C, and so does what other handlers of signals raise.
    """
    try:
        yield
    except (GeneratorExit, VLLMValidationError):
        raise  # GeneratorExit: Ctrl-C came before the first line inside
    except BaseException as error:
        if is_from_signal(error):
            raise
        message = f"{what} {brief(value)}: {describe_error(error):.300}."
        raise VLLMValidationError(message) from error


def explain_unknown(removed: Mapping[str, str]) -> Callable[[type[Class]], type[Class]]:
    """Decorates a dataclass: an argument that its constructor does not know raises TypeError with
    what it is here (`removed`, by name), or with the name that was probably meant."""

    def decorate(cls: type[Class]) -> type[Class]:
        init = cls.__init__

        @functools.wraps(init)
        def explain(self: Any, *args: Any, **given: Any) -> None:
            names = cls.__dataclass_fields__  # type: ignore[attr-defined]
            for name in given.keys() - names.keys():
                message = f"{cls.__name__}() got an unexpected keyword argument {name!r}."
                if name in removed:
                    raise TypeError(f"{message} nanoserve does not have it: {removed[name]}")
                near = get_close_matches(name, names, n=1)
                raise TypeError(message + "".join(f" Did you mean {other!r}?" for other in near))
            init(self, *args, **given)

        cls.__init__ = explain  # type: ignore[method-assign]
        return cls

    return decorate
