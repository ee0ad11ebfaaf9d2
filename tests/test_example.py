"""The first command a reader runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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
    story = next(line for line in output.splitlines() if line.startswith("Once upon a time"))
    assert len(story) > 60
    assert "What is 17 + 25?" in output
    assert "42" in output.split("What is 17 + 25?")[1].split("Q:")[0]
    assert "Paris" in output.split("What is the capital of France?")[1].split("Q:")[0]


def test_help_lists_the_options() -> None:
    output = run_example("--help")
    for option in ("--temperature", "--max-tokens", "--model", "--tensor-parallel-size"):
        assert option in output
