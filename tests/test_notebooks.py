"""Each notebook runs, prints what is stored in it, and keeps to the size that a reader was told."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = sorted(file.name for file in FOLDER.glob("*.ipynb"))


def stored_text(cell: dict) -> str:
    outputs = [each for each in cell["outputs"] if each["output_type"] == "stream"]
    return "".join("".join(each["text"]) for each in outputs)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_prints_what_is_stored(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    monkeypatch.syspath_prepend("..")
    cells = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    text = " ".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert len(text.split()) <= 900
    assert len(code) <= 12
    namespace: dict[str, object] = {"__name__": "__main__"}
    for cell in code:
        assert len(cell["source"]) <= 15
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec("".join(cell["source"]), namespace)
        if "perf_counter" in "".join(cell["source"]):  # what a clock says differs from run to run
            continue
        wanted = [line for line in stored_text(cell).splitlines() if "difference" not in line]
        found = [line for line in printed.getvalue().splitlines() if "difference" not in line]
        assert found == wanted
