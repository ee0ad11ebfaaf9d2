"""nanoserve/bench/cost_model.py: it counts what roofline.py counts, and says what was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.bench import cost_model, published, ratios, scale_page
from nanoserve.bench.cost_model import (
    DGX_H100,
    LARGE_MODELS,
    NODES_64,
    Device,
    Layout,
    Load,
    ModelShape,
    Step,
)
from nanoserve.bench.ratios import TOLERANCE, Ratio, measured_ratios
from nanoserve.bench.roofline import ModelCosts, ideal_steps
from nanoserve.bench.workload import DUMMY_MODELS, draw_requests
from nanoserve.config import ModelConfig

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "notebooks" / "results"
SHAPES = {**DUMMY_MODELS, **LARGE_MODELS}
names = st.sampled_from([name for name in SHAPES if name != "qwen3-tiny"])
powers = st.sampled_from([1, 2, 4, 8, 16, 32, 64])
steps = st.builds(
    Step, st.integers(1, 10000), st.integers(1, 500), st.integers(1, 10**6), st.integers(1, 10**7)
)


@pytest.mark.parametrize("ratio", measured_ratios(RESULTS), ids=lambda ratio: ratio.name)
def test_the_model_says_what_was_measured(ratio: Ratio) -> None:
    """Every ratio of the page on scale."""
    assert abs(ratio.error) <= TOLERANCE


def test_both_fitted_numbers_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the bandwidth and no price of a layer: a ratio is 2.4 times too large."""
    monkeypatch.setattr(ratios, "cpu", lambda limits: Device(limits, 1.0, 1.0, 0.0))
    worst = max(ratio.error for ratio in measured_ratios(RESULTS))
    assert 2.35 < 1 + worst < 2.45


