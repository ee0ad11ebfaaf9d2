"""EngineConfig: ranges, resolved values, command-line flags. ModelConfig: what config.json says."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fakes import make_model_config
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nanoserve.checkpoint import read_rope_parameters
from nanoserve.config import (
    DEMO_MODEL,
    OPTIONS,
    VALUE_ALIASES,
    EngineConfig,
    ModelConfig,
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


# -- EngineConfig: what is allowed --

OPTIONAL = ("max_model_len", "max_num_seqs", "max_num_batched_tokens")  # integers, or None
OPTIONAL = (*OPTIONAL, "max_num_waiting", "max_cpu_loras")
OPTIONAL = (*OPTIONAL, "num_gpu_blocks_override", "num_cpu_blocks", "kv_cache_memory_bytes")
SMALLEST = dict.fromkeys(("block_size", "tensor_parallel_size", *OPTIONAL), 1)
SMALLEST |= {"pipeline_parallel_size": 1}
SMALLEST |= {"max_loras": 1, "max_lora_rank": 1}
SMALLEST |= {"long_prefill_token_threshold": 0, "max_logprobs": -1, "seed": 0}
IN_32_BITS = ("block_size", "num_gpu_blocks_override", "num_cpu_blocks")
SWITCHES = ("enable_prefix_caching", "enable_chunked_prefill", "enforce_eager", "async_scheduling")
SWITCHES += ("enable_lora",)
CHOICES = {
    "dtype": "auto, float32, bfloat16, float16",
    "scheduling_policy": "fcfs, priority",
    "preemption_mode": "recompute, swap",
    "load_format": "auto, dummy",
    "model_impl": "auto, nanoserve, transformers",
    "kv_offloading_backend": "native",
}
NUMBERS = {"gpu_memory_utilization": "more than 0, up to 1", "swap_space": "0 to 2**33"}
NUMBERS |= {"kv_offloading_size": "more than 0, up to 2**33"}


@contextmanager
def refused(error: type[Exception], *words: str) -> Iterator[None]:
    """Expect `error`, with a message that has all of `words`: the field, the value, the rule."""
    with pytest.raises(error) as raised:
        yield
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("name", SMALLEST)
def test_integers(name: str) -> None:
    low = SMALLEST[name]
    assert getattr(EngineConfig(**{name: low}), name) == low
    with refused(ValueError, name, f"is {low - 1}; allowed: {low} "):
        EngineConfig(**{name: low - 1})
    with refused(ValueError, name, "2**31 - 1" if name in IN_32_BITS else "2**63 - 1"):
        EngineConfig(**{name: 2**70})
    wrong = [True, 16.0, 1.5, math.nan, math.inf, "8"]
    for value in wrong if name in OPTIONAL else [*wrong, None]:
        with refused(TypeError, name, repr(value), "must be an int"):
            EngineConfig(**{name: value})


@pytest.mark.parametrize("name", SWITCHES)
def test_switches(name: str) -> None:
    for value in (0, 1, "yes", None):
        with refused(TypeError, name, repr(value), "must be True or False"):
            EngineConfig(**{name: value})


@pytest.mark.parametrize("name", CHOICES)
def test_choices(name: str) -> None:
    for value in CHOICES[name].split(", "):
        assert getattr(EngineConfig(**{name: value}), name) == value
    for value in ("float64", "", None):
        with refused(ValueError, name, str(value), f"allowed: {CHOICES[name]}."):
            EngineConfig(**{name: value})


def test_other_values() -> None:
    for value in (0, 1.5, math.nan, math.inf):
        with refused(ValueError, "gpu_memory_utilization", repr(value), "more than 0, up to 1"):
            EngineConfig(gpu_memory_utilization=value)
    for value in (-1, math.nan, math.inf):
        for name in ("swap_space", "kv_offloading_size"):
            with refused(ValueError, name, repr(value), NUMBERS[name]):
                EngineConfig(**{name: value})
    for name in NUMBERS:
        with refused(TypeError, name, "'90%'", "must be a number"):
            EngineConfig(**{name: "90%"})  # type: ignore[arg-type]
    with refused(ValueError, "seed", str(2**63), "0 to 2**63 - 1"):
        EngineConfig(seed=2**63)
    for device in ("auto", "cpu", "cuda", "cuda:0", "cuda:12"):
        assert EngineConfig(device=device).device == device
    for device in ("tpu", "cuda:", "cuda:0\n", 0, None):
        with refused(ValueError, "device", repr(device), "auto, cpu, cuda, cuda:N"):
            EngineConfig(device=device)
    with refused(TypeError, "model", "5", "must be a string"):
        EngineConfig(model=5)  # type: ignore[arg-type]
    assert EngineConfig(dtype=torch.float16).dtype == "float16"  # type: ignore[arg-type]
    assert EngineConfig(model=DEMO_MODEL).model == DEMO_MODEL


@pytest.mark.parametrize("name", VALUE_ALIASES)
def test_vllm_names_of_values(name: str) -> None:
    """dtype="half" is dtype="float16", also as a flag."""
    for theirs, ours in VALUE_ALIASES[name].items():
        assert EngineConfig(**{name: theirs}) == EngineConfig(**{name: ours})
        args = make_parser().parse_args(["--" + name.replace("_", "-"), theirs])
        assert EngineConfig.from_cli_args(args) == EngineConfig(**{name: ours})


def test_a_misspelt_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="max_model_length"):
        EngineConfig(max_model_length=100)  # type: ignore[call-arg]


def test_a_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        EngineConfig().block_size = 32  # type: ignore[misc]


def test_a_config_has_a_hash_whatever_the_backend() -> None:
    """An attention backend of the user's may define == and so have no hash."""

    class Backend:
        __hash__ = None  # type: ignore[assignment]

    backend = Backend()
    config = EngineConfig(attention_backend=backend)
    assert hash(config) == hash(EngineConfig(attention_backend=backend))
    assert config == EngineConfig(attention_backend=backend) != EngineConfig()


