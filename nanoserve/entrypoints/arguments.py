"""Which of vLLM's options exist here, and under which name?

EngineConfig (config.py) declares the options that do something. This module reads what a user of
vLLM writes. Every option of vLLM 0.32 and of the V0 engine (0.6.6) is known by name:

    LLM(max_num_seqs=8)                   an option of EngineConfig
    LLM(enable_prefix_caching=None)       None where vLLM allows it: the default
    LLM(num_kv_blocks=8)                  ALIASES in config.py: num_gpu_blocks_override
    LLM(dtype="half")                     VALUE_ALIASES in config.py: "float16"
    LLM(enable_sleep_mode=False)          KNOWN: a value that changes nothing here is accepted
    LLM(enable_sleep_mode=True)           ValueError: says what is missing and what to use
    LLM(max_num_seq=8)                    TypeError: Did you mean 'max_num_seqs'?

EngineArgs holds such options, and adds them to a command line. coming_from_vllm.md lists these
tables for readers.

vLLM: vllm/engine/arg_utils.py, vllm/utils/argparse_utils.py (V0: vllm/utils.py).
"""

from __future__ import annotations

import argparse
import ast
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from nanoserve.exceptions import brief

from nanoserve.config import ALIASES, OPTIONS, EngineConfig, to_flag

logger = logging.getLogger("nanoserve")

# None stands for the default, as it does in vLLM.
NONE_IS_DEFAULT = {
    "async_scheduling",
    "attention_backend",
    "block_size",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "enforce_eager",
    "preemption_mode",
}
# The arguments of LLM that take a class of your own: the class that it replaces, and the methods
# that the engine calls. (An executor needs launch for async_scheduling only.)
SEAMS = {
    "scheduler_cls": (
        "nanoserve.scheduler.Scheduler",
        "add add_fork finish has_unfinished preempt_all schedule update_from_output",
    ),
    "block_manager_cls": (
        "nanoserve.block_manager.BlockManager",
        "allocate append cache_blocks can_allocate can_append can_swap_in can_swap_out fork free "
        "get_cached_blocks reset reset_prefix_cache swap_in swap_out take_copies",
    ),
    "executor_cls": ("nanoserve.executor.UniprocExecutor", "close describe execute_model"),
    "runner_cls": ("nanoserve.model_runner.ModelRunner", "execute_model launch"),
}
AS_POOLING = {"embed", "embedding"}  # values of convert, and V0's task: runner="pooling"
ANY: tuple[Any, ...] = ()  # whatever the value


class Group(NamedTuple):
    """Options of vLLM that are not EngineConfig's, for one reason."""

    verdict: str  # "no effect", "other name", "not there yet" or "left out"
    topic: str  # such as "LoRA adapters"
    reason: str  # what they are here and what to use: the end of the error message
    names: str  # the options; see _read_known


