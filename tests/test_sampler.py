"""Each stage of the sampler against a slow loop, and all of it against the exact distribution."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanoserve.sampler import (
    Penalties,
    RowError,
    RowProcessors,
    SamplingBatch,
    TokenRows,
    apply_allowed_token_ids,
    apply_banned,
    apply_constraints,
    apply_logit_bias,
    apply_logits_processors,
    apply_min_p,
    apply_penalties,
    apply_temperature,
    apply_top_k_top_p,
    choose_tokens,
    draw,
    gather_logprobs,
    sample,
    uniform_noise,
)
from nanoserve.sequence import TokenLogprobs

ALMOST_ONE = 1 - 2.0**-53  # the largest number that uniform_noise gives


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Wish:
    """What one row asks for; the defaults filter nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    logprobs: int | None = None
    branch: int = 0


def batch_of(wishes: list[Wish], vocab_size: int) -> SamplingBatch:
    """As the model runner makes it: None for what no row uses."""
    top_k = torch.tensor([wish.top_k or vocab_size for wish in wishes]).clamp(max=vocab_size)
    top_p = torch.tensor([wish.top_p for wish in wishes])
    min_p = torch.tensor([wish.min_p for wish in wishes])
    seeds = np.array([wish.seed for wish in wishes])
    branches = np.array([wish.branch for wish in wishes])
    positions = np.array([wish.position for wish in wishes])
    return SamplingBatch(
        temperature=torch.tensor([wish.temperature for wish in wishes]),
        top_k=top_k if (top_k < vocab_size).any() else None,
        top_p=top_p if (top_p < 1).any() else None,
        min_p=min_p if (min_p > 0).any() else None,
        uniform=torch.from_numpy(uniform_noise(seeds, branches, positions)),
        num_logprobs=tuple(wish.logprobs for wish in wishes),
    )


def sample_rows(logits: Tensor, wishes: list[Wish]) -> list[int]:
    return sample(logits, batch_of(wishes, logits.shape[1])).token_ids


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    return [weight / sum(weights) for weight in weights]


def exact_distribution(logits: list[float], wish: Wish) -> list[float]:
    """The definition, token by token: temperature, then min_p, then top_k, then top_p.

    Equal logits are kept or dropped together.
    """
    scaled = [logit / wish.temperature for logit in logits]
    probs = softmax(scaled)
    kept = [token for token, prob in enumerate(probs) if prob >= wish.min_p * max(probs)]
    kept.sort(key=lambda token: -scaled[token])
    kept = kept[: wish.top_k or None]
    mass = sum(probs[token] for token in kept)
    nucleus, total = [], 0.0
    for token in kept:
        if total < wish.top_p:
            nucleus.append(token)
        total += probs[token] / mass
    least = min(scaled[token] for token in nucleus)
    return softmax([logit if logit >= least else -math.inf for logit in scaled])


def is_near_a_limit(logits: list[float], wish: Wish) -> bool:
    """True where float32 may honestly decide otherwise than float64."""
    probs = sorted(softmax([logit / wish.temperature for logit in logits]), reverse=True)
    if any(abs(prob / probs[0] - wish.min_p) < 1e-4 for prob in probs if wish.min_p):
        return True
    kept = [prob for prob in probs if prob >= wish.min_p * probs[0]][: wish.top_k or None]
    sums = itertools.accumulate(prob / sum(kept) for prob in kept)
    return wish.top_p < 1 and any(abs(total - wish.top_p) < 1e-4 for total in sums)


# ------------------------------------------------------------------------------ the stages

LOGIT_ROWS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12)


def kept_of(filtered: Tensor) -> list[bool]:
    return (filtered[0] > -math.inf).tolist()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(LOGIT_ROWS, st.floats(0.01, 100))
def test_temperature_divides(logits: list[float], temperature: float) -> None:
    output = apply_temperature(torch.tensor([logits, logits]), torch.tensor([temperature, 1.0]))
    assert output[0].tolist() == pytest.approx([logit / temperature for logit in logits], rel=1e-6)
    assert output[1].tolist() == logits


