"""documents.md and its Chinese twin: every name and every link in them leads somewhere.

The package is read as text (with ast); only the table of vLLM's options is imported. Tables stand
between markers, <!-- names --> ... <!-- /names -->. In a cell, a name in backticks belongs to the
file before it: a linked file of nanoserve, or a path of vLLM in backticks. "V0:" and "V1:" say
which vLLM.

VLLM_0_6 and VLLM_0_32 name the folders of vLLM's two packages, where somebody has them: then
vLLM's names are checked, too.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest

from nanoserve.arg_utils import GROUPS, KNOWN

PACKAGE = Path(__file__).parent.parent / "nanoserve"
ENGLISH, CHINESE = NAMES = ["documents.md", "documents.zh-CN.md"]
DOCUMENTS = "12345"
VLLM = {"0": os.environ.get("VLLM_0_6", ""), "1": os.environ.get("VLLM_0_32", "")}

both = pytest.mark.parametrize("name", NAMES)
LINK = r"\[([^\]]+)\]\(([^)\s]+)\)"


# -- reading the pages --


def read(name: str) -> str:
    return (PACKAGE / name).read_text(encoding="utf-8")


def table(name: str, marker: str) -> list[list[str]]:
    """The rows of the table between the two markers, without its head."""
    [found] = re.findall(rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", read(name), re.DOTALL)
    rows = [line.strip().strip("|").split("|") for line in found.splitlines()[2:]]
    return [[cell.strip() for cell in row] for row in rows]


def markers(name: str) -> list[str]:
    return re.findall(r"<!-- ([\w-]+) -->", read(name))


def spans(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", text)


def our_texts(name: str) -> list[str]:
    """All that names things of nanoserve: cells, and the answers to the four questions."""
    cells = [row[1] for number in DOCUMENTS for row in table(name, f"sections{number}")]
    cells += [row[2] for row in table(name, "names")]
    answers = re.findall(r"(?ms)^- \*\*.*?(?=^- |^## )", read(name))
    assert len(answers) == 4
    return cells + answers


# -- looking into the code --


@lru_cache
def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@lru_cache
def top_names(file: Path) -> set[str]:
    """What a module defines."""
    return {name for node in parse(file).body for name in names_bound_by(node)}


def names_bound_by(node: ast.AST) -> list[str]:
    """The names that a statement defines, and the attributes of self that it sets."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            return [name for target in targets for name in names_bound_by(target)]
        case ast.AnnAssign(target=target):
            return names_bound_by(target)
        case ast.Tuple(elts=parts):
            return [name for part in parts for name in names_bound_by(part)]
        case ast.Name(id=name) | ast.Attribute(value=ast.Name(id="self"), attr=name):
            return [name]
    return []


@lru_cache
def members(file: Path, name: str) -> set[str]:
    """The fields, methods and attributes of a class, inherited ones too."""
    for node in parse(file).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            inherited = [members(file, ast.unparse(base)) for base in node.bases]
            return set().union(*map(names_bound_by, ast.walk(node)), *inherited)
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            parts = (node.module or "").split(".")
            if parts[0] == PACKAGE.name:
                return members(PACKAGE.joinpath(*parts[1:]).with_suffix(".py"), name)
    return set()


def exists(file: Path, dotted: str) -> bool:
    """Does the module in `file` define this name, such as "Scheduler.schedule"?"""
    first, *rest = dotted.split(".")
    if first not in top_names(file):
        return False
    return not rest or (len(rest) == 1 and rest[0] in members(file, first))


def missing(text: str) -> list[str]:
    """The names in backticks that do not exist in the linked file before them."""
    wrong, file = [], None
    for _, target, span in re.findall(rf"{LINK}|`([^`]+)`", text):
        if target:
            file = PACKAGE / target if target.endswith(".py") else None
        elif file is None or not file.exists() or not exists(file, span):
            wrong.append(span)
    return wrong


# -- nanoserve's side --


