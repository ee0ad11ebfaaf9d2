"""The drawing of the two planes, held: who may import whom, and what importing may do.

A change that adds a module or an arrow changes the table below, in the open.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "nanoserve"

# module -> the nanoserve modules it may import, wherever in it the import stands.
CONTROL_PLANE: dict[str, set[str]] = {
    "config": set(),
    "sampling_params": set(),
    "sequence": {"sampling_params"},
    "block_manager": {"sequence"},
    "scheduler": {"block_manager", "config", "sequence"},
    "beam_search": {"sampling_params", "scheduler", "sequence"},
    "processor": {"config", "sampling_params", "sequence"},
}
DATA_PLANE: dict[str, set[str]] = {
    "attention": {"attention_torch", "attention_triton"},
    "attention_torch": set(),
    "attention_triton": set(),
    "parallel": set(),
    "layers": {"attention", "parallel"},
    "moe": {"attention", "layers", "parallel"},
    "models": {"attention", "config", "layers", "moe", "parallel"},
    "transformers_fallback": {"attention", "config", "layers", "models"},
    "loader": {"config", "layers", "models", "parallel", "transformers_fallback"},
    "sampler": {"sampling_params", "sequence"},
    "staging": set(),
    "input_batch": {"sampler", "sampling_params", "sequence", "staging"},
    "kv_cache": {"attention", "config", "sequence"},
    "cuda_graph": set(),
    "model_runner": {
        "attention",
        "config",
        "cuda_graph",
        "input_batch",
        "kv_cache",
        "layers",
        "loader",
        "models",
        "parallel",
        "sampler",
        "sequence",
        "staging",
    },
    "ranks": {"config", "model_runner", "parallel"},
    "executor": {
        "attention",
        "config",
        "layers",
        "model_runner",
        "models",
        "parallel",
        "ranks",
        "sampling_params",
        "sequence",
    },
}
# What both planes may know: settings and nouns.
SHARED = {"config", "sampling_params", "sequence"}

MEETING_POINT: dict[str, set[str]] = {
    "engine": {*CONTROL_PLANE, "executor"},
    "llm": {*CONTROL_PLANE, "engine"},
    "parallel_demo": {*SHARED, *DATA_PLANE, "llm"},
    "doctor": {
        "attention",
        "config",
        "kv_cache",
        "layers",
        "llm",
        "model_runner",
        "models",
        "sampling_params",
    },
    "__main__": {"doctor"},
    "__init__": {"beam_search", "engine", "llm", "processor", "sampling_params"},
}
ALLOWED_IMPORTS = {**CONTROL_PLANE, **DATA_PLANE, **MEETING_POINT}

# Other packages that import torch themselves; the control plane may not, even indirectly.
HEAVY = ("torch", "triton", "transformers", "safetensors.torch")


def parse(module: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))


def walk(node: ast.AST, types_too: bool = False) -> Iterator[ast.AST]:
    """All nodes, except what stands under `if TYPE_CHECKING:` and never runs."""
    yield node
    for child in ast.iter_child_nodes(node):
        is_for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if types_too or not is_for_types:
            yield from walk(child, types_too)


def imported_names(module: str) -> set[str]:
    """Dotted names of all that a module imports, at its top or in its functions."""
    names: set[str] = set()
    for node in walk(parse(module)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import hides where the arrow goes"
            assert node.module
            names.add(node.module)
            if node.module == "nanoserve":
                names |= {f"nanoserve.{alias.name}" for alias in node.names}
    return names


def nanoserve_imports(module: str) -> set[str]:
    """The nanoserve modules among them: {"config", "sequence"}."""
    return {
        name.removeprefix("nanoserve.")
        for name in imported_names(module)
        if name.split(".")[0] == "nanoserve"
    }


def run_python(code: str) -> str:
    """What a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return done.stdout.strip()


# -- arrows --


def test_the_table_names_every_module() -> None:
    assert {file.stem for file in PACKAGE.glob("*.py")} == set(ALLOWED_IMPORTS)


@pytest.mark.parametrize("module", sorted(ALLOWED_IMPORTS))
def test_imports_point_one_way(module: str) -> None:
    """No arrow that the table does not have; in particular none to extras or the demo."""
    surplus = nanoserve_imports(module) - ALLOWED_IMPORTS[module]
    assert not surplus, f"{module}.py may not import {surplus}"


def test_the_table_itself_keeps_to_the_drawing() -> None:
    """Neither plane knows the other beyond settings and nouns, and no arrows run in a circle."""
    for module, allowed in CONTROL_PLANE.items():
        assert allowed <= set(CONTROL_PLANE), module
    for module, allowed in DATA_PLANE.items():
        assert allowed <= SHARED | set(DATA_PLANE), module
    done: set[str] = set()
    while left := {module for module in ALLOWED_IMPORTS if module not in done}:
        free = {module for module in left if ALLOWED_IMPORTS[module] <= done}
        assert free, f"a circle among {left}"
        done |= free


@pytest.mark.parametrize("module", sorted(CONTROL_PLANE))
def test_the_control_plane_names_no_tensor_library(module: str) -> None:
    """Not at its top. Only processor.py imports transformers, in the function that builds the
    tokenizer."""
    top = {name.split(".")[0] for name in top_level_imports(module)}
    assert not top & {"torch", "triton", "transformers", "safetensors", "huggingface_hub", "numpy"}
    anywhere = {name.split(".")[0] for name in imported_names(module)}
    assert not anywhere & {"torch", "triton", "safetensors", "numpy"}
    assert "transformers" not in anywhere or module == "processor"


