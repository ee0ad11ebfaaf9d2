"""How do the ranks of one model become actors?

All resources are reserved at once, or none: a placement group with a bundle for each rank, which is
one GPU, or one of Ray's CPUs. Bundle 0 is on this machine and is rank 0's, that is, this process's.
In an actor that has a placement group (a replica of serve.py), the ranks take its bundles.

    reserve       placement group [{CPU: 1, node:10.0.0.1: 0.001}, {CPU: 1}, {CPU: 1}]
    start         RankActor in bundles 1 and 2: each meets rank 0 at its TCPStore
    a step        as in distributed/multiproc.py: the same messages, not through Ray
    close         the ranks end, and the bundles are free

The cluster is the one that this process uses already, that of RAY_ADDRESS or of `ray start` on this
machine; else Ray starts one here, which ends with this process.
"""

from __future__ import annotations

import concurrent.futures
import os
import subprocess
import sys
import weakref
from collections import Counter
from typing import Any

import ray
import torch.distributed as dist
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nanoserve.config import EngineConfig
from nanoserve.distributed import multiproc
from nanoserve.kernels.threads import wait_policy
from nanoserve.models.config import ModelConfig

PLACEMENT_TIMEOUT = 60  # seconds; then the cluster is too small
COPIED = ("HF_", "NCCL_", "GLOO_", "VLLM_", "OMP_", "GOMP_", "KMP_")  # variables of the environment


class RayDistributedExecutor(multiproc.MultiprocExecutor):
    """A MultiprocExecutor whose ranks above 0 are actors."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, runner_cls: Any) -> None:
        """Raises ValueError if the cluster has no room, or for a model that cannot be divided."""
        self.resource = "GPU" if config.device.startswith("cuda") else "CPU"
        super().__init__(config, model_config, runner_cls)

    def start_ranks(self, size: int) -> tuple[dist.Store, dist.Store]:
        connect_to_ray(size)
        host, group = get_node_ip_address(), reserve(size, self.resource)
        self.free = weakref.finalize(self, free, group)
        nodes = placement_group_table(group)["bundles_to_node_id"]
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        for rank in range(1, size):
            num_local = Counter(nodes.values())[nodes[rank]]
            actor = make_remote(RankActor, group, rank, self.resource).remote()
            run = actor.run.remote(host, store.port, rank, size, num_local)
            self.processes[rank] = ActorProcess(actor, run)
        return store, store

    def close(self) -> None:
        super().close()
        self.free()


class RankActor:
    """The process of one rank."""

    def run(self, host: str, port: int, rank: int, size: int, num_local: int) -> None:
        """Ends when rank 0 ends. Of GPUs, an actor sees its own alone."""
        os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(num_local)}
        multiproc.work(dist.TCPStore(host, port, is_master=False), rank, size)


class ActorProcess:
    """An actor, with what MultiprocExecutor uses of a process."""

    def __init__(self, actor: Any, run: Any) -> None:
        """run: the call that is the whole life of the rank."""
        self.actor, self.future = actor, run.future()

    @property
    def pid(self) -> str:
        return f"of the actor {self.actor._actor_id.hex()}"

    def poll(self) -> int | None:
        """None while the rank runs. Asks nobody: Ray completes the future."""
        return 1 if self.future.done() or not ray.is_initialized() else None

    def wait(self, timeout: float | None = None) -> None:
        concurrent.futures.wait([self.future], timeout if self.poll() is None else 0)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("RankActor.run", timeout or 0.0)

    def kill(self) -> None:
        if self.poll() is None:
            ray.kill(self.actor)


def connect_to_ray(num_places: int) -> None:
    """Use a cluster; if there is none, start one here, with so many of Ray's CPUs at least. (They
    are places for actors: several may share a core.)"""
    if not ray.is_initialized():
        try:
            ray.init(address="auto")
        except ConnectionError:
            num_cpus = max(num_places, os.cpu_count() or 1)
            ray.init(address="local", num_cpus=num_cpus, include_dashboard=False)


def reserve(size: int, resource: str) -> Any:
    """A placement group with a bundle for each rank, the first one on this machine. Raises
    ValueError if there is none, or the one that this actor has is too small."""
    group = get_current_placement_group()
    if group is None:
        bundles = [{resource: 1.0} for _ in range(size)]
        bundles[0][f"node:{get_node_ip_address()}"] = 0.001  # which each machine has, 1.0 of it
        group = placement_group(bundles)
        if not group.wait(PLACEMENT_TIMEOUT):
            remove_placement_group(group)
            raise ValueError(
                f"{size} ranks need a {resource} of Ray each, one of them on this machine. Ray has "
                f"{ray.cluster_resources().get(resource, 0):g}, of which "
                f"{ray.available_resources().get(resource, 0):g} are free. Add machines, or use "
                "fewer ranks."
            )
    elif group.bundle_count < size:
        raise ValueError(f"{size} ranks need as many bundles; this actor has {group.bundle_count}.")
    is_actor = ray.get_runtime_context().get_actor_id() is not None
    if resource == "GPU" and not is_actor:  # an actor sees its own alone
        [gpu] = ray.get(make_remote(ray.get_gpu_ids, group, 0, resource).remote())
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        if str(gpu) != visible[0]:
            remove_placement_group(group)
            raise ValueError(
                f"Ray has reserved GPU {gpu} for rank 0, which takes the first one that it sees: "
                f"start with CUDA_VISIBLE_DEVICES={gpu}."
            )
    return group


def make_remote(work: Any, group: Any, rank: int, resource: str) -> Any:
    """A class as an actor, or a function as a task, in the bundle of a rank."""
    variables = {k: v for k, v in {**os.environ, **wait_policy()}.items() if k.startswith(COPIED)}
    return ray.remote(work).options(
        num_cpus=int(resource == "CPU"),
        num_gpus=int(resource == "GPU"),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank),
        runtime_env={"env_vars": {**variables, "PYTHONPATH": os.pathsep.join(sys.path)}},
    )


def free(group: Any) -> None:
    """Give the bundles back. (Those of a replica are Ray Serve's.)"""
    if ray.is_initialized() and get_current_placement_group() is None:
        remove_placement_group(group)
