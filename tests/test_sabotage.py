"""Mistakes on purpose: each changes what it says, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_documents import exists

from nanoserve import LLM, EngineArgs, LoRARequest, SamplingParams
from nanoserve.extras import cases, lesson, sabotage, trace
from nanoserve.extras.arrivals import serve
from nanoserve.extras.structured_output import StructuredOutputsParams

PACKAGE = Path(__file__).parent.parent / "nanoserve"
TWO_BOXES = "The red box holds 7341. The blue box holds 5062. What does the red box hold?"
GREEDY = SamplingParams(temperature=0, max_tokens=24)

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


def behind_another_voice() -> list[list[int]]:
    """The model itself is asked what a loud pirate was asked before."""
    pirate = LoRARequest("pirate", 1, cases.adapter_copy(lora_alpha=24))
    with lesson.small_llm(enable_lora=True, max_lora_rank=8) as llm:
        prompt = lesson.prompt(llm, "C")
        llm.generate(prompt, GREEDY, lora_request=pirate, use_tqdm=False)
        return ask(llm, "C")


def of_a_given_form() -> list[list[int]]:
    with lesson.small_llm() as llm:
        return ask(llm, "A", structured_outputs=StructuredOutputsParams(regex="[0-9]{2}!"))


def number_of_steps() -> list[list[int]]:
    """Of a mistake that changes no token."""
    with lesson.small_llm() as llm:
        steps: list[Any] = []
        llm.engine.step_listeners.append(steps.append)
        params = SamplingParams(temperature=0, max_tokens=4)
        llm.generate([lesson.prompt(llm, name) for name in "AB"], params, use_tqdm=False)
        return [[len(steps)]]


def after_a_client_left() -> list[list[int]]:
    """No token changes; what changes is how many requests the engine has."""
    pytest.importorskip("fastapi", reason='needs pip install -e ".[server]"')
    from nanoserve.extras.async_llm import AsyncLLM
    from nanoserve.extras.server.streaming import EngineRequests

    async def main() -> list[list[int]]:
        await llm.pause_generation()
        requests = EngineRequests(llm, "A")
        await requests.add(lesson.CAST["A"], GREEDY, True)
        await requests.abort()
        return [[1 + llm.get_num_unfinished_requests()]]

    with AsyncLLM(EngineArgs(num_kv_blocks=24, block_size=4)) as llm:
        return asyncio.run(main())


def vector_in_chunks() -> list[list[int]]:
    """Thousandths of a mean vector."""
    options = {"runner": "pooling", "pooler_config": {"seq_pooling_type": "MEAN"}}
    with lesson.small_llm(max_num_batched_tokens=8, **options) as llm:
        [output] = llm.embed(TWO_BOXES, use_tqdm=False)
        return [[round(1000 * number) for number in output.outputs.embedding]]


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
    "deaf": after_a_client_left,
    "one_root": behind_another_voice,
    "other_scales": after([], "A", quantization="int4"),
    "forgetful": of_a_given_form,
    "next_row": after(["A", "C", "B"], "A", num_blocks=10, kv_offloading_size=0.01),
    "credulous": after([], "Count from 46 to 72.", speculative_config={"method": "suffix"}),
    "forgotten_sum": vector_in_chunks,
}


# What holds for one holds for most: a plain run tries every third.
each_sabotage = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if number % 3 else [])
        for number, name in enumerate(sabotage.SABOTAGES)
    ],
)


@each_sabotage
def test_a_sabotage_changes_tokens_and_leaves_nothing(name: str) -> None:
    """Inside, the answer is another one; afterwards it is the right one again."""
    story = STORIES[name]
    right = story()
    with sabotage.broken(name):
        wrong = story()
    assert wrong != right
    assert all(wrong)
    assert story() == right


@each_sabotage
def test_an_engine_that_was_used_inside_is_right_afterwards(name: str) -> None:
    """Blocks, prefix cache and rows are forgotten; a request that has not ended goes on."""
    with lesson.small_llm(48, max_num_batched_tokens=8) as llm:
        alone = [ask(llm, question) for question in "ABCD"]
        llm.reset_prefix_cache()
        with sabotage.broken(name):
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
        with sabotage.broken("late_position"):
            pass
        while llm.has_unfinished_requests():
            outputs = llm.step()
        assert list(outputs[0].outputs[0].token_ids) == right


@each_sabotage
def test_undone_whatever_happens_inside(name: str) -> None:
    method, _ = sabotage.REPLACEMENTS[name]
    module, _, dotted = method.partition(".")
    while not (PACKAGE / f"{module}.py").exists():  # "models.decoder.Attention.forward"
        first, _, dotted = dotted.partition(".")
        module = f"{module}/{first}"
    assert exists(PACKAGE / f"{module}.py", dotted)
    assert sabotage.replaced_method(name) == dotted
    before = owner_and_function(method)
    with sabotage.broken(name):
        assert owner_and_function(method) is not before
    assert owner_and_function(method) is before
    with pytest.raises(KeyboardInterrupt), sabotage.broken(name), sabotage.broken(name):
        raise KeyboardInterrupt
    assert owner_and_function(method) is before


def test_an_engine_that_cannot_forget_harms_no_other_and_hides_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which engine is found first is not known, so each of two fails once."""
    with lesson.small_llm() as one, lesson.small_llm() as two:
        for failing, other in ((one, two), (two, one)):
            forgotten: list[str] = []

            def fail() -> None:
                raise RuntimeError("this engine cannot forget")

            def forget(forgotten: list[str] = forgotten) -> None:
                forgotten.append("the other")

            monkeypatch.setattr(failing.engine, "recover", fail)
            monkeypatch.setattr(other.engine, "recover", forget)
            with pytest.raises(RuntimeError, match="cannot forget"), sabotage.broken("uncache"):
                pass
            with pytest.raises(ZeroDivisionError), sabotage.broken("uncache"):
                raise ZeroDivisionError
            assert forgotten == ["the other"] * 2
            monkeypatch.undo()


