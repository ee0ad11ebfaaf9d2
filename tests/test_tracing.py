"""A span of each request: what a collector gets is what the outputs say."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nanoserve import LLM, SamplingParams

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SMALL = {"block_size": 4, "num_gpu_blocks_override": 24, "max_model_len": 48}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the spans that it has got."""
    pytest.importorskip("opentelemetry.sdk")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
            spans.extend(s for r in request.resource_spans for g in r.scope_spans for s in g.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_COMPRESSION", "none")
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", spans
        server.shutdown()
        thread.join()


def values_of(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


def test_a_span_of_each_completion(collector: tuple[str, list[Any]]) -> None:
    """One with a parent, one of three completions, one that is aborted in the queue."""
    address, spans = collector
    params = SamplingParams(n=3, seed=1, temperature=0.5, top_p=0.9, max_tokens=7)
    with LLM(otlp_traces_endpoint=address, max_num_seqs=3, **SMALL) as llm:
        headers = {"Traceparent": f"00-{TRACE}-{PARENT}-01"}
        greedy = SamplingParams(temperature=0, max_tokens=5)
        llm.add_request("child", "Once upon a time", greedy, trace_headers=headers)
        llm.add_request("three", "The cat", params)
        llm.add_request("aborted", "A", params)
        lengths: dict[str, list[int]] = {}
        while llm.has_unfinished_requests():
            for output in llm.step():
                lengths[output.request_id] = [len(each.token_ids) for each in output.outputs]
            llm.abort_request(["aborted"])
        with pytest.raises(TypeError):
            llm.add_request("bad", "A", greedy, trace_headers="00")
    assert {span.name for span in spans} == {"llm_request"}
    found = [values_of(span) for span in spans]
    by_request = {
        name: [each for each in found if each["gen_ai.request.id"] == name]
        for name in ("child", "three", "aborted")
    }
    for name in ("child", "three"):
        numbers = [each["gen_ai.usage.completion_tokens"] for each in by_request[name]]
        assert sorted(numbers) == sorted(lengths[name])
    for each in by_request["three"]:
        asked = [each[f"gen_ai.request.{key}"] for key in ("n", "temperature", "top_p")]
        assert (*asked, each["gen_ai.request.max_tokens"]) == (3, 0.5, 0.9, 7)
        parts = [each[f"gen_ai.latency.time_in_{key}"] for key in ("queue", "model_inference")]
        assert 0 < sum(parts) <= each["gen_ai.latency.e2e"]
        parts = [each[f"gen_ai.latency.time_in_model_{key}"] for key in ("prefill", "decode")]
        assert sum(parts) == pytest.approx(each["gen_ai.latency.time_in_model_inference"])
    [aborted] = by_request["aborted"]
    assert aborted["gen_ai.usage.completion_tokens"] == 0
    assert "gen_ai.latency.time_to_first_token" not in aborted
    for span in spans:
        is_child = values_of(span)["gen_ai.request.id"] == "child"
        assert (span.trace_id.hex() == TRACE, span.parent_span_id.hex() == PARENT) == (
            is_child,
        ) * 2
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(values_of(span)["gen_ai.latency.e2e"], abs=1e-5)


def test_a_collector_that_is_not_there(
    collector: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs the spans, and no token."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # seconds
    params = SamplingParams(temperature=0, max_tokens=5)
    with LLM(**SMALL) as llm:
        wanted = llm.generate("The", params, use_tqdm=False)[0].outputs[0].token_ids
    with LLM(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces", **SMALL) as llm:
        assert llm.generate("The", params, use_tqdm=False)[0].outputs[0].token_ids == wanted
        llm.close()
    assert collector[1] == []


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({}, {"collect_metrics": True}):
        with LLM(**options, **SMALL) as llm, pytest.raises(TypeError, match="trace_headers"):
            llm.add_request("a", "A", trace_headers={"traceparent": ""})
    with monkeypatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "smoke")
        with pytest.raises(ValueError, match="smoke"):
            LLM(otlp_traces_endpoint="http://127.0.0.1:9")
    monkeypatch.delitem(sys.modules, "nanoserve.chapters.metrics.tracer", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ModuleNotFoundError, match=r"\[tracing\]"):
        LLM(otlp_traces_endpoint="http://127.0.0.1:9")


def test_metrics_count_beside_traces(collector: tuple[str, list[Any]]) -> None:
    """Both watch how requests end; each sees every one, once."""
    address, spans = collector
    with LLM(otlp_traces_endpoint=address, collect_metrics=True, **SMALL) as llm:
        llm.generate(["Once", "The"], SamplingParams(n=2, seed=1, max_tokens=5), use_tqdm=False)
        found = llm.get_metrics()
    assert len(spans) == 4
    ended = [each for each in found if each.name.endswith("request_success")]
    assert sum(each.value for each in ended) == 4
