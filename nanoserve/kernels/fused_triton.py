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

A cache of 8 bits needs no launch more: the program that stores a head finds its scale. Products in
FP8 need one before each: quantize_rows (quantized.py).

Each one is held to its plain version. Sums are made in float32, and a number is rounded to the type
of the model wherever the plain version writes one to memory: so the results differ only where a sum
in another order, or another square root or exponential, is rounded to the other neighbour.

A program computes one token, or some heads or columns of one. No tile is chosen by trial: a thread
gets eight numbers (more only in rows of more than 4,096), in half precision a load of 16 bytes.

vLLM: csrc/layernorm_kernels.cu, csrc/activation_kernels.cu, csrc/pos_encoding_kernels.cu (V0);
vllm/compilation/passes/fusion/: qk_norm_rope_kvcache_fusion.py, rope_kvcache_fusion.py (V1).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.kernels.fused import FusedAttention
from nanoserve.layers import Rope

PER_THREAD = 8  # numbers of a thread
THREADS = 32  # of a warp
MAX_WARPS = 16  # of a program that must hold a whole row
NUMBERS = 1024  # of a program that may take a part of a row
OPTIONS = {"enable_fp_fusion": True}  # of the compiler; off by default since Triton 3.10


@triton.jit
def add_rms_norm_kernel(x, residual, weight, output, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """output = the norm (layers.RMSNorm) of x + residual, and x = that sum, all [num_tokens, SIZE],
    of one token. BLOCK is SIZE, rounded up to a power of 2. Grid: (num_tokens,)."""
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    at = tl.program_id(0).to(tl.int64) * SIZE + i
    dtype: tl.constexpr = x.dtype.element_ty
    added = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    added += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    rounded = added.to(dtype)
    tl.store(x + at, rounded, mask=mask)
    total = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, axis=0) / SIZE + eps)
    weights = tl.load(weight + i, mask=mask, other=0.0)
    tl.store(output + at, _normalize(total, scale, weights).to(dtype), mask=mask)


