"""Calls of tools and answers of a given form, asked by OpenAI's own client.

What the model writes is forced where a test needs to know it. Where a grammar forces it, the model
is free within the grammar, at a high temperature: whatever it writes must be valid.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import openai
import pytest
import torch
from fastapi import FastAPI
from openai import OpenAI
from pydantic import BaseModel, Field, TypeAdapter
from servers import Running, openai_client, running
from test_server_api import ask, ask_app, ask_stream, refusal, until

from nanoserve import EngineArgs
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.server import build_app, chat, protocol, responses
from nanoserve.extras.server.cli import make_parser, read_frontend
from nanoserve.extras.server.response_format import as_format, make_params

xgrammar = pytest.importorskip("xgrammar")

C, H = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Is it wet in Oslo?"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": MESSAGES}
WILD: dict[str, Any] = {"temperature": 1.5, "max_tokens": 80}
NO_SPACE = {"disable_any_whitespace": True}
CUT = 29  # tokens: within the arguments of CALL
COMPACT = {"structured_outputs": NO_SPACE}
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 20))]
CITIES = ["Oslo", "Lima", "New York"]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": CITIES},
                "days": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
COIN: dict[str, Any] = {"type": "function", "function": {"name": "toss"}}
COIN["function"]["parameters"] = {
    "type": "object",
    "properties": {"sides": {"enum": [1, 2]}},
    "required": ["sides"],
    "additionalProperties": False,
}
TOOLS = [WEATHER, COIN]
BY_NAME = {"type": "function", "function": {"name": "toss"}}
CALL = '<tool_call>\n{"name": "toss", "arguments": {"sides": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def async_llm() -> Iterator[AsyncLLM]:
    with AsyncLLM(EngineArgs(num_kv_blocks=512)) as llm:
        yield llm
        llm.engine.block_manager.check()


@pytest.fixture(scope="module")
def server(async_llm: AsyncLLM) -> Iterator[Running]:
    with running(build_app(async_llm, trust_request_chat_template=True)) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with openai_client(server) as one:
        yield one


@pytest.fixture(autouse=True)
def idle(server: Running, async_llm: AsyncLLM) -> Iterator[None]:
    yield
    until(lambda: not async_llm.engine.has_unfinished_requests())


@pytest.fixture
def says(async_llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """says(text): the model writes this text, and ends (or goes on as it likes)."""
    make = protocol.GenerationRequest.to_sampling_params

    def force(text: str, goes_on: bool = False) -> None:
        ids = [*async_llm.tokenizer.encode(text, add_special_tokens=False), *[2] * (not goes_on)]

        def write(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_token_ids) >= len(ids):
                return logits
            forced = torch.full_like(logits, -torch.inf)
            forced[ids[len(output_token_ids)]] = 0
            return forced

        def to_sampling_params(*args: Any) -> Any:
            params = make(*args)
            params.logits_processors = [write]
            return params

        monkeypatch.setattr(protocol.GenerationRequest, "to_sampling_params", to_sampling_params)

    return force


def answer(client: OpenAI, **body: Any) -> list[Any]:
    """The choices of an answer; those of the same as a stream are the same, but for ids."""
    choices = client.chat.completions.create(**CHAT, **body).choices
    if "seed" in body or body.get("temperature") == 0:
        chunks = client.chat.completions.create(**CHAT, **body, stream=True)
        assert join(chunks) == {each.index: plain(each) for each in choices}
    return choices


Said = tuple[str | None, str | None, list[list[str]]]  # finish_reason, content, calls


def plain(choice: Any) -> Said:
    """What a choice says, without ids."""
    calls = choice.message.tool_calls or []
    functions = [[each.type, each.function.name, each.function.arguments] for each in calls]
    assert all(each.id for each in calls)
    return choice.finish_reason, choice.message.content, functions


def join(chunks: Any) -> dict[int, Said]:
    """What the choices of a stream say."""
    said: dict[int, Said] = {}
    for choice in (each for chunk in chunks for each in chunk.choices):
        reason, content, calls = said.get(choice.index, (None, None, []))
        assert reason is None, "a chunk after the last"
        delta = choice.delta
        for each in delta.tool_calls or []:
            if each.id is not None:
                assert each.index == len(calls)
                calls.append([each.type, each.function.name, ""])
            calls[each.index][2] += each.function.arguments
        if delta.content is not None:
            content = (content or "") + delta.content
        said[choice.index] = choice.finish_reason, content, calls
    return said


def check_weather(arguments: str) -> None:
    found = json.loads(arguments)
    assert set(found) == {"city", "days"}
    assert found["city"] in CITIES and isinstance(found["days"], int) and found["days"] <= 99


def check_call(call: Any) -> None:
    """A call of one of TOOLS, with arguments that it takes."""
    if call.function.name == "weather":
        check_weather(call.function.arguments)
    else:
        assert call.function.name == "toss"
        assert json.loads(call.function.arguments) in [{"sides": 1}, {"sides": 2}]


# -- the model chooses --

WRITTEN: dict[str, tuple[str, str | None, list[str]]] = {
    "text": ("I do not know.", "I do not know.", []),
    "a call": (CALL, None, ['{"sides": 1}']),
    "both": (f"Let me look.\n{CALL}", "Let me look.", ['{"sides": 1}']),
    "no JSON": ("<tool_call>\nlook\n</tool_call>", "<tool_call>\nlook\n</tool_call>", []),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_model_may_call(client: OpenAI, says: Callable[..., None], name: str) -> None:
    text, content, arguments = WRITTEN[name]
    says(text)
    given = {"tool_choice": "auto"} if name == "both" else {}  # it is the default
    [found] = answer(client, tools=TOOLS, temperature=0, **given)
    assert found.message.content == content
    calls = found.message.tool_calls or []
    assert [(each.function.name, each.function.arguments) for each in calls] == [
        ("toss", each) for each in arguments
    ]
    assert found.finish_reason == ("tool_calls" if arguments else "stop")


def test_none_finds_no_call(client: OpenAI, says: Callable[..., None]) -> None:
    says(CALL)
    [found] = answer(client, tools=TOOLS, tool_choice="none", temperature=0)
    assert found.message.content == CALL
    assert found.message.tool_calls is None
    assert found.finish_reason == "stop"


def test_one_call_at_most(client: OpenAI, says: Callable[..., None]) -> None:
    says(f"{CALL}\n{CALL}")
    [found] = answer(client, tools=TOOLS, parallel_tool_calls=False, temperature=0)
    assert len(found.message.tool_calls) == 1


def test_a_call_that_is_cut_off(client: OpenAI, says: Callable[..., None]) -> None:
    """The finish_reason says so, as OpenAI's does."""
    says(CALL)
    [found] = answer(client, tools=TOOLS, max_tokens=CUT, temperature=0)
    assert found.finish_reason == "length"
    [call] = found.message.tool_calls
    assert '{"sides": 1}'.startswith(call.function.arguments)
    assert call.function.arguments


