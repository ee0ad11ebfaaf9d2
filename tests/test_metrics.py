"""Metrics: what is counted equals what the requests' own records say, however they end.

The real engine over the fake model (fakes.py), so that a run of hundreds of steps takes
milliseconds. Names, labels and bucket borders are compared with vLLM's sources where the
environment variable VLLM_0_32 says where they are.
"""

from __future__ import annotations

import ast
import asyncio
import http.server
import importlib.util
import logging
import math
import os
import re
import sys
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import engines
import numpy as np
import pytest
from engines import assert_idle, change_text, fail_in_executor, finish, params, step
from fakes import FakeExecutor, add_beam_search
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve import LLM, EngineArgs, LLMEngine, RequestOutput
from nanoserve.bench.roofline import ModelCosts
from nanoserve.engine import StepReport
from nanoserve.exceptions import QueueOverflowError
from nanoserve.extras import lesson
from nanoserve.extras.metrics import (
    Counter,
    CountingStatLogger,
    Gauge,
    Histogram,
    IterationStats,
    LoggingStatLogger,
    PrometheusStatLogger,
    StatLogger,
    TracingStatLogger,
    collect_metrics,
    get_metrics,
)
from nanoserve.extras.metrics.catalog import (
    ADMISSION_REJECTIONS,
    CACHE_CONFIG_INFO,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    token_buckets,
)
from nanoserve.extras.metrics.perf import ModelMetrics
from nanoserve.extras.metrics.reader import Observations, name_border
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

    def preempt(self, seq: Sequence) -> None:
        self.num_preempted += seq.seq_id >= 0
        super().preempt(seq)

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
        stop = random.sample(range(1, 41), 8) if random.random() < 0.3 else None
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
        queued, inference = (
            read("request_queue_time_seconds"),
            read("request_inference_time_seconds"),
        )
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
    for seed in range(600):
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


# -- one thing at a time --


def test_n_completions_count_one_prompt_and_n_requests(make_engine: MakeEngine) -> None:
    """Three completions of which two find room: the third is queued, and computes its own last
    block of the prompt."""
    engine = make_engine(max_num_seqs=2)
    count(engine)
    engine.add_request("a", list(range(1, 11)), params(n=3, max_tokens=4))
    finish(engine)
    assert value(engine, "request_success", "length") == 3
    assert value(engine, "prompt_tokens") == 20
    assert value(engine, "prompt_tokens_cached") == 8
    assert value(engine, "generation_tokens") == 12
    assert histogram(engine, "request_params_n").buckets["2.0"] == 0
    assert histogram(engine, "request_params_n").buckets["5.0"] == 1
    computed = histogram(engine, "request_prefill_kv_computed_tokens")
    assert (computed.count, computed.sum) == (3, 12)


def test_latency_begins_at_the_arrival_that_the_caller_tells(make_engine: MakeEngine) -> None:
    engine = make_engine()
    count(engine)
    engine.add_request("a", [1, 2], params(max_tokens=3), arrival_time=time.time() - 1000)
    finish(engine)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert 1000 <= histogram(engine, name).sum < 1900
    assert histogram(engine, "request_queue_time_seconds").sum < 900


def test_a_request_that_ends_in_the_queue_has_no_prefill(make_engine: MakeEngine) -> None:
    engine = make_engine()
    count(engine)
    engine.add_request("a", [1, 2], params(n=2))
    engine.abort_request("a")
    assert value(engine, "request_success", "abort") == 2
    assert histogram(engine, "e2e_request_latency_seconds").count == 2
    assert histogram(engine, "request_queue_time_seconds").count == 0
    assert histogram(engine, "request_prefill_time_seconds").count == 0
    assert histogram(engine, "request_params_max_tokens").sum == 20


def test_requests_that_are_refused(make_engine: MakeEngine) -> None:
    """Because so many wait already. Each counts once, and by nothing else."""
    engine = make_engine(max_num_waiting=1)
    engine.add_request("a", [1], params())
    with pytest.raises(QueueOverflowError):
        engine.add_request("before anybody counts", [1], params())
    count(engine)
    for _ in range(2):
        with pytest.raises(QueueOverflowError):
            engine.add_request("b", [1], params())
    finish(engine)
    [rejections] = [m for m in get_metrics(engine) if m.name == "vllm:admission_rejections"]
    assert rejections.labels.keys() == {"model_name", "reason"}
    assert rejections.labels["reason"] == "max_num_waiting"
    assert rejections.value == 2
    assert histogram(engine, "e2e_request_latency_seconds").count == 1


