"""bench.py and nanoserve/bench: what they promise to measure, at sizes that take no time.

No test looks at whether anything is fast: only at whether it is counted right, and reported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bench
from nanoserve import LLM
from nanoserve.bench import (
    control,
    flash_attn_shim,
    inside,
    kernels,
    plot,
    readme,
    report,
    suites,
    turns,
)
from nanoserve.bench.floor import (
    Cost,
    MachineLimits,
    ModelCosts,
    floor_seconds,
    ideal_steps,
    measure_limits,
)
from nanoserve.bench.peers import PEERS
from nanoserve.bench.process import EngineError, EngineProcess
from nanoserve.bench.workload import (
    DUMMY_MODELS,
    Request,
    draw_requests,
    draw_shared_prefix,
    write_dummy,
)
from nanoserve.config import ModelConfig
from nanoserve.kernels.attention_cpu import paged_attention_torch

ROOT = Path(__file__).parent.parent
LIMITS = MachineLimits(bandwidth=1e9, rate=1e10)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that every engine can load."""
    return write_dummy("qwen3-tiny", tmp_path_factory.mktemp("dummy"), "float32")


@pytest.fixture
def tiny_settings(tiny: Path) -> turns.Settings:
    return turns.Settings(
        folder=tiny,
        model="qwen3-tiny",
        device="cpu",
        dtype="float32",
        limits=LIMITS,
        num_requests=3,
        low=4,
        high=8,
        latency_requests=2,
        batch_sizes=(1, 2),
        prefix_len=32,
        repeat=2,
        threads=1,
        use_tqdm=False,
    )


# -- workload --


def test_the_published_workload_of_nano_vllm() -> None:
    """Its bench.py draws 133,966 output tokens with seed 0; so do we."""
    requests = draw_requests(256, 100, 1024, vocab_size=151936)
    assert sum(request.num_output for request in requests) == 133_966
    assert sum(len(request.prompt) for request in requests) == 142_827


@given(
    number=st.integers(1, 5),
    low=st.integers(1, 9),
    extra=st.integers(0, 9),
    vocab_size=st.integers(2, 20),
    round_=st.integers(0, 3),
)
@settings(max_examples=30, deadline=None)
def test_requests_are_drawn_within_bounds(
    number: int, low: int, extra: int, vocab_size: int, round_: int
) -> None:
    requests = draw_requests(number, low, low + extra, vocab_size, round_=round_)
    first = draw_requests(number, low, low + extra, vocab_size)
    assert len(requests) == number
    for request, its_first in zip(requests, first, strict=True):
        assert low <= request.num_output <= low + extra
        assert low <= len(request.prompt) <= low + extra
        assert all(0 <= token_id < vocab_size for token_id in request.prompt)
        assert len(request.prompt) == len(its_first.prompt), "every round has the same lengths"
        assert request.num_output == its_first.num_output


def test_rounds_share_no_prompt() -> None:
    rounds = [draw_requests(4, 20, 30, 1000, round_=round_) for round_ in range(3)]
    beginnings = {tuple(request.prompt[:16]) for round_ in rounds for request in round_}
    assert len(beginnings) == 12


def test_lengths_out_of_order_are_refused() -> None:
    with pytest.raises(ValueError, match="1 <= low <= high"):
        draw_requests(1, 5, 4, 100)


def test_a_shared_prefix_is_shared_and_nothing_else() -> None:
    requests = draw_shared_prefix(4, 32, 16, 5, vocab_size=1000)
    assert len({tuple(request.prompt[:32]) for request in requests}) == 1
    assert len({tuple(request.prompt[32:]) for request in requests}) == 4
    assert {len(request.prompt) for request in requests} == {48}


def test_a_dummy_is_the_same_model_to_nanoserve_and_to_transformers(tiny: Path) -> None:
    from oracle import reference_logits

    prompt = [5, 6, 7, 8, 9, 10]
    with LLM(tiny, num_kv_blocks=16) as llm:
        [output] = llm.generate([prompt], inside.greedy(Request(prompt, 12)), use_tqdm=False)
    tokens = output.outputs[0].token_ids
    logits = reference_logits(tiny, prompt + tokens)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens
    assert len(set(tokens)) > 2, "a model that repeats itself would hide differences"