# In `names`, "max_loras=1" accepts 1 and None; "x=0|1" accepts 0, 1 and None; "x=*" accepts any
# value; plain "x" accepts None, "auto" and what is empty. A switch is written with "=False".
# What is accepted changes nothing, but for AS_POOLING.
GROUPS = (
    Group(
        "no effect",
        "logs, progress and tuning that change no result",
        "It changes no result here (trust_remote_code runs no code, and says so in the log).",
        """trust_remote_code=False|True disable_log_stats=False|True
        disable_log_requests=False|True enable_log_requests=False|True
        aggregate_engine_logging=False|True enable_mfu_metrics=False|True
        use_tqdm_on_load=False|True
        disable_custom_all_reduce=False|True disable_async_output_proc=False|True
        use_v2_block_manager=False|True max_seq_len_to_capture=* max_context_len_to_capture=*
        prefix_caching_hash_algo=* multi_step_stream_outputs=False|True shutdown_timeout=*
        fail_on_environ_validation=False|True jit_monitor_mode=*
        jit_monitor_verbose=False|True disable_frontend_multiprocessing=False|True
        disable_cascade_attn=False|True disable_hybrid_kv_cache_manager=False|True
        show_hidden_metrics_for_version=* safetensors_load_strategy=*
        safetensors_prefetch_num_threads=* safetensors_prefetch_block_size=*
        max_parallel_loading_workers=* performance_mode=* optimization_level=*
        allow_deprecated_quantization=False|True""",
    ),
    Group(
        "other name",
        "classes of your own",
        "Give the class to LLM(...) or LLMEngine.from_engine_args(...): scheduler_cls, "
        "block_manager_cls, executor_cls or runner_cls.",
        "scheduler_cls worker_cls=auto worker_extension_cls",
    ),
    Group(
        "other name",
        "logits processors",
        "Give them to a request: SamplingParams(logits_processors=[...]).",
        "logits_processors logits_processor_pattern",
    ),
    Group(
        "other name",
        "ranks on one machine or several",
        "tensor_parallel_size starts the ranks on one machine, and on several with "
        "distributed_executor_backend='ray' or `torchrun --nnodes N ... script.py`.",
        """worker_use_ray=False nnodes=1
        node_rank=0 master_addr=* master_port=* distributed_timeout_seconds
        cpu_distributed_timeout_seconds ray_workers_use_nsight=False device_ids""",
    ),
    Group(
        "other name",
        "replicas of the model",
        "An LLM is one engine. `nanoserve serve --data-parallel-size N` puts N behind one address; "
        "offline, start a process for each, with a part of the prompts.",
        """data_parallel_size=1 data_parallel_rank data_parallel_start_rank
        data_parallel_size_local data_parallel_address data_parallel_rpc_port
        data_parallel_hybrid_lb=False data_parallel_external_lb=False
        data_parallel_multi_port_external_lb=False data_parallel_backend=mp""",
    ),
    Group(
        "other name",
        "the log",
        "Set NANOSERVE_LOGGING_LEVEL in the environment, or configure logging's 'nanoserve'.",
        "log_level=INFO|info log_config_file logging_config",
    ),
    Group(
        "other name",
        "how often a stream has an output",
        "Each step hands out an output; SamplingParams(output_kind=...) says of what kind.",
        "stream_interval=1",
    ),
    Group(
        "other name",
        "limits of one step",
        "Use max_num_batched_tokens (tokens of one step), long_prefill_token_threshold (tokens of "
        "one sequence in it) or max_num_seqs.",
        """max_num_scheduled_tokens long_prefill_token_threshold_adaptive=False
        max_num_active_seqs max_num_partial_prefills=1 max_long_partial_prefills=1
        prefill_schedule_interval=1 num_lookahead_slots=0""",
    ),
    Group(
        "other name",
        "limits of the queue",
        "max_num_waiting limits the requests that wait; vLLM's two count running requests, or the "
        "tokens of prompts.",
        "max_num_queued_reqs max_num_queued_tokens",
    ),
    Group(
        "other name",
        "the recommended sampling parameters",
        "nanoserve reads generation_config.json as vLLM does; give SamplingParams of your own to "
        "use others.",
        "generation_config override_generation_config",
    ),
    Group(
        "other name",
        "CUDA graphs, several steps at once",
        "enforce_eager=True turns CUDA graphs off, async_scheduling=True overlaps steps.",
        """cudagraph_capture_sizes max_cudagraph_capture_size cuda_graph_sizes
        num_scheduler_steps=1 cudagraph_metrics=False""",
    ),
    Group(
        "other name",
        "which files are loaded",
        "Download the checkpoint (huggingface_hub.snapshot_download takes revision, token and "
        "cache_dir) and give its folder as model; edit config.json there to change it.",
        """revision=main code_revision tokenizer_revision=main download_dir hf_token
        hf_config_path hf_overrides rope_scaling rope_theta config_format=auto|hf
        model_weights ignore_patterns=* model_loader_extra_config pt_load_map_location=cpu
        model_class_overrides""",
    ),
    Group(
        "other name",
        "prompts without a tokenizer",
        "Give token ids as prompts, and SamplingParams(detokenize=False). A checkpoint without a "
        "tokenizer needs no option.",
        "skip_tokenizer_init=False tokenizer_mode=auto|hf tokenizer_pool_size=0 "
        "tokenizer_pool_type=ray tokenizer_pool_extra_config renderer_num_workers=1",
    ),
    Group(
        "other name",
        "the HTTP server",
        "It is an option of the server: `nanoserve serve --served-model-name NAME`.",
        "served_model_name",
    ),
    Group(
        "left out",
        "plugins of the HTTP server, and its endpoint for token ids alone",
        "The server has OpenAI's endpoints; /v1/completions takes token ids, too.",
        "io_processor_plugin tokens_only=False",
    ),
    Group(
        "left out",
        "processes of the HTTP server without an engine, and engines without a server",
        "An engine and its server are one process. --data-parallel-size starts several, behind one "
        "address; extras/ray_serve.py starts them on several machines.",
        "api_server_count=1 headless=False",
    ),
    Group(
        "left out",
        "other kinds of LoRA adapters, and how they are divided",
        "enable_lora, max_loras, max_lora_rank and max_cpu_loras are there. Adapters have the "
        "model's dtype, and are divided as its matrices are.",
        """lora_dtype fully_sharded_loras=False lora_target_modules default_mm_loras
        enable_tower_connector_lora=False specialize_active_lora=False
        enable_mixed_moe_lora_format=False enable_moe_shared_loras=False max_lora_cls_labels
        enable_lora_bias=False lora_extra_vocab_size=256 long_lora_scaling_factors
        qlora_adapter_name_or_path""",
    ),
    Group(
        "other name",
        "quantization by a dict",
        "A checkpoint's config.json says how its weights are quantized; quantization (fp8, int8 or "
        "int4) does it while loading.",
        "quantization_config",
    ),
    Group(
        "left out",
        "scales and layers of a quantized KV cache",
        "kv_cache_dtype is for all layers, and the scale of each token and head is computed when "
        "its key and value are stored.",
        "quantization_param_path kv_cache_dtype_skip_layers calculate_kv_scales=False",
    ),
    Group(
        "other name",
        "speculative decoding, option by option",
        "Give all of it as speculative_config, such as {'method': 'ngram', "
        "'num_speculative_tokens': 3}.",
        """spec_method spec_model spec_tokens speculative_model num_speculative_tokens
        speculative_model_quantization speculative_draft_tensor_parallel_size
        speculative_disable_mqa_scorer=False speculative_max_model_len
        speculative_disable_by_batch_size ngram_prompt_lookup_max ngram_prompt_lookup_min
        spec_decoding_acceptance_method=rejection_sampler
        typical_acceptance_sampler_posterior_threshold
        typical_acceptance_sampler_posterior_alpha
        disable_logprobs_during_spec_decoding=False|True per_request_spec_decode_metrics=none""",
    ),
    Group(
        "not there yet",
        "reasoning parsers",
        "Reasoning is not parsed yet: it is part of the text.",
        "reasoning_parser reasoning_parser_plugin reasoning_config",
    ),
    Group(
        "other name",
        "the backend of structured output",
        "Give structured_outputs_config={'backend': 'xgrammar'}.",
        "guided_decoding_backend=auto",
    ),
    Group(
        "not there yet",
        "traces, events, further metrics",
        "Not there yet; LLM(disable_log_stats=False).get_metrics() has the metrics, "
        "extras.metrics.TracingStatLogger sends OpenTelemetry's traces, and engine.step_listeners "
        "gets a report of each step.",
        """otlp_traces_endpoint collect_detailed_traces kv_cache_metrics=False
        kv_cache_metrics_sample=0.01 custom_histogram_buckets
        enable_layerwise_nvtx_tracing=False enable_logging_iteration_details=False
        kv_events_config profiler_config aux_output_config enable_return_routed_experts=False
        return_sampling_mask=False""",
    ),
    Group(
        "not there yet",
        "further options of the KV cache",
        "Not there yet. kv_offloading_size and kv_transfer_config keep blocks in other memory; "
        "preemption_mode='swap' moves preempted sequences to the CPU.",
        """kv_sharing_fast_prefill=False prefix_cache_retention_interval=0 prefix_match_unit
        ec_transfer_config ec_manager_config""",
    ),
    Group(
        "left out",
        "pooling models other than those that make one vector: classification, rewards",
        "runner='pooling' makes vectors (LLM.embed), as convert='embed' does, and pooler_config "
        "says how; there are no classifiers, cross-encoders and reward models.",
        """convert=auto|none|embed task=auto|generate|generation|embed|embedding
        override_pooler_config""",
    ),
    Group(
        "left out",
        "weights in other memory",
        "All weights stay on the device. Use a smaller model, a half-precision dtype or more ranks "
        "(tensor_parallel_size, pipeline_parallel_size).",
        """cpu_offload_gb=0 cpu_offload_params offload_backend offload_group_size=0
        offload_num_in_group=1 offload_prefetch_step=1 offload_params enable_sleep_mode=False
        sleep_mode_offload_cudagraph=False sleep_preserve_parameter_names
        enable_cumem_allocator=False enable_nccl_comm_suspend=False weight_transfer_config""",
    ),
    Group(
        "left out",
        "other ways to divide the work",
        "nanoserve divides a model by tensor_parallel_size and pipeline_parallel_size.",
        """enable_expert_parallel=False enable_ep_weight_filter=False enable_eplb=False
        eplb_config expert_placement_strategy=linear all2all_backend=* enable_elastic_ep=False
        elastic_ep_max_dp_size enable_dbo=False ubatch_size=0 dbo_decode_token_threshold=*
        dbo_prefill_token_threshold=* dp_sync_interval=* disable_nccl_for_dp_synchronization=*
        prefill_context_parallel_size=1 decode_context_parallel_size=1 dcp_comm_backend
        dcp_q_replicate dcp_kv_cache_interleave_size=1 cp_kv_cache_interleave_size
        enable_hc_sp=False enable_batch_sharded_sampling=False enable_shm_tensor_arena=False
        enable_fault_tolerance=False fault_tolerance_config numa_bind=False numa_bind_nodes
        numa_bind_cpus _api_process_count=1 _api_process_rank=0""",
    ),
    Group(
        "left out",
        "torch.compile and the choice of kernels",
        "Nothing is compiled by torch.compile. attention_backend, custom_ops and enforce_eager "
        "choose what runs.",
        """compilation_config=0|{} kernel_config attention_config ir_op_priority moe_backend
        linear_backend sparse_indexer_topk_backend enable_flashinfer_autotune=False|True
        gdn_prefill_backend kda_prefill_backend kda_decode_backend use_fp64_gumbel=False
        additional_config override_neuron_config""",
    ),
    Group(
        "left out",
        "how the scheduler admits requests",
        "Give a Scheduler of your own as scheduler_cls to change the policy.",
        """watermark=0.0 scheduler_delay_factor=0.0 scheduler_reserve_full_isl=True
        disable_sliding_window=False swa_bounded_replay=True""",
    ),
    Group(
        "left out",
        "other stages of the logits",
        "logprobs are those of the model's own distribution (raw_logprobs).",
        "logprobs_mode=raw_logprobs",
    ),
    Group(
        "left out",
        "replaying recorded outputs",
        "nanoserve computes every token itself.",
        "enable_trace_replay=False",
    ),
    Group(
        "left out",
        "images, audio, video and embeddings as input",
        "Prompts are text or token ids.",
        """limit_mm_per_prompt={}|{'image':0}|{'video':0}|{'image':0,'video':0}
        enable_mm_embeds=False enable_prompt_embeds=False allowed_local_media_path
        allowed_media_domains media_io_kwargs mm_processor_kwargs interleave_mm_strings=False
        mm_processor_cache_gb=* mm_processor_cache_type=* mm_hasher_algorithm=*
        mm_shm_cache_max_object_size_mb=* mm_encoder_only=False mm_encoder_tp_mode=*
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin=*
        enable_mm_processor_stats=False skip_mm_profiling=False|True video_pruning_rate
        video_pruning_method=* mm_tensor_ipc=* mm_processor_device mm_ipc_gpu_memory_gb=0
        mm_device_do_normalize=False|True language_model_only=False|True
        disable_chunked_mm_input=False|True disable_mm_preprocessor_cache=False|True""",
    ),
    Group(
        "left out",
        "Mamba and other recurrent layers, diffusion, prompt adapters, watermarks in the text",
        "The models that nanoserve runs have attention in every layer.",
        """mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode=none
        enable_mamba_shared_prefix_checkpoint=False replayssm_buffer_len=* use_replayssm=False
        mamba_backend=* mamba_ssu_algorithm mamba_config
        enable_mamba_cache_stochastic_rounding=False mamba_cache_philox_rounds=0 engram_config
        diffusion_config watermark_config enable_prompt_adapter=False max_prompt_adapters=1
        max_prompt_adapter_token=0""",
    ),
)


