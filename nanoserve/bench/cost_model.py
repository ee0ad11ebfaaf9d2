"""How long should a step take? What it must read and compute, against what the machine can do.

A step reads every weight once, and the keys and values of its sequences; it multiplies its tokens
with the layers, its queries with keys, and one row of each sequence with the head:

    29M float32 weights, context 200         bytes     operations      on 20 GB/s, 100 GFLOP/s
    decode of 1                             121 MB    0.06 GFLOP       6.0 ms, bound by memory
    decode of 32                            222 MB     2.0 GFLOP        20 ms, bound by arithmetic

`least_seconds` is the roofline: the larger of bytes / bandwidth and operations / rate. No engine
can be faster. `expected_seconds` is what this engine should take. It knows that a step reaches a
share of both, that kernels have a least time, and that the host has work for each sequence. (On a
GPU this is done while the step before is computed.) Bandwidth and rate are measured. All other
numbers of `gpu` are estimates, made from counted bytes and kernels, without a GPU: whoever measures
the first one corrects them. Those of `cpu` are fitted to the fast kernels on a machine of 2 cores:
the plain code, which small models run, takes longer.

Left out: mixtures of experts, sliding windows, several ranks; activations and norms.

Papers: Roofline, Williams, Waterman and Patterson, CACM 52(4), 2009. vLLM: none.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nanoserve.bench.workload import DUMMY_MODELS, SHAPE, Request
from nanoserve.models.config import DEMO_MODEL, ModelConfig


class Step(NamedTuple):
    """What a step computes, over all of its sequences."""

    num_tokens: int
    num_sampled: int  # rows of logits
    num_keys: int  # read from the cache
    num_pairs: int  # of a query and a key that it sees


def decode(contexts: Iterable[int]) -> Step:
    """A token for each of some sequences, which have so many tokens then."""
    lengths = list(contexts)
    return Step(len(lengths), len(lengths), sum(lengths), sum(lengths))


def prefill(length: int, cached: int = 0) -> Step:
    """A prompt up to its token `length`; the first `cached` tokens are in the cache."""
    new = length - cached
    return Step(new, 1, length, new * cached + new * (new + 1) // 2)


def add(steps: Iterable[Step]) -> Step:
    """One step that does the work of all."""
    return Step(*map(sum, zip(*steps, strict=True)))


def ideal_steps(requests: Sequence[Request]) -> Iterator[Step]:
    """All prompts in one step; then a token in each step for every request that is unfinished."""
    yield add(prefill(len(request.prompt)) for request in requests)
    for number in range(1, max(request.num_output for request in requests)):
        yield decode(len(r.prompt) + number for r in requests if r.num_output > number)


@dataclass(frozen=True)
class Shape:
    """Of a model: counts of numbers, not bytes."""

    num_layers: int
    layer_weights: int  # of all layers
    head_weights: int
    kv_numbers: int  # stored for a token, in all layers
    operations_per_pair: int  # of a query and a key, in all layers
    itemsize: float  # bytes of a number

    @classmethod
    def of(cls, config: ModelConfig, itemsize: float) -> Shape:
        hidden, layers, dim = config.hidden_size, config.num_layers, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        weights = layers * hidden * (2 * q_size + 2 * kv_size + 3 * config.intermediate_size)
        attention = 2 * layers * kv_size, 4 * layers * q_size
        return cls(layers, weights, hidden * config.vocab_size, *attention, itemsize)

    def parts(self, step: Step) -> tuple[tuple[float, float], ...]:
        """Bytes and operations of the layers' products, of the head, and of attention."""
        layers, head = self.layer_weights, self.head_weights
        attention = self.kv_numbers * step.num_keys, self.operations_per_pair * step.num_pairs
        counts = (layers, 2 * layers * step.num_tokens), (head, 2 * head * step.num_sampled)
        return tuple((self.itemsize * numbers, each) for numbers, each in (*counts, attention))


def named(name: str, itemsize: float) -> Shape:
    """One of workload.DUMMY_MODELS."""
    kind, sizes = DUMMY_MODELS[name]
    given = {**dict(zip(SHAPE, sizes, strict=True)), "model_type": kind}
    return Shape.of(ModelConfig.from_folder(DEMO_MODEL, given), itemsize)


@dataclass(frozen=True)
class Machine:
    bandwidth: float  # bytes per second
    rate: float  # operations per second
    shares: tuple[float, float]  # of both, that a step reaches
    layer_seconds: tuple[float, float]  # of a layer: its products at least, its other kernels
    sample_seconds: tuple[float, float]  # of a step, of each sequence in it
    host_seconds: tuple[float, float]  # the same
    is_overlapped: bool  # the host works while the step before is computed

    def least_seconds(self, shape: Shape, step: Step) -> float:
        num_bytes, operations = map(sum, zip(*shape.parts(step), strict=True))
        return max(num_bytes / self.bandwidth, operations / self.rate)

    def expected_seconds(self, shape: Shape, step: Step) -> float:
        bandwidth, rate = self.bandwidth * self.shares[0], self.rate * self.shares[1]
        products, head, attention = (max(a / bandwidth, b / rate) for a, b in shape.parts(step))
        least, others = (shape.num_layers * each for each in self.layer_seconds)
        sample = self.sample_seconds[0] + self.sample_seconds[1] * step.num_sampled
        host = self.host_seconds[0] + self.host_seconds[1] * step.num_sampled
        device = max(products, least) + others + attention + head + sample
        return max(device, host) if self.is_overlapped else device + host


def gpu(bandwidth: float, rate: float) -> Machine:
    """Estimates: a product takes 6 us, a small kernel 2 us, attention 5 us more than its keys."""
    times = (24e-6, 14e-6), (0.12e-3, 1.2e-6), (0.25e-3, 8e-6)
    return Machine(bandwidth, rate, (0.78, 0.65), *times, is_overlapped=True)


def cpu(bandwidth: float, rate: float) -> Machine:
    times = (0.0, 250e-6), (0.2e-3, 5e-6), (0.2e-3, 20e-6)
    return Machine(bandwidth, rate, (0.75, 0.8), *times, is_overlapped=False)


# -- the two limits, measured --


def measure_machine(dtype: Any) -> Machine:
    """This machine, for products of a torch.dtype, in about two seconds: the best of several tries,
    because it is a limit."""
    import torch

    is_gpu = torch.cuda.is_available()
    device = "cuda" if is_gpu else "cpu"
    source = torch.ones(2**28 if is_gpu else 2**25, dtype=torch.float32, device=device)
    size = 8192 if is_gpu else 1024
    matrix = torch.randn(size, size, device=device).to(dtype)
    wait = torch.cuda.synchronize if is_gpu else int

    def seconds(action: Callable[[], object]) -> float:
        return min(timeit.repeat(lambda: (action(), wait()), number=1, repeat=41)[1:])

    bandwidth = source.nbytes / seconds(source.sum)
    rate = 2 * size**3 / seconds(lambda: matrix @ matrix)
    del source
    torch.cuda.empty_cache()  # the engines need the memory
    return (gpu if is_gpu else cpu)(bandwidth, rate)
