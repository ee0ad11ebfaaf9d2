"""Which pooling, and is the vector normalised?

A checkpoint of sentence-transformers says so in small files beside its weights:

    modules.json             [{"type": "sentence_transformers.models.Transformer", "path": ""},
                              {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
                              {"type": "sentence_transformers.models.Normalize", ...}]
    1_Pooling/config.json    {"pooling_mode_mean_tokens": true, ...}
    ->                       PoolerConfig(seq_pooling_type="MEAN", use_activation=True)

Without modules.json it is vLLM's default: the last token of a decoder, the first one (CLS) of an
encoder, normalised. What the user says (pooler_config) comes before either:

    LLM(model, runner="pooling", pooler_config={"seq_pooling_type": "MEAN"})

Nothing in these files is a name of code to run: modules are known by their type, or refused.

Texts are tokenized as they are. (sentence-transformers strips the spaces around them, and may write
a prompt before them.)

Left out: Dense layers and other modules, and vLLM's other keys (ACCEPTED).

vLLM: vllm/config/pooler.py, get_pooling_config in vllm/transformers_utils/config.py (V1);
PoolerConfig in vllm/config.py (V0).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, fields, replace
from pathlib import Path
from typing import Any

from nanoserve.config import check_option
from nanoserve.models.checkpoint import (
    MAX_CONFIG_BYTES,
    is_plain_name,
    parse_json,
    read_bytes,
    read_json,
)

POOLING_TYPES = ("LAST", "MEAN", "CLS")
MODES = {"lasttoken": "LAST", "mean": "MEAN", "mean_tokens": "MEAN"}  # of sentence-transformers
MODES |= {"cls": "CLS", "cls_token": "CLS"}
# vLLM's other keys, with the values that change nothing here.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "task": (None, "embed"),
    "tok_pooling_type": (None, "ALL"),
    "enable_flash_late_interaction": (True, False),
    "enable_chunked_processing": (False,),
    "max_embed_len": (None,),
    "logit_mean": (None,),
    "logit_sigma": (None,),
    "step_tag_id": (None,),
    "returned_token_ids": (None,),
}
EXAMPLE = '{"seq_pooling_type": "MEAN", "use_activation": true}'


@dataclass(frozen=True)
class PoolerConfig:
    """The keys of pooler_config. None: as the checkpoint says. Raises ValueError or TypeError for
    values that are not allowed."""

    seq_pooling_type: str | None = None  # LAST, MEAN or CLS: which hidden states make the vector
    use_activation: bool | None = None  # divide the vector by its length
    dimensions: int | None = None  # of a request that does not say how many; see PoolingParams
    pooling_type: InitVar[str | None] = None  # vLLM's shorter name of seq_pooling_type

    @classmethod
    def read(cls, value: Any) -> PoolerConfig:
        """From a dict, its JSON text, or a PoolerConfig."""
        if isinstance(value, cls):
            return value
        value = json.loads(value) if isinstance(value, str) and value else value or {}
        if not isinstance(value, Mapping):
            raise TypeError(f"pooler_config must be a dict, such as {EXAMPLE}.")
        given, known = dict(value), ["pooling_type", *(each.name for each in fields(cls))]
        for name in given.keys() - {*known}:
            if name not in ACCEPTED or given[name] not in ACCEPTED[name]:
                allowed = ", ".join(known[1:])
                if name == "normalize":
                    allowed += ". vLLM has replaced normalize by use_activation"
                raise ValueError(
                    f"pooler_config has {name!r}: {given[name]!r}, and nanoserve does "
                    f"not have that; allowed: {allowed}."
                )
        return cls(**{name: given[name] for name in known if name in given})

    def __post_init__(self, pooling_type: str | None) -> None:
        if pooling_type is not None:
            if self.seq_pooling_type is not None:
                raise ValueError("pooler_config: give seq_pooling_type or pooling_type, not both.")
            object.__setattr__(self, "seq_pooling_type", pooling_type)
        if self.seq_pooling_type not in (None, *POOLING_TYPES):
            given, allowed = self.seq_pooling_type, ", ".join(POOLING_TYPES)
            raise ValueError(f"pooler_config: seq_pooling_type is {given}; allowed: {allowed}.")
        check_option("use_activation", self.use_activation, bool | None)
        check_option("dimensions", self.dimensions, int | None)

    def resolve(self, folder: Path, default: str) -> PoolerConfig:
        """This config with the checkpoint's values in the place of None. default: the pooling of a
        checkpoint that says nothing. Raises ValueError for modules that are not known."""
        found = read_modules(folder)
        pooling_type = self.seq_pooling_type or found.seq_pooling_type or default
        normalises = found.use_activation if self.use_activation is None else self.use_activation
        return replace(self, seq_pooling_type=pooling_type, use_activation=normalises is not False)


def read_modules(folder: Path) -> PoolerConfig:
    """What modules.json says of the pooling; a PoolerConfig of None if there is none. Raises
    ValueError for modules that are not known, and for unreadable files."""
    file = folder / "modules.json"
    if not os.path.lexists(file):
        return PoolerConfig()
    content = read_bytes(file, MAX_CONFIG_BYTES)
    modules = parse_json(file, b'{"modules": %s}' % content)["modules"]  # it is a list
    pooling_type, normalises = None, False
    for module in modules if isinstance(modules, list) else [modules]:
        path = module.get("path") if isinstance(module, dict) else None
        given = str(module.get("type")) if isinstance(module, dict) else ""
        package, _, kind = given.rpartition(".")
        if package.partition(".")[0] != "sentence_transformers":
            kind = ""
        if kind == "Pooling" and is_plain_name(path, "") and path not in (".", ".."):
            pooling_type = read_pooling_mode(folder / str(path) / "config.json")
        elif kind == "Normalize":
            normalises = True
        elif kind != "Transformer" or path:
            raise ValueError(
                f"{file} has a module {module!r}; supported: Transformer, with path '', then "
                "Pooling and Normalize of sentence-transformers."
            )
    return PoolerConfig(pooling_type, normalises)


def read_pooling_mode(file: Path) -> str:
    """LAST, MEAN or CLS, as 1_Pooling/config.json says. Raises ValueError for another mode, or for
    several, which sentence-transformers would put side by side."""
    config = read_json(file)
    names = [name for name, value in config.items() if value is True]
    modes = [name.removeprefix("pooling_mode_") for name in names if "pooling_mode_" in name]
    newer = config.get("pooling_mode")
    modes += [newer] if isinstance(newer, str) else newer if isinstance(newer, list) else []
    if len(modes) != 1 or modes[0] not in MODES:
        raise ValueError(
            f"{file}: the pooling mode is {modes!r}; supported: one of cls_token, mean_tokens "
            "and lasttoken. A checkpoint that was made for another one cannot run here."
        )
    return MODES[modes[0]]


def read_max_seq_length(folder: Path) -> int | None:
    """How many tokens a text may have, of sentence_bert_config.json, which older checkpoints name
    for their own family; None if it does not say. Raises ValueError for a tokenizer that has to get
    lower case."""
    [file, *_] = [
        *sorted(folder.glob("sentence_*_config.json")),
        folder / "sentence_bert_config.json",
    ]
    config = read_json(file) if os.path.lexists(file) else {}
    if config.get("do_lower_case"):
        raise ValueError(
            f"{file}: do_lower_case is true; supported: false. If the tokenizer does not do it "
            "itself, give texts in lower case, and set it to false."
        )
    length = config.get("max_seq_length")
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(f"{file}: max_seq_length is {length!r}; allowed: 1 or more.")
    return length
