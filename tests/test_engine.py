"""Who turns the crank: the real engine over the fake model, so no weights, no text and no torch.

What LLMEngine does with a real model is in test_llm.py; here, what it does with requests.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeExecutor, StepFailed, add_beam_search, reference_output
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoserve import BeamSearchParams, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from nanoserve.block_manager import BlockManager
from nanoserve.config import EngineConfig
from nanoserve.scheduler import Scheduler
from nanoserve.sequence import RequestError

VOCAB_SIZE = 50
EOS = 49


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
        "max_position_embeddings": 64,
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


MakeEngine = Callable[..., LLMEngine]


@pytest.fixture
def make_engine(folder: Path) -> MakeEngine:
    """make_engine(num_kv_blocks=8, ...) -> an engine over the fake model."""

    def make(**options: Any) -> LLMEngine:
        seams = {name: options.pop(name) for name in list(options) if name.endswith("_cls")}
        fields = {"num_kv_blocks": 64, "block_size": 4, **options}
        config = EngineConfig(model=str(folder), **fields)
        return LLMEngine(config, **{"executor_cls": FakeExecutor, **seams})

    return make


def params(**fields: Any) -> SamplingParams:
    """Ten tokens whatever they are, seed 5."""
    return SamplingParams(**{"seed": 5, "max_tokens": 10, "ignore_eos": True, **fields})


def expect(prompt: list[int], max_tokens: int = 10, branch: int = 0, seed: int = 5) -> list[int]:
    return reference_output(prompt, max_tokens, (), seed, branch, VOCAB_SIZE)


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step to the end; each request's last output."""
    last: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        last |= {output.request_id: output for output in engine.step()}
        engine.block_manager.check()
    assert not engine.output_processor.requests
    assert engine.block_manager.num_free_blocks == engine.executor.num_kv_blocks
    return last


def test_the_loop(make_engine: MakeEngine) -> None:
    """Add requests, step until nothing is unfinished."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params())
    engine.add_request("b", [4, 5], params(max_tokens=3))
    assert engine.has_unfinished_requests()
    outputs = finish(engine)
    assert outputs["a"].outputs[0].token_ids == expect([1, 2, 3])
    assert outputs["b"].outputs[0].token_ids == expect([4, 5], 3)
    assert all(output.finished for output in outputs.values())
    assert not engine.is_unfinished("a")


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_n_completions_are_one_output(make_engine: MakeEngine, preemption_mode: str) -> None:
    """In the order of their index, on roomy and on cramped engines."""
    for num_kv_blocks in (64, 6):
        engine = make_engine(num_kv_blocks=num_kv_blocks, preemption_mode=preemption_mode)
        engine.add_request("a", [1, 2, 3, 4, 5], params(n=3))
        [output] = finish(engine).values()
        assert [c.index for c in output.outputs] == [0, 1, 2]
        for completion in output.outputs:
            assert completion.token_ids == expect([1, 2, 3, 4, 5], branch=completion.index)
            assert completion.finish_reason == "length"


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_the_kinds_of_output_say_the_same(make_engine: MakeEngine, kind: RequestOutputKind) -> None:
    """Deltas put together are what the cumulative and the final output hold."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(n=2, output_kind=kind))
    tokens: dict[int, list[int]] = {0: [], 1: []}
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
        for completion in outputs[-1].outputs if outputs else ():
            if kind is not RequestOutputKind.DELTA:
                tokens[completion.index] = []
            tokens[completion.index] += completion.token_ids
    assert tokens == {branch: expect([1, 2, 3], branch=branch) for branch in (0, 1)}
    assert [output.finished for output in outputs[-2:]][-1]
    assert len(outputs) == (1 if kind is RequestOutputKind.FINAL_ONLY else 10)


# -- abort --


@pytest.mark.parametrize("num_steps", [0, 1, 2, 4])
@pytest.mark.parametrize("n", [1, 3])
def test_abort_at_any_moment(make_engine: MakeEngine, n: int, num_steps: int) -> None:
    """Waiting, half-prefilled, decoding: every block is free at once; others go on."""
    engine = make_engine(max_num_batched_tokens=8, max_num_seqs=4)
    engine.add_request("gone", list(range(12)), params(n=n))
    for _ in range(num_steps):
        engine.step()
    assert engine.abort_request("gone")
    assert engine.block_manager.num_free_blocks == 64
    assert not engine.abort_request("gone")
    assert not engine.is_unfinished("gone")
    engine.add_request("gone", [1], params())
    assert finish(engine)["gone"].outputs[0].token_ids == expect([1])


