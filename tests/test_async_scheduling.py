"""Overlapped steps: the control plane decides a step before it knows what the last one brought.

The real engine over the fake model. Its executor makes a step when it is launched, and gives its
tokens away only in result(), in order: a control plane that peeks, or skips one, fails in fakes.py.
What comes of it must be what the synchronous loop gives.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fakes import (
    FakeEngine,
    FakeExecutor,
    StepFailed,
    add_beam_search,
    make_sequence,
    reference_output,
)
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from test_engine import check_ctrl_c

from nanoserve import BeamSearchParams, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.block_manager import BlockHash
from nanoserve.config import EngineConfig
from nanoserve.sequence import RequestError, SchedulerOutput, SequenceStatus, SequenceUpdate

VOCAB_SIZE = 50
EOS = 49
MAX_MODEL_LEN = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of nothing but a config.json."""
    folder = tmp_path_factory.mktemp("fake")
    hf = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


MakeEngine = Callable[..., LLMEngine]


@pytest.fixture(scope="module")
def make_engine(folder: Path) -> MakeEngine:
    """make_engine(num_kv_blocks=8, ...) -> an engine of overlapped steps over the fake model."""

    def make(**options: Any) -> LLMEngine:
        executor_cls = options.pop("executor_cls", FakeExecutor)
        fields = {"num_kv_blocks": 64, "block_size": 4, "async_scheduling": True, **options}
        config = EngineConfig(model=str(folder), **fields)
        return LLMEngine(config, executor_cls=executor_cls)

    return make


def params(**fields: Any) -> SamplingParams:
    """Ten tokens whatever they are, seed 5."""
    return SamplingParams(**{"seed": 5, "max_tokens": 10, "ignore_eos": True, **fields})


def expect(
    prompt: list[int], max_tokens: int = 10, branch: int = 0, seed: int = 5, stop: Any = ()
) -> list[int]:
    return reference_output(prompt, max_tokens, stop, seed, branch, VOCAB_SIZE)


def step(engine: LLMEngine) -> list[RequestOutput]:
    """One step, and everything that must hold after it."""
    outputs = engine.step()
    check(engine)
    return outputs


def unread(engine: LLMEngine) -> list[Any]:
    """Launched steps that wait to be read; not what was abandoned, which the next launch tells."""
    return [] if engine.scheduler._is_restart else list(engine.executor.unread)


def check(engine: LLMEngine) -> None:
    """The books agree with each other, with what is in flight, and with what the cache holds."""
    scheduler, manager, executor = engine.scheduler, engine.block_manager, engine.executor
    manager.check()
    assert unread(engine) == [step.pending for step in engine._in_flight]
    assert len(engine._in_flight) <= 1
    promised = Counter(
        item.seq_id for step in engine._in_flight for item in step.scheduler_output.scheduled
    )
    for seq in scheduler.sequences.values():
        assert 0 <= seq.num_computed_tokens <= seq.num_tokens + seq.num_output_placeholders
        assert seq.num_output_placeholders <= promised[seq.seq_id] <= 1
        assert seq.num_output_tokens < seq.max_tokens
    for block_id, block_hash in enumerate(manager.pool.block_hashes):
        if block_hash is not None:
            size = manager.block_size
            held = executor.layers[0][block_id * size : (block_id + 1) * size]
            assert held == list(block_hash.token_ids), "findable, and holds something else"


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step to the end; each request's last output. Nothing is left anywhere."""
    last: dict[str, RequestOutput] = {}
    for _ in range(3000):
        if not engine.has_unfinished_requests():
            break
        last |= {output.request_id: output for output in step(engine)}
    assert_idle(engine)
    return last


def assert_idle(engine: LLMEngine) -> None:
    """Nothing to do, nothing to tell, nothing in flight, every block of both pools free."""
    assert not engine.has_unfinished_requests()
    assert not engine.output_processor.requests
    assert not engine._in_flight
    assert not unread(engine)
    assert engine.block_manager.num_free_blocks == engine.executor.num_kv_blocks
    assert engine.block_manager.cpu_pool.num_free_blocks == engine.executor.num_cpu_blocks


# -- the order of things --


