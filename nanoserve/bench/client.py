"""What do the clients of a server see?

    nanoserve bench throughput --peer http                   nanoserve's own server, beside LLM
    nanoserve bench serve --url http://127.0.0.1:8000/v1     any server of OpenAI's API

Each request has a connection of its own, and streams its tokens. While they run, the client only
notes which line came when, because it takes its time from a server on the same machine. It reads
the lines when all have ended. Prompts are token ids; nanoserve and vLLM take ignore_eos, so that
each request has its length.

Left out: https, keys.

vLLM: vllm/benchmarks/serve.py, vllm/benchmarks/lib/endpoint_request_func.py.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from nanoserve.bench.engines import Requests, Results

SAMPLING = {"temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
Lines = list[tuple[float, bytes]]  # when each one came


class ServerEngine:
    """A server as an engine of a comparison. Without an url, nanoserve's own is started."""

    def __init__(self, folder: str, options: Mapping[str, Any]) -> None:
        given = dict(options)
        url, self.process = given.pop("url", None), None
        if url is None:
            flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
            command = [sys.executable, "-m", "nanoserve", "serve", "--model", folder, "--port=0"]
            command += [*flags, "--uvicorn-log-level=warning"]
            self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            url = self.wait_until_served() + "/v1"
        self.url = urlsplit(url)
        with urlopen(f"{url}/models") as answer:
            self.model = json.load(answer)["data"][0]["id"]

    def wait_until_served(self) -> str:
        """Its address, as it prints it itself."""
        assert self.process is not None and self.process.stderr is not None
        for line in self.process.stderr:
            if " is served at " in line:
                return line.split(" is served at ")[1].split()[0].rstrip("/")
        raise RuntimeError("the server has ended; start `nanoserve serve` to see why.")

    def run(self, requests: Requests) -> Results:
        """All at their arrival; seconds count from there."""
        return asyncio.run(self.run_all(requests))

    async def run_all(self, requests: Requests) -> Results:
        start = time.perf_counter()
        streams = await asyncio.gather(*(self.ask(each) for each in requests))
        pairs = zip(streams, requests, strict=True)
        return [read(lines, start + request["arrival"]) for lines, request in pairs]

    async def ask(self, request: Mapping[str, Any]) -> Lines:
        body = {"model": self.model, "prompt": list(request["prompt"]), **SAMPLING}
        content = json.dumps({**body, "max_tokens": request["num_output"]}).encode()
        head = f"POST {self.url.path}/completions HTTP/1.1\r\nHost: {self.url.netloc}\r\n"
        head += "Content-Type: application/json\r\nConnection: close\r\n"
        await asyncio.sleep(request["arrival"])
        connection = asyncio.open_connection(self.url.hostname, self.url.port or 80, limit=2**22)
        reader, writer = await connection
        writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        lines = [(time.perf_counter(), line) async for line in reader]
        writer.close()
        return lines

    def close(self) -> None:
        if self.process is not None:
            self.process.terminate()
            self.process.communicate()


def read(lines: Lines, start: float) -> dict[str, Any]:
    """The tokens of a stream. RuntimeError: the answer is none."""
    times: list[float] = []
    token_ids: list[int] = []
    for moment, line in lines:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        for choice in chunk.get("choices", ()):  # none in the last one, if that has the usage
            new = choice.get("token_ids") or [-1] * bool(choice.get("text"))  # else one a chunk
            token_ids += new
            times += [moment - start] * len(new)
    if not times:
        raise RuntimeError(f"the server answered {b''.join(line for _, line in lines)[:500]!r}")
    return {"times": times, "token_ids": token_ids}
