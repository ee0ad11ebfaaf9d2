"""How do programs written for vLLM hold the options of an engine?

    engine_args = EngineArgs(max_num_seqs=8)        a dataclass: EngineConfig, and all chapters
    LLM.from_engine_args(engine_args)               or LLM(**dataclasses.asdict(engine_args))

vLLM: vllm/engine/arg_utils.py (V0 and V1).
"""

from __future__ import annotations

import argparse
from dataclasses import fields, make_dataclass
from typing import Any

from nanoserve.chapters import make_engine, read
from nanoserve.entrypoints.arguments import OTHERS
from nanoserve.entrypoints.flags import add_engine_flags, config_classes, python_value
from nanoserve.kernels.threads import load_torch

load_torch()  # the classes of the chapters import it


class _EngineArgs:
    """The options of an engine. Names are checked here (TypeError), values when the engine is
    built."""

    def __init__(self, model: Any = None, **options: Any) -> None:
        given = read({"model": model, **options})
        for each in fields(self):  # type: ignore[arg-type]
            setattr(self, each.name, given.get(each.name, each.default))

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the flags of nanoserve, and vLLM's other ones. They are absent from the namespace
        unless they are given, so LLM(**vars(args)) works, too."""
        add_engine_flags(parser)
        how: Any = {"nargs": "?", "const": True, "type": python_value}
        for name in sorted(OTHERS - FIELDS.keys()):
            flag = "--" + name.replace("_", "-")
            parser.add_argument(flag, **how, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> _EngineArgs:
        known = OTHERS | FIELDS.keys()
        return cls(**{name: value for name, value in vars(args).items() if name in known})

    def create_engine(self, engine_cls: type) -> Any:
        """An LLMEngine, or one of the subclass that is given."""
        return make_engine({**vars(self), "engine_cls": engine_cls})


FIELDS = {each.name: each for cls in config_classes() for each in fields(cls)}
EngineArgs: Any = make_dataclass(
    "EngineArgs",
    [(name, each.type, each.default) for name, each in FIELDS.items()],
    bases=(_EngineArgs,),
    init=False,
)
AsyncEngineArgs = EngineArgs
