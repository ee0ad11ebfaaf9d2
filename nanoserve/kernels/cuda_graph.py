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

import functools
import gc
import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
MEMORY_RESERVE = (
    512 * 2**20
)  # bytes of a GPU for all graphs of an engine: an estimate; capture() measures


class Graph(Protocol):
    """One captured forward pass. The tests have a fake graph that runs on a CPU."""

    shared: Any  # what it shares with the other graphs of its engine

    def capture(self, forward: Forward) -> Tensor:
        """Record the kernels of `forward`; return the tensor that each replay fills."""

    def replay(self) -> None:
        """Run the recorded kernels again, on the present contents of the input tensors."""


class SharedCapture(NamedTuple):
    """What the graphs of one engine share."""

    pool: Any  # of memory
    stream: torch.cuda.Stream


class CudaGraph:
    """A Graph made by torch.cuda."""

    def __init__(self, shared: SharedCapture | None = None) -> None:
        """`shared` of another graph of this engine; None makes a pool and a stream.

        Without a stream of the engine's own, torch would take the one that the first engine of the
        process has recorded on, perhaps on another GPU.
        """
        self._graph = torch.cuda.CUDAGraph()
        self.shared = shared or SharedCapture(torch.cuda.graph_pool_handle(), torch.cuda.Stream())

    def capture(self, forward: Forward) -> Tensor:
        """See Graph. A first run, not recorded, compiles kernels and initializes libraries."""
        forward()
        torch.cuda.synchronize()
        pool, stream = self.shared
        with torch.cuda.graph(self._graph, pool=pool, stream=stream):
            output = forward()
        return output

    def replay(self) -> None:
        self._graph.replay()


class GraphShape(NamedTuple):
    """What a graph was recorded for."""

    num_seqs: int
    query_len: int = 1  # tokens of each sequence


class DecodeGraphs:
    """Graphs of decode steps for the batch sizes `sizes`, with `query_lens` tokens a sequence.

    Invariant: `outputs[shape]`, in the first rows of `hidden`, holds the hidden states of the last
    replay if that was of `shape`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        graph_cls: Callable[[Any], Graph],
        query_lens: tuple[int, ...] = (1,),
        max_tokens: int | None = None,
    ) -> None:
        """max_tokens: of a step, padding included; no graph is larger. None: no limit."""
        self.max_tokens = max_tokens or max_num_seqs * query_lens[-1]
        self.sizes = choose_sizes(max_num_seqs)
        self.query_lens = query_lens  # in ascending order
        self.graph_cls = graph_cls
        self.graphs: dict[GraphShape, Graph] = {}
        self.outputs: dict[GraphShape, Tensor] = {}
        self.hidden: Tensor | None = None  # [tokens of the largest shape, hidden]
        self.block_table = torch.empty(0)  # [max_num_seqs, max_blocks], on the device
        self.num_bytes = 0  # of GPU memory, for all graphs

    def capture(self, make_forward: Callable[[GraphShape], Forward], use_tqdm: bool = True) -> None:
        """Record a graph of make_forward(shape) for every shape, the largest first. Logs a warning
        if all of them take more memory than is kept for them."""
        free = _free_gpu_memory()
        shared = None
        shapes = [GraphShape(size, length) for length in self.query_lens for size in self.sizes]
        shapes = [shape for shape in shapes if math.prod(shape) <= self.max_tokens]
        shapes.sort(key=math.prod)
        bar = tqdm(
            shapes[::-1],
            "Capturing CUDA graphs",
            disable=not use_tqdm,
            delay=1,
        )
        with no_garbage_collection():
            for shape in bar:
                bar.set_postfix_str(f"batch size {shape.num_seqs}", refresh=False)
                graph = self.graph_cls(shared)
                self.outputs[shape] = graph.capture(self._keep_output(make_forward(shape)))
                self.graphs[shape] = graph
                shared = graph.shared
        self.num_bytes = max(0, free - _free_gpu_memory())
        if self.num_bytes > MEMORY_RESERVE:
            logger.warning(
                "CUDA graphs take %d MiB, more than the %d MiB that are kept for them. If memory "
                "runs out later: lower max_num_seqs or gpu_memory_utilization, or set "
                "enforce_eager=True.",
                self.num_bytes // 2**20,
                MEMORY_RESERVE // 2**20,
            )

    def _keep_output(self, forward: Forward) -> Forward:
        """`forward`, and a copy of what it returns into the first rows of `hidden`. The first run,
        of the largest size, is not recorded: it allocates `hidden` outside the graphs' pool."""

        @functools.wraps(forward)
        def run() -> Tensor:
            output = forward()
            if self.hidden is None:
                self.hidden = torch.empty_like(output)
            return self.hidden[: len(output)].copy_(output)

        return run

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
        return self.outputs[shape]


def capture_graphs(
    runner: ModelRunner, graph_cls: Callable[[Any], Graph] | None = None
) -> DecodeGraphs | None:
    """The graphs of a runner; None on a CPU, with enforce_eager, and where no graph is possible.
    graph_cls replaces CudaGraph (the tests have one that runs on a CPU)."""
    config, is_cuda = runner.config, runner.device.type == "cuda"
    if graph_cls is None and is_cuda and runner.backend.supports_cuda_graphs:
        graph_cls = CudaGraph
    if graph_cls is None or config.enforce_eager or not runner.model.supports_cuda_graphs:
        return None
    most = config.max_num_batched_tokens
    runner.graphs = DecodeGraphs(config.max_num_seqs, graph_cls, runner.query_lens, most)
    table = torch.from_numpy(runner.req_states.block_tables).to(runner.device, copy=True)
    runner.graphs.block_table = table
    forward = functools.partial(make_decode_forward, runner)
    runner.graphs.capture(forward, use_tqdm=runner.parallel.tp_rank == 0)
    return runner.graphs


@torch.inference_mode()
def make_decode_forward(runner: ModelRunner, shape: GraphShape) -> Forward:
    """The forward pass of a decode step of this shape, to be captured: a step without sequences,
    all of whose rows are padding."""
    if runner.staging is not None:
        runner.staging.begin_step()
    inputs = runner.prepare_inputs(SchedulerOutput(), np.empty(0, np.int64), shape)
    return torch.inference_mode()(functools.partial(runner.forward, inputs))


def choose_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: 1, 2, 4, 8, then steps of 8 to 64, steps of 16, and max_num_seqs."""
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and none inside: a dead engine of this process might be found in the
    middle of a capture, and freeing its memory is not allowed there."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _free_gpu_memory() -> int:
    """In bytes; 0 without a GPU."""
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def pad_step(arrays: StepArrays, shape: GraphShape) -> StepArrays:
    """A decode step of this shape. The added sequences have no query, the added tokens no slot."""
    num_seqs = shape.num_seqs - len(arrays.seq_lens)
    num_tokens = shape.num_seqs * shape.query_len - len(arrays.input_ids)
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
