"""Who owns which block? A picture of block tables, KV cache and free queue.

    trace.block_map(engine, "After schedule", step=scheduler_output)
    recorder.block_map("After step 7", step=7)

A slot is drawn in one of four ways: tinted (written), with a black frame (written in this step),
hatched (scheduled, not written yet) or grey (the block is free and can still be found).

`weights` colours the slots by a number instead: the attention of one head over physical blocks.

Left out: the blocks of a large KV cache that nobody owns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanoserve.extras.trace.frames import COMING, NEW, Block, Frame, SequenceView
from nanoserve.extras.trace.snapshot import snapshot
from nanoserve.extras.trace.style import (
    ALARM,
    CACHED,
    FAINT,
    INK,
    LINE,
    WIDTH,
    box,
    canvas,
    chip,
    colour,
    fit,
    label,
    show,
    text_width,
    tint,
)
from nanoserve.sequence import SchedulerOutput, SequenceStatus

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_DRAWN = 120  # blocks in a picture
GAP = 0.1  # inches between blocks
SMALLEST_CELL = 0.3  # inches of a slot
CELL, ROW = 0.32, 0.66  # inches: height of a slot, and of a block with its name
SHOWN_WEIGHT = 0.05  # from here on, a number stands in the slot
PLAIN, DARK = "#FFFFFF", "#B3261E"  # weights 0 and 1


def block_map(
    llm_or_engine: Any,
    title: str,
    step: SchedulerOutput | None = None,
    mark: Mapping[int, str] | None = None,
    weights: Any = None,
    columns: int = 6,
    is_written: bool | None = None,
) -> None:
    """Draw a live engine, also in the middle of a step.

    step: the decision that was made last; what it writes is framed, or hatched before it is
    executed. is_written: whether it has been executed (None: find out). mark: block id -> a few
    words. weights: block id -> slot -> number from 0 to 1, to colour the slots by.
    """
    frame = snapshot(llm_or_engine, step, is_written)
    draw_frame(frame, title, mark, weights, columns)


def draw_frame(
    frame: Frame,
    title: str,
    mark: Mapping[int, str] | None = None,
    weights: Any = None,
    columns: int = 6,
) -> None:
    """Draw a recorded step, or a snapshot."""
    blocks = {i: frame.blocks[i] for i in list(frame.blocks)[:MOST_DRAWN]}
    columns = min(columns, max(1, int((WIDTH + GAP) / (frame.block_size * SMALLEST_CELL + GAP))))
    views = [view for view in frame.sequences if not view.is_over]
    lines = _table_lines(views)
    has_queue = bool(frame.contents)
    rows = -(-len(blocks) // columns)
    queue_lines = -(-len(frame.free_queue) // 32) if has_queue else 0
    height = 0.86 + 0.34 * max(1, sum(lines)) + ROW * rows
    height += (0.3 + 0.3 * max(1, queue_lines)) if has_queue else 0.05
    ax = canvas(height, title)
    top = _draw_block_tables(ax, views, lines, height - 0.42)
    pool = f"KV cache: {frame.num_blocks} blocks of {frame.block_size} tokens"
    if len(blocks) < frame.num_blocks:
        pool += f" ({len(blocks)} are drawn)"
    label(ax, 0, top - 0.14, pool, 9, ha="left", weight="bold")
    if weights is None:
        _draw_legend(ax, top - 0.14, blocks)
    else:
        _draw_scale(ax, top - 0.14, max(_weights_of(weights, blocks, frame.block_size)))
    top -= 0.3
    width = (WIDTH - GAP * (columns - 1)) / columns
    for place, (block_id, block) in enumerate(blocks.items()):
        row, column = divmod(place, columns)
        x, y = column * (width + GAP), top - ROW * row
        _draw_block(ax, frame, block_id, x, y, width, weights)
        if mark and block_id in mark:
            _draw_mark(ax, mark[block_id], block, x, y, width)
    if has_queue:
        _draw_queue(ax, frame, top - ROW * rows - 0.1)
    show()


def _table_lines(views: list[SequenceView]) -> list[int]:
    """How many lines the block table of each sequence needs: 20 blocks a line."""
    return [max(1, -(-len(view.table or view.cpu_table) // 20)) for view in views]


def _draw_block_tables(ax: Axes, views: list[SequenceView], lines: list[int], top: float) -> float:
    """One line for each sequence: name, status, counters, block table. Returns the next y."""
    if not views:
        label(ax, 0, top - 0.15, "no sequence, no block table", 9, color=FAINT, ha="left")
        return top - 0.34
    for view, num_lines in zip(views, lines, strict=True):
        name = view.name
        chip(ax, 0, top - 0.27, 0.44, name)
        label(ax, 0.54, top - 0.15, _describe(view), 9, ha="left")
        table, text = view.table, "block table" if view.table else "holds no block"
        if view.status is SequenceStatus.SWAPPED:
            table, text = view.cpu_table, "CPU blocks"
        label(ax, 4.4, top - 0.15, text, 9, color=FAINT, ha="right")
        for place, block_id in enumerate(table):
            line, column = divmod(place, 20)
            x, y = 4.5 + 0.3 * column, top - 0.34 * line
            box(ax, x, y - 0.27, 0.3, 0.24, facecolor=tint(name))
            label(ax, x + 0.15, y - 0.15, *fit(str(block_id), 0.28, 8))
        top -= 0.34 * num_lines
    return top


def _describe(view: SequenceView) -> str:
    num_coming = view.num_computed - view.first_coming
    if num_coming and view.first_coming:
        done = f"{view.first_coming} of {view.num_tokens} computed, {num_coming} scheduled"
    elif num_coming:
        done = f"{num_coming} of {view.num_tokens} tokens scheduled"
    else:
        done = f"{view.num_computed} of {view.num_tokens} tokens computed"
    return f"{view.status.name}, {done}"


def _draw_legend(ax: Axes, y: float, blocks: dict[int, Block]) -> None:
    """From the right: only what the picture has."""
    states = {slot.state for block in blocks.values() for slot in block.slots}
    has_found = any(block.slots and not block.owners for block in blocks.values())
    frame = {"edgecolor": INK, "linewidth": 1.8}
    hatched = {"hatch": "//////", "edgecolor": FAINT, "linewidth": 0.8}
    entries: list[tuple[str, dict[str, Any], bool]] = [
        ("free, can be found", {"facecolor": CACHED}, has_found),
        ("written in this step", frame, NEW in states),
        ("scheduled, not written yet", hatched, COMING in states),
    ]
    x = WIDTH
    for text, style, is_needed in entries:
        if is_needed:
            label(ax, x, y, text, 8, ha="right")
            x -= text_width(text, 8) + 0.08
            box(ax, x - 0.2, y - 0.07, 0.2, 0.14, **style)
            x -= 0.4


def _draw_block(
    ax: Axes, frame: Frame, block_id: int, x: float, top: float, width: float, weights: Any
) -> None:
    """The block's number and owners; below it the slots, a stripe for each owner."""
    block, size = frame.blocks[block_id], frame.block_size
    names, bottom, cell = block.owners, top - 0.2 - CELL, width / size
    label(ax, x, top - 0.11, f"block {block_id}", 8, ha="left", color=FAINT)
    state = f"{' '.join(names)}   refs {block.ref_count}" if names else "free"
    room = width - text_width(f"block {block_id}", 8) - 0.1
    state, state_size = fit(state, room, 8)
    label(ax, x + width, top - 0.11, state, state_size, ha="right", color=INK if names else FAINT)
    is_found = block.is_cached or not names
    for index in range(size):
        left = x + index * cell
        slot = block.slots[index] if index < len(block.slots) else None
        face = CACHED if is_found and slot and weights is None else "white"
        box(ax, left, bottom, cell, CELL, facecolor=face, linewidth=0.6)
        if slot is None:
            continue
        text_colour, weight = INK if names else FAINT, 0.0
        if weights is not None:
            weight = weight_at(weights, block_id, index)
            box(ax, left, bottom, cell, CELL, facecolor=heat(weight), linewidth=0.6)
            text_colour = "white" if weight > 0.55 else text_colour
        else:
            for part, name in enumerate(names):  # one stripe for each owner
                share = CELL / len(names)
                y = top - 0.2 - (part + 1) * share
                if slot.state == COMING:
                    box(ax, left, y, cell, share, linewidth=0, **hatch(name))
                else:
                    box(ax, left, y, cell, share, facecolor=tint(name), linewidth=0)
        text, fits = fit(frame.tokens.text(slot.token_id), 0.88 * cell, 8.5)
        back = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"}
        extra = {"bbox": back} if slot.state == COMING else {}
        y = top - 0.36
        if weights is not None and weight >= SHOWN_WEIGHT:
            label(ax, left + cell / 2, y - 0.075, f"{100 * weight:.0f}%", 7, color=text_colour)
            y, fits = y + 0.07, min(fits, 7.5)
        label(ax, left + cell / 2, y, text, fits, color=text_colour, **extra)
        box(ax, left, bottom, cell, CELL, facecolor="none", linewidth=0.6)
    for index, slot in enumerate(block.slots):
        if slot.state == NEW and weights is None:
            style = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.8, "zorder": 3}
            box(ax, x + index * cell, bottom, cell, CELL, **style)
    edge = colour(names[0]) if names else LINE
    box(ax, x, bottom, width, CELL, facecolor="none", edgecolor=edge, linewidth=1.4)


