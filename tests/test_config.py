"""What can be set, and what a config.json says: ranges, resolved values, both rope layouts."""

from __future__ import annotations

import json
import math
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
from fakes import make_model_config

from nanoserve.config import (
    DEMO_MODEL,
    EngineConfig,
    ModelConfig,
    read_rope_parameters,
    resolve_folder,
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}


def write_config(folder: Path, defaults: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A checkpoint folder with no weights: a Llama's config.json with `changes`."""
    hf = {key: value for key, value in {**LLAMA, **changes}.items() if value != "(missing)"}
    (folder / "config.json").write_text(json.dumps(hf))
    if defaults is not None:
        (folder / "generation_config.json").write_text(json.dumps(defaults))
    return folder


# -- EngineConfig: ranges --

# A field, a bad value, the exception, and words its message must have beside the field's name.
BAD_VALUES: list[tuple[str, Any, type[Exception], list[str]]] = [
    ("max_model_len", 0, ValueError, ["0", "1 or more"]),
    ("max_num_seqs", -1, ValueError, ["-1", "1 or more"]),
    ("max_num_batched_tokens", 0, ValueError, ["0", "1 or more"]),
    ("block_size", 0, ValueError, ["0", "1 or more"]),
    ("num_kv_blocks", 0, ValueError, ["0", "1 or more"]),
    ("kv_cache_memory", 0, ValueError, ["0", "1 or more"]),
    ("num_cpu_blocks", 0, ValueError, ["0", "1 or more"]),
    ("num_cpu_blocks", 1.5, TypeError, ["1.5", "int"]),
    ("num_cpu_blocks", True, TypeError, ["True", "int"]),
    ("preemption_mode", "drop", ValueError, ["'drop'", "recompute, swap"]),
    ("preemption_mode", None, ValueError, ["None", "recompute, swap"]),
    ("max_model_len", 16.0, TypeError, ["16.0", "int"]),
    ("max_num_seqs", "8", TypeError, ["'8'", "int"]),
    ("max_num_batched_tokens", True, TypeError, ["True", "int"]),
    ("block_size", None, TypeError, ["None", "int"]),
    ("block_size", math.nan, TypeError, ["nan", "int"]),
    ("num_kv_blocks", math.inf, TypeError, ["inf", "int"]),
    ("kv_cache_memory", "4GB", TypeError, ["'4GB'", "int"]),
    ("long_prefill_token_threshold", -1, ValueError, ["-1", "0 or more"]),
    ("long_prefill_token_threshold", None, TypeError, ["None", "int"]),
    ("max_logprobs", -2, ValueError, ["-2", "-1 or more"]),
    ("max_logprobs", None, TypeError, ["None", "int"]),
    ("seed", -1, ValueError, ["-1", "0 or more"]),
    ("seed", None, TypeError, ["None", "int"]),
    ("seed", 0.5, TypeError, ["0.5", "int"]),
    ("dtype", "float64", ValueError, ["'float64'", "auto, float32, bfloat16, float16"]),
    ("dtype", None, ValueError, ["None", "auto"]),
    ("scheduling_policy", "lifo", ValueError, ["'lifo'", "fcfs, priority"]),
    ("load_format", "pickle", ValueError, ["'pickle'", "auto, dummy"]),
    ("device", "tpu", ValueError, ["'tpu'", "cpu", "cuda:N"]),
    ("device", "cuda:", ValueError, ["'cuda:'", "cuda:N"]),
    ("device", 0, ValueError, ["0", "cuda:N"]),
    ("gpu_memory_utilization", 0, ValueError, ["0", "more than 0, up to 1"]),
    ("gpu_memory_utilization", 1.5, ValueError, ["1.5", "up to 1"]),
    ("gpu_memory_utilization", math.nan, ValueError, ["nan", "up to 1"]),
    ("gpu_memory_utilization", math.inf, ValueError, ["inf", "up to 1"]),
]


@pytest.mark.parametrize(
    ("name", "value", "exception", "words"),
    BAD_VALUES,
    ids=[f"{name}={value!r}" for name, value, *_ in BAD_VALUES],
)
def test_bad_values_are_refused(
    name: str, value: Any, exception: type[Exception], words: list[str]
) -> None:
    """With a message that names the field, what was given, and what is allowed."""
    with pytest.raises(exception) as raised:
        EngineConfig(**{name: value})
    for word in [name, *words]:
        assert word in str(raised.value)


def test_a_misspelt_option_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="max_model_length"):
        EngineConfig(max_model_length=100)  # type: ignore[call-arg]


