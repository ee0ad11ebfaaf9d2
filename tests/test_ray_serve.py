"""Engines behind Ray Serve: one server, several replicas.

The slow tests start one small Ray on the loopback address, and Ray Serve on a free port of it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from nanoserve import LLM, SamplingParams
from nanoserve.config import DEMO_MODEL

pytest.importorskip("ray.serve")
pytest.importorskip("nanoserve.extras.replicas")
pytest.importorskip("nanoserve.extras.ray_executor")
pytest.importorskip("nanoserve.extras.ray_serve")
import ray
import rays
from ray import serve
from rays import PATIENCE, ROOT, wait_for

from nanoserve.extras import ray_serve
from nanoserve.extras.ray_serve import HTTPCall, PrefixAffinityRouter, build_app

SMALL = {"num_kv_blocks": "256", "block_size": "4", "max_model_len": "256"}
PROMPT, NUM_TOKENS = "Once upon a time", 12
ASKED = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}

# -- options --


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ({"port": "80"}, ValueError, "port is an option of Ray Serve: http_options.port"),
        ({"shutdown_timeout": 9}, ValueError, "graceful_shutdown_timeout_s"),
        ({"lora_modules": "a=b"}, ValueError, "needs enable_lora"),
        ({"max_num_seq": "8"}, TypeError, "Did you mean 'max_num_seqs'"),
        ({"block_size": "x"}, TypeError, "block_size must be an int, got 'x'"),
        ({"data_parallel_size": 0}, ValueError, "data_parallel_size is 0; allowed: 1 to"),
        (
            {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
            ValueError,
            "'mp'; a replica needs 'ray'",
        ),
        ({"data_parallel_size": "2", "lora_folder": str(ROOT)}, ValueError, "one of 2 replicas"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    args: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        build_app(args)


def test_arguments_are_those_of_the_engine_and_of_the_server() -> None:
    """As text of the command line, or as the values of a YAML file."""
    text = {"tensor_parallel_size": "2", "enable_lora": "true", "data_parallel_size": "3"}
    values = {"tensor_parallel_size": 2, "enable_lora": True, "data_parallel_size": 3}
    for args in (text, values):
        front = build_app({**args, "device": "cpu", "api_key": "123"})._bound_deployment
        replicas = front.init_args[0]._bound_deployment
        engine, frontend, folder, _ = replicas.init_args
        assert folder == os.getcwd()
        assert engine["tensor_parallel_size"] == 2
        assert engine["enable_lora"] is True
        assert engine["distributed_executor_backend"] == "ray"
        assert frontend["api_key"] == ("123",)
        assert replicas.num_replicas == 3
        assert replicas._replica_config.placement_group_bundles == [{"CPU": 1.0}] * 2
        assert replicas.ray_actor_options["num_gpus"] == 0


def test_several_texts_are_a_list() -> None:
    front = build_app({"served_model_name": '["one", "two"]', "api_key": "[123"})
    [_, frontend] = front._bound_deployment.init_args
    assert (frontend["served_model_name"], frontend["api_key"]) == (("one", "two"), ("[123",))


def test_the_environment_of_the_command_is_that_of_the_replicas(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As under `nanoserve serve`: nobody gets in without the key of VLLM_API_KEY."""
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("HF_HOME", "of the command")
    monkeypatch.setenv("PASSWORD", "x")
    [replicas, frontend] = build_app({})._bound_deployment.init_args
    assert frontend["api_key"] == ("secret",)
    [_, given] = build_app({"api_key": "another"})._bound_deployment.init_args
    assert given["api_key"] == ("another",)
    *_, environment = replicas._bound_deployment.init_args
    assert "PASSWORD" not in environment
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("VLLM_API_KEY", "of the machine")
    replica = ray_serve.EngineReplica.func_or_class  # type: ignore[attr-defined]
    monkeypatch.setattr(ray_serve, "AsyncLLM", lambda *args, **options: SimpleNamespace())
    monkeypatch.setattr(ray_serve, "build_server", lambda *args: None)
    monkeypatch.setattr(replica, "__del__", lambda self: None)
    replica({}, frontend, str(tmp_path / "not here"), environment)
    assert os.environ["HF_HOME"] == "of the command"
    assert os.environ["VLLM_API_KEY"] == "of the machine"


