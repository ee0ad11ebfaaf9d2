"""How do logits become a token?

    logits -> temperature -> min_p -> top_k, top_p -> one random number -> token     (or argmax)

Every stage is a short function on a batch of rows [num_rows, vocab_size] with one parameter a row,
so that requests with different wishes share one pass.

*Random streams are counters, not state.* The random number of a token is a function of (the
request's seed, the token's position) and nothing else. A torch.Generator would have to be carried
through batching, preemption, CUDA graphs and ranks; a function has nothing to carry, and the same
request gives the same text wherever and with whomever it runs.

Left out for now: penalties, bias, bad words (their place is before the temperature, as in V1).

vLLM: vllm/model_executor/layers/sampler.py (V0); vllm/v1/sample/sampler.py,
ops/topk_topp_sampler.py (V1). min_p: arXiv 2407.01082; top_p (nucleus): arXiv 1904.09751.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoserve.sampling_params import GREEDY_TEMPERATURE
from nanoserve.sequence import TokenLogprobs


@dataclass(frozen=True)
class SamplingBatch:
    """One row for each token to be sampled. None where no row uses the feature."""

    temperature: Tensor  # [num_rows] float32
    top_k: Tensor | None  # [num_rows] int64, vocab_size where off
    top_p: Tensor | None  # [num_rows] float32
    min_p: Tensor | None  # [num_rows] float32
    uniform: Tensor  # [num_rows] float64 in [0, 1): the random number of each row
    num_logprobs: tuple[int | None, ...]  # per row: how many of the likeliest to report


@dataclass(frozen=True)
class SamplerOutput:
    token_ids: list[int]  # per row
    logprobs: list[TokenLogprobs | None]  # per row; None where not asked for


def sample(logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
    """Choose one token for each row of logits [num_rows, vocab_size]."""
    logits = logits.float()
    is_greedy = batch.temperature < GREEDY_TEMPERATURE
    token_ids = logits.argmax(dim=-1)
    if not bool(is_greedy.all()):
        filtered = apply_temperature(logits, batch.temperature.masked_fill(is_greedy, 1.0))
        if batch.min_p is not None:
            filtered = apply_min_p(filtered, batch.min_p)
        if batch.top_k is not None or batch.top_p is not None:
            filtered = apply_top_k_top_p(filtered, batch.top_k, batch.top_p)
        drawn = draw(filtered.softmax(dim=-1), batch.uniform)
        token_ids = torch.where(is_greedy, token_ids, drawn)
    logprobs = gather_logprobs(logits, token_ids, batch.num_logprobs)
    return SamplerOutput(token_ids.tolist(), logprobs)


def apply_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Divide each row by its temperature: below 1 sharpens the distribution, above 1 flattens."""
    return logits / temperature[:, None]


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Drop tokens whose probability is below min_p times that of the likeliest.

    p / p_max >= min_p  is  logit - logit_max >= log(min_p): no softmax needed.
    """
    gap = logits - logits.amax(dim=-1, keepdim=True)
    return logits.masked_fill(gap < min_p.log()[:, None], -torch.inf)


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Keep the top_k likeliest tokens, and of those the fewest whose probability reaches top_p.

    The token that crosses top_p is kept. Both limits become one threshold on the logit, so equal
    logits are kept or dropped together, whatever order a sort puts them in. Example, top_p 0.7:

        probabilities, sorted      0.5   0.3   0.2
        sum of those before it     0.0   0.5   0.8     keep while it is below 0.7: the first two
    """
    ordered = logits.sort(dim=-1, descending=True).values
    num_kept = torch.full_like(ordered[:, 0], ordered.shape[1], dtype=torch.long)
    if top_k is not None:
        num_kept = top_k
        rank = torch.arange(ordered.shape[1], device=ordered.device)
        ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf)
    if top_p is not None:
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        limit = top_p.masked_fill(top_p >= 1, torch.inf)  # off, however the sum is rounded
        num_kept = torch.minimum(num_kept, (before < limit[:, None]).sum(dim=-1))
    threshold = ordered.gather(1, num_kept.clamp(min=1)[:, None] - 1)
    return logits.masked_fill(logits < threshold, -torch.inf)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """Invert the cumulative distribution: the first token whose cumulative sum exceeds u.

    Exact up to float64 rounding, and one random number a token is enough. probs [num_rows,
    vocab_size], uniform [num_rows] in [0, 1) -> [num_rows] int64.
    """
    cumulative = probs.double().cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True)
    return drawn.clamp(max=probs.shape[1] - 1)[:, 0]


def uniform_noise(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The random numbers, [n] float64 in [0, 1), of streams `seeds` at `positions` (both [n]).

    Counter-based: SplitMix64's mixing function (Steele, Lea, Flood, OOPSLA 2014), once over the
    seed and once over the sum with the position, so that neighbouring seeds and positions have
    nothing in common.
    """
    with np.errstate(over="ignore"):
        mixed = _splitmix64(_splitmix64(seeds.astype(np.uint64)) + positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit integers that turns counters into noise."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gather_logprobs(
    logits: Tensor, token_ids: Tensor, num_logprobs: tuple[int | None, ...]
) -> list[TokenLogprobs | None]:
    """For rows that ask: log-probabilities of the sampled token and of the likeliest ones.

    Of the raw logits, before temperature and filters, as in vLLM V1.
    """
    result: list[TokenLogprobs | None] = [None] * len(num_logprobs)
    rows = [row for row, number in enumerate(num_logprobs) if number is not None]
    if not rows:
        return result
    index = torch.tensor(rows, device=logits.device)
    logprobs = logits[index].log_softmax(dim=-1)
    sampled = token_ids[index][:, None]
    sampled_logprobs = logprobs.gather(1, sampled)
    ranks = (logprobs > sampled_logprobs).sum(dim=-1).tolist()
    most = max(num_logprobs[row] or 0 for row in rows)
    top = logprobs.topk(most, dim=-1)
    ids = torch.cat((sampled, top.indices), dim=1).tolist()
    values = torch.cat((sampled_logprobs, top.values), dim=1).tolist()
    for i, row in enumerate(rows):
        end = 1 + (num_logprobs[row] or 0)
        result[row] = TokenLogprobs(tuple(ids[i][:end]), tuple(values[i][:end]), ranks[i] + 1)
    return result
