"""On one process or on several ranks?

The engine hands each step to an executor and gets the sampled tokens back; it does not know how
many processes worked on it. UniprocExecutor runs the model right here. With MultiprocExecutor this
process is rank 0 of several, each of which holds its share of every layer:

    rank 0 (the engine's process)              ranks 1, 2, ... (`serve`)
    send(SchedulerOutput)        ----------->  receive()             control: gloo
    runner.execute_model         <---------->  runner.execute_model  sums:    gloo, on GPUs nccl
    sample, broadcast the tokens ----------->  (in there)
    ModelOutput to the scheduler

What is sent is a value, not a method's name, and all ranks run the same code on it; so they agree
on everything without asking. Where they come from is the matter of ranks.py: this process starts
them, or torchrun has started them.

*Faults.* A rank that ends closes its sockets, so whoever waits for it has an error at once. The
executor then finds out what has happened, ends the other ranks, and raises RankError. What rank 0's
user does (Ctrl-C, an exception in a listener) must never leave a step half done, with the others
waiting for the rest; so steps run in a thread of their own, to their end, whoever waits for them.

Left out: a rank on another machine that loses its power is missed only after STEP_TIMEOUT.

vLLM: vllm/executor/gpu_executor.py, multiproc_gpu_executor.py (V0); vllm/v1/executor/:
uniproc_executor.py, multiproc_executor.py (V1).
"""

from __future__ import annotations

import json
import os
import pickle
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist

from nanoserve.attention import AttentionBackend
from nanoserve.config import EngineConfig, ModelConfig, resolve_folder
from nanoserve.distributed.ranks import GRACE, StartedRanks, TorchrunRanks
from nanoserve.layers import LayerConfig
from nanoserve.model_runner import ModelRunner, PendingOutput
from nanoserve.models.registry import ModelRegistry, build_model
from nanoserve.parallel import ParallelState, RankError, connect
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import ModelOutput, RequestError, SchedulerOutput

Result = TypeVar("Result")


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
        self.ranks = self._make_ranks(config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="nanoserve-rank-0")
        try:
            self.runner = self._run(lambda: self._start(config, model_config, attention_backend))
        except BaseException:
            self.ranks.close()
            raise
        self.num_kv_blocks = self.runner.num_kv_blocks
        self.num_cpu_blocks = self.runner.num_cpu_blocks

    @staticmethod
    def _make_ranks(config: EngineConfig) -> StartedRanks | TorchrunRanks:
        if dist.is_torchelastic_launched():
            return TorchrunRanks(config, serve)
        return StartedRanks(config)

    def _start(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        attention_backend: str | AttentionBackend,
    ) -> ModelRunner:
        """Meet the others, tell them what to build, and build rank 0's part of it."""
        self.parallel = self.ranks.connect()
        model_cls = ModelRegistry.get(model_config.architecture)
        self.parallel.send((config, attention_backend, model_config.architecture, model_cls))
        config = replace(config, device=str(self.ranks.device))
        return ModelRunner(config, model_config, attention_backend, self.parallel)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step on all ranks and return its tokens. Raises RankError if one is lost."""
        return self.launch(scheduler_output).result()

    def launch(self, scheduler_output: SchedulerOutput) -> PendingOnRanks:
        """Start one step on all ranks; its result() waits for the tokens."""

        def step() -> PendingOutput:
            self.parallel.send(for_other_ranks(scheduler_output))
            return self.runner.launch(scheduler_output)

        return PendingOnRanks(self._run, self._run(step))

    def _run(self, work: Callable[[], Result]) -> Result:
        """Do it in the ranks' thread. If Ctrl-C interrupts the waiting, the work still goes on, and
        the next one waits behind it: no rank is left alone in the middle.

        However a failure is found, it ends the ranks that are left."""
        try:
            return self._run_in_step(work)
        finally:
            if self.failure is not None:
                self.ranks.close()

    def _run_in_step(self, work: Callable[[], Result]) -> Result:
        """The same, and `failure` is set if the ranks are not in step any more."""
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
            raise RankError(self.failure) from error
        except Exception as error:  # rank 0's own: the others wait for what will not come
            self.failure = f"a step failed on rank 0, and left the ranks out of step: {error!r}"
            raise
        if self.failure is not None:
            raise RankError(self.failure)
        return result

    def describe(self) -> str:
        """What really runs, for the engine's first log line."""
        runner, parallel = self.runner, self.parallel
        ranks = f"tensor parallel on {parallel.world_size} ranks over {parallel.group.name()}"
        return f"{runner.describe()}, {ranks}"

    def close(self) -> None:
        """End the other ranks and give the memory back."""
        self._thread.shutdown(wait=self.failure is None)
        self.ranks.close()
        self.failure = self.failure or "the executor is closed."
        self.__dict__.pop("runner", None)


