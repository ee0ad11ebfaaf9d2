"""What does speculative decoding change in the engine?

    scheduler   a step also computes guesses (drafts) behind the last known token of a sequence
    runner      writes them behind the known tokens, drops what was sampled behind a wrong one, and
                asks the proposer for the next ones

With the drafts d e f behind 6 known tokens:

    known       [ t0 t1 t2 t3 | t4 t5 ]  d  e  f     num_tokens = 6
    to compute                     [ t5  d  e  f ]   4 positions, so 4 tokens are sampled:
    sampled                           d  e  x  .     d and e are accepted, x is the next token
    known       [ t0 t1 t2 t3 | t4 t5  d  e | x ]    num_tokens = 9, num_computed_tokens = 8

While the step is in flight it counts as computed whole (10), with 4 placeholders. What follows a
rejected draft is not computed any more: the counter goes back, and the slots are written again.

*Who gets none?* A sequence that is about to fork: what follows is not one continuation. A request
with logits_processors: they may count their calls. A request with penalties: their counts are of
tokens that are known.

vLLM: vllm/spec_decode/ (V0); vllm/v1/core/sched/scheduler.py, vllm/v1/worker/ (V1).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from nanoserve.block_manager import BlockManager
from nanoserve.chapters.speculative.config import SpeculativeConfig
from nanoserve.chapters.speculative.proposer import make_proposer
from nanoserve.chapters.speculative.rejection import make_rejection_sampler
from nanoserve.config import EngineConfig
from nanoserve.input_batch import InputBatch
from nanoserve.kernels.device import current_device
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.model_runner import ModelRunner, PendingOutput
from nanoserve.models.base import Model
from nanoserve.sampler import Choose
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import (
    ModelOutput,
    RequestError,
    SampledToken,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)

logger = logging.getLogger("nanoserve")
Drafts = dict[int, tuple[int, ...]]  # seq_id -> guesses at its next tokens


class SpeculativeNote(NamedTuple):
    """From the scheduler to the runner, with each step."""

    known: Drafts  # what stands before the drafts: other ranks do not know what was accepted
    drafts: Drafts  # to be verified
    limits: dict[int, int]  # seq_id -> how many tokens may be drafted behind this step


class DraftsNote(NamedTuple):
    """From the runner to the scheduler, with each output."""

    drafts: Drafts  # for the next step


@dataclass(frozen=True)
class SpeculativeEngineConfig(EngineConfig):
    speculative_config: Any = None
    """Guess tokens and verify several in a step, the same tokens in fewer steps: a dict, such as
    {"method": "ngram", "num_speculative_tokens": 3}. The keys are in config.py."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(
            self, "speculative_config", SpeculativeConfig.read(self.speculative_config)
        )


