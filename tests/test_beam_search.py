"""Which continuations are likeliest as a whole: a loop that knows only the rule says the same.

The fake model (fakes.py) has a vocabulary of a few tokens here, and reads its log-probabilities out
of its KV cache: a beam on wrong blocks ranks wrongly.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from fakes import FakeEngine, next_logprobs, num_tokens_of, reference_output
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nanoserve.extras.beam_search import BeamSearch, BeamSearchParams, BeamSearchSequence
from nanoserve.sequence import SchedulerOutput, Sequence, SequenceStatus

VOCAB_SIZE = 11
EOS = frozenset({3})


def naive_beam_search(
    prompt: list[int],
    params: BeamSearchParams,
    max_tokens: int,
    eos_token_ids: frozenset[int] = EOS,
    vocab_size: int = VOCAB_SIZE,
) -> list[tuple[list[int], float, str]]:
    """vLLM's rule, word for word, with no sequences, blocks or cache: (tokens, cumulative
    log-probability, finish reason), best first.

    Each step every beam proposes its 2 * beam_width likeliest tokens. Proposals of EOS complete a
    text; of the others the beam_width best go on. At the end all are ranked together.
    """
    eos = frozenset() if params.ignore_eos else eos_token_ids

    def score(beam: tuple[list[int], float, str]) -> float:
        tokens, cum_logprob, _ = beam
        length = len(tokens) - (tokens[-1] in eos)
        return cum_logprob / length**params.length_penalty

    beams, completed = [(prompt, 0.0, "length")], []
    for _ in range(max_tokens):
        new_beams = []
        for tokens, cum_logprob, _ in beams:
            logprobs = next_logprobs(tokens, vocab_size=vocab_size)
            likeliest = sorted(range(vocab_size), key=lambda token: -logprobs[token])
            for token in likeliest[: 2 * params.beam_width]:
                reason = "stop" if token in eos else "length"
                beam = ([*tokens, token], cum_logprob + logprobs[token], reason)
                (completed if token in eos else new_beams).append(beam)
        beams = sorted(new_beams, key=score, reverse=True)[: params.beam_width]
    return sorted(completed + beams, key=score, reverse=True)[: params.beam_width]


class Searches:
    """Beam searches, and ordinary requests beside them, on one FakeEngine: what LLMEngine does."""

    def __init__(self, **options: Any) -> None:
        self.engine = FakeEngine(**{"vocab_size": VOCAB_SIZE, **options})
        self.running: dict[str, BeamSearch] = {}  # by request id
        self.done: list[BeamSearch] = []
        self.num_running_at_most = 0

    def add(self, prompt: list[int], params: BeamSearchParams) -> BeamSearch:
        engine = self.engine
        root = engine.add(
            prompt,
            params.max_tokens,
            sampling_params=params.sampling_params(engine.executor.vocab_size),
        )
        search = BeamSearch(root, params, engine.scheduler, engine.next_seq_id, EOS)
        self.running[root.request_id] = search
        return search

    def step(self, fail: bool = False) -> SchedulerOutput:
        """One step, and the next beams of the searches that have news."""
        engine = self.engine
        output = engine.scheduler.schedule()
        engine.block_manager.check()
        assert not output.is_empty, "unfinished work, and nothing scheduled"
        self.num_running_at_most = max(self.num_running_at_most, len(output.scheduled))
        engine.executor.fail_next_step = fail
        with_news = {}
        for update in engine.execute(output):
            search = self.running.get(update.sequence.request_id)
            if search:
                search.take(update)
                with_news[update.sequence.request_id] = search
        for request_id, search in with_news.items():
            if search.end_step():
                self.done.append(self.running.pop(request_id))
            engine.block_manager.check()
        for seq in engine.scheduler.waiting:
            assert (seq.status, seq.num_computed_tokens) == (SequenceStatus.WAITING, 0)
        return output

    def run(self) -> list[SchedulerOutput]:
        steps = []
        while self.engine.scheduler.has_unfinished():
            steps.append(self.step())
            assert len(steps) < 3000, "no end in sight"
        assert not self.running
        for pool in (self.engine.block_manager.pool, self.engine.block_manager.cpu_pool):
            assert pool.ref_counts == [0] * pool.num_blocks
        return steps


def found(search: BeamSearch) -> list[tuple[list[int], float, str | None]]:
    return [(b.tokens, b.cum_logprob, b.finish_reason) for b in search.get_output().sequences]


# -- what may be asked for --

BAD_VALUES: list[tuple[str, Any, str]] = [
    ("beam_width", 0, "1 or more"),
    ("beam_width", -2, "1 or more"),
    ("beam_width", 2.0, "ints of 1 or more"),
    ("beam_width", True, "ints of 1 or more"),
    ("beam_width", None, "ints of 1 or more"),
    ("max_tokens", 0, "1 or more"),
    ("max_tokens", "8", "ints of 1 or more"),
    ("max_tokens", None, "ints of 1 or more"),
    ("length_penalty", math.nan, "-10 to 10"),
    ("length_penalty", math.inf, "-10 to 10"),
    ("length_penalty", -10.5, "-10 to 10"),
    ("length_penalty", True, "-10 to 10"),
    ("length_penalty", "1", "-10 to 10"),
    ("ignore_eos", 1, "True or False"),
    ("ignore_eos", None, "True or False"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_VALUES)
def test_bad_values_are_refused(name: str, value: Any, allowed: str) -> None:
    """With a message that names the field, what was given, and what is allowed."""
    with pytest.raises(ValueError, match=name) as raised:
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, name: value})
    assert repr(value) in str(raised.value)
    assert allowed in str(raised.value)


def test_a_misspelt_name_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="num_beams"):
        BeamSearchParams(num_beams=2, max_tokens=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(("beam_width", "num_proposals"), [(1, 2), (4, 8), (6, 11), (99, 11)])
def test_each_beam_proposes_twice_the_width(beam_width: int, num_proposals: int) -> None:
    """So that beam_width are left even if every beam's best is an EOS; no more than there are."""
    params = BeamSearchParams(beam_width, max_tokens=5).sampling_params(VOCAB_SIZE)
    assert (params.logprobs, params.temperature, params.ignore_eos) == (num_proposals, 0, True)


