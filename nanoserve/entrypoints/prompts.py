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

import json
import logging
import math
import re
import sys
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import islice
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypedDict

from nanoserve.entrypoints.errors import VLLMValidationError, as_validation_error, brief

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
BYTES = (bytes, bytearray, memoryview)  # sequences of ints, and no token ids
MAX_ITEMS = 2**26  # of a list, an array or a tensor: more token ids than any model takes
NAME_LIMIT = 1024  # characters of a request id or a cache salt
MAX_CHAT_CHARACTERS = 2**24  # of all messages of a conversation
INT64_LIMIT = 2**63 - 1
CHAT_EXAMPLE = "Give for example [{'role': 'user', 'content': 'Hello'}]."
# The roles that chat templates know, each template some of them.
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "model", "ipython")
TEXT_PART_TYPES = ("text", "input_text", "output_text", "refusal", "thinking")


class PromptComponents(NamedTuple):
    """A prompt, taken apart. It has text, or token ids, or both: then the token ids count."""

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None


def as_python(value: Any) -> Any:
    """The number or list that a scalar, array or tensor of NumPy or torch holds. Any other value
    stays as it is."""
    if not hasattr(value, "tolist") or isinstance(value, (type, memoryview)):
        return value
    number = getattr(value, "numel", getattr(value, "size", 0))  # torch, NumPy
    _check_number(number() if callable(number) else number)
    try:
        return value.tolist()
    except (NotImplementedError, RuntimeError) as error:  # a tensor without numbers, or sparse
        raise TypeError(f"{brief(value)} cannot be read as numbers ({error}).") from error


def _check_number(number: Any) -> None:
    """Refuse so many items that a list of them fills the memory."""
    if isinstance(number, int) and number > MAX_ITEMS:
        raise VLLMValidationError(
            f"an input has {number} items; allowed: up to {MAX_ITEMS}. Shorten it."
        )


def _expand(values: Seq[Any]) -> list[Any]:
    """The items of a sequence, numbers of NumPy and torch as Python's own. One of one's own may be
    wrong about its length, or have no end."""
    try:
        number = len(values)
    except OverflowError:  # range(10**30)
        number = sys.maxsize
    _check_number(number)
    items = [
        item if type(item) in (int, str) else as_python(item) for item in islice(values, number + 1)
    ]
    if len(items) > number:
        raise VLLMValidationError(f"{brief(values)} has more items than its len(), {number}.")
    return items


def prompt_to_seq(prompts: Any) -> list[Any]:
    """The prompts as a list: one prompt becomes a list of one. A list of ints is one prompt.

    >>> prompt_to_seq([1, 2, 3])
    [[1, 2, 3]]
    """
    prompts = as_python(prompts)
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, BYTES) or not isinstance(prompts, Seq):
        raise TypeError(
            "prompts must be a string, token ids, a dict such as {'prompt': ...}, or a list of "
            f"these, got {brief(prompts)}."
        )
    items = _expand(prompts)
    is_ids = any(isinstance(item, int) for item in items)  # all, or one is not right
    return [items] if is_ids and not any(isinstance(x, (str, Mapping)) for x in items) else items


def attach(engine: Any, root: Any, lora_request: Any) -> None:
    """Give a request, whose first sequence is `root`, what it needs of the engine's chapters: an
    adapter, another engine's keys and values. Raises ValueError or TypeError if it cannot."""
    set_lora(engine.lora_manager, root, lora_request)
    set_kv_transfer(engine.kv_connector, root)


def set_lora(manager: Any, root: Any, lora_request: Any) -> None:
    """Let a request, whose first sequence is `root`, run with an adapter. `manager` is the engine's
    LoRAManager; None: it has none. Raises ValueError or TypeError if it cannot."""
    if lora_request is None:
        return
    if manager is None:
        raise VLLMValidationError(
            f"lora_request is {brief(lora_request)}, and this engine takes no adapters. Build it "
            "with enable_lora=True, or leave lora_request out.",
            parameter="lora_request",
            value=lora_request,
        )
    manager.attach(root, lora_request)


def set_kv_transfer(connector: Any, root: Any) -> None:
    """Let a request, whose first sequence is `root`, get keys and values from another engine, or
    leave them for one, if it asks for that. `connector` is the engine's KVConnectorBase; None: it
    has none. Raises ValueError or TypeError if it cannot."""
    params = (root.sampling_params.extra_args or {}).get("kv_transfer_params")
    if connector is not None:
        connector.attach(root, params)
    elif params is not None:
        raise refuse_transfer(params)


