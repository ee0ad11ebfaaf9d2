"""Speculative decoding changes the number of steps and nothing else: not one token, no logprob, no
block. Whatever is drafted.

The properties of test_scheduler.py (the control plane) and of test_async_scheduling.py (the whole
engine) are played here with drafts, right and wrong ones; then the demo model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import test_async_scheduling
import test_scheduler
from engines import EOS, VOCAB_SIZE, change_text, expect, finish, make_engine, params
from fakes import add_beam_search, next_token
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from nanoserve import LLM, SamplingParams
from nanoserve.engine import StepReport

config = pytest.importorskip("nanoserve.extras.speculative.config")
proposer = pytest.importorskip("nanoserve.extras.speculative.proposer")

SpeculativeConfig = config.SpeculativeConfig
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}

# -- drafts: (the request's future, its known tokens, most) -> drafts --

Future = Callable[[int], list[int]]
Adversary = Callable[[Future, list[int], int], list[int]]


def oracle(future: Future, known: list[int], most: int) -> list[int]:
    """All right, and as many as are allowed."""
    return future(most)


def every_third_wrong(future: Future, known: list[int], most: int) -> list[int]:
    drafts = future(most)
    return [token ^ (i % 3 == 2) for i, token in enumerate(drafts, start=len(known))]


def all_random(future: Future, known: list[int], most: int) -> list[int]:
    rng = random.Random(len(known))
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(most + 1))]


def far_too_many(future: Future, known: list[int], most: int) -> list[int]:
    """Beyond what is allowed, and beyond max_model_len."""
    return future(most + 40)


def stop_tokens(future: Future, known: list[int], most: int) -> list[int]:
    """EOS and stop tokens, in the middle of right drafts, and behind them."""
    drafts = future(most)
    return [EOS if i % 4 == 3 else token for i, token in enumerate(drafts)] + [0]


ADVERSARIES: list[Adversary] = [
    oracle,
    every_third_wrong,
    all_random,
    far_too_many,
    stop_tokens,
]


def draft_with(adversary: Adversary, executor: Any) -> None:
    """Let this draft for the fake model, whose future is known."""

    def propose(row: Any, most: int) -> list[int]:
        def future(number: int) -> list[int]:
            token_ids = list(row.token_ids)
            for _ in range(number):
                token = next_token(token_ids, row.seed, row.branch, executor.vocab_size)
                token_ids.append(token)
            return token_ids[len(row.token_ids) :]

        return adversary(future, row.token_ids, most)

    executor.propose = propose


# -- the control plane, over the fake model --

speculation = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["ngram", "eagle"]),  # eagle: with slots for its own drafts
        "model": st.just("nobody builds it"),
        "num_speculative_tokens": st.sampled_from([1, 2, 3, 5, 17]),
        "disable_by_batch_size": st.sampled_from([None, None, 2]),
    }
)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    options=test_scheduler.engine_options(),
    speculation=speculation,
    adversary=st.sampled_from(ADVERSARIES),
    requests=st.lists(test_scheduler.requests, min_size=1, max_size=9),
    disturbances=st.lists(test_scheduler.disturbances, max_size=4),
)
def test_same_tokens_and_no_block_lost_in_the_control_plane(
    options: dict[str, Any], speculation: dict[str, Any], adversary: Adversary, **drawn: Any
) -> None:
    """Chunks, both preemptions, forks, priorities, aborts, failing steps, the prefix cache."""
    history = test_scheduler.History({**options, "speculative_config": speculation}, **drawn)
    draft_with(adversary, history.engine.executor)
    history.play()
    event(f"accepted: {any(seq.metrics.num_accepted_tokens for seq in history.sequences)}")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    options=test_async_scheduling.engine_options(),
    speculation=speculation,
    adversary=st.sampled_from(ADVERSARIES),
    arrivals=st.lists(test_async_scheduling.ARRIVALS, min_size=1, max_size=10),
    troubles=st.lists(test_async_scheduling.TROUBLE, max_size=6),
)
def test_same_tokens_and_no_block_lost_in_the_engine(
    options: dict[str, Any],
    speculation: dict[str, Any],
    adversary: Adversary,
    arrivals: list[Any],
    troubles: list[tuple[int, str, int]],
) -> None:
    """Deltas, beam searches, requests that fail, and the search for them; after each step, every
    block that the prefix cache can find holds the tokens that it is found by."""
    engine = make_engine(**options, speculative_config=speculation)
    draft_with(adversary, engine.executor)
    workload = test_async_scheduling.Workload(engine)
    with pytest.MonkeyPatch.context() as monkeypatch:
        change_text(monkeypatch, workload.find_stop)
        workload.play(arrivals, {step: (what, number) for step, what, number in troubles})
    workload.check_results()


def speculating_engine(adversary: Adversary = oracle, **options: Any) -> Any:
    engine = make_engine(**{"speculative_config": NGRAM, **options})
    draft_with(adversary, engine.executor)
    return engine


def num_drafts(engine: Any) -> list[list[int]]:
    """From now on: of each step, how many drafts it verifies of each sequence."""
    found: list[list[int]] = []

    def note(report: StepReport) -> None:
        found.append([len(item.draft_token_ids) for item in report.scheduler_output.scheduled])

    engine.step_listeners.append(note)
    return found


def test_right_drafts_save_steps() -> None:
    """With k = 4, a step brings five tokens; the last one fewer, so that none is too many."""
    engine = speculating_engine()
    drafts = num_drafts(engine)
    engine.add_request("a", [1, 2, 3], params(max_tokens=13))
    [output] = finish(engine).values()
    assert output.outputs[0].token_ids == expect([1, 2, 3], 13)
    assert drafts == [[0], [4], [4], [1]]
    metrics = output.metrics
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (3, 9, 9)


def test_wrong_drafts_cost_no_token() -> None:
    engine = speculating_engine(lambda future, known, most: [t ^ 1 for t in future(most)])
    engine.add_request("a", [1, 2, 3], params(max_tokens=6))
    [output] = finish(engine).values()
    assert output.outputs[0].token_ids == expect([1, 2, 3], 6)
    assert output.metrics.num_accepted_tokens == 0
    assert output.metrics.num_draft_tokens > 0


@pytest.mark.parametrize(
    ("fields", "speculates"),
    [
        ({}, True),
        ({"logprobs": 2}, True),
        ({"min_tokens": 5, "logit_bias": {3: 1.0}, "allowed_token_ids": [1, 2, 3]}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.5}, False),
        ({"logits_processors": [lambda output, logits: logits]}, False),
    ],
)
def test_who_gets_drafts(fields: dict[str, Any], speculates: bool) -> None:
    """Beside a request that gets none, another one does."""
    engine = speculating_engine()
    drafts = num_drafts(engine)
    engine.add_request("a", [1, 2, 3], params(**fields))
    engine.add_request("b", [4, 5], params())
    finish(engine)
    assert any(step[0] for step in drafts if len(step) == 2) == speculates
    assert any(step[-1] for step in drafts)


def test_beams_get_none() -> None:
    engine = speculating_engine()
    drafts = num_drafts(engine)
    search = add_beam_search(engine, "a", [1, 2, 3], 2, 5)
    finish(engine)
    assert search.get_output().sequences
    assert not any(map(any, drafts))


def test_branches_get_drafts_of_their_own_after_the_fork() -> None:
    engine = speculating_engine()
    drafts = num_drafts(engine)
    engine.add_request("a", [1, 2, 3, 4, 5], params(n=3, max_tokens=9))
    [output] = finish(engine).values()
    for branch, completion in enumerate(output.outputs):
        assert completion.token_ids == expect([1, 2, 3, 4, 5], 9, branch)
    # The prompt; a token of each, so that each can be drafted for; then all speculate.
    assert drafts == [[0], [0, 0, 0], [4, 4, 4], [1, 1, 1]]
    assert output.metrics.num_draft_tokens == 5


def test_a_chunk_that_is_not_the_last_has_no_drafts() -> None:
    """Also where a preempted sequence, which has drafts, is computed again."""
    engine = speculating_engine(max_num_batched_tokens=4, max_num_seqs=2)
    drafts = num_drafts(engine)
    engine.add_request("a", [*range(10)], params(max_tokens=5))
    finish(engine)
    assert drafts == [[0], [0], [0], [3]]


def test_no_drafts_while_many_run() -> None:
    """Those that were made before the third one came are verified."""
    engine = speculating_engine(speculative_config={**NGRAM, "disable_by_batch_size": 2})
    drafts = num_drafts(engine)
    for i, length in enumerate((9, 15, 15)):
        engine.add_request(str(i), [1, 2, i], params(max_tokens=length))
    finish(engine)
    assert [any(step) for step in drafts if len(step) == 3] == [False, True, *[False] * 3]
    assert any(map(all, (step for step in drafts if len(step) == 2)))


def test_drafts_preempt_nobody() -> None:
    """Two sequences that just fit run to their ends side by side, as without drafts."""
    engine = speculating_engine(num_kv_blocks=8, block_size=4, max_num_seqs=2)
    for i in range(2):
        engine.add_request(str(i), [i, 2, 3, 4, 5, 6], params(max_tokens=10))
    for i, output in enumerate(finish(engine).values()):
        assert output.outputs[0].token_ids == expect([i, 2, 3, 4, 5, 6], 10)
        assert output.metrics.num_preemptions == 0


def test_accepted_blocks_are_found_by_the_next_request() -> None:
    """Blocks of 2 tokens: a step with four right drafts fills two or three of them at once."""
    engine = speculating_engine(block_size=2)
    engine.add_request("a", [1, 2, 3], params(max_tokens=14))
    [first] = finish(engine).values()
    engine.add_request("b", [1, 2, 3, *first.outputs[0].token_ids], params(max_tokens=2))
    [second] = finish(engine).values()
    assert second.num_cached_tokens == 16  # the keys of the last token were never computed


def test_what_ends_a_sequence_among_accepted_drafts() -> None:
    """A stop token, the length and a stop string each end it at their token, however many behind it
    were accepted. No number tells of the others."""
    whole = expect([1, 2, 3], 12)
    stop = next(token for token in whole[3:] if token not in whole[:3])
    at = whole.index(stop) + 1
    for fields in ({"stop_token_ids": [stop]}, {"max_tokens": at}, {"stop": ["x"]}):
        engine = speculating_engine(speculative_config={**NGRAM, "num_speculative_tokens": 12})
        reported: list[int] = []
        engine.step_listeners.append(
            lambda report, reported=reported: reported.extend(
                token for update in report.updates for token in update.new_token_ids
            )
        )
        with pytest.MonkeyPatch.context() as monkeypatch:
            if "stop" in fields:
                monkeypatch.setattr("nanoserve.output_processor.BranchState.append", cut(at))
                fields = {}
            wanted = params(**{"max_tokens": 12, "logprobs": 1, **fields})
            engine.add_request("a", [1, 2, 3], wanted)
            [output] = finish(engine).values()
        [completion] = output.outputs
        assert completion.token_ids == reported == whole[:at]
        assert completion.logprobs is not None
        assert len(completion.logprobs) == output.metrics.num_generation_tokens == at


def cut(at: int) -> Any:
    """Instead of text: a stop string that is complete at the output's token number `at`."""

    def append(branch: Any, update: Any) -> str | None:
        if branch.sequence.num_output_tokens < at:
            return None
        update.keep(len(update.new_token_ids) - branch.sequence.num_output_tokens + at)
        return "x"

    return append


