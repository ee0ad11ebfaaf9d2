"""One engine computes a prompt, and another one goes on: the same tokens, and nothing of the prompt
is computed twice. Whoever dies, every request ends with the tokens that one engine gives."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from adapters import shapes_of, write_adapter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import ThreadExecutor

from nanoserve import LLM, RequestOutput, SamplingParams
from nanoserve.config import DEMO_MODEL

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no Unix sockets")
peer = pytest.importorskip("nanoserve.extras.kv_offload.peer")
transport = pytest.importorskip("nanoserve.extras.kv_offload.transport")
base = pytest.importorskip("nanoserve.extras.kv_offload.base")

ROOT = Path(__file__).parent.parent
WAIT = 60.0  # seconds, for what happens at once
PORTS = count(5001)
SEEDS = count(1)
BLOCK = 4  # tokens
LENGTH = 50
CACHED = 48  # of a prompt of LENGTH tokens: its whole blocks


class Pair(NamedTuple):
    producer: LLM
    consumer: LLM


def transfer(role: str, folder: Path, port: int = 5710, **options: Any) -> dict[str, Any]:
    """A kv_transfer_config."""
    tier = {"type": "p2p", "port": port, "socket_dir": str(folder), **options}
    extra = {"cpu_bytes_to_use": 2**23, "secondary_tiers": [tier]}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def make_llm(role: str, folder: Path, port: int, tier: Any = None, **options: Any) -> LLM:
    config = transfer(role, folder, port, **(tier or {}))
    options = {"num_kv_blocks": 64, "block_size": BLOCK, **options}
    return LLM(kv_transfer_config=config, **options)


def connector_of(llm: LLM) -> Any:
    return llm.engine.scheduler.connector


def tier_of(llm: LLM) -> Any:
    [tier] = connector_of(llm).tiers.tiers
    return tier


@contextmanager
def pair(folder: Path, tier: Any = None, **options: Any) -> Iterator[Pair]:
    """Two engines; in the end nothing is lost, and nothing waits, in either."""
    port = next(PORTS)
    with (
        make_llm("kv_producer", folder, port, tier, **options) as producer,
        make_llm("kv_consumer", folder, port, tier, **options) as consumer,
    ):
        yield Pair(producer, consumer)
        assert_idle(producer)
        assert_idle(consumer)


def assert_idle(llm: LLM) -> None:
    """No row is held and none is on its way; the records agree."""
    connector = connector_of(llm)
    until(lambda: connector.poll() or not connector.tiers.jobs)
    connector.check()
    llm.engine.block_manager.check()
    tier = tier_of(llm)
    assert not (tier.held._held or tier._finishing or tier._asking or tier._offered)
    assert not (tier._offers or connector.tiers.promotions)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.001)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("p2p")


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[Pair]:
    with pair(folder) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """One engine that does it all."""
    with LLM(num_kv_blocks=64, block_size=BLOCK, enable_prefix_caching=False) as llm:
        yield llm


def new_prompt(length: int = LENGTH) -> list[int]:
    """A prompt that no test had before."""
    seed = next(SEEDS)
    return [seed % 100 + 5, seed // 100 + 5, *(5 + seed * i * i % 300 for i in range(2, length))]


def params(max_tokens: int, transfer: Any = None, **fields: Any) -> SamplingParams:
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    fields = {"temperature": 0, "ignore_eos": True, **fields}
    return SamplingParams(max_tokens=max_tokens, extra_args=extra, **fields)


def ask(llm: LLM, prompt: Any, sampling: SamplingParams, **options: Any) -> RequestOutput:
    [output] = llm.generate([prompt], sampling, use_tqdm=False, **options)
    return output


def prefill(llm: LLM, prompt: Any, name: str = "x", **options: Any) -> dict[str, Any]:
    """What the producer's answer says to the consumer."""
    short = params(1, {"remote_decoder": {"kv_request_id": name}})
    found = ask(llm, prompt, short, **options).kv_transfer_params
    assert found is not None
    return found


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [list(each.token_ids) for each in output.outputs]


def expect(alone: LLM, prompt: list[int]) -> list[list[int]]:
    return tokens_of(ask(alone, prompt, params(8)))


