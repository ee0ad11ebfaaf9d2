"""How do the ranks of one model get onto the machines of a Ray cluster?

Ray is a program that runs on every machine of a cluster. It knows the resources that are free, and
starts Python objects in processes of their own, on the machine that has them: actors. Here each
rank but rank 0 is an actor:

    LLM(model, tensor_parallel_size=3, distributed_executor_backend="ray")

    machine A                                          machine B
    engine, rank 0 = this process       bundle 0       rank 2 = RankActor     bundle 2
    rank 1 = RankActor                  bundle 1

The bundles are one placement group: all resources are reserved at once, or none. A bundle is one
GPU, or one of Ray's CPUs. Bundle 0 is this process's own, on its own machine. In a task or an actor
that has a placement group (a replica of Ray Serve, say), the engine takes that group's bundles.

Ray only starts the ranks, watches them and ends them. What they say to each other in a step does
not pass through Ray: RayRanks is a SpawnedRanks whose processes are actors, the store and the
groups are those of rendezvous.py, and each actor runs the worker loop of multiproc.py.

Which Ray: the one that this process uses already; else the cluster of RAY_ADDRESS or of `ray
start` on this machine; else one that is started here, on the loopback address only, without
dashboard and telemetry. What the engine has started or connected to, its `close` ends; a cluster
that was there before stays.

Left out: Ray's compiled graphs, with which vLLM sends steps to actors (gloo does it here); an
engine in a Ray Client ("ray://..."), because rank 0 must be on a machine of the cluster; forked
children that end by sys.exit (Ray's function at exit hangs there: use os._exit, or "spawn"); an
engine that starts its own Ray in a thread that ends before it (Linux ends that Ray with the thread:
call ray.init() in the main thread first). A process whose cluster has lost its head is ended by Ray
itself, after a minute.

vLLM: vllm/executor/ray_gpu_executor.py, ray_utils.py (V0); vllm/v1/executor/ray_executor.py,
ray_utils.py (V1).
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nanoserve.config import EngineConfig
from nanoserve.device import choose_device
from nanoserve.distributed.multiproc import MultiprocExecutor, run_rank
from nanoserve.distributed.process import EXIT_TIMEOUT
from nanoserve.distributed.ranks import SpawnedRanks, search_path
from nanoserve.distributed.rendezvous import STEP_TIMEOUT
from nanoserve.interrupts import delayed_interrupt, suppress, unless_signal
from nanoserve.kernels.threads import num_cores, wait_policy
from nanoserve.logger import init_logger
from nanoserve.parallel import ParallelState

try:
    import ray
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError(f'Ray is not installed ({error}): pip install -e ".[ray]".') from error

logger = init_logger(__name__)
START_LIMIT = 120.0  # seconds for the start of a Ray
FIRST_REPORT = 5.0  # seconds of waiting for Ray after which the log says so
COPIED = ("VLLM_", "NANOSERVE_", "NCCL_", "HF_", "HUGGING_FACE_")  # environment, as vLLM does
# Of a Ray that is started here. Its "CPUs" are places for actors, as many as one likes: like
# processes, several actors may share a core. The object store stays empty.
PLACES, OBJECT_STORE_BYTES = 1000, 80 * 2**20
LONGEST_FOLDER = 20  # of temporary files: the names of Ray's sockets have 107 characters at most


class RayDistributedExecutor(MultiprocExecutor):
    """A MultiprocExecutor whose ranks above 0 are actors in a Ray cluster."""

    @staticmethod
    def _make_ranks(config: EngineConfig) -> RayRanks:
        return RayRanks(config)

    def describe(self) -> str:
        """Device, dtype, attention, ranks and nodes, for the engine's first log line."""
        assert isinstance(self.ranks, RayRanks)
        return f"{super().describe()}, Ray nodes: {len(set(self.ranks.placement.nodes))}"


