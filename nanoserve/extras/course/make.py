"""What does a student get?

    OUT/
      nanoserve/          the package; the functions of the chosen labs have holes
      tests/              the checks of these labs, for pytest and a debugger
      handouts/           a page or two per lab, English and Chinese
      requirements.txt    the versions that this was tried with
      setup.cfg           pip install --no-deps -e .
      answers.json, ...   what a student writes for the labs without holes
      course.json         labs, variant, and of which version of nanoserve
      README.md           the first five minutes

    $ cd OUT && python -m nanoserve course check && python -m nanoserve course grade

No solution is in it: no history, no caches, no wheels, no tests and no notebooks of the repository,
and no second copy of a function that was cut (`find_leaks` looks for the lines of each body).

In such a tree `grade` runs the behaviours on the tree itself, because the right engine is not
there: a task that calls an unwritten one says so. The lecturer's `grade` takes each function alone.

vLLM: none.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from nanoserve import __version__
from nanoserve.extras.course import holes
from nanoserve.extras.course.grader import ROOT
from nanoserve.extras.course.spec import Lab, Setting, Task

HANDOUTS = ROOT / "notebooks" / "course"
COURSE_FILE = "course.json"
SUFFIXES = {".py", ".cpp", ".json", ".jinja", ".safetensors", ".md", ".html", ".txt", ".svg"}
# Parts of the package that no lab needs, or that hold what a lab asks for.
LEFT_OUT = (
    "bench",
    "extras/sabotage.py",
    "extras/course/mutants.py",  # also the engines of the bug hunt
    "extras/lesson.py",
    "extras/cases.py",
    "demo/training",
)
PACKAGES = ("pytest", "tqdm")
TORCH_PACKAGES = ("torch", "transformers", "safetensors", "numpy")
MARKERS = {"triton": '; sys_platform == "linux"'}  # packages that do not exist everywhere
MOST_COMMON_LINES = 2  # of a cut body that another file may have, one behind the other

README = """# Your engine

{title}

```bash
python -m venv venv && . venv/bin/activate        # Windows: venv\\Scripts\\activate
pip install -r requirements.txt
pip install --no-deps -e .
python -m nanoserve course check                  # is this machine ready?
python -m nanoserve course grade                  # what is right so far?
python -m pytest -k share --pdb                   # the same checks, with a debugger
```

The holes, to be written in the order of their numbers:

{files}

Each function keeps its signature and its docstring, which is the specification. Write its body. Put
helpers and imports inside the function: only the listed functions are graded.
"""

TESTS = '''"""The checks of the labs as tests: pytest -k oldest_first --pdb"""

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"

from nanoserve.extras.course.later import HOLES, filled
from nanoserve.extras.course.make import read_course
from nanoserve.extras.course.spec import load_labs

CASES = [
    pytest.param(lab, each, id=f"{task.number} {each.name}")
    for lab in load_labs(read_course()["labs"])
    for task in lab.tasks
    for each in task.behaviours
]


@pytest.mark.parametrize(("lab", "behaviour"), CASES)
def test_it(lab, behaviour):
    with filled(lab.number):
        try:
            behaviour.check(*[0] * behaviour.is_property)
        except NotImplementedError as error:
            if str(error) not in HOLES.values():
                raise
            pytest.skip(f"needs {error}, of a later lab")
'''
PYTEST = "[pytest]\ntestpaths = tests\npythonpath = .\naddopts = -q\n"

OWN_FILES = """
Files that you write yourself, and that are graded as they are:

{files}
"""


def make(out: Path, labs: list[Lab], variant: str = "") -> list[Path]:
    """Write a student tree. Returns the files with holes. Raises ValueError if `out` is not empty,
    or if a solution would be left in it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty. Give a new folder.")
    package = out / "nanoserve"
    shutil.copytree(ROOT / "nanoserve", package, ignore=_ignore)
    changed: dict[str, list[Task]] = {}
    for lab in labs:
        for task in lab.tasks:
            name = task.module.replace(".", "/") + ".py"
            file = out / name
            file.write_text(cut_file(file, task.name, task.message), encoding="utf-8")
            changed.setdefault(name, []).append(task)
    bodies = {
        task.name: body_of((ROOT / (task.module.replace(".", "/") + ".py")), task.name)
        for lab in labs
        for task in lab.tasks
    }
    if leaks := find_leaks(out, bodies):
        raise ValueError(f"the solution of {leaks[0][0]} is also in {leaks[0][1]}.")
    own = own_files(labs, variant)
    for name, text in own.items():
        (out / name).write_text(text, encoding="utf-8")
    write_around(out, labs, variant, changed, list(own))
    return [out / name for name in changed]


