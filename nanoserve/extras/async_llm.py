"""How do many callers share one engine?

A server has hundreds of requests at once, and each of them waits for its own next token. AsyncLLM
gives each request an asynchronous iterator, and runs the steps for all in a thread of its own:

    async for output in async_llm.generate("Once upon a time", SamplingParams()):
        print(output.outputs[0].text)

    event loops (one or several)                      the thread "nanoserve-engine"
    generate: tokenize in a pool of threads
              add ------------------------------->    the engine's inbox
                                                      run_step(): schedule, execute, update
              await collector.get() <------------     RequestOutputCollector.put(): new tokens
              the iterator is closed: abort ----->    the inbox again: its blocks are free

The event loop is woken once a step, however many requests have new tokens. A caller that is slower
than the engine misses nothing: the collector joins deltas, and keeps the newest of the cumulative
outputs. While no request is unfinished, the thread waits for an event and uses no CPU.

*How a request ends.* By its last output. Or by abort(), or shutdown(): its last output has
finish_reason "abort" and all tokens until then. Or by an error of its own: as in vLLM, this is an
output, too, with finish_reason "error"; stop_reason says why. If a step fails and no request is the
cause, the engine is dead: every waiting caller, every later one and check_health() get
EngineDeadError. And if nobody waits any more (the iterator is closed, the task cancelled, the event
loop closed), the request is aborted.

Left out: a process of its own for the engine. vLLM's EngineCoreProc runs the steps in a second
process, and AsyncMPClient talks with it over ZMQ sockets, in msgpack. So two Python interpreters
work at once: one schedules the next step while the other tokenizes, makes text of tokens and
serves HTTP. Here they take turns, as Python runs one thread at a time; only tokenizers and the
model's kernels run beside Python code. It would also let several API servers share an engine, and
a crash of the engine would leave the server alive to say so. The price: every request and token is
encoded, sent and decoded; two processes have to start, watch and end each other; and a debugger or
a notebook sees only one of the two.

vLLM: vllm/engine/async_llm_engine.py (V0); vllm/v1/engine/: async_llm.py, core_client.py, core.py,
output_processor.py (V1).
"""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanoserve.arg_utils import (
    EngineArgs,
    check_engine_args,
    check_seam_names,
    load_chat_template,
)
from nanoserve.config import EngineConfig, ModelConfig, load_chapter
from nanoserve.distributed.process import EXIT_TIMEOUT, OwnedByProcess, in_this_process
from nanoserve.engine import LLMEngine, StepReport
from nanoserve.exceptions import (
    Caught,
    EngineDeadError,
    VLLMValidationError,
    as_validation_error,
    brief,
    describe_error,
)
from nanoserve.inputs import (
    INT64_LIMIT,
    Message,
    PromptType,
    as_arrival_time,
    as_trace_headers,
)
from nanoserve.interrupts import delayed_interrupt
from nanoserve.llm import render_conversations, tokenize_prompts
from nanoserve.logger import describe_engine, init_logger
from nanoserve.output_processor import (
    CompletionOutput,
    RequestConsumer,
    RequestOutput,
    RequestState,
)
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.sequence import Sequence, SequenceStatus, SequenceUpdate

if TYPE_CHECKING:
    from nanoserve.extras.beam_search import BeamSearchOutput, BeamSearchParams
    from nanoserve.extras.lora.manager import LoRAManager
    from nanoserve.extras.lora.request import LoRARequest
    from nanoserve.extras.metrics import StatLogger
    from nanoserve.extras.pooling import PoolingParams, PoolingRequestOutput

