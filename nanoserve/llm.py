"""Who turns the crank?

LLMEngine is the loop, in the open: add requests, call step() until nothing is unfinished. A step is
the three lines that all of vLLM stands on (and a fourth, for text):

    scheduler_output = self.scheduler.schedule()                       # who runs, how many tokens
    model_output     = self.executor.execute_model(scheduler_output)   # tensors, the GPU's part
    updates          = self.scheduler.update_from_output(scheduler_output, model_output)

LLM is the convenient face in front: it has an engine and turns the crank for you.

This is the one module that knows both planes. It imports the data plane (and so torch) only when
an engine is built.

Left out: the asynchronous engine and the HTTP server (nanoserve/extras).

vLLM: vllm/engine/llm_engine.py, entrypoints/llm.py (V0); vllm/v1/engine/llm_engine.py,
core.py (V1).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig, ModelConfig, resolve_folder
from nanoserve.processor import (
    InputProcessor,
    OutputProcessor,
    Prompt,
    RequestOutput,
    load_tokenizer,
)
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import SchedulerOutput, Sequence, SequenceStatus

logger = logging.getLogger("nanoserve")
StepListener = Callable[[SchedulerOutput, list[RequestOutput]], None]
Message = dict[str, Any]  # {"role": "user", "content": "..."}


class LLMEngine:
    """Requests in, one step at a time, outputs out. Not thread-safe: drive it from one thread.

    Invariant: whatever a call raises, no block is lost and the engine serves on.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        scheduler_cls: type[Scheduler] = Scheduler,
        block_manager_cls: type[BlockManager] = BlockManager,
        executor_cls: Callable[..., Any] | None = None,
        attention_backend: Any = "auto",
    ) -> None:
        """Read the checkpoint and build every part. Raises ValueError for what does not fit.

        The keyword arguments are the seams: a class of your own takes the place of ours.
        """
        folder = resolve_folder(config.model)
        self.model_config = ModelConfig.from_folder(folder)
        self.config = config.resolve(self.model_config)
        tokenizer_folder = folder if config.tokenizer is None else resolve_folder(config.tokenizer)
        self.tokenizer = load_tokenizer(tokenizer_folder, explicit=config.tokenizer is not None)
        make_executor = executor_cls or _uniproc_executor()
        self.executor = make_executor(self.config, self.model_config, attention_backend)
        num_kv_blocks = self.executor.num_kv_blocks
        self.block_manager = block_manager_cls(
            num_kv_blocks, config.block_size, config.enable_prefix_caching
        )
        self.scheduler = scheduler_cls(self.config, self.block_manager)
        self.input_processor = InputProcessor(
            self.config, self.model_config, self.tokenizer, num_kv_blocks
        )
        self.output_processor = OutputProcessor(self.tokenizer)
        self.on_step: list[StepListener] = []  # called with each step's decision and outputs
        self._seq_ids: dict[str, int] = {}  # request id -> seq id, of unfinished requests
        self._is_closed = False
        self._log_what_runs()

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request. Raises ValueError or TypeError if it can never be served."""
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        sequence = self.make_sequence(request_id, prompt, params, priority, cache_salt)
        self.add_sequence(sequence, prompt if isinstance(prompt, str) else None)

    def make_sequence(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Sequence:
        """Check a request without queueing it: what generate does with all before it starts any."""
        self._check_open()
        return self.input_processor.process(
            request_id, prompt, sampling_params, priority, cache_salt
        )

    def add_sequence(self, sequence: Sequence, prompt: str | None) -> None:
        """Queue a checked sequence. Raises ValueError if its request id is in use."""
        if sequence.request_id in self._seq_ids:
            raise ValueError(f"request id {sequence.request_id!r} is in use; choose another.")
        self.output_processor.add(sequence, prompt)
        self.scheduler.add(sequence)
        self._seq_ids[sequence.request_id] = sequence.seq_id

    def step(self) -> list[RequestOutput]:
        """Run one step; return an output for each request that has news (and wants to tell)."""
        self._check_open()
        scheduler_output = self.scheduler.schedule()
        if scheduler_output.is_empty:
            return []
        try:
            model_output = self.executor.execute_model(scheduler_output)
            updates = self.scheduler.update_from_output(scheduler_output, model_output)
        except BaseException:  # Ctrl-C too: the step's tokens were promised, and will not come
            self.scheduler.abandon(scheduler_output)
            raise
        outputs = []
        for update in updates:
            stop = self.output_processor.append(update)
            if stop is not None:
                self._stop(update.sequence, stop)
            output = self.output_processor.build_output(update.sequence)
            if update.sequence.status.finish_reason:
                del self._seq_ids[update.sequence.request_id]
            if output is not None:
                outputs.append(output)
        for listener in self.on_step:
            listener(scheduler_output, outputs)
        return outputs

    def _stop(self, sequence: Sequence, stop: str) -> None:
        """A stop string was found: only the text tells, so the scheduler learns it here."""
        if not self.scheduler.finish(sequence.seq_id, SequenceStatus.FINISHED_STOPPED, stop):
            sequence.status, sequence.stop_reason = SequenceStatus.FINISHED_STOPPED, stop

    def abort_request(self, request_id: str) -> bool:
        """End a request now, at whatever stage, and free its blocks; False if it is not there."""
        seq_id = self._seq_ids.pop(request_id, None)
        if seq_id is None:
            return False
        self.scheduler.finish(seq_id, SequenceStatus.FINISHED_ABORTED)
        del self.output_processor.states[seq_id]
        return True

    def has_unfinished_requests(self) -> bool:
        return self.scheduler.has_unfinished()

    def is_unfinished(self, request_id: str) -> bool:
        """True for a request that was added and has neither finished nor been aborted."""
        return request_id in self._seq_ids

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests are running."""
        return self.block_manager.reset_prefix_cache()

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends for this model, over SamplingParams' defaults."""
        recommended = self.model_config.generation_defaults
        names = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
        names["max_new_tokens"] = "max_tokens"
        given = {ours: recommended.get(theirs) for theirs, ours in names.items()}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def close(self) -> None:
        """Abort what runs and give the model's and the cache's memory back."""
        if self._is_closed:
            return
        for request_id in list(self._seq_ids):
            self.abort_request(request_id)
        self.executor.close()
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this engine is closed; build a new LLM.")

    def _log_what_runs(self) -> None:
        """One line, so that a slow run explains itself."""
        if not logger.hasHandlers():  # the application has no opinion on logging: show it
            handler = logging.StreamHandler(sys.stderr)
            handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
        config, blocks = self.config, self.executor.num_kv_blocks
        logger.info(
            "%s (%s): %s, KV cache %d blocks x %d tokens, max_model_len %d, max_num_seqs %d, "
            "token budget %d, prefix caching %s, chunked prefill %s",
            self.model_config.path.name,
            self.model_config.architecture,
            self.executor.describe(),
            blocks,
            config.block_size,
            config.max_model_len,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            "on" if config.enable_prefix_caching else "off",
            "on" if config.enable_chunked_prefill else "off",
        )


