"""Do the handouts agree with the labs, and the Chinese ones with the English ones?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nanoserve.extras.course.make import HANDOUTS
from nanoserve.extras.course.spec import load_labs

ENGLISH = sorted(HANDOUTS.glob("lab*[0-9].md"), key=lambda file: int(file.stem[3:]))
NUMBERS = [int(file.stem[3:]) for file in ENGLISH]


def tasks_in(text: str) -> list[list[str]]:
    """Cells of the rows that begin with the number of a task."""
    rows = re.findall(r"(?m)^\| (\d+\.\d+) \| (.*) \| ([\d.]+) \|$", text)
    return [[number, name.strip("`"), points] for number, name, points in rows]


@pytest.mark.parametrize("file", ENGLISH, ids=lambda file: file.stem)
def test_a_handout_lists_the_tasks_of_its_lab(file: Path) -> None:
    number = int(file.stem[3:])
    lab_module = Path(load_labs.__code__.co_filename).parent / "labs"
    if not list(lab_module.glob(f"*_{number}.py")):
        pytest.skip(f"there is no lab {number}")
    source = next(lab_module.glob(f"*_{number}.py")).read_text("utf-8")
    if "needs_torch=True" in source:
        pytest.importorskip("torch")
    [lab] = load_labs([number])
    text = file.read_text("utf-8")
    assert text.startswith(f"# Lab {number}: {lab.title}\n")
    listed = [[each.number, each.name, f"{each.points:g}"] for each in lab.tasks or lab.get_tasks()]
    assert tasks_in(text) == listed
    assert re.search(rf"course grade .*--labs {number}\b", text)


@pytest.mark.parametrize("file", [*ENGLISH, HANDOUTS / "README.md"], ids=lambda file: file.stem)
def test_the_chinese_twin_says_the_same(file: Path) -> None:
    twin = file.with_suffix(".zh-CN.md")
    ours, theirs = (each.read_text("utf-8") for each in (file, twin))
    assert twin.name in ours.splitlines()[2]
    assert file.name in theirs.splitlines()[2]
    code = [re.findall(r"(?ms)^```\w*\n.*?^```$", text) for text in (ours, theirs)]
    assert code[1] == code[0]
    prose = [re.sub(r"(?ms)^```.*?^```$", "", text) for text in (ours, theirs)]
    spans = [sorted(set(re.findall(r"`[^`\n]+`", text))) for text in prose]
    assert spans[1] == spans[0]
    for mark in ("## ", "- ", "| ", "|---"):
        counts = [len(re.findall(rf"(?m)^{re.escape(mark)}", text)) for text in prose]
        assert counts[1] == counts[0], mark
    assert tasks_in(theirs) == tasks_in(ours)
