"""What do the notebooks need beside the engine? Four requests, questions with checks.

    llm = lesson.small_llm()                          # a KV cache that fits into a picture
    server = lesson.SmallServer()                     # the same behind HTTP, to be watched
    llm.add_request("A", lesson.prompt(llm, "A"))     # one of the four requests of all notebooks
    lesson.check("Q2.1", guess, len(free_queue))      # compares a guess with the live engine
    with lesson.broken("uncache"):                    # the engine with one mistake in it
        ...

*Checks.* `check` prints whether a guess is right. If it is not, the hint depends on the kind of the
mistake, and does not tell the answer. A wrong guess never raises an error, so that a notebook runs
to its end before its reader has answered anything.

*Sabotages* are in sabotage.py; notebooks find their names here too.

Left out: scores, and answers that are kept for the next session.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import re
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

# First of all: it loads torch so that waiting threads sleep (nanoserve/kernels/threads.py).
from nanoserve.extras.sabotage import (
    CASES,
    REPLACEMENTS,
    SABOTAGES,
    SUSPECTS,
    WithoutOneSum,
    broken,
    replaced_method,
    suspect_hints,
)
from nanoserve.llm import LLM

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "CASES",
    "CAST",
    "REPLACEMENTS",
    "SABOTAGES",
    "SUSPECTS",
    "SmallServer",
    "WithoutOneSum",
    "broken",
    "check",
    "explain",
    "prompt",
    "quietly",
    "replaced_method",
    "small_llm",
    "suspect_hints",
]
CAST = {
    "A": "What is 17 + 25?",
    "B": "What is 17 + 26?",
    "C": "What is the capital of France?",
    "D": "Remember: The red box holds 7341. What does the red box hold?",
}
RUN_TIMEOUT = 60.0  # seconds for what a notebook waits for
TOLERANCE = 1e-3  # of floats, relative; also absolute, as a share of the largest number of a tensor

# -- engines --


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Keep an engine's first lines and its progress bars out of a stored notebook."""
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


def small_llm(num_blocks: int = 24, **options: Any) -> LLM:
    """The demo model on the CPU, with blocks of 4 tokens and 4 sequences at most. `options` are
    those of LLM, and win."""
    small = {"num_kv_blocks": num_blocks, "block_size": 4, "max_num_seqs": 4, "device": "cpu"}
    with quietly():
        return LLM(**{**small, **options})


class SmallServer:
    """`nanoserve serve` with the demo model, in a thread of this process, so that a notebook can
    watch the engine while clients talk HTTP to it. `with SmallServer() as server:`, or close() it.

    url: "http://127.0.0.1:" and a free port. llm: the AsyncLLM. A request with the header
    "X-Request-Id: A" has the name A in the engine, too.
    """

    def __init__(
        self,
        num_blocks: int = 24,
        *,
        stat_loggers: Any = None,
        lora_modules: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        """num_blocks and options: those of small_llm. stat_loggers: see AsyncLLM. lora_modules:
        "NAME=FOLDER" of adapters, with enable_lora. Raises ImportError if FastAPI or uvicorn is not
        installed."""
        from nanoserve.arg_utils import EngineArgs
        from nanoserve.extras.async_llm import AsyncLLM
        from nanoserve.extras.server import launcher
        from nanoserve.extras.server.app import build_app
        from nanoserve.extras.server.options import FrontendArgs

        small = {"num_kv_blocks": num_blocks, "block_size": 4, "max_num_seqs": 4, "device": "cpu"}
        quiet = {"disable_uvicorn_access_log": True, "uvicorn_log_level": "error"}
        quiet |= {"lora_modules": lora_modules}
        args = FrontendArgs(port=0, shutdown_timeout=0.0, **quiet)  # type: ignore[arg-type]
        with quietly():
            self.llm = AsyncLLM(EngineArgs(**{**small, **options}), stat_loggers=stat_loggers)
        make_request = self.llm.engine.make_request

        def make_named(request_id: str, *arguments: Any) -> Any:
            name = re.fullmatch(r"(?:chat)?cmpl-(\w{1,9})-\w{8}-0", request_id)
            return make_request(name[1] if name else request_id, *arguments)

        vars(self.llm.engine)["make_request"] = make_named
        self._socket = launcher.bind(args)
        self.url = launcher.describe_address(args, self._socket)
        self._server = launcher.Server(build_app(self.llm, args))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="event loop", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve(sockets=[self._socket]))

    def send(self, path: str, fields: dict[str, Any] | None = None, **headers: str) -> Any:
        """POST `fields` as JSON, or GET without. What is returned has status, headers and read(),
        also if it is an error."""
        body = None if fields is None else json.dumps(fields).encode()
        request = Request(self.url + path, body, {"Content-Type": "application/json", **headers})
        try:
            return urlopen(request, timeout=RUN_TIMEOUT)
        except HTTPError as error:
            return error

    def open_stream(self, name: str, fields: dict[str, Any]) -> HTTPConnection:
        """Ask for a stream and read nothing. Returns when the engine has the request; close() of
        what is returned goes away."""
        client = HTTPConnection(self.url.removeprefix("http://"), timeout=RUN_TIMEOUT)
        headers = {"Content-Type": "application/json", "X-Request-Id": name}
        body = json.dumps({**fields, "stream": True})
        client.request("POST", "/v1/completions", body, headers)
        self.wait_for(lambda: self.llm.engine.is_unfinished(name))
        return client

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the server's event loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(RUN_TIMEOUT)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until `condition()` is true. Raises TimeoutError."""
        deadline = time.monotonic() + RUN_TIMEOUT
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not true after {RUN_TIMEOUT:.0f} seconds.")
            time.sleep(0.002)

    def pause(self) -> None:
        """Begin no more steps, until step() or resume(). Requests may come meanwhile."""
        self.run(self.llm.pause_generation(mode="keep", clear_cache=False))

    def step(self, number: int = 1) -> None:
        """Run so many steps of a paused engine."""
        listeners, reports = self.llm.step_listeners, list[Any]()

        def count(report: Any) -> None:
            reports.append(report)
            if len(reports) == number:
                self.llm._core.is_paused = True
                listeners.remove(count)

        listeners.append(count)
        self.resume()
        self.wait_for(lambda: len(reports) == number)

    def resume(self) -> None:
        """End a pause."""
        self.run(self.llm.resume_generation())

    def close(self) -> None:
        """End the server and the engine. Streams get their last chunk."""
        self._server.should_exit = True
        self._thread.join(RUN_TIMEOUT)

    def __enter__(self) -> SmallServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def prompt(llm: LLM, *turns: str) -> list[int]:
    """The token ids of a chat prompt: the user's question, or question, answer, question, ...
    A turn that is a name of CAST stands for its text."""
    roles = ["user", "assistant"] * len(turns)
    texts = [CAST.get(turn, turn) for turn in turns]
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    render = llm.get_tokenizer().apply_chat_template
    return list(render(messages, add_generation_prompt=True, return_dict=False))


