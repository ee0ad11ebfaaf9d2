"""What does an engine say about itself, and where does it go?

Everything is logged below the logger "nanoserve", so an application decides about it as about any
other logger. If the application has configured nothing, the messages are shown as plain lines. An
engine begins with what explains its speed:

    nanoserve: model      demo (Qwen3ForCausalLM), max_model_len 512
    nanoserve: device     cpu, float32, attention=torch, 1 thread
    nanoserve: KV cache   32768 blocks of 16 tokens, prefix caching on
    nanoserve: scheduler  max_num_seqs 256, token budget 2048, chunked prefill on

Two environment variables:

    NANOSERVE_LOGGING_LEVEL    DEBUG, INFO (the default), WARNING, ERROR or CRITICAL
    NANOSERVE_LOG_SCHEDULER=1  one line for each step: who runs, who waits, how many blocks are free

The root logger and other loggers are never changed. The lines go to stderr. In a notebook those of
DEBUG and INFO go to stdout, because a notebook shows stderr in red.

Left out: colours, files, JSON. Python's logging.config can do all three for an application.

vLLM: vllm/logger.py, VLLM_LOGGING_LEVEL in vllm/envs.py.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TextIO

from nanoserve.checkpoint import find_quantization
from nanoserve.interrupts import suppress, unless_signal

if TYPE_CHECKING:
    from nanoserve.engine import LLMEngine, StepReport
    from nanoserve.sequence import Sequence

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
LEVEL_ALIASES = {"WARN": "WARNING", "FATAL": "CRITICAL"}  # as in Python's logging
WARNED: set[str] = set()  # messages of warning_once, in this process
MOST_NAMES = 8  # in one list of a step's line


def init_logger(name: str) -> logging.Logger:
    """The logger of a module. A module that runs as a script (`__main__`) is below "nanoserve"
    too."""
    is_ours = name == "nanoserve" or name.startswith("nanoserve.")
    return logging.getLogger(name if is_ours else f"nanoserve.{name}")


def configure_logging(default: str = "INFO") -> None:
    """Show messages, unless the application has configured logging itself.

    NANOSERVE_LOGGING_LEVEL is obeyed in both cases. It is read in each call, so that a notebook may
    change it between two engines. Raises ValueError if it is not one of LEVELS. Where it is not
    set, messages of the level `default` and above are shown; of INFO and above with
    NANOSERVE_LOG_SCHEDULER, whose lines are INFO. The first call decides about that.
    """
    logger = logging.getLogger("nanoserve")
    level = os.environ.get("NANOSERVE_LOGGING_LEVEL", "").upper()
    level = LEVEL_ALIASES.get(level, level)
    if level and level not in LEVELS:
        raise ValueError(
            f"NANOSERVE_LOGGING_LEVEL is {level!r}; allowed: {', '.join(LEVELS)}. "
            "Change or unset this environment variable."
        )
    if in_notebook():  # Hugging Face's packages import tqdm's widgets; our bars are plain text
        warnings.filterwarnings("ignore", "IProgress not found")
    if level:
        logger.setLevel(level)
    if not logger.hasHandlers():
        logger.addHandler(PlainHandler())
        if logger.level == logging.NOTSET:
            logger.setLevel("INFO" if logs_steps() else default)


def logs_steps() -> bool:
    """Does the environment ask for a line for each step?"""
    return os.environ.get("NANOSERVE_LOG_SCHEDULER", "0") not in ("", "0")


def warning_once(logger: logging.Logger, message: str) -> None:
    """Log a warning, unless this process has logged the same one before."""
    if message not in WARNED:
        WARNED.add(message)
        logger.warning(message)


class PlainHandler(logging.Handler):
    """Shows messages as lines, as long as the application has no handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return  # configured after the engine was built: the record goes there
        try:
            is_report = record.levelno < logging.WARNING
            level = "" if is_report else f" {record.levelname}"
            stream = output_stream() if is_report else Lenient(sys.stderr)
            # tqdm.write prints above a progress bar instead of into it. No tqdm, no bar.
            write = sys.modules["tqdm"].tqdm.write if "tqdm" in sys.modules else print
            write(f"nanoserve{level}: {self.format(record)}", file=stream)
            stream.flush()
        except unless_signal(Exception):
            self.handleError(record)


def output_stream() -> Any:
    """Where reports and progress bars go: stderr, in a notebook stdout. What cannot be written is
    dropped (a full disk, a pipe that nobody reads, no stream at all): the work goes on."""
    return Lenient(sys.stdout if in_notebook() else sys.stderr)


