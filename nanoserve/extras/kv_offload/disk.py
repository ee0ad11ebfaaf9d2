"""Who waits for the disk?

No step. The disk is a tier below the CPU tier: while steps run, threads move blocks between rows
and files (files.py). A sequence that waits for its blocks holds no KV blocks.

    KV block  --- a step --->  row  --- submit_store, thread --->  file
    KV block  <-- a step ----  row  <-- submit_load, thread -----  file

    {"type": "fs", "root_dir": "/data/kv", "max_bytes": 100_000_000_000}

    root_dir          the folder; any number of engines may share it
    max_bytes         of all files in it; left out: a tenth of the disk
    n_read_threads    threads for loads and lookups, for which requests wait
    n_write_threads   threads for stores, for which nobody waits

Each kind has threads of its own, so that many stores on a slow disk hold up no load. They are
daemons: a disk that hangs holds up neither a step nor the exit. A row keeps its block while it is
written, so no more is queued for a slow disk than there are rows.

*Lookups.* Even to ask whether a file is there may take long. So the first answer is RETRY, and a
thread finds out. An answer is believed as long as somebody asks for it, and a second more: another
process may store or delete a block at any time. If a block is gone when it is to be loaded, the
load has failed, and the block is computed. From a disk that hangs, everything is a MISS, until a
thread comes back.

vLLM: vllm/v1/kv_offload/tiering/: fs/manager.py FileSystemTierManager, fs/thread_pool.py,
async_lookup.py (V1). max_bytes is ours.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from nanoserve.config import INT64, check_number
from nanoserve.distributed.process import in_this_process
from nanoserve.exceptions import brief
from nanoserve.extras.kv_offload.base import (
    Digest,
    JobResult,
    LookupResult,
    PrimaryTier,
    SecondaryTierManager,
    TransferJob,
)
from nanoserve.extras.kv_offload.config import drop_accepted
from nanoserve.extras.kv_offload.files import BlockFiles, FileMapper
from nanoserve.interrupts import suppress
from nanoserve.logger import init_logger

logger = init_logger(__name__)

OPTIONS = ("root_dir", "max_bytes", "n_read_threads", "n_write_threads")
# vLLM's other options, with the values that change nothing here.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "enable_kv_events": (False,),
    "locality": (None, "LOCAL"),
    "backpressure": (None,),
}
BELIEVED = 1.0  # seconds since somebody last asked
HANGS_AFTER = 5.0  # seconds without an answer
MOST_ANSWERS = 10_000  # then old ones are dropped; twice as many as those that are not old


class IOThreads:
    """Daemon threads that run, in order, what may wait for a disk. Any thread may call."""

    def __init__(self, number: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._num_unfinished = 0
        self._last_progress = 0.0  # time.monotonic()
        self.threads = [
            threading.Thread(target=self._run, name=f"nanoserve-{name}-{i}", daemon=True)
            for i in range(number)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, task: Callable[[], object]) -> None:
        """Queue a task. What it raises is logged."""
        with self._idle:
            if not self._num_unfinished:
                self._last_progress = time.monotonic()
            self._num_unfinished += 1
        self._tasks.put(task)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until all that was submitted has ended. False after `timeout` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._num_unfinished, timeout)

    def is_stuck(self) -> bool:
        """Has no task ended for HANGS_AFTER seconds, though there are some?"""
        with self._idle:
            waited = time.monotonic() - self._last_progress
            return self._num_unfinished > 0 and waited > HANGS_AFTER

    def close(self) -> None:
        """Drop what no thread has begun, and let each thread end. Does not wait."""
        with suppress(queue.Empty):
            while True:
                self._tasks.get_nowait()
        for _ in self.threads:
            self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                logger.exception("a task of the disk tier failed")
            with self._idle:
                self._num_unfinished -= 1
                self._last_progress = time.monotonic()
                self._idle.notify_all()


class _Answer:
    """What is known about a block."""

    def __init__(self) -> None:
        self.result = LookupResult.RETRY
        self.asked_at = 0.0  # time.monotonic()

    def is_believed(self, now: float) -> bool:
        return self.result is LookupResult.RETRY or now - self.asked_at < BELIEVED


class _Job:
    """A TransferJob on its way. Its blocks are the tasks of several threads."""

    def __init__(self, job: TransferJob) -> None:
        self.job_id, self.num_left = job.job_id, len(job.keys)
        self.successful: list[Digest] = []
        self.seconds = 0.0  # of all threads
        self.lock = threading.Lock()


class FileSystemTierManager(SecondaryTierManager):
    """Files as a tier below the CPU tier. Invariant: each job is named once by get_finished_jobs,
    and a row of a job is touched only before that."""

    tier_type: ClassVar[str] = "fs"

    def __init__(self, primary: PrimaryTier, **options: Any) -> None:
        """Starts the threads. Raises ValueError or TypeError for a bad option, or a root_dir that
        cannot be made."""
        root_dir, max_bytes, n_read_threads, n_write_threads = self.read_options(options)
        mapper = FileMapper(Path(root_dir).expanduser(), primary.identity)
        self.rows = primary.rows
        self.files = BlockFiles(mapper, self.rows.shape[1], max_bytes)
        self._answers: dict[Digest, _Answer] = {}
        self._most_answers = MOST_ANSWERS
        self._did_hang = False  # at the last lookup
        self._finished: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._readers = IOThreads(n_read_threads, "kv-load")
        self._writers = IOThreads(n_write_threads, "kv-store")
        self._end = weakref.finalize(self, in_this_process(_close), self._readers, self._writers)

    @classmethod
    def read_options(cls, options: Mapping[str, Any]) -> tuple[str | Path, int | None, int, int]:
        """The values of OPTIONS, in this order."""
        options = drop_accepted("a tier of type 'fs'", options, OPTIONS, ACCEPTED)
        root_dir, max_bytes = options.get("root_dir"), options.get("max_bytes")
        if not isinstance(root_dir, (str, Path)) or not str(root_dir):
            raise TypeError(f"root_dir of a tier of type 'fs' must be a folder: {brief(root_dir)}.")
        if max_bytes is not None:
            check_number("max_bytes", max_bytes, int, 1, INT64, "1 to 2**63 - 1")
        num_threads = options.get("n_read_threads", 4), options.get("n_write_threads", 2)
        for name, number in zip(OPTIONS[2:], num_threads, strict=True):
            check_number(name, number, int, 1, 1024, "1 to 1024")
        return root_dir, max_bytes, *num_threads

    def lookup(self, key: Digest) -> LookupResult:
        if self._hangs():
            return LookupResult.MISS
        now, answer = time.monotonic(), self._answers.get(key)
        if answer is None or not answer.is_believed(now):
            if len(self._answers) >= self._most_answers:
                believed = {k: each for k, each in self._answers.items() if each.is_believed(now)}
                self._answers, self._most_answers = believed, max(MOST_ANSWERS, 2 * len(believed))
            answer = self._answers[key] = _Answer()
            self._readers.submit(partial(_look_up, self.files, key, answer))
        answer.asked_at = now
        return answer.result

    def _hangs(self) -> bool:
        """Is the disk of no use now? The log says when it begins to hang."""
        before, self._did_hang = self._did_hang, self._readers.is_stuck()
        if self._did_hang and not before:
            root_dir = self.files.mapper.root_dir
            logger.warning("%s does not answer: until it does, its blocks are computed.", root_dir)
        return self._did_hang

    def submit_store(self, job: TransferJob) -> None:
        self._submit(job, self._writers, self.files.store)

    def submit_load(self, job: TransferJob) -> None:
        self._submit(job, self._readers, self.files.load)

    def _submit(
        self, job: TransferJob, threads: IOThreads, move: Callable[[Digest, memoryview], bool]
    ) -> None:
        """Let threads move the job's blocks. (Their tasks hold no tier: it may end before.)"""
        if not job.keys:
            self._finished.put(JobResult(job.job_id, ()))
        on_its_way = _Job(job)
        for key in job.keys:
            self._answers.pop(key, None)  # what is there changes
        for key, row in zip(job.keys, job.block_ids, strict=True):
            task = partial(_move, on_its_way, move, key, memoryview(self.rows[row]), self._finished)
            threads.submit(task)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._finished.get_nowait() for _ in range(self._finished.qsize())]

    def drain_jobs(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        for threads in (self._readers, self._writers):
            threads.wait_idle(max(0.0, end - time.monotonic()))

    def shutdown(self) -> None:
        """Drop what no thread has begun. (Whoever has called drain_jobs loses nothing, unless the
        disk hangs: its threads are left alone. They hold the memory of their rows.)"""
        self._end()


def _look_up(files: BlockFiles, key: Digest, answer: _Answer) -> None:
    """In a thread: is there a file?"""
    answer.result = LookupResult.HIT if files.contains(key) else LookupResult.MISS


def _move(
    job: _Job,
    move: Callable[[Digest, memoryview], bool],
    key: Digest,
    row: memoryview,
    finished: queue.SimpleQueue[JobResult],
) -> None:
    """In a thread: store or load one block of a job. The last one reports the job."""
    start, success = time.perf_counter(), False
    try:
        success = move(key, row)
    finally:
        with job.lock:
            job.num_left -= 1
            job.seconds += time.perf_counter() - start
            job.successful += [key] if success else []
            if not job.num_left:
                num_bytes = len(job.successful) * len(row)
                finished.put(JobResult(job.job_id, job.successful, num_bytes, job.seconds))


def _close(*pools: IOThreads) -> None:
    for threads in pools:
        threads.close()
