"""What chapters change between the weights and the token, as pictures.

    codes        weights, and the numbers that their codes stand for (quantization)
    adapters     a column is a token of a step, a bar a product that it is in (lora)
    automaton    a box is a state of a grammar, with the tokens that it allows (structured_output)

Left out: the drafts of speculation, which pictures.py has, because block_map shows them, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import groupby
from textwrap import wrap
from typing import Any

import numpy as np
from torch import Tensor

from nanoserve.llm import LLM
from nanoserve.teaching.pictures import COLOURS, Picture, colour_of, frame_of, token_texts

BYTE = "#0072B2"
STATE, GAP = 130, 36  # pixels: the width of a state, and between two


def automaton(
    llm: LLM, title: str = "The automaton", path: Seq[int] = (), **constraint: Any
) -> Picture:
    """The states of a regex or a choice, from left to right, with the tokens that each allows.
    path: token ids; the states between them are yellow."""
    from nanoserve.chapters.structured_output import StructuredOutputsParams

    processor: Any = llm.engine.input_processor
    manager = processor.structured_output_manager
    wanted = StructuredOutputsParams(**constraint)
    grammar = manager.grammar_init(wanted, manager.model_config.eos_token_ids)
    rules, [start] = grammar.automaton, grammar.states
    grammar.accept_tokens(path)
    follow = rules.dfa.next_state
    columns, places = [[start]], {start: (0.0, 34.0)}
    while columns[-1]:
        found = dict.fromkeys(int(each) for state in columns[-1] for each in follow[state] if each)
        columns.append([state for state in found if state not in places])
        y = 34.0
        for state in columns[-1]:
            places[state] = ((len(columns) - 1) * (STATE + GAP), y)
            y += 32 + 13 * len(allowed(rules, state))
    picture = Picture(title, max(560, max(x for x, _ in places.values()) + STATE))
    loops: list[tuple[float, float, str]] = []
    for state, (x, y) in places.items():
        bytes_to: dict[int, list[int]] = {}
        for byte in np.flatnonzero(follow[state]).tolist():
            bytes_to.setdefault(int(follow[state][byte]), []).append(byte)
        for target, letters in bytes_to.items():
            left, above = places[target]
            if left > x:
                picture.line([(x + STATE, y + 12), (left, above + 12)])
                text, middle, level = ranges(letters), (x + STATE + left) / 2, (y + above) / 2 + 12
                half = 2 + 3 * len(text)
                picture.box(middle - half, level - 6, 2 * half, 12, "#ffffff", edge="#ffffff")
                picture.text(middle, level + 4, text, 10, BYTE, "middle", bold=True)
            else:
                text = f"{ranges(letters)}: {'again' if target == state else f'to {target}'}"
                loops.append((x + STATE - 6, y + 14, text))
    for state, (x, y) in places.items():
        lines = allowed(rules, state)
        is_passed, may_end = state in grammar.states, rules.dfa.is_accepting[state]
        height = 20 + 13 * len(lines)
        picture.box(x, y, STATE, height, "#ffd33d" if is_passed else "#dddddd", 0.4)
        if may_end:
            picture.box(x + 2, y + 2, STATE - 4, height - 4, edge="#222")
        picture.text(x + 6, y + 14, f"state {state}", 10, "#555", bold=True)
        for number, line in enumerate(lines):
            picture.text(x + 6, y + 28 + 13 * number, line, 10)
    for x, y, text in loops:
        picture.text(x, y, text, 9, BYTE, "end")
    picture.text(0, picture.height + 8, LEGEND, 10, "#666")
    return picture


LEGEND = "in a box: the tokens that may come   blue: a byte   double: the text may end here"


def allowed(rules: Any, state: int) -> list[str]:
    """The tokens that a state allows, in at most three lines."""
    bits = np.unpackbits(rules.mask(state).view(np.uint8), bitorder="little")
    tokens = [rules.tokens[i] for i in np.flatnonzero(bits) if i not in rules.stop_token_ids]
    texts = sorted((each.decode(errors="replace").replace(" ", "_") for each in tokens), key=len)
    texts += ["<end>"] * bool(rules.dfa.is_accepting[state])
    lines = wrap(" ".join(texts), 19)
    return lines if len(lines) <= 3 else [*lines[:2], f"... {len(texts)} tokens"]


def ranges(letters: Iterable[int]) -> str:
    """[48, 49, 50, 97] -> "0-2 a"."""
    runs = [[i for _, i in run] for _, run in groupby(enumerate(letters), lambda p: p[1] - p[0])]
    texts = [[repr(chr(each)).strip("'").replace(" ", "_") for each in run] for run in runs]
    return " ".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in texts)


def adapters(
    llm: LLM, step: int, names: Seq[str], title: str = "One batch, several adapters"
) -> Picture:
    """The tokens of a step, and what they are multiplied by. names: of the adapters in the slots
    0, 1, ... of the device."""
    frame, slots = frame_of(llm, step), dict[int, int]()
    scheduler: Any = llm.engine.scheduler
    for each in scheduler.frames[: frame.number]:
        notes = {kind.__name__: note for kind, note in each.output.notes.items()}
        slots |= notes["LoRANote"].slots
    picture, x = Picture(f"{title} (step {frame.number})"), 190.0
    width = min(34.0, (606 - 6 * len(frame.views)) / frame.num_tokens)
    rows = {-1: "x W^T", **{slot: f"+ x A{slot} B{slot}" for slot in range(len(names))}}
    for number, (slot, text) in enumerate(rows.items()):
        y, name = 88 + 26 * number, "all tokens, once" if slot < 0 else names[slot]
        picture.text(0, y + 15, text, bold=True)
        picture.text(88, y + 15, name, 10, "#666")
    for seq in [each for each in frame.views.values() if each.num_scheduled]:
        total, slot = width * seq.num_scheduled, slots.get(frame.seq_ids[seq.name], -1)
        picture.box(x, 30, total, 18, colour_of(seq.name), 0.5)
        picture.text(x + total / 2, 43, seq.name, anchor="middle")
        new = seq.token_ids[seq.num_computed - seq.num_scheduled : seq.num_computed]
        for number, text in enumerate(token_texts(llm, new)):
            picture.box(x + width * number, 52, width, 20)
            picture.text(x + width * (number + 0.5), 66, text, 9, anchor="middle")
        picture.box(x, 88, total, 20, "#999999", 0.4)
        if slot >= 0:
            colour = COLOURS[(4, 2, 3)[slot % 3]]
            picture.box(x, 114 + 26 * slot, total, 20, colour, 0.55)
        x += total + 6
    return picture


def codes(weights: Tensor, title: str = "Weights, and what their codes stand for") -> Picture:
    """weights [number]: of one output. Above them the numbers of 8-bit codes, below those of 4."""
    from nanoserve.chapters.quantization.online import quantize
    from nanoserve.kernels.quantized import QuantizedWeight

    picture, row = Picture(title), weights.float()[None]
    low, high = min(0.0, float(row.min())), max(0.0, float(row.max()))
    used = {"int8": (48, 1), "int4": (188, 15)}

    def place(value: float) -> float:
        return 110 + 660 * (value - low) / (high - low)

    picture.text(0, 122, "weights", 12, bold=True)
    for kind, (y, step) in used.items():
        numbers, scales, zeros = quantize(row, kind, -1)
        kept = QuantizedWeight(kind, numbers, scales, zeros).dequantize()[0]
        zero, scale = 0 if zeros is None else int(zeros), float(scales)
        picture.text(0, y + 4, kind, 12, bold=True)
        for code in range(-127, 128) if kind == "int8" else range(16):
            x = place((code - zero) * scale)
            if 80 < x < 800:
                picture.line([(x, y - 6), (x, y + 6)], "#bbb" if step == 1 else "#222")
                if step == 15 or code % 20 == 0:
                    picture.text(
                        x, y + (22 if step == 15 else -10), str(code), 10, "#555", "middle"
                    )
        for weight, number in zip(row[0].tolist(), kept.tolist(), strict=True):
            near, far = (110, y + 8) if y < 118 else (126, y - 8)
            picture.line(
                [(place(weight), near), (place(number), far)], COLOURS[4 if step > 1 else 2]
            )
    for weight in row[0].tolist():
        picture.box(place(weight) - 1.5, 110, 3, 16, COLOURS[0], edge=COLOURS[0])
    picture.text(110, 234, f"{low:.3f}", 10, "#666")
    picture.text(770, 234, f"{high:.3f}", 10, "#666", "end")
    picture.text(
        435, 234, "each mark of a scale: the number that a code stands for", 10, "#666", "middle"
    )
    return picture
