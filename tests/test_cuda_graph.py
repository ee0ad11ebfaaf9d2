"""Decode steps as graphs, without a GPU: a fake graph that replays the very callable it recorded.

Graphs go wrong around the replay: padding, inputs that are not at the captured addresses, numbers
left from an earlier step, a size that is too small. All of this is code of the real runner and is
tested here. Unused memory is poisoned with NaN, so that a read of it shows.
"""

from __future__ import annotations

import contextlib
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.cuda_graph import (
    MEMORY_RESERVE,
    CudaGraph,
    DecodeGraphs,
    GraphShape,
    choose_sizes,
    no_garbage_collection,
)
from nanoserve.executor import UniprocExecutor
from nanoserve.model_runner import ModelRunner, StepArrays, StepInputs
from nanoserve.sequence import NewSequence, ScheduledSequence, SchedulerOutput

GREEDY = SamplingParams(temperature=0)


class FakeGraph:
    """The interface of cuda_graph.Graph on a CPU.

    Like the real one it knows addresses, not tensors: what `capture` saw as inputs must still be
    the runner's when it is replayed, and each replay fills the one tensor that `capture` returned.
    """

    def __init__(self, shared: object | None = None) -> None:
        self.shared_given = shared
        self.shared = shared or object()
        self.num_replays = 0

    def capture(self, forward: Callable[[], Tensor]) -> Tensor:
        assert not gc.isenabled(), "an engine might be freed in the middle of a capture"
        self._forward = forward
        self._inputs = addresses(inputs_of(forward))
        self._output = forward().clone()
        return self._output

    def replay(self) -> None:
        assert addresses(inputs_of(self._forward)) == self._inputs
        self._output.copy_(self._forward())
        self.num_replays += 1


def inputs_of(forward: Callable[[], Tensor]) -> StepInputs:
    """The StepInputs that a forward pass of the runner is bound to."""
    bound: Any = forward
    while not isinstance(bound, functools.partial):
        bound = bound.__wrapped__
    return bound.args[0]


def addresses(inputs: StepInputs) -> list[int]:
    """Addresses of the tensors that a captured forward pass reads."""
    meta, sent = inputs.metadata, inputs.tensors
    tensors = [sent.input_ids, sent.positions, sent.token_rows, meta.slot_mapping]
    tensors += [meta.block_table, meta.query_start_loc, meta.seq_lens, sent.lora_ids]
    return [tensor.data_ptr() for tensor in tensors]


class GraphRunner(ModelRunner):
    """A runner with fake graphs. It compares the addresses of each step with those of its graph."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, backend: Any) -> None:
        super().__init__(config, model_config, backend, graph_cls=FakeGraph)
        self.replayed_sizes: list[int] = []
        self.num_eager = 0

    def forward(self, inputs: StepInputs) -> Tensor:
        shape = inputs.graph_shape
        if self.graphs is None or shape is None:
            self.num_eager += 1
            return super().forward(inputs)
        self.replayed_sizes.append(shape.num_seqs)
        recorded = inputs_of(self.graphs.graphs[shape]._forward)
        assert addresses(inputs) == addresses(recorded), "the graph reads other addresses"
        number, meta = len(inputs.arrays.seq_lens), inputs.metadata
        num_tokens = len(inputs.arrays.input_ids)
        padding = [
            meta.slot_mapping[num_tokens:],
            meta.seq_lens[number:],
            meta.query_start_loc[number:],
        ]
        for tensor, value in zip(padding, (-1, 0, num_tokens), strict=True):
            assert set(tensor.tolist()) <= {value}, "a padding row has something to do"
        return super().forward(inputs)


class GraphExecutor(UniprocExecutor):
    """UniprocExecutor over a GraphRunner."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, backend: Any) -> None:
        self.runner = GraphRunner(config, model_config, backend)
        self.num_kv_blocks = self.runner.num_kv_blocks
        self.num_cpu_blocks = self.runner.num_cpu_blocks


# -- sizes --


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (64, [1, 2, 4, *range(8, 65, 8)]),
        (256, [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16)]),
        (300, [1, 2, 4, *range(8, 65, 8), *range(80, 289, 16), 300]),
    ],
)
def test_choose_sizes(max_num_seqs: int, sizes: list[int]) -> None:
    assert choose_sizes(max_num_seqs) == sizes


