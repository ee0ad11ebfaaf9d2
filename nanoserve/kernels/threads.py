"""How many threads compute on a CPU, and what do waiting ones do?

torch divides an operation among its threads (OpenMP) and waits for the last one. Its defaults suit
a large model on an idle machine: one thread for each core, and a waiting thread keeps its core busy
("spins") in case new work comes soon. Three other cases are common, above all on a laptop:

*Other programs run.* A thread that shares its core computes half of the time, and all others wait
for it. So `Team` looks every half second at what other programs use, and leaves them their cores.

*A thread that has slept is woken beside the one that waits for it*, on the same core, where one of
them waits and the other one cannot compute. Linux spreads them soon, but some virtual machines pack
what seldom computes. So each thread but the calling one keeps to a core of its own (bind_threads in
native_cpu.py), and `load_torch` loads torch with threads that spin for SPIN microseconds before
they sleep: the next operation usually begins within some tens of them. A decode step of a model of
29M parameters, 32 sequences, on two cores of a virtual machine: means of runs of 2 seconds, in
milliseconds:

    threads                               idle    beside one busy program    beside two
    2, spin 50 microseconds                 40                         42      44 to 55
    2, spin 500, each on a core       22 to 35                                       56
    as here                                 24                   34 to 43      45 to 63

Only GNU's OpenMP library can spin for a time of one's choice. It is in torch's packages for Linux.
With another one, waiting threads sleep.

*The model is tiny.* Even so, dividing an operation takes longer than it saves. `most_threads` gives
a model of less than SMALL_MODEL bytes one thread.

A container may have a quota of CPU time, such as `docker run --cpus=1`, and torch does not know it.
`num_cores` reads the quota. VLLM_CPU_NUM_OF_RESERVED_CPU takes cores away for other programs.

What the user sets always wins: OMP_NUM_THREADS or MKL_NUM_THREADS for the number (of the whole
engine: several ranks on one machine divide it among themselves), OMP_PROC_BIND, OMP_PLACES or
GOMP_CPU_AFFINITY for the cores, OMP_WAIT_POLICY (active: spin; passive: sleep), GOMP_SPINCOUNT or
KMP_BLOCKTIME for the waiting.

This module imports torch in its functions only. Left out: control groups of version 1, and quotas
of a group around this process's own.

vLLM: vllm/v1/worker/cpu_worker.py (threads on cores), vllm/env_override.py (variables that must be
set before torch is imported).
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")
SMALL_MODEL = 32 * 2**20  # bytes of weights
NUMBER_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
PLACE_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
WAITING_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPIN = 500  # microseconds for which a waiting thread spins before it sleeps
LOOK = 0.5  # seconds between two looks at what other programs do
FIRST_USERS: list[int] = []  # one entry: the first process that has built an engine


def load_torch() -> None:
    """Import torch so that its waiting threads do what `wait_policy` says. If torch is loaded
    already, this changes nothing. The environment is as before when this returns.

    Raises RuntimeError in a child that was forked after its parent has called this, if torch would
    use several threads there: it would wait for ever for threads that only the parent has.
    """
    policy = {} if "torch" in sys.modules else wait_policy()
    os.environ.update(policy)
    try:
        import torch

        torch.get_num_threads()  # some OpenMP libraries read their settings at the first call
    finally:
        for name in policy:
            os.environ.pop(name, None)  # another thread may have done so
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
    if any(name in os.environ for name in WAITING_VARIABLES):
        return {}
    torch = importlib.util.find_spec("torch")  # not imported
    folders = (torch and torch.submodule_search_locations) or ()
    if not any(path for folder in folders for path in Path(folder).glob("lib/libgomp*")):
        return {"OMP_WAIT_POLICY": "passive"}
    # Without "active" nothing would spin while several threads of Python compute: GNU's library
    # then has more threads than cores.
    count = str(round(SPIN / turn_microseconds()))
    return {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": count}


def turn_microseconds() -> float:
    """One turn of the loop in which a thread of GNU's library waits is one `pause`: 3 to 50
    nanoseconds, depending on the processor. So a thousand of them are timed, as machine code; 0.05
    where that cannot be done."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return 0.05
    try:
        code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # a system that runs no code from memory that can be written
        return 0.05
    code.write(bytes.fromhex("f390 ffcf 75fa c3"))  # again: pause; dec edi; jnz again; ret
    run = ctypes.CFUNCTYPE(None, ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    times = []
    for _ in range(9):
        start = time.perf_counter()
        run(1000)
        times.append(1000 * (time.perf_counter() - start))
    return min(times)  # the shortest: undisturbed


def rank_environment() -> dict[str, str]:
    """This process's environment for a rank that it starts: its threads wait in the same way."""
    return {**os.environ, **wait_policy()}


def most_threads(model_bytes: int) -> int | None:
    """The largest number of threads that is good for a model on this machine's cores; None if the
    user has set a number, or the cores. model_bytes: of the model's weights."""
    if any(name in os.environ for name in NUMBER_VARIABLES + PLACE_VARIABLES):
        return None
    return 1 if model_bytes < SMALL_MODEL else num_cores()


class Team:
    """Calls what computes, with as many threads as there are cores that no other program uses.

    Every LOOK seconds it reads what the cores did since the last time. On 4 cores, in 0.5 seconds:

        all programs computed for     1.9 seconds, 1.0 of them this one
        others use                    (1.9 - 1.0) / 0.5 = 1.8, about 2 cores
        threads                       4 - 2 = 2

    bind(number) gives each thread but the calling one a core of its own.
    """

    def __init__(self, bind: Callable[[int], None]) -> None:
        self.bind = bind
        self.most = self.number = num_cores()
        self.clock, self.busy = time.monotonic(), seconds_of_others()
        self.next_look = 0.0

    def call(self, action: Callable[..., Result], *args: Any) -> Result:
        """action(*args)."""
        if self.most > 1 and time.monotonic() >= self.next_look:
            self.look()
            call_with_threads(self.number, self.bind, self.number)
        return call_with_threads(min(self.number, self.most), action, *args)

    def look(self) -> None:
        """Decide how many threads there are until the next look."""
        clock, busy = time.monotonic(), seconds_of_others()
        in_use = round((busy - self.busy) / (clock - self.clock))
        self.number = max(1, min(self.most, (os.cpu_count() or 1) - in_use))
        self.clock, self.busy, self.next_look = clock, busy, clock + LOOK


def seconds_of_others(stat: Path = Path("/proc/stat")) -> float:
    """For how long other programs have computed, on all cores together; 0 on other systems than
    Linux. The file's first line: "cpu  user nice system idle iowait irq softirq ...", in ticks."""
    fields = [int(each) for each in _read(stat).split()[1:8]]
    if not fields:
        return 0.0
    ticks = sum(fields) - fields[3] - fields[4]
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def call_with_threads(number: int, action: Callable[..., Result], *args: Any) -> Result:
    """action(*args), with `number` threads of torch for what the calling thread computes. (A thread
    whose first computation falls into this call keeps `number`.)"""
    import torch

    before = torch.get_num_threads()  # the calling thread's
    try:
        torch.set_num_threads(number)
        return action(*args)
    finally:
        torch.set_num_threads(before)


def num_cores(root: Path = Path("/")) -> int:
    """Cores that this process may keep busy: those it may run on, within its quota, without those
    that are reserved. At least 1.

    A quota of 1.5 cores counts as 1: with two threads, both would often stop for the rest of a
    period, and the one that stops first keeps the other waiting.
    """
    has_affinity = hasattr(os, "sched_getaffinity")  # Linux
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    # In a container its own control group is the mounted folder itself.
    group = _read(root / "proc/self/cgroup").strip().rpartition("::/")[2]
    for folder in (root / "sys/fs/cgroup", root / "sys/fs/cgroup" / group):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")  # "50000 100000"
        if quota.isdigit() and period.isdigit():  # "max 100000": no limit
            cores = min(cores, int(quota) // int(period))
    reserved = os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "")
    return max(1, cores - int(reserved if reserved.isdecimal() else 0))


def _read(file: Path) -> str:
    """The text of a file; "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
