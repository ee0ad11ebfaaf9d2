"""A server in a thread of the test, and HTTP by hand. Shared by test_server_door.py and
test_server_load.py."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any, NamedTuple

from fastapi import FastAPI

from nanoserve.extras.server.launcher import Server, bind
from nanoserve.extras.server.options import FrontendArgs

PATIENCE = 20.0  # seconds for what takes much less; no test waits for them


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


class Running(NamedTuple):
    """A server that listens."""

    port: int
    server: Server
    thread: threading.Thread

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


def request(
    method: str, path: str, body: Any = None, headers: dict[str, str | None] | None = None
) -> bytes:
    """The bytes of a request. A header that is None is left out."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    length = str(len(data))
    fields = {"Host": "test", "Content-Type": "application/json", "Content-Length": length}
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
        yield Running(sock.getsockname()[1], server, thread)
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
