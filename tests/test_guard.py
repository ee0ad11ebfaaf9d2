"""What a checkpoint's template and tokenizer may cost: the text is that of transformers, and every
hostile one ends with an error or an answer, in bounded time and memory."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from nanoserve import LLM, guard
from nanoserve.checkpoint import transformers_lock
from nanoserve.config import DEMO_MODEL
from nanoserve.exceptions import VLLMValidationError
from nanoserve.guard import Guard, GuardError, is_linear, read_tokenizer
from nanoserve.input_processor import load_tokenizer
from nanoserve.inputs import render_chat

HI = [{"role": "user", "content": "Hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1.5}}}
LONG = [
    {"role": "system", "content": "Be brief. é \U0001f600 <b>"},
    {"role": "user", "content": "What is 1.5 + 1?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "So: add."},
    {"role": "tool", "content": "2.5"},
    {"role": "assistant", "content": "  It is 2.5.  "},
    {"role": "user", "content": "Thanks\n\nand bye"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Iterator[Any]:
    """That of the demo model, with a guard that trusts no template."""
    tokenizer = read_tokenizer(DEMO_MODEL)
    tokenizer.guard.own_template = None
    yield tokenizer
    tokenizer.guard.close()


# -- the text is that of transformers --

TEMPLATES = {
    "ChatML": """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'
+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "Llama 3": """{{- bos_token }}
{%- set today = strftime_now("%d %b %Y") if strftime_now is defined else "?" %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|header|>system<|end|>\n\nToday: " + today[:0] + "\n" }}
{%- if tools is not none %}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ "\n\n" }}{% endfor %}
{%- endif %}
{{- system }}
{%- for message in messages %}
    {%- if message.role == 'tool' or 'tool_calls' in message %}
        {%- if not 'tool_calls' in message %}{{- "<|header|>ipython\n" + message.content | tojson }}
        {%- elif message.tool_calls | length != 1 %}{{ raise_exception("one call only") }}
        {%- else %}{{- '{"name": "' + message.tool_calls[0].function.name + '"}' }}{%- endif %}
    {%- else %}{{- '<|header|>' + message.role + '\n\n' + message.content | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant\n\n' }}{%- endif %}""",
    "Qwen": """{%- if tools %}
    {{- '<|im_start|>system\n# Tools' }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
{%- endif %}
{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string
           and not (message.content.startswith('<r>') and message.content.endswith('</r>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" %}
        {%- set think = message.reasoning_content if message.reasoning_content is string else '' %}
        {%- if loop.last or (not loop.last and think and loop.index0 > ns.last) %}
            {{- '<think>\n' + think.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function if call.function else call %}
            {{- '\n<call>{"name": "' ~ call.name ~ '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}' }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<r>' }}{%- endif %}
        {{- content }}
    {%- else %}{{- message.role + content }}{%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<no>' }}{%- endif %}""",
    "Mistral": """{%- set is_system = messages[0].role == 'system' %}
{%- set loop_messages = messages[1:] if is_system else messages %}
{{- bos_token }}{%- for message in loop_messages | rejectattr("role", "equalto", "tool") %}
    {%- if message.role == "user" and loop.last and messages[0].role == "system" %}
        {{- "[INST] " + messages[0].content + "\n\n" + message.content + "[/INST]" }}
    {%- elif message.role == "user" %}{{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.role == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}""",
    "Gemma": """{{ bos_token }}{% for message in messages %}
{% if message.role == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message.role %}
{% endif %}{{ '<turn>' + role + '\n' }}
{% if message.content is string %}{{ message.content | trim }}
{% elif message.content is iterable %}{% for item in message.content %}{{ item.text | trim }}
{% endfor %}{% endif %}{{ '<end>\n' }}{% endfor %}""",
    "DeepSeek": """{% if not add_generation_prompt is defined %}
{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, system='', is_tool=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{% set ns.system = ns.system + message['content'] %}{%- endif %}{%- endfor %}
{{ bos_token }}{{ ns.system }}{%- for message in messages %}
{%- if message.role == 'assistant' and '</think>' in message.content %}
{{ message.content.split('</think>')[-1] }}{%- elif message.role == 'user' %}
{{ '<|User|>' + message['content'] }}{%- endif %}{%- endfor -%}
{% if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|>' }}{% endif %}""",
    "macro": """{% macro line(role, text="-") %}[{{ role }}|{{ text | upper }}
{{- caller() if caller is defined }}]{% endmacro %}
{% for message in messages %}{{ line(message.role, message.content) }}{% endfor %}
{% call line('x') %}called{% endcall %}""",
    "break": """{% for message in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}
{% if loop.index == 5 %}{% break %}{% endif %}{{ loop.index }}{{ message.role }}{% endfor %}""",
    "generation": """{% for message in messages %}{% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.content }}{% endif %}{% endfor %}""",
    "filters": """{{ messages | map(attribute='role') | unique | join(', ') }}
{{ messages | groupby('role') | map('first') | list }} {{ messages | tojson(sort_keys=true) }}
{{ messages[0].content | replace('e', 'E') | indent(4) | wordcount }} {{ '%s-%d' | format('a', 3) }}
{{ messages | selectattr('content') | map(attribute='content') | map('length') | sum }}
{{ dict(a=1) | items | list }} {{ [3, 1] | sort }} {{ 7 // 2 }} {{ 'a' in 'abc' }} {{ {1: (2,)} }}
{{ messages[0] | dictsort }}{{ undefined_name }}{{ 1.5 | round | int }} {{ range(3) | list }}""",
    "options": "{{ a }} {{ b }} {{ (c or 0) | tojson }} {{ d }} {{ bos_token }}",
    "set block": "{% set text %}{{ messages[0].content }}{% endset %}{{ text | length }}{{ text }}",
}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True, "tools": [TOOL], "enable_thinking": False},
    {"a": (1, [2]), "b": {1: None}, "c": [1.5, True], "d": "\ud800\n", "bos_token": "<s>"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_apply_chat_template(tokenizer: Any, name: str) -> None:
    """Of the installed transformers, for templates in the styles of the models that are used; if
    it raises an error, so do we, with its message."""

    def of(render: Callable[[], str]) -> str:
        try:
            return render()
        except Exception as error:
            return f"error: {error.__cause__ or error}"

    num_texts = 0
    for messages in (HI, LONG):
        for given in OPTIONS:
            options = {"chat_template": TEMPLATES[name], **given}
            direct = tokenizer.apply_chat_template
            expected = of(lambda d=direct, m=messages, o=options: d(m, tokenize=False, **o))
            found = of(
                lambda m=messages, o=options: tokenizer.guard.render(
                    tokenizer, [dict(each) for each in m], o
                )
            )
            assert found == expected
            num_texts += not found.startswith("error")
    assert num_texts > 0


def test_templates_of_a_tokenizer(tokenizer: Any) -> None:
    """Its own; one of several by name; that for tools; the message that is continued."""
    several = copy.copy(tokenizer)
    several.chat_template = {"default": "d", "tool_use": "t{{ tools }}", "rag": "{{ documents }}"}

    def add(a: int) -> int:
        """Adds one.

        Args:
            a: a number
        """
        return a + 1

    begun = [*HI, {"role": "assistant", "content": "Well, "}]
    for one, messages, options in (
        (tokenizer, HI, {"add_generation_prompt": True}),
        (tokenizer, begun, {"continue_final_message": True}),
        (several, HI, {}),
        (several, HI, {"tools": [TOOL]}),
        (several, HI, {"tools": [add]}),
        (several, HI, {"chat_template": "rag", "documents": [{"title": "a", "text": "b"}]}),
    ):
        expected = one.apply_chat_template(messages, tokenize=False, **options)
        assert render_chat(one, messages, options) == expected


def test_values_of_other_types_become_plain_ones(tokenizer: Any) -> None:
    """So that nothing but plain values reaches the other process."""
    np = pytest.importorskip("numpy")
    options = {"chat_template": "{{ a }} {{ b }}", "a": np.int64(3), "b": np.bool_(False)}
    assert render_chat(tokenizer, HI, options) == "3 False"


@pytest.mark.parametrize(
    "value", [date(2024, 5, 6), Decimal(1), range(3), {5}, b"x", Path("a"), iter("ab")], ids=type
)
def test_values_without_a_plain_form_are_refused(tokenizer: Any, value: object) -> None:
    """Without a word, "<date>" would be in the prompt."""
    options = {"chat_template": "{{ a }}", "a": [value]}
    with pytest.raises(VLLMValidationError, match=rf"of type {type(value).__name__}.*allowed"):
        render_chat(tokenizer, HI, options)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer's signal")
def test_a_time_limit_is_not_mistaken_for_a_process_that_does_not_start() -> None:
    """A handler's TimeoutError is an OSError."""

    def give_up(number: int, frame: Any) -> None:
        raise TimeoutError("the application's own")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 0.05)  # to start takes longer
    new = Guard()
    try:
        with pytest.raises(TimeoutError, match="the application's own"):
            new.find_content_format("{{ 1 }}", "auto")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        new.close()


