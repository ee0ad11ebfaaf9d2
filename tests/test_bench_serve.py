"""bench.py --suite serve: the client, the servers' processes, and what is computed from the times.

No test asks whether anything is fast, and none needs a model: the servers are stand-ins.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoserve.bench import (
    cli,
    http_client,
    plot,
    replicas,
    report,
    run,
    servers,
    serving,
    suites,
    turns,
)
from nanoserve.bench.http_client import Exchange, Stream, send_all
from nanoserve.bench.peers import EngineArgs
from nanoserve.bench.process import EngineError, EngineProcess, ServerProcess
from nanoserve.bench.roofline import MachineLimits
from nanoserve.bench.workload import (
    DUMMY_MODELS,
    Request,
    draw_arrivals,
    draw_requests,
    write_dummy,
)

# -- arrivals --


@given(number=st.integers(1, 50), seed=st.integers(0, 3), round_=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_arrivals_are_in_order_at_a_rate_of_one_and_drawn_by_seed(
    number: int, seed: int, round_: int
) -> None:
    arrivals = draw_arrivals(number, seed, round_)
    assert arrivals == sorted(arrivals) == draw_arrivals(number, seed, round_)
    assert len(arrivals) == number
    assert 0 <= arrivals[0] <= arrivals[-1] <= number
    assert arrivals != draw_arrivals(number, seed, round_ + 1)


def test_gaps_between_arrivals_are_exponential() -> None:
    """A Poisson process: of all gaps, the share exp(-x) is longer than x."""
    arrivals = draw_arrivals(20_000)
    gaps = [b - a for a, b in pairwise(arrivals)]
    for x, share in ((0.5, 0.607), (1.0, 0.368), (2.0, 0.135)):
        assert sum(gap > x for gap in gaps) / len(gaps) == pytest.approx(share, abs=0.02)


# -- the client --


def event(*token_ids: int, **others: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"token_ids": token_ids}], **others}).encode()


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = [b"data: [DONE]\n\n", b""]


def exchange_of(pieces: list[bytes], times: list[float] | None = None) -> Exchange:
    exchange = Exchange.__new__(Exchange)  # the constructor needs an event loop
    exchange.received = pieces
    exchange.received_at = times or [float(number) for number in range(len(pieces))]
    exchange.sent_at = 0.0
    return exchange


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_tokens_come_when_their_event_is_complete_however_the_bytes_are_cut(
    data: st.DataObject,
) -> None:
    """Events are cut into HTTP chunks, and chunks into what the socket brings, at any place."""
    tokens = data.draw(st.lists(st.lists(st.integers(0, 99), max_size=3), max_size=4))
    body = b"".join(event(*each) + b"\n\n" for each in tokens) + LAST[0]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=6)))
    parts = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    answer = HEAD + b"".join(map(chunk, [*parts, b""]))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(answer) - 1), max_size=6)))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    found = list(http_client.read_tokens(exchange_of(pieces)))
    assert [token_id for _, token_id in found] == [each for ids in tokens for each in ids]
    for number in range(1, len(pieces)):
        seen = []
        with contextlib.suppress(ConnectionError, RuntimeError):  # the rest is still to come
            for each in http_client.read_tokens(exchange_of(pieces[:number])):
                seen.append(each)
        assert seen == [each for each in found if each[0] < number]


def test_times_count_from_the_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request arrives at 102.0, is sent 0.25 s late, and ends last, at 105.0."""
    first = exchange_of([HEAD, chunk(event(7) + b"\n\n"), *map(chunk, LAST)], [100, 101, 101, 101])
    pieces = [HEAD + chunk(event(8, 9) + b"\n\n"), chunk(event(5) + b"\n\n"), *map(chunk, LAST)]
    second = exchange_of(pieces, [103, 105, 105, 105])
    first.sent_at, second.sent_at = 100.0, 102.25

    async def exchange_all(*_: Any) -> tuple[float, list[Exchange]]:
        return 100.0, [first, second]

    monkeypatch.setattr(http_client, "exchange_all", exchange_all)
    load = send_all(1, "/", [{}, {}], [0.0, 2.0], 1.0)
    assert load.streams == [Stream([1.0], [7]), Stream([1.0, 1.0, 3.0], [8, 9, 5])]
    assert (load.seconds, load.largest_delay) == (5.0, 0.25)
    assert load.cpu_seconds >= 0


