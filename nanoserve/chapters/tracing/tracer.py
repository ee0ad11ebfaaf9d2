"""What is a span made of, and who sends it?

OpenTelemetry's own packages send spans, many at a time, in a thread of theirs: over gRPC or, with
the environment variable OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf, over HTTP.

vLLM: vllm/tracing/, do_tracing in vllm/v1/engine/output_processor.py (0.32).
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from nanoserve.sequence import Sequence

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
EXPORTERS = {"grpc": "grpc", "http/protobuf": "http"}


class Tracer:
    """Sends spans to one collector."""

    def __init__(self, endpoint: str, has_details: bool) -> None:
        """Raises ModuleNotFoundError without OpenTelemetry, ValueError for a bad protocol."""
        protocol = os.environ.get(PROTOCOL, "grpc")
        if protocol not in EXPORTERS:
            raise ValueError(f"{PROTOCOL} is {protocol!r}; allowed: {', '.join(EXPORTERS)}.")
        package = f"opentelemetry.exporter.otlp.proto.{EXPORTERS[protocol]}.trace_exporter"
        try:
            self.trace = import_module("opentelemetry.trace")
            context = import_module("opentelemetry.trace.propagation.tracecontext")
            sdk, export = map(import_module, ("opentelemetry.sdk.trace", package))
            processors = import_module("opentelemetry.sdk.trace.export")
            resources = import_module("opentelemetry.sdk.resources")
        except ModuleNotFoundError as error:
            message = f'traces need OpenTelemetry ({error}): pip install "nanoserve[tracing]".'
            raise ModuleNotFoundError(message, name=error.name) from error
        self.propagator, self.has_details = context.TraceContextTextMapPropagator(), has_details
        resource = resources.Resource.create({"service.name": "nanoserve"})
        self.provider = sdk.TracerProvider(resource=resource)
        exporter = export.OTLPSpanExporter(endpoint=endpoint)
        self.provider.add_span_processor(processors.BatchSpanProcessor(exporter))
        self.close = self.provider.shutdown  # sends what still waits

    def record(self, seq: Sequence, headers: dict[str, str]) -> None:
        """A completion has ended."""
        metrics, name = seq.metrics, "llm_request"
        start = metrics.queued_ts
        moments = {
            "time_in_queue": (start, metrics.scheduled_ts),
            "time_to_first_token": (start, metrics.first_token_ts),
            "time_in_model_prefill": (metrics.scheduled_ts, metrics.first_token_ts),
            "time_in_model_decode": (metrics.first_token_ts, metrics.last_token_ts),
            "time_in_model_inference": (metrics.scheduled_ts, metrics.last_token_ts),
            "e2e": (start, metrics.finished_ts),
        }
        known = {name: pair for name, pair in moments.items() if None not in pair}
        params, latency = seq.sampling_params, "gen_ai.latency."
        attributes = {
            "gen_ai.request.id": seq.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.max_tokens": seq.max_tokens,
            "gen_ai.usage.prompt_tokens": seq.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": seq.num_output_tokens,
            **{latency + name: end - begin for name, (begin, end) in known.items()},
        }
        context = self.propagator.extract({key.lower(): text for key, text in headers.items()})
        parent = self.add_span(seq, name, moments["e2e"], context, attributes)
        for phase in ("queue", "model_prefill", "model_decode") if self.has_details else ():
            if f"time_in_{phase}" in known:
                name = phase.removeprefix("model_")
                inside = self.trace.set_span_in_context(parent)
                self.add_span(seq, name, known[f"time_in_{phase}"], inside)

    def add_span(
        self, seq: Sequence, name: str, moments: Any, context: Any, attributes: Any = None
    ) -> Any:
        """A span between two moments of time.monotonic(); OpenTelemetry counts ns since 1970."""
        offset = seq.metrics.arrival_time - seq.metrics.queued_ts
        begin, end = (int((moment + offset) * 1e9) for moment in moments)
        span = self.provider.get_tracer("nanoserve").start_span(
            name,
            context=context,
            kind=self.trace.SpanKind.SERVER if attributes else self.trace.SpanKind.INTERNAL,
            attributes=attributes,
            start_time=begin,
        )
        span.end(end)
        return span
