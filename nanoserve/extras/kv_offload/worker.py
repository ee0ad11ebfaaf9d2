"""How do blocks move between the KV cache and the CPU tier?

The CPU tier is an array of rows in main memory, one for each block that it can hold. A row has all
that a block has, in all layers and on all ranks, so that a tier below can write it with one call:

    row       | rank 0: layer 0 keys | layer 0 values | layer 1 keys | ... | rank 1: layer 0 keys ..

A step copies whole blocks at its head and at its end, in this order:

    stores    KV blocks that the step overwrites     -> rows
    loads     rows                                   -> KV blocks that the step reads
    (the step computes)
    saves     KV blocks that the step has filled     -> rows

*On a GPU* the rows are pinned, and what goes to them goes on a stream of its own, beside the step's
computation: the blocks are gathered on the device first, so that the step may overwrite them.

*Several ranks.* Each rank copies its own part of a row. On one machine all ranks map the same
memory (an anonymous file of rank 0, so nothing is left behind when a process is killed). Beside the
rows is one number for each rank: the last step whose copies it has made. So rank 0 knows what is
whole without a message. Ranks on several machines have memory of their own, and no tiers below.

vLLM: vllm/v1/kv_offload/cpu/gpu_worker.py, shared_offload_region.py, host_register.py (V1).
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanoserve.extras.kv_offload.base import KVConnectorMetadata, KVConnectorWorker
from nanoserve.extras.kv_offload.config import OffloadingConfig
from nanoserve.kv_cache import check_num_blocks, index_on
from nanoserve.parallel import ParallelState
from nanoserve.sequence import BlockPair

if TYPE_CHECKING:
    from nanoserve.model_runner import ModelRunner

HEADER = mmap.PAGESIZE  # bytes before the rows: 8 for each rank
CHUNK = 64 * 2**20  # bytes that are gathered on a GPU at once


def connect(runner: ModelRunner) -> None:
    """Give the runner its side of the tiers. Raises ValueError as OffloadingWorker does."""
    runner.kv_connector = OffloadingWorker(runner)


class OffloadingWorker(KVConnectorWorker):
    """One rank's part of the rows, and the copies of its steps."""

    def __init__(self, runner: ModelRunner) -> None:
        """Raises ValueError if the option's bytes hold no row, or are more than any memory."""
        config = OffloadingConfig.from_config(runner.config)
        parallel = runner.parallel
        # Of each tensor of the KV cache: [num_kv_blocks, bytes of a block].
        self.parts = [as_bytes(cache) for caches in runner.kv_caches for cache in caches]
        sizes = [part.shape[1] for part in self.parts]
        ends = np.cumsum(sizes).tolist()
        self.spans = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        # A drafter has a KV cache on rank 0 only.
        num_bytes = -parallel.all_reduce_min(-ends[-1])
        row_bytes = num_bytes * parallel.tp_size
        self.num_blocks = config.cpu_bytes_to_use // row_bytes
        if not self.num_blocks:
            raise ValueError(
                f"kv_offloading_size (cpu_bytes_to_use) is {config.cpu_bytes_to_use} bytes, less "
                f"than one block of {row_bytes} bytes. Raise it."
            )
        option = "kv_offloading_size (cpu_bytes_to_use)"
        check_num_blocks(option, self.num_blocks, row_bytes, torch.device("cpu"))
        memory, is_shared = map_memory(HEADER + self.num_blocks * row_bytes, parallel)
        self._done = np.frombuffer(memory, np.int64, parallel.tp_size)
        rows = np.frombuffer(memory, np.uint8, offset=HEADER).reshape(self.num_blocks, row_bytes)
        self.rows, self.row_bytes = (rows if is_shared else None), row_bytes
        own = slice(parallel.tp_rank * num_bytes, parallel.tp_rank * num_bytes + ends[-1])
        self.own_rows = rows[:, own]
        self.own = torch.from_numpy(self.own_rows)
        self._own_done = torch.from_numpy(self._done[parallel.tp_rank : parallel.tp_rank + 1])
        if not is_shared:
            self._done = self._done[parallel.tp_rank : parallel.tp_rank + 1]
        self.device, self.stream = runner.device, None
        if self.device.type == "cuda":
            self.stream = torch.cuda.Stream(self.device)
            pin(memory)
            finalizer = weakref.finalize(self, unpin, memory)
            finalizer.atexit = False  # then CUDA ends by itself
        else:  # NumPy copies a block in a microsecond, PyTorch in twenty
            self.arrays = [part.numpy() for part in self.parts]
        self.metadata = KVConnectorMetadata(0)

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        self.metadata = metadata
        self._copy_out(metadata.stores)
        self._copy_in(metadata.loads)

    def wait_for_save(self) -> None:
        self._copy_out(self.metadata.saves)
        number = torch.full((1,), self.metadata.number, dtype=torch.int64, device=self.device)
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
        self._own_done.copy_(number, non_blocking=True)

    def num_done(self) -> int:
        return int(self._done.min())

    def _copy_out(self, pairs: tuple[BlockPair, ...]) -> None:
        """(KV block, row)"""
        if self.stream is None:
            for array, span in zip(self.arrays, self.spans, strict=True):
                for block, row in pairs:
                    self.own_rows[row, span] = array[block]
            return
        for i, some in enumerate(self._chunks(pairs)):
            if i:  # the memory of what was gathered before is free again, however much follows
                torch.cuda.current_stream().wait_stream(self.stream)
            blocks = index_on([block for block, _ in some], self.device)
            gathered = torch.cat([part.index_select(0, blocks) for part in self.parts], dim=1)
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for block, (_, row) in zip(gathered, some, strict=True):
                    self.own[row].copy_(block, non_blocking=True)
        if pairs:  # the last ones are copied beside what comes
            gathered.record_stream(self.stream)

    def _copy_in(self, pairs: tuple[BlockPair, ...]) -> None:
        """(row, KV block)"""
        if self.stream is None:
            for array, span in zip(self.arrays, self.spans, strict=True):
                for row, block in pairs:
                    array[block] = self.own_rows[row, span]
            return
        if pairs:
            torch.cuda.current_stream().wait_stream(self.stream)
        for some in self._chunks(pairs):
            blocks = index_on([block for _, block in some], self.device)
            shape = (len(some), self.own.shape[1])
            gathered = torch.empty(shape, dtype=torch.uint8, device=self.device)
            for i, (row, _) in enumerate(some):
                gathered[i].copy_(self.own[row], non_blocking=True)
            for part, span in zip(self.parts, self.spans, strict=True):
                part.index_copy_(0, blocks, gathered[:, span])

    def _chunks(self, pairs: tuple[BlockPair, ...]) -> list[tuple[BlockPair, ...]]:
        size = max(1, CHUNK // self.own.shape[1])
        return [pairs[i : i + size] for i in range(0, len(pairs), size)]


def as_bytes(cache: Tensor) -> Tensor:
    """A tensor of the KV cache (KVCacheSpec.allocate) as [num_blocks, bytes of a block]: a view."""
    blocks = cache.transpose(1, 2)  # [num_blocks, num_kv_heads, block_size, dim], as in memory
    num_bytes = math.prod(blocks.shape[1:]) * cache.element_size()
    return blocks.view(torch.uint8).view(len(cache), num_bytes)


def map_memory(num_bytes: int, parallel: ParallelState) -> tuple[mmap.mmap, bool]:
    """Zeroed memory that takes up room when it is written, and whether all ranks see the same."""
    if parallel.tp_size == 1:
        return mmap.mmap(-1, num_bytes), True
    if parallel.num_local_ranks < parallel.tp_size or not hasattr(os, "memfd_create"):
        return mmap.mmap(-1, num_bytes), False
    if parallel.tp_rank == 0:
        file = os.memfd_create("nanoserve-kv-offload")
        os.ftruncate(file, num_bytes)
        parallel.broadcast_object(f"/proc/{os.getpid()}/fd/{file}")
    else:
        file = os.open(parallel.receive_object(), os.O_RDWR)
    try:
        memory = mmap.mmap(file, num_bytes)
        parallel.all_reduce_min(0)  # rank 0 keeps the file open until all have it
        return memory, True
    finally:
        os.close(file)


def pin(memory: mmap.mmap) -> None:
    """Let a GPU copy from and to this memory directly. Raises ValueError if the system forbids
    it."""
    array = np.frombuffer(memory, np.uint8)
    error = torch.cuda.cudart().cudaHostRegister(array.ctypes.data, array.nbytes, 0)
    if int(error) != 0:
        raise ValueError(
            f"kv_offloading_size: {array.nbytes} bytes of main memory cannot be pinned (CUDA error "
            f"{int(error)}). Lower it."
        )


def unpin(memory: mmap.mmap) -> None:
    """Before the memory is given back: another engine may get the same addresses."""
    torch.cuda.cudart().cudaHostUnregister(np.frombuffer(memory, np.uint8).ctypes.data)