class PendingOnRanks:
    """A step launched on all ranks; rank 0 alone reads its tokens."""

    def __init__(
        self, run: Callable[[Callable[[], ModelOutput]], ModelOutput], pending: PendingOutput
    ) -> None:
        self._run = run
        self._pending = pending

    def result(self) -> ModelOutput:
        """What came of the step. Raises RankError if a rank is lost."""
        return self._run(self._pending.result)


def check_sizes(
    config: EngineConfig, model_config: ModelConfig, attention_backend: str | AttentionBackend
) -> None:
    """Raise ValueError, before any process is started, for what could not be divided or sent.

    The model is built once on torch's "meta" device, which has shapes and no memory.
    """
    assert config.max_model_len, "EngineConfig not resolved"
    is_ours = ModelRegistry.get(model_config.architecture) is not None
    if config.model_impl == "transformers" or not is_ours:
        raise ValueError(
            f"{model_config.architecture} runs through transformers here, which can't be cut among "
            f"ranks, and tensor_parallel_size is {config.tensor_parallel_size}. Set it to 1; "
            f"these can be cut: {', '.join(ModelRegistry.architectures())}."
        )
    parallel = ParallelState(0, config.tensor_parallel_size)
    layer_config = LayerConfig(device=torch.device("meta"), parallel=parallel)
    build_model(model_config, config.max_model_len, layer_config)
    model_cls = ModelRegistry.get(model_config.architecture)
    for what, value in (("attention_backend", attention_backend), ("model class", model_cls)):
        check_can_be_sent(what, value)


def check_can_be_sent(what: str, value: object) -> None:
    """Raise ValueError unless another process could import what `value` is made of."""
    try:
        is_importable = b"__main__" not in pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        is_importable = False
    if not is_importable:
        raise ValueError(
            f"{what} {value!r} cannot be sent to other ranks, which must be able to import it: "
            "define it at the top of a module, not in the script itself, a function or a notebook."
        )


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


# -- on the other ranks --


def serve(store: dist.Store, rank: int, join: Callable[[], ParallelState], device: str) -> None:
    """The life of ranks 1, 2, ...: build what rank 0 builds, run each step that it sends.

    Returns when rank 0 says that it is done. What goes wrong here is left in the store, for rank 0
    to tell; that another rank was lost is known there anyway.
    """
    try:
        parallel = join()
        config, attention_backend, architecture, model_cls = parallel.receive()
        ModelRegistry.register(architecture, model_cls)  # perhaps a class of the user's own
        model_config = ModelConfig.from_folder(resolve_folder(config.model))
        config = replace(config, device=device)
        runner = ModelRunner(config, model_config, attention_backend, parallel)
        while (scheduler_output := parallel.receive()) is not None:
            runner.launch(scheduler_output)  # its tokens are rank 0's to read
    except RankError:
        raise
    except BaseException:
        store.set(f"failure/{rank}", traceback.format_exc())
        raise


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
