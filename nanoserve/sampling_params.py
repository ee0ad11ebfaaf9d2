"""What may a request ask for?

One dataclass with vLLM's fields, defaults and meanings. A line of vLLM code works here:

    SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64, stop=["\\n\\n"])

The values are checked at construction. A field may be assigned later, as in vLLM. Therefore each
request gets a clone(), and a clone is checked again: what the scheduler and the sampler see is
valid, and no later assignment can reach a request that is already queued.

Limits of the model (is this token id in the vocabulary?) and of the engine (max_logprobs) are
checked when the request is added. Three fields of vLLM change nothing here: they stand last.

vLLM: V0 and V1 share vllm/sampling_params.py.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any


class RequestOutputKind(Enum):
    """How much each RequestOutput of an unfinished request carries."""

    CUMULATIVE = 0  # everything generated so far, after every step
    DELTA = 1  # only what is new since the last RequestOutput
    FINAL_ONLY = 2  # nothing until the request has finished


GREEDY_TEMPERATURE = 1e-5  # below it, dividing by the temperature would overflow
SMALLEST_TEMPERATURE = 0.01  # vLLM's: smaller ones are raised to it; 0 stays 0
# Of each number: type, smallest, largest, and the range in words.
RANGES: dict[str, tuple[Any, float, float, str]] = {
    "n": (int, 1, 16384, "1 to 16384"),
    "presence_penalty": (float, -2, 2, "-2 to 2, 0 is off"),
    "frequency_penalty": (float, -2, 2, "-2 to 2, 0 is off"),
    "repetition_penalty": (float, 1e-30, 3.4e38, "above 0; 1 is off"),
    "temperature": (float, 0, 3.4e38, "0 (greedy) or more"),
    "top_p": (float, math.ulp(0), 1, "above 0, up to 1 (off)"),
    "top_k": (int, -1, math.inf, "0 or -1 (off), 1 or more"),
    "min_p": (float, 0, 1, "0 (off) to 1"),
    "seed": (int, 0, 2**63 - 1, "None, or 0 to 2**63 - 1"),
    "max_tokens": (int, 1, math.inf, "None, or 1 or more"),
    "min_tokens": (int, 0, math.inf, "0 or more"),
    "logprobs": (int, -1, math.inf, "None, 0 or more, or -1 for the whole vocabulary"),
    "prompt_logprobs": (int, -1, math.inf, "None, 0 or more, or -1 for the whole vocabulary"),
}
# Of each list: the type of its items.
LISTS: dict[str, Any] = {
    "stop": str,
    "bad_words": str,
    "stop_token_ids": int,
    "allowed_token_ids": int,
    "logits_processors": Callable,
}

# (output token ids, logits row) or (prompt token ids, output token ids, logits row) -> logits row
LogitsProcessor = Callable[..., Any]


def __getattr__(name: str) -> Any:
    """vLLM has the parameters of its chapters in this module; here they are in the package."""
    import nanoserve

    return nanoserve.__getattr__(name)


@dataclass
class SamplingParams:
    """How the tokens of one request are chosen, and when its output ends.

    Invariant: a new instance is valid, and so is each clone(). Raises ValueError for a value out of
    range and TypeError for a wrong type; both say what was given and what is allowed.
    """

    n: int = 1  # completions of the prompt, each with a random stream of its own
    presence_penalty: float = 0.0  # subtracted from a token's logit once it is in the output
    frequency_penalty: float = 0.0  # subtracted for each time it is in the output
    repetition_penalty: float = 1.0  # divides (if negative: multiplies) logits of seen tokens
    temperature: float = 1.0  # divides the logits; 0 is greedy: top_p, top_k, min_p are off then
    top_p: float = 1.0  # keep the smallest set of tokens with at least this probability; 1 is off
    top_k: int = 0  # keep the k likeliest tokens; 0 (or -1) is off
    min_p: float = 0.0  # drop tokens below min_p times the likeliest token's probability; 0 is off
    seed: int | None = None  # of the random stream, in any batch; None: drawn by the engine
    stop: str | Seq[str] | None = None  # strings that end the output; not part of the text
    stop_token_ids: Seq[int] | None = None  # token ids that end the output, beside the EOS tokens
    ignore_eos: bool = False  # continue after an end-of-sequence token
    max_tokens: int | None = 16  # tokens to generate at most; None: as many as the model length has
    min_tokens: int = 0  # the output does not stop (EOS, stop token, stop string) before
    logprobs: int | None = None  # report this many likeliest tokens, and the sampled one; -1: all
    prompt_logprobs: int | None = None  # as logprobs, for the tokens of the prompt
    detokenize: bool = True  # make text of the tokens
    skip_special_tokens: bool = True  # leave special tokens such as <|im_end|> out of the text
    include_stop_str_in_output: bool = False  # keep the stop string at the end of the text
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None  # token id -> added to its logit
    allowed_token_ids: Seq[int] | None = None  # the only tokens that may be sampled
    extra_args: Mapping[str, Any] | None = None  # carried along for a class of your own
    bad_words: Seq[str] | None = None  # never complete one of these (in the spellings vLLM bans)
    skip_reading_prefix_cache: bool | None = None  # compute all of the prompt; None: if needed
    logits_processors: Seq[LogitsProcessor] | None = None  # functions on one row of logits (V0's)
    structured_outputs: Any = None  # a grammar: for chapters/structured_output
    spaces_between_special_tokens: bool = True  # a fast tokenizer never puts any
    flat_logprobs: bool = False  # logprobs are a list of dicts, whatever this says
    skip_clone: bool = False  # each request has a clone

    def __post_init__(self) -> None:
        self._check_switches_and_numbers()
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, kind in LISTS.items():
            self._copy_list(name, kind)
        if self.logit_bias is not None:
            self.logit_bias = {int(key): float(value) for key, value in self.logit_bias.items()}
            if not all(map(math.isfinite, self.logit_bias.values())):
                raise ValueError("logit_bias must hold finite numbers.")
        if self.allowed_token_ids == []:
            raise ValueError("allowed_token_ids is empty; allowed: None, or at least one id.")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind must be a RequestOutputKind, got {self.output_kind!r}.")
        if self.n > 1 and self.is_greedy:
            raise ValueError(f"n is {self.n}, but greedy completions are all the same. Set n=1.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}.")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are found in text: they need detokenize=True.")
        if 0 < self.temperature < SMALLEST_TEMPERATURE:
            self.temperature = SMALLEST_TEMPERATURE
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        self.top_k = max(self.top_k, 0)
        if not self.skip_reading_prefix_cache:  # their logits are needed
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None

    def _check_switches_and_numbers(self) -> None:
        for each in fields(self):
            if each.type == "bool" and not isinstance(value := getattr(self, each.name), bool):
                raise TypeError(f"{each.name} must be True or False, got {value!r}.")
        self.seed = None if self.seed == -1 else self.seed
        self.logprobs = 1 if self.logprobs is True else self.logprobs
        self.prompt_logprobs = 1 if self.prompt_logprobs is True else self.prompt_logprobs
        for name, (kind, low, high, allowed) in RANGES.items():
            value = getattr(self, name)
            if value is None and allowed.startswith("None"):
                continue
            if hasattr(value, "item"):  # a number of NumPy or torch becomes Python's
                setattr(self, name, value := value.item())
            if isinstance(value, bool) or not isinstance(value, (kind, int)):
                raise TypeError(f"{name} must be {kind.__name__}, got {value!r}.")
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; allowed: {allowed}.")

    def _copy_list(self, name: str, kind: Any) -> None:
        """Replace the caller's list by a checked copy: later edits change nothing."""
        if (values := getattr(self, name)) is None:
            return
        if isinstance(values, (str, bytes)) or not isinstance(values, Seq):
            raise TypeError(f"{name} must be a list, got {values!r}.")
        for value in values:
            if not isinstance(value, kind) or value == "":
                raise TypeError(f"{name} holds {value!r}; allowed: {kind.__name__}, not empty.")
        setattr(self, name, list(values))

    @classmethod
    def from_generation_config(cls, recommended: Mapping[str, Any]) -> SamplingParams:
        """What a checkpoint's generation_config.json recommends, over the defaults above."""
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        given = {name: recommended.get(name) for name in names}
        return cls.from_optional(**given, max_tokens=recommended.get("max_new_tokens"))

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """None means the default, also where a field cannot be None."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    def clone(self) -> SamplingParams:
        """A copy that shares no list or dict with this instance, checked again."""
        clone = copy.copy(self)
        clone.__post_init__()
        clone.extra_args = copy.deepcopy(clone.extra_args)
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
        """True if some logits are not the model's own when a token is chosen from them."""
        edits = (self.bad_words, self.logit_bias, self.allowed_token_ids, self.logits_processors)
        return bool(self.has_penalties or self.min_tokens or any(edits))
