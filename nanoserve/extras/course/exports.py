"""How does a grading service run the kit?

    $ nanoserve course export gradescope autograder.zip --labs 1,2,3 --hidden private/ --seed 7

    autograder.zip
      setup.sh             once, when the image is built: a venv with the pinned versions
      run_autograder       for each submission: `nanoserve course grade`, then results.json
      requirements.txt
      nanoserve/           the engine with its solutions: it stays on the service
      hidden/              the lecturer's own checks

Gradescope unpacks it to /autograder/source, puts what a student has uploaded into
/autograder/submission, and reads /autograder/results/results.json. A student uploads the folder
nanoserve/ of their tree, or only the files with holes, in their folders.

    $ nanoserve course export nbgrader quiz.ipynb   then: nbgrader generate_assignment
    $ nanoserve course export otter quiz.ipynb      then: otter assign quiz.ipynb dist

These write the lecturer's notebook of the trace quiz. Its first cell names the student, and the
questions are made when it runs; the service's own command cuts solutions and hidden tests out of
what students get. There, too, the engine computes the answers in the student's own kernel: such a
notebook is for practice, and a secret cannot be kept in it.

Left out: the other labs as notebooks. They are files, not cells.

nbgrader: https://nbgrader.readthedocs.io
Otter: https://otter-grader.readthedocs.io
Gradescope: https://gradescope-autograders.readthedocs.io
"""

from __future__ import annotations

import json
import shlex
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanoserve.extras.course.grader import ROOT
from nanoserve.extras.course.make import PACKAGES, SUFFIXES, TORCH_PACKAGES, own_files, pinned
from nanoserve.extras.course.spec import Lab, load_labs

CPU_TORCH = " --extra-index-url https://download.pytorch.org/whl/cpu"
SETUP = """#!/usr/bin/env bash
# Once, when the image is built. AUTOGRADER is another folder than /autograder in a trial run only.
set -euo pipefail
base="${{AUTOGRADER:-/autograder}}"
python3 -c "import ensurepip" || {{ apt-get update && apt-get install -y python3 python3-venv; }}
python3 -m venv "$base/venv"
"$base/venv/bin/pip" install --no-cache-dir -r "$base/source/requirements.txt"{index}
"""
RUN = """#!/usr/bin/env bash
# For each submission.
set -uo pipefail
base="${{AUTOGRADER:-/autograder}}"
cd "$base/source"
mkdir -p "$base/results"
PYTHONPATH="$base/source" "$base/venv/bin/python" -m nanoserve course grade "$base/submission" \\
    {options} --metadata "$base/submission_metadata.json" --json "$base/results/results.json"
if [ ! -s "$base/results/results.json" ]; then
    printf '{{"score": 0, "output": "%s"}}\\n' \\
        "Nothing was graded. Upload {wanted} of your tree, as a zip." \\
        > "$base/results/results.json"
fi
"""


