"""What a request may ask for. A bad value is refused: the message has the value and the range."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoserve import RequestOutputKind, SamplingParams

NAN, INF = math.nan, math.inf


def test_the_defaults_are_vllms() -> None:
    """A line of vLLM code means the same here."""
    params = SamplingParams()
    assert {field.name: getattr(params, field.name) for field in fields(params)} == {
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": None,
        "max_tokens": 16,
        "min_tokens": 0,
        "ignore_eos": False,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "logprobs": None,
        "prompt_logprobs": None,
        "logit_bias": {},
        "allowed_token_ids": None,
        "bad_words": (),
        "logits_processors": (),
        "detokenize": True,
        "skip_special_tokens": True,
        "output_kind": RequestOutputKind.CUMULATIVE,
    }


# Of each number: values at the edges of its range, values outside, and the range in words.
PENALTY = ([-2, 2.0], [-2.1, 2.1, NAN, INF], "-2 to 2, 0 is off")
LOGPROBS = ([None, 0, -1], [-2], "0 or more, or -1 for the whole vocabulary")
NUMBERS: dict[str, tuple[list[Any], list[Any], str]] = {
    "n": ([1, 1000], [0, -1, 2**31], "1 or more"),
    "temperature": ([0, 1e-5, 100.0], [-0.1, NAN, INF, -INF, 10**400], "0 (greedy) or more"),
    "top_p": ([1e-9, 1], [0, 0.0, -0.5, 1.01, NAN, INF], "above 0, up to 1"),
    "top_k": ([0, -1, 1], [-2, 2**31], "0 or -1 (off), 1 or more"),
    "min_p": ([0, 1], [-0.1, 1.1, NAN, INF], "0 (off) to 1"),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": ([1e-9, 100], [0, 0.0, -1.2, NAN, INF], "above 0; 1 is off"),
    "seed": ([None, 0, 2**63 - 1], [-1, 2**63], "0 to 2**63 - 1"),
    "max_tokens": ([None, 1], [0, -5], "1 or more"),
    "min_tokens": ([0, 16], [-1], "0 or more"),
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
}
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
FLOATS = (*FLOATS, "repetition_penalty")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")


def assert_refused(error: type[Exception], words: list[str], **values: Any) -> None:
    """SamplingParams(**values) raises `error` with a message that has all of `words`."""
    with pytest.raises(error) as raised:
        SamplingParams(**values)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    """The edges of a range are inside. An int is a float too, a bool is neither."""
    good, outside, allowed = NUMBERS[name]
    for value in good:
        SamplingParams(**{name: value})
    for value in outside:
        assert_refused(ValueError, [name, repr(value)[:20], allowed], **{name: value})
    wrong = [True, "1", [1]] if name in FLOATS else [True, "1", [1], 2.0, NAN, INF]
    for value in wrong if None in good else [*wrong, None]:
        noun = "a number" if name in FLOATS else "an int"
        assert_refused(TypeError, [name, repr(value), noun, allowed], **{name: value})


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    for value in (0, 1, "no", None):
        assert_refused(TypeError, [name, repr(value), "True or False"], **{name: value})


# A field, a bad value, the exception, and words that its message must have beside the field's name.
TOKEN_IDS: list[tuple[Any, type[Exception], list[str]]] = [
    ([-1], ValueError, ["-1", "0 or more"]),
    ([2**31], ValueError, [str(2**31), "0 or more"]),
    ([1.0], TypeError, ["1.0", "int"]),
    ([True], TypeError, ["True", "int"]),
    (["7"], TypeError, ["'7'", "int"]),
    (7, TypeError, ["7", "a list of token ids"]),
    (0, TypeError, ["0", "a list of token ids"]),
    ("7", TypeError, ["'7'", "a list of token ids"]),
]
STRINGS: list[tuple[Any, type[Exception], list[str]]] = [
    ([""], ValueError, ["''", "non-empty strings"]),
    (["no", 7], ValueError, ["7", "non-empty strings"]),
    ([None], ValueError, ["None", "non-empty strings"]),
    (b"no", TypeError, ["b'no'", "a list of strings"]),
    (7, TypeError, ["7", "a list of strings"]),
    (0, TypeError, ["0", "a list of strings"]),
]
BAD_VALUES: list[tuple[str, Any, type[Exception], list[str]]] = [
    *((name, *rest) for name in ("stop_token_ids", "allowed_token_ids") for rest in TOKEN_IDS),
    *((name, *rest) for name in ("stop", "bad_words") for rest in STRINGS),
    ("stop", "", ValueError, ["''", "non-empty strings"]),
    ("bad_words", "no", TypeError, ["'no'", "a list of strings"]),
    ("allowed_token_ids", [], ValueError, ["empty", "None, or at least one id"]),
    ("logit_bias", {-1: 1.0}, ValueError, ["-1", "0 or more"]),
    ("logit_bias", {2**31: 1.0}, ValueError, [str(2**31), "0 or more"]),
    ("logit_bias", {"7": 1.0}, TypeError, ["'7'", "int"]),
    ("logit_bias", {True: 1.0}, TypeError, ["True", "int"]),
    ("logit_bias", {7: 100.5}, ValueError, ["100.5", "-100 to 100"]),
    ("logit_bias", {7: -INF}, ValueError, ["-inf", "-100 to 100"]),
    ("logit_bias", {7: NAN}, ValueError, ["nan", "-100 to 100"]),
    ("logit_bias", {7: None}, TypeError, ["None", "number"]),
    ("logit_bias", [(7, 1.0)], TypeError, ["[(7, 1.0)]", "a dict", "-100 to 100"]),
    ("logit_bias", 0, TypeError, ["0", "a dict"]),
    ("logits_processors", ["f"], TypeError, ["'f'", "callables on a row of logits"]),
    ("logits_processors", [None], TypeError, ["None", "callables on a row of logits"]),
    ("logits_processors", len, TypeError, ["len", "a list of callables"]),
    ("output_kind", 1, TypeError, ["1", "RequestOutputKind"]),
    ("output_kind", "delta", TypeError, ["'delta'", "RequestOutputKind"]),
]


def test_bad_values_are_refused() -> None:
    """With a message that names the field, what was given, and what is allowed."""
    for name, value, error, words in BAD_VALUES:
        assert_refused(error, [name, *words], **{name: value})


def test_every_field_is_tested() -> None:
    tested = {*NUMBERS, *FLAGS, *(name for name, *_ in BAD_VALUES)}
    assert tested == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize(
    "good",
    [
        {"stop": "END", "stop_token_ids": [0]},
        {"stop": ["a", "b"], "include_stop_str_in_output": True, "ignore_eos": True},
        {"output_kind": RequestOutputKind.DELTA, "skip_special_tokens": False},
        {"n": 1, "temperature": 0},
        {"n": 1000, "temperature": 1e-5},
        {"min_tokens": 16, "max_tokens": 16},
        {"min_tokens": 10_000, "max_tokens": None},
        {"logit_bias": {0: -100, 5: 100.0}},
        {"allowed_token_ids": [0], "bad_words": ["no", " never "]},
        {"logits_processors": [lambda output, logits: logits]},
        {"detokenize": False, "stop_token_ids": [7]},
        {"detokenize": False, "stop": []},
    ],
)
def test_allowed_together(good: dict[str, Any]) -> None:
    SamplingParams(**good)


# Values that are good alone and contradict each other.
BAD_PAIRS: list[tuple[dict[str, Any], list[str]]] = [
    ({"n": 2, "temperature": 0}, ["n is 2", "temperature 0", "Raise", "n=1"]),
    ({"n": 3, "temperature": 1e-6}, ["n is 3", "temperature 1e-06", "Raise", "n=1"]),
    ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens is 9", "max_tokens 8", "Lower", "raise"]),
    ({"stop": "END", "detokenize": False}, ["stop strings", "detokenize=True"]),
    ({"stop": ["a", "b"], "detokenize": False}, ["stop strings", "detokenize=True"]),
]


@pytest.mark.parametrize(("values", "words"), BAD_PAIRS)
def test_contradictions_are_refused(values: dict[str, Any], words: list[str]) -> None:
    """With a message that names both fields, and says what to do."""
    assert_refused(ValueError, words, **values)


def test_top_p_0_names_the_greedy_parameter() -> None:
    assert_refused(ValueError, ["temperature=0"], top_p=0)


def test_a_misspelt_name_is_pythons_own_error() -> None:
    assert_refused(TypeError, ["temprature"], temprature=0)


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (None, ()),
        ("END", ("END",)),
        ([], ()),
        (["a", "b"], ("a", "b")),
        (("a", "b"), ("a", "b")),
    ],
)
def test_stop_becomes_a_tuple(stop: Any, kept: tuple[str, ...]) -> None:
    """One string is one stop string, not a list of letters."""
    assert SamplingParams(stop=stop).stop == kept


def test_top_k_minus_one_is_off() -> None:
    """vLLM's older spelling of 0."""
    assert SamplingParams(top_k=-1).top_k == 0


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("presence_penalty", 0, 0.1),
        ("frequency_penalty", 0, -0.1),
        ("repetition_penalty", 1, 0.9),
    ],
)
def test_has_penalties(name: str, off: float, on: float) -> None:
    """Any of the three that is not off."""
    assert not SamplingParams(**{name: off}).has_penalties
    assert SamplingParams(**{name: on}).has_penalties


