"""/v1/embeddings and /v1/score over HTTP, asked by OpenAI's own client. The oracle is LLM."""

from __future__ import annotations

import base64
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import OpenAI
from pydantic import TypeAdapter
from servers import Command, Running, openai_client, running, until

from nanoserve import LLM, EngineArgs, PoolingParams
from nanoserve.config import DEMO_MODEL
from nanoserve.extras.async_llm import AsyncLLM
from nanoserve.extras.pooling.runner import PoolingModelRunner
from nanoserve.extras.server import build_app, responses

TEXTS = ["A dog", "Once upon a time", "The sea"]
NUM_TOKENS = [2, 4, 3]
E, S = "/v1/embeddings", "/v1/score"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, as if made for Matryoshka embeddings."""
    folder = tmp_path_factory.mktemp("matryoshka")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "is_matryoshka": True}))
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[Any, list[float]]:
    """(text, dimensions) -> its vector."""
    with LLM(checkpoint, runner="pooling", num_kv_blocks=64) as llm:
        tokenizer, found = llm.get_tokenizer(), dict[Any, list[float]]()
        assert [len(tokenizer.encode(text)) for text in TEXTS] == NUM_TOKENS
        for dimensions in (None, 16):
            params = PoolingParams(dimensions=dimensions)
            outputs = llm.embed(TEXTS, pooling_params=params, use_tqdm=False)
            vectors = [output.outputs.embedding for output in outputs]
            found |= {(text, dimensions): v for text, v in zip(TEXTS, vectors, strict=True)}
        return found


@pytest.fixture(scope="module")
def async_llm(checkpoint: Path) -> Iterator[AsyncLLM]:
    args = EngineArgs(model=str(checkpoint), runner="pooling", num_kv_blocks=64)
    with AsyncLLM(args) as llm:
        yield llm
        llm.engine.block_manager.check()
        assert not llm.engine.has_unfinished_requests()


@pytest.fixture(scope="module")
def server(async_llm: AsyncLLM) -> Iterator[Running]:
    with running(build_app(async_llm, served_model_name="demo")) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[OpenAI]:
    with openai_client(server) as one:
        yield one


def ask(server: Running, path: str, body: Any) -> Any:
    answer = server.ask("POST", path, body)
    assert answer.status == 200, answer.body
    return answer.json


def refusal(server: Running, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    answer = server.ask("POST", path, body)
    assert answer.status == status, answer.body
    return answer.error


def test_embeddings(client: OpenAI, expected: dict[Any, list[float]]) -> None:
    """The client asks for base64 if nobody says what."""
    for form in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        found = client.embeddings.create(model="demo", input=TEXTS, **form)
        assert [each.index for each in found.data] == [0, 1, 2]
        for text, each in zip(TEXTS, found.data, strict=True):
            vector = each.embedding
            if isinstance(vector, str):
                vector = struct.unpack("<128f", base64.b64decode(vector))
            assert vector == pytest.approx(expected[text, None], abs=1e-5)
        assert found.usage.prompt_tokens == found.usage.total_tokens == sum(NUM_TOKENS)
        assert found.model == "demo"


def test_inputs(server: Running, client: OpenAI, expected: dict[Any, list[float]]) -> None:
    """A text, texts, token ids, lists of token ids."""
    ids = [ask(server, "/tokenize", {"prompt": text})["tokens"] for text in TEXTS]
    for asked, texts in ((TEXTS[0], TEXTS[:1]), (ids[0], TEXTS[:1]), (ids, TEXTS)):
        found = client.embeddings.create(model="demo", input=asked)
        for text, each in zip(texts, found.data, strict=True):
            assert each.embedding == pytest.approx(expected[text, None], abs=1e-5)


def test_dimensions(client: OpenAI, expected: dict[Any, list[float]]) -> None:
    found = client.embeddings.create(model="demo", input=TEXTS, dimensions=16)
    for text, each in zip(TEXTS, found.data, strict=True):
        assert each.embedding == pytest.approx(expected[text, 16], abs=1e-5)
    with pytest.raises(openai.BadRequestError, match="allowed: 1 to 128") as caught:
        client.embeddings.create(model="demo", input=TEXTS, dimensions=129)
    assert caught.value.param == "dimensions"


def test_not_normalised(server: Running) -> None:
    one = ask(server, E, {"input": "A dog"})["data"][0]["embedding"]
    raw = ask(server, E, {"input": "A dog", "use_activation": False})["data"][0]["embedding"]
    length = sum(x * x for x in raw) ** 0.5
    assert length != pytest.approx(1)
    assert [x / length for x in raw] == pytest.approx(one, abs=1e-5)


def test_scores(server: Running, expected: dict[Any, list[float]]) -> None:
    vectors = [expected[text, None] for text in TEXTS]
    cosines = [sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors]
    for names in (("queries", "documents"), ("text_1", "text_2"), ("queries", "items")):
        answer = ask(server, S, dict(zip(names, (TEXTS[0], TEXTS), strict=True)))
        TypeAdapter(responses.ScoreResponse).validate_python(answer)
        assert [each["score"] for each in answer["data"]] == pytest.approx(cosines, abs=1e-5)
        assert answer["usage"]["prompt_tokens"] == NUM_TOKENS[0] + sum(NUM_TOKENS)  # the query once
    answer = ask(server, "/score", {"data_1": TEXTS, "data_2": TEXTS})
    assert [each["score"] for each in answer["data"]] == pytest.approx([1, 1, 1])


def test_the_page_is_told_that_it_has_no_chat_to_offer(server: Running) -> None:
    found = server.ask("GET", "/engine").json
    assert found["makes_vectors"] is True
    assert {"num_scheduled_tokens", "num_generation_tokens"} <= set(found)


def test_the_answer_has_the_form_that_the_schema_says(server: Running) -> None:
    answer = ask(server, E, {"input": TEXTS, "request_id": "mine"})
    TypeAdapter(responses.EmbeddingResponse).validate_python(answer)
    assert answer["id"] == "embd-mine"
    schema = server.ask("GET", "/openapi.json").json
    for path in (E, S):
        assert "200" in schema["paths"][path]["post"]["responses"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (E, {}, "there is no input"),
        (E, {"input": ""}, "there is no input"),
        (E, {"input": []}, "0 prompts; allowed: 1 to 2048"),
        (E, {"input": ["A dog", 5]}, "input|token"),
        (E, {"input": [[1], "A dog"], "model": "demo", "encoding_format": "bytes"}, "'base64'"),
        (E, {"input": [10**6]}, "token id 1000000 is out of range"),
        (E, {"input": {"a": 1}}, "input must be a text or a list"),
        (E, {"messages": []}, "messages are not read here"),
        (E, {"input": "A dog", "normalize": True}, "use_activation"),
        (E, {"input": "A dog", "truncate_prompt_tokens": 5}, "never cut; send the part"),
        (E, {"input": "A dog", "dimension": 8}, "Did you mean 'dimensions'"),
        (E, {"input": "A dog", "dimensions": "8"}, "dimensions"),
        (E, {"input": "the " * 2100}, "which is more than|no more than"),
        (S, {}, "the request has no texts; allowed: queries and documents"),
        (S, {"queries": "A dog"}, "allowed: queries and documents"),
        (S, {"queries": "A dog", "text_2": "A cat"}, "allowed: queries and documents"),
        (S, {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "make no pairs"),
        (S, {"queries": "a", "documents": "b", "instruction": "x"}, "write it before the text"),
        ("/v1/completions", {"prompt": "A dog"}, "makes vectors and writes no text"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Hi"}]},
            "makes vectors and writes no text",
        ),
    ],
)
def test_what_is_refused(server: Running, path: str, body: Any, message: str) -> None:
    found = refusal(server, path, body)["message"]
    assert any(each in found for each in message.split("|")), found


def test_an_error_of_the_engine(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = PoolingModelRunner.pool

    def fail(self: Any, inputs: Any, hidden: Any) -> Any:
        if (inputs.arrays.input_ids == 9).any():
            raise ZeroDivisionError("nine")
        return pool(self, inputs, hidden)

    monkeypatch.setattr(PoolingModelRunner, "pool", fail)
    error = refusal(server, E, {"input": [[5], [9]]}, 500)
    assert error["message"] == "the request failed: ZeroDivisionError: nine"
    assert ask(server, E, {"input": [[5], [6]]})["usage"]["total_tokens"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "valid"),
    [(E, {"input": "A dog"}), (S, {"queries": "A dog", "documents": ["A cat", "The sea"]})],
)
def test_no_request_is_a_500(async_llm: AsyncLLM, path: str, valid: dict[str, Any]) -> None:
    """Any body that fits the schema, also with a few of its fields in a valid request."""
    schemathesis = pytest.importorskip("schemathesis")
    app = build_app(async_llm, host="testserver")  # schemathesis asks by this name
    schema = schemathesis.openapi.from_asgi("/openapi.json", app)

    @settings(max_examples=200, suppress_health_check=list(HealthCheck))
    @given(schema[path]["POST"].as_strategy(), st.data())
    def check(case: Any, data: st.DataObject) -> None:
        bodies = [case.body]
        if isinstance(case.body, dict) and case.body:
            names = data.draw(st.sets(st.sampled_from(sorted(case.body)), max_size=3))
            bodies.append({**valid, **{name: case.body[name] for name in names - {"model"}}})
        for case.body in bodies:
            response = case.call()
            assert response.status_code < 500, response.text
            if response.status_code == 200:
                assert response.json()["data"]

    check()


def test_metrics_count_them(server: Running) -> None:
    def read() -> float:
        text = server.ask("GET", "/metrics").body.decode()
        lines = [line for line in text.splitlines() if 'finished_reason="stop"' in line]
        return float(lines[0].split()[-1])

    before = read()
    ask(server, E, {"input": TEXTS})
    assert read() == before + 3


def test_a_server_whose_model_writes_text() -> None:
    with AsyncLLM(EngineArgs(num_kv_blocks=16)) as llm, running(build_app(llm)) as server:
        for path, body in ((E, {"input": "A dog"}), (S, {"queries": "a", "documents": "b"})):
            message = refusal(server, path, body)["message"]
            assert f"{path} is for pooling models" in message
            assert "--runner pooling" in message


def test_a_server_without_the_chapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """extras/pooling can be deleted: only what needs it is refused."""
    block = "import sys; sys.modules['nanoserve.extras.pooling'] = None"
    code = f"{block}; from nanoserve.extras.server import build_app"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    with AsyncLLM(EngineArgs(num_kv_blocks=16)) as llm, running(build_app(llm)) as server:
        monkeypatch.setitem(sys.modules, "nanoserve.extras.pooling.offline", None)
        for path, body in ((E, {"input": "A dog"}), ("/score", {"queries": "a", "documents": "b"})):
            message = refusal(server, path, body)["message"]
            assert f"{path} needs nanoserve/extras/pooling, and it is not there" in message


@pytest.mark.slow
def test_the_command() -> None:
    with Command("--runner", "pooling", "--num-kv-blocks", "64") as server:
        until(lambda: any("/v1/embeddings" in line for line in server.lines))
        [one] = ask(server, E, {"input": "A dog"})["data"]
        assert len(one["embedding"]) == 128
