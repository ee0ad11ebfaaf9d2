"""The forms of a prompt and of a chat: what is the same, and what is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import BatchEncoding

from nanoserve import PromptType, TextPrompt, TokensPrompt
from nanoserve.config import DEMO_MODEL
from nanoserve.exceptions import VLLMClientError, VLLMError, VLLMValidationError
from nanoserve.inputs import (
    MAX_ITEMS,
    MISSING_KEYS,
    TEXT_PART_TYPES,
    PromptComponents,
    as_arrival_time,
    as_python,
    check_text_length,
    encode,
    find_content_format,
    parse_chat_messages,
    parse_prompt,
    pick_salt,
    prompt_to_seq,
    refuse_missing,
)

IDS = [5, 6, 7]
IMAGE = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}


def every_form(token_ids: list[int]) -> list[Any]:
    """These token ids in every form that a prompt of token ids may have."""
    return [
        token_ids,
        tuple(token_ids),
        np.array(token_ids),
        np.array(token_ids, np.uint16),
        torch.tensor(token_ids),
        [np.int64(token_id) for token_id in token_ids],
        [torch.tensor(token_id) for token_id in token_ids],
        {"prompt_token_ids": token_ids},
        {"prompt_token_ids": np.array(token_ids)},
        {"prompt_token_ids": torch.tensor(token_ids), "multi_modal_data": None},
        TokensPrompt(prompt_token_ids=token_ids),
        {"type": "token", "prompt_token_ids": token_ids, "mm_processor_kwargs": {}},
    ]


# -- what comes with a prompt --


def test_arrival_times() -> None:
    """Seconds of time.time(), or None."""
    for good in (None, 0, 5, 1e9, np.float32(3), torch.tensor(3.0)):
        found = as_arrival_time(good)
        assert found is None if good is None else type(found) in (int, float)
    for bad in (math.nan, math.inf, -1, 10**5000):
        with pytest.raises(VLLMValidationError, match=r"arrival_time is .* seconds of time"):
            as_arrival_time(bad)
    for wrong in ("now", True, [5]):
        with pytest.raises(TypeError, match="arrival_time must be None or a number"):
            as_arrival_time(wrong)


# -- one prompt --


class Endless(Sequence[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return 5


@pytest.mark.parametrize(
    "ids",
    [
        range(MAX_ITEMS + 1),
        range(10**30),
        np.broadcast_to(np.int64(5), MAX_ITEMS + 1),
        torch.tensor(5).expand(MAX_ITEMS + 1),
        Endless(),
    ],
    ids=["a range", "a range of no len()", "an array", "a tensor", "no end"],
)
def test_more_items_than_memory_holds_are_not_expanded(ids: Any) -> None:
    for prompt in (ids, {"prompt_token_ids": ids}, [ids]):
        with pytest.raises(VLLMValidationError, match=r"items; allowed: up to 6|more items than"):
            [parse_prompt(each) for each in prompt_to_seq(prompt)]
    assert parse_prompt(range(5, 8)) == PromptComponents(token_ids=IDS)


@pytest.mark.parametrize("prompt", [b"ab", bytearray(b"ab"), memoryview(b"ab")])
def test_bytes_are_no_token_ids(prompt: Any) -> None:
    for function, value in (
        (prompt_to_seq, prompt),
        (parse_prompt, prompt),
        (parse_prompt, {"prompt_token_ids": prompt}),
    ):
        with pytest.raises(TypeError, match="must be a"):
            function(value)


def test_text() -> None:
    for prompt in ("Once", {"prompt": "Once"}, TextPrompt(prompt="Once"), np.str_("Once")):
        assert parse_prompt(prompt) == PromptComponents("Once")


@settings(max_examples=25)
@given(token_ids=st.lists(st.integers(0, 60000), min_size=1, max_size=8))
def test_every_form_of_token_ids_is_the_same_prompt(token_ids: list[int]) -> None:
    """Alone and in a list; each id is an int of Python's own."""
    forms = every_form(token_ids)
    for form in forms:
        text, found, salt = parse_prompt(form)
        assert (text, found, salt) == (None, token_ids, None)
        assert {type(token_id) for token_id in found or ()} == {int}
        assert found is not token_ids
        [alone] = prompt_to_seq(form)
        assert parse_prompt(alone).token_ids == token_ids
    assert [parse_prompt(form).token_ids for form in prompt_to_seq(forms)] == [token_ids] * 12


