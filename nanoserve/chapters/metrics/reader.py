"""What does a program read, without a server and without Prometheus?

`LLM.get_metrics()` gives a list of vLLM's classes, one for each metric and set of labels:

    for metric in llm.get_metrics():
        if isinstance(metric, Counter):
            print(metric.name, metric.labels, metric.value)     vllm:generation_tokens {...} 120

Of the latencies 0.2, 0.4 and 9.0 a Histogram has count 3, sum 9.6 and the buckets {"0.3": 1, "0.5":
2, ..., "+Inf": 3}: how many were not above the border.

vLLM: vllm/v1/metrics/reader.py (V1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Metric:
    """A metric with one set of labels."""

    name: str  # without Prometheus' suffix _total
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Several counters in a row: the accepted drafts, by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A state."""

    value: float


@dataclass
class Histogram(Metric):
    """Observations, by size."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def read_metrics(registry: Any) -> Iterator[Metric]:
    """The metrics of a registry of prometheus_client, as they are now."""
    for family in registry.collect():
        if family.type == "gauge":
            yield from (Gauge(family.name, s.labels, s.value) for s in family.samples)
        elif family.type == "histogram":  # no further labels here: it is one
            buckets = {s.labels["le"]: int(s.value) for s in family.samples if "le" in s.labels}
            [total] = [s for s in family.samples if s.name.endswith("_sum")]
            yield Histogram(family.name, total.labels, buckets["+Inf"], total.value, buckets)
        else:
            counters = [s for s in family.samples if s.name.endswith("_total")]
            if "position" in counters[0].labels:
                labels = {k: v for k, v in counters[0].labels.items() if k != "position"}
                yield Vector(family.name, labels, [int(s.value) for s in counters])
            else:
                yield from (Counter(family.name, s.labels, int(s.value)) for s in counters)
