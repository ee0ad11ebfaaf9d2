"""Where in the life of one request did the time go?

Metrics add all requests up. A trace tells of one: it holds a span (a name, a begin, an end, a few
values) for each part of a system that worked for it. The caller's span comes in trace_headers:

    LLM(otlp_traces_endpoint="http://localhost:4317")
    llm.add_request("id", prompt, trace_headers={"traceparent": "00-4bf9...-01"})

    the caller's span          |--------------------------------------|
      llm_request                 |--------------------------------|   gen_ai.latency.e2e 0.95
        queue, prefill, decode    |----|------|--------------------|   with collect_detailed_traces

One span for each completion that has ended, with vLLM's names. The packages are an extra:
pip install -e ".[tracing]".

    tracer.py    the spans, and OpenTelemetry
    parts.py     what changes in the engine

Left out: the traceparent header of HTTP requests (give trace_headers in Python), spans of loading a
model and of the parts of a forward pass. vLLM's details are other ones.

vLLM: vllm/tracing/, vllm/config/observability.py (0.32).
"""
