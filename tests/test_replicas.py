"""Several servers behind one address. The replicas are threads here, or processes that are not
nanoserve; in the slow tests they are those of the command."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("nanoserve.extras.replicas")

import httpx
from browser import CHROMIUM, Browser
from servers import (
    PATIENCE,
    Client,
    Command,
    Running,
    join,
    join_tokens,
    request,
    running,
    stream,
    until,
)
from test_server_load import (
    ask_all,
    assert_idle,
    draw_clients,
    draw_tokens,
    fake_server,
    is_there,
    read_metric,
)

from nanoserve import EngineArgs
from nanoserve.config import DEMO_MODEL
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.replicas import front, supervisor
from nanoserve.extras.replicas.front import build_front, make_prefix, merge_metrics
from nanoserve.extras.replicas.replica import Task, limit_memory, take_gpus
from nanoserve.extras.replicas.router import PrefixRouter, RoundRobin
from nanoserve.extras.replicas.supervisor import Replica, Replicas
from nanoserve.extras.server import build_app, cli
from nanoserve.extras.server.options import FrontendArgs

KEY = "secret"
C, H, M = "/v1/completions", "/v1/chat/completions", [{"role": "user", "content": "Hello"}]
STORY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b"b\r\ndata: {}\n\n\n\r\n"


class Fixed(Replicas):
    """Replicas that somebody else runs, at these ports. None: one that is not there."""

    def __init__(self, *ports: int | None, **options: Any) -> None:
        self.key, self.frontend = KEY, FrontendArgs(**options)
        self.router, self.lock, self.closing = PrefixRouter(), threading.Lock(), threading.Event()
        self.replicas = [Replica(index) for index in range(len(ports))]
        self._threads, self.reads_prompts = [], True
        for replica, port in zip(self.replicas, ports, strict=True):
            replica.port = port


@contextmanager
def fronting(*ports: int | None, **options: Any) -> Iterator[Running]:
    """The front of replicas at these ports."""
    replicas = Fixed(*ports, **options)
    with running(build_front(replicas, replicas.frontend)) as server:
        yield server
        # a client may have its answer just before the front has counted it
        until(lambda: not any(each.num_requests for each in replicas.replicas))


class Rude:
    """A server that sends some bytes to whoever asks, and closes the connection."""

    def __init__(self, *sent: bytes, waits: bool = False) -> None:
        """waits: after the bytes, until the client has closed it."""
        self.sent, self.waits = sent, waits
        self.asked: list[bytes] = []
        self.num_left = 0  # clients that have closed it
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]

    def __enter__(self) -> Rude:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listening.accept()
            except OSError:
                return
            with sock:
                sock.settimeout(PATIENCE)
                asked = sock.recv(2**16)
                head, _, body = asked.partition(b"\r\n\r\n")
                length = int((re.findall(rb"(?i)content-length: (\d+)", head) or [b"0"])[0])
                while len(body) < length and (more := sock.recv(2**16)):
                    body += more
                self.asked.append(head + b"\r\n\r\n" + body)
                for each in self.sent:
                    sock.sendall(each)
                if self.waits:
                    while sock.recv(2**16):
                        pass
                    self.num_left += 1


# -- the front --


def test_what_was_not_begun_is_run_again_and_only_once() -> None:
    with Rude() as a, Rude(HEAD % b"text/event-stream") as b, Rude() as c:
        good = HEAD % b"application/json" + b"2\r\n{}\r\n0\r\n\r\n"
        with Rude(good) as d, fronting(a.port, d.port) as server:
            assert server.ask("POST", C, STORY).json == {}
            assert [len(each.asked) for each in (a, d)] == [1, 1]
        with fronting(a.port, b.port, c.port) as server:
            error = server.ask("POST", C, {**STORY, "stream": True}).error
        assert error["code"] == 500
        assert "replicas 0 and 1 ended" in error["message"]
        assert [len(each.asked) for each in (a, b, c)] == [2, 1, 0]


def test_what_was_begun_ends_with_an_error() -> None:
    with (
        Rude(HEAD % b"text/event-stream", EVENT, b"9\r\ndata: {") as rude,
        fronting(rude.port) as s,
    ):
        events = asyncio.run(stream(s.port, STORY))
    assert events[0] == {}
    assert "replica 0 has ended" in json.dumps(events[-2])
    assert events[-1] == "[DONE]"
    with (
        Rude(HEAD % b"application/json", b"9\r\n{") as rude,
        fronting(rude.port) as s,
        pytest.raises(IncompleteRead),
    ):
        s.ask("POST", C, STORY)


def test_who_leaves_is_left() -> None:
    with Rude(HEAD % b"text/event-stream", EVENT, waits=True) as rude, fronting(rude.port) as s:
        asyncio.run(stream(s.port, STORY, leave_after=1))
        until(lambda: rude.num_left)
    with Rude(waits=True) as rude, fronting(rude.port) as s:  # and before the answer begins
        with s.connect() as sock:
            sock.sendall(request("POST", C, STORY))
            until(lambda: rude.asked)
        until(lambda: rude.num_left)


def test_without_a_replica() -> None:
    with fronting(None, None) as server:
        answer = server.ask("POST", C, STORY)
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        assert server.ask("GET", "/health").status == 503
        assert server.ask("POST", "/v1/load_lora_adapter", {}).status == 503
        assert server.ask("GET", "/load").json == {"server_load": 0, "replicas": [None, None]}
        assert server.ask("GET", "/metrics").body == b""
        assert server.ask("GET", "/engine?replica=1").status == 503
        for name in ("2", "x", "9" * 99):
            error = server.ask("GET", f"/engine?replica={name}").error
            assert (error["code"], error["param"]) == (404, "replica")
        assert "started again" in server.ask("GET", "/v1/models").error["message"]
        server.server.state.async_llm.closing.set()
        assert "shutting down" in server.ask("GET", "/v1/models").error["message"]


def test_what_a_replica_is_asked() -> None:
    """Its own key, the client's id, the path behind the root, and the body as it was."""
    good = HEAD % b"application/json" + b"2\r\n{}\r\n0\r\n\r\n"
    with Rude(good) as rude, fronting(rude.port, api_key="k", root_path="/x") as server:
        headers: Any = {"Authorization": "Bearer k", "X-Request-Id": "7", "Connection": "close"}
        answer = server.ask("POST", "/v1/completions?a=%20b", b'{ "prompt":3}', headers)
        assert (answer.status, answer.headers["x-request-id"]) == (200, "7")
        assert server.ask("POST", C, STORY).status == 401
        assert server.ask("GET", "/health").status == 200
        assert server.ask("POST", C, STORY, {**headers, "Host": "["}).status == 200
        assert server.ask("get", "/v1/models", None, headers).status == 200
    asked, odd, small = rude.asked
    assert small.startswith(b"get "), "which is not GET"
    assert b"\r\nhost: [\r\n" in odd.lower()
    head, _, body = asked.partition(b"\r\n\r\n")
    first, *lines = head.decode().lower().split("\r\n")
    sent = dict(line.split(": ", 1) for line in lines)
    assert first == "post /v1/completions?a=%20b http/1.1"
    assert body == b'{ "prompt":3}'
    assert (sent["authorization"], sent["x-request-id"]) == (f"bearer {KEY}", "7")
    assert (sent["host"], sent["x-forwarded-proto"]) == ("localhost", "http")


