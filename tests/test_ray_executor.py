"""Ranks that are actors of a Ray cluster.

The slow tests start Ray: a small one of two nodes, both on the loopback address of this machine,
for all tests of the module; and those that engines start by themselves.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from oracle import assert_same_greedy

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig
from nanoserve.distributed import cleanup_dist_env_and_memory
from nanoserve.distributed.multiproc import MultiprocExecutor
from nanoserve.distributed.ranks import search_path
from nanoserve.executor import UniprocExecutor, get_executor_cls
from nanoserve.model_runner import ModelRunner
from nanoserve.parallel import RankError

ray = pytest.importorskip("ray")
pytest.importorskip("nanoserve.extras.ray_executor")
import psutil  # noqa: E402
import rays  # noqa: E402
from rays import PATIENCE, wait_for  # noqa: E402

from nanoserve.extras import ray_executor  # noqa: E402
from nanoserve.extras.ray_executor import ActorProcess, RayDistributedExecutor  # noqa: E402

SMALL: dict[str, Any] = {
    "num_kv_blocks": 64,
    "block_size": 4,
    "max_model_len": 128,
    "device": "cpu",
}
ON_RAY: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "ray",
    **SMALL,
}
PROMPT, NUM_TOKENS = [7, 8, 9, 10, 11], 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)


# -- the option --


@pytest.mark.parametrize(
    ("backend", "num_ranks", "executor_cls"),
    [
        (None, 1, UniprocExecutor),
        ("uni", 1, UniprocExecutor),
        ("ray", 1, UniprocExecutor),
        (None, 2, MultiprocExecutor),
        ("mp", 2, MultiprocExecutor),
        ("external_launcher", 2, MultiprocExecutor),
        ("ray", 2, RayDistributedExecutor),
    ],
)
def test_each_backend_has_an_executor(
    backend: Any, num_ranks: int, executor_cls: type[Any]
) -> None:
    config = EngineConfig(distributed_executor_backend=backend, tensor_parallel_size=num_ranks)
    assert get_executor_cls(config) is executor_cls


def test_backends_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'uni', which is one rank, and tensor_parallel_size is 2"):
        EngineConfig(distributed_executor_backend="uni", tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"'raylet'.*uni, mp, ray"):
        EngineConfig(distributed_executor_backend="raylet")  # type: ignore[arg-type]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(ValueError, match="no launcher has started this process"):
        LLM(tensor_parallel_size=2, distributed_executor_backend="external_launcher", **SMALL)


def test_ray_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "nanoserve.extras.ray_executor")
    with pytest.raises(ImportError, match=r'pip install -e "\.\[ray\]"'):
        LLM(tensor_parallel_size=2, distributed_executor_backend="ray", **SMALL)


def test_mp_under_torchrun_starts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the option, torchrun's processes would be the ranks."""
    from nanoserve.distributed import multiproc

    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(multiproc, "SpawnedRanks", lambda config: "spawned")
    config = EngineConfig(distributed_executor_backend="mp", tensor_parallel_size=2)
    assert MultiprocExecutor._make_ranks(config) == "spawned"


def test_an_actor_is_a_process() -> None:
    """ActorProcess has what SpawnedRanks wants to know of subprocess.Popen."""
    future: Future[None] = Future()
    placement = SimpleNamespace(is_connected=False)
    process = ActorProcess(None, SimpleNamespace(future=lambda: future), placement)  # type: ignore[arg-type]
    assert (process.poll(), process.describe_end()) == (-1, "ray.shutdown() was called.")
    process.kill()
    placement.is_connected = True
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.001)
    future.set_exception(ray.exceptions.ActorDiedError())
    process.wait()
    assert process.poll() == -1


def test_a_ray_client_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ValueError, match=r"Ray Client .* must be on a machine of the cluster"):
        LLM(**ON_RAY)


