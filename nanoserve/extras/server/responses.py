"""What does a client get?

    {"id": "cmpl-7", "object": "text_completion", "created": 1700000000, "model": "demo",
     "choices": [{"index": 0, "text": " upon", "logprobs": None, "finish_reason": "length", ...}],
     "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2, ...}}

Requests are pydantic models (protocol.py), and responses are dicts: these types say what is in
them. A stream has thousands of chunks a second. To make and check a model for each would cost more
than all the rest.

The fields are OpenAI's, and vLLM's beside them. Left out: those that would always be null here.

vLLM: vllm/entrypoints/openai/protocol.py (V0); vllm/entrypoints/openai/: completion/protocol.py,
chat_completion/protocol.py; vllm/entrypoints/serve/: engine/protocol.py, tokenize/protocol.py (V1).
"""

from __future__ import annotations

from typing import Any

from typing_extensions import NotRequired, TypedDict


class PromptTokensDetails(TypedDict):
    cached_tokens: int  # of the prompt tokens, those whose KV came from the prefix cache


class Usage(TypedDict):
    """Numbers of tokens, over all prompts and choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]


class CompletionLogprobs(TypedDict):
    """One entry for each token; None for the first token of an echoed prompt."""

    text_offset: list[int]  # characters of the tokens before it
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]  # of the token itself and of the likeliest


class PromptLogprob(TypedDict):
    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]  # per prompt token; None for the first


class Choice(TypedDict):
    """What the choices of all answers have. In a stream: what is new since the last chunk."""

    index: int  # prompt i, its completion j: i * n + j
    finish_reason: str | None  # "stop", "length", "abort", "tool_calls"; None: the stream goes on
    stop_reason: int | str | None  # the stop string or stop token id; None for an EOS token
    token_ids: NotRequired[list[int]]  # if return_token_ids


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[list[int]]  # if return_token_ids
    prompt_logprobs: NotRequired[PromptLogprobs]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]  # of the text in UTF-8


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]  # likeliest first


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]  # one for each token


class FunctionCall(TypedDict):
    name: NotRequired[str]
    arguments: str  # JSON, as the model wrote it


class ToolCall(TypedDict):
    """A call of a tool. In a stream, its first entry has all, and the next ones more arguments."""

    index: NotRequired[int]  # in a stream: the call's number
    id: NotRequired[str]
    type: NotRequired[str]  # "function"
    function: FunctionCall


class ChatMessage(TypedDict):
    role: NotRequired[str]
    content: NotRequired[str | None]  # None: there are tool_calls only
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(Choice):
    message: NotRequired[ChatMessage]
    delta: NotRequired[ChatMessage]  # in a stream, in place of `message`
    logprobs: ChatLogprobs | None


class Response(TypedDict):
    """What both kinds of completion have. In a stream: one chunk."""

    id: str
    object: str
    created: int  # seconds since 1970
    model: str
    system_fingerprint: NotRequired[str]  # the same for as long as the same seed gives the same
    usage: NotRequired[Usage]
    kv_transfer_params: NotRequired[dict[str, Any]]  # for the engine that goes on from here


class CompletionResponse(Response):
    choices: list[CompletionChoice]


class ChatCompletionResponse(Response):
    choices: list[ChatChoice]
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[list[int]]
    prompt_text: NotRequired[str]  # if return_prompt_text


class EmbeddingData(TypedDict):
    index: int  # of the input
    object: str  # "embedding"
    embedding: list[float] | str  # base64: the numbers as float32, little-endian


class EmbeddingResponse(TypedDict):
    id: str
    object: str  # "list"
    created: int  # seconds since 1970
    model: str
    data: list[EmbeddingData]
    usage: Usage


class ScoreData(TypedDict):
    index: int  # of the pair
    object: str  # "score"
    score: float  # a cosine


class ScoreResponse(TypedDict):
    id: str
    object: str  # "list"
    created: int  # seconds since 1970
    model: str
    data: list[ScoreData]
    usage: Usage


class TokenizeResponse(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(TypedDict):
    prompt: str


class ModelCard(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None  # of an adapter: its base model
    max_model_len: int


class ModelList(TypedDict):
    object: str
    data: list[ModelCard]


class ErrorInfo(TypedDict):
    message: str
    type: str
    param: str | None  # the field that is wrong
    code: int  # the HTTP status


class ErrorResponse(TypedDict):
    error: ErrorInfo
