"""Where do the other ranks come from, and how do they end?

MultiprocExecutor gets the ranks beside its own, rank 0, from one of two classes:

    SpawnedRanks     processes that rank 0 starts on its own machine; they end when rank 0 ends
    TorchrunRanks    processes that torchrun started, on one machine or many, with the same script

Both have the same methods: `connect` (make the process groups), `find_failure` (which rank has
failed, and why?), `pids` (the processes of the other ranks on this machine) and `close` (end the
engine's ranks). No port is fixed: rank 0 takes a free one. Nothing is left behind: no process, no
file, no socket, no shared memory.

A child that the user's program forks has copies of the pipes and sockets. The copies of the pipes
are closed in the child (`forget`), and none of the functions that end ranks runs there.

Left out: starting ranks on other machines, which is the task of torchrun.

vLLM: vllm/executor/multiproc_worker_utils.py (V0); vllm/v1/executor/multiproc_executor.py (V1).
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from nanoserve.config import EngineConfig
from nanoserve.device import choose_device
from nanoserve.distributed.process import EXIT_TIMEOUT, in_this_process
from nanoserve.distributed.rendezvous import IDLE_TIMEOUT, address_towards, connect, start_store
from nanoserve.interrupts import is_from_signal, suppress
from nanoserve.kernels.threads import num_cores, rank_environment
from nanoserve.parallel import ParallelState, RankError, keep_for_ever

FILES_OF_AN_ENGINE, FILES_OF_A_RANK = 32, 8  # open files and sockets of rank 0: more than it needs
TOLD_BY_TORCHRUN = (  # in the environment of each process
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
SETTLE_TIME = 1.0  # seconds in which the first rank that failed becomes known
# (store, rank, function that connects the ranks, device): see multiproc.worker_loop
WorkerLoop = Callable[[Any, int, Callable[[], ParallelState], str], None]


def read_failure(store: dist.Store | None, world_size: int) -> str | None:
    """The traceback that a failing rank has written to the store, if there is one."""
    if store is None:  # closed
        return None
    with suppress(RuntimeError):  # the process that holds the store has ended
        for rank in range(1, world_size):
            if store.check([f"failure/{rank}"]):
                return f"rank {rank} failed:\n{store.get(f'failure/{rank}').decode()}"
    return None


def search_path() -> str:
    """Where this process finds modules, as a PYTHONPATH for a rank."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


