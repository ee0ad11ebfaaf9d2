"""What do ranks say to each other?

Tensor parallelism cuts each layer's matrices among ranks (layers.py shows where). A transformer
block then needs two sums over ranks, after attention and after the MLP, and the embedding one more:

    rank 0:  x @ A0 -> h0;  h0 @ B0 -> p0 \\
                                            all_reduce: p0 + p1 = (x @ A) @ B
    rank 1:  x @ A1 -> h1;  h1 @ B1 -> p1 /

and each step, beside those sums, three more things: its SchedulerOutput goes out from rank 0, the
parts of the logits come together there, and the sampled tokens go out.

A ParallelState says which rank this is and talks to the others. It is passed to the layers, not
kept in a module variable, so that two engines of different sizes live in one process; for the same
reason its process groups are its own, and torch's default group is never touched. With one rank
there is nothing to say and there are no groups.

Ranks find each other through a torch.distributed store, a small table that all can reach: in
rank 0's process where it started the others itself (`serve_store`), torchrun's otherwise. Who may
write there, or speak to a rank, is trusted: several machines need a network of their own.

Left out: pipeline and expert parallelism; all-reduce kernels of our own.

vLLM: vllm/distributed/parallel_state.py, communication_op.py (V0 and V1).
"""

from __future__ import annotations

import os
import pickle
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nanoserve.config import EngineConfig

IDLE_TIMEOUT = timedelta(days=20)  # a notebook may rest; torch counts milliseconds in 32 bits
STEP_TIMEOUT = timedelta(minutes=10)  # how far one rank may be behind another within a step
FIRST_PART = 4096  # bytes: a step of some hundred sequences fits, and one broadcast does


class RankError(RuntimeError):
    """Another rank has failed or died, and with it this engine. Build a new one."""


@dataclass(frozen=True)
class Traffic:
    """What this rank took part in, by name: how many times, and the bytes of its own tensors.

    On the wire, a ring all-reduce of b bytes among n ranks costs each 2 (n - 1) / n * b sent and as
    many received; a broadcast costs b for each receiver, a gather b for each sender.
    """

    num_calls: Counter[str] = field(default_factory=Counter)
    num_bytes: Counter[str] = field(default_factory=Counter)

    def count(self, name: str, tensor: Tensor) -> None:
        self.num_calls[name] += 1
        self.num_bytes[name] += tensor.nbytes


