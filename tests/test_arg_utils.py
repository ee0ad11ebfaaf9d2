"""vLLM's option names: the declared ones, other names, accepted values, and what is refused."""

from __future__ import annotations

import argparse
import copy
import logging
import pickle
import pkgutil
import re
from collections import Counter
from dataclasses import asdict, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from nanoserve import LLM, AsyncLLM, EngineArgs, LLMEngine, SamplingParams, arg_utils
from nanoserve.arg_utils import (
    ANY,
    GROUPS,
    KNOWN,
    NONE_IS_DEFAULT,
    SEAMS,
    FlexibleArgumentParser,
    check_seams,
    load_chat_template,
    read_options,
)
from nanoserve.block_manager import BlockManager
from nanoserve.config import ALIASES, OPTIONS, WITH_SUFFIX, EngineConfig
from nanoserve.scheduler import Scheduler

NAMES = {option.name for option in OPTIONS}

# The fields of EngineArgs and AsyncEngineArgs in vLLM 0.32.0, and those that only 0.6.6 has.
VLLM_0_32 = """
model enable_return_routed_experts return_sampling_mask model_weights served_model_name tokenizer
hf_config_path runner convert skip_tokenizer_init enable_prompt_embeds tokenizer_mode
trust_remote_code allowed_local_media_path allowed_media_domains download_dir
safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
load_format config_format dtype kv_cache_dtype seed max_model_len cudagraph_capture_sizes
max_cudagraph_capture_size ir_op_priority distributed_executor_backend pipeline_parallel_size
master_addr master_port nnodes node_rank distributed_timeout_seconds cpu_distributed_timeout_seconds
numa_bind numa_bind_nodes numa_bind_cpus device_ids tensor_parallel_size
prefill_context_parallel_size decode_context_parallel_size dcp_comm_backend dcp_q_replicate
dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_size data_parallel_rank
data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port
data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb
data_parallel_backend enable_hc_sp enable_expert_parallel enable_batch_sharded_sampling
enable_ep_weight_filter moe_backend linear_backend sparse_indexer_topk_backend all2all_backend
enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold
dp_sync_interval dbo_prefill_token_threshold disable_nccl_for_dp_synchronization eplb_config
enable_eplb expert_placement_strategy _api_process_count _api_process_rank
max_parallel_loading_workers block_size enable_prefix_caching prefix_caching_hash_algo
prefix_cache_retention_interval disable_sliding_window disable_cascade_attn offload_backend
cpu_offload_gb cpu_offload_params offload_group_size offload_num_in_group offload_prefetch_step
offload_params gpu_memory_utilization kv_cache_memory_bytes max_num_batched_tokens
max_num_scheduled_tokens long_prefill_token_threshold long_prefill_token_threshold_adaptive
max_num_seqs max_num_active_seqs max_num_queued_reqs max_num_queued_tokens max_logprobs
logprobs_mode use_fp64_gumbel enable_trace_replay disable_log_stats aggregate_engine_logging
revision code_revision hf_token hf_overrides model_class_overrides tokenizer_revision quantization
quantization_config allow_deprecated_quantization enforce_eager disable_custom_all_reduce
enable_shm_tensor_arena language_model_only limit_mm_per_prompt enable_mm_embeds
interleave_mm_strings media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin io_processor_plugin
renderer_num_workers skip_mm_profiling video_pruning_rate video_pruning_method mm_tensor_ipc
mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize enable_lora max_loras max_lora_rank
default_mm_loras fully_sharded_loras max_cpu_loras lora_dtype lora_target_modules
enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
enable_moe_shared_loras max_lora_cls_labels ray_workers_use_nsight num_gpu_blocks_override
model_loader_extra_config ignore_patterns enable_chunked_prefill disable_chunked_mm_input
scheduler_reserve_full_isl prefill_schedule_interval watermark disable_hybrid_kv_cache_manager
structured_outputs_config aux_output_config reasoning_parser reasoning_parser_plugin
speculative_config spec_method spec_model spec_tokens watermark_config diffusion_config
show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces
per_request_spec_decode_metrics kv_cache_metrics kv_cache_metrics_sample custom_histogram_buckets
cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details
jit_monitor_mode jit_monitor_verbose enable_mm_processor_stats scheduling_policy scheduler_cls
pooler_config compilation_config attention_config engram_config mamba_config kernel_config
enable_flashinfer_autotune worker_cls worker_extension_cls profiler_config logging_config log_level
log_config_file kv_transfer_config kv_events_config ec_transfer_config ec_manager_config
reasoning_config generation_config enable_sleep_mode sleep_mode_offload_cudagraph
sleep_preserve_parameter_names enable_cumem_allocator enable_nccl_comm_suspend
override_generation_config model_impl attention_backend kv_cache_dtype_skip_layers mamba_cache_dtype
mamba_ssm_cache_dtype mamba_block_size prefix_match_unit mamba_cache_mode
enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend
mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds
additional_config use_tqdm_on_load pt_load_map_location logits_processors async_scheduling
stream_interval kv_sharing_fast_prefill swa_bounded_replay optimization_level performance_mode
fault_tolerance_config enable_fault_tolerance kv_offloading_size kv_offloading_backend tokens_only
shutdown_timeout weight_transfer_config fail_on_environ_validation gdn_prefill_backend
kda_prefill_backend kda_decode_backend enable_log_requests
"""
VLLM_0_6_6 = """
task quantization_param_path worker_use_ray use_v2_block_manager swap_space rope_scaling rope_theta
max_seq_len_to_capture tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config
disable_mm_preprocessor_cache enable_lora_bias enable_prompt_adapter max_prompt_adapters
max_prompt_adapter_token lora_extra_vocab_size long_lora_scaling_factors device num_scheduler_steps
multi_step_stream_outputs num_lookahead_slots preemption_mode scheduler_delay_factor
guided_decoding_backend logits_processor_pattern speculative_model speculative_model_quantization
speculative_draft_tensor_parallel_size num_speculative_tokens speculative_disable_mqa_scorer
speculative_max_model_len speculative_disable_by_batch_size ngram_prompt_lookup_max
ngram_prompt_lookup_min spec_decoding_acceptance_method
typical_acceptance_sampler_posterior_threshold typical_acceptance_sampler_posterior_alpha
qlora_adapter_name_or_path disable_logprobs_during_spec_decoding disable_async_output_proc
override_neuron_config override_pooler_config disable_log_requests
"""


