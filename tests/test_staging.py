"""The arrays of a step: one copy, aligned, at the same addresses, never overwritten too early.

On a GPU the copies happen later, in the order of a stream. A stand-in for it (`LateDevice`) holds
them back until an event is waited for, as late as a GPU might, so that a source that is overwritten
too early shows without one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.staging import ALIGNMENT, StagingBuffer, copy_to_host, record_event

CPU = torch.device("cpu")
DTYPES = ["int64", "int32", "int16", "int8", "uint8", "bool", "float16", "float32", "float64"]


def numbers(shape: Any, dtype: str, seed: int = 0) -> np.ndarray:
    return (
        np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 99, shape).astype(dtype)
    )


def assert_same(tensor: torch.Tensor, array: np.ndarray) -> None:
    """Numbers, dtype and shape."""
    assert tensor.dtype == torch.from_numpy(np.zeros(0, array.dtype)).dtype
    assert tuple(tensor.shape) == array.shape
    assert tensor.tolist() == array.tolist()


def send(staging: StagingBuffer, *arrays: np.ndarray) -> list[torch.Tensor]:
    """Under names that do not matter here."""
    sent = staging.send(**{f"array_{i}": array for i, array in enumerate(arrays)})
    assert list(sent) == [f"array_{i}" for i in range(len(arrays))]
    return list(sent.values())


ARRAYS = st.lists(
    st.tuples(
        st.sampled_from(DTYPES),
        st.sampled_from([(), (0,), (1,), (3,), (17,), (2, 3), (0, 4), (5, 0), (2, 2, 3)]),
        st.sampled_from(["plain", "transposed", "reversed", "strided"]),
    ),
    max_size=8,
)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(ARRAYS, min_size=1, max_size=3), num_bytes=st.sampled_from([0, 40, 256, 4096])
)
def test_every_array_arrives(steps: list[Any], num_bytes: int) -> None:
    """Every dtype, shape and layout, with room or without, in one send or in several. All tensors
    of a step hold until the next step."""
    staging = StagingBuffer(num_bytes, CPU)
    for number, arrays in enumerate(steps):
        staging.begin_step()
        sent: list[tuple[torch.Tensor, np.ndarray]] = []
        made = [make(*array, number) for array in arrays]
        half = len(made) // 2
        for part in (made[:half], made[half:]):
            sent += zip(send(staging, *part), part, strict=True)
        for tensor, array in sent:
            assert_same(tensor, array)
            if array.nbytes:  # or there is nothing to be aligned
                assert tensor.data_ptr() % min(ALIGNMENT, array.itemsize) == 0


def make(dtype: str, shape: tuple[int, ...], layout: str, seed: int) -> np.ndarray:
    array = numbers(shape, dtype, seed)
    if layout == "transposed":
        return array.T
    if layout == "reversed" and shape:
        return array[::-1]
    if layout == "strided" and shape:
        return np.repeat(array, 2, axis=0)[::2]
    return array


def test_the_layout_of_the_module() -> None:
    """Bytes 0, 32 and 48: each array begins at a multiple of 16."""
    staging = StagingBuffer(4096, CPU)
    staging.begin_step()
    arrays = (numbers(3, "int64"), numbers(2, "int32"), numbers(2, "float32"))
    tensors = send(staging, *arrays)
    start = staging._on_device.data_ptr()
    assert [tensor.data_ptr() - start for tensor in tensors] == [0, 32, 48]
    [behind] = send(staging, numbers(1, "int8"))
    assert behind.data_ptr() - start == 64


def test_the_first_arrays_of_a_step_have_fixed_addresses() -> None:
    """Step after step, whatever follows, with room or without."""
    staging = StagingBuffer(1024, CPU)
    addresses = set()
    for step in range(6):
        staging.begin_step()
        tensors = send(
            staging, numbers(7, "int64"), numbers(7, "int32"), numbers((step * 40, 3), "int32")
        )
        assert_same(tensors[2], numbers((step * 40, 3), "int32"))
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors[:2]))
        send(staging, numbers(step, "float32"))
    assert len(addresses) == 1


def test_an_array_without_room_is_copied() -> None:
    """The sender may change its array afterwards, with room or without."""
    staging = StagingBuffer(16, CPU)
    staging.begin_step()
    small, large = np.array([1]), np.arange(9)
    tensors = send(staging, large, small)
    small[:], large[:] = 7, 7
    assert [tensor.tolist() for tensor in tensors] == [list(range(9)), [1]]


def test_tensors_hold_until_the_next_step_sends() -> None:
    """begin_step alone overwrites nothing."""
    staging = StagingBuffer(256, CPU)
    staging.begin_step()
    [old] = send(staging, np.array([1, 2, 3]))
    staging.begin_step()
    assert old.tolist() == [1, 2, 3]
    send(staging, np.array([4, 5]))
    assert old.tolist() == [4, 5, 3]


def test_nothing_to_copy_and_to_wait_for_on_a_cpu() -> None:
    tensor = torch.tensor([1])
    assert copy_to_host(tensor) is tensor
    assert record_event(CPU) is None


# -- a device that is late --


class LateDevice:
    """A stream: its work is done when an event is waited for, not before."""

    def __init__(self) -> None:
        self.to_do: list[Callable[[], object]] = []

    def run(self, number: int | None = None) -> None:
        """Do the first `number` operations in the queue, or all."""
        now, self.to_do = self.to_do[:number], self.to_do[number:] if number is not None else []
        for thing in now:
            thing()


class LateTensor:
    """Memory of such a device: copies into it are late."""

    def __init__(self, device: LateDevice, tensor: torch.Tensor) -> None:
        self.device, self.tensor = device, tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, part: slice) -> LateTensor:
        return LateTensor(self.device, self.tensor[part])

    def copy_(self, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.device.to_do.append(lambda: self.tensor.copy_(source))

    def view(self, what: Any) -> Any:
        view = self.tensor.view(what)
        return LateTensor(self.device, view) if isinstance(what, torch.dtype) else view


class LateEvent:
    """To wait for this event, the device does all work that was queued before `record`."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self.num_recorded = self.num_reached = 0

    def record(self) -> None:
        self.num_recorded += 1
        self.device.to_do.append(self._reach)

    def _reach(self) -> None:
        self.num_reached += 1

    def synchronize(self) -> None:
        while self.num_reached < self.num_recorded:
            self.device.run(1)