def test_a_step_is_launched_before_the_last_one_is_read(make_engine: MakeEngine) -> None:
    """Three tokens: launch, launch, read, launch, read; the last has nothing to overlap with."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(max_tokens=3))
    finish(engine)
    assert engine.executor.calls == [
        ("launch", 0),
        ("launch", 1),
        ("result", 0),
        ("launch", 2),
        ("result", 1),
        ("result", 2),
    ]


def test_what_a_step_brings_is_told_one_step_later(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(max_tokens=3))
    told = [[c.token_ids for o in step(engine) for c in o.outputs] for _ in range(4)]
    tokens = expect([1, 2, 3], 3)
    assert told == [[], [tokens[:1]], [tokens[:2]], [tokens]]


def test_without_the_option_each_step_is_read_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(async_scheduling=False)
    engine.add_request("a", [1, 2, 3], params(max_tokens=2))
    while engine.has_unfinished_requests():
        engine.step()
    assert engine.executor.calls == [("launch", 0), ("result", 0), ("launch", 1), ("result", 1)]


@pytest.mark.parametrize(
    "awaiting",
    [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"logits_processors": [lambda output, logits: logits]},
    ],
)
def test_who_awaits_its_tokens_waits_alone(
    make_engine: MakeEngine, awaiting: dict[str, Any]
) -> None:
    """Its steps are read before the next is decided; when it has ended, the others overlap."""
    engine = make_engine()
    outputs: list[SchedulerOutput] = []
    engine.step_listeners.append(lambda report: outputs.append(report.scheduler_output))
    engine.add_request("plain", [1, 2, 3], params(max_tokens=8))
    engine.add_request("awaits", [4, 5], params(max_tokens=3, **awaiting))
    result = finish(engine)
    assert result["plain"].outputs[0].token_ids == expect([1, 2, 3], 8)
    assert result["awaits"].outputs[0].token_ids == expect([4, 5], 3)
    assert [output.needs_sync for output in outputs] == [True] * 3 + [False] * 5
    calls = engine.executor.calls
    for number, scheduler_output in enumerate(outputs[:-1]):
        is_read_first = calls.index(("result", number)) < calls.index(("launch", number + 1))
        assert is_read_first == scheduler_output.needs_sync


def test_a_prompt_that_is_not_computed_yet_awaits_nothing(make_engine: MakeEngine) -> None:
    """Chunks of it bring no token: only the last is awaited."""
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=4)
    awaited: list[bool] = []
    engine.step_listeners.append(lambda report: awaited.append(report.scheduler_output.needs_sync))
    engine.add_request("a", list(range(10)), params(max_tokens=2, presence_penalty=1.0))
    assert finish(engine)["a"].outputs[0].token_ids == expect(list(range(10)), 2)
    assert awaited == [False, False, True, True]


def test_forks_are_awaited_until_they_have_forked(make_engine: MakeEngine) -> None:
    """Then each branch goes on without waiting."""
    engine = make_engine()
    awaited: list[bool] = []
    engine.step_listeners.append(lambda report: awaited.append(report.scheduler_output.needs_sync))
    engine.add_request("a", [1, 2, 3, 4, 5], params(n=3, max_tokens=5))
    [output] = finish(engine).values()
    for branch, completion in enumerate(output.outputs):
        assert completion.token_ids == expect([1, 2, 3, 4, 5], 5, branch)
    assert awaited == [True, False, False, False, False]


def test_beams_await_every_token(make_engine: MakeEngine) -> None:
    """What runs next is made of them."""
    beams = []
    for is_async in (False, True):
        engine = make_engine(async_scheduling=is_async, num_kv_blocks=12)
        steps: list[SchedulerOutput] = []
        engine.step_listeners.append(lambda report, s=steps: s.append(report.scheduler_output))
        search = add_beam_search(engine, "beams", [1, 2, 3], BeamSearchParams(3, 5))
        engine.add_request("beside", [1, 2, 3], params())
        assert finish(engine)["beside"].outputs[0].token_ids == expect([1, 2, 3])
        beams.append(search.get_output())
        assert all(step.needs_sync for step in steps[:5])
    assert beams[0] == beams[1]


@pytest.mark.parametrize(
    ("fields", "awaits"),
    [
        ({}, False),
        ({"sampling_params": SamplingParams(min_tokens=3, logprobs=2, logit_bias={3: 1.0})}, False),
        ({"sampling_params": SamplingParams(allowed_token_ids=[3], temperature=0)}, False),
        ({"sampling_params": SamplingParams(repetition_penalty=0.9)}, True),
        ({"bad_word_ids": ((3,),)}, True),
        ({"always_sync": True}, True),
        ({"n": 2}, True),
    ],
)
def test_what_awaits_and_what_sits_out(fields: dict[str, Any], awaits: bool) -> None:
    """A sequence with a token in flight sits out if it awaits it, or if it may be its last."""
    seq = make_sequence(0, [1, 2, 3], max_tokens=2, **fields)
    assert seq.needs_sync == awaits
    assert not seq.blocked_by_in_flight
    assert seq.is_ready()
    seq.num_output_placeholders = 1
    assert seq.blocked_by_in_flight == awaits
    assert not seq.is_ready()
    seq.token_ids.append(9)
    assert seq.blocked_by_in_flight  # the one in flight is its second


# -- what it costs --


def num_computed(engine: LLMEngine) -> int:
    return sum(engine.executor.num_tokens.values())


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_an_end_that_is_known_costs_nothing(make_engine: MakeEngine, block_size: int) -> None:
    """max_tokens is counted, not seen: the tokens of the synchronous loop, and not one more."""
    computed = []
    for is_async in (False, True):
        engine = make_engine(async_scheduling=is_async, block_size=block_size, num_kv_blocks=128)
        for i in range(6):
            engine.add_request(str(i), [i, 1, 2, 3, 4], params(max_tokens=1 + i % 4))
        outputs = finish(engine) if is_async else run(engine)
        computed.append(num_computed(engine))
        for i in range(6):
            assert outputs[str(i)].outputs[0].token_ids == expect([i, 1, 2, 3, 4], 1 + i % 4)
    assert computed[0] == computed[1]


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step to the end, of any engine."""
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        engine.block_manager.check()
    return last


