"""The notebooks run, follow the house style, and are stored with their outputs.

`python tests/test_notebooks.py --update [NAME ...]` runs the notebooks whose names begin so (all, if
none is given) and stores their outputs.
"""

from __future__ import annotations

import ast
import base64
import io
import os
import re
import sys
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
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_LINES = 15
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/<])/(home|Users|root|tmp|usr|opt|work|var)/|\b[A-Z]:\\")
SECONDS = 120  # for one cell; a kernel starts slowly on a busy machine

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def execute(path: Path) -> Any:
    """Run a notebook in a fresh kernel of this Python; return the notebook with new outputs.

    If a cell fails, this raises nbclient's CellExecutionError, which shows the cell.
    """
    notebook = nbformat.read(path, as_version=4)
    clean(notebook)
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        km=this_python(),
        resources={"metadata": {"path": str(path.parent)}},
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


def code_cells(path: Path) -> list[Any]:
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]


def texts_of(outputs: list[Any]) -> list[str]:
    """The texts in these outputs."""
    texts = []
    for output in outputs:
        texts.append(output.get("text", ""))
        texts += [v for kind, v in output.get("data", {}).items() if kind.startswith("text/")]
        texts += output.get("traceback", [])
    return texts


def names_of_nanoserve() -> set[str]:
    """Every function, class and attribute that a module of nanoserve defines."""
    names: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
    return names


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@each_notebook
def test_runs(path: Path) -> None:
    """No cell raises (some hold assertions), and no cell writes to stderr."""
    for cell in execute(path).cells:
        for output in cell.get("outputs", []):
            assert output.get("name") != "stderr", f"stderr in cell {cell.id}: {output.text}"


@each_notebook
def test_style(path: Path) -> None:
    """Code cells are short, text cells are no fewer than code cells, and each cell has an id."""
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = code_cells(path)
    too_long = [cell.id for cell in code if len(cell.source.splitlines()) > CELL_LINES]
    assert not too_long, f"more than {CELL_LINES} lines in {too_long}"
    num_text = sum(cell.cell_type == "markdown" for cell in notebook.cells)
    assert num_text >= len(code), f"{num_text} text cells for {len(code)} code cells"
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    assert notebook.metadata.kernelspec.name == "python3"


@each_notebook
def test_redefines_nothing(path: Path) -> None:
    """A notebook imports nanoserve; functions of the notebook have other names."""
    taken = names_of_nanoserve()
    for cell in code_cells(path):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                assert node.name not in taken, f"{node.name} in cell {cell.id} is nanoserve's"


@each_notebook
def test_tables_name_what_exists(path: Path) -> None:
    """The tables of vLLM's and nanoserve's names follow a rename in nanoserve."""
    known = names_of_nanoserve()
    text = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    lines = re.findall(r"^\| nanoserve \|.*", text, re.MULTILINE)
    assert lines
    for span in re.findall(r"`([^`]+)`", "\n".join(lines)):
        if span.endswith(".py"):
            assert (PACKAGE / span).exists(), span
        else:
            assert set(span.split(".")) <= known, span


@each_notebook
def test_outputs_are_stored(path: Path) -> None:
    """A reader on the web sees a run: every cell in order, with an output that does not depend on
    the machine. If this fails: python tests/test_notebooks.py --update"""
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert "execution" not in cell.metadata, f"cell {cell.id} stores when it ran"
        assert cell.outputs, f"cell {cell.id} has no stored output"
        for text in texts_of(cell.outputs):
            assert not ABSOLUTE_PATH.search(text), f"an absolute path in cell {cell.id}: {text}"


def with_fewer_colours(png: str) -> str:
    """The same picture (base64) with 128 colours: a quarter of the bytes in the repository."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(128)
    buffer = io.BytesIO()
    picture.save(buffer, "png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def update(names: list[str]) -> None:
    """Run the notebooks whose names begin so (none given: all), and store their outputs."""
    chosen = [p for p in NOTEBOOKS if not names or p.stem.startswith(tuple(names))]
    for path in chosen:
        notebook = execute(path)
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
