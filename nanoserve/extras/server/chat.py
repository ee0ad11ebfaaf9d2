"""What does /v1/chat/completions answer?

    POST /v1/chat/completions  {"messages": [{"role": "user", "content": "Tell me a story."}]}
    -> AsyncLLM.render_chat    "<|im_start|>user\\nTell me a story.<|im_end|>\\n<|im_start|>..."
    -> {"object": "chat.completion", "choices": [{"index": 0, "finish_reason": "stop",
        "message": {"role": "assistant", "content": "Once upon a time ..."}}], "usage": {...}}

As a stream: a chunk with the role alone, then one with each piece of the text in `delta`.

The conversation may hold calls of tools and their results, and `tools` reach the template. What the
model writes stays text: it is not searched for a call. So tool_choice is "none" or left out. (In
vLLM, tools without tool_choice mean "auto", which needs a parser for the model.)

top_logprobs are those of the likeliest tokens, as in OpenAI's API. (vLLM counts the token itself
among them, first, also if it is not likely.)

vLLM: vllm/entrypoints/openai/serving_chat.py (V0);
vllm/entrypoints/openai/chat_completion/: api_router.py, serving.py (V1).
"""

from __future__ import annotations

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
from nanoserve.extras.server.responses import (
    ChatCompletionResponse,
    ChatLogprob,
    ChatLogprobs,
    TopLogprob,
)
from nanoserve.inputs import parse_chat_messages
from nanoserve.logprobs import Logprob
from nanoserve.output_processor import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from nanoserve.extras.server.app import ServerState


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
    template = request.chat_template or kwargs.pop("chat_template", None)
    if template is not None:
        check_template(state, template)
    kwargs |= {"documents": request.documents, "reasoning_effort": request.reasoning_effort}
    return await state.async_llm.render_chat(
        request.messages,
        chat_template=template,
        add_generation_prompt=request.adds_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
        tools=request.tools,
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


class ChatReply(Reply[ChatCompletionRequest]):
    """The answer to one POST /v1/chat/completions."""

    id_prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    role = "assistant"
    echoed = ""  # the text of the last message, if the answer is to begin with it
    prompt_text = ""

    @property
    def max_tokens(self) -> int | None:
        most = self.request.most_tokens
        recommended = self.async_llm.model_config.generation_defaults.get("max_new_tokens")
        return recommended if most is None else most

    async def make_prompts(self) -> list[Any]:
        request = self.request
        self.prompt_text = await render(self.state, request)
        if not request.adds_generation_prompt:
            [last] = parse_chat_messages(request.messages[-1:], "string")
            self.role = last.get("role", self.role)
            self.echoed = last["content"] if request.echo else ""
        return [self.prompt_text]

    def begin(self, output: RequestOutput) -> list[Json]:
        """The role of each choice, and its text if that is echoed."""
        chunks = []
        for index in range(self.request.num_choices):
            for delta in ({"role": self.role, "content": ""}, {"content": self.echoed}):
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
        request = self.request
        kind, message = "message", {"role": self.role, "content": self.echoed + completion.text}
        if request.stream:
            kind, message = "delta", {"content": completion.text}
        choice: Json = {
            "index": index,
            kind: message,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if request.logprobs:
            choice["logprobs"] = self.to_logprobs(completion)
        if request.return_token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

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