def closed_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port


def test_who_did_not_begin_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue, or a replica that has just ended: each of the others is asked."""
    busy = b"HTTP/1.1 503 No\r\nContent-Type: text/plain\r\nContent-Length: 1\r\n\r\n!"
    good = HEAD % b"application/json" + b"2\r\n{}\r\n0\r\n\r\n"
    ports = [closed_port() for _ in range(3)]
    with Rude(busy) as a, Rude(busy) as b, Rude(good) as c:
        with fronting(*ports, a.port, b.port, c.port) as server:
            assert server.ask("POST", C, STORY).json == {}
        assert [len(each.asked) for each in (a, b, c)] == [1, 1, 1]
        with fronting(a.port, b.port) as server:  # all are full: the last one says so
            answer = server.ask("POST", C, STORY)
            assert (answer.status, answer.body) == (503, b"!")
        assert [len(each.asked) for each in (a, b)] == [2, 2]
    with fronting(*ports) as server:
        assert server.ask("POST", C, STORY).status == 503
        assert server.ask("GET", "/engine?replica=1").status == 503


def test_who_has_ended_when_just_connected() -> None:
    """anyio asks a socket that is not there any more. Nothing was sent."""

    def fail(request: httpx.Request) -> httpx.Response:
        raise AttributeError("'NoneType' object has no attribute 'getpeername'")

    async def ask(message: Any) -> None:
        raise AssertionError("nothing is answered")

    client = httpx.AsyncClient(transport=httpx.MockTransport(fail))
    with pytest.raises(httpx.ConnectError):
        asyncio.run(front.Answer(ask).pass_on(client, client.build_request("GET", "http://a")))


def test_who_has_ended_since_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    good = HEAD % b"application/json" + b"2\r\n{}\r\n0\r\n\r\n"
    choose = Replicas.choose

    def choose_and_end(self: Replicas, *args: Any) -> Replica:
        chosen = choose(self, *args)
        if chosen.index == 0:
            chosen.port = None
        return chosen

    monkeypatch.setattr(Replicas, "choose", choose_and_end)
    with Rude() as a, Rude(good) as b, fronting(a.port, b.port) as server:
        assert server.ask("POST", C, STORY).json == {}
        assert not a.asked


def test_who_only_looks_takes_no_turn() -> None:
    """A client that asks for the models before each request finds all replicas."""
    good = HEAD % b"application/json" + b"2\r\n{}\r\n0\r\n\r\n"
    with Rude(good) as a, Rude(good) as b, fronting(a.port, b.port) as server:
        server.server.state.async_llm.router = RoundRobin()
        for _ in range(4):
            assert server.ask("GET", "/v1/models").status == 200
            assert server.ask("POST", C, STORY).status == 200
        asked = [[each.split()[0] for each in rude.asked] for rude in (a, b)]
        assert [each.count(b"POST") for each in asked] == [2, 2]


def test_a_prompt_that_no_cache_keeps_has_no_home() -> None:
    """The least loaded replica answers it. Where caches are, the one that had it before does."""
    good = HEAD % b"application/json" + b"2\r\n{}\r\n0\r\n\r\n"
    for reads_prompts, expected in ((True, [4, 0]), (False, [2, 2])):
        with Rude(good) as a, Rude(good) as b, fronting(a.port, b.port) as server:
            server.server.state.async_llm.reads_prompts = reads_prompts
            for _ in range(4):
                assert server.ask("POST", C, {**STORY, "prompt": "tell " * 99}).status == 200
            assert [len(each.asked) for each in (a, b)] == expected


def test_a_silent_replica_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "METRICS_LIMIT", 0.2)
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n# TYPE a gauge\na 1\n"
    bad = b"HTTP/1.1 500 No\r\nContent-Length: 3\r\n\r\nb 1"
    with (
        Rude(waits=True) as a,
        Rude(good) as b,
        Rude(bad) as c,
        fronting(a.port, b.port, c.port) as server,
    ):
        assert server.ask("GET", "/metrics").body == b'# TYPE a gauge\na{engine="1"} 1\n'


def test_an_adapter_is_everywhere_or_nowhere() -> None:
    answer = "HTTP/1.1 %s\r\nContent-Type: text/plain\r\nContent-Length: 1\r\n\r\n!"
    good, bad = [(answer % status).encode() for status in ("200 OK", "400 No")]
    one = {"lora_name": "one", "lora_path": "a"}
    with Rude(good) as a, Rude(good) as b, Rude(bad) as c, Rude() as gone:
        with fronting(a.port, gone.port, b.port, None, lora_folder="tests") as server:
            replicas = server.server.state.async_llm
            assert server.ask("POST", front.LOAD, one).status == 200
            [module] = replicas.frontend.lora_modules
            assert json.loads(module) == {"name": "one", "path": os.path.join("tests", "a")}
            assert server.ask("POST", front.UNLOAD, {"lora_name": "one"}).body == b"!"
            assert replicas.frontend.lora_modules == ()
        with fronting(a.port, c.port, b.port, lora_modules="two=x") as server:
            replicas = server.server.state.async_llm
            for body in (one, [], b"{"):
                assert server.ask("POST", front.LOAD, body).status == 400
                assert replicas.frontend.lora_modules == ("two=x",)
    with Rude() as ends, fronting(ends.port, ends.port) as server:
        assert server.ask("POST", front.LOAD, one).status == 503
        assert server.server.state.async_llm.frontend.lora_modules == (), (
            "who starts again would end"
        )
    with Rude(bad) as c, Rude(good) as d, fronting(c.port, d.port, lora_modules="one=x") as server:
        replicas = server.server.state.async_llm
        assert server.ask("POST", front.UNLOAD, {"lora_name": "one"}).status == 200
        assert (len(d.asked), replicas.frontend.lora_modules) == (1, ()), "one had lost it before"
    paths = [asked.split()[1].decode() for asked in a.asked]
    assert paths[:4] == [front.LOAD, front.UNLOAD, front.LOAD, front.UNLOAD]
    assert json.loads(a.asked[3].partition(b"\r\n\r\n")[2]) == {"lora_name": "one"}
    assert len(b.asked) == 2


def test_who_starts_with_the_adapter_is_not_asked_to_load_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would say that there is one, and all others would lose it again."""
    good, bad = [
        f"HTTP/1.1 {each}\r\nContent-Length: 1\r\n\r\n!".encode() for each in ("200 OK", "400 No")
    ]
    change = Replicas.change

    def change_and_start(self: Replicas, *args: Any) -> Any:
        found = change(self, *args)
        self.replicas[1].port = b.port
        return found

    monkeypatch.setattr(Replicas, "change", change_and_start)
    with Rude(good) as a, Rude(bad) as b, fronting(a.port, closed_port()) as server:
        body = {"lora_name": "one", "lora_path": "a"}
        assert server.ask("POST", front.LOAD, body).status == 200
        assert (len(a.asked), len(b.asked)) == (1, 0)
        assert len(server.server.state.async_llm.frontend.lora_modules) == 1


