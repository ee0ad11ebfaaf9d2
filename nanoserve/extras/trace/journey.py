"""Which functions does one request pass, and in which thread?

    with trace.watch() as calls:             # the functions in CALL_CHAIN, or those you name
        ...                                  # a request over HTTP, for example
    trace.call_chain("one request", calls)

The picture has a column for each thread and a row for each call, in the order in which they began:
who stands further to the right in a column was called by the one above. The numbers are
milliseconds since the first call.

Left out: how long a call took. Watching costs microseconds a call, which matter beside short ones;
trace.StepTimer measures the parts of a step.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple

from nanoserve.extras.trace.style import (
    ALARM,
    FAINT,
    INK,
    WIDTH,
    box,
    canvas,
    label,
    show,
    text_width,
    tint,
)

ROW, TOP, INDENT = 0.235, 0.62, 0.17  # inches
MOST_ROWS = 60
CALL_CHAIN = (  # the documents' call chain: from HTTP to a token, and back
    "extras.server.completions.CompletionReply.respond",
    "extras.async_llm.AsyncLLM.add_request",
    "input_processor.InputProcessor.process",
    "extras.async_llm.EngineCoreThread.add",
    "engine.LLMEngine.run_step",
    "scheduler.Scheduler.schedule",
    "block_manager.BlockManager.allocate",
    "block_manager.BlockManager.append",
    "executor.UniprocExecutor.execute_model",
    "model_runner.ModelRunner.forward",
    "models.decoder.Attention.forward",
    "model_runner.ModelRunner.sample",
    "scheduler.Scheduler.update_from_output",
    "extras.async_llm.RequestOutputCollector.put",
    "extras.server.completions.CompletionReply.to_choice",
)
ARROW = {"arrowstyle": "->", "color": ALARM, "linewidth": 0.9, "shrinkA": 0, "shrinkB": 0}
LANES = "ABCDEF"  # whose colours the threads have


class Visit(NamedTuple):
    """A call that began."""

    moment: float  # seconds of time.perf_counter()
    thread: str
    name: str  # "Scheduler.schedule"
    depth: int  # how many of the watched functions of this thread are running


@contextmanager
def watch(methods: Iterable[str] = CALL_CHAIN) -> Iterator[list[Visit]]:
    """Record the calls of these methods, "module.Class.method" of nanoserve, by all threads, until
    the `with` block ends."""
    visits, running, undo = list[Visit](), threading.local(), []
    try:
        for method in methods:
            *module, class_name, attribute = method.split(".")
            owner = getattr(importlib.import_module(".".join(["nanoserve", *module])), class_name)
            right = inspect.getattr_static(owner, attribute)
            undo.append((owner, attribute, right, attribute in vars(owner)))
            setattr(owner, attribute, _noted(right, f"{class_name}.{attribute}", visits, running))
        yield visits
    finally:
        for owner, attribute, right, is_own in reversed(undo):
            if is_own:
                setattr(owner, attribute, right)
            else:
                delattr(owner, attribute)


def _noted(right: Any, name: str, visits: list[Visit], running: Any) -> Any:
    """The function, which adds a visit when it is called."""

    @functools.wraps(right)
    def call(*args: Any, **options: Any) -> Any:
        depth = getattr(running, "depth", 0)
        thread = threading.current_thread().name
        visits.append(Visit(time.perf_counter(), thread, name, depth))
        if inspect.iscoroutinefunction(right) or inspect.isasyncgenfunction(right):
            return right(*args, **options)  # it begins now, and goes on when others have had turns
        running.depth = depth + 1
        try:
            return right(*args, **options)
        finally:
            running.depth = depth

    return call


def call_chain(title: str, visits: Iterable[Visit]) -> None:
    """Draw the calls: a column for each thread, a row for each call (or for equal ones, one after
    the other), at most MOST_ROWS."""
    groups = [list(group) for _, group in groupby(visits, key=lambda visit: visit[1:])]
    rows = [(group[0], len(group)) for group in groups[:MOST_ROWS]]
    threads = list(dict.fromkeys(visit.thread for visit, _ in rows))
    width = (WIDTH - 0.75) / max(1, len(threads))
    height = TOP + ROW * len(rows) + 0.12
    ax = canvas(height, title)
    label(ax, 0.62, height - 0.5, "ms", 8, ha="right", color=FAINT)
    for column, thread in enumerate(threads):
        x = 0.75 + column * width
        box(ax, x, 0.06, width - 0.1, height - 0.42, facecolor=tint(LANES[column % 6], 0.1))
        label(ax, x + 0.1, height - 0.5, thread, 9, ha="left", weight="bold")
    before: tuple[str, float, float, float] | None = None  # thread, left, right and y of the last
    for row, (visit, number) in enumerate(rows):
        x = 0.88 + threads.index(visit.thread) * width + INDENT * visit.depth
        y = height - TOP - ROW * (row + 0.5)
        milliseconds = 1000 * (visit.moment - rows[0][0].moment)
        label(ax, 0.62, y, f"{milliseconds:.1f}", 7.5, ha="right", color=FAINT)
        text = visit.name + (f"  × {number}" if number > 1 else "")
        label(ax, x + 0.09, y, text, 8.5, ha="left")
        ax.plot([x], [y], "o", markersize=3, color=INK)
        right = x + 0.14 + text_width(text, 8.5)
        if before is not None and before[0] != visit.thread:
            _, old_left, old_right, old_y = before
            start, end = (old_right, x - 0.03) if x > old_left else (old_left - 0.03, right)
            ax.annotate("", (end, y), (start, old_y), arrowprops=ARROW)
        before = visit.thread, x, right, y
    show()
