"""The rows of the runner: sequences come, grow token by token, and go."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve import SamplingParams
from nanoserve.input_batch import PLACEHOLDER, InputBatch
from nanoserve.sampler import Penalties, SamplingBatch, uniform_noise
from nanoserve.sequence import NewSequence, ScheduledSequence

VOCAB_SIZE = 50
PENALIZED = SamplingParams(frequency_penalty=0.5)


def keep(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor that changes nothing."""
    return logits


def new(
    seq_id: int,
    token_ids: list[int],
    params: SamplingParams | None = None,
    num_prompt_tokens: int | None = None,
    **fields: Any,
) -> NewSequence:
    """A sequence as the scheduler introduces it; all its tokens are its prompt by default."""
    known: dict[str, Any] = {
        "seq_id": seq_id,
        "token_ids": tuple(token_ids),
        "num_prompt_tokens": len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        "block_ids": (),
        "sampling_params": params or SamplingParams(),
        "stop_token_ids": frozenset({1}),
        "bad_word_ids": (),
        "seed": 100 + seq_id,
        "branch": 0,
        "num_samples": 1,
    }
    return NewSequence(**{**known, **fields})


def make_batch(max_num_seqs: int = 4, max_model_len: int = 64) -> InputBatch:
    return InputBatch(max_num_seqs, max_model_len, block_size=4, vocab_size=VOCAB_SIZE)


def append_token(batch: InputBatch, row: int, token_id: int) -> None:
    """Sampled, and known at once."""
    batch.fill_placeholder(row, sample_token(batch, row, token_id), token_id)


def sample_token(batch: InputBatch, row: int, token_id: int) -> int:
    """As the runner does it: make a sampling batch, and leave the token on the device. Returns the
    token's position. The CPU does not know the token yet."""
    batch.make_sampling_batch(np.array([row]), batch.branches[[row]])
    batch.last_sampled_token_ids[row] = token_id
    [position] = batch.append_placeholders(np.array([row]))
    return int(position)


def sampling_of(batch: InputBatch, *seq_ids: int) -> SamplingBatch:
    """One sample for each of these sequences."""
    rows = np.array([batch.row_of[seq_id] for seq_id in seq_ids])
    return batch.make_sampling_batch(rows, batch.branches[rows])


def edits_of(batch: InputBatch, *seq_ids: int) -> list[tuple[int, int, float]]:
    """(row of the logits, token id, value) of each edit."""
    edits = sampling_of(batch, *seq_ids).edits
    return [] if edits is None else list(zip(*(t.tolist() for t in edits), strict=True))


def counts_of(batch: InputBatch, *seq_ids: int) -> list[dict[int, int]]:
    """For each sequence: token -> how often it is in the output, for the tokens seen so far."""
    penalties = sampling_of(batch, *seq_ids).penalties
    return [] if penalties is None else as_counts(penalties)


def as_counts(penalties: Penalties) -> list[dict[int, int]]:
    """A token may be listed twice; its count is the same in both places."""
    result = []
    rows = zip(penalties.token_ids.tolist(), penalties.output_counts.tolist(), strict=True)
    for token_ids, counts in rows:
        pairs = set(zip(token_ids, counts, strict=True))
        assert len(dict(pairs)) == len(pairs)
        result.append(dict(pairs))
    return result


def recount(prompt: list[int], output: list[int]) -> dict[int, int]:
    return {token: output.count(token) for token in prompt + output}


def assert_same_batch(made: SamplingBatch, expected: SamplingBatch) -> None:
    """Field by field, number by number."""
    for name, value in vars(expected).items():
        other = getattr(made, name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other)
        elif isinstance(value, Penalties):
            assert as_counts(other) == as_counts(value)
            names = ("logits_rows", "repetition", "frequency", "presence")
            assert all(torch.equal(getattr(other, n), getattr(value, n)) for n in names)
        elif name in ("mask", "edits") and value is not None:
            assert all(torch.equal(*pair) for pair in zip(value, other, strict=True))
        else:
            assert value == other


# -- tokens and blocks --


def test_a_full_row_takes_no_more() -> None:
    """The last token of a sequence of max_model_len is never a model input."""
    batch = make_batch(max_num_seqs=1, max_model_len=3)
    batch.add(new(0, [5, 6]))
    append_token(batch, 0, 7)
    append_token(batch, 0, 8)
    assert batch.token_ids[0].tolist() == [5, 6, 7]
    assert batch.num_tokens[0] == 3