def test_with_speculation_each_step_is_read_first() -> None:
    """And without it nothing changes: no step is awaited, nothing may be drafted."""
    for speculative_config in (NGRAM, None):
        engine = make_engine(async_scheduling=True, speculative_config=speculative_config)
        steps: list[Any] = []
        engine.step_listeners.append(lambda report, steps=steps: steps.append(report))
        engine.add_request("a", [1, 2, 3], params(max_tokens=4))
        finish(engine)
        outputs = [step.scheduler_output for step in steps]
        speculates = speculative_config is not None
        assert {output.needs_sync for output in outputs} == {speculates}
        assert any(item.num_lookahead_tokens for item in outputs[0].scheduled) == speculates


# -- the demo model --

PROMPTS = [
    "Once upon a time there was a kind dog named Tom.",
    "a b c a b c a b c a b",
    "Mia and Pip and Mia and Pip and Mia",
    "What is 17 + 25?",
]
GREEDY = {"temperature": 0.0, "max_tokens": 30}
REQUESTS: list[dict[str, Any]] = [
    {**GREEDY, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3, "max_tokens": 30, "logprobs": 0},
    {"temperature": 1.1, "top_k": 12, "seed": 4, "max_tokens": 25, "ignore_eos": True},
    {**GREEDY, "min_tokens": 20, "bad_words": ["Tom", "the dog"], "logit_bias": {90: 3.0}},
    {"temperature": 0.9, "seed": 5, "max_tokens": 20, "n": 3},
    {**GREEDY, "repetition_penalty": 1.2},
    {**GREEDY, "stop": ["and", "d"], "min_tokens": 3},
    {**GREEDY, "allowed_token_ids": [*range(300, 330)], "max_tokens": 12},
]
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {"num_kv_blocks": 300},
    "recompute": {"num_kv_blocks": 24, "block_size": 4, "max_num_batched_tokens": 40},
    "swap": {"num_kv_blocks": 24, "block_size": 4, "preemption_mode": "swap"},
    "definition": {"num_kv_blocks": 60, "block_size": 8, "attention_backend": "torch"},
}
SETTINGS["recompute"]["max_num_seqs"] = SETTINGS["swap"]["max_num_seqs"] = 8


