"""How many threads compute on a CPU, and what do waiting ones do?

torch divides an operation among its threads (OpenMP) and waits for the last one. Its defaults suit
a large model on an idle machine: one thread for each core, and a waiting thread keeps its core busy
("spins") in case new work comes soon. Two other cases are common, above all on a laptop:

*Other programs run.* A spinning thread takes the time that the thread it waits for needs. On two
cores beside two busy programs, decoding became up to 100 times slower. A thread that sleeps takes
nothing, but waking it takes as long as a small operation. The next operation usually begins within
microseconds. So `load_torch` loads torch with threads that spin for a moment (SPIN_BUSY, or
SPIN_IDLE if the machine had a core to spare in the last minute) and then sleep. A decode of a model
of 29M parameters on two cores, in milliseconds:

    waiting threads            idle cores    beside two busy programs
    sleep                             7.9                         5.6
    spin 50 microseconds              4.6                         7.8
    spin 500 microseconds             4.0                        27.2

Only GNU's OpenMP library can do so. It is in torch's packages for Linux. With another one, waiting
threads sleep.

*The model is tiny.* Even so, dividing an operation takes longer than it saves. `most_threads` gives
a model of less than SMALL_MODEL bytes one thread. The demo model is then as fast as on two threads
that spin, and twice as fast as on two that sleep.

A container may have a quota of CPU time, such as `docker run --cpus=1`, and torch does not know it.
`num_cores` reads the quota. The number of threads never exceeds it. VLLM_CPU_NUM_OF_RESERVED_CPU
takes cores away for other programs; replicas divide the cores of a machine by it.

What the user sets always wins: OMP_NUM_THREADS or MKL_NUM_THREADS for the number (of the whole
engine: several ranks on one machine divide it among themselves), OMP_WAIT_POLICY
(active: spin; passive: sleep), GOMP_SPINCOUNT or KMP_BLOCKTIME for the waiting.

This module imports torch in `load_torch` only.

vLLM: vllm/v1/worker/cpu_worker.py (threads on cores), vllm/env_override.py (variables that must be
set before torch is imported).
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import math
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
SMALL_MODEL = 32 * 2**20  # bytes of weights
NUMBER_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPIN_BUSY, SPIN_IDLE = 50, 200  # microseconds for which a waiting thread spins before it sleeps
# One entry, when load_torch has told torch's OpenMP library what waiting threads do. The library
# reads its settings once, and cannot be asked for them.
TOLD_TO: list[str] = []
FIRST_USERS: list[int] = []  # one entry: the first process that has built an engine


def load_torch() -> None:
    """Import torch so that its waiting threads do what `wait_policy` says, unless the user has set
    one of WAITING_VARIABLES. If torch is loaded already, this changes nothing.

    The environment is as before when this returns: other programs are told nothing.

    Raises RuntimeError in a child that was forked after its parent has called this, if torch would
    use several threads there: it would wait for ever for threads that only the parent has. So it
    does if the working directory has been deleted, as torch's libraries would end the process.
    """
    try:
        os.getcwd()
    except FileNotFoundError as error:
        message = "the working directory has been deleted; change to another one."
        raise RuntimeError(message) from error
    policy = {} if "torch" in sys.modules else wait_policy()
    os.environ.update(policy)
    try:
        import torch

        torch.get_num_threads()  # some OpenMP libraries read their settings at the first call
    finally:
        for name in policy:
            os.environ.pop(name, None)  # another thread may have done so
        if policy:
            TOLD_TO.append("spin for a moment" if "GOMP_SPINCOUNT" in policy else "sleep")
    if not FIRST_USERS:
        FIRST_USERS.append(os.getpid())
    if FIRST_USERS[0] != os.getpid() and torch.get_num_threads() > 1:
        raise RuntimeError(
            f"process {FIRST_USERS[0]} has built an LLM and then forked this process, in which "
            "torch's threads would never answer. Use multiprocessing's start method 'spawn', fork "
            "before the first LLM is built, or call torch.set_num_threads(1) here first."
        )


def wait_policy() -> dict[str, str]:
    """The environment in which waiting threads spin for a moment, or sleep if torch comes with
    another OpenMP library than GNU's. Empty if the user has set one of WAITING_VARIABLES."""
    if _is_set(WAITING_VARIABLES):
        return {}
    torch = importlib.util.find_spec("torch")  # not imported
    folders = (torch and torch.submodule_search_locations) or ()
    if not any(path for folder in folders for path in Path(folder).glob("lib/libgomp*")):
        return {"OMP_WAIT_POLICY": "passive"}
    # Without "active" nothing would spin while several threads of Python compute: GNU's library
    # then has more threads than cores.
    return {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": str(spin_count())}


def spin_count() -> int:
    """Turns of the loop in which a thread of GNU's library waits: for SPIN_IDLE microseconds if the
    last minute left a core unused, else for SPIN_BUSY."""
    is_idle = os.getloadavg()[0] <= num_cores() - 1
    return round((SPIN_IDLE if is_idle else SPIN_BUSY) / turn_microseconds())


def turn_microseconds() -> float:
    """One turn is one `pause`: 3 to 50 nanoseconds, depending on the processor. So a thousand of
    them are timed, as machine code; 0.05 where that cannot be done."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return 0.05
    try:
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a system that runs no code from memory that can be written
        return 0.05
    code.write(bytes.fromhex("f390 ffcf 75fa c3"))  # again: pause; dec edi; jnz again; ret
    run = ctypes.CFUNCTYPE(None, ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    starts = [(time.perf_counter(), run(1000))[0] for _ in range(9)]  # the shortest: undisturbed
    return 1000 * min(end - start for start, end in itertools.pairwise(starts))


def rank_environment() -> dict[str, str]:
    """This process's environment for a rank that it starts: its threads wait in the same way."""
    return {**os.environ, **wait_policy()}


def _is_set(names: tuple[str, ...]) -> bool:
    """Has the user set one of these environment variables?"""
    return any(name in os.environ for name in names)


def waiting_threads() -> str:
    """What torch's waiting threads do: "sleep", "spin for a moment" or "spin"."""
    is_passive = os.environ.get("OMP_WAIT_POLICY", "").lower() == "passive"
    never_spin = os.environ.get("GOMP_SPINCOUNT") == "0" or os.environ.get("KMP_BLOCKTIME") == "0"
    return TOLD_TO[0] if TOLD_TO else "sleep" if is_passive or never_spin else "spin"


def most_threads(model_bytes: int) -> int | None:
    """The largest number of threads that is good for a model on this machine's cores; None if the
    user has set a number. model_bytes: of the model's weights."""
    if _is_set(NUMBER_VARIABLES):
        return None
    return 1 if model_bytes < SMALL_MODEL else num_cores()


def call_with_threads(
    number: int, setters: Seq[Callable[[int], Any]], action: Callable[..., Result], *args: Any
) -> Result:
    """action(*args), with `number` threads of torch for what the calling thread computes. setters:
    thread_setters(), which is looked up once because it takes a while.

    torch.set_num_threads would also set the default of threads that start later, so a thread whose
    first computation falls into this call would keep `number` for ever. OpenMP and MKL can set the
    number of the calling thread alone. Without their functions nothing is limited.

    (No context manager: of two quick Ctrl-C Python would drop one while it closes a generator.)
    """
    import torch

    before = torch.get_num_threads()  # the calling thread's
    if not setters or number == before:
        return action(*args)
    set_openmp, *set_mkl = setters
    mkl_before: list[int] = []
    try:
        mkl_before += [set_threads(number) for set_threads in set_mkl]
        set_openmp(number)
        return action(*args)
    finally:
        set_openmp(before)
        for set_threads, threads in zip(set_mkl, mkl_before or [0], strict=False):
            set_threads(threads)  # 0: as before the first call, no number of this thread's own


def thread_setters() -> tuple[Callable[[int], Any], ...]:
    """The functions in torch's library that set the calling thread's number of threads: OpenMP's,
    then MKL's if it is there. () where the library has neither, as on Windows."""
    import torch

    folder = Path(torch.__file__).parent / "lib"
    for file in (folder / "libtorch_cpu.so", folder / "libtorch_cpu.dylib"):
        if file.exists():
            library = ctypes.CDLL(str(file))
            if hasattr(library, "omp_set_num_threads"):
                names = ("omp_set_num_threads", "MKL_Set_Num_Threads_Local")
                return tuple(getattr(library, name) for name in names if hasattr(library, name))
    return ()


def num_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: those it may run on, within its quota, without those
    that are reserved. At least 1.

    A quota of 1.5 cores counts as 1: with two threads, both would often stop for the rest of a
    period, and the one that stops first keeps the other waiting.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    quota, reserved = cpu_quota(root), os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "")
    within = cores if quota is None else min(cores, math.floor(quota))
    return max(1, within - int(reserved if reserved.isdecimal() else 0))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of CPU time that control groups grant this process; None: no limit.

    A group's limit binds the groups inside it too, so the smallest limit on the way up counts. In a
    container the path may not exist; its own group is then the mounted folder itself.
    """
    quotas = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")  # "": version 2
        parts = Path(path.lstrip("/")).parts
        for depth in range(len(parts) + 1):
            quotas.append(_quota_of(mount.joinpath(*parts[:depth])))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    """The limit of one control group: "50000 100000" (microseconds) in cpu.max (version 2), or the
    same two numbers in two files (version 1). "max" and -1 mean no limit."""
    numbers = _read(folder / "cpu.max").split()
    numbers = numbers or [
        _read(folder / "cpu.cfs_quota_us").strip(),
        _read(folder / "cpu.cfs_period_us").strip(),
    ]
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return None
    return int(numbers[0]) / int(numbers[1]) if int(numbers[1]) else None


def _read(file: Path) -> str:
    """The text of a file; "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def slow_threads_hint(num_threads: int) -> str | None:
    """What makes this number of threads slow on this machine, and what to do; None if nothing does.

    The load is the average of the last minute, where the system tells it.
    """
    cores = num_cores()
    if num_threads > cores:
        return (
            f"{num_threads} threads on {cores} {'core' if cores == 1 else 'cores'} wait for each "
            f"other. Set OMP_NUM_THREADS={cores}."
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if num_threads > 1 and load >= cores and waiting_threads() == "spin":
        return (
            f"other programs use the cores (load {load:.1f} on {cores} cores), and torch's waiting "
            "threads spin, which can make each step many times slower. Set OMP_WAIT_POLICY=passive "
            "before Python starts, or import nanoserve and build the LLM before torch is imported."
        )
    return None
