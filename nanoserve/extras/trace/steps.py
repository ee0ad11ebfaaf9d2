"""Who ran when? Pictures of the steps of a run.

    timeline     one run: the tokens of each step as bars, and a lane for each sequence
    timelines    several runs below each other, on one scale; a lane for each place in the batch
    step_times   the parts of each step's time
    gantt        one bar for each request: waiting, prefill, decode

In a lane, a number says how many tokens a sequence had in the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from nanoserve.extras.trace.frames import Frame, SequenceView, names_in
from nanoserve.extras.trace.style import (
    DPI,
    FAINT,
    IDLE,
    INK,
    LINE,
    STEP_COLOURS,
    TITLE,
    WAIT,
    WIDTH,
    box,
    fit,
    label,
    panels,
    pyplot,
    show,
    tint,
)
from nanoserve.output_processor import RequestOutput
from nanoserve.sequence import SequenceStatus

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LANE = 0.34  # inches
MOST_IN_LEGEND = 6  # names
MOST_LANES = 60  # of a picture
MOST_NUMBERED = 48  # steps with a number in every lane
TIMES = ("schedule", "execute", "update")  # of a frame


def frames_of(run: Any) -> list[Frame]:
    """The steps of a recorder, or a list of steps as it is."""
    return list(getattr(run, "steps", run))


# -- one run --


def timeline(title: str, run: Any) -> None:
    """Draw a run: above, a bar for each step with its tokens; below, a lane for each sequence, for
    the first MOST_LANES of them."""
    frames = frames_of(run)
    names = names_in(frames)
    shown, num_more = names[:MOST_LANES], len(names[MOST_LANES:])
    rows = [*shown, *([""] if num_more else [])]
    lanes_height = LANE * max(1, len(rows)) + 0.3
    _, (bars, lanes) = pyplot().subplots(
        2,
        1,
        figsize=(WIDTH, 2.6 + lanes_height),
        dpi=DPI,
        sharex=True,
        height_ratios=(2.0, lanes_height),
        layout="constrained",
    )
    bars.set_title(title, loc="left", fontsize=TITLE, weight="bold", color=INK)
    _draw_bars(bars, frames, names)
    for row, name in enumerate(shown):
        _draw_lane(lanes, frames, name, row)
    if num_more:
        label(lanes, 0.5, len(shown), f"and {num_more} more", 9, ha="left", color=FAINT)
    _dress_lanes(lanes, frames, rows)
    show()


def _dress_lanes(ax: Axes, frames: list[Frame], names: list[str]) -> None:
    ax.set_xlim(0.4, max(len(frames), 1) + 0.6)
    ax.set_ylim(max(len(names), 1) - 0.5, -0.5)
    ax.set_yticks(range(len(names)), [fit(name, 1.0, 9.5)[0] for name in names], fontsize=9.5)
    for text in ax.get_yticklabels():
        text.set_fontweight("bold")
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 1000) if len(frames) / n <= MOST_NUMBERED)
    ticks = [i for i in range(1, len(frames) + 1) if every == 1 or i % every == 0]
    first = frames[0].number - 1 if frames else 0
    ax.set_xticks(ticks, [str(first + i) for i in ticks])
    ax.set_xlabel("step", fontsize=9)
    ax.tick_params(labelsize=8, length=0, axis="x")
    ax.tick_params(length=0, axis="y")
    ax.spines[:].set_visible(False)


def _draw_bars(ax: Axes, frames: list[Frame], names: list[str]) -> None:
    """The tokens of each step; those that are computed again are hatched."""
    from matplotlib.patches import Patch

    order = {name: place for place, name in enumerate(names)}
    for index, frame in enumerate(frames, start=1):
        bottom = 0
        for view in sorted(frame.scheduled, key=lambda view: order[view.name]):
            for count, hatch in ((view.num_again, "////"), (view.num_first_time, "")):
                style: dict[str, Any] = {"edgecolor": "white", "hatch": hatch, "linewidth": 0.7}
                face = tint(view.name, 0.75)
                ax.bar(index, count, 0.82, bottom, color=face, **style)
                bottom += count
    highest = max((frame.num_scheduled for frame in frames), default=1)
    budget = frames[0].budget if frames else 0
    shows_budget = budget <= 2 * highest
    handles: list[Any] = []  # the lanes below have the names, too
    if len(names) <= MOST_IN_LEGEND:
        handles = [Patch(facecolor=tint(name, 0.75), label=name) for name in names]
    if any(view.num_again for frame in frames for view in frame.scheduled):
        again = Patch(facecolor=LINE, edgecolor="white", hatch="////", label="computed again")
        handles.append(again)
    if signs := {sign for name in names[:MOST_LANES] for sign in _wait_signs(frames, name)}:
        meanings = {"✕": "preempted", "↓": "in CPU memory", "…": "waits"}
        text = ", ".join(f"{sign} {what}" for sign, what in meanings.items() if sign in signs)
        handles.append(Patch(facecolor=WAIT, label=text))
    if shows_budget:
        line: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1}
        ax.axhline(budget, **line)
        handles.append(pyplot().Line2D([], [], label=f"token budget {budget}", **line))
    top = max(highest, budget if shows_budget else 0)
    columns = min(len(handles), 9) or 1
    rows = -(-len(handles) // columns)
    ax.set_ylim(0, top * (1.18 + 0.14 * rows))
    ax.legend(handles=handles, loc="upper right", ncols=columns, frameon=False, fontsize=8.5)
    ax.set_ylabel("tokens in the step", fontsize=9)
    ax.locator_params(axis="y", integer=True)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_lane(ax: Axes, frames: list[Frame], name: str, row: int) -> None:
    """Tokens by step; grey where the sequence waits, a cross where it was preempted."""
    is_numbered = len(frames) <= MOST_NUMBERED
    was_running = False
    for index, frame in enumerate(frames, start=1):
        view = frame.view(name)
        if view is None:
            continue
        if view.num_scheduled:
            style = {"facecolor": tint(name, 0.45), "edgecolor": "white", "linewidth": 0.6}
            box(ax, index - 0.5, row - 0.4, 1, 0.8, **style)
            if is_numbered:
                label(ax, index, row, str(view.num_scheduled), 8.5)
        elif view.is_waiting:
            style = {"facecolor": WAIT, "edgecolor": "white", "linewidth": 0.6}
            box(ax, index - 0.5, row - 0.4, 1, 0.8, **style)
            if was_running or is_numbered:
                weight = "bold" if was_running else "normal"
                label(ax, index, row, _wait_sign(view, was_running), 9, weight=weight)
        was_running = bool(view.num_scheduled)


def _wait_signs(frames: list[Frame], name: str) -> Iterator[str]:
    """The signs that the lane of a sequence has where it waits."""
    was_running = False
    for view in filter(None, (frame.view(name) for frame in frames)):
        if view.is_waiting:
            yield _wait_sign(view, was_running)
        was_running = bool(view.num_scheduled)


def _wait_sign(view: SequenceView, was_running: bool) -> str:
    return "✕" if was_running else ("↓" if view.status is SequenceStatus.SWAPPED else "…")


# -- several runs --


def timelines(runs: Mapping[str, Any], capacity: int | None = None) -> None:
    """Draw several runs (title -> recorder, or list of steps) on one scale, a lane for each place
    in the batch. With `capacity`, the number of places, idle places are shaded and counted: a place
    is idle in a step if it computes no token."""
    all_frames = {title: frames_of(run) for title, run in runs.items()}
    longest = max((len(frames) for frames in all_frames.values()), default=1)
    grids = {title: _places(frames) for title, frames in all_frames.items()}
    heights = [max(capacity or 0, len(grid), 1) for grid in grids.values()]
    _, axes = pyplot().subplots(
        len(runs),
        1,
        figsize=(WIDTH, sum(0.62 + LANE * number for number in heights) + 0.25),
        dpi=DPI,
        squeeze=False,
        sharex=True,
        height_ratios=heights,
        layout="constrained",
    )
    for ax, (title, grid), number in zip(axes[:, 0], grids.items(), heights, strict=True):
        frames = all_frames[title]
        _draw_places(ax, grid, frames, longest)
        text = f"{len(frames)} steps"
        if capacity:
            total = capacity * len(frames)
            idle = _draw_idle(ax, grid, len(frames), capacity)
            text += f"; {idle} of {total} places idle ({idle / max(total, 1):.0%})"
        ax.set_title(title, loc="left", fontsize=10.5, weight="bold", color=INK)
        ax.set_title(text, loc="right", fontsize=9.5, color=INK)
        _dress_lanes(ax, frames, [f"place {n}" for n in range(1, number + 1)])
        for tick in ax.get_yticklabels():
            tick.set(weight="normal", fontsize=8.5, color=FAINT)
        ax.axvline(len(frames) + 0.5, color=INK, linewidth=1.2)
        ax.set_xlim(0.4, longest + 0.6)
        ax.set_xlabel("step" if ax is axes[-1, 0] else "", fontsize=9)
    show()


def _places(frames: list[Frame]) -> list[dict[int, SequenceView]]:
    """For each place in the batch: step -> who was there. A sequence takes the first free place and
    keeps it until it ends or is preempted."""
    grid: list[dict[int, SequenceView]] = []
    place_of: dict[int, int] = {}
    for index, frame in enumerate(frames, start=1):
        running = {view.seq_id for view in frame.scheduled}
        holding = running | {
            view.seq_id for view in frame.sequences if view.status is SequenceStatus.RUNNING
        }
        place_of = {seq_id: place for seq_id, place in place_of.items() if seq_id in holding}
        for view in frame.scheduled:
            if view.seq_id not in place_of:
                taken = set(place_of.values())
                place_of[view.seq_id] = next(n for n in range(len(taken) + 1) if n not in taken)
            place = place_of[view.seq_id]
            grid += [{} for _ in range(place + 1 - len(grid))]
            grid[place][index] = view
    return grid


def _draw_places(
    ax: Axes, grid: list[dict[int, SequenceView]], frames: list[Frame], longest: int
) -> None:
    """A cell for each step of a place, with the sequence's name, and its tokens if several."""
    width = 0.86 * WIDTH / max(longest, 1)  # inches of a step
    for row, line in enumerate(grid):
        for index, view in line.items():
            strength = 0.75 if view.num_scheduled > 1 else 0.4
            style = {"facecolor": tint(view.name, strength), "edgecolor": "white"}
            box(ax, index - 0.5, row - 0.42, 1, 0.84, linewidth=0.6, **style)
            text = f"{view.name}{view.num_scheduled}" if width < 0.3 else view.name
            if view.num_scheduled > 1 and width >= 0.3:
                text = f"{view.name} {view.num_scheduled}"
            is_start = index - 1 not in line or line[index - 1].seq_id != view.seq_id
            if width < 0.2:
                if is_start:
                    label(ax, index - 0.35, row, view.name, 8, ha="left", weight="bold")
                continue
            text, size = fit(text if view.num_scheduled > 1 else view.name, 0.94 * width, 8.5)
            label(ax, index, row, text, size)


