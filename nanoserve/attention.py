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

The functions named `..._torch` are the specification, and what a CPU runs; those named
`..._triton` (attention_triton.py) are what a GPU runs. Nothing is passed by a
global forward context (vLLM and nano-vllm have one): what attention reads stands in its signature.

vLLM: vllm/attention/: selector.py, backends/, ops/paged_attn.py (V0); vllm/v1/attention/:
selector.py, backend.py, ops/triton_unified_attention.py (V1). Paper: PagedAttention, arXiv
2309.06180.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

KVCache = tuple[Tensor, Tensor]  # key and value cache of one layer

QUERY_TILE = 256  # queries of one sequence attended to at once: bounds the size of the mask
SPARE_BLOCKS = 2  # room behind gathered keys, so that the next steps can add theirs
MAX_PADDING = 512  # keys: a further batch costs about as much as gathering so many for nothing


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
            zeros_on_demand((*shape, self.key_dim), dtype, device).transpose(1, 2),
            zeros_on_demand((*shape, self.value_dim), dtype, device).transpose(1, 2),
        )


def zeros_on_demand(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """torch.zeros; on a CPU, memory that takes up room only once it is written (torch.zeros writes
    its zeros at once: 1.5 s for the demo model's default cache of 1.3 GB)."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of one step belong; the same for all layers."""

    slot_mapping: Tensor  # [num_tokens] int64: where to store each token's key and value
    block_table: Tensor  # [num_seqs, max_blocks] int32
    query_start_loc: Tensor  # [num_seqs + 1] int32: tokens [loc[i], loc[i + 1]) are sequence i's
    seq_lens: Tensor  # [num_seqs] int32: keys after this step
    plan: Any = None  # what the backend's make_plan prepared for all layers, if it has one


def store_kv_torch(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Write key and value [num_tokens, num_kv_heads, dim] to their slots; skip negative slots."""
    if (slot_mapping < 0).any():
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    block_size = key_cache.shape[1]
    block, slot = slot_mapping // block_size, slot_mapping % block_size
    key_cache[block, slot] = key
    value_cache[block, slot] = value


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
    plan: list[Batch] | None = None,
) -> Tensor:
    """Causal attention of ragged queries over paged keys and values.

    query            [num_tokens, num_heads, key_dim]
    key_cache        [num_blocks, block_size, num_kv_heads, key_dim]
    value_cache      [num_blocks, block_size, num_kv_heads, value_dim]
    block_table      [num_seqs, max_blocks] int32
    query_start_loc  [num_seqs + 1] int32
    seq_lens         [num_seqs] int32: keys after this step
    returns          [num_tokens, num_heads, value_dim]

    Sequences with the same number of queries and about the same length are padded to one batch:
    all decodes of a step become a few calls instead of one for each. `plan` is what
    plan_attention_torch made of the same tables, once for all layers; None: made here.
    """
    (num_tokens, num_heads, _), (block_size, num_kv_heads) = query.shape, key_cache.shape[1:3]
    output = query.new_empty(num_tokens, num_heads, value_cache.shape[-1])
    if plan is None:
        plan = plan_attention_torch(block_table, query_start_loc, seq_lens, block_size)
    for batch in plan:
        keys, values = batch.gather(key_cache), batch.gather(value_cache)
        for first, last in batch.query_tiles():
            tokens = batch.tokens(first, last)  # rows of `query`
            is_all = len(tokens) == num_tokens and batch.is_in_order  # the most common case
            rows = query if is_all else query.index_select(0, tokens)
            visible = batch.num_visible(last)
            attended = _attend(
                rows.unflatten(0, (-1, last - first)),
                keys[:, :, :visible],
                values[:, :, :visible],
                batch.mask(first, last, num_heads // num_kv_heads, sliding_window),
                scale,
                logits_soft_cap,
            ).flatten(0, 1)
            if is_all:
                return attended
            output.index_copy_(0, tokens, attended)
    return output


def plan_attention_torch(
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_size: int,
    seq_ids: tuple[int, ...] | None = None,
    previous: list[Batch] | None = None,
) -> list[Batch]:
    """Which sequences of a step are attended to together.

    Given who they are (`seq_ids`) and the plan of the step just before, batches that go on
    decoding take over what that step gathered.
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    before = {batch.seq_ids: batch for batch in previous or ()}
    batches = []
    for query_len, rows in _batches_of_similar_length(starts, lengths):
        batch = Batch(block_table, block_size, query_len, rows, starts, lengths, seq_ids)
        batch.continue_from(before.get(batch.seq_ids))
        batches.append(batch)
    return batches


class Batch:
    """Sequences that bring equally many queries, padded to the longest of them.

    What depends on them alone is computed once a step, when the first layer asks, and kept.

    Gathering pages is most of what attention costs here, and from one decode to the next a sequence
    changes by one key. So a decoding batch keeps what it gathered, with some room behind it, and
    passes it on: as long as the same sequences decode, each step adds one key to each. The price is
    memory: up to as much again as the decoding sequences' own keys and values, until the next step
    of other sequences.
    """

    def __init__(
        self,
        block_table: Tensor,
        block_size: int,
        query_len: int,
        rows: list[int],
        starts: list[int],
        lengths: list[int],
        seq_ids: tuple[int, ...] | None = None,
    ) -> None:
        device = block_table.device
        self.query_len = query_len
        self.length = max(lengths[row] for row in rows)
        self.lengths = [lengths[row] for row in rows]
        self.seq_ids = tuple(seq_ids[row] for row in rows) if seq_ids else ()
        self.block_size = block_size
        self.block_table = block_table[rows].long()
        self.seq_lens = torch.tensor(self.lengths, device=device)
        self.starts = torch.tensor([starts[row] for row in rows], device=device)
        self.is_in_order = rows == list(range(len(lengths)))  # it is the whole step, as it stands
        self.is_even = len(set(self.lengths)) == 1  # no sequence is padded
        self.keeps_gathered = query_len == 1 and bool(self.seq_ids)
        self._kept: dict[Hashable, Tensor] = {}  # until the step ends
        self._gathered: dict[int, Tensor] = {}  # by cache; passed on

    def continue_from(self, before: Batch | None) -> None:
        """Take over what the last step gathered, if there each sequence was just one key shorter
        (and not, say, preempted and back since then)."""
        if not self.keeps_gathered or before is None:
            return
        if [length + 1 for length in before.lengths] == self.lengths:
            self._gathered = before._gathered

    def _keep(self, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._kept:
            self._kept[name] = make()
        return self._kept[name]

    def gather(self, cache: Tensor) -> Tensor:
        """Each sequence's keys (or values) together: [batch, num_kv_heads, keys, dim], `keys` being
        at least `length`, and 0 behind a sequence's last one."""
        if self.keeps(cache):
            gathered = self._gathered[cache.data_ptr()]
            self._add_newest(cache, gathered)
            return gathered
        num_blocks = -(-self.length // self.block_size)
        gathered = self._gather(cache, num_blocks, SPARE_BLOCKS if self.keeps_gathered else 0)
        if self.keeps_gathered:
            self._gathered[cache.data_ptr()] = gathered
        return gathered

    def keeps(self, cache: Tensor) -> bool:
        """True if all but the newest keys are gathered already, and there is room for these."""
        gathered = self._gathered.get(cache.data_ptr())
        return gathered is not None and self.length <= gathered.shape[2]

    def _gather(self, cache: Tensor, num_blocks: int, num_spare: int) -> Tensor:
        """Copy the blocks.

        What is behind a sequence's last key is cleared because a block's unused slots hold another
        request's old numbers: a NaN among them would pass through a mask (0 * NaN = NaN).
        index_select on rows of (block, head) is several times faster than cache[blocks], and needs
        no transposition after it.
        """
        num_kv_heads, num_keys = cache.shape[2], (num_blocks + num_spare) * self.block_size
        names = ("blocks", num_kv_heads, num_keys), ("padding", num_kv_heads, num_keys)
        rows = self._keep(
            names[0], lambda: self._rows_of_cache(num_kv_heads, num_blocks, num_spare)
        )
        gathered = cache.transpose(1, 2).flatten(0, 1).flatten(1).index_select(0, rows)
        if num_spare or not self.is_even:
            padding = self._keep(names[1], lambda: self._padding(num_kv_heads, num_keys))
            gathered.view(-1, cache.shape[-1]).index_fill_(0, padding, 0)
        return gathered.view(len(self.lengths), num_kv_heads, num_keys, -1)

    def _add_newest(self, cache: Tensor, gathered: Tensor) -> None:
        """Copy each sequence's last key from its block."""
        num_kv_heads, num_keys = gathered.shape[1:3]
        name = num_kv_heads, num_keys
        source = self._keep(("newest", *name), lambda: self._newest_of_cache(num_kv_heads))
        target = self._keep(("place", *name), lambda: self._newest_of_gathered(*name))
        newest = cache.transpose(1, 2).flatten(0, 2).index_select(0, source)
        gathered.view(-1, cache.shape[-1]).index_copy_(0, target, newest)

    def _newest_of_cache(self, num_kv_heads: int) -> Tensor:
        """Where each sequence's last key is among the (block, head, slot) of the cache."""
        block, slot = (self.seq_lens - 1) // self.block_size, (self.seq_lens - 1) % self.block_size
        block = self.block_table.gather(1, block[:, None])
        heads = torch.arange(num_kv_heads, device=block.device)
        return ((block * num_kv_heads + heads) * self.block_size + slot[:, None]).flatten()

    def _newest_of_gathered(self, num_kv_heads: int, num_keys: int) -> Tensor:
        """The same among the [batch, head, key] of what was gathered."""
        rows = torch.arange(len(self.lengths) * num_kv_heads, device=self.seq_lens.device)
        return rows * num_keys + (self.seq_lens - 1).repeat_interleave(num_kv_heads)

    def _rows_of_cache(self, num_kv_heads: int, num_blocks: int, num_spare: int) -> Tensor:
        """Row block * num_kv_heads + head of the cache, for [batch, head, block], flat. Spare room
        is filled from the last block, to be cleared."""
        device = self.seq_lens.device
        columns = torch.arange(num_blocks + num_spare, device=device).clamp_(max=num_blocks - 1)
        blocks = self.block_table.index_select(1, columns)[:, None]
        heads = torch.arange(num_kv_heads, device=device)
        return (blocks * num_kv_heads + heads[:, None]).flatten()

    def _padding(self, num_kv_heads: int, num_keys: int) -> Tensor:
        """Which of the gathered keys, [batch, head, key], flat, are beyond their sequence."""
        position = torch.arange(num_keys, device=self.seq_lens.device)
        is_padding = position >= self.seq_lens[:, None, None]
        return is_padding.expand(-1, num_kv_heads, -1).flatten().nonzero()[:, 0]

    def query_tiles(self) -> list[tuple[int, int]]:
        """Ranges of queries of a sequence that are attended to at once."""
        firsts = range(0, self.query_len, QUERY_TILE)
        return [(first, min(first + QUERY_TILE, self.query_len)) for first in firsts]

    def num_visible(self, last: int) -> int:
        """Keys that queries up to `last` (exclusive) see at most."""
        return self.length - self.query_len + last

    def tokens(self, first: int, last: int) -> Tensor:
        """Where queries first .. last - 1 of each sequence are in the step, flat."""
        return self._keep(("tokens", first), lambda: self._make_tokens(first, last))

    def _make_tokens(self, first: int, last: int) -> Tensor:
        offsets = torch.arange(first, last, device=self.seq_lens.device)
        return (self.starts[:, None] + offsets).flatten()

    def mask(self, first: int, last: int, group: int, sliding_window: int | None) -> Tensor | None:
        """[batch, 1, group * queries, keys]: True where a query sees a key; None where all see all.
        The query heads that share a key head are further rows of it."""
        is_within = sliding_window is None or self.length <= sliding_window
        if self.query_len == 1 and self.is_even and is_within:
            return None
        return self._keep(
            ("mask", first, group, sliding_window),
            lambda: self._make_mask(first, last, group, sliding_window),
        )

    def _make_mask(self, first: int, last: int, group: int, sliding_window: int | None) -> Tensor:
        device = self.seq_lens.device
        position = (self.seq_lens - self.query_len)[:, None] + torch.arange(
            first, last, device=device
        )
        distance = position[:, :, None] - torch.arange(self.num_visible(last), device=device)
        mask = distance >= 0  # [batch, queries, keys]
        if sliding_window is not None:
            mask &= distance < sliding_window
        return mask[:, None].expand(-1, group, -1, -1).flatten(1, 2)[:, None]


def _batches_of_similar_length(
    starts: list[int], lengths: list[int]
) -> Iterator[tuple[int, list[int]]]:
    """Group rows by number of queries, then split each group so that a batch is padded by at most
    MAX_PADDING keys.

    Yields (query_len, rows). With lengths [10, 90, 100], one query each and MAX_PADDING 50: [0],
    then [1, 2].
    """
    by_query_len: dict[int, list[int]] = defaultdict(list)
    for row in range(len(lengths)):
        if starts[row + 1] > starts[row]:
            by_query_len[starts[row + 1] - starts[row]].append(row)
    for query_len, rows in by_query_len.items():
        most = max(lengths[row] for row in rows) * len(rows)
        if most - sum(lengths[row] for row in rows) <= MAX_PADDING:
            yield query_len, rows  # all together, in the step's own order
            continue
        batch: list[int] = []
        total = 0
        for row in sorted(rows, key=lengths.__getitem__):
            if lengths[row] * len(batch) - total > MAX_PADDING:
                yield query_len, batch
                batch, total = [], 0
            batch.append(row)
            total += lengths[row]
        yield query_len, batch


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    logits_soft_cap: float | None,
) -> Tensor:
    """Dense attention of a padded batch: query [batch, q, num_heads, dim] over keys and values
    [batch, num_kv_heads, k, dim]. Returns [batch, q, num_heads, value_dim].

    The query heads that share a key head (GQA) become further query rows of that head, so that
    keys and values are never repeated in memory.
    """
    num_queries, num_heads = query.shape[1:3]
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    query = query.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if logits_soft_cap is None:
        output = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    else:
        scores = query @ keys.transpose(2, 3) * scale
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        output = scores.float().softmax(-1).to(values.dtype) @ values
    return output.unflatten(2, (group, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)


class AttentionBackend(NamedTuple):
    """A pair of functions with the signatures above: one implementation of attention."""

    name: str
    store_kv: Callable[..., None]
    paged_attention: Callable[..., Tensor]
    can_be_captured: bool = False  # in a CUDA graph: launches depend on nothing but shapes
    # What is the same for all layers: (block_table, query_start_loc, seq_lens, block_size, seq_ids,
    # the last step's plan or None) -> what paged_attention takes as `plan`.
    make_plan: Callable[..., Any] | None = None

    def attend(
        self,
        query: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
    ) -> Tensor:
        """paged_attention, for a layer that has the step's metadata at hand."""
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
    "torch", store_kv_torch, paged_attention_torch, make_plan=plan_attention_torch
)


def choose_backend(
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
    from nanoserve.attention_triton import paged_attention_triton, store_kv_triton

    return AttentionBackend("triton", store_kv_triton, paged_attention_triton, True)
