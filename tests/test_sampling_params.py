"""What a request may ask for: bad values are refused, with what was given and what is allowed."""

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
    """So that a line of vLLM code means the same here."""
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


@pytest.mark.parametrize(
    "good",
    [
        {"temperature": 0},
        {"temperature": 1e-5, "top_k": 1, "top_p": 1e-9, "min_p": 1},
        {"temperature": 100.0, "top_k": -1, "top_p": 1},
        {"seed": 0, "max_tokens": 1, "logprobs": 0},
        {"seed": 2**63 - 1, "max_tokens": None, "logprobs": None},
        {"stop": "END", "stop_token_ids": [0]},
        {"stop": ["a", "b"], "include_stop_str_in_output": True, "ignore_eos": True},
        {"output_kind": RequestOutputKind.DELTA, "skip_special_tokens": False},
        {"n": 1, "temperature": 0},
        {"n": 1000, "temperature": 1e-5},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-9},
        {"presence_penalty": 2.0, "frequency_penalty": -2.0, "repetition_penalty": 100},
        {"min_tokens": 16, "max_tokens": 16},
        {"min_tokens": 10_000, "max_tokens": None},
        {"logprobs": -1, "prompt_logprobs": -1},
        {"prompt_logprobs": 0},
        {"logit_bias": {0: -100, 5: 100.0}},
        {"allowed_token_ids": [0], "bad_words": ["no", " never "]},
        {"logits_processors": [lambda output, logits: logits]},
        {"detokenize": False, "stop_token_ids": [7]},
        {"detokenize": False, "stop": []},
    ],
)
def test_what_is_allowed(good: dict[str, Any]) -> None:
    """The edges of every range are inside."""
    SamplingParams(**good)


