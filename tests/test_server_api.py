"""Every endpoint and option over HTTP, asked by OpenAI's own client.

The oracle is LLM: what generate, chat and beam_search give for the same model, the server gives.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import engines
import httpx
import openai
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from pydantic import TypeAdapter
from servers import PATIENCE, Running, openai_client, request, running, until
from test_async_llm import GatedExecutor

import nanoserve
from nanoserve import LLM, EngineArgs, SamplingParams
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.beam_search import BeamSearchParams
from nanoserve.extras.server import build_app, protocol, responses

STORY = "Once upon a time"
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
C, H = "/v1/completions", "/v1/chat/completions"
LONG = {"max_tokens": 2000, "ignore_eos": True}  # takes seconds, if it is not aborted


@pytest.fixture(scope="module")
def async_llm() -> Iterator[AsyncLLM]:
    with AsyncLLM(EngineArgs(num_kv_blocks=512)) as llm:
        yield llm
        llm.engine.block_manager.check()


@pytest.fixture(scope="module")
def server(async_llm: AsyncLLM) -> Iterator[Running]:
    names = ["demo", "org/other"]
    app = build_app(async_llm, served_model_name=names, trust_request_chat_template=True)
    with running(app) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with openai_client(server) as one:
        yield one


@pytest.fixture(autouse=True)
def idle(server: Running, async_llm: AsyncLLM) -> Iterator[None]:
    """After each test nothing is left of its requests."""
    yield
    until(
        lambda: (
            not async_llm.engine.has_unfinished_requests() and not server.server.state.num_requests
        )
    )


@pytest.fixture
def ended(async_llm: AsyncLLM) -> Iterator[list[str | None]]:
    """How the requests of this test have ended in the engine."""
    reasons: list[str | None] = []

    def note(consumer: Any) -> None:
        reasons.append(consumer.request.root.status.finish_reason)

    listeners = async_llm.engine.output_processor.finish_listeners
    listeners.append(note)
    yield reasons
    listeners.remove(note)


def ask(server: Running, path: str, body: Any) -> Any:
    """The JSON that answers a POST."""
    answer = server.ask("POST", path, body)
    assert answer.status == 200, answer.body
    return answer.json


def ask_stream(server: Running, path: str, body: dict[str, Any]) -> list[Any]:
    """The chunks of a stream."""
    answer = server.ask("POST", path, {**body, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def refusal(server: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error that answers a POST."""
    answer = server.ask("POST", path, body)
    assert answer.status == status, answer.body
    return answer.error


# -- models --


def test_the_models_are_listed(client: OpenAI, async_llm: AsyncLLM) -> None:
    models = client.models.list().data
    assert [model.id for model in models] == ["demo", "org/other"]
    assert models[0].max_model_len == async_llm.config.max_model_len
    assert client.models.retrieve("org/other") == models[1]


def test_an_unknown_model_is_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="This server has: demo, org/other") as caught:
        client.completions.create(model="other", prompt=STORY)
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)


def test_a_request_may_name_no_model(server: Running) -> None:
    assert ask(server, C, {"prompt": STORY})["model"] == "demo"
    assert ask(server, C, {"prompt": STORY, "model": "org/other"})["model"] == "demo"


# -- what SamplingParams have, a request has --

END = {"logit_bias": {"2": 100}, "min_tokens": 3, "temperature": 0}  # EOS after three tokens
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"seed": 3},
    "several": {"n": 3, "seed": 3},
    "top_k": {"top_k": 2, "temperature": 2.0, "seed": 1},
    "top_p": {"top_p": 0.5, "seed": 1},
    "min_p": {"min_p": 0.2, "temperature": 2.0, "seed": 1},
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0},
    "repetition": {"repetition_penalty": 1.7, "temperature": 0},
    "logit_bias": {"logit_bias": {"300": 50, "301": 49}, "temperature": 0},
    "allowed_token_ids": {"allowed_token_ids": [300, 301, 302], "seed": 2},
    "bad_words": {"bad_words": ["was", "there"], "temperature": 0},
    "stop": {"stop": "was", "temperature": 0},
    "stops": {"stop": ["xyz", "as"], "temperature": 0, "include_stop_str_in_output": True},
    "min_tokens": {"stop": ["a"], "min_tokens": 6, "temperature": 0},
    "stop_token_ids": {"stop_token_ids": [317, 495, 496], "temperature": 0},
    "end": END,
    "past the end": {**END, "ignore_eos": True},
    "special tokens": {**END, "skip_special_tokens": False},
    "one token": {"max_tokens": 1, "temperature": 0},
    "logprobs": {"logprobs": 3, "temperature": 0},
}


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    given = {"max_tokens": 8, **options}
    bias = given.pop("logit_bias", None)
    ids = None if bias is None else {int(key): value for key, value in bias.items()}
    return SamplingParams(**given, logit_bias=ids)


