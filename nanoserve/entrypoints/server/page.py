"""What does a reader with a browser see? The engine at work.

    GET /          a chat, and beside it the block map, the queues and the latest steps: page.html
    GET /engine    what it draws, as JSON; with `Accept: text/event-stream` a message whenever
                   something has changed. ?slow_motion=0.2 lets the engine rest after each step

The steps come from a scheduler that writes down what it decides, while somebody watches. The server
puts it under the chapters, as a user does with a scheduler of his own:

    LLM(scheduler_cls=WatchedScheduler)

Everything else is read between two steps. No message has text or tokens of a prompt. Of a large KV
cache a cell of the block map stands for several blocks.

vLLM: none; its server shows numbers (/metrics) and no state.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from math import ceil
from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from nanoserve.entrypoints.async_llm import AsyncLLM
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import EngineDeadError, SchedulerOutput, Sequence

MOST_CELLS, MOST_STEPS, MOST_SEQUENCES = 1024, 32, 64  # in a message
SOURCES = "script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"
POLICY = {"Content-Security-Policy": f"default-src 'none'; {SOURCES}"}


class WatchedScheduler(Scheduler):
    """Writes down its steps while num_watchers is above 0."""

    num_watchers, pause = 0, 0.0  # pause: seconds of rest after each step

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.steps: deque[dict[str, Any]] = deque([{}], MOST_STEPS)
        self.num_steps = self.num_generation_tokens = self.num_scheduled_tokens = 0

    def make_output(self, step: StepPlan) -> SchedulerOutput:
        output = super().make_output(step)
        if self.num_watchers:
            self.num_steps += 1
            self.num_scheduled_tokens += sum(n for _, _, n, *_ in step.scheduled)
            self.steps.append(self.describe(output))
        return output

    def describe(self, step: SchedulerOutput) -> dict[str, Any]:
        """A step. Its items are [seq_id, tokens, is it part of a prefill?]."""
        seqs = self.sequences
        shown = step.scheduled[:MOST_SEQUENCES]
        new = {each.seq_id: seqs[each.seq_id] for each in step.new_sequences}
        return {
            "number": self.num_steps,
            "num_seqs": len(step.scheduled),
            "num_tokens": sum(item.num_scheduled_tokens for item in step.scheduled),
            "items": [[i, n, int(at < seqs[i].num_prompt_tokens)] for i, at, n, *_ in shown],
            "names": {i: [seq.request_id, seq.branch] for i, seq in new.items()},
            "hits": [[i, at] for i, at, *_ in shown if i in new and at and not seqs[i].branch],
            "preempted": [],
            "finished": [],
        }

    def update_from_output(self, *args: Any) -> Any:
        updates = super().update_from_output(*args)
        if self.num_watchers:
            self.num_generation_tokens += sum(len(update.tokens) for update in updates)
            time.sleep(self.pause)
        return updates

    def preempt(self, seq: Sequence) -> None:
        super().preempt(seq)
        self.steps[-1].get("preempted", []).append(seq.seq_id)

    def finish(self, seq_id: int, status: Any, *args: Any) -> None:
        super().finish(seq_id, status, *args)
        self.steps[-1].get("finished", []).append([seq_id, status.name])


def describe_engine(engine: Any) -> dict[str, Any]:
    """The state of an engine between two steps."""
    scheduler, manager, config = engine.scheduler, engine.block_manager, engine.config
    shown = [*scheduler.running, *scheduler.swapped, *scheduler.waiting][:MOST_SEQUENCES]
    queues = ("running", "swapped", "waiting")
    size = -(-manager.num_blocks // MOST_CELLS)  # blocks of a cell
    sizes = ("block_size", "num_blocks", "num_cpu_blocks", "num_queried_tokens", "num_hit_tokens")
    counts = ("num_steps", "num_generation_tokens", "num_scheduled_tokens", "pause")
    return {
        "has_chat_template": bool(getattr(engine.tokenizer, "chat_template", None)),
        "makes_vectors": hasattr(config, "pooler_config"),
        "token_budget": config.max_num_batched_tokens,
        "time": time.monotonic(),
        **{f"num_{name}": len(getattr(scheduler, name)) for name in queues},
        **{name: getattr(manager, name) for name in sizes},
        **{name: getattr(scheduler, name) for name in counts},
        "num_free_blocks": len(manager.pool.free_queue),
        "num_free_cpu_blocks": len(manager.cpu_pool.free_queue),
        **describe_blocks(manager.pool, size),
        "steps": [step for step in scheduler.steps if step],
        "sequences": [describe_sequence(seq, manager, size) for seq in shown],
    }


def describe_blocks(pool: Any, size: int) -> dict[str, Any]:
    """The block map: of each cell the share, from 0 to f, of blocks that are in a block table, in
    several, and free but still found by their content."""
    cached = Counter(b // size for b in pool.cached_blocks.values() if not pool.ref_counts[b])
    maps: dict[str, list[str]] = {"held": [], "shared": [], "cached": []}
    for cell, start in enumerate(range(0, pool.num_blocks, size)):
        part = pool.ref_counts[start : start + size]
        num_held = len(part) - part.count(0)
        shares = (num_held, num_held - part.count(1), cached[cell])
        for digits, number in zip(maps.values(), shares, strict=True):
            digits.append(f"{ceil(15 * number / len(part)):x}")
    texts = {name: "".join(digits) for name, digits in maps.items()}
    return {"blocks_per_cell": size, "num_cached_blocks": cached.total(), **texts}


def describe_sequence(seq: Sequence, manager: Any, size: int) -> dict[str, Any]:
    """Its cells say where it has blocks, as bits of a hexadecimal number."""
    table = manager.block_tables.get(seq.seq_id, [])
    blocks = manager.swapped_tables.get(seq.seq_id, table)
    names = ("seq_id", "branch", "num_prompt_tokens", "num_tokens", "num_cached_tokens")
    return {
        **{name: getattr(seq, name) for name in (*names, "num_computed_tokens", "max_tokens")},
        "id": seq.request_id,
        "status": seq.status.name,
        "num_preemptions": seq.metrics.num_preemptions,
        "num_blocks": len(blocks),
        "block_table": blocks[:24],
        "cells": f"{sum({1 << block // size for block in table if block >= 0}):x}",
    }


def add_page(app: FastAPI, router: APIRouter, llm: AsyncLLM, model: str) -> None:
    """The endpoints. The page itself needs no key: it asks for one."""
    fixed = {"created": time.time(), "model": model}

    async def read(after: int) -> dict[str, Any]:
        """The state, with the steps behind this number."""
        state = await llm.call_utility(describe_engine)
        return {**fixed, **state, "steps": [x for x in state["steps"] if x["number"] > after]}

    async def events(pause: float) -> AsyncIterator[str]:
        scheduler, sent = llm.engine.scheduler, dict[str, Any]()
        scheduler.num_watchers, scheduler.pause = scheduler.num_watchers + 1, pause
        try:
            while True:
                state = await read(sent.get("num_steps", 0))
                if state["steps"] or {**sent, "time": 0} != {**state, "time": 0}:
                    yield f"data: {json.dumps(state)}\n\n"
                sent = {**state, "steps": []}
                await asyncio.sleep(0.1)
        except EngineDeadError:  # the stream ends with the engine
            pass
        finally:
            scheduler.num_watchers, scheduler.pause = scheduler.num_watchers - 1, 0.0

    @app.get("/", include_in_schema=False)
    async def get_page() -> Response:
        page = Path(__file__).with_name("page.html")
        return HTMLResponse(page.read_text("utf-8"), headers=POLICY)

    @router.get("/engine", include_in_schema=False)
    async def get_engine(request: Request, slow_motion: float = 0.0) -> Response:
        if "text/event-stream" in request.headers.get("accept", ""):
            is_ours = request.headers.get("sec-fetch-site", "none") in ("none", "same-origin")
            pause = min(1.0, max(0.0, slow_motion)) if is_ours else 0.0  # not for other pages
            return StreamingResponse(events(pause), media_type="text/event-stream")
        return JSONResponse(await read(0))
