"""A run as Chrome trace JSON, which chrome://tracing and ui.perfetto.dev draw.

Process 1 is the engine: the parts of each step (schedule, execute, update), and counters for the
blocks in use and the number of running and waiting sequences. Process 2 has a track for each
sequence: what it did in each step, and when it waited. Times are microseconds from the first step.

With overlapped steps, execute has a track of its own: a step is scheduled while another computes.

Format: "Trace Event Format" (Google), events of the phases X (complete), C (counter), M (metadata).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from nanoserve.extras.trace.frames import Frame, SequenceView
from nanoserve.sequence import SequenceStatus

ENGINE, SEQUENCES = 1, 2  # processes
STEPS, EXECUTE = 1, 2  # tracks of the engine


def to_json(frames: Iterable[Frame]) -> str:
    """The whole file."""
    return json.dumps({"traceEvents": events_of(list(frames)), "displayTimeUnit": "ms"})


def events_of(frames: list[Frame]) -> list[dict[str, Any]]:
    """The trace events, in order of time."""
    if not frames:
        return []
    begin = min(frame.started for frame in frames)
    overlaps = any(
        after.started < _end_of(frame) - after.schedule_time for frame, after in pairwise(frames)
    )
    named = [
        _name("process_name", ENGINE, 0, "engine"),
        _name("thread_name", ENGINE, STEPS, "steps"),
    ]
    if overlaps:
        named.append(_name("thread_name", ENGINE, EXECUTE, "execute"))
    named.append(_name("process_name", SEQUENCES, 0, "sequences"))
    found: list[dict[str, Any]] = []
    free_at = dict.fromkeys((STEPS, EXECUTE), 0.0)  # when the track's last event ended
    for frame in frames:
        found += _parts(frame, begin, EXECUTE if overlaps else STEPS, free_at)
        found += _counters(frame, begin)
    seen: dict[int, str] = {}
    waits_since: dict[int, float] = {}
    ended_at: dict[int, float] = {}
    for frame in frames:
        for view in frame.sequences:
            seen.setdefault(view.seq_id, view.name)
            found += _sequence_events(frame, view, begin, waits_since, ended_at)
    named += [_name("thread_name", SEQUENCES, seq_id + 1, name) for seq_id, name in seen.items()]
    return named + sorted(found, key=lambda event: event["ts"])


def _end_of(frame: Frame) -> float:
    return frame.started + frame.schedule_time + frame.execute_time + frame.update_time


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}


def _span(
    name: str, category: str, pid: int, tid: int, start: float, end: float, **args: Any
) -> dict[str, Any]:
    """A complete event; start and end are microseconds."""
    duration = max(round(end - start, 3), 0.001)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": round(start, 3),
        "dur": duration,
        "args": args,
    }


def _parts(
    frame: Frame, begin: float, execute_track: int, free_at: dict[int, float]
) -> list[dict[str, Any]]:
    """schedule, execute and update of one step. Spans of one track never overlap."""
    spans = []
    start = 1e6 * (frame.started - begin)
    for part in ("schedule", "execute", "update"):
        end = start + 1e6 * getattr(frame, f"{part}_time")
        track = execute_track if part == "execute" else STEPS
        begins = max(start, free_at[track])
        if end > begins:
            args = {"step": frame.number, "tokens": frame.num_scheduled}
            spans.append(_span(part, "engine", ENGINE, track, begins, end, **args))
            free_at[track] = end
        start = end
    return spans


def _counters(frame: Frame, begin: float) -> list[dict[str, Any]]:
    values = {
        "KV blocks": {"in use": frame.num_blocks - frame.num_free},
        "sequences": {
            "running": sum(view.status is SequenceStatus.RUNNING for view in frame.sequences),
            "waiting": frame.num_waiting,
        },
        "tokens in the step": {"tokens": frame.num_scheduled},
    }
    moment = round(1e6 * (_end_of(frame) - begin), 3)
    return [
        {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": moment, "args": value}
        for name, value in values.items()
    ]


def _sequence_events(
    frame: Frame,
    view: SequenceView,
    begin: float,
    waits_since: dict[int, float],
    ended_at: dict[int, float],
) -> list[dict[str, Any]]:
    """What a sequence did in a step, and the time that it has waited before."""
    start = 1e6 * (frame.started + frame.schedule_time - begin)
    end = start + 1e6 * frame.execute_time
    start = max(start, ended_at.get(view.seq_id, 0.0))  # an overlapped step began before
    track, spans = view.seq_id + 1, []
    if view.num_scheduled and start < end:
        ended_at[view.seq_id] = end
        since = waits_since.pop(view.seq_id, None)
        if since is not None and since < start:
            spans.append(_span("waits", "sequence", SEQUENCES, track, since, start))
        plural = "" if view.num_scheduled == 1 else "s"
        kind = "decode" if view.is_decode else f"{view.num_scheduled} token{plural}"
        args = {
            "step": frame.number,
            "tokens": view.num_scheduled,
            "computed again": view.num_again,
            "tokens in the KV cache": view.num_computed,
            "blocks": len(view.table),
        }
        spans.append(_span(kind, "sequence", SEQUENCES, track, start, end, **args))
    if view.is_waiting:
        waits_since.setdefault(view.seq_id, end)
    return spans