def test_arguments_are_streamed_as_they_come(server: Running, says: Callable[..., None]) -> None:
    says(f"Ah. {CALL}")
    chunks = ask_stream(server, H, {**CHAT, "tools": TOOLS})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert all(deltas[:-1]), "a chunk without news"
    calls = [each for delta in deltas for each in delta.get("tool_calls", [])]
    assert set(calls[0]) == {"index", "id", "type", "function"}
    assert calls[0]["function"]["name"] == "toss"
    assert len(calls) > 4
    assert all(set(each) == {"index", "function"} for each in calls[1:])
    checked = TypeAdapter(responses.ChatCompletionResponse)
    for chunk in [*chunks, ask(server, H, {**CHAT, "tools": TOOLS})]:
        checked.validate_python(chunk, extra="forbid")


def test_each_token_has_its_logprobs(server: Running, says: Callable[..., None]) -> None:
    """Also a token that says nothing yet."""
    says(CALL)
    body = {**CHAT, "tools": TOOLS, "logprobs": True, "stream_options": {"include_usage": True}}
    *chunks, last = ask_stream(server, H, body)
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    tokens = [each["token"] for part in found if part for each in part["content"]]
    assert len(tokens) == last["usage"]["completion_tokens"]
    assert "".join(tokens[:-1]) == CALL


def test_a_strict_tool_is_called_as_it_says(client: OpenAI, says: Callable[..., None]) -> None:
    """If it is called at all."""
    tools = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]
    [found] = answer(client, tools=tools, temperature=0, max_tokens=5)
    assert found.message.content
    says("Ah. <tool_call>", goes_on=True)
    [found] = answer(client, tools=tools, temperature=0, max_tokens=80)
    [call] = found.message.tool_calls
    check_weather(call.function.arguments)


