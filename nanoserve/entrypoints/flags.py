"""How does an option become a flag of the command line?

Each field of EngineConfig, and of the chapters' subclasses of it, is a flag. The comment above the
field, or the string below it, is its help text:

    # Sequences in one step at most.
    max_num_seqs: int | None = None     ->     --max-num-seqs 8, or --max_num_seqs=8

Only flags that are given become options of LLM(**options). What is not a flag here may be an option
of vLLM that arguments.py knows (--disable-log-requests), so it becomes an option, too.

vLLM: vllm/engine/arg_utils.py, vllm/utils/argparse_utils.py (V1).
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import sys
from collections.abc import Collection, Iterable
from dataclasses import fields
from functools import cache
from itertools import pairwise, takewhile
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from nanoserve.chapters import CHAPTERS, find_parts
from nanoserve.config import EngineConfig


@cache
def config_classes() -> list[type]:
    """EngineConfig, and those of all chapters."""
    return [
        EngineConfig,
        *(p["config_cls"] for p in map(find_parts, CHAPTERS) if "config_cls" in p),
    ]


def add_engine_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Add one flag for each option: --max-num-seqs 8, --no-enable-prefix-caching, ... It is absent
    from the namespace unless it is given."""
    for cls in config_classes():
        title = "engine" if cls is EngineConfig else cls.__module__.split(".")[-2]
        group = parser.add_argument_group(title.replace("_", " "))
        hints, texts = get_type_hints(cls), help_texts(cls)
        for each in fields(cls):
            if each.name in vars(cls)["__annotations__"] and each.name not in without:
                text = f"{texts[each.name]} (default: {each.default})".replace("%", "%%")
                how: dict[str, Any] = {
                    "dest": each.name,
                    "default": argparse.SUPPRESS,
                    "help": text,
                }
                flag = "--" + each.name.replace("_", "-")
                group.add_argument(flag, **how, **flag_of(hints[each.name]))


def flag_of(hint: Any) -> dict[str, Any]:
    """How argparse reads a field of this type."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    if bool in kinds:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kinds[0]) is Literal:
        return {"metavar": "|".join(get_args(kinds[0]))}
    if kinds[0] in (int, float, str):
        return {"type": kinds[0], "metavar": kinds[0].__name__.upper()}
    return {"type": python_value, "metavar": "VALUE"}


def python_value(text: str) -> Any:
    """The value that JSON or Python spells with this text, or the text itself: '{"a": 1}', '8'."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            pass
    return text


def read_engine_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The options for LLM(**options); other arguments are left alone."""
    names = {each.name for cls in config_classes() for each in fields(cls)}
    return {name: value for name, value in vars(args).items() if name in names}


class FlexibleArgumentParser(argparse.ArgumentParser):
    """vLLM's: --max_num_seqs is --max-num-seqs."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(
            with_dashes(sys.argv[1:] if args is None else args), namespace
        )


def with_dashes(words: Iterable[str]) -> list[str]:
    """--max_num_seqs=8 -> --max-num-seqs=8; what is no flag stays as it is."""
    parts = [word.partition("=") if word.startswith("--") else (word, "", "") for word in words]
    return [
        name.replace("_", "-") + equals + value if name.startswith("--") else name
        for name, equals, value in parts
    ]


def read_other_flags(words: list[str]) -> dict[str, Any]:
    """["--trust-remote-code", "--watermark", "0.1"] -> options. Raises TypeError for a word that
    belongs to no flag."""
    options: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            flag, has_value, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            options[name] = python_value(value) if has_value else True
        elif name and options[name] is True:
            options[name] = python_value(word)
        else:
            raise TypeError(f"{word!r} is one word too many.")
    return options


def help_texts(cls: type) -> dict[str, str]:
    """The comment above each field of a dataclass, or the string below it, from the source."""
    source = inspect.getsource(cls)
    lines, texts = [line.strip() for line in source.splitlines()], {}
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef), "a dataclass at the top level of its module"
    for node, below in pairwise([*definition.body, ast.Pass()]):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = reversed(lines[: node.lineno - 1])
            words = [line[1:] for line in takewhile(lambda line: line[:1] == "#", above)][::-1]
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                words.append(str(below.value.value))
            texts[node.target.id] = " ".join(" ".join(words).split())
    return texts
