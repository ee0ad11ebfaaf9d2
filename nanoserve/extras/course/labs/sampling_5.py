"""Lab 5, Sampling: how do logits become a token?

Each function is checked against a slow loop over single numbers, or against exact probabilities.
"""

from __future__ import annotations

import math
import random

import numpy as np
import torch

from nanoserve import sampler
from nanoserve.extras.course.spec import Lab, Task, must
from nanoserve.sampler import Penalties

MODULE = "nanoserve.sampler"
PENALTIES = Task("5.1", MODULE, "apply_penalties")
MIN_P = Task("5.2", MODULE, "apply_min_p")
THRESHOLD = Task("5.3", MODULE, "find_threshold")
DRAW = Task("5.4", MODULE, "draw")
NOISE = Task("5.5", MODULE, "uniform_noise")
LOGPROBS = Task("5.6", MODULE, "gather_logprobs")
CONSTRAINTS = Task("5.7", MODULE, "apply_constraints")
LAB = Lab(
    5,
    "Sampling",
    [PENALTIES, MIN_P, THRESHOLD, DRAW, NOISE, LOGPROBS, CONSTRAINTS],
    needs_torch=True,
    memory=4096,  # of address space: torch maps much and uses little
    seconds=15.0,
)


def near(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=1e-5, abs_tol=1e-6) or left == right


def as_text(row: torch.Tensor) -> str:
    """A few numbers, for a sentence."""
    return "[" + " ".join(f"{number:.3g}" for number in row.tolist()) + "]"


# -- 5.1 --


def penalize(
    logits: list[float], prompt: list[int], output: list[int], weights: tuple[float, float, float]
) -> list[float]:
    """The slow loop: what the three penalties make of one row."""
    repetition, frequency, presence = weights
    result = list(logits)
    for token in {*prompt, *output}:
        logit, count = result[token], output.count(token)
        logit = logit / repetition if logit > 0 else logit * repetition
        result[token] = logit - frequency * count - presence * (count > 0)
    return result


def check_penalties(
    logits: list[float], prompt: list[int], output: list[int], weights: tuple[float, float, float]
) -> None:
    seen = sorted({*prompt, *output})
    penalties = Penalties(
        torch.tensor([1]),
        torch.tensor([seen]),
        torch.tensor([[output.count(token) for token in seen]], dtype=torch.int32),
        *(torch.tensor([weight]) for weight in weights),
    )
    before = torch.tensor([logits, logits])
    after = sampler.apply_penalties(before.clone(), penalties)
    must(torch.equal(after[0], before[0]), "row 0 has no penalties, and its logits changed")
    right = penalize(logits, prompt, output, weights)
    for token, (got, expected) in enumerate(zip(after[1].tolist(), right, strict=True)):
        must(
            near(got, expected),
            f"token {token}: logit {logits[token]:g}, in the prompt {prompt.count(token)} times, "
            f"in the output {output.count(token)} times; (repetition, frequency, presence) is "
            f"{weights}: it should become {expected:.4g} and is {got:.4g}",
        )


@PENALTIES.behaviour(1, "repetition: positive logits are divided, negative ones multiplied")
def repetition() -> None:
    check_penalties([2.0, -2.0, 1.0, 0.5], [0, 1], [], (2.0, 0.0, 0.0))


@PENALTIES.behaviour(1, "frequency and presence: the output counts, the prompt does not")
def output_only() -> None:
    check_penalties([2.0, -2.0, 1.0, 0.5], [0, 0, 2], [2, 2, 3], (1.0, 0.25, 0.5))