def own_files(labs: Iterable[Lab], variant: str) -> dict[str, str]:
    """What a student starts the labs without holes with: name -> text. Of two labs that want the
    same file, the first one has it (answers.json of lab 0 also says who the student is)."""
    files: dict[str, str] = {}
    for lab in labs:
        if lab.exercise is not None:
            files = lab.exercise.get_files(Setting(term=variant)) | files
    return files


def _ignore(folder: str, names: list[str]) -> list[str]:
    """What copytree leaves out."""
    base = Path(folder).relative_to(ROOT / "nanoserve")
    return [
        name
        for name in names
        if name.startswith((".", "__pycache__"))
        or (base / name).as_posix() in LEFT_OUT
        or ((Path(folder) / name).is_file() and Path(name).suffix not in SUFFIXES)
        or (Path(folder) / name).is_symlink()
    ]


def cut_file(file: Path, name: str, message: str) -> str:
    """The source of a file with one more hole."""
    return holes.cut(file.read_text(encoding="utf-8"), name, message)


def body_of(file: Path, name: str) -> list[str]:
    """The lines of a function's body, without docstring, comments and indentation."""
    function = holes.find(file.read_text(encoding="utf-8"), name)
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return [line.strip() for node in body for line in ast.unparse(node).splitlines()]


def find_leaks(out: Path, bodies: dict[str, list[str]]) -> list[tuple[str, Path]]:
    """(function, file) where a body of more than MOST_COMMON_LINES lines still is in a file."""
    leaks = []
    long = {name: "\n".join(body) for name, body in bodies.items() if len(body) > MOST_COMMON_LINES}
    words = {name: set(re.findall(r"[A-Za-z_]\w*", text)) for name, text in long.items()}
    for file in sorted(out.rglob("*")):
        if not file.is_file() or file.suffix in {".safetensors", ".svg"}:
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        known = set(re.findall(r"[A-Za-z_]\w*", text))
        candidates = [name for name in long if words[name] <= known]
        if candidates and file.suffix == ".py":
            text = ast.unparse(ast.parse(text))
        flat = re.sub(r"\s+", "", text)
        for name in candidates:
            if re.sub(r"\s+", "", long[name]) in flat:
                leaks.append((name, file.relative_to(out)))
    return leaks


def pinned(packages: Iterable[str]) -> list[str]:
    """Lines of a requirements file: the versions that are installed here."""
    lines = []
    for name in packages:
        try:
            number = version(name).partition("+")[0]  # not the build's own suffix
        except PackageNotFoundError as error:
            raise ValueError(
                f"{name} is not installed; the kit pins what it was made with."
            ) from error
        lines.append(f"{name}=={number}{MARKERS.get(name, '')}")
    return lines


def write_around(
    out: Path, labs: list[Lab], variant: str, files: dict[str, list[Task]], own: list[str]
) -> None:
    """The files beside the package. files: name -> its holes; own: those that a student writes."""
    needs_torch = any(lab.needs_torch for lab in labs)
    packages = [*PACKAGES, *(TORCH_PACKAGES if needs_torch else ())]
    packages += dict.fromkeys(package for lab in labs for package in lab.packages)
    (out / "requirements.txt").write_text("\n".join(pinned(packages)) + "\n", encoding="utf-8")
    shutil.copy(ROOT / "setup.cfg", out / "setup.cfg")
    (out / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    )
    if files:
        (out / "tests").mkdir()
        (out / "tests" / "test_labs.py").write_text(TESTS, encoding="utf-8")
        (out / "pytest.ini").write_text(PYTEST, encoding="utf-8")
    course = {"labs": [lab.number for lab in labs], "variant": variant, "version": __version__}
    (out / COURSE_FILE).write_text(json.dumps(course, indent=1) + "\n", encoding="utf-8")
    title = ", ".join(f"lab {lab.number} ({lab.title})" for lab in labs)
    holes_of = {
        name: ", ".join(f"{task.number} `{task.name}`" for task in tasks)
        for name, tasks in files.items()
    }
    listed = "\n".join(f"- `{name}`: {text}" for name, text in holes_of.items()) or "(none)"
    text = README.format(title=title, files=listed)
    if own:
        text += OWN_FILES.format(files="\n".join(f"- `{name}`" for name in own))
    (out / "README.md").write_text(text, encoding="utf-8")
    handouts = out / "handouts"
    handouts.mkdir()
    for lab in labs:
        for file in HANDOUTS.glob(f"lab{lab.number}[.-]*md"):
            shutil.copy(file, handouts / file.name)


def read_course(root: Path = ROOT) -> dict[str, Any] | None:
    """What this tree was made as; None if it is no student's tree."""
    file = root / COURSE_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
