"""Lab 5: the guesses, and the proof that they change nothing."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanoserve.chapters.speculative import proposer


def check_ngram(mine: Any, tokens: list[int], least: int, longest: int) -> None:
    got = mine("find_ngram")(np.array(tokens, np.int32), least, longest)
    right = proposer.find_ngram(np.array(tokens, np.int32), least, longest)
    assert got == right, f"{tokens}, matches of {least} to {longest}: goes on at {right}, not {got}"


def test_5_1_the_longest_match(mine: Any) -> None:
    check_ngram(mine, [7, 3, 5, 1, 2, 3, 9, 0, 2, 3], 1, 3)


def test_5_1_the_earliest_of_them_and_no_shorter(mine: Any) -> None:
    check_ngram(mine, [1, 2, 8, 1, 2, 9, 1, 2], 1, 2)
    check_ngram(mine, [3, 9, 2, 3], 2, 3)
    check_ngram(mine, [1], 1, 3)


def test_5_1_any_text(mine: Any) -> None:
    rng = random.Random(5)
    for _ in range(300):
        tokens, least = [rng.randrange(3) for _ in range(rng.randint(1, 12))], rng.randint(1, 3)
        check_ngram(mine, tokens, least, rng.randint(least, 5))


def propose(mine: Any, tokens: list[int], most: int) -> list[int]:
    drafter = object.__new__(mine("MyProposer"))
    drafter.config = SimpleNamespace(prompt_lookup_min=2, prompt_lookup_max=3)
    return list(drafter.propose_one(0, np.array(tokens, np.int32), most))


def test_5_2_what_stands_behind_the_match(mine: Any) -> None:
    mine.using(find_ngram=proposer.find_ngram)
    for most, right in [(2, [9, 8]), (9, [9, 8, 2, 3])]:
        got = propose(mine, [2, 3, 9, 8, 2, 3], most)
        assert got == right, f"2 3 9 8 2 3, at most {most}: {right}, not {got}"


def test_5_2_no_match_no_guess(mine: Any) -> None:
    mine.using(find_ngram=proposer.find_ngram)
    got = propose(mine, [1, 3, 9, 2, 3], 4)
    assert got == [], f"only one token matches, the least is 2: you guess {got}"


@pytest.mark.points(2)
def test_5_3_up_to_the_first_wrong_guess(mine: Any) -> None:
    cases = [([5, 6, 7], [5, 6, 9, 1]), ([5, 6], [5, 6, 7]), ([5], [4, 8]), ([], [3])]
    for (drafts, sampled), number in zip(cases, (3, 3, 1, 1), strict=True):
        got, right = list(mine("verify")(drafts, sampled)), sampled[:number]
        assert got == right, f"drafts {drafts}, sampled {sampled}: {right}, not {got}"


STEPS = 60
P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])


def shares(mine: Any, p: Tensor, q: Tensor, draft: int) -> Tensor:
    """How often each token comes out for this draft: over a grid of all random numbers, not by
    luck."""
    line = (torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS
    accept, recover = (each.flatten() for each in torch.meshgrid(line, line, indexing="ij"))
    rows, drafts = torch.ones(len(accept), 1), torch.full((len(accept),), draft)
    tokens = mine("rejection_sample")(rows * p, rows * q, drafts, accept, recover)
    counted: Tensor = tokens.bincount(minlength=len(p)) / len(tokens)
    return counted


def check_shares(got: Tensor, right: Tensor, what: str) -> None:
    near = torch.allclose(got, right, atol=2 / STEPS)
    text = [[round(float(each), 3) for each in row] for row in (right, got)]
    assert near, f"{what}: the tokens should come with {text[0]}, and come with {text[1]}"


def test_5_4_a_draft_stays_as_often_as_it_may(mine: Any) -> None:
    for draft, right in [(0, 1.0), (1, 3 / 7), (2, 1.0)]:
        got = float(shares(mine, P, Q, draft)[draft])
        assert abs(got - right) < 2 / STEPS, (
            f"p {P.tolist()}, q {Q.tolist()}: draft {draft} should come out in {right:.0%} of the "
            f"cases, and comes in {got:.0%}"
        )


@pytest.mark.points(2)
def test_5_4_all_together_it_is_p(mine: Any) -> None:
    got = sum(Q[draft] * shares(mine, P, Q, draft) for draft in range(3))
    check_shares(torch.as_tensor(got), P, "drafts drawn from q, all together")


def test_5_4_a_guess_that_nobody_drew(mine: Any) -> None:
    check_shares(shares(mine, P, torch.tensor([0.0, 1.0, 0.0]), 1), P, "q is 1 at the draft")


def test_5_4_recover_decides_and_nothing_is_left(mine: Any) -> None:
    draws: list[Tensor] = []
    for _ in range(2):
        torch.manual_seed(len(draws))
        draws.append(shares(mine, P, Q, 1))
    assert torch.equal(*draws), "the same accept and recover, another result: draw with `recover`"
    tokens = mine("rejection_sample")(
        P[None], P[None], torch.tensor([1]), torch.tensor([1.0]).double(), torch.tensor([0.9])
    )
    assert tokens.tolist() == [2], "p = q, and the draft is rejected by rounding: draw from p"


@pytest.mark.points(2)
def test_5_5_the_engine_says_the_same_in_fewer_steps(
    mine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nanoserve.teaching.lesson import serve, small_llm

    propose(mine, [1, 2, 1, 2], 1)
    module: Any = SimpleNamespace(MyProposer=mine("MyProposer"))
    monkeypatch.setitem(sys.modules, "lab5_guess", module)
    options: dict[str, Any] = {"method": "custom_class", "model": "lab5_guess.MyProposer"}
    options |= {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    found = []
    for speculative in ({}, {"speculative_config": options}):
        with small_llm(num_blocks=64, **speculative) as llm:
            text = serve(llm, {"D": 24})["D"]
            found.append((text, len(llm.engine.scheduler.frames)))
    (right, most), (got, steps) = found
    assert got == right, f"with guesses the model says {got!r}, and should say {right!r}"
    assert steps < most, f"{most} steps without guesses, {steps} with them: no guess was right"
