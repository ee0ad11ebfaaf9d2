"""How does one HTTP request become requests of the engine, and their outputs an answer?

    POST /v1/completions {"prompt": ["Once", "A dog"], "n": 2, "stream": true}
    -> Reply.queue        two requests of the engine, one for each prompt; their outputs come in one
                          asyncio queue
    -> Reply.outputs      (0, RequestOutput), (1, RequestOutput), ... as they come
    -> Reply.choices      0 and 1 are those of the first prompt, 2 and 3 those of the second
    -> data: {"choices": [{"index": 2, "text": " ran", ...}], ...}      a server-sent event for each
       data: [DONE]

An answer that is no stream has the same choices, once. However an answer ends, and above all if its
client goes away, close() ends what is left in the engine.

vLLM: vllm/entrypoints/openai/serving_completion.py, serving_chat.py (V0);
vllm/entrypoints/openai/: completion/serving.py, chat_completion/serving.py (V1).
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from nanoserve.entrypoints.async_llm import AsyncLLM, RequestStream
from nanoserve.entrypoints.prompts import as_template_message
from nanoserve.entrypoints.server.errors import to_error
from nanoserve.entrypoints.server.protocol import Json, read_prompts
from nanoserve.entrypoints.server.tool_parser import START, ToolParser, structural_tag
from nanoserve.sequence import CompletionOutput, Logprob, RequestOutput


class EngineRequests:
    """The engine's requests of one HTTP request. Invariant: after close() none is left."""

    def __init__(self, llm: AsyncLLM, request_id: str, **each: Any) -> None:
        """each: keyword arguments of AsyncLLM.add_request."""
        self.llm, self.request_id, self.each = llm, request_id, each
        self.queue: asyncio.Queue[tuple[RequestStream, Any]] = asyncio.Queue()
        self.streams: list[RequestStream] = []

    async def add(self, prompt: Any, params: Any) -> None:
        name = f"{self.request_id}-{len(self.streams)}"
        stream = await self.llm.add_request(name, prompt, params, queue=self.queue, **self.each)
        self.streams.append(stream)

    async def outputs(self) -> AsyncIterator[tuple[int, Any]]:
        """(index of the prompt, output), as they come. Raises EngineDeadError, HTTPException."""
        indexes = {stream.key: index for index, stream in enumerate(self.streams)}
        num_left = len(indexes)
        while num_left:
            stream, output = await self.queue.get()
            if isinstance(output, Exception):
                raise output
            yield indexes[stream.key], check_output(output)
            num_left -= output.finished

    def close(self) -> None:
        for stream in self.streams:
            self.llm.drop(stream)


def check_output(output: Any) -> Any:
    """Raise HTTPException if a request has failed."""
    errors = [getattr(output, "error", None)]  # of a pooling model
    if isinstance(output, RequestOutput):
        errors = [x.stop_reason for x in output.outputs if x.finish_reason == "error"]
    if any(errors):
        raise HTTPException(500, f"the request failed: {errors[0]}")
    return output


