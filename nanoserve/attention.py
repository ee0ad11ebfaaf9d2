"""What is attention? How does a query read scattered keys?

Each layer keeps the keys and values of all sequences in one pair of paged tensors. A block table
says which blocks belong to a sequence. With block_size 4, a sequence of 6 tokens and block_table
[7, 3]:

    position  0  1  2  3 |  4  5       slot = block_table[position // 4] * 4 + position % 4
    slot     28 29 30 31 | 12 13       e.g. position 5: block_table[1] * 4 + 1 = 3 * 4 + 1 = 13

A step is *ragged*: sequences bring different numbers of queries (1 for a decode, hundreds for a
chunk of a prompt), laid end to end. query_start_loc says where each sequence begins. The queries of
a sequence are always its last tokens: query j of q in a sequence of seq_len keys stands at position
seq_len - q + j, and sees the keys up to that position. This rule covers prefill, chunked prefill,
cached prefixes and decode:

    seq_len 6, 2 queries    keys       0 1 2 3 4 5
                            query 0    x x x x x .     at position 6 - 2 + 0 = 4
                            query 1    x x x x x x     at position 5

`AttentionBackend` is the definition of attention, in plain PyTorch: the slowest and clearest way
(attention_backend="reference"). The fast backends are subclasses, held to this definition by
tests: kernels/attention_cpu.py ("torch") and kernels/attention_triton.py ("triton").
kernels/selector.py chooses. Override `attend` to try an idea of your own:

    class MyBackend(AttentionBackend):
        def attend(self, query, kv_cache, metadata, *, scale, **options): ...

    LLM(attention_backend=MyBackend())

vLLM and nano-vllm pass the step's metadata through a global forward context. Here the metadata is
an argument: what attention reads stands in its signature.

vLLM: vllm/attention/: selector.py, backends/, ops/paged_attn.py (V0); vllm/v1/attention/:
selector.py, backend.py, ops/triton_unified_attention.py (V1). Paper: PagedAttention, arXiv
2309.06180.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Keys and values of one layer: [num_blocks, block_size, num_kv_heads, key_dim or value_dim] each;
# and if they have 8 bits, the scale of each vector: [num_blocks, block_size, num_kv_heads, 1] each.
KVCache = tuple[Tensor, ...]


@dataclass(frozen=True)
class StepMetadata:
    """Where the tokens of one step belong; the same for all layers."""

    slot_mapping: Tensor  # [num_tokens] int64: each token's slot; negative: do not store
    block_table: Tensor  # [num_seqs, max_blocks] int32: a sequence's blocks, then anything
    query_start_loc: Tensor  # [num_seqs + 1] int32: tokens [loc[i], loc[i + 1]) are sequence i's
    seq_lens: Tensor  # [num_seqs] int32: keys after this step
    plan: Any = None  # what the backend's `plan` prepared for all layers
    lora: Any = None  # which tokens have which adapter (extras/lora); None: none has one


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [.., n] as numbers of 8 bits (int8 or float8_e4m3fn), and a float32 scale for each row,
    [.., 1]: numbers * scale is x, rounded. A row with a NaN or an infinity has a scale that is none
    either."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = x.abs().amax(dim=-1, keepdim=True).float() / largest
    numbers = x / scale.clamp(min=torch.finfo(torch.float32).tiny)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), scale


def as_stored(key: Tensor, value: Tensor, kv_cache: KVCache) -> tuple[Tensor, ...]:
    """What a cache keeps of key and value [num_tokens, num_kv_heads, dim], in its order."""
    if len(kv_cache) == 2:
        return key, value
    numbers, scales = zip(*(quantize_rows(x, kv_cache[0].dtype) for x in (key, value)), strict=True)
    return *numbers, *scales


class AttentionBackend:
    """The definition of paged attention, and the base of its fast implementations.

    Once a step the runner calls `plan`. Then each layer calls `store`, then `attend`.
    """

    name = "reference"
    supports_cuda_graphs = False  # True: no kernel launch depends on the contents of a tensor

    def plan(self, metadata: StepMetadata, block_size: int, dtype: torch.dtype) -> StepMetadata:
        """The metadata, with whatever all layers share in its field `plan`. `dtype` is that of the
        KV cache."""
        return metadata

    def store(self, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: StepMetadata) -> None:
        """Write key and value [num_tokens, num_kv_heads, dim] to the slots of their tokens."""
        block_size = kv_cache[0].shape[1]
        for token, slot in enumerate(metadata.slot_mapping.tolist()):
            if slot >= 0:
                for cache, new in zip(kv_cache, as_stored(key, value, kv_cache), strict=True):
                    cache[slot // block_size, slot % block_size] = new[token]

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
        """Causal attention: [num_tokens, num_heads, key_dim] -> [num_tokens, num_heads, value_dim].

        With `sliding_window`, a query sees that many keys at most, the key at its own position
        included. `logits_soft_cap` brings the scores smoothly between -cap and cap. The sums are
        made in float64, so that no rounding but the last one counts.
        """
        block_size, num_kv_heads = kv_cache[0].shape[1:3]
        heads_per_kv_head = query.shape[1] // num_kv_heads
        output = query.new_empty(*query.shape[:2], kv_cache[1].shape[-1])
        for i, seq_len in enumerate(metadata.seq_lens.tolist()):
            start, end = metadata.query_start_loc[i : i + 2].tolist()
            position = torch.arange(seq_len, device=query.device)
            # 1. Fetch: the sequence's keys and values, wherever its blocks are.
            block, slot = metadata.block_table[i, position // block_size], position % block_size
            key, value, *scales = (cache[block.long(), slot].double() for cache in kv_cache)
            if scales:
                key, value = key * scales[0], value * scales[1]
            # 2. Share: several query heads read the same key head (GQA).
            key = key.repeat_interleave(heads_per_kv_head, dim=1)  # [seq_len, num_heads, key_dim]
            value = value.repeat_interleave(heads_per_kv_head, dim=1)
            # 3. Score: every query against every key, [num_heads, end - start, seq_len].
            score = torch.einsum("qhd,khd->hqk", query[start:end].double(), key) * scale
            if logits_soft_cap is not None:
                score = logits_soft_cap * torch.tanh(score / logits_soft_cap)
            # 4. Mask: the queries stand at the last positions, and see the past only.
            distance = position[seq_len - (end - start) :, None] - position
            hidden = distance < 0
            if sliding_window is not None:
                hidden |= distance >= sliding_window
            # 5. Mix: each output is a weighted sum of values.
            weight = score.masked_fill(hidden, -torch.inf).softmax(dim=-1)
            output[start:end] = torch.einsum("hqk,khd->qhd", weight, value).to(query.dtype)
        return output
