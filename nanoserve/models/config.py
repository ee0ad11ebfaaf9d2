"""What does the checkpoint say?

config.json is read as plain JSON, not through transformers' AutoConfig, which would import torch
into the control plane. Families have several words for one thing, here they have one:

    {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, ...}
    ModelConfig(hidden_size=768, num_layers=12, num_heads=12, max_position_embeddings=1024, ...)

vLLM: vllm/config.py ModelConfig, vllm/transformers_utils/config.py (V0 and V1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEMO_MODEL = Path(__file__).parent.parent / "demo"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
# Names that older families use for the key at the left.
ALIASES = {
    "hidden_size": ("n_embd", "dim", "d_model"),
    "intermediate_size": ("n_inner", "ffn_dim", "hidden_dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length"),
}
# model_type -> what transformers takes for a key that config.json lacks, where families differ.
FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen3": {"head_dim": 128},
}


@dataclass(frozen=True)
class ModelConfig:
    """What config.json and generation_config.json say, in one vocabulary.

    Settings of a single family of models (which biases, which layers have a window) stay in
    `hf_config`. The module of the family reads them there.
    """

    path: Path  # folder of the checkpoint
    architecture: str  # class name in transformers, such as "Qwen3ForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int  # key and value heads; divides num_heads
    head_dim: int
    max_position_embeddings: int  # tokens
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope_parameters: Mapping[str, Any]  # rope_type, rope_theta, and the type's own keys
    dtype: str  # of the checkpoint, such as "bfloat16"
    eos_token_ids: frozenset[int]  # of config.json and of generation_config.json
    generation_config: Mapping[str, Any]  # generation_config.json
    hf_config: Mapping[str, Any] = field(repr=False)  # config.json itself

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}."
            )

    @classmethod
    def from_folder(cls, folder: Path, given: dict[str, Any] | None = None) -> ModelConfig:
        """Read the two files; `given` comes before the first. ValueError: a key is missing."""
        hf, defaults = {**read_json(folder / "config.json"), **(given or {})}, {}
        if theta := (given or {}).get("rope_theta"):  # of either layout
            hf["rope_parameters"] = {**(hf.get("rope_parameters") or {}), "rope_theta": theta}
        hf = {**FAMILY_DEFAULTS.get(hf.get("model_type", ""), {}), **hf}
        if (folder / "generation_config.json").exists():
            defaults = read_json(folder / "generation_config.json")
        eos = [each.get("eos_token_id") for each in (hf, defaults)]
        try:
            hidden_size, num_heads = read(hf, "hidden_size"), read(hf, "num_attention_heads")
            return cls(
                path=folder,
                architecture=hf["architectures"][0],
                vocab_size=hf["vocab_size"],
                hidden_size=hidden_size,
                intermediate_size=read(hf, "intermediate_size", 4 * hidden_size),
                num_layers=read(hf, "num_hidden_layers"),
                num_heads=num_heads,
                num_kv_heads=hf.get("num_key_value_heads") or num_heads,
                head_dim=hf.get("head_dim") or hidden_size // num_heads,
                max_position_embeddings=read(hf, "max_position_embeddings"),
                rms_norm_eps=hf.get("rms_norm_eps", 1e-6),
                tie_word_embeddings=hf.get("tie_word_embeddings", False),
                rope_parameters=read_rope_parameters(hf),
                dtype=str(hf.get("dtype") or hf.get("torch_dtype") or "float32"),
                eos_token_ids=frozenset(
                    token_id
                    for each in eos
                    for token_id in (each if isinstance(each, list) else [each])
                    if isinstance(token_id, int) and 0 <= token_id < hf["vocab_size"]
                ),
                generation_config=defaults,
                hf_config=hf,
            )
        except (KeyError, IndexError, TypeError, ZeroDivisionError) as error:
            raise ValueError(
                f"{folder / 'config.json'} does not describe a decoder-only language model with "
                f"learnt or rotary positions ({type(error).__name__}: {error})."
            ) from None

    def get(self, key: str, default: Any = None) -> Any:
        """What config.json says about `key`; `default` if it says nothing, or null."""
        value = self.hf_config.get(key)
        return default if value is None else value

    @property
    def max_model_len(self) -> int:
        """Tokens the model was made for; rope scaling stretches it by its factor, as in vLLM."""
        rope = self.rope_parameters
        length, factor = self.max_position_embeddings, rope.get("factor") or 1.0
        if rope["rope_type"] == "yarn":
            length = rope["original_max_position_embeddings"]
            factor = rope.get("factor") or self.max_position_embeddings / length
        if rope["rope_type"] in ("linear", "dynamic", "yarn"):
            return int(length * factor)
        return self.max_position_embeddings


def read(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A number of config.json, under one of its names, or `default`. Raises KeyError if there is
    neither, TypeError for what is no positive int."""
    found = [hf[name] for name in (key, *ALIASES[key]) if hf.get(name) is not None]
    if not found and default is None:
        raise KeyError(key)
    value = found[0] if found else default
    if type(value) is not int or value < 1:
        raise TypeError(f"{key} is {value!r}")
    return value


def read_rope_parameters(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The rope settings of a config.json in one layout; config.json has one of two.

    transformers 5 writes `rope_parameters: {rope_theta, rope_type, ...}`. Earlier versions write
    `rope_theta` beside `rope_scaling: {type or rope_type, ...}`. Both give
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, ...}.
    """
    given = {**(hf.get("rope_parameters") or {}), **(hf.get("rope_scaling") or {})}
    given = given.get("full_attention") or given  # one for each type of layer, as in Gemma 3
    rope = {key: value for key, value in given.items() if value is not None}
    old_name = rope.pop("type", None)
    rope["rope_type"] = rope.get("rope_type") or old_name or "default"
    rope["max_position_embeddings"] = hf.get("max_position_embeddings")
    rope.setdefault("rope_theta", hf.get("rope_theta") or 10000.0)
    rope.setdefault("partial_rotary_factor", hf.get("partial_rotary_factor") or 1.0)
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        key = "original_max_position_embeddings"  # Phi-3 writes it at the top
        rope[key] = hf.get(key) or rope.get(key) or hf["max_position_embeddings"]
    return rope


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError, which names the file, if there is none."""
    try:
        values = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} is not a JSON object.")
    return values


def resolve_folder(model: str | Path | None, default: Path = DEMO_MODEL) -> Path:
    """The folder that holds `model`: `default` (None), a local folder, or a download.
    nanoserve/demo and its folders are found beside this package, from wherever a program runs."""
    if model is None:
        return default
    folder = Path(model).expanduser()
    if folder.parts[:2] == DEMO_MODEL.parts[-2:]:
        folder = DEMO_MODEL.joinpath(*folder.parts[2:])
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), allow_patterns=HUB_FILES))
    except Exception as error:  # of many types, with one meaning: no model
        raise ValueError(
            f"{str(model)!r} is not a folder, and the Hugging Face hub did not deliver it "
            f"({type(error).__name__}). Give a folder with config.json, or an id such as gpt2."
        ) from error
