"""What is the engine doing now, in a message of bounded size?

The page at / asks for /engine and draws what comes. A message, with most fields left out:

    {"num_running": 2, "num_waiting": 0, "num_free_blocks": 59, "num_generation_tokens": 40, ...
     "sequences": [{"seq_id": 7, "id": "cmpl-1", "status": "RUNNING", "num_tokens": 40,
                    "num_computed_tokens": 39, "block_table": [3, 4, 5], "cells": "38"}, ...],
     "blocks_per_cell": 1, "held": "000fff...", "shared": "0000...", "cached": "ff00...",
     "steps": [{"number": 12, "tokens": 9, "items": [[7, 1, 0], [8, 8, 1]], ...}]}

*The block map.* Up to MOST_CELLS blocks, a cell is a block. A larger KV cache is aggregated: a cell
stands for blocks_per_cell neighbours. "held", "shared" and "cached" have one hexadecimal digit a
cell: the share of its blocks, from 0 to f, that are in a block table, in several, and free but
still found by their content. "cells" of a sequence says in which cells it has blocks: bit i of the
hexadecimal number is cell i.

*What it costs.* Nothing while nobody watches: there is no listener then. With watchers, a step
costs one call that stores its report. The engine is read for all watchers together, in its own
thread between two steps (AsyncLLM.call_utility), if something has changed, at most every INTERVAL
seconds; and reading never takes more than MOST_SHARE of the time.

No message has text or tokens of a prompt.

Left out: sequences beyond MOST_SEQUENCES, and steps beyond the last MOST_STEPS since a message. The
counters include them.

vLLM: none; its server shows numbers (/metrics) and no state.
"""

from __future__ import annotations

import json
import time
from asyncio import Lock
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.engine import LLMEngine, StepReport
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence, SequenceStatus
from nanoserve.tools.why_waiting import why_waiting

INTERVAL = 0.1  # seconds between two messages, at least
MOST_SHARE = 0.03  # of the time that reading the engine may take
MOST_STEPS = 32  # in a message
MOST_SEQUENCES = 64  # in a message, and of a step
MOST_IN_TABLE = 24  # block ids of a sequence
MOST_CELLS = 1024  # of the block map
MOST_IN_ID = 64  # characters


