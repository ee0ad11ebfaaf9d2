"""What could a machine do at best? A picture of its two limits.

    roofline(title, machines, points)   attainable speed over arithmetic intensity, log-log, with
                                        named points on each machine's roof
    ridge_prompt(costs, limits)         from which length on a prompt is bound by arithmetic

A machine is a MachineLimits of bench/roofline.py: bytes and operations per second. The arithmetic
intensity of a step is its operations divided by the bytes that it moves. On the sloping part of a
roof memory is the limit, on the flat part arithmetic.

Paper: Roofline, Williams, Waterman and Patterson, CACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Mapping

from nanoserve.bench.roofline import Cost, MachineLimits, ModelCosts
from nanoserve.extras.trace.style import COLOURS, LINE, label, panels, show


def roofline(
    title: str, machines: Mapping[str, MachineLimits], points: Mapping[str, Mapping[str, Cost]]
) -> None:
    """Draw each machine's roof, and on it a point for each cost (machine -> name -> cost)."""
    [ax] = panels(1, 4.3, title)
    intensities = [2.0**power for power in range(-3, 13)]
    for number, (machine, limits) in enumerate(machines.items()):
        shade, ridge = COLOURS[number], limits.rate / limits.bandwidth
        xs = sorted([*intensities, ridge])
        ax.plot(xs, [_attainable(limits, x) for x in xs], color=shade, linewidth=2)
        text = f"{machine}\n{limits.bandwidth / 1e9:,.0f} GB/s, {limits.rate / 1e9:,.0f} GFLOP/s"
        style = {"ha": "right", "va": "bottom", "color": shade, "weight": "bold"}
        label(ax, xs[-1], 1.1 * limits.rate / 1e9, text, 8.5, **style)
        ax.plot([ridge] * 2, [1e-3, limits.rate / 1e9], color=shade, linewidth=0.8, linestyle=":")
        label(ax, 1.06 * ridge, 1.6, f"{ridge:.0f}", 8, ha="left", color=shade)
        for place, (name, cost) in enumerate(points.get(machine, {}).items()):
            x = cost.operations / cost.num_bytes
            y = _attainable(limits, x)
            ax.plot([x], [y], "o", color=shade, markersize=7, markeredgecolor="white")
            side = {"ha": "left", "va": "top"} if place % 2 == 0 else {"ha": "right", "va": "bottom"}
            shift = 1.12 if place % 2 == 0 else 0.89
            label(ax, shift * x, y / shift if place % 2 == 0 else y * 1.12, name, 8, **side)
    ax.set(xscale="log", yscale="log", xlim=(xs[0], xs[-1]), ylim=(1, None))
    ax.set_xlabel("arithmetic intensity: operations per byte of memory traffic", fontsize=9)
    ax.set_ylabel("GFLOP/s at best", fontsize=9)
    ax.grid(color=LINE, alpha=0.3, linewidth=0.6)
    show()


def _attainable(limits: MachineLimits, intensity: float) -> float:
    """GFLOP/s."""
    return min(limits.rate, intensity * limits.bandwidth) / 1e9


def ridge_prompt(costs: ModelCosts, limits: MachineLimits) -> int:
    """Tokens of the shortest prompt that, computed alone, is bound by arithmetic."""
    length = 1
    while True:
        cost = costs.step(length, 1, length, length * (length + 1) // 2)
        if cost.operations / limits.rate >= cost.num_bytes / limits.bandwidth:
            return length
        length += 1
