"""Both READMEs are compared with the code: what they name exists, what they count is counted, what
they show was printed, and the Chinese one says the same as the English one.

    python tests/test_readme.py --update     write anew what is generated: the example's output, the
                                             start-up line, the line counts of the reading map

What is checked in a way of its own stands between markers, <!-- life --> ... <!-- /life -->. In the
tables, names in backticks are names in the code.
"""

from __future__ import annotations

import argparse
import ast
import configparser
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import nanoserve
from nanoserve import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
NAMES = ["README.md", "README.zh-CN.md"]
MODULES = sorted(file.stem for file in (ROOT / "nanoserve").glob("[!_]*.py"))
GENERATED = ["example-output", "start-up-line", "reading-map"]
# Folders of vLLM's own packages, where somebody has them: the names of its files are checked, too.
VLLM = {"0.6": os.environ.get("VLLM_0_6"), "0.32": os.environ.get("VLLM_0_32")}

both = pytest.mark.parametrize("name", NAMES)


# -- reading Markdown --


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def part(text: str, marker: str) -> str:
    """What stands between <!-- marker --> and <!-- /marker -->."""
    [found] = re.findall(rf"<!-- {marker} -->\n(.*?)<!-- /{marker} -->", text, re.DOTALL)
    return found


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def prose(text: str) -> str:
    """The text without its code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def spans(text: str) -> list[str]:
    """What stands in backticks: "`a` and `b`" -> ["a", "b"]."""
    return re.findall(r"`([^`\n]+)`", prose(text))


def table(text: str) -> list[list[str]]:
    """The rows of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# -- looking into the code --


def exists(module: str, dotted: str) -> bool:
    """Is there such a name in this module? "Sequence.num_tokens": fields count, too."""
    found: Any = importlib.import_module(f"nanoserve.{module}")
    for name in dotted.split("."):
        if not hasattr(found, name):
            return name == dotted.split(".")[-1] and name in getattr(found, "__annotations__", {})
        found = getattr(found, name)
    return True


def code_of(dotted: str) -> Any:
    """The code object of module.function or module.Class.method."""
    module, *names = dotted.split(".")
    found: Any = importlib.import_module(f"nanoserve.{module}")
    for name in names:
        found = getattr(found, name)
    return inspect.unwrap(found).__code__


def num_lines(module: str) -> int:
    return len(read(f"nanoserve/{module}.py").splitlines())


def first_calls(action: Callable[[], object]) -> list[Any]:
    """The code objects that run while `action` does, in the order in which each began first."""
    seen: dict[Any, None] = {}

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen.setdefault(frame.f_code)

    previous = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(previous)
    return list(seen)


# -- what is generated --


