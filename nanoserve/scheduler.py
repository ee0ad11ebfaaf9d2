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

*Pipelines.* With pipeline stages, every sequence with a token in flight is passed over, because the
first stage must know the token. A step takes only an even share of the running sequences' decodes,
so that there is one step for each stage, and all stages have as much to do. Chunks of prompts are
in every step, and take nobody's turn.

*Drafts.* With speculative decoding a step also computes guesses behind the last known token, if
budget and free blocks are left. What was computed behind a rejected draft is taken back
(sequence.py has a picture). Each such step is read before the next is scheduled.

Left out: preempting a running sequence only because a more urgent one waits. (V0's priority policy
did; V1 and we preempt only when blocks run out.)

vLLM: vllm/core/scheduler.py (V0); vllm/v1/core/sched/: scheduler.py, request_queue.py (V1).
"""

from __future__ import annotations

import time
from bisect import insort
from dataclasses import dataclass, field, replace
from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.exceptions import describe_error
from nanoserve.sequence import (
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
    needs_sync: bool = False


class Scheduler:
    """Decides each step and executes nothing. `add` queues a sequence, `schedule` returns the next
    step, `update_from_output` takes the result of a step.

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
        self.speculative_config = config.speculative_config  # None: nothing is drafted
        self.is_pipelined = config.pipeline_parallel_size > 1
        self.max_concurrent_batches = config.max_concurrent_batches
        self.block_manager = block_manager
        self.connector: Any = None  # keeps what the prefix cache evicts: extras/kv_offload
        self.sequences: dict[int, Sequence] = {}  # every unfinished one
        self.waiting: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.running: list[Sequence] = []
        # What the runner knows: sequences it has a row for, of these the ones it may drop with the
        # next step, and whether it must drop all of them because a step failed.
        self._known_seq_ids: set[int] = set()
        self._dropped_seq_ids: list[int] = []
        self._is_restart = False

    def __repr__(self) -> str:
        running, waiting, swapped = map(len, (self.running, self.waiting, self.swapped))
        return f"{type(self).__name__}({running} running, {waiting} waiting, {swapped} swapped)"

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. In a pipeline, the first stage must know each of its tokens."""
        seq.always_sync |= self.is_pipelined
        self.sequences[seq.seq_id] = seq
        insort(self.waiting, seq, key=self.urgency)
        if self.connector is not None:
            self.connector.on_new_request(seq)

    def has_unfinished(self) -> bool:
        return bool(self.sequences)

    # -- the step --

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, give its sequences their blocks, and count its tokens as computed.

        Returns an empty SchedulerOutput if no sequence can be scheduled.
        """
        step = _Step(self.token_budget)
        num_running = len(self.running)
        self._schedule_running(step)
        if len(self.running) == num_running:  # no preemption: there may be free blocks
            self._schedule_waiting(step)
        if not step.scheduled:
            return SchedulerOutput((), (), (), 0)
        dropped, self._dropped_seq_ids = tuple(self._dropped_seq_ids), []
        is_restart, self._is_restart = self._is_restart, False
        copies = self.block_manager.take_copies()
        output = SchedulerOutput(
            scheduled=tuple(step.scheduled),
            new_sequences=tuple(step.new_sequences),
            finished_seq_ids=dropped,
            total_num_scheduled_tokens=self.token_budget - step.budget,
            blocks_to_swap_out=copies.swap_out,
            blocks_to_swap_in=copies.swap_in,
            blocks_to_copy=copies.copy_on_write,
            is_restart=is_restart,
            needs_sync=step.needs_sync or self.speculative_config is not None,
        )
        if self.connector is None:
            return output
        return replace(output, kv_connector_metadata=self.connector.build_connector_meta(output))

    def _schedule_running(self, step: _Step) -> None:
        """Let every running sequence catch up; preempt from the end when blocks run out."""
        num_decodes = self._num_decodes_of_a_step()
        for position, seq in enumerate(self.running):  # preemption shortens the list behind seq
            is_decode = seq.num_uncomputed_tokens == 1
            if seq.blocked_by_in_flight or (is_decode and not num_decodes):
                continue
            num_decodes -= is_decode
            num_behind = len(self.running) - position - 1
            most = min(self.max_chunk, step.budget - num_behind)
            num_tokens = min(seq.num_uncomputed_tokens, most)
            if not self._preempt_until_fits(seq, num_tokens):
                break  # seq was the last of the list, and was preempted itself
            drafts = seq.spec_token_ids and seq.spec_token_ids[: most - num_tokens]
            if drafts and not self.block_manager.can_append(seq, num_tokens + len(drafts)):
                drafts = ()  # drafts preempt nobody
            self._schedule_tokens(seq, num_tokens, step, drafts)

    def _num_decodes_of_a_step(self) -> int:
        """How many running sequences a step may have beside chunks: all, or an even share of them,
        in flight or not. (Of those that are free now, a step would take all: for ever the same.)"""
        if not self.is_pipelined:
            return self.max_num_seqs
        num_decodes = sum(seq.num_uncomputed_tokens == 1 for seq in self.running)
        return -(-num_decodes // self.max_concurrent_batches)

    def _preempt_until_fits(self, seq: Sequence, num_tokens: int) -> bool:
        """Preempt the least urgent sequence until `num_tokens` more tokens of `seq` fit. False if
        `seq` itself had to be preempted."""
        while not self.block_manager.can_append(seq, num_tokens):
            victim = self.running[-1]
            if self.swaps and self.block_manager.can_swap_out(victim):
                self._swap_out(victim)
            else:
                self.preempt(victim)
            if victim is seq:
                return False
        return True

    def _schedule_waiting(self, step: _Step) -> None:
        """Swap sequences in and admit waiting ones, most urgent first, until one does not fit.

        A sequence that is not ready is passed over. A sequence that does not fit blocks the ones
        behind it: otherwise a stream of short requests could keep a long one waiting for ever.
        """
        position = 0  # in waiting: the sequences before it are not ready
        while step.budget > 0:
            waiting = self.waiting[position] if position < len(self.waiting) else None
            swapped = self.swapped[0] if self.swapped else None
            if swapped and not (waiting and self.urgency(waiting) < self.urgency(swapped)):
                if not self._swap_in(swapped, step):
                    return
            elif waiting is None:
                return
            elif waiting.is_held or not waiting.is_ready():
                position += 1
            elif self.connector is not None and not self.connector.is_ready(waiting):
                position += 1  # its blocks are on their way from another tier
            elif not self._admit(waiting, step):
                return

    def _admit(self, seq: Sequence, step: _Step) -> bool:
        """WAITING -> RUNNING, if `seq` fits. The first admission alone sets metrics.scheduled_ts
        and num_cached_tokens."""
        if not self.has_seq_slot(seq):
            return False
        cached_blocks = self.block_manager.get_cached_blocks(seq)
        num_cached, num_external = len(cached_blocks) * self.block_manager.block_size, 0
        if self.connector is not None:
            num_external = self.connector.get_num_new_matched_tokens(seq, num_cached)
        num_tokens = self._num_tokens_to_admit(seq.num_tokens - num_cached - num_external, step)
        if not num_tokens or not self.block_manager.can_allocate(seq, cached_blocks):
            return False
        self.waiting.remove(seq)
        self.block_manager.allocate(seq, cached_blocks)
        if self.connector is not None:
            block_ids = self.block_manager.append(seq, num_external)[1]
            self.connector.update_state_after_alloc(seq, block_ids, num_external)
            seq.num_computed_tokens += num_external
        if seq.metrics.scheduled_ts is None:
            seq.metrics.scheduled_ts = time.monotonic()
            seq.num_cached_tokens = seq.num_computed_tokens
        self._start_running(seq)
        self._schedule_tokens(seq, num_tokens, step)
        return True

    def _swap_in(self, seq: Sequence, step: _Step) -> bool:
        """SWAPPED -> RUNNING, if `seq` fits. Nothing is computed again."""
        num_tokens = self._num_tokens_to_admit(seq.num_uncomputed_tokens, step)
        fits = num_tokens and self.has_seq_slot(seq) and self.block_manager.can_swap_in(seq)
        if not fits or not seq.is_ready():
            return False
        self.swapped.remove(seq)
        self.block_manager.swap_in(seq)
        self._start_running(seq)
        self._schedule_tokens(seq, num_tokens, step)
        return True

    def _num_tokens_to_admit(self, num_uncomputed: int, step: _Step) -> int:
        """How many of its uncomputed tokens a sequence gets in its first step. 0 if chunked prefill
        is off and the step has no room for all of them."""
        num_tokens = min(num_uncomputed, self.max_chunk, step.budget)
        return num_tokens if num_tokens == num_uncomputed or self.enable_chunked_prefill else 0

    def has_seq_slot(self, seq: Sequence, num_leaving: int = 0) -> bool:
        """May `seq` run within max_num_seqs, when `num_leaving` running sequences are about to end?
        Branches that have not forked off yet are counted too."""
        num_running = len(self.running) + sum(other.num_pending_forks for other in self.running)
        return num_running - num_leaving + 1 + seq.num_pending_forks <= self.max_num_seqs

    def _start_running(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=self.urgency)

    def _schedule_tokens(
        self, seq: Sequence, num_tokens: int, step: _Step, drafts: tuple[int, ...] = ()
    ) -> None:
        """Put the next `num_tokens` tokens of `seq` into the step, and `drafts` behind them:
        allocate their blocks and count the tokens as computed. If they are the last ones, the step
        also brings a new token, and one more for each draft that is accepted. These are counted as
        placeholders."""
        block_table = self.block_manager.block_tables[seq.seq_id]
        if seq.seq_id not in self._known_seq_ids:
            self._known_seq_ids.add(seq.seq_id)
            step.new_sequences.append(make_new_sequence(seq, block_table))
        start, is_last = seq.num_computed_tokens, num_tokens == seq.num_uncomputed_tokens
        num_tokens += len(drafts)
        config, num_spec, num_slots = self.speculative_config, 0, 0
        if is_last and config is not None:
            num_spec, num_slots = config.choose_num_spec_tokens(self, seq, num_tokens)
        first, new_ids = self.block_manager.append(seq, num_tokens + num_slots)
        item = ScheduledSequence(seq.seq_id, start, num_tokens, first, new_ids, drafts, num_spec)
        step.scheduled.append(item)
        step.budget -= num_tokens
        seq.num_computed_tokens += num_tokens
        if is_last:
            seq.num_output_placeholders += 1 + len(drafts)
            step.needs_sync |= seq.needs_sync and not self.is_pipelined

    # -- the result of the step --

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        """Append the sampled tokens, finish the sequences that reached their end, and report both.

        The tokens of a sequence that was aborted while the step ran are dropped. If one sequence of
        a request has an error, none of the request's sequences gets a token: all end.
        """
        if self.connector is not None:
            self.connector.update_connector_output(scheduler_output.kv_connector_metadata)
        updates: list[SequenceUpdate] = []
        now, known = time.monotonic(), self.sequences
        errors = {known[i].request_id: e for i, e in model_output.errors.items() if i in known}
        for item in scheduler_output.scheduled:
            if (seq := known.get(item.seq_id)) is None:
                continue
            if (error := errors.get(seq.request_id)) is not None:
                seq.status, seq.stop_reason = SequenceStatus.FINISHED_ERROR, describe_error(error)
                updates.append(SequenceUpdate(seq, (), (), error=error))
                continue
            sampled = model_output.sampled_token_ids.get(item.seq_id, ())
            prompt_logprobs = model_output.prompt_logprobs.get(item.seq_id)
            forks = model_output.forks.get(item.seq_id, ())
            is_last = item.num_computed_tokens + item.num_scheduled_tokens >= seq.num_tokens
            if is_last and not (sampled and len(forks) == seq.num_pending_forks):
                raise RuntimeError(f"the model's output has no token for sequence {item.seq_id}")
            if not (sampled or prompt_logprobs):
                continue
            seq.num_output_placeholders -= bool(sampled) * (1 + len(item.draft_token_ids))
            for branch, fork in enumerate(forks, start=1):
                updates.append(self._fork_branch(seq, branch, fork))
            num_new = self._append_tokens(seq, sampled)
            logprobs = model_output.logprobs.get(item.seq_id, ())[:num_new]
            updates.append(SequenceUpdate(seq, sampled[:num_new], logprobs, prompt_logprobs))
            if self.speculative_config and seq.status is not SequenceStatus.FINISHED_ERROR:
                self.speculative_config.accept(self, item, model_output, updates[-1])
        for update in updates:
            if update.new_token_ids:
                update.sequence.metrics.record_tokens(now, len(update.new_token_ids))
            if update.sequence.status.finish_reason is not None:
                self.finish(update.sequence.seq_id, update.sequence.status)
        return updates

    def _fork_branch(self, parent: Sequence, branch: int, first: ForkSample) -> SequenceUpdate:
        """Start a branch of the request with its own first token."""
        child = parent.make_branch(branch)
        parent.num_pending_forks -= 1
        self.add_fork(parent, child)
        self._append_tokens(child, (first.token_id,))
        return SequenceUpdate(child, (first.token_id,), first.logprobs)

    def add_fork(self, parent: Sequence, child: Sequence, ends_parent: bool = False) -> None:
        """Let `child` run beside `parent` on shared blocks. The child's tokens must begin with the
        computed tokens of the parent.

        If `parent` holds no blocks any more, or max_num_seqs is reached, the child waits instead
        and later finds its prefix in the prefix cache, as far as it is still there. With
        `ends_parent` the parent is finished, and the child takes its place.
        """
        num_leaving = 1 if ends_parent else 0
        is_running = parent.status is SequenceStatus.RUNNING
        if is_running and self.has_seq_slot(child, num_leaving):
            self.block_manager.fork(parent, child)
            self.sequences[child.seq_id] = child
            self._start_running(child)
        else:
            self.add(child)
        if ends_parent:
            self.finish(parent.seq_id, SequenceStatus.FINISHED_STOPPED)

    @staticmethod
    def _append_tokens(seq: Sequence, sampled: tuple[int, ...]) -> int:
        """Append tokens until one ends the sequence. Returns how many were appended: none if its
        grammar does not allow them."""
        grammar = seq.structured_output_request
        if grammar is not None and (error := grammar.accept_tokens(sampled)) is not None:
            seq.status, seq.stop_reason = SequenceStatus.FINISHED_ERROR, error
            return 0
        for num_new, token_id in enumerate(sampled, start=1):
            if type(token_id) is not int:
                raise TypeError(f"the model's output has {token_id!r:.99} for a token id")
            seq.token_ids.append(token_id)
            if token_id in seq.stop_token_ids:
                seq.status = SequenceStatus.FINISHED_STOPPED
                seq.stop_reason = None if token_id == seq.eos_token_id else token_id
                return num_new
            if seq.num_output_tokens >= seq.max_tokens:
                seq.status = SequenceStatus.FINISHED_LENGTH
                return num_new
        # With stop tokens, one of them ends a grammar: see above.
        if grammar is not None and not seq.stop_token_ids and sampled and grammar.is_terminated():
            seq.status = SequenceStatus.FINISHED_STOPPED
        return len(sampled)

    def finish(
        self, seq_id: int, status: SequenceStatus, stop_reason: int | str | None = None
    ) -> Sequence | None:
        """End a sequence now, waiting or running, and free its blocks. None if there is no
        unfinished sequence of this id."""
        seq = self.sequences.pop(seq_id, None)
        if seq is None:
            return None
        self._remove(seq)
        seq.status = status
        if self.connector is not None:
            self.connector.request_finished(seq, self.block_manager.block_tables.get(seq_id, ()))
        self.block_manager.free(seq)
        if stop_reason is not None:
            seq.stop_reason = stop_reason
        seq.metrics.finished_ts = time.monotonic()
        return seq

    def preempt_all(self) -> None:
        """After a failed step: free and forget every block, and queue every unfinished sequence to
        be computed again. The next step tells the runner to drop all its rows.

        Only the sequences' own tokens are trusted (those of an update that failed have been taken
        back before). So the recovery is right wherever the step failed: half scheduled, half
        written or half copied. The cost is one recompute.
        """
        self.block_manager.reset()
        if self.connector is not None:
            self.connector.reset()
        self.running, self.swapped = [], []
        self._known_seq_ids, self._dropped_seq_ids = set(), []
        self._is_restart = True
        for seq in self.sequences.values():
            if seq.status is not SequenceStatus.WAITING:
                seq.metrics.num_preemptions += 1
            seq.status = SequenceStatus.WAITING
            seq.num_computed_tokens = seq.num_output_placeholders = 0
        self.waiting = sorted(self.sequences.values(), key=self.urgency)

    def _remove(self, seq: Sequence) -> None:
        """Take `seq` out of `running`, `swapped` or `waiting`; the runner may drop it, if it knows
        it."""
        queue = next((each for each in (self.running, self.swapped) if seq in each), self.waiting)
        queue.remove(seq)
        if seq.seq_id in self._known_seq_ids:
            self._known_seq_ids.remove(seq.seq_id)
            self._dropped_seq_ids.append(seq.seq_id)

    def preempt(self, seq: Sequence) -> None:
        """RUNNING or SWAPPED -> WAITING: free its blocks, to compute it again later (recompute).

        The freed blocks stay in the prefix cache until other sequences need them, so computing the
        sequence again is often cheap.
        """
        self._remove(seq)
        self.block_manager.free(seq)
        seq.num_computed_tokens = 0
        seq.metrics.num_preemptions += 1
        seq.status = SequenceStatus.WAITING
        insort(self.waiting, seq, key=self.urgency)

    def _swap_out(self, seq: Sequence) -> None:
        """RUNNING -> SWAPPED: move its blocks to the CPU pool."""
        self._remove(seq)
        self.block_manager.swap_out(seq)
        seq.status = SequenceStatus.SWAPPED
        seq.metrics.num_preemptions += 1
        insort(self.swapped, seq, key=self.urgency)

    def urgency(self, seq: Sequence) -> tuple[int, float, int]:
        """Sort key, most urgent first: arrival order, under "priority" after the priority. Forks
        arrived with their request."""
        priority = seq.priority if self.by_priority else 0
        return (priority, seq.metrics.queued_ts, seq.seq_id)


def make_new_sequence(seq: Sequence, block_table: list[int]) -> NewSequence:
    """All that the runner needs to know about a sequence."""
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
        extra_keys=seq.extra_keys,
        lora_slot=seq.lora.slot if seq.lora else -1,
        structured_output_request=seq.structured_output_request,
    )
