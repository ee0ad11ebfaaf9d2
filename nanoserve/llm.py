"""How does a user ask?

LLM is the convenient interface in front of the engine (engine.py). An LLM has an engine, and calls
the engine's step() until the requests of a call have ended.

    LLM().generate(["Once upon a time"], SamplingParams(temperature=0))    # all at once
    LLM().stream(["Once upon a time"])                                     # token by token
    LLM().chat([{"role": "user", "content": "What is 17 + 25?"}])          # a chat template
    LLM().beam_search(["Once upon a time"], BeamSearchParams(4, 20))       # the likeliest texts
    LLM(runner="pooling").embed(["Once upon a time"])                      # vectors

When a call is interrupted (by an error, by Ctrl-C, or because the caller leaves the loop), its own
requests are aborted. Other requests in the engine go on.

vLLM: vllm/entrypoints/llm.py (V0 and V1).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from importlib import import_module
from itertools import count
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from nanoserve.arg_utils import EngineArgs, check_engine_args, load_chat_template, read_options
from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig, check_bool, load_chapter
from nanoserve.distributed.process import OwnedByProcess
from nanoserve.engine import LLMEngine, StepReport
from nanoserve.exceptions import VLLMValidationError, brief
from nanoserve.input_processor import InputProcessor
from nanoserve.inputs import (
    CHAT_EXAMPLE,
    Message,
    PromptType,
    as_python,
    parse_prompt,
    prompt_to_seq,
    refuse_missing,
)
from nanoserve.interrupts import delayed_interrupt
from nanoserve.logger import describe_engine, output_stream
from nanoserve.output_processor import RequestConsumer, RequestOutput, RequestState
from nanoserve.sampling_params import RequestOutputKind, SamplingParams, check_output_kind
from nanoserve.scheduler import Scheduler

if TYPE_CHECKING:
    from tqdm import tqdm

    from nanoserve.extras.lora.request import LoRARequest
    from nanoserve.extras.pooling import (
        EmbeddingRequestOutput,
        PoolingParams,
        PoolingRequestOutput,
        ScoringRequestOutput,
    )


class LLM(OwnedByProcess):
    """A model, ready to answer.

    >>> with LLM() as llm:
    ...     llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=50))

    `options` are the fields of EngineConfig, and vLLM's others with values that change nothing here
    (see arg_utils.py); a misspelt one is a TypeError. The other keyword arguments are the seams: a
    class of your own takes the place of the engine's. One thread runs steps; other threads may call
    add_request and abort_request.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        chat_template: str | Path | None = None,
        scheduler_cls: type[Scheduler] | None = None,
        block_manager_cls: type[BlockManager] | None = None,
        executor_cls: Callable[..., Any] | None = None,
        runner_cls: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        """model: None (the embedded demo model), a folder, or a Hugging Face id.

        chat_template: a template, or a file that holds one, that chat uses in place of the model's.
        disable_log_stats=False, one of vLLM's options, is for get_metrics and a line in the log.
        """
        self.chat_template = load_chat_template(chat_template)
        logs_stats = options.get("disable_log_stats") is False  # vLLM's default for LLM is True
        metrics = _metrics_chapter("LLM(disable_log_stats=False)") if logs_stats else None
        self.engine = LLMEngine(
            EngineConfig(**read_options("LLM", {"model": model, **options})),
            scheduler_cls=scheduler_cls,
            block_manager_cls=block_manager_cls,
            executor_cls=executor_cls,
            runner_cls=runner_cls,
        )
        if metrics is not None:
            metrics.collect_metrics(self.engine)
        self._request_counter = count()
        self._enqueued: list[RequestConsumer] = []  # wait_for_completion has not begun

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine, under vLLM's name."""
        return self.engine

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """The LLM that `engine_args` describe."""
        return cls(**vars(check_engine_args(engine_args)))

    def __repr__(self) -> str:
        return describe_engine(self.engine, "LLM")

    # -- step by step --

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> str:
        """Queue one request and return its id; calls of step() compute its tokens. Raises
        QueueOverflowError if max_num_waiting requests wait."""
        return self.engine.add_request(
            request_id,
            prompt,
            params,
            lora_request=lora_request,
            priority=priority,
            cache_salt=cache_salt,
        )

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine; see LLMEngine.step. It returns the outputs of all requests,
        so inside a loop over stream() it takes outputs that the loop would have got."""
        return self.engine.step()

    def abort_request(self, request_ids: str | Collection[str], index: int | None = None) -> bool:
        """End requests (or one completion of each); see LLMEngine.abort_request."""
        return self.engine.abort_request(request_ids, index)

    def has_unfinished_requests(self) -> bool:
        """True while step() has something to compute or to hand out."""
        return self.engine.has_unfinished_requests()

    # -- whole calls --

    def generate(
        self,
        prompts: PromptType | Seq[PromptType],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        priority: int | list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: None = None,
        cache_salt: str | list[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts.

        prompts: one prompt or a list; inputs.py says what a prompt may be. sampling_params,
        priority (lower values first, with scheduling_policy="priority" only), cache_salt (for
        prompts without a salt of their own) and lora_request (an adapter, with enable_lora only)
        are one for all, or a list of one each; None: the model's own recommendation, priority 0, no
        salt, no adapter. use_tqdm: False, or a function to be called in place of tqdm.
        tokenization_kwargs: {"add_special_tokens": False} or None. mm_processor_kwargs: None.

        A request that fails later has an output with finish_reason "error".
        Raises ValueError or TypeError, before any work, if one of the requests can never be served.
        """
        refuse_missing("generate", mm_processor_kwargs=mm_processor_kwargs)
        prompts = self._tokenize(prompt_to_seq(prompts), tokenization_kwargs)
        requests = self._make_all(prompts, sampling_params, priority, cache_salt, lora_request)
        return self._collect_all("generate", requests, use_tqdm)

    def enqueue(
        self,
        prompts: PromptType | Seq[PromptType],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        priority: int | list[int] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: None = None,
    ) -> list[str]:
        """Queue every prompt and return the request ids; wait_for_completion returns the outputs.
        The arguments are those of generate. (Queueing shows no progress bar.)"""
        refuse_missing("enqueue", mm_processor_kwargs=mm_processor_kwargs)
        prompts = self._tokenize(prompt_to_seq(prompts), tokenization_kwargs)
        requests = self._make_all(prompts, sampling_params, priority, None, lora_request)
        return self._enqueue(requests)

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: bool | Callable[..., tqdm] = True
    ) -> list[RequestOutput]:
        """Run steps until all requests of enqueue and enqueue_chat have ended; their outputs, in
        the order of queueing, without the aborted ones. output_type: None or RequestOutput."""
        if output_type not in (None, RequestOutput):
            refuse_missing("wait_for_completion", output_type=output_type)
        requests, self._enqueued = self._enqueued, []
        try:
            return self._collect(requests, use_tqdm, is_queued=True)
        finally:  # the bar may fail before the loop begins
            for request in filter(self.engine.has_request, requests):
                self.engine.abort_request(request.request_id)

    def stream(
        self,
        prompts: PromptType | Seq[PromptType],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        priority: int | list[int] | None = None,
        cache_salt: str | list[str | None] | None = None,
        output_kind: RequestOutputKind = RequestOutputKind.DELTA,
    ) -> Iterator[RequestOutput]:
        """Complete every prompt; yield the new text of each step. The texts of a completion's
        outputs, joined, are its whole text. With output_kind CUMULATIVE each output has the whole
        text so far. Leaving the loop early aborts the unfinished requests."""
        prompts = prompt_to_seq(prompts)
        requests = self._make_all(
            prompts, sampling_params, priority, cache_salt, lora_request, output_kind
        )
        return self.run_requests(requests)  # a generator: queues the requests when the loop begins

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        priority: int | list[int] | None = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: None = None,
        *,
        cache_salt: str | list[str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        A message is {"role": "user", "content": "..."}; a content may be a list of text parts, too.
        chat_template, a template or a file that holds one, is used in place of the model's own.
        chat_template_content_format: "string" or "openai" (see inputs.parse_chat_messages); "auto":
        what the template expects. add_generation_prompt opens the assistant's turn.
        continue_final_message continues the last message instead (give add_generation_prompt=False
        with it). The template gets tools (JSON schemas; extras/server/tool_parsers.py finds the
        calls in an answer) and chat_template_kwargs (such as {"enable_thinking": False}). The
        other arguments are those of generate.
        """
        refuse_missing("chat", mm_processor_kwargs=mm_processor_kwargs)
        prompts = self._render(
            messages,
            chat_template_content_format,
            tokenization_kwargs,
            chat_template_kwargs,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        return self.generate(
            prompts,
            sampling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            priority=priority,
            cache_salt=cache_salt,
        )

    def enqueue_chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        priority: int | list[int] | None = None,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: None = None,
    ) -> list[str]:
        """Queue conversations and return the request ids; wait_for_completion returns the outputs.
        The arguments are those of chat."""
        refuse_missing("enqueue_chat", mm_processor_kwargs=mm_processor_kwargs)
        prompts = self._render(
            messages,
            chat_template_content_format,
            tokenization_kwargs,
            chat_template_kwargs,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        requests = self._make_all(prompts, sampling_params, priority, None, lora_request)
        return self._enqueue(requests)

    def beam_search(
        self,
        prompts: PromptType | Seq[PromptType],
        params: Any,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[Any]:
        """The params.beam_width likeliest continuations of each prompt, best first.

        params: BeamSearchParams, from extras/beam_search.py, where the search is written.
        concurrency_limit: so many prompts are searched at once; None: all. use_tqdm counts these
        rounds. Raises ValueError or TypeError if a prompt can never be served, RuntimeError if a
        search fails.
        """
        if not hasattr(params, "search"):
            raise TypeError(f"params must be BeamSearchParams, got {brief(params)}.")
        limit = as_python(concurrency_limit)
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
            raise TypeError(f"concurrency_limit must be None or an int, got {brief(limit)}.")
        if limit is not None and limit < 1:
            raise VLLMValidationError(
                f"concurrency_limit is {limit}; allowed: None, or 1 or more.",
                parameter="concurrency_limit",
                value=limit,
            )
        prompts = prompt_to_seq(prompts)
        loras = _one_each("lora_request", lora_request, len(prompts))
        return params.search(self, prompts, limit, use_tqdm, loras)

    # -- vectors (runner="pooling": extras/pooling) --

    def encode(
        self,
        prompts: PromptType | Seq[PromptType],
        pooling_params: PoolingParams | Seq[PoolingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput]:
        """What a pooling model makes of every prompt: outputs.data is a tensor [dimensions].

        pooling_params: one for all, or a list of one each. pooling_task: None or "embed". The other
        arguments are those of generate. Raises ValueError or TypeError, before any work, if one of
        the requests can never be served; one that fails later has an `error`.
        """
        chapter = load_chapter("LLM.encode", "pooling.offline")
        params = chapter.check_encode(self.engine.config, pooling_params, pooling_task)
        prompts = self._tokenize(prompt_to_seq(prompts), tokenization_kwargs)
        params = _one_each("pooling_params", params, len(prompts))
        requests = self._make_all(prompts, params, None, None, lora_request)
        return self._collect_all("encode", requests, use_tqdm)

    def embed(
        self,
        prompts: PromptType | Seq[PromptType],
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        pooling_params: PoolingParams | Seq[PoolingParams] | None = None,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector of every prompt: outputs.embedding is a list of floats. The arguments are those
        of encode."""
        chapter = load_chapter("LLM.embed", "pooling.offline")
        chapter.check_pools("LLM.embed", self.engine.config)
        outputs = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        return chapter.make_embeddings(outputs)

    def score(
        self,
        data_1: PromptType | Seq[PromptType],
        data_2: PromptType | Seq[PromptType],
        /,
        *,
        use_tqdm: bool | Callable[..., tqdm] = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: None = None,
    ) -> list[ScoringRequestOutput]:
        """The cosine of the vectors of each pair, in outputs.score: of one text with each of
        several, or of two lists of the same length. chat_template: None. The other arguments are
        those of encode."""
        chapter = load_chapter("LLM.score", "pooling.offline")
        chapter.check_pools("LLM.score", self.engine.config)
        refuse_missing("score", chat_template=chat_template)
        texts_1, texts_2 = prompt_to_seq(data_1), prompt_to_seq(data_2)
        chapter.check_pairs(len(texts_1), len(texts_2))
        outputs = self.encode(
            [*texts_1, *texts_2],
            pooling_params,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        separator = chapter.separator_of(self.engine)
        return chapter.make_scores(outputs[: len(texts_1)], outputs[len(texts_1) :], separator)

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """[func(model)], with the model as a torch module. For engines of one process: of several
        ranks none has the whole model."""
        if not callable(func):
            raise TypeError(f"func must be a function of the model, got {brief(func)}.")
        self.engine._check_open()
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (number := getattr(self.engine.config, name)) > 1:
                raise VLLMValidationError(
                    f"apply_model needs the whole model in this process; {name} is {number}. Build "
                    "an engine with 1.",
                    parameter=name,
                    value=number,
                )
        return [func(self.engine.executor.runner.model)]

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises ValueError if the checkpoint has none."""
        return self.engine.input_processor.require_tokenizer("get_tokenizer")

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends."""
        return self.engine.get_default_sampling_params()

    def get_metrics(self) -> list[Any]:
        """The metrics so far, under vLLM's names: Counter, Gauge and Histogram of
        extras/metrics/reader.py. For an LLM built with disable_log_stats=False; otherwise nothing
        counts, and this raises RuntimeError. Any thread may call it."""
        return _metrics_chapter("LLM.get_metrics").get_metrics(self.engine)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache; with reset_connector the CPU tier of extras/kv_offload, too.
        False, and no change, while requests are running. reset_running_requests must be False."""
        if reset_running_requests:
            raise VLLMValidationError(
                "reset_prefix_cache cannot reset running requests. Abort them first."
            )
        return self.engine.reset_prefix_cache(reset_connector)

    def close(self) -> None:
        """Free all memory; the LLM cannot be used afterwards. Any thread may call this, and it ends
        within seconds, even if a step hangs; see LLMEngine.close."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- inside --

    def _make_all(
        self,
        prompts: list[Any],
        sampling_params: SamplingParams | Seq[SamplingParams] | None,
        priority: int | list[int] | None,
        cache_salt: str | list[str | None] | None,
        lora_request: LoRARequest | Seq[LoRARequest | None] | None,
        output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
    ) -> list[RequestState]:
        """Check all requests and queue none yet: if one is not valid, none is queued."""
        check_output_kind(output_kind)
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", default, len(prompts))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
        salts = _one_each("cache_salt", cache_salt, len(prompts))
        loras = _one_each("lora_request", lora_request, len(prompts))
        requests = []
        for prompt, *rest in zip(prompts, params, priorities, salts, loras, strict=True):
            request = self.engine.make_request(self.new_request_id(), prompt, *rest)
            request.root.sampling_params.output_kind = output_kind  # the request's own clone
            requests.append(request)
        return requests

    def _enqueue(self, requests: list[RequestState]) -> list[str]:
        """Queue these requests for wait_for_completion."""
        for request in requests:
            self.engine.add(request)
            self._enqueued.append(request)
        return [request.request_id for request in requests]

    def _collect(
        self,
        requests: Seq[RequestConsumer],
        use_tqdm: bool | Callable[..., tqdm],
        is_queued: bool = False,
    ) -> list[RequestOutput]:
        """Run these requests to their end; their outputs in the order of the requests. A request
        that was aborted has none."""
        results: dict[str, RequestOutput] = {}
        with _ProgressBar(self.engine, requests, use_tqdm) as bar:
            for output in self.run_requests(requests, is_queued):
                results[output.request_id] = output
                bar.count()
        ids = [request.request_id for request in requests]
        return [results[request_id] for request_id in ids if request_id in results]

    def _collect_all(
        self, call: str, requests: Seq[RequestConsumer], use_tqdm: bool | Callable[..., tqdm]
    ) -> list[Any]:
        """As _collect. Raises RuntimeError if a request was aborted."""
        results = self._collect(requests, use_tqdm)
        if len(results) < len(requests):
            raise RuntimeError(
                f"{call} did not get the outputs of all requests: one was aborted meanwhile."
            )
        return results

    def _tokenize(self, prompts: list[Any], options: dict[str, Any] | None) -> list[Any]:
        return tokenize_prompts(self.engine.input_processor, prompts, options)

    def _render(
        self,
        messages: Any,
        content_format: str,
        tokenization_kwargs: dict[str, Any] | None,
        chat_template_kwargs: dict[str, Any] | None,
        **options: Any,
    ) -> list[Any]:
        """The prompts of one conversation, or of a list of conversations. `options` go to the chat
        template, and chat_template_kwargs below them."""
        if not isinstance(messages, (list, tuple)):
            raise TypeError(
                f"messages must be a list of message dicts, got {brief(messages)}. {CHAT_EXAMPLE}"
            )
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        texts = render_conversations(
            self.engine.input_processor,
            [messages] if is_one else messages,
            self.chat_template,
            content_format,
            chat_template_kwargs,
            **options,
        )
        # The text has its special tokens already.
        tokenization = _options("tokenization_kwargs", tokenization_kwargs)
        return self._tokenize(texts, {"add_special_tokens": False, **tokenization})

    def run_requests(
        self, requests: Seq[RequestConsumer], is_queued: bool = False
    ) -> Iterator[RequestOutput]:
        """Queue these requests (unless they are queued already) and run steps until they have
        ended; yield their outputs.

        Each caller gets its own outputs only, also if step() is called inside this loop, or another
        loop like this one. However this loop ends, the unfinished requests are aborted.
        """
        engine, is_unfinished = self.engine, bool(requests)
        request_ids, claim = set[str](), set[str]()  # the same, while the loop runs
        try:
            engine.claims.append(claim)
            for request in requests:
                if not is_queued:
                    engine.add(request)  # raises if another request has taken its id meanwhile
                request_ids.add(request.request_id)
                claim.add(request.request_id)
            while is_unfinished:
                engine.run_step()
                outputs = engine.take_outputs(request_ids)
                # Asked before the caller's code runs: a loop inside this one may finish requests,
                # and their last outputs are taken by the next round.
                is_unfinished = any(engine.has_request(request) for request in requests)
                yield from outputs
        finally:
            claim.clear()  # first: a Ctrl-C here may leave the requests to step()
            if engine.is_owner:  # a forked child runs this, too, when its copy of the loop ends
                with delayed_interrupt():
                    for request in filter(engine.has_request, requests):
                        engine.abort_request(request.request_id)
                    engine.take_outputs(request_ids)
                    engine.claims[:] = filter(None, engine.claims)

    def new_request_id(self) -> str:
        """A request id that is not in use: "0", "1", ..., as vLLM's."""
        while True:
            request_id = str(next(self._request_counter))
            if not self.engine.is_in_use(request_id):
                return request_id


def tokenize_prompts(
    processor: InputProcessor, prompts: list[Any], options: Mapping[str, Any] | None
) -> list[Any]:
    """The prompts, tokenized with options of vLLM's tokenization_kwargs, if there are any."""
    options = _options("tokenization_kwargs", options)
    if not options:
        return prompts
    add_special_tokens = options.pop("add_special_tokens", True)
    check_bool("add_special_tokens", add_special_tokens)
    refuse_missing("tokenization_kwargs", **options)
    return [
        parse_prompt(prompt)._replace(token_ids=processor.tokenize(prompt, add_special_tokens))
        for prompt in prompts
    ]


def render_conversations(
    processor: InputProcessor,
    conversations: Seq[Any],
    default_template: str | None = None,
    content_format: str = "auto",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[Any]:
    """The text of each conversation, by the chat template in `options`, or default_template, or the
    tokenizer's own. `options` go to the template, and chat_template_kwargs below them."""
    given = _options("chat_template_kwargs", chat_template_kwargs)
    options = given | {key: value for key, value in options.items() if value is not None}
    for name in ("conversation", "conversations", "messages", "self", "tokenize"):
        if name in options:
            raise ValueError(f"chat_template_kwargs holds {name!r}, which chat sets itself.")
    for name in ("add_generation_prompt", "continue_final_message"):
        check_bool(name, options.get(name, False))
    template = options.get("chat_template")
    own = getattr(processor.tokenizer, "chat_template", {})
    if template is None or template == "":
        template = default_template
    elif not (isinstance(template, str) and isinstance(own, dict) and template in own):  # a name
        template = load_chat_template(template)
    options = {**options, "chat_template": template}
    return [processor.render_chat(each, options, content_format) for each in conversations]


def _metrics_chapter(user: str) -> Any:
    """extras/metrics. Raises ModuleNotFoundError, with the name of what needs it, if it was
    deleted."""
    try:
        return import_module("nanoserve.extras.metrics")
    except ModuleNotFoundError as error:
        message = f"{user} needs nanoserve/extras/metrics, and it is not there: {error}."
        raise ModuleNotFoundError(message, name=error.name) from error


def _options(name: str, given: Any) -> dict[str, Any]:
    """A copy of a dict of keyword arguments; empty for None. Raises TypeError for anything else."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise TypeError(f"{name} must be None or a dict with names as keys, got {brief(given)}.")
    return dict(given)


def _one_each(name: str, given: Any, number: int) -> list[Any]:
    """A list of `number` items: `given` itself if it is a list, else `given` repeated."""
    given = as_python(given)
    if not isinstance(given, (list, tuple)):
        return [given] * number
    if len(given) != number:
        raise VLLMValidationError(
            f"{name} has {len(given)} items for {number} prompts. Give one for all, or one each.",
            parameter=name,
        )
    return list(given)


class _ProgressBar:
    """Requests done and, after each step, how many run and wait, and tokens per second: those that
    were written, or those of the prompts where the result is a vector.

    Drawn ten times a second at most (tqdm's mininterval). Other steps only look at the clock. A bar
    that the caller makes gets the keyword arguments that vLLM gives, and decides about the rest.
    """

    def __init__(
        self,
        engine: LLMEngine,
        requests: Seq[RequestConsumer],
        use_tqdm: bool | Callable[..., tqdm],
    ) -> None:
        """use_tqdm: a function that makes the bar, or whether there is one."""
        from tqdm import tqdm  # here, so that the command line answers where nothing is installed

        self.engine = engine
        self.requests = requests
        what: dict[str, Any] = {"total": len(requests), "desc": "Prompts"}
        if callable(use_tqdm):
            self.bar = use_tqdm(**what, dynamic_ncols=True, postfix="")
            if not (hasattr(self.bar, "update") and hasattr(self.bar, "close")):
                raise TypeError(
                    f"use_tqdm made {brief(self.bar)}; allowed: a bar with update(n) and close()."
                )
        else:
            self.bar = tqdm(
                **what,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
                disable=not use_tqdm,
                miniters=0,  # draw also when no request has ended since
                file=output_stream(),
            )
        # A bar that is not tqdm's may have update and close only: it counts the requests.
        is_drawn = not getattr(self.bar, "disable", False)
        self.shows_numbers = is_drawn and hasattr(self.bar, "set_postfix_str")
        self.num_finished = 0
        self.start_time = self.described_at = time()

    def __call__(self, report: StepReport) -> None:
        """Called by the engine after each step."""
        if self._is_due():
            self._describe()
            self.bar.update(0)

    def count(self) -> None:
        """One request has finished."""
        self.num_finished += 1
        is_last = self.shows_numbers and self.num_finished == len(self.requests)
        if is_last or self._is_due():
            self._describe()
        self.bar.update(1)

    def _is_due(self) -> bool:
        interval = getattr(self.bar, "mininterval", 0.1)
        return self.shows_numbers and time() - self.described_at >= interval

    def _describe(self) -> None:
        """The numbers behind the bar, of all requests of the call."""
        scheduler = self.engine.scheduler
        num_running, sequences = len(scheduler.running), [r.sequences for r in self.requests]
        makes_vectors = self.engine.config.runner == "pooling"
        counted = "num_computed_tokens" if makes_vectors else "num_output_tokens"
        num_tokens = sum(getattr(seq, counted) for each in sequences for seq in each)
        self.described_at = time()
        elapsed = max(self.described_at - self.start_time, 1e-9)
        self.bar.set_postfix_str(
            f"run {num_running}, wait {len(scheduler.sequences) - num_running}, "
            f"{num_tokens / elapsed:.0f} tok/s",
            refresh=False,
        )

    def __enter__(self) -> _ProgressBar:
        if self.shows_numbers:
            self.engine.step_listeners.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.shows_numbers:
            self.engine.step_listeners.remove(self)
        with delayed_interrupt():  # Python drops what a signal's handler raises inside __del__
            self.bar.close()
            del self.bar