# -- hostile templates --

NESTED_RANGES = (
    "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"
)
HOSTILE = {  # the template; then what the error says, or "text: " and the text
    "product": ("{{ 'a' * 10**10 }}", "needs more than 512 MiB"),
    "long text": ("{{ 'a' * (2**24 + 1) }}", "its text has more than 16777216 characters"),
    "nested ranges": ("{% set r = range(99999) %}" + NESTED_RANGES, "takes more than 5 seconds"),
    "list product": ("{{ [0] * 10**10 }}", "needs more than"),
    "center": ("{{ 'a' | center(10**10) }}", "needs more than"),
    "center method": ("{{ 'a'.center(10**10) }}", "needs more than"),
    "ljust": ("{{ 'a'.ljust(10**10) }}", "needs more than"),
    "zfill": ("{{ 'a'.zfill(10**10) }}", "needs more than"),
    "format width": ("{{ '%10000000000d' % 1 }}", "needs more than|too big|memory"),
    "format filter": ("{{ '%10000000000d' | format(1) }}", "needs more than|too big|memory"),
    "format method": ("{{ '{:10000000000d}'.format(1) }}", "needs more than|Too many|memory"),
    "doubling": (
        "{% set n = namespace(s='a') %}"
        "{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "needs more than|takes more than",
    ),
    "lipsum": ("{{ lipsum(n=10**7) }}", "takes more than|needs more than"),
    "join": ("{{ ('a' * 10**6) | join('b' * 10**6) }}", "needs more than"),
    "replace": ("{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}", "needs more than"),
    "replace filter": ("{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}", "needs more than"),
    "replace chain": ("{{ 'a' " + "| replace('a', 'aa')" * 60 + " }}", "(needs|takes) more than"),
    "indent": ("{{ ('\\n' * 10**6) | indent('b' * 10**6, blank=true) }}", "needs more than"),
    "expandtabs": ("{{ ('\\t' * 10**6).expandtabs(10**6) }}", "needs more than|too long"),
    "tojson indent": ("{{ [1] | tojson(indent=10**10) }}", "needs more than"),
    "power": ("{{ 9 ** (9 ** 9) }}", "takes more than|needs more than"),
    "power of 10": ("{{ 10 ** 5000 }}", "limit"),
    "range": ("{{ range(10**9) | list }}", "Range too big"),
    "batch": ("{{ range(9) | batch(10**10, 'x') | list }}", "needs more than"),
    "slice": ("{{ range(9) | slice(10**10) | list }}", "takes more than|needs more than"),
    "wordwrap": ("{{ ('a' * 10**7) | wordwrap(1) }}", "takes more than|needs more than"),
    "urlize": ("{{ ('<a@' * 10**5) | urlize }}", "text: &lt;a@"),
    "cycler": ("{{ cycler(*range(99999)).next() }}", "text: 0"),
    "recursion": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
    "macros that call twice": (
        "{% macro m0() %}{% endmacro %}"
        + "".join(
            f"{{% macro m{i}() %}}{{{{ m{i - 1}() }}}}{{{{ m{i - 1}() }}}}{{% endmacro %}}"
            for i in range(1, 60)
        )
        + "{{ m59() }}",
        "takes more than",
    ),
    "recursive loop": (
        "{% for a in [messages] recursive %}{{ loop([a, a]) }}{% endfor %}",
        "recursion",
    ),
    "self-made loop": (
        "{% set l = [1] %}{% for a in l %}{% set _ = l.append(1) %}{% endfor %}",
        "unsafe|immutable|not safely callable",
    ),
    "deep nesting": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion|without a reply"),
    "many filters": ("{{ 'a' " + "| upper" * 20000 + " }}", "recursion|without a reply"),
    "many macros": ("{% macro a() %}{% endmacro %}" * 20000, "text: $|takes more than"),
    "many blocks": (
        "{% if true %}" * 200 + "{% endif %}" * 200,
        "too many levels of indentation|recursion",
    ),
    "long error": ("{{ raise_exception('a' * 10**8) }}", r"aaaa$|aaaa\.$"),
    "unclosed": ("{% for a in", "unexpected|Unexpected|expected"),
    "syntax": ("{{ 1 +* 2 }}", "unexpected"),
    "surrogate": ("{{ '\\ud800' }}", "text: .$"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "extends": ("{% extends 'a' %}", "no loader"),
    "class": ("{{ ''.__class__.__mro__ }}", "text: $|unsafe|undefined"),
    "globals": ("{{ raise_exception.__globals__ }}", "text: $|unsafe|undefined"),
    "format escape": ("{{ '{0.__class__.__init__}'.format(1) }}", "text: $|unsafe"),
    "attr": ("{{ '' | attr('__class__') }}", "text: $|unsafe|undefined"),
    "subclasses": ("{{ [].__class__.__base__.__subclasses__() }}", "text: $|unsafe|undefined"),
    "cycle object": (
        "{{ cycler.__init__.__globals__.os.system('id') }}",
        "text: $|unsafe|undefined",
    ),
    "namespace dunder": ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "underscore|unsafe"),
}
OF_A_KIND = ("product", "format width", "range", "recursion", "deep nesting", "class", "include")