def test_abort_of_a_swapped_request(make_engine: MakeEngine) -> None:
    engine = make_engine(num_kv_blocks=5, preemption_mode="swap")
    for name, first in (("stays", 1), ("gone", 9)):
        engine.add_request(name, list(range(first, first + 7)), params())
    while not engine.scheduler.swapped:
        engine.step()
    assert engine.abort_request("gone")
    assert engine.block_manager.cpu_pool.num_free_blocks == 5
    assert finish(engine)["stays"].outputs[0].token_ids == expect(list(range(1, 8)))


@pytest.mark.parametrize("index", [0, 1, 2])
def test_abort_of_one_completion(make_engine: MakeEngine, index: int) -> None:
    """It stays as it is, with finish_reason "abort"; the others go on to their ends."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(n=3))
    engine.step()
    engine.step()
    assert engine.abort_request("a", index)
    assert not engine.abort_request("a", 3)
    [output] = finish(engine).values()
    for completion in output.outputs:
        length, reason = (2, "abort") if completion.index == index else (10, "length")
        expected = expect([1, 2, 3], branch=completion.index)[:length]
        assert (completion.token_ids, completion.finish_reason) == (expected, reason)


def test_abort_of_all_completions_one_by_one(make_engine: MakeEngine) -> None:
    """Ends the request; the next step has no work, and brings what it had come to."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(n=2))
    engine.step()
    assert engine.abort_request("a", 1)
    assert engine.is_unfinished("a")
    assert engine.abort_request("a", 0)
    assert not engine.is_unfinished("a")
    assert engine.block_manager.num_free_blocks == 64
    assert engine.has_unfinished_requests()
    [output] = engine.step()
    assert output.finished
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "abort"]
    assert not engine.has_unfinished_requests()


# -- what goes wrong --


