"""Lab 2: one rule.

Each step lets the computed tokens of a sequence catch up with the known ones: first for running
sequences, then for waiting ones, within the token budget, max_num_seqs and the free blocks.
Prefill, chunks, decodes, prefix hits and resumed preemptions are this one rule. You write it, in
40 lines.

Read the header of nanoserve/scheduler.py, and class StepPlan there. What you can use:

    self.running, self.waiting       lists, the most urgent sequence first
    seq.num_uncomputed_tokens        known tokens that are not computed yet
    step.budget                      tokens that this step has left
    self.max_chunk                   most tokens of one sequence in a step
    self.block_manager               can_append_slots(seq, n), get_computed_blocks(seq),
                                     can_allocate(seq, cached), allocate(seq, cached), block_size
    self.schedule_tokens(seq, n, step)    puts n tokens of a running sequence into the step
    self.preempt(seq), self.start_running(seq), self.has_seq_slot(seq)
    self.is_blocked(seq), self.is_ready(seq)      False and True in this lab: steps do not overlap
"""

from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import Sequence


class MyScheduler(Scheduler):
    def first_chunk(self, num_uncomputed: int, step: StepPlan) -> int:
        """How many of its uncomputed tokens a sequence gets in its first step: as many as there
        are, at most self.max_chunk, at most what the budget has left. If
        self.config.enable_chunked_prefill is False: all of them, or 0.
        """
        raise NotImplementedError("Task 2.1")

    def preempt_until_fits(self, seq: Sequence, num_tokens: int) -> bool:
        """Preempt the last running sequence, again and again, until block_manager.can_append_slots
        says that `num_tokens` more tokens of `seq` fit. False if `seq` itself was preempted.
        """
        raise NotImplementedError("Task 2.2")

    def schedule_running(self, step: StepPlan) -> bool:
        """Let every running sequence catch up, the most urgent one first.

        Each gets its uncomputed tokens, at most max_chunk, and leaves one token of the budget to
        each running sequence behind it. If its tokens do not fit: preempt_until_fits, and end if
        the sequence itself was preempted. True if nobody was preempted.
        """
        raise NotImplementedError("Task 2.3")

    def admit(self, seq: Sequence, step: StepPlan) -> bool:
        """Let a waiting sequence run, if it fits; False, and no change, if it does not.

        It fits if its first chunk (behind its cached blocks) is not 0, if has_seq_slot says so, and
        if can_allocate says so. Then: out of self.waiting, allocate, start_running,
        schedule_tokens. The first time, seq.num_cached_tokens is what the cache had.
        """
        raise NotImplementedError("Task 2.4")

    def schedule_waiting(self, step: StepPlan) -> None:
        """Admit waiting sequences from the front while the budget has tokens left. One that is not
        ready is passed over. One that does not fit ends it: nobody overtakes it.
        """
        raise NotImplementedError("Task 2.5")


class MyPolicy(Scheduler):
    """The contest. Who is urgent? The smallest key runs first, and is preempted last."""

    def urgency(self, seq: Sequence) -> tuple:
        """A key that never changes during the life of a sequence. You may read
        seq.metrics.queued_ts (seconds), seq.num_prompt_tokens, seq.max_tokens and seq.seq_id.
        """
        raise NotImplementedError("Task 2.7")
