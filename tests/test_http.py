"""The HTTP server: OpenAI's client and bare sockets get what LLM computes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from nanoserve import LLM, LoRARequest, SamplingParams
from nanoserve.entrypoints.async_llm import AsyncLLM
from nanoserve.entrypoints.server.api_server import SETTING, build_app
from nanoserve.entrypoints.server.launcher import Server, make_llm
from nanoserve.entrypoints.server.tool_parser import ToolParser

ROOT = Path(__file__).parent.parent
PIRATE = str(ROOT / "nanoserve/demo/lora")
SIZES: dict[str, Any] = {"num_gpu_blocks_override": 256, "max_num_seqs": 16, "enable_lora": True}
LONG = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True}


@contextmanager
def running(llm: AsyncLLM, **options: Any) -> Iterator[httpx.Client]:
    """A server in a thread, and a client of it."""
    config = uvicorn.Config(build_app(llm, **options), lifespan="off", log_level="error")
    server, sock = Server(config, llm.shutdown), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        address = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with httpx.Client(base_url=address, timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def async_llm() -> AsyncLLM:
    return make_llm(dict(SIZES), max_num_queued_reqs=40)


@pytest.fixture(scope="module")
def client(async_llm: AsyncLLM) -> Iterator[httpx.Client]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTING, "1")
        with running(async_llm, adapters={"pirate": PIRATE}) as client:
            yield client


@pytest.fixture(scope="module")
def openai(client: httpx.Client) -> OpenAI:
    return OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """What a server computes, without one."""
    with LLM(**SIZES) as llm:
        yield llm


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.002)


def is_idle(async_llm: AsyncLLM) -> bool:
    engine = async_llm.engine
    blocks = engine.block_manager.pool.ref_counts
    return not (engine.requests or engine.scheduler.sequences or any(blocks))


def read_events(client: httpx.Client, path: str, body: Any) -> list[Any]:
    """The events of a stream, without [DONE], which must be the last."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        texts = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert texts.pop() == "[DONE]"
    return [json.loads(text) for text in texts]


# -- the same tokens --

