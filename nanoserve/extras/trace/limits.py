"""What could a machine do at best? A picture of its two limits.

    rooflines(title, machines, points)  attainable speed over arithmetic intensity, log-log, with
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

LEFT, RIGHT = 0.125, 4096.0  # of the picture: operations per byte


def rooflines(
    title: str, machines: Mapping[str, MachineLimits], points: Mapping[str, Mapping[str, Cost]]
) -> None:
    """Draw each machine's roof, and on it a point for each cost (machine -> name -> cost)."""
    [ax] = panels(1, 4.3, title)
    for number, (machine, limits) in enumerate(machines.items()):
        shade, ridge = COLOURS[number], limits.rate / limits.bandwidth
        text = f"{machine}: {limits.bandwidth / 1e9:,.0f} GB/s, {limits.rate / 1e9:,.0f} GFLOP/s"
        roof = [_best(limits, x) for x in (LEFT, ridge, RIGHT)]
        ax.plot([LEFT, ridge, RIGHT], roof, color=shade, marker="o", markevery=[], label=text)
        ax.plot([ridge] * 2, [1, limits.rate / 1e9], color=shade, linewidth=0.9, linestyle=":")
        label(ax, 1.06 * ridge, 1.6, f"{ridge:.0f}", 8.5, ha="left")
        for index, (name, cost) in enumerate(points.get(machine, {}).items()):
            x = cost.operations / cost.num_bytes
            y = _best(limits, x)
            ax.plot([x], [y], "o", color=shade, markersize=7, markeredgecolor="white")
            is_above = x > RIGHT / 30 or (x < ridge and index % 2)
            style = {"ha": "right", "va": "bottom"} if is_above else {"ha": "left", "va": "top"}
            label(
                ax,
                x / 1.08 if is_above else 1.12 * x,
                y * 1.25 if is_above else y / 1.15,
                name,
                8,
                **style,
            )
    ax.set(xscale="log", yscale="log", xlim=(LEFT, RIGHT))
    ax.set_ylim(1, 4 * max(limits.rate for limits in machines.values()) / 1e9)
    ax.set_xlabel("arithmetic intensity: operations per byte of memory traffic", fontsize=9)
    ax.set_ylabel("GFLOP/s at best", fontsize=9)
    ax.grid(color=LINE, alpha=0.3, linewidth=0.6)
    ax.legend(loc="upper left", frameon=False, fontsize=8.5)
    show()


def _best(limits: MachineLimits, intensity: float) -> float:
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
