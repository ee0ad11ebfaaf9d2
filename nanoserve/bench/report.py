"""The tables on the terminal, and what goes into every result: the command, the machine, the
versions.

vLLM: vllm/benchmarks/lib/.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanoserve.bench.peers import versions

# -- about a run --


def describe_machine(device: str) -> dict[str, Any]:
    """What the figures were measured on."""
    name = cpu_name()
    info: dict[str, Any] = {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(memory_gib(), 1),
        "system": f"{platform.system()} {platform.machine()}",
        "device_name": f"{name}, {os.cpu_count()} cores",
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(torch.device(device))
        info["device_name"] = properties.name
        info["device_memory_gib"] = round(properties.total_memory / 2**30, 1)
        info["cuda"] = torch.version.cuda
    return info


def cpu_name() -> str:
    """The processor's name, as far as the system tells it."""
    file = Path("/proc/cpuinfo")
    if file.exists():
        found = re.search(r"model name\s*:\s*(.*)", file.read_text())
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def memory_gib() -> float:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return 0.0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30


def describe_run(arguments: list[str], device: str) -> dict[str, Any]:
    """Command, date, machine, versions. Of absolute paths in the command, only the last part is
    kept: the rest is private."""
    shown = [re.sub(r"(^|=)/([^=]*/)?", r"\1", argument) for argument in arguments]
    return {
        "command": shlex.join(["python", "bench.py", *shown]),
        "date": date.today().isoformat(),
        "machine": describe_machine(device),
        "versions": versions(("torch", "triton", "transformers")),
    }


# -- on the terminal --


class Column(NamedTuple):
    title: str
    value: Callable[[dict[str, Any]], Any]
    format: str = ""  # of a number


def format_table(rows: list[dict[str, Any]], columns: list[Column]) -> str:
    """Text columns to the left, numbers to the right; None is an empty cell."""
    cells = [[column.title for column in columns]]
    for row in rows:
        values = [column.value(row) for column in columns]
        cells.append(
            [
                "" if value is None else format(value, column.format)
                for value, column in zip(values, columns, strict=True)
            ]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column.format else cell.ljust(width)
            for cell, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in cells
    )


def field(*names: str, scale: float = 1.0) -> Callable[[dict[str, Any]], Any]:
    """A getter: field("itl_ms", "p50")(row) is row["itl_ms"]["p50"]."""

    def get(row: Any) -> Any:
        for name in names:
            row = row.get(name)
            if row is None:
                return None
        return row * scale if isinstance(row, float) else row

    return get


ENGINE = Column("engine", field("engine"))
RATE = Column("output tok/s", field("tokens_per_second"), ".0f")
RATIO = Column("nanoserve is", field("nanoserve_is"), ".2f")
FLOOR = Column("% of floor", field("share_of_floor", scale=100), ".1f")
COLUMNS: dict[str, list[Column]] = {
    "throughput": [
        ENGINE,
        RATE,
        Column("slowest", field("slowest"), ".0f"),
        Column("fastest", field("fastest"), ".0f"),
        RATIO,
        FLOOR,
        Column("same tokens %", field("same_tokens", scale=100), ".0f"),
    ],
    "batch": [ENGINE, Column("requests", field("batch"), "d"), RATE, FLOOR],
    "latency": [
        ENGINE,
        RATE,
        Column("TTFT p50 ms", field("ttft_ms", "p50"), ".1f"),
        Column("p99", field("ttft_ms", "p99"), ".1f"),
        Column("ITL p50 ms", field("itl_ms", "p50"), ".2f"),
        Column("p99", field("itl_ms", "p99"), ".2f"),
        RATIO,
        FLOOR,
    ],
    "scheduler": [
        Column("running", field("num_running"), "d"),
        Column("context", field("context"), "d"),
        Column("schedule us", field("schedule_us"), ".0f"),
        Column("update us", field("update_us"), ".0f"),
        Column("step us", field("step_us"), ".0f"),
    ],
    "memory": [
        Column("KV slots reserved", field("way")),
        Column("hold tokens %", field("used_share", scale=100), ".1f"),
        Column("wasted %", field("wasted_share", scale=100), ".1f"),
        Column("requests at once", field("mean_running"), ".1f"),
    ],
    "kernel": [
        Column("case", field("case")),
        Column("by", field("implementation")),
        Column("us", field("us"), ".1f"),
        Column("GB/s", field("bytes_per_second", scale=1e-9), ".1f"),
        Column("GFLOP/s", field("operations_per_second", scale=1e-9), ".1f"),
        Column("% of bandwidth", field("share_of_bandwidth", scale=100), ".1f"),
        Column("% of rate", field("share_of_rate", scale=100), ".1f"),
    ],
}


