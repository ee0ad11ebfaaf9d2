"""How do a step's numbers get to the GPU?

Everything a step needs (token ids, positions, slots, the block table, ...) is small, and decided on
the CPU. Sent one by one, a dozen arrays cost a dozen copies of some ten microseconds each, and an
ordinary (pageable) array also makes the CPU wait for the GPU. So the arrays are laid end to end in
*pinned* memory, which the GPU reads by itself, and one copy takes all of them to the GPU:

    arrays       input_ids [3] int64   seq_lens [2] int32   temperature [2] float32
    bytes        0 ............... 24  32 ........... 40    48 .............. 56     (each at 16s)

The arrays that a step sends first lie at the same addresses in every step: a CUDA graph can read
them there. On the device there is one buffer: copies into it and kernels that read it run one after
another, in the order of one stream.

On a GPU the copy happens some time later, and its source must not be overwritten before. So there
are two pinned buffers, which steps use in turns, and an event that tells when the copies from a
buffer are done.

(On a CPU there is nothing to send: ModelRunner.send.)

vLLM: vllm/worker/model_runner.py, async_tensor_h2d in vllm/utils.py (V0);
vllm/v1/utils.py CpuGpuBuffer (V1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nanoserve.config import EngineConfig

ALIGNMENT = 16  # bytes: kernels may load that many at once
MAX_STAGED_TABLES = 2**24  # bytes of pinned memory for block tables; larger ones go unpinned


class StagingBuffer:
    """Takes NumPy arrays, returns tensors on the device; one copy for each `send`.

    Invariant: tensors stay valid until the next `begin_step` is followed by a `send`; on a GPU in
    the order of its stream: kernels launched before that `send` read the old numbers.
    """

    def __init__(self, config: EngineConfig, num_rows: int, device: torch.device) -> None:
        """Room for the arrays of the largest step, of at most `num_rows` rows of logits. An array
        for which no room is left gets a copy of its own, at another address; the addresses of the
        other arrays do not change."""
        self.device, num_bytes = device, staging_bytes(config, num_rows)
        self._on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [torch.cuda.Event() for _ in self._hosts]
        self._offset = 0

    def begin_step(self) -> None:
        """Write the next arrays to the beginning of the other buffer."""
        self._hosts.reverse()
        self._copied.reverse()
        self._copied[0].synchronize()  # the copies of two steps ago
        self._offset = 0

    def send(self, **arrays: np.ndarray) -> dict[str, Tensor]:
        """The same numbers as tensors on the device: names, dtypes and shapes stay. The order of
        the arguments is the order of the addresses."""
        host, start, tensors = self._hosts[0], self._offset, {}
        for name, array in arrays.items():
            end = self._offset + array.nbytes
            if end > len(host):  # the allocator keeps the source until it is read
                source = torch.from_numpy(np.array(array, order="C")).pin_memory()
                tensors[name] = source.to(self.device, non_blocking=True)
                continue
            copy = np.ndarray(array.shape, array.dtype, host.numpy(), self._offset)
            copy[...] = array
            part = self._on_device[self._offset : end]
            tensors[name] = part.view(torch.from_numpy(copy).dtype).view(array.shape)
            self._offset = -(-end // ALIGNMENT) * ALIGNMENT
        if self._offset > start:
            sent = slice(start, self._offset)
            self._on_device[sent].copy_(host[sent], non_blocking=True)
            self._copied[0].record()
        return tensors


def staging_bytes(config: EngineConfig, num_rows: int) -> int:
    """Room for the arrays of the largest step: for each token six numbers of 8 bytes, for each
    sequence its block table, for each row of logits some sampling parameters."""
    tables = config.max_num_seqs * -(-config.max_model_len // config.block_size) * 4
    tokens = max(config.max_num_batched_tokens, num_rows) * (6 * 8 + 8)
    return tokens + num_rows * 256 + min(tables, MAX_STAGED_TABLES) + 1024


def copy_to_host(value: Any) -> tuple[Any, torch.cuda.Event]:
    """`value` (tensors in tuples, lists and dicts) with its tensors in main memory, and an event
    that passes when the copies, which are only started here, are done."""

    def copy(tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    copied, event = tree_map_only(Tensor, copy, value), torch.cuda.Event()
    event.record()
    return copied, event
