"""The pictures of notebook 01, under their first names; nanoserve/extras/trace draws them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator

from nanoserve.extras.trace import Recorder as StepLog
from nanoserve.extras.trace import block_map as blocks
from nanoserve.extras.trace import decision
from nanoserve.extras.trace import step_tensors as inputs
from nanoserve.kernels.threads import load_torch

load_torch()  # before a notebook imports it: waiting threads sleep (nanoserve/kernels/threads.py)
__all__ = ["StepLog", "blocks", "decision", "inputs", "quietly", "timeline"]


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep an engine's first lines and progress bars out of the stored notebook."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


def timeline(log: StepLog, title: str) -> None:
    log.timeline(title)
