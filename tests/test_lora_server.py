"""Adapters as models of the HTTP server."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("nanoserve.extras.lora")

from adapters import shapes_of, write_adapter
from servers import Running, running

from nanoserve import LLM, AsyncLLM, EngineArgs, LoRARequest, SamplingParams
from nanoserve.extras.server import build_app
from nanoserve.extras.server.adapters import SETTING, LoadLoRAAdapterRequest, ServedAdapters
from nanoserve.extras.server.options import FrontendArgs

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79]
BODY = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
COMPLETIONS, LOAD, UNLOAD = "/v1/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("qwen2")


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: Any) -> Path:
    """The server's --lora-folder, with one adapter and two links; beside it another adapter."""
    parent = tmp_path_factory.mktemp("served")
    shapes = shapes_of(checkpoint)
    write_adapter(parent / "folder" / "one", shapes, seed=1)
    write_adapter(parent / "folder" / "broken", {})
    write_adapter(parent / "outside", shapes, seed=2)
    os.symlink(parent / "outside", parent / "folder" / "link")
    return parent / "folder"


@pytest.fixture(scope="module")
def tokens(checkpoint: Path, folder: Path) -> dict[str, list[int]]:
    """What LLM says, by model."""
    params = SamplingParams(temperature=0, max_tokens=8)
    loras = [
        None,
        LoRARequest("a", 1, folder.parent / "outside"),
        LoRARequest("b", 2, folder / "one"),
    ]
    with LLM(checkpoint, enable_lora=True, num_kv_blocks=32) as llm:
        outputs = llm.generate([PROMPT] * 3, params, lora_request=loras, use_tqdm=False)
    return dict(
        zip(("base", "static", "one"), [each.outputs[0].token_ids for each in outputs], strict=True)
    )


@pytest.fixture(scope="module")
def server(checkpoint: Path, folder: Path) -> Iterator[Running]:
    modules = f"static={folder.parent / 'outside'}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTING, "1")
        with AsyncLLM(EngineArgs(str(checkpoint), enable_lora=True, num_kv_blocks=64)) as llm:
            options = {"lora_modules": modules, "lora_folder": str(folder)}
            with running(build_app(llm, served_model_name="base", **options)) as one:
                yield one


def ask(server: Running, model: str | None) -> list[int]:
    answer = server.ask("POST", COMPLETIONS, {**BODY, "model": model})
    assert answer.status == 200, answer.body
    assert answer.json["model"] == model
    token_ids: list[int] = answer.json["choices"][0]["token_ids"]
    return token_ids


def test_an_adapter_is_a_model(server: Running, tokens: dict[str, list[int]]) -> None:
    assert len({tuple(each) for each in tokens.values()}) == 3
    for model in ("base", "static"):
        assert ask(server, model) == tokens[model]
    cards = {card["id"]: card for card in server.ask("GET", "/v1/models").json["data"]}
    assert list(cards) == ["base", "static"]
    assert cards["static"]["parent"] == "base" and cards["base"]["parent"] is None
    assert cards["static"]["root"].endswith("outside")
    assert server.ask("GET", "/v1/models/static").json == cards["static"]


def test_streams_and_beams_have_adapters(server: Running, tokens: dict[str, list[int]]) -> None:
    answer = server.ask("POST", COMPLETIONS, {**BODY, "model": "static", "stream": True})
    events = [line for line in answer.body.decode().split("\n\n") if "choices" in line]
    assert all('"model":"static"' in event.replace(" ", "") for event in events)
    beams = {"use_beam_search": True, "n": 2}
    found = [
        server.ask("POST", COMPLETIONS, {**BODY, **beams, "model": model}).json["choices"]
        for model in ("base", "static")
    ]
    assert found[0][0]["token_ids"] != found[1][0]["token_ids"]


def test_load_and_unload(server: Running, tokens: dict[str, list[int]]) -> None:
    """A name that was unloaded is not known any more, and may be given again."""
    for _ in range(2):
        answer = server.ask("POST", LOAD, {"lora_name": "new", "lora_path": "one"})
        assert answer.body == b"Success: LoRA adapter 'new' added successfully."
        assert ask(server, "new") == tokens["one"]
        twice = server.ask("POST", LOAD, {"lora_name": "new", "lora_path": "one"})
        assert twice.status == 400 and twice.error["param"] == "lora_name"
        answer = server.ask("POST", UNLOAD, {"lora_name": "new"})
        assert answer.body == b"Success: LoRA adapter 'new' removed successfully."
        assert server.ask("POST", UNLOAD, {"lora_name": "new"}).error["code"] == 404
        gone = server.ask("POST", COMPLETIONS, {**BODY, "model": "new"})
        assert gone.error["code"] == 404 and "base, static" in gone.error["message"]


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "../outside",
        "link",
        "none",
        "one/adapter_config.json",
        "/",
        "a\0b",
        "x" * 9999,
        "one/../../outside",
        "../folder-2",
    ],
)
def test_only_what_is_in_the_folder_is_read(server: Running, path: str) -> None:
    """Also not by a link. What is outside and what is not there are answered alike."""
    answer = server.ask("POST", LOAD, {"lora_name": "x", "lora_path": path})
    assert answer.status == 400
    assert answer.error["param"] == "lora_path"
    assert "allowed: the path of a folder in the server's --lora-folder" in answer.error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": 5, "lora_path": "one"}, "lora_name"),
        ({"lora_name": "", "lora_path": "one"}, "lora_name is ''"),
        ({"lora_name": "x" * 5000, "lora_path": "one"}, "lora_name"),
        ({"lora_name": "base", "lora_path": "one"}, "there is a model 'base' already"),
        ({"lora_name": "x", "lora_path": "broken"}, "without tensors"),
        ({"lora_name": "x", "lora_path": "one", "load_inplace": True}, "load_inplace"),
    ],
)
def test_what_cannot_be_loaded_is_a_400(server: Running, body: Any, message: str) -> None:
    answer = server.ask("POST", LOAD, body)
    assert answer.status == 400
    assert message in answer.error["message"]
    assert len(server.ask("GET", "/v1/models").json["data"]) == 2