def test_every_option_of_vllm_is_known() -> None:
    """It is an option here, or a value of it is accepted."""
    for name in (*VLLM_0_32.split(), *VLLM_0_6_6.split()):
        assert (name in NAMES) + (name in KNOWN) == 1, name


def test_each_name_has_one_meaning() -> None:
    words = Counter(word.partition("=")[0] for group in GROUPS for word in group.names.split())
    assert [name for name, count in words.items() if count > 1] == []
    assert not set(words) & (NAMES | set(ALIASES) | set(SEAMS) - {"scheduler_cls"})
    assert set(ALIASES.values()) | NONE_IS_DEFAULT <= NAMES
    for group in GROUPS:
        assert group.verdict in ("no effect", "other name", "not there yet", "left out")
        assert group.reason.endswith(".")


# -- read_options --


def test_other_names_of_options() -> None:
    assert read_options("LLM", {"num_kv_blocks": 8}) == {"num_gpu_blocks_override": 8}
    assert read_options("LLM", {"kv_cache_memory": 8}) == {"kv_cache_memory_bytes": 8}
    for alias, name in ALIASES.items():
        for names in ([alias, name], [name, alias]):
            with pytest.raises(TypeError, match=f"'{names[0]}' and '{names[1]}', two names of one"):
                read_options("LLM", dict.fromkeys(names, 8))


