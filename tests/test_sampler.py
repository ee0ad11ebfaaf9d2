"""From SamplingParams to a token: each stage by a slow formula, the draw by its distribution."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve import EngineConfig, SamplingParams, sampler
from nanoserve.input_batch import RequestState
from nanoserve.kernels import sampling
from nanoserve.sampler import apply_constraints, sample, uniform_noise
from nanoserve.sequence import NewSequence, RequestError

VOCAB, STOPS, BAD_WORDS = 24, frozenset({2, 3}), ((5,), (6, 7))
IDS = st.integers(0, VOCAB - 1)


# fmt: off
PARAMS = {
    "temperature": (0, 0.5, 1, 3), "top_k": (0, 1, 3, 100), "top_p": (1.0, 0.3, 0.9),
    "min_p": (0.0, 0.2), "repetition_penalty": (1.0, 1.5, 0.5), "frequency_penalty": (0.0, 0.4),
    "presence_penalty": (0.0, -1.0), "min_tokens": (0, 2, 4), "logprobs": (None, 0, 4),
    "logit_bias": (None, {4: 3.0, 9: -2.0}), "allowed_token_ids": (None, [2, 5, 7, 9, 11]),
    "logits_processors": (None, [lambda output, row: row * 2 - len(output)]),
}
# fmt: on
GIVEN = st.fixed_dictionaries({name: st.sampled_from(each) for name, each in PARAMS.items()})
OUTPUT = st.lists(st.sampled_from([2, 5, 6, 6, 7, 9]), max_size=9)
ROW = st.tuples(GIVEN, st.booleans(), st.lists(IDS, min_size=1, max_size=5), OUTPUT)


def slow_logits(logits: list[float], new: NewSequence) -> list[float]:
    """What can change which token is likeliest, one token at a time."""
    params, output = new.sampling_params, list(new.token_ids[new.num_prompt_tokens :])
    ended = "".join(f" {token}" for token in output)
    bad = {
        last for *start, last in new.bad_word_ids if ended.endswith("".join(f" {t}" for t in start))
    }
    if len(output) < params.min_tokens:
        bad |= new.stop_token_ids
    result = []
    for token, x in enumerate(logits):
        x = x if token in (params.allowed_token_ids or range(VOCAB)) else -math.inf
        x = -math.inf if token in bad else x + (params.logit_bias or {}).get(token, 0.0)
        x = x * 2 - len(output) if params.logits_processors else x
        if token in new.token_ids:
            factor = params.repetition_penalty
            x = x / factor if x > 0 else x * factor
        x -= params.frequency_penalty * output.count(token)
        result.append(x - params.presence_penalty * (token in output))
    return result


def slow_probs(logits: list[float], params: SamplingParams) -> list[float]:
    """Temperature and filters, one after the other."""
    top = max(logits)
    weights = [math.exp((x - top) / params.temperature) for x in logits]
    weights = [w if w >= params.min_p else 0.0 for w in weights]
    ranked = sorted(weights, reverse=True)[: params.top_k or VOCAB]
    before = np.cumsum([0.0, *ranked[:-1]]) / sum(ranked)
    least = min(w for w, b in zip(ranked, before, strict=True) if b < params.top_p)
    return [w if w >= least else 0.0 for w in weights]


@settings(max_examples=60)
@given(st.lists(ROW, min_size=1, max_size=4), st.integers(0, 2**32 - 1))
def test_every_stage_of_every_row(rows: list[Any], seed: int) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (len(rows), VOCAB)))
    states = RequestState(
        EngineConfig(max_num_seqs=4, max_model_len=64), VOCAB, torch.device("cpu"),
        lambda **arrays: {name: torch.from_numpy(each) for name, each in arrays.items()},
    )  # fmt: skip
    news = []
    for number, (values, has_bad_words, prompt, output) in enumerate(rows):
        words = BAD_WORDS if has_bad_words else ()
        params = SamplingParams(**values, bad_words=["a"] if words else None)
        tokens, length = (*prompt, *output), len(prompt)
        news.append(NewSequence(number, tokens, length, (), params, STOPS, words, seed, number, 1))
        states.add(news[-1])
    positions = np.array([len(new.token_ids) for new in news])
    order = np.array([states.row_of[number] for number in range(len(rows))])
    batch = states.make_sampling_batch(order, np.arange(len(rows)), positions)
    noise = uniform_noise(np.full(len(rows), seed), np.arange(len(rows)), positions)
    assert batch.uniform is None or (batch.uniform.numpy() == noise).all()
    constrained = apply_constraints(logits.float(), batch).tolist()
    slow = [slow_logits(logits.float()[row].tolist(), new) for row, new in enumerate(news)]
    assert constrained == [pytest.approx(each, abs=1e-4) for each in slow]
    for turn, choose in enumerate((sampler.choose_tokens, sampling.choose_tokens) * 4):
        uniform = (noise + turn * 0.1618) % 1
        if not batch.is_greedy:
            batch = replace(batch, uniform=torch.from_numpy(uniform))
        for row, found in enumerate(sample(logits.float(), batch, choose).to_host()):
            params = news[row].sampling_params
            if max(slow[row]) == -math.inf:
                assert isinstance(found, RequestError)
                continue
            if params.is_greedy:
                assert slow[row][found.token_id] >= max(slow[row]) - 1e-4
            else:
                sums = np.cumsum(slow_probs(slow[row], params))
                low, high = np.append(0, sums)[found.token_id :][:2] / sums[-1]
                assert low - 1e-5 <= uniform[row] <= high + 1e-5
                assert high > low, "a token that was filtered out"
            check_logprobs(found.logprobs, found.token_id, logits[row], params.logprobs)


def check_logprobs(found: Any, token: int, logits: torch.Tensor, number: int | None) -> None:
    """The model's own, whatever the request's settings."""
    if number is None:
        assert found is None
        return
    right = logits.log_softmax(-1)
    assert found.token_ids == (token, *right.topk(number).indices.tolist())
    assert found.logprobs == pytest.approx([right[t].item() for t in found.token_ids], abs=1e-5)
    assert found.sampled_rank == 1 + (right > right[token]).sum()


@pytest.mark.parametrize("draw", [sampler.draw, lambda *args: sampling.draw(*args).token_ids])
def test_the_draw_has_exactly_this_distribution(draw: Any) -> None:
    """Chi-square of 40,000 draws; the noise of each is that of another position."""
    probs = torch.tensor([0.0, 0.4, 0.3, 0.0, 0.2, 0.06, 0.04, 0.0])
    zeros, positions = np.zeros(40_000, np.int64), np.arange(40_000)
    for seeds, branches, places in (
        (zeros, zeros, positions), (positions, zeros, zeros + 9), (zeros + 5, positions, zeros),
    ):  # fmt: skip
        noise = uniform_noise(seeds, branches, places)
        assert len(set(noise.tolist())) == 40_000
        assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 0.02
        drawn = draw(probs.expand(40_000, 8), torch.from_numpy(noise))
        counts, expected = torch.bincount(drawn, minlength=8), probs * 40_000
        assert not counts[probs == 0].any()
        chi_square = ((counts - expected) ** 2 / expected)[probs > 0].sum()
        assert chi_square < 18.5  # 4 degrees of freedom: p = 0.001
    edges = draw(probs.expand(2, 8), torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64))
    assert edges.tolist() == [1, 6]


def test_no_token_is_possible() -> None:
    """Where all logits are -inf, or one is NaN, there is an error in place of a token."""
    logits = torch.zeros(3, VOCAB)
    logits[0], logits[1, 4] = -math.inf, math.nan
    states = [
        isinstance(each, RequestError)
        for each in sample(logits, sampler.SamplingBatch(is_greedy=True)).to_host()
    ]
    assert states == [True, True, False]
