"""Which colour has a request, and how is a picture begun?

All pictures share this module: the colours, a canvas measured in inches, boxes and labels.

A request has the same colour in every picture. The colours are those of Okabe and Ito: readers with
any kind of colour vision can tell them apart. A, B, C, ... have the first, second, third, ... one;
X, Y and Z are fillers, and grey. The branches of a request (A.1, A.2) have shades of its colour.
Names always stand beside the colours.

No text is smaller than 7 points: what has no room is cut, not shrunk.

matplotlib is imported by the functions that draw, not by the module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 10.5  # inches, of every picture
DPI = 96
SMALLEST = 7.0  # points, of every text
TITLE = 11.5

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
STEP_COLOURS = {  # of the parts of a step's time; "execute" is prepare, model and sample together
    "schedule": "#CC79A7",
    "prepare": "#56B4E9",
    "execute": "#DDDDDD",
    "model": "#DDDDDD",
    "sample": "#E69F00",
    "update": "#009E73",
}
FILLERS = {"X": "#8A8A8A", "Y": "#B4B4B4", "Z": "#6A6A6A"}
SHADES = (0.0, -0.55, 0.6, 0.12, -0.25)  # of branches: below 0 darker, above 0 lighter
INK, FAINT, LINE = "#222222", "#666666", "#A6A6A6"
ALARM, WAIT = "#D55E00", "#EDEDED"
CACHED = "#E4E4E4"  # a free block that can still be found
IDLE = "#F6D9C9"  # a place in the batch that computes nothing


def colour(name: str) -> str:
    """The colour of a request or of one of its branches: "A", "A.2"."""
    root, _, branch = name.rpartition(".")
    if not root or not branch.isdigit():
        root, branch = name, "0"
    if root[:1] in FILLERS and (len(root) == 1 or root[1:].isdigit()):
        base = FILLERS[root[0]]
    elif root.isdigit():
        base = COLOURS[int(root) % len(COLOURS)]
    else:
        base = COLOURS[(sum(map(ord, root)) - ord("A")) % len(COLOURS)]
    return shade(base, SHADES[int(branch) % len(SHADES)])


def tint(name: str, strength: float = 0.3) -> tuple[float, float, float]:
    """The colour of `name`, thinned with white so that black text stays readable on it."""
    red, green, blue = (1 - strength * (1 - part) for part in _rgb(colour(name)))
    return red, green, blue


def on_colour(name: str) -> str:
    """The colour of letters on the full colour of `name`."""
    return "#fff" if _luminance(colour(name)) < 0.25 else "#111"


def _rgb(code: str) -> tuple[float, float, float]:
    """ "#RRGGBB" -> three numbers from 0 to 1."""
    red, green, blue = (int(code[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def shade(code: str, amount: float) -> str:
    """The colour, moved towards black (amount below 0) or white (above 0)."""
    if not amount:
        return code
    target = 1.0 if amount > 0 else 0.0
    parts = (part + abs(amount) * (target - part) for part in _rgb(code))
    return "#" + "".join(f"{round(255 * part):02X}" for part in parts)


def _luminance(code: str) -> float:
    """How bright a colour is, from 0 to 1 (WCAG 2, "relative luminance")."""
    linear = [((p + 0.055) / 1.055) ** 2.4 if p > 0.04 else p / 12.92 for p in _rgb(code)]
    return sum(w * p for w, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


# -- matplotlib --


def pyplot() -> Any:
    """matplotlib.pyplot. Raises ImportError with the command that installs it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError('pictures need matplotlib: pip install -e ".[notebooks]"') from error
    return plt


def show() -> None:
    """Hand the picture to the notebook. Without a display it stays open, to be saved or tested."""
    plt = pyplot()
    if plt.get_backend().lower() != "agg":
        plt.show()


def canvas(height: float, title: str = "") -> Axes:
    """Axes measured in inches, with nothing on them but a title."""
    fig: Figure = pyplot().figure(figsize=(WIDTH, height), dpi=DPI)
    ax = fig.add_axes((0, 0, 1, 1))
    ax.set_xlim(-0.05, WIDTH + 0.05)
    ax.set_ylim(0, height)
    ax.axis("off")
    if title:
        label(ax, 0, height - 0.18, title, TITLE, ha="left", weight="bold")
    return ax


def panels(rows: int, height: float, title: str, columns: int = 1, **options: Any) -> list[Any]:
    """Axes with scales, one below the other (or in columns), in the style of the other pictures."""
    fig, grid = pyplot().subplots(
        rows,
        columns,
        figsize=(WIDTH, height),
        dpi=DPI,
        squeeze=False,
        layout="constrained",
        **options,
    )
    fig.suptitle(title, x=0.008, ha="left", fontsize=TITLE, weight="bold", color=INK)
    axes = list(grid.flat)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(labelsize=8)
    return axes


def box(ax: Axes, x: float, y: float, width: float, height: float, **style: Any) -> None:
    """A rectangle; (x, y) is its lower left corner."""
    from matplotlib.patches import Rectangle

    style = {"facecolor": "white", "edgecolor": LINE, "linewidth": 0.8, **style}
    ax.add_patch(Rectangle((x, y), width, height, **style))


def label(ax: Axes, x: float, y: float, text: str, size: float = 8, **style: Any) -> None:
    """Text with its middle at (x, y)."""
    style = {"color": INK, "ha": "center", "va": "center", **style}
    ax.text(x, y, text.replace("$", r"\$"), fontsize=max(size, SMALLEST), **style)


def chip(ax: Axes, x: float, y: float, width: float, name: str) -> None:
    """The name of a request in a box of its colour."""
    box(ax, x, y, width, 0.24, facecolor=colour(name), edgecolor="white")
    text, size = fit(name, width - 0.02, 9)
    label(ax, x + width / 2, y + 0.12, text, size, weight="bold", color=on_colour(name))


def text_width(text: str, size: float) -> float:
    """Inches. Letters on a screen are a little wider than their outlines."""
    from matplotlib.textpath import TextPath

    extent = TextPath((0, 0), text.replace("$", r"\$"), size=size).get_extents().width
    return 1.12 * float(extent) / 72


def fit(text: str, width: float, largest: float = 8.5) -> tuple[str, float]:
    """`text` and a font size with which it is no wider than `width` inches. Text that does not fit
    at SMALLEST is cut."""
    if not text.strip():
        return text, largest
    size = min(largest, largest * width / max(text_width(text, largest), 1e-6))
    if size >= SMALLEST:
        return text, size
    for length in range(len(text) - 1, 0, -1):
        shorter = text[:length] + ("…" if length > 1 else "")
        if text_width(shorter, SMALLEST) <= width:
            return shorter, SMALLEST
    return text[:1], SMALLEST
