"""Ranks that are actors, and replicas behind one address; which replica a prompt goes to."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoserve import LLM, SamplingParams
from nanoserve.chapters.ray.router import CHUNK, PrefixRouter, hash_chunks
from nanoserve.sequence import EngineDeadError

ROOT = Path(__file__).parent.parent
SIZES: dict[str, Any] = {"num_gpu_blocks_override": 64, "block_size": 4, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0, max_tokens=9)
PROMPTS = ["Once upon a time", "The cat"]
TEXTS = st.text("ab", max_size=4).map(lambda text: "".join(each * CHUNK for each in text))


@given(
    st.lists(st.tuples(TEXTS, st.integers(0, 2)), max_size=8),
    TEXTS,
    st.tuples(*[st.integers(0, 40)] * 3),
)
def test_the_replica_that_knows_most(sent: list[Any], prompt: str, loads: Any) -> None:
    """Unless it has too much to do; among equals, who has least to do."""
    router = PrefixRouter()
    for text, number in sent:
        router.add(text, number)

    def shared(number: int) -> int:
        """Chunks of the prompt that begin a text which this replica was sent."""
        begins = [prompt[:end] for end in range(CHUNK, len(prompt) + 1, CHUNK)]
        texts = [text for text, to in sent if to == number]
        return sum(any(text.startswith(begin) for text in texts) for begin in begins)

    chosen = router.choose(prompt, dict(enumerate(loads)))
    allowed = [i for i in range(3) if loads[i] <= max(min(loads) + 8, min(loads) * 1.5)]
    best = max(map(shared, allowed))
    assert chosen in allowed and shared(chosen) == best
    assert loads[chosen] == min(loads[i] for i in allowed if shared(i) == best)


def test_a_router_forgets() -> None:
    """A replica that is gone; and of each, no more than its cache could hold."""
    router = PrefixRouter()
    router.add("a" * 4 * CHUNK, 0)
    assert [router.num_known(hash_chunks("a" * n), 0) for n in (63, 64, 1000)] == [0, 1, 4]
    router.remove(0)
    assert router.num_known(hash_chunks("a" * 1000), 0) == 0
    for number in range(80):
        router.add(f"{number:64}" + "b" * 2**17, 0)
    assert len(router.chunks[0]) == 2**16
    assert router.num_known(hash_chunks(f"{79:64}"), 0) == 1
    assert router.num_known(hash_chunks(f"{0:64}"), 0) == 0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.serve")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=4, include_dashboard=False)
    yield ray
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_as_actors(cluster: Any, ranks: dict[str, Any]) -> None:
    """The same tokens; a lost rank is told; the bundles are free afterwards."""

    def generate(llm: LLM) -> list[list[int]]:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    with LLM(**SIZES) as llm:
        wanted = generate(llm)
    with LLM(**ranks, distributed_executor_backend="ray", **SIZES) as llm:
        assert generate(llm) == wanted
        cluster.kill(llm.llm_engine.executor.processes[1].actor)
        with pytest.raises(EngineDeadError, match="rank 1"):
            generate(llm)
    while cluster.available_resources().get("CPU") != 4:
        pass


@pytest.mark.slow
def test_a_cluster_without_room(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanoserve.chapters.ray import executor

    monkeypatch.setattr(executor, "PLACEMENT_TIMEOUT", 1)
    with pytest.raises(ValueError, match="8 ranks need a CPU"):
        executor.reserve(8, "CPU")


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "nanoserve.chapters.ray.executor", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ModuleNotFoundError, match=r"\[ray\]"):
        LLM(tensor_parallel_size=2, distributed_executor_backend="ray")
    for backend in ("mp", "uni", "external_launcher", None):
        LLM(distributed_executor_backend=backend, **SIZES).close()
    with pytest.raises(ValueError, match="distributed_executor_backend"):
        LLM(distributed_executor_backend="mpi")


@pytest.mark.slow
def test_replicas_behind_one_address(tmp_path: Path) -> None:
    """The answers of one server, also as a stream; an API key; an error; the end by Ctrl-C."""
    pytest.importorskip("ray.serve")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "nanoserve", "serve", "--data-parallel-size", "2"]
    command += ["--port", str(port), "--api-key", "k", "--block-size", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_ADDRESS": ""}
    body = {"prompt": "Once upon a time, " * 9, "max_tokens": 9, "temperature": 0}
    with LLM() as llm:
        params = SamplingParams(temperature=0, max_tokens=9)
        wanted = llm.generate(body["prompt"], params, use_tqdm=False)[0].outputs[0].text

    def post(key: str = "k", **more: Any) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        data = json.dumps({**body, **more}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data, headers)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stderr.readline, "")
            assert any("2 replicas are served" in line for line in lines)
            answers = [json.loads(post()[1]) for _ in range(6)]
            assert {answer["choices"][0]["text"] for answer in answers} == {wanted}
            cached = [
                answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers
            ]
            assert cached[0] == 0 and all(cached[1:])  # they went to the same replica
            events = [
                line[6:] for line in post(stream=True)[1].split(b"\n") if line[:6] == b"data: "
            ]
            texts = [json.loads(event)["choices"][0]["text"] for event in events[:-1]]
            assert ("".join(texts), events[-1]) == (wanted, b"[DONE]")
            assert [post("other")[0], post(top_p=3)[0]] == [401, 400]
        finally:
            process.send_signal(signal.SIGINT)
            process.stderr.read()
    assert process.returncode == 0
