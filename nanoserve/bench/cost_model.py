"""What would more machines do? A cost model of one step: on paper, held to measured ratios.

A step multiplies its tokens with the weights of every layer, reads the keys and values of its
sequences, and multiplies one row of each sequence with the head. Each of these three parts lasts as
long as the slower of two things, reading its bytes or doing its operations (roofline.py). Each
layer has a fixed price besides: starting its kernels, and what the host does. So for Qwen3-8B in
bfloat16 on one H100, a decode step of 1 and of 256 sequences of 1024 tokens, and a prompt of 2048:

    ms                     layers      keys and values   head     started     together
    decode of 1      bytes   5.5   bytes    0.1    bytes  0.5       0.4          6.5
    decode of 256    bytes   5.5   bytes   15.4    bytes  0.5       0.4         21.8
    prompt of 2048   work   44.3   work     1.9    bytes  0.5       0.4         47.1

Decoding is bound by bandwidth and a prompt by arithmetic. That is why a batch is nearly free, until
its keys and values are as large as the weights.

Three ways to use more devices, and what each costs:

    tensor     a layer's weights, and its KV heads, are cut: each device reads and computes a share.
               Two all-reduces a layer, which every token waits for; one for the embeddings, which
               are cut by the vocabulary; and the logits are gathered
    pipeline   layers are cut into stages, with as many batches in flight as there are stages. A
               token passes all stages, so nothing gets faster; the memory grows
    replicas   whole engines beside each other. Nothing is sent; each has a prefix cache of its own

Constants of CPU are fitted to notebooks/results/*.json: two numbers, the share of the measured
bandwidth that a step reaches and the price of a layer. Those of H100 are published, or assumed
where it says so; none is fitted. tests/test_cost_model.py holds the model to what was measured
here: ratios of times, all of one device (ratios.py), and the bytes that two ranks sent. It also
holds it to what others have published of 1 to 8 GPUs (published.py).

Left out: activations, norms and sampling; sliding windows; imbalance of stages or of experts;
communication that runs beside computation; a prompt's step has no decodes beside it.

Papers: Pope et al., Efficiently Scaling Transformer Inference, arXiv 2211.05102. vLLM: none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.bench.roofline import Cost, MachineLimits, ModelCosts
from nanoserve.bench.workload import DUMMY_MODELS, LLAMA_3, Request, make_shape
from nanoserve.models.config import ModelConfig

# Published, and too large to be written as a dummy: huggingface.co/meta-llama.
LARGE_MODELS: dict[str, dict[str, Any]] = {
    "llama-3.1-70b": make_shape(LLAMA_3, 80, 8192, 28672, 64, 8, False),
    "llama-3.1-405b": make_shape(LLAMA_3, 126, 16384, 53248, 128, 8, False),
}


# -- a step of a model --


class Step(NamedTuple):
    """What a step computes, over all of its sequences."""

    num_tokens: int
    num_sampled: int  # rows of logits
    num_keys: int  # read from the cache
    num_attended: int  # pairs of a query and a key that it sees


def decode(batch: int, context: int) -> Step:
    """One token for each of `batch` sequences of `context` tokens."""
    return Step(batch, batch, batch * context, batch * context)


def prefill(length: int, cached: int = 0) -> Step:
    """A prompt of `length` tokens, of which the first `cached` are in the prefix cache."""
    new = length - cached
    return Step(new, 1, length, new * cached + new * (new + 1) // 2)


def steps_of(requests: list[Request]) -> list[Step]:
    """The ideal schedule: all prompts in one step, then a token for each that is unfinished."""
    firsts = [prefill(len(request.prompt)) for request in requests]
    steps = [Step(*(sum(column) for column in zip(*firsts, strict=True)))]
    for number in range(1, max(request.num_output for request in requests)):
        contexts = [len(r.prompt) + number for r in requests if r.num_output > number]
        steps.append(Step(len(contexts), len(contexts), sum(contexts), sum(contexts)))
    return steps


class Messages(NamedTuple):
    """What the ranks of a stage send in a step. Bytes are those before a cut."""

    num_all_reduces: int
    all_reduce_bytes: float  # of each
    gather_bytes: float  # logits


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model, and the bytes of each of its numbers."""

    costs: ModelCosts
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    weight_itemsize: float  # of the layers' weights; int4 with a scale and a zero point: 0.53
    head_itemsize: float
    kv_itemsize: float
    activation_itemsize: float  # what ranks and stages send

    @classmethod
    def of(
        cls, config: ModelConfig, itemsize: float, weights: float = 0, kv: float = 0
    ) -> ModelShape:
        """`weights` and `kv`: bytes of a weight of the layers and of a number in the KV cache, if
        these are quantized; 0: `itemsize`, as all other numbers."""
        costs = ModelCosts.of(config, 1)
        sizes = (weights or itemsize, itemsize, kv or itemsize, itemsize)
        return cls(costs, config.num_layers, config.hidden_size, config.num_kv_heads, *sizes)

    @classmethod
    def named(cls, name: str, itemsize: float = 2, weights: float = 0, kv: float = 0) -> ModelShape:
        """One of workload.DUMMY_MODELS or of LARGE_MODELS; raises KeyError for another name."""
        shape = {**DUMMY_MODELS, **LARGE_MODELS}[name]
        return cls.of(ModelConfig.from_folder(Path(name), shape), itemsize, weights, kv)

    @property
    def weight_bytes(self) -> float:
        layers = self.costs.resident_weights
        return self.weight_itemsize * layers + self.head_itemsize * (
            self.costs.num_parameters - layers
        )

    @property
    def kv_bytes(self) -> float:
        """Of one token, in all layers."""
        return self.kv_itemsize * self.costs.kv_numbers

    def parts(self, step: StepPlan) -> tuple[Cost, Cost, Cost]:
        """Of the layers' products, of attention, of the head."""
        costs = self.costs
        return (
            Cost(
                self.weight_itemsize * costs.resident_weights,
                2.0 * costs.layer_weights * step.num_tokens,
            ),
            Cost(self.kv_bytes * step.num_keys, costs.operations_per_key * step.num_attended),
            Cost(
                self.head_itemsize * costs.head_weights,
                2.0 * costs.head_weights * step.num_sampled,
            ),
        )

    def messages(self, step: StepPlan) -> Messages:
        """Two all-reduces of a hidden vector a token in each layer, and one for the embeddings."""
        vocab_size = self.costs.head_weights // self.hidden_size
        return Messages(
            2 * self.num_layers + 1,
            self.activation_itemsize * self.hidden_size * step.num_tokens,
            self.activation_itemsize * vocab_size * step.num_sampled,
        )


