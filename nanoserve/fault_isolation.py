"""Which request makes the steps fail?

A step that fails may name no request: the model, the executor or the scheduler has raised. Then
the engine runs a request of its own (`make_probe`), which nobody's parameters can spoil: a prefill
of two tokens and a decode. If this fails too, no request is to blame. Otherwise the requests of the
failed step are *suspects*, and the next steps run them apart, by halves. Of the requests a, b, c,
d, the guilty one is c:

    step 1       a b c d    fails
    step 2           c d    fails: the last group runs first
    steps 3, 4         d    d gets two tokens: it is cleared
    step 5           c      fails alone
    step 6           c      fails alone again: c is guilty
    steps 7, 8   a b        both get two tokens: the search is over, c ends with this error

A sequence is cleared when it has got two tokens or has ended. The first token comes from a prefill
of all that was known, the second from a decode, so code that fails at one of the two is found. A
cleared sequence waits for the end of the search, and so do new requests.

A failure that does not come again ends nobody. After such a search its suspects must get twice as
many tokens in their next one: 4, 8, 16 ... So what fails at every m-th token only is found, too.

*How many steps fail.* In one search with one guilty request among the k of a step: at most
log2(k) + 3 (rounded up). A request of max_tokens tokens is in at most log2(max_tokens) + 1 searches
that find nobody.

*Nobody's fault.* step() raises what makes the probe fail, and NotImplementedError: it stands where
code is to be written, and no request can write it. All requests stay. If the suspects fail one by
one, all with the same type of error, and no other request is left, step() raises this error: the
code cannot serve anybody. The requests end with it then, otherwise each next step would repeat the
search.

vLLM: none. An error in EngineCore ends the engine and all requests.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanoserve.exceptions import RequestError, describe_error
from nanoserve.interrupts import unless_signal
from nanoserve.logger import init_logger
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import RequestMetrics, Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanoserve.engine import LaunchedStep, LLMEngine
    from nanoserve.scheduler import Scheduler

logger = init_logger(__name__)

IDLE_PAUSE = 0.001  # seconds after a step without work: other threads do what sequences wait for
IDLE_SECONDS = 5  # without work, until a warning
STALL_SECONDS = 60  # until it is an error
PROBE_SEQ_ID = -1  # no request has it


def make_probe(max_model_len: int) -> Sequence:
    """A request that is known to be innocent: two tokens in, two greedy tokens out, or fewer if
    max_model_len is below 4."""
    num_prompt_tokens = min(2, max_model_len - 1)
    max_tokens = min(2, max_model_len - num_prompt_tokens)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, detokenize=False)
    params.skip_reading_prefix_cache = True  # all of it is computed, and waits for nothing
    return Sequence(
        seq_id=PROBE_SEQ_ID,
        request_id="",
        prompt_token_ids=[0] * num_prompt_tokens,
        sampling_params=params,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        seed=0,
        metrics=RequestMetrics(arrival_time=time.time(), queued_ts=time.monotonic()),
    )


def is_unwritten(error: BaseException) -> bool:
    """Does the error say that code is still to be written? torch raises NotImplementedError, too,
    when a device or a dtype lacks an operator. This can be one request's fault."""
    text = describe_error(error)
    is_torch = "aten::" in text or "not implemented for '" in text
    return isinstance(error, NotImplementedError) and not is_torch


