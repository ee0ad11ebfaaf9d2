"""How do several ranks run one step?

Every rank is a process that holds its part of every layer. The engine's process is rank 0:

    rank 0 (the engine's process)                  ranks 1, 2, ... (`work`)
    broadcast_object(SchedulerOutput) ----------->  broadcast_object()    over gloo
    runner.launch(SchedulerOutput)    <---------->  runner.launch(...)    sums: gloo, on GPUs nccl
      sample, broadcast the token ids ----------->    (inside it)
    ModelOutput to the scheduler

All ranks run the same code on the same value, so they agree on batch, blocks and shapes without
further messages. Rank 0 runs its part in a thread of its own, always to the step's end: Ctrl-C must
not stop it in the middle of a step, because the other ranks would wait for the rest of it. If a
rank ends, its sockets close, and the others get an error at once.

Ranks come from one of two places. LLM(tensor_parallel_size=2) starts a process for each further
rank. Or `torchrun --nproc-per-node 2 script.py` has started the script in each of them, on one
machine or on several: then LLM(...) returns on rank 0 alone. On the others it runs the steps of
this engine and of the next ones, and leaves the script (SystemExit) when rank 0 has ended.

Left out: going on without a lost rank. vLLM: vllm/executor/multiproc_gpu_executor.py (V0);
vllm/v1/executor/multiproc_executor.py (V1).
"""

from __future__ import annotations

import atexit
import gc
import os
import pickle
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from itertools import count
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from nanoserve.config import EngineConfig
from nanoserve.distributed.parallel import ParallelState
from nanoserve.kernels.threads import wait_policy
from nanoserve.models.config import ModelConfig
from nanoserve.models.registry import ModelRegistry
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import EngineDeadError, SchedulerOutput

STEP_TIME, IDLE_TIME = timedelta(minutes=10), timedelta(days=20)
POLL = 1.0  # seconds between two looks at the other processes
Calls = SimpleQueue[Any]  # of (future, function, arguments); None: the end
Processes = dict[int, subprocess.Popen[bytes]]  # by rank


class MultiprocExecutor:
    """Runs the model on config.num_ranks ranks, of which this process is rank 0.

    Invariant: all ranks have run the same steps, or `failure` says why not, and no step runs.
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig, runner_cls: Any) -> None:
        """Raises ValueError for a model that cannot be divided, EngineDeadError if a rank ends."""
        self.processes: Processes = {}
        self.failure: str | None = None
        self.calls, self.groups = Calls(), list[ParallelState]()
        shared, store = self.start_ranks(config.num_ranks)
        (thread := Thread(target=serve, args=(self.calls,), daemon=True)).start()
        own = (self.calls, thread, self.processes, self.groups, shared)
        self.end = weakref.finalize(self, end, *own)
        model_cls = ModelRegistry.get(model_config.architecture)
        setup = pickle.dumps((config, model_config, runner_cls, model_cls))
        store.set("setup", setup)  # type: ignore[arg-type]
        try:
            self.runner = self.call(build_runner, store, 0, config.num_ranks, setup)
        except BaseException:
            self.end()
            raise
        self.groups.append(self.runner.parallel)
        self.num_kv_blocks = self.runner.num_kv_blocks
        self.num_cpu_blocks = self.runner.num_cpu_blocks

    def start_ranks(self, size: int) -> tuple[dist.Store, dist.Store]:
        """The store that counts engines, and that in which the ranks of this one meet."""
        if dist.is_torchelastic_launched():
            return join_torchrun(size)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes = {rank: start_rank(store.port, rank, size) for rank in range(1, size)}
        return store, store

    def launch(self, step: SchedulerOutput) -> Any:
        """Start one step on all ranks; only rank 0 reads its tokens."""
        return self.call(launch_everywhere, self.runner, step)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run rank 0's part of something that all ranks do, in rank 0's thread. Ctrl-C ends only
        the wait for it. After any error all ranks are ended; EngineDeadError says which one was."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)
        future: Future[Any] = Future()
        self.calls.put((future, function, arguments))
        while True:
            try:
                return future.result(POLL)
            except Exception as error:
                is_late = isinstance(error, TimeoutError) and not future.done()
                is_lost = is_late or isinstance(error, RuntimeError)  # perhaps a connection
                ended = self.find_ended(0 if is_late else POLL) if is_lost else None
                if is_late and ended is None:
                    continue
                self.failure = ended or f"rank 0 has failed: {error!r}. Build the LLM again."
                self.end()
                if ended is not None:
                    raise EngineDeadError(ended) from error
                raise

    def find_ended(self, patience: float) -> str | None:
        """Which rank's process has ended, or does so within some seconds? (Those that torchrun has
        started are torchrun's to watch.)"""
        deadline = time.monotonic() + patience
        while True:
            for rank, process in self.processes.items():
                if (code := process.poll()) is not None:
                    return (
                        f"rank {rank} (process {process.pid}) has ended, with exit code {code}; "
                        "what it has printed says why. Build the LLM again."
                    )
            if time.monotonic() >= deadline or not self.processes:
                return None
            time.sleep(0.05)

    def close(self) -> None:
        """End the other ranks and release the memory. Closing twice does no harm."""
        self.end()
        self.failure = self.failure or "the engine is closed."
        self.runner = None
        gc.collect()  # the groups have threads, which must end before Python does