class EventStream(StreamingResponse):
    """Sends events while the client listens; then closes the reply, however it ended."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.events(), media_type="text/event-stream")
        self.reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.reply.close()


class Reply(EngineRequests):
    """The answer to one POST /v1/completions, as it is made. ChatReply is the other kind."""

    prefix, object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, llm: AsyncLLM, request: Any, model: str, lora_request: Any = None) -> None:
        each = {"priority": request.priority, "cache_salt": request.cache_salt}
        name = f"{self.prefix}-{uuid.uuid4().hex}"
        super().__init__(llm, name, **each, lora_request=lora_request)
        self.request = request
        self.head = {"id": name, "created": int(time.time()), "model": model}
        self.texts: list[str] = []  # of the prompts, with echo
        self.num_prompt_tokens: dict[int, tuple[int, int]] = {}  # of prompts: all, cached
        self.num_tokens: dict[int, int] = {}  # of choices
        self.num_chars: dict[int, int] = {}  # of the tokens in the logprobs of a choice

    # -- the kind of answer --

    async def make_prompts(self) -> list[Any]:
        request = self.request
        prompts = read_prompts(request.prompt)
        for i, prompt in enumerate(prompts):
            if request.echo:
                is_text = isinstance(prompt, str)
                self.texts.append(prompt if is_text else await self.llm.detokenize(prompt))
            if isinstance(prompt, str) and not request.add_special_tokens:
                prompts[i] = await self.llm.tokenize(prompt, add_special_tokens=False)
        if request.max_tokens == 0 and not request.echo:
            raise ValueError("max_tokens is 0; allowed: 1 or more, or 0 with echo.")
        return prompts

    def sampling(self) -> Json:
        """Fields of SamplingParams that are not those of the request."""
        request = self.request
        of_prompt = request.prompt_logprobs
        if request.echo and of_prompt is None:
            of_prompt = request.logprobs
        return {"max_tokens": request.max_tokens or 1, "prompt_logprobs": of_prompt}

    def content(self, choice: int, output: RequestOutput, new: CompletionOutput) -> Json:
        """What is new in a choice, without what both kinds have."""
        request, is_first = self.request, choice not in self.num_tokens
        text, ids, named = new.text, list(new.token_ids), list(new.logprobs or ())
        if request.max_tokens == 0:  # the engine makes one token, which is not shown
            text, ids, named = "", [], []
        found: Json = {}
        if request.return_token_ids:
            found["token_ids"] = ids
            found |= {"prompt_token_ids": output.prompt_token_ids} if is_first else {}
        if request.prompt_logprobs is not None:
            found["prompt_logprobs"] = describe_prompt_logprobs(output)
        if request.echo and is_first:
            text = self.texts[choice // request.n] + text
            ids, named = [*output.prompt_token_ids, *ids], [*(output.prompt_logprobs or ()), *named]
        logprobs = None if request.logprobs is None else self.name_logprobs(choice, ids, named)
        return {"text": text, "logprobs": logprobs, **found}

    def name_logprobs(self, choice: int, ids: list[int], named: list[Any]) -> Json:
        own = [at and at[token_id] for token_id, at in zip(ids, named, strict=True)]
        texts = [self.name(token_id, x) for token_id, x in zip(ids, own, strict=True)]
        offsets = []
        for text in texts:
            offsets.append(self.num_chars.get(choice, 0))
            self.num_chars[choice] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [x and clip(x) for x in own],
            "top_logprobs": [
                at and {self.name(i, x): clip(x) for i, x in at.items()} for at in named
            ],
            "text_offset": offsets,
        }

    # -- what both kinds share --

    async def queue_all(self) -> None:
        """Check and queue all prompts, before the answer begins."""
        defaults = self.llm.engine.model_config.generation_config
        prompts = await self.make_prompts()
        sampling = self.sampling()
        params = await self.llm.run_in_thread(  # a grammar may be long
            lambda: self.request.to_sampling_params(defaults, **sampling)
        )
        for prompt in prompts:
            await self.add(prompt, params)

    async def respond(self) -> Response:
        is_open = False
        try:
            await self.queue_all()
            is_open = self.request.stream
            return EventStream(self) if is_open else await self.answer()
        finally:
            if not is_open:
                self.close()

    async def answer(self) -> Response:
        found = sorted([each async for each in self.outputs()], key=lambda each: each[0])
        choices = [choice for each in found for choice in self.choices(*each)]
        answer = {**self.head, "object": self.object, "choices": choices, "usage": self.usage()}
        return JSONResponse(answer | self.about_prompt(found[0][1]))

    async def events(self) -> AsyncIterator[str]:
        head, options = {**self.head, "object": self.chunk_object}, self.request.stream_options
        try:
            async for each in self.outputs():
                more = self.about_prompt(each[1]) if not self.num_tokens else {}
                for choice in filter(has_news, self.choices(*each)):
                    if options.include_usage and options.continuous_usage_stats:
                        more["usage"] = self.usage()
                    yield as_event({**head, "choices": [choice], **more})
            if options.include_usage:
                yield as_event({**head, "choices": [], "usage": self.usage()})
        except Exception as error:  # the status was sent long ago
            yield as_event(to_error(error)[1])
        yield "data: [DONE]\n\n"

    def choices(self, index: int, output: RequestOutput) -> list[Json]:
        """What an output brings: one entry for each choice in which something is new."""
        number, cached = len(output.prompt_token_ids), output.num_cached_tokens or 0
        self.num_prompt_tokens[index] = number, cached
        return [
            self.choice(index * self.request.n + new.index, output, new) for new in output.outputs
        ]

    def choice(self, choice: int, output: RequestOutput, new: CompletionOutput) -> Json:
        found = {
            "index": choice,
            "finish_reason": new.finish_reason,
            "stop_reason": new.stop_reason,
            **self.content(choice, output, new),
        }
        number = 0 if self.request.max_tokens == 0 else len(new.token_ids)
        self.num_tokens[choice] = self.num_tokens.get(choice, 0) + number
        return found

    def about_prompt(self, output: RequestOutput) -> Json:
        """What an answer says beside its choices."""
        return {}

    def usage(self) -> Json:
        prompt = sum(number for number, _ in self.num_prompt_tokens.values())
        new, cached = (
            sum(self.num_tokens.values()),
            sum(c for _, c in self.num_prompt_tokens.values()),
        )
        details = {"prompt_tokens_details": {"cached_tokens": cached}}
        total = {"total_tokens": prompt + new}
        return {"prompt_tokens": prompt, "completion_tokens": new, **total, **details}

    def name(self, token_id: int, logprob: Logprob | None) -> str:
        """How logprobs name a token."""
        if self.request.return_tokens_as_token_ids or self.llm.engine.tokenizer is None:
            return f"token_id:{token_id}"
        known = logprob.decoded_token if logprob else None
        return self.llm.get_tokenizer().decode([token_id]) if known is None else known


class ChatReply(Reply):
    """The answer to one POST /v1/chat/completions."""

    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.parsers: dict[int, ToolParser] = {}  # of choices

    async def make_prompts(self) -> list[Any]:
        return [await render(self.llm, self.request)]

    def sampling(self) -> Json:
        request = self.request
        recommended = self.llm.engine.model_config.generation_config.get("max_new_tokens")
        most = (request.max_completion_tokens, request.max_tokens, recommended)
        found: Json = {"max_tokens": next((each for each in most if each is not None), None)}
        found["logprobs"] = request.top_logprobs if request.logprobs else None
        if functions := request.required_functions():
            tag = structural_tag(functions, request.is_named or not request.parallel_tool_calls)
            request.response_format, form = None, {"structural_tag": json.dumps(tag)}
            request.structured_outputs = form
        if request.may_call and START in self.llm.get_tokenizer().all_special_tokens:
            found["skip_special_tokens"] = False
        return found

    def content(self, choice: int, output: RequestOutput, new: CompletionOutput) -> Json:
        request, message = self.request, {"content": new.text}
        found: Json = {"logprobs": None}
        if request.may_call:
            if choice not in self.parsers:
                self.parsers[choice] = ToolParser(request.parallel_tool_calls)
            parser = self.parsers[choice]
            message = parser.read(new.text, bool(new.finish_reason))
            if not request.stream:
                message = {"content": None, **message}
            if new.finish_reason == "stop" and parser.num_calls and not request.is_named:
                found["finish_reason"] = "tool_calls"
        if choice not in self.num_tokens:
            message = {"role": "assistant", **message}
        found["delta" if request.stream else "message"] = message
        if request.logprobs:
            found["logprobs"] = {"content": self.chat_logprobs(new)}
        if request.return_token_ids:
            found["token_ids"] = new.token_ids
        return found

    def chat_logprobs(self, new: CompletionOutput) -> list[Json]:
        most = self.request.top_logprobs
        return [
            {
                **self.entry(token_id, at[token_id]),
                "top_logprobs": [self.entry(i, x) for i, x in at.items() if (x.rank or 0) <= most],
            }
            for token_id, at in zip(new.token_ids, new.logprobs or [], strict=True)
        ]

    def entry(self, token_id: int, logprob: Logprob) -> Json:
        text = self.name(token_id, logprob)
        return {"token": text, "logprob": clip(logprob), "bytes": list(text.encode())}

    def about_prompt(self, output: RequestOutput) -> Json:
        found: Json = {}
        if self.request.return_token_ids:
            found["prompt_token_ids"] = output.prompt_token_ids
        if self.request.prompt_logprobs is not None:
            found["prompt_logprobs"] = describe_prompt_logprobs(output)
        return found


async def render(llm: AsyncLLM, request: Any) -> Json:
    """The prompt of a conversation. Raises ValueError."""
    messages = [as_template_message(message) for message in request.messages]
    return await llm.render_chat(messages, **request.template_options())


def as_event(data: Mapping[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


def has_news(choice: Json) -> bool:
    """False for a chunk in which the text is held back, because it may become a call."""
    shown = ("delta", "finish_reason", "logprobs", "token_ids")
    return "text" in choice or any(choice.get(name) for name in shown)


def clip(logprob: Logprob) -> float:
    """JSON has no -inf."""
    return max(logprob.logprob, -9999.0)


def describe_prompt_logprobs(output: RequestOutput) -> list[Any]:
    return [
        at and {token_id: {**vars(x), "logprob": clip(x)} for token_id, x in at.items()}
        for at in output.prompt_logprobs or ()
    ]
