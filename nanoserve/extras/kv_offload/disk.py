"""Who waits for the disk?

No step. The disk is a tier below the CPU tier: threads move blocks between rows and files (files.py)
while steps run, and a sequence that waits for its blocks holds no KV blocks.

    KV block  --- a step --->  row  --- submit_store, thread --->  file
    KV block  <-- a step ----  row  <-- submit_load, thread -----  file

    {"type": "fs", "root_dir": "/data/kv", "max_bytes": 100_000_000_000}

    root_dir          the folder; any number of engines may share it
    max_bytes         of all files in it; left out: a tenth of the disk
    n_read_threads    threads for loads and lookups, for which requests wait
    n_write_threads   threads for stores, for which nobody waits

Each kind has threads of its own, so that many stores on a slow disk hold up no load. They are
daemons: a disk that hangs holds up neither a step nor the exit. A row that is being written to the
disk keeps its block, so a disk that is too slow finds fewer rows to write, and never a queue without
end.

*Lookups.* Even to ask whether a file is there may take long. So the first answer is RETRY, and a
thread finds out. An answer is believed as long as somebody asks for it, and a second more: another
process may store or delete a block at any time. If the block is gone when it is loaded, the load has
failed, and the block is computed.

vLLM: vllm/v1/kv_offload/tiering/: fs/manager.py FileSystemTierManager, fs/thread_pool.py,
async_lookup.py (V1). max_bytes is ours.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from nanoserve.config import INT64, check_number
from nanoserve.distributed.process import EXIT_TIMEOUT
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
from nanoserve.logger import init_logger

logger = init_logger(__name__)

OPTIONS = ("root_dir", "max_bytes", "n_read_threads", "n_write_threads")
# vLLM's other options, with the values that change nothing here.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "enable_kv_events": (False,),
    "locality": (None, "LOCAL"),
    "backpressure": (None,),
}
DISK_SHARE = 10  # max_bytes is 1 / DISK_SHARE of the disk, if it is not given
BELIEVED = 1.0  # seconds since somebody last asked
MOST_ANSWERS = 10_000  # then old ones are dropped


class IOThreads:
    """Daemon threads that run, in order, what may wait for a disk. Any thread may call."""

    def __init__(self, number: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._num_unfinished = 0
        self.threads = [
            threading.Thread(target=self._run, name=f"nanoserve-{name}-{i}", daemon=True)
            for i in range(number)
        ]
        for thread in self.threads:
            thread.start()

    def submit(self, task: Callable[[], object]) -> None:
        """Queue a task. What it raises is logged."""
        with self._idle:
            self._num_unfinished += 1
        self._tasks.put(task)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until all that was submitted has ended. False after `timeout` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._num_unfinished, timeout)

    def close(self) -> None:
        """Let each thread end when all that was submitted is done. Does not wait."""
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
                self._idle.notify_all()


class _Answer:
    """What is known about a block."""

    def __init__(self) -> None:
        self.result = LookupResult.RETRY
        self.asked_at = 0.0  # time.monotonic()


class _Job:
    """A TransferJob on its way: its blocks are tasks of several threads."""

    def __init__(self, job: TransferJob) -> None:
        self.job_id, self.num_left = job.job_id, len(job.keys)
        self.successful: list[Digest] = []
        self.seconds = 0.0


class FileSystemTierManager(SecondaryTierManager):
    """Files as a tier below the CPU tier. Invariant: each job is named once by get_finished_jobs,
    and a row of a job is touched only before that."""

    tier_type: ClassVar[str] = "fs"

    def __init__(self, primary: PrimaryTier, **options: Any) -> None:
        """Starts the threads. Raises ValueError or TypeError for a bad option, or a root_dir that
        cannot be made."""
        options = drop_accepted("a tier of type 'fs'", options, OPTIONS, ACCEPTED)
        root_dir = options.get("root_dir")
        if not isinstance(root_dir, (str, Path)) or not str(root_dir):
            raise TypeError(f"root_dir of a tier of type 'fs' must be a folder: {brief(root_dir)}.")
        num_threads = {"n_read_threads": 4, "n_write_threads": 2}
        for name, default in num_threads.items():
            num_threads[name] = options.get(name, default)
            check_number(name, num_threads[name], int, 1, 1024, "1 to 1024")
        self.rows = primary.rows
        mapper = FileMapper(Path(root_dir).expanduser(), primary.identity)
        max_bytes = options.get("max_bytes")
        if max_bytes is not None:
            check_number("max_bytes", max_bytes, int, 1, INT64, "1 to 2**63 - 1")
        self.files = BlockFiles(mapper, self.rows.shape[1], max_bytes or 
                                shutil.disk_usage(mapper.root_dir).total // DISK_SHARE)
        self._answers: dict[Digest, _Answer] = {}
        self._unanswered: list[Digest] = []  # what no thread looks for yet
        self._lock = threading.Lock()  # of all _Job
        self._finished: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._readers = IOThreads(num_threads["n_read_threads"], "kv-load")
        self._writers = IOThreads(num_threads["n_write_threads"], "kv-store")
