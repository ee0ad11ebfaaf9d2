"""The suites that look inside an engine of this process: prefix, steps, parallel.

    prefix   many prompts with one beginning: what is not computed again, and what that saves; and
             what prefix caching costs where nothing is shared
    steps    where a step's time goes: schedule, prepare, model (on a GPU: launch), sample, update
    parallel decode steps on one rank and on two: their time, and what crosses the wire

vLLM: benchmarks/benchmark_prefix_caching.py; for steps, its --profile and torch's profiler.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tqdm import tqdm

from nanoserve import LLM, SamplingParams
from nanoserve.bench.control import control_plane_seconds
from nanoserve.bench.floor import synchronize
from nanoserve.bench.parallel import measure_ranks
from nanoserve.bench.turns import Settings, warm_up
from nanoserve.bench.workload import Request, draw_requests, draw_shared_prefix

# -- suite: prefix --


def prefix_suite(settings: Settings, suffix_len: int = 32, num_output: int = 16) -> dict[str, Any]:
    """Prefix caching on against off, both in this process, in turns.

    Of the tokens that all prompts share, those of all but the first could be taken from the cache;
    `hit_rate` is the share that was. Where nothing is shared, caching can only cost;
    `cost_at_no_hits` is that cost as a share of the time, once by the clock (on a busy machine it
    drowns in noise) and once as the difference that the scheduler and the block manager alone make.
    """
    vocab_size = settings.model_config.vocab_size
    length = settings.prefix_len + suffix_len + num_output
    number = settings.num_requests
    engines = {
        is_on: settings.llm(max_model_len=length, enable_prefix_caching=is_on)
        for is_on in (True, False)
    }
    shared: dict[bool, list[float]] = {True: [], False: []}
    apart: dict[bool, list[float]] = {True: [], False: []}
    hits: list[float] = []
    low = min(settings.low, length // 2)
    high = min(settings.high, length // 2)
    try:
        bar = tqdm(range(-1, settings.repeat), desc="prefix", disable=not settings.use_tqdm)
        for round_ in bar:
            with_prefix = draw_shared_prefix(
                number, settings.prefix_len, suffix_len, num_output, vocab_size, round_
            )
            without = draw_requests(number, low, high, vocab_size, settings.seed, round_ + 2)
            if round_ < 0:
                with_prefix, without = with_prefix[:2], without[:2]
            order = (True, False) if round_ % 2 else (False, True)
            for is_on in order:
                seconds, cached = run_here(engines[is_on], with_prefix, settings.device)
                other_seconds, _ = run_here(engines[is_on], without, settings.device)
                if round_ < 0:
                    continue
                shared[is_on].append(seconds)
                apart[is_on].append(other_seconds)
                if is_on:
                    hits.append(cached / ((number - 1) * settings.prefix_len))
    finally:
        for llm in engines.values():
            llm.close()
    without = draw_requests(number, low, high, vocab_size, settings.seed)
    books = {
        is_on: min(control_plane_seconds(without, is_on) for _ in range(5))
        for is_on in (True, False)
    }
    return {
        "num_requests": number,
        "prefix_len": settings.prefix_len,
        "suffix_len": suffix_len,
        "num_output": num_output,
        "hit_rate": statistics.median(hits),
        "seconds_on": shared[True],
        "seconds_off": shared[False],
        "speed_up": median_ratio(shared[False], shared[True]),
        "no_hits_seconds_on": apart[True],
        "no_hits_seconds_off": apart[False],
        "cost_at_no_hits": {
            "by_the_clock": median_ratio(apart[True], apart[False]) - 1,
            "by_the_books": (books[True] - books[False]) / statistics.median(apart[False]),
        },
    }


def median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def run_here(llm: LLM, requests: list[Request], device: str) -> tuple[float, int]:
    """Seconds for all, and how many prompt tokens came from the prefix cache."""
    params = [greedy(request) for request in requests]
    synchronize(torch.device(device))
    start = time.perf_counter()
    outputs = llm.generate([request.prompt for request in requests], params, use_tqdm=False)
    return time.perf_counter() - start, sum(output.num_cached_tokens for output in outputs)


def greedy(request: Request) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=request.num_output, ignore_eos=True, detokenize=False
    )


# -- suite: steps --

# part -> the methods whose time it is: (where in the engine, name)
PARTS: dict[str, tuple[tuple[str, str], ...]] = {
    "schedule": (("scheduler", "schedule"),),
    "prepare": (
        ("executor.runner", "update_batch"),
        ("executor.runner", "prepare_inputs"),
    ),
    "model": (("executor.runner", "forward"),),
    "sample": (("executor.runner", "sample"),),
    "update": (("scheduler", "update_from_output"), ("", "process_updates")),
}


class StepTimer:
    """Wraps the parts of one engine's step with clocks; the engine itself knows nothing of it.

    On a GPU, `model` is the time to launch the work (called "launch" in the result), and `gpu` what
    the device takes for it, measured by events in its own stream; `sample` then includes waiting
    for that.
    """

    def __init__(self, llm: LLM, device: str) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self.events: list[tuple[Any, Any]] = []
        self.is_gpu = device != "cpu"
        for part, places in PARTS.items():
            for where, name in places:
                owner: Any = llm.engine
                for attribute in filter(None, where.split(".")):
                    owner = getattr(owner, attribute, None)
                if hasattr(owner, name):
                    setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            is_model = self.is_gpu and part == "model"
            if is_model:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
            start = time.perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self.seconds[part] += time.perf_counter() - start
                if is_model:
                    end.record()
                    self.events.append((begin, end))

        return run

    def gpu_seconds(self) -> float | None:
        if not self.is_gpu:
            return None
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in self.events) / 1000

    def reset(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.events.clear()


def steps_suite(settings: Settings) -> dict[str, Any]:
    """Milliseconds of each part of a step, mean over all steps of the throughput workload."""
    rows = []
    variants = {"nanoserve": {}, **{f"nanoserve, {k}": v for k, v in settings.variants.items()}}
    for label, options in tqdm(
        variants.items(), desc="steps", unit="engine", disable=not settings.use_tqdm
    ):
        llm = settings.llm(**options)
        try:
            rows.append({"engine": label, **measure_steps(settings, llm)})
        finally:
            llm.close()
            if not settings.is_cpu:
                torch.cuda.empty_cache()
    return {
        "num_requests": settings.num_requests,
        "lengths": [settings.low, settings.high],
        "rows": rows,
    }


def measure_steps(settings: Settings, llm: LLM) -> dict[str, Any]:
    timer = StepTimer(llm, settings.device)
    run_here(llm, warm_up(settings, settings.draw(0)), settings.device)
    timer.reset()
    num_steps = 0

    def count(*_: Any) -> None:
        nonlocal num_steps
        num_steps += 1

    llm.engine.step_listeners.append(count)
    seconds, _ = run_here(llm, settings.draw(1), settings.device)
    parts = {part: total / num_steps * 1000 for part, total in timer.seconds.items()}
    if timer.is_gpu:
        parts = {("launch" if part == "model" else part): ms for part, ms in parts.items()}
    gpu = timer.gpu_seconds()
    return {
        "num_steps": num_steps,
        "step_ms": seconds / num_steps * 1000,
        "parts_ms": {**parts, "other": seconds / num_steps * 1000 - sum(parts.values())},
        "gpu_ms": None if gpu is None else gpu / num_steps * 1000,
    }


# -- suite: parallel --


def parallel_suite(settings: Settings) -> dict[str, Any]:
    """Decode steps of num_requests sequences with the longest prompts, for each number of ranks."""
    sizes = (1, 2) if settings.is_cpu else range(1, torch.cuda.device_count() + 1)
    rows = []
    for size in tqdm(sizes, desc="parallel", unit="engine", disable=not settings.use_tqdm):
        measured = measure_ranks(
            size,
            str(settings.folder),
            settings.num_requests,
            settings.high,
            num_kv_blocks=settings.num_requests * (-(-settings.high // 16) + 4),
            dtype=settings.dtype,
            device=settings.device,
        )
        bytes_per_step = measured["bytes_per_step"]
        rows.append(
            {
                "ranks": size,
                "step_ms": measured["seconds_per_step"] * 1000,
                "weight_mib_per_rank": measured["weight_bytes_per_rank"] / 2**20,
                **{f"{name}_bytes": number for name, number in bytes_per_step.items()},
            }
        )
    return {"num_requests": settings.num_requests, "prompt_len": settings.high, "rows": rows}
