"""What do the CPU and the device do when? Plain steps and overlapped steps, as a scheme.

    with trace.calls(llm) as events:                # listens to the scheduler for a while
        llm.step()
        ...
    trace.overlap("two ways to step", {"plain": events})

`calls` records in which order the scheduler decides steps and gets their results: this order is all
that differs between plain steps and overlapped ones (`async_scheduling=True`).

    plain         schedule 1, update 1, schedule 2, update 2, ...
    overlapped    schedule 1, schedule 2, update 1, schedule 3, update 2, ...

`overlap` draws what follows from the order: the device begins a step when it is scheduled and the
step before is done; the CPU reads a result when the device has it.

Left out: times. Every part has a fixed length, so the picture is the same on each machine.

vLLM: v1/engine/core.py, `step_with_batch_queue`; v1/core/sched/async_scheduler.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from nanoserve import LLM
from nanoserve.extras.trace.style import CACHED, FAINT, IDLE, INK, WIDTH, box, canvas, label, show
from nanoserve.sequence import SchedulerOutput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEDULE, UPDATE, DEVICE = 1.0, 1.0, 3.0  # lengths in the scheme, not times
DARK, LIGHT = "#4A5A6A", "#BCD0E4"
FACES = {"schedule": LIGHT, "update": CACHED, "device": DARK}


class Call(NamedTuple):
    """What the CPU did: "schedule" or "update", and of which step."""

    verb: str
    step: int  # 1 for the first


@contextmanager
def calls(llm: LLM) -> Iterator[list[Call]]:
    """Record the calls of the scheduler, in their order, until the `with` block ends."""
    scheduler, events = llm.engine.scheduler, list[Call]()
    numbers: dict[int, int] = {}  # id of a SchedulerOutput -> number of the step
    kept: list[SchedulerOutput] = []  # so that no id is used twice
    schedule, update_from_output = scheduler.schedule, scheduler.update_from_output

    def noted_schedule() -> SchedulerOutput:
        step = schedule()
        if not step.is_empty:
            kept.append(step)
            numbers[id(step)] = len(kept)
            events.append(Call("schedule", len(kept)))
        return step

    def noted_update(step: SchedulerOutput, *rest: Any) -> Any:
        if id(step) in numbers:
            events.append(Call("update", numbers[id(step)]))
        return update_from_output(step, *rest)

    before = {name: vars(scheduler).get(name) for name in ("schedule", "update_from_output")}
    scheduler.schedule, scheduler.update_from_output = noted_schedule, noted_update  # type: ignore
    try:
        yield events
    finally:
        for name, method in before.items():  # None: the class's own
            vars(scheduler).pop(name, None)
            vars(scheduler).update({name: method} if method else {})


def overlap(title: str, runs: dict[str, list[Call]], steps: int = 5) -> None:
    """Draw the first `steps` steps of each run (name -> its calls): a lane for the CPU, one for the
    device. Shaded parts of the device's lane are idle."""
    plans = {name: _plan(events, steps) for name, events in runs.items()}
    end = max(stop for plan in plans.values() for _, _, _, stop in plan)
    height = 0.74 + 1.06 * len(plans)
    ax = canvas(height, title)
    unit = (WIDTH - 1.2) / end
    for row, (name, plan) in enumerate(plans.items()):
        top = height - 0.44 - 1.06 * row
        label(ax, 0, top - 0.02, name, size=9.5, weight="bold", ha="left")
        _draw_lanes(ax, plan, top - 0.16, unit)
    note = "a scheme: the order is recorded, the lengths are not times"
    label(ax, WIDTH, height - 0.18, note, color=FAINT, ha="right")
    _draw_legend(ax)
    show()


def _draw_legend(ax: Axes) -> None:
    """Below the lanes: what the colours are."""
    meanings = {"CPU schedules a step": LIGHT, "CPU reads a result (update)": CACHED}
    x = 1.2
    for text, face in {**meanings, "device computes": DARK, "device is idle": IDLE}.items():
        box(ax, x, 0.06, 0.24, 0.16, facecolor=face, hatch="////" if face == IDLE else "")
        label(ax, x + 0.32, 0.14, text, size=8.5, ha="left")
        x += 2.3


Part = tuple[str, int, float, float]  # lane or verb, step, begin, end


def _plan(events: list[Call], steps: int) -> list[Part]:
    """When each part begins and ends, in units of the scheme."""
    parts: list[Part] = []
    cpu = device = 0.0
    done: dict[int, float] = {}  # step -> when the device has its result
    for verb, step in events:
        if step > steps:
            continue
        if verb == "schedule":
            parts.append((verb, step, cpu, cpu + SCHEDULE))
            cpu += SCHEDULE
            begin = max(cpu, device)
            device = done[step] = begin + DEVICE
            parts.append(("device", step, begin, device))
        else:
            begin = max(cpu, done[step])
            parts.append((verb, step, begin, begin + UPDATE))
            cpu = begin + UPDATE
    return parts


def _draw_lanes(ax: Axes, plan: list[Part], top: float, unit: float) -> None:
    left, lane = 1.2, 0.3
    last = max(stop for kind, _, _, stop in plan if kind == "device")
    for text, y in (("CPU", top - lane), ("device", top - 2 * lane - 0.06)):
        label(ax, left - 0.1, y + lane / 2, text, size=9, ha="right")
    y = top - 2 * lane - 0.06
    box(ax, left, y, last * unit, lane, facecolor=IDLE, edgecolor="none", hatch="////")
    for kind, step, begin, stop in plan:
        on_device = kind == "device"
        bottom = y if on_device else top - lane
        style = {"facecolor": FACES[kind], "edgecolor": "white"}
        box(ax, left + begin * unit, bottom, (stop - begin) * unit, lane, **style)
        text = f"step {step}" if on_device else str(step)
        shade = "white" if on_device else INK
        label(ax, left + (begin + stop) / 2 * unit, bottom + lane / 2, text, size=8, color=shade)
