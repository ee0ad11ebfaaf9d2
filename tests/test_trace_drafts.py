"""What the picture of drafts shows is what the engine did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.extras import lesson, trace
from nanoserve.extras.cases import Oracle, verify_times
from nanoserve.extras.trace.drafts import Verified, kinds_of
from nanoserve.extras.trace.frames import Tokens
from nanoserve.extras.trace.snapshot import was_executed
from nanoserve.model_runner import PendingOutput

matplotlib = pytest.importorskip("matplotlib")
FORM = "Make a JSON record: name Anna, age 13, pet dog, colour red."
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    matplotlib.use("agg")
    with lesson.small_llm(60, speculative_config=NGRAM) as small:
        yield small


@pytest.fixture(scope="module")
def run(llm: LLM) -> tuple[Any, list[Verified]]:
    """An answer, and what was noted of it."""
    right, listeners = PendingOutput.result, list(llm.engine.step_listeners)
    params = SamplingParams(temperature=0, max_tokens=40)
    with trace.watch_drafts(llm) as seen:
        [output] = llm.generate([lesson.prompt(llm, FORM)], params, use_tqdm=False)
    assert PendingOutput.result is right
    assert llm.engine.step_listeners == listeners
    return output, seen


def test_the_steps_make_the_answer(run: tuple[Any, list[Verified]]) -> None:
    output, seen = run
    new = [token_id for each in seen for token_id in each.new_token_ids]
    assert new == list(output.outputs[0].token_ids)
    drafted = [each for each in seen if each.draft_token_ids]
    assert len(drafted) == output.metrics.num_drafts > 0
    assert sum(len(each.draft_token_ids) for each in drafted) == output.metrics.num_draft_tokens
    assert sum(each.num_accepted for each in drafted) == output.metrics.num_accepted_tokens > 0
    for each in seen:
        assert len(each.sampled_token_ids) == len(each.draft_token_ids) + 1
        assert each.sampled_token_ids[: len(each.new_token_ids)] == each.new_token_ids
        accepted = each.draft_token_ids[: each.num_accepted]
        assert each.new_token_ids[: each.num_accepted] == accepted


def test_kinds() -> None:
    each = Verified(2, "A", (1, 2, 3), (1, 9, 5, 5), (1, 9), 1)
    assert kinds_of(each) == [(1, "accepted"), (2, "rejected"), (3, "rejected"), (9, "own")]
    ended = Verified(2, "A", (1, 2, 3), (1, 2, 3, 4), (1, 2), 3)  # at an accepted draft
    assert kinds_of(ended) == [(1, "accepted"), (2, "accepted")]


def test_the_picture_has_every_token(llm: LLM, run: tuple[Any, list[Verified]]) -> None:
    import matplotlib.pyplot as plt
    from matplotlib.text import Text

    _, seen = run
    trace.drafted("title", {"one": seen}, llm)
    found = Counter(text.get_text() for text in plt.gcf().findobj(Text))
    tokens = Tokens(llm.get_tokenizer())
    wanted = Counter(tokens.text(token_id, 12) for each in seen for token_id, _ in kinds_of(each))
    wanted.update(str(each.step) for each in seen)
    assert wanted <= found
    plt.close("all")


def test_a_block_map_behind_a_step_with_drafts_shows_what_is_written(llm: LLM) -> None:
    """Also without being told that the step was executed."""
    prompt = lesson.prompt(llm, FORM)
    llm.add_request("F", prompt, SamplingParams(temperature=0, max_tokens=40))
    engine = llm.engine
    for _ in range(5):
        llm.step()
    step = engine.scheduler.schedule()
    assert step.scheduled[0].draft_token_ids
    assert was_executed(engine, step) is False
    engine.scheduler.update_from_output(step, engine.executor.execute_model(step))
    assert was_executed(engine, step) is True
    llm.abort_request("F")


def test_times_of_steps_with_drafts(llm: LLM) -> None:
    prompt = lesson.prompt(llm, "C")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    Oracle.text = (*prompt, *output.outputs[0].token_ids)
    times = verify_times(prompt, (1, 2), (0, 3), rounds=1)
    assert set(times) == {(1, 0), (1, 3), (2, 0), (2, 3)}
    assert min(times.values()) > 0