def test_numbers_of_numpy_and_torch() -> None:
    """A sweep in a notebook makes them; the config holds Python's own."""
    config = EngineConfig(
        max_num_seqs=np.int64(3),
        gpu_memory_utilization=np.float32(0.5),
        enforce_eager=np.bool_(True),
        seed=torch.tensor(7),  # type: ignore[arg-type]
    )
    assert config == EngineConfig(
        max_num_seqs=3, gpu_memory_utilization=0.5, enforce_eager=True, seed=7
    )
    assert type(config.max_num_seqs) is type(config.seed) is int
    with refused(TypeError, "block_size", "must be an int"):
        EngineConfig(block_size=np.array([16]))  # type: ignore[arg-type]


def test_options_that_must_agree() -> None:
    """The message names both and says what to change."""
    with refused(ValueError, "max_num_batched_tokens is 7", "max_num_seqs 8", "Raise the first"):
        EngineConfig(max_num_batched_tokens=7, max_num_seqs=8)
    EngineConfig(max_num_batched_tokens=8, max_num_seqs=8)
    with refused(ValueError, "swap_space (4 GiB) and num_cpu_blocks (8)", "Give one"):
        EngineConfig(swap_space=4, num_cpu_blocks=8)
    with refused(ValueError, "'cuda:1' is one GPU", "tensor_parallel_size is 2", "Use 'cuda'"):
        EngineConfig(device="cuda:1", tensor_parallel_size=2)


# -- EngineConfig: command line --


def make_parser() -> argparse.ArgumentParser:
    """A program with an argument of its own beside the engine options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--temperature", type=float, default=0.0)
    return EngineConfig.add_cli_args(parser)


def test_every_option_has_a_flag_with_its_help_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    page = " ".join(make_parser().format_help().split())
    assert [option.name for option in OPTIONS] == [field.name for field in fields(EngineConfig)]
    for option in OPTIONS:
        assert option.help.endswith(".")
        assert "--" + option.name.replace("_", "-") in page
        assert page.count(option.cli_help) == 1
    assert "--enforce-eager, --no-enforce-eager" in page
    assert "Tokens in one KV block. (default: 16)" in page


def test_help_says_the_default_once_and_never_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a command line, no flag stands for None."""
    monkeypatch.setenv("COLUMNS", "1000")
    page = make_parser().format_help()
    assert "Hugging Face id. (default: the embedded demo model)" in page
    assert "None" not in page.replace("ANY", "")
    for option in OPTIONS:
        assert option.cli_help.count("(default: ") == 1


def test_without_flags_the_defaults_hold() -> None:
    assert EngineConfig.from_cli_args(make_parser().parse_args([])) == EngineConfig()
    some = argparse.Namespace(max_num_seqs=3, temperature=0.5)
    assert EngineConfig.from_cli_args(some) == EngineConfig(max_num_seqs=3)