def _uniproc_executor() -> Callable[..., Any]:
    """The default executor class, imported here because it imports torch."""
    from nanoserve.executor import UniprocExecutor

    return UniprocExecutor


class LLM:
    """A model, ready to answer.

    >>> with LLM() as llm:
    ...     llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=50))

    Every option is spelled out, so that a misspelt one is Python's own TypeError; EngineConfig says
    what each means. Not thread-safe.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        dtype: str = "auto",
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        block_size: int = 16,
        num_kv_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        scheduling_policy: str = "fcfs",
        seed: int = 0,
        load_format: str = "auto",
        enforce_eager: bool = False,
        max_logprobs: int = 20,
        scheduler_cls: type[Scheduler] = Scheduler,
        block_manager_cls: type[BlockManager] = BlockManager,
        executor_cls: Callable[..., Any] | None = None,
        attention_backend: Any = "auto",
    ) -> None:
        """model: None (the embedded demo model), a folder, or a Hugging Face id."""
        config = EngineConfig(
            model=None if model is None else str(model),
            tokenizer=None if tokenizer is None else str(tokenizer),
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size=block_size,
            num_kv_blocks=num_kv_blocks,
            kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            scheduling_policy=scheduling_policy,
            seed=seed,
            load_format=load_format,
            enforce_eager=enforce_eager,
            max_logprobs=max_logprobs,
        )
        self.engine = LLMEngine(
            config,
            scheduler_cls=scheduler_cls,
            block_manager_cls=block_manager_cls,
            executor_cls=executor_cls,
            attention_backend=attention_backend,
        )
        self._request_counter = count()
        self._unclaimed: list[RequestOutput] = []  # of requests that the running call did not make

    # -- the crank --

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue one request, to be served by step()."""
        self.engine.add_request(
            request_id, prompt, sampling_params, priority=priority, cache_salt=cache_salt
        )

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine; see LLMEngine.step."""
        self._unclaimed += self.engine.step()  # should it raise, nothing is lost
        outputs, self._unclaimed = self._unclaimed, []
        return outputs

    def abort_request(self, request_id: str) -> bool:
        """End a request now; False if there is none of this name."""
        return self.engine.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        """True while step() has something to do or to tell."""
        return bool(self._unclaimed) or self.engine.has_unfinished_requests()

    # -- the convenient way --

    def generate(
        self,
        prompts: Prompt | list[str] | list[list[int]] | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | list[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; outputs in the order of the prompts.

        prompts: a string, a list of token ids, or a list of either. sampling_params and priority:
        one for all, or a list of one each; None: the model's own recommendation, and 0.
        Raises ValueError or TypeError, before any work, if one of them cannot be served.
        """
        requests = self._make_all(prompts, sampling_params, priority, RequestOutputKind.FINAL_ONLY)
        results: dict[str, RequestOutput] = {}
        with _ProgressBar(len(requests), disable=not use_tqdm) as bar:
            for output in self._run(requests):
                results[output.request_id] = output
                bar.count(output)
        return [results[sequence.request_id] for _, sequence in requests]

    def stream(
        self,
        prompts: Prompt | list[str] | list[list[int]] | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        priority: int | list[int] | None = None,
    ) -> Iterator[RequestOutput]:
        """Complete every prompt, handing out what is new as it comes: the texts of a request's
        outputs, joined, are its whole text. Leaving the loop early aborts what is unfinished."""
        requests = self._make_all(prompts, sampling_params, priority, RequestOutputKind.DELTA)
        return self._run(requests)  # a generator: queues them when the loop begins

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | list[int] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, through the model's chat template.

        A message is {"role": "user", "content": "..."}.
        """
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations = [messages] if is_one else messages
        prompts: list[Prompt] = [self._render(conversation) for conversation in conversations]
        results = self.generate(
            [self._encode_rendered(str(prompt)) for prompt in prompts],
            sampling_params,
            use_tqdm,
            priority,
        )
        return [
            replace(result, prompt=str(prompt))
            for result, prompt in zip(results, prompts, strict=True)
        ]

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises ValueError if the checkpoint has none."""
        return self.engine.input_processor.require_tokenizer("get_tokenizer")

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends."""
        return self.engine.get_default_sampling_params()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests are running."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Give all memory back; the LLM is of no use afterwards."""
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
        output_kind: RequestOutputKind,
    ) -> list[tuple[Prompt, Sequence]]:
        """Check all prompts, and queue none yet: one bad one refuses them all."""
        prompts = _as_list_of_prompts(prompts)
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _one_each("sampling_params", default, len(prompts))
        priorities = _one_each("priority", 0 if priority is None else priority, len(prompts))
        sequences = []
        for prompt, params_, priority_ in zip(prompts, params, priorities, strict=True):
            if isinstance(params_, SamplingParams):
                params_ = replace(params_, output_kind=output_kind)
            request_id = f"generate-{next(self._request_counter)}"
            sequences.append(self.engine.make_sequence(request_id, prompt, params_, priority_))
        return list(zip(prompts, sequences, strict=True))

    def _run(self, requests: list[tuple[Prompt, Sequence]]) -> Iterator[RequestOutput]:
        """Queue these requests and turn the crank until they have ended; yield their outputs.

        Outputs of other requests wait for whoever made them: step(), or another loop like this one
        that ours runs inside of. However this ends (Ctrl-C, an error, a caller who leaves), what
        has not finished is aborted.
        """
        unfinished: set[str] = set()
        try:
            for prompt, sequence in requests:
                self.engine.add_sequence(sequence, prompt if isinstance(prompt, str) else None)
                unfinished.add(sequence.request_id)
            while unfinished:
                self._unclaimed += self.engine.step()
                outputs = [o for o in self._unclaimed if o.request_id in unfinished]
                self._unclaimed = [o for o in self._unclaimed if o.request_id not in unfinished]
                unfinished = {name for name in unfinished if self.engine.is_unfinished(name)}
                yield from outputs
        finally:
            for request_id in unfinished:
                self.engine.abort_request(request_id)

    def _render(self, messages: Any) -> str:
        """The text of a conversation, ready for the assistant to go on."""
        tokenizer = self.engine.input_processor.require_tokenizer("chat")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "this model's tokenizer has no chat template. Use generate with a prompt of your "
                "own, or a model that was trained to chat."
            )
        if not messages or not all(isinstance(message, dict) for message in messages):
            raise TypeError(f"a conversation is a list of message dicts, got {messages!r}.")
        try:
            return tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise what they like: a missing key, an odd role
            raise ValueError(f"the chat template refuses {messages!r}: {error}.") from error

    def _encode_rendered(self, text: str) -> list[int]:
        """Token ids of a rendered template, which has its special tokens already."""
        return self.get_tokenizer().encode(text, add_special_tokens=False)