@contextmanager
def serving_thread(answer: Callable[[Any], None]) -> Iterator[int]:
    """A server in a thread that hands every connection to `answer`; its port."""

    class Handler(socketserver.StreamRequestHandler):
        timeout = 20

        def handle(self) -> None:
            answer(self)

    class Threads(socketserver.ThreadingTCPServer):
        daemon_threads = True
        request_queue_size = 64

    with Threads(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server.server_address[1]
        server.shutdown()


def read_body(handler: Any) -> dict[str, Any]:
    length = 0
    while (line := handler.rfile.readline()) not in (b"\r\n", b""):
        if line.lower().startswith(b"content-length"):
            length = int(line.split(b":")[1])
    return json.loads(handler.rfile.read(length))


def test_no_request_waits_for_the_answer_of_another() -> None:
    """The server answers nobody before it has all 20 requests: an open loop ends, a closed one
    never would."""
    barrier = threading.Barrier(20)

    def answer(handler: Any) -> None:
        body = read_body(handler)
        barrier.wait(20)
        content = event(body["number"]) + b"\n\n"
        handler.wfile.write(HEAD + b"".join(map(chunk, [content, *LAST])))

    with serving_thread(answer) as port:
        bodies = [{"number": number} for number in range(20)]
        arrivals = [number / 1000 for number in range(20)]
        load = send_all(port, "/v1/completions", bodies, arrivals, 20.0)
    assert [stream.token_ids for stream in load.streams] == [[number] for number in range(20)]
    assert all(stream.times[0] > 0 for stream in load.streams)


ONE = HEAD + chunk(event(1) + b"\n\n")
WRONG: dict[str, tuple[bytes, type[Exception], str]] = {
    "refused": (
        b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": {"message": "too long"}}',
        RuntimeError,
        "the server answered HTTP/1.1 400 Bad Request: .*too long",
    ),
    "an error in the stream": (
        ONE + chunk(b'data: {"error": {"message": "a step failed"}}\n\n') + chunk(b""),
        RuntimeError,
        "the server answered: .*a step failed",
    ),
    "no token ids": (
        HEAD + chunk(b'data: {"choices": [{"text": "x"}]}\n\n') + chunk(b""),
        RuntimeError,
        "no token ids",
    ),
    "cut between events": (ONE, ConnectionError, r"before its \[DONE\]"),
    "cut in an event": (HEAD + chunk(event(1))[:-9], ConnectionError, r"before its \[DONE\]"),
    "cut in the head": (HEAD[:5], RuntimeError, "the server answered"),
    "nothing": (b"", RuntimeError, "no answer"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_an_error(name: str) -> None:
    answer, error, message = WRONG[name]

    def send(handler: Any) -> None:
        read_body(handler)
        handler.wfile.write(answer)

    with serving_thread(send) as port, pytest.raises(error, match=message):
        send_all(port, "/", [{}], [0.0], 20.0)


def test_no_answer_is_an_error() -> None:
    release = threading.Event()
    with serving_thread(lambda _: release.wait(20) and None) as port:
        with pytest.raises(TimeoutError, match=r"no complete answer 0\.05 s after the last"):
            send_all(port, "/", [{}], [0.0], 0.05)
        release.set()
    with pytest.raises(ConnectionRefusedError):
        send_all(port, "/", [{}], [0.0], 20.0)


# -- the servers' processes --

FAKE_VLLM = '''
"""Stands in for vLLM's server: token i of an answer is the prompt's sum + i. A prompt that begins
with 0 ends the process in the middle of the answer."""

import argparse, json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
for name in ("model", "dtype", "host"):
    parser.add_argument("--" + name)
for name in ("port", "max-model-len", "max-num-seqs"):
    parser.add_argument("--" + name, type=int)
args = parser.parse_args()
if args.max_model_len == 13:
    sys.exit("the KV cache does not fit")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])  # its engine's process

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *args):
        pass
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions" and body["model"] == args.model
        assert body["ignore_eos"] and body["stream"] and body["temperature"] == 0
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(body["max_tokens"]):
            self.send(json.dumps({"choices": [{"token_ids": [sum(body["prompt"]) + i]}]}))
            if body["prompt"][0] == 0:
                print("out of memory", flush=True)
                os._exit(3)
        self.send("[DONE]")
        self.wfile.write(b"0\\r\\n\\r\\n")
    def send(self, text):
        content = b"data: " + text.encode() + b"\\n\\n"
        self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(content), content))

ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
'''


@pytest.fixture
def fake_vllm(tmp_path: Path) -> str:
    """A folder to import vllm from."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(FAKE_VLLM)
    return str(tmp_path)


def processes_of(group: int) -> list[str]:
    """The commands that a process group runs."""
    listed = subprocess.run(
        ["ps", "-eo", "pgid=,args="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in listed if line.split()[0] == str(group) and "<defunct>" not in line]


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups on this system")
def test_a_server_and_its_end(fake_vllm: str) -> None:
    args = EngineArgs(folder="a model", dtype="float32")
    with ServerProcess("vllm", folder=fake_vllm) as engine:
        no_memory = (
            r"did not start; its process has ended with status 1\. the KV cache does not fit"
        )
        with pytest.raises(EngineError, match=no_memory):
            engine.build(replace(args, max_model_len=13))
        built = engine.build(args)
        assert built["versions"]["python"]
        assert engine.generate([Request([5, 6], 3)])["token_ids"] == [[11, 12, 13]]
        load = engine.replay([Request([5], 2), Request([6], 1)], [0.01, 0.0])
        first, second = load["streams"]
        assert (first["token_ids"], second["token_ids"]) == ([5, 6], [6])
        assert 0 < first["times"][0] <= first["times"][1] <= load["seconds"]
        assert load["cpu_seconds"] > 0
        group = engine._process.pid
        assert len(processes_of(group)) == 3, "the client, the server, and the server's child"
        died = r"; its process has ended with status 3\. out of memory"
        with pytest.raises(EngineError, match=died):
            engine.replay([Request([5], 2), Request([0], 2)], [0.0, 0.0])
        with pytest.raises(EngineError, match="its process has ended with status 3"):
            engine.replay([Request([5], 2)], [0.0])
    assert processes_of(group) == []


def test_a_server_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(servers.HTTPServer):
        def command(self, args: EngineArgs) -> list[str]:
            return ["-c", "import time; print('loading', flush=True); time.sleep(60)"]

        def say(self, what: str) -> str:
            made.append(self)
            return super().say(what)

    made: list[Silent] = []
    monkeypatch.setattr(servers, "START_LIMIT", 0.5)
    try:
        with pytest.raises(RuntimeError, match=r"did not answer within 0\.5 s\. "):
            Silent(EngineArgs(folder="", dtype=""))
    finally:
        made[0].process.kill()
        made[0].process.wait()


def test_options_of_a_variant_become_flags() -> None:
    options = {"enforce_eager": True, "enable_prefix_caching": False, "max_num_seqs": 8}
    args = EngineArgs(folder="m", dtype="float32", llm_options=options)
    server = servers.NanoserveServer.__new__(servers.NanoserveServer)  # starts no process
    command = server.command(args)
    assert command[:4] == ["-m", "nanoserve", "serve", "m"]
    flags = ["--enforce-eager", "--no-enable-prefix-caching", "--max-num-seqs", "8"]
    assert command[-4:] == flags


@pytest.mark.slow
def test_the_real_server_gives_the_tokens_of_llm_generate(tmp_path: Path) -> None:
    pytest.importorskip("nanoserve.extras.server")
    folder = write_dummy("qwen3-tiny", tmp_path, "float32")
    requests = draw_requests(5, 4, 12, 320)
    args = EngineArgs(folder=str(folder), dtype="float32", detokenize=True)
    arrivals = [0.02 * number for number in range(5)]
    with ServerProcess("nanoserve", threads=1) as server, EngineProcess("nanoserve") as engine:
        assert server.build(args)["versions"]["uvicorn"]
        engine.build(args)
        assert server.counters()["vllm:generation_tokens_total"] == 0
        load = server.replay(requests, arrivals)
        expected = engine.generate(requests)["token_ids"]
        assert server.counters()["vllm:generation_tokens_total"] == sum(map(len, expected))
    assert [stream["token_ids"] for stream in load["streams"]] == expected
    for stream in load["streams"]:
        assert stream["times"][0] > 0
        assert stream["times"] == sorted(stream["times"])


# -- the suite --


class FakeEngine:
    """LLM.generate: 4 requests in 2 seconds, so that rates are shares of 2 per second."""

    log: ClassVar[list[tuple[str, list[list[int]], list[float]]]] = []  # (name, prompts, arrivals)

    def __init__(self, name: str, **_: Any) -> None:
        self.name = name

    def build(self, args: EngineArgs) -> dict[str, Any]:
        if self.name == "broken":
            raise EngineError(f"{self.name}: did not start")
        return {"start_seconds": 0.0, "versions": {}, "description": "a fake"}

    def generate(self, requests: list[Request]) -> dict[str, Any]:
        self.log.append((self.name, [request.prompt for request in requests], []))
        return {"seconds": 2.0, "token_ids": [[1] * request.num_output for request in requests]}

    def close(self) -> None:
        """Nothing to end."""

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FakeServer(FakeEngine):
    """nanoserve: 10 ms to the first token, then 2 ms each. vllm: twice that, and with more than one
    request a first token after 0.2 s."""

    num_asked = 0

    def counters(self) -> dict[str, float]:
        self.num_asked += 1
        names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
        return dict(zip(names, (200.0, 150.0), strict=True)) if self.num_asked % 2 == 0 else {}

    def replay(self, requests: list[Request], arrivals: list[float]) -> dict[str, Any]:
        self.log.append((self.name, [request.prompt for request in requests], arrivals))
        scale = {"nanoserve": 1, "vllm": 2}[self.name]
        first = 0.2 if scale == 2 and len(requests) > 1 else 0.01 * scale
        streams = []
        for request in requests:
            times = [first + 0.002 * scale * number for number in range(request.num_output)]
            streams.append({"times": times, "token_ids": [scale] * request.num_output})
        return {"streams": streams, "seconds": 2.5, "cpu_seconds": 0.25, "largest_delay": 0.001}


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    monkeypatch.setattr(turns, "EngineProcess", FakeEngine)
    monkeypatch.setattr(turns, "ServerProcess", FakeServer)
    FakeEngine.log.clear()
    return FakeEngine.log


@pytest.fixture
def chosen(tmp_path: Path) -> turns.Settings:
    (tmp_path / "config.json").write_text(json.dumps(DUMMY_MODELS["qwen3-tiny"]))
    small = {"num_requests": 4, "min_len": 20, "max_len": 30, "latency_requests": 2, "repeat": 2}
    names = {"folder": tmp_path, "model": "qwen3-tiny", "device": "cpu", "dtype": "float32"}
    limits = MachineLimits(bandwidth=1e9, rate=1e10)
    return turns.Settings(
        **{**names, **small}, limits=limits, compare=("hf", "vllm"), use_tqdm=False
    )


def test_the_suite_by_hand(chosen: turns.Settings) -> None:
    result = serving.serve_suite(chosen)
    assert result["rates"] == (0.5, 1.0, 1.5, 2.0, 3.0)
    assert result["limits_ms"] == {"ttft": 100.0, "tpot": 20.0}, "5 times those of vllm alone"
    assert result["skipped"] == {"hf": "has no server here"}
    loads = ["one by one", "all at once", "0.5", "1", "1.5", "2", "3"]
    assert [(row["engine"], row["load"]) for row in result["rows"]] == [
        (name, load) for name in ("nanoserve", "vllm") for load in loads
    ]
    rows = {(row["engine"], row["load"]): row for row in result["rows"]}
    ours, theirs = rows["nanoserve", "2"], rows["vllm", "2"]
    assert ours["ttft_ms"] == pytest.approx({"p50": 10, "p90": 10, "p99": 10})
    assert theirs["itl_ms"] == pytest.approx({"p50": 4, "p90": 4, "p99": 4})
    assert (ours["goodput"], ours["good_share"]) == (4 / 2.5, 1)
    assert (theirs["goodput"], theirs["good_share"]) == (0, 0)
    assert rows["vllm", "one by one"]["good_share"] == 1
    assert rows["nanoserve", "one by one"]["seconds"] == [5.0, 5.0]
    assert ours["client_cpu"] == 0.1
    assert (ours["nanoserve_is"], ours["rate"]) == (1.0, 2.0)
    assert theirs["nanoserve_is"] > 2
    offline, server, vllm = result["servers"]
    assert offline["engine"] == "LLM.generate"
    assert (offline["nanoserve_is"], offline["same_tokens"]) == (2.0 / 2.5, 1)
    assert (server["nanoserve_is"], server["most_goodput"]) == (1.0, 4 / 2.5)
    assert (vllm["same_tokens"], vllm["most_goodput"]) == (0, 2 / 5)
    assert "most_goodput" not in offline
    text = report.format_suite("serve", result)
    assert "limits of goodput: TTFT 100 ms, TPOT 20 ms" in text
    assert "left out: hf: has no server here" in text
    assert "LLM.generate: a fake" in text
    assert json.loads(json.dumps(result))["rows"][0]["engine"] == "nanoserve"


def test_all_servers_get_the_same_requests_at_the_same_moments(
    chosen: turns.Settings, fakes: list[Any]
) -> None:
    """And no prompt comes twice to one of them: it would be found in the prefix cache."""
    serving.serve_suite(replace(chosen, request_rates=(1.0, 4.0)))
    calls = [call for call in fakes if call[2]]
    ours = [call[1:] for call in calls if call[0] == "nanoserve"]
    assert ours == [call[1:] for call in calls if call[0] == "vllm"]
    prompts = [tuple(prompt) for batch, _ in ours for prompt in batch]
    assert len(prompts) == len(set(prompts)) == 2 * (2 + 4 + 2 * 4)
    *_, slow, fast = [arrivals for _, arrivals in ours]
    assert slow == pytest.approx([4 * moment for moment in fast])
    assert slow == draw_arrivals(4, chosen.seed, round_=1)


def test_ways_to_choose_among_replicas(chosen: turns.Settings, fakes: list[Any]) -> None:
    """A fake counts what it would have found if all turns of a chat came to it."""
    result = replicas.replicas_suite(replace(chosen, replicas=2, prefix_len=40))
    labels = ["nanoserve", "nanoserve, round_robin", "nanoserve, one engine"]
    assert [row["engine"] for row in result["rows"]] == labels
    assert (result["num_chats"], result["shared"], result["longest"]) == (2, 20, 232)
    rounds = [prompts for _, prompts, arrivals in fakes if arrivals]
    assert len(rounds) == 3 * 2 * 4, "engines, rounds, turns"
    assert {len(prompts) for prompts in rounds} == {2}
    assert {len(prompt) for prompt in rounds[1]} == {40 + 32 + 16 + 32}
    assert len({tuple(prompt[:20]) for prompts in rounds[:4] for prompt in prompts}) == 1
    for row in result["rows"]:
        assert (row["hits"], row["computed"]) == (0.75, 50)
        assert (row["seconds"], row["nanoserve_is"], row["same_tokens"]) == (10.0, 1.0, True)
    assert "2 replicas, " in report.format_suite("replicas", result)


def test_serve_with_replicas_is_a_suite_of_its_own() -> None:
    args = cli.make_parser().parse_args(["serve", "latency", "--replicas", "3"])
    assert run.fill_in(args) == (["replicas", "latency"], False)
    assert args.replicas == 3
    with pytest.raises(ValueError, match="--replicas is 1; allowed: 2 or more"):
        run.fill_in(cli.make_parser().parse_args(["serve", "--replicas", "1"]))


def test_limits_can_be_given(chosen: turns.Settings) -> None:
    """The end of vllm's requests comes after 0.2 s and more."""
    for limits, share in (({"ttft": 201.0}, 1), ({"e2el": 199.0}, 0), ({"tpot": 3.9}, 0)):
        result = serving.serve_suite(replace(chosen, goodput=limits))
        assert result["limits_ms"] == limits
        assert result["rows"][-1]["good_share"] == share


def test_a_request_of_one_token_has_no_tpot() -> None:
    assert serving.latencies([0.25]) == {"ttft": 250.0, "tpot": 0.0, "e2el": 250.0}


def test_without_llm_generate_nobody_knows_the_rates(
    chosen: turns.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FakeEngine, requests: list[Request]) -> Any:
        raise EngineError("nanoserve: out of memory")

    monkeypatch.setattr(turns, "EngineProcess", type("Failing", (FakeEngine,), {"generate": fail}))
    with pytest.raises(EngineError, match=r"no rates: LLM\.generate has failed"):
        serving.serve_suite(chosen)


def test_percentiles_of_three_kinds() -> None:
    values = [float(number) for number in range(1, 101)]
    found = suites.percentiles(values, serving.PERCENTS)
    assert found == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


# -- the command and the picture --


def test_rates_and_limits_are_read() -> None:
    arguments = ["serve", "--request-rates", "0.5,2", "--goodput", "ttft:200", "tpot:50.5"]
    args = cli.make_parser().parse_intermixed_args([*arguments, "--plot", "x.png"])
    names, _ = run.fill_in(args)
    assert names == ["serve"], "it has a picture of its own"
    assert args.request_rates == (0.5, 2.0)
    assert dict(args.goodput) == {"ttft": 200.0, "tpot": 50.5}


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no such signals on this system")
def test_engines_are_ended_when_the_command_is() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def wait_for_the_end() -> None:
        with cli.ended_by_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(20)

    with pytest.raises(SystemExit, match="143"):
        wait_for_the_end()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--request-rates", "1,0"], "'1,0' has a rate that is not above 0"),
        (["--request-rates", "inf"], "'inf' has a rate that is not above 0"),
        (["--goodput", "itl:20"], "'itl:20' is not NAME:MS, with a name of ttft, tpot, e2el"),
        (["--goodput", "ttft:soon"], "'ttft:soon' is not NAME:MS"),
        (["--goodput", "ttft:-1"], "'ttft:-1' is not NAME:MS"),
    ],
)
def test_wrong_rates_and_limits_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", *arguments])
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_picture(chosen: turns.Settings, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    machine = {"device_name": "a machine"}
    result = {"model": "m", "dtype": "float32", "machine": machine}
    serve = serving.serve_suite(chosen)
    plot.draw({**result, "suites": {"serve": serve}}, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    lines = plot.by_rate(serve["rows"])
    assert {name: list(points) for name, points in lines.items()} == {
        "nanoserve": [0.5, 1.0, 1.5, 2.0, 3.0],
        "vllm": [0.5, 1.0, 1.5, 2.0, 3.0],
    }
