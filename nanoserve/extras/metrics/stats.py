"""What did a step bring, and what was a request's life?

The engine tells its listeners of each step (StepReport), and of each request that has ended.
`StatsCollector` makes numbers of both. Of a step that gave two sequences a token, the first token
of one and the last of the other:

    num_scheduled_tokens        9      eight of a prompt, one of a decode
    num_generation_tokens       2
    time_to_first_tokens_iter   [0.31]
    inter_token_latencies_iter  {0.02: 1}      seconds -> how often

As in vLLM, what is called a request in a metric's name is one *completion*: a request with n = 3
counts three times under request_success, and each completion has latencies of its own.
request_params_n and request_max_num_generation_tokens count it once. A latency begins at the
request's arrival_time, which a server may have set before the prompt was tokenized.

Counted otherwise than in vLLM, because there is more to know here, or less to do:

    iteration_tokens_total   the tokens that the step computed (vLLM: a prompt counts with its last
                             chunk, whole)
    prompt_tokens            n completions that fork share one prompt, which is computed once
    request_success          aborted requests count, too
    latencies of a phase     only of requests that came into this phase: one that was aborted in the
                             queue has an end-to-end latency, and no prefill time

Of a beam search, tokens and steps count; it is no request with completions. A request for a vector
has no tokens; its "time to first token" is that to the vector, as in vLLM.

vLLM: vllm/v1/metrics/stats.py, vllm/v1/spec_decode/metrics.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanoserve.extras.metrics.perf import ModelMetrics, PerfStats
from nanoserve.output_processor import RequestConsumer, RequestState
from nanoserve.sampling_params import SamplingParams
from nanoserve.sequence import RequestMetrics, Sequence, SequenceUpdate

if TYPE_CHECKING:
    from nanoserve.engine import LLMEngine, StepReport

NO_WORK = PerfStats()


@dataclass(slots=True)
class FinishedRequestStats:
    """The life of one completion. Times are in seconds; None for a phase that it did not reach."""

    request_id: str
    finish_reason: str  # "stop", "length", "abort" or "error"
    e2e_latency: float
    num_prompt_tokens: int
    num_generation_tokens: int
    num_preemptions: int
    max_tokens_param: int | None
    sampling_params: SamplingParams
    trace_headers: Mapping[str, str] | None = None  # of the caller's trace
    time_to_first_token: float | None = None
    queued_time: float | None = None
    prefill_time: float | None = None
    inference_time: float | None = None
    decode_time: float | None = None
    mean_time_per_output_token: float | None = None  # 0 with one token, as in vLLM
    num_computed_prompt_tokens: int | None = None  # the others were in the prefix cache


@dataclass(slots=True)
class SpecDecodingStats:
    """What became of the drafts of one step."""

    num_drafts: int = 0  # sequences that had some
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)  # first drafts first

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """The drafts of one sequence were verified."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        missing = num_draft_tokens - len(self.num_accepted_tokens_per_pos)
        self.num_accepted_tokens_per_pos += [0] * missing
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1


@dataclass(slots=True)
class IterationStats:
    """What one step brought, or the end of one request between two steps."""

    num_scheduled_tokens: int = 0
    step_time: float = 0.0  # seconds: to decide, to compute, to update
    num_generation_tokens: int = 0
    num_prompt_tokens: int = 0  # of prompts whose first output token this step brought
    num_cached_prompt_tokens: int = 0  # of these, found in the prefix cache, or in another tier
    num_external_prompt_tokens: int = 0  # of these, found in another tier
    num_preempted_reqs: int = 0
    prefix_cache_queries: int = 0  # prompt tokens of the sequences admitted for the first time
    prefix_cache_hits: int = 0
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    # Seconds -> how often. In most steps all running sequences have the same.
    inter_token_latencies_iter: dict[float, int] = field(default_factory=dict)
    perf_stats: PerfStats = NO_WORK
    spec_decoding_stats: SpecDecodingStats | None = None  # None: the step verified no drafts
    finished_requests: tuple[FinishedRequestStats, ...] = ()
    n_params_iter: tuple[int, ...] = ()
    max_num_generation_tokens_iter: tuple[int, ...] = ()


class _Known:
    """A sequence that was seen, and how many of its preemptions were counted."""

    __slots__ = ("num_preemptions", "sequence")

    def __init__(self, sequence: Sequence, num_preemptions: int) -> None:
        self.sequence = sequence
        self.num_preemptions = num_preemptions

    def take_preemptions(self) -> int:
        """How often it was preempted since the last call."""
        before, self.num_preemptions = self.num_preemptions, self.sequence.metrics.num_preemptions
        return self.num_preemptions - before