@settings(max_examples=100, deadline=None, derandomize=True)
@given(LOGIT_ROWS, st.sampled_from([0.0, 0.05, 0.3, 0.7, 1.0]))
def test_min_p_drops_what_is_much_less_likely_than_the_likeliest(
    logits: list[float], min_p: float
) -> None:
    wish = Wish(min_p=min_p)
    assume(min_p == 1 or not is_near_a_limit(logits, wish))
    filtered = apply_min_p(torch.tensor([logits]), torch.tensor([min_p]))
    assert kept_of(filtered) == [prob > 0 for prob in exact_distribution(logits, wish)]
    if min_p == 1:
        assert kept_of(filtered) == [logit == max(logits) for logit in logits]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(LOGIT_ROWS, st.integers(0, 14), st.sampled_from([1e-6, 0.2, 0.5, 0.8, 0.95, 1.0]))
def test_top_k_and_top_p_keep_the_fewest_that_reach(
    logits: list[float], top_k: int, top_p: float
) -> None:
    """Rows of eighths have many ties; they are kept or dropped together."""
    wish = Wish(top_k=top_k, top_p=top_p)
    assume(not is_near_a_limit(logits, wish))
    batch = batch_of([wish], len(logits))
    filtered = apply_top_k_top_p(torch.tensor([logits]), batch.top_k, batch.top_p)
    assert kept_of(filtered) == [prob > 0 for prob in exact_distribution(logits, wish)]
    kept = filtered > -math.inf
    assert torch.equal(filtered[kept], torch.tensor([logits])[kept])


def test_the_token_that_crosses_top_p_is_kept() -> None:
    """0.5 + 0.3 reaches 0.7; 0.5 alone does not. The example of the docstring."""
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    for top_p, kept in ((0.7, [False, True, True]), (0.45, [False, True, False])):
        filtered = apply_top_k_top_p(logits, None, torch.tensor([top_p]))
        assert kept_of(filtered) == kept
    tiny = apply_top_k_top_p(logits, None, torch.tensor([1e-9]))
    assert kept_of(tiny) == [False, True, False], "at least one token is always kept"


def test_top_p_counts_what_top_k_and_min_p_left() -> None:
    """0.4, 0.3, 0.2, 0.1: of the first two 0.4 is 4/7 = 0.571..., so 0.55 needs only one."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    alone = apply_top_k_top_p(logits, None, torch.tensor([0.55]))
    assert kept_of(alone) == [True, True, False, False]
    both = apply_top_k_top_p(logits, torch.tensor([2]), torch.tensor([0.55]))
    assert kept_of(both) == [True, False, False, False]
    after_min_p = apply_min_p(logits, torch.tensor([0.7]))
    both = apply_top_k_top_p(after_min_p, None, torch.tensor([0.55]))
    assert kept_of(both) == [True, False, False, False]


def test_ties_at_the_limit_are_kept_together() -> None:
    """Which of two equal tokens survives must not depend on the order a sort leaves them in."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 0.0, 1.0]])
    filtered = apply_top_k_top_p(logits, torch.tensor([2]), None)
    assert kept_of(filtered) == [True, True, True, False, True]


def test_filters_that_are_off_leave_the_row_alone_in_any_company() -> None:
    """A row with top_p=1 keeps tokens far below float32's resolution of a sum near 1."""
    row = torch.tensor([0.0, -20.0, -25.0, -60.0])
    logits = torch.stack((row, row))
    filtered = apply_top_k_top_p(logits, torch.tensor([4, 2]), torch.tensor([1.0, 0.5]))
    assert torch.equal(filtered[0], row)
    assert kept_of(filtered[1:]) == [True, False, False, False]
    assert torch.equal(apply_min_p(logits, torch.tensor([0.0, 0.5]))[0], row)


# ------------------------------------------------------------------------------ constraints

VOCAB = 12
FEATURES = ("mask", "allowed", "banned", "bias", "processors", "penalties")


