"""What handlers of signals raise: it waits while lists change, and it reaches the application."""

from __future__ import annotations

import _signal
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanoserve import LLM, SamplingParams, __main__
from nanoserve.distributed.rank_thread import RankThread
from nanoserve.distributed.ranks import read_failure
from nanoserve.exceptions import Caught, VLLMValidationError, as_validation_error
from nanoserve.inputs import render_chat
from nanoserve.interrupts import (
    delayed_interrupt,
    is_from_signal,
    repeated_interrupt,
    suppress,
    unless_signal,
)
from nanoserve.kernels import native_cpu
from nanoserve.models.weight_files import read_slices


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def fail(number: int, frame: Any) -> None:
    raise TimeoutError("the time is over")


def fail_once(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise TimeoutError


def fail_without_arguments(number: int, frame: Any) -> None:
    del number, frame
    raise TimeoutError


class Handler:
    def method(self, number: int, frame: Any) -> None:
        raise TimeoutError

    __call__ = method


class Forgetful:
    def method(self, number: int, frame: Any) -> None:
        del number, frame
        raise TimeoutError

    def __call__(self, number: int, frame: Any) -> None:
        del self, number, frame
        raise TimeoutError


HANDLERS: dict[str, Callable[..., Any]] = {
    "a function": fail,
    "it puts the default back": fail_once,
    "a function of any arguments": lambda *args: fail(*args),
    "a method": Handler().method,
    "an object": Handler(),
    "a function that deletes its arguments": fail_without_arguments,
    "a partial that deletes them": partial(fail_without_arguments),
    "an object that deletes them": Forgetful(),
    "a method that deletes them": Forgetful().method,
    "a partial": partial(lambda own, number, frame: fail(number, frame), 1),
}


class Chat:
    """A tokenizer whose template takes so long that the time is over."""

    chat_template = "..."

    @property
    def guard(self) -> Chat:
        return self

    def find_content_format(self, template: str, content_format: str) -> str:
        return "string"

    def render(self, *args: Any) -> str:
        signal.raise_signal(signal.SIGTERM)
        return ""


@pytest.mark.parametrize("name", HANDLERS)
def test_what_a_handler_raises_is_nobody_elses_error(name: str) -> None:
    """Wherever code that is not ours is called, and also if the handler had to wait."""

    def encode() -> None:
        with as_validation_error("the tokenizer cannot encode", "text"):
            signal.raise_signal(signal.SIGTERM)

    def call() -> None:
        with Caught():
            signal.raise_signal(signal.SIGTERM)

    def call_late() -> None:
        with Caught(), delayed_interrupt():
            signal.raise_signal(signal.SIGTERM)

    def chat() -> None:
        render_chat(Chat(), [{"role": "user", "content": "Hi"}], {})

    def ignore() -> None:
        with suppress(OSError):
            signal.raise_signal(signal.SIGTERM)

    def catch() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except unless_signal(OSError):
            pass

    for function in (encode, call, call_late, chat, ignore, catch):
        signal.signal(signal.SIGTERM, HANDLERS[name])
        with pytest.raises(TimeoutError) as raised:
            function()
        assert is_from_signal(raised.value)


@pytest.mark.slow
def test_a_time_limit_ends_the_wait_for_a_rank() -> None:
    """Its TimeoutError is not mistaken for the wait's own."""
    thread, go_on = RankThread(), threading.Event()

    def work() -> None:
        signal.raise_signal(signal.SIGTERM)  # its handler runs in the main thread, which waits
        go_on.wait(20)

    signal.signal(signal.SIGTERM, fail)
    with pytest.raises(TimeoutError, match="the time is over"):
        thread.run(work, lambda seconds: None)
    go_on.set()
    thread.stop()
    assert thread.join(20)


def test_a_block_that_never_began_ends_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the entry of a block and its first line: Python throws GeneratorExit in."""
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    block = as_validation_error("the tokenizer cannot encode", "text")
    block.__enter__()
    del block
    assert not dropped


def test_other_errors_are_not_from_a_signal() -> None:
    signal.signal(signal.SIGTERM, fail)
    with pytest.raises(VLLMValidationError), as_validation_error("the tokenizer fails", 1):
        raise TimeoutError
    with Caught() as caught:
        raise TimeoutError
    assert not is_from_signal(caught.error)
    assert not is_from_signal(None)
    with Caught():
        raise KeyboardInterrupt  # Ctrl-C comes without a `raise`
    with suppress(OSError):
        raise TimeoutError
    with suppress(ValueError):
        try:
            raise TimeoutError
        except unless_signal(KeyError, OSError) as error:
            raise ValueError from error


def test_a_thread_has_no_ctrl_c() -> None:
    """What looks like one is an error of the code that runs there."""
    caught: list[BaseException | None] = []

    def work() -> None:
        with Caught() as mine:
            signal.default_int_handler(signal.SIGINT, None)
        caught.append(mine.error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert [type(error) for error in caught] == [KeyboardInterrupt]
    with pytest.raises(KeyboardInterrupt), Caught():
        signal.default_int_handler(signal.SIGINT, None)


class TooLate(TimeoutError, RuntimeError):
    """Of most of the types that a build expects."""


def fail_late(number: int, frame: Any) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise TooLate


def late(*args: Any, **options: Any) -> None:
    signal.raise_signal(signal.SIGTERM)


class Slow:
    __deepcopy__ = late


def load_kept() -> None:
    native_cpu._load_kept(SimpleNamespace(glob=lambda form: [Path(__file__)]), "")  # type: ignore


def build(**options: Any) -> Callable[[], object]:
    return lambda: LLM(num_kv_blocks=32, **options)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("nanoserve.input_processor.read_tokenizer", build()),
        ("huggingface_hub.snapshot_download", build(model="nobody/nothing")),
        ("nanoserve.models.weight_files.safe_open", lambda: list(read_slices(Path("x")))),
        ("nanoserve.models.loader.build_model", build()),
        ("nanoserve.models.transformers_fallback.deepcopy", build(model_impl="transformers")),
        ("nanoserve.models.transformers_fallback.run_body", build(model_impl="transformers")),
        ("transformers.AutoModelForCausalLM.from_config", build(model_impl="transformers")),
        ("transformers.PreTrainedModel.from_pretrained", build(model_impl="transformers")),
        ("pathlib.Path.mkdir", native_cpu.cache_folder),
        ("nanoserve.kernels.native_cpu._digest", load_kept),
        ("nanoserve.distributed.ranks.range", partial(read_failure, SimpleNamespace(), 2)),
        ("nanoserve.distributed.ranks.start_store", build(tensor_parallel_size=2, device="cpu")),
        ("builtins.ascii", SamplingParams(extra_args={"": Slow()}).clone),
    ],
)
def test_a_time_limit_during_a_build(monkeypatch: pytest.MonkeyPatch, name: str, call: Any) -> None:
    """It reaches the application wherever a build calls what may fail."""
    signal.signal(signal.SIGTERM, fail_late)
    monkeypatch.setattr(name, late, raising=False)
    with pytest.raises(TooLate):
        call()


def test_handlers_wait_until_the_end_of_the_outermost_block() -> None:
    """All that came are called, in spite of what the others raise; then they are in place again."""
    called: list[int] = []

    def note(number: int, frame: Any) -> None:
        called.append(number)
        raise TimeoutError

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)

    def play() -> None:
        with delayed_interrupt():
            with delayed_interrupt():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGTERM)
            assert not called

    with pytest.raises(TimeoutError):
        play()
    assert sorted(called) == [signal.SIGINT, signal.SIGTERM]
    assert all(signal.getsignal(number) is note for number in (signal.SIGINT, signal.SIGTERM))


def test_signals_without_a_handler_are_left_alone() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with delayed_interrupt():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_a_handler_that_raises_while_the_others_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others still do what they did before."""
    install = _signal.signal
    signal.signal(signal.SIGINT, fail)
    signal.signal(signal.SIGTERM, fail)

    def interrupted(number: int, handler: Any) -> Any:
        result = install(number, handler)
        if (number, handler) == (signal.SIGINT, fail):
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(_signal, "signal", interrupted)
    with pytest.raises(TimeoutError), delayed_interrupt():
        pass
    for _ in range(2):
        with pytest.raises(TimeoutError):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(TimeoutError), delayed_interrupt():
            signal.raise_signal(signal.SIGTERM)


def press_in_a_callback(*_: Any) -> None:
    """As when an import calls back a weak reference because its module is there."""
    lock = type("Lock", (), {})()
    reference = weakref.ref(lock, lambda _: signal.raise_signal(signal.SIGINT))
    del lock
    assert reference() is None
    threading.Event().wait(60)


def test_a_ctrl_c_that_python_drops_comes_once_more() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), repeated_interrupt():
        press_in_a_callback()
    assert sys.unraisablehook is before


def test_other_errors_that_python_drops_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError

    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(unraisable.exc_type))
    with repeated_interrupt():
        Broken()
    assert seen == [ValueError]


def test_a_command_hears_a_ctrl_c_while_it_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(__main__, "import_module", press_in_a_callback)
    assert __main__.main(["doctor"]) == 130
