"""Does the cost model say what others have measured on GPUs? Published figures, beside the model's.

NVIDIA has published what TensorRT-LLM puts out with as many requests as fit, on 1 to 8 GPUs, and
how long a token takes on two while 1 to 50 requests are served. The model computes the same: it
knows a GPU from its datasheet and from the shares that cost_model.py assumes. Nothing here was
used to choose these, and nothing here was measured by us:

    8 x H100, Llama 70B, fp8, 1000 tokens in and 1000 out     published 11,451 tokens/s
    the model: 1,536 requests fit, a token every 108 ms                 14,191 tokens/s      +24%

In this it differs from ratios.py, whose files are our own and to which two numbers are fitted.

Left out: sources without lengths or dtypes; latencies of servers, which are their hosts' as well.

vLLM: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from nanoserve.bench.cost_model import (
    DGX_H100,
    H100,
    Cluster,
    Layout,
    Load,
    ModelShape,
    most_sequences,
    serve,
)
from nanoserve.bench.roofline import MachineLimits

LLAMA_8B, LLAMA_70B, LLAMA_405B = "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"
MOST_AT_ONCE = 2048  # TensorRT-LLM's max_batch_size unless one is given

# In fp8 the products are computed in fp8, at 1979 TFLOP/s (dense; the datasheet of H100).
H100_FP8 = replace(DGX_H100, device=replace(H100, limits=MachineLimits(3.35e12, 1979e12)))
# A100 SXM, 80 GB: 2.039 TB/s, 312 TFLOP/s, NVLink of 300 GB/s in one direction (its datasheet), of
# which as large a share is taken as on H100. Only one node of it is used.
A100 = replace(
    DGX_H100,
    device=replace(H100, limits=MachineLimits(2.039e12, 312e12)),
    link=DGX_H100.link * 300 / 450,
)


class Engine(NamedTuple):
    """A model on some GPUs of one node, cut by tensor parallelism."""

    shown: str
    model: str
    cluster: Cluster
    gpus: int
    itemsize: float = 1  # of weights and of the KV cache; other numbers have two bytes

    @property
    def shape(self) -> ModelShape:
        return ModelShape.named(self.model, 2, self.itemsize, self.itemsize)


class Pair(NamedTuple):
    """One figure: tokens per second, or milliseconds."""

    published: float
    model: float

    @property
    def error(self) -> float:
        return self.model / self.published - 1


# (input, output) -> tokens per second, all requests at once. TensorRT-LLM's performance overview of
# version 0.17 (github.com/NVIDIA/TensorRT-LLM/blob/258c7540c03517def55d9a5aadfa9288af474e1b/docs/
# source/performance/perf-overview.md), and of 1.0 for Llama 405B (00f37686aa854010d68bcbd0f4ab00).
LENGTHS = ((128, 128), (128, 2048), (1000, 1000), (2048, 128), (2048, 2048), (20000, 2000))
THROUGHPUTS: dict[Engine, tuple[float, ...]] = {
    Engine("H100, Llama 8B fp8", LLAMA_8B, H100_FP8, 1): (
        28836.77, 21109.38, 15244.78, 3556.73, 9488.42, 1401.31),
    Engine("H100, Llama 70B fp8", LLAMA_70B, H100_FP8, 2): (
        6645.12, 6169.58, 4390.53, 772.66, 2898.16, 443.01),
    Engine("H100, Llama 70B fp8", LLAMA_70B, H100_FP8, 4): (
        11127.53, 11511.93, 7430.99, 1302.6, 5480.03, 920.19),
    Engine("H100, Llama 70B fp8", LLAMA_70B, H100_FP8, 8): (
        14730.69, 17061.82, 11451.16, 1923.41, 8801.95, 1512.6),
    Engine("H100, Llama 405B fp8", LLAMA_405B, H100_FP8, 8): (3627, 4340, 2919, 453, 2296, 345),
    Engine("A100, Llama 8B fp16", LLAMA_8B, A100, 1, 2): (
        6627.27, 5255.99, 3786.83, 799.61, 2424.16, 330.04),
    Engine("A100, Llama 70B fp16", LLAMA_70B, A100, 4, 2): (
        2733.48, 2811.27, 1921.77, 325.15, 1393.64, 212.08),
    Engine("A100, Llama 70B fp16", LLAMA_70B, A100, 8, 2): (
        4717.62, 5241.5, 3320.41, 542.38, 2553.71, 413.38),
}  # fmt: skip

# Requests at once -> milliseconds from token to token, 5000 tokens in and 500 out: NVIDIA NIM 1.8
# with Llama 3.3 70B, a model of the same shape (docs.nvidia.com/nim/benchmarking/llm/1.0.0/
# performance).
LATENCY_LOAD = Load(prompt=5000, output=500)
LATENCY_ENGINE = Engine("H100, Llama 70B fp8", LLAMA_70B, H100_FP8, 2)
LATENCIES = {1: 18.58, 5: 21.83, 25: 38.75, 50: 59.73}


def throughputs() -> Iterator[tuple[Engine, list[Pair]]]:
    """Each engine, with a pair for each of LENGTHS."""
    for engine, published in THROUGHPUTS.items():
        loads = [Load(*lengths) for lengths in LENGTHS]
        pairs = zip(published, (most_output(engine, load) for load in loads), strict=True)
        yield engine, [Pair(*pair) for pair in pairs]


def most_output(engine: Engine, load: Load) -> float:
    """Tokens per second with as many requests as fit."""
    model, layout = engine.shape, Layout(engine.gpus)
    batch = most_sequences(model, engine.cluster, layout, load.length)
    batch = min(batch, MOST_AT_ONCE)
    return serve(model, engine.cluster, layout, load, batch).tokens_per_second


def latencies() -> dict[int, Pair]:
    """From token to token, by the number of requests at once."""
    engine = LATENCY_ENGINE
    return {
        batch: Pair(
            published,
            1e3
            * serve(engine.shape, engine.cluster, Layout(engine.gpus), LATENCY_LOAD, batch).tpot,
        )
        for batch, published in LATENCIES.items()
    }
