"""Why pages, and who does what? Two pictures for the first notebook.

    memory_map(title, engine, 48)   the slots of the KV cache, twice: with 48 slots reserved for
                                    each request, and with blocks
    layers(title)                   the six layers of vLLM V1, and our files in them

A slot is the place of one token. The upper map is arithmetic: no engine of ours reserves memory in
this way. The lower map is the live engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoserve.arg_utils import engine_of
from nanoserve.extras.trace.style import (
    FAINT,
    INK,
    LINE,
    WIDTH,
    box,
    canvas,
    colour,
    label,
    show,
    tint,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 48  # slots in a line
SLOT = WIDTH / COLUMNS  # inches
LINE_HEIGHT = 0.3

# Layer of vLLM V1 -> its classes, our files in it.
LAYERS = {
    "API layer": ("OpenAI API server, LLM", "llm.py"),
    "Engine layer": (
        "AsyncLLM, LLMEngine, InputProcessor, Detokenizer",
        "engine.py, input_processor.py, output_processor.py",
    ),
    "Core layer": (
        "EngineCore, Scheduler, KVCacheManager",
        "engine.py, scheduler.py, block_manager.py",
    ),
    "Executor layer": (
        "UniProcExecutor, MultiprocExecutor",
        "executor.py, distributed/multiproc.py",
    ),
    "Worker layer": (
        "Worker, GPUModelRunner, InputBatch",
        "model_runner.py, input_batch.py",
    ),
    "Core components": (
        "attention, models, sampling",
        "attention.py, kernels/, models/, sampler.py",
    ),
}


def memory_map(title: str, llm_or_engine: Any, reserve: int) -> None:
    """Draw the slots of the KV cache twice: `reserve` slots side by side for each running request,
    and the blocks of the live engine. A slot that is set aside and holds no token is hatched."""
    engine = engine_of(llm_or_engine)
    running = engine.scheduler.running
    manager = engine.block_manager
    num_slots = manager.num_blocks * manager.block_size
    lengths = {seq.request_id: seq.num_computed_tokens for seq in running}
    reserved: dict[int, tuple[str, bool]] = {}  # slot -> (request, does it hold a token?)
    for index, name in enumerate(list(lengths)[: num_slots // reserve]):
        start = index * reserve
        reserved |= {start + i: (name, i < lengths[name]) for i in range(reserve)}
    paged: dict[int, tuple[str, bool]] = {}
    for seq in running:
        for index, block_id in enumerate(manager.block_tables[seq.seq_id]):
            for offset in range(manager.block_size):
                holds = index * manager.block_size + offset < seq.num_computed_tokens
                paged[block_id * manager.block_size + offset] = (seq.request_id, holds)
    waiting = list(lengths)[num_slots // reserve :]
    maps = {
        f"{reserve} slots reserved for each request, side by side": (reserved, reserve),
        f"blocks of {manager.block_size} slots, taken when they are needed": (
            paged,
            manager.block_size,
        ),
    }
    num_lines = -(-num_slots // COLUMNS)
    panel = 0.42 + num_lines * LINE_HEIGHT + 0.16
    ax = canvas(0.72 + 2 * panel, title)
    _memory_legend(ax, 0.2 + 2 * panel, list(lengths))
    top = 0.04 + 2 * panel
    for heading, (slots, step) in maps.items():
        used = sum(holds for _, holds in slots.values())
        text = f"{used} of {len(slots)} slots that are set aside hold a token"
        text += f" ({used / max(1, len(slots)):.0%})"
        label(ax, 0, top - 0.18, heading, 9.5, ha="left", weight="bold")
        outside = f"; no room for {', '.join(waiting)}" if slots is reserved and waiting else ""
        label(ax, WIDTH, top - 0.18, text + outside, 9, ha="right")
        _draw_slots(ax, top - 0.36, num_slots, slots, step)
        top -= panel
    show()


def _draw_slots(
    ax: Axes, top: float, num_slots: int, slots: dict[int, tuple[str, bool]], step: int
) -> None:
    """The slots in lines of COLUMNS; a dark stroke where a reservation or a block begins."""
    for slot in range(num_slots):
        line, column = divmod(slot, COLUMNS)
        x, y = column * SLOT, top - (line + 1) * LINE_HEIGHT
        style: dict[str, Any] = {"linewidth": 0.5, "edgecolor": LINE}
        if slot in slots:
            name, holds = slots[slot]
            style["facecolor"] = tint(name, 0.75) if holds else "white"
            if not holds:
                style |= {"hatch": "/////", "edgecolor": colour(name), "linewidth": 0.0}
        box(ax, x, y, SLOT, LINE_HEIGHT - 0.06, **style)
        if slot in slots and slots[slot][1]:
            label(ax, x + SLOT / 2, y + (LINE_HEIGHT - 0.06) / 2, slots[slot][0], 7)
    for slot in range(0, num_slots, step):
        line, column = divmod(slot, COLUMNS)
        y = top - (line + 1) * LINE_HEIGHT
        width = min(step, COLUMNS - column, num_slots - slot) * SLOT
        box(ax, column * SLOT, y, width, LINE_HEIGHT - 0.06, facecolor="none", edgecolor=INK)


def _memory_legend(ax: Axes, y: float, names: list[str]) -> None:
    x = 0.0
    entries: list[tuple[str, dict[str, Any]]] = [
        (f"a token of {name}", {"facecolor": tint(name, 0.75)}) for name in names
    ]
    hatched = {"facecolor": "white", "hatch": "/////", "edgecolor": FAINT}
    entries += [("set aside, holds no token", hatched), ("free", {"facecolor": "white"})]
    for text, style in entries:
        box(ax, x, y - 0.07, 0.22, 0.16, **style)
        label(ax, x + 0.28, y + 0.01, text, 8.5, ha="left")
        x += 0.5 + 0.075 * len(text)


def layers(title: str) -> None:
    """The six layers of vLLM V1 from top to bottom: their classes, and our files."""
    height = 0.52
    ax = canvas(0.66 + height * len(LAYERS), title)
    top = 0.22 + height * len(LAYERS)
    left, middle, right = 0.66, 2.2, 5.75
    for x, text in ((left, "layer"), (middle, "in vLLM V1"), (right, "here, in nanoserve/")):
        label(ax, x + 0.1, top - 0.02, text, 9, ha="left", color=FAINT)
    for index, (layer, (theirs, ours)) in enumerate(LAYERS.items()):
        y = top - 0.16 - (index + 1) * height
        face = "#EAF3F9" if index < 3 else "#FBF3E3"
        box(ax, left, y, WIDTH - left - 0.36, height - 0.08, facecolor=face)
        middle_y = y + (height - 0.08) / 2
        label(ax, left + 0.1, middle_y, layer, 10, ha="left", weight="bold")
        label(ax, middle + 0.1, middle_y, theirs, 9, ha="left")
        label(ax, right + 0.1, middle_y, ours, 9, ha="left", family="monospace")
    bottom = top - 0.16 - len(LAYERS) * height
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.4}
    ax.annotate("", (0.14, bottom + 0.1), (0.14, top - 0.25), arrowprops=arrow)
    ax.annotate("", (0.38, top - 0.25), (0.38, bottom + 0.1), arrowprops=arrow)
    label(ax, 0.02, (top + bottom) / 2, "prompt", 10, rotation=90)
    label(ax, 0.5, (top + bottom) / 2, "tokens", 10, rotation=90)
    half = len(LAYERS) // 2 * height
    for y, text in ((bottom + half, "control plane"), (bottom, "data plane")):
        face = "#D5E7F3" if text == "control plane" else "#F6E6C4"
        box(ax, WIDTH - 0.3, y + 0.04, 0.3, half - 0.12, facecolor=face)
        label(ax, WIDTH - 0.15, y + half / 2 - 0.02, text, 10, rotation=270, weight="bold")
    show()
