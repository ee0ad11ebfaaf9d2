"""A thousand bad and weird inputs: each ends with a clear error, or is served.

The inputs stand in bad_inputs.py. Each runs in a process with limits of time and memory; after it,
the engine beside it must say what it said before. All of that is slow:

    python tests/test_bad_inputs.py                  run all, print what did not end well
    python tests/test_bad_inputs.py chat template    only these groups
    python tests/test_bad_inputs.py --update         and write the table (the rows of the groups
                                                     that ran) into tests/README.md
"""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from bad_inputs import GROUPS, NAN, Bench, Case
from tqdm import tqdm

from nanoserve.tools.soak.judge import Verdict, is_clear, judge
from nanoserve.tools.soak.worker import Worker, WorkerFailed

README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- bad-inputs -->\n", "<!-- /bad-inputs -->"
SECONDS, MEGABYTES = 30.0, 3000.0  # for one case
# How a case may end. "silent": served, though it should have been refused; "refused": the other way
# round. "broken": the engine beside it was not right afterwards.
KINDS = ("clear", "served", "silent", "unclear", "refused", "hang", "memory", "crash", "broken")
GOOD = ("clear", "served")
# The columns of the table, and the kinds that each counts.
COLUMNS = {kind: (kind,) for kind in KINDS[:5]}
COLUMNS |= {"hang or memory": ("hang", "memory"), "crash or broken": ("crash", "broken")}


class Player:
    """The target of the worker: runs one case on a Bench that serves again and again."""

    def __init__(self) -> None:
        self.bench = Bench()
        self.cases = {name: list(make()) for name, make in GROUPS.items()}

    def __call__(self, group: str, number: int) -> tuple[Verdict, str]:
        """How the case ended, and what is wrong with the engine afterwards ("": nothing)."""
        case = self.cases[group][number]
        print(group, case.name, flush=True)
        verdict = judge(lambda: case.action(self.bench))
        trouble = self.bench.probe.check()
        if trouble:
            self.bench = Bench()
        return verdict, trouble


class Result(NamedTuple):
    """How a case ended: one of KINDS, and the message, the answer or the log."""

    case: Case
    kind: str
    text: str


def run_group(worker: Worker, group: str) -> list[Result]:
    """Run all cases of a group; the worker may be ended and made again on the way."""
    results: list[Result] = []
    for number, case in enumerate(tqdm(list(GROUPS[group]()), group, leave=False)):
        try:
            answer = worker.call(group, number, seconds=SECONDS, megabytes=MEGABYTES)
        except WorkerFailed as failed:
            kind = "crash" if failed.kind == "error" else failed.kind
            results.append(Result(case, kind, f"{failed}\n{failed.log}"))
        else:
            verdict, trouble = answer
            kind = "broken" if trouble else compare(case.expected, verdict.kind)
            results.append(Result(case, kind, trouble or verdict.text))
    return results


def compare(expected: str, kind: str) -> str:
    """The kind of a case that ended so, and should have ended as expected."""
    if expected == "either" or kind == expected or kind not in GOOD:
        return kind
    return "silent" if kind == "served" else "refused"


def describe(results: list[Result]) -> str:
    """The counts, and each case that did not end well."""
    counts = Counter(result.kind for result in results)
    lines = [f"{len(results)} tried: " + ", ".join(f"{n} {kind}" for kind, n in counts.items())]
    for result in results:
        if result.kind not in GOOD:
            lines.append(f"  {result.kind}: {result.case.name}: {result.text}")
    return "\n".join(lines)


def make_table(rows: dict[str, list[int]]) -> str:
    """The generated part of tests/README.md, from the counts of each group: tried, then COLUMNS."""
    versions = f"Python {platform.python_version()}, torch {torch.__version__.partition('+')[0]}"
    today = datetime.now(timezone.utc).date()
    lines = [
        f"{today}, {versions}, transformers {transformers.__version__}, {os.cpu_count()} cores:",
        "",
        f"| group | tried | {' | '.join(COLUMNS)} |",
        "|---|" + "---|" * (len(COLUMNS) + 1),
    ]
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    for group, counts in {**rows, "**all**": total}.items():
        lines.append(f"| {group} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines) + "\n"


def read_table() -> dict[str, list[int]]:
    """The rows of the table: group -> tried, then COLUMNS. The last one, **all**, is their sum."""
    text = README.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert not cells or cells[0] == ["group", "tried", *COLUMNS]
    return {name: list(map(int, counts)) for name, *counts in cells[2:]}


def update_table(results: dict[str, list[Result]]) -> None:
    """Write the rows of these groups; the other rows stay."""
    rows = read_table()
    for group, its_results in results.items():
        counts = Counter(result.kind for result in its_results)
        sums = (sum(counts[kind] for kind in kinds) for kinds in COLUMNS.values())
        rows[group] = [len(its_results), *sums]
    table = make_table({group: rows[group] for group in GROUPS if group in rows})
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    new = before + BEGIN + table + END + rest.partition(END)[2]
    README.write_text(new, encoding="utf-8")


# -- the long run --


@pytest.fixture(scope="module")
def worker() -> Any:
    worker = Worker(Player)
    yield worker
    worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_input_ends_well(worker: Worker, group: str) -> None:
    results = run_group(worker, group)
    print(describe(results))
    assert not [result for result in results if result.kind not in GOOD], describe(results)


# -- the harness itself --


def test_the_table_has_all_groups_and_adds_up() -> None:
    """The figures are of another machine; the groups, the numbers of cases and the sums are not."""
    counts = read_table()
    total = counts.pop("**all**")
    assert {name: tried for name, (tried, *_) in counts.items()} == {
        name: len(list(make())) for name, make in GROUPS.items()
    }
    assert total == [sum(column) for column in zip(*counts.values(), strict=True)]
    assert all(tried == sum(ends) for tried, *ends in counts.values())


def test_how_an_input_ended() -> None:
    """A `raise` of nanoserve is clear; what comes out of a library, NaN and silence are not."""
    bench = Bench.__new__(Bench)  # no engine: the parameters are refused before one is asked
    assert judge(lambda: bench.generate(temperature=NAN)).kind == "clear"
    assert judge(lambda: bench.generate(no_such_field=1)).kind == "clear"
    assert judge(lambda: torch.zeros(2).view(3)).kind == "unclear"
    assert judge(lambda: int("x")).kind == "unclear"
    assert judge(lambda: sys.exit()).kind == "unclear"
    assert judge(lambda: 5).kind == "served"
    assert not is_clear(ValueError())
    kinds = [compare(*pair) for pair in (("clear", "served"), ("served", "clear"))]
    assert kinds == ["silent", "refused"]
    assert compare("either", "clear") == compare("clear", "clear") == "clear"
    assert compare("served", "unclear") == compare("either", "unclear") == "unclear"


def main(arguments: list[str]) -> None:
    os.environ["NANOSERVE_LOGGING_LEVEL"] = "CRITICAL"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    names = [name for name in arguments if name != "--update"] or list(GROUPS)
    worker = Worker(Player)
    results: dict[str, list[Result]] = {}
    for name in names:
        results[name] = run_group(worker, name)
        print(name, describe(results[name]), flush=True)
    worker.close()
    if "--update" in arguments:
        update_table(results)


if __name__ == "__main__":
    main(sys.argv[1:])
