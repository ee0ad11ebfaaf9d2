"""What does the engine do over time, and where in the life of one request did the time go?

*Metrics* add all requests up, under vLLM's names: requests that run and wait, tokens, latencies,
preemptions, hits of the prefix cache. A dashboard made for vLLM shows a nanoserve engine, too.

    llm = LLM(collect_metrics=True)            or vLLM's way: disable_log_stats=False
    for metric in llm.get_metrics():
        print(metric.name, metric.labels, metric)
    llm.engine.render_metrics()                the text that Prometheus asks a server for

There is also a line in the log for every ten seconds of work. The numbers live in objects of
prometheus_client, as in vLLM; unlike there, each engine has a registry of its own, so that two
engines of one process do not mix.

    request     add -> admit -> first token -> token -> ... -> finish        (and preempt)
    observed           queue    time to        inter-token     end-to-end
                       time     first token    latency         latency

A *trace* tells of one request: it holds a span (a name, a begin, an end, a few values) for each
part of a system that worked for it. The caller's span comes in trace_headers:

    LLM(otlp_traces_endpoint="http://localhost:4317")              counts, and sends spans
    llm.add_request("id", prompt, trace_headers={"traceparent": "00-4bf9...-01"})

    the caller's span          |--------------------------------------|
      llm_request                 |----|------|--------------------|   gen_ai.latency.e2e 0.95
                                  queue prefill decode                 .time_in_queue 0.13, ...

One span for each completion that has ended, with vLLM's names. The packages of spans are an extra:
pip install -e ".[tracing]".

    catalog.py   which metrics there are: vLLM's names, labels and bucket borders
    numbers.py   the Prometheus objects of one engine, and the line in the log
    reader.py    the list that get_metrics gives
    tracer.py    the spans, and OpenTelemetry
    parts.py     what counts: the scheduler; and who is told that a completion has ended

Left out: loggers of your own, estimated FLOPs and bytes, metrics of LoRA; the traceparent header of
HTTP requests (give trace_headers in Python), spans of loading a model and of a forward pass.

vLLM: vllm/engine/metrics.py, vllm/tracing.py (V0, 0.6.6); vllm/v1/metrics/: loggers.py, stats.py,
reader.py, and vllm/tracing/ (V1, 0.32).
"""

from nanoserve.chapters.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