def hatch(name: str) -> dict[str, Any]:
    """The look of a slot that is scheduled and not written yet."""
    return {"facecolor": "white", "edgecolor": tint(name, 0.8), "hatch": "//////"}


def _draw_mark(ax: Axes, text: str, block: Block, x: float, top: float, width: float) -> None:
    """A remark on a block, in a strong colour, in the place of the owners."""
    style = {"facecolor": "none", "edgecolor": ALARM, "linewidth": 2.4, "zorder": 4}
    box(ax, x, top - 0.2 - CELL, width, CELL, **style)
    text, size = fit(text, width - 0.62, 8)
    back = {"facecolor": "white", "edgecolor": "none", "pad": 1.6}
    remark = {"color": ALARM, "weight": "bold", "bbox": back, "zorder": 5}
    label(ax, x + width, top - 0.11, text, size, ha="right", **remark)


def _draw_queue(ax: Axes, frame: Frame, y: float) -> None:
    """The free queue, with the block to be allocated next on the left."""
    text = f"free queue ({frame.num_free} blocks), next to be allocated first:"
    text = text if frame.num_free else "free queue: empty"
    label(ax, 0, y, text, 9, ha="left", weight="bold")
    width = WIDTH / 32
    for place, block_id in enumerate(frame.free_queue):
        line, column = divmod(place, 32)
        face = "white" if frame.contents[block_id] is None else CACHED
        box(ax, column * width, y - 0.42 - 0.3 * line, width, 0.26, facecolor=face)
        number = fit(str(block_id), 0.9 * width, 8)
        label(ax, (column + 0.5) * width, y - 0.29 - 0.3 * line, *number)