@lru_cache(maxsize=1)
def run_example() -> tuple[str, str]:
    """What example.py prints on a CPU, without colours; and the engine's start-up line."""
    run = subprocess.run(
        [sys.executable, "example.py"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    lines = re.sub(r"\033\[\d+m", "", run.stdout).strip().splitlines()
    [start_up] = re.findall(r"nanoserve: .*", run.stderr)
    return "\n".join(line.rstrip() for line in lines), re.sub(r"\d+ blocks", "N blocks", start_up)


def refresh(text: str, marker: str) -> str:
    """What should stand between these markers."""
    if marker == "example-output":
        return f"```text\n{run_example()[0]}\n```\n"
    if marker == "start-up-line":
        return f"```text\n{run_example()[1]}\n```\n"
    map_ = part(text, "reading-map")
    for module in MODULES:
        map_ = re.sub(rf"(\[{module}\.py\][^|]*\| )\d+", rf"\g<1>{num_lines(module)}", map_)
    total = sum(num_lines(module) for module in MODULES)
    return re.sub(r"(?m)^(\| \*\*.*?\| )\d+", rf"\g<1>{total}", map_)


def update() -> None:
    for name in NAMES:
        text = read(name)
        for marker in GENERATED:
            old, new = part(text, marker), refresh(text, marker)
            text = text.replace(f"<!-- {marker} -->\n{old}", f"<!-- {marker} -->\n{new}")
        (ROOT / name).write_text(text, encoding="utf-8")


@both
@pytest.mark.parametrize("marker", GENERATED)
def test_what_is_generated_is_up_to_date(name: str, marker: str) -> None:
    """If this fails: python tests/test_readme.py --update."""
    text = read(name)
    assert part(text, marker) == refresh(text, marker)


# -- names and numbers --


@both
def test_the_reading_map_has_every_module_and_its_symbols(name: str) -> None:
    *rows, total = table(part(read(name), "reading-map"))
    assert total[0].startswith("**")
    modules = [re.findall(r"\[(\w+)\.py\]\(nanoserve/\1\.py\)", row[0])[0] for row in rows]
    assert sorted(modules) == MODULES
    for module, row in zip(modules, rows, strict=True):
        symbols = spans(row[-1])
        assert symbols, module
        assert [symbol for symbol in symbols if not exists(module, symbol)] == [], module


@both
def test_names_with_a_dot_exist(name: str) -> None:
    """`scheduler.Scheduler.add` and `LLM.chat`, wherever they stand in the text."""
    wrong = []
    for span in spans(read(name)):
        first, *rest = span.removesuffix("()").split(".")
        if not rest or not all(word.isidentifier() for word in rest) or rest[-1] in ("py", "json"):
            continue
        if first in MODULES and not exists(first, ".".join(rest)):
            wrong.append(span)
        elif first in nanoserve.__all__:
            module = getattr(nanoserve, first).__module__.removeprefix("nanoserve.")
            wrong += [span] * (not exists(module, ".".join((first, *rest))))
    assert wrong == []


@both
def test_the_life_of_a_request_is_told_in_the_order_in_which_it_runs(
    name: str, demo_llm: LLM
) -> None:
    """Every function that the eight steps name is called, each for the first time after the one
    before it."""
    steps = re.findall(r"(?m)^\d\. .*(?:\n {3}.*)*", part(read(name), "life"))
    named = [[span for span in spans(step) if span.split(".")[0] in MODULES] for step in steps]
    assert len(steps) == 8
    assert all(named)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    calls = first_calls(lambda: demo_llm.generate("Once upon a time", params, use_tqdm=False))
    order = [span for step in named for span in step]
    assert [span for span in order if code_of(span) not in calls] == []
    assert sorted(order, key=lambda span: calls.index(code_of(span))) == order


def shown(default: Any) -> str:
    """A default as the tables write it."""
    return default.__name__ if isinstance(default, type) else str(default)


@both
def test_every_option_is_listed_with_its_default(name: str) -> None:
    parameters = list(inspect.signature(LLM.__init__).parameters.values())[1:]
    expected = [(option.name, shown(option.default)) for option in parameters]
    rows = table(part(read(name), "llm-options"))
    assert [(spans(row[0])[0], spans(row[1])[0].strip('"')) for row in rows] == expected

    expected = [(field.name, shown(field.default)) for field in fields(SamplingParams)]
    rows = table(part(read(name), "sampling-options"))
    assert [(spans(row[0])[0], spans(row[1])[0].strip('"')) for row in rows] == expected


@both
def test_every_feature_has_a_place_and_a_test(name: str) -> None:
    """A row of the table: feature, `module.symbol` ..., `test_file.py::test_name` ..."""
    rows = table(part(read(name), "features"))
    wrong = []
    for feature, places, tests in rows:
        assert spans(places), feature
        assert spans(tests), feature
        for place in spans(places):
            module, _, symbol = place.partition(".")
            wrong += [place] * (module not in MODULES or not exists(module, symbol))
        for test in spans(tests):
            file, _, function = test.partition("::")
            path = ROOT / "tests" / file
            source = path.read_text(encoding="utf-8") if path.is_file() else ""
            wrong += [test] * (not re.search(rf"(?m)^def {function}\(", source))
    assert wrong == []
    listed = {span for row in rows for span in spans(row[0])}
    assert [field.name for field in fields(SamplingParams) if field.name not in listed] == []


@both
def test_every_architecture_and_rope_type_is_listed(name: str) -> None:
    from test_families import FALLBACK

    from nanoserve import models
    from nanoserve.models.rope import rope_frequencies

    native = [
        architecture
        for architecture, cls in models.ModelRegistry.CLASSES.items()
        if cls.__module__ == models.__name__
    ]
    text = part(read(name), "models")
    assert [spans(row[0]) for row in table(text)] == [[a] for a in (*native, *FALLBACK)]
    ways = [row[1] for row in table(text)]
    assert len(set(ways[: len(native)])) == len(set(ways[len(native) :])) == 1
    assert ways[0] != ways[-1]
    with pytest.raises(ValueError, match="supported: ") as error:
        rope_frequencies(4, {"rope_type": "none", "rope_theta": 1.0}, 8)
    rope_types = str(error.value).rstrip(".").rpartition("supported: ")[2].split(", ")
    [line] = [line for line in text.splitlines() if "`rope_type`" in line]
    assert spans(line)[1:] == rope_types


@both
def test_the_words_of_the_glossary_are_words_of_the_code(name: str) -> None:
    code = " ".join(read(f"nanoserve/{module}.py") for module in MODULES)
    words = [word for row in table(part(read(name), "glossary")) for word in spans(row[0])]
    assert len(words) > 10
    assert [word for word in words if not re.search(rf"\b{re.escape(word)}\b", code)] == []


@both
def test_files_and_command_line_options_exist(name: str) -> None:
    text = read(name)
    links = re.findall(r"\]\(([^)#]+)", text)
    files = [link for link in links if not link.startswith("http")]
    files += re.findall(r"\b(?:tests|nanoserve|notebooks)/[\w/.-]*\w", text)
    assert sorted({file for file in files if not (ROOT / file).exists()}) == []
    headings = re.findall(r"(?m)^##+ (.*)", prose(text).lower())
    anchors = {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors
    scripts = "".join(read(file) for file in ("example.py", "bench.py", "tests/test_readme.py"))
    options = [span for span in spans(text) if re.fullmatch(r"--[\w-]+", span)]
    assert [option for option in options if f'"{option}"' not in scripts] == []


@both
def test_commands_and_versions_are_those_of_the_package(name: str) -> None:
    text, ci = read(name), read(".ci/run")
    assert part(text, "develop").split("```bash\n")[1].split("```")[0].splitlines() == [
        line for line in ci.splitlines() if line.startswith(("ruff", "mypy", "pytest"))
    ]
    for command in ("pip install -e . && python example.py", 'pip install -e ".[test]"'):
        assert command in "\n".join(blocks(text, "bash"))
        assert command in ci.replace("--quiet ", "")
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    [torch] = re.findall(r"torch>.*", setup["options"]["install_requires"])
    assert f'pip install "{torch}"' in "\n".join(blocks(text, "bash"))
    assert f"Python {setup['options']['python_requires'].removeprefix('>=')}" in text


@pytest.mark.skipif(not all(VLLM.values()), reason="VLLM_0_6 and VLLM_0_32 name no folders")
@both
def test_vllm_has_the_files_and_symbols_named(name: str) -> None:
    """A cell of the map lists `a/file.py` `symbol` `symbol` `another/file.py` `symbol` ..."""
    wrong = []
    folders = [Path(folder or "") for folder in VLLM.values()]
    for row in table(part(read(name), "reading-map"))[:-1]:
        for folder, cell in zip(folders, row[4:6], strict=True):
            source = ""
            for span in spans(cell):
                if span.endswith(".py"):
                    file = folder / span
                    source = file.read_text() if file.exists() else ""
                    wrong += [span] * (not source)
                elif not re.search(rf"(?m)^\s*(class |def |async def |){span}\b", source):
                    wrong.append(span)
    code = "".join(file.read_text() for folder in folders for file in folder.rglob("*.py"))
    for row in table(part(read(name), "glossary")):
        wrong += [word for word in spans(row[-1]) if not re.search(rf"\b{word}\b", code)]
    assert wrong == []


# -- the code, run --


def test_the_python_blocks_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in one namespace; what they are there to show, they print."""
    from nanoserve.models.registry import ModelRegistry

    monkeypatch.setattr(ModelRegistry, "CLASSES", dict(ModelRegistry.CLASSES))
    namespace: dict[str, Any] = {}
    try:
        for block in blocks(read(NAMES[0]), "python"):
            exec(compile(block, "README.md", "exec"), namespace)
            assert capsys.readouterr().out.strip(), block
    finally:
        namespace["llm"].close()


# -- the twin --


@pytest.mark.parametrize(
    "marker",
    [
        "reading-map",
        "life",
        "features",
        "llm-options",
        "sampling-options",
        "glossary",
        "models",
        "gpu",
    ],
)
def test_the_twin_names_the_same_things_row_by_row(marker: str) -> None:
    ours, theirs = (
        [
            (sorted(spans(line)), sorted(re.findall(r"\d+", line)))
            for line in part(read(name), marker).splitlines()
            if line.startswith("|") or re.match(r"\d\. ", line)
        ]
        for name in NAMES
    )
    assert theirs == ours


def test_the_twin_has_the_same_code_names_and_sections() -> None:
    ours, theirs = map(read, NAMES)
    assert NAMES[1] in ours.splitlines()[2]
    assert NAMES[0] in theirs.splitlines()[2]
    assert sorted(set(spans(theirs))) == sorted(set(spans(ours)))
    assert blocks(theirs, "bash") == blocks(ours, "bash")
    pairs = zip(blocks(theirs, "python"), blocks(ours, "python"), strict=True)
    assert all(ast.dump(ast.parse(a)) == ast.dump(ast.parse(b)) for a, b in pairs)
    for mark in ("## ", "### ", "**"):
        assert len(re.findall(rf"(?m)^{re.escape(mark)}", theirs)) == len(
            re.findall(rf"(?m)^{re.escape(mark)}", ours)
        ), mark


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Keep the READMEs true.")
    parser.add_argument("--update", action="store_true", help="write what is generated anew")
    if parser.parse_args().update:
        update()
