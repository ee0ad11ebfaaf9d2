"""How does a CPU without a C++ compiler read scattered keys?

With PyTorch's own operators: the blocks of a sequence are copied together, then PyTorch's dense
attention does the rest, one sequence after the other:

    blocks [7, 3] of a sequence, 2 key heads      rows (block, head)    7.0  3.0 | 7.1  3.1
    selected, 6 keys of 2 x 4 slots               keys [2, 6, dim]      0 1 2 3  4 5 | 0 1 2 3  4 5

The result is that of attention.AttentionBackend, the definition, but for rounding: half its time
for a prompt, and one mask in the place of a matrix of scores for each head. Where the scores have a
soft cap, which PyTorch's attention does not know, the definition computes them. (native_cpu.py
reads the keys where they lie.)

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


class TorchBackend(QuantizedReference):
    """Dense attention over keys that were copied together."""

    name = "torch"

    def attend(
        self, query: Tensor, kv_cache: KVCache, metadata: StepMetadata, **options: Any
    ) -> Tensor:
        if options.get("logits_soft_cap") is not None:
            return super().attend(query, kv_cache, metadata, **options)
        output = query.new_empty(*query.shape[:2], kv_cache[1].shape[-1])
        heads = torch.arange(kv_cache[0].shape[2], device=query.device)[:, None]
        window = options.get("sliding_window")
        for start, end, seq_len, blocks in metadata.plan:
            rows = (blocks * len(heads) + heads).flatten()
            keys, values, *scales = (select_rows(each, rows)[:, :seq_len] for each in kv_cache)
            if scales:  # a cache of 8 bits
                keys, values = keys.float() * scales[0], values.float() * scales[1]
            mask, last = None, seq_len - (end - start)  # the key that the first query sees last
            if end - start > 1 or window is not None:  # True where a query sees a key
                mask = torch.ones(end - start, seq_len, dtype=torch.bool, device=query.device)
                mask.tril_(last)
                if window is not None:
                    mask.triu_(last + 1 - window)
            some = query[start:end].transpose(0, 1)
            key, value = keys.to(query.dtype), values.to(query.dtype)
            mixed = F.scaled_dot_product_attention(
                some[None], key[None], value[None], mask, scale=options["scale"], enable_gqa=True
            )
            output[start:end] = mixed[0].transpose(0, 1)
        return output


def select_rows(cache: Tensor, rows: Tensor) -> Tensor:
    """Rows of (block, head), which lie together in memory (KVCacheSpec.allocate): [num_kv_heads,
    keys, dim]. This is faster than cache[blocks], and needs no transposition."""
    num_kv_heads, dim = cache.shape[2:]
    by_row = cache.transpose(1, 2).flatten(0, 1).flatten(1)  # [num_blocks * heads, size * dim]
    return by_row.index_select(0, rows).view(num_kv_heads, -1, dim)
