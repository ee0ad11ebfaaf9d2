"""The RejectionSampler: the distribution of plain decoding, whatever the drafts are.

One position is integrated over a grid of random numbers. Several positions in a row are counted
over many seeds and compared with the exact joint distribution, by chi-square. The seeds are fixed,
so a result is always the same; planted mistakes show that the comparison sees them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_oracle import one_thread
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve.extras.speculative import rejection
from nanoserve.extras.speculative.rejection import (
    RejectionSampler,
    rejection_noise,
    rejection_sample,
)
from nanoserve.kernels.sampling import choose_tokens, compute_probs
from nanoserve.sampler import (
    Choose,
    ChosenTokens,
    SamplingBatch,
    draw,
    sample,
    uniform_noise,
)

Streams = dict[str, np.ndarray]
VOCAB = 4
NUM_TOKENS = 3  # of the joint distribution
NUM_SEEDS = 10_000
# Logits by the token before: of the target, and of a draft model that is often wrong.
TARGET = torch.tensor([[1.0, 0.2, -0.5, 0.4], [0.0, 1.5, 0.3, -1], [0, 0, 0.9, 1], [2, 0, -1, 0.5]])
DRAFT = torch.tensor(
    [[0, 1.8, -0.7, 0.2], [1.2, 0.2, 1.5, -1.5], [-1.5, 0.7, 1, 0], [0, 0, 1.5, 0]]
)
FILTERS: list[dict[str, float]] = [
    {},
    {"temperature": 1.3, "top_k": 3},
    {"temperature": 0.8, "top_p": 0.8},
    {"temperature": 0.6, "min_p": 0.1},
]


@pytest.fixture(autouse=True)
def on_one_thread() -> Iterator[None]:
    with one_thread():
        yield


def make_batch(uniform: Tensor, temperature: float = 1.0, **filters: float) -> SamplingBatch:
    """Rows with the same filters."""
    kinds = {"top_k": torch.int64, "top_p": torch.float32, "min_p": torch.float32}
    number = len(uniform)
    return SamplingBatch(
        num_logprobs=(None,) * number,
        temperature=torch.full((number,), temperature),
        uniform=uniform,
        **{
            name: torch.full((number,), value, dtype=kinds[name]) for name, value in filters.items()
        },
    )


# -- one position --

WEIGHTS = st.lists(st.integers(0, 4), min_size=4, max_size=4).filter(any)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(WEIGHTS, WEIGHTS)
def test_a_token_has_the_targets_probability(target: list[int], draft: list[int]) -> None:
    """All random numbers of a grid, with each draft as often as the proposer draws it."""
    p, q = (torch.tensor(weights) / sum(weights) for weights in (target, draft))
    grid = (torch.arange(60, dtype=torch.float64) + 0.5) / 60
    accept, recover = (noise.flatten() for noise in torch.meshgrid(grid, grid, indexing="ij"))
    rows = torch.ones(len(accept), 1)
    found = torch.zeros(4)
    for token in range(4):
        drafts = torch.full((len(accept),), token)
        tokens = rejection_sample(p * rows, drafts, q * rows, accept, recover)
        found += q[token] * tokens.bincount(minlength=4) / len(tokens)
    assert torch.allclose(found, p, atol=4 / 60)
    assert (found[p == 0] == 0).all()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(WEIGHTS, st.integers(0, 3), st.floats(0, 0.999), st.floats(0, 0.999))
def test_a_certain_draft_is_one_of_probability_1(
    target: list[int], draft: int, accept: float, recover: float
) -> None:
    p = torch.tensor([target]) / sum(target)
    certain = torch.eye(4)[[draft]]
    noise = torch.tensor([[accept], [recover]], dtype=torch.float64)
    drafts = torch.tensor([draft])
    token = rejection_sample(p, drafts, None, *noise)
    assert torch.equal(token, rejection_sample(p, drafts, certain, *noise))
    assert (token.item() == draft) == (accept < p[0, draft])


def test_the_example_of_the_docstring() -> None:
    """Token 1 is drafted too often: of its drafts 3/7 stay. In place of the others come tokens 0
    and 2, with 3/4 and 1/4."""
    p, q = torch.tensor([[0.5, 0.3, 0.2]]), torch.tensor([[0.2, 0.7, 0.1]])

    def decide(draft: int, accept: float, recover: float) -> int:
        noise = torch.tensor([[accept], [recover]], dtype=torch.float64)
        return int(rejection_sample(p, torch.tensor([draft]), q, *noise))

    assert [decide(draft, 0.99, 0.0) for draft in (0, 2)] == [0, 2]
    assert [decide(1, accept, 0.0) for accept in (0.42, 0.43)] == [1, 0]
    assert [decide(1, 0.43, recover) for recover in (0.74, 0.76)] == [0, 2]


def test_random_numbers_of_a_token_are_independent() -> None:
    seeds, zeros = np.arange(NUM_SEEDS), np.zeros(NUM_SEEDS, np.int64)
    streams = rejection_noise(seeds, zeros, zeros)
    streams["bonus"] = uniform_noise(seeds, zeros, zeros)
    correlation = np.corrcoef(np.stack(list(streams.values())))
    assert np.abs(correlation - np.eye(3)).max() < 5 / math.sqrt(NUM_SEEDS)


# -- several positions --


def generate(
    filters: dict[str, float], has_probs: bool = True, choose: Choose = choose_tokens
) -> np.ndarray:
    """NUM_TOKENS tokens of each seed: [NUM_SEEDS, NUM_TOKENS].

    A seed has 0, 1 or 2 drafts in a step, in turn. They are drawn with the random numbers of plain
    decoding. `has_probs`: the sampler is told their distributions; else they count as certain.
    """
    tokens = np.zeros((NUM_SEEDS, 1 + NUM_TOKENS), np.int64)  # the first one is the prompt
    lengths = np.ones(NUM_SEEDS, np.int64)
    seeds = np.arange(NUM_SEEDS)
    while len(seeds):
        # Each seed has three rows; those behind its drafts and its bonus token are for nothing.
        wanted = (seeds + lengths[seeds]) % 3
        positions = lengths[seeds][:, None] + np.arange(3)
        before = np.zeros((len(seeds), 4), np.int64)
        before[:, 0] = tokens[seeds, lengths[seeds] - 1]
        plain, streams = noise_of(seeds.repeat(3), positions.ravel())
        plain = plain.reshape(-1, 3)
        draft_probs = torch.zeros(len(seeds), 3, VOCAB)
        for place in range(2):
            rows = torch.from_numpy(before[:, place])
            draft_probs[:, place] = compute_probs(
                DRAFT[rows], make_batch(plain[:, place], **filters)
            )
            drawn = draw(draft_probs[:, place], plain[:, place])
            before[:, place + 1] = drawn.numpy()
        has_draft = np.arange(3) < wanted[:, None]
        drafts = torch.from_numpy(np.where(has_draft, before[:, 1:], -1))
        sampler = RejectionSampler(
            drafts.flatten(),
            draft_probs.flatten(0, 1) if has_probs else None,
            **streams,
            choose=choose,
        )
        logits = TARGET[torch.from_numpy(before[:, :3]).flatten()]
        batch = make_batch(plain.flatten(), **filters)
        found = sample(logits, batch, sampler).token_ids.reshape(-1, 3).numpy()
        is_right = (found == drafts.numpy()).cumprod(axis=1).astype(bool)
        for place in range(3):
            comes = (is_right[:, :place].all(axis=1)) & (lengths[seeds] <= NUM_TOKENS)
            tokens[seeds[comes], lengths[seeds[comes]]] = found[comes, place]
            lengths[seeds[comes]] += 1
        seeds = seeds[lengths[seeds] <= NUM_TOKENS]
    return tokens[:, 1:]


def noise_of(seeds: np.ndarray, positions: np.ndarray) -> tuple[Tensor, dict[str, Tensor]]:
    """The random numbers of plain decoding, and those of the RejectionSampler."""
    branches = np.zeros(len(seeds), np.int64)
    streams = rejection_noise(seeds, branches, positions)
    tensors = {name: torch.from_numpy(values) for name, values in streams.items()}
    return torch.from_numpy(uniform_noise(seeds, branches, positions)), tensors


def conditional(logits: Tensor, filters: dict[str, float]) -> np.ndarray:
    """[VOCAB, VOCAB]: the probability of a token, by the token before."""
    return compute_probs(logits, make_batch(torch.zeros(VOCAB), **filters)).double().numpy()


def excess(tokens: np.ndarray, filters: dict[str, float], number: int) -> float:
    """The chi-square statistic of the first `number` tokens, divided by a limit that a correct
    sampler exceeds with a probability below 1e-9 (Laurent and Massart 2000, lemma 1)."""
    p = conditional(TARGET, filters)
    joint = p[0]
    for _ in range(number - 1):
        joint = joint[..., None] * p
    cells = np.ravel_multi_index(tuple(tokens[:, :number].T), (VOCAB,) * number)
    observed, expected = np.bincount(cells, minlength=joint.size), NUM_SEEDS * joint.ravel()
    if observed[expected == 0].any():
        return math.inf
    is_possible = expected > 0
    statistic = ((observed - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    degrees, x = is_possible.sum() - 1, 9 * math.log(10)
    return float(statistic / (degrees + 2 * math.sqrt(degrees * x) + 2 * x))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_joint_distribution_is_exact(filters: dict[str, float]) -> None:
    tokens = generate(filters)
    assert excess(tokens, filters, 2) < 1
    assert excess(tokens, filters, 3) < 1


@pytest.mark.parametrize("filters", FILTERS[:2], ids=str)
def test_the_joint_distribution_is_exact_if_drafts_count_as_certain(
    filters: dict[str, float],
) -> None:
    tokens = generate(filters, has_probs=False)
    assert excess(tokens, filters, 2) < 1
    assert excess(tokens, filters, 3) < 1


Rule = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor], Tensor]


def recover_from_p(p: Tensor, drafts: Tensor, q: Tensor, accept: Tensor, recover: Tensor) -> Tensor:
    kept = rejection_sample(p, drafts, q, accept, recover) == drafts
    return torch.where(kept, drafts, draw(p, recover))


def swap(p: Tensor, drafts: Tensor, q: Tensor, accept: Tensor, recover: Tensor) -> Tensor:
    """Accept with min(1, q / p)."""
    some = drafts.clamp(min=0)[:, None]
    kept = (accept[:, None] * p.gather(1, some) < q.gather(1, some))[:, 0]
    rest = rejection_sample(p, drafts, q, torch.ones_like(accept), recover)
    return torch.where(kept, drafts, rest)


def do_not_normalise(
    p: Tensor, drafts: Tensor, q: Tensor, accept: Tensor, recover: Tensor
) -> Tensor:
    kept = rejection_sample(p, drafts, q, accept, recover) == drafts
    ends = (p - q).clamp(min=0).double().cumsum(dim=-1)
    found = torch.searchsorted(ends, recover[:, None], right=True)[:, 0].clamp(max=VOCAB - 1)
    return torch.where(kept, drafts, found)


def recover_with_the_noise_that_rejected(
    p: Tensor, drafts: Tensor, q: Tensor, accept: Tensor, recover: Tensor
) -> Tensor:
    return rejection_sample(p, drafts, q, accept, accept)


@pytest.mark.parametrize(
    "mistake",
    [recover_from_p, swap, do_not_normalise, recover_with_the_noise_that_rejected],
    ids=lambda rule: rule.__name__,
)
def test_mistakes_are_seen(mistake: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, "rejection_sample", mistake)
    assert excess(generate({}), {}, 2) > 1


def test_a_bonus_token_from_the_wrong_row_is_seen() -> None:
    def choose(logits: Tensor, batch: SamplingBatch) -> ChosenTokens:
        return choose_tokens(logits.roll(1, dims=0), batch)

    assert excess(generate({}, choose=choose), {}, 2) > 1


def test_recovering_with_the_noise_of_the_draft_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it needs a stream of its own."""

    def noise(seeds: np.ndarray, branches: np.ndarray, positions: np.ndarray) -> Streams:
        streams = rejection.rejection_noise(seeds, branches, positions)
        return {**streams, "recover": uniform_noise(seeds, branches, positions)}

    monkeypatch.setitem(globals(), "rejection_noise", noise)
    assert excess(generate({}), {}, 2) > 1


