"""What may a request ask for?

One frozen dataclass, checked at construction: a SamplingParams that exists is valid, so neither the
scheduler nor the sampler checks again. The names, defaults and meanings are vLLM's, so that a line
of vLLM code works here:

    SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop=["\\n\\n"])

What depends on the model (is this token id in the vocabulary?) or on the engine (max_logprobs) is
checked when the request is added.

vLLM: V0 and V1 share vllm/sampling_params.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class RequestOutputKind(Enum):
    """How much each RequestOutput of an unfinished request carries."""

    CUMULATIVE = 0  # everything generated so far, after every step
    DELTA = 1  # only what is new since the last RequestOutput
    FINAL_ONLY = 2  # nothing until the request has finished


def _check_number(name: str, value: Any, low: float, high: float, allowed: str) -> None:
    """Raise unless `value` is a real number with low <= value <= high (NaN never is)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}; allowed: {allowed}.")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}.")


def _check_int(name: str, value: Any, low: int, high: int, allowed: str) -> None:
    """Raise unless `value` is an int with low <= value <= high."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}; allowed: {allowed}.")
    if not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}.")


GREEDY_TEMPERATURE = 1e-5  # below it, dividing by the temperature would overflow
INT_LIMIT = 2**31 - 1
LARGEST = 3.4e38  # of float32, in which logits are
SEED_LIMIT = 2**63 - 1


# (output token ids, logits row) or (prompt token ids, output token ids, logits row) -> logits row
LogitsProcessor = Callable[..., Any]


@dataclass(frozen=True)
class SamplingParams:
    """How one request wants its tokens chosen, and when it wants to stop.

    Invariant: every instance is valid. Raises ValueError (out of range) or TypeError (wrong type)
    with what was given and what is allowed.
    """

    n: int = 1  # completions of the prompt, each with a random stream of its own
    temperature: float = 1.0  # logits are divided by it; 0 is greedy (argmax)
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability; 1 is off
    top_k: int = 0  # keep the k likeliest tokens; 0 (or -1) is off
    min_p: float = 0.0  # drop tokens below min_p times the likeliest token's probability; 0 is off
    presence_penalty: float = 0.0  # subtracted from a token's logit once it is in the output
    frequency_penalty: float = 0.0  # subtracted for each time it is in the output
    repetition_penalty: float = 1.0  # divides (multiplies, if negative) logits seen in all the text
    seed: int | None = None  # same seed, same text, whatever the batch; None: drawn by the engine
    max_tokens: int | None = 16  # tokens to generate at most; None: as many as the model length has
    min_tokens: int = 0  # no EOS, stop token or stop string before so many
    ignore_eos: bool = False  # go on past end-of-sequence tokens
    stop: str | Seq[str] | None = None  # strings that end the output; not part of the text
    stop_token_ids: Seq[int] | None = None  # token ids that end the output, beside the EOS tokens
    include_stop_str_in_output: bool = False  # keep the stop string at the end of the text
    logprobs: int | None = None  # report so many likeliest tokens (and the sampled one); -1: all
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    # token id -> added to its logit, -100 to 100
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Seq[int] | None = None  # nothing but these
    bad_words: Seq[str] | None = None  # never complete one of these (in the spellings vLLM bans)
    logits_processors: Seq[LogitsProcessor] | None = None  # Python's turn at the logits of one row
    detokenize: bool = True  # make text of the tokens
    skip_special_tokens: bool = True  # leave <|im_end|> and its like out of the text
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_combinations()
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._freeze("stop", stop, _check_word, "a string or a list of strings")
        self._freeze("bad_words", self.bad_words, _check_word, "a list of strings")
        self._freeze("stop_token_ids", self.stop_token_ids, _check_token_id, "a list of token ids")
        processors = self.logits_processors
        self._freeze("logits_processors", processors, _check_callable, "a list of callables")
        if self.allowed_token_ids is not None:
            allowed = self.allowed_token_ids
            self._freeze("allowed_token_ids", allowed, _check_token_id, "a list of token ids")
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is empty; allowed: None, or at least one id.")
        self._freeze_logit_bias()
        object.__setattr__(self, "top_k", max(self.top_k, 0))

    def _check_numbers(self) -> None:
        """Each number and flag on its own."""
        _check_int("n", self.n, 1, INT_LIMIT, "1 or more")
        _check_number("temperature", self.temperature, 0, LARGEST, "0 (greedy) or more")
        _check_number("top_p", self.top_p, 0, 1, "above 0, up to 1 (off)")
        if self.top_p == 0:
            raise ValueError("top_p is 0; allowed: above 0, up to 1. Greedy is temperature=0.")
        _check_int("top_k", self.top_k, -1, INT_LIMIT, "0 or -1 (off), 1 or more")
        _check_number("min_p", self.min_p, 0, 1, "0 (off) to 1")
        _check_number("presence_penalty", self.presence_penalty, -2, 2, "-2 to 2, 0 is off")
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2, "-2 to 2, 0 is off")
        allowed = "above 0; 1 is off, above 1 discourages repetition"
        _check_number("repetition_penalty", self.repetition_penalty, 0, LARGEST, allowed)
        if self.repetition_penalty == 0:
            raise ValueError(f"repetition_penalty is 0; allowed: {allowed}.")
        _check_int("min_tokens", self.min_tokens, 0, INT_LIMIT, "0 or more")
        optional = {
            "seed": (0, SEED_LIMIT, "None, or 0 to 2**63 - 1"),
            "max_tokens": (1, INT_LIMIT, "None, or 1 or more"),
            "logprobs": (-1, INT_LIMIT, "None, 0 or more, or -1 for the whole vocabulary"),
            "prompt_logprobs": (-1, INT_LIMIT, "None, 0 or more, or -1 for the whole vocabulary"),
        }
        for name, (low, high, allowed) in optional.items():
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low, high, allowed)
        flags = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")
        for name in flags:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}.")

    def _check_combinations(self) -> None:
        """Pairs of fields that contradict each other."""
        if self.n > 1 and self.is_greedy:
            raise ValueError(
                f"n is {self.n} with temperature {self.temperature}: greedy completions are all "
                "the same. Raise the temperature, or set n=1."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}. Lower "
                "the first or raise the second."
            )
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are found in text: they need detokenize=True.")

    def _freeze(
        self, name: str, values: Any, check: Callable[[str, Any], None], allowed: str
    ) -> None:
        """Store a list of checked items as a tuple, safe from the caller's later edits."""
        try:
            items = () if values is None else tuple(values)
        except TypeError:
            items = None
        if items is None or isinstance(values, (str, bytes)):
            raise TypeError(f"{name} must be {allowed}, got {values!r}.")
        for item in items:
            check(name, item)
        object.__setattr__(self, name, items)

    def _freeze_logit_bias(self) -> None:
        """Store a copy, its ids and values checked."""
        allowed = "token id -> -100 to 100"
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias must be a dict, got {self.logit_bias!r}; {allowed}.")
        bias = dict(self.logit_bias or {})
        for token_id, value in bias.items():
            _check_token_id("logit_bias", token_id)
            _check_number("logit_bias", value, -100, 100, allowed)
        object.__setattr__(self, "logit_bias", bias)

    @property
    def is_greedy(self) -> bool:
        """True if the next token is always the likeliest one (vLLM's limit, too)."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True if what was said before changes what comes next."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)


def _check_word(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} holds {value!r}; allowed: non-empty strings.")


def _check_token_id(name: str, value: Any) -> None:
    _check_int(name, value, 0, INT_LIMIT, "token ids, 0 or more")


def _check_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} holds {value!r}; allowed: callables on a row of logits.")
