"""The notebooks run, follow the house style, and are stored with their outputs.

`python tests/test_notebooks.py --update [NAME ...]` runs the notebooks whose names begin so (or
all) and stores their outputs.

A run takes half a minute, so a plain `pytest` runs one notebook; `pytest -m slow` runs the others.
All other tests here read the stored files. Cells have tags: `varies` (the output depends on the
machine), `exercise` (the reader writes code), `slide` (its picture stands in the README).
"""

from __future__ import annotations

import ast
import base64
import io
import os
import re
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanoserve"
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ALWAYS_RUN = "00_why_pages"
VLLM = {"V0": os.environ.get("VLLM_0_6", ""), "V1": os.environ.get("VLLM_0_32", "")}
MAX_CELLS, MAX_LINES, MAX_BYTES = 25, 15, 600_000
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<])/(home|Users|root|tmp|usr|opt|work|var)/|\b[A-Z]:\\")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
REQUEST_NAME = re.compile(r"[A-GXY]\d*")  # the cast, open questions (E to G), and fillers
SECONDS = 120  # for one cell; a kernel starts slowly on a busy machine

sys.path.insert(0, str(FOLDER / "pictures"))
toc = import_module("toc")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
each_run = pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, id=p.stem, marks=[] if p.stem == ALWAYS_RUN else pytest.mark.slow)
        for p in NOTEBOOKS
    ],
)


# -- running --


