"""On one process or on several ranks?

The engine hands each step to an executor and gets the sampled tokens back; it does not know how
many processes worked on it. There is one executor yet, for one process. What several ranks need
(starting them, sending each SchedulerOutput, noticing a rank's death) will be a second class with
the same three methods.

vLLM: vllm/executor/gpu_executor.py, multiproc_gpu_executor.py (V0); vllm/v1/executor/:
uniproc_executor.py, multiproc_executor.py (V1).
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
        runner = self.runner
        text = f"device={runner.device}, dtype={runner.dtype}, attention={runner.backend.name}"
        if runner.model.library != "nanoserve":
            text += f", model={runner.model.library}"
        if runner.graphs is not None:
            mib = runner.graphs.num_bytes / 2**20
            text += f", CUDA graphs for {len(runner.graphs.sizes)} batch sizes ({mib:.0f} MiB)"
        return text

    def close(self) -> None:
        """Give the memory back."""
        del self.runner
