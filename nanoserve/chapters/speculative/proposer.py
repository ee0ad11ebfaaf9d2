"""What will the next tokens be?

A Proposer lives beside the model, on rank 0. After each step, when its tokens are known, the runner
calls `propose`; the drafts go to the scheduler with the step's tokens, and come back with the next
step, which verifies them:

    runner      step 1: samples b            propose -> c d e
    scheduler   step 2: compute b c d e
    runner      step 2: samples c d f g      c and d are accepted, f is new    propose -> ...

A proposer that looks at tokens alone is a subclass with one method:

    class Parrot(Proposer):
        def propose_one(self, seq_id, token_ids, most):
            return token_ids[-1:].tolist() * most

    LLM(speculative_config={"method": "custom_class", "model": "my_module.Parrot",
                            "num_speculative_tokens": 3})

NgramProposer looks for the last tokens of a sequence earlier in the same sequence: texts that copy
(summaries, edits, code, tables) go on as before. Of the longest matches it takes the earliest one,
as vLLM does. With prompt_lookup_min 1 and _max 3:

    tokens     p q r s   x q r t   y q r      "q r" is found twice, "y q r" is not
    drafts     s x q                          behind the earliest "q r"

Left out: drafts while the next step already runs (with speculation, no steps overlap).

vLLM: vllm/spec_decode/ngram_worker.py (V0); vllm/v1/spec_decode/ngram_proposer.py,
custom_class_proposer.py (0.32). Paper of n-grams: github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from importlib import import_module

import numpy as np
from torch import Tensor

from nanoserve.chapters.speculative.config import SpeculativeConfig
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.model_runner import ModelRunner, PendingOutput
from nanoserve.sequence import ModelOutput

Drafts = Mapping[int, Sequence[int]]  # seq_id -> guesses at its next tokens
Limits = dict[int, int]  # seq_id -> how many tokens may be drafted
PROPOSERS = {
    "ngram": f"{__name__}.NgramProposer",
    "suffix": f"{__package__}.suffix.SuffixDecodingProposer",
    "draft_model": f"{__package__}.draft_model.DraftModelProposer",
    "medusa": f"{__package__}.medusa.MedusaProposer",
    "eagle": f"{__package__}.eagle.EagleProposer",
}


def make_proposer(runner: ModelRunner, config: SpeculativeConfig) -> Proposer:
    """The proposer of this method. Raises ValueError if it does not fit the runner's model."""
    module, _, name = PROPOSERS.get(config.method, str(config.model)).rpartition(".")
    return getattr(import_module(module), name)(runner, config)


class Proposer:
    """Guesses the next tokens of the sequences of a step.

    Invariant: a guess is never more than a guess. Whatever a proposer returns, the tokens of the
    requests are the same; only their number per step changes.
    """

    def __init__(self, runner: ModelRunner, config: SpeculativeConfig) -> None:
        self.runner: ModelRunner = weakref.proxy(runner)  # the runner holds the proposer
        self.config = config
        # seq_id -> the distribution [vocab_size] from which each draft of the last step was drawn,
        # for RejectionSampler. A draft of a sequence that is missing here was certain.
        self.draft_probs: Mapping[int, list[Tensor]] = {}

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Of the proposer's own layers. Their caches stand behind the model's in
        runner.kv_caches, and have the same blocks."""
        return []

    def propose(self, pending: PendingOutput, output: ModelOutput, limits: Limits) -> Drafts:
        """Drafts, at most as many as `limits` says for each sequence.

        Called after every step, with what the step was made of (pending.input_batch,
        pending.hidden), and the tokens that it has brought: runner.req_states has them already.
        """
        states, drafts = self.runner.req_states, {}
        for seq_id in limits.keys() & output.sampled.keys():
            row = states.row_of[seq_id]
            token_ids = states.token_ids[row, : states.num_tokens[row]]
            drafts[seq_id] = self.propose_one(seq_id, token_ids, limits[seq_id])
        return drafts

    def propose_one(self, seq_id: int, token_ids: np.ndarray, most: int) -> Sequence[int]:
        """At most `most` drafts behind `token_ids` [num_tokens] int32, prompt and output."""
        raise NotImplementedError


class NgramProposer(Proposer):
    """Drafts what stood behind the last tokens of a sequence when they came before."""

    def propose_one(self, seq_id: int, token_ids: np.ndarray, most: int) -> Sequence[int]:
        least, longest = self.config.prompt_lookup_min, self.config.prompt_lookup_max
        end = find_ngram(token_ids, least or 1, longest or 1)
        return [] if end is None else token_ids[end : end + most].tolist()


def find_ngram(token_ids: np.ndarray, least: int, longest: int) -> int | None:
    """Where the text goes on behind the earliest of the longest matches with its last tokens, at
    least `least` and at most `longest` of them; None if there is no match.

    find_ngram(np.array([1, 2, 3, 9, 2, 3]), 1, 3) -> 3: behind the first "2 3" stands 9.
    """
    last, length, end = len(token_ids) - 1, 0, 0
    ends = (token_ids[:last] == token_ids[last]).nonzero()[0]  # of matches of `length` + 1 tokens
    while len(ends):
        length, end = length + 1, int(ends[0])
        if length == longest:
            break
        ends = ends[ends >= length]
        ends = ends[token_ids[ends - length] == token_ids[last - length]]
    return end + 1 if length >= least else None
