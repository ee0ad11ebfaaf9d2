"""Which process does an engine belong to?

An engine is made of threads, sockets, pipes and GPU memory of one process. None of these can be
sent to another process, and a forked child has only useless copies of them:

    parent   LLM  -- threads, sockets, ranks           goes on undisturbed
      | fork
    child    a copy of the LLM's memory, no threads    every call raises RuntimeError at once

Without the check the first step in the child would wait for ever for threads that it does not have.
close() does nothing in a child: what would be closed is the parent's. For the same reason the
cleaning up at exit (weakref.finalize, atexit) must not run in a child: see `in_this_process`.

A child that was forked before its parent built an LLM may build its own. To use an LLM in several
processes, build it in each of them; multiprocessing's start method "spawn" is always right.

This module imports no torch.

vLLM: vllm/utils/system_utils.py, `_maybe_force_spawn` (V1).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

EXIT_TIMEOUT = 5.0  # seconds that close() gives a running step, and the ranks, to end


class OwnedByProcess:
    """What works only in the process that made it: LLM and LLMEngine. Cannot be pickled or copied.

    `is_owner` is False in a child that was forked later; there `check_owner` raises RuntimeError.
    """

    _owner_pid: int

    def __new__(cls, *args: Any, **options: Any) -> Any:
        made = super().__new__(cls)
        made._owner_pid = os.getpid()
        return made

    @property
    def is_owner(self) -> bool:
        """Was this object made by the process that asks?"""
        return self._owner_pid == os.getpid()

    def check_owner(self) -> None:
        """Raise RuntimeError in a forked child."""
        if not self.is_owner:
            raise RuntimeError(
                f"this {type(self).__name__} belongs to process {self._owner_pid}, and this is its "
                f"forked child {os.getpid()}, which has none of its threads. Build the LLM in the "
                "child: with multiprocessing's start method 'spawn', or before the parent builds "
                "one."
            )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """What pickle, copy.copy and copy.deepcopy call. Raises TypeError."""
        name = type(self).__name__
        raise TypeError(
            f"{name} cannot be pickled or copied: its memory, threads and ranks belong to this "
            f"process. Send its EngineArgs instead, and call {name}.from_engine_args(...) where it "
            "is needed. SamplingParams and outputs can be pickled."
        )


def in_this_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, for weakref.finalize and atexit: a forked child runs their functions, too, and
    this one does nothing there."""
    return partial(_call_in, os.getpid(), function)


def _call_in(pid: int, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args) if os.getpid() == pid else None


def process_state(pid: int) -> str | None:
    """What a process of this machine does: one letter of Linux' /proc, such as "R" (runs), "S"
    (sleeps), "T" (stopped), "t" (held by a debugger), "D" (waits for a disk). None: not known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
