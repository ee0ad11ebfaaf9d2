"""On one process or on several ranks?

The engine hands each step to an executor and gets the sampled tokens back. It does not know how
many processes work on the step:

    engine  --SchedulerOutput-->  executor  -->  runner (one process), or a runner on every rank
    engine  <---ModelOutput-----  executor  <--  the sampled tokens

vLLM: vllm/executor/ (V0); vllm/v1/executor/ (V1).
"""

from __future__ import annotations

from typing import Any

from nanoserve.config import EngineConfig
from nanoserve.models.config import ModelConfig


def make_executor(config: EngineConfig, model_config: ModelConfig, runner_cls: Any) -> Any:
    """The executor for this config (vLLM: Executor.get_class)."""
    if config.num_ranks == 1:
        from nanoserve.distributed.uniproc import UniprocExecutor

        return UniprocExecutor(config, model_config, runner_cls)
    from nanoserve.distributed.multiproc import MultiprocExecutor

    executor_cls = getattr(config, "executor_cls", MultiprocExecutor)  # a chapter may have one
    return executor_cls(config, model_config, runner_cls)
