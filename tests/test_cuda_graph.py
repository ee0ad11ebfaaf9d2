"""Decode steps as graphs, without a GPU: a fake graph that replays the very callable it recorded.

Graphs go wrong around the replay: padding, inputs that are not at the captured addresses, numbers
left from an earlier step, a size that is too small. All of this is code of the real runner and of
the real staging buffer, and is tested here. The KV cache is poisoned with NaN.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.input_batch import InputBatch
from nanoserve.kernels.cuda_graph import CudaGraph, DecodeGraphs, GraphShape, capture_graphs
from nanoserve.kernels.staging import StagingBuffer
from nanoserve.model_runner import ModelRunner


class FakeGraph:
    """The interface of cuda_graph.Graph on a CPU.

    Like the real one it knows addresses, not tensors: what `capture` saw as inputs must still be
    the runner's when it is replayed, and each replay fills the one tensor that `capture` returned.
    """

    def __init__(self, shared: object | None = None) -> None:
        self.shared_given, self.shared = shared, shared or object()

    def capture(self, forward: Callable[[], Tensor]) -> Tensor:
        assert not gc.isenabled(), "an engine might be freed in the middle of a capture"
        self.forward, self.output = forward, forward().clone()
        return self.output

    def replay(self) -> None:
        self.output.copy_(self.forward())


def addresses(inputs: InputBatch) -> list[int]:
    """Of the tensors that a captured forward pass reads."""
    meta, sent = inputs.metadata, inputs.tensors
    tensors = [sent.input_ids, sent.positions, sent.token_rows, meta.slot_mapping]
    tensors += [meta.block_table, meta.query_start_loc, meta.seq_lens]
    return [tensor.data_ptr() for tensor in tensors]


def inputs_of(forward: Any) -> InputBatch:
    """What a recorded forward pass of the runner is bound to."""
    while not isinstance(forward, functools.partial):
        forward = forward.__wrapped__
    return forward.args[0]


class GraphBackend(AttentionBackend):
    """The definition, as a graph needs it: its plan depends on no contents, and a token without a
    slot is not stored."""

    supports_cuda_graphs = True

    def plan(self, metadata: StepMetadata, block_size: int, dtype: torch.dtype) -> StepMetadata:
        return replace(metadata, plan="planned")

    def store(self, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: StepMetadata) -> None:
        kept = metadata.slot_mapping >= 0
        metadata = replace(metadata, slot_mapping=metadata.slot_mapping[kept])
        super().store(key[kept], value[kept], kv_cache, metadata)

    def attend(
        self, query: Tensor, kv_cache: KVCache, metadata: StepMetadata, **options: Any
    ) -> Tensor:
        assert metadata.plan == "planned"
        planned = super().plan(metadata, kv_cache[0].shape[1], query.dtype)
        parts = [part for part in planned.plan if part[0] < part[1]]
        return super().attend(query, kv_cache, replace(planned, plan=parts), **options)


class GraphRunner(ModelRunner):
    """A runner with a staging buffer and fake graphs. It looks at each step's padding."""

    is_recorded = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.replayed: list[GraphShape] = []
        for cache in [each for layer in self.kv_caches for each in layer]:
            cache.fill_(math.nan)
        if self.is_recorded:
            self.staging = StagingBuffer(self.config, self.config.max_num_seqs, self.device)
            self.graphs = capture_graphs(self, FakeGraph)

    def prepare_inputs(self, *arguments: Any) -> InputBatch:
        inputs = super().prepare_inputs(*arguments)
        if self.graphs is not None and inputs.step.scheduled and inputs.graph_shape is not None:
            self.check(inputs, inputs.graph_shape)
        return inputs

    def check(self, inputs: InputBatch, shape: GraphShape) -> None:
        self.replayed.append(shape)
        recorded = inputs_of(self.graphs.graphs[shape].forward)
        assert addresses(inputs) == addresses(recorded), "the graph reads other addresses"
        num_seqs, num_tokens = len(inputs.arrays.seq_lens), len(inputs.arrays.input_ids)
        meta = inputs.metadata
        assert (meta.slot_mapping[num_tokens:] == -1).all()
        assert (meta.seq_lens[num_seqs:] == 0).all()
        assert (meta.query_start_loc[num_seqs:] == num_tokens).all()


class EagerRunner(GraphRunner):
    is_recorded = False


