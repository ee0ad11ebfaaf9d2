"""The suites that compare engines: throughput, batch, latency.

Each takes Settings and returns a dict of plain values, as --json writes it.

    throughput   many requests of mixed lengths at once: output tokens per second
    batch        equal requests, 1 to many: how throughput grows, and where it is on the roofline
    latency      one request at a time: time to first token, and from token to token

Every suite is a job that an engine does in each round (turns.py), and what is computed from the
measured times. "nanoserve_is" is a ratio: 2.0 means that nanoserve is twice as fast as the engine
of that row. "share_of_roofline" is the least time that this machine allows (roofline.py), divided
by the measured time.

vLLM: vllm/benchmarks/throughput.py, latency.py, serve.py.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

from nanoserve.bench.process import EngineProcess
from nanoserve.bench.roofline import ideal_steps, roofline_seconds
from nanoserve.bench.turns import Settings, engine_specs, run_in_turns
from nanoserve.bench.workload import Request, draw_requests

# -- suite: throughput --


def throughput_suite(settings: Settings) -> dict[str, Any]:
    """Mixed lengths, all requests at once. Only tokens that were asked for count: what a padded
    batch computes beyond a request's end does not."""

    def job(engine: EngineProcess, round_: int) -> dict[str, Any]:
        return engine.generate(settings.draw(round_))

    specs = engine_specs(settings, settings.hf_batch_sizes)
    measured = run_in_turns(settings, specs, job, "throughput")
    requests = settings.draw(0)
    num_output = sum(request.num_output for request in requests)
    least = roofline_seconds(settings.limits, ideal_steps(settings.costs, requests))
    reference = measured.results["nanoserve"]
    rows = []
    for label, results in measured.results.items():
        seconds = [result["seconds"] for result in results]
        same = [
            ours == theirs
            for expected, result in zip(reference, results, strict=True)
            for ours, theirs in zip(expected["token_ids"], result["token_ids"], strict=True)
        ]
        rows.append(
            {
                **measured.engines[label],
                "seconds": seconds,
                "tokens_per_second": num_output / statistics.median(seconds),
                "slowest": num_output / max(seconds),
                "fastest": num_output / min(seconds),
                "nanoserve_is": measured.ratio(label, lambda result: 1 / result["seconds"]),
                "share_of_roofline": least / statistics.median(seconds),
                "same_tokens": None if settings.temperature else sum(same) / len(same),
            }
        )
    return {
        "num_requests": len(requests),
        "lengths": settings.lengths,
        "num_input_tokens": sum(len(request.prompt) for request in requests),
        "num_output_tokens": num_output,
        "temperature": settings.temperature,
        "roofline_tokens_per_second": num_output / least,
        "rows": rows,
        "skipped": measured.skipped,
    }


# -- suite: batch --


def batch_suite(settings: Settings, prompt_len: int = 64, num_output: int = 32) -> dict[str, Any]:
    """Equal requests, more and more of them."""
    sizes = settings.batch_sizes

    def draw(size: int, number: int) -> list[Request]:
        vocab_size = settings.model_config.vocab_size
        drawn = draw_requests(size, prompt_len, prompt_len, vocab_size, settings.seed, number)
        return [replace(request, num_output=num_output) for request in drawn]

    def job(engine: EngineProcess, round_: int) -> list[float]:
        # Each batch is a draw of its own: a batch that repeats a smaller one's prompts would find
        # them in the prefix cache.
        batches = [draw(size, round_ * len(sizes) + i) for i, size in enumerate(sizes, start=1)]
        return [engine.generate(batch)["seconds"] for batch in batches]

    measured = run_in_turns(settings, engine_specs(settings, (max(sizes),)), job, "batch")
    rows = []
    for label, results in measured.results.items():
        for size, times in zip(sizes, zip(*results, strict=True), strict=True):
            seconds = statistics.median(times)
            steps = ideal_steps(settings.costs, draw(size, 0))
            rows.append(
                {
                    "engine": label.split(",")[0] if label.startswith("hf,") else label,
                    "batch": size,
                    "seconds": seconds,
                    "tokens_per_second": size * num_output / seconds,
                    "operations": sum(step.operations for step in steps),
                    "bytes": sum(step.num_bytes for step in steps),
                    "share_of_roofline": roofline_seconds(settings.limits, steps) / seconds,
                }
            )
    sizes_of_requests = {"prompt_len": prompt_len, "num_output": num_output}
    return {**sizes_of_requests, "rows": rows, "skipped": measured.skipped}


# -- suite: latency --


def latency_suite(settings: Settings) -> dict[str, Any]:
    """One request at a time. Time to first token (TTFT), inter-token latency (ITL), in ms."""

    def draw(round_: int) -> list[Request]:
        return settings.draw(round_)[: settings.latency_requests]

    def job(engine: EngineProcess, round_: int) -> list[list[float]]:
        return [engine.stream(request)["times"] for request in draw(round_)]

    def total(times: list[list[float]]) -> float:
        return sum(request_times[-1] for request_times in times)

    measured = run_in_turns(settings, engine_specs(settings, (1,)), job, "latency")
    requests = draw(0)
    alone = [ideal_steps(settings.costs, [request]) for request in requests]
    least = sum(roofline_seconds(settings.limits, steps) for steps in alone)
    num_output = sum(request.num_output for request in requests)
    rows = []
    for label, rounds in measured.results.items():
        streams = [times for round_ in rounds for times in round_]
        seconds = [total(times) for times in rounds]
        rows.append(
            {
                **measured.engines[label],
                "seconds": seconds,
                "tokens_per_second": num_output / statistics.median(seconds),
                "ttft_ms": percentiles([times[0] * 1000 for times in streams]),
                "itl_ms": percentiles(
                    [(b - a) * 1000 for times in streams for a, b in pairwise(times)]
                ),
                "nanoserve_is": measured.ratio(label, lambda times: 1 / total(times)),
                "share_of_roofline": least / statistics.median(seconds),
            }
        )
    return {
        "num_requests": len(requests),
        "lengths": settings.lengths,
        "num_output_tokens": num_output,
        "roofline_tokens_per_second": num_output / least,
        "rows": rows,
        "skipped": measured.skipped,
    }


def percentiles(values: list[float], percents: tuple[int, ...] = (50, 99)) -> dict[str, float]:
    """p50 and p99: the least value that so many percent of all values do not exceed."""
    ordered = sorted(values)
    return {
        f"p{percent}": ordered[max(0, -(-len(ordered) * percent // 100) - 1)]
        for percent in percents
    }