def refuse_transfer(params: Any) -> VLLMValidationError:
    """The error for kv_transfer_params that no part of the engine reads."""
    return VLLMValidationError(
        f"kv_transfer_params is {brief(params)}, and this engine does not share its KV cache. Give "
        "it a kv_transfer_config with a tier of type 'p2p', or leave kv_transfer_params out.",
        parameter="kv_transfer_params",
        value=params,
    )


def parse_prompt(prompt: Any) -> PromptComponents:
    """The parts of one prompt, of any form. Raises TypeError or ValueError for anything else."""
    if isinstance(prompt, PromptComponents):
        return prompt
    prompt = as_python(prompt)
    if isinstance(prompt, str):
        return PromptComponents(prompt)
    if isinstance(prompt, Mapping):
        return _parse_dict(prompt)
    if isinstance(prompt, BYTES) or not isinstance(prompt, Seq):
        raise TypeError(
            "a prompt must be a string, a list of token ids, or a dict with 'prompt' or "
            f"'prompt_token_ids', got {brief(prompt)}."
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
                f"the prompt is of type {brief(value)}; allowed: 'token', or no type.",
                parameter="type",
            )
        if key not in (*KNOWN_KEYS, *MISSING_KEYS):
            raise VLLMValidationError(
                f"the prompt has an unknown key {brief(key)}; allowed: prompt, prompt_token_ids, "
                "cache_salt.",
                parameter=brief(key),
            )
    text, token_ids = given.get("prompt"), given.get("prompt_token_ids")
    if text is None and token_ids is None:
        raise TypeError(
            f"a dict prompt needs 'prompt' or 'prompt_token_ids', got {brief(dict(prompt))}."
        )
    if text is not None and not isinstance(text, str):
        raise TypeError(f"'prompt' of a dict prompt must be a string, got {brief(text)}.")
    token_ids = None if token_ids is None else as_token_ids(token_ids)
    return PromptComponents(text, token_ids, given.get("cache_salt"))


def pick_salt(own: Any, given: Any) -> str | None:
    """The salt of a prompt: its own, or else the one that was given for the whole call."""
    for salt in (own, given):
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise TypeError(f"cache_salt must be None or a non-empty string, got {brief(salt)}.")
        _check_length("cache_salt", salt or "")
    return given if own is None else own


def _check_length(name: str, value: str) -> None:
    if len(value) > NAME_LIMIT:
        raise VLLMValidationError(
            f"{name} has {len(value)} characters; allowed: up to {NAME_LIMIT}.",
            parameter=name,
            value=value,
        )


def check_request(request_id: Any, priority: Any) -> int:
    """The priority as an int. Raises TypeError or ValueError for what cannot be a request's id or
    priority."""
    if not isinstance(request_id, str) or not request_id:
        raise TypeError(f"request_id must be a non-empty string, got {brief(request_id)}.")
    _check_length("request_id", request_id)
    priority = as_python(priority)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise TypeError(f"priority must be an int, got {brief(priority)}.")
    if abs(priority) > INT64_LIMIT:
        raise VLLMValidationError(
            f"priority is {brief(priority)}; allowed: -2**63 + 1 to 2**63 - 1.",
            parameter="priority",
            value=priority,
        )
    return priority


def as_request_ids(given: Any) -> list[str]:
    """Several request ids. Raises TypeError for anything else."""
    is_several = isinstance(given, Iterable) and not isinstance(given, BYTES)
    request_ids = list(given) if is_several else []
    if not is_several or not all(isinstance(each, str) for each in request_ids):
        raise TypeError(f"request_ids must be a string, or a list of strings, got {brief(given)}.")
    return request_ids


def as_arrival_time(arrival_time: Any) -> float | None:
    """Seconds of time.time() at which a request came; None: now. Raises TypeError or ValueError."""
    arrival_time = as_python(arrival_time)
    if arrival_time is None:
        return None
    if isinstance(arrival_time, bool) or not isinstance(arrival_time, (int, float)):
        raise TypeError(f"arrival_time must be None or a number, got {brief(arrival_time)}.")
    if not 0 <= arrival_time < math.inf or arrival_time > INT64_LIMIT:
        raise VLLMValidationError(
            f"arrival_time is {brief(arrival_time)}; allowed: None, or seconds of time.time().",
            parameter="arrival_time",
            value=arrival_time,
        )
    return arrival_time