def values_of(name: str) -> st.SearchStrategy[Any]:
    """Allowed values of one option that a command line can express."""
    if name in SMALLEST:
        return st.integers(SMALLEST[name], 10_000)
    if name in SWITCHES:
        return st.booleans()
    if name in CHOICES:
        return st.sampled_from(CHOICES[name].split(", "))
    if name in NUMBERS:
        return st.floats(0.01, 1)
    return st.sampled_from(["cpu", "cuda", "cuda:1"] if name == "device" else ["a", "b/c"])


@settings(deadline=None)
@given(st.fixed_dictionaries({}, optional={each.name: values_of(each.name) for each in OPTIONS}))
def test_flags_say_what_keyword_arguments_say(values: dict[str, Any]) -> None:
    try:
        expected = EngineConfig(**values)
    except ValueError:
        assume(False)
    flags = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        flags += [f"--no-{flag}" if value is False else f"--{flag}"]
        flags += [] if isinstance(value, bool) else [str(value)]
    assert EngineConfig.from_cli_args(make_parser().parse_args(flags)) == expected


@pytest.mark.parametrize(
    "flags",
    [
        ["--max-num-seqs", "many"],
        ["--gpu-memory-utilization", "much"],
        ["--dtype", "float64"],
        ["--enforce-eager", "yes"],
        ["--model", "None"],
        ["--max-model-len", "None"],
    ],
)
def test_a_flag_of_the_wrong_type_is_a_usage_error(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(flags)
    assert flags[1] in capsys.readouterr().err


# -- EngineConfig: resolve --


@pytest.mark.parametrize(
    ("options", "expected"),
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
def test_resolve_makes_numbers(options: dict[str, Any], expected: tuple[int, int, int]) -> None:
    """max_model_len of the model; 256 sequences and 8192 tokens (2048 on a CPU), unless the other
    number asks for less or more. The config itself does not change."""
    config = EngineConfig(**options)
    model = make_model_config(max_model_len=1024)
    resolved = config.resolve(model)
    limits = (resolved.max_model_len, resolved.max_num_seqs, resolved.max_num_batched_tokens)
    assert limits == expected
    assert config == EngineConfig(**options)
    assert resolved.resolve(model) == resolved


def test_resolve_without_chunked_prefill() -> None:
    """The budget of one step holds the longest prompt, or resolve names the three ways out."""
    config = EngineConfig(enable_chunked_prefill=False)
    assert config.resolve(make_model_config(max_model_len=40_000)).max_num_batched_tokens == 40_000
    config = replace(config, max_num_batched_tokens=1023)
    remedies = ("Raise", "lower max_model_len", "enable_chunked_prefill=True")
    with refused(ValueError, "1023", "max_model_len (1024)", *remedies):
        config.resolve(make_model_config(max_model_len=1024))
    replace(config, enable_chunked_prefill=True).resolve(make_model_config(max_model_len=1024))


def test_resolve_refuses_more_than_the_model_was_made_for() -> None:
    with refused(ValueError, "max_model_len is 1025", "at most 1024 tokens"):
        EngineConfig(max_model_len=1025).resolve(make_model_config(max_model_len=1024))


@pytest.mark.parametrize(
    ("name", "too_large", "others"),
    [
        ("max_model_len", 2000, {"max_num_seqs": 1}),
        ("max_num_batched_tokens", 2000, {"max_num_seqs": 1, "max_model_len": 16}),
        ("max_num_seqs", 1000, {"max_model_len": 16}),
    ],
)
def test_tables_that_no_memory_holds(
    monkeypatch: pytest.MonkeyPatch, name: str, too_large: int, others: dict[str, int]
) -> None:
    """The message has the largest number that fits: that number is accepted, one more is not."""
    monkeypatch.setattr("nanoserve.config.total_memory", lambda: 2**16)

    def resolve(value: int) -> EngineConfig:
        options = {"max_num_batched_tokens": 1000, **others, name: value}
        return EngineConfig(**options).resolve(make_model_config(max_model_len=2**31 - 1))

    with pytest.raises(ValueError, match=f"{name} is {too_large}, .*at most [0-9]+ .*fit") as no:
        resolve(too_large)
    limit = int(str(no.value).split("at most ")[1].split()[0])
    assert 0 < limit < too_large
    assert getattr(resolve(limit), name) == limit
    with refused(ValueError, name, f"at most {limit} would fit"):
        resolve(limit + 1)


def test_a_machine_that_does_not_say_how_much_memory_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is refused for its size then."""
    monkeypatch.setattr("nanoserve.config.total_memory", lambda: None)
    config = EngineConfig(max_num_seqs=2**31 - 1).resolve(make_model_config(max_model_len=1024))
    assert config.max_num_seqs == 2**31 - 1


# -- ModelConfig --


def test_keys_that_config_json_may_leave_out(tmp_path: Path) -> None:
    """The defaults are transformers'."""
    config = ModelConfig.from_folder(write_config(tmp_path))
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert config.tie_word_embeddings is False
    assert config.eos_token_ids == frozenset()
    assert config.generation_defaults == {}
    assert (config.dtype, config.max_model_len) == ("float32", 1024)
    assert config.path == tmp_path


@pytest.mark.parametrize("model_type", ["llama", "mistral", "mixtral", "qwen2", "qwen3"])
def test_left_out_keys_mean_what_transformers_takes(tmp_path: Path, model_type: str) -> None:
    """Its families differ: a Mistral has a window, a Mixtral turns slowly."""
    theirs = transformers.CONFIG_MAPPING[model_type](
        hidden_size=64, num_attention_heads=4, num_key_value_heads=2
    )
    kept = theirs.to_dict()
    for key in ("rms_norm_eps", "rope_parameters", "sliding_window", "head_dim"):
        kept.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps({**kept, "architectures": ["X"]}))
    ours = ModelConfig.from_folder(tmp_path)
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.rope_parameters["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert ours.get("sliding_window") == getattr(theirs, "sliding_window", None)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)


def test_keys_of_both_files_are_read(tmp_path: Path) -> None:
    changes = {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
    for key in ("dtype", "torch_dtype"):  # of transformers 5, and of earlier versions
        folder = write_config(tmp_path, {"top_k": 20}, **changes, **{key: "bfloat16"})
        config = ModelConfig.from_folder(folder)
        assert (config.num_kv_heads, config.head_dim) == (2, 32)
        assert config.tie_word_embeddings is True
        assert config.dtype == "bfloat16"
        assert config.hf_config["head_dim"] == 32
        assert config.generation_defaults == {"top_k": 20}


def test_gpt2_has_other_names(tmp_path: Path) -> None:
    """intermediate_size may be missing, too: 4 * n_embd."""
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}
    folder = write_config(tmp_path, **dict.fromkeys(set(LLAMA) - {"vocab_size"}, "(missing)"))
    hf = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**hf, **gpt2}))
    config = ModelConfig.from_folder(folder)
    assert (config.hidden_size, config.num_layers, config.num_heads) == (64, 2, 4)
    assert (config.intermediate_size, config.max_model_len) == (256, 1024)


