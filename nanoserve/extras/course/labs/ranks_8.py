"""Lab 8, Two ranks: where is a model cut, and what crosses the wire?

Each layer on two and four ranks, beside the same layer on one. The ranks take turns in one process.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanoserve.attention import StepMetadata
from nanoserve.config import ModelConfig
from nanoserve.extras.course.labs.lockstep import run_ranks
from nanoserve.extras.course.labs.tensors import as_text
from nanoserve.extras.course.spec import Lab, Task, must
from nanoserve.layers import LayerConfig, RowParallelLinear, VocabParallelEmbedding
from nanoserve.models.loader import fill_randomly
from nanoserve.models.registry import build_model
from nanoserve.parallel import CommStats, ParallelState

LAYERS, PARALLEL = "nanoserve.layers", "nanoserve.parallel"
RANGE = Task("8.1", PARALLEL, "ParallelState.shard_range")
COLUMNS = Task("8.2", LAYERS, "RowParallelLinear.matrices")
SUM = Task("8.3", LAYERS, "RowParallelLinear.forward")
EMBED = Task("8.4", LAYERS, "VocabParallelEmbedding.forward")
GATHER = Task("8.5", PARALLEL, "ParallelState.gather")
LOGITS = Task("8.6", LAYERS, "VocabParallelEmbedding.compute_logits")
LAB = Lab(
    8,
    "Two ranks",
    [RANGE, COLUMNS, SUM, EMBED, GATHER, LOGITS],
    needs_torch=True,
    memory=4096,  # of address space: torch maps much and uses little
    seconds=15.0,
)


def check_calls(stats: list[CommStats], right: dict[str, int], text: str) -> None:
    """Each rank's operations, by name, and their bytes."""
    for rank, each in enumerate(stats):
        must(
            each.num_calls == Counter(right.keys()) and each.num_bytes == Counter(right),
            f"{text}: rank {rank} called {dict(each.num_calls)} with {dict(each.num_bytes)} bytes; "
            f"one {' and one '.join(f'{name} of {size} bytes' for name, size in right.items())} "
            "is right",
        )


def check_close(got: Tensor, right: Tensor, text: str) -> None:
    must(
        got.shape == right.shape and torch.allclose(got, right, rtol=1e-4, atol=1e-5),
        f"{text}: {as_text(got[:1])}, shape {list(got.shape)}; {as_text(right[:1])}, shape "
        f"{list(right.shape)}, is right (the first row)",
    )


# -- 8.1 --


def check_range(total: int, tp_size: int, unit: int | None, right: list[tuple[int, int]]) -> None:
    got = [ParallelState(rank, tp_size).shard_range(total, "x", unit) for rank in range(tp_size)]
    must(
        [tuple(each) for each in got] == right,
        f"{total} rows, unit {unit}, {tp_size} ranks: (first, size) of the ranks are {got}, and "
        f"should be {right}",
    )


@RANGE.behaviour(1, "ranks have equal parts, one behind the other")
def equal_parts() -> None:
    check_range(12, 1, None, [(0, 12)])
    check_range(12, 2, None, [(0, 6), (6, 6)])
    check_range(12, 4, None, [(0, 3), (3, 3), (6, 3), (9, 3)])
    check_range(12, 2, 3, [(0, 6), (6, 6)])


@RANGE.behaviour(1, "with fewer units than ranks, neighbours hold the same unit")
def neighbours() -> None:
    check_range(2, 4, 1, [(0, 1), (0, 1), (1, 1), (1, 1)])
    check_range(8, 4, 4, [(0, 4), (0, 4), (4, 4), (4, 4)])
    check_range(16, 4, 16, [(0, 16)] * 4)


@RANGE.behaviour(1, "what cannot be divided evenly is refused by ValueError, which names it")
def refused() -> None:
    for total, tp_size, unit in [(12, 5, None), (6, 4, 2), (9, 2, 3), (1, 2, None)]:
        try:
            got = ParallelState(0, tp_size).shard_range(total, "the heads", unit)
        except ValueError as error:
            must("the heads" in str(error), f"the error does not name what it is about: {error}")
        else:
            must(False, f"{total} rows, unit {unit}, {tp_size} ranks: {got} and no ValueError")