logger = init_logger(__name__)
Result = TypeVar("Result")
NUM_TOKENIZERS = 4  # threads
DRAIN_PAUSE = 0.01  # seconds between two looks of wait_for_requests_to_drain
LOADED_ONCE = "The weights are those of the checkpoint; build a new AsyncLLM for others."
NOT_ASLEEP = "Memory is held until shutdown(); pause_generation() stops the steps."
# Public names of vLLM's AsyncLLM that are not here: what to use, or why not.
LEFT_OUT = {
    "start_profile": "extras.trace.Recorder writes a Chrome trace of all steps.",
    "stop_profile": "extras.trace.Recorder writes a Chrome trace of all steps.",
    "collective_rpc": "A class of your own goes into runner_cls; call_utility(function) runs "
    "function(engine) between two steps.",
    "get_num_queued_tokens": "max_num_waiting limits the queue, in requests.",
    "sleep": NOT_ASLEEP,
    "wake_up": NOT_ASLEEP,
    "is_sleeping": NOT_ASLEEP,
    "release_kv_cache_memory": NOT_ASLEEP,
    "checkpoint_prepare": NOT_ASLEEP,
    "checkpoint_restore": NOT_ASLEEP,
    "reset_mm_cache": "Prompts are text or token ids.",
    "reset_encoder_cache": "Prompts are text or token ids.",
    "pin_lora": "Slots of adapters go to who is next; a larger max_loras has more.",
    "init_weight_transfer_engine": LOADED_ONCE,
    "shutdown_weight_transfer_engine": LOADED_ONCE,
    "start_weight_update": LOADED_ONCE,
    "start_draft_weight_update": LOADED_ONCE,
    "update_weights": LOADED_ONCE,
    "finish_weight_update": LOADED_ONCE,
    "update_weight_version": LOADED_ONCE,
    "get_weight_version": LOADED_ONCE,
    "compute_weight_checksums": LOADED_ONCE,
    "notify_kv_transfer_request_rejected": "The KV cache stays on its device.",
    "get_kv_event_sources": "step_listeners get a report of each step.",
    "scale_elastic_ep": "The number of ranks is tensor_parallel_size, from start to end.",
    "handle_fault": "check_health() says whether the engine lives.",
    "get_status": "check_health() says whether the engine lives.",
}


