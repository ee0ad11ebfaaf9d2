"""How does a query read scattered keys?

Each layer keeps the keys and values of all sequences in one paged tensor pair; a block table says
which blocks are a sequence's. `store_kv` writes the step's new keys and values to their slots,
`paged_attention` lets every query attend to its own sequence, wherever its blocks are. With
block_size 4, a sequence of 6 tokens and block_table [7, 3]:

    position  0 1 2 3 | 4 5        slot = block_table[position // 4] * 4 + position % 4
    slot     28 29 30 31 | 12 13   e.g. position 5: block_table[1] * 4 + 1 = 3 * 4 + 1 = 13

A step is *ragged*: sequences bring different numbers of queries (1 for a decode, hundreds for a
chunk of a prompt), laid end to end; query_start_loc says where each begins. The queries of a
sequence are always its last tokens: query j of q in a sequence of seq_len keys stands at position
seq_len - q + j, and sees the keys up to there. That one sentence covers prefill, chunked prefill,
cached prefixes and decode.

The functions named `..._torch` (attention_torch.py) are what a CPU runs, those named `..._triton`
(attention_triton.py) what a GPU runs; both have the same signatures. Nothing is passed by a global
forward context (vLLM and nano-vllm have one): what attention reads stands in its signature.

vLLM: vllm/attention/: selector.py, backends/, ops/paged_attn.py (V0); vllm/v1/attention/:
selector.py, backend.py, ops/triton_unified_attention.py (V1). Paper: PagedAttention, arXiv
2309.06180.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanoserve.kernels.attention_cpu import paged_attention_torch, plan_step_torch, store_kv_torch

KVCache = tuple[Tensor, Tensor]  # key and value cache of one layer


@dataclass(frozen=True)
class KVCacheSpec:
    """What one layer keeps per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    sliding_window: int | None = None  # a query sees the last so many keys, itself included

    def num_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block, keys and values."""
        return block_size * self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Two zeroed tensors [num_blocks, block_size, num_kv_heads, key_dim or value_dim].

        In memory the heads of a block come before its slots: what one head reads of a block lies
        together, and gathered blocks are a head's keys in a row.
        """
        shape = (num_blocks, self.num_kv_heads, block_size)
        return (
            lazy_zeros((*shape, self.key_dim), dtype, device).transpose(1, 2),
            lazy_zeros((*shape, self.value_dim), dtype, device).transpose(1, 2),
        )


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros; on a CPU, memory that takes up room only once it is written (torch.zeros writes
    its zeros at once: 1.5 s for the demo model's default cache of 1.3 GB).

    np.zeros would do that, too, but it asks for huge pages, and the first write to one makes all of
    it: 32 requests of the 29M model then spend 0.5 s in the system instead of 0.2 s.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Freed with the last tensor that looks at it. (Private: a forked process has its own.)
    is_unix = hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS")
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if is_unix else {}
    memory = mmap.mmap(-1, num_bytes, **flags)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)


@dataclass(frozen=True)
class StepMetadata:
    """Where the tokens of one step belong; the same for all layers."""

    slot_mapping: Tensor  # [num_tokens] int64: where to store each token's key and value
    block_table: Tensor  # [num_seqs, max_blocks] int32
    query_start_loc: Tensor  # [num_seqs + 1] int32: tokens [loc[i], loc[i + 1]) are sequence i's
    seq_lens: Tensor  # [num_seqs] int32: keys after this step
    plan: Any = None  # what the backend's make_plan prepared for all layers, if it has one


class AttentionBackend(NamedTuple):
    """A pair of functions with the signatures of store_kv_torch and paged_attention_torch: one
    implementation of attention. Layers call `store` and `attend`, which take what the functions
    need from the step's metadata."""

    name: str
    store_kv: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    can_be_captured: bool = False  # in a CUDA graph: launches depend on nothing but shapes
    # What is the same for all layers: (slot_mapping, block_table, query_start_loc, seq_lens,
    # block_size, dtype of the cache) -> what both functions take as `plan`.
    make_plan: Callable[..., Any] | None = None

    def plan_step(
        self, metadata: StepMetadata, block_size: int, dtype: torch.dtype
    ) -> StepMetadata:
        """The metadata with a plan, if this backend makes some."""
        if self.make_plan is None:
            return metadata
        tables = (metadata.block_table, metadata.query_start_loc, metadata.seq_lens)
        plan = self.make_plan(metadata.slot_mapping, *tables, block_size, dtype)
        return replace(metadata, plan=plan)

    def store(self, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: StepMetadata) -> None:
        """store_kv of a layer's new keys and values."""
        options = {} if metadata.plan is None else {"plan": metadata.plan}
        self.store_kv(key, value, *kv_cache, metadata.slot_mapping, **options)

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
        """paged_attention of a layer's queries."""
        options = {} if metadata.plan is None else {"plan": metadata.plan}
        return self.paged_attention(
            query,
            *kv_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale=scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            **options,
        )


TORCH_BACKEND = AttentionBackend(
    "torch", store_kv_torch, paged_attention_torch, make_plan=plan_step_torch
)


def get_attn_backend(
    wanted: str | AttentionBackend, device: torch.device | None = None
) -> AttentionBackend:
    """The one place that chooses. "auto" is "triton" on a CUDA GPU (where Triton is installed) and
    "torch" elsewhere; an AttentionBackend of your own is taken as it is.

    Raises ValueError for "triton" where it cannot run: on a CPU only Triton's interpreter does,
    which TRITON_INTERPRET=1 in the environment asks for (slow: for tests and for reading along).
    """
    if isinstance(wanted, AttentionBackend):
        return wanted
    if wanted not in ("auto", "torch", "triton"):
        raise ValueError(
            f"attention_backend is {wanted!r}; allowed: auto, torch, triton, or an "
            "AttentionBackend."
        )
    is_gpu = device is not None and device.type == "cuda"
    if wanted == "torch" or (wanted == "auto" and not is_gpu):
        return TORCH_BACKEND
    try:
        import triton  # only here: a Mac has none, and a CPU run needs none
    except ImportError:
        if wanted == "auto":
            return TORCH_BACKEND
        raise ValueError(
            "attention_backend is 'triton', but Triton is not installed here. Use 'auto'."
        ) from None
    if not is_gpu and not triton.knobs.runtime.interpret:
        raise ValueError(
            "attention_backend is 'triton', which needs a CUDA GPU. Use 'auto', or set "
            "TRITON_INTERPRET=1 in the environment to have Triton's interpreter run it (slowly)."
        )
    from nanoserve.kernels.attention_triton import paged_attention_triton, store_kv_triton

    return AttentionBackend("triton", store_kv_triton, paged_attention_triton, True)
