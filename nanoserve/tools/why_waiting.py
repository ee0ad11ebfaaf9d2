"""Why does a request not run yet?

A sequence waits for one of a few reasons. `why_waiting` names the first one that holds, in the
order in which the scheduler asks:

    >>> why_waiting(engine.scheduler, seq_id)
    'the sequence needs 3 blocks, 2 are free'

Left out: a history of reasons. The answer is about the next step only.

vLLM: none; RequestStatus names the queue, not the reason.
"""

from __future__ import annotations

from nanoserve.scheduler import Scheduler
from nanoserve.sequence import SchedulerOutput, SequenceStatus


def why_waiting(scheduler: Scheduler, seq_id: int, last_step: SchedulerOutput | None = None) -> str:
    """One sentence about an unfinished sequence. Only with `last_step` can the answer be that the
    token budget was used up.

    Raises KeyError if there is no unfinished sequence of this id.
    """
    seq, manager = scheduler.sequences[seq_id], scheduler.block_manager
    is_swapped = seq.status is SequenceStatus.SWAPPED
    if seq.status is SequenceStatus.RUNNING:
        return "the sequence is running"
    if seq.lora is not None and not seq.lora.is_open():
        return f"its adapter {seq.lora.request.lora_name!r} waits for a slot, or to be loaded"
    if scheduler.connector is not None and scheduler.connector.is_loading(seq):
        return "its keys and values are on their way from another tier"
    if not seq.is_ready():
        return "the sequence is not ready"
    if seq.is_held:
        return "a step failed, and others are tried in search of the cause"
    ready = [other for other in scheduler.waiting if other.is_ready() and not other.is_held]
    others = [*scheduler.swapped, *ready]
    num_ahead = sum(scheduler.urgency(other) < scheduler.urgency(seq) for other in others)
    if num_ahead:
        return f"{num_ahead} more urgent sequences wait too"
    if not scheduler.has_seq_slot(seq):
        return f"max_num_seqs={scheduler.max_num_seqs} sequences are running or about to fork"
    cached_blocks = [] if is_swapped else manager.get_cached_blocks(seq)
    if not manager.can_allocate(seq, cached_blocks):
        needed, free = manager.num_blocks_for(seq.num_tokens), manager.num_free_blocks
        return f"the sequence needs {needed} blocks, {free} are free"
    num_computed = len(cached_blocks) * manager.block_size
    missing = seq.num_uncomputed_tokens if is_swapped else seq.num_tokens - num_computed
    used = last_step.total_num_scheduled_tokens if last_step else 0
    if scheduler.token_budget - used < (1 if scheduler.enable_chunked_prefill else missing):
        return "the token budget of the last step was used up"
    return "nothing: the sequence can join the next step"
