"""What is speculated, how far, and for whom?

speculative_config is a dict (or its JSON text, on the command line) with vLLM's keys:

    LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
    --speculative-config '{"method": "suffix"}'

*When?* More tokens in a step cost time when the batch is large. `disable_by_batch_size` (of vLLM's
V0) is a limit for running sequences; `num_speculative_tokens_per_batch_size` (of 0.32) lists
(from, to, number of drafts).

Left out: vLLM's other methods, quantized drafters, drafters on several ranks.

vLLM: SpeculativeConfig in vllm/config.py (V0); vllm/config/speculative.py (V1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from reprlib import repr as brief
from typing import Any

INT64 = 2**63 - 1
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 3}'
# method -> module of this folder, class
METHODS = {
    "ngram": ("proposer", "NgramProposer"),
    "suffix": ("suffix", "SuffixDecodingProposer"),
    "draft_model": ("draft_model", "DraftModelProposer"),
    "medusa": ("medusa", "MedusaProposer"),
    "eagle": ("eagle", "EagleProposer"),
    "custom_class": ("", ""),  # `model` is package.module.ClassName
}
NEEDS_MODEL = ("draft_model", "medusa", "eagle", "custom_class")
HAS_KV_CACHE = ("draft_model", "eagle")  # write keys and values at the positions they draft
CHOICES = {
    "method": tuple(METHODS),
    "rejection_sample_method": ("strict", "standard"),
    "draft_sample_method": ("probabilistic", "greedy"),
}
# (kind, smallest, largest number, the range in words)
RANGES = {
    "num_speculative_tokens": (int, 1, 1000, "1 to 1000"),
    "prompt_lookup_max": (int, 1, INT64, "1 or more"),
    "prompt_lookup_min": (int, 1, INT64, "1 or more"),
    "suffix_decoding_max_tree_depth": (int, 1, 1000, "1 to 1000"),
    "suffix_decoding_max_cached_requests": (int, 0, INT64, "0 or more"),
    "suffix_decoding_max_spec_factor": (float, 0, 1000, "0 to 1000"),
    "suffix_decoding_min_token_prob": (float, 0, 1, "0 to 1"),
    "disable_by_batch_size": (int, 1, INT64, "1 or more"),
}
# vLLM's other keys, with the values that change nothing here.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "draft_tensor_parallel_size": (None, 1),
    "tensor_parallel_size": (None, 1),
    "enforce_eager": (None, False, True),
    "disable_padded_drafter_batch": (False, True),
    "disable_logprobs": (False,),
    "disable_mqa_scorer": (False, True),
    "parallel_drafting": (False,),
    "use_heterogeneous_vocab": (False,),
    "quantization": (None,),
    "revision": (None,),
    "code_revision": (None,),
    "max_model_len": (None,),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """The keys of speculative_config. Raises ValueError or TypeError for values that are not
    allowed."""

    method: str = ""  # see METHODS
    num_speculative_tokens: int = 0  # k: drafts of a sequence in a step at most
    model: str | None = None  # folder or Hugging Face id of the drafter; or your class
    # ngram: how many of the last tokens must match, at most and at least. None: as the other, or 5.
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int = 24  # tokens of context and drafts together
    suffix_decoding_max_cached_requests: int = 10000  # whose outputs are kept
    suffix_decoding_max_spec_factor: float = 1.0  # drafts for each token of context
    suffix_decoding_min_token_prob: float = 0.1  # of a draft, by counting
    disable_by_batch_size: int | None = None  # running sequences above which nothing is drafted
    # (from, to, k): k for this range of running sequences, and up to the next one
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    # strict: the target's own sample must be the draft. The tokens are those of plain decoding.
    # standard (vLLM's): RejectionSampler. Accepts more; the distribution is that of plain decoding.
    rejection_sample_method: str = "strict"
    # probabilistic: a drafter draws as the request does (with strict: with the same random number).
    draft_sample_method: str = "probabilistic"

    @classmethod
    def read(cls, value: Any) -> SpeculativeConfig | None:
        """From a dict, its JSON text, or a SpeculativeConfig. None, {} and "" are none."""
        if isinstance(value, cls) or value is None:
            return value
        if isinstance(value, str) and value:
            value = json.loads(value)
        if not isinstance(value, Mapping):
            raise TypeError(f"speculative_config must be a dict, such as {EXAMPLE}.")
        return cls(**_known_keys(value))

    def __post_init__(self) -> None:
        method = self.method or ("draft_model" if self.model else "")
        self._set("method", "ngram" if method == "[ngram]" else method)
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                what = f"speculative_config: {name} is {brief(value)}"
                raise ValueError(f"{what}; allowed: {', '.join(allowed)}.")
        if not self.num_speculative_tokens and self.method == "suffix":
            depth = self.suffix_decoding_max_tree_depth
            self._set("num_speculative_tokens", depth or 1)  # a depth of 0 is refused below
        for name, (kind, low, high, words) in RANGES.items():
            if (value := getattr(self, name)) is not None and not low <= value <= high:
                raise ValueError(f"speculative_config: {name} is {value}; allowed: {words}.")
        if not isinstance(self.model, (str, Path, type(None))):
            raise TypeError(f"speculative_config: model must be a str, got {brief(self.model)}.")
        if self.method in NEEDS_MODEL and not self.model:
            raise ValueError(f"speculative_config: method {self.method!r} needs a model.")
        if self.method == "custom_class" and "." not in str(self.model)[1:]:
            raise ValueError(
                f"speculative_config: model is {brief(self.model)}; allowed with method "
                "'custom_class': package.module.ClassName."
            )
        self._check_lookup()
        self._check_batch_sizes()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_lookup(self) -> None:
        """Resolve prompt_lookup_min and _max as vLLM does: each is the other's default; else 5."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        self._set("prompt_lookup_min", low or high or 5)
        self._set("prompt_lookup_max", high or low or 5)
        if low and high and low > high:
            raise ValueError(
                f"speculative_config: prompt_lookup_min is {low}, more than prompt_lookup_max "
                f"{high}. Lower the first or raise the second."
            )

    def _check_batch_sizes(self) -> None:
        table = self.num_speculative_tokens_per_batch_size
        if table is None:
            return
        name, most = "num_speculative_tokens_per_batch_size", self.num_speculative_tokens
        try:
            table = tuple(sorted((start, end, number) for start, end, number in table))
            ends = (0, *(end for _, end, _ in table))
            is_allowed = table[0][0] == 1 and all(
                type(start) is type(end) is type(number) is int
                and before < start <= end
                and 0 <= number <= most
                for before, (start, end, number) in zip(ends, table, strict=False)
            )
        except (IndexError, TypeError, ValueError):
            is_allowed = False
        if not is_allowed:
            raise ValueError(
                f"speculative_config: {name} is {brief(table)}; allowed: a list of [from, to, "
                "number] with from <= to, of which no two overlap and the first begins at 1, and "
                f"numbers of drafts from 0 to {most}."
            )
        self._set(name, table)

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions behind a step's tokens at which the proposer writes keys and values."""
        return self.num_speculative_tokens if self.method in HAS_KV_CACHE else 0

    def num_tokens_for(self, batch_size: int) -> int:
        """How many drafts a sequence may get while so many sequences run."""
        if self.disable_by_batch_size and batch_size > self.disable_by_batch_size:
            return 0
        for start, _, number in reversed(self.num_speculative_tokens_per_batch_size or ()):
            if start <= batch_size:
                return number
        return self.num_speculative_tokens


def _known_keys(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that SpeculativeConfig has. Raises for others that would change something."""
    names = [each.name for each in fields(SpeculativeConfig)]
    for name, value in given.items():
        if name in names:
            continue
        if name not in ACCEPTED:
            near = get_close_matches(str(name), [*names, *ACCEPTED], n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" It has: {', '.join(names)}."
            raise TypeError(f"speculative_config has no key {brief(name)}.{hint}")
        if value not in ACCEPTED[name]:
            allowed = " or ".join(map(repr, ACCEPTED[name]))
            raise ValueError(
                f"speculative_config: {name} is {brief(value)}; allowed here: {allowed}. "
                "Leave it out."
            )
    defaults = {each.name: each.default for each in fields(SpeculativeConfig)}
    found = {name: given[name] for name in names if name in given}
    return {name: defaults[name] if value is None else value for name, value in found.items()}
