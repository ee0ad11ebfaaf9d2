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

*Q blocks.* All query heads that share a key head are rows of one tile, so that each key is loaded
once for all heads: row = query * GROUP + head, BLOCK_M rows hold BLOCK_Q queries.

*Two launches at most.* A decode wants small tiles and a deep queue of loads, a prefill large tiles
for the tensor cores; one launch that branches between the two is good at neither. A step has its
sequences with few queries first (scheduler.py). The same source is compiled for these
(`PER_SEQUENCE`: a program for each sequence) and for those behind them (a program for each tile of
queries), each whole or split:

    sequence     0  1  2  3          4            5
    queries      1  1  1  1         300         1000
    program      3  2  1  0     12 ... 3        2 ...      the one with most keys starts first

The launches depend on what the CPU knows: shapes, and how many queries each sequence brings. So
nothing waits for the GPU, and a CUDA graph has the same launches in every step.

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

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.kernels.fused_triton import TritonStore, as_pointers, kind_of_8_bits, launch

LOG2_E = 1.4426950408889634
PROGRAMS_PER_SM = 4  # decode programs: while one waits for memory, the others compute
TILED_PER_SM = 1  # tiled programs: the registers hold no second one
SHARED_MEMORY_RESERVE = 4096  # bytes: block ids, and what the compiler keeps there
NUM_STAGES = 3  # key tiles on their way from memory while one is computed, plus one
MAX_SPLITS = 64
MIN_SPLIT_KEYS = 256  # shorter splits would spend their time on starting and merging
MIN_SPLIT_KEYS_MIXED = 4096  # of decodes beside a tiled launch, which keeps the GPU busy meanwhile


# -- the kernel --


@triton.constexpr_function
def padded_dim(dim: int) -> int:
    """The tile width for `dim` numbers: a power of 2, and of 16 at least (tensor cores)."""
    return max(16, triton.next_power_of_2(dim))


@triton.jit
def _load(pointers, mask, IS_MASKED: tl.constexpr, dtype: tl.constexpr, BITS_8: tl.constexpr):
    """Numbers of a cache as `dtype`; with IS_MASKED, 0 where the mask is False. BITS_8 "fp8": bytes
    that are float8_e4m3fn, decoded by hand, because GPUs before compute capability 8.9 cannot. Such
    a number has the bits of a float32 but for its exponent, which is smaller by 120."""
    if IS_MASKED:
        numbers = tl.load(pointers, mask=mask, other=0.0)
    else:
        numbers = tl.load(pointers)
    if BITS_8 == "fp8":
        bits = numbers.to(tl.int32)  # of an int8: the sign is in all upper bits
        bits = (bits << 20) & -0x78100000  # 0x87F00000: the sign, then exponent and mantissa
        numbers = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return numbers.to(dtype)


