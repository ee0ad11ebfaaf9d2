"""Pictures of an engine's state, for the notebooks beside this file.

These functions read the engine's state and change nothing.

    decision(engine, scheduler_output)   what the scheduler decided, as a small table of text
    blocks(engine, ...)                  block tables, KV cache and free queue
    inputs(engine, ...)                  the arrays of one step, a column per token
    StepLog(engine), timeline(log)       which sequences ran in which step, with how many tokens

A sequence has the same colour in every picture. The colours are those of Okabe and Ito: readers
with any kind of colour vision can tell them apart. Names stand beside the colours.

Left out: engines with hundreds of blocks. Every block is drawn, so a picture needs a small cache.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Patch, Rectangle
from matplotlib.textpath import TextPath

from nanoserve import LLMEngine
from nanoserve.engine import StepReport
from nanoserve.kernels.threads import load_torch
from nanoserve.sequence import SchedulerOutput, Sequence

if TYPE_CHECKING:
    from nanoserve.model_runner import StepInputs

load_torch()  # before a notebook imports it: waiting threads sleep (nanoserve/kernels/threads.py)

WIDTH = 10.5  # inches, of every picture
DPI = 96
COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00"]
INK, FAINT, LINE = "#222222", "#777777", "#AAAAAA"
ALARM, WAIT = "#D55E00", "#EDEDED"
CACHED = "#E4E4E4"  # a free block that can still be found


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep an engine's first lines and progress bars out of the stored notebook."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


def colour(name: str) -> str:
    """The colour of request `name`: A, B, C, ... have the first, second, third, ... one."""
    return COLOURS[(sum(map(ord, name)) - ord("A")) % len(COLOURS)]


def tint(name: str, strength: float = 0.3) -> tuple[float, float, float]:
    """The colour of `name`, thinned with white so that black text stays readable on it."""
    red, green, blue = (1 - strength * (1 - part) for part in to_rgb(colour(name)))
    return red, green, blue


def token_text(engine: LLMEngine, token_id: int, limit: int = 7) -> str:
    """The text of a token, for one slot: visible white space, no leading space, at most `limit`
    letters.

    " capital" -> "capital", " " -> "␣", "<|im_start|>" -> "‹start›"
    """
    text = engine.tokenizer.decode([token_id])
    if text.startswith("<|") and text.endswith("|>"):
        return f"‹{text[2:-2].removeprefix('im_')}›"[: limit + 2]
    text = text.replace("\n", "↵")
    text = text.lstrip(" ") or "␣"
    return text if len(text) <= limit else text[: limit - 2] + "…"


def name_of(seq: Sequence) -> str:
    """The name of a sequence in the pictures: "A" for request A, "A.2" for its branch 2."""
    return f"{seq.request_id}.{seq.branch}" if seq.branch else seq.request_id


def decision(engine: LLMEngine, step: SchedulerOutput) -> None:
    """Print what the scheduler decided."""
    print(f"one step, {step.total_num_scheduled_tokens} tokens in all")
    print("seq_id  request  computed  scheduled  new blocks")
    for item in step.scheduled:
        name = name_of(engine.scheduler.sequences[item.seq_id])
        blocks_ = " ".join(map(str, item.new_block_ids)) or "-"
        counts = f"{item.num_computed_tokens:>8}  {item.num_scheduled_tokens:>9}"
        print(f"{item.seq_id:>6}  {name:>7}  {counts}  {blocks_}")
    for new in step.new_sequences:
        table = " ".join(map(str, new.block_ids)) or "empty"
        known = f"{len(new.token_ids)} tokens, block table so far: {table}"
        print(f"new for the runner: seq {new.seq_id}, {known}")
    moves = {
        "swap out": step.blocks_to_swap_out,
        "swap in": step.blocks_to_swap_in,
        "copy": step.blocks_to_copy,
    }
    for verb, pairs in moves.items():
        if pairs:
            print(f"{verb} blocks", ", ".join(f"{source} to {to}" for source, to in pairs))
    if step.is_restart:
        print("a step failed: the runner drops every sequence")
    if step.finished_seq_ids:
        print("the runner may drop seq", *step.finished_seq_ids)


# -- block tables, KV cache, free queue --


@dataclass
class Slot:
    """One slot of the KV cache, as drawn."""

    text: str
    is_new: bool = False  # written in the step that is drawn


def blocks(
    engine: LLMEngine,
    title: str,
    step: SchedulerOutput | None = None,
    mark: dict[int, str] | None = None,
    columns: int = 6,
) -> None:
    """Draw which sequence owns which block. The slots that `step` writes are framed. `mark` has
    remarks on blocks (block id -> a few words), drawn in a strong colour."""
    scheduler = engine.scheduler
    sequences = [*scheduler.running, *scheduler.swapped, *scheduler.waiting]
    num_blocks, size = engine.block_manager.pool.num_blocks, engine.block_manager.block_size
    num_rows = -(-num_blocks // columns)
    height = 1.3 + 0.34 * max(1, len(sequences)) + 0.66 * num_rows
    ax = _canvas(height)
    ax.text(0, height - 0.18, title, fontsize=11.5, weight="bold", color=INK, va="center")
    top = _draw_block_tables(ax, engine, sequences, height - 0.42)
    pool = f"KV cache: {num_blocks} blocks of {size} tokens"
    ax.text(0, top - 0.14, pool, fontsize=9, color=INK, va="center", weight="bold")
    _draw_legend(ax, top - 0.14, has_step=step is not None)
    top -= 0.3
    width = (WIDTH - 0.1 * (columns - 1)) / columns
    for block_id in range(num_blocks):
        row, column = divmod(block_id, columns)
        x, y = column * (width + 0.1), top - 0.66 * row
        _draw_block(ax, engine, block_id, x, y, width, step)
        if mark and block_id in mark:
            style = {"facecolor": "none", "edgecolor": ALARM, "linewidth": 2.4, "zorder": 4}
            _box(ax, x, y - 0.52, width, 0.32, **style)
            back = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
            remark = {"color": ALARM, "weight": "bold", "bbox": back}
            _label(ax, x + width, y - 0.11, mark[block_id], ha="right", **remark)
    _draw_queue(ax, engine, top - 0.66 * num_rows - 0.12)
    plt.show()


def _canvas(height: float) -> Axes:
    """Axes measured in inches, with nothing on them."""
    fig = plt.figure(figsize=(WIDTH, height), dpi=DPI)
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set_xlim(-0.05, WIDTH + 0.05)
    ax.set_ylim(0, height)
    ax.axis("off")
    return ax


def _box(ax: Axes, x: float, y: float, width: float, height: float, **style: Any) -> None:
    style = {"facecolor": "white", "edgecolor": LINE, "linewidth": 0.8, **style}
    ax.add_patch(Rectangle((x, y), width, height, **style))


def _fit(text: str, width: float, largest: float) -> float:
    """The font size, `largest` at most, with which `text` is no wider than `width` inches."""
    extent = TextPath((0, 0), text, size=1).get_extents().width  # points, for a size of 1
    return min(largest, width * 72 / max(extent, 1e-6))


def _label(ax: Axes, x: float, y: float, text: str, size: float = 8, **style: Any) -> None:
    style = {"color": INK, "ha": "center", "va": "center", **style}
    ax.text(x, y, text, fontsize=size, **style)


def _draw_block_tables(ax: Axes, engine: LLMEngine, sequences: list[Sequence], top: float) -> float:
    """One line for each sequence: name, status, counters, block table. Returns the next y."""
    if not sequences:
        _label(ax, 0, top - 0.15, "no sequence, no block table", color=FAINT, ha="left")
        return top - 0.34
    for seq in sequences:
        name = name_of(seq)
        _box(ax, 0, top - 0.27, 0.34, 0.24, facecolor=tint(name, 0.75))
        _label(ax, 0.17, top - 0.15, name, weight="bold", size=9)
        text = f"{seq.status.name},  {seq.num_computed_tokens} of {seq.num_tokens} tokens computed"
        _label(ax, 0.45, top - 0.15, text, size=9, ha="left")
        table = engine.block_manager.block_tables.get(seq.seq_id, [])
        text = "block table" if table else "holds no block"
        if seq.seq_id in engine.block_manager.swapped_tables:
            table, text = engine.block_manager.swapped_tables[seq.seq_id], "CPU blocks"
        _label(ax, 4.3, top - 0.15, text, size=9, color=FAINT, ha="right")
        for column, block_id in enumerate(table):
            _box(ax, 4.4 + 0.3 * column, top - 0.27, 0.3, 0.24, facecolor=tint(name))
            _label(ax, 4.55 + 0.3 * column, top - 0.15, str(block_id))
        top -= 0.34
    return top


def _draw_legend(ax: Axes, y: float, has_step: bool) -> None:
    _box(ax, WIDTH - 1.38, y - 0.07, 0.2, 0.14, facecolor=CACHED)
    _label(ax, WIDTH, y, "free, can be found", ha="right")
    if has_step:
        _box(ax, WIDTH - 2.92, y - 0.07, 0.2, 0.14, edgecolor=INK, linewidth=1.8)
        _label(ax, WIDTH - 1.55, y, "written in this step", ha="right")


def _slots_of(engine: LLMEngine, block_id: int, step: SchedulerOutput | None) -> list[Slot]:
    """The tokens in a block: those of its owners, or those that a free block still holds."""
    manager = engine.block_manager
    fresh = {item.seq_id: item for item in step.scheduled} if step else {}
    slots: list[Slot] = []
    for seq_id, table in manager.block_tables.items():
        if block_id not in table:
            continue
        seq, start = engine.scheduler.sequences[seq_id], table.index(block_id) * manager.block_size
        end = min(start + manager.block_size, seq.num_computed_tokens)
        item = fresh.get(seq_id)
        first = item.num_computed_tokens if item else seq.num_computed_tokens
        for index, position in enumerate(range(start, end)):
            if index == len(slots):
                slots.append(Slot(token_text(engine, seq.token_ids[position])))
            slots[index].is_new |= position >= first
    block_hash = manager.pool.block_hashes[block_id]
    if not slots and block_hash is not None:
        slots = [Slot(token_text(engine, token_id)) for token_id in block_hash.token_ids]
    return slots


def _draw_block(
    ax: Axes,
    engine: LLMEngine,
    block_id: int,
    x: float,
    top: float,
    width: float,
    step: SchedulerOutput | None,
) -> None:
    manager = engine.block_manager
    owners = [s for s, table in manager.block_tables.items() if block_id in table]
    names = [name_of(engine.scheduler.sequences[seq_id]) for seq_id in owners]
    is_cached = manager.pool.block_hashes[block_id] is not None
    _label(ax, x, top - 0.11, f"block {block_id}", size=8, ha="left", color=FAINT)
    state = f"{' '.join(names)}   refs {manager.pool.ref_counts[block_id]}" if names else "free"
    _label(ax, x + width, top - 0.11, state, size=8, ha="right", color=INK if names else LINE)
    slots, size = _slots_of(engine, block_id, step), manager.block_size
    cell = width / size
    for index in range(size):
        left = x + index * cell
        slot = slots[index] if index < len(slots) else None
        _box(ax, left, top - 0.52, cell, 0.32, facecolor=CACHED if is_cached else "white")
        for part, name in enumerate(names if slot else []):  # one stripe for each owner
            share = 0.32 / len(names)
            bottom = top - 0.2 - (part + 1) * share
            _box(ax, left, bottom, cell, share, facecolor=tint(name), linewidth=0)
        if slot:
            fits, shade = _fit(slot.text, 0.86 * cell, 8.5), INK if names else FAINT
            _label(ax, left + cell / 2, top - 0.36, slot.text, size=fits, color=shade)
        if names:
            _box(ax, left, top - 0.52, cell, 0.32, facecolor="none", linewidth=0.6)
    for index, slot in enumerate(slots):
        if slot.is_new:
            style = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.8, "zorder": 3}
            _box(ax, x + index * cell, top - 0.52, cell, 0.32, **style)
    edge = colour(names[0]) if names else LINE
    _box(ax, x, top - 0.52, width, 0.32, facecolor="none", edgecolor=edge, linewidth=1.4)


def _draw_queue(ax: Axes, engine: LLMEngine, y: float) -> None:
    """The free queue, with the block to be allocated next on the left."""
    pool = engine.block_manager.pool
    text = f"free queue ({pool.num_free_blocks} blocks), next to be allocated first:"
    _label(ax, 0, y, text, size=9, ha="left", weight="bold")
    width = min(0.32, WIDTH / max(1, pool.num_blocks))
    for place, block_id in enumerate(pool.free_queue):
        face = "white" if pool.block_hashes[block_id] is None else CACHED
        _box(ax, place * width, y - 0.42, width, 0.26, facecolor=face)
        _label(ax, (place + 0.5) * width, y - 0.29, str(block_id))


# -- the arrays of a step --


def inputs(engine: LLMEngine, title: str, step: SchedulerOutput, step_inputs: StepInputs) -> None:
    """Draw a StepInputs: one column for each token of the step, one line for each array."""
    arrays, size = step_inputs.arrays, engine.block_manager.block_size
    token_ids, slots = arrays.input_ids.tolist(), arrays.slot_mapping.tolist()
    starts, seq_lens = arrays.query_start_loc.tolist(), arrays.seq_lens.tolist()
    names = [name_of(engine.scheduler.sequences[item.seq_id]) for item in step.scheduled]
    lines = {
        "token": [token_text(engine, token_id) for token_id in token_ids],
        "input_ids": token_ids,
        "positions": arrays.positions.tolist(),
        "block": [slot // size for slot in slots],
        "offset in block": [slot % size for slot in slots],
        "slot_mapping": slots,
    }
    cell, left = min(0.6, (WIDTH - 1.5) / len(token_ids)), 1.45
    height = 1.33 + 0.27 * len(lines)
    ax = _canvas(height)
    _label(ax, 0, height - 0.18, title, size=11.5, weight="bold", ha="left")
    top = height - 0.5
    for name, start, end, seq_len in zip(names, starts[:-1], starts[1:], seq_lens, strict=True):
        x, width = left + start * cell, (end - start) * cell
        bottom = top - 0.27 * len(lines) - 0.18
        _box(ax, x, bottom, width, top - bottom, facecolor=tint(name), linewidth=0)
        _label(ax, x + width / 2, top - 0.08, name, size=9, weight="bold")
        _label(ax, x + width / 2, bottom - 0.47, str(seq_len), size=8.5)
    for line, (label, values) in enumerate(lines.items()):
        y = top - 0.31 - 0.27 * line
        weight = "bold" if label in ("input_ids", "positions", "slot_mapping") else "normal"
        _label(ax, 1.35, y, label, size=9, ha="right", weight=weight)
        for index, value in enumerate(values):
            fits = _fit(str(value), 0.86 * cell, 8.5)
            _label(ax, left + (index + 0.5) * cell, y, str(value), size=fits)
    bottom = top - 0.27 * len(lines) - 0.18
    for start in starts:
        ax.plot([left + start * cell] * 2, [bottom - 0.1, top], color=INK, linewidth=1.1)
        _label(ax, left + start * cell, bottom - 0.22, str(start), size=8.5)
    _label(ax, 1.35, bottom - 0.22, "query_start_loc", size=9, ha="right", weight="bold")
    _label(ax, 1.35, bottom - 0.47, "seq_lens", size=9, ha="right", weight="bold")
    for index in arrays.last_tokens.tolist():
        style = {"facecolor": "none", "edgecolor": INK, "linewidth": 1.8}
        _box(ax, left + index * cell, bottom, cell, 0.27 * len(lines) + 0.02, **style)
    _label(ax, WIDTH, height - 0.2, "framed: its logits are sampled", ha="right", color=FAINT)
    plt.show()


# -- the steps of a run --


@dataclass
class StepRecord:
    """One step: how many tokens of each sequence it computed, and which sequences waited."""

    first_time: dict[str, int]  # tokens that no earlier step computed
    again: dict[str, int]  # tokens that were computed before and lost in a preemption
    waiting: list[str]


class StepLog:
    """Listens to every step of an engine from now on: `timeline` draws `records`."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.records: list[StepRecord] = []
        self._reached: dict[int, int] = {}  # seq_id -> tokens that were computed once already
        engine.step_listeners.append(self)

    def __call__(self, report: StepReport) -> None:
        """Called by the engine at the end of each step."""
        scheduler = self.engine.scheduler
        waiting = [name_of(seq) for seq in (*scheduler.swapped, *scheduler.waiting)]
        record = StepRecord({}, {}, waiting)
        for item in report.scheduler_output.scheduled:
            if item.seq_id not in report.sequences:
                continue  # aborted while the step ran
            name, start = name_of(report.sequences[item.seq_id]), item.num_computed_tokens
            end, reached = start + item.num_scheduled_tokens, self._reached.get(item.seq_id, 0)
            record.again[name] = max(0, min(reached, end) - start)
            record.first_time[name] = item.num_scheduled_tokens - record.again[name]
            self._reached[item.seq_id] = max(reached, end)
        self.records.append(record)