def join(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The choices of a stream: text, token ids, how each ended."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            whole = choices.setdefault(choice.index, {"text": "", "token_ids": []})
            assert "finish_reason" not in whole, "a chunk after the last"
            whole["text"] += text
            whole["token_ids"] += getattr(choice, "token_ids", None) or []
            if choice.finish_reason is not None:
                whole["finish_reason"] = choice.finish_reason
                whole["stop_reason"] = choice.stop_reason
    return choices


def expected(outputs: Any) -> dict[int, dict[str, Any]]:
    """What LLM gives, in the same form."""
    completions = [completion for output in outputs for completion in output.outputs]
    names = ("text", "token_ids", "finish_reason", "stop_reason")
    return {i: {name: getattr(c, name) for name in names} for i, c in enumerate(completions)}


@pytest.mark.parametrize("name", OPTIONS)
def test_completions_are_those_of_generate(client: OpenAI, demo_llm: LLM, name: str) -> None:
    options = {"max_tokens": 8, **OPTIONS[name]}
    prompts = [STORY, "A dog"]
    ours = expected(demo_llm.generate(prompts, sampling_params(options), use_tqdm=False))
    extra = {"extra_body": {**options, "return_token_ids": True}}
    answer = client.completions.create(model="demo", prompt=prompts, **extra)
    assert join([answer]) == ours
    stream = client.completions.create(model="demo", prompt=prompts, stream=True, **extra)
    assert join(list(stream)) == ours
    assert answer.usage.completion_tokens == sum(len(each["token_ids"]) for each in ours.values())


CHAT_OPTIONS = ["greedy", "several", "penalties", "logit_bias", "stop", "end", "special tokens"]


@pytest.mark.parametrize("name", CHAT_OPTIONS)
def test_chats_are_those_of_chat(client: OpenAI, demo_llm: LLM, name: str) -> None:
    options = {"max_tokens": 8, **OPTIONS[name]}
    ours = expected(demo_llm.chat(MESSAGES, sampling_params(options), use_tqdm=False))
    extra = {"extra_body": {**options, "return_token_ids": True}}
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, **extra)
    choices = {choice.index: choice for choice in answer.choices}
    assert {i: choice.message.content for i, choice in choices.items()} == {
        i: each["text"] for i, each in ours.items()
    }
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert [choice.finish_reason for choice in answer.choices] == [
        each["finish_reason"] for each in ours.values()
    ]
    stream = list(
        client.chat.completions.create(model="demo", messages=MESSAGES, stream=True, **extra)
    )
    assert join(stream) == ours
    firsts = stream[: len(ours)]
    assert [chunk.choices[0].delta.role for chunk in firsts] == ["assistant"] * len(ours)
    assert len({chunk.id for chunk in stream}) == 1


@pytest.mark.parametrize(
    "prompt", [STORY, [495, 496, 260], [STORY], [[495, 496, 260], [260]], ["A dog", STORY]]
)
def test_each_form_of_prompt(client: OpenAI, demo_llm: LLM, prompt: Any) -> None:
    """Prompt i and its completion j are choice i * n + j."""
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    params = SamplingParams(n=2, seed=1, max_tokens=5)
    outputs = demo_llm.generate([prompt] if is_one else prompt, params, use_tqdm=False)
    texts = [completion.text for output in outputs for completion in output.outputs]
    answer = client.completions.create(model="demo", prompt=prompt, n=2, seed=1, max_tokens=5)
    assert [choice.index for choice in answer.choices] == list(range(len(texts)))
    assert [choice.text for choice in answer.choices] == texts
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + len(texts) * 5


