"""What is one step of the engine?

LLMEngine is the loop that all of vLLM stands on: add requests, then call step() until nothing is
unfinished. A step is four lines:

    step = self.scheduler.schedule()                         # who runs, how many tokens
    pending = self.executor.launch(step)                     # tensors, the GPU's part
    updates = self.scheduler.update_from_output(step, pending())     # the tokens
    self.process_outputs(updates)                            # text, stop strings

With async_scheduling (the default on a GPU) the CPU schedules and launches a step while the GPU is
still computing the one before (V1's AsyncScheduler and step_with_batch_queue):

    plain        schedule 1 | GPU 1 | update 1, schedule 2 | GPU 2 | update 2, schedule 3 | ...
    overlapped   schedule 1 | GPU 1                  | GPU 2                | GPU 3 ...
                              schedule 2 | update 1    schedule 3 | update 2

The tokens are the same. The tokens of a step are known one call of step() later. There is one code
path: plain means that no step may stay in flight.

*Parts.* The classes that an engine is made of are attributes of its class. A chapter, or you, put a
subclass in the place of one (chapters/__init__.py stacks those of the chapters that are on; a few
chapters always are):

    class MyEngine(LLMEngine):
        scheduler_cls = MyScheduler

    LLM(engine_cls=MyEngine)        or, the same,        LLM(scheduler_cls=MyScheduler)

*Threads.* One thread calls step(). Other threads may add and abort requests at any time: prompts
are tokenized and checked in the caller's thread, and what changes the scheduler waits in an inbox
until the next step begins.

*Errors.* Four rules, and no block is lost by any of them.
1. A bad request is refused when it is added (ValueError, TypeError).
2. What one request breaks and can be told apart (its logits processor, its text) ends this request:
   its output has finish_reason "error".
3. Any other failed step is forgotten, with all steps in flight: all blocks are freed, and their
   sequences are computed again. A sequence in two of them, without a new token between, ends its
   request with an error. If tokens were just being read, some may be lost, so the requests of that
   step end with an error.
4. step() itself raises only if no sequence is in any of these steps (the scheduler has failed), or
   if no step can ever run again (EngineDeadError: a rank has ended).

Ctrl-C may stop a step anywhere. Then the next change or step begins with the forgetting of rule 3.

vLLM: vllm/engine/llm_engine.py (V0); vllm/v1/engine/: llm_engine.py, core.py (0.32).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.distributed import make_executor
from nanoserve.input_processor import InputProcessor
from nanoserve.model_runner import ModelRunner
from nanoserve.models.config import ModelConfig, resolve_folder
from nanoserve.models.tokenizer import load_tokenizer
from nanoserve.output_processor import Request
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import (
    EngineDeadError,
    ModelOutput,
    RequestOutput,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)

logger = logging.getLogger("nanoserve")


class LLMEngine:
    """Requests in, one step at a time, outputs out.

    Invariant: whatever a call raises, no block is lost and the engine can run the next step.
    """

    config_cls = EngineConfig
    sequence_cls = Sequence
    request_cls = Request
    block_manager_cls = BlockManager
    scheduler_cls = Scheduler
    runner_cls = ModelRunner
    input_processor_cls = InputProcessor

    def __init__(self, config: EngineConfig) -> None:
        """Read the checkpoint and build every part. Raises ValueError for what does not fit."""
        folder = resolve_folder(config.model)
        self.model_config = ModelConfig.from_folder(folder, config.hf_overrides)
        self.config = config = config.resolve(self.model_config)
        where = resolve_folder(config.tokenizer, folder)
        self.tokenizer = None if config.skip_tokenizer_init else load_tokenizer(where)
        self.executor = make_executor(config, self.model_config, self.runner_cls)
        num_blocks, num_cpu_blocks = self.executor.num_kv_blocks, self.executor.num_cpu_blocks
        self.block_manager = self.block_manager_cls(
            num_blocks, config.block_size, config.enable_prefix_caching, num_cpu_blocks
        )
        self.scheduler = self.scheduler_cls(config, self.block_manager)
        self.input_processor = self.input_processor_cls(
            config, self.model_config, self.tokenizer, num_blocks, self.sequence_cls
        )
        self.requests: dict[str, Request] = {}  # the unfinished ones
        self.max_in_flight = 1 + config.async_scheduling
        self._steps: deque[SchedulerOutput] = deque()  # decided, and not read to the end
        self._pending: deque[Callable[[], ModelOutput]] = deque()  # of those that were launched
        self._being_read: set[Request] = set()  # of the step that is being read
        self._outputs: list[RequestOutput] = []  # for step() to hand out
        self._inbox: deque[Callable[[], object]] = deque()  # what is to change between two steps
        self._lock, self._owner = threading.Lock(), 0  # which thread is inside a step
        self.is_closed = False
        self._is_whole = True  # False inside a step, and if one did not come to its end

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> LLMEngine:
        """The engine that vLLM's EngineArgs describe (entrypoints/engine_args.py)."""
        return engine_args.create_engine(cls)

    # -- requests --

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams | None = None, **each: Any
    ) -> str:
        """Queue a request and return its id. `each`: see make_request. Raises ValueError or
        TypeError if it can never be served."""
        self.add(self.make_request(request_id, prompt, params, **each))
        return request_id

    def make_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **off: Any,
    ) -> Request:
        """Tokenize and check a request without queueing it. Raises as add_request does."""
        if given := [name for name, value in off.items() if value is not None]:
            raise TypeError(f"{given}: the option of LLM that adds this (enable_...) is not set.")
        if params is None:  # what the checkpoint recommends
            params = SamplingParams.from_generation_config(self.model_config.generation_config)
        root = self.input_processor.process(request_id, prompt, params, priority, cache_salt)
        return self.request_cls(root, self.tokenizer)

    def add(self, request: Request) -> None:
        """Queue a checked request. Raises ValueError if its request id is in use."""
        if self.is_closed:
            raise RuntimeError("the engine is closed: make a new one.")
        if self.requests.setdefault(request.request_id, request) is not request:
            raise ValueError(f"request id {request.request_id!r} is in use; choose another.")
        self._change(partial(self._queue, request))

    def _queue(self, request: Request) -> None:
        """Give a request's sequences to the scheduler, unless it was aborted meanwhile."""
        try:
            for seq in request.sequences if self.has_request(request) else ():
                self.scheduler.add(seq)
        except Exception:  # of a scheduler of your own
            self.requests.pop(request.request_id, None)
            raise

    def abort_request(self, request_ids: str | Collection[str]) -> bool:
        """End requests, at whatever stage: they hand out nothing more. False if none is known."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        found = [request for i in ids if (request := self.requests.pop(i, None)) is not None]
        has_output = any(each.request_id in ids for each in self._outputs)  # not handed out yet
        self._change(partial(self._forget, found, frozenset(ids)))
        return bool(found) or has_output

    def _forget(self, requests: list[Request], request_ids: frozenset[str]) -> None:
        for request in requests:
            self.scheduler.finish_request(request.root, SequenceStatus.FINISHED_ABORTED)
        self._outputs = [each for each in self._outputs if each.request_id not in request_ids]

    def fail_request(self, request: Request | None, error: Exception) -> None:
        """End a request with finish_reason "error"."""
        if request is None or not self.has_request(request):
            return  # it has failed already, or was aborted meanwhile
        logger.error("request %r failed: %r", request.request_id, error, exc_info=error)
        self._being_read.add(request)  # if Ctrl-C comes in between, recover() does this again
        self.scheduler.finish_request(request.root, SequenceStatus.FINISHED_ERROR)
        if not any(
            each.finished and each.request_id == request.request_id for each in self._outputs
        ):
            self._outputs += request.fail(str(error) or repr(error))  # before it is forgotten
        self.requests.pop(request.request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests or self._outputs)

    def get_num_unfinished_requests(self) -> int:
        return len(self.requests)

    def has_request(self, request: Request) -> bool:
        """True while this very request is unfinished."""
        return self.requests.get(request.request_id) is request

    def request_of(self, seq: Sequence) -> Request | None:
        """The unfinished request of `seq`. None if it was aborted: its id may be another's now."""
        request = self.requests.get(seq.request_id)
        return request if request and request.root.sampling_params is seq.sampling_params else None

    def _change(self, action: Callable[[], object]) -> None:
        """Have `action` done between two steps: now, unless somebody is inside a step. (It may be
        this thread: a logits processor, say, that aborts a request.)"""
        self._inbox.append(action)
        self._open_inbox()

    def _open_inbox(self) -> None:
        while self._inbox and self._lock.acquire(blocking=False):  # more may come meanwhile
            try:
                self.settle()
            finally:
                self._lock.release()

    # -- the step --

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs that the requests want to hand out now."""
        with self.between_steps():
            try:
                self.run_step()
            except Exception as error:
                self.recover(error)
        with self._lock:  # last: if opening the inbox raises, the next step() hands these out
            outputs, self._outputs = self._outputs, []
            return outputs

    def run_step(self) -> None:
        """Schedule and launch a step; then read the oldest in flight, until there are fewer than
        max_in_flight. All are read if the next step depends on the tokens, or if nothing runs."""
        if self._inbox or not self._is_whole:
            self.settle()
        self._is_whole = False
        step = self.scheduler.schedule()
        if step.scheduled:
            self._steps.append(step)
            self._pending.append(self.executor.launch(step))
        may_overlap = step.scheduled and not step.needs_sync
        while self._pending:
            if may_overlap and len(self._pending) < self.max_in_flight and self.scheduler.sequences:
                break
            self.update(self._steps[0], self._pending.popleft()())
            self._steps.popleft()
        self._is_whole = True

    def update(self, step: SchedulerOutput, model_output: ModelOutput) -> None:
        """The tokens of a step are known: append them, and make text of them."""
        known = self.scheduler.sequences
        owners = {i: self.request_of(known[i]) for i, *_ in step.scheduled if i in known}
        self._being_read = set(owners.values()) - {None}
        for seq_id, error in model_output.errors.items():
            self.fail_request(owners.get(seq_id), error)
        self.process_outputs(self.scheduler.update_from_output(step, model_output))
        self._being_read = set()

    def process_outputs(self, updates: list[SequenceUpdate]) -> None:
        """Give a step's updates to their requests, and keep what these hand out."""
        by_request: dict[Request, list[SequenceUpdate]] = {}
        for update in updates:
            if request := self.request_of(update.sequence):
                by_request[request] = [*by_request.get(request, ()), update]
        for request, its_updates in by_request.items():
            try:
                self._outputs += request.process(its_updates, self.scheduler.finish)
            except Exception as error:  # such as a tokenizer that cannot decode
                self.fail_request(request, error)
            else:
                if request.is_finished:
                    self.requests.pop(request.request_id, None)

    def settle(self) -> None:
        """Recover from a step that was interrupted, then do what waits in the inbox. An action that
        is interrupted is done again: twice does no harm."""
        if not self._is_whole:
            self.recover(None)
        self._is_whole = False
        while self._inbox:
            try:
                self._inbox[0]()
            except Exception:  # of a scheduler of your own: it is not tried again
                self._inbox.popleft()
                raise
            self._inbox.popleft()
        self._is_whole = True

    def recover(self, error: Exception | None) -> None:
        """Forget the steps in flight, the failed one among them; rules 3 and 4 of the header.
        Without an error, the step was interrupted: that is nobody's failure."""
        scheduled = {item.seq_id for step in self._steps for item in step.scheduled}
        self.scheduler.preempt_all()
        for request in self._being_read:
            self.fail_request(request, error or RuntimeError("the step was interrupted"))
        for seq in list(self.scheduler.sequences.values()) if error else ():
            seq.num_failures += seq.seq_id in scheduled
            if seq.num_failures >= 2:
                self.fail_request(self.request_of(seq), error)
        self._steps.clear()
        self._pending.clear()
        self._being_read, self._is_whole = set(), True
        if error is not None and (not scheduled or isinstance(error, EngineDeadError)):
            raise error
        if error is not None:
            logger.warning("a step failed; it is computed once more", exc_info=error)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Hold the lock of the step. Raises RuntimeError if this very thread is inside one."""
        if self._owner == threading.get_ident():
            raise RuntimeError("a step is running: this cannot be called from inside it.")
        with self._lock:
            try:
                self._owner = threading.get_ident()
                yield
            finally:
                self._owner = 0
        if self._inbox:
            self._open_inbox()

    # -- the rest --

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and no change, while requests are running."""
        with self.between_steps():
            return self.block_manager.reset_prefix_cache()

    def close(self) -> None:
        """Abort all requests and free the memory of the model and the KV cache. Closing twice does
        no harm."""
        self.is_closed = True
        try:
            self.abort_request(list(self.requests))
        finally:
            with self.between_steps():
                self.executor.close()
