"""What may a prompt be?

    "Once upon a time"                           text
    [12, 7, 4]                                   token ids; a NumPy array or a tensor of them, too
    {"prompt": "Once upon a time"}               a TextPrompt
    {"prompt_token_ids": [12, 7, 4]}             a TokensPrompt; "prompt" may hold its text
    {"prompt": "Once", "cache_salt": "Ada"}      shares cached blocks with the salt "Ada" only

Everything that takes one prompt takes each of these. `generate`, `stream` and `beam_search` also
take a list of them. The messages of a chat may have contents of several text parts:

    [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]

Numbers and arrays of NumPy and torch become Python's own by their tolist(), so that neither package
is imported here.

Left out: images, audio, video, embeddings, and prompts of encoder-decoder models.

vLLM: vllm/inputs/, entrypoints/chat_utils.py (V0); vllm/inputs/llm.py, vllm/renderers/:
inputs/preprocess.py, chat_utils.py, hf.py (V1).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, TypedDict

from nanoserve.exceptions import VLLMValidationError

logger = logging.getLogger("nanoserve")


class _PromptOptions(TypedDict, total=False):
    cache_salt: str | None  # only requests with the same salt share cached blocks


class _TokensPromptOptions(_PromptOptions, total=False):
    prompt: str  # the text of the token ids


class TextPrompt(_PromptOptions):
    """A prompt as text: TextPrompt(prompt="Once upon a time")."""

    prompt: str


class TokensPrompt(_TokensPromptOptions):
    """A prompt as token ids: TokensPrompt(prompt_token_ids=[12, 7, 4])."""

    prompt_token_ids: list[int]


PromptType = str | list[int] | TextPrompt | TokensPrompt
Message = dict[str, Any]  # {"role": "user", "content": "..."}

KNOWN_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "type", "prompt_token_offsets")
MISSING_KEYS = {  # vLLM's other keys, and what they are for
    "multi_modal_data": "images, audio and video",
    "multi_modal_uuids": "images, audio and video",
    "mm_processor_kwargs": "images, audio and video",
    "media_io_kwargs": "images, audio and video",
    "prompt_embeds": "embeddings in place of token ids",
    "prompt_is_token_ids": "embeddings in place of token ids",
    "encoder_prompt": "encoder-decoder models",
    "decoder_prompt": "encoder-decoder models",
    "token_type_ids": "cross-encoders",
}
CHAT_EXAMPLE = "Give for example [{'role': 'user', 'content': 'Hello'}]."
# The roles that chat templates know, each template some of them.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "model", "ipython")
TEXT_PART_TYPES = ("text", "input_text", "output_text", "refusal", "thinking")
# {% for part in message["content"] %}, {% for part in message.content %}, {% for part in content %}
LOOP_OVER_CONTENT = re.compile(r"""\{%-?\s*for\s+\w+\s+in\s+[\w.\[\]'"]*content\b""")


class PromptComponents(NamedTuple):
    """A prompt, taken apart. It has text, or token ids, or both: then the token ids count."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None


def as_python(value: Any) -> Any:
    """The number or list that a scalar, array or tensor of NumPy or torch holds. Any other value
    stays as it is."""
    is_array = hasattr(value, "tolist") and not isinstance(value, type)
    return value.tolist() if is_array else value


def prompt_to_seq(prompts: Any) -> list[Any]:
    """The prompts as a list: one prompt becomes a list of one. A list of ints is one prompt.

    >>> prompt_to_seq([1, 2, 3])
    [[1, 2, 3]]
    """
    prompts = as_python(prompts)
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, (bytes, bytearray)) or not isinstance(prompts, Seq):
        raise TypeError(
            "prompts must be a string, token ids, a dict such as {'prompt': ...}, or a list of "
            f"these, got {prompts!r}."
        )
    items = [item if type(item) in (int, str) else as_python(item) for item in prompts]
    return [items] if items and all(isinstance(item, int) for item in items) else items


def parse_prompt(prompt: Any) -> PromptComponents:
    """The parts of one prompt, of any form. Raises TypeError or ValueError for anything else."""
    if isinstance(prompt, PromptComponents):
        return prompt
    prompt = as_python(prompt)
    if isinstance(prompt, str):
        return PromptComponents(prompt)
    if isinstance(prompt, Mapping):
        return _parse_dict(prompt)
    if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Seq):
        raise TypeError(
            "a prompt must be a string, a list of token ids, or a dict with 'prompt' or "
            f"'prompt_token_ids', got {prompt!r}."
        )
    return PromptComponents(token_ids=as_token_ids(prompt))


def _parse_dict(prompt: Mapping[str, Any]) -> PromptComponents:
    """The parts of a TextPrompt or TokensPrompt. A key whose value is None does not count."""
    if "input_ids" in prompt:
        raise TypeError(
            f"a {type(prompt).__name__} of a tokenizer is no prompt. Give its input_ids: "
            "tokenizer(text).input_ids."
        )
    given = {key: value for key, value in prompt.items() if value is not None}
    for key, value in given.items():
        if key in MISSING_KEYS and not (isinstance(value, Mapping) and not value):
            raise VLLMValidationError(
                f"the prompt has {key!r}, which is for {MISSING_KEYS[key]}: nanoserve has text "
                "prompts only. Leave it out.",
                parameter=key,
            )
        if key == "type" and value != "token":
            raise VLLMValidationError(
                f"the prompt is of type {value!r}; allowed: 'token', or no type.", parameter="type"
            )
        if key not in (*KNOWN_KEYS, *MISSING_KEYS):
            raise VLLMValidationError(
                f"the prompt has an unknown key {key!r}; allowed: prompt, prompt_token_ids, "
                "cache_salt.",
                parameter=str(key),
            )
    text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise TypeError(f"a dict prompt needs 'prompt' or 'prompt_token_ids', got {prompt!r}.")
    if text is not None and not isinstance(text, str):
        raise TypeError(f"'prompt' of a dict prompt must be a string, got {text!r}.")
    token_ids = None if token_ids is None else as_token_ids(token_ids)
    return PromptComponents(text, token_ids, given.get("cache_salt"))


def pick_salt(own: Any, given: Any) -> str | None:
    """The salt of a prompt: its own, or else the one that was given for the whole call."""
    for salt in (own, given):
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise TypeError(f"cache_salt must be None or a non-empty string, got {salt!r}.")
    return given if own is None else own


def as_token_ids(items: Any) -> list[int]:
    """A new list of Python ints. Raises TypeError for anything but a sequence of integers."""
    items = as_python(items)
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Seq):
        raise TypeError(f"token ids must be a list of ints, got {items!r}.")
    token_ids = [item if type(item) is int else as_python(item) for item in items]
    for item in token_ids:
        if type(item) is not int and (isinstance(item, bool) or not isinstance(item, int)):
            raise TypeError(f"token ids must be ints, got {item!r} in the prompt.")
    return token_ids


def refuse_missing(call: str, **given: Any) -> None:
    """Raise ValueError if an argument of vLLM that nanoserve has no use for is neither None nor
    empty."""
    for name, value in given.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(item is not None and item != {} for item in values):
            raise VLLMValidationError(
                f"{call} got {name}={value!r}; nanoserve does not have this part of vLLM. Leave it "
                "out, or give None.",
                parameter=name,
                value=value,
            )


# -- chat --


def render_chat(
    tokenizer: Any, messages: Any, options: dict[str, Any], content_format: str = "auto"
) -> str:
    """The text of a conversation, made by a chat template. `options` go to the template; one of
    them, chat_template, replaces the tokenizer's own. content_format: see parse_chat_messages;
    "auto" is what the template expects.
    """
    template = options.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if not template:
        raise VLLMValidationError(
            "this model's tokenizer has no chat template. Give one as chat_template=..., use "
            "generate with a prompt of your own, or a model that was trained to chat."
        )
    messages = parse_chat_messages(messages, find_content_format(template, content_format))
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # a template may raise anything: a missing key, an odd role
        message = f"the chat template refuses {messages!r}: {error}."
        raise VLLMValidationError(message) from error


def parse_chat_messages(messages: Any, content_format: str) -> list[Message]:
    """The messages, each content in one format, as chat templates expect it.

    "string": one string; the parts of a content are joined by line breaks. "openai": a list of
    {"type": "text", "text": ...}. None, the content of a message with tool_calls, has no parts.
    Raises TypeError for what is no conversation, ValueError for a part that is not text.
    """
    if not messages or isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(
            f"a conversation is a list of message dicts, got {messages!r}. {CHAT_EXAMPLE}"
        )
    parsed = []
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(
                f"a conversation is a list of message dicts, got {messages!r}. {CHAT_EXAMPLE}"
            )
        parsed.append(dict(message))
        if (role := message.get("role", "user")) not in ROLES:
            logger.warning(
                "a message has the role %r, which few chat templates know. Usual roles: system, "
                "user, assistant, tool.",
                role,
            )
        content = message.get("content", 0)  # a message without one is the template's business
        parts = [content] if isinstance(content, str) else [] if content is None else content
        if isinstance(parts, (list, tuple)):
            texts = [_text_of(part) for part in parts]
            as_parts = [{"type": "text", "text": text} for text in texts]
            parsed[-1]["content"] = as_parts if content_format == "openai" else "\n".join(texts)
    return parsed


def _text_of(part: Any) -> str:
    """The text of one part of a content."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PART_TYPES:
        raise VLLMValidationError(
            f"a content part is of type {kind!r}; nanoserve takes text parts only, such as "
            f"{{'type': 'text', 'text': ...}}. Allowed types: {', '.join(TEXT_PART_TYPES)}.",
            parameter="type",
            value=kind,
        )
    text = part.get(kind if kind in ("refusal", "thinking") else "text")
    if not isinstance(text, str):
        raise TypeError(f"the text of a content part must be a string, got {part!r}.")
    return text


def find_content_format(chat_template: Any, given: str = "auto") -> str:
    """The format that the template expects: "openai" if it loops over the parts of a content, else
    "string". `given` decides if it is not "auto"."""
    if given not in ("auto", "string", "openai"):
        raise VLLMValidationError(
            f"chat_template_content_format is {given!r}; allowed: auto, string, openai.",
            parameter="chat_template_content_format",
            value=given,
        )
    if given != "auto":
        return given
    has_loop = isinstance(chat_template, str) and LOOP_OVER_CONTENT.search(chat_template)
    return "openai" if has_loop else "string"