def test_the_model_recommends_what_a_request_leaves_out(
    server: Running, async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """generation_config.json: also how long a chat may be; a completion has 16 tokens."""
    given = {"temperature": 0.0, "max_new_tokens": 4}
    defaults = async_llm.model_config.generation_defaults
    greedy = {path: ask(server, path, {**body, "temperature": 0}) for path, body in BOTH.items()}
    for key, value in given.items():
        monkeypatch.setitem(defaults, key, value)
    for path, body in BOTH.items():
        answers = [ask(server, path, body) for _ in range(2)]
        expected_tokens = 16 if path == C else 4
        assert answers[0]["choices"] == answers[1]["choices"]
        assert answers[0]["usage"]["completion_tokens"] == expected_tokens
        assert text_of(greedy[path]).startswith(text_of(answers[0]))
    assert (
        ask(server, H, {**BOTH[H], "max_completion_tokens": 2, "max_tokens": 7})["usage"][
            "completion_tokens"
        ]
        == 2
    )


BOTH: dict[str, dict[str, Any]] = {C: {"prompt": STORY}, H: {"messages": MESSAGES}}


def text_of(answer: Any, index: int = 0) -> str:
    choice = answer["choices"][index]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_a_chat_without_a_limit_goes_to_its_end(client: OpenAI) -> None:
    end = {**END, "min_tokens": 20}
    answer = client.chat.completions.create(model="demo", messages=MESSAGES, extra_body=end)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 21


# -- logprobs --


def test_logprobs_of_a_completion(client: OpenAI, demo_llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=5, max_tokens=6, logprobs=2)
    [output] = demo_llm.generate(STORY, params, use_tqdm=False)
    [ours] = output.outputs
    found = (
        client.completions.create(model="demo", prompt=STORY, seed=5, max_tokens=6, logprobs=2)
        .choices[0]
        .logprobs
    )
    own = [named[token_id] for named, token_id in zip(ours.logprobs, ours.token_ids, strict=True)]
    assert found.tokens == [each.decoded_token for each in own]
    assert found.token_logprobs == pytest.approx([each.logprob for each in own])
    assert "".join(found.tokens) == ours.text
    for start, text in zip(found.text_offset, found.tokens, strict=True):
        assert ours.text.startswith(text, start)
    for top, named in zip(found.top_logprobs, ours.logprobs, strict=True):
        assert top == pytest.approx({each.decoded_token: each.logprob for each in named.values()})


def test_logprobs_of_a_chat(client: OpenAI, demo_llm: LLM) -> None:
    """The top ones are the likeliest tokens, whichever was chosen."""
    params = SamplingParams(temperature=3, seed=5, max_tokens=6, logprobs=2)
    [output] = demo_llm.chat(MESSAGES, params, use_tqdm=False)
    [ours] = output.outputs
    ask = {"model": "demo", "messages": MESSAGES, "seed": 5, "temperature": 3, "max_tokens": 6}
    found = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    content = found.choices[0].logprobs.content
    for each, named, token_id in zip(content, ours.logprobs, ours.token_ids, strict=True):
        assert (each.token, each.logprob) == (
            named[token_id].decoded_token,
            pytest.approx(named[token_id].logprob),
        )
        assert bytes(each.bytes).decode() == each.token
        likeliest = sorted(named.values(), key=lambda logprob: logprob.rank)[:2]
        assert [top.token for top in each.top_logprobs] == [lp.decoded_token for lp in likeliest]
    chosen = [each.token for each in content]
    assert chosen != [each.top_logprobs[0].token for each in content], (
        "all tokens are the likeliest"
    )
    none = client.chat.completions.create(**ask, logprobs=True).choices[0].logprobs.content
    assert [(each.token, each.top_logprobs) for each in none] == [(text, []) for text in chosen]


def test_tokens_may_be_named_by_their_ids(server: Running) -> None:
    options = {"return_tokens_as_token_ids": True, "return_token_ids": True, "temperature": 0}
    choice = ask(server, C, {**BOTH[C], **options, "logprobs": 0})["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]
    choice = ask(server, H, {**BOTH[H], **options, "max_tokens": 4, "logprobs": True})["choices"][0]
    names = [each["token"] for each in choice["logprobs"]["content"]]
    assert names == [f"token_id:{each}" for each in choice["token_ids"]]


@pytest.mark.parametrize("prompt", [STORY, [495, 496, 260, 425]])
def test_echo_shows_the_prompt_and_its_logprobs(client: OpenAI, demo_llm: LLM, prompt: Any) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=1, prompt_logprobs=1)
    [output] = demo_llm.generate([prompt], params, use_tqdm=False)
    [ours] = output.outputs
    named = [*output.prompt_logprobs, *ours.logprobs]
    token_ids = [*output.prompt_token_ids, *ours.token_ids]
    values = [entry and entry[token].logprob for entry, token in zip(named, token_ids, strict=True)]
    for most in (0, 3):
        length = len(output.prompt_token_ids) + most
        answer = client.completions.create(
            model="demo", prompt=prompt, echo=True, max_tokens=most, logprobs=1, temperature=0
        )
        [choice] = answer.choices
        assert choice.text == STORY + (ours.text if most else "")
        assert choice.logprobs.token_logprobs == [
            value if value is None else pytest.approx(value, abs=1e-5) for value in values[:length]
        ]
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.top_logprobs[0] is None
        assert answer.usage.completion_tokens == most


def test_logprobs_of_the_prompt(server: Running, demo_llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)
    [output] = demo_llm.generate(STORY, params, use_tqdm=False)
    ours = [
        entry and {str(token): vars(logprob) for token, logprob in entry.items()}
        for entry in output.prompt_logprobs
    ]
    found = ask(server, C, {**BOTH[C], "prompt_logprobs": 1})["choices"][0]["prompt_logprobs"]
    assert found[0] is None
    assert [set(entry) for entry in found[1:]] == [set(entry) for entry in ours[1:]]
    [first] = [entry for key, entry in found[1].items() if entry["rank"] == 1]
    assert set(first) == {"logprob", "rank", "decoded_token"}
    assert first["decoded_token"] == " upon"
    found = ask(server, H, {**BOTH[H], "max_tokens": 1, "prompt_logprobs": 0})
    assert len(found["prompt_logprobs"]) == found["usage"]["prompt_tokens"]


# -- several completions --


def test_best_of_gives_the_likeliest(client: OpenAI, demo_llm: LLM) -> None:
    params = SamplingParams(n=6, seed=2, temperature=2, max_tokens=6, logprobs=0)
    [output] = demo_llm.generate(STORY, params, use_tqdm=False)
    ranked = sorted(output.outputs, key=lambda each: each.cumulative_logprob, reverse=True)
    answer = client.completions.create(
        model="demo", prompt=STORY, n=2, best_of=6, seed=2, temperature=2, max_tokens=6
    )
    assert [choice.text for choice in answer.choices] == [each.text for each in ranked[:2]]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert ranked[:2] != output.outputs[:2], "the first two are the best: the test shows nothing"
    greedy = client.completions.create(model="demo", prompt=STORY, best_of=3, temperature=0)
    assert len(greedy.choices) == 1


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_beams_are_those_of_beam_search(
    server: Running, demo_llm: LLM, length_penalty: float
) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=length_penalty)
    outputs = demo_llm.beam_search([{"prompt": STORY}, {"prompt": "A dog"}], params)
    beams = [beam for output in outputs for beam in output.sequences]
    body = {"prompt": [STORY, "A dog"], "use_beam_search": True, "n": 3, "max_tokens": 8}
    body |= {"length_penalty": length_penalty, "return_token_ids": True, "logprobs": 1}
    answer = ask(server, C, body)
    choices = answer["choices"]
    assert [each["prompt_token_ids"] + each["token_ids"] for each in choices] == [
        beam.tokens for beam in beams
    ]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "length"}
    for choice, beam in zip(choices, beams, strict=True):
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(beam.cum_logprob)
        assert beam.text.startswith(choice["text"], len(beam.text) - len(choice["text"]))
    chat = {**BOTH[H], "use_beam_search": True, "n": 2, "max_tokens": 4}
    assert len(ask(server, H, chat)["choices"]) == 2


