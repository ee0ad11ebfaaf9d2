"""The two planes and the folders: which module may import which, and what importing may do.

The rules are about folders, so that a new file in a folder needs no change here. nanoserve/ is read
as text: an import inside a function counts too, one under `if TYPE_CHECKING:` does not.
"""

from __future__ import annotations

import ast
import io
import os
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from nanoserve import LLM, SamplingParams

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nanoserve"

# The modules that one request passes: a reader can follow a request in them alone.
DOZEN = {
    "sequence",
    "block_manager",
    "scheduler",
    "engine",
    "input_processor",
    "output_processor",
    "attention",
    "model_runner",
    "input_batch",
    "sampler",
    "layers",
    "models.decoder",
}
# Settings, nouns and messages: both planes know them.
SHARED = {
    "checkpoint",
    "config",
    "exceptions",
    "inputs",
    "interrupts",
    "logger",
    "logprobs",
    "memory",
    "sampling_params",
    "sequence",
}
CONTROL_PLANE = SHARED | {"block_manager", "scheduler", "input_processor", "output_processor"}
CONTROL_PLANE |= {"arg_utils", "fault_isolation", "guard"}
MEETING_POINT = {"engine", "llm"}  # know both planes
CORE_FOLDERS = {"models", "kernels", "distributed"}  # belong to the data plane
OUTER_FOLDERS = {"extras", "tools", "bench", "demo"}  # nothing in the core knows them

# Other packages that import torch themselves; the control plane may not, even indirectly.
HEAVY = ("torch", "triton", "transformers", "safetensors.torch")


def name_of(file: Path) -> str:
    """nanoserve/models/moe.py -> "models.moe"; nanoserve/models/__init__.py -> "models"."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "__init__"


FILES = {name_of(file): file for file in sorted(PACKAGE.rglob("*.py"))}
FOLDERS = {name.split(".")[0] for name in FILES if "." in name}
CORE = {
    name
    for name in FILES
    if name.split(".")[0] not in OUTER_FOLDERS and name not in ("__init__", "__main__")
}
DATA_PLANE = CORE - CONTROL_PLANE - MEETING_POINT
SERVES_REQUESTS = [
    name for name in FILES if not name.startswith(("bench", "demo", "extras.course."))
]


def parse(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text(encoding="utf-8"))


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
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def nanoserve_imports(module: str) -> set[str]:
    """The nanoserve modules among them: {"config", "models.base"}."""
    found: set[str] = set()
    for name in imported_names(module):
        parts = name.split(".")[1:] if name.split(".")[0] == "nanoserve" else []
        while parts and ".".join(parts) not in FILES:
            parts.pop()  # from nanoserve.tools import doctor: the longest that is a module
        found |= {".".join(parts)} if parts else set()
    return found - {module}


def run_python(code: str, folder: Path = ROOT, num_lines_of_log: int = 0) -> str:
    """What a fresh interpreter prints, with the package in this folder."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert num_lines_of_log or not done.stderr, done.stderr
    return done.stdout.strip()


# -- arrows --


@pytest.mark.parametrize("module", sorted(CORE))
def test_the_core_imports_no_chapter_and_no_tool(module: str) -> None:
    """extras/, tools/, bench/ and demo/ can be deleted."""
    folders = {name.split(".")[0] for name in nanoserve_imports(module)}
    assert not folders & OUTER_FOLDERS


@pytest.mark.parametrize("module", sorted(CONTROL_PLANE))
def test_the_control_plane_knows_only_itself(module: str) -> None:
    assert nanoserve_imports(module) <= CONTROL_PLANE


@pytest.mark.parametrize("module", sorted(DATA_PLANE))
def test_the_data_plane_knows_no_decisions(module: str) -> None:
    """Only settings and nouns: neither the scheduler nor the block manager nor the engine."""
    assert nanoserve_imports(module) <= DATA_PLANE | SHARED


@pytest.mark.parametrize("module", ["attention", "layers"])
def test_definitions_do_not_know_their_fast_versions(module: str) -> None:
    """kernels/ imports the definition it replaces, never the other way round."""
    assert not any(name.startswith("kernels") for name in nanoserve_imports(module))


def test_extras_know_tools_and_each_other_only() -> None:
    """bench may know all: it measures the parts of a step with a timer of extras, and asks the demo
    model what it was trained for."""
    for module in FILES:
        folder = module.split(".")[0]
        imported = {name.split(".")[0] for name in nanoserve_imports(module)} & OUTER_FOLDERS
        allowed = {"demo": {"demo"}, "tools": {"tools"}}
        assert imported <= allowed.get(folder, OUTER_FOLDERS), module


def test_imports_make_no_circle() -> None:
    """prepare() raises CycleError and names the modules."""
    arrows = {name: nanoserve_imports(name) for name in FILES}
    TopologicalSorter({name: targets - {"__init__"} for name, targets in arrows.items()}).prepare()


@pytest.mark.parametrize("module", sorted(CONTROL_PLANE))
def test_the_control_plane_names_no_tensor_library(module: str) -> None:
    """Only guard.py imports transformers, in the functions that read and run tokenizers."""
    top = {name.split(".")[0] for name in top_level_imports(module)}
    assert not top & {"torch", "triton", "transformers", "safetensors", "huggingface_hub", "numpy"}
    anywhere = {name.split(".")[0] for name in imported_names(module)}
    assert not anywhere & {"torch", "triton", "safetensors", "numpy"}
    assert "transformers" not in anywhere or module == "guard"


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
config = EngineConfig(block_size=4, num_gpu_blocks_override=8).resolve(model_config)
blocks = BlockManager(8, 4)
scheduler = Scheduler(config, blocks)
inputs = InputProcessor(config, model_config, None, 8)
outputs = OutputProcessor(None, scheduler.finish)
seq = inputs.process("a", [5, 6, 7, 8, 9], SamplingParams(temperature=0, max_tokens=3))
outputs.add(outputs.make_state(seq))
scheduler.add(seq)
while scheduler.has_unfinished():
    step = scheduler.schedule()
    sampled = {item.seq_id: (100 + seq.num_output_tokens,) for item in step.scheduled}
    updates = scheduler.update_from_output(step, ModelOutput(sampled, {}))
    [result] = outputs.process_outputs(updates)
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


