"""How does one function of the engine become a student's?

The process is the right engine with one function exchanged: the code object of the
engine's function is replaced by that of the student's. So all who call it get the student's, also
those who imported it by name, and decorators, defaults and closures stay the engine's. Compiling a
function runs none of it; the definition itself is never executed.

vLLM: none.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

from nanoserve.extras.course import holes
from nanoserve.extras.course.spec import Task, Wrong


def graft(task: Task, source: str) -> None:
    """Let the engine's function be the one in `source`. Raises Wrong if its parameters differ."""
    function = find_function(task)
    file = f"<your {task.name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    definition = holes.find(source, task.name.rpartition(".")[2])
    expected = [*inspect.signature(function).parameters]
    arguments = definition.args
    given = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    given += [each.arg for each in (arguments.vararg,) if each]
    given += [a.arg for a in arguments.kwonlyargs]
    given += [each.arg for each in (arguments.kwarg,) if each]
    if given != expected:
        raise Wrong(f"{task.name} has the parameters ({', '.join(expected)}), not {given}.")
    if "__class__" in function.__code__.co_freevars:  # it calls super(), as a hole does not
        definition.body.append(ast.Expr(ast.Name("__class__", ast.Load())))
    # In a class of this name: then super() and names with two leading underscores mean the same.
    owner = task.name.rpartition(".")[0].rpartition(".")[2]
    tree = ast.parse(f"class {owner}: pass" if owner else "")
    scope: Any = tree.body[0] if owner else tree
    scope.body = [definition]
    tree = ast.fix_missing_locations(tree)
    code = find_code(compile(tree, file, "exec", dont_inherit=True), definition.name)
    try:
        function.__code__ = code
    except ValueError as error:
        raise Wrong(f"{task.name} must not use super(): {error}") from None


def find_function(task: Task) -> FunctionType:
    """The engine's function, under its decorators."""
    module = import_module(task.module)
    *path, last = task.name.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, part)
    found: Any = inspect.getattr_static(owner, last)
    found = getattr(found, "fget", None) or getattr(found, "__func__", found)
    found = getattr(found, "fn", found)  # a Triton kernel
    function = inspect.unwrap(found)
    assert isinstance(function, FunctionType), task.name
    return function


def is_hole(task: Task, function: FunctionType) -> bool:
    """Is the function still as `make` has cut it?"""
    return task.message in function.__code__.co_consts


def find_code(code: CodeType, name: str) -> CodeType:
    """The code object of the function `name` in that of a module, or of its class."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            return each if each.co_name == name else find_code(each, name)
    raise LookupError(name)
