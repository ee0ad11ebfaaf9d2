"""A client asks one address: the prompt is computed by one server, the answer by another."""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("openai")
proxy = pytest.importorskip("nanoserve.extras.kv_offload.proxy")

from servers import Answer, Client, Command  # noqa: E402

WHERE = {"remote_prefiller": {"kv_request_id": "7", "remote_host": "localhost", "remote_port": 1}}

TEXT = ("Content-Type", "text/x")


class At(Client):
    def __init__(self, port: int) -> None:
        self.port = port


class Stub(ThreadingHTTPServer):
    """A server that notes what it is asked, and answers with one body; in pieces, if it is a
    list."""

    daemon_threads = True

    def __init__(self, body: Any, status: int = 200, *headers: tuple[str, str]) -> None:
        self.asked: list[tuple[str, Any, dict[str, str]]] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                sent = {name.lower(): value for name, value in self.headers.items()}
                stub.asked.append((self.path, json.loads(data) if data[:1] == b"{" else data, sent))
                self.send_response(status)
                pieces = body if isinstance(body, list) else [json.dumps(body).encode()]
                if not isinstance(body, list):
                    self.send_header("Content-Length", str(len(pieces[0])))
                for header in headers or [TEXT]:
                    self.send_header(*header)
                self.end_headers()
                for piece in pieces:
                    self.wfile.write(piece)

            def do_GET(self) -> None:
                if self.path != "/health":
                    stub.asked.append((self.path, None, {}))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"


@contextmanager
def in_thread(server: Any) -> Iterator[Any]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(20)


@pytest.fixture
def ask() -> Iterator[Callable[..., Answer]]:
    """Ask a proxy between two stubs."""

    def ask(producer: str, consumer: str, path: str, body: Any, **headers: str) -> Answer:
        with in_thread(proxy.Proxy(("127.0.0.1", 0), [producer], [consumer])) as server:
            method = "GET" if body is None else "POST"
            return At(server.server_port).ask(method, path, body, dict(headers))

    return ask


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_goes_to_the_producer_then_to_the_consumer(
    ask: Callable[..., Answer], path: str
) -> None:
    body = {"prompt": [1, 2], "max_tokens": 9, "stream": True, "stream_options": {}, "top_p": 0.5}
    body |= {"max_completion_tokens": 9, "n": 2, "min_tokens": 3, "logprobs": 5}
    pieces = [b"data: 1\n\n", b"data: [DONE]\n\n"]
    with (
        in_thread(Stub({"kv_transfer_params": WHERE})) as producer,
        in_thread(Stub(pieces)) as consumer,
    ):
        answer = ask(producer.address, consumer.address, path, body, Authorization="Bearer k")
    assert (answer.status, answer.body) == (200, b"".join(pieces))
    assert answer.headers["content-type"] == "text/x"
    [(asked_path, first, headers)], [(_, second, _)] = producer.asked, consumer.asked
    assert (asked_path, headers["authorization"]) == (path, "Bearer k")
    [(name, decoder)] = first.pop("kv_transfer_params").items()
    assert name == "remote_decoder"
    assert len(decoder["kv_request_id"]) == 32
    short = {"max_tokens": 1, "max_completion_tokens": 1, "n": 1, "stream": False}
    assert first == {"prompt": [1, 2], "top_p": 0.5, "min_tokens": 0, "logprobs": None, **short}
    assert second == {**body, "kv_transfer_params": WHERE}


def test_without_a_producer_the_consumer_does_it_all(ask: Callable[..., Answer]) -> None:
    body = {"prompt": "a", "max_tokens": 9}
    with in_thread(Stub({"id": "x"})) as consumer:
        for producer in (Stub({"error": {}}, 500), Stub(["no JSON"[:0].encode()]), None):
            address = "127.0.0.1:9"
            if producer is None:
                answer = ask(address, consumer.address, "/v1/completions", body)
            else:
                with in_thread(producer):
                    answer = ask(producer.address, consumer.address, "/v1/completions", body)
            assert answer.json == {"id": "x"}
            assert consumer.asked[-1][1] == body


