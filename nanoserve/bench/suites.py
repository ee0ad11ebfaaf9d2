"""The suites that compare engines: throughput, batch, latency.

Each takes Settings and returns a dict of plain values, as --json writes it.

    throughput   many requests of mixed lengths at once: output tokens per second
    batch        equal requests, 1 to many: how throughput grows, and where it is on the roofline
    latency      one request at a time: time to first token, and from token to token

vLLM: vllm/benchmarks/throughput.py, latency.py, serve.py.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

from nanoserve.bench.floor import floor_seconds, ideal_steps
from nanoserve.bench.process import EngineProcess
from nanoserve.bench.turns import Settings, describe, engine_specs, run_in_turns, warm_up
from nanoserve.bench.workload import Request, draw_requests

# -- suite: throughput --


def throughput_suite(settings: Settings) -> dict[str, Any]:
    """Mixed lengths, all requests at once. Only tokens that were asked for count: what a padded
    batch computes beyond a request's end is its own loss."""

    def job(engine: EngineProcess, round_: int) -> dict[str, Any]:
        requests = settings.draw(round_)
        if round_ < 0:
            requests = warm_up(settings, requests)
        return engine.generate(requests)

    specs = engine_specs(settings, settings.hf_batch_sizes)
    measured = run_in_turns(settings, specs, job, settings.repeat, "throughput")
    requests = settings.draw(0)
    num_output = sum(request.num_output for request in requests)
    steps = ideal_steps(settings.costs, requests)
    floor = floor_seconds(settings.limits, steps)
    reference = [result["token_ids"] for result in measured.results["nanoserve"]]
    rows = []
    for label, results in measured.results.items():
        seconds = [result["seconds"] for result in results]
        same = [
            mine == theirs
            for ours, result in zip(reference, results, strict=True)
            for mine, theirs in zip(ours, result["token_ids"], strict=True)
        ]
        rows.append(
            {
                **describe(measured, label),
                "seconds": seconds,
                "num_preemptions": results[-1].get("num_preemptions"),
                "tokens_per_second": num_output / statistics.median(seconds),
                "slowest": num_output / max(seconds),
                "fastest": num_output / min(seconds),
                "nanoserve_is": measured.ratios(label, lambda result: 1 / result["seconds"]),
                "share_of_floor": floor / statistics.median(seconds),
                "same_tokens": None if settings.temperature else sum(same) / len(same),
            }
        )
    return {
        "num_requests": len(requests),
        "lengths": [settings.low, settings.high],
        "num_input_tokens": sum(len(request.prompt) for request in requests),
        "num_output_tokens": num_output,
        "temperature": settings.temperature,
        "floor_seconds": floor,
        "floor_tokens_per_second": num_output / floor,
        "floor_bytes": sum(step.num_bytes for step in steps),
        "floor_operations": sum(step.operations for step in steps),
        "rows": rows,
        "skipped": measured.skipped,
    }


# -- suite: batch --


def batch_suite(settings: Settings, prompt_len: int = 64, num_output: int = 32) -> dict[str, Any]:
    """Equal requests, more and more of them."""
    vocab_size = settings.model_config.vocab_size

    def job(engine: EngineProcess, round_: int) -> list[float]:
        seconds = []
        for size in settings.batch_sizes[: 1 if round_ < 0 else None]:
            drawn = draw_requests(
                size, prompt_len, prompt_len, vocab_size, settings.seed, round_ + 2
            )
            requests = [replace(request, num_output=num_output) for request in drawn]
            seconds.append(engine.generate(requests)["seconds"])
        return seconds

    specs = engine_specs(settings, (max(settings.batch_sizes),))
    measured = run_in_turns(settings, specs, job, settings.repeat, "batch")
    rows = []
    for label, results in measured.results.items():
        for position, size in enumerate(settings.batch_sizes):
            seconds = statistics.median(result[position] for result in results)
            requests = [Request([0] * prompt_len, num_output)] * size
            steps = ideal_steps(settings.costs, requests)
            floor = floor_seconds(settings.limits, steps)
            rows.append(
                {
                    "engine": label.split(",")[0] if label.startswith("hf,") else label,
                    "batch": size,
                    "seconds": seconds,
                    "tokens_per_second": size * num_output / seconds,
                    "operations": sum(step.operations for step in steps),
                    "bytes": sum(step.num_bytes for step in steps),
                    "share_of_floor": floor / seconds,
                }
            )
    return {
        "prompt_len": prompt_len,
        "num_output": num_output,
        "rows": rows,
        "skipped": measured.skipped,
    }


# -- suite: latency --


def latency_suite(settings: Settings) -> dict[str, Any]:
    """One request at a time. Time to first token (TTFT), inter-token latency (ITL), in ms."""
    requests = settings.draw(0)[: settings.latency_requests]
    vocab_size = settings.model_config.vocab_size

    def job(engine: EngineProcess, round_: int) -> list[dict[str, Any]]:
        if round_ < 0:
            engine.stream(draw_requests(1, 8, 8, vocab_size, seed=1)[0])
            return []
        return [engine.stream(request) for request in settings.draw(round_)[: len(requests)]]

    def total(results: list[dict[str, Any]]) -> float:
        return sum(result["times"][-1] for result in results)

    measured = run_in_turns(settings, engine_specs(settings, (1,)), job, settings.repeat, "latency")
    floor = sum(
        floor_seconds(settings.limits, ideal_steps(settings.costs, [request]))
        for request in requests
    )
    num_output = sum(request.num_output for request in requests)
    rows = []
    for label, rounds in measured.results.items():
        streams = [result["times"] for results in rounds for result in results]
        first = [times[0] * 1000 for times in streams]
        gaps = [(b - a) * 1000 for times in streams for a, b in pairwise(times)]
        seconds = statistics.median(map(total, rounds))
        rows.append(
            {
                **describe(measured, label),
                "seconds": [total(results) for results in rounds],
                "tokens_per_second": num_output / seconds,
                "ttft_ms": percentiles(first),
                "itl_ms": percentiles(gaps),
                "nanoserve_is": measured.ratios(label, lambda results: 1 / total(results)),
                "share_of_floor": floor / seconds,
            }
        )
    return {
        "num_requests": len(requests),
        "lengths": [settings.low, settings.high],
        "num_output_tokens": num_output,
        "floor_tokens_per_second": num_output / floor,
        "rows": rows,
        "skipped": measured.skipped,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """p50 and p99: the least value that so many percent of all do not exceed."""
    ordered = sorted(values)
    return {
        f"p{percent}": ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
        for percent in (50, 99)
    }
