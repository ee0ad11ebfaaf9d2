"""LLM on the demo model: calls, streams, chat, errors, Ctrl-C, threads, two engines, the end."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from workload import at_line, interrupt

from nanoserve import LLM, RequestOutputKind, SamplingParams
from nanoserve.sequence import EngineDeadError

GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPTS = ["Once upon a time", "The cat", [495, 496, 260]]
TALK = [{"role": "user", "content": "What is 17 + 25?"}]
SMALL = {"num_gpu_blocks_override": 64, "max_num_seqs": 8}


@pytest.fixture
def llm(one: LLM) -> Iterator[LLM]:
    """One engine for all tests; each leaves it as it found it."""
    yield one
    assert not one.has_unfinished_requests()
    assert not any(one.llm_engine.block_manager.pool.ref_counts)


@pytest.fixture(scope="module")
def one() -> Iterator[LLM]:
    with LLM(**SMALL) as llm:
        yield llm


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **each: Any) -> list[str]:
    return [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False, **each)]


def finish(llm: LLM) -> dict[str, Any]:
    """Steps until nothing is left: request id -> its last output, if it has one."""
    outputs = {}
    while llm.has_unfinished_requests():
        outputs |= {output.request_id: output for output in llm.step() if output.finished}
    return outputs


def test_prompts_in_any_form(llm: LLM) -> None:
    alone = [generate(llm, prompt)[0] for prompt in PROMPTS]
    ids = [llm.get_tokenizer().encode(text) for text in PROMPTS[:2]] + PROMPTS[2:]
    dicts = [{"prompt": PROMPTS[0]}, {"prompt_token_ids": ids[1]}, {"prompt_token_ids": ids[2]}]
    arrays = [np.array(each) for each in ids]
    for prompts in (PROMPTS, tuple(PROMPTS), iter(PROMPTS), (p for p in PROMPTS), dicts, arrays):
        assert generate(llm, prompts, priority=[3, 2, 1], cache_salt=["a", None, "b"]) == alone
    assert generate(llm, np.array(ids[2])) == alone[2:]
    assert generate(llm, dicts[0]) == alone[:1]
    assert generate(llm, PROMPTS, [GREEDY] * 3) == alone
    assert generate(llm, []) == []
    assert len(generate(llm, "The cat", None)) == 1  # what the checkpoint recommends
    again = [llm.generate([[7] * 40], GREEDY, use_tqdm=False)[0] for _ in range(2)]
    assert [each.num_cached_tokens for each in again] == [0, 32]


@pytest.mark.parametrize(
    ("arguments", "each", "error"),
    [
        ((PROMPTS, [GREEDY]), {}, ValueError),
        ((PROMPTS, GREEDY), {"priority": [1]}, ValueError),
        ((PROMPTS, GREEDY), {"priority": "high"}, TypeError),
        ((PROMPTS, GREEDY), {"cache_salt": 5}, TypeError),
        ((PROMPTS, GREEDY), {"lora_request": "pirate"}, TypeError),
        ((PROMPTS, GREEDY), {"no_such_argument": 1}, TypeError),
        ((PROMPTS, {"temperature": 0}), {}, TypeError),
        ((["good", []], GREEDY), {}, ValueError),
        ((5, GREEDY), {}, TypeError),
        ((b"abc", GREEDY), {}, TypeError),
    ],
)
def test_an_error_at_the_door_changes_nothing(
    llm: LLM, arguments: Any, each: Any, error: type
) -> None:
    with pytest.raises(error):
        llm.generate(*arguments, **each)
    assert not llm.has_unfinished_requests()


def test_streams_give_what_generate_gives(llm: LLM) -> None:
    wanted, texts = generate(llm, PROMPTS), dict[str, str]()
    for output in llm.stream(PROMPTS, GREEDY):
        texts[output.request_id] = texts.get(output.request_id, "") + output.outputs[0].text
        if output.finished:
            assert generate(llm, "The cat") == wanted[1:2]  # a call within a stream
    assert [*texts.values()] == wanted
    kind = RequestOutputKind.CUMULATIVE
    last = {o.request_id: o.outputs[0].text for o in llm.stream(PROMPTS, GREEDY, output_kind=kind)}
    assert [*last.values()] == wanted
    for _ in llm.stream(PROMPTS, GREEDY):
        break  # the generator is closed: its requests are aborted


def test_step_by_step(llm: LLM) -> None:
    wanted = generate(llm, PROMPTS)
    prompt, params = list(PROMPTS[2]), GREEDY.clone()
    assert llm.add_request("a", prompt, params, priority=1) == "a"
    prompt.append(7)  # what the caller edits reaches no queued request
    params.max_tokens = 1
    with pytest.raises(ValueError, match="'a'"):
        llm.add_request("a", "another", GREEDY)
    llm.add_request("b", PROMPTS[1], GREEDY)
    assert llm.step()[0].outputs[0].finished() is False
    assert not llm.reset_prefix_cache()
    llm.add_request("0", PROMPTS[0], GREEDY)  # generate has used this id, too
    assert llm.abort_request(["b", "never"])
    assert not llm.abort_request("b")
    assert llm.llm_engine.get_num_unfinished_requests() == 2
    assert generate(llm, PROMPTS) == wanted  # a call while other requests run
    outputs = finish(llm)
    assert {*outputs} == {"a", "0"}
    assert outputs["a"].outputs[0].text == wanted[2]
    assert llm.reset_prefix_cache()


def test_chat(llm: LLM) -> None:
    [one] = llm.chat(TALK, GREEDY, use_tqdm=False)
    assert one.prompt == llm.get_tokenizer().apply_chat_template(
        TALK, tokenize=False, add_generation_prompt=True
    )
    parts = [{"role": "user", "content": [{"type": "text", "text": TALK[0]["content"]}]}]
    for both in llm.chat([TALK, parts], GREEDY, use_tqdm=False):
        assert both.outputs[0].text == one.outputs[0].text
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    [own] = llm.chat(TALK, GREEDY, use_tqdm=False, chat_template=template)
    assert own.prompt == TALK[0]["content"]
    assert llm.chat([]) == []
    image = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
    table = ("hi", TypeError), (5, TypeError), (image, TypeError), ([{"content": "?"}], ValueError)
    for bad, error in (*table, ([image], ValueError)):
        with pytest.raises(error):
            llm.chat(bad)
    with pytest.raises(ValueError, match="mine"):
        llm.chat(TALK, chat_template="{{ raise_exception('mine') }}")


def test_without_a_tokenizer() -> None:
    with LLM(skip_tokenizer_init=True) as llm:
        [output] = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids and output.outputs[0].text == ""
        with pytest.raises(ValueError, match="tokenizer"):
            llm.generate("Once", GREEDY)


def test_a_request_that_fails_ends_alone(llm: LLM) -> None:
    def fail(output: list[int], logits: Any) -> Any:
        raise RuntimeError("mine")

    bad = SamplingParams(max_tokens=5, n=3, logits_processors=[fail])
    forgets = SamplingParams(logits_processors=[lambda output, logits: None])
    [one] = llm.generate("The cat", forgets, use_tqdm=False)
    assert "must return" in str(one.outputs[0].stop_reason)
    one, two = llm.generate(["The cat", "The cat"], [bad, GREEDY], use_tqdm=False)
    assert [each.finish_reason for each in one.outputs] == ["error"] * 3
    assert "mine" in str(one.outputs[0].stop_reason)
    assert [two.outputs[0].text] == generate(llm, "The cat")


def test_a_call_from_inside_a_step(llm: LLM) -> None:
    """A logits processor may add and abort requests. It cannot run a step."""

    def meddle(output: list[int], logits: Any) -> Any:
        if len(output) == 1:
            llm.add_request("within", "The cat", GREEDY)
            llm.abort_request("other")
        if len(output) == 2:
            llm.generate("The cat", GREEDY, use_tqdm=False)
        return logits

    wanted = generate(llm, "The cat")
    llm.add_request("other", "The cat", GREEDY)
    llm.add_request("meddler", "The cat", SamplingParams(logits_processors=[meddle]))
    outputs = finish(llm)
    assert {*outputs} == {"within", "meddler"}
    assert outputs["within"].outputs[0].text == wanted[0]
    assert outputs["meddler"].outputs[0].finish_reason == "error"


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_ctrl_c_at_any_line_of_generate(async_scheduling: bool) -> None:
    with LLM(**SMALL, async_scheduling=async_scheduling) as llm:
        short = SamplingParams(temperature=0, max_tokens=3)
        generate(llm, PROMPTS, short)  # with the prefix cache as it will be
        with at_line(10**9, interrupt) as left:
            wanted = generate(llm, PROMPTS, short)
        total = 10**9 - left[0]
        for number in (*range(0, total, 67), *range(total - 120, total, 6)):  # and at the end
            with suppress(KeyboardInterrupt), at_line(number, interrupt):
                generate(llm, PROMPTS, short)
            assert not llm.has_unfinished_requests(), number
            assert generate(llm, PROMPTS, short) == wanted, number
            assert not any(llm.llm_engine.block_manager.pool.ref_counts)


def test_threads_add_and_abort(llm: LLM) -> None:
    wanted, names = generate(llm, PROMPTS), [f"request {i}" for i in range(60)]

    def ask(number: int) -> None:
        llm.add_request(names[number], PROMPTS[number % 3], GREEDY)
        if number % 4 == 3:
            llm.abort_request(names[number])

    outputs = dict[str, Any]()
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, number) for number in range(60)]
        while llm.has_unfinished_requests() or not all(each.done() for each in asked):
            outputs |= {output.request_id: output for output in llm.step()}
    assert {*outputs} >= {name for number, name in enumerate(names) if number % 4 < 3}
    for name, output in outputs.items():
        if output.finished:
            assert output.outputs[0].text == wanted[names.index(name) % 3]


def test_two_engines_in_turn(llm: LLM) -> None:
    with LLM(**SMALL) as other:
        both = zip(llm.stream(PROMPTS, GREEDY), other.stream(PROMPTS, GREEDY), strict=True)
        assert all(a.outputs[0].text == b.outputs[0].text for a, b in both)


def test_closed() -> None:
    llm = LLM(**SMALL)
    llm.add_request("a", "The cat", GREEDY)
    llm.step()
    llm.close()
    llm.close()
    assert not llm.has_unfinished_requests()
    for call in (generate, lambda *args: llm.add_request("b", *args[1:], GREEDY)):
        with pytest.raises(RuntimeError):
            call(llm, "The cat")


def test_an_engine_that_has_died_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(step: Any) -> Any:
        raise EngineDeadError("a rank has ended")

    with LLM(**SMALL) as llm:
        llm.add_request("a", "The cat", GREEDY)
        monkeypatch.setattr(llm.llm_engine.executor, "launch", die)
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                llm.step()
