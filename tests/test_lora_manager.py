"""Which adapter has which slot, and who waits: the control plane over the fake model.

The fake model's tokens depend on the adapter whose weights were brought into the slot of a
sequence (fake_executor.py). So a wrong slot, a missing load or a block of another adapter gives a
wrong token.
"""

from __future__ import annotations

import os
import random
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from adapters import write_adapter
from engines import VOCAB_SIZE, finish, make_engine, params, step
from fakes import reference_output
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nanoserve import LLMEngine
from nanoserve.fault_isolation import hold
from nanoserve.tools.why_waiting import why_waiting

lora = pytest.importorskip("nanoserve.extras.lora")
manager = pytest.importorskip("nanoserve.extras.lora.manager")

LoRARequest = lora.LoRARequest
SHAPES = {"model.layers.0.self_attn.q_proj": (8, 8)}
NUM_ADAPTERS = 5


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: Any) -> Path:
    """Of adapters 1 to 5: the fake model's adapter n has the scale n."""
    folder: Path = tmp_path_factory.mktemp("adapters")
    for number in range(1, NUM_ADAPTERS + 1):
        path = folder / str(number)
        write_adapter(path, SHAPES, rank=1, alpha=number, targets=["q_proj"], layers_to_transform=0)
    return folder


def make_loras(folder: Path) -> list[Any]:
    """None, then the requests of adapters 1 to 5."""
    numbers = range(1, NUM_ADAPTERS + 1)
    return [None, *(LoRARequest(f"adapter {n}", n, folder / str(n)) for n in numbers)]


def make(folder: Path, **options: Any) -> LLMEngine:
    return make_engine(enable_lora=True, **options)


def expect(prompt: list[int], adapter: int, max_tokens: int = 10) -> list[int]:
    return reference_output(prompt, max_tokens, (), 5, 0, VOCAB_SIZE, adapter)


class Loading:
    """Weights are read when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pending: dict[str, tuple[Any, Future[Any]]] = {}

        def load(adapter: Any) -> Future[Any]:
            future: Future[Any] = Future()
            self.pending[adapter.request.lora_name] = adapter, future
            return future

        monkeypatch.setattr(manager.Adapter, "load", load)

    def finish(self, name: str) -> None:
        adapter, future = self.pending.pop(name)
        try:
            future.set_result(adapter.files.load())
        except ValueError as error:
            future.set_exception(error)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read at once, so that steps do not depend on threads."""
    monkeypatch.setattr(manager.Adapter, "load", load_at_once)


