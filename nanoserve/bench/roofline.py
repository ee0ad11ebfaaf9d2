"""What could the machine do at best?

A step must read every weight once and the keys and values of all its sequences. It must also do the
multiplications and additions of every matrix product. So its time is at least

    least time of a step  =  max(bytes / bandwidth, operations / rate)

Both limits are measured on this machine at start, not taken from a datasheet. Decoding 32
sequences with 29M float32 weights reads 117 MB and needs 2 x 29M x 32 = 1.9 GFLOP; at 20 GB/s and
100 GFLOP/s that is max(5.9, 19) = 19 ms: such a batch is bound by arithmetic, a batch of 1 by
memory. A roofline diagram shows this crossing.

The roofline of a workload is that of an ideal schedule: all prompts in one step, then one token per
step for every request that is unfinished. Left out: activations, norms, sampling, sliding windows.

Paper: Roofline, Williams, Waterman and Patterson, CACM 52(4), 2009.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanoserve.bench.workload import Request
from nanoserve.models.config import ModelConfig


@dataclass(frozen=True)
class MachineLimits:
    """Measured; bytes and operations per second."""

    bandwidth: float  # bytes read and written
    rate: float  # floating point operations of a large matrix product

    def seconds(self, cost: Cost) -> float:
        """The least time for one step of this cost."""
        return max(cost.num_bytes / self.bandwidth, cost.operations / self.rate)


class Cost(NamedTuple):
    """Of one step."""

    num_bytes: float
    operations: float


@dataclass(frozen=True)
class ModelCosts:
    """Counts of numbers (not bytes) that the cost of a step follows from."""

    layer_weights: int  # of all layers, that one token is multiplied with
    resident_weights: int  # of all layers, that a step of many tokens reads: all experts'
    head_weights: int
    num_parameters: int
    kv_numbers: int  # stored per token, in all layers
    operations_per_key: int  # of attention, per query and key, in all layers
    itemsize: int  # bytes of a number

    @classmethod
    def of(cls, config: ModelConfig, itemsize: int) -> ModelCosts:
        """From config.json alone."""
        hidden, dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        attention = hidden * (2 * q_size + 2 * kv_size)
        hf = config.hf_config
        num_experts = hf.get("num_experts") or hf.get("num_local_experts") or 0
        width = hf.get("moe_intermediate_size") or config.intermediate_size
        mlp = 3 * hidden * (width if num_experts else config.intermediate_size)
        active = attention + mlp * (hf.get("num_experts_per_tok", 1) if num_experts else 1)
        resident = attention + mlp * max(1, num_experts)
        head = config.vocab_size * hidden
        embeddings = head * (1 if config.tie_word_embeddings else 2)
        return cls(
            layer_weights=config.num_layers * active,
            resident_weights=config.num_layers * resident,
            head_weights=head,
            num_parameters=config.num_layers * resident + embeddings,
            kv_numbers=2 * config.num_layers * kv_size,
            operations_per_key=4 * config.num_layers * q_size,
            itemsize=itemsize,
        )

    def step(self, num_tokens: int, num_sampled: int, num_keys: int, num_attended: int) -> Cost:
        """num_keys: keys read from the cache, over all sequences. num_attended: pairs of a query
        and a key that the query sees."""
        weights = self.resident_weights + self.head_weights
        operations = 2 * (self.layer_weights * num_tokens + self.head_weights * num_sampled)
        return Cost(
            self.itemsize * (weights + self.kv_numbers * num_keys),
            operations + self.operations_per_key * num_attended,
        )


def ideal_steps(costs: ModelCosts, requests: list[Request]) -> list[Cost]:
    """The ideal schedule: a prefill of all prompts, then decodes until the longest output ends."""
    prompts = [len(request.prompt) for request in requests]
    attended = sum(length * (length + 1) // 2 for length in prompts)
    steps = [costs.step(sum(prompts), len(prompts), sum(prompts), attended)]
    for number in range(1, max(request.num_output for request in requests)):
        contexts = [
            len(request.prompt) + number for request in requests if request.num_output > number
        ]
        steps.append(costs.step(len(contexts), len(contexts), sum(contexts), sum(contexts)))
    return steps


def roofline_seconds(limits: MachineLimits, steps: list[Cost]) -> float:
    return sum(limits.seconds(step) for step in steps)


# -- the two limits --


def measure_limits(device: torch.device, dtype: torch.dtype) -> MachineLimits:
    """The best of several tries, since a limit is asked for. Takes about two seconds."""
    limits = MachineLimits(measure_bandwidth(device), measure_rate(device, dtype))
    if device.type == "cuda":  # else the cached 2.5 GB would be missing in the engines' processes
        torch.cuda.empty_cache()
    return limits


def measure_bandwidth(device: torch.device) -> float:
    """Bytes per second of copying, or of summing up, a tensor far larger than any cache: the larger
    of the two."""
    number = 2**28 if device.type == "cuda" else 2**26
    source = torch.ones(number, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / best_seconds(lambda: target.copy_(source), device, 10)
    read = source.nbytes / best_seconds(lambda: source.sum(), device, 10)
    return max(copied, read)


def measure_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a square matrix product."""
    size = 8192 if device.type == "cuda" else 1536
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / best_seconds(lambda: a @ b, device, 10)


def best_seconds(action: Callable[[], object], device: torch.device, tries: int) -> float:
    return min(run_seconds(action, device, tries))


def run_seconds(action: Callable[[], object], device: torch.device, tries: int) -> list[float]:
    """The times of several runs, after one to warm up. On a GPU they are taken between events on
    the device."""
    times = []
    for _ in range(tries + 1):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            action()
            end.record()
            synchronize(device)
            times.append(begin.elapsed_time(end) / 1000)
        else:
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
    return times[1:]


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done all work; on a CPU there is nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