def test_preemptions_are_counted_when_they_happen(make_engine: MakeEngine) -> None:
    """Those by a step that fails: with the next one that succeeds."""
    engine = make_engine()
    count(engine)
    for name in "ab":
        engine.add_request(name, [1, 2, 3], params())
    step(engine)
    step(engine)
    engine.executor.fail_next_step = True
    step(engine)
    engine.abort_request("b")
    step(engine)
    step(engine)
    assert value(engine, "num_preemptions") == 2
    finish(engine)


def test_a_consumer_that_fails_counts_as_an_error(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of its completions, also the one that had not forked off yet."""
    engine = make_engine()
    count(engine)

    def fail(sequence: Sequence) -> str | None:
        raise KeyError(sequence.request_id)

    change_text(monkeypatch, fail)
    engine.add_request("a", [1, 2], params(n=2))
    last = finish(engine)["a"]
    assert [each.finish_reason for each in last.outputs] == ["error", "error"]
    assert value(engine, "request_success", "error") == 2
    num_tokens = sum(len(each.token_ids) for each in last.outputs)
    assert histogram(engine, "request_generation_tokens").sum == num_tokens


def test_a_beam_search_counts_tokens_and_no_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    count(engine)
    add_beam_search(engine, "beams", [1, 2, 3], 2, 5)
    finish(engine)
    assert value(engine, "prompt_tokens") == value(engine, "prefix_cache_queries") == 3
    assert value(engine, "generation_tokens") == 1 + 2 * 4
    for name in ("e2e_request_latency_seconds", "time_to_first_token_seconds"):
        assert histogram(engine, name).count == 0


def test_counting_may_begin_while_requests_run(make_engine: MakeEngine) -> None:
    """Of those that run already, only what is seen is counted: no first token."""
    engine = make_engine()
    engine.add_request("a", [1, 2], params(max_tokens=10))
    for _ in range(4):
        step(engine)
    before = engine.output_processor.requests["a"].root.num_output_tokens
    count(engine)
    finish(engine)
    assert value(engine, "generation_tokens") == 10 - before
    assert histogram(engine, "time_to_first_token_seconds").count == 0
    assert histogram(engine, "inter_token_latency_seconds").count == 10 - before - 1
    assert value(engine, "request_success", "length") == 1


def test_gauges_are_read_when_they_are_asked_for(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2, num_kv_blocks=10)
    count(engine)
    for name in "abcd":
        engine.add_request(name, [1, 2, 3, 4], params())
    assert (value(engine, "num_requests_running"), value(engine, "num_requests_waiting")) == (0, 4)
    step(engine)
    assert (value(engine, "num_requests_running"), value(engine, "num_requests_waiting")) == (2, 2)
    manager = engine.block_manager
    used = 1 - manager.num_free_blocks / manager.num_blocks
    assert value(engine, "kv_cache_usage_perc") == pytest.approx(used)
    assert used > 0
    engine.scheduler.waiting[0].is_held = True
    assert value(engine, "num_requests_waiting_by_reason", "deferred") == 1
    assert value(engine, "num_requests_waiting_by_reason", "capacity") == 1
    engine.scheduler.waiting[0].is_held = False
    finish(engine)


def test_nothing_is_kept_of_requests_that_have_ended(make_engine: MakeEngine) -> None:
    """No report tells of aborted ones."""
    engine = make_engine(max_num_seqs=8)
    manager = collect_metrics(engine, CountingStatLogger(engine))
    for number in range(400):
        engine.add_request(str(number), [1, 2, 3], params())
        step(engine)
        engine.abort_request(str(number))
    engine.add_request("last", [1, 2], params())
    finish(engine)
    assert len(manager._collector._known) <= 110
    assert len(manager._collector._last_token_ts) <= 110


def test_the_cost_of_a_step_is_that_of_the_roofline(make_engine: MakeEngine) -> None:
    """Every pair of a query and a key that it sees, counted one by one."""
    engine = make_engine(max_num_batched_tokens=16)
    count(engine)
    pairs = keys = tokens = rows = steps = 0

    def listen(report: StepReport) -> None:
        nonlocal pairs, keys, tokens, rows, steps
        steps += 1
        rows += len(report.updates)
        for item in report.scheduler_output.scheduled:
            positions = range(item.num_computed_tokens, sum(item[1:3]))
            pairs += sum(len(range(position + 1)) for position in positions)
            keys += positions.stop
            tokens += len(positions)

    engine.step_listeners.append(listen)
    for number in range(5):
        engine.add_request(str(number), [number + 1] * (3 + 4 * number), params())
    finish(engine)
    costs = ModelCosts.of(engine.model_config, 4)
    weights = steps * 4 * (costs.resident_weights + costs.head_weights)
    matrices = 2 * (costs.layer_weights * tokens + costs.head_weights * rows)
    expected = {
        "flops": matrices + costs.operations_per_key * pairs,
        "read_bytes": weights + 4 * costs.kv_numbers * keys,
        "write_bytes": 4 * costs.kv_numbers * tokens,
    }
    for name, number in expected.items():
        assert value(engine, f"estimated_{name}_per_gpu") == number


def test_the_example_of_the_cost_of_a_step(make_engine: MakeEngine) -> None:
    """A decode at position 9, and a chunk of 4 tokens behind 8. Two ranks have half each."""
    engine = make_engine()
    metrics = ModelMetrics(engine)
    items = (ScheduledSequence(0, 9, 1, 2, []), ScheduledSequence(1, 8, 4, 2, []))
    one = metrics.measure(SchedulerOutput(items, (), (), 5), num_sampled=1)
    cost = metrics.costs.step(5, 1, 22, 52)
    assert one[:2] == (cost.operations, cost.num_bytes)
    metrics.num_ranks = 2
    two = metrics.measure(SchedulerOutput(items, (), (), 5), num_sampled=1)
    assert two == tuple(number // 2 for number in one)


def test_without_the_formula_everything_else_is_counted(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bench/ can be deleted."""
    monkeypatch.setitem(sys.modules, "nanoserve.bench.roofline", None)
    engine = make_engine()
    count(engine)
    engine.add_request("a", [1, 2], params())
    finish(engine)
    assert value(engine, "estimated_flops_per_gpu") == 0
    assert value(engine, "generation_tokens") == 10


# -- loggers --


class Keeping(StatLogger):
    """Keeps what it receives."""

    def __init__(self) -> None:
        self.received: list[IterationStats] = []

    def record(self, stats: IterationStats) -> None:
        self.received.append(stats)


def test_a_logger_of_ones_own_sees_steps_and_lives(make_engine: MakeEngine) -> None:
    engine, keeping = make_engine(), Keeping()
    manager = collect_metrics(engine, keeping)
    engine.add_request("a", [1, 2, 3], params(max_tokens=4))
    finish(engine)
    steps = [stats for stats in keeping.received if stats.num_scheduled_tokens]
    assert [stats.num_scheduled_tokens for stats in steps] == [3, 1, 1, 1]
    assert [len(stats.time_to_first_tokens_iter) for stats in steps] == [1, 0, 0, 0]
    [life] = [life for stats in keeping.received for life in stats.finished_requests]
    assert (life.request_id, life.finish_reason, life.num_generation_tokens) == ("a", "length", 4)
    assert (life.num_prompt_tokens, life.max_tokens_param) == (3, 4)
    manager.close()
    engine.add_request("b", [1, 2, 3], params(max_tokens=4))
    finish(engine)
    assert len(keeping.received) == 5


def test_a_logger_that_fails_costs_no_request(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged; the other loggers get their numbers."""

    class Failing(StatLogger):
        def record(self, stats: IterationStats) -> None:
            raise KeyError("a bug in a logger")

    engine = make_engine()
    collect_metrics(engine, Failing(), CountingStatLogger(engine))
    engine.add_request("a", [1, 2, 3], params(max_tokens=4))
    assert finish(engine)["a"].outputs[0].finish_reason == "length"
    assert value(engine, "request_success", "length") == 1
    assert "a bug in a logger" in caplog.text


def test_what_is_no_engine_or_no_logger_is_refused(make_engine: MakeEngine) -> None:
    """At once, not in each step."""
    engine = make_engine()
    for call in (collect_metrics, get_metrics, CountingStatLogger, PrometheusStatLogger):
        with pytest.raises(TypeError, match="an LLMEngine is needed, got 5"):
            call(5)
    for stat_logger in (5, StatLogger):
        with pytest.raises(TypeError, match="a stat logger must be a StatLogger, got "):
            collect_metrics(engine, stat_logger)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="model_name must be a string or None, got 5"):
        PrometheusStatLogger(engine, model_name=5)  # type: ignore[arg-type]
    for interval in (-1, math.nan, "10"):
        with pytest.raises((TypeError, ValueError), match="interval"):
            LoggingStatLogger(engine, interval)  # type: ignore[arg-type]
    assert b"udcff" in PrometheusStatLogger(engine, model_name="a\udcff").render()
    assert not engine.step_listeners


def test_a_manager_may_be_closed_twice(make_engine: MakeEngine) -> None:
    engine = make_engine()
    manager = collect_metrics(engine, Keeping())
    for _ in range(2):
        manager.close()
        assert not engine.step_listeners
        assert not engine.output_processor.finish_listeners


def test_an_engine_has_one_manager(make_engine: MakeEngine) -> None:
    engine, other = make_engine(), make_engine()
    with pytest.raises(RuntimeError, match="disable_log_stats=False"):
        get_metrics(engine)
    manager, keeping = collect_metrics(engine), Keeping()
    assert collect_metrics(engine, keeping) is manager
    assert [type(each) for each in manager.stat_loggers] == [
        CountingStatLogger,
        LoggingStatLogger,
        Keeping,
    ]
    count(other)
    engine.add_request("a", [1, 2, 3], params(max_tokens=4))
    finish(engine)
    assert (value(engine, "generation_tokens"), value(other, "generation_tokens")) == (4, 0)


def test_the_line_in_the_log(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is the test's: two seconds for two requests of 3 + 4 tokens, the second with a
    prompt that is known. Then a line of level DEBUG, because nothing was done."""
    engine, now = make_engine(block_size=2), 50.0
    monkeypatch.setattr("nanoserve.extras.metrics.loggers.time.monotonic", lambda: now)
    log = LoggingStatLogger(engine, interval=2.0)
    collect_metrics(engine, log)
    caplog.set_level(logging.DEBUG, "nanoserve.extras.metrics")
    for name in ("a", "b"):
        engine.add_request(name, [1, 2, 3], params(max_tokens=4))
        finish(engine)
    caplog.clear()
    now = 52.0
    log.log()
    log.log()
    [first, second] = caplog.records
    assert (first.levelname, second.levelname) == ("INFO", "DEBUG")
    assert re.fullmatch(
        r"2\.0 prompt tokens/s, 4\.0 output tokens/s; running 0, waiting 0; KV cache 0\.0% full, "
        r"prefix cache hits 33\.3%; \S+ TFLOP/s, \S+ GB/s \(estimated\)",
        first.getMessage(),
    )


def test_the_log_counts_the_time_of_work(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock is the test's. An hour passes between two requests; a line comes after ten seconds
    of work, and says what was done in these."""
    engine, now = make_engine(), 50.0
    caplog.clear()  # of what was said while the engine was built
    monkeypatch.setattr("nanoserve.extras.metrics.loggers.time.monotonic", lambda: now)
    collect_metrics(engine, LoggingStatLogger(engine))
    caplog.set_level(logging.INFO, "nanoserve.extras.metrics")
    engine.add_request("a", [1, 2, 3], params(max_tokens=4))
    finish(engine)
    now += 3600.0
    engine.add_request("b", [5, 6], params(max_tokens=12))
    lines = []
    for _ in range(8):
        step(engine)
        lines.append([record.getMessage() for record in caplog.records])
        now += 2.0
    finish(engine)
    [first] = caplog.records
    assert lines.index([first.getMessage()]) == 5 + engine.config.async_scheduling
    assert "running 1" in first.getMessage()
    assert "1.0 output tokens/s" in first.getMessage()


# -- AsyncLLM --


def make_async_llm(**options: Any) -> Any:
    chapter = pytest.importorskip("nanoserve.extras.async_llm")
    model = engines.checkpoint(engines.VOCAB_SIZE, (engines.EOS,))
    config = EngineArgs(model=model, num_kv_blocks=64, block_size=4, max_num_waiting=8)
    return chapter.AsyncLLM(config, executor_cls=FakeExecutor, **options)


def test_requests_of_an_async_llm() -> None:
    """Each counts once, however it ends: by itself, by abort, with an error, because its stream
    was closed, or by shutdown."""
    llm = make_async_llm(disable_log_stats=False)
    fail_in_executor(llm.engine, "bad", num_output_tokens=2)
    tokens: list[int] = []

    async def read(name: str, prompt: list[int], **fields: Any) -> None:
        async for output in llm.generate(prompt, params(**fields), name):
            if output.finished:
                tokens.extend(len(each.token_ids) for each in output.outputs)

    async def main() -> None:
        await asyncio.gather(read("a", [1, 2, 3], n=2), read("bad", [4, 5]))
        await llm.pause_generation()
        llm._core.drop(await llm.add_request("closed", [1, 2], params()))
        await llm.add_request("b", [1], params())
        await llm.add_request("c", [1], params())
        await llm.abort("b")
        await asyncio.to_thread(llm.shutdown)

    asyncio.run(main())
    reasons = ("stop", "length", "abort", "error")
    assert [value(llm, "request_success", reason) for reason in reasons] == [0, 2, 3, 1]
    assert histogram(llm, "e2e_request_latency_seconds").count == 6
    assert histogram(llm, "request_params_n").count == 5
    assert value(llm, "generation_tokens") == sum(tokens) == 22
    assert histogram(llm, "request_generation_tokens").sum == 22


# -- Prometheus --


def test_prometheus_shows_what_get_metrics_gives(make_engine: MakeEngine) -> None:
    """Read back with prometheus-client's own parser."""
    parser = pytest.importorskip("prometheus_client.parser")
    engine = make_engine()
    prometheus = PrometheusStatLogger(engine, model_name="a model")
    collect_metrics(engine, prometheus)
    for number in range(6):
        engine.add_request(str(number), [number + 1] * 5, params(n=2))
        step(engine)
    engine.abort_request("5")
    finish(engine)
    text = prometheus.render().decode()
    families = {each.name: each for each in parser.text_string_to_metric_families(text)}
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    for metric in get_metrics(engine):
        labels = metric.labels.items()
        if isinstance(metric, Counter):
            assert families[metric.name].type == "counter"
            assert samples.pop((f"{metric.name}_total", frozenset(labels))) == metric.value
        elif isinstance(metric, Gauge):
            assert families[metric.name].type == "gauge"
            assert samples.pop((metric.name, frozenset(labels))) == metric.value
        else:
            assert isinstance(metric, Histogram)
            assert families[metric.name].type == "histogram"
            assert samples.pop((f"{metric.name}_sum", frozenset(labels))) == metric.sum
            assert samples.pop((f"{metric.name}_count", frozenset(labels))) == metric.count
            for border, number in metric.buckets.items():
                key = frozenset([*labels, ("le", border)])
                assert samples.pop((f"{metric.name}_bucket", key)) == number
    assert samples == {}
    assert all("a model" in m.labels.values() for m in get_metrics(engine)[:5])
    assert prometheus.content_type.startswith("text/plain")


def test_two_engines_have_two_registries(make_engine: MakeEngine) -> None:
    """One registry tells of one engine: the text would have each metric twice."""
    client = pytest.importorskip("prometheus_client")
    one, two = make_engine(), make_engine()
    assert PrometheusStatLogger(one).registry is not PrometheusStatLogger(two).registry
    registry = client.CollectorRegistry()
    PrometheusStatLogger(one, registry, model_name="one")
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        PrometheusStatLogger(two, registry, model_name="two")
    with pytest.raises(TypeError, match="registry must be a CollectorRegistry or None, got 5"):
        PrometheusStatLogger(two, registry=5)
    assert b'model_name="one"' in client.generate_latest(registry)
    assert not [f.name for f in client.REGISTRY.collect() if f.name.startswith("vllm:")]


@given(values=st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 5.0, 20.0, 21.0])))
def test_a_histogram_is_prometheus_own(values: list[float]) -> None:
    """A value at a border is not above it."""
    client = pytest.importorskip("prometheus_client")
    theirs = client.Histogram("a", "", buckets=(1.0, 2.0, 5.0, 20.0), registry=None)
    ours = Observations((1.0, 2.0, 5.0, 20.0))
    for each in values:
        theirs.observe(each)
        ours.observe(each)
    [family] = theirs.collect()
    samples = {(each.name, each.labels.get("le")): each.value for each in family.samples}
    assert {("a_bucket", name): n for name, n in ours.buckets().items()}.items() <= samples.items()
    assert samples["a_sum", None] == ours.sum


