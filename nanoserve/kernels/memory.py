"""How much memory does this machine have, and does something fit?

    available    what a new process could fill now: free pages, and those that caches would give up

What must fit (weights, a KV cache) is compared with this and the free swap. Only Linux says so.
This module imports no torch; kv_cache.py adds what is free on a GPU.

vLLM: vllm/utils/mem_utils.py, vllm/platforms/cpu.py (V1).
"""

from __future__ import annotations

from pathlib import Path


def read_meminfo() -> dict[str, int]:
    """What /proc/meminfo says, in bytes, available no more than the container may use; empty where
    there is none (anywhere but on Linux)."""
    lines = [line.split(":") for line in read_text(Path("/proc/meminfo")).splitlines()]
    values = {name: int(rest.split()[0]) * 1024 for name, rest in lines if rest.endswith("kB")}
    if values and (limit := read_text(Path("/sys/fs/cgroup/memory.max")).strip()).isdecimal():
        values["MemAvailable"] = min(values["MemAvailable"], int(limit))
    return values


def read_text(file: Path) -> str:
    """The text of a file; "" if it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""


def available_memory() -> int:
    """Bytes that a new process could fill without swapping; 4 GiB where the system does not say."""
    return read_meminfo().get("MemAvailable", 2**32)


def describe_size(num_bytes: int) -> str:
    """describe_size(6144) -> "6.0 KiB"."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 3)
    return f"{num_bytes / 1024**power:.{min(power, 1)}f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


def check_fits(what: str, num_bytes: int, memory: int | None, advice: str) -> None:
    """Raise ValueError if `what` needs more than this memory (None: it is not known).

    check_fits("the index", 8 * 2**30, 2**30, "Buy some.") -> ValueError: the index needs 8.0 GiB,
    and 1.0 GiB are there. Buy some.
    """
    if memory is not None and num_bytes > memory:
        needed, there = describe_size(num_bytes), describe_size(memory)
        raise ValueError(f"{what} needs {needed}, and {there} are there. {advice}")
