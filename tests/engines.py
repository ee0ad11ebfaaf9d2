"""The real LLMEngine over the fake model (fakes.py): no weights, no text, no torch in a step.

Shared by test_engine.py, test_async_scheduling.py and test_beam_search.py.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fakes import FakeExecutor, reference_output

from nanoserve import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from nanoserve.exceptions import RequestError
from nanoserve.output_processor import BranchState
from nanoserve.sequence import ModelOutput, SchedulerOutput, Sequence, SequenceUpdate
from nanoserve.tools.fake_executor import write_config

VOCAB_SIZE = 50
EOS = 49
MAX_MODEL_LEN = 64
ROOT = TemporaryDirectory(prefix="fake-checkpoints-")  # removed when the process ends


@lru_cache
def checkpoint(vocab_size: int, eos_token_ids: tuple[int, ...]) -> str:
    """The folder of a checkpoint that consists of a config.json."""
    folder = Path(ROOT.name, f"{vocab_size}-{len(eos_token_ids)}")
    return write_config(folder, vocab_size, eos_token_ids, MAX_MODEL_LEN)


def make_engine(
    *, vocab_size: int = VOCAB_SIZE, eos_token_ids: tuple[int, ...] = (EOS,), **options: Any
) -> LLMEngine:
    """An engine over the fake model. `options` are EngineArgs', or a seam such as scheduler_cls.

    64 blocks of 4 tokens, if the options do not say otherwise.
    """
    seams = {name: options.pop(name) for name in list(options) if name.endswith("_cls")}
    fields = {"num_kv_blocks": 64, "block_size": 4, **options}
    engine_args = EngineArgs(model=checkpoint(vocab_size, eos_token_ids), **fields)
    return LLMEngine.from_engine_args(engine_args, **{"executor_cls": FakeExecutor, **seams})


def params(**fields: Any) -> SamplingParams:
    """Ten tokens, EOS ignored, seed 5."""
    return SamplingParams(**{"seed": 5, "max_tokens": 10, "ignore_eos": True, **fields})


def expect(
    prompt: list[int], max_tokens: int = 10, branch: int = 0, seed: int = 5, stop: Any = ()
) -> list[int]:
    """The tokens that params() gives, by the oracle."""
    return reference_output(prompt, max_tokens, stop, seed, branch, VOCAB_SIZE)


# -- steps, and what must hold after each --


def step(engine: LLMEngine) -> list[RequestOutput]:
    """One step, checked."""
    outputs = engine.step()
    check(engine)
    return outputs


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step to the end; each request's last output. The engine is idle then."""
    last: dict[str, RequestOutput] = {}
    for _ in range(3000):
        if not engine.has_unfinished_requests():
            break
        last |= {output.request_id: output for output in step(engine)}
    assert_idle(engine)
    return last


def unread_steps(engine: LLMEngine) -> list[Any]:
    """Launched steps that wait to be read. (The next launch tells the executor that a step was
    abandoned.)"""
    return [] if engine.scheduler._is_restart else list(engine.executor.unread)


def check(engine: LLMEngine) -> None:
    """Blocks, counters, steps in flight and the contents of the cache agree with each other."""
    scheduler, manager, executor = engine.scheduler, engine.block_manager, engine.executor
    manager.check()
    assert unread_steps(engine) == [step.pending for step in engine._in_flight]
    most_in_flight = engine.config.max_concurrent_batches - 1
    assert len(engine._in_flight) <= most_in_flight
    in_flight = Counter(
        item.seq_id for step in engine._in_flight for item in step.scheduler_output.scheduled
    )
    for seq in scheduler.sequences.values():
        assert 0 <= seq.num_computed_tokens <= seq.num_tokens + seq.num_output_placeholders
        assert seq.num_output_placeholders <= in_flight[seq.seq_id] <= most_in_flight
        assert seq.num_output_placeholders <= 1
        assert seq.num_output_tokens < seq.max_tokens
    for block_id, block_hash in enumerate(manager.pool.block_hashes):
        if block_hash is not None:
            size = manager.block_size
            held = executor.layers[0][block_id * size : (block_id + 1) * size]
            assert held == list(block_hash.token_ids), "a cached block holds other tokens"
    if engine.kv_connector is not None:
        engine.kv_connector.check()
        for block_hash, block in engine.kv_connector.manager.policy.items():
            if block.is_ready:
                held = executor.kv_connector[block.block_id][0]
                assert held == list(block_hash.token_ids), "a row holds other tokens"


def assert_idle(engine: LLMEngine) -> None:
    """No request, no output, no step in flight; every block of both pools is free."""
    assert not engine.has_unfinished_requests()
    assert not engine.output_processor.requests
    assert not engine.scheduler.sequences
    assert not engine._in_flight
    assert not unread_steps(engine)
    assert engine.block_manager.num_free_blocks == engine.executor.num_kv_blocks
    assert engine.block_manager.cpu_pool.num_free_blocks == engine.executor.num_cpu_blocks
    if (connector := engine.kv_connector) is not None:
        while connector.tiers.jobs:
            connector.poll()
        assert not any(block.ref_cnt for _, block in connector.manager.policy.items())
        assert not (connector._num_saved or connector.tiers.promotions)


# -- what can happen in a step --


def in_thread(*calls: Callable[[], Any]) -> list[Any]:
    """Make these calls in another thread, and wait for it. What a call raises is its result."""
    results: list[Any] = []

    def run() -> None:
        for call in calls:
            try:
                results.append(call())
            except Exception as error:
                results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results


def change_text(
    monkeypatch: pytest.MonkeyPatch, find_stop: Callable[[Sequence], str | None]
) -> None:
    """Replace detokenization: `find_stop` returns the stop string that ends a sequence, or
    raises."""

    def append(branch: BranchState, update: SequenceUpdate) -> str | None:
        return find_stop(branch.sequence) if update.new_token_ids else None

    monkeypatch.setattr(BranchState, "append", append)


def fail_in_executor(engine: LLMEngine, request_id: str, num_output_tokens: int = 0) -> None:
    """No token is possible for this request (for one of its sequences) in a step before which it
    has as many output tokens, or more."""
    launch, read = engine.executor.launch, engine.executor.read
    culprits: dict[int, int] = {}  # number of the step -> seq_id

    def launch_and_note(scheduler_output: SchedulerOutput) -> Any:
        pending = launch(scheduler_output)
        for item in scheduler_output.scheduled:
            seq = engine.scheduler.sequences[item.seq_id]
            num_before = seq.num_output_tokens + max(0, seq.num_output_placeholders - 1)
            if seq.request_id == request_id and num_before >= num_output_tokens:
                culprits[pending.number] = item.seq_id
        return pending

    def read_or_fail(pending: Any, output: Any) -> Any:
        result = read(pending, output)
        if pending.number in culprits:
            fail_row(result, culprits[pending.number])
        return result

    engine.executor.launch, engine.executor.read = launch_and_note, read_or_fail


def fail_row(output: ModelOutput, seq_id: int, message: str = "no token is possible") -> None:
    """What a runner does if one sequence of a step cannot be sampled."""
    output.sampled_token_ids.pop(seq_id, None)
    output.forks.pop(seq_id, None)
    output.errors[seq_id] = RequestError(message)