@given(st.lists(st.text(max_size=200), min_size=1), st.sampled_from("mn"), st.integers(0, 99))
def test_prompts_that_begin_alike_are_known_alike(texts: list[str], model: str, cut: int) -> None:
    def prefix(**body: Any) -> str:
        return make_prefix(json.dumps({"temperature": 1, "model": model, **body}).encode())

    chat = [{"role": "user", "content": text} for text in texts]
    assert prefix(messages=chat).startswith(prefix(messages=chat[:cut] or chat[:1])[:-1])
    assert prefix(prompt=texts[0]).startswith(prefix(prompt=texts[0][:cut])[:-1].rstrip("\\"))
    assert prefix(prompt=texts[0]) == prefix(prompt=texts[0], max_tokens=5)
    assert prefix(prompt=texts[0], cache_salt="s")[:9] != prefix(prompt="s" * 9)[:9]


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"null", b'"a"', b"[" * 99999, b"\xff", b"{}"])
def test_what_has_no_prompt(body: bytes) -> None:
    assert make_prefix(body) == ""


def test_of_a_long_prompt_only_the_beginning_is_written() -> None:
    pairs = make_prefix(json.dumps({"prompt": [[1, 2]] * 100_000}).encode())
    assert len(pairs) == front.MOST_CHARACTERS * len("[1, 2], ")
    assert len(make_prefix(json.dumps({"prompt": "a" * 100_000}).encode())) < 70_000


