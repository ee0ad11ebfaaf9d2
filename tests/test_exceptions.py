"""Messages are short and never fail, whatever a value or an error does when it is written."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from nanoserve.exceptions import (
    QueueOverflowError,
    VLLMError,
    VLLMValidationError,
    as_validation_error,
    brief,
    describe_error,
)


class Panic(BaseException):
    """As the tokenizers library raises it: pyo3's PanicException is no Exception either."""


class Unwritable:
    """Its repr raises `error`."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __repr__(self) -> str:
        raise self.error


class Mute(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, 10**5000, [10**5000], list(range(10**5)), {"k": "x" * 10**6}, b"x" * 10**6]
    + [Unwritable(error()) for error in (ZeroDivisionError, SystemExit, Panic)]
    + [[Unwritable(Panic())], {"k": Unwritable(ZeroDivisionError())}],
    ids=lambda value: type(value).__name__,
)
def test_brief_is_short_for_every_value(value: Any) -> None:
    assert 0 < len(brief(value)) < 300


def test_brief_writes_what_is_short_as_repr_does() -> None:
    for value in ("a", [1, "b"], {"k": None}, 5, None, b"x", (1,)):
        assert brief(value) == repr(value)


def test_errors_are_described_by_type_and_message() -> None:
    assert describe_error(ZeroDivisionError("by zero")) == "ZeroDivisionError: by zero"
    assert describe_error(Mute()).startswith("Mute: ")


@pytest.mark.parametrize("error", [ValueError("no"), Panic("at lib.rs"), StopIteration(), Mute()])
def test_what_a_tokenizer_raises_becomes_a_validation_error(error: BaseException) -> None:
    with (
        pytest.raises(VLLMValidationError) as raised,
        as_validation_error("cannot read", "x" * 999),
    ):
        raise error
    assert str(raised.value).startswith("cannot read 'xxx")
    assert type(error).__name__ in str(raised.value)
    assert raised.value.__cause__ is error


def test_ctrl_c_and_validation_errors_stay_what_they_are() -> None:
    with pytest.raises(KeyboardInterrupt), as_validation_error("cannot read", "x"):
        signal.raise_signal(signal.SIGINT)
    error = VLLMValidationError("too long")
    with pytest.raises(VLLMValidationError) as raised, as_validation_error("cannot read", "x"):
        raise error
    assert raised.value is error


def test_a_full_queue_is_no_bad_value() -> None:
    """A server answers 503 to it, and 400 to a bad value."""
    error = QueueOverflowError(7)
    assert isinstance(error, VLLMError)
    assert isinstance(error, RuntimeError)
    assert not isinstance(error, ValueError)
    assert "7 requests wait" in str(error)