class SpeculativeScheduler(Scheduler):
    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        super().__init__(config, block_manager)
        self.drafts: Drafts = {}

    def schedule_tokens(self, seq: Sequence, num_tokens: int, step: StepPlan) -> None:
        """Behind the last known token come the drafts, if budget and free blocks are left."""
        drafts = self.drafts.pop(seq.seq_id, ())
        is_last = num_tokens == seq.num_uncomputed_tokens
        room = min(self.max_chunk, step.budget - step.reserved) - num_tokens
        drafts = drafts[: max(0, room)] if is_last else ()
        if drafts and not self.block_manager.can_append_slots(seq, num_tokens + len(drafts)):
            drafts = ()  # drafts preempt nobody
        num_next = self.num_next_drafts(seq, num_tokens + len(drafts)) if is_last else 0
        note = step.notes.setdefault(SpeculativeNote, SpeculativeNote({}, {}, {}))
        if is_last and (drafts or seq.seq_id in self.known_seq_ids):
            note.known[seq.seq_id] = tuple(seq.token_ids[seq.num_computed_tokens :])
        super().schedule_tokens(seq, num_tokens + len(drafts), step)
        seq.num_output_placeholders += len(drafts)  # of the tokens that come, at most
        if drafts:
            note.drafts[seq.seq_id] = drafts
        if num_next:
            note.limits[seq.seq_id] = num_next
        if num_slots := min(num_next, self.config.speculative_config.num_lookahead_tokens):
            item, (first, new_blocks) = (
                step.scheduled[-1],
                self.block_manager.append_slots(seq, num_slots),
            )
            first = item.first_new_block if item.new_block_ids else first
            new_blocks = [*item.new_block_ids, *new_blocks]
            step.scheduled[-1] = item._replace(first_new_block=first, new_block_ids=new_blocks)

    def num_next_drafts(self, seq: Sequence, num_tokens: int) -> int:
        """How many tokens may be drafted behind the next `num_tokens` tokens of `seq`. Slots for a
        drafter's keys and values are only taken if they are free."""
        config, length = self.config.speculative_config, seq.num_prompt_tokens + seq.max_tokens
        # This step brings a token at least, and one more comes with the drafts.
        number = min(config.num_tokens_for(len(self.running)), length - seq.num_tokens - 2)
        if config.num_lookahead_tokens:
            number = min(number, length - seq.num_computed_tokens - num_tokens)
        num_slots = min(number, config.num_lookahead_tokens)
        fits = number > 0 and self.block_manager.can_append_slots(seq, num_tokens + num_slots)
        return number if fits and can_speculate(seq) else 0

    def make_output(self, step: StepPlan) -> SchedulerOutput:
        """No steps overlap: what to compute next depends on what is accepted."""
        return replace(super().make_output(step), needs_sync=True)

    def update_sequence(
        self, seq: Sequence, item: ScheduledSequence, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        """Take back what was computed behind the accepted drafts, and note the next ones."""
        end = item.num_computed_tokens + item.num_scheduled_tokens
        num_drafts = max(0, end - seq.num_tokens)
        seq.num_output_placeholders -= num_drafts
        updates = super().update_sequence(seq, item, model_output)
        if num_drafts:
            num_accepted = len(model_output.sampled[seq.seq_id]) - 1
            seq.num_computed_tokens -= num_drafts - num_accepted
            start, end = item.num_computed_tokens, seq.num_computed_tokens
            self.block_manager.cache_blocks(seq, start, end)  # drafts are not found before
        room = max(0, seq.max_tokens - seq.num_output_tokens - 1)
        found = model_output.notes[DraftsNote].drafts.get(seq.seq_id, ())
        self.drafts[seq.seq_id] = found[:room]
        return updates

    def finish(
        self, seq_id: int, status: SequenceStatus, stop_reason: int | str | None = None
    ) -> None:
        super().finish(seq_id, status, stop_reason)
        self.drafts.pop(seq_id, None)


def can_speculate(seq: Sequence) -> bool:
    """Is there one continuation, which depends on known tokens alone? See the top of the module."""
    params = seq.sampling_params
    return not (params.logits_processors or params.has_penalties or seq.num_pending_forks)


class SpeculativeRunner(ModelRunner):
    def __init__(self, config: EngineConfig, *args: Any, **kwargs: Any) -> None:
        self.query_lens = (1, 1 + config.speculative_config.num_speculative_tokens)
        super().__init__(config, *args, **kwargs)

    def load_model(self) -> Model:
        """The model; then, on rank 0, the proposer, whose layers have a place in the KV blocks."""
        self.model, self.proposer = super().load_model(), None
        if self.parallel.tp_rank == 0:
            self.proposer = make_proposer(self, self.config.speculative_config)
        return self.model

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return super().kv_cache_specs() + (self.proposer.kv_cache_specs() if self.proposer else [])

    def update_batch(self, step: SchedulerOutput) -> np.ndarray:
        """Write the drafts behind the known tokens: so a token is sampled behind each of them."""
        rows, note = super().update_batch(step), step.notes[SpeculativeNote]
        for row, item in zip(rows, step.scheduled, strict=True):
            if (known := note.known.get(item.seq_id)) is not None:
                tokens = (*known, *note.drafts.get(item.seq_id, ()))
                start = item.num_computed_tokens
                self.req_states.token_ids[row, start : start + len(tokens)] = tokens
                self.req_states.num_tokens[row] = start + len(known)
        return rows

    def make_choose(self, input_batch: InputBatch) -> Choose:
        choose = super().make_choose(inputs)
        if self.config.speculative_config.rejection_sample_method == "strict":
            return choose
        probs = self.proposer.draft_probs
        return make_rejection_sampler(self.req_states, input_batch.arrays, probs, choose)

    def collect(
        self,
        pending: PendingOutput,
        tokens: list[SampledToken | RequestError],
        output: ModelOutput,
    ) -> None:
        """Of each sequence, take the tokens up to the first that is not the draft at its place."""
        drafts = pending.input_batch.step.notes[SpeculativeNote].drafts
        first: dict[int, int] = {}  # seq_id -> position of its first sample
        ended: set[int] = set()
        samples, kept = [], []
        for (seq_id, position), token in zip(pending.samples, tokens, strict=True):
            number = position - first.setdefault(seq_id, position)
            if seq_id in ended or (number and isinstance(token, RequestError)):
                continue  # an error behind a draft is found again by the next step
            samples.append((seq_id, position))
            kept.append(token)
            guess = drafts.get(seq_id, ())[number : number + 1]
            if guess and (isinstance(token, RequestError) or guess[0] != token.token_id):
                ended.add(seq_id)
        super().collect(replace(pending, samples=samples), kept, output)

    @torch.inference_mode()
    def read(self, pending: PendingOutput) -> ModelOutput:
        """A proposer that fails brings no drafts."""
        output, drafts = super().read(pending), {}
        limits = pending.input_batch.step.notes[SpeculativeNote].limits
        try:
            with current_device(self.device):
                drafts = self.proposer.propose(pending, output, limits)
        except Exception as error:
            logger.error("a proposer failed: no drafts for the next step", exc_info=error)
        output.notes[DraftsNote] = DraftsNote(drafts)
        return output


PARTS = {
    "config_cls": SpeculativeEngineConfig,
    "scheduler_cls": SpeculativeScheduler,
    "runner_cls": SpeculativeRunner,
}
