"""How does a CPU read scattered keys?

With PyTorch's own operators, in one of two ways. The query of a decode uses each key once, so that
what counts is how often memory is read: keys and values are read where they lie (SparseDecode). The
many queries of a prompt use each key many times: the blocks of a sequence are copied together
first, then dense attention does the rest (GatheredPrefill). Whatever is the same in all layers is
computed once a step, in a StepPlan.

    one step   seq 0: 1 query   seq 1: 300 queries   seq 2: 1 query   seq 3: 300 queries
    its parts  SparseDecode [seq 0, seq 2]           GatheredPrefill [seq 1, seq 3]

The result is that of attention.AttentionBackend, the definition, but for rounding.

Left out: sparse reads in other dtypes than float32, and on other devices.

vLLM: vllm/attention/backends/torch_sdpa.py, ops/ipex_attn.py (V0);
vllm/v1/attention/backends/cpu_attn.py (V1; the computation is in C++).
"""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanoserve.attention import AttentionBackend, KVCache, StepMetadata
from nanoserve.kernels.quantized_cache import as_stored

QUERY_TILE = 256  # queries of one sequence attended to at once: bounds the size of the mask
MAX_DECODE_QUERIES = 4  # of one sequence: with more queries, copying its keys together pays
MAX_PADDING = 512  # padding keys in one batch; a second batch costs about as much as more of them


