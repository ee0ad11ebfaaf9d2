"""What the commands `chat` and `complete` share: flags, the engine, the terminal. `serve` has the
flags, too.

Each flag comes from the one declaration of an option:

    EngineConfig.max_num_seqs      --max-num-seqs 8       (config.py; --max_num_seqs is the same)
    SamplingParams.temperature     --temperature 0.6      (here: from the field and its comment)
    SamplingParams.stop            --stop END --stop ###  (a list: the flag again for each item)

A flag that is not given leaves the value to the model's generation_config.json, as LLM does.
`--seed` is SamplingParams.seed; the engine's own seed has no flag here.

Text goes to stdout. Everything else (what runs, notes, statistics, errors) goes to stderr, so that
`nanoserve complete ... > file` writes the text alone.

This module imports no torch: LLM loads it when the engine is built.

vLLM: vllm/entrypoints/cli/openai.py, vllm/utils/argparse_utils.py (V1).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import fields, replace
from difflib import get_close_matches
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin, get_type_hints

from nanoserve import LLM, RequestOutput, SamplingParams
from nanoserve.arg_utils import EngineArgs, FlexibleArgumentParser
from nanoserve.config import to_flag
from nanoserve.logger import configure_logging
from nanoserve.sampling_params import MISSING

if TYPE_CHECKING:
    from nanoserve.extras.lora import LoRARequest

NO_FLAG = ("detokenize", "skip_clone")  # the commands print text; a request has a clone
SIGN = "> "  # in front of what a person types
# Characters that would move the cursor or change colours; a model may write any.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")


# -- the command line --


class Parser(FlexibleArgumentParser):
    """argparse with short errors: one sentence that names the nearest flag.

    Positional arguments may stand between flags, and a flag may have underscores.
    """

    def __init__(self, prog: str, usage: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}",
            description=description,
            epilog="NANOSERVE_LOGGING_LEVEL=INFO also shows what the engine runs with.",
            allow_abbrev=False,
            conflict_handler="resolve",  # --seed: the later one counts
        )

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """The parsed arguments; what stands behind "--" is no flag. Ends with SystemExit(2) after a
        sentence on stderr."""
        end = arguments.index("--") if "--" in arguments else len(arguments)
        args, unknown = self.parse_known_intermixed_args(arguments[:end])
        words = arguments[end + 1 :]
        for action in self._get_positional_actions():  # one, which takes any number of words
            setattr(args, action.dest, [*getattr(args, action.dest), *words])
            words = []
        if words or (unknown and not unknown[0].startswith("-")):
            self.error(f"{(words or unknown)[0]!r} is one word too many.")
        elif unknown:
            name = unknown[0].partition("=")[0]
            shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
            flags = [flag for action in shown for flag in action.option_strings]
            near = get_close_matches(name, flags, n=1, cutoff=0.8)
            hint = "".join(f" Did you mean {flag}?" for flag in near)
            self.error(f"no option {name}.{hint}")
        return args

    def error(self, message: str) -> NoReturn:
        """One sentence, not the whole usage."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options.)\n")


def add_option_args(parser: argparse.ArgumentParser, without: Seq[str], **defaults: Any) -> None:
    """Flags for an adapter, and for the fields of SamplingParams and EngineArgs. `defaults`: what
    the command sets where SamplingParams has another default.

    The values of SamplingParams are in args.sampling_NAME, None if not given. Some fields have no
    flag: those in NO_FLAG, MISSING and `without`, and those that hold Python objects
    (logits_processors, output_kind).
    """
    parser.add_argument(
        "--lora-path", metavar="FOLDER", help="speak with this LoRA adapter; sets --enable-lora"
    )
    group = parser.add_argument_group(
        "sampling options",
        "Not given: what the model's generation_config.json recommends, else the default.",
    )
    EngineArgs.add_cli_args(parser)
    add_fields(group, SamplingParams, "sampling_", (*without, *NO_FLAG, *MISSING), **defaults)