class Known(NamedTuple):
    """One option of vLLM that EngineConfig does not have."""

    accepted: tuple[Any, ...]  # values that change nothing here; ANY: all
    group: Group

    def accepts(self, value: Any) -> bool:
        return value is None or self.accepted == ANY or any(_same(value, a) for a in self.accepted)

    @property
    def is_switch(self) -> bool:
        """Is it True or False?"""
        return any(isinstance(value, bool) for value in self.accepted)

    def describe_accepted(self) -> str:
        """Such as "False" or "'auto' or 'generate'"."""
        if self.accepted == ANY:
            return "any value"
        return "None" if self.accepted == EMPTY else " or ".join(map(repr, self.accepted))


def _same(value: Any, accepted: Any) -> bool:
    """Equal, and not 1 where True is meant. A value may have an == of its own."""
    is_same_kind = isinstance(value, bool) == isinstance(accepted, bool)
    return is_same_kind and isinstance(value == accepted, bool) and bool(value == accepted)


def _read_known() -> Iterator[tuple[str, Known]]:
    """Every option in GROUPS with the values that it accepts beside None."""
    for group in GROUPS:
        for word in group.names.split():
            name, has_values, values = word.partition("=")
            accepted = tuple(map(python_value, values.split("|"))) if has_values else EMPTY
            yield name, Known(ANY if values == "*" else accepted, group)


