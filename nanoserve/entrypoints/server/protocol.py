"""What may a client ask for?

Fields have OpenAI's names, or vLLM's where OpenAI has none. Pydantic checks their types, and
SamplingParams their values. null is the default of a field. A field that is not known is ignored,
as in vLLM, because some clients send the fields of other servers; but if its name is nearly one of
ours, the request is refused: {"temprature": 0} would be answered as if it said nothing.

    {"prompt": "Once", "max_tokens": 5, "top_k": 3}
    -> CompletionRequest -> to_sampling_params() -> SamplingParams(max_tokens=5, top_k=3)

Left out: suffix, best_of, beam search (LLM.beam_search has it), images and audio.

vLLM: vllm/entrypoints/openai/protocol.py (V0); vllm/entrypoints/openai/: completion/protocol.py,
chat_completion/protocol.py (V1).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, Field, model_validator

from nanoserve.sampling_params import RequestOutputKind, SamplingParams

logger = logging.getLogger("nanoserve")
Json = dict[str, Any]
Prompts = str | list[int] | list[str] | list[list[int]]


# Fields of vLLM that would change the answer; of any other unknown one there is a line in the log.
UNSUPPORTED = ("suffix", "truncate_prompt_tokens", "use_beam_search", "chat_template")


class OpenAIBaseModel(BaseModel):
    """The body of a request."""

    model: str | None = None  # a name of /v1/models; None: the model that is served
    priority: int = 0  # low is early, if the scheduling policy is "priority"
    cache_salt: str | None = None  # only requests with the same one share cached blocks

    @model_validator(mode="before")
    @classmethod
    def read_names(cls, body: Any) -> Any:
        """Leave out what is null; refuse a field whose name is nearly one of ours."""
        if not isinstance(body, dict):
            return body
        unknown = sorted(body.keys() - cls.model_fields)
        for name in unknown:
            if near := get_close_matches(name, cls.model_fields, n=1, cutoff=0.85):
                raise ValueError(f"there is no field {name!r}. Did you mean {near[0]!r}?")
        if wrong := [name for name in UNSUPPORTED if body.get(name)]:
            raise ValueError(f"{wrong} would change the answer, and is not supported.")
        if unknown:
            logger.info("ignored fields of a request: %s", ", ".join(unknown))
        return {name: value for name, value in body.items() if value is not None}


class StreamOptions(BaseModel):
    include_usage: bool = False  # a last chunk with the numbers of tokens
    continuous_usage_stats: bool = False  # and in every chunk the numbers so far


class GenerationRequest(OpenAIBaseModel):
    """What both kinds of completions have in common. None: the model's own recommendation, if it
    has one, else SamplingParams' default."""

    n: int = Field(1, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: Json | None = None  # text, json_object, json_schema or structural_tag
    structured_outputs: Json | None = None  # the fields of StructuredOutputsParams
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # in logprobs "token_id:12", not the text
    kv_transfer_params: Json | None = None
    vllm_xargs: Json | None = None  # SamplingParams.extra_args

    def to_sampling_params(self, recommended: Mapping[str, Any], **own: Any) -> SamplingParams:
        """recommended: the model's generation_config.json. Raises ValueError or TypeError."""
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs and stream do not go together.")
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ValueError("stream_options needs stream=true.")
        if getattr(self, "top_logprobs", 0) and not getattr(self, "logprobs", None):
            raise ValueError("top_logprobs needs logprobs=true.")
        names = SamplingParams.__dataclass_fields__.keys() & type(self).model_fields.keys()
        values = {name: getattr(self, name) for name in names - {"structured_outputs"}}
        given = {name: value for name, value in values.items() if value is not None} | own
        if form := {**(self.structured_outputs or {}), **read_form(self.response_format)}:
            given["structured_outputs"] = form
        transfer = self.kv_transfer_params and {"kv_transfer_params": self.kv_transfer_params}
        given["extra_args"] = transfer or self.vllm_xargs
        kind = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        defaults = SamplingParams.from_generation_config(recommended)
        return replace(defaults, **given, output_kind=kind)


def read_form(response_format: Json | None) -> Json:
    """The field of StructuredOutputsParams that says the same; {} for any text."""
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return {"json": schema}
        case {"type": "structural_tag"}:
            return {"structural_tag": json.dumps(response_format)}
    kinds = "text, json_object, json_schema (with json_schema.schema) or structural_tag"
    raise ValueError(f"response_format is {response_format}; allowed types: {kinds}.")


def read_prompts(given: Any) -> list[Any]:
    """One entry for each prompt of a field of type Prompts: a text, or token ids."""
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    if not given:
        raise ValueError("there is no prompt. Give a text, token ids, or a list of either.")
    return [given] if is_one else list(given)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: go on where the prompt ends."""

    prompt: Prompts
    max_tokens: int = Field(16, ge=0)  # 0: with echo only
    logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True


class FunctionDefinition(BaseModel, extra="allow"):
    name: str = Field(min_length=1)
    parameters: Json = {}  # a JSON schema


class Tool(BaseModel):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class FunctionName(BaseModel):
    name: str


class NamedTool(BaseModel):
    type: Literal["function"] = "function"
    function: FunctionName


class ChatTemplateFields(OpenAIBaseModel):
    """A conversation, and how a chat template makes a prompt of it."""

    messages: list[Json] = Field(min_length=1)
    tools: list[Tool] = []
    documents: list[Json] | None = None
    add_generation_prompt: bool | None = None  # None: unless continue_final_message
    continue_final_message: bool = False
    chat_template_kwargs: Json = {}

    def template_options(self) -> Json:
        """Keyword arguments of InputProcessor.render_chat. Raises ValueError for a template of the
        request: a template is a program, and a server runs none of its clients."""
        if "chat_template" in self.chat_template_kwargs:
            raise ValueError("chat_template: the server chooses it (--chat-template), no request.")
        adds = self.add_generation_prompt
        return {
            "tools": [tool.model_dump(exclude_unset=True) for tool in self.tools] or None,
            "documents": self.documents,
            "add_generation_prompt": not self.continue_final_message if adds is None else adds,
            "continue_final_message": self.continue_final_message,
            **self.chat_template_kwargs,
        }


class ChatCompletionRequest(GenerationRequest, ChatTemplateFields):
    """POST /v1/chat/completions: answer the last message of a conversation."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # its newer name; both None: as many as fit
    logprobs: bool = False
    top_logprobs: int = 0
    tool_choice: Literal["none", "auto", "required"] | NamedTool = "auto"
    parallel_tool_calls: bool = True  # False: one call at most

    @property
    def may_call(self) -> bool:
        """May the answer have calls of tools?"""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def is_named(self) -> bool:
        return isinstance(self.tool_choice, NamedTool)

    def required_functions(self) -> list[Json]:
        """The answer must be a call of one of these; []: it may be any text. Raises ValueError."""
        functions = [tool.function.model_dump() for tool in self.tools]
        if isinstance(self.tool_choice, NamedTool):
            functions = [x for x in functions if x["name"] == self.tool_choice.function.name]
        elif self.tool_choice != "required":
            return []
        if not functions:
            raise ValueError(f"tool_choice is {self.tool_choice}, and no tool is such a function.")
        return functions


class TokenizeRequest(ChatTemplateFields):
    """POST /tokenize: of a prompt, or of messages."""

    prompt: str | None = None
    messages: list[Json] = []
    add_special_tokens: bool | None = None  # None: for a prompt yes, for messages no
    return_token_strs: bool = False


class DetokenizeRequest(OpenAIBaseModel):
    """POST /detokenize."""

    tokens: list[int]


class EmbeddingRequest(OpenAIBaseModel):
    """POST /v1/embeddings: a vector of each input."""

    input: Prompts
    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] = "float"


class ScoreRequest(OpenAIBaseModel):
    """POST /v1/score: how near are the texts of each pair? (Of one query, all documents.)"""

    queries: Prompts = Field(validation_alias=AliasChoices("queries", "text_1", "data_1"))
    documents: Prompts = Field(validation_alias=AliasChoices("documents", "text_2", "data_2"))


class LoadLoRAAdapterRequest(OpenAIBaseModel):
    """POST /v1/load_lora_adapter; without a path: POST /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_path: str = ""
