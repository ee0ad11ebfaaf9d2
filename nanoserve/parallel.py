"""What do ranks say to each other?

Tensor parallelism cuts each layer's matrices among ranks (layers.py shows where). A transformer
block then needs two sums over ranks, after attention and after the MLP. The embedding needs one:

    rank 0:  x @ A0 -> h0;  h0 @ B0 -> p0 \\
                                            all_reduce: p0 + p1 = (x @ A) @ B
    rank 1:  x @ A1 -> h1;  h1 @ B1 -> p1 /

Each step needs three more messages: rank 0 broadcasts the SchedulerOutput, rank 0 gathers the parts
of the logits, and rank 0 broadcasts the sampled tokens.

Pipeline parallelism gives each *stage* some of the layers. A stage is a group of ranks as above.
Each rank passes on what it gets to the same rank of the next stage. Three stages of two ranks:

    stage 0   0  1     0 -> 2 -> 4    the SchedulerOutput, then the hidden states
    stage 1   2  3     1 -> 3 -> 5    the same
    stage 2   4  5     4 -> 0         the logits, to the rank that samples

Whoever sends does not wait: the next stage, still in an earlier step, takes the message later.

A ParallelState holds this process's rank and its two process groups. It is an argument of the
layers, not a module variable, so that two engines of different sizes can live in one process. For
the same reason its groups are its own: torch's default group stays free. With one rank there are
no groups, and every method returns at once.

The numbers have vLLM's names. Rank 5 of the six above has tp_rank 1, tp_size 2, pp_rank 2 (its
stage), pp_size 3. distributed/rendezvous.py says how ranks find each other and make the groups.

Left out: expert parallelism; custom all-reduce kernels; sampling on the last stage (rank 0 has the
grammars and the users' callables, so it gets the logits, not the token ids).

vLLM: vllm/distributed/parallel_state.py, communication_op.py (V0 and V1); get_pp_indices in
vllm/distributed/utils.py.
"""

from __future__ import annotations

import ctypes
import pickle
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nanoserve.exceptions import EngineDeadError

POLL_INTERVAL = timedelta(seconds=1)
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


class Groups(NamedTuple):
    """The two process groups of the same ranks (vLLM: GroupCoordinator). Of a link, two ranks: the
    first one sends."""

    device_group: Any = None  # for tensors: gloo on CPU, nccl on CUDA
    cpu_group: Any = None  # for values in main memory: always gloo