def export_gradescope(
    file: Path, labs: list[Lab], hidden: dict[str, str], term: str = "", options: Sequence[str] = ()
) -> None:
    """Write the zip. hidden: file name -> source, of the lecturer's own checks. term: of the
    variant, or "". options: more arguments of `grade`, such as ["--seed", "7"]. Raises ValueError
    if the file exists."""
    if file.exists():
        raise ValueError(f"{file} exists. Give a new file.")
    needs_torch = any(lab.needs_torch for lab in labs)
    packages = [*PACKAGES, *(TORCH_PACKAGES if needs_torch else ())]
    packages += dict.fromkeys(package for lab in labs for package in lab.packages)
    arguments = ["--labs", ",".join(str(lab.number) for lab in labs), *options]
    arguments += ["--variant", term] * bool(term) + ["--hidden", "hidden"] * bool(hidden)
    wanted = ["the folder nanoserve/"] * any(lab.tasks for lab in labs) + [*own_files(labs, term)]
    texts = {
        "setup.sh": SETUP.format(index=CPU_TORCH * needs_torch),
        "run_autograder": RUN.format(options=shlex.join(arguments), wanted=" and ".join(wanted)),
        "requirements.txt": "\n".join(pinned(packages)) + "\n",
        **{f"hidden/{name}": source for name, source in hidden.items()},
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in texts.items():
            entry = zipfile.ZipInfo(name, date_time=(2020, 1, 1, 0, 0, 0))
            entry.external_attr = (0o755 if name in ("setup.sh", "run_autograder") else 0o644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)
        for path in sorted((ROOT / "nanoserve").rglob("*")):
            if path.is_file() and path.suffix in SUFFIXES and "__pycache__" not in path.parts:
                archive.write(path, path.relative_to(ROOT))


FIRST = 'STUDENT = "..."  # your id'
SHEET = """from nanoserve.extras.course.labs import quiz_0

print(quiz_0.make_quiz(STUDENT).sheet())"""
IS_ANSWERED = 'assert type(answer_{0}) is int, "question {0}: the answer is a whole number"'
SOLUTION = "answer_{0} = quiz_0.make_quiz(STUDENT).questions[{0} - 1].answer"
HIDDEN = "quiz_0.check(STUDENT, {0}, answer_{0})"
INTRODUCTION = """# Trace quiz

Write your id into the next cell, run it and the one behind it, and answer the questions that it
prints: one whole number in each cell, `answer_1 = 12`."""


def export_notebook(file: Path, service: str) -> None:
    """Write the lecturer's notebook of the quiz. service: "nbgrader" or "otter". Raises ValueError
    if the file exists."""
    if file.exists():
        raise ValueError(f"{file} exists. Give a new file.")
    [lab] = load_labs([0])
    [task] = lab.get_tasks()
    points = {number: each.points for number, each in enumerate(task.behaviours, start=1)}
    cells = {"nbgrader": nbgrader_cells, "otter": otter_cells}[service](points)
    for number, each in enumerate(cells):
        each["id"] = f"cell-{number}"
    notebook = {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


def cell(kind: str, source: str, **metadata: Any) -> dict[str, Any]:
    """A cell of a notebook. kind: "code", "markdown" or "raw"."""
    more: dict[str, Any] = {"outputs": [], "execution_count": None} if kind == "code" else {}
    return {"cell_type": kind, "metadata": metadata, "source": source, **more}


def nbgrader_cells(points: dict[int, float]) -> list[dict[str, Any]]:
    """A locked cell with the sheet; for each question a cell to answer in and one with tests."""

    def mark(grade_id: str, **marks: Any) -> dict[str, Any]:
        none = {"grade": False, "solution": False, "locked": False, "task": False}
        return {"schema_version": 3, "grade_id": grade_id, **none, **marks}

    cells = [
        cell("code", FIRST),
        cell("markdown", INTRODUCTION),
        cell("code", SHEET, nbgrader=mark("sheet", locked=True)),
    ]
    for number, each in points.items():
        solution = f"### BEGIN SOLUTION\n{SOLUTION.format(number)}\n### END SOLUTION"
        hidden = f"### BEGIN HIDDEN TESTS\n{HIDDEN.format(number)}\n### END HIDDEN TESTS"
        tests = f"{IS_ANSWERED.format(number)}\n{hidden}"
        marks = mark(f"test_{number}", grade=True, locked=True, points=each)
        cells += [
            cell("markdown", f"## Question {number}"),
            cell("code", solution, nbgrader=mark(f"answer_{number}", solution=True)),
            cell("code", tests, nbgrader=marks),
        ]
    return cells


def otter_cells(points: dict[int, float]) -> list[dict[str, Any]]:
    """The same between raw cells. That a question is answered is worth nothing."""
    cells = [
        cell("raw", "# ASSIGNMENT CONFIG\nname: quiz\nexport_cell:\n  pdf: false"),
        cell("code", FIRST),
        cell("markdown", INTRODUCTION),
        cell("code", SHEET),
    ]
    for number, each in points.items():
        config = '""" # BEGIN TEST CONFIG\npoints: {:g}\nhidden: {}\n""" # END TEST CONFIG\n'
        seen, unseen = config.format(0, "false"), config.format(each, "true")
        cells += [
            cell("raw", f"# BEGIN QUESTION\nname: q{number}"),
            cell("markdown", f"## Question {number}"),
            cell("raw", "# BEGIN SOLUTION"),
            cell("code", f"{SOLUTION.format(number)} # SOLUTION"),
            cell("raw", "# END SOLUTION"),
            cell("raw", "# BEGIN TESTS"),
            cell("code", seen + IS_ANSWERED.format(number)),
            cell("code", unseen + HIDDEN.format(number)),
            cell("raw", "# END TESTS"),
            cell("raw", "# END QUESTION"),
        ]
    return cells
