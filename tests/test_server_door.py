"""The server's door: bytes on a socket, as no well-behaved client would send them.

The endpoint /echo of these tests stands for all: it answers with what it got.
"""

from __future__ import annotations

import asyncio
import logging
import select
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from servers import PATIENCE, Running, read_answer, request, running, until

from nanoserve import __main__
from nanoserve.exceptions import EngineDeadError, QueueOverflowError, VLLMValidationError
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.server import build_app, cli
from nanoserve.extras.server.launcher import bind, describe_address
from nanoserve.extras.server.options import FrontendArgs

LIMITS = {"max_body_size": 100_000, "request_timeout": 0.3}
CHUNKED = {"Transfer-Encoding": "chunked", "Content-Length": None}


@pytest.fixture(scope="module")
def async_llm() -> Iterator[AsyncLLM]:
    with AsyncLLM() as llm:
        yield llm


def echo_app(llm: AsyncLLM, **options: Any) -> FastAPI:
    """The application, with three endpoints more."""
    app = build_app(llm, **options)
    app.state.gone = threading.Event()

    @app.post("/echo")
    async def echo(request: Request) -> Response:
        return Response(await request.body())

    @app.post("/fail")
    async def fail(request: Request) -> Response:
        raise app.state.error

    @app.post("/stream")
    async def stream(request: Request) -> StreamingResponse:
        async def chunks() -> Any:
            try:
                while True:
                    yield b"data: {}\n\n"
                    await asyncio.sleep(0.001)
            finally:
                app.state.gone.set()

        return StreamingResponse(chunks())

    return app


@pytest.fixture(scope="module")
def server(async_llm: AsyncLLM) -> Iterator[Running]:
    with running(echo_app(async_llm, **LIMITS)) as one:
        yield one


@pytest.fixture(autouse=True)
def still_serving(server: Running) -> Iterator[None]:
    """After each test, nothing is left of its requests, and others are served."""
    yield
    until(lambda: server.server.state.num_requests == 0)
    assert server.ask("POST", "/echo", b'"still here"').body == b'"still here"'
    assert not server.server.state.async_llm.engine.has_unfinished_requests()


# -- paths and bodies --


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "says"),
    [
        ("GET", "/v1/nothing", {}, 404, "/openapi.json lists"),
        ("POST", "/v2/completions", {}, 404, "no such path"),
        ("POST", "/%2e%2e/%2e%2e/etc/passwd", {}, 404, "no such path"),
        ("GET", "/echo", {}, 405, "allowed: POST"),
        ("POST", "/echo", {"Content-Type": "text/plain"}, 400, "'text/plain'; allowed: applic"),
        ("POST", "/echo", {"Content-Type": ""}, 400, "Content-Type is ''"),
        ("POST", "/echo", {"Content-Encoding": "gzip"}, 415, "Content-Encoding is 'gzip'"),
        ("POST", "/echo", {"Content-Length": "100001"}, 413, "100001 bytes"),
        ("POST", "/echo", {"Content-Length": "9" * 19}, 413, "may have 100000 bytes"),
    ],
)
def test_what_no_endpoint_gets_to_see(
    server: Running, method: str, path: str, headers: dict[str, str], status: int, says: str
) -> None:
    """Each answer has OpenAI's shape. Of a body that is announced as too large, nothing is read."""
    answer = server.ask(method, path, b"{}", headers)
    assert answer.status == status
    assert says in answer.error["message"]
    assert answer.headers["content-type"] == "application/json"


def test_a_type_may_have_parameters(server: Running) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8", "Content-Encoding": "Identity"}
    assert server.ask("POST", "/echo", b"{}", headers).status == 200


def test_a_body_comes_in_one_piece(server: Running) -> None:
    """However it was cut on the way."""
    body = b'"' + b"x" * 9998 + b'"'
    with server.connect() as sock:
        data = request("POST", "/echo", body)
        for start in range(0, len(data), 999):
            sock.sendall(data[start : start + 999])
        assert read_answer(sock).body == body
        sock.sendall(request("POST", "/echo", b"3\r\n[1,\r\n2\r\n2]\r\n0\r\n\r\n", CHUNKED))
        assert read_answer(sock).body == b"[1,2]"


