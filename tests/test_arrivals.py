"""Requests that arrive at given steps, and the two pictures that notebooks 03 and 04 add."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from nanoserve import LoRARequest, SamplingParams
from nanoserve.bench.policies import StaticBatchScheduler
from nanoserve.demo import MODEL_DIR
from nanoserve.extras import lesson, trace
from nanoserve.extras.arrivals import serve


@pytest.fixture
def pyplot() -> Iterator[Any]:
    """matplotlib without a screen."""
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot

    yield matplotlib.pyplot
    matplotlib.pyplot.close("all")


def test_a_request_waits_for_a_place() -> None:
    run = serve({"A": (1, 4), "B": (2, 3)}, max_num_seqs=1)
    assert run.num_steps == 7
    assert run.num_generated == 7
    assert run.order() == ["A", "B"]
    assert run.wait("A").steps == 1
    assert run.wait("B").steps == 4  # steps 2 to 5: A's last three, and its own first
    num_prompt = run.recorder.steps[4].num_scheduled
    assert run.wait("B").tokens == 3 + num_prompt


def test_without_a_number_of_tokens_the_model_ends_the_answer() -> None:
    run = serve({"A": 1, "C": 3})
    assert run.answers["A"].endswith("42")
    assert "Paris" in run.answers["C"]


def test_steps_without_anybody_count() -> None:
    run = serve({"A": (1, 2), "B": (6, 2)})
    assert run.num_steps == 7
    assert len(run.recorder.steps) == 4


def test_the_longest_gap_is_the_largest_step_of_somebody_else() -> None:
    run = serve({"C": (1, 6), "D": (3, 2)})
    whole = run.recorder.steps[2].num_scheduled
    assert run.wait("C").gap == whole
    chunked = serve({"C": (1, 20), "D": (4, 2)}, max_num_batched_tokens=8)
    assert chunked.wait("C").gap == 8
    assert chunked.wait("D").steps > run.wait("D").steps


def test_static_batches_are_never_faster() -> None:
    requests = {"A": (1, 10), "B": (1, 2), "C": (1, 3), "D": (1, 8)}
    static = serve(requests, max_num_seqs=2, scheduler_cls=StaticBatchScheduler)
    assert (static.num_steps, serve(requests, max_num_seqs=2).num_steps) == (18, 13)


def test_digests_are_those_of_the_formula() -> None:
    with lesson.small_llm() as llm:
        token_ids = lesson.prompt(llm, "A")
        for salt in (None, "Ada"):
            digests = trace.block_digests(llm.engine, token_ids, salt)
            assert len(digests) == (len(token_ids) - 1) // 4
            parent = hashlib.sha256(repr(("", salt)).encode()).hexdigest()
            for index, digest in enumerate(digests):
                content = repr((parent, tuple(token_ids[4 * index : 4 * index + 4])))
                parent = hashlib.sha256(content.encode()).hexdigest()
                assert digest == parent


def test_the_hash_chain_can_be_drawn(pyplot: Any) -> None:
    with lesson.small_llm() as llm:
        prompts = {name: lesson.prompt(llm, name) for name in lesson.CAST}
        trace.hash_chain(llm.engine, "a tree", prompts, salts={"B": "Ada"})
        texts = [text.get_text() for text in pyplot.gcf().axes[0].texts]
        for name in prompts:
            assert name in texts
            assert f"hash {trace.block_digests(llm.engine, prompts['A'])[0][:4]}…" in texts
        assert "salt 'Ada'" in texts
        llm.engine.block_manager.check()


def test_a_hash_chain_begins_with_the_adapter(pyplot: Any) -> None:
    """One prompt, without an adapter and with one: no block in common."""
    wish = LoRARequest("pirate", 1, MODEL_DIR / "lora")
    with lesson.small_llm(enable_lora=True) as llm:
        prompt = lesson.prompt(llm, "A")
        trace.hash_chain(llm.engine, "roots", {"A": prompt, "B": prompt}, loras={"B": wish})
        texts = [text.get_text() for text in pyplot.gcf().axes[0].texts]
        assert {"no extra keys", "LoRA 'pirate'"} <= set(texts)
        hashes = [text for text in texts if text.startswith("hash ")]
        assert len(hashes) == len(set(hashes)) == 2 * min(5, (len(prompt) - 1) // 4)


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_the_order_of_calls(is_overlapped: bool, pyplot: Any) -> None:
    """Overlapped: step 2 is scheduled before the result of step 1 is read."""
    with lesson.small_llm(async_scheduling=is_overlapped) as llm:
        llm.add_request("A", lesson.prompt(llm, "A"), SamplingParams(temperature=0, max_tokens=4))
        with trace.calls(llm) as events:
            while llm.has_unfinished_requests():
                llm.step()
        first = ["schedule 1", "schedule 2", "update 1", "schedule 3"]
        plain = ["schedule 1", "update 1", "schedule 2", "update 2"]
        names = [f"{verb} {step}" for verb, step in events]
        assert names[:4] == (first if is_overlapped else plain)
        assert "schedule" not in vars(llm.engine.scheduler)
    trace.overlap("a scheme", {"run": events})
    assert "step 4" in [text.get_text() for text in pyplot.gcf().axes[0].texts]