def add_fields(
    group: argparse._ArgumentGroup,
    cls: Any,
    prefix: str,
    without: Seq[str] = (),
    short: Mapping[str, str] = MappingProxyType({}),
    **defaults: Any,
) -> None:
    """Flags for the fields of a dataclass. Their values are in args.<prefix>NAME, None if not
    given. short: second flags of some fields."""
    hints, comments = get_type_hints(cls), read_comments(cls)
    for each in fields(cls):
        how = flag_of(hints[each.name])
        if how is None or each.name in without:
            continue
        flags = [to_flag(each.name), *short.get(each.name, "").split()]
        action = group.add_argument(*flags, dest=prefix + each.name, default=None, **how)
        default = defaults.get(each.name, each.default)
        shown = "none" if default in ((), "") else default
        text = f"{comments.get(each.name, '')} (default: {shown})"
        action.help = text.replace("%", "%%")  # %(...)s is argparse's


def flag_of(hint: Any) -> dict[str, Any] | None:
    """The arguments of add_argument for a field of this type; None if it can have no flag."""
    kinds = get_args(hint) if type(None) in get_args(hint) else (hint,)
    for kind in kinds:
        if kind is bool:
            return {"action": argparse.BooleanOptionalAction}
        if kind in (int, float):
            return {"type": kind, "metavar": kind.__name__.upper()}
        if get_origin(kind) is Literal:
            return {"choices": get_args(kind)}
        item = (get_args(kind) or (None,))[0]
        if get_origin(kind) is Seq and item in (int, str):
            metavar = "ID" if item is int else "TEXT"
            return {"type": item, "action": "append", "metavar": metavar}
        if get_origin(kind) is tuple and item is str:
            return {"nargs": "+", "action": "extend", "metavar": "TEXT"}
        if get_origin(kind) is Mapping and item is int:
            return {"type": id_and_value, "action": "append", "metavar": "ID=VALUE"}
    return {"metavar": "TEXT"} if str in kinds else None


def id_and_value(text: str) -> tuple[int, float]:
    """ "42=-1.5" -> (42, -1.5)."""
    name, _, value = text.partition("=")
    try:
        return int(name), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, such as 42=-1.5.") from None


