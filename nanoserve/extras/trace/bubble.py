"""Which stage of a pipeline computes which step, and when is it idle?

    with trace.calls(llm) as events:                # listens to the scheduler for a while
        llm.step()
        ...
    trace.pipeline("two stages", {"one step in flight": events}, num_stages=2)

The order in which steps are launched and read is recorded. What follows from it is a scheme: each
stage takes one unit of time for a step, begins it when the stage before has done its part, and
rank 0 launches a step when its own stage is free. The first steps of two stages:

    one in flight    stage 0  1 . 2 .      two in flight    stage 0  1 2 3 4
                     stage 1  . 1 . 2                       stage 1  . 1 2 3

Left out: times. A step with half of the sequences takes as long here as one with all of them.

vLLM: v1/engine/core.py, `step_with_batch_queue`.
"""

from __future__ import annotations

from typing import NamedTuple

from nanoserve.extras.trace.async_steps import Call
from nanoserve.extras.trace.style import COLOURS, FAINT, IDLE, WIDTH, box, canvas, label, show


class Part(NamedTuple):
    """One stage's part of a step. It takes one unit of time."""

    stage: int
    step: int
    begin: int


def plan_stages(events: list[Call], num_stages: int) -> list[Part]:
    """When each stage computes each step."""
    parts: list[Part] = []
    free = [0] * num_stages  # when each stage can begin
    done: dict[int, int] = {}  # step -> when its logits are on rank 0
    for verb, step in events:
        if verb == "update":
            free[0] = max(free[0], done.get(step, 0))
            continue
        begin = 0
        for stage in range(num_stages):
            begin = max(begin, free[stage])
            parts.append(Part(stage, step, begin))
            begin = free[stage] = begin + 1
        done[step] = begin
    return parts


def idle_share(events: list[Call], num_stages: int) -> float:
    """The share of the stages' time in which they have nothing to do."""
    parts = plan_stages(events, num_stages)
    end = max(part.begin for part in parts) + 1
    return 1 - len(parts) / (num_stages * end)


def pipeline(title: str, runs: dict[str, list[Call]], num_stages: int, end: int = 12) -> None:
    """Draw the first `end` units of each run (name -> its calls): a lane for each stage. Shaded
    parts are idle: the bubble."""
    lane, left = 0.3, 1.2
    run_height = 0.42 + num_stages * (lane + 0.06)
    height = 0.5 + run_height * len(runs)
    ax = canvas(height, title)
    unit = (WIDTH - left) / end
    for row, (name, events) in enumerate(runs.items()):
        top = height - 0.44 - run_height * row
        label(ax, 0, top - 0.02, name, size=9.5, weight="bold", ha="left")
        bottoms = [top - 0.2 - (stage + 1) * (lane + 0.06) for stage in range(num_stages)]
        for stage, y in enumerate(bottoms):
            label(ax, left - 0.1, y + lane / 2, f"stage {stage}", size=9, ha="right")
            box(ax, left, y, end * unit, lane, facecolor=IDLE, edgecolor="none", hatch="////")
        for part in plan_stages(events, num_stages):
            if part.begin < end:
                x, y = left + part.begin * unit, bottoms[part.stage]
                face = COLOURS[2 * (part.step % 2)]
                box(ax, x, y, unit, lane, facecolor=face, edgecolor="white")
                label(ax, x + unit / 2, y + lane / 2, f"step {part.step}", size=8, color="white")
    note = "a scheme: the order is recorded, a step takes one unit in each stage"
    label(ax, WIDTH, height - 0.18, note, color=FAINT, ha="right")
    show()
