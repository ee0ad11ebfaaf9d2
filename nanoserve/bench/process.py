"""The calling side: starts an engine's process (peers.py) and exchanges JSON lines with it.

>>> with EngineProcess("hf") as engine:
...     engine.build(EngineArgs(folder="...", dtype="float32"))
...     engine.generate(requests)["seconds"]

vLLM: vllm/benchmarks/throughput.py runs its backends in one process, one after the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanoserve.bench import peers, servers
from nanoserve.bench.peers import EngineArgs
from nanoserve.bench.workload import Request
from nanoserve.kernels.threads import WAITING_VARIABLES

ROOT = Path(__file__).parent.parent.parent  # the folder that holds the package


class EngineError(RuntimeError):
    """An engine has failed; with the engine's own message."""


class EngineProcess:
    """One engine in a process of its own. Close it, or use it in a `with`."""

    script = peers.__file__

    def __init__(
        self,
        name: str,
        *,
        python: str | None = None,
        folder: str | None = None,
        threads: int | None = None,
        wait_policy: str | None = None,
    ) -> None:
        """name: an engine of `script`. python: its interpreter (None: this one). folder: a checkout
        to import the engine from. threads: for its CPU work (None: the engine's own choice).
        wait_policy: "active" makes waiting threads spin, unless the user's environment says what
        they do (None: the engine's own choice)."""
        self.name = name
        path = [str(ROOT), folder or "", os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        if wait_policy and not any(variable in os.environ for variable in WAITING_VARIABLES):
            environment["OMP_WAIT_POLICY"] = wait_policy
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        self._process = subprocess.Popen(
            [python or sys.executable, self.script, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            encoding="utf-8",
            start_new_session=True,  # a process group: signals reach all that the engine starts
        )

    def call(self, call: str, **arguments: Any) -> dict[str, Any]:
        """One request, one answer. Raises EngineError with the engine's message or last output.

        Between two calls the process group is stopped: an engine that polls while it waits would
        take CPU time from the engine that is being measured.
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
            raise EngineError(f"{self.name}: its process has ended. {self._last_output()}")
        self._signal_group("SIGSTOP")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.name}: {self._with_cause(answer['error'])}")
        return answer

    def build(self, args: EngineArgs) -> dict[str, Any]:
        """Load the model. Returns start_seconds, versions, description."""
        return self.call("build", **asdict(args))

    def generate(self, requests: list[Request]) -> dict[str, Any]:
        """Run all requests at once. Returns seconds and token_ids."""
        prompts = [request.prompt for request in requests]
        lengths = [request.num_output for request in requests]
        answer = self.call("generate", prompts=prompts, lengths=lengths)
        self._check_lengths(lengths, answer["token_ids"])
        return answer

    def stream(self, request: Request) -> dict[str, Any]:
        """Run one request alone. Returns times (seconds to each token), token_ids, and
        num_cached_tokens: of its prompt (None: the engine does not say)."""
        return self.call("stream", prompt=request.prompt, length=request.num_output)

    def close(self) -> None:
        """End the engine's processes at once, which frees their memory."""
        if self._process.poll() is None:
            self._signal_group("SIGKILL")
            self._process.kill()  # where there are no process groups
            self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def _check_lengths(self, lengths: list[int], token_ids: list[list[int]]) -> None:
        got = [len(tokens) for tokens in token_ids]
        if got != lengths:
            raise EngineError(f"{self.name}: asked for {lengths} tokens, got {got}.")

    def _read_log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")

    def _last_output(self) -> str:
        """The last three lines that the process has printed."""
        return " | ".join([line for line in self._read_log().splitlines() if line.strip()][-3:])

    def _with_cause(self, error: str) -> str:
        """vLLM's processes print their errors, and the calling one says "See root cause above"."""
        causes = re.findall(r"\w*(?:Error|Exception): .*", self._read_log())
        return f"{causes[0]} ({error})" if "root cause" in error and causes else error

    def _signal_group(self, name: str) -> None:
        """Send a signal to the process group, on systems that have process groups."""
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, getattr(signal, name))

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ServerProcess(EngineProcess):
    """An engine behind its own HTTP server: the process is the client, and has the server's
    processes in its process group. Raises ValueError on a system without process groups, where
    they would be left behind."""

    script = servers.__file__

    def __init__(self, name: str, **options: Any) -> None:
        if not hasattr(os, "killpg"):
            raise ValueError("servers are measured on Linux and macOS only: no process groups here")
        super().__init__(name, **options)

    def counters(self) -> dict[str, float]:
        """What /metrics of the server counts, by name, over all labels."""
        return self.call("counters")

    def replay(self, requests: list[Request], arrivals: list[float]) -> dict[str, Any]:
        """Send each request at its arrival, in seconds from now. Returns the fields of
        http_client.Load."""
        prompts = [request.prompt for request in requests]
        lengths = [request.num_output for request in requests]
        load = self.call("replay", prompts=prompts, lengths=lengths, arrivals=arrivals)
        self._check_lengths(lengths, [stream["token_ids"] for stream in load["streams"]])
        return load
