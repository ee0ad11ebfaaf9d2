"""On one process or on several ranks?

The engine hands each step to an executor and gets the sampled tokens back. The engine does not know
how many processes worked on the step. UniprocExecutor runs the model in this process;
distributed/multiproc.py has the executor for several ranks, with the same five members:

    num_kv_blocks, num_cpu_blocks      blocks of the KV cache and of the CPU pool
    execute_model(scheduler_output)    run one step, return its ModelOutput
    launch(scheduler_output)           start one step; its result() waits for the ModelOutput
    describe()                         what really runs, for the engine's first log line
    close()                            give the memory back

vLLM: vllm/executor/executor_base.py, gpu_executor.py (V0); vllm/v1/executor/: abstract.py,
uniproc_executor.py (V1).
"""

from __future__ import annotations

from nanoserve.attention import AttentionBackend
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.model_runner import ModelRunner, PendingOutput
from nanoserve.sequence import ModelOutput, SchedulerOutput


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

    def launch(self, scheduler_output: SchedulerOutput) -> PendingOutput:
        """Start one step; its result() waits for the tokens. Another may be launched before."""
        return self.runner.launch(scheduler_output)

    def describe(self) -> str:
        """What really runs, for the engine's first log line."""
        return self.runner.describe()

    def close(self) -> None:
        """Give the memory back."""
        del self.runner
