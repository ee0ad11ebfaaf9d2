"""What the metrics say is what a hand count of the outputs says."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nanoserve import LLM, SamplingParams
from nanoserve.chapters.metrics import Counter, Gauge, Histogram, Vector, numbers

PROMPTS = ["Once upon a time", "The little dog ran to Tom. The little dog", "Lily said no."]
SMALL = {"block_size": 4, "num_gpu_blocks_override": 12, "max_model_len": 48, "max_num_seqs": 4}


def read(llm: LLM) -> dict[str, Any]:
    """Metrics by name, with the value of a further label behind it."""
    found = {}
    for metric in llm.get_metrics():
        more = [v for k, v in metric.labels.items() if k not in ("model_name", "engine")]
        found[" ".join([metric.name.removeprefix("vllm:"), *more])] = metric
    return found


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(disable_log_stats=False, **SMALL) as llm:  # vLLM's name
        yield llm


def growth(llm: LLM, action: Callable[[], Any]) -> tuple[Any, Callable[[str], Any]]:
    """What `action` returns, and a function: how much a counter or a histogram has grown by it."""
    before = read(llm)
    result = action()
    after = read(llm)

    def grown(name: str) -> Any:
        old, new = before[name], after[name]
        if isinstance(new, Histogram):
            return new.count - old.count, new.sum - old.sum
        return new.value - old.value

    return result, grown


def test_a_hand_count(llm: LLM) -> None:
    """Prompts, forks, stop strings and preemptions; tokens that a preempted sequence computes again
    are computed tokens, and no output tokens."""
    prompts = PROMPTS * 4
    params = [
        SamplingParams(seed=i, n=1 + i % 2, max_tokens=8 + i, stop=["."] * (i % 3 == 0))
        for i in range(len(prompts))
    ]
    outputs, grown = growth(llm, lambda: llm.generate(prompts, params, use_tqdm=False))
    completions = [each for output in outputs for each in output.outputs]
    lengths = [len(each.token_ids) for each in completions]
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_cached = sum(output.num_cached_tokens for output in outputs)

    assert grown("generation_tokens") == sum(lengths)
    assert grown("request_generation_tokens") == (len(completions), sum(lengths))
    assert grown("inter_token_latency_seconds")[0] == sum(lengths) - len(lengths)
    for name in ("time_to_first_token", "e2e_request_latency", "request_decode_time"):
        assert grown(f"{name}_seconds")[0] == len(completions)
    for reason in ("stop", "length", "abort", "error"):
        number = sum(each.finish_reason == reason for each in completions)
        assert grown(f"request_success {reason}") == number
    assert grown("prompt_tokens") == grown("prefix_cache_queries") == num_prompt_tokens
    assert grown("prompt_tokens_cached") == grown("prefix_cache_hits") == num_cached > 0
    assert grown("prompt_tokens_by_source local_compute") == num_prompt_tokens - num_cached
    assert grown("request_params_n") == (len(outputs), len(completions))
    longest = sum(max(len(each.token_ids) for each in output.outputs) for output in outputs)
    assert grown("request_max_num_generation_tokens") == (len(outputs), longest)
    assert grown("num_preemptions") == grown("request_num_preemptions")[1] > 0
    new = num_prompt_tokens - num_cached + sum(lengths) - len(lengths)
    assert grown("iteration_tokens_total")[1] > new  # and those that were computed again


def test_requests_that_end_otherwise(llm: LLM) -> None:
    """An abort in the queue, an abort while it runs, and an error are counted, once each."""

    def fail(token_ids: list[int], logits: Any) -> Any:
        raise ValueError

    def act() -> None:
        for i in range(6):
            llm.add_request(f"id {i}", PROMPTS[0], SamplingParams(max_tokens=30))
        llm.step()
        now = read(llm)
        assert (now["num_requests_running"].value, now["num_requests_waiting"].value) == (4, 2)
        assert 0 < now["kv_cache_usage_perc"].value <= 1
        llm.abort_request([f"id {i}" for i in range(6)])
        llm.generate(PROMPTS[0], SamplingParams(logits_processors=[fail]), use_tqdm=False)

    _, grown = growth(llm, act)
    assert (grown("request_success abort"), grown("request_success error")) == (6, 1)
    assert grown("e2e_request_latency_seconds")[0] == 7
    assert grown("request_queue_time_seconds")[0] == 5  # two were never scheduled
    assert all(gauge.value == 0 for gauge in read(llm).values() if isinstance(gauge, Gauge))


def test_drafts() -> None:
    """A step gives a sequence its accepted drafts, and one token more."""
    drafter = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(collect_metrics=True, speculative_config=drafter) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        found = read(llm)
    by_position = found["spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(by_position, Vector)
    assert by_position.values == sorted(by_position.values, reverse=True)
    num_accepted = found["spec_decode_num_accepted_tokens"].value
    assert sum(by_position.values) == num_accepted > 0
    assert found["spec_decode_num_draft_tokens"].value >= num_accepted
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    assert found["generation_tokens"].value == num_tokens
    num_results = found["inter_token_latency_seconds"].count + len(outputs)
    assert num_tokens <= num_results + num_accepted  # of the last drafts, some may be too many


def test_engines_do_not_mix_and_prometheus_reads_the_same(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The text for Prometheus is what get_metrics says; a log line comes when it is time."""
    before = read(llm)
    monkeypatch.setattr(numbers, "LOG_INTERVAL", 0)
    with LLM(collect_metrics=True, **SMALL) as other, caplog.at_level(logging.INFO, "nanoserve"):
        other.generate(PROMPTS, SamplingParams(max_tokens=3), use_tqdm=False)
        text = other.llm_engine.render_metrics().decode()
        families = {each.name: each for each in text_string_to_metric_families(text)}
        for metric in other.get_metrics():
            samples = {each.name: each.value for each in families[metric.name].samples}
            if isinstance(metric, Histogram):
                assert samples[f"{metric.name}_count"] == metric.buckets["+Inf"] == metric.count
            elif isinstance(metric, Counter) and len(metric.labels) == 2:
                assert samples[f"{metric.name}_total"] == metric.value
    assert sum("tokens/s" in record.getMessage() for record in caplog.records) == 3  # steps
    assert read(llm) == before
    with LLM(disable_log_stats=True, **SMALL) as silent:
        assert not hasattr(silent, "get_metrics")
