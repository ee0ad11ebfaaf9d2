"""How does a GPU do the small work between matrix products in few kernels?

A norm, a rotary embedding or an activation computes little and reads much: each kernel takes as
long as its numbers need to come from memory and go back, and a decode's few numbers take less time
than a launch. So what can stay in registers should. In each layer, three kernels in 4 launches do
what the plain operators of layers.py do in 14:

    products     kernels between them                                       PyTorch    here
    ... down
                 residual + x, RMSNorm                                            3       1
    qkv
                 norm of q and k (Qwen3), rotary embedding, KV store            2+3+1     1
    (attention)
    o
                 residual + x, RMSNorm                                            3       1
    gate, up
                 silu(gate) * up                                                  2       1
    down

Each one is held to its plain version. Sums are made in float32, and a number is rounded to the type
of the model wherever the plain version writes one to memory: so the results differ only where a sum
in another order, or another square root or exponential, is rounded to the other neighbour.

A program computes one token, or some heads or columns of one. No tile is chosen by trial: a thread
gets eight numbers (more only in rows of more than 4,096), in half precision a load of 16 bytes.

vLLM: csrc/layernorm_kernels.cu, csrc/activation_kernels.cu, csrc/pos_encoding_kernels.cu (V0);
vllm/compilation/passes/fusion/: qk_norm_rope_kvcache_fusion.py, rope_kvcache_fusion.py (V1).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.kernels import fused
from nanoserve.kernels.attention_triton import OPTIONS, TritonBackend
from nanoserve.kernels.fused import QKNorm
from nanoserve.layers import Rope

PER_THREAD = 8  # numbers of a thread
THREADS = 32  # of a warp
MAX_WARPS = 16  # of a program that must hold a whole row
NUMBERS = 1024  # of a program that may take a part of a row


@triton.jit
def add_rms_norm_kernel(
    x,  # [num_tokens, SIZE]; gets the sum
    residual,  # [num_tokens, SIZE]
    weight,  # [SIZE]
    output,  # [num_tokens, SIZE]
    x_stride,
    residual_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE, rounded up to a power of 2
):
    """layers.add_rms_norm for one token. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    dtype: tl.constexpr = x.dtype.element_ty
    added = tl.load(x + token * x_stride + i, mask=mask, other=0.0).to(tl.float32)
    added += tl.load(residual + token * residual_stride + i, mask=mask, other=0.0).to(tl.float32)
    rounded = added.to(dtype)
    tl.store(x + token * x_stride + i, rounded, mask=mask)
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)
    normed = (total * scale).to(dtype).to(tl.float32)
    normed = normed * tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + token * SIZE + i, normed.to(dtype), mask=mask)


@triton.jit
def _normalize(x, scale, weights, mask):
    """Rows of x times their scales, rounded, times the weights, rounded."""
    dtype: tl.constexpr = weights.dtype.element_ty
    weight = tl.load(weights, mask=mask, other=0.0).to(tl.float32)
    return ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def _turn(x, other, cos, sin, mask):
    """x cos + other sin, with a sin that has its sign."""
    dtype: tl.constexpr = cos.dtype.element_ty
    x_cos = x * tl.load(cos, mask=mask, other=0.0).to(tl.float32)
    other_sin = other * tl.load(sin, mask=mask, other=0.0).to(tl.float32)
    return x_cos.to(dtype).to(tl.float32) + other_sin