# -- acceptance --


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_drawn_drafts_are_accepted_more_often_than_by_comparing(filters: dict[str, float]) -> None:
    """sum min(p, q), against sum p q; of a certain draft both are p(draft)."""
    p, q = conditional(TARGET, filters)[0], conditional(DRAFT, filters)[0]
    rows = torch.ones(NUM_SEEDS, 1)
    plain, streams = noise_of(np.arange(NUM_SEEDS), np.ones(NUM_SEEDS, np.int64))
    batch = make_batch(plain, **filters)
    for probs in (q, np.eye(VOCAB)[q.argmax()]):
        other, _ = noise_of(np.arange(NUM_SEEDS), np.full(NUM_SEEDS, 2))
        drafts = draw(torch.from_numpy(probs) * rows, other)
        rejecting = RejectionSampler(drafts, torch.from_numpy(probs) * rows, **streams)
        accepted = (sample(TARGET[0] * rows, batch, rejecting).token_ids == drafts).double().mean()
        compared = (sample(TARGET[0] * rows, batch).token_ids == drafts).double().mean()
        slack = 5 / math.sqrt(NUM_SEEDS)
        assert abs(accepted - np.minimum(p, probs).sum()) < slack
        assert abs(compared - (p * probs).sum()) < slack
        assert np.minimum(p, probs).sum() >= (p * probs).sum()