def test_none_where_vllm_allows_it() -> None:
    for name in NONE_IS_DEFAULT:
        assert EngineArgs(**{name: None}) == EngineArgs()
    engine_args = EngineArgs(block_size=8)
    engine_args.block_size = None
    assert engine_args == EngineArgs()
    with pytest.raises(TypeError, match="seed must be an int, got None"):
        EngineArgs(seed=None)


def test_values_that_change_nothing_are_accepted() -> None:
    """But for "embed", which chooses the runner."""
    for name, known in KNOWN.items():
        for value in (None, *(known.accepted or (object(), 5, "x"))):
            asks_for_vectors = value in ("embed", "embedding")
            expected = {"runner": "pooling"} if asks_for_vectors else {}
            assert read_options("LLM", {name: value}) == expected, name


def test_what_is_not_here_is_refused_by_name() -> None:
    """The message has the option, the value, the reason and the value that is accepted."""
    for name, known in KNOWN.items():
        for value in (True, False, 12345, "something", ["something"]):
            if not known.accepts(value):
                message = f"LLM({name}={value!r}): {known.group.reason} Leave {name} out"
                with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
                    read_options("LLM", {name: value})
        assert known.accepted == ANY or not known.accepts(12345), name


def test_vllms_other_ways_to_ask_for_vectors() -> None:
    for options in ({"convert": "embed"}, {"task": "embed"}, {"task": "embedding"}):
        assert EngineArgs(**options).runner == "pooling"
        assert EngineArgs(runner="auto", **options).runner == "pooling"
    assert EngineArgs(runner="pooling", convert="embed").runner == "pooling"
    assert EngineArgs(convert="none", task="generate").runner == "auto"
    assert parse("--convert", "embed").runner == "pooling"


def test_some_messages() -> None:
    for options, words in [
        ({"quantization": "bitsandbytes"}, "quantization is 'bitsandbytes'; allowed: fp8, int8"),
        ({"enable_sleep_mode": True}, "Leave enable_sleep_mode out, or set it to False."),
        ({"runner": "reward"}, "runner is 'reward'; allowed: auto, generate, pooling."),
        ({"convert": "classify"}, "set it to 'auto' or 'none' or 'embed'."),
        ({"task": "classify"}, "runner='pooling' makes vectors"),
        ({"enable_sleep_mode": 0}, "LLM(enable_sleep_mode=0)"),  # a switch is True or False
        ({"data_parallel_size": True}, "LLM(data_parallel_size=True)"),
        ({"data_parallel_size": 2}, "`nanoserve serve --data-parallel-size N` puts N behind one"),
        ({"logits_processors": ["x"]}, "SamplingParams(logits_processors=[...])"),
    ]:
        with pytest.raises(ValueError, match=re.escape(words)):
            LLM(**options)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_modle_len", "max_model_len"),
        ("max_num_seq", "max_num_seqs"),
        ("num_kv_block", "num_kv_blocks"),
        ("scheduler_class", "scheduler_cls"),
        ("attention_backends", "attention_backend"),
        ("trust_remote_codes", "trust_remote_code"),
        ("zzz", None),
    ],
)
def test_a_misspelt_option_is_a_type_error(name: str, nearest: str | None) -> None:
    hint = f" Did you mean '{nearest}'?" if nearest else ""
    for call in (LLM, EngineArgs):
        with pytest.raises(TypeError) as raised:
            call(**{name: 100})
        expected = f"{call.__name__}() got an unexpected keyword argument {name!r}.{hint}"
        assert str(raised.value) == expected


def test_trust_remote_code_runs_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="nanoserve"):
        assert read_options("LLM", {"trust_remote_code": False}) == {}
        assert not caplog.records
        assert read_options("LLM", {"trust_remote_code": True}) == {}
    assert [r.getMessage() for r in caplog.records] == [
        "trust_remote_code=True: nanoserve never runs code that comes with a model."
    ]


