"""How many points has a submission earned?

    submission/nanoserve/block_manager.py
      -> holes.take("BlockPool.share")      one function; nothing else of the file is used
      -> screen.screen                      refused, or
      -> child.py: the right engine with this function, each behaviour of task 1.2
      -> Report: 1.5 of 2 points, and a sentence for what is wrong

Each task is graded alone, in the right engine: an unfinished task costs its own points only. The
child never writes a result. What it reports counts if the line has this run's nonce, is about a
behaviour that was asked for, and comes after the report that the behaviour has begun. A child that
dies is named with what ended it, and the next one goes on behind that behaviour.

grade_whole runs the other way: the student's whole engine answers requests in a process of its own,
and the parent compares the answers. So all parts have to work together there.

vLLM: none.
"""

from __future__ import annotations

import ast
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from nanoserve.extras.course import holes
from nanoserve.extras.course.screen import screen, stored_attributes
from nanoserve.extras.course.spec import Behaviour, Lab, Setting, Task

ROOT = Path(__file__).parents[3]  # the folder that holds the package
START_SECONDS = 60.0  # to start a child, on half a core
STATUSES = {"begun", "right", "wrong", "missing", "waiting"}  # that a child may report
MOST_SOURCE = 2**20  # bytes of a submitted file


@dataclass
class Outcome:
    """What one behaviour earned."""

    lab: Lab
    task: Task
    behaviour: Behaviour
    status: str  # "right", "wrong", "missing", "killed", "refused"; in a student's tree "waiting"
    message: str = ""

    def __post_init__(self) -> None:  # what neither a terminal nor XML can hold
        self.message = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in self.message)

    @property
    def score(self) -> float:
        return self.behaviour.points if self.status == "right" else 0.0


@dataclass
class Report:
    """All outcomes of one grading."""

    outcomes: list[Outcome] = field(default_factory=list)
    seconds: float = 0.0
    note: str = ""  # whose sheet it was

    @property
    def score(self) -> float:
        return sum(each.score for each in self.outcomes)

    @property
    def most(self) -> float:
        return sum(each.behaviour.points for each in self.outcomes if each.status != "waiting")

    def describe(self) -> str:
        """For a terminal: a line for each behaviour, and the sentence of each that is not right."""
        lines: list[str] = []
        task: Task | None = None
        is_one = False  # all behaviours of the task have one and the same message
        for each in self.outcomes:
            if each.task is not task:
                task = each.task
                own = [other for other in self.outcomes if other.task is task]
                got = sum(other.score for other in own)
                lines.append(f"\n{task.number}  {task.name}   {got:g} of {task.points:g}")
                is_one = len({(other.status, other.message) for other in own}) == 1
                if is_one and each.status != "right":  # said once
                    lines += [f"  {line}" for line in each.message.splitlines()]
            if is_one and each.status != "right":
                continue
            mark = {"right": "+", "waiting": "."}.get(each.status, "-")
            lines.append(f"  {mark} {each.behaviour.title}   {each.score:g}")
            lines += [f"      {line}" for line in each.message.splitlines()]
        lines.append(f"\n{self.score:g} of {self.most:g} points, in {self.seconds:.0f} s")
        lines += [self.note] * bool(self.note)
        if any(each.status == "waiting" for each in self.outcomes):
            lines.append("A line with a dot waits for a later lab, and does not count here.")
        return "\n".join(lines).lstrip("\n")

    def to_json(self) -> dict[str, Any]:
        """The results.json of Gradescope."""
        return {
            "score": round(self.score, 2),
            "execution_time": round(self.seconds),
            "output": self.note,
            "tests": [
                {
                    "number": each.task.number,
                    "name": f"{each.task.name}: {each.behaviour.title}",
                    "score": each.score,
                    "max_score": each.behaviour.points,
                    "status": "passed" if each.status == "right" else "failed",
                    "output": each.message,
                }
                for each in self.outcomes
            ],
        }

    def to_junit(self) -> str:
        """As JUnit XML."""
        suite = ElementTree.Element(
            "testsuite",
            name="nanoserve course",
            tests=str(len(self.outcomes)),
            failures=str(sum(each.status != "right" for each in self.outcomes)),
            time=f"{self.seconds:.1f}",
        )
        for each in self.outcomes:
            name = f"{each.task.number} {each.task.name}"
            case = ElementTree.SubElement(
                suite, "testcase", classname=name, name=each.behaviour.title
            )
            if each.status != "right":
                failure = ElementTree.SubElement(case, "failure", message=each.status)
                failure.text = each.message
        return ElementTree.tostring(suite, encoding="unicode")


def find_tree(folder: Path) -> Path:
    """Where a submission begins: here, or in the one folder that is all there is. That is no link:
    it could lead to the solutions."""
    if not folder.is_dir() or (folder / "nanoserve").exists():
        return folder
    inner = [each for each in folder.iterdir() if not each.name.startswith((".", "__MACOSX"))]
    is_outer = len(inner) == 1 and inner[0].is_dir() and not inner[0].is_symlink()
    return inner[0] if is_outer else folder


