"""Which beams did a search keep, and which did it let go?

`BeamTree` notes the rounds of one beam search, from before its first step. `beam_tree` draws them:
one column for each output token, a node for each candidate, the best on top.

    tree = BeamTree(BeamSearch("A", prompt, BeamSearchParams(3, 8), llm.engine))
    for _ in llm.run_requests([tree.search]): ...
    beam_tree("Three beams", tree, llm)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from nanoserve import LLM
from nanoserve.extras.beam_search import BeamSearch
from nanoserve.extras.trace.blocks import draw_frame
from nanoserve.extras.trace.frames import Tokens
from nanoserve.extras.trace.snapshot import snapshot
from nanoserve.extras.trace.style import ALARM, FAINT, INK, LINE, WIDTH, canvas, fit, label, show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KEPT, FINISHED, DROPPED = "#CFE8F7", "#B8E3D4", "#F1F1F1"
START, LINE_HEIGHT = 0.7, 0.46  # inches: width of the root; of a line
Output = tuple[int, ...]  # token ids of the output so far


@dataclass
class Node:
    """One candidate: the beam that it extends, with one token more."""

    tokens: Output
    cum_logprob: float
    fate: str = "dropped"  # "kept": a beam of the next step; "finished": it ended in an EOS token


class BeamTree:
    """The rounds of one beam search. Each round: the candidates of all beams, likeliest first."""

    def __init__(self, search: BeamSearch) -> None:
        self.search = search
        self.rounds: list[list[Node]] = []
        self._advance = search.advance
        search.advance = self._noting_advance  # type: ignore[method-assign]

    def _noting_advance(self) -> None:
        beams, start = list(self.search.beams.values()), self.search.num_prompt_tokens
        nodes = [
            Node((*beam.beam.tokens[start:], token_id), beam.beam.cum_logprob + found.logprob)
            for beam in beams
            for token_id, found in beam.candidates.items()
        ]
        is_complete = all(beam.candidates for beam in beams)
        self._advance()
        if not is_complete:  # a beam was preempted: the round is not over
            return
        kept = {tuple(beam.beam.tokens[start:]) for beam in self.search.beams.values()}
        completed = {tuple(beam.tokens[start:]) for beam in self.search.completed}
        for node in nodes:
            if node.tokens in kept:
                node.fate = "kept"
            elif node.tokens[-1] in self.search.eos_token_ids or node.tokens in completed:
                node.fate = "finished"
        self.rounds.append(sorted(nodes, key=lambda node: -node.cum_logprob))

    @property
    def best(self) -> Output:
        """The output tokens of the best finished beam; () before there is one."""
        ranked = sorted(self.search.completed, key=self.search.score, reverse=True)
        return tuple(ranked[0].tokens[self.search.num_prompt_tokens :]) if ranked else ()


def beam_blocks(title: str, tree: BeamTree, llm: LLM) -> None:
    """Draw the KV cache in the middle of a search. The beams are numbered, the best is A.1."""
    ranked = sorted(tree.search.beams.values(), key=lambda beam: -beam.beam.cum_logprob)
    name = tree.search.request_id
    names = {beam.sequence.seq_id: f"{name}.{i}" for i, beam in enumerate(ranked, start=1)}
    frame = snapshot(llm)
    views = [view._replace(name=names.get(view.seq_id, view.name)) for view in frame.sequences]
    views.sort(key=lambda view: view.name)
    draw_frame(replace(frame, sequences=tuple(views)), title)


def beam_tree(title: str, tree: BeamTree, llm: LLM, dropped: int = 2) -> None:
    """Draw the search: in each node the token and the cumulative log-probability. `dropped`: how
    many of the candidates of a round that went no further are drawn, the likeliest."""
    text_of = Tokens(llm.get_tokenizer()).text
    columns = [_choose(nodes, dropped, tree) for nodes in tree.rounds]
    lines = max(map(len, columns))
    height = 0.58 + LINE_HEIGHT * lines
    ax = canvas(height, title)
    _draw_legend(ax, height - 0.2)
    step = (WIDTH - START) / len(columns)
    width = min(1.0, 0.78 * step)
    middle = height - 0.65 - LINE_HEIGHT * (lines - 1) / 2
    places: dict[Output, tuple[float, float]] = {
        (): (START - 0.06, middle)
    }  # where the edges to the next column begin
    _draw_node(ax, 0.02, middle, START - 0.1, "prompt", "", "kept", is_best=True)
    for depth, nodes in enumerate(columns):
        x = START + (depth + 1) * step - width
        first = middle + LINE_HEIGHT * (len(nodes) - 1) / 2
        for line, node in enumerate(nodes):
            y = first - LINE_HEIGHT * line
            is_best = node.tokens == tree.best[: len(node.tokens)]
            _draw_edge(ax, places[node.tokens[:-1]], (x, y), node.fate, is_best)
            text = text_of(node.tokens[-1], 8)
            value = f"{node.cum_logprob:.2f}".replace("-0.00", "0.00").replace("-", "−")
            _draw_node(ax, x, y, width, text, value, node.fate, is_best)
            places[node.tokens] = (x + width, y)
    show()


def _choose(nodes: list[Node], dropped: int, tree: BeamTree) -> list[Node]:
    """The nodes of a round that are drawn."""
    others = [node for node in nodes if node.fate != "kept" and node.tokens != tree.best]
    return [node for node in nodes if node not in others[dropped:]]


def _draw_edge(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], fate: str, is_best: bool
) -> None:
    shade = ALARM if is_best else LINE if fate == "dropped" else INK
    width, dashes = (2.2 if is_best else 0.9), (":" if fate == "dropped" else "-")
    xs, ys = [start[0], end[0]], [start[1], end[1]]
    ax.plot(xs, ys, color=shade, linewidth=width, linestyle=dashes, zorder=1)


def _draw_node(
    ax: Axes, x: float, y: float, width: float, text: str, value: str, fate: str, is_best: bool
) -> None:
    from matplotlib.patches import FancyBboxPatch

    face = {"kept": KEPT, "finished": FINISHED, "dropped": DROPPED}[fate]
    edge, line = (ALARM, 2.0) if is_best else (LINE if fate == "dropped" else INK, 0.8)
    tall = 0.36 if value or text else 0.2
    style: dict[str, Any] = {"facecolor": face, "edgecolor": edge, "linewidth": line, "zorder": 2}
    corners = "round,pad=0,rounding_size=0.06"
    ax.add_patch(FancyBboxPatch((x, y - tall / 2), width, tall, boxstyle=corners, **style))
    ink = FAINT if fate == "dropped" else INK
    text, size = fit(text, width - 0.06, 8.5)
    label(ax, x + width / 2, y + (0.075 if value else 0), text, size, color=ink, zorder=3)
    label(ax, x + width / 2, y - 0.085, value, 7.5, color=ink, zorder=3)


def _draw_legend(ax: Axes, y: float) -> None:
    x = WIDTH - 4.75
    for fate, text in {"kept": "kept", "finished": "finished", "dropped": "let go"}.items():
        _draw_node(ax, x, y, 0.3, "", "", fate, is_best=False)
        label(ax, x + 0.36, y, text, 8.5, ha="left")
        x += 1.1
    ax.plot([x, x + 0.3], [y, y], color=ALARM, linewidth=2.2)
    label(ax, x + 0.36, y, "the best result", 8.5, ha="left")
