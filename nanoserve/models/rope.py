"""How fast does each pair of dimensions turn with the position?

Rotary embedding (RoFormer, arXiv 2104.09864) turns dimension pair i by position * frequency[i].
Long-context models change the frequencies; each way to do so is a rope type of config.json:

    default  base ** (-2 i / dim)            linear   divided by a factor
    dynamic  a larger base                   llama3, yarn, longrope   low frequencies divided

vLLM: vllm/model_executor/layers/rotary_embedding.py (V0), rotary_embedding/ (V1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from reprlib import repr as brief
from typing import Any

import torch
from torch import Tensor


def rope_frequencies(dim: int, rope: Mapping[str, Any], max_model_len: int) -> tuple[Tensor, float]:
    """Frequencies [dim / 2] (radians a token) and the factor on cos and sin, for one rope type.

    The types "dynamic" and "longrope" depend on the length of the text. transformers takes the
    length of the longest text in the batch, so that the output of a request depends on others in
    the batch. Here, as in vLLM, max_model_len takes its place. Raises ValueError for other types,
    an odd `dim`, a setting that the type lacks, and settings that give no finite frequencies.
    """
    if dim < 2 or dim % 2:
        raise ValueError(
            f"rotary embedding turns pairs of dimensions, and head_dim (or, if config.json has a "
            f"partial_rotary_factor, that part of it) is {dim}; allowed: even, 2 or more."
        )
    try:
        frequencies, scaling = _frequencies(dim, rope, max_model_len)
    except KeyError as error:
        raise ValueError(f"rope type {rope['rope_type']!r} needs {error} in config.json.") from None
    except ArithmeticError:  # a division by zero, or an overflow
        frequencies, scaling = torch.full((dim // 2,), torch.nan), 1.0
    if not (frequencies.isfinite().all() and math.isfinite(scaling)):
        raise ValueError(f"these rope settings of config.json give no numbers: {brief(dict(rope))}")
    return frequencies, scaling


def _frequencies(dim: int, rope: Mapping[str, Any], max_model_len: int) -> tuple[Tensor, float]:
    base = float(rope["rope_theta"])
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    plain = 1.0 / base**exponents  # written as transformers does: the same rounding
    rope_type = rope["rope_type"]
    if rope_type == "default":
        return plain, 1.0
    if rope_type == "linear":  # positions divided by the factor
        return plain / rope["factor"], 1.0
    if rope_type == "dynamic":  # NTK: a larger base instead
        original, factor = rope["max_position_embeddings"], rope["factor"]
        stretch = factor * max(max_model_len, original) / original - (factor - 1)
        return 1.0 / (base * stretch ** (dim / (dim - 2))) ** exponents, 1.0
    if rope_type == "llama3":
        return _llama3_frequencies(plain, rope), 1.0
    if rope_type == "yarn":
        return _yarn_frequencies(plain, rope)
    if rope_type == "longrope":
        return _longrope_frequencies(plain, rope, max_model_len)
    raise ValueError(
        f"rope type {rope_type!r} is not supported; supported: default, linear, dynamic, llama3, "
        "yarn, longrope."
    )


def _llama3_frequencies(plain: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Divide low frequencies by the factor, keep high ones, blend in between (Llama 3.1)."""
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    if low > high:
        raise ValueError(
            f"low_freq_factor {low} in config.json is more than high_freq_factor {high}."
        )
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * plain + (1 - keep) * plain / rope["factor"]


def _yarn_frequencies(plain: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """As llama3, but blended linearly over dimensions instead of turns (arXiv 2309.00071)."""
    dim, base = 2 * len(plain), float(rope["rope_theta"])
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or rope["max_position_embeddings"] / original
    if "factor" not in rope and factor <= 1:  # the two lengths say nothing, either
        raise KeyError("factor")

    def dimension_of(turns: float) -> float:
        """The dimension that makes this many turns in the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(rope.get("beta_fast") or 32)
    high = dimension_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    keep = 1 - ramp.clamp(0, 1)
    scaling = rope.get("attention_factor")
    if scaling is None:
        mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        scaling = _yarn_scale(factor, 1.0)
        if mscale and mscale_all:
            scaling = _yarn_scale(factor, mscale) / _yarn_scale(factor, mscale_all)
    return keep * plain + (1 - keep) * plain / factor, scaling


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope_frequencies(
    plain: Tensor, rope: Mapping[str, Any], max_model_len: int
) -> tuple[Tensor, float]:
    """A divisor per dimension, one list for short models and one for long (arXiv 2402.13753)."""
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or rope["max_position_embeddings"] / original
    name = "long_factor" if max_model_len > original else "short_factor"
    divisors = {each: rope[each] for each in ("short_factor", "long_factor")}[name]
    if len(divisors) != len(plain):
        raise ValueError(f"{name} of config.json has {len(divisors)} entries, not {len(plain)}.")
    scaling = rope.get("attention_factor")
    if scaling is None:
        scaling = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return plain / torch.tensor(divisors, dtype=torch.float32), scaling
