"""Where does the time of a step go? Shares of its parts, for a batch of prompts and for decodes.

    seconds = measure_parts(llm, batch=32)        {"prefill": {"schedule": ..., "model": ..., ...},
                                                   "decode": {...}}
    shares("A step", {"decode, 32": seconds["decode"]})      a bar for each entry, 100% long
    recorded_parts("notebooks/results")           the same of a recorded run of nanoserve/bench

Times depend on the machine and on what else it does; shares and ratios less so.

vLLM: `vllm bench latency --profile`, with PyTorch's profiler.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from nanoserve import LLM, SamplingParams
from nanoserve.extras.trace.style import STEP_COLOURS, label, panels, show
from nanoserve.extras.trace.timer import PARTS, StepTimer


def measure_parts(
    llm: LLM, batch: int, prompt_len: int = 32, num_output: int = 12, rounds: int = 7
) -> dict[str, dict[str, float]]:
    """Seconds of each part of a step: of steps that compute `batch` prompts, and of the decode
    steps behind them; medians over all steps of their kind, so that a moment in which another
    program runs does not count. A first round, to warm up, is left out. The engine must have room
    for all prompts in one step, and no prefix cache (which would leave nothing to compute)."""
    params = SamplingParams(temperature=0, max_tokens=num_output, ignore_eos=True, detokenize=False)
    timer, prompt = StepTimer(llm), [100 + place % 900 for place in range(prompt_len)]
    found: dict[str, list[dict[str, float]]] = {}
    with closing(timer):
        for _ in range(1 + rounds):
            for number in range(batch):
                llm.add_request(f"X{number}", prompt, params)
            phase = "prefill"
            while llm.has_unfinished_requests():
                timer.reset()
                llm.step()
                found.setdefault(phase, []).append(timer.seconds)
                phase = "decode"
    return {
        phase: {part: statistics.median(s[part] for s in steps[skipped:]) for part in PARTS}
        for (phase, steps), skipped in zip(found.items(), (1, num_output - 1), strict=True)
    }


def recorded_parts(folder: str | Path) -> dict[str, dict[str, float]]:
    """Seconds of each part of a mean step, from the first file of the folder that holds the
    suite "steps" of nanoserve/bench: {"recorded, 32": parts}. {} if there is none."""
    for file in sorted(Path(folder).glob("*.json")):
        suite = json.loads(file.read_text("utf-8"))["suites"].get("steps")
        if suite and suite["rows"]:
            ms = suite["rows"][0]["parts_ms"]
            parts = {part: ms[part] / 1e3 for part in PARTS}
            return {f"recorded, {suite['num_requests']}": parts}
    return {}


def shares(title: str, seconds: Mapping[str, Mapping[str, float]]) -> None:
    """A horizontal bar for each entry (name -> part -> seconds), divided by the parts' shares."""
    [ax] = panels(1, 0.5 * len(seconds) + 0.9, title)
    left = [0.0] * len(seconds)
    for part in PARTS:
        widths = [parts[part] / sum(parts.values()) for parts in seconds.values()]
        style = {"color": STEP_COLOURS[part], "edgecolor": "white", "label": part}
        ax.barh(range(len(left)), widths, 0.74, left, **style)
        for row, width in enumerate(widths):
            if width >= 0.03:
                label(ax, left[row] + width / 2, row, f"{width:.0%}", 8.5)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    ax.set_yticks(range(len(left)), list(seconds), fontsize=9)
    ax.set(xlim=(0, 1), xticks=[], ylim=(len(left) - 0.5, -0.5))
    ax.tick_params(axis="y", length=0)
    ax.spines[:].set_visible(False)
    ax.get_figure().legend(loc="outside lower left", ncols=5, frameon=False, fontsize=8.5)
    show()


def print_operators(run: Callable[[], object], number: int = 6) -> None:
    """PyTorch's operators that take most time in `run()`, by torch.profiler: share, calls, name."""
    from torch.profiler import ProfilerActivity, profile

    with _no_stderr(), profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    events = sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total)
    whole = sum(event.self_cpu_time_total for event in events)
    for event in events[:number]:
        share = event.self_cpu_time_total / whole
        print(f"{share:6.1%}  {event.count:>6} calls  {event.key}")


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Drop what C++ code writes to this process's stderr: the profiler reports its own start."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
