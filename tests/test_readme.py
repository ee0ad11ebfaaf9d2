"""Both READMEs are compared with the code: what they name exists, what they show was printed, and
the Chinese one says the same as the English one. So names are looked up in the English one only.

    python tests/test_readme.py --update     rewrite what is generated: the example's output, the
                                             start-up line, the English table of options

What is checked in a way of its own stands between markers, <!-- life --> ... <!-- /life -->. In the
tables, names in backticks are names in the code.
"""

from __future__ import annotations

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
from test_architecture import DOZEN, FILES

from nanoserve import LLM, SamplingParams
from nanoserve.config import OPTIONS

ROOT = Path(__file__).parent.parent
ENGLISH, CHINESE = NAMES = ["README.md", "README.zh-CN.md"]
FOLDERS = {name.split(".")[0] for name in FILES if "." in name}
MODULES = {name for name in FILES if name.split(".")[0] != "demo" and "__" not in name}
# Folders of vLLM's own packages, where somebody has them: the names of its files are checked, too.
VLLM = [os.environ.get(name, "") for name in ("VLLM_0_6", "VLLM_0_32")]

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


def module_of(dotted: str) -> str:
    """The module that a name begins with: "models.decoder.MLP.forward" -> "models.decoder"."""
    names = dotted.split(".")
    starts = [".".join(names[:end]) for end in range(len(names) + 1)]
    return max((start for start in starts if start in MODULES), key=len, default="")


def find(dotted: str) -> Any:
    """The object of this name. Raises AttributeError if there is none. None: a field without
    default."""
    module = module_of(dotted)
    found: Any = importlib.import_module(f"nanoserve.{module}".rstrip("."))
    *path, last = dotted.removeprefix(f"{module}.").split(".")
    for name in path:
        found = getattr(found, name)
    return None if last in getattr(found, "__annotations__", {}) else getattr(found, last)


def missing(names: list[str]) -> list[str]:
    """Those of these names that the package does not have."""
    wrong = []
    for name in names:
        try:
            find(name)
        except AttributeError:
            wrong.append(name)
    return wrong


def first_calls(action: Callable[[], object]) -> list[Any]:
    """The code objects that run while `action` does, in the order in which each began first."""
    seen: dict[Any, None] = {}

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            seen.setdefault(frame.f_code)

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return list(seen)


# -- what is generated --

GENERATED = {ENGLISH: ["example-output", "start-up-line", "llm-options"]}
GENERATED[CHINESE] = GENERATED[ENGLISH][:2]


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


def generate(text: str, marker: str) -> str:
    """What should stand between these markers of a README."""
    if marker == "example-output":
        return f"```text\n{run_example()[0]}\n```\n"
    if marker == "start-up-line":
        return f"```text\n{run_example()[1]}\n```\n"
    head, ruler, *rows = part(text, marker).splitlines()
    seams = [row for row in rows if spans(row)[0] in inspect.signature(LLM.__init__).parameters]
    seams = [row for row in seams if spans(row)[0] not in {option.name for option in OPTIONS}]
    options = [f"| `{o.name}` | `{shown(o.default)}` | {o.help} |" for o in OPTIONS]
    return "\n".join([head, ruler, *options, *seams]) + "\n"


def shown(default: Any) -> str:
    """A default as the tables write it."""
    if isinstance(default, type):
        return default.__name__
    return f'"{default}"' if isinstance(default, str) else str(default)


def update() -> None:
    for name, markers in GENERATED.items():
        text = read(name)
        for marker in markers:
            old, new = part(text, marker), generate(text, marker)
            text = text.replace(f"<!-- {marker} -->\n{old}", f"<!-- {marker} -->\n{new}")
        (ROOT / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "marker"), [(name, marker) for name in NAMES for marker in GENERATED[name]]
)
def test_what_is_generated_is_up_to_date(name: str, marker: str) -> None:
    """If this fails: python tests/test_readme.py --update."""
    text = read(name)
    assert part(text, marker) == generate(text, marker)


# -- names --


@both
def test_the_drawing_shows_every_flat_module_and_every_folder(name: str) -> None:
    [drawing] = [block for block in blocks(read(name), "text") if "bench.py" in block]
    flat = {module for module in MODULES - FOLDERS if "." not in module}
    assert set(re.findall(r"\w+/?", drawing)) >= flat | {f"{folder}/" for folder in FOLDERS}
    assert set(re.findall(r"(\w+) \*", drawing)) == {module.split(".")[-1] for module in DOZEN}