def execute(notebook: Any, folder: Path) -> Any:
    """Run the cells in a fresh kernel of this Python; the same notebook, with new outputs.

    If a cell fails, this raises nbclient's CellExecutionError, which shows the cell.
    """
    clean(notebook)
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        km=this_python(),
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,  # what a cell prints is one output, however it arrives
    )
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # this checkout
    backend = "module://matplotlib_inline.backend_inline"
    client.execute(env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MPLBACKEND": backend})
    return notebook


def this_python() -> Any:
    """A kernel manager of this Python: an installed kernelspec may be another environment's."""
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    manager = AsyncKernelManager()
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    command.append("--IPKernelApp.log_level=ERROR")
    manager._kernel_spec = KernelSpec(argv=command, display_name="Python 3", language="python")
    return manager


def clean(notebook: Any) -> None:
    """Remove the outputs, and metadata that depends on the machine or the time."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None


NAMES_CELL = """
from nanoserve import LLMEngine as _Engine
_names, _add = [], _Engine.add_request
def _note(engine, request_id, *args, **options):
    _names.append(request_id)
    return _add(engine, request_id, *args, **options)
_Engine.add_request = _note
"""


@each_run
def test_runs(path: Path) -> None:
    """No cell raises, and none writes to stderr. The texts are those that are stored. Each
    solution, run behind its stub, is right, and changes nothing in later cells."""
    stored = read(path)
    notebook = read(path)
    solved = {}
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if is_exercise(cell):
            number = check_numbers(cell)[-1]
            solved[number] = nbformat.v4.new_code_cell(solutions(stored)[number])
            cells.append(solved[number])
    names = nbformat.v4.new_code_cell("sorted(set(_names))")
    notebook.cells = [*cells[:2], nbformat.v4.new_code_cell(NAMES_CELL), *cells[2:], names]
    execute(notebook, path.parent)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", f"stderr in cell {cell.id}: {output.text}"
    for number, cell in solved.items():
        [*_, text] = "\n".join(texts_of(cell.outputs)).strip().splitlines()
        assert text.startswith(f"{number} right"), f"the solution of {number}: {text}"
    fresh = {cell.id: cell for cell in notebook.cells}
    for cell in stored.cells:
        if cell.cell_type == "code" and "varies" not in tags(cell):
            new, old = texts_of(fresh[cell.id].outputs), texts_of(cell.outputs)
            assert new == old, (
                f"cell {cell.id}: python tests/test_notebooks.py --update {path.stem}"
            )
    used = ast.literal_eval("".join(texts_of(names.outputs)))
    others = {name for name in used if not REQUEST_NAME.fullmatch(name)}
    assert not others, (
        f"requests {others}: the cast of all notebooks is A, B, C, D, fillers X and Y"
    )


# -- reading --


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in read(path).cells if cell.cell_type == "code"]


def markdown(notebook: Any) -> str:
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def tags(cell: Any) -> list[str]:
    return list(cell.metadata.get("tags", []))


def is_exercise(cell: Any) -> bool:
    return cell.cell_type == "code" and "exercise" in tags(cell)


def parse(cell: Any) -> ast.Module:
    """The Python of a code cell. (IPython's own commands, such as %pip, become `pass`.)"""
    return ast.parse(re.sub(r"(?m)^(\s*)[%!].*", r"\1pass", cell.source))


def texts_of(outputs: list[Any]) -> list[str]:
    """The texts in these outputs."""
    texts = []
    for output in outputs:
        texts.append(output.get("text", ""))
        data = sorted(output.get("data", {}).items())  # a stored file has them in this order
        texts += [text for kind, text in data if kind.startswith("text/")]
        texts += output.get("traceback", [])
    return texts


def check_numbers(cell: Any) -> list[str]:
    """The numbers of the calls of lesson.check in a cell: ["2.1"]."""
    calls = [node for node in ast.walk(parse(cell)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func) == "lesson.check"]
    return [call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)]


def solutions(notebook: Any) -> dict[str, str]:
    """Number of an exercise -> the cell that solves it."""
    summary = r"<summary>[^<]*?(Q?\d+\.\d+)[^<]*</summary>\s*```python\n(.*?)```"
    return dict(re.findall(summary, markdown(notebook), re.DOTALL))


# -- the form --


def test_there_are_notebooks() -> None:
    assert [path.stem[:2] for path in NOTEBOOKS] == [f"{i:02}" for i in range(len(NOTEBOOKS))]
    assert ALWAYS_RUN in [path.stem for path in NOTEBOOKS]


@each_notebook
def test_size(path: Path) -> None:
    """Short enough for twenty minutes; each cell fits a screen and has an id of its own."""
    notebook = read(path)
    nbformat.validate(notebook)
    assert len(notebook.cells) <= MAX_CELLS
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    too_long = [cell.id for cell in code if len(cell.source.splitlines()) > MAX_LINES]
    assert not too_long, f"more than {MAX_LINES} lines in {too_long}"
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert notebook.metadata.kernelspec.name == "python3"
    assert path.stat().st_size < MAX_BYTES


@each_notebook
def test_opening(path: Path) -> None:
    """The title in both languages, a table (documents, vLLM, here), and the one set-up cell."""
    title, set_up, *_ = read(path).cells
    heading = re.match(r"# (\d+)\. [^·\n]+ · (.+)", title.source)
    assert heading
    assert int(heading[1]) == int(path.stem[:2])
    assert CHINESE.search(heading[2])
    assert "> **中文**" in title.source
    [[head, *rows]] = [t for t in markdown_tables(title.source) if any("vLLM" in c for c in t[0])]
    assert len(head) == 3
    assert rows
    assert set_up.source == code_cells(NOTEBOOKS[0])[0].source, "the set-up cell differs"


@each_notebook
def test_every_section_has_a_chinese_summary(path: Path) -> None:
    _, *sections = re.split(r"(?m)^## ", markdown(read(path)))
    assert len(sections) >= 3
    assert [
        s.splitlines()[0]
        for s in sections
        if not re.search("> \\*\\*中文\\*\\*.*[\u4e00-\u9fff]", s)
    ] == []


@each_notebook
def test_questions(path: Path) -> None:
    """At least two guesses before an answer, three to five exercises with solutions, a sabotage.
    All checks are numbered in their order; a Q tells them from the sections."""
    notebook = read(path)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    guesses = [cell for cell in code if re.search(r"(?m)^guess\w* = (None|\.\.\.)", cell.source)]
    assert len(guesses) >= 2
    assert any("lesson.broken(" in cell.source for cell in code)
    numbers = [number for cell in code for number in check_numbers(cell)]
    letter = "Q" if numbers[0].startswith("Q") else ""
    assert numbers == [f"{letter}{int(path.stem[:2])}.{i}" for i in range(1, len(numbers) + 1)]
    exercises = [cell for cell in code if is_exercise(cell)]
    assert 3 <= len(exercises) <= 5
    for cell in exercises:
        last = ast.unparse(parse(cell).body[-1])
        assert last.startswith("lesson.check("), f"exercise {cell.id} does not end in a check"
        solution = solutions(notebook)[check_numbers(cell)[-1]]
        assert check_numbers(nbformat.v4.new_code_cell(solution)) == check_numbers(cell)


@each_notebook
def test_imports_what_the_extra_installs(path: Path) -> None:
    """pip install "nanoserve[notebooks]" is enough."""
    allowed = {"nanoserve", "torch", "triton", "transformers", "safetensors", "numpy"}
    allowed |= {"matplotlib", "IPython"} | sys.stdlib_module_names
    for cell in code_cells(path):
        for node in ast.walk(parse(cell)):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= allowed, cell.id
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] in allowed, cell.id


