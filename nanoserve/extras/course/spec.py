"""What is a lab, and what earns its points?

    Lab 1, "Pages"
      Task 1.2, BlockPool.share                                  the function that a student writes
        Behaviour "a free block that is shared leaves the free queue"                    1.5 points
        Behaviour "each share adds one reference"                                        0.5 points

Points hang on *behaviours*, not on the share of tests that pass: a queue that is the wrong way
round passes most tests and is worth little. A behaviour is a function that raises Wrong with a
sentence in the student's words, such as "the step has 12 tokens, the budget is 8". Quick ones come
first. A property, which tries many random cases, comes last: its `seed` is the lecturer's.

A lab is a module of the folder labs/. Its behaviours are registered by the decorator `behaviour`.
A lab whose students hand in a file of their own (answers, tests, a scheduler) has no holes: it has
an Exercise, which says what is graded.

vLLM: none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from nanoserve.extras.course import labs


class Wrong(AssertionError):
    """What a behaviour found, in a sentence for the student."""


def must(is_right: object, sentence: str) -> None:
    """Raise Wrong(sentence) unless `is_right`."""
    if not is_right:
        raise Wrong(sentence)


@dataclass(frozen=True)
class Behaviour:
    """One thing that a right function does. `check` raises Wrong if it does not."""

    name: str  # unique in its lab
    title: str  # a sentence, for the report
    points: float
    check: Callable[..., str | None]  # what it returns is reported
    is_property: bool = False  # check(seed) tries many random cases


@dataclass
class Task:
    """A function of the engine that a student writes."""

    number: str  # "1.2"
    module: str  # "nanoserve.block_manager"
    name: str  # "BlockPool.share"
    behaviours: list[Behaviour] = field(default_factory=list)

    @property
    def points(self) -> float:
        return sum(each.points for each in self.behaviours)

    @property
    def message(self) -> str:
        """What the hole raises."""
        return f"{self.number}: {self.name}"

    def behaviour(
        self, points: float, title: str, is_property: bool = False
    ) -> Callable[[Callable[..., None]], Callable[..., None]]:
        """Decorator: the function checks one behaviour of this task."""

        def register(check: Callable[..., None]) -> Callable[..., None]:
            name = check.__name__
            assert all(each.name != name for each in self.behaviours), f"{name} twice"
            self.behaviours.append(Behaviour(name, title, points, check, is_property))
            self.behaviours.sort(key=lambda each: each.is_property)  # stable: quick ones first
            return check

        return register


@dataclass(frozen=True)
class Setting:
    """What one grading depends on, beside the submission."""

    seed: int = 0  # of random cases
    term: str = ""  # "2027a": which variants
    secret: str = ""  # a lecturer's word: goes into what each student is asked
    student: str = ""  # "": the one whom answers.json names
    is_own: bool = False  # a student's tree looks at itself: what is right is not in it


class Exercise:
    """A lab in which a student hands in a file of their own."""

    def get_tasks(self, setting: Setting) -> list[Task]:
        """What earns points. The behaviours are graded by `grade`."""
        raise NotImplementedError

    def get_files(self, setting: Setting) -> dict[str, str]:
        """What a student starts with: name -> text."""
        raise NotImplementedError

    def grade(self, lab: Lab, folder: Path, setting: Setting) -> list[Any]:
        """An Outcome for each behaviour. Never raises for what is in the folder."""
        raise NotImplementedError

    def prepare(self, job: dict[str, Any]) -> list[Behaviour]:
        """In the child: run the student's file; return what job["names"] names. Raises Wrong."""
        raise NotImplementedError


@dataclass
class Lab:
    """Tasks about one subject."""

    number: int
    title: str
    tasks: list[Task]
    needs_torch: bool = False
    packages: tuple[str, ...] = ()  # that it needs beside those of all labs (and torch's)
    is_bonus: bool = False  # left out unless it is asked for by its number
    memory: int = 512  # MiB of address space for one behaviour
    seconds: float = 8.0  # of CPU time for one behaviour

    exercise: Exercise | None = None  # then there are no tasks with holes

    hidden: set[str] = field(default_factory=set)  # titles of modules that have extended it

    def extend(self, modules: Mapping[str, str]) -> None:
        """Run modules of a lecturer, {title: source}, which find this lab as LAB and register more
        behaviours. Each counts once."""
        for title, source in modules.items():
            if title not in self.hidden:
                exec(compile(source, title, "exec"), {"__name__": title, "LAB": self})
                self.hidden.add(title)

    def get_tasks(self, setting: Setting | None = None) -> list[Task]:
        """The tasks with holes, or those of the exercise."""
        return self.exercise.get_tasks(setting or Setting()) if self.exercise else self.tasks

    def find(self, number: str) -> Task:
        """Raises LookupError."""
        for task in self.tasks:
            if task.number == number:
                return task
        raise LookupError(f"lab {self.number} has no task {number}")


def load_labs(numbers: Iterable[int] | None = None, *, can_skip: bool = False) -> list[Lab]:
    """The labs of the folder labs/, by number; all of them, or these. can_skip: leave out those
    that need a package which is not installed. Raises ValueError for such a lab otherwise, and for
    a number that there is no lab of."""
    found: dict[int, str] = {}
    for module in iter_modules(labs.__path__):
        end = module.name.rpartition("_")[2]
        if end.isdigit():
            found[int(end)] = f"{labs.__name__}.{module.name}"
    wanted = sorted(found) if numbers is None else list(numbers)
    loaded: list[Lab] = []
    for number in wanted:
        if number not in found:
            raise ValueError(f"there is no lab {number}; there are {sorted(found)}.")
        try:
            loaded.append(import_module(found[number]).LAB)
        except ModuleNotFoundError as error:
            if not can_skip:
                text = f"lab {number} needs {error.name}, which is not installed; name other labs."
                raise ValueError(text) from error
    return loaded