def make_late(num_bytes: int, num_hosts: int = 2) -> tuple[StagingBuffer, LateDevice]:
    """A StagingBuffer as its constructor makes it for a GPU, over a LateDevice."""
    device, staging = LateDevice(), StagingBuffer(num_bytes, CPU)
    staging.is_gpu = True
    staging._on_device = LateTensor(device, staging._on_device)  # type: ignore[assignment]
    staging._hosts = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(num_hosts)]
    staging._copied = [LateEvent(device) for _ in range(num_hosts)]  # type: ignore[misc]
    staging._host_arrays = [host.numpy() for host in staging._hosts]
    return staging, device


def send_steps(num_hosts: int, num_steps: int) -> tuple[list[list[int]], int]:
    """Send two arrays a step; a kernel of the step reads them on the device. Returns what the
    kernels read, and how many steps were on their way at most."""
    staging, device = make_late(256, num_hosts)
    read: list[list[int]] = []
    most_on_their_way = 0
    for step in range(num_steps):
        staging.begin_step()
        tensors = [*send(staging, np.array([step] * 3)), *send(staging, np.array([-step]))]
        device.to_do.append(lambda t=tensors: read.append([int(x) for y in t for x in y]))  # type: ignore[misc]
        most_on_their_way = max(most_on_their_way, step + 1 - len(read))
    device.run()
    return read, most_on_their_way


def test_no_copy_is_overtaken_by_the_next_step() -> None:
    """Steps use two host buffers in turns: the CPU is up to two steps ahead, and never overwrites
    an array that the device has yet to copy."""
    read, most_on_their_way = send_steps(num_hosts=2, num_steps=7)
    assert read == [[step, step, step, -step] for step in range(7)]
    assert most_on_their_way == 2 + 1  # the third waits for the first one's copies, not its kernel


def test_the_late_device_notices_what_is_overwritten_early() -> None:
    """A test of the test: without the wait for the event, kernels read later steps' numbers."""
    staging, device = make_late(64)
    for event in staging._copied:
        event.synchronize = lambda: None  # type: ignore[method-assign]
    first: list[int] = []
    for step in range(3):
        staging.begin_step()
        [tensor] = send(staging, np.array([step]))
        if step == 0:
            device.to_do.append(lambda t=tensor: first.append(int(t[0])))
    device.run()
    assert first == [2]


def test_a_step_that_sends_nothing_waits_for_nothing() -> None:
    staging, device = make_late(64)
    for _ in range(5):
        staging.begin_step()
        assert send(staging) == []
    assert not device.to_do
