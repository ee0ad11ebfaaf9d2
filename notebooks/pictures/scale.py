"""scale.svg: what a cost model says of more GPUs; replicas.svg: what a simulation says of routers.

The curves of scale.svg come from nanoserve/bench/cost_model.py, those of replicas.svg from the
newest result of `bench.py --suite scale` in notebooks/results/; no figure is typed here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.bench import scale_page
from nanoserve.bench.cost_model import DGX_H100, NODES_64, Layout, ModelShape, decode
from nanoserve.bench.scale_page import LARGE, LARGE_FP8, MIDDLE, SIZES, SMALL, alone_seconds
from nanoserve.extras.trace.style import COLOURS
from nanoserve.extras.trace.svg import document, element, rect, text

RESULTS = Path(__file__).resolve().parents[1] / "results"
CONTEXT = 1024
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

WORDS: dict[str, dict[str, Any]] = {
    "en": {
        "scale": "More H100 GPUs: what a cost model says (no measurement)",
        "tensor": "One request, tensor parallel",
        "tensor unit": "ms a token; GPUs of a replica",
        "network": "one node | network",
        "ideal": "dashed: n GPUs, 1/n of the time",
        "step": "A decode step of Qwen3-8B, one GPU",
        "step unit": "ms; sequences of 1024 tokens",
        "parts": ("weights of the layers", "keys and values", "head", "kernels, host"),
        "replicas": "64 replicas and their router: a simulation (no measurement)",
        "hits": "Found in the prefix cache",
        "hits unit": "share of the prompts' tokens; replicas",
        "said": "dashed: all that was said before",
        "speed": "Output of each replica",
        "speed unit": "tokens/s; replicas",
        "about": "{chats:,} chats of 2 to 4 turns, Qwen3-8B on one H100 each; {file}",
    },
    "zh-CN": {
        "scale": "更多 H100 GPU：成本模型的推算（并非实测）",
        "tensor": "单个请求，张量并行",
        "tensor unit": "每 token 毫秒；每个副本的 GPU 数",
        "network": "单节点 | 网络",
        "ideal": "虚线：n 块 GPU，时间为 1/n",
        "step": "Qwen3-8B 的一步解码，单块 GPU",
        "step unit": "毫秒；每个序列 1024 个 token",
        "parts": ("各层权重", "key 和 value", "输出头", "kernel 与主机"),
        "replicas": "64 个副本与路由：模拟结果（并非实测）",
        "hits": "前缀缓存命中",
        "hits unit": "占 prompt token 的比例；副本数",
        "said": "虚线：之前说过的全部",
        "speed": "每个副本的输出",
        "speed unit": "token/s；副本数",
        "about": "{chats:,} 个聊天，各 2 到 4 轮，每个副本一块 H100 运行 Qwen3-8B；{file}",
    },
}

WIDTH, MARGIN, TOP = 760, 16, 112
PLOT_WIDTH, PLOT_HEIGHT = 300, 200
LEFTS = (52, 436)  # of the two plots
Points = Sequence[tuple[float, float]]


class Axes(NamedTuple):
    """One plot. x is logarithmic; `y` takes a value to 0 (bottom) .. 1 (top)."""

    left: float
    ticks: Sequence[int]
    y: Callable[[float], float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        low, high = log2(self.ticks[0]), log2(self.ticks[-1])
        across = (log2(x) - low) / (high - low)
        return self.left + across * PLOT_WIDTH, TOP + (1 - self.y(y)) * PLOT_HEIGHT

    def frame(self, title: str, unit: str, y_ticks: Sequence[float], form: str) -> list[str]:
        bottom = TOP + PLOT_HEIGHT
        shapes = [
            text(self.left - 36, TOP - 34, title, 16, "ink bold"),
            text(self.left - 36, TOP - 15, unit, 13.5, "faint"),
        ]
        for value in y_ticks:
            _, y = self.at(self.ticks[0], value)
            shapes.append(element("path", d=f"M{self.left} {y:.1f}h{PLOT_WIDTH}", class_="edge"))
            shapes.append(
                text(self.left - 6, y + 5, format(value, form), 13, "faint", anchor="end")
            )
        for tick in self.ticks:
            x, _ = self.at(tick, y_ticks[0])
            shapes.append(text(x, bottom + 18, str(tick), 13, "faint", anchor="middle"))
        return shapes

    def line(self, points: Points, colour: str | None, dashes: str | None = None) -> str:
        """Without a colour: thin and grey."""
        path = "M" + "L".join("{:.1f} {:.1f}".format(*self.at(*point)) for point in points)
        if colour is None:
            return element("path", d=path, class_="line", stroke_dasharray=dashes)
        style = {"fill": "none", "stroke": colour, "stroke_width": 2.5, "stroke_dasharray": dashes}
        return element("path", d=path, **style)


def logarithmic(low: float, high: float) -> Callable[[float], float]:
    return lambda value: log2(value / low) / log2(high / low)


def linear(high: float) -> Callable[[float], float]:
    return lambda value: value / high


def draw_scale(language: str = "en") -> str:
    words = WORDS[language]
    body = [text(MARGIN, 34, words["scale"], 19, "ink bold")]
    body += [*draw_tensor(words), *draw_step(words)]
    height = TOP + PLOT_HEIGHT + 62
    return document(WIDTH, height, words["scale"], words["tensor"], "", body)


def draw_tensor(words: dict[str, Any]) -> list[str]:
    """ms of a token by the GPUs that share each layer."""
    axes = Axes(LEFTS[0], SIZES, logarithmic(1, 64))
    shapes = axes.frame(words["tensor"], words["tensor unit"], (1, 2, 4, 8, 16, 32, 64), "d")
    x, _ = axes.at(8, 1)
    shapes.append(
        element(
            "path", d=f"M{x:.1f} {TOP}v{PLOT_HEIGHT - 26}", class_="line", stroke_dasharray="6 4"
        )
    )
    shapes.append(text(x, TOP + PLOT_HEIGHT - 7, words["network"], 13, "faint", anchor="middle"))
    for case, colour in zip((SMALL, MIDDLE, LARGE_FP8, LARGE), COLOURS, strict=False):
        points = [
            (size, 1e3 * seconds)
            for size in SIZES
            if (seconds := alone_seconds(case.model, NODES_64, Layout(size)))
        ]
        first, most = points[0]
        ideal = [(size, most * first / size) for size, _ in points if most * first / size >= 1]
        shapes += [axes.line(ideal, None, "3 4"), axes.line(points, colour)]
        for point in points:
            x, y = axes.at(*point)
            shapes.append(rect(x - 3, y - 3, 6, 6, fill=colour, rx=3))
        x, y = axes.at(first, most)
        if case is LARGE_FP8:  # a short name: there are others on its left and on its right
            shapes.append(text(x - 22, y - 9, case.shown.removeprefix("Llama "), 13.5))
        else:
            shapes.append(text(x, y - 9, case.shown, 13.5))
    shapes.append(text(axes.left - 36, TOP + PLOT_HEIGHT + 42, words["ideal"], 13, "faint"))
    return shapes


def draw_step(words: dict[str, Any]) -> list[str]:
    """What a step's time consists of, by the batch."""
    model, device = ModelShape.named(SMALL.name), DGX_H100.device

    def parts_of(batch: int) -> list[float]:
        """ms, in the order of words["parts"]."""
        layers, attention, head = map(device.seconds, model.parts(decode(batch, CONTEXT)))
        started = model.num_layers * device.layer_seconds
        return [1e3 * each for each in (layers, attention, head, started)]

    axes = Axes(LEFTS[1], BATCHES, linear(24))
    shapes = axes.frame(words["step"], words["step unit"], (0, 8, 16, 24), "d")
    below = dict.fromkeys(BATCHES, 0.0)
    for index, (name, colour) in enumerate(zip(words["parts"], COLOURS, strict=False)):
        above = {batch: below[batch] + parts_of(batch)[index] for batch in BATCHES}
        corners = [*above.items(), *reversed(below.items())]
        path = "M" + "L".join("{:.1f} {:.1f}".format(*axes.at(*corner)) for corner in corners)
        shapes.append(element("path", d=path + "Z", fill=colour, fill_opacity=0.75))
        y = TOP + 14 + 19 * (len(words["parts"]) - 1 - index)
        shapes.append(rect(axes.left + 10, y - 10, 11, 11, fill=colour, fill_opacity=0.75))
        shapes.append(text(axes.left + 27, y, name, 13.5, "ink"))
        below = above
    return shapes