@settings(deadline=None)
@given(max_num_seqs=st.integers(1, 1100), data=st.data())
def test_every_batch_has_a_size(max_num_seqs: int, data: st.DataObject) -> None:
    """The smallest that holds it; and no more than 15 rows, or twice the batch, are padding."""
    graphs = DecodeGraphs(max_num_seqs, FakeGraph)
    num_seqs = data.draw(st.integers(1, max_num_seqs))
    shape = graphs.choose_shape(np.arange(num_seqs + 1))
    assert shape is not None
    assert shape.query_len == 1
    assert num_seqs <= shape.num_seqs <= min(max_num_seqs, 2 * num_seqs, num_seqs + 15)
    assert graphs.choose_shape(np.arange(max_num_seqs + 2)) is None
    assert graphs.sizes == sorted(set(graphs.sizes))


def test_drafts_have_graphs_of_their_own() -> None:
    """For up to 1 + k tokens of each sequence; a step of one token each runs in the small ones, and
    one with a longer query in none."""
    graphs = DecodeGraphs(4, FakeGraph, (1, 4))
    for query_lens, shape in [
        ([1, 1, 1], (4, 1)),
        ([4], (1, 4)),
        ([1, 2, 1], (4, 4)),
        ([1, 5], None),
        ([1] * 5, None),
    ]:
        assert graphs.choose_shape(np.append(0, np.cumsum(query_lens))) == shape


def test_no_graph_is_larger_than_a_step() -> None:
    """Its memory was not profiled. A step in which few sequences have drafts may run eagerly."""
    graphs = DecodeGraphs(20, FakeGraph, (1, 3), max_tokens=30)
    assert graphs.choose_shape(np.arange(0, 27, 3)) == (8, 3)
    assert graphs.choose_shape(np.array([0, 3, *range(4, 12)])) is None
    assert graphs.choose_shape(np.arange(21)) == (20, 1)


def test_the_largest_is_captured_first_and_the_others_share_with_it() -> None:
    """The smaller graphs use the memory of the largest."""
    made: list[GraphShape] = []

    zero = torch.zeros(1)
    inputs = StepInputs(None, StepArrays(*[zero] * 10), StepMetadata(*[zero] * 4))  # type: ignore[arg-type]

    def make_forward(shape: GraphShape) -> Callable[[], Tensor]:
        made.append(shape)
        return functools.partial(lambda _: torch.zeros(math.prod(shape)), inputs)

    graphs = DecodeGraphs(20, FakeGraph, (1, 3))
    graphs.capture(make_forward, use_tqdm=False)
    shapes = [(size, length) for length in (1, 3) for size in (1, 2, 4, 8, 16, 20)]
    assert made == sorted(shapes, key=math.prod)[::-1]
    first, *others = [graphs.graphs[shape] for shape in made]
    assert first.shared_given is None
    assert {id(graph.shared_given) for graph in others} == {id(first.shared)}
    assert [len(graphs.outputs[shape]) for shape in made] == [*map(math.prod, made)]
    assert graphs.num_bytes == 0  # of GPU memory


class GraphWithoutCopy(FakeGraph):
    """Like the real one: what `capture` returns is where each replay writes."""

    def capture(self, forward: Callable[[], Tensor]) -> Tensor:
        self._forward = forward
        return forward()

    def replay(self) -> None:
        self._forward()


def test_the_outputs_of_all_graphs_are_kept_in_one_tensor() -> None:
    """Of the size of the largest. Each replay gives its own size's numbers, also after another."""
    graphs = DecodeGraphs(20, GraphWithoutCopy)
    graphs.capture(lambda shape: lambda: torch.full((shape[0], 3), float(shape[0])), use_tqdm=False)
    assert graphs.hidden is not None
    assert graphs.hidden.shape == (20, 3)
    for size in (4, 20, 1, 8, 4):
        output = graphs.replay(GraphShape(size))
        assert torch.equal(output, torch.full((size, 3), float(size)))
        assert output.data_ptr() == graphs.hidden.data_ptr()


@pytest.mark.parametrize("excess", [0, 1])
def test_graphs_larger_than_what_is_kept_for_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, excess: int
) -> None:
    """Memory that the KV cache does not leave free is a warning, with what to do."""
    free = iter([2**34, 2**34 - MEMORY_RESERVE - excess])
    monkeypatch.setattr("nanoserve.cuda_graph._free_gpu_memory", lambda: next(free))
    graphs = DecodeGraphs(2, GraphWithoutCopy)
    with caplog.at_level("WARNING", "nanoserve"):
        graphs.capture(lambda shape: lambda: torch.zeros(shape), use_tqdm=False)
    assert graphs.num_bytes == MEMORY_RESERVE + excess
    assert ["more than the 512 MiB" in record.getMessage() for record in caplog.records] == (
        [True] * excess
    )


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_is_as_before(is_enabled: bool) -> None:
    """After a capture, also after one that fails."""

    def capture_and_fail() -> None:
        with no_garbage_collection():
            assert not gc.isenabled()
            raise RuntimeError("no memory")

    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(RuntimeError, match="no memory"):
            capture_and_fail()
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()


