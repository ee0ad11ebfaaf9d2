"""Who tells the numbers, and where?

    CountingStatLogger     keeps all numbers; get_metrics reads them
    PrometheusStatLogger   the same, and shows them in Prometheus' text format (a server's /metrics)
    LoggingStatLogger      a line in the log, every ten seconds while the engine works

A logger of your own is a StatLogger:

    class Slowest(StatLogger):
        seconds = 0.0
        def record(self, stats):
            for each in stats.finished_requests:
                self.seconds = max(self.seconds, each.e2e_latency)

    collect_metrics(llm, Slowest())

Prometheus asks, nobody sends. So PrometheusStatLogger does no work in a step beyond counting: it
makes its text when it is asked, and reads the gauges from the engine then. It has a registry of its
own, so that two engines of one process do not mix.

vLLM: vllm/v1/metrics/loggers.py. (There the registry is the process' own, and a gauge is set in
each step.)
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanoserve.arg_utils import engine_of
from nanoserve.config import DEMO_NAME, check_number
from nanoserve.exceptions import brief
from nanoserve.extras.metrics.catalog import (
    ADMISSION_REJECTIONS,
    CACHE_CONFIG_INFO,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    KV_CONNECTOR_COUNTERS,
    SPEC_DECODE_COUNTERS,
    SPEC_DECODE_PER_POS,
)
from nanoserve.extras.metrics.reader import Counter, Gauge, Histogram, Metric, Numbers, Vector
from nanoserve.extras.metrics.stats import IterationStats, SpecDecodingStats
from nanoserve.logger import init_logger

if TYPE_CHECKING:
    from nanoserve.engine import LLMEngine

logger = init_logger(__name__)

LOG_INTERVAL = 10.0  # seconds, vLLM's
HIT_RATE_WINDOW = 1000  # steps with new requests, over which the log tells the hit rate


class StatLogger:
    """Receives the numbers of every step. The engine's thread calls `record`; any thread may call
    the rest. What it raises is logged and ends no request."""

    def record(self, stats: IterationStats) -> None:
        """A step has ended, or (with num_scheduled_tokens 0) a request between two steps."""

    def log(self) -> None:
        """Tell what is known so far, if this logger tells anything by itself."""


class CountingStatLogger(StatLogger):
    """All numbers since it was made."""

    def __init__(self, llm: Any, model_name: str | None = None) -> None:
        """llm: an LLM, an AsyncLLM or an LLMEngine. model_name: the label; None: the name that the
        engine was built with."""
        self.engine: LLMEngine = engine_of(llm)
        engine = self.engine
        if not isinstance(model_name, (str, type(None))):
            raise TypeError(f"model_name must be a string or None, got {brief(model_name)}.")
        name = model_name or str(engine.config.model or DEMO_NAME.as_posix())
        name = name.encode("utf-8", "backslashreplace").decode()  # a path may have other bytes
        self.labels = {"model_name": name, "engine": "0"}
        max_model_len = engine.config.max_model_len or engine.model_config.max_model_len
        self.numbers = Numbers(self.labels, max_model_len, engine.config.query_lens[-1] - 1)
        self._num_rejected_before = engine.num_rejected
        self._external_before = dict(self._external())

    def _external(self) -> dict[tuple[str, str], float]:
        """What a KV connector counts, by metric and label."""
        connector = self.engine.kv_connector
        return {} if connector is None else connector.stats.counters

    def record(self, stats: IterationStats) -> None:
        if stats.num_scheduled_tokens:
            self._record_step(stats)
        if stats.num_preempted_reqs:
            self.numbers.add("vllm:num_preemptions", stats.num_preempted_reqs)
        for finished in stats.finished_requests:
            self.numbers.add("vllm:request_success", 1, finished.finish_reason)
            for name, value in (
                ("vllm:e2e_request_latency_seconds", finished.e2e_latency),
                ("vllm:request_queue_time_seconds", finished.queued_time),
                ("vllm:request_prefill_time_seconds", finished.prefill_time),
                ("vllm:request_decode_time_seconds", finished.decode_time),
                ("vllm:request_inference_time_seconds", finished.inference_time),
                (
                    "vllm:request_time_per_output_token_seconds",
                    finished.mean_time_per_output_token,
                ),
                ("vllm:request_prompt_tokens", finished.num_prompt_tokens),
                ("vllm:request_generation_tokens", finished.num_generation_tokens),
                ("vllm:request_params_max_tokens", finished.max_tokens_param),
                ("vllm:request_num_preemptions", finished.num_preemptions),
                ("vllm:request_prefill_kv_computed_tokens", finished.num_computed_prompt_tokens),
            ):
                if value is not None:
                    self.numbers.observe(name, value)
        for n in stats.n_params_iter:
            self.numbers.observe("vllm:request_params_n", n)
        for number in stats.max_num_generation_tokens_iter:
            self.numbers.observe("vllm:request_max_num_generation_tokens", number)

    def _record_step(self, stats: IterationStats) -> None:
        add, observe, perf = self.numbers.add, self.numbers.observe, stats.perf_stats
        observe("vllm:iteration_tokens_total", stats.num_scheduled_tokens)
        add("vllm:generation_tokens", stats.num_generation_tokens)
        add("vllm:estimated_flops_per_gpu", perf.num_flops_per_gpu)
        add("vllm:estimated_read_bytes_per_gpu", perf.num_read_bytes_per_gpu)
        add("vllm:estimated_write_bytes_per_gpu", perf.num_write_bytes_per_gpu)
        for latency, number in stats.inter_token_latencies_iter.items():
            observe("vllm:inter_token_latency_seconds", latency, number)
        for latency in stats.time_to_first_tokens_iter:
            observe("vllm:time_to_first_token_seconds", latency)
        if stats.prefix_cache_queries:
            add("vllm:prefix_cache_queries", stats.prefix_cache_queries)
            add("vllm:prefix_cache_hits", stats.prefix_cache_hits)
            add("vllm:prompt_tokens_cached_by_source", stats.prefix_cache_hits, "device")
        if stats.num_prompt_tokens:
            num_cached, num_external = (
                stats.num_cached_prompt_tokens,
                stats.num_external_prompt_tokens,
            )
            num_computed = stats.num_prompt_tokens - num_cached
            add("vllm:prompt_tokens", stats.num_prompt_tokens)
            add("vllm:prompt_tokens_by_source", num_computed, "local_compute")
            add("vllm:prompt_tokens_by_source", num_cached - num_external, "local_cache_hit")
            add("vllm:prompt_tokens_by_source", num_external, "external_kv_transfer")
            add("vllm:prompt_tokens_cached", num_cached)
        if stats.spec_decoding_stats is not None:
            self._record_drafts(stats.spec_decoding_stats)

    def _record_drafts(self, stats: SpecDecodingStats) -> None:
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            self.numbers.add(f"vllm:spec_decode_{name}", getattr(stats, name))
        for position, number in enumerate(stats.num_accepted_tokens_per_pos):
            self.numbers.accepted_per_pos[position] += number

    def get_metrics(self) -> list[Metric]:
        """Every metric as it is now. Any thread may call this."""
        spec, num_rejected = ADMISSION_REJECTIONS, self.engine.num_rejected
        labels = {"model_name": self.labels["model_name"], spec.label: spec.label_values[0]}
        rejections = Counter(spec.name, labels, num_rejected - self._num_rejected_before)
        return [*self._read_gauges(), rejections, *self.numbers.read(), *self._read_external()]

    def _read_external(self) -> Iterator[Counter]:
        """The counters of a KV connector."""
        specs = {spec.name: spec for spec in (*COUNTERS, *KV_CONNECTOR_COUNTERS)}
        for (name, label_value), number in self._external().items():
            labels = self.numbers.labels_of(specs[name], label_value)
            yield Counter(name, labels, number - self._external_before[name, label_value])

    def _read_gauges(self) -> Iterator[Gauge]:
        """The state of the engine, in the order of catalog.GAUGES."""
        state = EngineState(self.engine)
        values = (
            (state.num_running,),
            (state.num_waiting,),
            (state.num_waiting - state.num_deferred, state.num_deferred),
            (state.kv_cache_usage,),
        )
        for spec, its_values in zip(GAUGES, values, strict=True):
            for label_value, value in zip(spec.label_values, its_values, strict=True):
                yield Gauge(spec.name, self.numbers.labels_of(spec, label_value), float(value))
        yield Gauge(CACHE_CONFIG_INFO.name, {**state.cache_config, "engine": "0"}, 1.0)


class EngineState:
    """What the engine holds now. Lengths and copies of lists, so that any thread may look."""

    def __init__(self, engine: LLMEngine) -> None:
        scheduler, manager, config = engine.scheduler, engine.block_manager, engine.config
        waiting = [*scheduler.waiting, *scheduler.swapped]
        self.num_running = len(scheduler.running)
        self.num_waiting = len(waiting)
        connector = scheduler.connector
        self.num_deferred = sum(
            seq.is_held or not seq.is_ready() or bool(connector and connector.is_loading(seq))
            for seq in waiting
        )
        self.kv_cache_usage = 1 - manager.num_free_blocks / manager.num_blocks
        self.cache_config = {
            "block_size": str(config.block_size),
            "cache_dtype": "auto",  # that of the weights
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "gpu_memory_utilization": str(config.gpu_memory_utilization),
            "num_cpu_blocks": str(manager.num_cpu_blocks),
            "num_gpu_blocks": str(manager.num_blocks),
            "num_gpu_blocks_override": str(config.num_gpu_blocks_override),
        }


class PrometheusStatLogger(CountingStatLogger):
    """The numbers for Prometheus. Needs prometheus-client (`pip install -e ".[server]"`)."""

    def __init__(self, llm: Any, registry: Any = None, model_name: str | None = None) -> None:
        """registry: a prometheus_client.CollectorRegistry that asks this logger, too; None: one of
        its own. Raises ModuleNotFoundError if prometheus-client is not installed, TypeError for
        what is no registry, ValueError for one that has these metrics of another engine: a text
        tells each metric once."""
        try:
            self._client = import_module("prometheus_client")
        except ModuleNotFoundError as error:
            message = 'Prometheus metrics need prometheus-client: pip install -e ".[server]".'
            raise ModuleNotFoundError(message, name="prometheus_client") from error
        super().__init__(llm, model_name)
        registry_cls = self._client.CollectorRegistry
        if not isinstance(registry, (registry_cls, type(None))):
            raise TypeError(f"registry must be a CollectorRegistry or None, got {brief(registry)}.")
        self.registry = registry_cls() if registry is None else registry
        self.registry.register(self)

    @property
    def content_type(self) -> str:
        """The header Content-Type for `render`."""
        return self._client.CONTENT_TYPE_LATEST

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self._client.generate_latest(self.registry)

    def describe(self) -> Iterator[Any]:
        """The names that are taken: the registry calls this, once."""
        return self.collect()

    def collect(self) -> Iterator[Any]:
        """The metrics as prometheus-client's families: the registry calls this."""
        core = self._client.metrics_core
        single = (CACHE_CONFIG_INFO, ADMISSION_REJECTIONS, SPEC_DECODE_PER_POS)
        counters = (*COUNTERS, *SPEC_DECODE_COUNTERS, *KV_CONNECTOR_COUNTERS)
        specs = (*GAUGES, *single, *counters, *HISTOGRAMS)
        helps = {spec.name: spec.help for spec in specs}
        families: dict[str, Any] = {}
        kinds = {
            Gauge: core.GaugeMetricFamily,
            Counter: core.CounterMetricFamily,
            Vector: core.CounterMetricFamily,
            Histogram: core.HistogramMetricFamily,
        }
        for metric in self.get_metrics():
            if metric.name not in families:
                make = kinds[type(metric)]
                labels = [*metric.labels, *["position"] * isinstance(metric, Vector)]
                families[metric.name] = make(metric.name, helps[metric.name], labels=labels)
            values = list(metric.labels.values())
            if isinstance(metric, Histogram):
                families[metric.name].add_metric(values, list(metric.buckets.items()), metric.sum)
            elif isinstance(metric, (Counter, Gauge)):
                families[metric.name].add_metric(values, metric.value)
            elif isinstance(metric, Vector):
                for position, value in enumerate(metric.values):
                    families[metric.name].add_metric([*values, str(position)], value)
        yield from families.values()