def load_result() -> tuple[str, dict[str, Any]]:
    """(file name, suite): the newest run of the suite "scale"."""
    found = []
    for file in RESULTS.glob("*.json"):
        result = json.loads(file.read_text("utf-8"))
        if "scale" in result["suites"] and not result["is_toy"]:
            found.append((result["date"], file.name, result["suites"]["scale"]))
    if not found:
        raise ValueError(f"no result of the suite scale in {RESULTS}")
    return max(found)[1:]


def draw_replicas(language: str = "en") -> str:
    words, names = WORDS[language], scale_page.WORDS[language]
    file, suite = load_result()
    rows = suite["rows"]
    sizes = sorted({row["replicas"] for row in rows})
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    plots = [
        ("hits", lambda row: row["hit_rate"], 1.0, (0.0, 0.25, 0.5, 0.75, 1.0), ".0%"),
        (
            "speed",
            lambda row: row["tokens_per_second"] / row["replicas"],
            4000,
            (0, 1000, 2000, 3000, 4000),
            ",d",
        ),
    ]
    most = max(rows, key=lambda row: row["chats"])
    about = words["about"].format(chats=most["chats"], file=file)
    body = [text(MARGIN, 34, words["replicas"], 19, "ink bold")]
    for left, (name, value, high, y_ticks, form) in zip(LEFTS, plots, strict=True):
        axes = Axes(left, sizes, linear(high))
        body += axes.frame(words[name], words[f"{name} unit"], y_ticks, form)
        for policy, colour in zip(policies, COLOURS, strict=False):
            points = [
                (size, value(row))
                for size in sizes
                for row in rows
                if row["policy"] == policy and row["replicas"] == size
            ]
            dashes = "9 9" if policy == policies[-1] else None  # it may lie on another one
            body.append(axes.line(points, colour, dashes))
            body += [
                rect(x - 3, y - 3, 6, 6, fill=colour, rx=3)
                for x, y in (axes.at(*point) for point in points)
            ]
    axes, share = Axes(LEFTS[0], sizes, linear(1.0)), suite["said_before"]
    body.append(axes.line([(size, share) for size in sizes], None, "3 4"))
    x, y = axes.at(sizes[-1], share)
    body.append(text(x, y - 6, words["said"], 13, "faint", anchor="end"))
    for index, (policy, colour) in enumerate(zip(policies, COLOURS, strict=False)):
        x, y = LEFTS[0] + 10, TOP + PLOT_HEIGHT - 14 - 19 * (len(policies) - 1 - index)
        body.append(rect(x, y - 10, 11, 11, fill=colour))
        body.append(text(x + 17, y, names[policy], 13.5, "ink"))
    bottom = TOP + PLOT_HEIGHT + 44
    body.append(text(MARGIN, bottom, about, 13, "faint"))
    return document(WIDTH, bottom + 16, words["replicas"], about, "", body)
