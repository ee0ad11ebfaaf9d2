"""python -m nanoserve doctor: one screen that is true, and advice where something is odd."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanoserve import LLM
from nanoserve.tools import doctor
from nanoserve.tools.doctor import Report

ROOT = Path(__file__).parent.parent


def test_the_command_as_a_user_runs_it(make_checkpoint: Callable[..., Path]) -> None:
    """Everything is there, the self-check passes, and a named model's room is told."""
    folder = make_checkpoint("llama")
    run = subprocess.run(
        [sys.executable, "-m", "nanoserve", "doctor", "--model", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    for start in ("python", "torch", "transformers", "device", "threads", "engine", "KV blocks"):
        assert f"\n{start} " in f"\n{run.stdout}", start
    assert "attention=torch" in run.stdout
    assert f"{folder.name}: " in run.stdout
    assert "self-check    passed: ' there was" in run.stdout
    assert len(run.stdout.splitlines()) < 30, "one screen"


def test_without_a_command_it_says_how_to_use_it() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "nanoserve"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert "usage: python -m nanoserve doctor" in run.stderr


def test_a_model_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        doctor.main(["--model", str(tmp_path)])
    assert "has no config.json" in capsys.readouterr().err


def test_wrong_tokens_fail_the_self_check(
    demo_llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report()
    doctor.self_check(report, demo_llm)
    assert report.is_healthy
    assert report.advice == []

    [right] = demo_llm.generate(doctor.PROMPT, use_tqdm=False)
    wrong = [token_id + 1 for token_id in right.outputs[0].token_ids[:3]]
    assert doctor.largest_gap(right.prompt_token_ids, wrong) > 1
    monkeypatch.setattr(doctor, "largest_gap", lambda prompt, output: 2.5)
    doctor.self_check(report, demo_llm)
    assert not report.is_healthy
    assert "FAILED" in str(report)
    assert "2.50 standard deviations below" in str(report)
    monkeypatch.setattr(doctor, "examine", lambda model: report)
    assert doctor.main([]) == 1


@pytest.mark.parametrize(
    ("threads", "cores", "advice"),
    [(2, 2, None), (4, 2, "OMP_NUM_THREADS=2"), (1, 8, "most cores are idle"), (4, 8, None)],
)
def test_threads_that_do_not_fit_the_cores_are_told(
    threads: int, cores: int, advice: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(doctor, "_num_cores", lambda: cores)
    report = Report()
    doctor.check_threads(report)
    assert (advice in " ".join(report.advice)) if advice else not report.advice


def test_versions_out_of_range_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ["torch>=99", "triton>=99; platform_system == 'Nowhere'", "no-such-package>=1"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda package: wanted)
    report = Report()
    doctor.check_versions(report)
    assert report.advice == ["pip install 'torch>=99'"], "triton is not asked for on this system"


def test_room_beside_the_weights(
    make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 layers, 2 key heads of 16, float32: a block of 16 tokens takes 8 KiB."""
    config = doctor.read_config(str(make_checkpoint("llama", tie_word_embeddings=True)))
    weights = sum(p.numel() * 4 for p in _parameters(config.path))
    device = torch.device("cpu")
    monkeypatch.setattr(doctor, "available_memory", lambda: weights + 4 * 100 * 8192)
    report = Report()
    doctor.check_room(report, config, device)
    assert "100 of 16 tokens, 1 sequences of 1024 tokens" in str(report)
    assert report.advice == []
    monkeypatch.setattr(doctor, "available_memory", lambda: weights + 4 * 10 * 8192)
    report = Report()
    doctor.check_room(report, config, device)
    assert "max_model_len=160 would" in str(report)
    monkeypatch.setattr(doctor, "available_memory", lambda: weights // 2)
    report = Report()
    doctor.check_room(report, config, device)
    assert "does not fit" in str(report)


def _parameters(folder: Path) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return list(AutoModelForCausalLM.from_pretrained(folder).parameters())


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt2"])
def test_room_beside_any_model(model_type: str, make_checkpoint: Callable[..., Path]) -> None:
    """Mixtures of experts by their shapes; of what runs through transformers it says so."""
    report = Report()
    model_config = doctor.read_config(str(make_checkpoint(model_type)))
    doctor.check_room(report, model_config, torch.device("cpu"))
    [(_, line)] = report.lines
    assert ("runs through transformers" if model_type == "gpt2" else "of weights") in line