def test_a_dummy_is_written_once(tiny: Path) -> None:
    stamp = (tiny / "config.json").stat().st_mtime_ns
    assert write_dummy("qwen3-tiny", tiny.parent, "float32") == tiny
    assert (tiny / "config.json").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match=r"no dummy model 'gpt-5'; allowed: qwen3-0\.6b"):
        write_dummy("gpt-5", tiny.parent, "float32")


# -- the floor --


@pytest.mark.parametrize("name", DUMMY_MODELS)
def test_parameters_are_counted_as_transformers_counts_them(name: str, tmp_path: Path) -> None:
    """Up to the norms, which are left out: well under a thousandth (more of the tiny one)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(DUMMY_MODELS[name]), encoding="utf-8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 2)
    costs = ModelCosts.of(ModelConfig.from_folder(tmp_path), itemsize=2)
    assert costs.num_parameters == matrices
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == pytest.approx(matrices, rel=1e-3 if name != "qwen3-tiny" else 1e-2)


def costs_of(name: str, itemsize: int, folder: Path) -> ModelCosts:
    (folder / "config.json").write_text(json.dumps(DUMMY_MODELS[name]), encoding="utf-8")
    return ModelCosts.of(ModelConfig.from_folder(folder), itemsize)


def test_bytes_of_the_published_workload(tmp_path: Path) -> None:
    """By hand: 112 KiB of keys and values per token, read at every later token of its request;
    0.6B weights in bfloat16, read in each of up to 1024 steps. Together about 15 TB."""
    costs = costs_of("qwen3-0.6b", 2, tmp_path)
    requests = draw_requests(256, 100, 1024, 151936)
    steps = ideal_steps(costs, requests)
    assert len(steps) == max(request.num_output for request in requests)
    per_token = 2 * 28 * 8 * 128 * 2
    assert per_token == 112 * 1024
    reads = sum(
        len(request.prompt) + number for request in requests for number in range(request.num_output)
    )
    weights = 2 * (costs.num_parameters) * len(steps)
    total = sum(step.num_bytes for step in steps)
    assert total == pytest.approx(reads * per_token + weights, rel=1e-9)
    assert 14e12 < total < 16e12


def test_a_step_costs_what_a_hand_count_says(tmp_path: Path) -> None:
    """Two sequences of 10 and 20 keys decode: two tokens, two samples, 30 keys."""
    costs = costs_of("qwen3-tiny", 4, tmp_path)
    layer = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 112
    head = 64 * 320
    assert (costs.layer_weights, costs.head_weights) == (2 * layer, head)
    step = costs.step(2, 2, 30, 30)
    assert step.num_bytes == 4 * (2 * layer + head + 30 * 2 * 2 * 32)
    assert step.operations == 2 * 2 * (2 * layer + head) + 30 * 4 * 2 * 64


def test_with_experts_a_token_is_multiplied_with_few_and_a_step_reads_all(tmp_path: Path) -> None:
    config = {
        **DUMMY_MODELS["qwen3-tiny"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    }
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    costs = ModelCosts.of(ModelConfig.from_folder(tmp_path), 4)
    one_expert = 2 * 3 * 64 * 16
    assert costs.resident_weights - costs.layer_weights == 6 * one_expert


def test_the_floor_is_the_slower_of_memory_and_arithmetic() -> None:
    assert LIMITS.seconds(Cost(2e9, 1e9)) == 2.0
    assert LIMITS.seconds(Cost(1e8, 5e10)) == 5.0
    assert floor_seconds(LIMITS, [Cost(2e9, 0), Cost(0, 5e10)]) == 7.0


def test_limits_are_measured() -> None:
    limits = measure_limits(torch.device("cpu"), torch.float32)
    assert limits.bandwidth > 1e7
    assert limits.rate > 1e7


# -- engines in processes of their own --


def test_an_engine_lives_in_a_process_of_its_own(tiny: Path) -> None:
    """And says what it is, serves, streams, reports its errors, and can be closed twice."""
    requests = [Request([5, 6, 7], 4), Request([8, 9], 6)]
    with EngineProcess("nanoserve", threads=1) as engine:
        assert engine._process.pid != os.getpid()
        assert engine.why_not("cpu") is None
        built = engine.build(folder=str(tiny), dtype="float32", llm_options={"num_kv_blocks": 64})
        assert built["versions"]["torch"] == metadata.version("torch")
        assert "64 KV blocks" in built["description"]
        answer = engine.generate(requests)
        assert [len(tokens) for tokens in answer["token_ids"]] == [4, 6]
        stream = engine.stream(requests[1])
        assert stream["token_ids"] == answer["token_ids"][1]
        assert stream["times"] == sorted(stream["times"])
        assert len(stream["times"]) == 6
        with pytest.raises(EngineError, match="nanoserve: ValueError"):
            engine.generate([Request([5] * 5000, 4)])
        assert engine.generate(requests)["token_ids"] == answer["token_ids"], "it serves on"
        engine.close()
        engine.close()


@pytest.mark.parametrize("name", ["hf", "hf-continuous"])
def test_peers_serve_the_same_requests(name: str, tiny: Path) -> None:
    """All three give the same greedy tokens; transformers also when padded to a batch."""
    requests = draw_requests(3, 4, 9, 320)
    with LLM(tiny, num_kv_blocks=64) as llm:
        params = [inside.greedy(request) for request in requests]
        outputs = llm.generate([r.prompt for r in requests], params, use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in outputs]
    with EngineProcess(name, threads=1) as engine:
        engine.build(folder=str(tiny), dtype="float32", batch_size=2, num_requests=3)
        assert engine.generate(requests)["token_ids"] == expected
        stream = engine.stream(requests[0])
        assert stream["token_ids"] == expected[0]
        assert len(stream["times"]) == requests[0].num_output


def test_a_process_that_dies_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "nanovllm.py").write_text(
        "import os, sys; print('alas', file=sys.stderr); os._exit(3)"
    )
    with EngineProcess("nano-vllm", folder=str(tmp_path)) as engine:
        assert engine.why_not("cuda") is None
        with pytest.raises(EngineError, match=r"nano-vllm: its process has ended\. .*alas"):
            engine.build(folder=str(tmp_path), dtype="float32")


FAKE_NANO_VLLM = """
from dataclasses import dataclass
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from transformers import AutoTokenizer