def test_a_producer_that_hangs_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes connections, as a process does that was stopped, and says nothing."""
    monkeypatch.setattr(proxy, "PATIENCE", 0.2)
    with in_thread(Stub({"id": "x"})) as consumer, socket.create_server(("127.0.0.1", 0)) as mute:
        producer = f"127.0.0.1:{mute.getsockname()[1]}"
        mute.setblocking(False)
        addresses = ("127.0.0.1", 0), [producer], [consumer.address]
        with in_thread(proxy.Proxy(*addresses)) as server:
            for num_questions in (1, 0, 0):
                body = {"prompt": "a"}
                answer = At(server.server_port).ask("POST", "/v1/completions", body)
                assert answer.json == {"id": "x"}
                assert count_connections(mute) == num_questions
            server.paused[producer] = 0.0  # the pause is over
            assert At(server.server_port).ask("POST", "/v1/completions", body).json == {"id": "x"}
            assert count_connections(mute) == 1


def count_connections(sock: socket.socket) -> int:
    """Those that wait to be accepted."""
    number = 0
    with suppress(BlockingIOError):
        while True:
            sock.accept()[0].close()
            number += 1
    return number


def test_what_is_no_completion_is_the_consumers(ask: Callable[..., Answer]) -> None:
    with in_thread(Stub({})) as producer, in_thread(Stub({"count": 1})) as consumer:
        assert ask(producer.address, consumer.address, "/tokenize", {"prompt": "a"}).json
        assert ask(producer.address, consumer.address, "/v1/models", None).status == 200
        assert ask(producer.address, consumer.address, "/v1/completions", b"no json").status == 200
    assert not producer.asked
    assert [path for path, *_ in consumer.asked] == ["/tokenize", "/v1/models", "/v1/completions"]
    assert consumer.asked[-1][1] == b"no json"


def test_without_a_consumer_there_is_an_error(ask: Callable[..., Answer]) -> None:
    with in_thread(Stub({"kv_transfer_params": WHERE})) as producer:
        answer = ask(producer.address, "127.0.0.1:9", "/v1/completions", {"prompt": "a"})
    assert answer.status == 502
    assert "127.0.0.1:9 does not answer" in answer.error["message"]


def test_a_stream_that_breaks_off_ends_with_an_error(ask: Callable[..., Answer]) -> None:
    """It would look like a whole one: its end is the end of the connection."""
    chunked = ("Transfer-Encoding", "chunked")
    start = b"data: 1\n\n"
    pieces = [b"9\r\n" + start + b"\r\n"]  # and no last chunk, as of a server that was killed
    for kind, last in (("text/event-stream", b"data: [DONE]"), ("text/x", b"data: 1")):
        with in_thread(Stub(pieces, 200, chunked, ("Content-Type", kind))) as consumer:
            answer = ask("127.0.0.1:9", consumer.address, "/v1/completions", {"stream": True})
        first, *rest = answer.body.strip().split(b"\n\n")
        assert (first, answer.body.strip().endswith(last)) == (b"data: 1", True)
        errors = [json.loads(each[6:])["error"]["message"] for each in rest if b"error" in each]
        assert all(f"{consumer.address} has ended" in message for message in errors)
        assert len(errors) == (last == b"data: [DONE]")


def test_the_log_names_the_producer_that_is_not_there(
    ask: Callable[..., Answer], caplog: pytest.LogCaptureFixture
) -> None:
    with in_thread(Stub({"id": "x"})) as consumer:
        ask("127.0.0.1:9", consumer.address, "/v1/completions", {"prompt": "a"})
    assert "no prefill at 127.0.0.1:9" in caplog.text


def test_a_port_in_use_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert proxy.main(["--prefill", "h:1", "--decode", "h:1", "--port", str(port)]) == 1
    assert f"cannot listen at 127.0.0.1, port {port}" in capsys.readouterr().err


def test_a_body_without_a_length_is_refused(ask: Callable[..., Answer]) -> None:
    for length, status in ((None, 411), ("x", 411), (str(2**40), 413)):
        headers: Any = {"Content-Length": length}
        answer = ask("h:1", "h:1", "/v1/completions", b"", **headers)
        assert answer.status == status
        assert "allowed" in answer.error["message"]


@pytest.mark.parametrize("address", ["localhost", "h:0", "h:65536", ":1", "h:x"])
def test_bad_addresses_are_refused(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        proxy.main(["--prefill", address, "--decode", "h:1"])
    error = capsys.readouterr().err
    assert "--prefill" in error
    assert f"{address!r} is not host:port" in error


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no Unix sockets")
def test_two_servers_and_a_proxy(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The docstring's three terminals: same text, and the prompt is not computed twice. Without the
    producer it goes on."""
    folder, prompt = tmp_path_factory.mktemp("p2p"), [5 + i * i % 300 for i in range(100)]

    def options(role: str) -> list[str]:
        tier = {"type": "p2p", "port": 5710, "socket_dir": str(folder)}
        extra = {"cpu_bytes_to_use": 2**24, "secondary_tiers": [tier]}
        config = {
            "kv_connector": "OffloadingConnector",
            "kv_role": role,
            "kv_connector_extra_config": extra,
        }
        return ["--kv-transfer-config", json.dumps(config)]

    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    with (
        Command(*options("kv_producer")) as producer,
        Command(*options("kv_consumer")) as consumer,
    ):
        addresses = [f"localhost:{producer.port}"], [f"localhost:{consumer.port}"]
        with in_thread(proxy.Proxy(("127.0.0.1", 0), *addresses)) as server:
            client = At(server.server_port)
            answer = client.ask("POST", "/v1/completions", body).json
            alone = producer.ask("POST", "/v1/completions", body).json
            assert answer["choices"] == alone["choices"]
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 96}
            refused = client.ask("POST", "/v1/completions", {**body, "temperature": -1})
            assert refused.status == 400
            events = client.ask("POST", "/v1/completions", {**body, "stream": True}).body
            assert events.endswith(b"data: [DONE]\n\n")
            wrong = {**body, "kv_transfer_params": {"remote_prefiller": 3}}
            error = consumer.ask("POST", "/v1/completions", wrong)
            assert (error.status, error.error["param"]) == (400, "kv_transfer_params")
            producer.process.kill()
            producer.process.wait()
            other = {**body, "prompt": prompt[::-1]}
            last = client.ask("POST", "/v1/completions", other).json
            assert last["choices"][0]["finish_reason"] == "length"
            assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert Path(folder).exists()
