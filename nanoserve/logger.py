"""Where do the engine's messages go?

Everything is logged below the logger "nanoserve", so an application decides about it as about any
other logger. If the application has configured nothing, the messages are shown as plain lines:

    nanoserve: model      demo (Qwen3ForCausalLM), 512 tokens a request
    nanoserve WARNING: 2 threads on 1 core: ...

    in a module          logger = init_logger(__name__)
    when work begins     configure_logging()     LLMEngine and the command line call it

The root logger and other loggers are never changed. The lines go to stderr. In a notebook those of
DEBUG and INFO go to stdout, because a notebook shows stderr in red.

    NANOSERVE_LOGGING_LEVEL    DEBUG, INFO (the default), WARNING, ERROR or CRITICAL

Left out: colours, files, JSON. `logging.config` of the application does all three.

vLLM: vllm/logger.py, VLLM_LOGGING_LEVEL in vllm/envs.py.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
WARNED: set[str] = set()  # messages of warning_once, in this process


def init_logger(name: str) -> logging.Logger:
    """The logger of a module. A module that runs as a script (`__main__`) is below "nanoserve"
    too."""
    is_ours = name == "nanoserve" or name.startswith("nanoserve.")
    return logging.getLogger(name if is_ours else f"nanoserve.{name}")


def configure_logging() -> None:
    """Show messages of INFO and above, unless the application has configured logging itself.

    NANOSERVE_LOGGING_LEVEL is obeyed in both cases. It is read in each call, so that a notebook may
    change it between two engines. Raises ValueError if it is not one of LEVELS.
    """
    logger = logging.getLogger("nanoserve")
    level = os.environ.get("NANOSERVE_LOGGING_LEVEL", "").upper()
    if level and level not in LEVELS:
        raise ValueError(
            f"NANOSERVE_LOGGING_LEVEL is {level!r}; allowed: {', '.join(LEVELS)}. "
            "Change or unset this environment variable."
        )
    if level:
        logger.setLevel(level)
    if not logger.hasHandlers():
        logger.addHandler(PlainHandler())
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)


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
            stream = output_stream() if is_report else sys.stderr
            print(f"nanoserve{level}: {self.format(record)}", file=stream, flush=True)
        except Exception:
            self.handleError(record)


def output_stream() -> TextIO:
    """Where reports and progress bars go: stderr, in a notebook stdout."""
    in_notebook = type(sys.stdout).__module__.startswith("ipykernel")
    return sys.stdout if in_notebook else sys.stderr
