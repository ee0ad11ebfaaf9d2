"""What a request may ask for. A bad value is refused: the message has the value and the range."""

from __future__ import annotations

import inspect
import logging
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import count, repeat
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoserve import RequestOutputKind, SamplingParams, logger
from nanoserve.exceptions import VLLMValidationError
from nanoserve.sampling_params import MISSING, REMOVED

NAN, INF = math.nan, math.inf


def test_order_and_defaults_are_vllms() -> None:
    """A line of vLLM code means the same here, with positional arguments too. vLLM's fields that
    are not to be given (such as output_text_buffer_length) are left out; V0's last one is added."""
    params = SamplingParams()
    assert [(field.name, getattr(params, field.name)) for field in fields(params)] == [
        ("n", 1),
        ("presence_penalty", 0.0),
        ("frequency_penalty", 0.0),
        ("repetition_penalty", 1.0),
        ("temperature", 1.0),
        ("watermarking", None),
        ("top_p", 1.0),
        ("top_k", 0),
        ("min_p", 0.0),
        ("seed", None),
        ("stop", []),
        ("stop_token_ids", []),
        ("ignore_eos", False),
        ("max_tokens", 16),
        ("min_tokens", 0),
        ("logprobs", None),
        ("prompt_logprobs", None),
        ("prompt_logprob_token_ids", None),
        ("prompt_logprob_start", None),
        ("logprob_token_ids", None),
        ("flat_logprobs", False),
        ("detokenize", True),
        ("skip_special_tokens", True),
        ("spaces_between_special_tokens", True),
        ("include_stop_str_in_output", False),
        ("output_kind", RequestOutputKind.CUMULATIVE),
        ("stream_interval", None),
        ("skip_clone", False),
        ("structured_outputs", None),
        ("logit_bias", None),
        ("allowed_token_ids", None),
        ("extra_args", None),
        ("bad_words", []),
        ("skip_reading_prefix_cache", False),
        ("thinking_token_budget", None),
        ("repetition_detection", None),
        ("routed_experts_prompt_start", 0),
        ("trace_decode_token_ids", None),
        ("logits_processors", None),
    ]


# Of each number: values at the edges of its range, values outside, and the range in words.
PENALTY = ([-2, 2.0], [-2.1, 2.1, NAN, INF], "-2 to 2, 0 is off")
LOGPROBS = ([None, 0, -1], [-2], "0 or more, or -1 for the whole vocabulary")
NUMBERS: dict[str, tuple[list[Any], list[Any], str]] = {
    "n": ([1, 16384], [0, -1, 16385], "1 or more, up to 16384"),
    "temperature": ([0, 1e-5, 100.0], [-0.1, NAN, INF, -INF, 10**400], "0 (greedy) to 3.4e38"),
    "top_p": ([1e-9, 1], [0, 0.0, -0.5, 1.01, NAN, INF], "above 0, up to 1"),
    "top_k": ([0, -1, 1, 2**99], [-2], "0 or -1 (off), 1 or more"),
    "min_p": ([0, 1], [-0.1, 1.1, NAN, INF], "0 (off) to 1"),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
    "repetition_penalty": ([1e-30, 100], [0, 9e-31, -1.2, 1e39, NAN, INF], "1e-30 to 3.4e38"),
    "seed": ([None, 0, -1, 2**63 - 1], [-2, 2**63], "0 to 2**63 - 1"),
    "max_tokens": ([None, 1, 2**99], [0, -5], "1 or more"),
    "min_tokens": ([0, 16], [-1], "0 or more"),
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
}
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty")
FLOATS = (*FLOATS, "repetition_penalty")
FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")
FLAGS = (*FLAGS, "spaces_between_special_tokens", "skip_clone")


def test_unknown_arguments_are_explained() -> None:
    """Misspelt ones, and those of earlier versions. The signature is still that of the fields."""
    for name, meant in {"max_token": "max_tokens", "logits_processor": "logits_processors"}.items():
        with pytest.raises(TypeError, match=rf"SamplingParams\(\) got .*{name}'.*mean '{meant}'\?"):
            SamplingParams(**{name: 1})
    for name, advice in REMOVED.items():
        with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'") as raised:
            SamplingParams(**{name: 1})
        assert str(raised.value).endswith(advice)
    with pytest.raises(TypeError, match=r"argument 'qqq'.$"):
        SamplingParams.from_optional(qqq=1)
    assert list(inspect.signature(SamplingParams).parameters) == [
        f.name for f in fields(SamplingParams)
    ]