# -- questions --


def check(
    number: str,
    guess: Any,
    actual: Any,
    hints: Mapping[Any, str] | None = None,
    names: bool = False,
) -> None:
    """Say whether `guess` is right: "Q2.1 right: 7." or "Q2.1 not yet: ..." with a hint.

    `hints` has remarks on single wrong guesses (wrong guess -> why this is not it). `names`: the
    numbers are names, such as block ids: "too low" says nothing. A guess that is, or contains, None
    or ... is no answer yet. Raises nothing for a wrong guess.
    """
    try:
        if _is_open(guess, actual):
            text = "no answer yet: write your own in place of None or ..., and run this cell again."
            if _is_written(sys._getframe(1).f_globals):
                text = "no answer yet: it is None. Does your function end with `return`?"
        elif mistake := explain(guess, actual, names):
            known = [why for wrong, why in (hints or {}).items() if not explain(guess, wrong)]
            text = f"not yet: {(known or [mistake])[0]}"
        else:
            text = f"right: {_brief(actual)}."
    except Exception as error:
        text = f"not yet: your answer cannot be compared ({type(error).__name__}: {error})."
    print(number, text)


def explain(guess: Any, actual: Any, names: bool = False) -> str:
    """What is wrong with `guess`, by kind of mistake; "" if it is right. `names`: of numbers that
    are names, it is only said whether they are the right ones."""
    guess, actual = _plain(guess), _plain(actual)
    if _is_array(guess) or _is_array(actual):
        return _explain_tensor(guess, actual)
    kind, wanted = _kind(guess), _kind(actual)
    if kind != wanted:
        quotes = " Write it without quotes." if kind == "text" and guess == str(actual) else ""
        return f"the answer is {wanted}, yours is {kind}.{quotes}"
    if kind == "a number":
        mistake = _explain_number(guess, actual)
        return "it is another one." if names and mistake else mistake
    if kind == "text":
        return _explain_text(guess, actual)
    if kind == "a list":
        return _explain_list(guess, actual, names)
    if kind == "a set":
        missing, extra = len(actual - guess), len(guess - actual)
        return f"{missing} missing, {extra} too many." if missing or extra else ""
    if kind == "a dictionary":
        return _explain_dict(guess, actual)
    return "" if guess == actual else "it is another one."


def _explain_number(guess: float, actual: float) -> str:
    if guess == actual or (math.isnan(guess) and math.isnan(actual)):
        return ""
    is_exact = isinstance(guess, int) and isinstance(actual, int)
    if not is_exact and math.isclose(guess, actual, rel_tol=TOLERANCE, abs_tol=1e-9):
        return ""
    if math.isnan(guess):
        return "it is NaN (a division of 0 by 0, or a softmax over nothing)."
    if guess == -actual:
        return "the sign is wrong."
    if guess - actual in (1, -1):
        return f"one too {'high' if guess > actual else 'low'}."
    return f"too {'high' if guess > actual else 'low'}."


def _explain_text(guess: str, actual: str) -> str:
    if guess == actual:
        return ""
    if "".join(guess.split()).lower() == "".join(actual.split()).lower():
        return "right but for spaces, or upper and lower case."
    if actual.startswith(guess) and guess:
        return "right so far, but not complete."
    if guess.startswith(actual) and actual:
        return "it begins right, but goes on for too long."
    return "it is another text."


