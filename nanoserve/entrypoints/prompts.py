"""How does a user of vLLM spell a prompt, and a message of a chat?

    "Once upon a time"                      text
    [12, 7, 4]                              token ids
    TextPrompt(prompt="Once")               a dict, with a cache_salt if you like
    TokensPrompt(prompt_token_ids=[12])     a dict

InputProcessor.process takes each of these. In a conversation, OpenAI's API and chat templates
disagree about one thing: the arguments of a tool call are JSON text there, and a dict here.

Left out: images, audio, embeddings, prompts of encoder-decoder models.

vLLM: vllm/inputs/, vllm/entrypoints/chat_utils.py (V0 and V1).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypedDict


class _PromptOptions(TypedDict, total=False):
    cache_salt: str  # only requests with the same salt share cached blocks


class TextPrompt(_PromptOptions):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_PromptOptions):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


PromptType = str | list[int] | TextPrompt | TokensPrompt


def as_template_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of OpenAI's API as chat templates expect it. Raises ValueError for arguments that
    are no JSON, and for a message without a role."""
    if not isinstance(message.get("role"), str):
        raise ValueError(f"a message needs a role, such as 'user'; this one has none: {message}.")
    calls = [dict(call) for call in message.get("tool_calls") or ()]
    for call in calls:
        function = call["function"] = dict(call.get("function") or {})
        arguments = function.get("arguments") or {}
        function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {**message, "tool_calls": calls} if calls else dict(message)