def python_value(text: str) -> Any:
    """The Python value that `text` spells, or `text` itself: "16" -> 16, "triton" -> "triton"."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


# vLLM's short flags of these options.
SHORT_FLAGS = {
    "nnodes": "-n",
    "node_rank": "-r",
    "decode_context_parallel_size": "-dcp",
    "prefill_context_parallel_size": "-pcp",
    "data_parallel_size": "-dp",
    "data_parallel_rank": "-dpn",
    "data_parallel_start_rank": "-dpr",
    "data_parallel_size_local": "-dpl",
    "data_parallel_address": "-dpa",
    "data_parallel_rpc_port": "-dpp",
    "data_parallel_backend": "-dpb",
    "data_parallel_hybrid_lb": "-dph",
    "data_parallel_external_lb": "-dpe",
    "data_parallel_multi_port_external_lb": "-dpm",
    "enable_expert_parallel": "-ep",
    "diffusion_config": "-dc",
    "compilation_config": "-cc",
    "attention_config": "-ac",
    "optimization_level": "-O",
}
EMPTY: tuple[Any, ...] = ("auto", "", {}, [], set())
KNOWN: Mapping[str, Known] = dict(_read_known())


def read_options(call: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of EngineConfig among vLLM's `options`, under their names in EngineConfig.

    call: the function that got them, for messages. Raises TypeError for an unknown name (with the
    nearest known one) and for two names of one option, ValueError for a value of a known option
    that asks for what is not here.
    """
    defaults = {each.name: each.default for each in OPTIONS}
    found: dict[str, tuple[str, Any]] = {}
    for given, value in options.items():
        name = ALIASES.get(given, given)
        if name in found:
            raise TypeError(
                f"{call}() got {found[name][0]!r} and {given!r}, two names of one option. "
                f"Give {name!r} only."
            )
        if name in defaults:
            found[name] = given, value
        elif name in KNOWN:
            check_known(call, name, value)
        else:
            hint = "".join(f" Did you mean {near!r}?" for near in _nearest(given))
            raise TypeError(f"{call}() got an unexpected keyword argument {given!r}.{hint}")
    _, runner = found.get("runner", ("", "auto"))
    if runner in ("auto", None) and AS_POOLING & {options.get("convert"), options.get("task")}:
        found["runner"] = "convert", "pooling"
    return {
        name: defaults[name] if value is None and name in NONE_IS_DEFAULT else value
        for name, (_, value) in found.items()
    }


