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
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from nanoserve.logger import init_logger, output_stream

if TYPE_CHECKING:
    from nanoserve.model_runner import StepArrays

logger = init_logger(__name__)

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


class DecodeGraphs:
    """Graphs of decode steps for the batch sizes `sizes`.

    Invariant: `outputs[size]`, in the first `size` rows of `hidden`, holds the hidden states of the
    last replay if that was for `size`.
    """

    def __init__(self, max_num_seqs: int, graph_cls: Callable[[Any], Graph]) -> None:
        self.sizes = choose_sizes(max_num_seqs)
        self.graph_cls = graph_cls
        self.graphs: dict[int, Graph] = {}
        self.outputs: dict[int, Tensor] = {}
        self.hidden: Tensor | None = None  # [the largest size, hidden]
        self.num_bytes = 0  # of GPU memory, for all graphs

    def capture(self, make_forward: Callable[[int], Forward], use_tqdm: bool = True) -> None:
        """Record a graph of make_forward(size) for every size, the largest first. Logs a warning if
        all of them take more memory than is kept for them."""
        free = _free_gpu_memory()
        shared = None
        bar = tqdm(
            self.sizes[::-1],
            "Capturing CUDA graphs",
            file=output_stream(),
            disable=not use_tqdm,
            delay=1,
        )
        with no_garbage_collection():
            for size in bar:
                bar.set_postfix_str(f"batch size {size}", refresh=False)
                graph = self.graph_cls(shared)
                self.outputs[size] = graph.capture(self._keep_output(make_forward(size)))
                self.graphs[size] = graph
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

    def choose_size(self, num_seqs: int) -> int | None:
        """The smallest size that holds `num_seqs` sequences; None if no size does."""
        index = bisect_left(self.sizes, num_seqs)
        return self.sizes[index] if index < len(self.sizes) else None

    def replay(self, size: int) -> Tensor:
        """Run the graph of this size on the present inputs; return the hidden states."""
        self.graphs[size].replay()
        return self.outputs[size]


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


def pad_step(arrays: StepArrays[np.ndarray], num_seqs: int) -> StepArrays[np.ndarray]:
    """A decode step of `num_seqs` sequences. The added ones have no query, and no slot to store."""
    number = num_seqs - len(arrays.seq_lens)
    return replace(
        arrays,
        input_ids=pad(arrays.input_ids, number),
        positions=pad(arrays.positions, number),
        token_rows=pad(arrays.token_rows, number),
        slot_mapping=pad(arrays.slot_mapping, number, -1),
        query_start_loc=pad(arrays.query_start_loc, number, int(arrays.query_start_loc[-1])),
        seq_lens=pad(arrays.seq_lens, number),
    )


def pad(array: np.ndarray, number: int, value: int = 0) -> np.ndarray:
    """`array` with `value` appended `number` times."""
    return np.append(array, np.full(number, value, array.dtype)) if number else array