def stop_by_text(engine: LLMEngine) -> None:
    """Let a pair of tokens whose sum divides by 7 end a sequence, as a stop string would: the
    processor finds it, and the scheduler learns of it then."""
    append = engine.output_processor.append

    def stopping(update: SequenceUpdate) -> str | None:
        found = append(update)
        if update.new_token_ids and sum(update.sequence.output_token_ids[-2:]) % 7 == 0:
            return "pair"
        return found

    engine.output_processor.append = stopping  # type: ignore[method-assign]


@pytest.mark.parametrize("by_text", [False, True])
def test_an_end_that_is_a_surprise_costs_one_token(make_engine: MakeEngine, by_text: bool) -> None:
    """A stop token, or a stop string: the next position was being computed, and is dropped."""
    extra: dict[bool, dict[int, int]] = {}
    results: dict[bool, Any] = {}
    for is_async in (False, True):
        engine = make_engine(async_scheduling=is_async, enable_prefix_caching=False)
        if by_text:
            stop_by_text(engine)
        for i in range(12):
            stop = [] if by_text else list(range(25))
            engine.add_request(str(i), [i, 1, 2], params(stop_token_ids=stop, seed=i))
        outputs = finish(engine) if is_async else run(engine)
        results[is_async] = {
            name: (o.outputs[0].token_ids, o.outputs[0].finish_reason, o.outputs[0].stop_reason)
            for name, o in outputs.items()
        }
        extra[is_async] = engine.executor.num_tokens
    assert results[True] == results[False]
    reasons = {i: results[True][str(i)][1] for i in range(12)}
    assert Counter(reasons.values())["stop"] > 5
    for i, reason in reasons.items():
        could_go_on = reason == "stop" and len(results[True][str(i)][0]) < 10
        assert extra[True][i] - extra[False][i] == could_go_on


# -- blocks become findable when their tokens are known --


def findable(manager: Any) -> list[tuple[int, ...]]:
    """The texts that the prefix cache would find, each from its beginning."""

    def text(block_hash: BlockHash | None) -> tuple[int, ...]:
        if block_hash is None or block_hash.parent is None:
            return ()
        return (*text(block_hash.parent), *block_hash.token_ids)  # type: ignore[misc]

    return sorted(text(block_hash) for block_hash in manager.pool.cached_blocks)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_a_block_is_findable_when_its_last_token_is_known(block_size: int) -> None:
    """Launched with a token in flight as its last, it is not; with the next step, it is."""
    engine = FakeEngine(block_size=block_size)
    seq = engine.add([1, 2], max_tokens=12)
    scheduler = engine.scheduler
    pending = []
    for _ in range(11):
        scheduler_output = scheduler.schedule()
        computed = seq.num_computed_tokens
        known = min(computed, seq.num_tokens)
        whole = [tuple(seq.token_ids[:end]) for end in range(block_size, known + 1, block_size)]
        assert findable(engine.block_manager) == whole
        pending.append((scheduler_output, engine.executor.launch(scheduler_output)))
        if len(pending) == 2:
            launched, output = pending.pop(0)
            scheduler.update_from_output(launched, output.result())
        engine.block_manager.check()
    assert seq.output_token_ids == reference_output([1, 2], 10)