def assert_computed(alone: LLM, consumer: LLM, prompt: list[int], where: Any) -> None:
    """The consumer answers, although it gets nothing."""
    output = ask(consumer, prompt, params(8, where))
    assert tokens_of(output) == expect(alone, prompt)
    assert output.num_cached_tokens == 0


# -- the same tokens --


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"kv_cache_dtype": "int8"},
        {"tensor_parallel_size": 2, "executor_cls": ThreadExecutor},
    ],
    ids=str,
)
def test_another_engine_goes_on_with_the_prompt(
    folder: Path, alone: LLM, options: dict[str, Any]
) -> None:
    prompts = [new_prompt(), new_prompt(8), new_prompt(3)]
    with pair(folder, **options) as (producer, consumer):
        for number, prompt in enumerate(prompts):
            output = ask(consumer, prompt, params(8, prefill(producer, prompt, f"{number}")))
            assert output.num_cached_tokens == (len(prompt) - 1) // BLOCK * BLOCK
            if "kv_cache_dtype" in options:
                assert tokens_of(output) == tokens_of(ask(producer, prompt, params(8)))
            else:
                assert tokens_of(output) == expect(alone, prompt)
        assert tier_of(producer).port == prefill(producer, [9])["remote_prefiller"]["remote_port"]


def test_many_requests_at_once_some_of_them_with_a_common_beginning(
    engines: Pair, alone: LLM
) -> None:
    producer, consumer = engines
    stem = new_prompt(20)
    prompts = [stem + new_prompt(20 + i) for i in range(6)] + [new_prompt() for _ in range(6)]
    short = [params(1, {"remote_decoder": {"kv_request_id": f"{i // 2}"}}) for i in range(12)]
    held = producer.generate(prompts, short, use_tqdm=False)
    long = [params(8, each.kv_transfer_params) for each in held]
    outputs = consumer.generate(prompts, long, use_tqdm=False)
    assert [tokens_of(each) for each in outputs] == [expect(alone, each) for each in prompts]
    found = [each.num_cached_tokens or 0 for each in outputs]
    assert all(cached > 0 for cached in found)
    tier_of(producer).held.expire()  # two with one id: what was fetched of one is enough
    assert_idle(producer)


def test_completions_of_one_request_share_what_has_come(engines: Pair) -> None:
    producer, consumer = engines
    prompt = new_prompt()
    sampled = {"n": 3, "temperature": 1.0, "seed": 7}
    wanted = tokens_of(ask(producer, prompt, params(8, **sampled)))
    output = ask(consumer, prompt, params(8, prefill(producer, prompt), **sampled))
    assert tokens_of(output) == wanted
    assert output.num_cached_tokens == CACHED


def test_salts_and_adapters_have_blocks_of_their_own(folder: Path, tmp_path: Path) -> None:
    from nanoserve import LoRARequest

    shapes = shapes_of(Path(DEMO_MODEL))
    loras = [
        LoRARequest(f"a{i}", i + 1, str(write_adapter(tmp_path / f"a{i}", shapes, seed=i)))
        for i in range(2)
    ]
    prompt = new_prompt()
    salted: Any = {"prompt_token_ids": prompt, "cache_salt": "s"}
    with pair(folder, enable_lora=True) as (producer, consumer):
        for mine, lora, other, other_lora in (
            (salted, None, prompt, None),
            (prompt, loras[0], prompt, loras[1]),
            (prompt, loras[1], prompt, None),
        ):
            wanted = tokens_of(ask(producer, mine, params(8), lora_request=lora))
            where = prefill(producer, mine, lora_request=lora)
            output = ask(consumer, other, params(8, where), lora_request=other_lora)
            assert output.num_cached_tokens == 0
            output = ask(consumer, mine, params(8, where), lora_request=lora)
            assert output.num_cached_tokens == CACHED
            assert tokens_of(output) == wanted
            consumer.reset_prefix_cache(reset_connector=True)


# -- what the producer holds --


