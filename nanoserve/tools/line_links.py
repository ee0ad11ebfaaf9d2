"""Where does a name of the documents stand now?

    python -m nanoserve.tools.line_links      after a change of the code: set the lines of all links

A link of a Markdown page to a name, [`Scheduler.schedule`](scheduler.py#L42), leads to the line of
its definition. Lines move with every change, so this command sets them, and a test compares.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r"\[`([\w.]+)`\]\(([\w/.-]+\.py)#L\d+\)")


@cache
def find_lines(file: Path) -> dict[str, int]:
    """The line of each definition: "Scheduler", "Scheduler.schedule", of fields and attributes."""
    lines: dict[str, int] = {}

    def visit(node: ast.AST, names: tuple[str, ...]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                lines.setdefault(".".join((*names, child.name)), child.lineno)
                is_class = isinstance(child, ast.ClassDef)
                visit(child, (*names, child.name) if is_class else names)
                continue
            if isinstance(child, (ast.Assign, ast.AnnAssign)):
                for target in getattr(child, "targets", None) or [child.target]:  # type: ignore
                    for each in ast.walk(target):  # NAME = ..., self.name = ..., or several
                        found = getattr(each, "id", None) or getattr(each, "attr", None)
                        if found:
                            lines.setdefault(".".join((*names, found)), child.lineno)
            visit(child, names)

    visit(ast.parse(file.read_text(encoding="utf-8")), ())
    return lines


def set_lines(page: Path) -> str:
    """The text of a page, its links with the lines of now. Raises KeyError for a name that is not
    defined where the link leads."""

    def link(match: re.Match[str]) -> str:
        name, path = match.groups()
        return f"[`{name}`]({path}#L{find_lines((page.parent / path).resolve())[name]})"

    return LINK.sub(link, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for each in ROOT.rglob("*.md"):
        each.write_text(set_lines(each), encoding="utf-8")