class Lenient:
    """A text stream without errors. Two of the same stream are equal, as tqdm compares streams."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lenient) and self._stream is other._stream

    __hash__ = None  # type: ignore[assignment]

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: it is closed
            return self._stream.write(text) if self._stream else 0
        return 0

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            if self._stream:
                self._stream.flush()


def in_notebook() -> bool:
    """Is what this process prints shown in a notebook?"""
    return type(sys.stdout).__module__.startswith("ipykernel")


# -- what an engine says --


def log_startup(engine: LLMEngine) -> None:
    """Log what runs. With NANOSERVE_LOG_SCHEDULER, let the engine log each step, too."""
    logger = init_logger("nanoserve.engine")
    for line in startup_report(engine):
        logger.info(line)
    if logs_steps():
        engine.step_listeners.append(SchedulerLog(engine))


def describe_runner(runner: Any) -> str:
    """Its device, dtype, attention and graphs."""
    backend = type(runner.backend)  # one of the user's own may inherit its name
    attention = backend.name if "name" in vars(backend) else backend.__name__
    text = f"device={runner.device}, dtype={runner.dtype}, attention={attention}"
    how = find_quantization(runner.model_config.hf_config) or ""  # quantization_config (awq)
    if quantization := runner.config.quantization or how.partition("(")[2].strip(")"):
        text += f", weights={quantization}"
    if runner.model.library != "nanoserve":
        text += f", model={runner.model.library}"
    if runner.graphs is not None:
        mib = runner.graphs.num_bytes / 2**20
        text += f", CUDA graphs for {len(runner.graphs.sizes)} batch sizes ({mib:.0f} MiB)"
    return text


def describe_engine(engine: LLMEngine, name: str = "LLMEngine") -> str:
    """The repr of an engine: LLMEngine(demo, cpu float32, 512 blocks, 1 running, 0 waiting)."""
    model = engine.model_config.path.name
    if engine._is_closed:
        return f"{name}({model}, closed)"
    scheduler, device = engine.scheduler, " ".join(_device_of(engine).split(", ")[:2])
    swapped = f", {len(scheduler.swapped)} swapped" if scheduler.swapped else ""
    return (
        f"{name}({model}, {device}, {engine.executor.num_kv_blocks} blocks, "
        f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting{swapped})"
    )


def _device_of(engine: LLMEngine) -> str:
    """What the executor says, with less punctuation: "cpu, float32, attention=torch"."""
    text = engine.executor.describe().removeprefix("device=")
    return text.replace("dtype=", "").replace("torch.", "")


def startup_report(engine: LLMEngine) -> list[str]:
    """Four lines that fit into 80 columns: model, device, KV cache, scheduler. Further lines only
    for a device with more to tell (ranks, CUDA graphs), and for unusual scheduling."""
    config, executor = engine.config, engine.executor
    device, _, graphs = _device_of(engine).partition(", CUDA ")
    num_threads = getattr(executor, "num_threads", None)
    if num_threads and config.device == "cpu":
        device += f", {num_threads} {'thread' if num_threads == 1 else 'threads'}"
    # Whole parts, as many as fit beside "nanoserve: device     ".
    marked = wrap(device.replace(" ", "\xa0").replace(",\xa0", ", "), 57)
    device, *more = (line.replace("\xa0", " ") for line in marked)
    more += [f"CUDA {graphs}"] if graphs else []
    name, architecture = engine.model_config.path.name, engine.model_config.architecture
    choices = {
        "priority": config.scheduling_policy == "priority",
        "preemption by swap": config.preemption_mode == "swap",
        "async scheduling": config.async_scheduling,
    }
    chosen = ", ".join(text for text, is_chosen in choices.items() if is_chosen)
    return [
        f"model      {name} ({architecture}), max_model_len {config.max_model_len}",
        f"device     {device}",
        *(f"           {line}" for line in more),
        f"KV cache   {executor.num_kv_blocks} blocks of {config.block_size} tokens, "
        f"prefix caching {_on_off(config.enable_prefix_caching)}",
        f"scheduler  max_num_seqs {config.max_num_seqs}, "
        f"token budget {config.max_num_batched_tokens}, "
        f"chunked prefill {_on_off(config.enable_chunked_prefill)}",
        *([f"           {chosen}"] if chosen else []),
    ]


def _on_off(is_on: bool) -> str:
    return "on" if is_on else "off"


class SchedulerLog:
    """A step listener that logs a line for each step:

        step 7: 9 tokens: story 1, chat 8; waiting: long; preempted: long; 3 of 12 blocks free

    A number is how many tokens of that request the step computed. A completion of a request with
    several is named with its index, such as "story[1]". With async scheduling, the engine has
    scheduled the next step already when it reports one: then what waits is of the next step.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self.logger = init_logger("nanoserve.scheduler")
        self.engine = engine
        self.num_steps = 0
        self._running: set[int] = set()  # seq_ids, at the end of the last step

    def __call__(self, report: StepReport) -> None:
        """Called by the engine at the end of each step."""
        self.num_steps += 1
        scheduler, manager = self.engine.scheduler, self.engine.block_manager
        output, sequences = report.scheduler_output, report.sequences
        parts = [
            f"{_name(sequences.get(item.seq_id))} {item.num_scheduled_tokens}"
            for item in output.scheduled
        ]
        waiting = [*scheduler.swapped, *scheduler.waiting]
        finished = [u.sequence for u in report.updates if u.sequence.status.finish_reason]
        lists = {
            "waiting": [_name(seq) for seq in waiting],
            "preempted": [_name(seq) for seq in waiting if seq.seq_id in self._running],
            "finished": [f"{_name(seq)} ({seq.status.finish_reason})" for seq in finished],
        }
        self._running = {seq.seq_id for seq in scheduler.running}
        total = output.total_num_scheduled_tokens
        self.logger.info(
            f"step {self.num_steps}: {total} {'token' if total == 1 else 'tokens'}: "
            f"{_listing(parts)}; "
            + "".join(f"{title}: {_listing(names)}; " for title, names in lists.items() if names)
            + f"{manager.num_free_blocks} of {manager.num_blocks} blocks free"
        )


def _name(seq: Sequence | None) -> str:
    """The user's name for a request, with the index of the completion if it has several."""
    if seq is None:
        return "(aborted)"
    return seq.request_id if seq.sampling_params.n == 1 else f"{seq.request_id}[{seq.branch}]"


def _listing(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def to_html(kind: str, value: Any) -> str | None:
    """What a notebook shows for a value: the result of the function `kind` in tools/as_html.py.
    None if tools/ was deleted; then the notebook shows the repr."""
    try:
        return getattr(importlib.import_module("nanoserve.tools.as_html"), kind)(value)
    except ModuleNotFoundError:
        return None