@triton.jit
def _normalize(x, scale, weights):
    """x times its scale, rounded, times the weights, rounded."""
    dtype: tl.constexpr = weights.dtype
    return ((x * scale).to(dtype).to(tl.float32) * weights.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def silu_and_mul_kernel(gate_up, output, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """layers.silu_and_mul, [num_tokens, 2 * SIZE] -> [num_tokens, SIZE], for BLOCK columns of one
    token. Grid: (num_tokens, blocks of columns)."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    dtype: tl.constexpr = gate_up.dtype.element_ty
    gate = tl.load(gate_up + token * 2 * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * SIZE + SIZE + i, mask=mask, other=0.0).to(tl.float32)
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(output + token * SIZE + i, (activated * up).to(dtype), mask=mask)


# -- numbers of 8 bits --


@triton.jit
def _quantize(x, axis: tl.constexpr, BITS_8: tl.constexpr):
    """quantized_cache.quantize_rows: bytes, and the scale of each row, which is none where a number
    is none (NaN, infinity)."""
    largest = tl.max(tl.abs(x), axis=axis, keep_dims=True)
    largest += tl.sum(x * 0.0, axis=axis, keep_dims=True)
    scale = largest / (127.0 if BITS_8 == "int8" else 448.0)
    return _encode(x, scale, BITS_8), scale


@triton.jit
def _encode(x, scale, BITS_8: tl.constexpr):
    """x / scale as bytes. "fp8": the bits of a float8_e4m3fn, by hand (see attention_triton._load):
    those of a float32 whose exponent is smaller by 120, rounded to the nearest or to even."""
    x = x / tl.maximum(scale, 1.1754943508222875e-38)
    if BITS_8 == "int8":
        return ((x + 12582912.0) - 12582912.0).to(tl.int8)  # 1.5 * 2^23 leaves no fraction
    bits = (tl.clamp(x, -448.0, 448.0) * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # 2^-120
    bits += 0x7FFFF + ((bits >> 20) & 1)
    return (((bits >> 24) & 0x80) | ((bits >> 20) & 0x7F)).to(tl.int8)


@triton.jit
def quantize_rows_kernel(
    x, codes, scales, given, SIZE: tl.constexpr, BLOCK: tl.constexpr, IS_GIVEN: tl.constexpr
):
    """A row of x [num_tokens, SIZE] as FP8: codes [num_tokens, SIZE] int8, scales [num_tokens].
    IS_GIVEN: the scale is the number in `given`. Grid: (num_tokens,)."""
    token, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    row = tl.load(x + token * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    if IS_GIVEN:
        scale = tl.load(given + tl.arange(0, 1))
        encoded = _encode(row, scale, "fp8")
    else:
        encoded, scale = _quantize(row, 0, "fp8")
    tl.store(scales + token + tl.arange(0, 1), scale)
    tl.store(codes + token * SIZE + i, encoded, mask=i < SIZE)


# -- keys and values --


@triton.jit
def _store_heads(
    heads, cache, scales, vector, dim, exists, DIM: tl.constexpr, BITS_8: tl.constexpr
):
    """Write heads [rows, width], or their codes and scales, into the vectors [rows, 1] of a cache
    that exist."""
    if BITS_8 != "":
        heads, scale = _quantize(heads.to(tl.float32), 1, BITS_8)
        tl.store(scales + vector, scale, mask=exists)
    tl.store(cache + vector * DIM + dim, heads, mask=exists & (dim < DIM))


@triton.jit
def store_kv_kernel(
    x,  # keys or values [num_tokens, NUM_KV_HEADS, DIM]
    cache,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, DIM] in memory: KVCacheSpec.allocate
    scales,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE]; of BITS_8 only
    slot_mapping,  # [num_tokens]
    token_stride,
    head_stride,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BITS_8: tl.constexpr,  # what a cache of 8 bits holds, "int8" or "fp8"; "": it is none
):
    """Write one token's keys or values, all heads, to its slot. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, triton.next_power_of_2(NUM_KV_HEADS))[:, None]
    dim = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    row, exists = x + token * token_stride + head * head_stride, head < NUM_KV_HEADS
    heads = tl.load(row + dim, mask=exists & (dim < DIM), other=0.0)
    vector = (slot // BLOCK_SIZE * NUM_KV_HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    _store_heads(heads, cache, scales, vector, dim, exists, DIM, BITS_8)


@triton.jit
def rope_and_store_kernel(
    qkv,  # [num_tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM]
    norm_weight,  # [NUM_HEADS + NUM_KV_HEADS, HEAD_DIM]; not used without HAS_NORM
    cos,  # [num_tokens, ROTARY_DIM]
    sin,  # [num_tokens, ROTARY_DIM], signed
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key_cache,  # as in store_kv_kernel
    value_cache,
    key_scales,
    value_scales,
    slot_mapping,  # [num_tokens]
    rope_stride,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,  # the first dimensions of a head, which are turned
    BLOCK_SIZE: tl.constexpr,  # slots in a KV block
    BLOCK_H: tl.constexpr,  # heads of a program
    HAS_NORM: tl.constexpr,
    BITS_8: tl.constexpr,
):
    """model.Attention between its product and attend, for some heads of one token. Grid:
    (num_tokens, groups of heads).

    A head is loaded twice, the second time with its two halves exchanged: so a thread has both
    numbers of a pair. (The second load finds the numbers in the cache of the multiprocessor.)
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    is_query, is_key = head < NUM_HEADS, (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    BLOCK_D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    dim = tl.arange(0, BLOCK_D)[None, :]
    half: tl.constexpr = ROTARY_DIM // 2
    pair = tl.where(dim < half, dim + half, tl.where(dim < ROTARY_DIM, dim - half, dim))
    exists = (is_query | is_key | is_value) & (dim < HEAD_DIM)
    dtype: tl.constexpr = qkv.dtype.element_ty

    row = qkv + (token * (NUM_HEADS + 2 * NUM_KV_HEADS) + head) * HEAD_DIM
    loaded = tl.load(row + dim, mask=exists, other=0.0)
    x = loaded.to(tl.float32)
    other = tl.load(row + pair, mask=exists, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / HEAD_DIM + eps)
        weights, has_weight = norm_weight + head * HEAD_DIM, exists & (is_query | is_key)
        x = _normalize(x, scale, tl.load(weights + dim, mask=has_weight, other=0.0))
        other = _normalize(other, scale, tl.load(weights + pair, mask=has_weight, other=0.0))
    at = token * rope_stride + tl.broadcast_to(dim, BLOCK_H, BLOCK_D)  # each thread loads its own
    turns = dim < ROTARY_DIM  # x cos + other sin, with a sin that has its sign
    cosine = tl.load(cos + at, mask=turns, other=1.0).to(tl.float32)
    sine = tl.load(sin + at, mask=turns, other=0.0).to(tl.float32)
    turned = ((x * cosine).to(dtype).to(tl.float32) + other * sine).to(dtype)
    turned = tl.where(is_value, loaded, turned)

    tl.store(query + (token * NUM_HEADS + head) * HEAD_DIM + dim, turned, mask=exists & is_query)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot >= 0:
        kv_head = head - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
        vector = (slot // BLOCK_SIZE * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE
        _store_heads(turned, key_cache, key_scales, vector, dim, is_key, HEAD_DIM, BITS_8)
        _store_heads(turned, value_cache, value_scales, vector, dim, is_value, HEAD_DIM, BITS_8)


# -- the launches --


def launch(kernel: Any, grid: tuple[int, ...], *tensors: Any, **constants: Any) -> None:
    if all(grid):
        kernel[grid](*tensors, **constants, **OPTIONS)


def num_warps_for(numbers: int) -> int:
    """As many warps as give each thread PER_THREAD numbers; a power of 2."""
    return min(MAX_WARPS, max(1, numbers // (PER_THREAD * THREADS)))


def block_sizes(size: int, most: int = 2**30) -> dict[str, int]:
    """Of a program that takes `size` numbers of a row, or `most` of them."""
    block = min(most, triton.next_power_of_2(size))
    return {"SIZE": size, "BLOCK": block, "num_warps": num_warps_for(block)}


def kind_of_8_bits(kv_cache: KVCache) -> str:
    """BITS_8 of the kernels."""
    return {torch.int8: "int8", torch.float8_e4m3fn: "fp8"}.get(kv_cache[0].dtype, "")


def as_pointers(kv_cache: KVCache) -> KVCache:
    """The four tensors of a cache for a kernel. (Without 8 bits, scales are not read.) FP8 becomes
    int8: Triton lacks float8_e4m3fn on GPUs before compute capability 8.9."""
    if kv_cache[0].dtype == torch.float8_e4m3fn:
        kv_cache = (kv_cache[0].view(torch.int8), kv_cache[1].view(torch.int8), *kv_cache[2:])
    return kv_cache if len(kv_cache) > 2 else kv_cache * 2


def quantize_rows(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """quantized_cache.quantize_rows in one launch: x [num_tokens, size] as float8_e4m3fn, and the
    scale of each row [num_tokens, 1] float32. `scale`: one number, the scale of all rows."""
    codes = torch.empty_like(x, dtype=torch.int8, memory_format=torch.contiguous_format)
    scales = x.new_empty(len(x), 1, dtype=torch.float32)
    given, sizes = scales if scale is None else scale, block_sizes(x.shape[1])
    tensors = (x.contiguous(), codes, scales, given)
    launch(quantize_rows_kernel, (len(x),), *tensors, **sizes, IS_GIVEN=scale is not None)
    return codes.view(torch.float8_e4m3fn), scales


class TritonStore(AttentionBackend):
    """A backend that stores with a kernel: the base of attention_triton.TritonBackend."""

    def store(self, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: StepMetadata) -> None:
        pointers, block_size = as_pointers(kv_cache), kv_cache[0].shape[1]
        for x, cache, scales in zip((key, value), pointers[:2], pointers[2:], strict=True):
            num_tokens, num_kv_heads, dim = x.shape
            launch(
                store_kv_kernel,
                (num_tokens,),
                *(x, cache, scales, metadata.slot_mapping, *x.stride()[:2]),
                NUM_KV_HEADS=num_kv_heads,
                DIM=dim,
                BLOCK_SIZE=block_size,
                BITS_8=kind_of_8_bits(kv_cache),
            )


class TritonOps:
    """What fused.py calls."""

    backend_cls = TritonStore

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The norm, and the sum, which takes the place of x."""
        x, output = x.contiguous(), torch.empty_like(x)
        tensors = (x, residual.contiguous(), weight, output)
        launch(add_rms_norm_kernel, (len(x),), *tensors, eps, **block_sizes(x.shape[1]))
        return output, x

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        num_tokens, size = len(gate_up), gate_up.shape[1] // 2
        output, sizes = gate_up.new_empty(num_tokens, size), block_sizes(size, NUMBERS)
        grid = (num_tokens, triton.cdiv(size, sizes["BLOCK"]))
        launch(silu_and_mul_kernel, grid, gate_up.contiguous(), output, **sizes)
        return output

    def rope_and_store(
        self, x: Tensor, attn: FusedAttention, rope: Rope, kv_cache: KVCache, metadata: StepMetadata
    ) -> Tensor:
        _, block_size, num_kv_heads, head_dim = kv_cache[0].shape
        num_tokens, num_rows = len(x), x.shape[1] // head_dim
        query = x.new_empty(num_tokens, num_rows - 2 * num_kv_heads, head_dim)
        block_d = triton.next_power_of_2(head_dim)
        block_h = max(1, min(NUMBERS // block_d, triton.next_power_of_2(num_rows)))
        weight, eps = (x, 0.0) if attn.qk_norm is None else (attn.qk_norm.weight, attn.qk_norm.eps)
        tensors = (*rope, query, *as_pointers(kv_cache), metadata.slot_mapping)
        launch(
            rope_and_store_kernel,
            (num_tokens, triton.cdiv(num_rows, block_h)),
            *(x.contiguous(), weight, *tensors, rope[0].stride(0), eps),
            NUM_HEADS=query.shape[1],
            NUM_KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            ROTARY_DIM=rope[0].shape[-1],
            BLOCK_SIZE=block_size,
            BLOCK_H=block_h,
            HAS_NORM=attn.qk_norm is not None,
            BITS_8=kind_of_8_bits(kv_cache),
            num_warps=num_warps_for(block_h * block_d),
        )
        return query
