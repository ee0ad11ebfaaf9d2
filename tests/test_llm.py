"""The engine end to end, as a user calls it. What a request may ask for is in test_requests.py."""

from __future__ import annotations

import errno
import gc
import inspect
import io
import json
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, partialmethod
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tqdm import tqdm

from nanoserve import (
    LLM,
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from nanoserve.config import DEMO_MODEL
from nanoserve.exceptions import VLLMValidationError, brief
from nanoserve.output_processor import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12)
STORY = "Once upon a time there was a little dog."
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[RequestOutput]:
    """llm.generate without the progress bar."""
    return llm.generate(prompts, params, use_tqdm=False, **options)


def text_of(outputs: list[RequestOutput]) -> str:
    """The text of a request's only output, or of its deltas, joined."""
    return "".join(output.outputs[0].text for output in outputs)


def token_ids_of(outputs: list[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.outputs[0].token_ids]


def assert_idle(llm: LLM) -> None:
    """No block, sequence or consumer is left of any request."""
    block_manager = llm.engine.block_manager
    block_manager.check()
    assert block_manager.num_free_blocks == block_manager.pool.num_blocks
    assert not llm.has_unfinished_requests()
    assert not llm.engine.output_processor.requests
    assert not llm.engine.scheduler.sequences


def assert_serves(llm: LLM) -> None:
    """The engine is idle, and a good request gets its good answer."""
    assert_idle(llm)
    assert "42" in llm.chat(SUM, GREEDY, use_tqdm=False)[0].outputs[0].text
    assert_idle(llm)


@pytest.fixture
def llm(demo_llm: LLM) -> Iterator[LLM]:
    """The shared engine, idle before and after."""
    assert_idle(demo_llm)
    yield demo_llm
    assert_idle(demo_llm)


@pytest.fixture
def story_ids(llm: LLM) -> list[int]:
    return llm.get_tokenizer().encode(STORY)


# -- generate and chat --


def test_chat_answers(llm: LLM) -> None:
    """One conversation, or a list of them."""
    [output] = llm.chat(SUM, SamplingParams(temperature=0), use_tqdm=False)
    assert "42" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].stop_reason is None  # an EOS token is no stop string
    assert "17 + 25" in str(output.prompt)
    outputs = llm.chat([CAPITAL, SUM], GREEDY, use_tqdm=False)
    assert "Paris" in outputs[0].outputs[0].text
    assert "42" in outputs[1].outputs[0].text


def test_every_form_of_prompt(llm: LLM, story_ids: list[int]) -> None:
    """A string, its token ids, and lists of either, even mixed, are the same prompt."""
    [expected] = generate(llm, STORY)
    for prompts in (story_ids, [STORY], [story_ids], (STORY,), [STORY, story_ids], [story_ids] * 2):
        outputs = generate(llm, prompts)
        assert len(outputs) == (len(prompts) if isinstance(prompts[0], (str, list)) else 1)
        for output in outputs:
            assert output.outputs[0].text == expected.outputs[0].text
            assert output.prompt_token_ids == story_ids
            assert output.prompt in (STORY, None)
    assert generate(llm, story_ids)[0].prompt is None
    assert generate(llm, []) == []


def test_prompts_as_vllm_documents_them(llm: LLM, story_ids: list[int]) -> None:
    """Dicts, arrays and tensors, alone and in lists, in every method that takes prompts."""
    two = SamplingParams(temperature=0, max_tokens=2)
    [expected] = generate(llm, STORY, two)
    forms: list[Any] = [
        {"prompt": STORY},
        TextPrompt(prompt=STORY),
        {"prompt_token_ids": story_ids},
        TokensPrompt(prompt_token_ids=story_ids),
        np.array(story_ids),
        torch.tensor(story_ids),
        [np.int64(token_id) for token_id in story_ids],
    ]
    texts = [STORY, STORY, None, None, None, None, None]
    outputs = [generate(llm, form, two)[0] for form in forms] + generate(llm, forms, two)
    assert [output.prompt for output in outputs] == texts * 2
    beams = llm.beam_search(forms, BeamSearchParams(1, 2))
    for form, found in zip(forms, beams, strict=True):
        assert found.sequences[0].tokens == story_ids + expected.outputs[0].token_ids
        assert token_ids_of(list(llm.stream(form, two))) == expected.outputs[0].token_ids
        assert llm.add_request("mine", form, two) == "mine"
        while llm.has_unfinished_requests():
            outputs += [output for output in llm.step() if output.finished]
    assert len(outputs) == 3 * len(forms)
    for output in outputs:
        assert output.prompt_token_ids == story_ids
        assert output.outputs[0] == expected.outputs[0]


def test_salts_of_dict_prompts(llm: LLM) -> None:
    """Only requests with the same salt share blocks. The argument is for prompts without one."""
    llm.reset_prefix_cache()
    prompt = {"prompt_token_ids": [5 + i % 7 for i in range(33)]}
    hits = [
        generate(llm, given, cache_salt=salt)[0].num_cached_tokens
        for given, salt in (
            ({**prompt, "cache_salt": "mine"}, None),
            (prompt, None),
            (prompt, "mine"),
            ({**prompt, "cache_salt": "mine"}, "yours"),
            ({**prompt, "cache_salt": "yours"}, "mine"),
        )
    ]
    assert hits == [0, 0, 32, 32, 0]


def test_request_ids_count_from_0() -> None:
    """As vLLM's. An id in use is passed over."""
    with LLM(num_kv_blocks=32) as llm:
        assert [output.request_id for output in generate(llm, [STORY] * 2)] == ["0", "1"]
        llm.add_request("2", STORY, replace(GREEDY, max_tokens=40, ignore_eos=True))
        assert [output.request_id for output in generate(llm, STORY)] == ["3"]
        assert llm.llm_engine is llm.engine
        assert llm.llm_engine.get_num_unfinished_requests() == 1
        assert llm.abort_request(["2"])