def test_a_request_finds_what_another_has_in_flight(make_engine: MakeEngine) -> None:
    """Prompts that share a beginning share its blocks, though the step that fills them has not
    been read; a stranger's salt shares nothing."""
    engine = make_engine()
    prompt = list(range(12))
    engine.add_request("a", [*prompt, 20], params())
    step(engine)
    engine.add_request("b", [*prompt, 21], params())
    engine.add_request("salted", [*prompt, 22], params(), cache_salt="other")
    outputs = finish(engine)
    assert [outputs[name].num_cached_tokens for name in ("a", "b", "salted")] == [0, 12, 0]
    for name, last in (("a", 20), ("b", 21), ("salted", 22)):
        assert outputs[name].outputs[0].token_ids == expect([*prompt, last])


# -- preemption with tokens in flight --


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_with_a_token_in_flight(mode: str) -> None:
    """It waits for it; its row is forgotten, and comes back with all that is known by then."""
    engine = FakeEngine(num_blocks=5, block_size=2, preemption_mode=mode, num_cpu_blocks=5)
    scheduler, executor = engine.scheduler, engine.executor
    first, second = engine.add([1, 2, 3], max_tokens=6), engine.add([7, 8, 9], max_tokens=4)
    one = scheduler.schedule()
    in_flight = executor.launch(one)
    assert (first.num_output_placeholders, second.num_output_placeholders) == (1, 1)
    two = scheduler.schedule()  # both write into their second blocks
    in_flight_2 = executor.launch(two)
    scheduler.update_from_output(one, in_flight.result())
    three = scheduler.schedule()  # the first needs a third block, the second, too: one is left
    assert [item.seq_id for item in three.scheduled] == [0]
    waits = SequenceStatus.SWAPPED if mode == "swap" else SequenceStatus.WAITING
    assert (second.status, second.num_output_placeholders) == (waits, 1)
    assert not second.is_ready()
    assert three.finished_seq_ids == (1,)
    assert bool(three.blocks_to_swap_out) == (mode == "swap")
    in_flight_3 = executor.launch(three)
    assert set(executor.rows) == {0}
    scheduler.update_from_output(two, in_flight_2.result())
    assert second.is_ready()
    assert second.output_token_ids == reference_output([7, 8, 9], 2)
    scheduler.update_from_output(three, in_flight_3.result())
    came_back = [new for step in engine.run() for new in step.new_sequences if new.seq_id == 1]
    assert [new.token_ids for new in came_back] == [(7, 8, 9, *reference_output([7, 8, 9], 2))]
    assert first.output_token_ids == reference_output([1, 2, 3], 6)
    assert second.output_token_ids == reference_output([7, 8, 9], 4)
    assert engine.block_manager.num_free_blocks == 5


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_and_then_it_turns_out_to_have_ended(mode: str) -> None:
    """The token in flight was its last: it ends where it waits."""
    tokens = reference_output([7, 8, 9], 2)
    engine = FakeEngine(num_blocks=5, block_size=2, preemption_mode=mode, num_cpu_blocks=5)
    scheduler, executor = engine.scheduler, engine.executor
    engine.add([1, 2, 3], max_tokens=6)
    second = engine.add([7, 8, 9], max_tokens=9, stop_token_ids=frozenset(tokens[1:]))
    pending = []
    for _ in range(3):
        scheduler_output = scheduler.schedule()
        pending.append((scheduler_output, executor.launch(scheduler_output)))
        if len(pending) == 2:
            launched, output = pending.pop(0)
            scheduler.update_from_output(launched, output.result())
    assert second.status is SequenceStatus.FINISHED_STOPPED
    assert second.output_token_ids == tokens
    assert second not in scheduler.waiting + scheduler.swapped
    engine.block_manager.check()


# -- what goes wrong --