def test_a_rank_has_the_folder_and_the_variables_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the machines that have this folder: a checkpoint may be named from there."""
    seen = []
    monkeypatch.setattr(ray_executor, "run_rank", lambda **task: seen.append(os.getcwd()))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("HF_HOME", "before")
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path.parent, tmp_path / "not here"):
        task = {"num_threads": 1, "num_local_ranks": 1}
        ray_executor.RankActor().run(task, {"HF_HOME": "there"}, str(folder))
    assert seen == [str(tmp_path.parent)] * 2
    assert os.environ["HF_HOME"] == "there"


def test_a_cluster_that_does_not_answer_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    with pytest.raises(ConnectionError, match=rf":{port} does not answer .* correct RAY_ADDRESS"):
        LLM(**ON_RAY)
    monkeypatch.delenv("RAY_ADDRESS")  # the address that `ray start` has left
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    current = tmp_path / "ray" / "ray_current_cluster"
    current.parent.mkdir()
    current.write_text(f"127.0.0.1:{port}")
    with pytest.raises(ConnectionError, match=rf":{port} does not answer .* `ray stop` forgets it"):
        LLM(**ON_RAY)
    assert not ray.is_initialized()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Where each Ray puts its files. None is started."""
    folders: list[Path] = []
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(ray, "init", lambda **options: folders.append(Path(options["_temp_dir"])))
    yield folders
    assert folders
    assert not any(folder.exists() for folder in folders)


