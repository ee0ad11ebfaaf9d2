"""How fast does each pair of dimensions turn with the position?

Rotary embedding (RoFormer, arXiv 2104.09864) turns dimension pair i by position * frequency[i].
Long-context models change the frequencies; each way to do so is a rope type of config.json, and
transformers has a function for each:

    default  base ** (-2 i / dim)            linear   divided by a factor
    dynamic  a larger base                   llama3, yarn, longrope   low frequencies divided

vLLM: vllm/model_executor/layers/rotary_embedding.py (V0), rotary_embedding/ (V1).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def rope_frequencies(
    head_dim: int, rope: Mapping[str, Any], max_model_len: int
) -> tuple[Tensor, float]:
    """Frequencies [dim / 2] (radians a token) and the factor on cos and sin, for one rope type.
    `dim` is the part of head_dim that turns.

    The types "dynamic" and "longrope" depend on the length of the text. transformers takes the
    length of the longest text in the batch, so that the output of a request depends on others in
    the batch. Here, as in vLLM, max_model_len takes its place. Raises ValueError for other types,
    an odd `dim`, and settings that are missing or give no finite frequencies.
    """
    dim, rope_type = int(head_dim * rope["partial_rotary_factor"]), rope["rope_type"]
    if dim < 2 or dim % 2:
        raise ValueError(f"rotary embedding turns pairs of dimensions, and there are {dim}.")
    if rope_type == "default":
        exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes a second

    config = SimpleNamespace(
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=rope["max_position_embeddings"],
        rope_parameters={"factor": None, **rope, "partial_rotary_factor": 1.0},
        standardize_rope_params=lambda: None,
    )
    try:
        frequencies, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, seq_len=max_model_len)
    except (KeyError, TypeError, ArithmeticError, RuntimeError) as error:
        raise ValueError(f"rope settings of config.json, {dict(rope)}: {error!r}.") from error
    if not (frequencies.isfinite().all() and len(frequencies) == dim // 2):
        raise ValueError(f"rope settings of config.json give no frequencies: {dict(rope)}.")
    return frequencies, float(scaling)
