"""Beam search over the fake model, against a loop that knows only the rule.

The fake model (fakes.py) has a vocabulary of a few tokens here, and reads its log-probabilities out
of its KV cache: a beam on wrong blocks gets a wrong rank.
"""

from __future__ import annotations

import math
import re
from typing import Any

import engines
import numpy as np
import pytest
from engines import assert_idle, check, params
from fakes import add_beam_search, next_logprobs, num_tokens_of, reference_output
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nanoserve import LLM, LLMEngine, RequestOutput, SamplingParams
from nanoserve.engine import StepReport
from nanoserve.exceptions import VLLMValidationError
from nanoserve.extras.beam_search import (
    BeamSearch,
    BeamSearchOutput,
    BeamSearchParams,
    BeamSearchSequence,
)
from nanoserve.sequence import SchedulerOutput, SequenceStatus

VOCAB_SIZE = 11
EOS = frozenset({3})


def naive_beam_search(
    prompt: list[int],
    params: BeamSearchParams,
    max_tokens: int,
    seed: int,
) -> list[tuple[list[int], float, str]]:
    """vLLM's rule, with no sequences, blocks or cache: (tokens, cumulative log-probability, finish
    reason), best first.

    Each step every beam has its 2 * beam_width likeliest tokens as candidates. Candidates that end
    in EOS are completed. The beam_width best of the others go on. At the end all are ranked.
    """
    eos = frozenset() if params.ignore_eos else EOS

    def score(beam: tuple[list[int], float, str]) -> float:
        tokens, cum_logprob, _ = beam
        length = len(tokens) - (tokens[-1] in eos)
        return cum_logprob / length**params.length_penalty

    beams, completed = [(prompt, 0.0, "length")], []
    for _ in range(max_tokens):
        new_beams = []
        for tokens, cum_logprob, _ in beams:
            logprobs = next_logprobs(tokens, seed, vocab_size=VOCAB_SIZE)
            likeliest = sorted(range(VOCAB_SIZE), key=lambda token: -logprobs[token])
            for token in likeliest[: 2 * params.beam_width]:
                reason = "stop" if token in eos else "length"
                beam = ([*tokens, token], cum_logprob + logprobs[token], reason)
                (completed if token in eos else new_beams).append(beam)
        beams = sorted(new_beams, key=score, reverse=True)[: params.beam_width]
    return sorted(completed + beams, key=score, reverse=True)[: params.beam_width]


class Searches:
    """Beam searches on one engine, and ordinary requests beside them."""

    def __init__(self, eos_token_ids: tuple[int, ...] = (3,), **options: Any) -> None:
        self.engine: LLMEngine = engines.make_engine(
            vocab_size=VOCAB_SIZE, eos_token_ids=eos_token_ids, **options
        )
        self.engine.step_listeners.append(self.listen)
        self.seeds: dict[str, int] = {}
        self.steps: list[SchedulerOutput] = []

    def listen(self, report: StepReport) -> None:
        self.steps.append(report.scheduler_output)

    def add(self, prompt: list[int], params: BeamSearchParams) -> BeamSearch:
        search = add_beam_search(self.engine, f"beams {len(self.seeds)}", prompt, params)
        self.seeds[search.request_id] = search.sequences[0].seed
        return search

    def step(self, fail: bool = False) -> dict[str, RequestOutput]:
        """One step; the outputs of the ordinary requests. A request that fails twice in one search
        for the cause would be blamed."""
        self.engine.executor.fail_next_step = fail and not self.engine._search.is_on
        outputs = self.engine.step()
        self.engine.executor.fail_next_step = False  # the step may have launched nothing
        check(self.engine)
        for seq in self.engine.scheduler.waiting:
            assert (seq.status, seq.num_computed_tokens) == (SequenceStatus.WAITING, 0)
        return {output.request_id: output for output in outputs}

    def run(self) -> dict[str, RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        for _ in range(3000):
            if not self.engine.has_unfinished_requests():
                break
            outputs |= self.step()
        assert_idle(self.engine)
        return outputs

    def check(self, search: BeamSearch, prompt: list[int], max_tokens: int | None = None) -> None:
        """The same texts, the same log-probabilities, the same order as the naive loop's."""
        max_tokens = search.max_tokens if max_tokens is None else max_tokens
        seed = self.seeds[search.request_id]
        assert found(search) == naive_beam_search(prompt, search.params, max_tokens, seed)


def beam(tokens: list[int], cum_logprob: float) -> BeamSearchSequence:
    return BeamSearchSequence({}, tokens, [], cum_logprob=cum_logprob)


def found(search: BeamSearch) -> list[tuple[list[int], float, str | None]]:
    """(tokens, cumulative log-probability, finish reason). vLLM gives no reason for a beam that
    ended at max_tokens: here it is "length"."""
    beams = search.get_output().sequences
    return [(beam.tokens, beam.cum_logprob, beam.finish_reason or "length") for beam in beams]


# -- parameters --

BAD_VALUES: list[tuple[str, Any, str]] = [
    ("beam_width", 0, "1 or more"),
    ("beam_width", -2, "1 or more"),
    ("beam_width", 2.0, "ints of 1 or more"),
    ("beam_width", True, "ints of 1 or more"),
    ("beam_width", None, "ints of 1 or more"),
    ("beam_width", 16385, "1 to 16384"),
    ("beam_width", 10**30, "1 to 16384"),
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
    ("skip_special_tokens", 0, "True or False"),
    ("include_stop_str_in_output", None, "True or False"),
    ("temperature", -0.5, "0 or more"),
    ("temperature", None, "0 or more"),
    ("structured_outputs", {"regex": "a"}, "no grammar"),
    ("watermarking", True, "no watermarking"),
]


def test_a_misspelt_argument_is_explained() -> None:
    with pytest.raises(TypeError, match=r"argument 'beam_with'\. Did you mean 'beam_width'\?"):
        BeamSearchParams(beam_with=2, max_tokens=4)


@pytest.mark.parametrize(("name", "value", "allowed"), BAD_VALUES)
def test_bad_values_are_refused(name: str, value: Any, allowed: str) -> None:
    """The message names the field, what was given, and what is allowed."""
    assigned = BeamSearchParams(2, 4)
    setattr(assigned, name, value)
    searches = Searches()
    for call in (
        lambda: BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, name: value}),
        lambda: searches.add([1], assigned),
    ):
        with pytest.raises(VLLMValidationError, match=name) as raised:
            call()
        assert repr(value) in str(raised.value)
        assert allowed in str(raised.value)
        assert raised.value.parameter == name