def test_the_reading_map_has_every_module_and_its_symbols() -> None:
    """The dozen first, with a star each."""
    modules, starred = [], []
    for row in table(part(read(ENGLISH), "reading-map")):
        [(file, star)] = re.findall(r"^\[([\w/.]+)\]\(nanoserve/\1\)( \*)?$", row[0])
        module = file.removesuffix(".py").removesuffix("/").replace("/", ".")
        modules.append(module)
        starred += [module] * bool(star)
        symbols = spans(row[-1])
        assert symbols, module
        assert missing([f"{module}.{symbol}" for symbol in symbols]) == []
    files = {module for module in MODULES - FOLDERS if not module.startswith("bench.")}
    assert set(modules) == {*files, "bench"}
    assert set(starred) == DOZEN
    assert starred == modules[: len(DOZEN)]


def test_names_with_a_dot_exist() -> None:
    """`scheduler.Scheduler.add` and `LLM.chat`, wherever they stand in the text."""
    classes = re.compile(r"(?m)^class (\w+)")
    homes = {name: m for m in MODULES for name in classes.findall(FILES[m].read_text("utf-8"))}
    ours = homes.keys() | {module.split(".")[0] for module in MODULES}
    dotted = []
    for span in spans(read(ENGLISH)):
        first, *rest = span.removesuffix("()").split(".")
        is_name = rest and all(word.isidentifier() for word in rest) and rest[-1] != "py"
        if is_name and first in ours:
            dotted.append(f"{homes.get(first, '')}.{span}".strip(".").removesuffix("()"))
    assert len(dotted) > 100
    assert missing(dotted) == []


@both
def test_the_life_of_a_request_is_told_in_the_order_in_which_it_runs(
    name: str, demo_llm: LLM
) -> None:
    """Every function that the eight steps name is called, each for the first time after the one
    before it."""
    steps = re.findall(r"(?m)^\d\. .*", part(read(name), "life"))
    named = [[span for span in spans(step) if module_of(span)] for step in steps]
    assert len(steps) == 8
    assert all(named)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    calls = first_calls(lambda: demo_llm.generate("Once upon a time", params, use_tqdm=False))
    order = [span for step in named for span in step]
    codes = [inspect.unwrap(find(span)).__code__ for span in order]
    assert [span for span, code in zip(order, codes, strict=True) if code not in calls] == []
    assert sorted(codes, key=calls.index) == codes, order


@both
def test_every_option_is_listed_with_its_default(name: str) -> None:
    parameters = inspect.signature(LLM.__init__).parameters.values()
    seams = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    for marker, declared in (
        ("llm-options", [*OPTIONS, *seams]),
        ("sampling-options", fields(SamplingParams)),
    ):
        expected = [(option.name, shown(option.default)) for option in declared]
        rows = table(part(read(name), marker))
        assert [(spans(row[0])[0], spans(row[1])[0]) for row in rows] == expected


def test_every_feature_has_a_place_and_a_test() -> None:
    """A row of the table: feature, `module.symbol` ..., `test_file.py::test_name` ..."""
    rows = table(part(read(ENGLISH), "features"))
    wrong = []
    for feature, places, tests in rows:
        assert spans(places), feature
        assert spans(tests), feature
        wrong += missing(spans(places))
        for test in spans(tests):
            file, _, function = test.partition("::")
            wrong += [test] * (not re.search(rf"(?m)^def {function}\(", read(f"tests/{file}")))
    assert wrong == []
    listed = {span for row in rows for span in spans(row[0])}
    assert [field.name for field in fields(SamplingParams) if field.name not in listed] == []


def test_every_architecture_and_rope_type_is_listed() -> None:
    from test_families import FALLBACK

    from nanoserve.models import decoder
    from nanoserve.models.registry import ModelRegistry
    from nanoserve.models.rope import rope_frequencies

    classes = ModelRegistry.CLASSES.items()
    native = [name for name, cls in classes if cls.__module__ == decoder.__name__]
    text = part(read(ENGLISH), "models")
    assert [spans(row[0]) for row in table(text)] == [[a] for a in (*native, *FALLBACK)]
    ways = [row[1] for row in table(text)]
    assert set(ways[: len(native)]) == {"natively"}
    assert set(ways[len(native) :]) == {"fallback"}
    with pytest.raises(ValueError, match="supported: ") as error:
        rope_frequencies(4, {"rope_type": "none", "rope_theta": 1.0}, 8)
    rope_types = str(error.value).rstrip(".").rpartition("supported: ")[2].split(", ")
    [line] = [line for line in text.splitlines() if "`rope_type`" in line]
    assert spans(line)[1:] == rope_types