@PENALTIES.behaviour(1, "as a loop over single tokens does it", is_property=True)
def penalties_like_a_loop(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        logits = [rng.uniform(-4, 4) for _ in range(6)]
        prompt = [rng.randrange(6) for _ in range(rng.randint(1, 5))]
        output = [rng.randrange(6) for _ in range(rng.randint(0, 5))]
        weights = rng.uniform(0.5, 2), rng.uniform(-1, 1), rng.uniform(-1, 1)
        check_penalties(logits, prompt, output, weights)


# -- 5.2 --


@MIN_P.behaviour(1.5, "the limit is a share of the likeliest token's probability")
def share_of_the_largest() -> None:
    probs = torch.tensor([[0.5, 0.26, 0.24], [0.9, 0.06, 0.04]])
    kept = sampler.apply_min_p(probs.log(), torch.tensor([0.5, 0.05])).isfinite()
    for row, expected in enumerate([[True, True, False], [True, True, False]]):
        must(
            kept[row].tolist() == expected,
            f"probabilities {as_text(probs[row])}, min_p {[0.5, 0.05][row]}: kept are "
            f"{kept[row].tolist()}",
        )


@MIN_P.behaviour(0.5, "what is kept keeps its logit, and 0 keeps all")
def keeps_logits() -> None:
    logits = torch.tensor([[3.0, 1.0, -9.0]])
    after = sampler.apply_min_p(logits, torch.tensor([0.0]))
    must(torch.equal(after, logits), f"min_p 0 made {as_text(after[0])} of {as_text(logits[0])}")
    after = sampler.apply_min_p(logits, torch.tensor([0.1]))
    must(after[0, :2].tolist() == [3.0, 1.0], "a token that is kept has another logit now")


# -- 5.3 --


def check_filters(probs: list[float], top_k: int | None, top_p: float | None) -> None:
    """Which tokens survive, beside a loop."""
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    if top_k is not None:
        order = order[:top_k]
    total = sum(probs[token] for token in order)
    right: set[int] = set()
    summed = 0.0
    for token in order:
        if top_p is None or top_p >= 1 or summed < top_p - 1e-9:
            right.add(token)
        summed += probs[token] / total
    logits = torch.tensor([probs]).log()
    k = None if top_k is None else torch.tensor([top_k])
    p = None if top_p is None else torch.tensor([top_p])
    after = sampler.apply_top_k_top_p(logits, k, p)
    got = set(after[0].isfinite().nonzero()[:, 0].tolist())
    must(
        got == right,
        f"probabilities {probs}, top_k {top_k}, top_p {top_p}: the tokens {sorted(right)} should "
        f"be kept, and {sorted(got)} are",
    )


@THRESHOLD.behaviour(1, "top_k keeps exactly k tokens")
def exactly_k() -> None:
    for k in (1, 2, 4):
        check_filters([0.1, 0.4, 0.2, 0.3], k, None)
    check_filters([0.1, 0.4, 0.2, 0.3], 99, None)


@THRESHOLD.behaviour(1.5, "the token that crosses top_p is kept")
def crosses() -> None:
    check_filters([0.5, 0.3, 0.2], None, 0.7)
    check_filters([0.5, 0.3, 0.2], None, 0.4)
    check_filters([0.5, 0.3, 0.2], None, 1.0)


@THRESHOLD.behaviour(1, "first top_k, then top_p of what is left")
def k_before_p() -> None:
    check_filters([0.4, 0.3, 0.2, 0.1], 2, 0.56)
    check_filters([0.4, 0.3, 0.2, 0.1], 3, 0.5)


@THRESHOLD.behaviour(1, "as a loop over single tokens does it", is_property=True)
def filters_like_a_loop(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(80):
        weights = rng.sample(range(1, 60), rng.randint(2, 8))
        probs = [weight / sum(weights) for weight in weights]
        k = rng.choice([None, rng.randint(1, 9)])
        check_filters(probs, k, rng.choice([None, rng.uniform(0.01, 0.99)]))


# -- 5.4 --


@DRAW.behaviour(1.5, "the share of u that leads to a token is its probability, exactly")
def exact_shares() -> None:
    probs = torch.tensor([0.125, 0.0, 0.5, 0.375])
    steps = 1000
    u = (torch.arange(steps, dtype=torch.float64) + 0.5) / steps
    drawn = sampler.draw(probs.expand(steps, 4), u)
    shares = torch.bincount(drawn, minlength=4) / steps
    for token, (got, right) in enumerate(zip(shares.tolist(), probs.tolist(), strict=True)):
        must(
            abs(got - right) < 2 / steps,
            f"token {token} has the probability {right:g} and was drawn in {got:.1%} of the cases",
        )


@DRAW.behaviour(1, "a token without any probability is never drawn, not even at the ends")
def never_impossible() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]])
    for u in (0.0, 0.25, 0.5, 0.75, 1 - 2**-53):
        [token] = sampler.draw(probs, torch.tensor([u], dtype=torch.float64)).tolist()
        must(token in (1, 3), f"u = {u}: token {token} was drawn, which has the probability 0")


@DRAW.behaviour(0.5, "each row has its own random number")
def row_by_row() -> None:
    probs = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    drawn = sampler.draw(probs, torch.tensor([0.1, 0.9], dtype=torch.float64)).tolist()
    must(drawn == [0, 1], f"u is 0.1 and 0.9, each token has one half: {drawn} were drawn")


# -- 5.5 --


def noise(seed: int, branch: int, position: int) -> float:
    arrays = (np.array([number]) for number in (seed, branch, position))
    return float(sampler.uniform_noise(*arrays)[0])


@NOISE.behaviour(1, "the same counters give the same number, in [0, 1)")
def a_function() -> None:
    for counters in [(1, 0, 5), (1, 2, 5), (2**40, 0, 0)]:
        first, again = noise(*counters), noise(*counters)
        must(first == again, f"(seed, branch, position) {counters} gave {first}, then {again}")
        must(0 <= first < 1, f"{first} is not in [0, 1)")