def test_each_engine_records_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's default stream belongs to the GPU on which the process recorded its first graph. All
    graphs of one engine are recorded on one stream, in one pool."""
    used: list[dict[str, Any]] = []

    def record(graph: object, **where: Any) -> Any:
        used.append(where)
        return contextlib.nullcontext()

    for name in ("CUDAGraph", "Stream", "graph_pool_handle"):
        monkeypatch.setattr(torch.cuda, name, object)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", record)
    for _ in range(2):
        graphs = DecodeGraphs(4, CudaGraph)
        graphs.capture(lambda shape: lambda: torch.zeros(shape), use_tqdm=False)
    assert len(used) == 2 * 3
    for key in ("stream", "pool"):
        first, second = ({id(where[key]) for where in half} for half in (used[:3], used[3:]))
        assert len(first) == len(second) == 1
        assert first != second
    assert all(where["stream"] is not None for where in used)


# -- one runner, steps by hand --


def make_runner(folder: Path, backend: Any = "auto", **options: Any) -> GraphRunner:
    model_config = ModelConfig.from_folder(folder)
    settings = {
        "block_size": 4,
        "num_gpu_blocks_override": 64,
        "max_num_seqs": 12,
        "max_model_len": 32,
    }
    config = EngineConfig(str(folder), device="cpu", **{**settings, **options})
    return GraphRunner(config.resolve(model_config), model_config, backend)


@pytest.fixture(scope="module")
def runner(make_checkpoint: Callable[..., Path]) -> GraphRunner:
    """Graphs of 1, 2, 4, 8 and 12 sequences."""
    return make_runner(make_checkpoint("llama"))


def start(runner: GraphRunner, lengths: list[int]) -> tuple[list[list[int]], list[int]]:
    """Forget all, poison the whole cache, and compute prompts of these lengths. Returns their
    tokens with what was sampled, and the sequences' one and only blocks, 8 apart."""
    for pair in runner.kv_caches:
        for cache in pair:
            cache.fill_(torch.nan)
    blocks = [range(1 + 5 * i, 6 + 5 * i) for i in range(len(lengths))]
    prompts = [[5 + i, *range(40, 39 + length)] for i, length in enumerate(lengths)]
    new = tuple(
        NewSequence(i, tuple(p), len(p), tuple(blocks[i]), GREEDY, frozenset(), (), i, 0, 1)
        for i, p in enumerate(prompts)
    )
    scheduled = tuple(ScheduledSequence(i, 0, n, 5, []) for i, n in enumerate(lengths))
    output = runner.execute_model(
        SchedulerOutput(scheduled, new, (), sum(lengths), is_restart=True)
    )
    tokens = [[*p, *output.sampled_token_ids[i]] for i, p in enumerate(prompts)]
    return tokens, [len(p) for p in prompts]


