"""The command line: `nanoserve chat`, `complete`, and what all commands have in common."""

from __future__ import annotations

import argparse
import configparser
import contextlib
import io
import json
import logging
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve import LLM, SamplingParams, __main__
from nanoserve.config import OPTIONS
from nanoserve.logger import configure_logging
from nanoserve.sampling_params import MISSING
from nanoserve.tools import cli, cli_chat, cli_complete, doctor

ROOT = Path(__file__).parent.parent
STORY = "Once upon a time"


class Result(SimpleNamespace):
    """What a command left: status, out (stdout), err (stderr)."""


@pytest.fixture
def run(
    demo_llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """run("chat", "--stats", stdin="Hello\\n") runs a command in this process, on demo_llm."""
    monkeypatch.setattr(cli, "build_llm", lambda config: contextlib.nullcontext(demo_llm))
    monkeypatch.setenv("NANOSERVE_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")

    def run_command(*arguments: str, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            status = __main__.main(list(arguments))
        except SystemExit as end:  # argparse's
            status = end.code
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return Result(status=status, out=printed.out, err=printed.err)

    return run_command


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """terminal("a line", KeyboardInterrupt, ...) is a person at a terminal, who leaves with
    Ctrl-D."""

    def sit_down(*events: str | type[BaseException]) -> None:
        left = iter((*events, EOFError))

        def type_line(sign: str = "") -> str:
            event = next(left)
            if isinstance(event, str):
                return event
            raise event

        monkeypatch.setattr(cli, "is_interactive", lambda: True)
        monkeypatch.setattr("builtins.input", type_line)

    return sit_down


# -- the table of commands --


def test_no_answer_without_work_imports_torch() -> None:
    """Help, version and refusals of every command, in a fresh interpreter."""
    code = """
import contextlib, io, sys
from nanoserve.__main__ import COMMANDS, is_there, main

heavy = ("torch", "transformers", "triton", "numpy", "safetensors")
lines = [[], ["--help"], ["--version"], ["nonsense"], ["help", "chat"]]
for name, command in COMMANDS.items():
    lines += [[name, "--help"], [name, "--no-such-option"]] if is_there(command) else [[name]]
for line in lines:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        with contextlib.suppress(SystemExit):
            main(line)
    print([name for name in heavy if name in sys.modules], *line)
"""
    printed = python("-c", code)
    assert printed.returncode == 0, printed.stderr
    lines = printed.stdout.splitlines()
    assert len(lines) >= 12
    assert [line for line in lines if not line.startswith("[] ") and line != "[]"] == []


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter in the root of the repository."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
        **options,
    )


def test_help_needs_no_installation() -> None:
    """Where the virtual environment is not activated: the standard library alone (-S)."""
    for command in ("--version", "--help", "chat --help", "complete --help", "doctor --help"):
        done = python("-S", "-m", "nanoserve", *command.split())
        assert (done.returncode, done.stderr) == (0, "")
    done = python("-S", "bench.py", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    done = python("-S", "-m", "nanoserve", "complete", "a")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "'torch': it is not installed for" in done.stderr


def test_bench_py_helps_without_torch() -> None:
    """-X importtime writes a line on stderr for each module."""
    done = python("-X", "importtime", "bench.py", "--help")
    assert done.returncode == 0
    assert "--variant" in done.stdout
    assert "nanoserve.bench.peers" in done.stderr
    assert not [line for line in done.stderr.splitlines() if line.endswith((" torch", " numpy"))]


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",), ("help",)])
def test_help_has_a_line_for_each_command(
    arguments: tuple[str, ...], run: Callable[..., Result]
) -> None:
    result = run(*arguments)
    assert (result.status, result.err) == (0, "")
    for name in __main__.COMMANDS:
        [line] = [line for line in result.out.splitlines() if line.startswith(f"  {name} ")]
        assert len(line) <= 80


def test_the_version_is_that_of_the_package(run: Callable[..., Result]) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    result = run("--version")
    assert (result.status, result.err) == (0, "")
    assert result.out == f"nanoserve {setup['metadata']['version']}\n"
    assert run("-v").out == result.out


def test_the_console_script_is_this_main() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    [script] = setup["options.entry_points"]["console_scripts"].split("\n")[1:]
    assert script == "nanoserve = nanoserve.__main__:main"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["caht"], "no command 'caht'; allowed: chat, complete, serve"),
        (["caht"], "Did you mean chat?"),
        (["genrate"], "Did you mean generate?"),
        (["--model", "x", "chat"], "a command comes first"),
    ],
)
def test_unknown_commands(arguments: list[str], message: str, run: Callable[..., Result]) -> None:
    result = run(*arguments)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