@cache
def public_names() -> set[str]:
    """The functions and classes of nanoserve's modules, but for those that no notebook imports."""
    return {
        node.name
        for file in PACKAGE.rglob("*.py")
        if file.relative_to(PACKAGE).parts[0] not in ("bench", "demo", "tools")
        if file.relative_to(PACKAGE).parts[:2] != ("extras", "course")
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }


@each_notebook
def test_redefines_nothing(path: Path) -> None:
    """A notebook imports nanoserve; functions of the notebook have other names than its functions.
    (A method of a class of the reader's own may have the name of the method that it replaces.)"""
    taken = public_names()
    for cell in code_cells(path):
        for node in parse(cell).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                assert node.name not in taken, f"{node.name} in cell {cell.id} is nanoserve's"


# -- the tables --


@cache
def names_of_nanoserve() -> set[str]:
    """Every function, class and attribute that a module of nanoserve defines."""
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def markdown_tables(text: str) -> list[list[list[str]]]:
    """Tables as rows of cells, the head first, without the line of dashes."""
    tables = []
    for block in re.findall(r"(?m)(?:^\|.*\n?)+", text):
        rows = [
            [cell.strip() for cell in line.strip().strip("|").split("|")]
            for line in block.splitlines()
        ]
        tables.append([row for row in rows if set("".join(row)) - set("-: ")])
    return tables


def cells_about(text: str) -> list[tuple[str, str]]:
    """(who, cell) of all tables: who is "nanoserve", "V0", "V1" or "vLLM" (both, marked inside)."""
    found = []
    for head, *rows in filter(None, markdown_tables(text)):
        for row in rows:
            labels = head if any("vLLM" in cell for cell in head) else [row[0]] * len(row)
            for label, cell in zip(labels, row, strict=False):
                found += [(who, cell) for who in [owner(label)] if who]
    return found


def owner(label: str) -> str:
    """Whose names the column or row of this label holds."""
    if "vLLM" in label:
        versions = [version for version in VLLM if version in label]
        return versions[0] if len(versions) == 1 else "vLLM"
    is_ours = re.search(r"(?i)nanoserve|\bour|\bhere\b", label)
    return "nanoserve" if is_ours else ""


def spans(cell: str) -> list[str]:
    """What stands in backticks; a link to a file counts as its name."""
    return re.findall(r"`([^`]+)`", cell)


@each_notebook
def test_tables_name_what_exists(path: Path) -> None:
    """Our files exist, and the names behind a file too."""
    known = names_of_nanoserve()
    cells = [cell for who, cell in cells_about(markdown(read(path))) if who == "nanoserve"]
    found = [span for cell in cells for span in spans(cell)]
    assert found
    for span in found:
        if re.search(r"\.(py|md|cpp)$|/$", span):
            places = (PACKAGE / span, ROOT / span)
            assert any(place.exists() for place in places), span
        else:
            name = re.sub(r"\(.*", "", span)
            assert set(name.split(".")) <= known, span