CHAT = [{"role": "user", "content": "What is 17 + 25?"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
AGE = {"type": "object", "properties": {"name": {"enum": ["Mia", "Ben"]}}, "required": ["name"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "age", "schema": AGE}}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": "Once", "temperature": 0},
    "recommended": {"prompt": "Once", "seed": 1},
    "n": {"prompt": "One", "n": 3, "seed": 2},
    "token ids": {"prompt": [5, 6, 7], "temperature": 0},
    "two prompts": {"prompt": ["Once", "One"], "n": 2, "seed": 3},
    "top": {"prompt": "A", "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 4, "temperature": 1.2},
    "penalties": {"prompt": "A", "temperature": 0, "repetition_penalty": 1.2,
                  "presence_penalty": 0.5, "frequency_penalty": 0.1},
    "banned": {"prompt": "A", "temperature": 0, "logit_bias": {300: 5.0}, "bad_words": ["the"]},
    "stop": {"prompt": "Once", "temperature": 0, "stop": " girl", "min_tokens": 3,
             "include_stop_str_in_output": True},
    "goes on": {"prompt": "Once", "temperature": 0, "ignore_eos": True, "stop_token_ids": [369]},
    "allowed": {"prompt": "Once", "temperature": 0, "allowed_token_ids": [300, 301, 302]},
    "choice": {"prompt": "Yes?", "seed": 1, "structured_outputs": {"choice": ["yes", "no"]}},
    "adapter": {"prompt": "Once", "temperature": 0, "model": "pirate"},
    "chat": {"messages": CHAT, "temperature": 0},
    "parts": {"messages": PARTS, "seed": 1},
    "schema": {"messages": CHAT, "seed": 1, "response_format": FORMAT},
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_tokens_are_those_of_llm(name: str, client: httpx.Client, llm: LLM) -> None:
    """In one answer, and streamed."""
    body = {**BODIES[name], "max_tokens": 16, "return_token_ids": True}
    asked = {key: body[key] for key in body if key in SamplingParams.__dataclass_fields__}
    if "response_format" in body:
        asked["structured_outputs"] = {"json": AGE}
    params = replace(llm.get_default_sampling_params(), **asked)
    path, ask, of = "/v1/completions", llm.generate, body.get("prompt")
    if "messages" in body:
        path, ask, of = "/v1/chat/completions", llm.chat, body["messages"]  # type: ignore
    adapter = LoRARequest("pirate", 1, PIRATE) if "model" in body else None
    found = ask(of, params, use_tqdm=False, lora_request=adapter)
    completions = [each for output in found for each in output.outputs]
    expected = [(each.token_ids, each.text, each.finish_reason) for each in completions]
    answer = client.post(path, json=body).json()
    assert join([answer]) == expected
    assert join(read_events(client, path, body)) == expected
    usage = answer["usage"]
    assert usage["completion_tokens"] == sum(len(ids) for ids, _, _ in expected)
    assert usage["prompt_tokens"] == sum(len(output.prompt_token_ids) for output in found)


def join(events: list[Any]) -> list[Any]:
    """(token ids, text, finish reason) of each choice."""
    choices: dict[int, list[Any]] = {}
    for choice in [choice for event in events for choice in event["choices"]]:
        known = choices.setdefault(choice["index"], [[], "", None])
        assert known[2] is None, "a choice goes on after its end"
        text = {**choice, **choice.get("delta", {}), **choice.get("message", {})}
        new = text.get("text") or text.get("content") or ""
        known[:] = [known[0] + choice["token_ids"], known[1] + new, choice["finish_reason"]]
    return [tuple(choices[index]) for index in sorted(choices)]


def test_logprobs_of_a_completion(openai: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2)
    [output] = llm.generate("Once upon", params, use_tqdm=False)
    named = [*output.prompt_logprobs, *output.outputs[0].logprobs]
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    ask = {"model": "demo", "prompt": "Once upon", "temperature": 0, "max_tokens": 3}
    choice = openai.completions.create(**ask, logprobs=2, echo=True).choices[0]
    found, own = choice.logprobs, [at and at[i].logprob for i, at in zip(ids, named, strict=True)]
    assert choice.text == "Once upon" + output.outputs[0].text == "".join(found.tokens)
    assert found.token_logprobs[0] is own[0] is None
    assert found.token_logprobs[1:] == pytest.approx(own[1:])
    assert choice.text[found.text_offset[-1] :] == found.tokens[-1]
    assert [top and len(top) for top in found.top_logprobs] == [at and len(at) for at in named]
    only = openai.completions.create(**{**ask, "max_tokens": 0}, logprobs=2, echo=True)
    assert only.choices[0].logprobs.tokens == found.tokens[:2]
    assert only.usage.completion_tokens == 0
    more: Any = openai.completions.create(**ask, extra_body={"prompt_logprobs": 2}).choices[0]
    assert [at and {*map(int, at)} for at in more.prompt_logprobs] == [
        at and {*at} for at in output.prompt_logprobs
    ]


def test_logprobs_of_a_chat(openai: OpenAI) -> None:
    ask: Any = {"model": "demo", "messages": CHAT, "temperature": 0, "max_tokens": 4}
    ask |= {"logprobs": True, "top_logprobs": 3}
    choice = openai.chat.completions.create(**ask).choices[0]
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    for each in choice.logprobs.content:
        assert bytes(each.bytes).decode() == each.token == each.top_logprobs[0].token
        assert len(each.top_logprobs) == 3
    stream = openai.chat.completions.create(**ask, stream=True)
    found = [each for chunk in stream for each in chunk.choices[0].logprobs.content]
    assert found == choice.logprobs.content


def test_usage_of_a_stream(openai: OpenAI) -> None:
    ask: Any = {"model": "demo", "prompt": "Once", "max_tokens": 4, "stream": True}
    *chunks, last = openai.completions.create(**ask, stream_options={"include_usage": True})
    assert (last.choices, last.usage.completion_tokens) == ([], 4)
    assert all(chunk.usage is None for chunk in chunks)


def test_texts_and_tokens(client: httpx.Client, llm: LLM) -> None:
    """In a conversation, a call's arguments are JSON text in the API, a dict in the template."""
    ids = llm.get_tokenizer().encode("Once upon")
    found = client.post("/tokenize", json={"prompt": "Once upon", "return_token_strs": True}).json()
    assert (found["tokens"], found["count"], len(found["token_strs"])) == (ids, 2, 2)
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "Once upon"}
    call = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
    tokens = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert '"arguments": {"city": "Oslo"}' in llm.get_tokenizer().decode(tokens)


# -- tools --

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": {**CITY, "additionalProperties": False}}
TOOLS: Any = [{"type": "function", "function": WEATHER}]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_be_is_one(choice: Any, openai: OpenAI) -> None:
    ask: Any = {"model": "demo", "messages": CHAT, "tools": TOOLS, "tool_choice": choice, "seed": 5}
    ask["parallel_tool_calls"] = False
    answer = openai.chat.completions.create(**ask).choices[0]
    [call] = answer.message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    assert (call.function.name, answer.message.content) == ("weather", None)
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")
    chunks = list(openai.chat.completions.create(**ask, stream=True))
    deltas = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
    assert [each.function.model_dump() for each in deltas] == [call.function.model_dump()]
    assert chunks[-1].choices[0].finish_reason == answer.finish_reason


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_the_model_may_answer(choice: Any, openai: OpenAI) -> None:
    ask: Any = {"model": "demo", "messages": CHAT, "tools": TOOLS, "tool_choice": choice}
    message = openai.chat.completions.create(**ask, temperature=0).choices[0].message
    assert message.content
    assert not message.tool_calls


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "</b>"}}\n</tool_call>'
PIECES = ["a < b", " ", "<tool_call>", "<tool", CALL, CALL, "\n", "</tool_call>", "x"]


