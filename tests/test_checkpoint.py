"""What a checkpoint says is checked: its files, the keys of config.json, and at random."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published_configs import PUBLISHED
from test_config import LLAMA, write_config

from nanoserve import LLM, SamplingParams
from nanoserve.checkpoint import (
    COMMON_KEYS,
    KEYS,
    MAX_NESTING,
    MAY_BE_OFF,
    check_common_keys,
    is_plain_name,
    read_json,
    read_key,
    read_rope_parameters,
)
from nanoserve.config import ModelConfig
from nanoserve.models.decoder import Qwen3ForCausalLM
from nanoserve.models.rope import rope_frequencies

# -- files --


def test_a_file_of_the_hubs_cache_is_read(tmp_path: Path) -> None:
    """There every file is a symbolic link to ../../blobs/<hash>."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0123").write_text('{"a": 1}')
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    assert read_json(snapshot / "config.json") == {"a": 1}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes on Windows")
@pytest.mark.parametrize("kind", ["folder", "pipe", "socket", "device", "link to nothing", "loop"])
def test_a_special_file_is_not_opened(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe would be waited for, and /dev/zero has no end."""
    monkeypatch.chdir(tmp_path)  # the path of a socket must be short
    file = Path("config.json")
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(file))
    else:
        target = {"device": "/dev/zero", "loop": "config.json"}.get(kind, "no-such-file")
        file.symlink_to(target)
    with pytest.raises(ValueError, match=r"config\.json' is not a regular file"):
        read_json(file)


def test_an_endless_file_of_the_system_is_not_read_to_its_end(tmp_path: Path) -> None:
    """The bytes are counted while they are read: /proc/self/mem says that it has 0."""
    (tmp_path / "config.json").write_text('{"a": "' + "x" * 1000 + '"}')
    assert read_json(tmp_path / "config.json", most_bytes=1009)["a"] == "x" * 1000
    with pytest.raises(ValueError, match=r"config\.json is not readable.*more than 1008 bytes"):
        read_json(tmp_path / "config.json", most_bytes=1008)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
        ('{"a":' * MAX_NESTING + "{}" + "}" * MAX_NESTING, "lists and objects in each other"),
        ('{"a": ' + "1" * 5000 + "}", "not readable JSON"),
        ('{"a": "\xff"}', "not readable JSON"),
        ("{'a': 1}", "not readable JSON"),
        ("", "not readable JSON"),
        ("null", "not a JSON object but None"),
        ("NaN", "not a JSON object but nan"),
    ],
    ids=lambda text: text[:6],
)
def test_what_is_no_json_object(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=f"config.json is .*{words}.* Copy it again"):
        read_json(tmp_path / "config.json")


def test_nesting_that_is_allowed(tmp_path: Path) -> None:
    text = '{"a":' * (MAX_NESTING - 1) + "{}" + "}" * (MAX_NESTING - 1)
    (tmp_path / "config.json").write_text(text)
    assert list(read_json(tmp_path / "config.json")) == ["a"]


def test_names_of_files_of_the_same_folder() -> None:
    end = ".safetensors"
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "..safetensors"):
        assert is_plain_name(name, end)
    bad: list[Any] = ["../x", "/x", "a/b", "a\\b", "c:x", "a\0", "\n", "\ud800", ""]
    bad = [name + end for name in bad] + [None, 3, ["x" + end], "x.bin", "", ".", ".."]
    assert not any(is_plain_name(name, end) for name in bad)


# -- keys --

NO_INT = [0, -1, 2**31, 10**30, True, 4.0, "4", [4], {}, math.nan]
NO_POSITIVE = [0, -1, math.nan, math.inf, True, "1", [1.0]]
NO_FLAG = [0, 1, "true", "", [], {}]
BAD = {
    "vocab_size": NO_INT,
    "hidden_size": [*NO_INT, 10**12],
    "intermediate_size": NO_INT,
    "num_hidden_layers": [*NO_INT, 1001, 10**9],
    "num_attention_heads": [*NO_INT, 65],  # 65: no dimension is left for a head
    "num_key_value_heads": NO_INT,
    "head_dim": NO_INT,
    "max_position_embeddings": NO_INT,
    "rms_norm_eps": [*NO_POSITIVE, 2],
    "rope_theta": [*NO_POSITIVE, 1, 1e300],
    "partial_rotary_factor": [*NO_POSITIVE, 1.5],
    "tie_word_embeddings": NO_FLAG,
    "dtype": ["int8", "", "float8_e4m3fn", 5, ["float16"], "Tensor"],
    "torch_dtype": ["int8", 5],
    "eos_token_id": ["1", True, 1.0, [1, "2"], [[1]], {}],
    "architectures": ["LlamaForCausalLM", [1], [""], {"a": 1}, 5],
    "rope_parameters": [[1], "default", 5],
    "rope_scaling": [[1], "default", 5],
}


@pytest.mark.parametrize("key", BAD)
def test_a_key_of_config_json(tmp_path: Path, key: str) -> None:
    """The error names the file, the key, the value and what is allowed."""
    for value in BAD[key]:
        write_config(tmp_path, **{key: value})
        with pytest.raises(ValueError, match=r"/config\.json: .* allowed") as raised:
            ModelConfig.from_folder(tmp_path)
        assert f"{key} is {value!r}" in str(raised.value)


def test_null_is_a_missing_key(tmp_path: Path) -> None:
    optional = set(BAD) - set(LLAMA)
    config = ModelConfig.from_folder(write_config(tmp_path, **dict.fromkeys(optional)))
    without = ModelConfig.from_folder(write_config(tmp_path))
    assert vars(config) == {**vars(without), "hf_config": config.hf_config}


# Of the families of decoder.py, which read them when the model is built.
BAD_FOR_FAMILIES = {
    "attention_bias": NO_FLAG,
    "mlp_bias": NO_FLAG,
    "use_sliding_window": NO_FLAG,
    "norm_topk_prob": NO_FLAG,
    "sliding_window": NO_INT,
    "max_window_layers": [-1, True, 4.0],
    "num_experts": [*NO_INT, 10**6],
    "num_local_experts": NO_INT,
    "num_experts_per_tok": NO_INT,
    "moe_intermediate_size": NO_INT,
    "decoder_sparse_step": NO_INT,
    "mlp_only_layers": [1, [True], ["1"], {}],
    "layer_types": ["full_attention", ["chunked_attention"], [1], [], {"a": 1}],
    "hidden_act": [5, ["silu"], ""],
}


# Of models that make vectors (extras/pooling).
BAD_FOR_POOLING = {
    "is_matryoshka": NO_FLAG,
    "is_causal": NO_FLAG,
    "matryoshka_dimensions": [64, [], [0], ["64"], [True]],
    "pad_token_id": [-2, 2**31, True, 1.0, "1", [1]],
}


@pytest.mark.parametrize("key", BAD_FOR_FAMILIES | BAD_FOR_POOLING)
def test_a_key_of_some_families(tmp_path: Path, key: str) -> None:
    """A key that the family does not read may say what it likes."""
    for value in (BAD_FOR_FAMILIES | BAD_FOR_POOLING)[key]:
        config = ModelConfig.from_folder(write_config(tmp_path, **{key: value}))
        with pytest.raises(ValueError, match=rf"config\.json: {key} is .*; allowed: "):
            config.get(key)


@pytest.mark.parametrize("key", COMMON_KEYS)
def test_a_key_that_means_the_same_in_every_family(key: str) -> None:
    """It is checked for the families whose code is in transformers, too. There 0 may mean none."""
    bad = [
        value for value in BAD_FOR_FAMILIES[key] if not (key in MAY_BE_OFF and value in (0, [4]))
    ]
    bad += [-3, [-3]] if key in MAY_BE_OFF else []
    for value in bad:
        with pytest.raises(ValueError, match=rf"config\.json: {key} is .*; allowed: "):
            check_common_keys({**LLAMA, key: value}, "config.json")
    for value in [None, *([0, [0, 2]] if key in MAY_BE_OFF else [])]:
        check_common_keys({**LLAMA, key: value}, "config.json")


@pytest.mark.parametrize("kind", ["full_attention", "sliding_attention"])
def test_rope_of_each_type_of_layer(kind: str) -> None:
    for place in ("rope_parameters", "rope_scaling"):
        hf = {place: {kind: {"rope_type": "default", "rope_theta": -1}}}
        with pytest.raises(ValueError, match=f"config.json, {place}.{kind}: rope_theta is -1"):
            check_common_keys(hf, "config.json")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(tmp_path: Path, name: str) -> None:
    """The keys of families that run through transformers, as their checkpoints write them."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = ModelConfig.from_folder(tmp_path)
    check_common_keys(config.hf_config, tmp_path / "config.json")
    assert config.num_layers == PUBLISHED[name].get("num_hidden_layers", 12)


def test_one_layer_type_for_each_layer(tmp_path: Path) -> None:
    for number in (1, 3):
        folder = write_config(tmp_path, layer_types=["full_attention"] * number)
        with pytest.raises(ValueError, match=f"layer_types has {number} entries for 2 layers"):
            Qwen3ForCausalLM.read_family(ModelConfig.from_folder(folder))


BAD_FOR_ROPE = {
    "factor": [*NO_POSITIVE, 0.5, 1e9],
    "low_freq_factor": NO_POSITIVE,
    "high_freq_factor": NO_POSITIVE,
    "beta_fast": NO_POSITIVE,
    "beta_slow": NO_POSITIVE,
    "attention_factor": NO_POSITIVE,
    "mscale": [-1, math.nan, "1"],
    "mscale_all_dim": [-1, math.inf],
    "truncate": NO_FLAG,
    "short_factor": [1.0, [], [0], ["1"], [math.nan]],
    "long_factor": [{}, [-1.0]],
    "original_max_position_embeddings": [*NO_INT, 1],
    "rope_theta": NO_POSITIVE,
    "partial_rotary_factor": NO_POSITIVE,
    "rope_type": [5, [], {}, ""],
    "type": [5, ["yarn"]],
}


def test_every_key_has_a_test() -> None:
    assert set(BAD_FOR_FAMILIES) == {*COMMON_KEYS, "layer_types"}
    assert set(KEYS) == {*BAD, *BAD_FOR_FAMILIES, *BAD_FOR_POOLING, *BAD_FOR_ROPE}


@pytest.mark.parametrize("key", BAD_FOR_ROPE)
def test_a_key_of_rope(key: str) -> None:
    """In either layout, and for one type of layer."""
    for value in BAD_FOR_ROPE[key]:
        for place in ("rope_parameters", "rope_scaling"):
            with pytest.raises(ValueError, match=f"config.json, {place}: {key} is .*; allowed: "):
                read_rope_parameters({**LLAMA, place: {"rope_type": "default", key: value}})
        nested = {"full_attention": {key: value}, "sliding_attention": {}}
        with pytest.raises(ValueError, match=f"rope_parameters.full_attention: {key} is"):
            read_rope_parameters({**LLAMA, "rope_parameters": nested})


def test_yarn_may_derive_its_factor() -> None:
    """From the two lengths, as transformers does."""
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, **lengths}
    derived, given = (rope_frequencies(8, {**rope, **each}, 64) for each in ({}, {"factor": 4.0}))
    assert derived[0].tolist() == given[0].tolist()
    assert derived[1] == given[1] > 1