@RANGE.behaviour(0.5, "any numbers", is_property=True)
def any_numbers(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(200):
        unit, tp_size = rng.randint(1, 6), 2 ** rng.randint(0, 4)
        units = 2 ** rng.randint(0, 5)
        parts, repeats = min(units, tp_size), max(tp_size // units, 1)
        size = units // parts * unit
        right = [(rank // repeats * size, size) for rank in range(tp_size)]
        check_range(units * unit, tp_size, unit, right)


# -- 8.2, 8.3 --


def make_linear(parallel: ParallelState, weight: Tensor, bias: Tensor | None) -> RowParallelLinear:
    """A layer with this rank's columns of `weight`."""
    layer = RowParallelLinear(
        weight.shape[1],
        weight.shape[0],
        bias=bias is not None,
        layer_config=LayerConfig(parallel=parallel),
    )
    size = weight.shape[1] // parallel.tp_size
    layer.weight.copy_(weight[:, parallel.tp_rank * size : (parallel.tp_rank + 1) * size])
    if layer.bias is not None and bias is not None:
        layer.bias.copy_(bias)
    return layer


@COLUMNS.behaviour(1, "a rank reads its own columns of the matrix")
def own_columns() -> None:
    weight = torch.arange(24.0).view(3, 8)
    for tp_size in (1, 2, 4):
        for rank in range(tp_size):
            parallel = ParallelState(rank, tp_size)
            right = make_linear(parallel, weight, None).weight
            layer = make_linear(parallel, torch.zeros(3, 8), None)
            shards = dict(layer.shards("mlp.down_proj"))
            text = f"rank {rank} of {tp_size}"
            must([*shards] == ["mlp.down_proj.weight"], f"{text}: the names are {[*shards]}")
            shard = shards["mlp.down_proj.weight"]
            must(
                shard.full_shape == (3, 8),
                f"{text}: the checkpoint's matrix is (3, 8), not {shard.full_shape}",
            )
            shard.target.copy_(weight[shard.slices])
            check_close(layer.weight, right, text)


@COLUMNS.behaviour(0.5, "the bias is whole on each rank")
def whole_bias() -> None:
    bias = torch.arange(3.0)
    for rank in range(2):
        layer = make_linear(ParallelState(rank, 2), torch.zeros(3, 8), torch.zeros(3))
        shards = dict(layer.shards("o_proj"))
        must([*shards] == ["o_proj.weight", "o_proj.bias"], f"the names are {[*shards]}")
        shard = shards["o_proj.bias"]
        shard.target.copy_(bias[shard.slices])
        must(layer.bias is not None and torch.equal(layer.bias, bias), f"rank {rank}: {layer.bias}")


def check_linear(tp_size: int, has_bias: bool, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight, x = (torch.randn(rows, 8, generator=generator) for rows in (3, 5))
    bias = torch.randn(3, generator=generator) if has_bias else None

    def work(parallel: ParallelState) -> Tensor:
        size = 8 // parallel.tp_size
        part = x[:, parallel.tp_rank * size : (parallel.tp_rank + 1) * size]
        return make_linear(parallel, weight, bias)(part)

    results, stats = run_ranks(tp_size, work)
    right = x @ weight.T if bias is None else x @ weight.T + bias
    text = f"{tp_size} ranks" + ", with a bias" * has_bias
    for rank, got in enumerate(results):
        check_close(got, right, f"{text}: rank {rank}'s result")
    check_calls(stats, {"all_reduce": 5 * 3 * 4}, text)


@SUM.behaviour(1, "the parts of all ranks are summed, and each rank has the sum")
def summed() -> None:
    check_linear(2, has_bias=False)
    check_linear(4, has_bias=False)


@SUM.behaviour(1, "the bias is added once, not by each rank")
def bias_once() -> None:
    check_linear(2, has_bias=True)
    check_linear(4, has_bias=True)


@SUM.behaviour(1, "a random model gives the logits that it gives on one rank", is_property=True)
def sum_in_a_model(seed: int) -> None:
    check_model(seed)


# -- 8.4, 8.6 --


def make_embedding(parallel: ParallelState, weight: Tensor) -> VocabParallelEmbedding:
    """An embedding with this rank's rows of `weight`. The padding would show: it is 1000."""
    layer = VocabParallelEmbedding(len(weight), weight.shape[1], LayerConfig(parallel=parallel))
    layer.weight.fill_(1000.0)
    layer.weight[: layer.num_tokens] = weight[layer.start : layer.start + layer.num_tokens]
    return layer


def check_embedding(vocab_size: int, tp_size: int, ids: list[int], seed: int = 0) -> None:
    weight = torch.randn(vocab_size, 4, generator=torch.Generator().manual_seed(seed))
    text = f"{vocab_size} tokens on {tp_size} ranks, ids {ids}"
    input_ids = torch.tensor(ids)
    results, stats = run_ranks(
        tp_size, lambda parallel: make_embedding(parallel, weight)(input_ids)
    )
    for rank, got in enumerate(results):
        for token, vector, right in zip(ids, got, weight[input_ids], strict=True):
            must(
                torch.allclose(vector, right),
                f"{text}: rank {rank} has {as_text(vector)} for token {token}, and "
                f"{as_text(right)} is right",
            )
    must(torch.equal(input_ids, torch.tensor(ids)), f"{text}: input_ids was written to")
    check_calls(stats, {"all_reduce": len(ids) * 4 * 4}, text)


@EMBED.behaviour(1, "each rank looks up its own ids, and all ranks have all vectors")
def own_ids() -> None:
    check_embedding(8, 2, [0, 3, 4, 7])
    check_embedding(8, 2, [4, 5, 6])


@EMBED.behaviour(1, "the ids of other ranks count as zero, not as another token")
def foreign_ids() -> None:
    check_embedding(8, 4, [0, 0, 7, 2, 5, 4])


@EMBED.behaviour(1, "no id reads the padding of the last rank")
def padding_of_the_vocabulary() -> None:
    check_embedding(10, 4, list(range(10)))
    check_embedding(5, 4, list(range(5)))  # the last rank has nothing but padding


@EMBED.behaviour(1, "a random model gives the logits that it gives on one rank", is_property=True)
def embedding_in_a_model(seed: int) -> None:
    check_model(seed)


def check_logits(vocab_size: int, tp_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, hidden = (torch.randn(rows, 4, generator=generator) for rows in (vocab_size, 3))
    text = f"{vocab_size} tokens on {tp_size} ranks"
    results, stats = run_ranks(
        tp_size, lambda parallel: make_embedding(parallel, weight).compute_logits(hidden)
    )
    check_close(results[0], hidden @ weight.T, f"{text}: rank 0's logits")
    for rank, got in enumerate(results[1:], start=1):
        must(
            got.shape == (3, 0),
            f"{text}: rank {rank} samples nothing; [3, 0], not {list(got.shape)}",
        )
    check_calls(stats, {"gather": 3 * -(-vocab_size // tp_size) * 4}, text)


@LOGITS.behaviour(1, "rank 0 has the logits of all tokens")
def all_logits() -> None:
    check_logits(8, 2)
    check_logits(8, 4)


@LOGITS.behaviour(1, "the padding of the vocabulary is cut off: it would be sampled")
def padding_is_cut() -> None:
    check_logits(10, 4)
    check_logits(5, 4)


# -- 8.5 --


def check_gather(tp_size: int, make: Any) -> None:
    """make(rank) -> this rank's tensor."""
    results, stats = run_ranks(tp_size, lambda parallel: parallel.gather(make(parallel.tp_rank)))
    right = torch.cat([make(rank) for rank in range(tp_size)], dim=-1)
    check_close(results[0], right, f"{tp_size} ranks: rank 0's result")
    for rank, got in enumerate(results[1:], start=1):
        shape = [*right.shape[:-1], 0]
        must(list(got.shape) == shape, f"rank {rank} has the shape {list(got.shape)}, not {shape}")
    check_calls(stats, {"gather": make(0).nbytes}, f"{tp_size} ranks")


@GATHER.behaviour(1, "rank 0 has all parts side by side, the others an empty tensor")
def side_by_side() -> None:
    check_gather(2, lambda rank: torch.arange(6.0).view(2, 3) + 100 * rank)
    check_gather(4, lambda rank: torch.arange(6.0).view(3, 2) + 100 * rank)


@GATHER.behaviour(0.5, "one rank gives its tensor back, and there is no operation")
def one_rank() -> None:
    alone, x = ParallelState(), torch.randn(2, 3)
    must(alone.gather(x) is x, "one rank: the result is the argument itself")
    must(not alone.comm_stats.num_calls, f"one rank calls {dict(alone.comm_stats.num_calls)}")


@GATHER.behaviour(0.5, "also a tensor whose rows are not one behind the other")
def strided() -> None:
    check_gather(2, lambda rank: (torch.arange(12.0).view(2, 6) + 100 * rank)[:, ::2])


# -- a whole model --

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
    "attention_bias": True,
    "mlp_bias": True,
}


@torch.inference_mode()
def run_model(parallel: ParallelState, tokens: Tensor, seed: int) -> Tensor:
    """The logits of all tokens on this rank."""
    model_config = ModelConfig.from_folder(Path("none"), CONFIG)
    model = build_model(model_config, 16, LayerConfig(parallel=parallel))
    fill_randomly(model, seed)
    cpu, number = torch.device("cpu"), len(tokens)
    caches = [spec.allocate(4, 4, torch.float32, cpu) for spec in model.kv_cache_specs()]
    metadata = StepMetadata(
        torch.arange(number),
        torch.arange(4, dtype=torch.int32)[None],
        torch.tensor([0, number], dtype=torch.int32),
        torch.tensor([number], dtype=torch.int32),
    )
    return model.compute_logits(model(tokens, torch.arange(number), caches, metadata))


def check_model(seed: int) -> None:
    """A Llama of two layers, with biases, and 13 tokens that no number of ranks divides."""
    tokens = torch.randint(0, 13, (9,), generator=torch.Generator().manual_seed(seed))
    [alone], _ = run_ranks(1, lambda parallel: run_model(parallel, tokens, seed))
    for tp_size in (2, 4):
        results, stats = run_ranks(tp_size, lambda parallel: run_model(parallel, tokens, seed))
        gap = float((results[0] - alone).abs().max() / alone.std())
        must(
            gap < 1e-3,
            f"a Llama of two layers on {tp_size} ranks: the logits differ from those on one "
            f"rank by {gap:.2g} of their standard deviation",
        )
        calls = dict(stats[0].num_calls)
        must(
            calls == {"all_reduce": 5, "gather": 1},
            f"two layers need 5 all_reduce (the embedding's, and two in each layer) and 1 gather; "
            f"{tp_size} ranks called {calls}",
        )