def hostile_cases() -> Iterator[Any]:
    """All of them; a plain run has one or two of each kind that end at once."""
    for name in HOSTILE:
        yield pytest.param(name, marks=[] if name in OF_A_KIND else [pytest.mark.slow])


@pytest.mark.parametrize("name", hostile_cases())
def test_hostile_templates(tokenizer: Any, name: str) -> None:
    """Each ends with a text or an error that names the limit, and the next request is served."""
    template, outcome = HOSTILE[name]
    try:
        found = "text: " + render_chat(tokenizer, HI, {"chat_template": template})[:20]
    except VLLMValidationError as error:
        found = str(error)
        assert re.match(r"the chat template (refuses \[\{|cannot be read: )", found)
        assert len(found) < 2500
    assert re.search(outcome, found), found
    assert "Hi" in render_chat(tokenizer, HI, {})


def test_a_template_that_runs_too_long(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is ended; other threads wait for their turn, and are served."""
    monkeypatch.setattr(guard, "SECONDS", 0.5)
    endless = {"chat_template": HOSTILE["nested ranges"][0]}
    found: list[str] = []

    def render(options: dict[str, Any]) -> None:
        try:
            found.append(tokenizer.guard.render(tokenizer, HI, options))
        except GuardError as error:
            found.append(str(error))

    threads = [threading.Thread(target=render, args=(each,)) for each in (endless, {}, {}, {})]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    text = tokenizer.apply_chat_template(HI, tokenize=False)
    assert sorted(found) == sorted([text] * 3 + ["it takes more than 0.5 seconds"])


# -- tokenizers --


def test_one_thread_at_a_time_uses_what_transformers_imports_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = AutoTokenizer.from_pretrained
    was_locked: list[bool] = []

    def note(*args: Any, **options: Any) -> Any:
        was_locked.append(transformers_lock.locked())
        return read(*args, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", note)
    load_tokenizer(DEMO_MODEL, explicit=True).guard.close()
    assert was_locked == [True]
    assert not transformers_lock.locked()


def test_a_long_text_is_encoded_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a prompt that is too long says it. A tokenizer of the user's own still warns,
    once."""
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [handler])
    ours, theirs = read_tokenizer(DEMO_MODEL), AutoTokenizer.from_pretrained(DEMO_MODEL)
    for tokenizer in (ours, theirs):
        tokenizer.model_max_length = 3
    ours.encode("one two three four five six")
    ours.guard.close()
    assert heard == []
    theirs.encode("one two three four five six")
    assert "longer than the specified maximum" in heard[0]


