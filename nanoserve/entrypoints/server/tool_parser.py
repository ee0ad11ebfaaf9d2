"""Where in a model's text are its calls of tools?

Models write calls in different formats; that of Hermes and Qwen is here:

    Let me look. <tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>
    content      tool_calls[0]: weather, {"city": "Oslo"}

A stream holds back what may be the beginning of a call, and sends a call when it is complete. What
only looks like a call is content. If the model must call (tool_choice "required", or a function),
the same format is a grammar: see structural_tag.

Left out: the formats of other models, and sending arguments piece by piece.

vLLM: vllm/entrypoints/openai/tool_parsers/hermes_tool_parser.py (V0);
vllm/tool_parsers/: hermes_tool_parser.py, structural_tag_registry.py (V1).
"""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

Json = dict[str, Any]
START, END = "<tool_call>", "</tool_call>"
CALL = re.compile(rf"\s*{START}(.*?){END}\s*", re.DOTALL)


class ToolParser:
    """Reads one text, piece by piece."""

    def __init__(self, is_parallel: bool) -> None:
        """is_parallel: False drops all calls but the first."""
        self.text, self.num_calls, self.is_parallel = "", 0, is_parallel

    def read(self, delta: str, is_last: bool) -> Json:
        """What the next piece adds to the message: `content`, `tool_calls`, both or neither."""
        self.text += delta
        content, calls = "", []
        while match := CALL.search(self.text):
            content += self.text[: match.start()]
            self.text = self.text[match.end() :]
            if (function := read_call(match[1])) is None:
                content += match[0]
            elif self.num_calls == 0 or self.is_parallel:
                call = {"index": self.num_calls, "id": f"call-{uuid.uuid4().hex}"}
                calls.append({**call, "type": "function", "function": function})
                self.num_calls += 1
        end = len(self.text) if is_last else find_held(self.text)
        content, self.text = content + self.text[:end], self.text[end:]
        found = {"content": content, "tool_calls": calls}
        return {name: value for name, value in found.items() if value}


def find_held(text: str) -> int:
    """Where the text begins that may become a call, with the white space before it."""
    start = text.find(START)
    if start < 0:
        lengths = range(len(START) - 1, 0, -1)
        start = len(text) - next((n for n in lengths if text.endswith(START[:n])), 0)
    return len(text[:start].rstrip())


def read_call(text: str) -> Json | None:
    """OpenAI's function of a call in JSON; None if it is none."""
    try:
        call = json.loads(text)
        arguments = call["arguments"] if "arguments" in call else call["parameters"]
        return {"name": call["name"] + "", "arguments": json.dumps(arguments, ensure_ascii=False)}
    except (ValueError, KeyError, TypeError):
        return None


def structural_tag(functions: list[Json], is_one: bool) -> Json:
    """The grammar of an answer that is a call of one of these functions; several calls, unless
    `is_one`. A weak model writes white space for ever if it may."""
    tags = [
        {
            "type": "tag",
            "begin": f'{START}\n{{"name": {json.dumps(each["name"])}, "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": {"type": "object", **(each.get("parameters") or {})},
                "max_whitespace_cnt": 1,
            },
            "end": f"}}\n{END}",
        }
        for each in functions
    ]
    calls: Json = {"type": "tags_with_separator", "separator": "\n", "tags": tags}
    calls |= {"at_least_one": True, "stop_after_first": is_one}
    return {"type": "structural_tag", "format": calls}