@pytest.mark.parametrize(
    ("in_config", "in_defaults", "expected"),
    [
        (None, None, set()),
        (2, None, {2}),
        ([2, 3], None, {2, 3}),
        (2, [3, 4], {2, 3, 4}),
        (None, 5, {5}),
        (0, None, {0}),
        ([], [7], {7}),
        (-1, [320, 319], {319}),
        (10**100, -(10**100), set()),
    ],
)
def test_all_eos_ids_of_both_files(
    tmp_path: Path, in_config: object, in_defaults: object, expected: set[int]
) -> None:
    """Many chat models name the end of a turn only in generation_config.json. Ids outside of the
    vocabulary (320 tokens) are dropped: the model cannot sample them."""
    folder = write_config(tmp_path, {"eos_token_id": in_defaults}, eos_token_id=in_config)
    assert ModelConfig.from_folder(folder).eos_token_ids == expected


def test_dropped_eos_ids_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="nanoserve")
    ModelConfig.from_folder(write_config(tmp_path, eos_token_id=[1, 319]))
    assert not caplog.text
    ModelConfig.from_folder(write_config(tmp_path, {"eos_token_id": 320}, eos_token_id=1))
    assert "eos_token_id [320] is outside of the vocabulary of 320 tokens" in caplog.text
    assert "No other is left" not in caplog.text
    ModelConfig.from_folder(write_config(tmp_path, {}, eos_token_id=-1))
    assert "[-1] is outside" in caplog.text
    assert "No other is left" in caplog.text


