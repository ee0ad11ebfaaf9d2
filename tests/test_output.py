"""Text: whole characters only, stop strings where they first stand, logprobs under their names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from workload import tokenizer

from nanoserve import RequestOutputKind, SamplingParams
from nanoserve.models.tokenizer import Detokenizer, name_logprobs
from nanoserve.output_processor import Request, find_stop_string
from nanoserve.sequence import (
    RequestMetrics,
    SampledToken,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
    TokenLogprobs,
)

TEXTS = st.text(alphabet="ab é你好🙂‍👩\n", min_size=1, max_size=12)


@settings(max_examples=100)
@given(TEXTS, TEXTS, st.integers(0, 9))
def test_the_pieces_are_the_whole_and_hold_no_half_character(
    prompt: str, text: str, cut: int
) -> None:
    encode, decode = tokenizer().encode, tokenizer().decode
    ids = encode(text, add_special_tokens=False)
    ids = ids[: max(1, len(ids) - cut)]  # may end inside a character
    detokenizer = Detokenizer(tokenizer(), encode(prompt), True)
    pieces = [detokenizer.append(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    whole = "".join(pieces) + detokenizer.flush()
    assert whole.rstrip("\ufffd") == decode(ids).rstrip("\ufffd")
    assert whole.endswith("\ufffd") is decode(ids).endswith("\ufffd")


@settings(max_examples=100)
@given(st.data())
def test_bytes_in_any_order_end_as_text(data: Any) -> None:
    """Whatever a model says, nothing raises and no token is kept back for ever."""
    ids = data.draw(st.lists(st.integers(0, 400), max_size=12))
    detokenizer = Detokenizer(tokenizer(), [5], False)
    text = "".join(map(detokenizer.append, ids)) + detokenizer.flush()
    assert bool(text) == bool(tokenizer().decode(ids))


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3, unique=True)


@settings(max_examples=200)
@given(st.text("ab", max_size=12), st.integers(0, 12), STOPS)
def test_stop_strings_by_brute_force(text: str, num_new: int, stops: list[str]) -> None:
    ends = range(max(1, len(text) - num_new + 1), len(text) + 1)
    matches = ((end, stop) for end in ends for stop in stops if text[:end].endswith(stop))
    first = next(((end - len(stop), stop) for end, stop in matches), None)
    assert find_stop_string(text, stops, num_new) == first


@pytest.mark.parametrize("size", [1, 4])  # tokens of one step
@pytest.mark.parametrize("is_kept", [False, True])
def test_what_may_begin_a_stop_string_is_held_back(is_kept: bool, size: int) -> None:
    ids = tokenizer().encode("the cat sat on the mat", add_special_tokens=False)
    params = SamplingParams(
        stop=["on the"], include_stop_str_in_output=is_kept, output_kind=RequestOutputKind.DELTA
    )
    root = Sequence(0, "a", [5], params, 99, frozenset(), 0, RequestMetrics(0))
    request, ended, texts, tokens = Request(root, tokenizer()), list[Any](), "", list[int]()
    for start in range(0, len(ids), size):
        root.token_ids += ids[start : start + size]
        update = SequenceUpdate(root, [*map(SampledToken, ids[start : start + size])])
        for output in request.process([update], lambda *args: ended.append(args)):
            texts += output.outputs[0].text
            tokens += output.outputs[0].token_ids
            assert "on" not in texts or is_kept
        if ended:
            break
    assert texts == "the cat sat on the"[: None if is_kept else -6]
    assert ended == [(0, SequenceStatus.FINISHED_STOPPED)]
    assert tokens == ids[: len(tokens)] == root.token_ids[1:]
    assert tokenizer().decode(tokens).endswith("on the")  # and no token of the step behind it


def test_logprobs_have_names_and_ranks() -> None:
    [token] = tokenizer().encode("é", add_special_tokens=False)[-1:]
    before = tokenizer().encode("é", add_special_tokens=False)[:-1]
    entry = TokenLogprobs((token, 400, token), (-3.0, -1.0, -3.0), 2)
    named = name_logprobs(entry, tokenizer(), [{each: Any} for each in before])
    assert [*named] == [token, 400]
    assert (named[token].rank, named[token].logprob, named[400].rank) == (2, -3.0, 1)
    assert named[token].decoded_token == "é"
    assert named[400].decoded_token == tokenizer().decode([400])
    assert name_logprobs(entry, None, [])[400].decoded_token is None
