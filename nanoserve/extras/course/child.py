"""What runs in the process that holds a student's function?

    parent -- one JSON line: task, source of the function, behaviours, seed -->  main
           <- {"nonce": ..., "name": "...", "status": "begun"}                    before each one
           <- {"nonce": ..., "name": "...", "status": "wrong", "message": ...}    after it
              (or nothing more: the process was killed at a limit)

*Limits.* CPU time for each behaviour, memory, no bytes in any file, no further process. At a limit
the process dies, and the parent starts the next one with the next behaviour.

vLLM: none.
"""

from __future__ import annotations

import contextlib
import io
import json
import linecache
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoserve.extras.course import later
from nanoserve.extras.course.graft import graft
from nanoserve.extras.course.spec import Behaviour, Wrong, load_labs

COURSE = Path(__file__).parent
ENGINE = COURSE.parents[1]
MOST_TEXT = 2000  # characters of a message, and of what the function printed


def define(source: str, file: str) -> dict[str, Any]:
    """Run a student's own file; return its names. Raises Wrong if it raises."""
    title = f"<your {file}>"
    linecache.cache[title] = (len(source), None, source.splitlines(keepends=True), title)
    names: dict[str, Any] = {"__name__": file.removesuffix(".py")}
    try:
        exec(compile(source, title, "exec", dont_inherit=True), names)
    except (Exception, SystemExit) as error:
        raise Wrong(describe(error)) from None
    return names


def run(behaviour: Behaviour, seed: int, is_own: bool = False) -> tuple[str, str]:
    """(status, message): "right", "wrong", "missing", or "waiting" for a later lab. is_own: the
    engine is the student's, so a message may quote it."""
    random.seed(seed)
    printed = io.StringIO()
    message, status = "", "right"
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            message = behaviour.check(*[seed] * behaviour.is_property) or ""
        except (Exception, SystemExit) as error:
            hole = find_cause(error, NotImplementedError)
            status = "missing" if hole else "wrong"
            message = f"not written yet ({hole})" if hole else describe(error, is_own)
            if str(hole) in later.HOLES.values():
                status, message = "waiting", f"it needs {hole}, of a later lab"
    text = printed.getvalue()[:MOST_TEXT] if status != "right" else ""
    return status, message[:MOST_TEXT] + (f"\nIt printed:\n{text}" if text else "")


def find_cause(error: BaseException | None, kind: type[Exception]) -> BaseException | None:
    """The exception itself, or one that led to it (Triton's interpreter wraps what a kernel
    raises)."""
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or error.__context__
    return error


def describe(error: BaseException, is_own: bool = False) -> str:
    """The exception, and the student's own line; with is_own, the engine's last one."""
    if (cause := find_cause(error, Wrong)) is not None:
        return str(cause)
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError):
        message = "MemoryError: it asked for more memory than it may have"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        place = frame.filename[6:-1] if frame.filename.startswith("<your ") else ""
        if is_own and file.is_relative_to(ENGINE) and not file.is_relative_to(COURSE):
            place = file.relative_to(ENGINE.parent).as_posix()
        if place:
            message += f"\n  line {frame.lineno} of {place}: {frame.line}"
            break
    if isinstance(error, NameError):
        message += "\nOnly this function is taken from your file: import inside it, and put "
        message += "helpers inside it."
    return message


def limit(megabytes: int, seconds: float) -> Callable[[], None]:
    """Set the limits of this process. Returns what gives the next behaviour its CPU time."""
    try:
        import resource
    except ImportError:  # Windows: the parent's limit of time is all there is
        return lambda: None
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (megabytes * 2**20, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)

    def next_one() -> None:
        end = int(time.process_time() + seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (end, most))

    return next_one


def main() -> None:
    """Read one job, do it, report."""
    job: dict[str, Any] = json.loads(sys.stdin.readline())
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing else is a report
    os.dup2(1, 2)

    def report(name: str, status: str, message: str = "") -> None:
        line = {"nonce": job["nonce"], "name": name, "status": status, "message": message}
        channel.write(json.dumps(line) + "\n")
        channel.flush()

    [lab] = load_labs([job["lab"]])
    lab.extend(job["hidden"])
    if lab.needs_torch:
        import torch

        torch.set_num_threads(1)
    tempfile.tempdir = os.getcwd()  # otherwise it is found by writing, which is not allowed
    begin = limit(job["megabytes"], job["seconds"])
    begin()
    try:
        if lab.exercise is not None:
            behaviours = lab.exercise.prepare(job)
        else:
            task = lab.find(job["task"])
            behaviours = task.behaviours
            if job["source"] is not None:
                graft(task, job["source"])
    except Wrong as error:
        for name in job["names"]:
            report(name, "wrong", str(error))
        return
    with contextlib.nullcontext() if job["source"] else later.filled(lab.number):
        for behaviour in behaviours:
            if behaviour.name in job["names"]:
                report(behaviour.name, "begun")
                begin()
                status, message = run(behaviour, job["seed"], is_own=job["source"] is None)
                report(behaviour.name, status, message)
                if status != "right" and job.get("until_wrong"):
                    return


if __name__ == "__main__":
    main()