def test_the_folder_of_a_ray_has_a_short_name(
    started: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The names of its sockets have 107 characters at most, and macOS's TMPDIR has 49."""
    long = tmp_path / ("long" * 10)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    connection = ray_executor.RayConnection()
    name = connection.open()
    assert started[0].is_dir()
    assert len(str(started[0])) < 45
    connection.close(name)


def test_a_start_that_fails_leaves_no_folder(
    started: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C waits for the end of the start: the processes that half of it began would be lost."""
    begin, ended = ray.init, []

    def init(**options: Any) -> None:
        begin(**options)
        os.kill(os.getpid(), signal.SIGINT)
        ended.append("start")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append("end"))
    with pytest.raises(KeyboardInterrupt):
        ray_executor.RayConnection().open()
    assert ended == ["start", "end"]


def test_a_start_that_fails_leaves_no_process(
    started: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may take longer than Ray allows. What it has started runs already."""
    begin, half = ray.init, []

    def init(**options: Any) -> None:
        begin(**options)
        wait = "import time; time.sleep(1000)"
        half.append(subprocess.Popen([sys.executable, "-c", wait, options["_temp_dir"] + "/logs"]))
        raise Exception("The current node timed out during startup")

    monkeypatch.setattr(ray, "init", init)
    try:
        with pytest.raises(Exception, match="timed out"):
            ray_executor.RayConnection().open()
        assert not psutil.pid_exists(half[0].pid)
    finally:
        half[0].kill()
        half[0].wait(PATIENCE)


def test_a_slow_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray._private import services

    answers: list[Any] = [RuntimeError("not yet"), RuntimeError("not yet"), "the node"]

    def get_node(address: str, node: str) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    monkeypatch.setattr(services, "get_node", get_node)
    with ray_executor.patient_start():
        assert services.get_node("127.0.0.1:1", "id") == "the node"
    assert services.get_node is get_node
    answers.append(RuntimeError("never"))
    monkeypatch.setattr(ray_executor, "START_LIMIT", 0)
    with ray_executor.patient_start(), pytest.raises(RuntimeError, match="never"):
        services.get_node("127.0.0.1:1", "id")


def test_the_users_own_connection_stays(
    started: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made after ray.shutdown() has ended the engine's."""
    connections = [None]  # what name_of_connection() says
    monkeypatch.setattr(ray_executor, "name_of_connection", lambda: connections[-1])
    monkeypatch.setattr(ray, "is_initialized", lambda: connections[-1] is not None)
    monkeypatch.setattr(ray, "shutdown", lambda: connections.append(None))
    begin = ray.init

    def init(**options: Any) -> None:
        begin(**options)
        connections.append(f"connection {len(connections)}")

    monkeypatch.setattr(ray, "init", init)
    connection = ray_executor.RayConnection()
    first = connection.open()
    assert connection.open() == first
    ray.shutdown()
    connections.append("the user's")
    users = connection.open()
    for name in (first, users, first):
        connection.close(name)
        assert connections[-1] == users == "the user's"
    ray.shutdown()
    connection.close(connection.open())
    assert connections[-1] is None


def test_a_forked_child_is_told_that_ray_is_its_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    pid = os.fork()
    if not pid:
        try:
            ray_executor.CONNECTION.open()
        except RuntimeError as error:
            os._exit(7 if "was forked from one that uses Ray" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


@pytest.mark.parametrize(
    ("visible", "index"), [(None, 3), ("", 3), ("2,3", 1), ("0,1", None), ("GPU-1b,GPU-2c", None)]
)
def test_rank_0_takes_the_gpu_of_its_bundle(
    visible: str | None, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray has reserved GPU 3. torch counts those in CUDA_VISIBLE_DEVICES."""
    placement = ray_executor.Placement.__new__(ray_executor.Placement)
    placement.group = SimpleNamespace(bundle_specs=[{"GPU": 1.0}])  # type: ignore[assignment]
    task = SimpleNamespace(remote=lambda: "task")
    monkeypatch.setattr(ray_executor.Placement, "remote", lambda self, work, rank: task)
    monkeypatch.setattr(ray, "get_gpu_ids", list)
    monkeypatch.setattr(ray, "wait", lambda tasks, timeout: (tasks, []))
    monkeypatch.setattr(ray, "get", lambda task: [3])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if index is None:
        with pytest.raises(ValueError, match=f"GPU 3 for rank 0.* is '{visible}'"):
            placement.find_gpu()
    else:
        assert placement.find_gpu() == index


# -- Ray --


def tokens_of(llm: LLM, prompt: list[int] = PROMPT) -> list[int]:
    [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("qwen3", head_dim=32)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Of all Rays here."""
    with rays.ray_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Any]:
    """Two nodes with one place each. Their processes are the user's: no test may end them."""
    with rays.start_cluster(num_nodes=2, num_cpus=1) as cluster:
        yield cluster


@pytest.fixture
def two_nodes(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The engine finds the cluster by RAY_ADDRESS. Nothing of a test stays in it."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    assert not ray.is_initialized()
    ray.init()
    try:
        wait_for(lambda: ray.available_resources().get("CPU") == len(cluster.list_all_nodes()))
        groups = ray.util.placement_group_table().values()
        assert all(group["state"] == "REMOVED" for group in groups)
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_two_nodes_generate(
    two_nodes: Any, folder: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank on each, which find the checkpoint by a relative path; and the cluster is still
    there after close()."""
    monkeypatch.chdir(checkpoint.parent)
    with LLM(checkpoint.name, **ON_RAY) as llm:
        executor = llm.engine.executor
        assert isinstance(executor, RayDistributedExecutor)
        assert len(set(executor.ranks.placement.nodes)) == 2
        assert executor.describe().endswith("2 ranks over gloo, Ray nodes: 2")
        assert executor.ranks.num_local_ranks == 1
        assert_same_greedy(checkpoint, PROMPT, tokens_of(llm), NUM_TOKENS)
    wait_for(lambda: not (rays.processes_of(folder) & set(executor.ranks.pids.values())))
    assert two_nodes.remaining_processes_alive()


@pytest.mark.slow
def test_executor_cls_and_a_connection_of_the_users_own(two_nodes: Any, checkpoint: Path) -> None:
    """close() does not end what the engine has not begun. A killed actor is an error at once."""
    ray.init()
    try:
        options = {**ON_RAY, "executor_cls": RayDistributedExecutor}
        del options["distributed_executor_backend"]
        with LLM(checkpoint, **options) as llm:
            [pid] = llm.engine.executor.ranks.pids.values()
            tokens_of(llm)
            os.kill(pid, signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(RankError, match=f"rank 1 ended, and Ray says:(.|\n)*pid: {pid}"):
                tokens_of(llm)
            assert time.monotonic() - started < 5
            with pytest.raises(RankError):
                llm.engine.executor.check_health()
        assert ray.is_initialized()
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_one_rank(two_nodes: Any, checkpoint: Path) -> None:
    with LLM(checkpoint, executor_cls=RayDistributedExecutor, **SMALL) as llm:
        assert llm.engine.executor.describe().endswith(", 1 rank over gloo, Ray nodes: 1")
        assert_same_greedy(checkpoint, PROMPT, tokens_of(llm), NUM_TOKENS)


class FailsOnRank1(ModelRunner):
    """A mistake of one rank."""

    def launch(self, scheduler_output: Any) -> Any:
        if self.parallel.rank == 1:
            raise ZeroDivisionError("a mistake of rank 1")
        return super().launch(scheduler_output)


@pytest.mark.slow
def test_an_exception_in_an_actor_arrives_with_its_traceback(
    two_nodes: Any, checkpoint: Path
) -> None:
    with (
        LLM(checkpoint, runner_cls=FailsOnRank1, **ON_RAY) as llm,
        pytest.raises(RankError, match=r"rank 1 failed:\nTraceback(.|\n)*a mistake of rank 1"),
    ):
        tokens_of(llm)


@pytest.mark.slow
def test_too_few_places_are_told(
    two_nodes: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_executor, "STEP_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(ValueError, match=r"4 ranks need a CPU of Ray each.* Ray has 2"):
        LLM(checkpoint, **{**ON_RAY, "tensor_parallel_size": 4})


@pytest.mark.slow
def test_an_engine_in_an_actor_takes_its_placement_group(two_nodes: Any, checkpoint: Path) -> None:
    """As in a replica of Ray Serve: the actor holds bundle 0, and its engine's rank 1 is placed in
    bundle 1. A group that is too small is refused, and so is one whose bundle 1 is in use."""
    options = {**ON_RAY, "model": str(checkpoint)}

    class Replica:
        def generate(self, num_ranks: int, limit: int = 60) -> list[int]:
            ray_executor.STEP_TIMEOUT = timedelta(seconds=limit)
            with LLM(**{**options, "tensor_parallel_size": num_ranks}) as llm:
                [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
                return list(output.outputs[0].token_ids)

    ray.init()
    try:
        group = ray.util.placement_group([{"CPU": 1}] * 2)

        def start(bundle: int) -> Any:
            strategy = ray_executor.PlacementGroupSchedulingStrategy(
                group, bundle, placement_group_capture_child_tasks=True
            )
            actor_options = {
                "num_cpus": 1,
                "scheduling_strategy": strategy,
                "runtime_env": {"env_vars": {"PYTHONPATH": search_path()}},
            }
            return ray.remote(Replica).options(**actor_options).remote()

        actor = start(0)
        tokens = ray.get(actor.generate.remote(2), timeout=120)
        assert_same_greedy(checkpoint, PROMPT, tokens, NUM_TOKENS)
        with pytest.raises(ValueError, match="4 ranks need 4 bundles with a CPU each"):
            ray.get(actor.generate.remote(4), timeout=120)
        other = start(1)
        ray.get(other.__ray_ready__.remote(), timeout=120)
        with pytest.raises(ValueError, match="Ray has not started the actors of all 2 ranks"):
            ray.get(actor.generate.remote(2, limit=1), timeout=120)
        ray.util.remove_placement_group(group)
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_close_ends_a_frozen_actor(two_nodes: Any, folder: Path, checkpoint: Path) -> None:
    llm = LLM(checkpoint, **ON_RAY)
    [pid] = llm.engine.executor.ranks.pids.values()
    os.kill(pid, signal.SIGSTOP)
    llm.close()
    wait_for(lambda: pid not in rays.processes_of(folder))


# -- the Ray that an engine starts --


@pytest.fixture
def no_ray(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No Ray to connect to. None is left behind, nor a file of it."""
    own = folder / "t"
    own.mkdir(exist_ok=True)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    yield own
    wait_for(lambda: not rays.processes_of(own))
    assert list(own.iterdir()) == []


@pytest.mark.slow
def test_an_engine_starts_and_ends_its_own_ray(no_ray: Path, checkpoint: Path) -> None:
    """Two engines share it, the first with 2 stages of 2 ranks each, and the second goes on when
    the first is closed. It listens on the loopback address only. The handler of SIGTERM is as it
    was."""
    handler = signal.getsignal(signal.SIGTERM)
    first = LLM(checkpoint, pipeline_parallel_size=2, **ON_RAY)
    with LLM(checkpoint, **ON_RAY) as second:
        assert_same_greedy(checkpoint, PROMPT, tokens_of(first), NUM_TOKENS)
        first.close()
        assert ray.is_initialized()
        assert ray.util.get_node_ip_address() == "127.0.0.1"
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
        assert_same_greedy(checkpoint, PROMPT, tokens_of(second), NUM_TOKENS)
    assert not ray.is_initialized()
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.slow
def test_cleanup_ends_ray(no_ray: Path, checkpoint: Path) -> None:
    """cleanup_dist_env_and_memory(shutdown_ray=True) under an engine that is still open. What is
    left of it does no harm to the next Ray."""
    llm = LLM(checkpoint, **ON_RAY)
    cleanup_dist_env_and_memory(shutdown_ray=True)
    assert not ray.is_initialized()
    with pytest.raises(RankError, match="rank 1 ended, and Ray says"):
        tokens_of(llm)
    with LLM(checkpoint, **ON_RAY) as other:
        llm.close()
        assert_same_greedy(checkpoint, PROMPT, tokens_of(other), NUM_TOKENS)


SCRIPT = """
import sys
from nanoserve import LLM, SamplingParams
llm = LLM(sys.argv[1], tensor_parallel_size=2, distributed_executor_backend=sys.argv[2],
          num_kv_blocks=64, block_size=4, device="cpu")
params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)

def generate():
    [output] = llm.generate([[7, 8, 9, 10, 11]], params, use_tqdm=False)
    print("tokens", *output.outputs[0].token_ids, flush=True)

try:
    generate()
    while sys.argv[3] == "for ever":
        llm.generate([[5, 6]], params, use_tqdm=False)
except KeyboardInterrupt:
    generate()
"""


def run_script(
    folder: Path, checkpoint: Path, backend: str, what: str
) -> AbstractContextManager[subprocess.Popen[str]]:
    file = folder / "script.py"
    file.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
    arguments = launcher if backend == "external_launcher" else []
    scratch = folder if arguments else tempfile.gettempdir()  # torchrun leaves its logs
    return rays.start_process(
        [sys.executable, *arguments, str(file), str(checkpoint), backend, what],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(rays.ROOT), *sys.path]),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(scratch),
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["external_launcher", "ray", "mp"])
def test_torchrun_ray_and_own_ranks_give_the_same_tokens(
    backend: str, no_ray: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """The same script, and nothing left behind although it does not close its LLM."""
    with run_script(tmp_path, checkpoint, backend, "once") as process:
        output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    [line] = re.findall("(?m)^tokens .*", output)
    tokens = [int(word) for word in line.split()[1:]]
    assert_same_greedy(checkpoint, PROMPT, tokens, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_end_of_a_script(
    how: signal.Signals, no_ray: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """A Ctrl-C goes to the whole process group, and does not reach the actors: the script can still
    generate. A killed script can do nothing; its Ray ends all the same."""
    with run_script(tmp_path, checkpoint, "ray", "for ever") as process:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], PATIENCE)[0]
        first = process.stdout.readline()
        os.killpg(process.pid, how)
        output, errors = process.communicate(timeout=PATIENCE)
    if how == signal.SIGINT:
        assert process.returncode == 0, errors
        assert output == first
    else:
        for folder in no_ray.iterdir():  # of logs; only the script would have removed it
            assert folder.name.startswith("nanoserve-ray-")
            subprocess.run(["rm", "-r", str(folder)], check=True)