def read_text(folder: Path, name: str) -> str:
    """A file of a submission: no link to one of the grader's, no device. Raises ValueError with a
    sentence."""
    file = folder / name
    try:
        if not file.is_file():
            raise ValueError(f"your submission has no file {name}.")
        if not file.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name} is a link that leads out of your submission.")
        if file.stat().st_size > MOST_SOURCE:
            raise ValueError(f"{name} is larger than {MOST_SOURCE} bytes.")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from error


def read_submission(folder: Path, task: Task) -> str:
    """The source of the task's function in a submission. Raises ValueError with a sentence."""
    where = task.module.replace(".", "/") + ".py"
    try:
        source = holes.take(read_text(folder, where), task.name)
    except (SyntaxError, UnicodeDecodeError, LookupError, RecursionError) as error:
        if isinstance(error, SyntaxError) and error.lineno:
            where += f", line {error.lineno}"
        raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
    stored = stored_attributes((ROOT / where).read_text(encoding="utf-8"))
    if folder == ROOT:  # a student's tree: there the engine's own assignments are not known
        stored |= stored_attributes(source)
    if (problem := screen(source, stored)) is not None:
        raise ValueError(f"{task.name}: {problem}. It was not run.")
    return source


def read_own_file(folder: Path, name: str, engine_files: Iterable[str], private: bool) -> str:
    """The source of a file that a student wrote. It may assign what the engine's files assign, and
    what it assigns on self. private: it may use the engine's names with an underscore. Raises
    ValueError with a sentence."""
    source = read_text(folder, name)
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ValueError(f"{name}{line}: {type(error).__name__}: {error}") from error
    stored = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    for each in engine_files:
        text = (ROOT / each).read_text(encoding="utf-8")
        stored |= stored_attributes(text)
        for node in ast.walk(ast.parse(text)):  # the fields of data classes
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                stored.add(node.target.id)
    if (problem := screen(source, stored)) is not None:
        problem = problem.replace("of the function", f"of {name}")
        raise ValueError(f"{problem}. It was not run.")
    for node in ast.walk(tree):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        names += [n.name for n in node.names] if isinstance(node, ast.ImportFrom) else []
        hidden = [each for each in names if each.startswith("_") and each != "__init__"]
        if hidden and not private:
            line = f"line {getattr(node, 'lineno', 0)} of {name}"
            raise ValueError(f"{line} uses {hidden[0]}: use public names only. It was not run.")
    return source


def refuse(
    lab: Lab, tasks: Iterable[Task], sentence: str, status: str = "refused"
) -> list[Outcome]:
    """No points for these tasks."""
    return [
        Outcome(lab, task, each, status, sentence) for task in tasks for each in task.behaviours
    ]


def grade(
    labs: Iterable[Lab],
    submission: Path | None,
    *,
    seed: int | None = None,
    hidden: Mapping[int, Mapping[str, str]] | None = None,
    on_task: Callable[[Task], object] = lambda task: None,
    setting: Setting | None = None,
) -> Report:
    """Grade a folder task by task; None: the engine itself, which passes everything.

    seed: of the properties' random cases (None: a new one each time). hidden: lab -> {title: source
    of a module that registers more behaviours at LAB}. setting: of the labs without holes.
    """
    report, started = Report(), time.monotonic()
    seed = secrets.randbelow(2**32) if seed is None else seed
    setting = replace(setting or Setting(), seed=seed)
    for lab in labs:
        extra = dict((hidden or {}).get(lab.number, {}))
        lab.extend(extra)
        if lab.exercise is not None:
            try:
                report.outcomes += lab.exercise.grade(lab, submission or ROOT, setting)
            except (ValueError, RecursionError) as error:  # whatever is in the folder
                said = f"it cannot be graded: {type(error).__name__}: {error}"
                report.outcomes += refuse(lab, lab.get_tasks(setting), said)
            for task in lab.get_tasks(setting):
                on_task(task)
        for task in lab.tasks:
            on_task(task)
            report.outcomes += grade_task(lab, task, submission, seed, extra, setting.is_own)
    report.seconds = time.monotonic() - started
    return report


def grade_task(
    lab: Lab,
    task: Task,
    submission: Path | None,
    seed: int,
    hidden: Mapping[str, str],
    is_own: bool = False,
) -> list[Outcome]:
    """The outcome of each behaviour of one task. is_own: the engine is a student's, and is looked
    at as the lecturer's grader will do."""
    more: dict[str, Any] = {"hidden": dict(hidden)}
    try:
        source = None if submission is None else read_submission(submission, task)
        if is_own:
            more["own"] = read_submission(ROOT, task)
    except ValueError as error:
        return [Outcome(lab, task, each, "refused", str(error)) for each in task.behaviours]
    return run_behaviours(lab, task, source, seed, more)


