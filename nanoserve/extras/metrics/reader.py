"""What does a program read, without a server and without Prometheus?

`LLM.get_metrics()` gives a list of Counter, Gauge, Histogram and Vector, vLLM's classes:

    for metric in llm.get_metrics():
        if isinstance(metric, Counter):
            print(metric.name, metric.labels, metric.value)     vllm:generation_tokens {...} 120

In vLLM the numbers live in prometheus-client, and the reader asks that package for them. Here the
numbers live in plain Python (`Numbers`), which costs less in each step. Prometheus is one way to
show them (loggers.PrometheusStatLogger), this list is another.

vLLM: vllm/v1/metrics/reader.py.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from nanoserve.config import check_number
from nanoserve.extras.metrics.catalog import (
    COUNTERS,
    HISTOGRAMS,
    SPEC_DECODE_COUNTERS,
    SPEC_DECODE_PER_POS,
    Spec,
    token_buckets,
)
from nanoserve.inputs import as_python


@dataclass
class Metric:
    """A metric with one set of labels."""

    name: str  # without Prometheus' suffix _total
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: float  # an int, unless it counts seconds


@dataclass
class Vector(Metric):
    """Several counters in a row, such as the accepted drafts by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A state."""

    value: float


@dataclass
class Histogram(Metric):
    """Observations, by size.

    Of the latencies 0.2, 0.4 and 9.0: count 3, sum 9.6, buckets {"0.3": 1, "0.5": 2, ...,
    "+Inf": 3}: how many were not above the border.
    """

    count: int
    sum: float
    buckets: dict[str, int]

    def quantile(self, q: float) -> float:
        """The value that a share `q` of the observations does not exceed, as Prometheus' function
        histogram_quantile estimates it: the observations of a bucket are spread evenly in it, and
        those above the last border are at it. NaN if there are none."""
        q = as_python(q)
        check_number("q", q, float, 0, 1, "0 to 1")
        if not self.count:
            return math.nan
        rank, lower, num_below = q * self.count, 0.0, 0
        for name, number in self.buckets.items():
            if number >= rank and number > num_below:
                inside = (rank - num_below) / (number - num_below)
                return lower if name == "+Inf" else lower + inside * (float(name) - lower)
            lower, num_below = float(name), number
        return lower


class Observations:
    """What a histogram has seen so far."""

    __slots__ = ("borders", "counts", "names", "sum")

    def __init__(self, borders: tuple[float, ...]) -> None:
        """borders: the upper ends of the buckets, ascending; a bucket without end follows."""
        self.borders = borders
        self.names = [*map(name_border, borders), "+Inf"]
        self.counts = [0] * (len(borders) + 1)
        self.sum = 0.0

    def observe(self, value: float, number: int = 1) -> None:
        """Add `value`, `number` times."""
        self.counts[bisect_left(self.borders, value)] += number
        self.sum += value * number

    def buckets(self) -> dict[str, int]:
        """How many values were not above each border."""
        return dict(zip(self.names, accumulate(self.counts), strict=True))


def name_border(border: float) -> str:
    """A border as Prometheus writes it, which is Go's way: "0.3", "50.0", "1e+06"."""
    text = repr(border)
    digits = text.index(".") if border < 1e16 else 0
    if digits < 7:
        return text
    mantissa = f"{text[0]}.{text[1:digits]}".rstrip("0").rstrip(".")
    return f"{mantissa}e+{digits - 1:02d}"


class Numbers:
    """All counters and histograms of one engine, since they are counted.

    One thread adds; any thread may read. Invariant: the keys never change after construction.
    """

    def __init__(
        self, labels: dict[str, str], max_model_len: int, num_spec_tokens: int = 0
    ) -> None:
        """labels: those that every metric has. num_spec_tokens: k of speculative decoding."""
        self.labels = labels
        self.counter_specs = COUNTERS + SPEC_DECODE_COUNTERS * bool(num_spec_tokens)
        self.counters: dict[tuple[str, str], float] = {
            (spec.name, value): 0 for spec in self.counter_specs for value in spec.label_values
        }
        self.accepted_per_pos = [0] * num_spec_tokens
        tokens = token_buckets(max_model_len)
        self.histograms = {spec.name: Observations(spec.buckets or tokens) for spec in HISTOGRAMS}

    def add(self, name: str, number: float, label_value: str = "") -> None:
        """Let a counter grow."""
        self.counters[name, label_value] += number

    def observe(self, name: str, value: float, number: int = 1) -> None:
        """Add an observation to a histogram, `number` times."""
        self.histograms[name].observe(value, number)

    def labels_of(self, spec: Spec, label_value: str) -> dict[str, str]:
        """All labels of one of a metric's numbers."""
        return {**self.labels, **({spec.label: label_value} if spec.label else {})}

    def read(self) -> Iterator[Metric]:
        """Counters and histograms as they are now, in the catalog's order."""
        for spec in self.counter_specs:
            for value in spec.label_values:
                number = int(self.counters[spec.name, value])
                yield Counter(spec.name, self.labels_of(spec, value), number)
        if self.accepted_per_pos:
            yield Vector(SPEC_DECODE_PER_POS.name, dict(self.labels), list(self.accepted_per_pos))
        for spec in HISTOGRAMS:
            seen = self.histograms[spec.name]
            total, buckets = seen.sum, seen.buckets()
            yield Histogram(spec.name, self.labels_of(spec, ""), buckets["+Inf"], total, buckets)