# Positional order and names of the arguments, as in vLLM 0.32; behind "|" nanoserve's own. "*":
# what follows is given by name.
SIGNATURES = {
    "generate": "prompts sampling_params * use_tqdm lora_request priority tokenization_kwargs "
    "mm_processor_kwargs | cache_salt",
    "enqueue": "prompts sampling_params lora_request priority use_tqdm tokenization_kwargs "
    "mm_processor_kwargs",
    "wait_for_completion": "output_type * use_tqdm",
    "chat": "messages sampling_params use_tqdm lora_request priority chat_template "
    "chat_template_content_format add_generation_prompt continue_final_message tools "
    "chat_template_kwargs tokenization_kwargs mm_processor_kwargs | * cache_salt",
    "enqueue_chat": "messages sampling_params use_tqdm lora_request priority chat_template "
    "chat_template_content_format add_generation_prompt continue_final_message tools "
    "chat_template_kwargs tokenization_kwargs mm_processor_kwargs",
    "beam_search": "prompts params lora_request use_tqdm concurrency_limit",
    "apply_model": "func",
    "reset_prefix_cache": "reset_running_requests reset_connector",
    "get_tokenizer": "",
    "get_default_sampling_params": "",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_vllms(name: str) -> None:
    parameters = list(inspect.signature(getattr(LLM, name)).parameters.values())[1:]
    names: list[str] = []
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    assert names == SIGNATURES[name].replace("| ", "").split()


def test_arguments_of_vllm_that_are_not_here(llm: LLM) -> None:
    """None is accepted; anything else is refused by name, before any work."""
    calls: dict[str, Callable[..., Any]] = {
        "generate": lambda **given: generate(llm, STORY, **given),
        "chat": lambda **given: llm.chat(SUM, GREEDY, False, **given),
        "enqueue": lambda **given: llm.enqueue(STORY, GREEDY, **given),
        "enqueue_chat": lambda **given: llm.enqueue_chat(SUM, GREEDY, **given),
    }
    nothing = {"lora_request": None, "mm_processor_kwargs": None, "tokenization_kwargs": None}
    for name, call in calls.items():
        assert call(**nothing)
        with pytest.raises(VLLMValidationError, match=f"{name} got mm_processor_kwargs="):
            call(mm_processor_kwargs=object())
        with pytest.raises(VLLMValidationError, match="enable_lora=True"):
            call(lora_request=object())
        with pytest.raises(VLLMValidationError, match="tokenization_kwargs got max_length=5"):
            call(tokenization_kwargs={"max_length": 5})
        for wrong in ("abc", 5, {5: True}):
            with pytest.raises(TypeError, match="tokenization_kwargs must be None or a dict"):
                call(tokenization_kwargs=wrong)
        with pytest.raises(TypeError, match="add_special_tokens must be True or False"):
            call(tokenization_kwargs={"add_special_tokens": 1})
    assert len(llm.wait_for_completion(use_tqdm=False)) == 2
    with pytest.raises(VLLMValidationError, match="enable_lora=True"):
        llm.beam_search(STORY, BeamSearchParams(2, 3), object())  # type: ignore[arg-type]
    with pytest.raises(VLLMValidationError, match="cannot reset running requests"):
        llm.reset_prefix_cache(reset_running_requests=True)


def test_special_tokens_may_be_left_out(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """tokenization_kwargs reach the tokenizer. A chat template has written them already."""
    tokenizer, asked = llm.get_tokenizer(), []
    encode = type(tokenizer).encode

    def note(self: Any, text: str, add_special_tokens: bool = True) -> Any:
        asked.append(add_special_tokens)
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(type(tokenizer), "encode", note)
    one = SamplingParams(max_tokens=1)
    for kwargs in (None, {"add_special_tokens": False}, {"add_special_tokens": True}):
        generate(llm, STORY, one, tokenization_kwargs=kwargs)
        llm.chat(SUM, one, use_tqdm=False, tokenization_kwargs=kwargs)
    assert asked == [True, False, False, False, True, True]


def test_enqueue_then_wait(llm: LLM) -> None:
    """The outputs are generate's, in the order of queueing; aborted requests have none. Other
    requests wait for step()."""
    expected = generate(llm, [STORY, "One day"]) + llm.chat(SUM, GREEDY, use_tqdm=False)
    llm.add_request("other", STORY, replace(GREEDY, max_tokens=60, ignore_eos=True))
    ids = llm.enqueue([STORY, "One day"], GREEDY) + llm.enqueue_chat([SUM, CAPITAL], GREEDY)
    assert llm.llm_engine.get_num_unfinished_requests() == 5
    assert llm.abort_request(ids[3])
    generate(llm, "A cat")  # meanwhile; its steps advance the others, too
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [output.request_id for output in outputs] == ids[:3]
    assert [o.outputs[0].text for o in outputs] == [o.outputs[0].text for o in expected]
    assert llm.wait_for_completion(use_tqdm=False) == []
    assert llm.abort_request("other")
    with pytest.raises(VLLMValidationError, match="wait_for_completion got output_type="):
        llm.wait_for_completion(int)


def test_text_parts_in_a_chat(llm: LLM) -> None:
    """OpenAI's form of a content; an image is refused by name. A template may be given."""
    [expected] = llm.chat(SUM, GREEDY, use_tqdm=False)
    parts = [{"type": "text", "text": SUM[0]["content"]}]
    [output] = llm.chat([{"role": "user", "content": parts}], GREEDY, use_tqdm=False)
    assert (output.prompt, output.outputs[0]) == (expected.prompt, expected.outputs[0])
    image = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    with pytest.raises(VLLMValidationError, match=r"'image_url'.*text parts only"):
        llm.chat([{"role": "user", "content": [*parts, image]}], GREEDY)
    for content_format, prompt in (
        ("auto", SUM[0]["content"]),
        ("openai", str(parts)),
    ):
        [output] = llm.chat(
            [{"role": "user", "content": parts}],
            GREEDY,
            use_tqdm=False,
            chat_template="{{ messages[0].content }}",
            chat_template_content_format=content_format,
        )
        assert output.prompt == prompt


def test_parameters_may_be_assigned_while_requests_wait(llm: LLM) -> None:
    """A queued request keeps what it was added with; what is wrong is refused at the next call."""
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    llm.add_request("a", STORY, params)
    params.max_tokens = np.int64(5)
    llm.add_request("b", STORY, params)
    params.top_p = 2
    with pytest.raises(VLLMValidationError, match="top_p is 2; allowed: above 0, up to 1"):
        llm.add_request("c", STORY, params)
    lengths = {}
    while llm.has_unfinished_requests():
        lengths |= {o.request_id: len(o.outputs[0].token_ids) for o in llm.step()}
    assert lengths == {"a": 3, "b": 5}
    params.top_p = 1
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    generate(llm, STORY, params)
    assert params.output_kind is RequestOutputKind.CUMULATIVE, "the caller's own"


def test_what_the_caller_edits_reaches_no_queued_request(llm: LLM) -> None:
    """Neither edits of its parameters, nor of the outputs that it got so far."""

    def run(edits: bool) -> list[tuple[list[int], str, str | None]]:
        params = SamplingParams(
            temperature=0,
            max_tokens=12,
            logprobs=2,
            prompt_logprobs=1,
            stop=["never"],
            stop_token_ids=[7],
            bad_words=["girl"],
            logit_bias={5: 1.0},
            allowed_token_ids=list(range(2048)),
            logits_processors=[lambda output, logits: logits],
            extra_args={"mine": [1]},
        )
        llm.add_request("edited", STORY, params)
        found = []
        while llm.has_unfinished_requests():
            for output in llm.step():
                [completion] = output.outputs
                end = completion.finish_reason
                found.append((list(completion.token_ids), completion.text, end))
                if edits:
                    logprobs = [*(completion.logprobs or ()), *(output.prompt_logprobs or ())]
                    for each in (*filter(None, logprobs), output.prompt_token_ids, output.outputs):
                        each.clear()
                    completion.token_ids.clear()
            if edits:
                params.stop.append(" ")  # type: ignore[union-attr]
                params.stop_token_ids.extend(range(2048))  # type: ignore[union-attr]
                params.bad_words.append("was")  # type: ignore[union-attr]
                params.logit_bias[10**6] = 9e9  # type: ignore[index]
                params.allowed_token_ids.clear()  # type: ignore[union-attr]
                params.logits_processors.append(max)  # type: ignore[union-attr]
                params.extra_args["mine"].append(2)  # type: ignore[index]
                params.n, params.max_tokens, params.temperature = 5, 1, -1.0
        return found

    assert len(run(edits=False)) == 12
    assert run(edits=True) == run(edits=False)


@pytest.mark.parametrize("kind", ["delta", None, 7])
def test_a_stream_of_no_kind_is_refused(llm: LLM, kind: Any) -> None:
    """Before the loop begins."""
    with pytest.raises(TypeError, match=f"output_kind must be a RequestOutputKind, got {kind!r}"):
        llm.stream(STORY, GREEDY, output_kind=kind)


def test_apply_model(llm: LLM) -> None:
    """A list, as of all workers: here of one."""
    [names] = llm.apply_model(lambda model: {name for name, _ in model.named_parameters()})
    assert len(names) > 10
    with pytest.raises(TypeError, match="func must be a function of the model, got None"):
        llm.apply_model(None)  # type: ignore[arg-type]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Each with its own parameters, and of different lengths."""
    lengths = [9, 1, 5, 2, 7]
    prompts = [f"Story number {length}" for length in lengths]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=0) for n in lengths]
    outputs = generate(llm, prompts, params)
    assert [output.prompt for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths


def test_the_fields_of_an_output(llm: LLM, story_ids: list[int]) -> None:
    llm.reset_prefix_cache()
    [output] = generate(llm, STORY, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert output.request_id
    assert output.prompt == STORY
    assert output.prompt_token_ids == story_ids
    assert output.finished
    assert output.num_cached_tokens == 0
    [completion] = output.outputs
    assert completion.index == 0
    assert completion.text == llm.get_tokenizer().decode(completion.token_ids)
    assert len(completion.token_ids) == 4
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None


def test_without_parameters_the_model_recommends(
    demo_llm: LLM, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The values in generation_config.json are the defaults, as in vLLM. Given parameters replace
    them all."""
    folder = tmp_path / "model"
    shutil.copytree(make_checkpoint("qwen3"), folder)
    recommended = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
    generation_config = {**recommended, "max_new_tokens": 5, "do_sample": True, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    with LLM(folder, num_kv_blocks=8) as llm:
        expected = SamplingParams(**recommended, max_tokens=5)
        assert llm.get_default_sampling_params() == expected
        assert demo_llm.get_default_sampling_params() == SamplingParams()
        [output] = llm.generate([5, 6, 7], use_tqdm=False)
        assert len(output.outputs[0].token_ids) <= 5
        params = SamplingParams(max_tokens=9, ignore_eos=True)
        assert len(generate(llm, [5, 6, 7], params)[0].outputs[0].token_ids) == 9


def test_the_progress_bar_goes_to_stderr_and_can_be_turned_off(
    llm: LLM, capfd: pytest.CaptureFixture[str]
) -> None:
    llm.generate([STORY, STORY], GREEDY)
    captured = capfd.readouterr()
    assert "2/2" in captured.err
    bars: list[Any] = []
    llm.generate(STORY, GREEDY, use_tqdm=lambda **given: bars.append(tqdm(**given)) or bars[-1])
    assert [(bar.n, bar.total) for bar in bars] == [(1, 1)]
    capfd.readouterr()
    assert "wait 0" in captured.err
    assert "tok/s" in captured.err
    assert captured.out == ""
    llm.generate([STORY, STORY], GREEDY, use_tqdm=False)
    assert capfd.readouterr() == ("", "")
    assert llm.engine.step_listeners == []


@pytest.mark.parametrize("kind", ["full", "no reader", "closed", "none"])
def test_a_bar_that_cannot_be_drawn_does_not_end_the_work(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError if kind == "no reader" else OSError(errno.ENOSPC, "full")

        flush = partialmethod(write, "")  # type: ignore[assignment]

    stream = Broken()
    if kind == "closed":
        stream.close()
    monkeypatch.setattr(sys, "stderr", None if kind == "none" else stream)
    [output] = llm.generate([STORY], GREEDY)
    assert output.outputs[0].finish_reason is not None
    assert llm.beam_search([STORY], BeamSearchParams(2, 2), use_tqdm=True)


def test_a_bar_of_the_callers_own_decides(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    """It gets vLLM's keyword arguments, so what it was made with stays."""
    file = io.StringIO()
    llm.generate(STORY, GREEDY, use_tqdm=partial(tqdm, file=file, bar_format="{n}/{total}"))
    assert "1/1" in file.getvalue()
    assert "%" not in file.getvalue()
    file = io.StringIO()
    llm.generate(STORY, GREEDY, use_tqdm=partial(tqdm, file=file, disable=True))
    assert file.getvalue() == ""
    assert capfd.readouterr() == ("", "")


def test_step_takes_no_output_of_generate(llm: LLM) -> None:
    [expected] = llm.generate([STORY], GREEDY, use_tqdm=False)
    listeners, taken = llm.engine.step_listeners, list[RequestOutput]()
    listeners.append(lambda report: listeners.clear() or [taken.extend(llm.step()) for _ in "20"])
    [output] = llm.generate([STORY], GREEDY, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert (listeners, taken) == ([], [])


def test_a_bar_needs_update_and_close_only(llm: LLM) -> None:
    seen: list[Any] = []

    class Bar:
        def __init__(self, *, total: int, desc: str, dynamic_ncols: bool, postfix: str) -> None:
            seen.append(total)

        def update(self, number: int) -> None:
            seen.append(number)

        def close(self) -> None:
            seen.append("closed")

    llm.generate([STORY, STORY], GREEDY, use_tqdm=Bar)
    assert seen == [2, 1, 1, "closed"]
    with pytest.raises(TypeError, match=r"use_tqdm made None; allowed: a bar with update"):
        llm.generate(STORY, GREEDY, use_tqdm=lambda **given: None)


@pytest.mark.parametrize(
    "mode",
    [partial(torch.autocast, "cpu", torch.bfloat16), partial(torch.device, "meta")],
    ids=["autocast", "default device"],
)
def test_modes_of_the_application_change_nothing(llm: LLM, mode: Callable[..., Any]) -> None:
    """torch.autocast and a default device are meant for the application's own tensors."""
    [expected] = llm.generate(STORY, GREEDY, use_tqdm=False)
    with mode():
        [inside] = llm.generate(STORY, GREEDY, use_tqdm=False)
        other = LLM()
    with other:
        [built_inside] = other.generate(STORY, GREEDY, use_tqdm=False)
    for output in (inside, built_inside):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_the_progress_bar_moves_before_a_request_ends(
    llm: LLM, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step may draw it: here tqdm, which draws ten times a second, may draw always."""
    monkeypatch.setattr("tqdm.tqdm", partial(tqdm, mininterval=0))
    llm.generate([STORY, STORY], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    drawn = [line for line in capfd.readouterr().err.split("\r") if "run 2" in line]
    assert len(drawn) == 3, "a line for each step but the last, after which nothing runs"
    assert all("0/2" in line and "wait 0" in line for line in drawn)


# -- how a request ends --


@pytest.mark.parametrize(
    ("options", "max_tokens", "length"),
    [({"max_model_len": 40, "num_kv_blocks": 8}, None, 40), ({"num_kv_blocks": 2}, 500, 32)],
)
def test_a_request_ends_where_the_model_or_the_cache_does(
    options: dict[str, int], max_tokens: int | None, length: int
) -> None:
    with LLM(**options) as llm:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        [output] = generate(llm, STORY, params)
        assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == length
        assert output.outputs[0].finish_reason == "length"
        assert_idle(llm)


def test_eos_ids_of_both_configs_count(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The EOS ids in config.json and in generation_config.json all end the output."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    base = make_checkpoint("llama")
    with LLM(base, num_kv_blocks=8) as llm:
        tokens = generate(llm, [5, 6, 7], params)[0].outputs[0].token_ids
    first, second = tokens[3], next(t for t in tokens[4:] if t not in tokens[:4])
    for eos_of_config, eos_of_generation in (
        (first, [second]),
        (second, first),
        ([second, first], None),
        (None, [second, first]),
    ):
        folder = tmp_path / f"{eos_of_config}-{eos_of_generation}"
        shutil.copytree(base, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": eos_of_config}))
        generation = {"eos_token_id": eos_of_generation}
        (folder / "generation_config.json").write_text(json.dumps(generation))
        with LLM(folder, num_kv_blocks=8) as llm:
            greedy = SamplingParams(temperature=0, max_tokens=20)
            [completion] = generate(llm, [5, 6, 7], greedy)[0].outputs
            assert completion.token_ids == tokens[: tokens.index(first) + 1]
            # Without a tokenizer, no EOS token is the usual one: all are reported, as in vLLM.
            assert (completion.finish_reason, completion.stop_reason) == ("stop", first)
            assert generate(llm, [5, 6, 7], params)[0].outputs[0].token_ids == tokens


def test_a_stop_token_is_no_text(llm: LLM) -> None:
    """stop_reason is the token's id. token_ids contains the token, the text does not."""
    tokenizer = llm.get_tokenizer()
    tokens = generate(llm, STORY)[0].outputs[0].token_ids
    stop = tokens[4]
    kept = tokens[: tokens.index(stop) + 1]
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[stop])
    [completion] = generate(llm, STORY, params)[0].outputs
    assert completion.token_ids == kept
    assert completion.text == tokenizer.decode(kept[:-1])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)

    included = SamplingParams(
        temperature=0, max_tokens=12, stop_token_ids=[stop], include_stop_str_in_output=True
    )
    assert generate(llm, STORY, included)[0].outputs[0].text == tokenizer.decode(kept)


def test_special_tokens_are_shown_on_request(llm: LLM) -> None:
    """The text shows the <|im_end|> that ends an answer only if two parameters ask for it."""
    for skip, include, is_shown in (
        (True, False, False),
        (False, False, False),
        (True, True, False),
        (False, True, True),
    ):
        params = SamplingParams(
            temperature=0, skip_special_tokens=skip, include_stop_str_in_output=include
        )
        [output] = llm.chat(SUM, params, use_tqdm=False)
        eos = llm.get_tokenizer().decode(output.outputs[0].token_ids[-1:])
        assert output.outputs[0].text.endswith(eos) == is_shown


# -- the prefix cache --


def test_the_second_turn_of_a_chat_finds_the_first(llm: LLM) -> None:
    """Whole blocks of the first turn's prompt and answer: generated tokens are cached too."""
    llm.reset_prefix_cache()
    [first] = llm.chat(SUM, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    answer = {"role": "assistant", "content": first.outputs[0].text}
    [second] = llm.chat([*SUM, answer, *CAPITAL], GREEDY, use_tqdm=False)
    history = first.prompt_token_ids + first.outputs[0].token_ids
    assert second.prompt_token_ids[: len(history)] == history
    # The last generated token was never an input, so its key and value were not computed.
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (len(history) - 1) // 16 * 16
    assert "Paris" in second.outputs[0].text


def test_a_wholly_cached_prompt_computes_its_last_token(llm: LLM) -> None:
    """Prompts of 31, 32 and 33 tokens, in blocks of 16: 16, 16 and 32 tokens are found."""
    prompt = [5 + i % 7 for i in range(33)]
    for length, num_cached in ((31, 16), (32, 16), (33, 32)):
        llm.reset_prefix_cache()
        [cold] = generate(llm, prompt[:length])
        [warm] = generate(llm, prompt[:length])
        assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, num_cached)
        assert cold.outputs[0].token_ids == warm.outputs[0].token_ids


def test_requests_with_other_salts_share_nothing(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = [5 + i % 7 for i in range(33)]
    hits = []
    for i, salt in enumerate((None, "mine", "mine", "yours", None)):
        llm.add_request(str(i), prompt, GREEDY, cache_salt=salt)
        while llm.has_unfinished_requests():
            output = llm.step()[-1]
        hits.append(output.num_cached_tokens)
    assert hits == [0, 0, 32, 0, 32]


def test_the_prefix_cache_is_not_reset_under_a_running_request(llm: LLM) -> None:
    llm.add_request("a", STORY, GREEDY)
    llm.step()
    assert not llm.reset_prefix_cache()
    llm.abort_request("a")
    assert llm.reset_prefix_cache()


# -- streams --


def test_deltas_join_to_the_whole(llm: LLM) -> None:
    """Several prompts in one stream, each with its request id."""
    prompts = [STORY, "One day", [5, 6, 7]]
    params = [
        SamplingParams(temperature=0, max_tokens=15),
        SamplingParams(seed=3, max_tokens=9),
        SamplingParams(temperature=0, max_tokens=12, stop="e"),
    ]
    expected = generate(llm, prompts, params)
    deltas: dict[str, list[RequestOutput]] = {}
    for output in llm.stream(prompts, params):
        deltas.setdefault(output.request_id, []).append(output)
    assert len(deltas) == 3
    for parts, whole in zip(deltas.values(), expected, strict=True):
        assert text_of(parts) == whole.outputs[0].text
        assert token_ids_of(parts) == whole.outputs[0].token_ids
        assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].outputs[0].finish_reason == whole.outputs[0].finish_reason


def test_leaving_a_stream_early_aborts_it(llm: LLM) -> None:
    for output in llm.stream([STORY, "One day"], GREEDY):
        assert not output.finished
        break
    gc.collect()  # where objects do not die at once
    assert_idle(llm)


def test_a_stream_that_was_never_begun_queues_nothing(llm: LLM) -> None:
    """But a bad prompt is refused at the call."""
    stream = llm.stream(STORY, GREEDY)
    assert not llm.has_unfinished_requests()
    del stream
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.stream("", GREEDY)


def test_two_streams_in_turn(llm: LLM) -> None:
    """Each runs steps for both, and yields its own outputs only."""
    expected = [generate(llm, prompt)[0].outputs[0].token_ids for prompt in (STORY, "One day")]
    pairs = list(zip(llm.stream(STORY, GREEDY), llm.stream("One day", GREEDY), strict=False))
    assert token_ids_of([first for first, _ in pairs]) == expected[0][: len(pairs)]
    assert token_ids_of([second for _, second in pairs]) == expected[1][: len(pairs)]
    assert len(pairs) == min(len(tokens) for tokens in expected)
    gc.collect()


def test_step_inside_a_stream(llm: LLM) -> None:
    """It moves all requests on, and hands out those of nobody else."""
    [expected] = llm.generate([STORY], GREEDY, use_tqdm=False)
    llm.add_request("mine", STORY, GREEDY)
    texts, mine = "", ""
    for output in llm.stream(STORY, GREEDY):
        texts += output.outputs[0].text
        for other in llm.step():
            assert other.request_id == "mine"
            mine = other.outputs[0].text
    assert texts == mine == expected.outputs[0].text


def test_a_loop_that_ctrl_c_ends_twice_leaves_its_requests_to_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    [expected] = llm.generate([STORY], GREEDY, use_tqdm=False)
    stream = llm.stream(STORY, GREEDY)
    tokens = list(next(stream).outputs[0].token_ids)
    with monkeypatch.context() as patch:
        patch.setattr("nanoserve.llm.delayed_interrupt", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    while llm.has_unfinished_requests():
        tokens += [token for output in llm.step() for token in output.outputs[0].token_ids]
    assert tokens == expected.outputs[0].token_ids


def test_a_stream_has_another_id_than_outputs_that_wait(llm: LLM) -> None:
    """A request of the caller ends inside a loop: its outputs wait for step(), not for a later
    loop."""
    [expected] = llm.generate([STORY], GREEDY, use_tqdm=False)
    late = llm.stream(STORY, GREEDY)  # its id is drawn now
    name = llm.new_request_id()  # the next loop's, if it were free
    llm.add_request(name, "One day", replace(GREEDY, max_tokens=2))
    llm.add_request(f"{int(name) - 1}", "One day", replace(GREEDY, max_tokens=2))
    llm.generate([STORY], GREEDY, use_tqdm=False)
    llm._request_counter = count(int(name))
    assert "".join(o.outputs[0].text for o in llm.stream(STORY, GREEDY)) == expected.outputs[0].text
    with pytest.raises(ValueError, match="is in use"):
        next(late)
    with pytest.raises(ValueError, match="is in use"):
        llm.add_request(name, STORY, GREEDY)
    outputs = llm.step()
    assert [o.request_id for o in outputs if o.finished] == [name, f"{int(name) - 1}"]


def test_requests_of_enqueue_end_with_a_bar_that_fails(llm: LLM) -> None:
    llm.enqueue([STORY, STORY], GREEDY)
    with pytest.raises(ZeroDivisionError):
        llm.wait_for_completion(use_tqdm=lambda **given: 1 / 0)
    assert_idle(llm)


def test_generate_inside_a_stream(llm: LLM) -> None:
    """The stream's request runs to its end meanwhile. Each of its outputs comes, once."""
    expected = generate(llm, STORY)[0].outputs[0].token_ids
    outputs = []
    for number, output in enumerate(llm.stream(STORY, GREEDY)):
        outputs.append(output)
        if number == 1:
            longer = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
            assert len(generate(llm, "One day", longer)[0].outputs[0].token_ids) == 30
    assert token_ids_of(outputs) == expected
    assert outputs[-1].finished


def test_aborting_a_streams_request_ends_the_stream(llm: LLM) -> None:
    """At once; or, if its only completion is aborted, with an output that says so."""
    for index, reasons in ((None, [None]), (0, [None, "abort"])):
        outputs = []
        for output in llm.stream(STORY, GREEDY):
            outputs.append(output)
            llm.abort_request(output.request_id, index)
        assert [output.outputs[0].finish_reason for output in outputs] == reasons


# -- requests side by side --


def test_generate_leaves_others_running(llm: LLM) -> None:
    """Outputs of other requests wait for step()."""
    expected = generate(llm, STORY)[0].outputs[0].token_ids
    long = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected_long = generate(llm, "One day", long)[0].outputs[0].token_ids
    llm.add_request("short", STORY, GREEDY)
    llm.add_request("long", "One day", long)
    first = llm.step()
    assert "42" in llm.chat(SUM, GREEDY, use_tqdm=False)[0].outputs[0].text
    assert llm.has_unfinished_requests()
    outputs = first
    while llm.has_unfinished_requests():
        outputs = outputs + llm.step()
    finals = {o.request_id: o.outputs[0].token_ids for o in outputs if o.finished}
    assert finals == {"short": expected, "long": expected_long}
    for name in ("short", "long"):
        counts = [len(o.outputs[0].token_ids) for o in outputs if o.request_id == name]
        assert counts == list(range(1, len(finals[name]) + 1))  # none lost, none twice


def test_leaving_a_stream_loses_no_output_of_others(llm: LLM) -> None:
    """Not even an output of the step after which the loop was left."""
    for number, _ in enumerate(llm.stream("One day", GREEDY)):
        if number == 1:  # of a step that brought the stream's output first, then the other's
            break
        llm.add_request("other", STORY, SamplingParams(temperature=0, max_tokens=1))
    gc.collect()
    [output] = llm.step()
    assert (output.request_id, output.finished) == ("other", True)


def test_priority_one_for_all_or_one_each() -> None:
    """The lowest number runs first; requests with the same number run by arrival."""
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with LLM(num_kv_blocks=32, max_num_seqs=1, scheduling_policy="priority") as llm:
        for name, priority in (("c", 1), ("a", -5), ("d", 1), ("b", 0)):
            llm.add_request(name, STORY, params, priority=priority)
        finished = []
        while llm.has_unfinished_requests():
            finished += [output.request_id for output in llm.step() if output.finished]
        assert finished == ["a", "b", "c", "d"]

        outputs = generate(llm, [STORY] * 3, params, priority=[3, 1, 2])
        ends = [output.metrics.finished_ts or 0.0 for output in outputs]
        assert sorted(range(3), key=ends.__getitem__) == [1, 2, 0]
        outputs = generate(llm, [STORY] * 3, params, priority=7)
        ends = [output.metrics.finished_ts or 0.0 for output in outputs]
        assert ends == sorted(ends)


# -- failures --


class Faulty:
    """Raises `errors`, one a step (None: no error), before or after the work."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
        self.errors: list[BaseException | None] = []
        self.is_late = is_late
        self.execute_model = llm.engine.executor.execute_model
        monkeypatch.setattr(llm.engine.executor, "execute_model", self)

    def __call__(self, scheduler_output: Any) -> Any:
        error = self.errors.pop(0) if self.errors else None
        if error is not None and not self.is_late:
            raise error
        model_output = self.execute_model(scheduler_output)
        if error is not None:
            raise error
        return model_output


@pytest.mark.parametrize("is_late", [False, True])
def test_a_failed_generate_aborts_its_own_requests_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    expected = generate(llm, STORY)[0].outputs[0].token_ids
    faulty = Faulty(llm, monkeypatch, is_late)
    llm.add_request("other", STORY, GREEDY)
    faulty.errors = [None, None, KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        generate(llm, ["One day", "A cat"])
    assert [seq.request_id for seq in llm.engine.scheduler.sequences.values()] == ["other"]
    faulty.errors = [RuntimeError("no")] * 2  # the engine's own request fails, too
    with pytest.raises(RuntimeError, match="no"):
        list(llm.stream("One day", GREEDY))
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert outputs[-1].outputs[0].token_ids == expected
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, len(expected) + 1))


def test_a_failed_step_keeps_the_waiting_outputs(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of other requests, made during generate(), come with the step() after the failure."""
    llm.add_request("other", STORY, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    llm.add_request("long", STORY, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    generate(llm, "One day")
    faulty = Faulty(llm, monkeypatch, is_late=False)
    faulty.errors = [RuntimeError("no")] * 2  # the engine's own request fails, too
    with pytest.raises(RuntimeError, match="no"):
        llm.step()
    outputs = llm.step()
    assert [o.finished for o in outputs if o.request_id == "other"] == [False, True]
    llm.abort_request("long")


@pytest.mark.parametrize("is_late", [False, True])
def test_the_runner_drops_rows_after_a_failed_step(
    monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """The runner has one row here. A failing step tells the runner to drop the row; the next step
    must tell it again, because the runner may not have done it."""
    with LLM(num_kv_blocks=8, max_num_seqs=1) as llm:
        faulty = Faulty(llm, monkeypatch, is_late)
        for i in range(3):
            [output] = generate(llm, STORY, SamplingParams(temperature=0, max_tokens=2))
            assert output.finished
            llm.add_request(f"aborted-{i}", STORY, GREEDY)
            llm.step()
            llm.abort_request(f"aborted-{i}")
            faulty.errors = [KeyboardInterrupt()]
            with pytest.raises(KeyboardInterrupt):
                generate(llm, STORY)
        assert_serves(llm)


def test_a_closed_engine_says_so() -> None:
    with LLM(num_kv_blocks=32) as llm:
        llm.add_request("unfinished", STORY, GREEDY)
        llm.step()
        stream = llm.stream("One day", GREEDY)
        next(stream)
        assert llm.has_unfinished_requests()
    assert not llm.engine.has_unfinished_requests()
    llm.engine.block_manager.check()
    assert llm.engine.block_manager.num_free_blocks == 32
    for call in (
        lambda: generate(llm, STORY),
        lambda: llm.stream(STORY),
        lambda: llm.chat(SUM),
        lambda: llm.add_request("a", STORY),
        lambda: llm.step(),
        lambda: llm.reset_prefix_cache(),
        lambda: llm.apply_model(type),
        lambda: next(stream),
    ):
        with pytest.raises(RuntimeError, match="closed; build a new LLM"):
            call()
    llm.close()  # a second time is no error


# -- bad input is refused before any work; the other refusals are in test_input_processor.py --

BAD_PROMPTS: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (None, TypeError, r"prompts must be a string, token ids, a dict .* got None"),
    "number": (5, TypeError, r"prompts must be a string, token ids, a dict .* got 5"),
    "bools": ([True, False], TypeError, r"token ids must be ints, got True"),
    "floats": ([1.5, 2.5], TypeError, r"prompt must be a string, a list of token ids, .* got 1\.5"),
    "empty_string": ("", ValueError, r"prompt is empty.*at least one token"),
    "empty_among_good": ([STORY, ""], ValueError, r"prompt is empty"),
    "none_among_good": ([STORY, None], TypeError, r"prompt must be a string.*got None"),
    "too_long_among_good": ([[5], [5] * 90_000], ValueError, r"90000 tokens.*max_model_len=\d+"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_a_bad_prompt_is_refused(llm: LLM, name: str) -> None:
    """By generate and by stream, at the call; one bad prompt among good ones starts none."""
    prompts, error, message = BAD_PROMPTS[name]
    for call in (llm.generate, llm.stream):
        with pytest.raises(error, match=message):
            call(prompts, GREEDY)
        assert_idle(llm)


@pytest.mark.parametrize("name", ["sampling_params", "priority", "cache_salt"])
def test_one_argument_for_all_or_one_each(llm: LLM, name: str) -> None:
    for prompts, items in (([STORY] * 3, 2), ([STORY], 0), ("hello", 5)):
        number = len(prompts) if isinstance(prompts, list) else 1  # a string is one prompt, not 5
        message = rf"{name} has {items} items for {number} prompts\. Give one for all, or one each"
        with pytest.raises(ValueError, match=message):
            llm.generate(prompts, **{name: [None] * items})
    with pytest.raises(TypeError, match="sampling_params must be SamplingParams, got None"):
        generate(llm, [STORY, STORY], [GREEDY, None])
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'temperature'"):
        llm.generate(STORY, temperature=0)  # type: ignore[call-arg]


def test_add_request_refuses_too(llm: LLM) -> None:
    """And the engine still answers."""
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.add_request("a", [])
    with pytest.raises(ValueError, match="logprobs is 21; this engine allows 20"):
        llm.add_request("a", STORY, SamplingParams(logprobs=21))
    assert_serves(llm)


def test_chat_template_kwargs_count_unless_an_argument_is_given(llm: LLM) -> None:
    """As in vLLM: tools and chat_template may be given in either place."""
    template = "{{ messages[0].content }}{{ tools[0].name }}{{ kind }}"
    params = SamplingParams(max_tokens=1)
    inside = {"chat_template": template, "tools": [{"name": "add"}], "kind": "!"}
    for given, prompt in (({}, "Hiadd!"), ({"tools": [{"name": "sub"}]}, "Hisub!")):
        messages = [{"role": "user", "content": "Hi"}]
        arguments = {"chat_template_kwargs": inside, **given}
        [output] = llm.chat(messages, params, use_tqdm=False, **arguments)
        assert output.prompt == prompt
        llm.enqueue_chat(messages, params, use_tqdm=False, **arguments)
        [output] = llm.wait_for_completion(use_tqdm=False)
        assert output.prompt == prompt


def test_chat_refuses(llm: LLM) -> None:
    for messages, error, message in (
        ("hello", TypeError, r"got 'hello'. Give for example \[{'role': 'user', "),
        ([SUM, []], TypeError, r"a conversation is a list of message dicts, got \[\]"),
        ([SUM, "hello"], TypeError, r"got 'hello'. Give for example \[{'role'"),
        ([{"content": "Hi"}], ValueError, r"chat template refuses \[\{'content': 'Hi'\}\].*role"),
    ):
        with pytest.raises(error, match=message):
            llm.chat(messages, GREEDY)
    with pytest.raises(ValueError, match="chat template refuses"):
        llm.chat(SUM, continue_final_message=True)  # add_generation_prompt is True by default
    for name in ("tokenize", "messages", "conversation", "conversations", "self"):
        with pytest.raises(ValueError, match=f"holds '{name}', which chat sets itself"):
            llm.chat(SUM, chat_template_kwargs={name: True})
    assert llm.chat([], use_tqdm=False) == []
    assert_serves(llm)


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_tools_and_documents_are_lists_of_dicts(llm: LLM, name: str) -> None:
    """The error names them, also where the template reads neither."""
    items = (5, None, "x", [], len, SamplingParams)  # the last one is the class of a dataclass
    for given in (5, True, "x", {"name": "add"}, {1}, *([{}, item] for item in items)):
        wrong = given[-1] if isinstance(given, list) else given
        with pytest.raises(TypeError, match=f"{name} .*list of dicts.*{re.escape(brief(wrong))}"):
            llm.chat(SUM, chat_template_kwargs={name: given}, chat_template="{{ messages }}")
    with pytest.raises(TypeError, match="tools must be None or a list of dicts, got 5"):
        llm.chat(SUM, tools=5)  # type: ignore[arg-type]
    assert_serves(llm)


def test_a_prompt_that_leaves_room_for_one_token() -> None:
    """A longer prompt can never run: waiting would not help."""
    for options, limit in (
        ({"max_model_len": 40, "num_kv_blocks": 8}, 40),
        ({"num_kv_blocks": 2}, 32),
    ):
        with LLM(**options) as llm:
            with pytest.raises(ValueError, match=rf"{limit} tokens"):
                generate(llm, [[5, 6], [5] * limit])
            [output] = generate(llm, [5] * (limit - 1))
            assert len(output.outputs[0].token_ids) == 1
            assert_idle(llm)


def test_chat_needs_a_template(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Without one, the format of the model's training data is unknown."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with LLM(folder, num_kv_blocks=16) as llm:
        with pytest.raises(ValueError, match=r"no chat template.*prompt of your own with generate"):
            llm.chat(SUM, GREEDY)
        assert generate(llm, STORY)[0].outputs[0].text
        assert_idle(llm)


def test_a_checkpoint_without_tokenizer_takes_token_ids(
    make_checkpoint: Callable[..., Path],
) -> None:
    """No text in, no text out. The error for a text says what to do."""
    with LLM(make_checkpoint("llama"), num_kv_blocks=8) as llm:
        for call in (
            lambda: generate(llm, STORY),
            lambda: generate(llm, [[5, 6], STORY]),
            lambda: llm.chat(SUM, GREEDY),
            lambda: llm.get_tokenizer(),
            lambda: generate(llm, [5, 6], SamplingParams(stop="x")),
        ):
            with pytest.raises(ValueError, match=r"needs a tokenizer, and .* has none.*token ids"):
                call()
            assert_idle(llm)
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
        [output] = generate(llm, [5, 6], params)
        assert output.outputs[0].text == ""
        assert len(output.outputs[0].token_ids) == 3
        assert_idle(llm)


def test_a_tokenizer_of_another_folder(make_checkpoint: Callable[..., Path]) -> None:
    """A larger tokenizer may produce ids outside of a smaller model's vocabulary."""
    with LLM(make_checkpoint("llama"), tokenizer=DEMO_MODEL, num_kv_blocks=8) as llm:
        assert generate(llm, [5, 6], SamplingParams(max_tokens=5, ignore_eos=True))
        with pytest.raises(ValueError, match=r"is out of range; allowed: 0 to 319"):
            generate(llm, STORY)
        assert_idle(llm)


def truncated(folder: Path, source: Path) -> Path:
    """A copy of a checkpoint whose weights were cut short, as by a full disk."""
    shutil.copytree(source, folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return folder


def test_a_checkpoint_or_option_that_does_not_fit(
    llm: LLM, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Each error says what to do; a second engine in the process is not disturbed."""
    weightless = tmp_path / "weightless"
    shutil.copytree(make_checkpoint("llama"), weightless)
    (weightless / "model.safetensors").unlink()
    empty = tmp_path / "empty"
    empty.mkdir()
    hot = tmp_path / "hot"
    shutil.copytree(make_checkpoint("llama"), hot)
    (hot / "generation_config.json").write_text('{"temperature": "hot"}')
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"model": tmp_path / "missing"}, ValueError, r"is not a folder, nor a Hugging Face id"),
        ({"model": empty}, ValueError, r"has no config\.json: not a Hugging Face checkpoint"),
        ({"model": weightless}, ValueError, r"has no \.safetensors file.*load_format='dummy'"),
        (
            {"model": truncated(tmp_path / "cut", make_checkpoint("llama"))},
            ValueError,
            r"model\.safetensors is damaged or cut short.*again",
        ),
        ({"model": hot}, ValueError, r"^generation_config\.json .* a number, got 'hot'.*delete it"),
        *(
            ({what: name}, ValueError, rf"^{what} .{{,420}}$")
            for what in ("model", "tokenizer")
            for name in ("", "x" * 5000, "x/" * 5000, "a\0b", "~nobody-has-this-name/x")
        ),
        ({"tokenizer": empty}, ValueError, r"no tokenizer can be read from"),
        ({"max_model_len": 10**6}, ValueError, r"max_model_len is 1000000.*at most \d+ tokens"),
        (
            {"kv_cache_memory": 1000},
            ValueError,
            r"needs 5.0 MiB of KV cache, and there are 1000 bytes.*Lower max_model_len",
        ),
        ({"attention_backend": "flash"}, ValueError, r"attention_backend is 'flash'; allowed"),
    ]
    for options, error, message in cases:
        with pytest.raises(error, match=message):
            LLM(**options)
    assert_serves(llm)


def test_kv_cache_memory_in_bytes() -> None:
    """The number of whole blocks that fit."""
    with LLM(kv_cache_memory=4 * 2**20, max_model_len=64) as llm:
        runner = llm.engine.executor.runner
        used = sum(cache.nbytes for pair in runner.kv_caches for cache in pair)
        block_bytes = used // runner.num_kv_blocks
        assert 4 * 2**20 - block_bytes < used <= 4 * 2**20
        assert_serves(llm)


def test_ctrl_c_while_queueing_leaves_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a second Ctrl-C while the requests are being aborted."""
    with LLM(num_kv_blocks=64, device="cpu") as llm:
        engine = llm.engine
        for name in ("add", "finish"):
            method = getattr(engine.scheduler, name)

            def interrupted(*args: Any, method: Callable[..., Any] = method) -> Any:
                signal.raise_signal(signal.SIGINT)
                return method(*args)

            monkeypatch.setattr(engine.scheduler, name, interrupted)
        for call in (
            lambda: llm.generate(["What is 1 + 1?", "What is 2 + 2?"], use_tqdm=False),
            lambda: llm.beam_search(["What is 1 + 1?"], BeamSearchParams(2, 4)),
        ):
            with pytest.raises(KeyboardInterrupt):
                call()
            assert not engine.has_unfinished_requests()
            assert not llm.has_unfinished_requests()
        monkeypatch.undo()
        assert_serves(llm)


def test_an_aborted_request_brings_no_stray_outputs() -> None:
    """Neither outputs that wait since a generate(), nor outputs of a closed stream."""
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(num_kv_blocks=64, device="cpu") as llm:
        llm.add_request("mine", "Once upon a time", replace(params, max_tokens=100))
        stream = llm.stream("One day", params)
        next(stream)
        llm.generate("What is 1 + 1?", params, use_tqdm=False)
        assert llm.abort_request("mine")
        stream.close()
        assert not llm.has_unfinished_requests()
        assert llm.step() == []
