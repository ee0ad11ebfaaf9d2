"""How do the numbers get from the engine to the loggers?

    engine --StepReport, ended request--> StatLoggerManager --IterationStats--> each StatLogger

The engine knows none of this: it calls its listeners, step_listeners after each step and the output
processor's finish_listeners for each request that has ended. So everything here works with an LLM,
an AsyncLLM and an LLMEngine, and costs nothing where nobody listens.

vLLM: vllm/v1/metrics/loggers.py (StatLoggerManager), vllm/v1/metrics/reader.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanoserve.arg_utils import engine_of
from nanoserve.exceptions import Caught, brief
from nanoserve.extras.metrics.loggers import CountingStatLogger, LoggingStatLogger, StatLogger
from nanoserve.extras.metrics.reader import Metric
from nanoserve.extras.metrics.stats import IterationStats, StatsCollector
from nanoserve.logger import init_logger

if TYPE_CHECKING:
    from nanoserve.engine import LLMEngine, StepReport
    from nanoserve.output_processor import RequestConsumer

logger = init_logger(__name__)


class StatLoggerManager:
    """Listens to one engine, and hands what it hears to the loggers.

    Invariant: an engine has at most one (see collect_metrics), so each number is made once.
    """

    def __init__(self, engine: LLMEngine, stat_loggers: list[StatLogger]) -> None:
        self.engine = engine
        self.stat_loggers = stat_loggers
        self._collector = StatsCollector(engine)
        engine.step_listeners.append(self)
        engine.output_processor.finish_listeners.append(self.finish)

    def __call__(self, report: StepReport) -> None:
        """The engine has ended a step."""
        self.record(self._collector.read_step(report))

    def finish(self, request: RequestConsumer) -> None:
        """A request has ended, in whatever way. Never raises: no request may end otherwise because
        somebody counts it."""
        with Caught() as caught:
            self.record(self._collector.read_finished(request))
        if caught.error is not None:
            logger.error("the end of a request was not counted", exc_info=caught.error)

    def record(self, stats: IterationStats) -> None:
        """Give each logger these numbers."""
        for stat_logger in self.stat_loggers:
            with Caught() as caught:
                stat_logger.record(stats)
            if caught.error is not None:
                logger.error("a logger failed: %s", brief(stat_logger), exc_info=caught.error)

    def log(self) -> None:
        """Let each logger tell what it knows, now."""
        for stat_logger in self.stat_loggers:
            stat_logger.log()

    def close(self) -> None:
        """Listen no more."""
        if self in self.engine.step_listeners:
            self.engine.step_listeners.remove(self)
            self.engine.output_processor.finish_listeners.remove(self.finish)


def find_manager(llm: Any) -> StatLoggerManager | None:
    """Who listens to this LLM, AsyncLLM or LLMEngine; None if nobody collects its metrics."""
    listeners = engine_of(llm).step_listeners
    return next((each for each in listeners if isinstance(each, StatLoggerManager)), None)


def collect_metrics(llm: Any, *stat_loggers: StatLogger) -> StatLoggerManager:
    """Collect the metrics of an LLM, an AsyncLLM or an LLMEngine from now on. Without stat_loggers:
    count them for get_metrics, and log a line every ten seconds of work. If its metrics are
    collected already, the loggers are added. Raises TypeError for what is no engine or no logger.
    """
    engine, manager = engine_of(llm), find_manager(llm)
    for stat_logger in stat_loggers:
        if isinstance(stat_logger, type) or not callable(getattr(stat_logger, "record", None)):
            raise TypeError(
                f"a stat logger must be a StatLogger, got {brief(stat_logger)}. Give an object "
                "with a method record(stats): LoggingStatLogger(engine)."
            )
    if manager is not None:
        manager.stat_loggers += stat_loggers
        return manager
    default = [CountingStatLogger(engine), LoggingStatLogger(engine)]
    return StatLoggerManager(engine, list(stat_loggers) or default)


def get_metrics(llm: Any) -> list[Metric]:
    """The metrics of an LLM, an AsyncLLM or an LLMEngine as they are now. Any thread may call this.
    Raises RuntimeError if nothing counts them."""
    manager = find_manager(llm)
    for stat_logger in manager.stat_loggers if manager else ():
        if isinstance(stat_logger, CountingStatLogger):
            return stat_logger.get_metrics()
    raise RuntimeError(
        "nothing counts the metrics of this engine. Build it with LLM(disable_log_stats=False), or "
        "call nanoserve.extras.metrics.collect_metrics(engine) before its first request."
    )
