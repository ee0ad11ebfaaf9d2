"""Which code of a student runs on the grader's machine?

Only the functions of the tasks, and only if each passes this screen. The rest of a submission is
parsed and never run: no conftest.py, no module-level code, no second file.

    import os                     refused: imports are from an allow-list
    open("hidden/lab.py")         refused: a name that reaches files, the interpreter, other frames
    seq.__class__.__mro__         refused: names with two underscores lead everywhere
    torch.load(...)               refused: an attribute that reads, writes, or loads code
    self.check = print            refused: an attribute that the engine's module never assigns
    Path("hidden").read_text()    refused: an object of the engine's module that is not the engine's
    class Any: def __eq__(...)    refused: what equals everything passes each comparison
    self.pool.allocate()          passes

`screen` looks at the text alone, before anything runs. `reach` looks in the child, where the
modules are: each attribute of a module must be written out, so that it can be followed. Hence
`torch.nn.functional.silu` passes, `dataclasses._sys` does not, and `m = torch` neither.

A screen is a fence and no wall: Python was not made to hold hostile code. So the functions run in a
child with limits of time, memory, file size and processes (child.py), which holds no hidden file
open and writes no result: it only says what it saw, and the parent writes. Run the grader in a
container, as Gradescope does, if submissions come from people whom you do not know.

vLLM: none.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

IMPORTS = {"bisect", "collections", "dataclasses", "functools", "heapq", "itertools", "math"}
IMPORTS |= {"operator", "typing", "numpy", "torch", "triton", "__future__"}
# Modules that a task may use the names of, and whose classes and functions it may use.
MODULES = (IMPORTS - {"__future__"}) | {"collections.abc", "time", "torch.nn", "torch.linalg"}
MODULES |= {"torch.distributed"}  # which only the engine's own module can bring in
MODULES |= {"torch.nn.functional", "torch.special", "numpy.linalg", "triton.language"}
OWNERS = {
    *IMPORTS,
    "abc",
    "builtins",
    "contextlib",
    "datetime",
    "enum",
    "nanoserve",
    "time",
    "tqdm",
}
OWNERS |= {"weakref", "libdevice"}
# What else a class may define: a method such as __eq__ could deceive a check.
METHODS = {
    "__init__",
    "__post_init__",
    "__len__",
    "__iter__",
    "__next__",
    "__call__",
    "__getitem__",
}
METHODS |= {"__repr__", "__str__", "__hash__"}
IMPORT = ast.Import | ast.ImportFrom
# Builtins that a task never needs, and that reach out of it.
FORBIDDEN_NAMES = {"__import__", "breakpoint", "compile", "delattr", "eval", "exec", "exit"}
FORBIDDEN_NAMES |= {"getattr", "globals", "help", "input", "locals", "memoryview", "open", "quit"}
FORBIDDEN_NAMES |= {"setattr", "type", "vars"}
# Attributes through which modules and frames lead to files, processes, other code, or the checks.
FORBIDDEN_ATTRIBUTES = {"builtins", "compile", "compiler", "course", "cpp_extension", "ctypes"}
FORBIDDEN_ATTRIBUTES |= {"ctypeslib", "currentframe", "distributed", "dump", "dynamo", "extras"}
FORBIDDEN_ATTRIBUTES |= {"f2py", "fromfile"}
FORBIDDEN_ATTRIBUTES |= {"genfromtxt", "hub", "importlib", "inspect", "jit", "library", "load"}
FORBIDDEN_ATTRIBUTES |= {"load_library", "loadtxt", "memmap", "modules", "multiprocessing", "ops"}
FORBIDDEN_ATTRIBUTES |= {"os", "package", "pickle", "save", "savetxt", "savez", "serialization"}
FORBIDDEN_ATTRIBUTES |= {"settrace", "setprofile", "subprocess", "sys", "system", "testing"}
FORBIDDEN_ATTRIBUTES |= {"threading", "tofile", "utils", "gc", "f_back", "f_globals", "f_locals"}
FORBIDDEN_ATTRIBUTES |= {"gi_frame", "cr_frame", "ag_frame", "tb_frame", "tb_next", "gi_code"}
FORBIDDEN_ATTRIBUTES |= {"f_builtins", "f_code", "cr_code", "ag_code"}
# These take a name, or a piece of code, as text.
FORBIDDEN_ATTRIBUTES |= {"attrgetter", "methodcaller", "get_type_hints", "ForwardRef", "wraps"}
FORBIDDEN_ATTRIBUTES |= {"singledispatch", "singledispatchmethod", "make_dataclass"}
FORBIDDEN_ATTRIBUTES |= {"update_wrapper", "from_file", "fromregex", "DataSource", "safe_eval"}


def stored_attributes(source: str) -> set[str]:
    """The attributes that a module assigns anywhere, such as "num_computed_tokens"."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load)
    }


