"""Which chapters are active, and how do they become one engine?

A chapter changes the engine by subclassing its parts: what it overrides is what it changes, and
super() is what stays. A class in its module parts.py that is a subclass of a part of the core
takes this part's place:

    class SpeculativeScheduler(Scheduler): ...        class SpeculativeRunner(ModelRunner): ...

An option switches a chapter on. The parts of all active chapters are stacked on those of the core:

    LLM(speculative_config={...}, enable_lora=True)

    class Scheduler(LoRAScheduler, SpeculativeScheduler, Scheduler)          the same for each part
          LoRAScheduler.schedule -> SpeculativeScheduler.schedule -> Scheduler.schedule

A class of your own, LLM(scheduler_cls=Mine), is the base of the same stack. If you give a whole
engine_cls, its parts are the bases.

Rules for authors. A chapter overrides and calls only methods without an underscore, with the same
positional arguments, and calls super(). Its options are the fields of its config class. Its
scheduler talks to its runner by notes alone (SchedulerOutput.notes, ModelOutput.notes), keyed by
the class of the note. A chapter may know another one only if it is stacked above it.

To remove a chapter, delete its folder and its line in CHAPTERS: the rest works without it.
"""

from __future__ import annotations

import copyreg
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any

from nanoserve.entrypoints.arguments import read_options
from nanoserve.entrypoints.options import Options

# Chapter -> the option that switches it on; None: always on. Each is stacked on those before it.
CHAPTERS = {
    "quantization": None,  # a checkpoint may ask for it
    "pooling": "runner",
    "ray": "distributed_executor_backend",  # where the model runs
    "pipeline": "pipeline_parallel_size",
    "speculative": "speculative_config",  # what a step computes
    "lora": "enable_lora",
    "structured_output": None,  # a request asks for it; behind speculative, whose drafts it masks
    "logits_processors": "logits_processors",  # above it: classes of the user
    "kv_offload": "kv_offloading_size",
    "hybrid_kv": "disable_hybrid_kv_cache_manager",  # off is on; behind speculative: its layers
    "metrics": "collect_metrics",  # who watches
    "beam_search": None,  # a method of LLM
    "vllm_api": None,  # more of them
}
# Of a switch: the value that means no, beside None; and one that means yes.
OFF: dict[str, Any] = {"pipeline_parallel_size": 1, "runner": "generate", "kv_offloading_size": 0}
OFF |= {"disable_hybrid_kv_cache_manager": True}
ON: dict[str, Any] = {
    "runner": "'pooling'",
    "pipeline_parallel_size": 2,
    "speculative_config": "{'method': 'ngram', 'num_speculative_tokens': 4}",
    "kv_offloading_size": 1,
    "disable_hybrid_kv_cache_manager": False,
    "logits_processors": "[YourClass]",
    "distributed_executor_backend": "'ray'",
}
# Options that switch a chapter on, too.
ALSO_ON = {"kv_transfer_config": "kv_offload", "otlp_traces_endpoint": "metrics"}
# Pairs that make no sense together.
REFUSED = {
    ("pooling", "speculative"): "vectors have no next token to guess",
    ("pooling", "pipeline"): "a pooling model runs on one stage",
    ("speculative", "logits_processors"): "a draft has a row of logits, too",
    ("pooling", "logits_processors"): "vectors are no logits",
    ("pipeline", "hybrid_kv"): "each stage would have groups of its own",
    ("kv_offload", "hybrid_kv"): "the further levels know one block table of a sequence",
}
# The classes of the core that a chapter may subclass: name -> part.
KINDS = {
    "nanoserve.llm.LLM": "llm_cls",
    "nanoserve.engine.LLMEngine": "engine_cls",
    "nanoserve.config.EngineConfig": "config_cls",
    "nanoserve.sequence.Sequence": "sequence_cls",
    "nanoserve.output_processor.Request": "request_cls",
    "nanoserve.block_manager.BlockManager": "block_manager_cls",
    "nanoserve.scheduler.Scheduler": "scheduler_cls",
    "nanoserve.model_runner.ModelRunner": "runner_cls",
    "nanoserve.input_processor.InputProcessor": "input_processor_cls",
}
PARTS = tuple(KINDS.values())[2:]  # attributes of LLMEngine


def make_engine(options: Mapping[str, Any]) -> Any:
    """The engine for these options of LLM. Raises TypeError for an option that is not known, and
    ValueError for a value that is not allowed."""
    engine_cls, options = compose(options)
    return engine_cls(engine_cls.config_cls(**options))


