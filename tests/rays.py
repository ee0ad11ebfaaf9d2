"""Small Rays on the loopback address. Shared by test_ray_executor.py and test_ray_serve.py.

Two workers of pytest may run these tests at the same time, and so may somebody else on the machine.
So each Ray has a folder of its own, and only processes with a file of that folder open count as
its. Every wait has a limit. A Ray ends with the process that has started it, however it ends: Linux
sees to this, here and in Ray itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from nanoserve.extras.ray_executor import only_loopback, patient_start

ROOT = Path(__file__).parent.parent
PATIENCE = 120.0  # seconds; on a busy machine a Ray takes a minute to start
PR_SET_PDEATHSIG = 1  # of Linux' prctl


def wait_for(is_done: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not is_done():
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.1)  # to ask costs Ray something, too


def processes_of(folder: Path) -> set[int]:
    """The other processes that have a file in this folder open. Each one of Ray has a log there."""
    pids = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            names = [os.readlink(file) for file in (process / "fd").iterdir()]
        except OSError:  # it has ended, or is somebody else's
            continue
        if any(name.startswith(f"{folder}/") for name in names):
            pids.add(int(process.name))
    return pids - {os.getpid()}


def kill(pids: set[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Of the Rays that are started from now on. A short path: the names of sockets have 107
    characters at most. At the end, none of their processes is left."""
    with (
        tempfile.TemporaryDirectory(
            prefix="ray-", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # by default actors get what others leave
        Path(folder, "ray").mkdir()
        try:
            yield Path(folder)
            wait_for(lambda: not processes_of(Path(folder)))
        finally:
            kill(processes_of(Path(folder)))


@contextmanager
def start_cluster(num_nodes: int, num_cpus: int) -> Iterator[Cluster]:
    """Nodes on the loopback address, with so many places each. The caller may have connected to it
    when this ends."""
    node: dict[str, Any] = {
        "num_cpus": num_cpus,
        "object_store_memory": 80 * 2**20,  # Ray's minimum is 75 MiB
        "node_ip_address": "127.0.0.1",
        "include_dashboard": False,
    }
    with only_loopback():
        cluster = Cluster()
        try:
            with patient_start():
                for _ in range(num_nodes):
                    cluster.add_node(**node)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@contextmanager
def start_process(words: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A program, which leads a process group of its own. If it has not ended at the end of the
    block, or if this process is killed meanwhile, it is killed."""
    with subprocess.Popen(
        words, text=True, start_new_session=True, preexec_fn=end_with_parent, **options
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
