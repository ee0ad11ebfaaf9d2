"""Which layers of a model are quantized, and how?

config.json says it under quantization_config, or the user asks for it:

    {"quant_method": "gptq", "bits": 4, "group_size": 128, ...}  -> GPTQConfig
    {"quant_method": "bitsandbytes", ...}                        -> ValueError, no weight is read
    no such key, and LLM(quantization="int8")                    -> OnlineConfig

The config that comes out is asked once for each layer (`get_quant_method`). Layers that it leaves
in floating point are listed by name, in a way of its own: "lm_head", "re:.*mlp.gate$", ... The
embedding and the router of a mixture of experts never have codes.

vLLM: vllm/model_executor/layers/quantization/__init__.py, base_config.py (V0 and V1).
"""

from __future__ import annotations

import logging
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from nanoserve.checkpoint import (
    OBJECT,
    QUANTIZATION_KEYS,
    TEXT,
    Rule,
    find_quantization,
    list_of,
    read_json,
    read_key,
)
from nanoserve.exceptions import brief
from nanoserve.extras.quantization.linear import QuantizedLinearMethod
from nanoserve.layers import LinearBase, LinearMethod, VocabParallelEmbedding
from nanoserve.models.config import ModelConfig

logger = logging.getLogger("nanoserve")

# quant_method -> module of this folder, class
METHODS = {
    "awq": ("awq", "AWQConfig"),
    "compressed-tensors": ("compressed_tensors", "CompressedTensorsConfig"),
    "fp8": ("fp8", "Fp8Config"),
    "gptq": ("gptq", "GPTQConfig"),
}
ONLINE = ("fp8", "int8", "int4")
# Files beside config.json, in which older tools wrote what belongs in it.
OTHER_FILES = {"awq": "quant_config.json", "gptq": "quantize_config.json"}


GROUP_SIZE = Rule(
    "-1 or an even int from 2 to 65536",
    lambda value: type(value) is int and (value == -1 or (2 <= value <= 65536 and value % 2 == 0)),
)
# Layers that are one product, and the matrices of the checkpoint in them.
PACKED_MODULES_MAPPING = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
MAX_REPEATS = 4  # in a regular expression: its time is at most this power of a name's length
MAX_COST = 2**14  # of all regular expressions of a config; see Section.check_pattern


