"""What the files of an adapter may say: everything else is an error that names it, before a weight
is read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import ALL, CONFIG, PREFIX, write_adapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

helper = pytest.importorskip("nanoserve.extras.lora.peft_helper")

SHAPES = {
    f"model.layers.{layer}.{block}.{name}": (6, 4)
    for layer in range(2)
    for block, names in (("self_attn", ALL[:4]), ("mlp", ALL[4:]))
    for name in names
}
Q0 = "model.layers.0.self_attn.q_proj"
A, B = f"{PREFIX}{Q0}.lora_A.weight", f"{PREFIX}{Q0}.lora_B.weight"


def read(folder: Path, max_lora_rank: int = 8) -> Any:
    return helper.read_adapter(str(folder), SHAPES, max_lora_rank)


def change_config(folder: Path, **fields: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


# -- good ones --


def test_an_adapter_is_read_as_it_stands(tmp_path: Path) -> None:
    files = read(write_adapter(tmp_path, SHAPES, rank=4, alpha=8))
    model = files.load()
    assert set(model) == set(SHAPES)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    for name, (a, b, scaling) in model.items():
        assert torch.equal(a, tensors[f"{PREFIX}{name}.lora_A.weight"])
        assert torch.equal(b, tensors[f"{PREFIX}{name}.lora_B.weight"])
        assert scaling == 2


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"lora_alpha": 1}, 0.25),
        ({"lora_alpha": 0.5}, 0.125),
        ({"use_rslora": True}, 4),  # 8 / sqrt(4)
        ({"alpha_pattern": {"q_proj": 16}}, 4),
        ({"alpha_pattern": {"self_attn.q_proj": 16, "q_proj": 1}}, 4),  # the first that matches
        ({"alpha_pattern": {"oj": 16, "k_proj": 16}}, 2),  # no part of the name
        ({"rank_pattern": {"q_proj": 7}}, 2),  # the rank is the tensor's
    ],
)
def test_the_scale(tmp_path: Path, fields: dict[str, Any], scaling: float) -> None:
    change_config(write_adapter(tmp_path, SHAPES, rank=4, alpha=8), **fields)
    assert read(tmp_path).scalings[Q0] == scaling


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ".*(a+)+$"},  # a regular expression, which is not run
        {"target_modules": ["q_proj"]},
        {"exclude_modules": ["down_proj"], "target_modules": list(ALL)},
        {"layers_to_transform": [0]},
        {"peft_version": "9.9", "base_model_name_or_path": "no/such", "task_type": None},
        {"layers_pattern": "layers", "velora_config": {"num_groups": 2}},
        {"loftq_config": {"x": 1}, "qalora_group_size": 16, "init_lora_weights": "gaussian"},
        {"a_key_of_the_future": False, "another": None, "third": []},
    ],
)
def test_what_changes_nothing_is_accepted(tmp_path: Path, fields: dict[str, Any]) -> None:
    change_config(write_adapter(tmp_path, SHAPES), **fields)
    assert set(read(tmp_path).scalings) == set(SHAPES)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"layers_to_transform": [0]}, ".layers.0."),
        ({"layers_to_transform": 1}, ".layers.1."),
        ({"exclude_modules": ["mlp.gate_proj", "up_proj", "down_proj"]}, ".self_attn."),
    ],
)
def test_what_the_config_leaves_out_may_be_missing(
    tmp_path: Path, fields: dict[str, Any], kept: str
) -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if kept in name}
    write_adapter(tmp_path, shapes, **fields)
    assert set(read(tmp_path).scalings) == set(shapes)
    change_config(tmp_path, **dict.fromkeys(fields))
    with pytest.raises(ValueError, match="lacks adapters of"):
        read(tmp_path)


# -- what is refused --

BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    ({"peft_type": None}, "peft_type is None"),
    ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS'"),
    ({"bias": "all"}, "bias is 'all'"),
    ({"bias": ["none"]}, "bias is"),
    ({"use_dora": True}, "use_dora asks for DoRA"),
    ({"use_dora": "yes"}, "use_dora asks for DoRA"),
    ({"lora_bias": True}, "lora_bias asks for a bias"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save asks for whole modules"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices asks for"),
    ({"target_parameters": ["experts"]}, "target_parameters asks for"),
    ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens asks for"),
    ({"layer_replication": [[0, 1]]}, "layer_replication asks for"),
    ({"use_qalora": True}, "use_qalora asks for"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out asks for"),
    ({"quantum_lora": 3}, "quantum_lora asks for something that is not known"),
    ({"init_lora_weights": "pissa_niter_16"}, "changed the base model"),
    ({"init_lora_weights": "OLoRA"}, "changed the base model"),
    ({"init_lora_weights": "lora_ga"}, "changed the base model"),
    ({"kasa_config": {"beta": 1}}, "kasa_config asks for something that is not known"),
    ({"init_lora_weights": 3}, "init_lora_weights is 3; allowed"),
    ({"r": None}, "has no 'r'"),
    ({"r": 0}, "r is 0; allowed"),
    ({"r": True}, "r is True; allowed"),
    ({"r": 2.0}, "r is 2.0; allowed"),
    ({"r": 8}, "rank 4, and r is 8"),
    ({"lora_alpha": None}, "has no 'lora_alpha'"),
    ({"lora_alpha": "16"}, "lora_alpha is '16'"),
    ({"lora_alpha": float("nan")}, "lora_alpha is nan"),
    ({"lora_alpha": 1e30}, "lora_alpha is 1e[+]30"),
    ({"use_rslora": 1}, "use_rslora is 1"),
    ({"target_modules": None}, "has no 'target_modules'"),
    ({"target_modules": [3]}, "target_modules is"),
    ({"target_modules": {"a": 1}}, "target_modules is"),
    ({"layers_to_transform": "0"}, "layers_to_transform is '0'"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern is"),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern: q_proj is 0"),
    ({"rank_pattern": {"(a+)+$": 4}}, "rank_pattern has .*; allowed: the name"),
    ({"alpha_pattern": {".*q_proj": 4}}, "alpha_pattern has"),
    ({"alpha_pattern": {"q_proj": "4"}}, "alpha_pattern: q_proj is '4'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_CONFIGS)
def test_a_bad_config_is_an_error_that_names_the_key(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    change_config(write_adapter(tmp_path, SHAPES), **fields)
    with pytest.raises(ValueError, match=message) as raised:
        read(tmp_path)
    assert "adapter_config.json" in str(raised.value)


Change = Callable[[dict[str, torch.Tensor]], object]
BAD_TENSORS: list[tuple[Change, str]] = [
    (lambda t: t.pop(A), f"lacks {A}"),
    (lambda t: t.pop(B), f"lacks {B}"),
    (lambda t: (t.pop(A), t.pop(B)), "lacks adapters of model.layers.0.self_attn.q_proj"),
    (lambda t: t.update({A: torch.zeros(4, 5)}), r"shape \(4, 5\), expected \(4, 4\)"),
    (lambda t: t.update({A: torch.zeros(4)}), r"shape \(4,\), expected \(4, 4\)"),
    (lambda t: t.update({A: torch.zeros(())}), r"shape \(\), expected"),
    (lambda t: t.update({A: torch.zeros(0, 4), B: torch.zeros(6, 0)}), "has rank 0; allowed"),
    (lambda t: t.update({A: torch.zeros(9, 4), B: torch.zeros(6, 9)}), "max_lora_rank: 1 to 8"),
    (lambda t: t.update({B: torch.zeros(6, 3)}), r"shape \(6, 3\), expected \(6, 4\)"),
    (lambda t: t.update({A: torch.zeros(4, 4, dtype=torch.int8)}), "has type I8"),
    (lambda t: t.update({"x": torch.zeros(1)}), "no tensor of a LoRA adapter"),
    (lambda t: t.update({f"{PREFIX}{Q0}.weight": torch.zeros(1)}), "no tensor of a LoRA"),
    (lambda t: t.update({f"{PREFIX}{Q0}.lora_magnitude_vector": torch.zeros(1)}), "no tensor of"),
    (lambda t: t.update({A.replace(PREFIX, ""): torch.zeros(4, 4)}), "no tensor of"),
    (
        lambda t: t.update({f"{PREFIX}lm_head.lora_A.weight": torch.zeros(4, 4)}),
        "adapters of embeddings and heads are not supported",
    ),
    (
        lambda t: t.update({A.replace("q_proj", "experts.0.w1"): torch.zeros(4, 4)}),
        "adapters of experts are not supported",
    ),
    (
        lambda t: t.update({A.replace("layers.0", "layers.7"): torch.zeros(4, 4)}),
        r"no such linear layer \(it has q_proj, k_proj",
    ),
    (dict.clear, "an adapter without tensors"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS)
def test_bad_tensors_are_errors(tmp_path: Path, change: Change, message: str) -> None:
    file = write_adapter(tmp_path, SHAPES) / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=message) as raised:
        read(tmp_path)
    assert "adapter_model.safetensors" in str(raised.value)


def test_bad_files_are_errors(tmp_path: Path) -> None:
    """Missing, damaged, folders, links to nothing, pipes."""
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    with pytest.raises(ValueError, match="is not a folder on this machine"):
        read(tmp_path / "none")
    write_adapter(tmp_path, SHAPES)
    content = weights.read_bytes()
    for cut in (0, 7, 100, len(content) - 1):
        weights.write_bytes(content[:cut])
        with pytest.raises(ValueError, match="damaged or cut short"):
            read(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"has no adapter_model.*safetensors only"):
        read(tmp_path)
    weights.mkdir()
    with pytest.raises(ValueError, match="is not a regular file"):
        read(tmp_path)
    weights.rmdir()
    weights.write_bytes(content)
    for text in ("", "[1]", "{" * 10, '{"r": 1e999}'):
        config.write_text(text)
        with pytest.raises(ValueError, match="adapter_config"):
            read(tmp_path)
    config.unlink()
    if hasattr(os, "mkfifo"):
        os.mkfifo(config)
        with pytest.raises(ValueError, match="is not a regular file"):
            read(tmp_path)


def test_a_file_that_has_changed_is_not_loaded(tmp_path: Path) -> None:
    """Its header was checked, its weights may be of another model by now."""
    files = read(write_adapter(tmp_path, SHAPES))
    write_adapter(tmp_path, SHAPES, seed=1)
    os.utime(tmp_path / "adapter_model.safetensors", ns=(1, 1))
    with pytest.raises(ValueError, match="new lora_int_id"):
        files.load()
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="new lora_int_id"):
        files.load()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_is_not_loaded(tmp_path: Path, value: float) -> None:
    """It would reach the tokens of other adapters, too."""
    file = write_adapter(tmp_path, SHAPES) / "adapter_model.safetensors"
    tensors = load_file(file)
    name = f"base_model.model.{Q0}.lora_B.weight"
    tensors[name][1, 1] = value
    save_file(tensors, file)
    with pytest.raises(ValueError, match=f"{name} in .* holds a number that is NaN or infinite"):
        read(tmp_path).load()


def test_a_relative_path_is_that_of_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are read later, wherever the process is by then."""
    write_adapter(tmp_path / "one", SHAPES)
    monkeypatch.chdir(tmp_path)
    files = read(Path("one"))
    monkeypatch.chdir("/")
    assert set(files.load()) == set(SHAPES)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(key=st.sampled_from([*CONFIG, *helper.KEYS, *helper.REFUSED, "other"]), value=JSON)
def test_any_value_is_accepted_or_a_value_error(tmp_path: Path, key: str, value: Any) -> None:
    if not (tmp_path / "adapter_config.json").exists():
        write_adapter(tmp_path, SHAPES)
    config = {**CONFIG, "r": 4, "lora_alpha": 8, "target_modules": list(ALL), key: value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    message = ""
    try:
        assert set(read(tmp_path).scalings) == set(SHAPES)
    except ValueError as error:
        message = str(error)
    assert not message or ("adapter_config" in message and len(message) < 2000)
