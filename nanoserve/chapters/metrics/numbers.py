"""Where are the numbers of one engine?

In objects of prometheus_client, in a registry of the engine's own. Counters and histograms grow
while the scheduler works. A gauge asks the scheduler when somebody reads the gauge, so that it
costs the steps nothing.

vLLM: PrometheusStatLogger and LoggingStatLogger in vllm/v1/metrics/loggers.py (V1).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from operator import sub
from typing import Any

import prometheus_client

from nanoserve.chapters.metrics import catalog

logger = logging.getLogger("nanoserve")

LOG_INTERVAL = 10.0  # seconds, vLLM's
LOGGED = ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits")


class Numbers:
    """All metrics of one engine. One thread adds; any thread may read."""

    def __init__(
        self, labels: dict[str, str], max_model_len: int, num_drafts: int, gauges: Mapping[str, Any]
    ) -> None:
        """num_drafts: num_speculative_tokens. gauges: name -> a function that looks."""
        self.registry, self.labels = prometheus_client.CollectorRegistry(), labels
        self.metrics: dict[tuple[str, str], Any] = {}  # by name and value of the further label
        for name, text in catalog.GAUGES.items():
            self.make(prometheus_client.Gauge, name, text)
            self.metrics[name, ""].set_function(gauges[name])
        positions = ("position", " ".join(map(str, range(num_drafts))))
        further = catalog.LABELS | {"spec_decode_num_accepted_tokens_per_pos": positions}
        for name, text in catalog.COUNTERS.items():
            if num_drafts or not name.startswith("spec_decode"):
                self.make(prometheus_client.Counter, name, text, *further.get(name, ()))
        for name, (text, borders) in catalog.HISTOGRAMS.items():
            borders = borders or catalog.token_borders(max_model_len)
            self.make(prometheus_client.Histogram, name, text, buckets=borders)
        self.logged, self.logged_at = [0.0] * len(LOGGED), time.monotonic()

    def make(
        self, cls: Any, name: str, text: str, label: str = "", values: str = "", **options: Any
    ) -> None:
        """A metric, with a child for each value of its further label."""
        names = [*self.labels, *([label] if label else [])]
        family = cls(f"vllm:{name}", text, names, registry=self.registry, **options)
        for value in values.split() or [""]:
            child = family.labels(*self.labels.values(), *([value] if label else []))
            self.metrics[name, value] = child

    def count(self, **values: Any) -> None:
        """Let a counter grow, or give a histogram an observation: count(generation_tokens=3); of
        those with a further label: count(request_success={"stop": 1})."""
        for name, value in values.items():
            for label_value, number in (value if isinstance(value, dict) else {"": value}).items():
                metric = self.metrics[name, label_value]
                (metric.observe if name in catalog.HISTOGRAMS else metric.inc)(number)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return prometheus_client.generate_latest(self.registry)

    def log(self, now: float) -> None:
        """A line in the log, if the last one is old enough: what was done since then."""
        if (seconds := now - self.logged_at) < LOG_INTERVAL:
            return
        read, before = self.registry.get_sample_value, self.logged
        self.logged = [read(f"vllm:{name}_total", self.labels) for name in LOGGED]
        prompt, output, queries, hits = map(sub, self.logged, before)
        running, waiting, usage = (read(f"vllm:{name}", self.labels) for name in catalog.GAUGES)
        logger.info(
            "prompt %.1f tokens/s, output %.1f tokens/s; running %d, waiting %d; KV cache %.1f%% "
            "full, prefix cache hit rate %.1f%%",
            *(prompt / seconds, output / seconds, running, waiting),
            *(100 * usage, 100 * hits / max(queries, 1)),
        )
        self.logged_at = now