def test_nobody_changes_a_config() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().block_size = 32  # type: ignore[misc]


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_devices(device: str) -> None:
    assert EngineConfig(device=device).device == device


def test_the_budget_holds_a_token_for_each_running_sequence() -> None:
    """Or some could never run; the message says which of the two to change."""
    with pytest.raises(ValueError, match=r"max_num_batched_tokens is 7.*max_num_seqs 8.*Raise"):
        EngineConfig(max_num_batched_tokens=7, max_num_seqs=8)
    EngineConfig(max_num_batched_tokens=8, max_num_seqs=8)


# -- EngineConfig: resolve --


def limits(config: EngineConfig) -> tuple[int | None, int | None, int | None]:
    return config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1024, 256, 8192)),
        ({"max_model_len": 100}, (100, 256, 8192)),
        ({"max_num_batched_tokens": 10}, (1024, 10, 10)),
        ({"max_num_batched_tokens": 10, "max_num_seqs": 3}, (1024, 3, 10)),
        ({"max_num_seqs": 20_000}, (1024, 20_000, 20_000)),
        ({"enable_chunked_prefill": False}, (1024, 256, 8192)),
        ({"device": "cpu"}, (1024, 256, 2048)),
        ({"device": "cpu", "max_num_seqs": 3000}, (1024, 3000, 3000)),
        ({"device": "cpu", "max_num_batched_tokens": 5000}, (1024, 256, 5000)),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 1024}, (1024, 256, 1024)),
    ],
)
def test_resolve_makes_numbers(
    given: dict[str, Any], expected: tuple[int | None, int | None, int | None]
) -> None:
    """max_model_len from the model; 256 sequences and 8192 tokens (a CPU: 2048) unless the other
    says less or more; and the config itself stays as it was."""
    config = EngineConfig(**given)
    resolved = config.resolve(make_model_config(max_model_len=1024))
    assert limits(resolved) == expected
    assert config == EngineConfig(**given)
    assert resolved.resolve(make_model_config(max_model_len=1024)) == resolved


def test_resolve_without_chunked_prefill_makes_room_for_the_longest_prompt() -> None:
    config = EngineConfig(enable_chunked_prefill=False)
    assert limits(config.resolve(make_model_config(max_model_len=40_000)))[2] == 40_000


def test_resolve_refuses_a_budget_that_never_holds_a_prompt() -> None:
    """Only without chunked prefill; the message names the three ways out."""
    config = EngineConfig(enable_chunked_prefill=False, max_num_batched_tokens=1023)
    with pytest.raises(ValueError, match=r"1023.*max_model_len \(1024\)") as raised:
        config.resolve(make_model_config(max_model_len=1024))
    for remedy in ("Raise", "lower max_model_len", "enable_chunked_prefill=True"):
        assert remedy in str(raised.value)
    replace(config, enable_chunked_prefill=True).resolve(make_model_config(max_model_len=1024))


def test_resolve_refuses_more_than_the_model_was_made_for() -> None:
    with pytest.raises(ValueError, match=r"max_model_len is 1025.*at most 1024 tokens"):
        EngineConfig(max_model_len=1025).resolve(make_model_config(max_model_len=1024))


# -- ModelConfig --


def test_the_demo_model() -> None:
    config = ModelConfig.from_folder(DEMO_MODEL)
    assert config.architecture == "Qwen3ForCausalLM"
    assert config.eos_token_ids
    assert config.num_heads % config.num_kv_heads == 0


def test_defaults_of_what_config_json_may_leave_out(tmp_path: Path) -> None:
    """As transformers has them."""
    config = ModelConfig.from_folder(write_config(tmp_path))
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.tie_word_embeddings is False
    assert config.eos_token_ids == frozenset()
    assert config.generation_defaults == {}
    assert (config.dtype, config.max_model_len) == ("float32", 1024)
    assert config.path == tmp_path


def test_what_config_json_says_counts(tmp_path: Path) -> None:
    folder = write_config(tmp_path, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)
    config = ModelConfig.from_folder(folder)
    assert (config.num_kv_heads, config.head_dim) == (2, 32)
    assert config.tie_word_embeddings is True
    assert config.hf_config["head_dim"] == 32


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_dtype_under_either_name(tmp_path: Path, key: str) -> None:
    """transformers 5 writes dtype, before it was torch_dtype."""
    assert ModelConfig.from_folder(write_config(tmp_path, **{key: "bfloat16"})).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("in_config", "in_defaults", "expected"),
    [
        (None, None, set()),
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (2, 2, {2}),
        (2, [3, 4], {2, 3, 4}),
        (None, 5, {5}),
        (0, None, {0}),
        ([], [7], {7}),
    ],
)
def test_all_eos_ids_of_both_files(
    tmp_path: Path, in_config: object, in_defaults: object, expected: set[int]
) -> None:
    """Chat models often name the end of a turn in generation_config.json alone."""
    folder = write_config(tmp_path, {"eos_token_id": in_defaults}, eos_token_id=in_config)
    assert ModelConfig.from_folder(folder).eos_token_ids == expected