@dataclass(frozen=True)
class ParallelState:
    """This process among the ranks that share one model.

    All ranks call the same methods in the same order; one that is missing makes the others wait,
    and one that dies makes them raise RankError.
    """

    rank: int = 0
    world_size: int = 1
    group: Any = None  # for tensors: gloo on CPU, nccl on CUDA; a model on several ranks needs it
    control: Any = None  # gloo: for everything else, and never for tensors on a GPU
    num_local_ranks: int = 1  # of the ranks, how many share this machine and its memory
    traffic: Traffic = field(default_factory=Traffic)

    def shard_range(self, total: int, what: str, unit: int | None = None) -> tuple[int, int]:
        """(first, size) of this rank's part of `total` rows, heads or tokens.

        With `unit`, parts are made of whole units (such as the rows of one head), and where there
        are fewer units than ranks, neighbouring ranks hold the same one: 2 key heads on 4 ranks are
        held as 0, 0, 1, 1. Raises ValueError if they cannot be divided evenly.
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

    # -- tensors: on every rank of its own device --

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, on every rank (in place)."""
        if self.group is not None:
            self._run("all_reduce", tensor, lambda: self.group.allreduce([tensor]))
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """On rank 0 the ranks' tensors side by side along the last dimension; elsewhere an empty
        tensor [..., 0]."""
        if self.group is None:
            return tensor
        mine = tensor.contiguous()
        parts = [[torch.empty_like(mine) for _ in range(self.world_size)]] if self.rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._run("gather", mine, lambda: self.group.gather(parts, [mine], options))
        return torch.cat(parts[0], dim=-1) if parts else tensor[..., :0]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's `tensor` on every rank (in place)."""
        if self.group is not None:
            self._run("broadcast", tensor, lambda: self.group.broadcast([tensor], _from_rank_0()))
        return tensor

    # -- control: values in main memory --

    def send(self, value: object) -> None:
        """Hand a value (a SchedulerOutput, say) to all other ranks; they call `receive`."""
        data = pickle.dumps(value)
        data = len(data).to_bytes(8, "little") + data
        parts = [data[:FIRST_PART].ljust(FIRST_PART, b"\0"), data[FIRST_PART:]]
        for part in parts[: 1 + bool(parts[1])]:
            self._share(torch.frombuffer(bytearray(part), dtype=torch.uint8))

    def receive(self) -> Any:
        """What rank 0 sends. Waits as long as it takes."""
        first = self._share(torch.empty(FIRST_PART, dtype=torch.uint8)).numpy().tobytes()
        missing = 8 + int.from_bytes(first[:8], "little") - FIRST_PART
        if missing > 0:
            first += self._share(torch.empty(missing, dtype=torch.uint8)).numpy().tobytes()
        return pickle.loads(first[8:])  # from rank 0 alone, which runs the same program

    def all_reduce_min(self, value: int) -> int:
        """The least of the ranks' values, on every rank."""
        if self.control is None:
            return value
        tensor, options = torch.tensor([value]), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._run("control", tensor, lambda: self.control.allreduce([tensor], options))
        return int(tensor)

    def leave(self) -> None:
        """Say nothing more. Waits for the groups' threads: one that lets go of its last tensor when
        Python has ended would abort the process."""
        object.__setattr__(self, "group", None)
        object.__setattr__(self, "control", None)

    def _share(self, tensor: Tensor) -> Tensor:
        """Rank 0's bytes on every rank, over the control group."""
        self._run("control", tensor, lambda: self.control.broadcast([tensor], _from_rank_0()))
        return tensor

    def _run(self, name: str, tensor: Tensor, start: Callable[[], Any]) -> None:
        """Count and start one operation; wait for it (on a GPU its stream waits, not the CPU)."""
        self.traffic.count(name, tensor)
        try:
            start().wait()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise RankError(f"rank {self.rank} lost the others, in {name}: {reason}") from error


def _from_rank_0() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def serve_store() -> tuple[dist.Store, int]:
    """A store of rank 0's own and the port it chose, on the loopback address only."""
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
    """Meet the other ranks at `store`, and open the two groups.

    `address` is where this machine can be reached by the others. Raises RankError if they do not
    come within STEP_TIMEOUT.
    """
    try:
        control = _make_gloo(dist.PrefixStore("control", store), rank, world_size, address)
        control._set_default_timeout(IDLE_TIMEOUT)
        tensors = dist.PrefixStore("tensors", store)
        make_group = _make_nccl if device.type == "cuda" else _make_gloo
        group = make_group(tensors, rank, world_size, address)
    except RuntimeError as error:
        raise RankError(f"rank {rank} did not find the other ranks: {error}") from error
    return ParallelState(rank, world_size, group, control, num_local_ranks or world_size)


def _make_gloo(store: dist.Store, rank: int, world_size: int, address: str) -> Any:
    """Over sockets of `address`; GLOO_SOCKET_IFNAME, if set, names the network card instead."""
    gloo: Any = dist.ProcessGroupGloo
    if os.environ.get("GLOO_SOCKET_IFNAME"):
        return gloo(store, rank, world_size, STEP_TIMEOUT)
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = STEP_TIMEOUT
    return gloo(store, rank, world_size, options)


def _make_nccl(store: dist.Store, rank: int, world_size: int, address: str) -> Any:
    """NCCL finds its own way between GPUs (NVLink, the network); it needs the store alone."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = STEP_TIMEOUT
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to `host`: the one at which others there can reach it.

    No packet is sent: to connect a UDP socket only looks up the route.
    """
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Within it, kernels go to this GPU, whichever the process uses otherwise."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def choose_device(wanted: str) -> torch.device:
    """ "auto" is a CUDA GPU if there is one, else the CPU. Raises ValueError if there is none."""
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
    """`config` with the device that "auto" stands for here."""
    return replace(config, device=str(choose_device(config.device)))