class SpawnedRanks:
    """Ranks that this process starts on its own machine.

    Each rank is a process `python -m nanoserve.distributed.multiproc`. This process writes to the
    rank's standard input where the store is, and keeps that pipe open. Invariant: no rank outlives
    this process. The pipe closes when `close` is called, when this object is garbage collected, and
    when this process ends in any way; the rank exits when the pipe closes.
    """

    def __init__(self, config: EngineConfig, address: str = "127.0.0.1") -> None:
        """`address`: where the other ranks reach rank 0. Raises ValueError if there are fewer GPUs
        than ranks, RankError if the system cannot start one more process or open more files."""
        self.address = address
        self.world_size, self.pp_size = config.world_size, config.pipeline_parallel_size
        self.num_local_ranks = self._count_local_ranks()
        self.device = self._choose_device(config)
        self.num_threads = max(1, min(torch.get_num_threads(), num_cores()) // self.num_local_ranks)
        self.store: dist.Store | None = None
        self.parallel: ParallelState | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        self._closing = threading.Event()
        end = in_this_process(end_processes)
        self._finalizer = weakref.finalize(self, end, self.processes, self._closing)
        forget_in_children(self)
        try:
            check_open_files(FILES_OF_AN_ENGINE + FILES_OF_A_RANK * self.world_size)
            self.store, port = start_store(address)
            for rank in range(1, self.world_size):
                self.processes.append(self._spawn(rank, port))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not is_from_signal(error):
                raise RankError(f"the other ranks could not be started: {error}.") from error
            raise

    @property
    def pids(self) -> dict[int, int]:
        """rank -> process id, of the other ranks on this machine."""
        return {rank: process.pid for rank, process in enumerate(self.processes, 1)}

    def _count_local_ranks(self) -> int:
        return self.world_size

    def _choose_device(self, config: EngineConfig) -> torch.device:
        device = choose_device(config.device)
        if device.type == "cuda":
            check_num_gpus(self.num_local_ranks)
            device = torch.device("cuda", 0)
        return device

    def _spawn(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        """Start one rank, with this process's module search path, in a session of its own (the
        terminal's Ctrl-C does not reach it there)."""
        process = subprocess.Popen(
            [sys.executable, "-m", "nanoserve.distributed.multiproc"],
            stdin=subprocess.PIPE,
            env={**rank_environment(), "PYTHONPATH": search_path(), "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
        task = {
            "host": self.address,
            "port": port,
            "rank": rank,
            "world_size": self.world_size,
            "device": "cpu" if self.device.type == "cpu" else f"cuda:{rank}",
            "num_threads": self.num_threads,
            "num_local_ranks": self.num_local_ranks,
        }
        assert process.stdin is not None
        with suppress(OSError):  # the rank has ended already; connect() will raise
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
        return process

    def connect(self) -> ParallelState:
        """Wait until all ranks have started, and make the process groups. Called in rank 0's
        thread. Raises RankError if a rank ends meanwhile."""
        store = self.store
        assert store is not None, "closed"
        limit_threads(self.num_threads)
        ready = [f"ready/{rank}" for rank in range(1, self.world_size)]
        while not self._closing.is_set() and not store.check(ready):
            if (failure := self.find_failure(timeout=0)) is not None:
                raise RankError(failure)
            if self._closing.wait(0.02):
                break
        if self._closing.is_set():
            raise RankError("the executor was closed while its ranks started.")
        parallel = connect(
            store,
            0,
            self.world_size,
            self.device,
            address=self.address,
            num_local_ranks=self.num_local_ranks,
            pp_size=self.pp_size,
        )
        if self.device.type == "cuda":
            for process in self.processes:
                arguments = (process, parallel.device_groups, self._closing)
                threading.Thread(target=abort_group_on_exit, args=arguments, daemon=True).start()
        processes = self.processes
        self.parallel = replace(
            parallel, has_lost_rank=lambda: any(each.poll() is not None for each in processes)
        )
        return self.parallel

    def find_failure(self, timeout: float) -> str | None:
        """Which rank has failed and why, or None. Waits up to `timeout` seconds for an answer.

        One failure makes other ranks fail too. So a traceback in the store comes first, and a rank
        that was killed by a signal comes before a rank that has exited. The system closes the
        sockets of a killed process before it reports its end, so another rank may exit earlier:
        an exit without a traceback is no answer before SETTLE_TIME has passed.
        """
        started = time.monotonic()
        deadline = started + timeout
        while True:
            codes = {rank: process.poll() for rank, process in enumerate(self.processes, 1)}
            ended = [(code, rank) for rank, code in codes.items() if code is not None]
            if (timeout or ended) and (failure := read_failure(self.store, self.world_size)):
                return failure
            code, rank = min(ended, default=(0, 0))  # a killed process has minus its signal as code
            is_settled = code < 0 or len(ended) == len(codes)
            if ended and (is_settled or time.monotonic() >= started + SETTLE_TIME):
                return f"rank {rank} {self._describe_end(self.processes[rank - 1], code)}"
            if not ended and time.monotonic() >= deadline:
                return None
            time.sleep(0.02)

    def _describe_end(self, process: subprocess.Popen[bytes], code: int) -> str:
        """How a process has ended: the end of a sentence."""
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
        return f"(process {process.pid}) {how or f'ended with exit code {code}'}."

    def close(self, is_step_over: bool = True) -> None:
        """End all ranks: they have nothing to save. Takes EXIT_TIMEOUT at most, if a rank does not
        end by itself. Not is_step_over: a step hangs, and the ranks are killed at once, so that
        rank 0's part of the step ends with an error."""
        if not is_step_over:
            for process in self.processes:
                process.kill()  # on GPUs, abort_group_on_exit then ends the step
        self._finalizer()
        self.store = None

    def release(self) -> None:
        """Close the sockets to the ranks, which have ended, and so has rank 0's thread."""
        if self.parallel is not None:
            self.parallel.close()


def end_processes(processes: list[subprocess.Popen[bytes]], closing: threading.Event) -> None:
    """Tell the ranks to end and wait for their ends; kill those that exist after EXIT_TIMEOUT, or
    when the wait is interrupted."""
    closing.set()
    deadline = time.monotonic() + EXIT_TIMEOUT
    try:
        for process in processes:
            if process.stdin is not None:
                with suppress(OSError):  # the rank has ended
                    process.stdin.write(b"\n")  # a forked child may hold the pipe open
                    process.stdin.flush()
                with suppress(OSError):
                    process.stdin.close()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()  # does nothing to one whose end is known
        for process in processes:
            with suppress(subprocess.TimeoutExpired):  # the system itself holds it
                process.wait(EXIT_TIMEOUT)


def forget_in_children(ranks: SpawnedRanks | TorchrunRanks) -> None:
    """Have `forget` called in each forked child, as long as `ranks` exist."""
    if hasattr(os, "register_at_fork"):  # not on Windows
        os.register_at_fork(after_in_child=partial(forget, weakref.ref(ranks)))


def forget(reference: weakref.ref[SpawnedRanks | TorchrunRanks]) -> None:
    """Called in a forked child: the ranks are its parent's.

    The child closes its copies of the pipes: a rank ends when nobody holds its pipe any more, and
    the child may live longer than the parent. It never frees its copies of the store and the
    groups: their destructors wait for threads that only the parent has.
    """
    ranks = reference()
    if ranks is None:
        return
    for process in ranks.processes:
        if process.stdin is not None:
            with suppress(OSError, RuntimeError):
                process.stdin.close()
    if ranks.store is not None:
        keep_for_ever(ranks.store)
    if ranks.parallel is not None:
        ranks.parallel.keep_for_ever()


def check_open_files(number: int) -> None:
    """Raise RankError unless this process can open so many more files and sockets. torch cannot be
    asked: without them it tries again for minutes, or aborts the process."""
    opened: list[int] = []
    try:
        for _ in range(number):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise RankError(
            f"an engine of several ranks needs {number} more open files and sockets here, and this "
            f"process can open {len(opened)} ({error.strerror}). Raise the limit (`ulimit -n`), or "
            "close what is not in use."
        ) from error
    finally:
        for file in opened:
            os.close(file)


def abort_group_on_exit(
    process: subprocess.Popen[bytes], groups: list[Any], closing: threading.Event
) -> None:
    """Abort the nccl groups when the rank's process ends: an nccl kernel does not notice that a
    rank has ended, and would wait for it until STEP_TIMEOUT."""
    process.wait()
    if not closing.is_set():
        for group in groups:
            group.abort()


def check_num_gpus(num_local_ranks: int) -> None:
    """Raise ValueError if there are fewer GPUs than ranks on this machine."""
    if torch.cuda.device_count() < num_local_ranks:
        raise ValueError(
            f"{num_local_ranks} ranks on this machine need as many GPUs, and torch sees "
            f"{torch.cuda.device_count()}. Lower tensor_parallel_size or "
            "pipeline_parallel_size, or use device='cpu'."
        )


def limit_threads(num_threads: int) -> None:
    """Let torch use `num_threads` cores for the calling thread's work, and for no other thread's.

    torch.set_num_threads sets two numbers: the calling thread's, and the default for threads that
    start later. The second call, in a thread of its own, sets the default back.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    restore = threading.Thread(target=torch.set_num_threads, args=(before,))
    restore.start()
    restore.join()


class TorchrunRanks:
    """Ranks that torchrun started, all with the same script. They meet at torchrun's store.

    Rank 0 runs the script. On another rank, the constructor of the first LLM does not return: it
    runs the worker loop for each engine that rank 0 builds, one after the other, with rank 0's
    arguments, and exits the process when rank 0's script has ended.
    """

    def __init__(self, config: EngineConfig, worker_loop: WorkerLoop) -> None:
        """Raises ValueError if torchrun started another number of ranks, or for a second engine
        while one is open; SystemExit on ranks above 0, at the end of rank 0's script."""
        from torch.distributed.rendezvous import rendezvous

        self.parallel: ParallelState | None = None
        self.processes: list[subprocess.Popen[bytes]] = []  # all of them are torchrun's
        self.pids: dict[int, int] = {}  # rank -> process id, of the other ranks on this machine
        if missing := [name for name in TOLD_BY_TORCHRUN if name not in os.environ]:
            raise ValueError(
                f"TORCHELASTIC_RUN_ID is set, as torchrun does, but {', '.join(missing)} not. "
                "Unset it, or start the script with torchrun."
            )
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.pp_size = config.pipeline_parallel_size
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.num_local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        if self.world_size != config.world_size:
            stages = config.pipeline_parallel_size
            times = f", pipeline_parallel_size {stages}" if stages > 1 else ""
            raise ValueError(
                f"tensor_parallel_size is {config.tensor_parallel_size}{times}, but torchrun "
                f"started {self.world_size} processes. Make the two equal; or leave both options "
                "out, and each process is an engine of its own."
            )
        self.device = choose_device(config.device)
        if self.device.type == "cuda":
            check_num_gpus(self.num_local_ranks)
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
        torchrun_store, _, _ = next(rendezvous("env://"))
        self.job_store = dist.PrefixStore("nanoserve", torchrun_store)
        if self.rank:
            self._work_until_exit(worker_loop)
        if self.job_store.add("num_open_engines", 1) > 1:
            self.job_store.add("num_open_engines", -1)
            raise ValueError("under torchrun, one engine at a time: close() the one that is open.")
        end = in_this_process(self.job_store.add)
        self._finalizer: Any = weakref.finalize(self, end, "num_open_engines", -1)
        atexit.register(in_this_process(announce), self.job_store, "exit")
        self.store = announce(self.job_store, "engine")
        forget_in_children(self)

    def _work_until_exit(self, worker_loop: WorkerLoop) -> None:
        """Run the worker loop of each engine that rank 0 announces; then exit this process."""
        for number in range(1, sys.maxsize):
            self.store = dist.PrefixStore(f"announcement/{number}", self.job_store)
            self.store.wait(["kind"], IDLE_TIMEOUT)
            if self.store.get("kind") == b"exit":
                sys.exit(0)
            self.store.set(f"process/{self.rank}", f"{os.getpid()}@{socket.gethostname()}")
            worker_loop(self.store, self.rank, self.connect, str(self.device))

    def connect(self) -> ParallelState:
        """Make the process groups, on the network address by which this machine reaches torchrun's
        store."""
        address = address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        parallel = connect(
            self.store,
            self.rank,
            self.world_size,
            self.device,
            address=address,
            num_local_ranks=self.num_local_ranks,
            pp_size=self.pp_size,
        )
        if self.rank == 0:
            self.parallel = parallel
            self._finalizer.detach()
            end = in_this_process(send_shutdown)
            self._finalizer = weakref.finalize(self, end, parallel, self.job_store)
            for rank in range(1, self.world_size):
                pid, _, host = self.store.get(f"process/{rank}").decode().partition("@")
                if host == socket.gethostname():
                    self.pids[rank] = int(pid)
        return parallel

    def find_failure(self, timeout: float) -> str | None:
        """The traceback that a failing rank has written. Waits up to `timeout` seconds for it."""
        if timeout:
            print("nanoserve: rank 0 has lost another rank of its engine.", file=sys.stderr)
        deadline = time.monotonic() + min(timeout, 1.0)  # torchrun is about to end rank 0 as well
        while timeout:
            failure = read_failure(self.store, self.world_size)
            if failure is not None or time.monotonic() >= deadline:
                return failure
            time.sleep(0.02)
        return None

    def close(self, is_step_over: bool = True) -> None:
        """End the engine: the other ranks wait for rank 0's next announcement. Not is_step_over: a
        step hangs. These ranks are torchrun's, so nothing ends the step, and no other engine can be
        built; the step's groups are kept, because freeing them would wait for the step."""
        if is_step_over:
            self._finalizer()
        elif self._finalizer.detach() and self.parallel is not None:
            self.parallel.keep_for_ever()

    def release(self) -> None:
        """Nothing: `close` has released the groups."""


def announce(job_store: dist.Store, kind: str) -> dist.Store:
    """Tell the waiting ranks what comes next: an "engine", or the "exit". Returns the store of that
    announcement, in which the ranks of the engine connect."""
    store = dist.PrefixStore(f"announcement/{job_store.add('num_announcements', 1)}", job_store)
    store.set("kind", kind)
    return store


def send_shutdown(parallel: ParallelState, job_store: dist.Store) -> None:
    """End the worker loops of rank 0's engine."""
    with suppress(RuntimeError):  # the other ranks have ended already
        job_store.add("num_open_engines", -1)
        parallel.broadcast_object(None)
    parallel.close()
