"""What the notebooks stand on: the cast, hints by kind of mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanoserve import LLM, SamplingParams
from nanoserve.extras import lesson, sabotage
from nanoserve.extras.trace import why

PACKAGE = Path(__file__).parent.parent / "nanoserve"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


# -- the cast --


def test_the_cast_gets_right_answers() -> None:
    with lesson.small_llm(num_blocks=64) as llm:
        prompts = [lesson.prompt(llm, name) for name in lesson.CAST]
        texts = [o.outputs[0].text for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    for text, expected in zip(texts, ("42", "43", "Paris", "7341"), strict=True):
        assert expected in text


def test_a_small_llm_says_nothing_and_obeys(capfd: pytest.CaptureFixture[str]) -> None:
    with lesson.small_llm(num_blocks=7, block_size=2, max_num_seqs=3) as llm:
        manager, config = llm.engine.block_manager, llm.engine.config
        assert (manager.num_blocks, manager.block_size, config.max_num_seqs) == (7, 2, 3)
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def server() -> Iterator[lesson.SmallServer]:
    pytest.importorskip("fastapi", reason='needs pip install -e ".[server]"')
    with lesson.SmallServer() as server:
        yield server
    assert not server._thread.is_alive()
    assert server.llm.is_stopped


def test_a_small_server_runs_single_steps(
    server: lesson.SmallServer, capfd: pytest.CaptureFixture[str]
) -> None:
    """Over HTTP, and paused while a client waits, whose going away is noticed."""
    llm = server.llm
    assert server.send("/health").status == 200
    assert server.send("/v1/completions", {"prompt": 5.5}).status == 400
    server.pause()
    fields = {"prompt": lesson.CAST["A"], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    kept, left = server.open_stream("A", fields), server.open_stream("B", fields)
    for number in (2, 1):
        server.step(number)
        assert server.run(llm.is_paused())
    running = llm.engine.scheduler.running
    assert {seq.request_id: seq.num_output_tokens for seq in running} == {"A": 3, "B": 3}
    left.close()
    server.wait_for(lambda: not llm.engine.is_unfinished("B"))
    server.resume()
    assert b"[DONE]" in kept.getresponse().read()
    assert llm.get_num_unfinished_requests() == 0
    assert capfd.readouterr() == ("", "")


def test_a_small_server_waits_with_a_limit(
    server: lesson.SmallServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lesson, "RUN_TIMEOUT", 0.02)
    with pytest.raises(TimeoutError, match="not true"):
        server.wait_for(lambda: False)
    monkeypatch.undo()


def test_a_prompt_has_turns(demo_llm: LLM) -> None:
    ids = lesson.prompt(demo_llm, "C", "Paris.", "And of Italy?")
    text = demo_llm.get_tokenizer().decode(ids)
    assert text.count("<|im_start|>user") == 2
    assert text.index(lesson.CAST["C"]) < text.index("Paris.") < text.index("And of Italy?")
    assert text.endswith("assistant\n")
    assert all(type(token_id) is int for token_id in ids)


# -- checks --

RIGHT = [
    (7, 7),
    (7.0, 7),
    (0.33333, 1 / 3),
    ("Paris", "Paris"),
    ([1, 2], (1, 2)),
    ((1, 2), [1, 2]),
    (range(3), [0, 1, 2]),
    ([1, 2], torch.tensor([1, 2])),
    (np.array([1, 2]), [1, 2]),
    (3, torch.tensor(3)),
    (True, torch.tensor(True)),
    ({"a": [1]}, {"a": (1,)}),
    ({1, 2}, {2, 1}),
    ("RED", Colour.RED),
    (Colour.RED, Colour.RED),
    ([0.5, 0.25], torch.tensor([0.5, 0.25001])),
    (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 3)),
    (torch.tensor([1e-6, 1.0]), torch.tensor([0.0, 1.0])),
    ([None, 3], [None, 3]),
    ([[1], []], [[1], []]),
    (float("nan"), float("nan")),
]

WRONG = [
    (8, 7, "one too high."),
    (6, 7, "one too low"),
    (70, 7, "too high"),
    (0.3, 1 / 3, "too low"),
    (-7, 7, "sign"),
    (float("nan"), 7.0, "NaN"),
    ("7", 7, "without quotes"),
    ([7], 7, "the answer is a number, yours is a list"),
    (True, 1, "the answer is a number"),
    (1, True, "the answer is True or False"),
    ("paris ", "Paris", "upper and lower case"),
    ("Par", "Paris", "not complete"),
    ("Paris.", "Paris", "too long"),
    ("Rome", "Paris", "another text"),
    ([1, 2], [1, 2, 3], "it has 2 items, the answer has 3; all of the shorter one agree"),
    ([9, 2, 3, 4], [1, 2, 3], "it has 4 items"),
    ([], [1], "it has 0 items"),
    ([2, 1, 3], [1, 2, 3], "another order; item 0"),
    ([1, 2, 4], [1, 2, 3], "item [2] (counted from 0): one too high."),
    ([[1], [3]], [[1], [2]], "item [1][0] (counted from 0): one too high."),
    ({1, 5}, {1, 2, 3}, "2 missing, 1 too many"),
    ({"a": 1}, {"a": 1, "b": 2}, "1 of 2 keys are missing"),
    ({"a": 1, "c": 2}, {"a": 1}, "the key 'c' is too much"),
    ({"a": 2}, {"a": 1}, "at key 'a': one too high"),
    ("BLUE", Colour.RED, "another text"),
    (torch.ones(3, 2), torch.ones(2, 3), "transposed"),
    (torch.ones(3), torch.ones(2, 3), "its shape is (3,), the answer's is (2, 3)"),
    (torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]), "1 of 2 numbers differ, the first one"),
    (torch.tensor([torch.nan]), torch.tensor([1.0]), "NaN"),
    ("abc", torch.ones(2), "the answer is a tensor, yours is text"),
    (object(), [1], "the answer is a list, yours is object"),
]


@pytest.mark.parametrize(("guess", "actual"), RIGHT)
def test_right(guess: Any, actual: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lesson.check("2.1", guess, actual)
    said = capsys.readouterr().out
    assert said.startswith("2.1 right: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize(("guess", "actual", "hint"), WRONG)
def test_hints(guess: Any, actual: Any, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    lesson.check("2.1", guess, actual)
    said = capsys.readouterr().out
    assert said.startswith("2.1 not yet: ")
    assert hint in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("guess", [None, ..., [1, None], [[...]], {"a": None}, (None,) * 9])
def test_no_answer_yet(guess: Any, capsys: pytest.CaptureFixture[str]) -> None:
    lesson.check("2.1", guess, [1, 2])
    assert capsys.readouterr().out.startswith("2.1 no answer yet: ")


@pytest.mark.parametrize(
    ("cell", "remark"),
    [
        ("def f(x): ...", "write your own"),
        ("guess = None  # a number", "write your own"),
        ("def f(x):\n    x + 1", "does your function end with `return`"),
    ],
)
def test_a_function_without_return(
    cell: str, remark: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a notebook, `In` has the sources of the cells. The place for the answer is gone there."""
    names = {"lesson": lesson, "In": ["", cell]}
    exec("lesson.check('Q2.1', [None, None], [1, 2])", names)
    said = capsys.readouterr().out.lower()
    assert said.startswith("q2.1 no answer yet: ")
    assert remark in said