def test_token_ids_may_come_with_their_text_and_a_salt() -> None:
    prompt = TokensPrompt(prompt_token_ids=IDS, prompt="abc", cache_salt="mine")
    assert parse_prompt(prompt) == PromptComponents("abc", IDS, "mine")
    assert parse_prompt({"prompt": "abc", "prompt_token_ids": None}) == PromptComponents("abc")
    assert parse_prompt(parse_prompt(prompt)) == parse_prompt(prompt)


ENCODING = BatchEncoding({"input_ids": IDS, "attention_mask": [1, 1, 1]})
BAD_PROMPTS: list[tuple[Any, type[Exception], str]] = [
    (None, TypeError, r"a prompt must be a string, a list of token ids, or a dict .* got None"),
    (5, TypeError, r"a prompt must be .* got 5"),
    (b"Once", TypeError, r"a prompt must be .* got b'Once'"),
    (np.array(5), TypeError, r"a prompt must be .* got 5"),
    ({5, 6}, TypeError, r"a prompt must be .* got \{5, 6\}"),
    ([5, 1.5], TypeError, r"token ids must be ints, got 1\.5"),
    (np.array([5, 1.5]), TypeError, r"token ids must be ints, got 5\.0"),
    (torch.tensor([True]), TypeError, r"token ids must be ints, got True"),
    ([True, False], TypeError, r"token ids must be ints, got True"),
    ([5, None], TypeError, r"token ids must be ints, got None"),
    ([5, "a"], TypeError, r"token ids must be ints, got 'a'"),
    ([IDS], TypeError, r"token ids must be ints, got \[5, 6, 7\]"),
    (ENCODING, TypeError, r"a BatchEncoding .* is no prompt\. Give its input_ids"),
    ({}, TypeError, r"a dict prompt needs 'prompt' or 'prompt_token_ids', got \{\}"),
    ({"cache_salt": "a"}, TypeError, r"a dict prompt needs 'prompt' or 'prompt_token_ids'"),
    ({"prompt": None}, TypeError, r"a dict prompt needs 'prompt' or 'prompt_token_ids'"),
    ({"prompt": IDS}, TypeError, r"'prompt' of a dict prompt must be a string, got \[5, 6, 7\]"),
    ({"prompt_token_ids": "a"}, TypeError, r"token ids must be a list of ints, got 'a'"),
    ({"prompt_token_ids": 5}, TypeError, r"token ids must be a list of ints, got 5"),
    ({"prompt_token_ids": [IDS]}, TypeError, r"token ids must be ints, got \[5, 6, 7\]"),
    ({"promt": "a"}, ValueError, r"unknown key 'promt'; allowed: prompt, prompt_token_ids"),
    ({"prompt": "a", "type": "multimodal"}, ValueError, r"of type 'multimodal'; allowed: 'token'"),
]