@dataclass(frozen=True)
class Rules:
    """What one row's request asks for; the defaults constrain nothing."""

    mask: tuple[int, ...] | None = None  # tokens that a grammar permits
    allowed: tuple[int, ...] | None = None
    banned: tuple[int, ...] = ()
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
    banned = [(row, token) for row, r in enumerate(rules) for token in r.banned]
    bias = [(row, token, value) for row, r in enumerate(rules) for token, value in r.bias]
    penalized = [(row, r) for row, r in enumerate(rules) if r.has_penalties]
    masks = [[r.mask is None or t in r.mask for t in range(VOCAB)] for r in rules]
    penalties = None
    if penalized:
        some = [r for _, r in penalized]
        penalties = Penalties(
            rows=torch.tensor([row for row, _ in penalized]),
            is_in_prompt=torch.tensor([[t in r.prompt for t in range(VOCAB)] for r in some]),
            output_counts=torch.tensor([[r.output.count(t) for t in range(VOCAB)] for r in some]),
            repetition=torch.tensor([r.repetition for r in some]),
            frequency=torch.tensor([r.frequency for r in some]),
            presence=torch.tensor([r.presence for r in some]),
        )
    return replace(
        batch_of([Wish(0.0)] * len(rules), VOCAB),
        mask=torch.tensor(masks) if any(r.mask is not None for r in rules) else None,
        allowed=tuple((i, r.allowed) for i, r in enumerate(rules) if r.allowed is not None),
        banned=TokenRows([i for i, _ in banned], [t for _, t in banned], []) if banned else None,
        bias=TokenRows(*map(list, zip(*bias, strict=True))) if bias else None,
        processors=tuple(
            RowProcessors(row, (squash(r.processor),), list(r.prompt), list(r.output))
            for row, r in enumerate(rules)
            if r.processor is not None
        ),
        penalties=penalties,
    )


def squash(factor: float) -> Callable[[list[int], Tensor], Tensor]:
    return lambda output, logits: logits.tanh() * factor


def slow_stages(rules: Rules) -> dict[str, Callable[[list[float]], list[float]]]:
    """Each stage as its definition has it, one token at a time."""

    def only(tokens: tuple[int, ...] | None) -> Callable[[list[float]], list[float]]:
        return lambda row: [
            x if tokens is None or t in tokens else -math.inf for t, x in enumerate(row)
        ]

    def penalize(row: list[float]) -> list[float]:
        result = []
        for token, logit in enumerate(row):
            if token in rules.prompt or token in rules.output:
                logit = logit / rules.repetition if logit > 0 else logit * rules.repetition
            logit -= rules.frequency * rules.output.count(token)
            logit -= rules.presence * (token in rules.output)
            result.append(logit)
        return result

    return {
        "mask": only(rules.mask),
        "allowed": only(rules.allowed),
        "banned": only(tuple(t for t in range(VOCAB) if t not in rules.banned)),
        "bias": lambda row: [x + dict(rules.bias).get(t, 0.0) for t, x in enumerate(row)],
        "processors": lambda row: (
            row if rules.processor is None else [math.tanh(x) * rules.processor for x in row]
        ),
        "penalties": penalize,
    }


def by_the_book(row: list[float], rules: Rules, order: tuple[str, ...] = FEATURES) -> list[float]:
    for name in order:
        row = slow_stages(rules)[name](row)
    return row


