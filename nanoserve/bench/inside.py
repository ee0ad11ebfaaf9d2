"""The suites that look inside an engine of this process: prefix, steps, parallel.

    prefix   many prompts with one beginning: how many tokens are not computed again, and the time
             that saves; and what prefix caching costs when no tokens are shared
    steps    the parts of a step's time: schedule, prepare, model (on a GPU: launch), sample, update
    parallel decode steps on one rank and on two: their time, and the bytes sent between ranks; and
             on two pipeline stages, with one step in flight, two and three

vLLM: benchmarks/benchmark_prefix_caching.py; for steps, its --profile and torch's profiler.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from nanoserve import LLM, SamplingParams
from nanoserve.bench.control import control_plane_seconds
from nanoserve.bench.parallel import measure_pipeline, measure_ranks
from nanoserve.bench.roofline import synchronize
from nanoserve.bench.turns import WARM_UP, Settings
from nanoserve.bench.workload import Request, draw_requests, draw_shared_prefix


def run_here(llm: LLM, requests: list[Request], device: str) -> tuple[float, int]:
    """Seconds for all requests, and how many prompt tokens came from the prefix cache."""
    params = [greedy(request) for request in requests]
    synchronize(torch.device(device))
    start = time.perf_counter()
    outputs = llm.generate([request.prompt for request in requests], params, use_tqdm=False)
    return time.perf_counter() - start, sum(output.num_cached_tokens or 0 for output in outputs)


def greedy(request: Request) -> SamplingParams:
    return SamplingParams(
        temperature=0, max_tokens=request.num_output, ignore_eos=True, detokenize=False
    )


# -- suite: prefix --


def prefix_suite(settings: Settings, suffix_len: int = 32, num_output: int = 16) -> dict[str, Any]:
    """Prefix caching on against off, both in this process, in turns.

    All prompts share `prefix_len` tokens; every prompt but the first can take them from the cache.
    `hit_rate` is the share that was taken. Prompts that share nothing show what caching costs:
    `cost_at_no_hits`, a share of the time. `total` is the difference of the measured times (on a
    busy machine mostly noise), `control_plane` that of scheduler and block manager alone.
    """
    number, vocab_size = settings.num_requests, settings.model_config.vocab_size
    length = settings.prefix_len + suffix_len + num_output
    low, high = (min(bound, length // 2) for bound in settings.lengths)

    def draw_apart(round_: int) -> list[Request]:
        return draw_requests(number, low, high, vocab_size, settings.seed, round_)

    seconds: dict[tuple[str, bool], list[float]] = {}
    hits: list[float] = []
    options: dict[str, dict[str, Any]] = {
        name: {"max_model_len": length, "enable_prefix_caching": name == "on"}
        for name in ("on", "off")
    }
    with settings.llms(options) as llms:
        caching, plain = llms["on"], llms["off"]
        rounds = range(WARM_UP, settings.repeat)
        for round_ in settings.progress(rounds, "prefix"):
            shared = draw_shared_prefix(
                number, settings.prefix_len, suffix_len, num_output, vocab_size, round_
            )
            workloads = {"shared": shared, "apart": draw_apart(round_)}
            for llm in (caching, plain) if round_ % 2 else (plain, caching):
                for name, requests in workloads.items():
                    time_taken, num_cached = run_here(llm, requests, settings.device)
                    if round_ == WARM_UP:
                        continue
                    seconds.setdefault((name, llm is caching), []).append(time_taken)
                    if name == "shared" and llm is caching:
                        hits.append(num_cached / ((number - 1) * settings.prefix_len))
    on, off = (
        min(control_plane_seconds(draw_apart(0), is_on) for _ in range(5))
        for is_on in (True, False)
    )
    return {
        "num_requests": number,
        "prefix_len": settings.prefix_len,
        "suffix_len": suffix_len,
        "num_output": num_output,
        "hit_rate": statistics.median(hits),
        "seconds_on": seconds["shared", True],
        "seconds_off": seconds["shared", False],
        "speed_up": median_ratio(seconds["shared", False], seconds["shared", True]),
        "no_hits_seconds_on": seconds["apart", True],
        "no_hits_seconds_off": seconds["apart", False],
        "cost_at_no_hits": {
            "total": median_ratio(seconds["apart", True], seconds["apart", False]) - 1,
            "control_plane": (on - off) / statistics.median(seconds["apart", False]),
        },
    }


def median_ratio(above: list[float], below: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


# -- suite: steps --


def steps_suite(settings: Settings) -> dict[str, Any]:
    """Milliseconds of each part of a step, mean over all steps of the throughput workload."""
    rows = []
    variants = {"nanoserve": {}, **{f"nanoserve, {k}": v for k, v in settings.variants.items()}}
    for label, options in settings.progress(variants.items(), "steps"):
        with settings.llm(**options) as llm:
            rows.append({"engine": label, **measure_steps(settings, llm)})
    return {"num_requests": settings.num_requests, "lengths": settings.lengths, "rows": rows}


def measure_steps(settings: Settings, llm: LLM) -> dict[str, Any]:
    """The parts of a step; on a GPU, `model` is called `launch`, because it is the time of that.
    Raises ValueError where nanoserve/extras, which can be deleted, is not there."""
    try:
        from nanoserve.extras.trace.timer import StepTimer  # the one use of extras in bench
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("nanoserve.extras"):
            raise
        raise ValueError(
            "the parts of a step are measured by nanoserve/extras/trace/timer.py, which is not "
            "here. Put the folder nanoserve/extras back, or choose other suites."
        ) from None

    timer = StepTimer(llm, settings.device)
    run_here(llm, settings.draw_warm_up(), settings.device)
    timer.reset()
    seconds, _ = run_here(llm, settings.draw(0), settings.device)
    scale = 1000 / timer.num_steps
    parts = {part: total * scale for part, total in timer.seconds.items()}
    if timer.is_gpu:
        parts = {("launch" if part == "model" else part): ms for part, ms in parts.items()}
    return {
        "num_steps": timer.num_steps,
        "step_ms": seconds * scale,
        "parts_ms": {**parts, "other": seconds * scale - sum(parts.values())},
        "gpu_ms": timer.gpu_seconds() * scale if timer.is_gpu else None,
    }


# -- suite: parallel --


def parallel_suite(settings: Settings) -> dict[str, Any]:
    """Decode steps of num_requests sequences with the longest prompts, for each number of ranks;
    then pipeline stages, for each number of steps in flight."""
    workload = str(settings.folder), settings.num_requests, settings.max_len
    options: dict[str, Any] = {
        "num_gpu_blocks_override": settings.num_requests * (-(-settings.max_len // 16) + 4),
        "dtype": settings.dtype,
        "device": settings.device,
    }
    sizes = (1, 2) if settings.is_cpu else range(1, torch.cuda.device_count() + 1)
    rows = []
    for size in settings.progress(sizes, "parallel"):
        measured = measure_ranks(size, *workload, **options)
        bytes_per_step = measured["bytes_per_step"]
        rows.append(
            {
                "ranks": size,
                "step_ms": measured["seconds_per_step"] * 1000,
                "weight_mib_per_rank": measured["weight_bytes_per_rank"] / 2**20,
                **{f"{name}_bytes": number for name, number in bytes_per_step.items()},
            }
        )
    pp_size = sizes[-1]
    depths = range(1, pp_size + 2) if pp_size > 1 else ()
    pipeline = []
    for depth in settings.progress(depths, "pipeline"):
        measured = measure_pipeline(pp_size, depth, *workload, **options)
        pipeline.append({"stages": pp_size, "in_flight": depth, **measured})
    sizes_of_requests = {"num_requests": settings.num_requests, "prompt_len": settings.max_len}
    return {**sizes_of_requests, "rows": rows, "pipeline": pipeline}