@dataclass(frozen=True)
class ParallelState:
    """This process's place among the ranks that share one model.

    Without groups it tells the shape of each share, and all_reduce, gather and broadcast return
    their own argument. Invariant: all ranks of a stage call the same methods in the same order. If
    one rank does not make a call, the other ranks wait for it; if one rank ends, the calls of the
    other ranks raise RankError.
    """

    tp_rank: int = 0  # among the ranks of its stage, which divide each layer
    tp_size: int = 1
    device_group: Any = None  # of the stage, for tensors: gloo on CPU, nccl on CUDA
    cpu_group: Any = None  # of the stage, for values in main memory: always gloo
    num_local_ranks: int = 1  # how many of all ranks share this machine and its memory
    comm_stats: CommStats = field(default_factory=CommStats)
    # On rank 0, if it has spawned the other ranks: True if one of their processes has ended.
    has_lost_rank: Callable[[], bool] | None = None
    pp_rank: int = 0  # the number of the stage
    pp_size: int = 1  # how many stages
    previous: Groups | None = None  # the link from the stage before
    next: Groups | None = None  # the link to the stage behind
    back: Groups | None = None  # the link from the last stage's first rank to rank 0
    world_group: Any = None  # of all ranks, for values in main memory
    sending: deque[Any] = field(default_factory=deque)  # what may not have been taken yet

    @property
    def rank(self) -> int:
        """Among all ranks; the stages come one after the other. Rank 0 is beside the scheduler and
        the processors, and samples."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def groups(self) -> list[Groups]:
        """Those of this rank's stage, and of its links."""
        links = [link for link in (self.previous, self.next, self.back) if link is not None]
        return [Groups(self.device_group, self.cpu_group), *links]

    @property
    def device_groups(self) -> list[Any]:
        """The process groups for tensors among them."""
        return [each.device_group for each in self.groups if each.device_group is not None]

    @property
    def is_first_stage(self) -> bool:
        """Does this rank's stage look up the token ids?"""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Does this rank's stage compute logits?"""
        return self.pp_rank == self.pp_size - 1

    def shard_range(self, total: int, what: str, unit: int | None = None) -> tuple[int, int]:
        """(first, size) of this rank's part of `total` rows, heads or tokens.

        With `unit`, a part is made of whole units (the rows of one head, say). If there are fewer
        units than ranks, neighbouring ranks hold the same unit: 2 key heads on 4 ranks are held as
        0, 0, 1, 1. Raises ValueError if the units cannot be divided evenly.
        """
        num_units = total // (unit or 1)
        num_parts = min(self.tp_size, num_units) if unit else self.tp_size
        if num_units % num_parts or self.tp_size % num_parts:
            raise ValueError(
                f"{what}: {num_units} cannot be divided among {self.tp_size} ranks. "
                "Choose a tensor parallel size that divides it."
            )
        size = total // num_parts
        return self.tp_rank * num_parts // self.tp_size * size, size

    def layer_range(self, num_layers: int) -> tuple[int, int]:
        """(first, end) of the layers of this rank's stage. What does not divide goes to the stages
        before the last one: 10 layers on 4 stages are 2, 3, 3 and 2, because the first stage has
        the embedding, too, and the last one the head. (vLLM: get_pp_indices.)

        Raises ValueError if there are fewer layers than stages.
        """
        if num_layers < self.pp_size:
            raise ValueError(
                f"{num_layers} layers cannot be divided among {self.pp_size} stages. Choose a "
                f"pipeline_parallel_size of at most {num_layers}."
            )
        size, rest = divmod(num_layers, self.pp_size)
        sizes = [size] * self.pp_size
        for stage in range(2, rest + 2):
            sizes[-stage] += 1
        return sum(sizes[: self.pp_rank]), sum(sizes[: self.pp_rank + 1])

    # -- tensors, on each rank's own device --

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of `tensor` over all ranks, on every rank (in place)."""
        if self.device_group is not None:
            self._communicate("all_reduce", tensor, lambda: self.device_group.allreduce([tensor]))
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """On rank 0: all ranks' tensors, concatenated along the last dimension. On other ranks: an
        empty tensor [..., 0]."""
        if self.device_group is None:
            return tensor
        part = tensor.contiguous()
        parts = [[torch.empty_like(part) for _ in range(self.tp_size)]] if self.tp_rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        self._communicate("gather", part, lambda: self.device_group.gather(parts, [part], options))
        return torch.cat(parts[0], dim=-1) if parts else tensor[..., :0]

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's `tensor` on every rank (in place)."""
        if self.device_group is not None:
            options = _from_rank_0()
            self._communicate(
                "broadcast", tensor, lambda: self.device_group.broadcast([tensor], options)
            )
        return tensor

    def send(self, tensor: Tensor, link: Groups | None) -> None:
        """Send a copy of `tensor` over a link, if there is one. Does not wait."""
        if link is not None:
            copy = tensor.clone(memory_format=torch.contiguous_format)
            self._send(copy, link.device_group, "send")

    def start_receive(self, tensor: Tensor, link: Groups | None) -> Callable[[], Tensor]:
        """Expect a tensor from a link, in the order of its sends. The function that is returned
        waits until `tensor` is filled, and may never be called."""
        assert link is not None, "no stage at the other end"
        work = self._start("receive", tensor, link.device_group)

        def wait() -> Tensor:
            self._finish("receive", tensor, lambda: work)
            return tensor

        return wait

    # -- control: values in main memory --

    def broadcast_object(self, value: object) -> None:
        """Send a value (a SchedulerOutput, say) to all other ranks, which call `receive_object`.

        The pickled value follows its length of 8 bytes. A value of up to FIRST_BYTES - 8 bytes
        takes one broadcast, a larger one two. Later stages get it from the stage before.
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
        if (group := self.world_group) is None:
            return value
        tensor, options = torch.tensor([value]), dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._communicate("control", tensor, lambda: group.allreduce([tensor], options))
        return int(tensor)

    def close(self) -> None:
        """Release the groups, and wait until their threads have ended: a thread that releases a
        tensor after Python's own end would abort the process."""
        names = ("device_group", "cpu_group", "previous", "next", "back", "world_group")
        for name in names:
            object.__setattr__(self, name, None)
        self.sending.clear()

    def keep_for_ever(self) -> None:
        """Never release the groups, also if `close` is called."""
        keep_for_ever((self.groups, self.world_group, *self.sending))

    def _broadcast_bytes(self, data: bytearray) -> bytearray:
        """Replace `data` by rank 0's: over the stage's group, or the link from the stage before.
        Then send it to the stage behind."""
        tensor = torch.frombuffer(data, dtype=torch.uint8)
        group = self.previous.cpu_group if self.previous else self.cpu_group
        if group is not None:
            options = _from_rank_0()
            self._communicate("control", tensor, lambda: group.broadcast([tensor], options))
        if self.next is not None:
            self._send(tensor, self.next.cpu_group, "control")
        return data

    def _send(self, tensor: Tensor, group: Any, name: str) -> None:
        """Start to send to the other rank of a link, and see whether earlier messages arrived."""
        while self.sending and self.sending[0].is_completed():
            self._finish(name, tensor, self.sending.popleft)
        self.sending.append(self._start(name, tensor, group))

    def _start(self, name: str, tensor: Tensor, group: Any) -> Any:
        """Count and start one operation on a link, of which the first rank is the sender."""
        self.comm_stats.count(name, tensor)
        try:
            return group.broadcast([tensor], _from_rank_0())
        except RuntimeError as error:
            raise self._lost_rank(name, error) from error

    def _communicate(self, name: str, tensor: Tensor, start: Callable[[], Any]) -> None:
        """Count one operation, start it and wait for its end."""
        self.comm_stats.count(name, tensor)
        self._finish(name, tensor, start)

    def _finish(self, name: str, tensor: Tensor, start: Callable[[], Any]) -> None:
        """Wait for the end of the operation that `start` gives (for nccl, the GPU's stream waits).
        Raises RankError if it failed."""
        try:
            if tensor.device.type == "cuda" or self.has_lost_rank is None:
                start().wait()
            else:
                self._wait(start(), self.has_lost_rank)
        except RuntimeError as error:
            raise self._lost_rank(name, error) from error

    def _lost_rank(self, name: str, error: RuntimeError) -> RankError:
        reason = str(error).splitlines()[0]
        return RankError(f"rank {self.rank} lost another rank in {name}: {reason}")

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
                    self.keep_for_ever()  # this operation may never end
                    raise
                was_lost = has_lost_rank()


def keep_for_ever(value: object) -> None:
    """Never free a store, or process groups: that would wait for operations and threads, which may
    never end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _from_rank_0() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options