FACTORS = {"short_factor": [1.0], "long_factor": [1.0]}
ROPE = {"rope_theta": 1e4, "max_position_embeddings": 64, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("dim", "rope", "words"),
    [
        (3, {"rope_type": "default"}, "head_dim .* is 3; allowed: even"),
        (0, {"rope_type": "default"}, "is 0; allowed: even, 2 or more"),
        (8, {"rope_type": "llama3"}, "'llama3' needs 'low_freq_factor'"),
        (
            8,
            {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 1},
            "low_freq_factor 4 .* is more than high_freq_factor 1",
        ),
        (8, {"rope_type": "longrope"}, "'longrope' needs 'short_factor'"),
        (8, {"rope_type": "longrope", "short_factor": [1.0] * 4}, "'longrope' needs 'long_factor'"),
        (8, {"rope_type": "longrope", **FACTORS}, "short_factor .* 1 entr"),
        (8, {"rope_type": "linear"}, "rope type 'linear' needs 'factor' in config.json"),
        (8, {"rope_type": "dynamic"}, "'dynamic' needs 'factor'"),
        (8, {"rope_type": "yarn"}, "'yarn' needs 'factor'"),
        (2, {"rope_type": "dynamic", "factor": 2.0}, "give no numbers"),
        (8, {"rope_type": "linear", "factor": 2.0, "rope_theta": 0.0}, "give no numbers"),
        (8, {"rope_type": "linear", "factor": math.nan}, "give no numbers"),
        (8, {"rope_type": "q"}, "'q' is not supported"),
    ],
)
def test_rope_settings_that_give_no_frequencies(dim: int, rope: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rope_frequencies(dim, {**ROPE, **rope}, 64)


def test_a_long_value_is_shortened() -> None:
    with pytest.raises(ValueError, match="vocab_size is ") as raised:
        read_key({"vocab_size": "x" * 10**6}, "vocab_size", None, "config.json")
    assert len(str(raised.value)) < 500


# -- at random --

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.sampled_from([2**31, 2**63, 10**30, -(10**30), 320, 1024, 512, 112])
    | st.floats()
    | st.sampled_from(["", "silu", "float16", "default", "yarn", "llama3", "longrope", "dynamic"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYS]), inner),
    max_leaves=6,
)
MUTATIONS = st.dictionaries(st.sampled_from([*KEYS, "quantization_config"]), VALUES, max_size=2)
IN_ROPE = st.dictionaries(st.sampled_from([*BAD_FOR_ROPE]), VALUES, max_size=3)


