"""How does one run notebooks without Jupyter, and what do students get?

    python -m nanoserve.teaching.notebooks store notebooks/03*.ipynb    store what they show
    python -m nanoserve.teaching.notebooks students mine/               a copy without outputs

Stored outputs are for readers: on GitHub nobody runs anything. A student's copy has none, so that
a prediction is one. A notebook and its Chinese edition, NAME.zh-CN.ipynb, have the same code cells
and so the same outputs: `store` runs the one and writes both.

Left out: magics, errors that are shown as outputs. (A cell that fails stops `store`.)
"""

from __future__ import annotations

import ast
import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

KINDS = {"image/svg+xml": "_repr_svg_", "text/markdown": "_repr_markdown_"}
NOTEBOOKS = Path(__file__).parent.parent.parent / "notebooks"


def read(file: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return notebook


def write(notebook: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(notebook, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cell(source: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell prints, and what its last line shows, as a notebook stores it."""
    body = ast.parse(source)
    shown: Any = None
    last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(body, "<cell>", "exec"), namespace)
        if isinstance(last, ast.Expr):
            shown = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(True)})
    if shown is not None:
        data = {"text/plain": [repr(shown)]}
        for kind, method in KINDS.items():
            if hasattr(shown, method):
                data[kind] = getattr(shown, method)().splitlines(True)
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def store(file: Path) -> None:
    """Run a notebook, and store the outputs in it and in its Chinese edition."""
    os.chdir(file.parent)
    notebook, namespace = read(file), {"__name__": "__main__"}
    for cell in code_cells(notebook):
        cell["outputs"] = run_cell("".join(cell["source"]), namespace)
    write(notebook, file)
    chinese = file.with_suffix(".zh-CN.ipynb")
    if chinese.exists():
        translated = read(chinese)
        for cell, same in zip(code_cells(translated), code_cells(notebook), strict=True):
            cell["outputs"] = same["outputs"]
        write(translated, chinese)


def copy_for_students(folder: Path) -> int:
    """Copy every notebook, without outputs. Returns how many these are. Raises ValueError if this
    would write over those of the readers."""
    if folder.resolve() == NOTEBOOKS:
        raise ValueError(f"{folder} holds the notebooks with outputs; name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    files = sorted(NOTEBOOKS.glob("*.ipynb"))
    for file in files:
        notebook = read(file)
        for cell in code_cells(notebook):
            cell["outputs"] = []
        write(notebook, folder / file.name)
    return len(files)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["store", *names] if names:
            for each in [Path(name).resolve() for name in names]:
                if not each.name.endswith(".zh-CN.ipynb"):
                    store(each)
        case ["students", name]:
            print(f"{copy_for_students(Path(name))} notebooks are in {Path(name).resolve()}")
        case _:
            sys.exit(__doc__)
