"""What is one step of the engine?

LLMEngine is the loop that all of vLLM stands on: add requests, then call step() until nothing is
unfinished. A step is three lines (and a fourth for text):

    scheduler_output = self.scheduler.schedule()                       # who runs, how many tokens
    model_output     = self.executor.execute_model(scheduler_output)   # tensors, the GPU's part
    updates          = self.scheduler.update_from_output(scheduler_output, model_output)
    outputs          = self.output_processor.process_outputs(updates)  # text, stop strings

With async_scheduling=True the CPU schedules and launches a step while the GPU is still computing
the one before (V1's AsyncScheduler and step_with_batch_queue):

    plain        schedule 1 | GPU 1 | update 1, schedule 2 | GPU 2 | update 2, schedule 3 | ...
    overlapped   schedule 1 | GPU 1                  | GPU 2                | GPU 3 ...
                              schedule 2 | update 1    schedule 3 | update 2

The tokens are the same. The tokens of a step are known one call of step() later. With pipeline
stages, as many steps are in flight as stages (distributed/pipeline.py).

*Threads.* One thread calls step(). Other threads may add and abort requests at any time: prompts
are tokenized and checked in the caller's thread, and what changes the scheduler waits in an inbox
until the next step begins. Any thread may call close(). A forked child cannot use the engine (see
distributed/process.py).

*Errors.* What one request breaks ends that request: its output has finish_reason "error". If a
step fails and nothing says whose fault it is, all requests are computed again, and the next steps
find the guilty one (fault_isolation.py). step() raises only what is nobody's fault: a request of
the engine's own fails too, or all requests do, or code is missing (NotImplementedError).

This is the one module that knows both planes. It imports the data plane (and so torch) only when
an engine is built. llm.py puts a convenient interface in front of it.

Left out: the thread that calls step() for many callers at once (extras/async_llm.py).

vLLM: vllm/engine/llm_engine.py (V0); vllm/v1/engine/llm_engine.py, core.py (V1).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from nanoserve.arg_utils import EngineArgs, as_engine_config, as_seam, build_seam, check_seams
from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig, ModelConfig, find_pooling, load_chapter, resolve_folder
from nanoserve.distributed.process import EXIT_TIMEOUT, OwnedByProcess
from nanoserve.exceptions import Caught, QueueOverflowError, as_validation_error, brief
from nanoserve.fault_isolation import FaultSearch, IdleWatch
from nanoserve.input_processor import InputProcessor, load_tokenizer
from nanoserve.inputs import PromptType, as_arrival_time, as_request_ids, attach, refuse_missing
from nanoserve.interrupts import delayed_interrupt, is_from_signal
from nanoserve.kernels.threads import load_torch
from nanoserve.logger import configure_logging, describe_engine, init_logger, log_startup
from nanoserve.output_processor import OutputProcessor, RequestConsumer, RequestOutput, RequestState
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import (
    ModelOutput,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)

logger = init_logger(__name__)


class StepReport(NamedTuple):
    """What a step did, for listeners. Times are in seconds.

    No report tells of an abort, of a step that failed, or of a request of the engine's own.
    """

    scheduler_output: SchedulerOutput
    updates: list[SequenceUpdate]  # new tokens, also of requests that hand out no output yet
    sequences: dict[int, Sequence]  # seq_id -> sequence, of all scheduled ones that still existed
    schedule_time: float
    execute_time: float  # from the launch until the tokens were known
    update_time: float  # update_from_output and process_outputs


class LaunchedStep(NamedTuple):
    """A step between its launch and its result."""

    scheduler_output: SchedulerOutput
    schedule_time: float
    launched_at: float
    pending: Any = None  # of an overlapped step: result() waits for the ModelOutput


class LLMEngine(OwnedByProcess):
    """Requests in, one step at a time, outputs out. In a forked child every call raises
    RuntimeError.

    Invariant: whatever a call raises, no block is lost and the engine can run the next step.
    """

    def __init__(
        self,
        config: EngineConfig | EngineArgs,
        *,
        scheduler_cls: type[Scheduler] | None = None,
        block_manager_cls: type[BlockManager] | None = None,
        executor_cls: Callable[..., Any] | None = None,
        runner_cls: Any = None,
    ) -> None:
        """Read the checkpoint and build every part. Raises ValueError for what does not fit.

        The keyword arguments are the seams: a class of your own takes the place of ours.
        """
        check_seams(scheduler_cls, block_manager_cls, executor_cls, runner_cls)
        config = as_engine_config(config)
        configure_logging()
        folder = resolve_folder(config.model)
        self.model_config = ModelConfig.from_folder(folder)
        self.get_default_sampling_params()  # raises ValueError for bad ones
        load_torch()
        from nanoserve.device import with_device
        from nanoserve.executor import check_can_overlap, get_executor_cls  # these load torch

        pooling = find_pooling(config, self.model_config)
        if pooling is not None:
            config, self.model_config = pooling.configure(config, self.model_config)
            scheduler_cls = scheduler_cls or pooling.PoolingScheduler
            runner_cls = runner_cls or pooling.PoolingModelRunner
        self.config = with_device(config).resolve(self.model_config)
        self.lora_manager: Any = None  # adapters
        if config.enable_lora:
            self.lora_manager = load_chapter("enable_lora", "lora.manager").LoRAManager(self)
        tokenizer_folder = resolve_folder(config.tokenizer, "tokenizer", default=folder)
        self.tokenizer = load_tokenizer(tokenizer_folder, explicit=config.tokenizer is not None)
        make_executor = executor_cls or get_executor_cls(config)
        options = {} if runner_cls is None else {"runner_cls": as_seam("runner_cls", runner_cls)}
        model_args = self.config, self.model_config, config.attention_backend
        self.executor = build_seam("executor_cls", make_executor, *model_args, **options)
        check_can_overlap(self.executor, self.config)
        executor, caches_prefixes = self.executor, config.enable_prefix_caching
        sizes = executor.num_kv_blocks, config.block_size, caches_prefixes, executor.num_cpu_blocks
        manager_cls = block_manager_cls or BlockManager
        self.block_manager: BlockManager = build_seam("block_manager_cls", manager_cls, *sizes)
        args, cls = (self.config, self.block_manager), scheduler_cls or Scheduler
        self.scheduler: Scheduler = build_seam("scheduler_cls", cls, *args)
        self.kv_connector: Any = None  # keeps what the prefix cache evicts
        if self.config.has_kv_connector:
            load_chapter("kv_offloading_size", "kv_offload.connector").connect(self)
        self.input_processor = InputProcessor(
            self.config, self.model_config, self.tokenizer, self.executor.num_kv_blocks
        )
        self.output_processor = OutputProcessor(self.tokenizer, self.scheduler.finish)
        if pooling is not None:
            pooling.install(self)
        self.structured_output_manager: Any = None  # made for the first request that needs it
        self.step_listeners: list[Callable[[StepReport], None]] = []
        self._outputs: list[RequestOutput] = []  # not handed out yet
        self.claims: list[set[str]] = []  # request ids whose outputs step() leaves to a loop
        self._inbox: deque[Callable[[], object]] = deque()  # what other threads asked for
        self._in_flight: deque[LaunchedStep] = deque()
        self.batch_queue_size = self.config.max_concurrent_batches
        self._admission = threading.RLock()  # one thread at a time passes max_num_waiting
        self._current: LaunchedStep | None = None  # is executed or read; None while one is decided
        self._search, self._idle_watch = FaultSearch(self), IdleWatch(self)
        self._lock = threading.RLock()
        self._is_stepping = False
        self._is_changing = False  # the scheduler's lists: what aborts has to wait
        self._is_unclean = False  # a step began and did not end
        self._is_executing = False  # the executor runs: it may call code of the users
        self._is_closed = False
        self.num_rejected = 0  # requests that check_admission refused
        log_startup(self)

    def __repr__(self) -> str:
        return describe_engine(self)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, **seams: Any) -> LLMEngine:
        """The engine that `engine_args` describe; `seams` are the constructor's, such as
        scheduler_cls. Raises ValueError or TypeError as the constructor does."""
        return cls(engine_args, **seams)

    # -- requests --

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | None = None,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: None = None,
        trace_headers: None = None,
        priority: int = 0,
        *,
        cache_salt: str | None = None,
    ) -> str:
        """Queue a request and return its id. Raises ValueError or TypeError if it can never be
        served, QueueOverflowError if max_num_waiting requests wait. The arguments are vLLM's, in
        vLLM's order; cache_salt is for prompts that do not have a salt of their own; lora_request
        is a LoRARequest. tokenization_kwargs and trace_headers: None."""
        self.check_admission()  # here too: a server that is busy should not tokenize in vain
        missing = {"trace_headers": trace_headers, "tokenization_kwargs": tokenization_kwargs}
        refuse_missing("add_request", **missing)
        params = self.get_default_sampling_params() if params is None else params
        request = self.make_request(request_id, prompt, params, priority, cache_salt, lora_request)
        metrics = request.root.metrics
        metrics.arrival_time = as_arrival_time(arrival_time) or metrics.arrival_time
        with self._admission:
            self.check_admission()
            self.add(request)
        return request_id

    def make_request(
        self,
        request_id: str,
        prompt: PromptType,
        sampling_params: SamplingParams,
        priority: int = 0,
        cache_salt: str | None = None,
        lora_request: Any = None,
    ) -> RequestState:
        """Tokenize and check a request without queueing it. Raises as add_request does."""
        self._check_open()
        process, make_state = self.input_processor.process, self.output_processor.make_state
        root = process(request_id, prompt, sampling_params, priority, cache_salt)
        if root.sampling_params.structured_outputs is not None:
            chapter = load_chapter("structured_outputs", "structured_output.manager")
            chapter.get_manager(self).grammar_init(root)
        attach(self, root, lora_request)
        with as_validation_error("the tokenizer cannot decode", root.prompt_token_ids):
            return make_state(root)

    def add(self, request: RequestConsumer) -> None:
        """Queue a checked request. Raises ValueError if its request id is in use, or if outputs of
        an earlier request of this id wait to be handed out.

        Any thread may call this. If a step is running, the request is queued when the next begins.
        """
        self._check_open()
        if self.is_in_use(request.request_id):
            raise ValueError(f"request id {request.request_id!r} is in use; choose another.")
        with delayed_interrupt():
            self.output_processor.add(request)
            for gate in {gate for seq in request.sequences for gate in seq.gates}:  # forks share it
                gate.start(partial(self.fail_request, request))
            self._inbox.append(partial(self._queue, request))
            self._drain_inbox()
        self._check_open()  # close() has ended what was queued before, and nothing after

    def check_admission(self) -> None:
        """Raise QueueOverflowError if max_num_waiting requests wait."""
        most = self.config.max_num_waiting
        if most is not None:
            running = {seq.request_id for seq in list(self.scheduler.running)}
            if self.get_num_unfinished_requests() - len(running) >= most:
                self.num_rejected += 1
                raise QueueOverflowError(most)

    def _queue(self, request: RequestConsumer) -> None:
        """Give a request's sequences to the scheduler, unless it was aborted meanwhile."""
        for sequence in request.sequences if self.has_request(request) else ():
            self.scheduler.add(sequence)

    def abort_request(self, request_ids: str | Collection[str], index: int | None = None) -> bool:
        """End a request, or each of several, at whatever stage, and free its blocks. False if there
        is none of this id (of these ids). Raises TypeError for what are no ids.

        With `index`, end only this one of its n completions: its output so far stays, with
        finish_reason "abort". (Ending completion 0 before the others have forked off it ends the
        request.)

        Any thread may call this. If a step is running, the request ends when the next begins.
        """
        if not isinstance(request_ids, str):
            return sum(self.abort_request(each, index) for each in as_request_ids(request_ids)) > 0
        self.check_owner()
        request = self.output_processor.requests.get(request_ids)
        if request is None or (index is not None and _unfinished(request, index) is None):
            return False
        with delayed_interrupt():
            self._inbox.append(partial(self._abort, request, index))
            self._drain_inbox()
        return True

    def _abort(self, request: RequestConsumer, index: int | None) -> None:
        """Abort a request or one completion, unless it has ended by now."""
        if not self.has_request(request):
            return
        seq = None if index is None else _unfinished(request, index)
        if index is None or (seq is not None and seq.num_pending_forks):
            self.output_processor.end_request(request.request_id, SequenceStatus.FINISHED_ABORTED)
            self.take_outputs([request.request_id])  # an aborted request hands out nothing more
        elif seq is not None:
            self.scheduler.finish(seq.seq_id, SequenceStatus.FINISHED_ABORTED)
            outputs = self.output_processor.process_outputs([SequenceUpdate(seq, (), ())])
            self._outputs += outputs

    def fail_request(self, request: RequestConsumer, error: BaseException) -> None:
        """End a request with finish_reason "error" when the next step begins, unless it has ended
        by then. Any thread may call this."""

        def fail() -> None:
            if self.has_request(request):
                fail_request = self.output_processor.fail_request
                self.hand_out(fail_request(request.request_id, error, request.sequences))

        self._inbox.append(fail)

    def get_num_unfinished_requests(self) -> int:
        """Requests that have neither finished nor been aborted."""
        return len(self.output_processor.requests)

    def is_unfinished(self, request_id: str) -> bool:
        """True for a request that was added and has neither finished nor been aborted."""
        return request_id in self.output_processor.requests

    def is_in_use(self, request_id: str) -> bool:
        """True for an unfinished request, and while outputs of an earlier one wait for step()."""
        has_output = any(output.request_id == request_id for output in self._outputs[:])
        return has_output or self.is_unfinished(request_id)

    def has_request(self, request: RequestConsumer) -> bool:
        """True while this very request is unfinished. A later request of its id is another one."""
        return self.output_processor.requests.get(request.request_id) is request

    def hand_out(self, output: RequestOutput | None) -> None:
        """Let `output` wait to be taken."""
        self._outputs += [] if output is None else [output]

    def has_unfinished_requests(self) -> bool:
        """True while step() has something to compute or to hand out."""
        return bool(self._outputs or self._in_flight or self.output_processor.requests)

    # -- the step --

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs that the requests want to hand out now.

        Raises what makes steps fail and is no request's fault, such as RankError. Then the step's
        tokens are computed again, and outputs that were ready come with the next call. (Requests
        that have all failed one by one are not computed again: these outputs say so.)
        """
        self.run_step()
        return self.take_outputs()

    def take_outputs(self, request_ids: Collection[str] | None = None) -> list[RequestOutput]:
        """The outputs that wait to be handed out: those of some requests, or all that no
        loop has claimed."""
        taken: list[RequestOutput] = []
        try:
            with self._lock:
                ids = request_ids
                if ids is None:
                    ids = {each.request_id for each in self._outputs}.difference(*self.claims)
                wanted = [each for each in self._outputs if each.request_id in ids]
                others = [each for each in self._outputs if each.request_id not in ids]
                taken, self._outputs = wanted, others
            return taken
        except BaseException:  # Ctrl-C: the outputs wait for the next call
            self._outputs = taken + self._outputs
            raise

    def run_step(self) -> None:
        """Run one step; its outputs wait for take_outputs."""
        self._call_alone(self._run_step)

    def _run_step(self) -> None:
        self._check_open()
        if self._is_unclean:  # a second Ctrl-C came before recover
            self.recover()
        self._is_unclean, self._is_executing, self._current = True, False, None
        try:
            with delayed_interrupt():
                self._drain_inbox()
            self._search.choose_group()
            if self.batch_queue_size > 1 and not self._search.is_on:
                self._step_with_batch_queue()
            else:
                self._run_plain_step()
        except BaseException as error:
            if not isinstance(error, Exception) or is_from_signal(error):
                self.recover()
                raise
            self._search.isolate(error, self._current, self._in_flight)
        self._is_unclean = False

    def _run_plain_step(self) -> None:
        """Schedule, execute, update."""
        step = self._schedule()
        if step is not None:
            self._update(step, self.executor.execute_model(step.scheduler_output))
        else:
            self._search.skip_group()

    def _step_with_batch_queue(self) -> None:
        """Schedule and launch the next step, then read the oldest one in flight if there are as
        many as may be, or if nothing could be scheduled.

        All steps are read if the scheduler needs the tokens of the new one, or if no request is
        left.
        """
        step = self._schedule()
        if step is not None:
            pending = self.executor.launch(step.scheduler_output)
            self._in_flight.append(step._replace(pending=pending))
        num_left = max(0, len(self._in_flight) - 1)
        if step is not None:
            num_left = 0 if step.scheduler_output.needs_sync else self.batch_queue_size - 1
        while len(self._in_flight) > (num_left if self.scheduler.has_unfinished() else 0):
            oldest = self._current = self._in_flight.popleft()
            self._update(oldest, oldest.pending.result())

    def _schedule(self) -> LaunchedStep | None:
        """The next step, about to be launched. None if no sequence can be scheduled."""
        start = perf_counter()
        with self.changing():
            scheduler_output = (self.lora_manager or self.scheduler).schedule()
        end = perf_counter()
        self._idle_watch.note(scheduler_output.is_empty)
        if not scheduler_output.is_empty:
            self._current = LaunchedStep(scheduler_output, end - start, end)
            self._is_executing = True
        return self._current

    def _update(self, step: LaunchedStep, model_output: ModelOutput) -> None:
        """The tokens of a step are known: append them, make text of them, tell the listeners."""
        executed_at, self._is_executing = perf_counter(), False
        scheduler_output, sequences = step.scheduler_output, self.scheduler.sequences
        seq_ids = [item.seq_id for item in scheduler_output.scheduled]
        known = {seq_id: sequences[seq_id] for seq_id in seq_ids if seq_id in sequences}
        with delayed_interrupt():
            with self.changing(), self._search.undone_if_failed(list(known.values())):
                updates = self.scheduler.update_from_output(scheduler_output, model_output)
            outputs = self.output_processor.process_outputs(updates)
            self._outputs += outputs
            self.output_processor.raise_error()
        times = step.schedule_time, executed_at - step.launched_at, perf_counter() - executed_at
        report = StepReport(scheduler_output, updates, known, *times)
        for listener in self.step_listeners[:]:
            with Caught() as caught:
                listener(report)
            if caught.error is not None:
                logger.error("a listener failed: %s", brief(listener), exc_info=caught.error)

    def recover(self) -> None:
        """A step did not end: its tokens are computed again."""
        with self.changing():
            self._in_flight.clear()
            self._search.end_lost_requests()
            self.scheduler.preempt_all()
            self._search.end_probe()
            self._is_unclean = False

    # -- threads --

    def _call_alone(self, action: Callable[[], Any]) -> Any:
        """action(), with the lock held. Raises RuntimeError if another thread is inside a step.

        (No context manager: of two quick Ctrl-C Python would drop one while it closes a generator.)
        """
        was_stepping: bool | None = None
        try:
            with delayed_interrupt():
                self._acquire_lock()
                was_stepping, self._is_stepping = self._is_stepping, True
            return action()
        finally:
            if was_stepping is not None:
                self._is_stepping = was_stepping
                self._lock.release()

    def _acquire_lock(self) -> None:
        self.check_owner()
        if self._lock.acquire(blocking=False):
            if not (self._is_stepping and self._is_executing):
                return
            self._lock.release()
            raise RuntimeError("a step is running: what it calls cannot run another one.")
        if self._is_stepping:
            raise RuntimeError(
                "another thread is running a step of this engine. Call step(), generate() and "
                "the like from one thread, or give each thread an engine of its own; other "
                "threads may add and abort requests."
            )
        self._lock.acquire()  # another thread is adding a request: that takes microseconds

    def _drain_inbox(self) -> None:
        """Queue and abort what waits in the inbox. While another thread is inside a step, or the
        scheduler's lists are being changed, the inbox waits for the next step."""
        if not self._is_changing and self._lock.acquire(blocking=False):
            try:
                with self.changing():
                    while self._inbox:
                        self._inbox.popleft()()
            finally:
                self._lock.release()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around what changes the scheduler's lists: Ctrl-C and aborts (by a signal handler, or by
        a generator that is collected) wait until the change is complete."""
        with delayed_interrupt():
            was_changing, self._is_changing = self._is_changing, True
            try:
                yield
            finally:
                self._is_changing = was_changing

    # -- the rest --

    def reset_prefix_cache(self, reset_connector: bool = False) -> bool:
        """Empty the prefix cache; with reset_connector the CPU tier of extras/kv_offload, too.
        False, and no change, while requests are running. Raises RuntimeError if another thread is
        inside a step, or if the engine is closed."""
        self._check_open()
        reset = self.block_manager.reset_prefix_cache
        if reset_connector and self.kv_connector is not None:
            reset = self.kv_connector.reset_cache
        return self._call_alone(reset)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the checkpoint's generation_config.json recommends."""
        return SamplingParams.from_generation_config(self.model_config.generation_defaults)

    def close(self) -> None:
        """Abort all requests and free the memory of the model and the KV cache.

        Any thread may call this. No further step begins; a step that another thread runs gets
        EXIT_TIMEOUT to end. After that its caller gets an error (several ranks), or the memory is
        freed when the step ends (one process). Does nothing in a forked child.
        """
        if self._is_closed or not self.is_owner:
            return
        self._is_closed, has_lock = True, False
        try:
            if has_lock := self._lock.acquire(timeout=EXIT_TIMEOUT):
                for request_id in list(self.output_processor.requests):
                    self.abort_request(request_id)
                self._outputs.clear()
                self._in_flight.clear()
        finally:  # of a Ctrl-C, too
            self.executor.close()
            guard = getattr(self.tokenizer, "guard", None)
            for part in (guard, self.structured_output_manager, self.kv_connector):
                if part is not None:
                    part.close()
            if has_lock:
                self._lock.release()

    def _check_open(self) -> None:
        self.check_owner()
        if self._is_closed:
            raise RuntimeError("this engine is closed; build a new LLM.")


def _unfinished(request: RequestConsumer, branch: int) -> Sequence | None:
    """The sequence of this completion, if it exists and has not finished."""
    for seq in request.sequences:
        if seq.branch == branch and seq.status.finish_reason is None:
            return seq
    return None