def split(regex: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": regex},
        "behavior": "Isolated",
        "invert": False,
    }


def replace(old: str | dict[str, str], new: str) -> dict[str, Any]:
    return {
        "type": "Replace",
        "pattern": {"String": old} if isinstance(old, str) else old,
        "content": new,
    }


def pre(*parts: dict[str, Any]) -> dict[str, Any]:
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*parts, byte_level]}}


def norm(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"normalizer": {"type": "Sequence", "normalizers": list(parts)}}


def decoder(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"decoder": {"type": "Sequence", "decoders": list(parts)}}


def added(number: int, **options: Any) -> dict[str, Any]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    base = {**dict.fromkeys(names, False), **options}
    return {"added_tokens": [{"id": 2048 + i, "content": f"<t{i}>", **base} for i in range(number)]}


def wordpiece(longest: int) -> dict[str, Any]:
    vocab = {"[UNK]": 0, "e": 1, "##e": 2}
    options = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "vocab": vocab}
    model = {"type": "WordPiece", "max_input_chars_per_word": longest, **options}
    return {"model": model, "pre_tokenizer": None}


def unigram(pieces: list[str]) -> dict[str, Any]:
    vocab = [["<unk>", 0.0], *([piece, -1.0] for piece in pieces)]
    return {"model": {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": vocab}}


def nested(depth: int) -> dict[str, Any]:
    part: dict[str, Any] = {"type": "NFC"}
    for _ in range(depth):
        part = {"type": "Sequence", "normalizers": [part]}
    return {"normalizer": part}


TEXT_PIECE, OTHER_PIECE = ({"Sequence": {"id": i, "type_id": 0}} for i in "AB")
REPEATED = {"single": [TEXT_PIECE] * 1000, "pair": [TEXT_PIECE, OTHER_PIECE], "special_tokens": {}}
FIXED = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0}
CUT = {"direction": "Right", "strategy": "LongestFirst", "stride": 10**17}

# What replaces keys of tokenizer.json; then what the error says, at the build or for one of TEXTS,
# or how all of them are served: called directly, or in the process.
DIRECT, GUARDED = "served directly", "served by the guard"
TOKENIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "as it is": ({}, DIRECT),
    "regex, exponential": (pre(split("(x+x+)+y")), "retry-limit"),
    "regex, stars in stars": (pre(split("(e*)*b|(e|e)*$")), "retry-limit"),
    "regex, quadratic in long runs": (pre(split("e{99999,}")), "takes more than|" + GUARDED),
    "regex, quadratic": (pre(split("e*[^e]*z")), GUARDED),
    "regex, many optional": (pre(split("e?" * 40 + "e" * 40)), GUARDED),
    "regex, repeated repeats": (pre(split("(((a{1000}){1000}){1000})")), GUARDED),
    "regex, long": (pre(split(r"[\p{L}]" * 20000)), "."),
    "regex, deep": (pre(split("(" * 4000 + "a" + ")" * 4000)), "depth limit"),
    "regex, wrong": (pre(split("(((")), "unmatched parenthesis"),
    "replace, doubling": (norm(*[replace("e", "ee")] * 40), "ended with|more than"),
    "replace, long": (norm(replace("e", "e" * 10**7)), "ended with|more than|memory"),
    "replace, 10**9": (norm(*[replace(a, b * 1000) for a, b in ("ef", "fg", "gh")]), "ended|more"),
    "replace, empty": (norm(replace("", "abc")), "index out of bounds|ended|more"),
    "replace, bad regex": (norm(replace({"Regex": "(x+)+$"}, "y")), "retry-limit"),
    "prepend": (norm({"type": "Prepend", "prepend": "x" * 10**6}), GUARDED),
    "many NFKC": (norm(*[{"type": "NFKC"}] * 40), GUARDED),
    "too many parts": (norm(*[{"type": "NFKC"}] * 10**5), "100005 normalizers.*allowed: 64"),
    "nested parts": (nested(120), "recursion limit|more than 64"),
    "text repeated": ({"post_processor": {"type": "TemplateProcessing", **REPEATED}}, "."),
    "decoder, doubling": (decoder(*[replace("e", "ee")] * 40), "its decoder makes texts much"),
    "decoder, regex": (decoder(replace({"Regex": "(e+)+$"}, "x")), "or has a regular expression"),
    "padding": (
        {"padding": {"strategy": {"Fixed": 10**12}, "pad_token": "<|im_end|>", **FIXED}},
        DIRECT,
    ),
    "truncation": ({"truncation": {"max_length": 10**18, **CUT}}, DIRECT),
    "added id": (
        {"added_tokens": [{**added(1)["added_tokens"][0], "id": 10**12}]},
        "invalid value",
    ),
    "added, spaces before": (added(1, lstrip=True), GUARDED),
    "added, many": (added(100_000), DIRECT),
    "no model": ({"model": None}, "did not match|missing|expected"),
    "model of another type": ({"model": {"type": "Evil"}}, "did not match"),
    "word pieces": (wordpiece(10**12), "takes more than"),
    "word pieces, negative": (wordpiece(-1), "invalid value"),
    "unigram, long piece": (unigram(["e" * i for i in range(1, 1200)]), "1199 characters in one"),
    "unigram, much": (
        unigram([f"{i:07d}" + "ab" * 500 for i in range(9000)]),
        "limit is 2048 MiB|" + DIRECT,
    ),
    "unigram, empty": ({"model": {"type": "Unigram", "vocab": []}}, "unk_id. is missing|Empty"),
}
FAST = ("as it is", "decoder, doubling", "unigram, long piece")
TEXTS = ("Hello e", "e" * 2000 + "!", "x" * 2000 + "!", " " * 20000 + "e", "e" * 200_000)


