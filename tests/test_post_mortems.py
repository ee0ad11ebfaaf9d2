"""Each story is told as it happens: the right engine passes the test, the bug does not."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from nanoserve.block_manager import BlockManager
from nanoserve.teaching.course.toy import ToyEngine, make_sequence
from nanoserve.teaching.post_mortems import NAMES
from nanoserve.teaching.post_mortems.__main__ import main

FOLDER = Path(__file__).parent.parent / "nanoserve" / "teaching" / "post_mortems"
# What the user of the demo model sees: the last answer of the right engine, of the broken one.
SEEN = {
    "stale_hash": ("A again", "17 + 25 = 42", "17 + 25 = 52"),
    "whole_prompt_hit": ("C, 16 tokens, again", "The capital of France is Paris.", "no answer"),
    "hit_not_consumed": ("again", "17 + 25 = 42", "assistant 17 + 25 = 42"),
    "freed_page": ("B2", "The capital of France is Paris.", "The capital is France is Paris."),
    "pinned_too_early": ("36 + 36, with more", "Sorry, I can only add two", "no answer"),
}


@pytest.fixture(params=NAMES)
def bug(request: pytest.FixtureRequest) -> Any:
    return import_module(f"nanoserve.teaching.post_mortems.{request.param}")


def test_the_test_tells_the_bug_and_its_second_act_from_the_right_engine(bug: Any) -> None:
    bug.test()
    bug.test(**getattr(bug, "REPAIRED", {}))
    for parts in (bug.BROKEN, getattr(bug, "SECOND", bug.BROKEN)):
        with pytest.raises(AssertionError):
            bug.test(**parts)


def test_the_rules_are_true_of_a_right_engine() -> None:
    from nanoserve.teaching.post_mortems import freed_page, pinned_too_early, stale_hash
    from nanoserve.teaching.post_mortems.whole_prompt_hit import rule as leaves_a_token

    toy = ToyEngine(num_blocks=7)
    for number in range(12):
        toy.add(f"R{number}", "abcdefghijkl"[: 3 + number % 10])
    while toy.scheduler.sequences:
        toy.step()
        for bug in (stale_hash, freed_page, pinned_too_early):
            bug.rule(toy.block_manager)
    leaves_a_token(toy.block_manager, make_sequence("abcdefgh"))


class RuleIsBrokenError(Exception):
    pass


def checked(base: Any, bug: Any) -> Any:
    """The same manager, which looks at its rule whenever a sequence ends."""

    def free(self: Any, seq: Any) -> None:
        try:
            bug.rule(self)
        except AssertionError as error:
            raise RuleIsBrokenError from error
        base.free(self, seq)

    return type("Checked", (base,), {"free": free})


@pytest.mark.parametrize("name", ["stale_hash", "freed_page", "pinned_too_early"])
def test_the_rule_is_false_at_the_wrong_moment(name: str) -> None:
    bug = import_module(f"nanoserve.teaching.post_mortems.{name}")
    bug.test(block_manager_cls=checked(BlockManager, bug))
    with pytest.raises(RuleIsBrokenError):
        bug.test(block_manager_cls=checked(bug.BROKEN["block_manager_cls"], bug))


def test_a_query_sees_every_key_up_to_its_own() -> None:
    import torch

    from nanoserve.attention import AttentionBackend, StepMetadata
    from nanoserve.teaching.post_mortems.hit_not_consumed import OwnPassOnly, rule

    table, none = torch.tensor([[7, 3, 5]]), torch.tensor([])
    step = StepMetadata(none, table, torch.tensor([0, 2]), torch.tensor([10]))  # 8 are cached
    rule(AttentionBackend().plan(step, 4, torch.float32).plan[0], num_computed=8)
    with pytest.raises(AssertionError):
        rule(OwnPassOnly().plan(step, 4, torch.float32).plan[0], num_computed=8)


@pytest.mark.slow
def test_a_second_act_that_looks_repaired_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo model answers right, and the test of the story does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["post_mortems", "stale_hash"])
        main()
    said = capsys.readouterr().out
    assert "second act  A again: 17 + 25 = 42" in said
    assert "second act, the test: A again says" in said


@pytest.mark.slow
def test_what_the_user_saw(bug: Any) -> None:
    name = bug.__name__.rpartition(".")[2]
    which, right, wrong = SEEN[name]
    assert bug.story()[which] == right
    assert bug.story(**bug.BROKEN)[which].startswith(wrong)
    for language in ("README.md", "README.zh-CN.md"):
        assert wrong in (FOLDER / language).read_text("utf-8").replace("没有回答", "no answer")


def test_the_stored_pictures_are_those_that_the_code_draws(bug: Any) -> None:
    name = bug.__name__.rpartition(".")[2]
    stored = (FOLDER / "pictures" / f"{name}.svg").read_text(encoding="utf-8")
    assert bug.picture()._repr_svg_() + "\n" == stored