# -- beside plain decoding --


def test_greedy_rows_and_rows_without_a_draft_are_those_of_plain_decoding() -> None:
    number = 400
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(number, 50, generator=generator)
    plain, streams = noise_of(np.arange(number), np.arange(number))
    batch = make_batch(plain, top_k=20)
    temperature = torch.tensor([0.0, 1.0]).repeat(number // 2)
    batch = replace(batch, temperature=temperature, drawn_rows=temperature.nonzero()[:, 0])
    drafts = torch.randint(-1, 50, (number,), generator=generator)
    drafts[::3] = -1
    probs = torch.rand(number, 50, generator=generator).softmax(dim=-1)
    found = sample(logits, batch, RejectionSampler(drafts, probs, **streams)).token_ids
    expected = sample(logits, batch).token_ids
    is_same = (drafts < 0) | (temperature == 0)
    assert torch.equal(found[is_same], expected[is_same])
    greedy = SamplingBatch(num_logprobs=(None,) * number, is_greedy=True)
    found = sample(logits, greedy, RejectionSampler(drafts, None, **streams)).token_ids
    assert torch.equal(found, logits.argmax(dim=-1))


def test_a_row_without_a_possible_token_says_so() -> None:
    logits = torch.tensor([[0.0, math.nan], [-math.inf, -math.inf], [0.0, 1.0]])
    plain, streams = noise_of(np.arange(3), np.arange(3))
    drafts = torch.tensor([0, 1, 0])
    found = sample(logits, make_batch(plain), RejectionSampler(drafts, None, **streams)).token_ids
    assert (found < 0).tolist() == [True, True, False]
