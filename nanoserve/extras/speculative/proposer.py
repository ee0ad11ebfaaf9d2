"""What will the next tokens be?

A Proposer lives beside the model, on rank 0. After each step, when its tokens are known, the runner
calls `propose`; the drafts go to the scheduler with the step's tokens, and come back with the next
step, which verifies them:

    runner      step 1: samples b            propose -> c d e
    scheduler   step 2: compute b c d e
    runner      step 2: samples c d f g      c and d are accepted, f is new    propose -> ...

A proposer that looks at tokens alone is a subclass with one method:

    class Parrot(TokenProposer):
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
custom_class_proposer.py (V1). Paper of n-grams: github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nanoserve.device import current_device
from nanoserve.exceptions import Caught
from nanoserve.logger import init_logger
from nanoserve.sampler import Choose
from nanoserve.sequence import ModelOutput, ScheduledSequence, SchedulerOutput

if TYPE_CHECKING:
    from nanoserve.extras.speculative.config import SpeculativeConfig
    from nanoserve.kv_cache import KVCacheSpec
    from nanoserve.model_runner import ModelRunner, PendingOutput, StepInputs


logger = init_logger(__name__)


class Proposer:
    """Guesses the next tokens of the sequences of a step.

    Invariant: a guess is never more than a guess. Whatever a proposer returns, the tokens of the
    requests are the same; only their number per step changes. (With rejection_sample_method
    "standard", drawn tokens keep their distribution, if `draft_probs` is true.)
    """

    def __init__(self, runner: ModelRunner, config: SpeculativeConfig) -> None:
        """`runner` has its model, but no KV caches yet."""
        self.runner: ModelRunner = weakref.proxy(runner)  # the runner holds the proposer
        self.config = config
        # seq_id -> what its drafts of the last step were drawn from, [num drafts, vocab_size]; for
        # RejectionSampler. A draft of a sequence that is missing here was certain.
        self.draft_probs: dict[int, Tensor] = {}

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        """Of the proposer's own layers. Their caches stand behind the model's in
        runner.kv_caches, and have the same blocks."""
        return []

    def propose(
        self,
        scheduler_output: SchedulerOutput,
        inputs: StepInputs,
        hidden: Tensor,
        output: ModelOutput,
    ) -> dict[int, tuple[int, ...]]:
        """Drafts by seq_id, for the sequences of a step, at most `limit(item)` for each.

        Called after every step, with what the step was made of: `inputs` (NumPy arrays, and tensors
        on the device that may be padded), the hidden states [num_tokens or more, hidden] of all of
        its tokens, and the tokens that it has brought. runner.batch holds these already.
        """
        raise NotImplementedError

    def limit(self, item: ScheduledSequence) -> int:
        """How many drafts this sequence may get. For so many there are slots, too."""
        return item.num_spec_tokens

    def follow(
        self,
        pending: PendingOutput,
        scheduler_output: SchedulerOutput,
        inputs: StepInputs,
        hidden: Tensor,
    ) -> DraftedOutput:
        """`pending`, whose result will bring drafts. A proposer that fails brings none."""

        @torch.inference_mode()
        def propose(output: ModelOutput) -> dict[int, tuple[int, ...]]:
            with Caught() as caught, current_device(self.runner.device):
                drafts = self.propose(scheduler_output, inputs, hidden, output)
                return {seq_id: self._only_tokens(ids) for seq_id, ids in drafts.items()}
            if isinstance(caught.error, NotImplementedError):
                raise caught.error  # a method that is to be written
            logger.error("a proposer failed: no drafts for the next step", exc_info=caught.error)
            return {}

        has_copies = scheduler_output.kv_connector_metadata is not None
        connector = self.runner.kv_connector if has_copies else None
        return DraftedOutput(pending, propose, connector)

    def _only_tokens(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Drafts up to the first id that is not one of the vocabulary's: a model cannot read it."""
        size = self.runner.batch.vocab_size
        return tuple(map(int, takewhile(lambda token_id: 0 <= token_id < size, token_ids)))

    def make_choose(
        self, rows: np.ndarray, branches: np.ndarray, positions: np.ndarray
    ) -> Choose | None:
        """What chooses a token for each row of logits in the coming step; None: what always does.
        The arguments say for which rows of the batch, with which branches, at which positions."""
        if self.config.rejection_sample_method == "strict":
            return None
        from nanoserve.extras.speculative.rejection import RejectionSampler, rejection_noise

        batch = self.runner.batch
        is_draft = np.zeros(len(rows), bool)  # a row has a draft if the next row is behind it
        is_draft[:-1] = (rows[1:] == rows[:-1]) & (positions[1:] == positions[:-1] + 1)
        if not is_draft.any():
            return None
        drafts = np.full(len(rows), -1)
        drafts[is_draft] = batch.token_ids[rows[is_draft], positions[is_draft]]
        sent = batch.staging.send(
            drafts=drafts, **rejection_noise(batch.seeds[rows], branches, positions)
        )
        probs = self._gather_probs(rows, positions, is_draft, sent["drafts"])
        return RejectionSampler(sent["drafts"], probs, sent["accept"], sent["recover"])

    def _gather_probs(
        self, rows: np.ndarray, positions: np.ndarray, is_draft: np.ndarray, drafts: Tensor
    ) -> Tensor | None:
        """[num_rows, vocab_size]: what the draft of each row was drawn from."""
        if not self.draft_probs:
            return None
        batch = self.runner.batch
        probs = torch.zeros(len(rows), batch.vocab_size, device=drafts.device)
        probs.scatter_(1, drafts.clamp(min=0)[:, None], 1.0)
        for i in is_draft.nonzero()[0].tolist():
            row = rows[i]
            drawn_from = self.draft_probs.get(int(batch.seq_ids[row]))
            if drawn_from is not None:
                probs[i] = drawn_from[positions[i] - batch.num_tokens[row]]
        return probs