def generate(llm: LLM) -> list[Any]:
    prompts = [prompt for prompt in PROMPTS for _ in REQUESTS]
    wanted = [SamplingParams(**fields) for _ in PROMPTS for fields in REQUESTS]
    return llm.generate(prompts, wanted, use_tqdm=False)


@lru_cache(maxsize=1)
def plain_outputs() -> list[Any]:
    with LLM(num_kv_blocks=300) as llm:
        return generate(llm)


class Future_:
    """The future of each request, as plain decoding has told it."""

    def __init__(self) -> None:
        self.texts = [
            [*output.prompt_token_ids, *completion.token_ids]
            for output in plain_outputs()
            for completion in output.outputs
        ]

    def of(self, known: list[int], number: int) -> list[int]:
        for text in self.texts:
            if len(text) > len(known) and text[: len(known)] == known:
                return text[len(known) :][:number]
        return [7] * number


def draft_for_demo(llm: LLM, adversary: Adversary) -> None:
    futures = Future_()

    def propose_one(seq_id: int, token_ids: np.ndarray, most: int) -> list[int]:
        known = token_ids.tolist()
        return adversary(lambda number: futures.of(known, number), known, most)

    llm.engine.executor.runner.proposer.propose_one = propose_one


def assert_same_outputs(outputs: list[Any], plain: list[Any]) -> None:
    """Tokens, texts, reasons; and logprobs, but for rounding."""
    for output, expected in zip(outputs, plain, strict=True):
        assert output.metrics.num_generation_tokens == expected.metrics.num_generation_tokens
        for completion, other in zip(output.outputs, expected.outputs, strict=True):
            for name in ("token_ids", "text", "finish_reason", "stop_reason"):
                assert getattr(completion, name) == getattr(other, name)
            pairs = [(completion.logprobs, other.logprobs)]
            pairs.append((output.prompt_logprobs, expected.prompt_logprobs))
            for found, wanted in pairs:
                for entry, entry_wanted in zip(found or (), wanted or (), strict=True):
                    assert (entry is None) == (entry_wanted is None)
                    for token_id, logprob in (entry or {}).items():
                        assert logprob.logprob == pytest.approx(
                            entry_wanted[token_id].logprob, abs=1e-3
                        )


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("adversary", [oracle, every_third_wrong, stop_tokens])
def test_the_outputs_of_plain_decoding(name: str, adversary: Adversary) -> None:
    """Greedy and sampled, with whatever else a request may ask for, on engines of all kinds."""
    with LLM(**SETTINGS[name], speculative_config=NGRAM) as llm:
        draft_for_demo(llm, adversary)
        assert_same_outputs(generate(llm), plain_outputs())
        llm.engine.block_manager.check()
        assert llm.engine.block_manager.num_free_blocks == llm.engine.executor.num_kv_blocks
