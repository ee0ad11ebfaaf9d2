"""How do logits become a token?

Every stage is a short function on a batch of logits [num_rows, vocab_size]. Each row has parameters
of its own, so requests with different parameters share one pass. The order is vLLM V1's; beside it
that of V0 (0.6.6):

    V1, and here                              V0
    1  raw logprobs, if asked for             1  logits processors (bias, allowed ids, yours)
    2  a mask (a chapter's: grammars)         2  min_tokens
    3  allowed_token_ids                      3  repetition, frequency, presence penalty
    4  bad_words                              4  temperature
    5  min_tokens, logit_bias, your own       5  top_k, top_p
       logits_processors                      6  min_p
    6  repetition, frequency, presence        7  softmax, sample
    7  temperature                            8  logprobs, of what was sampled from
    8  min_p
    9  top_k, top_p                           V0's logprobs show what the filters left; V1's show
    10 one random number -> token, or argmax  what the model said.

Stages 2-6 change which token is likeliest, so greedy rows pass through them too; 7-9 do not change
it. Bad words, min_tokens and logit_bias are one list of LogitEdits: -inf is added to the logit of a
forbidden token.

*Random streams are counters, not state.* The random number of a token is a function of (the
request's seed, its branch, the token's position) and nothing else. The state of a torch.Generator
would have to be carried through batching, preemption, CUDA graphs and ranks; a function has no
state, and the same request has the same random numbers in any batch and on any rank. Its logits may
differ by rounding: in bfloat16 that can change a token, in float32 hardly ever.

vLLM: vllm/model_executor/layers/sampler.py (V0); vllm/v1/sample/sampler.py,
ops/topk_topp_sampler.py (V1). Penalties: CTRL, arXiv 1909.05858 (repetition). min_p: arXiv
2407.01082; top_p (nucleus): arXiv 1904.09751.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.sampling_params import GREEDY_TEMPERATURE, LogitsProcessor
from nanoserve.sequence import RequestError, SampledToken, TokenLogprobs, new


class LogitEdits(NamedTuple):
    """Additions to m single logits: values[j] to logits[logits_rows[j], token_ids[j]]."""

    logits_rows: Tensor  # [m] int64
    token_ids: Tensor  # [m] int64
    values: Tensor  # [m] float32; -inf forbids the token


class Penalties(NamedTuple):
    """For k of the rows: the tokens so far, and the weights of the three penalties."""

    logits_rows: Tensor  # [k] int64
    token_ids: Tensor  # [k, num_seen] int64: each token of prompt and output, once or more often
    output_counts: Tensor  # [k, num_seen] int32: how often each of these tokens is in the output
    repetition: Tensor  # [k] float32
    frequency: Tensor  # [k] float32
    presence: Tensor  # [k] float32


@dataclass(frozen=True)
class SamplingBatch:
    """One entry for each row of the logits. None or empty where no row uses the feature."""

    num_logprobs: tuple[int | None, ...] = ()  # per row: how many of the likeliest to report
    is_greedy: bool = False  # every row is: then temperature, filters and uniform are None
    drawn_rows: Tensor | None = None  # int64: the rows that are not greedy. None: all, or none
    temperature: Tensor | None = None  # [num_rows] float32
    top_k: Tensor | None = None  # [num_rows] int64, vocab_size where off
    # The largest top_k of the rows that have top_k or top_p, for who cannot wait for the tensors.
    # None: not known.
    max_top_k: int | None = None
    top_p: Tensor | None = None  # [num_rows] float32
    min_p: Tensor | None = None  # [num_rows] float32
    uniform: Tensor | None = None  # [num_rows] float64 in [0, 1): the random number of each row
    mask: Callable[[Tensor], Tensor] | None = None  # logits -> logits without forbidden tokens
    allowed: LogitEdits | None = None  # allowed_token_ids: all other logits of these rows are -inf
    edits: LogitEdits | None = None  # bad_words, min_tokens, logit_bias
    # (row, its callables, prompt token ids, output token ids) of each request that has some
    processors: Seq[tuple[int, Seq[LogitsProcessor], list[int], list[int]]] = ()
    penalties: Penalties | None = None
    # Row -> what its logits processors did wrong: filled while they run.
    errors: dict[int, RequestError] = new(dict)


class LogprobsTensors(NamedTuple):
    """Log-probabilities of k rows, on the device."""

    logits_rows: list[int]  # the k rows that ask for logprobs
    numbers: list[int]  # how many of the likeliest each wants
    token_ids: Tensor  # [k, 1 + max(numbers)]: the sampled one first
    logprobs: Tensor  # the same shape
    ranks: Tensor  # [k]: of the sampled one, from 0

    def to_host(self) -> list[TokenLogprobs]:
        """As Python numbers, one entry for each of the k rows. Waits for the device."""
        lists = (tensor.tolist() for tensor in (self.token_ids, self.logprobs, self.ranks))
        return [
            TokenLogprobs(tuple(token_ids[: 1 + number]), tuple(logprobs[: 1 + number]), rank + 1)
            for number, token_ids, logprobs, rank in zip(self.numbers, *lists, strict=True)
        ]


class SampledTokens(NamedTuple):
    """One token for each row of the logits, on the device."""

    token_ids: Tensor  # [num_rows] int64
    is_possible: Tensor  # [num_rows] bool: False if all are forbidden, or a logit is NaN or +inf
    logprobs: LogprobsTensors | None
    errors: dict[int, RequestError]  # row -> what its logits processors did wrong

    def to_host(self) -> list[SampledToken | RequestError]:
        """As Python objects, one for each row: a token, or why there is none. Waits for the
        device."""
        logprobs: dict[int, TokenLogprobs] = {}
        if self.logprobs is not None:
            logprobs = dict(zip(self.logprobs.logits_rows, self.logprobs.to_host(), strict=True))
        none = RequestError(
            "no token is possible: all are forbidden, or a logit is NaN or infinite."
        )
        impossible = {row: none for row, ok in enumerate(self.is_possible.tolist()) if not ok}
        errors = impossible | self.errors
        token_ids = enumerate(self.token_ids.tolist())
        return [errors.get(row) or SampledToken(each, logprobs.get(row)) for row, each in token_ids]


class ChosenTokens(NamedTuple):
    """One token for each row of the logits."""

    token_ids: Tensor  # [num_rows] int64
    is_possible: Tensor  # [num_rows] bool: False if all are forbidden, or a logit is NaN or +inf


def choose_tokens(logits: Tensor, batch: SamplingBatch) -> ChosenTokens:
    """Stages 7 to 10. (For large vocabularies kernels/sampling.py has a faster choose_tokens.)"""
    likeliest, token_ids = logits.max(dim=-1)  # NaN counts as the likeliest
    if not batch.is_greedy:
        assert batch.temperature is not None and batch.uniform is not None
        is_greedy = batch.temperature < GREEDY_TEMPERATURE
        filtered = logits / batch.temperature.masked_fill(is_greedy, 1.0)[:, None]
        if batch.min_p is not None:
            filtered = apply_min_p(filtered, batch.min_p)
        if batch.top_k is not None or batch.top_p is not None:
            filtered = apply_top_k_top_p(filtered, batch.top_k, batch.top_p)
        drawn = draw(filtered.softmax(dim=-1), batch.uniform)
        token_ids = torch.where(is_greedy, token_ids, drawn)
    return ChosenTokens(token_ids, likeliest.isfinite())


Choose = Callable[[Tensor, SamplingBatch], ChosenTokens]


def sample(logits: Tensor, batch: SamplingBatch, choose: Choose = choose_tokens) -> SampledTokens:
    """Choose one token for each row of logits [num_rows, vocab_size]; the CPU does not wait."""
    raw = logits.float()
    token_ids, is_possible = choose(apply_constraints(raw, batch), batch)
    logprobs = None
    if batch.num_logprobs:
        logprobs = gather_logprobs(raw, token_ids, batch.num_logprobs)
    return SampledTokens(token_ids, is_possible, logprobs, batch.errors)


def apply_constraints(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Stages 2 to 6: all that can change which token is likeliest. `logits` is not written to.

    What a request's own logits processor raises ends this request alone. As in V0, one with three
    parameters gets the prompt, too.
    """
    if batch.mask is not None:
        logits = batch.mask(logits)
    if (allowed := batch.allowed) is not None:
        places = (allowed.logits_rows, allowed.token_ids)
        only = logits.index_fill(0, allowed.logits_rows, -torch.inf)
        logits = only.index_put(places, logits[places])
    if (edits := batch.edits) is not None:  # several edits of one logit add up
        places = (edits.logits_rows, edits.token_ids)
        logits = logits.index_put(places, edits.values, accumulate=True)
    logits = logits.clone() if batch.processors else logits
    for row, processors, prompt, output in batch.processors:
        try:
            for processor in processors:
                both = len(inspect.signature(processor).parameters) == 3
                result = processor(*([prompt] if both else []), output, logits[row].clone())
                if not isinstance(result, Tensor):
                    raise TypeError(f"it must return the row of logits, not {result!r}")
                logits[row] = result.view(logits[row].shape)
        except Exception as error:
            batch.errors[row] = RequestError(f"a logits processor failed: {error!r}")
    if batch.penalties is not None:
        logits = apply_penalties(logits, batch.penalties)
    return logits