class StatsCollector:
    """Makes numbers of what the engine tells. The engine's thread calls it, step by step."""

    def __init__(self, engine: LLMEngine) -> None:
        self.scheduler = engine.scheduler
        self.num_forks = (engine.config.max_num_seqs or 1) - 1  # of one request at most
        self.has_prefix_cache = engine.config.enable_prefix_caching
        self.speculates = engine.config.speculative_config is not None
        self.model_metrics = ModelMetrics(engine)
        self._known: dict[int, _Known] = {}  # by seq_id
        self._last_token_ts: dict[int, float] = {}  # seq_id -> when its last token came

    def read_step(self, report: StepReport) -> IterationStats:
        """What a step brought."""
        output, known = report.scheduler_output, self._known
        step_time = report.schedule_time + report.execute_time + report.update_time
        stats = IterationStats(output.total_num_scheduled_tokens, step_time)
        for seq_id in list(known) if output.is_restart else output.finished_seq_ids:
            if seq_id in known:  # finished, or preempted
                stats.num_preempted_reqs += known[seq_id].take_preemptions()
        for new in output.new_sequences:
            seq = report.sequences.get(new.seq_id)
            if seq is not None and new.seq_id not in known:
                self._admit(seq, len(new.token_ids) == new.num_prompt_tokens, stats)
        self._read_tokens(report.updates, stats)
        for update in report.updates:
            if update.pooler_output is not None:
                self._take_vector(update.sequence, stats)
            if update.sequence.status.finish_reason is not None:
                stats.num_preempted_reqs += self._forget(update.sequence.seq_id)
        num_rows = min(len(report.updates), len(output.scheduled))  # forks share a row
        if self.speculates and (drafts := _read_drafts(report)).num_drafts:
            stats.spec_decoding_stats = drafts
            num_rows += drafts.num_draft_tokens
        stats.perf_stats = self.model_metrics.measure(output, num_rows)
        if len(known) > 2 * len(self.scheduler.sequences) + 100:
            for seq_id, each in list(known.items()):  # those whose end no update told
                if each.sequence.status.finish_reason is not None:
                    stats.num_preempted_reqs += self._forget(seq_id)
        return stats

    def _forget(self, seq_id: int) -> int:
        """Forget a finished sequence; returns its preemptions that were not counted yet."""
        self._last_token_ts.pop(seq_id, None)
        known = self._known.pop(seq_id, None)
        return known.take_preemptions() if known else 0

    def _admit(self, seq: Sequence, is_first: bool, stats: IterationStats) -> None:
        """A sequence is seen for the first time. is_first: it has no output yet. (A fork, or one
        that ran before anybody listened, has.)"""
        known = _Known(seq, 0 if is_first else seq.metrics.num_preemptions)
        stats.num_preempted_reqs += known.take_preemptions()
        self._known[seq.seq_id] = known
        reads_cache = self.has_prefix_cache and not seq.sampling_params.skip_reading_prefix_cache
        if is_first and reads_cache:
            stats.prefix_cache_queries += seq.num_prompt_tokens
            stats.prefix_cache_hits += seq.num_cached_tokens - seq.num_external_computed_tokens

    def _read_tokens(self, updates: list[SequenceUpdate], stats: IterationStats) -> None:
        """New tokens, and the times between them. Of the whole chapter, this alone is done for each
        sequence of each step; hence the few calls, of C."""
        brought = [update for update in updates if update.new_token_ids]
        if not brought:
            return
        stats.num_generation_tokens = sum([len(update.new_token_ids) for update in brought])
        seq_ids = [update.sequence.seq_id for update in brought]
        now = brought[0].sequence.metrics.last_token_ts or 0.0  # a step's tokens come at once
        before = list(map(self._last_token_ts.get, seq_ids))
        if None in before:
            for update in brought:
                if update.sequence.seq_id not in self._last_token_ts:
                    self._take_first_token(update, now, stats)
        for last in set(before):  # nearly always one
            if last is not None:
                latency = now - last
                number = stats.inter_token_latencies_iter.get(latency, 0) + before.count(last)
                stats.inter_token_latencies_iter[latency] = number
        self._last_token_ts.update(dict.fromkeys(seq_ids, now))

    def _take_first_token(self, update: SequenceUpdate, now: float, stats: IterationStats) -> None:
        """The first tokens of a sequence that are seen here."""
        seq = update.sequence
        if seq.seq_id not in self._known:  # a fork
            self._known[seq.seq_id] = _Known(seq, seq.metrics.num_preemptions)
        if seq.num_output_tokens > len(update.new_token_ids):
            return  # a beam, which goes on with another one's tokens; or nobody listened before
        if not seq.always_sync:  # no beam
            stats.time_to_first_tokens_iter.append(now - arrival_of(seq.metrics))
        if not self._is_fork(seq):
            stats.num_prompt_tokens += seq.num_prompt_tokens
            stats.num_cached_prompt_tokens += seq.num_cached_tokens
            stats.num_external_prompt_tokens += seq.num_external_computed_tokens

    def _take_vector(self, seq: Sequence, stats: IterationStats) -> None:
        """The vector of a pooling model: it counts as a first token that is no token."""
        now = seq.metrics.finished_ts or time.monotonic()
        stats.time_to_first_tokens_iter.append(now - arrival_of(seq.metrics))
        stats.num_prompt_tokens += seq.num_prompt_tokens
        stats.num_cached_prompt_tokens += seq.num_cached_tokens

    def _is_fork(self, seq: Sequence) -> bool:
        """Did it begin with the prompt of another sequence? (Of more than max_num_seqs completions,
        the last ones are queued on their own.)"""
        return 0 < seq.branch <= self.num_forks

    def read_finished(self, request: RequestConsumer) -> IterationStats:
        """The lives of a request's n completions, also of those that never began. (Nothing, if the
        request is a beam search.)"""
        stats, now = IterationStats(), time.monotonic()
        state = getattr(request, "request", request)  # of an AsyncLLM: behind a collector
        if not isinstance(state, RequestState):
            return stats
        root, sequences = state.root, state.sequences
        reason = root.status.finish_reason or "abort"  # None: it was not queued yet
        n = root.sampling_params.n
        missing = set(range(n)) - {seq.branch for seq in sequences}
        for seq in sequences:
            stats.num_preempted_reqs += self._take_last_preemptions(seq)
        sequences += [root.make_branch(branch) for branch in missing]
        headers = getattr(request, "trace_headers", None)
        lives = [self._finish(seq, reason, now, headers) for seq in sequences]
        stats.finished_requests = tuple(lives)
        stats.n_params_iter = (n,)
        stats.max_num_generation_tokens_iter = (max(s.num_output_tokens for s in sequences),)
        return stats

    def _take_last_preemptions(self, seq: Sequence) -> int:
        """The preemptions that no report tells: the sequence has ended before its next step."""
        known = self._known.get(seq.seq_id)
        if known is None:
            # With tokens: it was forgotten, because it ended before the request's others did; or
            # the report of its first token is about to come.
            if not seq.metrics.num_preemptions or seq.num_output_tokens:
                return 0
            known = self._known[seq.seq_id] = _Known(seq, 0)
        return known.take_preemptions()

    def _finish(
        self, seq: Sequence, default_reason: str, now: float, headers: Mapping[str, str] | None
    ) -> FinishedRequestStats:
        metrics, num_tokens = seq.metrics, seq.num_output_tokens
        stats = FinishedRequestStats(
            request_id=seq.request_id,
            finish_reason=seq.status.finish_reason or default_reason,
            e2e_latency=(metrics.finished_ts or now) - arrival_of(metrics),
            num_prompt_tokens=seq.num_prompt_tokens,
            num_generation_tokens=num_tokens,
            num_preemptions=metrics.num_preemptions,
            max_tokens_param=seq.sampling_params.max_tokens,
            sampling_params=seq.sampling_params,
            trace_headers=headers,
            queued_time=metrics.queue_time,
        )
        scheduled, first, last = metrics.scheduled_ts, metrics.first_token_ts, metrics.last_token_ts
        if num_tokens and scheduled is not None and first is not None and last is not None:
            stats.time_to_first_token = first - arrival_of(metrics)
            stats.prefill_time = first - scheduled
            stats.inference_time = last - scheduled
            stats.decode_time = last - first
            stats.mean_time_per_output_token = metrics.inter_token_latency(num_tokens) or 0.0
            computed = 0 if self._is_fork(seq) else seq.num_prompt_tokens - seq.num_cached_tokens
            stats.num_computed_prompt_tokens = computed
        return stats


def _read_drafts(report: StepReport) -> SpecDecodingStats:
    """What became of a step's drafts. (Of a sequence that was aborted meanwhile, nobody knows.)"""
    numbers = {i.seq_id: len(i.draft_token_ids) for i in report.scheduler_output.scheduled}
    stats = SpecDecodingStats()
    for update in report.updates:
        number = numbers.get(update.sequence.seq_id, 0)
        if number and update.error is None:
            stats.observe_draft(number, update.num_accepted_tokens)
    return stats


def arrival_of(metrics: RequestMetrics) -> float:
    """When a request arrived, on the clock of time.monotonic() as the other moments: when it was
    queued, or before, if the caller has said so with an arrival_time."""
    age = time.time() - metrics.arrival_time
    return min(metrics.queued_ts, time.monotonic() - age)