def _draw_idle(ax: Axes, grid: list[dict[int, SequenceView]], steps: int, capacity: int) -> int:
    """Shade the places that compute nothing; return their number."""
    idle = 0
    for row in range(capacity):
        line = grid[row] if row < len(grid) else {}
        for index in range(1, steps + 1):
            if index not in line:
                idle += 1
                style = {"facecolor": IDLE, "edgecolor": "white", "hatch": "....."}
                box(ax, index - 0.5, row - 0.42, 1, 0.84, linewidth=0.6, **style)
    return idle


# -- times --


def step_times(title: str, run: Any) -> None:
    """Draw the parts of each step's time as shares: schedule, execute, update. Above the bars, the
    tokens of the step."""
    frames = frames_of(run)
    [ax] = panels(1, 3.0, title)
    bottoms = [0.0] * len(frames)
    places = range(1, len(frames) + 1)
    totals = dict.fromkeys(TIMES, 0.0)
    for part in TIMES:
        seconds = [getattr(frame, f"{part}_time") for frame in frames]
        shares = [100 * s / max(_total(f), 1e-12) for s, f in zip(seconds, frames, strict=True)]
        ax.bar(places, shares, 0.86, bottoms, color=STEP_COLOURS[part], label=part)
        bottoms = [a + b for a, b in zip(bottoms, shares, strict=True)]
        totals[part] = sum(seconds)
    whole = max(sum(totals.values()), 1e-12)
    if len(frames) <= MOST_NUMBERED:
        for place, frame in zip(places, frames, strict=True):
            label(ax, place, 103, str(frame.num_scheduled), 7.5, color=FAINT, va="bottom")
        label(ax, 0.3, 103, "tokens", 7.5, color=FAINT, va="bottom", ha="right")
    handles, _ = ax.get_legend_handles_labels()
    texts = [f"{part} ({_percent(totals[part] / whole)} of the run)" for part in TIMES]
    fig = ax.get_figure()
    fig.legend(handles, texts, loc="outside lower center", ncols=3, frameon=False, fontsize=8.5)
    ax.set_ylim(0, 112)
    ax.set_xlim(0.3, len(frames) + 0.7)
    ax.locator_params(axis="x", integer=True)
    ax.set_yticks((0, 25, 50, 75, 100), ("0%", "25%", "50%", "75%", "100%"))
    ax.set_ylabel("share of the step", fontsize=9)
    ax.set_xlabel("step", fontsize=9)
    show()


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else f"{share:.1%}"


