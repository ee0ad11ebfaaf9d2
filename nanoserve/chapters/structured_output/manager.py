"""Who compiles grammars, and who makes the masks of a step?

The engine has one StructuredOutputManager. Each request with structured_outputs gets a
StructuredOutputRequest, and the parts of the engine ask it:

    LLMEngine.make_request            grammar_init: check, choose the backend
    LLMEngine.add                     start: compile in a thread, or find in the cache
    Sequence.is_ready                 is_open: has the thread ended?
    Scheduler.update_from_output      accept_tokens: go on by the new tokens; is that the end?
                                      validate_drafts: which drafts does the grammar allow?
    RequestState.make_sampling_batch    grammar_bitmask: which tokens may come next, in each row
    Sequence.make_branch              fork: each of n completions has its own place in the rules

So the grammar of a sequence has accepted the known output tokens, whatever happens: a preemption
changes nothing, and if an update fails, its tokens are taken back (rollback_to).

*Drafts.* A row of the batch with the drafts d e has three rows of logits. The first is masked as
always, the second as if d had come, the third as if d e had. The drafts are taken back at once.

*Time and memory.* What is compiled comes from a request, and a few characters can ask for hours:
((a{1,99}){1,99}){1,99}. A backend refuses what is too large before it begins. What may take long
is compiled in a process first, which is killed at a limit; only if this process has ended in time
is it compiled here, where nothing can stop it. Some grammars are small and take longer with each
token, such as ((a+)+)+b in xgrammar: a sequence whose masks have taken more than SECONDS and
TOKEN_SECONDS for each token, of the CPU's time, ends with an error. A compiled grammar stays in a
cache of CACHE_BYTES, so a second request with the same constraint starts at once. What waits for a
thread is not compiled if all requests that want it have ended by then.

Left out: masks made by several threads at once (vLLM: in batches of more than 128 rows).

vLLM: vllm/v1/structured_output/__init__.py, request.py (V1).
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from nanoserve.exceptions import Caught, RequestError, describe_error
from nanoserve.extras.structured_output.backend import (
    GrammarSpec,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    choose_backend,
)
from nanoserve.extras.structured_output.bitmask import BitmaskKernel, TokenBitmask
from nanoserve.extras.structured_output.compile_process import CompileGuard
from nanoserve.extras.structured_output.params import StructuredOutputsConfig
from nanoserve.extras.structured_output.vocabulary import Vocabulary, read_vocabulary
from nanoserve.guard import GuardError
from nanoserve.logger import init_logger

if TYPE_CHECKING:
    from nanoserve.engine import LLMEngine
    from nanoserve.input_batch import RequestState
    from nanoserve.output_processor import RequestConsumer
    from nanoserve.sequence import Sequence

logger = init_logger(__name__)

CACHE_BYTES = 256 * 2**20  # of compiled grammars that no request uses, about
CACHE_ENTRIES = 1024
# What a sequence may spend on masks, of a CPU: so much, and so much for each of its tokens.
SECONDS, TOKEN_SECONDS = 1.0, 0.02
Key = tuple[type[StructuredOutputBackend], GrammarSpec]  # who compiles, and what


class StructuredOutputManager:
    """Compiles the grammars of one engine, and fills the bitmask of a step. Any thread may call
    grammar_init.

    Invariant: all that it holds between requests is bounded: compiled grammars by CACHE_BYTES,
    threads by their pool. What waits for a thread is wanted by an unfinished request, or costs
    nothing when its turn comes.
    """

    def __init__(
        self,
        config: StructuredOutputsConfig,
        tokenizer: Any,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        rejects_drafts: bool = False,
    ) -> None:
        """vocab_size: that of the model, whose logits have more columns than the tokenizer has
        tokens. rejects_drafts: by a RejectionSampler. Raises ValueError for a tokenizer whose
        tokens cannot be read."""
        self.config = config
        self.rejects_drafts = rejects_drafts
        self.vocabulary: Vocabulary = read_vocabulary(tokenizer, vocab_size, eos_token_ids)
        self.backends: dict[str, StructuredOutputBackend] = {}
        self.executor = ThreadPoolExecutor(
            max_workers=max(1, ((os.cpu_count() or 1) + 1) // 2), thread_name_prefix="grammar"
        )
        self.guard = CompileGuard(self.vocabulary)
        self._cache_lock, self._backend_lock = threading.Lock(), threading.Lock()
        self._cache: OrderedDict[Key, Future[StructuredOutputGrammar]] = OrderedDict()
        self._wanted_by: dict[Key, set[StructuredOutputRequest]] = {}  # what waits for a thread
        self._kernel: BitmaskKernel | None = None  # when the device is known
        self._bitmask: Tensor | None = None  # [rows, words] int32, as many rows as were needed
        self.reads_late = False  # a pipeline: the next step is launched before this one is read

    @classmethod
    def from_engine(cls, engine: LLMEngine) -> StructuredOutputManager:
        """For the model and the options of an engine, whose requests it forgets as they end."""
        config, model_config = engine.config, engine.model_config
        method = getattr(config.speculative_config, "rejection_sample_method", "strict")
        manager = cls(
            config.structured_outputs_config or StructuredOutputsConfig(),
            engine.input_processor.require_tokenizer("structured_outputs"),
            model_config.vocab_size,
            model_config.eos_token_ids,
            method == "standard",
        )
        manager.reads_late = config.pipeline_parallel_size > 1
        engine.output_processor.finish_listeners.append(manager.forget)
        return manager

    def grammar_init(self, seq: Sequence) -> None:
        """Let `seq` wait for the grammar that seq.sampling_params.structured_outputs asks for.
        Raises ValueError for what every backend refuses."""
        params, config = seq.sampling_params.structured_outputs, self.config
        kind, text = params.key
        # Without a stop token the grammar ends where the model would say so; see is_terminated.
        stop_token_ids = seq.stop_token_ids or self.vocabulary.eos_token_ids
        no_whitespace = params.disable_any_whitespace or config.disable_any_whitespace
        no_others = params.disable_additional_properties or config.disable_additional_properties
        pattern = params.whitespace_pattern
        spec = GrammarSpec(kind, text, stop_token_ids, no_whitespace, no_others, pattern)
        key = choose_backend(config.backend, spec), spec
        request = StructuredOutputRequest(self, seq.request_id, key, seq.stop_token_ids)
        seq.structured_output_request, seq.gates = request, (*seq.gates, request)

    def compile_or_find(self, request: StructuredOutputRequest) -> Future[StructuredOutputGrammar]:
        """The grammar from the cache, or from now on on its way there. Raises RuntimeError after
        close()."""
        key = request.key
        with self._cache_lock:
            future = self._cache.get(key)
            if future is not None:
                self._cache.move_to_end(key)
                self._wanted_by.get(key, set()).add(request)
                return future
            future = self._cache[key] = self.executor.submit(self._compile, key)
            self._wanted_by[key] = {request}
        future.add_done_callback(self._shrink_cache)
        return future

    def forget(self, request: RequestConsumer) -> None:
        """A request has ended, and wants no grammar any more."""
        with self._cache_lock:
            for grammar in {seq.structured_output_request for seq in request.sequences} - {None}:
                self._wanted_by.get(grammar.key, set()).discard(grammar.root)

    def _compile(self, key: Key) -> StructuredOutputGrammar:
        """In a thread of the pool. Raises RequestError."""
        cls, spec = key
        with self._cache_lock:
            if not self._wanted_by.pop(key, None):
                self._cache.pop(key, None)
                raise RequestError("structured_outputs: nobody waits for this grammar")
        with Caught() as caught:
            with self._backend_lock:
                if cls.name not in self.backends:
                    self.backends[cls.name] = cls(self.vocabulary)
            backend = self.backends[cls.name]
            if backend.may_take_long(spec):
                self.guard.compile(cls.name, spec)
            return backend.compile_grammar(spec)
        error = caught.error
        assert error is not None
        if isinstance(error, ValueError):  # in the backend's words
            raise RequestError(f"structured_outputs: {error}") from None
        is_limit = isinstance(error, GuardError)
        why = str(error) if is_limit else describe_error(error)
        message = f"structured_outputs: {cls.name} cannot compile it: {why}"
        raise RequestError(message) from None if is_limit else error

    def _shrink_cache(self, _: object) -> None:
        """Drop what failed, and the grammars that were used least recently, down to the bound."""
        with self._cache_lock:
            sizes: dict[Key, int] = {}
            for key, future in list(self._cache.items()):
                if future.cancelled() or (future.done() and future.exception() is not None):
                    del self._cache[key]
                elif future.done():
                    sizes[key] = future.result().num_bytes
            total = sum(sizes.values())
            for key in list(sizes)[:-1]:  # the newest one stays
                if total <= CACHE_BYTES and len(self._cache) <= CACHE_ENTRIES:
                    break
                del self._cache[key]
                total -= sizes[key]

    def grammar_bitmask(
        self,
        batch: RequestState,
        rows: list[tuple[int, int, StructuredOutputRequest]],
        positions: np.ndarray,
    ) -> TokenBitmask:
        """What the grammars of these rows allow. A row has its place in the logits, its place in
        the batch, and its request; positions: of the tokens that are to be chosen, by the place in
        the logits. What the batch holds before these, behind the known tokens, is drafts.

        The step of these rows is read before the next call, or the bitmask is copied at once, so
        one buffer is enough.
        """
        device = batch.staging.device
        logits_rows = np.array([row for row, _, _ in rows])
        starts = batch.num_tokens[[row for _, row, _ in rows]].tolist()
        ends = positions[logits_rows].tolist()
        bitmask = self._bitmask
        if bitmask is None or len(bitmask) < len(rows):
            bitmask = self._bitmask = self.allocate_token_bitmask(len(rows))
            if device.type == "cuda":
                bitmask = self._bitmask = bitmask.pin_memory()
        for index, (_, row, request) in enumerate(rows):
            start, end = starts[index], ends[index]
            drafts = batch.token_ids[row, start:end].tolist() if start < end else []
            before = request.clock()
            request.fill_bitmask(bitmask, index, drafts)
            request.seconds += request.clock() - before
        sent = batch.staging.send(rows=logits_rows)["rows"]
        late = self.reads_late
        bits = bitmask[: len(rows)].to(device, non_blocking=not late, copy=late)
        self._kernel = self._kernel or BitmaskKernel(device)
        return TokenBitmask(sent, bits, self._kernel)

    def allocate_token_bitmask(self, num_rows: int) -> Tensor:
        """[num_rows, words] int32, on the CPU. A grammar must have been compiled."""
        backend, *_ = list(self.backends.values())
        return backend.allocate_token_bitmask(num_rows)

    def close(self) -> None:
        """End the process, and drop what waits to be compiled. A thread that compiles goes on to
        its end."""
        self.executor.shutdown(wait=False, cancel_futures=True)
        self.guard.close()
        with self._cache_lock:
            self._cache.clear()
            self._wanted_by.clear()
        for backend in list(self.backends.values()):  # a list: another thread may add one
            backend.destroy()


def get_manager(engine: LLMEngine) -> StructuredOutputManager:
    """The one manager of an engine. Raises ValueError if its tokenizer does not allow grammars."""
    with engine._admission:
        if engine.structured_output_manager is None:
            engine.structured_output_manager = StructuredOutputManager.from_engine(engine)
        manager: StructuredOutputManager = engine.structured_output_manager
        return manager


class StructuredOutputRequest:
    """The grammar of one sequence: compiling, failed, or at a place in its rules. A gate of the
    sequence.

    Invariant: between two steps, the grammar has accepted the output tokens that are known.
    """

    def __init__(
        self,
        manager: StructuredOutputManager,
        request_id: str,
        key: Key,
        stop_token_ids: frozenset[int],
        root: StructuredOutputRequest | None = None,
    ) -> None:
        """stop_token_ids: those of the request. If it has none (ignore_eos, for example), its
        output goes on as long as the grammar can, and ends then. root: that of the request's
        first sequence, which is the gate of all."""
        self.manager = manager
        self.request_id = request_id
        self.key = key
        self.root = root or self
        self.stop_token_ids = stop_token_ids
        self.num_tokens = 0  # that the grammar has accepted
        self._future: Future[StructuredOutputGrammar] | None = None  # of the root, from start() on
        self._grammar: StructuredOutputGrammar | None = None
        # What masks and tokens have taken, since `num_untimed` tokens. To ask how long the CPU has
        # worked for us takes as long as to accept a token. So it is asked only after the limit was
        # passed by a clock that also counts what the CPU did for others.
        self.seconds, self.num_untimed = 0.0, 0
        self.clock: Callable[[], float] = time.perf_counter

    def fork(self) -> StructuredOutputRequest:
        """For another completion: at the beginning of the same rules."""
        args = self.manager, self.request_id, self.key, self.stop_token_ids
        return StructuredOutputRequest(*args, self.root)

    # -- a gate --

    def start(self, fail: Callable[[BaseException], object]) -> None:
        """Begin to compile. `fail` is called if the grammar cannot be compiled."""

        def tell(future: Future[StructuredOutputGrammar]) -> None:
            error = CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                fail(error)

        try:
            self._future = self.manager.compile_or_find(self)
            self._future.add_done_callback(tell)
        except RuntimeError as error:  # the manager was closed, or there is no thread left
            fail(error)

    def is_open(self) -> bool:
        """True if the grammar is there. (If it has failed, the request is about to end.)"""
        future = self.root._future
        if future is None or not future.done():
            return False
        return not future.cancelled() and future.exception() is None

    @property
    def grammar(self) -> StructuredOutputGrammar:
        """What was compiled, at this sequence's place."""
        if self._grammar is None:
            assert self.root._future is not None
            self._grammar = self.root._future.result(timeout=0).fork()
        return self._grammar

    # -- tokens --

    def accept_tokens(self, tokens: tuple[int, ...]) -> str | None:
        """The sequence has these new tokens; those behind a stop token are dropped. If it must end
        with an error: why. (The grammar forbids a token that a logits processor has chosen, or it
        has taken too long.)"""
        before = self.clock()
        with Caught() as caught:
            grammar = self.grammar
            for index, token in enumerate(tokens):
                if index and grammar.is_terminated():
                    break
                if not grammar.accept_tokens(self.request_id, [token]):
                    return f"structured_outputs: the grammar does not allow token {token}"
                self.num_tokens += 1
        self.seconds += self.clock() - before
        if caught.error is not None:
            logger.error("the grammar of %r failed", self.request_id, exc_info=caught.error)
            return f"structured_outputs: the grammar failed: {describe_error(caught.error)}"
        if self.seconds > SECONDS + TOKEN_SECONDS * (self.num_tokens - self.num_untimed):
            if self.clock is time.thread_time:
                taken = f"{self.seconds:.1f} s"
                return f"structured_outputs: masks have taken {taken}. Nest and repeat less."
            self.seconds, self.num_untimed, self.clock = 0.0, self.num_tokens, time.thread_time
        return None

    def validate_drafts(self, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """The first of these drafts, as far as the grammar allows them. A RejectionSampler gets the
        first forbidden one, too: it is to be rejected, and what comes in its place depends on it
        (see the condition in extras/speculative/rejection.py)."""
        if not drafts or self.grammar.is_terminated():
            return ()
        before = self.clock()
        num_valid = len(self.grammar.validate_tokens(list(drafts)))
        self.seconds += self.clock() - before
        return drafts[: num_valid + self.manager.rejects_drafts]

    def rollback_to(self, num_tokens: int) -> None:
        """Take back all accepted tokens but the first `num_tokens`."""
        if self.num_tokens > num_tokens:
            self.grammar.rollback(self.num_tokens - num_tokens)
            self.num_tokens = num_tokens

    def is_terminated(self) -> bool:
        """True if nothing may follow: a stop token came, or no token can come."""
        if self.stop_token_ids:
            return self.grammar.is_terminated()
        bitmask = self.manager.allocate_token_bitmask(1)
        self.fill_bitmask(bitmask, 0, [])
        return not bitmask.any()

    def fill_bitmask(self, bitmask: Tensor, index: int, drafts: list[int]) -> None:
        """Write row `index`: the tokens that may come behind the known ones and the drafts. (Behind
        a draft that ends the text, or is not allowed, no token counts: any row will do.)"""
        grammar, num_accepted = self.grammar, 0
        for draft in drafts:
            if grammar.is_terminated() or not grammar.accept_tokens(self.request_id, [draft]):
                break
            num_accepted += 1
        if not drafts or not grammar.is_terminated():
            grammar.fill_bitmask(bitmask, index)
        if num_accepted:
            grammar.rollback(num_accepted)
        if not self.stop_token_ids:
            row = bitmask[index].numpy().view(np.uint8)
            for token_id in self.manager.vocabulary.eos_token_ids:
                row[token_id // 8] &= 255 - (1 << token_id % 8)
