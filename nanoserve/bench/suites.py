"""What is measured, and in which turns?

    suite        requests                         figures (the first one is compared)
    throughput   many at once                     output tokens per second
    latency      one at a time                    ITL, TTFT
    prefix       many that begin alike            prompt tokens per second, with caching and without
    serve        arriving at a rate               TTFT and ITL, median and 99th percentile

TTFT is the time to the first token, ITL the time between two tokens. With two engines and three
rounds, the turns are A B, A B, A B; x is the median of A's figure over B's within a round.

vLLM: vllm/benchmarks/throughput.py, latency.py, serve.py, benchmark_prefix_caching.py.
"""

from __future__ import annotations

import ast
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoserve.bench.engines import ENGINES, Peer, StepEngine
from nanoserve.bench.workload import Request, draw_arrivals, draw_requests, read_vocab_size

Figures = dict[str, float]
Result = dict[str, Figures]  # label of an engine -> its figures


@dataclass(frozen=True)
class Variant:
    """One column of a comparison."""

    label: str
    engine: str = "nanoserve"
    options: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable


@dataclass(frozen=True)
class Settings:
    folder: Path
    variants: tuple[Variant, ...] = (Variant("nanoserve"),)
    num_requests: int = 32
    min_len: int = 50  # tokens, of prompts and outputs
    max_len: int = 256
    prefix_len: int = 512
    repeat: int = 3
    rate: float = 4.0  # requests per second
    use_tqdm: bool = True


def parse_variant(text: str) -> Variant:
    """ "eager:enforce_eager=True;max_num_seqs=8" -> Variant("eager", options={...})"""
    label, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for pair in filter(None, rest.split(";")):
        name, equals, value = pair.partition("=")
        try:
            options[name.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):  # a word needs no quotes
            options[name.strip()] = value.strip()
        if not equals:
            raise ValueError(f"--variant {text!r}: write LABEL:OPTION=VALUE;OPTION=VALUE.")
    return Variant(label, options=options)


def parse_peer(text: str) -> Variant:
    """ "vllm=~/vllm/bin/python" -> Variant("vllm", "vllm", python="/home/...")"""
    name, _, python = text.partition("=")
    if name not in ENGINES:
        raise ValueError(f"--peer {name!r}; allowed: {', '.join(ENGINES)}.")
    return Variant(name, name, python=str(Path(python).expanduser()) if python else sys.executable)


def build(variant: Variant, folder: Path, share: float) -> Any:
    """The engine of a column. nanoserve runs here, a peer in a process of its own; on a GPU each
    gets its share of the memory."""
    import torch

    options = dict(variant.options)
    if variant.engine != "transformers" and torch.cuda.is_available():
        options.setdefault("gpu_memory_utilization", 0.9 * share)
    if variant.engine == "nanoserve":
        return StepEngine("nanoserve", str(folder), options)
    return Peer(variant.engine, variant.python, str(folder), options)


# -- the suites: which requests, which figures --


def draw(suite: str, settings: Settings, round_: int) -> list[Request]:
    number, low, high = settings.num_requests, settings.min_len, settings.max_len
    if suite == "latency":
        number = max(1, number // 8)
    if suite == "prefix":
        low, high = max(1, low // 4), max(1, high // 8)
    prefix_len = settings.prefix_len if suite == "prefix" else 0
    vocab_size = read_vocab_size(settings.folder)
    requests = draw_requests(number, low, high, vocab_size, round_, prefix_len)
    if suite == "serve":
        arrivals = draw_arrivals(number, settings.rate, round_)
        pairs = zip(requests, arrivals, strict=True)
        requests = [replace(request, arrival=arrival) for request, arrival in pairs]
    return requests


def run_round(engine: Any, suite: str, requests: list[Request]) -> tuple[Figures, list[Any]]:
    """One turn of one engine: its figures, and the tokens of each request."""
    rows = [asdict(request) for request in requests]
    start = time.perf_counter()
    groups = [[row] for row in rows] if suite == "latency" else [rows]
    results = [result for group in groups for result in engine.run(group)]
    seconds = time.perf_counter() - start
    token_ids = [result["token_ids"] for result in results]
    return compute_figures(suite, requests, [result["times"] for result in results], seconds), (
        token_ids
    )


def compute_figures(
    suite: str, requests: list[Request], times: list[list[float]], seconds: float
) -> Figures:
    """times: of each request, when its tokens came, in seconds after its arrival."""
    if suite == "throughput":
        return {"tokens_per_s": sum(map(len, times)) / seconds}
    if suite == "prefix":
        number = sum(len(request.prompt) for request in requests)
        return {"prompt_tokens_per_s": number / seconds}
    first = sorted(each[0] for each in times)
    gaps = sorted(b - a for each in times for a, b in pairwise(each)) or [0.0]
    if suite == "latency":
        return {
            "itl_ms": 1000 * statistics.median(gaps),
            "ttft_ms": 1000 * statistics.median(first),
        }
    figures = {}
    for name, values in (("ttft_ms", first), ("itl_ms", gaps)):
        for percent in (50, 99):
            figures[f"{name}_p{percent}"] = 1000 * values[(len(values) - 1) * percent // 100]
    return {**figures, "requests_per_s": len(times) / seconds}


# -- turns --


def compare(suite: str, settings: Settings, tell: Callable[[str], None] = print) -> Result:
    """All variants in turns: the median of each figure, the ratio to the first variant, and the
    share of requests with the same tokens as there."""
    variants = list(settings.variants)
    if suite == "prefix":
        off = {"enable_prefix_caching": False}
        variants.append(Variant("caching off", options={**variants[0].options, **off}))
    engines: dict[str, Any] = {}
    rounds: dict[str, list[Figures]] = {variant.label: [] for variant in variants}
    tokens: dict[str, list[Any]] = {variant.label: [] for variant in variants}
    try:
        for variant in variants:
            engines[variant.label] = build(variant, settings.folder, 1 / len(variants))
        start = time.perf_counter()
        requests = draw(suite, settings, round_=-1)
        for engine in engines.values():  # warm up, and see how long it takes
            run_round(engine, suite, requests[:4])
        share = max(1.0, len(requests) / 4)
        seconds = (time.perf_counter() - start) * settings.repeat * share
        tell(f"{suite}: {settings.repeat} rounds of {', '.join(engines)}; about {seconds:.0f} s")
        turns = [(number, label) for number in range(settings.repeat) for label in engines]
        for number, label in tqdm(turns, desc=suite, disable=not settings.use_tqdm, leave=False):
            figures, token_ids = run_round(engines[label], suite, draw(suite, settings, number))
            rounds[label].append(figures)
            tokens[label] += token_ids
    finally:
        for engine in engines.values():
            engine.close()
    return {label: summarize(label, variants[0].label, rounds, tokens) for label in engines}


def summarize(
    label: str, base: str, rounds: dict[str, list[Figures]], tokens: dict[str, list[Any]]
) -> Figures:
    """Medians over the rounds; x: how many times as fast as the base."""
    found = {key: statistics.median(each[key] for each in rounds[label]) for key in rounds[base][0]}
    key = next(iter(found))
    pairs = list(zip(rounds[label], rounds[base], strict=True))
    ratios = [own[key] / its[key] for own, its in pairs if own[key] and its[key]]
    if "_ms" in key:  # a shorter time is a higher speed
        ratios = [1 / ratio for ratio in ratios]
    same = [a == b for a, b in zip(tokens[label], tokens[base], strict=True)]
    found["x"] = statistics.median(ratios) if ratios else 1.0
    found["same_tokens"] = sum(same) / len(same)
    return found
