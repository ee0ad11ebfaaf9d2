"""A server in a thread of the test, asked over HTTP by hand, or by the client of OpenAI. Shared by
the tests test_server_*.py."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import FastAPI
from openai import OpenAI

from nanoserve.extras.server.launcher import Server, bind
from nanoserve.extras.server.options import FrontendArgs

ROOT = Path(__file__).parent.parent
PATIENCE = 60.0  # seconds for what takes much less; no test waits for them
MOST = 4 * PATIENCE  # seconds for many streams; below faulthandler_timeout, so that the test fails


class Answer(NamedTuple):
    """What a server has answered."""

    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error, which has OpenAI's shape."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["code"] == self.status
        assert error["message"]
        assert error["type"].endswith("Error")
        return error


class Client:
    """Asks a server."""

    port: int

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str | None] | None = None
    ) -> Answer:
        """One request on a connection of its own. A body that is not bytes is sent as JSON."""
        with self.connect() as sock:
            sock.sendall(request(method, path, body, headers))
            return read_answer(sock)


class Running(Client):
    """A server in a thread of this process."""

    def __init__(self, port: int, server: Server) -> None:
        self.port, self.server = port, server


class Command(Client):
    """`nanoserve serve` in a process of its own, on a free port. Its log is in `lines`."""

    def __init__(self, *arguments: str) -> None:
        words = (sys.executable, "-m", "nanoserve", "serve", "--port", "0", *arguments)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            words, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            until(lambda: any("is served at" in line for line in self.lines) or not self.is_running)
            [line] = [line for line in self.lines if "is served at" in line]
            self.port = int(line.split("(")[0].rpartition(":")[2])
        except BaseException:
            self.__exit__()  # nobody else knows of the process
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def ranks(self) -> list[int]:
        """The processes that it has started (Linux)."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in children.read_text().split()]

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit status."""
        status = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return status

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)


def request(
    method: str, path: str, body: Any = None, headers: dict[str, str | None] | None = None
) -> bytes:
    """The bytes of a request. A header that is None is left out."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    length = str(len(data))
    fields = {"Host": "localhost", "Content-Type": "application/json", "Content-Length": length}
    fields |= headers or {}
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + data


def read_answer(sock: socket.socket) -> Answer:
    """The next answer on this connection."""
    response = HTTPResponse(sock)
    response.begin()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, headers, response.read())


@contextmanager
def running(app: FastAPI) -> Iterator[Running]:
    """Serve this application on a free port, in a thread."""
    server = Server(app)
    sock = bind(FrontendArgs(port=0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield Running(sock.getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def until(condition: Callable[[], object]) -> None:
    """Wait until the condition is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.002)


# -- many clients --


async def stream(
    port: int,
    body: dict[str, Any],
    leave_after: int | None = None,
    on_begin: Callable[[], Any] = lambda: None,
) -> list[Any]:
    """The events of a streamed completion, [DONE] included. If it is no stream, the status and the
    JSON. leave_after: go away after so many events. on_begin: called after the first event. Raises
    TimeoutError for one that does not end."""
    return await asyncio.wait_for(_stream(port, body, leave_after, on_begin), MOST)


async def _stream(
    port: int, body: dict[str, Any], leave_after: int | None, on_begin: Callable[[], Any]
) -> list[Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = request("POST", "/v1/completions", {"stream": True, **body})
    writer.write(data.replace(b"HTTP/1.1", b"HTTP/1.0", 1))  # no chunks: it ends at its end
    try:
        events: list[Any] = []
        if leave_after == 0:
            await writer.drain()
            return events
        status = int((await reader.readline()).split()[1])
        headers = await reader.readuntil(b"\r\n\r\n")
        if b"event-stream" not in headers:
            return [status, json.loads(await reader.read())]
        while line := await reader.readline():
            text = line.decode().removeprefix("data: ").strip()
            events += [text if text == "[DONE]" else json.loads(text)] if text else []
            if len(events) == 1 and text:
                on_begin()
            if leave_after is not None and len(events) >= leave_after:
                break
        return events
    finally:
        writer.transport.abort() if leave_after is not None else writer.close()


def join(events: list[Any]) -> dict[int, tuple[str, str | None]]:
    """(text, finish_reason) of each choice of a streamed completion that has its end."""
    assert events[-1] == "[DONE]", events[-1]
    choices: dict[int, tuple[str, str | None]] = {}
    for event in events[:-1]:
        assert "error" not in event, event
        for choice in event["choices"]:
            text, reason = choices.get(choice["index"], ("", None))
            assert reason is None, "a choice goes on after its end"
            choices[choice["index"]] = text + choice["text"], choice["finish_reason"]
    return choices


def join_tokens(events: list[Any]) -> dict[int, list[int]]:
    """The token ids of each choice of a streamed completion (with return_token_ids)."""
    ends, token_ids = join(events), {}
    for event in events[:-1]:
        for choice in event["choices"]:
            token_ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert all(reason for _, reason in ends.values())
    return token_ids


def openai_client(server: Client) -> OpenAI:
    """OpenAI's own client of this server."""
    base_url = f"http://127.0.0.1:{server.port}/v1"
    return OpenAI(base_url=base_url, api_key="none", max_retries=0, timeout=PATIENCE)
