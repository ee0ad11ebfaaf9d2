"""Which chapters are active, and how do they become one engine?

A chapter changes the engine by subclassing its parts: what it overrides is what it changes, and
super() is what stays. Its module parts.py names a class for each part that it changes:

    PARTS = {"scheduler_cls": SpeculativeScheduler, "runner_cls": SpeculativeRunner, ...}

An option switches a chapter on. The parts of all active chapters are stacked on those of the core:

    LLM(speculative_config={...}, enable_lora=True)

    class Scheduler(LoRAScheduler, SpeculativeScheduler, Scheduler)          the same for each part
          LoRAScheduler.schedule -> SpeculativeScheduler.schedule -> Scheduler.schedule

This is the one place that knows which chapters there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any

# The option that switches a chapter on -> the chapter. Each is stacked on those before it.
CHAPTERS = {
    "runner": "pooling",
    "pipeline_parallel_size": "pipeline",
    "speculative_config": "speculative",
    "enable_lora": "lora",
    "structured_outputs_config": "structured_output",  # behind speculative: checks its drafts
    "kv_offloading_size": "kv_offload",
    "collect_metrics": "metrics",
}
ALWAYS = ("beam_search",)  # no option: methods of LLM
OFF = {"pipeline_parallel_size": 1, "runner": "generate"}  # values that mean no, beside None, 0
PARTS = (
    "config_cls",
    "sequence_cls",
    "block_manager_cls",
    "scheduler_cls",
    "runner_cls",
    "input_processor_cls",
    "request_cls",
)


def compose(options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class of the engine for these options, and the options without the classes of parts that
    are among them."""
    bases = {part: options[part] for part in PARTS if options.get(part) is not None}
    active = find_active(options)
    off = {option for option, name in CHAPTERS.items() if name not in active}
    parts = {part: stack(part, active, bases.get(part)) for part in PARTS}
    engine_cls = type("LLMEngine", (stack("engine_cls", active, None),), parts)
    return engine_cls, {name: v for name, v in options.items() if name not in {*PARTS, *off}}


def find_active(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The chapters that these options switch on, in the order of the stack."""
    given = {option: options.get(option) for option in CHAPTERS}
    found = [CHAPTERS[key] for key, value in given.items() if value and value != OFF.get(key)]
    return (*found, *ALWAYS)


@cache
def stack(part: str, chapters: tuple[str, ...], base: type | None) -> type:
    """The class of one part: those of the chapters, on `base`, or on the core's own."""
    from nanoserve.engine import LLMEngine  # imports torch

    base = base or (LLMEngine if part == "engine_cls" else getattr(LLMEngine, part))
    modules = [import_module(f"{__name__}.{chapter}.parts") for chapter in chapters]
    found = [module.PARTS.get(part) for module in modules]
    if not (mixins := [each for each in reversed(found) if each is not None]):
        return base
    # The name says how to make it again: so another rank can unpickle the class.
    names = {"__module__": __name__, "__qualname__": "__".join((part, *chapters))}
    cls = type(base.__name__, (*mixins, base), names)
    if is_dataclass(base):  # with the fields of all
        how = base.__dataclass_params__
        cls = dataclass(frozen=how.frozen, eq=how.eq)(cls)
    return cls


def __getattr__(name: str) -> type:
    part, *chapters = name.split("__")
    if part not in (*PARTS, "engine_cls", "llm_cls"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return stack(part, tuple(chapters), None)
