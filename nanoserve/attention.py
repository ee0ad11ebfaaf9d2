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

`AttentionBackend` is attention in plain PyTorch, one sequence after the other. It is what runs for
a small model, and the definition that the fast backends are held to by tests: they are subclasses,
kernels/attention_cpu.py ("torch"), native_cpu.py ("native") and attention_triton.py ("triton");
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

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# Keys and values of one layer: [num_blocks, block_size, num_kv_heads, key_dim or value_dim] each.
# (And if they have 8 bits, their scales: kernels/quantized_cache.py.)
KVCache = tuple[Tensor, ...]


@dataclass(frozen=True)
class StepMetadata:
    """Where the tokens of one step belong; the same for all layers."""

    slot_mapping: Tensor  # [num_tokens] int64: each token's slot; negative: a graph's padding
    block_table: Tensor  # [num_seqs, max_blocks] int32: a sequence's blocks, then anything
    query_start_loc: Tensor  # [num_seqs + 1] int32: tokens [loc[i], loc[i + 1]) are sequence i's
    seq_lens: Tensor  # [num_seqs] int32: keys after this step
    query_lens: Any = None  # [num_seqs] on the CPU, an np.ndarray: of a graph, at most
    plan: Any = None  # what the backend's `plan` prepared for all layers


class AttentionBackend:
    """Paged attention in plain PyTorch, and the base of its fast implementations.

    Once a step the runner calls `plan`. Then each layer calls `store`, then `attend`.
    """

    name = "reference"
    supports_cuda_graphs = False  # True: no kernel launch depends on the contents of a tensor

    def plan(self, metadata: StepMetadata, block_size: int, dtype: torch.dtype) -> StepMetadata:
        """The metadata, with what all layers share in its field `plan`. Here, for each sequence:
        its queries are the tokens [start, end) of the step, and its seq_len keys are in `blocks`.
        `dtype` is that of the KV cache."""
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        each = zip(starts, starts[1:], lengths, metadata.block_table, strict=False)
        plan = [(start, end, n, blocks[: -(-n // block_size)]) for start, end, n, blocks in each]
        return replace(metadata, plan=plan)

    def store(self, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: StepMetadata) -> None:
        """Write key and value [num_tokens, num_kv_heads, dim] to the slots of their tokens."""
        block_size = kv_cache[0].shape[1]
        block, offset = metadata.slot_mapping // block_size, metadata.slot_mapping % block_size
        for cache, new in zip(kv_cache, (key, value), strict=True):
            cache[block, offset] = new

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
        included. `logits_soft_cap` brings the scores smoothly between -cap and cap.
        """
        (num_kv_heads, value_dim), dtype = kv_cache[1].shape[2:], query.dtype
        wide = torch.promote_types(dtype, torch.float32)  # sums of many numbers need it
        # 1. Share: the query heads that read the same key head lie side by side (GQA).
        query = query.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).to(wide)
        output = query.new_empty(*query.shape[:3], value_dim)
        for start, end, seq_len, blocks in metadata.plan:
            # 2. Fetch: the sequence's keys and values, wherever its blocks are.
            key, value = (
                cache.index_select(0, blocks).flatten(0, 1)[:seq_len].transpose(0, 1).to(wide)
                for cache in kv_cache
            )  # [num_kv_heads, seq_len, dim]
            # 3. Score: every query against every key, [num_kv_heads, q * heads of each, seq_len].
            score = query[:, start:end].flatten(1, 2) @ key.mT * scale
            if logits_soft_cap is not None:
                score = logits_soft_cap * torch.tanh(score / logits_soft_cap)
            # 4. Mask: the queries stand at the last positions, and see the past only.
            if end - start > 1 or sliding_window is not None:
                position = torch.arange(seq_len, device=query.device)
                distance = position[start - end :, None] - position  # from each key to each query
                hidden = distance < 0
                if sliding_window is not None:
                    hidden |= distance >= sliding_window
                score.unflatten(1, (end - start, -1)).masked_fill_(hidden[:, None], -torch.inf)
            # 5. Mix: each output is a weighted sum of values.
            mixed = score.softmax(dim=-1) @ value
            output[:, start:end] = mixed.unflatten(1, (end - start, -1))
        return output.transpose(0, 1).flatten(1, 2).to(dtype)