class LoggingStatLogger(StatLogger):
    """A line in the log, while the engine works: what it did since the last line, and its state.

        120.0 prompt tokens/s, 450.1 output tokens/s; running 8, waiting 2, preempted 1; KV cache
        12.5% full, prefix cache hits 33.0%; 0.012 TFLOP/s, 9.1 GB/s (estimated)

    Prompt tokens are those that were computed, not found in the prefix cache. With speculative
    decoding it also says: 61.5% of the drafts accepted, 2.84 tokens each time.
    """

    def __init__(self, llm: Any, interval: float = LOG_INTERVAL) -> None:
        """interval: seconds of work between two lines. Time in which there was no request does not
        count."""
        self.engine: LLMEngine = engine_of(llm)
        check_number("interval", interval, float, 0, math.inf, "seconds, 0 or more")
        self.interval = interval
        self._is_idle = True  # no request was left after the last step
        self._recent_queries: deque[tuple[int, int]] = deque(maxlen=HIT_RATE_WINDOW)
        self._start()

    def _start(self) -> None:
        """A new interval."""
        self._since = self._last_step = time.monotonic()
        self._num_prompt = self._num_output = self._num_preempted = 0
        self._num_flops = self._num_bytes = 0
        self._num_drafts = self._num_draft_tokens = self._num_accepted = 0

    def record(self, stats: IterationStats) -> None:
        perf = stats.perf_stats
        self._num_prompt += stats.num_prompt_tokens - stats.num_cached_prompt_tokens
        self._num_output += stats.num_generation_tokens
        self._num_preempted += stats.num_preempted_reqs
        self._num_flops += perf.num_flops_per_gpu
        self._num_bytes += perf.num_read_bytes_per_gpu + perf.num_write_bytes_per_gpu
        if (drafts := stats.spec_decoding_stats) is not None:
            self._num_drafts += drafts.num_drafts
            self._num_draft_tokens += drafts.num_draft_tokens
            self._num_accepted += drafts.num_accepted_tokens
        if stats.prefix_cache_queries:
            self._recent_queries.append((stats.prefix_cache_queries, stats.prefix_cache_hits))
        if stats.num_scheduled_tokens:
            self._note_step(stats.step_time)

    def _note_step(self, seconds: float) -> None:
        """A step has ended, which took so long. Log a line if it is time."""
        now = time.monotonic()
        if self._is_idle:
            self._since += max(0.0, now - seconds - self._last_step)
        self._last_step, self._is_idle = now, not self.engine.scheduler.has_unfinished()
        if now - self._since >= self.interval:
            self.log()

    def log(self) -> None:
        """Log the line now, and begin the next interval. If nothing was done, the line is of level
        DEBUG."""
        is_idle = not (self._num_prompt or self._num_output)
        (logger.debug if is_idle else logger.info)("%s", self._describe())
        self._start()

    def _describe(self) -> str:
        seconds = max(time.monotonic() - self._since, 1e-9)
        state = EngineState(self.engine)
        parts = [
            f"{self._num_prompt / seconds:.1f} prompt tokens/s, "
            f"{self._num_output / seconds:.1f} output tokens/s",
            f"running {state.num_running}, waiting {state.num_waiting}"
            + (f", preempted {self._num_preempted}" if self._num_preempted else ""),
            f"KV cache {state.kv_cache_usage:.1%} full",
        ]
        if num_queried := sum(queried for queried, _ in self._recent_queries):
            num_hit = sum(hit for _, hit in self._recent_queries)
            parts[-1] += f", prefix cache hits {num_hit / num_queried:.1%}"
        if self._num_drafts:
            share = self._num_accepted / self._num_draft_tokens
            mean = 1 + self._num_accepted / self._num_drafts
            parts.append(f"{share:.1%} of the drafts accepted, {mean:.2f} tokens each time")
        if self._num_flops:
            flops, moved = self._num_flops / seconds / 1e12, self._num_bytes / seconds / 1e9
            parts.append(f"{flops:.3g} TFLOP/s, {moved:.3g} GB/s (estimated)")
        return "; ".join(parts)
