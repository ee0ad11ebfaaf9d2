"""Metrics: what is counted equals what the requests' own records say, however they end.

The real engine over the fake model (fakes.py), so that a run of hundreds of steps takes
milliseconds. Names, labels and bucket borders are compared with vLLM's sources where the
environment variable VLLM_0_32 says where they are.
"""

from __future__ import annotations

import ast
import importlib.util
import logging
import os
import re
import sys
import time
from collections import Counter as Tally
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import engines
import pytest
from engines import assert_idle, change_text, fail_in_executor, finish, params, step
from fakes import FakeExecutor, add_beam_search
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve import LLM, LLMEngine, RequestOutput
from nanoserve.bench.roofline import ModelCosts
from nanoserve.engine import StepReport
from nanoserve.extras.metrics import (
    Counter,
    CountingStatLogger,
    Gauge,
    Histogram,
    IterationStats,
    LoggingStatLogger,
    PrometheusStatLogger,
    StatLogger,
    collect_metrics,
    get_metrics,
)
from nanoserve.extras.metrics.catalog import (
    CACHE_CONFIG_INFO,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    token_buckets,
)
from nanoserve.extras.metrics.perf import ModelMetrics
from nanoserve.extras.metrics.reader import name_border
from nanoserve.output_processor import RequestState
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import ScheduledSequence, SchedulerOutput, Sequence

MakeEngine = Callable[..., LLMEngine]


@pytest.fixture(params=[False, True], ids=["plain", "overlapped"])
def make_engine(request: pytest.FixtureRequest) -> MakeEngine:
    """make_engine(num_kv_blocks=8, ...) -> an engine over the fake model."""
    return partial(engines.make_engine, async_scheduling=request.param)


def count(engine: LLMEngine) -> None:
    """Count, and log nothing."""
    collect_metrics(engine, CountingStatLogger(engine))


def value(llm: Any, name: str, label_value: str | None = None) -> float:
    """A counter or gauge."""
    [found] = [
        metric.value
        for metric in get_metrics(llm)
        if isinstance(metric, Counter | Gauge)
        and metric.name == f"vllm:{name}"
        and (label_value is None or label_value in metric.labels.values())
    ]
    return found


def histogram(llm: Any, name: str) -> Histogram:
    [found] = [metric for metric in get_metrics(llm) if metric.name == f"vllm:{name}"]
    assert isinstance(found, Histogram)
    return found


# -- what is counted is what happened --


class PreemptionCounter(Scheduler):
    """The real scheduler; it counts preemptions where they are made, whatever the sequence."""

    num_preempted = 0

    def _preempt(self, seq: Sequence) -> None:
        self.num_preempted += seq.seq_id >= 0
        super()._preempt(seq)

    def _swap_out(self, seq: Sequence) -> None:
        self.num_preempted += 1
        super()._swap_out(seq)

    def preempt_all(self) -> None:
        running = [*self.running, *self.swapped]
        self.num_preempted += len([seq for seq in running if seq.seq_id >= 0])
        super().preempt_all()


