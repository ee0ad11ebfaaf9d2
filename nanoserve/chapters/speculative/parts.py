"""What does speculative decoding change in the engine?

    scheduler   a step also computes guesses (drafts) behind the last known token of a sequence
    runner      writes them behind the known tokens, drops what was sampled behind a wrong one, and
                asks the proposer for the next ones

With the drafts d e f behind 6 known tokens:

    known       [ t0 t1 t2 t3 | t4 t5 ]  d  e  f     num_tokens = 6
    to compute                     [ t5  d  e  f ]   4 positions, so 4 tokens are sampled:
    sampled                           d  e  x  .     d and e are accepted, x is the next token
    known       [ t0 t1 t2 t3 | t4 t5  d  e | x ]    num_tokens = 9, num_computed_tokens = 8

While the step is in flight it counts as computed whole (9), with 4 placeholders. What follows a
rejected draft is not computed any more: the counter goes back, and the slots are written again.

*Who gets none?* A sequence that is about to fork: what follows is not one continuation. A request
with logits_processors: they may count their calls. A request with penalties: their counts are of
tokens that are known.

*Ranks.* Only rank 0 proposes and reads tokens, so the others do not know how many drafts were
accepted. Each step tells them the known tokens that stand before its drafts.

vLLM: vllm/spec_decode/ (V0); vllm/v1/core/sched/scheduler.py, vllm/v1/spec_decode/metrics.py,
vllm/v1/worker/gpu/spec_decode/ (0.32).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from nanoserve.block_manager import BlockManager
from nanoserve.chapters.speculative.config import SpeculativeConfig
from nanoserve.chapters.speculative.proposer import Drafts, Limits, Proposer, make_proposer
from nanoserve.chapters.speculative.rejection import RejectionSampler, with_drafts
from nanoserve.config import EngineConfig
from nanoserve.input_batch import InputBatch
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.model_runner import ModelRunner, PendingOutput
from nanoserve.models.base import Model
from nanoserve.sampler import SamplingBatch
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import (
    ModelOutput,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceUpdate,
)

logger = logging.getLogger("nanoserve")


class SpeculativeNote(NamedTuple):
    """From the scheduler to the runner, with each step; all by seq_id."""

    known: Drafts  # tokens to be computed that are known: they stand before the drafts
    drafts: Drafts  # to be verified
    limits: Limits  # how many tokens may be drafted behind this step
    private: set[int]  # new sequences with a salt or an adapter: no other may learn their tokens


class DraftsNote(dict[int, Any]):
    """From the runner to the scheduler, with each output: for the next step."""


@dataclass(frozen=True)
class SpeculativeEngineConfig(EngineConfig):
    # Guess tokens and verify several in a step, the same tokens in fewer steps: a dict, such as
    # {"method": "ngram", "num_speculative_tokens": 3}; chapters/speculative/config.py has its keys.
    speculative_config: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        config = SpeculativeConfig.read(self.speculative_config)
        object.__setattr__(self, "speculative_config", config)
        if config.method in ("eagle", "medusa") and self.num_ranks > self.tensor_parallel_size:
            raise ValueError(f"{config.method} reads hidden states, which another stage has.")


class SpeculativeScheduler(Scheduler):
    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        super().__init__(config, block_manager)
        self.drafts: Drafts = {}  # for the next step
        self.num_draft_tokens = self.num_accepted_tokens = 0  # since the engine was made

    def schedule_tokens(self, seq: Sequence, num_tokens: int, step: StepPlan) -> None:
        """Behind the last known token come the drafts, if budget and free blocks are left."""
        note = step.notes.setdefault(SpeculativeNote, SpeculativeNote({}, {}, {}, set()))
        is_new = seq.seq_id not in self.known_seq_ids
        is_last = num_tokens == seq.num_uncomputed_tokens
        room = min(self.max_chunk, step.budget - step.reserved) - num_tokens
        drafts = self.drafts.get(seq.seq_id, ())[: max(0, room * is_last)]
        if drafts and not self.block_manager.can_append_slots(seq, num_tokens + len(drafts)):
            drafts = ()  # drafts preempt nobody
        num_next = self.num_next_drafts(seq, num_tokens + len(drafts)) if is_last else 0
        if is_last and (drafts or not is_new):
            note.known[seq.seq_id] = tuple(seq.token_ids[seq.num_computed_tokens :])
        if is_new and seq.extra_keys is not None:
            note.private.add(seq.seq_id)
        super().schedule_tokens(seq, num_tokens + len(drafts), step)
        if drafts:
            seq.num_output_placeholders += len(drafts)  # of the tokens that come, at most
            note.drafts[seq.seq_id] = drafts
        if num_next:
            note.limits[seq.seq_id] = num_next
            self.append_lookahead_slots(seq, num_next, step)

    def append_lookahead_slots(self, seq: Sequence, number: int, step: StepPlan) -> None:
        """Slots behind the step's tokens, in which a drafter writes keys and values of its own."""
        if num_slots := min(number, self.config.speculative_config.num_lookahead_tokens):
            first, blocks = self.block_manager.append_slots(seq, num_slots)
            item = step.scheduled[-1]
            first = item.first_new_block if item.new_block_ids else first
            blocks = [*item.new_block_ids, *blocks]
            step.scheduled[-1] = item._replace(first_new_block=first, new_block_ids=blocks)

    def num_next_drafts(self, seq: Sequence, num_tokens: int) -> int:
        """How many tokens may be drafted behind the next `num_tokens` tokens of `seq`. Slots for a
        drafter's keys and values are only taken if they are free."""
        config, end = self.config.speculative_config, seq.num_computed_tokens + num_tokens
        # This step brings a token at least, and one more comes with the drafts.
        room = seq.num_prompt_tokens + seq.max_tokens - max(end, seq.num_tokens + 2)
        number = min(config.num_tokens_for(len(self.running)), room)
        params = seq.sampling_params
        reads_output = params.logits_processors or params.has_penalties
        if number <= 0 or reads_output or seq.num_pending_forks:
            return 0
        num_slots = num_tokens + min(number, config.num_lookahead_tokens)
        return number if self.block_manager.can_append_slots(seq, num_slots) else 0

    def make_output(self, step: StepPlan) -> SchedulerOutput:
        """No steps overlap: what to compute next depends on what is accepted."""
        self.drafts = {}
        return replace(super().make_output(step), needs_sync=True)

    def update_sequence(
        self, seq: Sequence, item: ScheduledSequence, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        """Take back what was computed behind the accepted drafts, and keep the next ones."""
        end = item.num_computed_tokens + item.num_scheduled_tokens
        num_drafts = max(0, end - seq.num_tokens)
        seq.num_output_placeholders -= num_drafts
        updates = super().update_sequence(seq, item, model_output)
        if num_drafts:
            num_accepted = len(model_output.sampled[seq.seq_id]) - 1
            self.num_draft_tokens += num_drafts
            self.num_accepted_tokens += num_accepted
            seq.num_computed_tokens -= num_drafts - num_accepted
            start, end = item.num_computed_tokens, seq.num_computed_tokens
            self.block_manager.cache_blocks(seq, start, end)  # drafts are not found before
        room = max(0, seq.max_tokens - seq.num_output_tokens - 1)
        self.drafts[seq.seq_id] = model_output.notes[DraftsNote].get(seq.seq_id, ())[:room]
        return updates


class SpeculativeRunner(ModelRunner):
    proposer: Proposer | None = None  # on rank 0

    def load_model(self) -> Model:
        """The model; then the proposer, whose layers have a place in the KV blocks."""
        self.model, config = super().load_model(), self.config.speculative_config
        self.query_lens = (1, 1 + config.num_speculative_tokens)
        if self.parallel.tp_rank == 0:
            self.proposer = make_proposer(self, config)
        if config.rejection_sample_method == "standard":
            self.choose = RejectionSampler(self.choose)
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

    def make_sampling_batch(self, input_batch: InputBatch) -> SamplingBatch:
        batch = super().make_sampling_batch(input_batch)
        if self.config.speculative_config.rejection_sample_method == "standard":
            probs = self.proposer.draft_probs
            batch = with_drafts(batch, self.req_states, input_batch.arrays, probs)
        return batch

    def collect(self, pending: PendingOutput, tokens: list[Any], output: ModelOutput) -> None:
        """Of each sequence, take the tokens up to the first that is not the draft at its place. (An
        error behind a draft is found again by the next step.)"""
        drafts, taken = pending.input_batch.step.notes[SpeculativeNote].drafts, []
        num_right: dict[int, int] = {}  # of the drafts of a sequence; -1: one was wrong
        for sample, token in zip(pending.samples, tokens, strict=True):
            guesses, number = drafts.get(sample[0], ()), num_right.get(sample[0], 0)
            token_id = getattr(token, "token_id", None)  # None: an error
            if number == 0 or (number > 0 and token_id is not None):
                taken.append((sample, token))
            is_right = 0 <= number < len(guesses) and token_id == guesses[number]
            num_right[sample[0]] = number + 1 if is_right else -bool(guesses)
        samples, kept = zip(*taken, strict=True)
        super().collect(replace(pending, samples=samples), kept, output)

    @torch.inference_mode()
    def read(self, pending: PendingOutput) -> ModelOutput:
        output = super().read(pending)
        with self.no_autocast, self.current_gpu:
            output.notes[DraftsNote] = self.propose(pending, output)
        return output

    def propose(self, pending: PendingOutput, output: ModelOutput) -> DraftsNote:
        """Drafts for the next step. A proposer that fails, or guesses what is no token, brings
        none."""
        limits = pending.input_batch.step.notes[SpeculativeNote].limits
        try:
            found = self.proposer.propose(pending, output, limits)
            drafts = DraftsNote({i: tuple(each[: limits[i]]) for i, each in found.items()})
            ids = [0, *(token for each in drafts.values() for token in each)]
            if min(ids) < 0 or max(ids) >= self.model_config.vocab_size:
                raise ValueError(f"one of the drafts {ids[1:]} is no token")
        except Exception as error:
            logger.error("a proposer failed: no drafts for the next step", exc_info=error)
            return DraftsNote()
        return drafts