# -- the model must call --


@pytest.mark.parametrize("seed", SEEDS)
def test_a_required_call_is_one(client: OpenAI, seed: int) -> None:
    choices = answer(client, tools=TOOLS, tool_choice="required", n=2, seed=seed, **WILD)
    assert len(choices) == 2
    for choice in choices:
        is_cut = choice.finish_reason == "length"
        assert is_cut or choice.finish_reason == "tool_calls"
        assert is_cut or choice.message.content is None
        calls = choice.message.tool_calls
        for call in calls[:-1] if is_cut else calls:
            check_call(call)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_required_call(client: OpenAI, seed: int) -> None:
    given = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    [choice] = answer(client, seed=seed, **given, **WILD)
    [call] = choice.message.tool_calls
    check_call(call)
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_function_that_is_named_is_called_once(client: OpenAI, seed: int) -> None:
    """The finish_reason is "stop" then, in OpenAI's API, too."""
    [choice] = answer(client, tools=TOOLS, tool_choice=BY_NAME, seed=seed, **WILD)
    [call] = choice.message.tool_calls
    assert call.function.name == "toss"
    check_call(call)
    assert choice.finish_reason == "stop"


def test_a_schema_that_no_backend_knows(server: Running) -> None:
    """It cannot be followed, so that the request is refused, unless that is not asked for."""
    function = {"name": "f", "parameters": {"type": "object", "not": {}}}
    body = {**CHAT, "tools": [{"function": function}], "max_tokens": 40}
    ask(server, H, body)  # it may be called as the model likes
    error = refusal(server, H, {**body, "tool_choice": "required"})
    assert error["param"] == "tools"
    assert error["message"].endswith(
        'With "strict": false the arguments of a function are any object.'
    )
    function["strict"] = False
    found = ask(server, H, {**body, "tool_choice": "required"})
    assert found["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_a_conversation_with_a_tool(client: OpenAI, async_llm: AsyncLLM) -> None:
    """The call and its result reach the template as the model has written the call."""
    given = {"tools": TOOLS, "extra_body": {"return_prompt_text": True}}
    first = client.chat.completions.create(**CHAT, **given, tool_choice=BY_NAME, **WILD)
    message = first.choices[0].message
    [call] = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "heads"}
    messages = [*MESSAGES, message, result]
    second = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=3, tool_choice="none", **given
    )
    assert second.choices[0].message.content
    history = second.prompt_text.partition("Is it wet")[2]
    arguments = json.dumps(json.loads(call.function.arguments))
    assert f'{{"name": "toss", "arguments": {arguments}}}\n</tool_call>' in history
    assert "<|im_start|>tool\nheads<|im_end|>" in history


# -- answers of a given form --


class Visit(BaseModel):
    city: Literal["Oslo", "Lima", "New York"]
    days: int = Field(ge=0, le=99)


FORMS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "json_schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "visit", "schema": WEATHER["function"]["parameters"]},
            },
            **COMPACT,
        },
        check_weather,
    ),
    "structural_tag": (
        {
            "response_format": {
                "type": "structural_tag",
                "format": {"type": "const_string", "value": "Oslo"},
            }
        },
        lambda text: text == "Oslo" or pytest.fail(text),
    ),
    "json as text": (
        {"structured_outputs": {"json": json.dumps(Visit.model_json_schema()), **NO_SPACE}},
        check_weather,
    ),
    "regex": ({"structured_outputs": {"regex": "[0-9]{3}"}}, int),
    "choice": (
        {"structured_outputs": {"choice": CITIES}},
        lambda text: text in CITIES or pytest.fail(text),
    ),
    "grammar": (
        {"structured_outputs": {"grammar": 'root ::= "Oslo" | "Lima"'}},
        lambda text: text in CITIES or pytest.fail(text),
    ),
}


