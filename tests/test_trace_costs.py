"""The pictures of time and cost: parts of a step, launches, graphs on a tape, limits, comparisons.

Everything that is drawn from measurements is drawn from made-up ones here; what a notebook tells is
held to the engine: launches to those that test_fused_triton.py counts, graphs to an engine without
them, goodput to Little's law.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from random import Random
from statistics import median

import pytest

pytest.importorskip("matplotlib")
import matplotlib
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve import SamplingParams
from nanoserve.bench.roofline import MachineLimits, ModelCosts
from nanoserve.bench.workload import DUMMY_MODELS
from nanoserve.extras import lesson, trace
from nanoserve.extras.trace import launches as launches_module
from nanoserve.extras.trace.async_steps import Call
from nanoserve.extras.trace.bubble import idle_share, plan_stages
from nanoserve.extras.trace.timer import PARTS
from nanoserve.tools.fake_executor import FakeExecutor

SHAPE = {**DUMMY_MODELS["qwen3-0.6b"], "num_hidden_layers": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(autouse=True)
def no_window() -> Iterator[None]:
    import matplotlib.pyplot as plt

    matplotlib.use("agg")
    yield
    plt.close("all")


def num_pictures() -> int:
    import matplotlib.pyplot as plt

    return len(plt.get_fignums())


# -- launches --


def test_a_layer_is_nine_launches() -> None:
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    layers = {ops: trace.one_layer(trace.list_launches(SHAPE, 256, 64, ops)) for ops in ("all",)}
    assert layers["all"] == [
        "linear",
        "rope_and_store_kernel",
        "paged_attention_kernel",
        "linear",
        "add_rms_norm_kernel",
        "linear",
        "silu_and_mul_kernel",
        "linear",
        "add_rms_norm_kernel",
    ]
    layers["none"] = trace.one_layer(trace.list_launches(SHAPE, 256, 64, "none"))
    assert layers["none"].count("linear") == 4
    assert len(layers["none"]) > 2 * len(layers["all"])
    trace.launch_strip("A layer", layers)
    assert num_pictures() == 1


def test_what_a_decode_costs() -> None:
    """The sequences share launches and weights; keys, values and operations are their own."""
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    one, many = (trace.decode_cost(SHAPE, number, 1024) for number in (1, 32))
    assert many["launches"] == one["launches"]
    assert many["MB of weights"] == pytest.approx(one["MB of weights"])
    for what in ("MB of KV cache", "GFLOP"):
        assert many[what] == pytest.approx(32 * one[what])
    layer = 1024 * 1024 * (2 + 1 + 1 + 2 + 9)  # q, k, v, o and three products with 3 x 1,024
    assert one["MB of weights"] == pytest.approx(2e-6 * (3 * layer + 151_936 * 1024))


# -- graphs and overlap --


def test_a_tape_changes_no_token_and_pads() -> None:
    answers = []
    for options in ({}, {"runner_cls": trace.GraphRunner}):
        with lesson.small_llm(40, **options) as llm:
            prompts = [lesson.prompt(llm, name) for name in "ABC"]
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            runner = llm.engine.executor.runner
    assert answers[0] == answers[1]
    (num_seqs, size, _), *decodes = runner.replays
    assert (num_seqs, size) == (3, None), "a prefill runs without a graph"
    assert {replay[:2] for replay in decodes} == {(3, 4)}
    assert len({address for _, _, address in decodes}) == 1


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_the_order_of_calls(is_overlapped: bool) -> None:
    with lesson.small_llm(async_scheduling=is_overlapped) as llm:
        calls = trace.record_calls(llm)
        llm.generate(lesson.prompt(llm, "C"), GREEDY, use_tqdm=False)
    second = "launch 2" if is_overlapped else "update 1"
    assert calls[2:4] == ["schedule 2", second] if is_overlapped else calls[2] == second
    assert [call for call in calls if call.startswith("update")][-1] == "update 6"


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("times", [(1, 4, 1), (2, 1, 3), (1, 1, 0.5)])
def test_the_scheme_of_overlap(times: tuple[float, float, float], is_overlapped: bool) -> None:
    """Neither lane does two things at once, and causes come before effects."""
    pieces = launches_module.overlap_times(*times, num_steps=6, is_overlapped=is_overlapped)
    for lanes in (("GPU",), ("schedule", "update")):
        work = sorted((start, end) for lane, _, start, end in pieces if lane in lanes)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(work))
    when = {(lane, step): (start, end) for lane, step, start, end in pieces}
    assert len(when) == 18
    for step in range(6):
        assert when["schedule", step][1] <= when["GPU", step][0]
        assert when["GPU", step][1] <= when["update", step][0]
    if is_overlapped and times == (1, 4, 1):
        assert all(when["GPU", step][1] == when["GPU", step + 1][0] for step in range(5))
    trace.overlap_scheme("A scheme", *times)
    assert num_pictures() == 1


# -- parts of a step --


def test_the_parts_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"block_size": 16, "enable_prefix_caching": False}
    with lesson.small_llm(64, **options) as llm:
        seconds = trace.measure_parts(llm, 2, prompt_len=8, num_output=4, rounds=1)
        assert "forward" not in vars(llm.engine.executor.runner), "the timer is gone"
        trace.print_operators(lambda: llm.generate([[7, 8]], GREEDY, use_tqdm=False), number=3)
    assert list(seconds) == ["prefill", "decode"]
    for parts in seconds.values():
        assert list(parts) == list(PARTS)
        assert all(part > 0 for part in parts.values())
    trace.shares("Parts", seconds)
    assert num_pictures() == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert all("% " in line and " calls " in line for line in lines)


# -- limits --


def test_the_ridge_of_a_prompt() -> None:
    """About rate / bandwidth x itemsize / 2 tokens: each weight is used once for each."""
    limits = MachineLimits(bandwidth=1e12, rate=200e12)
    costs = ModelCosts.of(trace.read_config(DUMMY_MODELS["qwen3-8b"]), 2)
    length = trace.ridge_prompt(costs, limits)
    assert length == pytest.approx(200, rel=0.15)
    before, at = (costs.step(n, 1, n, n * (n + 1) // 2) for n in (length - 1, length))
    assert limits.seconds(before) == before.num_bytes / limits.bandwidth
    assert limits.seconds(at) == at.operations / limits.rate
    trace.rooflines("Roofs", {"one": limits}, {"one": {"a": before, "b": costs.step(1, 1, 9, 9)}})
    assert num_pictures() == 1


# -- comparisons --


def test_runs_take_turns() -> None:
    calls: list[str] = []
    runs = {name: lambda name=name: calls.append(name) for name in "AB"}
    times = trace.time_in_turns(runs, turns=3)
    assert calls == ["A", "B"] * 4
    assert [len(turn) for turn in times] == [2, 2, 2]


def test_a_median_of_ratios_is_wrong_least_often() -> None:
    """Of an engine against itself, on a machine whose load wanders."""
    runs = [trace.wandering_times(Random(seed), 20) for seed in range(300)]
    ways = {
        "one after the other": [sum(t[:10]) / sum(t[10:]) for t in runs],
        "in turns": [median(a / b for a, b in zip(t[::2], t[1::2], strict=True)) for t in runs],
    }
    shares = trace.histograms("Spread", ways, 1.0, "A / B")
    wrong = [int(share.rstrip("%")) for share in shares.values()]
    assert wrong[0] > 40
    assert wrong[1] < 5
    trace.ratios("Ratios", ways, "A / B")
    trace.claims("Claims", {"one": ((2.0, 3.0), 2.5), "two": ((10.0, None), "not measured")})
    assert num_pictures() == 3


def test_what_makes_a_comparison_unfair() -> None:
    with lesson.small_llm(60) as llm:
        prompts = [lesson.prompt(llm, name) for name in "AB"]
        old, again = (llm.generate(prompts, GREEDY, use_tqdm=False) for _ in range(2))
        longer = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        new = llm.generate(prompts, longer, use_tqdm=False)
    assert trace.unfair(old, old) == []
    assert trace.unfair(old, again) == ["cached tokens"]
    assert trace.unfair(again, new) == ["lengths"]
    assert "prompts" in trace.unfair(old[:1], old[1:])


@pytest.mark.parametrize(("rate", "served"), [(25, 25), (50, 50), (80, 50)])
def test_goodput_follows_littles_law(rate: int, served: int) -> None:
    """8 places of 16 steps each: 50 requests in 100 steps at most; beyond, nobody is in time."""
    options = {"max_num_seqs": 8, "executor_cls": FakeExecutor}
    with lesson.small_llm(64, **options) as llm:
        throughput, goodput = trace.serve_at(llm, rate, num_steps=320)
    assert throughput == pytest.approx(served, abs=1)
    assert goodput == pytest.approx(rate, rel=0.05) if rate <= 50 else goodput == 0


# -- the stages of a pipeline --


@settings(deadline=None)
@given(num_stages=st.integers(1, 5), depth=st.integers(1, 6), num_steps=st.integers(1, 20))
def test_the_scheme_of_a_pipeline(num_stages: int, depth: int, num_steps: int) -> None:
    """Each step passes through the stages in order, and no stage computes two at a time. As many
    steps in flight as stages leave nobody idle but at the beginning and at the end."""
    launches = [Call("schedule", step) for step in range(1, num_steps + 1)]
    reads = [Call("update", step) for step in range(1, num_steps + 1)]
    events = launches[: depth - 1]
    for launch, read in itertools.zip_longest(launches[depth - 1 :], reads):
        events += [call for call in (launch, read) if call]
    parts = plan_stages(events, num_stages)
    assert len({(part.stage, part.begin) for part in parts}) == num_stages * num_steps
    for step in range(1, num_steps + 1):
        begins = [part.begin for part in parts if part.step == step]
        assert begins == sorted(set(begins))
    total = max(part.begin for part in parts) + 1
    if depth == 1:
        assert total == num_stages * num_steps
    if depth >= num_stages:
        assert total == num_steps + num_stages - 1
    assert idle_share(events, num_stages) == 1 - num_steps / total


def test_the_picture_of_a_pipeline() -> None:
    trace.pipeline("a scheme", {"run": [Call("schedule", 1), Call("update", 1)]}, num_stages=3)
    assert num_pictures() == 1