def test_blocks_are_written_where_the_scheduler_says() -> None:
    """Behind the end, or, where a shared block was copied, over the last one."""
    batch = make_batch()
    batch.add(new(0, [5] * 9, block_ids=(7, 3)))
    row = batch.row_of[0]
    batch.write_blocks(row, ScheduledSequence(0, 8, 1, 2, [9]))
    assert batch.block_tables[row, :3].tolist() == [7, 3, 9]
    batch.write_blocks(row, ScheduledSequence(0, 9, 1, 2, [4, 8]))
    assert batch.block_tables[row, :4].tolist() == [7, 3, 4, 8]


def test_output_begins_behind_the_prompt() -> None:
    """Also of a sequence that comes with output already: a branch, or back from preemption."""
    batch = make_batch()
    batch.add(new(0, [5, 6, 7, 8], num_prompt_tokens=3))
    append_token(batch, batch.row_of[0], 9)
    assert batch.get_output_token_ids(batch.row_of[0]).tolist() == [8, 9]


# -- counts --

TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=20)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(prompt=TOKENS.filter(bool), output=TOKENS, data=st.data())
def test_counts_equal_a_recount(prompt: list[int], output: list[int], data: st.DataObject) -> None:
    """Also if the sequence is preempted on the way, and comes back with its output; and if the CPU
    learns of each token a step later."""
    batch = make_batch()
    batch.add(new(0, prompt, PENALIZED))
    in_flight: list[tuple[int, int]] = []  # (position, token)
    for i, token_id in enumerate(output):
        if data.draw(st.booleans()):
            batch.remove(0)
            batch.add(new(7, [1, 2, 3], PENALIZED))  # another sequence takes the row
            append_token(batch, batch.row_of[7], 4)
            batch.add(new(0, prompt + output[:i], PENALIZED, len(prompt)))
            batch.remove(7)
            in_flight = []
        row = batch.row_of[0]
        in_flight.append((sample_token(batch, row, token_id), token_id))
        for position, known in in_flight[: -1 if data.draw(st.booleans()) else None]:
            batch.fill_placeholder(row, position, known)
        in_flight = in_flight[-1:]
    for _ in range(2):  # a batch that is made twice counts nothing twice
        assert counts_of(batch, 0) == [recount(prompt, output)]


def test_counts_of_rows_of_different_lengths() -> None:
    """Beside a row without penalties, and a row that is about to fork: each branch has the counts
    of the whole."""
    batch = make_batch()
    outputs: dict[int, list[int]] = {0: [7, 8, 7], 1: [], 2: [9]}
    for seq_id in outputs:
        batch.add(new(seq_id, [5] * seq_id + [6], None if seq_id == 2 else PENALIZED))
    for seq_id, output in outputs.items():
        for token_id in output:
            append_token(batch, batch.row_of[seq_id], token_id)
    rows = np.array([batch.row_of[seq_id] for seq_id in (2, 1, 1, 0)])
    penalties = batch.make_sampling_batch(rows, np.array([0, 0, 1, 0])).penalties
    assert penalties is not None
    assert penalties.logits_rows.tolist() == [1, 2, 3]
    assert as_counts(penalties) == [{5: 0, 6: 0}, {5: 0, 6: 0}, {6: 0, 7: 2, 8: 1}]


def test_counting_takes_memory_when_a_penalty_comes_and_no_more() -> None:
    """One row for each sequence that can run, whatever comes and goes."""
    batch = make_batch()
    batch.add(new(0, [5]))
    append_token(batch, 0, 6)
    assert batch.seen_tokens.token_ids is None
    for seq_id in range(1, 40):
        batch.add(new(seq_id, [5, seq_id % 9], PENALIZED))
        assert counts_of(batch, seq_id) == [{5: 0, seq_id % 9: 0}]
        tensors = (batch.seen_tokens.token_ids, batch.seen_tokens.output_counts)
        assert [tuple(t.shape) for t in tensors if t is not None] == [(4, 64), (4, VOCAB_SIZE)]
        batch.remove(seq_id)


# -- edits of single logits --


def forbidden_by_brute_force(output: list[int], words: list[list[int]]) -> set[int]:
    """Every token with which some word would stand at the end of the output."""
    return {
        token
        for token in range(VOCAB_SIZE)
        for word in words
        if [*output, token][-len(word) :] == word
    }


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    output=st.lists(st.integers(2, 4), max_size=8),
    words=st.lists(st.lists(st.integers(2, 4), min_size=1, max_size=4), max_size=4),
    min_tokens=st.integers(0, 10),
)
def test_forbidden_tokens_as_by_brute_force(
    output: list[int], words: list[list[int]], min_tokens: int
) -> None:
    """The last tokens of words whose other tokens end the output, not the prompt, as in vLLM; and
    stop tokens before min_tokens."""
    sequence = new(
        0,
        [2, 3, *output],
        SamplingParams(min_tokens=min_tokens, max_tokens=20, bad_words=["x"] * bool(words)),
        num_prompt_tokens=2,
        stop_token_ids=frozenset({1, 9}),
        bad_word_ids=tuple(map(tuple, words)),
    )
    expected = forbidden_by_brute_force(output, words)
    if len(output) < min_tokens:
        expected |= {1, 9}
    batch = make_batch()
    batch.add(sequence)
    edits = set(edits_of(batch, 0))
    assert edits == {(0, token_id, -math.inf) for token_id in expected}


