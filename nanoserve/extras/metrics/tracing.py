"""Where in the life of one call did the time go?

Metrics add all requests up. A trace tells of one: it holds a span (a name, a begin, an end, a few
values) for each part of a system that worked for it. Who calls a server sends the header
"traceparent" along; what the server did becomes a span of the same trace:

    the page of a shop        |-------------------------------------|
      its search service         |------|
      llm_request                          |----------------------|    time_in_queue 0.12, ...

    tracing = TracingStatLogger(engine, "http://localhost:4317")
    collect_metrics(engine, tracing)
    async_llm.generate(prompt, trace_headers={"traceparent": "00-4bf9...-01"})

One span for each completion, when it has ended, with vLLM's names. The packages are OpenTelemetry's
(`pip install -e ".[tracing]"`), which also batch the spans and send them in a thread of their own.

Left out: spans of the parts of an engine, and of loading a model. (For the steps of one process
there is extras/trace.)

vLLM: vllm/tracing/, vllm/v1/engine/output_processor.py (do_tracing).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanoserve.exceptions import brief
from nanoserve.extras.metrics.loggers import StatLogger
from nanoserve.extras.metrics.stats import FinishedRequestStats, IterationStats

if TYPE_CHECKING:
    from nanoserve.engine import LLMEngine

PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"  # vLLM reads this environment variable, too
EXPORTERS = {"grpc": "grpc", "http/protobuf": "http"}


class TracingStatLogger(StatLogger):
    """Makes a span of each completion that has ended."""

    def __init__(
        self,
        engine: LLMEngine,
        otlp_traces_endpoint: str | None = None,
        tracer_provider: Any = None,
    ) -> None:
        """otlp_traces_endpoint: the address of a collector, such as "http://localhost:4317" (gRPC),
        or "http://localhost:4318/v1/traces" with the environment variable
        OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf. tracer_provider: an OpenTelemetry
        TracerProvider of your own instead; without both, the one that was set for the process.

        Raises ModuleNotFoundError if OpenTelemetry is not installed, TypeError for what is no
        TracerProvider, ValueError for an unknown protocol."""
        try:
            self._trace = import_module("opentelemetry.trace")
            context = import_module("opentelemetry.trace.propagation.tracecontext")
            if otlp_traces_endpoint is not None and tracer_provider is None:
                tracer_provider = make_provider(otlp_traces_endpoint)
        except ModuleNotFoundError as error:
            message = f'Traces need OpenTelemetry ({error}): pip install -e ".[tracing]".'
            raise ModuleNotFoundError(message, name=error.name) from error
        if not isinstance(tracer_provider, (self._trace.TracerProvider, type(None))):
            given = brief(tracer_provider)
            raise TypeError(f"tracer_provider must be a TracerProvider or None, got {given}.")
        self._propagator = context.TraceContextTextMapPropagator()
        self.tracer = self._trace.get_tracer("nanoserve", tracer_provider=tracer_provider)
        self.tracer_provider = tracer_provider  # its shutdown() sends what still waits

    def record(self, stats: IterationStats) -> None:
        for finished in stats.finished_requests:
            headers = {name.lower(): text for name, text in (finished.trace_headers or {}).items()}
            now = time.time()
            span = self.tracer.start_span(
                "llm_request",
                context=self._propagator.extract(headers),
                kind=self._trace.SpanKind.SERVER,
                attributes={n: value for n, value in _attributes(finished) if value is not None},
                start_time=int((now - finished.e2e_latency) * 1e9),
            )
            span.end(int(now * 1e9))


def make_provider(endpoint: str) -> Any:
    """A TracerProvider that sends its spans to `endpoint`, many at a time."""
    protocol = os.environ.get(PROTOCOL, "grpc")
    if protocol not in EXPORTERS:
        raise ValueError(f"{PROTOCOL} is {protocol!r}; allowed: {', '.join(EXPORTERS)}.")
    sdk, export = "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto"
    resource = import_module(f"{sdk}.resources").Resource.create({"service.name": "nanoserve"})
    provider = import_module(f"{sdk}.trace").TracerProvider(resource=resource)
    exporter = import_module(f"{export}.{EXPORTERS[protocol]}.trace_exporter")
    batches = import_module(f"{sdk}.trace.export").BatchSpanProcessor
    provider.add_span_processor(batches(exporter.OTLPSpanExporter(endpoint=endpoint)))
    return provider


def _attributes(life: FinishedRequestStats) -> Iterator[tuple[str, Any]]:
    """vLLM's names. What is None is left out, and so is a setting of 0."""
    params = life.sampling_params
    yield "gen_ai.request.id", life.request_id
    yield "gen_ai.request.n", params.n
    yield "gen_ai.request.top_p", params.top_p or None
    yield "gen_ai.request.temperature", params.temperature or None
    yield "gen_ai.request.max_tokens", life.max_tokens_param
    yield "gen_ai.usage.prompt_tokens", life.num_prompt_tokens
    yield "gen_ai.usage.completion_tokens", life.num_generation_tokens
    yield "gen_ai.latency.e2e", life.e2e_latency
    yield "gen_ai.latency.time_in_queue", life.queued_time
    yield "gen_ai.latency.time_to_first_token", life.time_to_first_token
    yield "gen_ai.latency.time_in_model_prefill", life.prefill_time
    yield "gen_ai.latency.time_in_model_decode", life.decode_time
    yield "gen_ai.latency.time_in_model_inference", life.inference_time
