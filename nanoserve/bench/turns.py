"""Engines in turns: how several of them are measured so that the comparison is fair.

Each engine has its own process (peers.py). On a CPU all of them stay up and take turns, round by
round, so that other load on the machine slows all of them alike. On a GPU they run one after the
other, because each needs all of its memory. Each engine warms up before the rounds that count.

    CPU   [warm up: A B C]  [round 0: A B C]  [round 1: A B C]
    GPU   A: [warm up] [round 0] [round 1]   B: [warm up] ...

The prompts of the warm-up are in no round: a prefix cache that holds them is of no use later.
Ratios are taken within a round, and their median is shown: that of A to B is
median(A0 / B0, A1 / B1).

vLLM: vllm/benchmarks/ measures one engine at a time and compares results of different runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from nanoserve import LLM
from nanoserve.bench.peers import EngineArgs
from nanoserve.bench.process import EngineError, EngineProcess, ServerProcess
from nanoserve.bench.roofline import MachineLimits, ModelCosts
from nanoserve.bench.workload import Request, draw_requests
from nanoserve.models.config import ModelConfig

Item = TypeVar("Item")

WARM_UP = -1  # the round in front
GPU_MEMORY_UTILIZATION = 0.9  # of all engines that one process holds at once


@dataclass(frozen=True)
class Settings:
    """The command line with every default filled in; cli.py explains the options."""

    folder: Path  # of the checkpoint
    model: str  # its name in the tables
    device: str  # "cpu" or "cuda"
    dtype: str
    limits: MachineLimits
    num_requests: int
    min_len: int  # tokens of a prompt, and of an output
    max_len: int
    latency_requests: int = 4
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    hf_batch_sizes: tuple[int, ...] = (32, 8)
    prefix_len: int = 512
    num_speculative_tokens: int = 5
    compare: tuple[str, ...] = ()  # peers
    variants: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> options of LLM
    peer_python: dict[str, str] = field(default_factory=dict)  # peer -> interpreter
    nano_vllm: str | None = None  # a folder that holds nanovllm/
    repeat: int = 3
    seed: int = 0
    temperature: float = 0.0
    request_rates: tuple[float, ...] = ()  # requests per second; none: from the speed measured
    goodput: dict[str, float] = field(default_factory=dict)  # limits in ms; none: likewise
    replicas: int = 2  # engines behind one server, in the suite replicas
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

    @property
    def lengths(self) -> list[int]:
        return [self.min_len, self.max_len]

    def draw(self, round_: int) -> list[Request]:
        """The requests of a round."""
        low, high = self.lengths
        vocab_size = self.model_config.vocab_size
        return draw_requests(self.num_requests, low, high, vocab_size, self.seed, round_)

    def draw_warm_up(self) -> list[Request]:
        """Short outputs; on a CPU few requests, on a GPU as many as in a round."""
        requests = self.draw(WARM_UP)[: 4 if self.is_cpu else None]
        return [replace(request, num_output=min(request.num_output, 16)) for request in requests]

    def engine_args(self, **options: Any) -> EngineArgs:
        """What an engine of a process of its own is built with."""
        longest = self.model_config.max_model_len
        return EngineArgs(
            folder=str(self.folder),
            dtype=self.dtype,
            device=self.device,
            temperature=self.temperature,
            max_model_len=min(longest, max(1024, 2 * self.max_len)),
            num_requests=max(self.num_requests, *self.batch_sizes),
            **options,
        )

    def progress(self, items: Iterable[Item], title: str) -> tqdm[Item]:
        return tqdm(items, desc=title, disable=not self.use_tqdm)

    @contextmanager
    def llm(self, **options: Any) -> Iterator[LLM]:
        """An engine in this process, for the suites that look inside."""
        with LLM(self.folder, dtype=self.dtype, device=self.device, **options) as llm:
            yield llm
        if not self.is_cpu:
            torch.cuda.empty_cache()

    @contextmanager
    def llms(self, options: dict[str, dict[str, Any]]) -> Iterator[dict[str, LLM]]:
        """An engine for each name, without a prefix cache by default. All have as many KV blocks as
        the first, whose steps should be the largest.

        On a GPU, the first gets one of as many equal shares of the memory as there are engines:
        else it would take nearly all, and the engines would differ in memory too.
        """
        memory: dict[str, Any] = {"gpu_memory_utilization": GPU_MEMORY_UTILIZATION / len(options)}
        llms: dict[str, LLM] = {}
        with ExitStack() as stack:
            for name, its in options.items():
                all_options = {"enable_prefix_caching": False, **memory, **its}
                llms[name] = stack.enter_context(self.llm(**all_options))
                memory = {"num_gpu_blocks_override": llms[name].engine.executor.num_kv_blocks}
            yield llms


class EngineSpec(NamedTuple):
    """One row of a comparison."""

    label: str
    name: str  # in peers.PEERS or servers.SERVERS
    options: dict[str, Any]  # of EngineArgs
    is_server: bool = False
    wait_policy: str | None = "active"  # the fastest on an idle machine, which a benchmark needs


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


Job = Callable[[EngineProcess, int], Any]  # (engine, round) -> what was measured


@dataclass
class Measured:
    """The results of a job, by the engines' labels."""

    results: dict[str, list[Any]] = field(default_factory=dict)  # in the order of rounds
    engines: dict[str, dict[str, Any]] = field(default_factory=dict)  # what an engine is
    skipped: dict[str, str] = field(default_factory=dict)  # why an engine is left out

    def ratio(self, label: str, speed: Callable[[Any], float]) -> float:
        """How many times as fast nanoserve is as an engine: the median over the rounds."""
        pairs = zip(self.results["nanoserve"], self.results[label], strict=True)
        return statistics.median(speed(ours) / speed(theirs) for ours, theirs in pairs)