def compose(options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class of the engine, and the options of its config: without classes of parts, without
    switches that are off."""
    from nanoserve.engine import LLMEngine  # imports torch

    given = read(options)
    engine = given.pop("engine_cls", None) or LLMEngine
    bases = {part: given.pop(part, None) or getattr(engine, part) for part in PARTS}
    for part, base in bases.items():
        own = getattr(LLMEngine, part)
        if not (isinstance(base, type) and issubclass(base, own)):
            raise TypeError(f"{part} must be a subclass of {own.__name__}, got {base!r}.")
    active = find_active(options)
    for pair, reason in REFUSED.items():
        if set(pair) <= set(active):
            raise ValueError(f"{' and '.join(pair)} do not go together: {reason}.")
    parts = {part: stack(part, active, base) for part, base in bases.items()}
    known = {each.name for each in fields(parts["config_cls"])}
    for chapter, switch in CHAPTERS.items() if given.keys() - known else ():
        for name, default in find_options(chapter).items() if chapter not in active else ():
            if given.pop(name, default) != default and name not in (switch, *ALSO_ON):
                raise ValueError(f"{name} needs {example(switch)}; see chapters/{chapter}.")
    if unknown := sorted(given.keys() - known):
        raise ValueError(f"{unknown}: the chapter that reads this is not installed.")
    return type("LLMEngine", (stack("engine_cls", active, engine),), parts), given


def find_active(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The chapters that these options switch on, in the order of the stack."""
    options = read(options, is_quiet=True)
    off = {switch: OFF.get(switch, False) for switch in CHAPTERS.values()}
    also = {chapter for option, chapter in ALSO_ON.items() if options.get(option)}
    return tuple(
        chapter
        for chapter, switch in CHAPTERS.items()
        if switch is None or chapter in also or options.get(switch, off[switch]) != off[switch]
    )


def read(options: Mapping[str, Any], is_quiet: bool = False) -> dict[str, Any]:
    """The options under their names here; see entrypoints/arguments.py. Fields of a config class of
    your own are options, too."""
    own = options.get("config_cls") or getattr(options.get("engine_cls"), "config_cls", None)
    known = {"model", *Options.__annotations__, *getattr(own, "__dataclass_fields__", ())}
    return read_options(options, known, is_quiet)


@cache
def find_parts(chapter: str) -> Mapping[str, Any]:
    """The classes of a chapter, by the part that they change."""
    package = f"{__name__}.{chapter}."
    found = vars(import_module(f"{package}parts")).values()
    own = [each for each in found if isinstance(each, type) and each.__module__.startswith(package)]
    pairs = [(f"{base.__module__}.{base.__name__}", cls) for cls in own for base in cls.__mro__]
    return {KINDS[name]: cls for name, cls in pairs if name in KINDS}


def find_options(chapter: str) -> dict[str, Any]:
    """The options that a chapter adds, with their defaults."""
    config_cls = find_parts(chapter).get("config_cls")
    names = config_cls.__annotations__ if config_cls else ()
    return {name: config_cls.__dataclass_fields__[name].default for name in names}


def example(switch: str | None) -> str:
    """How this option is switched on: "LLM(enable_lora=True)"."""
    return f"LLM({switch}={ON.get(switch or '', True)})"


class Stacked(type):
    """The metaclass of stacked classes. Another rank unpickles one by stacking it again."""

    made_of: tuple[str, tuple[str, ...], type]


class MethodHints:
    """A method of a chapter that is off is refused by name."""

    def __getattr__(self, name: str) -> Any:
        for chapter, switch in CHAPTERS.items() if name[:1] != "_" else ():
            if name in vars(find_parts(chapter).get("llm_cls", object)):
                raise AttributeError(f"LLM.{name} needs {example(switch)}; see chapters/{chapter}.")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@cache
def stack(part: str, chapters: tuple[str, ...], base: type) -> type:
    """The class of one part: those of the chapters, on `base`."""
    found = [find_parts(chapter).get(part) for chapter in chapters]
    found.insert(0, MethodHints if part == "llm_cls" else None)
    mixins = [each for each in reversed(found) if each and not issubclass(base, each)]
    if not mixins:
        return base
    names = {"__module__": __name__, "__doc__": base.__doc__, "made_of": (part, chapters, base)}
    cls: Any = Stacked(base.__name__, (*mixins, base), names)
    if is_dataclass(base):  # with the fields of all
        how = base.__dataclass_params__  # type: ignore[attr-defined]
        cls = dataclass(frozen=how.frozen, eq=how.eq)(cls)
    return cls


copyreg.pickle(Stacked, lambda cls: (stack, cls.made_of))  # type: ignore[arg-type, return-value]
