"""Where do the other ranks come from, and how do they end?

MultiprocExecutor asks one of these two for the ranks beside its own, 0:

    StartedRanks     processes that rank 0 starts on its machine; they end with it, however it ends
    TorchrunRanks    processes that torchrun started, on one machine or many, with the same script

and needs three things of them: `connect` (meet the others), `find_failure` (has one ended, and
why?) and `close`. Nothing is fixed in advance (the port is one that was free), and nothing is left
behind: no process, no file, no shared memory.

Left out: starting ranks on other machines, which is torchrun's trade.

vLLM: vllm/executor/multiproc_worker_utils.py (V0); vllm/v1/executor/multiproc_executor.py (V1).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nanoserve.config import EngineConfig
from nanoserve.parallel import (
    IDLE_TIMEOUT,
    ParallelState,
    RankError,
    address_towards,
    choose_device,
    connect,
    serve_store,
)

GRACE = 5.0  # seconds for a rank to end, or for the news of its end to come
# (store, rank, how to meet the others, device) -> the life of a rank above 0: executor.serve
Serve = Callable[[Any, int, Callable[[], ParallelState], str], None]


def find_report(store: dist.Store, world_size: int) -> str | None:
    """What a failing rank left in the store, if one did."""
    with contextlib.suppress(RuntimeError):  # the store is gone, with whoever kept it
        for rank in range(1, world_size):
            if store.check([f"failure/{rank}"]):
                return f"rank {rank} failed:\n{store.get(f'failure/{rank}').decode()}"
    return None


class StartedRanks:
    """Ranks that this process starts on its own machine, and that never outlive it.

    Each is a `python -m nanoserve.distributed.multiproc`, told by its standard input where to
    find rank 0. That pipe stays open as a lifeline: when it closes, because of `close`, because
    this object is garbage, or because this process is no more, the rank ends itself.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError if there are fewer GPUs than ranks."""
        self.world_size = config.tensor_parallel_size
        self.device = choose_device(config.device)
        if self.device.type == "cuda":
            check_num_gpus(self.world_size)
            self.device = torch.device("cuda", 0)
        self.store, port = serve_store()
        self.num_threads = max(1, torch.get_num_threads() // self.world_size)
        self.processes: list[subprocess.Popen[bytes]] = []
        self._closing = threading.Event()
        self._end = weakref.finalize(self, end_processes, self.processes, self._closing)
        try:
            for rank in range(1, self.world_size):
                self.processes.append(self._start(rank, port))
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        """In a session of its own, where no Ctrl-C reaches it, with our way of finding modules."""
        search = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-m", "nanoserve.distributed.multiproc"],
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": search, "PYTHONSAFEPATH": "1"},
            start_new_session=True,
        )
        task = {
            "port": port,
            "rank": rank,
            "world_size": self.world_size,
            "device": "cpu" if self.device.type == "cpu" else f"cuda:{rank}",
            "num_threads": self.num_threads,
        }
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended already; connect() will say so
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
        return process

    def connect(self) -> ParallelState:
        """Wait for the others, as long as they live, and meet them. Called in rank 0's thread."""
        share_cores(self.num_threads)
        ready = [f"ready/{rank}" for rank in range(1, self.world_size)]
        while not self.store.check(ready):
            if (failure := self.find_failure(patience=0)) is not None:
                raise RankError(failure)
            if self._closing.wait(0.02):
                raise RankError("the ranks were told to end.")
        parallel = connect(self.store, 0, self.world_size, self.device)
        if self.device.type == "cuda":
            for process in self.processes:
                arguments = (process, parallel.group, self._closing)
                threading.Thread(target=abort_when_it_ends, args=arguments, daemon=True).start()
        return parallel

    def find_failure(self, patience: float) -> str | None:
        """Which rank has ended and why, if one has; `patience`: seconds to wait for the news.

        A report comes first, then a rank that was killed: those that lost it end in consequence.
        """
        deadline = time.monotonic() + patience
        while True:
            codes = {rank: process.poll() for rank, process in enumerate(self.processes, 1)}
            ended = {rank: code for rank, code in codes.items() if code is not None}
            if (patience or ended) and (report := find_report(self.store, self.world_size)):
                return report
            for rank, code in sorted(ended.items(), key=lambda item: item[1]):
                how = f"ended with exit code {code}"
                if code < 0:
                    how = f"was killed by {signal.Signals(-code).name}"
                return f"rank {rank} (process {self.processes[rank - 1].pid}) {how}."
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)

    def close(self) -> None:
        """End them all; at once, as they have nothing to save."""
        self._end()


