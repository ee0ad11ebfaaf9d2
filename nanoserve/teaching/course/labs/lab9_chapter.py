"""Lab 9: be the compiler of one chapter.

A feature of vLLM is a page of words; here it becomes a chapter: a folder of subclasses that the
engine does not know. Choose one (the handout has five), and write it below. What is graded are the
promises that any chapter keeps: see "Rules for authors" in nanoserve/chapters/__init__.py, and
nanoserve/chapters/metrics/parts.py for one of medium size.
"""

from typing import Any

# Yours: a subclass of EngineConfig, @dataclass(frozen=True), with one option, whose default means
# off; subclasses of Scheduler, BlockManager, ModelRunner, ...; each overrides small public methods
# and calls super(). A number is `my_option: int | None = None`: a plain int must be 1 or more.


def parts() -> dict[str, type]:
    """Which part of the engine each class changes: {"config_cls": ..., "scheduler_cls": ...}."""
    raise NotImplementedError("Task 9.1")


def switch() -> dict[str, Any]:
    """The option that switches your chapter on: {"my_option": 3}."""
    raise NotImplementedError("Task 9.1")


def measure(**options: Any) -> float:
    """Run a workload of yours, in which your chapter helps, and return a number: less is better.

    `options` are your parts, with the switch or without: small_llm(**options) of
    nanoserve.teaching.lesson is such an engine, and serve(llm, ...) runs requests. Count steps,
    tokens or blocks, not seconds: a number that differs from run to run proves nothing. All
    requests end, with the same tokens as without your chapter.
    """
    raise NotImplementedError("Task 9.5")


def sabotage() -> dict[str, type]:
    """Your parts with one mistake: the one that you would make yourself."""
    raise NotImplementedError("Task 9.6")


def check(**options: Any) -> None:
    """An assert that your parts pass with the switch on, and that the sabotage does not."""
    raise NotImplementedError("Task 9.6")
