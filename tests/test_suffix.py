"""Suffix decoding: the counts of the automaton against a search through all substrings.

Texts are short and of few tokens, so that they repeat themselves. Engines are at the end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_speculative import SETTINGS, assert_same_outputs, generate, plain_outputs

from nanoserve import LLM, RequestOutput, SamplingParams
from nanoserve.extras.speculative.suffix import Draft, OutputCache, Request, SuffixAutomaton, Text

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=3)


def grow(texts: Sequence[Sequence[int]], max_depth: int) -> tuple[SuffixAutomaton, Text]:
    """An automaton of these texts, and the end of the last one."""
    automaton = SuffixAutomaton(max_depth)
    for token_ids in texts:
        text = Text()
        for token in token_ids:
            automaton.append(text, token)
    return automaton, text


def find_followers(texts: Sequence[Sequence[int]], context: Sequence[int]) -> list[int]:
    """The tokens behind all occurrences of `context`, the latest one last."""
    length = len(context)
    return [
        text[start + length]
        for text in texts
        for start in range(len(text) - length)
        if list(text[start : start + length]) == list(context)
    ]


def search(
    texts: Sequence[Sequence[int]], last: Sequence[int], limits: Sequence[int], min_prob: float
) -> Draft:
    """The definition: each context, from the longest to the shortest, and all occurrences of it."""
    best = Draft()
    for length in range(min(len(limits) - 1, len(last)), 0, -1):
        context, prob, score = list(last[-length:]), 1.0, 0.0
        while len(context) < length + limits[length]:
            followers = find_followers(texts, context)
            if not followers:
                break
            token, count = Counter(followers[::-1]).most_common(1)[0]  # of equals the latest
            prob *= count / len(followers)
            if prob < min_prob:
                break
            score += prob
            context.append(token)
        if score > best.score:
            best = Draft(tuple(context[length:]), score)
    return best


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    TEXTS,
    st.integers(1, 8),
    st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    st.lists(st.integers(0, 3), max_size=8),
)
def test_drafts_are_those_of_a_search(
    texts: list[list[int]], max_depth: int, factor: float, min_prob: float, other: list[int]
) -> None:
    """Behind the end of the last text, and behind any other tokens."""
    limits = [min(int(factor * m), max_depth - m) for m in range(max_depth + 1)]
    automaton, text = grow(texts, max_depth)
    here = automaton.speculate(automaton.find(text), text.num_tokens, limits, min_prob)
    there = automaton.speculate(*automaton.match(other[-max_depth:]), limits, min_prob)
    for found, last in ((here, texts[-1]), (there, other)):
        expected = search(texts, last, limits, min_prob)
        assert found.token_ids == expected.token_ids
        assert found.score == pytest.approx(expected.score)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=2, max_size=3))
def test_texts_may_grow_in_turns(texts: list[list[int]]) -> None:
    """Requests run side by side. (Which of two equally frequent tokens came last is another.)"""
    automaton, ends = SuffixAutomaton(4), [Text() for _ in texts]
    for position in range(9):
        for token_ids, end in zip(texts, ends, strict=True):
            if position < len(token_ids):
                automaton.append(end, token_ids[position])
    for token_ids, end in zip(texts, ends, strict=True):
        assert automaton.match(token_ids[-4:]) == (automaton.find(end), end.num_tokens)
        for start, length in itertools.product(range(len(token_ids)), range(1, 4)):
            context = token_ids[start : start + length]
            state, num_matched = automaton.match(context)
            followers = find_followers(texts, context)
            most = max(map(followers.count, followers), default=0)
            assert num_matched == len(context)
            assert automaton.num_followed[state] == len(followers)
            assert followers.count(automaton.next_token[state]) == most


@settings(max_examples=60, deadline=None, derandomize=True)
@given(TEXTS)
def test_memory_grows_with_the_text_and_not_with_the_depth(texts: list[list[int]]) -> None:
    automaton, _ = grow(texts, 24)
    assert len(automaton.length) <= 1 + 2 * sum(map(len, texts))


def test_the_example_of_the_docstring() -> None:
    text = "abcdxabcdyabcebc"
    automaton, end = grow([[ord(letter) for letter in text]], 24)

    def draft(limits: list[int]) -> tuple[str, float]:
        found = automaton.speculate(automaton.find(end), end.num_tokens, [*limits, *[0] * 22], 0.1)
        return "".join(map(chr, found.token_ids)), round(found.score, 2)

    assert draft([0, 1]) == ("d", 0.67)
    assert draft([0, 1, 2]) == ("dy", 1.0)


def test_the_oldest_outputs_are_dropped() -> None:
    """Never more than max_requests, and at least half of them, the latest ones."""
    for max_requests in range(8):
        cache = OutputCache(max_requests, 4)
        for number in range(20):
            outputs = cache.add_request(None)
            if outputs is None:
                break
            outputs.append(Text(), number)
            kept = [
                token for part in cache.get(None) for token in range(20) if part.match([token])[1]
            ]
            assert len(kept) <= max_requests
            latest = range(number + 1)[-max(1, max_requests // 2) :]
            assert set(kept) >= set(latest)
        assert (outputs is None) == (max_requests == 0)
        assert len(cache.get(None)) == min(2, max_requests)


def test_outputs_of_another_salt_are_not_found() -> None:
    cache = OutputCache(10, 4)
    end = Text()
    outputs = cache.add_request("a")
    assert outputs is not None
    for token in (1, 2, 3):
        outputs.append(end, token)
    cache.add_request(None)
    assert [part.match([1, 2])[1] for part in cache.get("a")] == [2]
    assert [part.match([1, 2])[1] for part in cache.get(None)] == [0]
    assert cache.get("b") == []


def test_only_a_request_with_an_output_takes_a_place_in_the_cache() -> None:
    """Beams, say, are many, and draft nothing."""
    cache = OutputCache(2, 4)
    requests = [Request(cache, None, first_output=2) for _ in range(9)]
    requests[0].append([1])
    assert not cache.generations
    requests[0].append([2, 3, 4])
    requests[0].append([5])
    [outputs] = cache.get(None)
    assert (cache.num_newest, outputs.match([2, 3, 4, 5])[1], outputs.match([2])[1]) == (1, 3, 0)


# -- in an engine --


def slow(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.slow)


STORY = "Tell me a story about a fox named Mia."


def ask(llm: LLM, questions: list[str], **options: Any) -> list[RequestOutput]:
    salt = options.pop("cache_salt", None)
    params = SamplingParams(**{"temperature": 0, "max_tokens": 60, "seed": 3, **options})
    messages = [[{"role": "user", "content": question}] for question in questions]
    return llm.chat(messages, params, use_tqdm=False, cache_salt=salt)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(each.token_ids) for output in outputs for each in output.outputs]


def num_accepted(outputs: list[RequestOutput]) -> int:
    return sum(output.metrics.num_accepted_tokens for output in outputs if output.metrics)


def test_an_earlier_answer_is_found_by_requests_with_its_salt(demo_llm: LLM) -> None:
    """The second time nearly all tokens are accepted drafts. Another salt is a first time."""
    expected = tokens_of(ask(demo_llm, [STORY]))
    with LLM(speculative_config={"method": "suffix"}, device="cpu") as llm:
        first, other, second = (ask(llm, [STORY], cache_salt=salt) for salt in ("a", "b", "a"))
        assert tokens_of(first) == tokens_of(other) == tokens_of(second) == expected
        assert num_accepted(first) == num_accepted(other) < 40 < num_accepted(second)
        assert len(llm.engine.executor.runner.proposer.requests) == 1, "who has ended is forgotten"


@pytest.mark.parametrize("name", [slow("roomy"), "recompute", slow("swap")])
def test_the_outputs_of_plain_decoding(name: str) -> None:
    """Sequences that fork or were preempted come back as new ones, and look into the cache."""
    with LLM(**SETTINGS[name], speculative_config={"method": "suffix"}) as llm:
        outputs = generate(llm)
        assert_same_outputs(outputs, plain_outputs())
        assert num_accepted(outputs) > 100
        llm.engine.block_manager.check()


def test_rejection_sampling_of_preempted_and_forked_sequences() -> None:
    """Other tokens than those of plain decoding, and as many."""
    config = {"method": "suffix", "rejection_sample_method": "standard"}
    with LLM(
        speculative_config=config, device="cpu", block_size=4, num_kv_blocks=50, max_model_len=128
    ) as llm:
        outputs = ask(llm, [STORY, "Count from 3 to 20."], n=3, temperature=0.7, ignore_eos=True)
        assert list(map(len, tokens_of(outputs))) == [60] * 6
        assert sum(output.metrics.num_preemptions for output in outputs if output.metrics)
        assert num_accepted(outputs)
        llm.engine.block_manager.check()
