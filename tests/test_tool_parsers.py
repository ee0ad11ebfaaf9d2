"""Where are the calls in a model's text?

The oracle of a stream is the whole text, and that of the whole text is the text that was written:
calls with known names and arguments, between known texts.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve.extras.server.tool_parsers import (
    Hermes2ProToolParser,
    find_tool_parser,
    partial_tag_overlap,
)

START, END = "<tool_call>", "</tool_call>"
Call = tuple[str, Any]  # name, arguments


def call(name: str, arguments: Any, **how: Any) -> str:
    """As the templates of Hermes and Qwen write it."""
    as_json = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False, **how)
    return f"{START}\n{as_json}\n{END}"


def read(text: str) -> tuple[str | None, list[Call]]:
    """What the parser makes of a whole text; arguments as values."""
    message = Hermes2ProToolParser.extract_tool_calls(text)
    calls = [each["function"] for each in message.get("tool_calls", [])]
    return message["content"], [(each["name"], json.loads(each["arguments"])) for each in calls]


def stream(pieces: list[str]) -> dict[str, Any]:
    """The message that the deltas add up to, as a client adds them. The last piece is the end."""
    parser, whole = Hermes2ProToolParser(), {"content": None, "tool_calls": []}
    for number, piece in enumerate(pieces):
        delta = parser.extract_tool_calls_streaming(piece, number == len(pieces) - 1)
        if "content" in delta:
            assert delta["content"], "an empty text is no news"
            whole["content"] = (whole["content"] or "") + delta["content"]
        for each in delta.get("tool_calls", []):
            if each["index"] == len(whole["tool_calls"]):
                assert each["id"] and each["type"] == "function"
                whole["tool_calls"].append(dict(each["function"]))
            else:
                assert each["index"] == len(whole["tool_calls"]) - 1
                assert set(each) == {"index", "function"} and set(each["function"]) == {"arguments"}
                whole["tool_calls"][-1]["arguments"] += each["function"]["arguments"]
    return whole


CITY: Call = ("weather", {"city": "Oslo"})
TAG: Call = ("say", {"text": f"{START}{END}"})
TEXTS: dict[str, tuple[str, str | None, list[Call]]] = {
    "text": ("Hello,\n world. ", "Hello,\n world. ", []),
    "nothing": ("", None, []),
    "white space": (" \n ", " \n ", []),
    "a call": (call(*CITY), None, [CITY]),
    "one line": (START + '{"name":"weather","arguments":{"city":"Oslo"}}' + END, None, [CITY]),
    "spread": (call(*CITY, indent=2), None, [CITY]),
    "space around": (f"\n {call(*CITY)}\n\n", None, [CITY]),
    "text before": (f"Let me look.\n{call(*CITY)}", "Let me look.", [CITY]),
    "text around": (f"Ah.\n{call(*CITY)}\nSo.", "Ah.\n\nSo.", [CITY]),
    "two calls": (f"{call(*CITY)}\n{call('add', [])}", None, [CITY, ("add", [])]),
    "no end": (call(*CITY).removesuffix(END), None, [CITY]),
    "no end, then a call": (
        call(*CITY).removesuffix(END) + call("add", {}),
        None,
        [CITY, ("add", {})],
    ),
    "a brace is missing": (call(*CITY).replace("}}", "}"), None, [CITY]),
    "a brace too many": (call(*CITY).replace("}}", "}}}"), None, [CITY]),
    "no arguments": (START + '{"name": "add"}' + END, None, [("add", {})]),
    "parameters": (call(*CITY).replace("arguments", "parameters"), None, [CITY]),
    "arguments first": (
        START + '{"arguments": {"city": "Oslo"}, "name": "weather"}' + END,
        None,
        [CITY],
    ),
    "more keys": (START + '{"id": 7, "name": "add", "arguments": {}}' + END, None, [("add", {})]),
    "a tag in a string": (call(*TAG), None, [TAG]),
    "brackets in a string": (call("say", {"text": '}]"\\{'}), None, [("say", {"text": '}]"\\{'})]),
    "a number": (call("say", 7), None, [("say", 7)]),
    "a string": (call("say", "a, b}"), None, [("say", "a, b}")]),
    "null": (call("say", None), None, [("say", None)]),
    "an escaped name": (call('a"b', {"c": 1}), None, [('a"b', {"c": 1})]),
    "no JSON": (f"{START}add(1, 2){END}", f"{START}add(1, 2){END}", []),
    "no object": (f"{START}[1]{END} a", f"{START}[1]{END} a", []),
    "no name": (START + '{"arguments": {}}' + END, START + '{"arguments": {}}' + END, []),
    "a name that is none": (START + '{"name": 7}' + END, START + '{"name": 7}' + END, []),
    "a tag alone": (f"Write {START}.", f"Write {START}.", []),
    "a tag at the end": (f"a {START} ", f"a {START} ", []),
    "a tag before a call": (f"{START}{call(*CITY)}", START, [CITY]),
    "half a tag": ("a <tool_ca", "a <tool_ca", []),
    "an end alone": (f"a {END} b", f"a {END} b", []),
    "a call that is cut before its name ends": (
        START + '{"name": "wea',
        START + '{"name": "wea',
        [],
    ),
    "a long name": (call("a" * 300, {}), None, [("a" * 300, {})]),
    "deep": (START + "[" * 100_000, START + "[" * 100_000, []),
}


@pytest.mark.parametrize("name", TEXTS)
def test_calls_are_found(name: str) -> None:
    text, content, calls = TEXTS[name]
    assert read(text) == (content, calls)


def test_arguments_are_what_the_model_wrote() -> None:
    text = START + '{"name": "f", "arguments":  {"a" :1.50,\n"b": "é\\u00e9"} }' + END
    message = Hermes2ProToolParser.extract_tool_calls(text)
    [found] = message["tool_calls"]
    assert found["function"]["arguments"] == '{"a" :1.50,\n"b": "é\\u00e9"}'
    assert "index" not in found


def test_a_string_may_end_with_a_backslash() -> None:
    arguments = '{"path": "C:\\\\", "n": 1}'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>Done.'
    message = Hermes2ProToolParser.extract_tool_calls(text)
    assert message["content"] == "Done."
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == [arguments]


def test_a_call_that_is_cut_off_keeps_what_there_is() -> None:
    """As OpenAI's does; the finish_reason is "length"."""
    message = Hermes2ProToolParser.extract_tool_calls(call("f", {"a": [1, 22]})[:-17])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": [1, 2'}


