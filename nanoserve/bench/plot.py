"""The pictures of one result: throughput by batch size, the parts of a step's time, the roofline,
latency and goodput by the rate of requests.

    python bench.py --plot speed.png

Needs matplotlib (`pip install nanoserve[notebooks]`), which no other module imports. A suite that
the result does not hold has no picture.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from nanoserve.bench.report import STEP_PARTS

SUITES = ("batch", "steps", "serve")  # that have pictures
COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#97bbf5", "#9c6b4e")


def draw(result: dict[str, Any], file: Path) -> None:
    """Write one picture. Raises ValueError if matplotlib is missing or there is nothing to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib.") from error
    suites = result["suites"]
    panels = []
    if "batch" in suites:
        panels.append(partial(draw_batch, rows=suites["batch"]["rows"]))
    if "steps" in suites:
        panels.append(partial(draw_steps, rows=suites["steps"]["rows"]))
    if "batch" in suites:
        rows = [row for row in suites["batch"]["rows"] if row["engine"] == "nanoserve"]
        panels.append(partial(draw_roofline, rows=rows, limits=result["limits"]))
    if "serve" in suites:
        rows = suites["serve"]["rows"]
        panels.append(partial(draw_ttft, rows=rows, limits=suites["serve"]["limits_ms"]))
        panels.append(partial(draw_goodput, rows=rows))
    if not panels:
        raise ValueError(f"--plot draws the suites {', '.join(SUITES)}; this run has none of them.")
    figure = Figure(figsize=(5.6 * len(panels), 4.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
        axes.spines[["top", "right"]].set_visible(False)
    machine = result["machine"]["device_name"]
    figure.suptitle(f"{result['model']} in {result['dtype']} on {machine}", fontsize=11)
    figure.savefig(file, dpi=130)


def draw_batch(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Output tokens per second over the number of requests, a line for each engine."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        lines.setdefault(row["engine"], []).append((row["batch"], row["tokens_per_second"]))
    for (engine, points), colour in zip(lines.items(), COLOURS, strict=False):
        axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=engine)
    sizes = sorted({row["batch"] for row in rows})
    axes.set(xlabel="requests at once", ylabel="output tokens per second")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.set_title("Throughput by batch size", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def draw_steps(axes: Any, rows: list[dict[str, Any]]) -> None:
    """A bar for each engine: the parts of its mean step; on a GPU a second bar for the device."""
    bars: list[tuple[str, dict[str, float]]] = []
    for row in rows:
        bars.append((row["engine"], row["parts_ms"]))
        if row["gpu_ms"] is not None:
            bars.append(("on the device", {"GPU": row["gpu_ms"]}))
    longest = max(sum(parts.values()) for _, parts in bars)
    colours = {**dict(zip(STEP_PARTS, COLOURS, strict=True)), "GPU": "#bbbbbb"}
    for height, (_, parts) in enumerate(bars):
        left = 0.0
        for part, width in parts.items():
            axes.barh(height, width, left=left, color=colours[part], height=0.5)
            if width > 0.12 * longest:  # in a narrower bar the text has no room
                text = f"{part}\n{width:.3g} ms"
                axes.text(left + width / 2, height, text, ha="center", va="center", fontsize=8)
            left += width
    for part in dict.fromkeys(part for _, parts in bars for part in parts):
        axes.barh(0, 0, color=colours[part], label=part)  # for the legend
    axes.set_yticks(range(len(bars)), [label for label, _ in bars])
    axes.set_ylim(len(bars) - 0.4, -1.1)
    axes.set_xlabel("milliseconds of a step (mean)")
    axes.set_title("Where a step's time goes", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper right")


def draw_roofline(axes: Any, rows: list[dict[str, Any]], limits: dict[str, float]) -> None:
    """Operations per second over operations per byte: the roof, and nanoserve's batch sizes."""
    intensity = [row["operations"] / row["bytes"] for row in rows]
    rates = [row["operations"] / row["seconds"] / 1e9 for row in rows]
    bandwidth, rate = limits["bandwidth"] / 1e9, limits["rate"] / 1e9
    ridge = rate / bandwidth
    low, high = min([ridge, *intensity]) / 2, max([ridge, *intensity]) * 4
    axes.plot([low, ridge, high], [bandwidth * low, rate, rate], color="#444444")
    axes.text(high, rate * 1.1, f"{rate:.3g} GFLOP/s", ha="right", fontsize=8)
    axes.text(low, bandwidth * low * 2, f"{bandwidth:.3g} GB/s", fontsize=8)
    axes.plot(intensity, rates, marker="o", color=COLOURS[0], linewidth=1)
    for x, y, row in zip(intensity, rates, rows, strict=True):
        axes.text(x * 1.1, y * 0.8, str(row["batch"]), fontsize=8)
    axes.set(xscale="log", yscale="log")
    axes.grid(alpha=0.25)
    axes.set_xlabel("operations per byte (prefill and decode together)")
    axes.set_ylabel("GFLOP/s")
    axes.set_title("Roofline: nanoserve, by requests at once", fontsize=10)


def draw_ttft(axes: Any, rows: list[dict[str, Any]], limits: dict[str, float]) -> None:
    """Time to first token over the rate of requests: p50 as a line, p99 as a dashed one."""
    for (engine, points), colour in zip(by_rate(rows).items(), COLOURS, strict=False):
        for percent, style in (("p50", "-"), ("p99", "--")):
            times = [row["ttft_ms"][percent] for row in points.values()]
            label = f"{engine}, {percent}"
            axes.plot(list(points), times, style, marker="o", color=colour, label=label)
    if "ttft" in limits:
        axes.axhline(limits["ttft"], color="#444444", linewidth=1, linestyle=":", label="limit")
    axes.set(xlabel="requests per second that arrive", ylabel="milliseconds", yscale="log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
    axes.grid(alpha=0.25)
    axes.set_title("Time to first token", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def draw_goodput(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Requests per second that are answered within the limits, over the rate of requests."""
    lines = by_rate(rows)
    for (engine, points), colour in zip(lines.items(), COLOURS, strict=False):
        goodput = [row["goodput"] for row in points.values()]
        axes.plot(list(points), goodput, marker="o", color=colour, label=engine)
    highest = max(rate for points in lines.values() for rate in points)
    axes.plot([0, highest], [0, highest], color="#444444", linewidth=1, linestyle=":")
    axes.set(xlabel="requests per second that arrive", ylabel="requests per second in the limits")
    axes.grid(alpha=0.25)
    axes.set_title("Goodput", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def by_rate(rows: list[dict[str, Any]]) -> dict[str, dict[float, dict[str, Any]]]:
    """engine -> {rate: row}, without the loads that have no rate."""
    lines: dict[str, dict[float, dict[str, Any]]] = {}
    for row in rows:
        if row["rate"] is not None:
            lines.setdefault(row["engine"], {})[row["rate"]] = row
    return lines