def _nearest(name: str) -> list[str]:
    """The known name that is most like `name`, if one is: nanoserve's own first."""
    own = [*(each.name for each in OPTIONS), *SEAMS, *ALIASES]
    return get_close_matches(name, own, n=1) or get_close_matches(name, KNOWN, n=1, cutoff=0.8)


def check_known(call: str, name: str, value: Any) -> None:
    """Raise ValueError if this option of vLLM asks for what is not here."""
    known = KNOWN[name]
    if not known.accepts(value):
        raise ValueError(
            f"{call}({name}={brief(value)}): {known.group.reason} Leave {name} out, or set it to "
            f"{known.describe_accepted()}."
        )
    if name == "trust_remote_code" and value:
        logger.warning("trust_remote_code=True: nanoserve never runs code that comes with a model.")


def check_seams(*classes: Any) -> None:
    """Raise TypeError unless each of the SEAMS is None, or a class with the methods that the engine
    calls, or a function that takes the arguments of such a class and returns an object of it."""
    for (name, (ours, methods)), given in zip(SEAMS.items(), classes, strict=True):
        if given is not None and not callable(given):
            raise TypeError(
                f"{name} must be a class, got {brief(given)}. Give the class itself, not its name "
                f"and not an instance, such as LLM({name}=My{name.title().replace('_Cls', '')})."
            )
        if isinstance(given, type) and (missing := missing_methods(name, given)):
            raise TypeError(
                f"{name} is {brief(given)}, which has no method {missing}. The engine "
                f"calls {', '.join(methods.split())}. Give a subclass of {ours}, or a class with "
                "these methods."
            )