@each_notebook
@pytest.mark.skipif(not all(VLLM.values()), reason="VLLM_0_6 and VLLM_0_32 name no folders")
def test_tables_name_what_vllm_has(path: Path) -> None:
    """A name belongs to the file before it; "V0:" and "V1:" say whose the file is. Without either,
    the file is in at least one of the two."""
    wrong = []
    for who, cell in cells_about(markdown(read(path))):
        version, source = who, ""
        for marker, span in re.findall(r"\b(V[01])\b|`([^`]+)`", cell if who[0] in "vV" else ""):
            if marker:
                version, source = marker, ""
            elif re.search(r"\.(py|cpp|cu|cuh)$|/$", span):
                versions = [version] if version in VLLM else list(VLLM)
                files = [Path(VLLM[v]) / span.removeprefix("vllm/") for v in versions]
                source = "".join(read_source(file) for file in files)
                wrong += [] if source else [f"{version} {span}"]
            else:
                name = re.sub(r"\(.*", "", span).split(".")[-1]
                wrong += (
                    [] if re.search(rf"\b{re.escape(name)}\b", source) else [f"{version} {span}"]
                )
    assert wrong == []


def read_source(place: Path) -> str:
    """The text of a file, or of all files of a folder; "" if there is none."""
    if place.is_dir():
        return "".join(file.read_text("utf-8") for file in sorted(place.rglob("*.py"))) or "(empty)"
    return place.read_text("utf-8") if place.is_file() else ""


# -- the stored outputs --


@each_notebook
def test_outputs_are_stored(path: Path) -> None:
    """A reader on the web sees a run: every cell in order, with what it says on any machine.
    If this fails: python tests/test_notebooks.py --update"""
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    _, *shown = cells
    for cell in shown:
        assert "execution" not in cell.metadata, f"cell {cell.id} stores when it ran"
        silent = (ast.Assign, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
        is_silent = all(isinstance(node, silent) for node in parse(cell).body)
        assert cell.outputs or is_silent, f"cell {cell.id} has no stored output"
        for text in texts_of(cell.outputs):
            assert not ABSOLUTE_PATH.search(text), f"an absolute path in cell {cell.id}: {text}"


@each_notebook
def test_one_picture_for_the_table_of_contents(path: Path) -> None:
    """One cell has the tag "slide", and a stored picture. Tags are known ones."""
    cells = read(path).cells
    assert {tag for cell in cells for tag in tags(cell)} <= {"exercise", "slide", "varies"}
    [slide] = [cell for cell in cells if "slide" in tags(cell)]
    assert any("image/png" in output.get("data", {}) for output in slide.outputs)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_table_of_contents_has_every_notebook(name: str) -> None:
    rows = [row for table in markdown_tables((FOLDER / name).read_text("utf-8")) for row in table]
    found = re.findall(r"pictures/toc/(\d\d)\.png.*?\((\w+)\.ipynb\)", "\n".join(map(str, rows)))
    assert found == [(path.stem[:2], path.stem) for path in NOTEBOOKS]


@each_notebook
def test_the_small_picture_is_the_slide(path: Path) -> None:
    """If this fails: python notebooks/pictures/toc.py"""
    from PIL import Image, ImageChops, ImageStat

    fresh = toc.make(path)
    stored = Image.open(FOLDER / "pictures" / "toc" / f"{path.stem[:2]}.png").convert("RGB")
    assert stored.size == fresh.size
    difference = ImageStat.Stat(ImageChops.difference(stored, fresh.convert("RGB")))
    assert max(difference.mean) < 2, "another picture"


# -- storing --


def with_fewer_colours(png: str) -> str:
    """The same picture (base64) with 128 colours: a quarter of the bytes in the repository."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(128)
    buffer = io.BytesIO()
    picture.save(buffer, "png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def update(names: list[str]) -> None:
    """Run the notebooks whose names begin so (none given: all), and store their outputs."""
    starts = tuple(Path(name).stem for name in names)
    for path in [path for path in NOTEBOOKS if not starts or path.stem.startswith(starts)]:
        notebook = execute(read(path), path.parent)
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = with_fewer_colours(output.data["image/png"])
        nbformat.write(notebook, path)
        print("stored", path.relative_to(ROOT))


if __name__ == "__main__":
    if sys.argv[1:2] != ["--update"]:
        sys.exit("usage: python tests/test_notebooks.py --update [NAME ...]")
    update(sys.argv[2:])
