"""Each stage of the sampler against a slow loop, and all of it against the exact distribution."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_oracle import one_thread
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve import sampler
from nanoserve.logits_processors import RequestProcessors, apply_logits_processors
from nanoserve.sampler import (
    LogitEdits,
    LogitMask,
    Penalties,
    SamplerOutput,
    SamplingBatch,
    apply_constraints,
    apply_min_p,
    apply_top_k_top_p,
    draw,
    gather_logprobs,
    sample,
    uniform_noise,
)

ALMOST_ONE = 1 - 2.0**-53  # the largest number that uniform_noise gives


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


@dataclass(frozen=True)
class Params:
    """The filters of one row; the defaults filter nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    logprobs: int | None = None
    branch: int = 0


def batch_of(rows: list[Params], vocab_size: int) -> SamplingBatch:
    """A batch as the model runner makes it: None for a filter that no row uses."""
    top_k = torch.tensor([row.top_k or vocab_size for row in rows]).clamp(max=vocab_size)
    top_p = torch.tensor([row.top_p for row in rows])
    min_p = torch.tensor([row.min_p for row in rows])
    seeds = np.array([row.seed for row in rows])
    branches = np.array([row.branch for row in rows])
    positions = np.array([row.position for row in rows])
    return SamplingBatch(
        temperature=torch.tensor([row.temperature for row in rows]),
        top_k=top_k if (top_k < vocab_size).any() else None,
        top_p=top_p if (top_p < 1).any() else None,
        min_p=min_p if (min_p > 0).any() else None,
        uniform=torch.from_numpy(uniform_noise(seeds, branches, positions)),
        num_logprobs=tuple(row.logprobs for row in rows),
    )


def sample_to_host(logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
    return sample(logits, batch).to_host()


def sample_rows(logits: Tensor, rows: list[Params]) -> list[int]:
    return sample_to_host(logits, batch_of(rows, logits.shape[1])).token_ids


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def exact_distribution(logits: list[float], params: Params) -> list[float]:
    """The definition, token by token: temperature, then min_p, then top_k, then top_p.

    Equal logits are kept or dropped together.
    """
    scaled = [logit / params.temperature for logit in logits]
    probs = softmax(scaled)
    kept = [token for token, prob in enumerate(probs) if prob >= params.min_p * max(probs)]
    kept.sort(key=lambda token: -scaled[token])
    kept = kept[: params.top_k or None]
    mass = sum(probs[token] for token in kept)
    nucleus, total = [], 0.0
    for token in kept:
        if total < params.top_p:
            nucleus.append(token)
        total += probs[token] / mass
    least = min(scaled[token] for token in nucleus)
    return softmax([logit if logit >= least else -math.inf for logit in scaled])


def is_near_a_limit(logits: list[float], params: Params) -> bool:
    """True where float32 may honestly decide otherwise than float64."""
    probs = sorted(softmax([logit / params.temperature for logit in logits]), reverse=True)
    if any(abs(prob / probs[0] - params.min_p) < 1e-4 for prob in probs if params.min_p):
        return True
    kept = [prob for prob in probs if prob >= params.min_p * probs[0]][: params.top_k or None]
    sums = itertools.accumulate(prob / sum(kept) for prob in kept)
    return params.top_p < 1 and any(abs(total - params.top_p) < 1e-4 for total in sums)


# -- the filters --

LOGIT_ROWS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12)


def kept_of(filtered: Tensor) -> list[bool]:
    return (filtered[0] > -math.inf).tolist()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(LOGIT_ROWS, st.sampled_from([0.0, 0.05, 0.3, 0.7, 1.0]))
