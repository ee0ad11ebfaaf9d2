"""What do traces change in the engine? Who has ended is noted, and is a span behind the step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nanoserve.block_manager import BlockManager
from nanoserve.chapters.tracing.tracer import Tracer
from nanoserve.config import EngineConfig
from nanoserve.engine import LLMEngine
from nanoserve.output_processor import Request
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import RequestOutput, Sequence, SequenceStatus

DETAILS = {"model", "worker", "all"}


@dataclass(frozen=True)
class TracingConfig(EngineConfig):
    # Address of a collector of OpenTelemetry, which gets a span of each request.
    otlp_traces_endpoint: str | None = None
    # Any of model, worker, all: spans of queue, prefill and decode, too.
    collect_detailed_traces: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.collect_detailed_traces or []
        words = given.split(",") if isinstance(given, str) else given
        if not isinstance(words, (list, tuple)) or set(words) - DETAILS:
            raise ValueError(f"collect_detailed_traces is {given!r}; allowed: model, worker, all.")


@dataclass(eq=False)
class TracingSequence(Sequence):
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # of the caller's span


class TracingScheduler(Scheduler):
    def __init__(self, config: EngineConfig, block_manager: BlockManager) -> None:
        super().__init__(config, block_manager)
        self.without_span: deque[Sequence] = deque()  # that have ended

    def finish(self, seq_id: int, status: SequenceStatus) -> None:
        seq = self.sequences.get(seq_id)
        super().finish(seq_id, status)
        if seq is not None:
            self.without_span.append(seq)


class TracingEngine(LLMEngine):
    def __init__(self, config: TracingConfig) -> None:
        self.tracer = Tracer(config.otlp_traces_endpoint, bool(config.collect_detailed_traces))
        super().__init__(config)

    def make_request(
        self, *args: Any, trace_headers: Mapping[str, str] | None = None, **each: Any
    ) -> Request:
        """trace_headers: HTTP headers, of which W3C's traceparent and tracestate count."""
        if not isinstance(trace_headers, Mapping | None):
            raise TypeError(f"trace_headers must be a dict, got {trace_headers!r}.")
        request = super().make_request(*args, **each)
        for seq in request.sequences:
            seq.trace_headers = trace_headers or {}
        return request

    def step(self) -> list[RequestOutput]:
        """Behind the step it is known whether the last token has brought a stop string."""
        outputs = super().step()
        self.record_ended()
        return outputs

    def record_ended(self) -> None:
        while self.scheduler.without_span:
            seq = self.scheduler.without_span.popleft()
            self.tracer.record(seq, seq.trace_headers)

    def close(self) -> None:
        """The last spans are sent, too."""
        was_open = not self.is_closed
        super().close()
        if was_open:
            self.record_ended()
            self.tracer.close()


PARTS = {
    "config_cls": TracingConfig,
    "sequence_cls": TracingSequence,
    "engine_cls": TracingEngine,
    "scheduler_cls": TracingScheduler,
}