@pytest.mark.parametrize("module", SERVES_REQUESTS)
def test_no_state_outlives_an_engine(module: str) -> None:
    """Two engines live in one process: no `global`, nothing mutable at the top of a module or of a
    class, no caches of functions."""
    tree = parse(module)
    assert not [node for node in walk(tree) if isinstance(node, ast.Global)]
    assert not shared_state(tree.body)
    decorators = [
        ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
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


@pytest.mark.parametrize("module", SERVES_REQUESTS)
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
            case ast.keyword(arg="trust_remote_code", value=ast.Constant(value=False)):
                pass
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                used.add(name)
    if module == "arg_utils":
        used.discard("trust_remote_code")  # reads the option, and says that no code runs
    assert not used & set(FORBIDDEN), [FORBIDDEN[name] for name in used & set(FORBIDDEN)]


def test_the_checks_above_see_what_they_look_for() -> None:
    """On a module that does everything wrong."""
    bad = ast.parse("cache = {}\nclass A:\n    rows: list[int] = []\nLIMITS = [1]\n__all__ = ['A']")
    assert shared_state(bad.body) == ["cache", "rows"]
    hidden = "if TYPE_CHECKING:\n    import a\ndef f():\n    import b"
    found = [n.names[0].name for n in walk(ast.parse(hidden)) if isinstance(n, ast.Import)]
    assert found == ["b"]


# -- the dozen --


def code_lines(source: str) -> int:
    """Lines without comments, docstrings and blank ones."""
    documentation: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                documentation |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - documentation)


def test_a_request_can_be_followed_in_a_dozen_modules() -> None:
    """About 2,800 code lines; comments and docstrings are free."""
    total = sum(code_lines(FILES[module].read_text(encoding="utf-8")) for module in DOZEN)
    assert 2000 < total <= 2845, f"the dozen has {total} code lines"


# Modules that one decode step enters beside the dozen: who asks, where tensors wait, and what is
# one process or several.
AROUND_THE_DOZEN = {"llm", "executor", "device", "staging", "kv_cache", "parallel"}
AROUND_THE_DOZEN |= {"sampling_params"}
AROUND_THE_DOZEN |= {"exceptions", "fault_isolation"}  # what failed; nothing in most steps
AROUND_THE_DOZEN |= {"interrupts"}  # so that no change is left half made


def test_a_decode_step_stays_within_them() -> None:
    """On the definition of attention, a step enters the dozen and the few modules around it. (On a
    CPU, kernels.linear_cpu multiplies and normalizes, kernels.sampling takes the likeliest token,
    kernels.threads limits the threads; distributed.process asks whether this is the process that
    made the engine.)"""
    files = {str(file): module for module, file in FILES.items()}
    entered: set[str] = set()

    def note(frame: object, event: str, _: object) -> None:
        if event == "call":
            entered.add(files.get(frame.f_code.co_filename, ""))  # type: ignore[attr-defined]

    with LLM(num_kv_blocks=32, attention_backend="reference") as llm:
        llm.add_request("a", "Once upon a time", SamplingParams(temperature=0, max_tokens=4))
        llm.step()
        previous = sys.getprofile()
        sys.setprofile(note)
        try:
            llm.step()
        finally:
            sys.setprofile(previous)
    assert entered >= DOZEN - {"input_processor"}
    helpers = {"kernels.linear_cpu", "kernels.sampling", "kernels.threads", "distributed.process"}
    assert entered - DOZEN - AROUND_THE_DOZEN - {""} <= helpers


# -- chapters can be deleted --


@pytest.mark.slow
def test_the_core_works_without_the_outer_folders(tmp_path: Path) -> None:
    """A copy without extras/, tools/ and bench/ serves requests and passes the core's tests. (The
    tests need one file of tools/: the fake executor.)"""
    ignore = shutil.ignore_patterns("__pycache__", "extras", "tools", "bench", "training")
    shutil.copytree(PACKAGE, tmp_path / "nanoserve", ignore=ignore)
    (tmp_path / "nanoserve" / "tools").mkdir()
    for name in ("__init__.py", "fake_executor.py"):
        shutil.copy(PACKAGE / "tools" / name, tmp_path / "nanoserve" / "tools")
    (tmp_path / "tests").mkdir()
    shared = ("conftest.py", "engines.py", "fakes.py")
    for name in (*shared, "test_sequence.py", "test_engine.py", "test_output_processor.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    shutil.copy(ROOT / "setup.cfg", tmp_path)
    # An editable install would find a deleted folder in the original tree.
    block = (
        "import sys; sys.modules |= dict.fromkeys("
        + repr([f"nanoserve.{name}" for name in ("extras", "bench")])
        + ")"
    )
    (tmp_path / "conftest.py").write_text(block)
    generate = "print(LLM(num_kv_blocks=32).generate('Once', use_tqdm=False)[0].finished)"
    assert run_python(f"{block}; from nanoserve import LLM; {generate}", tmp_path, 1) == "True"
    options = ("-x", "-n", "0", "-p", "no:cacheprovider", "-k", "not ctrl_c")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