def decode(runner: GraphRunner, computed: dict[int, int]) -> dict[int, int]:
    """One token for each of these sequences."""
    scheduled = tuple(ScheduledSequence(i, at, 1, 5, []) for i, at in computed.items())
    output = runner.execute_model(SchedulerOutput(scheduled, (), (), len(scheduled)))
    return {seq_id: token for seq_id, (token,) in output.sampled_token_ids.items()}


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    lengths=st.lists(st.integers(2, 12), min_size=1, max_size=12),
    batches=st.lists(st.sets(st.integers(0, 11), min_size=1), min_size=1, max_size=6),
)
def test_padding_reads_and_stores_nothing(
    runner: GraphRunner, lengths: list[int], batches: list[set[int]]
) -> None:
    """Batches of any size after one another, each padded, over stale rows of larger ones: the
    tokens of one sequence alone without a graph, and the poison outside of their slots stays."""
    tokens, computed = start(runner, lengths)
    runner.replayed_sizes.clear()
    for batch in batches:
        chosen = {i: computed[i] for i in batch if i < len(lengths)}
        if not chosen:
            continue
        sampled = decode(runner, chosen)
        assert runner.replayed_sizes[-1] == min(s for s in (1, 2, 4, 8, 12) if s >= len(chosen))
        for i in chosen:
            computed[i] += 1
            tokens[i].append(sampled[i])
    written = np.zeros((64, 4), bool)
    for i, number in enumerate(computed):
        for position in range(number):
            written[1 + 5 * i + position // 4, position % 4] = True
    for pair in runner.kv_caches:
        for cache in pair:
            is_number = ~cache.isnan().flatten(2).any(-1)
            assert np.array_equal(is_number.numpy(), written)
    for i, length in enumerate(lengths):
        assert tokens[i][length:] == alone(
            runner, tuple(tokens[i][:length]), len(tokens[i]) - length
        )


@functools.lru_cache(maxsize=1000)
def alone(runner: GraphRunner, prompt: tuple[int, ...], number: int) -> list[int]:
    """What the model says without graphs, cache or company: each time all tokens anew."""
    tokens = list(prompt)
    graphs, runner.graphs = runner.graphs, None
    for _ in range(number):
        for pair in runner.kv_caches:
            for cache in pair:
                cache.zero_()
        new = NewSequence(0, tuple(tokens), len(tokens), (), GREEDY, frozenset(), (), 0, 0, 1)
        item = ScheduledSequence(0, 0, len(tokens), 0, list(range(8)))
        output = runner.execute_model(
            SchedulerOutput((item,), (new,), (), len(tokens), is_restart=True)
        )
        tokens += output.sampled_token_ids[0]
    runner.graphs = graphs
    return tokens[len(prompt) :]


def test_block_tables_grow_wider_and_narrower(runner: GraphRunner) -> None:
    """A graph's block table has the width of the longest context; what an earlier, wider step left
    behind the shorter ones is not read."""
    tokens, computed = start(runner, [2, 11, 3])
    for chosen in ([0, 1, 2], [1, 2], [0, 2], [0], [1], [2, 1, 0], [0, 2]):
        for i, token in decode(runner, {i: computed[i] for i in chosen}).items():
            computed[i] += 1
            tokens[i].append(token)
    for i, length in enumerate((2, 11, 3)):
        assert tokens[i][length:] == alone(
            runner, tuple(tokens[i][:length]), len(tokens[i]) - length
        )


def test_steps_with_part_of_a_prompt_run_without_a_graph(runner: GraphRunner) -> None:
    """Also if all but one sequence decode; but a chunk of one token is like a decode."""
    runner.num_eager = 0
    start(runner, [5, 6])
    assert runner.num_eager == 1
    decode(runner, {0: 5, 1: 6})
    assert runner.num_eager == 1
    prompt = NewSequence(9, (5, 6, 7), 3, (50,), GREEDY, frozenset(), (), 0, 0, 1)
    mixed = (ScheduledSequence(0, 6, 1, 5, []), ScheduledSequence(9, 0, 2, 1, []))
    output = runner.execute_model(SchedulerOutput(mixed, (prompt,), (), 3))
    assert list(output.sampled_token_ids) == [0]
    assert runner.num_eager == 2
    chunk = (ScheduledSequence(9, 2, 1, 1, []),)
    [token] = runner.execute_model(SchedulerOutput(chunk, (), (), 1)).sampled_token_ids[9]
    assert runner.num_eager == 2
    assert [token] == alone(runner, (5, 6, 7), 1)


class PlannedBackend(AttentionBackend):
    """Its plan does not depend on contents; a layer that gets none fails."""

    supports_cuda_graphs = True

    def plan(self, metadata: StepMetadata, block_size: int, dtype: torch.dtype) -> StepMetadata:
        return replace(metadata, plan=(len(metadata.slot_mapping), block_size))

    def attend(
        self, query: Tensor, kv_cache: KVCache, metadata: StepMetadata, **options: Any
    ) -> Tensor:
        assert metadata.plan == (len(query), 4)
        return super().attend(query, kv_cache, metadata, **options)


def test_steps_that_become_graphs_are_planned_too(make_checkpoint: Callable[..., Path]) -> None:
    runner = make_runner(make_checkpoint("llama"), backend=PlannedBackend())
    start(runner, [3, 5, 2])
    decode(runner, {0: 3, 1: 5, 2: 2})
    assert runner.num_eager == 1
    assert runner.replayed_sizes == [4]


def test_enforce_eager_records_nothing(make_checkpoint: Callable[..., Path]) -> None:
    runner = make_runner(make_checkpoint("llama"), enforce_eager=True)
    assert runner.graphs is None
    start(runner, [3])
    decode(runner, {0: 3})
    assert runner.num_eager == 2
    assert runner.replayed_sizes == []


def test_a_cpu_has_no_graphs_of_its_own(make_checkpoint: Callable[..., Path]) -> None:
    """Only a GPU, whose attention can be captured, or who brings a graph_cls."""
    folder = make_checkpoint("llama")
    model_config = ModelConfig.from_folder(folder)
    config = EngineConfig(str(folder), device="cpu", num_gpu_blocks_override=4).resolve(
        model_config
    )
    assert ModelRunner(config, model_config).graphs is None


def test_a_block_table_too_large_to_be_staged(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes by a copy of its own; what the graph reads beside it stays at its place."""
    monkeypatch.setattr("nanoserve.staging.MAX_STAGED_TABLES", 0)
    runner = make_runner(
        make_checkpoint("llama"),
        block_size=1,
        max_model_len=1000,
        num_gpu_blocks_override=1000,
        max_num_seqs=4,
        max_num_batched_tokens=4,
    )
    prompt, blocks = tuple(range(3, 143)) * 3, tuple(range(900))
    said = []
    for seq_id in (0, 1):  # with graphs, then without
        new = NewSequence(seq_id, prompt, len(prompt), blocks, GREEDY, frozenset(), (), 0, 0, 1)
        tokens: list[int] = []
        for at in (*range(0, len(prompt), 4), *range(len(prompt), len(prompt) + 12)):
            item = ScheduledSequence(seq_id, at, 4 if at < len(prompt) else 1, 900, [])
            known = () if at else (new,)
            gone = () if at else (seq_id - 1,)
            step = SchedulerOutput((item,), known, gone, item.num_scheduled_tokens)
            tokens += runner.execute_model(step).sampled_token_ids.get(seq_id, ())
        said.append(tokens)
        if runner.graphs is not None:
            assert runner.staging._offset + len(prompt) * 4 > len(runner.staging._on_device)
            assert runner.replayed_sizes == [1] * 12
        runner.graphs = None
    assert said[0] == said[1]
    assert len(said[0]) == 13


# -- an engine over them --


def workload() -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests, greedy and sampled, of 1 to 20 tokens; some fork, some are penalised."""
    chance = np.random.default_rng(3)
    prompts = [chance.integers(5, 300, chance.integers(1, 25)).tolist() for _ in range(24)]
    params = []
    for i in range(24):
        fields: dict[str, Any] = {"max_tokens": int(chance.integers(1, 20)), "seed": i}
        fields["temperature"] = 0 if i % 2 else 0.9
        if i % 7 == 0:
            fields |= {"n": 3, "temperature": 1.0}
        if i % 5 == 1:
            fields |= {"repetition_penalty": 1.3}
        if i % 5 == 2:
            fields |= {"logprobs": 2, "top_k": 20}
        params.append(SamplingParams(**fields))
    return prompts, params


@pytest.mark.parametrize(
    "options",
    [
        {"num_gpu_blocks_override": 400, "max_num_seqs": 20},
        {"num_gpu_blocks_override": 30, "max_num_seqs": 9, "preemption_mode": "swap"},
        {"num_gpu_blocks_override": 30, "max_num_seqs": 9, "max_num_batched_tokens": 11},
        {"num_gpu_blocks_override": 30, "max_num_seqs": 9, "kv_cache_dtype": "int8"},
    ],
    ids=["ample", "swap", "chunks", "8 bits"],
)
def test_graphs_change_no_token(
    make_checkpoint: Callable[..., Path], options: dict[str, Any]
) -> None:
    """With overlapped steps the graph itself puts in the token that only the device knows."""
    folder = make_checkpoint("llama")
    prompts, params = workload()
    settings = {"block_size": 4, "max_model_len": 64, **options}
    results = []
    for is_graph, async_scheduling in ((False, False), (True, False), (True, True)):
        seams = {"executor_cls": GraphExecutor} if is_graph else {}
        with LLM(folder, async_scheduling=async_scheduling, **settings, **seams) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            results.append([[c.token_ids for c in output.outputs] for output in outputs])
            if is_graph:
                runner = llm.engine.executor.runner
                assert len(set(runner.replayed_sizes)) >= 4
                assert len(runner.replayed_sizes) >= 20
    assert results[0] == results[1] == results[2]


def test_the_start_up_line_tells_of_graphs(make_checkpoint: Callable[..., Path]) -> None:
    with LLM(
        make_checkpoint("llama"), num_gpu_blocks_override=8, executor_cls=GraphExecutor
    ) as llm:
        assert "CUDA graphs for 23 batch sizes" in llm.engine.executor.describe()
