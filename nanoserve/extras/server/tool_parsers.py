"""Where in a model's text are its calls of tools?

    Let me look.                                     message.content
    <tool_call>
    {"name": "weather", "arguments": {"city":"Oslo"}}
    </tool_call>                                     message.tool_calls[0]: weather {"city":"Oslo"}

Models write calls in different formats; that of Hermes and Qwen is here, which the demo model's
chat template has, too. A parser is given a text in pieces, as it is streamed, and says what each
piece adds to the message:

    'Let me look.\\n<to'      content 'Let me look.'          '\\n<to' may begin a call: it is held
    'ol_call>{"name": "we'
    'ather", "arguments": '  tool_calls [{index 0, name weather}]
    '{"city":"O'             tool_calls [{index 0, arguments '{"city":"O'}]

A whole text is one piece, so that a stream says the same as an answer in one. What only looks like
a call is content. Arguments are the text that the model wrote: without a grammar it may be no JSON.

The same format as a grammar, for tool_choice "required" or a function: see get_structural_tag.
Nothing here needs the server. What LLM.chat(..., tools=...) returns can be read, too:

    Hermes2ProToolParser.extract_tool_calls(output.outputs[0].text)

Left out: other formats (subclass ToolParser, add it to TOOL_PARSERS), reasoning.

vLLM: vllm/entrypoints/openai/tool_parsers/ (V0); vllm/tool_parsers/: hermes_tool_parser.py,
structural_tag_registry.py (V1).
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from nanoserve.extras.server.response_format import json_format
from nanoserve.extras.server.responses import ChatMessage

Json = dict[str, Any]


class ToolParser(ABC):
    """Reads one text, piece by piece. Each choice of an answer needs a parser of its own."""

    TAGS: tuple[str, ...]  # must stay in the text, even if they are special tokens

    def __init__(self, parallel_tool_calls: bool = True) -> None:
        """parallel_tool_calls: False drops all calls but the first."""
        self.parallel_tool_calls = parallel_tool_calls

    @abstractmethod
    def extract_tool_calls_streaming(self, delta_text: str, finished: bool = False) -> ChatMessage:
        """What the next piece adds to the message: `content`, `tool_calls`, both or neither.
        finished: it is the last piece. A call's first entry has its id and name."""

    @classmethod
    def extract_tool_calls(cls, text: str, parallel_tool_calls: bool = True) -> ChatMessage:
        """The message that a whole text is; `tool_calls` only if there are some."""
        found = cls(parallel_tool_calls).extract_tool_calls_streaming(text, finished=True)
        message: ChatMessage = {"content": found.get("content")}
        if "tool_calls" in found:
            message["tool_calls"] = found["tool_calls"]
            for call in message["tool_calls"]:
                del call["index"]  # it is that in the list
        return message

    @classmethod
    @abstractmethod
    def get_structural_tag(
        cls,
        tools: list[Json],
        tool_choice: str | Json,
        parallel_tool_calls: bool = True,
        other: Json | None = None,
    ) -> Json | None:
        """The grammar of a text that follows tool_choice ("auto", "required" or a function), for
        StructuredOutputsParams(structural_tag=...); None: any text. tools: as in OpenAI's API; see
        protocol.check_tools. other: the format that an answer without a call must have."""

    @classmethod
    @abstractmethod
    def is_format_of(cls, chat_template: str) -> bool:
        """Does this template tell a model to write calls in this format?"""


