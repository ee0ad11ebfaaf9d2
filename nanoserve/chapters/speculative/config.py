"""What is guessed, how far, and for whom?

speculative_config is a dict (or its JSON text, on the command line) with vLLM's keys:

    LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
    --speculative-config '{"method": "suffix"}'

*When?* More tokens in a step cost time when the batch is large.
num_speculative_tokens_per_batch_size=[[1, 4, 3], [5, 16, 1], [17, 64, 0]] means 3 drafts for each
of up to 4 running sequences, 1 for up to 16, and none for more.

Left out: vLLM's other methods, quantized drafters, drafters on several ranks.

vLLM: SpeculativeConfig in vllm/config.py (V0); vllm/config/speculative.py (0.32).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nanoserve.chapters.option_dict import OptionDict

Method = Literal["ngram", "suffix", "draft_model", "medusa", "eagle", "custom_class"]
EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 3}'


@dataclass(frozen=True)
class SpeculativeConfig(OptionDict):
    """The keys of speculative_config. Raises ValueError for a value that is not allowed."""

    option = "speculative_config"
    method: Method = "draft_model"
    num_speculative_tokens: int | None = None  # k: drafts of a sequence in a step at most
    # Folder or Hugging Face id of the drafter; of a custom_class, "package.module.ClassName".
    model: str | Path | None = None
    # ngram: how many of the last tokens must match, at most and at least. None: as the other, or 5.
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int = 24  # tokens of context and drafts together
    suffix_decoding_max_cached_requests: int = 10000  # whose outputs are kept
    suffix_decoding_max_spec_factor: float = 1.0  # drafts for each token of context
    suffix_decoding_min_token_prob: float = 0.1  # of a draft, by counting
    num_speculative_tokens_per_batch_size: Any = ()  # [[from, to, k], ...], in ascending order
    # strict: the target's own sample must be the draft. The tokens are those of plain decoding.
    # standard (vLLM's): RejectionSampler. Accepts more; the distribution is that of plain decoding.
    rejection_sample_method: Literal["strict", "standard"] = "strict"
    # probabilistic: a drafter draws as the request does (with strict: with the same random number).
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"

    def __post_init__(self) -> None:
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        defaults = {"prompt_lookup_min": high or 5, "prompt_lookup_max": low or 5}
        if self.method == "suffix":
            defaults["num_speculative_tokens"] = self.suffix_decoding_max_tree_depth
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()
        if not self.num_speculative_tokens:
            raise ValueError(f"speculative_config needs num_speculative_tokens, as in {EXAMPLE}.")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min {low} is more than prompt_lookup_max {high}.")
        if self.method not in ("ngram", "suffix") and not self.model:
            raise ValueError(f"speculative_config: method {self.method!r} needs a model.")

    @property
    def num_lookahead_tokens(self) -> int:
        """Positions behind a step's tokens at which the proposer writes keys and values."""
        return self.num_speculative_tokens if self.method in ("draft_model", "eagle") else 0

    def num_tokens_for(self, batch_size: int) -> int:
        """How many drafts a sequence may get while so many sequences run."""
        table = self.num_speculative_tokens_per_batch_size
        found = [number for start, _, number in table if start <= batch_size]
        return min([self.num_speculative_tokens, *found[-1:]])
