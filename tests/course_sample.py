"""Which cases of a bank of mistakes does a run try?

All of them take a quarter of an hour or more. So `pytest -m slow` tries a few of each lab, always
the same ones, and NANOSERVE_COURSE=1 tries all.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

WANTS_ALL = bool(os.environ.get("NANOSERVE_COURSE"))
T = TypeVar("T")


def sample(cases: Sequence[T], group: Callable[[T], Hashable], number: int = 2) -> list[T]:
    """So many cases of each group (all, if WANTS_ALL), in their order."""
    groups: dict[Hashable, list[int]] = {}
    for index, case in enumerate(cases):
        groups.setdefault(group(case), []).append(index)
    rng = random.Random(1)
    chosen = {i for each in groups.values() for i in rng.sample(each, min(number, len(each)))}
    return [case for index, case in enumerate(cases) if WANTS_ALL or index in chosen]