def test_min_p_drops_what_is_much_less_likely_than_the_likeliest(
    logits: list[float], min_p: float
) -> None:
    params = Params(min_p=min_p)
    assume(min_p == 1 or not is_near_a_limit(logits, params))
    filtered = apply_min_p(torch.tensor([logits]), torch.tensor([min_p]))
    assert kept_of(filtered) == [prob > 0 for prob in exact_distribution(logits, params)]
    if min_p == 1:
        assert kept_of(filtered) == [logit == max(logits) for logit in logits]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(LOGIT_ROWS, st.integers(0, 14), st.sampled_from([1e-6, 0.2, 0.5, 0.8, 0.95, 1.0]))
def test_top_k_and_top_p_keep_the_fewest_that_reach(
    logits: list[float], top_k: int, top_p: float
) -> None:
    """Rows of eighths have many ties, which are kept or dropped together."""
    params = Params(top_k=top_k, top_p=top_p)
    assume(not is_near_a_limit(logits, params))
    batch = batch_of([params], len(logits))
    filtered = apply_top_k_top_p(torch.tensor([logits]), batch.top_k, batch.top_p)
    assert kept_of(filtered) == [prob > 0 for prob in exact_distribution(logits, params)]
    kept = filtered > -math.inf
    assert torch.equal(filtered[kept], torch.tensor([logits])[kept])


def test_the_token_that_crosses_top_p_is_kept() -> None:
    """0.5 + 0.3 reaches 0.7; 0.5 alone does not. The example of the docstring."""
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    for top_p, kept in ((0.7, [False, True, True]), (0.45, [False, True, False])):
        assert kept_of(apply_top_k_top_p(logits, None, torch.tensor([top_p]))) == kept


def test_a_filter_that_is_off_leaves_its_row_alone_in_any_company() -> None:
    """A row with top_p=1 keeps tokens far below float32's resolution of a sum near 1."""
    row = torch.tensor([0.0, -20.0, -25.0, -60.0])
    logits = torch.stack((row, row))
    filtered = apply_top_k_top_p(logits, torch.tensor([4, 2]), torch.tensor([1.0, 0.5]))
    assert torch.equal(filtered[0], row)
    assert kept_of(filtered[1:]) == [True, False, False, False]
    assert torch.equal(apply_min_p(logits, torch.tensor([0.0, 0.5]))[0], row)


# -- constraints --

VOCAB = 12
STAGES = ("mask", "forbidden", "bias", "processors", "penalties")


@dataclass(frozen=True)
class Rules:
    """The constraints of one row; the defaults constrain nothing."""

    mask: tuple[int, ...] | None = None  # the allowed tokens
    forbidden: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    processor: float | None = None  # tanh, times this: a processor that is no shift
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0

    @property
    def has_penalties(self) -> bool:
        return (self.presence, self.frequency, self.repetition) != (0.0, 0.0, 1.0)


def constrained_batch(rules: list[Rules]) -> SamplingBatch:
    """As the runner makes it: None for what no row uses."""
    masked = [(i, r.mask) for i, r in enumerate(rules) if r.mask is not None]
    edits = [(i, token, -math.inf) for i, r in enumerate(rules) for token in r.forbidden]
    edits += [(i, token, value) for i, r in enumerate(rules) for token, value in r.bias]
    penalized = [(i, r) for i, r in enumerate(rules) if r.has_penalties]
    mask = penalties = None
    if masked:
        rows = [[0.0 if t in mask else -math.inf for t in range(VOCAB)] for _, mask in masked]
        mask = LogitMask(torch.tensor([i for i, _ in masked]), torch.tensor(rows))
    if penalized:
        some = [r for _, r in penalized]
        seen = [[*r.prompt, *r.output] for r in some]
        seen = [tokens + tokens[:1] * (20 - len(tokens)) for tokens in seen]
        penalties = Penalties(
            logits_rows=torch.tensor([i for i, _ in penalized]),
            token_ids=torch.tensor(seen),
            output_counts=torch.tensor(
                [[r.output.count(t) for t in tokens] for r, tokens in zip(some, seen, strict=True)]
            ),
            repetition=torch.tensor([r.repetition for r in some]),
            frequency=torch.tensor([r.frequency for r in some]),
            presence=torch.tensor([r.presence for r in some]),
        )
    return replace(
        batch_of([Params(0.0)] * len(rules), VOCAB),
        mask=mask,
        edits=LogitEdits(*map(torch.tensor, zip(*edits, strict=True))) if edits else None,
        processors=tuple(
            RequestProcessors(i, (squash(r.processor),), list(r.prompt), list(r.output))
            for i, r in enumerate(rules)
            if r.processor is not None
        ),
        penalties=penalties,
    )


