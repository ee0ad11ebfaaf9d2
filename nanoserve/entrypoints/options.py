"""Which options has LLM(...), for an editor?

A test holds these names and types equal to the fields of EngineConfig and of the chapters' config
classes, where each has its help text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypedDict


class Options(TypedDict, total=False):
    """The options of LLM, beside `model`."""

    tokenizer: str | Path | None
    skip_tokenizer_init: bool
    hf_overrides: dict | None
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    kv_cache_dtype: Literal["auto", "fp8", "int8"]
    device: str
    max_model_len: int | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    tensor_parallel_size: int
    block_size: int
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    long_prefill_token_threshold: int
    scheduling_policy: Literal["fcfs", "priority"]
    preemption_mode: Literal["recompute", "swap"]
    num_cpu_blocks: int | None
    swap_space: float | None
    seed: int
    load_format: Literal["auto", "dummy"]
    model_impl: Literal["auto", "nanoserve", "transformers"]
    attention_backend: Any
    kernels: Literal["auto", "plain", "fast"]
    enforce_eager: bool
    async_scheduling: bool | None
    max_logprobs: int
    # chapters/quantization
    quantization: str | None
    # chapters/pooling
    runner: Literal["generate", "pooling"]
    pooler_config: Any
    # chapters/ray
    distributed_executor_backend: Literal["mp", "ray"]
    # chapters/pipeline
    pipeline_parallel_size: int
    # chapters/speculative
    speculative_config: Any
    # chapters/lora
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    # chapters/structured_output
    structured_outputs_config: Any
    # chapters/logits_processors
    logits_processors: Any
    # chapters/kv_offload
    kv_offloading_size: float | None
    kv_offloading_policy: Literal["lru", "arc"]
    kv_transfer_config: Any
    # chapters/hybrid_kv
    disable_hybrid_kv_cache_manager: bool
    # chapters/metrics
    collect_metrics: bool
    otlp_traces_endpoint: str | None
    # chapters/vllm_api
    revision: str | None
    download_dir: str | None
    hf_token: Any
    chat_template: str | None
    generation_config: Literal["auto", "vllm"]
    override_generation_config: dict | None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"]
    profiler_config: dict | None
    # A class of your own in the place of a part
    engine_cls: type
    config_cls: type
    sequence_cls: type
    request_cls: type
    block_manager_cls: type
    scheduler_cls: type
    runner_cls: type
    input_processor_cls: type
