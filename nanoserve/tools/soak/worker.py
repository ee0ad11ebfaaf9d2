"""A process that may hang, crash or eat memory. It is ended then, and says where it was.

    worker = Worker(ControlPart)              starts the process, makes ControlPart() there
    worker.call(round, seconds=60)            what ControlPart()(round) returns there

What a call has not brought at a time of the caller's choice is not waited for (TimeIsOver).
A process that is ended writes the stack of all its threads first (faulthandler, on SIGABRT).
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Literal

POLL = 0.05  # seconds between two looks at the memory of the process
PATIENCE = 10.0  # seconds for a process to write its stacks and end


class TimeIsOver(Exception):
    """The caller's time is over. The process has been ended, and is not to blame."""


class WorkerFailed(Exception):
    """A call that brought no result. `log` is the end of what the process wrote."""

    def __init__(
        self, kind: Literal["hang", "memory", "crash", "error"], what: str, log: str
    ) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind
        self.log = log


class Worker:
    """One process that makes one target and calls it again and again.

    Invariant: after an exception the process has ended; the next call starts another one. (After
    KeyboardInterrupt it has not, and close() ends it at once.)
    """

    def __init__(
        self, make: Callable[[], Callable[..., Any]], start_seconds: float = 120.0
    ) -> None:
        """`make` and all arguments and results must be picklable."""
        self.make = make
        self.start_seconds = start_seconds
        self._process: Any = None
        self._connection: Connection | None = None
        self._log: Path | None = None
        self._is_busy = False

    def call(
        self,
        *arguments: Any,
        seconds: float,
        megabytes: float = 4000.0,
        until: float = math.inf,
    ) -> Any:
        """What the target returns. Raises WorkerFailed if it raises, crashes, takes longer, or if
        the process grows beyond `megabytes`; TimeIsOver at `until` (of time.monotonic)."""
        self._is_busy = True
        if self._process is None:
            self._start()
            self._wait(self.start_seconds, megabytes, until)
        assert self._connection is not None
        self._connection.send(arguments)
        is_error, result = self._wait(seconds, megabytes, until)
        self._is_busy = False
        if is_error:
            raise self._end("error", result)
        return result

    def close(self) -> None:
        """End the process; at once if a call is under way."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.join(0 if self._is_busy else PATIENCE)
            self._kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        with NamedTemporaryFile(prefix="soak-", suffix=".log", delete=False) as file:
            self._log = Path(file.name)
        arguments = (theirs, self.make, str(self._log))
        self._process = context.Process(target=serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()

    def _wait(self, seconds: float, megabytes: float, until: float) -> Any:
        assert self._connection is not None
        deadline = time.monotonic() + seconds
        while not self._connection.poll(POLL):
            if not self._process.is_alive() and not self._connection.poll():
                raise self._end("crash", f"exit code {self._process.exitcode}")
            if resident_megabytes(self._process.pid) > megabytes:
                raise self._end("memory", f"more than {megabytes:.0f} MB")
            if time.monotonic() > until:
                self._kill()
                raise TimeIsOver
            if time.monotonic() > deadline:
                raise self._end("hang", f"longer than {seconds:.0f} s")
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(PATIENCE)
            raise self._end("crash", f"exit code {self._process.exitcode}") from None

    def _end(self, kind: Any, what: str) -> WorkerFailed:
        if self._process.is_alive() and kind != "error":
            if hasattr(os, "killpg"):
                os.kill(self._process.pid, signal.SIGABRT)
            self._process.join(PATIENCE)
        assert self._log is not None
        log = shorten(self._log.read_text(errors="replace"))
        self._kill()
        return WorkerFailed(kind, what, log)

    def _kill(self) -> None:
        """End the process and what it has started; forget it."""
        if hasattr(os, "killpg") and self._process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it has no group of its own yet
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._process = self._connection = None
        self._is_busy = False
        if self._log is not None:
            self._log.unlink(missing_ok=True)


def shorten(log: str) -> str:
    """The last lines that the process wrote, and where its main thread was when it was ended."""
    written, _, stacks = log.partition("Fatal Python error")
    stack = stacks.partition("Current thread")[2].partition("Extension modules")[0]
    lines = [*written.splitlines()[-8:], *stack.splitlines()[1:10]]
    return "\n".join(line[:200] for line in lines if line.strip())


def resident_megabytes(pid: int) -> float:
    """Memory of a process; 0 where the system has no /proc."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def serve(connection: Connection, make: Callable[[], Callable[..., Any]], log: str) -> None:
    """The worker's life: make the target, then answer calls until the pipe closes."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C in the terminal is not for this process
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
        if isinstance(stream, io.TextIOWrapper):  # names of cases are any text
            stream.reconfigure(errors="backslashreplace")
    faulthandler.enable()
    target = make()
    connection.send((False, None))
    while True:
        try:
            arguments = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            result = (False, target(*arguments))
        except BaseException:
            result = (True, traceback.format_exc())
        connection.send(result)