def _as_list_of_prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts, from one or from several. A bare string is one prompt, as is a bare list
    of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts must be a string, token ids, or a list of either: {prompts!r}.")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def _one_each(name: str, given: Any, number: int) -> list[Any]:
    """`given` repeated, or checked to be a list of `number` items."""
    if not isinstance(given, (list, tuple)):
        return [given] * number
    if len(given) != number:
        raise ValueError(
            f"{name} has {len(given)} items for {number} prompts. Give one for all, or one each."
        )
    return list(given)


class _ProgressBar:
    """Requests done, and input and output tokens per second."""

    def __init__(self, total: int, disable: bool) -> None:
        self.bar = tqdm(total=total, desc="Processed prompts", unit="req", disable=disable)
        self.num_input = 0
        self.num_output = 0

    def count(self, output: RequestOutput) -> None:
        """One request has finished."""
        self.num_input += len(output.prompt_token_ids)
        self.num_output += sum(len(completion.token_ids) for completion in output.outputs)
        elapsed = max(self.bar.format_dict["elapsed"], 1e-9) if not self.bar.disable else 1.0
        self.bar.set_postfix_str(
            f"input: {self.num_input / elapsed:.0f} tok/s, "
            f"output: {self.num_output / elapsed:.0f} tok/s",
            refresh=False,
        )
        self.bar.update()

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.close()
