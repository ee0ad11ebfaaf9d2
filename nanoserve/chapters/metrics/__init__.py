"""What does the engine do over time, and how does one see it?

Metrics under vLLM's names: requests running and waiting, tokens, latencies, preemptions, hits of
the prefix cache. Of an LLM, vLLM's way (there is a line in the log every ten seconds of work, too):

    llm = LLM(disable_log_stats=False)
    llm.get_metrics()                  a list of Counter, Gauge and Histogram

Of any engine, with the loggers of your choice, which count from then on:

    prometheus = PrometheusStatLogger(engine)
    collect_metrics(engine, prometheus, LoggingStatLogger(engine))
    prometheus.render()                the text that Prometheus asks a server for

Begin with stats.py: it says what is counted, and when.

    catalog.py   which metrics there are: vLLM's names, labels and bucket borders
    stats.py     what a step brought, what a request's life was
    perf.py      what a step computed, and how many bytes it moved
    reader.py    the numbers, and the list that get_metrics gives
    loggers.py   who tells the numbers: log, Prometheus
    tracing.py   one more logger: a span of OpenTelemetry for each request
    manager.py   from the engine to the loggers; collect_metrics, get_metrics

The engine knows no metrics: it has listeners for steps and for the ends of requests. Without this
folder LLM.get_metrics has nothing to read; everything else works as before.

vLLM: vllm/engine/metrics.py (V0); vllm/v1/metrics/: loggers.py, stats.py, reader.py, perf.py (V1).
"""
