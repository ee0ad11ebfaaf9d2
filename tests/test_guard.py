"""What a checkpoint's template and tokenizer may cost: the text is that of transformers, and every
hostile one ends with an error or an answer, in bounded time and memory."""

from __future__ import annotations

import copy
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nanoserve import LLM, guard
from nanoserve.config import DEMO_MODEL
from nanoserve.exceptions import VLLMValidationError
from nanoserve.guard import Guard, GuardError, is_linear, read_tokenizer
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
    tokenizer = read_tokenizer(DEMO_MODEL)
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
    "Mistral": """{%- set loop_messages = messages[1:] if messages[0].role == 'system' else messages %}
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
{% endif %}{{ '<turn>' + role + '\n' }}{% if message.content is string %}{{ message.content | trim }}
{% elif message.content is iterable %}{% for item in message.content %}{{ item.text | trim }}
{% endfor %}{% endif %}{{ '<end>\n' }}{% endfor %}""",
    "DeepSeek": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}
{% endif %}{% set ns = namespace(is_first=false, system='', is_tool=false) %}
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
    "options": "{{ a }} {{ b }} {{ c | tojson }} {{ d }} {{ bos_token }} {{ add_generation_prompt }}",
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
    template = "{{ a }} {{ b }} {{ c }}"
    options = {"chat_template": template, "a": np.int64(3), "b": np.bool_(False), "c": object()}
    assert render_chat(tokenizer, HI, options) == "3 False <object>"


# -- hostile templates --

NESTED_RANGES = "{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}"
HOSTILE = {  # the template, and what the message says; None: a text
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
        "{% set n = namespace(s='a') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "needs more than|takes more than",
    ),
    "lipsum": ("{{ lipsum(n=10**7) }}", "takes more than|needs more than"),
    "join": ("{{ ('a' * 10**6) | join('b' * 10**6) }}", "needs more than"),
    "replace": ("{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}", "needs more than"),
    "replace filter": ("{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}", "needs more than"),
    "replace chain": ("{{ 'a' " + "| replace('a', 'aa')" * 60 + " }}", "needs more than"),
    "indent": ("{{ ('\\n' * 10**6) | indent('b' * 10**6, blank=true) }}", "needs more than"),
    "expandtabs": ("{{ ('\\t' * 10**6).expandtabs(10**6) }}", "needs more than|too long"),
    "tojson indent": ("{{ [1] | tojson(indent=10**10) }}", "needs more than"),
    "power": ("{{ 9 ** 9 ** 9 }}", "takes more than|needs more than"),
    "power of 10": ("{{ 10 ** 5000 }}", "limit"),
    "range": ("{{ range(10**9) | list }}", "Range too big"),
    "batch": ("{{ range(9) | batch(10**10, 'x') | list }}", "needs more than"),
    "slice": ("{{ range(9) | slice(10**10) | list }}", "takes more than|needs more than"),
    "wordwrap": ("{{ ('a' * 10**7) | wordwrap(1) }}", "takes more than|needs more than"),
    "urlize": ("{{ ('<a@' * 10**6) | urlize }}", "takes more than|needs more than|characters"),
    "cycler": ("{{ cycler(*range(99999)).next() }}", None),
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
    "many macros": ("{% macro a() %}{% endmacro %}" * 20000, "takes more than|recursion|too many"),
    "many blocks": ("{% if true %}" * 200 + "{% endif %}" * 200, "nested|recursion"),
    "long error": ("{{ raise_exception('a' * 10**8) }}", r"aaaa$|aaaa\.$"),
    "unclosed": ("{% for a in", "unexpected|Unexpected|expected"),
    "syntax": ("{{ 1 +* 2 }}", "unexpected"),
    "surrogate": ("{{ '\\ud800' }}", None),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}", "no loader"),
    "extends": ("{% extends 'a' %}", "no loader"),
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe|undefined"),
    "globals": ("{{ raise_exception.__globals__ }}", "unsafe|undefined"),
    "format escape": ("{{ '{0.__class__.__init__}'.format(1) }}", "unsafe"),
    "attr": ("{{ '' | attr('__class__') }}", "unsafe|undefined"),
    "subclasses": ("{{ [].__class__.__base__.__subclasses__() }}", "unsafe|undefined"),
    "cycle object": ("{{ cycler.__init__.__globals__.os.system('id') }}", "unsafe|undefined"),
    "namespace dunder": ("{% set n = namespace() %}{% set n.__class__ = 1 %}", "underscore|unsafe"),
}
SLOW_OR_OVER = {"lipsum", "power", "slice", "wordwrap", "urlize", "many macros"}
SLOW_OR_OVER |= {"nested ranges", "doubling", "macros that call twice", "long text", "recursion"}
SLOW_OR_OVER |= {"recursive loop", "replace", "replace filter", "replace chain"}


def check_hostile(tokenizer: Any, name: str) -> None:
    template, message = HOSTILE[name]
    try:
        text = render_chat(tokenizer, HI, {"chat_template": template})
    except VLLMValidationError as error:
        assert str(error).startswith("the chat template refuses [{")
        assert len(str(error)) < 2500
        assert message is not None, error
        assert pytest.raises(Exception, match=message) and _matches(message, str(error)), error
    else:
        assert message is None, text[:100]
    assert "Hi" in render_chat(tokenizer, HI, {}), "the next request is served"


def _matches(pattern: str, text: str) -> bool:
    import re

    return re.search(pattern, text) is not None


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates(tokenizer: Any, name: str) -> None:
    check_hostile(tokenizer, name)
