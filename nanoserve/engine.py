"""Who turns the crank?

LLMEngine is the loop, in the open: add requests, call step() until nothing is unfinished. A step is
the three lines that all of vLLM stands on (and a fourth, for text):

    scheduler_output = self.scheduler.schedule()                       # who runs, how many tokens
    model_output     = self.executor.execute_model(scheduler_output)   # tensors, the GPU's part
    updates          = self.scheduler.update_from_output(scheduler_output, model_output)
    outputs          = self.process_updates(updates)                   # text, stop strings

With async_scheduling=True the CPU decides and launches a step while the GPU is still at the one
before (V1's AsyncScheduler and step_with_batch_queue):

    plainly      schedule 1 | GPU 1 | update 1, schedule 2 | GPU 2 | update 2, schedule 3 | ...
    overlapped   schedule 1 | GPU 1                  | GPU 2                | GPU 3 ...
                              schedule 2 | update 1    schedule 3 | update 2

The tokens are the same; what a step brings is known one call of step() later.

This is the one module that knows both planes. It imports the data plane (and so torch) only when
an engine is built. llm.py puts a convenient face in front of it.

Left out: the asynchronous engine and the HTTP server (nanoserve/extras).

vLLM: vllm/engine/llm_engine.py (V0); vllm/v1/engine/llm_engine.py, core.py (V1).
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig, ModelConfig, resolve_folder
from nanoserve.extras.beam_search import BeamSearch, BeamSearchParams
from nanoserve.input_processor import InputProcessor, Prompt, load_tokenizer
from nanoserve.output_processor import OutputProcessor, RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import (
    ModelOutput,
    RequestError,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)

logger = logging.getLogger("nanoserve")
FinishedStep = tuple[SchedulerOutput, list[RequestOutput]]  # what was decided, what came of it
StepListener = Callable[[SchedulerOutput, list[RequestOutput]], None]


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
    ) -> None:
        """Read the checkpoint and build every part. Raises ValueError for what does not fit.

        The keyword arguments are the seams: a class of your own takes the place of ours.
        """
        folder = resolve_folder(config.model)
        self.model_config = ModelConfig.from_folder(folder)
        self.config = _with_device(config).resolve(self.model_config)
        tokenizer_folder = folder if config.tokenizer is None else resolve_folder(config.tokenizer)
        self.tokenizer = load_tokenizer(tokenizer_folder, explicit=config.tokenizer is not None)
        make_executor = executor_cls or _default_executor(config.tensor_parallel_size)
        self.executor = make_executor(self.config, self.model_config, config.attention_backend)
        self._check_can_overlap()
        num_kv_blocks = self.executor.num_kv_blocks
        self.block_manager = block_manager_cls(
            num_kv_blocks,
            config.block_size,
            config.enable_prefix_caching,
            self.executor.num_cpu_blocks,
        )
        self.scheduler = scheduler_cls(self.config, self.block_manager)
        self.input_processor = InputProcessor(
            self.config, self.model_config, self.tokenizer, num_kv_blocks
        )
        self.output_processor = OutputProcessor(self.tokenizer)
        self.on_step: list[StepListener] = []  # called with each step's decision and outputs
        self._searches: dict[str, BeamSearch] = {}  # request id -> search, of unfinished ones
        self._undelivered: list[RequestOutput] = []
        self._to_abort: deque[str] = deque()  # request ids, from abort_request_threadsafe
        self._lock = threading.RLock()
        self._in_flight: deque[tuple[SchedulerOutput, Any]] = deque()  # launched, not yet read
        self._untold: deque[FinishedStep] = deque()  # finished, and the listeners do not know yet
        self._failures: list[Exception] = []  # of single requests, to be raised when all is told
        self._is_committed = True  # the tokens of the step at hand are in the books
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
        with self._driving():
            self._check_open()
            return self.input_processor.process(
                request_id, prompt, sampling_params, priority, cache_salt
            )

    def add_sequence(self, sequence: Sequence, prompt: str | None) -> None:
        """Queue a checked sequence. Raises ValueError if its request id is in use."""
        with self._driving(), delayed_interrupt():
            self._check_new(sequence.request_id)
            self.output_processor.add(sequence, prompt)
            self.scheduler.add(sequence)

    def add_beam_search(
        self, request_id: str, prompt: Prompt, params: BeamSearchParams
    ) -> BeamSearch:
        """Queue a beam search, to be advanced by step(); its results are in the object returned.

        Raises ValueError or TypeError if it can never be served.
        """
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params must be BeamSearchParams, got {params!r}.")
        with self._driving(), delayed_interrupt():
            self._check_open()
            self._check_new(request_id)
            vocab_size = self.model_config.vocab_size
            root = self.input_processor.make_sequence(
                request_id, prompt, params.sampling_params(vocab_size)
            )
            search = BeamSearch(
                root,
                params,
                self.scheduler,
                self.input_processor.next_seq_ids,
                self.model_config.eos_token_ids,
            )
            self.scheduler.add(root)
            self._searches[request_id] = search
            return search

    def step(self) -> list[RequestOutput]:
        """Run one step; return an output for each request that has news (and wants to tell).

        Whatever it raises: the step's tokens are computed again, outputs that were ready come with
        the next call.
        """
        with self._driving():
            self._check_open()
            while self._to_abort:
                self.abort_request(self._to_abort.popleft())
            self._is_committed = False
            try:
                if self.config.async_scheduling:
                    self._run_overlapped_step()
                else:
                    self._run_step()
            except BaseException as error:  # Ctrl-C too: promised tokens will not come
                with delayed_interrupt():
                    is_of_the_gone = self._recover(error)
                if not is_of_the_gone:
                    if isinstance(error, RequestError) and error.__cause__ is not None:
                        raise error.__cause__ from None  # such as what its processor raised
                    raise
            while self._untold:
                finished_step = self._untold.popleft()
                for listener in self.on_step:
                    listener(*finished_step)
            if self._failures:
                failure, self._failures = self._failures[0], []
                raise failure
            delivered, self._undelivered = self._undelivered, []
            return delivered

    def _run_step(self) -> None:
        """The three lines."""
        with delayed_interrupt():
            scheduler_output = self.scheduler.schedule()
        if not scheduler_output.is_empty:
            model_output = self.executor.execute_model(scheduler_output)
            self._update(scheduler_output, model_output)

    def _run_overlapped_step(self) -> None:
        """Launch the next step, then read what the last one brought.

        Both are read if nothing can be decided before; and if nobody is left who waits for the
        second. (After an abort of the last request, the next call reads what is in flight.)
        """
        with delayed_interrupt():
            scheduler_output = self.scheduler.schedule()
        if not scheduler_output.is_empty:
            self._in_flight.append((scheduler_output, self.executor.launch(scheduler_output)))
        may_stay = not (scheduler_output.is_empty or scheduler_output.needs_sync)
        while len(self._in_flight) > (may_stay and self.scheduler.has_unfinished()):
            self._is_committed = False
            launched, pending = self._in_flight[0]
            model_output = pending.result()
            self._in_flight.popleft()
            self._update(launched, model_output)

    def _update(self, scheduler_output: SchedulerOutput, model_output: ModelOutput) -> None:
        """A step's tokens are here: into the books (then nothing is computed again), into text."""
        with delayed_interrupt():
            updates = self.scheduler.update_from_output(scheduler_output, model_output)
            self._is_committed = True
            outputs = self.process_updates(updates, self._failures)
            self._untold.append((scheduler_output, outputs))

    def _recover(self, error: BaseException) -> bool:
        """A step failed: what was not committed is computed again, and a request whose fault it is
        is aborted. True if that request is gone already, so that nobody need hear of it."""
        if not self._is_committed:
            self._in_flight.clear()
            self.scheduler.preempt_all()
        if not isinstance(error, RequestError):
            return False
        if error.seq_id not in self.scheduler.sequences:
            return True
        self._abort_sequence(error.seq_id)  # or it would spoil the next step, too
        return False

    def process_updates(
        self, updates: list[SequenceUpdate], failures: list[Exception] | None = None
    ) -> list[RequestOutput]:
        """Turn the step's new tokens into outputs, ending what a stop string ends.

        What breaks one request costs that request alone: it is aborted, the others get what is
        theirs, and then the error is raised, or put into `failures` for the caller to raise.
        """
        of_request: dict[str, list[SequenceUpdate]] = {}
        for update in updates:
            of_request.setdefault(update.sequence.request_id, []).append(update)
        outputs: list[RequestOutput] = []
        broken: list[Exception] = []
        for request_id, its_updates in of_request.items():
            try:
                output = self._process_request(request_id, its_updates)
            except Exception as error:
                broken.append(error)
                self.abort_request(request_id)
                continue
            if output is not None:
                outputs.append(output)
        self._undelivered += outputs
        if failures is not None:
            failures += broken
        elif broken:
            raise broken[0]
        return outputs

    def _process_request(
        self, request_id: str, updates: list[SequenceUpdate]
    ) -> RequestOutput | None:
        """The same for one request, or one beam search."""
        if request_id in self._searches:
            search = self._searches[request_id]
            for update in updates:
                search.take(update)
            if search.end_step():
                del self._searches[request_id]
            return None
        for update in updates:
            stop = self.output_processor.append(update)
            if stop is not None:
                self._stop(update.sequence, stop)
        with_news = [update.sequence for update in updates if update.new_token_ids]
        return self.output_processor.build_output(with_news) if with_news else None

    def _stop(self, sequence: Sequence, stop: str) -> None:
        """A stop string was found: only the text tells, so the scheduler learns it here."""
        if not self.scheduler.finish(sequence.seq_id, SequenceStatus.FINISHED_STOPPED, stop):
            sequence.status, sequence.stop_reason = SequenceStatus.FINISHED_STOPPED, stop

    def abort_request(self, request_id: str, index: int | None = None) -> bool:
        """End a request now, at whatever stage, and free its blocks; False if it is not there.

        With `index`, end that one of its n completions: it stays in the outputs as it is, with
        finish_reason "abort", which the next step() tells. (Before the completions have forked
        there is only completion 0, and to end it alone is to end the request.)
        """
        with self._driving(), delayed_interrupt():
            if index is None:
                self._undelivered = [o for o in self._undelivered if o.request_id != request_id]
            search = self._searches.pop(request_id, None)
            if search is not None:
                search.stop()
                return True
            state = self.output_processor.states.get(request_id)
            if state is None:
                return False
            if index is None:
                for branch in state.branches.values():
                    self.scheduler.finish(branch.sequence.seq_id, SequenceStatus.FINISHED_ABORTED)
                del self.output_processor.states[request_id]
                return True
            if index not in state.branches:
                return False
            seq = state.branches[index].sequence
            if not self.scheduler.finish(seq.seq_id, SequenceStatus.FINISHED_ABORTED):
                return False
            if seq.num_pending_forks:  # the others were to come of it
                del self.output_processor.states[request_id]
                return True
            if state.is_finished or seq.sampling_params.output_kind is RequestOutputKind.DELTA:
                news = self.output_processor.build_output([seq])
                self._undelivered += [news] if news is not None else []
            return True

    def abort_request_threadsafe(self, request_id: str) -> None:
        """abort_request, but also from a thread that may not drive the engine just now: whoever
        does will abort it with the next step."""
        try:
            self.abort_request(request_id)
        except RuntimeError:
            self._to_abort.append(request_id)

    def _abort_sequence(self, seq_id: int) -> None:
        """Abort the request that this sequence belongs to."""
        for request_id, state in list(self.output_processor.states.items()):
            if seq_id in [branch.sequence.seq_id for branch in state.branches.values()]:
                self.abort_request(request_id)

    def has_unfinished_requests(self) -> bool:
        """True while step() has something to do or to tell."""
        return bool(self._undelivered or self._in_flight) or self.scheduler.has_unfinished()

    def is_unfinished(self, request_id: str) -> bool:
        """True for a request that was added and has neither finished nor been aborted."""
        return request_id in self.output_processor.states or request_id in self._searches

    def is_served(self, sequence: Sequence) -> bool:
        """True if this very sequence was queued and its request is unfinished."""
        state = self.output_processor.states.get(sequence.request_id)
        return state is not None and state.root is sequence

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while requests are running."""
        return self.block_manager.reset_prefix_cache()

    def get_default_sampling_params(self) -> SamplingParams:
        """What generation_config.json recommends for this model, over SamplingParams' defaults."""
        recommended = self.model_config.generation_defaults
        names = {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
        names |= {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
        given = {ours: recommended.get(theirs) for theirs, ours in names.items()}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def close(self) -> None:
        """Abort what runs and give the model's and the cache's memory back."""
        if self._is_closed:
            return
        for request_id in [*self.output_processor.states, *self._searches]:
            self.abort_request(request_id)
        self._in_flight.clear()
        self.executor.close()
        self._is_closed = True

    @contextmanager
    def _driving(self) -> Iterator[None]:
        """Refuse a second thread while one is inside (a listener may call back, in its thread)."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this engine is being driven from another thread, and is not thread-safe. Drive it "
                "from one thread, or give each its own engine."
            )
        try:
            yield
        finally:
            self._lock.release()

    def _check_can_overlap(self) -> None:
        """Raise ValueError if overlapped steps were asked of an executor that knows only whole
        ones."""
        if self.config.async_scheduling and not hasattr(self.executor, "launch"):
            name = type(self.executor).__name__
            self.executor.close()
            raise ValueError(
                f"async_scheduling is True, but {name} has no launch(scheduler_output) that starts "
                "a step and returns an object whose result() waits for its ModelOutput. Write one, "
                "or set async_scheduling=False."
            )

    def _check_new(self, request_id: str) -> None:
        if self.is_unfinished(request_id):
            raise ValueError(f"request id {request_id!r} is in use; choose another.")

    def _check_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("this engine is closed; build a new LLM.")

    def _log_what_runs(self) -> None:
        """One line, so that a slow run explains itself: to the log, if the application keeps one,
        else to stderr."""
        config, model = self.config, self.model_config
        line = (
            f"{model.path.name} ({model.architecture}): {self.executor.describe()}, "
            f"KV cache {self.executor.num_kv_blocks} blocks x {config.block_size} tokens, "
            f"max_model_len {config.max_model_len}, max_num_seqs {config.max_num_seqs}, "
            f"token budget {config.max_num_batched_tokens}, "
            f"prefix caching {'on' if config.enable_prefix_caching else 'off'}, "
            f"chunked prefill {'on' if config.enable_chunked_prefill else 'off'}, "
            f"preemption by {config.preemption_mode}, "
            f"overlapped steps {'on' if config.async_scheduling else 'off'}"
        )
        if logger.hasHandlers():
            logger.info(line)
        else:
            print(f"nanoserve: {line}", file=sys.stderr)


@contextmanager
def delayed_interrupt() -> Iterator[None]:
    """Let Ctrl-C wait until this block is left: books must not be left half written.

    Only what takes microseconds belongs in here; the model's part of a step does not. Signals reach
    the main thread alone, and an application's own SIGINT handler is left in peace.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt


def _default_executor(tensor_parallel_size: int) -> Callable[..., Any]:
    """The default executor class, imported here because it imports torch."""
    from nanoserve.distributed.multiproc import MultiprocExecutor
    from nanoserve.executor import UniprocExecutor

    return UniprocExecutor if tensor_parallel_size == 1 else MultiprocExecutor


def _with_device(config: EngineConfig) -> EngineConfig:
    """`config` with the device that "auto" stands for; imported here because it imports torch."""
    from nanoserve.parallel import with_device

    return with_device(config)