@given(
    values=st.lists(st.floats(0, 30), min_size=1),
    q=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
)
def test_a_quantile_lies_in_its_bucket(values: list[float], q: float) -> None:
    borders = (1.0, 2.0, 5.0, 20.0)
    seen = Observations(borders)
    for each in values:
        seen.observe(each)
    found = Histogram("a", {}, len(values), seen.sum, seen.buckets()).quantile(q)
    rank = max(1, math.ceil(q * len(values) - 1e-9))
    right = sorted(values)[rank - 1]
    ends = [0.0, *borders]
    low = max(end for end in ends if end < right or end == 0.0)
    high = min([end for end in ends if end >= right and end > 0] or [20.0])
    assert low <= found <= high


def test_the_example_of_a_quantile() -> None:
    """The third of four is the first of two in the bucket from 1 to 2."""
    buckets = {"1.0": 2, "2.0": 4, "+Inf": 4}
    assert Histogram("a", {}, 4, 5.0, buckets).quantile(0.75) == 1.5
    assert math.isnan(Histogram("a", {}, 0, 0.0, dict.fromkeys(buckets, 0)).quantile(0.5))
    assert Histogram("a", {}, 4, 5.0, buckets).quantile(np.float32(0.75)) == 1.5
    for q in (-1, 2, math.nan):
        with pytest.raises(ValueError, match="allowed: 0 to 1"):
            Histogram("a", {}, 4, 5.0, buckets).quantile(q)