@dataclass
class SamplingParams:
    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    def __post_init__(self):
        assert self.temperature > 1e-10

class LLM:
    def __init__(self, model, **options):
        assert AutoTokenizer.from_pretrained(model).eos_token_id == -1
        self.running = []
    def add_request(self, prompt, params):
        self.running.append([prompt, params, []])
    def is_finished(self):
        return not self.running
    def step(self):
        for prompt, params, tokens in self.running:
            tokens.append(sum(prompt) + len(tokens))
        done = [r for r in self.running if len(r[2]) == r[1].max_tokens]
        self.running = [r for r in self.running if len(r[2]) < r[1].max_tokens]
        return [(0, r[2]) for r in done], 1
    def generate(self, prompts, params, use_tqdm=True):
        for pair in zip(prompts, params):
            self.add_request(*pair)
        rows = list(self.running)
        while self.running:
            self.step()
        return [{"text": "", "token_ids": row[2]} for row in rows]
"""


def test_nano_vllm_from_a_folder_with_our_shim(tmp_path: Path) -> None:
    """A stand-in with nano-vllm's interface: it gets flash-attn's names, a tokenizer, and no
    temperature of 0."""
    (tmp_path / "nanovllm.py").write_text(FAKE_NANO_VLLM)
    with EngineProcess("nano-vllm", folder=str(tmp_path)) as engine:
        assert engine.why_not("cpu") == "it needs a CUDA GPU"
        built = engine.build(folder=str(tmp_path), dtype="float32")
        if importlib.util.find_spec("flash_attn") is None:
            assert "varlen_attn in its place" in built["description"]
        answer = engine.generate([Request([1, 2], 3), Request([5], 2)])
        assert answer["token_ids"] == [[3, 4, 5], [5, 6]]
        stream = engine.stream(Request([1, 2], 3))
        assert len(stream["times"]) == 3
        assert stream["token_ids"][-1] == 5


def fake_varlen_attn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """torch's varlen_attn has no CPU version; this one goes by its documentation."""
    assert window_size == (-1, 0), "causal"
    assert enable_gqa
    assert max_q >= int(cu_seq_q.diff().max())
    if block_table is None:  # contiguous keys: as one block of one slot per token
        assert cu_seq_k is not None
        lengths = cu_seq_k.diff()
        longest = int(lengths.max())
        block_table = torch.zeros(len(lengths), longest, dtype=torch.int32)
        for row, (start, length) in enumerate(
            zip(cu_seq_k.tolist(), lengths.tolist(), strict=False)
        ):
            block_table[row, :length] = torch.arange(start, start + length)
        key, value = key[:, None], value[:, None]
    else:
        assert cu_seq_k is None
        assert seqused_k is not None
        lengths = seqused_k
    assert max_k >= int(lengths.max())
    return paged_attention_torch(
        query, key, value, block_table, cu_seq_q, lengths.int(), scale=scale
    )


