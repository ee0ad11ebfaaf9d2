"""nanoserve doctor: one screen about this machine, and advice for each problem."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanoserve import LLM
from nanoserve.__main__ import main
from nanoserve.kernels import threads as thread_module
from nanoserve.tools import doctor
from nanoserve.tools.doctor import Report

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def own_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """doctor sets this variable in its process; other tests of this process shall not see it."""
    monkeypatch.setenv("NANOSERVE_LOGGING_LEVEL", "WARNING")


def test_the_command(
    make_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`python -m nanoserve doctor --model ...` prints each line, and the self-check passes."""
    folder = make_checkpoint("llama")
    monkeypatch.setattr(sys, "argv", ["nanoserve", "doctor", "--model", str(folder)])
    assert main() == 0
    report = capsys.readouterr().out
    for start in ("python", "torch", "transformers", "device", "threads", "engine", "KV blocks"):
        assert f"\n{start} " in f"\n{report}", start
    assert "attention=torch" in report or "attention=native" in report
    assert f"{folder.name}: " in report
    assert "self-check    passed: ' there was" in report
    assert len(report.splitlines()) < 30, "one screen"


def test_a_model_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, message in ((str(tmp_path), "has no config.json"), ("", "model is an empty string")):
        with pytest.raises(SystemExit):
            doctor.main(["--model", model])
        assert message in capsys.readouterr().err


def test_wrong_tokens_fail_the_self_check(
    demo_llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [right] = demo_llm.generate(doctor.PROMPT, use_tqdm=False)
    wrong = [token_id + 1 for token_id in right.outputs[0].token_ids[:3]]
    assert doctor.largest_gap(right.prompt_token_ids, wrong) > 1
    report = Report()
    monkeypatch.setattr(doctor, "largest_gap", lambda prompt, output: 2.5)
    doctor.self_check(report, demo_llm)
    monkeypatch.setattr(doctor, "examine", lambda model: report)
    assert doctor.main([]) == 1
    printed = capsys.readouterr().out
    assert "FAILED" in printed
    assert "2.50 standard deviations below" in printed


@pytest.mark.parametrize(
    ("threads", "cores", "user_set", "advice"),
    [
        (2, 2, False, None),
        (4, 2, True, "Set OMP_NUM_THREADS=2"),
        (4, 2, False, None),  # the engine uses two
        (1, 8, True, "most cores are idle: set OMP_NUM_THREADS=8"),
        (4, 8, True, None),
    ],
)
def test_threads_that_do_not_fit_the_cores(
    threads: int, cores: int, user_set: bool, advice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if user_set:
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for module in (doctor, thread_module):
        monkeypatch.setattr(module, "num_cores", lambda: cores)
    monkeypatch.setattr(doctor, "compare_threads", lambda report, num_threads: None)
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (cores - 0.5, 0, 0))
    report = Report()
    doctor.check_threads(report)
    assert (advice in " ".join(report.advice)) if advice else not report.advice


def test_is_it_the_load(demo_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other programs on all cores are named; and the threads are those of the demo model."""
    monkeypatch.setattr(doctor, "num_cores", lambda: 2)
    monkeypatch.setattr(doctor, "compare_threads", lambda report, num_threads: None)
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (4.0, 0, 0), raising=False)
    report = Report()
    doctor.check_threads(report)
    assert "other programs use the cores (load 4.0 on 2 cores)" in report.advice[0]
    threads = demo_llm.engine.executor.num_threads
    torch_has = f"{threads} for the demo model (torch has {torch.get_num_threads()}), "
    assert report.lines[0][1].startswith(torch_has)


@pytest.mark.parametrize(
    ("chosen", "sleeping", "spinning", "advice"),
    [
        ("passive", 0.024, 0.012, "OMP_WAIT_POLICY=active makes models"),
        ("passive", 0.024, 0.020, None),
        ("passive", 0.024, 0.900, None),
        ("active", 0.024, 0.900, "other programs use the cores: unset OMP_WAIT_POLICY"),
        ("active", 0.024, 0.012, None),
    ],
)
def test_waiting_threads_are_measured(
    chosen: str,
    sleeping: float,
    spinning: float,
    advice: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The faster way is advised where it is clearly the faster one."""
    monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    monkeypatch.setattr(thread_module, "TOLD_TO", [])
    times = {"passive": (0.01, sleeping), "active": (0.01, spinning)}
    monkeypatch.setattr(doctor, "time_tokens", lambda num_threads, policy: times[policy])
    report = Report()
    doctor.compare_threads(report, 2)
    assert f"10 ms on 1 thread; on 2 threads {1000 * sleeping:.0f} ms if waiting" in str(report)
    assert f"{1000 * spinning:.0f} ms if they spin" in str(report)
    assert (advice in " ".join(report.advice)) if advice else not report.advice


def test_nobody_is_told_to_spin_beside_other_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    times = {"passive": (0.01, 0.024), "active": (0.01, 0.012)}
    monkeypatch.setattr(doctor, "time_tokens", lambda num_threads, policy: times[policy])
    report = Report(advice=["other programs use the cores"])
    doctor.compare_threads(report, 2)
    assert len(report.advice) == 1


def test_ten_tokens_are_timed() -> None:
    """In a process of its own, whatever this one has set."""
    assert all(seconds > 0 for seconds in doctor.time_tokens(2, "passive"))


def test_help_needs_no_torch() -> None:
    code = """
import sys
from nanoserve.tools import doctor
try:
    doctor.main(["--help"])
finally:
    print("torch" in sys.modules, "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "False False"
    assert "--model" in done.stdout


def test_versions_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=99", "triton>=99; platform_system == 'Nowhere'", "no-such-package>=1"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda package: wanted)
    report = Report()
    doctor.check_versions(report)
    assert report.advice == ["pip install 'torch>=99'"], "no triton on this system"


def test_room_beside_the_weights(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 layers, 2 key heads of 16, float32: a block of 16 tokens takes 8 KiB."""
    config = doctor.read_config(str(make_checkpoint("llama", tie_word_embeddings=True)))
    weights = sum(p.numel() * 4 for p in _parameters(config.path))
    device = torch.device("cpu")
    monkeypatch.setattr("nanoserve.memory.available_memory", lambda: weights + 4 * 100 * 8192)
    report = Report()
    doctor.check_room(report, config, device)
    assert "100 of 16 tokens, 1 sequences of 1024 tokens" in str(report)
    assert report.advice == []
    monkeypatch.setattr("nanoserve.memory.available_memory", lambda: weights + 4 * 10 * 8192)
    report = Report()
    doctor.check_room(report, config, device)
    assert "max_model_len=160 would" in str(report)
    monkeypatch.setattr("nanoserve.memory.available_memory", lambda: weights // 2)
    report = Report()
    doctor.check_room(report, config, device)
    assert "does not fit" in str(report)


def _parameters(folder: Path) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return list(AutoModelForCausalLM.from_pretrained(folder).parameters())


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt2"])
def test_room_beside_any_model(model_type: str, make_checkpoint: Callable[..., Path]) -> None:
    """A model that runs through transformers has no size before it is loaded."""
    report = Report()
    model_config = doctor.read_config(str(make_checkpoint(model_type)))
    doctor.check_room(report, model_config, torch.device("cpu"))
    [(_, line)] = report.lines
    assert ("runs through transformers" if model_type == "gpt2" else "of weights") in line
