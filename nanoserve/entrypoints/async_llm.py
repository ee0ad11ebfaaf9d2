"""How do many callers share one engine?

A server has hundreds of requests at once, and each of them waits for its own next token. AsyncLLM
gives each request an asynchronous iterator, and runs the steps for all in a thread of its own:

    async for output in async_llm.generate("Once upon a time", SamplingParams()):
        print(output.outputs[0].text)

    the event loop                                    the thread "nanoserve-engine"
    add_request: tokenize in a pool of threads
                 engine.add ---------------------->   step(): schedule, execute, update
                 await stream.get() <--------------   one call of the loop for all outputs of a step

A request ends by its last output, by abort(), or by an error of its own, which is an output, too
(finish_reason "error"). A caller that leaves the iterator, or whose task is cancelled, aborts its
request. If the engine cannot run another step, or is shut down, everybody who waits gets
EngineDeadError, and so does everybody who comes later.

Left out: a process of its own for the engine (vLLM's EngineCoreProc, reached over ZMQ). Here
tokenizing, scheduling and HTTP take turns, as Python runs one thread at a time.

vLLM: vllm/engine/async_llm_engine.py (V0); vllm/v1/engine/: async_llm.py, core_client.py, core.py.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from nanoserve.chapters import make_engine
from nanoserve.kernels.threads import load_torch
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import EngineDeadError, RequestOutput

logger = logging.getLogger("nanoserve")
Result = TypeVar("Result")
NUM_TOKENIZERS = 4  # threads


class QueueOverflowError(RuntimeError):
    """As many requests as max_num_queued_reqs allows are unfinished: come back later."""


class RequestStream:
    """The outputs of one request, on their way to the task that waits for them."""

    def __init__(self, request_id: str, key: str, queue: asyncio.Queue[Any] | None) -> None:
        self.request_id = request_id  # the caller's
        self.key = key  # the engine's: no other request ever has it
        self.loop = asyncio.get_running_loop()
        self.queue = queue or asyncio.Queue()  # of (stream, RequestOutput or EngineDeadError)

    async def get(self) -> RequestOutput:
        """Wait for the next output; one that is `finished` is the last. Raises EngineDeadError."""
        _, item = await self.queue.get()
        if isinstance(item, Exception):
            raise item
        return item


class AsyncLLM:
    """An engine that serves many tasks at once, of one event loop or of several.

    >>> async_llm = AsyncLLM(max_num_seqs=64)

    Building it takes as long as an LLM, and blocks. `engine` is the thread's: look at it, but run
    no steps.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_num_queued_reqs: int | None = None,
        **options: Any,
    ) -> None:
        """model, options: those of LLM. max_num_queued_reqs: requests that may be unfinished at
        once, each of its n completions counted; None: no limit."""
        load_torch()
        self.engine = make_engine({"model": model, **options})
        self.max_num_queued_reqs = max_num_queued_reqs
        self._death = ""  # why no request is taken any more
        self._ids = count()
        self._streams: dict[str, RequestStream] = {}  # of requests that have not ended, by key
        self._calls: deque[tuple[Callable[[Any], Any], Future[Any]]] = deque()  # between two steps
        self._wake = threading.Event()
        self._pool = ThreadPoolExecutor(NUM_TOKENIZERS, "nanoserve-tokenizer")
        self._thread = threading.Thread(target=self._run, name="nanoserve-engine", daemon=True)
        self._thread.start()

    @classmethod
    def from_engine_args(cls, engine_args: Any, **_: Any) -> AsyncLLM:
        """The AsyncLLM that EngineArgs describe. vLLM's other arguments (start_engine_loop,
        usage_context, ...) change nothing."""
        return cls(**vars(engine_args))

    # -- the engine's thread --

    def _run(self) -> None:
        """Run steps while there is something to compute; wait while there is nothing."""
        try:
            while not self._death:
                self._run_calls()
                if self.engine.has_unfinished_requests():
                    self._step()
                elif not self._death:
                    self._wake.wait()
                    self._wake.clear()
        except BaseException as error:
            logger.exception("the engine is dead")
            self._death = f"a step failed ({error!r}). Build a new AsyncLLM."
        # Whoever comes from now on looks at _death, after leaving a stream or a call here.
        self._hand_out([(key, self.dead_error) for key in list(self._streams)])
        self._run_calls()

    def _step(self) -> None:
        outputs = self.engine.step()
        self._hand_out([(output.request_id, output) for output in outputs])
        is_stuck = not outputs and not self.engine.scheduler.running
        if is_stuck and self._wake.wait(0.001):  # what waits is not ready: its grammar, say
            self._wake.clear()

    def _run_calls(self) -> None:
        while self._calls:
            function, future = self._calls.popleft()
            if not future.set_running_or_notify_cancel():
                continue  # nobody waits any more
            try:
                self._check_alive()
                future.set_result(function(self.engine))
            except Exception as error:
                future.set_exception(error)

    def _hand_out(self, items: list[tuple[str, Any]]) -> None:
        """Put outputs or errors into their streams: one call for each event loop."""
        by_loop: dict[Any, list[tuple[RequestStream, Any]]] = {}
        for key, item in items:
            is_last = isinstance(item, Exception) or item.finished
            stream = (self._streams.pop if is_last else self._streams.get)(key, None)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append((stream, item))
        for loop, pairs in by_loop.items():
            try:
                loop.call_soon_threadsafe(_put_all, pairs)
            except RuntimeError:  # the loop is closed: nobody waits there
                for stream, _ in pairs:
                    self.drop(stream)

    def _abort(self, request_ids: Collection[str], engine: Any) -> None:
        """End requests between two steps; whoever waits gets what there is."""
        for stream in [s for s in list(self._streams.values()) if s.request_id in request_ids]:
            request = engine.requests.get(stream.key)
            if request is not None and engine.abort_request(stream.key):
                outputs = request.fail(None, "abort")
                self._hand_out([(stream.key, output) for output in outputs])

    def _call(self, function: Callable[[Any], Result]) -> Future[Result]:
        """Have function(engine) called between two steps. Raises EngineDeadError."""
        self._check_alive()
        future: Future[Result] = Future()
        self._calls.append((function, future))
        self._wake.set()
        if self._death and future.cancel():  # the thread has ended without a look at it
            raise self.dead_error
        return future

    # -- requests --

    async def add_request(
        self,
        request_id: str | None,
        prompt: Any,
        params: Any = None,
        *,
        queue: asyncio.Queue[Any] | None = None,
        **each: Any,
    ) -> RequestStream:
        """Queue a request; `get` of the stream waits for its outputs. Whoever calls this sees to it
        that drop() is called when nobody waits. queue: of several streams; None: of its own. each:
        priority, cache_salt, and what chapters add, such as lora_request.

        Raises ValueError or TypeError if it can never be served, EngineDeadError,
        QueueOverflowError.
        """
        key = f"{request_id or 'request'}-{next(self._ids)}"
        self.check_admission(getattr(params, "n", 1))
        each = {name: value for name, value in each.items() if value is not None}
        make_request = partial(self.engine.make_request, key, prompt, params, **each)
        request = await self.run_in_thread(make_request)
        self.check_admission(request.root.sampling_params.n)
        stream = self._streams[key] = RequestStream(request_id or key, key, queue)
        try:
            self.engine.add(request)
            self._wake.set()
            self._check_alive()  # the thread may have ended without a look at it
        except RuntimeError as error:  # the engine is closed
            self.drop(stream)
            raise EngineDeadError(str(error)) from None
        return stream

    def check_admission(self, number: int = 1) -> None:
        """Raise unless the engine lives and takes `number` more completions."""
        self._check_alive()
        requests, most = list(self.engine.requests.values()), self.max_num_queued_reqs
        number += sum(request.root.sampling_params.n for request in requests)
        if most is not None and number > most:
            raise QueueOverflowError(f"{most} requests are unfinished, as many as may be; wait.")

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **each: Any,
    ) -> AsyncGenerator[Any, None]:
        """Complete one prompt; yield an output after each step that brought tokens for it, as
        sampling_params.output_kind says. None: the model's own recommendation, a new id."""
        stream = await self.add_request(request_id, prompt, sampling_params, **each)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self.drop(stream)

    encode = generate  # of a pooling model, with PoolingParams: yields one output

    def drop(self, stream: RequestStream) -> None:
        """Nobody waits for these outputs any more: end the request, if it has not ended."""
        if self._streams.pop(stream.key, None) is not None:
            self.engine.abort_request(stream.key)

    async def abort(self, request_id: str | Collection[str]) -> None:
        """End requests. Whoever waits for one gets an output with finish_reason "abort"."""
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        if not self._death:
            self._call(partial(self._abort, ids))  # not awaited: this task may be cancelled

    # -- text --

    async def render_chat(self, messages: list[Any], **options: Any) -> dict[str, Any]:
        """The prompt that the chat template makes of a conversation."""
        render = partial(self.engine.input_processor.render_chat, messages, **options)
        return await self.run_in_thread(render)

    async def tokenize(self, text: str, **options: Any) -> list[int]:
        tokenize = partial(self.engine.input_processor.tokenize, text, **options)
        return await self.run_in_thread(tokenize)

    async def detokenize(self, token_ids: list[int]) -> str:
        self.engine.input_processor.check_vocabulary(token_ids, "tokens")
        return await self.run_in_thread(self.get_tokenizer().decode, token_ids)

    def get_tokenizer(self) -> Any:
        """Raises ValueError if the checkpoint has none."""
        return self.engine.input_processor.require_tokenizer("get_tokenizer")

    async def run_in_thread(self, function: Callable[..., Result], *args: Any) -> Result:
        """For what would hold up the event loop."""
        self._check_alive()
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    # -- adapters, of an engine with enable_lora --

    async def add_lora(self, lora_request: Any) -> bool:
        """Check and read an adapter before a request wants it. Raises ValueError or TypeError."""
        return await self.run_in_thread(self.engine.add_lora, lora_request)

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter; requests that have it go on."""
        return self.engine.remove_lora(lora_id)

    async def list_loras(self) -> set[int]:
        return self.engine.list_loras()

    # -- the engine --

    async def call_utility(self, function: Callable[[Any], Result]) -> Result:
        """function(engine), called between two steps, when nothing changes."""
        return await asyncio.wrap_future(self._call(function))

    async def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. False, and no change, while requests are running."""
        return await self.call_utility(lambda engine: engine.reset_prefix_cache())

    async def check_health(self) -> None:
        """Raise EngineDeadError if no request would be served."""
        self._check_alive()

    @property
    def errored(self) -> bool:
        """Is the engine dead, or shut down?"""
        return bool(self._death)

    @property
    def dead_error(self) -> EngineDeadError:
        return EngineDeadError(self._death)

    def get_num_unfinished_requests(self) -> int:
        return len(self.engine.requests)

    def shutdown(self, timeout: float = 0.0) -> None:
        """Let the unfinished requests run for up to `timeout` seconds, then tell everybody who
        waits that it is over, and free the engine's memory. Not for coroutines: it blocks."""
        deadline = time.monotonic() + timeout
        while self.engine.requests and not self._death and time.monotonic() < deadline:
            time.sleep(0.01)
        self._death = self._death or "the engine was shut down."
        self._wake.set()
        self._thread.join()
        self._pool.shutdown(wait=False)
        self.engine.close()

    def _check_alive(self) -> None:
        if self._death:
            raise self.dead_error

    def __enter__(self) -> AsyncLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def _put_all(pairs: list[tuple[RequestStream, Any]]) -> None:
    for stream, item in pairs:
        item.request_id = stream.request_id
        stream.queue.put_nowait((stream, item))


AsyncLLMEngine = AsyncLLM  # vLLM's other name
