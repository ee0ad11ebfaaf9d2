"""What the Markdown says is true: code runs, links and names lead somewhere, sizes are right."""

from __future__ import annotations

import ast
import io
import re
import textwrap
import tokenize
from pathlib import Path

import pytest

from nanoserve.tools.line_links import set_lines

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanoserve"
PAGES = [p for p in ROOT.rglob("*.md") if not any(part.startswith(".") for part in p.parts[-4:])]
FLAT = [p for p in PACKAGE.glob("*.py") if not p.name.startswith("__")]
# A link, or a name that is not the text of one.
NAMES = re.compile(r"\]\(([^)\s]+)\)|(?<!\[)`([A-Za-z_][\w.]*)`")
WITH_CODE = [
    "CONTRIBUTING.md",
    "README.md",
    "README.zh-CN.md",
    "nanoserve/GUIDE.md",
    "nanoserve/coming_from_vllm.md",
]


def count_code_lines(file: Path) -> int:
    """Lines without comments, docstrings and blank ones."""
    text, texts = file.read_text(encoding="utf-8"), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            texts |= set(range(node.lineno, node.end_lineno + 1))  # a string that nobody reads
    skip = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [t for t in tokens if t.type not in skip and t.type != tokenize.ENDMARKER]
    return len({n for t in found for n in range(t.start[0], t.end[0] + 1)} - texts)


@pytest.mark.parametrize("name", WITH_CODE)
def test_the_code_blocks_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in re.findall(r"```python\n(.*?) *```", (ROOT / name).read_text("utf-8"), re.DOTALL):
        exec(compile(textwrap.dedent(block), name, "exec"), namespace)
    if name == "README.md":
        assert capsys.readouterr().out.splitlines()[2].startswith("Once upon a time | ")


@pytest.mark.parametrize("name", ["README", "nanoserve/GUIDE"])
def test_a_chinese_page_has_the_same_code(name: str) -> None:
    blocks = re.compile(r"^```(?:python|bash)\n(.*?)```", re.DOTALL | re.MULTILINE)
    pages = [(ROOT / f"{name}{suffix}").read_text("utf-8") for suffix in (".md", ".zh-CN.md")]
    english, chinese = ([re.sub(r"#.*", "", code) for code in blocks.findall(t)] for t in pages)
    assert english == chinese


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_names_lead_somewhere(page: Path) -> None:
    for line in page.read_text("utf-8").splitlines():
        target = page
        ours = line.split("<br>**V")[0]  # vLLM's names: test_vllm_names.py
        if page.name.startswith("documents"):  # links to lines have a test of their own
            ours = re.sub(r"(?<!\[)`[\w./]+`", "", line)
        for path, name in NAMES.findall(ours):
            path, _, anchor = path.partition("#")
            if path and not path.startswith(("http", "<")):
                target = page.parent / path
                assert target.exists(), path
            if anchor and not re.fullmatch(r"L\d+", anchor):
                heads = re.findall(r"^#+ (.*)", (target if path else page).read_text("utf-8"), re.M)
                slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads]
                assert anchor in slugs, anchor
            if name and target.suffix == ".py" and page.name.startswith(("documents", "README")):
                text = target.read_text("utf-8")
                assert all(re.search(rf"\b{part}\b", text) for part in name.split(".")), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_lines_lead_to_definitions(page: Path) -> None:
    """Out of date? Run python -m nanoserve.tools.line_links."""
    assert page.read_text("utf-8") == set_lines(page)


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_front_page_knows_the_modules_and_their_size(name: str) -> None:
    text = (ROOT / name).read_text("utf-8")
    assert {f"[{p.stem}](nanoserve/{p.name})" for p in FLAT} == set(
        re.findall(r"^\| (\[\w+\]\(nanoserve/\w+\.py\)) \|", text, re.MULTILINE)
    )
    said = [int(n.replace(",", "")) for n in re.findall(r"^\| [^|]+ \| ([\d,]{5,}) \|", text, re.M)]
    for number, files in zip(said, (FLAT, PACKAGE.rglob("*.py")), strict=True):
        assert number == pytest.approx(sum(map(count_code_lines, files)), rel=0.03)
    if name == "README.md":
        for file in FLAT:
            title = ast.get_docstring(ast.parse(file.read_text("utf-8"))).split("\n\n")[0]
            assert f"| {' '.join(title.split())} |" in text
