"""Which metrics are there?

One row for each of vLLM's metrics that this engine can tell, with vLLM's name, type, labels and
bucket borders, so that a dashboard made for vLLM shows a nanoserve engine. Every metric has the
labels model_name and engine, some have one more:

    vllm:request_success_total{model_name="demo",engine="0",finished_reason="length"} 3

A Counter only grows; Prometheus shows it with the suffix _total. A Gauge is a state. A Histogram
counts observations up to each border.

Left out: vLLM's metrics of what is not here (LoRA, images, sleep, watermarks), and
those that vLLM records only on request (lifetimes of KV blocks).

vLLM: vllm/v1/metrics/loggers.py, buckets.py, perf.py, vllm/v1/spec_decode/metrics.py. (Where a
number is counted otherwise than in vLLM, stats.py says so.)
"""

from __future__ import annotations

from typing import NamedTuple

# Upper borders of the histograms' buckets, vLLM's.
Borders = tuple[float, ...]
TIME_TO_FIRST_TOKEN: Borders = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_LATENCY: Borders = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_LATENCY: Borders = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_TOKENS: Borders = (1.0, *(2.0**power for power in range(3, 15)))
PARAMS_N: Borders = (1.0, 2.0, 5.0, 10.0, 20.0)
NUM_PREEMPTIONS: Borders = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
REQUEST_TOKENS: Borders = ()  # 1, 2, 5, 10, 20, 50 ... up to max_model_len: see token_buckets

FINISH_REASONS = ("stop", "length", "abort", "error")


class Spec(NamedTuple):
    """One metric."""

    name: str
    help: str
    label: str = ""  # beside model_name and engine
    label_values: tuple[str, ...] = ("",)
    buckets: Borders = ()  # of a histogram; REQUEST_TOKENS: by max_model_len


GAUGES = (
    Spec("vllm:num_requests_running", "Completions that take part in the steps."),
    Spec("vllm:num_requests_waiting", "Completions that wait, for the first time or preempted."),
    Spec(
        "vllm:num_requests_waiting_by_reason",
        "capacity: waits for its turn or for blocks; deferred: is not ready to run.",
        "reason",
        ("capacity", "deferred"),
    ),
    Spec("vllm:kv_cache_usage_perc", "Share of the KV blocks that sequences hold, 0 to 1."),
)
# Its labels are the settings of the KV cache and the engine, nothing else; its value is 1.
CACHE_CONFIG_INFO = Spec("vllm:cache_config_info", "Settings of the KV cache.")

# Counted by the engine itself, at its door. Its labels are model_name and reason.
ADMISSION_REJECTIONS = Spec(
    "vllm:admission_rejections",
    "Requests that were refused because so many wait already, by the option that says so.",
    "reason",
    ("max_num_waiting",),  # vLLM's are max_num_queued_reqs and max_num_queued_tokens
)

