"""What nano-vllm asks for and a machine may not have: flash-attn, and a checkpoint's tokenizer.

flash-attn is compiled for one version of torch and CUDA at a time. torch itself brings
FlashAttention, with a block table, as torch.nn.attention.varlen.varlen_attn; `make_module` gives it
the two names under which nano-vllm looks for it:

    flash_attn_varlen_func(q, k, v, cu_seqlens_q=...)      prefill, from keys or from the cache
    flash_attn_with_kvcache(q, k_cache, v_cache, ...)      decode

Left out: every option that nano-vllm does not use.
"""

from __future__ import annotations

import types
from typing import Any

import torch


class EmptyTokenizer:
    """Stands in for transformers.AutoTokenizer where a checkpoint has none: texts are empty."""

    eos_token_id = -1

    @classmethod
    def from_pretrained(cls, *_: Any, **__: Any) -> EmptyTokenizer:
        return cls()

    def encode(self, text: str) -> list[int]:
        return [0] * max(1, len(text))

    def decode(self, token_ids: list[int]) -> str:
        return ""


def make_module() -> types.ModuleType:
    """A module named flash_attn with the two functions that nano-vllm calls, made of torch's
    varlen_attn, which is FlashAttention with a block table. Needs torch 2.13 and a GPU."""
    from torch.nn.attention import varlen

    varlen_attn: Any = varlen.varlen_attn

    def flash_attn_varlen_func(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        cu_seqlens_k: torch.Tensor,
        softmax_scale: float,
        causal: bool = True,
        block_table: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Prefill: q [num_tokens, heads, dim]; k and v alike, or caches [blocks, size, heads, dim]
        with block_table [num_seqs, max_blocks]."""
        paged: dict[str, Any] = {}
        if block_table is not None:
            lengths = cu_seqlens_k.diff().to(torch.int32)
            paged = {"block_table": block_table.clamp_min(0), "seqused_k": lengths}
        return varlen_attn(
            q,
            k,
            v,
            cu_seqlens_q,
            None if paged else cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            scale=softmax_scale,
            window_size=(-1, 0) if causal else (-1, -1),
            enable_gqa=True,
            **paged,
        )

    def flash_attn_with_kvcache(
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        *,
        cache_seqlens: torch.Tensor,
        block_table: torch.Tensor,
        softmax_scale: float,
        causal: bool = True,
    ) -> torch.Tensor:
        """Decode: q [num_seqs, 1, heads, dim], one query per sequence."""
        num_seqs = q.shape[0]
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=q.device)
        output = varlen_attn(
            q.flatten(0, 1),
            k_cache,
            v_cache,
            starts,
            None,
            1,
            block_table.shape[1] * k_cache.shape[1],
            scale=softmax_scale,
            window_size=(-1, 0) if causal else (-1, -1),
            enable_gqa=True,
            block_table=block_table.clamp_min(0),
            seqused_k=cache_seqlens,
        )
        return output.unflatten(0, (num_seqs, 1))

    shim = types.ModuleType("flash_attn")
    shim.__dict__.update(
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )
    return shim
