"""Which graphs are there, and which one runs a step? (test_simulated_cuda.py: its tokens.)"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")
from simulated_cuda import simulated_cuda

from nanoserve import LLM
from nanoserve.kernels.cuda_graph import DecodeGraphs, GraphShape


@given(max_num_seqs=st.integers(1, 1100), data=st.data())
def test_every_batch_has_a_size(max_num_seqs: int, data: st.DataObject) -> None:
    """The smallest that holds it; and no more than 15 rows, or twice the batch, are padding."""
    graphs = DecodeGraphs(max_num_seqs, (1,), max_num_seqs)
    num_seqs = data.draw(st.integers(1, max_num_seqs))
    shape = graphs.choose_shape(np.arange(num_seqs + 1))
    assert shape is not None
    assert num_seqs <= shape.num_seqs <= min(max_num_seqs, 2 * num_seqs, num_seqs + 15)
    assert graphs.choose_shape(np.arange(max_num_seqs + 2)) is None


def test_drafts_have_graphs_of_their_own() -> None:
    """For up to 1 + k tokens of each sequence; a longer query runs in none, and no graph is larger
    than a step may be."""
    graphs = DecodeGraphs(4, (1, 4), max_tokens=12)
    cases = [([1, 1, 1], (4, 1)), ([4], (1, 4)), ([1, 2], (2, 4)), ([1, 5], None), ([2] * 4, None)]
    for query_lens, shape in [*cases, ([1] * 5, None)]:
        assert graphs.choose_shape(np.append(0, np.cumsum(query_lens))) == shape


def test_the_largest_is_captured_first() -> None:
    """Those of an engine have a pool and a stream of their own. Each replay gives its own size's
    numbers."""
    made: list[GraphShape] = []

    def make_forward(shape: GraphShape) -> Callable[[], Tensor]:
        made.append(shape)
        return lambda: torch.full((shape.num_seqs, 3), shape.num_seqs, device="cuda:0")

    with simulated_cuda() as device:
        for _ in range(2):
            graphs = DecodeGraphs(20, (1,), 20)
            graphs.capture(make_forward, use_tqdm=False)
        assert [shape.num_seqs for shape in made] == [20, 16, 8, 4, 2, 1] * 2
        for key in ("pool", "stream"):
            owners = [graph.options[key] for graph in device.graphs]
            assert owners == [owners[0]] * 6 + [owners[6]] * 6
            assert owners[0] is not owners[6]
        for size in (4, 20, 1, 8, 4):
            assert graphs.replay(GraphShape(size)).tolist() == [[size] * 3] * size


def test_enforce_eager_and_a_cpu_record_nothing() -> None:
    """And on a CPU no steps overlap."""
    sizes = {"num_gpu_blocks_override": 64, "max_model_len": 64, "max_num_seqs": 2}
    with simulated_cuda() as device:
        for options in ({"device": "cpu"}, {"device": "cuda:0", "enforce_eager": True}):
            with LLM(attention_backend=device.backend, dtype="float32", **sizes, **options) as llm:
                assert llm.engine.config.async_scheduling is ("enforce_eager" in options)
    assert device.graphs == []