def read_comments(cls: type) -> dict[str, str]:
    """The comment of each field of a dataclass: behind it, or in the line above. An installation
    without source files has none."""
    try:
        source = inspect.getsource(cls)
    except OSError:
        return {}
    [definition] = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    lines = source.splitlines()
    comments = {}
    for before, node in pairwise(definition.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            between = lines[(before.end_lineno or 0) : node.lineno - 1]
            behind = lines[(node.end_lineno or 0) - 1][node.end_col_offset or 0 :]
            texts = [line.partition("#")[2].strip() for line in (*between, behind)]
            comments[node.target.id] = " ".join(filter(None, texts))
    return comments


# -- the engine --


def read_lora(args: argparse.Namespace) -> LoRARequest | None:
    """The adapter of all prompts, if one was given. Then the engine takes adapters."""
    if args.lora_path is None:
        return None
    from nanoserve import LoRARequest  # here: the chapter may not be there

    args.enable_lora = True
    return LoRARequest("lora", 1, args.lora_path)


def read_config(parser: Parser, args: argparse.Namespace) -> EngineArgs:
    """The engine's options; a value that is not allowed ends the command with status 2."""
    try:
        config = EngineArgs.from_cli_args(args)
    except (TypeError, ValueError) as error:
        parser.error(speak_of_flags(str(error)))
    return config


def speak_of_flags(message: str) -> str:
    """A sentence about an option of vLLM, for a command line.

    >>> speak_of_flags("EngineArgs(spec_model=True): ... Leave spec_model out, or set it to None.")
    "--spec-model: ... Leave --spec-model out."
    """
    match = re.fullmatch(r"EngineArgs\((\w+)=.*?\): (.*) Leave \1 out.*", message)
    if match is None:
        return message
    flag = to_flag(match[1].strip("_"))
    return f"{flag}: {match[2]} Leave {flag} out."


def read_sampling(parser: Parser, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of SamplingParams that were given, checked."""
    values = {name: value for name, value in vars(args).items() if name.startswith("sampling_")}
    given = {n.removeprefix("sampling_"): v for n, v in values.items() if v is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    try:
        SamplingParams(**given)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return given


def build_llm(config: EngineArgs) -> LLM:
    """The engine in this process. Raises ValueError for a model that is not there.

    Its report of what runs is left out, unless NANOSERVE_LOGGING_LEVEL or NANOSERVE_LOG_SCHEDULER
    asks for messages.
    """
    configure_logging("WARNING")
    return LLM.from_engine_args(config)


def make_params(llm: LLM, given: dict[str, Any], max_tokens: int | None) -> SamplingParams:
    """What was given, over what the model recommends; `max_tokens` if neither says it."""
    recommended = llm.get_default_sampling_params()
    if "max_new_tokens" not in llm.engine.model_config.generation_config:
        recommended = replace(recommended, max_tokens=max_tokens)
    return replace(recommended, **given)


# -- the terminal --


def is_interactive() -> bool:
    """True if a person types and reads: stdin and stdout are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def clean(text: str) -> str:
    """A text that can be encoded: halves of surrogate pairs become U+FFFD. A terminal or a shell
    makes them of bytes that are no UTF-8."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def write(text: str) -> None:
    """Text of a model to stdout, at once. In a terminal without control characters."""
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str, end: str = "\n") -> None:
    """A remark to stderr; grey in a terminal, unless NO_COLOR is set."""
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR"):
        text = f"\033[2m{text}\033[0m"
    print(text, end=end, file=sys.stderr, flush=True)


class Stats:
    """What --stats tells of an answer, measured where the user waits for it."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first: float | None = None  # when the first token came
        self.num_tokens = 0
        self.prompt = ""

    def count(self, output: RequestOutput) -> None:
        """New tokens have come."""
        self.num_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        self.first = self.first or time.perf_counter()
        self.prompt = (
            f"; prompt {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} of them "
            "cached"
        )

    def describe(self) -> str:
        """For example "11 tokens in 0.05 s (228 tok/s)"."""
        seconds = time.perf_counter() - self.start
        return (
            f"{self.num_tokens} tokens in {seconds:.2f} s ({self.num_tokens / seconds:.0f} tok/s)"
        )

    def describe_one(self) -> str:
        """The same of a single streamed answer, with its first token and its prompt."""
        if self.first is None:
            return self.describe()
        first = f"first token after {1000 * (self.first - self.start):.0f} ms, "
        return f"{first}{self.describe()}{self.prompt}"


class Leave(Exception):
    """The user wants to go."""


def read_lines(handle: Callable[[str], None]) -> None:
    """Call handle(line) for each line that is typed, or that comes through a pipe, until the end of
    the input, Ctrl-D, Leave, or Ctrl-C twice in a row at the prompt.

    In a terminal lines can be edited, and the arrow keys bring earlier lines back, where Python has
    readline. A line that ends with a backslash goes on in the next.
    """
    if is_interactive():
        edit_lines()
    num_interrupts = 0
    while True:
        try:
            line = read_line()
            num_interrupts = 0
            if line.strip():
                handle(line)
        except (EOFError, Leave):
            break
        except KeyboardInterrupt:
            num_interrupts += 1
            if not is_interactive():
                raise
            if num_interrupts == 2:
                break
            note("\n[Ctrl-C again or Ctrl-D leaves]")
    if is_interactive():
        print()


def edit_lines() -> None:
    """Let input() use readline, if Python has it: a history, and pasted lines as one text."""
    with contextlib.suppress(ImportError):
        import readline  # Windows has none

        if "libedit" not in (readline.__doc__ or ""):  # macOS; it reads another language
            readline.parse_and_bind("set enable-bracketed-paste on")


def read_line() -> str:
    """The next line, cleaned. Raises EOFError at the end of the input."""
    if not is_interactive():
        if sys.stdin.isatty():
            note(SIGN, end="")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return clean(line).removesuffix("\n").removesuffix("\r")
    line = input(SIGN)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input("." * (len(SIGN) - 1) + " ")
    return clean(line).rstrip("\n")