def apply_penalties(logits: Tensor, penalties: Penalties) -> Tensor:
    """Make tokens of the prompt or output less likely (or, with the opposite sign, more likely).

    repetition (prompt and output): a positive logit is divided by it, a negative one multiplied.
    frequency (output only): subtracted once for each occurrence; presence: once in all.
    """
    seen = (penalties.logits_rows[:, None], penalties.token_ids)
    counts, repetition = penalties.output_counts, penalties.repetition[:, None]
    some = logits[seen]  # [k, num_seen]
    some = torch.where(some > 0, some / repetition, some * repetition)
    some = some - penalties.frequency[:, None] * counts
    some = some - penalties.presence[:, None] * (counts > 0)
    return logits.index_put(seen, some)  # a token that comes twice has the same value twice


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
    return logits.masked_fill(logits < find_threshold(ordered, top_k, top_p), -torch.inf)


def find_threshold(ordered: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """[num_rows, 1]: the smallest logit that is kept. `ordered`: the logits of each row in
    descending order, or as many as the largest top_k."""
    num_kept = torch.full_like(ordered[:, 0], ordered.shape[1], dtype=torch.long)
    if top_k is not None:
        num_kept = top_k.clamp(max=ordered.shape[1])
        rank = torch.arange(ordered.shape[1], device=ordered.device)
        ordered = ordered.masked_fill(rank >= top_k[:, None], -torch.inf)
    if top_p is not None:
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs
        limit = top_p.masked_fill(top_p >= 1, torch.inf)  # off, however the sum is rounded
        num_kept = torch.minimum(num_kept, (before < limit[:, None]).sum(dim=-1))
    return ordered.gather(1, num_kept.clamp(min=1)[:, None] - 1)


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
) -> LogprobsTensors:
    """Log-probabilities of the sampled token and of the likeliest ones, of the rows that ask.

    Computed from the raw logits, before temperature and filters, as in vLLM V1.
    """
    logits_rows = [i for i, number in enumerate(num_logprobs) if number is not None]
    numbers = [num_logprobs[i] or 0 for i in logits_rows]
    numbers = [logits.shape[1] if number == -1 else number for number in numbers]
    if len(logits_rows) < len(num_logprobs):
        # A stack of rows: an index would have to be sent, and the CPU would wait.
        logits = torch.stack([logits[i] for i in logits_rows])
        token_ids = torch.stack([token_ids[i] for i in logits_rows])
    logprobs = logits.log_softmax(dim=-1)
    sampled = token_ids[:, None]
    sampled_logprobs = logprobs.gather(1, sampled)
    top = logprobs.topk(max(numbers), dim=-1)
    return LogprobsTensors(
        logits_rows,
        numbers,
        torch.cat((sampled, top.indices), dim=1),
        torch.cat((sampled_logprobs, top.values), dim=1),
        (logprobs > sampled_logprobs).sum(dim=-1),
    )