def test_a_body_that_can_just_be_read() -> None:
    """To write JSON takes a little more stack than to read it."""
    for depth in range(900, 1100):
        make_prefix(b'{"prompt":%b%b}' % (b"[" * depth, b"]" * depth))


def test_metrics_of_two() -> None:
    help_, type_ = '# HELP a:b engine="0"', "# TYPE a:b counter"
    texts = {i: f'{help_}\n{type_}\na:b{{engine="0",x="y"}} {i}\n' for i in (0, 2)}
    samples = ['a:b{engine="0",x="y"} 0', 'a:b{engine="2",x="y"} 2']
    assert merge_metrics(texts) == "\n".join([help_, type_, *samples, ""])
    assert merge_metrics({}) == ""
    no_label = dict.fromkeys((0, 2), '# TYPE b counter\nb{reason="{"} 1\n# TYPE c gauge\nc 2\n')
    samples = [line for line in merge_metrics(no_label).splitlines() if line[0] != "#"]
    names = [
        'b{engine="0",reason="{"}',
        'b{engine="2",reason="{"}',
        'c{engine="0"}',
        'c{engine="2"}',
    ]
    assert [each.rpartition(" ")[0] for each in samples] == names


# -- the same answers as one server --

CHAT: dict[str, Any] = {"model": "demo", "messages": M, "temperature": 0, "max_tokens": 30}
TOOL = {"type": "function", "function": {"name": "toss", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
TEXT_REQUESTS: list[tuple[str, Any]] = [
    (C, STORY),
    (C, {**STORY, "stream": True, "stream_options": {"include_usage": True}}),
    (C, {**STORY, "prompt": [[5, 6], [7]], "logprobs": 2, "echo": True}),
    (C, {**STORY, "n": 3, "seed": 5, "temperature": 1}),
    (C, {**STORY, "use_beam_search": True, "n": 2}),
    (C, {**STORY, "model": "pirate"}),
    (C, {**STORY, "model": "nobody"}),
    (C, {**STORY, "top_p": 7}),
    (C, b"{"),
    (H, {**CHAT, "logprobs": True}),
    (H, {**CHAT, "stream": True}),
    (H, {**CHAT, "response_format": FORM}),
    (H, {**CHAT, "tools": [TOOL], "tool_choice": "required", "max_tokens": 60}),
    ("/tokenize", {"model": "demo", "prompt": "Hello", "return_token_strs": True}),
    ("/detokenize", {"model": "demo", "tokens": [5, 6, 7]}),
    ("/v1/embeddings", {"model": "demo", "input": "Hello"}),
    ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}),
    *[(path, None) for path in ("/v1/models", "/v1/models/pirate", "/version", "/health", "/ping")],
    *[(path, None) for path in ("/", "/openapi.json", "/nowhere", "*", "http://elsewhere/version")],
    *[(path, None) for path in ("/v1/../version", "/version#a", "//elsewhere/version", "/health/")],
    (C + "/", STORY),  # redirected, to the address that the client knows
]
POOLING_REQUESTS: list[tuple[str, Any]] = [
    ("/v1/embeddings", {"model": "demo", "input": ["A dog", "A cat"]}),
    ("/v1/embeddings", {"model": "demo", "input": "A dog", "encoding_format": "base64"}),
    ("/v1/score", {"model": "demo", "queries": "A dog", "documents": ["A cat", "The sea"]}),
    (C, STORY),
]
TEXT = {"enable_lora": True, "max_lora_rank": 32}
PIRATE = {"lora_modules": f"pirate={DEMO_MODEL / 'lora'}"}
SERVED = [(TEXT, PIRATE, TEXT_REQUESTS), ({"runner": "pooling"}, {}, POOLING_REQUESTS)]


