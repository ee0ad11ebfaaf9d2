"""Who waits for the disk?

No step. Each rank has a FileSystemTier: threads that move blocks between the rank's CPU blocks and
its files (disk.py). The tier below the CPU never touches a KV block:

    KV block  --- step --->  CPU block  --- thread --->  file       submit_store
    KV block  <-- step ----  CPU block  <-- thread ----  file       submit_load

submit_* returns at once; `get_finished` says, also at once, what has ended since the last call, and
how. Whoever submits a block keeps its CPU block as it is until then. Loads, for which a request
waits, and stores, for which nobody does, have threads of their own: many stores on a slow disk hold
up no load. The threads are daemons: a disk that hangs holds up neither a step nor the exit.

vLLM: vllm/v1/kv_offload/tiering/: fs/manager.py FileSystemTierManager, fs/thread_pool.py,
base.py SecondaryTierManager, async_lookup.py (V1).
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanoserve.attention import KVCache
from nanoserve.distributed.process import in_this_process
from nanoserve.extras.kv_offload.disk import BlockFiles
from nanoserve.logger import init_logger
from nanoserve.models.weight_files import find_files

logger = init_logger(__name__)


class IOThreads:
    """Daemon threads that run, in order, what may wait for a disk. Any thread may call."""

    def __init__(self, number: int, name: str) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._num_unfinished = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"nanoserve-{name}-{i}", daemon=True)
            for i in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Callable[[], object]) -> None:
        """Queue a task, which must not raise."""
        with self._idle:
            self._num_unfinished += 1
        self._tasks.put(task)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until all that was submitted has ended. False after `timeout` seconds."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._num_unfinished, timeout)

    def close(self) -> None:
        """End each thread after its current task; drop what is queued. Does not wait."""
        while True:
            try:
                self._tasks.get_nowait()
            except queue.Empty:
                break
        for _ in self._threads:
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


class JobResult(NamedTuple):
    """What became of one block that was to be moved."""

    is_load: bool
    key: bytes
    success: bool
    num_bytes: int  # moved
    seconds: float  # of a thread


class Lookup:
    """A question to the disk, and in time its answer."""

    num_found: int | None = None  # of the keys, how many of the first ones are there


class FileSystemTier:
    """The disk tier of one rank: vLLM's type "fs".

    Invariant: each submitted block is reported by get_finished once, unless the tier was closed.
    """

    def __init__(
        self,
        files: BlockFiles,
        caches: list[KVCache],
        n_read_threads: int = 4,
        n_write_threads: int = 2,
    ) -> None:
        """`caches`: the rank's CPU blocks, KVCacheSpec.allocate's."""
        self.files, self.caches = files, caches
        self._finished: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._readers = IOThreads(n_read_threads, "kv-load")
        self._writers = IOThreads(n_write_threads, "kv-store")
        end = in_this_process(_close_all)
        self.close = weakref.finalize(self, end, self._readers, self._writers)

    def submit_lookup(self, keys: Sequence[bytes]) -> Lookup:
        """Ask how many of the first `keys` are there. What is there may be gone a moment later:
        a load says the last word."""
        lookup, contains = Lookup(), self.files.contains

        def count() -> None:
            missing = (number for number, key in enumerate(keys) if not contains(key))
            lookup.num_found = next(missing, len(keys))

        self._readers.submit(count)
        return lookup

    def submit_load(self, key: bytes, block_id: int) -> None:
        """Read a block into this CPU block. The result tells whether it is good."""
        args = self._finished, self.files, True, key, self.caches, block_id
        self._readers.submit(partial(_move, *args))

    def submit_store(self, key: bytes, block_id: int) -> None:
        """Write a block from this CPU block, unless it is there already."""
        args = self._finished, self.files, False, key, self.caches, block_id
        self._writers.submit(partial(_move, *args))

    def get_finished(self) -> list[JobResult]:
        """What has ended since the last call."""
        return [self._finished.get_nowait() for _ in range(self._finished.qsize())]

    def drain_jobs(self, timeout: float) -> bool:
        """Wait until nothing is being moved. False after `timeout` seconds."""
        end = time.monotonic() + timeout
        is_idle = self._readers.wait_idle(timeout)
        return self._writers.wait_idle(max(0.0, end - time.monotonic())) and is_idle


def _move(
    finished: queue.SimpleQueue[JobResult],
    files: BlockFiles,
    is_load: bool,
    key: bytes,
    caches: list[KVCache],
    block_id: int,
) -> None:
    """In a thread: load or store one block, and say how it went. (It holds no FileSystemTier, whose
    end may be what ends the thread.)"""
    start, success, buffers = time.perf_counter(), False, block_buffers(caches, block_id)
    try:
        success = files.load(key, buffers) if is_load else files.store(key, buffers)
    finally:
        num_bytes = sum(map(len, buffers)) if success else 0
        finished.put(JobResult(is_load, key, success, num_bytes, time.perf_counter() - start))


def _close_all(*pools: IOThreads) -> None:
    for threads in pools:
        threads.close()


def block_buffers(caches: list[KVCache], block_id: int) -> list[memoryview]:
    """The bytes of one block of CPU caches, in place: a view for each layer's keys and values (and
    scales). A block lies in memory as [num_kv_heads, block_size, dim]."""
    parts = [cache.transpose(1, 2)[block_id] for layer in caches for cache in layer]
    return [part.view(torch.uint8).numpy().data.cast("B") for part in parts]


def describe_layout(runner: Any) -> dict[str, Any]:
    """The fields of a FileMapper for the blocks of a ModelRunner: all that decides which keys and
    values a token has, and where they lie.

    Weights are known by names, sizes and times of their files, as make knows its sources: new
    weights under an old name never meet old blocks. A copy of the files begins without blocks.
    """
    config, model = runner.config, runner.model_config
    is_dummy = config.load_format == "dummy"
    weights = [] if is_dummy else [(file.name, file.stat()) for file in find_files(model.path)]
    has_drafter = len(runner.cpu_kv_caches) > runner.num_model_layers
    depends_on_length = model.rope_parameters["rope_type"] in ("dynamic", "longrope")
    return {
        "model_name": Path(config.model or model.path).name,
        "weights": [[name, found.st_size, found.st_mtime_ns] for name, found in weights],
        "seed": config.seed if is_dummy else None,
        "hf_config": dict(model.hf_config),
        "max_model_len": config.max_model_len if depends_on_length else None,
        "dtype": str(runner.dtype),
        "quantization": config.quantization,
        "speculative_config": repr(config.speculative_config) if has_drafter else None,
        "block_size": config.block_size,
        "layers": [
            [[*part.shape[1:], str(part.dtype)] for part in layer] for layer in runner.cpu_kv_caches
        ],
        "byteorder": sys.byteorder,
        "tp_size": runner.parallel.world_size,
        "inference_engine": "nanoserve",
    }