# -- streams --


def test_usage_comes_last_if_it_is_asked_for(client: OpenAI) -> None:
    for create, body in (
        (client.completions.create, {"prompt": [STORY, "A dog"]}),
        (client.chat.completions.create, {"messages": MESSAGES}),
    ):
        body |= {"model": "demo", "max_tokens": 5, "n": 2, "seed": 1}
        whole = create(**body)
        chunks = list(create(**body, stream=True, stream_options={"include_usage": True}))
        *others, last = chunks
        assert last.choices == []
        cached = whole.usage.prompt_tokens_details.cached_tokens
        assert last.usage.prompt_tokens_details.cached_tokens >= cached
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert getattr(last.usage, name) == getattr(whole.usage, name)
        assert not any(chunk.usage for chunk in others)
        assert last.system_fingerprint == whole.system_fingerprint
        assert not any(chunk.usage for chunk in create(**body, stream=True))


def test_usage_may_come_with_every_chunk(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in BOTH.items():
        more = {"n": 2, "seed": 1, "max_tokens": 6, "return_token_ids": True}
        *chunks, last = ask_stream(server, path, {**body, **more, "stream_options": options})
        so_far = {0: 0, 1: 0}
        for chunk in chunks:
            [choice] = chunk["choices"]
            so_far[choice["index"]] += len(choice.get("token_ids", []))
            assert chunk["usage"]["completion_tokens"] == so_far[choice["index"]]
            assert chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert last["usage"]["completion_tokens"] == sum(so_far.values()) == 12


def test_usage_of_a_chunk_is_that_of_its_prompt(server: Running) -> None:
    prompts = [[5] * 3, [6] * 9]
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": prompts, "n": 2, "seed": 1, "max_tokens": 3, "stream_options": options}
    *chunks, last = ask_stream(server, C, body)
    for chunk in chunks:
        [choice] = chunk["choices"]
        assert chunk["usage"]["prompt_tokens"] == len(prompts[choice["index"] // 2])
    assert last["usage"]["prompt_tokens"] == 12


def test_the_first_chunk_of_a_chat_has_its_prompt(server: Running) -> None:
    body = {**BOTH[H], "n": 2, "seed": 1, "return_token_ids": True, "return_prompt_text": True}
    whole = ask(server, H, body)
    first, *others = ask_stream(server, H, body)
    for name in ("prompt_token_ids", "prompt_text"):
        assert first[name] == whole[name]
        assert not any(name in chunk for chunk in others)


def test_cached_tokens_are_told(server: Running) -> None:
    body = {"prompt": [[7] * 40, [8] * 40], "max_tokens": 1, "cache_salt": "cached tokens"}
    first, second = (ask(server, C, body)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": 64}  # two blocks of each
    other = ask(server, C, {**body, "cache_salt": "another"})["usage"]
    assert other["prompt_tokens_details"] == {"cached_tokens": 0}


requests = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from([STORY, ["A dog", "One day"], [495, 496]]),
        "seed": st.integers(0, 5),
        "temperature": st.sampled_from([0.7, 1.5]),
        "max_tokens": st.integers(1, 12),
    },
    optional={
        "n": st.integers(1, 3),
        "echo": st.booleans(),
        "logprobs": st.integers(0, 3),
        "stop": st.lists(st.sampled_from(["a", " the", "was", "."]), max_size=3),
        "min_tokens": st.integers(0, 1),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
    },
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=requests)
def test_a_stream_is_the_answer_in_pieces(server: Running, body: dict[str, Any]) -> None:
    whole = ask(server, C, body)
    joined: dict[int, Any] = {}
    for chunk in ask_stream(server, C, body):
        [piece] = chunk["choices"]
        choice = joined.setdefault(piece["index"], piece)
        if choice is not piece:
            assert choice["finish_reason"] is None
            choice["text"] += piece["text"]
            for name in ("finish_reason", "stop_reason"):
                choice[name] = piece[name]
            if "token_ids" in piece:
                choice["token_ids"] += piece["token_ids"]
            for name, values in (piece["logprobs"] or {}).items():
                choice["logprobs"][name] += values
    assert is_same([joined[index] for index in sorted(joined)], whole["choices"])


def is_same(left: Any, right: Any) -> bool:
    """Equal, but for the last digits of logprobs: a batch may be another."""
    if isinstance(left, float) and isinstance(right, float):
        return left == pytest.approx(right, abs=1e-3)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(is_same, left, right))
    return left == right


# -- conversations --


def prompt_of(server: Running, **body: Any) -> str:
    """The text that a conversation became."""
    answer = ask(
        server, H, {"messages": MESSAGES, "max_tokens": 1, "return_prompt_text": True, **body}
    )
    return answer["prompt_text"]


@pytest.mark.parametrize("role", ["system", "developer", "tool"])
def test_roles(client: OpenAI, role: str) -> None:
    messages = [*MESSAGES, {"role": role, "content": "Be brief.", "tool_call_id": "1"}]
    answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=2)
    assert answer.choices[0].message.content