# -- machines --


@dataclass(frozen=True)
class Device:
    """One GPU, or one CPU of a machine: what a step reaches there."""

    limits: MachineLimits  # as published or measured
    bandwidth_share: float  # of the bandwidth, in a step
    rate_share: float
    layer_seconds: float  # that a layer takes however little it computes
    memory: float = 0.0  # bytes for weights and the KV cache

    def seconds(self, cost: Cost) -> float:
        limits = self.limits
        return max(
            cost.num_bytes / (limits.bandwidth * self.bandwidth_share),
            cost.operations / (limits.rate * self.rate_share),
        )


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices. Bandwidths: of one device, in one direction."""

    device: Device
    devices_per_node: int
    num_nodes: int
    link: float  # bytes per second inside a node
    network: float  # and between nodes
    base_latency: float  # seconds of any message
    link_latency: float  # and of each hop inside a node
    network_latency: float  # and of each hop between nodes

    @property
    def num_devices(self) -> int:
        return self.devices_per_node * self.num_nodes

    def all_reduce(self, num_bytes: float, size: int) -> float:
        """Seconds until `size` devices have the sum of `num_bytes` each. The latency is that of
        NCCL's trees: up and down through the devices of a node, then through the nodes."""
        if size == 1:
            return 0.0
        inside = min(size, self.devices_per_node)
        nodes = ceil(size / inside)
        hops = (inside - 1) * self.link_latency + ceil(log2(nodes)) * self.network_latency
        seconds = self.base_latency + 2 * hops
        seconds += 2 * (inside - 1) / inside * num_bytes / self.link
        return seconds + 2 * (nodes - 1) / nodes * num_bytes / inside / self.network

    def send(self, num_bytes: float, is_inside: bool) -> float:
        """Seconds to give the next stage its input."""
        latency = self.link_latency if is_inside else self.network_latency
        return self.base_latency + latency + num_bytes / (self.link if is_inside else self.network)


def cpu(limits: MachineLimits) -> Device:
    """The machine of notebooks/results: 2 cores. Both numbers are fitted to its ratios; the rate is
    as measured."""
    return Device(limits, bandwidth_share=0.75, rate_share=1.0, layer_seconds=270e-6)


