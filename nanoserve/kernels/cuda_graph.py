"""How does a decode step run without launching its kernels one by one?

A decode step of a small model is some hundreds of kernels of a few microseconds each. Launching a
kernel from Python takes longer than running it: the GPU waits for the CPU. A CUDA graph holds the
launches of one forward pass, recorded once and replayed by a single call. Every replay has the same
launches, with the same grid sizes and the same addresses. So

* a graph is recorded for each of some batch sizes, and a batch is padded to the next one. A padding
  sequence has no query (query_start_loc does not grow) and slot -1: the kernels read and store
  nothing for it.
* inputs and output lie at fixed addresses. staging.py sends the inputs to the same place in each
  step; the block table, whose width varies, is copied into a tensor of fixed size.
* no launch may depend on the contents of the batch: kernels/attention_triton.py chooses its
  launches by shapes alone.

    sequences   1   2   3   4   5 ... 8   9 ... 16
    graph       1   2   4   4   8     8   16    16        and so on in steps of 8, then of 16

With speculative decoding, a sequence of a decode step brings up to 1 + k tokens. Then there is a
second graph for each batch size, for 1 + k tokens of each sequence. It runs a step in which they
bring fewer, too: padding tokens stand behind the last sequence.

Steps that hold part of a prompt run without a graph ("eagerly"): their kernels are long, and their
shapes differ from step to step. All graphs of an engine share one memory pool, because no two of
them run at the same time, and are recorded on one stream. The largest graph is recorded first. Each
ends with a copy of its hidden states into the first rows of one tensor, so they are kept once and
not once for each graph.

Graphs are recorded after the KV cache has taken its share of the memory, so MEMORY_RESERVE is kept
for them.

vLLM: vllm/worker/model_runner.py CUDAGraphRunner (V0); vllm/compilation/cuda_graph.py
CUDAGraphWrapper, vllm/v1/cudagraph_dispatcher.py (V1).
"""

from __future__ import annotations

import gc
import logging
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanoserve.sequence import SchedulerOutput

if TYPE_CHECKING:
    from nanoserve.input_batch import StepArrays
    from nanoserve.model_runner import ModelRunner

logger = logging.getLogger("nanoserve")

Forward = Callable[[], Tensor]
# Bytes of a GPU for all graphs of an engine: an estimate; capture() measures.
MEMORY_RESERVE = 512 * 2**20


class GraphShape(NamedTuple):
    """What a graph was recorded for."""

    num_seqs: int
    query_len: int = 1  # tokens of each sequence


