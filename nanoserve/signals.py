"""What if a signal arrives in the middle of a step?

Python runs the handler of a signal in the main thread, between any two lines, and what the handler
raises comes out of these lines: KeyboardInterrupt (Ctrl-C), the TimeoutError of a time limit, the
SystemExit of a graceful end. It is meant for the application, so it must reach the application, and
be no request's error. Two functions see to this:

    with delayed_interrupt():           # handlers wait until the lists agree again
        ...
    except Exception as error:          # whose error is it?
        if is_from_signal(error):
            raise

vLLM: none. It leaves Ctrl-C and the like to the process of the API server.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from traceback import walk_tb
from types import FrameType

# What applications end with, or limit time with. (To look at all 64 costs 40 microseconds.)
NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGBREAK")
SIGNALS = [getattr(signal, name) for name in NAMES if hasattr(signal, name)]
_is_delaying = False  # in the main thread


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Let the handlers of signals wait until the end of this block, so that what they raise leaves
    no change half made. What they raise comes from the end of the block.

    Only for what takes microseconds; the model's part of a step is not inside. Python delivers
    signals to the main thread only. Signals without a handler in Python are left alone.
    """
    global _is_delaying
    if _is_delaying or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    received: set[int] = set()
    is_over = False

    def note(number: int, frame: FrameType | None) -> None:
        handler = handlers[number]
        if not is_over:
            received.add(number)
        elif callable(handler):  # another handler raised before this one was put back
            handler(number, frame)

    try:
        _is_delaying = True
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, note)
        yield
    finally:
        with ExitStack() as stack:  # all are called, whatever one of them raises
            for number in received:
                stack.callback(signal.raise_signal, number)
            _is_delaying, is_over = False, True
            for number, handler in handlers.items():
                if callable(handler):
                    signal.signal(number, handler)


def is_from_signal(error: BaseException | None) -> bool:
    """Was it raised by a handler of a signal? Then one function of the traceback was given the
    frame before it as an argument: only a handler gets the frame that it interrupts."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)] if error else []
    for interrupted, frame in pairwise(frames):
        for value in frame.f_locals.values():
            given = value if type(value) is tuple else (value,)  # of `lambda *args: ...`
            if any(argument is interrupted for argument in given):
                return True
    return False