class Run:
    """Random requests on one engine; some are aborted, fail in the executor, or see a step fail."""

    def __init__(self, seed: int, with_faults: bool) -> None:
        self.random = random = Random(seed)
        self.engine = engines.make_engine(
            async_scheduling=random.random() < 0.5,
            num_kv_blocks=random.choice([12, 20, 64]),  # the first ones force preemptions
            max_num_seqs=random.choice([2, 4, 16]),
            max_num_batched_tokens=random.choice([16, 24, 64]),
            preemption_mode=random.choice(["recompute", "swap"]),
            enable_prefix_caching=random.random() < 0.8,
            scheduler_cls=PreemptionCounter,
        )
        count(self.engine)
        self.requests: dict[str, RequestState] = {}
        self.outputs: dict[str, RequestOutput] = {}
        faults = [self.abort, self.abort_one, self.fail, self.fail_step] if with_faults else []
        actions = [self.add, self.add, *faults]
        for _ in range(random.randint(5, 40)):
            random.choice(actions)()
            for _ in range(random.randint(0, 4)):
                self.step()
        for _ in range(2000):
            if not self.engine.has_unfinished_requests():
                break
            self.step()
        assert_idle(self.engine)

    def step(self) -> None:
        self.outputs |= {output.request_id: output for output in step(self.engine)}

    def add(self) -> None:
        random, request_id = self.random, str(len(self.requests))
        prompt = [7] * random.randint(0, 12) + [random.randint(1, 40)] * random.randint(1, 8)
        n = random.choice([1, 1, 1, 2, 3])
        stop = [random.randint(1, 40)] if random.random() < 0.3 else None
        some = params(n=n, seed=None, stop_token_ids=stop, max_tokens=random.randint(1, 12))
        state = self.engine.make_request(request_id, prompt, some)
        self.requests[request_id] = state
        self.engine.add(state)

    def pick(self) -> str | None:
        unfinished = list(self.engine.output_processor.requests)
        return self.random.choice(unfinished) if unfinished else None

    def abort(self) -> None:
        request_id = self.pick()
        if request_id is not None:
            self.engine.abort_request(request_id)

    def abort_one(self) -> None:
        """One of its completions; if the others have not forked off yet, all of them."""
        request_id = self.pick()
        if request_id is not None:
            self.engine.abort_request(request_id, index=0)

    def fail(self) -> None:
        request_id = self.pick()
        if request_id is not None:
            fail_in_executor(self.engine, request_id, self.random.randint(0, 5))

    def fail_step(self) -> None:
        self.engine.executor.fail_next_step = True

    # -- what the requests' own records say --

    @property
    def num_completions(self) -> int:
        return sum(state.root.sampling_params.n for state in self.requests.values())

    @property
    def sequences(self) -> list[Sequence]:
        return [seq for state in self.requests.values() for seq in state.sequences]

    def reasons(self) -> Tally[str]:
        """Of finished requests as their outputs say; of the others, by elimination, "abort"."""
        tally: Tally[str] = Tally()
        for request_id, state in self.requests.items():
            output = self.outputs.get(request_id)
            if output is not None and output.finished:
                tally.update(str(each.finish_reason) for each in output.outputs)
            else:
                reasons = [seq.status.finish_reason or "abort" for seq in state.sequences]
                tally.update(reasons)
                tally["abort"] += state.root.sampling_params.n - len(reasons)
        return +tally

    def check(self) -> None:
        engine, sequences, n = self.engine, self.sequences, self.num_completions
        tokens = [seq.num_output_tokens for seq in sequences]
        begun = [seq for seq in sequences if seq.num_output_tokens]
        assert value(engine, "generation_tokens") == sum(tokens)
        for output in self.outputs.values():
            if output.finished:
                theirs = [len(each.token_ids) for each in output.outputs]
                ours = self.requests[output.request_id].sequences
                assert sorted(theirs) == sorted(each.num_output_tokens for each in ours)
        successes = {
            reason: value(engine, "request_success", reason)
            for reason in ("stop", "length", "abort", "error")
        }
        assert {reason: n for reason, n in successes.items() if n} == self.reasons()
        assert value(engine, "num_preemptions") == engine.scheduler.num_preempted
        self.check_histograms(n, tokens, begun)
        assert value(engine, "num_requests_running") == value(engine, "num_requests_waiting") == 0
        assert value(engine, "kv_cache_usage_perc") == 0

    def check_histograms(self, n: int, tokens: list[int], begun: list[Sequence]) -> None:
        """Each completion once in each histogram, and the phases add up."""
        read = partial(histogram, self.engine)
        for name in ("e2e_request_latency_seconds", "request_prompt_tokens"):
            assert read(name).count == n
        for name in ("request_generation_tokens", "request_num_preemptions"):
            assert read(name).count == n
        for name in ("request_params_n", "request_max_num_generation_tokens"):
            assert read(name).count == len(self.requests)
        assert read("request_params_n").sum == n
        assert read("request_generation_tokens").sum == sum(tokens)
        prompts = [s.root.num_prompt_tokens * s.root.sampling_params.n for s in self.states]
        assert read("request_prompt_tokens").sum == sum(prompts)
        for name in ("prefill", "decode", "inference"):
            assert read(f"request_{name}_time_seconds").count == len(begun)
        first, inter = read("time_to_first_token_seconds"), read("inter_token_latency_seconds")
        assert first.count == len(begun)
        assert first.count + inter.count == sum(tokens)
        near = partial(pytest.approx, rel=1e-6, abs=1e-3 * max(1, len(begun)))
        moments = [seq.metrics for seq in begun]
        waited = sum((m.last_token_ts or 0) - m.queued_ts for m in moments)
        assert first.sum + inter.sum == near(waited)
        assert inter.sum == near(read("request_decode_time_seconds").sum)
        queued, inference = read("request_queue_time_seconds"), read("request_inference_time_seconds")
        assert queued.count >= inference.count
        prefill, decode = read("request_prefill_time_seconds"), read("request_decode_time_seconds")
        assert prefill.sum + decode.sum == near(inference.sum)
        assert read("e2e_request_latency_seconds").sum >= first.sum + inter.sum - 1e-3 * n

    @property
    def states(self) -> list[RequestState]:
        return list(self.requests.values())


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32))
def test_counters_equal_what_the_requests_say(seed: int) -> None:
    """Without faults: also what was computed, and what was found in the prefix cache."""
    run = Run(seed, with_faults=False)
    run.check()
    engine = run.engine
    num_forks = engine.scheduler.max_num_seqs - 1
    prompts = [seq for seq in run.sequences if not 0 < seq.branch <= num_forks]
    queried = sum(seq.num_prompt_tokens for seq in prompts)
    cached = sum(seq.num_cached_tokens for seq in prompts)
    assert value(engine, "prompt_tokens") == queried
    assert value(engine, "prompt_tokens_cached") == cached
    assert value(engine, "prompt_tokens_by_source", "local_compute") == queried - cached
    assert value(engine, "prompt_tokens_by_source", "local_cache_hit") == cached
    is_on = engine.config.enable_prefix_caching
    assert value(engine, "prefix_cache_queries") == (queried if is_on else 0)
    assert value(engine, "prefix_cache_hits") == cached
    assert value(engine, "prompt_tokens_cached_by_source", "device") == cached
    computed = histogram(engine, "request_prefill_kv_computed_tokens")
    assert (computed.count, computed.sum) == (run.num_completions, queried - cached)
    steps = histogram(engine, "iteration_tokens_total")
    assert steps.sum == sum(engine.executor.num_tokens.values())
    assert steps.count == engine.executor.num_launched


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_counters_are_right_whatever_goes_wrong(seed: int) -> None:
    """Aborted requests and completions, requests that fail, steps that fail and are repeated."""
    Run(seed, with_faults=True).check()


@pytest.mark.slow
def test_counters_are_right_in_many_runs() -> None:
    for seed in range(1500):
        Run(seed, with_faults=seed % 2 == 1).check()


def test_the_random_runs_contain_what_they_are_for() -> None:
    seen: Tally[str] = Tally()
    for seed in range(30):
        run = Run(seed, with_faults=True)
        seen += run.reasons()
        seen["preemptions"] += run.engine.scheduler.num_preempted
        seen["hits"] += int(value(run.engine, "prefix_cache_hits"))
        seen["failed steps"] += run.engine.executor.num_failed
        seen["forks"] += run.num_completions - len(run.requests)
    assert min(seen[name] for name in ("stop", "length", "abort", "error")) > 10
    assert min(seen[name] for name in ("preemptions", "hits", "failed steps", "forks")) > 10