def test_parts_of_a_message_are_joined(server: Running) -> None:
    parts = [{"type": "text", "text": "Tell me"}, {"type": "text", "text": "a story."}]
    joined = [{"role": "user", "content": "Tell me\na story."}]
    as_parts = [{"role": "user", "content": parts}]
    assert prompt_of(server, messages=as_parts) == prompt_of(server, messages=joined)


def test_a_conversation_may_hold_calls_of_tools(client: OpenAI) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "1"},
    ]
    answer = client.chat.completions.create(
        model="demo", messages=messages, tools=[TOOL], tool_choice="none", max_tokens=3
    )
    assert answer.choices[0].message.tool_calls is None


def test_what_reaches_the_template(server: Running) -> None:
    template = (
        "{% for tool in tools %}{{ tool.function.name }};{% endfor %}{{ mood }};"
        "{{ reasoning_effort }};{{ documents[0].title }};{{ add_generation_prompt }}"
    )
    given = {"chat_template_kwargs": {"mood": "calm"}, "reasoning_effort": "low"}
    given |= {
        "tools": [TOOL],
        "tool_choice": "none",
        "documents": [{"title": "Rain", "text": "wet"}],
    }
    found = prompt_of(server, chat_template=template, **given)
    assert found == "weather;calm;low;Rain;True"
    found = prompt_of(server, chat_template=template, **given, add_generation_prompt=False)
    assert found == "weather;calm;low;Rain;False"


def test_the_last_message_can_be_continued(server: Running, demo_llm: LLM) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once upon"}]
    params = SamplingParams(temperature=0, max_tokens=5)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    [output] = demo_llm.chat(messages, params, use_tqdm=False, **options)
    body = {"messages": messages, "continue_final_message": True, "temperature": 0, "max_tokens": 5}
    continuation = output.outputs[0].text
    assert text_of(ask(server, H, body)) == continuation
    whole = "Once upon" + continuation
    assert text_of(ask(server, H, {**body, "echo": True})) == whole
    chunks = ask_stream(server, H, {**body, "echo": True})
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == whole


def test_only_a_trusting_server_takes_templates(
    server: Running, async_llm: AsyncLLM, tmp_path: Any
) -> None:
    """And none of them the name of a file."""
    secret = tmp_path / "secret.jinja"
    secret.write_text("{{ 'secret' }}")
    ways: list[dict[str, Any]] = [
        {"chat_template": "{{ 1 + 1 }}"},
        {"chat_template_kwargs": {"chat_template": "{{ 1 + 1 }}"}},
    ]
    careful = build_app(async_llm)
    for way in ways:
        for path in (H, "/tokenize"):
            answer = asyncio.run(ask_app(careful, path, {**BOTH[H], **way}))
            assert answer.status_code == 400
            assert "--trust-request-chat-template" in answer.json()["error"]["message"]
        assert prompt_of(server, **way) == "2"
    error = refusal(server, H, {**BOTH[H], "chat_template": str(secret)})
    assert error["param"] == "chat_template"


