"""How do a step's numbers get to the GPU?

Everything a step needs (token ids, positions, slots, the block table, ...) is small, and decided on
the CPU. Sent one by one, a dozen arrays cost a dozen copies of some ten microseconds each, and an
ordinary (pageable) array also makes the CPU wait for the GPU. So the arrays are laid end to end in
*pinned* memory, which the GPU reads by itself, and go over in one copy:

    arrays       input_ids [3] int64   seq_lens [2] int32   temperature [2] float32
    bytes        0 ............... 24  32 ........... 40    48 .............. 56     (each at 16s)

What is sent first in a step always lies at the same address: a CUDA graph can read it there.
(On the device there is one buffer: the copies and the kernels that read it take their turns in the
order of one stream.)

The copy happens some time later, so its source must not be overwritten meanwhile: there are two
pinned buffers, used in turns, and an event tells when the copies from one are done. (Reusing a
buffer too early is the bug that made another engine's overlapped steps crash for months.)

On a CPU there is nothing to copy to, and the same code runs on one ordinary buffer.

vLLM: vllm/worker/model_runner.py, async_tensor_h2d in vllm/utils.py (V0);
vllm/v1/utils.py CpuGpuBuffer (V1).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: kernels may load that many at once


class StagingBuffer:
    """Arrays in, tensors on the device out, in one copy each time.

    Invariant: tensors stay valid until the next `begin_step` is followed by a `send`; on a GPU in
    the order of its stream: kernels launched before that `send` read the old numbers.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """`num_bytes`: room for what a step sends. An array that does not fit any more goes by a
        copy of its own, to wherever there is room; those beside it stay where they would be."""
        self.device = device
        self.is_gpu = device.type == "cuda"
        self._on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._hosts = [self._on_device]
        if self.is_gpu:
            self._hosts = [
                torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
            ]
            self._copied = [torch.cuda.Event() for _ in self._hosts]
        self._views = [host.numpy() for host in self._hosts]
        self._turn = 0
        self._offset = 0

    def begin_step(self) -> None:
        """From here on arrays are laid down from the buffer's beginning again."""
        self._turn = (self._turn + 1) % len(self._hosts)
        self._offset = 0
        if self.is_gpu:
            self._copied[self._turn].synchronize()  # of two steps ago: done long since

    def send(self, *arrays: np.ndarray) -> list[Tensor]:
        """The same numbers as tensors on the device, of the same dtypes and shapes."""
        start = self._offset
        copies = [self._lay_down(array) for array in arrays]
        if self.is_gpu and self._offset > start:
            part = slice(start, self._offset)
            self._on_device[part].copy_(self._hosts[self._turn][part], non_blocking=True)
            self._copied[self._turn].record()
        return [
            torch.from_numpy(np.array(array, order="C")).to(self.device)
            if copy is None
            else self._find(*copy)
            for array, copy in zip(arrays, copies, strict=True)
        ]

    def _lay_down(self, array: np.ndarray) -> tuple[int, np.ndarray] | None:
        """Write `array` behind what is there; return where, and the copy. None: no room."""
        place, end = self._offset, self._offset + -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        if end > len(self._views[self._turn]):
            return None
        copy = np.ndarray(array.shape, array.dtype, self._views[self._turn], place)
        copy[...] = array
        self._offset = end
        return place, copy

    def _find(self, place: int, copy: np.ndarray) -> Tensor:
        """The same place on the device as a tensor."""
        tensor = torch.from_numpy(copy)
        if not self.is_gpu:
            return tensor
        part = self._on_device[place : place + tensor.nbytes]
        return part.view(tensor.dtype).view(tensor.shape)


def copy_to_host(tensor: Tensor) -> Tensor:
    """Start a copy to the CPU without waiting for it: see `record_event`. A CPU tensor as it is."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Its synchronize() waits for all that `device` was told so far; None for a CPU."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record()
    return event