def format_suite(name: str, suite: dict[str, Any]) -> str:
    """One suite's result as text."""
    lines = [f"== {name} =="]
    if name == "prefix":
        lines += format_prefix(suite)
    elif name == "steps":
        lines += format_steps(suite)
    else:
        lines += [workload_line(name, suite)] * (workload_line(name, suite) != "")
        lines.append(format_table(suite["rows"], COLUMNS.get(name) or columns_of(suite["rows"])))
        lines += [about_engine(row) for row in suite["rows"] if "description" in row]
    if name == "scheduler":
        growth = ", ".join(f"{n}: {x:.2f}" for n, x in suite["growth_with_context"].items())
        lines.append(f"longest context against shortest, by sequences running: {growth}")
    lines += [f"left out: {who}: {why}" for who, why in suite.get("skipped", {}).items()]
    return "\n".join(lines)


def columns_of(rows: list[dict[str, Any]]) -> list[Column]:
    """For a suite without columns of its own: one for each plain value."""
    plain = {
        name: value
        for row in rows
        for name, value in row.items()
        if isinstance(value, str | int | float)
    }
    formats = {bool: "", str: "", int: "d", float: ".4g"}
    return [Column(name, field(name), formats[type(value)]) for name, value in plain.items()]


def about_engine(row: dict[str, Any]) -> str:
    """What an engine said about itself: half of the differences between engines are settings."""
    preemptions = row.get("num_preemptions")
    more = "" if preemptions is None else f", {preemptions} preemptions"
    return f"{row['engine']}: {row['description']}{more}; up in {row['start_seconds']:.0f} s"


def workload_line(name: str, suite: dict[str, Any]) -> str:
    """What was asked for, and what it could be at best."""
    if name in ("throughput", "latency"):
        low, high = suite["lengths"]
        how = "at once" if name == "throughput" else "one by one"
        return (
            f"{suite['num_requests']} requests {how}, {low} to {high} tokens in and out, "
            f"{suite['num_output_tokens']} output tokens; floor: "
            f"{suite['floor_tokens_per_second']:.0f} tok/s"
        )
    if name == "memory":
        return (
            f"{suite['num_requests']} requests, KV cache of {suite['num_slots']} tokens, maximum "
            f"{suite['max_model_len']} per request"
        )
    return suite.get("note", "")


def format_prefix(suite: dict[str, Any]) -> list[str]:
    cost = suite["cost_at_no_hits"]
    return [
        f"{suite['num_requests']} requests with the first {suite['prefix_len']} tokens in common",
        f"shared tokens never computed again: {suite['hit_rate']:.1%}",
        f"against prefix caching off: {suite['speed_up']:.2f} times as fast",
        f"cost where nothing is shared: {cost['by_the_clock']:+.2%} by the clock, "
        f"{cost['by_the_books']:+.2%} by the books alone",
    ]


def format_steps(suite: dict[str, Any]) -> list[str]:
    parts = list(dict.fromkeys(part for row in suite["rows"] for part in row["parts_ms"]))
    columns = [
        ENGINE,
        Column("steps", field("num_steps"), "d"),
        Column("step ms", field("step_ms"), ".2f"),
        *(Column(part, field("parts_ms", part), ".2f") for part in parts),
        Column("GPU", field("gpu_ms"), ".2f"),
    ]
    return [format_table(suite["rows"], columns)]


def format_run(result: dict[str, Any]) -> str:
    """What the figures are of."""
    machine, limits = result["machine"], result["limits"]
    found = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join(
        [
            f"model: {result['model']}, {result['parameters'] / 1e6:.1f} million parameters, "
            f"{result['dtype']}",
            f"machine: {machine['device_name']}, {machine['threads']} threads, load before the "
            f"run {machine['load']}; "
            f"{limits['bandwidth'] / 1e9:.1f} GB/s, {limits['rate'] / 1e9:.1f} GFLOP/s measured",
            f"versions: {found}",
            f"command: {result['command']}",
        ]
    )
