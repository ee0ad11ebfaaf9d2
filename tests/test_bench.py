"""bench.py and nanoserve/bench: what they promise to measure, at small sizes.

No test asks whether anything is fast; the tests ask whether it is counted right, and reported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from nanoserve import LLM, config, kv_cache
from nanoserve.bench import (
    claims,
    cli,
    control,
    inside,
    kernels,
    plot,
    policies,
    quantization,
    report,
    run,
    speculation,
    suites,
    turns,
)
from nanoserve.bench.parallel import measure_pipeline
from nanoserve.bench.peers import PEERS, EngineArgs, Server
from nanoserve.bench.process import EngineError, EngineProcess
from nanoserve.bench.roofline import Cost, MachineLimits, ModelCosts, ideal_steps, roofline_seconds
from nanoserve.bench.workload import (
    DUMMY_MODELS,
    QUESTIONS,
    Request,
    draw_questions,
    draw_requests,
    draw_shared_prefix,
    write_dummy,
)
from nanoserve.config import ModelConfig
from nanoserve.extras.trace import timer
from nanoserve.kernels.attention_cpu import paged_attention_torch
from nanoserve.kernels.threads import WAITING_VARIABLES

ROOT = Path(__file__).parent.parent
LIMITS = MachineLimits(bandwidth=1e9, rate=1e10)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that every engine can load."""
    return write_dummy("qwen3-tiny", tmp_path_factory.mktemp("dummy"), "float32")


@pytest.fixture
def tiny_settings(tiny: Path) -> turns.Settings:
    small = {"num_requests": 3, "min_len": 4, "max_len": 8, "latency_requests": 2, "repeat": 2}
    names = {"folder": tiny, "model": "qwen3-tiny", "device": "cpu", "dtype": "float32"}
    return turns.Settings(
        **{**names, **small, "prefix_len": 32, "batch_sizes": (1, 2), "limits": LIMITS},
        threads=1,
        use_tqdm=False,
    )


def costs_of(folder: Path, config: dict[str, Any], itemsize: int) -> ModelCosts:
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return ModelCosts.of(ModelConfig.from_folder(folder), itemsize)


# -- workload --


def test_the_published_workload_of_nano_vllm() -> None:
    """nano-vllm's bench.py draws 133,966 output tokens with seed 0."""
    requests = draw_requests(256, 100, 1024, vocab_size=151936)
    assert sum(request.num_output for request in requests) == 133_966
    assert sum(len(request.prompt) for request in requests) == 142_827


@given(
    number=st.integers(1, 5),
    low=st.integers(1, 9),
    extra=st.integers(0, 9),
    vocab_size=st.integers(2, 20),
    round_=st.integers(-1, 3),
)
@settings(max_examples=30, deadline=None)
def test_every_round_has_the_lengths_of_the_first(
    number: int, low: int, extra: int, vocab_size: int, round_: int
) -> None:
    requests = draw_requests(number, low, low + extra, vocab_size, round_=round_)
    first = draw_requests(number, low, low + extra, vocab_size)
    assert len(requests) == number
    for request, its_first in zip(requests, first, strict=True):
        assert low <= request.num_output == its_first.num_output <= low + extra
        assert low <= len(request.prompt) == len(its_first.prompt) <= low + extra
        assert all(0 <= token_id < vocab_size for token_id in request.prompt)


def test_lengths_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="1 <= low <= high"):
        draw_requests(1, 5, 4, 100)


def test_a_shared_prefix_is_all_that_is_shared() -> None:
    requests = draw_shared_prefix(4, 32, 16, 5, vocab_size=1000)
    assert len({tuple(request.prompt[:32]) for request in requests}) == 1
    assert len({tuple(request.prompt[32:]) for request in requests}) == 4
    assert {len(request.prompt) for request in requests} == {48}


def test_a_dummy_is_written_once(tiny: Path) -> None:
    stamp = (tiny / "config.json").stat().st_mtime_ns
    assert write_dummy("qwen3-tiny", tiny.parent, "float32") == tiny
    assert (tiny / "config.json").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match=r"no dummy model 'gpt-5'; allowed: qwen3-0\.6b"):
        write_dummy("gpt-5", tiny.parent, "float32")


# -- the roofline --


@pytest.mark.parametrize("name", DUMMY_MODELS)
def test_parameters_are_counted_as_transformers_counts_them(name: str, tmp_path: Path) -> None:
    """Without the norms, which are under a thousandth (of the tiny model, a hundredth)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    costs = costs_of(tmp_path, DUMMY_MODELS[name], itemsize=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    assert costs.num_parameters == matrices
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == pytest.approx(matrices, rel=1e-3 if name != "qwen3-tiny" else 1e-2)


def test_bytes_of_the_published_workload(tmp_path: Path) -> None:
    """By hand: 112 KiB of keys and values per token, read at every later token of its request;
    0.6B weights in bfloat16, read in each of up to 1024 steps. Together about 15 TB."""
    costs = costs_of(tmp_path, DUMMY_MODELS["qwen3-0.6b"], itemsize=2)
    requests = draw_requests(256, 100, 1024, 151936)
    steps = ideal_steps(costs, requests)
    assert len(steps) == max(request.num_output for request in requests)
    reads = sum(
        len(request.prompt) + number for request in requests for number in range(request.num_output)
    )
    total = sum(step.num_bytes for step in steps)
    weights = 2 * costs.num_parameters * len(steps)
    assert total == pytest.approx(reads * 112 * 1024 + weights, rel=1e-9)
    assert 14e12 < total < 16e12


def test_a_step_costs_what_a_hand_count_says(tmp_path: Path) -> None:
    """Two sequences of 10 and 20 keys decode: two tokens, two samples, 30 keys."""
    costs = costs_of(tmp_path, DUMMY_MODELS["qwen3-tiny"], itemsize=4)
    layer = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 112
    head = 64 * 320
    assert (costs.layer_weights, costs.head_weights) == (2 * layer, head)
    step = costs.step(2, 2, 30, 30)
    assert step.num_bytes == 4 * (2 * layer + head + 30 * 2 * 2 * 32)
    assert step.operations == 2 * 2 * (2 * layer + head) + 30 * 4 * 2 * 64


def test_a_token_is_multiplied_with_few_experts_and_a_step_reads_all(tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    costs = costs_of(tmp_path, {**DUMMY_MODELS["qwen3-tiny"], **experts}, itemsize=4)
    one_expert = 2 * 3 * 64 * 16
    assert costs.resident_weights - costs.layer_weights == 6 * one_expert


def test_the_roofline_is_the_slower_of_memory_and_arithmetic() -> None:
    assert LIMITS.seconds(Cost(2e9, 1e9)) == 2.0
    assert LIMITS.seconds(Cost(1e8, 5e10)) == 5.0
    assert roofline_seconds(LIMITS, [Cost(2e9, 0), Cost(0, 5e10)]) == 7.0


# -- engines in processes of their own --


@pytest.fixture(scope="module")
def expected(tiny: Path) -> tuple[list[Request], list[list[int]]]:
    """Requests, and the greedy output of transformers' logits for each."""
    from oracle import reference_logits

    requests = draw_requests(3, 4, 9, 320)
    outputs = []
    for request in requests:
        tokens = list(request.prompt)
        for _ in range(request.num_output):
            tokens.append(int(reference_logits(tiny, tokens)[-1].argmax()))
        outputs.append(tokens[len(request.prompt) :])
    assert len(set(outputs[0])) > 2, "a model that repeats itself would hide differences"
    return requests, outputs


