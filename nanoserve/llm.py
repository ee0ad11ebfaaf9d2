"""How does a user ask?

LLM is the convenient interface in front of the engine (engine.py). An LLM has an engine, and calls
the engine's step() until the requests of a call have ended.

    LLM().generate(["Once upon a time"], SamplingParams(temperature=0))    # all at once
    LLM().stream(["Once upon a time"])                                     # token by token
    LLM().chat([{"role": "user", "content": "What is 17 + 25?"}])          # a chat template

When a call is interrupted (by an error, by Ctrl-C, or because the caller leaves the loop), its own
requests are aborted. Other requests in the engine go on.

vLLM: vllm/entrypoints/llm.py (V0 and V1).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import count
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoserve.chapters import compose, find_active, stack
from nanoserve.output_processor import Request
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.sequence import RequestOutput


class LLM:
    """A model, ready to answer.

    >>> with LLM() as llm:
    ...     llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=50))

    `options` are the fields of EngineConfig, and those of the chapters that they switch on; a
    misspelt one is a TypeError. An option that is named like a part of the engine (scheduler_cls,
    runner_cls, ...) is a class of your own in its place.

    The arguments `each` of a call are those of the engine's make_request (priority, cache_salt, and
    what chapters add, such as lora_request): one for all prompts, or a list of one each.
    """

    def __new__(cls, model: str | Path | None = None, **options: Any) -> LLM:
        """Chapters may add methods: what is made is of a subclass."""
        return object.__new__(stack("llm_cls", find_active(options), cls))

    def __init__(self, model: str | Path | None = None, **options: Any) -> None:
        """model: None (the embedded demo model), a folder, or a Hugging Face id."""
        engine_cls, options = compose(options)
        self.engine = engine_cls(engine_cls.config_cls(model=model, **options))
        self._ids = count()
        self._inboxes: dict[str, list[RequestOutput]] = {}  # of requests that a loop waits for
        self._outputs: list[RequestOutput] = []  # of all others, until step() hands them out

    # -- step by step --

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | None = None, **each: Any
    ) -> str:
        """Queue one request and return its id; calls of step() compute its tokens."""
        return self.engine.add_request(request_id, prompt, params, **each)

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs that no loop of generate, stream or chat waits for."""
        self._run_step()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _run_step(self) -> None:
        for output in self.engine.step():
            self._inboxes.get(output.request_id, self._outputs).append(output)

    def abort_request(self, request_id: str) -> bool:
        """End a request. False if there is none of this id. Any thread may call this."""
        return self.engine.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._outputs) or self.engine.has_unfinished_requests()

    # -- whole calls --

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **each: Any,
    ) -> list[RequestOutput]:
        """Complete every prompt, or the one that is given; outputs in the order of the prompts.

        A request that fails later has an output with finish_reason "error". Raises ValueError or
        TypeError, before any work, if one of the requests can never be served.
        """
        requests = self.make_requests(prompts, sampling_params, each)
        outputs: dict[str, RequestOutput] = {}
        with tqdm(total=len(requests), desc="Prompts", disable=not use_tqdm) as bar:
            for output in self.run_requests(requests):
                outputs[output.request_id] = output
                bar.update()
        return [outputs[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        output_kind: RequestOutputKind = RequestOutputKind.DELTA,
        **each: Any,
    ) -> Iterator[RequestOutput]:
        """Complete every prompt; yield the new text of each step. Leaving the loop early aborts the
        unfinished requests."""
        return self.run_requests(self.make_requests(prompts, sampling_params, each, output_kind))

    def chat(
        self,
        messages: Seq[Mapping[str, Any]] | Seq[Seq[Mapping[str, Any]]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **each: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        A message is {"role": "user", "content": "..."}. chat_template_kwargs go to the template.
        """
        if not isinstance(messages, (list, tuple)) or not messages:
            raise TypeError(f"messages must be a list of message dicts, got {messages!r}.")
        options = {"add_generation_prompt": True, **(chat_template_kwargs or {})}
        prompts = [
            self.engine.input_processor.render_chat(conversation, **options)
            for conversation in ([messages] if isinstance(messages[0], Mapping) else messages)
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **each)

    def make_requests(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        each: Mapping[str, Any],
        output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
    ) -> list[Request]:
        """Check all requests and queue none yet: if one is not valid, none is queued."""
        is_one = isinstance(prompts, (str, Mapping)) or isinstance(next(iter(prompts), None), int)
        prompts = [prompts] if is_one else list(prompts)
        columns = {"params": sampling_params, **each}
        for name, given in columns.items():
            if not isinstance(given, (list, tuple)):
                columns[name] = [given] * len(prompts)
            elif len(given) != len(prompts):
                raise ValueError(f"{name} has {len(given)} items for {len(prompts)} prompts.")
        requests = []
        for prompt, *values in zip(prompts, *columns.values(), strict=True):
            given = {name: v for name, v in zip(columns, values, strict=True) if v is not None}
            requests.append(self.engine.make_request(self._new_id(), prompt, **given))
            requests[-1].root.sampling_params.output_kind = output_kind  # the request's own clone
        return requests

    def _new_id(self) -> str:
        return next(each for each in map(str, self._ids) if each not in self.engine.requests)

    def run_requests(self, requests: list[Request]) -> Iterator[RequestOutput]:
        """Queue these requests and run steps until they have ended; yield their outputs. Each loop
        gets its own outputs only, also if another one runs inside it. However it ends, its
        unfinished requests are aborted."""
        inbox: list[RequestOutput] = []
        is_unfinished = self.engine.has_request
        try:
            for request in requests:
                self.engine.add(request)
                self._inboxes[request.request_id] = inbox
            while inbox or any(map(is_unfinished, requests)):
                if not inbox:
                    self._run_step()
                while inbox:
                    yield inbox.pop(0)
        finally:
            for request in requests:
                self._inboxes.pop(request.request_id, None)
            for request in filter(is_unfinished, requests):
                self.engine.abort_request(request.request_id)

    # -- the rest --

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises ValueError if the checkpoint has none."""
        return self.engine.input_processor.require_tokenizer("get_tokenizer")

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends."""
        return SamplingParams.from_generation_config(self.engine.model_config.generation_defaults)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and no change, while requests are running."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Free all memory; the LLM cannot be used afterwards."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
