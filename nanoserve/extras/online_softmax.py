"""How can a softmax be summed before its largest score is known?

The definition of attention (attention.py) copies a sequence's keys together, takes all scores, and
then the softmax. A kernel has no room for that: it reads the keys block by block, and forgets each
block. So a query keeps three things of the keys that it has read: the largest score m, the total of
e^(score - m), and acc, the sum of the values with the same weights. If a block raises m, both sums
shrink by e^(old m - new m). One query, scores 1 3 | 4 2:

    block 0    m = 3    total = e^-2 + 1                        acc = e^-2 v0 + v1
    block 1    m = 4    total = e^-1 (e^-2 + 1) + 1 + e^-2      acc = e^-1 (...) + v2 + e^-2 v3
    output     acc / total, which is the softmax in full

*Splits.* Two workers may read the blocks of one query, each some of them; `merge` adds what they
keep. So a GPU has enough to do although there is only one query.

    LLM(attention_backend=OnlineSoftmax(num_splits=2))

It is the algorithm of kernels/attention_triton.py in plain PyTorch: to be read, and slow. Left out:
tiles of queries; blocks that no query sees (behind a sliding window) are read and masked.

vLLM: vllm/attention/ops/prefix_prefill.py (V0); vllm/v1/attention/ops/triton_unified_attention.py
(V1). Papers: online softmax, arXiv 1805.02867; FlashAttention, arXiv 2205.14135; Flash-Decoding
(splits), PyTorch blog, October 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from nanoserve.attention import AttentionBackend, KVCache, StepMetadata


class Running(NamedTuple):
    """What queries know of the keys that they have read. A query that has seen no key yet has
    m -inf, total 0 and acc 0."""

    m: Tensor  # [num_heads, num_queries, 1]: the largest score
    total: Tensor  # [num_heads, num_queries, 1]: the sum of e^(score - m)
    acc: Tensor  # [num_heads, num_queries, value_dim]: the sum of e^(score - m) * value


def add_block(running: Running, score: Tensor, value: Tensor) -> Running:
    """What is known after one more block: score [num_heads, num_queries, keys], -inf where a query
    may not see a key (perhaps nowhere); value [num_heads, keys, value_dim]."""
    m = torch.maximum(running.m, score.amax(dim=-1, keepdim=True))
    shift = m.masked_fill(m == -torch.inf, 0)  # no visible key yet: -inf - -inf would be NaN
    shrink, weight = (running.m - shift).exp(), (score - shift).exp()
    total = running.total * shrink + weight.sum(dim=-1, keepdim=True)
    return Running(m, total, running.acc * shrink + weight @ value)


def merge(parts: Sequence[Running]) -> Running:
    """What is known of the keys of all parts together. Each query has seen a key in one part at
    least."""
    m = torch.stack([part.m for part in parts]).amax(dim=0)
    shrink = [(part.m - m).exp() for part in parts]
    total = sum(part.total * factor for part, factor in zip(parts, shrink, strict=True))
    acc = sum(part.acc * factor for part, factor in zip(parts, shrink, strict=True))
    return Running(m, torch.as_tensor(total), torch.as_tensor(acc))


class OnlineSoftmax(AttentionBackend):
    """Attention that holds one block of keys and values at a time."""

    name = "online"

    def __init__(self, num_splits: int = 1) -> None:
        """Raises ValueError if num_splits is not positive."""
        if num_splits < 1:
            raise ValueError(f"num_splits is {num_splits}; give 1 or more.")
        self.num_splits = num_splits

    def attend(
        self,
        query: Tensor,
        kv_cache: KVCache,
        metadata: StepMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
    ) -> Tensor:
        """As the definition, AttentionBackend.attend. Block j of a sequence belongs to split
        j % num_splits. A slot behind a sequence's last key is not read: it may hold anything."""
        block_size, num_kv_heads = kv_cache[0].shape[1:3]
        (num_tokens, num_heads, _), value_dim = query.shape, kv_cache[1].shape[-1]
        output = query.new_empty(num_tokens, num_heads, value_dim)
        for i, seq_len in enumerate(metadata.seq_lens.tolist()):
            start, end = metadata.query_start_loc[i : i + 2].tolist()
            queries = query[start:end].double().transpose(0, 1)  # [num_heads, end - start, dim]
            position = torch.arange(seq_len - (end - start), seq_len, device=query.device)[:, None]
            nothing = queries.new_zeros(num_heads, end - start, 1)
            acc = nothing.expand(-1, -1, value_dim)
            parts = [Running(nothing - torch.inf, nothing, acc)] * self.num_splits
            for first in range(0, seq_len, block_size):
                key_position = torch.arange(first, min(first + block_size, seq_len)).to(position)
                block = int(metadata.block_table[i, first // block_size])
                key, value = (  # [num_heads, keys, dim]
                    cache[block, : len(key_position)]
                    .double()
                    .repeat_interleave(num_heads // num_kv_heads, dim=1)
                    .transpose(0, 1)
                    for cache in kv_cache
                )
                score = queries @ key.mT * scale
                if logits_soft_cap is not None:
                    score = logits_soft_cap * torch.tanh(score / logits_soft_cap)
                distance = position - key_position
                hidden = distance < 0
                if sliding_window is not None:
                    hidden |= distance >= sliding_window
                split = first // block_size % self.num_splits
                parts[split] = add_block(parts[split], score.masked_fill(hidden, -torch.inf), value)
            merged = merge(parts)
            output[start:end] = (merged.acc / merged.total).transpose(0, 1).to(query.dtype)
        return output