class TorchBackend(AttentionBackend):
    """The two functions below, with a plan that all layers share."""

    name = "torch"

    def plan(self, metadata: StepMetadata, block_size: int, dtype: torch.dtype) -> StepMetadata:
        tables = (metadata.block_table, metadata.query_start_loc, metadata.seq_lens)
        parts = split_batch(*tables, block_size, dtype, self.get_decode(dtype))
        return replace(metadata, plan=StepPlan(metadata.slot_mapping, block_size, parts))

    def get_decode(self, dtype: torch.dtype) -> Callable[..., SparseDecode] | None:
        """What makes the part of a step that reads its keys where they lie; None: nothing does."""
        return SparseDecode if dtype == torch.float32 else None

    def store(self, key: Tensor, value: Tensor, kv_cache: KVCache, metadata: StepMetadata) -> None:
        stored, slots = as_stored(key, value, kv_cache), metadata.slot_mapping
        for i in range(0, len(stored), 2):  # the numbers, then their scales
            two = (stored[i], stored[i + 1], kv_cache[i], kv_cache[i + 1])
            store_kv_torch(*two, slots, plan=metadata.plan)

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
        return paged_attention_torch(
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


def store_kv_torch(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    plan: StepPlan | None = None,
) -> None:
    """Write key and value [num_tokens, num_kv_heads, dim] to their slots; skip negative slots."""
    slots = plan.slots if plan else SlotIndex.of(slot_mapping, key_cache.shape[1])
    if slots.is_kept is not None:
        key, value = key[slots.is_kept], value[slots.is_kept]
    key_cache[slots.block, slots.offset] = key
    value_cache[slots.block, slots.offset] = value


class SlotIndex(NamedTuple):
    """Slots as indices of a cache."""

    block: Tensor  # [num_kept] int64
    offset: Tensor  # [num_kept] int64, within the block
    is_kept: Tensor | None  # [num_tokens] bool: not skipped; None: no token is skipped

    @classmethod
    def of(cls, slot_mapping: Tensor, block_size: int) -> SlotIndex:
        """The index of a step's slots [num_tokens]."""
        is_kept = None
        if (slot_mapping < 0).any():
            is_kept = slot_mapping >= 0
            slot_mapping = slot_mapping[is_kept]
        return cls(slot_mapping // block_size, slot_mapping % block_size, is_kept)


def paged_attention_torch(
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
    plan: StepPlan | None = None,
) -> Tensor:
    """Causal attention of ragged queries over paged keys and values.

    query            [num_tokens, num_heads, key_dim]
    key_cache        [num_blocks, block_size, num_kv_heads, key_dim]
    value_cache      [num_blocks, block_size, num_kv_heads, value_dim]
    block_table      [num_seqs, max_blocks] int32
    query_start_loc  [num_seqs + 1] int32
    seq_lens         [num_seqs] int32: keys after this step
    returns          [num_tokens, num_heads, value_dim]

    `kv_scales`: of a cache of 8 bits, the scales of keys and of values [num_blocks, block_size,
    num_kv_heads, 1]. `plan` is that of TorchBackend.plan; None: it is made here. On a CPU, raises
    IndexError for a block that the cache does not have. Entries of the block table behind a
    sequence's last block are not read.
    """
    output = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    parts = plan.parts if plan else None
    if parts is None:
        block_size = key_cache.shape[1]
        parts = split_batch(block_table, query_start_loc, seq_lens, block_size, key_cache.dtype)
    for part in parts:
        attended = part.attend(
            query, key_cache, value_cache, scale, sliding_window, logits_soft_cap, kv_scales
        )
        for tokens, result in attended:
            if len(tokens) == len(query) and part.is_in_order:  # one part is the whole step
                return result
            output.index_copy_(0, tokens, result)
    return output


@dataclass
class StepPlan:
    """What store_kv_torch and paged_attention_torch need to know of a step in every layer."""

    slot_mapping: Tensor  # [num_tokens]
    block_size: int
    parts: list[GatheredPrefill | SparseDecode]

    @cached_property
    def slots(self) -> SlotIndex:
        """Made by the first layer that stores through it: compiled code stores without an index."""
        return SlotIndex.of(self.slot_mapping, self.block_size)


def split_batch(
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_size: int,
    dtype: torch.dtype,
    make_decode: Callable[..., SparseDecode] | None = None,
) -> list[GatheredPrefill | SparseDecode]:
    """The step in parts that are attended to together, each in its own way.

    A sequence with few queries does little work for each key it reads: copying its keys together
    would cost more than the work itself.
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    query_lens = [end - start for start, end in itertools.pairwise(starts)]
    if make_decode is None and dtype == torch.float32:
        make_decode = SparseDecode
    can_be_sparse = make_decode is not None and block_table.device.type == "cpu"
    decodes: list[int] = []
    prefills: list[int] = []
    for seq, query_len in enumerate(query_lens):
        if can_be_sparse and 0 < query_len <= MAX_DECODE_QUERIES:
            decodes.append(seq)
        elif query_len:
            prefills.append(seq)
    parts: list[GatheredPrefill | SparseDecode] = []
    if make_decode is not None and decodes:
        parts.append(make_decode(block_table, block_size, decodes, starts, lengths))
    for query_len, seqs in _batches_of_similar_length(prefills, query_lens, lengths):
        parts.append(GatheredPrefill(block_table, block_size, query_len, seqs, starts, lengths))
    return parts


class SparseDecode:
    """Tokens that read their keys and values where they lie, in the blocks of the cache.

    Take the scores of a step as a matrix, tokens x slots of the cache. In the row of a token, only
    the slots of its own sequence have a score: the matrix is sparse. PyTorch has both products that
    attention needs of it. `sampled_addmm` computes a dense product at given positions only (the
    scores); `embedding_bag` sums rows of a table with given weights (the values). No block is
    copied.

                        slots of the cache                  block_size 2, block tables [0, 2], [1]
        token of seq 0  s  s  .  .  s  .        crow  [0, 3, 5]
        token of seq 1  .  .  s  s  .  .        col   [0, 1, 4, 2, 3]

    The softmax between the two needs rows of equal length: it is taken in a dense matrix into which
    the scores are copied block by block, and which is -inf elsewhere.

    In float32 only, because scores have the dtype of the cache. On a CPU only, because
    sampled_addmm has other limits on a GPU.
    """

    def __init__(
        self,
        block_table: Tensor,
        block_size: int,
        seqs: list[int],
        starts: list[int],
        lengths: list[int],
    ) -> None:
        """All queries of `seqs`, which are indices of the block table's first dimension."""
        query_lens = np.array([starts[seq + 1] - starts[seq] for seq in seqs])
        seq_of_token = np.array(seqs).repeat(query_lens)
        first_of_seq = (query_lens.cumsum() - query_lens).repeat(query_lens)
        offsets = np.arange(len(seq_of_token)) - first_of_seq
        seq_lens = np.array([lengths[seq] for seq in seqs])
        num_keys = (seq_lens - query_lens + 1).repeat(query_lens) + offsets
        self.num_keys = num_keys.astype(np.int32)  # [num_tokens]: the keys up to the token's own
        first_token = np.array([starts[seq] for seq in seqs]).repeat(query_lens)
        self.tokens = torch.from_numpy(first_token + offsets)
        self.is_in_order = seqs == list(range(len(lengths)))
        self.block_size = block_size
        num_blocks = -(-int(self.num_keys.max()) // block_size)
        self.blocks = block_table.numpy()[seq_of_token, :num_blocks]  # [num_tokens, num_blocks]
        self._patterns: dict[Hashable, CsrPattern] = {}

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sliding_window: int | None,
        logits_soft_cap: float | None,
        kv_scales: tuple[Tensor, ...] = (),
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (tokens of `query`, their result [len(tokens), num_heads, value_dim]), once."""
        num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
        layer_kind = (len(key_cache), num_heads, num_kv_heads, sliding_window)
        pattern = self._patterns.get(layer_kind)
        if pattern is None:
            pattern = self._patterns[layer_kind] = self.make_pattern(*layer_kind)
        if self.tokens.shape[0] < query.shape[0]:
            query = query.index_select(0, self.tokens)
        keys, values = as_rows(key_cache), as_rows(value_cache)
        scores = pattern.scores
        # sampled_addmm adds 0 times the old scores, and 0 * NaN is NaN: clear them.
        numbers = scores.values().zero_()
        torch.sparse.sampled_addmm(
            scores, query.flatten(0, 1), keys.t(), beta=0.0, alpha=scale, out=scores
        )
        output, *_ = torch.embedding_bag(  # F.embedding_bag without its many checks
            values,
            pattern.col,
            pattern.crow,
            per_sample_weights=pattern.softmax(numbers, logits_soft_cap),
            include_last_offset=True,
        )
        yield self.tokens, output.view(len(query), num_heads, -1)

    def make_pattern(
        self, num_blocks: int, num_heads: int, num_kv_heads: int, sliding_window: int | None
    ) -> CsrPattern:
        """Which rows of the cache (see as_rows) each head of each token reads.

        Head h reads key head h // (heads per key head). Row (block * num_kv_heads + key head) *
        block_size + slot of the cache is what it reads there.

        Scores are copied block by block, so each token reads whole blocks. But its first block may
        begin before its window, and its last block may end after its own position: keys that it
        must not see. In their place the token reads a key that it does see once more, and the score
        of that repetition is set to -inf.
        """
        size, ends = self.block_size, self.num_keys[:, None]  # [num_tokens, 1]
        begins = np.maximum(ends - (sliding_window or ends), 0)  # the token sees [begin, end)
        first, last = int(begins.min()), int(ends.max())
        block = np.arange(first // size, -(-last // size), dtype=np.int32) * size
        is_read = (block < ends) & (block + size > begins)  # [num_tokens, blocks]
        block_ids = self.blocks[:, block // size][is_read]
        if block_ids.min() < 0 or block_ids.max() >= num_blocks:  # PyTorch would read it unchecked
            raise IndexError(f"the block table names a block that is not in 0 .. {num_blocks - 1}.")
        is_even = bool((ends == last).all())
        if not is_even:
            first, last = first // size * size, -(-last // size) * size
        position = np.arange(first, last, dtype=np.int32)
        seen = np.minimum(np.maximum(position, begins), ends - 1)  # [num_tokens, keys]
        slots = self.blocks[:, position // size] * (num_kv_heads * size) + seen
        slots -= position // size * size
        head = np.arange(num_heads, dtype=np.int32) // (num_heads // num_kv_heads) * size
        col = torch.from_numpy(slots[:, None] + head[:, None]).flatten()
        lengths, targets, repeated, dense = np.full(len(seen), len(position)), None, None, None
        if not is_even:
            lengths = is_read.sum(1) * size
            targets = torch.from_numpy(is_read[:, None].repeat(num_heads, 1).ravel().nonzero()[0])
            col = col.view(-1, size).index_select(0, targets).flatten()
            # Index of each repetition among all scores: those of earlier tokens and heads precede.
            token, key = ((seen != position) & is_read.repeat(size, 1)).nonzero()
            key -= is_read.argmax(1)[token] * size
            key += (lengths.cumsum() - lengths)[token] * num_heads
            repeated = torch.from_numpy(
                key + np.arange(num_heads)[:, None] * lengths[token]
            ).flatten()
            dense = torch.full(
                (len(seen) * num_heads, len(position)),
                -torch.inf,
                dtype=torch.float32,
                device="cpu",
            )
        crow = np.append(0, lengths.repeat(num_heads).cumsum())
        shape = (len(crow) - 1, num_blocks * num_kv_heads * size)
        if max(shape[1], crow[-1]) >= 2**31:
            raise ValueError(
                f"attention over a cache of {shape[1]} keys a layer, with {crow[-1]} scores in one "
                "step, is more than 32-bit indices tell apart. Lower num_gpu_blocks_override or "
                "max_num_seqs."
            )
        indices = torch.from_numpy(crow.astype(np.int32)), col
        values = torch.empty(len(col), dtype=torch.float32, device="cpu")
        scores = torch.sparse_csr_tensor(
            *indices, values, shape, device="cpu", check_invariants=False
        )
        return CsrPattern(*indices, scores, targets, repeated, dense)


class CsrPattern(NamedTuple):
    """The scores of one step as a sparse matrix [num_tokens * num_heads, rows of the cache].

    The last three fields are None if all tokens see keys at the same positions.
    """

    crow: Tensor  # [num_tokens * num_heads + 1] int32: where each row's scores begin
    col: Tensor  # [num_scores] int32: the row of the cache that a score belongs to
    scores: Tensor  # sparse CSR, made of the two
    targets: Tensor | None  # [num_scores / block_size] int64: the block of `dense` for each block
    repeated: Tensor | None  # int64: the scores that repeat another one
    dense: Tensor | None  # [num_tokens * num_heads, keys]: -inf where there is no score

    def softmax(self, scores: Tensor, logits_soft_cap: float | None) -> Tensor:
        """Softmax of each row's scores: [num_scores] -> [num_scores]."""
        if logits_soft_cap is not None:
            scores = _cap(scores, logits_soft_cap)
        if self.targets is None or self.dense is None or self.repeated is None:
            return scores.view(len(self.crow) - 1, -1).softmax(-1).view(-1)
        num_blocks = len(self.targets)
        blocks = self.dense.view(-1, len(scores) // num_blocks)
        scores = scores.index_fill_(0, self.repeated, -torch.inf).view(num_blocks, -1)
        blocks.index_copy_(0, self.targets, scores)
        return self.dense.softmax(-1).view_as(blocks).index_select(0, self.targets).view(-1)


with warnings.catch_warnings():  # PyTorch says once that sparse CSR tensors are in beta state
    warnings.simplefilter("ignore", UserWarning)
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1), dtype=torch.float32, device="cpu")


def as_rows(cache: Tensor) -> Tensor:
    """A cache [num_blocks, block_size, num_kv_heads, dim] as a table of vectors, in the order in
    which KVCacheSpec.allocate lays it out (another layout is copied):
    [num_blocks * num_kv_heads * block_size, dim]."""
    return cache.transpose(1, 2).flatten(0, 2)


class GatheredPrefill:
    """Sequences with equally many queries, their keys padded to the longest of them: their blocks
    are copied together, and attended to as dense tensors.

    What depends on the sequences alone is computed when the first layer needs it, and kept until
    the step ends.
    """

    def __init__(
        self,
        block_table: Tensor,
        block_size: int,
        query_len: int,
        seqs: list[int],
        starts: list[int],
        lengths: list[int],
    ) -> None:
        device = block_table.device
        self.query_len = query_len
        self.lengths = [lengths[seq] for seq in seqs]
        self.max_length = max(self.lengths)
        self.block_size = block_size
        self.num_blocks = -(-self.max_length // block_size)
        self.block_table = block_table[seqs, : self.num_blocks].long()
        self.seq_lens = torch.tensor(self.lengths, device=device)
        self.starts = torch.tensor([starts[seq] for seq in seqs], device=device)
        self.is_in_order = seqs == list(range(len(lengths)))  # the whole step, in its own order
        self.is_even = len(set(self.lengths)) == 1  # no sequence is padded
        if not self.is_even:  # behind a sequence's last block, the table may hold anything
            first_key = torch.arange(self.num_blocks, device=device) * block_size
            self.block_table.masked_fill_(first_key >= self.seq_lens[:, None], 0)
        self._kept: dict[Hashable, Tensor] = {}

    def _keep(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sliding_window: int | None,
        logits_soft_cap: float | None,
        kv_scales: tuple[Tensor, ...] = (),
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields (tokens of `query`, their result [len(tokens), num_heads, value_dim]), one tile of
        queries after the other."""
        caches = zip((key_cache, value_cache), kv_scales or (None, None), strict=True)
        keys, values = (self.gather(cache, scales).to(query.dtype) for cache, scales in caches)
        heads_per_kv_head = query.shape[1] // key_cache.shape[2]
        for first, last in self.query_tiles():
            tokens = self.tokens(first, last)
            is_all = len(tokens) == len(query) and self.is_in_order
            tile = query if is_all else query.index_select(0, tokens)
            num_visible = self.num_visible(last)
            attended = _dense_attention(
                tile.unflatten(0, (-1, last - first)),
                keys[:, :, :num_visible],
                values[:, :, :num_visible],
                self.mask(first, last, heads_per_kv_head, sliding_window),
                scale,
                logits_soft_cap,
            )
            yield tokens, attended.flatten(0, 1)

    def gather(self, cache: Tensor, scales: Tensor | None = None) -> Tensor:
        """The keys (or values) of each sequence, in order: [batch, num_kv_heads, keys, dim], with 0
        behind a sequence's last one. If the cache has 8 bits, they are multiplied by its scales.

        The padding is cleared because unused slots of a block hold old numbers of other requests: a
        NaN among them would pass through a mask (0 * NaN = NaN). index_select on rows of (block,
        head) is several times faster than cache[blocks], and needs no transposition after it.
        """
        if scales is not None:  # as bytes, because PyTorch fills no rows of fp8
            numbers = self.gather(cache.view(torch.int8)).view(cache.dtype)
            return numbers.float() * self.gather(scales)
        num_kv_heads, num_keys = cache.shape[2], self.num_blocks * self.block_size
        rows = self._keep(("rows", num_kv_heads), lambda: self._rows_of_cache(num_kv_heads))
        gathered = cache.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, rows)
        if not self.is_even:
            padding = self._keep(("padding", num_kv_heads), lambda: self._padding(num_kv_heads))
            gathered.view(-1, cache.shape[-1]).index_fill_(0, padding, 0)
        return gathered.view(len(self.lengths), num_kv_heads, num_keys, -1)

    def _rows_of_cache(self, num_kv_heads: int) -> Tensor:
        """Row block * num_kv_heads + head of the cache, for [batch, head, block], flat."""
        heads = torch.arange(num_kv_heads, device=self.seq_lens.device)
        return (self.block_table[:, None] * num_kv_heads + heads[:, None]).flatten()

    def _padding(self, num_kv_heads: int) -> Tensor:
        """Which of the gathered keys, [batch, head, key], flat, are beyond their sequence."""
        position = torch.arange(self.num_blocks * self.block_size, device=self.seq_lens.device)
        is_padding = position >= self.seq_lens[:, None, None]
        return is_padding.expand(-1, num_kv_heads, -1).flatten().nonzero()[:, 0]

    def query_tiles(self) -> list[tuple[int, int]]:
        """Ranges of queries of a sequence that are attended to at once."""
        firsts = range(0, self.query_len, QUERY_TILE)
        return [(first, min(first + QUERY_TILE, self.query_len)) for first in firsts]

    def num_visible(self, last: int) -> int:
        """Keys that queries up to `last` (exclusive) see at most."""
        return self.max_length - self.query_len + last

    def tokens(self, first: int, last: int) -> Tensor:
        """Where queries first .. last - 1 of each sequence are in the step, flat."""
        return self._keep(("tokens", first), lambda: self._make_tokens(first, last))

    def _make_tokens(self, first: int, last: int) -> Tensor:
        offsets = torch.arange(first, last, device=self.seq_lens.device)
        return (self.starts[:, None] + offsets).flatten()

    def mask(
        self, first: int, last: int, heads_per_kv_head: int, sliding_window: int | None
    ) -> Tensor | None:
        """[batch, 1, heads_per_kv_head * queries, keys]: True where a query sees a key; None where
        all queries see all keys."""
        is_within = sliding_window is None or self.max_length <= sliding_window
        if self.query_len == 1 and self.is_even and is_within:
            return None
        return self._keep(
            ("mask", first, heads_per_kv_head, sliding_window),
            lambda: self._make_mask(first, last, heads_per_kv_head, sliding_window),
        )

    def _make_mask(
        self, first: int, last: int, heads_per_kv_head: int, sliding_window: int | None
    ) -> Tensor:
        device = self.seq_lens.device
        queries = torch.arange(first, last, device=device)
        position = (self.seq_lens - self.query_len)[:, None] + queries
        distance = position[:, :, None] - torch.arange(self.num_visible(last), device=device)
        mask = distance >= 0  # [batch, queries, keys]
        if sliding_window is not None:
            mask &= distance < sliding_window
        return mask[:, None].expand(-1, heads_per_kv_head, -1, -1).flatten(1, 2)[:, None]


def _batches_of_similar_length(
    seqs: list[int], query_lens: list[int], lengths: list[int]
) -> Iterator[tuple[int, list[int]]]:
    """Group sequences by number of queries, then split each group so that a batch is padded by at
    most MAX_PADDING keys.

    Yields (query_len, seqs). With lengths [10, 90, 100], one query each and MAX_PADDING 50: [0],
    then [1, 2].
    """
    by_query_len: dict[int, list[int]] = defaultdict(list)
    for seq in seqs:
        by_query_len[query_lens[seq]].append(seq)
    for query_len, group in by_query_len.items():
        padded = max(lengths[seq] for seq in group) * len(group)
        if padded - sum(lengths[seq] for seq in group) <= MAX_PADDING:
            yield query_len, group  # all together, in the step's own order
            continue
        batch: list[int] = []
        total = 0
        for seq in sorted(group, key=lengths.__getitem__):
            if lengths[seq] * len(batch) - total > MAX_PADDING:
                yield query_len, batch
                batch, total = [], 0
            batch.append(seq)
            total += lengths[seq]
        yield query_len, batch


def _dense_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    logits_soft_cap: float | None,
) -> Tensor:
    """Attention of a padded batch: query [batch, q, num_heads, dim] over keys and values [batch,
    num_kv_heads, k, dim]. Returns [batch, q, num_heads, value_dim].

    The query heads that share a key head (GQA) become further queries of that head, so that keys
    and values are never repeated in memory.
    """
    num_queries, num_heads = query.shape[1:3]
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    query = query.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if logits_soft_cap is None:
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    else:
        scores = _cap(query @ keys.transpose(2, 3) * scale, logits_soft_cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        output = scores.float().softmax(-1).to(values.dtype) @ values
    return output.unflatten(2, (group, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _cap(scores: Tensor, logits_soft_cap: float) -> Tensor:
    """Bring scores smoothly between -cap and cap."""
    return logits_soft_cap * torch.tanh(scores / logits_soft_cap)