def owner_and_function(method: str) -> Any:
    """The function itself: "block_manager.BlockPool.allocate"."""
    import importlib

    *module, class_name, attribute = method.split(".")
    owner = getattr(importlib.import_module(".".join(["nanoserve", *module])), class_name)
    return vars(owner)[attribute]


def test_an_unknown_sabotage_is_refused_with_those_that_are_known() -> None:
    with (
        pytest.raises(ValueError, match=r"'uncach'; there are: uncache, .*case 5"),
        sabotage.broken("uncach"),
    ):
        pass


def test_five_cases_in_five_modules() -> None:
    assert list(sabotage.CASES) == [f"case {i}" for i in range(1, 6)]
    modules = [sabotage.REPLACEMENTS[name][0].rsplit(".", 2)[0] for name in sabotage.CASES.values()]
    assert len(set(modules)) == 5
    assert sabotage.replaced_method("case 1") == sabotage.replaced_method(sabotage.CASES["case 1"])


def test_every_suspect_but_the_culprit_gets_a_hint() -> None:
    text = (PACKAGE.parent / "notebooks" / "11_break_it.ipynb").read_text("utf-8")
    cells = "".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    assert re.findall(r"(?m)^\| `(\w+\.\w+)` \|", cells) == list(sabotage.SUSPECTS)
    for case in sabotage.CASES:
        others = set(sabotage.SUSPECTS) - {sabotage.replaced_method(case)}
        assert set(sabotage.suspect_hints(case)) == others and len(others) == 8


# -- notebook 11 names the tests that hold what a case breaks --


def names_of_tests(case: str) -> list[str]:
    """ "tests/test_x.py::test_y" of a case; in the notebook, a test stands before its file."""
    text = (PACKAGE.parent / "notebooks" / "11_break_it.ipynb").read_text("utf-8")
    cells = "".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    [cause] = re.findall(rf"The cause of {case}</summary>(.*?)</details>", cells, re.DOTALL)
    pairs = re.findall(r"`(test_\w+)`\s+in\s+`(tests/test_\w+\.py)`", cause)
    return [f"{file}::{name}" for name, file in pairs]


@pytest.mark.parametrize("case", sabotage.CASES)
def test_the_tests_named_for_a_case_exist(case: str) -> None:
    named = names_of_tests(case)
    assert named
    for test in named:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (PACKAGE.parent / file).read_text("utf-8"), test


@pytest.mark.slow
@pytest.mark.parametrize("case", sabotage.CASES)
def test_the_tests_named_for_a_case_notice_it(case: str) -> None:
    """Run in an interpreter of their own, with the sabotage in the engine, they fail."""
    options = ("-n0", "-q", "-x", "-p", "no:cacheprovider")
    for test in names_of_tests(case):
        code = f"""
import pytest
from nanoserve.extras import sabotage
with sabotage.broken({case!r}):
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