# -- seams --


@pytest.mark.parametrize("name", SEAMS)
def test_a_seam_takes_a_class(name: str) -> None:
    """Not its name, as in vLLM, and not an instance. Checked before the model is loaded."""
    for value in ("my.module.Class", BlockManager(4, 4)):
        with pytest.raises(TypeError, match=f"^{name} must be a class, got .*{name}=My"):
            LLM(**{name: value})
        with pytest.raises(TypeError, match=f"^{name} must be a class"):
            LLMEngine.from_engine_args(EngineArgs(), **{name: value})


@pytest.mark.parametrize("name", SEAMS)
def test_a_class_without_the_methods_of_its_seam_is_refused(name: str) -> None:
    """Any class is callable, so int would fail in the middle of the constructor. The message has
    the methods that are missing and the class to derive from; a class with them is accepted."""
    ours, methods = SEAMS[name]
    first, *others = methods.split()
    for given, missing in [
        (int, methods.split()),
        (type("Almost", (), dict.fromkeys(others)), [first]),
    ]:
        words = f"^{name} is .*, which has no method {', '.join(missing)}. .*subclass of {ours},"
        with pytest.raises(TypeError, match=words):
            LLM(**{name: given})
        with pytest.raises(TypeError, match=words):
            LLMEngine.from_engine_args(EngineArgs(), **{name: given})
    whole = type("Whole", (), dict.fromkeys(methods.split()))
    check_seams(*(whole if each == name else None for each in SEAMS))
    check_seams(*(partial(int) if each == name else None for each in SEAMS))


@pytest.mark.parametrize("name", SEAMS)
def test_a_function_that_returns_nothing_is_refused(name: str) -> None:
    """As a seam, a function is a class whose objects are seen when it has been called."""
    with pytest.raises(TypeError, match=f"^{name} returned None, which has no method"):
        LLM(**{name: lambda *args, **options: None})


def test_the_methods_of_the_seams_are_those_that_are_used() -> None:
    """Called, or handed on. Except for launch, which only async_scheduling needs."""
    folder = Path(arg_utils.__file__).parent
    callers = {
        "scheduler": ["engine.py", "extras/beam_search.py"],
        "block_manager": ["engine.py", "scheduler.py", "extras/speculative/config.py"],
        "executor": ["engine.py", "logger.py"],
        "runner": ["executor.py", "distributed/multiproc.py"],
    }
    for part, files in callers.items():
        path, methods = SEAMS[f"{part}_cls"]
        default = pkgutil.resolve_name(path)
        source = "\n".join((folder / file).read_text(encoding="utf-8") for file in files)
        names = set(re.findall(rf"\b{part}\.(\w+)", source))
        used = {name for name in names if callable(getattr(default, name, None))}
        assert used - {"launch"} == set(methods.split()) - {"launch"}


def test_the_classes_to_derive_from_have_the_methods() -> None:
    pytest.importorskip("torch")
    for ours, methods in SEAMS.values():
        module, _, name = ours.rpartition(".")
        cls = getattr(import_module(module), name)
        assert [each for each in methods.split() if not callable(getattr(cls, each, None))] == []


def test_an_attention_backend_may_be_a_class() -> None:
    pytest.importorskip("torch")
    from nanoserve.attention import AttentionBackend

    class Mine(AttentionBackend):
        """The definition, under another name."""

    with LLM(num_kv_blocks=16, attention_backend=Mine) as llm:
        assert type(llm.engine.executor.runner.backend) is Mine
        assert "Mine" in llm.engine.executor.describe()
    for value in (5, "FLASH_ATTN", int):
        with pytest.raises(ValueError, match=r"attention_backend is .* allowed: auto, native"):
            LLM(num_kv_blocks=16, attention_backend=value)


# -- chat_template --