class DecodeGraphs:
    """Graphs of decode steps for the batch sizes `sizes`, with `query_lens` tokens a sequence.

    Invariant: the first rows of `hidden` hold the hidden states of the last replay.
    """

    hidden: Tensor  # [tokens of the largest shape, hidden]
    block_table: Tensor  # [max_num_seqs, max_blocks], on the device

    def __init__(self, max_num_seqs: int, query_lens: tuple[int, ...], max_tokens: int) -> None:
        """query_lens: in ascending order. max_tokens: of a step, padding included; no graph is
        larger."""
        self.sizes, self.query_lens = choose_sizes(max_num_seqs), query_lens
        self.max_tokens = max_tokens
        self.graphs: dict[GraphShape, torch.cuda.CUDAGraph] = {}

    @torch.inference_mode()
    def capture(self, make_forward: Callable[[GraphShape], Forward], use_tqdm: bool) -> None:
        """Record a graph of make_forward(shape) for every shape, the largest first. Logs a warning
        if all of them take more memory than is kept for them."""
        shapes = [GraphShape(size, length) for length in self.query_lens for size in self.sizes]
        shapes = [shape for shape in shapes if math.prod(shape) <= self.max_tokens]
        shapes.sort(key=math.prod, reverse=True)
        free = torch.cuda.mem_get_info()[0]
        # Without a stream of the engine's own, torch would take the one that the first engine of
        # the process has recorded on, perhaps on another GPU.
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        # A dead engine of this process might be found in the middle of a capture, and freeing its
        # memory is not allowed there.
        gc.collect()
        for shape in tqdm(shapes, "Capturing CUDA graphs", disable=not use_tqdm, delay=1):
            forward = make_forward(shape)
            output = forward()  # not recorded: compiles kernels and initializes libraries
            if not self.graphs:  # outside the graphs' pool
                self.hidden = torch.empty_like(output)
            torch.cuda.synchronize()
            graph = self.graphs[shape] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                self.hidden[: len(output)].copy_(forward())
        if (num_bytes := free - torch.cuda.mem_get_info()[0]) > MEMORY_RESERVE:
            logger.warning(
                "CUDA graphs take %d MiB, more than is kept for them. If memory runs out later: "
                "lower max_num_seqs or gpu_memory_utilization, or set enforce_eager=True.",
                num_bytes // 2**20,
            )

    def keep_block_table(self, block_table: Tensor, shape: GraphShape) -> Tensor:
        """The block table, at a fixed address: its width varies."""
        num_seqs, max_blocks = block_table.shape
        self.block_table[:num_seqs, :max_blocks] = block_table
        return self.block_table[: shape.num_seqs]

    def choose_shape(self, query_start_loc: np.ndarray) -> GraphShape | None:
        """The smallest shape that holds a step's sequences and the tokens of each; None if none
        does: the step holds part of a prompt."""
        num_seqs, num_tokens = len(query_start_loc) - 1, int(query_start_loc[-1])
        longest = 1 if num_tokens == num_seqs else int(np.diff(query_start_loc).max())
        size, length = bisect_left(self.sizes, num_seqs), bisect_left(self.query_lens, longest)
        if size == len(self.sizes) or length == len(self.query_lens):
            return None
        shape = GraphShape(self.sizes[size], self.query_lens[length])
        return shape if math.prod(shape) <= self.max_tokens else None

    def replay(self, shape: GraphShape) -> Tensor:
        """Run the graph of this shape on the present inputs; return the hidden states."""
        self.graphs[shape].replay()
        return self.hidden[: math.prod(shape)]


def has_graphs(runner: ModelRunner) -> bool:
    """Not on a CPU, with enforce_eager, and where no graph is possible."""
    is_possible = runner.backend.supports_cuda_graphs and runner.model.supports_cuda_graphs
    return is_possible and runner.device.type == "cuda" and not runner.config.enforce_eager


def capture_graphs(runner: ModelRunner) -> DecodeGraphs | None:
    """The graphs of a runner, or None."""
    if not has_graphs(runner):
        return None
    most = runner.config.max_num_batched_tokens
    runner.graphs = DecodeGraphs(runner.config.max_num_seqs, runner.query_lens, most)
    runner.graphs.block_table = torch.from_numpy(runner.req_states.block_tables).to(runner.device)
    runner.graphs.capture(partial(make_decode_forward, runner), runner.parallel.tp_rank == 0)
    return runner.graphs


def make_decode_forward(runner: ModelRunner, shape: GraphShape) -> Forward:
    """The forward pass of a decode step of this shape, to be captured: a step without sequences,
    all of whose rows are padding."""
    assert runner.staging is not None, "graphs are for a GPU"
    runner.staging.begin_step()
    inputs = runner.prepare_inputs(SchedulerOutput(), np.empty(0, np.int64), shape)
    return partial(runner.forward, inputs)


def choose_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: 1, 2, 4, 8, then steps of 8 to 64, steps of 16, and max_num_seqs."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


def pad_step(arrays: StepArrays, shape: GraphShape) -> StepArrays:
    """A decode step of this shape. The added sequences have no query, the added tokens no slot."""
    num_seqs = shape.num_seqs - len(arrays.seq_lens)
    num_tokens = math.prod(shape) - len(arrays.input_ids)
    return replace(
        arrays,
        input_ids=pad(arrays.input_ids, num_tokens),
        positions=pad(arrays.positions, num_tokens),
        token_rows=pad(arrays.token_rows, num_tokens),
        slot_mapping=pad(arrays.slot_mapping, num_tokens, -1),
        query_start_loc=pad(arrays.query_start_loc, num_seqs, int(arrays.query_start_loc[-1])),
        seq_lens=pad(arrays.seq_lens, num_seqs),
    )


def pad(array: np.ndarray, number: int, value: int = 0) -> np.ndarray:
    """`array` with `value` appended `number` times."""
    return np.append(array, np.full(number, value, array.dtype)) if number else array
