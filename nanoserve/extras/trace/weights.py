"""What is in a matrix, and what does rounding make of its numbers?

    trace.matrices("LoRA", {"W": weight, "lora_B": b, "lora_A": a, "B A": b @ a})
    trace.staircase("Rounded", row, {"8 bits": row_8, "4 bits": row_4})

`matrices` draws each number as a dot of colour: red above 0, blue below, white near 0, full colour
from three times the usual size on. All are drawn to one scale, so that a thin matrix is thin.
`staircase` draws each number before (to the right) against the same one after (upwards): a number
that did not change lies on the diagonal.

vLLM: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nanoserve.extras.trace.style import (
    COLOURS,
    FAINT,
    INK,
    LINE,
    WIDTH,
    box,
    canvas,
    fit,
    label,
    panels,
    show,
)

HEIGHT, GAP = 2.3, 0.45  # inches: of the tallest matrix at most, between two
THINNEST = 0.07  # inches


def matrices(title: str, tables: Mapping[str, Any], shared: bool = False) -> None:
    """Draw matrices [rows, columns] side by side, with their shapes. shared: one scale of colours
    for all, as for a matrix before and after; else each has its own."""
    arrays = {name: _as_array(table) for name, table in tables.items()}
    tops = {name: 3 * float(np.sqrt(np.square(a).mean())) or 1.0 for name, a in arrays.items()}
    if shared:
        tops = dict.fromkeys(arrays, max(tops.values()))
    rows, columns = zip(*(array.shape for array in arrays.values()), strict=True)
    inches = min(HEIGHT / max(rows), (WIDTH - GAP * (len(arrays) - 1)) / sum(columns))
    sizes = {n: [max(THINNEST, inches * size) for size in a.shape] for n, a in arrays.items()}
    tallest = max(height for height, _ in sizes.values())
    total = sum(max(width, 0.9) for _, width in sizes.values())
    gap = min(GAP, (WIDTH - total) / max(1, len(arrays) - 1))
    ax = canvas(tallest + 1.15, title)
    limits = ax.get_xlim(), ax.get_ylim()
    x = max(0.0, (WIDTH - total - gap * (len(arrays) - 1)) / 2)
    for name, array in arrays.items():
        height, width = sizes[name]
        room = max(width, 0.9)
        left, bottom = x + (room - width) / 2, 0.45 + (tallest - height) / 2
        extent = (left, left + width, bottom, bottom + height)
        style: dict[str, Any] = {"cmap": "RdBu_r", "interpolation": "nearest", "aspect": "auto"}
        ax.imshow(array, extent=extent, vmin=-tops[name], vmax=tops[name], **style)
        box(ax, left, bottom, width, height, facecolor="none", edgecolor=LINE, linewidth=0.6)
        label(ax, x + room / 2, tallest + 0.62, *fit(name, room + gap - 0.05, 9.5), weight="bold")
        label(ax, x + room / 2, 0.27, f"{array.shape[0]} × {array.shape[1]}", 8)
        largest = f"up to ±{np.abs(array).max():.2g}"
        label(ax, x + room / 2, 0.09, largest, 7.5, color=FAINT)
        x += room + gap
    ax.set_xlim(limits[0])
    ax.set_ylim(limits[1])
    show()


def staircase(title: str, before: Any, after: Mapping[str, Any]) -> None:
    """Draw what became of the numbers `before`; after: label -> as many numbers. A panel says how
    many different ones are left, and the mean error as a share of the mean size."""
    old = _as_array(before).ravel()
    axes = panels(1, 2.9, title, columns=len(after), sharey=True)
    for ax, (name, numbers) in zip(axes, after.items(), strict=True):
        new = _as_array(numbers).ravel()
        error = np.abs(new - old).mean() / np.abs(old).mean()
        reach = [old.min(), old.max()]
        ax.plot(reach, reach, color=LINE, linewidth=0.8, linestyle="--")
        ax.plot(old, new, "o", color=COLOURS[0], markersize=2.5, alpha=0.7, markeredgewidth=0)
        ax.set_title(name, loc="left", fontsize=9.5, weight="bold", color=INK)
        about = f"{len(np.unique(new))} different, error {100 * error:.2g}%"
        ax.set_title(about, loc="right", fontsize=8, color=FAINT)
        ax.set_xlabel("before", fontsize=8.5)
        ax.grid(color=LINE, alpha=0.3, linewidth=0.6)
    axes[0].set_ylabel("after", fontsize=8.5)
    show()


def _as_array(numbers: Any) -> np.ndarray:
    """A tensor of any type, an array or a list of numbers, in float64."""
    if hasattr(numbers, "detach"):
        numbers = numbers.detach().cpu().double().numpy()
    return np.asarray(numbers, np.float64)