@pytest.mark.parametrize(("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False)])
def test_greedy_below_vllms_limit(temperature: float, greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy is greedy


def test_an_instance_never_changes() -> None:
    """It is frozen, hashable, and a copy of the caller's lists."""
    given: dict[str, Any] = {name: [7] for name in ("stop_token_ids", "allowed_token_ids")}
    given |= {"stop": ["END"], "bad_words": ["no"], "logits_processors": [len]}
    given["logit_bias"] = {7: 1.0}
    params = SamplingParams(**given)
    for name, value in given.items():
        value.clear()
        assert getattr(params, name), f"{name} is the caller's own"
    assert (params.stop, params.stop_token_ids) == (("END",), (7,))
    same = SamplingParams(
        stop="END",
        stop_token_ids=(7,),
        allowed_token_ids=(7,),
        bad_words=("no",),
        logits_processors=(len,),
        logit_bias={7: 1.0},
    )
    assert params == same
    assert hash(params) == hash(same)
    assert params != replace(same, logit_bias={7: 2.0})
    with pytest.raises(FrozenInstanceError):
        params.temperature = 2.0  # type: ignore[misc]


def test_a_changed_copy_is_checked_again() -> None:
    params = SamplingParams(stop="END", top_k=-1)
    assert replace(params, temperature=0).stop == ("END",)
    with pytest.raises(ValueError, match="temperature"):
        replace(params, temperature=NAN)


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(["", "a", "END"]),
    st.lists(st.sampled_from([-1, 0, 5, 1.0, "", "a", len]), max_size=2),
    st.dictionaries(st.sampled_from([-1, 0, 5, "a"]), st.floats(-200, 200), max_size=2),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    values=st.dictionaries(
        st.sampled_from([field.name for field in fields(SamplingParams)]), anything, max_size=4
    )
)
def test_every_instance_is_valid(values: dict[str, Any]) -> None:
    """Any values give a valid instance, or a ValueError or TypeError that names a field."""
    refusal = None
    try:
        params = SamplingParams(**values)
    except (ValueError, TypeError) as error:
        refusal = str(error)
    if refusal is not None:
        assert any(name in refusal for name in values)
        return
    assert 0 <= params.temperature < INF
    assert 0 < params.top_p <= 1
    assert 0 <= params.min_p <= 1
    assert params.top_k >= 0
    assert params.max_tokens is None or params.max_tokens >= max(1, params.min_tokens)
    assert params.n == 1 or not params.is_greedy
    assert params.repetition_penalty > 0
    assert min(params.presence_penalty, params.frequency_penalty) >= -2
    assert all(-100 <= value <= 100 for value in (params.logit_bias or {}).values())
    assert params.allowed_token_ids is None or params.allowed_token_ids
    assert all(isinstance(stop, str) and stop for stop in params.stop or ())
    assert replace(params) == params
