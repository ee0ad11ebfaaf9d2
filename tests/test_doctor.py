"""nanoserve doctor: one screen about this machine, and whether the demo model runs on it."""

from __future__ import annotations

import pytest
import torch

from nanoserve.tools import doctor


def test_the_self_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways to run the model agree with transformers; a wrong token is an exit status of 1."""
    assert doctor.main([]) == 0
    report = capsys.readouterr().out
    assert torch.__version__ in report
    assert report.count("as transformers would") == 2
    monkeypatch.setattr(doctor, "largest_gap", lambda prompt, output: 1.0)
    assert not doctor.check("plain")
    assert "FAILED" in capsys.readouterr().out
