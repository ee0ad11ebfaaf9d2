"""How does a function of the engine become a task?

    def share(self, block_id):                        def share(self, block_id):
        \"\"\"Add a reference; ...\"\"\"         cut          \"\"\"Add a reference; ...\"\"\"
        if self.ref_counts[block_id] == 0:  --->          raise NotImplementedError("1.2: ...")
            del self.free_queue[block_id]
        self.ref_counts[block_id] += 1

The signature and the docstring stay: they are the specification. Everything else of the file stays
too, so a student reads the real engine. `take` is the way back: the source of one function out of a
submitted file, and nothing else of that file.

Functions are found by their name in the syntax tree ("BlockPool.share"), never by a line number. If
the engine's source renames one, LookupError says so.

vLLM: none.
"""

from __future__ import annotations

import ast
import textwrap

Function = ast.FunctionDef | ast.AsyncFunctionDef


def find(source: str, name: str) -> Function:
    """The definition of a function or method. Raises SyntaxError, and LookupError if there is none,
    or more than one (the last one would count, and a reader sees the first)."""
    found: list[ast.AST] = [ast.parse(source)]
    for part in name.split("."):
        found = [
            node
            for parent in found
            for node in getattr(parent, "body", ())
            if getattr(node, "name", None) == part
        ]
    if len(found) != 1 or not isinstance(found[0], Function):
        raise LookupError(f"{len(found)} functions have the name {name}; there must be one")
    return found[0]


def cut(source: str, name: str, message: str) -> str:
    """The source with a hole: the body of the function raises NotImplementedError(message)."""
    function = find(source, name)
    first = function.body[1:] if ast.get_docstring(function) is not None else function.body
    lines = source.splitlines(keepends=True)
    indent = " " * (function.col_offset + 4)
    assert function.end_lineno, "parsed from source"
    start = first[0].lineno - 1 if first else function.end_lineno
    while lines[start - 1].lstrip().startswith("#"):  # a comment above the body tells how, too
        start -= 1
    return "".join(
        [
            *lines[:start],
            f"{indent}raise NotImplementedError({message!r})\n",
            *lines[function.end_lineno :],
        ]
    )


def take(source: str, name: str) -> str:
    """The source of one function at the left margin, without its decorators: the engine's stay."""
    function = find(source, name)
    lines = source.splitlines()[function.lineno - 1 : function.end_lineno]
    return textwrap.dedent("\n".join(lines)) + "\n"