class EngineWatch:
    """Reads one engine for all who watch it. The engine's thread calls `__call__` and `read`, the
    event loop the rest.

    Invariant: it is among the engine's step listeners exactly while somebody watches.
    """

    def __init__(self, async_llm: AsyncLLM, model_name: str) -> None:
        self.async_llm = async_llm
        engine = async_llm.engine
        has_template = async_llm.chat_template or getattr(engine.tokenizer, "chat_template", None)
        self._fixed = {
            "created": time.time(),  # tells this engine from one that follows it at this address
            "model": model_name,
            "has_chat_template": bool(has_template),
            "makes_vectors": engine.config.runner == "pooling",
            "block_size": engine.block_manager.block_size,
            "num_blocks": engine.block_manager.num_blocks,
            "num_cpu_blocks": engine.block_manager.num_cpu_blocks,
            "token_budget": engine.scheduler.token_budget,
            "max_num_seqs": engine.scheduler.max_num_seqs,
        }
        self.state: dict[str, Any] = {}  # what `read` found last; a new one each time
        self.num_steps = 0  # that were watched
        self.num_generation_tokens = 0  # that these steps brought
        self.num_scheduled_tokens = 0  # that these steps computed
        # Not read yet. Two threads use it: each replaces it as a whole.
        self._reports: deque[tuple[int, StepReport, list[int], list[Sequence]]] = deque(
            maxlen=MOST_STEPS
        )
        self._pauses: list[float] = []  # what each watcher asks for
        self._pause = 0.0
        self._read_key: tuple[float, ...] = ()
        self._next_at = 0.0  # time.monotonic()
        self._lock = Lock()

    @property
    def num_watchers(self) -> int:
        return len(self._pauses)

    @contextmanager
    def listening(self, pause: float = 0.0) -> Iterator[None]:
        """Be one of the watchers. pause: seconds for which the engine rests after each step, for
        all requests alike; of several watchers, the longest counts."""
        if not self._pauses:
            self.async_llm.step_listeners.append(self)
        self._pauses.append(pause)
        self._pause = max(self._pauses)
        try:
            yield
        finally:
            self._pauses.remove(pause)
            self._pause = max(self._pauses, default=0.0)
            if not self._pauses:
                self.async_llm.step_listeners.remove(self)
                self._reports = deque(maxlen=MOST_STEPS)
                self.state = {}

    async def refresh(self) -> None:
        """Read the engine, if something has changed and the last time is long enough ago. Raises
        EngineDeadError."""
        if self.async_llm.errored:  # a stream must not outlive the engine
            raise self.async_llm.dead_error
        async with self._lock:
            key = self._key()
            is_new = key != self._read_key or not self._pauses  # without a listener nobody knows
            if not self.state or (is_new and time.monotonic() >= self._next_at):
                await self.async_llm.call_utility(self.read)
                self._read_key = key

    def message(self, after: int = 0) -> bytes:
        """The newest state, with the steps whose number is above `after`, as JSON."""
        state = self.state
        steps = [step for step in state["steps"] if step["number"] > after]
        return json.dumps({**state, "steps": steps}, separators=(",", ":")).encode()

    def _key(self) -> tuple[float, ...]:
        """Changes when there is something new to see. Any thread may ask."""
        engine = self.async_llm.engine
        scheduler = engine.scheduler
        queues = map(len, (scheduler.running, scheduler.waiting, scheduler.swapped))
        num_free = engine.block_manager.num_free_blocks
        num_cached = len(engine.block_manager.pool.cached_blocks)
        return (self._pause, self.num_steps, *queues, num_free, num_cached)

    # -- in the engine's thread --

    def __call__(self, report: StepReport) -> None:
        """A step has ended."""
        self.num_steps += 1
        self.num_generation_tokens += sum(len(update.new_token_ids) for update in report.updates)
        self.num_scheduled_tokens += report.scheduler_output.total_num_scheduled_tokens
        dropped = report.scheduler_output.finished_seq_ids
        sequences = self.async_llm.engine.scheduler.sequences
        preempted = [seq_id for seq_id in dropped if seq_id in sequences]
        # Sequences live on: in a moment nobody knows in which step they ended.
        ended = [u.sequence for u in report.updates if u.sequence.status.finish_reason is not None]
        self._reports.append((self.num_steps, report, preempted, ended))
        if self._pause:
            time.sleep(self._pause)

    def read(self, engine: LLMEngine) -> None:
        """Make a new state of the engine as it is between two steps."""
        start = time.monotonic()
        reports, self._reports = self._reports, deque(maxlen=MOST_STEPS)
        steps = [*self.state.get("steps", ()), *(describe_step(*each) for each in reports)]
        manager, scheduler = engine.block_manager, engine.scheduler
        self.state = {
            **self._fixed,
            "time": start,  # seconds of a clock that begins anywhere
            "num_steps": self.num_steps,
            "num_generation_tokens": self.num_generation_tokens,
            "num_scheduled_tokens": self.num_scheduled_tokens,
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "num_swapped": len(scheduler.swapped),
            "num_free_blocks": manager.num_free_blocks,
            "num_free_cpu_blocks": manager.cpu_pool.num_free_blocks,
            "num_queried_tokens": manager.num_queried_tokens,
            "num_hit_tokens": manager.num_hit_tokens,
            "slow_motion": self._pause,
            **describe_blocks(manager),
            "sequences": describe_sequences(scheduler),
            "steps": steps[-MOST_STEPS:],
        }
        cost = time.monotonic() - start
        self._next_at = start + max(INTERVAL, cost / MOST_SHARE)