def assert_refused(error: type[Exception], words: list[str], **values: Any) -> None:
    """SamplingParams(**values) raises `error` with a message that has all of `words`. So does a
    clone of parameters to which the same values were assigned. A ValueError is vLLM's own, too."""
    assigned = SamplingParams()
    for name, value in values.items():
        assert hasattr(assigned, name), "a misspelt field"
        setattr(assigned, name, value)
    for call in (lambda: SamplingParams(**values), assigned.clone):
        with pytest.raises(error) as raised:
            call()
        for word in words:
            assert word in str(raised.value)
        if error is ValueError:
            assert isinstance(raised.value, VLLMValidationError)
            assert raised.value.parameter in values


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str) -> None:
    """The edges of a range are inside. An int is a float too, a bool is neither."""
    good, outside, allowed = NUMBERS[name]
    for value in good:
        SamplingParams(**{name: value})
    for value in outside:
        assert_refused(ValueError, [name, repr(value)[:20], allowed], **{name: value})
    no_number = "logprobs" not in name  # False for these: logprobs=True is 1, as in vLLM
    wrong = [no_number, "1", [1]]
    wrong += [] if name in FLOATS else [2.0, NAN, INF]
    for value in wrong if None in good else [*wrong, None]:
        noun = "a number" if name in FLOATS else "an int"
        assert_refused(TypeError, [name, repr(value), noun, allowed], **{name: value})


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    for value in (0, 1, "no", None):
        assert_refused(TypeError, [name, repr(value), "True or False"], **{name: value})


def test_numbers_of_tokens_above_any_length() -> None:
    """Mean no limit, as in vLLM: sys.maxsize is often given."""
    params = SamplingParams(max_tokens=sys.maxsize, min_tokens=2**40, top_k=10**12)
    assert params.max_tokens == params.min_tokens == params.top_k == 2**31 - 1
    assert_refused(ValueError, ["min_tokens", "max_tokens"], min_tokens=2**50, max_tokens=2**40)


