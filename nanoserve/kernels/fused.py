"""How do neighbouring operations of a layer become one?

Between two matrix products, model.py makes a pass over memory for each thing it says. Compiled code
does several of them in one pass; each device has its `ops`, native_cpu.Native or
fused_triton.TritonOps, with three methods:

    model.py                                         ops
    x = x + attention; norm(x)                       add_rms_norm(x, residual, weight, eps)
                                                         -> the norm of the sum, and the sum
    norm of q and k, apply_rope, store               rope_and_store(x, attn, rope, kv_cache,
                                                         metadata) -> the queries
    silu(gate) * up                                  silu_and_mul(gate_up)

The modules of a model are exchanged for these subclasses when it has been loaded (`fuse`): they
have the same weights, and print(model) shows them by name. A subclass of a user's own stays as it
is, and so does attention whose backend stores in another way than `ops`, as its backend_cls does.

The residual stream is two parts that are still to be added, the last layer's output and what was
before it, because the addition is a part of the next norm. (vLLM writes all of its models so.)

vLLM: CustomOp in vllm/model_executor/custom_op.py; csrc/layernorm_kernels.cu (V0 and V1).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.layers import LayerConfig, RMSNorm, Rope
from nanoserve.model import MLP, Attention, Decoder, DecoderLayer


class QKNorm(RMSNorm):
    """The norm of each head of queries and keys, which lie side by side: one call for both. The
    weight has a row for each head: first the queries' rows, all equal, then the keys'."""

    def __init__(self, attention: Attention) -> None:
        q_norm, k_norm = attention.q_norm.weight, attention.k_norm.weight
        super().__init__(0, attention.q_norm.eps, LayerConfig(q_norm.dtype, q_norm.device))
        rows = (q_norm.expand(attention.num_heads, -1), k_norm.expand(attention.num_kv_heads, -1))
        self.weight = nn.Parameter(torch.cat(rows), requires_grad=False)


class FusedAttention(Attention):
    ops: Any
    qk_norm: QKNorm | None

    def forward(self, x: Tensor, rope: Rope, kv_cache: KVCache, metadata: StepMetadata) -> Tensor:
        step = (kv_cache, metadata)
        q = self.ops.rope_and_store(self.qkv_proj(x), self, rope, *step)
        output = self.backend.attend(q, *step, scale=self.scale, sliding_window=self.window)
        return self.o_proj(output.flatten(1))


class FusedMLP(MLP):
    ops: Any

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x)))


class FusedDecoder(Decoder):
    ops: Any
    layers: Any

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        add, rope = self.ops.add_rms_norm, self.rotary_emb(positions)
        residual = self.embed_tokens(input_ids)
        y = self.layers[0].input_layernorm(residual)
        next_norms = [*(layer.input_layernorm for layer in self.layers[1:]), self.norm]
        for layer, kv_cache, next_norm in zip(self.layers, kv_caches, next_norms, strict=False):
            y, norm = layer.self_attn(y, rope, kv_cache, metadata), layer.post_attention_layernorm
            y, residual = add(y, residual, norm.weight, norm.eps)
            y, residual = add(layer.mlp(y), residual, next_norm.weight, next_norm.eps)
        return y


FUSED = {Attention: FusedAttention, MLP: FusedMLP, Decoder: FusedDecoder}


def fuse(model: nn.Module, ops: Any) -> None:
    """Exchange the modules of a loaded model for those above."""
    module: Any
    for module in model.modules():
        kind = type(module)
        if kind is Decoder:
            is_known = all(type(each).forward is DecoderLayer.forward for each in module.layers)
        elif kind is Attention:
            is_known = type(module.backend).store is ops.backend_cls.store
            module.qk_norm = QKNorm(module) if is_known and module.has_qk_norm else None
        else:
            is_known = kind is MLP
        if is_known:
            module.__class__, module.ops = FUSED[kind], ops