def test_a_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with refused(ValueError, "has no config.json: not a Hugging Face checkpoint"):
        ModelConfig.from_folder(tmp_path)
    for content in (b'{"vocab_size": 3', b"", b"\xff\xfe\x00", b"[1, 2]", b'"x"'):
        (tmp_path / "config.json").write_bytes(content)
        with refused(ValueError, "config.json is not ", "Copy it again"):
            ModelConfig.from_folder(tmp_path)
    write_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with refused(ValueError, "generation_config.json is not readable JSON"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize("key", sorted(set(LLAMA) - {"architectures"}))
def test_a_missing_key_is_named(tmp_path: Path, key: str) -> None:
    write_config(tmp_path, **{key: "(missing)"})
    with refused(ValueError, f"has no '{key}'", "causal language model"):
        ModelConfig.from_folder(tmp_path)


# -- rope --

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}
YARN_5E5 = {**YARN, "rope_theta": 5e5}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 128}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("hf", "expected"),
    [
        ({}, DEFAULT),
        ({"rope_scaling": None, "rope_theta": 1e4}, DEFAULT),
        ({"rope_parameters": {"rope_theta": 1e4}}, DEFAULT),
        ({"rope_theta": 5e5, "rope_scaling": YARN}, YARN_5E5),
        ({"rope_theta": 5e5, "rope_scaling": {**YARN, "type": "yarn"}}, YARN_5E5),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "yarn", "factor": 4.0}}, YARN_5E5),
        ({"rope_parameters": YARN_5E5}, YARN_5E5),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}}, YARN_5E5),
        (  # Phi-3 writes the original length beside rope_scaling
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 512},
            {"original_max_position_embeddings": 512},
        ),
    ],
)
def test_both_layouts_of_rope_read_the_same(hf: dict[str, Any], expected: dict[str, Any]) -> None:
    """rope_theta beside rope_scaling (type or rope_type), and all in rope_parameters."""
    given_hf = json.loads(json.dumps({**LLAMA, **hf}))
    rope = read_rope_parameters(given_hf)
    assert rope.items() >= expected.items()
    assert given_hf == {**LLAMA, **hf}, "config.json itself does not change"


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, 1024),
        ({"rope_type": "default"}, 1024),
        ({"rope_type": "linear", "factor": 2.0}, 2048),
        ({"rope_type": "dynamic", "factor": 2.5}, 2560),
        ({**YARN, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "original_max_position_embeddings": 256}, 1024),
        (LLAMA3, 1024),
        ({**LLAMA3, "rope_type": "longrope"}, 1024),
    ],
)
def test_the_length_a_model_was_made_for(
    tmp_path: Path, rope: dict[str, Any] | None, expected: int
) -> None:
    """linear and dynamic stretch max_position_embeddings by their factor, yarn the original length.
    With llama3 and longrope, max_position_embeddings is the stretched length."""
    config = ModelConfig.from_folder(write_config(tmp_path, rope_scaling=rope))
    assert config.max_model_len == expected


# -- resolve_folder --


def test_a_folder_or_the_demo_model(tmp_path: Path) -> None:
    assert (resolve_folder(None) / "config.json").exists()
    assert resolve_folder(tmp_path) == resolve_folder(str(tmp_path)) == tmp_path


def test_the_demo_models_name_is_no_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The README's path is the embedded model outside of the clone, too, and is not asked for on
    the hub. A folder of this name comes first."""
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("nanoserve/demo") == resolve_folder(None)
    folder = tmp_path / "nanoserve" / "demo"
    folder.mkdir(parents=True)
    assert resolve_folder("nanoserve/demo").resolve() == folder.resolve()


def test_a_tokenizer_is_named_as_one() -> None:
    for tokenizer in ("nosuch", "./nosuch", ""):
        with refused(ValueError, f"tokenizer {tokenizer!r}" if tokenizer else "tokenizer is"):
            resolve_folder(tokenizer, "tokenizer")
    assert resolve_folder(None, "tokenizer", Path("model")) == Path("model")
    with refused(ValueError, "speculative_config './no'", "config.json", "out: no drafts"):
        resolve_folder("./no", "speculative_config")


@pytest.mark.parametrize(
    "model",
    [
        "./no/such",
        "~/no/such",
        "a/b/c",
        "/no/such",
        "a b/c",
        "x.gguf",
        "a/b.safetensors",
        "../no",
        "a/",
    ],
)
def test_neither_a_folder_nor_an_id(model: str) -> None:
    with refused(
        ValueError, "is not a folder, nor a Hugging Face id", model, "Qwen3-0.6B", "leave model out"
    ):
        resolve_folder(model)


def test_an_id_that_the_hub_does_not_deliver() -> None:
    """The tests run offline; a misspelt id ends the same way. An id may have no slash."""
    for name in ("nobody/no-such-model-at-all", "gpt3", "no-such.model_1"):
        with pytest.raises(ValueError, match=f"{name}.*did not deliver it.*leave model") as no:
            resolve_folder(name)
        assert "\n" not in str(no.value), "one line; the hub's text is logged as DEBUG"
