"""How is a Frame made of a live engine?

`snapshot` looks at an engine as it is now, also in the middle of a step: after schedule(), after
execute_model(), after update_from_output(). The Recorder uses the same parts at the end of each
step. All of this reads the engine and changes nothing.

*What is written?* The block manager counts tokens as computed when they are scheduled. Before the
executor has run, their slots are still empty. `was_executed` asks the runner.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from nanoserve.arg_utils import engine_of
from nanoserve.extras.trace.frames import (
    MOST_BLOCKS,
    MOST_WAITING,
    Frame,
    SequenceView,
    Tokens,
    name_of,
)
from nanoserve.sequence import ScheduledSequence, SchedulerOutput, Sequence


def make_view(
    seq: Sequence,
    table: Iterable[int],
    cpu_table: Iterable[int],
    item: ScheduledSequence | None,
    first_coming: int | None,
    num_again: int = 0,
    num_sampled: int = 0,
) -> SequenceView:
    """`item` is what the step did to `seq`; from `first_coming` on, slots are not written yet."""
    end = seq.num_computed_tokens
    coming = end if first_coming is None else min(first_coming, end)
    return SequenceView(
        seq_id=seq.seq_id,
        name=name_of(seq),
        status=seq.status,
        num_prompt=len(seq.prompt_token_ids),
        num_tokens=len(seq.token_ids),
        num_computed=end,
        first_new=min(item.num_computed_tokens, coming) if item else coming,
        first_coming=coming,
        num_scheduled=item.num_scheduled_tokens if item else 0,
        num_again=num_again,
        num_sampled=num_sampled,
        table=tuple(table),
        cpu_table=tuple(cpu_table),
    )


def pool_fields(engine: Any, before: Frame | None = None) -> dict[str, Any]:
    """What a frame has of the scheduler and of the block pool, as fields of Frame. What is equal in
    the frame `before` is not kept twice."""
    scheduler, manager = engine.scheduler, engine.block_manager
    pool = manager.pool
    fields: dict[str, Any] = {
        "budget": scheduler.token_budget,
        "block_size": manager.block_size,
        "num_blocks": pool.num_blocks,
        "num_free": pool.num_free_blocks,
        "num_waiting": len(scheduler.waiting) + len(scheduler.swapped),
    }
    if pool.num_blocks <= MOST_BLOCKS:
        fields["free_queue"] = tuple(pool.free_queue)
        fields["contents"] = tuple([h and h.token_ids for h in pool.block_hashes])
        fields["ref_counts"] = tuple(pool.ref_counts)
        for name in ("free_queue", "contents", "ref_counts"):
            if before is not None and fields[name] == getattr(before, name):
                fields[name] = getattr(before, name)
    return fields


def in_flight(engine: Any) -> dict[int, int]:
    """seq_id -> its first token that a step in flight computes (with overlapped steps)."""
    first: dict[int, int] = {}
    for launched in getattr(engine, "_in_flight", ()):
        for item in launched.scheduler_output.scheduled:
            first.setdefault(item.seq_id, item.num_computed_tokens)
    return first


def snapshot(
    llm_or_engine: Any, step: SchedulerOutput | None = None, is_written: bool | None = None
) -> Frame:
    """An engine as it is now, also in the middle of a step: `step` is then the decision that was
    made last, and `is_written` says whether the executor has run it. None: find out."""
    engine = engine_of(llm_or_engine)
    scheduler, manager = engine.scheduler, engine.block_manager
    tokens = Tokens(getattr(engine, "tokenizer", None))
    coming = in_flight(engine)
    items: dict[int, ScheduledSequence] = {}
    if step is not None:
        items = {item.seq_id: item for item in step.scheduled}
        done = was_executed(engine, step) if is_written is None else is_written
        if not done:
            coming |= {seq_id: item.num_computed_tokens for seq_id, item in items.items()}
    sequences = [
        *scheduler.running,
        *islice(scheduler.swapped, MOST_WAITING),
        *islice(scheduler.waiting, MOST_WAITING),
    ]
    views = []
    for seq in sorted(sequences, key=lambda seq: seq.seq_id):
        tokens.see(seq)
        table = manager.block_tables.get(seq.seq_id, ())
        cpu_table = manager.swapped_tables.get(seq.seq_id, ())
        first_coming = coming.get(seq.seq_id)
        views.append(make_view(seq, table, cpu_table, items.get(seq.seq_id), first_coming))
    return Frame(number=0, sequences=tuple(views), tokens=tokens, **pool_fields(engine))


def was_executed(engine: Any, step: SchedulerOutput) -> bool:
    """Has this decision been executed? The runner's rows tell: it counts a token that it samples,
    and has a row for a new sequence. (Chunks of known sequences do not tell: False.)"""
    batch: Any = getattr(getattr(engine.executor, "runner", None), "batch", None)
    is_new = {new.seq_id for new in step.new_sequences}
    for item in step.scheduled:
        seq = engine.scheduler.sequences.get(item.seq_id)
        end = item.num_computed_tokens + item.num_scheduled_tokens - len(item.draft_token_ids)
        if seq is None or (
            not seq.num_output_placeholders and seq.num_prompt_tokens <= end < seq.num_tokens
        ):
            return True  # it has ended, or its new token is known
        row = batch.row_of.get(item.seq_id) if batch is not None else None
        if seq.num_output_placeholders:
            return row is not None and bool(batch.num_tokens[row] > end)
        if item.seq_id in is_new:
            return row is not None
    return False