def test_a_body_without_a_length_has_the_same_limit(server: Running) -> None:
    """A chunked upload that never ends is answered when it is too large; the client reads the
    answer although it goes on to send. When it has sent for long enough, the connection ends."""
    with server.connect() as sock:
        sock.sendall(request("POST", "/echo", headers=CHUNKED))
        chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"
        for _ in range(100):  # 1.6 MB
            sock.sendall(chunk)
        answer = read_answer(sock)
        assert answer.status == 413
        assert "this one has more" in answer.error["message"]
        with pytest.raises(OSError):  # noqa: PT011 - which one depends on the moment
            until(lambda: sock.sendall(chunk))


def test_curl_need_not_send_what_is_too_large(server: Running) -> None:
    """`Expect: 100-continue`: it asks before it sends."""
    with server.connect() as sock:
        headers = {"Content-Length": "200000", "Expect": "100-continue"}
        sock.sendall(request("POST", "/echo", headers=headers))
        assert read_answer(sock).status == 413


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((each, 200) for each in ("localhost:8000", "127.0.0.1", "[::1]:8000", "a.localhost", "")),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.nip.io", 403),
        ("[", 403),
    ],
)
def test_a_page_whose_name_was_made_to_lead_here(server: Running, host: str, status: int) -> None:
    """DNS rebinding: the browser takes it for a page of this server."""
    headers = {"Host": host, "Origin": f"http://{host}"}
    assert server.ask("GET", "/version", headers=headers).status == status
    assert server.ask("POST", "/echo", {}, headers).status == status


@pytest.mark.parametrize(
    "options", [{"api_key": "key"}, {"host": "0.0.0.0"}, {"host": "my.example"}]
)
def test_names_of_a_server_that_others_reach(async_llm: AsyncLLM, options: dict[str, str]) -> None:
    async def ask() -> int:
        transport = httpx.ASGITransport(build_app(async_llm, **options))
        async with httpx.AsyncClient(transport=transport, base_url="http://my.example") as client:
            return (await client.get("/version")).status_code

    assert asyncio.run(ask()) == 200


# -- slow and vanishing clients --


def test_a_body_that_does_not_come(server: Running) -> None:
    """408, however little by little it comes."""
    with server.connect() as silent, server.connect() as slow:
        for sock in (silent, slow):
            sock.sendall(request("POST", "/echo", headers={"Content-Length": "1000"}))
        slow.settimeout(0.01)
        answer = None
        while answer is None:
            slow.sendall(b"x")
            with suppress(TimeoutError):
                answer = read_answer(slow)
        for each in (answer, read_answer(silent)):
            assert each.status == 408
            assert each.error["type"] == "RequestTimeoutError"


@pytest.mark.parametrize("sent", [b"", b"POST /echo HTTP/1.1\r\nHost: a\r\nX-", b"\x16\x03\x01"])
def test_headers_that_do_not_come(server: Running, sent: bytes) -> None:
    """Slow loris: its connection is closed."""
    with server.connect() as sock:
        sock.sendall(sent)
        with suppress(ConnectionResetError):
            answer = sock.recv(1000)
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400 Bad Request")
    until(lambda: not server.server.server_state.connections)


@pytest.mark.parametrize(
    "headers",
    [{"Content-Length": "1000"}, CHUNKED, {"Content-Length": "1000", "Expect": "100-continue"}],
)
def test_a_client_that_goes_away_before_its_request_is_complete(
    server: Running, headers: dict[str, str | None], caplog: pytest.LogCaptureFixture
) -> None:
    with server.connect() as sock:
        sock.sendall(request("POST", "/echo", headers=headers))
    until(lambda: not server.server.server_state.connections)
    until(lambda: server.server.state.num_requests == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_client_that_goes_away_from_its_stream(server: Running) -> None:
    """The endpoint is told."""
    gone = server.server.config.app.state.gone
    gone.clear()
    with server.connect() as sock:
        sock.sendall(request("POST", "/stream"))
        assert sock.recv(100)
    assert gone.wait(PATIENCE)


@pytest.mark.skipif(not hasattr(select, "POLLRDHUP"), reason="Linux tells of it")
@pytest.mark.parametrize("more", [request("GET", "/version"), b"no HTTP"])
def test_a_client_that_goes_away_after_it_sent_its_next_request(
    server: Running, async_llm: AsyncLLM, more: bytes
) -> None:
    """uvicorn stops to read then. The first request ends even so."""
    with server.connect() as sock:
        body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "n": 8}
        sock.sendall(request("POST", "/v1/completions", body))
        until(lambda: async_llm.engine.scheduler.running)
        sock.sendall(more)
        until(lambda: any(each.flow.read_paused for each in server.server.server_state.connections))
    until(lambda: not server.server.server_state.connections)
    until(lambda: not async_llm.get_num_unfinished_requests())
    manager = async_llm.engine.block_manager
    until(lambda: manager.num_free_blocks == manager.num_blocks)