def run_in_turns(settings: Settings, specs: list[EngineSpec], job: Job, title: str) -> Measured:
    """Build every engine, warm it up, and do the job with it in every round.

    An engine that cannot be used here, or that fails, is left out with all its results; if it is
    nanoserve itself, its error is raised.
    """
    measured = Measured()
    turns = ["build", "warm up", *range(settings.repeat)]
    groups = [specs] if settings.is_cpu else [[spec] for spec in specs]
    for group in groups:
        with ExitStack() as stack:
            running = [(spec, stack.enter_context(start(settings, spec))) for spec in group]
            for turn in settings.progress(turns, f"{title}: {', '.join(s.label for s in group)}"):
                running = [
                    (spec, engine)
                    for spec, engine in running
                    if take_turn(settings, spec, engine, turn, job, measured)
                ]
    return measured


def start(settings: Settings, spec: EngineSpec) -> EngineProcess:
    process_cls = ServerProcess if spec.is_server else EngineProcess
    return process_cls(
        spec.name,
        python=settings.peer_python.get(spec.name),
        folder=settings.nano_vllm if spec.name == "nano-vllm" else None,
        threads=settings.threads,
        wait_policy=spec.wait_policy,
    )


def take_turn(
    settings: Settings,
    spec: EngineSpec,
    engine: EngineProcess,
    turn: str | int,
    job: Job,
    measured: Measured,
) -> bool:
    """Whether the engine could do what its turn asked for; if not, the engine is closed."""
    try:
        if turn == "build":
            built = engine.build(settings.engine_args(**spec.options))
            measured.engines[spec.label] = {"engine": spec.label, **built}
        elif turn == "warm up":
            engine.generate(settings.draw_warm_up())
        else:
            measured.results.setdefault(spec.label, []).append(job(engine, int(turn)))
    except EngineError as error:
        if spec.label == "nanoserve":
            raise
        measured.skipped[spec.label] = str(error).removeprefix(f"{spec.name}: ")
        measured.results.pop(spec.label, None)
        engine.close()
        return False
    return True