# A field, a bad value, the exception, and words that its message must have beside the field's name:
# what was given, and what is allowed.
BAD_VALUES: list[tuple[str, Any, type[Exception], list[str]]] = [
    ("temperature", -0.1, ValueError, ["-0.1", "0 (greedy) or more"]),
    ("temperature", NAN, ValueError, ["nan", "0 (greedy) or more"]),
    ("temperature", INF, ValueError, ["inf", "0 (greedy) or more"]),
    ("temperature", -INF, ValueError, ["-inf", "0 (greedy) or more"]),
    ("temperature", 10**400, ValueError, ["1000", "0 (greedy) or more"]),
    ("temperature", "hot", TypeError, ["'hot'", "number"]),
    ("temperature", None, TypeError, ["None", "number"]),
    ("temperature", True, TypeError, ["True", "number"]),
    ("top_p", 0, ValueError, ["0", "above 0, up to 1", "temperature=0"]),
    ("top_p", 0.0, ValueError, ["0", "above 0, up to 1"]),
    ("top_p", -0.5, ValueError, ["-0.5", "above 0, up to 1"]),
    ("top_p", 1.01, ValueError, ["1.01", "above 0, up to 1"]),
    ("top_p", NAN, ValueError, ["nan", "above 0, up to 1"]),
    ("top_p", INF, ValueError, ["inf", "above 0, up to 1"]),
    ("top_p", None, TypeError, ["None", "number"]),
    ("top_p", True, TypeError, ["True", "number"]),
    ("top_k", -2, ValueError, ["-2", "0 or -1 (off), 1 or more"]),
    ("top_k", 2**31, ValueError, [str(2**31), "1 or more"]),
    ("top_k", 5.0, TypeError, ["5.0", "int"]),
    ("top_k", NAN, TypeError, ["nan", "int"]),
    ("top_k", INF, TypeError, ["inf", "int"]),
    ("top_k", True, TypeError, ["True", "int"]),
    ("top_k", None, TypeError, ["None", "int"]),
    ("min_p", -0.1, ValueError, ["-0.1", "0 (off) to 1"]),
    ("min_p", 1.1, ValueError, ["1.1", "0 (off) to 1"]),
    ("min_p", NAN, ValueError, ["nan", "0 (off) to 1"]),
    ("min_p", INF, ValueError, ["inf", "0 (off) to 1"]),
    ("min_p", False, TypeError, ["False", "number"]),
    ("seed", -1, ValueError, ["-1", "0 to 2**63 - 1"]),
    ("seed", 2**63, ValueError, [str(2**63), "0 to 2**63 - 1"]),
    ("seed", 1.5, TypeError, ["1.5", "int"]),
    ("seed", NAN, TypeError, ["nan", "int"]),
    ("seed", True, TypeError, ["True", "int"]),
    ("max_tokens", 0, ValueError, ["0", "1 or more"]),
    ("max_tokens", -5, ValueError, ["-5", "1 or more"]),
    ("max_tokens", 16.0, TypeError, ["16.0", "int"]),
    ("max_tokens", NAN, TypeError, ["nan", "int"]),
    ("max_tokens", INF, TypeError, ["inf", "int"]),
    ("max_tokens", True, TypeError, ["True", "int"]),
    ("max_tokens", "16", TypeError, ["'16'", "int"]),
    ("n", 0, ValueError, ["0", "1 or more"]),
    ("n", -1, ValueError, ["-1", "1 or more"]),
    ("n", 2**31, ValueError, [str(2**31), "1 or more"]),
    ("n", 2.0, TypeError, ["2.0", "int", "1 or more"]),
    ("n", True, TypeError, ["True", "int"]),
    ("n", None, TypeError, ["None", "int"]),
    *(
        (name, value, exception, words)
        for name in ("presence_penalty", "frequency_penalty")
        for value, exception, words in [
            (-2.1, ValueError, ["-2.1", "-2 to 2, 0 is off"]),
            (2.1, ValueError, ["2.1", "-2 to 2, 0 is off"]),
            (NAN, ValueError, ["nan", "-2 to 2"]),
            (INF, ValueError, ["inf", "-2 to 2"]),
            (None, TypeError, ["None", "number", "-2 to 2"]),
            (True, TypeError, ["True", "number"]),
            ("1", TypeError, ["'1'", "number"]),
        ]
    ),
    ("repetition_penalty", 0, ValueError, ["0", "above 0; 1 is off"]),
    ("repetition_penalty", 0.0, ValueError, ["0", "above 0; 1 is off"]),
    ("repetition_penalty", -1.2, ValueError, ["-1.2", "above 0; 1 is off"]),
    ("repetition_penalty", NAN, ValueError, ["nan", "above 0; 1 is off"]),
    ("repetition_penalty", INF, ValueError, ["inf", "above 0; 1 is off"]),
    ("repetition_penalty", None, TypeError, ["None", "number"]),
    ("repetition_penalty", True, TypeError, ["True", "number"]),
    ("min_tokens", -1, ValueError, ["-1", "0 or more"]),
    ("min_tokens", 1.0, TypeError, ["1.0", "int"]),
    ("min_tokens", None, TypeError, ["None", "int"]),
    ("min_tokens", False, TypeError, ["False", "int"]),
    ("min_tokens", 17, ValueError, ["17", "max_tokens 16", "Lower the first or raise the second"]),
    ("prompt_logprobs", -2, ValueError, ["-2", "0 or more, or -1 for the whole vocabulary"]),
    ("prompt_logprobs", 2.0, TypeError, ["2.0", "int"]),
    ("prompt_logprobs", True, TypeError, ["True", "int"]),
    ("prompt_logprobs", "5", TypeError, ["'5'", "int"]),
    ("logit_bias", {-1: 1.0}, ValueError, ["-1", "0 or more"]),
    ("logit_bias", {2**31: 1.0}, ValueError, [str(2**31), "0 or more"]),
    ("logit_bias", {"7": 1.0}, TypeError, ["'7'", "int"]),
    ("logit_bias", {True: 1.0}, TypeError, ["True", "int"]),
    ("logit_bias", {7: 100.5}, ValueError, ["100.5", "-100 to 100"]),
    ("logit_bias", {7: -INF}, ValueError, ["-inf", "-100 to 100"]),
    ("logit_bias", {7: NAN}, ValueError, ["nan", "-100 to 100"]),
    ("logit_bias", {7: None}, TypeError, ["None", "number"]),
    ("logit_bias", [7], TypeError, ["[7]", "a dict", "-100 to 100"]),
    ("logit_bias", [(7, 1.0)], TypeError, ["[(7, 1.0)]", "a dict"]),
    ("logit_bias", 7, TypeError, ["7", "a dict"]),
    ("logit_bias", 0, TypeError, ["0", "a dict"]),
    ("allowed_token_ids", [], ValueError, ["empty", "None, or at least one id"]),
    ("allowed_token_ids", [-1], ValueError, ["-1", "0 or more"]),
    ("allowed_token_ids", [1.0], TypeError, ["1.0", "int"]),
    ("allowed_token_ids", [True], TypeError, ["True", "int"]),
    ("allowed_token_ids", 7, TypeError, ["7", "a list of token ids"]),
    ("allowed_token_ids", "7", TypeError, ["'7'", "a list of token ids"]),
    ("bad_words", "no", TypeError, ["'no'", "a list of strings"]),
    ("bad_words", b"no", TypeError, ["b'no'", "a list of strings"]),
    ("bad_words", 7, TypeError, ["7", "a list of strings"]),
    ("bad_words", [""], ValueError, ["''", "non-empty strings"]),
    ("bad_words", ["no", 7], ValueError, ["7", "non-empty strings"]),
    ("bad_words", [None], ValueError, ["None", "non-empty strings"]),
    ("logits_processors", ["f"], TypeError, ["'f'", "callables on a row of logits"]),
    ("logits_processors", [None], TypeError, ["None", "callables on a row of logits"]),
    ("logits_processors", len, TypeError, ["len", "a list of callables"]),
    ("detokenize", 0, TypeError, ["0", "True or False"]),
    ("detokenize", None, TypeError, ["None", "True or False"]),
    ("logprobs", -2, ValueError, ["-2", "0 or more, or -1 for the whole vocabulary"]),
    ("logprobs", 2.0, TypeError, ["2.0", "int"]),
    ("logprobs", NAN, TypeError, ["nan", "int"]),
    ("logprobs", True, TypeError, ["True", "int"]),
    ("ignore_eos", 1, TypeError, ["1", "True or False"]),
    ("ignore_eos", None, TypeError, ["None", "True or False"]),
    ("include_stop_str_in_output", "no", TypeError, ["'no'", "True or False"]),
    ("skip_special_tokens", 0, TypeError, ["0", "True or False"]),
    ("stop", "", ValueError, ["''", "non-empty strings"]),
    ("stop", ["END", ""], ValueError, ["''", "non-empty strings"]),
    ("stop", ["END", 7], ValueError, ["7", "non-empty strings"]),
    ("stop", b"END", TypeError, ["b'END'", "a string or a list of strings"]),
    ("stop", 7, TypeError, ["7", "a string or a list of strings"]),
    ("stop", 0, TypeError, ["0", "a string or a list of strings"]),
    ("stop_token_ids", [-1], ValueError, ["-1", "0 or more"]),
    ("stop_token_ids", [2**31], ValueError, [str(2**31), "0 or more"]),
    ("stop_token_ids", [1.0], TypeError, ["1.0", "int"]),
    ("stop_token_ids", [True], TypeError, ["True", "int"]),
    ("stop_token_ids", ["7"], TypeError, ["'7'", "int"]),
    ("stop_token_ids", 7, TypeError, ["7", "a list of token ids"]),
    ("stop_token_ids", 0, TypeError, ["0", "a list of token ids"]),
    ("output_kind", 1, TypeError, ["1", "RequestOutputKind"]),
    ("output_kind", "delta", TypeError, ["'delta'", "RequestOutputKind"]),
]


@pytest.mark.parametrize(
    ("name", "value", "exception", "words"),
    BAD_VALUES,
    ids=[f"{name}={value!r:.20}" for name, value, *_ in BAD_VALUES],
)
def test_bad_values_are_refused(
    name: str, value: Any, exception: type[Exception], words: list[str]
) -> None:
    """With a message that names the field, what was given, and what is allowed."""
    with pytest.raises(exception) as raised:
        SamplingParams(**{name: value})
    for word in [name, *words]:
        assert word in str(raised.value)


def test_every_field_is_in_the_table() -> None:
    assert {name for name, *_ in BAD_VALUES} == {field.name for field in fields(SamplingParams)}


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
    """With a message that names both, and says what to do."""
    with pytest.raises(ValueError, match=words[0]) as raised:
        SamplingParams(**values)
    for word in words:
        assert word in str(raised.value)


def test_a_misspelt_name_is_pythons_own_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]


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


def test_nobody_changes_it_afterwards() -> None:
    """Frozen, hashable, and not tied to the caller's lists."""
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
def test_it_is_valid_or_it_is_not_made(values: dict[str, Any]) -> None:
    """Whatever is given, no other exception than ValueError and TypeError, and no bad instance."""
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
