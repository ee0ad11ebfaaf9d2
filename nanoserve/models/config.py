"""What does the checkpoint say?

config.json is read as plain JSON, not through transformers' AutoConfig. AutoConfig would import
torch into the control plane, and it hides which of two layouts a checkpoint uses (rope_theta beside
rope_scaling, or both inside rope_parameters).

vLLM: vllm/config.py ModelConfig, vllm/transformers_utils/config.py (V0 and V1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.models.checkpoint import read_rope_parameters

DEMO_MODEL = Path(__file__).parent.parent / "demo"
HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


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

    @classmethod
    def from_folder(cls, folder: Path, given: dict[str, Any] | None = None) -> ModelConfig:
        """Read the two files; `given`: what stands for the first. Raises ValueError for a missing file or key."""
        hf, defaults = given or read_json(folder / "config.json"), {}
        if (folder / "generation_config.json").exists():
            defaults = read_json(folder / "generation_config.json")
        eos = [each.get("eos_token_id") for each in (hf, defaults)]
        try:
            return cls(
                path=folder,
                architecture=hf["architectures"][0],
                vocab_size=hf["vocab_size"],
                hidden_size=hf["hidden_size"],
                intermediate_size=hf["intermediate_size"],
                num_layers=hf["num_hidden_layers"],
                num_heads=hf["num_attention_heads"],
                num_kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
                head_dim=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
                max_position_embeddings=hf["max_position_embeddings"],
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
        except KeyError as error:
            message = f"{folder / 'config.json'} has no {error}: is this a causal language model?"
            raise ValueError(message) from None

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
    """The folder that holds `model`: `default` (None), a local folder, or a download."""
    if model is None:
        return default
    folder = Path(model).expanduser()
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
