"""Three small pictures for the chapters' notebooks. All others are in pictures.py.

    two_levels    the KV blocks, the CPU blocks below them, and what the last step copied
    lanes         a row for each rank, thread or array; a cell is what it holds, or does, at a time
    heat          a table of numbers; the darker a cell, the further from 0

Left out: arrows. (What was copied has a red edge, and says from where.)
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from nanoserve.llm import LLM
from nanoserve.teaching.pictures import BOX, COLOURS, Picture, colour_of, frame_of, token_texts
from nanoserve.teaching.recorder import tokens_of

PER_ROW, COPIED = 6, "#d00000"


def two_levels(llm: LLM, title: str = "Two levels of the prefix cache") -> Picture:
    """After a step. Red edge: its contents were copied in this step, from the other level."""
    frame, picture = frame_of(llm, -1), Picture(f"{title} (step {frame_of(llm, -1).number})")
    manager: Any = llm.engine.block_manager
    owner_of = {block: seq.name for seq in frame.views.values() for block in seq.block_table}
    on_cpu = {block: tokens_of(key) for key, block in manager.cpu_pool.cached_blocks.items()}
    copied = {block: f"<- CPU {cpu}" for cpu, block in frame.output.blocks_to_swap_in}
    saved = {cpu: f"<- block {block}" for block, cpu in frame.output.blocks_to_swap_out}
    levels: Any = (
        ("On the device", "block", frame.num_blocks, frame.cached, owner_of, copied),
        ("In main memory", "CPU", manager.num_cpu_blocks, on_cpu, {}, saved),
    )
    y = 30
    for level, kind, number, contents, owners, copies in levels:
        picture.text(0, y + 12, level, 12, bold=True)
        for block in range(number):
            x, top = block % PER_ROW * (BOX + 12), y + 20 + block // PER_ROW * 42
            owner, copy = owners.get(block), copies.get(block, "")
            fill = colour_of(owner) if owner else "#cccccc" if block in contents else "none"
            edge = COPIED if copy else "#999"
            picture.box(x, top, BOX, 34, fill, 0.4, edge)
            texts = token_texts(llm, contents.get(block, ()))
            picture.text(x + 4, top + 14, " ".join(texts), 9)
            colour = COPIED if copy else "#555"
            whose = copy or (f"of {owner}" if owner else "")
            picture.text(x + 4, top + 28, f"{kind} {block} {whose}", 10, colour)
        y += 28 + -(-number // PER_ROW) * 42
    return picture


def lanes(title: str, rows: Mapping[str, Seq[Any]], note: str = "", left: int = 0) -> Picture:
    """A cell is a value; None is nothing, and what begins with a capital letter has its colour. A
    value that ends with "." is grey: padding. left: pixels for the names."""
    longest = max(map(len, rows.values()))
    left = left or 16 + 7 * max(map(len, rows))
    width = min(64.0, (790 - left) / longest)
    picture = Picture(title)
    for number, (name, cells) in enumerate(rows.items()):
        y = 30 + 30 * number
        picture.text(left - 8, y + 16, name, 12, anchor="end")
        for column, cell in enumerate(cells):
            if cell is None:
                continue
            text, x = str(cell), left + column * width
            is_padding = text.endswith(".")
            fill = colour_of(text) if text[:1].isupper() else "#cccccc" if is_padding else "none"
            picture.box(x, y, width - 2, 24, fill, 0.45)
            text = text.rstrip(".")
            size = min(11, int(1.6 * width / max(1, len(text))))
            picture.text(x + width / 2 - 1, y + 16, text, size, anchor="middle")
    if note:
        picture.text(0, 30 + 30 * len(rows) + 14, note, 10, "#666")
    return picture


def heat(title: str, rows: Mapping[str, Seq[float]], columns: Seq[str] = ()) -> Picture:
    """Blue: above 0; orange: below."""
    left, top = 16 + 7 * max(map(len, rows)), 46 if columns else 28
    width = min(64.0, (790 - left) / max(map(len, rows.values())))
    most = max(abs(value) for row in rows.values() for value in row) or 1.0
    picture = Picture(title)
    for column, name in enumerate(columns):
        x = left + column * width + width / 2 - 1
        picture.text(x, top - 6, name, 10, "#666", "middle")
    for number, (name, values) in enumerate(rows.items()):
        y = top + 26 * number
        picture.text(left - 8, y + 16, name, 11, anchor="end")
        for column, value in enumerate(values):
            fill, x = COLOURS[0 if value > 0 else 1], left + column * width
            picture.box(x, y, width - 2, 24, fill, 0.65 * abs(value) / most)
            text = f"{round(value, 2) + 0.0:.2f}"  # no "-0.00"
            picture.text(x + width / 2 - 1, y + 16, text, 10, anchor="middle")
    return picture