def write_tokenizer(folder: Path, changes: dict[str, Any], **config: Any) -> Path:
    content = json.loads((DEMO_MODEL / "tokenizer.json").read_text("utf-8"))
    settings = json.loads((DEMO_MODEL / "tokenizer_config.json").read_text("utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps({**content, **changes}), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **config}), "utf-8")
    return folder


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in TOKENIZERS]
)
def test_tokenizers(tmp_path: Path, name: str) -> None:
    """Each is refused when it is read, or gives a text's ids or an error within the limits; what
    it gives is what the tokenizer itself gives."""
    changes, outcome = TOKENIZERS[name]
    write_tokenizer(tmp_path, changes)
    found = []
    try:
        tokenizer = load_tokenizer(tmp_path, explicit=True)
        is_direct = "encode" not in vars(tokenizer)
        for text in TEXTS:
            try:
                ids = tokenizer.encode(text)
                assert is_direct or len(text) > 100 or ids == direct_ids(tokenizer, text)
            except Exception as error:  # as InputProcessor.tokenize holds it
                found.append(str(error))
        assert len(tokenizer.decode([364, 313])) < 1000
        found = found or [DIRECT if is_direct else GUARDED]
        tokenizer.guard.close()
    except ValueError as error:
        found = [str(error)]
    assert re.search(outcome, "\n".join(found)), found
    assert outcome not in (DIRECT, GUARDED) or len(found) == 1


def direct_ids(tokenizer: Any, text: str) -> list[int]:
    """In this process; only for a text that is known to be harmless."""
    return type(tokenizer).encode(tokenizer, text)


