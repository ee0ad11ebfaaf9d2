"""What may a request ask for?

One frozen dataclass, checked at construction: every SamplingParams is valid, so neither the
scheduler nor the sampler checks again. The names, defaults and meanings are vLLM's. A line of vLLM
code works here:

    SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop=["\\n\\n"])

Limits of the model (is this token id in the vocabulary?) and of the engine (max_logprobs) are
checked when the request is added.

vLLM: V0 and V1 share vllm/sampling_params.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from nanoserve.config import ABOVE_ZERO, SEED_LIMIT, check_bool, check_number


class RequestOutputKind(Enum):
    """How much each RequestOutput of an unfinished request carries."""

    CUMULATIVE = 0  # everything generated so far, after every step
    DELTA = 1  # only what is new since the last RequestOutput
    FINAL_ONLY = 2  # nothing until the request has finished


GREEDY_TEMPERATURE = 1e-5  # below it, dividing by the temperature would overflow
INT_LIMIT = 2**31 - 1
FLOAT_LIMIT = 3.4e38  # of float32, the type of logits

# Of each number: type, smallest, largest, and the range in words.
LOGPROBS = (int, -1, INT_LIMIT, "None, 0 or more, or -1 for the whole vocabulary")
RANGES = {
    "n": (int, 1, INT_LIMIT, "1 or more"),
    "temperature": (float, 0, FLOAT_LIMIT, "0 (greedy) or more"),
    "top_p": (float, ABOVE_ZERO, 1, "above 0, up to 1 (off); greedy is temperature=0"),
    "top_k": (int, -1, INT_LIMIT, "0 or -1 (off), 1 or more"),
    "min_p": (float, 0, 1, "0 (off) to 1"),
    "presence_penalty": (float, -2, 2, "-2 to 2, 0 is off"),
    "frequency_penalty": (float, -2, 2, "-2 to 2, 0 is off"),
    "repetition_penalty": (
        float,
        ABOVE_ZERO,
        FLOAT_LIMIT,
        "above 0; 1 is off, above 1 discourages repetition",
    ),
    "seed": (int, 0, SEED_LIMIT, "None, or 0 to 2**63 - 1"),
    "max_tokens": (int, 1, INT_LIMIT, "None, or 1 or more"),
    "min_tokens": (int, 0, INT_LIMIT, "0 or more"),
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
}
OPTIONAL = ("seed", "max_tokens", "logprobs", "prompt_logprobs")  # None is allowed, too
FLAGS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")

# (output token ids, logits row) or (prompt token ids, output token ids, logits row) -> logits row
LogitsProcessor = Callable[..., Any]


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when its output ends.

    Invariant: every instance is valid. Raises ValueError (out of range) or TypeError (wrong type)
    with what was given and what is allowed.
    """

    n: int = 1  # completions of the prompt, each with a random stream of its own
    temperature: float = 1.0  # divides the logits; 0 is greedy (argmax)
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability; 1 is off
    top_k: int = 0  # keep the k likeliest tokens; 0 (or -1) is off
    min_p: float = 0.0  # drop tokens below min_p times the likeliest token's probability; 0 is off
    presence_penalty: float = 0.0  # subtracted from a token's logit once it is in the output
    frequency_penalty: float = 0.0  # subtracted for each time it is in the output
    repetition_penalty: float = 1.0  # divides (if negative: multiplies) logits of seen tokens
    seed: int | None = None  # same seed, same text, whatever the batch; None: drawn by the engine
    max_tokens: int | None = 16  # tokens to generate at most; None: as many as the model length has
    min_tokens: int = 0  # the output does not stop (EOS, stop token, stop string) before
    ignore_eos: bool = False  # continue after an end-of-sequence token
    stop: str | Seq[str] | None = None  # strings that end the output; not part of the text
    stop_token_ids: Seq[int] | None = None  # token ids that end the output, beside the EOS tokens
    include_stop_str_in_output: bool = False  # keep the stop string at the end of the text
    logprobs: int | None = None  # report this many likeliest tokens, and the sampled one; -1: all
    prompt_logprobs: int | None = None  # as logprobs, for the tokens of the prompt
    # token id -> added to its logit, -100 to 100
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Seq[int] | None = None  # the only tokens that may be sampled
    bad_words: Seq[str] | None = None  # never complete one of these (in the spellings vLLM bans)
    logits_processors: Seq[LogitsProcessor] | None = None  # Python functions on one row of logits
    detokenize: bool = True  # make text of the tokens
    skip_special_tokens: bool = True  # leave special tokens such as <|im_end|> out of the text
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        for name, allowed in RANGES.items():
            if getattr(self, name) is not None or name not in OPTIONAL:
                check_number(name, getattr(self, name), *allowed)
        for name in FLAGS:
            check_bool(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}.")
        self._check_combinations()
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._freeze("stop", _check_word, "a string or a list of strings")
        self._freeze("bad_words", _check_word, "a list of strings")
        self._freeze("stop_token_ids", _check_token_id, "a list of token ids")
        self._freeze("logits_processors", _check_callable, "a list of callables")
        if self.allowed_token_ids is not None:
            self._freeze("allowed_token_ids", _check_token_id, "a list of token ids")
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is empty; allowed: None, or at least one id.")
        self._freeze_logit_bias()
        object.__setattr__(self, "top_k", max(self.top_k, 0))

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

    def _freeze(self, name: str, check: Callable[[str, Any], None], allowed: str) -> None:
        """Replace a list by a tuple of its checked items: later edits of the list change nothing.
        None becomes ()."""
        values = getattr(self, name)
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
        """Replace the dict by a copy with checked ids and values."""
        allowed = "token id -> -100 to 100"
        if self.logit_bias is not None and not isinstance(self.logit_bias, Mapping):
            raise TypeError(f"logit_bias must be a dict, got {self.logit_bias!r}; {allowed}.")
        bias = dict(self.logit_bias or {})
        for token_id, value in bias.items():
            _check_token_id("logit_bias", token_id)
            check_number("logit_bias", value, float, -100, 100, allowed)
        object.__setattr__(self, "logit_bias", bias)

    @classmethod
    def from_generation_config(cls, recommended: Mapping[str, Any]) -> SamplingParams:
        """What a checkpoint's generation_config.json recommends, over the defaults above."""
        names = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
        names |= {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
        given = {ours: recommended.get(theirs) for theirs, ours in names.items()}
        return cls(**{name: value for name, value in given.items() if value is not None})

    @property
    def is_greedy(self) -> bool:
        """True if the next token is always the likeliest one (vLLM's limit, too)."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True if the tokens so far change the logits of the next one."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)


def _check_word(name: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} holds {value!r}; allowed: non-empty strings.")


def _check_token_id(name: str, value: Any) -> None:
    check_number(name, value, int, 0, INT_LIMIT, "token ids, 0 or more")


def _check_callable(name: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(f"{name} holds {value!r}; allowed: callables on a row of logits.")