def as_token_ids(items: Any) -> list[int]:
    """A new list of Python ints. Raises TypeError for anything but a sequence of integers."""
    items = as_python(items)
    if isinstance(items, (str, *BYTES, Mapping)) or not isinstance(items, Seq):
        raise TypeError(f"token ids must be a list of ints, got {brief(items)}.")
    token_ids = _expand(items)
    for item in token_ids:
        if type(item) is not int and (isinstance(item, bool) or not isinstance(item, int)):
            raise TypeError(f"token ids must be ints, got {brief(item)} in the prompt.")
    return token_ids


def encode(
    tokenizer: Any, text: str, most: int, add_special_tokens: bool = True, what: str = "the prompt"
) -> list[int]:
    """The token ids of `text`. Raises VLLMValidationError if the tokenizer fails, if there are far
    more than `most` of them, or for half of a surrogate pair, which no tokenizer reads."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        part = text[max(0, error.start - 20) : error.start + 1]
        raise VLLMValidationError(
            f"{what} holds {brief(part)}; allowed: whole characters, no half of a surrogate pair."
        ) from None
    check_text_length(tokenizer, text, most, what)
    with as_validation_error("the tokenizer cannot encode", text):
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def check_text_length(tokenizer: Any, text: str, most: int, what: str) -> None:
    """Refuse a text of far more than `most` tokens, without reading all of it.

    A tokenizer needs half a second or more for a million characters. So the beginning of a long
    text is tokenized first. What follows it can join its last tokens to one (the last word grows),
    but never half of them: if it has twice as many tokens as fit, the text cannot fit. Tokens are
    counted and not characters, because a tokenizer may drop spaces or join any number of unknown
    characters to one token. (vLLM refuses more characters than `most` times the longest token of
    the vocabulary.)
    """
    size = 16 * most + 1000
    tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
    takes_spaces = any(token.lstrip or token.rstrip for token in tokens)  # any number, to one token
    while size < len(text):
        beginning = re.sub(r"\s+", " ", text[:size]) if takes_spaces else text[:size]
        with as_validation_error("the tokenizer cannot encode", text):
            number = len(tokenizer.encode(beginning, add_special_tokens=False))
        if number > 2 * most + 500:
            raise VLLMValidationError(
                f"{what} has {len(text)} characters, the first {size} of them are {number} tokens, "
                f"and no more than {most} tokens fit (max_model_len, or the KV cache). Shorten it."
            )
        size *= 4


def as_trace_headers(trace_headers: Any) -> Mapping[str, str] | None:
    """HTTP headers that name the trace of the caller, such as "traceparent". Raises TypeError for
    anything but None and a mapping of strings."""
    is_mapping = isinstance(trace_headers, Mapping)
    if trace_headers is None or (
        is_mapping and all(isinstance(s, str) for pair in trace_headers.items() for s in pair)
    ):
        return trace_headers
    raise TypeError(
        f"trace_headers must be None or a dict of strings, got {brief(trace_headers)}. Give the "
        "headers of the request, such as {'traceparent': '00-...'}."
    )


def refuse_missing(call: str, **given: Any) -> None:
    """Raise ValueError if an argument of vLLM that nanoserve has no use for is neither None nor
    empty."""
    for name, value in given.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(item is not None and item != {} for item in values):
            raise VLLMValidationError(
                f"{call} got {name}={brief(value)}; nanoserve does not have this part of vLLM. "
                "Leave it out, or give None.",
                parameter=name,
                value=value,
            )


# -- chat --


def render_chat(
    tokenizer: Any,
    messages: Any,
    options: dict[str, Any],
    content_format: str = "auto",
) -> str:
    """The text of a conversation, made by a chat template. `options` go to the template; one of
    them, chat_template, replaces the tokenizer's own. content_format: see parse_chat_messages;
    "auto" is what the template expects.
    """
    check_messages_length(messages)
    for name in ("tools", "documents"):
        check_dicts(name, options.get(name))
    template = options.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if not template:
        raise VLLMValidationError(
            "this model's tokenizer has no chat template. Give one as chat_template=... "
            "(a server: --chat-template FILE), complete a prompt of your own with generate (a "
            "server: /v1/completions), or take a model that was trained to chat."
        )
    guard = tokenizer.guard  # the process that renders; see guard.py
    content_format = guard.find_content_format(template, content_format)
    messages = parse_chat_messages(messages, content_format)
    try:
        return guard.render(tokenizer, messages, options)
    except Exception as error:  # a template may raise anything: a missing key, ...
        message = f"the chat template refuses {brief(messages)}: {error}."
        raise VLLMValidationError(message) from error


def parse_option(name: str, text: str, example: str = "") -> Any:
    """The value of an option that was given as JSON text. Raises ValueError if it is none."""
    try:
        return json.loads(text)
    except ValueError as error:
        advice = example and f" Write '{example}'."
        message = f"{name} is {brief(text)}, which is not JSON ({error}).{advice}"
        raise ValueError(message) from None


def check_is_dict(name: str, given: Any, example: str = "") -> None:
    """Raise TypeError unless an option is a dict."""
    if not isinstance(given, Mapping):
        advice = example and f"; for example {example}"
        raise TypeError(f"{name} must be a dict, got {brief(given)}{advice}.")


def check_dicts(name: str, given: Any) -> None:
    """Refuse tools or documents of a chat that are no list of dicts. In place of a dict stands a
    dataclass, a pydantic model, or a function, which is a tool."""
    allowed = f"{name} must be None or a list of dicts"
    if not isinstance(given, (list, tuple, type(None))):
        raise TypeError(f"{allowed}, got {brief(given)}.")
    for item in given or ():
        is_model = hasattr(item, "__dataclass_fields__") or hasattr(item, "model_dump")
        is_dict = isinstance(item, (Mapping, FunctionType, MethodType)) or is_model
        if isinstance(item, type) or not is_dict:
            raise TypeError(f"{allowed}, got a list with {brief(item)}.")


def parse_chat_messages(messages: Any, content_format: str) -> list[Message]:
    """The messages as chat templates expect them.

    Each content has one format. "string": one string; the parts of a content are joined by line
    breaks. "openai": a list of {"type": "text", "text": ...}; the content of a tool is a string
    even so. No content, or None (that of a message with tool_calls), is a content of no parts. The
    arguments of tool calls are dicts, made of the JSON that a model wrote. Raises TypeError for
    what is no conversation, ValueError for a part that is not text.
    """
    if not messages or isinstance(messages, (str, Mapping)) or not isinstance(messages, Iterable):
        raise TypeError(
            f"a conversation is a list of message dicts, got {brief(messages)}. {CHAT_EXAMPLE}"
        )
    parsed = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(
                f"a conversation is a list of message dicts, got {brief(message)} as item "
                f"{number}. {CHAT_EXAMPLE}"
            )
        message, role, content = dict(message), message.get("role"), message.get("content")
        if role is not None and not isinstance(role, str):
            raise TypeError(
                f"the role of item {number} must be a string, got {brief(role)}. {CHAT_EXAMPLE}"
            )
        if role is not None and role not in ROLES:
            logger.warning(
                "a message has the role %s, which few chat templates know. Usual roles: system, "
                "user, assistant, tool.",
                brief(role),
            )
        parts = [content] if isinstance(content, str) else [] if content is None else content
        if not isinstance(parts, (list, tuple)):
            raise TypeError(
                f"the content of item {number} must be a string or a list of parts, got "
                f"{brief(content)}. {CHAT_EXAMPLE}"
            )
        texts = [text for part in parts if (text := _text_of(part)) is not None]
        as_parts = [{"type": "text", "text": text} for text in texts]
        has_parts = content_format == "openai" and role != "tool"
        message["content"] = as_parts if has_parts else "\n".join(texts)
        calls = message.get("tool_calls")
        if role == "assistant" and calls is not None:
            given = calls if isinstance(calls, (list, tuple)) else [calls]  # one alone
            message["tool_calls"] = [_parse_tool_call(call) for call in given]
            if not given:  # as if there were none: templates ask for the key only
                del message["tool_calls"]
        parsed.append(message)
    return parsed


def check_messages_length(messages: Any) -> None:
    """Refuse a conversation of more characters than any template is given. Whether it fits is known
    when the template has made one text of it: a template may drop what is old."""
    texts: list[str] = []
    for message in messages if isinstance(messages, (list, tuple)) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, (list, tuple)) else [content]:
            values = part.values() if isinstance(part, Mapping) else [part]
            texts += (text for text in values if isinstance(text, str))
    number = sum(map(len, texts))
    if number > MAX_CHAT_CHARACTERS:
        raise VLLMValidationError(
            f"the messages have {number} characters; allowed: {MAX_CHAT_CHARACTERS}. Shorten them."
        )


def _parse_tool_call(call: Any) -> dict[str, Any]:
    """A copy of a tool call, with a dict for its arguments. What is no JSON object becomes {}: it
    stands in the history, so that refusing it would end the conversation."""
    function: Any = call.get("function") if isinstance(call, Mapping) else None
    has_name = isinstance(function, Mapping) and isinstance(function.get("name"), str)
    if not has_name or call.get("type", "function") != "function":
        raise VLLMValidationError(
            f"tool_calls holds {brief(call)}; allowed: {{'type': 'function', 'function': "
            "{'name': ..., 'arguments': ...}}.",
            parameter="tool_calls",
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            logger.warning("The arguments of a tool call are no JSON: they become {}.")
            arguments = {}
    if not isinstance(arguments, Mapping):
        logger.warning("The arguments of a tool call are no JSON object: they become {}.")
        arguments = {}
    return {**call, "function": {**function, "arguments": dict(arguments)}}


def _text_of(part: Any) -> str | None:
    """The text of one part of a content; None for a part to leave out."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in TEXT_PART_TYPES:
        raise VLLMValidationError(
            f"a content part is of type {brief(kind)}; nanoserve takes text parts only, such as "
            f"{{'type': 'text', 'text': ...}}. Allowed types: {', '.join(TEXT_PART_TYPES)}.",
            parameter="type",
            value=kind,
        )
    text = part.get(kind if kind in ("refusal", "thinking") else "text")
    if text is None and kind in ("text", "refusal"):
        logger.warning("A content part without text is left out.")
    elif not isinstance(text, str):
        raise TypeError(f"the text of a content part must be a string, got {brief(part)}.")
    return text


