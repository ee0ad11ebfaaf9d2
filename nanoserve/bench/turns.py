"""Engines in turns: how several of them are measured so that the comparison is fair.

Each has its own process (peers.py). On a CPU all of them stay up and take turns, round by round, so
that whatever else the machine does meets all alike; on a GPU they come one after the other, because
each wants all of its memory. Before the rounds that count, each warms up.

    CPU   [warm up: A B C]  [round 0: A B C]  [round 1: A B C]
    GPU   A: [warm up] [round 0] [round 1]   B: [warm up] ...

Ratios are taken within a round, and their median is shown: that of A to B is
median(A0 / B0, A1 / B1).

vLLM: vllm/benchmarks/ measures one engine at a time and compares results of different runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from nanoserve import LLM
from nanoserve.bench.floor import MachineLimits, ModelCosts
from nanoserve.bench.process import EngineError, EngineProcess
from nanoserve.bench.workload import Request, draw_requests
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

    def take(self, label: str, engine: EngineProcess, job: Job, round_: int) -> bool:
        """Let an engine do the job once. False if it failed: it is left out, with all it had."""
        try:
            result = job(engine, round_)
        except EngineError as error:
            if label == "nanoserve":
                raise
            self.skipped[label] = str(error)
            self.results.pop(label, None)
            return False
        if round_ >= 0:
            self.results.setdefault(label, []).append(result)
        return True

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
                    for label in list(engines):
                        bar.set_postfix_str(label)
                        if not measured.take(label, engines[label], job, round_):
                            del engines[label]
                        bar.update()
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


def warm_up(settings: Settings, requests: list[Request]) -> list[Request]:
    """A short run in front. On a GPU with all requests, so that every size has been seen."""
    some = requests[: 4 if settings.is_cpu else None]
    return [replace(request, num_output=min(request.num_output, 16)) for request in some]
