"""How does a bad input end?

    clear      an error that says what was wrong: ValueError, TypeError and the like, raised by a
               `raise` of nanoserve, or the request's own outcome "error"
    served     an answer without NaN, of tokens of the vocabulary
    unclear    any other exception, or one that came out of a library
    silent     an answer that is none: NaN, or tokens outside the vocabulary

A hang, a crash and too much memory are for the process around it to notice (worker.py). After each
input, `Probe.check` sees whether the engine beside it still says the same.
"""

from __future__ import annotations

import linecache
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import nanoserve
from nanoserve.llm import LLM
from nanoserve.sampling_params import SamplingParams

PACKAGE = str(Path(nanoserve.__file__).parent)
# Python's own TypeErrors for a call with other arguments than the function has.
CALL_ERRORS = ("unexpected keyword argument", "positional argument", "multiple values for")
CLEAR_TYPES = (ValueError, TypeError, FileNotFoundError, RuntimeError)


class Verdict(NamedTuple):
    """How it ended, and the message or the answer."""

    kind: str
    text: str


def judge(action: Callable[[], Any]) -> Verdict:
    """Call `action`, which returns RequestOutputs or anything else, and say how it ended."""
    try:
        result = action()
    except BaseException as error:
        return Verdict("clear" if is_clear(error) else "unclear", describe(error))
    for output in result if isinstance(result, list) else [result]:
        for completion in getattr(output, "outputs", ()):
            if completion.finish_reason == "error":
                return Verdict("clear", str(completion.stop_reason))
            if has_nan(completion):
                return Verdict("silent", f"NaN: {completion.token_ids}")
    return Verdict("served", describe_result(result))


def is_clear(error: BaseException) -> bool:
    """Was it raised by a `raise` of nanoserve, with a message, or is it Python's own TypeError for
    arguments that a function does not have?"""
    message = describe(error)
    if isinstance(error, TypeError) and any(words in message for words in CALL_ERRORS):
        return True
    frames = [(frame.f_code.co_filename, line) for frame, line in walk(error)]
    file, line = frames[-1] if frames else ("", 0)
    is_ours = file.startswith(PACKAGE) and "raise" in linecache.getline(file, line)
    return is_ours and isinstance(error, CLEAR_TYPES) and len(message) > 20


def walk(error: BaseException) -> list[tuple[Any, int]]:
    """The frames of the traceback, the one that raised last."""
    return list(traceback.walk_tb(error.__traceback__))


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:300]
    except Exception:
        return type(error).__name__


def has_nan(completion: Any) -> bool:
    total = completion.cumulative_logprob
    return total is not None and not math.isfinite(total)


def describe_result(result: Any) -> str:
    if isinstance(result, list) and result and hasattr(result[0], "outputs"):
        return str([completion.token_ids for completion in result[0].outputs])[:120]
    return type(result).__name__


class Probe:
    """An engine that stands beside, and its answer to one prompt."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.right = self.ask()

    def ask(self) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=6)
        [output] = self.llm.generate("Once upon a time", params, use_tqdm=False)
        return output.outputs[0].token_ids

    def check(self) -> str:
        """What is wrong with the engine now; "" if nothing is."""
        engine = self.llm.engine
        try:
            engine.block_manager.check()
        except AssertionError as error:
            return f"the books are wrong: {error}"
        if engine.has_unfinished_requests():
            engine.abort_request(list(engine.output_processor.requests))
            return "requests are left"
        if engine.block_manager.num_free_blocks != engine.executor.num_kv_blocks:
            return "blocks are lost"
        tokens = self.ask()
        return "" if tokens == self.right else f"the probe gets {tokens}, not {self.right}"
