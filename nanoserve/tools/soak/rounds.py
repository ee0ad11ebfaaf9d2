"""One round of a part: its random numbers, and what it has found."""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanoserve.exceptions import brief


@dataclass
class Round:
    """What a part gets, and where it leaves what it found.

    Invariant: `rng` depends on part, seed and number alone.
    """

    part: str
    seed: int
    number: int
    num_requests: int = 0
    findings: list[str] = field(default_factory=list)
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed}/{self.part}/{self.number}")

    def expect(self, holds: Any, what: str, *details: Any) -> bool:
        """Note a finding unless `holds`. Returns whether it holds."""
        if not holds:
            shown = [brief(detail) for detail in details]
            self.findings.append(f"{what}: {'; '.join(shown)}" if shown else what)
        return bool(holds)

    def run(self, part: Callable[[Round], None]) -> Round:
        """Play the round. An exception that leaves the part is a finding."""
        try:
            part(self)
        except Exception:
            self.findings.append(f"the round ended early\n{traceback.format_exc().rstrip()}")
        return self

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability
