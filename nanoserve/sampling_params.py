"""What may a request ask for?

One frozen dataclass, checked at construction: a SamplingParams that exists is valid, so neither the
scheduler nor the sampler checks again. The names, defaults and meanings are vLLM's, so that a line
of vLLM code works here:

    SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop=["\\n\\n"])

Left out for now: n > 1, penalties, min_tokens, bias and word lists; Python refuses their names.

vLLM: V0 and V1 share vllm/sampling_params.py.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
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
SEED_LIMIT = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How one request wants its tokens chosen, and when it wants to stop.

    Invariant: every instance is valid. Raises ValueError (out of range) or TypeError (wrong type)
    with what was given and what is allowed.
    """

    temperature: float = 1.0  # logits are divided by it; 0 is greedy (argmax)
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability; 1 is off
    top_k: int = 0  # keep the k likeliest tokens; 0 (or -1) is off
    min_p: float = 0.0  # drop tokens below min_p times the likeliest token's probability; 0 is off
    seed: int | None = None  # same seed, same text, whatever the batch; None: drawn by the engine
    max_tokens: int | None = 16  # tokens to generate at most; None: as many as the model length has
    ignore_eos: bool = False  # go on past end-of-sequence tokens
    stop: str | Seq[str] | None = None  # strings that end the output; not part of the text
    stop_token_ids: Seq[int] | None = None  # token ids that end the output, beside the EOS tokens
    include_stop_str_in_output: bool = False  # keep the stop string at the end of the text
    logprobs: int | None = None  # report this many likeliest tokens (and the sampled one) each step
    skip_special_tokens: bool = True  # leave <|im_end|> and its like out of the text
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        largest = sys.float_info.max  # infinity is not a temperature
        _check_number("temperature", self.temperature, 0, largest, "0 (greedy) or more")
        _check_number("top_p", self.top_p, 0, 1, "more than 0, up to 1 (off)")
        if self.top_p == 0:
            raise ValueError(
                "top_p is 0; allowed: more than 0, up to 1 (off). Greedy: temperature=0."
            )
        _check_int("top_k", self.top_k, -1, INT_LIMIT, "0 or -1 (off), 1 or more")
        _check_number("min_p", self.min_p, 0, 1, "0 (off) to 1")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, SEED_LIMIT, "None, or 0 to 2**63 - 1")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, INT_LIMIT, "None, or 1 or more")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, INT_LIMIT, "None, or 0 or more")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}.")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        self._freeze_stops()

    def _freeze_stops(self) -> None:
        """Store stop and stop_token_ids as tuples: hashable, and safe from the caller's edits."""
        for name, allowed in (
            ("stop", "a string or a list of strings"),
            ("stop_token_ids", "a list of token ids"),
        ):
            if not isinstance(getattr(self, name), (Iterable, type(None))):
                raise TypeError(f"{name} must be {allowed}, got {getattr(self, name)!r}.")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        for string in stop:
            if not isinstance(string, str) or not string:
                raise ValueError(f"stop holds {string!r}; allowed: non-empty strings.")
        stop_token_ids = tuple(self.stop_token_ids or ())
        for token_id in stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, INT_LIMIT, "token ids, 0 or more")
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        object.__setattr__(self, "top_k", max(self.top_k, 0))

    @property
    def is_greedy(self) -> bool:
        """True if the next token is always the likeliest one (vLLM's limit, too)."""
        return self.temperature < GREEDY_TEMPERATURE