def test_the_width_is_limited_as_in_vllm() -> None:
    """2 * beam_width logprobs, or those of the whole vocabulary, are no more than max_logprobs."""
    for max_logprobs, widest in ((0, 0), (5, 2), (10, 5), (11, 16384), (-1, 16384)):
        searches = Searches(max_logprobs=max_logprobs)
        for width in (1, 2, 3, 5, 6, 16384):
            if width <= widest:
                searches.add([1], BeamSearchParams(width, 4))
                continue
            with pytest.raises(VLLMValidationError, match=f"up to {widest}. .*max_logprobs") as e:
                searches.add([1], BeamSearchParams(width, 4))
            assert (e.value.parameter, e.value.value) == ("beam_width", width)


def test_a_search_that_would_fill_the_memory_is_refused() -> None:
    """The number that the message names does fit."""
    for width, max_tokens, vocab_size in ((2000, 30, 2048), (16384, 1, 50_000), (5, 10**6, 2048)):
        with pytest.raises(VLLMValidationError, match="candidates in memory") as raised:
            BeamSearchParams(width, max_tokens).check_size(-1, vocab_size, max_tokens)
        [fits] = re.findall(r"up to (\d+)", str(raised.value))
        assert 1 <= int(fits) < width
        BeamSearchParams(int(fits), max_tokens).check_size(-1, vocab_size, max_tokens)
    BeamSearchParams(10, 1).check_size(20, 150_000, 80_000)  # vLLM's widest, on a long context


def test_only_the_best_completed_beams_are_kept() -> None:
    """With all tokens but one as EOS, each step completes many."""
    searches = Searches(eos_token_ids=tuple(range(1, VOCAB_SIZE)))
    search = searches.add([1], BeamSearchParams(2, 12))
    while searches.engine.has_unfinished_requests():
        searches.step()
        assert len(search.completed) <= 4
    assert len(search.get_output().sequences) == 2


def test_parameters_and_results_as_in_vllm() -> None:
    """The order of the fields, their defaults; numbers of NumPy."""
    params = BeamSearchParams(np.int64(2), 4, True, 0.5, np.float32(0.5), False, None, False)
    assert params == BeamSearchParams(
        beam_width=2,
        max_tokens=4,
        ignore_eos=True,
        temperature=0.5,
        length_penalty=0.5,
        include_stop_str_in_output=False,
        structured_outputs=None,
        skip_special_tokens=False,
        watermarking=None,
    )
    default = BeamSearchParams(2, 4)
    assert (default.temperature, default.length_penalty, default.skip_special_tokens) == (
        0,
        1,
        True,
    )
    prompt = {"type": "token", "prompt_token_ids": [1]}
    assert BeamSearchSequence(prompt, [1, 2], [{}]) == BeamSearchSequence(
        orig_prompt=prompt,
        tokens=[1, 2],
        logprobs=[{}],
        lora_request=None,
        cum_logprob=0.0,
        text=None,
        finish_reason=None,
        stop_reason=None,
    )


