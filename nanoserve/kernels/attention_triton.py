"""How does a GPU read scattered keys at the speed of its memory?

One Triton kernel does all attention of a step: prefill, chunked prefill, decode, cached prefixes,
draft verification. Its result is that of attention.AttentionBackend, the definition, but for
rounding. It reads the keys once, and never writes the scores to memory.

*Tiles.* A program (a block of GPU threads) takes a tile of queries and walks over tiles of keys. 4
queries over 4 keys with tiles of 2 x 2; "x" is seen, "." is masked by causality:

                    keys  0 1 | 2 3
    queries  0            x . |            tile (0, 0): on the diagonal, masked
             1            x x |            tile (0, 1): wholly hidden, never visited
             ------------------------
             2            x x | x .        tile (1, 0): wholly visible, no mask computed (in a long
             3            x x | x x        tile (1, 1): masked       text, nearly all tiles)

*Online softmax.* A row keeps three numbers of the keys it has read: the largest score m, the total
of 2^(score - m), and the sum acc of the values with the same weights. When a new tile raises m, the
sums are scaled by 2^(old m - new m). (Powers of 2, because the hardware has them; log2(e) is folded
into the scale.) Query 3, with scores 1 3 | 4 2:

    after tile 0:  m = 3   total = 1/4 + 1 = 5/4           acc = 1/4 v0 + v1
    after tile 1:  m = 4   total = 5/8 + 1 + 1/4 = 15/8    acc = 1/8 v0 + 1/2 v1 + v2 + 1/4 v3
    output         acc / total = (2 v0 + 8 v1 + 16 v2 + 4 v3) / 30, which is the softmax in full

*Splits.* One sequence alone would keep one program per key head busy, on a GPU with room for
hundreds. So the key range may be cut: each split gives acc / total and lse = m + log2(total), and a
second, small kernel adds the splits with weights 2^lse. Above: lse log2(10) and log2(20), so 1/3 of
the first split's output and 2/3 of the second's.

*Grouped-query heads.* All query heads that share a key head are rows of one tile, so that each key
is loaded once for all heads: row = query * GROUP + head, BLOCK_M rows hold BLOCK_Q queries.

*Specialisations.* A decode wants small tiles and a deep queue of loads, a prefill large tiles for
the tensor cores; one kernel that branches between the two at run time is good at neither. The same
source is compiled for each: `PER_SEQUENCE` (a program per sequence, for sequences with few queries)
and tiled (a program per tile of queries), each with one split or several. (How many is no constant,
so that a new number compiles nothing but a merge.) A step with long and short sequences launches
both over the whole batch, and just one of the two computes each sequence. The device decides which
one, so that the launch depends on nothing but tensor shapes: it needs no synchronisation, and a
CUDA graph can hold it. What the shapes decide is decided once a step: see TritonBackend.plan.

*Caches of 8 bits.* Keys and values are decoded when a tile is loaded. A key's scale is a factor of
its scores, a value's scale one of its weights: the vectors themselves are never multiplied by it.

Left out: tiles chosen by trial (autotuning stalls a server, and cannot happen inside a graph),
tensor-memory-accelerator loads.

vLLM: vllm/attention/ops/: prefix_prefill.py, csrc/attention/ (V0);
vllm/v1/attention/ops/triton_unified_attention.py (V1). Papers: online softmax, arXiv 1805.02867;
FlashAttention 2, arXiv 2307.08691; Flash-Decoding (splits), PyTorch blog, October 2023;
PagedAttention, arXiv 2309.06180; The Anatomy of a Triton Attention Kernel, arXiv 2511.11581.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.kernels.quantized_cache import as_stored

LOG2_E = 1.4426950408889634
PROGRAMS_PER_SM = 4  # decode programs: while one waits for memory, the others compute
TILED_PER_SM = 1  # tiled programs: the registers hold no second one
SHARED_MEMORY_RESERVE = 4096  # bytes: block ids, and what the compiler keeps there
MAX_SPLITS = 64
MIN_SPLIT_KEYS = 256  # shorter splits would spend their time on starting and merging
MIN_SPLIT_KEYS_MIXED = 4096  # of decodes beside a tiled launch, which keeps the GPU busy meanwhile
OPTIONS = {"enable_fp_fusion": True}  # of the compiler; off by default since Triton 3.10


# -- the kernel --


@triton.jit
def _load(pointers, mask, IS_MASKED: tl.constexpr):
    """tl.load; with IS_MASKED, 0 where the mask is False."""
    if IS_MASKED:
        return tl.load(pointers, mask=mask, other=0.0)
    return tl.load(pointers)


@triton.jit
def _decode(numbers, dtype: tl.constexpr, BITS_8: tl.constexpr):
    """Numbers of a cache as `dtype`. BITS_8 "fp8": bytes that are float8_e4m3fn, decoded by hand,
    because GPUs before compute capability 8.9 cannot. Such a number has the bits of a float32 but
    for its exponent, which is smaller by 120."""
    if BITS_8 == "fp8":
        bits = numbers.to(tl.int32)  # of an int8: the sign is in all upper bits
        bits = (bits << 20) & -0x78100000  # 0x87F00000: the sign, then exponent and mantissa
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)  # 2^120
    return numbers.to(dtype)


@triton.jit
def _attend_tiles(
    state,
    query,  # [BLOCK_M, BLOCK_D]
    first_tile,
    end_tile,
    row_position,  # [BLOCK_M]: each row's place in its sequence
    seq_len,
    table,
    key_head,
    value_head,
    key_scales,
    value_scales,
    key_block_stride,
    key_slot_stride,
    value_block_stride,
    value_slot_stride,
    scale_block_stride,
    scale_log2,
    soft_cap_log2,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    BITS_8: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Online softmax over key tiles [first_tile, end_tile); `state` is (m, total, acc).

    IS_MASKED: in some of these tiles there is a key that a row may not see, or the keys end.
    """
    m, total, acc = state
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    for tile in range(first_tile, end_tile):
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)  # of the tile's keys
        exists = position < seq_len
        if IS_MASKED:
            block = tl.load(table + position // BLOCK_SIZE, mask=exists, other=0)
        else:
            block = tl.load(table + position // BLOCK_SIZE)
        block = block.to(tl.int64)  # block * stride passes 2^31 in a large cache
        slot = position % BLOCK_SIZE

        key_row = key_head + block * key_block_stride + slot * key_slot_stride
        key = _load(
            key_row[None, :] + dims[:, None],  # [BLOCK_D, BLOCK_N]
            (dims < HEAD_DIM)[:, None],
            HEAD_DIM < BLOCK_D,
        )
        if BITS_8 != "":
            key = _decode(key, query.dtype, BITS_8)
        score = tl.dot(query, key, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        if BITS_8 != "":
            at = block * scale_block_stride + slot
            score *= tl.load(key_scales + at, mask=exists, other=0.0)[None, :]
        if HAS_SOFT_CAP:  # cap * tanh(x / cap), tanh(x) = 1 - 2 / (e^2x + 1)
            doubled = score * scale_log2 * 2.0  # 2 x / cap * log2(e)
            score = soft_cap_log2 * (1.0 - 2.0 / (tl.exp2(doubled) + 1.0))
        else:
            score = score * scale_log2
        if IS_MASKED:
            distance = row_position[:, None] - position[None, :]
            visible = (distance >= 0) & exists[None, :]
            if WINDOW > 0:
                visible = visible & (distance < WINDOW)
            score = tl.where(visible, score, float("-inf"))

        new_m = tl.maximum(m, tl.max(score, axis=1))
        shift = new_m
        if IS_MASKED:  # a row that has read no visible key yet: -inf - -inf would be NaN
            shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        weight = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(m - shift)
        total = total * shrink + tl.sum(weight, axis=1)
        m = new_m

        # Slots past the end hold old numbers of other requests, and 0 * NaN is NaN: load 0 there.
        value_row = value_head + block * value_block_stride + slot * value_slot_stride
        value = _load(
            value_row[:, None] + value_dims[None, :],  # [BLOCK_N, BLOCK_V]
            exists[:, None] & (value_dims < VALUE_DIM)[None, :],
            IS_MASKED or VALUE_DIM < BLOCK_V,
        )
        if BITS_8 != "":
            value = _decode(value, query.dtype, BITS_8)
            weight *= tl.load(value_scales + at, mask=exists, other=0.0)[None, :]
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision="ieee")
    return m, total, acc


@triton.jit
def _find_sequence(query_start_loc, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence that program `tile` belongs to, and its first tile, when a sequence with queries
    [start, end) owns the tiles from start // BLOCK_Q + its index.

    That gives each sequence at least ceil(queries / BLOCK_Q) tiles. A binary search finds it, and
    no table is needed.
    """
    low = 0
    high = num_seqs  # the answer is in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tl.load(query_start_loc + low) // BLOCK_Q + low


@triton.jit(do_not_specialize=["num_seqs", "table_stride", "max_short", "rows_per_seq"])
def paged_attention_kernel(
    query,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    value_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, VALUE_DIM]
    block_table,  # [num_seqs, max_blocks]
    query_start_loc,  # [num_seqs + 1]
    seq_lens,  # [num_seqs]
    key_scales,  # [num_blocks, BLOCK_SIZE, num_kv_heads, 1], heads before slots; of BITS_8 only
    value_scales,
    output,  # [num_tokens, num_heads, VALUE_DIM]; IS_SPLIT: [rows, num_heads, splits, VALUE_DIM]
    lse,  # IS_SPLIT: [rows, num_heads, splits]
    num_seqs,
    query_stride,
    query_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    scale_block_stride,
    table_stride,
    max_short,  # PER_SEQUENCE computes sequences of up to so many queries, the tiled launch others
    rows_per_seq,  # IS_SPLIT: so many rows of `output` belong to a sequence; 0: one to a token
    scale_log2,  # scale * log2(e); with a soft cap divided by it
    soft_cap_log2,  # soft cap * log2(e)
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,  # HEAD_DIM, rounded up to a power of 2
    BLOCK_V: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # slots in a KV block
    BLOCK_M: tl.constexpr,  # rows of a query tile
    BLOCK_N: tl.constexpr,  # keys of a key tile
    WINDOW: tl.constexpr,  # 0: none
    HAS_SOFT_CAP: tl.constexpr,
    BITS_8: tl.constexpr,  # what a cache of 8 bits holds, "int8" or "fp8"; "": it is none
    IS_SPLIT: tl.constexpr,  # there are several splits
    PER_SEQUENCE: tl.constexpr,  # a program per sequence, else per tile of queries
):
    """Attention of one tile of queries, one key head, one split. Grid: (tiles, kv heads, splits).

    Tiles are counted from the end: under causality the last tiles take longest, and the programs
    that start last should be short.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    if PER_SEQUENCE:
        seq, first_tile_of_seq = tile, tile
    else:
        seq, first_tile_of_seq = _find_sequence(query_start_loc, tile, num_seqs, BLOCK_Q)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)

    # The queries of this program: all of a sequence, tile by tile, or those of one tile.
    first_query = (tile - first_tile_of_seq) * BLOCK_Q
    if PER_SEQUENCE:
        end_query = tl.where(query_len <= max_short, query_len, 0)
    else:
        end_query = tl.minimum(first_query + BLOCK_Q, query_len)
        end_query = tl.where(query_len <= max_short, 0, end_query)

    row = tl.arange(0, BLOCK_M)
    row_query, row_head = row // GROUP, kv_head * GROUP + row % GROUP
    dims = tl.arange(0, BLOCK_D)
    value_dims = tl.arange(0, BLOCK_V)
    table = block_table + seq.to(tl.int64) * table_stride
    key_head = key_cache + kv_head * key_head_stride
    value_head = value_cache + kv_head * value_head_stride

    for start in range(first_query, end_query, BLOCK_Q):
        end = tl.minimum(start + BLOCK_Q, query_len)
        is_row = (row_query < BLOCK_Q) & (start + row_query < end)
        token = (query_start + start + row_query).to(tl.int64)
        row_position = seq_len - query_len + start + row_query
        first_position = seq_len - query_len + start
        last_position = seq_len - query_len + end - 1

        # Key tiles [begin, stop) hold the keys that any row sees; [full, full_stop) those that all
        # rows see.
        begin = 0
        full = 0
        if WINDOW > 0:
            begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
            full = tl.cdiv(tl.maximum(last_position - WINDOW + 1, 0), BLOCK_N)
        stop = tl.cdiv(last_position + 1, BLOCK_N)
        full_stop = (first_position + 1) // BLOCK_N
        if IS_SPLIT:
            per_split = tl.cdiv(stop - begin, tl.num_programs(2))
            begin = begin + split * per_split
            stop = tl.minimum(begin + per_split, stop)
        full = tl.minimum(tl.maximum(full, begin), stop)
        full_stop = tl.minimum(tl.maximum(full_stop, full), stop)

        loaded = tl.load(
            query
            + token[:, None] * query_stride
            + row_head[:, None] * query_head_stride
            + dims[None, :],
            mask=is_row[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        state = (
            tl.full([BLOCK_M], float("-inf"), tl.float32),
            tl.zeros([BLOCK_M], tl.float32),
            tl.zeros([BLOCK_M, BLOCK_V], tl.float32),
        )
        for phase in tl.static_range(0 if WINDOW > 0 else 1, 3):
            m, total, acc = _attend_tiles(
                state,
                loaded,
                begin if phase == 0 else (full if phase == 1 else full_stop),
                full if phase == 0 else (full_stop if phase == 1 else stop),
                row_position,
                seq_len,
                table,
                key_head,
                value_head,
                key_scales + kv_head * BLOCK_SIZE,
                value_scales + kv_head * BLOCK_SIZE,
                key_block_stride,
                key_slot_stride,
                value_block_stride,
                value_slot_stride,
                scale_block_stride,
                scale_log2,
                soft_cap_log2,
                HEAD_DIM=HEAD_DIM,
                VALUE_DIM=VALUE_DIM,
                BLOCK_D=BLOCK_D,
                BLOCK_V=BLOCK_V,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_N=BLOCK_N,
                WINDOW=WINDOW,
                HAS_SOFT_CAP=HAS_SOFT_CAP,
                BITS_8=BITS_8,
                IS_MASKED=phase != 1,
            )
            state = (m, total, acc)

        m, total, acc = state
        # total is 0 where a split had no keys
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        index = token * NUM_HEADS + row_head
        if IS_SPLIT:
            first_row = tl.where(rows_per_seq > 0, seq * rows_per_seq, query_start)
            out_row = (first_row + start + row_query).to(tl.int64)
            index = (out_row * NUM_HEADS + row_head) * tl.num_programs(2) + split
        tl.store(
            output + index[:, None] * VALUE_DIM + value_dims[None, :],
            result.to(output.dtype.element_ty),
            mask=is_row[:, None] & (value_dims < VALUE_DIM)[None, :],
        )
        if IS_SPLIT:
            tl.store(lse + index, m + tl.log2(total), mask=is_row)  # -inf where total is 0


@triton.jit(do_not_specialize=["num_seqs", "rows_per_seq", "max_short"])
def merge_splits_kernel(
    partial,  # [rows, num_heads, NUM_SPLITS, VALUE_DIM] float32
    lse,  # [rows, num_heads, NUM_SPLITS] float32
    query_start_loc,  # [num_seqs + 1]
    output,  # [num_tokens, num_heads, VALUE_DIM]
    num_seqs,
    rows_per_seq,  # as in paged_attention_kernel
    max_short,  # sequences of up to so many queries are another launch's
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    NUM_SPLITS: tl.constexpr,  # a power of 2
):
    """Add one head's splits with weights 2^lse. Grid: (rows, num_heads)."""
    row = tl.program_id(0)
    if rows_per_seq > 0:
        seq = row // rows_per_seq
        start = tl.load(query_start_loc + seq)
        query_len = tl.load(query_start_loc + seq + 1) - start
        token = start + row % rows_per_seq
        is_written = (token < start + query_len) & (query_len <= rows_per_seq)
    else:
        token = row
        is_written = row < tl.load(query_start_loc + num_seqs)
        if is_written & (max_short > 0):
            low = 0
            high = num_seqs  # the sequence of the token is in [low, high)
            while high - low > 1:
                middle = (low + high) // 2
                if tl.load(query_start_loc + middle) <= row:
                    low = middle
                else:
                    high = middle
            query_len = tl.load(query_start_loc + low + 1) - tl.load(query_start_loc + low)
            is_written = query_len > max_short
    if not is_written:
        return  # padding, or another launch's
    num_heads = tl.num_programs(1)
    row = row.to(tl.int64) * num_heads + tl.program_id(1)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, BLOCK_V)
    split_lse = tl.load(lse + row * NUM_SPLITS + splits)
    weight = tl.exp2(split_lse - tl.max(split_lse, axis=0))  # 0 for a split without keys
    part = tl.load(
        partial + (row * NUM_SPLITS + splits)[:, None] * VALUE_DIM + dims[None, :],
        mask=(weight > 0.0)[:, None] & (dims < VALUE_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(part * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    tl.store(
        output + (token.to(tl.int64) * num_heads + tl.program_id(1)) * VALUE_DIM + dims,
        merged.to(output.dtype.element_ty),
        mask=dims < VALUE_DIM,
    )


@triton.jit
def store_kv_kernel(
    key,  # [num_tokens, num_kv_heads, KEY_DIM]
    value,  # [num_tokens, num_kv_heads, VALUE_DIM]
    key_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, KEY_DIM]
    value_cache,  # [num_blocks, BLOCK_SIZE, num_kv_heads, VALUE_DIM]
    slot_mapping,  # [num_tokens]
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    key_block_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_block_stride,
    value_slot_stride,
    value_cache_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,  # num_kv_heads * KEY_DIM, rounded up to a power of 2
    BLOCK_V: tl.constexpr,
):
    """Write one token's key and value, all heads, to its slot. Grid: (num_tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    block, slot = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    i = tl.arange(0, BLOCK_K)
    head, dim, mask = i // KEY_DIM, i % KEY_DIM, i < NUM_KV_HEADS * KEY_DIM
    source = key + token * key_stride + head * key_head_stride + dim
    target = key_cache + block * key_block_stride + slot * key_slot_stride
    tl.store(target + head * key_cache_head_stride + dim, tl.load(source, mask), mask)
    i = tl.arange(0, BLOCK_V)
    head, dim, mask = i // VALUE_DIM, i % VALUE_DIM, i < NUM_KV_HEADS * VALUE_DIM
    source = value + token * value_stride + head * value_head_stride + dim
    target = value_cache + block * value_block_stride + slot * value_slot_stride
    tl.store(target + head * value_cache_head_stride + dim, tl.load(source, mask), mask)


# -- the launches --


class TritonBackend(AttentionBackend):
    """The kernels' launches, as functions below, with a plan that all layers share."""

    name = "triton"
    supports_cuda_graphs = True

    def plan(self, metadata: StepMetadata, block_size: int, dtype: torch.dtype) -> StepMetadata:
        """Layers may differ in their heads, so the plan is empty at first: the first layer of each
        shape enters its launches, and the others find them there."""
        return replace(metadata, plan={})

    def store(self, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: StepMetadata) -> None:
        stored = as_stored(key, value, kv_cache)
        for i in range(0, len(stored), 2):  # the numbers, then their scales
            two = (stored[i], stored[i + 1], kv_cache[i], kv_cache[i + 1])
            store_kv_triton(*two, metadata.slot_mapping)

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
        return paged_attention_triton(
            query,
            kv_cache[0],
            kv_cache[1],
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale=scale,
            sliding_window=sliding_window,
            logits_soft_cap=logits_soft_cap,
            kv_scales=kv_cache[2:],
            plan=metadata.plan,
        )


class Tiles(NamedTuple):
    """The shape of one specialisation."""

    block_m: int  # rows of a query tile (queries x heads of a group)
    block_n: int  # keys of a key tile
    num_warps: int
    num_stages: int  # key tiles on their way from memory while one is computed, plus one


class GpuInfo(NamedTuple):
    """The properties of a GPU that the choice of tiles depends on."""

    capability: int  # 80 for an A100, 90 for an H100 or H200
    num_sms: int  # streaming multiprocessors
    shared_memory: int  # bytes that one program may have


INTERPRETER = GpuInfo(80, 108, 99 * 1024)  # an A100 with the shared memory of a small GPU


def choose_tiles(
    per_sequence: bool, group: int, head_dim: int, value_dim: int, num_bytes: int, gpu: GpuInfo
) -> Tiles:
    """Tile sizes from shapes alone. `num_bytes` is an element's.

    Decode (per_sequence) is bound by memory: the smallest query tile that tensor cores take (16
    rows), so that registers and shared memory go to many programs with loads in flight. Prefill is
    bound by arithmetic: as many rows as registers hold, because a key is loaded once for all rows.

    The address of a key needs a block id, which is loaded too: two loads in a row. So with 3 stages
    one tile of keys is loading while another is computed (with 5, two; even numbers add nothing).
    """
    block_d, block_v = padded_dim(head_dim), padded_dim(value_dim)
    widest = max(block_d, block_v)
    if gpu.capability < 80:  # Triton knows no tensor cores here (T4): every product wants registers
        block_m, block_n, num_warps = (16, 16, 4) if per_sequence else (32, 32, 8)
    elif per_sequence:
        block_m, block_n, num_warps = 16, 64 if widest <= 128 else 32, 4
    elif num_bytes == 4:  # float32 runs without tensor cores: every product wants registers
        block_m, block_n, num_warps = 32, 32, 4 if widest <= 128 else 8
    elif widest <= 128:  # Hopper's and datacenter Blackwell's tensor cores read shared memory
        reads_shared = 90 <= gpu.capability < 120
        block_m, block_n, num_warps = 128, 64 if reads_shared else 32, 4 if widest < 128 else 8
    else:
        block_m, block_n, num_warps = 64, 32, 8
    block_m = max(block_m, triton.next_power_of_2(group))
    queries_and_output = block_m * (block_d + block_v) * num_bytes
    per_key = (block_d + block_v) * num_bytes  # one tile of keys and values is kept
    room = gpu.shared_memory - queries_and_output - SHARED_MEMORY_RESERVE
    while block_n > 16 and block_n * per_key > room:
        block_n //= 2
    return Tiles(block_m, block_n, num_warps, num_stages=3)


def padded_dim(dim: int) -> int:
    """The tile width for `dim` numbers: a power of 2, and of 16 at least (tensor cores)."""
    return max(16, triton.next_power_of_2(dim))


def choose_num_splits(
    num_programs: int,
    max_seq_len: int,
    gpu: GpuInfo,
    per_sm: int = PROGRAMS_PER_SM,
    min_keys: int = MIN_SPLIT_KEYS,
) -> int:
    """Cut the key range until each multiprocessor has `per_sm` programs, or a piece would be
    shorter than `min_keys`.

    A power of 2. Depends on shapes only: `max_seq_len` is what the block table has room for.
    """
    num_splits = 1
    while (
        num_splits < MAX_SPLITS
        and num_programs * num_splits < per_sm * gpu.num_sms
        and max_seq_len >= 2 * num_splits * min_keys
    ):
        num_splits *= 2
    return num_splits


def get_gpu_info(device: torch.device) -> GpuInfo:
    """The properties of `device`; INTERPRETER for a CPU, where Triton's interpreter runs."""
    if device.type != "cuda":
        return INTERPRETER
    properties: Any = torch.cuda.get_device_properties(device)
    return GpuInfo(
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )


class Launch(NamedTuple):
    """One launch of paged_attention_kernel."""

    grid: tuple[int, int, int]  # (programs, kv heads, splits)
    max_short: int
    rows: int  # of the tensors that hold what several splits give
    rows_per_seq: int
    constants: dict[str, Any]  # compile-time arguments that depend on shapes


# The shape of a layer's heads, of a KV block and of an element -> the launches of its attention.
Plan = dict[tuple[int, ...], list[Launch]]


def paged_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    kv_scales: tuple[Tensor, ...] = (),
    num_splits: int | None = None,
    plan: Plan | None = None,
) -> Tensor:
    """attention_cpu.paged_attention_torch on a GPU: the same arguments, shapes and result.

    The last dimension of `query` and of the caches must be contiguous. `num_splits` (a power of 2)
    is for tests; None: choose_num_splits. `plan` is the step's, see TritonBackend.plan. The output
    of tokens past query_start_loc[-1] (padding) is not written.
    """
    num_tokens, num_heads, _ = query.shape
    value_dim = value_cache.shape[-1]
    output = query.new_empty(num_tokens, num_heads, value_dim)
    num_seqs = block_table.shape[0]
    if num_tokens == 0 or num_seqs == 0:
        return output
    plan = {} if plan is None else plan
    shape = (num_heads, *key_cache.shape[1:], value_dim, query.element_size())
    if shape not in plan:
        gpu = get_gpu_info(query.device)
        plan[shape] = plan_launches(query, key_cache, value_cache, block_table, gpu, num_splits)
    scale_log2 = scale * LOG2_E
    bits_8, key_scales, value_scales = "", seq_lens, seq_lens  # not read
    if kv_scales:
        bits_8 = "int8" if key_cache.dtype == torch.int8 else "fp8"
        key_scales, value_scales = kv_scales
        key_cache, value_cache = key_cache.view(torch.int8), value_cache.view(torch.int8)
    for launch in plan[shape]:
        written, lse, num_splits = output, output, launch.grid[2]
        if num_splits > 1:
            split = (launch.rows, num_heads, num_splits)
            written = query.new_empty(*split, value_dim, dtype=torch.float32)
            lse = query.new_empty(*split, dtype=torch.float32)
        paged_attention_kernel[launch.grid](
            query,
            key_cache,
            value_cache,
            block_table,
            query_start_loc,
            seq_lens,
            key_scales,
            value_scales,
            written,
            lse,
            num_seqs,
            query.stride(0),
            query.stride(1),
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            key_scales.stride(0),
            block_table.stride(0),
            launch.max_short,
            launch.rows_per_seq,
            scale_log2 / logits_soft_cap if logits_soft_cap else scale_log2,
            (logits_soft_cap or 0.0) * LOG2_E,
            WINDOW=sliding_window or 0,
            HAS_SOFT_CAP=logits_soft_cap is not None,
            BITS_8=bits_8,
            **launch.constants,
        )
        if num_splits > 1:
            block_v = padded_dim(value_dim)
            merge_splits_kernel[(launch.rows, num_heads)](
                written,
                lse,
                query_start_loc,
                output,
                num_seqs,
                launch.rows_per_seq,
                0 if launch.constants["PER_SEQUENCE"] else launch.max_short,
                VALUE_DIM=value_dim,
                BLOCK_V=block_v,
                NUM_SPLITS=num_splits,
                num_warps=max(1, num_splits * block_v // 2048),  # 64 numbers a thread, in registers
                **OPTIONS,
            )
    return output


def plan_launches(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    gpu: GpuInfo,
    num_splits: int | None = None,
) -> list[Launch]:
    """Which specialisations compute this batch, from tensor shapes alone.

    No more tokens than sequences: a decode, one launch with a program per sequence. More tokens:
    a tiled launch, and that launch for the sequences with few queries. (If all tokens of a
    "decode" belong to one sequence, the result is still right: the program of that sequence takes
    its tokens in turn.)

    Each launch has as many splits as it needs to fill the GPU. Long sequences have too many rows to
    keep splits for all; the few rows of short ones beside them are kept by sequence.
    """
    num_tokens, num_heads, _ = query.shape
    num_seqs, max_blocks = block_table.shape
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    value_dim, group = value_cache.shape[-1], num_heads // num_kv_heads
    sizes = (group, head_dim, value_dim, query.element_size())
    short, long = (choose_tiles(per_sequence, *sizes, gpu) for per_sequence in (True, False))
    max_seq_len = max_blocks * block_size
    is_decode = num_tokens <= num_seqs
    max_short = num_tokens if is_decode else short.block_m // group

    def make_launch(
        per_sequence: bool, num_tiles: int, num_splits: int, rows_per_seq: int = 0
    ) -> Launch:
        tiles = short if per_sequence else long
        constants = {
            "NUM_HEADS": num_heads,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "BLOCK_D": padded_dim(head_dim),
            "BLOCK_V": padded_dim(value_dim),
            "BLOCK_SIZE": block_size,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "IS_SPLIT": num_splits > 1,
            "PER_SEQUENCE": per_sequence,
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            **OPTIONS,
        }
        grid, rows = (num_tiles, num_kv_heads, num_splits), rows_per_seq * num_seqs or num_tokens
        return Launch(grid, max_short, rows, rows_per_seq, constants)

    programs = num_seqs * num_kv_heads
    if is_decode:
        splits = num_splits or choose_num_splits(programs, max_seq_len, gpu)
        return [make_launch(True, num_seqs, splits)]
    few = num_splits or choose_num_splits(programs, max_seq_len, gpu, min_keys=MIN_SPLIT_KEYS_MIXED)
    num_full = num_tokens // (long.block_m // group)  # tiles, if all are of one sequence
    programs = (num_full + 1) * num_kv_heads
    splits = num_splits or choose_num_splits(programs, max_seq_len, gpu, per_sm=TILED_PER_SM)
    return [
        make_launch(False, num_full + num_seqs, splits),
        make_launch(True, num_seqs, few, rows_per_seq=max_short),
    ]


def store_kv_triton(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """attention_cpu.store_kv_torch on a GPU. The last dimension of all must be contiguous."""
    if key.dtype == torch.float8_e4m3fn:  # a number like any other; old GPUs do not know the type
        key, value, key_cache, value_cache = (
            each.view(torch.int8) for each in (key, value, key_cache, value_cache)
        )
    num_tokens, num_kv_heads, key_dim = key.shape
    value_dim = value.shape[-1]
    if num_tokens == 0:
        return
    store_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=key_cache.shape[1],
        BLOCK_K=triton.next_power_of_2(num_kv_heads * key_dim),
        BLOCK_V=triton.next_power_of_2(num_kv_heads * value_dim),
        **OPTIONS,
    )