def test_min_tokens_counts_tokens_in_flight() -> None:
    """With min_tokens=2, the third token may be the end, whatever the first two are."""
    batch = make_batch()
    batch.add(new(0, [5, 6], SamplingParams(min_tokens=2)))
    for edits in ([(0, 1, -math.inf)], [(0, 1, -math.inf)], []):
        assert edits_of(batch, 0) == edits
        batch.append_placeholders(np.array([batch.row_of[0]]))


# -- a sampling batch --


def test_constraints_name_rows_of_the_logits() -> None:
    """Which are the samples in their order, not the rows of the InputBatch."""
    batch = make_batch()
    batch.add(new(0, [5], SamplingParams(logit_bias={3: 1.5, 4: -2.0})))
    batch.add(new(1, [5]))
    batch.add(new(2, [5, 6], SamplingParams(allowed_token_ids=[8, 9], presence_penalty=0.3)))
    batch.add(new(3, [7], SamplingParams(logits_processors=[keep], repetition_penalty=1.5)))
    append_token(batch, batch.row_of[3], 11)
    made = sampling_of(batch, 3, 1, 0, 2)
    assert made.mask is not None
    assert made.mask.logits_rows.tolist() == [3]
    assert (made.mask.values == 0).nonzero().tolist() == [[0, 8], [0, 9]]
    assert edits_of(batch, 3, 1, 0, 2) == [(2, 3, 1.5), (2, 4, -2.0)]
    [processors] = made.processors
    assert (processors.logits_row, processors.prompt_token_ids) == (0, [7])
    assert processors.output_token_ids == [11]
    assert made.penalties is not None
    assert made.penalties.logits_rows.tolist() == [0, 3]
    assert made.penalties.repetition.tolist() == [1.5, 1.0]
    assert made.penalties.presence.tolist() == pytest.approx([0.0, 0.3])


def test_a_feature_that_no_row_uses_is_not_there() -> None:
    """A batch of greedy rows has nothing that a random draw needs."""
    batch = make_batch()
    batch.add(new(0, [5], SamplingParams(temperature=0.5, top_k=3)))
    batch.add(new(1, [5], SamplingParams(temperature=0, logprobs=3)))
    assert batch.logit_states == {}
    assert_same_batch(sampling_of(batch, 1), SamplingBatch(num_logprobs=(3,), is_greedy=True))
    made = sampling_of(batch, 0, 1)
    assert not made.is_greedy
    assert made.num_logprobs == (None, 3)
    assert made.temperature is not None and len(made.temperature) == 2
    assert made.uniform is not None and made.top_k is not None
    for name in ("top_p", "min_p", "mask", "edits", "penalties"):
        assert getattr(made, name) is None
    assert made.processors == ()


def test_branches_draw_from_streams_of_their_own() -> None:
    """A row about to fork samples once for each branch; afterwards it is one branch."""
    batch = make_batch()
    batch.add(new(0, [5, 6, 7], seed=9, num_samples=3))
    batch.add(new(1, [5, 6, 7, 8], num_prompt_tokens=3, seed=9, branch=2))
    row = batch.row_of[0]
    assert batch.num_samples[row] == 3
    made = batch.make_sampling_batch(np.array([row] * 3), np.arange(3))
    expected = uniform_noise(np.full(3, 9), np.arange(3), np.full(3, 3))
    assert made.uniform.tolist() == expected.tolist()
    append_token(batch, row, 8)
    assert batch.num_samples[row] == 1
    expected = uniform_noise(np.array([9, 9]), np.array([0, 2]), np.array([4, 4]))
    assert sampling_of(batch, 0, 1).uniform.tolist() == expected.tolist()


# -- rows come and go --


def everything_on() -> SamplingParams:
    return SamplingParams(
        temperature=2.0,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        presence_penalty=1.0,
        min_tokens=5,
        logit_bias={3: 1.0},
        allowed_token_ids=[3, 4],
        logits_processors=[keep],
        logprobs=2,
        prompt_logprobs=1,
        seed=1,
    )


