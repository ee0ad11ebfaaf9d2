"""How do ranks find each other?

Ranks meet at a torch.distributed store, a small table that all of them can reach. For ranks that
rank 0 has spawned, the store is in rank 0's process (`start_store`). For ranks that torchrun has
started, the store is torchrun's. There each rank writes at which address and port it listens. From
then on the ranks speak to each other directly, in process groups. `connect` makes those that a rank
needs (parallel.py says for what). Of six ranks with pp_size 3, and so tp_size 2, rank 2 gets:

    stage 1              ranks 2 3
    link from 0 to 2     ranks 0 2    rank 0 sends
    link from 2 to 4     ranks 2 4    rank 2 sends
    world                all six

A stage and a link have two groups each: one for tensors on their device (gloo, on GPUs nccl), one
for values in main memory (gloo). Rank 0 alone knows the engine's options, so it writes pp_size into
the store.

A process that can reach the store or a rank can run code there (values are pickled), so several
machines need a private network.

vLLM: init_distributed_environment and initialize_model_parallel in
vllm/distributed/parallel_state.py; StatelessProcessGroup in vllm/distributed/utils.py (V0 and V1).
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nanoserve.parallel import Groups, ParallelState, RankError

# A rank may wait so long for the next step: a notebook may pause for days. (Not more than 24 days:
# torch counts the milliseconds in 32 bits.)
IDLE_TIMEOUT = timedelta(days=20)
STEP_TIMEOUT = timedelta(minutes=10)  # how far one rank may be behind another within a step


def start_store(address: str = "127.0.0.1") -> tuple[dist.Store, int]:
    """A store in this process, and its port: any free one of this address."""
    listener = socket.create_server((address, 0), backlog=128)
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
    pp_size: int = 1,
) -> ParallelState:
    """Wait for all ranks at `store`, and make the process groups.

    `address` is the address at which other ranks reach this machine. `pp_size` is rank 0's to say:
    what other ranks give is not read. Raises RankError if another rank does not come within
    STEP_TIMEOUT, or ends before it has connected.
    """

    def make_groups(name: str, *members: int) -> Groups:
        own_rank, size = members.index(rank), len(members)
        cpu_group = _make_gloo(dist.PrefixStore(f"{name}/cpu", store), own_rank, size, address)
        cpu_group._set_default_timeout(IDLE_TIMEOUT)
        make_group = _make_nccl if device.type == "cuda" else _make_gloo
        prefixed = dist.PrefixStore(f"{name}/device", store)
        return Groups(make_group(prefixed, own_rank, size, address), cpu_group)

    def make_link(sender: int, receiver: int) -> Groups | None:
        """None if this is neither of the two, or there is no such stage."""
        if rank not in (sender, receiver) or sender < 0 or receiver >= world_size:
            return None
        return make_groups(f"link from {sender} to {receiver}", sender, receiver)

    try:
        if rank == 0:
            store.set("pp_size", str(pp_size))
        store.wait(["pp_size"], STEP_TIMEOUT)
        pp_size = int(store.get("pp_size"))
        tp_size = world_size // pp_size
        pp_rank, tp_rank = divmod(rank, tp_size)
        own, first = Groups(), pp_rank * tp_size
        if tp_size > 1 or pp_size == 1:
            own = make_groups(f"stage {pp_rank}", *range(first, first + tp_size))
        parallel = ParallelState(
            tp_rank,
            tp_size,
            own.device_group,
            own.cpu_group,
            num_local_ranks or world_size,
            pp_rank=pp_rank,
            pp_size=pp_size,
            world_group=own.cpu_group,
        )
        if pp_size == 1:
            return parallel
        world_group = _make_gloo(dist.PrefixStore("world", store), rank, world_size, address)
        world_group._set_default_timeout(IDLE_TIMEOUT)  # one stage may load for long
        return replace(
            parallel,
            previous=make_link(rank - tp_size, rank),
            next=make_link(rank, rank + tp_size),
            back=make_link(world_size - tp_size, 0),
            world_group=world_group,
        )
    except RuntimeError as error:
        raise RankError(f"rank {rank} could not connect to the other ranks: {error}") from error


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
