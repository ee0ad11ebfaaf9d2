"""What is guessed, how far, and for whom?

speculative_config is a dict (or its JSON text, on the command line) with vLLM's keys:

    LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
    --speculative-config '{"method": "suffix"}'

*When?* More tokens in a step cost time when the batch is large. `disable_by_batch_size` is a limit
for running sequences; num_speculative_tokens_per_batch_size=[[1, 4, 3], [5, 16, 1], [17, 64, 0]]
means 3 drafts for each of up to 4 sequences, 1 for up to 16, and none for more.

Left out: vLLM's other methods, quantized drafters, drafters on several ranks.

vLLM: SpeculativeConfig in vllm/config.py (V0); vllm/config/speculative.py (0.32).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import inf
from pathlib import Path
from typing import Any

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
CHOICES = {
    "method": tuple(METHODS),
    "rejection_sample_method": ("strict", "standard"),
    "draft_sample_method": ("probabilistic", "greedy"),
}
# Of each number: its type, the smallest and the largest value.
RANGES = {
    "num_speculative_tokens": (int, 1, 1000),
    "prompt_lookup_max": (int, 1, inf),
    "prompt_lookup_min": (int, 1, inf),
    "suffix_decoding_max_tree_depth": (int, 2, 1000),
    "suffix_decoding_max_cached_requests": (int, 0, inf),
    "suffix_decoding_max_spec_factor": ((int, float), 0, 1000),
    "suffix_decoding_min_token_prob": ((int, float), 0, 1),
    "disable_by_batch_size": (int, 1, inf),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """The keys of speculative_config. Raises ValueError for a value that is not allowed."""

    method: str = "draft_model"  # see METHODS
    num_speculative_tokens: int | None = None  # k: drafts of a sequence in a step at most
    model: str | Path | None = None  # folder or Hugging Face id of the drafter; or your class
    # ngram: how many of the last tokens must match, at most and at least. None: as the other, or 5.
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int = 24  # tokens of context and drafts together
    suffix_decoding_max_cached_requests: int = 10000  # whose outputs are kept
    suffix_decoding_max_spec_factor: float = 1.0  # drafts for each token of context
    suffix_decoding_min_token_prob: float = 0.1  # of a draft, by counting
    disable_by_batch_size: int | None = None  # running sequences above which nothing is drafted
    num_speculative_tokens_per_batch_size: Any = None  # [[from, to, k], ...], in ascending order
    # strict: the target's own sample must be the draft. The tokens are those of plain decoding.
    # standard (vLLM's): RejectionSampler. Accepts more; the distribution is that of plain decoding.
    rejection_sample_method: str = "strict"
    # probabilistic: a drafter draws as the request does (with strict: with the same random number).
    draft_sample_method: str = "probabilistic"

    @classmethod
    def read(cls, value: Any) -> SpeculativeConfig | None:
        """From a dict or its JSON text. A misspelt key is a TypeError, which names it."""
        if isinstance(value, cls) or not value:
            return value or None
        given = json.loads(value) if isinstance(value, str) else value
        if not isinstance(given, Mapping):
            raise TypeError(f"speculative_config must be a dict such as {EXAMPLE}, got {value!r}.")
        names = [each.name for each in fields(cls)]
        for name in given.keys() - set(names):
            near = get_close_matches(str(name), names, n=1) or names
            raise TypeError(f"speculative_config has no key {name!r}; use {', '.join(near)}.")
        return cls(**{name: value for name, value in given.items() if value is not None})

    def __post_init__(self) -> None:
        for name, allowed in CHOICES.items():
            if (value := getattr(self, name)) not in allowed:
                self._refuse(name, f"{value!r}; allowed: {', '.join(allowed)}")
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        self._set("prompt_lookup_min", low or high or 5)
        self._set("prompt_lookup_max", high or low or 5)
        if self.method == "suffix" and self.num_speculative_tokens is None:
            self._set("num_speculative_tokens", self.suffix_decoding_max_tree_depth)
        for name, (kind, least, most) in RANGES.items():
            value = getattr(self, name)
            if value is None and name != "num_speculative_tokens":
                continue
            if not isinstance(value, kind) or not least <= value <= most:
                self._refuse(name, f"{value!r}; allowed: {least} to {most}")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            self._refuse("prompt_lookup_min", f"{low}, more than prompt_lookup_max {high}")
        if self.method not in ("ngram", "suffix") and not self.model:
            self._refuse("model", f"missing; method {self.method!r} needs one")
        table = self.num_speculative_tokens_per_batch_size or ()
        starts = [start for start, _, _ in table]
        if starts != sorted(set(starts)) or any(k < 0 for _, _, k in table):
            name = "num_speculative_tokens_per_batch_size"
            self._refuse(name, f"{table!r}; allowed: [[from, to, number], ...] in ascending order")

    def _refuse(self, name: str, what: str) -> None:
        raise ValueError(f"speculative_config: {name} is {what}.")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions behind a step's tokens at which the proposer writes keys and values."""
        return self.num_speculative_tokens if self.method in ("draft_model", "eagle") else 0

    def num_tokens_for(self, batch_size: int) -> int:
        """How many drafts a sequence may get while so many sequences run."""
        if self.disable_by_batch_size and batch_size > self.disable_by_batch_size:
            return 0
        table = self.num_speculative_tokens_per_batch_size or ()
        found = [number for start, _, number in table if start <= batch_size]
        return min([self.num_speculative_tokens, *found[-1:]])