def _total(frame: Frame) -> float:
    return frame.schedule_time + frame.execute_time + frame.update_time


def gantt(title: str, outputs: Iterable[RequestOutput] | Seq[RequestOutput]) -> None:
    """Draw one bar for each finished request: how long it waited, its prefill (to the first token)
    and its decodes. Times are in milliseconds from the first arrival."""
    from matplotlib.patches import Patch

    ended = [output for output in outputs if output.metrics and output.metrics.first_token_ts]
    metrics = [output.metrics for output in ended if output.metrics]
    begin = min((m.queued_ts for m in metrics), default=0.0)
    [ax] = panels(1, 1.2 + LANE * max(1, len(ended)), title)
    end = 0.0
    for row, (output, m) in enumerate(zip(ended, metrics, strict=True)):
        name = output.request_id
        moments = [m.queued_ts, m.scheduled_ts, m.first_token_ts, m.finished_ts or m.last_token_ts]
        a, b, c, d = (1000 * ((moment or begin) - begin) for moment in moments)
        end = max(end, d)
        waits = {"facecolor": "white", "edgecolor": LINE, "hatch": "////", "linewidth": 0.5}
        box(ax, a, row - 0.36, b - a, 0.72, **waits)
        for left, right, strength in ((b, c, 0.85), (c, d, 0.35)):
            style = {"facecolor": tint(name, strength), "edgecolor": "white"}
            box(ax, left, row - 0.36, right - left, 0.72, **style)
        label(ax, d, row, f"  first token after {c - a:.0f} ms", 8, ha="left", color=FAINT)
    ax.set_xlim(0, 1.22 * end or 1)
    ax.set_ylim(max(len(ended), 1) - 0.5, -0.5)
    ax.set_yticks(range(len(ended)), [output.request_id for output in ended], fontsize=9.5)
    ax.set_xlabel("milliseconds from the first arrival", fontsize=9)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    handles = [
        Patch(facecolor="white", edgecolor=LINE, hatch="////", label="waits"),
        Patch(facecolor="#7A7A7A", label="prefill: to the first token"),
        Patch(facecolor="#D0D0D0", label="decodes"),
    ]
    ax.get_figure().legend(
        handles=handles, loc="outside upper right", ncols=3, frameon=False, fontsize=8.5
    )
    show()