# -- errors --


@pytest.mark.parametrize(
    ("error", "status", "says", "param"),
    [
        (VLLMValidationError("top_p is 2", parameter="top_p", value=2), 400, "top_p is 2", "top_p"),
        (TypeError("n must be an integer"), 400, "n must be an integer", None),
        (NotImplementedError("no such thing"), 501, "no such thing", None),
        (QueueOverflowError(8), 503, "8 requests wait already", None),
        (EngineDeadError("shut down"), 503, "this server is shutting down.", None),
    ],
)
def test_an_error_of_the_engine_is_told(
    server: Running, error: Exception, status: int, says: str, param: str | None
) -> None:
    server.server.config.app.state.error = error
    answer = server.ask("POST", "/fail")
    assert answer.status == status
    assert answer.error["message"].startswith(says)
    assert answer.error["param"] == param
    assert ("retry-after" in answer.headers) == (status == 503)


def test_nobody_reads_what_is_inside(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """A bug, or a dead engine, is 500; what it was stands in the log alone."""
    dead = EngineDeadError("of /secret")
    dead.__cause__ = RuntimeError("secret")
    for error in (RuntimeError("secret"), KeyError("secret"), dead):
        server.server.config.app.state.error = error
        answer = server.ask("POST", "/fail")
        assert answer.status == 500
        assert b"secret" not in answer.body
        assert answer.error["type"] == "InternalServerError"
        assert answer.headers["x-request-id"]
    assert len([record for record in caplog.records if record.exc_info]) == 2


def test_an_engine_that_is_full_or_dead(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before the body is read."""
    state = server.server.state
    monkeypatch.setattr(state, "args", FrontendArgs(limit_concurrency=1, **LIMITS))
    with server.connect() as first:
        first.sendall(request("POST", "/stream"))
        assert first.recv(100)
        answer = server.ask("POST", "/echo", headers={"Content-Length": "1000"})
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert "(limit_concurrency)" in answer.error["message"]
        assert server.ask("GET", "/openapi.json").status == 200
    until(lambda: state.num_requests == 0)
    with monkeypatch.context() as patch:
        patch.setattr(state.async_llm._core, "error", RuntimeError("secret"))
        answer = server.ask("POST", "/echo", headers={"Content-Length": "1000"})
    assert answer.status == 503
    assert answer.error["message"].startswith("the engine has failed")
    assert "retry-after" not in answer.headers


# -- headers: keys, origins, names --


def ask_all(app: FastAPI, *requests: httpx.Request) -> list[httpx.Response]:
    """What an application answers, without a socket."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport) as client:
            return [await client.send(each) for each in requests]

    return asyncio.run(ask())


def post(path: str = "/echo", **headers: str) -> httpx.Request:
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Request("POST", f"http://test{path}", json=1, headers=fields)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer right", 200),
        ("bearer other", 200),
        ("Bearer schl\u00fcssel", 200),
        ("Bearer wrong", 401),
        ("Bearer righ", 401),
        ("Bearer right other", 401),
        ("Bearer ", 401),
        ("Basic right", 401),
        ("right", 401),
        ("", 401),
        ("Bearer \xff\xfe", 401),
    ],
)
def test_a_key_opens(async_llm: AsyncLLM, authorization: str, status: int) -> None:
    app = echo_app(async_llm, api_key=["right", "other", "schl\u00fcssel"])
    encoding = "utf-8" if status == 200 else "latin-1"
    key = httpx.Headers([(b"authorization", authorization.encode(encoding))])
    [answer] = ask_all(app, httpx.Request("POST", "http://test/echo", json=1, headers=key))
    assert answer.status_code == status
    if status == 401:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "AuthenticationError"


