"""What does counting change in the engine? The scheduler, where every number passes by.

All that begins, runs, is preempted and ends goes through five methods of the scheduler, whatever
ends it: a stop string, an abort, an error. So nobody has to tell anybody: the methods count.

    LLM(collect_metrics=True).get_metrics()    vLLM's names, without "vllm:"

vLLM: vllm/engine/metrics.py (V0); vllm/v1/metrics/: loggers.py, stats.py (V1).
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.llm import LLM
from nanoserve.scheduler import Scheduler, StepPlan
from nanoserve.sequence import (
    ModelOutput,
    SchedulerOutput,
    Sequence,
    SequenceStatus,
    SequenceUpdate,
)


@dataclass(frozen=True)
class MetricsConfig(EngineConfig):
    collect_metrics: bool = False
    """Count what the engine does, for LLM.get_metrics."""


class MetricsScheduler(Scheduler):
    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        super().__init__(config, block_manager)
        self.counts: Counter[str] = Counter()

    def observe(self, name: str, value: float) -> None:
        self.counts[f"{name}_count"] += 1
        self.counts[f"{name}_sum"] += value

    def schedule(self) -> SchedulerOutput:
        output = super().schedule()
        if output.scheduled:
            number = sum(item.num_scheduled_tokens for item in output.scheduled)
            self.observe("iteration_tokens_total", number)
        return output

    def admit(self, seq: Sequence, step: StepPlan) -> bool:
        is_first = seq.metrics.scheduled_ts is None
        is_admitted = super().admit(seq, step)
        if is_first and is_admitted:
            self.counts["prefix_cache_queries"] += seq.num_prompt_tokens
            self.counts["prefix_cache_hits"] += seq.num_cached_tokens
            waited = seq.metrics.scheduled_ts - seq.metrics.queued_ts
            self.observe("request_queue_time_seconds", waited)
        return is_admitted

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_output: ModelOutput
    ) -> list[SequenceUpdate]:
        before = {i: seq.metrics.last_token_ts for i, seq in self.sequences.items()}
        updates = super().update_from_output(scheduler_output, model_output)
        for update in updates:
            seq, number = update.sequence, len(update.tokens)
            self.counts["generation_tokens"] += number
            if number and seq.num_output_tokens == number and seq.branch == 0:
                self.counts["prompt_tokens"] += seq.num_prompt_tokens
            if not number or (now := seq.metrics.last_token_ts) is None:
                continue
            if (last := before.get(seq.seq_id)) is not None:
                self.observe("inter_token_latency_seconds", now - last)
            elif seq.num_output_tokens == number:
                self.observe("time_to_first_token_seconds", now - seq.metrics.queued_ts)
        return updates

    def preempt(self, seq: Sequence) -> None:
        super().preempt(seq)
        self.counts["num_preemptions"] += 1

    def finish(
        self, seq_id: int, status: SequenceStatus, stop_reason: int | str | None = None
    ) -> None:
        seq = self.sequences.get(seq_id)
        super().finish(seq_id, status, stop_reason)
        if seq is not None:
            self.counts[f"request_success_{status.finish_reason}"] += 1
            self.observe("e2e_request_latency_seconds", time.monotonic() - seq.metrics.queued_ts)


class MetricsLLM(LLM):
    def get_metrics(self) -> dict[str, float]:
        """Counters, sums and gauges as they are now."""
        scheduler = self.engine.scheduler
        pool = scheduler.block_manager.pool
        return {
            **scheduler.counts,
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting) + len(scheduler.swapped),
            "kv_cache_usage_perc": 1 - len(pool.free_queue) / len(pool.ref_counts),
        }


PARTS = {"llm_cls": MetricsLLM, "config_cls": MetricsConfig, "scheduler_cls": MetricsScheduler}