def _explain_list(guess: list[Any], actual: list[Any], names: bool, path: str = "") -> str:
    """`path`: where these lists stand in those of the reader, such as "[0][2]"."""
    same = [not explain(g, a) for g, a in zip(guess, actual, strict=False)]
    place = f"item {path} (counted from 0): " if path else ""
    if len(guess) != len(actual):
        so_far = "; all of the shorter one agree" if same and all(same) else ""
        return f"{place}it has {len(guess)} items, the answer has {len(actual)}{so_far}."
    if all(same):
        return ""
    first = same.index(False)
    others = list(actual)
    for item in guess:
        index = next((i for i, other in enumerate(others) if not explain(item, other)), None)
        if index is None:
            mine, right = _plain(guess[first]), _plain(actual[first])
            path += f"[{first}]"
            if isinstance(mine, list) and isinstance(right, list):
                return _explain_list(mine, right, names, path)
            return f"item {path} (counted from 0): {explain(mine, right, names)}"
        del others[index]
    return f"{place}the right items in another order; item {first} is the first in a wrong place."


def _explain_dict(guess: dict[Any, Any], actual: dict[Any, Any]) -> str:
    missing = [key for key in actual if key not in guess]
    extra = [key for key in guess if key not in actual]
    if missing:
        return f"{len(missing)} of {len(actual)} keys are missing."
    if extra:
        return f"the key {extra[0]!r} is too much."
    for key, value in actual.items():
        if mistake := explain(guess[key], value):
            return f"at key {key!r}: {mistake}"
    return ""


def _explain_tensor(guess: Any, actual: Any) -> str:
    import numpy as np

    try:
        mine, right = np.asarray(guess, np.float64), np.asarray(actual, np.float64)
    except (TypeError, ValueError):
        return f"the answer is {_kind(actual)}, yours is {_kind(guess)}."
    if mine.shape != right.shape:
        turned = " Is it transposed?" if mine.shape == right.shape[::-1] else ""
        return f"its shape is {mine.shape}, the answer's is {right.shape}.{turned}"
    wrong = _differs(mine, right)
    if not wrong.any():
        return ""
    if np.isnan(mine).any() and not np.isnan(right).any():
        return "it contains NaN (a softmax over nothing, or memory that nobody wrote)."
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    share = f"{int(wrong.sum())} of {wrong.size} numbers differ"
    return f"the shape is right; {share}, the first one at {list(place)}."


def _differs(mine: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Where two arrays of one shape differ by more than the tolerance."""
    import numpy as np

    finite = np.abs(right[np.isfinite(right)])
    slack = TOLERANCE * (finite.max() if finite.size else 0.0)
    return ~np.isclose(mine, right, rtol=TOLERANCE, atol=slack, equal_nan=True)


def _plain(value: Any) -> Any:
    """Python's own kind of value: tensors and arrays of integers become lists, enums their names,
    tuples and ranges lists. Arrays of floats stay arrays."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = (value.double() if value.is_floating_point() else value).numpy()
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return value if value.ndim and value.dtype.kind == "f" else _plain(value.tolist())
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (tuple, range)) or type(value).__name__ in ("dict_keys", "dict_values"):
        return list(value)
    return value


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype")


def _kind(value: Any) -> str:
    """What a value is called in a hint."""
    if isinstance(value, bool):
        return "True or False"
    for types, name in (
        ((int, float), "a number"),
        (str, "text"),
        (list, "a list"),
        (AbstractSet, "a set"),
        (Mapping, "a dictionary"),
    ):
        if isinstance(value, types):
            return name
    return "a tensor" if _is_array(value) else type(value).__name__


def _is_open(guess: Any, actual: Any) -> bool:
    """Is there a None or ... in the guess where the answer has something else?"""
    if guess is None or guess is ...:
        return guess is not actual
    if isinstance(guess, (list, tuple)):
        others = list(actual) if isinstance(actual, (list, tuple)) else []
        others += [0] * (len(guess) - len(others))
        return any(_is_open(g, a) for g, a in zip(guess, others, strict=False))
    if isinstance(guess, dict):
        known = actual if isinstance(actual, dict) else {}
        return any(_is_open(value, known.get(key, 0)) for key, value in guess.items())
    return False


def _is_written(cell: Mapping[str, Any]) -> bool:
    """Has the reader's cell no place left that waits for an answer? Then a function of the reader's
    gave None. `cell`: its global names; in a notebook, `In` has the sources of all cells."""
    sources = cell.get("In", ["..."])
    return not re.search(r"\.\.\.|(?m:^guess.*\bNone\b)", sources[-1])


def _brief(actual: Any) -> str:
    """An answer in one line."""
    actual = _plain(actual)
    text = f"a tensor of shape {actual.shape}" if _is_array(actual) else repr(actual)
    text = " ".join(text.split())  # tensors in a list have lines
    return text if len(text) <= 70 else f"{text[:67]}..."