def squash(factor: float) -> Callable[[list[int], Tensor], Tensor]:
    return lambda output, logits: logits.tanh() * factor


def slow_stages(rules: Rules) -> dict[str, Callable[[list[float]], list[float]]]:
    """The definition of each stage, one token at a time."""

    def penalize(row: list[float]) -> list[float]:
        result = []
        for token, logit in enumerate(row):
            if token in rules.prompt or token in rules.output:
                logit = logit / rules.repetition if logit > 0 else logit * rules.repetition
            logit -= rules.frequency * rules.output.count(token)
            logit -= rules.presence * (token in rules.output)
            result.append(logit)
        return result

    allowed = range(VOCAB) if rules.mask is None else rules.mask
    return {
        "mask": lambda row: [x if t in allowed else -math.inf for t, x in enumerate(row)],
        "forbidden": lambda row: [
            -math.inf if t in rules.forbidden else x for t, x in enumerate(row)
        ],
        "bias": lambda row: [x + dict(rules.bias).get(t, 0.0) for t, x in enumerate(row)],
        "processors": lambda row: (
            row if rules.processor is None else [math.tanh(x) * rules.processor for x in row]
        ),
        "penalties": penalize,
    }


def by_the_definition(
    row: list[float], rules: Rules, order: tuple[str, ...] = STAGES
) -> list[float]:
    for name in order:
        row = slow_stages(rules)[name](row)
    return row


IDS = st.integers(0, VOCAB - 1)
SOME_IDS = st.lists(IDS, min_size=1, max_size=8, unique=True).map(tuple)
RULES = st.builds(
    Rules,
    mask=st.none() | SOME_IDS,
    forbidden=st.just(()) | SOME_IDS,
    bias=st.dictionaries(IDS, st.integers(-30, 30).map(float), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    processor=st.sampled_from([None, None, 2.0, -3.0]),
    prompt=st.lists(IDS, min_size=1, max_size=6).map(tuple),
    output=st.lists(IDS, max_size=9).map(tuple),
    presence=st.sampled_from([0.0, 0.0, 0.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.0, 0.25, -1.0]),
    repetition=st.sampled_from([1.0, 1.0, 1.5, 0.5]),
)
MANY_ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB), RULES
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(MANY_ROWS, st.integers(0, 4))
def test_constraints_against_a_slow_loop(
    rows: list[tuple[list[float], Rules]], position: int
) -> None:
    """All stages together, in their order, each row with rules of its own. A row does not depend
    on its neighbours, and a row without rules stays as it is, bit for bit, -inf included."""
    plain = [math.pi, -0.0, -math.inf, 1e-30, -1e30, *([0.1] * (VOCAB - 5))]
    position = min(position, len(rows))
    rows = [*rows[:position], (plain, Rules()), *rows[position:]]
    logits = torch.tensor([row for row, _ in rows])
    before = logits.clone()
    result = apply_constraints(logits, constrained_batch([rules for _, rules in rows]))
    assert torch.equal(logits, before)
    assert result[position].numpy().tobytes() == logits[position].numpy().tobytes()
    for i, (row, rules) in enumerate(rows):
        assert result[i].tolist() == pytest.approx(by_the_definition(row, rules), 1e-6, 1e-5)
        alone = apply_constraints(logits[i : i + 1], constrained_batch([rules]))
        assert torch.equal(alone[0], result[i])