@pytest.mark.parametrize(("prompt", "error", "message"), BAD_PROMPTS)
def test_bad_prompts_are_refused(prompt: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_prompt(prompt)


@pytest.mark.parametrize("key", MISSING_KEYS)
def test_what_vllm_has_and_nanoserve_has_not_is_named(key: str) -> None:
    """Unless it is empty."""
    for nothing in (None, {}):
        assert parse_prompt({"prompt": "a", key: nothing}).text == "a"
    for value in ({"image": object()}, torch.ones(2, 3), "text"):
        with pytest.raises(VLLMValidationError, match=f"the prompt has '{key}', which is for "):
            parse_prompt({"prompt": "a", key: value})
    with pytest.raises(VLLMValidationError, match=key):
        parse_prompt({key: "text"})


def test_which_salt_counts() -> None:
    """A prompt's own, or else that of the call."""
    assert [pick_salt("a", "b"), pick_salt(None, "b"), pick_salt(None, None)] == ["a", "b", None]
    for own, given_ in (("", None), (None, ""), (5, None), ("a", 5)):
        with pytest.raises(TypeError, match="cache_salt must be None or a non-empty string, got"):
            pick_salt(own, given_)


# -- lists of prompts --


def test_which_lists_are_one_prompt() -> None:
    """A list of ints is one; any other list is several, even of 0-dimensional arrays or of rows."""
    mixed = ["Once", IDS, {"prompt": "Once"}]
    for given_, prompts in (
        ("Once", ["Once"]),
        (IDS, [IDS]),
        ({"prompt": "Once"}, [{"prompt": "Once"}]),
        ([np.int32(5), torch.tensor(6)], [[5, 6]]),
        (range(5, 8), [IDS]),
        (mixed, mixed),
        (tuple(mixed), mixed),
        ([], []),
        (np.array([]), []),
        (np.array([IDS, IDS]), [IDS, IDS]),
        ([torch.tensor(IDS), np.array(IDS)], [IDS, IDS]),
        (np.array(["a", "b"]), ["a", "b"]),
    ):
        assert prompt_to_seq(given_) == prompts


@pytest.mark.parametrize("prompts", [None, 5, b"Once", np.array(5), (x for x in "ab"), object()])
def test_what_is_no_list_of_prompts(prompts: Any) -> None:
    with pytest.raises(TypeError, match=r"prompts must be a string, token ids, a dict .* got "):
        prompt_to_seq(prompts)


@pytest.mark.parametrize(
    "prompts",
    [[5, 6.0], [5, None], [None, 5], [5, [6]], np.ma.array([5, 6], mask=[1, 0]), [True, 5]],
    ids=str,
)
def test_token_ids_with_a_bad_one_are_one_prompt(prompts: Any) -> None:
    """The message names the bad one, and does not call a good id a bad prompt."""
    [prompt] = prompt_to_seq(prompts)
    with pytest.raises(TypeError, match=r"token ids must be ints, got (6.0|None|\[6\]|True) in"):
        parse_prompt(prompt)


def test_as_python_changes_nothing_else() -> None:
    for value in (5, 0.5, "a", None, IDS, {"a": 1}, int, np.ndarray):
        assert as_python(value) is value


def test_the_type_of_prompts_is_a_value() -> None:
    """It may stand in an annotation that is evaluated, on Python 3.10, too."""
    assert TextPrompt in PromptType.__args__
    assert TokensPrompt.__required_keys__ == {"prompt_token_ids"}
    assert TextPrompt.__required_keys__ == {"prompt"}


# -- chat --


def test_text_parts_are_joined() -> None:
    """By line breaks, for templates that expect a string. Other fields and the caller's messages
    stay as they are."""
    parts = [{"type": "text", "text": "Hello"}, "you", {"type": "refusal", "refusal": "No"}]
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": parts, "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "user"},
    ]
    before = repr(messages)
    assert parse_chat_messages(messages, "string") == [
        messages[0],
        {"role": "user", "content": "Hello\nyou\nNo", "name": "Ada"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]
    texts = [{"type": "text", "text": text} for text in ("Hello", "you", "No")]
    assert parse_chat_messages(messages, "openai") == [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": texts, "name": "Ada"},
        {"role": "assistant", "content": []},
        {"role": "user", "content": []},
    ]
    assert repr(messages) == before


@pytest.mark.parametrize("kind", TEXT_PART_TYPES)
def test_every_kind_of_text_part(kind: str) -> None:
    key = kind if kind in ("refusal", "thinking") else "text"
    [message] = parse_chat_messages([{"content": [{"type": kind, key: "Hi"}]}], "string")
    assert message["content"] == "Hi"
    missing = [{"content": ["Hi", {"type": kind, key: None}]}]
    if kind in ("text", "refusal"):  # is left out, as in vLLM
        assert parse_chat_messages(missing, "string") == [message]
        assert parse_chat_messages(missing, "openai")[0]["content"] == [
            {"type": "text", "text": "Hi"}
        ]
    else:
        with pytest.raises(TypeError, match=r"text of a content part must be a string, got"):
            parse_chat_messages(missing, "string")


def call_with(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "add", "arguments": arguments}}