@both
def test_every_name_of_nanoserve_exists(name: str) -> None:
    texts = our_texts(name)
    assert sum(len(spans(text)) for text in texts) > 300
    assert [wrong for text in texts for wrong in missing(text)] == []


def test_the_check_sees_what_it_looks_for() -> None:
    assert missing("[a](engine.py) `LLMEngine.step` `LLMEngine.steps` `LLMEngines`") == [
        "LLMEngine.steps",
        "LLMEngines",
    ]
    assert missing("`LLMEngine`, [a](nothing.py) `LLMEngine`") == ["LLMEngine", "LLMEngine"]
    inherited = "[a](kernels/attention_triton.py) `TritonBackend.plan` `TritonBackend.shards`"
    assert missing(inherited) == ["TritonBackend.shards"]


@both
def test_every_link_leads_to_a_file_and_a_heading(name: str) -> None:
    wrong = []
    for _, target in re.findall(LINK, read(name)):
        path, _, anchor = target.partition("#")
        file = PACKAGE / (path or name)
        if not file.exists():
            wrong.append(target)
        elif anchor:
            headings = re.findall(r"(?m)^#+ (.*)", file.read_text("utf-8"))
            anchors = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            wrong += [target] * (anchor not in anchors)
    assert wrong == []


@both
def test_every_notebook_section_exists(name: str) -> None:
    """And no notebook is forgotten."""
    found: list[tuple[str, str]] = []
    for number in DOCUMENTS:
        for *_, cell in table(name, f"sections{number}"):
            for notebook, sections in re.findall(r"(\d\d): ([\d., –]+)", cell):
                [file] = (PACKAGE.parent / "notebooks").glob(f"{notebook}_*.ipynb")
                cells = json.loads(file.read_text("utf-8"))["cells"]
                text = "\n".join("".join(cell["source"]) for cell in cells)
                headings = re.findall(r"(?m)^## (\d+\.\d+) ", text)
                for section in re.split(", ", sections.strip()):
                    places = [headings.index(each) for each in section.split("–")]
                    assert places == sorted(set(places)), section
                    found.append((notebook, section))
    files = (PACKAGE.parent / "notebooks").glob("*.ipynb")
    assert {notebook for notebook, _ in found} == {file.name[:2] for file in files}
    assert len(found) > 200


# -- completeness --


def test_every_section_has_a_place_or_a_reason() -> None:
    """A row names a file, or says why there is none."""
    reasons = ("left out", " below", " above", "this page", "code lines in", "no co")
    for number in DOCUMENTS:
        rows = table(ENGLISH, f"sections{number}")
        assert len(rows) > 10
        for heading, place, _ in rows:
            assert heading
            assert re.search(LINK, place) or any(word in place for word in reasons), heading


def test_what_a_section_lacks_is_in_the_table_of_what_is_missing() -> None:
    """A row says "FlashAttention, xFormers: left out": the table of this title has both."""
    known = " ".join(row[0] for row in table(ENGLISH, "left-out")).lower()
    unknown, found = [], 0
    for number in DOCUMENTS:
        for _, place, _ in table(ENGLISH, f"sections{number}"):
            assert "not there" not in place
            for names in re.findall(r"([^.;:|)`]*(?:\.py[^.;:|)`]*)*): left out", place):
                for item in re.split(r", | and ", names.strip()):
                    found += 1
                    unknown += [item] * (item.strip().lower() not in known)
    assert found > 15
    assert unknown == []


@both
def test_other_names_are_in_alphabetical_order(name: str) -> None:
    names = [spans(row[0]) for row in table(name, "names")]
    keys = [one.lstrip("_").lower() for [one] in names]
    assert len(keys) > 120
    assert keys == sorted(set(keys))