@pytest.mark.parametrize(
    ("path", "name"), [(C, "json_schema"), (C, "regex"), *((H, name) for name in FORMS)]
)
def test_answers_have_the_form_that_was_asked_for(server: Running, path: str, name: str) -> None:
    form, check = FORMS[name]
    prompt: dict[str, Any] = {"prompt": "Once"} if path == C else {"messages": MESSAGES}
    found = ask(server, path, {**prompt, **WILD, **form, "n": 2})
    for choice in found["choices"]:
        assert choice["finish_reason"] == "stop"
        check(choice["text"] if path == C else choice["message"]["content"])


OLDER = {
    "type": "structural_tag",
    "triggers": ["<n"],
    "structures": [{"begin": "<n>", "schema": {"enum": [1, 2]}, "end": "</n>"}],
}


def test_the_older_structural_tag(server: Running, says: Callable[..., None]) -> None:
    says("A <n", goes_on=True)
    found = ask(server, H, {**CHAT, **WILD, "response_format": OLDER, "max_tokens": 20})
    assert re.match("A <n>[12]</n>", found["choices"][0]["message"]["content"])


def test_any_json_object(server: Running, says: Callable[..., None]) -> None:
    """A model that knows no end writes as long as it may."""
    form = {"response_format": {"type": "json_object"}}
    found = ask(server, H, {**CHAT, **WILD, **form, "max_tokens": 20})
    assert found["choices"][0]["message"]["content"].lstrip()[0] == "{"
    says('{"a": [1]}')
    found = ask(server, H, {**CHAT, **form})
    assert json.loads(found["choices"][0]["message"]["content"]) == {"a": [1]}


def test_parse_makes_objects(client: OpenAI) -> None:
    """The client's own helpers: of a class, of tools that are classes."""
    found = client.chat.completions.parse(**CHAT, response_format=Visit, extra_body=COMPACT, **WILD)
    assert isinstance(found.choices[0].message.parsed, Visit)
    tool = openai.pydantic_function_tool(Visit, name="visit")
    given = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    found = client.chat.completions.parse(**CHAT, **given, **WILD)
    [call] = found.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Visit)
    with client.chat.completions.stream(**CHAT, **given, **WILD) as stream:
        kinds = {event.type for event in stream}
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["json_schema", "regex"])
def test_a_call_or_an_answer_of_a_form(client: OpenAI, name: str, seed: int) -> None:
    form, check = FORMS[name]
    tools = [{**each, "function": {**each["function"], "strict": True}} for each in TOOLS]
    given = {"tools": tools, "parallel_tool_calls": False, "extra_body": form}
    [choice] = answer(client, seed=seed, **given, **WILD)
    if choice.finish_reason == "tool_calls":
        [call] = choice.message.tool_calls
        check_call(call)
        assert choice.message.content is None
    else:
        check(choice.message.content)


def test_the_parts_of_a_structural_tag() -> None:
    """Each constraint of StructuredOutputsParams is one."""
    given: list[tuple[dict[str, Any], str]] = [
        ({"json": {}}, "json_schema"),
        ({"json": "{}"}, "json_schema"),
        ({"json_object": True}, "json_schema"),
        ({"regex": "a"}, "regex"),
        ({"choice": ["a"]}, "or"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"structural_tag": json.dumps(OLDER)}, "triggered_tags"),
        ({"structural_tag": json.dumps({"type": "structural_tag", "format": {"type": "x"}})}, "x"),
    ]
    for form, kind in given:
        assert as_format(make_params(form))["type"] == kind


# -- the server's options --


def make_request(**body: Any) -> Any:
    return protocol.read_request(
        protocol.ChatCompletionRequest, json.dumps({**CHAT, **body}).encode()
    )


def choose(template: str | None = None, tool_choice: Any = None, **options: Any) -> Any:
    """The parser, for a tokenizer with this template."""
    args = build_args(**options)
    llm = SimpleNamespace(chat_template=None, tokenizer=SimpleNamespace(chat_template=template))
    state: Any = SimpleNamespace(args=args, async_llm=llm)
    return chat.choose_tool_parser(state, make_request(tools=TOOLS, tool_choice=tool_choice))


def build_args(**options: Any) -> Any:
    from nanoserve.extras.server.options import FrontendArgs

    return FrontendArgs(**options)


def test_a_model_without_a_known_format() -> None:
    for choice in (None, "auto", "required", BY_NAME):
        with pytest.raises(ValueError, match="start the server with --tool-call-parser"):
            choose("{{ messages }}", choice)
        assert choose("{{ messages }}", choice, tool_call_parser="hermes")
        assert choose(None, choice, tool_call_parser="qwen3_json")
    assert choose("{{ messages }}", "none") is None


