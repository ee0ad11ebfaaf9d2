"""Any requests, any troubles, any options: the same tokens, no block lost, everything ends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from workload import HISTORY, Player

History = tuple[Mapping[str, Any], list[Any], list[Any]]


def play(history: History) -> None:
    options, requests, troubles = history
    Player(options).play(requests, troubles)


test_any_history = settings(max_examples=300)(given(HISTORY)(play))
test_many_histories = pytest.mark.slow(settings(max_examples=3000)(given(HISTORY)(play)))