@pytest.mark.parametrize(("device", "num_gpus"), [("cuda", 1), ("cuda:1", 1), ("cpu", 0)])
def test_the_machine_that_deploys_needs_no_gpu(device: str, num_gpus: int) -> None:
    """The replicas are on machines that have them, and Ray says which one is theirs."""
    replicas = build_app({"device": device})._bound_deployment.init_args[0]._bound_deployment
    assert replicas.ray_actor_options["num_gpus"] == num_gpus
    assert replicas.init_args[0]["device"] == device.partition(":")[0]


def test_a_machine_without_gpu_says_that_the_replicas_will_have_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ray_serve.app  # noqa: B018
    assert "With device=cuda" in caplog.text
    with pytest.raises(AttributeError, match="has no attribute 'application'"):
        ray_serve.application  # noqa: B018


# -- routing --


def call(prompt: str) -> Any:
    """What Ray Serve shows a router of a request."""
    pending = HTTPCall({}, b"", prompt)
    return SimpleNamespace(args=[pending], routing_context=SimpleNamespace(should_backoff=False))


def test_a_prompt_returns_to_its_replica_unless_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    router: Any = PrefixAffinityRouter.__new__(PrefixAffinityRouter)
    router.initialize_state(balance_abs_threshold=0)
    base = PrefixAffinityRouter.__mro__[1]
    for name in ("on_send_request", "on_request_completed", "update_replicas"):
        monkeypatch.setattr(base, name, lambda *arguments: None)
    replicas = [SimpleNamespace(replica_id=name) for name in "ab"]

    def send(prompt: str) -> str:
        pending = call(prompt)
        [[chosen], [_]] = asyncio.run(router.choose_replicas(replicas, pending))
        assert pending.routing_context.should_backoff
        router.on_send_request(chosen.replica_id)
        router.on_request_routed(pending, chosen.replica_id, None)
        return chosen.replica_id

    cat, dog = "a story of a cat. " * 20, "a story of a dog. " * 20
    assert [send(cat), send(dog), send(cat)] == ["a", "b", "a"]
    assert send(cat + "and then") == "b"  # a serves two requests, and b one
    for _ in range(2):
        router.on_request_completed("a", "")
    assert send(cat) == "a"
    monkeypatch.setattr(PrefixAffinityRouter, "curr_replicas", {"a": 0, "b": 0})
    router.update_replicas([replicas[1]])
    assert router.policy.num_chunks("a") == 0
    assert asyncio.run(router.choose_replicas([], call(cat))) == []


def test_round_robin_takes_each_replica_in_turn() -> None:
    deployment = build_app({"router_policy": "round_robin"})._bound_deployment.init_args[0]
    config = deployment._bound_deployment._deployment_config.request_router_config
    assert config.get_request_router_class() is PrefixAffinityRouter
    router: Any = PrefixAffinityRouter.__new__(PrefixAffinityRouter)
    router.initialize_state(**config.request_router_kwargs)
    replicas = [SimpleNamespace(replica_id=name) for name in "ab"]
    sent = [asyncio.run(router.choose_replicas(replicas, call("same")))[0][0] for _ in range(4)]
    assert sent == [*replicas, *replicas]


# -- one request --


@pytest.mark.parametrize(
    ("host", "address", "key", "status"),
    [
        ("evil.example", "127.0.0.1", "", 403),
        ("localhost:8000", "127.0.0.1", "", 200),
        ("gpu-head:8000", "10.0.0.5", "", 200),
        ("evil.example", "127.0.0.1", "secret", 200),
    ],
)
def test_another_name_of_this_machine_is_one_of_the_network(
    host: str, address: str, key: str, status: int
) -> None:
    """A page that has its own name lead to 127.0.0.1 is refused, and a client that knows the head
    of the cluster by its name is not."""
    args = {"api_key": key} if key else {}
    [_, frontend] = build_app(args)._bound_deployment.init_args

    async def answer() -> AsyncIterator[Any]:
        yield {"type": "http.response.start", "status": 200, "headers": []}
        yield {"type": "http.response.body", "body": b""}

    handle = SimpleNamespace(answer=SimpleNamespace(remote=lambda call: Messages(answer())))
    front = SimpleNamespace(args=ray_serve.FrontendArgs(**frontend), replicas=handle)
    ingress: Any = ray_serve.Ingress.func_or_class  # type: ignore[attr-defined]
    app = ingress.__serve_build_asgi_app__(front)
    headers = {"host": host, "authorization": f"Bearer {key}"}

    async def ask() -> int:
        async def at_address(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, "server": (address, 8000)}, receive, send)

        transport = httpx.ASGITransport(at_address)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.get("/v1/models", headers=headers)).status_code

    assert asyncio.run(ask()) == status