@pytest.fixture
def varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", fake_varlen_attn)


@pytest.mark.usefixtures("varlen_on_cpu")
def test_the_flash_attn_shim_is_attention() -> None:
    """Decode, prefill and prefill over a cached prefix, as nano-vllm calls them."""
    shim: Any = flash_attn_shim.make_module()
    case = kernels.Case("decode", 3, 1, 40, 4, 2, 16, block_size=8)
    inputs = kernels.make_inputs(case, torch.float32, torch.device("cpu"))
    inputs["seq_lens"] = torch.tensor([40, 7, 1], dtype=torch.int32)
    table = inputs["block_table"].clone()
    table[1, 1:] = -1  # nano-vllm pads with -1
    expected = paged_attention_torch(**inputs)
    got = shim.flash_attn_with_kvcache(
        inputs["query"].unsqueeze(1),
        inputs["key_cache"],
        inputs["value_cache"],
        cache_seqlens=inputs["seq_lens"],
        block_table=table,
        softmax_scale=case.head_dim**-0.5,
        causal=True,
    )
    torch.testing.assert_close(got.squeeze(1), expected)

    case = replace(case, num_seqs=2, num_queries=5, num_keys=13)
    inputs = kernels.make_inputs(case, torch.float32, torch.device("cpu"))
    expected = paged_attention_torch(**inputs)
    lengths = {
        "max_seqlen_q": 5,
        "cu_seqlens_q": inputs["query_start_loc"],
        "max_seqlen_k": 13,
        "cu_seqlens_k": torch.tensor([0, 13, 26], dtype=torch.int32),
        "softmax_scale": case.head_dim**-0.5,
    }
    caches = inputs["key_cache"], inputs["value_cache"]
    got = shim.flash_attn_varlen_func(
        inputs["query"], *caches, **lengths, causal=True, block_table=inputs["block_table"]
    )
    torch.testing.assert_close(got, expected)
    loose = [
        cache[inputs["block_table"].long()].flatten(1, 2)[:, :13].flatten(0, 1) for cache in caches
    ]
    got = shim.flash_attn_varlen_func(inputs["query"], *loose, **lengths, causal=True)
    torch.testing.assert_close(got, expected)


# -- the control plane alone --


def test_every_request_of_the_absent_model_gets_its_tokens() -> None:
    requests = draw_requests(5, 3, 40, 1000)
    scheduler = control.make_scheduler(num_blocks=64, max_num_seqs=3)
    sequences = [control.make_sequence(i, request) for i, request in enumerate(requests)]
    for sequence in sequences:
        scheduler.add(sequence)
    steps = list(control.run_steps(scheduler))
    assert [sequence.num_output_tokens for sequence in sequences] == [
        request.num_output for request in requests
    ]
    assert all(step.schedule_seconds > 0 for step in steps)
    scheduler.block_manager.check()


def test_the_scheduler_suite_measures_each_case() -> None:
    result = control.scheduler_suite([2, 4], [16, 64], num_steps=3, use_tqdm=False)
    cases = [(row["num_running"], row["context"]) for row in result["rows"]]
    assert cases == [(2, 16), (2, 64), (4, 16), (4, 64)]
    for row in result["rows"]:
        assert 0 < row["schedule_us"] < row["step_us"] <= row["slowest_us"]
        assert row["update_us"] > 0
    assert set(result["growth_with_context"]) == {"2", "4"}
    assert "longest context against shortest" in report.format_suite("scheduler", result)
    assert control.control_plane_seconds(draw_requests(3, 4, 20, 100), True) > 0