def test_tool_calls_and_their_results() -> None:
    """Arguments are a dict for the template, whatever the model wrote. The result of a tool is a
    string, also for a template that loops over parts. The caller's messages stay as they are."""
    given_ = ['{"a": "1"}', {"a": "1"}, "", None, "{oops", "[1]", 5]
    parsed = [{"a": "1"}, {"a": "1"}, {}, {}, {}, {}, {}]
    messages = [
        {"role": "assistant", "tool_calls": [call_with(each) for each in given_]},
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": [{"type": "text", "text": "4"}, "2"]},
    ]
    before = repr(messages)
    for content_format in ("string", "openai"):
        calls, one, two = parse_chat_messages(messages, content_format)
        assert not calls["content"]
        assert calls["tool_calls"] == [call_with(each) for each in parsed]
        assert (one["content"], two["content"]) == ("42", "4\n2")
    calls["tool_calls"][1]["function"]["arguments"]["a"] = "2"
    assert repr(messages) == before
    nameless = {"function": {"arguments": "{}"}}
    for call in ("add", 7, {"function": None}, nameless, {"type": "custom", "function": {}}):
        with pytest.raises(VLLMValidationError, match=r"tool_calls holds .*; allowed: "):
            parse_chat_messages([{"role": "assistant", "tool_calls": [call]}], "string")
    with pytest.raises(VLLMValidationError, match=r"tool_calls holds 7; allowed: "):
        parse_chat_messages([{"role": "assistant", "tool_calls": 7}], "string")


@pytest.mark.parametrize("part", [IMAGE, {"type": "input_audio"}, {"text": "Hi"}, {}, None, 5])
@pytest.mark.parametrize("content_format", ["string", "openai"])
def test_other_parts_are_refused_by_name(part: Any, content_format: str) -> None:
    with pytest.raises(VLLMValidationError, match=r"takes text parts only.*Allowed types: text"):
        parse_chat_messages([{"role": "user", "content": ["Hi", part]}], content_format)


@pytest.mark.parametrize("content", [5, {"type": "text", "text": "x"}])
def test_a_content_is_text_or_a_list_of_parts(content: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "user", "content": content}]
    with pytest.raises(TypeError, match="content of item 1 must be a string or a list of parts"):
        parse_chat_messages(messages, "string")


@pytest.mark.parametrize("messages", [[], None, 5, "hello", ["hello"], [{}, "hello"], {"a": 1}])
def test_what_is_no_conversation(messages: Any) -> None:
    with pytest.raises(TypeError, match="a conversation is a list of message dicts, got"):
        parse_chat_messages(messages, "string")


def test_a_role_is_text() -> None:
    with pytest.raises(TypeError, match="the role of item 1 must be a string, got 5"):
        parse_chat_messages([{"content": "a"}, {"role": 5, "content": "b"}], "string")


