"""Each notebook runs, shows what is stored in it, and keeps to the size that a reader was told."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

import nanoserve
from nanoserve.teaching.lesson import check
from nanoserve.teaching.notebooks import code_cells, copy_for_students, read, run_cell
from nanoserve.teaching.page import make_page

FOLDER = Path(__file__).parent.parent / "notebooks"
ENGLISH = sorted(file for file in FOLDER.glob("*.ipynb") if not file.name.endswith(".zh-CN.ipynb"))
CHINESE = sorted(FOLDER.glob("*.zh-CN.ipynb"))
PATH = [file for file in ENGLISH if int(file.name[:2]) <= 7]
IN_PLAIN_RUN = ("01_one_step", "04_scheduler")
EACH = [
    pytest.param(file, id=file.stem, marks=[] if file.stem in IN_PLAIN_RUN else pytest.mark.slow)
    for file in ENGLISH
]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def texts(notebook: dict[str, Any]) -> list[str]:
    return [source(cell) for cell in notebook["cells"] if cell["cell_type"] == "markdown"]


def comparable(outputs: list[dict[str, Any]], code: str) -> list[Any]:
    """Without what a clock says, and what rounding decides."""
    if "perf_counter" in code:
        return []
    exact = not re.search(r"bars\(|lines\(|weights|token_path\(|heat\(", code)
    kept: list[Any] = []
    for output in outputs:
        data = output.get("data", {})
        lines = output.get("text", ()) or data.get("image/svg+xml" if exact else "", ())
        lines = lines or data.get("text/markdown", ())  # the source of a class
        kept.append([line for line in lines if "difference" not in line])
    return kept


@pytest.mark.parametrize("file", EACH)
def test_a_notebook_shows_what_is_stored(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    monkeypatch.syspath_prepend("..")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells(read(file)):
        found = comparable(run_cell(source(cell), namespace), source(cell))
        assert found == comparable(cell["outputs"], source(cell))


@pytest.mark.parametrize("file", ENGLISH, ids=lambda file: file.stem)
def test_a_notebook_is_short_and_asks_first(file: Path) -> None:
    notebook = read(file)
    cells = notebook["cells"]
    assert len(" ".join(texts(notebook)).split()) <= 1500
    assert all(len(cell["source"]) <= 15 for cell in code_cells(notebook))
    pictures = [i for i, cell in enumerate(cells) if "image/svg+xml" in str(cell.get("outputs"))]
    before = " ".join(source(cell) for cell in cells[: pictures[0]])
    assert len(before.split()) <= 420  # the first picture comes early
    guesses = [i for i, cell in enumerate(cells) if source(cell).startswith("guess = None")]
    assert guesses
    for i in guesses:
        assert "**Predict.**" in source(cells[i - 1])
        assert len(cells[i]["source"]) == 1 and not cells[i]["outputs"]  # gives nothing away
        after = "".join(source(cell) for cell in cells[i + 1 : i + 5])
        assert "check(" in after and "guess" in after


def test_the_path_has_a_chinese_edition() -> None:
    names = [file.name.replace(".zh-CN", "") for file in CHINESE]
    assert set(names) >= {file.name for file in PATH}


@pytest.mark.parametrize("file", CHINESE, ids=lambda file: file.stem)
def test_a_chinese_edition_has_the_same_code_and_the_whole_text(file: Path) -> None:
    chinese, english = read(file), read(FOLDER / file.name.replace(".zh-CN", ""))
    assert code_cells(chinese) == code_cells(english)
    assert len(texts(chinese)) == len(texts(english))
    for ours, theirs in zip(texts(chinese), texts(english), strict=True):
        written = len(re.findall(r"[\u4e00-\u9fff]", ours))
        assert written >= 0.5 * len(re.sub(r"```.*?```", "", theirs, flags=re.S).split()) - 12
        assert re.findall(r"^#+ \d[.\d]*", ours, re.M) == re.findall(r"^#+ \d[.\d]*", theirs, re.M)


def test_students_get_no_outputs(tmp_path: Path) -> None:
    number = copy_for_students(tmp_path)
    copies = sorted(tmp_path.iterdir())
    assert len(copies) == number
    assert [file.name for file in copies] == sorted(file.name for file in (*ENGLISH, *CHINESE))
    assert not any(cell["outputs"] for file in copies for cell in code_cells(read(file)))
    with pytest.raises(ValueError, match="another folder"):
        copy_for_students(FOLDER)


def test_a_wrong_guess_never_stops_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    hints = {(4, 16, 32): "There are sizes between.", 4: "Less."}
    for guess in ([4, 16, 32], {"A"}, {"A": 1}, 4):
        check(guess, (4, 16, 24), hints)
    check([4, 16, 24], (4, 16, 24), hints)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:3] for line in lines] == ["Not"] * 4 + ["Rig"]
    assert hints[4, 16, 32] in lines[0] and hints[4] in lines[3]


LABELS = [*Path(nanoserve.__file__).parent.rglob("*.zh-CN.md"), *FOLDER.glob("*.zh-CN.*")]


@pytest.mark.parametrize("file", LABELS, ids=lambda file: file.name)
def test_a_chinese_label_closes(file: Path) -> None:
    """In CommonMark, bold that ends in a point does not close before a letter: a space helps."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".ipynb":
        text = "\n".join(texts(read(file)))
    text = re.sub(r"```.*?```|`[^`\n]*`", "`", text, flags=re.DOTALL)
    for line in text.splitlines():
        parts = line.split("**")
        for bold, behind in zip(parts[1::2], parts[2::2], strict=False):
            assert re.match(r"\w", bold[-1:]) or not re.match(r"\w", behind), f"{bold}**{behind}"


@pytest.mark.slow
def test_the_page_is_what_the_engine_does_now() -> None:
    page = (FOLDER / "pictures" / "index.html").read_text(encoding="utf-8")
    assert page == make_page()
    assert not re.search(r"(src|href)=|url\(|@import|fetch\(", page)  # it loads nothing


def test_pictures_name_what_exists() -> None:
    """Each Class.method that a stored picture names is in the package."""
    page = (FOLDER / "pictures" / "index.html").read_text(encoding="utf-8")
    shown = re.findall(r'methods: "(.*?)"', page)
    assert len(shown) == 5
    for film in ("hero.svg", "hero.zh-CN.svg"):
        shown.append((FOLDER / "pictures" / film).read_text(encoding="utf-8"))
    for notebook in map(read, (*ENGLISH, *CHINESE)):
        outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
        shown += ["".join(each.get("data", {}).get("image/svg+xml", ())) for each in outputs]
    methods: dict[str, set[str]] = {}
    for file in Path(nanoserve.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
                methods.setdefault(node.name, set()).update(names)
    for name, method in re.findall(r"\b([A-Z][a-z]\w+)\.([a-z_]{4,})\b(?!\.)", " ".join(shown)):
        assert method in methods[name]
