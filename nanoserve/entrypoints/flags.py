"""How does an option become a flag of the command line?

Each field of EngineConfig, and of the active chapters' subclasses of it, is a flag, and the comment
above the field is its help text:

    # Sequences in one step at most
    max_num_seqs: int | None = None     ->     --max-num-seqs 8

vLLM: vllm/engine/arg_utils.py (V0 and V1).
"""

from __future__ import annotations

import argparse
import ast
import inspect
from dataclasses import fields
from itertools import pairwise
from types import UnionType
from typing import Literal, get_args, get_origin, get_type_hints

from nanoserve.config import EngineConfig


def add_engine_flags(parser: argparse.ArgumentParser, cls: type = EngineConfig) -> None:
    """Add one flag for each option: --max-num-seqs 8, --no-enable-prefix-caching, ..."""
    hints, texts = get_type_hints(cls), help_texts(cls)
    for each in fields(cls):
        hint = hints[each.name]
        kind = next(iter(get_args(hint)), str) if isinstance(hint, UnionType) else hint
        how: dict[str, object] = {"type": kind if kind in (int, float) else str}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        elif get_origin(hint) is Literal:
            how["choices"] = get_args(hint)
        flag = "--" + each.name.replace("_", "-")
        parser.add_argument(flag, default=each.default, help=texts.get(each.name), **how)


def read_engine_flags(args: argparse.Namespace) -> dict[str, object]:
    """The options for LLM(**options); other arguments are left alone."""
    return {each.name: getattr(args, each.name) for each in fields(EngineConfig)}


def help_texts(cls: type) -> dict[str, str]:
    """The string below each field. Python drops these strings, so they are read from the source."""
    [definition] = ast.parse(inspect.getsource(cls)).body
    texts = {}
    for pair in pairwise(definition.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = " ".join(text.split()).replace("%", "%%")
    return texts