def test_each_call_has_an_id_of_its_own() -> None:
    calls = Hermes2ProToolParser.extract_tool_calls(call(*CITY) * 3)["tool_calls"]
    assert len({each["id"] for each in calls}) == 3


def test_calls_beyond_the_first_can_be_dropped() -> None:
    text = f"a{call(*CITY)}b{call('add', {'x': 1})}c"
    message = Hermes2ProToolParser.extract_tool_calls(text, parallel_tool_calls=False)
    assert message["content"] == "abc"
    assert [each["function"]["name"] for each in message["tool_calls"]] == ["weather"]


def test_what_is_known_is_not_held_back() -> None:
    parser = Hermes2ProToolParser()
    say = parser.extract_tool_calls_streaming
    assert say("Let me <b>look</b>.\n<to") == {"content": "Let me <b>look</b>."}
    assert say('ol_call>\n{"name": "wea') == {}
    [first] = say('ther", "arguments": ')["tool_calls"]
    assert first["function"] == {"name": "weather", "arguments": ""}
    for piece in ('{"ci', 'ty": "}', '"', "}"):
        assert say(piece) == {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
    assert say("}\n</tool_call>\n") == {}
    assert say("", finished=True) == {}


def test_text_with_a_tag_is_not_held_to_its_end() -> None:
    parser = Hermes2ProToolParser()
    assert parser.extract_tool_calls_streaming(f"The tag {START}") == {"content": "The tag"}
    assert parser.extract_tool_calls_streaming(" is") == {"content": f" {START} is"}


# -- properties --

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just(f"a{END}{START}"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
calls = st.tuples(
    st.text("abc_-é ", min_size=1), st.dictionaries(st.text(max_size=3), json_values, max_size=3)
)
texts = st.text("ab<{ \n", max_size=8)
CRUMBS = [START, END, "<tool_", "call>", '{"name": "f"', ', "arguments": ', "{}", "{", "}", '"']
CRUMBS += ["\\", "[", "]", ",", "<", " ", "\n", "text", '"arguments": {"a": 1}', "name", "\u2028"]


@given(st.lists(st.tuples(texts, calls), max_size=3), texts, st.sampled_from([None, 1]))
def test_calls_between_texts_are_found(
    parts: list[tuple[str, Call]], last: str, indent: int | None
) -> None:
    text = "".join(before + call(*each, indent=indent) for before, each in parts) + last
    content, found = read(text)
    assert found == [each for _, each in parts]
    around = "".join([*(before for before, _ in parts), last])
    if found and not last.strip():
        around = around.rstrip()
    assert (content or "") == around


@given(st.data(), st.lists(st.sampled_from(CRUMBS) | st.builds(lambda c: call(*c), calls)))
def test_a_stream_says_the_same_as_the_whole(data: st.DataObject, crumbs: list[str]) -> None:
    """Wherever the text is cut. Of any text: well-formed calls, and what looks like them."""
    text = "".join(crumbs)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = stream([text])
    assert stream(pieces) == whole == stream([*text, ""])
    message = Hermes2ProToolParser.extract_tool_calls(text)
    assert message["content"] == whole["content"]
    assert [each["function"] for each in message.get("tool_calls", [])] == whole["tool_calls"]
    if not whole["tool_calls"]:
        assert (whole["content"] or "") == text, "no call: nothing is lost"


@given(st.text("<tol_cab>/", max_size=12))
def test_the_beginning_of_a_tag(text: str) -> None:
    sizes = [
        n for n in range(len(START)) if n <= len(text) and START.startswith(text[len(text) - n :])
    ]
    assert partial_tag_overlap(text, START) == max(sizes)


def test_a_long_call_takes_no_longer_per_piece() -> None:
    """The arguments are read once, not again with each piece."""
    parser, seen = Hermes2ProToolParser(), 0
    parser.extract_tool_calls_streaming(START + '{"name": "f", "arguments": {"a": "')
    for _ in range(1000):
        seen += len(parser.text)
        parser.extract_tool_calls_streaming("word " * 100)
    assert seen == 0


# -- the format of a template --

QWEN = r"""{{- "\n</tools>\n\nReturn a json object within <tool_call></tool_call> XML tags:
\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n</tool_call>" }}"""
HERMES = """{{- "<tool_call>
" }}
{{- '{"name": <function-name>, "arguments": <args-dict>}
' }}"""


@pytest.mark.parametrize(
    ("template", "is_known"),
    [
        (QWEN, True),
        (HERMES, True),
        ({"default": "{{ messages }}", "tool_use": HERMES}, True),
        (None, False),
        ({}, False),
        ("{{ messages }}", False),
        ("<tool_call>\n<function=name>\n<parameter=a>", False),  # Qwen3-Coder's
        ("<tool_call>{name}\n<arg_key>a</arg_key>", False),  # GLM's
        ('{"name": function, "parameters": {}}', False),  # Llama's
    ],
)
def test_the_format_is_found_in_the_template(template: Any, is_known: bool) -> None:
    assert find_tool_parser(template) is (Hermes2ProToolParser if is_known else None)


def test_the_demo_model_has_it(demo_llm: Any) -> None:
    """And what its template writes for a call is what the parser reads."""
    tokenizer = demo_llm.get_tokenizer()
    assert find_tool_parser(tokenizer.chat_template) is Hermes2ProToolParser
    calls = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in [CITY, CITY]]
    messages = [
        {"role": "user", "content": "Is it wet?"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "content": "rain"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    written = text.partition("assistant\n")[2].partition("<|im_end|>")[0]
    assert read(written) == ("Let me look.", [CITY, CITY])
    assert written.endswith(f"Let me look.\n{call(*CITY)}\n{call(*CITY)}")
    assert text.endswith("<|im_start|>tool\nrain<|im_end|>\n")
    tool = {"type": "function", "function": {"name": "weather"}}
    told = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert told.endswith(text) and json.dumps(tool) in told
    system = [{"role": "system", "content": "Be brief."}, *messages]
    told = tokenizer.apply_chat_template(system, tools=[tool], tokenize=False)
    assert told.startswith("<|im_start|>system\nBe brief.\n\n") and told.count("Be brief.") == 1


# -- the grammar --

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer"}},
        },
    },
}
ADD = {"type": "function", "function": {"name": "add"}}
BY_NAME = {"type": "function", "function": {"name": "weather"}}


