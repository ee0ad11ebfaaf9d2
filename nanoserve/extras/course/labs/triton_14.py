"""Lab 14, a bonus: attention in Triton.

The kernels run under Triton's interpreter, on any Linux machine, without a GPU: slowly, so the
cases are small. On a GPU the same source is compiled: grade there by hand with `pytest -m gpu`.
"""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch

from nanoserve.extras.course.labs.tensors import as_text, compare, make_case
from nanoserve.extras.course.spec import Lab, Task, must

MODULE = "nanoserve.kernels.attention_triton"  # imported where it is used: not all have Triton
STORE = Task("14.1", MODULE, "store_kv_kernel")
MERGE = Task("14.2", MODULE, "merge_splits_kernel")
TILES = Task("14.3", MODULE, "_attend_tiles")
LAB = Lab(
    14,
    "Attention in Triton",
    [STORE, MERGE, TILES],
    needs_torch=True,
    packages=("triton",),
    is_bonus=True,
    memory=6144,  # of address space
    seconds=60.0,
)


# -- 14.1 --


def check_store(slots: list[int], num_kv_heads: int, key_dim: int, value_dim: int) -> None:
    from nanoserve.kernels.attention_triton import store_kv_triton

    generator = torch.Generator().manual_seed(len(slots))
    key, value = (
        torch.randn(len(slots), num_kv_heads + 1, dim, generator=generator)[:, 1:]
        for dim in (key_dim, value_dim)
    )
    # As KVCacheSpec lays it out: in a block, the slots of one head are one behind the other. Before
    # the first block and behind the last one there is a block of somebody else.
    whole = [torch.zeros(5, num_kv_heads, 4, dim).transpose(1, 2) for dim in (key_dim, value_dim)]
    store_kv_triton(key, value, whole[0][1:4], whole[1][1:4], torch.tensor(slots))
    text = f"slots {slots}, {num_kv_heads} key heads of {key_dim} and {value_dim} dimensions"
    for name, cache, new in zip(("key", "value"), whole, (key, value), strict=True):
        right = torch.zeros(cache.shape)
        for token, slot in enumerate(slots):
            if slot >= 0:
                right[1 + slot // 4, slot % 4] = new[token]
        rows = zip(cache.flatten(0, 1), right.flatten(0, 1), strict=True)
        for slot, (got, row) in enumerate(rows, start=-4):
            place = f"slot {slot} of the {name} cache" + " (somebody else's)" * (not 0 <= slot < 12)
            must(
                torch.equal(got, row),
                f"{text}: {place} holds {as_text(got)}, and {as_text(row)} is right",
            )


@STORE.behaviour(1, "all heads of a token go to its slot, with the strides of both tensors")
def stored() -> None:
    check_store([9, 2, 4], 1, 4, 4)
    check_store([5, 0], 2, 4, 8)


@STORE.behaviour(0.5, "sizes that are no powers of 2 are masked, and negative slots are skipped")
def masked() -> None:
    check_store([9, -1, 2], 3, 4, 6)


# -- 14.2, 14.3 --


def check_attention(
    seqs: list[tuple[int, int]],
    num_splits: int = 1,
    window: int | None = None,
    cap: float | None = None,
    **options: Any,
) -> None:
    """Tiles of 16 keys, so that a few dozen keys are several tiles."""
    from nanoserve.kernels import attention_triton

    tiles = attention_triton.Tiles(block_m=16, block_n=16, num_warps=4, num_stages=3)
    case, scale = make_case(seqs, **options), 0.5
    with mock.patch.object(attention_triton, "choose_tiles", return_value=tiles):
        output = attention_triton.paged_attention_triton(
            case.query,
            case.caches[0],
            case.caches[1],
            case.metadata.block_table,
            case.metadata.query_start_loc,
            case.metadata.seq_lens,
            scale=scale,
            sliding_window=window,
            logits_soft_cap=cap,
            num_splits=num_splits,
        )
    compare(case, output, scale, window, cap)


def merge_parts(rows: list[list[tuple[float, float]]], **sizes: int) -> torch.Tensor:
    """What the kernel makes of (lse, value) of each split, for rows that are sequences of one
    query with one head."""
    from nanoserve.kernels.attention_triton import merge_splits_kernel

    num_splits = len(rows[0])
    partial = torch.tensor([[[[value, 1.0] for _, value in row]] for row in rows])
    lse = torch.tensor([[[each for each, _ in row]] for row in rows])
    output = torch.full((len(rows), 1, 2), -7.0)
    starts = torch.arange(len(rows) + 1, dtype=torch.int32)
    arguments: dict[str, Any] = {"VALUE_DIM": 2, "BLOCK_V": 16, "NUM_SPLITS": num_splits}
    merge_splits_kernel[(len(rows), 1)](
        partial, lse, starts, output, len(rows), sizes.get("rows_per_seq", 1), 0, **arguments
    )
    return output


@MERGE.behaviour(1, "splits are added with the weights 2^lse, and divided by their sum")
def weights_of_splits() -> None:
    got = merge_parts([[(0.0, 3.0), (1.0, 6.0)], [(5.0, 1.0), (5.0, 2.0)]])[:, 0, 0].tolist()
    must(
        got == [5.0, 1.5],
        f"lse 0 and 1 with the values 3 and 6: (1 * 3 + 2 * 6) / 3 is 5; lse 5 and 5 with 1 and 2: "
        f"1.5; the kernel gave {got}",
    )


@MERGE.behaviour(
    1, "an lse of hundreds does not overflow; a split without keys (-inf) adds nothing"
)
def large_and_empty() -> None:
    empty = -torch.inf
    got = merge_parts([[(900.0, 3.0), (901.0, 6.0)], [(2.0, 4.0), (empty, torch.nan)]])
    must(got[:, 0, 0].tolist() == [5.0, 4.0], f"5 and 4 are right, the kernel gave {as_text(got)}")


@MERGE.behaviour(1, "attention in splits is attention")
def splits() -> None:
    check_attention([(1, 40), (1, 3)], num_splits=2)
    check_attention([(3, 20), (1, 9)], num_splits=4)


@TILES.behaviour(1.5, "one query, one tile of keys")
def one_tile() -> None:
    check_attention([(1, 7)])


@TILES.behaviour(1.5, "a tile that raises m shrinks what was summed before")
def several_tiles() -> None:
    for seed in range(2):
        check_attention([(1, 45)], seed=seed)


@TILES.behaviour(1.5, "queries of a chunk see the keys up to their own position")
def chunks() -> None:
    check_attention([(5, 21), (3, 3)])


@TILES.behaviour(1, "heads that share a key head are rows of one tile")
def groups() -> None:
    check_attention([(3, 19)], num_kv_heads=2, group=2)


@TILES.behaviour(1, "sliding window")
def windows() -> None:
    check_attention([(3, 40)], window=5)
    check_attention([(1, 40)], window=1)


@TILES.behaviour(0.5, "soft cap")
def caps() -> None:
    check_attention([(1, 20)], cap=1.5)


@TILES.behaviour(1, "any step", is_property=True)
def any_step(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(4):
        seqs = []
        for _ in range(rng.randint(1, 3)):
            keys = rng.randint(1, 40)
            seqs.append((rng.choice([1, rng.randint(1, min(keys, 9))]), keys))
        check_attention(
            seqs,
            num_splits=rng.choice([1, 2]),
            window=rng.choice([None, rng.randint(1, 20)]),
            block_size=rng.choice([1, 2, 4]),
            num_kv_heads=rng.choice([1, 2]),
            group=rng.choice([1, 2, 3]),
            seed=rng.randrange(2**20),
        )
