"""The state of the engine as pictures.

Each function returns a Picture, which a notebook shows; picture.save("x.svg") writes it to a file.

    block_map     a cell is a slot. Colours: whose block it is; grey: free, and still in the cache;
                  dark: the tokens of this step
    timeline      a row is a request, a box is a step with its number of tokens
    step_tensors  a column is a token of the step
    hash_chain    a box is a block hash, and stands behind its parent
    group_map     a row is the block table of a group of layers; below them the pool of all
    drafts        a row is a step: what was guessed, what was accepted, what came instead
    token_path    a row is a stage of the sampler: the probabilities, laid end to end

Left out: matplotlib. An SVG is text, sharp at any size, and needs no other package.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from html import escape
from itertools import takewhile
from pathlib import Path
from typing import Any

from nanoserve.block_manager import BlockHash
from nanoserve.llm import LLM
from nanoserve.sequence import SchedulerOutput
from nanoserve.teaching.recorder import Frame, View, make_frame, tokens_of

# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8a7a00", "#666666")
SLOT, ROW, TEXT, BOX = 37, 24, 11, 122  # pixels


class Picture:
    """Shapes, in pixels."""

    def __init__(self, title: str, width: float = 800) -> None:
        self.title, self.width, self.height = title, width, 30.0
        self.shapes: list[str] = []
        self.text(0, 16, title, size=14, bold=True)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: int = TEXT,
        colour: str = "#222",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" '
            f'text-anchor="{anchor}"{weight} xml:space="preserve">{escape(text)}</text>'
        )
        self.height = max(self.height, y + 8)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = "none",
        opacity: float = 1.0,
        edge: str = "#999",
    ) -> None:
        self.shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}" fill-opacity="{opacity:.2f}" stroke="{edge}"/>'
        )
        self.height = max(self.height, y + height + 8)

    def line(self, points: Iterable[tuple[float, float]], colour: str = "#999") -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
        )

    def _repr_svg_(self) -> str:
        size = f'width="{self.width + 20:.0f}" height="{self.height + 10:.0f}"'
        view = f'viewBox="-10 -5 {self.width + 20:.0f} {self.height + 10:.0f}"'
        font = "font-family=\"ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace\""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} {font} style="max-width:100%">'
        )
        back = '<rect x="-10" y="-5" width="100%" height="100%" fill="#ffffff"/>'
        return "\n".join([head, back, *self.shapes, "</svg>"])

    def __repr__(self) -> str:
        return f"<Picture: {self.title}>"

    def save(self, file: str | Path) -> None:
        Path(file).write_text(self._repr_svg_() + "\n", encoding="utf-8")


def colour_of(name: str) -> str:
    """The same colour for a name in every picture; a branch is a request of its own."""
    parts = name.split(".")
    return COLOURS[(ord(parts[0][0]) - ord("A") + int(parts[-1] if parts[1:] else 0)) % 8]


def token_texts(llm: LLM, token_ids: Iterable[int]) -> list[str]:
    """How each token is written, in five letters; <|im_start|> is <im>, a space is _."""
    tokenizer: Any = llm.get_tokenizer()
    texts = [tokenizer.decode([token_id]) for token_id in token_ids]
    short = {"<|im_start|>": "<im>", "<|im_end|>": "</im>", "\n": "\\n", " ": "_"}
    short["assistant"] = "asst"
    return [short.get(text, text.strip() or repr(text)[1:-1])[:5] for text in texts]


def frame_of(llm: LLM, step: int | None) -> Frame:
    """What was recorded of a step (the first one is 1, the last one -1); None: the state now."""
    scheduler: Any = llm.engine.scheduler
    if step is None:
        return make_frame(scheduler, SchedulerOutput())
    return scheduler.frames[step - 1 if step > 0 else step]


# -- blocks --


def block_map(
    llm: LLM,
    title: str = "The KV cache",
    step: int | None = None,
    weights: Any = None,
    room: int = 0,
    truth: bool = False,
) -> Picture:
    """Every KV block, and the block tables. weights: [num_blocks, block_size], how much a query
    reads of each slot; the darker, the more. room: lines for so many block tables at least. truth:
    a slot has a red edge, and the token whose key stands in it, if its owner expects another one.
    """
    frame = frame_of(llm, step)
    picture = Picture(f"{title} (step {frame.number})" if frame.number else title)
    views = list(frame.views.values())
    written = written_tokens(llm, frame) if truth else {}
    for number, seq in enumerate(views):
        y = 38 + 16 * number
        picture.box(0, y - 9, 10, 10, colour_of(seq.name), 0.6)
        total = len(seq.token_ids) + len(drafts_of(frame, seq.name))
        text = f"{seq.name}: {seq.status}, {seq.num_computed} of {total} tokens"
        picture.text(16, y, f"{text} computed, block table {list(seq.block_table)}")
    top, per_row, size = 34 + 16 * max(room, len(views)), 5, frame.block_size
    for block in range(frame.num_blocks):
        x, y = (block % per_row) * (size * SLOT + 12), top + (block // per_row) * (ROW + 20)
        owners = [seq for seq in views if block in seq.block_table]
        picture.text(
            x, y + 10, f"block {block}" + (f", {len(owners)} owners" if owners[1:] else "")
        )
        texts, is_new = block_texts(llm, frame, block, owners)
        for slot in range(size):
            left, above = x + slot * SLOT, y + 14
            for i, owner in enumerate(owners if texts[slot] else ()):
                part, opacity = SLOT / len(owners), 0.75 if is_new[slot] else 0.35
                down = 0 if len(owners) == 1 else ROW - 7  # several: a bar for each, below the text
                colour = colour_of(owner.name)
                picture.box(left + i * part, above + down, part, ROW - down, colour, opacity)
            fill = "#cccccc" if texts[slot] and not owners else "none"
            if weights is not None:
                fill = "#000000"
            dark = 0.5 if weights is None else float(weights[block][slot])
            picture.box(left, above, SLOT, ROW, fill, dark, "#666" if owners else "#bbb")
            light = dark > 0.5 and weights is not None
            colour = "#fff" if light else "#222" if owners else "#888"
            down = 13 if owners[1:] else 16
            if owners and texts[slot] and (token := written.get(block * size + slot)) is not None:
                [really] = token_texts(llm, [token])
                if texts[slot] not in (really, really[:4] + "?"):
                    texts[slot] = really
                    picture.box(left + 1, above + 1, SLOT - 2, ROW - 2, "#ffffff", 0.6, "#d00000")
            picture.text(left + SLOT / 2, above + down, texts[slot], 9, colour, "middle")
    return picture


def block_texts(
    llm: LLM, frame: Frame, block: int, owners: list[View]
) -> tuple[list[str], list[bool]]:
    """The tokens in the slots of a block, "" where there is none; and which came in this step."""
    size = frame.block_size
    if not owners:
        texts = token_texts(llm, frame.cached.get(block, ()))
        return texts + [""] * (size - len(texts)), [False] * size
    seq = max(owners, key=lambda owner: owner.num_computed)
    start = seq.block_table.index(block) * size
    positions = range(start, start + size)
    texts = token_texts(llm, seq.token_ids)
    texts += [text[:4] + "?" for text in token_texts(llm, drafts_of(frame, seq.name))]
    texts = texts[start : min(start + size, seq.num_computed)]
    first_new = seq.num_computed - seq.num_scheduled
    return texts + [""] * (size - len(texts)), [each >= first_new for each in positions]


def written_tokens(llm: LLM, until: Frame) -> dict[int, int]:
    """Slot -> the token whose key and value were written into it last. (Blocks that were copied or
    swapped are not followed.)"""
    written: dict[int, int] = {}
    scheduler: Any = llm.engine.scheduler
    for frame in scheduler.frames[: until.number or None]:
        for seq in frame.views.values():
            tokens = (*seq.token_ids, *drafts_of(frame, seq.name))
            for position in range(seq.num_computed - seq.num_scheduled, seq.num_computed):
                block, offset = divmod(position, frame.block_size)
                if seq.num_scheduled:
                    written[seq.block_table[block] * frame.block_size + offset] = tokens[position]
    return written


def hash_chain(llm: LLM, title: str = "What the prefix cache can find") -> Picture:
    """The blocks that can be found by their hash, each behind its parent."""
    pool = llm.engine.block_manager.pool
    picture, width = Picture(title), BOX + 16
    children: dict[BlockHash | None, list[BlockHash]] = {}
    for key in pool.cached_blocks:
        children.setdefault(key.parent, []).append(key)
    owners = {block: seq for seq in frame_of(llm, None).views.values() for block in seq.block_table}
    row = 0

    def draw(key: BlockHash, depth: int, parent_row: int) -> None:
        nonlocal row
        x, y, block = depth * width, 30 + row * 46, pool.cached_blocks[key]
        if depth:
            points = [(x - 16, 46 + parent_row * 46), (x - 8, 46 + parent_row * 46)]
            picture.line([*points, (x - 8, y + 16), (x, y + 16)])
        owner = owners.get(block)
        picture.box(x, y, BOX, 32, colour_of(owner.name) if owner else "#cccccc", 0.4)
        picture.text(x + 4, y + 13, " ".join(token_texts(llm, tokens_of(key))), 9)
        picture.text(x + 4, y + 26, f"block {block}, {owner.name if owner else 'free'}", 10, "#555")
        picture.width = max(picture.width, x + BOX)
        own_row = row
        for number, child in enumerate(children.get(key, [])):
            row += number > 0
            draw(child, depth + 1, own_row)

    for root in [key for key in pool.cached_blocks if key.parent not in pool.cached_blocks]:
        draw(root, 0, row)
        row += 1
    return picture


def group_map(llm: LLM, title: str = "Block tables over one pool") -> Picture:
    """The block tables of each group of layers (chapters/hybrid_kv): an empty box is a hole. Below
    them the pool; grey: free, and still in the cache."""
    manager: Any = llm.engine.block_manager
    picture, pool, y, colours = Picture(title), manager.pool, 28.0, dict[int, str]()

    def draw(x: float, y: float, block: int, colour: str, opacity: float) -> None:
        picture.box(x, y, 30, 20, colour, opacity, "#ddd" if colour == "none" else "#666")
        picture.text(x + 15, y + 14, str(block) if block >= 0 else "", 10, anchor="middle")

    for number, manager_of_group in enumerate(manager.groups):
        window, x = manager_of_group.group.window, 130
        picture.text(0, y + 14, "full" if window is None else f"window of {window}")
        for i, block in enumerate(
            each for t in manager_of_group.block_tables.values() for each in t
        ):
            colours[block] = COLOURS[number]
            draw(x + 30 * i, y, block, COLOURS[number] if block >= 0 else "none", 0.45)
        y += 26
    picture.text(0, y + 24, "the pool")
    for block in range(pool.num_blocks):
        is_free, is_found = not pool.ref_counts[block], pool.block_hashes[block] is not None
        colour = ("#999999" if is_found else "none") if is_free else colours[block]
        draw(130 + 30 * (block % 20), y + 10 + 26 * (block // 20), block, colour, 0.45)
    return picture


# -- steps --


def timeline(
    runs: LLM | Mapping[str, LLM], title: str = "Who ran, with how many tokens"
) -> Picture:
    """A row for each request, a column for each step. Of several runs, one below the other."""
    named = runs if isinstance(runs, Mapping) else {"": runs}
    frames = {name: llm.engine.scheduler.frames for name, llm in named.items()}
    cell = min(34.0, 740 / max(1, *map(len, frames.values())))
    picture, y = Picture(title), 30.0
    for name, steps in frames.items():
        if name:
            picture.text(0, y + 8, f"{name}: {len(steps)} steps", 12, bold=True)
            y += 16
        for row in dict.fromkeys(seq for frame in steps for seq in frame.views):
            picture.text(0, y + 15, row, 12)
            for frame in steps:
                draw_step(picture, frame, row, 56 + (frame.number - 1) * cell, y, cell)
            y += 24
        for frame in steps[:: max(1, len(steps) // 20)]:
            picture.text(
                56 + (frame.number - 0.5) * cell, y + 8, str(frame.number), 9, "#888", "middle"
            )
        y += 24
    picture.text(
        0, y, "x: preempted   .: waits   v: its blocks are on the CPU   |: ends", 10, "#666"
    )
    return picture


def draw_step(picture: Picture, frame: Frame, row: str, x: float, y: float, cell: float) -> None:
    """One request in one step."""
    seq = frame.views.get(row)
    if seq is None:
        return
    mark = "v" if seq.status == "swapped" else "."
    if seq.num_scheduled:
        picture.box(x, y, cell - 2, 20, colour_of(row), 0.75 if seq.num_scheduled > 1 else 0.35)
        mark = str(seq.num_scheduled)
        if row in frame.finished:
            picture.box(x + cell - 5, y, 3, 20, "#222", edge="#222")
    elif row in frame.preempted:
        mark = "x"
    picture.text(x + cell / 2 - 1, y + 14, mark, 11 if cell > 16 else 8, anchor="middle")


def step_tensors(llm: LLM, step: int = -1, title: str = "What the model gets") -> Picture:
    """The arrays of one step; a column is a token."""
    frame: Frame = frame_of(llm, step)
    runner: Any = llm.engine.executor.runner
    batch = runner.batches[step - 1 if step > 0 else step]
    arrays, tensors = batch.arrays, batch.tensors  # the model gets the tensors
    columns = {"input_ids": tensors.input_ids, "positions": tensors.positions}
    columns["slot_mapping"] = tensors.slot_mapping
    picture = Picture(f"{title} (step {frame.number})", max(420, 110 + 40 * len(arrays.positions)))
    names = [seq.name for seq in frame.views.values() if seq.num_scheduled]
    starts = arrays.query_start_loc.tolist()
    for name, start, end in zip(names, starts, starts[1:], strict=False):
        x, width = 100 + 40 * start, 40 * (end - start)
        picture.box(x, 26, width, 16, colour_of(name), 0.5)
        picture.text(x + width / 2, 38, name, 11, anchor="middle")
    rows: dict[str, Seq[Any]] = {"token": token_texts(llm, arrays.input_ids.tolist())}
    rows |= {name: array.tolist() for name, array in columns.items()}
    sampled = arrays.logits_indices.tolist()
    for number, (name, values) in enumerate(rows.items()):
        y = 46 + 20 * number
        picture.text(0, y + 14, name)
        for i, value in enumerate(values):
            picture.box(100 + 40 * i, y, 40, 20, "#ffd33d" if i in sampled else "none", 0.5)
            picture.text(120 + 40 * i, y + 14, str(value), 10, anchor="middle")
    below = {"query_start_loc": starts, "seq_lens": arrays.seq_lens.tolist()}
    below["block_table"] = arrays.block_table.tolist()
    for number, (name, value) in enumerate(below.items()):
        picture.text(0, 146 + 16 * number, name)
        picture.text(130, 146 + 16 * number, str(value))
    picture.text(0, 196, "yellow: a token is sampled behind this one", 10, "#666")
    return picture


def drafts(llm: LLM, name: str = "A", title: str = "What was guessed, what was right") -> Picture:
    """Of one request with speculation: a row for each step that verified guesses."""
    picture, y = Picture(title), 34.0
    for frame in llm.engine.scheduler.frames:
        guessed = drafts_of(frame, name)
        if not guessed:
            continue
        new = frame.sampled.get(name, [])
        pairs = zip(new, guessed, strict=False)
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        picture.text(0, y + 15, f"step {frame.number}")
        for i, text in enumerate(token_texts(llm, guessed)):
            colour = COLOURS[2] if i < right else "none"
            picture.box(64 + 46 * i, y, 44, 20, colour, 0.5)
            if i >= right:
                picture.line([(66 + 46 * i, y + 10), (106 + 46 * i, y + 10)], COLOURS[4])
            picture.text(86 + 46 * i, y + 14, text, 10, "#222" if i < right else "#555", "middle")
        x = 84 + 46 * max(5, len(guessed))
        for text in token_texts(llm, new[right:]):  # none, if the text ends with a guess
            picture.box(x, y, 44, 20, COLOURS[1], 0.6)
            picture.text(x + 22, y + 14, text, 10, anchor="middle")
        picture.text(x + 56, y + 15, f"{len(new)} new tokens" if new[1:] else "1 new token")
        y += 26
    text = "green: a right guess   struck out: a wrong one, or behind one   orange: the model's own"
    picture.text(0, y + 12, text, 10, "#666")
    return picture


def drafts_of(frame: Frame, name: str) -> tuple[int, ...]:
    """The guesses that a step verified for a request. (The chapter's scheduler noted them.)"""
    notes = {kind.__name__: note for kind, note in frame.output.notes.items()}
    note = notes.get("SpeculativeNote")
    seq_id = frame.seq_ids.get(name)
    return tuple(note.drafts.get(seq_id, ())) if note else ()


# -- numbers --


def token_path(
    title: str, stages: Mapping[str, Seq[float]], names: Seq[str], u: float | None = None
) -> Picture:
    """stages: of each, the probabilities of the tokens `names`; what is missing from 1 is all other
    tokens. u: the random number, drawn as a line through the last stage."""
    picture, left, width = Picture(title), 120, 660
    for number, (stage, probs) in enumerate(stages.items()):
        x, y = float(left), 34 + 34 * number
        picture.text(left - 8, y + 16, stage, anchor="end")
        picture.box(left, y, width, 24, "#dddddd", 0.6)
        for i, prob in enumerate(probs):
            part, name = width * prob, names[i].strip()
            if part > 0.5:
                picture.box(x, y, part, 24, COLOURS[i % 8], 0.45)
            if part > 7 * len(name):
                picture.text(x + part / 2, y + 16, name, 11, anchor="middle")
            x += part
    y = 34 + 34 * len(stages)
    if u is not None:
        x = left + width * u
        picture.line([(x, y - 40), (x, y + 4)], "#222")
        picture.text(x, y + 16, f"u = {u:.2f}", 11, anchor="middle", bold=True)
    picture.text(0, y + 16, "grey: all other tokens", 10, "#666")
    return picture


def bars(title: str, values: Mapping[str, float], unit: str = "") -> Picture:
    """A bar for each number."""
    picture, most = Picture(title), max(values.values()) or 1
    left = 10 + 7 * max(map(len, values))
    for number, (name, value) in enumerate(values.items()):
        y = 30 + 24 * number
        picture.text(left - 8, y + 14, name, anchor="end")
        picture.box(left, y, (680 - left) * value / most, 18, COLOURS[0], 0.5)
        text = f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
        picture.text(left + (680 - left) * value / most + 6, y + 14, text)
    return picture


def lines(title: str, curves: Mapping[str, Seq[tuple[float, float]]], x: str, y: str) -> Picture:
    """Curves of (x, y); both axes begin at 0."""
    picture, points = Picture(title), [point for curve in curves.values() for point in curve]
    width, height = max(each[0] for each in points), max(each[1] for each in points)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return 60 + 560 * point[0] / width, 240 - 190 * point[1] / height

    picture.line([place((0, height)), place((0, 0)), place((width, 0))], "#222")
    picture.text(60, 42, f"{y} (up to {height:,.4g})", 11, "#666")
    picture.text(620, 258, f"{x} (up to {width:,.4g})", 11, "#666", "end")
    for number, (name, curve) in enumerate(curves.items()):
        picture.line([place(point) for point in curve], COLOURS[number])
        for point in curve:
            left, above = place(point)
            picture.box(left - 2, above - 2, 4, 4, COLOURS[number], edge=COLOURS[number])
        left, above = place(curve[-1])
        picture.text(left + 8, above + 4, name, 11, COLOURS[number])
    return picture
