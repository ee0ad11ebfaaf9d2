"""The suites that need a model: throughput, batch sizes, latency, prefix, steps.

Each takes Settings and returns a dict of plain values, as --json writes it. Where engines are
compared, each has its own process (peers.py). On a CPU all of them stay up and take turns, round by
round, so that whatever else the machine does meets all alike; on a GPU they come one after the
other, because each wants all of its memory. Ratios are taken within a round, and their median is
shown.

    throughput   many requests of mixed lengths at once: output tokens per second
    batch        equal requests, 1 to many: how throughput grows, and where it is on the roofline
    latency      one request at a time: time to first token, and from token to token
    prefix       many prompts with one beginning: what is not computed again, and what that saves;
                 and what prefix caching costs where nothing is shared
    steps        where a step's time goes: schedule, prepare, model, sample, update

vLLM: vllm/benchmarks/throughput.py, latency.py; benchmarks/benchmark_prefix_caching.py.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from nanoserve import LLM, SamplingParams
from nanoserve.bench.control import control_plane_seconds
from nanoserve.bench.floor import (
    MachineLimits,
    ModelCosts,
    floor_seconds,
    ideal_steps,
    synchronize,
)
from nanoserve.bench.process import EngineError, EngineProcess
from nanoserve.bench.workload import Request, draw_requests, draw_shared_prefix
from nanoserve.config import ModelConfig


class EngineSpec(NamedTuple):
    """One row of a comparison."""

    label: str
    name: str  # in peers.PEERS
    options: dict[str, Any]  # of EngineProcess.build


@dataclass(frozen=True)
class Settings:
    """What the command line says, resolved."""

    folder: Path  # of the checkpoint
    model: str  # its name in the tables
    device: str  # "cpu" or "cuda"
    dtype: str
    limits: MachineLimits
    num_requests: int
    low: int  # tokens of a prompt, and of an output
    high: int
    latency_requests: int
    batch_sizes: tuple[int, ...]
    prefix_len: int
    compare: tuple[str, ...] = ()  # peers
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> options of LLM
    peer_python: dict[str, str] = field(default_factory=dict)  # peer -> interpreter
    nano_vllm: str | None = None  # a folder that holds nanovllm/
    hf_batch_sizes: tuple[int, ...] = (32, 8)
    repeat: int = 3
    seed: int = 0
    temperature: float = 0.0
    threads: int | None = None
    use_tqdm: bool = True

    @cached_property
    def model_config(self) -> ModelConfig:
        return ModelConfig.from_folder(self.folder)

    @property
    def costs(self) -> ModelCosts:
        return ModelCosts.of(self.model_config, getattr(torch, self.dtype).itemsize)

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    def draw(self, round_: int) -> list[Request]:
        """The requests of a round."""
        vocab_size = self.model_config.vocab_size
        return draw_requests(
            self.num_requests, self.low, self.high, vocab_size, self.seed, max(0, round_)
        )

    def llm(self, **options: Any) -> LLM:
        """An engine in this process, for suites that look inside."""
        return LLM(self.folder, dtype=self.dtype, device=self.device, **options)


# -- engines in turns --

Job = Callable[[EngineProcess, int], Any]  # (engine, round) -> what it measured; round -1 warms up


@dataclass
class Measured:
    """What a job brought, per engine, in order of rounds; and who could not take part."""

    results: dict[str, list[Any]] = field(default_factory=dict)
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)  # what build returned
    skipped: dict[str, str] = field(default_factory=dict)

    def ratios(self, label: str, value: Callable[[Any], float]) -> float | None:
        """How many times an engine's value goes into nanoserve's: the median over the rounds."""
        ours = self.results.get("nanoserve")
        if not ours or not self.results[label]:
            return None
        pairs = zip(ours, self.results[label], strict=True)
        return statistics.median(value(a) / value(b) for a, b in pairs)


def engine_specs(settings: Settings, hf_batch_sizes: tuple[int, ...]) -> list[EngineSpec]:
    """nanoserve, its variants, then the peers."""
    specs = [EngineSpec("nanoserve", "nanoserve", {})]
    for name, llm_options in settings.variants.items():
        specs.append(EngineSpec(f"nanoserve, {name}", "nanoserve", {"llm_options": llm_options}))
    for name in settings.compare:
        if name == "hf":
            for size in hf_batch_sizes:
                specs.append(EngineSpec(f"hf, batch {size}", name, {"batch_size": size}))
        else:
            specs.append(EngineSpec(name, name, {}))
    return specs


def run_in_turns(
    settings: Settings, specs: list[EngineSpec], job: Job, repeat: int, title: str
) -> Measured:
    """Build every engine, warm it up, and let each do the job `repeat` times.

    An engine that cannot be used here, or fails, is left out with a word; if that is nanoserve, the
    error is raised.
    """
    measured = Measured()
    groups = [specs] if settings.is_cpu else [[spec] for spec in specs]
    total = len(specs) * (repeat + 1)
    with tqdm(total=total, desc=title, unit="run", disable=not settings.use_tqdm) as bar:
        for group in groups:
            with started(settings, group, measured) as engines:
                for round_ in range(-1, repeat):
                    for label, engine in list(engines.items()):
                        bar.set_postfix_str(label)
                        try:
                            result = job(engine, round_)
                        except EngineError as error:
                            if label == "nanoserve":
                                raise
                            measured.skipped[label] = str(error)
                            del engines[label]
                            measured.results.pop(label, None)
                            continue
                        bar.update()
                        if round_ >= 0:
                            measured.results.setdefault(label, []).append(result)
    return measured


@contextmanager
def started(
    settings: Settings, specs: list[EngineSpec], measured: Measured
) -> Iterator[dict[str, EngineProcess]]:
    """The engines of these specs that can be used here, built."""
    with ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for spec in specs:
            engine = stack.enter_context(
                EngineProcess(
                    spec.name,
                    python=settings.peer_python.get(spec.name),
                    folder=settings.nano_vllm if spec.name == "nano-vllm" else None,
                    threads=settings.threads,
                )
            )
            reason = engine.why_not(settings.device)
            try:
                if reason is None:
                    longest = min(2 * settings.high, settings.model_config.max_model_len)
                    measured.engines[spec.label] = engine.build(
                        folder=str(settings.folder),
                        dtype=settings.dtype,
                        device=settings.device,
                        temperature=settings.temperature,
                        max_model_len=max(longest, min(1024, settings.model_config.max_model_len)),
                        num_requests=max(settings.num_requests, *settings.batch_sizes),
                        **spec.options,
                    )
                    engines[spec.label] = engine
            except EngineError as error:
                if spec.label == "nanoserve":
                    raise
                reason = str(error)
            if reason is not None:
                measured.skipped[spec.label] = reason
                engine.close()
        yield engines


def describe(measured: Measured, label: str) -> dict[str, Any]:
    built = measured.engines[label]
    return {
        "engine": label,
        "versions": built["versions"],
        "description": built["description"],
        "start_seconds": built["seconds"],
    }


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


def warm_up(settings: Settings, requests: list[Request]) -> list[Request]:
    """A short run in front. On a GPU with all requests, so that every size has been seen."""
    some = requests[: 4 if settings.is_cpu else None]
    return [replace(request, num_output=min(request.num_output, 16)) for request in some]


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

    llm.engine.on_step.append(count)
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