def test_memory_is_wasted_in_the_order_of_the_paper() -> None:
    """Paged least, the maximum most; and paged by no more than a block per request."""
    requests = draw_requests(40, 20, 200, 1000)
    result = control.memory_suite(requests, max_model_len=1024, num_slots=8192)
    ways = [row["way"] for row in result["rows"]]
    assert ways == [
        "paged",
        "contiguous, oracle",
        "contiguous, power of two",
        "contiguous, maximum",
    ]
    used = [row["used_share"] for row in result["rows"]]
    assert used == sorted(used, reverse=True)
    at_once = [row["mean_running"] for row in result["rows"]]
    assert at_once == sorted(at_once, reverse=True)
    for row in result["rows"]:
        assert row["used_share"] + row["wasted_share"] == pytest.approx(1)
        assert 0 < row["cache_filled"] <= 1
    mean_tokens = sum(len(r.prompt) for r in requests) / len(requests)
    assert result["rows"][0]["wasted_share"] < 15 / mean_tokens
    with pytest.raises(ValueError, match="100 slots do not hold"):
        control.memory_suite(requests, max_model_len=1024, num_slots=100)


def test_contiguous_reservations_by_hand() -> None:
    """One request of 3 + 2 tokens, 8 slots reserved: 3, then 4 of 8 hold tokens."""
    row = control._contiguous([Request([1, 2, 3], 2)], 8, lambda _: 8)
    assert row["used_share"] == 7 / 16
    assert row["num_steps"] == 2


# -- attention alone --


def test_bytes_and_operations_of_attention_by_hand() -> None:
    case = kernels.Case(
        "", num_seqs=2, num_queries=3, num_keys=5, num_heads=4, num_kv_heads=2, head_dim=8
    )
    assert case.operations == 4 * 2 * (3 + 4 + 5) * 4 * 8
    assert case.num_bytes(2) == 2 * (2 * 5 * 2 + 2 * 3 * 4) * 8 * 2
    decode, long, prefill = kernels.GPU_CASES
    assert decode.num_bytes(2) == pytest.approx(64 * 4096 * 8 * 128 * 2 * 2, rel=1e-2)
    assert (long.num_seqs, long.num_keys, prefill.num_queries) == (1, 32768, 8192)


def test_the_kernel_suite_without_a_gpu() -> None:
    result = kernels.kernel_suite("cpu", LIMITS, use_tqdm=False)
    assert "no CUDA device" in result["note"]
    assert set(result["skipped"]) == {"triton", "varlen_attn"}
    assert [row["case"] for row in result["rows"]] == [case.name for case in kernels.CPU_CASES]
    for row, case in zip(result["rows"], kernels.CPU_CASES, strict=True):
        assert row["implementation"] == "torch"
        assert row["us"] > 0
        assert row["share_of_rate"] == pytest.approx(
            case.operations / (row["us"] / 1e6) / LIMITS.rate
        )


@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize("case", kernels.CPU_CASES, ids=lambda case: case.name)
def test_the_peer_of_the_kernel_computes_the_same_amount(case: kernels.Case) -> None:
    """Decode: the same numbers. A prefill's keys come in the cache's order there, so it is
    compared on a table in order."""
    inputs = kernels.make_inputs(case, torch.float32, torch.device("cpu"))
    if not case.is_decode:
        inputs["block_table"] = torch.arange(inputs["block_table"].numel(), dtype=torch.int32)[None]
    torch.testing.assert_close(kernels.varlen_attention(**inputs), paged_attention_torch(**inputs))


# -- suites with a model --


def test_the_prefix_suite(tiny_settings: turns.Settings) -> None:
    result = inside.prefix_suite(tiny_settings, suffix_len=4, num_output=2)
    assert result["hit_rate"] == 1.0, "two full blocks of 16, shared by three requests"
    assert len(result["seconds_on"]) == len(result["no_hits_seconds_off"]) == 2
    assert result["speed_up"] > 0
    assert set(result["cost_at_no_hits"]) == {"by_the_clock", "by_the_books"}
    assert "100.0%" in report.format_suite("prefix", result)


def test_the_steps_suite_accounts_for_all_of_a_step(tiny_settings: turns.Settings) -> None:
    variants = {"no chunks": {"enable_chunked_prefill": False}}
    result = inside.steps_suite(replace(tiny_settings, variants=variants))
    assert [row["engine"] for row in result["rows"]] == ["nanoserve", "nanoserve, no chunks"]
    for row in result["rows"]:
        parts = row["parts_ms"]
        assert list(parts) == ["schedule", "prepare", "model", "sample", "update", "other"]
        assert sum(parts.values()) == pytest.approx(row["step_ms"])
        assert min(parts[part] for part in inside.PARTS) > 0, "each part was found in the engine"
        assert row["num_steps"] == max(r.num_output for r in tiny_settings.draw(1))
        assert row["gpu_ms"] is None
    assert "schedule" in report.format_suite("steps", result)