def test_a_failed_step_is_made_again(make_engine: MakeEngine) -> None:
    """The error reaches the caller, and the next step goes on from where it was."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3, 4, 5], params(n=2))
    for num_steps in (0, 1, 3):
        for _ in range(num_steps):
            engine.step()
        engine.executor.fail_next_step = True
        with pytest.raises(StepFailed):
            engine.step()
        engine.block_manager.check()
    [output] = finish(engine).values()
    for branch, completion in enumerate(output.outputs):
        assert completion.token_ids == expect([1, 2, 3, 4, 5], branch=branch)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize(
    "name", ["get_cached_blocks", "allocate", "can_append", "append", "copy_on_write", "swap_out"]
)
@pytest.mark.parametrize("is_done", [False, True])
def test_schedule_may_fail_anywhere(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, name: str, error: type, is_done: bool
) -> None:
    """Before or after any change to the books: nothing is lost, and the tokens stay the same."""
    engine = make_engine(num_kv_blocks=6, preemption_mode="swap")
    method, countdown = getattr(engine.block_manager, name), iter([0, 0, 1, 0, 1])

    def faulty(*args: Any) -> Any:
        fails = next(countdown, 0)
        result = method(*args) if is_done or not fails else None
        if fails:
            raise error("injected")
        return result

    monkeypatch.setattr(engine.block_manager, name, faulty)
    engine.add_request("a", [1, 2, 3, 4, 5], params(n=2))
    engine.add_request("b", [1, 2, 3, 4, 6], params())
    outputs: dict[str, RequestOutput] = {}
    for _ in range(200):
        try:
            outputs |= {output.request_id: output for output in engine.step()}
        except error:
            engine.block_manager.check()
    assert [c.token_ids for c in outputs["a"].outputs] == [
        expect([1, 2, 3, 4, 5], branch=branch) for branch in (0, 1)
    ]
    assert outputs["b"].outputs[0].token_ids == expect([1, 2, 3, 4, 6])
    assert not engine.has_unfinished_requests()


def interrupt_at(line_number: int) -> Callable[..., Any]:
    """A trace function that sends this process a SIGINT at the n-th line run in nanoserve/."""
    lines = iter(range(line_number))

    def trace(frame: Any, event: str, _: Any) -> Any:
        if "nanoserve" not in frame.f_code.co_filename:
            return None
        if event == "line" and next(lines, None) is None:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace

    return trace


def check_ctrl_c(
    engine: LLMEngine, line_number: int, finish: Callable[[LLMEngine], dict[str, RequestOutput]]
) -> None:
    """A signal at that line: it is raised, the books balance, and every token comes."""
    engine.add_request("a", [1, 2, 3, 4, 5], params(n=2))
    engine.add_request("b", [1, 2, 3, 4, 6], params())
    outputs: dict[str, RequestOutput] = {}
    previous, num_interrupts = sys.gettrace(), 0
    sys.settrace(interrupt_at(line_number))
    try:
        while not num_interrupts and engine.has_unfinished_requests():
            try:
                outputs |= {output.request_id: output for output in engine.step()}
            except KeyboardInterrupt:
                num_interrupts += 1
    except KeyboardInterrupt:  # between two steps
        num_interrupts += 1
    finally:
        sys.settrace(previous)
    engine.block_manager.check()
    outputs |= finish(engine)
    assert num_interrupts == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert outputs["b"].outputs[0].token_ids == expect([1, 2, 3, 4, 6])
    for branch in (0, 1):
        assert outputs["a"].outputs[branch].token_ids == expect([1, 2, 3, 4, 5], branch=branch)


@pytest.mark.parametrize("line_number", range(1, 2400, 19))
def test_ctrl_c_at_any_line(make_engine: MakeEngine, line_number: int) -> None:
    """Wherever it hits."""
    check_ctrl_c(make_engine(num_kv_blocks=7, preemption_mode="swap"), line_number, finish)


def test_a_listener_that_raises_costs_no_output(make_engine: MakeEngine) -> None:
    """What was ready comes with the next call."""
    engine = make_engine()

    def complain(*_: object) -> None:
        engine.step_listeners.clear()
        raise ValueError("no")

    engine.step_listeners.append(complain)
    engine.add_request("a", [1, 2, 3], params(max_tokens=1))
    with pytest.raises(ValueError, match="no"):
        engine.step()
    [output] = engine.step()
    assert output.outputs[0].token_ids == expect([1, 2, 3], 1)


def test_a_failure_in_one_output_costs_that_request_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others get what is theirs, with the next call, and no request id stays in use."""
    engine = make_engine()
    engine.add_request("bad", [1, 2, 3], params(max_tokens=1))
    engine.add_request("good", [4, 5, 6], params(max_tokens=1))
    append = engine.output_processor.append

    def faulty(update: Any) -> str | None:
        if update.sequence.request_id == "bad":
            raise ValueError("no text")
        return append(update)

    monkeypatch.setattr(engine.output_processor, "append", faulty)
    with pytest.raises(ValueError, match="no text"):
        engine.step()
    [output] = engine.step()
    assert output.outputs[0].token_ids == expect([4, 5, 6], max_tokens=1)
    assert not engine.is_unfinished("bad")
    assert not engine.has_unfinished_requests()


def test_who_makes_a_step_fail_is_aborted(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its error is raised once; the others go on and get their tokens."""
    engine = make_engine()
    engine.add_request("bad", [1, 2, 3], params())
    engine.add_request("good", [4, 5, 6], params())
    execute, guilty = engine.executor.execute_model, engine.scheduler.waiting[0].seq_id

    def faulty(scheduler_output: Any) -> Any:
        if guilty in [item.seq_id for item in scheduler_output.scheduled]:
            raise RequestError(guilty, "a logits processor raised")
        return execute(scheduler_output)

    monkeypatch.setattr(engine.executor, "execute_model", faulty)
    with pytest.raises(RequestError, match="raised"):
        engine.step()
    assert not engine.is_unfinished("bad")
    [output] = finish(engine).values()
    assert output.outputs[0].token_ids == expect([4, 5, 6])


def test_another_thread_may_give_its_request_up(make_engine: MakeEngine) -> None:
    """Not at once, since somebody else is inside; with the next step."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params())
    engine.add_request("b", [4, 5, 6], params())

    def give_up(*_: object) -> None:
        engine.step_listeners.clear()
        thread = threading.Thread(target=engine.abort_request_threadsafe, args=("b",))
        thread.start()
        thread.join()
        assert engine.is_unfinished("b")

    engine.step_listeners.append(give_up)
    engine.step()
    assert [output.request_id for output in engine.step()] == ["a"]
    assert not engine.is_unfinished("b")
    assert list(finish(engine)) == ["a"]


def test_a_delta_tells_of_a_completion_that_was_aborted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(n=2, output_kind=RequestOutputKind.DELTA))
    engine.step()
    assert engine.abort_request("a", 1)
    assert not engine.abort_request("a", 1)
    told = [c for output in engine.step() for c in output.outputs if c.finish_reason]
    assert [(c.index, c.finish_reason) for c in told] == [(1, "abort")]