@pytest.mark.parametrize(
    "given",
    [
        {"stop_token_ids": "x" * 10**6},
        {"temperature": "x" * 10**6},
        {"logit_bias": {"z" * 10**6: 1}},
        {"extra_args": "q" * 10**6},
        {"stop": ["x", ["y" * 10**6]]},
        {"ignore_eos": "n" * 10**6},
    ],
)
def test_messages_are_short(given: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        SamplingParams(**given)
    assert len(str(error.value)) < 1000


def test_what_cannot_be_copied_is_named() -> None:
    params = SamplingParams(extra_args={"lock": threading.Lock()})
    with pytest.raises(TypeError, match=r"extra_args .* cannot be copied .* skip_clone=True"):
        params.clone()
    params.skip_clone = True
    assert params.clone().extra_args == params.extra_args


def test_values_in_extra_args_are_copied() -> None:
    """As in vLLM; with skip_clone they are shared."""
    params = SamplingParams(extra_args={"a": {"b": [1]}})
    clone = params.clone()
    params.extra_args["a"]["b"].append(2)  # type: ignore[index]
    assert clone.extra_args == {"a": {"b": [1]}}
    lock = threading.Lock()  # has no copy
    shared = SamplingParams(extra_args={"lock": lock}, skip_clone=True)
    assert shared.clone().extra_args == {"lock": lock}


# A field, a bad value, the exception, and words that its message must have beside the field's name.
TOKEN_IDS: list[tuple[Any, type[Exception], list[str]]] = [
    ([-1], ValueError, ["-1", "0 to 2**31 - 1"]),
    ([2**31], ValueError, [str(2**31), "0 to 2**31 - 1"]),
    ([1.0], TypeError, ["1.0", "int"]),
    ([True], TypeError, ["True", "int"]),
    (["7"], TypeError, ["'7'", "int"]),
    (7, TypeError, ["7", "a list of token ids"]),
    (0, TypeError, ["0", "a list of token ids"]),
    ("7", TypeError, ["'7'", "a list of token ids"]),
]


class Unwritable:
    """Its repr raises."""

    def __repr__(self) -> str:
        raise ZeroDivisionError


class WithoutSignature(Unwritable):
    """Asking for its parameters raises, too."""

    @property
    def __signature__(self) -> Any:
        raise ZeroDivisionError

    def __call__(self, output: list[int], logits: Any) -> Any:
        return logits


STRINGS: list[tuple[Any, type[Exception], list[str]]] = [
    ([""], ValueError, ["''", "non-empty strings"]),
    (["no", 7], ValueError, ["7", "non-empty strings"]),
    ([Unwritable()], ValueError, ["<Unwritable", "non-empty strings"]),
    ([None], ValueError, ["None", "non-empty strings"]),
    (b"no", TypeError, ["b'no'", "a list of strings"]),
    (7, TypeError, ["7", "a list of strings"]),
    (0, TypeError, ["0", "a list of strings"]),
]
# They do not take the two or three arguments of a logits processor, or nobody can tell.
NO_PROCESSORS: list[Callable[..., Any]] = [
    *(max, torch.add, dict, len, WithoutSignature()),
    *(lambda: 0, lambda a: a, lambda a, b, c, d: a, lambda a, b, *, c: a),
]
WRONG_PARAMETERS = ["(output_token_ids, logits) or (prompt_token_ids, output_token_ids, logits)"]
MANY = {"stop": 1024, "bad_words": 1024, "logits_processors": 1024}
MANY |= {"stop_token_ids": 4096, "logit_bias": 4096, "allowed_token_ids": 2**20}
TOO_MANY: list[tuple[str, Any]] = [
    ("stop", [str(i) for i in range(1025)]),
    ("bad_words", repeat("a")),
    ("logits_processors", [lambda output, logits: logits] * 1025),
    ("stop_token_ids", count()),
    ("allowed_token_ids", range(2**20 + 1)),
    ("logit_bias", dict.fromkeys(range(4097), 1.0)),
]
BAD_VALUES: list[tuple[str, Any, type[Exception], list[str]]] = [
    *((name, *rest) for name in ("stop_token_ids", "allowed_token_ids") for rest in TOKEN_IDS),
    *((name, *rest) for name in ("stop", "bad_words") for rest in STRINGS),
    ("bad_words", ["a", "b" * 2**15], ValueError, ["32769 characters in all", "32768"]),
    ("bad_words", ["a\ud800"], ValueError, ["'a\\ud800'", "whole characters"]),
    ("stop", "", ValueError, ["''", "non-empty strings"]),
    ("bad_words", "no", TypeError, ["'no'", "a list of strings"]),
    ("allowed_token_ids", [], ValueError, ["empty", "None, or at least one id"]),
    ("logit_bias", {-1: 1.0}, ValueError, ["-1", "0 to 2**31 - 1"]),
    ("logit_bias", {2**31: 1.0}, ValueError, [str(2**31), "0 to 2**31 - 1"]),
    ("logit_bias", {"7": 1.0}, TypeError, ["'7'", "int"]),
    ("logit_bias", {True: 1.0}, TypeError, ["True", "int"]),
    ("logit_bias", {7: -INF}, ValueError, ["-inf", "a finite number"]),
    ("logit_bias", {7: NAN}, ValueError, ["nan", "a finite number"]),
    ("logit_bias", {7: None}, TypeError, ["None", "number"]),
    ("logit_bias", [(7, 1.0)], TypeError, ["[(7, 1.0)]", "a dict", "a finite number"]),
    ("logit_bias", 0, TypeError, ["0", "a dict"]),
    ("logits_processors", ["f"], TypeError, ["'f'", "callables on a row of logits"]),
    ("logits_processors", [None], TypeError, ["None", "callables on a row of logits"]),
    ("logits_processors", len, TypeError, ["len", "a list of callables"]),
    *(("logits_processors", [bad], TypeError, WRONG_PARAMETERS) for bad in NO_PROCESSORS),
    *((name, {"a": 1}, TypeError, ["{'a': 1}"]) for name in ("stop", "bad_words")),
    *((name, {7: 1}, TypeError, ["{7: 1}"]) for name in ("stop_token_ids", "allowed_token_ids")),
    ("stop_token_ids", bytearray(b"a"), TypeError, ["bytearray"]),
    *((name, many, ValueError, [f"more than {MANY[name]} items"]) for name, many in TOO_MANY),
    ("output_kind", 1, TypeError, ["1", "RequestOutputKind"]),
    ("output_kind", "delta", TypeError, ["'delta'", "RequestOutputKind"]),
    ("extra_args", [1], TypeError, ["[1]", "a dict"]),
    ("skip_reading_prefix_cache", 1, TypeError, ["1", "True or False"]),
]
# Of vLLM's fields that are not here: values that change nothing, and others.
NOT_HERE: dict[str, tuple[list[Any], list[Any]]] = {
    "watermarking": ([None, False], [True]),
    "prompt_logprob_token_ids": ([None], [[[1, 2]], np.ones((2, 2), int)]),
    "prompt_logprob_start": ([None], [0, 3]),
    "logprob_token_ids": ([None, []], [[5]]),
    "flat_logprobs": ([False], [True]),
    "stream_interval": ([None, 1], [2]),
    "thinking_token_budget": ([None, -1], [0, 50]),
    "repetition_detection": ([None], [object()]),
    "routed_experts_prompt_start": ([0], [3]),
    "trace_decode_token_ids": ([None], [[5]]),
}


def test_bad_values_are_refused() -> None:
    """With a message that names the field, what was given, and what is allowed."""
    for name, value, error, words in BAD_VALUES:
        assert_refused(error, [name, *words], **{name: value})


def test_fields_of_vllm_that_are_not_here() -> None:
    """Accepted with the value that changes nothing, refused by name with any other."""
    assert NOT_HERE.keys() == MISSING.keys()
    for name, (neutral, others) in NOT_HERE.items():
        for value in neutral:
            SamplingParams(**{name: value})
        for value in others:
            assert_refused(ValueError, [name, "does not have it; allowed:"], **{name: value})


def test_every_field_is_tested() -> None:
    tested = {*NUMBERS, *FLAGS, *NOT_HERE, *(name for name, *_ in BAD_VALUES)}
    tested.add("structured_outputs")  # in test_structured_output.py
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
        {"logit_bias": {0: -100, 5: 200.0}},  # as in vLLM: only from_optional cuts to 100
        {"spaces_between_special_tokens": False, "skip_special_tokens": True},
        {"logprobs": True, "prompt_logprobs": True},
        {"extra_args": {"anything": object()}},
        {"allowed_token_ids": [0], "bad_words": ["no", " never "]},
        {"logits_processors": [lambda output, logits: logits, lambda p, o, row: row]},
        {"logits_processors": [lambda o, row, k=1: row, lambda *both: both[-1], torch.nn.ReLU()]},
        {"logits_processors": [partial(lambda k, o, row: row, 1), np.multiply]},
        {"stop": [str(i) for i in range(1024)], "stop_token_ids": set(range(4096))},
        {"allowed_token_ids": range(10_000), "logit_bias": dict.fromkeys(range(4096), 1.0)},
        {"detokenize": False, "stop_token_ids": [7]},
        {"detokenize": False, "stop": []},
    ],
)
def test_allowed_together(good: dict[str, Any]) -> None:
    SamplingParams(**good)


