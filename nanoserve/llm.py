"""How does a user ask?

LLM is the convenient interface in front of the engine (engine.py). An LLM has an engine, and calls
the engine's step() until the requests of a call have ended.

    LLM().generate(["Once upon a time"], SamplingParams(temperature=0))    # all at once
    LLM().stream(["Once upon a time"])                                     # token by token
    LLM().chat([{"role": "user", "content": "What is 17 + 25?"}])          # a chat template

When a call is interrupted (by an error, by Ctrl-C, or because the caller leaves the loop), its own
requests are aborted. Other requests in the engine go on.

Left out: images and sound. Chapters add methods (LLM.embed, LLM.beam_search, LLM.get_metrics).

vLLM: vllm/entrypoints/llm.py (V0 and 0.32).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import count
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from nanoserve.chapters import find_active, make_engine, stack
from nanoserve.kernels.threads import load_torch
from nanoserve.output_processor import Request
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.sequence import RequestOutput

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from nanoserve.chapters import Options

Params = SamplingParams | Seq[SamplingParams] | None  # one for all prompts, or one each


class LLM:
    """A model, ready to answer.

    >>> with LLM() as llm:
    ...     llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=50))

    `options` are the fields of EngineConfig, and those of the chapters that they switch on; a
    misspelt one is a TypeError. An option that is named like a part of the engine (scheduler_cls,
    runner_cls, ...) is a class of your own in its place.

    Where a call takes a value for each prompt (priority, cache_salt, lora_request), it is one for
    all prompts, or a list of one each.
    """

    def __init__(self, model: str | Path | None = None, **options: Unpack[Options]) -> None:
        """model: None (the embedded demo model), a folder, or a Hugging Face id."""
        load_torch()
        active = find_active(options)  # what may add methods
        self.__class__ = stack("llm_cls", active, type(self))  # type: ignore[arg-type]
        self.llm_engine = self.engine = make_engine({"model": model, **options})
        self._ids = count()
        self._inboxes: dict[str, deque[RequestOutput]] = {}  # of requests that a loop waits for
        # Of all others, by request id, until step() hands them out.
        self._outputs: dict[str, list[RequestOutput]] = {}

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLM:
        """The LLM that vLLM's EngineArgs describe."""
        return cls(**vars(engine_args))

    # -- step by step --

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | None = None, **each: Any
    ) -> str:
        """Queue one request and return its id; calls of step() compute its tokens. `each`: see
        LLMEngine.make_request."""
        return self.llm_engine.add_request(request_id, prompt, params, **each)

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs that no loop of generate, stream or chat waits for."""
        self._run_step()
        outputs, self._outputs = self._outputs, {}
        return [each for some in outputs.values() for each in some]

    def _run_step(self) -> None:
        for output in self.llm_engine.step():
            i = output.request_id
            if (inbox := self._inboxes.get(i)) is not None:
                inbox.append(output)
            else:
                self._outputs[i] = [*self._outputs.get(i, ()), output]

    def abort_request(self, request_ids: str | Seq[str]) -> bool:
        """End requests. False if there is none of these ids. Any thread may call this."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            self._outputs.pop(request_id, None)
        return self.llm_engine.abort_request(request_ids)

    def has_unfinished_requests(self) -> bool:
        return bool(self._outputs) or self.llm_engine.has_unfinished_requests()

    # -- whole calls --

    def generate(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: int | Seq[int] | None = None,
        cache_salt: str | Seq[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt, or the one that is given; outputs in the order of the prompts.

        A request that fails later has an output with finish_reason "error"; one that is aborted
        meanwhile has none. Raises ValueError or
        TypeError, before any work, if one of the requests can never be served.
        """
        each = {"lora_request": lora_request, "priority": priority, "cache_salt": cache_salt}
        requests = self.make_requests(prompts, sampling_params, **each)
        outputs: dict[str, RequestOutput] = {}
        make = use_tqdm if callable(use_tqdm) else tqdm
        with make(total=len(requests), desc="Prompts", disable=not use_tqdm) as bar:
            for output in self.run_requests(requests):
                outputs[output.request_id] = output
                bar.update(1)
        return [outputs[each.request_id] for each in requests if each.request_id in outputs]

    def stream(
        self,
        prompts: Any,
        sampling_params: Params = None,
        *,
        output_kind: RequestOutputKind = RequestOutputKind.DELTA,
        **each: Any,
    ) -> Iterator[RequestOutput]:
        """Complete every prompt; yield the new text of each step. Leaving the loop early aborts the
        unfinished requests. `each`: as in generate."""
        return self.run_requests(self.make_requests(prompts, sampling_params, output_kind, **each))

    def chat(
        self,
        messages: Seq[Any],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Any = None,
        priority: int | Seq[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Seq[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **each: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        A message is {"role": "user", "content": "..."}. The template (`chat_template` in place of
        the model's own) gets tools, chat_template_kwargs, and the content as a string, whatever
        chat_template_content_format says. The other arguments are generate's.
        """
        if isinstance(messages, (str, Mapping)):
            raise TypeError(f"messages must be a list of message dicts, got {messages!r}.")
        options = {"chat_template": chat_template, "tools": tools, **(chat_template_kwargs or {})}
        options["add_generation_prompt"] = add_generation_prompt
        options["continue_final_message"] = continue_final_message
        render = self.llm_engine.input_processor.render_chat
        is_one = not all(isinstance(each, (list, tuple)) for each in messages)
        prompts = [render(each, **options) for each in ([messages] if is_one else messages)]
        each |= {"lora_request": lora_request, "priority": priority}
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **each)

    def make_requests(
        self,
        prompts: Any,
        params: Params,
        output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
        **each: Any,
    ) -> list[Request]:
        """Check all requests and queue none yet: if one is not valid, none is queued."""
        prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
        is_one = isinstance(prompts, (str, bytes, Mapping)) or not isinstance(prompts, Iterable)
        prompts = [prompts] if is_one else list(prompts)
        if not is_one and prompts and isinstance(prompts[0], Integral):  # token ids of one
            prompts = [prompts]
        each = {"params": params, **each}
        for name, given in each.items():
            if isinstance(given, (list, tuple)) and len(given) != len(prompts):
                raise ValueError(f"{name} has {len(given)} items for {len(prompts)} prompts.")
        requests = []
        for i, prompt in enumerate(prompts):
            values = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in each.items()}
            given = {name: value for name, value in values.items() if value is not None}
            request = self.llm_engine.make_request(self._new_id(), prompt, **given)
            request.root.sampling_params.output_kind = output_kind  # the request's own clone
            requests.append(request)
        return requests

    def _new_id(self) -> str:
        return next(each for each in map(str, self._ids) if each not in self.llm_engine.requests)

    def run_requests(self, requests: Seq[Request]) -> Iterator[RequestOutput]:
        """Queue these requests and run steps until they have ended; yield their outputs. Each loop
        gets its own outputs only, also if another one runs inside it. However it ends, its
        unfinished requests are aborted."""
        inbox: deque[RequestOutput] = deque()
        engine, unfinished = self.llm_engine, deque(requests)
        try:
            for request in requests:
                self._inboxes[request.request_id] = inbox
                engine.add(request)
            while True:
                while inbox:
                    yield inbox.popleft()
                while unfinished and not engine.has_request(unfinished[0]):
                    unfinished.popleft()
                if not (unfinished or inbox):
                    return
                self._run_step()
        finally:
            for request in requests:
                self._inboxes.pop(request.request_id, None)
            known = engine.requests  # another request may have got the id of one that has ended
            mine = [i.request_id for i in requests if known.get(i.request_id, i) is i]
            engine.abort_request(mine)

    # -- the rest --

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises ValueError if the checkpoint has none."""
        return self.llm_engine.input_processor.require_tokenizer("get_tokenizer")

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends."""
        return SamplingParams.from_generation_config(self.llm_engine.model_config.generation_config)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and no change, while requests are running."""
        return self.llm_engine.reset_prefix_cache()

    def close(self) -> None:
        """Free all memory; the LLM cannot be used afterwards."""
        self.llm_engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
