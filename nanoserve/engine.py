"""What is one step of the engine?

LLMEngine is the loop that all of vLLM stands on: add requests, then call step() until nothing is
unfinished. A step is four lines:

    step    = self.scheduler.schedule()                         # who runs, how many tokens
    read    = self.executor.launch(step)                        # tensors, the GPU's part
    updates = self.scheduler.update_from_output(step, read())
    outputs = self.process_outputs(updates)                     # text, stop strings

With async_scheduling=True the CPU schedules and launches a step while the GPU is still computing
the one before (V1's AsyncScheduler and step_with_batch_queue):

    plain        schedule 1 | GPU 1 | update 1, schedule 2 | GPU 2 | update 2, schedule 3 | ...
    overlapped   schedule 1 | GPU 1                  | GPU 2                | GPU 3 ...
                              schedule 2 | update 1    schedule 3 | update 2

The tokens are the same. The tokens of a step are known one call of step() later.

*Parts.* The classes that an engine is made of are attributes of its class. A chapter, or you, put a
subclass in the place of one (chapters/__init__.py does so for the options that are set):

    class MyEngine(LLMEngine):
        scheduler_cls = MyScheduler

*Threads.* One thread calls step(). Other threads may add and abort requests at any time: prompts
are tokenized and checked in the caller's thread, and what changes the scheduler waits in an inbox
until the next step begins.

*Errors.* Three rules. A bad request is refused when it is added (ValueError, TypeError). What one
request breaks later (its logits processor, its text) ends that request: its output has
finish_reason "error". Any other failed step is forgotten: all blocks are freed and its requests are
computed again, once; if that fails, too, step() raises. The same forgetting makes Ctrl-C safe.

vLLM: vllm/engine/llm_engine.py (V0); vllm/v1/engine/llm_engine.py, core.py (V1).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
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
    ModelOutput,
    RequestError,
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
    block_manager_cls = BlockManager
    scheduler_cls = Scheduler
    runner_cls = ModelRunner
    input_processor_cls = InputProcessor
    request_cls = Request

    def __init__(self, config: EngineConfig) -> None:
        """Read the checkpoint and build every part. Raises ValueError for what does not fit."""
        folder = resolve_folder(config.model)
        self.model_config = ModelConfig.from_folder(folder)
        self.config = config = config.resolve(self.model_config)
        self.tokenizer = load_tokenizer(resolve_folder(config.tokenizer, folder))
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
        self._inbox: deque[Callable[[], object]] = deque()  # what is to change between two steps
        self._in_flight: deque[tuple[SchedulerOutput, Callable[[], ModelOutput]]] = deque()
        self.max_in_flight = 1 + self.config.async_scheduling
        self._lock = threading.RLock()  # held by who runs a step
        self._has_failed = False  # the last step
        self._being_read: set[str] = set()  # request ids of the step whose tokens are being read
        self._outputs: list[RequestOutput] = []  # for the next step() to hand out

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
    ) -> Request:
        """Tokenize and check a request without queueing it. Raises as add_request does."""
        if params is None:  # what the checkpoint recommends
            params = SamplingParams.from_generation_config(self.model_config.generation_defaults)
        root = self.input_processor.process(request_id, prompt, params, priority, cache_salt)
        return self.request_cls(root, self.tokenizer)

    def add(self, request: Request) -> None:
        """Queue a checked request. Raises ValueError if its request id is in use."""
        if self.requests.setdefault(request.request_id, request) is not request:
            raise ValueError(f"request id {request.request_id!r} is in use; choose another.")
        self._change(partial(self._queue, request))

    def _queue(self, request: Request) -> None:
        """Give a request's sequences to the scheduler, unless it was aborted meanwhile."""
        for seq in request.sequences if self.has_request(request) else ():
            self.scheduler.add(seq)

    def abort_request(self, request_id: str) -> bool:
        """End a request, at whatever stage: it hands out nothing more. False if there is none."""
        request = self.requests.pop(request_id, None)
        if request is not None:
            finish = partial(self.scheduler.finish, status=SequenceStatus.FINISHED_ABORTED)
            self._change(lambda: [finish(seq.seq_id) for seq in request.sequences])
        return request is not None

    def fail_request(self, request_id: str, error: Exception) -> list[RequestOutput]:
        """End a request with finish_reason "error"; its last output."""
        logger.error("request %r failed: %s", request_id, error, exc_info=error.__cause__)
        request = self.requests.pop(request_id)
        for seq in request.sequences:
            self.scheduler.finish(seq.seq_id, SequenceStatus.FINISHED_ERROR, str(error))
        return request.fail(str(error))

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests or self._outputs)

    def has_request(self, request: Request) -> bool:
        """True while this very request is unfinished."""
        return self.requests.get(request.request_id) is request

    def _change(self, action: Callable[[], object]) -> None:
        """Have `action` done between two steps: now, unless another thread is inside a step."""
        self._inbox.append(action)
        if self._lock.acquire(blocking=False):
            try:
                self._drain_inbox()
            finally:
                self._lock.release()

    def _drain_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    # -- the step --

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs that the requests want to hand out now."""
        with self._lock:
            try:
                self._outputs += self.run_step()
                self._has_failed = False
            except BaseException as error:
                self.forget_steps()
                is_second, self._has_failed = self._has_failed, True
                if is_second or not isinstance(error, Exception):
                    raise
                logger.warning("a step failed; it is computed once more", exc_info=error)
            outputs, self._outputs = self._outputs, []
            return outputs

    def forget_steps(self) -> None:
        """Compute again what was scheduled. Requests whose tokens were just being read, some known
        to the scheduler and not yet to the user, end with an error: no text ever has a gap."""
        self._in_flight.clear()
        self.scheduler.preempt_all()
        error = RequestError("the step failed while its tokens were read")
        for request_id in self._being_read & self.requests.keys():
            self._outputs += self.fail_request(request_id, error)
        self._being_read = set()

    def run_step(self) -> list[RequestOutput]:
        """Schedule and launch a step; then read the oldest ones in flight, until as few are left as
        may be. All are read if the next step depends on the tokens, or if nothing runs."""
        if self._inbox:
            self._drain_inbox()
        step = self.scheduler.schedule()
        if step.scheduled:
            self._in_flight.append((step, self.executor.launch(step)))
        may_overlap = step.scheduled and not step.needs_sync
        outputs: list[RequestOutput] = []
        while self._in_flight:
            num_left = self.max_in_flight - 1 if may_overlap and self.scheduler.sequences else 0
            if len(self._in_flight) <= num_left:
                break
            oldest, read = self._in_flight.popleft()
            outputs += self.update(oldest, read())
        return outputs

    def update(self, step: SchedulerOutput, model_output: ModelOutput) -> list[RequestOutput]:
        """The tokens of a step are known: append them, and make text of them."""
        outputs, known = [], self.scheduler.sequences
        owners = {i: known[i].request_id for i, *_ in step.scheduled if i in known}
        self._being_read = set(owners.values())
        for seq_id, error in model_output.errors.items():
            if owners.get(seq_id) in self.requests:
                outputs += self.fail_request(owners[seq_id], error)
        outputs += self.process_outputs(self.scheduler.update_from_output(step, model_output))
        self._being_read = set()
        return outputs

    def process_outputs(self, updates: list[SequenceUpdate]) -> list[RequestOutput]:
        """Give a step's updates to their requests; return the outputs to hand out."""
        by_request: dict[str, list[SequenceUpdate]] = {}
        for update in updates:
            by_request.setdefault(update.sequence.request_id, []).append(update)
        outputs: list[RequestOutput] = []
        for request_id, its_updates in by_request.items():
            if (request := self.requests.get(request_id)) is None:
                continue  # aborted meanwhile
            try:
                outputs += request.process(its_updates, self.scheduler.finish)
            except Exception as error:  # such as a tokenizer that cannot decode
                outputs += self.fail_request(request_id, RequestError(repr(error)))
            if request.is_finished:
                self.requests.pop(request_id, None)
        return outputs

    # -- the rest --

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and no change, while requests are running."""
        with self._lock:
            return self.block_manager.reset_prefix_cache()

    def close(self) -> None:
        """Abort all requests and free the memory of the model and the KV cache."""
        for request_id in list(self.requests):
            self.abort_request(request_id)
        self.executor.close()