@pytest.mark.parametrize("where", ["fail_next_step", "fail_next_result"])
@pytest.mark.parametrize("num_steps", range(7))
def test_a_failed_step_is_made_again(make_engine: MakeEngine, num_steps: int, where: str) -> None:
    """At its launch or when it is read: with all that was in flight, and the same tokens come."""
    engine = make_engine(preemption_mode="swap", num_kv_blocks=8)
    engine.add_request("a", [1, 2, 3, 4, 5], params(n=2))
    engine.add_request("b", [1, 2, 3, 4, 6], params(max_tokens=5))
    outputs = [output for _ in range(num_steps) for output in step(engine)]
    setattr(engine.executor, where, True)
    failures = 0
    for _ in range(2):  # the first step of all is read by the second call
        try:
            outputs += engine.step()
        except StepFailed:
            failures += 1
            assert not engine._in_flight
        engine.block_manager.check()
    assert failures == 1
    last = {output.request_id: output for output in outputs} | finish(engine)
    for branch in (0, 1):
        assert last["a"].outputs[branch].token_ids == expect([1, 2, 3, 4, 5], branch=branch)
    assert last["b"].outputs[0].token_ids == expect([1, 2, 3, 4, 6], 5)


def test_who_makes_a_result_fail_is_aborted(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is raised once, also if others are in flight behind it; they get their tokens."""
    engine = make_engine()
    engine.add_request("bad", [1, 2, 3], params())
    engine.add_request("good", [4, 5, 6], params())
    blame(engine, monkeypatch)
    step(engine)
    with pytest.raises(RequestError, match="no token is possible"):
        engine.step()
    assert not engine.is_unfinished("bad")
    [output] = finish(engine).values()
    assert output.outputs[0].token_ids == expect([4, 5, 6])


def test_nobody_hears_of_the_failure_of_a_request_that_is_gone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted while the step was in flight that cannot be sampled: the others go on."""
    engine = make_engine()
    engine.add_request("bad", [1, 2, 3], params())
    engine.add_request("good", [4, 5, 6], params())
    blame(engine, monkeypatch)
    step(engine)
    assert engine.abort_request("bad")
    [output] = finish(engine).values()
    assert output.outputs[0].token_ids == expect([4, 5, 6])


def blame(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any step with sequence 0 in it cannot be read."""
    launch, read = engine.executor.launch, engine.executor.read
    guilty: set[int] = set()

    def launch_and_note(scheduler_output: SchedulerOutput) -> Any:
        pending = launch(scheduler_output)
        if 0 in [item.seq_id for item in scheduler_output.scheduled]:
            guilty.add(pending.number)
        return pending

    def refuse(pending: Any, output: Any) -> Any:
        result = read(pending, output)
        if pending.number in guilty:
            raise RequestError(0, "no token is possible")
        return result

    monkeypatch.setattr(engine.executor, "launch", launch_and_note)
    monkeypatch.setattr(engine.executor, "read", refuse)


@pytest.mark.parametrize("line_number", range(1, 2600, 37))
def test_ctrl_c_at_any_line(make_engine: MakeEngine, line_number: int) -> None:
    """Wherever it hits, and no finished step is told of twice."""
    engine = make_engine(num_kv_blocks=7, preemption_mode="swap")
    told: list[SchedulerOutput] = []
    engine.step_listeners.append(lambda report: told.append(report.scheduler_output))
    check_ctrl_c(engine, line_number, finish)
    assert len({id(scheduler_output) for scheduler_output in told}) == len(told)


# -- abort, close, listeners --


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_abort_in_flight(make_engine: MakeEngine, num_steps: int) -> None:
    """Every block is free at once; the step in flight is read, and tells nothing."""
    engine = make_engine()
    engine.add_request("gone", list(range(9)), params())
    for _ in range(num_steps):
        step(engine)
    assert engine.abort_request("gone")
    assert engine.block_manager.num_free_blocks == 64
    assert engine.has_unfinished_requests()  # the step in flight
    assert engine.step() == []
    assert_idle(engine)
    engine.add_request("gone", [1], params())  # the name is free again
    assert finish(engine)["gone"].outputs[0].token_ids == expect([1])


def test_the_same_name_while_the_old_ones_step_is_in_flight(make_engine: MakeEngine) -> None:
    """A new request inherits nothing of the one it is called after."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params())
    step(engine)
    engine.abort_request("a")
    engine.add_request("a", [7, 8], params(max_tokens=4))
    assert finish(engine)["a"].outputs[0].token_ids == expect([7, 8], 4)


def test_close_in_flight(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params())
    step(engine)
    engine.close()
    engine.close()
    assert not engine.has_unfinished_requests()
    assert engine.block_manager.num_free_blocks == 64
    with pytest.raises(RuntimeError, match="closed"):
        engine.step()


def test_nothing_stays_in_flight_when_all_have_ended(make_engine: MakeEngine) -> None:
    """The step that was launched before the last one's end was known is read with it."""
    engine = make_engine()
    tokens = expect([1, 2, 3])
    engine.add_request("a", [1, 2, 3], params(stop_token_ids=[tokens[2]]))
    outputs = [output for _ in range(4) for output in engine.step()]
    assert outputs[-1].outputs[0].token_ids == tokens[:3]
    assert engine.executor.num_launched == 4
    assert_idle(engine)


def test_listeners_hear_of_each_step_once_and_in_order(make_engine: MakeEngine) -> None:
    """Whatever fails: a step that was committed before a later one failed is told of with the next
    call; one that was abandoned never."""
    engine = make_engine()
    told: list[tuple[SchedulerOutput, list[RequestOutput]]] = []
    engine.step_listeners.append(lambda *finished_step: told.append(finished_step))
    launched: list[SchedulerOutput] = []
    launch = engine.executor.launch

    def launch_and_note(scheduler_output: SchedulerOutput) -> Any:
        launched.append(scheduler_output)
        return launch(scheduler_output)

    engine.executor.launch = launch_and_note
    for name, penalty in (("a", 0.0), ("b", 0.0)):
        engine.add_request(name, [1, 2, 3], params(max_tokens=4, presence_penalty=penalty))
    step(engine)
    step(engine)
    assert told[0][0] is launched[0]
    engine.add_request("awaits", [4, 5], params(max_tokens=2, presence_penalty=1.0))
    original = engine.executor.read

    def second_fails(pending: Any, output: Any) -> Any:
        engine.executor.fail_next_result = pending.number == 2
        return original(pending, output)

    engine.executor.read = second_fails
    with pytest.raises(StepFailed):  # step 1 is read and committed, then step 2 fails
        engine.step()
    assert len(told) == 1
    outputs = {o.request_id: o for o in engine.step()}
    assert [told_of is step for (told_of, _), step in zip(told, launched, strict=False)][:2] == [
        True,
        True,
    ]
    outputs |= finish(engine)
    assert [step for step, _ in told] == [step for step in launched if step is not launched[2]]
    assert outputs["a"].outputs[0].token_ids == expect([1, 2, 3], 4)
    assert outputs["awaits"].outputs[0].token_ids == expect([4, 5], 2)


def test_a_listener_that_raises_costs_no_step(make_engine: MakeEngine) -> None:
    """Another listener hears of the following steps; outputs come with the next call."""
    engine = make_engine()
    seen: list[SchedulerOutput] = []

    def complain(scheduler_output: SchedulerOutput, _: Any) -> None:
        seen.append(scheduler_output)
        if len(seen) == 2:
            raise ValueError("no")

    engine.step_listeners.append(complain)
    engine.add_request("a", [1, 2, 3], params(max_tokens=4))
    outputs = step(engine) + step(engine)
    with pytest.raises(ValueError, match="no"):
        engine.step()
    outputs += [output for _ in range(5) for output in engine.step()]
    assert len(seen) == 4
    assert outputs[-1].outputs[0].token_ids == expect([1, 2, 3], 4)
    assert_idle(engine)


def test_a_failure_in_one_output_costs_that_request_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step, and the one in flight, are committed and told; nothing is computed again."""
    engine = make_engine()
    told: list[SchedulerOutput] = []
    engine.step_listeners.append(lambda report: told.append(report.scheduler_output))
    engine.add_request("bad", [1, 2, 3], params(max_tokens=4))
    engine.add_request("good", [4, 5, 6], params(max_tokens=4))
    append = engine.output_processor.append

    def faulty(update: SequenceUpdate) -> str | None:
        if update.sequence.request_id == "bad":
            raise ValueError("no text")
        return append(update)

    monkeypatch.setattr(engine.output_processor, "append", faulty)
    step(engine)
    with pytest.raises(ValueError, match="no text"):
        engine.step()
    assert len(told) == 1
    [output] = finish(engine).values()
    assert output.outputs[0].token_ids == expect([4, 5, 6], 4)
    assert engine.executor.num_tokens[1] == 3 + 3
    assert len(told) == engine.executor.num_launched == 4


def test_an_executor_without_launch_is_refused(make_engine: MakeEngine) -> None:
    """When the engine is built, with what to do; its memory is given back."""
    closed: list[bool] = []

    class Whole:
        num_kv_blocks, num_cpu_blocks = 4, 0

        def __init__(self, *_: Any) -> None:
            pass

        def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
            raise NotImplementedError

        def close(self) -> None:
            closed.append(True)

        def describe(self) -> str:
            return "whole steps"

    message = r"Whole has no launch.*result\(\).*async_scheduling=False"
    with pytest.raises(ValueError, match=message):
        make_engine(executor_cls=Whole)
    assert closed == [True]
    make_engine(executor_cls=Whole, async_scheduling=False)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_the_option_is_a_bool(value: Any) -> None:
    with pytest.raises(TypeError, match="async_scheduling must be True or False"):
        EngineConfig(async_scheduling=value)


# -- all of it together --


@dataclass(frozen=True)
class Arrival:
    """One request, and when it comes."""

    prefix: int  # tokens of a text that others begin with, too
    own: int
    max_tokens: int
    gap: int  # steps after the arrival before it
    priority: int
    seed: int
    n: int
    num_stop_tokens: int  # token ids below this end it
    awaits: bool
    kind: RequestOutputKind
    salt: str | None


ARRIVALS = st.builds(
    Arrival,
    prefix=st.sampled_from([0, 0, 3, 4, 8, 12]),
    own=st.integers(1, 9),
    max_tokens=st.sampled_from([1, 1, 2, 3, 5, 9, 14]),
    gap=st.sampled_from([0, 0, 0, 1, 2, 6]),
    priority=st.integers(-1, 1),
    seed=st.integers(0, 2),
    n=st.sampled_from([1, 1, 1, 1, 2, 3]),
    num_stop_tokens=st.sampled_from([0, 0, 5, 12]),
    awaits=st.sampled_from([False, False, False, True]),
    kind=st.sampled_from(RequestOutputKind),
    salt=st.sampled_from([None, None, "mine"]),
)
TROUBLE = st.tuples(
    st.integers(0, 40),  # the step
    st.sampled_from(["abort", "abort one", "fail launch", "fail result", "beams"]),
    st.integers(0, 9),  # whom it hits
)


@st.composite
def engine_options(draw: st.DrawFn) -> dict[str, Any]:
    """Engines from cramped to roomy; the longest request has 12 + 9 + 14 = 35 tokens."""
    max_num_seqs = draw(st.integers(3, 6))
    chunked = draw(st.sampled_from([True, True, False]))
    return {
        "max_model_len": 40,
        "block_size": draw(st.sampled_from([1, 2, 4, 8])),
        "num_kv_blocks": draw(st.sampled_from([5, 6, 8, 11, 20, 64])),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": (max_num_seqs if chunked else 40) + draw(st.integers(0, 20)),
        "enable_chunked_prefill": chunked,
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 2])),
        "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "preemption_mode": draw(st.sampled_from(["recompute", "swap"])),
        "num_cpu_blocks": draw(st.sampled_from([2, 5, 64])),
    }


class Workload:
    """Plays arrivals and troubles against an overlapped engine."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.room = engine.executor.num_kv_blocks * engine.block_manager.block_size
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.aborted: set[str] = set()
        self.last: dict[str, RequestOutput] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}  # (request id, index) -> from deltas
        self.launched: list[SchedulerOutput] = []
        self.told: list[SchedulerOutput] = []
        launch = engine.executor.launch

        def launch_and_note(scheduler_output: SchedulerOutput) -> Any:
            pending = launch(scheduler_output)
            self.launched.append(scheduler_output)
            return pending

        engine.executor.launch = launch_and_note
        engine.step_listeners.append(lambda report: self.told.append(report.scheduler_output))

    def play(self, arrivals: list[Arrival], troubles: dict[int, tuple[str, int]]) -> None:
        """Until every request has arrived and ended."""
        due, at = [], 0
        for arrival in arrivals:
            at += arrival.gap
            due.append((at, arrival))
        number = 0
        while due or self.engine.has_unfinished_requests():
            while due and due[0][0] <= number:
                self.arrive(due.pop(0)[1])
            what, whom = troubles.get(number, ("", 0))
            self.disturb(what, whom)
            try:
                self.hear(self.engine.step())
            except StepFailed:  # what was in flight is lost
                kept = [*self.told, *(step for step, _ in self.engine._untold)]
                self.launched = [step for step in self.launched if id(step) in map(id, kept)]
            check(self.engine)
            number += 1
            assert number < 3000, "no end in sight"

    def arrive(self, arrival: Arrival) -> None:
        name = f"request {len(self.requests)}"
        own = [(20 + len(self.requests) + i) % VOCAB_SIZE for i in range(arrival.own)]
        prompt = [*range(arrival.prefix), *own][: self.room - 1]
        wanted = params(
            max_tokens=arrival.max_tokens,
            seed=arrival.seed,
            n=arrival.n,
            stop_token_ids=list(range(arrival.num_stop_tokens)),
            presence_penalty=0.5 if arrival.awaits else 0.0,
            output_kind=arrival.kind,
        )
        self.requests[name] = (prompt, wanted)
        by_priority = self.engine.config.scheduling_policy == "priority"
        priority = arrival.priority if by_priority else 0
        self.engine.add_request(name, prompt, wanted, priority=priority, cache_salt=arrival.salt)

    def disturb(self, what: str, whom: int) -> None:
        names = list(self.requests)
        name = names[whom % len(names)] if names else ""
        if what == "abort" and self.engine.abort_request(name):
            event("aborted")
            self.aborted.add(name)
        elif what == "abort one" and self.engine.abort_request(name, whom % 3):
            event("aborted one")
            self.aborted.add(name)
        elif what == "fail launch":
            self.engine.executor.fail_next_step = True
        elif what == "fail result":
            self.engine.executor.fail_next_result = True
        elif what == "beams":
            beams = f"beams {len(self.launched)}"
            with contextlib.suppress(ValueError):  # the name may be in use, the room too small
                add_beam_search(self.engine, beams, [1, 2, whom], BeamSearchParams(2, 3))

    def hear(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.last[output.request_id] = output
            is_delta = self.requests[output.request_id][1].output_kind is RequestOutputKind.DELTA
            for completion in output.outputs:
                key = (output.request_id, completion.index)
                known = self.tokens.get(key, []) if is_delta else []
                self.tokens[key] = known + completion.token_ids

    def check_results(self) -> None:
        """Who was not aborted got what it would get alone, and every step was told of."""
        for name, (prompt, wanted) in self.requests.items():
            if name in self.aborted:
                continue
            assert self.last[name].finished
            max_tokens = min(wanted.max_tokens or 0, min(40, self.room) - len(prompt))
            stop = wanted.stop_token_ids or ()
            for branch in range(wanted.n):
                expected = expect(prompt, max_tokens, branch, wanted.seed or 0, stop)
                assert self.tokens[name, branch] == expected
        assert_idle(self.engine)
        told = [*self.told, *(step for step, _ in self.engine._untold)]
        assert list(map(id, told)) == list(map(id, self.launched))


@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    options=engine_options(),
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=10),
    troubles=st.lists(TROUBLE, max_size=4),
)
def test_same_tokens_no_block_lost_and_everything_ends(
    make_engine: MakeEngine,
    options: dict[str, Any],
    arrivals: list[Arrival],
    troubles: list[tuple[int, str, int]],
) -> None:
    """Whatever comes, whenever: as in the synchronous loop, but one step ahead of its tokens."""
    workload = Workload(make_engine(**options))
    workload.play(arrivals, {step: (what, whom) for step, what, whom in troubles})
    workload.check_results()


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(arrivals=st.lists(ARRIVALS, min_size=1, max_size=10), by_text=st.booleans())
def test_at_most_one_token_is_computed_in_vain(
    make_engine: MakeEngine, arrivals: list[Arrival], by_text: bool
) -> None:
    """Where there is room for all, no sequence computes more than one token more than in the
    synchronous loop, and none that ends by its length computes any."""
    results = []
    for is_async in (False, True):
        engine = make_engine(async_scheduling=is_async, enable_prefix_caching=False)
        if by_text:
            stop_by_text(engine)
        workload = Workload(engine)
        for arrival in arrivals:
            workload.arrive(replace(arrival, kind=RequestOutputKind.FINAL_ONLY))
        outputs = run(engine)
        ends = [  # in the order of the seq_ids
            (completion.token_ids, completion.finish_reason)
            for name in workload.requests
            for completion in outputs[name].outputs
        ]
        results.append((ends, engine.executor.num_tokens))
    (ends, computed), (ends_ahead, computed_ahead) = results
    assert ends == ends_ahead
    for seq_id, (_, reason) in enumerate(ends):
        extra = computed_ahead.get(seq_id, 0) - computed.get(seq_id, 0)  # none if it never ran on
        assert 0 <= extra <= (reason == "stop")