def test_nearly_every_path_needs_the_key(async_llm: AsyncLLM) -> None:
    """Also those that are not there: who has no key does not learn which are."""
    app = echo_app(async_llm, api_key="right")
    paths = {route.path for route in app.routes if hasattr(route, "path")} | {
        "/nothing",
        "//health",
    }
    answers = ask_all(app, *(httpx.Request("GET", f"http://test{path}") for path in sorted(paths)))
    is_open = {
        path
        for path, answer in zip(sorted(paths), answers, strict=True)
        if answer.status_code != 401
    }
    assert is_open <= {"/", "/health", "/ping", "/version", "/metrics"}


def test_other_origins_are_refused_unless_allowed(async_llm: AsyncLLM) -> None:
    """Their answers have no header of CORS, so no browser shows them to the page that asked."""
    origin = "http://localhost:3000"
    preflight = httpx.Request(
        "OPTIONS",
        "http://test/echo",
        headers={"Origin": origin, "Access-Control-Request-Method": "POST"},
    )
    for answer in ask_all(echo_app(async_llm), preflight, post(Origin=origin)):
        assert not [name for name in answer.headers if name.startswith("access-control")]
    app = echo_app(async_llm, allowed_origins=[origin], api_key="right")
    answers = ask_all(app, preflight, post(Origin=origin), post(Origin="http://evil"))
    assert [answer.status_code for answer in answers] == [200, 401, 401]
    allowed = [answer.headers.get("access-control-allow-origin") for answer in answers]
    assert allowed == [origin, origin, None]


def test_a_request_has_a_name(async_llm: AsyncLLM) -> None:
    """The client's, or one that is new."""
    answers = ask_all(echo_app(async_llm), post(), post(), post(X_Request_Id="mine"), post("/no"))
    names = [answer.headers["x-request-id"] for answer in answers]
    assert names[2] == "mine"
    assert len(set(names)) == 4


# -- the socket --


def test_a_port_in_use_is_one_sentence(server: Running) -> None:
    with pytest.raises(ValueError, match=f"port {server.port}: another program listens there"):
        bind(FrontendArgs(port=server.port))
    with pytest.raises(ValueError, match="Give --host and --port of this machine"):
        bind(FrontendArgs(host="192.0.2.1"))  # of no machine (RFC 5737)


def test_addresses_as_one_types_them() -> None:
    for args, address in (
        (FrontendArgs(port=0), "http://127.0.0.1:"),
        (FrontendArgs(host="0.0.0.0", port=0), "http://localhost:"),
        (FrontendArgs(port=0, ssl_keyfile="a", ssl_certfile="b"), "https://127.0.0.1:"),
    ):
        with bind(args) as sock:
            assert describe_address(args, sock) == f"{address}{sock.getsockname()[1]}"


@pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="no Unix domain sockets")
def test_a_path_is_for_this_user_and_can_be_used_again(tmp_path: Path) -> None:
    args = FrontendArgs(uds=str(tmp_path / "socket"))
    for _ in range(2):  # the first one leaves its file behind
        with bind(args) as sock:
            assert describe_address(args, sock) == f"unix:{args.uds}"
            assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600
            with pytest.raises(ValueError, match="another program listens there"):
                bind(args)
    (tmp_path / "file").touch()
    for name, message in (
        ("file", "file: a file that is no socket is there. Give --uds a short path"),
        ("no/file", "no/file: No such file or directory. Give --uds"),
        ("x" * 200, "AF_UNIX path too long. Give --uds"),
    ):
        with pytest.raises(ValueError, match=f"cannot listen at .*{message}"):
            bind(FrontendArgs(uds=str(tmp_path / name)))
    assert (tmp_path / "file").exists()


def test_files_that_are_no_certificate_are_told_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    assert __main__.main(["serve", f"--ssl-keyfile={file}", f"--ssl-certfile={file}"]) == 1
    error = capsys.readouterr().err
    assert f"ssl_certfile {str(file)!r} and ssl_keyfile {str(file)!r} are not a" in error
    assert "is served at" not in error