@pytest.mark.parametrize(
    "name",
    ["nanoserve", *(pytest.param(n, marks=pytest.mark.slow) for n in ("hf", "hf-continuous"))],
)
def test_engines_give_the_same_tokens(
    name: str, tiny: Path, expected: tuple[list[Request], list[list[int]]]
) -> None:
    requests, outputs = expected
    with EngineProcess(name, threads=1) as engine:
        args = EngineArgs(folder=str(tiny), dtype="float32", batch_size=2, num_requests=3)
        built = engine.build(args)
        assert set(built["versions"]) >= {"python", "torch", "transformers"}
        assert built["description"]
        assert engine.generate(requests)["token_ids"] == outputs
        stream = engine.stream(requests[0])
        assert stream["token_ids"] == outputs[0]
        assert len(stream["times"]) == requests[0].num_output
        assert stream["times"] == sorted(stream["times"])
        if name == "nanoserve":
            with pytest.raises(EngineError, match="VLLMValidationError: the prompt has 5000"):
                engine.generate([Request([5] * 5000, 4)])
            assert engine.generate(requests)["token_ids"] == outputs, "after an error, too"
        engine.close()  # and a second time at the end of the block


FAKE_NANO_VLLM = """
import os, sys

class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        assert temperature > 1e-10 and ignore_eos
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, model, max_model_len):
        self.num_left = 0
    def add_request(self, prompt, params):
        self.num_left = params.max_tokens
    def is_finished(self):
        return self.num_left == 0
    def step(self):
        self.num_left -= 1
        return ([] if self.num_left else [(0, [7, 8, 5])]), 1
    def generate(self, prompts, params, use_tqdm):
        if prompts == [[0]]:
            print("out of memory", file=sys.stderr)
            os._exit(3)
        pairs = zip(prompts, params)
        return [{"text": "", "token_ids": [sum(p)] * each.max_tokens} for p, each in pairs]
"""


def test_nano_vllm_from_a_folder(tmp_path: Path) -> None:
    """With a stand-in that has nano-vllm's interface, and that ends its process in the end."""
    (tmp_path / "nanovllm.py").write_text(FAKE_NANO_VLLM)
    args = EngineArgs(folder=str(tmp_path), dtype="float32", device="cuda")
    with EngineProcess("nano-vllm", folder=str(tmp_path)) as engine:
        with pytest.raises(EngineError, match="it needs a CUDA GPU"):
            engine.build(replace(args, device="cpu"))
        engine.build(args)
        answer = engine.generate([Request([1, 2], 3), Request([5], 2)])
        assert answer["token_ids"] == [[3, 3, 3], [5, 5]]
        stream = engine.stream(Request([1, 2], 3))
        assert len(stream["times"]) == 3
        assert stream["token_ids"][-1] == 5
        with pytest.raises(EngineError, match=r"nano-vllm: its process has ended\. out of memory"):
            engine.generate([Request([0], 1)])


