"""What does a grammar allow, and where does it overrule the model?

    trace.automaton("(ha)+!", dfa)              circles and arrows: the states, the bytes between
    trace.token_table("...", token_automaton)   a row for each state: which tokens may come in it
    trace.overruled("...", outputs, llm)        the tokens of some answers, with what was forbidden

`overruled` needs requests with `logprobs=1`, which are those before the mask (vLLM's
`raw_logprobs`). A token that the model would have taken itself is plain. Where the grammar forbids
the likeliest token, this one is red and struck through, and the token that came is below it.

Left out: automata that do not fit into a picture, and requests that are sampled (at a temperature
above 0 a token may be another one than the likeliest without any grammar).

vLLM: none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from nanoserve.extras.structured_output.dfa import DEAD, START
from nanoserve.extras.trace.drafts import ACCEPTED, CELL, REJECTED, STRUCK
from nanoserve.extras.trace.frames import Tokens
from nanoserve.extras.trace.style import (
    FAINT,
    INK,
    LINE,
    WIDTH,
    box,
    canvas,
    fit,
    label,
    show,
    text_width,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nanoserve import LLM
    from nanoserve.extras.structured_output.automaton import TokenAutomaton
    from nanoserve.extras.structured_output.dfa import DFA
    from nanoserve.outputs import RequestOutput

RADIUS, BETWEEN = 0.27, 1.0  # inches: of a state, from row to row
LEFT = 1.6  # inches: room for names


# -- states --


def edges_of(dfa: DFA) -> dict[tuple[int, int], str]:
    """(from, to) -> the bytes that lead there, as in a regex: {(1, 2): "0-9"}."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for state in range(START, len(dfa.is_accepting)):
        for byte, following in enumerate(dfa.next_state[state].tolist()):
            if following != DEAD:
                found[state, following].append(byte)
    return {edge: _ranges(data) for edge, data in found.items()}


def _ranges(data: list[int]) -> str:
    """[0x30, ..., 0x39, 0x61] -> "0-9 a"."""
    firsts = [byte for byte in data if byte - 1 not in data]
    lasts = [byte for byte in data if byte + 1 not in data]
    pairs = [(_letter(a), _letter(b)) for a, b in zip(firsts, lasts, strict=True)]
    return " ".join(a if a == b else f"{a}-{b}" for a, b in pairs)


def _letter(byte: int) -> str:
    return {0x20: "␣", 0x0A: "↵"}.get(byte, chr(byte) if 0x20 < byte < 0x7F else f"{byte:02X}")


def texts_to(dfa: DFA) -> dict[int, bytes]:
    """State -> a shortest text that leads there, in the order of their lengths."""
    found = {START: b""}
    todo = [START]
    for state in todo:  # grows meanwhile
        for byte, following in enumerate(dfa.next_state[state].tolist()):
            if following != DEAD and following not in found:
                found[following] = found[state] + bytes([byte])
                todo.append(following)
    return found


def automaton(title: str, dfa: DFA) -> None:
    """Draw the states and the bytes between them. The text may end in a state with two rings. The
    way from the start to a state goes to the right; an arrow that goes back is bent."""
    columns: dict[int, list[int]] = defaultdict(list)
    for state, text in texts_to(dfa).items():
        columns[len(text)].append(state)
    rows = max(map(len, columns.values()))
    height = 1.1 + BETWEEN * rows
    ax = canvas(height, title)
    ax.set_aspect("equal")
    step = min(2.0, (WIDTH - 1.9) / max(1, len(columns) - 1))
    left = (WIDTH + 0.5 - step * (len(columns) - 1)) / 2
    middle = (height - 0.25) / 2
    place = {
        state: (left + step * depth, middle + BETWEEN * ((len(states) - 1) / 2 - row))
        for depth, states in columns.items()
        for row, state in enumerate(states)
    }
    for (state, following), letters in edges_of(dfa).items():
        _draw_edge(ax, place[state], place[following], letters)
    x, y = place[START]
    _draw_arrow(ax, (x - 0.9, y), (x - RADIUS, y))
    label(ax, x - 0.62, y + 0.14, "start", 8, color=FAINT)
    for state, (x, y) in place.items():
        _draw_state(ax, x, y, state, bool(dfa.is_accepting[state]))
    note = "two rings: the text may end here. A byte with no arrow is forbidden."
    label(ax, WIDTH, 0.14, note, 8, ha="right", color=FAINT)
    show()


