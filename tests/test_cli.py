"""The command line, and vLLM's names for options."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, fields
from typing import Any

import pytest

from nanoserve import LLM, EngineArgs, LLMEngine
from nanoserve.config import EngineConfig
from nanoserve.entrypoints import cli
from nanoserve.entrypoints.arguments import read_options

STORY = " upon a time there was a kind"
SUM = "17 + 25 = 42"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_gpu_blocks_override=256, enable_lora=True) as llm:
        yield llm


@pytest.fixture
def run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """run("chat --temperature 0", "Hi") -> (status, stdout, stderr), on one engine for all."""
    monkeypatch.setattr(cli, "LLM", lambda **_: nullcontext(llm))
    # A handler of transformers may hold the stream of an earlier test, which is closed.
    monkeypatch.setattr(logging, "raiseExceptions", False)

    def run(words: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        try:
            status = cli.main(words.split())
        except SystemExit as end:  # argparse's
            status = end.code
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return status, printed.out, printed.err

    return run


ALL = " --temperature 0 --max-tokens 7"
TABLE: list[tuple[str, str, int, str]] = [  # words, stdin, status, what stdout or stderr has
    ("", "", 0, "complete prompts"),
    ("--help", "", 0, "serve"),
    ("--version", "", 0, "nanoserve 0."),
    ("caht", "", 2, "chat"),
    ("complete --help", "", 0, "--speculative-config"),
    ("serve --help", "", 0, "--api-key"),
    ("complete", "", 2, "prompt"),
    ("complete Once" + ALL, "", 0, STORY),
    ("generate -q Once" + ALL, "", 0, STORY),
    ("complete" + ALL, "Once\nOnce\n", 0, f"{STORY}\n{STORY}\n"),
    ("complete -" + ALL, "Once\n", 0, STORY),
    ("complete Once --n 2 --seed 1 --max_tokens=3", "", 0, "\n"),
    ("complete Once --max-num-seqs 8 --disable-log-requests" + ALL, "", 0, STORY),
    ("complete Once --lora-path nanoserve/demo/lora" + ALL, "", 0, " upon a time"),
    ("complete Once --max-token 3", "", 2, "--max-tokens"),
    ("complete Once --temperature -1", "", 2, "temperature"),
    ("complete Once --max-num-seqs many", "", 2, "max-num-seqs"),
    ("complete " + "x" * 9000, "", 1, "tokens"),
    ("chat --temperature 0", "What is 17 + 25?\nWhat is 17 + 25?\n", 0, f"{SUM}\n{SUM}\n"),
    ("chat --temperature 0 -q Hello --system-prompt Hi", "", 0, "\n"),
    ("chat", "x" * 9000 + "\nHello\n", 1, "tokens"),
    ("serve --port many", "", 2, "port"),
]


@pytest.mark.parametrize(("words", "stdin", "status", "shown"), TABLE)
def test_commands(words: str, stdin: str, status: int, shown: str, run: Any) -> None:
    got, out, err = run(words, stdin)
    assert (got, shown in (err if status else out)) == (status, True), (out, err)
    assert status == 0 or len(err.strip().splitlines()) == 1


def test_json_has_a_line_for_each_prompt(run: Any) -> None:
    _, out, _ = run("complete --json --logprobs 1 --prompt-logprobs 0" + ALL, "Once\nOne\n")
    first, second = map(json.loads, out.splitlines())
    assert (first["prompt"], first["outputs"][0]["text"]) == ("Once", STORY)
    assert len(second["outputs"][0]["logprobs"]) == 7


def test_ctrl_c_ends_a_command(run: Any, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "write", interrupt)
    for words in ("complete Once", "chat -q Once"):
        status, _, err = run(words)
        assert (status, len(err.strip().splitlines())) == (130, 1)
    assert not llm.has_unfinished_requests()


def test_a_person_at_a_terminal(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["My name is Mia.", "/reset", "What is 17 + 25?", " ", "exit"])
    monkeypatch.setattr(cli, "is_interactive", lambda: True)
    monkeypatch.setattr("builtins.input", lambda sign: next(lines))
    status, out, _ = run("chat --temperature 0")
    assert (status, SUM in out) == (0, True)


# -- vLLM's options --

OPTIONS = {each.name for each in fields(EngineConfig)} | {"runner", "structured_outputs_config"}
READ: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"max_num_seqs": 8, "model": None}, {"max_num_seqs": 8}),
    ({"block_size": None, "enforce_eager": False}, {"enforce_eager": False}),
    ({"num_kv_blocks": 8}, {"num_gpu_blocks_override": 8}),
    ({"runner": "pooling", "convert": "embed"}, {"runner": "pooling"}),
    ({"dtype": "half"}, {"dtype": "float16"}),
    ({"task": "embed", "convert": None}, {"runner": "pooling"}),
    ({"task": "auto"}, {}),
    ({"max_model_len": -1}, {}),
    ({"guided_decoding_backend": "a"}, {"structured_outputs_config": {"backend": "a"}}),
    ({"enable_sleep_mode": False, "cpu_offload_gb": 0, "tokenizer_revision": "main"}, {}),
    ({"disable_log_requests": True, "kernel_config": {"a": 1}}, {}),
]
REFUSED = [
    ({"max_num_seq": 8}, TypeError, "max_num_seqs"),
    ({"nothing_like_it": 8}, TypeError, "nothing_like_it"),
    ({"num_kv_blocks": 8, "num_gpu_blocks_override": 9}, TypeError, "num_kv_blocks"),
    ({"enable_sleep_mode": True}, ValueError, "enable_sleep_mode"),
    ({"data_parallel_size": 2}, ValueError, "data_parallel_size"),
    ({"tokenizer_revision": "v2"}, ValueError, "tokenizer_revision"),
]


@pytest.mark.parametrize(("given", "expected"), READ)
def test_options_of_vllm(given: Any, expected: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "nanoserve"):
        assert read_options(given, OPTIONS) == expected
    assert len(caplog.records) == ("kernel_config" in given)


@pytest.mark.parametrize(("given", "error", "named"), REFUSED)
def test_options_that_are_refused(given: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        read_options(given, OPTIONS)


def test_engine_args_build_an_engine() -> None:
    args = EngineArgs(max_num_seqs=3, trust_remote_code=True)
    assert (args.block_size, args.max_loras) == (16, 1)  # defaults
    engine = LLMEngine.from_engine_args(args)
    assert engine.config.max_num_seqs == 3
    engine.close()
    for llm in (LLM.from_engine_args(args), LLM(**{**asdict(args), "max_num_seqs": 2})):
        assert llm.llm_engine.config.max_num_seqs in (2, 3)
        llm.close()
    with pytest.raises(TypeError, match="max_num_seqs"):
        EngineArgs(max_num_seq=3)