def replica_with(app: Any) -> Any:
    replica = ray_serve.EngineReplica.func_or_class.__new__(  # type: ignore[attr-defined]
        ray_serve.EngineReplica.func_or_class  # type: ignore[attr-defined]
    )
    replica.app = app
    replica.async_llm = SimpleNamespace(errored=False, shutdown=lambda: None)
    return replica


def test_a_client_that_goes_away_is_told_to_the_application() -> None:
    """Ray Serve closes the generator. The application sees what it would see under uvicorn."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append((await receive())["type"])

    async def leave() -> None:
        answer = replica_with(app).answer(HTTPCall({}, b"body", ""))
        assert (await anext(answer))["status"] == 200
        await answer.aclose()

    asyncio.run(asyncio.wait_for(leave(), 10))
    assert seen == [b"body", "http.disconnect"]


def test_a_replica_ends_with_its_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """When it is asked, and before it has begun a request: another one runs it."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    replica = replica_with(None)
    replica.check_health()
    replica.async_llm.errored = True
    replica.async_llm.dead_error = RuntimeError("rank 1 ended")
    with pytest.raises(SystemExit):
        replica.check_health()

    async def ask() -> None:
        await anext(replica.answer(HTTPCall({}, b"", "")))

    with pytest.raises(SystemExit):
        asyncio.run(ask())
    assert "this replica ends, as its engine has: rank 1 ended" in caplog.text


class Handle:
    """Of replicas, each of which sends so many messages and then ends."""

    def __init__(self, *num_messages: int, kind: bytes = b"application/json") -> None:
        self.left = list(num_messages)
        self.start = {"type": "http.response.start", "headers": [(b"content-type", kind)]}
        self.answer = SimpleNamespace(remote=lambda call: Messages(self.send(self.left.pop(0))))

    async def send(self, number: int) -> AsyncIterator[Any]:
        for _ in range(number):
            yield self.start
        if number < 9:
            raise ray.exceptions.ActorDiedError


class Messages:
    def __init__(self, messages: AsyncIterator[Any]) -> None:
        self.messages = messages

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.messages

    def cancel(self) -> None:
        pass


def pass_on(handle: Handle) -> list[Any]:
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)

    passing = ray_serve.Passing(handle, ray_serve.FrontendArgs())  # type: ignore[arg-type]
    asyncio.run(passing.pass_on(HTTPCall({}, b"", ""), send))
    return sent


def test_a_request_is_run_again_if_nothing_was_sent() -> None:
    assert len(pass_on(Handle(0, 9))) == 9
    with pytest.raises(Exception, match="2 replicas ended while they ran this request"):
        pass_on(Handle(0, 0))
    with pytest.raises(ConnectionError, match="not complete"):
        pass_on(Handle(1))
    *_, last = pass_on(Handle(2, kind=b"text/event-stream; charset=utf-8"))
    assert b"the replica has ended" in last["body"]
    assert last["body"].endswith(b"data: [DONE]\n\n")


# -- Ray Serve --


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with rays.ray_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[tuple[str, str]]:
    """Of Ray and of Ray Serve."""
    with (
        pytest.MonkeyPatch.context() as patch,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))  # of the replicas
        with rays.start_cluster(num_nodes=1, num_cpus=4) as cluster:
            port = listener.getsockname()[1]
            listener.close()
            ray.init(cluster.address)
            try:
                serve.start(http_options={"host": "127.0.0.1", "port": port})
                yield cluster.address, f"http://127.0.0.1:{port}"
            finally:
                serve.shutdown()