def test_a_price_of_each_sequence_would_make_it_better(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the page says of a third number: 12% instead of 17%."""
    without = ratios.seconds

    def seconds(model: ModelShape, device: Device, steps: list[Step]) -> float:
        return without(model, device, steps) + 100e-6 * sum(step.num_sampled for step in steps)

    before = max(abs(ratio.error) for ratio in measured_ratios(RESULTS))
    monkeypatch.setattr(ratios, "seconds", seconds)
    monkeypatch.setattr(ratios, "cpu", lambda limits: Device(limits, 0.85, 1.0, 350e-6))
    after = max(abs(ratio.error) for ratio in measured_ratios(RESULTS))
    assert (round(before, 2), round(after, 2)) == (0.17, 0.12)


def test_two_ranks_send_and_hold_what_the_model_counts() -> None:
    """The bytes of the recorded run. Rank 1 sends its half of the logits; their number tells how
    many sequences a step had. The engine holds the head twice, once as its kernel reads it."""
    result = json.loads((RESULTS / "cpu-qwen3-29m-parallel.json").read_text("utf-8"))
    rows = {row["ranks"]: row for row in result["suites"]["parallel"]["rows"]}
    model = ModelShape.named(ratios.SMALL, 4)
    number, hidden_bytes, logit_bytes = model.messages(cost_model.decode(1, 256))
    num_sequences = rows[2]["gather_bytes"] / (logit_bytes / 2)
    assert rows[2]["all_reduce_bytes"] == number * hidden_bytes * num_sequences
    held = model.weight_bytes + 4 * model.costs.head_weights
    for ranks, row in rows.items():
        assert row["weight_mib_per_rank"] * 2**20 == pytest.approx(held / ranks, rel=1e-3)


@pytest.mark.parametrize("engine", published.THROUGHPUTS, ids=lambda each: f"{each[0]} {each.gpus}")
def test_published_outputs_of_gpus(engine: published.Engine) -> None:
    """As the page on scale says: one GPU within 12%, but for short prompts; 8 up to two fifths."""
    short, *others = dict(published.throughputs())[engine]
    assert -0.35 < short.error < 0
    most = 0.12 if engine.gpus == 1 else 0.45
    assert all(-0.12 < pair.error < most for pair in others)


def test_published_gains_from_4_to_8_ranks() -> None:
    """What a choice between layouts needs: how much more 8 ranks put out than 4."""
    found = {(each.shown, each.gpus): pairs for each, pairs in published.throughputs()}
    for shown, most in (("H100, Llama 70B fp8", 0.11), ("A100, Llama 70B fp16", 0.17)):
        for few, many in zip(found[shown, 4], found[shown, 8], strict=True):
            gain = (many.model / few.model) / (many.published / few.published)
            assert abs(gain - 1) < most


def test_published_times_of_a_token() -> None:
    assert all(abs(pair.error) < 0.1 for pair in published.latencies().values())


def test_published_stages_against_ranks() -> None:
    """Llama 405B on eight H200, as NVIDIA compared them: 1.5 times the output with stages, and 5.6
    times the speed of a token alone with ranks. The page says what the lengths change."""
    limits = replace(published.H100_FP8.device.limits, bandwidth=4.8e12)
    device = replace(published.H100_FP8.device, limits=limits, memory=0.9 * 141e9)
    cluster = replace(DGX_H100, device=device)
    model = ModelShape.named(published.LLAMA_405B, 2, 1, 1)
    ranks, stages = Layout(8), Layout(1, 8)

    def output(layout: Layout, load: Load) -> float:
        most = cost_model.most_sequences(model, cluster, layout, load.length)
        return cost_model.serve(model, cluster, layout, load, most).tokens_per_second

    def gain(num_output: int) -> float:
        load = Load(2048, num_output)
        return round(output(stages, load) / output(ranks, load), 1)

    def alone(layout: Layout) -> float:
        return cost_model.pass_seconds(model, cluster, layout, cost_model.decode(1, 2112))

    assert (gain(128), gain(2048), round(alone(stages) / alone(ranks), 1)) == (1.5, 0.9, 5.9)


def test_where_tensor_parallelism_stops_paying_hangs_on_latency() -> None:
    """The sentence under the page's table: half and twice the latency, other prices of a layer."""

    def pays(cluster: cost_model.Cluster) -> list[int]:
        cases = (scale_page.SMALL, scale_page.MIDDLE, scale_page.LARGE_FP8, scale_page.LARGE)
        found = []
        for case in cases:
            alone = {
                size: scale_page.alone_seconds(case.model, cluster, Layout(size))
                for size in scale_page.SIZES
            }
            found.append(
                scale_page.pays_up_to({size: each for size, each in alone.items() if each})
            )
        return found

    def with_latency(factor: float) -> cost_model.Cluster:
        names = ("base_latency", "link_latency", "network_latency")
        return replace(NODES_64, **{name: factor * getattr(NODES_64, name) for name in names})

    usual = pays(NODES_64)
    assert pays(with_latency(0.5)) == [2 * each for each in usual]
    assert pays(with_latency(2)) == [4, 8, 8, 16]
    for changed in ({"layer_seconds": 5e-6}, {"layer_seconds": 30e-6}, {"bandwidth_share": 0.9}):
        assert pays(replace(NODES_64, device=replace(DGX_H100.device, **changed))) == usual


def test_the_best_figures_of_a_model_are_bold_where_they_are_shown_alike() -> None:
    rows = [line.split(" | ") for line in scale_page.cluster_table("en").splitlines()[2:]]
    for column in range(2, 8):
        bold = {(row[0], row[column]) for row in rows if "**" in row[column]}
        assert not {(row[0], f"**{row[column]}**") for row in rows} & bold


def test_ratios_of_many_kinds_are_held() -> None:
    found = " ".join(ratio.name for ratio in measured_ratios(RESULTS))
    kinds = (
        "at once",
        "decoding 8",
        "prompt",
        "29M, against 0.6B",
        "bfloat16",
        "fp8",
        "int4",
        "KV",
    )
    assert [kind for kind in kinds if kind not in found] == []


@given(name=st.sampled_from(sorted(DUMMY_MODELS)), seed=st.integers(0, 9))
@settings(max_examples=20, deadline=None)
def test_the_parts_of_a_step_are_the_whole_of_the_roofline(name: str, seed: int) -> None:
    """The same bytes and operations, cut in three."""
    costs = ModelCosts.of(ModelConfig.from_folder(Path(name), SHAPES[name]), 2)
    requests = draw_requests(3, 1, 9, 300, seed)
    found = cost_model.steps_of(requests)
    for step, whole in zip(found, ideal_steps(costs, requests), strict=True):
        parts = ModelShape.named(name).parts(step)
        assert sum(part.num_bytes for part in parts) == whole.num_bytes
        assert sum(part.operations for part in parts) == whole.operations


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen3-8b", 8.19), ("llama-3.1-70b", 70.55), ("llama-3.1-405b", 405.85)],
)
def test_published_numbers_of_parameters(name: str, billions: float) -> None:
    """As their model cards count them."""
    assert ModelShape.named(name).weight_bytes / 2e9 == pytest.approx(billions, rel=1e-3)


