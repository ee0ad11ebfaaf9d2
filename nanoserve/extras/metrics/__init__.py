"""What does the engine do over time, and how does one see it?

Metrics under vLLM's names: requests running and waiting, tokens, latencies, preemptions, hits of
the prefix cache. Four ways to look, from one set of numbers:

    llm = LLM(disable_log_stats=False)
    llm.get_metrics()                            a list of Counter, Gauge, Histogram
    PrometheusStatLogger(llm.engine).render()    the text that Prometheus asks a server for
    LoggingStatLogger                            a line in the log every ten seconds of work
    StatLogger                                   the base class of a logger of your own

Begin with stats.py: it says what is counted, and when.

    catalog.py   which metrics there are: vLLM's names, labels and bucket borders
    stats.py     what a step brought, what a request's life was
    perf.py      what a step computed, and how many bytes it moved
    reader.py    the numbers, and the list that get_metrics gives
    loggers.py   who tells the numbers: log, Prometheus

The engine knows no metrics: it has listeners for steps and for the ends of requests. Without this
folder LLM.get_metrics has nothing to read; everything else works as before.

Left out: traces of single requests (OpenTelemetry). RequestOutput.metrics has their moments.

vLLM: vllm/engine/metrics.py (V0); vllm/v1/metrics/: loggers.py, stats.py, reader.py, perf.py (V1).
"""

from nanoserve.extras.metrics.loggers import (
    CountingStatLogger,
    LoggingStatLogger,
    PrometheusStatLogger,
    StatLogger,
    StatLoggerManager,
    collect_metrics,
    get_metrics,
)
from nanoserve.extras.metrics.reader import Counter, Gauge, Histogram, Metric, Vector
from nanoserve.extras.metrics.stats import FinishedRequestStats, IterationStats

__all__ = [
    "Counter",
    "CountingStatLogger",
    "FinishedRequestStats",
    "Gauge",
    "Histogram",
    "IterationStats",
    "LoggingStatLogger",
    "Metric",
    "PrometheusStatLogger",
    "StatLogger",
    "StatLoggerManager",
    "Vector",
    "collect_metrics",
    "get_metrics",
]