def screen(source: str, stored: set[str]) -> str | None:
    """Why this function must not run, as a sentence; None if it may. `source` has been parsed by
    holes.take before, so it is one function. stored: the attributes that it may assign."""
    tree = ast.parse(source)
    is_triton = not is_bound(tree, "tl")  # triton.language, as the kernels' module calls it
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name("tl"), attr="load") if is_triton:
                bad = []
            case ast.Import(names=names):
                bad = [each.name for each in names if each.name.split(".")[0] not in IMPORTS]
                bad += [n.name for n in names if "." in n.name and n.name not in MODULES]
            case ast.ImportFrom(module=module, names=names, level=level):
                root = (module or "").split(".")[0]
                is_bad = level or root not in {*IMPORTS, "nanoserve"} or "extras" in (module or "")
                bad = [module or "."] if is_bad else [n.name for n in names if is_hidden(n.name)]
                bad += [n.name for n in names if n.name in {*FORBIDDEN_ATTRIBUTES, "*"}]
            case ast.FunctionDef(name=name) if is_hidden(name) and node is not tree.body[0]:
                bad = [name] if name not in METHODS else []
            case ast.Name(id=name):
                bad = [name] if name in FORBIDDEN_NAMES or is_hidden(name) else []
            case ast.Attribute(attr=name, ctx=ctx):
                is_assigned = not isinstance(ctx, ast.Load) and name not in stored
                is_bad = name in FORBIDDEN_ATTRIBUTES or is_hidden(name)
                bad = [f"an assignment to .{name}"] if is_assigned else [name] * is_bad
            case ast.MatchClass(kwd_attrs=names):
                bad = [name for name in names if is_hidden(name) or name in FORBIDDEN_ATTRIBUTES]
            case ast.Global() | ast.Nonlocal():
                bad = ["global"]
            case ast.Constant(value=str(text)):  # "{0.__class__}".format(...)
                bad = ["a format that reads attributes"] if "{" in text and "__" in text else []
            case ast.ExceptHandler(type=None) | ast.ExceptHandler(type=ast.Name("BaseException")):
                bad = ["an except that catches everything"]
            case _:
                bad = []
        if bad:
            line = getattr(node, "lineno", 0)
            return f"line {line} of the function uses {bad[0]}, which no task needs"
    return None


def reach(source: str, names: Mapping[str, Any]) -> str | None:
    """Which object of a foreign module the code uses, as a sentence; None if none. names: the
    globals that it will have."""
    tree = ast.parse(source)
    meanings: dict[str, list[Any]] = {}  # of a name: it may be a global here and an import there
    local = local_names(tree)
    seen = {name: value for name, value in names.items() if name not in local}
    for name, value in [*imported(tree), *seen.items()]:
        meanings.setdefault(name, []).append(value)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute | IMPORT) else ""
        where = f"line {getattr(node, 'lineno', 0)} of the function"
        if isinstance(node, ast.ClassDef) and any(isinstance(each, IMPORT) for each in node.body):
            return f"{where} imports in the body of a class: import in front of it"
        if isinstance(node, IMPORT):
            found = [value for _, value in imported(node)]
            if isinstance(node, ast.ImportFrom):
                found.append(load(node.module or ""))
        else:
            found = follow(node, meanings)
        if any(is_foreign(each) for each in found):
            return f"{where} uses {text}, which no task needs"
        is_value = isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner
        if is_value and any(isinstance(each, ModuleType) for each in found):
            return f"{where} passes on the module {text}: write {text}.name at each place"
    return None


def load(module: str) -> Any:
    """The module; None if there is none: then the import itself says so."""
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def imported(tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """(name, object) of what the code imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                name = each.name if each.asname else each.name.partition(".")[0]
                yield each.asname or name, load(name)
        if isinstance(node, ast.ImportFrom):
            module = load(node.module or "")
            for each in node.names:
                yield each.asname or each.name, get(module, each.name)


def get(module: Any, name: str) -> Any:
    """A name of a module; of another than the engine's a public one, or else a foreign object."""
    is_private = name.startswith("_") and not is_engine(module)
    return importlib if is_private else getattr(module, name, None)


def follow(node: ast.AST, meanings: Mapping[str, list[Any]]) -> list[Any]:
    """What a name may be, or an attribute of a module; nothing for all else."""
    if isinstance(node, ast.Name):
        return meanings.get(node.id, [])
    if isinstance(node, ast.Attribute):
        bases = follow(node.value, meanings)
        return [get(each, node.attr) for each in bases if isinstance(each, ModuleType)]
    return []


def is_engine(module: Any) -> bool:
    return getattr(module, "__name__", "").partition(".")[0] == "nanoserve"


def is_foreign(found: Any) -> bool:
    """True for a module that no task needs, and for a class or function of such a module."""
    if isinstance(found, ModuleType):
        return found.__name__ not in MODULES and not is_engine(found)
    owner = getattr(found, "__module__", None) if callable(found) else None
    return isinstance(owner, str) and owner.partition(".")[0].lstrip("_") not in OWNERS


def local_names(tree: ast.Module) -> set[str]:
    """What hides a global in all of the one function. A class in it would see the global all the
    same."""
    function = tree.body[0]
    has_class = any(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
    if has_class or len(tree.body) > 1 or not isinstance(function, ast.FunctionDef):
        return set()
    for code in compile(tree, "<your function>", "exec", dont_inherit=True).co_consts:
        if isinstance(code, CodeType) and code.co_name == function.name:
            return {*code.co_varnames, *code.co_cellvars}
    return set()


def is_bound(tree: ast.AST, name: str) -> bool:
    """True if a variable, a parameter, an import or anything else gets this name."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Load()) | ast.Attribute() | ast.Constant() | ast.keyword():
                pass
            case _:
                if any(value == name for _, value in ast.iter_fields(node)):
                    return True
    return False


def is_hidden(name: str) -> bool:
    """Names such as __class__ and __globals__."""
    return name.startswith("__") and name.endswith("__") and name not in {"__init__", "__len__"}
