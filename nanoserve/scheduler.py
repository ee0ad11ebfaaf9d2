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

What a preempted sequence has computed is dropped and computed again later ("recompute"), or moved
to CPU blocks and back ("swap"). Coming back from swap goes before any admission that is not more
urgent.

*Overlapped steps.* schedule() may be called again before update_from_output was: the tokens that a
step in flight will bring count as there (num_output_placeholders), and their positions can be
scheduled before anybody knows what stands in them. Only a sequence whose next step depends on what
the token is sits out. A sequence that turns out to have ended has then computed one token too many,
which is dropped.

Left out: preempting a running sequence merely because a more urgent one waits (V0's priority
policy did; V1 and we preempt only when blocks run out).

vLLM: vllm/core/scheduler.py (V0); vllm/v1/core/sched/: scheduler.py, request_queue.py (V1).
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass, field, replace

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.sequence import (
    BlockPair,
    ForkSample,
    ModelOutput,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)


@dataclass
class _Step:
    """What schedule() collects for one SchedulerOutput."""

    budget: int  # tokens left
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    new_sequences: list[NewSequence] = field(default_factory=list)
    swap_out: list[BlockPair] = field(default_factory=list)
    swap_in: list[BlockPair] = field(default_factory=list)
    copy: list[BlockPair] = field(default_factory=list)
    needs_sync: bool = False