def timeline(log: StepLog, title: str) -> None:
    """Draw a run: above, a bar for each step with its tokens; below, a lane for each sequence."""
    records = log.records
    names = sorted({name for record in records for name in record.first_time})
    figsize = (WIDTH, 2.9 + 0.36 * len(names))
    ratios = (2.3, 0.36 * len(names))
    _, (bars, lanes) = plt.subplots(
        2, 1, figsize=figsize, dpi=DPI, sharex=True, height_ratios=ratios, layout="constrained"
    )
    _draw_bars(bars, log, names)
    bars.set_title(title, loc="left", fontsize=11.5, weight="bold", color=INK)
    for row, name in enumerate(names):
        _draw_lane(lanes, records, name, row)
    lanes.set_xlim(0.4, len(records) + 0.6)
    lanes.set_ylim(len(names) - 0.5, -0.5)
    lanes.set_yticks(range(len(names)), names, fontsize=9.5, weight="bold")
    lanes.set_xticks(range(1, len(records) + 1))
    lanes.set_xlabel("step", fontsize=9)
    lanes.tick_params(labelsize=8, length=0, axis="x")
    lanes.tick_params(length=0, axis="y")
    lanes.spines[:].set_visible(False)
    plt.show()


def _draw_bars(ax: Axes, log: StepLog, names: list[str]) -> None:
    has_again = any(any(record.again.values()) for record in log.records)
    has_wait = any(record.waiting for record in log.records)
    for index, record in enumerate(log.records, start=1):
        bottom = 0
        for name in record.first_time:
            for count, hatch in ((record.again[name], "////"), (record.first_time[name], "")):
                style = {"facecolor": tint(name, 0.75), "edgecolor": "white", "hatch": hatch}
                ax.bar(index, count, 0.82, bottom, linewidth=0.9, **style)
                bottom += count
    budget = log.engine.scheduler.token_budget
    highest = max(sum(r.first_time.values()) + sum(r.again.values()) for r in log.records)
    if budget <= 2 * highest:
        ax.axhline(budget, color=INK, linestyle="--", linewidth=1)
    handles = [Patch(facecolor=tint(name, 0.75), label=name) for name in names]
    if has_again:
        again = Patch(facecolor=LINE, edgecolor="white", hatch="////", label="computed again")
        handles.append(again)
    if has_wait:
        handles.append(Patch(facecolor=WAIT, label="✕ preempted, … waits"))
    if budget <= 2 * highest:
        label = f"token budget {budget}"
        handles.append(plt.Line2D([], [], color=INK, linestyle="--", linewidth=1, label=label))
    ax.set_ylim(0, 1.3 * max(highest, budget if budget <= 2 * highest else 0))
    ax.legend(handles=handles, loc="upper right", ncols=len(handles), frameon=False, fontsize=8.5)
    ax.set_ylabel("tokens in the step", fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _draw_lane(ax: Axes, records: list[StepRecord], name: str, row: int) -> None:
    """Tokens by step; grey where the sequence waits, a cross where it was preempted."""
    was_running = False
    for index, record in enumerate(records, start=1):
        if name in record.first_time:
            count = record.first_time[name] + record.again[name]
            style = {"facecolor": tint(name, 0.45), "edgecolor": "white"}
            _box(ax, index - 0.5, row - 0.4, 1, 0.8, **style)
            _label(ax, index, row, str(count), size=8.5)
        elif name in record.waiting:
            _box(ax, index - 0.5, row - 0.4, 1, 0.8, facecolor=WAIT, edgecolor="white")
            text = "✕" if was_running else "…"
            _label(ax, index, row, text, size=9, weight="bold" if was_running else "normal")
        was_running = name in record.first_time