def test_the_order_of_the_stages_is_the_documented_one() -> None:
    """Exchanging any two stages that do not commute changes the result of these rules. (Stages
    that only forbid or add commute with each other.)"""
    row = [(i * 7 % VOCAB - 5) / 4 for i in range(VOCAB)]
    rules = Rules(
        mask=tuple(range(1, 11)),
        forbidden=(3, 4),
        bias=((2, 1.5), (5, -2.0)),
        processor=2.0,
        prompt=(2, 6),
        output=(5, 7, 7),
        presence=0.5,
        frequency=0.25,
        repetition=1.5,
    )
    right = by_the_definition(row, rules)
    [result] = apply_constraints(torch.tensor([row]), constrained_batch([rules])).tolist()
    assert result == pytest.approx(right, abs=1e-6)
    for first, second in itertools.combinations(range(len(STAGES)), 2):
        order = list(STAGES)
        order[first], order[second] = order[second], order[first]
        exchanged = by_the_definition(row, rules, tuple(order))
        commute = {STAGES[first], STAGES[second]} <= {"mask", "forbidden", "bias"}
        assert (exchanged == pytest.approx(right, abs=1e-6)) == commute, order


def test_constraints_come_before_temperature_and_filters() -> None:
    """A bias of 2 at temperature 10 is worth 0.2; top_k and min_p see biased logits."""
    logits = torch.tensor([[0.0, 1.0, 0.5, -1.0]])
    bias = LogitEdits(torch.tensor([0]), torch.tensor([3]), torch.tensor([2.5]))
    for params in (Params(top_k=1), Params(min_p=0.9), Params(top_p=0.2), Params(temperature=0.0)):
        batch = replace(batch_of([params], 4), edits=bias)
        assert sample_to_host(logits, batch).token_ids == [3]
        assert sample_rows(logits, [params]) == [1]
    n = 4000
    bias = LogitEdits(torch.arange(n), torch.full((n,), 3), torch.full((n,), 2.0))
    batch = replace(batch_of([Params(10.0, seed=seed) for seed in range(n)], 4), edits=bias)
    tokens = sample_to_host(logits.expand(n, -1), batch).token_ids
    share = softmax([0.0, 0.1, 0.05, 0.1])[3]
    assert tokens.count(3) / n == pytest.approx(share, abs=0.035)


def test_processors_see_what_they_ask_for() -> None:
    """Two parameters: output, logits. Three: prompt, output, logits. Parameters with defaults are
    the caller's. Processors run in their order, and get a copy: writing into the copy, at once or
    in a later step, changes no logits."""
    seen: list[Any] = []
    kept: list[Tensor] = []

    def two(output: list[int], logits: Tensor) -> Tensor:
        seen.append((output, logits.tolist()))
        logits.fill_(7.0)
        return logits

    def three(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        seen.append((prompt, output, logits.tolist()))
        return logits + 1

    class Callable_:
        def __call__(self, output: list[int], logits: Tensor) -> Tensor:
            kept.append(logits)
            return logits

    logits = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    before = logits.clone()
    processors = (two, three, lambda output, logits, own=5.0: logits - own, Callable_())
    errors: dict[int, BaseException] = {}
    requests = (RequestProcessors(1, processors, [8], [9, 9]),)
    result = apply_logits_processors(logits, requests, errors)
    assert not errors
    kept[0].zero_()
    assert seen == [([9, 9], [2.0, 3.0]), ([8], [9, 9], [7.0, 7.0])]
    assert result.tolist() == [[0.0, 1.0], [3.0, 3.0], [4.0, 5.0]]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("wrong", [None, [1.0, 2.0], torch.zeros(3), torch.zeros(1, 2)], ids=str)
def test_a_processor_that_returns_something_else_is_refused(wrong: Any) -> None:
    processors = (RequestProcessors(0, (lambda output, logits: wrong,), [], []),)
    errors: dict[int, BaseException] = {}
    apply_logits_processors(torch.zeros(1, 2), processors, errors)
    assert re.search(r"must return a tensor of shape \(2,\).*; got", str(errors[0]))


# -- the draw --


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.1, 1.0]), min_size=1, max_size=9),
    st.sampled_from([0.0, 2.0**-53, 0.3, 0.5, 0.999, ALMOST_ONE]),
)
def test_the_draw_inverts_the_cumulative_sum(weights: list[float], u: float) -> None:
    """The first token whose cumulative probability exceeds u; never one of probability 0."""
    assume(sum(weights) > 0)
    probs = torch.tensor([weights]) / sum(weights)
    drawn = int(draw(probs, torch.tensor([u], dtype=torch.float64)))
    sums = list(itertools.accumulate(probs[0].tolist()))
    assert drawn == next(token for token, total in enumerate(sums) if total > u * sums[-1])
    assert probs[0, drawn] > 0


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 150_000])
def test_the_ends_of_the_draw(vocab_size: int) -> None:
    """u = 0 and u just below 1, with filtered tokens at both ends of the vocabulary."""
    torch.manual_seed(vocab_size)
    logits = torch.randn(2, vocab_size)
    if vocab_size > 2:
        logits[:, 0] = logits[:, -1] = -math.inf
    uniform = torch.tensor([0.0, ALMOST_ONE], dtype=torch.float64)
    first, last = draw(logits.softmax(dim=-1), uniform).tolist()
    assert (first, last) == ((1, vocab_size - 2) if vocab_size > 2 else (0, vocab_size - 1))


