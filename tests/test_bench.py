"""nanoserve bench: is it counted right? Nothing here asks whether anything is fast.

PUBLISHED is what NVIDIA says of TensorRT-LLM on one GPU with as many requests as fit, of Llama 3.1
8B; for each of LENGTHS, (input, output), tokens per second:
https://github.com/NVIDIA/TensorRT-LLM/blob/258c7540c03517def55d9a5aadfa9288af474e1b/docs/source/performance/perf-overview.md
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanoserve.bench import cli, cost_model
from nanoserve.bench.cli import QUICK_SUITES, main
from nanoserve.bench.cost_model import Machine, Shape, decode, gpu, ideal_steps, named, prefill
from nanoserve.bench.engines import Generate, Peer
from nanoserve.bench.scale import H100, POLICIES, Simulation, most_tokens
from nanoserve.bench.suites import (
    Settings,
    Variant,
    build,
    compare,
    compute_figures,
    draw,
    parse_peer,
    parse_variant,
    run_round,
)
from nanoserve.bench.workload import Request, draw_requests, write_dummy

SIZES = {"num_requests": 3, "min_len": 4, "max_len": 8, "prefix_len": 32, "repeat": 2}
SIZES["long_len"] = 64
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
LENGTHS = ((128, 128), (128, 2048), (1000, 1000), (2048, 128), (2048, 2048), (20000, 2000))
PUBLISHED = {
    "H100, fp8": (gpu(3.35e12, 1979e12), 1, (28837, 21109, 15245, 3557, 9488, 1401)),
    "A100, fp16": (gpu(2.039e12, 312e12), 2, (6627, 5256, 3787, 800, 2424, 330)),
}


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits need not be measured here."""
    monkeypatch.setattr(cost_model, "measure_machine", lambda dtype: cost_model.cpu(3e10, 2e11))


