"""What may a request ask for?

One dataclass with vLLM's fields in vLLM's order, with vLLM's defaults and meanings. A line of vLLM
code works here:

    SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop=["\\n\\n"])

The values are checked at construction. A field may be assigned later, as in vLLM. Therefore each
request gets a clone(), and a clone is checked again: what the scheduler and the sampler see is
valid, and no later assignment can reach a request that is already queued:

    params.max_tokens = 9        the requests that are added from now on
    params.top_p = 2             the next request is refused: top_p is 2; allowed: above 0, up to 1

Limits of the model (is this token id in the vocabulary?) and of the engine (max_logprobs) are
checked when the request is added.

Left out: vLLM's fields in MISSING. They are here by name, and may be given with the value that
changes nothing.

vLLM: V0 and V1 share vllm/sampling_params.py.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from enum import Enum
from importlib import import_module
from itertools import islice
from typing import Any

from nanoserve.config import ABOVE_ZERO, SEED_LIMIT, check_bool, check_number
from nanoserve.exceptions import VLLMValidationError, brief, describe_error, explain_unknown
from nanoserve.inputs import as_python
from nanoserve.interrupts import unless_signal
from nanoserve.logger import warning_once

logger = logging.getLogger("nanoserve")


class RequestOutputKind(Enum):
    """How much each RequestOutput of an unfinished request carries."""

    CUMULATIVE = 0  # everything generated so far, after every step
    DELTA = 1  # only what is new since the last RequestOutput
    FINAL_ONLY = 2  # nothing until the request has finished


GREEDY_TEMPERATURE = 1e-5  # below it, dividing by the temperature would overflow
SMALLEST_TEMPERATURE = 0.01  # vLLM's: smaller ones are raised to it; 0 stays 0
INT_LIMIT = 2**31 - 1  # more tokens than any sequence has: larger numbers of tokens become this
FLOAT_LIMIT = 3.4e38  # of float32, the type of logits
SMALLEST_PENALTY = 1e-30  # a logit divided by less would overflow (vLLM's limit is above 0)
# Items of a list at most. Each step goes through the first two, at a few microseconds an item.
WORD_LIMIT = 1024  # strings, callables
BAD_WORDS_LIMIT = 2**15  # characters of all bad_words: each is tokenized twice
EDIT_LIMIT = 4096  # token ids that change a logit: stop_token_ids (for min_tokens), logit_bias
ID_LIMIT = 2**20  # token ids that are read once: more than any vocabulary has

# Of each number: type, smallest, largest, and the range in words.
LOGPROBS = (int, -1, math.inf, "None, 0 or more, or -1 for the whole vocabulary")
RANGES = {
    "n": (int, 1, 16384, "1 or more, up to 16384"),
    "presence_penalty": (float, -2, 2, "-2 to 2, 0 is off"),
    "frequency_penalty": (float, -2, 2, "-2 to 2, 0 is off"),
    "repetition_penalty": (
        float,
        SMALLEST_PENALTY,
        FLOAT_LIMIT,
        "1e-30 to 3.4e38; 1 is off, above 1 discourages repetition",
    ),
    "temperature": (float, 0, FLOAT_LIMIT, "0 (greedy) to 3.4e38"),
    "top_p": (float, ABOVE_ZERO, 1, "above 0, up to 1 (off); greedy is temperature=0"),
    "top_k": (int, -1, math.inf, "0 or -1 (off), 1 or more"),
    "min_p": (float, 0, 1, "0 (off) to 1"),
    "seed": (int, 0, SEED_LIMIT, "None or -1, or 0 to 2**63 - 1"),
    "max_tokens": (int, 1, math.inf, "None, or 1 or more"),
    "min_tokens": (int, 0, math.inf, "0 or more"),
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
}
PLAIN = {int, float, bool, str, type(None), RequestOutputKind}  # most values, by far
OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")  # None is allowed, too
FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_clone",
)
# vLLM's fields that nanoserve does not have: the values that change nothing, and what to use.
MISSING: dict[str, tuple[tuple[Any, ...], str]] = {
    "watermarking": ((None, False), "None or False"),
    "prompt_logprob_token_ids": ((None,), "None; prompt_logprobs=-1 has all tokens"),
    "prompt_logprob_start": ((None,), "None; prompt_logprobs starts at the first token"),
    "logprob_token_ids": ((None, []), "None; logprobs=-1 has all tokens"),
    "flat_logprobs": ((False,), "False: logprobs are a list of dicts"),
    "stream_interval": ((None, 1), "None or 1: each step has its output"),
    "thinking_token_budget": ((None, -1), "None or -1; max_tokens limits all tokens"),
    "repetition_detection": ((None,), "None; repetition_penalty discourages repetition"),
    "routed_experts_prompt_start": ((0,), "0"),
    "trace_decode_token_ids": ((None,), "None; a logits processor can force tokens"),
}
# Arguments of earlier versions of vLLM, and what to use.
REMOVED = {
    "best_of": "n completions and their cumulative_logprob (logprobs=0) let you keep the best.",
    "use_beam_search": "LLM.beam_search(prompts, BeamSearchParams(...)) searches.",
    "length_penalty": "BeamSearchParams(length_penalty=...) has it.",
    "early_stopping": "LLM.beam_search has its own rule for the end.",
    "guided_decoding": "structured_outputs=StructuredOutputsParams(...) has it.",
    "truncate_prompt_tokens": "prompts are never cut. Give the last token ids as the prompt.",
}
# What vLLM's repr shows, in its order.
# fmt: off
SHOWN = (
    "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature",
    "watermarking", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "bad_words",
    "thinking_token_budget", "include_stop_str_in_output", "ignore_eos", "max_tokens", "min_tokens",
    "logprobs", "prompt_logprobs", "skip_special_tokens", "spaces_between_special_tokens",
    "structured_outputs", "extra_args",
)
# fmt: on

# (output token ids, logits row) or (prompt token ids, output token ids, logits row) -> logits row
LogitsProcessor = Callable[..., Any]


@explain_unknown(REMOVED)
@dataclass(repr=False)
class SamplingParams:
    """How the tokens of one request are chosen, and when its output ends.

    Invariant: a new instance is valid, and so is each clone(). Numbers and arrays of NumPy and
    torch become Python's own. Raises VLLMValidationError, a ValueError, for a value out of range
    and TypeError for a wrong type; both say what was given and what is allowed.
    """

    n: int = 1  # completions of the prompt, each with a random stream of its own
    presence_penalty: float = 0.0  # subtracted from a token's logit once it is in the output
    frequency_penalty: float = 0.0  # subtracted for each time it is in the output
    repetition_penalty: float = 1.0  # divides (if negative: multiplies) logits of seen tokens
    temperature: float = 1.0  # divides the logits; 0 is greedy: top_p, top_k, min_p are off then
    watermarking: bool | None = None  # see MISSING
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability; 1 is off
    top_k: int = 0  # keep the k likeliest tokens; 0 (or -1) is off
    min_p: float = 0.0  # drop tokens below min_p times the likeliest token's probability; 0 is off
    seed: int | None = None  # of the random stream, in any batch; None or -1: drawn by the engine
    stop: str | Seq[str] | None = None  # strings that end the output; not part of the text
    stop_token_ids: Seq[int] | None = None  # token ids that end the output, beside the EOS tokens
    ignore_eos: bool = False  # continue after an end-of-sequence token
    max_tokens: int | None = 16  # tokens to generate at most; None: as many as the model length has
    min_tokens: int = 0  # the output does not stop (EOS, stop token, stop string) before
    logprobs: int | None = None  # report this many likeliest tokens, and the sampled one; -1: all
    prompt_logprobs: int | None = None  # as logprobs, for the tokens of the prompt
    prompt_logprob_token_ids: Any = None  # see MISSING
    prompt_logprob_start: int | None = None  # see MISSING
    logprob_token_ids: Seq[int] | None = None  # see MISSING
    flat_logprobs: bool = False  # see MISSING
    detokenize: bool = True  # make text of the tokens
    skip_special_tokens: bool = True  # leave special tokens such as <|im_end|> out of the text
    spaces_between_special_tokens: bool = True  # False needs skip_special_tokens
    include_stop_str_in_output: bool = False  # keep the stop string at the end of the text
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None  # see MISSING
    skip_clone: bool = False  # each request has a clone even so; it shares the values in extra_args
    structured_outputs: Any = None  # StructuredOutputsParams: the output obeys a grammar
    logit_bias: Mapping[int, float] | None = None  # token id -> added to its logit
    allowed_token_ids: Seq[int] | None = None  # the only tokens that may be sampled
    extra_args: Mapping[str, Any] | None = None  # carried along for a class of your own
    bad_words: Seq[str] | None = None  # never complete one of these (in the spellings vLLM bans)
    skip_reading_prefix_cache: bool | None = None  # compute all of the prompt; None: if needed
    thinking_token_budget: int | None = None  # see MISSING
    repetition_detection: Any = None  # see MISSING
    routed_experts_prompt_start: int = 0  # see MISSING
    trace_decode_token_ids: Seq[int] | None = None  # see MISSING
    logits_processors: Seq[LogitsProcessor] | None = None  # functions on one row of logits (V0's)

    def __post_init__(self) -> None:
        for name, value in self.__dict__.items():
            if type(value) not in PLAIN:
                setattr(self, name, as_python(value))
        self._normalize()
        for name, allowed in RANGES.items():
            value = getattr(self, name)
            if value is not None or name not in OPTIONAL:
                _check_number(name, value, *allowed)
        for name in FLAGS:
            check_bool(name, getattr(self, name))
        for name, (neutral, advice) in MISSING.items():
            if getattr(self, name) not in neutral:
                value = getattr(self, name)
                message = (
                    f"{name} is {brief(value)}, and nanoserve does not have it; allowed: {advice}."
                )
                raise _error(name, value, message)
        check_output_kind(self.output_kind)
        self._copy_containers()
        self._check_combinations()
        self.top_k = min(max(self.top_k, 0), INT_LIMIT)
        self.min_tokens = min(self.min_tokens, INT_LIMIT)
        if self.max_tokens is not None:
            self.max_tokens = min(self.max_tokens, INT_LIMIT)
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    def _normalize(self) -> None:
        """Values for which vLLM has another spelling."""
        if self.seed == -1:
            self.seed = None
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
        temperature = self.temperature
        if isinstance(temperature, float) and 0 < temperature < SMALLEST_TEMPERATURE:
            # Once: an assigned value is seen by each clone.
            message = f"temperatures above 0 and below {SMALLEST_TEMPERATURE} are raised to it."
            warning_once(logger, message)
            self.temperature = SMALLEST_TEMPERATURE

    def _check_combinations(self) -> None:
        """Pairs of fields that contradict each other."""
        if self.n > 1 and self.is_greedy:
            message = (
                f"n is {self.n} with temperature {self.temperature}: greedy completions are all "
                "the same. Raise the temperature, or set n=1."
            )
            raise _error("n", self.n, message)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            message = (
                f"min_tokens is {brief(self.min_tokens)}, more than max_tokens {self.max_tokens}. "
                "Lower the first or raise the second."
            )
            raise _error("min_tokens", self.min_tokens, message)
        if self.stop and not self.detokenize:
            message = "stop strings are found in text: they need detokenize=True."
            raise _error("stop", self.stop, message)
        if not (self.spaces_between_special_tokens or self.skip_special_tokens):
            message = (
                "spaces_between_special_tokens is False with skip_special_tokens=False: nanoserve "
                "shows special tokens as the tokenizer writes them. Leave it True."
            )
            raise _error("spaces_between_special_tokens", False, message)

    def _copy_containers(self) -> None:
        """Replace the caller's lists and dicts by checked copies: later edits change nothing."""
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        allowed = "a string or a list of strings"
        self.stop = self._copy_list("stop", _check_word, allowed, WORD_LIMIT) or []
        allowed = "a list of strings"
        self.bad_words = self._copy_list("bad_words", _check_bad_word, allowed, WORD_LIMIT) or []
        self.stop_token_ids = (
            self._copy_list("stop_token_ids", _check_token_id, TOKEN_IDS, EDIT_LIMIT) or []
        )
        self.bad_words = list(dict.fromkeys(self.bad_words))
        if (number := sum(map(len, self.bad_words))) > BAD_WORDS_LIMIT:
            message = f"bad_words has {number} characters in all; allowed: {BAD_WORDS_LIMIT}."
            raise _error("bad_words", self.bad_words, message)
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids))
        self.allowed_token_ids = self._copy_list(
            "allowed_token_ids", _check_token_id, TOKEN_IDS, ID_LIMIT
        )
        if self.allowed_token_ids == []:
            message = "allowed_token_ids is empty; allowed: None, or at least one id."
            raise _error("allowed_token_ids", [], message)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = list(dict.fromkeys(self.allowed_token_ids))
        allowed = "a list of callables"
        self.logits_processors = self._copy_list(
            "logits_processors", _check_processor, allowed, WORD_LIMIT
        )
        self.logit_bias = self._copy_logit_bias()
        if self.structured_outputs is not None:
            self.structured_outputs = _copy_structured_outputs(self.structured_outputs)
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise TypeError(f"extra_args must be a dict, got {brief(self.extra_args)}.")
        self.extra_args = None if self.extra_args is None else dict(self.extra_args)
        skips = self.skip_reading_prefix_cache
        if skips is not None:
            check_bool("skip_reading_prefix_cache", skips)
        self.skip_reading_prefix_cache = bool(skips) or self.prompt_logprobs is not None

    def _copy_list(
        self, name: str, check: Callable[[str, Any], None], allowed: str, limit: int
    ) -> list[Any] | None:
        """A list of the field's items, at most `limit`, each of them checked; None if the field is
        None."""
        values = getattr(self, name)
        if values is None:
            return None
        no_list = (str, bytes, bytearray, Mapping)
        if isinstance(values, no_list) or not hasattr(values, "__iter__"):
            raise TypeError(f"{name} must be {allowed}, got {brief(values)}.")
        items = [as_python(item) for item in islice(values, limit + 1)]
        if len(items) > limit:
            message = f"{name} has more than {limit} items; allowed: up to {limit}."
            raise _error(name, values, message)
        for item in items:
            check(name, item)
        return items

    def _copy_logit_bias(self) -> dict[int, float] | None:
        """A copy with checked ids and values."""
        if self.logit_bias is None:
            return None
        allowed = "token id -> a finite number, -3.4e38 to 3.4e38"
        if not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias must be a dict, got {brief(self.logit_bias)}; {allowed}.")
        if len(self.logit_bias) > EDIT_LIMIT:
            message = f"logit_bias has more than {EDIT_LIMIT} items; allowed: up to {EDIT_LIMIT}."
            raise _error("logit_bias", self.logit_bias, message)
        bias = {as_python(key): as_python(value) for key, value in self.logit_bias.items()}
        for token_id, value in bias.items():
            _check_token_id("logit_bias", token_id)
            _check_number("logit_bias", value, float, -FLOAT_LIMIT, FLOAT_LIMIT, allowed)
        return bias

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """SamplingParams as a server makes them: None stands for the default of n, temperature,
        top_p and the penalties; logit_bias may have strings for token ids, and is cut to -100 to
        100."""
        defaults = ("n", "temperature", "top_p", *(name for name in FIELDS if "penalty" in name))
        given = {k: v for k, v in given.items() if v is not None or k not in defaults}
        bias = given.get("logit_bias")
        if isinstance(bias, Mapping):  # else refused below
            try:
                given["logit_bias"] = {
                    int(key) if isinstance(key, str) else key: _clip(as_python(value))
                    for key, value in bias.items()
                }
            except ValueError:
                message = f"logit_bias is {brief(bias)}; allowed: token id -> a number."
                raise _error("logit_bias", bias, message) from None
        return cls(**given)

    @classmethod
    def from_generation_config(cls, recommended: Mapping[str, Any]) -> SamplingParams:
        """What a checkpoint's generation_config.json recommends, over the defaults above. Raises
        ValueError if it recommends what is not allowed."""
        names = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
        names |= {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
        given = {ours: recommended.get(theirs) for theirs, ours in names.items()}
        try:
            return cls(**{name: value for name, value in given.items() if value is not None})
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"generation_config.json of the checkpoint recommends a bad value: {error} Correct "
                "the file, or delete it: then the defaults of SamplingParams hold."
            ) from error

    def clone(self) -> SamplingParams:
        """A copy that shares no list or dict with this instance, checked again. Raises as the
        constructor does, if a field was assigned a bad value. With skip_clone the values within
        extra_args are shared: a value that cannot be copied needs it."""
        clone = copy.copy(self)
        clone.__post_init__()
        if not self.skip_clone:
            try:
                clone.extra_args = copy.deepcopy(clone.extra_args)
            except unless_signal(Exception) as error:  # of any type: a lock, an open file
                raise TypeError(
                    f"extra_args holds a value that cannot be copied ({describe_error(error)}). "
                    "With skip_clone=True it is shared instead."
                ) from error
        return clone

    @property
    def is_greedy(self) -> bool:
        """True if the next token is always the likeliest one (vLLM's limit, too)."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True if the tokens so far change the logits of the next one."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def changes_logits(self) -> bool:
        """True if some logits are not the model's own when a token is chosen from them. (Grammars
        are no part of this.)"""
        return bool(
            self.has_penalties
            or self.min_tokens
            or self.bad_words
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.logits_processors
        )

    def __repr__(self) -> str:
        """vLLM's, and behind it the other fields that are not at their default."""
        default = SamplingParams()
        others = [name for name in FIELDS if getattr(self, name) != getattr(default, name)]
        names = [*SHOWN, *(name for name in others if name not in SHOWN)]
        return f"SamplingParams({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


