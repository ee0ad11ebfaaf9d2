"""`nanoserve course make | check | list | grade | quiz | contest`: see the package's docstring.

vLLM: none.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tqdm import tqdm

from nanoserve.extras.course import exports, grader, make, ready
from nanoserve.extras.course.spec import Lab, Setting, load_labs

VARIANT_LAB = 15  # only if a term is named
SECRET_LABS = (0, 9)  # what they ask depends on the student and the secret
ALL = "default: all but a bonus"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanoserve course", description="Assignments cut from the engine's own source."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    each = commands.add_parser("make", help="write a student's tree")
    each.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    each.add_argument("--labs", type=lab_numbers, metavar="1,2", help=ALL)
    each.add_argument("--variant", default="", metavar="TERM", help="such as 2027a")
    each = commands.add_parser("export", help="a zip for a grading service, or lab 0 as a notebook")
    each.add_argument("service", choices=["gradescope", "nbgrader", "otter"])
    each.add_argument("file", type=Path, metavar="FILE", help="a new zip, or a new notebook")
    each.add_argument("--labs", type=lab_numbers, metavar="1,2", help=ALL)
    each.add_argument("--hidden", type=Path, metavar="DIR", help="lab1_*.py, lab2_*.py, ...")
    each.add_argument("--variant", default="", metavar="TERM", help="as it was given to `make`")
    each.add_argument("--secret", default="", metavar="WORD", help="as it was given to `quiz`")
    each.add_argument("--seed", type=int, help="of random cases (default: a new one each time)")
    commands.add_parser("check", help="is this machine ready?")
    commands.add_parser("list", help="the labs, their tasks and points")
    each = commands.add_parser("grade", help="points, and a sentence for what is wrong")
    each.add_argument(
        "submission", type=Path, nargs="?", default=None, help="a student's tree (default: here)"
    )
    each.add_argument("--labs", type=lab_numbers, metavar="1,2", help="default: those of the tree")
    how = each.add_mutually_exclusive_group()
    how.add_argument("--graft", action="store_true", help="each function alone (the default)")
    how.add_argument("--whole", action="store_true", help="the student's whole engine")
    each.add_argument(
        "--hidden", type=Path, metavar="DIR", help="lab1_*.py, lab2_*.py: more checks"
    )
    each.add_argument("--seed", type=int, help="of random cases (default: a new one)")
    each.add_argument("--json", type=Path, metavar="FILE", help="results.json of Gradescope")
    each.add_argument("--junitxml", type=Path, metavar="FILE")
    each.add_argument("--variant", default="", metavar="TERM", help="as it was given to `make`")
    each.add_argument("--student", default="", metavar="ID", help="default: of answers.json")
    each.add_argument("--secret", default="", metavar="WORD", help="as it was given to `quiz`")
    each.add_argument("--metadata", type=Path, metavar="FILE", help="Gradescope's: who hands it in")
    each.add_argument("--bank", type=Path, metavar="FILE", help="lab 9: your own mutants (JSON)")
    each = commands.add_parser("quiz", help="lab 0: the sheet of a student, or of many")
    each.add_argument("students", nargs="+", metavar="ID")
    each.add_argument("--secret", default="", metavar="WORD", help="goes into each sheet's numbers")
    each.add_argument("--out", type=Path, metavar="DIR", help="write quiz-ID.md and ID.json there")
    each = commands.add_parser("contest", help="lab 10: a leaderboard of policies")
    each.add_argument("submissions", type=Path, nargs="+", metavar="FOLDER", help="with policy.py")
    each.add_argument("--seed", type=int, default=0, help="of the traces (default: 0)")
    each.add_argument("--plot", type=Path, metavar="FILE", help="goodput against load, as SVG")
    return parser


def lab_numbers(text: str) -> list[int]:
    """For argparse: "1,2,3". In their order, each once."""
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no list such as 1,2,3") from error


def main(arguments: list[str]) -> int:
    """Run a command; return the exit status. Raises ValueError for what cannot be done."""
    args = make_parser().parse_args(arguments)
    if args.command == "grade" and args.submission is not None:
        args.submission = grader.find_tree(args.submission)
    if args.command == "check":
        text, is_ready = ready.check()
        print(text)
        return 0 if is_ready else 1
    if args.command == "quiz":
        return quiz(args.students, args.secret, args.out)
    if args.command == "contest":
        return contest(args.submissions, args.seed, args.plot)
    course = make.read_course()
    numbers = getattr(args, "labs", None)
    term = getattr(args, "variant", "") or (course or {}).get("variant", "")
    if course is not None:
        if args.command in ("make", "export"):
            raise ValueError(f"this is a student's tree; `{args.command}` needs the whole source.")
        if missing := set(numbers or ()) - set(course["labs"]):
            raise ValueError(f"lab {min(missing)} is not in this tree; it has {course['labs']}.")
        numbers = numbers or course["labs"]
    elif args.command == "grade" and numbers is None:
        numbers = labs_of(args.submission, term)
    if args.command in ("make", "export") and term and numbers and VARIANT_LAB not in numbers:
        numbers = [*numbers, VARIANT_LAB]
    labs = load_labs(numbers)
    if numbers is None:
        labs = [lab for lab in labs if term or lab.number != VARIANT_LAB]
        labs = [lab for lab in labs if args.command == "list" or not lab.is_bonus]
    if args.command == "list":
        print(describe_labs(labs))
        return 0
    if args.command == "make":
        files = make.make(args.out, labs, term)
        num_tasks = sum(len(lab.tasks) for lab in labs)
        where = f"{len(files)} file{'s' * (len(files) != 1)}"
        print(f"{args.out}: {num_tasks} holes in {where}; see {args.out}/README.md")
        return 0
    if args.command == "export" and args.service != "gradescope":
        given = [args.hidden, args.secret, args.variant, args.seed]
        if numbers not in (None, [0]) or any(each not in (None, "") for each in given):
            raise ValueError(
                f"{args.service} takes no other option than --labs 0: its notebook is the trace "
                "quiz, whose numbers anybody can compute who runs it. `export gradescope` keeps a "
                "secret."
            )
        exports.export_notebook(args.file, args.service)
        print(f"{args.file}: the lecturer's notebook; its numbers hang on the student's id alone")
        return 0
    if args.command == "export":
        hidden = {} if args.hidden is None else read_hidden(args.hidden)
        texts = {name: text for lab in hidden.values() for name, text in lab.items()}
        options = ["--secret", args.secret] * bool(args.secret)
        options += ["--seed", str(args.seed)] * (args.seed is not None)
        exports.export_gradescope(args.file, labs, texts, term, options)
        print(f"{args.file}: upload it as the autograder of an assignment")
        if not args.secret and any(lab.number in SECRET_LABS for lab in labs):
            print("Without --secret the quiz's numbers and the bugs of lab 9 are public.")
        return 0
    return grade(args, labs, term, is_own=course is not None)


def labs_of(submission: Path | None, term: str) -> list[int] | None:
    """The labs of which a submission says that it was made for them. None if it does not say."""
    try:
        course = make.read_course(submission or Path())
        numbers = lab_numbers(",".join(str(number) for number in (course or {})["labs"]))
    except (OSError, ValueError, LookupError, TypeError, argparse.ArgumentTypeError):
        return None
    return [number for number in numbers if term or number != VARIANT_LAB]


def describe_labs(labs: list[Lab]) -> str:
    """A table for a terminal."""
    lines = []
    for lab in labs:
        tasks = lab.get_tasks()
        points = sum(task.points for task in tasks)
        bonus = ", a bonus: ask for it by its number" * lab.is_bonus
        lines.append(f"lab {lab.number}  {lab.title}   {points:g} points{bonus}")
        lines += [f"  {task.number}  {task.name}   {task.points:g}" for task in tasks]
    return "\n".join(lines)


def quiz(students: list[str], secret: str, out: Path | None) -> int:
    """The command `quiz`: print the sheets, or write them with an empty answers.json for each."""
    from nanoserve.extras.course.labs.quiz_0 import empty_answers, make_quiz

    for student in students:
        try:
            sheet = make_quiz(student, secret).describe()
        except NotImplementedError as error:
            raise ValueError(
                f"this tree has holes ({error}), so it cannot run a trace. Your lecturer has the "
                "sheets."
            ) from error
        if out is None:
            print(sheet)
            continue
        if Path(student).name != student:
            raise ValueError(f"{student!r} cannot be the name of a file; give another id.")
        out.mkdir(parents=True, exist_ok=True)
        (out / f"quiz-{student}.md").write_text(sheet, encoding="utf-8")
        (out / f"{student}.json").write_text(empty_answers(student), encoding="utf-8")
    return 0


def contest(submissions: list[Path], seed: int, plot: Path | None) -> int:
    """The command `contest`: a table, first come first served among the policies, and one plot."""
    from nanoserve.extras.course.labs import contest_10

    folders: dict[str, Path | None] = {"(first come, first served)": None}
    for folder in submissions:
        name = folder.resolve().name
        folders[str(folder) if name in folders else name] = folder
    rows = [
        contest_10.enter(name, folder, seed, with_rates=plot is not None)
        for name, folder in tqdm(folders.items(), desc="contest", unit="policy", file=sys.stderr)
    ]
    print(contest_10.leaderboard(rows))
    if plot is not None:
        plot.write_text(contest_10.plot(rows), encoding="utf-8")
    return 0


def grade(args: argparse.Namespace, labs: list[Lab], term: str, is_own: bool) -> int:
    """The command `grade`. is_own: this package is itself a student's tree."""
    submission: Path | None = args.submission
    if is_own:
        if submission is not None and submission.resolve() != grader.ROOT:
            raise ValueError(f"this tree grades itself; run `grade` in {submission}.")
        submission = None
    elif submission is None:
        raise ValueError("name the submission: a folder that holds nanoserve/.")
    elif any(lab.tasks for lab in labs) and not (submission / "nanoserve").is_dir():
        raise ValueError(f"{submission} holds no folder nanoserve/; give the student's tree.")
    hidden = None if args.hidden is None else read_hidden(args.hidden)
    if args.bank is not None:
        from nanoserve.extras.course.labs import hunt_9
        from nanoserve.extras.course.mutants import read_bank

        hunt_9.HUNT.bank += read_bank(args.bank)
    setting = Setting(term=term, secret=args.secret, student=args.student, is_own=is_own)
    if args.whole:
        report = grader.grade_whole(labs, submission or grader.ROOT, seed=args.seed)
    else:
        num_tasks = sum(len(lab.get_tasks(setting)) for lab in labs)
        with tqdm(total=num_tasks, desc="grading", unit="task", file=sys.stderr) as bar:
            report = grader.grade(
                labs,
                submission,
                seed=args.seed,
                hidden=hidden,
                on_task=lambda _: bar.update(),
                setting=setting,
            )
    if submission is not None and any(lab.number in SECRET_LABS for lab in labs):
        from nanoserve.extras.course.labs.quiz_0 import whose

        report.note = whose(submission, setting, args.metadata)
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    if args.junitxml is not None:
        args.junitxml.write_text(report.to_junit() + "\n", encoding="utf-8")
    print(report.describe())
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
