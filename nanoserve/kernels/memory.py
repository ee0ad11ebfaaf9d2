"""How much memory does this machine have, and does something fit?

    total        what processes could fill at most: main memory and swap, or a container's share
    available    what a new process could fill now: free pages, and those that caches would give up

What is mapped and filled later (a KV cache, the tables of a step) is compared with the first, what
is filled at once (weights) with the second and the free swap. Only Linux says both. This module
imports no torch; models/weight_files.py and kv_cache.py add what is free on a GPU.

vLLM: vllm/utils/mem_utils.py, vllm/platforms/cpu.py (V1).
"""

from __future__ import annotations

import os
from pathlib import Path


def read_meminfo() -> dict[str, int]:
    """What /proc/meminfo says, in bytes, no more than the container may use; empty where there is
    none (anywhere but on Linux)."""
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if not meminfo.exists():
        return {}
    lines = [line.split(":") for line in meminfo.read_text().splitlines()]
    values = {name: int(rest.split()[0]) * 1024 for name, rest in lines if rest.endswith("kB")}
    text = limit.read_text().strip() if limit.exists() else "max"
    for name in ("MemTotal", "MemAvailable"):
        values[name] = values[name] if text == "max" else min(values[name], int(text))
    return values


def total_memory() -> int | None:
    """Bytes that processes could fill at most; None where the system does not say."""
    if meminfo := read_meminfo():
        return meminfo["MemTotal"] + meminfo.get("SwapTotal", 0)
    if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):  # macOS
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def available_memory() -> int:
    """Bytes that a new process could fill without swapping; 4 GiB where the system does not say."""
    return read_meminfo().get("MemAvailable", 2**32)


def describe_size(num_bytes: int) -> str:
    """describe_size(6144) -> "6.0 KiB"."""
    power = min(max(num_bytes.bit_length() - 1, 0) // 10, 3)
    unit = ("bytes", "KiB", "MiB", "GiB")[power]
    return f"{num_bytes / 1024**power:.{min(power, 1)}f} {unit}"


def check_fits(what: str, number: int, bytes_each: int, memory: int | None, advice: str) -> None:
    """Raise ValueError if so many do not fit. `{most}` of the advice is the number that would.

    check_fits("1000 rows take {size}", ...) -> ValueError: 1000 rows take 7.5 GiB, and
    4.0 GiB are there. ...
    """
    if memory is not None and number * bytes_each > memory:
        size, most = f"{number * bytes_each / 2**30:.1f} GiB", memory // bytes_each
        raise ValueError(
            f"{what.format(size=size)}, and {memory / 2**30:.1f} GiB are there. "
            f"{advice.format(most=most)}"
        )
