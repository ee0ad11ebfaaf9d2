"""How much of the KV cache holds tokens, and what is the rest good for?

`memory_history` draws whole runs: time from left to right, a column for each step; all slots of the
KV cache from top to bottom. Each slot is in one of four states:

    used       it holds a token
    reserved   it belongs to a sequence, and holds no token (yet)
    fragment   it is free, but a request waits that does not fit into the free places
    free       it is free, and nobody waits

Waste is (reserved + fragment) / (used + reserved + fragment), summed over the steps of the run.

    trace.memory_history("One piece each, or pages?", {"one piece": recorder, "pages": other})
    trace.memory_use(recorder).waste

Left out: caches of more blocks than a Recorder keeps the contents of. Stripes for shared blocks: a
slot has the colour of its first owner.

vLLM: none. The PagedAttention paper (arXiv 2309.06180) has the three kinds of waste in figure 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from nanoserve.extras.trace.frames import Frame, names_in
from nanoserve.extras.trace.recorder import Recorder
from nanoserve.extras.trace.style import INK, LINE, colour, on_colour, panels, show, tint

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

FRAGMENT = "#2B2B2B"
PALE = 0.28  # strength of the tint of a reserved slot


class MemoryUse(NamedTuple):
    """Slots in each state, summed over the steps of a run."""

    used: int
    reserved: int
    fragment: int
    free: int

    @property
    def waste(self) -> float:
        """The share of slots that hold nothing, of those that nobody else can use."""
        taken = self.used + self.reserved + self.fragment
        return (self.reserved + self.fragment) / taken if taken else 0.0


def memory_use(recorder: Recorder) -> MemoryUse:
    """The slots of all recorded steps, by state."""
    used = reserved = fragment = free = 0
    for frame in recorder.steps:
        num_held = 0
        for block in frame.blocks_in_step.values():
            if block.owners:
                num_held += 1
                used += len(block.slots)
        reserved += num_held * frame.block_size
        rest = (frame.num_blocks - num_held) * frame.block_size
        fragment += rest if frame.num_waiting else 0
        free += 0 if frame.num_waiting else rest
    return MemoryUse(used, reserved - used, fragment, free)


def memory_history(title: str, recorders: Mapping[str, Recorder]) -> None:
    """Draw one or more runs, one below the other, on one time scale."""
    last = max(len(recorder.steps) for recorder in recorders.values())
    axes = panels(len(recorders), 0.75 + 2.3 * len(recorders), title, sharex=True)
    for ax, (label, recorder) in zip(axes, recorders.items(), strict=True):
        steps, use = recorder.steps, memory_use(recorder)
        picture = _picture(list(steps))
        num_blocks, size = steps[0].num_blocks, steps[0].block_size
        ax.imshow(
            picture,
            aspect="auto",
            interpolation="nearest",
            extent=(0.5, len(steps) + 0.5, num_blocks, 0),
        )
        ax.set_xlim(0.5, last + 0.5)
        ax.set_yticks(range(0, num_blocks + 1, max(1, num_blocks // 4)))
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_ylabel(f"blocks of {size} slots", fontsize=8)
        ax.hlines(range(num_blocks), 0.5, len(steps) + 0.5, color="white", linewidth=0.4)
        if len(steps) < last:  # the axis is as long as the longest run
            ax.axvspan(len(steps) + 0.5, last + 0.5, facecolor="white", edgecolor="none")
            ax.axvline(len(steps) + 0.5, color=INK, linewidth=0.8)
            middle = (len(steps) + last + 1) / 2
            ax.text(middle, num_blocks / 2, "done", fontsize=9, ha="center", va="center")
        at_once = max(len(frame.scheduled) for frame in steps)
        text = f"{label}: {at_once} requests at once, {len(steps)} steps, {use.waste:.0%} wasted"
        ax.set_title(text, loc="left", fontsize=9.5, color=INK)
        _name_bands(ax, list(steps))
    axes[-1].set_xlabel("step", fontsize=8)
    _legend(axes[0], [name for r in recorders.values() for name in names_in(r.steps)])
    show()


def _picture(steps: list[Frame]) -> np.ndarray:
    """A colour for each slot and step: [num_slots, num_steps, 3], from 0 to 1."""
    import numpy as np
    from matplotlib.colors import to_rgb

    size = steps[0].block_size
    picture = np.ones((steps[0].num_blocks * size, len(steps), 3))
    for column, frame in enumerate(steps):
        if frame.num_waiting:
            picture[:, column] = to_rgb(FRAGMENT)
        for block_id, block in frame.blocks_in_step.items():
            if block.owners:
                name, first = block.owners[0], block_id * size
                picture[first : first + size, column] = tint(name, PALE)
                picture[first : first + len(block.slots), column] = to_rgb(colour(name))
    return picture


def _name_bands(ax: Axes, steps: list[Frame]) -> None:
    """The name of each sequence, in its first block, at its first step."""
    named: set[str] = set()
    for frame in steps:
        for view in frame.scheduled:
            if view.name not in named and view.table:
                named.add(view.name)
                x, y = frame.number - steps[0].number + 0.6, view.table[0] + 0.6
                ax.text(
                    x,
                    y,
                    view.name,
                    fontsize=9,
                    weight="bold",
                    va="top",
                    color=on_colour(view.name),
                )


def _legend(ax: Axes, names: list[str]) -> None:
    from matplotlib.patches import Patch

    example = sorted(set(names))[0]
    handles = [
        Patch(facecolor=colour(example), label="holds a token"),
        Patch(facecolor=tint(example, PALE), label="reserved"),
        Patch(facecolor=FRAGMENT, label="fragment: free, but the next request does not fit"),
        Patch(facecolor="white", edgecolor=LINE, label="free, nobody waits"),
    ]
    ax.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.12),
        ncols=4,
        fontsize=8,
        frameon=False,
        handlelength=1.2,
    )