@pytest.mark.parametrize(
    ("host", "is_public"),
    [
        ("127.0.0.1", False),
        ("127.1.2.3", False),
        ("::1", False),
        ("localhost", False),
        ("0.0.0.0", True),
        ("::", True),
        ("192.168.1.2", True),
        ("example.com", True),
    ],
)
def test_who_reaches_it(host: str, is_public: bool) -> None:
    assert FrontendArgs(host=host).is_public == is_public


# -- the command --


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "65536"], "port is 65536; allowed: 0 to 65535"),
        (["--port", "http"], "--port: invalid int value: 'http'"),
        (["--api-key", ""], "api_key holds an empty string"),
        (["--api-kye", "a"], "no option --api-kye. Did you mean --api-key?"),
        (["--max-body-size", "0"], "max_body_size is 0; allowed: 1 to"),
        (["--request-timeout", "nan"], "request_timeout is nan; allowed: 0.001 to"),
        (["--allowed-origins", "[1]"], "allowed_origins must be strings, got 1"),
        (["--allowed-origins", "["], "allowed_origins '[' is no JSON list"),
        (["--allowed-origins", "localhost"], "'localhost'; allowed: http://HOST:PORT"),
        (["--ssl-keyfile=a", "--ssl-certfile=b"], "ssl_keyfile is 'a'; there is no such file"),
        (["--ssl-keyfile", "key.pem"], "both ssl_keyfile and ssl_certfile"),
        (["-dp", "0"], "data_parallel_size is 0; allowed: 1 to 1024"),
        (["--router-policy", "random"], "invalid choice: 'random'"),
        (["--uvicorn-log-level", "loud"], "invalid choice: 'loud'"),
        (["--chat-template", "no-such.jinja"], "'no-such.jinja', which is neither a file"),
        (["--max-num-seqs", "0"], "max_num_seqs is 0; allowed: 1 to"),
        (["demo", "demo"], "'demo' is one word too many"),
        (["demo", "--model", "other"], "two models: 'demo' and --model 'other'"),
    ],
)
def test_a_wrong_command_line_is_refused_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        __main__.main(["serve", *arguments])
    assert end.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_what_is_not_there_is_one_sentence(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model, a free port, a package: before anything is loaded."""

    def complain(*arguments: str) -> str:
        assert __main__.main(["serve", *arguments]) == 1
        *_, line = capsys.readouterr().err.splitlines()
        return line

    assert "model './no-such-folder' is not a" in complain("./no-such-folder", "--port", "0")
    assert "another program listens there" in complain("--port", str(server.port))
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "nanoserve.extras.replicas.front", None)  # as if deleted
        assert "data_parallel_size needs nanoserve/extras/replicas" in complain("-dp", "2")
    monkeypatch.setattr(cli, "find_spec", lambda package: package != "uvicorn" or None)
    assert complain() == (
        'nanoserve serve: error: uvicorn is not installed: pip install -e ".[server]" installs it.'
    )


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's, in vLLM's spellings."""

    def read(line: str) -> FrontendArgs:
        parser = cli.make_parser()
        return cli.read_frontend(parser, parser.parse(shlex.split(line)))

    assert read("") == FrontendArgs()
    args = read("demo --served-model-name a b --api_key k --api-key=l --disable-uvicorn-access-log")
    assert args.served_model_name == ("a", "b")
    assert args.api_key == ("k", "l")
    assert args.disable_uvicorn_access_log
    origins = ("http://a", "http://b")
    assert read("--allowed-origins http://a http://b").allowed_origins == origins
    assert read("""--allowed-origins '["http://a", "http://b"]'""").allowed_origins == origins
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert read("").api_key == ("secret",)
    assert read("--api-key mine").api_key == ("mine",)
    monkeypatch.setenv("VLLM_API_KEY", "")
    assert read("").api_key == ()


# -- what endpoints refuse --


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b'{"prompt": ', "Invalid JSON: EOF while parsing"),
        (b'{"prompt": "\xff"}', "Invalid JSON: invalid unicode"),
        (b'{"prompt": "\\ud800"}', "Invalid JSON"),
        (b'{"prompt": ' + b"[" * 1000, "Invalid JSON: recursion limit exceeded"),
        (b'{"a":' * 1000 + b"1" + b"}" * 1000, "Invalid JSON: recursion limit exceeded"),
        (b'{"n": ' + b"9" * 5000 + b"}", "Invalid JSON: number out of range"),
        (b"[1]", "Input should be an object"),
        (b"null", "Input should be an object"),
        (b'{"model": 5, "messages": [], "prompt": "a"}', "model: Input should be a valid string"),
    ],
)
def test_what_is_no_request(server: Running, path: str, body: bytes, says: str) -> None:
    answer = server.ask("POST", path, body)
    assert answer.status == 400
    assert says in answer.error["message"]


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("model", "other", "The model 'other' does not exist"),
        ("max_tokens", "many", "max_tokens: Input should be a valid integer. It is 'many'."),
        ("max_tokens", -1, "max_tokens is -1"),
        ("temperature", float("nan"), "temperature is nan"),
        ("temperature", [1], "temperature: Input should be a valid number"),
        ("stream", "yes", "stream: Input should be a valid boolean"),
        ("n", 10**9, "n is 1000000000"),
        ("best_of", 10**9, "best_of is 1000000000; allowed: n (1) or more, up to 16384"),
        ("stop", {"a": 1}, "stop"),
        ("logit_bias", {"a": 1}, "logit_bias"),
        ("temprature", 1, "Did you mean 'temperature'?"),
        ("prompt", ["a"] * 2000, "2000 prompts"),
        ("prompt", [1, "a"], "prompt"),
        ("prompt", [10**6], "1000000"),
        ("prompt", "a " * 5000, "max_model_len"),
    ],
)
def test_a_wrong_field_is_named(server: Running, field: str, value: Any, says: str) -> None:
    answer = server.ask("POST", "/v1/completions", {"prompt": "Once", field: value})
    assert answer.status == (404 if field == "model" else 400)
    assert says in answer.error["message"]
    assert answer.error["param"] in (field, None)