def test_two_threads_are_noticed(make_engine: MakeEngine) -> None:
    """The second is told; the first goes on."""
    engine = make_engine()
    errors: list[str] = []

    def interfere(*_: object) -> None:
        def step() -> None:
            try:
                engine.step()
            except RuntimeError as error:
                errors.append(str(error))

        thread = threading.Thread(target=step)
        thread.start()
        thread.join()

    engine.step_listeners.append(interfere)
    engine.add_request("a", [1, 2, 3], params(max_tokens=2))
    assert finish(engine)["a"].outputs[0].token_ids == expect([1, 2, 3], 2)
    assert len(errors) == 2
    assert all("another thread" in error and "one thread" in error for error in errors)


def test_a_listener_may_call_back(make_engine: MakeEngine) -> None:
    """In its own thread: to abort what it has seen enough of."""
    engine = make_engine()
    engine.step_listeners.append(lambda *_: engine.abort_request("a") and None)
    engine.add_request("a", [1, 2, 3], params())
    engine.step()
    assert not engine.has_unfinished_requests()


def test_a_request_id_in_use_is_refused(make_engine: MakeEngine) -> None:
    """Until its request has ended; a refusal changes nothing."""
    engine = make_engine()
    engine.add_request("a", [1], params())
    add_beam_search(engine, "beams", [1], BeamSearchParams(2, 3))
    for name in ("a", "beams"):
        with pytest.raises(ValueError, match=f"'{name}' is in use"):
            engine.add_request(name, [2], params())
        with pytest.raises(ValueError, match=f"'{name}' is in use"):
            add_beam_search(engine, name, [2], BeamSearchParams(2, 3))
    finish(engine)
    engine.add_request("a", [2], params())
    assert finish(engine)["a"].outputs[0].token_ids == expect([2])


def test_more_completions_than_places_are_refused(make_engine: MakeEngine) -> None:
    """With what was given, what is allowed, and what to do."""
    engine = make_engine(max_num_seqs=2)
    with pytest.raises(ValueError, match=r"n is 3.*at most 2.*Lower n, or raise max_num_seqs"):
        engine.add_request("a", [1], params(n=3))
    assert not engine.has_unfinished_requests()