def top_level_imports(module: str) -> set[str]:
    names: set[str] = set()
    for node in parse(module).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


# -- what importing does --


@pytest.mark.parametrize("module", ["", *(f".{name}" for name in sorted(CONTROL_PLANE))])
def test_importing_is_cheap(module: str) -> None:
    """A fresh interpreter that imports nanoserve, or any part of its control plane, has loaded
    neither torch nor anything that would; and nothing is printed."""
    code = f"import nanoserve{module}, sys; print([n for n in {HEAVY} if n in sys.modules])"
    assert run_python(code) == "[]"


def test_the_control_plane_works_without_torch() -> None:
    """On a machine that has none, it can be imported, tested and taught: here a request lives its
    whole life, with a lambda for a model."""
    code = """
import sys
for name in ("torch", "triton", "transformers", "safetensors"):
    sys.modules[name] = None  # importing it raises ImportError
from pathlib import Path
from nanoserve.block_manager import BlockManager
from nanoserve.config import DEMO_MODEL, EngineConfig, ModelConfig
from nanoserve.input_processor import InputProcessor
from nanoserve.output_processor import OutputProcessor
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import ModelOutput

model_config = ModelConfig.from_folder(DEMO_MODEL)
config = EngineConfig(block_size=4, num_kv_blocks=8).resolve(model_config)
blocks = BlockManager(8, 4)
scheduler = Scheduler(config, blocks)
inputs, outputs = InputProcessor(config, model_config, None, 8), OutputProcessor(None)
seq = inputs.process("a", [5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=3))
outputs.add(seq, None)
scheduler.add(seq)
while scheduler.has_unfinished():
    step = scheduler.schedule()
    sampled = {item.seq_id: (100 + seq.num_output_tokens,) for item in step.scheduled}
    for update in scheduler.update_from_output(step, ModelOutput(sampled, {})):
        outputs.append(update)
        result = outputs.build_output([update.sequence])
    blocks.check()
print(result.outputs[0].token_ids, result.outputs[0].finish_reason, blocks.num_free_blocks)
"""
    assert run_python(code) == "[100, 101, 102] length 8"


# -- no state at module level --

MAKES_MUTABLE = {
    "Counter",
    "OrderedDict",
    "WeakKeyDictionary",
    "WeakValueDictionary",
    "bytearray",
    "count",
    "defaultdict",
    "deque",
    "dict",
    "list",
    "local",
    "set",
}


def is_mutable(value: ast.expr | None) -> bool:
    """Does this expression make something that can be changed in place?"""
    if isinstance(value, ast.Call):
        function = value.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return name in MAKES_MUTABLE
    literals = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    return isinstance(value, literals)


def shared_state(body: list[ast.stmt]) -> list[str]:
    """Names in a module's or a class's body that hold something mutable. ALL_CAPS names are
    constants or registries of classes, __all__ and __slots__ are Python's."""
    names: list[str] = []
    for node in body:
        if isinstance(node, ast.ClassDef):
            names += shared_state(node.body)
        if isinstance(node, ast.Assign | ast.AnnAssign) and is_mutable(node.value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names += [ast.unparse(target) for target in targets]
    return [name for name in names if not name.isupper() and not name.startswith("__")]


@pytest.mark.parametrize("module", sorted(ALLOWED_IMPORTS))
def test_no_state_outlives_an_engine(module: str) -> None:
    """Two engines live in one process: no `global`, nothing mutable at the top of a module or of a
    class, no caches of functions."""
    tree = parse(module)
    assert not [node for node in walk(tree) if isinstance(node, ast.Global)]
    assert not shared_state(tree.body)
    decorators = [
        ast.unparse(decorator)
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    ]
    assert not [name for name in decorators if "cache" in name]


FORBIDDEN = {
    "set_default_device": "changes what everybody's tensors are",
    "set_default_dtype": "changes what everybody's tensors are",
    "set_default_tensor_type": "changes what everybody's tensors are",
    "trust_remote_code": "runs code from a checkpoint",
}


@pytest.mark.parametrize("module", sorted(ALLOWED_IMPORTS))
def test_no_side_effects_on_the_process(module: str) -> None:
    """An engine leaves torch as it found it, and runs nobody else's code. A generator of one's own
    may be seeded, torch's may not."""
    used: set[str] = set()
    for node in walk(parse(module)):
        match node:
            case ast.Call(func=ast.Attribute(attr="manual_seed" | "manual_seed_all") as function):
                assert "torch." not in ast.unparse(function) or "Generator" in ast.unparse(function)
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.arg(arg=name):
                used.add(name)
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                used.add(name)
    assert not used & set(FORBIDDEN), [FORBIDDEN[name] for name in used & set(FORBIDDEN)]


def test_the_checks_above_see_what_they_look_for() -> None:
    """On a module that does everything wrong."""
    bad = ast.parse("cache = {}\nclass A:\n    rows: list[int] = []\nLIMITS = [1]\n__all__ = ['A']")
    assert shared_state(bad.body) == ["cache", "rows"]
    hidden = "if TYPE_CHECKING:\n    import a\ndef f():\n    import b"
    found = [n.names[0].name for n in walk(ast.parse(hidden)) if isinstance(n, ast.Import)]
    assert found == ["b"]
