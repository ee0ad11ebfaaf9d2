"""Who runs in this step, with how many tokens?

One rule (vLLM V1's): every sequence has num_tokens, of which num_computed_tokens are in the KV
cache. A step lets the computed tokens catch up with the known ones, first for running sequences,
then for waiting ones, within the token budget, max_num_seqs and the free blocks. There is no
prefill phase and no decode phase. A step with a budget of 8 and three sequences:

    sequence   known  computed  scheduled
    A             13        12          1   a decode
    B             10         4          6   the rest of its prompt (a chunk)
    C (waiting)   20         0          1   what is left of the budget

The running list is sorted by urgency: by arrival, under the "priority" policy by priority first.
When blocks run out, the last running sequence is preempted. Sequences are scheduled from the front
of the list, so this step has not scheduled the last one yet. A chunk always leaves one token of the
budget to each running sequence behind it: no prefill ever stalls a decode, and every running
sequence advances each step.

The KV of a preempted sequence is dropped and computed again later ("recompute"), or moved to CPU
blocks and back ("swap"). A swapped sequence comes back before any less urgent admission.

*Overlapped steps.* schedule() may be called again before update_from_output. The tokens that a step
in flight will bring are counted (num_output_placeholders), so their positions can be scheduled
before their values are known. Only a sequence whose next step depends on the value is passed over.
A sequence that turns out to have ended has then computed one token too many, which is dropped.

Left out: preempting a running sequence only because a more urgent one waits. (V0's priority policy
did; V1 and we preempt only when blocks run out.)

vLLM: vllm/core/scheduler.py (V0); vllm/v1/core/sched/: scheduler.py, request_queue.py (V1).
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass
from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.sequence import (
    ModelOutput,
    NewSequence,
    SampledToken,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
    new,
)


@dataclass
class StepPlan:
    """A step while it is being decided."""

    budget: int  # tokens left
    reserved: int = 0  # of these, one for each running sequence that has not had its turn yet
    scheduled: list[ScheduledSequence] = new(list)
    new_sequences: list[NewSequence] = new(list)
    needs_sync: bool = False
    notes: dict[type, Any] = new(dict)


class Scheduler:
    """Decides each step and executes nothing. `add` queues a sequence, `schedule` returns the next
    step, `update_from_output` takes the result of a step.

    Invariant: `waiting`, `swapped` and `running` are sorted by urgency; a sequence is in exactly
    one of them; it holds KV blocks exactly if it is running, CPU blocks exactly if it is swapped.
    """

    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        self.config = config
        limit = config.enable_chunked_prefill and config.long_prefill_token_threshold
        self.max_chunk = limit or config.max_num_batched_tokens  # tokens of one sequence in a step
        self.block_manager = block_manager
        self.sequences: dict[int, Sequence] = {}  # every unfinished one
        self.waiting: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.running: list[Sequence] = []
        # What the runner knows: sequences it has a row for, of these the ones it may drop with the
        # next step, and whether it must drop all of them because a step failed.
        self.known_seq_ids: set[int] = set()
        self.dropped_seq_ids: list[int] = []
        self.is_restart = False

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. (One that is known already is queued already.)"""
        if seq.seq_id in self.sequences:
            return
        if seq.metrics.queued_ts is None:
            seq.metrics.queued_ts = time.monotonic()
        insort(self.waiting, seq, key=self.urgency)
        self.sequences[seq.seq_id] = seq

    def urgency(self, seq: Sequence) -> tuple[int, float, int]:
        """Sort key, most urgent first: arrival order, under "priority" after the priority. Forks
        arrived with their request."""
        priority = seq.priority if self.config.scheduling_policy == "priority" else 0
        return (priority, seq.metrics.queued_ts, seq.seq_id)

    # -- the step --

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, give its sequences their blocks, and count its tokens as computed.

        Returns an empty SchedulerOutput if no sequence can be scheduled.
        """
        step = StepPlan(self.config.max_num_batched_tokens)
        if self.schedule_running(step) and (self.waiting or self.swapped):
            self.schedule_waiting(step)
        return self.make_output(step) if step.scheduled else SchedulerOutput()

    def schedule_running(self, step: StepPlan) -> bool:
        """Let every running sequence catch up; preempt from the end when blocks run out. True if
        there was no preemption: there may be free blocks."""
        num_running = len(self.running)
        for position, seq in enumerate(self.running):  # preemption shortens the list behind seq
            if self.is_blocked(seq):
                continue
            step.reserved = len(self.running) - position - 1
            room = min(self.max_chunk, step.budget - step.reserved)
            num_tokens = min(seq.num_uncomputed_tokens, room)
            fits = self.block_manager.can_append_slots(seq, num_tokens)
            if not (fits or self.preempt_until_fits(seq, num_tokens)):
                break  # seq was the last of the list, and was preempted itself
            self.schedule_tokens(seq, num_tokens, step)
        return len(self.running) == num_running

    def schedule_waiting(self, step: StepPlan) -> None:
        """Swap sequences in and admit waiting ones, most urgent first, until one does not fit.

        A waiting sequence that is not ready is passed over. One that does not fit, or a swapped one
        that is not ready, blocks those behind it: otherwise a stream of short requests could keep a
        long one waiting for ever.
        """
        num_passed = 0  # in waiting: not ready
        while step.budget > 0:
            waiting = self.waiting[num_passed] if num_passed < len(self.waiting) else None
            swapped = self.swapped[0] if self.swapped else None
            if swapped and not (waiting and self.urgency(waiting) < self.urgency(swapped)):
                if not (self.is_ready(swapped) and self.swap_in(swapped, step)):
                    return
            elif waiting is None:
                return
            elif not self.is_ready(waiting):
                num_passed += 1
            elif not self.admit(waiting, step):
                return

    def is_blocked(self, seq: Sequence) -> bool:
        """Must `seq` wait until its token in flight is read? It may be the last one. (A token that
        the next step depends on is never in flight here: needs_sync.)"""
        if not seq.num_output_placeholders:
            return False
        return seq.num_output_tokens + seq.num_output_placeholders >= seq.max_tokens

    def is_ready(self, seq: Sequence) -> bool:
        """May `seq` leave the queue? Not while a token of it, preempted meanwhile, is in flight."""
        return seq.num_output_placeholders == 0

    def admit(self, seq: Sequence, step: StepPlan) -> bool:
        """WAITING -> RUNNING, if `seq` fits. The first admission alone sets metrics.scheduled_ts
        and num_cached_tokens."""
        cached_blocks = self.block_manager.get_computed_blocks(seq)
        num_cached = len(cached_blocks) * self.block_manager.block_size
        num_tokens = self.first_chunk(seq.num_tokens - num_cached, step)
        fits = num_tokens and self.has_seq_slot(seq)
        if not (fits and self.block_manager.can_allocate(seq, cached_blocks)):
            return False
        self.waiting.remove(seq)
        self.block_manager.allocate(seq, cached_blocks)
        if seq.metrics.scheduled_ts is None:
            seq.metrics.scheduled_ts = time.monotonic()
            seq.num_cached_tokens = seq.num_computed_tokens
        self.start_running(seq)
        self.schedule_tokens(seq, num_tokens, step)
        return True

    def swap_in(self, seq: Sequence, step: StepPlan) -> bool:
        """SWAPPED -> RUNNING, if `seq` fits. Nothing is computed again."""
        num_tokens = self.first_chunk(seq.num_uncomputed_tokens, step)
        if not (num_tokens and self.has_seq_slot(seq) and self.block_manager.can_swap_in(seq)):
            return False
        self.swapped.remove(seq)
        self.block_manager.swap_in(seq)
        self.start_running(seq)
        self.schedule_tokens(seq, num_tokens, step)
        return True

    def first_chunk(self, num_uncomputed: int, step: StepPlan) -> int:
        """How many of its uncomputed tokens a sequence gets in its first step. 0 if chunked prefill
        is off and the step has no room for all of them."""
        num_tokens = min(num_uncomputed, self.max_chunk, step.budget)
        is_whole = num_tokens == num_uncomputed
        return num_tokens if is_whole or self.config.enable_chunked_prefill else 0

    def has_seq_slot(self, seq: Sequence) -> bool:
        """May `seq` run within max_num_seqs? Branches that have not forked off are counted too."""
        num_running = len(self.running) + sum(other.num_pending_forks for other in self.running)
        return num_running + 1 + seq.num_pending_forks <= self.config.max_num_seqs

    def start_running(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=self.urgency)

    def schedule_tokens(self, seq: Sequence, num_tokens: int, step: StepPlan) -> None:
        """Put the next `num_tokens` tokens of `seq` into the step: allocate their blocks and count
        them as computed. If they are the last ones, the step also brings a new token."""
        if seq.seq_id not in self.known_seq_ids:
            self.known_seq_ids.add(seq.seq_id)
            step.new_sequences.append(self.make_new_sequence(seq))
        start, is_last = seq.num_computed_tokens, num_tokens >= seq.num_uncomputed_tokens
        new_blocks = self.block_manager.append_slots(seq, num_tokens)
        step.scheduled.append(ScheduledSequence(seq.seq_id, start, num_tokens, *new_blocks))
        step.budget -= num_tokens
        seq.num_computed_tokens += num_tokens
        if is_last:
            seq.num_output_placeholders += 1
            # The sampler reads its tokens, or new sequences are made of the next one.
            step.needs_sync |= seq.reads_output or seq.num_pending_forks > 0

    def make_new_sequence(self, seq: Sequence) -> NewSequence:
        """All that the runner needs to know about a sequence."""
        return NewSequence(
            seq_id=seq.seq_id,
            token_ids=tuple(seq.token_ids),
            num_prompt_tokens=seq.num_prompt_tokens,
            block_ids=tuple(self.block_manager.block_tables[seq.seq_id]),
            sampling_params=seq.sampling_params,
            stop_token_ids=seq.stop_token_ids,
            bad_word_ids=seq.bad_word_ids,
            seed=seq.seed,
            branch=seq.branch,
            num_samples=1 + seq.num_pending_forks,
        )

    def make_output(self, step: StepPlan) -> SchedulerOutput:
        """The step, as the runner gets it."""
        dropped, self.dropped_seq_ids = tuple(self.dropped_seq_ids), []
        is_restart, self.is_restart = self.is_restart, False
        return SchedulerOutput(
            scheduled=tuple(step.scheduled),
            new_sequences=tuple(step.new_sequences),
            dropped_seq_ids=dropped,
            **self.block_manager.take_copies(),
            is_restart=is_restart,
            needs_sync=step.needs_sync,
            notes=step.notes,
        )

    # -- the result of the step --

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        """Append the sampled tokens, finish the sequences that reached their end, and report both.

        The tokens of a sequence that was aborted while the step ran are dropped.
        """
        updates: list[SequenceUpdate] = []
        for item in scheduler_output.scheduled:
            if (seq := self.sequences.get(item.seq_id)) is not None:
                updates += self.update_sequence(seq, item, model_output)
        now = time.monotonic()
        for update in updates:
            seq, metrics = update.sequence, update.sequence.metrics
            if update.tokens:
                metrics.first_token_ts, metrics.last_token_ts = metrics.first_token_ts or now, now
            if seq.status.finish_reason is not None:
                self.finish(seq.seq_id, seq.status)
        return updates

    def update_sequence(
        self, seq: Sequence, item: ScheduledSequence, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        """What the step brought `seq`, and the branches that fork off it; [] for a chunk of a
        prompt."""
        tokens = model_output.sampled.get(seq.seq_id, [])
        prompt_logprobs = model_output.prompt_logprobs.get(seq.seq_id)
        if not (tokens or prompt_logprobs):
            return []
        if tokens:
            seq.num_output_placeholders -= 1
            seq.num_failures = 0
        forks = model_output.forks.get(seq.seq_id, ())
        updates = [self.fork_branch(seq, i, first) for i, first in enumerate(forks, start=1)]
        num_new = self.append_tokens(seq, [token.token_id for token in tokens])
        return [*updates, SequenceUpdate(seq, tokens[:num_new], prompt_logprobs)]

    def fork_branch(self, parent: Sequence, branch: int, first: SampledToken) -> SequenceUpdate:
        """Start a branch of the request on the blocks of `parent`, with its own first token. If
        `parent` was preempted meanwhile (a chapter may schedule on before this step is read), the
        branch waits, and finds the prompt in the cache."""
        child = parent.make_branch(branch)
        parent.num_pending_forks -= 1
        if parent.status is SequenceStatus.RUNNING:
            self.block_manager.fork(parent, child)
            self.sequences[child.seq_id] = child
            self.start_running(child)
        else:
            self.add(child)
        self.append_tokens(child, [first.token_id])
        return SequenceUpdate(child, [first])

    def append_tokens(self, seq: Sequence, token_ids: list[int]) -> int:
        """Append tokens until one ends the sequence. Returns how many were appended."""
        for number, token_id in enumerate(token_ids, start=1):
            seq.token_ids.append(token_id)
            if token_id in seq.stop_token_ids:
                seq.status = SequenceStatus.FINISHED_STOPPED
                seq.stop_reason = None if token_id == seq.eos_token_id else token_id
                return number
            if seq.num_output_tokens >= seq.max_tokens:
                seq.status = SequenceStatus.FINISHED_LENGTH
                return number
        return len(token_ids)

    # -- out of the running list --

    def finish(self, seq_id: int, status: SequenceStatus) -> None:
        """End a sequence now, waiting or running, and free its blocks, if it is unfinished."""
        seq = self.sequences.pop(seq_id, None)
        if seq is not None:
            self.remove(seq)
            self.block_manager.free(seq)
            seq.status = status
            seq.metrics.finished_ts = time.monotonic()

    def finish_request(self, root: Sequence, status: SequenceStatus) -> None:
        """End all sequences of a request: `root`, and its branches, those that forked off in this
        very step among them. Their ids follow that of the root."""
        for seq_id in range(root.seq_id, root.seq_id + root.sampling_params.n):
            self.finish(seq_id, status)

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out of its list; the runner may drop it, if it knows it."""
        lists = (self.running, self.swapped, self.waiting)
        next(each for each in lists if seq in each).remove(seq)
        if seq.seq_id in self.known_seq_ids:
            self.known_seq_ids.remove(seq.seq_id)
            self.dropped_seq_ids.append(seq.seq_id)

    def preempt_until_fits(self, seq: Sequence, num_tokens: int) -> bool:
        """Preempt the least urgent sequence until `num_tokens` more tokens of `seq` fit. False if
        `seq` itself had to be preempted."""
        while not self.block_manager.can_append_slots(seq, num_tokens):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is seq:
                return False
        return True

    def preempt(self, seq: Sequence) -> None:
        """RUNNING -> SWAPPED: move its blocks to the CPU pool, if swapping is on and there is room.
        Else RUNNING -> WAITING: free its blocks, to compute it again later (recompute).

        Freed blocks stay in the prefix cache until other sequences need them, so computing the
        sequence again is often cheap.
        """
        self.remove(seq)
        seq.metrics.num_preemptions += 1
        if self.config.preemption_mode == "swap" and self.block_manager.can_swap_out(seq):
            self.block_manager.swap_out(seq)
            seq.status = SequenceStatus.SWAPPED
            insort(self.swapped, seq, key=self.urgency)
        else:
            self.block_manager.free(seq)
            seq.num_computed_tokens = 0
            seq.status = SequenceStatus.WAITING
            insort(self.waiting, seq, key=self.urgency)

    def preempt_all(self) -> None:
        """After a failed step: free and forget every block, and queue every unfinished sequence to
        be computed again. The next step tells the runner to drop all its rows.

        Only the sequences' own tokens are trusted. So the recovery is right wherever the step
        failed: half scheduled, half written or half copied. The cost is one recompute.
        """
        self.block_manager.reset()
        self.running, self.swapped = [], []
        self.known_seq_ids, self.dropped_seq_ids, self.is_restart = set(), [], True
        for seq in self.sequences.values():
            seq.status = SequenceStatus.WAITING
            seq.num_computed_tokens = seq.num_output_placeholders = 0
        self.waiting = sorted(self.sequences.values(), key=self.urgency)