def strict(tool: dict[str, Any], value: bool) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": value}}


def accepts(tag: dict[str, Any] | None, text: str) -> bool:
    """xgrammar's answer."""
    xgrammar = pytest.importorskip("xgrammar")
    info = xgrammar.TokenizerInfo([chr(i) for i in range(128)] + ["</s>"], stop_token_ids=[128])
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(json.dumps(tag))
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    return matcher.accept_string(text) and matcher.is_completed()


OSLO, OTHER = call(*CITY), call("weather", {"town": "Oslo"})
SUM, LIST, UNKNOWN = call("add", {"x": [1, {}]}), call("add", []), call("sub", {})
TAGS: list[tuple[Any, bool, bool | None, list[str], list[str]]] = [
    # tool_choice, parallel_tool_calls, strict; texts that are taken, and that are not
    (
        "required",
        True,
        None,
        [OSLO, SUM, f"{OSLO}\n{SUM}\n{OSLO}"],
        ["", "Oslo", UNKNOWN, OTHER, LIST],
    ),
    ("required", True, False, [OSLO, OTHER], ["", UNKNOWN, LIST]),
    ("required", False, True, [OSLO, SUM], ["", f"{OSLO}\n{SUM}", OTHER]),
    (BY_NAME, True, None, [OSLO], ["", SUM, OTHER, f"{OSLO}\n{OSLO}"]),
    (BY_NAME, True, False, [OSLO, OTHER], ["", SUM, LIST]),
    ("auto", True, True, ["", "It rains.", f"Ah. {OSLO} {SUM}!"], [OTHER, UNKNOWN]),
    ("auto", False, True, ["", "It rains.", f"Ah. {OSLO}"], [OTHER, f"{OSLO}{SUM}"]),
]


