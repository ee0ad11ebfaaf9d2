"""The command line: `nanoserve COMMAND ...`, and `python -m nanoserve COMMAND ...`.

    nanoserve chat --stats  ->  COMMANDS["chat"].module is nanoserve.tools.cli_chat
                            ->  import that module, call its main(["--stats"])
                            ->  what main returns is the exit status

A command is a module with `main(arguments: list[str]) -> int`. The module is imported when its
command is called. It reads its arguments first, and imports torch after that: so `--help` and a
misspelt option are answered at once. A command whose module is not there says so in one sentence:
a chapter can be planned, and the folders tools/, bench/ and extras/ can be deleted.

Exit status: 0; 1 for what failed (one sentence on stderr); 2 for a command line that is not right;
130 after Ctrl-C. NANOSERVE_LOGGING_LEVEL=DEBUG shows the traceback behind the sentence.

vLLM: vllm/entrypoints/cli/main.py (V1).
"""

from __future__ import annotations

import io
import os
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

from nanoserve.interrupts import repeated_interrupt

from nanoserve import __version__


class Command(NamedTuple):
    """One command of the table."""

    module: str  # has main(arguments)
    help: str
    if_missing: str = "is missing"  # what is said of the module's file if it is not there


COMMANDS = {
    "chat": Command("nanoserve.tools.cli_chat", "talk with a model in the terminal"),
    "complete": Command(
        "nanoserve.tools.cli_complete", "complete prompts (`generate` is the same command)"
    ),
    "serve": Command("nanoserve.extras.server", "answer requests of OpenAI's API over HTTP"),
    "bench": Command("nanoserve.bench.cli", "measure speed, beside peers and the roofline"),
    "course": Command("nanoserve.extras.course.cli", "make and grade assignments of a course"),
    "doctor": Command("nanoserve.tools.doctor", "what would a run here use, and does it work?"),
}
ALIASES = {"generate": "complete", "collect-env": "doctor"}  # other words, and vLLM's

# What a user can cause and read. Everything else is a bug of ours and shows its traceback.
USER_ERRORS = (ValueError, OSError, RuntimeError, ImportError, MemoryError)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status. argparse ends with SystemExit (0 or 2)."""
    arguments = sys.argv[1:] if arguments is None else arguments
    lost = io.StringIO()  # what is written to a standard output that is closed
    sys.stdin, sys.stdout = sys.stdin or io.StringIO(), sys.stdout or lost  # None: closed
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):  # bytes that are no text do not end a command
            stream.reconfigure(errors="replace" if stream is sys.stdin else "backslashreplace")
    try:
        with repeated_interrupt():
            status = run(arguments)
        sys.stdout.flush()
        if lost.getvalue():
            raise ValueError("standard output is closed; nobody can read the answer.")
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # `nanoserve ... | head`: the reader has gone, nobody is to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except USER_ERRORS as error:
        if os.environ.get("NANOSERVE_LOGGING_LEVEL", "").upper() == "DEBUG":
            raise
        message = str(error) or type(error).__name__
        if isinstance(error, ModuleNotFoundError):
            message += f": it is not installed for {sys.executable}."
        elif not isinstance(error, ValueError):  # our own doors say what to do
            message += " (NANOSERVE_LOGGING_LEVEL=DEBUG shows the traceback)"
        print(f"nanoserve {arguments[0]}: error: {message}", file=sys.stderr)
        return 1


def run(arguments: list[str]) -> int:
    """Find the command and call its main()."""
    match arguments:
        case [] | ["-h" | "--help" | "help"]:
            print(describe_commands())
            return 0
        case ["-v" | "--version"]:
            print(f"nanoserve {__version__}")
            return 0
        case ["help", name, *_]:
            arguments = [name, "--help"]
    name = ALIASES.get(arguments[0], arguments[0])
    if name not in COMMANDS:
        print(f"nanoserve: error: {describe_unknown(name)}", file=sys.stderr)
        return 2
    command = COMMANDS[name]
    if not is_there(command):
        print(f"nanoserve {name}: error: {describe_missing(command)}", file=sys.stderr)
        return 1
    return import_module(command.module).main(arguments[1:])


def is_there(command: Command) -> bool:
    """Is the command's module installed? The module itself is not imported."""
    try:
        return find_spec(command.module) is not None
    except (ImportError, ValueError):  # not even its folder
        return False


def describe_commands() -> str:
    """The text of `nanoserve --help`."""
    lines = [f"  {name:<10}{describe_command(command)}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: nanoserve COMMAND [options]",
            "",
            "vLLM's ideas as running code: a small, readable LLM inference engine.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  -h, --help      this text; after a command: its options",
            "  -v, --version   the version",
            "",
            "Without --model, a command runs the embedded demo model: no download, no GPU.",
        ]
    )


def describe_command(command: Command) -> str:
    """What a command does, or why it does nothing."""
    if is_there(command):
        return command.help
    is_planned = "planned" in command.if_missing
    return f"{command.help} (planned, not there yet)" if is_planned else describe_file(command)


def describe_file(command: Command) -> str:
    """For example "nanoserve/extras/server.py is planned, and not there yet"."""
    return f"{command.module.replace('.', '/')}.py {command.if_missing}"


def describe_missing(command: Command) -> str:
    """What to use instead of a command whose module is not there."""
    others = [name for name, other in COMMANDS.items() if is_there(other)]
    instead = " or ".join([f"nanoserve {', '.join(others)}"] * bool(others) + ["LLM in Python"])
    return f"{describe_file(command)}. Use {instead}."


def describe_unknown(name: str) -> str:
    """What was probably meant by a word that is no command."""
    if name.startswith("-"):
        return f"a command comes first, then its options, such as nanoserve chat {name}."
    nearest = get_close_matches(name, [*COMMANDS, *ALIASES], n=1)
    hint = "".join(f" Did you mean {other}?" for other in nearest)
    return f"no command {name!r}; allowed: {', '.join(COMMANDS)}.{hint}"


if __name__ == "__main__":
    sys.exit(main())
