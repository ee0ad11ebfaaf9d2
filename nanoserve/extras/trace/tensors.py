"""How does a step become tensors? One wide picture.

Above, a column for each token of the step: its text, input_ids, positions and slot_mapping. Arrows
lead from each token to the slot of the KV cache that its key and value are written to. Below, what
else attention needs: query_start_loc, seq_lens and the block tables.

    slot = block_table[position // block_size] * block_size + position % block_size

Left out: steps of more than MOST_TOKENS tokens, which have no room.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from nanoserve.arg_utils import engine_of
from nanoserve.extras.trace.frames import COMING, NEW, Frame, name_of
from nanoserve.extras.trace.snapshot import snapshot
from nanoserve.extras.trace.style import (
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
    shade,
    show,
    tint,
)
from nanoserve.sequence import SchedulerOutput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nanoserve.model_runner import StepInputs

MOST_TOKENS = 64
MOST_BLOCKS = 28  # drawn in one line
LEFT, LINE_HEIGHT, GAP = 1.25, 0.25, 0.07  # inches
NARROW = 0.24  # inches of a column; in a narrower one, texts are turned
ARROWS = 1.45  # inches between slot_mapping and the blocks


def step_tensors(
    llm_or_engine: Any, title: str, scheduler_output: SchedulerOutput, step_inputs: StepInputs
) -> None:
    """Draw a step's arrays, and where in the KV cache its tokens go. Raises ValueError for a step
    of more than MOST_TOKENS tokens."""
    engine = engine_of(llm_or_engine)
    arrays, frame = step_inputs.arrays, snapshot(engine, scheduler_output)
    token_ids, slots = arrays.input_ids.tolist(), arrays.slot_mapping.tolist()
    if len(token_ids) > MOST_TOKENS:
        raise ValueError(f"{len(token_ids)} tokens do not fit; at most {MOST_TOKENS} do.")
    starts, sequences = arrays.query_start_loc.tolist(), engine.scheduler.sequences
    names = [name_of(sequences[item.seq_id]) for item in scheduler_output.scheduled]
    cell = min(0.62, (WIDTH - LEFT) / len(token_ids))
    line_height = LINE_HEIGHT if cell >= NARROW else 0.46
    height = 2.42 + 4 * line_height + ARROWS + 0.29 * len(names)
    ax = canvas(height, title)
    label(ax, WIDTH, height - 0.18, "framed: its logits are sampled", 8, ha="right", color=FAINT)
    left = LEFT + max(0.0, (WIDTH - LEFT - cell * len(token_ids)) / 2)
    limit = 7 if cell > 0.42 or cell < NARROW else 5
    rows = {
        "token": [frame.tokens.text(token_id, limit) for token_id in token_ids],
        "input_ids": token_ids,
        "positions": arrays.positions.tolist(),
        "slot_mapping": slots,
    }
    top = height - 0.44
    bottom = _draw_columns(ax, rows, names, starts, left, cell, top, line_height)
    for index in arrays.logits_indices.tolist():
        frame_style = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.8, "zorder": 5}
        box(ax, left + index * cell, bottom, cell, top - 0.26 - bottom, **frame_style)
    blocks_top = bottom - ARROWS
    slot_x, slot_width = _draw_blocks(
        ax, frame, {slot // frame.block_size for slot in slots}, blocks_top
    )
    owner = [
        name for name, a, b in zip(names, starts, starts[1:], strict=False) for _ in range(a, b)
    ]
    _draw_arrows(
        ax, slots, owner, left, cell, bottom, blocks_top, slot_x, slot_width, frame.block_size
    )
    size = frame.block_size
    rule = f"slot = block_table[position // {size}] × {size} + position % {size}"
    label(ax, 0, blocks_top - 0.82, rule, 9, ha="left", weight="bold")
    index = starts[-2] + (starts[-1] - starts[-2]) // 2  # in the middle of the last sequence
    slot, position = slots[index], rows["positions"][index]
    example = f"{names[-1]}, position {position}:   block_table[{position // size}] × {size}"
    example += f" + {position % size}   =   {slot // size} × {size} + {slot % size}   =   {slot}"
    label(ax, 4.6, blocks_top - 0.82, example, 9, ha="left", color=FAINT)
    _draw_metadata(
        ax,
        names,
        starts,
        arrays.seq_lens.tolist(),
        arrays.block_table.tolist(),
        size,
        blocks_top - 1.0,
    )
    show()


def _draw_columns(
    ax: Axes,
    rows: dict[str, list[Any]],
    names: list[str],
    starts: list[int],
    left: float,
    cell: float,
    top: float,
    line_height: float,
) -> float:
    """The table of tokens; returns the y of its lower edge."""
    bottom = top - 0.26 - line_height * len(rows)
    is_turned = cell < NARROW
    room, turn = (line_height - 0.06, 90) if is_turned else (0.9 * cell, 0)
    for name, start, end in zip(names, starts, starts[1:], strict=False):
        x, width = left + start * cell, (end - start) * cell
        box(ax, x, bottom, width, top - 0.26 - bottom, facecolor=tint(name), linewidth=0)
        chip(ax, x, top - 0.26, width, name)
    for row, (text, values) in enumerate(rows.items()):
        y = top - 0.26 - line_height * (row + 0.5)
        weight = "normal" if text == "token" else "bold"
        label(ax, left - 0.1, y, text, 9, ha="right", weight=weight)
        for index, value in enumerate(values):
            shown = "?" if text == "input_ids" and value == -1 else str(value)
            label(ax, left + (index + 0.5) * cell, y, *fit(shown, room, 8.5), rotation=turn)
    for start in starts[1:-1]:
        ax.plot([left + start * cell] * 2, [bottom, top], color="white", linewidth=2.4)
    return bottom


def _draw_blocks(
    ax: Axes, frame: Frame, wanted: set[int], top: float
) -> tuple[dict[int, float], float]:
    """The KV cache in one line; returns block id -> its left edge, and the width of a slot."""
    size = frame.block_size
    shown = sorted(frame.blocks)
    if len(shown) > MOST_BLOCKS:
        used = sorted({*wanted, *(i for i in shown if frame.blocks[i].owners)})
        shown = used if len(used) <= MOST_BLOCKS else sorted(wanted)
    slot_width = min(0.16, ((WIDTH + GAP) / len(shown) - GAP) / size)
    step = slot_width * size + GAP
    begin = (WIDTH + GAP - step * len(shown)) / 2
    edges = {}
    for place, block_id in enumerate(shown):
        x = edges[block_id] = begin + place * step
        block = frame.blocks[block_id]
        for index, slot in enumerate(block.slots[:size]):
            strength = 0.85 if slot.state in (NEW, COMING) else 0.3
            faces: list[Any] = [tint(name, strength) for name in block.owners] or [CACHED]
            share = 0.3 / len(faces)
            for part, face in enumerate(faces):  # one stripe for each owner
                y = top - (part + 1) * share
                box(ax, x + index * slot_width, y, slot_width, share, facecolor=face, linewidth=0)
            if index:
                ax.plot(
                    [x + index * slot_width] * 2, [top - 0.3, top], color="white", linewidth=0.6
                )
        edge = colour(block.owners[0]) if block.owners else LINE
        box(ax, x, top - 0.3, slot_width * size, 0.3, facecolor="none", edgecolor=edge)
        weight = "bold" if block_id in wanted else "normal"
        ink = INK if block.owners else FAINT
        number = fit(str(block_id), slot_width * size + 0.05, 8)
        label(ax, x + slot_width * size / 2, top - 0.4, *number, color=ink, weight=weight)
        if block_id - 1 not in edges and place:
            label(ax, x - GAP / 2, top - 0.4, "·", 7, color=FAINT)
    text = f"KV cache: physical blocks of {size} slots; block n holds slots {size}·n and on"
    label(ax, WIDTH / 2, top - 0.57, text, 8, color=FAINT)
    return edges, slot_width


def _draw_arrows(
    ax: Axes,
    slots: list[int],
    owner: list[str],
    left: float,
    cell: float,
    top: float,
    bottom: float,
    edges: dict[int, float],
    slot_width: float,
    size: int,
) -> None:
    """A band from the tokens of one block to their slots, and in it an arrow for each token."""
    from matplotlib.patches import FancyArrowPatch, PathPatch
    from matplotlib.path import Path

    def x_of(slot: int) -> float:
        return edges[slot // size] + (slot % size) * slot_width

    def curve(start: float, end: float) -> list[tuple[float, float]]:
        middle = (top + bottom) / 2
        return [(start, top), (start, middle), (end, middle), (end, bottom)]

    bend = [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    for number, (first, last) in enumerate(_bands(slots, owner, size)):
        a, b = left + first * cell, left + (last + 1) * cell
        c, d = x_of(slots[first]), x_of(slots[last]) + slot_width
        points = [*curve(a, c), *reversed(curve(b, d))]
        codes = [*bend, Path.LINETO, *bend[1:]]
        face = tint(owner[first], 0.35 if number % 2 else 0.5)
        ink = shade(colour(owner[first]), -0.4 if number % 2 else 0)  # neighbours can be told apart
        band = PathPatch(Path(points, codes), facecolor=face, alpha=0.45, linewidth=0, zorder=1)
        ax.add_patch(band)
        for index in range(first, last + 1):
            start, end = left + (index + 0.5) * cell, x_of(slots[index]) + slot_width / 2
            points = curve(start, end)
            points[-1] = (end, bottom + 0.02)
            arrow = FancyArrowPatch(
                path=Path(points, bend),
                arrowstyle="-|>,head_length=2.6,head_width=1.5",
                color=ink,
                linewidth=0.8,
                shrinkA=0,
                shrinkB=0,
                zorder=2,
            )
            ax.add_patch(arrow)


def _bands(slots: Seq[int], owner: Seq[str], size: int) -> list[tuple[int, int]]:
    """The first and the last token of each run of tokens that go into one block."""
    found: list[tuple[int, int]] = []
    for index, slot in enumerate(slots):
        if found:
            first, last = found[-1]
            if owner[last] == owner[index] and slots[last] // size == slot // size:
                found[-1] = (first, index)
                continue
        found.append((index, index))
    return found


def _draw_metadata(
    ax: Axes,
    names: list[str],
    starts: list[int],
    seq_lens: list[int],
    tables: list[list[int]],
    size: int,
    top: float,
) -> None:
    """A line for each sequence: query_start_loc, seq_lens, block_table."""
    for x, text in ((1.05, "query_start_loc"), (2.2, "seq_lens"), (2.75, "block_table")):
        ha = "left" if text == "block_table" else "center"
        label(ax, x, top - 0.13, text, 9, weight="bold", ha=ha)
    for row, (name, start, seq_len, table) in enumerate(
        zip(names, starts, seq_lens, tables, strict=False)
    ):
        y = top - 0.29 * (row + 1) - 0.13
        chip(ax, 0, y - 0.12, 0.44, name)
        label(ax, 1.05, y, str(start), 8.5)
        label(ax, 2.2, y, str(seq_len), 8.5)
        for place, block_id in enumerate(table[: -(-seq_len // size)][:25]):
            box(ax, 2.75 + 0.3 * place, y - 0.12, 0.3, 0.24, facecolor=tint(name))
            label(ax, 2.9 + 0.3 * place, y, *fit(str(block_id), 0.28, 8))
    y = top - 0.29 * (len(names) + 1) - 0.1
    label(ax, 1.05, y, f"{starts[-1]}: the end", 8, color=FAINT)
