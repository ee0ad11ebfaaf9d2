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

A completion that has ended is noted, counted, and has its span sent behind the step: only then it
is known whether the last token has brought a stop string.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.chapters.metrics.reader import Metric, read_metrics
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.llm import LLM
from nanoserve.output_processor import Request
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import (
    ModelOutput,
    ScheduledSequence,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)


def load(name: str, extra: str) -> Any:
    """A module of this chapter. Raises ModuleNotFoundError, which says what to install."""
    try:
        return import_module(f"nanoserve.chapters.metrics.{name}")
    except ModuleNotFoundError as error:
        message = f'a package is missing ({error}): pip install "nanoserve[{extra}]".'
        raise ModuleNotFoundError(message, name=error.name) from error


@dataclass(frozen=True)
class MetricsConfig(EngineConfig):
    # Count what the engine does, for LLM.get_metrics and a server's /metrics.
    collect_metrics: bool = False
    # Address of a collector of OpenTelemetry, which gets a span of each request.
    otlp_traces_endpoint: str | None = None


@dataclass(eq=False)
class MetricsSequence(Sequence):
    last_result_ts: float | None = field(default=None, init=False)  # of a token, or a vector
    # Output lengths of the request's completions that have ended. All branches share the list.
    output_lengths: list[int] = field(default_factory=list)
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # of the caller's span


def latencies_of(seq: Sequence) -> dict[str, float]:
    """Seconds of the parts of its life that a completion, which has ended, came into."""
    life = seq.metrics
    moments = {
        "e2e": (life.queued_ts, life.finished_ts),
        "time_to_first_token": (life.queued_ts, life.first_token_ts),
        "time_in_queue": (life.queued_ts, life.scheduled_ts),
        "time_in_model_prefill": (life.scheduled_ts, life.first_token_ts),
        "time_in_model_decode": (life.first_token_ts, life.last_token_ts),
        "time_in_model_inference": (life.scheduled_ts, life.last_token_ts),
    }
    return {name: end - begin for name, (begin, end) in moments.items() if end is not None}


