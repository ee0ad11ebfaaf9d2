"""Who runs in this step, with how many tokens?

One rule (vLLM V1's): every sequence has num_tokens, of which num_computed_tokens are in the KV
cache. A step lets computed catch up with known, first for running sequences, then for waiting ones,
within the token budget, max_num_seqs and the free blocks. There is no prefill phase and no decode
phase. A step with a budget of 8 and three sequences:

    sequence   known  computed  scheduled
    A             13        12          1   a decode
    B             10         4          6   the rest of its prompt (a chunk)
    C (waiting)   20         0          1   what is left of the budget

The running list is kept in order of urgency (arrival, under the "priority" policy priority first).
So when blocks run out, the sequence to preempt is simply the last one, and it has never been
scheduled in the same step yet. A chunk always leaves one token of the budget to each running
sequence behind it: no prefill ever stalls a decode, and every running sequence advances each step.

Left out: preempting a running sequence merely because a more urgent one waits (V0's priority
policy did; V1 and we preempt only when blocks run out).

vLLM: vllm/core/scheduler.py (V0); vllm/v1/core/sched/: scheduler.py, request_queue.py (V1).
"""

from __future__ import annotations

import time
from bisect import insort

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.sequence import (
    ModelOutput,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)


class Scheduler:
    """Decides; executes nothing. Give it sequences, ask for steps, tell it what came of them.

    Invariant: `waiting` and `running` are sorted by urgency; a sequence is in exactly one of them,
    and holds blocks exactly if it is in `running`.
    """

    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        """`config` must be resolved (max_num_seqs and max_num_batched_tokens are numbers)."""
        assert config.max_num_seqs and config.max_num_batched_tokens, "EngineConfig not resolved"
        self.max_num_seqs = config.max_num_seqs
        self.token_budget = config.max_num_batched_tokens
        self.enable_chunked_prefill = config.enable_chunked_prefill
        self.max_chunk = config.max_num_batched_tokens
        if config.enable_chunked_prefill and config.long_prefill_token_threshold:
            self.max_chunk = config.long_prefill_token_threshold
        self.by_priority = config.scheduling_policy == "priority"
        self.block_manager = block_manager
        self.sequences: dict[int, Sequence] = {}  # every unfinished one
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._dropped_seq_ids: list[int] = []  # finished or preempted since the last step
        self._budget_left = self.token_budget  # by the last step

    def add(self, seq: Sequence) -> None:
        """Queue a sequence."""
        self.sequences[seq.seq_id] = seq
        insort(self.waiting, seq, key=self._urgency)

    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    # -- the step --

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, give its sequences their blocks, and count its tokens as computed.

        Returns an empty SchedulerOutput if there is nothing to do, or nothing ready.
        """
        scheduled: list[ScheduledSequence] = []
        new_sequences: list[NewSequence] = []
        num_running = len(self.running)
        budget = self._schedule_running(scheduled)
        if len(self.running) == num_running:  # nobody was preempted: there may be blocks to spare
            budget = self._schedule_waiting(budget, scheduled, new_sequences)
        self._budget_left = budget
        for item in scheduled:
            self.sequences[item.seq_id].num_computed_tokens += item.num_scheduled_tokens
        if not scheduled:
            return SchedulerOutput((), (), (), 0)
        dropped, self._dropped_seq_ids = tuple(self._dropped_seq_ids), []
        num_tokens = self.token_budget - budget
        return SchedulerOutput(tuple(scheduled), tuple(new_sequences), dropped, num_tokens)

    def _schedule_running(self, scheduled: list[ScheduledSequence]) -> int:
        """Let every running sequence catch up; preempt from the end when blocks run out.

        Appends to `scheduled` and returns what is left of the token budget.
        """
        budget = self.token_budget
        position = 0
        while position < len(self.running):
            seq = self.running[position]
            num_behind = len(self.running) - position - 1
            missing = seq.num_tokens - seq.num_computed_tokens
            num_tokens = min(missing, self.max_chunk, budget - num_behind)
            if not self._make_room(seq, num_tokens):
                break  # seq was the last, and had to go itself
            scheduled.append(self._give_blocks(seq, num_tokens))
            budget -= num_tokens
            position += 1
        return budget

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Preempt the least urgent until `num_tokens` more fit; False if that was `seq` itself."""
        while not self.block_manager.can_append(seq, num_tokens):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _schedule_waiting(
        self,
        budget: int,
        scheduled: list[ScheduledSequence],
        new_sequences: list[NewSequence],
    ) -> int:
        """Admit waiting sequences, most urgent first, until one does not fit.

        Appends to both lists and returns what is left of the token budget. A sequence that is not
        ready is passed over; one that merely does not fit blocks those behind it, or a stream of
        short requests could keep a long one waiting for ever.
        """
        position = 0
        while position < len(self.waiting) and budget > 0 and len(self.running) < self.max_num_seqs:
            seq = self.waiting[position]
            if not seq.is_ready():
                position += 1
                continue
            cached_blocks = self.block_manager.get_cached_blocks(seq)
            missing = seq.num_tokens - len(cached_blocks) * self.block_manager.block_size
            num_tokens = min(missing, self.max_chunk, budget)
            if num_tokens < missing and not self.enable_chunked_prefill:
                break
            if not self.block_manager.can_allocate(seq, cached_blocks):
                break
            del self.waiting[position]
            new_sequences.append(self._admit(seq, cached_blocks))
            scheduled.append(self._give_blocks(seq, num_tokens))
            budget -= num_tokens
        return budget

    def _admit(self, seq: Sequence, cached_blocks: list[int]) -> NewSequence:
        """WAITING -> RUNNING. Cache hits are counted here, once: not again after a preemption."""
        self.block_manager.allocate(seq, cached_blocks)
        seq.status = SequenceStatus.RUNNING
        if seq.metrics.first_scheduled_time is None:
            seq.metrics.first_scheduled_time = time.monotonic()
            seq.num_cached_tokens = seq.num_computed_tokens
        insort(self.running, seq, key=self._urgency)
        return NewSequence(
            seq.seq_id,
            tuple(seq.token_ids),
            tuple(cached_blocks),
            seq.sampling_params,
            seq.seed,
        )

    def _give_blocks(self, seq: Sequence, num_tokens: int) -> ScheduledSequence:
        """Allocate what the next `num_tokens` tokens of `seq` need."""
        new_block_ids = self.block_manager.append(seq, num_tokens)
        return ScheduledSequence(seq.seq_id, seq.num_computed_tokens, num_tokens, new_block_ids)

    # -- what came of it --

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        """Append the sampled tokens, end the sequences that have enough, and report both.

        A sequence that was aborted while the step ran is passed over.
        """
        updates: list[SequenceUpdate] = []
        now = time.monotonic()
        for item in scheduler_output.scheduled:
            seq = self.sequences.get(item.seq_id)
            sampled = model_output.sampled_token_ids.get(item.seq_id)
            if seq is None or not sampled:
                continue
            num_new = self._append_tokens(seq, sampled)
            if seq.metrics.first_token_time is None:
                seq.metrics.first_token_time = now
            seq.metrics.last_token_time = now
            logprobs = model_output.logprobs.get(item.seq_id, ())
            updates.append(SequenceUpdate(seq, sampled[:num_new], logprobs[:num_new]))
        for update in updates:
            if update.sequence.status is not SequenceStatus.RUNNING:
                self.finish(update.sequence.seq_id, update.sequence.status)
        return updates

    @staticmethod
    def _append_tokens(seq: Sequence, sampled: tuple[int, ...]) -> int:
        """Append until one token ends the sequence; return how many were appended."""
        for num_new, token_id in enumerate(sampled, start=1):
            seq.token_ids.append(token_id)
            if token_id in seq.stop_token_ids:
                seq.status = SequenceStatus.FINISHED_STOPPED
                if token_id in (seq.sampling_params.stop_token_ids or ()):
                    seq.stop_reason = token_id
                return num_new
            if seq.num_output_tokens >= seq.max_tokens:
                seq.status = SequenceStatus.FINISHED_LENGTH
                return num_new
        return len(sampled)

    def finish(
        self, seq_id: int, status: SequenceStatus, stop_reason: int | str | None = None
    ) -> Sequence | None:
        """End a sequence now, waiting or running, and free its blocks; None if it is not there."""
        seq = self.sequences.pop(seq_id, None)
        if seq is None:
            return None
        if seq.seq_id in self.block_manager.block_tables:
            self.running.remove(seq)
            self.block_manager.free(seq)
            self._dropped_seq_ids.append(seq_id)
        else:
            self.waiting.remove(seq)
        seq.status = status
        if stop_reason is not None:
            seq.stop_reason = stop_reason
        seq.metrics.finished_time = time.monotonic()
        return seq

    def abandon(self, scheduler_output: SchedulerOutput) -> None:
        """The step failed: take back what it promised. Its sequences wait to be computed anew."""
        self._dropped_seq_ids += scheduler_output.finished_seq_ids
        held = self.block_manager.block_tables
        items = [item for item in scheduler_output.scheduled if item.seq_id in held]
        touched = [self.sequences[item.seq_id] for item in items]
        for seq, item in zip(touched, items, strict=True):
            seq.num_computed_tokens = item.num_computed_tokens
            self.block_manager.uncache(seq)
        for seq in touched:
            self.running.remove(seq)
            self._preempt(seq)
        if len(items) < len(scheduler_output.scheduled):
            # One was aborted while the step ran: what it promised is in the free queue already,
            # and nobody remembers where. No sequence holds blocks now, so forget everything.
            self.block_manager.reset_prefix_cache()

    def _preempt(self, seq: Sequence) -> None:
        """RUNNING -> WAITING: free its blocks, to compute it again later (recompute).

        What it computed stays in the prefix cache as long as nobody needs the blocks, so coming
        back is often cheap.
        """
        self.block_manager.free(seq)
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING
        seq.metrics.num_preemptions += 1
        self._dropped_seq_ids.append(seq.seq_id)
        insort(self.waiting, seq, key=self._urgency)

    # -- questions --

    def why_waiting(self, seq_id: int) -> str:
        """One sentence that says what a waiting sequence waits for."""
        seq = self.sequences[seq_id]
        if seq.status is SequenceStatus.RUNNING:
            return "it is running"
        if not seq.is_ready():
            return "it is not ready"
        ahead = sum(other.is_ready() for other in self.waiting[: self.waiting.index(seq)])
        if ahead:
            return f"{ahead} more urgent sequences wait, too"
        if len(self.running) >= self.max_num_seqs:
            return f"max_num_seqs={self.max_num_seqs} sequences are running"
        cached_blocks = self.block_manager.get_cached_blocks(seq)
        if not self.block_manager.can_allocate(seq, cached_blocks):
            needed = self.block_manager.num_blocks_for(seq.num_tokens)
            return f"it needs {needed} blocks, {self.block_manager.num_free_blocks} are free"
        missing = seq.num_tokens - len(cached_blocks) * self.block_manager.block_size
        if self._budget_left < (1 if self.enable_chunked_prefill else missing):
            return "the token budget of the last step was used up"
        return "nothing any more: it can join the next step"

    def _urgency(self, seq: Sequence) -> tuple[int, int]:
        """Sort key, most urgent first: arrival order, under "priority" after the priority."""
        return (seq.priority if self.by_priority else 0, seq.seq_id)
