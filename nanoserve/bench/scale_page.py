"""Which figures does the page on scale show? Its tables, in both languages.

notebooks/results/scale.md and its Chinese twin have these tables between markers; readme_results.py
writes them. Each is computed from the cost model. Four have what was measured beside it: "ratios"
and "hits" here, "published" and "latencies" by others. "simulation" is the recorded run of
`bench.py --suite scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.bench.cost_model import (
    DGX_H100,
    NODES_64,
    Cluster,
    Layout,
    Load,
    ModelShape,
    decode,
    fastest,
    most_sequences,
    pass_seconds,
    serve,
)
from nanoserve.bench.hit_rates import hit_rates
from nanoserve.bench.published import LENGTHS, latencies, throughputs
from nanoserve.bench.ratios import measured_ratios

LOAD = Load(prompt=1536, output=512)
LIMITS = (0.05, 0.1)  # seconds from token to token
SIZES = (1, 2, 4, 8, 16, 32, 64)
PAYS = 1.25  # a doubling of the devices pays if a token comes so many times as fast


class Case(NamedTuple):
    """A model with weights of one dtype."""

    shown: str
    name: str
    weights: float = 0  # bytes; 0: as all numbers, 2

    @property
    def model(self) -> ModelShape:
        return ModelShape.named(self.name, 2, self.weights)


SMALL = Case("Qwen3-8B", "qwen3-8b")
MIDDLE = Case("Llama 70B", "llama-3.1-70b")
LARGE = Case("Llama 405B", "llama-3.1-405b")
LARGE_FP8 = Case("Llama 405B fp8", "llama-3.1-405b", 1)
# tensor, pipeline; replicas take the rest of the devices
NODE = {
    SMALL: [(1, 1), (1, 8), (2, 1), (4, 1), (8, 1)],
    MIDDLE: [(2, 1), (2, 2), (4, 1), (4, 2), (8, 1)],
    LARGE_FP8: [(4, 2), (8, 1)],
}
CLUSTER = {
    SMALL: [(1, 1), (8, 1)],
    MIDDLE: [(4, 1), (8, 1), (16, 1)],
    LARGE: [(8, 2), (8, 4), (16, 1), (16, 2), (32, 1), (64, 1)],
    LARGE_FP8: [(8, 1), (8, 2), (16, 1)],
}

# Of the columns behind the layout: sequences, ms a token, ms a prompt, tokens/s (twice), each GPU.
BEST: tuple[Callable[..., float], ...] = (max, min, min, max, max, max)
DIGITS = 3  # of a figure of the model that are shown

WORDS: dict[str, dict[str, str]] = {
    "en": {
        "ratio": "times as fast",
        "measured": "measured",
        "model says": "model",
        "difference": "difference",
        "model": "model",
        "layout": "layout",
        "fit": "sequences",
        "alone": "ms a token",
        "prompt": "ms a prompt",
        "speed": "tok/s, {:.0f} ms",
        "each": "each GPU",
        "pays": "pays up to",
        "replicas": "replicas",
        "policy": "policy",
        "hits": "hit rate",
        "output": "tok/s",
        "ttft": "TTFT, ms",
        "tpot": "TPOT, ms",
        "busy": "busy",
        "imbalance": "imbalance",
        "prefix affinity": "prefix affinity",
        "least load": "least load",
        "round robin": "round robin",
        "engine": "GPU and model",
        "gpus": "GPUs",
        "at once": "requests at once",
        "published": "published, ms",
        "model, ms": "model, ms",
        "routed": "routed",
        "simulated": "simulated",
        "nanoserve": "by prefix",
        "nanoserve, round_robin": "in turns",
        "nanoserve, one engine": "not at all: one engine with the blocks of both",
    },
    "zh-CN": {
        "ratio": "快多少倍",
        "measured": "实测",
        "model says": "模型",
        "difference": "相差",
        "model": "模型",
        "layout": "布局",
        "fit": "序列数",
        "alone": "token，ms",
        "prompt": "prompt，ms",
        "speed": "token/s，{:.0f} ms",
        "each": "每块 GPU",
        "pays": "划算到",
        "replicas": "副本数",
        "policy": "策略",
        "hits": "命中率",
        "output": "token/s",
        "ttft": "TTFT，ms",
        "tpot": "TPOT，ms",
        "busy": "忙碌",
        "imbalance": "不均",
        "prefix affinity": "前缀亲和",
        "least load": "最小负载",
        "round robin": "轮流",
        "engine": "GPU 与模型",
        "gpus": "GPU 数",
        "at once": "同时的请求数",
        "published": "公布值，ms",
        "model, ms": "模型，ms",
        "routed": "路由",
        "simulated": "模拟",
        "nanoserve": "按前缀",
        "nanoserve, round_robin": "轮流",
        "nanoserve, one engine": "不需要：一个引擎，块数是两者之和",
    },
}


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def ratios_table(folder: Path, language: str) -> str:
    words = WORDS[language]
    return table(
        [words[key] for key in ("ratio", "measured", "model says", "difference")],
        [
            [
                each.name if language == "en" else each.name_zh,
                f"{each.measured:.2f} x",
                f"{each.model:.2f} x",
                f"{each.error:+.0%}",
            ]
            for each in measured_ratios(folder)
        ],
    )


def published_table(language: str) -> str:
    """Each engine and each load: tokens per second as published, and the model's difference."""
    words = WORDS[language]
    return table(
        [words["engine"], words["gpus"], *(f"{prompt}, {output}" for prompt, output in LENGTHS)],
        [
            [
                engine.shown,
                str(engine.gpus),
                *(f"{pair.published:,.0f}, {pair.error:+.0%}" for pair in pairs),
            ]
            for engine, pairs in throughputs()
        ],
    )