# -- weights --


def weight_at(weights: Any, block_id: int, slot: int) -> float:
    """A number of `weights`: mappings, lists or a tensor. 0 where there is none."""
    try:
        return float(weights[block_id][slot])
    except (KeyError, IndexError):
        return 0.0


def _weights_of(weights: Any, blocks: Mapping[int, Block], size: int) -> list[float]:
    return [weight_at(weights, block_id, slot) for block_id in blocks for slot in range(size)]


def heat(weight: float) -> tuple[float, float, float]:
    """White for 0, dark red for 1. Small weights are lifted, so that they can be seen."""
    from matplotlib.colors import to_rgb

    share = min(1.0, max(0.0, weight)) ** 0.6
    low, high = to_rgb(PLAIN), to_rgb(DARK)
    red, green, blue = (a + share * (b - a) for a, b in zip(low, high, strict=True))
    return red, green, blue


def _draw_scale(ax: Axes, y: float, highest: float) -> None:
    """What the colours of weights mean."""
    label(ax, WIDTH, y, "1", 8, ha="right")
    steps, width = 8, 1.4
    for index in range(steps):
        x = WIDTH - 0.15 - width + index * width / steps
        box(
            ax, x, y - 0.07, width / steps, 0.14, facecolor=heat(index / (steps - 1)), linewidth=0.4
        )
    text = f"weight (largest {highest:.2f})   0"
    label(ax, WIDTH - 0.22 - width, y, text, 8, ha="right")