@triton.jit
def _find_sequence(query_start_loc, tile, low, high, BLOCK_Q: tl.constexpr):
    """The sequence in [low, high) that tile number `tile` belongs to, when a sequence with queries
    [start, end) owns the tiles from start // BLOCK_Q + its index.

    That gives each sequence at least ceil(queries / BLOCK_Q) tiles. A binary search finds it, and
    no table is needed.
    """
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=["num_seqs", "first_seq", "table_stride"])
def paged_attention_kernel(
    query,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM] in memory: KVCacheSpec.allocate
    value_cache,  # [num_blocks, num_kv_heads, BLOCK_SIZE, VALUE_DIM]
    key_scales,  # [num_blocks, num_kv_heads, BLOCK_SIZE]; of BITS_8 only
    value_scales,
    block_table,  # [num_seqs, max_blocks]
    query_start_loc,  # [num_seqs + 1]
    seq_lens,  # [num_seqs]
    output,  # [num_tokens, num_heads, VALUE_DIM]; IS_SPLIT: [num_tokens, num_heads, splits, ..]
    lse,  # IS_SPLIT: [num_tokens, num_heads, splits]
    num_seqs,
    first_seq,  # of those that a tiled launch computes
    table_stride,
    query_stride,
    query_head_stride,
    scale_log2,  # scale * log2(e); with a soft cap divided by it
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per key head
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # slots in a KV block
    BLOCK_M: tl.constexpr,  # rows of a query tile
    BLOCK_N: tl.constexpr,  # keys of a key tile
    WINDOW: tl.constexpr,  # 0: none
    SOFT_CAP: tl.constexpr,  # soft cap * log2(e); 0: none
    BITS_8: tl.constexpr,  # what a cache of 8 bits holds, "int8" or "fp8"; "": it is none
    IS_SPLIT: tl.constexpr,  # there are several splits
    PER_SEQUENCE: tl.constexpr,  # a program per sequence, else per tile of queries
):
    """Attention of one tile of queries, one key head, one split. Grid: (tiles, kv heads, splits).

    Tiles are counted from the end: the last sequences have most keys, and under causality the last
    tiles of a sequence; the programs that start last should be short.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    BLOCK_D: tl.constexpr = padded_dim(HEAD_DIM)
    BLOCK_V: tl.constexpr = padded_dim(VALUE_DIM)
    dtype: tl.constexpr = query.dtype.element_ty
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, split = tl.program_id(1), tl.program_id(2)
    if PER_SEQUENCE:
        seq = tile
    else:
        tile += tl.load(query_start_loc + first_seq) // BLOCK_Q + first_seq
        seq = _find_sequence(query_start_loc, tile, first_seq, num_seqs, BLOCK_Q)
    query_start = tl.load(query_start_loc + seq)
    query_len = tl.load(query_start_loc + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)

    # The queries of this program: all of a sequence, tile by tile, or those of one tile.
    first_query, end_query = 0, query_len
    if not PER_SEQUENCE:
        first_query = (tile - query_start // BLOCK_Q - seq) * BLOCK_Q
        end_query = tl.minimum(first_query + BLOCK_Q, query_len)

    row = tl.arange(0, BLOCK_M)
    row_query, row_head = row // GROUP, kv_head * GROUP + row % GROUP
    dims, value_dims = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    table = block_table + seq.to(tl.int64) * table_stride

    for start in range(first_query, end_query, BLOCK_Q):
        end = tl.minimum(start + BLOCK_Q, query_len)
        is_row = (row_query < BLOCK_Q) & (start + row_query < end)
        token = (query_start + start + row_query).to(tl.int64)
        first_position = seq_len - query_len + start
        row_position = first_position + row_query
        last_position = seq_len - query_len + end - 1

        # Key tiles [begin, stop) hold the keys that any row sees; [full, full_stop) those that all
        # rows see.
        begin, full = 0, 0
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

        at = token[:, None] * query_stride + row_head[:, None] * query_head_stride + dims[None, :]
        mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        queries = tl.load(query + at, mask=mask, other=0.0)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        # Phase 0: the window begins; 1: every row sees every key, and no mask is needed; 2: the
        # diagonal. The compiler makes three loops of it, and leaves out what a phase does not need.
        ends = (begin, full, full_stop, stop)
        for phase in tl.static_range(0 if WINDOW > 0 else 1, 3):
            for key_tile in range(ends[phase], ends[phase + 1]):
                position = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)  # of the tile's keys
                exists = position < seq_len
                # 64 bits: the number of a slot times HEAD_DIM passes 2^31.
                block = _load(table + position // BLOCK_SIZE, exists, phase != 1, tl.int64, "")
                first_slot = (block * (NUM_HEADS // GROUP) + kv_head) * BLOCK_SIZE
                slot = position % BLOCK_SIZE
                key_at = (first_slot * HEAD_DIM + slot * HEAD_DIM)[None, :] + dims[:, None]
                is_dim = (dims < HEAD_DIM)[:, None]
                keys = _load(key_cache + key_at, is_dim, HEAD_DIM < BLOCK_D, dtype, BITS_8)
                score = tl.dot(queries, keys, input_precision="ieee")  # [BLOCK_M, BLOCK_N]
                if BITS_8 != "":
                    scales = tl.load(key_scales + first_slot + slot, mask=exists, other=0.0)
                    score *= scales[None, :]
                if SOFT_CAP > 0:  # cap * tanh(x / cap), tanh(x) = 1 - 2 / (e^2x + 1)
                    doubled = score * scale_log2 * 2.0  # 2 x / cap * log2(e)
                    score = SOFT_CAP * (1.0 - 2.0 / (tl.exp2(doubled) + 1.0))
                else:
                    score = score * scale_log2
                if phase != 1:
                    distance = row_position[:, None] - position[None, :]
                    visible = (distance >= 0) & exists[None, :]
                    if WINDOW > 0:
                        visible = visible & (distance < WINDOW)
                    score = tl.where(visible, score, float("-inf"))

                new_m = tl.maximum(m, tl.max(score, axis=1))
                shift = new_m
                if phase != 1:  # a row that has read no visible key yet: -inf - -inf would be NaN
                    shift = tl.where(new_m == float("-inf"), 0.0, new_m)
                weight = tl.exp2(score - shift[:, None])
                shrink = tl.exp2(m - shift)
                total = total * shrink + tl.sum(weight, axis=1)
                m = new_m

                # Slots past the end hold numbers of other requests, and 0 * NaN is NaN: load 0.
                value_at = (first_slot * VALUE_DIM + slot * VALUE_DIM)[:, None]
                value_at += value_dims[None, :]
                is_value = exists[:, None] & (value_dims < VALUE_DIM)[None, :]
                some = phase != 1 or VALUE_DIM < BLOCK_V
                values = _load(value_cache + value_at, is_value, some, dtype, BITS_8)
                if BITS_8 != "":
                    scales = tl.load(value_scales + first_slot + slot, mask=exists, other=0.0)
                    weight *= scales[None, :]
                acc = acc * shrink[:, None]
                acc = tl.dot(weight.to(values.dtype), values, acc, input_precision="ieee")

        # total is 0 where a split had no keys
        result = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(output.dtype.element_ty)
        index = token * NUM_HEADS + row_head
        if IS_SPLIT:
            index = index * tl.num_programs(2) + split
            tl.store(lse + index, m + tl.log2(total), mask=is_row)  # -inf where total is 0
        mask = is_row[:, None] & (value_dims < VALUE_DIM)[None, :]
        tl.store(output + index[:, None] * VALUE_DIM + value_dims[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["num_seqs", "first_token"])
def merge_splits_kernel(
    partial,  # [num_tokens, num_heads, NUM_SPLITS, VALUE_DIM] float32
    lse,  # [num_tokens, num_heads, NUM_SPLITS] float32
    query_start_loc,  # [num_seqs + 1]
    output,  # [num_tokens, num_heads, VALUE_DIM]
    num_seqs,
    first_token,
    VALUE_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,  # a power of 2
):
    """Add one head's splits with weights 2^lse. Grid: (tokens, num_heads)."""
    token = first_token + tl.program_id(0)
    if token >= tl.load(query_start_loc + num_seqs):
        return  # padding
    row = token.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    splits = row * NUM_SPLITS + tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, padded_dim(VALUE_DIM))
    split_lse = tl.load(lse + splits)
    weight = tl.exp2(split_lse - tl.max(split_lse, axis=0))  # 0 for a split without keys
    mask = (weight > 0.0)[:, None] & (dims < VALUE_DIM)[None, :]
    part = tl.load(partial + splits[:, None] * VALUE_DIM + dims[None, :], mask=mask, other=0.0)
    merged = tl.sum(part * weight[:, None], axis=0) / tl.sum(weight, axis=0)
    at = output + row * VALUE_DIM + dims
    tl.store(at, merged.to(output.dtype.element_ty), mask=dims < VALUE_DIM)


