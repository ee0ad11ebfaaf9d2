"""What is a span made of, and who sends it?

OpenTelemetry's own packages send spans, many at a time, in a thread of theirs: over gRPC or, with
the environment variable OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf, over HTTP.

vLLM: vllm/tracing/, do_tracing in vllm/v1/engine/output_processor.py (0.32).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from nanoserve.sequence import Sequence

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
EXPORTERS = {"grpc": "grpc", "http/protobuf": "http"}


class Tracer:
    """Sends spans to one collector."""

    def __init__(self, endpoint: str) -> None:
        """Raises ValueError for a protocol that is not known."""
        protocol = os.environ.get(PROTOCOL, "grpc")
        if protocol not in EXPORTERS:
            raise ValueError(f"{PROTOCOL} is {protocol!r}; allowed: {', '.join(EXPORTERS)}.")
        package = f"opentelemetry.exporter.otlp.proto.{EXPORTERS[protocol]}.trace_exporter"
        exporter = import_module(package).OTLPSpanExporter(endpoint=endpoint)
        provider = TracerProvider(resource=Resource.create({"service.name": "nanoserve"}))
        provider.add_span_processor(BatchSpanProcessor(exporter))
        self.start_span = provider.get_tracer("nanoserve").start_span
        self.close = provider.shutdown  # sends what still waits

    def record(self, seq: Sequence, latencies: Mapping[str, float]) -> None:
        """A completion has ended. latencies: of parts.py, in seconds."""
        params, begin = seq.sampling_params, int(seq.metrics.arrival_time * 1e9)  # ns since 1970
        attributes = {
            "gen_ai.request.id": seq.request_id,
            "gen_ai.request.n": params.n,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.max_tokens": seq.max_tokens,
            "gen_ai.usage.prompt_tokens": seq.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": seq.num_output_tokens,
            **{f"gen_ai.latency.{name}": seconds for name, seconds in latencies.items()},
        }
        caller = {name.lower(): text for name, text in seq.trace_headers.items()}
        context = TraceContextTextMapPropagator().extract(caller)
        span = self.start_span("llm_request", context, SpanKind.SERVER, attributes, None, begin)
        span.end(begin + int(latencies["e2e"] * 1e9))