def run_behaviours(
    lab: Lab, task: Task, source: str | None, seed: int, more: Mapping[str, Any]
) -> list[Outcome]:
    """Try the behaviours of a task in children. more: what else the children are told."""
    found: dict[str, Outcome] = {}
    while missing := [each for each in task.behaviours if each.name not in found]:
        job = {
            "nonce": secrets.token_hex(16),
            "lab": lab.number,
            "task": task.number,
            "source": source,
            "names": [each.name for each in missing],
            "seed": seed,
            "seconds": lab.seconds,
            "megabytes": lab.memory,
            "hidden": {},
            **more,
        }
        begun, seen, ended = run_child(job, len(missing) * (3 * lab.seconds) + START_SECONDS)
        for each in missing:
            if each.name in seen:
                status, message = seen[each.name]
                found[each.name] = Outcome(lab, task, each, status, message)
        stopped = begun if begun is not None and begun not in found else None
        for each in missing:
            if each.name == stopped or (stopped is None and not seen):
                limits = f"{lab.seconds:g} s of CPU time, {lab.memory} MiB"
                message = f"it was stopped: {ended}. The limits are {limits}."
                found[each.name] = Outcome(lab, task, each, "killed", message)
    return [found[each.name] for each in task.behaviours]


WHOLE_RUNNER = Path(__file__).with_name("whole.py")


def grade_whole(labs: Iterable[Lab], submission: Path, *, seed: int | None = None) -> Report:
    """Grade the student's whole engine: one behaviour, all or nothing, for each kind of load of
    whole.py. The submission's code runs unscreened, in a child with limits: use a container."""
    from nanoserve.extras.course import whole

    report, started = Report(), time.monotonic()
    seed = secrets.randbelow(2**32) if seed is None else seed
    lab = Lab(0, "Your whole engine", [], memory=768, seconds=30.0)
    task = Task("whole", "nanoserve", "your whole engine")
    for load, title in whole.get_titles().items():
        behaviour = Behaviour(load, title, 1.0, lambda: None)
        status, message = run_whole(submission, lab, load, seed)
        report.outcomes.append(Outcome(lab, task, behaviour, status, message))
        task.behaviours.append(behaviour)
    report.seconds = time.monotonic() - started
    return report


def run_whole(submission: Path, lab: Lab, load: str, seed: int) -> tuple[str, str]:
    """(status, message): the answers of the student's engine beside the right ones."""
    from nanoserve.extras.course import whole

    environment = child_environment() | {"PYTHONPATH": str(submission.resolve())}
    command = [sys.executable, str(WHOLE_RUNNER), load, str(seed)]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
            encoding="utf-8",
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=3 * lab.seconds + START_SECONDS)
        except subprocess.TimeoutExpired:
            return "killed", "it took too long: is there a request that never ends?"
        finally:
            end_group(process)
            process.wait()
    if process.returncode:
        lines = [line for line in err.splitlines() if line.strip()][-3:]
        return "wrong", "\n".join(lines) or describe_end(process.returncode, False)
    return whole.compare(load, seed, out)


def run_child(
    job: dict[str, Any], seconds: float
) -> tuple[str | None, dict[str, tuple[str, str]], str]:
    """(the behaviour that began last, {behaviour: (status, message)}, what ended the child)."""
    begun: str | None = None
    seen: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "nanoserve.extras.course.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=child_environment(),
            encoding="utf-8",
            start_new_session=True,
        )
        timer = threading.Timer(seconds, lambda: end_group(process))
        timer.start()
        try:
            assert process.stdin and process.stdout, "both are pipes"
            try:
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.close()
            except BrokenPipeError:
                pass
            for line in process.stdout:
                name, status, message = read_report(line, job)
                if status == "begun":
                    begun = name
                elif (name == begun and name not in seen) or (begun is None and status == "wrong"):
                    seen[name] = status, message
            process.wait()
            is_late = not timer.is_alive()
        finally:
            timer.cancel()
            end_group(process)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    return begun, seen, describe_end(process.returncode, is_late)


def child_environment() -> dict[str, str]:
    """What a child sees of this process's environment: no secrets, one thread."""
    names = {"PATH", "SYSTEMROOT", "LANG", "LC_ALL", "HOME", "TEMP", "TMP"}
    return {
        **{name: value for name, value in os.environ.items() if name in names},
        "PYTHONPATH": str(ROOT),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
    }


def read_report(line: str, job: dict[str, Any]) -> tuple[str, str, str]:
    """(behaviour, status, message) of a line; the behaviour is "" if it is no report."""
    try:
        found = json.loads(line)
        name, status, message = found["name"], found["status"], found["message"]
        is_ours = found["nonce"] == job["nonce"] and name in job["names"]
    except (ValueError, TypeError, KeyError):
        return "", "", ""
    if not is_ours or status not in STATUSES:
        return "", "", ""
    return name, status, str(message)


def describe_end(returncode: int, is_late: bool) -> str:
    if is_late:
        return "it took too long"
    if returncode < 0:
        name = signal.Signals(-returncode).name
        if name == "SIGXCPU":
            return "it took too much CPU time"
        if name == "SIGKILL":
            return "it was killed, as the system does with what takes too much memory"
        return f"the process was ended by {name}"
    return f"the process ended with status {returncode}"


def end_group(process: subprocess.Popen[str]) -> None:
    """Kill a child and all that it started."""
    try:
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    except ProcessLookupError:
        pass
