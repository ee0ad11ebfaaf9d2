"""Shortest prompt first. (A long one may wait for as long as short ones come.)"""

from dataclasses import dataclass
from typing import Any

from nanoserve.config import EngineConfig
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import Sequence
from nanoserve.teaching.lesson import prompt, small_llm


@dataclass(frozen=True)
class ShortConfig(EngineConfig):
    short_first: bool = False


class ShortScheduler(Scheduler):
    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        is_on = getattr(self.config, "short_first", False)
        length = (seq.num_prompt_tokens,) if is_on else ()
        return (*length, *super().urgency(seq))


class LongScheduler(Scheduler):
    def urgency(self, seq: Sequence) -> tuple[float, ...]:
        return (-seq.num_prompt_tokens, *super().urgency(seq))


def parts() -> dict[str, type]:
    return {"config_cls": ShortConfig, "scheduler_cls": ShortScheduler}


def switch() -> dict[str, Any]:
    return {"short_first": True}


def steps_to_first_tokens(options: dict[str, Any]) -> dict[str, int]:
    """At which step each of three requests has its first token; one runs at a time."""
    from nanoserve.sampling_params import RequestOutputKind, SamplingParams

    kind, found = RequestOutputKind.DELTA, dict[str, int]()
    with small_llm(**{"max_num_seqs": 1, **options}) as llm:
        for name in "DAC":  # the longest comes first
            params = SamplingParams(
                temperature=0, max_tokens=12 if name == "D" else 4, output_kind=kind
            )
            llm.add_request(name, prompt(llm, name), params)
        number = 0
        while llm.has_unfinished_requests():
            number += 1
            for output in llm.step():
                found.setdefault(output.request_id, number)
    return found


def measure(**options: Any) -> float:
    return sum(steps_to_first_tokens(options).values())


def sabotage() -> dict[str, type]:
    return {**parts(), "scheduler_cls": LongScheduler}


def check(**options: Any) -> None:
    found = steps_to_first_tokens(options)
    assert found["D"] == max(found.values()), "the longest prompt was served before a shorter one"
