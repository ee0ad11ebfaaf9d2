"""How do logits become a token?

Every stage is a short function on a batch of rows [num_rows, vocab_size] with one parameter a row,
so that requests with different wishes share one pass. The order is vLLM V1's; beside it the order
that the documents give for V0:

    V1, and here                              V0
    1  raw logprobs, if asked for             1  logits processors (bias, allowed ids, yours)
    2  batch-level mask (grammars)            2  min_tokens
    3  allowed_token_ids                      3  repetition, frequency, presence penalty
    4  bad_words                              4  temperature
    5  min_tokens, logit_bias, your own       5  top_k, top_p
       logits_processors                      6  min_p
    6  repetition, frequency, presence        7  softmax, sample
    7  temperature                            8  logprobs, of what was sampled from
    8  min_p
    9  top_k, top_p                           V0's logprobs show what the filters left; V1's show
    10 one random number -> token, or argmax  what the model said, and the penalties and filters of
                                              one request never change what another one reads.

Stages 2-6 change which token is likeliest, so greedy rows go through them too; 7-9 do not.

*Random streams are counters, not state.* The random number of a token is a function of (the
request's seed, its branch, the token's position) and nothing else. A torch.Generator would have to
be carried through batching, preemption, CUDA graphs and ranks; a function has nothing to carry, and
the same request gives the same text wherever and with whomever it runs.

vLLM: vllm/model_executor/layers/sampler.py (V0); vllm/v1/sample/sampler.py,
ops/topk_topp_sampler.py (V1). Penalties: CTRL, arXiv 1909.05858 (repetition). min_p: arXiv
2407.01082; top_p (nucleus): arXiv 1904.09751.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.sampling_params import GREEDY_TEMPERATURE, LogitsProcessor
from nanoserve.sequence import TokenLogprobs


class TokenRows(NamedTuple):
    """Single logits, as parallel lists: logits[rows[i], token_ids[i]], and values[i] if needed."""

    rows: list[int]
    token_ids: list[int]
    values: list[float]


class Penalties(NamedTuple):
    """For k of the rows: what was said so far, and how much it weighs."""

    rows: Tensor  # [k] int64
    is_in_prompt: Tensor  # [k, vocab_size] bool
    output_counts: Tensor  # [k, vocab_size] int64: how often each token is in the output
    repetition: Tensor  # [k] float32
    frequency: Tensor  # [k] float32
    presence: Tensor  # [k] float32


class RowProcessors(NamedTuple):
    """One row's own Python callables, and what they are told."""

    row: int
    processors: tuple[LogitsProcessor, ...]
    prompt_token_ids: list[int]
    output_token_ids: list[int]


@dataclass(frozen=True)
class SamplingBatch:
    """One row for each token to be sampled. None or empty where no row uses the feature."""

    num_logprobs: tuple[int | None, ...]  # per row: how many of the likeliest to report
    is_greedy: bool = False  # every row is: then temperature, filters and uniform are None
    temperature: Tensor | None = None  # [num_rows] float32
    top_k: Tensor | None = None  # [num_rows] int64, vocab_size where off
    top_p: Tensor | None = None  # [num_rows] float32
    min_p: Tensor | None = None  # [num_rows] float32
    uniform: Tensor | None = None  # [num_rows] float64 in [0, 1): the random number of each row
    mask: Tensor | None = None  # [num_rows, vocab_size] bool: False forbids (structured output)
    allowed: tuple[tuple[int, tuple[int, ...]], ...] = ()  # (row, allowed_token_ids)
    banned: TokenRows | None = None  # bad words about to be completed, ends before min_tokens
    bias: TokenRows | None = None
    processors: tuple[RowProcessors, ...] = ()
    penalties: Penalties | None = None


class LogprobsTensors(NamedTuple):
    """What gather_logprobs found, still on the device."""

    rows: list[int]  # that asked, k of them
    numbers: list[int]  # how many of the likeliest each wants
    token_ids: Tensor  # [k, 1 + max(numbers)]: the sampled one first
    logprobs: Tensor  # the same shape
    ranks: Tensor  # [k]: of the sampled one, from 0

    def map(self, function: Callable[[Tensor], Tensor]) -> LogprobsTensors:
        """The same with `function` of each tensor, such as a copy of it on another device."""
        return LogprobsTensors(*self[:2], *(function(tensor) for tensor in self[2:]))

    def read(self, num_rows: int) -> list[TokenLogprobs | None]:
        """One entry for each of `num_rows` rows; None for those that did not ask."""
        result: list[TokenLogprobs | None] = [None] * num_rows
        ids, values, ranks = (t.tolist() for t in (self.token_ids, self.logprobs, self.ranks))
        for i, (row, number) in enumerate(zip(self.rows, self.numbers, strict=True)):
            end = 1 + number
            result[row] = TokenLogprobs(tuple(ids[i][:end]), tuple(values[i][:end]), ranks[i] + 1)
        return result


