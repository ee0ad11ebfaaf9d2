"""The documents are compared with the code: what they name exists, what they show was printed,
every link leads somewhere, every table fits the page, and a Chinese document says the same as its
English twin. So names are looked up in the English ones only.

    python tests/test_readme.py --update     rewrite what is generated: the example's output, the
                                             start-up report, the table of options, the lists of
                                             modules

What is checked in a way of its own stands between markers, <!-- life --> ... <!-- /life -->. In the
tables, names in backticks are names in the code.
"""

from __future__ import annotations

import ast
import configparser
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import Field, fields
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from test_architecture import (
    CONTROL_PLANE,
    CORE,
    CORE_FOLDERS,
    DATA_PLANE,
    DOZEN,
    FILES,
    FOLDERS,
    MEETING_POINT,
    OUTER_FOLDERS,
    code_lines,
)

from nanoserve import LLM, SamplingParams, guard, inputs, sampling_params
from nanoserve.__main__ import COMMANDS
from nanoserve.config import OPTIONS, EngineConfig
from nanoserve.extras import beam_search
from nanoserve.extras.server.options import FrontendArgs
from nanoserve.sampling_params import MISSING

ROOT = Path(__file__).parent.parent
FRONT, INSIDE, GUIDE = "README.md", "nanoserve/README.md", "nanoserve/GUIDE.md"
TESTS, RESULTS = "tests/README.md", "notebooks/results/README.md"
SCALE = "notebooks/results/scale.md"
TWINS = {name: name.replace(".md", ".zh-CN.md") for name in (FRONT, INSIDE, GUIDE, SCALE)}
ENGLISH = [*TWINS, TESTS, RESULTS]
OURS = [*ENGLISH, *TWINS.values()]  # whose names and code this file checks
DOCUMENTS = sorted(
    file.relative_to(ROOT).as_posix()
    for place in (".", "nanoserve", "tests", "notebooks")
    for file in (ROOT / place).glob("*.md" if place == "." else "**/*.md")
)
PAGE_WIDTH = 832  # pixels of a column on GitHub
LETTER, LETTER_OF_CODE = 8.5, 8.16  # pixels; of text, a mean that few words exceed
MODULES = {name for name in FILES if name.split(".")[0] != "demo" and "__" not in name}
# Folders of vLLM's own packages, where somebody has them: the names of its files are checked, too.
VLLM = [os.environ.get(name, "") for name in ("VLLM_0_6", "VLLM_0_32")]

both = pytest.mark.parametrize("is_chinese", [False, True])


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


def twin(name: str, is_chinese: bool) -> str:
    """The text of a document, or of its Chinese twin."""
    return read(TWINS[name] if is_chinese else name)


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

GENERATED = [
    *[(name, "example-output") for name in (FRONT, TWINS[FRONT])],
    *[(name, "planes") for name in (INSIDE, TWINS[INSIDE])],
    *[(name, "start-up-report") for name in (GUIDE, TWINS[GUIDE])],
    (GUIDE, "llm-options"),
]