class Hermes2ProToolParser(ToolParser):
    """{"name": ..., "arguments": {...}} between <tool_call> and </tool_call>.

    If the name comes first, as the templates ask, arguments are sent as they come. Any other order
    is held until the end of the call. What follows the arguments within a call is not read.
    """

    TAGS = START, END = "<tool_call>", "</tool_call>"
    # A call up to its arguments, or one without arguments.
    HEAD = re.compile(
        r'\s*\{\s*"name"\s*:\s*"([^"\\<]{1,256})"\s*(?:,\s*"(?:arguments|parameters)"\s*:|(\}))'
    )
    IN_TEMPLATE = re.compile(r'<tool_call>[^<]{0,40}\{\\*"name')

    def __init__(self, parallel_tool_calls: bool = True) -> None:
        super().__init__(parallel_tool_calls)
        self.text = ""  # what is not understood yet
        self.space = ""  # white space that is content, unless the text ends with a call
        self.num_calls = 0
        self.is_after_call = False  # with nothing but white space between
        self.delta: ChatMessage = {}
        self.value = JsonValue()
        self.read: Callable[[bool], bool] = self._read_content  # True: it has found something

    def extract_tool_calls_streaming(self, delta_text: str, finished: bool = False) -> ChatMessage:
        self.text, self.delta = self.text + delta_text, {}
        while self.read(finished):
            pass
        return self.delta

    # -- reading: each method takes what it knows from self.text --

    def _read_content(self, finished: bool) -> bool:
        before, start, rest = self.text.partition(self.START)
        if start:
            self._add_content(before)
            self.text, self.read = rest, self._read_head
            return True
        held = 0 if finished else partial_tag_overlap(self.text, self.START)
        self._add_content(self.text[: len(self.text) - held])
        self.text = self.text[len(self.text) - held :]
        if finished and self.space and not self.is_after_call:
            self._show(self.space)
        return False

    def _read_head(self, finished: bool) -> bool:
        """<tool_call> was read."""
        head = self.HEAD.match(self.text)
        if head is not None:
            self._add_call(head[1], "{}" if head[2] else "")
            self.value = JsonValue()
            self.text = self.text[head.end() :]
            self.read = self._read_tail if head[2] else self._read_arguments
            return True
        body, end, _ = self.text.partition(self.END)
        if not (end or finished) and self.text.lstrip()[:1] in ("", "{"):
            return False  # it may become a call
        call = load_call(body)
        if call is None:
            self._add_content(self.START)
            self.read = self._read_content
        else:
            self._add_call(*call)
            self.text, self.read = self.text[len(body) :], self._read_tail
        return True

    def _read_arguments(self, finished: bool) -> bool:
        if not self.value.has_begun:
            self.text = self.text.lstrip()
        size = self.value.read(self.text)
        self._add_arguments(self.text[:size])
        self.text = self.text[size:]
        if self.value.is_over:
            self.read = self._read_tail
        return self.value.is_over

    def _read_tail(self, finished: bool) -> bool:
        """To the end of the call, or to the next call if the end is missing."""
        tag = re.search("|".join(self.TAGS), self.text)
        if tag is None:
            held = partial_tag_overlap(self.text, *self.TAGS)
            self.text = self.text[len(self.text) - held :]
            return False
        self.text = self.text[tag.end() if tag[0] == self.END else tag.start() :]
        self.read = self._read_content
        return True

    # -- what was found --

    def _add_content(self, text: str) -> None:
        text = self.space + text
        shown = text.rstrip()
        self.space = text[len(shown) :]
        if shown:
            self._show(shown)
            self.is_after_call = False

    def _show(self, text: str) -> None:
        self.delta["content"] = (self.delta.get("content") or "") + text

    def _add_call(self, name: str, arguments: str) -> None:
        self.num_calls += 1
        self.is_after_call = True
        if self.is_dropped:
            return
        self.delta.setdefault("tool_calls", []).append(
            {
                "index": self.num_calls - 1,
                "id": f"chatcmpl-tool-{uuid.uuid4().hex}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
        )

    def _add_arguments(self, text: str) -> None:
        """More arguments of the last call."""
        if not text or self.is_dropped:
            return
        calls = self.delta.setdefault("tool_calls", [])
        if calls:
            calls[-1]["function"]["arguments"] += text
        else:
            calls.append({"index": self.num_calls - 1, "function": {"arguments": text}})

    @property
    def is_dropped(self) -> bool:
        """Is the last call one too many?"""
        return self.num_calls > 1 and not self.parallel_tool_calls

    # -- the grammar --

    @classmethod
    def get_structural_tag(
        cls,
        tools: list[Json],
        tool_choice: str | Json,
        parallel_tool_calls: bool = True,
        other: Json | None = None,
    ) -> Json | None:
        functions = [tool["function"] for tool in tools]
        is_auto, is_named = tool_choice == "auto", isinstance(tool_choice, Mapping)
        if is_named:
            name = tool_choice["function"]["name"]  # type: ignore[index]
            functions = [each for each in functions if each["name"] == name]
        if is_auto and other is None and not any(each.get("strict") for each in functions):
            return None
        calls: Json = {
            "type": "tags_with_separator",
            "tags": [cls.make_tag(each, is_auto) for each in functions],
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": is_named or not parallel_tool_calls,
        }
        if is_auto and other is None:
            calls |= {"type": "triggered_tags", "triggers": [cls.START], "at_least_one": False}
            del calls["separator"]
        elif is_auto:
            calls = {"type": "or", "elements": [other, calls]}
        return {"type": "structural_tag", "format": calls}

    @classmethod
    def make_tag(cls, function: Json, is_auto: bool) -> Json:
        """The grammar of one call. Its arguments follow the function's parameters: if it is
        "strict", or, where the model must call, unless it is not "strict"."""
        strict, parameters = function.get("strict"), {"type": "object"}
        if strict or (strict is None and not is_auto):
            parameters |= function.get("parameters") or {}
        name = json.dumps(function["name"], ensure_ascii=False)
        return {
            "type": "tag",
            "begin": f'{cls.START}\n{{"name": {name}, "arguments": ',
            "content": json_format(parameters),
            "end": f"}}\n{cls.END}",
        }

    @classmethod
    def is_format_of(cls, chat_template: str) -> bool:
        return cls.IN_TEMPLATE.search(chat_template) is not None


class JsonValue:
    """Where does a JSON value end that comes in pieces? Brackets are counted, strings skipped; what
    else a value must be is not checked."""

    def __init__(self) -> None:
        self.depth = 0  # open brackets
        self.in_string = self.is_escaped = False
        self.has_begun = self.is_over = False

    def read(self, text: str) -> int:
        """The number of characters of the next piece that are part of the value."""
        for position, character in enumerate(text):
            self.has_begun = True
            if self.in_string:
                self.in_string = self.is_escaped or character != '"'
                self.is_escaped = character == "\\" and not self.is_escaped
            elif character == '"':
                self.in_string = True
            elif character in "{[":
                self.depth += 1
            elif character == "<" or (self.depth == 0 and character in ",}]"):
                self.is_over = True  # before it: no JSON has a < outside of strings
                return position
            elif character in "}]":
                self.depth -= 1
                self.is_over = self.depth == 0
                if self.is_over:
                    return position + 1
        return len(text)


def load_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call in JSON, whatever the order of its keys; None: it is none."""
    try:
        call = json.loads(text, strict=False)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        return call["name"], json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def partial_tag_overlap(text: str, *tags: str) -> int:
    """How many characters at the end of the text may be the beginning of a tag? The tags begin with
    their only <.

    >>> partial_tag_overlap("Let me look.<to", "<tool_call>")
    3
    """
    end = text[text.rfind("<") :] if "<" in text else ""
    return len(end) if any(tag.startswith(end) and tag != end for tag in tags) else 0


TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": Hermes2ProToolParser,
    "qwen3_json": Hermes2ProToolParser,
}


def find_tool_parser(chat_template: str | Mapping[str, str] | None) -> type[ToolParser] | None:
    """The parser for the format of this template, or of several by name; None if it has none that
    is known."""
    if not isinstance(chat_template, str):
        chat_template = "\n".join((chat_template or {}).values())
    found = (each for each in TOOL_PARSERS.values() if each.is_format_of(chat_template))
    return next(found, None)