def test_borders_are_written_as_prometheus_writes_them() -> None:
    utils = pytest.importorskip("prometheus_client.utils")
    borders = [*token_buckets(10**8), *[b for spec in HISTOGRAMS for b in spec.buckets]]
    assert [name_border(each) for each in borders] == [utils.floatToGoString(b) for b in borders]


def test_only_prometheus_needs_its_package(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    engine = make_engine()
    with pytest.raises(ModuleNotFoundError, match=r'pip install -e "\.\[server\]"'):
        PrometheusStatLogger(engine)
    count(engine)
    assert len(get_metrics(engine)) > 30


# -- traces --


@pytest.fixture
def spans() -> Any:
    """A provider that keeps its spans, and a function that reads them."""
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="needs opentelemetry-sdk")
    export = importlib.import_module("opentelemetry.sdk.trace.export")
    memory = importlib.import_module(f"{export.__name__}.in_memory_span_exporter")
    provider, exporter = sdk.TracerProvider(), memory.InMemorySpanExporter()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    return provider, exporter.get_finished_spans


def test_a_provider_of_spans_is_opentelemetrys(make_engine: MakeEngine) -> None:
    pytest.importorskip("opentelemetry.trace", reason="needs opentelemetry-api")
    with pytest.raises(TypeError, match="tracer_provider must be a TracerProvider or None, got 5"):
        TracingStatLogger(make_engine(), tracer_provider=5)


TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7


def test_a_span_for_each_completion(spans: Any) -> None:
    """In the caller's trace, with what the metrics say."""
    provider, read = spans
    keeping = Keeping()
    make_tracing = partial(TracingStatLogger, tracer_provider=provider)
    llm = make_async_llm(stat_loggers=[make_tracing, lambda engine: keeping])
    headers = {"Traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}

    async def main() -> None:
        assert await llm.is_tracing_enabled()
        await llm.pause_generation()
        fields = params(n=2, max_tokens=4, top_p=0.9, temperature=0.5)
        early = time.time() - 100
        await llm.add_request("a", [1, 2, 3], fields, early, trace_headers=headers)
        await llm.add_request("b", [1, 2], params(max_tokens=3, temperature=0))
        await llm.add_request("c", [1, 2], params())
        await llm.abort("c")
        await llm.resume_generation()
        await llm.wait_for_requests_to_drain(5)

    asyncio.run(main())
    llm.shutdown()
    aborted, b, *both = sorted(read(), key=lambda span: span.attributes["gen_ai.latency.e2e"])
    lives = [life for stats in keeping.received for life in stats.finished_requests]
    assert Tally(life.request_id for life in lives) == {"a": 2, "b": 1, "c": 1}
    for span in both:
        assert (span.name, span.kind.name) == ("llm_request", "SERVER")
        assert (span.context.trace_id, span.parent.span_id) == (TRACE, PARENT)
        seconds = (span.end_time - span.start_time) / 1e9
        assert seconds == pytest.approx(span.attributes["gen_ai.latency.e2e"], abs=1e-3)
        assert 100 <= span.attributes["gen_ai.latency.time_to_first_token"] <= seconds
        assert {name: span.attributes[f"gen_ai.{name}"] for name in GIVEN} == GIVEN
    assert b.attributes["gen_ai.request.id"] == "b"
    assert b.parent is None
    assert "gen_ai.request.temperature" not in b.attributes
    assert aborted.attributes["gen_ai.usage.completion_tokens"] == 0
    assert "gen_ai.latency.time_in_queue" not in aborted.attributes


GIVEN = {
    "request.id": "a",
    "request.n": 2,
    "request.top_p": 0.9,
    "request.temperature": 0.5,
    "request.max_tokens": 4,
    "usage.prompt_tokens": 3,
    "usage.completion_tokens": 4,
}


def test_headers_of_http_name_the_trace() -> None:
    pytest.importorskip("fastapi", reason='the server needs pip install -e ".[server]"')
    keeping = Keeping()
    with lesson.SmallServer(stat_loggers=[lambda engine: keeping]) as server:
        fields = {"prompt": "Once", "max_tokens": 1}
        server.send("/v1/completions", fields, Traceparent="00-1-2-01", Tracestate="a=b")
        server.send("/v1/completions", fields, Other="header")
    lives = [life for stats in keeping.received for life in stats.finished_requests]
    assert [life.trace_headers or {} for life in lives] == [
        {"traceparent": "00-1-2-01", "tracestate": "a=b"},
        {},
    ]


def test_only_traces_need_opentelemetry(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install -e "\.\[tracing\]"'):
        TracingStatLogger(make_engine(), "http://localhost:4317")


def test_spans_are_sent(
    make_engine: MakeEngine, spans: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a collector that speaks OTLP over HTTP: here a server of one request."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    received: list[tuple[str, bytes]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, body))
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.handle_request, daemon=True)
        server.timeout = 10
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none")
        engine = make_engine()
        url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        tracing = TracingStatLogger(engine, url)
        collect_metrics(engine, tracing)
        engine.add_request("a", [1, 2, 3], params(max_tokens=4))
        finish(engine)
        tracing.tracer_provider.shutdown()
        thread.join(10)
    [(path, body)] = received
    assert path == "/v1/traces"
    assert b"llm_request" in body
    assert b"gen_ai.usage.completion_tokens" in body
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier pigeon")
    with pytest.raises(ValueError, match="allowed: grpc, http/protobuf"):
        TracingStatLogger(engine, url)


# -- LLM --


def test_an_llm_counts_if_it_is_asked_to() -> None:
    """By vLLM's option, whose default is the same: no statistics."""
    with LLM(num_kv_blocks=32, disable_log_stats=False) as llm:
        collect_metrics(llm, PrometheusStatLogger(llm), CountingStatLogger(llm))
        [output] = llm.generate("Once upon a time", use_tqdm=False)
        number = len(output.outputs[0].token_ids)
        assert value(llm, "generation_tokens") == number
        assert value(llm, "prompt_tokens") == len(output.prompt_token_ids)
        assert [m for m in llm.get_metrics() if m.name == "vllm:num_requests_running"] == [
            Gauge("vllm:num_requests_running", {"model_name": "nanoserve/demo", "engine": "0"}, 0.0)
        ]


def test_without_the_chapter_the_error_says_what_needs_it(
    demo_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="nothing counts"):
        demo_llm.get_metrics()
    monkeypatch.setitem(sys.modules, "nanoserve.extras.metrics", None)
    with pytest.raises(ModuleNotFoundError, match=r"LLM\.get_metrics needs nanoserve"):
        demo_llm.get_metrics()
    with pytest.raises(ModuleNotFoundError, match="disable_log_stats"):
        LLM(disable_log_stats=False)


# -- vLLM's names --

VLLM = os.environ.get("VLLM_0_32", "")
KINDS = {"_gauge_cls": GAUGES, "_counter_cls": COUNTERS, "_histogram_cls": HISTOGRAMS}
# vLLM's metrics of what is not here, or of what it records only when it is asked to.
LEFT_OUT = {
    *("num_requests_kv_fetch_by_stage", "engine_sleep_state", "corrupted_requests"),
    *("watermark_requests", "lora_requests_info", "mm_cache_queries", "mm_cache_hits"),
    *("external_prefix_cache_queries", "external_prefix_cache_hits"),
    *("kv_block_lifetime_seconds", "kv_block_idle_before_evict_seconds"),
    "kv_block_reuse_gap_seconds",
}


def vllm_metrics() -> dict[str, tuple[str, str, str]]:
    """name -> (kind, its label beside the two that all have, its family of buckets), as vLLM's
    sources declare them."""
    found: dict[str, tuple[str, str, str]] = {}
    for file in ("loggers.py", "perf.py"):
        tree = ast.parse((Path(VLLM) / "v1/metrics" / file).read_text("utf-8"))
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            options = {each.arg: ast.unparse(each.value) for each in node.keywords}
            name = options.get("name", "").strip("'")
            if node.func.attr in KINDS and name.startswith("vllm:"):
                label = re.findall(r"\+ \['(\w+)'\]", options.get("labelnames", ""))
                label += re.findall(r"^\['model_name', '(\w+)'\]$", options.get("labelnames", ""))
                buckets = options.get("buckets", "").removesuffix("_buckets")
                kind = node.func.attr
                name = name.removesuffix("_total") if kind == "_counter_cls" else name
                found[name] = (kind, "".join(label), buckets)
    return found


@pytest.mark.skipif(not VLLM, reason="VLLM_0_32 does not say where vLLM's package is")
def test_names_labels_and_buckets_are_those_of_vllm() -> None:
    theirs = vllm_metrics()
    assert "vllm:cache_config_info" in (Path(VLLM) / "v1/metrics/loggers.py").read_text("utf-8")
    spec = importlib.util.spec_from_file_location("b", Path(VLLM) / "v1/metrics/buckets.py")
    assert spec is not None
    assert spec.loader is not None
    buckets = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(buckets)
    ours: dict[str, str] = {}
    for kind, specs in {**KINDS, "_counter_cls": (*COUNTERS, ADMISSION_REJECTIONS)}.items():
        for each in specs:
            ours[each.name] = kind
            its_kind, label, family = theirs[each.name]
            assert (kind, each.label) == (its_kind, label), each.name
            if family:
                borders = each.buckets or token_buckets(12345)
                assert list(borders) == buckets.histogram_buckets(family, 12345), each.name
    assert {name.removeprefix("vllm:") for name in theirs.keys() - ours.keys()} == LEFT_OUT


def test_every_metric_is_given_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    count(engine)
    given = Tally(metric.name for metric in get_metrics(engine))
    specs = (*GAUGES, CACHE_CONFIG_INFO, ADMISSION_REJECTIONS, *COUNTERS, *HISTOGRAMS)
    assert given == {spec.name: len(spec.label_values) for spec in specs}
