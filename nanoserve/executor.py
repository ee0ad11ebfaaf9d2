"""On one process or on several ranks?

The engine hands each step to an executor and gets the sampled tokens back; it does not know how
many processes worked on it. UniprocExecutor runs the model right here. With MultiprocExecutor this
process is rank 0 of several, each of which holds its share of every layer:

    rank 0 (the engine's process)              ranks 1, 2, ... (`serve`)
    send(SchedulerOutput)        ----------->  receive()             control: gloo
    runner.execute_model         <---------->  runner.execute_model  sums:    gloo, on GPUs nccl
    sample, broadcast the tokens ----------->  (in there)
    ModelOutput to the scheduler

What ran is a value, not a method's name, and all ranks run the same code on it; so they agree on
everything without asking. The other ranks are either processes that rank 0 started on this machine
(StartedRanks), or what torchrun started, on one machine or many (TorchrunRanks).

*Faults.* A rank that ends closes its sockets, so whoever waits for it has an error at once. The
executor then finds out what has happened, ends the other ranks, and raises RankError. What rank 0's
user does (Ctrl-C, an exception in a listener) must never leave a step half done, with the others
waiting for the rest; so steps run in a thread of their own, to their end, whoever waits for them.

Left out: a rank on another machine that loses its power is missed only after STEP_TIMEOUT.

vLLM: vllm/executor/gpu_executor.py, multiproc_gpu_executor.py (V0); vllm/v1/executor/:
uniproc_executor.py, multiproc_executor.py (V1).
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nanoserve.attention import AttentionBackend
from nanoserve.config import EngineConfig, ModelConfig, resolve_folder
from nanoserve.layers import Build
from nanoserve.model_runner import ModelRunner, choose_device
from nanoserve.models import build_model
from nanoserve.parallel import (
    IDLE_TIMEOUT,
    ParallelState,
    RankError,
    address_towards,
    connect,
    serve_store,
)
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import ModelOutput, RequestError, SchedulerOutput

GRACE = 5.0  # seconds for a rank to end, or for the news of its end to come
Result = TypeVar("Result")


class UniprocExecutor:
    """Runs the model in this process."""

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        attention_backend: str | AttentionBackend = "auto",
    ) -> None:
        self.runner = ModelRunner(config, model_config, attention_backend)
        self.num_kv_blocks = self.runner.num_kv_blocks
        self.num_cpu_blocks = self.runner.num_cpu_blocks

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step and return its tokens."""
        return self.runner.execute_model(scheduler_output)

    def describe(self) -> str:
        """What really runs, for the engine's first log line."""
        runner = self.runner
        return f"device={runner.device}, dtype={runner.dtype}, attention={runner.backend.name}"

    def close(self) -> None:
        """Give the memory back."""
        del self.runner


class MultiprocExecutor:
    """Runs the model on tensor_parallel_size ranks, of which this process is rank 0.

    Under torchrun, on any other rank, the constructor does not return: it serves rank 0 until that
    process ends, and then exits this one (SystemExit). Invariant: the ranks are in step, or
    `failure` says why not and every call raises RankError.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        attention_backend: str | AttentionBackend = "auto",
    ) -> None:
        """Raises ValueError for what does not divide, or does not fit; RankError for a rank that
        fails to start."""
        check_sizes(config, model_config, attention_backend)
        self.failure: str | None = None
        make_ranks = TorchrunRanks if dist.is_torchelastic_launched() else StartedRanks
        self.ranks: StartedRanks | TorchrunRanks = make_ranks(config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nanoserve-rank-0")
        try:
            self.runner = self._run(lambda: self._start(config, model_config, attention_backend))
        except BaseException:
            self.ranks.close()
            raise
        self.num_kv_blocks = self.runner.num_kv_blocks
        self.num_cpu_blocks = self.runner.num_cpu_blocks

    def _start(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        attention_backend: str | AttentionBackend,
    ) -> ModelRunner:
        """Meet the others, tell them what to build, and build rank 0's part of it."""
        self.parallel = self.ranks.connect()
        self.parallel.send((config, attention_backend))
        config = replace(config, device=str(self.ranks.device))
        return ModelRunner(config, model_config, attention_backend, self.parallel)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step on all ranks and return its tokens. Raises RankError if one is lost."""

        def step() -> ModelOutput:
            self.parallel.send(for_other_ranks(scheduler_output))
            return self.runner.execute_model(scheduler_output)

        return self._run(step)

    def _run(self, work: Callable[[], Result]) -> Result:
        """Do it in the ranks' thread. If Ctrl-C interrupts the waiting, the work still goes on, and
        the next one waits behind it: no rank is left alone in the middle."""
        if self.failure is None:
            self.failure = self.ranks.find_failure(patience=0)
        if self.failure is not None:
            raise RankError(f"{self.failure}\nThis engine is of no more use: build a new LLM.")
        try:
            result = self._thread.submit(work).result()
            self.failure = self.ranks.find_failure(patience=0)  # an aborted nccl group says nothing
        except RequestError:
            raise  # rank 0's alone, after all have done their part: see ModelRunner.sample
        except RankError as error:
            self.failure = self.ranks.find_failure(patience=GRACE) or str(error)
            self.ranks.close()
            raise RankError(self.failure) from error
        except Exception as error:  # rank 0's own: the others wait for what will not come
            self.failure = f"a step failed on rank 0, and left the ranks out of step: {error!r}"
            self.ranks.close()
            raise
        if self.failure is not None:
            self.ranks.close()
            raise RankError(self.failure)
        return result

    def describe(self) -> str:
        """What really runs, for the engine's first log line."""
        runner, parallel = self.runner, self.parallel
        return (
            f"device={runner.device}, dtype={runner.dtype}, attention={runner.backend.name}, "
            f"tensor parallel on {parallel.world_size} ranks over {parallel.group.name()}"
        )

    def close(self) -> None:
        """End the other ranks and give the memory back."""
        self._thread.shutdown(wait=self.failure is None)
        self.ranks.close()
        self.failure = self.failure or "the executor is closed."
        self.__dict__.pop("runner", None)