def test_percentiles_by_hand() -> None:
    assert suites.percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": 3.0}
    assert suites.percentiles([float(i) for i in range(1, 201)]) == {"p50": 100.0, "p99": 198.0}


class FakeEngine:
    """Takes the place of EngineProcess: each engine needs a known number of seconds."""

    seconds: ClassVar[dict[str, float]] = {"nanoserve": 1.0, "hf": 2.0, "vllm": 4.0}
    log: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, name: str, **_: Any) -> None:
        self.name = name

    def why_not(self, device: str) -> str | None:
        return "vllm is not importable" if self.name == "nano-vllm" else None

    def build(self, **options: Any) -> dict[str, Any]:
        return {"seconds": 0.0, "versions": {}, "description": ""}

    def generate(self, requests: list[Request]) -> dict[str, Any]:
        self.log.append((self.name, "generate"))
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

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.log.append((self.name, "close"))


@pytest.fixture
def fake_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    monkeypatch.setattr(turns, "EngineProcess", FakeEngine)
    FakeEngine.log.clear()
    yield FakeEngine.log
    FakeEngine.log.clear()


def test_ratios_are_computed_and_failures_told(
    tiny_settings: turns.Settings, fake_engines: list[tuple[str, str]]
) -> None:
    peers = ("hf", "hf-continuous", "vllm", "nano-vllm")
    chosen = replace(tiny_settings, compare=peers, hf_batch_sizes=(2,))
    result = suites.throughput_suite(chosen)
    rows = {row["engine"]: row for row in result["rows"]}
    assert {name: row["nanoserve_is"] for name, row in rows.items()} == {
        "nanoserve": 1.0,
        "hf, batch 2": 2.0,
        "vllm": 4.0,
    }
    assert rows["vllm"]["tokens_per_second"] == result["num_output_tokens"] / 4
    assert rows["vllm"]["same_tokens"] == pytest.approx(2 / 3)
    assert rows["hf, batch 2"]["same_tokens"] == 1
    assert rows["nanoserve"]["share_of_floor"] == pytest.approx(result["floor_seconds"])
    assert result["skipped"] == {
        "hf-continuous": "hf-continuous: out of memory",
        "nano-vllm": "vllm is not importable",
    }
    text = report.format_suite("throughput", result)
    assert "left out: nano-vllm: vllm is not importable" in text
    assert [entry for entry in fake_engines if entry[1] == "close"]


@pytest.mark.usefixtures("fake_engines")
def test_latency_and_batch(tiny_settings: turns.Settings) -> None:
    chosen = replace(tiny_settings, compare=("hf", "vllm"))
    result = suites.latency_suite(chosen)
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

    result = suites.batch_suite(chosen, prompt_len=4, num_output=2)
    assert [(row["engine"], row["batch"]) for row in result["rows"]] == [
        (name, size) for name in ("nanoserve", "hf", "vllm") for size in (1, 2)
    ]
    one, two = result["rows"][:2]
    assert two["tokens_per_second"] == 2 * one["tokens_per_second"] == 4
    assert two["operations"] == 2 * one["operations"]
    assert one["bytes"] < two["bytes"] < 2 * one["bytes"], "weights are read once for both"
    assert "requests" in report.format_suite("batch", result)


def test_engines_take_turns_on_a_cpu_and_come_one_after_the_other_on_a_gpu(
    tiny_settings: turns.Settings, fake_engines: list[tuple[str, str]]
) -> None:
    specs = [turns.EngineSpec(name, name, {}) for name in ("nanoserve", "hf")]

    def job(engine: Any, round_: int) -> dict[str, Any]:
        return engine.generate([])

    turns.run_in_turns(tiny_settings, specs, job, 2, "")
    order = [name for name, action in fake_engines if action == "generate"]
    assert order == ["nanoserve", "hf"] * 3
    fake_engines.clear()
    turns.run_in_turns(replace(tiny_settings, device="cuda"), specs, job, 2, "")
    assert [name for name, _ in fake_engines] == ["nanoserve"] * 4 + ["hf"] * 4