def test_the_producer_holds_what_was_not_asked_for_yet(folder: Path, alone: LLM) -> None:
    """Other prompts take no row of it. (Rows are only for requests that go elsewhere.)"""
    prompts = [new_prompt() for _ in range(4)]
    with pair(folder) as (producer, consumer):
        manager = connector_of(producer).manager
        ask(producer, prompts[0], params(1))
        assert not list(manager.policy.items())
        where = prefill(producer, prompts[1])
        rows = len(list(manager.policy.items()))
        assert rows == CACHED // BLOCK
        manager.free_rows = manager.free_rows[: rows // 2]  # there is little room now
        lost = prefill(producer, prompts[2], "lost")
        assert ask(consumer, prompts[1], params(8, where)).num_cached_tokens == CACHED
        output = ask(consumer, prompts[2], params(8, lost))
        assert output.num_cached_tokens == rows // 2 * BLOCK
        assert tokens_of(output) == expect(alone, prompts[2])
        manager.free_rows = [
            row
            for row in range(manager.num_blocks)
            if row not in {block.block_id for _, block in manager.policy.items()}
        ]


def test_the_producer_holds_nothing_for_ever(
    folder: Path, alone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no consumer comes; and if the consumer comes too late, it computes."""
    with pair(folder, {"unbound_store_timeout_s": 30}) as (producer, consumer):
        prompt, now = new_prompt(), 0.0
        monkeypatch.setattr(peer.time, "monotonic", lambda: now)
        where = prefill(producer, prompt)
        connector_of(producer).poll()
        assert tier_of(producer).held._held
        now = 31.0
        connector_of(producer).poll()
        assert not connector_of(producer).tiers.jobs
        assert_computed(alone, consumer, prompt, where)


def test_a_request_that_did_not_finish_holds_nothing(engines: Pair) -> None:
    producer = engines.producer
    engine, sampling = producer.engine, params(8, {"remote_decoder": {"kv_request_id": "x"}})
    engine.add_request("aborted", new_prompt(), sampling)
    engine.step()
    engine.step()
    engine.abort_request("aborted")
    assert not tier_of(producer).held._held
    assert_idle(producer)


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing(
    engines: Pair, folder: Path
) -> None:
    producer, consumer = engines
    prompt = new_prompt()
    where = prefill(producer, prompt)
    engine = consumer.engine
    for num_steps in range(4):
        engine.add_request("aborted", prompt, params(8, where))
        for _ in range(num_steps):
            engine.step()
        engine.abort_request("aborted")
    consumer.generate([new_prompt()], params(1), use_tqdm=False)
    assert_idle(consumer)
    tier_of(producer).held.expire()


# -- the other side dies, or is no engine --


class FakePeer:
    """Listens where a producer would, and answers each question with these bytes."""

    def __init__(self, folder: Path, answers: list[bytes], hangs: bool = False) -> None:
        self.port = next(PORTS)
        self.answers, self.hangs = answers, hangs
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.bind(str(folder / f"p2p-{self.port}.sock"))
        self.sock.listen()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        self.open: list[socket.socket] = []

    def _run(self) -> None:
        for answer in self.answers:
            connection, _ = self.sock.accept()
            connection.settimeout(WAIT)
            with suppress(OSError):  # it may have gone
                connection.recv(2**16)
                connection.sendall(answer)
            if self.hangs:
                self.open.append(connection)
            else:
                connection.close()

    def at(self, name: str = "x") -> dict[str, Any]:
        where = {"remote_host": "localhost", "remote_port": self.port}
        return {"remote_prefiller": {"kv_request_id": name, **where}}

    def close(self) -> None:
        for each in (self.sock, *self.open):
            each.close()


def question(llm: LLM, keys: list[bytes], name: bytes = b"x") -> bytes:
    identity = tier_of(llm)._transport.identity
    header = transport.QUESTION.pack(transport.MAGIC, len(identity), len(name), len(keys))
    return bytes(header + identity + name + b"".join(keys))


def converse(llm: LLM, sent: bytes, ends: bool = True) -> bytes:
    """What a producer answers to these bytes. ends: there will be no confirmation."""
    tier = tier_of(llm)
    received = b""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(WAIT)
        sock.connect(str(tier._path(tier.port)))
        try:
            sock.sendall(sent)
            sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(2**16):
                received += data
        except ConnectionError:
            pass  # it has not listened to all of it
    return received


@pytest.fixture(scope="module")
def genuine(engines: Pair) -> tuple[list[int], bytes, bytes]:
    """A prompt, and a producer's two answers about it."""
    prompt = new_prompt(16)
    prefill(engines.producer, prompt, "x")
    listing = converse(engines.producer, question(engines.producer, []))
    keys = [listing[-32 * i : len(listing) - 32 * (i - 1)] for i in (4, 3, 2, 1)]
    rows = converse(engines.producer, question(engines.producer, keys[:3]))
    assert len(rows) > 3 * tier_of(engines.producer)._transport.rows.shape[1]
    tier_of(engines.producer).held.expire()
    return prompt, listing, rows


@given(data=st.data())
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
def test_what_a_peer_sends_is_taken_only_if_it_is_whole(
    engines: Pair,
    alone: LLM,
    folder: Path,
    genuine: tuple[list[int], bytes, bytes],
    data: st.DataObject,
) -> None:
    """It ends at any byte (so does a process that is killed), or any byte is another one."""
    prompt, *answers = genuine
    consumer = engines.consumer
    which = data.draw(st.integers(0, 1), label="answer")
    end = st.integers(0, len(answers[which]) - 1)
    near = st.integers(0, min(len(answers[which]) - 1, 1200))
    place = data.draw(end | near, label="place")
    how = data.draw(st.sampled_from(["cut", "change", "garbage"]), label="how")
    bad = answers[which][:place]
    if how == "change":
        byte = answers[which][place] ^ data.draw(st.integers(1, 255), label="bits")
        bad += bytes([byte]) + answers[which][place + 1 :]
    elif how == "garbage":
        bad += data.draw(st.binary(max_size=200), label="garbage")
    answers[which] = bad
    fake = FakePeer(folder, answers)
    try:
        engine, outputs = consumer.engine, {}
        engine.add_request("0", prompt, params(8, fake.at()))
        engine.add_request("1", prompt[::-1], params(2))
        while engine.has_unfinished_requests():
            outputs |= {each.request_id: each for each in engine.step()}
        assert outputs["1"].outputs[0].finish_reason == "length"
        if outputs["0"].outputs[0].finish_reason == "error":  # its identity is another one
            assert which == 0
            assert "other keys and values" in str(outputs["0"].outputs[0].stop_reason)
        else:
            assert tokens_of(outputs["0"]) == expect(alone, prompt)
        assert_idle(consumer)
    finally:
        fake.close()
        consumer.reset_prefix_cache(reset_connector=True)


def test_a_peer_that_sends_a_row_twice_is_not_believed(
    engines: Pair, alone: LLM, folder: Path, genuine: tuple[list[int], bytes, bytes]
) -> None:
    prompt, listing, rows = genuine
    consumer, size = engines.consumer, tier_of(engines.consumer)._transport.rows.shape[1]
    one = rows[-3 * (8 + size) :][: 8 + size]
    fake = FakePeer(folder, [listing, rows[: -3 * (8 + size)] + 3 * one])
    try:
        output = ask(consumer, prompt, params(8, fake.at()))
        assert tokens_of(output) == expect(alone, prompt)
        assert_idle(consumer)
    finally:
        fake.close()
        consumer.reset_prefix_cache(reset_connector=True)


@given(data=st.data())
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
def test_whoever_asks_and_however_it_ends_the_producer_goes_on(
    engines: Pair, genuine: tuple[list[int], bytes, bytes], data: st.DataObject
) -> None:
    """Cut anywhere, changed anywhere; its rows stay until somebody has confirmed them."""
    producer, consumer = engines
    prompt = genuine[0]
    where = prefill(producer, prompt, "x")
    keys = list(tier_of(producer).held._held["x"][0].rows)
    sent = bytearray(question(producer, data.draw(st.sampled_from([[], keys]))))
    for _ in range(data.draw(st.integers(0, 3), label="changes")):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    converse(producer, bytes(sent[: data.draw(st.integers(0, len(sent)), label="end")]))
    output = ask(consumer, prompt, params(2, where))
    assert output.num_cached_tokens == 12
    assert_idle(producer)
    consumer.reset_prefix_cache(reset_connector=True)


def test_a_message_of_absurd_length_takes_no_memory(engines: Pair) -> None:
    for lengths in ((2**32 - 1, 1, 1), (1, 2**32 - 1, 1), (1, 1, 2**32 - 1)):
        header = struct.pack("<8sIII", transport.MAGIC, *lengths)
        assert converse(engines.producer, header + b"?" * 1000) == b""


def test_a_producer_that_is_gone_harms_nobody(engines: Pair, folder: Path, alone: LLM) -> None:
    """Before it is asked, its socket being there or not; also after a restart with other ids."""
    prompt = new_prompt()
    with make_llm("kv_producer", folder, port := next(PORTS)) as producer:
        where = prefill(producer, prompt)
        lock = folder / f"p2p-{port}.lock"
        assert lock.exists()
    assert not (folder / f"p2p-{port}.sock").exists()
    assert_computed(alone, engines.consumer, prompt, where)
    left = socket.socket(socket.AF_UNIX)  # what a process that was killed leaves behind
    left.bind(str(folder / f"p2p-{port}.sock"))
    left.close()
    assert_computed(alone, engines.consumer, new_prompt(), where)
    with make_llm("kv_producer", folder, port) as producer:
        assert_computed(alone, engines.consumer, new_prompt(), where)
        prompt = new_prompt()
        output = ask(engines.consumer, prompt, params(8, prefill(producer, prompt)))
        assert output.num_cached_tokens == CACHED
        assert_idle(producer)


@pytest.mark.parametrize("num_answers", [0, 1])
def test_a_producer_that_hangs_delays_its_requests_alone(
    engines: Pair,
    alone: LLM,
    folder: Path,
    genuine: tuple[list[int], bytes, bytes],
    num_answers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "PATIENCE", 0.3)
    monkeypatch.setattr(transport, "CHUNK", 1)
    monkeypatch.setattr(transport, "PAUSE", 0.0)
    prompt, listing, rows = genuine
    answers = [listing, rows[:-1]] if num_answers else [listing[:-1]]
    fake = FakePeer(folder, answers, hangs=True)
    try:
        engine, outputs, order = engines.consumer.engine, {}, []
        engine.add_request("waits", prompt, params(8, fake.at()))
        engine.add_request("runs", new_prompt(), params(8))
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output
                order += [output.request_id] if output.finished else []
        assert order == ["runs", "waits"]
        assert tokens_of(outputs["waits"]) == expect(alone, prompt)
        assert outputs["waits"].num_cached_tokens == num_answers * 8  # two rows were whole
        assert_idle(engines.consumer)
    finally:
        fake.close()
        engines.consumer.reset_prefix_cache(reset_connector=True)


def test_a_producer_that_hangs_is_left_alone_for_a_while(
    engines: Pair, alone: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requests after the first one do not wait for it; when it answers again, it is asked."""
    now = 0.0
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(transport, "PATIENCE", 0.3)
    fake = FakePeer(folder, [b""] * 9, hangs=True)
    try:
        for seconds, num_questions in ((0, 1), (transport.PAUSE - 1, 1), (transport.PAUSE, 2)):
            now = seconds
            for _ in range(3):
                assert_computed(alone, engines.consumer, new_prompt(), fake.at())
            assert len(fake.open) == num_questions
    finally:
        fake.close()
    now = 3 * transport.PAUSE
    (folder / f"p2p-{fake.port}.sock").unlink()
    with make_llm("kv_producer", folder, fake.port) as producer:
        for name in ("x", "y"):
            prompt = new_prompt()
            where = prefill(producer, prompt, name)
            assert ask(engines.consumer, prompt, params(8, where)).num_cached_tokens == CACHED
        assert_idle(producer)


def test_an_engine_may_be_closed_at_any_moment(folder: Path, alone: LLM) -> None:
    """While it holds rows, and while it waits for some."""
    port, prompt = next(PORTS), new_prompt()
    with make_llm("kv_producer", folder, port) as producer:
        prefill(producer, prompt)
        start = time.monotonic()
    fake = FakePeer(folder, [b"", b""], hangs=True)
    for num_steps in (0, 3):
        with make_llm("kv_consumer", folder, port) as consumer:
            consumer.engine.add_request("0", prompt, params(8, fake.at()))
            for _ in range(num_steps):
                consumer.engine.step()
    fake.close()
    assert time.monotonic() - start < transport.PATIENCE


# -- engines that do not fit together --


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 8}, "block_size is 4 there and 8 here"),
        ({"dtype": "bfloat16"}, "dtype is 'auto on cpu' there and 'bfloat16' here"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is 'auto' there and 'int8' here"),
        (
            {"tensor_parallel_size": 2, "executor_cls": ThreadExecutor},
            "tensor_parallel_size is 1 there and 2 here",
        ),
    ],
    ids=str,
)
def test_another_layout_is_an_error_of_the_request(
    engines: Pair, folder: Path, options: dict[str, Any], message: str
) -> None:
    prompt = new_prompt()
    where = prefill(engines.producer, prompt)
    with make_llm("kv_consumer", folder, 1, **options) as llm:
        llm.engine.add_request("0", prompt, params(8, where))
        llm.engine.add_request("1", prompt, params(2))
        outputs: dict[str, RequestOutput] = {}
        while llm.engine.has_unfinished_requests():
            outputs |= {each.request_id: each for each in llm.engine.step()}
        [failed], [other] = outputs["0"].outputs, outputs["1"].outputs
        assert (failed.finish_reason, other.finish_reason) == ("error", "length")
        assert message in str(failed.stop_reason)
        assert_idle(llm)
    tier_of(engines.producer).held.expire()


GOOD = {"kv_request_id": "x", "remote_host": "localhost", "remote_port": 5710}


@pytest.mark.parametrize(
    ("role", "given", "message"),
    [
        ("consumer", [], "must be a dict"),
        ("consumer", {"do_remote_prefill": True}, "allowed: remote_decoder or remote_prefiller"),
        ("consumer", {"remote_prefiller": {**GOOD, "remote_host": "10.0.0.1"}}, "same machine"),
        ("consumer", {"remote_prefiller": {**GOOD, "remote_port": 0}}, "remote_port is 0"),
        ("consumer", {"remote_prefiller": {**GOOD, "remote_port": "../x"}}, "must be an int"),
        ("consumer", {"remote_prefiller": {**GOOD, "kv_request_id": ""}}, "1 to 256 bytes"),
        ("consumer", {"remote_prefiller": {**GOOD, "kv_request_id": "é" * 129}}, "256 bytes"),
        ("consumer", {"remote_prefiller": {"kv_request_id": "x"}}, "must be a dict with"),
        ("consumer", {"remote_decoder": {"kv_request_id": "x"}}, "this engine is a kv_consumer"),
        ("producer", {"remote_prefiller": GOOD}, "this engine is a kv_producer"),
        ("producer", {"remote_decoder": "x"}, "must be a dict with kv_request_id"),
        ("alone", {"remote_decoder": {"kv_request_id": "x"}}, "does not share its KV cache"),
    ],
)
def test_bad_params_are_refused_at_the_door(
    engines: Pair, alone: LLM, role: str, given: Any, message: str
) -> None:
    llm = alone if role == "alone" else getattr(engines, role)
    with pytest.raises((TypeError, ValueError), match="kv_transfer_params.*" + message):
        ask(llm, [5, 6, 7], params(1, given))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "0.0.0.0"}, "host is '0.0.0.0'; allowed: localhost"),
        ({"port": 70000}, "port is 70000; allowed: 1 to 65535"),
        ({"port": True}, "port must be an int"),
        ({"unbound_store_timeout_s": 0}, "unbound_store_timeout_s is 0; allowed: more than 0"),
        ({"socket_dir": 3}, "socket_dir must be a folder"),
        ({"hosts": "x"}, "unknown key 'hosts'. Did you mean 'host'"),
        ({"backends": ["UCX"]}, "backends .* is .'UCX'., which is not here"),
    ],
)
def test_bad_options_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    num_threads = threading.active_count()
    with pytest.raises((TypeError, ValueError), match=message):
        make_tier(folder, **options)
    assert threading.active_count() == num_threads


def make_tier(folder: Path, role: str = "kv_both", **options: Any) -> Any:
    import numpy as np

    primary = base.PrimaryTier(np.zeros((2, 64), np.uint8), {"model": "m"}, role)
    options = {"socket_dir": folder, "port": next(PORTS), **options}
    return peer.P2PSecondaryTierManager(primary, **options)


def test_nobody_else_may_open_the_socket(folder: Path, tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "new")
    path = tier._path(tier.port)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with pytest.raises(ValueError, match=r"another engine listens at .* a port of its own"):
        make_tier(tmp_path / "new", port=tier.port)
    assert path.exists()
    tier.shutdown()
    assert not path.exists()
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    num_threads = threading.active_count()
    for name in ("open", "link"):
        for role in ("kv_both", "kv_consumer"):
            with pytest.raises(ValueError, match=r"not a folder that user .* alone may enter"):
                make_tier(tmp_path / name, role)
    assert threading.active_count() == num_threads
    with pytest.raises(ValueError, match=r"cannot be opened .*Give another socket_dir"):
        make_tier(tmp_path / ("long" * 30))


def test_a_tier_that_is_forgotten_ends_its_thread(folder: Path) -> None:
    tier = make_tier(folder)
    thread, path = tier._transport._thread, tier._path(tier.port)
    del tier
    thread.join(WAIT)
    assert not thread.is_alive()
    assert not path.exists()


# -- processes that are killed --


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Another process that runs lines of this module; its output is piped."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    lines = f"import sys\nfrom pathlib import Path\nfrom test_kv_transfer import *\n{code}"
    words = [sys.executable, "-c", lines, *arguments]
    return subprocess.Popen(
        words, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def kill_at(number: int) -> None:
    """Let this process be killed when it looks at its so-many-th row on the way."""
    crc32, calls = transport.zlib.crc32, count(1)

    def look(data: Any) -> int:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return int(crc32(data))

    transport.zlib = SimpleNamespace(crc32=look)


def be_producer(folder: Path, port: int, prompts: list[list[int]], number: int) -> None:
    """Compute prompts; say so; and be killed."""
    with make_llm("kv_producer", folder, port) as llm:
        where = [prefill(llm, prompt, f"{i}") for i, prompt in enumerate(prompts)]
        kill_at(number)
        print(json.dumps(where), flush=True)
        sys.stdin.read()  # until it is killed


def be_consumer(folder: Path, port: int, prompt: list[int], where: Any, number: int) -> None:
    """Ask for blocks, and be killed."""
    with make_llm("kv_consumer", folder, port) as llm:
        kill_at(number)
        ask(llm, prompt, params(8, where))


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 7, 12])
def test_the_producer_is_killed_while_it_sends(
    engines: Pair, alone: LLM, folder: Path, number: int
) -> None:
    """kill -9: what has come is used, the rest is computed; so is the next prompt."""
    prompts, port = [new_prompt(), new_prompt()], next(PORTS)
    child = start(f"be_producer(Path(sys.argv[1]), {port}, {prompts}, {number})", str(folder))
    try:
        assert child.stdout is not None
        where = json.loads(child.stdout.readline())
        output = ask(engines.consumer, prompts[0], params(8, where[0]))
        assert tokens_of(output) == expect(alone, prompts[0])
        assert (output.num_cached_tokens or 0) <= (number - 1) * BLOCK
        assert child.wait(WAIT) == -signal.SIGKILL
        assert_computed(alone, engines.consumer, prompts[1], where[1])
        assert_idle(engines.consumer)
    finally:
        child.kill()
        child.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 12])
def test_the_consumer_is_killed_while_it_reads(
    engines: Pair, alone: LLM, folder: Path, number: int
) -> None:
    """kill -9: the producer keeps the rows for whoever asks next."""
    producer, consumer = engines
    prompt = new_prompt()
    where = prefill(producer, prompt)
    code = f"be_consumer(Path(sys.argv[1]), 1, {prompt}, {where}, {number})"
    child = start(code, str(folder))
    try:
        assert child.wait(WAIT) == -signal.SIGKILL
    finally:
        child.kill()
        child.communicate()
    output = ask(consumer, prompt, params(8, where))
    assert output.num_cached_tokens == CACHED
    assert tokens_of(output) == expect(alone, prompt)
    assert_idle(producer)


@pytest.mark.slow
def test_ranks_that_are_processes(folder: Path, alone: LLM) -> None:
    """A row has the parts of all ranks as soon as the producer answers, though rank 1 may be
    behind."""
    with pair(folder, tensor_parallel_size=2) as (producer, consumer):
        for number in range(10):
            prompt = new_prompt()
            output = ask(consumer, prompt, params(8, prefill(producer, prompt, f"{number}")))
            assert output.num_cached_tokens == CACHED
            assert tokens_of(output) == expect(alone, prompt)