def test_ids_from_the_process_are_those_of_the_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without special tokens, for any text; other calls go to the tokenizer itself."""
    monkeypatch.setattr(guard, "check_files", lambda folder: True)  # not read in a process first
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    post = {"type": "TemplateProcessing", "single": [begin, TEXT_PIECE], "pair": REPEATED["pair"]}
    changes = {**pre(split("(?:ab|.)+?")), "post_processor": {**post, "special_tokens": special}}
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, changes))
    for text in ("Hello <|im_end|> ab", "", " \n\t", "é\U0001f600\x00", "abab" * 100):
        for add_special_tokens in (True, False):
            ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            options = {"add_special_tokens": add_special_tokens}
            assert ids == type(tokenizer).encode(tokenizer, text, **options)
    assert tokenizer.encode("Hello")[0] == 1
    assert tokenizer.encode("ab", return_tensors="np").shape[0] == 1
    with pytest.raises(GuardError):
        tokenizer.encode("\ud800")
    tokenizer.guard.close()


@pytest.mark.slow
def test_a_copy_of_a_tokenizer_works_on_its_own(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, pre(split("(?:ab|.)+?"))))
    other = copy.deepcopy(tokenizer)
    assert other.guard is not tokenizer.guard
    tokenizer.guard.close()
    assert other.encode("Hello") == type(tokenizer).encode(tokenizer, "Hello")
    other.guard.close()


END, SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA = END + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + SPACES
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{END}?|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{END}?"
)
GPT_4O += r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + SPACES
USUAL = {
    "demo": r"\p{N}|\p{Lu}+\p{Ll}*| ?\p{Ll}+|\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "GPT-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "GPT-4": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "Llama 3": LLAMA,
    "Qwen 2": LLAMA.replace("{1,3}", ""),
    "Qwen 3.5": END
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + SPACES,
    "GPT-4o": GPT_4O,
    "Mistral": GPT_4O.replace(END + "?", "").replace("{1,3}", ""),
    "DeepSeek 3, digits": r"\p{N}{1,3}",
    "DeepSeek 3, Chinese and Japanese": "[一-龥\u3040-ゟ゠-ヿ]+",
    "DeepSeek 3": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" + SPACES,
    "digits": r"\d",
    "spaces": " {2,}",
}
NOT_LINEAR = (
    "(a+)+", "(a|a)*b", ".*.*=", "a*b", "a+b", "a?a?a?aaa", "a{0,99}a{0,99}b", r"(a)\1", "(?=a+)b",
    "(?<=a)b", "a{1000}", "(?:a+)", "(?i:a+)", "a+|b*c", r"\s*[\r\n]+", "a{2,}b", "a**", "(a", "",
    r"\R+x", "[a-z]+[a-z]+", "x*", "e{99999,}",
)  # fmt: skip


@pytest.mark.parametrize("name", USUAL)
def test_usual_regular_expressions(name: str) -> None:
    """A tokenizer that splits by one of them needs no process to be read, nor to be called."""
    content = {**pre(split(USUAL[name])), "model": {"type": "BPE", "vocab": {}}}
    assert guard.check_parts(content)
    assert guard._splits_linearly(split(USUAL[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL)
def test_usual_regular_expressions_give_the_ids_of_the_tokenizer(tmp_path: Path, name: str) -> None:
    """Directly, for texts that are long runs of the same characters."""
    tokenizer = read_tokenizer(write_tokenizer(tmp_path, pre(split(USUAL[name]))))
    assert "encode" not in vars(tokenizer)
    for run in (
        "e",
        "E",
        " ",
        "\n",
        " \n",
        "1",
        "!",
        "'s",
        "\u0301",
        "e\u0301",
        "一",
        "ʰA",
        "\x00",
    ):
        for end in ("", "x", "!", "1", "\n"):
            text = run * 20_000 + end
            assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.guard._process is None


def test_other_regular_expressions() -> None:
    """They are read and called in the process: those that go back over a text, and those of which
    nobody knows."""
    for regex in NOT_LINEAR:
        assert not guard.check_parts({**pre(split(regex)), "model": {}}), regex
        assert not guard._splits_linearly(split(regex)), regex


def test_which_tokenizers_are_unusual() -> None:
    """Those that may take much more memory than their text are read in the process first."""
    assert guard.check_parts({"normalizer": {"type": "NFC"}, **added(100)})
    for changes in (
        norm(*[replace("e", "ee")] * 40),
        norm(*[{"type": "NFKC"}] * 30),
        norm(replace({"Regex": "(x+)+$"}, "y")),
        added(guard.NUM_ADDED + 1),
        unigram(["e"]),
    ):
        assert not guard.check_parts(changes), changes.keys()


SPECIAL_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.txt",
    "tokenizer.model",
    "additional_chat_templates",
    "additional_chat_templates/a.jinja",
)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="FIFOs are POSIX's")
@pytest.mark.parametrize("name", SPECIAL_FILES)
def test_special_files_are_refused(tmp_path: Path, name: str) -> None:
    """A FIFO, from which nothing ever comes, and /dev/zero, which never ends."""
    file = write_tokenizer(tmp_path, {}) / name
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path)):
        file.unlink(missing_ok=True)
        file.parent.mkdir(exist_ok=True)
        make(file)
        with pytest.raises(ValueError, match=r"no tokenizer can be read .*not a regular file"):
            load_tokenizer(tmp_path, explicit=True)


def test_files_of_other_programs_are_not_looked_at(tmp_path: Path) -> None:
    """Folders and special files of other names, large files that only begin like a tokenizer's."""
    write_tokenizer(tmp_path, {})
    for folder in ("checkpoint-1.5", "v1.0", "tokenizer.old"):
        (tmp_path / folder).mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "x.lock")
    with (tmp_path / "config.tar.gz").open("wb") as file:
        file.truncate(guard.FILE_BYTES + 1)
    assert load_tokenizer(tmp_path, explicit=True) is not None