@pytest.mark.parametrize(
    ("chosen", "wait_policy", "expected"),
    [(None, None, None), (None, "active", "active"), ("passive", "active", "passive")],
)
def test_how_an_engine_waits(
    chosen: str | None,
    wait_policy: str | None,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a policy, the engine's own choice; the user's environment counts more than both."""
    for name in WAITING_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    script = tmp_path / "engine.py"
    script.write_text(
        "import json, os\ninput()\n"
        "print(json.dumps({'policy': os.environ.get('OMP_WAIT_POLICY')}), flush=True)\n"
    )
    monkeypatch.setattr(EngineProcess, "script", str(script))
    with EngineProcess("stand-in", wait_policy=wait_policy) as engine:
        assert engine.call("build") == {"policy": expected}


# -- the control plane alone --


def test_every_request_gets_its_tokens_without_a_model() -> None:
    requests = draw_requests(5, 3, 40, 1000)
    scheduler = control.make_scheduler(requests, num_blocks=64, max_num_seqs=3)
    sequences = list(scheduler.sequences.values())
    assert all(seconds.schedule > 0 for seconds in control.run_steps(scheduler))
    assert [sequence.num_output_tokens for sequence in sequences] == [
        request.num_output for request in requests
    ]
    scheduler.block_manager.check()


def test_the_scheduler_suite_measures_each_case(tiny_settings: turns.Settings) -> None:
    """The case that needs too much memory is left out; the last one has a queue."""
    result = control.scheduler_suite(tiny_settings, [2, 4], [16, 2**19 + 16], 3, num_waiting=50)
    cases = [(row["num_running"], row["context"], row["num_waiting"]) for row in result["rows"]]
    assert cases == [(2, 16, 0), (2, 2**19 + 16, 0), (4, 16, 0), (4, 16, 50)]
    for row in result["rows"]:
        assert 0 < row["schedule_us"] < row["step_us"] <= row["slowest_us"]
        assert row["update_us"] > 0
        assert row["prepare_us"] > 0
    assert set(result["growth_with_context"]) == {"2", "4"}
    assert result["growth_with_queue"] > 0
    result |= {"growth_with_context": {"16": 1.066, "64": 1.05}, "growth_with_queue": 1.2}
    shown = report.format_suite("scheduler", result)
    assert "by running sequences: 1.07 x at 16, 1.05 x at 64; " in shown
    assert "with the queue against without: 1.20 x\n" in shown
    assert "longest context against shortest" in report.format_suite("scheduler", result)


def test_the_measured_preparation_is_that_of_the_runner() -> None:
    """Every known token is sent at its position, and its slot is that of its block table."""
    requests = draw_requests(3, 5, 40, 1000)
    scheduler = control.make_scheduler(requests, num_blocks=64, max_num_seqs=3, budget=16)
    sequences = list(scheduler.sequences.values())
    seen: dict[int, dict[int, int]] = {seq.seq_id: {} for seq in sequences}

    class Recorder(control.InputRunner):
        def prepare_inputs(self, scheduled: Any, rows: Any) -> Any:
            inputs = super().prepare_inputs(scheduled, rows)
            tensors = inputs.tensors
            tables = scheduler.block_manager.block_tables
            number = 0
            for item in scheduled:
                for position in range(
                    item.num_computed_tokens, item.num_computed_tokens + item.num_scheduled_tokens
                ):
                    block = tables[item.seq_id][position // 16]
                    assert int(tensors.positions[number]) == position
                    assert int(tensors.slot_mapping[number]) == block * 16 + position % 16
                    seen[item.seq_id][position] = int(tensors.input_ids[number])
                    number += 1
            return inputs

    assert all(each.prepare > 0 for each in control.run_steps(scheduler, Recorder(3, 1024)))
    for seq in sequences:
        assert [seen[seq.seq_id][i] for i in range(seq.num_tokens - 1)] == seq.token_ids[:-1]


def test_memory_is_wasted_in_the_order_of_the_paper(tiny_settings: turns.Settings) -> None:
    """Paged least, the maximum most; and paged by no more than a block per request."""
    result = control.memory_suite(tiny_settings)
    ways = [row["way"].removeprefix("contiguous, ") for row in result["rows"]]
    assert ways == ["paged", "oracle", "power of two", "maximum"]
    used = [row["used_share"] for row in result["rows"]]
    assert used == sorted(used, reverse=True)
    at_once = [row["mean_running"] for row in result["rows"]]
    assert at_once == sorted(at_once, reverse=True)
    for row in result["rows"]:
        assert row["used_share"] + row["wasted_share"] == pytest.approx(1)
    assert result["rows"][0]["wasted_share"] < 15 / 275  # prompts have 275 tokens on average


def test_contiguous_reservations_by_hand() -> None:
    """Requests of 3 + 2 tokens, of whose 8 reserved slots 3, then 4 hold tokens; one at a time."""
    steps = list(control.run_contiguous([Request([1, 2, 3], 2)] * 2, 8, lambda _: 8))
    assert steps == [(3, 8, 1), (4, 8, 1)] * 2
    assert control.summarize(steps)["used_share"] == 7 / 16


# -- attention alone --


def test_bytes_and_operations_of_attention_by_hand() -> None:
    case = kernels.Case("", 2, 3, 5, num_heads=4, num_kv_heads=2, head_dim=8)
    assert case.operations == 4 * 2 * (3 + 4 + 5) * 4 * 8
    assert case.num_bytes(2) == 2 * (2 * 5 * 2 + 2 * 3 * 4) * 8 * 2
    decode, long, prefill = kernels.GPU_CASES
    assert decode.num_bytes(2) == pytest.approx(64 * 4096 * 8 * 128 * 2 * 2, rel=1e-2)
    assert (long.num_seqs, long.num_keys, prefill.num_queries) == (1, 32768, 8192)


def varlen_attn_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    **options: Any,
) -> Tensor:
    """What torch's varlen_attn, which has no CPU version, is documented to compute."""
    assert options["window_size"] == (-1, 0), "causal"
    outputs = []
    for seq, (start, end) in enumerate(pairwise(cu_seq_q)):
        if cu_seq_k is None:
            blocks, length = options["block_table"][seq].long(), options["seqused_k"][seq]
            keys, values = (cache[blocks].flatten(0, 1)[:length] for cache in (key, value))
        else:
            keys, values = (cache[cu_seq_k[seq] : cu_seq_k[seq + 1]] for cache in (key, value))
        assert end - start <= max_q
        assert len(keys) <= max_k
        tensors = (tensor.transpose(0, 1) for tensor in (query[start:end], keys, values))
        scale, is_causal = options["scale"], bool(end - start > 1)
        output = sdpa(*tensors, is_causal=is_causal, scale=scale, enable_gqa=options["enable_gqa"])
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("case", kernels.CPU_CASES, ids=lambda case: case.name)
def test_the_peer_of_the_kernel_computes_the_same(
    case: kernels.Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn_on_cpu)
    inputs = kernels.make_inputs(case, torch.float32, torch.device("cpu"))
    if case.num_queries > 1:  # its keys come in the cache's order
        inputs["block_table"] = torch.arange(inputs["block_table"].numel(), dtype=torch.int32)[None]
    torch.testing.assert_close(kernels.varlen_attention(**inputs), paged_attention_torch(**inputs))


def test_plain_pytorch_is_never_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, a failed capture would spoil the timing of all cases after it."""
    monkeypatch.setattr(kernels, "make_inputs", lambda *_: {})
    monkeypatch.setattr(kernels, "graph_seconds", lambda *_: 1.0)
    monkeypatch.setattr(kernels, "run_seconds", lambda *_: [2.0])
    case, where = kernels.GPU_CASES[0], (torch.bfloat16, torch.device("cuda"), LIMITS)
    for name, timed_by in {"triton": "graph", "torch": "calls"}.items():
        assert kernels.measure(case, name, print, *where)["timed_by"] == timed_by


# -- suites with a model in this process --


def test_static_batches_run_longer_and_emptier(tiny_settings: turns.Settings) -> None:
    """By the books, not by the clock: the same tokens in more steps."""
    result = policies.batching_suite(replace(tiny_settings, num_requests=12, max_len=16))
    continuous, static = result["rows"]
    assert (continuous["batching"], static["batching"]) == ("continuous", "static")
    assert result["batch_size"] == 3
    assert static["num_steps"] > continuous["num_steps"]
    assert static["mean_running"] < continuous["mean_running"] <= 3
    assert (len(static["seconds"]), continuous["continuous_is"]) == (2, 1.0)
    assert "continuous is" in report.format_suite("batching", result)


def test_engines_that_are_compared_have_the_same_memory(
    tiny_settings: turns.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, where an engine takes its cache from what the others have left."""
    total, block_bytes, taken = 100 * 2**20, 0, 0

    def free_memory(device: torch.device, utilization: float, num_local_ranks: int = 1) -> int:
        return max(0, int(total * utilization) - taken)

    def count(config: Any, specs: list[kv_cache.KVCacheSpec], *others: Any) -> int:
        nonlocal block_bytes, taken
        number = num_blocks_that_fit(config, specs, *others)
        block_bytes = sum(spec.num_bytes(config.block_size, torch.float32) for spec in specs)
        taken += number * block_bytes
        return number

    num_blocks_that_fit = kv_cache.num_blocks_that_fit
    monkeypatch.setattr(kv_cache, "free_memory", free_memory)
    monkeypatch.setattr(kv_cache, "num_blocks_that_fit", count)
    options = {name: {"max_num_seqs": 9999, "max_model_len": 256} for name in "abc"}
    with tiny_settings.llms(options) as llms:
        blocks = [llm.engine.executor.num_kv_blocks for llm in llms.values()]
    assert list(llms) == ["a", "b", "c"]
    assert blocks == [int(total * 0.9 / 3) // block_bytes] * 3
    assert taken <= 0.9 * total


def test_nobody_joins_a_static_batch() -> None:
    requests = [Request([number, 1, 2], length) for number, length in enumerate((2, 5, 3, 3, 1))]
    scheduler = control.make_scheduler(requests, num_blocks=64, max_num_seqs=2)
    scheduler.__class__ = policies.StaticBatchScheduler
    batches = []
    for _ in control.run_steps(scheduler):
        batches.append([seq.seq_id for seq in scheduler.running])
    assert batches == [[0, 1]] * 2 + [[1]] * 3 + [[2, 3]] * 3 + [[4]]


def test_chunks_bound_what_a_step_computes(tiny_settings: turns.Settings) -> None:
    result = policies.chunked_suite(tiny_settings, num_decoding=2, num_arrivals=2, budgets=(8, 99))
    off, chunks = result["rows"]
    assert (off["chunks"], chunks["chunks"]) == ("off", "8 tokens"), "99 would hold a whole prompt"
    assert off["against_off"] == {"ttft": 1.0, "gap_p99": 1.0}
    for row in result["rows"]:
        assert len(row["seconds"]) == 2
        assert 0 < row["gap_ms"]["p50"] <= row["gap_ms"]["p99"] <= row["largest_gap_ms"]
        assert row["ttft_ms"]["p50"] > 0
    assert "gap p99 against off" in report.format_suite("chunked", result)


def test_gaps_and_first_tokens_are_those_of_the_requests(
    tiny_settings: turns.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock that counts the steps: a prompt of 32 tokens in chunks of 8 - 2 decodes needs
    six steps, and each other request gets a token in each step."""
    with tiny_settings.llm(max_num_batched_tokens=8, max_num_seqs=4) as llm:
        steps: list[int] = []
        llm.engine.step_listeners.append(lambda report: steps.append(1))
        monkeypatch.setattr(policies.time, "perf_counter", lambda: float(len(steps)))
        decoding = [Request([number, 1], 30) for number in range(2)]
        gaps, waits, [seconds] = policies.interrupt(llm, decoding, [Request([3] * 32, 1)], 3)
    assert waits == [6.0]
    assert set(gaps) == {1.0}
    assert seconds == 9.0


def test_claims_are_read_from_a_run() -> None:
    memory = {"rows": [
        {"way": "paged", "used_share": 0.9, "mean_running": 30.0},
        {"way": "contiguous, maximum", "used_share": 0.3, "mean_running": 10.0},
    ]}  # fmt: skip
    batch = {"rows": [
        {"engine": engine, "batch": 1, "tokens_per_second": speed}
        for engine, speed in {"nanoserve": 150.0, "nanoserve, eager": 100.0}.items()
    ]}  # fmt: skip
    weights = [{"ranks": 1, "weight_mib_per_rank": 4.0}, {"ranks": 2, "weight_mib_per_rank": 2.0}]
    speeds = [("suffix", "copying", 1, 2.5), ("ngram", "stories", 1, 0.8), ("ngram", "JSON", 8, 9)]
    names = ("method", "prompts", "batch", "speed_up")
    spec = {"rows": [dict(zip(names, row, strict=True)) for row in speeds]}
    measured = {"memory": memory, "batch": batch, "parallel": {"rows": weights}, "spec": spec}
    here = {technique: text for technique, _, text in claims.measure_claims(measured)}
    assert "90.0%" in here["PagedAttention"]
    assert "3.0 x" in here["PagedAttention"]
    assert "1.50 x" in here["CUDA Graphs"]
    assert "50% of the weights" in here["Tensor Parallelism"]
    assert here["Continuous Batching"] == "not in this run: bench.py batching"
    assert here["Speculative Decoding"] == (
        "tokens per second at batch 1: 0.80 x (ngram, stories) to 2.50 x (suffix, copying)"
    )
    batch["rows"].pop()  # no eager engine in this run
    here = {technique: text for technique, _, text in claims.measure_claims(measured)}
    assert here["CUDA Graphs"] == "not measured by this run's batch"
    assert "== claims of the document 002, 性能优化技术 ==" in claims.format_claims(measured)
    assert claims.format_claims({"kernel": {"rows": []}}) == ""


def test_every_claim_has_a_suite() -> None:
    assert {claim.suite for claim in claims.CLAIMS} <= set(run.SUITES)


def test_drafts_save_steps_and_change_no_token(
    tiny_settings: turns.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the books, not by the clock. A model of random weights continues its own text."""
    monkeypatch.setattr(speculation, "MIN_REQUESTS", 1)
    result = speculation.spec_suite(replace(tiny_settings, repeat=1), num_output=12)
    found = [(row["method"], row["prompts"], row["batch"]) for row in result["rows"]]
    assert found == [(name, "own text", size) for name in ("ngram", "suffix") for size in (1, 2)]
    for row in result["rows"]:
        assert row["same_tokens"] == 1
        assert row["acceptance_rate"] is None or 0 <= row["acceptance_rate"] <= 1
        assert 1 <= row["tokens_per_step"] <= (row["mean_length"] or 1)
        assert row["speed_up"] > 0
    assert max(row["tokens_per_step"] for row in result["rows"]) > 1
    assert "slower than plain decoding: " in report.format_suite("spec", result)


def test_the_demo_model_is_asked_and_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are found in the prompt; of a story there is nothing to be found."""
    monkeypatch.setattr(speculation, "MIN_REQUESTS", 2)
    ngram = speculation.configs_of(5, is_demo=False)["ngram"]
    monkeypatch.setattr(speculation, "configs_of", lambda *options: {"ngram": ngram})
    demo = turns.Settings(
        config.resolve_folder(None), "demo", "cpu", "float32", LIMITS, 1, 1, 1, batch_sizes=(2,),
        repeat=1, use_tqdm=False,
    )  # fmt: skip
    rows = {row["prompts"]: row for row in speculation.spec_suite(demo, num_output=24)["rows"]}
    assert list(rows) == list(QUESTIONS)
    assert all(row["same_tokens"] == 1 for row in rows.values())
    assert rows["copying"]["tokens_per_step"] > 2 > rows["stories"]["tokens_per_step"]


def test_what_fewer_bits_save_and_cost(
    tiny_settings: turns.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the books, not by the clock. What the plain engine has said is right by definition."""
    engines = {"int8": {"quantization": "int8"}, "KV int8": {"kv_cache_dtype": "int8"}}
    wrong = {"worse": {"kv_cache_dtype": "int2"}}
    monkeypatch.setattr(quantization, "ENGINES", {**engines, **wrong})
    monkeypatch.setattr(quantization, "NUM_OWN", 2)
    settings = replace(tiny_settings, repeat=1)
    result = quantization.quantization_suite(settings, prompt_len=8, num_output=4)
    rows = {row["engine"]: row for row in result["rows"]}
    assert list(rows) == ["as it is", "int8", "KV int8"]
    plain = rows.pop("as it is")
    assert plain["right_answers"] == plain["right_tokens"] == 1
    assert rows["int8"]["weight_mib"] < plain["weight_mib"] == rows["KV int8"]["weight_mib"]
    assert rows["KV int8"]["kv_bytes"] < plain["kv_bytes"] == rows["int8"]["kv_bytes"]
    for row in rows.values():
        assert row["perplexity"] == pytest.approx(plain["perplexity"], rel=0.1)
        assert all(row[f"speed_up_{size}"] > 0 for size in settings.batch_sizes)
    assert "kv_cache_dtype is 'int2'" in result["skipped"]["worse"]
    assert "worse: kv_cache_dtype is" in report.format_suite("quantization", result)


def test_the_demo_model_has_answers_to_give(demo_llm: LLM) -> None:
    texts = quantization.draw_answers(demo_llm, number=1)
    assert len(texts) > 15
    assert quantization.read(demo_llm, texts)["right_answers"] > 0.9


def test_where_it_is_slower_is_said() -> None:
    names = ("method", "prompts", "batch", "speed_up")
    speeds = [("ngram", "JSON", 8, 0.9), ("ngram", "JSON", 16, 0.8), ("suffix", "JSON", 8, 1.1)]
    rows = [dict(zip(names, row, strict=True)) for row in speeds]
    assert speculation.say_slower(rows) == "ngram, JSON (batch 8, 16)"
    assert speculation.say_slower(rows[2:]) == "nowhere"


def test_questions_differ_in_every_round() -> None:
    for kind in QUESTIONS:
        drawn = [draw_questions(kind, 4, round_=round_) for round_ in (0, 1)]
        assert drawn[0] == draw_questions(kind, 4)
        assert drawn[0] != drawn[1]
        assert all(len(questions) == 4 for questions in drawn)


def test_the_prefix_suite(tiny_settings: turns.Settings) -> None:
    result = inside.prefix_suite(tiny_settings, suffix_len=4, num_output=2)
    assert result["hit_rate"] == 1.0, "two full blocks of 16, shared by three requests"
    assert len(result["seconds_on"]) == len(result["no_hits_seconds_off"]) == 2
    assert result["speed_up"] > 0
    assert set(result["cost_at_no_hits"]) == {"total", "control_plane"}
    assert "100.0%" in report.format_suite("prefix", result)


@pytest.mark.slow
def test_the_structured_suite(
    tiny_settings: turns.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every backend that is installed, with what it takes; others are left out by name."""
    structured = pytest.importorskip("nanoserve.bench.structured")
    monkeypatch.setattr(structured, "NUM_OUTPUT", 8)
    found = structured.structured_suite(tiny_settings)
    measured = {(row["backend"], row["constraint"]) for row in found["rows"]}
    assert ("nano", "regex") in measured
    names = {name for name, _ in measured} | set(found["skipped"])
    assert names == {"nano", "xgrammar", "guidance"}
    assert len(found["rows"]) == 3 * len(found["masks"]) == 3 * len(measured)
    assert all(row["tokens_per_second"] > 0 for row in found["rows"])
    assert "of unconstrained" in report.format_suite("structured", found)


class EngineHere:
    """Takes the place of EngineProcess: the engine is in this process."""

    def __init__(self, name: str, **_: Any) -> None:
        self.server = Server(PEERS[name])

    def build(self, args: EngineArgs) -> dict[str, Any]:
        return self.server.build(**asdict(args))

    def generate(self, requests: list[Request]) -> dict[str, Any]:
        prompts = [request.prompt for request in requests]
        return self.server.generate(prompts, [request.num_output for request in requests])

    def stream(self, request: Request) -> dict[str, Any]:
        return self.server.stream(request.prompt, request.num_output)

    def close(self) -> None:
        if self.server.engine is not None:
            self.server.engine.llm.close()

    def __enter__(self) -> EngineHere:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def test_what_tiers_find_again(
    tiny_settings: turns.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the books, not by the clock: each tier finds what enough blocks would, and without one
    nothing is left."""
    offload = pytest.importorskip("nanoserve.bench.offload")
    monkeypatch.setattr(turns, "EngineProcess", EngineHere)
    result = offload.offload_suite(replace(tiny_settings, repeat=1, prefix_len=64))
    assert result["num_blocks"] == 4 * result["device_blocks"]
    rows = {row["engine"].removeprefix("nanoserve, "): row for row in result["rows"]}
    assert list(rows) == ["nanoserve", "main memory", "disk", "enough blocks"]
    assert rows["nanoserve"]["found"] == 0
    assert all(row["same_tokens"] for row in rows.values())
    best = rows["enough blocks"]["found"]
    assert rows["main memory"]["found"] == rows["disk"]["found"] == best > 0.4
    lru, arc = result["policies"]
    assert lru["chat_blocks"] < lru["num_rows"] < lru["scanned_blocks"]
    assert arc["found"] > lru["found"]
    ways = [(row["tier"], row["way"]) for row in result["tiers"]]
    assert ways == [(tier, way) for tier in ("main memory", "disk") for way in ("down", "up")] + [
        ("peer", "up")
    ]
    assert all(row["mb_per_second"] > 0 for row in result["tiers"])
    assert "4 chats of 3 turns" in report.format_suite("offload", result)


def test_the_parts_of_a_step_add_up(tiny_settings: turns.Settings) -> None:
    variants = {"no chunks": {"enable_chunked_prefill": False}}
    result = inside.steps_suite(replace(tiny_settings, variants=variants))
    assert [row["engine"] for row in result["rows"]] == ["nanoserve", "nanoserve, no chunks"]
    for row in result["rows"]:
        parts = row["parts_ms"]
        assert list(parts) == ["schedule", "prepare", "model", "sample", "update", "other"]
        assert sum(parts.values()) == pytest.approx(row["step_ms"])
        assert min(parts[part] for part in timer.PARTS) > 0
        assert row["num_steps"] == max(r.num_output for r in tiny_settings.draw(0))
        assert row["gpu_ms"] is None


@pytest.mark.parametrize("gone", ["extras", "extras.trace", "extras.trace.timer"])
def test_without_extras_the_steps_suite_says_what_is_missing(
    gone: str, tiny_settings: turns.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ValueError: `measure` leaves the suite out, and goes on with the next one."""
    for name in list(sys.modules):
        if f"{name}.".startswith(f"nanoserve.{gone}."):
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"nanoserve/extras/trace/timer\.py, which is not here"):
        inside.measure_steps(tiny_settings, None)  # type: ignore[arg-type]


# -- suites that compare engines --


class FakeEngine:
    """Takes the place of EngineProcess: each engine needs a known number of seconds."""

    seconds: ClassVar[dict[str, float]] = {"nanoserve": 1.0, "hf": 2.0, "vllm": 4.0}
    log: ClassVar[list[tuple[str, tuple[tuple[int, ...], ...]]]] = []  # (name, prompts)

    def __init__(self, name: str, **_: Any) -> None:
        self.name = name

    def build(self, args: EngineArgs) -> dict[str, Any]:
        if self.name == "nano-vllm":
            raise EngineError("nano-vllm: nanovllm is not importable")
        return {"start_seconds": 0.0, "versions": {}, "description": "a fake"}

    def generate(self, requests: list[Request]) -> dict[str, Any]:
        self.log.append((self.name, tuple(tuple(request.prompt) for request in requests)))
        if self.name == "hf-continuous":
            raise EngineError("hf-continuous: out of memory")
        tokens = [[1] * request.num_output for request in requests]
        if self.name == "vllm":  # differs in one token of the first request
            tokens[0][-1] = 2
        return {"seconds": self.seconds[self.name], "token_ids": tokens}

    def stream(self, request: Request) -> dict[str, Any]:
        """The first token takes 50 ms, each further one as many ms as the engine has seconds."""
        gap = self.seconds[self.name] / 1000
        return {"times": [0.05 + gap * number for number in range(request.num_output)]}

    def close(self) -> None:
        """Nothing to end."""

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(autouse=True)
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(turns, "EngineProcess", FakeEngine)
    FakeEngine.log.clear()
    return FakeEngine.log


def test_ratios_are_computed_and_failures_told(tiny_settings: turns.Settings) -> None:
    peers = ("hf", "hf-continuous", "vllm", "nano-vllm")
    chosen = replace(tiny_settings, compare=peers, hf_batch_sizes=(2,))
    result = suites.throughput_suite(chosen)
    rows = {row["engine"]: row for row in result["rows"]}
    ratios = {name: row["nanoserve_is"] for name, row in rows.items()}
    assert ratios == {"nanoserve": 1.0, "hf, batch 2": 2.0, "vllm": 4.0}
    assert rows["vllm"]["tokens_per_second"] == result["num_output_tokens"] / 4
    assert rows["vllm"]["same_tokens"] == pytest.approx(2 / 3)
    assert rows["hf, batch 2"]["same_tokens"] == 1
    roofline = result["num_output_tokens"] / result["roofline_tokens_per_second"]
    assert rows["nanoserve"]["share_of_roofline"] == pytest.approx(roofline)
    assert result["skipped"] == {
        "hf-continuous": "out of memory",
        "nano-vllm": "nanovllm is not importable",
    }
    text = report.format_suite("throughput", result)
    assert "left out: nano-vllm: nanovllm is not importable" in text
    assert "hf, batch 2: a fake" in text


def test_latency(tiny_settings: turns.Settings) -> None:
    result = suites.latency_suite(replace(tiny_settings, compare=("hf", "vllm")))
    ours, theirs, _ = result["rows"]
    requests = tiny_settings.draw(0)[:2]
    assert result["num_output_tokens"] == sum(request.num_output for request in requests)
    assert ours["nanoserve_is"] == 1.0
    assert theirs["nanoserve_is"] > 1.0
    assert ours["ttft_ms"] == pytest.approx({"p50": 50.0, "p99": 50.0})
    assert ours["itl_ms"] == pytest.approx({"p50": 1.0, "p99": 1.0})
    assert theirs["itl_ms"] == pytest.approx({"p50": 2.0, "p99": 2.0})
    seconds = sum(0.05 + 0.001 * (request.num_output - 1) for request in requests)
    assert ours["tokens_per_second"] == pytest.approx(result["num_output_tokens"] / seconds)
    assert "TTFT" in report.format_suite("latency", result)


def test_percentiles_by_hand() -> None:
    assert suites.percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": 3.0}
    assert suites.percentiles([float(i) for i in range(1, 201)]) == {"p50": 100.0, "p99": 198.0}


def test_batches_grow(tiny_settings: turns.Settings) -> None:
    chosen = replace(tiny_settings, compare=("hf", "vllm"))
    result = suites.batch_suite(chosen, prompt_len=4, num_output=2)
    assert [(row["engine"], row["batch"]) for row in result["rows"]] == [
        (name, size) for name in ("nanoserve", "hf", "vllm") for size in (1, 2)
    ]
    one, two = result["rows"][:2]
    assert two["tokens_per_second"] == 2 * one["tokens_per_second"] == 4
    assert two["operations"] == 2 * one["operations"]
    assert one["bytes"] < two["bytes"] < 2 * one["bytes"], "weights are read once for both"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("suite", [suites.throughput_suite, suites.batch_suite])
def test_no_prompt_is_seen_twice(
    suite: Any, device: str, tiny_settings: turns.Settings, fake_engines: list[Any]
) -> None:
    """Else an engine with a prefix cache would be measured without part of its work: no prompt of
    the warm-up or of an earlier batch comes again."""
    suite(replace(tiny_settings, min_len=20, max_len=30, device=device))
    prompts = [prompt[:16] for _, batch in fake_engines for prompt in batch]
    assert len(prompts) > 6
    assert len(set(prompts)) == len(prompts)


def test_engines_take_turns_on_a_cpu_and_run_one_after_the_other_on_a_gpu(
    tiny_settings: turns.Settings, fake_engines: list[Any]
) -> None:
    specs = turns.engine_specs(replace(tiny_settings, compare=("hf",)), (8,))

    def job(engine: Any, round_: int) -> dict[str, Any]:
        return engine.generate(tiny_settings.draw(round_))

    turns.run_in_turns(tiny_settings, specs, job, "")
    assert [name for name, _ in fake_engines] == ["nanoserve", "hf"] * 3
    fake_engines.clear()
    turns.run_in_turns(replace(tiny_settings, device="cuda"), specs, job, "")
    assert [name for name, _ in fake_engines] == ["nanoserve"] * 3 + ["hf"] * 3


# -- the command --


@pytest.mark.slow
def test_the_command_as_a_user_runs_it(tiny: Path, tmp_path: Path) -> None:
    """The gpu suite on a CPU, which says so; a peer that is not there; a picture."""
    file, picture = tmp_path / "result.json", tmp_path / "picture.png"
    arguments = ["--suite", "gpu", "--compare", "nano-vllm", "--threads", "1"]
    arguments += [
        "--dummy-dir",
        str(tiny.parent),
        "--num-requests",
        "2",
        "--json",
        str(file),
        "--plot",
        str(picture),
    ]
    run_ = subprocess.run(
        [sys.executable, "bench.py", *arguments],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "No CUDA device: toy sizes on the CPU" in run_.stdout
    assert "no CUDA device: tiny sizes" in run_.stdout
    result = json.loads(file.read_text())
    assert result["is_toy"]
    assert list(result["suites"]) == list(run.GPU_SUITES)
    assert "== claims of the document 002" in run_.stdout
    [row] = result["suites"]["throughput"]["rows"]
    assert row["nanoserve_is"] == 1
    assert result["suites"]["throughput"]["skipped"]["nano-vllm"]
    assert {row["implementation"] for row in result["suites"]["kernel"]["rows"]} == {"torch"}
    for key in ("command", "date", "machine", "versions", "limits", "model", "parameters"):
        assert result[key], key
    assert str(tmp_path) not in result["command"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_a_suite_that_cannot_run_is_left_out(
    tiny_settings: turns.Settings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: type[Exception],
) -> None:
    """With a sentence, and the next one runs. If none is left, the run fails."""

    def fail(_: turns.Settings) -> Any:
        raise error("the memory is too small")

    fakes = {"batching": fail, "latency": lambda _: {"rows": []}}
    monkeypatch.setattr(run, "SUITES", fakes)
    monkeypatch.setattr(run, "make_settings", lambda *_: tiny_settings)
    monkeypatch.setattr(report, "format_suite", lambda name, _: f"the table of {name}")
    file = tmp_path / "result.json"
    arguments = ["batching", "latency", "--json", str(file)]
    result = run.measure(cli.make_parser().parse_args(arguments), arguments, tmp_path)
    assert result["suites"] == {"latency": {"rows": []}}
    assert result["left_out"] == {"batching": "the memory is too small"}
    assert json.loads(file.read_text()) == result
    printed = capsys.readouterr().out
    assert "batching is left out: it cannot run here. the memory is too small" in printed
    assert "the table of latency" in printed
    with pytest.raises(error, match="too small"):
        run.measure(cli.make_parser().parse_args(["batching"]), ["batching"], tmp_path)


def test_the_command_line_names_every_suite() -> None:
    """cli.py, which imports no torch, has a list of its own."""
    assert (*run.SUITES, "gpu") == cli.SUITE_NAMES
    assert set(run.DEFAULT_SUITES) == set(run.SUITES) - {
        "batch",
        "spec",
        "structured",
        "quantization",
        "offload",
        "parallel",
        "scale",
        "serve",
        "replicas",
    }
    page = (ROOT / "notebooks" / "results" / "README.md").read_text(encoding="utf-8")
    assert [name for name in run.SUITES if f"\n| `{name}` | " not in page] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "speed"], "no suite speed; allowed: throughput, batch"),
        (["--compare", "sglang"], "no peer sglang; allowed: hf, hf-continuous, vllm, nano-vllm"),
        (["--max-len", "5000"], "lengths are 50 to 5000 tokens"),
        (["--variant", "eager"], "is not NAME:OPTION=VALUE"),
        (["--variant", "x:max_num_seq=3"], "Did you mean 'max_num_seqs'?"),
        (["--variant", "x:block_size=0"], "block_size is 0; allowed: 1 to"),
        (["--variant", "x:model=m"], "model is the same for all engines. Give --model instead"),
        (["--variant", "x:dtype=float16"], "Give --dtype instead"),
        (["--variant", "x:seed=1,device=cpu"], "Give --device instead"),
        (["--json", "no/such/folder/x.json"], "is not a file in a folder that exists"),
        (["--peer-python", "vllm=/no/such/file"], "is not PEER=PYTHON"),
        (["--dummy", "qwen3-tiny", "--model", "x"], "name two models"),
        (["--model", "no such"], "not a folder"),
        (["--num-requests", "0"], "'0' is not an int of 1 or more"),
        (["--repeat", "-1"], "'-1' is not an int of 1 or more"),
        (["--batch-sizes", "1,,2"], "'' is not an int of 1 or more"),
        (["--plot", "x.xyz"], "'x.xyz' ends with none of .eps"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert message in re.sub(r"\s+", " ", capsys.readouterr().err)


def filled(*arguments: str) -> tuple[Any, list[str]]:
    """The options with their defaults, and the suites."""
    args = cli.make_parser().parse_args(list(arguments))
    names, is_toy = run.fill_in(args)
    assert not is_toy
    return args, names


def test_options_are_read() -> None:
    variant = "x:enforce_eager=True,block_size=32,attention_backend=reference"
    args, names = filled("--suite", "memory", "--plot", "x.png", "--variant", variant)
    assert names == ["memory", "batch", "steps"]
    options = {"enforce_eager": True, "block_size": 32, "attention_backend": "reference"}
    assert args.variants == [("x", options)]
    assert (args.compare, args.repeat) == (tuple(PEERS)[1:], 3)
    _, names = filled("latency", "--suite", "memory,steps")
    assert names == ["latency", "memory", "steps"]


def test_the_gpu_suite_is_the_published_workload() -> None:
    args, names = filled("--suite", "gpu", "--device", "cuda")
    assert names == list(run.GPU_SUITES)
    assert (args.dummy, args.temperature, args.dtype) == ("qwen3-0.6b", 0.6, "bfloat16")
    assert (args.num_requests, args.min_len, args.max_len) == (256, 100, 1024)
    assert args.compare == ("hf-continuous", "nano-vllm", "vllm")
    args, _ = filled("--suite", "gpu", "--device", "cuda", "--model", "x", "--temperature", "0")
    assert (args.dummy, args.model, args.temperature) == (None, "x", 0)


def test_folders_stay_private() -> None:
    arguments = ["--json", "/home/me/x.json", "--peer-python", "vllm=/opt/v/bin/python"]
    run = report.describe_run([*arguments, "--plot", "a/b.png"], "cpu")
    assert run["command"] == (
        "python bench.py --json x.json --peer-python vllm=python --plot a/b.png"
    )


# -- the picture, and the documents' tables --


def fake_result(**changes: Any) -> dict[str, Any]:
    """A result as --json writes it, of the suite throughput."""
    run = {"command": "python bench.py", "date": "2026-01-01", "versions": {"python": "3.11"}}
    what = {
        "model": "qwen3-29m",
        "device": "cpu",
        "dtype": "float32",
        "is_toy": False,
        "note": "a busy machine",
    }
    rows = [
        {"engine": "nanoserve", "tokens_per_second": 1234.4, "share_of_roofline": 0.5},
        {"engine": "hf, batch 8", "nanoserve_is": 6.17},
        {"engine": "hf-continuous", "nanoserve_is": 4.11},
    ]
    suites = {"throughput": {"rows": rows}}
    return {**run, **what, "machine": {"device_name": "x"}, "suites": suites, **changes}


def test_a_picture_is_refused_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="this run has none of them"):
        plot.draw(fake_result(), tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        plot.draw(fake_result(), tmp_path / "x.png")


@pytest.fixture(scope="module")
def readme_results() -> Any:
    """The script that writes the tables."""
    file = ROOT / ".ci" / "readme_results.py"
    spec = importlib.util.spec_from_file_location("readme_results", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_in_the_documents_are_up_to_date(readme_results: Any) -> None:
    """If this fails: python .ci/readme_results.py."""
    for document in readme_results.TABLES:
        text = (ROOT / document).read_text(encoding="utf-8")
        assert text == readme_results.fill_in(document, text, readme_results.load_results())


def test_the_names_of_figures_are_those_of_the_list(readme_results: Any) -> None:
    assert {*readme_results.FRONT, *readme_results.TARGETS} <= readme_results.FIGURES.keys()


def test_figures_come_from_the_newest_result_that_has_them(
    tmp_path: Path, readme_results: Any
) -> None:
    def measured(*results: dict[str, Any]) -> list[str]:
        for number, result in enumerate(results):
            (tmp_path / f"{number}.json").write_text(json.dumps(result))
        found = readme_results.load_results(tmp_path)
        return [readme_results.look_up(name, found)[0] for name in readme_results.FIGURES]

    roofline, vllm, hf, *others = measured(fake_result())
    assert (roofline, vllm, hf) == ("50.0%", "", "4.11 x")
    assert set(others) == {""}
    alone = {"throughput": {"rows": fake_result()["suites"]["throughput"]["rows"][:1]}}
    newer = fake_result(date="2026-02-01", suites=alone)
    toy = fake_result(date="2026-03-01", is_toy=True)
    assert measured(newer, fake_result(), toy)[2] == ""
    assert set(measured(*[fake_result(model="demo")] * 3)) == {""}


def test_what_is_not_measured_becomes_one_sentence(readme_results: Any) -> None:
    table = readme_results.full_table({"a.json": fake_result()})
    rows = [line.split(" | ")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    assert rows == ["50.0% |", "4.11 x |"]
    [sentence] = [line for line in table.splitlines() if line.startswith("Not measured yet")]
    assert all(words in sentence for words in readme_results.MACHINES.values())
    assert table.endswith(
        "- [a.json](a.json): x, 2026-01-01, python 3.11 (a busy machine). `python bench.py`\n"
    )


@pytest.mark.slow
def test_the_bubble_is_measured() -> None:
    """On two processes, with one step in flight and with two."""
    for depth in (1, 2):
        measured = measure_pipeline(
            2, depth, num_requests=4, prompt_len=8, num_steps=6, num_kv_blocks=32, device="cpu"
        )
        assert measured["tokens_per_second"] > 0
        assert 0 < measured["stage_0_busy"] < 1