class RequestOutputCollector:
    """The outputs of one request on their way from the engine's thread to the task that waits for
    them. For the engine it is the request's consumer.

    Invariant: no token is lost, and at most one output waits here. `get` is for one task of the
    event loop in which the collector was made; the other methods are for any thread.
    """

    def __init__(
        self,
        request: RequestConsumer,
        core: EngineCoreThread,
        trace_headers: Mapping[str, str] | None = None,
    ) -> None:
        self.request = request
        self.trace_headers = trace_headers
        self.request_id = request.request_id
        self.core = core
        self.loop = asyncio.get_running_loop()
        kind = None
        if isinstance(request, RequestState):
            kind = request.root.sampling_params.output_kind
        self._is_delta = kind is RequestOutputKind.DELTA
        self._lock = threading.Lock()  # guards the next three
        self._output: RequestOutput | None = None
        self._error: BaseException | None = None
        self._is_over = False  # nothing more will be put
        self.is_closed = False  # nobody waits; the engine may not know yet
        self._ready = asyncio.Event()

    # -- for the engine --

    @property
    def sequences(self) -> Iterable[Sequence]:
        return self.request.sequences

    @property
    def is_finished(self) -> bool:
        return self.request.is_finished

    def process(self, updates: list[SequenceUpdate]) -> None:
        """Put what the request hands out after a step."""
        output = self.request.process(updates)
        if output is not None or self.request.is_finished:
            self.put(output, is_over=self.request.is_finished)

    def fail(self, message: str) -> None:
        """Put the last output, which tells of the error."""
        output, error = None, None
        try:
            output = self.request.fail(message)
        except BaseException:
            error = RuntimeError(f"request {self.request_id!r} failed: {message}")
            raise
        finally:
            self.put(output, is_over=True, error=error)

    def end_aborted(self) -> None:
        """The engine has aborted the request: put its last output."""
        output = None
        if isinstance(self.request, RequestState):
            with Caught():  # the request may be damaged: it ends even so
                output = self.request.end(SequenceStatus.FINISHED_ABORTED)
        self.put(output, is_over=True)

    # -- between the two --

    def put(
        self,
        output: RequestOutput | None,
        is_over: bool = False,
        error: BaseException | None = None,
    ) -> None:
        """Add an output to the one that waits. is_over: it is the last; `error` comes behind it."""
        with self._lock:
            if self._is_over:
                self.core.collectors.discard(self)  # it ended before `add` had noted it
                return
            is_first = self._output is None
            if self._output is not None and output is not None and self._is_delta:
                output = join_deltas(self._output, output)
            self._output = self._output if output is None else output
            self._is_over, self._error = is_over, error
        if is_over:
            self.core.collectors.discard(self)
        if is_first:  # else the task knows already, and has not come yet
            self.core.changed.append(self)

    def close(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            self._is_over, self._output, self.is_closed = True, None, True

    def wake(self) -> None:
        """There is something to get. Called in the event loop."""
        self._ready.set()

    async def get(self) -> RequestOutput | None:
        """Wait for new tokens. None: the request has ended, and all outputs were got. Raises
        EngineDeadError if the engine is dead."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            with self._lock:
                output, self._output = self._output, None
                is_over, error = self._is_over, self._error
            if is_over:
                self._ready.set()  # for the next call, which finds the end
            if output is None and error is not None:
                raise error
            if output is not None or is_over:
                return output


def join_deltas(old: RequestOutput, new: RequestOutput) -> RequestOutput:
    """One delta that says what two say, one after the other. Changes the lists of `old`.

    A step's delta holds only the completions that changed in it (vLLM: RequestOutput.add).
    """
    completions = {completion.index: completion for completion in old.outputs}
    for completion in new.outputs:
        earlier = completions.get(completion.index)
        joined = completion if earlier is None else _join_completions(earlier, completion)
        completions[completion.index] = joined
    return replace(new, outputs=[completions[index] for index in sorted(completions)])


def _join_completions(old: CompletionOutput, new: CompletionOutput) -> CompletionOutput:
    old.token_ids += new.token_ids
    if old.logprobs is not None:
        old.logprobs += new.logprobs or []
    text = old.text + new.text
    return replace(new, text=text, token_ids=old.token_ids, logprobs=old.logprobs)


class EngineCoreThread:
    """The thread that runs the steps of one engine, from the first request on (vLLM: the process
    EngineCoreProc).

    Invariant: every collector that was added is told how its request ended, whatever happens, or
    nobody waits for it any more. The thread is a daemon, and does not hold the AsyncLLM.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.collectors: set[RequestOutputCollector] = set()  # whose request has not ended
        self.changed: deque[RequestOutputCollector] = deque()  # whose task has to be woken
        self.error: BaseException | None = None  # why the engine is dead
        self.stop_at: float | None = None  # time.monotonic() when shutdown() aborts what is left
        self.is_paused = False  # no step begins
        self._is_over = False  # no step runs any more
        self._utilities: deque[tuple[Callable[[LLMEngine], Any], Future[Any]]] = deque()
        self._wake = threading.Event()
        self._lock = threading.RLock()  # to add a request, to start and to end the thread
        self._thread: threading.Thread | None = None

    # -- for any thread --

    @property
    def is_alive(self) -> bool:
        """Are new requests taken?"""
        is_ending = self.stop_at is not None or self._is_over or self.engine._is_closed
        return self.error is None and not is_ending

    @property
    def dead_error(self) -> EngineDeadError:
        """A new error that says why no request is taken."""
        cause = self.error
        if cause is None:
            return EngineDeadError("this AsyncLLM was shut down; build a new one.")
        error = EngineDeadError(
            f"this engine cannot run another step ({describe_error(cause)}). Build a new AsyncLLM."
        )
        error.__cause__ = cause
        return error

    def add(self, collector: RequestOutputCollector) -> None:
        """Queue a request. Raises ValueError if its id is in use, QueueOverflowError,
        EngineDeadError."""
        with delayed_interrupt(), self._lock:
            self._start()
            self.engine.check_admission()
            self.engine.add(collector)
            self.collectors.add(collector)
        self._wake.set()

    def drop(self, collector: RequestOutputCollector) -> None:
        """Nobody waits for this request: abort it, if it has not ended."""
        if not self.engine.is_owner:  # a forked child closes its copy of an iterator
            return
        with delayed_interrupt():
            collector.close()
            self.collectors.discard(collector)
            if self.engine.has_request(collector):
                self.abort(collector.request_id)

    def abort(self, request_ids: str | Collection[str]) -> None:
        """Abort requests. Their collectors get a last output when the thread sees that they have
        ended."""
        self.engine.abort_request(request_ids)
        self._wake.set()

    def call_utility(self, function: Callable[[LLMEngine], Result]) -> Future[Result]:
        """Run function(engine) in the thread, between two steps. Raises EngineDeadError."""
        future: Future[Result] = Future()
        with self._lock:
            self._start()
            self._utilities.append((function, future))
        self._wake.set()
        return future

    def check_health(self) -> None:
        """Raise EngineDeadError if no request would be served."""
        check = getattr(self.engine.executor, "check_health", None)
        if self.is_alive and check is not None:
            try:
                check()
            except EngineDeadError as error:
                self.error = self.error or error
                self._wake.set()
        if not self.is_alive:
            raise self.dead_error

    def shutdown(self, timeout: float) -> None:
        """End the thread and close the engine; see AsyncLLM.shutdown."""
        with self._lock:
            stop_at = time.monotonic() + timeout
            self.stop_at = stop_at if self.stop_at is None else min(stop_at, self.stop_at)
            thread = self._thread
        self._wake.set()
        if thread is threading.current_thread():
            return  # a listener: the thread ends after this step
        if thread is not None:
            thread.join(min(timeout, threading.TIMEOUT_MAX))
        self.engine.close()  # a step that runs gets EXIT_TIMEOUT
        if thread is not None:
            thread.join(EXIT_TIMEOUT)
            if thread.is_alive():
                self.error = self.error or TimeoutError("a step did not end at shutdown")
        self._end()

    def _start(self) -> None:
        if not self.is_alive:
            raise self.dead_error
        if self._thread is None:
            name = "nanoserve-engine"
            thread = threading.Thread(target=self.run_busy_loop, name=name, daemon=True)
            thread.start()
            self._thread = thread

    # -- the thread --

    def run_busy_loop(self) -> None:
        """Run steps while there is something to compute; wait while there is nothing."""
        try:
            while self._wait_for_work():
                self._run_step()
        except BaseException as error:
            if self.stop_at is None or time.monotonic() < self.stop_at:  # not made by close()
                self.error = self.error or error
                logger.error("the engine is dead: %s", describe_error(error), exc_info=error)
        finally:
            self._end()

    def _wait_for_work(self) -> bool:
        """Wait until a step is to be run. False: the thread is to end."""
        while True:
            while self._utilities:
                self._run_utility(*self._utilities.popleft())
            self._end_lost_requests()
            self.wake_tasks()
            if self.error is not None:
                raise self.error
            has_work = self.engine.has_unfinished_requests()
            if self.stop_at is not None:  # a pause ends here
                return has_work and time.monotonic() < self.stop_at
            if has_work and not self.is_paused:
                return True
            self._wake.wait()
            self._wake.clear()

    def _run_step(self) -> None:
        engine = self.engine
        before = list(engine.output_processor.requests.values())
        try:
            engine.run_step()
        except Exception as error:
            # If its requests have all ended, each with this error, the engine may serve others:
            # also one that came just now.
            if isinstance(error, EngineDeadError) or any(map(engine.has_request, before)):
                raise
        engine.take_outputs()  # of requests that somebody added to the engine itself

    def _run_utility(self, function: Callable[[LLMEngine], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(function(self.engine))
        except BaseException as error:
            future.set_exception(error)

    def _end_lost_requests(self) -> None:
        """Tell the tasks whose requests were aborted; abort those whose event loop is closed."""
        collectors = list(self.collectors)
        closed = {loop for loop in {each.loop for each in collectors} if loop.is_closed()}
        for collector in collectors if closed else ():
            if collector.loop in closed:
                self.drop(collector)
        if len(collectors) != self.engine.get_num_unfinished_requests():
            for collector in collectors:
                if not self.engine.has_request(collector):
                    collector.end_aborted()

    def wake_tasks(self) -> None:
        """Wake the tasks that have something to get: one call for each event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[RequestOutputCollector]] = {}
        while self.changed:
            collector = self.changed.popleft()
            by_loop.setdefault(collector.loop, []).append(collector)
        for loop, collectors in by_loop.items():
            with Caught():  # a loop that is closed: see _end_lost_requests
                loop.call_soon_threadsafe(_wake_all, collectors)

    def _end(self) -> None:
        """No step runs any more: tell everybody who waits."""
        with self._lock:
            self._is_over = True
            collectors, utilities = list(self.collectors), list(self._utilities)
            self._utilities.clear()
        for collector in collectors:
            with Caught():  # the engine may be damaged
                if self.engine.has_request(collector):
                    self.engine.abort_request(collector.request_id)
            if self.error is None:
                collector.end_aborted()
            else:
                collector.put(None, is_over=True, error=self.dead_error)
        for _, future in utilities:
            if future.set_running_or_notify_cancel():
                future.set_exception(self.dead_error)
        self.wake_tasks()
        if self.stop_at is not None:
            self.engine.close()


def _wake_all(collectors: list[RequestOutputCollector]) -> None:
    for collector in collectors:
        collector.wake()


class AsyncLLM(OwnedByProcess):
    """An engine that serves many tasks at once, from any event loop of this process, also from
    several at a time.

    >>> async_llm = AsyncLLM(EngineArgs(model="Qwen/Qwen3-0.6B"))

    Building it takes as long as an LLM, and blocks. The thread that runs the steps starts with the
    first request, and ends with shutdown(), with the AsyncLLM, and with Python. The engine is this
    thread's: look at `engine`, but call nothing on it that runs steps.
    """

    def __init__(
        self,
        config: EngineConfig | EngineArgs | None = None,
        *,
        chat_template: str | Path | None = None,
        disable_log_stats: bool | None = None,
        stat_loggers: Collection[Callable[[LLMEngine], StatLogger]] | None = None,
        **seams: Any,
    ) -> None:
        """config: None is the embedded demo model. chat_template: what LLM's is. seams: those of
        LLMEngine, such as scheduler_cls.

        disable_log_stats=False: count for get_metrics and log a line every ten seconds of work, as
        LLM does; None: what EngineArgs say. stat_loggers: classes, or functions of the engine,
        whose loggers count too: [PrometheusStatLogger]. Raises ValueError or TypeError as LLMEngine
        does.
        """
        if isinstance(config, EngineArgs) and disable_log_stats is None:
            disable_log_stats = vars(config).get("disable_log_stats")
        check_seam_names("AsyncLLM", seams)
        check_stat_loggers(stat_loggers)
        self.chat_template = load_chat_template(chat_template)
        self.engine = LLMEngine(EngineConfig() if config is None else config, **seams)
        if stat_loggers or disable_log_stats is False:
            metrics = import_module("nanoserve.extras.metrics")
            loggers = [make(self.engine) for make in stat_loggers or ()]
            if disable_log_stats is False:
                metrics.collect_metrics(self.engine)
            metrics.collect_metrics(self.engine, *loggers)
        self._core = EngineCoreThread(self.engine)
        # Two pools, because a template may take seconds, and templates wait for each other anyway.
        workers = min(NUM_TOKENIZERS, os.cpu_count() or 1)
        self._tokenizers = ThreadPoolExecutor(workers, "nanoserve-tokenizer")
        self._renderers = ThreadPoolExecutor(1, "nanoserve-renderer")
        pools = (self._tokenizers, self._renderers)
        self._finalizer: Any = weakref.finalize(
            self, in_this_process(_shutdown), self._core, pools, 0.0
        )

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: Any = None,
        stat_loggers: Collection[Callable[[LLMEngine], StatLogger]] | None = None,
        **options: Any,
    ) -> AsyncLLM:
        """The AsyncLLM that `engine_args` describe; `options` are the constructor's others. As in
        vLLM, start_engine_loop changes nothing: the loop starts with the first request. Nothing is
        reported to anybody, whatever usage_context says."""
        return cls(check_engine_args(engine_args), stat_loggers=stat_loggers, **options)

    @classmethod
    def from_vllm_config(cls, vllm_config: EngineConfig, **options: Any) -> AsyncLLM:
        """The AsyncLLM of an EngineConfig; `options` are those of from_engine_args."""
        for name in ("start_engine_loop", "usage_context", "enable_log_requests"):
            options.pop(name, None)
        return cls(vllm_config, **options)

    if not TYPE_CHECKING:  # to a type checker, what is missing stays missing

        def __getattr__(self, name: str) -> Any:
            """Only for what is missing: say why."""
            reason = f": {LEFT_OUT[name]}" if name in LEFT_OUT else "."
            raise AttributeError(f"AsyncLLM has no attribute {name!r}{reason}", name=name, obj=self)

    def __repr__(self) -> str:
        return describe_engine(self.engine, "AsyncLLM")

    # -- requests --

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt; yield an output after each step that brought tokens for it.

        sampling_params.output_kind says what an output holds: all tokens so far (CUMULATIVE), those
        since the last output (DELTA), or nothing before the end (FINAL_ONLY). None: the model's own
        recommendation. request_id: None is a random one. lora_request, priority, cache_salt and
        tokenization_kwargs are those of LLM.generate. trace_headers: of the caller's trace, to
        which a TracingStatLogger adds (extras/metrics/tracing.py).

        Nothing happens before the first output is asked for. Leaving the loop, or cancelling the
        task, aborts the request. Raises ValueError or TypeError if the request can never be served,
        QueueOverflowError if max_num_waiting requests wait, EngineDeadError if the engine is dead
        or shut down. An error of this request alone is an output with finish_reason "error".
        """
        collector = await self.add_request(
            uuid.uuid4().hex if request_id is None else request_id,
            prompt,
            sampling_params,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            cache_salt=cache_salt,
        )
        try:
            while (output := await collector.get()) is not None:
                yield output
        finally:
            self._core.drop(collector)

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        *,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput, None]:
        """The vector of one prompt, by an engine with runner="pooling": yields one output. The
        arguments, and what is raised, are those of generate."""
        pooling = load_chapter("AsyncLLM.encode", "pooling.params")
        pooling.check_pools("AsyncLLM.encode", self.config)
        params: Any = pooling.PoolingParams() if pooling_params is None else pooling_params
        outputs: Any = self.generate(
            prompt,
            params,
            request_id,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            trace_headers=trace_headers,
            priority=priority,
            cache_salt=cache_salt,
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | PoolingParams | None = None,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        *,
        cache_salt: str | None = None,
    ) -> RequestOutputCollector:
        """Queue a request; `get` of what is returned waits for its outputs. What generate does
        first, and for those only who see to it that abort() is called when nobody waits. Raises
        what generate raises."""
        arrival_time = as_arrival_time(arrival_time) or time.time()
        trace_headers = as_trace_headers(trace_headers)
        self.check_admission()  # here too: a server that is busy tokenizes nothing in vain
        make = partial(self._make_request, request_id, prompt, params, tokenization_kwargs)
        request = await self._run_in(self._tokenizers, make, priority, cache_salt, lora_request)
        request.root.metrics.arrival_time = arrival_time
        return await self._add(request, trace_headers)

    def _make_request(
        self,
        request_id: str,
        prompt: Any,
        params: Any,
        tokenization_kwargs: dict[str, Any] | None,
        priority: int,
        cache_salt: str | None,
        lora_request: LoRARequest | None,
    ) -> RequestState:
        engine = self.engine
        [prompt] = tokenize_prompts(engine.input_processor, [prompt], tokenization_kwargs)
        params = engine.get_default_sampling_params() if params is None else params
        return engine.make_request(request_id, prompt, params, priority, cache_salt, lora_request)

    async def _add(
        self, request: RequestConsumer, trace_headers: Mapping[str, str] | None = None
    ) -> RequestOutputCollector:
        old = self.engine.output_processor.requests.get(request.request_id)
        if isinstance(old, RequestOutputCollector) and old.is_closed:  # ends with this step
            await self.call_utility(
                lambda engine: engine.has_request(old) and engine.abort_request(old.request_id)
            )
        self._check_alive()
        collector = RequestOutputCollector(request, self._core, trace_headers)
        self._core.add(collector)
        return collector

    async def beam_search(
        self,
        prompt: PromptType,
        params: BeamSearchParams,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """The likeliest continuations of one prompt, as LLM.beam_search finds them. Cancelling the
        task aborts the search. Raises what generate raises, and RuntimeError if the search fails or
        is aborted."""
        from nanoserve.extras.beam_search import BeamSearch

        request_id = uuid.uuid4().hex if request_id is None else request_id
        self.check_admission()
        make = partial(BeamSearch, request_id, prompt, params, self.engine, lora_request)
        search: BeamSearch = await self._run_in(self._tokenizers, make)
        collector = await self._add(search)
        try:
            await collector.get()
        finally:
            self._core.drop(collector)
        try:  # not _run_in: shutdown() lets a search end, too
            loop = asyncio.get_running_loop()
            pending = loop.run_in_executor(self._tokenizers, search.get_output)
        except RuntimeError:  # the pool ended meanwhile
            return search.get_output()
        return await pending

    # -- adapters --

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Check an adapter, before a request wants it. False if it is known already. Raises
        ValueError or TypeError if it cannot be used."""
        return await self._run_in(self._tokenizers, self._lora_manager().add_lora, lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that have it go on. False if there is none of this number."""
        return self._lora_manager().remove_lora(lora_id)

    async def list_loras(self) -> set[int]:
        """The numbers (lora_int_id) of all known adapters."""
        return self._lora_manager().list_loras()

    def _lora_manager(self) -> LoRAManager:
        if self.engine.lora_manager is None:
            raise VLLMValidationError(
                "this engine takes no adapters. Build it with enable_lora=True."
            )
        return self.engine.lora_manager

    async def abort(self, request_id: str | Collection[str]) -> None:
        """End a request, or several. Who waits for one gets an output with finish_reason "abort".
        Ids of no unfinished request are ignored."""
        self.check_owner()
        self._core.abort(request_id)

    # -- text --

    async def render_chat(
        self,
        messages: list[Message],
        *,
        chat_template: str | Path | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt of one conversation, as LLM.chat makes it. It has its special tokens already:
        give generate tokenization_kwargs={"add_special_tokens": False} with it."""
        render = partial(
            render_conversations,
            self.engine.input_processor,
            [messages],
            self.chat_template,
            chat_template_content_format,
            chat_template_kwargs,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
        )
        [text] = await self._run_in(self._renderers, render)
        return text

    async def tokenize(self, prompt: PromptType, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt. Raises ValueError or TypeError as generate does."""
        tokenize = self.engine.input_processor.tokenize
        return await self._run_in(self._tokenizers, tokenize, prompt, add_special_tokens)

    async def detokenize(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids. Raises ValueError for ids that the model does not have."""
        input_processor = self.engine.input_processor
        tokenizer = input_processor.require_tokenizer("detokenize")

        def decode() -> str:
            input_processor.check_vocabulary(token_ids)
            with as_validation_error("the tokenizer cannot decode", token_ids):
                return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return await self._run_in(self._tokenizers, decode)

    async def run_in_thread(self, function: Callable[..., Result], *args: Any) -> Result:
        """function(*args), in one of the threads that tokenize: for what would hold up the event
        loop, such as reading a megabyte of JSON."""
        return await self._run_in(self._tokenizers, function, *args)

    async def _run_in(
        self, pool: ThreadPoolExecutor, function: Callable[..., Result], *args: Any
    ) -> Result:
        self._check_alive()
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, function, *args)
        except RuntimeError as error:
            if self._core.is_alive:
                raise
            raise self.dead_error from error

    # -- the engine --

    async def call_utility(self, function: Callable[[LLMEngine], Result]) -> Result:
        """function(engine), called in the engine's thread between two steps, when nothing changes.
        Raises EngineDeadError."""
        self.check_owner()
        return await asyncio.wrap_future(self._core.call_utility(function))

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache. False, and no change, while requests are running; with
        reset_running_requests they are preempted, and their tokens computed again. With
        reset_connector the CPU tier of extras/kv_offload is emptied, too."""

        def reset(engine: LLMEngine) -> bool:
            if reset_running_requests:
                engine.recover()  # every sequence waits, and no block is held
            return engine.reset_prefix_cache(reset_connector)

        return await self.call_utility(reset)

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Begin no step before resume_generation(); new requests wait. mode "abort": unfinished
        requests get their last output; "keep": they go on later. clear_cache: empty the prefix
        cache, too; the tokens of requests that are kept are computed again. shutdown() ends a
        pause."""
        if mode not in ("abort", "keep"):
            raise VLLMValidationError(
                f"mode is {brief(mode)}; allowed: 'abort', 'keep'. In place of vLLM's 'wait', "
                "await wait_for_requests_to_drain() before.",
                parameter="mode",
                value=mode,
            )

        def pause(engine: LLMEngine) -> None:
            self._core.is_paused = True
            if mode == "abort":
                engine.abort_request(list(engine.output_processor.requests))
            if clear_cache:
                engine.recover()  # every sequence waits, and no block is held
                engine.reset_prefix_cache()

        await self.call_utility(pause)

    async def resume_generation(self) -> None:
        """End a pause."""

        def resume(engine: LLMEngine) -> None:
            self._core.is_paused = False

        await self.call_utility(resume)

    async def is_paused(self) -> bool:
        """Has pause_generation() been called, and resume_generation() not?"""
        return self._core.is_paused

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Return when no request is unfinished. Raises TimeoutError after so many seconds."""
        deadline = time.monotonic() + drain_timeout
        while self.get_num_unfinished_requests():
            if time.monotonic() > deadline:
                number = self.get_num_unfinished_requests()
                raise TimeoutError(f"after {drain_timeout} seconds {number} requests are left.")
            await asyncio.sleep(DRAIN_PAUSE)

    async def do_log_stats(self) -> None:
        """Let the stat loggers log a line now, if there are any."""
        for manager in self._stat_logger_managers():
            manager.log()

    async def is_tracing_enabled(self) -> bool:
        """Does a TracingStatLogger listen?"""
        loggers = [one for each in self._stat_logger_managers() for one in each.stat_loggers]
        return any(hasattr(stat_logger, "tracer") for stat_logger in loggers)

    def _stat_logger_managers(self) -> list[Any]:
        """Of extras/metrics, if its metrics are collected."""
        return [each for each in self.step_listeners[:] if hasattr(each, "stat_loggers")]

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        return ("embed",) if self.config.runner == "pooling" else ("generate",)

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Raise what would be raised for the next request, before it is looked at:
        QueueOverflowError if max_num_waiting requests wait, EngineDeadError. (A request with n
        completions waits as one.)"""
        self._check_alive()
        self.engine.check_admission()

    async def check_health(self) -> None:
        """Raise EngineDeadError if no request would be served: a step failed and no request was the
        cause, the process of a rank has ended, or it was shut down. (shutdown() frees the memory
        of a dead engine.)"""
        self.check_owner()
        self._core.check_health()

    def shutdown(self, timeout: float | None = None) -> None:
        """Take no more requests, let the unfinished ones run for up to `timeout` seconds (None: 0),
        abort the rest, and free all memory. Any thread may call this, also again: a shorter timeout
        counts.

        Returns when all is over: after `timeout`, and at most twice EXIT_TIMEOUT more if a step
        hangs. In a coroutine use `await asyncio.to_thread(async_llm.shutdown, timeout)`, so that
        the tasks get their last outputs meanwhile.
        """
        seconds = as_timeout(timeout)
        if self.is_owner:
            _shutdown(self._core, (self._tokenizers, self._renderers), seconds)

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _check_alive(self) -> None:
        self.check_owner()
        if not self._core.is_alive:
            raise self.dead_error

    @property
    def is_running(self) -> bool:
        """Are requests taken?"""
        return self._core.is_alive

    @property
    def is_stopped(self) -> bool:
        return not self._core.is_alive

    @property
    def errored(self) -> bool:
        """Is the engine dead, or shut down?"""
        return not self._core.is_alive

    @property
    def dead_error(self) -> EngineDeadError:
        """What callers get if `errored`."""
        return self._core.dead_error

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    @property
    def vllm_config(self) -> EngineConfig:
        """The same, under vLLM's name."""
        return self.engine.config

    async def get_vllm_config(self) -> EngineConfig:
        """V0's way to ask."""
        return self.engine.config

    async def get_model_config(self) -> ModelConfig:
        """V0's way to ask."""
        return self.engine.model_config

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model_config

    @property
    def tokenizer(self) -> Any | None:
        """The transformers tokenizer; None if the checkpoint has none."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises ValueError if the checkpoint has none."""
        return self.engine.input_processor.require_tokenizer("get_tokenizer")

    @property
    def step_listeners(self) -> list[Callable[[StepReport], None]]:
        """The engine's. They are called in its thread."""
        return self.engine.step_listeners

    def get_num_unfinished_requests(self) -> int:
        """Requests that have neither finished nor been aborted."""
        return self.engine.get_num_unfinished_requests()


AsyncLLMEngine = AsyncLLM


def _shutdown(core: EngineCoreThread, pools: Iterable[ThreadPoolExecutor], timeout: float) -> None:
    """Not a method: it is called when the AsyncLLM is garbage, too."""
    try:
        core.shutdown(timeout)
    finally:
        for pool in pools:
            pool.shutdown(wait=False)


def check_stat_loggers(stat_loggers: Any) -> None:
    """Raise TypeError for anything but functions that make stat loggers."""
    given = [] if stat_loggers is None else stat_loggers
    if not isinstance(given, (list, tuple)) or not all(map(callable, given)):
        raise TypeError(
            f"stat_loggers must be a list of classes or functions, got {brief(stat_loggers)}. Each "
            "is called with the engine and returns a StatLogger: [PrometheusStatLogger]."
        )


def as_timeout(timeout: Any) -> float:
    """Seconds; None: 0. Raises TypeError or ValueError."""
    if timeout is None:
        return 0.0
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout must be None or a number of seconds, got {brief(timeout)}.")
    if not 0 <= timeout <= INT64_LIMIT and timeout != math.inf:
        raise VLLMValidationError(
            f"timeout is {brief(timeout)}; allowed: None, or seconds from 0 to 2**63 - 1.",
            parameter="timeout",
            value=timeout,
        )
    return timeout