def test_a_beam_has_the_candidates_of_each_step() -> None:
    """With rank and log-probability, as requests have; its prompt may be searched again."""
    searches = Searches()
    prompt: Any = {"prompt_token_ids": [1, 2], "prompt": "text", "cache_salt": "mine"}
    search = searches.add(prompt, BeamSearchParams(2, 3, ignore_eos=True))
    searches.run()
    output = search.get_output()
    assert isinstance(output, BeamSearchOutput)
    for beam in output.sequences:
        assert beam.orig_prompt == {"type": "token", **prompt}
        assert [len(entry) for entry in beam.logprobs] == [4, 4, 4]
        for position, entry in enumerate(beam.logprobs):
            tokens = beam.tokens[: 2 + position]
            logprobs = next_logprobs(tokens, searches.seeds["beams 0"], vocab_size=VOCAB_SIZE)
            assert {token: found.logprob for token, found in entry.items()} == {
                token: logprobs[token] for token in entry
            }
            assert [found.rank for found in entry.values()] == [1, 2, 3, 4]
            assert {found.decoded_token for found in entry.values()} == {None}
    again = searches.add(output.sequences[0].orig_prompt, BeamSearchParams(2, 3, ignore_eos=True))
    assert again.num_prompt_tokens == 2
    searches.run()


def test_a_misspelt_name_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="num_beams"):
        BeamSearchParams(num_beams=2, max_tokens=4)  # type: ignore[call-arg]


def test_other_parameters_are_refused() -> None:
    """By LLM.beam_search, which needs no class of this chapter, and by the chapter itself."""
    params: Any = SamplingParams()
    for call in (
        lambda: LLM.beam_search(None, [], params),  # type: ignore[arg-type]
        lambda: BeamSearch("beams", [1], params, None),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="params must be BeamSearchParams"):
            call()


@pytest.mark.parametrize(("beam_width", "num_candidates"), [(1, 2), (4, 8), (6, 11), (99, 11)])
def test_each_beam_has_twice_the_width_as_candidates(beam_width: int, num_candidates: int) -> None:
    """So beam_width are left even if an EOS is among each beam's best. The vocabulary limits it."""
    params = BeamSearchParams(beam_width, max_tokens=5).sampling_params(VOCAB_SIZE)
    assert (params.logprobs, params.temperature, params.ignore_eos) == (num_candidates, 0, True)


@pytest.mark.parametrize("length_penalty", [-10, 10])
def test_the_extreme_penalties_work_at_any_length(length_penalty: float) -> None:
    """No overflow, no division by a number that was rounded to zero."""
    search = Searches().add([1], BeamSearchParams(1, 1, length_penalty=length_penalty))
    assert search.score(beam([1] * 1_000_000, -5.0)) < 0


def test_the_score_counts_the_prompt_but_not_the_eos() -> None:
    """cumulative log-probability / length ** length_penalty."""
    searches = Searches()
    search = searches.add([1, 2], BeamSearchParams(2, 4, length_penalty=2.0))
    assert search.score(beam([1, 2, 5, 6], -8.0)) == -8.0 / 4**2
    assert search.score(beam([1, 2, 5, 3], -8.0)) == -8.0 / 3**2
    ignoring = searches.add([1, 2], BeamSearchParams(2, 4, ignore_eos=True))
    assert ignoring.score(beam([1, 2, 5, 3], -8.0)) == -8.0 / 4


# -- the naive loop agrees --


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize("beam_width", [1, 2, 4])
def test_it_finds_what_the_naive_loop_finds(
    beam_width: int, ignore_eos: bool, length_penalty: float
) -> None:
    params = BeamSearchParams(beam_width, 7, ignore_eos, length_penalty=length_penalty)
    searches = Searches()
    prompts = [[5, 6, 7, 8, 9], [1], [2, 2, 2, 2]]
    running = [searches.add(prompt, params) for prompt in prompts]
    searches.run()
    for search, prompt in zip(running, prompts, strict=True):
        searches.check(search, prompt, max_tokens=7)
        assert len(found(search)) == beam_width


def test_what_fits_limits_max_tokens() -> None:
    searches = Searches(max_model_len=8)
    search = searches.add([1, 2, 3], BeamSearchParams(2, 100))
    searches.run()
    searches.check(search, [1, 2, 3], max_tokens=5)


def test_a_search_ends_when_all_candidates_end_in_eos() -> None:
    """Every token of this vocabulary completes a beam."""
    searches = Searches(eos_token_ids=tuple(range(VOCAB_SIZE)))
    search = searches.add([0], BeamSearchParams(3, 5))
    searches.step()
    assert [reason for _, _, reason in found(search)] == ["stop"] * 3
    assert_idle(searches.engine)


# -- few blocks, few places, other requests --