IDS = st.integers(0, VOCAB - 1)
SOME_IDS = st.lists(IDS, min_size=1, max_size=8, unique=True).map(tuple)
RULES = st.builds(
    Rules,
    mask=st.none() | st.none() | SOME_IDS,
    allowed=st.none() | SOME_IDS,
    banned=st.just(()) | SOME_IDS,
    bias=st.dictionaries(IDS, st.integers(-30, 30).map(float), max_size=4).map(
        lambda bias: tuple(bias.items())
    ),
    processor=st.sampled_from([None, None, 2.0, -3.0]),
    prompt=st.lists(IDS, max_size=6).map(tuple),
    output=st.lists(IDS, max_size=9).map(tuple),
    presence=st.sampled_from([0.0, 0.0, 0.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.0, 0.25, -1.0]),
    repetition=st.sampled_from([1.0, 1.0, 1.5, 0.5]),
)
FIXED_ROW = [(i * 7 % VOCAB - 5) / 4 for i in range(VOCAB)]
MANY_ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB), RULES
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(MANY_ROWS)
def test_constraints_against_a_slow_loop(rows: list[tuple[list[float], Rules]]) -> None:
    """All stages together, in their order, each row with rules of its own. The input stays."""
    logits = torch.tensor([row for row, _ in rows])
    before = logits.clone()
    result = apply_constraints(logits, constrained_batch([rules for _, rules in rows]))
    assert torch.equal(logits, before)
    for (row, rules), got in zip(rows, result.tolist(), strict=True):
        assert got == pytest.approx(by_the_book(row, rules), abs=1e-5)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MANY_ROWS, st.integers(0, 4))
def test_a_row_without_rules_is_untouched_by_any_neighbour(
    rows: list[tuple[list[float], Rules]], position: int
) -> None:
    """Bit for bit, logits that are -inf already included; and a row's own result does not depend
    on the others either."""
    position = min(position, len(rows))
    plain = [math.pi, -0.0, -math.inf, 1e-30, -1e30, *([0.1] * (VOCAB - 5))]
    rows = [*rows[:position], (plain, Rules()), *rows[position:]]
    logits = torch.tensor([row for row, _ in rows])
    result = apply_constraints(logits, constrained_batch([rules for _, rules in rows]))
    assert result[position].numpy().tobytes() == logits[position].numpy().tobytes()
    for i, (_, rules) in enumerate(rows):
        alone = apply_constraints(logits[i : i + 1], constrained_batch([rules]))
        assert torch.equal(alone[0], result[i])


def test_the_order_of_the_stages_is_the_documented_one() -> None:
    """Rules with which exchanging any two stages that do not commute changes the result. (Those
    that only forbid commute with each other, and with adding to a logit.)"""
    rules = Rules(
        mask=tuple(range(11)),
        allowed=tuple(range(1, 12)),
        banned=(3, 4),
        bias=((2, 1.5), (5, -2.0)),
        processor=2.0,
        prompt=(2, 6),
        output=(5, 7, 7),
        presence=0.5,
        frequency=0.25,
        repetition=1.5,
    )
    right = by_the_book(FIXED_ROW, rules)
    [got] = apply_constraints(torch.tensor([FIXED_ROW]), constrained_batch([rules])).tolist()
    assert got == pytest.approx(right, abs=1e-6)
    for first, second in itertools.combinations(range(len(FEATURES)), 2):
        order = list(FEATURES)
        order[first], order[second] = order[second], order[first]
        swapped = by_the_book(FIXED_ROW, rules, tuple(order))
        forbid = {"mask", "allowed", "banned", "bias"}
        commute = {FEATURES[first], FEATURES[second]} <= forbid
        assert (swapped == pytest.approx(right, abs=1e-6)) == commute, order


def test_constraints_come_before_temperature_and_filters() -> None:
    """A bias of 2 at temperature 10 is worth 0.2; top_k and min_p see biased logits."""
    logits = torch.tensor([[0.0, 1.0, 0.5, -1.0]])
    bias = TokenRows([0], [3], [2.5])
    for wish in (Wish(top_k=1), Wish(min_p=0.9), Wish(top_p=0.2), Wish(temperature=0.0)):
        batch = replace(batch_of([wish], 4), bias=bias)
        assert sample(logits, batch).token_ids == [3]
        assert sample_rows(logits, [wish]) == [1]
    warm = [Wish(10.0, seed=seed) for seed in range(4000)]
    rows = TokenRows(list(range(4000)), [3] * 4000, [2.0] * 4000)
    tokens = sample(logits.expand(4000, -1), replace(batch_of(warm, 4), bias=rows)).token_ids
    share = softmax([0.0, 0.1, 0.05, 0.1])[3]
    assert tokens.count(3) / 4000 == pytest.approx(share, abs=0.035)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MANY_ROWS, st.data())
