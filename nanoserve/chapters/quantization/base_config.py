"""Which layers of a model are quantized, and how?

config.json says it under quantization_config, or the user asks for it:

    {"quant_method": "gptq", "bits": 4, "group_size": 128, ...}  -> GPTQConfig
    {"quant_method": "bitsandbytes", ...}                        -> ValueError, no weight is read
    no such key, and LLM(quantization="int8")                    -> OnlineConfig

The config that comes out is asked once for each layer (`get_linear_method`). Layers that it leaves
in floating point are listed by name, in a way of its own: "lm_head", "re:.*mlp.gate$", ... The
embedding and the router of a mixture of experts never have codes.

vLLM: vllm/model_executor/layers/quantization/__init__.py, base_config.py (V0 and V1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pkgutil import resolve_name
from typing import Any

from nanoserve.chapters.quantization.linear import QuantizedLinearMethod
from nanoserve.layers import LinearBase, LinearMethod
from nanoserve.models.config import ModelConfig

Section = Mapping[str, Any]  # of config.json: quantization_config, or an object in it
# quant_method -> module of this folder: class
METHODS = {
    "awq": "awq:AWQConfig",
    "compressed-tensors": "compressed_tensors:CompressedTensorsConfig",
    "fp8": "fp8:Fp8Config",
    "gptq": "gptq:GPTQConfig",
}
ONLINE = ("fp8", "int8", "int4")
# Layers that are one product, and the matrices of the checkpoint in them.
PACKED_MODULES_MAPPING = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


class QuantizationConfig:
    """What config.json says about quantized weights, in one format."""

    quantizes_head = False  # the language-model head, too, if config.json lists no exception

    def __init__(self, section: Section) -> None:
        """Read quantization_config. Raises ValueError for what is not supported."""

    def method_of(self, name: str) -> QuantizedLinearMethod | None:
        """For the matrix of this name, such as "model.layers.0.mlp.up_proj"; None: it is
        floating-point."""
        raise NotImplementedError

    def get_linear_method(self, layer: LinearBase, prefix: str) -> LinearMethod:
        """How the layer of this name is stored. Raises ValueError for a fused layer of which only
        some matrices are quantized, because its product is one."""
        parent, _, last = prefix.rpartition(".")
        if layer.is_embedding and not (self.quantizes_head and last == "lm_head"):
            return layer.method_cls()
        parts = PACKED_MODULES_MAPPING.get(last, (last,))
        methods = [self.method_of(f"{parent}.{part}".lstrip(".")) for part in parts]
        if any(method != methods[0] for method in methods):
            raise ValueError(
                f"{', '.join(parts)} in {parent} are computed as one product and must be quantized "
                f"in the same way, or none of them; config.json says {methods}."
            )
        return methods[0] or layer.method_cls()


def get_quantization_config(
    quantization: str | None, model_config: ModelConfig
) -> QuantizationConfig | None:
    """How the weights of a checkpoint are to be stored; None: in floating point.

    `quantization` is the engine's option: None, or a format, which must be that of the checkpoint,
    or for weights in floating point one of ONLINE. Raises ValueError for an unknown format, one
    that does not fit to the checkpoint, and bad values in config.json.
    """
    file = model_config.path / "config.json"  # the second key: of older files
    section = model_config.get("quantization_config") or model_config.get("compression_config")
    if not section and quantization in (None, *ONLINE):
        online = resolve_name(f"{__package__}.online:OnlineConfig")
        return online({"kind": quantization}) if quantization else None
    if not section:
        raise ValueError(
            f"quantization is {quantization!r}, and the weights in {file.parent} are "
            f"floating-point; allowed: {', '.join(ONLINE)}."
        )
    method = section.get("quant_method") if isinstance(section, dict) else section
    if method not in METHODS or quantization not in (None, method):
        raise ValueError(
            f"the weights are quantized already, says {file}: quant_method is {method!r}, and "
            f"quantization {quantization!r}; allowed: {', '.join(METHODS)}, and None or the same."
        )
    try:
        return resolve_name(f"{__package__}.{METHODS[method]}")(section)
    except (KeyError, TypeError, AttributeError, re.error) as error:
        raise ValueError(f"quantization_config in {file} cannot be read: {error!r}.") from error


def matches(name: str, patterns: Iterable[str] | None) -> bool:
    """Does a list of layers have this one? A pattern is a name, whole or some of its parts, or
    "re:" and a regular expression: "lm_head", "mlp.gate", "re:.*visual"."""
    return any(
        re.match(pattern[3:], name) if pattern.startswith("re:") else f".{pattern}." in f".{name}."
        for pattern in patterns or ()
    )


def check(section: Section, **allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless each key has one of the values; a missing one counts as the first."""
    for key, values in allowed.items():
        if (value := section.get(key, values[0])) not in values:
            raise ValueError(f"quantization_config: {key} is {value!r}; allowed: {values}.")