def latencies_table(language: str) -> str:
    words, found = WORDS[language], latencies()
    return table(
        [words["at once"], *map(str, found)],
        [
            [words["published"], *(f"{pair.published:.1f}" for pair in found.values())],
            [words["model, ms"], *(f"{pair.model:.1f}" for pair in found.values())],
            [words["difference"], *(f"{pair.error:+.0%}" for pair in found.values())],
        ],
    )


def hits_table(folder: Path, language: str) -> str:
    words = WORDS[language]
    return table(
        [words[key] for key in ("routed", "measured", "simulated")],
        [
            [words[each.engine], f"{each.measured:.1%}", f"{each.simulated:.1%}"]
            for each in hit_rates(folder)
        ],
    )


def alone_seconds(model: ModelShape, cluster: Cluster, layout: Layout) -> float | None:
    """From token to token of a single request; None if a replica cannot hold it."""
    if not most_sequences(model, cluster, layout, LOAD.length):
        return None
    step = decode(1, LOAD.prompt + LOAD.output // 2)
    return pass_seconds(model, cluster, layout, step)


def pays_up_to(seconds: dict[int, float]) -> int:
    """The last size before a doubling that gains less than PAYS."""
    sizes = sorted(seconds)
    for size, twice in pairwise(sizes):
        if seconds[size] / seconds[twice] < PAYS:
            return size
    return sizes[-1]


def tensor_table(language: str) -> str:
    """One request, ever more devices a layer."""
    words, rows = WORDS[language], []
    for case in (SMALL, MIDDLE, LARGE_FP8, LARGE):
        found = {size: alone_seconds(case.model, NODES_64, Layout(size)) for size in SIZES}
        pays = pays_up_to({size: each for size, each in found.items() if each})
        rows.append(
            [
                case.shown,
                *("" if each is None else f"{each * 1e3:.1f}" for each in found.values()),
                f"{pays}",
            ]
        )
    return table([words["model"], *map(str, SIZES), words["pays"]], rows)


def layouts_of(cluster: Cluster, cuts: list[tuple[int, int]]) -> list[Layout]:
    return [Layout(t, p, cluster.num_devices // (t * p)) for t, p in cuts]


def layouts_table(cluster: Cluster, cases: dict[Case, list[tuple[int, int]]], language: str) -> str:
    """Each layout: what fits, a request alone, and as many as keep the limits. The best of a model
    is bold."""
    words = WORDS[language]
    limits = [limit * 1e3 for limit in LIMITS]
    head = [words[key] for key in ("model", "layout", "fit", "alone")]
    head += [words["prompt"]]
    head += [words["speed"].format(limit) for limit in limits]
    head += [words["each"]]
    rows = []
    for case, cuts in cases.items():
        found = [row_of(case.model, cluster, layout) for layout in layouts_of(cluster, cuts)]
        columns = zip(*(values for _, *values in found), strict=True)
        best = [show(pick(each)) for pick, each in zip(BEST, columns, strict=True)]
        for layout, *values in found:
            shown = [
                f"**{show(value)}**" if show(value) == top else show(value)
                for value, top in zip(values, best, strict=True)
            ]
            rows.append([case.shown, " x ".join(map(str, layout)), *shown])
    return table(head, rows)


def show(value: float) -> str:
    """6.634 -> 6.63, 2449597.3 -> 2,450,000."""
    rounded = float(f"{value:.{DIGITS}g}")
    return f"{rounded:,.0f}" if rounded >= 10 ** (DIGITS - 1) else f"{rounded:g}"


def row_of(model: ModelShape, cluster: Cluster, layout: Layout) -> tuple[Any, ...]:
    """Layout, sequences, ms of a token, ms of a prompt, tokens/s at the limits, of each device."""
    fit = most_sequences(model, cluster, layout, LOAD.length) * layout.replicas
    alone = alone_seconds(model, cluster, layout)
    assert alone is not None, f"{layout} cannot hold the model"
    ttft = serve(model, cluster, layout, LOAD, 1).ttft
    speeds = []
    for limit in LIMITS:
        speed = fastest(model, cluster, layout, LOAD, limit)
        speeds.append(speed.tokens_per_second if speed else 0.0)
    return (layout, fit, alone * 1e3, ttft * 1e3, *speeds, speeds[-1] / cluster.num_devices)


def node_table(language: str) -> str:
    return layouts_table(DGX_H100, NODE, language)


def cluster_table(language: str) -> str:
    return layouts_table(NODES_64, CLUSTER, language)


def simulation_table(suite: dict[str, Any], language: str) -> str:
    words = WORDS[language]
    keys = ("replicas", "policy", "hits", "output", "ttft", "tpot", "busy", "imbalance")
    rows = [
        [
            str(row["replicas"]),
            words[row["policy"]],
            f"{row['hit_rate']:.1%}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ttft_ms']['p50']:,.0f}, {row['ttft_ms']['p99']:,.0f}",
            f"{row['tpot_ms']['p50']:.1f}, {row['tpot_ms']['p99']:.1f}",
            f"{row['busy']:.0%}, {row['least_busy']:.0%}",
            f"{row['imbalance']:.2f}",
        ]
        for row in suite["rows"]
    ]
    return table([words[key] for key in keys], rows)
