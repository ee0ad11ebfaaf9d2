"""The pictures of one result: throughput by batch size, where a step's time goes, the roofline.

    python bench.py --plot speed.png

Needs matplotlib (`pip install nanoserve[notebooks]`), imported here and nowhere else. What a
result does not hold is left out of the picture.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#a463f2", "#97bbf5", "#9c6b4e")
PARTS = ("schedule", "prepare", "model", "launch", "sample", "update", "other")


def draw(result: dict[str, Any], file: Path) -> None:
    """Write one picture. Raises ValueError if matplotlib is missing or there is nothing to draw."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib.") from error
    suites = result["suites"]
    panels: list[Callable[[Any], None]] = []
    if "batch" in suites:
        panels.append(lambda axes: draw_batch(axes, suites["batch"]))
    if "steps" in suites:
        panels.append(lambda axes: draw_steps(axes, suites["steps"]))
    if "batch" in suites:
        panels.append(lambda axes: draw_roofline(axes, suites["batch"], result["limits"]))
    if not panels:
        raise ValueError("--plot draws the suites batch and steps; this run has neither.")
    figure = Figure(figsize=(5.6 * len(panels), 4.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
        axes.spines[["top", "right"]].set_visible(False)
    machine = result["machine"]
    figure.suptitle(
        f"{result['model']} in {result['dtype']} on {machine['device_name']}", fontsize=11
    )
    figure.savefig(file, dpi=130)


def draw_batch(axes: Any, suite: dict[str, Any]) -> None:
    """Output tokens per second over the number of requests, a line for each engine."""
    engines = list(dict.fromkeys(row["engine"] for row in suite["rows"]))
    for engine, colour in zip(engines, COLOURS, strict=False):
        rows = [row for row in suite["rows"] if row["engine"] == engine]
        axes.plot(
            [row["batch"] for row in rows],
            [row["tokens_per_second"] for row in rows],
            marker="o",
            color=colour,
            label=engine,
        )
    sizes = sorted({row["batch"] for row in suite["rows"]})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.set_xlabel("requests at once")
    axes.set_ylabel("output tokens per second")
    axes.set_title("Throughput by batch size", fontsize=10)
    axes.legend(frameon=False, fontsize=8)


def draw_steps(axes: Any, suite: dict[str, Any]) -> None:
    """A bar for each engine: the parts of its mean step; on a GPU a second one for the device."""
    longest = max(max(row["step_ms"], row["gpu_ms"] or 0.0) for row in suite["rows"])
    labels: list[str] = []
    drawn: set[str] = set()
    for row in suite["rows"]:
        height = len(labels)
        left = 0.0
        for part, colour in zip(PARTS, COLOURS, strict=True):
            width = row["parts_ms"].get(part)
            if width is None:
                continue
            label = None if part in drawn else part
            drawn.add(part)
            axes.barh(height, width, left=left, color=colour, label=label, height=0.5)
            if width > 0.12 * longest:  # else the text would not fit
                text = f"{part}\n{width:.3g} ms"
                axes.text(left + width / 2, height, text, ha="center", va="center", fontsize=8)
            left += width
        labels.append(row["engine"])
        if row["gpu_ms"] is not None:
            axes.barh(len(labels), row["gpu_ms"], color="#bbbbbb", height=0.5)
            axes.text(row["gpu_ms"] / 2, len(labels), f"GPU\n{row['gpu_ms']:.3g} ms", **_CENTRED)
            labels.append("on the device")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -1.1)
    axes.set_xlabel("milliseconds of a step (mean)")
    axes.set_title("Where a step's time goes", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="upper right")


_CENTRED = {"ha": "center", "va": "center", "fontsize": 8}


def draw_roofline(axes: Any, suite: dict[str, Any], limits: dict[str, float]) -> None:
    """Operations per second over operations per byte: the roof, and nanoserve's batch sizes."""
    rows = [row for row in suite["rows"] if row["engine"] == "nanoserve"]
    points = [
        (row["operations"] / row["bytes"], row["operations"] / row["seconds"] / 1e9, row["batch"])
        for row in rows
    ]
    ridge = limits["rate"] / limits["bandwidth"]
    low = min([ridge, *(x for x, _, _ in points)]) / 2
    high = max([ridge, *(x for x, _, _ in points)]) * 4
    roof = [limits["bandwidth"] * low / 1e9, limits["rate"] / 1e9]
    axes.plot([low, ridge, high], [roof[0], roof[1], roof[1]], color="#444444")
    rate, bandwidth = _with_prefix(limits["rate"]), _with_prefix(limits["bandwidth"])
    above = {"textcoords": "offset points", "fontsize": 8}
    axes.annotate(f"{rate}FLOP/s", (high, roof[1]), xytext=(0, 4), ha="right", **above)
    axes.annotate(f"{bandwidth}B/s", (low, roof[0]), xytext=(0, 22), ha="left", **above)
    axes.plot(
        [x for x, _, _ in points],
        [y for _, y, _ in points],
        marker="o",
        color=COLOURS[0],
        linewidth=1,
    )
    for x, y, batch in points:
        axes.annotate(str(batch), (x, y), textcoords="offset points", xytext=(5, -10), fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.grid(alpha=0.25)
    axes.set_xlabel("operations per byte (prefill and decode together)")
    axes.set_ylabel("GFLOP/s")
    axes.set_title("Roofline: nanoserve, by requests at once", fontsize=10)


def _with_prefix(value: float) -> str:
    """4.3e12 -> "4.3 T"."""
    scale, prefix = (1e12, "T") if value >= 1e12 else (1e9, "G")
    return f"{value / scale:.3g} {prefix}"