@given(st.lists(st.sampled_from(PIECES), max_size=6).map("".join), st.data())
def test_a_text_in_pieces_is_the_text(text: str, data: st.DataObject) -> None:
    """However a stream is cut, content and calls are those of the whole text."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parser, whole = ToolParser(True), ToolParser(True).read(text, True)
    found = [
        parser.read(text[start:end], number == len(cuts))
        for number, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(text)], strict=True))
    ]
    assert "".join(each.get("content", "") for each in found) == whole.get("content", "")
    calls = [call["function"] for each in found for call in each.get("tool_calls", ())]
    assert calls == [call["function"] for call in whole.get("tool_calls", ())]
    assert len(calls) <= text.count(CALL)


# -- errors, and clients that leave --

C, K, LOAD = "/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter"
SAID = [{"role": "user", "content": [{"type": "image_url"}]}]
MISTAKES: dict[str, list[Any]] = {  # path -> bodies
    C: [
        b"{", b"[]", {}, {"prompt": ""}, {"prompt": []}, {"prompt": {"a": 1}},
        {"prompt": [10**6]}, {"prompt": "x" * 9000}, {"prompt": ["x", [10**6]]},
        {"prompt": "x", "temprature": 0}, {"prompt": "x", "temperature": -1},
        {"prompt": "x", "temperature": "hot"}, {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "n": 0}, {"prompt": "x", "logprobs": 1000}, {"prompt": "x", "stop": [1]},
        {"prompt": "x", "structured_outputs": {"regex": "("}},
        {"prompt": "x", "structured_outputs": {"reggex": "a"}},
        {"prompt": "x", "response_format": {"type": "xml"}},
        {"prompt": "x", "stream": True, "prompt_logprobs": 1},
    ],
    K: [
        {"messages": []}, {"messages": [{"content": "x"}]}, {"messages": ["x"]},
        {"messages": SAID}, {"messages": CHAT, "tools": [{"name": "f"}]},
        {"messages": CHAT, "tool_choice": "required"},
        {"messages": CHAT, "tools": TOOLS, "tool_choice": {"function": {"name": "g"}}},
        {"messages": CHAT, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
    ],
    LOAD: [{"lora_name": "x", "lora_path": "/nowhere"}, {"lora_name": "demo", "lora_path": PIRATE}],
    "/v1/embeddings": [{"input": "x"}], "/tokenize": [{}], "/detokenize": [{"tokens": [10**6]}],
}  # fmt: skip
MISSING = [(C, {"prompt": "x", "model": "gpt-5"}), ("/v1/unload_lora_adapter", {"lora_name": "no"})]
ALL = [(path, body, 400) for path, bodies in MISTAKES.items() for body in bodies]


@pytest.mark.parametrize(("path", "body", "status"), [*ALL, *((*each, 404) for each in MISSING)])
def test_mistakes_are_told(
    path: str, body: Any, status: int, client: httpx.Client, async_llm: AsyncLLM
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client.post(path, content=data, headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status), error
    assert error["message"]
    assert error["type"].endswith("Error")
    until(lambda: is_idle(async_llm))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", ["Once", ["Once", "One"]])
def test_a_client_that_leaves_ends_its_requests(
    stream: bool, prompt: Any, client: httpx.Client, async_llm: AsyncLLM
) -> None:
    body = json.dumps({**LONG, "prompt": prompt, "n": 2, "stream": stream})
    head = f"Host: a\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((client.base_url.host, client.base_url.port)) as sock:
        sock.sendall(f"POST {C} HTTP/1.1\r\n{head}{body}".encode())
        until(lambda: async_llm.engine.scheduler.running)
        if stream:
            sock.recv(100)
    until(lambda: is_idle(async_llm))


def test_a_full_queue_is_a_503(client: httpx.Client, async_llm: AsyncLLM) -> None:
    response = client.post(C, json={**LONG, "prompt": ["a", "b"], "n": 30})
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    until(lambda: is_idle(async_llm))


def test_an_engine_that_dies_is_told_in_the_stream() -> None:
    llm = make_llm({"num_gpu_blocks_override": 64}, 10)

    def die() -> Any:
        raise MemoryError("no more")

    with running(llm) as client, client.stream("POST", C, json={**LONG, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        llm.engine.scheduler.schedule = die
        *_, error, done = [line[6:] for line in lines if line]
        assert (json.loads(error)["error"]["code"], done) == (503, "[DONE]")
        assert client.get("/health").status_code == 503


# -- the other endpoints --


def test_adapters_are_models(client: httpx.Client, openai: OpenAI) -> None:
    ask: Any = {"prompt": "Once", "temperature": 0, "max_tokens": 12}
    assert client.post(LOAD, json={"lora_name": "twin", "lora_path": PIRATE}).status_code == 200
    names = {each.id for each in openai.models.list()}
    assert names == {"demo", "pirate", "twin"}
    texts = {name: openai.completions.create(model=name, **ask).choices[0].text for name in names}
    assert texts["pirate"] == texts["twin"] != texts["demo"]
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "twin"}).status_code == 200
    assert client.post(C, json={**ask, "model": "twin"}).status_code == 404
    assert openai.models.retrieve("pirate").id == "pirate"


def test_a_key_guards_all_but_the_probes(async_llm: AsyncLLM) -> None:
    app = build_app(async_llm, api_keys=["one", "two"], allowed_origins=["http://page"])
    client = TestClient(app)
    for path in ("/health", "/version", "/metrics", "/"):
        assert client.get(path).status_code == 200
    assert "vllm:generation_tokens_total" in client.get("/metrics").text
    for headers in ({}, {"Authorization": "Bearer three"}, {"Authorization": "one two"}):
        assert client.post(C, json=LONG, headers=headers).status_code == 401
        for path in ("/v1/models", "/engine"):
            assert client.get(path, headers=headers).status_code == 401
    good = {"Authorization": "Bearer two", "Origin": "http://page"}
    answer = client.get("/v1/models", headers=good)
    assert answer.headers["access-control-allow-origin"] == "http://page"


def test_the_page_sees_the_engine(client: httpx.Client, async_llm: AsyncLLM) -> None:
    assert "<canvas" in client.get("/").text
    with client.stream("GET", "/engine", headers={"Accept": "text/event-stream"}) as response:
        states = (json.loads(line[6:]) for line in response.iter_lines() if line)
        next(states)
        client.post(C, json={"prompt": "Once upon a time", "max_tokens": 30, "ignore_eos": True})
        state = next(state for state in states if state["num_steps"] >= 30)
    items = [item for step in state["steps"] for item in step["items"]]
    assert 0 < sum(item[1] for item in items) <= state["num_scheduled_tokens"]
    assert len(state["held"]) == state["num_blocks"] == 256
    assert "Once" not in json.dumps(state)
    until(lambda: not async_llm.engine.scheduler.num_watchers)


def test_vectors_are_those_of_embed() -> None:
    texts = ["Once upon a time", "A dog", "A cat"]
    options: Any = {"runner": "pooling", "num_gpu_blocks_override": 64}
    with LLM(**options) as llm:
        expected = [
            pytest.approx(output.outputs.embedding, abs=1e-5) for output in llm.embed(texts)
        ]
        scores = [output.outputs.score for output in llm.score(texts[0], texts[1:])]
    with running(make_llm(options, 10)) as client:
        openai = OpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0)
        for form in ({}, {"encoding_format": "float"}):  # the client's own is base64
            found = openai.embeddings.create(model="demo", input=texts, **form)
            assert [each.embedding for each in found.data] == expected
        answer = client.post("/v1/score", json={"queries": texts[0], "documents": texts[1:]}).json()
        assert [each["score"] for each in answer["data"]] == pytest.approx(scores, abs=1e-5)
        assert client.post(C, json={"prompt": "x"}).status_code == 400
        [model] = client.get("/v1/models").json()["data"]
        assert model["max_model_len"] == 64 * 16  # what the KV cache holds


def test_ctrl_c_ends_the_process() -> None:
    """With a stream that would take long."""
    words = [sys.executable, "-m", "nanoserve", "serve", "--port", "0", "--block-size", "32"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_API_KEY": "secret"}
    process = subprocess.Popen(words, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stderr if "is served at" in line)
        url = next(word for word in line.split() if word.startswith("http://127.0.0.1:"))
        assert httpx.get(f"{url}/v1/models").status_code == 401
        key = {"Authorization": "Bearer secret"}
        with httpx.stream("POST", url + C, json={**LONG, "stream": True}, headers=key) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert process.wait(60) == 130
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
