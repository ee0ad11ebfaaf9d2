"""Which request makes the steps fail?

A step that fails may name no request: the model, the executor or the scheduler has raised. Then
the engine runs a request of its own (`make_probe`), which nobody's parameters can spoil. If this
fails too, no request is to blame. Otherwise the sequences of the failed step are *suspects*, and
the next steps run them apart, by halves. Of the requests a, b, c, d, the guilty one is c:

    step 1    a b c d    fails
    step 2        c d    fails: the last group runs first
    step 3          d    d gets a token: it is cleared
    step 4        c      fails alone
    step 5        c      fails alone again: c ends with this error
    step 6    a b        both get a token: the search is over

A sequence is cleared when it has got a token, or has ended; then it waits for the end of the
search, and so do new requests. A failure that does not come again ends nobody. With one guilty
request among the k of a step, at most log2(k) + 3 steps fail (rounded up).

vLLM: none. An error in EngineCore ends the engine and all requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from nanoserve.exceptions import describe_error
from nanoserve.interrupts import is_from_signal
from nanoserve.logger import init_logger
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import RequestMetrics, Sequence, SequenceStatus

if TYPE_CHECKING:
    from nanoserve.engine import LaunchedStep, LLMEngine

logger = init_logger(__name__)

PROBE_SEQ_ID = -1  # no request has it


def make_probe() -> Sequence:
    """A request that is known to be innocent: one token in, one greedy token out."""
    return Sequence(
        seq_id=PROBE_SEQ_ID,
        request_id="",
        prompt_token_ids=[0],
        sampling_params=SamplingParams(temperature=0, max_tokens=1, detokenize=False),
        max_tokens=1,
        stop_token_ids=frozenset(),
        seed=0,
        metrics=RequestMetrics(arrival_time=time.time(), queued_ts=time.monotonic()),
    )


class FaultSearch:
    """The search of one engine for the requests that make its steps fail.

    Invariant: a sequence is in at most one group, and was in a step that failed. Between two steps
    `groups` is empty, and `is_on` False, if every unfinished sequence may run.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        # seq_id -> its number of tokens when the step failed. The last group runs.
        self.groups: list[dict[int, int]] = []
        self.failed_alone: set[str] = set()  # request ids

    @property
    def is_on(self) -> bool:
        return bool(self.groups)

    def choose_group(self) -> None:
        """Before each step: let only the suspects run that are to be tried next, or all again if
        the search is over."""
        if self.is_on:
            with self.engine.changing():
                self._hold_all_but(self._next_group())

    def _hold_all_but(self, seq_ids: set[int] | None) -> None:
        """Let only these sequences run; None: all. The others give their blocks back; with prefix
        caching they find them again."""
        scheduler = self.engine.scheduler
        for seq in scheduler.sequences.values():
            seq.is_held = seq_ids is not None and seq.seq_id not in seq_ids
        for seq in [*scheduler.running, *scheduler.swapped]:
            if seq.is_held:
                scheduler._preempt(seq)

    def _next_group(self) -> set[int] | None:
        """The seq_ids of the last group that are not cleared; None if the search is over."""
        sequences = self.engine.scheduler.sequences
        while self.groups:
            group = {
                seq_id
                for seq_id, num_tokens in self.groups[-1].items()
                if seq_id in sequences and sequences[seq_id].num_tokens == num_tokens
            }
            if group:
                return group
            self.groups.pop()
        self.failed_alone.clear()
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
        engine, text = self.engine, describe_error(error)
        suspects = self._find_suspects(failed, in_flight)
        engine.recover()
        if not suspects or not self._can_serve():
            logger.error("a step failed, and this is no request's fault: %s", text)
            self.groups.clear()
            self.failed_alone.clear()
            raise error
        with engine.changing():
            guilty = self._blame(suspects)
            if guilty is not None:
                engine.hand_out(engine.output_processor.fail_request(guilty, error, suspects))
                return
        logger.error(
            "a step failed: %s. The %d sequences in it are computed again, some at a time, "
            "until the request that causes this is found.",
            *(text, len(suspects)),
        )

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
        """Does the probe get its token?"""
        engine, scheduler = self.engine, self.engine.scheduler
        try:
            with engine.changing():
                scheduler.add(make_probe())
                self._hold_all_but({PROBE_SEQ_ID})
                step = scheduler.schedule()
            output = engine.executor.execute_model(step)
            with engine.changing():
                scheduler.update_from_output(step, output)
            return PROBE_SEQ_ID not in scheduler.sequences
        except Exception as error:
            if is_from_signal(error):
                raise
            return False
        finally:
            engine.recover()

    def end_probe(self) -> None:
        """Recover from the probe's step, wherever it ended."""
        self._hold_all_but(None)
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

    def _blame(self, suspects: list[Sequence]) -> str | None:
        """Split the suspects into groups. Or, if all are one request's, and this has failed alone
        for the second time, return its id."""
        rest = self.groups.pop() if self.groups else {}
        for seq in suspects:
            rest.pop(seq.seq_id, None)
        self.groups += [rest] if rest else []
        request_ids = list(dict.fromkeys(seq.request_id for seq in suspects))
        if len(request_ids) == 1:
            if request_ids[0] in self.failed_alone:
                return request_ids[0]
            self.failed_alone.add(request_ids[0])
        middle = len(request_ids) // 2
        for half in (request_ids[:middle], request_ids[middle:]):
            group = {seq.seq_id: seq.num_tokens for seq in suspects if seq.request_id in half}
            self.groups += [group] if group else []
        return None