# NVIDIA H100 SXM, 80 GB. 3.35 TB/s and 989 TFLOP/s (bfloat16, dense): its datasheet,
# nvidia.com/en-us/data-center/h100. Assumed: 75% of the bandwidth (as on the CPU), 65% of the rate,
# 12 us a layer (about ten kernels in a CUDA graph), 90% of the memory for weights and KV.
H100 = Device(MachineLimits(3.35e12, 989e12), 0.75, 0.65, 12e-6, memory=0.9 * 80e9)

# DGX H100: NVLink, of which NCCL reaches 370 GB/s in one direction (NVIDIA/nccl-tests#212), and a
# 400 Gb/s port for each GPU, of which it reaches 46 to 48 GB/s (NVIDIA/nccl-tests#290). Latencies
# are those of NCCL's own model, for trees (src/graph/tuning.cc; NVIDIA/nccl#1334).
DGX_H100 = Cluster(H100, 8, 1, 370e9, 47e9, 6.8e-6, 0.6e-6, 5.0e-6)
NODES_64 = replace(DGX_H100, num_nodes=64)


# -- layouts --


class Layout(NamedTuple):
    """How an engine is cut, and how many of these engines there are."""

    tensor: int = 1
    pipeline: int = 1
    replicas: int = 1


def pass_seconds(model: ModelShape, cluster: Cluster, layout: Layout, step: StepPlan) -> float:
    """Seconds of a step from the first stage's input to the last one's logits."""
    layers, attention, head = model.parts(step)
    size, stages, device = layout.tensor, layout.pipeline, cluster.device
    # Each rank has at least one KV head: those of a group of ranks have the same.
    share = min(size, model.num_kv_heads)
    attention = Cost(attention.num_bytes / share, attention.operations / size)
    seconds = sum(
        device.seconds(Cost(part.num_bytes / size, part.operations / size))
        for part in (layers, head)
    )
    seconds += device.seconds(attention) + model.num_layers * device.layer_seconds
    number, num_bytes, logit_bytes = model.messages(step)
    seconds += number * cluster.all_reduce(num_bytes, size)
    seconds += cluster.all_reduce(logit_bytes, size) / 2  # of which a gather is the second half
    is_inside = size * stages <= cluster.devices_per_node
    # Every rank of a stage sends its share to the rank of the same number.
    return seconds + (stages - 1) * cluster.send(num_bytes / size, is_inside)


def most_sequences(model: ModelShape, cluster: Cluster, layout: Layout, length: int) -> int:
    """Sequences of `length` tokens that one replica's memory holds; 0 if the weights do not fit."""
    free = cluster.device.memory - model.weight_bytes / (layout.tensor * layout.pipeline)
    share = min(layout.tensor, model.num_kv_heads) * layout.pipeline
    return max(0, int(free / (model.kv_bytes * length / share)))


@dataclass(frozen=True)
class Load:
    """Requests that are all alike. Nothing is in the prefix cache."""

    prompt: int = 1536  # tokens
    output: int = 512

    @property
    def length(self) -> int:
        return self.prompt + self.output


class Speed(NamedTuple):
    """What a layout does with a load."""

    batch: int  # sequences of each replica
    ttft: float  # seconds of a prompt alone
    tpot: float  # seconds from token to token, prompts of others included
    tokens_per_second: float  # output, of all replicas


def serve(model: ModelShape, cluster: Cluster, layout: Layout, load: Load, batch: int) -> Speed:
    """`batch` requests of each replica at all times.

    While a request decodes its output, as many prompts are computed as there are requests. With p
    stages, p batches of batch / p sequences are in flight: a prompt keeps each stage busy for a
    p-th of its pass, and a decode step lasts as long as its whole pass.
    """
    stages = layout.pipeline
    step = decode(ceil(batch / stages), load.prompt + load.output // 2)
    ttft = pass_seconds(model, cluster, layout, prefill(load.prompt))
    cycle = load.output * pass_seconds(model, cluster, layout, step) + batch * ttft / stages
    return Speed(batch, ttft, cycle / load.output, layout.replicas * batch * load.output / cycle)


def fastest(
    model: ModelShape, cluster: Cluster, layout: Layout, load: Load, most_tpot: float = 0.05
) -> Speed | None:
    """The largest batch that fits and keeps tpot below `most_tpot`; None if there is none."""
    low, high = 0, most_sequences(model, cluster, layout, load.length)
    while low < high:
        middle = (low + high + 1) // 2
        if serve(model, cluster, layout, load, middle).tpot <= most_tpot:
            low = middle
        else:
            high = middle - 1
    return serve(model, cluster, layout, load, low) if low else None