async def ask_app(app: FastAPI, path: str, body: Any) -> httpx.Response:
    """A request without a socket."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(path, json=body)


# -- text and token ids --


def test_tokenize_and_detokenize(server: Running, demo_llm: LLM) -> None:
    tokenizer = demo_llm.get_tokenizer()
    ids = tokenizer.encode(STORY)
    found = ask(server, "/tokenize", {"prompt": STORY, "return_token_strs": True})
    strings = tokenizer.convert_ids_to_tokens(ids)
    max_model_len = demo_llm.engine.config.max_model_len
    assert found == {
        "count": len(ids),
        "max_model_len": max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }
    assert ask(server, "/detokenize", {"tokens": ids}) == {"prompt": STORY}
    found = ask(server, "/tokenize", {"messages": MESSAGES, "model": "demo"})
    text = ask(server, "/detokenize", {"tokens": found["tokens"]})["prompt"]
    assert text == prompt_of(server)
    assert found["token_strs"] is None
    assert ask(server, "/tokenize", {"prompt": ""})["tokens"] == []
    assert ask(server, "/tokenize", {"prompt": STORY * 5000})["count"] > max_model_len


# -- what is not served --

MISTAKES: list[tuple[str, dict[str, Any], str | None, str]] = [
    (C, {"prompt": None}, "prompt", "there is no prompt"),
    (C, {"prompt": None, "messages": []}, "prompt", "messages are for /v1/chat/completions"),
    (C, {"prompt": []}, "prompt", "0 prompts"),
    (C, {"prompt": {"prompt": "a"}}, None, "text or a list"),
    (C, {"prompt": [STORY, 7]}, None, "text or token ids"),
    (C, {"prompt": [STORY, {"prompt": "a"}]}, None, "text or token ids"),
    (C, {"prompt": ["a"] * 1025}, "prompt", "1 to 1024"),
    (C, {"prompt": [5000]}, None, "out of range"),
    (C, {"prompt": [-1], "echo": True}, None, "-1"),
    (C, {"prompt": [260] * 3000}, None, "max_model_len"),
    (C, {"prompt": [STORY, ""]}, None, "the prompt is empty"),
    (C, {"max_tokens": 0}, "max_tokens", "0 with echo"),
    (C, {"max_tokens": -3, "echo": True}, "max_tokens", "1 or more"),
    (C, {"max_tokens": "5"}, "max_tokens", "valid integer"),
    (C, {"suffix": "the end"}, "suffix", "fills in the middle"),
    (C, {"logits_processors": ["x"]}, "logits_processors", "no functions of its clients"),
    (C, {"best_of": 1, "n": 2}, "best_of", "n (2) or more"),
    (C, {"best_of": 3, "stream": True}, "best_of", "if stream is true"),
    (C, {"bad_words": [f"{i:3000}" for i in range(11)]}, "bad_words", "allowed: 32768"),
    (C, {"logprobs": 1000}, None, "logprobs is 1000"),
    (C, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "if stream"),
    (C, {"use_beam_search": True, "stream": True}, "stream", "not with use_beam_search"),
    (C, {"use_beam_search": True, "stop": ["a"]}, "stop", "not with use_beam_search"),
    (C, {"use_beam_search": True, "echo": True, "logprobs": 1}, "echo", "use_beam_search"),
    (C, {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "never cut"),
    (C, {"prompt_embeds": "AAAA"}, "prompt_embeds", "text and token ids only"),
    (C, {"guided_json": {}}, "guided_json", "structured_outputs; use that"),
    (C, {"thinking_token_budget": 5}, "thinking_token_budget", "does not have it"),
    (C, {"temprature": 0.1}, "temprature", "Did you mean 'temperature'?"),
    (C, {"maxTokens": 5}, "maxTokens", "Did you mean 'max_tokens'?"),
    (C, {f"field {i}": 1 for i in range(99)}, "field 0", "99 fields are not known"),
    (C, {"stream_options": {"include_usage": True}}, "stream_options", "stream=true only"),
    (C, {"stream": True, "stream_options": {"includeUsage": True}}, "includeUsage", "Did you"),
    (C, {"temperature": -1}, "temperature", "0 (greedy)"),
    (C, {"logit_bias": {"one": 1}}, "logit_bias", "token id"),
    (C, {"stop": 5}, None, "stop must be"),
    (C, {"priority": 2**70}, "priority", "2**63"),
    (C, {"cache_salt": ""}, None, "cache_salt"),
    (C, {"vllm_xargs": [1]}, None, "extra_args must be a dict"),
    (H, {"messages": None}, None, "a conversation is a list"),
    (H, {"messages": []}, None, "a conversation is a list"),
    (H, {"messages": [*MESSAGES, {"content": "a"}]}, "messages", "messages[1] has no role"),
    (H, {"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens", "1 or more"),
    (H, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type", "text parts"),
    (H, {"top_logprobs": 1}, "top_logprobs", "unless logprobs"),
    (H, {"logprobs": 2}, "logprobs", "valid boolean"),
    (H, {"functions": [{"name": "weather"}]}, "functions", "tools"),
    (H, {"modalities": ["audio"]}, "modalities", "text only"),
    (
        H,
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "exclude each other",
    ),
    (H, {"chat_template_kwargs": [1]}, None, "must be an object"),
    (H, {"chat_template_kwargs": {"messages": []}}, None, "holds 'messages'"),
    (H, {"chat_template_kwargs": {"documents": 5}}, None, "documents must be"),
    (H, {"chat_template": "{{ raise }"}, None, "chat template"),
    ("/tokenize", {}, "prompt", "either prompt"),
    ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt", "either prompt"),
    ("/detokenize", {}, "tokens", "required"),
    ("/detokenize", {"tokens": ["a"]}, None, "token ids must be ints"),
    *(("/detokenize", {"tokens": [each]}, None, "out of range") for each in (-1, 5000, 2**80)),
]


@pytest.mark.parametrize(("path", "mistake", "param", "words"), MISTAKES)
def test_mistakes_are_told(
    server: Running, path: str, mistake: dict[str, Any], param: str | None, words: str
) -> None:
    error = refusal(server, path, {**BOTH.get(path, {}), **mistake})
    assert words in error["message"]
    assert error["param"] == param


def test_fields_that_change_nothing_are_accepted(client: OpenAI) -> None:
    extra = {"safety_identifier": "x", "kv_transfer_params": None, "suffix": "", "min_p": None}
    client.completions.create(
        model="demo", prompt=STORY, user="Ada", extra_body={**extra, "typical_p": 0.5, "tfs": 1}
    )
    client.chat.completions.create(
        model="demo",
        messages=MESSAGES,
        user="Ada",
        metadata={"a": "b"},
        store=False,
        response_format={"type": "text"},
        parallel_tool_calls=True,
        modalities=["text"],
        max_tokens=1,
    )


def test_one_bad_prompt_refuses_all(server: Running, ended: list[str | None]) -> None:
    """Those before it are queued already: they are aborted."""
    body = {"prompt": [STORY, STORY, [5000]], **LONG}
    assert "out of range" in refusal(server, C, body)["message"]
    assert "out of range" in refusal(server, C, {**body, "stream": True})["message"]
    until(lambda: ended == ["abort"] * 4)


NO_TOKEN = {"allowed_token_ids": [260], "bad_words": ["a"], "max_tokens": 5}


@pytest.mark.parametrize("path", [C, H])
def test_a_failed_request_is_a_500(server: Running, path: str) -> None:
    body = {**BOTH[path], **NO_TOKEN}
    error = refusal(server, path, body, status=500)
    assert error["type"] == "InternalServerError"
    assert "bad_words forbid all tokens" in error["message"]
    chunks = ask_stream(server, path, body)
    assert chunks[-1] == {"error": error}
    assert text_of(ask(server, path, {**BOTH[path], "max_tokens": 3})), "others are served"


def test_a_failed_prompt_ends_the_others(
    server: Running, async_llm: AsyncLLM, ended: list[str | None]
) -> None:
    make = async_llm.engine.make_request

    def make_bad(request_id: str, prompt: Any, *rest: Any) -> Any:
        request = make(request_id, prompt, *rest)
        if request_id.endswith("-1"):
            request.process = lambda updates: 1 / 0  # type: ignore[method-assign]
        return request

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_llm.engine, "make_request", make_bad)
        body = {"prompt": [STORY, "A dog", "One day"], **LONG}
        chunks = ask_stream(server, C, body)
        assert "division by zero" in chunks[-1]["error"]["message"]
        error = refusal(server, C, body, status=500)
        assert "division by zero" in error["message"]
    until(lambda: sorted(map(str, ended)) == ["abort"] * 4 + ["error"] * 2)


def test_a_prompt_that_fails_cancels_the_beams_of_the_others(
    server: Running, async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, cancelled = asyncio.Event(), threading.Event()

    async def search(prompt: Any, params: BeamSearchParams, **_: Any) -> Any:
        if prompt["prompt_token_ids"] == [6]:
            await asyncio.wait_for(begun.wait(), PATIENCE)
            raise ValueError("no beams")
        try:
            begun.set()
            await asyncio.sleep(PATIENCE)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    monkeypatch.setattr(async_llm, "beam_search", search)
    body = {"prompt": [[5], [6]], "use_beam_search": True, "n": 2}
    assert refusal(server, C, body)["message"] == "no beams"
    assert cancelled.wait(PATIENCE / 2)


# -- clients that go away --


@pytest.mark.parametrize("path", [C, H])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_requests(
    server: Running, async_llm: AsyncLLM, ended: list[str | None], path: str, stream: bool
) -> None:
    body = {**BOTH[path], **LONG, "stream": stream}
    num_prompts = 1
    if path == C:
        body["prompt"] = [STORY, "A dog"]
        num_prompts = 2
    with server.connect() as sock:
        sock.sendall(request("POST", path, body))
        if stream:
            assert b"data: " in sock.makefile("rb").read(400)
        until(lambda: async_llm.get_num_unfinished_requests() == num_prompts)
        until(lambda: async_llm.engine.scheduler.running)
    until(lambda: ended == ["abort"] * num_prompts)


def test_a_client_that_goes_away_aborts_its_beams(server: Running, async_llm: AsyncLLM) -> None:
    body = {**BOTH[C], "use_beam_search": True, "n": 2, **LONG}
    with server.connect() as sock:
        sock.sendall(request("POST", C, body))
        until(lambda: async_llm.engine.scheduler.running)
    until(lambda: not async_llm.engine.has_unfinished_requests())


# -- the state of the server --


def test_probes_and_numbers(server: Running) -> None:
    for path in ("/health", "/ping"):
        answer = server.ask("GET", path)
        assert (answer.status, answer.body) == (200, b"")
    assert server.ask("GET", "/version").json == {"version": nanoserve.__version__}
    assert server.ask("GET", "/load").json == {"server_load": 0}
    answer = server.ask("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert b'vllm:num_requests_running{engine="0",model_name="demo"} 0.0' in answer.body


def test_load_counts_what_is_being_served_and_health_tells_of_the_end() -> None:
    """On an engine that waits for a permit for each step."""
    model = engines.checkpoint(engines.VOCAB_SIZE, (engines.EOS,))
    args = EngineArgs(model=model, num_kv_blocks=64, block_size=4)
    with AsyncLLM(args, executor_cls=GatedExecutor) as llm, running(build_app(llm)) as server:
        answers: list[Any] = []
        body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
        thread = threading.Thread(target=lambda: answers.append(server.ask("POST", C, body)))
        thread.start()
        until(lambda: server.ask("GET", "/load").json == {"server_load": 1})
        llm.engine.executor.open()
        thread.join(PATIENCE)
        assert answers[0].status == 200
        assert answers[0].json["choices"][0]["text"] == "", "there is no tokenizer"
        assert server.ask("POST", C, {"prompt": "text"}).error["code"] == 400
        llm.shutdown()
        assert server.ask("GET", "/health").status == 503
        assert server.ask("GET", "/ping").status == 503
        assert server.ask("POST", C, body).error["code"] == 503


def test_an_id_of_the_client_is_kept(server: Running) -> None:
    answer = server.ask("POST", C, BOTH[C], {"X-Request-Id": "Ada"})
    assert answer.json["id"] == "cmpl-Ada"
    assert ask(server, H, {**BOTH[H], "max_tokens": 1, "request_id": "Bob"})["id"] == "chatcmpl-Bob"
    ids = {ask(server, C, BOTH[C])["id"] for _ in range(2)}
    assert len(ids) == 2


def test_clients_may_use_one_id_at_once(server: Running, async_llm: AsyncLLM) -> None:
    with server.connect() as one, server.connect() as two:
        for sock in (one, two):
            sock.sendall(request("POST", C, {**BOTH[C], **LONG, "request_id": "same"}))
        until(lambda: len(async_llm.engine.scheduler.running) == 2)


# -- shapes --


def test_answers_have_the_types_that_the_schema_says(
    server: Running,
) -> None:
    """Every key is declared."""
    completion = TypeAdapter(responses.CompletionResponse)
    chat = TypeAdapter(responses.ChatCompletionResponse)
    more = {"max_tokens": 3, "return_token_ids": True, "echo": True, "logprobs": 1}
    whole = ask(server, C, {**BOTH[C], **more, "prompt_logprobs": 1})
    completion.validate_python(whole, extra="forbid")
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    for chunk in ask_stream(server, C, {**BOTH[C], **more, **usage}):
        completion.validate_python(chunk, extra="forbid")
    more = {"max_tokens": 3, "return_token_ids": True, "logprobs": True, "top_logprobs": 1}
    more["return_prompt_text"] = True
    whole = ask(server, H, {**BOTH[H], **more, "prompt_logprobs": 1})
    chat.validate_python(whole, extra="forbid")
    for chunk in ask_stream(server, H, {**BOTH[H], **more, **usage}):
        chat.validate_python(chunk, extra="forbid")


def test_the_schema_describes_every_field(server: Running) -> None:
    schema = server.ask("GET", "/openapi.json").json
    assert "$defs" not in json.dumps(schema)
    for path, cls in (
        (C, protocol.CompletionRequest),
        (H, protocol.ChatCompletionRequest),
        ("/tokenize", protocol.TokenizeRequest),
        ("/detokenize", protocol.DetokenizeRequest),
    ):
        post = schema["paths"][path]["post"]
        body = post["requestBody"]["content"]["application/json"]["schema"]
        assert set(body["properties"]) == set(cls.model_fields)
        assert set(post["responses"]) == {"200", "4XX", "5XX"}


def test_lines_arrive_one_by_one(server: Running) -> None:
    url = f"http://127.0.0.1:{server.port}{C}"
    body = {**BOTH[C], "stream": True, "max_tokens": 4, "temperature": 0}
    with httpx.stream("POST", url, json=body, timeout=PATIENCE) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == text_of(ask(server, C, {**body, "stream": False}))