class IdleWatch:
    """Warns if steps have nothing to do for IDLE_SECONDS while requests are unfinished, and fails
    the step after STALL_SECONDS: a scheduler or block manager of one's own may never let them run.

    A sequence that is not ready may wait longer: what it waits for has limits of its own.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self._idle_since: float | None = None
        self._has_warned = False

    def note(self, is_empty: bool) -> None:
        """A step was scheduled; is_empty: with nothing in it. Raises RuntimeError."""
        number = self.engine.get_num_unfinished_requests()
        if not is_empty or not number or self.engine._in_flight:
            self._idle_since, self._has_warned = None, False
            return
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        message = f"{number} requests are unfinished, and no step has had work for %d s. "
        if now - self._idle_since >= IDLE_SECONDS and not self._has_warned:
            self._has_warned = True
            message += "nanoserve.tools.why_waiting says what a sequence waits for; "
            logger.warning(message + "abort_request ends a request.", IDLE_SECONDS)
        sequences = self.engine.scheduler.sequences.values()
        if now - self._idle_since >= STALL_SECONDS and all(seq.is_ready() for seq in sequences):
            self._idle_since = None
            raise RuntimeError(
                message % STALL_SECONDS + "All are ready: the scheduler or the block manager does "
                "not let them run."
            )
        time.sleep(IDLE_PAUSE)


class FaultSearch:
    """The search of one engine for the requests that make its steps fail.

    Invariant: a request is in at most one group, or in `guilty`, and was in a step that failed.
    Between two steps all is empty, and `is_on` False, if every unfinished sequence may run.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.groups: list[set[str]] = []  # request ids. The last group runs.
        self.suspects: set[str] = set()  # all request ids of this search
        self.num_alone: Counter[str] = Counter()  # request id -> steps that failed with it alone
        self.guilty: dict[str, Exception] = {}  # they end when the search is over
        # request id -> earlier searches that found nobody
        self.num_in_vain: Counter[str] = Counter()
        self._known_error: object = None  # the last one in the log

    @property
    def is_on(self) -> bool:
        return bool(self.suspects)

    def choose_group(self) -> None:
        """Before each step: let only the suspects run that are to be tried next, or all again if
        the search is over."""
        if self.is_on:
            with self.engine.changing():
                group = self._next_group()
                if group is None:
                    self._end()
                hold(self.engine.scheduler, group)

    def _next_group(self) -> set[int] | None:
        """The seq_ids of the last group that are not cleared; None if there are no more."""
        sequences = self.engine.scheduler.sequences.values()
        while self.groups:
            its = [seq for seq in sequences if seq.request_id in self.groups[-1]]
            if group := {seq.seq_id for seq in its if seq.num_tokens < seq.cleared_at}:
                return group
            self.groups.pop()
        return None

    def skip_group(self) -> None:
        """None of the group can run now (its sequences are not ready): go on with the others."""
        del self.groups[-1:]

    def isolate(
        self, error: Exception, failed: LaunchedStep | None, in_flight: Iterable[LaunchedStep]
    ) -> None:
        """A step has failed: find out whose fault it is, now or in the next steps.

        failed: None if the step was still being decided. Raises `error` if it is no request's
        fault.
        """
        suspects = self._find_suspects(failed, in_flight)
        self.engine.recover()
        if is_unwritten(error) or not suspects or not self._can_serve():
            logger.error("a step failed, and this is no request's fault: %s", describe_error(error))
            self._forget()
            raise error
        self._log(error, suspects)
        with self.engine.changing():
            self._blame(suspects, error)
            if self._next_group() is None and self._end():
                raise error

    def _find_suspects(
        self, failed: LaunchedStep | None, in_flight: Iterable[LaunchedStep]
    ) -> list[Sequence]:
        """The unfinished sequences of these steps; if the step was still being decided, all that
        may run."""
        sequences = self.engine.scheduler.sequences
        if failed is None:
            seq_ids = self._next_group() or set(sequences)
        else:
            steps = [step.scheduler_output for step in (failed, *in_flight)]
            seq_ids = {item.seq_id for step in steps for item in step.scheduled}
        return [sequences[seq_id] for seq_id in sorted(seq_ids) if seq_id in sequences]

    def _can_serve(self) -> bool:
        """Does the probe get its tokens?"""
        engine, scheduler = self.engine, self.engine.scheduler
        capacity = engine.executor.num_kv_blocks * engine.config.block_size
        try:
            with engine.changing():
                scheduler.add(make_probe(min(capacity, engine.config.max_model_len or capacity)))
                hold(scheduler, {PROBE_SEQ_ID})
            for _ in range(3):  # with a budget of one token, the prefill takes two steps
                with engine.changing():
                    step = scheduler.schedule()
                if step.is_empty:
                    break
                output = engine.executor.execute_model(step)
                with engine.changing():
                    scheduler.update_from_output(step, output)
            return PROBE_SEQ_ID not in scheduler.sequences
        except unless_signal(Exception):
            return False
        finally:
            engine.recover()

    def end_probe(self) -> None:
        """Recover from the probe's step, wherever it ended."""
        hold(self.engine.scheduler, None)
        self.engine.scheduler.finish(PROBE_SEQ_ID, SequenceStatus.FINISHED_ABORTED)

    @contextmanager
    def undone_if_failed(self, sequences: list[Sequence]) -> Iterator[None]:
        """Around the update of a step's unfinished sequences. If it fails, nobody has been told of
        its tokens and forks: they are taken back, and recover() must follow."""
        before = [(seq.num_tokens, seq.num_pending_forks) for seq in sequences]
        try:
            yield
        except BaseException:
            known = self.engine.scheduler.sequences
            for seq, (num_tokens, num_forks) in zip(sequences, before, strict=True):
                for branch in range(1, num_forks + 1):
                    known.pop(seq.seq_id + branch, None)
                del seq.token_ids[num_tokens:]
                if (grammar := seq.structured_output_request) is not None:
                    grammar.rollback_to(seq.num_output_tokens)
                seq.num_pending_forks, seq.stop_reason = num_forks, None
                seq.metrics.num_generation_tokens = seq.num_output_tokens
                known[seq.seq_id] = seq  # it may have been finished
            raise

    def end_lost_requests(self) -> None:
        """A step failed while it ended sequences. End the requests of which the scheduler has none
        any more: no step would bring their end."""
        engine, known = self.engine, self.engine.scheduler.sequences
        for request in list(engine.output_processor.requests.values()):
            may_go_on = [  # those that wait may be in the inbox
                seq.seq_id in known or seq.status is SequenceStatus.WAITING
                for seq in request.sequences
            ]
            if not any(may_go_on):
                error = RuntimeError("the step that ended the sequences of this request failed")
                fail_request = engine.output_processor.fail_request
                engine.hand_out(fail_request(request.request_id, error, ()))

    def _blame(self, suspects: list[Sequence], error: Exception) -> None:
        """Split the suspects into groups. Or, if all are one request's, and this has failed alone
        for the second time, find it guilty."""
        request_ids = list(dict.fromkeys(seq.request_id for seq in suspects))
        for seq in suspects:
            seq.cleared_at = seq.num_tokens + (2 << self.num_in_vain[seq.request_id])
        self.suspects.update(request_ids)
        self.groups = [rest for group in self.groups if (rest := group.difference(request_ids))]
        if len(request_ids) == 1:
            self.num_alone.update(request_ids)
            if self.num_alone[request_ids[0]] > 1:
                self.guilty[request_ids[0]] = error
                return
        middle = len(request_ids) // 2
        halves = (request_ids[:middle], request_ids[middle:])
        self.groups += [set(half) for half in halves if half]

    def _end(self) -> bool:
        """The search is over: end the guilty requests. True if every request was guilty of the
        same, so that the code is at fault."""
        engine, sequences = self.engine, list(self.engine.scheduler.sequences.values())
        for request_id, error in self.guilty.items():
            if engine.is_unfinished(request_id):  # not aborted meanwhile
                its = [seq for seq in sequences if seq.request_id == request_id]
                fault = RequestError(describe_error(error))  # the log has the traceback already
                engine.hand_out(engine.output_processor.fail_request(request_id, fault, its))
        if not self.guilty:
            self.num_in_vain.update(self.suspects)
        for request_id in list(self.num_in_vain):
            if not engine.is_unfinished(request_id):
                del self.num_in_vain[request_id]
        is_same = len({type(error) for error in self.guilty.values()}) == 1
        is_all = len(self.guilty) > 1 and self.guilty.keys() == self.suspects
        self._forget()
        return is_same and is_all and not engine.get_num_unfinished_requests()

    def _forget(self) -> None:
        """No request is a suspect any more."""
        for record in (self.groups, self.suspects, self.num_alone, self.guilty):
            record.clear()

    def _log(self, error: Exception, suspects: list[Sequence]) -> None:
        """One line for a step that failed; for an error that is new, with its traceback."""
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        text = describe_error(error)
        where = place and (place.tb_frame.f_code.co_filename, place.tb_lineno)
        if self._known_error == (text, where):
            logger.error("a step failed: the same error again (%s).", text)
            return
        self._known_error = (text, where)
        number = len(suspects)
        logger.error(
            "a step failed: %s. %s computed again, some at a time, until the request that causes "
            "this is found.",
            *(text, f"Its {number} sequences are" if number > 1 else "The one sequence in it is"),
            exc_info=error,
        )


def hold(scheduler: Scheduler, keep: Collection[int] | None) -> None:
    """Let only the sequences with the seq_ids `keep` run (None: all), until the next call. The
    others wait and give their blocks back. A sequence that is added later is not held."""
    for seq in scheduler.sequences.values():
        seq.is_held = keep is not None and seq.seq_id not in keep
    for seq in [*scheduler.running, *scheduler.swapped]:
        if seq.is_held:
            scheduler.preempt(seq)