class Section:
    """The keys of quantization_config, each checked when it is read."""

    def __init__(
        self, values: Mapping[str, Any], place: str, budget: list[int] | None = None
    ) -> None:
        """budget: what regular expressions may cost yet; the objects below this one share it."""
        self.values, self.place = values, place
        self.budget = [MAX_COST] if budget is None else budget

    def get(self, key: str, rule: Rule, default: Any = None) -> Any:
        """The value of a key; `default` if it is missing or null. Raises ValueError, which says
        where, if `rule` does not allow it."""
        return read_key(self.values, key, default, self.place, {key: rule})

    def require(self, key: str, rule: Rule) -> Any:
        """The same for a key that may not be missing."""
        value = self.get(key, rule)
        if value is None:
            raise ValueError(f"{self.place} has no {key!r}; allowed: {rule.allowed}.")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of layers, see `matches`."""
        names = self.get(key, list_of(TEXT), [])
        for name in names:
            if name.startswith("re:"):
                self.check_pattern(name[3:])
        return tuple(names)

    def check_pattern(self, pattern: str) -> None:
        """Raise ValueError for a regular expression as check_pattern() does, and if there are too
        many: each is tried with the name of each layer."""
        self.budget[0] -= max(16, 4 ** check_pattern(pattern, self.place))
        if self.budget[0] < 0:
            raise ValueError(
                f"{self.place}: so many regular expressions could take very long; allowed: up to "
                f"{MAX_COST // 16}, fewer if they repeat more than twice. Write shorter lists."
            )

    def at(self, key: str) -> Section:
        """The object below a key."""
        return Section(self.require(key, OBJECT), f"{self.place}.{key}", self.budget)

    def refuse(self, key: str, what: str) -> None:
        """Raise ValueError because of what a key says. `what` is allowed, or why it is not."""
        raise ValueError(f"{self.place}: {key} is {brief(self.values.get(key))}; {what}.")


class QuantizationConfig(ABC):
    """What config.json says about quantized weights, in one format."""

    name: ClassVar[str]  # as in config.json
    quantizes_head: bool  # the language-model head, too, if config.json lists no exception

    @classmethod
    @abstractmethod
    def from_config(cls, section: Section) -> QuantizationConfig:
        """Read quantization_config. Raises ValueError for what is not allowed, or not supported."""

    @abstractmethod
    def method_of(self, name: str) -> QuantizedLinearMethod | None:
        """For the matrix of this name, such as "model.layers.0.mlp.up_proj"; None: it is
        floating-point."""

    def get_quant_method(self, layer: LinearBase, prefix: str) -> LinearMethod | None:
        """How the layer of this name is stored; None: as it would be without quantization.

        Raises ValueError for a fused layer of which only some matrices are quantized, because its
        product is one."""
        parent, _, last = prefix.rpartition(".")
        is_head = self.quantizes_head and last == "lm_head"
        if isinstance(layer, VocabParallelEmbedding) and not is_head:
            return None
        names = [
            f"{parent}.{part}".lstrip(".") for part in PACKED_MODULES_MAPPING.get(last, (last,))
        ]
        methods = [self.method_of(name) for name in names]
        if any(method != methods[0] for method in methods):
            differ = ", ".join(
                f"{name}: {method}" for name, method in zip(names, methods, strict=True)
            )
            raise ValueError(
                f"{', '.join(names)} are computed as one product and must be quantized in the same "
                f"way, or none of them; config.json says {differ}."
            )
        return methods[0]


def get_quantization_config(
    quantization: str | None, model_config: ModelConfig
) -> QuantizationConfig | None:
    """How the weights of a checkpoint are to be stored; None: in floating point.

    `quantization` is the engine's option: None, or a format, which must be that of the checkpoint,
    or for weights in floating point one of ONLINE. Raises ValueError for an unknown format, one
    that does not fit to the checkpoint, and bad values in config.json.
    """
    hf, file = model_config.hf_config, model_config.path / "config.json"
    how = find_quantization(hf)
    if how is None and quantization in OTHER_FILES:
        other = model_config.path / OTHER_FILES[quantization]
        if other.exists():
            file, section = other, {"quant_method": quantization, **read_json(other)}
            hf = {"quantization_config": section}
            how = find_quantization(hf)
    if how is None:
        if quantization is None:
            return None
        if quantization in ONLINE:
            online: QuantizationConfig = _find("online", "OnlineConfig")(quantization)
            return online
        raise ValueError(
            f"quantization is {quantization!r}, and {file} has no quantization_config: the weights "
            f"are floating-point. Leave quantization out, or quantize them while loading with one "
            f"of {', '.join(ONLINE)}."
        )
    key = next(key for key in QUANTIZATION_KEYS if hf.get(key))
    method = hf[key].get("quant_method") if isinstance(hf[key], dict) else None
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(
            f"{file} has {how}: the weights are quantized in a way that nanoserve cannot read; "
            f"supported: {', '.join(METHODS)}. Use a checkpoint in one of these, or the one that "
            "this was made from (in bfloat16, float16 or float32)."
        )
    if quantization not in (None, method):
        raise ValueError(
            f"quantization is {quantization!r}, and {file} has {how}. Leave quantization out: the "
            "weights are quantized already."
        )
    keys = Section(hf[key], f"{file}, {key}")
    if keys.get("kv_cache_scheme", OBJECT):
        logger.warning("%s: kv_cache_scheme is ignored; see the option kv_cache_dtype.", file)
    config: QuantizationConfig = _find(*METHODS[method]).from_config(keys)
    return config


def _find(module: str, cls: str) -> Any:
    """A class of this folder."""
    return getattr(import_module(f"{__package__}.{module}"), cls)


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Does a list of layers have this one? A pattern is a name, whole or some of its parts, or
    "re:" and a regular expression: "lm_head", "mlp.gate", "re:.*visual"."""
    return any(
        re.match(pattern[3:], name) if pattern.startswith("re:") else f".{pattern}." in f".{name}."
        for pattern in patterns
    )


def check_pattern(pattern: str, place: str) -> int:
    """How often it repeats something. Raises ValueError for a regular expression that is none, or
    that could take very long: one that repeats a group, or that repeats many times."""
    try:
        re.compile(pattern)
        repeats = len(re.findall(r"[*+?{]", pattern.replace("(?", "(")))
        is_slow = re.search(r"\)[*+{]", pattern) or repeats > MAX_REPEATS
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{place}: {brief(pattern)} is no regular expression ({error}).") from None
    if is_slow or len(pattern) > 1000:
        raise ValueError(
            f"{place}: {brief(pattern)} could take very long; allowed: regular expressions of up "
            f"to 1000 characters with up to {MAX_REPEATS} repetitions, none of them of a group."
        )
    return repeats
