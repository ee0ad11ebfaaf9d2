"""The first command a reader runs; and the first import, from whatever folder."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import example

ROOT = Path(__file__).parent.parent


def run_example(*arguments: str) -> str:
    """The standard output of `python example.py ...`."""
    command = [sys.executable, str(ROOT / "example.py"), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_demo_model_speaks() -> None:
    """A story that is continued, and right answers, with an engine option as a flag."""
    output = run_example("--max-tokens", "30", "--max-num-seqs", "3")
    assert output.startswith("Once upon a time"), "`| head -1` shows the story"
    story = next(line for line in output.splitlines() if line.startswith("Once upon a time"))
    assert len(story) > 60
    assert "What is 17 + 25?" in output
    assert "42" in output.split("What is 17 + 25?")[1].split("Q:")[0]
    assert "step 1: 2 KV blocks in use" in output and "step 6: 0 KV blocks" in output
    assert "Paris" in output.split("What is the capital of France?")[1].split("Q:")[0]


def test_help_lists_the_options() -> None:
    output = run_example("--help")
    for option in ("--temperature", "--max-tokens", "--model", "--tensor-parallel-size"):
        assert option in output


# -- sentences instead of tracebacks --


def fail(capsys: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """Run the example's run(), which must exit; its status, and what it says."""
    with pytest.raises(SystemExit) as exit_:
        example.run()
    said = capsys.readouterr().err
    if isinstance(exit_.value.code, str):  # Python prints it and exits with 1
        return 1, exit_.value.code
    return exit_.value.code, said.strip()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "./no-such-folder"], "'./no-such-folder' is not a folder"),
        (["--model", "nobody/no-such-model"], "did not deliver"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0; allowed: 1 or more"),
        (["--temperature", "-1"], "temperature is -1.0; allowed: 0"),
    ],
)
def test_what_a_user_can_cause_is_a_sentence(
    arguments: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A model that is not there (no test has a network), a value that is not allowed."""
    monkeypatch.setattr(sys, "argv", ["example.py", *arguments])
    status, said = fail(capsys)
    assert status == 1
    assert said.startswith("example.py: ")
    assert sentence in said
    monkeypatch.setenv("NANOSERVE_LOGGING_LEVEL", "DEBUG")
    logger = logging.getLogger("nanoserve")
    before = logger.level
    with pytest.raises(ValueError, match=arguments[1]):  # with its traceback
        example.run()
    logger.setLevel(before)


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (KeyboardInterrupt(), 130, "example.py: interrupted"),
        (
            ModuleNotFoundError("No module named 'torch'"),
            1,
            "'torch'. Install what is missing: pip",
        ),
        (OSError("No space left on device"), 1, "example.py: No space left on device"),
    ],
)
def test_what_happens_to_a_user_is_a_sentence(
    error: BaseException,
    status: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> None:
        raise error

    monkeypatch.setattr(example, "main", main)
    found, said = fail(capsys)
    assert found == status
    assert sentence in said


def test_an_old_python_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 18))
    assert "needs Python 3.10 or newer" in fail(capsys)[1]


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence would hide where it is."""
    monkeypatch.setattr(example, "main", lambda: [].pop())
    with pytest.raises(IndexError):
        example.run()


def test_nobody_reads_on() -> None:
    """`python example.py | head -1` ends without a word about it."""
    command = [sys.executable, str(ROOT / "example.py"), "--max-tokens", "1"]
    environment = {**os.environ, "NANOSERVE_LOGGING_LEVEL": "WARNING"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        said = process.stderr.read().decode()
    assert process.returncode == 1
    assert "BrokenPipe" not in said and "Traceback" not in said


# -- the first import --


def editable_folder() -> Path | None:
    """The folder that `pip install -e` has installed; None without such an installation."""
    try:
        text = metadata.distribution("nanoserve").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    origin = json.loads(text or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(origin["url"].removeprefix("file://"))


def test_import_beside_the_clone(tmp_path: Path) -> None:
    """A script or notebook beside the clone's folder, which has the package's name and is no
    package: the import finds the package inside it. (setup.cfg's package_dir makes it so.)"""
    if editable_folder() is None:
        pytest.skip("needs an editable install: pip install -e .")
    (tmp_path / "nanoserve").mkdir()  # the clone, as Python sees it from its parent folder
    code = "from nanoserve import LLM; print(LLM.__module__)"
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "nanoserve.llm", done.stderr
