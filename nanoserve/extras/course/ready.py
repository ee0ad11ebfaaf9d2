"""Is this machine ready for the labs? Two seconds, and no torch for labs that need none.

    Python 3.11.7                                   ok
    pytest 9.0.2, tqdm 4.67.1                       ok
    a child that is stopped at its limit            ok
    torch 2.13.0                                    only labs about tensors need it

vLLM: none.
"""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from nanoserve.extras.course.grader import run_child
from nanoserve.extras.course.make import PACKAGES, TORCH_PACKAGES
from nanoserve.extras.course.spec import load_labs


def check() -> tuple[str, bool]:
    """(lines for a terminal, whether the labs without torch can be done here)."""
    lines: list[str] = []
    is_python = sys.version_info >= (3, 10)
    lines.append(f"Python {platform.python_version()}: {'ok' if is_python else 'needs 3.10'}")
    missing = describe_packages(PACKAGES, lines)
    lab = next(each for each in load_labs(can_skip=True) if each.tasks)
    task = lab.tasks[0]
    job: dict[str, Any] = {
        "nonce": "check",
        "lab": lab.number,
        "task": task.number,
        "source": None,
        "seed": 0,
    }
    names = [each.name for each in task.behaviours[:1]]
    job |= {"names": names, "hidden": {}, "seconds": lab.seconds, "megabytes": lab.memory}
    _, seen, ended = run_child(job, 60.0)
    lines.append(f"a child that grades: {'ok' if seen else ended}")
    try:
        import resource  # noqa: F401

        lines.append("limits of time and memory: ok")
    except ImportError:
        lines.append("limits of time: ok; of memory: this system has none")
    without: list[str] = []
    if describe_packages(TORCH_PACKAGES, without):
        without[-1] += " (only labs about tensors need it)"
    lines += without
    return "\n".join(lines), is_python and not missing and bool(seen)


def describe_packages(names: tuple[str, ...], lines: list[str]) -> list[str]:
    """Add a line; return the packages that are missing."""
    found, missing = [], []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    if found:
        lines.append(f"{', '.join(found)}: ok")
    if missing:
        lines.append(f"not installed: {', '.join(missing)}")
    return missing
