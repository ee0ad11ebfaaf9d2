"""What does /v1/completions answer?

    POST /v1/completions  {"prompt": "Once upon a", "max_tokens": 2, "logprobs": 1}
    -> {"object": "text_completion", "choices": [{"index": 0, "text": " time there",
        "logprobs": {"tokens": [" time", " there"], "token_logprobs": [-0.1, -0.7],
                     "top_logprobs": [{" time": -0.1}, {...}], "text_offset": [0, 5]},
        "finish_reason": "length"}], "usage": {"prompt_tokens": 3, "completion_tokens": 2, ...}}

With echo the text begins with the prompt, and the logprobs with those of its tokens; the first of
them has none. With max_tokens=0 there is nothing else: so one asks how likely a text is. (The
engine makes one token, which is not shown and not counted; vLLM counts it. And in vLLM, echo with
return_token_ids leaves the prompt out of the text.)

vLLM: vllm/entrypoints/openai/serving_completion.py (V0);
vllm/entrypoints/openai/completion/: api_router.py, serving.py (V1).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from nanoserve.extras.server.protocol import CompletionRequest, describe_post
from nanoserve.extras.server.reply import (
    Reply,
    clip_logprob,
    reply,
    to_prompt_logprobs,
    top_logprobs,
)
from nanoserve.extras.server.responses import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
)
from nanoserve.logprobs import Logprob
from nanoserve.output_processor import CompletionOutput, RequestOutput

if TYPE_CHECKING:
    from nanoserve.extras.server.app import ServerState


def make_router(state: ServerState) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post(
        "/v1/completions", **describe_post(CompletionRequest, CompletionResponse, streams=True)
    )
    async def create_completion(raw_request: Request) -> Response:
        """Continue one or several prompts."""
        return await reply(state, raw_request, CompletionRequest, CompletionReply)

    return router


class CompletionReply(Reply[CompletionRequest]):
    """The answer to one POST /v1/completions."""

    id_prefix = "cmpl"
    object = chunk_object = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.prompt_texts: list[str] = []  # with echo
        self.text_offsets: dict[int, int] = defaultdict(int)  # characters of each choice's tokens

    @property
    def max_tokens(self) -> int | None:
        most = self.request.max_tokens
        return 16 if most is None else most or 1

    async def make_prompts(self) -> list[Any]:
        prompts = self.request.prompts
        for prompt in prompts if self.request.echo else ():
            is_text = isinstance(prompt, str)
            text = prompt if is_text else await self.async_llm.detokenize(prompt)
            self.prompt_texts.append(text)
        return prompts

    def make_choice(
        self, number: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        if self.request.max_tokens == 0:
            completion = replace(completion, text="", token_ids=[], logprobs=[])
        return super().make_choice(number, output, completion)

    def to_choice(
        self, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> CompletionChoice:
        request, is_first = self.request, index not in self.output_tokens
        text, token_ids = completion.text, completion.token_ids
        logprobs: list[dict[int, Logprob] | None] = [*(completion.logprobs or [])]
        choice: CompletionChoice = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if request.return_token_ids:
            choice["token_ids"] = token_ids
            if is_first:
                choice["prompt_token_ids"] = output.prompt_token_ids
        if request.echo and is_first:
            choice["text"] = self.prompt_texts[index // request.num_choices] + text
            token_ids = [*output.prompt_token_ids, *token_ids]
            logprobs = [*(output.prompt_logprobs or []), *logprobs]
        if request.logprobs is not None:
            choice["logprobs"] = self.to_logprobs(index, token_ids, logprobs)
        if request.prompt_logprobs is not None and is_first and output.prompt_logprobs:
            choice["prompt_logprobs"] = to_prompt_logprobs(output.prompt_logprobs)
        return choice

    def to_logprobs(
        self, index: int, token_ids: list[int], logprobs: Sequence[dict[int, Logprob] | None]
    ) -> CompletionLogprobs:
        """The logprobs of these tokens of a choice."""
        found: CompletionLogprobs = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for token_id, named in zip(token_ids, logprobs, strict=True):
            text = self.token_text(token_id, None if named is None else named[token_id])
            found["tokens"].append(text)
            found["text_offset"].append(self.text_offsets[index])
            self.text_offsets[index] += len(text)
            if named is None:
                found["token_logprobs"].append(None)
                found["top_logprobs"].append(None)
                continue
            shown = {token_id: named[token_id], **top_logprobs(named, self.request.logprobs)}
            texts = {self.token_text(each, lp): clip_logprob(lp) for each, lp in shown.items()}
            found["token_logprobs"].append(clip_logprob(named[token_id]))
            found["top_logprobs"].append(texts)
        return found
