"""Lab 9: a chapter of the student's own, held to the promises of every chapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from nanoserve.chapters import PARTS
from nanoserve.engine import LLMEngine
from nanoserve.scheduler import Scheduler
from nanoserve.teaching.course.graders import answers
from nanoserve.tools.check_blocks import check_blocks

# Sixteen blocks of 4: shared prefixes, chunks, a preemption, and a user with most of the requests.
REQUESTS = {"A": 12, "B": (12, 2), "C": (8, 3), "D": (8, 4), "A2": (6, 9)}
SALTS = {"salts": {**dict.fromkeys(REQUESTS, "Ada"), "D": "Bob"}}
TIGHT = {"num_blocks": 16, "max_num_batched_tokens": 12, "max_num_seqs": 3}


def chapter(mine: Any, is_on: bool) -> dict[str, Any]:
    return {**mine("parts")(), **(mine("switch")() if is_on else {})}


def watch(base: type[Scheduler], steps: list[Any]) -> type[Scheduler]:
    """The same scheduler, whose decisions are written down, and whose blocks are counted."""

    class Watched(base):  # type: ignore[misc, valid-type]
        def schedule(self) -> Any:
            step = super().schedule()
            check_blocks(self.block_manager)
            steps.append([(each.seq_id, each.num_scheduled_tokens) for each in step.scheduled])
            return step

    return Watched


def run(options: Mapping[str, Any]) -> tuple[dict[str, str], list[Any]]:
    """The answers, and what each step was."""
    steps: list[Any] = []
    scheduler_cls = watch(options.get("scheduler_cls", Scheduler), steps)
    return answers(REQUESTS, SALTS, **{**TIGHT, **options, "scheduler_cls": scheduler_cls}), steps


def note_ends(base: type[Scheduler], ends: list[Any]) -> type[Scheduler]:
    """The same scheduler, which notes all tokens of each sequence that ends."""

    class Noting(base):  # type: ignore[misc, valid-type]
        def finish(self, seq_id: int, status: Any) -> None:
            if seq_id in self.sequences:
                ends.append(list(self.sequences[seq_id].token_ids))
            super().finish(seq_id, status)

    return Noting


def number_and_ends(mine: Any, is_on: bool) -> tuple[float, list[Any]]:
    """What measure returns, and the tokens of all sequences of its runs."""
    options, ends = chapter(mine, is_on), list[Any]()
    options["scheduler_cls"] = note_ends(options.get("scheduler_cls", Scheduler), ends)
    return mine("measure")(**options), sorted(ends)


def test_9_1_each_class_is_a_part(mine: Any) -> None:
    for part, cls in mine("parts")().items():
        assert part in PARTS, f"{part!r} is no part of the engine; there are {', '.join(PARTS)}"
        base = getattr(LLMEngine, part)
        assert issubclass(cls, base), f"{cls.__name__} is no subclass of {base.__name__}"
        private = [n for n in vars(cls) if n[0] == "_" and n[:2] != "__" and hasattr(base, n)]
        assert not private, f"{cls.__name__} overrides {private}: a chapter has public methods only"


def test_9_1_one_option_switches_it_on(mine: Any) -> None:
    parts, given = mine("parts")(), mine("switch")()
    own = {
        each.name: each.default for each in fields(parts.get("config_cls", LLMEngine.config_cls))
    }
    core = {each.name for each in fields(LLMEngine.config_cls)}
    assert len(given) == 1, f"one option switches it on, not {list(given)}"
    for name, value in given.items():
        assert name in own and name not in core, (
            f"{name!r} is no new field of your config class: "
            "has it an annotation, and the class @dataclass(frozen=True)?"
        )
        assert own[name] != value, f"{name} is on by default"


@pytest.mark.points(2)
def test_9_2_the_engine_is_the_old_one_while_it_is_off(mine: Any) -> None:
    found, wanted = run(chapter(mine, False)), run({})
    assert found[0] == wanted[0], f"off, and the answers differ: {found[0]}, not {wanted[0]}"
    differing = [
        i
        for i, pair in enumerate(zip(found[1], wanted[1], strict=False))
        if len({*map(str, pair)}) > 1
    ]
    assert not differing, f"off, and step {differing[0] + 1} is another one"


@pytest.mark.points(3)
def test_9_3_the_engine_gives_the_same_tokens(mine: Any) -> None:
    found, wanted = run(chapter(mine, True))[0], run({})[0]
    for name, text in wanted.items():
        assert found.get(name) == text, f"{name} says {found.get(name)!r}, and without it {text!r}"


@pytest.mark.points(2)
def test_9_4_the_engine_takes_another_chapter_beside_it(mine: Any) -> None:
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    found, wanted = run({**chapter(mine, True), **drafts})[0], run({})[0]
    assert found == wanted, f"with drafts the answers are {found}, not {wanted}"


@pytest.mark.points(3)
def test_9_5_the_engine_is_better_for_it(mine: Any) -> None:
    (off, wanted), (on, found) = (number_and_ends(mine, is_on) for is_on in (False, True))
    assert found == wanted, "with your chapter other requests of measure end, or with other tokens"
    assert on < off, f"with your chapter the number is {on}, without it {off}: it does not help"
    again = mine("measure")(**chapter(mine, True))
    assert again == on, f"the same run gives {on}, and then {again}: count, do not time"


@pytest.mark.points(3)
def test_9_6_the_engine_with_a_mistake_is_known(mine: Any) -> None:
    mine("check")(**chapter(mine, True))
    broken = {**chapter(mine, True), **mine("sabotage")()}
    try:
        mine("check")(**broken)
    except AssertionError:
        return
    raise AssertionError("check says nothing of your sabotage")
