"""What did the scheduler decide? One step, as a small table of text."""

from __future__ import annotations

from typing import Any

from nanoserve.arg_utils import engine_of
from nanoserve.extras.trace.frames import name_of
from nanoserve.sequence import SchedulerOutput


def decision(llm_or_engine: Any, step: SchedulerOutput) -> None:
    """Print what the scheduler decided."""
    sequences = engine_of(llm_or_engine).scheduler.sequences
    print(f"one step, {step.total_num_scheduled_tokens} tokens in all")
    print("seq_id  request  computed  scheduled  new blocks")
    for item in step.scheduled:
        seq = sequences.get(item.seq_id)
        name = "ended" if seq is None else name_of(seq)
        blocks = " ".join(map(str, item.new_block_ids)) or "-"
        counts = f"{item.num_computed_tokens:>8}  {item.num_scheduled_tokens:>9}"
        print(f"{item.seq_id:>6}  {name:>7}  {counts}  {blocks}")
    for new in step.new_sequences:
        table = " ".join(map(str, new.block_ids)) or "empty"
        known = f"{len(new.token_ids)} tokens, block table so far: {table}"
        print(f"new for the runner: seq {new.seq_id}, {known}")
    moves = {
        "swap out": step.blocks_to_swap_out,
        "swap in": step.blocks_to_swap_in,
        "copy": step.blocks_to_copy,
    }
    for verb, pairs in moves.items():
        if pairs:
            print(f"{verb} blocks", ", ".join(f"{source} to {to}" for source, to in pairs))
    if step.is_restart:
        print("a step failed: the runner drops every sequence")
    if step.finished_seq_ids:
        print("the runner may drop seq", *step.finished_seq_ids)
