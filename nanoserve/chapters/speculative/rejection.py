"""May this draft stay, and if not, what comes in its place?

Two methods give each row of logits a token. A sequence with k drafts has k + 1 rows, and it gets
their tokens up to the first one that is not the draft of its row (this one too):

    drafts       the  cat  sat   -          -: the last row has no draft
    tokens       the  cat  lay  ...         the sequence gets: the cat lay

*Sampling and comparing* ("strict", the default) draws each token as plain decoding does. The random
number of a position does not depend on how the tokens before it were found, so the tokens are those
of plain decoding, bit for bit. A draft of probability p(draft) is right as often as that.

*RejectionSampler* ("standard") decides with the draft's probability q as well, if the proposer drew
the draft from a distribution q:

    accepted    with probability min(1, p(draft) / q(draft)): the token is the draft
    recovered   otherwise: a token drawn from max(p - q, 0), made to sum to 1
    bonus       in a row without a draft: a token drawn from p

Example: a vocabulary of three tokens.

    p                        0.5   0.3   0.2     of the target model
    q                        0.2   0.7   0.1     of the draft model
    min(p, q)                0.2   0.3   0.1     drafted and accepted; sum 0.6
    max(p - q, 0)            0.3   0     0.1     sum 0.4; made to sum to 1: 0.75 0 0.25
    0.4 * (0.75 0 0.25)      0.3   0     0.1     rejected, then recovered
    both together            0.5   0.3   0.2     = p

*Why this is exact.* The probability to draft x and to accept it is q(x) min(1, p(x) / q(x)) =
min(p(x), q(x)). A draft is rejected with probability 1 - sum min(p, q) = sum max(p - q, 0), and
then x is recovered with probability max(p(x) - q(x), 0) / sum max(p - q, 0). So x comes out with
probability min(p(x), q(x)) + max(p(x) - q(x), 0) = p(x). This holds at each position, given the
tokens before it; so it holds for all of them together.

*What the two methods give.* In the example 60% of the drafts are accepted. If the target is sampled
and compared, independently of the draft, 0.5 * 0.2 + 0.3 * 0.7 + 0.2 * 0.1 = 33% are right: sum p q
is at most sum min(p, q). A draft that nobody drew (n-gram, suffix, argmax) has q = 1, and both
methods accept it with probability p(draft). (A drawn draft may count as one of q = 1, too: that is
exact, and accepts fewer.) The tokens differ: those of the RejectionSampler have the distribution of
plain decoding, but they are other ones, and they depend on the drafts.

*A condition.* Whether a position has a draft must not depend on which token was drawn there: a
proposer that takes an unlikely draft back misses p. So a grammar leaves a draft that it forbids in
the step: p is 0, and the recovered token has what the draft has lost.

Greedy rows have a p of 1 at the argmax: their tokens are the argmax, whatever the drafts are.

Left out: verifying the drafts of a sequence as one block (arXiv 2403.10444).

Papers: Leviathan and others, arXiv 2211.17192; Chen and others, arXiv 2302.01318.
vLLM: vllm/model_executor/layers/rejection_sampler.py (V0);
vllm/v1/sample/rejection_sampler.py (0.32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoserve.input_batch import RequestState, StepArrays
from nanoserve.kernels.sampling import compute_probs
from nanoserve.sampler import Choose, ChosenTokens, SamplingBatch, draw, uniform_noise
from nanoserve.sampling_params import GREEDY_TEMPERATURE

# The random streams of this module, as branches far beyond those of a request: they have nothing in
# common with that of plain decoding, with which drafts and bonus tokens are drawn.
ACCEPT, RECOVER = 2**32, 2**33


@dataclass(frozen=True, kw_only=True)
class DraftedBatch(SamplingBatch):
    """A SamplingBatch with the drafts that its rows verify."""

    draft_token_ids: Tensor  # [num_rows] int64; -1: the row has no draft
    draft_probs: Tensor  # [num_rows, vocab_size]: what each draft was drawn from
    accept: Tensor  # [num_rows] float64 in [0, 1): random numbers
    recover: Tensor  # [num_rows] float64 in [0, 1)


def with_drafts(
    batch: SamplingBatch, states: RequestState, arrays: StepArrays, draft_probs: Any
) -> SamplingBatch:
    """The batch, with its drafts if there are some and rows that draw. draft_probs: see
    Proposer."""
    rows, positions = arrays.sampled_rows, arrays.positions[arrays.logits_indices] + 1
    # A row has a draft if the next row is behind it.
    is_draft = np.append((np.diff(rows) == 0) & (np.diff(positions) == 1), False)
    if batch.is_greedy or not is_draft.any():
        return batch
    drafts, seeds, branches = np.full(len(rows), -1), states.seeds[rows], states.branches[rows]
    drafts[is_draft] = states.token_ids[rows[is_draft], positions[is_draft]]
    sent = states.send(
        draft_token_ids=drafts,
        accept=uniform_noise(seeds, branches + ACCEPT, positions),
        recover=uniform_noise(seeds, branches + RECOVER, positions),
    )
    probs = torch.zeros(len(rows), states.vocab_size, device=states.device)
    probs.scatter_(1, sent["draft_token_ids"].clamp(min=0)[:, None], 1.0)
    for i in is_draft.nonzero()[0].tolist():
        if drawn_from := draft_probs.get(int(states.seq_ids[rows[i]])):
            probs[i] = drawn_from[positions[i] - states.num_tokens[rows[i]]]
    return DraftedBatch(**vars(batch), **sent, draft_probs=probs)


class RejectionSampler:
    """In the place of `choose`, a function of plain decoding, for rows that have drafts."""

    def __init__(self, choose: Choose) -> None:
        self.choose = choose

    def __call__(self, logits: Tensor, batch: SamplingBatch) -> ChosenTokens:
        """One token for each row of `logits`: accepted, recovered or bonus."""
        chosen = self.choose(logits, batch)
        if not isinstance(batch, DraftedBatch):
            return chosen
        p, q, drafts = compute_probs(logits, batch), batch.draft_probs, batch.draft_token_ids
        token_ids = rejection_sample(p, q, drafts, batch.accept, batch.recover)
        is_drafted = (drafts >= 0) & (batch.temperature >= GREEDY_TEMPERATURE)
        token_ids = torch.where(is_drafted, token_ids, chosen.token_ids)
        return ChosenTokens(token_ids, chosen.is_possible)


def rejection_sample(
    p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, recover: Tensor
) -> Tensor:
    """The draft of each row, or a recovered token in its place, which is another one.

    p of the target and q of the drafter [num_rows, vocab_size], drafts [num_rows] int64, accept and
    recover [num_rows] float64 in [0, 1) -> [num_rows] int64. Rows without a draft (-1) mean
    nothing. p and q are rounded: a draft may be rejected though nothing of p - q is left; then the
    token comes from p.
    """
    of_drafts = drafts.clamp(min=0)[:, None]
    is_accepted = accept * q.gather(1, of_drafts)[:, 0] < p.gather(1, of_drafts)[:, 0]
    rest = (p - q).clamp(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, p)
    return torch.where(is_accepted, drafts, draw(rest, recover))