# Values that are good alone and contradict each other.
BAD_PAIRS: list[tuple[dict[str, Any], list[str]]] = [
    ({"n": 2, "temperature": 0}, ["n is 2", "temperature 0", "Raise", "n=1"]),
    (
        {"spaces_between_special_tokens": False, "skip_special_tokens": False},
        ["spaces_between_special_tokens", "skip_special_tokens=False", "Leave it True"],
    ),
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
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=0)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("stop", "kept"),
    [
        (None, []),
        ("END", ["END"]),
        ([], []),
        (["a", "b"], ["a", "b"]),
        (("a", "b"), ["a", "b"]),
    ],
)
def test_stop_becomes_a_list(stop: Any, kept: list[str]) -> None:
    """One string is one stop string, not a list of letters."""
    assert SamplingParams(stop=stop).stop == kept


def test_repeated_words_and_ids_are_kept_once() -> None:
    params = SamplingParams(stop_token_ids=[7, 5, 7], bad_words=["b", "a", "b"])
    assert (params.stop_token_ids, params.bad_words) == ([7, 5], ["b", "a"])


def test_seed_minus_one_is_none() -> None:
    assert SamplingParams(seed=-1).seed is None


def test_logprobs_true_is_one() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=True)
    assert (type(params.logprobs), params.logprobs, params.prompt_logprobs) == (int, 1, 1)