# -- whatever the schema allows --

OPERATIONS = [
    ("POST", "/v1/completions", {"prompt": "Once"}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    ("POST", "/v1/embeddings", {"input": "Once"}),
    ("POST", "/v1/score", {"queries": "Once", "documents": "Twice"}),
    ("POST", "/score", {"text_1": "Once", "text_2": "Twice"}),
    ("POST", "/tokenize", {"prompt": "Once"}),
    ("POST", "/detokenize", {"tokens": [5]}),
    ("GET", "/v1/models/{name}", None),
]
BIG = ("n", "best_of", "beam_width")  # to serve thousands of completions takes a while


@pytest.fixture(scope="module")
def schema(async_llm: AsyncLLM) -> Any:
    schemathesis = pytest.importorskip("schemathesis")
    app = build_app(async_llm, host="testserver")  # schemathesis asks by this name
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.parametrize("max_examples", [10, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("method", "path", "valid"), OPERATIONS, ids=lambda value: str(value)[:30])
def test_no_request_is_a_500(
    schema: Any, method: str, path: str, valid: dict[str, Any] | None, max_examples: int
) -> None:
    """Any body that fits the schema, and many that do not quite. Also with a few of its fields in a
    valid request: that one is often served."""

    @settings(max_examples=max_examples, suppress_health_check=list(HealthCheck))
    @given(schema[path][method].as_strategy(), st.data())
    def check(case: Any, data: st.DataObject) -> None:
        bodies = [case.body]
        if valid is not None and isinstance(case.body, dict) and case.body:
            names = data.draw(st.sets(st.sampled_from(sorted(case.body)), max_size=3))
            few = {name: case.body[name] for name in names if name != "model"}
            few |= {name: 3 for name in BIG if isinstance(few.get(name), int) and few[name] > 3}
            bodies.append({**valid, "max_tokens": 2, **few})
        for case.body in bodies:
            response = case.call()
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert response.json()["error"]["code"] == response.status_code

    check()


def test_the_schema_has_all_operations(schema: Any) -> None:
    """Those that are not above have no input."""
    operations = [result.ok() for result in schema.get_all_operations()]
    there = {(each.method.upper(), each.path) for each in operations}
    others = there - {(method, path) for method, path, _ in OPERATIONS}
    assert len(there) - len(others) == len(OPERATIONS)
    assert {method for method, _ in others} == {"GET"}
    assert not [path for _, path in others if "{" in path]