@pytest.mark.parametrize("length_penalty", [-10, 10])
def test_the_extreme_penalties_work_at_any_length(length_penalty: float) -> None:
    """No overflow, no division by a number that was rounded to zero."""
    engine = FakeEngine()
    search = BeamSearch(
        engine.add([1]),
        BeamSearchParams(1, 1, length_penalty=length_penalty),
        engine.scheduler,
        engine.next_seq_id,
        EOS,
    )
    assert search.score(BeamSearchSequence([1] * 1_000_000, -5.0)) < 0


def test_the_score_counts_the_prompt_but_not_the_eos() -> None:
    """cumulative log-probability / length ** length_penalty."""
    searches = Searches()
    search = searches.add([1, 2], BeamSearchParams(2, 4, length_penalty=2.0))
    assert search.score(BeamSearchSequence([1, 2, 5, 6], -8.0)) == -8.0 / 4**2
    assert search.score(BeamSearchSequence([1, 2, 5, 3], -8.0)) == -8.0 / 3**2
    ignoring = searches.add([1, 2], BeamSearchParams(2, 4, ignore_eos=True))
    assert ignoring.score(BeamSearchSequence([1, 2, 5, 3], -8.0)) == -8.0 / 4


# -- the naive loop agrees --


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("beam_width", [1, 2, 4])
def test_it_finds_what_the_naive_loop_finds(
    beam_width: int, ignore_eos: bool, length_penalty: float
) -> None:
    """Same texts, same log-probabilities, same order."""
    params = BeamSearchParams(beam_width, 7, ignore_eos, length_penalty)
    searches = Searches()
    prompts = [[5, 6, 7, 8, 9], [1], [2, 2, 2, 2]]
    running = [searches.add(prompt, params) for prompt in prompts]
    searches.run()
    for search, prompt in zip(running, prompts, strict=True):
        assert found(search) == naive_beam_search(prompt, params, 7)
        assert len(found(search)) == beam_width


def test_a_beam_of_one_that_ignores_eos_is_greedy() -> None:
    searches = Searches()
    search = searches.add([1, 2, 3], BeamSearchParams(1, 6, ignore_eos=True))
    greedy = searches.engine.add([1, 2, 3], 6)
    searches.run()
    [(tokens, _, reason)] = found(search)
    assert (tokens[3:], reason) == (greedy.output_token_ids, "length")


def test_the_room_that_is_left_ends_the_search() -> None:
    """max_tokens is capped by what fits."""
    searches = Searches(max_model_len=8)
    params = BeamSearchParams(2, 100)
    search = searches.add([1, 2, 3], params)
    searches.run()
    assert found(search) == naive_beam_search([1, 2, 3], params, 5)


def test_nothing_but_eos_ends_the_search() -> None:
    """A vocabulary of which every token completes a beam."""
    engine = FakeEngine(vocab_size=2)
    params = BeamSearchParams(3, 5)
    root = engine.add([0], 5, sampling_params=params.sampling_params(2))
    search = BeamSearch(root, params, engine.scheduler, engine.next_seq_id, frozenset({0, 1}))
    [update] = engine.execute(engine.scheduler.schedule())
    search.take(update)
    assert search.end_step()
    assert [reason for _, _, reason in found(search)] == ["stop", "stop"]
    assert not engine.scheduler.has_unfinished()
    assert engine.block_manager.num_free_blocks == 64


