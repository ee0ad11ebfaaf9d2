"""What do ranks say to each other?

Tensor parallelism cuts each layer's matrices among ranks (layers.py shows where). A transformer
block then needs two sums over ranks, after attention and after the MLP. The embedding needs one:

    rank 0:  x @ A0 -> h0;  h0 @ B0 -> p0 \\
                                            all_reduce: p0 + p1 = (x @ A) @ B
    rank 1:  x @ A1 -> h1;  h1 @ B1 -> p1 /

Each step needs three more messages: rank 0 broadcasts the SchedulerOutput, rank 0 gathers the parts
of the logits, and rank 0 broadcasts the sampled tokens.

A ParallelState holds this process's rank and its two process groups. It is an argument of the
layers, not a module variable, so that two engines of different sizes can live in one process. For
the same reason its groups are its own: torch's default group stays free. With one rank there are
no groups, and every method returns at once.

Ranks find each other through a torch.distributed store, a small table that all ranks can reach. For
ranks that rank 0 has spawned, the store is in rank 0's process (`start_store`). For ranks that
torchrun has started, the store is torchrun's. A process that can reach the store or a rank can run
code there (values are pickled), so several machines need a private network.

Left out: pipeline and expert parallelism; custom all-reduce kernels.

vLLM: vllm/distributed/parallel_state.py, communication_op.py (V0 and V1).
"""

from __future__ import annotations

import ctypes
import os
import pickle
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanoserve.config import EngineConfig
from nanoserve.exceptions import EngineDeadError

# A rank may wait so long for the next step: a notebook may pause for days. (Not more than 24 days:
# torch counts the milliseconds in 32 bits.)
POLL_INTERVAL = timedelta(seconds=1)
IDLE_TIMEOUT = timedelta(days=20)
STEP_TIMEOUT = timedelta(minutes=10)  # how far one rank may be behind another within a step
FIRST_BYTES = 4096  # size of an object's first broadcast: enough for a step of 100s of sequences


class RankError(EngineDeadError):
    """Another rank has failed or was killed, so this engine cannot go on. Build a new LLM."""


@dataclass(frozen=True)
class CommStats:
    """This rank's operations by name: the number of calls, and the bytes of its own tensors.

    On the wire, a ring all-reduce of b bytes among n ranks makes each rank send 2 (n - 1) / n * b
    bytes and receive as many; a broadcast sends b to each receiver, a gather b from each sender.
    """

    num_calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, tensor: Tensor) -> None:
        self.num_calls[name] += 1
        self.num_bytes[name] += tensor.nbytes


@dataclass(frozen=True)
class ParallelState:
    """This process's place among the ranks that share one model.

    Without groups it tells the shape of each share, and all_reduce, gather and broadcast return
    their own argument. Invariant: all ranks call the same methods in the same order. If one rank
    does not make a call, the other ranks wait for it; if one rank ends, the calls of the other
    ranks raise RankError.
    """

    rank: int = 0
    world_size: int = 1
    group: Any = None  # the process group for tensors: gloo on CPU, nccl on CUDA
    control: Any = None  # the process group for values in main memory: always gloo
    num_local_ranks: int = 1  # how many of the ranks share this machine and its memory
    comm_stats: CommStats = field(default_factory=CommStats)
    # On rank 0, if it has spawned the other ranks: True if one of their processes has ended.
    has_lost_rank: Callable[[], bool] | None = None

    def shard_range(self, total: int, what: str, unit: int | None = None) -> tuple[int, int]:
        """(first, size) of this rank's part of `total` rows, heads or tokens.

        With `unit`, a part is made of whole units (the rows of one head, say). If there are fewer
        units than ranks, neighbouring ranks hold the same unit: 2 key heads on 4 ranks are held as
        0, 0, 1, 1. Raises ValueError if the units cannot be divided evenly.
        """
        num_units = total // (unit or 1)
        num_parts = min(self.world_size, num_units) if unit else self.world_size
        if num_units % num_parts or self.world_size % num_parts:
            raise ValueError(
                f"{what}: {num_units} cannot be divided among {self.world_size} ranks. "
                "Choose a tensor parallel size that divides it."
            )
        size = total // num_parts
        return self.rank * num_parts // self.world_size * size, size

    # -- tensors, on each rank's own device --

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, on every rank (in place)."""
        if self.group is not None:
            self._communicate("all_reduce", tensor, lambda: self.group.allreduce([tensor]))
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """On rank 0: all ranks' tensors, concatenated along the last dimension. On other ranks: an
        empty tensor [..., 0]."""
        if self.group is None:
            return tensor
        part = tensor.contiguous()
        parts = [[torch.empty_like(part) for _ in range(self.world_size)]] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._communicate("gather", part, lambda: self.group.gather(parts, [part], options))
        return torch.cat(parts[0], dim=-1) if parts else tensor[..., :0]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's `tensor` on every rank (in place)."""
        if self.group is not None:
            options = _from_rank_0()
            self._communicate("broadcast", tensor, lambda: self.group.broadcast([tensor], options))
        return tensor

    # -- control: values in main memory --

    def broadcast_object(self, value: object) -> None:
        """Send a value (a SchedulerOutput, say) to all other ranks, which call `receive_object`.

        The pickled value follows its length of 8 bytes. A value of up to FIRST_BYTES - 8 bytes
        takes one broadcast, a larger one two.
        """
        data = pickle.dumps(value)
        data = len(data).to_bytes(8, "little") + data
        self._broadcast_bytes(bytearray(data[:FIRST_BYTES].ljust(FIRST_BYTES, b"\0")))
        if len(data) > FIRST_BYTES:
            self._broadcast_bytes(bytearray(data[FIRST_BYTES:]))

    def receive_object(self) -> Any:
        """The next value that rank 0 sends. Waits for it up to IDLE_TIMEOUT."""
        data = self._broadcast_bytes(bytearray(FIRST_BYTES))
        num_missing = 8 + int.from_bytes(data[:8], "little") - FIRST_BYTES
        if num_missing > 0:
            data = data + self._broadcast_bytes(bytearray(num_missing))
        return pickle.loads(data[8:])  # safe: rank 0 runs the same program

    def all_reduce_min(self, value: int) -> int:
        """The smallest of all ranks' values, on every rank."""
        if self.control is None:
            return value
        tensor, options = torch.tensor([value]), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._communicate("control", tensor, lambda: self.control.allreduce([tensor], options))
        return int(tensor)

    def close(self) -> None:
        """Release the groups, and wait until their threads have ended: a thread that releases a
        tensor after Python's own end would abort the process."""
        object.__setattr__(self, "group", None)
        object.__setattr__(self, "control", None)

    def _broadcast_bytes(self, data: bytearray) -> bytearray:
        """Replace `data` by rank 0's, over the control group."""
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        options = _from_rank_0()
        self._communicate("control", tensor, lambda: self.control.broadcast([tensor], options))
        return data

    def _communicate(self, name: str, tensor: Tensor, start: Callable[[], Any]) -> None:
        """Count one operation, start it and wait for its end (for nccl, the GPU's stream waits)."""
        self.comm_stats.count(name, tensor)
        try:
            if tensor.device.type == "cuda" or self.has_lost_rank is None:
                start().wait()
            else:
                self._wait(start(), self.has_lost_rank)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RankError(f"rank {self.rank} lost another rank in {name}: {reason}") from error

    def _wait(self, work: Any, has_lost_rank: Callable[[], bool]) -> None:
        """Wait for gloo, which may miss that another rank has ended: in rare cases a send to that
        rank never returns. So the processes are asked, too, once in POLL_INTERVAL.

        Raises RuntimeError if `work` has failed, or is not done an interval after a rank has ended.
        """
        was_lost = False
        while True:
            try:
                work.wait(POLL_INTERVAL)
                return
            except RuntimeError:
                if work.is_completed():
                    work.wait()  # the operation's own error, or none if it has just succeeded
                    return
                if was_lost:
                    keep_for_ever(self)  # this operation may never end
                    raise
                was_lost = has_lost_rank()