@NOISE.behaviour(1, "another seed, branch or position: another number")
def all_three_count() -> None:
    base = noise(7, 1, 9)
    for name, counters in [("seed", (8, 1, 9)), ("branch", (7, 2, 9)), ("position", (7, 1, 10))]:
        must(noise(*counters) != base, f"another {name} gives the same number")


@NOISE.behaviour(1, "the numbers are even, and neighbours have nothing in common", is_property=True)
def even(seed: int) -> None:
    number = 4096
    rng = np.random.default_rng(seed)
    start = int(rng.integers(2**31))
    positions = np.arange(start, start + number)
    ones = np.ones(number, np.int64)
    streams = {
        "positions": sampler.uniform_noise(ones * 3, ones, positions),
        "branches": sampler.uniform_noise(ones * 3, positions, ones),
        "seeds": sampler.uniform_noise(positions, ones, ones),
    }
    for name, values in streams.items():
        counts = np.histogram(values, bins=16, range=(0, 1))[0]
        chi2 = float(((counts - number / 16) ** 2 / (number / 16)).sum())
        must(chi2 < 60, f"over {name} the numbers are not even: {counts.tolist()}")
        correlation = float(np.corrcoef(values[:-1], values[1:])[0, 1])
        must(abs(correlation) < 0.1, f"neighbouring {name} have a correlation of {correlation:.2f}")


# -- 5.6 --


@LOGPROBS.behaviour(1, "the sampled token first, then the likeliest ones")
def sampled_first() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    found = sampler.gather_logprobs(logits, torch.tensor([2]), (2,))
    must(found is not None, "a row asks for 2 logprobs, and None came back")
    assert found is not None
    ids = found.token_ids[0].tolist()
    must(ids == [2, 1, 3], f"sampled is 2, the likeliest are 1 and 3; the ids are {ids}")
    values = found.logprobs[0].exp().tolist()
    right = [0.2, 0.4, 0.3]
    must(all(map(near, values, right)), f"the probabilities are {values}, not {right}")


@LOGPROBS.behaviour(1, "the rank is the number of likelier tokens")
def rank() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]] * 2).log()
    found = sampler.gather_logprobs(logits, torch.tensor([2, 1]), (1, 1))
    assert found is not None
    ranks = found.ranks.tolist()
    must(ranks == [2, 0], f"two tokens are likelier than token 2, none than 1: {ranks}")


@LOGPROBS.behaviour(0.5, "only the rows that ask")
def rows_that_ask() -> None:
    logits = torch.tensor([[0.7, 0.3], [0.2, 0.8], [0.6, 0.4]]).log()
    found = sampler.gather_logprobs(logits, torch.tensor([0, 1, 0]), (None, 1, None))
    assert found is not None
    must(list(found.logits_rows) == [1], f"row 1 asks; the rows are {list(found.logits_rows)}")
    must(found.token_ids.tolist() == [[1, 1]], f"its ids are {found.token_ids.tolist()}")
    nothing = sampler.gather_logprobs(logits, torch.tensor([0, 1, 0]), (None, None, None))
    must(nothing is None, "no row asks for logprobs: None")


# -- 5.7 --


@CONSTRAINTS.behaviour(1, "the order: mask, edits, processors, penalties")
def order() -> None:
    from nanoserve.sampler import LogitEdits, LogitMask, RequestProcessors, SamplingBatch

    seen: list[list[float]] = []

    def look(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append(logits.tolist())
        return logits + 1.0

    batch = SamplingBatch(
        num_logprobs=(None,),
        mask=LogitMask(torch.tensor([0]), torch.tensor([[0.0, -math.inf, 0.0]])),
        edits=LogitEdits(torch.tensor([0]), torch.tensor([0]), torch.tensor([0.5])),
        processors=(RequestProcessors(0, (look,), [], []),),
        penalties=Penalties(
            torch.tensor([0]),
            torch.tensor([[0]]),
            torch.tensor([[1]], dtype=torch.int32),
            torch.tensor([2.0]),
            torch.tensor([0.0]),
            torch.tensor([0.0]),
        ),
    )
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    after = sampler.apply_constraints(logits, batch)
    must(len(seen) == 1, f"the logits processor was called {len(seen)} times")
    must(
        seen[0] == [1.5, -math.inf, 3.0],
        f"mask and edits come before the processors; those saw {seen[0]}",
    )
    must(
        after[0].tolist() == [1.25, -math.inf, 4.0],
        f"(1 + 0.5 + 1) / 2 is 1.25, token 1 is forbidden: {after[0].tolist()}",
    )
    must(logits.tolist() == [[1.0, 2.0, 3.0]], "the model's own logits were written to")
