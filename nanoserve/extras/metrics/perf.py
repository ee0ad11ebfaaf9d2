"""How much does a step compute, and how many bytes does it move?

By formula, from the shape of the model and the lengths of the sequences; nothing is measured. The
formula is that of the roofline (bench/roofline.py). Weights are read once a step, and once for each
key that a query sees, its key and value. Each token's keys and values are written. For a step with
a decode at position 9 and a chunk of 4 tokens behind 8 computed ones:

    keys read      10 + 12 = 22
    pairs of query and key    10 + (9 + 10 + 11 + 12) = 52
    tokens written  1 + 4 = 5

Left out, unlike in vLLM: what the layers hand to each other (activations). It is little beside the
weights, and most of it stays in the caches of the chip. The numbers of one rank of several are an
equal share.

vLLM: vllm/v1/metrics/perf.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from nanoserve.sequence import SchedulerOutput

if TYPE_CHECKING:
    from nanoserve.engine import LLMEngine


class PerfStats(NamedTuple):
    """Of one step, on one rank."""

    num_flops_per_gpu: int = 0
    num_read_bytes_per_gpu: int = 0
    num_write_bytes_per_gpu: int = 0


class ModelMetrics:
    """The formula for the steps of one engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self.costs = _read_costs(engine)
        self.num_ranks = engine.config.world_size

    def measure(self, output: SchedulerOutput, num_sampled: int) -> PerfStats:
        """The cost of a step that sampled from num_sampled rows of logits. Zeros if bench/, where
        the formula is, was deleted."""
        if self.costs is None:
            return PerfStats()
        num_tokens, scheduled = output.total_num_scheduled_tokens, output.scheduled
        num_keys = num_attended = sum([item.num_computed_tokens for item in scheduled]) + num_tokens
        if num_tokens > len(scheduled):  # else each has one query, which sees all its keys
            num_attended = sum(
                item.num_scheduled_tokens * item.num_computed_tokens
                + item.num_scheduled_tokens * (item.num_scheduled_tokens + 1) // 2
                for item in scheduled
            )
        cost = self.costs.step(num_tokens, num_sampled, num_keys, num_attended)
        written = self.costs.itemsize * self.costs.kv_numbers * num_tokens
        ranks = self.num_ranks
        return PerfStats(
            int(cost.operations / ranks), int(cost.num_bytes / ranks), int(written / ranks)
        )


def _read_costs(engine: LLMEngine) -> Any:
    """The model's ModelCosts. None if bench/ was deleted."""
    try:
        roofline = import_module("nanoserve.bench.roofline")
    except ModuleNotFoundError:
        return None
    import torch

    from nanoserve.kernels.selector import choose_dtype

    config, model = engine.config, engine.model_config
    dtype = choose_dtype(config.dtype, model.dtype, torch.device(config.device))
    return roofline.ModelCosts.of(model, dtype.itemsize)