def test_files_of_a_tokenizer_have_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, in items, and in the depth of their JSON; a link to nothing is no file."""
    write_tokenizer(tmp_path, {})
    (tmp_path / "chat_template.jinja").symlink_to(tmp_path / "nothing")
    (tmp_path / "subfolder").mkdir()
    (tmp_path / "model.safetensors").write_bytes(bytes(10**6))  # not a file of the tokenizer
    with monkeypatch.context() as patch:
        patch.setattr(guard, "NUM_ADDED", 100)
        (tmp_path / "vocab.json").write_text(json.dumps(dict.fromkeys(map(str, range(1000)), 0)))
        assert guard.check_files(tmp_path), "the whole vocabulary a second time is usual"
        (tmp_path / "vocab.json").rename(tmp_path / "added_tokens.json")
        assert not guard.check_files(tmp_path)
        (tmp_path / "added_tokens.json").unlink()
    monkeypatch.setattr(guard, "FILE_BYTES", 10**5)
    assert guard.check_files(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for content, message in (
            (b'"' + b"x" * 10**5 + b'"', f"{name} is not readable .it has more than 100000 bytes"),
            (b"[" * 50000, f"{name} is not readable JSON .nested too deeply"),
            (b"[]", f"{name} is not a JSON object"),
            (b"version https://git-lfs", f"{name} is not readable JSON .Expecting value"),
        ):
            (write_tokenizer(tmp_path, {}) / name).write_bytes(content)
            with pytest.raises(ValueError, match=f"no tokenizer can be read.*({message})"):
                load_tokenizer(tmp_path, explicit=True)
    write_tokenizer(tmp_path, {})
    monkeypatch.setattr(guard, "FILE_ITEMS", 100)
    with pytest.raises(ValueError, match=r"tokenizer.json has \d+ items; allowed: 100"):
        load_tokenizer(tmp_path, explicit=True)


def test_damage_is_told_with_the_file_and_what_to_do(tmp_path: Path) -> None:
    advice = "Copy its files again, or give the folder of another one as tokenizer"
    for name, content, message in (
        ("tokenizer.json", b"{}", "tokenizer.json has no model"),
        ("chat_template.jinja", b"caf\xe9", "chat_template.jinja is no UTF-8"),
        (
            "tokenizer_config.json",
            b'{"model_max_length": "x"}',
            "json: model_max_length is 'x'; allowed",
        ),
    ):
        file = write_tokenizer(tmp_path, {}) / name
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"no tokenizer can be read.*{message}.*{advice}"):
            load_tokenizer(tmp_path, explicit=True)
        file.unlink()


@pytest.mark.parametrize("is_usual", [True, False])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("head_dim", 31),
        ("head_dim", None),
        ("hidden_act", 5),
        ("layer_types", ["full_attention"]),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 10000.0}),
    ],
)
def test_a_fault_of_config_json_is_not_blamed_on_the_tokenizer(
    tmp_path: Path, key: str, value: Any, is_usual: bool
) -> None:
    """Whoever reads it: this process, or, if the tokenizer is unusual, that of the Guard."""
    changes = {} if is_usual else pre(split("a+b"))
    config = json.loads((DEMO_MODEL / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}), "utf-8")
    with pytest.raises(ValueError, match=rf"config\.json is refused by transformers \(.*{key}"):
        load_tokenizer(write_tokenizer(tmp_path, changes), explicit=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no tokenizer can be read.*tokenizer\.json has no model"):
        load_tokenizer(tmp_path, explicit=True)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path) -> None:
    """And nobody is asked on the terminal whether it should."""
    (tmp_path / "evil.py").write_text("raise SystemExit('code of the checkpoint ran')\n")
    auto_map = {"AutoTokenizer": ["evil.Evil", None]}
    write_tokenizer(tmp_path, {}, tokenizer_class="Evil", auto_map=auto_map)
    with pytest.raises(ValueError, match="contains custom code"):
        load_tokenizer(tmp_path, explicit=True)
    write_tokenizer(tmp_path, {}, auto_map=auto_map)
    assert load_tokenizer(tmp_path, explicit=True).encode("Hello")


@pytest.mark.slow
def test_formats_without_a_tokenizer_json(tmp_path: Path) -> None:
    """vocab.json and merges.txt: read in the process first, then here."""
    model = json.loads((DEMO_MODEL / "tokenizer.json").read_text("utf-8"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]), "utf-8")
    merges = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges), "utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    tokenizer = load_tokenizer(tmp_path, explicit=True)
    assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"
    assert is_linear(tokenizer.backend_tokenizer)


# -- the process --


def test_no_process_before_the_first_chat_and_none_after_the_last() -> None:
    """One per engine, from the first chat with a template of somebody else to its close."""
    with LLM(num_kv_blocks=32) as llm:
        process_guard = llm.get_tokenizer().guard
        llm.generate("Once", use_tqdm=False)
        llm.chat(HI, use_tqdm=False)
        assert process_guard._process is None, "the demo model's own template"
        llm.chat(HI, use_tqdm=False, chat_template="{{ messages[0].content }}")
        process = process_guard._process
        assert process.poll() is None
        llm.chat(HI, use_tqdm=False, chat_template="{{ messages }}")
        assert process_guard._process is process
    assert process.returncode is not None, "ended, and not a zombie"
    with pytest.raises(RuntimeError, match="this engine is closed; build a new LLM"):
        llm.chat(HI, use_tqdm=False)


def test_close_waits_for_one_call_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for their turn get an error: each may take seconds."""
    own, asked, go = Guard(), list[str](), threading.Event()
    own._process = SimpleNamespace(poll=lambda: None)  # type: ignore

    def ask(process: Any, task: str) -> dict[str, Any]:
        asked.append(task)
        assert go.wait(30)
        return {"result": task}

    def call(task: str) -> None:
        with pytest.raises(RuntimeError, match="closed") if asked else nullcontext():
            own.call(task)

    monkeypatch.setattr(guard, "_ask", ask)
    threads = [threading.Thread(target=call, args=("first",))]
    threads[0].start()
    until(lambda: bool(asked))
    threads += [threading.Thread(target=call, args=(f"{i}",)) for i in range(5)]
    threads.append(threading.Thread(target=own.close))
    for thread in threads[1:]:
        thread.start()
    until(lambda: own._is_closed)
    go.set()
    for thread in threads:
        thread.join(30)
    assert asked == ["first"]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_only_the_template_of_this_package_is_trusted(tokenizer: Any, tmp_path: Path) -> None:
    """It is rendered here, to the text of the process; not so one in a folder of somebody else."""
    own = read_tokenizer(DEMO_MODEL)
    for messages, options in (
        (HI, {}),
        (LONG, {"add_generation_prompt": True, "tools": [TOOL]}),
        ([*HI, {"role": "assistant", "content": "Well, "}], {"continue_final_message": True}),
    ):
        assert render_chat(own, messages, options) == render_chat(tokenizer, messages, options)
    assert own.guard._process is None
    assert read_tokenizer(write_tokenizer(tmp_path, {})).guard.own_template is None
    assert copy.deepcopy(own).guard.own_template == own.chat_template
    own.chat_template = "{{ messages }}"
    assert not own.guard._is_own(own.chat_template)