@pytest.fixture(scope="module")
def client(address: tuple[str, str]) -> Iterator[httpx.Client]:
    """Two replicas of the demo model, started by the command `serve run`."""
    arguments = [f"{name}={value}" for name, value in SMALL.items()]
    with (
        tempfile.TemporaryFile("w+") as log,
        httpx.Client(base_url=address[1], timeout=PATIENCE) as client,
        rays.start_process(
            [
                *(sys.executable, "-m", "ray.serve.scripts", "run", "--address", address[0]),
                *("nanoserve.extras.ray_serve:build_app", "data_parallel_size=2", *arguments),
            ],
            stdout=log,
            stderr=log,
            env={**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},  # keeps 127.0.0.1
        ) as process,
    ):
        try:
            wait_for(lambda: process.poll() is not None or is_healthy(client), 2 * PATIENCE)
        finally:
            log.seek(0)
            said = log.read()
        assert process.poll() is None, said
        yield client
        process.send_signal(signal.SIGINT)  # ends the application
        process.wait(PATIENCE)


def is_healthy(client: httpx.Client, path: str = "/health") -> bool:
    try:
        return client.get(path, timeout=5).is_success
    except httpx.TransportError:  # nobody listens yet, or no replica is there
        return False


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM(num_kv_blocks=256, block_size=4) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
        return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text


@pytest.mark.slow
def test_replicas_answer_as_one_server(client: httpx.Client, expected: str) -> None:
    answer = client.post("/v1/completions", json=ASKED)
    assert answer.json()["choices"][0]["text"] == expected
    with client.stream("POST", "/v1/completions", json={**ASKED, "stream": True}) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 2
    assert client.get("/health").status_code == 200
    assert client.get("/metrics").status_code == 404
    wrong = client.post("/v1/completions", json={**ASKED, "prompt": 3.5})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["type"] == "BadRequestError"


@pytest.mark.slow
def test_the_next_turn_finds_the_blocks_of_the_last(client: httpx.Client) -> None:
    """Eight chats over two replicas. All of the prompt was computed before, but for a few tokens of
    its end."""
    chats = [f"Story {number} begins. " * 8 for number in range(8)]
    for chat in chats:
        client.post("/v1/completions", json={**ASKED, "prompt": chat, "max_tokens": 1})
    for chat in chats:
        asked = {**ASKED, "prompt": chat + "It goes on.", "max_tokens": 1}
        usage = client.post("/v1/completions", json=asked).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2


REPLICA = b"ray::ServeReplica:default:EngineReplica"


def pids_of(folder: Path, name: bytes) -> list[int]:
    """The actors of this name."""
    found = []
    for pid in rays.processes_of(folder):
        with suppress(OSError):  # it has ended
            if name in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.slow
def test_a_killed_replica_is_replaced(client: httpx.Client, folder: Path, expected: str) -> None:
    """No request fails."""
    first, second = pids_of(folder, REPLICA)
    os.kill(first, signal.SIGKILL)
    for number in range(6):
        asked = {**ASKED, "prompt": f"{number} " * 80, "max_tokens": 1}
        assert client.post("/v1/completions", json=asked).status_code == 200
    assert client.post("/v1/completions", json=ASKED).json()["choices"][0]["text"] == expected
    wait_for(lambda: len(set(pids_of(folder, REPLICA)) - {first}) == 2)
    assert second in pids_of(folder, REPLICA)


@pytest.mark.slow
def test_a_replica_of_two_ranks(
    client: httpx.Client,
    folder: Path,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second application of the same Ray Serve, under a path of its own. Its rank 1 is an actor
    in the replica's placement group, and ends with it. When the actor ends, the replica does, too.
    The path of the checkpoint is relative."""
    with monkeypatch.context() as patch:
        patch.chdir(DEMO_MODEL.parent)
        options = {**SMALL, "tensor_parallel_size": "2", "model": DEMO_MODEL.name}
        app = build_app(options)
    serve.api._run(app, name="tp", route_prefix="/tp", _blocking=False)  # else for ever
    wait_for(lambda: is_healthy(client, "/tp/health"), 2 * PATIENCE)
    answer = client.post("/tp/v1/completions", json=ASKED)
    assert answer.json()["choices"][0]["text"] == expected
    [replica], [rank] = pids_of(folder, b":tp:EngineReplica"), pids_of(folder, b"ray::RankActor")
    os.kill(rank, signal.SIGKILL)
    assert client.post("/tp/v1/completions", json=ASKED).status_code == 500
    is_healthy(client, "/tp/health")  # asks the replica
    wait_for(lambda: replica not in rays.processes_of(folder))
    serve.delete("tp")
    wait_for(lambda: ray.available_resources().get("CPU") == 2)