def find_content_format(chat_template: Any, given: str = "auto") -> str:
    """The format that the template expects: "openai" if it loops over the parts of a content, else
    "string". `given` decides if it is not "auto"."""
    if given not in ("auto", "string", "openai"):
        raise VLLMValidationError(
            f"chat_template_content_format is {brief(given)}; allowed: auto, string, openai.",
            parameter="chat_template_content_format",
            value=given,
        )
    if given != "auto":
        return given
    has_loop = isinstance(chat_template, str) and _loops_over_content(chat_template)
    return "openai" if has_loop else "string"


def _loops_over_content(chat_template: str) -> bool:
    """Does the template have a loop over the content of a message? False if it cannot be read.

    Three forms count, with filters and slices or without: a loop over message.content, where
    `message` is an item of the messages or the variable of a loop over them; a loop over a variable
    `content`; in a macro, a loop over a parameter that is called with message.content.
    """
    from jinja2 import Environment, nodes
    from jinja2.ext import Extension

    class Generation(Extension):
        """transformers' tag around what an assistant says."""

        tags = {"generation"}  # noqa: RUF012 (jinja2's name and type)

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def source(node: Any) -> Any:
        """What the filters and slices of an expression are applied to."""
        while isinstance(node, (nodes.Filter, nodes.Test)) or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        ):
            node = node.node
        return node

    def is_name(node: Any, names: set[str]) -> bool:
        return isinstance(node, nodes.Name) and node.name in names

    def is_content(node: Any) -> bool:
        """message.content or message["content"]"""
        node, key = source(node), None
        if isinstance(node, nodes.Getattr):
            key = node.attr
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            key = node.arg.value
        return key == "content" and is_message(node.node)

    def is_message(node: Any) -> bool:
        is_item = isinstance(node, nodes.Getitem) and is_name(source(node.node), conversations)
        return is_item or is_name(node, messages)

    environment = Environment(extensions=["jinja2.ext.loopcontrols", Generation])
    try:
        tree = environment.parse(chat_template)
    except Exception:  # rendering will say what is wrong with the template
        return False
    loops = list(tree.find_all(nodes.For))
    conversations: set[str] = set()  # variables that hold the messages
    found = {"messages"}
    sets: list[Any] = list(tree.find_all(nodes.Assign))
    sets = [each for each in sets if isinstance(each.target, nodes.Name)]
    while found - conversations:
        conversations |= found
        found = {each.target.name for each in sets if is_name(source(each.node), conversations)}
    over_messages = [loop for loop in loops if is_name(source(loop.iter), conversations)]
    targets = [loop.target for loop in over_messages]
    messages = {target.name for target in targets if isinstance(target, nodes.Name)}
    contents: dict[int, set[str]] = {}  # of each loop in a macro: parameters that hold a content
    for macro in tree.find_all(nodes.Macro):
        calls = [call for call in tree.find_all(nodes.Call) if is_name(call.node, {macro.name})]
        names = [arg.name for arg in macro.args]
        given = [pair for call in calls for pair in zip(names, call.args, strict=False)]
        given += [(each.key, each.value) for call in calls for each in call.kwargs]
        in_macro = {name for name, value in given if is_content(value)}
        contents |= {id(loop): in_macro for loop in macro.find_all(nodes.For)}
    return any(
        is_content(loop.iter) or is_name(source(loop.iter), contents.get(id(loop), {"content"}))
        for loop in loops
    )
