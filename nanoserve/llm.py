"""How does a user ask?

LLM is the convenient interface in front of the engine (engine.py). An LLM has an engine, and calls
the engine's step() until the requests of a call have ended.

    LLM().generate(["Once upon a time"], SamplingParams(temperature=0))    # all at once
    LLM().stream(["Once upon a time"])                                     # token by token
    LLM().chat([{"role": "user", "content": "What is 17 + 25?"}])          # a chat template
    LLM().beam_search(["Once upon a time"], BeamSearchParams(4, 20))       # the likeliest texts

When a call is interrupted (by an error, by Ctrl-C, or because the caller leaves the loop), its own
requests are aborted. Other requests in the engine go on.

vLLM: vllm/entrypoints/llm.py (V0 and V1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import time
from typing import Any

from tqdm import tqdm

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig, check_names
from nanoserve.engine import LLMEngine, StepReport, delayed_interrupt
from nanoserve.input_processor import Message, Prompt
from nanoserve.logger import describe_engine, output_stream
from nanoserve.output_processor import RequestConsumer, RequestOutput, RequestState
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.scheduler import Scheduler


class LLM:
    """A model, ready to answer.

    >>> with LLM() as llm:
    ...     llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=50))

    `options` are the fields of EngineConfig; a misspelt one is a TypeError. The other keyword
    arguments are the seams: a class of your own takes the place of the engine's. One thread
    runs steps; other threads may call add_request and abort_request.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        scheduler_cls: type[Scheduler] = Scheduler,
        block_manager_cls: type[BlockManager] = BlockManager,
        executor_cls: Callable[..., Any] | None = None,
        runner_cls: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        """model: None (the embedded demo model), a folder, or a Hugging Face id."""
        check_names("LLM", options)
        self.engine = LLMEngine(
            EngineConfig(model=model, **options),
            scheduler_cls=scheduler_cls,
            block_manager_cls=block_manager_cls,
            executor_cls=executor_cls,
            runner_cls=runner_cls,
        )
        self._request_counter = count()

    def __repr__(self) -> str:
        return describe_engine(self.engine, "LLM")

    # -- step by step --

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue one request; calls of step() compute its tokens."""
        self.engine.add_request(
            request_id, prompt, sampling_params, priority=priority, cache_salt=cache_salt
        )

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine; see LLMEngine.step."""
        return self.engine.step()

    def abort_request(self, request_id: str, index: int | None = None) -> bool:
        """End a request (or one of its completions); see LLMEngine.abort_request."""
        return self.engine.abort_request(request_id, index)

    def has_unfinished_requests(self) -> bool:
        """True while step() has something to compute or to hand out."""
        return self.engine.has_unfinished_requests()

    # -- whole calls --

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]] | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | list[int] | None = None,
        cache_salt: str | list[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts.

        prompts: a string, a list of token ids, or a list of either. The other arguments are one for
        all, or a list of one each; None: the model's own recommendation, priority 0, no salt.
        A request that fails later has an output with finish_reason "error".
        Raises ValueError or TypeError, before any work, if one of the requests can never be served.
        """
        requests = self._make_all(
            prompts, sampling_params, priority, cache_salt, RequestOutputKind.FINAL_ONLY
        )
        results: dict[str, RequestOutput] = {}
        with _ProgressBar(self.engine, requests, disable=not use_tqdm) as bar:
            for output in self.run_requests(requests):
                results[output.request_id] = output
                bar.count()
        if len(results) < len(requests):
            raise RuntimeError("a request was aborted while generate waited for it.")
        return [results[request.request_id] for request in requests]

    def stream(
        self,
        prompts: Prompt | list[str] | list[list[int]] | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        priority: int | list[int] | None = None,
        cache_salt: str | list[str | None] | None = None,
        output_kind: RequestOutputKind = RequestOutputKind.DELTA,
    ) -> Iterator[RequestOutput]:
        """Complete every prompt; yield the new text of each step. The texts of a completion's
        outputs, joined, are its whole text. With output_kind CUMULATIVE each output has the whole
        text so far. Leaving the loop early aborts the unfinished requests."""
        requests = self._make_all(prompts, sampling_params, priority, cache_salt, output_kind)
        return self.run_requests(requests)  # a generator: queues the requests when the loop begins

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | list[int] | None = None,
        cache_salt: str | list[str | None] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        A message is {"role": "user", "content": "..."}. add_generation_prompt opens the
        assistant's turn. continue_final_message continues the last message instead (give
        add_generation_prompt=False with it). The template gets tools (JSON schemas) and
        chat_template_kwargs (such as {"enable_thinking": False}).
        """
        if not isinstance(messages, (list, tuple)):
            raise TypeError(f"messages must be a list of message dicts, got {messages!r}.")
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations = [messages] if is_one else messages
        if "tokenize" in (chat_template_kwargs or {}):
            raise ValueError("chat_template_kwargs holds 'tokenize', which chat sets itself.")
        options = {
            **(chat_template_kwargs or {}),
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        processor = self.engine.input_processor
        texts = [processor.render_chat(conversation, options) for conversation in conversations]
        prompts: list[Prompt] = [processor.tokenize(t, add_special_tokens=False) for t in texts]
        results = self.generate(prompts, sampling_params, use_tqdm, priority, cache_salt)
        return [replace(result, prompt=text) for result, text in zip(results, texts, strict=True)]

    def beam_search(
        self,
        prompts: Prompt | list[str] | list[list[int]] | list[Prompt],
        params: Any,
    ) -> list[Any]:
        """The params.beam_width likeliest continuations of each prompt, best first.

        params: BeamSearchParams, from extras/beam_search.py, where the search is written. Raises
        ValueError or TypeError if a prompt can never be served, RuntimeError if a search fails.
        """
        if not hasattr(params, "search"):
            raise TypeError(f"params must be BeamSearchParams, got {params!r}.")
        return params.search(self, _as_list_of_prompts(prompts))

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises ValueError if the checkpoint has none."""
        return self.engine.input_processor.require_tokenizer("get_tokenizer")

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends."""
        return self.engine.get_default_sampling_params()

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

    # -- inside --

    def _make_all(
        self,
        prompts: Any,
        sampling_params: SamplingParams | list[SamplingParams] | None,
        priority: int | list[int] | None,
        cache_salt: str | list[str | None] | None,
        output_kind: RequestOutputKind,
    ) -> list[RequestState]:
        """Check all requests and queue none yet: if one is not valid, none is queued."""
        prompts = _as_list_of_prompts(prompts)
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", default, len(prompts))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
        salts = _one_each("cache_salt", cache_salt, len(prompts))
        requests = []
        for prompt, given, *rest in zip(prompts, params, priorities, salts, strict=True):
            if isinstance(given, SamplingParams):
                given = replace(given, output_kind=output_kind)
            request_id = self.new_request_id("generate")
            requests.append(self.engine.make_request(request_id, prompt, given, *rest))
        return requests

    def run_requests(self, requests: Seq[RequestConsumer]) -> Iterator[RequestOutput]:
        """Queue these requests and run steps until they have ended; yield their outputs.

        Outputs of other requests wait in the engine for their own caller: step(), or another loop
        like this one. However this loop ends, the unfinished requests are aborted.
        """
        engine, request_ids = self.engine, {request.request_id for request in requests}
        is_unfinished = bool(requests)
        try:
            for request in requests:
                engine.add(request)
            while is_unfinished:
                engine.run_step()
                outputs = engine.take_outputs(request_ids)
                # Asked before the caller's code runs: a loop inside this one may finish requests,
                # and their last outputs are taken by the next round.
                is_unfinished = any(engine.has_request(request) for request in requests)
                yield from outputs
        finally:
            with delayed_interrupt():
                for request in filter(engine.has_request, requests):
                    engine.abort_request(request.request_id)
                engine.take_outputs(request_ids)

    def new_request_id(self, kind: str) -> str:
        """A request id that no unfinished request has."""
        while True:
            request_id = f"{kind}-{next(self._request_counter)}"
            if not self.engine.is_unfinished(request_id):
                return request_id


def _as_list_of_prompts(prompts: Any) -> list[Prompt]:
    """The prompts as a list. One string is one prompt; one list of token ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts must be a string, token ids, or a list of either: {prompts!r}.")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def _one_each(name: str, given: Any, number: int) -> list[Any]:
    """A list of `number` items: `given` itself if it is a list, else `given` repeated."""
    if not isinstance(given, (list, tuple)):
        return [given] * number
    if len(given) != number:
        raise ValueError(
            f"{name} has {len(given)} items for {number} prompts. Give one for all, or one each."
        )
    return list(given)


class _ProgressBar:
    """Requests done and, after each step, how many run and wait, and tokens per second.

    Drawn ten times a second at most (tqdm's mininterval). Other steps only look at the clock.
    """

    def __init__(self, engine: LLMEngine, requests: Seq[RequestConsumer], disable: bool) -> None:
        self.engine = engine
        self.requests = requests
        self.bar = tqdm(
            total=len(requests),
            desc="Prompts",
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            disable=disable,
            miniters=0,  # draw also when no request has ended since
            file=output_stream(),
        )

    def __call__(self, report: StepReport) -> None:
        """Called by the engine after each step."""
        if self._is_due():
            self._describe()
            self.bar.update(0)

    def count(self) -> None:
        """One request has finished."""
        is_last = not self.bar.disable and self.bar.n + 1 == self.bar.total
        if is_last or self._is_due():
            self._describe()
        self.bar.update()

    def _is_due(self) -> bool:
        return not self.bar.disable and time() - self.bar.last_print_t >= self.bar.mininterval

    def _describe(self) -> None:
        """The numbers behind the bar, of all requests of the call."""
        scheduler = self.engine.scheduler
        num_running, sequences = len(scheduler.running), [r.sequences for r in self.requests]
        num_input = sum(min(s.num_computed_tokens, s.num_prompt_tokens) for s, *_ in sequences)
        num_output = sum(seq.num_output_tokens for each in sequences for seq in each)
        elapsed = max(self.bar.format_dict["elapsed"], 1e-9)
        self.bar.set_postfix_str(
            f"running: {num_running}, waiting: {len(scheduler.sequences) - num_running}, "
            f"output: {num_output / elapsed:.0f} tok/s, input: {num_input / elapsed:.0f} tok/s",
            refresh=False,
        )

    def __enter__(self) -> _ProgressBar:
        if not self.bar.disable:
            self.engine.step_listeners.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.bar.disable:
            self.engine.step_listeners.remove(self)
        self.bar.close()
