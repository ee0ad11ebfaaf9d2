"""Which pooling, and what may a request ask for?

A checkpoint of sentence-transformers says how its vectors are made, in small files beside its
weights:

    modules.json             [{"type": "sentence_transformers.models.Transformer", "path": ""},
                              {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
                              {"type": "sentence_transformers.models.Normalize", ...}]
    1_Pooling/config.json    {"pooling_mode_mean_tokens": true, ...}
    ->                       PoolerConfig(seq_pooling_type="MEAN", use_activation=True)

Without modules.json it is vLLM's default: the last token of a decoder, the first one (CLS) of an
encoder, normalised. What the user says (pooler_config) comes before either, and what a request says
before that:

    LLM(model, runner="pooling", pooler_config={"seq_pooling_type": "MEAN"})
    PoolingParams(dimensions=256)         the first 256 numbers, then normalised
    PoolingParams(use_activation=False)   not normalised

*Matryoshka.* Some models are trained so that the beginning of a vector is a good vector, too, like
the smaller doll inside the larger one (arXiv 2205.13147). Of any other model the first 256 numbers
are arbitrary, so `dimensions` is refused there, unless config.json says

    {"is_matryoshka": true}                          any number up to hidden_size
    {"matryoshka_dimensions": [128, 256, 512]}       these

vLLM: vllm/config/pooler.py, get_pooling_config in vllm/transformers_utils/config.py,
vllm/pooling_params.py (V1); PoolerConfig in vllm/config.py (V0).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from nanoserve.chapters.option_dict import OptionDict
from nanoserve.models.config import ModelConfig

# The modes of sentence-transformers.
MODES = {"lasttoken": "LAST", "mean_tokens": "MEAN", "mean": "MEAN", "cls_token": "CLS"}
MODES |= {"cls": "CLS"}


@dataclass(frozen=True)
class PoolerConfig(OptionDict):
    """The keys of pooler_config. None: as the checkpoint says. Raises ValueError or TypeError."""

    option = "pooler_config"
    seq_pooling_type: str | None = None  # LAST, MEAN or CLS: which hidden states make the vector
    use_activation: bool | None = None  # divide the vector by its length

    @classmethod
    def read(cls, value: Any) -> PoolerConfig:
        """vLLM's shorter name, pooling_type, is read, too."""
        if isinstance(value, Mapping):
            short = {"pooling_type": "seq_pooling_type"}
            value = {short.get(name, name): each for name, each in value.items()}
        return super().read(value)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seq_pooling_type not in (None, "LAST", "MEAN", "CLS"):
            given = self.seq_pooling_type
            raise ValueError(f"seq_pooling_type is {given!r}; allowed: LAST, MEAN, CLS.")

    def resolve(self, folder: Path, default: str) -> PoolerConfig:
        """This config with the checkpoint's values in the place of None. default: the pooling of a
        checkpoint that says nothing. Raises ValueError for modules that are not known."""
        kind, use = default, True
        if (folder / "modules.json").exists():
            kind, use = read_modules(folder)
        use = use if self.use_activation is None else self.use_activation
        return replace(self, seq_pooling_type=self.seq_pooling_type or kind, use_activation=use)


def read_modules(folder: Path) -> tuple[str, bool]:
    """What modules.json says: the kind of pooling, and whether a vector is normalised. Nothing in
    it is a name of code to run: modules are known by their type, or refused (ValueError)."""
    modules = json.loads((folder / "modules.json").read_text("utf-8"))
    kinds = [str(module["type"]).rpartition(".")[2] for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        allowed = "Transformer, Pooling, and perhaps Normalize"
        raise ValueError(f"{folder}: modules.json has {', '.join(kinds)}; supported: {allowed}.")
    config = json.loads((folder / modules[1]["path"] / "config.json").read_text("utf-8"))
    prefix, named = "pooling_mode_", config.get("pooling_mode")
    found = [key for key, value in config.items() if key.startswith(prefix) and value is True]
    modes = {MODES.get(key.removeprefix(prefix)) for key in [*found, *([named] if named else [])]}
    if len(modes) != 1 or None in modes:
        raise ValueError(f"{folder}: Pooling is {config}; supported: one of {', '.join(MODES)}.")
    return modes.pop(), len(kinds) == 3


def read_max_seq_length(folder: Path) -> int | None:
    """How many tokens a text may have, of sentence_bert_config.json; None if it does not say."""
    file = folder / "sentence_bert_config.json"
    config = json.loads(file.read_text("utf-8")) if file.exists() else {}
    if config.get("do_lower_case"):
        raise ValueError(f"{file}: do_lower_case is true; give texts in lower case, and unset it.")
    return config.get("max_seq_length")


@dataclass(frozen=True)
class PoolingParams(OptionDict):
    """How the vector of one request is made. Raises ValueError or TypeError."""

    option = "PoolingParams"
    use_activation: bool | None = None  # normalise the vector; None: as the model's PoolerConfig
    dimensions: int | None = None  # keep this many of its numbers, the first ones; None: all
    skip_reading_prefix_cache: bool | None = None  # compute all of the prompt

    def resolve(self, model: ModelConfig, pooler: PoolerConfig) -> PoolingParams:
        """The model's own way in the place of None. Raises ValueError for dimensions that the model
        was not trained for."""
        use = pooler.use_activation if self.use_activation is None else self.use_activation
        size, any_size = self.dimensions, range(1, model.hidden_size + 1)
        is_matryoshka = model.get("is_matryoshka", False)
        allowed = model.get("matryoshka_dimensions", any_size if is_matryoshka else ())
        if size and size not in allowed:
            what = f"allowed: {allowed}" if allowed else "the model is not made for Matryoshka"
            raise ValueError(f"dimensions is {size}; {what}, says its config.json.")
        return replace(self, use_activation=use)

    def apply(self, vector: Tensor) -> Tensor:
        """[hidden] -> [dimensions]: what is asked for, divided by its length (vLLM:
        EmbeddingPoolerHead)."""
        part = vector[: self.dimensions]
        return F.normalize(part, dim=-1) if self.use_activation else part.clone()
