"""Lab 3: what does a query read, and how?"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoserve.attention import StepMetadata
from nanoserve.teaching.course.graders import answers


def loop(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """The definition, a query and a head at a time."""
    (q, num_heads, _), (k, num_kv_heads, _) = query.shape, key.shape
    output = torch.zeros(q, num_heads, value.shape[2])
    for j, head in itertools.product(range(q), range(num_heads)):
        own, seen = head // (num_heads // num_kv_heads), k - q + j + 1
        scores = scale * (key[:seen, own] * query[j, head]).sum(dim=1)
        output[j, head] = scores.softmax(dim=0) @ value[:seen, own]
    return output


def check(got: Tensor, right: Tensor, what: str) -> None:
    assert got.shape == right.shape, f"{what}: the shape is {[*got.shape]}, not {[*right.shape]}"
    assert not got.isnan().any(), f"{what}: some numbers are NaN"
    gap = (got - right).abs()
    place = [int(each) for each in torch.unravel_index(gap.argmax(), gap.shape)]
    assert gap.max() < 1e-4, (
        f"{what}: output{place} is {got[tuple(place)]:.3f} and should be {right[tuple(place)]:.3f}"
    )


def check_definition(mine: Any, q: int, k: int, heads: int, kv_heads: int, scale: float) -> None:
    torch.manual_seed(q + k)
    query, key = torch.randn(q, heads, 4), torch.randn(k, kv_heads, 4)
    value = torch.randn(k, kv_heads, 4)
    what = f"{q} queries, {k} keys, {heads} heads, {kv_heads} key heads"
    right = loop(query, key, value, scale)
    check(mine("definition")(query, key, value, scale), right, what)


def test_3_1_one_query_sees_all_keys(mine: Any) -> None:
    check_definition(mine, 1, 5, 1, 1, 1.0)


def test_3_1_scores_are_scaled(mine: Any) -> None:
    check_definition(mine, 1, 5, 1, 1, 0.25)


def test_3_1_nobody_sees_the_future(mine: Any) -> None:
    check_definition(mine, 4, 4, 1, 1, 1.0)


def test_3_1_the_queries_are_the_last_tokens(mine: Any) -> None:
    check_definition(mine, 2, 6, 1, 1, 1.0)


def test_3_1_neighbouring_heads_share_a_key_head(mine: Any) -> None:
    check_definition(mine, 1, 3, 4, 2, 1.0)


def step(parts: list[tuple[int, int]], size: int = 4) -> tuple[Any, StepMetadata, Tensor]:
    """A step of sequences with (queries, keys); scattered blocks; NaN wherever nothing is."""
    generator, cache = torch.Generator().manual_seed(3), torch.full((2, 12, size, 2, 8), torch.nan)
    free, tables, right = torch.randperm(12, generator=generator).tolist(), [], []
    query = torch.randn(sum(q for q, _ in parts), 4, 8, generator=generator)
    starts = [0, *itertools.accumulate(q for q, _ in parts)]
    for (_, k), start, end in zip(parts, starts, starts[1:], strict=False):
        key, value = torch.randn(2, k, 2, 8, generator=generator)
        table = [free.pop() for _ in range(-(-k // size))]
        for position in range(k):
            slot = table[position // size], position % size
            cache[(0, *slot)], cache[(1, *slot)] = key[position], value[position]
        tables.append([*table, *[0] * (6 - len(table))])
        right.append(loop(query[start:end], key, value, 0.5))
    metadata = StepMetadata(
        torch.tensor([]),
        torch.tensor(tables, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([k for _, k in parts], dtype=torch.int32),
    )
    return (query, (cache[0], cache[1])), metadata, torch.cat(right)


CASES = {
    "a decode": [(1, 6)],
    "a prompt": [(5, 5)],
    "a whole block": [(1, 8)],
    "behind a cached prefix": [(3, 11)],
    "three sequences": [(1, 9), (4, 4), (2, 7)],
}


def check_backend(backend: Any, names: list[str]) -> None:
    for name in names:
        (query, kv_cache), metadata, right = step(CASES[name])
        check(backend.attend(query, kv_cache, metadata, scale=0.5), right, name)


@pytest.mark.points(2)
def test_3_2_keys_in_scattered_blocks(mine: Any) -> None:
    mine.using(definition=loop)
    check_backend(mine("MyGather")(), ["a whole block", "a decode"])


@pytest.mark.points(2)
def test_3_2_sequences_of_different_length(mine: Any) -> None:
    mine.using(definition=loop)
    check_backend(mine("MyGather")(), [*CASES])


def softmax_of(add_block: Any, score: Tensor, value: Tensor, size: int) -> Tensor:
    top = torch.full((*score.shape[:2], 1), -torch.inf)
    total, mixed = torch.zeros_like(top), torch.zeros(*score.shape[:2], value.shape[2])
    for start in range(0, score.shape[2], size):
        block = slice(start, start + size)
        top, total, mixed = add_block(top, total, mixed, score[:, :, block], value[:, block])
    return mixed / total


def test_3_3_one_block(mine: Any) -> None:
    score, value = torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[1.0], [0.0]]])
    got = softmax_of(mine("add_block"), score, value, 2)
    check(got, score.softmax(dim=-1) @ value, "scores 1 3, in one block")


def test_3_3_a_later_block_has_the_largest_score(mine: Any) -> None:
    score, value = torch.tensor([[[1.0, 3.0, 6.0, 2.0]]]), torch.eye(4)[None]
    got = softmax_of(mine("add_block"), score, value, 2)
    check(got, score.softmax(dim=-1) @ value, "scores 1 3 | 6 2")


def test_3_3_large_scores(mine: Any) -> None:
    score, value = torch.tensor([[[300.0, 301.0, 299.0, 200.0]]]), torch.eye(4)[None]
    got = softmax_of(mine("add_block"), score, value, 1)
    check(got, score.softmax(dim=-1) @ value, "scores 300 | 301 | 299 | 200")


def test_3_3_a_block_that_is_hidden(mine: Any) -> None:
    score, value = torch.tensor([[[-math.inf, -math.inf, 1.0, 2.0]]]), torch.eye(4)[None]
    got = softmax_of(mine("add_block"), score, value, 2)
    check(got, score.softmax(dim=-1) @ value, "two hidden keys, then scores 1 2")


def add_block(top: Tensor, total: Tensor, mixed: Tensor, score: Tensor, value: Tensor) -> Any:
    """Task 3.3, for task 3.4: three sums that are scaled anew, each time."""
    new_top = torch.maximum(top, score.amax(dim=-1, keepdim=True)).clamp(min=-1e30)
    scale, weights = (top - new_top).exp(), (score - new_top).exp()
    total = total * scale + weights.sum(dim=-1, keepdim=True)
    return new_top, total, mixed * scale + weights @ value


@pytest.mark.points(2)
def test_3_4_block_by_block(mine: Any) -> None:
    mine.using(add_block=add_block)
    check_backend(mine("MyOnline")(), ["a whole block", "a decode"])


@pytest.mark.points(2)
def test_3_4_chunks_and_several_sequences(mine: Any) -> None:
    mine.using(add_block=add_block)
    check_backend(mine("MyOnline")(), [*CASES])


@pytest.mark.points(2)
@pytest.mark.parametrize("name", ["MyGather", "MyOnline"])
def test_3_5_the_engine_says_the_same(mine: Any, name: str) -> None:
    requests = {"A": 10, "C": (10, 2)}
    got = answers(requests, attention_backend=mine(name)(), max_num_batched_tokens=7)
    right = answers(requests)
    assert got == right, f"with {name} the model says {got}, and should say {right}"
