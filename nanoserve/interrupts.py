"""What if a signal arrives in the middle of a step?

Python runs the handler of a signal in the main thread, between any two lines, and what the handler
raises comes out of these lines: KeyboardInterrupt (Ctrl-C), the TimeoutError of a time limit, the
SystemExit of a graceful end. It is meant for the application, so it must reach the application, and
be no request's error. Five functions see to this:

    with delayed_interrupt():           # handlers wait until the lists agree again
        ...
    except Exception as error:          # whose error is it?
        if is_from_signal(error):
            raise
    except unless_signal(OSError):      # the same in one line
        ...
    with suppress(OSError):             # but not a time limit's TimeoutError

vLLM: none. It leaves Ctrl-C and the like to the process of the API server.
"""

from __future__ import annotations

import _signal  # the functions behind signal's own, which make enums of numbers: 10 times slower
import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dis import opmap
from functools import partial
from itertools import pairwise
from traceback import walk_tb
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

Error = TypeVar("Error", bound=BaseException)

# What applications end with, or limit time with. (All 64 would take microseconds.)
NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGBREAK")
SIGNALS = tuple(int(getattr(signal, name)) for name in NAMES if hasattr(signal, name))

AGAIN = 0.1  # seconds


class _Delay:
    """The handler that takes the place of others for the time of a block."""

    def __init__(self) -> None:
        self.replaced: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.received: set[int] = set()
        self.is_over = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.is_over:  # another handler raised before this one was put back
            self.replaced[number](number, frame)
        else:
            self.received.add(number)

    def put_back(self) -> None:
        """Put back all that were replaced, SIGINT last: what comes meanwhile waits for `deliver`.
        Of two signals, the handler that is put back first may raise: the others follow."""
        try:
            for number, handler in reversed(self.replaced.items()):
                if _signal.getsignal(number) is self:
                    _signal.signal(number, handler)
        finally:
            if any(_signal.getsignal(number) is self for number in self.replaced):
                self.put_back()

    def deliver(self) -> None:
        """Call the handler of each signal that came, whatever one of them raises."""
        self.is_over = True
        if self.received:
            try:
                number = self.received.pop()
                # Not raise_signal: asyncio's loop.add_signal_handler would see it a second time.
                handler = _signal.getsignal(number)
                if callable(handler):
                    handler(number, sys._getframe())
                else:
                    signal.raise_signal(number)
            finally:
                self.deliver()


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Let the handlers of signals wait until the end of this block, so that what they raise leaves
    no change half made. It is raised at the end of the block.

    Only for what takes microseconds; the model's part of a step is not inside. Python delivers
    signals to the main thread only. Signals without a handler in Python are left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    delay = _Delay()
    for number in SIGNALS:
        handler = _signal.getsignal(number)
        if isinstance(handler, _Delay) and not handler.is_over:  # inside another such block
            break
        if callable(handler):
            delay.replaced[number] = handler
    try:
        for number in delay.replaced:
            _signal.signal(number, delay)
        yield
    finally:
        try:
            delay.put_back()
        finally:
            delay.deliver()


@contextmanager
def repeated_interrupt() -> Iterator[None]:
    """In this block, a Ctrl-C that Python drops comes once more. It drops what a callback of a weak
    reference or a __del__ raises ("Exception ignored in ..."), and each import has such a callback:
    a command that loads its modules would go on.

    It comes AGAIN seconds later, when this callback is over. For the main thread.
    """
    before, ident = sys.unraisablehook, threading.get_ident()

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            before(unraisable)
        elif hasattr(signal, "pthread_kill"):  # also wakes a thread that waits
            threading.Timer(AGAIN, signal.pthread_kill, (ident, signal.SIGINT)).start()
        else:
            threading.Timer(AGAIN, _thread.interrupt_main).start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


class suppress(contextlib.suppress):
    """contextlib.suppress, but what a handler of a signal raises passes: a time limit's
    TimeoutError is an OSError."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return not is_from_signal(error) and bool(super().__exit__(kind, error, traceback))


def unless_signal(*kinds: type[Error]) -> tuple[type[Error], ...]:
    """For `except unless_signal(OSError) as error:`, which leaves alone what a handler of a signal
    has raised. (Python evaluates this when there is an error.)"""
    return () if is_from_signal(sys.exc_info()[1]) else kinds


def is_from_signal(error: BaseException | None) -> bool:
    """Was it raised by a handler of a signal? Then one function of the traceback was given the
    frame before it as an argument: only a handler gets the frame that it interrupts. If it has
    deleted its arguments, it is known by its code, as long as it is installed. Python's own handler
    of Ctrl-C has no frame: its KeyboardInterrupt appears in the main thread without a `raise`."""
    if error is None:
        return False
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    is_main = threading.current_thread() is threading.main_thread()
    if isinstance(error, KeyboardInterrupt) and is_main and not _has_raise(error.__traceback__):
        return True
    for interrupted, frame in pairwise(frames):
        for value in frame.f_locals.values():
            given = value if type(value) is tuple else (value,)  # of `lambda *args: ...`
            if any(argument is interrupted for argument in given):
                return True
    codes = {frame.f_code for frame in frames}
    return any(_code_of(_signal.getsignal(number)) in codes for number in SIGNALS)


def _has_raise(traceback: TracebackType | None) -> bool:
    """Does it begin at a `raise` statement?"""
    is_raise = False
    while traceback is not None:
        opcode = traceback.tb_frame.f_code.co_code[traceback.tb_lasti]
        is_raise, traceback = opcode == opmap["RAISE_VARARGS"], traceback.tb_next
    return is_raise


def _code_of(handler: Any) -> CodeType | None:
    """The code of a function, a method, a partial of one, or an object's __call__."""
    function = handler.func if isinstance(handler, partial) else handler
    call = type(function).__call__ if callable(function) else None
    return getattr(function, "__code__", None) or getattr(call, "__code__", None)
