"""Overlapped steps on the demo model give the same answers, for every feature of a request."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from nanoserve import LLM, BeamSearchParams, RequestOutput, SamplingParams

PROMPTS = [
    "The cat",
    "Once upon a time",
    "User: hello",
    "A long prompt " * 10,
    "Tom",
    "Anna has a",
    "What is the capital",
] * 2
ENGINES: dict[str, dict[str, Any]] = {
    "ample": {"num_kv_blocks": 400},
    "recompute": {"num_kv_blocks": 24},
    "swap": {"num_kv_blocks": 24, "preemption_mode": "swap"},
}
CROWDED = {
    "block_size": 4,
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "max_model_len": 90,
}


def never_twice(output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Forbid the last token, which must be known by then."""
    return logits.index_fill(0, torch.tensor(output[-1:], dtype=torch.long), -torch.inf)


def make_params(with_awaiting: bool = True) -> list[SamplingParams]:
    """Every feature of the sampler and of the text, side by side. Features that await tokens make
    steps synchronous; without them all steps overlap."""
    chance = random.Random(0)
    awaiting: list[dict[str, Any]] = [
        {"n": 3, "temperature": 0.8},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"bad_words": ["the", "little dog"]},
        {"logits_processors": [never_twice]},
    ]
    features: list[dict[str, Any]] = [
        {},
        {"stop": ["a", "ed "]},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"min_tokens": 6, "max_tokens": 12, "logit_bias": {5: 2.0}},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    ]
    features += awaiting if with_awaiting else []
    return [
        SamplingParams(
            **{
                "temperature": chance.choice([0, 0.8]),
                "max_tokens": chance.choice([1, 7, 16, 24]),
                "seed": i,
                **features[i % len(features)],
            }
        )
        for i in range(len(PROMPTS))
    ]


def summarise(outputs: list[RequestOutput]) -> list[Any]:
    """All that does not depend on time, but for the numbers (see logprobs_of)."""

    def named(entries: Any) -> Any:
        return entries and [entry and sorted(entry) for entry in entries]

    return [
        (
            [
                (c.token_ids, c.text, c.finish_reason, c.stop_reason, named(c.logprobs))
                for c in output.outputs
            ],
            named(output.prompt_logprobs),
        )
        for output in outputs
    ]


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    """Every log-probability, in order."""
    entries = [entry for output in outputs for entry in output.prompt_logprobs or ()]
    for output in outputs:
        entries += [entry for completion in output.outputs for entry in completion.logprobs or ()]
    return [entry[token].logprob for entry in entries if entry for token in sorted(entry)]


def answers(llm: LLM) -> dict[str, Any]:
    """The outputs of generate, beam_search and stream."""
    generated = llm.generate(PROMPTS, make_params(), use_tqdm=False)
    preemptions = sum(output.metrics.num_preemptions for output in generated)
    beams = llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=3, max_tokens=6))
    overlapping = llm.generate(PROMPTS, make_params(with_awaiting=False), use_tqdm=False)
    streamed: dict[tuple[str, int], str] = {}
    for output in llm.stream(PROMPTS[:4], make_params()[:4]):
        for completion in output.outputs:
            key = (output.request_id, completion.index)
            streamed[key] = streamed.get(key, "") + completion.text
    manager = llm.engine.block_manager
    manager.check()
    assert manager.num_free_blocks == manager.num_blocks
    assert not llm.engine._in_flight
    return {
        "generated": summarise(generated),
        "logprobs": logprobs_of(generated),
        "overlapping": summarise(overlapping),
        "beams": [[beam.tokens for beam in found.sequences] for found in beams],
        "streamed": sorted(streamed.items()),
        "preempted": preemptions > 0,
    }


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name == "swap")) for name in ENGINES],
)
def test_the_same_answers(name: str) -> None:
    """Tokens, text, logprobs, reasons, beams, streams."""
    options = ENGINES[name] | (CROWDED if name != "ample" else {})
    found = []
    for async_scheduling in (False, True):
        with LLM(async_scheduling=async_scheduling, **options) as llm:
            steps: list[Any] = []
            llm.engine.step_listeners.append(
                lambda report, s=steps: s.append(report.scheduler_output)
            )
            found.append(answers(llm))
    assert found[0]["preempted"] == found[1]["preempted"] == (name != "ample")
    plain, overlapped = (answer.pop("logprobs") for answer in found)
    assert overlapped == pytest.approx(plain, abs=1e-3)
    for what in found[0]:
        assert found[1][what] == found[0][what], what
    assert any(not step.needs_sync for step in steps)  # some of it did overlap
    assert any(step.needs_sync for step in steps)


def test_a_stream_that_is_left_early_aborts_its_requests() -> None:
    """Also with a step in flight. Other requests continue, and every block is free in the end."""
    with LLM(async_scheduling=True, num_kv_blocks=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        [expected] = llm.generate("Once upon a time", params, use_tqdm=False)
        llm.add_request("mine", "Once upon a time", params)
        for number, _ in enumerate(llm.stream(["The cat", "Tom"], params)):
            if number == 3:
                break
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert outputs[-1].outputs[0].token_ids == expected.outputs[0].token_ids
        assert llm.engine.block_manager.num_free_blocks == 64
        assert not llm.engine._in_flight