class KnownAdapters:
    """What ServedAdapters needs of an engine: the numbers that it knows."""

    config = SimpleNamespace(enable_lora=True)
    engine = SimpleNamespace(lora_manager=None)

    def __init__(self) -> None:
        self.known: set[int] = set()

    async def add_lora(self, request: LoRARequest) -> None:
        self.known.add(request.lora_int_id)
        await asyncio.sleep(0)

    async def remove_lora(self, number: int) -> None:
        self.known.remove(number)

    async def list_loras(self) -> set[int]:
        return set(self.known)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ServedAdapters, set[int]]:
    """Without a server, beside the numbers that the engine knows."""
    monkeypatch.setenv(SETTING, "1")
    (tmp_path / "poet").mkdir()
    args: Any = SimpleNamespace(lora_folder=str(tmp_path), lora_modules=())
    engine: Any = KnownAdapters()
    return ServedAdapters(engine, args, ["base"]), engine.known


POET = LoadLoRAAdapterRequest(lora_name="poet", lora_path="poet")


def test_of_two_clients_one_gets_the_name(served: tuple[ServedAdapters, set[int]]) -> None:
    """Both adapters are checked at the same time; the engine forgets the later one."""
    adapters, known = served

    async def both() -> list[Any]:
        return await asyncio.gather(
            adapters.load(POET), adapters.load(POET), return_exceptions=True
        )

    first, second = asyncio.run(both())
    assert first is None and "there is a model 'poet' already" in str(second)
    assert known == {adapters.requests["poet"].lora_int_id}


def test_an_adapter_that_came_back_is_forgotten(served: tuple[ServedAdapters, set[int]]) -> None:
    """A request has found it by its name; it is unloaded; then the request asks the engine for it,
    which knows it again. With the next one that goes, it goes."""
    adapters, known = served

    async def load_and_unload() -> None:
        await adapters.load(POET)
        late = adapters.requests["poet"]
        await adapters.unload("poet")
        assert not known
        await adapters.async_llm.add_lora(late)

    async def run() -> None:
        for _ in range(3):
            await load_and_unload()
        assert len(known) == 1
        await adapters.load(POET)
        await adapters.unload("poet")
        assert not known

    asyncio.run(run())


def test_without_the_chapter_of_adapters_a_server_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is imported by every server."""
    monkeypatch.setitem(sys.modules, "nanoserve.extras.lora", None)
    name = "nanoserve.extras.server.adapters"
    monkeypatch.setattr(name, sys.modules[name])  # as it was, afterwards
    monkeypatch.delitem(sys.modules, name)
    module = import_module(name)
    engine: Any = KnownAdapters()
    args: Any = SimpleNamespace(lora_folder=None, lora_modules=())
    assert module.ServedAdapters(engine, args, ["base"]).requests == {}


def test_without_the_setting_there_are_no_such_endpoints(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor without a folder, nor with an engine that takes no adapters."""
    engines = [EngineArgs(str(checkpoint), enable_lora=on, num_kv_blocks=8) for on in (True, False)]
    with AsyncLLM(engines[0]) as llm, AsyncLLM(engines[1]) as other:
        in_folder = {"lora_folder": str(folder)}
        for one, value, options, expected in (
            (llm, "1", in_folder, {LOAD, UNLOAD}),
            (llm, "0", in_folder, set()),
            (llm, "1", {}, set()),
            (other, "1", in_folder, set()),
        ):
            monkeypatch.setenv(SETTING, value)
            paths = build_app(one, **options).openapi()["paths"]
            assert paths.keys() & {LOAD, UNLOAD} == expected
        with pytest.raises(ValueError, match="enable_lora=True"):
            build_app(other, lora_modules=f"a={folder / 'one'}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_modules": "pirate"}, "NAME=PATH"),
        ({"lora_modules": "=path"}, "NAME=PATH"),
        ({"lora_modules": '{"name": "a"}'}, "NAME=PATH"),
        ({"lora_modules": "{oops"}, "NAME=PATH"),
        ({"lora_modules": ("a=b", '{"name": "a", "path": "c"}')}, "a name twice: a, a"),
        ({"lora_folder": "/no/such/folder"}, "there is no such folder"),
        ({"uds": ""}, "uds is an empty string"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FrontendArgs(**options)