def test_greedy_needs_no_filters() -> None:
    """Temperature 0 turns top_p, top_k and min_p off, in a clone, too."""
    filters: dict[str, Any] = {"top_p": 0.5, "top_k": 7, "min_p": 0.1}
    assert SamplingParams(temperature=0, **filters) == SamplingParams(temperature=0)
    params = SamplingParams(**filters)
    params.temperature = 0
    assert params.clone() == SamplingParams(temperature=0)
    assert params.top_k == 7, "the caller's own stays as it was assigned"


@pytest.mark.parametrize(
    ("fields_", "skips"),
    [({}, False), ({"skip_reading_prefix_cache": True}, True), ({"prompt_logprobs": 0}, True)],
)
def test_prompt_logprobs_need_the_whole_prompt(fields_: dict[str, Any], skips: bool) -> None:
    params = SamplingParams(**fields_)
    assert params.skip_reading_prefix_cache is skips
    params.prompt_logprobs = 1
    assert params.clone().skip_reading_prefix_cache is True


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


def test_small_temperatures_are_raised(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in vLLM, to 0.01. Only 0 is greedy. A clone of an assigned value says nothing new."""
    monkeypatch.setattr(logger, "WARNED", set())
    assert SamplingParams(temperature=0).is_greedy
    with caplog.at_level(logging.WARNING, "nanoserve"):
        params = SamplingParams(temperature=1e-6)
        assert (params.temperature, params.is_greedy) == (0.01, False)
        params.temperature = 0.005
        assert [params.clone().temperature, params.clone().temperature] == [0.01, 0.01]
    expected = "temperatures above 0 and below 0.01 are raised to it."
    assert [record.getMessage() for record in caplog.records] == [expected]
    assert SamplingParams(temperature=0.01).temperature == 0.01


# -- copies --

LISTS: dict[str, Any] = {
    "stop_token_ids": [7],
    "allowed_token_ids": [7],
    "stop": ["END"],
    "bad_words": ["no"],
    "logits_processors": [lambda output, logits: logits],
    "logit_bias": {7: 1.0},
    "extra_args": {"key": 1},
}


@pytest.mark.parametrize("copy", ["constructor", "clone"])
def test_later_edits_reach_no_copy(copy: str) -> None:
    """Neither edits of the caller's lists reach the parameters, nor edits of the parameters and
    their lists a clone."""
    given = {name: value.copy() for name, value in LISTS.items()}
    params = SamplingParams(**given)
    if copy == "clone":
        original, params = params, params.clone()
        given = {name: getattr(original, name) for name in given}
        original.max_tokens = 3
        original.stop = "other"
    for value in given.values():
        value.clear()
    assert params == SamplingParams(**LISTS)
    assert all(getattr(params, name) for name in LISTS)


def test_a_bad_recommendation_names_the_file() -> None:
    for bad in ({"temperature": -1}, {"top_p": "high"}, {"max_new_tokens": 0}):
        with pytest.raises(ValueError, match=r"^generation_config\.json .*allowed: .* delete it"):
            SamplingParams.from_generation_config(bad)


def test_a_clone_is_checked() -> None:
    """A field may be assigned as in the constructor; what is wrong is refused by clone()."""
    params = SamplingParams(stop="END", top_k=-1)
    params.stop, params.max_tokens, params.top_k = "a", np.int64(9), -1
    clone = params.clone()
    assert (clone.stop, clone.max_tokens, clone.top_k) == (["a"], 9, 0)
    params.temperature = NAN
    with pytest.raises(VLLMValidationError, match="temperature is nan"):
        params.clone()
    assert replace(clone, temperature=0).stop == ["a"]


# -- other spellings --

FIVES = [np.int64(5), np.uint8(5), np.array(5), torch.tensor(5), torch.tensor(5, dtype=torch.int8)]


@pytest.mark.parametrize("five", FIVES, ids=lambda five: type(five).__name__)
def test_numbers_of_numpy_and_torch(five: Any) -> None:
    """Become Python's own, alone and in lists and dicts."""
    params = SamplingParams(
        max_tokens=five,
        top_k=five,
        stop_token_ids=[five],
        logit_bias={five.item(): five},
        allowed_token_ids=np.array([5, 6]),
    )
    assert params == SamplingParams(
        max_tokens=5, top_k=5, stop_token_ids=[5], logit_bias={5: 5}, allowed_token_ids=[5, 6]
    )
    kept = [params.max_tokens, params.top_k, *params.stop_token_ids, *params.logit_bias.values()]
    assert {type(value) for value in [*kept, *params.allowed_token_ids]} == {int}


@pytest.mark.parametrize("half", [np.float32(0.5), np.float16(0.5), torch.tensor(0.5)])
def test_floats_of_numpy_and_torch(half: Any) -> None:
    params = SamplingParams(temperature=half, top_p=half, logit_bias={np.int32(5): half})
    assert params == SamplingParams(temperature=0.5, top_p=0.5, logit_bias={5: 0.5})
    assert type(params.temperature) is float


def test_arrays_and_flags_of_numpy() -> None:
    assert SamplingParams(ignore_eos=np.True_, stop=np.array(["a"])).stop == ["a"]
    assert_refused(TypeError, ["max_tokens", "[5]"], max_tokens=np.array([5]))
    assert_refused(TypeError, ["max_tokens", "5.0"], max_tokens=np.float64(5))


def test_from_optional() -> None:
    """None is the default; logit_bias may come from JSON, and is cut to -100 to 100."""
    params = SamplingParams.from_optional(
        n=None, temperature=None, top_p=None, presence_penalty=None, repetition_penalty=None,
        max_tokens=None, logit_bias={"5": 200, 6: -300.0, "7": 1},
    )  # fmt: skip
    assert params == SamplingParams(max_tokens=None, logit_bias={5: 100.0, 6: -100.0, 7: 1})
    assert SamplingParams.from_optional() == SamplingParams()
    with pytest.raises(VLLMValidationError, match=r"logit_bias is \{'a': 1\}"):
        SamplingParams.from_optional(logit_bias={"a": 1})
    for bias, error, words in [
        ({"5": "x"}, TypeError, "logit_bias must be a number, got 'x'; allowed: token id ->"),
        ({"5": None}, TypeError, "logit_bias must be a number, got None"),
        ({"5": NAN}, ValueError, "logit_bias is nan; allowed: token id -> a finite number"),
        ({5.5: 1}, TypeError, "logit_bias must be an int, got 5.5; allowed: token ids"),
        ([1], TypeError, "logit_bias must be a dict, got [1]; token id -> a finite number"),
    ]:
        with pytest.raises(error) as raised:
            SamplingParams.from_optional(logit_bias=bias)
        assert str(raised.value).startswith(words)


def test_the_repr_is_vllms() -> None:
    """With the fields that are not in it, where they are not at their default."""
    assert repr(SamplingParams(temperature=0.5, stop="END")) == (
        "SamplingParams(n=1, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0, "
        "temperature=0.5, watermarking=None, top_p=1.0, top_k=0, min_p=0.0, seed=None, "
        "stop=['END'], stop_token_ids=[], bad_words=[], thinking_token_budget=None, "
        "include_stop_str_in_output=False, ignore_eos=False, max_tokens=16, min_tokens=0, "
        "logprobs=None, prompt_logprobs=None, skip_special_tokens=True, "
        "spaces_between_special_tokens=True, structured_outputs=None, extra_args=None)"
    )
    assert repr(SamplingParams(detokenize=False)).endswith("extra_args=None, detokenize=False)")
    again = eval(repr(SamplingParams(seed=3, logit_bias={5: 1.0})))
    assert again == SamplingParams(seed=3, logit_bias={5: 1.0})


def test_beam_search_params_stand_beside() -> None:
    """vLLM has both in this module."""
    from nanoserve import BeamSearchParams, sampling_params

    assert sampling_params.BeamSearchParams is BeamSearchParams


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
    assert all(math.isfinite(value) for value in (params.logit_bias or {}).values())
    assert params.allowed_token_ids is None or params.allowed_token_ids
    assert all(isinstance(stop, str) and stop for stop in params.stop or ())
    assert params.clone() == replace(params) == params