def test_the_words_of_the_glossary_are_words_of_the_code() -> None:
    code = " ".join(FILES[module].read_text("utf-8") for module in MODULES)
    words = [word for row in table(part(read(ENGLISH), "glossary")) for word in spans(row[0])]
    assert len(words) > 10
    assert [word for word in words if not re.search(rf"\b{re.escape(word)}\b", code)] == []


@both
def test_files_and_command_line_options_exist(name: str) -> None:
    text = read(name)
    links = re.findall(r"\]\(([^)#]+)", text)
    files = [link for link in links if not link.startswith("http")]
    files += re.findall(r"(?<![\w./])(?:tests|nanoserve|notebooks|\.ci)/[\w/.-]*\w", text)
    assert sorted({file for file in files if not (ROOT / file).exists()}) == []
    headings = re.findall(r"(?m)^##+ (.*)", prose(text).lower())
    anchors = {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= anchors
    scripts = ("example.py", "nanoserve/bench/cli.py", "nanoserve/tools/doctor.py", __file__)
    code = "".join(map(read, scripts)) + "".join(f'"{option.flag}"' for option in OPTIONS)
    given = {flag.replace("--no-", "--") for span in spans(text) for flag in span.split()}
    flags = {flag for flag in given - {"--help"} if re.fullmatch(r"--[\w-]+", flag)}
    assert len(flags) > 10
    assert {flag for flag in flags if f'"{flag}"' not in code} == set()


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


@pytest.mark.skipif(not all(VLLM), reason="VLLM_0_6 and VLLM_0_32 name no folders")
def test_vllm_has_the_files_and_symbols_named() -> None:
    """A cell of the map lists `a/file.py` `symbol` `symbol` `another/file.py` `symbol` ..."""
    wrong = []
    folders = list(map(Path, VLLM))
    for row in table(part(read(ENGLISH), "reading-map")):
        for folder, cell in zip(folders, row[3:5], strict=True):
            source = ""
            for span in spans(cell):
                if span.endswith(".py"):
                    file = folder / span
                    source = file.read_text() if file.exists() else ""
                    wrong += [span] * (not source)
                elif not re.search(rf"(?m)^\s*(class |def |async def |){span}\b", source):
                    wrong.append(span)
    code = "".join(file.read_text() for folder in folders for file in folder.rglob("*.py"))
    for row in table(part(read(ENGLISH), "glossary")):
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
        for block in blocks(read(ENGLISH), "python"):
            exec(compile(block, ENGLISH, "exec"), namespace)
            assert capsys.readouterr().out.strip(), block
    finally:
        namespace["llm"].close()


# -- the twin --


def names_and_numbers(text: str) -> tuple[list[str], list[str]]:
    return sorted(spans(text)), sorted(re.findall(r"\d+", text))


def test_the_twin_names_the_same_things_cell_by_cell() -> None:
    ours, theirs = map(read, NAMES)
    for marker in re.findall(r"<!-- (\w[\w-]*) -->", ours):
        cells = [
            [[names_and_numbers(cell) for cell in row] for row in table(part(text, marker))]
            for text in (ours, theirs)
        ]
        assert cells[1] == cells[0], marker
    steps = [re.findall(r"(?m)^\d\. .*", part(text, "life")) for text in (ours, theirs)]
    assert list(map(names_and_numbers, steps[1])) == list(map(names_and_numbers, steps[0]))


def test_the_twin_has_the_same_code_names_and_sections() -> None:
    ours, theirs = map(read, NAMES)
    assert CHINESE in ours.splitlines()[2]
    assert ENGLISH in theirs.splitlines()[2]
    assert sorted(set(spans(theirs))) == sorted(set(spans(ours)))
    assert blocks(theirs, "bash") == blocks(ours, "bash")
    pairs = zip(blocks(theirs, "python"), blocks(ours, "python"), strict=True)
    assert all(ast.dump(ast.parse(a)) == ast.dump(ast.parse(b)) for a, b in pairs)
    for mark in ("## ", "### ", "**", "<!-- "):
        assert len(re.findall(rf"(?m)^{re.escape(mark)}", theirs)) == len(
            re.findall(rf"(?m)^{re.escape(mark)}", ours)
        ), mark


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        update()