def test_a_chat_template_is_a_file_or_a_template(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}!"
    file = tmp_path / "shout.jinja"
    file.write_text(template)
    for given in (template, file, str(file)):
        assert load_chat_template(given) == template
    assert load_chat_template(None) is None
    with pytest.raises(ValueError, match=r"'no.jinja', which is neither a file nor a Jinja"):
        LLM(chat_template="no.jinja")
    for odd in ("x" * 5000, "~nobody-has-this-name/x", tmp_path):
        with pytest.raises(ValueError, match=r"^chat_template is .{,300}neither a file nor"):
            load_chat_template(odd)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="binary cannot be read as text"):
        load_chat_template(tmp_path / "binary")
    with pytest.raises(TypeError, match="chat_template must be a string or a path, got 5"):
        LLM(chat_template=5)  # type: ignore[arg-type]


def test_chat_uses_the_template_of_the_llm(
    demo_llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A template given to chat itself comes first: a template, a file, or the name of one of
    several that the tokenizer has. A file that is not there is no template."""
    monkeypatch.setattr(demo_llm, "chat_template", "{{ messages[0].content }}!")
    messages, params = [{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=1)
    [output] = demo_llm.chat(messages, params, use_tqdm=False)
    assert output.prompt == "Hello!"
    own = "{{ messages[0].content }}?"
    [output] = demo_llm.chat(messages, params, use_tqdm=False, chat_template=own)
    assert output.prompt == "Hello?"
    (tmp_path / "own.jinja").write_text(own)
    several = {"default": "{{ messages[0].content }}.", "loud": "{{ messages[0].content }}!!"}
    monkeypatch.setattr(demo_llm.get_tokenizer(), "chat_template", several)
    for given, text in ((tmp_path / "own.jinja", "Hello?"), ("loud", "Hello!!"), ("", "Hello!")):
        [output] = demo_llm.chat(messages, params, use_tqdm=False, chat_template=given)
        assert output.prompt == text
    with pytest.raises(ValueError, match=r"'no.jinja', which is neither a file nor a Jinja"):
        demo_llm.chat(messages, params, use_tqdm=False, chat_template="no.jinja")
    with pytest.raises(TypeError, match="chat_template must be a string or a path, got 5"):
        demo_llm.chat(messages, params, use_tqdm=False, chat_template=5)  # type: ignore[arg-type]


# -- EngineArgs --


def test_engine_args_are_options_of_an_engine() -> None:
    """Fields, defaults, asdict and vars: what vLLM's programs do with them."""
    engine_args = EngineArgs("demo", max_num_seqs=3, dtype="half", enable_sleep_mode=False)
    assert (engine_args.model, engine_args.dtype) == ("demo", "float16")
    assert [each.name for each in fields(engine_args)] == [option.name for option in OPTIONS]
    assert EngineArgs() == EngineArgs(**asdict(EngineArgs())) != engine_args
    for options in (asdict(engine_args), vars(engine_args)):
        assert EngineArgs(**options) == engine_args
        assert EngineConfig(**options) == engine_args.create_engine_config()
    assert type(engine_args.create_engine_config()) is EngineConfig
    assert "max_num_seqs=3" in repr(engine_args)


def test_engine_args_can_be_changed() -> None:
    """Each change is checked, and a refused one changes nothing."""
    engine_args = EngineArgs(max_num_seqs=8)
    engine_args.max_num_batched_tokens = 64
    engine_args.num_kv_blocks = 32
    engine_args.dtype = "half"
    engine_args.enable_sleep_mode = False
    wrong = [("max_num_batched_tokens", 7), ("block_size", 0), ("enable_sleep_mode", True)]
    for name, value in wrong:
        with pytest.raises(ValueError, match=name):
            setattr(engine_args, name, value)
    with pytest.raises(TypeError, match="Did you mean 'max_num_seqs'"):
        engine_args.max_num_seq = 5
    changes = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 32, "dtype": "float16"}
    assert engine_args == EngineArgs(max_num_seqs=8, **changes)


