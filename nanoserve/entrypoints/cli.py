"""The command line: `nanoserve COMMAND ...`, and `python -m nanoserve COMMAND ...`.

    nanoserve chat                                     talk in the terminal; exit or Ctrl-D leaves
    nanoserve complete "Once upon a time" --seed 1     printed as it comes
    nanoserve complete --json < prompts.txt            each line is a prompt, and a line of JSON
    nanoserve serve --port 8000                        OpenAI's API over HTTP
    nanoserve doctor                                   what would a run here use?
    nanoserve bench                                    the same as bench.py

Every option of LLM is a flag (flags.py), every number of SamplingParams, too. What is not given
leaves the value to the model's generation_config.json. Texts go to stdout; notes and errors go to
stderr, so that `nanoserve complete ... > file` writes the text alone.

Exit status: 0; 1 for what failed; 2 for a command line that is not right; 130 after Ctrl-C.

vLLM: vllm/entrypoints/cli/: main.py, openai.py, serve.py (V1).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from nanoserve import LLM, RequestOutputKind, SamplingParams, __version__
from nanoserve.entrypoints import arguments
from nanoserve.sampling_params import RANGES

COMMANDS = {
    "chat": "talk with a model in the terminal",
    "complete": "complete prompts",
    "serve": "answer requests of OpenAI's API over HTTP",
    "doctor": "what would a run here use, and does it work?",
    "bench": "measure speed, beside peers",
}
ELSEWHERE = {"doctor": "nanoserve.tools.doctor", "bench": "nanoserve.bench.cli"}  # have a main()
LEAVE = {"exit", "quit", "bye", "/exit", "/quit", "/bye"}
USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError)
# Characters that would move the cursor or change colours; a model may write any.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status. argparse ends with SystemExit (0 or 2)."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        return run(words)
    except KeyboardInterrupt:
        note("\n[stopped]")
        return 130
    except BrokenPipeError:  # `nanoserve ... | head`: the reader has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except USER_ERRORS as error:
        if os.environ.get("NANOSERVE_DEBUG"):
            raise
        hint = "" if isinstance(error, ValueError) else " (NANOSERVE_DEBUG=1 shows the traceback)"
        note(f"nanoserve {words[0]}: error: {str(error) or type(error).__name__}{hint}")
        return 1


def run(words: list[str]) -> int:
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in ("-h", "--help", "help"):
        lines = [f"  {command:<10}{text}" for command, text in COMMANDS.items()]
        print("usage: nanoserve COMMAND [options]\n", *lines, "", sep="\n")
        print("COMMAND --help lists its options. Without --model it runs the embedded demo model.")
        return 0
    if name in ("-v", "--version"):
        print(f"nanoserve {__version__}")
        return 0
    name = {"generate": "complete", "collect-env": "doctor"}.get(name, name)
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        note(f"nanoserve: error: no command {name!r}; allowed: {', '.join(COMMANDS)}.{hint}")
        return 2
    if name in ELSEWHERE:
        return import_module(ELSEWHERE[name]).main(rest)
    commands = {"chat": chat, "complete": complete, "serve": serve}
    return commands[name](rest)


class Parser(argparse.ArgumentParser):
    """argparse with errors of one sentence."""

    def __init__(self, command: str, without: tuple[str, ...] = ()) -> None:
        from nanoserve.entrypoints.flags import add_engine_flags  # imports torch

        super().__init__(f"nanoserve {command}", description=COMMANDS[command], allow_abbrev=False)
        add_engine_flags(self, without)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (--help lists the options.)\n")

    def parse(self, words: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
        """The arguments, and the options for LLM(**options)."""
        from nanoserve.entrypoints.flags import read_engine_flags, read_other_flags, with_dashes

        args, unknown = self.parse_known_args(with_dashes(words))
        try:
            options = read_other_flags(unknown)
        except TypeError as error:
            self.error(str(error))
        for flag in [f"--{name.replace('_', '-')}" for name in options.keys() - arguments.OTHERS]:
            near = get_close_matches(flag, self._option_string_actions, n=1)
            self.error(f"no option {flag}.{f' Did you mean {near[0]}?' if near else ''}")
        return args, {**read_engine_flags(args), **options}


# -- chat and complete --


def add_sampling_flags(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """A flag for each number of SamplingParams, and a few more."""
    add = parser.add_argument_group("sampling").add_argument
    for name, (kind, _, _, allowed) in RANGES.items():
        if name not in without:
            how: dict[str, Any] = {"type": kind, "metavar": str(kind.__name__).upper()}
            add("--" + name.replace("_", "-"), dest=f"sampling_{name}", help=allowed, **how)
    add("--stop", dest="sampling_stop", action="append", metavar="TEXT", help="ends the output")
    add("--ignore-eos", dest="sampling_ignore_eos", action="store_const", const=True)
    add("--lora-path", metavar="FOLDER", help="speak with this LoRA adapter")
    add("-q", "--quick", metavar="TEXT", help="one question or prompt, and leave")


def read_sampling(parser: Parser, args: argparse.Namespace) -> dict[str, Any]:
    """Fields of SamplingParams that were given; a wrong value ends the command with status 2."""
    values = {n: v for n, v in vars(args).items() if n.startswith("sampling_") and v is not None}
    given = {name.removeprefix("sampling_"): value for name, value in values.items()}
    try:
        SamplingParams(**given)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return given


def make_params(llm: LLM, given: dict[str, Any], max_tokens: int | None) -> SamplingParams:
    """What was given, over what the model recommends; max_tokens if neither says it."""
    params = llm.get_default_sampling_params()
    if "max_new_tokens" not in llm.engine.model_config.generation_config:
        params = replace(params, max_tokens=max_tokens)
    return replace(params, **given)


def read_adapter(args: argparse.Namespace, options: dict[str, Any]) -> Any:
    """The adapter of --lora-path; then the engine takes adapters."""
    if args.lora_path is None:
        return None
    from nanoserve.chapters.lora import LoRARequest

    options["enable_lora"] = True
    return LoRARequest("lora", 1, args.lora_path)


def chat(words: list[str]) -> int:
    """Talk until the user leaves. Without a terminal, each line of stdin is a question of one
    conversation. Returns 1 if a question had no answer."""
    parser = Parser("chat", without=("seed",))
    parser.add_argument("--system-prompt", metavar="TEXT", help="how the model shall answer")
    add_sampling_flags(parser, without=("n", "logprobs", "prompt_logprobs"))
    args, options = parser.parse(words)
    given, lora_request = read_sampling(parser, args), read_adapter(args, options)
    system = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    messages, has_failed = list(system), False
    with LLM(**options) as llm:
        params = make_params(llm, given, None)
        if is_interactive():
            note("exit or Ctrl-D leaves, /reset begins a new conversation, Ctrl-C stops an answer.")
        for line in read_lines() if args.quick is None else [args.quick]:
            if line == "/reset":
                messages = list(system)
                continue
            messages.append({"role": "user", "content": line})
            answer = print_answer(llm, messages, params, lora_request)
            if answer is None:  # a question without an answer is forgotten
                messages.pop()
                has_failed = True
            else:
                messages.append({"role": "assistant", "content": answer})
    return int(has_failed)


def print_answer(
    llm: LLM, messages: list[Any], params: SamplingParams, lora_request: Any
) -> str | None:
    """Print an answer as it comes. None if there is none."""
    answer, completion = "", None
    try:
        processor = llm.engine.input_processor
        prompt = processor.render_chat(messages, add_generation_prompt=True)
        stream: Any = llm.stream([prompt], params, lora_request=lora_request)
        with contextlib.closing(stream):  # closed before its end, it aborts the request
            for output in stream:
                completion = output.outputs[0]
                answer += completion.text
                write(completion.text)
    except ValueError as error:  # refused at the door
        note(f"[{error}]")
        return None
    except KeyboardInterrupt:  # the answer stops, and the conversation goes on
        if not is_interactive():
            raise
    write("\n")
    if completion is not None and completion.finish_reason in ("error", "length"):
        note(f"[{completion.stop_reason or 'cut off'}]")
    return answer or None


def complete(words: list[str]) -> int:
    """Print what comes after each prompt: one alone as it comes, several in their order. Returns 1
    if a request failed."""
    parser = Parser("complete", without=("seed",))
    text = "text to continue; -: all of stdin. Without prompts: each line of stdin"
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help=text)
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each prompt")
    add_sampling_flags(parser)
    args, options = parser.parse(words)
    given, lora_request = read_sampling(parser, args), read_adapter(args, options)
    prompts = [*args.prompts, *([] if args.quick is None else [args.quick])] or list(read_lines())
    prompts = [sys.stdin.read().removesuffix("\n") if each == "-" else each for each in prompts]
    if not prompts:
        parser.error("no prompt: stdin is empty.")
    is_alone = len(prompts) == 1 and given.get("n", 1) == 1 and not args.json
    kind = RequestOutputKind.DELTA if is_alone else RequestOutputKind.FINAL_ONLY
    has_failed = False
    with LLM(**options) as llm:
        params, done = make_params(llm, given, 256), {}
        requests = llm.make_requests(prompts, params, kind, lora_request=lora_request)
        ids = [request.request_id for request in requests]
        for output in llm.run_requests(requests):
            done[output.request_id] = output
            for each in output.outputs:
                has_failed |= each.finish_reason == "error"
            while ids and ids[0] in done:
                output = done.pop(ids[0])
                ids = ids[output.finished :]
                write(describe_output(output, args.json, is_alone))
    write("\n" if is_alone else "")
    return int(has_failed)


def describe_output(output: Any, is_json: bool, is_delta: bool) -> str:
    """What is printed of an output."""
    if not is_json:
        return "".join(each.text + ("" if is_delta else "\n") for each in output.outputs)
    found: dict[str, Any] = {
        "prompt": output.prompt,
        "outputs": [asdict(each) for each in output.outputs],
    }
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = [
            at and {token_id: asdict(x) for token_id, x in at.items()}
            for at in output.prompt_logprobs
        ]
    return json.dumps(found, ensure_ascii=False) + "\n"


def serve(words: list[str]) -> int:
    """Answer until a signal ends it."""
    parser = Parser("serve")
    try:
        from nanoserve.entrypoints.server import launcher
    except ModuleNotFoundError as error:
        message = f'{error.name} is missing: pip install -e ".[server]" installs it.'
        raise ValueError(message) from None
    if words and not words[0].startswith("-"):  # `serve MODEL`, as in vLLM
        words = ["--model", *words]
    launcher.add_server_flags(parser)
    return launcher.serve(*parser.parse(words))


# -- the terminal --


def is_interactive() -> bool:
    """True if a person types and reads: stdin and stdout are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def read_lines() -> Iterator[str]:
    """What is typed, or comes through a pipe, until its end or a word that leaves."""
    if is_interactive():
        with contextlib.suppress(ImportError):  # Windows has none
            import readline  # noqa: F401  (lines can be edited, and arrow keys bring earlier ones)
    while True:
        try:
            line = input("> " if is_interactive() else "")
        except EOFError:
            return
        if line.strip().lower() in LEAVE and is_interactive():
            return
        if line.strip():
            yield line


def write(text: str) -> None:
    """Text of a model to stdout, at once. In a terminal without control characters."""
    sys.stdout.write(text.translate(CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A remark to stderr."""
    print(text, file=sys.stderr, flush=True)