def test_a_reused_row_leaves_nothing_behind() -> None:
    batch = make_batch(max_num_seqs=1)
    batch.add(new(0, [9] * 20, everything_on(), bad_word_ids=((2,),), branch=3, num_samples=4))
    assert list(batch.logit_states) == [0]
    batch.remove(0)
    batch.remove(0)  # twice, or of an unknown one, does nothing
    assert batch.free_rows == [0]
    batch.free_rows.pop()  # a signal came before the row was noted
    batch.clear()
    assert batch.free_rows == [0]
    batch.add(new(1, [5, 6], SamplingParams(temperature=0)))
    fresh = make_batch(max_num_seqs=1)
    fresh.add(new(1, [5, 6], SamplingParams(temperature=0)))
    assert_same_batch(sampling_of(batch, 1), sampling_of(fresh, 1))
    assert batch.logit_states == batch.num_prompt_logprobs == {}
    assert batch.num_samples[0] == 1
    assert batch.get_output_token_ids(0).tolist() == []


@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6))
def test_any_coming_and_going_equals_a_fresh_batch(seed: int) -> None:
    """After random arrivals, tokens, departures and returns, each sequence's part of a sampling
    batch is that of an InputBatch of its own."""
    chance = random.Random(seed)
    batch = make_batch()
    known: dict[int, NewSequence] = {}
    for number in range(40):
        verb = chance.choice(["add", "token", "token", "remove", "return"])
        if verb == "add" and batch.free_rows:
            words = ((chance.randrange(4), chance.randrange(4)),) * chance.randrange(2)
            params = SamplingParams(
                temperature=chance.choice([0.0, 0.5]),
                bad_words=["x"] * bool(words),
                frequency_penalty=chance.choice([0.0, 0.2]),
                repetition_penalty=chance.choice([1.0, 1.2]),
                min_tokens=chance.choice([0, 4]),
                logit_bias=chance.choice([None, {3: 1.0}]),
                allowed_token_ids=chance.choice([None, [3, 4, 5]]),
            )
            prompt = [chance.randrange(VOCAB_SIZE) for _ in range(chance.randrange(1, 9))]
            known[number] = new(number, prompt, params, bad_word_ids=words)
            batch.add(known[number])
        elif known:
            seq_id = chance.choice(list(known))
            if verb == "token":
                token_id = chance.randrange(4)
                append_token(batch, batch.row_of[seq_id], token_id)
                said = (*known[seq_id].token_ids, token_id)
                known[seq_id] = known[seq_id]._replace(token_ids=said)
            else:
                batch.remove(seq_id)
                if verb == "return":
                    batch.add(known[seq_id])
                else:
                    del known[seq_id]
    assert set(batch.row_of) == set(known)
    assert set(batch.logit_states) <= set(batch.row_of.values())
    assert len(batch.free_rows) + len(known) == 4
    for seq_id, sequence in known.items():
        fresh = make_batch()
        fresh.add(sequence)
        assert_same_batch(sampling_of(batch, seq_id), sampling_of(fresh, seq_id))


# -- tokens that only the device knows --


def test_a_placeholder_counts_and_is_filled_later() -> None:
    """The token of one sequence is known before its next step, that of another after."""
    batch = make_batch()
    for seq_id in (0, 1):
        batch.add(new(seq_id, [5, 6, 7], PENALIZED if seq_id else None, num_prompt_tokens=2))
    rows = np.array([batch.row_of[seq_id] for seq_id in (0, 1)])
    batch.num_samples[rows] = 3
    assert batch.append_placeholders(rows).tolist() == [3, 3]
    assert batch.num_tokens[rows].tolist() == [4, 4]
    assert batch.num_samples[rows].tolist() == [1, 1]  # branches fork once
    assert batch.token_ids[rows, 3].tolist() == [PLACEHOLDER] * 2
    assert batch.append_placeholders(rows[:1]).tolist() == [4]
    batch.fill_placeholder(rows[0], 3, 20)
    batch.fill_placeholder(rows[1], 3, 21)
    assert batch.token_ids[rows[0], :5].tolist() == [5, 6, 7, 20, PLACEHOLDER]
    assert batch.get_output_token_ids(rows[1]).tolist() == [7, 21]


def test_noise_of_a_token_in_flight_is_that_of_its_position() -> None:
    """A placeholder is a position like any other, for the random stream."""
    known, in_flight = make_batch(), make_batch()
    for batch in (known, in_flight):
        batch.add(new(0, [5, 6]))
    append_token(known, known.row_of[0], 9)
    in_flight.append_placeholders(np.array([in_flight.row_of[0]]))
    assert sampling_of(known, 0).uniform.tolist() == sampling_of(in_flight, 0).uniform.tolist()