def serve(calls: Calls) -> None:
    """Rank 0's thread."""
    while (call := calls.get()) is not None:
        future, function, arguments = call
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
        del call, future, function, arguments  # the model must not live on here


def end(
    calls: Calls, thread: Thread, processes: Processes, groups: list[ParallelState], shared: Any
) -> None:
    """Of an engine that is closed, or garbage, or open when the script ends."""
    try:
        shared.add("open", -1)
        if groups and all(process.poll() is None for process in processes.values()):
            future: Future[Any] = Future()
            calls.put((future, groups[0].broadcast_object, ()))
            future.result(5)
            for process in processes.values():
                process.wait(5)
    except (RuntimeError, TimeoutError, subprocess.TimeoutExpired):
        pass  # a rank is lost, or stands still
    for process in processes.values():
        process.kill()
        process.wait()
    calls.put(None)
    # A thread that is still in C++ code when Python ends would abort the process.
    thread.join(5)
    groups.clear()


def launch_everywhere(runner: Any, step: SchedulerOutput) -> Any:
    runner.parallel.broadcast_object(for_other_ranks(step))
    return runner.launch(step)


def for_other_ranks(step: SchedulerOutput) -> SchedulerOutput:
    """The step without what rank 0 alone reads, such as the users' callables."""
    new = [
        each._replace(sampling_params=SamplingParams(prompt_logprobs=params.prompt_logprobs))
        for each in step.new_sequences
        for params in [each.sampling_params]
    ]
    return replace(step, new_sequences=tuple(new))


# -- how ranks begin, and how they find each other --


def start_rank(port: int, rank: int, size: int) -> subprocess.Popen[bytes]:
    """A process that imports what this one can import, and its threads wait in the same way."""
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(port), str(rank), str(size)],
        env={**os.environ, **wait_policy(), "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,  # Ctrl-C is for rank 0
    )


def join_torchrun(size: int) -> tuple[dist.Store, dist.Store]:
    """On rank 0: torchrun's store, and where its ranks meet for this engine. Does not return on the
    others. Raises ValueError unless there are `size` ranks, and no other open engine."""
    shared, rank, world_size = next(dist.rendezvous("env://", timeout=IDLE_TIME))
    if world_size != size:
        raise ValueError(
            f"the engine has {size} ranks, but torchrun has started {world_size}. Give torchrun "
            "--nproc-per-node (and --nnodes) for as many."
        )
    for number in count(1) if rank else ():
        store = dist.PrefixStore(f"engine {number}", shared)
        if not store.get("setup"):  # the script has ended
            raise SystemExit
        work(store, rank, size)
    if shared.add("open", 1) > 1:
        shared.add("open", -1)
        raise ValueError("under torchrun, one engine at a time: close the other one first.")
    if (number := shared.add("engines", 1)) == 1:
        atexit.register(lambda: shared.set(f"engine {shared.add('engines', 1)}/setup", b""))
    return shared, dist.PrefixStore(f"engine {number}", shared)


def connect(store: dist.Store, rank: int, size: int, device: str) -> ParallelState:
    """Make the process groups. They are the engine's own: torch's default group stays free."""
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    device_group = make_group(store, "device", rank, size, device)
    cpu_group = make_group(store, "cpu", rank, size, "cpu", IDLE_TIME)
    return ParallelState(rank, size, device_group, cpu_group, store)


def make_group(
    store: dist.Store, name: str, rank: int, size: int, device: str, timeout: timedelta = STEP_TIME
) -> Any:
    """A process group for tensors on this device: nccl, or gloo on a CPU."""
    prefixed = dist.PrefixStore(name, store)
    if device.startswith("cuda"):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    if os.environ.get("GLOO_SOCKET_IFNAME"):  # the user names a network interface
        return gloo(prefixed, rank, size, timeout)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address_towards(store))]
    options._timeout = timeout
    return gloo(prefixed, rank, size, options)


def address_towards(store: Any) -> str:
    """This machine's own address on the way to the store, at which other ranks can reach it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    with socket.create_connection((store.host, store.port)) as connection:
        return str(connection.getsockname()[0])


def build_runner(store: dist.Store, rank: int, size: int, setup: bytes) -> Any:
    """This rank's ModelRunner. `setup`: rank 0's config, model_config, runner_cls and the model's
    class; safe to unpickle, since rank 0 runs the same program."""
    config, model_config, runner_cls, model_cls = pickle.loads(setup)
    if model_cls is not None:
        ModelRegistry.register(model_config.architecture, model_cls)
    if config.device.startswith("cuda"):
        config = replace(config, device=f"cuda:{os.environ.get('LOCAL_RANK', rank)}")
    else:
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        torch.set_num_threads(max(1, torch.get_num_threads() // num_local))
    return runner_cls(config, model_config, connect(store, rank, size, config.device))


def work(store: dist.Store, rank: int, size: int) -> None:
    """What a rank above 0 does: run rank 0's steps until it sends None, or ends."""
    runner = build_runner(store, rank, size, store.get("setup"))
    try:
        while (step := runner.parallel.broadcast_object()) is not None:
            runner.launch(step)
    except RuntimeError as error:
        if "onnection" not in str(error):  # closed, reset, refused: rank 0 has ended
            raise


if __name__ == "__main__":
    port, rank, size = map(int, sys.argv[1:])
    work(dist.TCPStore("127.0.0.1", port, is_master=False), rank, size)
    gc.collect()  # the groups have threads, which must end before Python does
