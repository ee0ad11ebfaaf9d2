"""Which metrics are there?

vLLM's names, with its labels and bucket borders. Every metric has the labels model_name and engine;
those of LABELS have one more:

    vllm:request_success_total{model_name="demo",engine="0",finished_reason="length"} 3

A counter only grows; Prometheus shows it with the suffix _total. A gauge is a state, which is
looked at when somebody asks. A histogram counts observations up to each border. As in vLLM, what is
called a request in a name is one completion: a request with n = 3 counts three times.

vLLM: vllm/v1/metrics/loggers.py, buckets.py, vllm/v1/spec_decode/metrics.py (V1).
"""

from __future__ import annotations

Borders = tuple[float, ...]


def borders(text: str) -> Borders:
    """borders("0.5 1") == (0.5, 1.0)"""
    return tuple(map(float, text.split()))


FIRST_TOKEN = borders(
    "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
)
NEXT_TOKEN = borders("0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
REQUEST = borders("0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
STEP = borders("1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384")
TOKENS: Borders = ()  # 1, 2, 5, 10, 20, 50, ... up to max_model_len: see token_borders

GAUGES = {
    "num_requests_running": "Completions that take part in the steps.",
    "num_requests_waiting": "Completions that wait, for the first time or preempted.",
    "kv_cache_usage_perc": "Share of the KV blocks that sequences hold, 0 to 1.",
}
COUNTERS = {
    "prefix_cache_queries": "Prompt tokens looked for in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Of these, tokens looked for in the CPU tier of the cache.",
    "external_prefix_cache_hits": "Prompt tokens found in the CPU tier.",
    "num_preemptions": "Preemptions of running sequences.",
    "prompt_tokens": "Tokens of prompts that were admitted: computed, or found in a cache.",
    "prompt_tokens_by_source": "The same, by where their keys and values come from.",
    "prompt_tokens_cached": "Of the prompt tokens, those found in a cache.",
    "generation_tokens": "Output tokens.",
    "request_success": "Completions that have ended, by finish reason.",
    # With speculative_config:
    "spec_decode_num_drafts": "Times that drafts of a completion were verified.",
    "spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Draft tokens that were accepted.",
    "spec_decode_num_accepted_tokens_per_pos": "The same, by their position in the draft.",
}
LABELS = {
    "prompt_tokens_by_source": ("source", "local_compute local_cache_hit external_kv_transfer"),
    "request_success": ("finished_reason", "stop length abort error"),
}
HISTOGRAMS = {
    "iteration_tokens_total": ("Tokens that a step computed.", STEP),
    "request_prompt_tokens": ("Prompt tokens of a completion.", TOKENS),
    "request_generation_tokens": ("Output tokens of a completion.", TOKENS),
    "request_max_num_generation_tokens": ("Output tokens of a request's longest one.", TOKENS),
    "request_params_n": ("n of a request.", borders("1 2 5 10 20")),
    "request_params_max_tokens": ("max_tokens, where set.", TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens computed, not found.", TOKENS),
    "request_num_preemptions": ("Preemptions.", borders("1 2 3 4 5 10 20")),
    "time_to_first_token_seconds": ("From arrival to the first token.", FIRST_TOKEN),
    "inter_token_latency_seconds": ("From one token of a completion to the next.", NEXT_TOKEN),
    "request_time_per_output_token_seconds": ("The mean of these latencies.", NEXT_TOKEN),
    "e2e_request_latency_seconds": ("From arrival to the end.", REQUEST),
    "request_queue_time_seconds": ("From arrival to the first step.", REQUEST),
    "request_prefill_time_seconds": ("From the first step to the first token.", REQUEST),
    "request_decode_time_seconds": ("From the first token to the last.", REQUEST),
    "request_inference_time_seconds": ("From the first step to the last token.", REQUEST),
}


def token_borders(max_model_len: int) -> Borders:
    """1, 2, 5, 10, 20, 50, ... up to max_model_len: token_borders(60) ends with 50.0."""
    numbers = [
        digit * 10.0**power for power in range(len(str(max_model_len))) for digit in (1, 2, 5)
    ]
    return tuple(number for number in numbers if number <= max_model_len)