def test_logprobs_are_raw_whatever_the_rules(
    rows: list[tuple[list[float], Rules]], data: st.DataObject
) -> None:
    """No stage changes what is reported, only which token is chosen."""
    logits = torch.tensor([row for row, _ in rows])
    batch = constrained_batch([rules for _, rules in rows])
    batch = replace(batch, num_logprobs=(VOCAB,) * len(rows))
    assume(bool(apply_constraints(logits, batch).amax(dim=-1).isfinite().all()))
    output = sample(logits, batch)
    for row, token, entry in zip(logits, output.token_ids, output.logprobs, strict=True):
        assert entry is not None
        assert entry.token_ids[0] == token
        expected = row.log_softmax(-1)
        for token_id, logprob in zip(entry.token_ids, entry.logprobs, strict=True):
            assert logprob == pytest.approx(float(expected[token_id]), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_is_an_error_that_names_it(temperature: float) -> None:
    """Not a token that was forbidden."""
    batch = SamplingBatch(
        temperature=torch.full((3,), temperature),
        top_k=None,
        top_p=None,
        min_p=None,
        uniform=torch.full((3,), 0.5, dtype=torch.float64),
        num_logprobs=(None,) * 3,
        allowed=((1, (2,)),),
        banned=TokenRows([0, 1], [0, 2], []),
    )
    with pytest.raises(RowError, match="no token is possible") as caught:
        sample(torch.zeros(3, 4), batch)
    assert caught.value.row == 1


def test_each_stage_alone() -> None:
    """By hand, in one row of four tokens."""
    row = torch.tensor([[1.0, -2.0, 3.0, 0.0]])
    inf = math.inf
    assert apply_allowed_token_ids(row, ((0, (1, 3)),)).tolist() == [[-inf, -2.0, -inf, 0.0]]
    assert apply_banned(row, TokenRows([0, 0], [0, 2], [])).tolist() == [[-inf, -2.0, -inf, 0.0]]
    assert apply_logit_bias(row, TokenRows([0, 0], [0, 1], [1.5, -1.0])).tolist() == [
        [2.5, -3.0, 3.0, 0.0]
    ]
    penalties = Penalties(
        rows=torch.tensor([0]),
        is_in_prompt=torch.tensor([[True, True, False, False]]),
        output_counts=torch.tensor([[0, 0, 2, 1]]),
        repetition=torch.tensor([2.0]),
        frequency=torch.tensor([0.5]),
        presence=torch.tensor([0.25]),
    )
    # in the prompt: divided if positive, multiplied if negative; in the output: 2 * 0.5 + 0.25 less
    assert apply_penalties(row, penalties).tolist() == [[0.5, -4.0, 0.25, -0.75]]
    assert row.tolist() == [[1.0, -2.0, 3.0, 0.0]], "the input stays as it is"


def test_processors_see_what_they_ask_for() -> None:
    """Two parameters: output, logits. Three: prompt, output, logits. More with defaults are their
    own. They run in their order, and get a copy: writing into it changes no other row."""
    seen: list[Any] = []

    def two(output: list[int], logits: Tensor) -> Tensor:
        seen.append((output, logits.tolist()))
        logits.fill_(7.0)
        return logits

    def three(prompt: list[int], output: list[int], logits: Tensor) -> Tensor:
        seen.append((prompt, output, logits.tolist()))
        return logits + 1

    class Callable_:
        def __call__(self, output: list[int], logits: Tensor) -> Tensor:
            return logits * 2

    given_ = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    before = given_.clone()
    own = 5.0
    processors = (two, three, Callable_(), lambda output, logits, own=own: logits - own)
    result = apply_logits_processors(given_, (RowProcessors(1, processors, [8], [9, 9]),))
    assert seen == [([9, 9], [2.0, 3.0]), ([8], [9, 9], [7.0, 7.0])]
    assert result.tolist() == [[0.0, 1.0], [11.0, 11.0], [4.0, 5.0]]
    assert torch.equal(given_, before)


def test_a_processor_that_keeps_its_row_does_no_harm() -> None:
    """Neither what it kept of the last step nor what it returned is anybody's logits."""
    kept: list[Tensor] = []

    def keep(output: list[int], logits: Tensor) -> Tensor:
        kept.append(logits)
        return logits

    logits = torch.tensor([[1.0, 2.0]])
    result = apply_logits_processors(logits, (RowProcessors(0, (keep, keep), [], []),))
    kept[0].zero_()
    kept[1].zero_()
    assert result.tolist() == logits.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize(
    "wrong",
    [None, 5, [1.0, 2.0], torch.zeros(3), torch.zeros(1, 2), torch.tensor(0.0)],
    ids=["none", "number", "list", "longer", "two_dimensions", "scalar"],
)
def test_a_processor_that_returns_something_else_is_refused(wrong: Any) -> None:
    processors = (RowProcessors(0, (lambda output, logits: wrong,), [], []),)
    with pytest.raises(ValueError, match=r"must return a tensor of shape \(2,\), got"):
        apply_logits_processors(torch.zeros(1, 2), processors)


def test_forbidden_tokens_are_never_drawn() -> None:
    """Sampled rows, too; and what is left is drawn in proportion."""
    n = 3000
    logits = torch.zeros(n, VOCAB)
    rules = Rules(mask=tuple(range(8)), allowed=(2, 3, 7, 9), banned=(3,))
    batch = constrained_batch([rules] * n)
    wishes = batch_of([Wish(seed=seed) for seed in range(n)], VOCAB)
    batch = replace(batch, temperature=wishes.temperature, uniform=wishes.uniform)
    tokens = sample(logits, batch).token_ids
    assert set(tokens) == {2, 7}
    assert tokens.count(2) / n == pytest.approx(0.5, abs=0.05)


def test_branches_of_one_seed_say_different_things() -> None:
    logits = torch.zeros(1, 5000).expand(8, -1)
    tokens = sample_rows(logits, [Wish(seed=3, position=9, branch=b) for b in range(8)])
    assert len(set(tokens)) == 8
    assert sample_rows(logits[:1], [Wish(seed=3, position=9)]) == tokens[:1]


# ------------------------------------------------------------------------------ the draw


@settings(max_examples=200, deadline=None, derandomize=True)
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


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 1000, 150_000])
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


