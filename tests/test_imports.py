"""The rules of the house, as one list of violations; and what an import loads."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import nanoserve

HOME = Path(nanoserve.__file__).parent
CONTROL = (
    "sampling_params", "sequence", "config", "block_manager", "scheduler", "input_processor",
    "output_processor", "llm",
)  # fmt: skip
AROUND = ("entrypoints", "chapters", "bench", "tools", "teaching", "demo")
DOORS = {("llm", "chapters"), ("__main__", "tools"), ("__main__", "entrypoints")}  # the only ones
# Words of the chapters, in code; the lines that have them are public names of vLLM's.
CHAPTER = re.compile(
    r"lora|specul|draft|connector|offload|pooling|pooler|grammar|structured|quantiz|pipeline|\bray\b"
    r"|guard|fault|load_chapter|extras|chapters",
    re.I,
)
MOST = {"flat modules": 15, "code lines": 2500, "lines of a module": 300, "lines of a function": 40}
MOST |= {"names of schedule()": 12, "lines with a word of a chapter": 12}


def imports_of(path: Path) -> Iterator[str]:
    """Modules that this one imports, deferred imports too; not those for annotations alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            node.body = []
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def code_lines(path: Path) -> set[int]:
    """Without comments, docstrings and blank lines."""
    source, code = path.read_text(), set[int]()
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (*skip, tokenize.ENDMARKER):
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code -= set(range(node.lineno, node.end_lineno + 1))
    return code


def test_the_house_rules() -> None:
    flat = {
        path.stem: path for path in HOME.glob("*.py") if path.stem not in ("__init__", "__main__")
    }
    lines = {name: code_lines(path) for name, path in flat.items()}
    counted = {"flat modules": len(flat), "code lines": sum(map(len, lines.values()))}
    counted["lines of a module"] = max(map(len, lines.values()))
    counted["lines with a word of a chapter"] = sum(
        bool(CHAPTER.search(text))
        for name, path in flat.items()
        for number, text in enumerate(path.read_text().splitlines(), start=1)
        if number in lines[name]
    )
    functions = [
        (name, node)
        for name, path in flat.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]
    longest = [len(lines[n].intersection(range(f.lineno, f.end_lineno + 1))) for n, f in functions]
    counted["lines of a function"] = max(longest)
    [schedule] = [
        node for name, node in functions if (name, node.name) == ("scheduler", "schedule")
    ]
    names = {
        n.id if isinstance(n, ast.Name) else n.attr
        for n in ast.walk(schedule)
        if isinstance(n, (ast.Name, ast.Attribute))
    }
    counted["names of schedule()"] = len(names)
    wrong = [
        f"{what}: {number}, at most {MOST[what]}"
        for what, number in counted.items()
        if number > MOST[what]
    ]
    for path in HOME.rglob("*.py"):
        folder = path.relative_to(HOME).parts[0]
        for each in imports_of(path) if folder not in AROUND and path.stem != "__init__" else ():
            target = each.removeprefix("nanoserve.").split(".")[0]
            if (
                each.startswith("nanoserve.")
                and target in AROUND
                and (path.stem, target) not in DOORS
            ):
                wrong.append(f"{path.stem} imports {each}, which stands around the core")
    for name in CONTROL:
        wrong += [
            f"{name} imports {i}"
            for i in imports_of(flat[name])
            if i.split(".")[0] in ("torch", "numpy", "transformers")
        ]
    assert wrong == []


def run(code: str, folder: Path = HOME.parent) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_importing_the_package_or_its_control_plane_loads_no_torch() -> None:
    names = ", ".join(f"nanoserve.{name}" for name in CONTROL)
    loaded = run(f"import sys, nanoserve, {names}; print(*sys.modules)").split()
    assert not {"torch", "numpy", "transformers"} & {*loaded}
    assert not [name for name in loaded if name.endswith(".parts")]
