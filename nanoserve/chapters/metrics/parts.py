"""What does counting change in the engine?

The scheduler counts. All that begins, runs, is preempted and ends passes its methods, whatever ends
it: a stop token, a stop string, an abort, an error. So nobody has to tell anybody.

Counted otherwise than in vLLM:

    iteration_tokens_total   the tokens that a step computes (vLLM: a prompt counts with its last
                             chunk, whole)
    prompt_tokens            when the prompt is admitted, once for n completions that fork (vLLM:
                             with the first output token, n times)
    request_success          aborted requests count, too
    latencies of a phase     only of requests that came into this phase
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from nanoserve.block_manager import BlockManager
from nanoserve.chapters.metrics.numbers import Numbers
from nanoserve.chapters.metrics.reader import Metric, read_metrics
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.llm import LLM
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import (
    ModelOutput,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)


@dataclass(frozen=True)
class MetricsConfig(EngineConfig):
    # Count what the engine does, for LLM.get_metrics and a server's /metrics.
    collect_metrics: bool = False


@dataclass(eq=False)
class MetricsSequence(Sequence):
    last_result_ts: float | None = field(default=None, init=False)  # of a token, or a vector
    # Output lengths of the request's completions that have ended. All branches share the list.
    output_lengths: list[int] = field(default_factory=list)


class MetricsScheduler(Scheduler):
    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        super().__init__(config, block_manager)
        speculative = getattr(config, "speculative_config", None)
        num_drafts = speculative.num_speculative_tokens if speculative else 0
        self.numbers = Numbers(str(config.model or "demo"), config.max_model_len, num_drafts)
        self.ended: deque[Sequence] = deque()  # not counted yet: see count_ended
        watch = self.numbers.watch
        watch("num_requests_running", lambda: len(self.running))
        watch("num_requests_waiting", lambda: len(self.waiting) + len(self.swapped))
        watch("kv_cache_usage_perc", self.kv_cache_usage)

    def kv_cache_usage(self) -> float:
        pool = self.block_manager.pool
        return 1 - len(pool.free_queue) / pool.num_blocks

    def schedule(self) -> SchedulerOutput:
        self.count_ended()
        output = super().schedule()
        if output.scheduled:
            number = sum(item.num_scheduled_tokens for item in output.scheduled)
            self.numbers.observe("iteration_tokens_total", number)
        return output

    def admit(self, seq: Sequence, step: StepPlan) -> bool:
        """Count a prompt, and what the caches have of it, when it runs for the first time."""
        is_first, hits_before = seq.metrics.scheduled_ts is None, self.num_external_hits()
        is_admitted = super().admit(seq, step)
        if is_first and is_admitted:
            self.count_prompt(seq, self.num_external_hits() - hits_before)
        return is_admitted

    def num_external_hits(self) -> int:
        """Of kv_offload, if it is in the stack."""
        return getattr(self.block_manager, "num_external_hit_tokens", 0)

    def count_prompt(self, seq: Sequence, num_external: int) -> None:
        add, number, num_cached = self.numbers.add, seq.num_prompt_tokens, seq.num_cached_tokens
        num_local = num_cached - num_external
        add("prompt_tokens", number)
        add("prompt_tokens_cached", num_cached)
        add("prompt_tokens_by_source", number - num_cached, "local_compute")
        add("prompt_tokens_by_source", num_local, "local_cache_hit")
        add("prompt_tokens_by_source", num_external, "external_kv_transfer")
        reads_cache = not seq.sampling_params.skip_reading_prefix_cache
        if reads_cache and self.config.enable_prefix_caching:
            add("prefix_cache_queries", number)
            add("prefix_cache_hits", num_local)
            if hasattr(self.block_manager, "num_external_hit_tokens"):
                add("external_prefix_cache_queries", number - num_local)
                add("external_prefix_cache_hits", num_external)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        """Count the new tokens, and the time since the last one."""
        updates = super().update_from_output(scheduler_output, model_output)
        now = time.monotonic()
        for update in updates:
            seq = update.sequence
            if not (update.tokens or seq.status.finish_reason):
                continue  # logprobs of a chunk of a prompt
            last, seq.last_result_ts = seq.last_result_ts, now
            if last is None:
                self.numbers.observe("time_to_first_token_seconds", now - seq.metrics.queued_ts)
            else:
                self.numbers.observe("inter_token_latency_seconds", now - last)
        self.numbers.add("generation_tokens", sum(len(update.tokens) for update in updates))
        self.numbers.log(now)
        return updates

    def update_sequence(
        self, seq: Sequence, item: ScheduledSequence, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        """Count the drafts: the tokens of the step behind those that are known."""
        num_drafts = item.num_computed_tokens + item.num_scheduled_tokens - seq.num_tokens
        tokens = model_output.sampled.get(seq.seq_id)
        if num_drafts > 0 and tokens:
            self.numbers.add("spec_decode_num_drafts")
            self.numbers.add("spec_decode_num_draft_tokens", num_drafts)
            self.numbers.add("spec_decode_num_accepted_tokens", len(tokens) - 1)
            for position in range(len(tokens) - 1):
                self.numbers.add("spec_decode_num_accepted_tokens_per_pos", 1, str(position))
        return super().update_sequence(seq, item, model_output)

    def preempt(self, seq: Sequence) -> None:
        super().preempt(seq)
        self.numbers.add("num_preemptions")

    def finish(self, seq_id: int, status: SequenceStatus) -> None:
        seq = self.sequences.get(seq_id)
        super().finish(seq_id, status)
        if seq is not None:
            self.ended.append(seq)

    def count_ended(self) -> None:
        """Count the completions that have ended, one step later, or when somebody asks: only then
        it is known whether the last token has brought a stop string. Any thread may call this."""
        with suppress(IndexError):
            while self.ended:
                self.count_life(self.ended.popleft())

    def count_life(self, seq: Sequence) -> None:
        """A completion has ended."""
        observe, metrics, params = self.numbers.observe, seq.metrics, seq.sampling_params
        self.numbers.add("request_success", 1, str(seq.status.finish_reason))
        observe("e2e_request_latency_seconds", metrics.finished_ts - metrics.queued_ts)
        observe("request_prompt_tokens", seq.num_prompt_tokens)
        observe("request_generation_tokens", seq.num_output_tokens)
        observe("request_num_preemptions", metrics.num_preemptions)
        if params.max_tokens is not None:
            observe("request_params_max_tokens", params.max_tokens)
        if (begin := metrics.scheduled_ts) is not None:
            observe("request_queue_time_seconds", begin - metrics.queued_ts)
        if begin is not None and metrics.first_token_ts is not None:
            first, last = metrics.first_token_ts, metrics.last_token_ts
            num_gaps = max(1, seq.num_output_tokens - 1)
            observe("request_prefill_time_seconds", first - begin)
            observe("request_decode_time_seconds", last - first)
            observe("request_inference_time_seconds", last - begin)
            observe("request_time_per_output_token_seconds", (last - first) / num_gaps)
            num_computed = seq.num_prompt_tokens - seq.num_cached_tokens
            observe("request_prefill_kv_computed_tokens", num_computed)
        seq.output_lengths.append(seq.num_output_tokens)
        if len(seq.output_lengths) == params.n:
            observe("request_params_n", params.n)
            observe("request_max_num_generation_tokens", max(seq.output_lengths))


class MetricsEngine(LLMEngine):
    def get_metrics(self) -> list[Metric]:
        """Every metric as it is now. Any thread may call this."""
        self.scheduler.count_ended()
        return list(read_metrics(self.scheduler.numbers.registry))

    def render_metrics(self) -> bytes:
        """The same in Prometheus' text format, for a server's /metrics."""
        self.scheduler.count_ended()
        return self.scheduler.numbers.render()


class MetricsLLM(LLM):
    def get_metrics(self) -> list[Metric]:
        """Every metric as it is now."""
        return self.engine.get_metrics()


PARTS = {
    "llm_cls": MetricsLLM,
    "config_cls": MetricsConfig,
    "sequence_cls": MetricsSequence,
    "engine_cls": MetricsEngine,
    "scheduler_cls": MetricsScheduler,
}
