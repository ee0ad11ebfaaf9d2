"""How does pytest grade?

A test is worth points (@pytest.mark.points(2); 1 without), and its name begins with its task:
test_1_2_... belongs to task 1.2. The fixture `mine` gives a test the student's class, or the
engine's class with some methods of the student:

    mine("MyPool", "free")     free is the student's, all else is the engine's: a mistake in
                               another task costs nothing here
    mine("MyPool")             everything that the student wrote
    mine("draw")               a function
    mine.using(draw=...)       from now on the student's file has this one in the place of its own

A method that raises NotImplementedError("Task 1.2") is "not written": no failure, and no points.
Without --labs-dir the student's files are those in the current folder, so that a plain `pytest`,
an editor and a debugger work there. --scores FILE writes what Gradescope reads.

Left out: any fence against a student who wants to cheat. Grade in a container, as you would run
any foreign program.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

MOST_SECONDS = 60  # of one test: an endless loop ends here
RESULTS = pytest.StashKey[list["Result"]]()
MODULES: dict[Path, ModuleType] = {}


@dataclass
class Result:
    """What one test brought."""

    task: str  # "1.2"
    title: str
    points: float
    earned: float
    message: str  # "" if all is well
    values: list[tuple[str, Any]]  # for a leaderboard


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("nanoserve course")
    group.addoption("--labs-dir", default=".", help="the folder with the student's files")
    group.addoption("--scores", help="write the points to this file, as Gradescope reads them")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "points(number): what a test is worth")
    config.stash[RESULTS] = []
    MODULES.clear()


def load(folder: Path, lab: str) -> ModuleType:
    """The student's file of this lab."""
    file = (folder / f"{lab}.py").resolve()
    if file not in MODULES:
        assert file.exists(), f"there is no {lab}.py in {folder}"
        spec = importlib.util.spec_from_file_location(lab, file)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        MODULES[file] = module
    return MODULES[file]


@pytest.fixture
def mine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """mine(name, *methods), mine.using(name=...): see the header."""
    module_name = request.function.__module__.rpartition(".")[2]
    lab = getattr(request.module, "LAB", module_name.removeprefix("test_"))
    module = load(Path(request.config.getoption("--labs-dir")), lab)

    def take(name: str, *methods: str) -> Any:
        assert hasattr(module, name), f"{lab}.py has no {name}"
        found = getattr(module, name)
        return found if not methods else only(found, methods)

    def using(**functions: Any) -> None:
        for name, function in functions.items():
            monkeypatch.setattr(module, name, function, raising=False)

    take.using = using  # type: ignore[attr-defined]
    return take


def only(cls: Any, methods: tuple[str, ...]) -> Any:
    """`cls`, whose other methods are again those of the engine's class that it comes from."""
    bases = [each for each in cls.__mro__[1:] if each.__module__.startswith("nanoserve.")]
    assert bases, f"{cls.__name__} is no subclass of a class of the engine any more"
    base = bases[0]
    others = [name for name in vars(cls) if hasattr(base, name) and name not in methods]
    changed = [name for name in others if not name.startswith("__")]
    return type(
        cls.__name__, (cls,), {each: inspect.getattr_static(base, each) for each in changed}
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Stop a test that hangs. (Windows has no such signal.)"""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no end after {MOST_SECONDS} s")

    has_alarm = hasattr(signal, "SIGALRM")
    before = signal.signal(signal.SIGALRM, stop) if has_alarm else None
    try:
        if has_alarm:
            signal.alarm(MOST_SECONDS)
        return (yield)
    finally:
        if has_alarm:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    report: Any = yield
    if (report.when == "call" or report.failed) and (
        name := re.match(r"test_(\d+)_(\d+)_", item.name)
    ):
        mark = item.get_closest_marker("points")
        points, task = mark.args[0] if mark else 1, ".".join(name.groups())
        message = "" if report.passed else explain(call.excinfo.value, task)
        if call.excinfo and call.excinfo.errisinstance(NotImplementedError):
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, message)
        title = item.name[name.end() :].replace("_", " ")
        result = Result(task, title, points, points * report.passed, message, [])
        result.values = [each for each in report.user_properties if each[0] == "leaderboard"]
        item.config.stash[RESULTS].append(result)
    return report


def explain(error: BaseException, task: str) -> str:
    """One sentence, and where in the student's file."""
    text = str(error).partition("\n")[0]
    if isinstance(error, NotImplementedError):
        own = not text or text == f"Task {task}"
        return "not written" if own else f"waits for {text}, which is not written"
    if isinstance(error, AssertionError) and text:
        return text
    frames = traceback.extract_tb(error.__traceback__)
    files = {str(file) for file in MODULES}
    places = [
        f"{Path(f.filename).name}, line {f.lineno}: {f.line}" for f in frames if f.filename in files
    ]
    where = f" ({places[-1]})" if places else ""
    return f"{type(error).__name__}: {text}{where}"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The points of each task, and each sentence once."""
    results = config.stash[RESULTS]
    said: set[str] = set()
    by_task: dict[str, list[Result]] = {}
    for result in results:
        by_task.setdefault(result.task, []).append(result)
    for task, its in sorted(by_task.items()):
        terminalreporter.line(f"{task:<4} {total(its)}")
        for result in [each for each in its if each.message]:
            message = "as above" if result.message in said else result.message
            said |= {result.message} - {"not written"}
            text = f"{result.title}: {message}".removesuffix(": not written")
            terminalreporter.line(f"       {text}"[:400])
        for value in [value for result in its for _, value in result.values]:
            terminalreporter.line(f"       {value['name']}: {value['value']}")
    terminalreporter.line(f"all  {total(results)}")
    if config.getoption("--scores"):
        Path(config.getoption("--scores")).write_text(json.dumps(as_json(results), indent=1))


def total(results: list[Result]) -> str:
    text = f"{sum(r.earned for r in results):g} of {sum(r.points for r in results):g}"
    return text + "   not written" * all("not written" in r.message for r in results)


def as_json(results: list[Result]) -> dict[str, Any]:
    """Gradescope's results.json: a test an entry; a leaderboard for the contest."""
    tests = [
        {
            "name": f"{r.task} {r.title}",
            "score": r.earned,
            "max_score": r.points,
            "output": r.message or "right",
        }
        for r in results
    ]
    return {"tests": tests, "leaderboard": [value for r in results for _, value in r.values]}