@both
def test_every_page_agrees_on_what_is_left_out(name: str) -> None:
    """The front page's list, the table, and the answers to vLLM's options."""
    front = (PACKAGE.parent / name.replace("documents", "README")).read_text("utf-8")
    titles = [re.findall(r"\*\*(.*?)\*\*", row[0])[0] for row in table(name, "left-out")]
    words = "Left out on purpose: |有意不做："
    [listed] = re.findall(rf"(?m)^- (?:{words})((?:.|\n  )*)[.。]$", front)
    items = re.split(r",\s+|、", listed.replace("\n ", ""))
    assert [item for item in items if item not in " | ".join(titles)] == []
    for topic in (group.topic for group in GROUPS if group.verdict != "left out"):
        assert [item for item in items if item.lower() in topic.lower()] == []
    named = set(re.findall(r"\w+", " ".join(row[0] for row in table(name, "left-out"))))
    others = [n for n in named & KNOWN.keys() if KNOWN[n].group.verdict == "not there yet"]
    assert others == []


# -- both languages --


def comparable(cell: str) -> list[str]:
    """The names and links of a cell; a link to a Chinese page counts as one to its twin."""
    found = re.findall(rf"{LINK}|`([^`]+)`", cell)
    return [span or target.replace(".zh-CN", "").partition("#")[0] for _, target, span in found]


def test_both_languages_have_the_same_rows_names_and_links() -> None:
    assert markers(ENGLISH) == markers(CHINESE)
    for marker in markers(ENGLISH):
        rows, twins = table(ENGLISH, marker), table(CHINESE, marker)
        for row, twin in zip(rows, twins, strict=True):
            assert list(map(comparable, row)) == list(map(comparable, twin)), row
            if marker.startswith("sections"):
                assert (row[0].split("<br>")[0], row[2]) == (twin[0], twin[2])
    documents = [re.findall(r"(?m)^\d\. \*\*(.*?)\*\*", read(name)) for name in NAMES]
    assert documents[0] == documents[1]
    assert len(documents[0]) == len(DOCUMENTS)


# -- vLLM's side --


def vllm_names(cell: str) -> Iterator[tuple[str, str, str]]:
    """(version, file, name or "") of all that a cell says about vLLM."""
    version, file = "1", ""
    for marker, span in re.findall(r"V([01])[:：]|`([^`]+)`", cell):
        if marker:
            version = marker
            file = ""
        elif span.endswith(".py"):
            file = span
            yield version, file, ""
        else:
            yield version, file, span


def test_every_name_of_vllm_has_a_file() -> None:
    for row in vllm_cells():
        for _, file, name in vllm_names(row):
            assert file, f"{name} in {row}"


def vllm_cells() -> list[str]:
    cells = [row[1] for number in DOCUMENTS for row in table(ENGLISH, f"diff{number}")]
    return cells + [row[1] for row in table(ENGLISH, "left-out")]


@pytest.mark.skipif(not all(VLLM.values()), reason="VLLM_0_6 and VLLM_0_32 name no folders")
def test_vllm_has_the_files_and_names() -> None:
    wrong, found = [], 0
    for cell in vllm_cells():
        for version, file, name in vllm_names(cell):
            found += 1
            path = Path(VLLM[version]) / file
            source = path.read_text("utf-8") if path.is_file() else ""
            defines = rf"(?m)^\s*(?:class |def |async def |self\.)?{name}\b"
            if not path.is_file() or not re.search(defines, source):
                wrong.append(f"V{version} {file} {name}")
    assert found > 200
    assert wrong == []


@pytest.mark.skipif(not all(VLLM.values()), reason="VLLM_0_6 and VLLM_0_32 name no folders")
def test_vllm_has_the_other_names() -> None:
    """The second column says in which versions a name occurs, comments and docstrings not
    counted."""
    no_code = re.compile(r'""".*?"""|#[^\n]*', re.DOTALL)
    words: dict[str, set[str]] = {}
    for version, folder in VLLM.items():
        texts = [no_code.sub("", file.read_text("utf-8")) for file in Path(folder).rglob("*.py")]
        words[version] = set(re.findall(r"\w+", "\n".join(texts)))
    column = {"01": "both", "0": "0.6", "1": "0.32", "": "—"}
    for cell, versions, _ in table(ENGLISH, "names"):
        [name] = spans(cell)
        assert versions == column["".join(v for v in VLLM if name in words[v])], name
