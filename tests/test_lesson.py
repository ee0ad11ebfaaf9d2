"""What the notebooks stand on: the cast, hints by kind of mistake, sabotages that leave nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_documents import exists

from nanoserve import LLM, SamplingParams
from nanoserve.extras import lesson, trace
from nanoserve.extras.arrivals import serve
from nanoserve.extras.trace import why

PACKAGE = Path(__file__).parent.parent / "nanoserve"
TWO_BOXES = "The red box holds 7341. The blue box holds 5062. What does the red box hold?"
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


# -- sabotages --


def ask(llm: LLM, *turns: str, **options: Any) -> list[list[int]]:
    """The tokens of each completion of a chat prompt, greedy unless `options` say otherwise."""
    params = SamplingParams(**{"temperature": 0, "max_tokens": 24, **options})
    output = llm.generate(lesson.prompt(llm, *turns), params, use_tqdm=False)[0]
    return [list(completion.token_ids) for completion in output.outputs]


def after(others: list[str], *turns: str, num_blocks: int = 24, **options: Any) -> Any:
    """A story: on a fresh engine, first these questions, then the one whose tokens count."""

    def tell() -> list[list[int]]:
        with lesson.small_llm(num_blocks, **options) as llm:
            for question in others:
                ask(llm, question)
            return ask(llm, *turns)

    return tell


def three_completions() -> list[list[int]]:
    with lesson.small_llm(96) as llm:
        return ask(llm, "Tell me a story.", n=3, temperature=1.0, seed=4)


def behind_a_ban() -> list[list[int]]:
    with lesson.small_llm() as llm:
        ask(llm, "Tell me a story.", bad_words=["Paris"])
        return ask(llm, "C")


def with_a_penalty() -> list[list[int]]:
    with lesson.small_llm() as llm:
        return ask(llm, "Name five animals.", presence_penalty=1.0)


def back_from_the_cpu() -> list[list[int]]:
    run = serve({"C": 1, "D": 1}, num_blocks=13, preemption_mode="swap")
    return [[ord(letter) for letter in run.answers[name]] for name in "CD"]


def behind_smaller_ones() -> list[list[int]]:
    """No token changes; what changes is how long D waits."""
    others = {"X0": 1, "X1": 2} | {f"X{i}": 3 * i - 1 for i in range(2, 8)}
    run = serve({"D": (3, 4)} | {name: (step, 7) for name, step in others.items()}, num_blocks=12)
    return [[*run.wait("D")]]


def number_of_steps() -> list[list[int]]:
    """Of a mistake that changes no token."""
    with lesson.small_llm() as llm:
        steps: list[Any] = []
        llm.engine.step_listeners.append(steps.append)
        params = SamplingParams(temperature=0, max_tokens=4)
        llm.generate([lesson.prompt(llm, name) for name in "AB"], params, use_tqdm=False)
        return [[len(steps)]]


STORIES: dict[str, Callable[[], list[list[int]]]] = {
    "uncache": after(["C", "A", "B"], "C", num_blocks=10),
    "copy_on_write": three_completions,
    "rope_neighbours": after([], "A"),
    "packed_order": after([], "A"),
    "one_sum_less": after([], "A", tensor_parallel_size=2),
    "short_hash": after(["A"], "B"),
    "skipped_token": after([], "A", max_num_batched_tokens=8),
    "late_position": after([], "A"),
    "short_memory": after([], TWO_BOXES),
    "stale_row": behind_a_ban,
    "swap_in": back_from_the_cpu,
    "starve": behind_smaller_ones,
    "forgotten_token": after([], "A"),
    "wrong_tokens": with_a_penalty,
    "noise_with_state": three_completions,
    "position_as_slot": after(["C"], "A"),
    "shifted_table": after([], "A"),
    "late_chunk": after([], "D"),
    "one_by_one": number_of_steps,
    "moving_inputs": after([], "C", runner_cls=trace.GraphRunner),
    "short_answers": after([], "Tell me a story."),
}


@pytest.mark.parametrize("name", lesson.SABOTAGES)
def test_a_sabotage_changes_tokens_and_leaves_nothing(name: str) -> None:
    """Inside, the answer is another one; afterwards it is the right one again."""
    story = STORIES[name]
    right = story()
    with lesson.broken(name):
        wrong = story()
    assert wrong != right
    assert all(wrong)
    assert story() == right


@pytest.mark.parametrize("name", lesson.SABOTAGES)
def test_an_engine_that_was_used_inside_is_right_afterwards(name: str) -> None:
    """Blocks, prefix cache and rows are forgotten; a request that has not ended goes on."""
    with lesson.small_llm(48, max_num_batched_tokens=8) as llm:
        alone = [ask(llm, question) for question in "ABCD"]
        llm.reset_prefix_cache()
        with lesson.broken(name):
            ask(llm, "Tell me a story.", bad_words=["Paris"])
            for question in "ABCD":
                ask(llm, question)
        assert [ask(llm, question) for question in "ABCD"] == alone
        llm.engine.block_manager.check()


def test_a_request_that_is_running_at_the_end_goes_on() -> None:
    with lesson.small_llm(48) as llm:
        right = ask(llm, "D")[0]
        llm.reset_prefix_cache()
        llm.add_request("D", lesson.prompt(llm, "D"), GREEDY)
        llm.step()
        with lesson.broken("late_position"):
            pass
        while llm.has_unfinished_requests():
            outputs = llm.step()
        assert list(outputs[0].outputs[0].token_ids) == right


@pytest.mark.parametrize("name", lesson.SABOTAGES)
def test_undone_whatever_happens_inside(name: str) -> None:
    method, _ = lesson.REPLACEMENTS[name]
    module, _, dotted = method.partition(".")
    while not (PACKAGE / f"{module}.py").exists():  # "models.decoder.Attention.forward"
        first, _, dotted = dotted.partition(".")
        module = f"{module}/{first}"
    assert exists(PACKAGE / f"{module}.py", dotted)
    assert lesson.replaced_method(name) == dotted
    before = owner_and_function(method)
    with lesson.broken(name):
        assert owner_and_function(method) is not before
    assert owner_and_function(method) is before
    with pytest.raises(KeyboardInterrupt), lesson.broken(name), lesson.broken(name):
        raise KeyboardInterrupt
    assert owner_and_function(method) is before


def owner_and_function(method: str) -> Any:
    """The function itself: "block_manager.BlockPool.allocate"."""
    import importlib

    *module, class_name, attribute = method.split(".")
    owner = getattr(importlib.import_module(".".join(["nanoserve", *module])), class_name)
    return vars(owner)[attribute]


def test_an_unknown_sabotage_is_refused_with_those_that_are_known() -> None:
    with (
        pytest.raises(ValueError, match=r"'uncach'; there are: uncache, .*case 5"),
        lesson.broken("uncach"),
    ):
        pass


def test_five_cases_in_five_modules() -> None:
    assert list(lesson.CASES) == [f"case {i}" for i in range(1, 6)]
    modules = [lesson.REPLACEMENTS[name][0].rsplit(".", 2)[0] for name in lesson.CASES.values()]
    assert len(set(modules)) == 5
    assert lesson.replaced_method("case 1") == lesson.replaced_method(lesson.CASES["case 1"])


def test_every_suspect_but_the_culprit_gets_a_hint() -> None:
    text = (PACKAGE.parent / "notebooks" / "11_break_it.ipynb").read_text("utf-8")
    cells = "".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    assert re.findall(r"(?m)^\| `(\w+\.\w+)` \|", cells) == list(lesson.SUSPECTS)
    for case in lesson.CASES:
        others = set(lesson.SUSPECTS) - {lesson.replaced_method(case)}
        assert set(lesson.suspect_hints(case)) == others and len(others) == 8


# -- notebook 11 names the tests that hold what a case breaks --


def names_of_tests(case: str) -> list[str]:
    """ "tests/test_x.py::test_y" of a case; in the notebook, a test stands before its file."""
    text = (PACKAGE.parent / "notebooks" / "11_break_it.ipynb").read_text("utf-8")
    cells = "".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    [cause] = re.findall(rf"The cause of {case}</summary>(.*?)</details>", cells, re.DOTALL)
    pairs = re.findall(r"`(test_\w+)`\s+in\s+`(tests/test_\w+\.py)`", cause)
    return [f"{file}::{name}" for name, file in pairs]


@pytest.mark.parametrize("case", lesson.CASES)
def test_the_tests_named_for_a_case_exist(case: str) -> None:
    named = names_of_tests(case)
    assert named
    for test in named:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (PACKAGE.parent / file).read_text("utf-8"), test


@pytest.mark.slow
@pytest.mark.parametrize("case", lesson.CASES)
def test_the_tests_named_for_a_case_notice_it(case: str) -> None:
    """Run in an interpreter of their own, with the sabotage in the engine, they fail."""
    options = ("-n0", "-q", "-x", "-p", "no:cacheprovider")
    for test in names_of_tests(case):
        code = f"""
import pytest
from nanoserve.extras import lesson
with lesson.broken({case!r}):
    print("exit status", int(pytest.main([*{options}, {test!r}])))
"""
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=PACKAGE.parent,
            env={**os.environ, "PYTHONPATH": str(PACKAGE.parent)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.stdout.endswith("exit status 1\n"), f"{test}\n{done.stdout[-500:]}"


# -- the pictures of notebook 00 --


def test_the_layers_name_files_that_exist() -> None:
    for _, files in why.LAYERS.values():
        for file in files.split(", "):
            assert (PACKAGE / file).exists(), file
