"""What is speculated, how far, and for whom?

speculative_config is a dict (or its JSON text, on the command line) with vLLM's keys:

    LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
    --speculative-config '{"method": "suffix"}'

EngineConfig turns it into a SpeculativeConfig. The scheduler asks it how many drafts a sequence may
get (`choose_num_spec_tokens`) and tells it which were accepted (`accept`). The runner gets its
proposer here (`make_proposer`).

*Who gets none?* A beam, and a sequence that is about to fork: what follows is not one continuation.
A request with logits_processors: the functions are the user's own, and may count their calls. A
request with penalties: their counts are of tokens that are known. All other features (bad words,
min_tokens, logit_bias, allowed tokens, seeds, logprobs) see at each draft the tokens before it, as
in plain decoding.

*When?* More tokens in a step cost time when the batch is large. `disable_by_batch_size` (of vLLM's
V0) is a limit for running sequences; `num_speculative_tokens_per_batch_size` (of 0.32) lists
(from, to, number of drafts).

Left out: vLLM's other methods, quantized drafters, drafters on several ranks.

vLLM: SpeculativeConfig in vllm/config.py (V0); vllm/config/speculative.py (V1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.config import INT64, check_number
from nanoserve.exceptions import brief, describe_error
from nanoserve.inputs import as_python, check_is_dict, parse_option
from nanoserve.interrupts import unless_signal

if TYPE_CHECKING:
    from nanoserve.extras.speculative.proposer import Proposer
    from nanoserve.model_runner import ModelRunner
    from nanoserve.scheduler import Scheduler
    from nanoserve.sequence import ModelOutput, ScheduledSequence, Sequence, SequenceUpdate

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
            value = parse_option("speculative_config", value, EXAMPLE)
        if value is None or (not value and isinstance(value, (str, Mapping))):
            return None
        check_is_dict("speculative_config", value, EXAMPLE)
        return cls(**_known_keys(value))

    def __post_init__(self) -> None:
        for each in fields(self):
            object.__setattr__(self, each.name, as_python(getattr(self, each.name)))
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
            if (value := getattr(self, name)) is not None:
                check_number(f"speculative_config: {name}", value, kind, low, high, words)
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

    def choose_num_spec_tokens(
        self, scheduler: Scheduler, seq: Sequence, num_tokens: int
    ) -> tuple[int, int]:
        """How many tokens may be drafted behind the next `num_tokens` tokens of `seq`, and how many
        slots the proposer needs for them now.

        This step brings a token at least, and one more comes with the drafts. Slots are only taken
        if they are free.
        """
        length = seq.num_prompt_tokens + seq.max_tokens
        number = min(self.num_tokens_for(len(scheduler.running)), length - seq.num_tokens - 2)
        if self.num_lookahead_tokens:
            number = min(number, length - seq.num_computed_tokens - num_tokens)
        num_slots = min(number, self.num_lookahead_tokens)
        if number <= 0 or not can_speculate(seq):
            return 0, 0
        if not scheduler.block_manager.can_append(seq, num_tokens + num_slots):
            return 0, 0
        return number, num_slots

    def accept(
        self,
        scheduler: Scheduler,
        item: ScheduledSequence,
        output: ModelOutput,
        update: SequenceUpdate,
    ) -> None:
        """Take back what was computed behind the accepted drafts, and note the next ones: at most
        item.num_spec_tokens, and one less than max_tokens leaves. `update` and the metrics count
        drafts and accepted ones."""
        seq, number = update.sequence, len(item.draft_token_ids)
        if number:
            update.num_accepted_tokens = len(output.sampled_token_ids[seq.seq_id]) - 1
            seq.num_computed_tokens -= number - update.num_accepted_tokens
            start, end = item.num_computed_tokens, seq.num_computed_tokens
            scheduler.block_manager.cache_blocks(seq, start, end)
            seq.metrics.num_drafts += 1
            seq.metrics.num_draft_tokens += number
            seq.metrics.num_accepted_tokens += update.num_accepted_tokens
        most = min(item.num_spec_tokens, seq.max_tokens - seq.num_output_tokens - 1)
        seq.spec_token_ids = output.draft_token_ids.get(seq.seq_id, ())[: max(0, most)]
        if (grammar := seq.structured_output_request) is not None:
            seq.spec_token_ids = grammar.validate_drafts(seq.spec_token_ids)

    def make_proposer(self, runner: ModelRunner) -> Proposer:
        """The proposer of this method. Raises ValueError if it does not fit the model."""
        module, name = METHODS[self.method]
        module = f"{__package__}.{module}"
        if self.method == "custom_class":
            assert self.model is not None
            module, _, name = str(self.model).rpartition(".")
        try:
            proposer_cls = getattr(import_module(module), name)
        except unless_signal(Exception) as error:  # also one of the user's own module
            raise ValueError(
                f"speculative_config: {module}.{name}, the proposer of method {self.method!r}, "
                f"cannot be imported ({describe_error(error)})."
            ) from error
        base = import_module(f"{__package__}.proposer").Proposer
        is_proposer = isinstance(proposer_cls, type) and issubclass(proposer_cls, base)
        if not is_proposer or proposer_cls.propose is base.propose:
            raise ValueError(
                f"speculative_config: model is {brief(proposer_cls)}; allowed with method "
                f"{self.method!r}: a subclass of {base.__module__}.Proposer, with a method propose."
            )
        proposer: Proposer = proposer_cls(runner, self)
        return proposer


def can_speculate(seq: Sequence) -> bool:
    """Is there one continuation, which depends on known tokens alone? See the top of the module."""
    params = seq.sampling_params
    looks_back = params.logits_processors or params.has_penalties
    return not (looks_back or seq.always_sync or seq.num_pending_forks)


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
        if as_python(value) not in ACCEPTED[name]:
            allowed = " or ".join(map(repr, ACCEPTED[name]))
            raise ValueError(
                f"speculative_config: {name} is {brief(value)}; allowed here: {allowed}. "
                "Leave it out."
            )
    defaults = {each.name: each.default for each in fields(SpeculativeConfig)}
    found = {name: given[name] for name in names if name in given}
    return {name: defaults[name] if value is None else value for name, value in found.items()}
