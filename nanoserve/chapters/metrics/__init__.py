"""What does the engine do over time, and how does one see it?

Metrics under vLLM's names: requests that run and wait, tokens, latencies, preemptions, hits of the
prefix cache. A dashboard made for vLLM shows a nanoserve engine, too.

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

    catalog.py   which metrics there are: vLLM's names, labels and bucket borders
    numbers.py   the Prometheus objects of one engine, and the line in the log
    reader.py    the list that get_metrics gives
    parts.py     what counts: the scheduler

Left out: loggers of your own, estimated FLOPs and bytes, metrics of LoRA.

vLLM: vllm/engine/metrics.py (V0); vllm/v1/metrics/: loggers.py, stats.py, reader.py (V1).
"""

from nanoserve.chapters.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