def keep_for_ever(value: ParallelState | dist.Store) -> None:
    """Never free these groups, or this store: freeing them waits for operations and threads, which
    may never end."""
    values = (value.group, value.control) if isinstance(value, ParallelState) else (value,)
    for each in values:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


def _from_rank_0() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def start_store() -> tuple[dist.Store, int]:
    """A store in this process, and its port (any free one), on the loopback address only."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    host, port = listener.getsockname()
    store = dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def connect(
    store: dist.Store,
    rank: int,
    world_size: int,
    device: torch.device,
    *,
    address: str = "127.0.0.1",
    num_local_ranks: int | None = None,
) -> ParallelState:
    """Wait for all ranks at `store`, and make the two process groups.

    `address` is the address at which other ranks reach this machine. Raises RankError if another
    rank does not come within STEP_TIMEOUT, or ends before it has connected.
    """
    try:
        control = _make_gloo(dist.PrefixStore("control", store), rank, world_size, address)
        control._set_default_timeout(IDLE_TIMEOUT)
        tensors = dist.PrefixStore("tensors", store)
        make_group = _make_nccl if device.type == "cuda" else _make_gloo
        group = make_group(tensors, rank, world_size, address)
    except RuntimeError as error:
        raise RankError(f"rank {rank} could not connect to the other ranks: {error}") from error
    return ParallelState(rank, world_size, group, control, num_local_ranks or world_size)


def _make_gloo(store: dist.Store, rank: int, world_size: int, address: str) -> Any:
    """A gloo group on sockets of `address`. If GLOO_SOCKET_IFNAME is set, that environment variable
    names the network interface instead."""
    gloo: Any = dist.ProcessGroupGloo
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return gloo(store, rank, world_size, STEP_TIMEOUT)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = STEP_TIMEOUT
    return gloo(store, rank, world_size, options)


def _make_nccl(store: dist.Store, rank: int, world_size: int, address: str) -> Any:
    """An nccl group. NCCL needs the store alone: it finds NVLink and the network by itself."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = STEP_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def address_towards(host: str, port: int) -> str:
    """This machine's own address on the route to `host`, at which `host` can reach this machine.

    No packet is sent: connecting a UDP socket only looks up the route.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which `device` is the current GPU (nothing on a CPU), and torch.autocast of the
    application around it is off: it would give layers a dtype that the KV cache does not have."""
    context = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    return _without_autocast(device, context) if torch.is_autocast_enabled(device.type) else context


@contextmanager
def _without_autocast(
    device: torch.device, context: AbstractContextManager[object]
) -> Iterator[None]:
    with context, torch.autocast(device.type, enabled=False):
        yield


def choose_device(wanted: str) -> torch.device:
    """The torch device for EngineConfig.device: "auto" means a CUDA GPU if there is one, else the
    CPU. Raises ValueError if the wanted GPU does not exist."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device is {wanted!r}, but torch sees {torch.cuda.device_count()} CUDA devices. "
            "Use device='cpu' or 'auto', or install a torch built for your driver."
        )
    return device


def with_device(config: EngineConfig) -> EngineConfig:
    """`config` with "auto" replaced by the device that it means on this machine."""
    return replace(config, device=str(choose_device(config.device)))
