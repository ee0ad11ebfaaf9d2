"""How does a CPU read scattered keys?

With PyTorch's own operators, in one of two ways. A decode's query uses each key once, so that what
counts is how often memory is touched: its keys and values are read where they lie (PagedTokens). A
prompt's many queries use each key many times: its pages are copied together first, and then it is
dense attention like any other (GatheredBatch). What does not depend on a layer's numbers is found
out once a step, in a StepPlan.

    one step   seq 0: 1 query   seq 1: 300 queries   seq 2: 1 query   seq 3: 300 queries
    its parts  PagedTokens [seq 0, seq 2]            GatheredBatch [seq 1, seq 3]

What both must give is said in attention.py; tests/attention_oracle.py says it in Python loops.

vLLM: vllm/attention/backends/torch_sdpa.py, ops/ipex_attn.py (V0);
vllm/v1/attention/backends/cpu_attn.py (V1; the work itself is C++).
"""

from __future__ import annotations

import itertools
import warnings
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_TILE = 256  # queries of one sequence attended to at once: bounds the size of the mask
FEW_QUERIES = 4  # of one sequence: up to here its keys are read where they lie
MAX_PADDING = 512  # keys: a further batch costs about as much as gathering so many for nothing


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
    place = plan.place if plan else Place.of(slot_mapping, key_cache.shape[1])
    if place.kept is not None:
        key, value = key[place.kept], value[place.kept]
    key_cache[place.block, place.slot] = key
    value_cache[place.block, place.slot] = value