def _draw_state(ax: Axes, x: float, y: float, state: int, may_end: bool) -> None:
    from matplotlib.patches import Circle

    face = ACCEPTED if may_end else "white"
    ax.add_patch(Circle((x, y), RADIUS, facecolor=face, edgecolor=INK, linewidth=1.2, zorder=3))
    if may_end:
        inner = Circle((x, y), RADIUS - 0.05, facecolor="none", edgecolor=INK, linewidth=1)
        inner.set_zorder(4)
        ax.add_patch(inner)
    label(ax, x, y, str(state), 10, weight="bold", zorder=5)


def _draw_edge(ax: Axes, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    """From state to state, the bytes beside it. `start` == `end`: a loop above the state."""
    text, size = fit(text, 1.2, 10)
    (x, y), (to_x, to_y) = start, end
    if start == end:
        _draw_arrow(ax, (x - 0.14, y + RADIUS - 0.04), (x + 0.14, y + RADIUS - 0.04), -2.2)
        label(ax, x, y + RADIUS + 0.42, text, size, family="monospace")
        return
    bend = 0.0 if to_x > x else -0.45 if to_x < x else -0.25
    length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
    across = (to_y - y) / length, (x - to_x) / length  # to the right of the way
    shift = bend * length / 2 - (0.13 if to_x >= x else -0.13) * (-1 if to_x < x else 1)
    dx, dy = (to_x - x) / length * RADIUS, (to_y - y) / length * RADIUS
    _draw_arrow(ax, (x + dx, y + dy), (to_x - dx, to_y - dy), bend)
    middle = (x + to_x) / 2 + across[0] * shift, (y + to_y) / 2 + across[1] * shift
    label(ax, *middle, text, size, family="monospace")


def _draw_arrow(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], bend: float = 0.0
) -> None:
    from matplotlib.patches import FancyArrowPatch

    style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 12, "linewidth": 1.2}
    style |= {"connectionstyle": f"arc3,rad={bend}", "color": INK, "shrinkA": 1, "shrinkB": 1}
    ax.add_patch(FancyArrowPatch(start, end, zorder=2, **style))


# -- tokens --


def token_table(title: str, grammar: TokenAutomaton) -> None:
    """A row for each state, a column for each token: green with the state behind it, or empty."""
    texts = dict(sorted(texts_to(grammar.dfa).items()))
    words = [_word(token) for token in grammar.tokens]
    cell = min(0.95, (WIDTH - LEFT - 0.3) / len(words))
    height = 1.2 + 0.36 * len(texts)
    ax = canvas(height, title)
    for i, word in enumerate(words):
        text, size = fit(word, cell - 0.05, 10)
        label(ax, LEFT + (i + 0.5) * cell, height - 0.52, text, size, weight="bold")
        label(ax, LEFT + (i + 0.5) * cell, height - 0.71, str(i), 7.5, color=FAINT)
    label(ax, 0, height - 0.52, "state", 8.5, ha="left", color=FAINT)
    label(ax, 0.5, height - 0.52, "a text so far", 8.5, ha="left", color=FAINT)
    label(ax, LEFT - 0.1, height - 0.71, "token id", 7.5, ha="right", color=FAINT)
    for row, (state, so_far) in enumerate(texts.items()):
        y = height - 1.16 - 0.36 * row
        label(ax, 0.14, y + 0.16, str(state), 10, weight="bold")
        label(ax, 0.5, y + 0.16, _word(so_far) if so_far else "(empty)", 9, ha="left")
        for i in range(len(words)):
            behind = grammar.advance(state, i)
            is_allowed = behind != DEAD
            x, face = LEFT + i * cell, ACCEPTED if is_allowed else "#F4F4F4"
            box(ax, x, y, cell - 0.04, 0.32, facecolor=face, edgecolor=LINE, linewidth=0.5)
            if is_allowed:
                text = "end" if i in grammar.stop_token_ids else f"→ {behind}"
                label(ax, x + cell / 2 - 0.02, y + 0.16, text, 9)
    note = "green: allowed, and the state behind it. Grey: forbidden, its logit becomes -inf."
    label(ax, WIDTH, 0.1, note, 8, ha="right", color=FAINT)
    show()