# ------------------------------------------------------------------------------ the whole

NUM_ROWS = 20_000
LOGITS = [1.0, -0.5, 0.0, 2.0, 0.7, 1.0, -1.0, 0.3, 1.6, -0.2]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.8])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), list(itertools.product([0, 6], [1.0, 0.8], [0.0, 0.2]))
)
def test_tokens_follow_the_exact_distribution(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Pearson's chi-square over many seeds; what is filtered never comes.

    With fixed seeds this never fails by chance; 5 standard deviations is a generous threshold.
    """
    wish = Wish(temperature, top_k, top_p, min_p)
    assert not is_near_a_limit(LOGITS, wish)
    expected = NUM_ROWS * np.array(exact_distribution(LOGITS, wish))
    batch = batch_of([wish], len(LOGITS))
    rows = SamplingBatch(
        temperature=batch.temperature.expand(NUM_ROWS),
        top_k=None if batch.top_k is None else batch.top_k.expand(NUM_ROWS),
        top_p=None if batch.top_p is None else batch.top_p.expand(NUM_ROWS),
        min_p=None if batch.min_p is None else batch.min_p.expand(NUM_ROWS),
        uniform=torch.from_numpy(
            uniform_noise(np.arange(NUM_ROWS), np.zeros(NUM_ROWS), np.full(NUM_ROWS, 17))
        ),
        num_logprobs=(None,) * NUM_ROWS,
    )
    tokens = sample(torch.tensor(LOGITS).expand(NUM_ROWS, -1), rows).token_ids
    counts = np.bincount(tokens, minlength=len(LOGITS))
    possible = expected > 0
    assert not counts[~possible].any(), "a filtered token was drawn"
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


WISHES = st.builds(
    Wish,
    temperature=st.sampled_from([0.0, 0.0, 1e-6, 0.1, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 3, 50, 10_000]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.3, 1e-4]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 5000),
    logprobs=st.none() | st.integers(0, 5),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(WISHES, min_size=1, max_size=8), st.integers(0, 2**31), st.randoms())
def test_a_row_gets_the_same_alone_and_in_any_company(
    wishes: list[Wish], seed: int, random: object
) -> None:
    """Greedy beside sampled, filtered beside not, in any order: a token depends on the row's
    logits, parameters, seed and position only."""
    logits = torch.randn(len(wishes), 200, generator=torch.Generator().manual_seed(seed)) * 3
    together = sample(logits, batch_of(wishes, 200))
    for row, wish in enumerate(wishes):
        alone = sample(logits[row : row + 1], batch_of([wish], 200))
        assert alone.token_ids == together.token_ids[row : row + 1]
        assert alone.logprobs == together.logprobs[row : row + 1]
        if wish.temperature < 1e-5 or wish.top_k == 1 or wish.min_p == 1:
            assert together.token_ids[row] == int(logits[row].argmax())
    backwards = sample_rows(logits.flip(0), wishes[::-1])
    assert backwards[::-1] == together.token_ids


def test_seed_and_position_make_the_difference() -> None:
    logits = torch.zeros(1, 5000)
    tokens = {
        (seed, position): sample_rows(logits, [Wish(seed=seed, position=position)])[0]
        for seed in range(6)
        for position in range(6)
    }
    assert len(set(tokens.values())) > 30
    again = sample_rows(logits.expand(2, -1), [Wish(seed=3, position=4), Wish(seed=4, position=3)])
    assert again == [tokens[3, 4], tokens[4, 3]]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [5.0, 5.0, 5.0]])
    assert sample_rows(logits, [Wish(temperature=0.0)] * 2) == [1, 0]
    mixed = sample_rows(logits, [Wish(temperature=0.0), Wish(top_k=1, min_p=0.5)])
    assert mixed[0] == 1


def test_only_a_temperature_of_next_to_nothing_is_greedy() -> None:
    """Below 1e-5, as in vLLM; anything above is sampled: equal logits then show it."""
    logits = torch.zeros(40, 8)
    for temperature, is_greedy in ((0.0, True), (9e-6, True), (2e-5, False), (0.5, False)):
        tokens = sample_rows(logits, [Wish(temperature, seed=seed) for seed in range(40)])
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
        wish = Wish(temperature, top_k, top_p, min_p, seed)
        tokens = sample_rows(torch.stack((huge, masked, only)), [wish] * 3)
        assert tokens[1] in possible[1]
        assert tokens[2] in possible[2]
        assert tokens[0] in possible[0] or temperature > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_sampled_in_float32(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 50).to(dtype)
    wishes = [Wish(seed=seed, top_p=0.9, logprobs=2) for seed in range(6)]
    batch = batch_of(wishes, 50)
    assert sample(logits, batch) == sample(logits.float(), batch)


# ------------------------------------------------------------------------------ the noise


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


# ------------------------------------------------------------------------------ logprobs


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(LOGIT_ROWS.filter(lambda row: len(row) > 3), min_size=1, max_size=4), st.data())
def test_logprobs_are_those_of_the_raw_logits(rows: list[list[float]], data: st.DataObject) -> None:
    """The sampled token first, then the likeliest, best first; before temperature and filters."""
    size = min(map(len, rows))
    logits = torch.tensor([row[:size] for row in rows])
    numbers = tuple(data.draw(st.none() | st.integers(0, size)) for _ in rows)
    token_ids = [data.draw(st.integers(0, size - 1)) for _ in rows]
    result = gather_logprobs(logits, torch.tensor(token_ids), numbers)
    for row, token, number, got in zip(logits, token_ids, numbers, result, strict=True):
        if number is None:
            assert got is None
            continue
        assert isinstance(got, TokenLogprobs)
        probs = softmax(row.tolist())
        assert got.token_ids[0] == token
        assert len(got.token_ids) == len(got.logprobs) == number + 1
        assert len(set(got.token_ids[1:])) == number
        for token_id, logprob in zip(got.token_ids, got.logprobs, strict=True):
            assert logprob == pytest.approx(math.log(probs[token_id]), abs=1e-5)
        best = sorted(map(math.log, probs), reverse=True)[:number]
        assert got.logprobs[1:] == pytest.approx(best, abs=1e-5)
        assert got.sampled_rank == 1 + sum(logit > row[token] for logit in row)


def test_logprobs_ignore_temperature_and_filters() -> None:
    logits = torch.randn(2, 20)
    plain, wished = sample(
        logits[:1].expand(2, -1),
        batch_of([Wish(0.0, logprobs=4), Wish(0.5, 1, 0.3, 0.4, logprobs=4)], 20),
    ).logprobs
    assert plain == wished
    assert sample(logits, batch_of([Wish(), Wish()], 20)).logprobs == [None, None]


# -- on the device, until somebody reads --


class NoLooking(TorchDispatchMode):
    """Operations that make the CPU wait for a number of the device, or for a shape, are errors."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = str(func)
        assert not any(word in name for word in self.FORBIDDEN), f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_greedy", [False, True])
def test_choosing_waits_for_no_device(is_greedy: bool) -> None:
    """Filters, constraints, penalties, logprobs, rows in which nothing is possible: tokens stay on
    the device until `read`, which says what `sample` says. (A logits processor may look.)"""
    wishes = [Wish(0.0 if is_greedy else 0.7, 3, 0.9, 0.01, 5, i, i % 3 or None) for i in range(6)]
    batch = replace(
        batch_of(wishes, 20),
        is_greedy=is_greedy,
        allowed=((1, (2, 4, 5)),),
        banned=TokenRows([0, 1], [0, 2], []),
        bias=TokenRows([2], [3], [4.0]),
        penalties=Penalties(
            rows=torch.tensor([4]),
            is_in_prompt=torch.zeros(1, 20, dtype=torch.bool),
            output_counts=torch.ones(1, 20, dtype=torch.long),
            repetition=torch.tensor([1.1]),
            frequency=torch.tensor([0.1]),
            presence=torch.tensor([0.1]),
        ),
    )
    logits = torch.randn(6, 20)
    with NoLooking():
        sampled = choose_tokens(logits, batch)
        dead = choose_tokens(logits, replace(batch, allowed=((1, (2,)),)))
    assert isinstance(sampled.token_ids, Tensor)
    assert sampled.read() == sample(logits, batch)
    with pytest.raises(RowError, match="no token is possible") as caught:
        dead.read()
    assert caught.value.row == 1


def test_map_reaches_every_tensor() -> None:
    """What was sampled travels to the CPU as a whole: tokens, dead rows, logprobs."""
    batch = replace(
        batch_of([Wish(logprobs=2), Wish(), Wish(logprobs=0)], 20), allowed=((1, (2, 3)),)
    )
    sampled = choose_tokens(torch.randn(3, 20), batch)
    seen: list[Tensor] = []

    def copy(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor.clone()

    copied = sampled.map(copy)
    assert len(seen) == 5
    assert copied.logprobs is not None
    tensors = [copied.token_ids, copied.is_dead, *copied.logprobs[2:]]
    assert all(a is not b for a in tensors for b in seen)
    assert copied.read() == sampled.read()
    assert [entry and len(entry.token_ids) for entry in copied.read().logprobs] == [3, None, 1]


def test_unconstrained_rows_are_never_dead() -> None:
    """Nothing to look at, nothing to copy."""
    sampled = choose_tokens(torch.randn(2, 20), batch_of([Wish(), Wish()], 20))
    assert (sampled.is_dead, sampled.logprobs) == (None, None)
    assert sampled.map(lambda tensor: tensor).read() == sampled.read()