@triton.jit
def rope_and_store_kernel(
    qkv,  # [num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]
    norm_weight,  # [NUM_HEADS + NUM_KV_HEADS, HEAD_DIM]; not used without HAS_NORM
    cos,  # [num_tokens, ROTARY_DIM]
    sin,  # [num_tokens, ROTARY_DIM], signed
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key_cache,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    value_cache,  # [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM]
    slot_mapping,  # [num_tokens]
    qkv_stride,
    rope_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # the first dimensions of a head, which are turned
    BLOCK_SIZE: tl.constexpr,  # slots in a KV block
    BLOCK_H: tl.constexpr,  # heads of a program
    BLOCK_HALF: tl.constexpr,  # ROTARY_DIM / 2, rounded up to a power of 2
    BLOCK_REST: tl.constexpr,  # the same of the dimensions that are not turned; 0: there are none
    HAS_NORM: tl.constexpr,
):
    """layers.rope_and_store for some heads of one token. Grid: (num_tokens, groups of heads).

    A head is loaded in two or three pieces: the two halves whose numbers are paired, which one
    thread then has both of, and the dimensions that are not turned.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    is_query, is_key = head < NUM_HEADS, (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    half: tl.constexpr = ROTARY_DIM // 2
    dtype: tl.constexpr = qkv.dtype.element_ty
    first_dim = tl.arange(0, BLOCK_HALF)[None, :]
    second_dim = half + first_dim
    is_half = first_dim < half

    row = qkv + token * qkv_stride + head * HEAD_DIM
    exists = head < NUM_HEADS + 2 * NUM_KV_HEADS
    first = tl.load(row + first_dim, mask=exists & is_half, other=0.0)
    second = tl.load(row + second_dim, mask=exists & is_half, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if BLOCK_REST > 0:
        rest_dim = ROTARY_DIM + tl.arange(0, BLOCK_REST)[None, :]
        is_rest = rest_dim < HEAD_DIM
        rest = tl.load(row + rest_dim, mask=exists & is_rest, other=0.0)
        z = rest.to(tl.float32)
    if HAS_NORM:
        total = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        if BLOCK_REST > 0:
            total += tl.sum(z * z, axis=1)
        scale = tl.rsqrt(total / HEAD_DIM + eps)[:, None]
        weights = norm_weight + head * HEAD_DIM
        has_weight = is_query | is_key
        x = _normalize(x, scale, weights + first_dim, has_weight & is_half)
        y = _normalize(y, scale, weights + second_dim, has_weight & is_half)
        if BLOCK_REST > 0:
            z = _normalize(z, scale, weights + rest_dim, has_weight & is_rest)
    cos += token * rope_stride
    sin += token * rope_stride
    turned_x = _turn(x, y, cos + first_dim, sin + first_dim, is_half).to(dtype)
    turned_y = _turn(y, x, cos + second_dim, sin + second_dim, is_half).to(dtype)

    query_row = query + (token * NUM_HEADS + head) * HEAD_DIM
    tl.store(query_row + first_dim, turned_x, mask=is_query & is_half)
    tl.store(query_row + second_dim, turned_y, mask=is_query & is_half)
    if BLOCK_REST > 0:
        tl.store(query_row + rest_dim, z.to(dtype), mask=is_query & is_rest)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        block, slot = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        key_head, value_head = head - NUM_HEADS, head - NUM_HEADS - NUM_KV_HEADS
        key_row = key_cache + block * key_block_stride + slot * key_slot_stride
        key_row += key_head * key_head_stride
        tl.store(key_row + first_dim, turned_x, mask=is_key & is_half)
        tl.store(key_row + second_dim, turned_y, mask=is_key & is_half)
        value_row = value_cache + block * value_block_stride + slot * value_slot_stride
        value_row += value_head * value_head_stride
        tl.store(value_row + first_dim, first, mask=is_value & is_half)
        tl.store(value_row + second_dim, second, mask=is_value & is_half)
        if BLOCK_REST > 0:
            tl.store(key_row + rest_dim, z.to(dtype), mask=is_key & is_rest)
            tl.store(value_row + rest_dim, rest, mask=is_value & is_rest)


@triton.jit
def silu_and_mul_kernel(
    gate_up,  # [num_tokens, 2 * SIZE]
    output,  # [num_tokens, SIZE]
    stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """layers.silu_and_mul for BLOCK columns of one token. Grid: (num_tokens, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    dtype: tl.constexpr = gate_up.dtype.element_ty
    gate = tl.load(gate_up + token * stride + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * stride + SIZE + i, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(output + token * SIZE + i, (activated * up).to(dtype), mask=mask)


# -- the launches --


def num_warps_for(numbers: int) -> int:
    """As many warps as give each thread PER_THREAD numbers; a power of 2."""
    return min(MAX_WARPS, max(1, numbers // (PER_THREAD * THREADS)))


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """fused.Ops.add_rms_norm on a GPU: the norm of x + residual, and that sum in the place of x.

    x and residual [num_tokens, size], rows of neighbouring numbers.
    """
    num_tokens, size = x.shape
    output = x.new_empty(num_tokens, size)
    block = triton.next_power_of_2(size)
    if num_tokens:
        add_rms_norm_kernel[(num_tokens,)](
            x,
            residual,
            weight,
            output,
            x.stride(0),
            residual.stride(0),
            eps,
            SIZE=size,
            BLOCK=block,
            num_warps=num_warps_for(block),
            **OPTIONS,
        )
    return output, x


def rope_and_store_triton(
    qkv: Tensor,
    qk_norm: QKNorm | None,
    rope: Rope,
    backend: AttentionBackend,
    kv_cache: KVCache,
    metadata: StepMetadata,
) -> Tensor:
    """fused.rope_and_store on a GPU. A backend that stores in its own way keeps doing so, and a
    cache of 8 bits is stored apart."""
    if type(backend).store is not TritonBackend.store or len(kv_cache) > 2:
        return fused.rope_and_store(qkv, qk_norm, rope, backend, kv_cache, metadata)
    (cos, sin), (key_cache, value_cache) = rope, kv_cache[:2]
    block_size, num_kv_heads, head_dim = key_cache.shape[1:]
    num_tokens, num_rows = len(qkv), qkv.shape[1] // head_dim
    num_heads = num_rows - 2 * num_kv_heads
    query = qkv.new_empty(num_tokens, num_heads, head_dim)
    rotary_dim = cos.shape[-1]
    block_half = triton.next_power_of_2(rotary_dim // 2)
    rest = head_dim - rotary_dim
    block_rest = triton.next_power_of_2(rest) if rest else 0
    width = max(2 * block_half, block_rest)  # of a head's larger part
    block_h = max(1, min(NUMBERS // width, triton.next_power_of_2(num_rows)))
    if num_tokens:
        rope_and_store_kernel[(num_tokens, triton.cdiv(num_rows, block_h))](
            qkv,
            qkv if qk_norm is None else qk_norm.weight,
            cos,
            sin,
            query,
            key_cache,
            value_cache,
            metadata.slot_mapping,
            qkv.stride(0),
            cos.stride(0),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            0.0 if qk_norm is None else qk_norm.eps,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            ROTARY_DIM=rotary_dim,
            BLOCK_SIZE=block_size,
            BLOCK_H=block_h,
            BLOCK_HALF=block_half,
            BLOCK_REST=block_rest,
            HAS_NORM=qk_norm is not None,
            num_warps=num_warps_for(block_h * width),
            **OPTIONS,
        )
    return query


def silu_and_mul_triton(gate_up: Tensor) -> Tensor:
    """layers.silu_and_mul on a GPU: [num_tokens, 2 * size] -> [num_tokens, size]."""
    num_tokens, size = len(gate_up), gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    block = min(NUMBERS, triton.next_power_of_2(size))
    if num_tokens:
        silu_and_mul_kernel[(num_tokens, triton.cdiv(size, block))](
            gate_up,
            output,
            gate_up.stride(0),
            SIZE=size,
            BLOCK=block,
            num_warps=num_warps_for(block),
            **OPTIONS,
        )
    return output


class TritonOps:
    """fused.Ops."""

    add_rms_norm = staticmethod(add_rms_norm_triton)
    rope_and_store = staticmethod(rope_and_store_triton)
    silu_and_mul = staticmethod(silu_and_mul_triton)
