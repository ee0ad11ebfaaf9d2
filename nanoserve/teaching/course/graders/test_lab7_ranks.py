"""Lab 7: all ranks in one process; a rank is a call, or a thread."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
import torch
from torch import Tensor


def test_7_1_parts_of_a_matrix(mine: Any) -> None:
    weight = torch.arange(24.0).view(4, 6)
    for rank in range(2):
        got = mine("column_shard")(weight, rank, 2)
        right = weight[2 * rank : 2 * rank + 2]
        assert torch.equal(got, right), f"outputs of rank {rank}: {got.tolist()}"
        got, right = mine("row_shard")(weight, rank, 2), weight[:, 3 * rank : 3 * rank + 3]
        assert torch.equal(got, right), f"inputs of rank {rank}: {got.tolist()}"


def test_7_1_what_cannot_be_divided(mine: Any) -> None:
    for name in ("column_shard", "row_shard"):
        with pytest.raises(ValueError):  # noqa: PT011
            mine(name)(torch.zeros(5, 5), 0, 2)


@pytest.mark.points(3)
def test_7_2_two_matrices_and_one_sum(mine: Any) -> None:
    mine.using(column_shard=lambda w, rank, size: w.chunk(size)[rank])
    mine.using(row_shard=lambda w, rank, size: w.chunk(size, dim=1)[rank])
    torch.manual_seed(7)
    x, up, down = torch.randn(3, 4), torch.randn(8, 4), torch.randn(4, 8)
    right, size = (x @ up.T).relu() @ down.T, 4
    parts: list[Tensor] = []

    def all_reduce(part: Tensor) -> Tensor:
        parts.append(part)
        return part

    for rank in range(size):
        calls = len(parts)
        mine("mlp")(x, up, down, rank, size, all_reduce)
        assert len(parts) == calls + 1, (
            f"rank {rank} has called all_reduce {len(parts) - calls} times"
        )
    got = torch.stack(parts).sum(dim=0)
    assert got.shape == right.shape, f"a part has the shape {[*got.shape]}, not {[*right.shape]}"
    assert torch.allclose(got, right, atol=1e-4), "the sum of all parts is not the whole result"


@pytest.mark.points(2)
def test_7_3_heads_and_the_key_heads_that_they_read(mine: Any) -> None:
    for rank, right in enumerate([(range(4), range(2)), (range(4, 8), range(2, 4))]):
        got = mine("heads_of")(8, 4, rank, 2)
        assert got == right, f"8 heads, 4 key heads, rank {rank} of 2: {right}, not {got}"


def test_7_3_fewer_key_heads_than_ranks(mine: Any) -> None:
    got = [mine("heads_of")(8, 2, rank, 4)[1] for rank in range(4)]
    right = [range(1), range(1), range(1, 2), range(1, 2)]
    assert got == right, f"2 key heads on 4 ranks: {right}, not {got}"


def ring(mine: Any, size: int, length: int) -> tuple[list[Tensor], list[int], Tensor]:
    """(what each rank returns, how many numbers it has sent, the right sum)."""
    queues: list[Queue[Tensor]] = [Queue() for _ in range(size)]
    sent = [0] * size
    inputs = torch.randn(size, length, generator=torch.Generator().manual_seed(size))

    def run(rank: int) -> Tensor:
        def send(piece: Tensor) -> None:
            sent[rank] += piece.numel()
            queues[(rank + 1) % size].put(piece.clone())

        result: Tensor = reduce(
            inputs[rank].clone(), rank, size, send, lambda: queues[rank].get(timeout=5)
        )
        return result

    reduce = mine("ring_all_reduce")
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size))), sent, inputs.sum(dim=0)


@pytest.mark.points(3)
def test_7_4_every_rank_has_the_sum(mine: Any) -> None:
    for size, length in [(2, 4), (4, 8), (3, 7), (1, 5)]:
        results, _, right = ring(mine, size, length)
        for rank, got in enumerate(results):
            assert got.shape == right.shape, f"{size} ranks: rank {rank} has {len(got)} numbers"
            assert torch.allclose(got, right, atol=1e-5), f"{size} ranks: rank {rank} is wrong"


@pytest.mark.points(2)
def test_7_4_twice_its_own_and_no_more(mine: Any) -> None:
    _, sent, _ = ring(mine, 4, 80)
    assert max(sent) <= 120, f"80 numbers on 4 ranks: each sends 2 * 3 * 20 = 120, and not {sent}"


@pytest.mark.points(2)
def test_7_5_one_value_and_one_index_of_each_rank(mine: Any) -> None:
    torch.manual_seed(5)
    logits = torch.randn(20, 12)
    logits[0, [2, 9]] = 5.0  # equal: the first one
    got = mine("argmax_of_parts")(list(logits.chunk(3, dim=1))).tolist()
    right = logits.argmax(dim=1).tolist()
    wrong = [row for row in range(20) if got[row] != right[row]]
    assert not wrong, f"row {wrong[:1]}: token {got[wrong[0]]}, and {right[wrong[0]]} is likelier"
