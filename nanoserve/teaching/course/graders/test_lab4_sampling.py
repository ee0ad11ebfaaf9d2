"""Lab 4: beside slow loops over single numbers, and beside the engine."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoserve import sampler
from nanoserve.sampler import SamplingBatch, choose_tokens
from nanoserve.teaching.course.graders import answers

PROBS = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.4, 0.05, 0.3, 0.25]])


def kept(logits: Tensor) -> list[list[int]]:
    """Which tokens of each row are left."""
    return [row.isfinite().nonzero()[:, 0].tolist() for row in logits]


def test_4_1_the_limit_is_a_share_of_the_likeliest(mine: Any) -> None:
    got = kept(mine("apply_min_p")(PROBS.log(), torch.tensor([0.4, 0.7])))
    right = [[0, 1], [0, 2]]
    assert got == right, f"p {PROBS.tolist()}, min_p 0.4 and 0.7: {right} stay, not {got}"


def test_4_1_what_stays_keeps_its_logit(mine: Any) -> None:
    logits = torch.tensor([[3.0, 1.0, -9.0]])
    got = mine("apply_min_p")(logits.clone(), torch.tensor([0.1]))[0, :2].tolist()
    assert got == [3.0, 1.0], f"the logits 3 1 stay, and became {got}"


def filtered(mine: Any, top_k: int, top_p: float, row: int = 0) -> list[int]:
    logits = PROBS[row : row + 1].log()
    return kept(mine("apply_top_k_top_p")(logits, torch.tensor([top_k]), torch.tensor([top_p])))[0]


def test_4_2_the_k_likeliest(mine: Any) -> None:
    for row, top_k, right in [(0, 2, [0, 1]), (1, 3, [0, 2, 3]), (1, 1, [0]), (0, 4, [0, 1, 2, 3])]:
        got = filtered(mine, top_k, 1.0, row)
        assert got == right, f"p {PROBS[row].tolist()}, top_k {top_k}: {right} stay, not {got}"


@pytest.mark.points(2)
def test_4_2_the_token_that_crosses_top_p_stays(mine: Any) -> None:
    for row, top_p, right in [
        (0, 0.6, [0, 1]),
        (0, 0.01, [0]),
        (1, 0.75, [0, 2, 3]),
        (1, 0.3, [0]),
    ]:
        got = filtered(mine, 4, top_p, row)
        assert got == right, f"p {PROBS[row].tolist()}, top_p {top_p}: {right} stay, not {got}"


def test_4_2_top_p_counts_among_the_top_k(mine: Any) -> None:
    got = filtered(mine, 2, 0.6)  # 0.5 of 0.8 is 0.625
    assert got == [0], f"p {PROBS[0].tolist()}, top_k 2, top_p 0.6: 0.5 / 0.8 reaches it, not {got}"


def test_4_2_each_row_has_its_own(mine: Any) -> None:
    got = mine("apply_top_k_top_p")(PROBS.log(), torch.tensor([1, 4]), torch.tensor([1.0, 0.5]))
    assert kept(got) == [[0], [0, 2]], f"rows with (1, off) and (off, 0.5): {kept(got)}"


@pytest.mark.points(2)
def test_4_3_every_token_as_often_as_its_probability(mine: Any) -> None:
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000  # a grid: no luck
    for row in PROBS:
        tokens = mine("draw")(row.repeat(1000, 1), uniform)
        got = tokens.bincount(minlength=4) / 1000
        assert (got - row).abs().max() < 0.002, f"p {row.tolist()}: drawn {got.tolist()}"


def test_4_3_impossible_tokens_are_never_drawn(mine: Any) -> None:
    probs, last = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]), 1 - 2.0**-53
    for number, right in [(0.0, 1), (0.5, 3), (last, 3)]:
        got = int(mine("draw")(probs, torch.tensor([number], dtype=torch.float64)))
        assert got == right, f"p {probs[0].tolist()}, u {number}: token {right}, not {got}"


def test_4_4_noise_is_a_function(mine: Any) -> None:
    noise = mine("noise")
    places = list(itertools.product((0, 1, 2**40), (0, 3), (0, 1, 500)))
    first, again = [noise(*each) for each in places], [noise(*each) for each in places[::-1]]
    assert first == again[::-1], "the same seed, branch and position, and another number"
    assert all(0 <= each < 1 for each in first), f"not in [0, 1): {first}"


@pytest.mark.points(2)
def test_4_4_neighbours_have_nothing_in_common(mine: Any) -> None:
    noise = mine("noise")
    for which, name in enumerate(("seeds", "branches", "positions")):
        found = np.array([noise(*[i if k == which else 7 for k in range(3)]) for i in range(2000)])
        assert abs(found.mean() - 0.5) < 0.05, f"{name} 0 to 1999: the mean is {found.mean():.3f}"
        counts = np.histogram(found, 10, (0, 1))[0]
        assert counts.min() > 120, f"{name}: numbers in each tenth: {counts.tolist()}"
        together = np.corrcoef(found[1:], found[:-1])[0, 1]
        assert abs(together) < 0.1, f"{name}: neighbours have a correlation of {together:.2f}"
    assert noise(1, 2, 3) != noise(2, 1, 3), "branch 2 of seed 1 is branch 1 of seed 2"


def batch_of(rows: int, **params: Any) -> SamplingBatch:
    generator = torch.Generator().manual_seed(rows)
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator)
    return SamplingBatch(**{"temperature": torch.ones(rows), "uniform": uniform, **params})


def compare(mine: Any, batch: SamplingBatch, what: str, rows: int = 64) -> None:
    mine.using(apply_min_p=sampler.apply_min_p, draw=sampler.draw)
    mine.using(apply_top_k_top_p=sampler.apply_top_k_top_p)
    logits = torch.randn(rows, 50, generator=torch.Generator().manual_seed(4)) * 2
    got, right = mine("choose")(logits, batch), choose_tokens(logits, batch)
    wrong = (got[0] != right.token_ids).nonzero()[:, 0].tolist()
    assert not wrong, f"{what}: rows {wrong[:8]} of {rows} have another token than in the engine"


def test_4_5_greedy_rows(mine: Any) -> None:
    compare(mine, SamplingBatch(is_greedy=True), "every row greedy")
    mixed = torch.tensor([0.0, 1.0] * 32)
    compare(mine, batch_of(64, temperature=mixed), "every other row greedy")


def test_4_5_temperature_comes_before_the_filters(mine: Any) -> None:
    hot = torch.full((64,), 2.5)
    compare(mine, batch_of(64, temperature=hot, min_p=hot * 0.1), "temperature 2.5, min_p 0.25")
    compare(mine, batch_of(64, temperature=hot, top_p=hot * 0.2), "temperature 2.5, top_p 0.5")


def test_4_5_what_is_not_possible(mine: Any) -> None:
    logits = torch.tensor([[1.0, 2.0], [-torch.inf, -torch.inf], [torch.nan, 1.0]])
    got = mine("choose")(logits, SamplingBatch(is_greedy=True))[1].tolist()
    assert got == [True, False, False], f"rows 1 2 | -inf -inf | nan 1: is_possible is {got}"


@pytest.mark.points(2)
def test_4_6_the_engine_samples_with_your_functions(mine: Any) -> None:
    params = {"temperature": 1.2, "top_p": 0.9, "top_k": 20, "seed": 5}
    got = answers({"A": 12, "D": 12}, params, runner_cls=mine("MyRunner"))
    right = answers({"A": 12}, params)
    assert got["A"] == right["A"], f"your engine says {got['A']!r}, and not {right['A']!r}"