def test_close(make_engine: MakeEngine) -> None:
    """Everything is aborted, and nothing more is taken; closing twice is fine."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], params(n=2))
    add_beam_search(engine, "beams", [1, 2, 3], BeamSearchParams(2, 4))
    engine.step()
    engine.close()
    engine.close()
    assert engine.block_manager.num_free_blocks == 64
    assert not engine.has_unfinished_requests()
    for call in (engine.step, lambda: engine.add_request("b", [1], params())):
        with pytest.raises(RuntimeError, match="closed"):
            call()


# -- beam search --


def test_beam_search_beside_others(make_engine: MakeEngine) -> None:
    """step() advances it; its results are in the object returned, not in RequestOutputs."""
    engine = make_engine(num_kv_blocks=8)
    search = add_beam_search(engine, "beams", [1, 2, 3], BeamSearchParams(1, 4, ignore_eos=True))
    [root] = engine.scheduler.waiting
    engine.add_request("a", [1, 2, 3], params())
    outputs = finish(engine)
    assert list(outputs) == ["a"]
    assert outputs["a"].outputs[0].token_ids == expect([1, 2, 3])
    [beam] = search.get_output().sequences
    greedy = expect([1, 2, 3], 4, seed=root.seed)
    assert (beam.tokens[3:], beam.finish_reason) == (greedy, "length")


def test_beam_search_can_be_aborted(make_engine: MakeEngine) -> None:
    engine = make_engine()
    add_beam_search(engine, "beams", [1, 2, 3], BeamSearchParams(3, 4, ignore_eos=True))
    engine.step()
    engine.step()
    assert engine.abort_request("beams")
    assert engine.block_manager.num_free_blocks == 64
    assert not engine.has_unfinished_requests()


def test_beam_search_parameters_are_checked(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(TypeError, match="BeamSearchParams"):
        add_beam_search(engine, "beams", [1], params())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="empty"):
        add_beam_search(engine, "beams", [], BeamSearchParams(2, 3))
    assert not engine.is_unfinished("beams")


# -- seams --


def test_a_class_of_your_own_takes_the_place_of_ours(make_engine: MakeEngine) -> None:
    """The scheduler, the block manager, the executor."""
    calls: list[str] = []

    class MyScheduler(Scheduler):
        def schedule(self) -> Any:
            calls.append("schedule")
            return super().schedule()

    class MyBlockManager(BlockManager):
        def append(self, seq: Any, num_tokens: int) -> list[int]:
            calls.append("append")
            return super().append(seq, num_tokens)

    class MyExecutor(FakeExecutor):
        def execute_model(self, scheduler_output: Any) -> Any:
            calls.append("execute")
            return super().execute_model(scheduler_output)

    engine = make_engine(
        scheduler_cls=MyScheduler, block_manager_cls=MyBlockManager, executor_cls=MyExecutor
    )
    engine.add_request("a", [1], params(max_tokens=1))
    finish(engine)
    assert calls == ["schedule", "append", "execute"]


# -- all of it together --


@settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_whatever_happens_the_engine_serves_on(
    make_engine: MakeEngine, data: st.DataObject
) -> None:
    """Requests with n, beams, aborts of requests and of completions, failing steps: who is not
    aborted gets what it would get alone, and every block comes home."""
    draw = data.draw
    engine = make_engine(
        max_model_len=24,
        num_kv_blocks=draw(st.sampled_from([4, 6, 8, 32])),
        max_num_seqs=draw(st.integers(3, 6)),
        max_num_batched_tokens=draw(st.sampled_from([6, 9, 30])),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
        enable_prefix_caching=draw(st.booleans()),
    )
    prompts: dict[str, list[int]] = {}
    aborted: set[str] = set()
    last: dict[str, RequestOutput] = {}
    events = st.lists(st.sampled_from("aaabssssfxc"), min_size=5, max_size=40)
    for i, what in enumerate(draw(events)):
        name = draw(st.sampled_from(sorted(prompts) or [""]))
        if what == "a":
            prompts[str(i)] = draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
            engine.add_request(str(i), prompts[str(i)], params(n=draw(st.integers(1, 3))))
        elif what == "b":
            add_beam_search(engine, f"beams {i}", [1, 2, i], BeamSearchParams(2, 4))
        elif what == "x":
            aborted |= {name} if engine.abort_request(name) else set()
        elif what == "c":
            aborted |= {name} if engine.abort_request(name, draw(st.integers(0, 2))) else set()
        elif what == "f" and engine.has_unfinished_requests():
            engine.executor.fail_next_step = True
            with contextlib.suppress(StepFailed):  # or it has only an output to deliver
                last |= {output.request_id: output for output in engine.step()}
            engine.executor.fail_next_step = False
        else:
            last |= {output.request_id: output for output in engine.step()}
        engine.block_manager.check()
    last |= finish(engine)
    assert engine.block_manager.cpu_pool.num_free_blocks == engine.executor.num_cpu_blocks
    for name, prompt in prompts.items():
        if name in aborted:
            continue
        assert last[name].finished
        for completion in last[name].outputs:
            room = min(24, engine.executor.num_kv_blocks * 4) - len(prompt)
            assert completion.token_ids == expect(prompt, min(10, room), completion.index)
