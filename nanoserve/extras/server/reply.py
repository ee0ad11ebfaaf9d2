"""How is a prompt of one HTTP request answered, and how is it streamed?

    body -> read_body -> Reply.respond -> make_prompts -> to_sampling_params -> EngineRequests.add
                                                                                        |
       JsonResponse  <- build     <-  to_choice   <-   all outputs, each the last       |
       EventStream   <- to_chunks <-  to_choice   <-   each output, when it comes  <----'

CompletionReply and ChatReply say what a choice looks like; the rest is the same. With two prompts
and n=2, the choices 0 and 1 are those of the first prompt, 2 and 3 those of the second.

All prompts are checked and queued before the answer begins: until then an error has a status of its
own, and no prompt is computed if one is refused. After that an error is a chunk {"error": ...}
before [DONE], as in vLLM.

Python runs one thread at a time, so while a chunk is made the engine stands still. Therefore a
chunk is one dict and one call of a JSON encoder, and all chunks of an output are sent at once.

vLLM: vllm/entrypoints/openai/serving_engine.py (V0); vllm/entrypoints/generate/base/serving.py,
beam_search/online.py (V1).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from nanoserve import __version__
from nanoserve.exceptions import VLLMValidationError
from nanoserve.extras.beam_search import BeamSearchSequence
from nanoserve.extras.server.errors import HTTPError, describe
from nanoserve.extras.server.protocol import GenerationRequest, Json, OpenAIBaseModel, read_request
from nanoserve.extras.server.response_format import make_params
from nanoserve.extras.server.responses import PromptLogprob, PromptLogprobs, Usage
from nanoserve.extras.server.streaming import (
    DONE,
    EngineRequests,
    EventStream,
    JsonResponse,
    to_event,
    until_gone,
)
from nanoserve.inputs import TokensPrompt
from nanoserve.logprobs import Logprob
from nanoserve.output_processor import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from nanoserve.extras.server.app import ServerState
    from nanoserve.extras.structured_output import StructuredOutputsParams

AnyRequest = TypeVar("AnyRequest", bound=OpenAIBaseModel)
AnyGeneration = TypeVar("AnyGeneration", bound=GenerationRequest)

LONG_BODY = 2**16  # bytes: a longer one is read in a thread
SMALLEST_LOGPROB = -9999.0  # JSON has no -inf; vLLM's
TRACE_HEADERS = ("traceparent", "tracestate")  # W3C's; see extras/metrics/tracing.py
GONE = 499  # the status of an answer that nobody reads


async def read_body(
    state: ServerState, raw_request: Request, cls: type[AnyRequest]
) -> tuple[AnyRequest, str | None]:
    """The request in the body, and the client's X-Request-Id. Raises ValueError, TypeError, and
    HTTPError for a model that is not served."""
    body = await raw_request.body()
    if len(body) < LONG_BODY:
        request = read_request(cls, body)
    else:
        request = await state.async_llm.run_in_thread(read_request, cls, body)
    model = getattr(request, "model", None)
    if model is not None and not state.has_model(model):
        names = ", ".join([*state.model_names, *state.adapters.requests])
        message = f"The model {model!r:.200} does not exist. This server has: {names}."
        raise HTTPError(404, message, "model")
    return request, raw_request.scope.get("state", {}).get("request_id")


async def reply(
    state: ServerState, raw_request: Request, request_cls: Any, reply_cls: type[Reply]
) -> Response:
    """What an endpoint does."""
    request, request_id = await read_body(state, raw_request, request_cls)
    sent = raw_request.headers
    trace_headers = {name: sent[name] for name in TRACE_HEADERS if name in sent}
    making = reply_cls(state, request, request_id, trace_headers).respond()
    response = await until_gone(raw_request.receive, making)
    return response or Response(status_code=GONE)


class Reply(ABC, Generic[AnyGeneration]):
    """The answer to one HTTP request, as it is made.

    respond() is called once. What it returns sends the answer; if it is a stream, the engine is
    at work meanwhile.
    """

    id_prefix: str
    object: str
    chunk_object: str  # that of a stream

    def __init__(
        self,
        state: ServerState,
        request: AnyGeneration,
        request_id: str | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        """request_id: the client's X-Request-Id. trace_headers: of the client's trace."""
        self.state = state
        self.request = request
        self.trace_headers = trace_headers
        self.lora_request = state.adapters.requests.get(request.model or "")
        self.async_llm = state.async_llm
        self.tokenizer = state.async_llm.tokenizer
        name = request_id or request.request_id or uuid.uuid4().hex
        self.head: Json = {
            "id": f"{self.id_prefix}-{name}",
            "object": self.chunk_object if request.stream else self.object,
            "created": int(time.time()),
            "model": request.model if self.lora_request else state.model_names[0],
        }
        self.requests = EngineRequests(self.async_llm, self.head["id"])
        self.prompt_tokens: dict[int, int] = {}  # of each prompt
        self.cached_tokens: dict[int, int] = {}
        self.output_tokens: dict[int, int] = {}  # of each choice

    @abstractmethod
    async def make_prompts(self) -> list[Any]:
        """The prompts: texts or token ids."""

    @property
    @abstractmethod
    def max_tokens(self) -> int | None:
        """Output tokens at most; None: as many as fit."""

    @property
    def may_have_form(self) -> bool:
        """False: make_form would say None."""
        given = (self.request.response_format, self.request.structured_outputs)
        return given != (None, None)

    def make_form(self) -> StructuredOutputsParams | None:
        """The form that the answer must have; None: any. Raises ValueError or TypeError."""
        return make_params(self.request.form)

    @abstractmethod
    def to_choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> Any:
        """A choice; in a stream: what is new, {} if nothing is. index: i * n + j for completion j
        of prompt i."""

    def begin(self, output: RequestOutput) -> list[Json]:
        """The chunks of a stream that come before the first output of a prompt."""
        return []

    def describe_prompt(self, output: RequestOutput) -> Json:
        """What an answer says of its prompt, beside the choices."""
        return {}

    async def respond(self) -> Response:
        """Queue the prompts, and answer. Raises what AsyncLLM.generate raises, HTTPError."""
        is_open = False
        try:
            prompts = await self.make_prompts()
            if self.request.use_beam_search:
                outputs = await self.search_beams(prompts)
            else:
                await self.add(prompts)
                if self.request.stream:
                    is_open = True
                    return EventStream(self.stream(), self.requests.abort)
                outputs = await self.requests.final_outputs()
        finally:
            if not is_open:
                await self.requests.abort()
        if self.request.num_logprobs is None and self.request.prompt_logprobs is None:
            return JsonResponse(self.build(outputs))
        return await asyncio.to_thread(lambda: JsonResponse(self.build(outputs)))  # may be long

    async def add(self, prompts: list[Any]) -> None:
        """Queue all prompts."""
        request = self.request
        recommended = self.async_llm.model_config.generation_defaults
        params = request.to_sampling_params(recommended, self.max_tokens)
        if self.may_have_form:  # a schema may be long
            params.structured_outputs = await self.async_llm.run_in_thread(self.make_form)
        for prompt in prompts:
            await self.requests.add(
                prompt,
                params,
                bool(request.add_special_tokens),
                priority=request.priority or 0,
                cache_salt=request.cache_salt,
                trace_headers=self.trace_headers,
                lora_request=self.lora_request,
            )

    async def search_beams(self, prompts: list[Any]) -> list[RequestOutput]:
        """One beam search for each prompt, all at once. Raises ValueError if the answer must have a
        form."""
        if self.may_have_form and self.make_form() is not None:
            message = "response_format and calls that must be valid: not with use_beam_search."
            raise VLLMValidationError(message, parameter="use_beam_search")
        tasks = [asyncio.ensure_future(self.search(prompt)) for prompt in prompts]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def search(self, prompt: Any) -> RequestOutput:
        """The beams of one prompt, as completions."""
        llm, request = self.async_llm, self.request
        most = self.max_tokens or llm.config.max_model_len or 1
        token_ids = await llm.tokenize(prompt, bool(request.add_special_tokens))
        with_salt = TokensPrompt(prompt_token_ids=token_ids, cache_salt=request.cache_salt)
        params = request.to_beam_search_params(most)
        found = await llm.beam_search(with_salt, params, lora_request=self.lora_request)
        outputs = [
            await self.to_completion(index, beam, len(token_ids))
            for index, beam in enumerate(found.sequences)
        ]
        return RequestOutput(self.requests.request_id, None, token_ids, None, outputs, True)

    async def to_completion(
        self, index: int, beam: BeamSearchSequence, num_prompt_tokens: int
    ) -> CompletionOutput:
        token_ids, text = beam.tokens[num_prompt_tokens:], ""
        if self.tokenizer is not None:
            shown = token_ids[:-1] if beam.finish_reason == "stop" else token_ids  # without EOS
            text = await self.async_llm.detokenize(shown, bool(self.request.skip_special_tokens))
        return CompletionOutput(
            index,
            text,
            token_ids,
            beam.cum_logprob,
            beam.logprobs,
            finish_reason=beam.finish_reason or "length",
        )

    def build(self, outputs: list[RequestOutput]) -> Json:
        """The whole answer."""
        choices = []
        for number, output in enumerate(outputs):
            self.count_prompt(number, output)
            for completion in self.pick(output.outputs):
                choices.append(self.make_choice(number, output, completion))
        more: Json = {"system_fingerprint": self.fingerprint, "usage": self.usage}
        if (params := outputs[0].kv_transfer_params) is not None:
            more["kv_transfer_params"] = params
        return {**self.head, "choices": choices, **more, **self.describe_prompt(outputs[0])}

    def pick(self, completions: list[CompletionOutput]) -> list[CompletionOutput]:
        """The n likeliest, if there are more."""
        n = self.request.num_choices
        if len(completions) <= n:
            return completions
        best = sorted(completions, key=lambda each: each.cumulative_logprob or 0.0, reverse=True)
        return [replace(each, index=index) for index, each in enumerate(best[:n])]

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The events of a stream."""
        try:
            async for number, output in self.requests.outputs():
                is_long = bool(output.prompt_logprobs) and number not in self.prompt_tokens
                if is_long:  # with echo: the logprobs of a whole prompt, for each choice
                    events = await asyncio.to_thread(self.to_events, number, output)
                else:
                    events = self.to_events(number, output)
                if events:
                    yield events
            options = self.request.stream_options
            if options is not None and options.include_usage:
                more = {"system_fingerprint": self.fingerprint, "usage": self.usage}
                yield to_event({**self.head, "choices": [], **more})
        except Exception as error:
            yield to_event(describe(error))
        yield DONE

    def to_events(self, number: int, output: RequestOutput) -> bytes:
        """The events that tell of one output."""
        return b"".join(map(to_event, self.to_chunks(number, output)))

    def to_chunks(self, number: int, output: RequestOutput) -> list[Json]:
        """The chunks that tell of one output: one for each choice that has something new."""
        chunks = []
        if number not in self.prompt_tokens:
            self.count_prompt(number, output)
            chunks += self.begin(output)
        for completion in output.outputs:
            if choice := self.make_choice(number, output, completion):
                chunks.append(self.to_chunk(number, choice))
        return chunks

    def to_chunk(self, number: int, choice: Json) -> Json:
        """One choice of a prompt as a chunk."""
        chunk = {**self.head, "choices": [choice]}
        options = self.request.stream_options
        if options is not None and options.include_usage and options.continuous_usage_stats:
            num_tokens = self.output_tokens.get(choice["index"], 0)
            chunk["usage"] = to_usage(self.prompt_tokens[number], num_tokens)
        return chunk

    def make_choice(self, number: int, output: RequestOutput, completion: CompletionOutput) -> Any:
        """The choice of a prompt's completion; its tokens are counted."""
        index = number * self.request.num_choices + completion.index
        choice = self.to_choice(index, output, completion)
        self.output_tokens[index] = self.output_tokens.get(index, 0) + len(completion.token_ids)
        return choice

    def count_prompt(self, number: int, output: RequestOutput) -> None:
        self.prompt_tokens[number] = len(output.prompt_token_ids)
        self.cached_tokens[number] = output.num_cached_tokens or 0

    @property
    def usage(self) -> Usage:
        """Of the whole answer."""
        usage = to_usage(sum(self.prompt_tokens.values()), sum(self.output_tokens.values()))
        usage["prompt_tokens_details"] = {"cached_tokens": sum(self.cached_tokens.values())}
        return usage

    @property
    def fingerprint(self) -> str:
        """As long as it is the same, the same seed gives the same tokens."""
        config = replace(self.async_llm.config, seed=0)  # it is for requests that have none
        settings = repr((config, self.async_llm.model_config))
        return f"nanoserve-{__version__}-{hashlib.sha256(settings.encode()).hexdigest()[:8]}"

    def token_text(self, token_id: int, logprob: Logprob | None = None) -> str:
        """How logprobs name a token."""
        if self.request.return_tokens_as_token_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        return self.tokenizer.decode([token_id])


def to_usage(prompt_tokens: int, completion_tokens: int) -> Usage:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def clip_logprob(logprob: Logprob) -> float:
    """JSON has no -inf."""
    return max(logprob.logprob, SMALLEST_LOGPROB)


def top_logprobs(named: Mapping[int, Logprob], number: int | None) -> dict[int, Logprob]:
    """The likeliest tokens, likeliest first; -1: all of them."""
    ranked = sorted(named.items(), key=lambda item: item[1].rank or 0)
    return {key: lp for key, lp in ranked if number == -1 or (lp.rank or 0) <= (number or 0)}


def to_prompt_logprobs(prompt_logprobs: Sequence[dict[int, Logprob] | None]) -> PromptLogprobs:
    """As vLLM's answers have them."""
    return [
        None if named is None else {key: to_prompt_logprob(lp) for key, lp in named.items()}
        for named in prompt_logprobs
    ]


def to_prompt_logprob(named: Logprob) -> PromptLogprob:
    logprob = clip_logprob(named)
    return {"logprob": logprob, "rank": named.rank, "decoded_token": named.decoded_token}