def serve_or_refuse(checkpoint: Path, folder: Path, changes: dict[str, Any], rope: Any) -> bool:
    """Build an engine on the checkpoint with another config.json, and serve one token; False for a
    ValueError. Anything else is an error of the test."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    hf = json.loads((checkpoint / "config.json").read_text())
    hf["rope_parameters"] = {**hf.get("rope_parameters", {}), **rope}
    (folder / "config.json").write_text(json.dumps({**hf, **changes}))
    try:
        llm = LLM(folder, num_kv_blocks=8, max_num_seqs=2, max_model_len=48, block_size=8)
    except ValueError:
        return False
    with llm:
        [output] = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 1
    return True


@pytest.fixture(scope="module")
def qwen(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("qwen3", head_dim=16)


def test_the_checkpoint_without_changes_is_served(qwen: Path, tmp_path: Path) -> None:
    """So that the next tests can tell something."""
    assert serve_or_refuse(qwen, tmp_path / "c", {}, {})


@settings(max_examples=60)
@given(changes=MUTATIONS, rope=IN_ROPE)
def test_any_config_is_served_or_refused(
    qwen: Path, tmp_path_factory: pytest.TempPathFactory, changes: Any, rope: Any
) -> None:
    folder = tmp_path_factory.getbasetemp() / "mutant"
    serve_or_refuse(qwen, folder, changes, rope)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3_moe", "gpt2"])
@settings(max_examples=750)
@given(changes=MUTATIONS, rope=IN_ROPE)
def test_many_configs_are_served_or_refused(
    make_checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
    model_type: str,
    changes: Any,
    rope: Any,
) -> None:
    """In memory that does not depend on what config.json says."""
    resource = pytest.importorskip("resource")  # POSIX
    extra = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    checkpoint = make_checkpoint(model_type, **(extra if "moe" in model_type else {}))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    folder = tmp_path_factory.getbasetemp() / "mutant"
    serve_or_refuse(checkpoint, folder, changes, rope if model_type != "gpt2" else {})
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before  # KiB, on Linux
    assert grown < 300 * 1024