class MetricsScheduler(Scheduler):
    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        super().__init__(config, block_manager)
        self.ended: deque[Sequence] = deque()  # neither counted nor traced yet
        speculative = getattr(config, "speculative_config", None)
        num_drafts = speculative.num_speculative_tokens if speculative else 0
        labels, kv = {"model_name": str(config.model or "demo"), "engine": "0"}, block_manager
        gauges = {
            "num_requests_running": lambda: len(self.running),
            "num_requests_waiting": lambda: len(self.waiting) + len(self.swapped),
            "kv_cache_usage_perc": lambda: 1 - len(kv.pool.free_queue) / kv.pool.num_blocks,
        }
        numbers = load("numbers", "server")
        self.numbers = numbers.Numbers(labels, config.max_model_len, num_drafts, gauges)

    def make_output(self, step: StepPlan) -> SchedulerOutput:
        number = sum(item.num_scheduled_tokens for item in step.scheduled)
        self.numbers.count(iteration_tokens_total=number)
        return super().make_output(step)

    def admit(self, seq: Sequence, step: StepPlan) -> bool:
        """Count a prompt, and what the caches have of it, when it runs for the first time."""
        manager, is_first = self.block_manager, seq.metrics.scheduled_ts is None
        before = getattr(manager, "num_external_hit_tokens", None)  # kv_offload's, if it is there
        is_admitted = super().admit(seq, step)
        if is_first and is_admitted:
            count, skips = self.numbers.count, seq.sampling_params.skip_reading_prefix_cache
            number, num_cached = seq.num_prompt_tokens, seq.num_cached_tokens
            external = 0 if before is None else manager.num_external_hit_tokens - before
            local, computed = num_cached - external, number - num_cached
            sources = (("local_compute", computed), ("local_cache_hit", local))
            count(prompt_tokens=number, prompt_tokens_cached=num_cached)
            count(prompt_tokens_by_source={**dict(sources), "external_kv_transfer": external})
            if self.config.enable_prefix_caching and not skips:
                count(prefix_cache_queries=number, prefix_cache_hits=local)
                looked_for = 0 if before is None else number - local
                count(external_prefix_cache_queries=looked_for, external_prefix_cache_hits=external)
        return is_admitted

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
                self.numbers.count(time_to_first_token_seconds=now - seq.metrics.queued_ts)
            else:
                self.numbers.count(inter_token_latency_seconds=now - last)
        self.numbers.count(generation_tokens=sum(len(update.tokens) for update in updates))
        self.numbers.log(now)
        return updates

    def update_sequence(
        self, seq: Sequence, item: ScheduledSequence, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        """Count the drafts: the tokens of the step behind those that are known."""
        num_drafts = item.num_computed_tokens + item.num_scheduled_tokens - seq.num_tokens
        if num_drafts > 0 and (tokens := model_output.sampled.get(seq.seq_id)):
            accepted = {str(position): 1 for position in range(len(tokens) - 1)}
            count = self.numbers.count
            count(spec_decode_num_drafts=1, spec_decode_num_draft_tokens=num_drafts)
            count(spec_decode_num_accepted_tokens=len(accepted))
            count(spec_decode_num_accepted_tokens_per_pos=accepted)
        return super().update_sequence(seq, item, model_output)

    def preempt(self, seq: Sequence) -> None:
        super().preempt(seq)
        self.numbers.count(num_preemptions=1)

    def finish(self, seq_id: int, status: SequenceStatus) -> None:
        seq = self.sequences.get(seq_id)
        super().finish(seq_id, status)
        if seq is not None:
            self.ended.append(seq)

    def count_life(self, seq: Sequence, latencies: Mapping[str, float]) -> None:
        """A completion has ended."""
        count, params, number = self.numbers.count, seq.sampling_params, seq.num_output_tokens
        count(request_success={str(seq.status.finish_reason): 1})
        count(request_prompt_tokens=seq.num_prompt_tokens, request_generation_tokens=number)
        count(request_num_preemptions=seq.metrics.num_preemptions)
        count(e2e_request_latency_seconds=latencies["e2e"])
        for phase in ("queue", "model_prefill", "model_decode", "model_inference"):
            if (seconds := latencies.get(f"time_in_{phase}")) is not None:
                count(**{f"request_{phase.removeprefix('model_')}_time_seconds": seconds})
        if (seconds := latencies.get("time_in_model_decode")) is not None:
            count(request_time_per_output_token_seconds=seconds / max(1, number - 1))
            num_computed = seq.num_prompt_tokens - seq.num_cached_tokens
            count(request_prefill_kv_computed_tokens=num_computed)
        if params.max_tokens is not None:
            count(request_params_max_tokens=params.max_tokens)
        seq.output_lengths.append(number)
        if len(seq.output_lengths) == params.n:
            longest = max(seq.output_lengths)
            count(request_params_n=params.n, request_max_num_generation_tokens=longest)


class MetricsEngine(LLMEngine):
    tracer: Any = None

    def __init__(self, config: MetricsConfig) -> None:
        if config.otlp_traces_endpoint:
            self.tracer = load("tracer", "tracing").Tracer(config.otlp_traces_endpoint)
        super().__init__(config)

    def make_request(self, *args: Any, **each: Any) -> Request:
        """trace_headers: HTTP headers, of which W3C's traceparent and tracestate count."""
        headers = each.pop("trace_headers", None) if self.tracer else None
        if not isinstance(headers, Mapping | None):
            raise TypeError(f"trace_headers must be a dict, got {headers!r}.")
        request = super().make_request(*args, **each)
        for seq in request.sequences:
            seq.trace_headers = headers or {}
        return request

    def update(self, step: SchedulerOutput, model_output: ModelOutput) -> None:
        super().update(step, model_output)
        self.count_ended()

    def count_ended(self) -> None:
        """Count the completions that have ended, and send their spans. Any thread may call this."""
        ended = self.scheduler.ended
        with suppress(IndexError):
            while ended:
                seq = ended.popleft()
                latencies = latencies_of(seq)
                self.scheduler.count_life(seq, latencies)
                if self.tracer is not None:
                    self.tracer.record(seq, latencies)

    def get_metrics(self) -> list[Metric]:
        """Every metric as it is now. Any thread may call this."""
        self.count_ended()
        return list(read_metrics(self.scheduler.numbers.registry))

    def render_metrics(self) -> bytes:
        """The same in Prometheus' text format, for a server's /metrics."""
        self.count_ended()
        return self.scheduler.numbers.render()

    def close(self) -> None:
        """The last spans are sent, too."""
        super().close()
        self.count_ended()
        if self.tracer is not None:
            self.tracer.close()
            self.tracer = None


class MetricsLLM(LLM):
    def get_metrics(self) -> list[Metric]:
        """Every metric as it is now."""
        return self.engine.get_metrics()
