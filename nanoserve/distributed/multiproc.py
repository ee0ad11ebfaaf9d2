"""How do several ranks run one step?

With several ranks the engine's executor is a MultiprocExecutor. The engine's process is rank 0.
With tensor_parallel_size > 1, every rank is a process that holds its part of every layer:

    rank 0 (the engine's process)                  ranks 1, 2, ... (`worker_loop`)
    broadcast_object(SchedulerOutput) ----------->  receive_object()      over gloo
    runner.launch(SchedulerOutput)    <---------->  runner.launch(...)    sums: gloo, on GPUs nccl
      sample, broadcast the token ids ----------->    (inside it)
    ModelOutput to the scheduler

Rank 0 sends a value, not the name of a method. All ranks run the same code on that value, so they
agree on batch, blocks and shapes without further messages. With pipeline_parallel_size > 1 there is
such a group of ranks for each stage, and rank 0 samples later (pipeline.py). ranks.py says where
the other ranks come from: rank 0 spawns them, or torchrun has started them.

*Faults.* When a rank's process ends, its sockets close, so a rank that waits for it gets an error
at once. Rank 0 then finds out which rank has failed and why, ends the other ranks, and raises
RankError. Ctrl-C must not stop rank 0 in the middle of a step, because the other ranks would
wait for the rest of the step. Therefore rank 0 runs its part of each step in a thread of its own
(rank_thread.py), and always to the step's end.

A rank that stands still (stopped, in a debugger, swapped out) has not ended, and may go on. A step
waits for it until STEP_TIMEOUT, and the log says after seconds which rank it is. `close` does not
wait: it gives a step EXIT_TIMEOUT, then kills the other ranks, and the step ends with an error.

Left out: a quick answer when another machine loses its power. Rank 0 notices after STEP_TIMEOUT.

vLLM: vllm/executor/multiproc_gpu_executor.py (V0); vllm/v1/executor/multiproc_executor.py (V1).
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
import traceback
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nanoserve.attention import AttentionBackend
from nanoserve.config import EngineConfig, ModelConfig, resolve_folder
from nanoserve.distributed.process import EXIT_TIMEOUT, in_this_process, process_state
from nanoserve.distributed.rank_thread import RankThread
from nanoserve.distributed.ranks import SpawnedRanks, TorchrunRanks
from nanoserve.distributed.rendezvous import STEP_TIMEOUT, connect
from nanoserve.exceptions import brief
from nanoserve.layers import LayerConfig
from nanoserve.logger import describe_runner, init_logger
from nanoserve.model_runner import ModelRunner, PendingOutput
from nanoserve.models.registry import ModelRegistry, build_model
from nanoserve.parallel import POLL_INTERVAL, ParallelState, RankError
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import ModelOutput, SchedulerOutput

Result = TypeVar("Result")
logger = init_logger(__name__)

# States of /proc (see process_state) in which a process does not go on by itself, or not soon.
STANDS_STILL = {"T": "is stopped", "t": "is held by a debugger", "D": "waits for a disk"}
LONG_WAIT = 60.0  # seconds after which a wait is reported also if no rank is known to stand still


class OutOfStepError(RankError):
    """Rank 0 has failed, and the other ranks still wait for its part of the step."""


class MultiprocExecutor:
    """Runs the model on world_size ranks, of which this process is rank 0.

    Under torchrun, the constructor does not return on ranks above 0: it runs the worker loop until
    rank 0's process ends, and then exits (SystemExit). Invariant: either all ranks have run the
    same steps, or `failure` says why not and every call raises RankError.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        attention_backend: str | AttentionBackend = "auto",
        runner_cls: type[ModelRunner] = ModelRunner,
    ) -> None:
        """Raises ValueError for a model that cannot be divided, a class that other ranks cannot
        import, or too little memory; RankError if a rank fails to start."""
        check_divisible(config, model_config)
        model_cls = ModelRegistry.get(model_config.architecture)
        check_is_importable("attention_backend", attention_backend)
        check_is_importable("runner_cls", runner_cls)
        check_is_importable("model class", model_cls)
        self.failure: str | None = None
        self.ranks = ranks = self._make_ranks(config)
        try:
            self._thread = RankThread()
        except BaseException:
            self.ranks.close()
            raise
        end = in_this_process(end_engine)
        self._finalizer = weakref.finalize(self, end, self._thread, self.ranks)

        def build_runner() -> ModelRunner:
            parallel = ranks.connect()
            setup = (config, attention_backend, runner_cls, model_config.architecture, model_cls)
            parallel.broadcast_object(setup)
            own_config = replace(config, device=str(ranks.device))
            return runner_cls(own_config, model_config, attention_backend, parallel)

        try:
            self.runner = self._run_on_rank_0(build_runner)
        except BaseException:
            self._finalizer.detach()
            self.ranks.close()
            self._thread.stop()
            raise
        self.parallel = self.runner.parallel
        self.num_kv_blocks = self.runner.num_kv_blocks
        self.num_cpu_blocks = self.runner.num_cpu_blocks

    @staticmethod
    def _make_ranks(config: EngineConfig) -> SpawnedRanks | TorchrunRanks:
        if config.distributed_executor_backend != "mp" and dist.is_torchelastic_launched():
            return TorchrunRanks(config, worker_loop)
        if config.distributed_executor_backend == "external_launcher":
            raise ValueError(
                "distributed_executor_backend is 'external_launcher', and no launcher has started "
                "this process. Start the script with torchrun, or leave the option out."
            )
        return SpawnedRanks(config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step on all ranks and return its tokens. Raises RankError if a rank fails."""
        return self.launch(scheduler_output).result()

    def launch(self, scheduler_output: SchedulerOutput) -> PendingOnRanks:
        """Start one step on all ranks; result() of what is returned waits for the tokens."""
        runner, parallel = self.runner, self.parallel  # the thread must not hold the executor

        def step() -> PendingOutput:
            new_token_ids, runner.new_token_ids = tuple(runner.new_token_ids), []
            parallel.broadcast_object(for_other_ranks(scheduler_output, new_token_ids))
            num_calls = parallel.comm_stats.num_calls
            before = num_calls["broadcast"] + num_calls["receive"]
            try:
                return runner.launch(scheduler_output)
            except RankError:
                raise
            except BaseException as error:
                # Of the tokens, or of the logits: the last thing ranks exchange.
                if num_calls["broadcast"] + num_calls["receive"] > before:
                    raise
                message = f"rank 0 failed in the middle of a step: {brief(error)}"
                raise OutOfStepError(message) from error

        return PendingOnRanks(self._run_on_rank_0, self._run_on_rank_0(step))

    def _run_on_rank_0(self, work: Callable[[], Result]) -> Result:
        """Run `work`, rank 0's part of something that all ranks do, in rank 0's thread.

        If Ctrl-C interrupts the wait, `work` still runs to its end, and the next call's work
        starts after it. If a rank has failed, the other ranks are ended.
        """
        try:
            return self._run_and_check(work)
        finally:
            if self.failure is not None:
                self.ranks.close()

    def _run_and_check(self, work: Callable[[], Result]) -> Result:
        """Run `work` in rank 0's thread; set `failure` if a rank has failed, or if rank 0 has and
        the other ranks wait for it."""
        self._check_failure()
        try:
            result = self._thread.run(work, self._report_wait)
        except RankError as error:
            if isinstance(error, OutOfStepError):
                self.failure = self.failure or str(error)
            elif self.failure is None:  # else: it was closed meanwhile
                found = self.ranks.find_failure(timeout=EXIT_TIMEOUT)
                if found is None or "exit code" in found:  # rank 0 may have seen the cause
                    found = "\n".join(filter(None, (found, str(error))))
                self.failure = found
            self._check_failure(error)
        # An aborted nccl call raises nothing.
        self._check_failure()
        return result

    def _check_failure(self, cause: RankError | None = None) -> None:
        """Raise RankError if a rank has failed, now or before; `cause`: how rank 0 noticed it."""
        self.failure = self.failure or self.ranks.find_failure(timeout=0)
        if self.failure is not None:
            message = f"{self.failure}\nThis engine cannot go on: build a new LLM."
            raise RankError(message) from cause

    def _report_wait(self, seconds: float) -> None:
        """Log that a step takes long, if a rank stands still or the wait is very long."""
        states = {rank: process_state(pid) for rank, pid in self.ranks.pids.items()}
        reports = [
            f"rank {rank} (process {self.ranks.pids[rank]}) {STANDS_STILL[state]}"
            for rank, state in states.items()
            if state in STANDS_STILL
        ]
        if not reports and seconds < LONG_WAIT:
            return
        logger.warning(
            "rank 0 has waited %.0f s for the other ranks: %s. It goes on as soon as they do. When "
            "they are %.0f s behind, the engine fails; close() ends it sooner.",
            seconds,
            ", ".join(reports) or "no other rank is known to stand still",
            STEP_TIMEOUT.total_seconds(),
        )

    @property
    def kv_connector(self) -> Any:
        """Rank 0's side of the tiers of extras/kv_offload; None without them."""
        return self.runner.kv_connector

    def check_health(self) -> None:
        """Raise RankError if a rank has failed. Any thread may call this, also during a step."""
        failure = self.failure or self.ranks.find_failure(timeout=0)
        if failure is not None:
            raise RankError(failure)

    def describe(self) -> str:
        """Device, dtype, attention and ranks, for the engine's first log line."""
        runner, parallel = self.runner, self.parallel
        stages, size = parallel.pp_size, parallel.tp_size
        parts = [f"{stages} pipeline stages"] * (stages > 1)
        parts += [f"tensor parallel on {size} ranks"] * (size > 1)
        ranks = ", each ".join(parts) or "1 rank"
        return f"{describe_runner(runner)}, {ranks} over {parallel.device_groups[0].name()}"

    def close(self) -> None:
        """End the other ranks and release the memory. Takes little more than EXIT_TIMEOUT.

        An interrupted step that still runs gets this time. A step for which another thread waits
        gets none: the engine's close() has waited for it. Its caller gets a RankError.
        """
        self.failure = self.failure or "the executor is closed."
        self._finalizer()
        self.__dict__.pop("runner", None)


def end_engine(thread: RankThread, ranks: SpawnedRanks | TorchrunRanks) -> None:
    """End rank 0's thread and the other ranks. Called by close(), when the executor is garbage, and
    when Python exits. If this is interrupted (a second Ctrl-C), all is ended at once."""
    thread.stop()
    is_step_over = False
    try:
        is_step_over = thread.join(0 if thread.num_callers else EXIT_TIMEOUT)
    finally:
        ranks.close(is_step_over)
        if not is_step_over and ranks.processes:
            # A step that has lost its ranks ends at once, unless it is in the user's own code.
            is_step_over = thread.join(2 * POLL_INTERVAL.total_seconds())
        if is_step_over:
            ranks.release()


class PendingOnRanks:
    """A step that was launched on all ranks; only rank 0 reads its tokens."""

    def __init__(
        self,
        run_on_rank_0: Callable[[Callable[[], ModelOutput]], ModelOutput],
        pending: PendingOutput,
    ) -> None:
        self._run_on_rank_0 = run_on_rank_0
        self._pending = pending

    def result(self) -> ModelOutput:
        """Wait for the tokens of the step. Raises RankError if a rank fails."""
        return self._run_on_rank_0(self._pending.result)


def check_divisible(config: EngineConfig, model_config: ModelConfig) -> None:
    """Raise ValueError, before any process is started, for a model that cannot be divided.

    The check builds the model once on torch's "meta" device, which has shapes and no memory.
    """
    assert config.max_model_len, "EngineConfig not resolved"
    is_native = ModelRegistry.get(model_config.architecture) is not None
    names = "tensor_parallel_size", "pipeline_parallel_size"
    sizes = " and ".join(f"{name} is {getattr(config, name)}" for name in names)
    if config.model_impl == "transformers" or not is_native:
        raise ValueError(
            f"{model_config.architecture} runs through transformers here, which cannot be divided "
            f"among ranks, and {sizes}. Set both to 1; these can be divided: "
            f"{', '.join(ModelRegistry.architectures())}."
        )
    parallel = ParallelState(0, config.tensor_parallel_size)
    layer_config = LayerConfig(device=torch.device("meta"), parallel=parallel)
    model = build_model(model_config, config.max_model_len, layer_config)
    if config.pipeline_parallel_size > 1:
        if not model.supports_pp:
            raise ValueError(
                f"{type(model).__name__} cannot be divided into stages: its supports_pp is False, "
                f"and {sizes}. Set pipeline_parallel_size to 1; tensor_parallel_size divides it."
            )
        replace(parallel, pp_size=config.pipeline_parallel_size).layer_range(
            model_config.num_layers
        )


def check_is_importable(what: str, value: object) -> None:
    """Raise ValueError unless another process can import all classes and functions in `value`."""
    try:
        is_importable = b"__main__" not in pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        is_importable = False
    if not is_importable:
        raise ValueError(
            f"{what} {value!r} cannot be sent to other ranks, which must be able to import it: "
            "define it at the top of a module, not in the script itself, a function or a notebook."
        )


def for_other_ranks(
    scheduler_output: SchedulerOutput, new_token_ids: tuple[tuple[int, int, int], ...] = ()
) -> SchedulerOutput:
    """The step without its sampling parameters and grammars. Only rank 0 samples, and they may hold
    Python callables that other processes cannot import."""
    new_sequences = tuple(
        new._replace(
            sampling_params=SamplingParams(prompt_logprobs=new.sampling_params.prompt_logprobs),
            stop_token_ids=frozenset(),
            bad_word_ids=(),
            structured_output_request=None,
        )
        for new in scheduler_output.new_sequences
    )
    return replace(scheduler_output, new_sequences=new_sequences, new_token_ids=new_token_ids)


# -- on the other ranks --


def worker_loop(
    store: dist.Store, rank: int, connect_ranks: Callable[[], ParallelState], device: str
) -> None:
    """The work of ranks 1, 2, ...: build the same runner as rank 0, then run each step it sends.

    Returns when rank 0 sends None instead of a step. An error of this rank is written to the store,
    where rank 0 reads it. A RankError is not: the rank that failed is another one.
    """
    try:
        parallel = connect_ranks()
        config, attention_backend, runner_cls, architecture, model_cls = parallel.receive_object()
        ModelRegistry.register(architecture, model_cls)  # the user's own class, perhaps
        model_config = ModelConfig.from_folder(resolve_folder(config.model))
        config = replace(config, device=device)
        runner = runner_cls(config, model_config, attention_backend, parallel)
        while (scheduler_output := parallel.receive_object()) is not None:
            pending = runner.launch(scheduler_output)  # only rank 0 reads the result
            if scheduler_output.needs_sync:  # and here: the next step needs the tokens
                pending.result()
    except RankError:
        raise
    except BaseException:
        store.set(f"failure/{rank}", traceback.format_exc())
        raise


def main() -> None:
    """The main function of a process that SpawnedRanks started.

    Its standard input is a pipe from rank 0: one line of JSON, then nothing. The pipe closes when
    rank 0 closes it or when rank 0's process ends.
    """
    line = b""
    while not line.endswith(b"\n"):
        if not (byte := os.read(0, 1)):
            return
        line += byte
    threading.Thread(target=exit_with_rank_0, daemon=True).start()
    try:
        run_rank(**json.loads(line))
    except BaseException:  # rank 0 reads it from the store
        os._exit(1)  # not sys.exit: the end of a process group can block when a rank has failed
    os._exit(0)


def run_rank(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    device: str,
    num_threads: int,
    num_local_ranks: int,
    address: str = "127.0.0.1",
) -> None:
    """The whole life of a rank that rank 0 has started. The store is at host:port; `address` is
    where other ranks reach this machine."""
    torch.set_num_threads(num_threads)
    own_device = torch.device(device)
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    store = dist.TCPStore(host, port, is_master=False)
    store.set(f"ready/{rank}", f"{os.getpid()}@{socket.gethostname()}")
    connect_ranks = partial(
        connect,
        store,
        rank,
        world_size,
        own_device,
        address=address,
        num_local_ranks=num_local_ranks,
    )
    worker_loop(store, rank, connect_ranks, device)


def exit_with_rank_0() -> None:
    """Wait until the pipe from rank 0 is closed, then end this process."""
    while os.read(0, 1):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