def describe_blocks(manager: BlockManager) -> dict[str, Any]:
    """The block map, in at most MOST_CELLS cells."""
    size, pool = blocks_per_cell(manager), manager.pool
    counts, num_cached = pool.ref_counts, Counter[int]()
    num_cached.update(b // size for b in pool.cached_blocks.values() if not counts[b])
    held, shared, cached = [], [], []
    for cell, start in enumerate(range(0, pool.num_blocks, size)):
        part = counts[start : start + size]
        num_free, num_single = part.count(0), part.count(1)
        held.append(_digit(len(part) - num_free, len(part)))
        shared.append(_digit(len(part) - num_free - num_single, len(part)))
        cached.append(_digit(num_cached[cell], len(part)))
    return {
        "blocks_per_cell": size,
        "num_cached_blocks": num_cached.total(),  # free, and still found by their content
        "held": "".join(held),
        "shared": "".join(shared),
        "cached": "".join(cached),
    }


def blocks_per_cell(manager: BlockManager) -> int:
    """How many blocks a cell of the block map stands for."""
    return max(1, -(-manager.num_blocks // MOST_CELLS))


def _digit(count: int, size: int) -> str:
    """A share as a hexadecimal digit: "0" for none, "f" for all."""
    return f"{-(-15 * count // size):x}"


def describe_sequences(scheduler: Scheduler) -> list[dict[str, Any]]:
    """The most urgent sequences: of those that do not fit, running ones come first, but a quarter
    of the room is kept for those that wait."""
    queues = [scheduler.running, scheduler.swapped, scheduler.waiting]
    room = MOST_SEQUENCES - min(MOST_SEQUENCES // 4, sum(map(len, queues[1:])))
    shown: list[Sequence] = []
    for queue in queues:
        shown += islice(queue, room if queue is scheduler.running else MOST_SEQUENCES - len(shown))
    views = [describe_sequence(seq, scheduler.block_manager) for seq in shown]
    for queue in queues[1:]:
        for view in views if queue else ():
            if view["seq_id"] == queue[0].seq_id:
                view["why_waiting"] = why_waiting(scheduler, queue[0].seq_id)
    return views


def describe_sequence(seq: Sequence, manager: BlockManager) -> dict[str, Any]:
    """What the page shows of one sequence: counters and blocks."""
    size, is_swapped = blocks_per_cell(manager), seq.status is SequenceStatus.SWAPPED
    table = manager.block_tables.get(seq.seq_id, [])
    cells = sum(1 << cell for cell in {block_id // size for block_id in table})
    blocks = manager.swapped_tables.get(seq.seq_id, []) if is_swapped else table
    return {
        "seq_id": seq.seq_id,
        "id": seq.request_id[:MOST_IN_ID],
        "branch": seq.branch,
        "status": seq.status.name,
        "num_prompt_tokens": seq.num_prompt_tokens,
        "num_tokens": seq.num_tokens,
        "num_computed_tokens": seq.num_computed_tokens,
        "num_cached_tokens": seq.num_cached_tokens,
        "max_tokens": seq.max_tokens,
        "num_preemptions": seq.metrics.num_preemptions,
        "num_blocks": len(blocks),
        "block_table": blocks[:MOST_IN_TABLE],
        "cells": f"{cells:x}",
    }


def describe_step(
    number: int, report: StepReport, preempted: list[int], ended: list[Sequence]
) -> dict[str, Any]:
    """What a step did. "items" are [seq_id, tokens, is it part of a prefill?]."""
    step, sequences = report.scheduler_output, report.sequences
    new = {each.seq_id: each for each in step.new_sequences}
    swapped_in = {destination for _, destination in step.blocks_to_swap_in}
    items, hits, names = [], [], {}
    for item in islice(step.scheduled, MOST_SEQUENCES):
        seq, admitted = sequences.get(item.seq_id), new.get(item.seq_id)
        start = item.num_computed_tokens
        is_prefill = item.num_scheduled_tokens > 1 or seq is None or start < seq.num_prompt_tokens
        items.append([item.seq_id, item.num_scheduled_tokens, int(is_prefill)])
        if admitted is not None and seq is not None:
            names[item.seq_id] = [seq.request_id[:MOST_IN_ID], seq.branch]
            is_fork = seq.branch and start == len(admitted.token_ids) - 1
            if start and not is_fork and swapped_in.isdisjoint(admitted.block_ids):
                hits.append([item.seq_id, start])
    return {
        "number": number,
        "num_seqs": len(step.scheduled),
        "num_tokens": step.total_num_scheduled_tokens,
        "items": items,
        "names": names,  # of sequences that are new: [request id, branch]
        "hits": hits,  # [seq_id, tokens that came from the prefix cache]
        "preempted": preempted[:MOST_SEQUENCES],
        "finished": [[s.seq_id, s.status.name] for s in islice(ended, MOST_SEQUENCES)],
        "num_swapped_out": len(step.blocks_to_swap_out),  # blocks, as the next two
        "num_swapped_in": len(step.blocks_to_swap_in),
        "num_copied": len(step.blocks_to_copy),
        "ms": [
            round(1000 * seconds, 3)
            for seconds in (report.schedule_time, report.execute_time, report.update_time)
        ],
    }