def test_a_suite_of_plain_values_needs_no_columns_of_its_own() -> None:
    rows = [{"ranks": 2, "tok/s": 123.456, "by": "gloo", "all": [1]}]
    text = report.format_suite("parallel", {"rows": rows})
    assert text.splitlines() == ["== parallel ==", "ranks  tok/s  by", "    2  123.5  gloo"]


# -- the command --


def test_the_command_as_a_user_runs_it(tmp_path: Path) -> None:
    """The gpu suite where there is none, which says so; peers that are not there; a picture."""
    file, picture = tmp_path / "result.json", tmp_path / "picture.png"
    run = run_bench(
        *("--suite", "gpu", "--compare", "vllm,nano-vllm", "--threads", "1"),
        *("--json", str(file), "--plot", str(picture)),
        *("--variant", "small:block_size=8"),
    )
    assert "No CUDA device: toy sizes on the CPU" in run.stdout
    assert "no CUDA device: tiny sizes" in run.stdout
    result = json.loads(file.read_text())
    assert result["is_toy"]
    assert set(result["suites"]) == {"throughput", "batch", "steps", "kernel"}
    rows = {row["engine"]: row for row in result["suites"]["throughput"]["rows"]}
    assert rows["nanoserve"]["nanoserve_is"] == 1
    if importlib.util.find_spec("vllm") is None:
        assert result["suites"]["throughput"]["skipped"]["vllm"] == "vllm is not importable"
    assert result["suites"]["throughput"]["skipped"]["nano-vllm"]
    for key in ("command", "date", "machine", "versions", "limits", "model", "parameters"):
        assert result[key], key
    assert str(tmp_path) not in result["command"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "bench.py", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "speed"], "no suite speed; allowed: throughput, batch"),
        (["--compare", "sglang"], "no peer sglang; allowed: hf, hf-continuous, vllm, nano-vllm"),
        (["--max-len", "5000"], "lengths are 50 to 5000 tokens"),
        (["--variant", "eager"], "is not NAME:OPTION=VALUE"),
        (["--dummy", "qwen3-tiny", "--model", "x"], "name two models"),
        (["--model", "no such"], "not a folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2
    assert message in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_options_are_read() -> None:
    assert bench.parse_variant("x:enforce_eager=True,block_size=32,attention_backend=torch") == (
        "x",
        {"enforce_eager": True, "block_size": 32, "attention_backend": "torch"},
    )
    assert bench.chosen_peers("none") == ()
    assert bench.chosen_peers(None) == tuple(PEERS)[1:]
    args = bench.make_parser().parse_args(["--suite", "memory", "--plot", "x.png"])
    assert bench.chosen_suites(args) == ["memory", "batch", "steps"]


def test_the_gpu_preset_is_the_published_workload() -> None:
    args = bench.make_parser().parse_args(["--suite", "gpu"])
    bench.preset_gpu(args, is_toy=False)
    assert (args.dummy, args.temperature, args.num_requests) == ("qwen3-0.6b", 0.6, None)
    assert args.compare == "hf-continuous,nano-vllm,vllm"
    args = bench.make_parser().parse_args(["--suite", "gpu", "--model", "x", "--temperature", "0"])
    bench.preset_gpu(args, is_toy=False)
    assert (args.dummy, args.model, args.temperature) == (None, "x", 0)


def test_folders_stay_private() -> None:
    run = report.describe_run(
        [
            "--json",
            "/home/me/x.json",
            "--peer-python",
            "vllm=/opt/v/bin/python",
            "--plot",
            "a/b.png",
        ],
        "cpu",
    )
    assert run["command"] == (
        "python bench.py --json x.json --peer-python vllm=python --plot a/b.png"
    )


# -- pictures --


def fake_result(**changes: Any) -> dict[str, Any]:
    """A result such as --json writes."""
    batch = [
        {
            "engine": engine,
            "batch": size,
            "seconds": 1.0,
            "tokens_per_second": 100.0 * size,
            "operations": 1e9 * size,
            "bytes": 1e9,
            "share_of_floor": 0.5,
        }
        for engine in ("nanoserve", "hf")
        for size in (1, 2)
    ]
    steps = {
        "engine": "nanoserve",
        "num_steps": 3,
        "step_ms": 6.0,
        "parts_ms": {"schedule": 1.0, "launch": 4.0, "other": 1.0},
        "gpu_ms": 5.0,
    }
    throughput = [
        {
            "engine": "nanoserve",
            "tokens_per_second": 1234.4,
            "nanoserve_is": 1.0,
            "share_of_floor": 0.5,
        },
        {"engine": "hf, batch 8", "tokens_per_second": 200.0, "nanoserve_is": 6.17},
        {"engine": "hf-continuous", "tokens_per_second": 300.0, "nanoserve_is": 4.11},
    ]
    return {
        "command": "python bench.py",
        "date": "2026-01-01",
        "machine": {"device_name": "a machine"},
        "versions": {"python": "3.11"},
        "limits": LIMITS.as_dict(),
        "model": "qwen3-29m",
        "dtype": "float32",
        "device": "cpu",
        "is_toy": False,
        "note": "a busy machine",
        "file": "cpu.json",
        "suites": {
            "batch": {"rows": batch},
            "steps": {"rows": [steps]},
            "throughput": {"rows": throughput},
        },
        **changes,
    }


def test_a_picture_has_what_the_result_has(tmp_path: Path) -> None:
    plot.draw(fake_result(), tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="this run has neither"):
        plot.draw(fake_result(suites={"memory": {}}), tmp_path / "none.png")


def test_without_matplotlib_only_the_picture_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        plot.draw(fake_result(), tmp_path / "x.png")
    code = "import sys, bench; print('matplotlib' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"


# -- the READMEs' table --


def cells(table: str) -> list[str]:
    """The middle column: what was measured."""
    rows = [line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| ")]
    return rows[1:]


def test_what_nobody_measured_says_so() -> None:
    for language, word in readme.NOT_MEASURED.items():
        assert cells(readme.readme_table([], language)) == [word] * len(readme.FIGURES)


def test_figures_come_from_the_newest_result_that_has_them() -> None:
    old = fake_result(date="2025-01-01", file="old.json")
    new = fake_result(file="new.json")
    new["suites"] = {"throughput": {"rows": [{**new["suites"]["throughput"]["rows"][0]}]}}
    new["suites"]["throughput"]["rows"][0]["tokens_per_second"] = 2000.0
    first, floor, vllm, hf, *others = cells(readme.readme_table([old], "en"))
    assert (first, floor, vllm, hf) == ("1,234 tok/s", "50.0%", "not measured yet", "4.11 x")
    assert set(others) == {"not measured yet"}
    first, _, _, hf, *_ = cells(readme.readme_table([old, new], "en"))
    assert (first, hf) == ("2,000 tok/s", "not measured yet")
    other_model = fake_result(model="demo")
    assert set(cells(readme.readme_table([other_model], "en"))) == {"not measured yet"}


def test_toy_results_are_never_taken(tmp_path: Path) -> None:
    for name, result in (("a", fake_result()), ("b", fake_result(is_toy=True))):
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    assert [result["file"] for result in readme.load_results(tmp_path)] == ["a.json"]


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_table_in_the_readme_is_up_to_date(language: str) -> None:
    """If this fails: python bench.py --update-readme."""
    text = readme.READMES[language].read_text(encoding="utf-8")
    shown = text.partition("<!-- bench -->\n")[2].partition("<!-- /bench -->")[0]
    assert shown == readme.readme_table(readme.load_results(), language)


def test_the_table_is_written_between_its_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"en": tmp_path / "README.md", "zh": tmp_path / "README.zh-CN.md"}
    for file in files.values():
        file.write_text("before\n<!-- bench -->\nold\n<!-- /bench -->\nafter\n", encoding="utf-8")
    monkeypatch.setattr(readme, "READMES", files)
    readme.update_readmes([fake_result()])
    for language, file in files.items():
        text = file.read_text(encoding="utf-8")
        assert text.startswith("before\n<!-- bench -->\n|")
        assert text.endswith("\n<!-- /bench -->\nafter\n")
        assert "old" not in text
        assert "1,234 tok/s" in text
        assert "python 3.11 (a busy machine). `python bench.py`" in text
        assert readme.NOT_MEASURED[language] in text


def test_the_bench_is_no_part_of_the_engine() -> None:
    """No module of the engine imports it."""
    for file in (ROOT / "nanoserve").glob("*.py"):
        assert "nanoserve.bench" not in file.read_text(encoding="utf-8"), file.name