def test_engine_args_remember_that_statistics_are_wanted() -> None:
    """An option that is no setting of the engine: LLM and AsyncLLM read it."""
    pytest.importorskip("nanoserve.extras.metrics")
    said = EngineArgs(num_kv_blocks=32, disable_log_stats=False)
    later = EngineArgs(num_kv_blocks=32)
    later.disable_log_stats = False
    for each in (later, copy.deepcopy(said), pickle.loads(pickle.dumps(said))):
        each.max_num_seqs = 4
        with LLM.from_engine_args(each) as llm:
            assert llm.get_metrics()
    said.disable_log_stats = True
    with LLM.from_engine_args(said) as llm, pytest.raises(RuntimeError, match="nothing counts"):
        llm.get_metrics()


def test_engine_args_answer_for_options_that_are_not_here() -> None:
    engine_args = EngineArgs()
    assert engine_args.enable_sleep_mode is False
    assert engine_args.quantization is None
    assert engine_args.data_parallel_size == 1
    for alias, name in ALIASES.items():
        assert getattr(engine_args, alias) == getattr(engine_args, name)
    assert EngineArgs(num_kv_blocks=8).num_kv_blocks == 8
    with pytest.raises(AttributeError, match="no attribute 'zzz'"):
        engine_args.zzz  # noqa: B018


@pytest.mark.parametrize("given", [None, {"model": "x"}])
def test_what_are_no_engine_args(given: Any) -> None:
    for cls in (LLM, LLMEngine):
        with pytest.raises(TypeError, match="engine_args must be EngineArgs, got"):
            cls.from_engine_args(given)
    for call in (LLMEngine, AsyncLLM):
        for each in ("a model", {"model": "x"}, 5, EngineArgs):
            with pytest.raises(TypeError, match="engine_args must be EngineArgs, got"):
                call(each)
    with pytest.raises(TypeError, match=r"keyword argument 'model'.*EngineArgs\(model='x'\)"):
        AsyncLLM(model="x")


def test_an_engine_from_engine_args() -> None:
    """The options and the seams arrive."""

    class Mine(Scheduler):
        """A scheduler, under another name."""

    engine_args = EngineArgs(num_gpu_blocks_override=24, block_size=4, max_model_len=64)
    engine = LLMEngine.from_engine_args(engine_args, scheduler_cls=Mine)
    assert engine.executor.num_kv_blocks == 24
    assert (engine.config.block_size, engine.config.max_model_len) == (4, 64)
    assert type(engine.scheduler) is Mine
    engine.close()
    with LLM.from_engine_args(engine_args) as llm:
        assert llm.engine.config.max_model_len == 64
        assert type(llm.engine.scheduler) is Scheduler


def test_a_seam_that_is_none_is_the_default() -> None:
    """As scheduler_cls=None in vLLM."""
    args = EngineArgs(num_gpu_blocks_override=8, max_model_len=64)
    engine = LLMEngine.from_engine_args(args, **dict.fromkeys(SEAMS))
    assert type(engine.scheduler) is Scheduler
    assert type(engine.block_manager) is BlockManager
    engine.close()


# -- command line --


def parse(*words: str) -> EngineArgs:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parser.add_argument("--max-tokens", type=int)
    return EngineArgs.from_cli_args(parser.parse_args(words))


def test_flags_with_dashes_and_underscores() -> None:
    expected = EngineArgs(max_num_seqs=3, enable_prefix_caching=False, num_gpu_blocks_override=9)
    flags = ["--max-num-seqs=3", "--no-enable-prefix-caching", "--num-kv-blocks", "9"]
    assert parse() == EngineArgs()
    assert parse(*flags) == expected
    assert parse(*(flag.replace("-", "_").replace("__", "--", 1) for flag in flags)) == expected
    assert parse("-tp", "2").tensor_parallel_size == 2
    assert parse("--model", "a_b/c_d", "--max_tokens", "5").model == "a_b/c_d"