@pytest.mark.parametrize(("choice", "parallel", "is_strict", "good", "bad"), TAGS)
def test_the_grammar_of_a_call_is_what_the_parser_reads(
    choice: Any, parallel: bool, is_strict: bool | None, good: list[str], bad: list[str]
) -> None:
    tools = [WEATHER if is_strict is None else strict(WEATHER, is_strict), ADD]
    tag = Hermes2ProToolParser.get_structural_tag(tools, choice, parallel)
    for text in good:
        assert accepts(tag, text), text
        assert len(read(text)[1]) == text.count(START)
    for text in bad:
        assert not accepts(tag, text), text


def test_a_call_or_an_answer_of_a_form() -> None:
    number = {"type": "regex", "pattern": "[0-9]+"}
    tag = Hermes2ProToolParser.get_structural_tag([WEATHER, ADD], "auto", True, number)
    for text in ("42", SUM, OTHER, f"{SUM}\n{OSLO}"):
        assert accepts(tag, text), text
    for text in ("", "It rains.", f"4{SUM}", LIST):
        assert not accepts(tag, text), text


def test_without_a_strict_tool_the_model_is_free() -> None:
    make = Hermes2ProToolParser.get_structural_tag
    assert make([WEATHER, ADD], "auto") is None
    assert make([strict(WEATHER, False)], "auto") is None


def test_chat_without_a_server(demo_llm: Any) -> None:
    """The grammar and the parser are for LLM.chat, too."""
    from nanoserve import SamplingParams, StructuredOutputsParams

    pytest.importorskip("xgrammar")
    number = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    tools = [{**ADD, "function": {**ADD["function"], "parameters": number}}]
    tag = Hermes2ProToolParser.get_structural_tag(tools, "required", parallel_tool_calls=False)
    form = StructuredOutputsParams(structural_tag=json.dumps(tag), disable_any_whitespace=True)
    params = SamplingParams(temperature=1.5, max_tokens=100, structured_outputs=form)
    messages = [{"role": "user", "content": "What is 1 + 2?"}]
    [output] = demo_llm.chat(messages, params, tools=tools, use_tqdm=False)
    assert '"name": "add"' in output.prompt
    content, [(name, arguments)] = read(output.outputs[0].text)
    assert content is None
    assert name == "add"
    assert arguments["x"] in (1, 2)
