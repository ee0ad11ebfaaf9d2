"""Which of vLLM's options exist here, and under which name?

The fields of EngineConfig, and of the chapters' subclasses, are the options. A user of vLLM knows
some 250 names; this module reads them. Three short lists, and one rule: an option that changes no
token is accepted, one that would is refused, and a misspelt one is neither.

    LLM(max_num_seqs=8)               a field of EngineConfig
    LLM(num_kv_blocks=8)              ALIASES: num_gpu_blocks_override
    LLM(dtype="half")                 VALUES: "float16"
    LLM(block_size=None)              the default, as in vLLM
    LLM(disable_log_requests=True)    TUNES: accepted; a line in the log
    LLM(enable_sleep_mode=False)      REFUSED, but off: accepted
    LLM(enable_sleep_mode=True)       ValueError: says what is missing and what to use
    LLM(max_num_seq=8)                TypeError: Did you mean 'max_num_seqs'?

vLLM: vllm/engine/arg_utils.py (V0 and V1).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

logger = logging.getLogger("nanoserve")

ALIASES = {  # another name -> ours
    "num_kv_blocks": "num_gpu_blocks_override",
    "task": "runner",
    "convert": "runner",
    "guided_decoding_backend": "structured_outputs_config",
    "override_pooler_config": "pooler_config",
    "disable_log_stats": "collect_metrics",  # its opposite
}
VALUES: dict[str, dict[Any, Any]] = {  # of an option: another value -> ours; None: the default
    "dtype": {"half": "float16", "float": "float32"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8", "float32": "auto", "bfloat16": "auto"},
    "load_format": {"safetensors": "auto", "hf": "auto"},
    "model_impl": {"vllm": "nanoserve"},
    "task": {"embed": "pooling", "embedding": "pooling", "auto": None},
    "convert": {"embed": "pooling", "auto": None, "none": None},
    "runner": {"auto": None},
    "quantization": {"fp8_per_tensor": "fp8"},  # here with a scale for each output
    "max_model_len": {"auto": None, -1: None},
    "distributed_executor_backend": {"mp": None, "uni": None, "external_launcher": None},
}
# They change how fast it is, what is logged or where, and no token.
TUNING = """
    trust_remote_code disable_log_requests enable_log_requests log_level logging_config
    log_config_file aggregate_engine_logging enable_mfu_metrics use_tqdm_on_load
    disable_custom_all_reduce disable_async_output_proc use_v2_block_manager max_seq_len_to_capture
    max_context_len_to_capture prefix_caching_hash_algo disable_cascade_attn
    safetensors_load_strategy safetensors_prefetch_num_threads
    max_parallel_loading_workers performance_mode optimization_level compilation_config
    kernel_config attention_config moe_backend linear_backend enable_flashinfer_autotune
    cudagraph_capture_sizes max_cudagraph_capture_size cuda_graph_sizes num_scheduler_steps
    multi_step_stream_outputs stream_interval num_lookahead_slots watermark scheduler_delay_factor
    scheduler_reserve_full_isl max_num_partial_prefills max_long_partial_prefills
    prefill_schedule_interval shutdown_timeout jit_monitor_mode numa_bind renderer_num_workers
    kv_cache_metrics show_hidden_metrics_for_version collect_detailed_traces
    tokenizer_pool_size ignore_patterns mm_processor_cache_gb language_model_only
    skip_mm_profiling disable_frontend_multiprocessing kv_offloading_backend"""
TUNES = frozenset(TUNING.split())
# What is missing here, or done in another way, and the options that ask for it. "name=x|y" accepts
# these values beside those that mean "off": None, False, 0, "", "auto" and empty ones.
REFUSED = {
    "Weights stay on the device: use a smaller model, a half-precision dtype, or more ranks.": """
        cpu_offload_gb cpu_offload_params offload_backend offload_group_size enable_sleep_mode""",
    "A model is divided by tensor_parallel_size and pipeline_parallel_size only.": """
        enable_expert_parallel enable_eplb enable_dbo prefill_context_parallel_size=1
        decode_context_parallel_size=1 fully_sharded_loras""",
    "An LLM is one engine; nanoserve serve --data-parallel-size starts several.": """
        data_parallel_size=1 data_parallel_rank data_parallel_size_local data_parallel_address
        data_parallel_backend=mp""",
    "Ranks are processes of this machine, actors of Ray, or those that torchrun has started.": """
        nnodes=1 node_rank master_addr
        master_port worker_use_ray worker_cls worker_extension_cls""",
    "Download the checkpoint, edit its config.json if you must, and give its folder as model.": """
        tokenizer_revision=main config_format=hf rope_scaling rope_theta code_revision
        model_loader_extra_config quantization_config""",
    "Prompts are text and token ids; SamplingParams(detokenize=False) makes no text.": """
        tokenizer_mode=hf enable_prompt_embeds limit_mm_per_prompt
        mm_processor_kwargs media_io_kwargs allowed_local_media_path io_processor_plugin""",
    "Texts are not taken apart: what a model thinks is a part of its text.": """
        reasoning_parser reasoning_config""",
    "Give speculative_config={'method': ..., 'model': ..., 'num_speculative_tokens': ...}.": """
        spec_method spec_model spec_tokens speculative_model num_speculative_tokens
        ngram_prompt_lookup_max ngram_prompt_lookup_min""",
    "Adapters have the model's dtype, and the KV cache one dtype in all layers.": """
        lora_dtype lora_target_modules lora_extra_vocab_size=256 kv_cache_dtype_skip_layers
        calculate_kv_scales quantization_param_path disable_sliding_window""",
    "It is an option of the server: nanoserve serve --help.": """
        served_model_name max_num_queued_reqs""",
}
WORDS = {word.partition("=")[0]: word for words in REFUSED.values() for word in words.split()}
OTHERS = {*ALIASES, *WORDS, *TUNES}  # names that vLLM knows, beside those of the fields


def read_options(
    options: Mapping[str, Any], allowed: Collection[str], is_quiet: bool = False
) -> dict[str, Any]:
    """The options among vLLM's `options` that are `allowed` here, under their names here.

    Raises TypeError for a name that is not known, with the nearest one that is, and for two names
    of one option; ValueError for an option of vLLM that asks for what is not here.
    """
    found: dict[str, Any] = {}
    names: dict[str, str] = {}  # ours -> the one that was given
    tuned = [name for name in options if name in TUNES and name not in allowed]
    for given, value in options.items():
        name, value = ALIASES.get(given, given), read_value(given, value)
        if name not in allowed:
            check_off(given, value, allowed)
        elif value is not None:
            if found.get(name, value) != value:
                raise TypeError(f"{names[name]} and {given} are the same option; give one of them.")
            found[name], names[name] = value, given
    if tuned and not is_quiet:
        logger.info("without effect here: %s", ", ".join(tuned))
    return found


def read_value(name: str, value: Any) -> Any:
    """The value that means the same here; None for the default."""
    if name == "dtype" and not isinstance(value, str) and value is not None:
        value = str(value).removeprefix("torch.")  # vLLM takes torch.float16, too
    if name == "guided_decoding_backend" and isinstance(value, str):
        return {"backend": value}
    if name == "disable_log_stats" and value is not None:
        return not value
    known = VALUES.get(name, {})
    return known.get(value, value) if isinstance(value, (str, int)) else value


def check_off(name: str, value: Any, allowed: Collection[str]) -> None:
    """Raise unless this is an option of vLLM that changes no token, or is switched off."""
    if name in TUNES:
        return
    if name not in WORDS:
        near = get_close_matches(name, [*allowed, *OTHERS], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"there is no option {name!r}.{hint}")
    off = WORDS[name].partition("=")[2].split("|")
    if value and value != "auto" and str(value) not in off:
        [advice] = [each for each, words in REFUSED.items() if WORDS[name] in words.split()]
        raise ValueError(f"{name}={value!r} is not supported here. {advice}")
