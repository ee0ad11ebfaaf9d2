"""Any requests, any troubles, any options: the same tokens, no block lost, everything ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from workload import HISTORY, Player


@pytest.fixture(autouse=True)
def _no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of planted failures."""
    monkeypatch.setattr(logging.getLogger("nanoserve"), "disabled", True)


def play(options: Mapping[str, Any], requests: list[Any], troubles: list[Any]) -> None:
    Player(options).play(requests, troubles)


test_any_history = settings(max_examples=300)(given(**HISTORY)(play))
test_many_histories = pytest.mark.slow(settings(max_examples=1500)(given(**HISTORY)(play)))