def ask_each(server: Client, requests: list[tuple[str, Any]]) -> list[Any]:
    """Path, status, type and body of each answer, without what is another one each time."""
    found = []
    for path, body in requests:
        answer = server.ask("GET" if body is None else "POST", path, body)
        kind = answer.headers.get("content-type", "")
        told: Any = answer.body
        if "event-stream" in kind:
            told = read_events(answer.body.decode())
        elif "json" in kind:
            told = without_ids(answer.json)
        found.append((path, answer.status, kind, answer.headers.get("location"), told))
    return found


def without_ids(told: Any) -> Any:
    if isinstance(told, list):
        return [without_ids(each) for each in told]
    if isinstance(told, dict):
        changing = ("id", "created", "cached_tokens", "prompt_tokens_details")
        return {key: without_ids(each) for key, each in told.items() if key not in changing}
    return round(told, 3) if isinstance(told, float) else told  # logprobs: the batch rounds them


def read_events(text: str) -> Any:
    """What a stream says, however it is cut into events."""
    *events, end = text.removesuffix("\n\n").split("\n\n")
    assert end == "data: [DONE]"
    said: dict[str, list[Any]] = {}
    for event in events:
        for name, value in walk(without_ids(json.loads(event.removeprefix("data: ")))):
            said.setdefault(name, []).append(value)
    return {
        name: "".join(values) if name.endswith(("text", "content")) else values[-1]
        for name, values in said.items()
    }


