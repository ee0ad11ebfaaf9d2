"""The tests of the labs, and what those of them share that run the demo model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def answers(
    requests: Mapping[str, Any], params: Mapping[str, Any] | None = None, **options: Any
) -> Any:
    """What the demo model answers to these requests of lesson.serve, with these options of LLM.
    Raises what the student's code raised inside a step."""
    from nanoserve.engine import LLMEngine
    from nanoserve.teaching.lesson import serve, small_llm

    class Engine(LLMEngine):
        def recover(self, error: Exception | None) -> None:
            if error is not None:
                raise error
            super().recover(error)

    with small_llm(engine_cls=Engine, **options) as llm:
        return serve(llm, requests, **params or {})
