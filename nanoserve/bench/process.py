"""The other end of the line: starts an engine's process (peers.py) and talks to it.

>>> with EngineProcess("hf") as engine:
...     engine.build(folder="...", dtype="float32")
...     engine.generate(requests)["seconds"]

vLLM's own offline benchmark (vllm/benchmarks/throughput.py) runs its backends in one process, one
after the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

from nanoserve.bench.workload import Request

ROOT = Path(__file__).parent.parent.parent  # the folder that holds the package


class EngineError(RuntimeError):
    """An engine could not do what it was asked; its own words."""


class EngineProcess:
    """One engine in a process of its own. Close it, or use it in a `with`."""

    def __init__(
        self,
        name: str,
        *,
        python: str | None = None,
        folder: str | None = None,
        threads: int | None = None,
    ) -> None:
        """name: one of peers.PEERS. python: the interpreter to run it with (None: this one).
        folder: a checkout to import it from. threads: of its CPU work (None: its own choice)."""
        self.name = name
        path = [str(ROOT), *([folder] if folder else []), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry for entry in path if entry),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [python or sys.executable, "-m", "nanoserve.bench.peers", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            encoding="utf-8",
            start_new_session=True,  # what it starts ends with it; Ctrl-C is for us to handle
        )

    def call(self, call: str, **arguments: Any) -> dict[str, Any]:
        """One request, one answer. Raises EngineError with what the engine said or last printed.

        Between two calls the whole process group is stopped: an engine that polls while it waits
        would take the cores of the one whose turn it is.
        """
        assert self._process.stdin and self._process.stdout, "both are pipes"
        self._signal_group("SIGCONT")
        try:
            self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise EngineError(f"{self.name}: its process has ended. {self.last_words()}")
        if call != "close":
            self._signal_group("SIGSTOP")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}")
        return answer

    def why_not(self, device: str) -> str | None:
        """Why this engine cannot be used on `device`, or None if it can."""
        try:
            return self.call("why_not", device=device)["reason"]
        except EngineError as error:
            return str(error)

    def build(self, **options: Any) -> dict[str, Any]:
        """Load the model; see peers.py for the options. Returns seconds, versions, description."""
        defaults: dict[str, Any] = {
            "device": "cpu",
            "temperature": 0,
            "max_model_len": 1024,
            "num_requests": 256,
            "batch_size": 32,
            "llm_options": {},
        }
        return self.call("build", **{**defaults, **options})

    def generate(self, requests: list[Request]) -> dict[str, Any]:
        """Serve them all; returns seconds and token_ids."""
        prompts = [request.prompt for request in requests]
        lengths = [request.num_output for request in requests]
        answer = self.call("generate", prompts=prompts, lengths=lengths)
        got = [len(tokens) for tokens in answer["token_ids"]]
        if got != lengths:
            raise EngineError(f"{self.name}: asked for {lengths} tokens, got {got}.")
        return answer

    def stream(self, request: Request) -> dict[str, Any]:
        """Serve one alone; returns times (seconds to each token) and token_ids."""
        return self.call("stream", prompt=request.prompt, length=request.num_output)

    def last_words(self) -> str:
        """The end of what it printed."""
        self._log.seek(0)
        text = self._log.read().decode("utf-8", "replace")
        return " | ".join(deque((line for line in text.splitlines() if line.strip()), maxlen=3))

    def close(self) -> None:
        """End the process, and give its memory back."""
        if self._process.poll() is None:
            try:
                self.call("close")
                self._process.wait(timeout=30)  # it kills its own group
            except (EngineError, subprocess.TimeoutExpired):
                self._kill_group()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def _kill_group(self) -> None:
        if hasattr(os, "killpg"):
            self._signal_group("SIGKILL")
        else:
            self._process.kill()

    def _signal_group(self, name: str) -> None:
        """Send a signal to the process and all it started; nothing where there are no groups."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, getattr(signal, name))

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._process.poll() is None:  # such as Ctrl-C: no time for manners
            self._kill_group()
            self._process.wait()
        self.close()
