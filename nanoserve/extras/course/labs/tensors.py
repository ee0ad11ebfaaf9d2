"""Steps with scattered blocks, and attention as a loop over single queries, for lab 6.

    case = make_case([(1, 6), (3, 3)])     a decode at 6 tokens; a prompt of 3, block_size 4
    case.metadata, case.caches, case.query
    compare(case, output)                  Wrong, with the query that is not right

NaN stands in every slot that no sequence owns, and stale entries of a block table name blocks full
of NaN. So what is read and should not be is seen in the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.extras.course.spec import Wrong, must


@dataclass
class Case:
    """One step, and the keys and values of each sequence in order."""

    seqs: list[tuple[int, int]]  # (queries, keys) of each sequence
    query: Tensor  # [num_tokens, num_heads, dim]
    caches: KVCache
    metadata: StepMetadata
    keys: list[Tensor]  # of each sequence: [keys, num_kv_heads, dim]
    values: list[Tensor]


def make_case(
    seqs: list[tuple[int, int]],
    block_size: int = 4,
    num_kv_heads: int = 1,
    group: int = 1,
    seed: int = 0,
    scattered: bool = True,
) -> Case:
    """Random numbers. seqs: (queries, keys) of each sequence, the queries being its last tokens.
    group: query heads that share a key head. scattered: blocks in random order."""
    generator = torch.Generator().manual_seed(seed)
    dim, value_dim = 4, 6
    needed = [-(-keys // block_size) for _, keys in seqs]
    num_blocks = sum(needed) + 2  # the last ones of `order` belong to nobody
    order = torch.arange(num_blocks)
    if scattered:
        order = torch.randperm(num_blocks, generator=generator)
    table = order[-1].repeat(len(seqs), max(needed) + 1).int()
    caches = tuple(
        torch.full((num_blocks, block_size, num_kv_heads, size), math.nan)
        for size in (dim, value_dim)
    )
    keys, values, slots, begin = [], [], [], 0
    for number, (num_queries, num_keys) in enumerate(seqs):
        blocks = order[begin : begin + needed[number]]
        begin += needed[number]
        table[number, : len(blocks)] = blocks
        position = torch.arange(num_keys)
        keys.append(torch.randn(num_keys, num_kv_heads, dim, generator=generator))
        values.append(torch.randn(num_keys, num_kv_heads, value_dim, generator=generator))
        index = blocks[position // block_size], position % block_size
        caches[0][index], caches[1][index] = keys[-1], values[-1]
        slots.append((index[0] * block_size + index[1])[num_keys - num_queries :])
    starts = torch.tensor([0, *(queries for queries, _ in seqs)]).cumsum(0).int()
    lengths = torch.tensor([length for _, length in seqs]).int()
    query = 2 * torch.randn(int(starts[-1]), num_kv_heads * group, dim, generator=generator)
    metadata = StepMetadata(torch.cat(slots), table, starts, lengths)
    return Case(seqs, query, (caches[0], caches[1]), metadata, keys, values)


def attend_slowly(
    case: Case, scale: float, window: int | None = None, cap: float | None = None
) -> Tensor:
    """The definition, one query and one head after the other: [num_tokens, num_heads, dim]."""
    rows = []
    starts = case.metadata.query_start_loc.tolist()
    group = case.query.shape[1] // case.keys[0].shape[1]
    for number, (num_queries, num_keys) in enumerate(case.seqs):
        for j in range(num_queries):
            end = num_keys - num_queries + j + 1
            first = 0 if window is None else max(0, end - window)
            heads = []
            for head, query in enumerate(case.query[starts[number] + j].double()):
                key = case.keys[number][first:end, head // group].double()
                score = key @ query * scale
                if cap is not None:
                    score = cap * torch.tanh(score / cap)
                heads.append(
                    score.softmax(0) @ case.values[number][first:end, head // group].double()
                )
            rows.append(torch.stack(heads))
    return torch.stack(rows)


def compare(
    case: Case, output: Tensor, scale: float, window: int | None = None, cap: float | None = None
) -> None:
    """Raise Wrong, naming the first query that is not right."""
    expected = attend_slowly(case, scale, window, cap)
    must(
        output.shape == expected.shape,
        f"the output has the shape {list(output.shape)}, and should have {list(expected.shape)}",
    )
    token = -1
    for number, (num_queries, num_keys) in enumerate(case.seqs):
        for j in range(num_queries):
            token += 1
            for head in range(expected.shape[1]):
                got, right = output[token, head].double(), expected[token, head]
                if torch.allclose(got, right, rtol=1e-4, atol=1e-5):
                    continue
                num_kv_heads, table = case.keys[0].shape[1], case.metadata.block_table[number]
                window_text = "" if window is None else f", and sees {window} keys at most"
                nan_text = ": it read a slot that belongs to nobody" * bool(got.isnan().any())
                raise Wrong(
                    f"sequence {number} has {num_keys} keys and {num_queries} queries: query {j} "
                    f"stands at position {num_keys - num_queries + j}{window_text}. Head {head} of "
                    f"{expected.shape[1]} ({num_kv_heads} key heads) gave {as_text(got)}, and "
                    f"{as_text(right)} is right{nan_text}\n  block size {case.caches[0].shape[1]}, "
                    f"block table of sequence {number}: {table.tolist()}, the last entries stale"
                )


def as_text(row: Tensor) -> str:
    """A few numbers, for a sentence."""
    return "[" + " ".join(f"{number:.3g}" for number in row.flatten().tolist()) + "]"