class Place(NamedTuple):
    """Slots as indices of a cache."""

    block: Tensor  # [num_kept] int64
    slot: Tensor  # [num_kept] int64, within its block
    kept: Tensor | None  # [num_tokens] bool: not skipped; None: all

    @classmethod
    def of(cls, slot_mapping: Tensor, block_size: int) -> Place:
        """Of a step's slots [num_tokens]."""
        kept = None
        if (slot_mapping < 0).any():
            kept = slot_mapping >= 0
            slot_mapping = slot_mapping[kept]
        return cls(slot_mapping // block_size, slot_mapping % block_size, kept)


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

    Prompts are gathered: their pages are copied together, for one dense product (GatheredBatch).
    Decodes read the pages where they lie (PagedTokens). `plan` is what plan_step_torch made of the
    same tables, once for all layers; None: made here. On a CPU, raises IndexError for a block
    that the cache does not have; what stands behind a sequence's last block is not looked at.
    """
    output = query.new_empty(*query.shape[:2], value_cache.shape[-1])
    parts = plan.parts if plan else None
    if parts is None:
        block_size = key_cache.shape[1]
        parts = divide_step(block_table, query_start_loc, seq_lens, block_size, query.dtype)
    for part in parts:
        attended = part.attend(
            query, key_cache, value_cache, scale, sliding_window, logits_soft_cap
        )
        for tokens, rows in attended:
            if tokens.shape[0] == query.shape[0] and part.is_in_order:  # the most common case
                return rows
            output.index_copy_(0, tokens, rows)
    return output


class StepPlan(NamedTuple):
    """What store_kv_torch and paged_attention_torch need to know of a step in every layer."""

    place: Place
    parts: list[GatheredBatch | PagedTokens]


def plan_step_torch(
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_size: int,
    dtype: torch.dtype,
) -> StepPlan:
    """Made once a step; `dtype` is that of the cache."""
    parts = divide_step(block_table, query_start_loc, seq_lens, block_size, dtype)
    return StepPlan(Place.of(slot_mapping, block_size), parts)


def divide_step(
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_size: int,
    dtype: torch.dtype,
) -> list[GatheredBatch | PagedTokens]:
    """Which tokens of a step are attended to together, and how.

    A sequence with few queries reads each key for little work: copying keys together would cost
    more than the work itself. (Which needs float32 on a CPU: see PagedTokens.)
    """
    starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
    query_lens = [end - start for start, end in itertools.pairwise(starts)]
    can_be_paged = dtype == torch.float32 and block_table.device.type == "cpu"
    is_few = [can_be_paged and number <= FEW_QUERIES for number in query_lens]
    few = [row for row, number in enumerate(query_lens) if number and is_few[row]]
    many = [row for row, number in enumerate(query_lens) if number and not is_few[row]]
    parts: list[GatheredBatch | PagedTokens] = []
    if few:
        parts.append(PagedTokens(block_table, block_size, few, starts, lengths))
    for query_len, rows in _batches_of_similar_length(many, query_lens, lengths):
        parts.append(GatheredBatch(block_table, block_size, query_len, rows, starts, lengths))
    return parts


class PagedTokens:
    """Tokens that read their keys and values where they lie, in the pages.

    Seen as a matrix, queries x slots of the cache, the scores of a step are a few numbers in each
    row: where the row's sequence has its keys. That is a sparse matrix, and PyTorch has both
    products with one: `sampled_addmm` computes a dense product at given places only (the scores),
    and `embedding_bag` sums the rows of a table with given weights (the values). No page is copied.

                        slots of the cache                  block_size 2, block tables [0, 2], [1]
        token of seq 0  s  s  .  .  s  .        crow  [0, 3, 5]
        token of seq 1  .  .  s  s  .  .        col   [0, 1, 4, 2, 3]

    Between the two, the softmax wants rows of equal length: block by block, the scores are laid
    into a dense matrix that is -inf elsewhere.

    float32 only, because scores are kept in the dtype of the cache. On a CPU only: elsewhere
    sampled_addmm is another program, with other limits.
    """

    def __init__(
        self,
        block_table: Tensor,
        block_size: int,
        rows: list[int],
        starts: list[int],
        lengths: list[int],
    ) -> None:
        """All queries of the sequences in `rows` of the block table."""
        query_lens = np.array([starts[row + 1] - starts[row] for row in rows])
        row_of = np.array(rows).repeat(query_lens)
        offsets = np.arange(len(row_of)) - (query_lens.cumsum() - query_lens).repeat(query_lens)
        ends = np.array([lengths[row] for row in rows])
        num_keys = (ends - query_lens + 1).repeat(query_lens) + offsets
        self.num_keys = num_keys.astype(np.int32)  # [num_tokens]
        first = np.array([starts[row] for row in rows]).repeat(query_lens)
        self.tokens = torch.from_numpy(first + offsets)
        self.is_in_order = rows == list(range(len(lengths)))
        self.block_size = block_size
        num_blocks = -(-int(self.num_keys.max()) // block_size)
        self.blocks = block_table.numpy()[row_of, :num_blocks]  # [num_tokens, num_blocks]
        self._pages: dict[Hashable, _Pages] = {}

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sliding_window: int | None,
        logits_soft_cap: float | None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows of `query`, what they read [num_tokens, num_heads, value_dim])."""
        num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
        name = (len(key_cache), num_heads, num_kv_heads, sliding_window)
        pages = self._pages.get(name)
        if pages is None:
            pages = self._pages[name] = self.find_pages(*name)
        if self.tokens.shape[0] < query.shape[0]:
            query = query.index_select(0, self.tokens)
        keys, values = as_rows(key_cache), as_rows(value_cache)
        scores = pages.scores
        numbers = scores.values().zero_()  # sampled_addmm adds 0 times them, and 0 * NaN is NaN
        torch.sparse.sampled_addmm(
            scores, query.flatten(0, 1), keys.t(), beta=0.0, alpha=scale, out=scores
        )
        output, *_ = torch.embedding_bag(  # F.embedding_bag without its many checks
            values,
            pages.col,
            pages.crow,
            per_sample_weights=pages.softmax(numbers, logits_soft_cap),
            include_last_offset=True,
        )
        yield self.tokens, output.view(len(query), num_heads, -1)

    def find_pages(
        self, num_blocks: int, num_heads: int, num_kv_heads: int, sliding_window: int | None
    ) -> _Pages:
        """Where each head of each token reads.

        Head h reads key head h // (heads per key head), and the slots of a head lie together in
        their block: row (block * num_kv_heads + head) * block_size + slot. Whole blocks are read:
        what a token does not see of its first or last one is a repetition of what it does see,
        because the unused slots hold anything, and is -inf in the softmax.
        """
        size, ends = self.block_size, self.num_keys[:, None]  # [num_tokens, 1]
        begins = np.maximum(ends - (sliding_window or ends), 0)
        first, last = int(begins.min()), int(ends.max())
        block = np.arange(first // size, -(-last // size), dtype=np.int32) * size
        is_read = (block < ends) & (block + size > begins)  # [num_tokens, blocks]
        read = self.blocks[:, block // size][is_read]
        if read.min() < 0 or read.max() >= num_blocks:  # it would be read, wherever that is
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
        lengths, places, unseen, dense = np.full(len(seen), len(position)), None, None, None
        if not is_even:
            lengths = is_read.sum(1) * size
            places = torch.from_numpy(is_read[:, None].repeat(num_heads, 1).ravel().nonzero()[0])
            col = col.view(-1, size).index_select(0, places).flatten()
            # What is repeated, behind the scores of the tokens and heads before it.
            token, key = ((seen != position) & is_read.repeat(size, 1)).nonzero()
            key -= is_read.argmax(1)[token] * size
            key += (lengths.cumsum() - lengths)[token] * num_heads
            unseen = torch.from_numpy(
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
                "step, is more than 32-bit indices tell apart. Lower num_kv_blocks or max_num_seqs."
            )
        pattern = torch.from_numpy(crow.astype(np.int32)), col
        values = torch.empty(len(col), dtype=torch.float32, device="cpu")
        scores = torch.sparse_csr_tensor(*pattern, values, shape, check_invariants=False)
        return _Pages(*pattern, scores, places, unseen, dense)


class _Pages(NamedTuple):
    """The pattern of one step's scores, [num_tokens * num_heads, rows of the cache]. The last three
    are None if all tokens see equally many keys, at the same positions."""

    crow: Tensor  # [num_tokens * num_heads + 1] int32
    col: Tensor  # [num_scores] int32
    scores: Tensor  # sparse CSR
    places: Tensor | None  # [num_scores / block_size] int64: these blocks' scores in `dense`
    unseen: Tensor | None  # int64: which of the scores are of keys that are repeated
    dense: Tensor | None  # [num_tokens * num_heads, keys]: -inf where there is no score

    def softmax(self, scores: Tensor, logits_soft_cap: float | None) -> Tensor:
        """Of each row's scores; [num_scores], flat, as given."""
        if logits_soft_cap is not None:
            scores = _cap(scores, logits_soft_cap)
        if self.places is None or self.dense is None or self.unseen is None:
            return scores.view(len(self.crow) - 1, -1).softmax(-1).view(-1)
        num_blocks = len(self.places)
        blocks = self.dense.view(-1, len(scores) // num_blocks)
        scores = scores.index_fill_(0, self.unseen, -torch.inf).view(num_blocks, -1)
        blocks.index_copy_(0, self.places, scores)
        return self.dense.softmax(-1).view_as(blocks).index_select(0, self.places).view(-1)


with warnings.catch_warnings():  # PyTorch says once that sparse CSR tensors are in beta state
    warnings.simplefilter("ignore", UserWarning)
    torch.sparse_csr_tensor([0, 0], [], [], (1, 1), dtype=torch.float32, device="cpu")


def as_rows(cache: Tensor) -> Tensor:
    """A cache [num_blocks, block_size, num_kv_heads, dim] as its vectors, in the order in which
    KVCacheSpec.allocate has them in memory (one that is laid out otherwise is copied):
    [num_blocks * num_kv_heads * block_size, dim]."""
    return cache.transpose(1, 2).flatten(0, 2)


class GatheredBatch:
    """Sequences that bring equally many queries, padded to the longest of them: their pages are
    copied together, and attended to as dense tensors.

    What depends on them alone is computed once a step, when the first layer asks, and kept.
    """

    def __init__(
        self,
        block_table: Tensor,
        block_size: int,
        query_len: int,
        rows: list[int],
        starts: list[int],
        lengths: list[int],
    ) -> None:
        device = block_table.device
        self.query_len = query_len
        self.length = max(lengths[row] for row in rows)
        self.lengths = [lengths[row] for row in rows]
        self.block_size = block_size
        self.num_blocks = -(-self.length // block_size)
        self.block_table = block_table[rows, : self.num_blocks].long()
        self.seq_lens = torch.tensor(self.lengths, device=device)
        self.starts = torch.tensor([starts[row] for row in rows], device=device)
        self.is_in_order = rows == list(range(len(lengths)))  # it is the whole step, as it stands
        self.is_even = len(set(self.lengths)) == 1  # no sequence is padded
        if not self.is_even:  # behind a sequence's last block, the table may hold anything
            first_key = torch.arange(self.num_blocks, device=device) * block_size
            self.block_table.masked_fill_(first_key >= self.seq_lens[:, None], 0)
        self._kept: dict[Hashable, Tensor] = {}  # until the step ends

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
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """(rows of `query`, what they read [rows, num_heads, value_dim]), tile after tile."""
        keys, values = self.gather(key_cache), self.gather(value_cache)
        group = query.shape[1] // key_cache.shape[2]
        for first, last in self.query_tiles():
            tokens = self.tokens(first, last)
            is_all = len(tokens) == len(query) and self.is_in_order
            rows = query if is_all else query.index_select(0, tokens)
            visible = self.num_visible(last)
            attended = _attend(
                rows.unflatten(0, (-1, last - first)),
                keys[:, :, :visible],
                values[:, :, :visible],
                self.mask(first, last, group, sliding_window),
                scale,
                logits_soft_cap,
            )
            yield tokens, attended.flatten(0, 1)

    def gather(self, cache: Tensor) -> Tensor:
        """Each sequence's keys (or values) together: [batch, num_kv_heads, keys, dim], `keys` being
        at least `length`, and 0 behind a sequence's last one.

        What is behind a sequence's last key is cleared because a block's unused slots hold another
        request's old numbers: a NaN among them would pass through a mask (0 * NaN = NaN).
        index_select on rows of (block, head) is several times faster than cache[blocks], and needs
        no transposition after it.
        """
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
    rows: list[int], query_lens: list[int], lengths: list[int]
) -> Iterator[tuple[int, list[int]]]:
    """Group rows by number of queries, then split each group so that a batch is padded by at most
    MAX_PADDING keys.

    Yields (query_len, rows). With lengths [10, 90, 100], one query each and MAX_PADDING 50: [0],
    then [1, 2].
    """
    by_query_len: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        by_query_len[query_lens[row]].append(row)
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
        scores = _cap(query @ keys.transpose(2, 3) * scale, logits_soft_cap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        output = scores.float().softmax(-1).to(values.dtype) @ values
    return output.unflatten(2, (group, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _cap(scores: Tensor, logits_soft_cap: float) -> Tensor:
    """Bring scores smoothly between -cap and cap."""
    return logits_soft_cap * torch.tanh(scores / logits_soft_cap)