@pytest.mark.slow
def test_the_process_ends_with_the_guard() -> None:
    one = Guard()
    assert one.find_content_format("{{ messages }}", "auto") == "string"
    process = one._process
    del one
    gc.collect()
    assert process is not None
    assert process.returncode is not None


def test_a_process_that_was_killed_while_it_waited(tokenizer: Any) -> None:
    """By the system, when memory is short: the next call starts another one, and is served."""
    text = render_chat(tokenizer, HI, {})
    process = tokenizer.guard._process
    process.kill()
    process.wait()
    assert render_chat(tokenizer, HI, {}) == text
    assert tokenizer.guard._process is not process


def test_odd_entries_of_the_search_path(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python skips what is no string."""
    text = render_chat(tokenizer, HI, {})
    tokenizer.guard._process.kill()
    tokenizer.guard._process.wait()
    monkeypatch.setattr(sys, "path", [Path("/nowhere"), "", *sys.path])
    monkeypatch.setattr(os, "getcwd", raise_not_found)
    assert render_chat(tokenizer, HI, {}) == text


def raise_not_found() -> str:
    """os.getcwd() where the working directory was deleted."""
    raise FileNotFoundError(2, "No such file or directory")


def process_that(code: str) -> subprocess.Popen[bytes]:
    """Stands in for one of the guard's."""
    command = [sys.executable, "-S", "-c", code]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_process_that_ends_during_a_call() -> None:
    """The call fails with the reason, and the guard has no process: the next one starts another."""
    one = Guard()
    one._process = process_that("import sys; sys.stdin.buffer.read(8); sys.exit(3)")
    with pytest.raises(
        GuardError, match=r"ended with exit status 3 and without a reply; its limit is 512 MiB of m"
    ):
        one.call("render")
    assert one._process is None


def test_ctrl_c_leaves_no_half_read_reply() -> None:
    """The process of the call that was interrupted is ended, and the guard has none."""
    one = Guard()
    one._process = process = process_that("import time; time.sleep(1000)")

    def interrupted(size: int) -> bytes:
        raise KeyboardInterrupt

    process.stdout = SimpleNamespace(readline=interrupted, close=process.stdout.close)  # type: ignore
    with pytest.raises(KeyboardInterrupt):
        one.call("render")
    assert process.returncode is not None
    assert one._process is None


@pytest.mark.skipif(not hasattr(os, "getsid"), reason="sessions are POSIX's")
def test_a_terminal_s_ctrl_c_does_not_reach_the_process(tokenizer: Any) -> None:
    """It is in a session of its own."""
    render_chat(tokenizer, HI, {})
    assert os.getsid(tokenizer.guard._process.pid) == tokenizer.guard._process.pid


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is POSIX's")
@pytest.mark.slow
def test_a_fork_has_a_process_of_its_own(tokenizer: Any) -> None:
    """And leaves that of its parent alone, even if the parent's lock was held."""
    text = render_chat(tokenizer, HI, {})
    with tokenizer.guard._lock:
        pid = os.fork()
        if pid == 0:
            is_right = False
            try:
                signal.alarm(60)
                is_right = render_chat(tokenizer, HI, {}) == text
                tokenizer.guard.close()
            finally:
                os._exit(0 if is_right else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert tokenizer.guard._process.poll() is None
    assert render_chat(tokenizer, HI, {}) == text


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is POSIX's")
def test_a_fork_does_not_use_the_process_of_its_parent() -> None:
    """Nor wait for its lock, nor end it."""
    one = Guard()
    one._process = process = process_that("import sys; sys.stdin.read()")
    with one._lock:
        pid = os.fork()
        if pid == 0:
            is_right = False
            try:
                signal.alarm(60)
                sys.executable = ""  # so that no process starts
                one.call("render")
            except GuardError as error:
                is_right = "sys.executable is empty" in str(error)
                one.close()
            finally:
                os._exit(0 if is_right else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_a_process_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """sys.executable may be another program, or empty, where Python is embedded in one."""
    for executable, message in (
        ("", "sys.executable is empty"),
        (shutil.which("true") or sys.executable + "x", "does not start|No such file"),
        ("/nonexistent", "/nonexistent"),
    ):
        tokenizer = read_tokenizer(DEMO_MODEL)
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(VLLMValidationError, match=message):
            render_chat(tokenizer, HI, {"chat_template": "{{ messages }}"})


@pytest.mark.slow
def test_the_process_ends_with_its_parent() -> None:
    """Whatever way the parent ends: the pipe between them closes."""
    code = """
import os, sys
from nanoserve.guard import Guard
guard = Guard()
guard.find_content_format("{{ messages }}", "auto")
print(guard._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    pid = int(done.stdout)
    for _ in range(1000):
        try:
            os.kill(pid, 0)
        except OSError:
            return
        if "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return  # nobody reads its exit status here
        threading.Event().wait(0.01)
    raise AssertionError("still running")