class DraftedOutput:
    """A step that was launched. `result()` waits for its tokens, then drafts the next ones."""

    def __init__(
        self,
        pending: PendingOutput,
        propose: Callable[[ModelOutput], dict[int, tuple[int, ...]]],
        connector: Any = None,
    ) -> None:
        """connector: the runner's KVConnectorWorker (extras/kv_offload), if the step's blocks go
        to another tier: with what the drafter has put there."""
        self._pending = pending
        self._propose = propose
        self._connector = connector

    def result(self) -> ModelOutput:
        """The tokens of the step, and drafts of those that follow."""
        output = self._pending.result()
        output.draft_token_ids.update(self._propose(output))
        if self._connector is not None:
            self._connector.wait_for_save()
        return output


class TokenProposer(Proposer):
    """A proposer that looks at the known tokens of one sequence at a time."""

    def propose_one(self, seq_id: int, token_ids: np.ndarray, most: int) -> Sequence[int]:
        """At most `most` drafts behind `token_ids` [num_tokens] int32, prompt and output."""
        raise NotImplementedError

    def propose(
        self,
        scheduler_output: SchedulerOutput,
        inputs: StepInputs,
        hidden: Tensor,
        output: ModelOutput,
    ) -> dict[int, tuple[int, ...]]:
        batch, drafts = self.runner.batch, {}
        for item in scheduler_output.scheduled:
            most = self.limit(item)
            if most and item.seq_id in output.sampled_token_ids:
                row = batch.row_of[item.seq_id]
                token_ids = batch.token_ids[row, : batch.num_tokens[row]]
                found = self.propose_one(item.seq_id, token_ids, most)
                if len(found):
                    drafts[item.seq_id] = tuple(found)
        return drafts


class NgramProposer(TokenProposer):
    """Drafts what stood behind the last tokens of a sequence when they came before."""

    def propose_one(self, seq_id: int, token_ids: np.ndarray, most: int) -> Sequence[int]:
        """At most `most` tokens from the place that find_ngram finds; [] if it finds none."""
        least, longest = self.config.prompt_lookup_min, self.config.prompt_lookup_max
        assert least is not None and longest is not None
        end = find_ngram(token_ids, least, longest)
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
