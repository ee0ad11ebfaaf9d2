"""nanoserve complete: continue texts.

    nanoserve complete "Once upon a time"                     printed token by token
    nanoserve complete "One day" "Once" --n 2 --max-tokens 50 several, computed in one batch
    nanoserve complete < prompts.txt > texts.txt              each line is a prompt
    nanoserve complete - < prompt.txt                         the whole input is one prompt
    nanoserve complete --json < prompts.txt                   each result is a line of JSON

(`nanoserve generate` is the same command.) All prompts run at once, and texts come out in the order
of the prompts. In a terminal each text is printed as it grows: the first one at once, the next one
when the first has ended, with all that it has by then:

    prompt 0    Once upon a time there was a ... The end.
    prompt 1                                 (held back)  | One day a clever fox ... and goes on

Without prompts, in a terminal, the command asks for one after the other.

Left out: completions through a server (vLLM's --url).

vLLM: vllm/entrypoints/cli/openai.py: CompleteCommand (V1).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from nanoserve import LLM, RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.tools import cli

if TYPE_CHECKING:
    from nanoserve.extras.lora import LoRARequest

MAX_TOKENS = 256  # of an output, if neither the command line nor the model says it


class Texts:
    """Prints completions one after the other, each as soon as the one before has ended.

    Invariant: what is on stdout does not depend on the order in which tokens arrive.
    """

    def __init__(self, prompts: list[str], n: int) -> None:
        self.prompts = prompts
        self.order = deque((number, index) for number in range(len(prompts)) for index in range(n))
        self.held: dict[tuple[int, int], str] = {}  # text that waits for its turn
        self.endings: dict[tuple[int, int], str] = {}  # finish reasons of the ended ones
        self.is_open = False  # the completion whose turn it is has begun

    def take(self, number: int, output: RequestOutput) -> None:
        """New text for a prompt."""
        for completion in output.outputs:
            key = number, completion.index
            self.held[key] = self.held.get(key, "") + completion.text
            if completion.finish_reason:
                self.endings[key] = completion.finish_reason
        while self.order and self.order[0] in self.held:
            self._print(self.order[0])
            if self.order[0] not in self.endings:
                return
            self._end(self.order.popleft())

    def close(self) -> None:
        """Nothing more comes."""
        if self.is_open:
            cli.write("\n")
            self.is_open = False

    def _print(self, key: tuple[int, int]) -> None:
        if not self.is_open and sys.stdout.isatty():
            cli.note(self.prompts[key[0]], end="")  # so that a reader sees what is continued
        self.is_open = True
        cli.write(self.held.pop(key))

    def _end(self, key: tuple[int, int]) -> None:
        self.close()
        if sys.stdout.isatty():
            if self.endings[key] == "length":
                cli.note("[cut off by --max-tokens or by the model's length]")
            if self.order:
                cli.note("")


class JsonLines:
    """Prints each request as a line of JSON, in the order of the prompts."""

    def __init__(self, prompts: list[str]) -> None:
        self.prompts = prompts
        self.num_printed = 0
        self.held: dict[int, RequestOutput] = {}

    def take(self, number: int, output: RequestOutput) -> None:
        """The whole result for a prompt."""
        self.held[number] = output
        while self.num_printed in self.held:
            line = as_dict(self.prompts[self.num_printed], self.held.pop(self.num_printed))
            cli.write(json.dumps(line, ensure_ascii=False) + "\n")
            self.num_printed += 1

    def close(self) -> None:
        """Nothing more comes."""


def as_dict(prompt: str, output: RequestOutput) -> dict[str, Any]:
    """What --json prints: the names are RequestOutput's and CompletionOutput's. Logprobs only if
    they were asked for."""
    completions = [
        {name: value for name, value in asdict(completion).items() if value is not None}
        for completion in output.outputs
    ]
    line: dict[str, Any] = {
        "prompt": prompt,
        "outputs": completions,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
    }
    if output.prompt_logprobs is not None:
        line["prompt_logprobs"] = [
            entry and {token_id: asdict(logprob) for token_id, logprob in entry.items()}
            for entry in output.prompt_logprobs
        ]
    return line


def complete(
    llm: LLM,
    prompts: list[str],
    params: SamplingParams,
    printer: Texts | JsonLines,
    show_stats: bool,
    lora_request: LoRARequest | None = None,
) -> bool:
    """Complete all prompts and print the results. False if a request failed.

    Raises ValueError, before any work, if one of the prompts can never be served. However this
    ends, none of the requests stays in the engine.
    """
    from tqdm import tqdm  # here, so that --help needs no installation

    requests = []
    for number, prompt in enumerate(prompts, start=1):
        try:
            request = llm.engine.make_request(
                f"prompt {number}", prompt, params, lora_request=lora_request
            )
            requests.append(request)
        except ValueError as error:
            where = f"prompt {number} ({prompt!r:.40}): " if len(prompts) > 1 else ""
            raise ValueError(f"{where}{error}") from error
    numbers = {request.request_id: number for number, request in enumerate(requests)}
    is_good, stats = True, cli.Stats()
    has_bar = len(prompts) > 1 and sys.stderr.isatty() and not sys.stdout.isatty()
    bar = tqdm(total=len(prompts), unit="req", disable=not has_bar)
    try:
        stream: Any = llm.run_requests(requests)
        with closing(stream) as outputs:
            for output in outputs:
                printer.take(numbers[output.request_id], output)
                stats.count(output)
                for completion in output.outputs:
                    if completion.finish_reason == "error":
                        cli.note(f"[failed: {completion.stop_reason}]")
                        is_good = False
                bar.update(output.finished)
    finally:
        printer.close()
        bar.close()
    if show_stats and len(prompts) > 1:
        cli.note(f"[{len(prompts)} prompts, {stats.describe()}]")
    elif show_stats:
        is_streamed = params.output_kind is RequestOutputKind.DELTA
        cli.note(f"[{stats.describe_one() if is_streamed else stats.describe()}]")
    return is_good


def make_parser() -> cli.Parser:
    parser = cli.Parser(
        "nanoserve complete", "[PROMPT ...] [options]", "Continue texts; print what comes next."
    )
    add = parser.add_argument
    add("prompts", nargs="*", metavar="PROMPT",
        help="text to continue; -: all of standard input. Without prompts: each line of standard "
        "input, or what you type")  # fmt: skip
    add("-q", "--quick", metavar="PROMPT", help="the same as PROMPT")
    add("--stream", action=argparse.BooleanOptionalAction,
        help="print text as it comes (default: in a terminal)")  # fmt: skip
    add("--json", action="store_true", help="print a line of JSON for each prompt")
    add("--stats", action="store_true", help="statistics at the end")
    cli.add_option_args(parser, without=(), max_tokens=MAX_TOKENS)
    return parser


def main(arguments: list[str]) -> int:
    """Complete what was given. Returns 1 if a request failed."""
    parser = make_parser()
    args = parser.parse(arguments)
    lora_request = cli.read_lora(args)
    config, given = cli.read_config(parser, args), cli.read_sampling(parser, args)
    if args.json and args.stream:
        parser.error("--json prints whole results: leave --stream out.")
    if not args.json and (given.keys() & {"logprobs", "prompt_logprobs"}):
        parser.error("logprobs are printed with --json only.")
    prompts = read_prompts(args)
    if not prompts and not cli.is_interactive():
        parser.error("no prompt: standard input is empty.")
    is_streamed = not args.json and (sys.stdout.isatty() if args.stream is None else args.stream)
    kind = RequestOutputKind.DELTA if is_streamed else RequestOutputKind.FINAL_ONLY
    with cli.build_llm(config) as llm:
        params = replace(cli.make_params(llm, given, MAX_TOKENS), output_kind=kind)

        def run(prompts: list[str]) -> bool:
            printer = JsonLines(prompts) if args.json else Texts(prompts, params.n)
            return complete(llm, prompts, params, printer, args.stats, lora_request)

        def answer(line: str) -> None:
            try:
                run([line])
            except KeyboardInterrupt:
                cli.note("[stopped]")
            except ValueError as error:
                cli.note(f"[{error}]")

        if prompts:
            if len(prompts) > 1 and params.n > 1 and not (args.json or sys.stdout.isatty()):
                cli.note(f"[{params.n} texts of each prompt, in the order of the prompts]")
            return int(not run(prompts))
        cli.note("Type a text to continue. Ctrl-D leaves.")
        cli.read_lines(answer)
    return 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts on the command line, else the lines of standard input. [] in a terminal."""
    prompts = [*args.prompts, *([] if args.quick is None else [args.quick])]
    if not prompts and not cli.is_interactive():
        prompts = [line for line in read_input().split("\n") if line.strip()]
    prompts = [read_input().removesuffix("\n") if p == "-" else p for p in prompts]
    return [cli.clean(prompt) for prompt in prompts]


def read_input() -> str:
    """All of standard input, without what Windows puts around its lines. Raises ValueError for
    bytes that are no text in UTF-8."""
    text = sys.stdin.read().removeprefix("\ufeff").replace("\r\n", "\n")
    if "\0" in text or text.startswith("\ufffd\ufffd"):  # the two bytes that UTF-16 begins with
        raise ValueError("standard input is UTF-16, or no text at all. Give it as UTF-8.")
    return text
