"""How many threads compute on a CPU, and what do waiting ones do?

torch divides an operation among its threads (OpenMP) and waits for the last one. Its defaults suit
a large model on an idle machine: one thread for each core, and a waiting thread keeps its core busy
("spins") in case new work comes soon. Three other cases are common, above all on a laptop:

*Other programs run.* A thread that shares its core computes half of the time, and all others wait
for it. So `Team` looks every half second at what other programs use, and leaves them their cores.

*A thread that has slept is woken beside the one that waits for it*, on the same core, where one of
them waits and the other one cannot compute. Linux spreads them soon, but some virtual machines pack
what seldom computes. So each thread but the calling one keeps to a core of its own (bind_threads in
native_cpu.py), and `load_torch` loads torch with threads that spin for about half a millisecond
(WAITING) before they sleep: the next operation usually begins within some tens of microseconds. A
decode step of a model of 29M parameters in float32 (by oneDNN), 32 sequences, on two cores of a
virtual machine: means of runs of 2 seconds, in milliseconds:

    threads                               idle    beside one busy program    beside two
    2, spin 50 microseconds                 40                         42      44 to 55
    2, spin 500, each on a core       22 to 35                                       56
    as here                                 24                   34 to 43      45 to 63

GNU's OpenMP library, which is in torch's packages for Linux, counts turns of a loop. A turn is one
`pause` of the processor, which takes 3 to 50 nanoseconds: 20,000 take 0.06 to 1 millisecond.

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

import os
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from nanoserve.kernels.memory import read_text

Result = TypeVar("Result")
SMALL_MODEL = 32 * 2**20  # bytes of weights
NUMBER_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
PLACE_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
# Turns of a loop, for GNU's library; milliseconds, for Intel's and LLVM's. Without "active", GNU's
# would not spin while it has more threads than cores, as when several threads of Python compute.
WAITING = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
LOOK = 0.5  # seconds between two looks at what other programs do


@cache
def load_torch() -> None:
    """Import torch so that its waiting threads do what `wait_policy` says. If torch is loaded
    already, this changes nothing. The environment is as before when this returns.

    A process that is forked later computes with one thread: it would wait for ever for the others,
    which only its parent has.
    """
    policy = {} if "torch" in sys.modules else wait_policy()
    os.environ.update(policy)
    try:
        import torch

        torch.get_num_threads()  # some OpenMP libraries read their settings at the first call
    finally:
        for name in policy:
            os.environ.pop(name, None)  # another thread may have done so
    if hasattr(os, "register_at_fork"):  # Unix
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def wait_policy() -> dict[str, str]:
    """WAITING, of this process's environment and of the ranks that it starts; empty if the user has
    set one of its variables."""
    return {} if any(name in os.environ for name in WAITING) else WAITING


def most_threads(model_bytes: int) -> int | None:
    """The largest number of threads that is good for a model on this machine's cores; None if the
    user has set a number, or the cores. model_bytes: of the model's weights."""
    if any(name in os.environ for name in NUMBER_VARIABLES + PLACE_VARIABLES):
        return None
    return 1 if model_bytes < SMALL_MODEL else num_cores()


class Team:
    """Calls what computes, with as many threads as there are cores that no other program uses.

    Every LOOK seconds it reads what the cores did since the last time. (What they did in a pause of
    this engine says nothing.) On 4 cores, in 0.5 seconds:

        all programs computed for     1.9 seconds, 1.0 of them this one
        others use                    (1.9 - 1.0) / 0.5 = 1.8, about 2 cores
        threads                       4 - 2 = 2

    bind(number) gives each thread but the calling one a core of its own.
    """

    def __init__(self, bind: Callable[[int], None]) -> None:
        self.bind = bind
        self.most = self.number = num_cores()
        self.clock, self.busy = time.monotonic(), seconds_of_others()
        self.end = self.clock  # of the last call

    def call(self, action: Callable[..., Result], *args: Any) -> Result:
        """action(*args)."""
        if self.most > 1 and time.monotonic() >= self.clock + LOOK:
            self.look()
            call_with_threads(self.number, self.bind, self.number)
        try:
            return call_with_threads(min(self.number, self.most), action, *args)
        finally:
            self.end = time.monotonic()

    def look(self) -> None:
        """Decide how many threads there are until the next look."""
        clock, busy = time.monotonic(), seconds_of_others()
        in_use = round((busy - self.busy) / (clock - self.clock)) if clock < self.end + LOOK else 0
        self.number = max(1, min(self.most, (os.cpu_count() or 1) - in_use))
        self.clock, self.busy = clock, busy


def seconds_of_others(stat: Path = Path("/proc/stat")) -> float:
    """For how long other programs have computed, on all cores together; 0 on other systems than
    Linux. The file's first line: "cpu  user nice system idle iowait irq softirq ...", in ticks."""
    fields = [int(each) for each in read_text(stat).split()[1:8]]
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
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    # In a container its own control group is the mounted folder itself.
    group = read_text(root / "proc/self/cgroup").strip().rpartition("::/")[2]
    for folder in (root / "sys/fs/cgroup", root / "sys/fs/cgroup" / group):
        quota, _, period = read_text(folder / "cpu.max").strip().partition(" ")  # "50000 100000"
        if quota.isdigit() and period.isdigit():  # "max 100000": no limit
            cores = min(cores, int(quota) // int(period))
    reserved = os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU", "")
    return max(1, cores - int(reserved if reserved.isdecimal() else 0))