def walk(told: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in JSON that is not None, and its place."""
    if isinstance(told, (dict, list)):
        for key, value in told.items() if isinstance(told, dict) else enumerate(told):
            yield from walk(value, f"{place}.{key}")
    elif told is not None:
        yield place, told


@pytest.mark.parametrize(("options", "args", "requests"), SERVED, ids=["text", "pooling"])
def test_every_endpoint_answers_as_one_server_does(
    options: dict[str, Any], args: dict[str, Any], requests: list[tuple[str, Any]]
) -> None:
    with ExitStack() as stack:
        servers = []
        for key in ((), KEY):  # one server, and one that is the replicas
            config = EngineArgs(num_kv_blocks=64, max_num_seqs=16, **options)
            llm = stack.enter_context(AsyncLLM(config))
            app = build_app(llm, served_model_name="demo", api_key=key, **args)
            servers.append(stack.enter_context(running(app)))
        port = servers[-1].port
        server = stack.enter_context(fronting(port, port, served_model_name="demo", **args))
        expected = ask_each(servers[0], requests)
        assert ask_each(server, requests) == expected
        assert {status for _, status, *_ in expected} >= {200, 400}
        text = server.ask("GET", "/metrics").body.decode()
        single = servers[0].ask("GET", "/metrics").body.decode()
        assert re.findall("^# .*", text, re.M) == re.findall("^# .*", single, re.M)
        samples, alone = (re.findall("^[^#].*(?= )", each, re.M) for each in (text, single))
        assert sum('engine="1"' in each for each in samples) == len(alone)
        assert len(set(samples)) == 2 * len(alone), "Prometheus takes each sample once"
        state = server.ask("GET", "/engine?replica=1").json
        assert state["model"] == "demo"


@pytest.mark.slow
def test_100_clients_of_two() -> None:
    """Of which a third goes away, again and again. The others get the oracle's tokens, from both
    replicas, and nothing is left in either."""
    with (
        fake_server(num_kv_blocks=256) as a,
        fake_server(num_kv_blocks=256) as b,
        fronting(a.port, b.port, disable_uvicorn_access_log=True) as both,
    ):
        for seed in range(100, 104):
            clients = draw_clients(seed, draw_tokens)
            found = asyncio.run(ask_all(both.port, clients))
            for server in (a, b):
                assert_idle(server)
            for (body, leave_after, expected), events in zip(clients, found, strict=True):
                assert leave_after is not None or join_tokens(events) == expected, body
        assert min(read_metric(server, "generation_tokens_total") for server in (a, b)) > 1000


@pytest.mark.skipif(not CHROMIUM, reason="needs Chromium (apt install chromium)")
def test_the_page_shows_the_replica_of_your_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[str] = []
    get = Replicas.get
    monkeypatch.setattr(Replicas, "get", lambda self, i, *_: watched.append(i) or get(self, i))
    with (
        AsyncLLM(EngineArgs(num_kv_blocks=64)) as llm,
        running(build_app(llm, api_key=KEY)) as server,
        fronting(server.port, server.port) as both,
        Browser() as browser,
    ):
        page = browser.open(f"http://127.0.0.1:{both.port}/")
        page.wait_for("$('replica').options.length === 2 && !$('replicas').hidden")
        until(lambda: watched == ["0"])
        page.evaluate("$('replica').value = '1'; $('replica').dispatchEvent(new Event('change'))")
        until(lambda: watched == ["0", "1"])
        assert page.problems == []
        page.close()


# -- processes --

# A replica that is not nanoserve: it does as a file says, and ends by the same rules.
SCRIPT = """
import json, os, signal, socket, sys
open(0, "rb", buffering=0, closefd=False).readline()
how, number = open(sys.argv[1]).read(), len(os.listdir(sys.argv[2]))
with open(os.path.join(sys.argv[2], str(os.getpid())), "w") as file:
    file.write(os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"])
if how == "refuses" or (how == "one refuses" and number):
    print(json.dumps({"error": "the model is too large."}), flush=True)
    sys.exit(1)
if how == "talks nonsense":
    print("hello", flush=True)
    signal.pause()
if how != "dies at once":
    served = {"name": "demo", "takes_text": True, "pools": how == "pools"}
    if silent := how == "is silent" and number == 0:
        listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1] if silent else 1000 + number
    print(json.dumps({"port": port, **served}), flush=True)
    os.read(0, 1)
while how == "is deaf":
    signal.pause()
"""


class Life:
    """Replicas of SCRIPT in a folder."""

    def __init__(self, folder: Path) -> None:
        self.how, self.lives = folder / "how", folder / "lives"
        self.lives.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        words = [str(folder / "script.py"), str(self.how), str(self.lives)]
        self.command = [sys.executable, "-SE", *words]
        self.ends = ExitStack()

    def start(self, how: str, size: int = 2) -> Replicas:
        self.how.write_text(how)
        replicas = Replicas(EngineArgs(), FrontendArgs(data_parallel_size=size))
        self.ends.callback(replicas.shutdown)
        return replicas

    @property
    def pids(self) -> list[int]:
        return [int(file.name) for file in self.lives.iterdir()]


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    life = Life(tmp_path)
    monkeypatch.setattr(supervisor, "COMMAND", life.command)
    monkeypatch.setattr(supervisor, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(supervisor, "GRACE", 0.5)
    with life.ends:
        yield life
    assert not any(map(is_there, life.pids))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("refuses", "the model is too large"),
        ("one refuses", "the model is too large"),
        ("dies at once", "status 0 before it served"),
        ("talks nonsense", "Expecting value"),
    ],
)
def test_a_replica_that_cannot_start_ends_all(life: Life, how: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        life.start(how)


def test_a_replica_that_ends_is_started_again(life: Life, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", "nanoserve")
    replicas = life.start("serves")
    first, second = replicas.replicas
    text = "once upon a time " * 9
    home = replicas.choose(text)
    for pause in ("0.01", "0.02", "0.04"):
        assert first.process is not None
        os.kill(first.process.pid, signal.SIGKILL)
        ended = first.process.pid
        until(lambda ended=ended: first.port and first.process.pid != ended)
        assert f"started again in {pause} s" in caplog.messages[-1]
    assert home is first
    assert replicas.router.num_chunks(first.index) == 0, "its cache is empty"  # type: ignore
    second.num_requests = 9  # the router has no other reason to choose
    assert replicas.choose(text) is first
    life.how.write_text("refuses")
    os.kill(first.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    until(lambda: any("too large" in each for each in caplog.messages))
    assert replicas.choose(text) is second
    assert replicas.alive == [second]
    life.how.write_text("serves")
    until(lambda: replicas.alive == [first, second])
    replicas.shutdown()
    assert replicas.alive == []
    assert replicas.errored


def test_a_replica_that_does_not_end_is_killed(life: Life) -> None:
    life.start("is deaf").shutdown(0.1)


def test_a_replica_that_is_silent_is_replaced(
    life: Life, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("ERROR", "nanoserve")
    monkeypatch.setattr(supervisor, "PING_PAUSE", 0.01)
    monkeypatch.setattr(supervisor, "SILENCE", 0.05)
    replicas = life.start("is silent", 1)
    [replica] = replicas.replicas
    until(lambda: len(life.pids) == 2 and replica.port)
    assert "has not answered for 0.05 s" in caplog.messages[0]
    assert "has ended with status -9" in caplog.messages[1]
    assert replica.process is not None
    assert is_there(replica.process.pid)


def test_who_starts_while_adapters_change_starts_again(
    life: Life, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = life.start("serves", 1)
    [replica] = replicas.replicas
    start, new = replicas._start, FrontendArgs(data_parallel_size=1)

    def start_and_change(replica: Replica) -> Any:
        started = start(replica)
        replicas.change(new)
        return started

    monkeypatch.setattr(replicas, "_start", start_and_change)
    os.kill(replica.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    until(lambda: replica.port and len(life.pids) == 3)
    assert replicas.frontend is new


def test_who_started_with_options_that_are_taken_back_starts_again(life: Life) -> None:
    replicas = life.start("serves")
    first, second = replicas.replicas
    old, new = replicas.frontend, FrontendArgs(data_parallel_size=2)
    urls, before = replicas.change(new)
    assert urls == [first.url, second.url]
    os.kill(first.process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    until(lambda: first.port and first.frontend is new)
    replicas.change_back(before)
    until(lambda: first.port and first.frontend is old and len(life.pids) == 4)
    assert second.frontend is old
    assert second.url == urls[1], "it never had them"


def test_prompts_are_read_for_a_prefix_cache(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads(policy: Any = "cache_aware", **options: Any) -> bool:
        args = FrontendArgs(data_parallel_size=1, router_policy=policy)
        replicas = Replicas(EngineArgs(**options), args)
        replicas.shutdown()
        return replicas.reads_prompts

    life.how.write_text("serves")
    assert reads()
    assert reads(enable_prefix_caching=None)
    assert not reads(enable_prefix_caching=False)
    assert not reads("round_robin")
    life.how.write_text("pools")
    assert not reads()


def test_cores_and_gpus_are_divided(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "num_cores", lambda: 7)
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    life.start("serves").shutdown()
    assert {file.read_text() for file in life.lives.iterdir()} == {"5"}  # 3 of 8 cores for each
    config = EngineArgs(tensor_parallel_size=2)
    task = Task(1, 2, 1000, config, FrontendArgs(), False)
    for num_gpus, visible, mine in ((0, None, None), (4, None, "2,3"), (4, "7,5,3,1", "3,1")):
        monkeypatch.setattr("torch.cuda.device_count", lambda number=num_gpus: number)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        take_gpus(task)
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == mine
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(ValueError, match=r"2 replicas of 2 GPU.* need 4 GPUs, and torch sees 3"):
        take_gpus(task)
    task.config.device = "cpu"  # type: ignore[misc]
    take_gpus(task)
    limit_memory(task)
    assert config.kv_cache_memory_bytes == 125


def test_one_gpu_is_not_for_all() -> None:
    with pytest.raises(ValueError, match=r"device 'cuda:1' is one GPU.*data_parallel_size is 2"):
        cli.main(["--port", "0", "-dp", "2", "--device", "cuda:1"])


# -- the command --


def children(pid: int) -> list[int]:
    """The processes that its threads have started (Linux)."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def descendants(pid: int) -> list[int]:
    return [each for child in children(pid) for each in (child, *descendants(child))]


def child_of(pid: int, word: str) -> int:
    """Its first child process whose command line has this word."""
    return next(i for i in children(pid) if word in Path(f"/proc/{i}/cmdline").read_text())


@contextmanager
def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Iterator[Command]:
    """The command with two replicas; afterwards none of its processes is there."""
    monkeypatch.setattr("servers.PATIENCE", 90.0)
    with Command("-dp", "2", *arguments) as server:
        pids = descendants(server.process.pid)
        assert len(pids) >= 2
        yield server
    until(lambda: not any(map(is_there, pids)))


async def ask_long(
    port: int, number: int, when_begun: Callable[[], Any], model: str = "demo"
) -> list[list[Any]]:
    """The events of as many long streams; when all have begun, the function is called."""
    num_begun = 0

    def begin() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == number:
            when_begun()

    body = {"model": model, "max_tokens": 400, "ignore_eos": True}
    asking = [stream(port, {**body, "prompt": [i] * 40}, on_begin=begin) for i in range(number)]
    return await asyncio.gather(*asking)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_replica_is_killed_then_all_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_loads() -> list[int | None]:
        loads: list[int | None] = server.ask("GET", "/load").json["replicas"]
        return loads

    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    lora = ("--enable-lora", "--max-lora-rank", "32", "--lora-folder", str(DEMO_MODEL))
    with command(monkeypatch, "--shutdown-timeout", "0.2", *lora) as server:
        pirate = {"lora_name": "pirate", "lora_path": "lora"}
        assert server.ask("POST", front.LOAD, pirate).status == 200

        def kill_one() -> None:
            assert read_loads() == [4, 4]
            os.kill(child_of(server.process.pid, "replicas.replica"), signal.SIGKILL)

        answers = asyncio.run(ask_long(server.port, 8, kill_one))
        assert [events[-1] for events in answers] == ["[DONE]"] * 8
        assert sorted("error" in events[-2] for events in answers) == [False] * 4 + [True] * 4
        for _ in range(4):
            assert server.ask("POST", C, STORY).status == 200
        until(lambda: None not in read_loads())
        loads: list[Any] = []
        asking = ask_long(server.port, 2, lambda: loads.append(read_loads()), "pirate")
        reasons = [reason for events in asyncio.run(asking) for _, reason in join(events).values()]
        assert (reasons, loads) == (["length"] * 2, [[1, 1]]), "the new one has the adapter, too"
        pids = descendants(server.process.pid)
        answers = asyncio.run(ask_long(server.port, 4, lambda: server.send(signal.SIGTERM)))
        reasons = [reason for events in answers for _, reason in join(events).values()]
        assert "abort" in reasons
        assert set(reasons) <= {"abort", "length"}
        assert server.wait() == 0
        assert not any(map(is_there, pids))
        assert "Traceback" not in "".join(server.lines)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_rank_is_killed_then_the_front(monkeypatch: pytest.MonkeyPatch) -> None:
    with command(monkeypatch, "-tp", "2") as server:
        expected = server.ask("POST", C, STORY).json["choices"]
        replica = child_of(server.process.pid, "replicas.replica")
        os.kill(child_of(replica, "multiproc"), signal.SIGKILL)
        assert server.ask("POST", C, STORY).json["choices"] == expected
        until(lambda: any("started again" in line for line in server.lines))
        until(lambda: None not in server.ask("GET", "/load").json["replicas"])
        pids = descendants(server.process.pid)
        assert len(pids) == 4
        server.process.kill()
        until(lambda: not any(map(is_there, pids)))