def missing_methods(name: str, given: Any) -> str:
    """The methods that one of the SEAMS must have and this class or object has not."""
    return ", ".join(each for each in SEAMS[name][1].split() if not hasattr(given, each))


def check_seam_names(call: str, seams: Mapping[str, Any]) -> None:
    """Raise TypeError for a keyword argument that is none of the SEAMS."""
    for name, value in seams.items():
        if name not in SEAMS:
            raise TypeError(
                f"{call}() got an unexpected keyword argument {name!r}. Options of the engine are "
                f"those of EngineArgs: {call}(EngineArgs({name}={brief(value)}))."
            )


def as_seam(name: str, cls: Callable[..., Any]) -> Callable[..., Any]:
    """For who builds it without build_seam: a class as it is, a function with its checks."""
    return cls if isinstance(cls, type) else partial(build_seam, name, cls)


def build_seam(name: str, cls: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """An object of the class that takes the place of one of the SEAMS, or of ours. Raises TypeError
    if `cls` is a function that returns something else."""
    built = cls(*args, **options)
    if missing := missing_methods(name, built):
        raise TypeError(
            f"{name} returned {brief(built)}, which has no method {missing}. Return an "
            f"object of {SEAMS[name][0]}, or of a class with its methods."
        )
    return built


def load_chat_template(chat_template: str | Path | None) -> str | None:
    """The Jinja template in this file, or `chat_template` itself if it is a template."""
    if chat_template is None:
        return None
    if not isinstance(chat_template, (str, Path)):
        raise TypeError(f"chat_template must be a string or a path, got {brief(chat_template)}.")
    if isinstance(chat_template, str) and ("{" in chat_template or "\n" in chat_template):
        return chat_template
    file = Path(os.path.expanduser(chat_template))
    if not os.path.isfile(file):  # os.path: these two fail for no name
        raise ValueError(
            f"chat_template is {brief(str(chat_template))}, which is neither a file nor a Jinja "
            "template. Give one of the two, or leave it out: the model's own template."
        )
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"chat_template {file} cannot be read as text ({error}).") from error


