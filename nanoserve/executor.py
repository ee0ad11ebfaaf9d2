"""On one process or on several ranks?

The engine hands each step to an executor and gets the sampled tokens back. The engine does not know
how many processes work on the step:

    engine  --SchedulerOutput-->  executor  -->  runner (one process), or a runner on every rank
    engine  <---ModelOutput-----  executor  <--  the sampled tokens

UniprocExecutor, below, has one runner in this process. MultiprocExecutor (distributed/multiproc.py)
has a runner on each of several ranks. An executor of your own (`LLM(executor_cls=...)`) is called
with the same arguments as UniprocExecutor, and has the same members:

    num_kv_blocks, num_cpu_blocks      blocks of the KV cache and of the CPU pool
    execute_model(scheduler_output)    run one step and return its ModelOutput
    launch(scheduler_output)           start one step; result() of what it returns waits for the
                                       ModelOutput (needed for async_scheduling and
                                       pipeline_parallel_size only)
    kv_connector                       rank 0's KVConnectorWorker (with kv_offloading_size only)
    describe()                         device, dtype, attention: for the engine's first log line
    close()                            release the memory, and end the other ranks; called within a
                                       step only if the step does not end

`runner_cls` is ModelRunner or a subclass, which may replace one of its methods. The engine passes
this argument only if the user has set it.

vLLM: vllm/executor/executor_base.py, gpu_executor.py (V0); vllm/v1/executor/: abstract.py,
uniproc_executor.py (V1).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch

from nanoserve.attention import AttentionBackend
from nanoserve.config import EngineConfig, ModelConfig, load_chapter
from nanoserve.kernels.threads import (
    call_with_threads,
    most_threads,
    slow_threads_hint,
    thread_setters,
)
from nanoserve.logger import describe_runner, init_logger, warning_once
from nanoserve.model_runner import ModelRunner, PendingOutput
from nanoserve.sequence import ModelOutput, SchedulerOutput

logger = init_logger(__name__)


def get_executor_cls(config: EngineConfig) -> Any:
    """The executor class for this config (vLLM: Executor.get_class). One rank is this process,
    whatever the backend."""
    if config.world_size == 1:
        return UniprocExecutor
    if config.distributed_executor_backend == "ray":
        return load_chapter("distributed_executor_backend", "ray_executor").RayDistributedExecutor
    from nanoserve.distributed.multiproc import MultiprocExecutor

    return MultiprocExecutor


def check_can_overlap(executor: Any, config: EngineConfig) -> None:
    """Close the executor and raise ValueError if steps are to overlap and it has no launch()."""
    if config.max_concurrent_batches > 1 and not hasattr(executor, "launch"):
        name = type(executor).__name__
        executor.close()
        raise ValueError(
            f"async_scheduling is {config.async_scheduling} and pipeline_parallel_size is "
            f"{config.pipeline_parallel_size}, but {name} has no launch(scheduler_output) that "
            "starts a step and returns an object whose result() waits for its ModelOutput. Write "
            "one, or set async_scheduling=False and pipeline_parallel_size=1."
        )


class UniprocExecutor:
    """Runs the model in this process. Invariant: no other thread of the process, and nothing that
    runs between two steps, computes with another number of threads than the application's."""

    _most_threads: int | None = None  # that are good for the model on a CPU; None: no limit
    _thread_setters: Seq[Callable[[int], Any]] = ()

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        attention_backend: str | AttentionBackend = "auto",
        runner_cls: type[ModelRunner] = ModelRunner,
    ) -> None:
        self.runner = runner_cls(config, model_config, attention_backend)
        self.num_kv_blocks = self.runner.num_kv_blocks
        self.num_cpu_blocks = self.runner.num_cpu_blocks
        if self.runner.device.type == "cpu":
            self._most_threads = most_threads(self.runner.model.num_bytes())
            self._thread_setters = thread_setters()
            hint = slow_threads_hint(self.num_threads)
            if hint:
                warning_once(logger, hint)

    @property
    def num_threads(self) -> int:
        """Threads that compute a step on a CPU."""
        of_torch = torch.get_num_threads()
        return min(of_torch, self._most_threads or of_torch) if self._thread_setters else of_torch

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelOutput:
        """Run one step and return its tokens."""
        action = self.runner.execute_model
        return call_with_threads(self.num_threads, self._thread_setters, action, scheduler_output)

    def launch(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        """Start one step and return at once; result() of the PendingOutput waits for the tokens.

        The next step may be launched before the result of this step is read.
        """
        action = self.runner.launch
        return call_with_threads(self.num_threads, self._thread_setters, action, scheduler_output)

    @property
    def kv_connector(self) -> Any:
        """Rank 0's side of the tiers of extras/kv_offload; None without them."""
        return self.runner.kv_connector

    def describe(self) -> str:
        """Device, dtype and attention, for the engine's first log line."""
        return describe_runner(self.runner)

    def close(self) -> None:
        """Release the model and the KV cache: at once, or when the step that runs has ended."""
        self.__dict__.pop("runner", None)
