"""The two commands of the course: start and grade."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
LABS = {int(file.stem[3]): file.stem for file in sorted((HERE / "labs").glob("lab*.py"))}
PLUGIN = "nanoserve.teaching.course.plugin"


def start(folder: Path, labs: list[int]) -> None:
    """Write the files of these labs; one that is there already stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in labs:
        files = [HERE / "labs" / f"{LABS[number]}.py", *HERE.glob(f"handouts/lab{number}.*")]
        for file in files:
            if (folder / file.name).exists():
                print(f"{folder / file.name} is there already: it stays.")
            else:
                shutil.copy(file, folder)
    (folder / "conftest.py").write_text(f'pytest_plugins = ["{PLUGIN}"]\n')
    graders = PLUGIN.replace("plugin", "graders")
    for number in labs:
        text = f"from {graders}.test_{LABS[number]} import *  # noqa: F403\n"
        (folder / f"test_{LABS[number]}.py").write_text(text)
    first = LABS[labs[0]]
    print(f"Read {folder}/lab{labs[0]}.md, write {folder}/{first}.py, then:")
    print(f"  python -m nanoserve.teaching.course grade {folder}")


def grade(folder: Path, labs: list[int], options: list[str]) -> int:
    """Run the graders of these labs; the exit status is pytest's (0: everything is right)."""
    files = [str(HERE / "graders" / f"test_{LABS[number]}.py") for number in labs]
    quiet = ["-q", "--tb=no", "--no-header", "--disable-warnings", "-rN", "--show-capture=no"]
    # Nothing of the folder around, and no plugin that only takes time.
    without = ("cacheprovider", "xdist", "unraisableexception", "threadexception")
    own = ["-o", "addopts=", "-p", PLUGIN, *(f"-pno:{each}" for each in without)]
    return pytest.main([*own, *quiet, f"--labs-dir={folder}", *options, *files])


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nanoserve.teaching.course")
    parser.add_argument("command", choices=["start", "grade"])
    parser.add_argument("folder", type=Path, help="where the student's files are")
    parser.add_argument(
        "--labs", type=int, nargs="+", choices=LABS, metavar="N", help="only these labs"
    )
    args, options = parser.parse_known_args(words)
    if args.command == "start":
        if options:
            parser.error(f"unknown: {' '.join(options)}")
        start(args.folder, args.labs or [*LABS])
        return 0
    there = [number for number, lab in LABS.items() if (args.folder / f"{lab}.py").exists()]
    if not (args.labs or there):
        parser.error(f"there is no file of a lab in {args.folder}: `start` writes them.")
    return grade(args.folder, args.labs or there, options)


if __name__ == "__main__":
    sys.exit(main())
