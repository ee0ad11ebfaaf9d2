"""Plain charts in the style of the other pictures: distributions, bars, lines and points."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Seq
from typing import Any

from nanoserve.extras.trace.style import COLOURS, FAINT, INK, LINE, fit, label, panels, show

MARKERS = "osD^vPX"


def distribution(
    title: str,
    probabilities: Mapping[str, Any],
    texts: Any,
    top: int = 12,
) -> None:
    """Draw distributions over the vocabulary, a panel for each, with the same tokens in all.

    probabilities: label -> one number for each token (a tensor, an array, a list), or token id ->
    number. texts: token id -> text; a mapping, a list, a function, or a tokenizer. The `top` tokens
    are those of the first panel. "✕": the token is impossible.
    """
    tables = {name: _as_dict(values) for name, values in probabilities.items()}
    first = next(iter(tables.values()))
    tokens = sorted(first, key=lambda token_id: -first[token_id])[:top]
    names = [_readable(_lookup(texts, token_id)) for token_id in tokens]
    columns = min(len(tables), 3)
    rows = -(-len(tables) // columns)
    axes = panels(rows, 0.45 + 2.0 * rows, title, columns, sharey=True)
    highest = max(max(table.values(), default=1.0) for table in tables.values())
    for number, (ax, (name, table)) in enumerate(zip(axes, tables.items(), strict=False)):
        values = [table.get(token_id, 0.0) for token_id in tokens]
        ax.bar(range(len(tokens)), values, 0.8, color=COLOURS[0])
        for place, value in enumerate(values):
            if value == 0:
                label(ax, place, 0.02 * highest, "✕", 8, color="#B3261E", va="bottom")
            elif value >= 0.1 * highest:
                label(ax, place, value, f"{100 * value:.0f}", 7.5, va="bottom", color=INK)
        possible = sum(value > 0 for value in table.values())
        about = "1 token is possible" if possible == 1 else f"{possible} tokens are possible"
        ax.set_title(name, loc="left", fontsize=9.5, weight="bold", color=INK)
        ax.set_title(about, loc="right", fontsize=8, color=FAINT)
        room = 1.3 if max(map(len, names), default=0) > 3 else 0.4
        short = [fit(text, room, 8)[0] for text in names]
        rotation = 60 if room > 1 else 0
        turned: dict[str, Any] = {"rotation": rotation, "ha": "right" if rotation else "center"}
        ax.set_xticks(range(len(tokens)), short, fontsize=8, rotation_mode="anchor", **turned)
        ax.set_ylim(0, 1.14 * highest)
        ax.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
        ax.tick_params(axis="x", length=0)
        if number % columns == 0:
            ax.set_ylabel("probability", fontsize=8.5)
    for ax in axes[len(tables) :]:
        ax.axis("off")
    show()


def _as_dict(values: Any) -> dict[int, float]:
    if isinstance(values, Mapping):
        return {int(token_id): float(value) for token_id, value in values.items()}
    flat = values.flatten().tolist() if hasattr(values, "flatten") else list(values)
    return dict(enumerate(map(float, flat)))


def _lookup(texts: Any, token_id: int) -> str:
    if hasattr(texts, "decode"):
        return str(texts.decode([token_id]))
    if isinstance(texts, Callable):  # type: ignore[arg-type]
        return str(texts(token_id))
    return str(texts[token_id])


def _readable(text: str) -> str:
    """White space made visible: " a" -> "␣a"."""
    return text.replace("\n", "↵").replace(" ", "␣").replace("<|im_", "‹").replace("|>", "›")


def bars(title: str, values: Mapping[str, float], unit: str = "") -> None:
    """Draw a horizontal bar for each value, with the number behind it."""
    [ax] = panels(1, 0.75 + 0.36 * max(1, len(values)), title)
    numbers = [float(value) for value in values.values()]
    highest = max([*numbers, 0.0]) or 1.0
    ax.barh(range(len(numbers)), numbers, 0.66, color=COLOURS[0])
    for row, number in enumerate(numbers):
        text = f"{number:,.4g}" if number < 1000 else f"{number:,.0f}"
        label(ax, number + 0.01 * highest, row, f"{text} {unit}".strip(), 8.5, ha="left")
    names = [fit(name, 3.2, 9)[0] for name in values]
    ax.set_yticks(range(len(names)), names, fontsize=9)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_xlim(0, 1.18 * highest)
    ax.spines["bottom"].set_visible(False)
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    show()


def lines(
    title: str,
    points: Mapping[str, Seq[tuple[float, float]]],
    xlabel: str,
    ylabel: str,
    log: bool | str = False,
    dashed: Container[str] = (),
) -> None:
    """Draw a line for each label. log: both axes by powers of 2; "x": only the lower one. dashed:
    labels of lines that may lie on others."""
    [ax] = panels(1, 3.2, title)
    ends = []
    for number, (name, line) in enumerate(points.items()):
        shade, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        style = {"marker": marker, "color": shade, "markersize": 5, "label": name}
        ax.plot(*zip(*line, strict=True), linestyle="--" if name in dashed else "-", **style)
        ends.append((line[-1], name, shade))
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    ax.grid(color=LINE, alpha=0.3, linewidth=0.6)
    if log:
        ax.set_xscale("log", base=2)
        if log != "x":
            ax.set_yscale("log", base=2)
        ax.set_xticks(sorted({x for line in points.values() for x, _ in line}))
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        ax.minorticks_off()
    if log in (False, "x"):
        ax.set_ylim(bottom=min(0, *(y for line in points.values() for _, y in line)))
    if len(points) > 1:
        ax.legend(frameon=False, fontsize=8.5)
    show()


def points(title: str, tables: Mapping[str, Any], groups: Seq[str]) -> None:
    """Draw points [n, 2], a panel for each label. groups: the group of each point, which has the
    same colour and sign in all panels. Only distances mean something, so there are no scales."""
    axes, shades = panels(1, 4.2, title, columns=len(tables)), (*COLOURS, INK)
    for ax, (name, places) in zip(axes, tables.items(), strict=True):
        for number, group in enumerate(dict.fromkeys(groups)):
            found = [place for place, other in zip(places, groups, strict=True) if other == group]
            x, y = ([float(place[axis]) for place in found] for axis in (0, 1))
            style = {
                "color": shades[number % len(shades)],
                "marker": MARKERS[number % len(MARKERS)],
            }
            ax.scatter(x, y, s=16, alpha=0.75, linewidths=0, label=group, **style)
        ax.set_title(name, loc="left", fontsize=9.5, weight="bold", color=INK)
        ax.set_aspect("equal", "datalim")
        ax.set_xticks([])
        ax.set_yticks([])
        ax.spines[["left", "bottom"]].set_color(LINE)
    place: dict[str, Any] = {"loc": "outside lower center", "ncols": 7, "frameon": False}
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), fontsize=8.5, **place)
    show()