def _word(token: bytes | None) -> str:
    return "‹end›" if token is None else "".join(map(_letter, token))


def choices_of(output: RequestOutput) -> list[tuple[int, int]]:
    """Of each token of a greedy answer: (the likeliest before the mask, the one that came)."""
    [done] = output.outputs
    assert done.logprobs is not None, "the request needs logprobs=1"
    likeliest = [min(entry, key=lambda t: entry[t].rank or 0) for entry in done.logprobs]
    return list(zip(likeliest, done.token_ids, strict=True))


def overruled(title: str, outputs: Mapping[str, RequestOutput], llm: LLM) -> None:
    """Draw the tokens of greedy answers with logprobs=1. Above a token: the one that the model
    would have taken, if the grammar forbids it."""
    tokens = Tokens(llm.get_tokenizer())
    lines = {name: list(_lines_of(choices_of(each), tokens)) for name, each in outputs.items()}
    height = 0.6 + sum(0.68 * len(each) + 0.1 for each in lines.values())
    ax = canvas(height, title)
    top = height - 0.45
    for name, found in lines.items():
        pairs = choices_of(outputs[name])
        number = sum(likeliest != came for likeliest, came in pairs)
        text, size = fit(name, LEFT - 0.15, 9.5)
        label(ax, 0, top - 0.4, text, size, ha="left", weight="bold")
        about = f"{len(pairs)} tokens, {number} overruled"
        label(ax, 0, top - 0.57, about, 7.5, ha="left", color=FAINT)
        for line in found:
            x = LEFT
            for wish, came, width in line:
                _draw_token(ax, x, top - 0.26 - CELL, width, came, "white")
                if wish:
                    _draw_token(ax, x, top - 0.26, width, wish, REJECTED)
                x += width
            top -= 0.68
        top -= 0.1
    note = "red: the likeliest token, which the grammar forbids; below it the token that came"
    label(ax, WIDTH, height - 0.18, note, 8, ha="right", color=FAINT)
    show()


def _lines_of(
    pairs: Seq[tuple[int, int]], tokens: Tokens
) -> Iterator[list[tuple[str, str, float]]]:
    """(forbidden, came, width): as many in a line as fit."""
    line: list[tuple[str, str, float]] = []
    x = LEFT
    for likeliest, token_id in pairs:
        wish = "" if likeliest == token_id else tokens.text(likeliest, 12)
        came = tokens.text(token_id, 12)
        width = max(0.24, text_width(came, 8) + 0.1, text_width(wish or came, 8) + 0.1)
        if line and x + width > WIDTH:
            yield line
            line, x = [], LEFT
        line.append((wish, came, width))
        x += width
    yield line


def _draw_token(ax: Axes, x: float, y: float, width: float, text: str, face: str) -> None:
    is_struck = face == REJECTED
    box(ax, x, y, width, CELL, facecolor=face, edgecolor=LINE, linewidth=0.6)
    label(ax, x + width / 2, y + CELL / 2, text, 8, color=STRUCK if is_struck else INK)
    if is_struck:
        middle = y + CELL / 2
        ax.plot([x + 0.04, x + width - 0.04], [middle, middle], color=STRUCK, linewidth=1)