def test_the_draw_resolves_a_large_vocabulary() -> None:
    """u just before and just after the end of a token's share: in float32, whose steps near 1 are
    as wide as 1 % of a token of 150 000, the two would often be the same number."""
    probs = torch.randn(1, 150_000, generator=torch.Generator().manual_seed(0)).softmax(dim=-1)
    tokens = np.arange(20) * 7000 + 3
    sums = np.cumsum(probs[0].double().numpy())
    for side, expected in ((-1e-10, tokens), (1e-10, tokens + 1)):
        uniform = torch.from_numpy((sums[tokens] + side) / sums[-1])
        assert draw(probs.expand(20, -1), uniform).tolist() == expected.tolist()


# -- the whole --

NUM_ROWS = 20_000
LOGITS = [1.0, -0.5, 0.0, 2.0, 0.7, 1.0, -1.0, 0.3, 1.6, -0.2]


@pytest.mark.parametrize("temperature", [0.7, 1.8])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), list(itertools.product([0, 6], [1.0, 0.8], [0.0, 0.2]))
)
def test_tokens_follow_the_exact_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Pearson's chi-square over many seeds; a filtered token never comes.

    With fixed seeds this never fails by chance; 5 standard deviations is a generous threshold.
    """
    params = Params(temperature, top_k, top_p, min_p)
    assert not is_near_a_limit(LOGITS, params)
    expected = NUM_ROWS * np.array(exact_distribution(LOGITS, params))
    batch = batch_of([params], len(LOGITS))
    filters = {
        name: value.expand(NUM_ROWS)
        for name in ("temperature", "top_k", "top_p", "min_p")
        if (value := getattr(batch, name)) is not None
    }
    zeros, positions = np.zeros(NUM_ROWS), np.full(NUM_ROWS, 17)
    rows = SamplingBatch(
        uniform=torch.from_numpy(uniform_noise(np.arange(NUM_ROWS), zeros, positions)),
        num_logprobs=(None,) * NUM_ROWS,
        **filters,
    )
    tokens = sample_to_host(torch.tensor(LOGITS).expand(NUM_ROWS, -1), rows).token_ids
    counts = np.bincount(tokens, minlength=len(LOGITS))
    possible = expected > 0
    assert not counts[~possible].any(), "a filtered token was drawn"
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


PARAMS = st.builds(
    Params,
    temperature=st.sampled_from([0.0, 0.0, 1e-6, 0.1, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 50, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3, 1e-4]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 5000),
    logprobs=st.none() | st.integers(0, 5),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(PARAMS, min_size=1, max_size=8), st.integers(0, 2**31))
def test_a_row_gets_the_same_alone_and_in_any_company(rows: list[Params], seed: int) -> None:
    """Greedy beside sampled, filtered beside not, in any order: a token depends on the row's
    logits, parameters, seed and position only."""
    logits = torch.randn(len(rows), 200, generator=torch.Generator().manual_seed(seed)) * 3
    together = sample_to_host(logits, batch_of(rows, 200))
    for i, params in enumerate(rows):
        alone = sample_to_host(logits[i : i + 1], batch_of([params], 200))
        assert alone.token_ids == together.token_ids[i : i + 1]
        assert alone.logprobs == together.logprobs[i : i + 1]
        if params.temperature < 1e-5 or params.top_k == 1 or params.min_p == 1:
            assert together.token_ids[i] == int(logits[i].argmax())
    backwards = sample_rows(logits.flip(0), rows[::-1])
    assert backwards[::-1] == together.token_ids


def test_seed_and_position_make_the_difference() -> None:
    streams = list(itertools.product(range(4), repeat=3))
    rows = [Params(seed=seed, branch=b, position=p) for seed, b, p in streams]
    tokens = dict(zip(streams, sample_rows(torch.zeros(64, 5000), rows), strict=True))
    assert len(set(tokens.values())) > 58
    again = [(3, 0, 2), (2, 0, 3), (0, 3, 2)]
    rows = [Params(seed=seed, branch=b, position=p) for seed, b, p in again]
    assert sample_rows(torch.zeros(3, 5000), rows) == [tokens[stream] for stream in again]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    assert sample_rows(logits, [Params(temperature=0.0)] * 2) == [1, 0]
    assert sample_rows(logits, [Params(temperature=0.0), Params(top_k=1, min_p=0.5)])[0] == 1


def test_only_a_temperature_of_next_to_nothing_is_greedy() -> None:
    """Below 1e-5, as in vLLM. Above, tokens are drawn, and equal logits give different tokens."""
    logits = torch.zeros(40, 8)
    for temperature, is_greedy in ((0.0, True), (9e-6, True), (2e-5, False), (0.5, False)):
        tokens = sample_rows(logits, [Params(temperature, seed=seed) for seed in range(40)])
        assert (set(tokens) == {0}) == is_greedy


def test_extreme_logits() -> None:
    """No NaN, no token of probability 0: logits of 1e4, rows with -inf, hardly any temperature."""
    huge = torch.tensor([1e4, 1e4 - 1, -1e4, 0.0])
    masked = torch.tensor([-math.inf, 0.5, -math.inf, 0.4])
    only = torch.tensor([-math.inf, -math.inf, -1e4, -math.inf])
    possible = ({0, 1}, {1, 3}, {2})
    for temperature, top_k, top_p, min_p, seed in itertools.product(
        [1e-5, 1.0, 1e4], [0, 2, 4], [1.0, 0.9], [0.0, 0.2], range(5)
    ):
        params = Params(temperature, top_k, top_p, min_p, seed)
        tokens = sample_rows(torch.stack((huge, masked, only)), [params] * 3)
        assert tokens[1] in possible[1]
        assert tokens[2] in possible[2]
        assert tokens[0] in possible[0] or temperature > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 50).to(dtype)
    batch = batch_of([Params(seed=seed, top_p=0.9, logprobs=2) for seed in range(6)], 50)
    assert sample_to_host(logits, batch) == sample_to_host(logits.float(), batch)


# -- the noise --


def test_noise_is_uniform_and_of_the_right_range() -> None:
    """Over positions of one stream, over streams at one position, over the branches of a seed."""
    n = 40_000
    for seeds, branches, positions in (
        (np.full(n, 5), np.zeros(n, np.int64), np.arange(n)),
        (np.arange(n), np.zeros(n, np.int64), np.zeros(n, np.int64)),
        (np.arange(n) * 2**40, np.ones(n, np.int64), np.full(n, 1000)),
        (np.full(n, 5), np.arange(n), np.full(n, 3)),
    ):
        noise = uniform_noise(seeds, branches, positions)
        assert noise.dtype == np.float64
        assert 0 <= noise.min() < 1e-3
        assert 1 - 1e-3 < noise.max() <= ALMOST_ONE
        counts = np.histogram(noise, bins=64, range=(0, 1))[0]
        statistic = ((counts - n / 64) ** 2 / (n / 64)).sum()
        assert statistic < 63 + 5 * math.sqrt(2 * 63)


@pytest.mark.parametrize("fixed", ["seed", "branch", "position"])
def test_neighbours_have_nothing_in_common(fixed: str) -> None:
    """Seeds, branches and positions, in pairs. Not shifted against each other either: seed s at
    position p + 1 is not seed s + 1 at p, branch b of seed s not branch b - 1 of seed s + 1."""
    first, second = (axis.ravel() for axis in np.meshgrid(np.arange(300), np.arange(300)))
    constant = np.full(90_000, 4)
    streams = {
        "seed": (constant, second, first),
        "branch": (second, constant, first),
        "position": (second, first, constant),
    }
    noise = uniform_noise(*streams[fixed]).reshape(300, 300)
    assert len(np.unique(noise)) == noise.size
    for shift in ((0, 1), (1, 0), (1, 1), (1, -1), (2, 0), (0, 2)):
        other = np.roll(noise, shift, axis=(0, 1))
        correlation = np.corrcoef(noise.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 5 / 300, shift


def test_noise_takes_the_largest_seeds_and_depends_on_all_three() -> None:
    zeros = np.zeros(3, np.int64)
    largest = uniform_noise(np.array([2**63 - 1, 2**63 - 1, 0]), zeros, np.array([0, 2**31, 0]))
    assert len(set(largest.tolist())) == 3
    streams = list(itertools.permutations((7, 2, 5)))
    one_by_one = [uniform_noise(*(np.array([number]) for number in s))[0] for s in streams]
    assert uniform_noise(*np.array(streams).T).tolist() == one_by_one
    assert len(set(one_by_one)) == 6


# -- logprobs --


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(LOGIT_ROWS.filter(lambda row: len(row) > 3), min_size=1, max_size=4), st.data())
def test_logprobs_by_the_definition(rows: list[list[float]], data: st.DataObject) -> None:
    """The sampled token first, then the likeliest tokens, best first."""
    size = min(map(len, rows))
    logits = torch.tensor([row[:size] for row in rows])
    numbers = tuple(data.draw(st.none() | st.integers(0, size)) for _ in rows)
    token_ids = [data.draw(st.integers(0, size - 1)) for _ in rows]
    asking = [i for i, number in enumerate(numbers) if number is not None]
    found = gather_logprobs(logits, torch.tensor(token_ids), numbers)
    assert (found.logits_rows if found else []) == asking
    for i, entry in zip(asking, found.to_host() if found else [], strict=True):
        probs = softmax(logits[i].tolist())
        assert entry.token_ids[0] == token_ids[i]
        assert len(entry.token_ids) == len(entry.logprobs) == numbers[i] + 1
        assert len(set(entry.token_ids[1:])) == numbers[i]
        for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            assert logprob == pytest.approx(math.log(probs[token_id]), abs=1e-5)
        best = sorted(map(math.log, probs), reverse=True)[: numbers[i]]
        assert entry.logprobs[1:] == pytest.approx(best, abs=1e-5)
        assert entry.sampled_rank == 1 + sum(logit > logits[i][token_ids[i]] for logit in logits[i])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(MANY_ROWS, PARAMS)
def test_logprobs_are_of_the_raw_logits(
    rows: list[tuple[list[float], Rules]], params: Params
) -> None:
    """Constraints, temperature and filters change which token is chosen, not what is reported."""
    logits = torch.tensor([row for row, _ in rows])
    filters = batch_of([replace(params, logprobs=-1)] * len(rows), VOCAB)
    rules = constrained_batch([rules for _, rules in rows])
    batch = replace(rules, **{name: getattr(filters, name) for name in FILTERS})
    assume(bool(apply_constraints(logits, batch).amax(dim=-1).isfinite().all()))
    output = sample_to_host(logits, batch)
    found = gather_logprobs(logits, torch.tensor(output.token_ids), (VOCAB,) * len(rows))
    assert found is not None
    assert output.logprobs == found.to_host()


FILTERS = ("temperature", "top_k", "top_p", "min_p", "uniform", "num_logprobs")

# -- results stay on the device --


class NoWaiting(TorchDispatchMode):
    """Operations that make the CPU wait for a number of the device, or for a shape, are errors."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = str(func)
        assert not any(word in name for word in self.FORBIDDEN), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def test_a_cause_is_sought_where_a_row_has_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere a CPU saves the passes over the logits that this takes."""
    monkeypatch.setattr(sampler, "find_cause", lambda raw, logits: 1 / 0)
    logits = torch.randn(2, VOCAB)
    batch = constrained_batch([Rules(mask=(2,)), Rules()])
    assert sample(logits, batch).token_ids[0] == 2
    with pytest.raises(ZeroDivisionError):
        sample(logits, constrained_batch([Rules(mask=(2,), forbidden=(2,)), Rules()]))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sampling_does_not_wait_for_the_device(temperature: float) -> None:
    """Filters, constraints, penalties, logprobs: all stay on the device until `to_host`, which is
    an error if all tokens of a row are forbidden. (A logits processor may wait.)"""
    rules = [
        Rules(forbidden=(0,)),
        Rules(mask=(2, 4, 5), forbidden=(2,)),
        Rules(bias=((3, 4.0),)),
        Rules(output=(1, 2), presence=0.1),
    ]
    rows = [Params(temperature, 3, 0.9, 0.01, 5, i, i % 3 or None) for i in range(4)]
    filters = batch_of(rows, VOCAB)
    is_greedy = temperature == 0
    filters = replace(filters, **dict.fromkeys(FILTERS[:-1])) if is_greedy else filters
    given = {name: getattr(filters, name) for name in FILTERS}
    logits = torch.randn(4, VOCAB)
    possible = replace(constrained_batch(rules), is_greedy=is_greedy, **given)
    rules[1] = Rules(mask=(2,), forbidden=(2,))
    impossible = replace(constrained_batch(rules), is_greedy=is_greedy, **given)
    with NoWaiting():
        sampled = sample(logits, possible)
        empty = sample(logits, impossible)
    assert sampled.to_host().token_ids[1] in (4, 5)
    assert empty.to_host().errors.keys() == {1}
    assert "no token is possible" in str(empty.to_host().errors[1])


def test_map_reaches_every_tensor() -> None:
    """Tokens and logprobs are copied to the CPU together."""
    rules = constrained_batch([Rules(), Rules(mask=(2, 3)), Rules()])
    batch = replace(rules, num_logprobs=(2, None, 0))
    sampled = sample(torch.randn(3, VOCAB), batch)
    seen: list[Tensor] = []

    def copy(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    copied = sampled.map(copy)
    assert len(seen) == 4
    assert copied.logprobs is not None
    tensors = [copied.token_ids, *copied.logprobs[2:]]
    assert all(a is not b for a in tensors for b in seen)
    assert copied.to_host() == sampled.to_host()
    lengths = [entry and len(entry.token_ids) for entry in copied.to_host().logprobs]
    assert lengths == [3, None, 1]
    unconstrained = sample(torch.randn(2, 20), batch_of([Params(), Params()], 20))
    assert unconstrained.logprobs is None
    assert unconstrained.map(copy).to_host() == unconstrained.to_host()