class Scheduler:
    """Decides; executes nothing. Give it sequences, ask for steps, tell it what came of them.

    Invariant: `waiting`, `swapped` and `running` are sorted by urgency; a sequence is in exactly
    one of them; it holds KV blocks exactly if it is running, CPU blocks exactly if it is swapped.
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
        self.swaps = config.preemption_mode == "swap"
        self.block_manager = block_manager
        self.sequences: dict[int, Sequence] = {}  # every unfinished one
        self.waiting: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.running: list[Sequence] = []
        self._budget_left = self.token_budget  # after the last step
        self._known_seq_ids: set[int] = set()  # what the runner has been told of
        self._dropped_seq_ids: list[int] = []  # of those, what it may forget
        self._is_restart = False  # a step failed: it must forget everything
        self._swapped_out: list[BlockPair] = []  # by a schedule() that came to nothing else

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
        step = _Step(self.token_budget, swap_out=self._swapped_out)
        num_running = len(self.running)
        self._schedule_running(step)
        if len(self.running) == num_running:  # nobody was preempted: there may be blocks to spare
            self._schedule_waiting(step)
        self._budget_left = step.budget
        self._swapped_out = [] if step.scheduled else step.swap_out
        if not step.scheduled:
            return SchedulerOutput((), (), (), 0)
        dropped, self._dropped_seq_ids = tuple(self._dropped_seq_ids), []
        is_restart, self._is_restart = self._is_restart, False
        return SchedulerOutput(
            scheduled=tuple(step.scheduled),
            new_sequences=tuple(step.new_sequences),
            finished_seq_ids=dropped,
            total_num_scheduled_tokens=self.token_budget - step.budget,
            # Of two copies to one CPU block the first was for a sequence that is gone since.
            blocks_to_swap_out=tuple({pair[1]: pair for pair in step.swap_out}.values()),
            blocks_to_swap_in=tuple(step.swap_in),
            blocks_to_copy=tuple(step.copy),
            is_restart=is_restart,
            needs_sync=step.needs_sync,
        )

    def _schedule_running(self, step: _Step) -> None:
        """Let every running sequence catch up; preempt from the end when blocks run out."""
        position = 0
        while position < len(self.running):
            seq = self.running[position]
            if seq.blocked_by_in_flight:
                position += 1
                continue
            num_behind = len(self.running) - position - 1
            missing = seq.num_tokens + seq.num_output_placeholders - seq.num_computed_tokens
            num_tokens = min(missing, self.max_chunk, step.budget - num_behind)
            if not self._make_room(seq, num_tokens, step):
                break  # seq was the last, and had to go itself
            self._schedule_tokens(seq, num_tokens, step)
            position += 1

    def _make_room(self, seq: Sequence, num_tokens: int, step: _Step) -> bool:
        """Preempt the least urgent until `num_tokens` more fit; False if that was `seq` itself."""
        while not self.block_manager.can_append(seq, num_tokens):
            victim = self.running[-1]
            if self.swaps and self.block_manager.can_swap_out(victim):
                self._swap_out(victim, step)
            else:
                self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _schedule_waiting(self, step: _Step) -> None:
        """Bring swapped sequences back and admit waiting ones, most urgent first, until one does
        not fit.

        A sequence that is not ready is passed over; one that merely does not fit blocks those
        behind it, or a stream of short requests could keep a long one waiting for ever.
        """
        position = 0  # in waiting: behind those that are not ready
        while step.budget > 0:
            waiting = self.waiting[position] if position < len(self.waiting) else None
            swapped = self.swapped[0] if self.swapped else None
            if swapped and not (waiting and self._urgency(waiting) < self._urgency(swapped)):
                if not self._swap_in(swapped, step):
                    return
            elif waiting is None:
                return
            elif not waiting.is_ready():
                position += 1
            elif not self._admit(waiting, step):
                return

    def _admit(self, seq: Sequence, step: _Step) -> bool:
        """WAITING -> RUNNING, if it fits. Cache hits are counted once: not after a preemption."""
        if not self._has_place_for(seq):
            return False
        cached_blocks = self.block_manager.get_cached_blocks(seq)
        num_cached = len(cached_blocks) * self.block_manager.block_size
        num_tokens = self._first_chunk(seq.num_tokens - num_cached, step)
        if not num_tokens or not self.block_manager.can_allocate(seq, cached_blocks):
            return False
        self.waiting.remove(seq)
        self.block_manager.allocate(seq, cached_blocks)
        if seq.metrics.first_scheduled_time is None:
            seq.metrics.first_scheduled_time = time.monotonic()
            seq.num_cached_tokens = seq.num_computed_tokens
        self._run(seq)
        self._schedule_tokens(seq, num_tokens, step)
        return True

    def _swap_in(self, seq: Sequence, step: _Step) -> bool:
        """SWAPPED -> RUNNING, if it fits. Nothing is computed again."""
        num_tokens = self._first_chunk(seq.num_tokens - seq.num_computed_tokens, step)
        if not seq.is_ready() or not num_tokens or not self._has_place_for(seq):
            return False
        if not self.block_manager.can_swap_in(seq):
            return False
        self.swapped.remove(seq)
        step.swap_in += self.block_manager.swap_in(seq)
        self._run(seq)
        self._schedule_tokens(seq, num_tokens, step)
        return True

    def _first_chunk(self, missing: int, step: _Step) -> int:
        """How many of its missing tokens a sequence that joins the step gets; 0 if they do not all
        fit and may not be split."""
        num_tokens = min(missing, self.max_chunk, step.budget)
        return num_tokens if num_tokens == missing or self.enable_chunked_prefill else 0

    def _has_place_for(self, seq: Sequence, num_freed: int = 0) -> bool:
        """Within max_num_seqs, counting the branches that are still to fork off."""
        num_places = len(self.running) + sum(other.num_pending_forks for other in self.running)
        return num_places - num_freed + 1 + seq.num_pending_forks <= self.max_num_seqs

    def _run(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=self._urgency)

    def _schedule_tokens(self, seq: Sequence, num_tokens: int, step: _Step) -> None:
        """Put the next `num_tokens` tokens of `seq` into the step: allocate their blocks, count the
        tokens as computed and, after the last known one, the token that will come as promised."""
        block_table = self.block_manager.block_tables[seq.seq_id]
        if seq.seq_id not in self._known_seq_ids:
            self._known_seq_ids.add(seq.seq_id)
            step.new_sequences.append(_introduce(seq, block_table))
        copied = self.block_manager.copy_on_write(seq)
        new_block_ids = self.block_manager.append(seq, num_tokens)
        if copied is not None:
            step.copy.append(copied)
            new_block_ids.insert(0, copied[1])
        first_new_block = len(block_table) - len(new_block_ids)
        step.budget -= num_tokens
        step.scheduled.append(
            ScheduledSequence(
                seq.seq_id, seq.num_computed_tokens, num_tokens, first_new_block, new_block_ids
            )
        )
        seq.num_computed_tokens += num_tokens
        if seq.num_computed_tokens == seq.num_tokens + seq.num_output_placeholders:
            seq.num_output_placeholders += 1
            step.needs_sync |= seq.needs_sync

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
            sampled = model_output.sampled_token_ids.get(item.seq_id, ())
            prompt_logprobs = model_output.prompt_logprobs.get(item.seq_id)
            if seq is None or not (sampled or prompt_logprobs):
                continue
            seq.num_output_placeholders -= bool(sampled)
            for branch, fork in enumerate(model_output.forks.get(item.seq_id, ()), start=1):
                updates.append(self._fork_branch(seq, branch, fork))
            num_new = self._append_tokens(seq, sampled)
            logprobs = model_output.logprobs.get(item.seq_id, ())[:num_new]
            updates.append(SequenceUpdate(seq, sampled[:num_new], logprobs, prompt_logprobs))
        for update in updates:
            if update.new_token_ids:
                update.sequence.metrics.note_token(now)
            if update.sequence.status.finish_reason is not None:
                self.finish(update.sequence.seq_id, update.sequence.status)
        return updates

    def _fork_branch(self, parent: Sequence, branch: int, first: ForkSample) -> SequenceUpdate:
        """Let a branch of the request begin with its own first token."""
        child = replace(
            parent,
            seq_id=parent.seq_id + branch,
            branch=branch,
            num_pending_forks=0,
            num_output_placeholders=0,
            metrics=replace(parent.metrics),
            block_hashes=[],
        )
        parent.num_pending_forks -= 1
        self.add_fork(parent, child)
        self._append_tokens(child, (first.token_id,))
        return SequenceUpdate(child, (first.token_id,), first.logprobs)

    def add_fork(self, parent: Sequence, child: Sequence, ends_parent: bool = False) -> None:
        """Let `child`, whose tokens begin with those that are computed of `parent`, run beside it
        on shared blocks; the runner is told with the next step.

        If `parent` holds no blocks any more, or no place is left, the child waits instead, and
        finds what is still in the prefix cache. With `ends_parent` the parent is finished, and
        leaves the child its place.
        """
        if parent not in self.running or not self._has_place_for(child, num_freed=ends_parent):
            self.add(child)
        else:
            self.block_manager.fork(parent, child)
            self.sequences[child.seq_id] = child
            self._run(child)
        if ends_parent:
            self.finish(parent.seq_id, SequenceStatus.FINISHED_STOPPED)

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
        if seq in self.running:
            self._drop(seq)
        elif seq in self.swapped:
            self.swapped.remove(seq)
        else:
            self.waiting.remove(seq)
        self.block_manager.free(seq)
        seq.status = status
        if stop_reason is not None:
            seq.stop_reason = stop_reason
        seq.metrics.finished_time = time.monotonic()
        return seq

    def preempt_all(self) -> None:
        """Something failed within a step, wherever: trust nothing but the sequences themselves.

        Every block is free and forgotten, every unfinished sequence waits to be computed anew, and
        the next step tells the runner to forget all it knows. That costs a recompute, and is right
        whatever had been done: scheduled or half scheduled, written or not, copied or not.
        """
        self.block_manager.reset()
        self.running, self.swapped = [], []
        self._known_seq_ids, self._dropped_seq_ids = set(), []
        self._is_restart = True
        self._swapped_out = []
        for seq in self.sequences.values():
            if seq.status is not SequenceStatus.WAITING:
                seq.metrics.num_preemptions += 1
            seq.status = SequenceStatus.WAITING
            seq.num_computed_tokens = seq.num_output_placeholders = 0
        self.waiting = sorted(self.sequences.values(), key=self._urgency)

    def _drop(self, seq: Sequence) -> None:
        """Take `seq` out of `running`; the runner may forget it."""
        self.running.remove(seq)
        if seq.seq_id in self._known_seq_ids:
            self._known_seq_ids.remove(seq.seq_id)
            self._dropped_seq_ids.append(seq.seq_id)

    def _preempt(self, seq: Sequence) -> None:
        """RUNNING -> WAITING: free its blocks, to compute it again later (recompute).

        What it computed stays in the prefix cache as long as nobody needs the blocks, so coming
        back is often cheap.
        """
        self._drop(seq)
        seq.metrics.num_preemptions += 1
        self._wait_again(seq)

    def _wait_again(self, seq: Sequence) -> None:
        """-> WAITING, with nothing computed."""
        self.block_manager.free(seq)
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING
        insort(self.waiting, seq, key=self._urgency)

    def _swap_out(self, seq: Sequence, step: _Step) -> None:
        """RUNNING -> SWAPPED: move its blocks to the CPU pool."""
        self._drop(seq)
        step.swap_out += self.block_manager.swap_out(seq)
        seq.status = SequenceStatus.SWAPPED
        seq.metrics.num_preemptions += 1
        insort(self.swapped, seq, key=self._urgency)

    # -- questions --

    def why_waiting(self, seq_id: int) -> str:
        """One sentence that says what a waiting or swapped sequence waits for."""
        seq = self.sequences[seq_id]
        is_swapped = seq.status is SequenceStatus.SWAPPED
        if seq.status is SequenceStatus.RUNNING:
            return "it is running"
        if not (is_swapped or seq.is_ready()):
            return "it is not ready"
        others = [*self.swapped, *(other for other in self.waiting if other.is_ready())]
        ahead = sum(self._urgency(other) < self._urgency(seq) for other in others)
        if ahead:
            return f"{ahead} more urgent sequences wait, too"
        if not self._has_place_for(seq):
            return f"max_num_seqs={self.max_num_seqs} sequences are running (or about to fork)"
        cached_blocks = [] if is_swapped else self.block_manager.get_cached_blocks(seq)
        if not self.block_manager.can_allocate(seq, cached_blocks):
            needed = self.block_manager.num_blocks_for(seq.num_tokens)
            free = self.block_manager.num_free_blocks
            is_out = "it is swapped out and" if is_swapped else "it"
            return f"{is_out} needs {needed} blocks, {free} are free"
        num_cached = len(cached_blocks) * self.block_manager.block_size
        missing = seq.num_tokens - (seq.num_computed_tokens if is_swapped else num_cached)
        if self._budget_left < (1 if self.enable_chunked_prefill else missing):
            return "the token budget of the last step was used up"
        return "nothing any more: it can join the next step"

    def _urgency(self, seq: Sequence) -> tuple[int, float, int]:
        """Sort key, most urgent first: arrival order, under "priority" after the priority. Forks
        arrived with their request."""
        priority = seq.priority if self.by_priority else 0
        return (priority, seq.metrics.arrival_time, seq.seq_id)


def _introduce(seq: Sequence, block_table: list[int]) -> NewSequence:
    """Everything the runner must know of a sequence it has not met."""
    return NewSequence(
        seq_id=seq.seq_id,
        token_ids=tuple(seq.token_ids),
        num_prompt_tokens=seq.num_prompt_tokens,
        block_ids=tuple(block_table),
        sampling_params=seq.sampling_params,
        stop_token_ids=seq.stop_token_ids,
        bad_word_ids=seq.bad_word_ids,
        seed=seq.seed,
        branch=seq.branch,
        num_samples=1 + seq.num_pending_forks,
    )