# -- the launches --


class GpuInfo(NamedTuple):
    """The properties of a GPU that the choice of tiles depends on."""

    capability: int  # 80 for an A100, 90 for an H100 or H200
    num_sms: int  # streaming multiprocessors
    shared_memory: int  # bytes that one program may have


INTERPRETER = GpuInfo(80, 108, 99 * 1024)  # an A100 with the shared memory of a small GPU


def choose_tiles(
    per_sequence: bool, group: int, head_dim: int, value_dim: int, num_bytes: int, gpu: GpuInfo
) -> dict[str, int]:
    """What the kernel is compiled for, from shapes alone. `num_bytes` is an element's.

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
    tiles = {"PER_SEQUENCE": per_sequence, "BLOCK_M": block_m, "BLOCK_N": block_n}
    return {**tiles, "num_warps": num_warps, "num_stages": NUM_STAGES}


def choose_num_splits(num_programs: int, wanted: int, most: int) -> int:
    """Cut the key range until there are `wanted` programs, into `most` pieces at most. A power of
    2."""
    num_splits = 1
    while 2 * num_splits <= min(most, MAX_SPLITS) and num_programs * num_splits < wanted:
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
    """One launch of paged_attention_kernel, and of merge_splits_kernel if there are splits."""

    grid: tuple[int, int, int]  # (programs, kv heads, splits)
    tokens: range  # whose attention it computes
    arguments: dict[str, Any]  # all that are no tensors


class TritonBackend(TritonStore):
    """The kernel's launches. Caches must lie in memory as KVCacheSpec.allocate makes them."""

    name = "triton"
    supports_cuda_graphs = True

    def plan(self, metadata: StepMetadata, block_size: int, dtype: torch.dtype) -> StepMetadata:
        """An empty plan: the first layer of each kind enters its launches for the others."""
        return replace(metadata, plan={})

    def attend(
        self, query: Tensor, kv_cache: KVCache, metadata: StepMetadata, **options: Any
    ) -> Tensor:
        """See AttentionBackend. The output of padding, behind query_start_loc[-1], is not written.
        The last dimension of `query` must be contiguous."""
        cached, plan = kv_cache[1].shape, metadata.plan
        kind = (query.shape, query.stride(), cached, *options.values())
        if kind not in plan:
            plan[kind] = plan_launches(query, kv_cache, metadata, **options)
        num_heads, value_dim = query.shape[1], cached[-1]
        output = query.new_empty(*query.shape[:2], value_dim)
        step = (metadata.block_table, metadata.query_start_loc, metadata.seq_lens)
        caches = as_pointers(kv_cache)
        for grid, tokens, arguments in plan[kind]:
            written = lse = output
            if (num_splits := grid[2]) > 1:
                split = (tokens.stop, num_heads, num_splits)
                written = query.new_empty(*split, value_dim, dtype=torch.float32)
                lse = query.new_empty(*split, dtype=torch.float32)
            launch(paged_attention_kernel, grid, query, *caches, *step, written, lse, **arguments)
            if num_splits > 1:
                num_warps = max(1, num_splits * padded_dim(value_dim) // 2048)
                launch(
                    merge_splits_kernel,
                    (len(tokens), num_heads),
                    *(written, lse, step[1], output, arguments["num_seqs"], tokens.start),
                    VALUE_DIM=value_dim,
                    NUM_SPLITS=num_splits,
                    num_warps=num_warps,  # a thread has 64 numbers
                )
        return output


def plan_launches(
    query: Tensor,
    kv_cache: KVCache,
    metadata: StepMetadata,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
) -> list[Launch]:
    """Which specialisations compute this step, each with as many splits as fill the GPU. (A program
    per sequence is right for any number of queries: it takes them in turn.)"""
    num_tokens, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, value_dim = kv_cache[1].shape
    num_seqs, max_blocks = metadata.block_table.shape
    group, gpu = num_heads // num_kv_heads, get_gpu_info(query.device)
    query_lens = metadata.query_lens
    sizes = (group, head_dim, value_dim, query.element_size(), gpu)
    short, long = choose_tiles(True, *sizes), choose_tiles(False, *sizes)
    is_long = query_lens > short["BLOCK_M"] // group
    num_short = int(is_long.argmax()) if is_long.any() else num_seqs
    num_short_tokens = int(query_lens[:num_short].sum())
    shared = {
        "num_seqs": num_seqs,
        "first_seq": num_short,
        "table_stride": metadata.block_table.stride(0),
        "query_stride": query.stride(0),
        "query_head_stride": query.stride(1),
        "scale_log2": scale * LOG2_E / (logits_soft_cap or 1.0),
        "NUM_HEADS": num_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": block_size,
        "WINDOW": sliding_window or 0,
        "SOFT_CAP": (logits_soft_cap or 0.0) * LOG2_E,
        "BITS_8": kind_of_8_bits(kv_cache),
    }
    launches: list[Launch] = []

    def add(tiles: dict[str, int], tokens: range, num_tiles: int, busy: int, min_keys: int) -> None:
        """busy: how many of the tiles have work for sure."""
        per_sm = PROGRAMS_PER_SM if tiles is short else TILED_PER_SM
        most = max_blocks * block_size // min_keys
        num_splits = choose_num_splits(busy * num_kv_heads, per_sm * gpu.num_sms, most)
        arguments = {**shared, **tiles, "IS_SPLIT": num_splits > 1}
        launches.append(Launch((num_tiles, num_kv_heads, num_splits), tokens, arguments))

    if num_short < num_seqs:
        tokens, block_q = range(num_short_tokens, num_tokens), long["BLOCK_M"] // group
        num_full = num_tokens // block_q - num_short_tokens // block_q  # if of one sequence
        add(long, tokens, num_full + num_seqs - num_short, num_full + 1, MIN_SPLIT_KEYS)
    if num_short:
        min_keys = MIN_SPLIT_KEYS_MIXED if launches else MIN_SPLIT_KEYS
        add(short, range(num_short_tokens), num_short, num_short, min_keys)
    return launches