def test_an_all_reduce_has_the_latency_that_nccl_expects() -> None:
    """16 H100 on 2 nodes: NCCL's log says 25.2 us for a few bytes (NVIDIA/nccl#1453)."""
    assert NODES_64.all_reduce(4, 16) == pytest.approx(25.2e-6, rel=1e-3)
    assert NODES_64.all_reduce(4, 1) == 0
    assert NODES_64.all_reduce(1e9, 2) == pytest.approx(1e9 / 370e9, rel=0.01)


@given(name=names, step=steps, tensor=powers, pipeline=powers)
@settings(max_examples=60, deadline=None)
def test_what_a_layout_can_and_cannot_do(name: str, step: Step, tensor: int, pipeline: int) -> None:
    """Cutting a layer takes time off its work and adds messages; stages take no time off."""
    model = ModelShape.named(name)

    def seconds(layout: Layout, cluster: cost_model.Cluster = NODES_64) -> float:
        return cost_model.pass_seconds(model, cluster, layout, step)

    alone, cut = seconds(Layout()), seconds(Layout(tensor))
    assert seconds(Layout(tensor, pipeline)) >= cut
    free = replace(NODES_64, base_latency=0.0, link_latency=0.0, network_latency=0.0,
                   link=1e30, network=1e30)  # fmt: skip
    assert alone / tensor * (1 - 1e-9) <= seconds(Layout(tensor), free) <= alone * (1 + 1e-9)
    assert cut >= seconds(Layout(tensor), free)


def test_a_rank_reads_at_least_one_kv_head() -> None:
    """8 KV heads: 16 ranks take as long for keys and values as 8 do, and 4 twice as long."""
    model = ModelShape.named("llama-3.1-70b")

    def seconds(ranks: int) -> float:
        with_keys, without = Step(1, 1, 10**7, 1), Step(1, 1, 0, 1)
        layout = Layout(ranks)
        return cost_model.pass_seconds(model, NODES_64, layout, with_keys) - (
            cost_model.pass_seconds(model, NODES_64, layout, without)
        )

    assert seconds(16) == pytest.approx(seconds(8), rel=1e-6)
    assert seconds(4) == pytest.approx(2 * seconds(8), rel=1e-6)


@given(name=names, tensor=powers, pipeline=powers, prompt=st.integers(1, 4000),
       output=st.integers(2, 2000), limit=st.floats(0.005, 0.2))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_fastest_batch_fits_and_keeps_its_limit(
    name: str, tensor: int, pipeline: int, prompt: int, output: int, limit: float
) -> None:
    model, layout, load = ModelShape.named(name), Layout(tensor, pipeline), Load(prompt, output)
    most = cost_model.most_sequences(model, NODES_64, layout, load.length)
    speed = cost_model.fastest(model, NODES_64, layout, load, limit)
    if speed is None:
        assert not most or cost_model.serve(model, NODES_64, layout, load, 1).tpot > limit
        return
    assert 0 < speed.batch <= most and speed.tpot <= limit
    share = min(tensor, model.num_kv_heads)
    kv = model.kv_bytes * load.length * speed.batch / (share * pipeline)
    assert model.weight_bytes / (tensor * pipeline) + kv <= NODES_64.device.memory
    twice = cost_model.serve(model, NODES_64, layout._replace(replicas=2), load, speed.batch)
    assert twice.tokens_per_second == pytest.approx(2 * speed.tokens_per_second)
    assert twice.tpot == speed.tpot


def test_the_example_of_the_docstring() -> None:
    table = (cost_model.__doc__ or "").split("together\n")[1].split("\n\n")[0]
    said = [float(line.split()[-1]) for line in table.splitlines()]
    model = ModelShape.named("qwen3-8b")
    cases = [cost_model.decode(1, 1024), cost_model.decode(256, 1024), cost_model.prefill(2048)]
    assert said == [
        round(1e3 * cost_model.pass_seconds(model, DGX_H100, Layout(), step), 1) for step in cases
    ]
