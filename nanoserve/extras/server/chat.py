"""What does /v1/chat/completions answer?

    POST /v1/chat/completions  {"messages": [{"role": "user", "content": "Tell me a story."}]}
    -> AsyncLLM.render_chat    "<|im_start|>user\\nTell me a story.<|im_end|>\\n<|im_start|>..."
    -> {"object": "chat.completion", "choices": [{"index": 0, "finish_reason": "stop",
        "message": {"role": "assistant", "content": "Once upon a time ..."}}], "usage": {...}}

As a stream: a chunk with the role alone, then one with each piece of the text in `delta`.

With `tools`, which reach the template, an answer may be a call. The client makes it, and puts both
into the conversation:

    {"role": "assistant", "content": null, "tool_calls": [{"id": "chatcmpl-tool-1", "type":
     "function", "function": {"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}}]}
    {"role": "tool", "tool_call_id": "chatcmpl-tool-1", "content": "rain"}

tool_parsers.py finds the calls in the text. Its format is known from the chat template, so that no
flag is needed. (vLLM needs --enable-auto-tool-choice and --tool-call-parser.) tool_choice says what
the model may do: "auto" what it likes, "none" no call, "required" or a function a call, for which
the text is constrained. Its arguments then follow the function's schema, unless "strict" is false;
with "auto", only if it is true. (vLLM's follow it only if "strict" is true.) The finish_reason of a
call is "tool_calls", but "stop" if the function was named, and "length" if the call is cut off.

top_logprobs are those of the likeliest tokens, as in OpenAI's API. (vLLM counts the token itself
among them, first, also if it is not likely.)

vLLM: vllm/entrypoints/openai/serving_chat.py (V0);
vllm/entrypoints/openai/chat_completion/: api_router.py, serving.py (V1).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from nanoserve.exceptions import VLLMValidationError
from nanoserve.extras.server.protocol import (
    ChatCompletionRequest,
    ChatTemplateFields,
    Json,
    describe_post,
)
from nanoserve.extras.server.reply import (
    Reply,
    clip_logprob,
    reply,
    to_prompt_logprobs,
    top_logprobs,
)
from nanoserve.extras.server.response_format import as_format, make_params
from nanoserve.extras.server.responses import (
    ChatCompletionResponse,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    TopLogprob,
)
from nanoserve.extras.server.tool_parsers import TOOL_PARSERS, ToolParser, find_tool_parser
from nanoserve.inputs import parse_chat_messages
from nanoserve.logprobs import Logprob
from nanoserve.output_processor import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from nanoserve.extras.server.app import ServerState
    from nanoserve.extras.structured_output import StructuredOutputsParams


def make_router(state: ServerState) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post(
        "/v1/chat/completions",
        **describe_post(ChatCompletionRequest, ChatCompletionResponse, streams=True),
    )
    async def create_chat_completion(raw_request: Request) -> Response:
        """Answer a conversation."""
        return await reply(state, raw_request, ChatCompletionRequest, ChatReply)

    return router


async def render(state: ServerState, request: ChatTemplateFields) -> str:
    """The prompt of a conversation. Raises ValueError or TypeError."""
    kwargs = {**(request.chat_template_kwargs or {})}
    kwargs.pop("chat_template", None)
    template, tools = request.own_template, request.tools
    if template is not None:
        check_template(state, template)
    if state.args.exclude_tools_when_tool_choice_none and request.tool_choice == "none":
        tools = None
    own = {"documents": request.documents, "reasoning_effort": request.reasoning_effort}
    kwargs |= {key: value for key, value in own.items() if value is not None}
    return await state.async_llm.render_chat(
        request.messages,
        chat_template=template,
        add_generation_prompt=request.adds_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        tools=tools,
        chat_template_kwargs={key: value for key, value in kwargs.items() if value is not None},
    )


def check_template(state: ServerState, template: Any) -> None:
    """Raise ValueError if a request may not bring this template. A name could be that of a file of
    this machine, so only the text of a template will do."""
    if not state.trust_request_chat_template:
        raise VLLMValidationError(
            "the request has a chat_template, and this server takes none: a template is a program. "
            "Leave it out, or start the server with --trust-request-chat-template.",
            parameter="chat_template",
        )
    if not isinstance(template, str) or "{" not in template:
        raise VLLMValidationError(
            "chat_template must be the text of a Jinja template, with a { in it.",
            parameter="chat_template",
        )


def choose_tool_parser(
    state: ServerState, request: ChatCompletionRequest
) -> type[ToolParser] | None:
    """The parser of the calls that the answer may have. Raises ValueError if none is known."""
    args, llm = state.args, state.async_llm
    if not request.finds_calls:
        return None
    if not (request.must_call or args.enable_auto_tool_choice):
        why = "this server has no tool_choice 'auto' (--no-enable-auto-tool-choice)"
    elif args.tool_call_parser is not None:
        return TOOL_PARSERS[args.tool_call_parser]
    else:
        own = request.own_template or llm.chat_template
        found = find_tool_parser(own or getattr(llm.tokenizer, "chat_template", None))
        if found is not None:
            return found
        why = (
            "the chat template tells the model of no format of calls that is known here. If the "
            f"model has one of {', '.join(TOOL_PARSERS)}, start the server with --tool-call-parser"
        )
    message = f"{why}. Give tool_choice 'none': then a call stays text."
    raise VLLMValidationError(message, parameter="tool_choice", value=request.tool_choice)


class ChatReply(Reply[ChatCompletionRequest]):
    """The answer to one POST /v1/chat/completions."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    role = "assistant"
    echoed = ""  # the text of the last message, if the answer is to begin with it
    prompt_text = ""
    parser_cls: type[ToolParser] | None = None  # None: the answer is text only

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parsers: dict[int, ToolParser] = {}  # of each choice of a stream
        self.choices_with_calls: set[int] = set()

    @property
    def may_have_form(self) -> bool:
        return self.parser_cls is not None or super().may_have_form

    def make_form(self) -> StructuredOutputsParams | None:
        """Of a call, of an answer, or of either."""
        request, form = self.request, super().make_form()
        if self.parser_cls is None:
            return form
        other = None if form is None or request.must_call else as_format(form)
        choice = request.tool_choice or "auto"
        tag = self.parser_cls.get_structural_tag(request.tools, choice, self.is_parallel, other)
        return None if tag is None else make_params({"structural_tag": json.dumps(tag)})

    @property
    def is_parallel(self) -> bool:
        return self.request.parallel_tool_calls is not False

    @property
    def max_tokens(self) -> int | None:
        most = self.request.most_tokens
        recommended = self.async_llm.model_config.generation_defaults.get("max_new_tokens")
        return recommended if most is None else most

    async def make_prompts(self) -> list[Any]:
        request = self.request
        self.parser_cls = choose_tool_parser(self.state, request)
        if self.parser_cls is not None:
            added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
            if any(each.special and each.content in self.parser_cls.TAGS for each in added):
                request.skip_special_tokens = False
        self.prompt_text = await render(self.state, request)
        if not request.adds_generation_prompt:
            [last] = parse_chat_messages(request.messages[-1:], "string")
            self.role = last.get("role", self.role)
            self.echoed = last["content"] if request.echo else ""
        return [self.prompt_text]

    async def add(self, prompts: list[Any]) -> None:
        try:
            await super().add(prompts)
        except VLLMValidationError as error:
            if self.parser_cls is None or error.parameter != "structured_outputs":
                raise
            advice = 'With "strict": false the arguments of a function are any object.'
            raise VLLMValidationError(f"{error} {advice}", parameter="tools") from error

    def begin(self, output: RequestOutput) -> list[Json]:
        """The role of each choice, and its text if that is echoed."""
        chunks = []
        content = "" if self.parser_cls is None else None  # it may be a call
        for index in range(self.request.num_choices):
            for delta in ({"role": self.role, "content": content}, {"content": self.echoed}):
                if delta.get("role") or self.echoed:
                    choice: Json = {"index": index, "delta": delta}
                    choice |= {"logprobs": None, "finish_reason": None, "stop_reason": None}
                    chunks.append(self.to_chunk(0, choice))
        chunks[0] |= self.describe_prompt(output)
        return chunks

    def describe_prompt(self, output: RequestOutput) -> Json:
        request: ChatCompletionRequest = self.request
        found: Json = {}
        if request.return_token_ids:
            found["prompt_token_ids"] = output.prompt_token_ids
        if request.return_prompt_text:
            found["prompt_text"] = self.prompt_text
        if request.prompt_logprobs is not None and output.prompt_logprobs:
            found["prompt_logprobs"] = to_prompt_logprobs(output.prompt_logprobs)
        return found

    def to_choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> Json:
        request, finish_reason = self.request, completion.finish_reason
        message = self.to_message(index, completion)
        if not (message or finish_reason or request.logprobs or request.return_token_ids):
            return {}
        if "tool_calls" in message:
            self.choices_with_calls.add(index)
        if finish_reason == "stop" and index in self.choices_with_calls and not request.function:
            finish_reason = "tool_calls"
        choice: Json = {
            "index": index,
            "delta" if request.stream else "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if request.logprobs:
            choice["logprobs"] = self.to_logprobs(completion)
        if request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def to_message(self, index: int, completion: CompletionOutput) -> ChatMessage:
        """The message of a choice; in a stream: what is new."""
        text, parser_cls = completion.text, self.parser_cls
        if self.request.stream:
            if parser_cls is None:
                return {"content": text}
            if index not in self.parsers:
                self.parsers[index] = parser_cls(self.is_parallel)
            is_last = completion.finish_reason is not None
            return self.parsers[index].extract_tool_calls_streaming(text, is_last)
        message: ChatMessage = {"content": text}
        if parser_cls is not None:
            message = parser_cls.extract_tool_calls(text, self.is_parallel)
        if self.echoed:
            message["content"] = self.echoed + (message["content"] or "")
        return {"role": self.role, **message}

    def to_logprobs(self, completion: CompletionOutput) -> ChatLogprobs:
        """The logprobs of these tokens."""
        content: list[ChatLogprob] = []
        for token_id, named in zip(completion.token_ids, completion.logprobs or [], strict=True):
            top = top_logprobs(named, self.request.top_logprobs)
            tops = [self.to_top_logprob(each, logprob) for each, logprob in top.items()]
            own = self.to_top_logprob(token_id, named[token_id])
            content.append({**own, "top_logprobs": tops})
        return {"content": content}

    def to_top_logprob(self, token_id: int, logprob: Logprob) -> TopLogprob:
        text = self.token_text(token_id, logprob)
        return {"token": text, "logprob": clip_logprob(logprob), "bytes": list(text.encode())}