def test_each_suite_runs(tmp_path: Path) -> None:
    """Without a suite, all of them. Other options, the same tokens: but not under a grammar."""
    file = tmp_path / "result.json"
    assert main(["--rate", "100", *FLAGS, "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    assert {*results} == {*QUICK_SUITES, "kernel decode", "kernel prefill"} - {"kernel"}
    for suite, result in results.items():
        for label, figures in result.items():
            assert suite == "structured" or figures.get("same_tokens", 1) == 1, (suite, label)
            assert figures.get("largest_difference", 0) < 1e-5
    assert {"cost model", "roofline"} < {*results["throughput"]} & {*results["gap"]}
    assert {"no tier", "main memory", "disk"} == {*results["chats"]}


@pytest.mark.slow
def test_stages_and_replicas_are_measured(tmp_path: Path) -> None:
    folder, file = write_dummy("qwen3-tiny", folder=tmp_path), tmp_path / "result.json"
    words = ["pipeline", "scale", "--quick", "--model", str(folder), *FLAGS]
    assert main([*words, "--json", str(file)]) == 0
    results = json.loads(file.read_text())["results"]
    stages = results["pipeline"]
    assert [*stages] == ["one in flight", "two in flight"]
    assert all(figures["same_tokens"] == 1 for figures in stages.values())
    assert len(results["scale"]) == 4


def test_a_server_is_an_engine(tmp_path: Path) -> None:
    """nanoserve's own, started for this; then as any server, by its address."""
    pytest.importorskip("uvicorn")
    from nanoserve.bench.client import ServerEngine

    folder = write_dummy("qwen3-tiny", folder=tmp_path)
    settings = Settings(folder, (Variant("nanoserve"), parse_peer("http")), **SIZES)
    result = compare("throughput", settings, tell=lambda text: None)
    assert result["http"]["same_tokens"] == 1
    server = ServerEngine(str(folder), {})
    try:
        url = f"{server.url.scheme}://{server.url.netloc}/v1"
        other = ServerEngine("", {"url": url})
        figures, tokens = run_round(other, "serve", draw("serve", settings, 0))
        assert figures["requests_per_s"] > 0 and {*map(len, tokens)} <= {4, 5, 6, 7, 8}
        other.close()
        other.model = "none"
        with pytest.raises(RuntimeError, match="404"):
            other.run([{"prompt": [20], "num_output": 1, "arrival": 0.0}])
    finally:
        server.close()


def test_engines_give_the_same_tokens(tmp_path: Path) -> None:
    folder = write_dummy("qwen3-tiny", folder=tmp_path)
    small = parse_variant("small:block_size=4;max_num_seqs=2;enable_prefix_caching=False")
    variants = (Variant("nanoserve"), small, parse_peer("transformers"))
    settings = Settings(folder, variants, **{**SIZES, "repeat": 1})
    result = compare("throughput", settings, tell=lambda text: None)
    assert [figures["same_tokens"] for figures in result.values()] == [1, 1, 1]


def test_figures_of_known_times() -> None:
    requests = [Request([1, 2, 3], 3), Request([4, 5], 2)]
    times = [[1.0, 2.0, 4.0], [3.0, 4.0]]
    assert compute_figures("throughput", requests, times, 2.0) == {"tokens_per_s": 2.5}
    assert compute_figures("prefix", requests, times, 2.0) == {"prompt_tokens_per_s": 2.5}
    assert compute_figures("latency", requests, times, 9.0) == {"tpot_ms": 1250, "ttft_ms": 2000}
    assert compute_figures("gap", requests, times, 9.0) == {"longest_gap_ms": 2000, "itl_ms": 1000}
    assert compute_figures("pipeline", requests, times, 9.0) == {"decode_tokens_per_s": 2}
    three_turns = [[9.0], [1.0], [3.0]]
    assert compute_figures("chats", requests, three_turns, 9.0) == {"ttft_ms": 2000}
    assert compute_figures("serve", requests, times, 1.0)["itl_ms_p99"] == 1000


def test_rounds_have_equal_lengths_and_other_tokens(tmp_path: Path) -> None:
    small = Settings(write_dummy("qwen3-tiny", folder=tmp_path), **SIZES)
    one, two = draw("prefix", small, 0), draw("prefix", small, 1)
    assert [len(each.prompt) for each in one] == [len(each.prompt) for each in two]
    assert one[0].prompt[:32] == one[1].prompt[:32] != two[0].prompt[:32]


def test_the_long_prompt_comes_while_others_decode(tmp_path: Path) -> None:
    settings = Settings(write_dummy("qwen3-tiny", folder=tmp_path), **{**SIZES, "max_len": 40})
    *others, long = draw("gap", settings, 0)
    assert len(long.prompt) == 64 and {each.num_output for each in others} == {40}
    engine = build(Variant("nanoserve"), settings, 1.0)
    try:
        requests = [asdict(each) for each in (*others, long)]
        *times, last = [result["times"] for result in engine.run(requests)]
        assert times[0][long.after - 1] < last[0] < times[0][-1]
    finally:
        engine.close()


def test_chats_say_again_what_was_said(tmp_path: Path) -> None:
    small = Settings(write_dummy("qwen3-tiny", folder=tmp_path), **SIZES)
    requests = draw("chats", small, 0)
    first, second = requests[:4], requests[4:8]
    for one, two in zip(first, second, strict=True):
        assert two.prompt[: len(one.prompt)] == one.prompt != two.prompt


# -- the cost model --


def test_bytes_and_operations_of_a_step() -> None:
    """Two layers of a model that can be counted by hand."""
    shape = Shape(2, 1000, 300, 16, 64, itemsize=4)
    machine = Machine(1e3, 1e4, (0.5, 1.0), (0, 0), (1.0, 0.5), (2.0, 0), is_overlapped=False)
    step = decode([10, 20])
    assert shape.parts(step) == ((4000, 4000), (1200, 1200), (4 * 16 * 30, 64 * 30))
    assert machine.least_seconds(shape, step) == (4000 + 1200 + 1920) / 1e3
    assert machine.expected_seconds(shape, step) == 2 * (4000 + 1200 + 1920) / 1e3 + 2.0 + 2.0
    assert prefill(5, cached=2) == (3, 1, 5, 3 + 4 + 5)
    one, two = Request([1, 2, 3], 3), Request([4, 5], 2)
    assert [*ideal_steps([one, two])] == [(5, 2, 5, 9), (2, 2, 7, 7), (1, 1, 5, 5)]


def test_the_shape_of_qwen3() -> None:
    shape = named("qwen3-0.6b", 2)
    assert shape.layer_weights + shape.head_weights == 595_984_384  # but for its norms
    assert shape.kv_numbers == 28 * 2 * 8 * 128


def test_the_cost_model_beside_an_older_one() -> None:
    """An H200 with nano-vllm's workload: 23,700 tokens per second were modelled by hand."""
    shape, machine = named("qwen3-0.6b", 2), gpu(4.8e12, 700e12)
    requests = draw_requests(256, 100, 1024, 1000)
    seconds = sum(machine.expected_seconds(shape, step) for step in ideal_steps(requests))
    assert sum(request.num_output for request in requests) / seconds == pytest.approx(23_700, 0.1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_cost_model_beside_published_figures(name: str) -> None:
    """While requests decode, as many prompts are computed as outputs end."""
    machine, itemsize, figures = PUBLISHED[name]
    shape = named("llama-3.1-8b", itemsize)
    for (length, output), published in zip(LENGTHS, figures, strict=True):
        batch = min(2048, most_tokens(shape) // (length + output))
        step = machine.expected_seconds(shape, decode([length + output // 2] * batch))
        seconds = output * step + batch * machine.expected_seconds(shape, prefill(length))
        error = batch * output / seconds / published - 1
        assert abs(error) < (0.26 if length == 128 else 0.13), (length, output, error)


# -- scale --


def test_a_router_that_knows_prompts_finds_more() -> None:
    found = {policy: Simulation(policy, 4, 60).run() for policy in POLICIES}
    assert found["prefix"]["hit_rate"] > found["load"]["hit_rate"] + 0.1
    assert Simulation("prefix", 4, 60).run() == found["prefix"]  # nothing depends on the clock
    alone = [Simulation(policy, 1, 20).run()["hit_rate"] for policy in POLICIES]
    assert alone[0] == alone[1]


def test_virtual_time_is_that_of_the_cost_model() -> None:
    simulation = Simulation("load", 1, 1)
    chat = simulation.events[0][2]
    chat.turns = chat.turns[:1]
    (question, length, _), start = chat.turns[0], simulation.events[0][0]
    number = len(chat.said) + len(question)
    simulation.run()
    steps = [prefill(number), *(decode([number + i]) for i in range(1, length))]
    seconds = sum(H100.expected_seconds(simulation.shape, step) for step in steps)
    assert simulation.now - start == pytest.approx(seconds)


# -- arguments --


def test_peers_with_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    """nano-vllm's interface, played by a module of that name."""

    class LLM:
        def __init__(self, folder: str, **options: Any) -> None:
            assert (folder, options) == ("here", {"max_model_len": 64})

        def generate(self, prompts: list[list[int]], params: list[Any]) -> list[dict[str, Any]]:
            return [{"text": "", "token_ids": [7] * each.max_tokens} for each in params]

    module = SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "nanovllm", module)
    engine = Generate("nano-vllm", "here", {"max_model_len": 64})
    figures, tokens = run_round(engine, "throughput", [Request([1], 3), Request([2], 2)])
    assert tokens == [[7, 7, 7], [7, 7]] and figures["tokens_per_s"] > 0


def test_a_gpu_gets_three_suites_at_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {}

    def measure(args: Any, sizes: dict[str, int]) -> dict[str, Any]:
        return found.update(vars(args), **sizes) or {}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cli, "measure", measure)
    assert main(["gpu", "--repeat", "2"]) == 0
    assert found["suites"] == ["throughput", "gap", "kernel"]
    assert (found["dummy"], found["dtype"]) == ("qwen3-0.6b", "bfloat16")
    assert (found["num_requests"], found["max_len"], found["repeat"]) == (256, 1024, 2)


def test_arguments_are_read_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse_variant("a:block_size=4;dtype=float16").options["dtype"] == "float16"
    with pytest.raises(ValueError, match="LABEL"):
        parse_variant("a:block_size")
    with pytest.raises(SystemExit):
        main(["fast"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            main(["gpu"])
        assert "gpu needs a CUDA GPU." in capsys.readouterr().err
    dead = Peer("vllm", sys.executable, "/nowhere", {})
    with pytest.raises(RuntimeError):
        run_round(dead, "throughput", [Request([1], 1)])
    dead.close()
