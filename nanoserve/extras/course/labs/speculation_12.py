"""Lab 12, Speculation: several tokens from one step, and none of them other than before.

N-gram drafts, the rejection sampler, and what the scheduler takes back. Exact probabilities come
from all random numbers of a grid, not from many draws.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoserve.extras.course.labs.board import Board
from nanoserve.extras.course.labs.helpers import audit
from nanoserve.extras.course.spec import Lab, Task, must
from nanoserve.extras.speculative import proposer, rejection
from nanoserve.sampler import SamplingBatch, uniform_noise
from nanoserve.sequence import SchedulerOutput
from nanoserve.tools.fake_executor import Row, next_token

DRAFTS, REJECTION, CONFIG = (
    "nanoserve.extras.speculative.proposer",
    "nanoserve.extras.speculative.rejection",
    "nanoserve.extras.speculative.config",
)
FIND = Task("12.1", DRAFTS, "find_ngram")
PROPOSE = Task("12.2", DRAFTS, "NgramProposer.propose_one")
SAMPLE = Task("12.3", REJECTION, "rejection_sample")
NOISE = Task("12.4", REJECTION, "rejection_noise")
CALL = Task("12.5", REJECTION, "RejectionSampler.__call__")
ACCEPT = Task("12.6", CONFIG, "SpeculativeConfig.accept")
LAB = Lab(
    12,
    "Speculation",
    [FIND, PROPOSE, SAMPLE, NOISE, CALL, ACCEPT],
    needs_torch=True,
    memory=4096,
    seconds=15.0,
)


# -- 12.1 and 12.2 --


def slow_ngram(tokens: list[int], least: int, longest: int) -> int | None:
    """Try each length from the longest, and each place from the left."""
    for length in range(min(longest, len(tokens) - 1), least - 1, -1):
        for end in range(length, len(tokens)):
            if tokens[end - length : end] == tokens[-length:]:
                return end
    return None


def check_ngram(tokens: list[int], least: int, longest: int) -> None:
    right = slow_ngram(tokens, least, longest)
    got = proposer.find_ngram(np.array(tokens, np.int32), least, longest)
    must(
        got == right,
        f"tokens {tokens}, matches of {least} to {longest} tokens: the text goes on at {right}, "
        f"and the result is {got}",
    )


@FIND.behaviour(1, "the longest match wins")
def longest_match() -> None:
    check_ngram([7, 3, 5, 1, 2, 3, 9, 0, 2, 3], 1, 3)
    check_ngram([7, 3, 5, 1, 2, 3, 9, 0, 1, 2, 3], 1, 4)


@FIND.behaviour(1, "of equally long ones the earliest")
def earliest_match() -> None:
    check_ngram([1, 2, 8, 1, 2, 9, 1, 2], 1, 2)
    check_ngram([2, 8, 1, 2, 9, 1, 2], 1, 1)


@FIND.behaviour(1, "no match is longer than `longest` or shorter than `least`")
def within_limits() -> None:
    check_ngram([3, 8, 2, 3, 9, 2, 3], 1, 1)
    check_ngram([5, 3, 9, 2, 3], 2, 4)
    check_ngram([1, 2, 3], 1, 3)
    check_ngram([1], 1, 3)


@FIND.behaviour(1, "as a search through all places finds it", is_property=True)
def like_a_search(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 14))]
        least = rng.randint(1, 3)
        check_ngram(tokens, least, rng.randint(least, 5))


def propose(tokens: list[int], most: int, least: int = 1, longest: int = 3) -> list[int]:
    config = SimpleNamespace(prompt_lookup_min=least, prompt_lookup_max=longest)
    drafter = object.__new__(proposer.NgramProposer)
    drafter.config = config  # type: ignore[assignment]
    return list(drafter.propose_one(0, np.array(tokens, np.int32), most))


def check_propose(tokens: list[int], most: int, right: list[int], **limits: int) -> None:
    got = propose(tokens, most, **limits)
    must(
        got == right,
        f"tokens {tokens}, at most {most} drafts{limits or ''}: they should be {right}, not {got}",
    )


@PROPOSE.behaviour(1, "what stood behind the match, at most so many")
def behind_the_match() -> None:
    tokens = [1, 2, 3, 9, 8, 7, 6, 2, 3]
    check_propose(tokens, 3, [9, 8, 7])
    check_propose(tokens, 1, [9])
    check_propose([4, 4], 5, [4])


@PROPOSE.behaviour(0.5, "nothing where nothing matches")
def nothing() -> None:
    check_propose([1, 2, 3], 3, [])
    check_propose([5, 3, 9, 2, 3], 3, [], least=2)
    check_propose([5, 3, 9, 2, 3], 3, [9, 2, 3], least=1)


@PROPOSE.behaviour(0.5, "the limits are those of the configuration")
def configured() -> None:
    check_propose([3, 8, 2, 3, 9, 2, 3], 2, [8, 2], least=1, longest=1)
    check_propose([3, 8, 2, 3, 9, 2, 3], 2, [9, 2], least=1, longest=2)


# -- 12.3 --

STEPS = 60


def grid() -> tuple[Tensor, Tensor]:
    """All pairs of two random numbers, evenly."""
    line = (torch.arange(STEPS, dtype=torch.float64) + 0.5) / STEPS
    accept, recover = torch.meshgrid(line, line, indexing="ij")
    return accept.flatten(), recover.flatten()


def decide(p: Tensor, q: Tensor | None, draft: int) -> Tensor:
    """How often each token comes out if this is the draft."""
    accept, recover = grid()
    rows, drafts = torch.ones(len(accept), 1), torch.full((len(accept),), draft)
    q_rows = None if q is None else rows * q
    tokens = rejection.rejection_sample(rows * p, drafts, q_rows, accept, recover)
    counts: Tensor = tokens.bincount(minlength=len(p)) / len(tokens)
    return counts


def as_text(row: Tensor) -> str:
    return "[" + " ".join(f"{number:.3g}" for number in row.tolist()) + "]"


def check_shares(p: Tensor, q: Tensor | None, draft: int, right: list[float]) -> None:
    got = decide(p, q, draft)
    must(
        torch.allclose(got, torch.tensor(right), atol=2 / STEPS),
        f"p {as_text(p)}, q {'certain' if q is None else as_text(q)}, draft {draft}: the tokens "
        f"should come with the shares {right}, and come with {as_text(got)}",
    )


P, Q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])


@SAMPLE.behaviour(1, "a draft stays with probability min(1, p / q)")
def stays() -> None:
    for draft, right in [(0, 1.0), (1, 3 / 7), (2, 1.0)]:
        share = float(decide(P, Q, draft)[draft])
        must(
            abs(share - right) < 2 / STEPS,
            f"p {as_text(P)}, q {as_text(Q)}: draft {draft} should stay in {right:.0%} of the "
            f"cases, and comes out in {share:.0%}",
        )


@SAMPLE.behaviour(1.5, "in its place comes a token of the residual max(p - q, 0)")
def residual() -> None:
    check_shares(P, Q, 1, [4 / 7 * 0.75, 3 / 7, 4 / 7 * 0.25])


@SAMPLE.behaviour(1, "a draft that was certain counts as one of q = 1")
def certain() -> None:
    check_shares(P, None, 1, [0.5, 0.3, 0.2])
    check_shares(P, None, 0, [0.5, 0.3, 0.2])


@SAMPLE.behaviour(0.5, "a draft that the model cannot say never stays")
def impossible() -> None:
    for q in (None, torch.tensor([0.25, 0.75, 0.0])):
        check_shares(
            torch.tensor([0.5, 0.0, 0.5]), q, 1, [0.5, 0, 0.5] if q is None else [1 / 3, 0, 2 / 3]
        )
    zero = torch.zeros(1, dtype=torch.float64)
    p, draft = torch.tensor([[0.5, 0.0, 0.5]]), torch.tensor([1])
    for q in (None, torch.tensor([[0.25, 0.75, 0.0]])):
        got = int(rejection.rejection_sample(p, draft, q, zero, zero))
        must(got != 1, "draft 1 has p = 0; with the random number 0 it stays")


@SAMPLE.behaviour(0.5, "nothing but rounding is left: a token of p")
def no_residual() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0]])
    q = torch.tensor([[0.5, 0.5000001, 0.0]])
    noise = torch.tensor([1 - 2**-53], dtype=torch.float64)
    [token] = rejection.rejection_sample(p, torch.tensor([1]), q, noise, noise).tolist()
    must(token in (0, 1), f"p and q differ by rounding, the draft is rejected: token {token}")


@SAMPLE.behaviour(1.5, "drafted or not, each token has the model's probability", is_property=True)
def exact(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        size = rng.randint(2, 5)
        p, q = (
            torch.tensor([rng.choice([0, 1, 2, 5]) for _ in range(size - 1)] + [1.0])
            for _ in range(2)
        )
        p, q = p / p.sum(), q / q.sum()
        found = sum(q[token] * decide(p, q, token) for token in range(size))
        must(
            isinstance(found, Tensor) and torch.allclose(found, p, atol=4 / STEPS),
            f"p {as_text(p)}, drafts drawn from q {as_text(q)}: the tokens come with the shares "
            f"{as_text(found)}",  # type: ignore[arg-type]
        )


# -- 12.4 --


def streams(number: int, start: int = 0) -> dict[str, np.ndarray]:
    """The random numbers of many positions of one sequence; "plain": of plain decoding."""
    ones, positions = np.ones(number, np.int64), np.arange(start, start + number)
    found = dict(rejection.rejection_noise(ones * 5, ones * 2, positions))
    return {**found, "plain": uniform_noise(ones * 5, ones * 2, positions)}


@NOISE.behaviour(1, "'accept' and 'recover', in [0, 1), the same for the same counters")
def two_streams() -> None:
    first, again = streams(8), streams(8)
    must(set(first) == {"accept", "recover", "plain"}, f"the streams are {[*first][:-1]}")
    for name, values in first.items():
        must(values.shape == (8,), f"{name} has the shape {values.shape} for 8 rows")
        must(((values >= 0) & (values < 1)).all(), f"{name} leaves [0, 1): {values}")
        must((values == again[name]).all(), f"{name}: the same counters, other numbers")


@NOISE.behaviour(1, "the three streams of a token have nothing in common", is_property=True)
def independent(seed: int) -> None:
    found = streams(4000, start=seed % 2**31)
    names = list(found)
    correlation = np.corrcoef(np.stack([found[name] for name in names]))
    for i, one in enumerate(names):
        for j, other in enumerate(names[:i]):
            must(
                abs(correlation[i, j]) < 0.1,
                f"{one} and {other} have a correlation of {correlation[i, j]:.2f}",
            )
    branches = np.arange(4000)
    ones = np.ones(4000, np.int64)
    by_branch = rejection.rejection_noise(ones * 5, branches, ones)
    plain = uniform_noise(ones * 5, branches, ones)
    for name, values in by_branch.items():
        shared = np.intersect1d(values, plain).size
        must(shared < 10, f"{name} of one branch is what another branch draws its token with")


# -- 12.5 --


def call(
    logits: Tensor, drafts: list[int], q: Tensor | None, temperature: float | list[float]
) -> list[int]:
    """The tokens of rows, each with random numbers of its own."""
    number = len(logits)
    ones, positions = np.ones(number, np.int64), np.arange(number)
    noise = rejection.rejection_noise(ones * 3, ones, positions)
    tensors = {name: torch.from_numpy(values) for name, values in noise.items()}
    accept, recover = tensors["accept"], tensors["recover"]
    decide_rows = rejection.RejectionSampler(torch.tensor(drafts), q, accept, recover)
    if temperature == 0:
        batch = SamplingBatch(num_logprobs=(None,) * number, is_greedy=True)
    else:
        batch = make_batch(number, temperature)
    return [int(token) for token in decide_rows(logits, batch).token_ids]


def make_batch(number: int, temperature: float | list[float]) -> SamplingBatch:
    values = torch.tensor(temperature).expand(number).clone()
    positions = np.arange(number)
    uniform = torch.from_numpy(uniform_noise(positions * 0 + 3, positions * 0 + 1, positions))
    drawn = values.nonzero()[:, 0]
    return SamplingBatch((None,) * number, False, drawn, temperature=values, uniform=uniform)


def some_logits(number: int, seed: int = 0) -> Tensor:
    return torch.randn(number, 6, generator=torch.Generator().manual_seed(seed))


@CALL.behaviour(1, "greedy rows give the argmax, whatever the drafts are")
def greedy() -> None:
    logits = some_logits(12)
    right = logits.argmax(dim=-1).tolist()
    drafts = [row % 7 - 1 for row in range(12)]
    got = call(logits, drafts, None, 0)
    must(got == right, f"all rows are greedy, the drafts are {drafts}: {got}, not {right}")
    got = call(logits, drafts, None, [0.0, 1.0] * 6)[::2]
    must(got == right[::2], f"every second row is greedy: those give {got}, not {right[::2]}")


@CALL.behaviour(1, "the bonus row, which has no draft, gives the token of plain decoding")
def bonus() -> None:
    logits = some_logits(40)
    right = rejection.choose_tokens(logits, make_batch(40, 1.0)).token_ids.tolist()
    got = call(logits, [-1] * 40, None, 1.0)
    must(got == right, f"no row has a draft: the tokens are {right}, not {got}")


@CALL.behaviour(1, "each draft meets its own probabilities, at the request's temperature")
def temperature() -> None:
    logits = torch.tensor([[1.0, 2.0, 0.0]] * 4000)
    drafts = [1] * 4000
    for value in (0.5, 2.0):
        p = (logits[0] / value).softmax(dim=-1)
        share = call(logits, drafts, None, value).count(1) / 4000
        must(
            abs(share - float(p[1])) < 0.05,
            f"temperature {value}: the certain draft 1 has p = {p[1]:.2f}, and comes out in "
            f"{share:.0%} of the rows",
        )


@CALL.behaviour(1, "exact distribution, and no draft is wasted", is_property=True)
def distribution(seed: int) -> None:
    logits, number = some_logits(2, seed % 2**31), 6000
    p, q = logits[0].softmax(dim=-1), logits[1].softmax(dim=-1)
    generator = torch.Generator().manual_seed(seed % 2**31)
    drafts = torch.multinomial(q, number, replacement=True, generator=generator)
    rows = torch.ones(number, 1)
    tokens = torch.tensor(call(rows * logits[0], drafts.tolist(), rows * q, 1.0))
    got = tokens.bincount(minlength=len(p)) / number
    must(
        torch.allclose(got, p, atol=0.04),
        f"p {as_text(p)}, q {as_text(q)}: the shares of {number} tokens are {as_text(got)}",
    )
    share, right = float((tokens == drafts).double().mean()), float(torch.minimum(p, q).sum())
    must(
        share > right - 0.04,
        f"p {as_text(p)}, drafts drawn from q {as_text(q)}: {right:.0%} of the drafts can stay, "
        f"the sum of min(p, q), and {share:.0%} do",
    )


# -- 12.6 --


class DraftBoard(Board):
    """A board whose executor drafts: `right` of the drafts are right, the next is wrong."""

    def __init__(self, right: int = 2, number: int = 3, **options: Any) -> None:
        config = {"method": "ngram", "num_speculative_tokens": number}
        super().__init__(speculative_config=config, **options)
        self.right = right
        self.num_drafts = 0  # tokens that were scheduled as drafts
        self.executor.propose = self.guess

    def check_step(self, step: SchedulerOutput) -> None:
        super().check_step(step)
        self.num_drafts += sum(len(item.draft_token_ids) for item in step.scheduled)

    def guess(self, row: Row, most: int) -> Sequence[int]:
        known, drafts = list(row.token_ids), []
        for place in range(most):
            token = next_token(known, row.seed, row.branch)
            drafts.append(token if place < self.right else token + 1)
            known.append(drafts[-1])
        return drafts

    def step_and_tell(self) -> tuple[int, int]:
        """(tokens that one step brought the first sequence, of these computed)."""
        seq = self.all[0]
        before = seq.num_output_tokens
        self.step()
        return seq.num_output_tokens - before, seq.num_computed_tokens


@ACCEPT.behaviour(1.5, "accepted drafts and the bonus token count; rejected ones are taken back")
def taken_back() -> None:
    for right in (0, 1, 2, 3):
        board = DraftBoard(right)
        seq = board.add(6, 20)
        board.step()
        brought, computed = board.step_and_tell()
        must(
            brought == right + 1,
            f"{right} of 3 drafts are right: the step brings {right + 1} tokens, not {brought}",
        )
        must(
            computed == seq.num_tokens - 1,
            f"{right} of 3 drafts are right, {seq.num_tokens} tokens are known: all but the last "
            f"are computed, which is {seq.num_tokens - 1}; num_computed_tokens is {computed}",
        )


@ACCEPT.behaviour(1, "the next drafts are noted, and not beyond max_tokens")
def noted() -> None:
    board = DraftBoard(3)
    seq = board.add(6, 20)
    board.step()
    number = len(seq.spec_token_ids)
    must(number == 3, f"the model's output has 3 drafts, {number} are noted")
    board = DraftBoard(3)
    seq = board.add(6, 7)
    board.step(2)
    number, left = len(seq.spec_token_ids), seq.max_tokens - seq.num_output_tokens
    must(
        number == left - 1,
        f"max_tokens leaves {left} tokens, and a step brings one without a draft: so {left - 1} "
        f"may be noted, not {number}",
    )


@ACCEPT.behaviour(1, "the counters of the request")
def counters() -> None:
    board = DraftBoard(2)
    seq = board.add(6, 20)
    board.step(3)
    metrics = seq.metrics
    got = metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens
    must(got == (2, 6, 4), f"(num_drafts, num_draft_tokens, num_accepted_tokens) are {got}")


@ACCEPT.behaviour(1, "only tokens that are known can be found in the prefix cache")
def cached() -> None:
    board = DraftBoard(2, block_size=4)
    seq = board.add(6, 20)
    board.step(4)
    must(board.num_drafts, "four steps, and no draft was scheduled: were the next ones noted?")
    found = board.manager.get_cached_blocks(seq)
    must(
        len(found) == min(seq.num_computed_tokens, seq.num_tokens - 1) // 4,
        f"{seq.num_computed_tokens} tokens are computed, block size 4: {len(found)} blocks are "
        "found in the prefix cache" + board.show(),
    )


@ACCEPT.behaviour(1.5, "the same tokens as without drafts", is_property=True)
def same_tokens(seed: int) -> None:
    rng, num_drafts = random.Random(seed), 0
    for _ in range(20):
        size, most = rng.choice([1, 2, 4]), rng.randint(1, 5)
        budget = rng.choice([6, 12, 64])
        board = DraftBoard(
            rng.randint(0, 4), most, num_blocks=60, block_size=size, budget=budget, max_num_seqs=4
        )
        for _ in range(rng.randint(1, 6)):
            board.add(rng.randint(1, 10), rng.randint(1, 5), first=rng.choice([0, None]))
            if rng.random() < 0.6:
                board.step(rng.randint(1, 2))
            audit(board.manager)
        board.finish()
        audit(board.manager)
        num_drafts += board.num_drafts
    must(num_drafts, "20 loads, and no draft was scheduled: were the next ones noted?")
