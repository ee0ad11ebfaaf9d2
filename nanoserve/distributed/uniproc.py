"""How does one process run the model?

An executor has num_kv_blocks, num_cpu_blocks, launch(step) and close(). This one hands the step to
a ModelRunner, with as many threads as are good for the model on this machine's cores.

vLLM: vllm/executor/gpu_executor.py (V0); vllm/v1/executor/uniproc_executor.py (V1).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from nanoserve.config import EngineConfig
from nanoserve.kernels.native_cpu import bind_threads
from nanoserve.kernels.threads import Team, call_with_threads, most_threads
from nanoserve.models.config import ModelConfig
from nanoserve.sequence import ModelOutput, SchedulerOutput


class UniprocExecutor:
    """Runs the model in this process."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, runner_cls: Any) -> None:
        team = Team(bind_threads)  # it sees what other programs do while the model is loaded
        self.runner = runner_cls(config, model_config)
        self.num_kv_blocks = self.runner.num_kv_blocks
        self.num_cpu_blocks = self.runner.num_cpu_blocks
        # Start one step; what is returned waits for its tokens. The next step may begin first.
        self.launch: Callable[[SchedulerOutput], Callable[[], ModelOutput]] = self.runner.launch
        most = most_threads(self.runner.model.num_bytes())
        if self.runner.device.type == "cpu" and most:
            team.most = min(most, torch.get_num_threads())
            call = partial(call_with_threads, 1) if team.most == 1 else team.call
            self.launch = partial(call, self.launch)

    def close(self) -> None:
        """Release the model and the KV cache. Closing twice does no harm."""
        self.runner = self.launch = None
