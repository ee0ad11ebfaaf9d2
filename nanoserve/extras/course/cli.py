"""`nanoserve course make | check | grade | list`: see nanoserve/extras/course/__init__.py.

vLLM: none.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

from nanoserve.extras.course import grader, make, ready
from nanoserve.extras.course.spec import Lab, load_labs


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanoserve course", description="Assignments cut from the engine's own source."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    each = commands.add_parser("make", help="write a student's tree")
    each.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    each.add_argument("--labs", type=lab_numbers, help="such as 1,2,3 (default: all but a bonus)")
    each.add_argument("--variant", default="", metavar="TERM", help="such as 2027a")
    commands.add_parser("check", help="is this machine ready?")
    commands.add_parser("list", help="the labs, their tasks and points")
    each = commands.add_parser("grade", help="points, and a sentence for what is wrong")
    each.add_argument(
        "submission", type=Path, nargs="?", default=None, help="a student's tree (default: here)"
    )
    each.add_argument("--labs", type=lab_numbers, help="such as 1,2,3 (default: all but a bonus)")
    how = each.add_mutually_exclusive_group()
    how.add_argument("--graft", action="store_true", help="each function alone (the default)")
    how.add_argument("--whole", action="store_true", help="the student's whole engine")
    each.add_argument(
        "--hidden", type=Path, metavar="DIR", help="lab1_*.py, lab2_*.py: more checks"
    )
    each.add_argument("--seed", type=int, help="of random cases (default: a new one)")
    each.add_argument("--json", type=Path, metavar="FILE", help="results.json of Gradescope")
    each.add_argument("--junitxml", type=Path, metavar="FILE")
    return parser


def lab_numbers(text: str) -> list[int]:
    """For argparse: "1,2,3"."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 1,2,3") from error


def main(arguments: list[str]) -> int:
    """Run a command; return the exit status. Raises ValueError for what cannot be done."""
    args = make_parser().parse_args(arguments)
    if args.command == "check":
        text, is_ready = ready.check()
        print(text)
        return 0 if is_ready else 1
    course = make.read_course()
    numbers = getattr(args, "labs", None)
    if numbers is None and course is not None:
        numbers = course["labs"]
    labs = load_labs(numbers)
    if numbers is None and args.command != "list":
        labs = [lab for lab in labs if not lab.is_bonus]
    if args.command == "list":
        print(describe_labs(labs))
        return 0
    if args.command == "make":
        files = make.make(args.out, labs, args.variant)
        num_tasks = sum(len(lab.tasks) for lab in labs)
        print(f"{args.out}: {num_tasks} holes in {len(files)} files; see {args.out}/README.md")
        return 0
    return grade(args, labs, is_own=course is not None)


def describe_labs(labs: list[Lab]) -> str:
    """A table for a terminal."""
    lines = []
    for lab in labs:
        points = sum(task.points for task in lab.tasks)
        bonus = ", a bonus: ask for it by its number" * lab.is_bonus
        lines.append(f"lab {lab.number}  {lab.title}   {points:g} points{bonus}")
        lines += [f"  {task.number}  {task.name}   {task.points:g}" for task in lab.tasks]
    return "\n".join(lines)


def grade(args: argparse.Namespace, labs: list[Lab], is_own: bool) -> int:
    """The command `grade`. is_own: this package is itself a student's tree."""
    submission: Path | None = args.submission
    if is_own:
        if submission is not None and submission.resolve() != grader.ROOT:
            raise ValueError(f"this tree grades itself; run `grade` in {submission}.")
        submission = None
    elif submission is None:
        raise ValueError("name the submission: a folder that holds nanoserve/.")
    elif not (submission / "nanoserve").is_dir():
        raise ValueError(f"{submission} holds no folder nanoserve/; give the student's tree.")
    hidden = None if args.hidden is None else read_hidden(args.hidden)
    num_tasks = sum(len(lab.tasks) for lab in labs)
    with tqdm(total=num_tasks, desc="grading", unit="task", file=sys.stderr) as bar:
        if args.whole and submission is not None:
            report = grader.grade_whole(labs, submission, seed=args.seed)
        else:
            report = grader.grade(
                labs, submission, seed=args.seed, hidden=hidden, on_task=lambda _: bar.update()
            )
    print(report.describe())
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    if args.junitxml is not None:
        args.junitxml.write_text(report.to_junit() + "\n", encoding="utf-8")
    return 0


def read_hidden(folder: Path) -> dict[int, dict[str, str]]:
    """lab -> {file name: source}, of files such as lab1_cpu_pool.py. Raises ValueError if there is
    none."""
    found: dict[int, dict[str, str]] = {}
    for file in sorted(folder.glob("lab*.py")):
        number = file.stem.removeprefix("lab").partition("_")[0]
        if number.isdigit():
            found.setdefault(int(number), {})[file.name] = file.read_text(encoding="utf-8")
    if not found:
        raise ValueError(f"{folder} holds no file such as lab1_pool.py.")
    return found