class RayRanks(SpawnedRanks):
    """Ranks that are actors. Invariant: after `close`, and when this process ends in any way, Ray
    has ended the actors and freed their bundles."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ValueError if Ray has not the resources or does not start the actors within
        STEP_TIMEOUT, ConnectionError for a cluster that does not answer."""
        self._started: list[Any] = []  # one of Ray's futures for each actor
        device = choose_device(config.device)
        self.placement = Placement(config.world_size, device.type)
        try:
            super().__init__(config, address=ray.util.get_node_ip_address())
        except BaseException:
            self.placement.close()
            raise
        try:
            wait_for_ray(self._have_started, self._describe_wait)
        except BaseException:
            self.close()
            raise

    def _count_local_ranks(self) -> int:
        return self.placement.num_ranks_beside(0)

    def _choose_device(self, config: EngineConfig) -> torch.device:
        """The GPU of bundle 0. In an actor that holds a GPU, it is the only one in sight."""
        device = choose_device(config.device)
        return torch.device("cuda", self.placement.find_gpu()) if device.type == "cuda" else device

    def _spawn(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        task = {
            "host": self.address,
            "port": port,
            "rank": rank,
            "world_size": self.world_size,
            "device": "cpu" if self.device.type == "cpu" else "cuda:0",  # it sees no other GPU
            "num_threads": torch.get_num_threads(),
            "num_local_ranks": self.placement.num_ranks_beside(rank),
        }
        actor = self.placement.remote(RankActor, rank).remote()
        self._started.append(actor.__ray_ready__.remote())
        run = actor.run.remote(task, copied_environment(), os.getcwd())
        return ActorProcess(actor, run, self.placement)  # type: ignore[return-value]

    def _have_started(self, seconds: float) -> bool:
        """Waits for it for so many seconds. True also of an actor that has failed."""
        if not self._started:  # there is only rank 0
            return True
        _, missing = ray.wait(self._started, num_returns=len(self._started), timeout=seconds)
        return not missing

    def _describe_wait(self) -> str:
        return (
            f"Ray has not started the actors of all {self.world_size} ranks. Is something else in "
            f"their bundles, {self.placement.group.bundle_specs}? (`ray list actors` shows it)"
        )

    def connect(self) -> ParallelState:
        """As SpawnedRanks.connect; then the processes of the actors are known."""
        parallel = super().connect()
        assert self.store is not None
        for rank, process in enumerate(self.processes, 1):
            pid, _, host = self.store.get(f"ready/{rank}").decode().partition("@")
            process.pid, process.host = int(pid), host  # type: ignore[attr-defined]
        return parallel

    @property
    def pids(self) -> dict[int, int]:
        """rank -> process id, of the other ranks on this machine."""
        here, processes = socket.gethostname(), enumerate(self.processes, 1)
        return {rank: each.pid for rank, each in processes if each.host == here}  # type: ignore[attr-defined]

    def _describe_end(self, process: Any, code: int) -> str:
        return f"ended, and Ray says:\n{process.describe_end()}"

    def close(self, is_step_over: bool = True) -> None:
        """End the actors, free the bundles, and end what was started for them. Not is_step_over: a
        step hangs, and ends with an error because the other ranks do."""
        if is_step_over:
            self._closing.set()
        for process in self.processes:
            process.kill()
        self.placement.close()  # this ends also an actor whose process was stopped
        super().close(is_step_over)


class RankActor:
    """The process of one rank."""

    def run(self, task: dict[str, Any], environment: dict[str, str], folder: str) -> None:
        """Ends when rank 0 ends the rank, or with the error of the rank. folder: the working
        directory of rank 0, which names of checkpoints may begin at."""
        os.environ.update(environment)
        enter(folder)
        cores = min(task["num_threads"], num_cores())  # as many as rank 0 has, or this machine
        task["num_threads"] = max(1, cores // task["num_local_ranks"])
        run_rank(**task, address=ray.util.get_node_ip_address())


def copied_environment() -> dict[str, str]:
    """What other machines need to know of this process's environment variables."""
    return {name: value for name, value in os.environ.items() if name.startswith(COPIED)}


def enter(folder: str) -> None:
    """Make it the working directory, if this machine has it."""
    if os.path.isdir(folder):
        os.chdir(folder)


class ActorProcess:
    """An actor, with the members of subprocess.Popen that SpawnedRanks uses. `pid` and `host` are
    known once the rank has connected."""

    stdin = None

    def __init__(self, actor: Any, run: Any, placement: Placement) -> None:
        """`run`: the call that is the whole life of the rank."""
        self.actor, self.placement = actor, placement
        self.future: concurrent.futures.Future[None] = run.future()
        self.pid, self.host = 0, ""

    def poll(self) -> int | None:
        """None as long as the rank runs. 1: it has failed, perhaps because another one had; -1: its
        process has ended. Asks nobody: Ray sets the future when a process ends."""
        if not self.future.done():
            return None if self.placement.is_connected else -1
        return -1 if isinstance(self.future.exception(), ray.exceptions.RayActorError) else 1

    def describe_end(self) -> str:
        """What Ray says."""
        is_known = self.future.done()
        return str(self.future.exception()) if is_known else "ray.shutdown() was called."

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end of the rank. Raises subprocess.TimeoutExpired."""
        concurrent.futures.wait([self.future], timeout if self.poll() is None else 0)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("RankActor.run", timeout or 0.0)

    def kill(self) -> None:
        """End the actor's process. Does nothing to one that has ended."""
        if self.placement.is_connected:
            ray.kill(self.actor)


class Placement:
    """A bundle of resources for each rank. Invariant: bundle 0 is on this process's node."""

    def __init__(self, world_size: int, device_type: str) -> None:
        """device_type: "cpu" or "cuda". Waits until Ray has the resources; raises ValueError if it
        has not within STEP_TIMEOUT, or if the process's own placement group is too small."""
        self.resource = "GPU" if device_type == "cuda" else "CPU"
        self._connection = CONNECTION.open()
        self._is_open, self._is_ours = True, False
        try:
            node = ray.get_runtime_context().get_node_id()
            group = ray.util.get_current_placement_group()
            if group is None:
                labels: list[dict[str, str]] = [{"ray.io/node-id": node}, *[{}] * (world_size - 1)]
                bundles = [{self.resource: 1.0}] * world_size
                group = ray.util.placement_group(bundles, bundle_label_selector=labels)
                self._is_ours = True
            self.group: PlacementGroup = group
            wait_for_ray(group.wait, self._describe_wait)
            table = ray.util.placement_group_table(group)["bundles_to_node_id"]
            self.nodes = [table[rank] for rank in sorted(table)]  # of each rank
            self._check(world_size, node)
            del self.nodes[world_size:]
        except BaseException:
            self.close()
            raise

    def _describe_wait(self) -> str:
        return (
            f"{self.group.bundle_count} ranks need a {self.resource} of Ray each, one of them on "
            f"this machine. Ray has {ray.cluster_resources().get(self.resource, 0):g}, of which "
            f"{ray.available_resources().get(self.resource, 0):g} are free (`ray status` shows "
            "what it has): add machines, or lower tensor_parallel_size or pipeline_parallel_size"
        )

    def _check(self, world_size: int, node: str) -> None:
        """Raise ValueError for a placement group that does not fit."""
        specs = self.group.bundle_specs[:world_size]
        amounts = [spec.get(self.resource, 0) for spec in specs]
        if len(amounts) < world_size or min(amounts) < 1 or self.nodes[0] != node:
            raise ValueError(
                f"this process's placement group is {self.group.bundle_specs}; {world_size} ranks "
                f"need {world_size} bundles with a {self.resource} each, the first of them on the "
                "machine of this process. Change the group, or the number of ranks."
            )

    @property
    def is_connected(self) -> bool:
        """Is this process's connection still the one in which this was made?"""
        return name_of_connection() == self._connection

    def num_ranks_beside(self, rank: int) -> int:
        """How many ranks share the node of this one, itself included."""
        return Counter(self.nodes)[self.nodes[rank]]

    def remote(self, work: Any, rank: int) -> Any:
        """A class as an actor, or a function as a task, in the rank's bundle."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=rank)
        return ray.remote(work).options(
            num_cpus=int(self.resource == "CPU"),
            num_gpus=int(self.resource == "GPU"),
            scheduling_strategy=strategy,
            runtime_env={"env_vars": {**wait_policy(), "PYTHONPATH": search_path()}},
        )

    def find_gpu(self) -> int:
        """The index in torch of the GPU of bundle 0."""
        if ray.get_gpu_ids():  # an actor that has its own
            return 0
        task = self.remote(ray.get_gpu_ids, 0).remote()
        wait_for_ray(
            lambda seconds: bool(ray.wait([task], timeout=seconds)[0]),
            lambda: f"Ray does not say which GPU is in {self.group.bundle_specs[0]}",
        )
        gpu, given = str(ray.get(task)[0]), os.environ.get("CUDA_VISIBLE_DEVICES", "")
        visible = [each for each in given.split(",") if each]
        if visible and gpu not in visible:
            raise ValueError(
                f"Ray has reserved GPU {gpu} for rank 0, and CUDA_VISIBLE_DEVICES of this process "
                f"is {given!r}. Unset it here, or set it where Ray was started."
            )
        return visible.index(gpu) if visible else int(gpu)

    def close(self) -> None:
        """Free the bundles, which ends the actors in them. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self._is_ours and self.is_connected:
                ray.util.remove_placement_group(self.group)
        finally:
            CONNECTION.close(self._connection)


class RayConnection:
    """This process's connection to Ray. Ray allows one for each process, so its users are counted
    here: the first engine makes a connection, if the user has not, and the last one ends it. The
    user may end any connection (ray.shutdown) and make another one, which is the user's own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users: Counter[object] = Counter()  # of each connection
        self._ours: object = None  # the connection that was made here
        self._folder: str | None = None  # of the Ray that was started here
        self._is_parents = False
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """Called in a forked child: Ray's threads are the parent's, who may have had the lock."""
        self._lock, self._is_parents = threading.Lock(), ray.is_initialized()

    def open(self) -> object:
        """The name of the connection, made if there is none. Raises ConnectionError if the cluster
        does not answer, ValueError for a Ray Client, RuntimeError in a forked child."""
        if self._is_parents:
            raise RuntimeError(
                "this process was forked from one that uses Ray, and Ray works in the parent only. "
                "Use multiprocessing's start method 'spawn', or fork before Ray is used."
            )
        with self._lock:
            is_client = "://" in os.environ.get("RAY_ADDRESS", "")
            if ray.util.client.ray.is_connected() or (is_client and not ray.is_initialized()):
                raise ValueError(
                    'this process is a Ray Client ("ray://..."), and rank 0 runs in this process, '
                    "which must be on a machine of the cluster. Run the script there, such as by "
                    "`ray job submit`."
                )
            if not ray.is_initialized():
                try:
                    with unchanged_sigterm():
                        self._connect()
                except BaseException:
                    self._ours = name_of_connection()
                    self._disconnect()
                    raise
                self._ours = name_of_connection()
            name = name_of_connection()
            self._num_users[name] += 1
            return name

    def _connect(self) -> None:
        from ray._private import services  # ray.init decides as this does, and does not tell

        self._remove_folder()
        address = services.canonicalize_bootstrap_address(None)  # type: ignore[arg-type]
        if address is not None:
            check_answers(address)
            ray.init()
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        is_short = len(tempfile.gettempdir()) <= LONGEST_FOLDER or os.name == "nt"
        self._folder = tempfile.mkdtemp(prefix="nanoserve-ray-", dir=None if is_short else "/tmp")
        # Half a start would leave processes.
        with only_loopback(), patient_start(), delayed_interrupt():
            ray.init(
                address="local",
                num_cpus=PLACES,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                _temp_dir=self._folder,
                _system_config={
                    "prestart_worker_first_driver": False,
                    "worker_niceness": 0,  # as rank 0; by default 15: what others leave
                },
            )

    def close(self, name: object) -> None:
        """One user of this connection less. With the last one, end what `open` has started."""
        with self._lock:
            self._num_users[name] -= 1
            if not self._num_users[name]:
                del self._num_users[name]
                if name == self._ours:
                    self._disconnect()

    def _disconnect(self) -> None:
        ours, self._ours = self._ours, None
        try:
            if name_of_connection() == ours:
                ray.shutdown()
        finally:
            self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            end_children(self._folder)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


CONNECTION = RayConnection()


def wait_for_ray(is_done: Callable[[float], bool], describe: Callable[[], str]) -> None:
    """Wait until is_done(seconds) is True; it waits so long itself. The log says what `describe`
    says when it takes long. Raises ValueError after STEP_TIMEOUT."""
    limit, seconds, has_told = STEP_TIMEOUT.total_seconds(), 0, False
    while not is_done(1):  # no signal ends this
        seconds += 1
        if seconds >= limit:
            raise ValueError(f"{describe()}. This was so for {limit:.0f} s.")
        if not has_told and seconds >= FIRST_REPORT:
            has_told = True
            logger.warning("%s: waiting up to %.0f s.", describe(), limit)


def check_answers(address: str) -> None:
    """Raise ConnectionError unless something is at host:port. (ray.init tries for minutes.)"""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), FIRST_REPORT).close()
    except unless_signal(OSError) as error:
        advice = "Start it, or correct RAY_ADDRESS"
        if not os.environ.get("RAY_ADDRESS"):
            advice = "It was begun here by `ray start`, and `ray stop` forgets it"
        raise ConnectionError(
            f"Ray's cluster at {address} does not answer ({error}). {advice}. With "
            "RAY_ADDRESS=local, an engine starts a Ray of its own."
        ) from error


def end_children(folder: str) -> None:
    """Kill the processes that this process has started with the folder in their command. Ray's own
    shutdown has done so, but not after a start that has failed."""
    import psutil  # comes with Ray

    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended
            if any(folder in word for word in child.cmdline()):
                child.kill()
                child.wait(EXIT_TIMEOUT)


def name_of_connection() -> object:
    """None without one. Another ray.init() makes another one, also to the same cluster."""
    context = ray.get_runtime_context() if ray.is_initialized() else None
    return context and (context.gcs_address, context.get_job_id())


@contextmanager
def only_loopback() -> Iterator[None]:
    """Ray listens on 127.0.0.1 alone, as it does on macOS and Windows. (On Linux it would replace
    this address by the machine's own.)"""
    from ray._private import ray_constants

    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def patient_start() -> Iterator[None]:
    """A node may take START_LIMIT to start. Ray itself gives it 30 seconds, which are not enough on
    a busy machine."""
    from ray._private import services

    get_node, deadline = services.get_node, time.monotonic() + START_LIMIT

    def wait_for_node(*arguments: Any) -> Any:
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # it is not there yet
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.1)

    services.get_node = wait_for_node
    try:
        yield
    finally:
        services.get_node = get_node


@contextmanager
def unchanged_sigterm() -> Iterator[None]:
    """ray.init sets a handler of its own, in the main thread."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
