"""Which code of a student runs on the grader's machine?

Only the functions of the tasks, and only if each passes this screen. The rest of a submission is
parsed and never run: no conftest.py, no module-level code, no second file.

    import os                     refused: imports are from an allow-list
    open("hidden/lab.py")         refused: a name that reaches files, the interpreter, other frames
    seq.__class__.__mro__         refused: names with two underscores lead everywhere
    torch.load(...)               refused: an attribute that reads, writes, or loads code
    self.check = print            refused: an attribute that the engine's module never assigns
    self.pool.allocate()          passes

A screen is a fence and no wall: Python was not made to hold hostile code. So the functions run in a
child with limits of time, memory, file size and processes (child.py), which holds no hidden file
open and writes no result: it only says what it saw, and the parent writes. Run the grader in a
container, as Gradescope does, if submissions come from people whom you do not know.

vLLM: none.
"""

from __future__ import annotations

import ast

IMPORTS = {"bisect", "collections", "dataclasses", "functools", "heapq", "itertools", "math"}
IMPORTS |= {"operator", "typing", "numpy", "torch", "triton", "__future__"}
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
                bad += [each.name for each in names if "." in each.name]
            case ast.ImportFrom(module=module, names=names, level=level):
                root = (module or "").split(".")[0]
                is_bad = level or root not in {*IMPORTS, "nanoserve"} or "extras" in (module or "")
                bad = [module or "."] if is_bad else [n.name for n in names if is_hidden(n.name)]
                bad += [each.name for each in names if each.name in FORBIDDEN_ATTRIBUTES]
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
