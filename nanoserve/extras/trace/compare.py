"""Is a comparison fair, and what does it show? Measurements in turns, their spread, and claims.

    time_in_turns(runs)              seconds of several runs, turn by turn
    ratios(title, values, xlabel)    a line of dots for each entry, and its median
    histograms(title, values, ...)   how widely several estimates of one number are spread
    claims(title, rows)              what was claimed, as a bar, and what was measured, as a dot
    read_claim(effect, measured)     a row for it, from two sentences
    unfair(old, new)                 why the outputs of two runs cannot be compared
    serve_at(llm, rate)              throughput and goodput at a rate of arrivals, in steps

vLLM: vllm/benchmarks/ measures one engine at a time.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from random import Random
from typing import Any

from nanoserve import LLM, SamplingParams
from nanoserve.extras.trace.style import COLOURS, FAINT, INK, LINE, label, panels, show

Claimed = tuple[float | None, float | None]  # from, to; None: the claim has no number, or no end


def time_in_turns(runs: Mapping[str, Callable[[], object]], turns: int = 7) -> list[list[float]]:
    """Seconds of each run, turn by turn: [[A0, B0], [A1, B1], ...]. A first turn, which warms up,
    is not counted. Ratios are to be taken within a turn, so that other load on the machine slows
    both of them alike."""
    times: list[list[float]] = []
    for _ in range(1 + turns):
        times.append([])
        for run in runs.values():
            start = time.perf_counter()
            run()
            times[-1].append(time.perf_counter() - start)
    return times[1:]


def ratios(title: str, values: Mapping[str, Seq[float]], xlabel: str) -> None:
    """A line of dots for each entry, and the median as a bar with its number. A line at 1."""
    [ax] = panels(1, 0.42 * len(values) + 1.0, title)
    for row, numbers in enumerate(values.values()):
        ax.plot(numbers, [row] * len(numbers), "o", color=COLOURS[0], markersize=6, alpha=0.55)
        middle = statistics.median(numbers)
        ax.plot([middle] * 2, [row - 0.3, row + 0.3], color=COLOURS[5], linewidth=2.2)
        text = f"median {middle:.2f}"
        label(ax, max(numbers), row, f"   {text}", 8.5, ha="left")
    highest = max(max(numbers) for numbers in values.values())
    ax.axvline(1, color=FAINT, linewidth=0.9, linestyle="--")
    ax.set(xlim=(0, 1.2 * highest), ylim=(len(values) - 0.5, -0.5))
    ax.set_yticks(range(len(values)), list(values), fontsize=9)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    show()


def claims(title: str, rows: Mapping[str, tuple[Claimed, float | str]]) -> None:
    """For each technique, on a logarithmic scale of factors: the claimed range as a bar (an arrow
    if it has no end), the measured factor as a diamond, or a word that says why there is none."""
    [ax] = panels(1, 0.42 * len(rows) + 1.1, title)
    ax.set_xscale("log")
    for row, ((low, high), measured) in enumerate(rows.values()):
        if low is not None:
            width = (high or 40.0) - low
            ax.barh(row, width, 0.5, low, color=COLOURS[4], alpha=0.55)
            if high is None:
                label(ax, 36, row, "and more ▸", 8, ha="right")
        if isinstance(measured, str):
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            label(ax, 0.31, row, measured, 8, ha="left", bbox=paper, zorder=5)
        else:
            ax.plot([measured], [row], "D", color=COLOURS[5], markersize=8)
            label(ax, 1.09 * measured, row - 0.27, f"{measured:.2f}", 8.5, ha="left")
        if low is None:
            label(ax, 38, row, "no number is claimed", 8, ha="right", color=FAINT)
    ax.axvline(1, color=FAINT, linewidth=0.9, linestyle="--")
    ax.set(xlim=(0.3, 40), ylim=(len(rows) - 0.5, -0.6))
    ax.set_xticks((0.5, 1, 2, 3, 5, 10, 20), ("0.5", "1", "2", "3", "5", "10", "20"))
    ax.minorticks_off()
    ax.set_yticks(range(len(rows)), list(rows), fontsize=9)
    ax.set_xlabel("factor (bar: the document's claim; diamond: measured here)", fontsize=9)
    ax.grid(axis="x", color=LINE, alpha=0.3, linewidth=0.6)
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    show()


def read_claim(effect: str, measured: str) -> tuple[Claimed, float | str]:
    """A row for `claims`: the factors in a claim of the documents ("up 20-30%": 1.2 and 1.3), and
    the factor in the sentence that says what was measured, or else this sentence."""
    numbers = map(float, re.findall(r"\d+(?:\.\d+)?", effect))
    factors = [1 + number / 100 if "%" in effect else number for number in numbers]
    low, high, *_ = [*factors, None, None]
    factor = re.search(r"([\d.]+) x", measured) if " up " in effect else None
    return (low, high), float(factor[1]) if factor else measured


def wandering_times(rng: Random, number: int) -> list[float]:
    """A simulation: seconds of `number` equal runs, one after the other, on a machine whose load
    wanders between 1 and 2.5, by up to 12% from run to run; in 3% of the runs something else takes
    two thirds of the time."""
    load, times = rng.uniform(1.0, 2.5), []
    for _ in range(number):
        load = min(2.5, max(1.0, load * rng.uniform(1 / 1.12, 1.12)))
        times.append(load * (3.0 if rng.random() < 0.03 else 1.0))
    return times


def histograms(
    title: str, values: Mapping[str, Seq[float]], truth: float, xlabel: str
) -> dict[str, str]:
    """A panel for each entry, on one scale from half of the truth to one and a half (what is beyond
    stands at the ends); a line where the truth is. Returns, for each entry, the share of values
    that are more than 10% away from it."""
    shares = {}
    axes = panels(len(values), 0.95 * len(values) + 0.9, title, sharex=True)
    low, high = 0.5 * truth, 1.5 * truth
    bins = [low + (high - low) * number / 50 for number in range(51)]
    for ax, (name, numbers) in zip(axes, values.items(), strict=True):
        ax.hist([min(high, max(low, number)) for number in numbers], bins, color=COLOURS[0])
        ax.axvline(truth, color=COLOURS[5], linewidth=1.5)
        ax.set_title(name, loc="left", fontsize=9, color=INK)
        wrong = sum(abs(number / truth - 1) > 0.1 for number in numbers) / len(numbers)
        shares[name] = f"{wrong:.0%}"
        ax.set_title(f"more than 10% wrong: {wrong:.0%}", loc="right", fontsize=9, color=FAINT)
        ax.set_yticks([])
        ax.spines["left"].set_visible(False)
    ends = [f"{low:g} and less", f"{(low + truth) / 2:g}", f"{truth:g}"]
    ends += [f"{(truth + high) / 2:g}", f"{high:g} and more"]
    axes[-1].set_xticks([low + (high - low) * part / 4 for part in range(5)], ends)
    axes[-1].set_xlabel(xlabel, fontsize=9)
    show()
    return shares


def unfair(old: Seq[Any], new: Seq[Any]) -> list[str]:
    """Why the speeds of two runs cannot be compared, given their RequestOutputs in one order:
    "prompts" if these differ, "cached tokens" if more prompt tokens came from the prefix cache in
    one run, "lengths" if an answer has fewer tokens in one."""

    def differ(read: Any) -> bool:
        return [read(output) for output in old] != [read(output) for output in new]

    reasons = {
        "prompts": differ(lambda output: output.prompt_token_ids),
        "cached tokens": differ(lambda output: output.num_cached_tokens),
        "lengths": differ(lambda output: len(output.outputs[0].token_ids)),
    }
    return [reason for reason, is_found in reasons.items() if is_found]


def serve_at(
    llm: LLM, rate: float, num_output: int = 16, in_time: int = 4, num_steps: int = 600
) -> tuple[float, float]:
    """Throughput and goodput of an engine, when `rate` requests arrive in 100 steps: requests that
    end, and requests whose first token comes within `in_time` steps of their arrival, each in 100
    steps. Only the second half of the steps counts. Prompts have 4 tokens and nothing in common."""
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True)
    arrived, first, ended = dict[str, int](), dict[str, int](), dict[str, int]()
    for step in range(num_steps):
        while len(arrived) * 100 < (step + 1) * rate:
            number = len(arrived)
            name = llm.add_request(f"X{number}", [number % 1000 + 5, 2, 3, 4], params)
            arrived[name] = step
        for output in llm.step():
            first.setdefault(output.request_id, step)
            if output.finished:
                ended[output.request_id] = step
    half = num_steps // 2
    num_ended = sum(step >= half for step in ended.values())
    num_in_time = sum(
        first.get(name, num_steps) - start < in_time
        for name, start in arrived.items()
        if half - in_time <= start < num_steps - in_time  # known at the end; as many steps
    )
    return 100 * num_ended / half, 100 * num_in_time / half
