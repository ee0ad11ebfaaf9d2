"""Where are the numbers of one engine?

In objects of prometheus_client, in a registry of the engine's own. Counters and histograms grow
while the scheduler works. A gauge asks the scheduler when somebody reads the gauge, so that it
costs the steps nothing.

vLLM: PrometheusStatLogger and LoggingStatLogger in vllm/v1/metrics/loggers.py (V1).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from nanoserve.chapters.metrics.catalog import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELS,
    SPEC_DECODE_COUNTERS,
    token_borders,
)

logger = logging.getLogger("nanoserve")

LOG_INTERVAL = 10.0  # seconds, vLLM's
LOGGED = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")


class Numbers:
    """All metrics of one engine. One thread adds; any thread may read."""

    def __init__(self, model_name: str, max_model_len: int, num_drafts: int) -> None:
        """num_drafts: num_speculative_tokens. Raises ModuleNotFoundError without the package."""
        try:
            import prometheus_client as prometheus
        except ModuleNotFoundError as error:
            message = 'metrics need prometheus_client: pip install "nanoserve[server]".'
            raise ModuleNotFoundError(message, name=error.name) from error
        self.prometheus, self.registry = prometheus, prometheus.CollectorRegistry()
        self.labels = {"model_name": model_name, "engine": "0"}
        self.metrics: dict[tuple[str, str], Any] = {}  # by name and value of the further label
        for name, text in GAUGES.items():
            self.make(prometheus.Gauge, name, text)
        positions = ("position", " ".join(map(str, range(num_drafts))))
        labels = LABELS | {"spec_decode_num_accepted_tokens_per_pos": positions}
        for name, text in (COUNTERS | (SPEC_DECODE_COUNTERS if num_drafts else {})).items():
            self.make(prometheus.Counter, name, text, *labels.get(name, ()))
        for name, (text, borders) in HISTOGRAMS.items():
            borders = borders or token_borders(max_model_len)
            self.make(prometheus.Histogram, name, text, buckets=borders)
        self.logged = dict.fromkeys(LOGGED, 0.0)
        self.logged_at = time.monotonic()

    def make(
        self, cls: Any, name: str, text: str, label: str = "", values: str = "", **options: Any
    ) -> None:
        """A metric, with a child for each value of its further label."""
        names = [*self.labels, *([label] if label else [])]
        family = cls(f"vllm:{name}", text, names, registry=self.registry, **options)
        for value in values.split() or [""]:
            child = family.labels(*self.labels.values(), *([value] if label else []))
            self.metrics[name, value] = child

    def watch(self, name: str, look: Callable[[], float]) -> None:
        """Let a gauge ask `look`."""
        self.metrics[name, ""].set_function(look)

    def add(self, name: str, number: float = 1, label_value: str = "") -> None:
        """Let a counter grow."""
        self.metrics[name, label_value].inc(number)

    def observe(self, name: str, value: float) -> None:
        """Add an observation to a histogram."""
        self.metrics[name, ""].observe(value)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self.prometheus.generate_latest(self.registry)

    def read(self, name: str) -> float:
        """The value of a counter or gauge that has no further label."""
        suffix = "" if name in GAUGES else "_total"
        return self.registry.get_sample_value(f"vllm:{name}{suffix}", self.labels) or 0.0

    def log(self, now: float) -> None:
        """A line in the log, if the last one is old enough: what was done since then."""
        if (seconds := now - self.logged_at) < LOG_INTERVAL:
            return
        before, self.logged = self.logged, {name: self.read(name) for name in LOGGED}
        prompt, output, queries, hits = (self.logged[name] - before[name] for name in LOGGED)
        logger.info(
            "prompt %.1f tokens/s, output %.1f tokens/s; running %d, waiting %d; KV cache %.1f%% "
            "full, prefix cache hit rate %.1f%%",
            *(prompt / seconds, output / seconds),
            *(self.read("num_requests_running"), self.read("num_requests_waiting")),
            *(100 * self.read("kv_cache_usage_perc"), 100 * hits / max(queries, 1)),
        )
        self.logged_at = now