def test_underscores_behind_a_double_dash_stay() -> None:
    parser = FlexibleArgumentParser()
    parser.add_argument("words", nargs="*")
    assert parser.parse_args(["--", "--a_b"]).words == ["--a_b"]


def test_vllm_flags_that_change_nothing_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    """--help does not list them; a value that asks for what is not here is refused."""
    neutral = ["--trust-remote-code", "--no-enable-sleep-mode", "--pipeline_parallel_size", "1"]
    assert parse(*neutral, "--convert", "none", "--lora-dtype", "auto") == EngineArgs()
    with pytest.raises(ValueError, match=r"EngineArgs\(quantization_config='x'\)"):
        parse("--quantization-config", "x")
    with pytest.raises(ValueError, match=r"EngineArgs\(enable_sleep_mode=True\)"):
        parse("--enable-sleep-mode")
    page = EngineArgs.add_cli_args(argparse.ArgumentParser()).format_help()
    assert "sleep" not in page
    assert "--max-num-seqs" in page


@pytest.mark.parametrize("make_parser", [FlexibleArgumentParser, argparse.ArgumentParser])
def test_no_flag_is_abbreviated(make_parser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """--config FILE, which vLLM reads, is not --config-format FILE. The message names the flag."""
    parser = EngineArgs.add_cli_args(make_parser())
    for word in ("--config=hf", "--enable-lor"):
        with pytest.raises(SystemExit):
            parser.parse_args([word])
        assert word.partition("=")[0] in capsys.readouterr().err.partition("error:")[2]


def test_a_file_of_flags_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """A --config of the program's own is the program's."""
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    with pytest.raises(SystemExit):
        parser.parse_args(["--config", "f.yaml"])
    assert "--config: flags are not read from a file here." in capsys.readouterr().err
    parser.add_argument("--config")
    assert parser.parse_args(["--config", "f.yaml"]).config == "f.yaml"


def test_vllms_short_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """They mean the long ones: the same values are accepted, the same sentences refuse others."""
    for words in (
        "-O3",
        "-O 2",
        "-pp 1",
        "-dp 1",
        "-dcp 1 -pcp 1",
        "-n 1 -r 0",
        "-cc {}",
        "-sc {}",
    ):
        assert parse(*words.split()) == EngineArgs(), words
    for words, option in [
        ("-dp 2", "data_parallel_size=2"),
        ("-ep", "enable_expert_parallel=True"),
    ]:
        with pytest.raises(ValueError, match=re.escape(f"EngineArgs({option}): ")):
            parse(*words.split())


def test_a_short_flag_of_the_programs_own_comes_first() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-q", "--quick")
    args = EngineArgs.add_cli_args(parser).parse_args(["-q", "Hello"])
    assert args.quick == "Hello" and EngineArgs.from_cli_args(args) == EngineArgs()


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("64", 64),
        ("1k", 1000),
        ("1K", 1024),
        ("2.5k", 2500),
        ("25.6k", 25600),
        ("3m", 3 * 10**6),
        ("2G", 2**31),
        ("1t", 10**12),
        *(
            (text, None)
            for text in ("0.5M", "k", "1kk", "", "nan", "-1.5k", "infk", "1e3k", "auto")
        ),
    ],
)
def test_numbers_with_a_suffix(
    text: str, number: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """For vLLM's options of this kind, and no others."""
    for name in WITH_SUFFIX:
        flag = "--" + name.replace("_", "-")
        if number is None:
            with pytest.raises(SystemExit):
                parse(f"{flag}={text}")
            assert flag in capsys.readouterr().err
        else:
            assert getattr(parse(flag, text), name) == number
    with pytest.raises(SystemExit):
        parse("--max-num-seqs", "1k")