COUNTERS = (
    Spec("vllm:prefix_cache_queries", "Prompt tokens looked for in the prefix cache."),
    Spec("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    Spec("vllm:num_preemptions", "Preemptions of running sequences."),
    Spec("vllm:prompt_tokens", "Tokens of prompts that were computed or found, to the end."),
    Spec(
        "vllm:prompt_tokens_by_source",
        "The same, by where their keys and values came from.",
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    Spec("vllm:prompt_tokens_cached", "Of the prompt tokens, those found in the prefix cache."),
    Spec(
        "vllm:prompt_tokens_cached_by_source",
        "Hits of the prefix cache, by the memory that held them.",
        "source",
        ("device",),
    ),
    Spec("vllm:generation_tokens", "Output tokens."),
    Spec(
        "vllm:request_success",
        "Completions that have ended, by finish reason.",
        "finished_reason",
        FINISH_REASONS,
    ),
    # Prometheus' suffix belongs to the name in vLLM, too; it does not appear twice.
    Spec("vllm:estimated_flops_per_gpu", "Floating point operations of all steps, by formula."),
    Spec(
        "vllm:estimated_read_bytes_per_gpu", "Bytes of weights, keys and values read, by formula."
    ),
    Spec("vllm:estimated_write_bytes_per_gpu", "Bytes of keys and values written, by formula."),
)

# With speculative_config only. The last one has a number for each of k positions.
SPEC_DECODE_COUNTERS = (
    Spec("vllm:spec_decode_num_drafts", "Times that drafts of a completion were verified."),
    Spec("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified."),
    Spec("vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
)
SPEC_DECODE_PER_POS = Spec(
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "Draft tokens that were accepted, by their position in the draft.",
    "position",
)

# With a KV connector only (extras/kv_offload/stats.py counts them). Those of a tier have its type
# as label; the hits of another tier are further sources of prompt_tokens_cached_by_source.
KV_CONNECTOR_COUNTERS = (
    Spec(
        "vllm:external_prefix_cache_queries", "Prompt tokens looked for in tiers of the KV cache."
    ),
    Spec("vllm:external_prefix_cache_hits", "Prompt tokens found in tiers of the KV cache."),
    Spec("vllm:kv_offload_load_bytes", "Bytes from the CPU tier to the device."),
    Spec("vllm:kv_offload_store_bytes", "Bytes from the device to the CPU tier."),
    Spec("vllm:kv_offload_allocation_failure", "Blocks that found no room in the CPU tier."),
    Spec("vllm:kv_offload_tiering_chunk_queries", "Blocks looked for in a tier.", "tier"),
    Spec("vllm:kv_offload_tiering_chunk_hits", "Blocks found in a tier.", "tier"),
    Spec("vllm:kv_offload_tiering_read_bytes", "Bytes from a tier to the CPU tier.", "tier"),
    Spec("vllm:kv_offload_tiering_read_time", "Seconds of these transfers.", "tier"),
    Spec("vllm:kv_offload_tiering_write_bytes", "Bytes from the CPU tier to a tier.", "tier"),
    Spec("vllm:kv_offload_tiering_write_time", "Seconds of these transfers.", "tier"),
    Spec(
        "vllm:kv_offload_tiering_promotion_job_failures",
        "Transfers from a tier that failed, at least in part.",
        "tier",
    ),
    Spec(
        "vllm:kv_offload_tiering_cascade_job_failures",
        "Transfers to a tier that failed, at least in part.",
        "tier",
    ),
)

HISTOGRAMS = (
    Spec("vllm:iteration_tokens_total", "Tokens that a step computed.", buckets=ITERATION_TOKENS),
    Spec("vllm:request_prompt_tokens", "Prompt tokens of a completion.", buckets=REQUEST_TOKENS),
    Spec(
        "vllm:request_generation_tokens", "Output tokens of a completion.", buckets=REQUEST_TOKENS
    ),
    Spec(
        "vllm:request_max_num_generation_tokens",
        "Output tokens of the longest completion of a request.",
        buckets=REQUEST_TOKENS,
    ),
    Spec("vllm:request_params_n", "n of a request.", buckets=PARAMS_N),
    Spec("vllm:request_params_max_tokens", "max_tokens, where set.", buckets=REQUEST_TOKENS),
    Spec(
        "vllm:time_to_first_token_seconds",
        "From arrival to the first token.",
        buckets=TIME_TO_FIRST_TOKEN,
    ),
    Spec(
        "vllm:inter_token_latency_seconds",
        "From one token of a completion to the next.",
        buckets=INTER_TOKEN_LATENCY,
    ),
    Spec(
        "vllm:request_time_per_output_token_seconds",
        "Mean time between the tokens of a completion.",
        buckets=INTER_TOKEN_LATENCY,
    ),
    Spec("vllm:e2e_request_latency_seconds", "From arrival to the end.", buckets=REQUEST_LATENCY),
    Spec(
        "vllm:request_queue_time_seconds",
        "From queueing to the first step.",
        buckets=REQUEST_LATENCY,
    ),
    Spec(
        "vllm:request_prefill_time_seconds",
        "From the first step to the first token.",
        buckets=REQUEST_LATENCY,
    ),
    Spec(
        "vllm:request_decode_time_seconds",
        "From the first token to the last.",
        buckets=REQUEST_LATENCY,
    ),
    Spec(
        "vllm:request_inference_time_seconds",
        "From the first step to the last token.",
        buckets=REQUEST_LATENCY,
    ),
    Spec(
        "vllm:request_num_preemptions",
        "How often a completion was preempted.",
        buckets=NUM_PREEMPTIONS,
    ),
    Spec(
        "vllm:request_prefill_kv_computed_tokens",
        "Prompt tokens of a completion that were computed, not found.",
        buckets=REQUEST_TOKENS,
    ),
)


def token_buckets(max_model_len: int) -> Borders:
    """1, 2, 5, 10, 20, 50, ... up to max_model_len.

    >>> token_buckets(60)
    (1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
    """
    digits = range(len(str(max_model_len)))
    borders = [mantissa * 10**power for power in digits for mantissa in (1, 2, 5)]
    return tuple(float(border) for border in borders if border <= max_model_len)