@lru_cache(maxsize=1)
def run_example() -> tuple[list[str], str]:
    """The lines that example.py prints on a CPU, without colours; and the start-up report."""
    run = subprocess.run(
        [sys.executable, "example.py"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    lines = [line.rstrip() for line in re.sub(r"\033\[\d+m", "", run.stdout).splitlines()]
    report = re.findall(r"nanoserve: (.*)", run.stderr)
    report = [line.replace("attention=torch", "attention=native") for line in report]  # compiler
    of_the_machine = r"\d+ (?=blocks|threads?)"
    return [line for line in lines if line], re.sub(of_the_machine, "N ", "\n".join(report))


def shorten(line: str) -> str:
    """A line that fits into the code box: its first words, and "..." if there are more."""
    words = line.split(" ")
    while len(" ".join(words)) > 90:
        words.pop()
    return " ".join(words) + " ..." * (" ".join(words) != line)


def show_example() -> str:
    """The beginning of each story, the first two questions and their answers."""
    lines = run_example()[0]
    stories = [line for line in lines if not re.match("[QA]: ", line)]
    dialogue = [line for line in lines if re.match("[QA]: ", line)]
    return "\n".join(map(shorten, [*stories, *dialogue[:4]]))


def list_planes(text: str) -> str:
    """Each line keeps its words; the names behind them are those of tests/test_architecture.py."""
    flat = {name for name in FILES if "." not in name and "__" not in name} - FOLDERS
    modules = [sorted(flat & plane) for plane in (CONTROL_PLANE, DATA_PLANE, MEETING_POINT)]
    folders = [[], sorted(CORE_FOLDERS), [], sorted(OUTER_FOLDERS)]
    lines = []
    for line, names, below in zip(text.splitlines(), [*modules, []], folders, strict=True):
        words = line.split("`")[0].rstrip()
        shown = " ".join(f"`{name}`" for name in (*names, *(f"{folder}/" for folder in below)))
        lines.append(f"{words} {shown}")
    return "\n".join(lines) + "\n"


def list_options(text: str) -> str:
    """The rows of the engine's options; the last rows, for classes, stay as they are."""
    head, ruler, *rows = text.splitlines()
    names = {option.name for option in OPTIONS}
    kept = [row for row in rows if spans(row)[0] not in names and spans(row)[0] in seams()]
    options = [f"| `{o.name}` | `{shown(o.default)}` | {o.help} |" for o in OPTIONS]
    return "\n".join([head, ruler, *options, *kept]) + "\n"


def seams() -> dict[str, inspect.Parameter]:
    """The arguments of LLM that are no options: classes of your own."""
    parameters = inspect.signature(LLM.__init__).parameters
    return {name: each for name, each in parameters.items() if each.kind is each.KEYWORD_ONLY}


def generate(text: str, marker: str) -> str:
    """What should stand between these markers of a document."""
    match marker:
        case "example-output":
            return f"```text\n{show_example()}\n```\n"
        case "start-up-report":
            return f"```text\n{run_example()[1]}\n```\n"
        case "planes":
            return list_planes(part(text, marker))
        case _:
            return list_options(part(text, marker))


def shown(default: Any) -> str:
    """A default as the tables write it."""
    if isinstance(default, type):
        return default.__name__
    if isinstance(default, Enum):
        return default.name
    return f'"{default}"' if isinstance(default, str) else str(default)


def update() -> None:
    for name, marker in GENERATED:
        text = read(name)
        old, new = part(text, marker), generate(text, marker)
        text = text.replace(f"<!-- {marker} -->\n{old}", f"<!-- {marker} -->\n{new}")
        (ROOT / name).write_text(text, encoding="utf-8")


@pytest.mark.parametrize(("name", "marker"), GENERATED)
def test_what_is_generated_is_up_to_date(name: str, marker: str) -> None:
    """If this fails: python tests/test_readme.py --update."""
    text = read(name)
    assert part(text, marker) == generate(text, marker)


def test_the_output_shown_is_the_beginning_of_what_the_example_prints() -> None:
    printed = run_example()[0]
    [box] = blocks(part(read(FRONT), "example-output"), "text")
    for line in box.splitlines():
        assert any(each.startswith(line.removesuffix(" ...")) for each in printed), line
    assert 4 <= len(box.splitlines()) <= 6


# -- names --


def reading_map(name: str = INSIDE) -> list[list[str]]:
    text = read(name)
    return [*table(part(text, "reading-map")), *table(part(text, "reading-map-rest"))]


def test_the_reading_map_has_every_module_and_its_symbols() -> None:
    """The dozen in a table of its own."""
    modules = []
    for ours, _ in reading_map():
        [file] = re.findall(r"^\*\*\[([\w/.]+)\]\(\1\)\*\*", ours)
        module = file.removesuffix(".py").removesuffix("/").replace("/", ".")
        modules.append(module)
        symbols = spans(ours)
        assert symbols, module
        assert missing([f"{module}.{symbol}" for symbol in symbols]) == []
    folders = (
        "bench",
        "tools.soak",
        "extras.course",
        "extras.metrics",
        "extras.pooling",
        "extras.quantization",
        "extras.server",
        "extras.structured_output",
        "extras.trace",
    )  # one row each
    files = {m for m in MODULES - FOLDERS if not m.startswith(tuple(f"{f}." for f in folders))}
    assert set(modules) == {*files, *folders}
    assert set(modules[: len(table(part(read(INSIDE), "reading-map")))]) == DOZEN


def test_names_with_a_dot_exist() -> None:
    """`scheduler.Scheduler.add` and `LLM.chat`, wherever they stand in the text."""
    classes = re.compile(r"(?m)^class (\w+)")
    homes = {
        name: m for m in sorted(MODULES) for name in classes.findall(FILES[m].read_text("utf-8"))
    }
    ours = homes.keys() | {module.split(".")[0] for module in MODULES}
    dotted = []
    for span in (span for name in ENGLISH for span in spans(read(name))):
        first, *rest = span.removesuffix("()").split(".")
        is_name = rest and all(word.isidentifier() for word in rest) and rest[-1] != "py"
        if is_name and first in ours:
            dotted.append(f"{homes.get(first, '')}.{span}".strip(".").removesuffix("()"))
    assert len(dotted) > 100
    assert missing(dotted) == []


@both
def test_the_life_of_a_request_is_told_in_the_order_in_which_it_runs(is_chinese: bool) -> None:
    """Every function that the eight steps name is called, each for the first time after the one
    before it. (With the backend that the text names.)"""
    steps = re.findall(r"(?m)^\d\. .*", part(twin(INSIDE, is_chinese), "life"))
    named = [[span for span in spans(step) if module_of(span)] for step in steps]
    assert len(steps) == 8
    assert all(named)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(attention_backend="torch") as llm:
        calls = first_calls(lambda: llm.generate("Once upon a time", params, use_tqdm=False))
    order = [span for step in named for span in step]
    codes = [inspect.unwrap(find(span)).__code__ for span in order]
    assert [span for span, code in zip(order, codes, strict=True) if code not in calls] == []
    assert sorted(codes, key=calls.index) == codes, order


def sampling_options() -> list[Field[Any]]:
    """The fields of SamplingParams that do something here."""
    return [field for field in fields(SamplingParams) if field.name not in MISSING]


def test_the_limits_are_those_of_the_code() -> None:
    """Those of a request in a table; those of a chat template in a sentence."""
    limits = {
        **dict.fromkeys(("request_id", "cache_salt"), inputs.NAME_LIMIT),
        **dict.fromkeys(("stop", "bad_words", "logits_processors"), sampling_params.WORD_LIMIT),
        **dict.fromkeys(("stop_token_ids", "logit_bias"), sampling_params.EDIT_LIMIT),
        "allowed_token_ids": sampling_params.ID_LIMIT,
        "n": sampling_params.RANGES["n"][2],
        "beam_width": beam_search.MOST_BEAMS,
    }
    text = read(GUIDE)
    rows = table(part(text, "limits"))
    shown_limits = {name: row[1] for row in rows for name in spans(row[0])}
    assert [name for name, most in limits.items() if f"{most:,}" not in shown_limits[name]] == []
    [(_, beams), (_, characters)] = [row for row in rows if not spans(row[0])]
    assert beams.startswith(f"{beam_search.MOST_CANDIDATES:,}:")
    assert characters == f"{guard.CHARACTERS:,} characters"
    sentence = f"{guard.SECONDS} seconds, {guard.MEGABYTES} MiB of memory or {guard.CHARACTERS:,}"
    assert sentence in text.replace("\n  ", " ")
    assert f"{sampling_params.BAD_WORDS_LIMIT:,} characters" in shown_limits["bad_words"]
    width = EngineConfig.max_logprobs // 2
    assert f"(with its default, {width})" in shown_limits["beam_width"]


@both
def test_every_option_is_listed_with_its_default(is_chinese: bool) -> None:
    for marker, declared in (
        ("llm-options", [*OPTIONS, *seams().values()]),
        ("sampling-options", sampling_options()),
    ):
        expected = [(option.name, shown(option.default)) for option in declared]
        rows = table(part(twin(GUIDE, is_chinese), marker))
        assert [(spans(row[0])[0], spans(row[1])[0]) for row in rows] == expected


def test_every_feature_has_a_place_and_a_test() -> None:
    """Beside a feature stand lines: `module.symbol` ..., then [test_file.py](...) `test` ..."""
    rows = table(part(read(TESTS), "features"))
    features = [row[0] for row in rows]
    assert sorted(features) == sorted(set(features)), "a feature has one row"
    wrong = []
    for feature, cell in rows:
        places, *tests = cell.split("<br>")
        assert spans(places), feature
        assert tests, feature
        wrong += missing(spans(places))
        for line in tests:
            [file] = re.findall(r"^\[(test_\w+\.py)\]\(\1\)", line)
            text = read(f"tests/{file}")
            assert spans(line), feature
            wrong += [test for test in spans(line) if not re.search(rf"(?m)^def {test}\(", text)]
    assert wrong == []
    listed = {span for row in rows for span in spans(row[0])}
    assert [field.name for field in sampling_options() if field.name not in listed] == []


def test_every_architecture_and_rope_type_is_listed() -> None:
    from test_families import FALLBACK

    from nanoserve.models import decoder
    from nanoserve.models.registry import ModelRegistry
    from nanoserve.models.rope import rope_frequencies

    classes = ModelRegistry.CLASSES.items()
    native = [name for name, cls in classes if cls.__module__ == decoder.__name__]
    text = part(read(GUIDE), "models")
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
    words = [word for row in table(part(read(INSIDE), "glossary")) for word in spans(row[0])]
    assert len(words) > 10
    assert [word for word in words if not re.search(rf"\b{re.escape(word)}\b", code)] == []


def slugs(text: str) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"(?m)^#+ (.*)", prose(text).lower())
    return {re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings}


def files_linked(text: str) -> list[str]:
    """The targets of all links and pictures, without their anchors."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(text)) + re.findall(r'src="([^"]+)"', text)
    return [link.partition("#")[0] for link in found]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_leads_somewhere(name: str) -> None:
    """To a file of the repository, and to a heading in it."""
    text = prose(read(name))
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue  # another site, which no test asks
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), link
        assert file.resolve().is_relative_to(ROOT.resolve()), link
        assert not anchor or anchor in slugs(file.read_text("utf-8")), link


@pytest.mark.parametrize("name", OURS)
def test_files_and_command_line_options_exist(name: str) -> None:
    text = read(name)
    words = re.sub(r"\]\(.*?\)", "", prose(text))  # links have a test of their own
    files = re.findall(r"(?<![\w./-])(?:tests|nanoserve|notebooks|\.ci)/[\w/.-]*\w", words)
    below = [ROOT, (ROOT / name).parent]
    assert [file for file in files if not any((each / file).exists() for each in below)] == []
    assert flags_of(" ".join(spans(text))) - known_flags() == set()


def known_flags() -> set[str]:
    scripts = [ROOT / "example.py", ROOT / "nanoserve/bench/cli.py", Path(__file__)]
    scripts += (ROOT / "nanoserve/tools").rglob("*.py")
    scripts.append(ROOT / "nanoserve/extras/course/cli.py")
    code = "".join(script.read_text("utf-8") for script in scripts)
    names = [option.name for option in (*OPTIONS, *sampling_options(), *fields(FrontendArgs))]
    fields_ = {f"--{name.replace('_', '-')}" for name in names}
    return {"--help", *fields_, *re.findall(r'"(--[\w-]+)"', code)}


def flags_of(text: str) -> set[str]:
    """The flags among these words; --no-x is the flag --x."""
    return {flag.replace("--no-", "--") for flag in re.findall(r"(?<!\S)--[\w-]+", text)}


@pytest.mark.parametrize("name", OURS)
def test_our_commands_have_the_flags_and_names_shown(name: str) -> None:
    """Each line of a code box that runs nanoserve, bench.py or example.py."""
    lines = "\n".join(blocks(read(name), "bash")).replace("\\\n", " ").splitlines()
    for line in lines:
        command = re.search(r"(?:nanoserve (\w+)|(?:bench|example)\.py)(.*)", line)
        if command and not line.startswith(("pip", "cd")):
            assert flags_of(command[2]) - known_flags() == set(), line
            assert command[1] is None or command[1] in COMMANDS, line


def test_commands_and_versions_are_those_of_the_package() -> None:
    ci = read(".ci/run")
    [commands] = blocks(part(read(TESTS), "develop"), "bash")
    assert commands.splitlines() == [
        line.partition(" || ")[0]  # what CI does if that fails is no command to type
        for line in ci.splitlines()
        if line.startswith(("ruff", "mypy", "pytest"))
    ]
    text = read(FRONT)
    for command in ("pip install -e . && python example.py", 'pip install -e ".[test]"'):
        assert command in "\n".join(blocks(text, "bash"))
        assert command in ci.replace("--quiet ", "")
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    [torch] = re.findall(r"torch>.*", setup["options"]["install_requires"])
    assert f'pip install "{torch}"' in "\n".join(blocks(text, "bash"))
    assert f"Python {setup['options']['python_requires'].removeprefix('>=')}" in text


@both
def test_the_sizes_in_the_comparison_are_those_of_the_package(is_chinese: bool) -> None:
    """The engine without the folders around it; within 5%, so that not every change of the code
    is one of the front page."""
    rows = table(part(twin(FRONT, is_chinese), "comparison"))
    numbers = [re.match(r"\d[\d,]+", row[1]) for row in rows]
    lines, num_tests = [int(found[0].replace(",", "")) for found in numbers if found]
    tests = "".join(file.read_text("utf-8") for file in (ROOT / "tests").glob("test_*.py"))
    sources = [FILES[name].read_text("utf-8") for name in CORE]
    assert lines == pytest.approx(sum(map(code_lines, sources)), rel=0.05)
    assert num_tests == pytest.approx(len(re.findall(r"(?m)^def test_", tests)), rel=0.05)


# -- the page --


@both
def test_the_front_page_is_short(is_chinese: bool) -> None:
    """And its code has as many lines as the heading says."""
    text = twin(FRONT, is_chinese)
    assert len(text.splitlines()) <= 215
    code, *_ = blocks(text, "python")
    assert len([line for line in code.splitlines() if line]) == 5
    assert "## 五行" in text if is_chinese else "## Five lines" in text


def least_width(cell: str) -> float:
    """Pixels that a cell needs on GitHub: lines are broken at spaces and between Chinese
    characters, not in a name, nor between a name and its comma."""
    cell = re.sub(r"<[^>]*>", " ", cell)
    cell = re.sub(r"\]\([^)]*\)|[\[*]", "", cell)  # links and bold letters
    cell = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "` `"), cell)
    cell = re.sub(r"([\u4e00-\u9fff])", r" \1 ", cell)
    cell = re.sub(r"([、，；：。？！）])", r"\1 ", cell).replace("（", " （")
    return max(map(width_of, cell.split()), default=0.0) + 27  # padding and a border


def width_of(word: str) -> float:
    text = re.sub(r"`[^`]*`", "", word)
    code = sum(LETTER_OF_CODE * len(span) + 11 for span in spans(word))
    return code + sum(LETTER if letter.isascii() else 16 for letter in text)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_table_and_code_block_fits_the_page(name: str) -> None:
    text = read(name)
    for rows in re.findall(r"(?m)(?:^\|.*\n)+", prose(text)):
        cells = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows.splitlines()]
        columns = [max(map(least_width, column)) for column in zip(*cells, strict=True)]
        assert sum(columns) <= PAGE_WIDTH, (columns, rows.splitlines()[0])
    boxes = re.findall(r"(?ms)^```\w*\n(.*?)^```$", text)
    lines = [line for box in boxes for line in box.splitlines()]
    assert [line for line in lines if LETTER_OF_CODE * len(line) + 32 > PAGE_WIDTH] == []


# -- vLLM --


@pytest.mark.skipif(not all(VLLM), reason="VLLM_0_6 and VLLM_0_32 name no folders")
def test_vllm_has_the_files_and_symbols_named() -> None:
    """A cell of the map: **V0** `a/file.py` `symbol` `symbol`<br>`another/file.py` `symbol` ..."""
    wrong = []
    folders = list(map(Path, VLLM))
    cells = [cell for _, theirs in reading_map() for cell in theirs.split("<br>**")]
    for cell in cells:
        [version] = re.findall(r"^(?:\*\*)?V([01])\*\*|—", cell)
        for folder in folders[int(version or 0) :][:1]:
            source = ""
            for span in spans(cell):
                if span.endswith(".py"):
                    file = folder / span
                    source = file.read_text() if file.exists() else ""
                    wrong += [span] * (not source)
                elif not re.search(rf"(?m)^\s*(class |def |async def |){span}\b", source):
                    wrong.append(span)
    code = "".join(file.read_text() for folder in folders for file in folder.rglob("*.py"))
    for row in table(part(read(INSIDE), "glossary")):
        wrong += [word for word in spans(row[-1]) if not re.search(rf"\b{word}\b", code)]
    assert wrong == []


def test_the_environment_variables_are_those_of_the_code() -> None:
    listed = {spans(row[0])[0] for row in table(part(read(GUIDE), "environment"))}
    code = "".join(file.read_text("utf-8") for file in FILES.values())
    assert {name for name in listed if name in code} == listed
    assert set(re.findall(r"\bNANOSERVE_[A-Z_]+", code)) <= listed


# -- the code, run --


@pytest.mark.parametrize("name", [FRONT, GUIDE])
def test_the_python_blocks_run(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, in one namespace; what they are there to show, they print."""
    from nanoserve.models.registry import ModelRegistry

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(ModelRegistry, "CLASSES", dict(ModelRegistry.CLASSES))
    namespace: dict[str, Any] = {}
    try:
        for block in blocks(read(name), "python"):
            if "from openai" in block:
                continue  # the next test but one
            exec(compile(block, name, "exec"), namespace)
            assert capsys.readouterr().out.strip(), block
    finally:
        namespace["llm"].close()


def test_the_lines_of_the_front_page_run_on_vllm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import changed, as the comment in the first line says: the same output.
    (vLLM compiles for minutes.)"""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    pytest.importorskip("vllm")
    ours, *_ = blocks(read(FRONT), "python")
    first, *others = ours.splitlines()
    monkeypatch.chdir(ROOT)
    outputs = []
    for code in (ours, "\n".join([first.partition("vLLM: ")[2], *others])):
        exec(compile(code, FRONT, "exec"), {})
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_the_lines_for_openais_client_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """curl and OpenAI's client get an answer. (test_server_door.py has the command that serves.
    Port 8000 may be in use here: a free one takes its place.)"""
    from servers import running

    from nanoserve.extras.async_llm import AsyncLLM
    from nanoserve.extras.server import build_app

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    [curl] = [box for box in blocks(read(FRONT), "bash") if box.startswith("curl")]
    [client] = [box for box in blocks(read(FRONT), "python") if "from openai" in box]
    [tools] = [box for box in blocks(read(GUIDE), "python") if "from openai" in box]
    with AsyncLLM() as async_llm, running(build_app(async_llm)) as server:
        exec(client.replace("8000", f"{server.port}"), {})
        assert "Paris" in capsys.readouterr().out
        if importlib.util.find_spec("xgrammar") is not None:
            exec(tools.replace("8000", f"{server.port}"), {})
            assert capsys.readouterr().out.startswith("weather {'city': 'Rome'}")
        if shutil.which("curl") and shutil.which("bash"):
            command = ["bash", "-c", curl.replace("8000", f"{server.port}")]
            answer = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
            assert json.loads(answer)["choices"][0]["text"].startswith(" there was a")


# -- the twin --


def names_and_numbers(text: str) -> tuple[list[str], list[str]]:
    return sorted(spans(text)), sorted(re.findall(r"\d+", text))


twins = pytest.mark.parametrize("name", TWINS)


@twins
def test_the_twin_names_the_same_things_cell_by_cell(name: str) -> None:
    ours, theirs = read(name), read(TWINS[name])
    for marker in re.findall(r"<!-- (\w[\w-]*) -->", ours):
        cells = [
            [[names_and_numbers(cell) for cell in row] for row in table(part(text, marker))]
            for text in (ours, theirs)
        ]
        assert cells[1] == cells[0], marker
    steps = [re.findall(r"(?m)^\d\. .*", text) for text in (ours, theirs)]
    assert list(map(names_and_numbers, steps[1])) == list(map(names_and_numbers, steps[0]))


@twins
def test_the_twin_has_the_same_code_names_links_and_sections(name: str) -> None:
    ours, theirs = read(name), read(TWINS[name])
    assert Path(TWINS[name]).name in ours.splitlines()[2]
    assert Path(name).name in theirs.splitlines()[2]
    assert sorted(set(spans(theirs))) == sorted(set(spans(ours)))
    links = [{link.replace(".zh-CN", "") for link in files_linked(text)} for text in (ours, theirs)]
    assert links[1] == links[0]
    assert blocks(theirs, "bash") == blocks(ours, "bash")
    pairs = zip(blocks(theirs, "python"), blocks(ours, "python"), strict=True)
    assert all(ast.dump(ast.parse(a)) == ast.dump(ast.parse(b)) for a, b in pairs)
    for mark in ("## ", "### ", "- ", "**", "<!-- "):
        assert len(re.findall(rf"(?m)^{re.escape(mark)}", theirs)) == len(
            re.findall(rf"(?m)^{re.escape(mark)}", ours)
        ), mark


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        update()


# -- Chinese --

CHINESE_PAGES = [name for name in DOCUMENTS if name.endswith(".zh-CN.md")]
# One word for one thing. A name in a code span is not a word.
VOCABULARY = {
    "checkpoint": "检查点",
    "tokenizer": "分词器",
    "logits processor": "logits 处理器",
    "内核": "kernel",
    "提示词": "prompt",
    "还没有实现": "尚未实现",
    "换了名字": "名称不同",
    "从 vLLM 过来": "从 vLLM 迁移",
}


@pytest.mark.parametrize("page", CHINESE_PAGES)
def test_a_chinese_paragraph_is_one_line(page: str) -> None:
    """A line break between two Chinese characters is shown as a space."""
    lines = prose(read(page)).splitlines()
    for line, following in pairwise(lines):
        is_chinese = re.search(r"[\u3000-\u9fff\uff00-\uffef]$", line.rstrip())
        is_text = re.match(r"[^\s|<#>-]", following) and not re.match(r"\d+\. ", following)
        assert not (is_chinese and is_text), f"{line}\n{following}"


@pytest.mark.parametrize("page", CHINESE_PAGES)
def test_chinese_pages_have_one_vocabulary(page: str) -> None:
    """documents.zh-CN.md also quotes other documents, in the first column of its tables."""
    text = re.sub(r"`[^`\n]*`|\[[\w/]+\.py\]\([^)]*\)|\]\([^)]*\)", "", prose(read(page)))
    text = re.sub(r"(?m)^\|[^|]*\|", "", text) if "documents" in page else text
    assert [(word, ours) for word, ours in VOCABULARY.items() if word in text] == []