def test_auto_can_be_refused() -> None:
    for choice in (None, "auto"):
        with pytest.raises(ValueError, match="no tool_choice 'auto'"):
            choose(None, choice, tool_call_parser="hermes", enable_auto_tool_choice=False)
    assert choose(None, "required", tool_call_parser="hermes", enable_auto_tool_choice=False)


def test_vllms_flags() -> None:
    parser = make_parser()
    words = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    args = read_frontend(parser, parser.parse_args(words))
    assert (args.enable_auto_tool_choice, args.tool_call_parser) == (True, "hermes")
    assert read_frontend(parser, parser.parse_args([])).tool_call_parser is None
    with pytest.raises(ValueError, match="tool_call_parser is 'pythonic'; allowed: None, hermes"):
        build_args(tool_call_parser="pythonic")


def test_tools_can_be_kept_from_the_template(async_llm: AsyncLLM) -> None:
    body = {**CHAT, "tools": TOOLS, "tool_choice": "none"}
    body |= {"max_tokens": 1, "return_prompt_text": True}
    for excluded in (False, True):
        app = build_app(async_llm, exclude_tools_when_tool_choice_none=excluded)
        found = post(app, H, body)
        assert ("weather" in found["prompt_text"]) is not excluded
        assert (
            len(found["prompt_token_ids"]) == post(app, "/tokenize", only_messages(body))["count"]
        )


def only_messages(body: dict[str, Any]) -> dict[str, Any]:
    return {name: body[name] for name in ("messages", "tools", "tool_choice")}


def post(app: FastAPI, path: str, body: dict[str, Any]) -> Any:
    found = asyncio.run(
        ask_app(app, path, {**body, "return_token_ids": True} if path == H else body)
    )
    assert found.status_code == 200, found.text
    return found.json()


def test_special_tags_stay_in_the_text(async_llm: AsyncLLM) -> None:
    """In some tokenizers <tool_call> is a special token."""
    request, reply = make_request(tools=TOOLS), None
    for special in (False, True):
        added = {7: SimpleNamespace(content="<tool_call>", special=special)}
        app = build_app(async_llm)
        reply = chat.ChatReply(app.state.server, request)
        reply.tokenizer = SimpleNamespace(added_tokens_decoder=added)
        asyncio.run(reply.make_prompts())
        assert request.skip_special_tokens is not special


# -- what is refused --

SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
BAD_FORMATS: list[tuple[Any, str]] = [
    (7, "'json_object'"),
    ({}, "'json_object'"),
    ({"type": "xml"}, "'json_object'"),
    ({"type": "json_schema"}, "'schema'"),
    ({"type": "json_schema", "json_schema": {"schema": {}}}, "json_schema.name is None"),
    ({"type": "json_schema", "json_schema": {"name": "a"}}, "json_schema.schema is None"),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}}, "as an object"),
    (
        {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": 1}},
        "json_schema.strict is 1",
    ),
    ({"type": "structural_tag"}, "'format'"),
    ({"type": "structural_tag", "structures": []}, "'triggers'"),
]
BAD_TOOLS: list[tuple[Any, str]] = [
    ([], "at least one tool"),
    ([7], "'function'"),
    ([{"name": "weather"}], "'function'"),
    ([{"type": "custom", "custom": {"name": "a"}}], "'function'"),
    ([{"type": "custom", "function": {"name": "a"}}], "'function'"),
    ([{"function": {}}], "name of a function is None"),
    ([{"function": {"name": ""}}], "name of a function is ''"),
    ([{"function": {"name": "a", "parameters": []}}], "parameters of a function is []"),
    ([{"function": {"name": "a", "strict": "yes"}}], "strict of a function is 'yes'"),
    ([COIN, COIN], "two functions called 'toss'"),
]
NO_CHOICES = (7, "any", {}, {"type": "function"}, {"type": "function", "function": {}})
MISTAKES: list[tuple[dict[str, Any], str | None, str]] = [
    *(({"response_format": given}, "response_format", words) for given, words in BAD_FORMATS),
    *(({"tools": given}, "tools", words) for given, words in BAD_TOOLS),
    *(({"tools": TOOLS, "tool_choice": each}, None, "") for each in NO_CHOICES),
    (
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice",
        "'required' or {'type': 'function'",
    ),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
        "tool_choice",
        "a function of tools: ['weather', 'toss']",
    ),
    ({"tool_choice": "auto"}, "tool_choice", "without tools"),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    ({"tool_choice": BY_NAME}, "tool_choice", "without tools"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "boolean"),
    ({"structured_outputs": []}, None, "must be an object"),
    ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "a field 'regexp'; allowed"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", ""),
    ({"structured_outputs": {"disable_any_whitespace": True}}, "structured_outputs", ""),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": SCHEMA},
        "structured_outputs",
        "",
    ),
    ({"structured_outputs": {"regex": "("}}, None, ""),
    ({"structured_outputs": {"choice": []}}, None, ""),
    (
        {"structured_outputs": {"regex": "a"}, "tools": TOOLS, "tool_choice": "required"},
        "structured_outputs",
        "exclude each other",
    ),
    (
        {"structured_outputs": {"regex": "a"}, "use_beam_search": True},
        "structured_outputs",
        "not with use_beam_search",
    ),
    ({"response_format": SCHEMA, "use_beam_search": True}, "use_beam_search", "response_format"),
    (
        {"tools": TOOLS, "tool_choice": "required", "use_beam_search": True},
        "use_beam_search",
        "not with use_beam_search",
    ),
    *(
        ({"response_format": {"type": "structural_tag", **bad}}, None, "")
        for bad in ({"format": 7}, {"format": {"type": "x"}}, {"structures": [7], "triggers": []})
    ),
    (
        {"response_format": {**OLDER, "structures": [7]}, "tools": TOOLS},
        "response_format",
        "or one with 'structures'",
    ),
    ({"structured_outputs": {"grammar": "root ::= other"}}, None, "other"),
    (
        {
            "tools": [{"function": {"name": "f", "parameters": {"type": "x"}}}],
            "tool_choice": "required",
        },
        None,
        "",
    ),
    ({"guided_json": {}}, "guided_json", "structured_outputs"),
    (
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": 7}]}]},
        "tool_calls",
        "'arguments'",
    ),
]


@pytest.mark.parametrize(("mistake", "param", "words"), MISTAKES)
def test_mistakes_are_told(
    server: Running, mistake: dict[str, Any], param: str | None, words: str
) -> None:
    error = refusal(server, H, {**CHAT, **mistake})
    assert words in error["message"]
    assert param in (None, error["param"])


def test_without_the_chapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """extras/structured_output can be deleted: only what needs it is refused."""
    monkeypatch.setitem(sys.modules, "nanoserve.extras.structured_output", None)
    assert make_params(make_request(response_format={"type": "text"}).form) is None
    for given in ({"response_format": SCHEMA}, {"structured_outputs": {"regex": "a"}}):
        with pytest.raises(ValueError, match="no extras/structured_output"):
            make_params(make_request(**given).form)


def test_a_form_that_changes_nothing(client: OpenAI) -> None:
    extra = {"structured_outputs": None}
    text = {"type": "text"}
    found = client.chat.completions.create(
        **CHAT, response_format=text, max_tokens=3, extra_body=extra
    )
    assert found.choices[0].message.content


def test_a_grammar_that_leaves_no_token(server: Running) -> None:
    """The client's own limits contradict each other: no fault of the server."""
    form = {"structured_outputs": {"choice": ["a"]}, "min_tokens": 5}
    answer = server.ask("POST", H, {**CHAT, **form})
    assert answer.error["code"] == answer.status == 400
    assert "structured_outputs, min_tokens forbid all tokens" in answer.error["message"]


def test_a_grammar_that_fails_in_a_stream(server: Running) -> None:
    """The others go on."""
    form = {"structured_outputs": {"grammar": "root ::= other"}, "stream": True}
    answer = server.ask("POST", H, {**CHAT, **form})
    if answer.status == 200:  # found when it was compiled: the last event
        events = [line for line in answer.body.decode().splitlines() if line]
        error = json.loads(events[-2].removeprefix("data: "))["error"]
        assert (error["code"], events[-1]) == (400, "data: [DONE]")
    else:
        assert answer.error["code"] == 400
    assert ask(server, H, {**CHAT, "max_tokens": 2})["choices"]