def load_at_once(adapter: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(adapter.files.load())
    return future


def running(engine: LLMEngine) -> list[str]:
    return [seq.request_id for seq in engine.scheduler.running]


def check_slots(engine: LLMEngine) -> None:
    """The invariants of LoRAManager."""
    loras, scheduler = engine.lora_manager, engine.scheduler
    slots = [adapter.slot for adapter in loras.slots]
    assert len(set(slots)) == len(slots) <= loras.max_loras
    assert set(slots) <= set(range(loras.max_loras))
    assert len(loras.loaded) <= loras.max_cpu_loras
    assert loras.loaded.keys() >= loras.slots.keys()
    for seq in [*scheduler.running, *scheduler.swapped]:
        if seq.lora is not None:
            assert seq.lora in loras.slots
            assert loras.sent[seq.lora.slot] is seq.lora


# -- any workload --


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    max_loras = draw(st.integers(1, 3))
    return {
        "max_loras": max_loras,
        "max_cpu_loras": draw(st.none() | st.integers(max_loras, 5)),
        "num_kv_blocks": draw(st.integers(12, 30)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.integers(6, 30)),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap"])),
        "num_cpu_blocks": draw(st.integers(1, 20)),
        "async_scheduling": draw(st.booleans()),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "enable_prefix_caching": draw(st.booleans()),
    }


@settings(
    max_examples=30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(options=options(), seed=st.integers(0, 10**6), num_requests=st.integers(1, 14))
def test_every_request_ends_with_the_tokens_of_its_adapter(
    folder: Path, at_once: None, options: dict[str, Any], seed: int, num_requests: int
) -> None:
    """Whoever comes when, is aborted, is preempted, forks, or is in a step that fails."""
    rng, loras = random.Random(seed), make_loras(folder)
    engine = make(folder, **options)
    prompts = [[rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.randrange(1, 24))] for _ in "abc"]
    waiting = list(range(num_requests))
    asked: dict[str, tuple[list[int], int]] = {}
    last: dict[str, Any] = {}
    fails_at = rng.randrange(40)  # one failure: nobody is found guilty of it
    for number in range(1500):
        while waiting and rng.random() < 0.5:
            name, prompt = str(waiting.pop()), rng.choice(prompts)
            adapter = rng.choice([0, 0, *range(1, NUM_ADAPTERS + 1)])
            asked[name] = prompt, adapter
            priority = rng.randrange(3) if options["scheduling_policy"] == "priority" else 0
            engine.add_request(
                name, prompt, params(), lora_request=loras[adapter], priority=priority
            )
        if rng.random() < 0.03 and asked:
            name = rng.choice(list(asked))
            if engine.abort_request(name):
                del asked[name]
        engine.executor.fail_next_step = number == fails_at
        last |= {output.request_id: output for output in step(engine)}
        check_slots(engine)
        if not waiting and not engine.has_unfinished_requests():
            break
    engine.executor.fail_next_step = False
    last |= finish(engine)
    for name, (prompt, adapter) in asked.items():
        assert last[name].outputs[0].token_ids == expect(prompt, adapter), (name, adapter)
        assert (last[name].lora_request or loras[0]) == loras[adapter]
    event(f"{len(asked)} requests")


@pytest.mark.parametrize("max_loras", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_busy_adapters_keep_nobody_waiting_for_ever(
    folder: Path, at_once: None, max_loras: int, policy: str
) -> None:
    """Two adapters have new requests in every step. The third one gets its turn when what ran
    before it has ended."""
    loras = make_loras(folder)
    engine = make(folder, max_loras=max_loras, scheduling_policy=policy, num_kv_blocks=200)
    number = 0
    for round_ in range(60):
        for adapter in (1, 2):
            number += 1
            fields = params(max_tokens=5)
            engine.add_request(
                f"{adapter}-{number}", [number % 40], fields, lora_request=loras[adapter]
            )
        if round_ == 5:
            engine.add_request("late", [1, 2, 3], params(), lora_request=loras[3])
        if any(output.request_id == "late" and output.finished for output in step(engine)):
            break
    assert round_ < 59, "it has waited for 55 steps"
    finish(engine)


# -- one slot, two adapters --


def test_others_run_while_an_adapter_waits_for_a_slot(folder: Path, at_once: None) -> None:
    """Requests without an adapter, and with one that has a slot; but not those that would keep the
    waiting one from its turn."""
    loras = make_loras(folder)
    engine = make(folder, max_loras=1)
    engine.add_request("a1", [1], params(max_tokens=4), lora_request=loras[1])
    step(engine)
    engine.add_request("b1", [2], params(), lora_request=loras[2])
    engine.add_request("a2", [3], params(), lora_request=loras[1])
    engine.add_request("none", [4], params(max_tokens=3))
    step(engine)
    assert running(engine) == ["a1", "none"]
    [b1] = [seq for seq in engine.scheduler.waiting if seq.request_id == "b1"]
    reason = why_waiting(engine.scheduler, b1.seq_id)
    assert reason == "its adapter 'adapter 2' waits for a slot, or to be loaded"
    while "a1" in running(engine):
        step(engine)
    step(engine)
    assert "b1" in running(engine)
    assert "a2" not in running(engine)
    last = finish(engine)
    assert last["b1"].outputs[0].token_ids == expect([2], 2)
    assert last["a2"].outputs[0].token_ids == expect([3], 1)


def test_who_is_held_wants_no_slot(folder: Path, at_once: None) -> None:
    """While the cause of a failed step is looked for, some wait, whatever is free."""
    loras = make_loras(folder)
    engine = make(folder, max_loras=1)
    for number in (1, 2):
        engine.add_request(f"{number}", [number], params(), lora_request=loras[number])
    hold(engine.scheduler, [seq.seq_id for seq in engine.scheduler.waiting][1:])
    step(engine)
    assert running(engine) == ["2"]
    hold(engine.scheduler, None)
    finish(engine)


def test_the_slot_that_was_held_longest_is_drained(folder: Path, at_once: None) -> None:
    """Requests of the other adapter go on coming in."""
    loras = make_loras(folder)
    engine = make(folder, max_loras=2)
    for number in (1, 2):
        engine.add_request(f"{number}", [number], params(max_tokens=30), lora_request=loras[number])
        step(engine)
    for number in (3, 1, 2):
        engine.add_request(f"new {number}", [9], params(), lora_request=loras[number])
    step(engine)
    assert running(engine) == ["1", "2", "new 2"]
    finish(engine)


def test_an_idle_adapter_stays_until_its_slot_is_wanted(folder: Path, at_once: None) -> None:
    """Of two idle ones the least recently used leaves."""
    loras = make_loras(folder)
    engine = make(folder, max_loras=2, max_cpu_loras=3)
    loads: list[str] = []
    engine.step_listeners.append(
        lambda report: loads.extend(
            str(round(weights[next(iter(weights))].scaling))
            for _, weights in report.scheduler_output.loras_to_load
        )
    )
    for number in (1, 2, 1, 2, 2, 3, 2, 1, 3):
        engine.add_request("a", [1], params(max_tokens=2), lora_request=loras[number])
        finish(engine)
    assert loads == ["1", "2", "3", "1", "3"]
    assert len(engine.lora_manager.loaded) == 3


def test_weights_stay_in_memory_until_there_is_no_room(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one slot and room for two: of those without a slot, the one used least recently goes."""
    reads: list[int] = []

    def load(adapter: Any) -> Future[Any]:
        reads.append(adapter.request.lora_int_id)
        return load_at_once(adapter)

    monkeypatch.setattr(manager.Adapter, "load", load)
    loras = make_loras(folder)
    engine = make(folder, max_loras=1, max_cpu_loras=2)
    for number in (1, 2, 1, 3, 1, 2):
        engine.add_request("a", [1], params(max_tokens=2), lora_request=loras[number])
        finish(engine)
    assert reads == [1, 2, 3, 2]


@pytest.mark.parametrize("is_drained", [True, False])
def test_a_swapped_sequence_keeps_its_slot(folder: Path, at_once: None, is_drained: bool) -> None:
    """It comes back before the slot goes to another one, who may have waited before the swap."""
    loras = make_loras(folder)
    engine = make(folder, max_loras=1, num_kv_blocks=8, preemption_mode="swap")
    asked = {"1": ([1] * 6, 1, 20), "2": ([2] * 6, 1, 20), "b": ([3], 2, 10)}

    def add(name: str) -> None:
        prompt, adapter, max_tokens = asked[name]
        fields = params(max_tokens=max_tokens)
        engine.add_request(name, prompt, fields, lora_request=loras[adapter])

    add("1")
    add("2")
    for _ in range(100):
        step(engine)
        if is_drained and not engine.is_unfinished("b"):
            add("b")
        if engine.scheduler.swapped:
            break
    assert engine.scheduler.swapped
    if not is_drained:
        add("b")
    last = finish(engine)
    for name, (prompt, adapter, max_tokens) in asked.items():
        assert last[name].outputs[0].token_ids == expect(prompt, adapter, max_tokens)


# -- weights on their way --


def test_nobody_else_waits_while_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, loras = Loading(monkeypatch), make_loras(folder)
    engine = make(folder, max_loras=2)
    engine.add_request("a", [1], params(), lora_request=loras[1])
    engine.add_request("b", [2], params(), lora_request=loras[2])
    engine.add_request("none", [3], params(max_tokens=2))
    for _ in range(3):
        step(engine)
    assert not running(engine)  # the last one has ended
    loading.finish("adapter 2")
    step(engine)
    assert running(engine) == ["b"]
    loading.finish("adapter 1")
    last = finish(engine)
    assert last["a"].outputs[0].token_ids == expect([1], 1)
    assert last["b"].outputs[0].token_ids == expect([2], 2)
    assert not loading.pending


def test_weights_that_cannot_be_read_end_their_requests(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has changed since it was checked. Other requests go on, and the next one that wants
    the adapter tries again."""
    loading, loras = Loading(monkeypatch), make_loras(folder)
    write_adapter(tmp_path, SHAPES, rank=1, targets=["q_proj"], layers_to_transform=0)
    bad = LoRARequest("bad", 9, tmp_path)
    engine = make(folder, max_loras=1)
    file = tmp_path / "adapter_model.safetensors"
    before = os.stat(file)
    engine.add_request("a", [1], params(n=2, temperature=1.0), lora_request=bad)
    engine.add_request("b", [2], params(), lora_request=loras[1])
    engine.add_request("none", [3], params())
    step(engine)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    loading.finish("bad")
    for _ in range(4):
        if outputs := [output for output in step(engine) if output.request_id == "a"]:
            break
    assert [each.finish_reason for each in outputs[0].outputs] == ["error", "error"]
    assert "has changed since it was checked" in str(outputs[0].outputs[0].stop_reason)
    loading.finish("adapter 1")
    last = finish(engine)
    assert last["b"].outputs[0].token_ids == expect([2], 1)
    assert last["none"].outputs[0].token_ids == expect([3], 0)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    engine.add_request("again", [1], params(), lora_request=bad)
    step(engine)
    loading.finish("bad")
    assert finish(engine)["again"].outputs[0].token_ids == expect([1], 8)


def test_a_thread_reads_them(folder: Path) -> None:
    loras = make_loras(folder)
    engine = make(folder, max_loras=2)
    for number in (1, 2, 3):
        engine.add_request(f"{number}", [1], params(), lora_request=loras[number])
    last = finish(engine)
    for number in (1, 2, 3):
        assert last[f"{number}"].outputs[0].token_ids == expect([1], number)


def test_a_number_may_get_another_adapter_when_the_first_is_removed(
    folder: Path, at_once: None
) -> None:
    """And none of the first one's blocks. The request that has the first one goes on with it."""
    loras = make_loras(folder)
    engine = make(folder, max_loras=2)
    prompt = list(range(12))
    engine.add_request("first", prompt, params(), lora_request=loras[1])
    step(engine)
    assert engine.lora_manager.remove_lora(1)
    second = LoRARequest("another", 1, folder / "2")
    engine.add_request("second", prompt, params(), lora_request=second)
    last = finish(engine)
    assert last["first"].outputs[0].token_ids == expect(prompt, 1)
    assert last["second"].outputs[0].token_ids == expect(prompt, 2)
    assert last["second"].num_cached_tokens == 0
