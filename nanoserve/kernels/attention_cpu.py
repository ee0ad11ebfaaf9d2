"""How does a CPU read scattered keys?

With PyTorch's own operators: the blocks of a sequence are copied together, then PyTorch's dense
attention does the rest, one sequence after the other, in tiles of queries:

    blocks [7, 3] of a sequence, 2 key heads      rows (block, head)    7.0  3.0 | 7.1  3.1
    selected, 6 keys of 2 x 4 slots               keys [2, 6, dim]      0 1 2 3  4 5 | 0 1 2 3  4 5

The result is that of attention.AttentionBackend, the definition, but for rounding: half its time
for a prompt, and no matrix of scores as large as the prompt squared.

This is for a CPU without a C++ compiler: native_cpu.py reads the keys where they lie.

Left out: several sequences in one call. They would have to be padded to equal lengths, and the
copies of all would not fit into a cache: that took twice as long.

vLLM: vllm/attention/backends/torch_sdpa.py (V0); vllm/v1/attention/backends/cpu_attn.py (V1).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.kernels.quantized_cache import QuantizedReference

QUERY_TILE = 256  # queries attended to at once: bounds the size of the mask


class TorchBackend(QuantizedReference):
    """Dense attention over keys that were copied together."""

    name = "torch"

    def attend(
        self, query: Tensor, kv_cache: KVCache, metadata: StepMetadata, **options: Any
    ) -> Tensor:
        output = query.new_empty(*query.shape[:2], kv_cache[1].shape[-1])
        heads = torch.arange(kv_cache[0].shape[2], device=query.device)[:, None]
        for start, end, seq_len, blocks in metadata.plan:
            rows = (blocks * len(heads) + heads).flatten()
            keys, values, *scales = (select_rows(each, rows)[:, :seq_len] for each in kv_cache)
            if scales:  # a cache of 8 bits
                keys, values = keys.float() * scales[0], values.float() * scales[1]
            for first in range(start, end, QUERY_TILE):
                last = min(first + QUERY_TILE, end)
                num_seen, some = seq_len - end + last, query[first:last].transpose(0, 1)
                key, value = (x[:, :num_seen].to(query.dtype) for x in (keys, values))
                output[first:last] = dense_attention(some, key, value, **options).transpose(0, 1)
        return output


def select_rows(cache: Tensor, rows: Tensor) -> Tensor:
    """Rows of (block, head), which lie together in memory (KVCacheSpec.allocate): [num_kv_heads,
    keys, dim]. This is faster than cache[blocks], and needs no transposition."""
    num_kv_heads, dim = cache.shape[2:]
    by_row = cache.transpose(1, 2).flatten(0, 1).flatten(1)  # [num_blocks * heads, size * dim]
    return by_row.index_select(0, rows).view(num_kv_heads, -1, dim)


def dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
) -> Tensor:
    """Attention of the last queries [num_heads, q, dim] over keys and values [num_kv_heads, k,
    dim]. Returns [num_heads, q, value_dim]."""
    (num_heads, num_queries, _), (num_kv_heads, num_keys, _) = query.shape, keys.shape
    mask = None  # True where a query sees a key
    if num_queries > 1 or sliding_window is not None:
        last = num_keys - num_queries  # the key that query 0 sees last
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril(last)
        mask = mask if sliding_window is None else mask.triu(last + 1 - sliding_window)
    if logits_soft_cap is None:
        mixed = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], mask, scale=scale, enable_gqa=True
        )
        return mixed[0]
    keys, values = (x.repeat_interleave(num_heads // num_kv_heads, 0) for x in (keys, values))
    scores = logits_soft_cap * torch.tanh(query @ keys.mT * scale / logits_soft_cap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.float().softmax(-1).to(values.dtype) @ values