def test_generation_defaults_are_kept(tmp_path: Path) -> None:
    folder = write_config(tmp_path, {"temperature": 0.6, "top_k": 20})
    assert ModelConfig.from_folder(folder).generation_defaults["top_k"] == 20


def test_a_missing_config_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config.json: not a Hugging Face checkpoint"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("content", [b'{"vocab_size": 3', b"", b"\xff\xfe\x00", b"[1, 2]", b'"x"'])
def test_a_corrupt_config_json(tmp_path: Path, content: bytes) -> None:
    """Truncated, empty, no text, or JSON that is not an object: named, and what to do."""
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config.json is not .*Copy it again"):
        ModelConfig.from_folder(tmp_path)


def test_a_corrupt_generation_config(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config.json is not readable JSON"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("key", sorted(set(LLAMA) - {"architectures"}))
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    write_config(tmp_path, **{key: "(missing)"})
    with pytest.raises(ValueError, match=rf"has no '{key}'.*causal language model"):
        ModelConfig.from_folder(tmp_path)


# -- rope --

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize(
    "hf",
    [
        {"rope_theta": 5e5, "rope_scaling": YARN},
        {"rope_theta": 5e5, "rope_scaling": {**YARN, "type": "yarn"}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {**YARN, "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}},
    ],
)
def test_both_layouts_of_rope_read_the_same(hf: dict[str, Any]) -> None:
    """rope_theta beside rope_scaling (type or rope_type), and all in rope_parameters."""
    rope = read_rope_parameters({**LLAMA, **hf})
    assert rope.items() >= {**YARN, "rope_theta": 5e5}.items()


@pytest.mark.parametrize(
    "hf", [{}, {"rope_scaling": None, "rope_theta": 1e4}, {"rope_parameters": {"rope_theta": 1e4}}]
)
def test_rope_defaults(hf: dict[str, Any]) -> None:
    rope = read_rope_parameters({**LLAMA, **hf})
    expected = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    assert rope.items() >= expected.items()


def test_reading_rope_leaves_config_json_as_it_is() -> None:
    hf: dict[str, Any] = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
    read_rope_parameters(hf)
    assert hf["rope_scaling"] == {"type": "linear", "factor": 2.0}


def test_phi3_writes_the_original_length_at_the_top() -> None:
    """Beside rope_scaling, not in it."""
    longrope = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    hf = {**LLAMA, "rope_scaling": longrope, "original_max_position_embeddings": 512}
    assert read_rope_parameters(hf)["original_max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 1024),
        ({"rope_type": "default"}, 1024),
        ({"rope_type": "linear", "factor": 2.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.5}, 2560),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "original_max_position_embeddings": 256}, 1024),
        (
            {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128},
            1024,
        ),
        (
            {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 128},
            1024,
        ),
    ],
)
def test_the_length_a_model_was_made_for(
    tmp_path: Path, rope: dict[str, Any] | None, expected: int
) -> None:
    """linear and dynamic stretch max_position_embeddings by their factor, yarn the original length;
    for llama3 and longrope max_position_embeddings counts, stretched already."""
    config = ModelConfig.from_folder(write_config(tmp_path, rope_scaling=rope))
    assert config.max_model_len == expected


# -- resolve_folder --


def test_none_is_the_demo_model() -> None:
    assert (resolve_folder(None) / "config.json").exists()


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_folder(tmp_path) == resolve_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("model", ["no-such-folder", "./no/such", "a/b/c", "/no/such", "a b/c"])
def test_what_is_neither_a_folder_nor_an_id(model: str) -> None:
    """The message names what was given and the three things that would do."""
    with pytest.raises(ValueError, match="is not a folder, nor a Hugging Face id") as raised:
        resolve_folder(model)
    for word in (model, "Qwen/Qwen3-0.6B", "None"):
        assert word in str(raised.value)


def test_an_id_the_hub_does_not_deliver() -> None:
    """Offline (as all tests are), or misspelt."""
    with pytest.raises(ValueError, match="did not deliver") as raised:
        resolve_folder("nobody/no-such-model-at-all")
    for word in ("nobody/no-such-model-at-all", "Check the name and the connection"):
        assert word in str(raised.value)
