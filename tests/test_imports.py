"""The rules of the house, as one list of violations; and what an import loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nanoserve

HOME = Path(nanoserve.__file__).parent
FILES = {path: path.read_text() for path in HOME.rglob("*.py")}
FLAT = {path.stem: path for path in HOME.glob("*.py") if not path.stem.startswith("__")}
CONTROL = (*("sampling_params", "sequence", "config", "block_manager", "scheduler", "llm"),)
CONTROL += ("input_processor", "output_processor")  # all without torch
AROUND = ("entrypoints", "chapters", "bench", "tools", "teaching", "demo")
DOORS = {("llm", "chapters"), ("__main__", "tools"), ("__main__", "entrypoints")}  # the only ones
# Words of the chapters, in code; the lines that have them are public names of vLLM's.
CHAPTER = re.compile(
    r"lora|specul|draft|connector|offload|pooling|pooler|grammar|structured|quantiz|pipeline|\bray\b"
    r"|guard|fault|load_chapter|extras|chapters",
    re.I,
)


def nodes(path: Path, *kinds: type) -> list[Any]:
    return [node for node in ast.walk(ast.parse(FILES[path])) if isinstance(node, kinds)]


def imports_of(path: Path) -> list[str]:
    """Modules that this one imports, deferred imports too."""
    whole = [alias.name for node in nodes(path, ast.Import) for alias in node.names]
    return whole + [node.module or "" for node in nodes(path, ast.ImportFrom)]


def code_of(path: Path) -> dict[int, str]:
    """Line number -> line, without comments, docstrings and blank lines."""
    texts = [node for node in nodes(path, ast.Expr) if isinstance(node.value, ast.Constant)]
    docs = {line for node in texts for line in range(node.lineno, node.end_lineno + 1)}
    lines = {i: line.strip() for i, line in enumerate(FILES[path].splitlines(), start=1)}
    return {i: line for i, line in lines.items() if line and line[0] != "#" and i not in docs}


def test_the_house_is_small() -> None:
    code = {name: code_of(path) for name, path in FLAT.items()}
    functions = [(n, node) for n, path in FLAT.items() for node in nodes(path, ast.FunctionDef)]
    [schedule] = [node for _, node in functions if node.name == "schedule"]
    names = [getattr(n, "id", getattr(n, "attr", None)) for n in ast.walk(schedule)]
    assert len(FLAT) <= 15
    assert sum(map(len, code.values())) <= 2500
    assert max(map(len, code.values())) <= 300
    sizes = {
        f"{n}.{f.name}": len(code[n].keys() & {*range(f.lineno, f.end_lineno + 1)})
        for n, f in functions
    }
    assert {name: size for name, size in sizes.items() if size > 40} == {}
    assert len({*names} - {None}) <= 12
    assert sum(bool(CHAPTER.search(line)) for each in code.values() for line in each.values()) <= 12


def test_imports_point_one_way() -> None:
    wrong = []
    for path in FILES:
        if path.relative_to(HOME).parts[0] not in (*AROUND, "__init__.py"):
            targets = [i.split(".")[1] for i in imports_of(path) if i.startswith("nanoserve.")]
            wrong += [
                (path.stem, i) for i in targets if i in AROUND and (path.stem, i) not in DOORS
            ]
        if path in [FLAT[name] for name in CONTROL]:
            tops = {i.split(".")[0] for i in imports_of(path)}
            wrong += [(path.stem, i) for i in tops & {"torch", "numpy", "transformers"}]
    assert wrong == []


def test_importing_the_package_or_its_control_plane_loads_no_torch() -> None:
    names = ", ".join(f"nanoserve.{name}" for name in CONTROL)
    code = f"import sys, nanoserve, {names}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HOME.parent, capture_output=True, text=True
    )
    loaded = {*done.stdout.split()}
    assert "nanoserve.scheduler" in loaded, done.stderr
    assert not {"torch", "numpy", "transformers"} & loaded
    assert not [name for name in loaded if name.endswith(".parts")]
