"""How many threads compute, what waiting ones do, and whose word counts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from nanoserve.executor import UniprocExecutor
from nanoserve.kernels import threads
from nanoserve.kernels.threads import (
    NUMBER_VARIABLES,
    SMALL_MODEL,
    SPIN_COUNT,
    WAITING_VARIABLES,
    call_with_threads,
    cpu_quota,
    most_threads,
    num_cores,
    rank_environment,
    slow_threads_hint,
    thread_setters,
    waiting_threads,
)

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a user who has set nothing."""
    for name in (*NUMBER_VARIABLES, *WAITING_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "TOLD_TO", [])


# -- control groups --


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


QUOTAS = {
    "no control groups": ({}, None),
    "version 2, in a container": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"},
        0.5,
    ),
    "version 2, no limit": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        None,
    ),
    "version 2, the outer group's limit is the smaller one": (
        {
            "proc/self/cgroup": "0::/user/shell\n",
            "sys/fs/cgroup/user/cpu.max": "150000 100000",
            "sys/fs/cgroup/user/shell/cpu.max": "800000 100000",
        },
        1.5,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "7:memory:/box\n3:cpuset:/\n2:cpu,cpuacct:/box\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000\n",
        },
        3.0,
    ),
    "version 1, in a container: the path is the host's": (
        {
            "proc/self/cgroup": "2:cpuacct,cpu:/docker/1234\n0::/docker/1234\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        2.0,
    ),
    "version 1, no limit": (
        {
            "proc/self/cgroup": "2:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        None,
    ),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_cpu_quota(name: str, tmp_path: Path) -> None:
    files, quota = QUOTAS[name]
    assert cpu_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("quota", "cores"), [("10000", 1), ("150000", 1), ("250000", 2), ("9900000", 4), ("max", 4)]
)
def test_num_cores_is_what_may_be_kept_busy(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole cores of the quota, at least one, and no more than the process may run on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000"}
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
    root = write(tmp_path, files)
    assert num_cores(root) == cores
    for reserved, left in (("1", cores - 1), ("99", 1), ("x", cores)):
        monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", reserved)
        assert num_cores(root) == max(1, left)


# -- the number of threads --


def test_most_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for a tiny model, else one for each core; no limit if the user has set a number."""
    monkeypatch.setattr(threads, "num_cores", lambda: 6)
    assert most_threads(SMALL_MODEL - 1) == 1
    assert most_threads(SMALL_MODEL) == 6
    for name in NUMBER_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "12")
            assert most_threads(1) is None


@pytest.mark.skipif(not thread_setters(), reason="torch's library cannot limit one thread here")
@pytest.mark.parametrize("method", ["execute_model", "launch"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_step_runs_on_its_own_number_of_threads(
    fails: bool, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after it, and when it fails, torch has the application's number. A thread that
    computes for the first time while a step runs has that number, too, and keeps it."""
    executor, seen, others = UniprocExecutor.__new__(UniprocExecutor), [], []
    has_begun, step_has_ended = threading.Event(), threading.Event()

    def other_thread() -> None:
        others.append(torch.get_num_threads())
        has_begun.set()
        step_has_ended.wait()
        others.append(torch.get_num_threads())

    def run(step: object) -> None:
        seen.append(torch.get_num_threads())
        if not has_begun.is_set():
            other.start()
            has_begun.wait()
        if fails:
            raise MemoryError("no memory")

    executor._thread_setters = thread_setters()
    executor.runner = cast(Any, SimpleNamespace(execute_model=run, launch=run))
    other = threading.Thread(target=other_thread)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for most, expected in ((1, 1), (2, 2), (8, 3), (None, 3)):
            monkeypatch.setattr(executor, "_most_threads", most)
            assert executor.num_threads == expected
            with pytest.raises(MemoryError) if fails else nullcontext():
                getattr(executor, method)(None)
            assert seen.pop() == expected
            assert torch.get_num_threads() == 3
    finally:
        step_has_ended.set()
        other.join()
        torch.set_num_threads(before)
    assert others == [3, 3]


@pytest.mark.skipif(not thread_setters(), reason="torch's library cannot limit one thread here")
def test_the_limit_reaches_every_library() -> None:
    """Also after the application has set a number, which binds MKL on its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        limited = call_with_threads(2, thread_setters(), torch.__config__.parallel_info)
        assert not re.findall(r"(?:omp|mkl)_get_max_threads\(\) : (?!2\n)", limited)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


# -- waiting threads --


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh process in which nothing is set but `environment`."""
    names = (*NUMBER_VARIABLES, *WAITING_VARIABLES)
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    path = os.pathsep.join(filter(None, [environment.pop("PYTHONPATH", ""), str(ROOT)]))
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )


REPORT = """
import os
from nanoserve.kernels.threads import load_torch, waiting_threads
load_torch()
print(waiting_threads(), os.environ.get("OMP_WAIT_POLICY"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only libgomp prints what it has read")
def test_openmp_is_told_how_to_wait_and_nobody_else() -> None:
    """OpenMP says what it has read; the environment is as before."""
    done = python(REPORT, OMP_DISPLAY_ENV="verbose")
    assert f"GOMP_SPINCOUNT = '{SPIN_COUNT}'" in done.stderr
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in done.stderr
    assert done.stdout == "spin for a moment None\n"


FAKE_TORCH = """
import os
print("loaded with", os.environ.get("OMP_WAIT_POLICY"))
def get_num_threads():
    print("asked with", os.environ.get("OMP_WAIT_POLICY"))
    return 2
"""


@pytest.mark.parametrize(
    ("first", "environment", "printed"),
    [
        ("", {}, "loaded with passive asked with passive sleep None"),
        ("", {"OMP_WAIT_POLICY": "active"}, "loaded with active asked with active spin active"),
        (
            "",
            {"OMP_WAIT_POLICY": "PASSIVE"},
            "loaded with PASSIVE asked with PASSIVE sleep PASSIVE",
        ),
        ("", {"GOMP_SPINCOUNT": "1000"}, "loaded with None asked with None spin None"),
        ("import torch", {}, "loaded with None asked with None spin None"),
        ("from nanoserve import LLM", {}, "loaded with passive asked with passive sleep None"),
    ],
)
def test_the_users_choice_counts(
    first: str, environment: dict[str, str], printed: str, tmp_path: Path
) -> None:
    """Whoever sets a variable, or imports torch first, has chosen. A small file stands in for
    torch."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    done = python(f"{first}\n{REPORT}", PYTHONPATH=str(tmp_path), **environment)
    assert " ".join(done.stdout.split()) == printed


def test_a_benchmark_sleeps_while_its_engines_compute(tmp_path: Path) -> None:
    """Its threads would keep a core busy in every measurement."""
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    code = "from nanoserve.bench.cli import set_threads\nset_threads(None)"
    done = python(code, PYTHONPATH=str(tmp_path))
    assert "loaded with passive" in done.stdout


def test_ranks_are_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With GNU's OpenMP library, threads that wait spin for a moment; with another one they
    sleep."""
    write(tmp_path, {"torch/__init__.py": "", "torch/lib/libomp.dylib": ""})
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch")
    assert rank_environment() == {**os.environ, "OMP_WAIT_POLICY": "passive"}
    write(tmp_path, {"torch/lib/libgomp.so.1": ""})
    spins = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": str(SPIN_COUNT)}
    assert rank_environment() == {**os.environ, **spins}
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert rank_environment() == dict(os.environ)


# -- the hint --


def test_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than cores; threads that spin while other programs run. Else none."""
    monkeypatch.setattr(threads, "num_cores", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (3.5, 0.0, 0.0), raising=False)
    assert waiting_threads() == "spin"
    assert "Set OMP_NUM_THREADS=2" in str(slow_threads_hint(4))
    assert "load 3.5 on 2 cores" in str(slow_threads_hint(2))
    assert slow_threads_hint(1) is None, "one thread waits for nobody"
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert slow_threads_hint(2) is None
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 9.0, 9.0), raising=False)
    assert slow_threads_hint(2) is None


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps the folder of a process")
def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    """torch's libraries would end the process without an exception."""
    code = "import os\nos.rmdir(os.getcwd())\nfrom nanoserve import LLM\nLLM()"
    (tmp_path / "gone").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "gone",
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "RuntimeError: the working directory has been deleted; change to" in done.stderr