class FakeEvent:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def without_pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *sizes, pin_memory=False, **options: make(*sizes, **options)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the staging buffer takes of a GPU."""
    for name in ("zeros", "empty"):
        monkeypatch.setattr(torch, name, without_pinning(getattr(torch, name)))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)


@given(max_num_seqs=st.integers(1, 1100), data=st.data())
def test_every_batch_has_a_size(max_num_seqs: int, data: st.DataObject) -> None:
    """The smallest that holds it; and no more than 15 rows, or twice the batch, are padding."""
    graphs = DecodeGraphs(max_num_seqs, FakeGraph)
    num_seqs = data.draw(st.integers(1, max_num_seqs))
    shape = graphs.choose_shape(np.arange(num_seqs + 1))
    assert shape is not None
    assert num_seqs <= shape.num_seqs <= min(max_num_seqs, 2 * num_seqs, num_seqs + 15)
    assert graphs.choose_shape(np.arange(max_num_seqs + 2)) is None


def test_drafts_have_graphs_of_their_own() -> None:
    """For up to 1 + k tokens of each sequence; a longer query runs in none, and no graph is larger
    than a step may be."""
    graphs = DecodeGraphs(4, FakeGraph, (1, 4), max_tokens=12)
    cases = [([1, 1, 1], (4, 1)), ([4], (1, 4)), ([1, 2], (2, 4)), ([1, 5], None), ([2] * 4, None)]
    for query_lens, shape in [*cases, ([1] * 5, None)]:
        assert graphs.choose_shape(np.append(0, np.cumsum(query_lens))) == shape


def test_the_largest_is_captured_first_and_the_others_share_with_it() -> None:
    """And each replay gives its own size's numbers, in the first rows of one tensor."""
    made: list[GraphShape] = []

    def make_forward(shape: GraphShape) -> Callable[[], Tensor]:
        made.append(shape)
        return lambda: torch.full((shape.num_seqs, 3), float(shape.num_seqs))

    class WithoutCopy(FakeGraph):
        def capture(self, forward: Callable[[], Tensor]) -> Tensor:
            self.forward = forward
            return forward()

        def replay(self) -> None:
            self.forward()

    graphs = DecodeGraphs(20, WithoutCopy)
    graphs.capture(make_forward, use_tqdm=False)
    assert [shape.num_seqs for shape in made] == [20, 16, 8, 4, 2, 1]
    first, *others = [graphs.graphs[shape] for shape in made]
    assert {id(graph.shared_given) for graph in others} == {id(first.shared)}
    for size in (4, 20, 1, 8, 4):
        output = graphs.replay(GraphShape(size))
        assert torch.equal(output, torch.full((size, 3), float(size)))
        assert output.data_ptr() == graphs.hidden.data_ptr()


def test_each_engine_records_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in a pool of its own, which all of its graphs share."""
    used: list[dict[str, Any]] = []

    class Recording:
        def __init__(self, graph: object, **where: Any) -> None:
            used.append(where)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    for name in ("CUDAGraph", "Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    for _ in range(2):
        graphs = DecodeGraphs(4, CudaGraph)
        graphs.capture(lambda shape: lambda: torch.zeros(shape), use_tqdm=False)
    for key in ("stream", "pool"):
        first, second = ({id(where[key]) for where in half} for half in (used[:3], used[3:]))
        assert len(first) == len(second) == 1
        assert first != second


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests, greedy and sampled, of 1 to 20 tokens; some fork, some are penalised."""
    chance = np.random.default_rng(3)
    prompts = [chance.integers(5, 300, chance.integers(1, 25)).tolist() for _ in range(24)]
    extras: list[dict[str, Any]] = [{"n": 3}, {"repetition_penalty": 1.3}, {"top_k": 20}, {}]
    params = [
        SamplingParams(
            seed=i,
            max_tokens=1 + i % 20,
            temperature=i % 2,
            ignore_eos=True,
            **(extras[i // 2 % 4] if i % 2 else {}),
        )
        for i in range(24)
    ]
    return prompts, params


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 400, "max_num_seqs": 20},
        {"num_gpu_blocks_override": 30, "max_num_seqs": 9, "preemption_mode": "swap"},
        {"num_gpu_blocks_override": 30, "max_num_seqs": 9, "max_num_batched_tokens": 11},
    ],
    ids=["ample", "swap", "chunks"],
)
def test_graphs_change_no_token(make_checkpoint: Callable[..., Path], options: Any) -> None:
    """With overlapped steps the graph itself puts in the token that only the device knows."""
    folder = make_checkpoint("llama")
    prompts, params = workload()
    fixed = {"block_size": 4, "max_model_len": 64, "attention_backend": GraphBackend, **options}
    results = []
    for runner_cls, is_async in ((EagerRunner, False), (GraphRunner, False), (GraphRunner, True)):
        with LLM(folder, runner_cls=runner_cls, async_scheduling=is_async, **fixed) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([[each.token_ids for each in output.outputs] for output in outputs])
            replayed = llm.engine.executor.runner.replayed
        assert (len(replayed) >= 12) == (len(set(replayed)) >= 3) == (runner_cls is GraphRunner)
    assert results[0] == results[1] == results[2]
    assert all(len(tokens) == 1 + i % 20 for i, [tokens, *_] in enumerate(results[0]))


def test_enforce_eager_and_a_cpu_record_nothing() -> None:
    for options in ({}, {"enforce_eager": True, "runner_cls": GraphRunner}):
        with LLM(num_gpu_blocks_override=64, max_model_len=64, **options) as llm:
            assert llm.engine.executor.runner.graphs is None