def test_names_are_not_high_or_low(capsys: pytest.CaptureFixture[str]) -> None:
    lesson.check("2.1", 3, 7, names=True)
    lesson.check("2.2", [7, 3], [7, 4], names=True)
    lesson.check("2.3", "7", 7, names=True)
    assert capsys.readouterr().out.splitlines() == [
        "2.1 not yet: it is another one.",
        "2.2 not yet: item [1] (counted from 0): it is another one.",
        "2.3 not yet: the answer is a number, yours is text. Write it without quotes.",
    ]


def test_a_hint_for_a_certain_guess_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    hints = {4: "that is the number of slots.", (1, 2): "that is the order of arrival."}
    lesson.check("2.1", 4, 7, hints)
    lesson.check("2.2", [1, 2], [2, 1], hints)
    lesson.check("2.3", 5, 7, hints)
    assert capsys.readouterr().out.splitlines() == [
        "2.1 not yet: that is the number of slots.",
        "2.2 not yet: that is the order of arrival.",
        "2.3 not yet: too low.",
    ]


def test_a_guess_that_cannot_be_compared_raises_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    class Strange:
        def __eq__(self, other: object) -> bool:
            raise RuntimeError("no")

        __hash__ = None  # type: ignore[assignment]

    lesson.check("2.1", [Strange()], [Strange()])
    assert "2.1 not yet: your answer cannot be compared" in capsys.readouterr().out


def test_an_answer_is_shown_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    lesson.check("2.1", list(range(99)), range(99))
    lesson.check("2.2", torch.ones(3, 4), torch.ones(3, 4))
    long, tensor = capsys.readouterr().out.splitlines()
    assert len(long) < 90
    assert tensor == "2.2 right: a tensor of shape (3, 4)."


# -- one door for notebooks --


def test_notebooks_find_the_sabotages_here() -> None:
    """The same objects: an entry of one table is seen through both modules."""
    public = {name for name in vars(sabotage) if name in lesson.__all__}
    assert {"broken", "SABOTAGES", "CASES", "replaced_method", "suspect_hints"} <= public
    for name in public:
        assert getattr(lesson, name) is getattr(sabotage, name)


def test_notebooks_find_every_name_that_they_use() -> None:
    for notebook in (PACKAGE.parent / "notebooks").glob("*.ipynb"):
        for name in re.findall(r"\blesson\.([A-Za-z_]+)", notebook.read_text("utf-8")):
            assert name == "py" or name in lesson.__all__, f"{notebook.name}: lesson.{name}"


# -- the pictures of notebook 00 --


def test_the_layers_name_files_that_exist() -> None:
    for _, files in why.LAYERS.values():
        for file in files.split(", "):
            assert (PACKAGE / file).exists(), file
