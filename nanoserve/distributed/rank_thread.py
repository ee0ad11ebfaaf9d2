"""In which thread does rank 0 run, and what is said while it waits?

The ranks of a step wait for each other, so rank 0 must run its part of a step to the end, even if
Ctrl-C interrupts the caller. RankThread is a thread for these parts. The caller waits for the
result, and a caller that was interrupted leaves the thread alone:

    caller          run(step 1) ........ result     run(step 2) ... Ctrl-C      run(step 3)
    nanoserve-rank-0    | step 1 |                      | step 2 .......... | step 3 |

A rank can stand still without having ended: somebody has sent it SIGSTOP, a debugger holds it, its
memory was swapped out. Then rank 0 waits, until STEP_TIMEOUT. So a caller that waits long says so:
`run` calls its argument `watch` after 5 seconds, after 10, 20, 40 and so on. A step that ends
sooner pays nothing for this: the caller waits for one event, with a time limit.

The thread is a daemon, so that Python can exit while a step hangs. concurrent.futures has a thread
pool for the same purpose, but Python waits for the pool's threads before it exits.

vLLM: nothing of the kind; the worker processes log a long wait in
vllm/distributed/device_communicators/shm_broadcast.py.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from nanoserve.exceptions import EngineDeadError
from nanoserve.interrupts import unless_signal

Result = TypeVar("Result")
FIRST_REPORT = 5.0  # seconds of waiting; each later report after twice as many


class RankThread:
    """Runs what it is given in one thread, one after the other.

    Invariant: while the thread is idle it holds no reference to what it has run. The thread ends
    after `stop`; it does not keep the process from exiting.
    """

    def __init__(self) -> None:
        """Raises RuntimeError if the system has no thread left."""
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(
            target=run_all, args=(self._queue,), name="nanoserve-rank-0", daemon=True
        )
        self._thread.start()
        self.num_callers = 0  # of run() that wait now

    def run(self, work: Callable[[], Result], watch: Callable[[float], object]) -> Result:
        """The result of work(), or its exception. If the wait is interrupted, work() still runs to
        its end. `watch` is called with the seconds waited so far, if the wait is long. Raises
        EngineDeadError if the thread has ended before it came to `work`."""
        future: Future[Result] = Future()
        self._queue.put((work, future))
        del work
        started, seconds = time.monotonic(), FIRST_REPORT
        self.num_callers += 1
        try:
            while True:
                try:
                    return future.result(started + seconds - time.monotonic())
                except unless_signal(concurrent.futures.TimeoutError):
                    if future.done():  # the exception of work(), or it ended just now
                        return future.result()
                    if not self._thread.is_alive():  # stopped before it came to this work
                        raise EngineDeadError("the engine was closed.") from None
                watch(seconds)
                seconds *= 2
        finally:
            self.num_callers -= 1

    def stop(self) -> None:
        """End the thread after what it has been given so far."""
        self._queue.put(None)

    def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for the end of the thread, after `stop`. True if it has
        ended."""
        if self._thread is not threading.current_thread():  # garbage collection, in this thread
            self._thread.join(max(0.0, timeout))
        return not self._thread.is_alive()


def run_all(queue: SimpleQueue[Any]) -> None:
    """The thread: run each item of the queue, until an item is None."""
    while (item := queue.get()) is not None:
        work, future = item
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        del item, work, future