class SampledTokens(NamedTuple):
    """What `choose_tokens` chose, still on the device: no step waits for it but the reader."""

    token_ids: Tensor  # [num_rows] int64
    is_dead: Tensor | None  # [num_rows] bool: no token was possible. None: no row was constrained
    logprobs: LogprobsTensors | None

    def map(self, function: Callable[[Tensor], Tensor]) -> SampledTokens:
        """The same with `function` of each tensor."""
        is_dead = None if self.is_dead is None else function(self.is_dead)
        logprobs = self.logprobs.map(function) if self.logprobs else None
        return SampledTokens(function(self.token_ids), is_dead, logprobs)

    def read(self) -> SamplerOutput:
        """As Python numbers. Raises RowError for the first row in which nothing was possible."""
        if self.is_dead is not None and bool(self.is_dead.any()):
            raise RowError(
                int(self.is_dead.nonzero()[0]),
                "no token is possible: allowed_token_ids, bad_words, min_tokens, logits processors "
                "and the mask together forbid all of them (or a logit is NaN).",
            )
        num_rows = len(self.token_ids)
        logprobs: list[TokenLogprobs | None] = [None] * num_rows
        if self.logprobs is not None:
            logprobs = self.logprobs.read(num_rows)
        return SamplerOutput(self.token_ids.tolist(), logprobs)


@dataclass(frozen=True)
class SamplerOutput:
    token_ids: list[int]  # per row
    logprobs: list[TokenLogprobs | None]  # per row; None where not asked for


def sample(logits: Tensor, batch: SamplingBatch) -> SamplerOutput:
    """Choose one token for each row of logits [num_rows, vocab_size]."""
    return choose_tokens(logits, batch).read()


def choose_tokens(logits: Tensor, batch: SamplingBatch) -> SampledTokens:
    """The same, with the result left on the device."""
    raw = logits.float()
    logits = apply_constraints(raw, batch)
    is_dead = None if logits is raw else ~torch.isfinite(logits.amax(dim=-1))
    token_ids = logits.argmax(dim=-1)
    if not batch.is_greedy:
        assert batch.temperature is not None and batch.uniform is not None
        is_greedy = batch.temperature < GREEDY_TEMPERATURE
        filtered = apply_temperature(logits, batch.temperature.masked_fill(is_greedy, 1.0))
        if batch.min_p is not None:
            filtered = apply_min_p(filtered, batch.min_p)
        if batch.top_k is not None or batch.top_p is not None:
            filtered = apply_top_k_top_p(filtered, batch.top_k, batch.top_p)
        drawn = draw(filtered.softmax(dim=-1), batch.uniform)
        token_ids = torch.where(is_greedy, token_ids, drawn)
    return SampledTokens(token_ids, is_dead, find_logprobs(raw, token_ids, batch.num_logprobs))


class RowError(ValueError):
    """A row cannot be sampled, by its own doing."""

    def __init__(self, row: int, message: str) -> None:
        super().__init__(message)
        self.row = row


def apply_constraints(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Stages 2 to 6: whatever can change which token is likeliest. `logits` is left as it is."""
    if batch.mask is not None:
        logits = logits.masked_fill(~batch.mask, -torch.inf)
    if batch.allowed:
        logits = apply_allowed_token_ids(logits, batch.allowed)
    if batch.banned is not None:
        logits = apply_banned(logits, batch.banned)
    if batch.bias is not None:
        logits = apply_logit_bias(logits, batch.bias)
    if batch.processors:
        logits = apply_logits_processors(logits, batch.processors)
    if batch.penalties is not None:
        logits = apply_penalties(logits, batch.penalties)
    return logits


def apply_allowed_token_ids(
    logits: Tensor, allowed: tuple[tuple[int, tuple[int, ...]], ...]
) -> Tensor:
    """For each (row, token ids): nothing but these."""
    logits = logits.clone()
    for row, token_ids in allowed:
        index = torch.tensor(token_ids, device=logits.device)
        kept = logits[row, index]
        logits[row] = -torch.inf
        logits[row, index] = kept
    return logits


def apply_banned(logits: Tensor, banned: TokenRows) -> Tensor:
    """Forbid single tokens."""
    logits = logits.clone()
    logits[banned.rows, banned.token_ids] = -torch.inf
    return logits


def apply_logit_bias(logits: Tensor, bias: TokenRows) -> Tensor:
    """Add to the logits of single tokens."""
    logits = logits.clone()
    logits[bias.rows, bias.token_ids] += torch.tensor(bias.values, device=logits.device)
    return logits


def apply_logits_processors(logits: Tensor, processors: tuple[RowProcessors, ...]) -> Tensor:
    """Call each row's own callables, in their order, on its logits [vocab_size].

    As in V0, one with two parameters gets (output token ids, logits), one with three the prompt's
    token ids before them. Raises ValueError if one returns another shape.
    """
    logits = logits.clone()
    for row, callables, prompt_token_ids, output_token_ids in processors:
        for processor in callables:
            arguments: list[list[int]] = [output_token_ids]
            if _num_required_parameters(processor) == 3:
                arguments = [prompt_token_ids, output_token_ids]
            try:
                result = processor(*arguments, logits[row].clone())
            except Exception as error:
                message = f"a logits processor raised {type(error).__name__}: {error}"
                raise RowError(row, message) from error
            if not isinstance(result, Tensor) or result.shape != logits[row].shape:
                raise RowError(
                    row,
                    f"a logits processor ({processor!r}) must return a tensor of shape "
                    f"{tuple(logits[row].shape)}, got {result!r}.",
                )
            logits[row] = result
    return logits


def _num_required_parameters(processor: LogitsProcessor) -> int:
    """Those with a default, as in `lambda output, logits, k=k: ...`, are the caller's own."""
    parameters = inspect.signature(processor).parameters.values()
    return sum(parameter.default is inspect.Parameter.empty for parameter in parameters)


def apply_penalties(logits: Tensor, penalties: Penalties) -> Tensor:
    """Make what was said less likely (or, with the opposite sign, more).

    repetition (prompt and output): a positive logit is divided by it, a negative one multiplied.
    frequency (output only): subtracted once for each occurrence; presence: once in all.
    """
    rows, counts = penalties.rows, penalties.output_counts
    some = logits[rows]
    is_seen = penalties.is_in_prompt | (counts > 0)
    repetition = penalties.repetition[:, None]
    some = torch.where(is_seen, torch.where(some > 0, some / repetition, some * repetition), some)
    some = some - penalties.frequency[:, None] * counts
    some = some - penalties.presence[:, None] * (counts > 0)
    return logits.index_copy(0, rows, some)


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


def uniform_noise(seeds: np.ndarray, branches: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The random numbers, [n] float64 in [0, 1), of streams (seed, branch) at `positions` ([n]).

    Counter-based: SplitMix64's mixing function (Steele, Lea, Flood, OOPSLA 2014), over the seed,
    then with the branch added, then with the position added, so that neighbouring seeds, branches
    and positions have nothing in common.
    """
    with np.errstate(over="ignore"):
        mixed = _splitmix64(seeds.astype(np.uint64))
        mixed = _splitmix64(mixed + branches.astype(np.uint64))
        mixed = _splitmix64(mixed + positions.astype(np.uint64))
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
    found = find_logprobs(logits, token_ids, num_logprobs)
    return found.read(len(num_logprobs)) if found else [None] * len(num_logprobs)


def find_logprobs(
    logits: Tensor, token_ids: Tensor, num_logprobs: tuple[int | None, ...]
) -> LogprobsTensors | None:
    """The same, left on the device; None if no row asks."""
    rows = [row for row, number in enumerate(num_logprobs) if number is not None]
    if not rows:
        return None
    numbers = [num_logprobs[row] or 0 for row in rows]
    numbers = [logits.shape[1] if number == -1 else number for number in numbers]
    if len(rows) < len(num_logprobs):
        index = torch.tensor(rows, device=logits.device)
        logits, token_ids = logits[index], token_ids[index]
    logprobs = logits.log_softmax(dim=-1)
    sampled = token_ids[:, None]
    sampled_logprobs = logprobs.gather(1, sampled)
    top = logprobs.topk(max(numbers), dim=-1)
    return LogprobsTensors(
        rows,
        numbers,
        torch.cat((sampled, top.indices), dim=1),
        torch.cat((sampled_logprobs, top.values), dim=1),
        (logprobs > sampled_logprobs).sum(dim=-1),
    )
