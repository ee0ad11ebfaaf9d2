"""Which drafts were right, and who wrote each token?

    with trace.watch_drafts(llm) as seen:
        llm.generate(...)
    seen[3].draft_token_ids       (81, 12, 7)           what the proposer guessed
    seen[3].sampled_token_ids     (81, 12, 9, 44)       of all k + 1 rows
    seen[3].new_token_ids         (81, 12, 9)           what the request got: two drafts, and one

`drafted` draws it as a text. A draft that was accepted is green. A draft that was rejected is red
and struck through, and stands before the token that came in its place. A token that the model
itself brought is plain: each step ends with one, unless an accepted draft has ended the answer.

Left out: several ranks (the rows are rank 0's), and the branches of a request beyond the first.

vLLM: none.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from nanoserve.arg_utils import engine_of
from nanoserve.extras.trace.frames import Tokens, name_of
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
from nanoserve.model_runner import PendingOutput

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from nanoserve.engine import StepReport

ACCEPTED, REJECTED = "#9AD9B4", "#F6C3BC"
STRUCK = "#B3261E"
CELL, ROW, LEFT = 0.27, 0.5, 1.35  # inches: height of a token and of a line, room for names
GAP = 0.14  # inches between steps


class Verified(NamedTuple):
    """What one step did for one sequence that got tokens in it."""

    step: int  # from 1
    name: str
    draft_token_ids: tuple[int, ...]
    sampled_token_ids: tuple[int, ...]  # of k + 1 rows; nothing behind a wrong draft counts
    new_token_ids: tuple[int, ...]  # what the sequence got
    num_accepted: int  # of the drafts


@contextmanager
def watch_drafts(llm_or_engine: Any) -> Iterator[list[Verified]]:
    """Note what every step drafted, sampled and kept, in a list that grows."""
    engine = engine_of(llm_or_engine)
    batch, right = engine.executor.runner.batch, PendingOutput.result
    sampled: dict[int, dict[int, int]] = {}  # seq_id -> position -> token; of the last step
    found: list[Verified] = []
    num_steps = 0

    @functools.wraps(right)
    def result(pending: PendingOutput) -> Any:
        if pending._batch is batch and pending._sampled is not None:
            sampled.clear()
            token_ids = pending._sampled.to_host().token_ids
            for (seq_id, position, _), token_id in zip(pending._samples, token_ids, strict=True):
                sampled.setdefault(seq_id, {}).setdefault(position, token_id)
        return right(pending)

    def note(report: StepReport) -> None:
        nonlocal num_steps
        num_steps += 1
        drafts = {i.seq_id: i.draft_token_ids for i in report.scheduler_output.scheduled}
        for update in report.updates:
            seq = update.sequence
            if update.new_token_ids and seq.seq_id in drafts:
                rows = tuple(sampled.get(seq.seq_id, {}).values())
                new, accepted = tuple(update.new_token_ids), update.num_accepted_tokens
                found.append(
                    Verified(num_steps, name_of(seq), drafts[seq.seq_id], rows, new, accepted)
                )

    setattr(PendingOutput, "result", result)  # noqa: B010 (mypy)
    engine.step_listeners.append(note)
    try:
        yield found
    finally:
        engine.step_listeners.remove(note)
        setattr(PendingOutput, "result", right)  # noqa: B010


class _Token(NamedTuple):
    text: str
    kind: str  # "accepted", "rejected" or "own"
    width: float  # inches


def drafted(title: str, runs: Mapping[str, Seq[Verified]], llm: Any) -> None:
    """Draw the answers of some runs (name -> what watch_drafts noted of one request). The small
    number before the tokens is the step that brought them."""
    tokens = Tokens(engine_of(llm).tokenizer)
    lines = {name: _lines_of(steps, tokens) for name, steps in runs.items()}
    height = 0.72 + sum(ROW * len(found) + 0.12 for found in lines.values())
    ax = canvas(height, title)
    _draw_legend(ax, height - 0.5)
    top = height - 0.7
    for name, found in lines.items():
        steps = runs[name]
        num_new = sum(len(each.new_token_ids) for each in steps)
        text, size = fit(name, LEFT - 0.1, 9.5)
        label(ax, 0, top - 0.16, text, size, ha="left", weight="bold")
        about = f"{num_new} tokens, {len(steps)} steps"
        label(ax, 0, top - 0.35, about, 7.5, ha="left", color=FAINT)
        for line in found:
            x = LEFT
            for step, group in line:
                x = _draw_step(ax, x, top, step, group)
            top -= ROW
        top -= 0.12
    show()


def _lines_of(steps: Seq[Verified], tokens: Tokens) -> list[list[tuple[int, list[_Token]]]]:
    """The steps with their tokens, as many in a line as fit."""
    lines: list[list[tuple[int, list[_Token]]]] = [[]]
    x = LEFT
    for each in steps:
        group = [_token(tokens, token_id, kind) for token_id, kind in kinds_of(each)]
        width = sum(token.width for token in group) + GAP
        if lines[-1] and x + width > WIDTH:
            lines.append([])
            x = LEFT
        lines[-1].append((each.step, group))
        x += width
    return lines


def kinds_of(each: Verified) -> list[tuple[int, str]]:
    """The tokens of a step in the order of the picture: accepted, rejected, the model's own."""
    number = min(each.num_accepted, len(each.new_token_ids))
    marked = [(token_id, "accepted") for token_id in each.new_token_ids[:number]]
    marked += [(token_id, "rejected") for token_id in each.draft_token_ids[each.num_accepted :]]
    return marked + [(token_id, "own") for token_id in each.new_token_ids[number:]]


def _token(tokens: Tokens, token_id: int, kind: str) -> _Token:
    text = tokens.text(token_id, 12)
    return _Token(text, kind, max(0.2, text_width(text, 8) + 0.1))


def _draw_step(ax: Axes, x: float, top: float, step: int, group: list[_Token]) -> float:
    """The tokens of a step from `x` on; returns where the next step begins."""
    faces = {"accepted": ACCEPTED, "rejected": REJECTED, "own": "white"}
    label(ax, x, top - 0.07, str(step), 7, ha="left", color=FAINT)
    for text, kind, width in group:
        y, middle = top - 0.16 - CELL, top - 0.16 - CELL / 2
        box(ax, x, y, width, CELL, facecolor=faces[kind], edgecolor=LINE, linewidth=0.6)
        label(ax, x + width / 2, middle, text, 8, color=STRUCK if kind == "rejected" else INK)
        if kind == "rejected":
            ax.plot([x + 0.04, x + width - 0.04], [middle, middle], color=STRUCK, linewidth=1)
        x += width
    return x + GAP


def _draw_legend(ax: Axes, y: float) -> None:
    x = LEFT
    label(ax, x, y, "step", 7, ha="left", color=FAINT)
    x += 0.5
    for text, face in (
        ("draft, accepted", ACCEPTED),
        ("draft, rejected", REJECTED),
        ("the model's own token", "white"),
    ):
        box(ax, x, y - 0.07, 0.2, 0.14, facecolor=face, edgecolor=LINE, linewidth=0.6)
        label(ax, x + 0.26, y, text, 8, ha="left", color=FAINT)
        if face == REJECTED:
            ax.plot([x + 0.03, x + 0.17], [y, y], color=STRUCK, linewidth=1)
        x += 0.56 + text_width(text, 8)
