"""What does a KV cache of 8 bits keep?

Numbers of 8 bits, and for each token and head a scale in float32: half the memory of bfloat16 or
less. With kv_cache_dtype "int8" or "fp8" a layer's cache is (keys, values, scales of the keys,
scales of the values). The fast backends multiply by the scales while they read. This one brings the
blocks of the step back to float32 first: slow, and what the others are compared with.

vLLM: csrc/quantization/w8a8/, vllm/model_executor/layers/quantization/kv_cache.py (V1).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanoserve.attention import AttentionBackend, KVCache, StepMetadata


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [.., n] as numbers of 8 bits (int8 or float8_e4m3fn), and a float32 scale for each row,
    [.., 1]: numbers * scale is x, rounded. A row with a NaN or an infinity has a scale that is none
    either."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = x.abs().amax(dim=-1, keepdim=True).float() / largest
    numbers = x / scale.clamp(min=torch.finfo(torch.float32).tiny)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype), scale


class QuantizedReference(AttentionBackend):
    """The definition, on a cache of 8 bits, too."""

    def store(self, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: StepMetadata) -> None:
        if len(kv_cache) == 2:
            return super().store(key, value, kv_cache, metadata)
        pairs = [quantize_rows(x, kv_cache[0].dtype) for x in (key, value)]
        for i, stored in enumerate(zip(*pairs, strict=True)):  # numbers, then scales
            super().store(stored[0], stored[1], kv_cache[2 * i :][:2], metadata)

    def attend(
        self, query: Tensor, kv_cache: KVCache, metadata: StepMetadata, **options: Any
    ) -> Tensor:
        if len(kv_cache) == 2:
            return super().attend(query, kv_cache, metadata, **options)
        used = torch.cat([blocks for *_, blocks in metadata.plan]).unique().long()
        keys, values, key_scales, value_scales = (cache[used].float() for cache in kv_cache)
        plan = [(*lengths, torch.searchsorted(used, b)) for *lengths, b in metadata.plan]
        caches = (keys * key_scales, values * value_scales)
        return super().attend(query, caches, replace(metadata, plan=plan), **options)