def check_sizes(
    config: EngineConfig, model_config: ModelConfig, attention_backend: str | AttentionBackend
) -> None:
    """Raise ValueError, before any process is started, for what could not be divided or sent.

    The model is built once on torch's "meta" device, which has shapes and no memory.
    """
    assert config.max_model_len, "EngineConfig not resolved"
    parallel = ParallelState(0, config.tensor_parallel_size)
    build_model(model_config, config.max_model_len, Build(device=torch.device("meta"), parallel=parallel))
    try:
        pickle.dumps(attention_backend)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"attention_backend {attention_backend!r} cannot be sent to other ranks ({error}). Its "
            "functions must be importable: defined at the top of a module."
        ) from None


def for_other_ranks(scheduler_output: SchedulerOutput) -> SchedulerOutput:
    """The step as ranks that do not sample need it: without the sampling parameters, among which
    may be Python callables that live in this process alone."""
    new_sequences = tuple(
        new._replace(
            sampling_params=SamplingParams(prompt_logprobs=new.sampling_params.prompt_logprobs),
            stop_token_ids=frozenset(),
            bad_word_ids=(),
        )
        for new in scheduler_output.new_sequences
    )
    return replace(scheduler_output, new_sequences=new_sequences)


# -- the other ranks --


def serve(store: dist.Store, rank: int, join: Callable[[], ParallelState], device: str) -> None:
    """The life of ranks 1, 2, ...: build what rank 0 builds, run each step that it sends.

    Returns when rank 0 says that it is done. What goes wrong here is left in the store, for rank 0
    to tell; that another rank was lost is known there anyway.
    """
    try:
        parallel = join()
        config, attention_backend = parallel.receive()
        model_config = ModelConfig.from_folder(resolve_folder(config.model))
        config = replace(config, device=device)
        runner = ModelRunner(config, model_config, attention_backend, parallel)
        while (scheduler_output := parallel.receive()) is not None:
            runner.execute_model(scheduler_output)
    except RankError:
        raise
    except BaseException:
        store.set(f"failure/{rank}", traceback.format_exc())
        raise


def find_report(store: dist.Store, world_size: int) -> str | None:
    """What a failing rank left in the store, if one did."""
    try:
        for rank in range(1, world_size):
            if store.check([f"failure/{rank}"]):
                return f"rank {rank} failed:\n{store.get(f'failure/{rank}').decode()}"
    except RuntimeError:  # the store is gone, with whoever kept it
        pass
    return None


class StartedRanks:
    """Ranks that this process starts on its own machine, and that never outlive it.

    Each is a `python -m nanoserve.executor`, told by its standard input where to find rank 0. That
    pipe stays open as a lifeline: when it closes, because of `close`, because this object is
    garbage, or because this process is no more, the rank ends itself.
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
            [sys.executable, "-m", "nanoserve.executor"],
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
        try:
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
        except OSError:  # it has ended already; connect() will say so
            pass
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
            try:
                process.stdin.close()
            except OSError:  # with something unsaid, to a rank that is gone
                pass
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

    def __init__(self, config: EngineConfig) -> None:
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
            self._serve_all()
        if self.whole.add("open", 1) > 1:
            self.whole.add("open", -1)
            raise ValueError("under torchrun, one engine at a time: close() the one that is open.")
        self._farewell: Callable[[], object] = weakref.finalize(self, self.whole.add, "open", -1)
        atexit.register(call_next_engine, self.whole, "over")
        self.store = call_next_engine(self.whole, "build")

    def _serve_all(self) -> None:
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
            self._farewell()
            self._farewell = weakref.finalize(self, say_goodbye, parallel, self.whole)
        return parallel

    def find_failure(self, patience: float) -> str | None:
        """What a failing rank reported; `patience`: seconds to wait for it."""
        deadline = time.monotonic() + min(patience, 1.0)  # torchrun is about to end us, too
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
    try:
        parallel.send(None)
        whole.add("open", -1)
    except RuntimeError:
        pass


def main() -> None:
    """Be one of the ranks that StartedRanks started."""
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return
        line += byte
    threading.Thread(target=end_with_rank_0, daemon=True).start()
    task = json.loads(line)
    rank, world_size, device = task["rank"], task["world_size"], torch.device(task["device"])
    torch.set_num_threads(task["num_threads"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", task["port"], is_master=False)
    store.set(f"ready/{rank}", "")
    try:
        serve(store, rank, lambda: connect(store, rank, world_size, device), str(device))
    except BaseException:  # told to rank 0; a farewell to groups that hang would hang, too
        os._exit(1)
    os._exit(0)


def end_with_rank_0() -> None:
    """Wait until the lifeline is closed."""
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