def test_an_unusual_role_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A template may know it. A misspelt one would silently give nonsense."""
    for role in ("system", "user", "assistant", "tool"):
        parse_chat_messages([{"role": role, "content": "Hi"}], "string")
    assert not caplog.records
    [message] = parse_chat_messages([{"role": "usr", "content": "Hi"}], "string")
    assert message == {"role": "usr", "content": "Hi"}
    assert "has the role 'usr'" in caplog.text


def test_templates_that_loop_over_parts_get_parts() -> None:
    for template, found in (
        ("{{ message['content'] }}", "string"),
        ("{% for message in messages %}{{ message.content | trim }}{% endfor %}", "string"),
        ("{%- for part in message['content'] %}{{ part.text }}{% endfor %}", "openai"),
        ("{% for part in message.content %}{{ part.text }}{% endfor %}", "openai"),
        ("{% set content = m.content %}{% for part in content %}{% endfor %}", "openai"),
        ("{%+ for part in (message.content) %}{% endfor %}", "openai"),
        ("{% for part in message[ 'content' ][1:] | reverse %}{% endfor %}", "openai"),
        ("{% for part in messages[0].content %}{% endfor %}", "openai"),
        (
            "{% set turns = messages[1:] %}{% for m in turns %}{% for x in m.content %}{% endfor %}"
            "{% endfor %}",
            "openai",
        ),
        (
            "{% macro show(c) %}{% for x in c %}{% endfor %}{% endmacro %}"
            "{{ show(message.content) }}",
            "openai",
        ),
        (
            "{% macro show(c) %}{% for x in c %}{% endfor %}{% endmacro %}"
            "{{ show(c=message.content) }}",
            "openai",
        ),
        (
            "{% generation %}{% for part in content %}{% break %}{% endfor %}{% endgeneration %}",
            "openai",
        ),
        (
            "{% macro show(c) %}{% for x in c %}{% endfor %}{% endmacro %}{{ show(tools) }}",
            "string",
        ),
        ("{% macro show(content) %}{% for x in content %}{% endfor %}{% endmacro %}", "string"),
        ("{# {% for part in message.content %} #}{{ message.content }}", "string"),
        ("{% for line in message.content.split('\n') %}{% endfor %}", "string"),
        ("{% for line in message.reasoning_content %}{% endfor %}", "string"),
        ("{% for part in tool.content %}{% endfor %}", "string"),
        ("{% for part in content %}", "string"),  # not closed
        ({"default": "{{ messages }}"}, "string"),  # several templates, by name
    ):
        if isinstance(template, str):  # `message` is the variable of a loop
            template = "{% for message in messages %}{% endfor %}" + template
        assert find_content_format(template) == found, template
        assert find_content_format(template, "string") == "string"
        assert find_content_format(template, "openai") == "openai"
    with pytest.raises(VLLMValidationError, match="'list'; allowed: auto, string, openai"):
        find_content_format("", "list")


# -- errors --


def test_messages_do_not_repeat_a_long_prompt() -> None:
    """Whatever is wrong with it."""
    long = "x" * 10**6
    for call in (
        lambda: parse_prompt({"promt": long, long: 1}),
        lambda: parse_prompt({"prompt": [long]}),
        lambda: parse_prompt({"cache_salt": long}),
        lambda: parse_prompt([5, long]),
        lambda: parse_prompt(long.encode()),
        lambda: prompt_to_seq({long}),
        lambda: parse_chat_messages([{"content": long}, long], "string"),
        lambda: parse_chat_messages([{"content": [{"type": long}]}], "string"),
        lambda: parse_chat_messages([{"content": [{"type": "thinking", "text": long}]}], "string"),
        lambda: refuse_missing("generate", lora_request=long),
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            call()
        assert len(str(raised.value)) < 1000


def test_arguments_that_are_not_here() -> None:
    refuse_missing("generate", lora_request=None, other={}, several=[None, None])
    for value in (object(), [None, 5], {"a": 1}, False):
        with pytest.raises(VLLMValidationError, match=r"generate got lora_request=") as raised:
            refuse_missing("generate", lora_request=value)
        assert (raised.value.parameter, raised.value.value) == ("lora_request", value)


def test_the_exception_has_both_names() -> None:
    """vLLM's and Python's: code that catches either one goes on working."""
    error = VLLMValidationError("n is 0", parameter="n", value=0)
    assert isinstance(error, (VLLMClientError, VLLMError))
    assert isinstance(error, ValueError)
    assert str(error) == "n is 0"


# -- the length of a text --


class Counting:
    """A tokenizer of the tokenizers library with transformers' encode, which notes how many
    characters it was given."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend = backend
        self.num_chars = 0

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend.get_added_tokens_decoder()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids


def letters() -> Tokenizer:
    """Each letter is a token, and a few long words are."""
    words = ["[UNK]", *"abcdefgh ", "hh", "hhhh", "hhhhhhhh", "abcdefgh"]
    merges = [("h", "h"), ("hh", "hh"), ("hhhh", "hhhh")]
    vocab = {word: number for number, word in enumerate(words)}
    return Tokenizer(models.BPE(vocab, merges, unk_token="[UNK]", fuse_unk=True))


def words_with_an_end() -> Tokenizer:
    """As BERT's: a word of more than 100 characters, or with an unknown one, is one [UNK]."""
    words = ["[UNK]", *"abcdefgh", *(f"##{char}" for char in "abcdefgh")]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def without_spaces() -> Tokenizer:
    """As T5's: any number of spaces becomes one."""
    tokenizer = letters()
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    return tokenizer


def with_a_greedy_marker() -> Tokenizer:
    """<mark> takes all spaces at both sides with it; only whole it is a single token."""
    tokenizer = letters()
    tokenizer.add_tokens([AddedToken("<mark>", lstrip=True, rstrip=True)])
    return tokenizer


def pieces() -> Tokenizer:
    """As SentencePiece's Unigram; any number of unknown characters are one token."""
    vocab = [("<unk>", 0.0), *((char, -3.0) for char in "abcdefgh▁"), ("▁abcdefgh", -4.0)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def whole_words() -> Tokenizer:
    """Any unknown word is one token."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


@lru_cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


KINDS = [letters, words_with_an_end, without_spaces, with_a_greedy_marker, pieces, whole_words]
PIECES = [
    "a",
    "b ",
    "h",
    " ",
    "  ",
    "abcdefgh",
    " abcdefgh",
    "<mark>",
    "zzz",
    "é",
    "好",
    "\n",
    "🎉",
]


@pytest.mark.parametrize("kind", [*KINDS, demo_tokenizer])
@settings(deadline=None, max_examples=30)
@given(
    runs=st.lists(st.tuples(st.sampled_from(PIECES), st.integers(1, 4000)), min_size=1, max_size=5),
    most=st.sampled_from([1, 5, 60, 300]),
)
@example(runs=[("a", 150)], most=1)  # the beginning of a word has tokens, all of it is unknown
@example(runs=[("a", 3), ("<mark>", 400)], most=60)
@example(runs=[("a", 1), ("  ", 4000), ("<mark>", 1)], most=5)  # the spaces belong to the marker
def test_no_text_that_fits_is_refused_for_its_length(
    kind: Callable[[], Tokenizer], runs: list[tuple[str, int]], most: int
) -> None:
    """Whatever the tokenizer drops or joins. What is not refused has its own tokens."""
    tokenizer, text = Counting(kind()), "".join(piece * number for piece, number in runs)
    whole = tokenizer.encode(text)
    try:
        assert encode(tokenizer, text, most) == whole
    except VLLMValidationError:
        assert len(whole) > most


@pytest.mark.parametrize("text", ["x", "好", "🎉", " ", "Once upon a time there was a girl. "])
def test_a_long_text_is_refused_after_its_beginning(text: str) -> None:
    """How much is tokenized depends on what fits, not on the length of the text."""
    tokenizer = Counting(demo_tokenizer())
    long = (text * 10**6)[: 10**6]
    with pytest.raises(VLLMValidationError, match=r"^a text has 1000000 characters, the first "):
        check_text_length(tokenizer, long, 500, "a text")
    assert tokenizer.num_chars <= 16 * 500 + 1000
    check_text_length(tokenizer, long[:9000], 500, "a text")
    assert tokenizer.num_chars <= 16 * 500 + 1000, "a text that may fit is not tokenized twice"