def end_processes(processes: list[subprocess.Popen[bytes]], closing: threading.Event) -> None:
    """Close the lifelines, wait for the ends, and kill whoever does not end."""
    closing.set()
    for process in processes:
        if process.stdin is not None:
            with contextlib.suppress(OSError):  # something unsaid, to a rank that is gone
                process.stdin.close()
    for process in processes:
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def abort_when_it_ends(
    process: subprocess.Popen[bytes], group: Any, closing: threading.Event
) -> None:
    """On GPUs nobody notices a rank's death: nccl's kernels would wait for it for ever."""
    process.wait()
    if not closing.is_set():
        group.abort()


def check_num_gpus(num_local_ranks: int) -> None:
    """Raise ValueError if there is not a GPU for each."""
    if torch.cuda.device_count() < num_local_ranks:
        raise ValueError(
            f"{num_local_ranks} ranks on this machine need as many GPUs, and torch sees "
            f"{torch.cuda.device_count()}. Lower tensor_parallel_size, or use device='cpu'."
        )


def share_cores(num_threads: int) -> None:
    """Let torch use so many threads in work that the calling thread gives it, and leave all other
    threads of this process as they are: the number belongs to a thread, and to those yet to come
    the one that was set last."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    restore = threading.Thread(target=torch.set_num_threads, args=(before,))
    restore.start()
    restore.join()


class TorchrunRanks:
    """Ranks that torchrun started, all with the same script; they meet in torchrun's store.

    Rank 0 runs the script. On any other rank the first LLM that the script builds becomes a servant
    of rank 0: it runs what that builds, one engine after the other, whatever its own arguments, and
    exits the process when rank 0's has ended.
    """

    def __init__(self, config: EngineConfig, serve: Serve) -> None:
        """Raises ValueError if torchrun started another number of ranks, or for a second engine
        while one is open; SystemExit on ranks above 0, at the end."""
        from torch.distributed.rendezvous import rendezvous

        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.num_local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        if self.world_size != config.tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size is {config.tensor_parallel_size}, but torchrun started "
                f"{self.world_size} processes. Make the two equal; or tensor_parallel_size=1, and "
                "each process is an engine of its own."
            )
        self.device = choose_device(config.device)
        if self.device.type == "cuda":
            check_num_gpus(self.num_local_ranks)
            self.device = torch.device("cuda", self.local_rank)
            torch.cuda.set_device(self.device)
        whole, _, _ = next(rendezvous("env://"))
        self.whole = dist.PrefixStore("nanoserve", whole)
        if self.rank:
            self._serve_all(serve)
        if self.whole.add("open", 1) > 1:
            self.whole.add("open", -1)
            raise ValueError("under torchrun, one engine at a time: close() the one that is open.")
        self._farewell: Any = weakref.finalize(self, self.whole.add, "open", -1)
        atexit.register(call_next_engine, self.whole, "over")
        self.store = call_next_engine(self.whole, "build")

    def _serve_all(self, serve: Serve) -> None:
        """Serve engine 1, 2, ... until rank 0 says that there will be no more."""
        for number in range(1, sys.maxsize):
            store = dist.PrefixStore(f"engine/{number}", self.whole)
            store.wait(["call"], IDLE_TIMEOUT)
            if store.get("call") == b"over":
                sys.exit(0)
            self.store = store
            serve(store, self.rank, self.connect, str(self.device))

    def connect(self) -> ParallelState:
        """Meet the others at the addresses by which they reach torchrun's store."""
        address = address_towards(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        parallel = connect(
            self.store,
            self.rank,
            self.world_size,
            self.device,
            address=address,
            num_local_ranks=self.num_local_ranks,
        )
        if self.rank == 0:
            self._farewell.detach()
            self._farewell = weakref.finalize(self, say_goodbye, parallel, self.whole)
        return parallel

    def find_failure(self, patience: float) -> str | None:
        """What a failing rank reported; `patience`: seconds to wait for it."""
        if patience:  # torchrun is about to end this process, too: be quick to say why
            print("nanoserve: rank 0 has lost another rank of its engine.", file=sys.stderr)
        deadline = time.monotonic() + min(patience, 1.0)
        while patience:
            report = find_report(self.store, self.world_size)
            if report is not None or time.monotonic() >= deadline:
                return report
            time.sleep(0.02)
        return None

    def close(self) -> None:
        """Send the others back to wait for the next engine, or for the end."""
        self._farewell()


def call_next_engine(whole: dist.Store, call: str) -> dist.Store:
    """Tell the waiting ranks what is next, "build" or "over"; the store of that engine."""
    store = dist.PrefixStore(f"engine/{whole.add('number', 1)}", whole)
    store.set("call", call)
    return store


def say_goodbye(parallel: ParallelState, whole: dist.Store) -> None:
    """The last words of rank 0's engine; in vain if the ranks are lost."""
    with contextlib.suppress(RuntimeError):
        whole.add("open", -1)
        parallel.send(None)
    parallel.leave()