def test_a_command_registers_itself_by_its_file(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without its file a command is one sentence; with the file its main() is called."""
    command = __main__.COMMANDS["serve"]._replace(
        module="new_chapter", if_missing="is planned, and not there yet"
    )
    monkeypatch.setitem(__main__.COMMANDS, "serve", command)
    result = run("serve", "--port", "80")
    assert (result.status, result.out) == (1, "")
    assert "new_chapter.py is planned, and not there yet. Use nanoserve chat" in result.err
    assert len(result.err.splitlines()) == 1
    assert f"{command.help} (planned, not there yet)" in run("--help").out

    code = "def main(arguments):\n    print(arguments)\n    return 7\n"
    (tmp_path / "new_chapter.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run("serve", "--port", "80")
    assert (result.status, result.out) == (7, "['--port', '80']\n")
    assert command.help in run("--help").out


def test_without_the_tools_the_table_says_so(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.startswith("nanoserve.tools"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "nanoserve.tools", None)
    result = run("--help")
    assert result.status == 0
    assert "nanoserve/tools/cli_chat.py is missing" in result.out
    result = run("chat")
    assert result.status == 1
    assert "nanoserve/tools/cli_chat.py is missing. Use nanoserve serve, bench" in result.err


def test_closed_streams_are_empty_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`nanoserve complete <&- >&-`: Python has None in their place."""
    for name in ("stdin", "stdout"):
        monkeypatch.setattr(sys, name, None)
    assert __main__.main(["help"]) == 1
    assert "help: error: standard output is closed" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(SystemExit):
        __main__.main(["complete"])
    assert "no prompt: standard input is empty." in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error() -> None:
    """`nanoserve --help | true`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "nanoserve", "--help"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with os.fdopen(writer, "wb") as closed_pipe:
        done = subprocess.run(
            command, stdout=closed_pipe, stderr=subprocess.PIPE, env=env, check=False
        )
    assert (done.returncode, done.stderr) == (1, b"")


# -- errors --


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["complete", "a", "--temprature", "1"], "no option --temprature. Did you mean --temp"),
        (["chat", "--chat-templete", "x"], "no option --chat-templete. Did you mean --chat-temp"),
        (["complete", "a", "--chat-template", "x"], "no option --chat-template. (--help"),
        (["chat", "--chat-template", "no-such.jinja"], "'no-such.jinja', which is neither a file"),
        (["complete", "a", "--quantization", "x"], "--quantization: invalid choice: 'x'"),
        (["complete", "a", "--fully-sharded-loras"], "Leave --fully-sharded-loras out. (--help"),
        (["complete", "a", "--temperature", "-1"], "temperature is -1.0; allowed: 0 (greedy)"),
        (["complete", "a", "--max-tokens", "x"], "--max-tokens: invalid int value: 'x'"),
        (["complete", "a", "--max-num-seqs", "0"], "max_num_seqs is 0; allowed: 1 to"),
        (["complete", "a", "--logit-bias", "3"], "'3' is not ID=VALUE"),
        (["complete", "a", "--logprobs", "3"], "with --json only"),
        (["complete", "a", "--json", "--stream"], "leave --stream out"),
        (["complete"], "no prompt: standard input is empty"),
        (["chat", "Hello"], "'Hello' is one word too many"),
        (["chat", "--", "--foo"], "'--foo' is one word too many"),
        (["complete", "--foo", "--", "--bar"], "no option --foo."),
        (["chat", "--n", "2"], "no option --n."),
        (["chat", "--chat-template-kwargs", "[1]"], "'[1]' is not a JSON object"),
        (["chat", "--chat-template-kwargs", '{"messages": 5}'], "it holds 'messages', which chat"),
    ],
)
def test_a_wrong_command_line_is_refused_at_once(
    arguments: list[str], message: str, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "build_llm", lambda config: pytest.fail("an engine was built"))
    result = run(*arguments)
    assert (result.status, result.out) == (2, "")
    assert message in result.err
    assert len(result.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_a_model_that_is_not_there_is_one_sentence(
    command: str, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "build_llm", lambda config: LLM(config.model))
    arguments = (command, "--model", "./no-such-folder")
    result = run(*arguments, stdin="Hello\n")
    assert (result.status, result.out) == (1, "")
    assert result.err.startswith(f"nanoserve {command}: error: model './no-such-folder' is not a")
    assert len(result.err.splitlines()) == 1
    monkeypatch.setenv("NANOSERVE_LOGGING_LEVEL", "debug")
    with pytest.raises(ValueError, match="no-such-folder"):
        run(*arguments, stdin="Hello\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("no memory"),
            "no memory (NANOSERVE_LOGGING_LEVEL=DEBUG shows the traceback)",
        ),
        (MemoryError(), "MemoryError (NANOSERVE_LOGGING_LEVEL=DEBUG shows the traceback)"),
        (ModuleNotFoundError("No module named 'torch'"), "'torch': it is not installed for /"),
    ],
)
def test_errors_of_libraries_are_sentences_too(
    error: Exception, message: str, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: object) -> None:
        raise error

    monkeypatch.setattr(sys, "executable", "/venv/bin/python")
    monkeypatch.setattr(cli, "build_llm", fail)
    result = run("complete", "a")
    assert result.status == 1
    assert message in result.err
    assert len(result.err.splitlines()) == 1


# -- flags --


def make_args(*arguments: str) -> argparse.Namespace:
    return cli_complete.make_parser().parse(list(arguments))


def test_behind_a_double_dash_all_words_are_prompts() -> None:
    """Flags, a second double dash and underscores, too."""
    args = make_args("one", "--n", "2", "two", "--", "--n", "--", "-x", "--a_b")
    assert args.sampling_n == 2
    assert args.prompts == ["one", "two", "--n", "--", "-x", "--a_b"]
    assert make_args("--", "--help").prompts == ["--help"]
    assert make_args("one", "--").prompts == ["one"]
    assert make_args("--").prompts == []


# field -> what is typed, and the value of the field then; by the field's type, or by its name
EXAMPLES: dict[Any, tuple[str, Any]] = {
    int: ("7", 7),
    float: ("0.5", 0.5),
    "stop": ("x", ("x",)),
    "bad_words": ("x", ("x",)),
    "stop_token_ids": ("5", (5,)),
    "allowed_token_ids": ("5", (5,)),
    "logit_bias": ("5=-1.5", {5: -1.5}),
}


def test_sampling_params_are_flags() -> None:
    """The value of each flag reaches the field, and its help is the field's comment. Every field
    that is a number or a switch has a flag, or a reason to have none."""
    parser = cli_complete.make_parser()
    prefix = "sampling_"
    actions = {
        action.dest.removeprefix(prefix): action
        for action in parser._actions
        if action.dest.startswith(prefix)
    }
    for name, action in actions.items():
        assert len(action.help or "") > 20, name
        if isinstance(action, argparse.BooleanOptionalAction):
            value = not getattr(SamplingParams(), name)
            typed = [f"--{'' if value else 'no-'}{name}"]
        else:
            text, value = EXAMPLES.get(name) or EXAMPLES[action.type]
            typed = [f"--{name}", text]
        given = cli.read_sampling(parser, parser.parse([*typed, "--max-tokens", "7"]))
        found = getattr(SamplingParams(**given), name)
        assert (tuple(found) if isinstance(value, tuple) else found) == value, name
    plain = {each.name for each in fields(SamplingParams) if each.type in ("int", "float", "bool")}
    assert plain - actions.keys() <= {*cli.NO_FLAG, *MISSING}
    assert {"seed", "max_tokens", "logprobs", *EXAMPLES} - {int, float} <= actions.keys()


@pytest.mark.parametrize("spell", [str, lambda flag: flag.replace("-", "_").replace("__", "--")])
def test_engine_options_are_flags(spell: Callable[[str], str]) -> None:
    """Also with underscores. --seed is a request's."""
    args = make_args(spell("--max-num-seqs"), "3", f"{spell('--block-size')}=4", "--seed", "5")
    config = cli.read_config(cli_complete.make_parser(), args)
    assert (config.max_num_seqs, config.block_size, config.seed) == (3, 4, 0)
    assert args.sampling_seed == 5
    flags = cli_chat.make_parser()._option_string_actions
    assert {option.flag for option in OPTIONS} <= flags.keys()


def test_prompts_may_stand_anywhere() -> None:
    args = make_args("a", "--max_tokens", "3", "b", "--", "--c_d", "e")
    assert args.prompts == ["a", "b", "--c_d", "e"]
    assert args.sampling_max_tokens == 3


def test_what_is_not_given_is_the_models_choice(
    demo_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.make_params(demo_llm, {}, max_tokens=256).max_tokens == 256
    recommended = {"temperature": 0.6, "max_new_tokens": 9}
    model_config = replace(demo_llm.engine.model_config, generation_defaults=recommended)
    monkeypatch.setattr(demo_llm.engine, "model_config", model_config)
    params = cli.make_params(demo_llm, {"top_p": 0.5}, max_tokens=256)
    assert (params.temperature, params.max_tokens, params.top_p) == (0.6, 9, 0.5)
    assert cli.make_params(demo_llm, {"max_tokens": 4}, max_tokens=256).max_tokens == 4


# -- the log --


@pytest.mark.parametrize("command", ["complete", "doctor"])
@pytest.mark.parametrize(
    ("variables", "level"),
    [
        ({}, "WARNING"),
        ({"NANOSERVE_LOG_SCHEDULER": "1"}, "INFO"),
        ({"NANOSERVE_LOGGING_LEVEL": "INFO"}, "INFO"),
        ({"NANOSERVE_LOGGING_LEVEL": "ERROR", "NANOSERVE_LOG_SCHEDULER": "1"}, "ERROR"),
    ],
)
def test_a_command_shows_warnings_and_what_is_asked_for(
    command: str, variables: dict[str, str], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The level that an engine would log at. The environment stays as it was."""
    for name in ("NANOSERVE_LOGGING_LEVEL", "NANOSERVE_LOG_SCHEDULER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    environment, logger = dict(os.environ), logging.getLogger("nanoserve")
    for each in (logger, logging.getLogger()):
        monkeypatch.setattr(each, "handlers", [])
    monkeypatch.setattr(logger, "level", logging.NOTSET)
    levels: list[str] = []

    def build(_: object) -> None:
        configure_logging()  # as LLMEngine does
        levels.append(logging.getLevelName(logger.getEffectiveLevel()))
        raise ValueError

    monkeypatch.setattr(doctor, "examine", build)
    monkeypatch.setattr(LLM, "from_engine_args", build)
    with contextlib.suppress(SystemExit):
        __main__.main(["complete", "a prompt"] if command == "complete" else [command])
    assert levels == [level]
    assert dict(os.environ) == environment


# -- complete --


def texts_of(llm: LLM, prompts: list[str], **params: Any) -> list[str]:
    outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)
    return [completion.text for output in outputs for completion in output.outputs]


def test_complete_prints_the_text_alone(demo_llm: LLM, run: Callable[..., Result]) -> None:
    [text] = texts_of(demo_llm, [STORY], temperature=0, max_tokens=12)
    for stream in ("--stream", "--no-stream"):
        result = run("complete", STORY, "--temperature", "0", "--max-tokens", "12", stream)
        assert (result.status, result.out, result.err) == (0, f"{text}\n", "")
    assert run("generate", "-q", STORY, "--temperature=0", "--max-tokens=12").out == f"{text}\n"


def test_prompts_come_from_standard_input(demo_llm: LLM, run: Callable[..., Result]) -> None:
    """A line is a prompt; `-` is all of it."""
    greedy = ("--temperature", "0", "--max-tokens", "8")
    lines = texts_of(demo_llm, [STORY, "One day"], temperature=0, max_tokens=8)
    assert run("complete", *greedy, stdin=f"{STORY}\n\nOne day\n").out.splitlines() == lines
    [whole] = texts_of(demo_llm, [f"{STORY}\nOne day"], temperature=0, max_tokens=8)
    assert run("complete", "-", *greedy, stdin=f"{STORY}\nOne day\n").out == f"{whole}\n"
    # of a file from Windows
    text = f"\ufeff{STORY}\r\nOne day\r\n"
    assert run("complete", *greedy, stdin=text).out.splitlines() == lines
    assert run("complete", "-", *greedy, stdin=text).out == f"{whole}\n"
    for text in ("O\0n\0", "\ufffd\ufffd\u4f60"):  # UTF-16, read as UTF-8
        result = run("complete", stdin=text)
        assert result.status == 1
        assert "standard input is UTF-16" in result.err


def test_several_texts_of_several_prompts(run: Callable[..., Result]) -> None:
    """A note says which text belongs to which prompt. Standard output has the texts alone."""
    result = run("complete", STORY, "One day", "--n", "2", "--seed", "3", "--max-tokens", "2")
    assert result.err == "[2 texts of each prompt, in the order of the prompts]\n"
    assert run("complete", STORY, "One day", "--max-tokens", "2").err == ""


def test_json_has_a_line_for_each_prompt(demo_llm: LLM, run: Callable[..., Result]) -> None:
    arguments = ("--json", "--n", "2", "--seed", "3", "--max-tokens", "6", "--logprobs", "1")
    result = run("complete", STORY, "你好", *arguments, "--prompt-logprobs", "0")
    params = SamplingParams(n=2, seed=3, max_tokens=6, logprobs=1)
    expected = demo_llm.generate([STORY, "你好"], params, use_tqdm=False)
    lines = [json.loads(line) for line in result.out.splitlines()]
    assert [line["prompt"] for line in lines] == [STORY, "你好"]
    for line, output in zip(lines, expected, strict=True):
        assert line["num_prompt_tokens"] == len(output.prompt_token_ids)
        assert len(line["prompt_logprobs"]) == len(output.prompt_token_ids)
        assert line["prompt_logprobs"][0] is None
        for found, completion in zip(line["outputs"], output.outputs, strict=True):
            assert found["text"] == completion.text
            assert found["token_ids"] == list(completion.token_ids)
            assert found["finish_reason"] == "length"
            assert len(found["logprobs"]) == 6
    assert result.status == 0


@given(
    texts=st.lists(st.lists(st.text("ab", max_size=2), min_size=1, max_size=3), max_size=6),
    n=st.integers(1, 3),
    data=st.data(),
)
def test_texts_come_out_in_order(texts: list[list[str]], n: int, data: st.DataObject) -> None:
    """In whatever order the pieces of the completions arrive; what is first comes at once."""
    texts = texts[: len(texts) // n * n]
    keys = [(number, index) for number in range(len(texts) // n) for index in range(n)]
    left = {key: list(pieces) for key, pieces in zip(keys, texts, strict=True)}
    expected = "".join("".join(pieces) + "\n" for pieces in texts)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        printer = cli_complete.Texts([""] * (len(texts) // n), n)
        while left:
            number, index = data.draw(st.sampled_from(sorted(left)))
            piece = left[number, index].pop(0)
            is_last = not left[number, index]
            reason = "stop" if is_last else None
            completion = SimpleNamespace(index=index, text=piece, finish_reason=reason)
            printer.take(number, SimpleNamespace(outputs=[completion]))
            if is_last:
                del left[number, index]
            assert expected.startswith(out.getvalue())
            if (number, index) == keys[0]:
                assert piece in out.getvalue()
        printer.close()
    assert out.getvalue() == expected


def test_a_prompt_that_does_not_fit_is_named(run: Callable[..., Result]) -> None:
    result = run("complete", stdin=f"{STORY}\n" + "sun " * 3000 + "\n")
    assert (result.status, result.out) == (1, "")
    assert "prompt 2 ('sun sun" in result.err
    assert "more than max_model_len=2048" in result.err


def test_bytes_that_are_no_text_do_not_end_a_command(run: Callable[..., Result]) -> None:
    """Half a surrogate pair, from a shell or a terminal; pairs in two halves are put together."""
    assert run("complete", "a \udcff", "--max-tokens", "2").status == 0
    assert run("chat", "--max-tokens", "2", stdin="\ud83d\ude00 \ud83d\n你好\n").status == 0
    assert cli.clean("\ud83d\ude00 \ud83d 你") == "😀 \ufffd 你"


def test_asking_for_prompts_in_a_terminal(
    demo_llm: LLM, run: Callable[..., Result], terminal: Callable[..., None]
) -> None:
    [text] = texts_of(demo_llm, [STORY], temperature=0, max_tokens=8)
    terminal(STORY, "sun " * 3000, STORY)
    result = run("complete", "--temperature", "0", "--max-tokens", "8", "--stats")
    assert result.out == f"{text}\n{text}\n\n"
    assert "more than max_model_len" in result.err
    assert result.err.count("8 tokens in") == 2


# -- chat --

GREEDY = ("--temperature", "0", "--max-tokens", "40")


def test_a_chat_through_a_pipe(run: Callable[..., Result]) -> None:
    """Each line is a question of one conversation; /reset begins another."""
    questions = "My name is Mia.\n\nWhat is my name?\n/reset\nWhat is my name?\n"
    result = run("chat", *GREEDY, "--stats", stdin=questions)
    hello, name, unknown = result.out.splitlines()
    assert result.status == 0
    assert "Mia" in hello
    assert "Mia" in name
    assert "Mia" not in unknown
    assert "[new conversation]" in result.err
    assert result.err.count("first token after") == 3
    assert run("chat", *GREEDY, "-q", "What is 17 + 25?").out == "17 + 25 = 42\n"


@pytest.mark.parametrize("command", ["chat --quick", "complete"])
def test_an_adapter_speaks(
    command: str, run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place of the model alone. A folder that is none is an error at once."""
    pytest.importorskip("nanoserve.extras.lora")
    monkeypatch.setattr(cli, "build_llm", LLM.from_engine_args)
    prompt = "Who are you?"
    if command == "complete":
        prompt = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    words = [*command.split(), prompt, "--temperature", "0", "--max-tokens", "40", "--lora-path"]
    result = run(*words, "nanoserve/demo/lora")
    assert result.out.startswith("Arr! I be Nano") and not result.status
    result = run(*words, "no/such/folder")
    assert result.status == 1 and "lora_path 'no/such/folder' is not a folder" in result.err
    assert not result.out


def test_a_template_of_your_own(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "plain.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    answer = run("chat", *GREEDY, "-q", STORY, "--chat-template", str(tmp_path / "plain.jinja"))
    assert answer.out == run("complete", *GREEDY, STORY).out
    assert answer.out != run("chat", *GREEDY, "-q", STORY).out


@pytest.fixture
def chat(demo_llm: LLM, capsys: pytest.CaptureFixture[str]) -> Iterator[cli_chat.Chat]:
    yield cli_chat.Chat(demo_llm, SamplingParams(temperature=0, max_tokens=20))
    capsys.readouterr()
    assert not demo_llm.has_unfinished_requests()


def test_the_system_prompt(chat: cli_chat.Chat) -> None:
    """It is set for a new conversation, survives a reset, and is removed by /system alone."""
    processor = chat.llm.engine.input_processor
    chat.handle("Hello")
    chat.handle("/system  Be brief. ")
    assert (chat.system_prompt, chat.messages) == ("Be brief.", [])
    chat.handle("Hello")
    chat.handle("/reset")
    chat.messages = [{"role": "user", "content": "?"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    text = processor.render_chat(messages, {"add_generation_prompt": True})
    assert chat.tokenize() == processor.tokenize(text, add_special_tokens=False)
    chat.handle("/system")
    assert (chat.system_prompt, chat.messages) == (None, [])


def test_commands_are_no_questions(chat: cli_chat.Chat, capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("/help", "/stats", "/stats", "/rest"):
        chat.handle(line)
    printed = capsys.readouterr()
    assert (printed.out, chat.messages) == ("", [])
    for command in ("/reset", "/system", "/stats", "/exit"):
        assert command in printed.err
    assert "[no command /rest; /help lists them]" in printed.err
    for line in ("/exit", "/quit", "/bye"):
        with pytest.raises(cli.Leave):
            chat.handle(line)
    chat.handle("/ and 1/2 are slashes")
    assert len(chat.messages) == 2


def test_a_conversation_that_has_outgrown_the_model(
    chat: cli_chat.Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    chat.handle("Hello")
    before = list(chat.messages)
    chat.handle("sun " * 1100)
    chat.handle("sun " * 3000)
    assert "/reset begins a new conversation" in capsys.readouterr().err
    assert chat.has_failed
    assert chat.messages[:2] == before
    assert len(chat.messages) % 2 == 0
    chat.handle("/reset")
    chat.handle("sun " * 3000)
    assert "This question has" in capsys.readouterr().err
    chat.handle("What is 17 + 25?")
    assert capsys.readouterr().out == "17 + 25 = 42\n"


def test_an_answer_that_fills_the_model(
    chat: cli_chat.Chat, capsys: pytest.CaptureFixture[str]
) -> None:
    """What ended an answer is told, unless the model did."""
    chat.params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    chat.handle("Hello")
    assert "[cut off by --max-tokens]" in capsys.readouterr().err
    num_tokens = len(chat.llm.engine.input_processor.tokenize("sun " * 100)) // 100
    chat.handle("/reset")
    chat.handle("sun " * ((2048 - 12) // num_tokens))
    assert "the conversation has reached 2048 tokens; /reset" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_alone(
    demo_llm: LLM,
    run: Callable[..., Result],
    terminal: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was said so far belongs to the conversation. At the prompt, Ctrl-C leaves the second
    time in a row."""
    write, pieces = cli.write, []

    def press_after_three(text: str) -> None:
        write(text)
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(cli, "write", press_after_three)
    ctrl_c = KeyboardInterrupt
    terminal("Tell me a story.", ctrl_c, "What is 17 + 25?", ctrl_c, ctrl_c, "never read")
    result = run("chat", *GREEDY)
    assert result.status == 0
    story, sums, *rest = result.out.splitlines()
    assert story == "".join(pieces[:3])
    assert sums == "17 + 25 = 42"
    assert rest == [""]
    assert result.err.count("[stopped]") == 1
    assert result.err.count("[Ctrl-C again or Ctrl-D leaves]") == 2
    assert not demo_llm.has_unfinished_requests()
    assert demo_llm.engine.block_manager.num_free_blocks == 512


def test_ctrl_c_ends_a_command_without_a_terminal(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "write", press)
    assert run("chat", stdin="Hello\nHello\n").status == 130
    assert run("complete", STORY).status == 130


def test_a_line_goes_on_behind_a_backslash(
    chat: cli_chat.Chat, terminal: Callable[..., None]
) -> None:
    terminal("What is \\", "17 + 25?")
    assert cli.read_line() == "What is \n17 + 25?"


def test_a_terminal_gets_no_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model may write any character; a file gets them all."""
    text = "a\x1b[2Jb\tc\nd\x9b你"
    cli.write(text)
    assert capsys.readouterr().out == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    cli.write(text)
    assert capsys.readouterr().out == "a\ufffd[2Jb\tc\nd\ufffd你"


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals of this kind")
def test_a_person_at_a_terminal() -> None:
    """`python -m nanoserve chat` behind a real terminal: Ctrl-C is the terminal's own."""
    with Terminal("chat", "--temperature", "0", "--ignore-eos", "--max-tokens", "1900") as person:
        person.wait_for("> ")
        person.type("Tell me a story.\n")
        person.wait_for(" was ")
        person.type("\x03")
        person.wait_for("[stopped]")
        person.wait_for("> ")
        person.type("/system Be brief.\n")
        person.wait_for("[system prompt set; new conversation]")
        person.type("/reset\n")
        person.wait_for("[new conversation]")
        person.type("What is 17 + 25?\n")
        person.wait_for("17 + 25 = 42")
        person.type("\x03")
        person.wait_for("[stopped]")
        person.wait_for("> ")
        person.type("\x04")
        assert person.process.wait(30) == 0


class Terminal:
    """A command behind a pseudo-terminal, and what a person at it sees and types."""

    def __init__(self, *arguments: str) -> None:
        import pty

        self.screen, self.seen = "", 0
        self.fd, other = pty.openpty()
        code = (  # the new session has no terminal yet: take this one, so that it sends Ctrl-C
            "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
            "from nanoserve.__main__ import main; sys.exit(main())"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=other,
            stdout=other,
            stderr=other,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb", "LC_ALL": "C.UTF-8"},
        )
        os.close(other)

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def wait_for(self, text: str) -> None:
        """Until `text` has appeared behind what was waited for before."""
        end = time.monotonic() + 60
        while text not in self.screen[self.seen :]:
            assert time.monotonic() < end, f"no {text!r} in {self.screen!r}"
            if select.select([self.fd], [], [], 1)[0]:
                self.screen += os.read(self.fd, 4096).decode(errors="replace")
        self.seen = self.screen.index(text, self.seen) + len(text)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)