FIELDS = tuple(each.name for each in fields(SamplingParams))
TOKEN_IDS = "a list of token ids"


def _check_word(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        message = f"{name} holds {brief(value)}; allowed: non-empty strings."
        raise _error(name, value, message)


def _check_bad_word(name: str, value: Any) -> None:
    """Half of a surrogate pair cannot be tokenized."""
    _check_word(name, value)
    try:
        value.encode()
    except UnicodeEncodeError:
        message = f"{name} holds {brief(value)}; allowed: strings of whole characters."
        raise _error(name, value, message) from None


def _check_token_id(name: str, value: Any) -> None:
    _check_number(name, value, int, 0, INT_LIMIT, "token ids, 0 to 2**31 - 1")


def _check_number(name: str, value: Any, *allowed: Any) -> None:
    """config.check_number, with vLLM's exception."""
    try:
        check_number(name, value, *allowed)
    except ValueError as error:
        raise _error(name, value, str(error)) from None


def _clip(value: Any) -> Any:
    """A number, cut to -100 to 100. What is no number is left as it is."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return min(max(value, -100.0), 100.0) if is_number else value  # NaN stays NaN


def _error(name: str, value: Any, message: str) -> VLLMValidationError:
    return VLLMValidationError(message, parameter=name, value=value)


def check_output_kind(value: Any) -> None:
    """Raise TypeError for what is no RequestOutputKind."""
    if not isinstance(value, RequestOutputKind):
        raise TypeError(f"output_kind must be a RequestOutputKind, got {brief(value)}.")


def _copy_structured_outputs(value: Any) -> Any:
    """A copy of the chapter's StructuredOutputsParams, checked again."""
    try:
        chapter = import_module("nanoserve.extras.structured_output.params")
    except ModuleNotFoundError as error:
        message = (
            "structured_outputs needs nanoserve/extras/structured_output, and it is not there: "
            f"{error}. Leave structured_outputs out."
        )
        raise _error("structured_outputs", value, message) from error
    if not isinstance(value, chapter.StructuredOutputsParams):
        message = (
            f"structured_outputs is {brief(value)}; allowed: StructuredOutputsParams(json=..., or "
            "regex=, choice=, grammar=, json_object=True, structural_tag=)."
        )
        raise _error("structured_outputs", value, message)
    return replace(value)


def _check_processor(name: str, value: Any) -> None:
    """It must take what the sampler gives it: two arguments, or three if that many have no
    default."""
    if not callable(value):
        raise TypeError(f"{name} holds {brief(value)}; allowed: callables on a row of logits.")
    try:
        signature = inspect.signature(value)
        empty = inspect.Parameter.empty
        required = sum(each.default is empty for each in signature.parameters.values())
        signature.bind(*range(3 if required == 3 else 2))
    except Exception as error:  # of any type: a builtin, or a __signature__ of its own
        raise TypeError(
            f"{name} holds {brief(value)}, which cannot be called with a row of logits "
            f"({describe_error(error)}); allowed: functions with the parameters (output_token_ids, "
            "logits) or (prompt_token_ids, output_token_ids, logits). Write a lambda around it."
        ) from error


def __getattr__(name: str) -> Any:
    """vLLM has these in this module; here they belong to chapters."""
    if name in ("BeamSearchParams", "StructuredOutputsParams"):
        import nanoserve

        return getattr(nanoserve, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