# -- on few blocks, on few places, among others --


def test_beams_share_what_they_have_in_common() -> None:
    """The prompt is computed once and held once: its full blocks are never copied."""
    searches = Searches(block_size=4)
    searches.add([1] * 10, BeamSearchParams(4, 3, ignore_eos=True))
    first, second, *_ = searches.run()
    assert first.total_num_scheduled_tokens == 10
    assert [item.num_scheduled_tokens for item in second.scheduled] == [1, 1, 1, 1]
    assert len(second.blocks_to_copy) == 3
    tables = [new.block_ids for new in second.new_sequences]
    assert len(set(tables)) == 1


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_beams_change_nothing(enable_prefix_caching: bool, preemption_mode: str) -> None:
    """Blocks for hardly more than one beam: they take turns."""
    searches = Searches(
        num_blocks=6,
        block_size=2,
        enable_prefix_caching=enable_prefix_caching,
        preemption_mode=preemption_mode,
    )
    params = BeamSearchParams(4, 7, ignore_eos=True)
    search = searches.add([1, 2, 3, 4, 5], params)
    num_preempted = num_swapped = 0
    while searches.engine.scheduler.has_unfinished():
        running = list(searches.engine.scheduler.running)
        output = searches.step()
        num_swapped += bool(output.blocks_to_swap_in)
        num_preempted += any(seq.seq_id not in num_tokens_of(output) for seq in running)
    assert num_preempted
    assert bool(num_swapped) == (preemption_mode == "swap")
    searches.run()
    assert found(search) == naive_beam_search([1, 2, 3, 4, 5], params, 7)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_fewer_places_than_beams(max_num_seqs: int) -> None:
    """Beams that find no place wait, and those that have proposed make room for them."""
    searches = Searches(max_num_seqs=max_num_seqs)
    params = BeamSearchParams(5, 6)
    search = searches.add([1, 2, 3, 4, 5], params)
    searches.run()
    assert searches.num_running_at_most == max_num_seqs
    assert found(search) == naive_beam_search([1, 2, 3, 4, 5], params, 6)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_a_search_that_is_stopped_gives_all_back(num_steps: int) -> None:
    """Before its first step, or with beams in flight, or waiting for each other."""
    searches = Searches(num_blocks=6, block_size=2)
    search = searches.add([1, 2, 3, 4, 5], BeamSearchParams(4, 7, ignore_eos=True))
    for _ in range(num_steps):
        searches.step()
    search.stop()
    searches.engine.block_manager.check()
    assert not searches.engine.scheduler.has_unfinished()
    assert searches.engine.block_manager.num_free_blocks == 6


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_same_beams_whatever_is_around(data: st.DataObject) -> None:
    """Several searches and ordinary requests, on engines from cramped to roomy, with steps that
    fail: each finds what the naive loop finds, and every block comes home."""
    draw = data.draw
    max_num_seqs = draw(st.integers(1, 6))
    searches = Searches(
        max_model_len=24,
        num_blocks=draw(st.sampled_from([3, 5, 6, 8, 10, 64])),
        block_size=draw(st.sampled_from([1, 2, 2, 4])),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 3, 30])),
        enable_prefix_caching=draw(st.booleans()),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
        num_cpu_blocks=draw(st.sampled_from([0, 1, 3, 20])),
    )
    expected: list[tuple[BeamSearch, list[int], BeamSearchParams]] = []
    others: list[Sequence] = []
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        prompt = prompt[: searches.engine.capacity - 1]
        if draw(st.booleans()) and expected:
            others.append(searches.engine.add(prompt, 5, n=draw(st.integers(1, max_num_seqs))))
            continue
        params = BeamSearchParams(
            draw(st.integers(1, 5)),
            draw(st.integers(1, 8)),
            draw(st.booleans()),
            draw(st.sampled_from([0, 1, 0.5, -2])),
        )
        expected.append((searches.add(prompt, params), prompt, params))
    steps = []
    for fails in draw(st.lists(st.booleans(), max_size=8)):
        if searches.engine.scheduler.has_unfinished():
            steps.append(searches.step(fail=fails))
    steps += searches.run()
    if any(step.blocks_to_swap_in for step in steps):
        event("swap")
    if any(step.blocks_to_copy for step in steps):
        event("copy on write")
    for search, prompt, params in expected:
        assert found(search) == naive_beam_search(prompt, params, search.max_tokens)
    for seq in others:
        prompt = seq.prompt_token_ids
        reference = reference_output(prompt, seq.max_tokens, vocab_size=VOCAB_SIZE)
        assert seq.output_token_ids == reference