def test_beams_share_the_blocks_of_their_common_beginning() -> None:
    """The prompt is computed once and held once: its full blocks are never copied."""
    searches = Searches()
    searches.add([1] * 10, BeamSearchParams(4, 3, ignore_eos=True))
    searches.run()
    first, second, *_ = searches.steps
    assert first.total_num_scheduled_tokens == 10
    assert [item.num_scheduled_tokens for item in second.scheduled] == [1, 1, 1, 1]
    assert len(second.blocks_to_copy) == 3
    tables = [new.block_ids for new in second.new_sequences]
    assert len(set(tables)) == 1


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_beams_change_nothing(enable_prefix_caching: bool, preemption_mode: str) -> None:
    """There are blocks for hardly more than one beam: the beams take turns."""
    searches = Searches(
        num_kv_blocks=6,
        block_size=2,
        enable_prefix_caching=enable_prefix_caching,
        preemption_mode=preemption_mode,
    )
    search = searches.add([1, 2, 3, 4, 5], BeamSearchParams(4, 7, ignore_eos=True))
    num_preempted = 0
    while searches.engine.has_unfinished_requests():
        running = [seq.seq_id for seq in searches.engine.scheduler.running]
        searches.step()
        num_preempted += not set(running) <= num_tokens_of(searches.steps[-1]).keys()
    assert num_preempted
    has_swapped = any(step.blocks_to_swap_in for step in searches.steps)
    assert has_swapped == (preemption_mode == "swap")
    searches.check(search, [1, 2, 3, 4, 5], max_tokens=7)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_fewer_places_than_beams(max_num_seqs: int) -> None:
    """Beams that find no place wait. The beams that have their candidates make room for them."""
    searches = Searches(max_num_seqs=max_num_seqs)
    search = searches.add([1, 2, 3, 4, 5], BeamSearchParams(5, 6))
    searches.run()
    assert max(len(step.scheduled) for step in searches.steps) == max_num_seqs
    searches.check(search, [1, 2, 3, 4, 5], max_tokens=6)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
def test_an_aborted_search_frees_all_blocks(num_steps: int) -> None:
    """Before its first step, while its beams run, or while they wait for each other."""
    searches = Searches(num_kv_blocks=6, block_size=2)
    search = searches.add([1, 2, 3, 4, 5], BeamSearchParams(4, 7, ignore_eos=True))
    for _ in range(num_steps):
        searches.step()
    assert searches.engine.abort_request(search.request_id)
    searches.engine.block_manager.check()
    assert_idle(searches.engine)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_the_same_beams_whatever_is_around(data: st.DataObject) -> None:
    """Several searches and ordinary requests, few blocks or many, steps that fail: each search
    finds what the naive loop finds, and all blocks are free at the end."""
    draw = data.draw
    max_num_seqs = draw(st.integers(1, 6))
    block_size = draw(st.sampled_from([1, 2, 2, 4]))
    num_kv_blocks = draw(st.sampled_from([3, 5, 6, 8, 10, 64]))
    searches = Searches(
        max_model_len=24,
        num_kv_blocks=num_kv_blocks,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.sampled_from([0, 3, 30])),
        enable_prefix_caching=draw(st.booleans()),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
        num_cpu_blocks=draw(st.sampled_from([1, 3, 20])),
        async_scheduling=draw(st.booleans()),
    )
    room = min(24, num_kv_blocks * block_size)
    running: list[tuple[BeamSearch, list[int]]] = []
    others: dict[str, tuple[list[int], int]] = {}  # name -> prompt, n
    outputs = {}
    for _ in range(draw(st.integers(1, 3))):
        prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))[: room - 1]
        if draw(st.booleans()) and running:
            name, n = f"other {len(others)}", draw(st.integers(1, max_num_seqs + 2))
            others[name] = (prompt, n)
            searches.engine.add_request(name, prompt, params(n=n, max_tokens=5))
            continue
        beam_params = BeamSearchParams(
            draw(st.integers(1, 5)),
            draw(st.integers(1, 8)),
            draw(st.booleans()),
            length_penalty=draw(st.sampled_from([0, 1, 0.5, -2])),
        )
        running.append((searches.add(prompt, beam_params), prompt))
    for fails in draw(st.lists(st.booleans(), max_size=8)):
        if searches.engine.has_unfinished_requests():
            outputs |= searches.step(fail=fails)
    outputs |= searches.run()
    if any(step.blocks_to_swap_in for step in searches.steps):
        event("swap")
    if any(step.blocks_to_copy for step in searches.steps):
        event("copy on write")
    for search, prompt in running:
        searches.check(search, prompt)
    for name, (prompt, n) in others.items():
        max_tokens = min(5, room - len(prompt))
        assert [completion.token_ids for completion in outputs[name].outputs] == [
            reference_output(prompt, max_tokens, (), 5, branch, VOCAB_SIZE) for branch in range(n)
        ]