class EngineArgs(EngineConfig):
    """The options of an engine under vLLM's names: those of EngineConfig, and vLLM's others with
    values that change nothing here.

    >>> engine_args = EngineArgs(model="Qwen/Qwen3-0.6B", max_num_seqs=8, enable_lora=True)
    >>> engine = LLMEngine.from_engine_args(engine_args)

    Fields can be changed until the engine is built. `dataclasses.asdict(engine_args)` are keyword
    arguments for LLM. Raises ValueError or TypeError as LLM does.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, model: Any = None, **options: Any) -> None:
        super().__init__(**read_options("EngineArgs", {"model": model, **options}))
        if "disable_log_stats" in options:  # LLM and AsyncLLM ask for it
            self.__dict__["disable_log_stats"] = options["disable_log_stats"]

    def __setattr__(self, name: str, value: Any) -> None:
        """Change one option; the others and `value` are checked together."""
        changed = read_options("EngineArgs", {name: value})
        new = EngineConfig(**{**vars(self.create_engine_config()), **changed})
        self.__dict__.update({each: getattr(new, each) for each in changed})
        if name == "disable_log_stats":
            self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        """An option under another name (ALIASES). vLLM's other options have the value that is
        accepted here: enable_lora is False."""
        if name in ALIASES:
            return getattr(self, ALIASES[name])
        if name not in KNOWN:
            raise AttributeError(f"'EngineArgs' object has no attribute {name!r}")
        accepted = KNOWN[name].accepted
        return None if accepted in (ANY, EMPTY) else accepted[0]

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add one flag for each option of EngineConfig. vLLM's other options are read too, but
        --help does not list them. With so many flags, none can be abbreviated any more."""
        parser.allow_abbrev = False  # --config would be --config-format
        EngineConfig.add_cli_args(parser)
        for name, known in KNOWN.items():
            flags = [to_flag(name.strip("_")), *SHORT_FLAGS.get(name, "").split()]
            how: dict[str, Any] = {"type": python_value}
            if known.is_switch:
                how = {"action": argparse.BooleanOptionalAction}
            taken = parser._option_string_actions  # the program's own -q stays its own
            flags = flags[:1] + [flag for flag in flags[1:] if flag not in taken]
            action = parser.add_argument(*flags, dest=name, default=argparse.SUPPRESS, **how)
            action.help = argparse.SUPPRESS
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """What the flags of add_cli_args say; other arguments are left alone."""
        names = [each.name for each in fields(cls)] + list(KNOWN)
        return cls(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    def create_engine_config(self) -> EngineConfig:
        """The frozen EngineConfig with these options (vLLM's is a VllmConfig)."""
        return EngineConfig(**{each.name: getattr(self, each.name) for each in fields(self)})


AsyncEngineArgs = EngineArgs  # vLLM's has one option more, enable_log_requests: see GROUPS


def check_engine_args(engine_args: Any) -> EngineArgs:
    """The same EngineArgs. Raises TypeError for anything else."""
    if not isinstance(engine_args, EngineArgs):
        raise TypeError(
            f"engine_args must be EngineArgs, got {brief(engine_args)}. Give "
            "EngineArgs(model=..., ...)."
        )
    return engine_args


def engine_of(llm: Any) -> Any:
    """The engine of an LLM, of an AsyncLLM, or itself. Raises TypeError for anything else."""
    engine = getattr(llm, "engine", llm)
    if not hasattr(engine, "step_listeners"):
        raise TypeError(f"an LLM, an AsyncLLM or an LLMEngine is needed, got {brief(llm)}.")
    return engine


def as_engine_config(given: Any) -> EngineConfig:
    """The EngineConfig of an engine: EngineArgs make one. Raises TypeError for anything else."""
    if isinstance(given, EngineConfig):
        return given
    return check_engine_args(given).create_engine_config()


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser that reads --max_num_seqs as --max-num-seqs, as vLLM's does. vLLM's also
    reads flags from a file (--config FILE), and keys of a dict (-cc.mode 3)."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        given = sys.argv[1:] if args is None else list(args)
        end = given.index("--") if "--" in given else len(given)
        dashed = [_with_dashes(word) for word in given[:end]]
        is_file = any(word.partition("=")[0] == "--config" for word in dashed)
        if is_file and "--config" not in self._option_string_actions:
            self.error("--config: flags are not read from a file here. Give them one by one.")
        return super().parse_known_args(dashed + given[end:], namespace)


def _with_dashes(word: str) -> str:
    """--max_num_seqs=8 -> --max-num-seqs=8; what is not a flag stays as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return to_flag(name[2:]) + equals + value
