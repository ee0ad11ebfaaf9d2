"""Speculative decoding changes the number of steps and nothing else: not one token, no logprob, no
block. Whatever is drafted.

The properties of test_scheduler.py (the control plane) and of test_async_scheduling.py (the whole
engine) are played here with drafts, right and wrong ones; then the demo model.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_async_scheduling
import test_scheduler
import torch
from engines import EOS, VOCAB_SIZE, change_text, expect, finish, make_engine, params
from fakes import add_beam_search, next_token
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from nanoserve import LLM, EngineArgs, SamplingParams
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


WHATEVER = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=False
)
AT_LENGTH = settings(WHATEVER, max_examples=800)
control_plane_histories = given(
    options=test_scheduler.engine_options(),
    speculation=speculation,
    adversary=st.sampled_from(ADVERSARIES),
    requests=st.lists(test_scheduler.requests, min_size=1, max_size=9),
    disturbances=st.lists(test_scheduler.disturbances, max_size=4),
)
engine_histories = given(
    options=test_async_scheduling.engine_options(),
    speculation=speculation,
    adversary=st.sampled_from(ADVERSARIES),
    arrivals=st.lists(test_async_scheduling.ARRIVALS, min_size=1, max_size=10),
    troubles=st.lists(test_async_scheduling.TROUBLE, max_size=6),
)


def play_in_the_control_plane(
    options: dict[str, Any], speculation: dict[str, Any], adversary: Adversary, **drawn: Any
) -> None:
    history = test_scheduler.History({**options, "speculative_config": speculation}, **drawn)
    draft_with(adversary, history.engine.executor)
    history.play()
    event(f"accepted: {any(seq.metrics.num_accepted_tokens for seq in history.sequences)}")


def play_in_the_engine(
    options: dict[str, Any],
    speculation: dict[str, Any],
    adversary: Adversary,
    arrivals: list[Any],
    troubles: list[tuple[int, str, int]],
) -> None:
    engine = make_engine(**options, speculative_config=speculation)
    draft_with(adversary, engine.executor)
    workload = test_async_scheduling.Workload(engine)
    with pytest.MonkeyPatch.context() as monkeypatch:
        change_text(monkeypatch, workload.find_stop)
        workload.play(arrivals, {step: (what, number) for step, what, number in troubles})
    workload.check_results()


@WHATEVER
@control_plane_histories
def test_same_tokens_and_no_block_lost_in_the_control_plane(**drawn: Any) -> None:
    """Chunks, both preemptions, forks, priorities, aborts, failing steps, the prefix cache."""
    play_in_the_control_plane(**drawn)


@WHATEVER
@engine_histories
def test_same_tokens_and_no_block_lost_in_the_engine(**drawn: Any) -> None:
    """Deltas, beam searches, requests that fail, and the search for them; after each step, every
    block that the prefix cache can find holds the tokens that it is found by."""
    play_in_the_engine(**drawn)


@pytest.mark.slow
@AT_LENGTH
@control_plane_histories
def test_many_histories_of_the_control_plane(**drawn: Any) -> None:
    play_in_the_control_plane(**drawn)


@pytest.mark.slow
@AT_LENGTH
@engine_histories
def test_many_histories_of_the_engine(**drawn: Any) -> None:
    play_in_the_engine(**drawn)


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
    assert output.metrics.num_draft_tokens == 15  # of all three


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
        assert any(item.num_spec_tokens for item in outputs[0].scheduled) == speculates


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


@pytest.mark.parametrize(
    ("name", "adversary"), [("roomy", stop_tokens), ("recompute", every_third_wrong)]
)
def test_the_outputs_of_plain_decoding(name: str, adversary: Adversary) -> None:
    """Greedy and sampled, with whatever else a request may ask for, on engines of all kinds."""
    check_outputs(name, adversary)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("adversary", [oracle, every_third_wrong, stop_tokens])
def test_more_outputs_of_plain_decoding(name: str, adversary: Adversary) -> None:
    check_outputs(name, adversary)


def check_outputs(name: str, adversary: Adversary) -> None:
    with LLM(**SETTINGS[name], speculative_config=NGRAM) as llm:
        draft_for_demo(llm, adversary)
        assert_same_outputs(generate(llm), plain_outputs())
        llm.engine.block_manager.check()
        assert llm.engine.block_manager.num_free_blocks == llm.engine.executor.num_kv_blocks


@lru_cache(maxsize=1)
def speculating_llm() -> LLM:
    """N-grams on the demo model, for tests that leave it as they found it."""
    return LLM(num_kv_blocks=300, speculative_config=NGRAM)


def test_n_grams_save_steps_where_a_text_repeats_itself() -> None:
    llm = speculating_llm()
    wanted = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    [output] = llm.generate("a b c d a b c d a b c d a b", wanted, use_tqdm=False)
    with LLM(num_kv_blocks=32) as plain:
        [expected] = plain.generate("a b c d a b c d a b c d a b", wanted, use_tqdm=False)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.metrics.num_accepted_tokens > 20


@pytest.mark.slow
def test_through_transformers() -> None:
    with LLM(num_kv_blocks=64, model_impl="transformers", speculative_config=NGRAM) as llm:
        draft_for_demo(llm, every_third_wrong)
        fields = [REQUESTS[0], REQUESTS[1]]
        outputs = llm.generate(
            [PROMPTS[0]] * 2, [SamplingParams(**each) for each in fields], use_tqdm=False
        )
    assert_same_outputs(outputs, plain_outputs()[:2])
    assert all(output.metrics.num_accepted_tokens for output in outputs)


@pytest.mark.slow
def test_on_two_ranks() -> None:
    """The other rank learns which drafts were accepted."""
    with LLM(num_kv_blocks=300, tensor_parallel_size=2, speculative_config=NGRAM) as llm:
        draft_for_demo(llm, every_third_wrong)
        assert_same_outputs(generate(llm), plain_outputs())


def test_an_error_behind_accepted_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The logits are NaN at one position, which a draft reaches before its time: the request gets
    the tokens before it, then ends; another one in the same steps is served."""
    llm = speculating_llm()
    runner = llm.engine.executor.runner
    futures = Future_()
    plain = [plain_outputs()[0], plain_outputs()[len(REQUESTS)]]
    broken = len(plain[0].prompt_token_ids) + 7  # no token can be sampled at this position
    works = runner._sample_on_rank_0

    def sample(logits: Any, rows: Any, branches: Any, positions: Any) -> Any:
        is_broken = (positions == broken) & (runner.batch.seq_ids[rows] == victim)
        logits = logits.masked_fill(torch.from_numpy(is_broken)[:, None], torch.nan)
        return works(logits, rows, branches, positions)

    monkeypatch.setattr(runner, "_sample_on_rank_0", sample)
    monkeypatch.setattr(
        runner.proposer,
        "propose_one",
        lambda seq_id, token_ids, most: futures.of(token_ids.tolist(), most),
    )
    for i, output in enumerate(plain):
        llm.add_request(str(i), output.prompt_token_ids, SamplingParams(**GREEDY))
    victim = llm.engine.output_processor.requests["0"].root.seq_id  # type: ignore[attr-defined]
    last: dict[str, Any] = {}
    while llm.has_unfinished_requests():
        last |= {output.request_id: output.outputs[0] for output in llm.step()}
    assert last["0"].finish_reason == "error"
    assert last["0"].token_ids == plain[0].outputs[0].token_ids[:7]
    assert last["1"].token_ids == plain[1].outputs[0].token_ids
    llm.engine.block_manager.check()


def test_other_random_numbers_for_rejection_sampling() -> None:
    """With rejection_sample_method "standard", greedy requests have the tokens of plain decoding;
    requests that sample have others of the same distribution (test_rejection.py)."""
    pytest.importorskip("nanoserve.extras.speculative.rejection")
    options = {**NGRAM, "rejection_sample_method": "standard"}
    with LLM(num_kv_blocks=300, speculative_config=options) as llm:
        draft_for_demo(llm, every_third_wrong)
        outputs = generate(llm)
        greedy = [i for i, each in enumerate(REQUESTS * len(PROMPTS)) if not each["temperature"]]
        assert_same_outputs([outputs[i] for i in greedy], [plain_outputs()[i] for i in greedy])
        assert any(output.metrics.num_accepted_tokens for output in outputs)
        llm.engine.block_manager.check()


# -- metrics --


def test_metrics_of_drafts() -> None:
    """vLLM's names; in Prometheus one number for each position."""
    metrics = pytest.importorskip("nanoserve.extras.metrics")
    engine = speculating_engine(lambda future, known, most: [*future(2), 0, 0][:most])
    metrics.collect_metrics(engine)
    engine.add_request("a", [1, 2, 3], params(max_tokens=10))
    [output] = finish(engine).values()
    prefix = "vllm:spec_decode_"
    found = {each.name: each for each in metrics.get_metrics(engine) if prefix in each.name}
    numbers = [
        found[f"{prefix}num_{name}"].value for name in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    mine = output.metrics
    assert numbers == [mine.num_drafts, mine.num_draft_tokens, mine.num_accepted_tokens]
    assert numbers == [3, 10, 6]
    assert found[f"{prefix}num_accepted_tokens_per_pos"].values == [3, 3, 0, 0]
    pytest.importorskip("prometheus_client")
    text = metrics.PrometheusStatLogger(engine).render().decode()
    assert 'num_accepted_tokens_per_pos_total{engine="0",model_name=' in text
    assert 'position="3"' in text


def test_no_metrics_of_drafts_without_them() -> None:
    metrics = pytest.importorskip("nanoserve.extras.metrics")
    engine = make_engine()
    metrics.collect_metrics(engine)
    assert not [each for each in metrics.get_metrics(engine) if "spec_decode" in each.name]


# -- n-grams --


def longest_earliest_match(token_ids: list[int], least: int, longest: int) -> int | None:
    """The definition: try every length and every place."""
    for length in range(min(longest, len(token_ids) - 1), least - 1, -1):
        wanted = token_ids[len(token_ids) - length :]
        for end in range(length, len(token_ids)):
            if token_ids[end - length : end] == wanted:
                return end
    return None


@given(
    token_ids=st.lists(st.integers(0, 2), min_size=1, max_size=24),
    least=st.integers(1, 4),
    more=st.integers(0, 3),
)
@example(token_ids=[1, 2, 3, 9, 2, 3], least=1, more=2)
@example(token_ids=[5], least=1, more=0)
@example(token_ids=[5, 5, 5, 5], least=2, more=2)
def test_which_n_gram_is_found(token_ids: list[int], least: int, more: int) -> None:
    """The longest match; of these the earliest, as in vLLM. A match may overlap the end."""
    found = proposer.find_ngram(np.array(token_ids, np.int32), least, least + more)
    assert found == longest_earliest_match(token_ids, least, least + more)


# -- options --


def test_options() -> None:
    read = SpeculativeConfig.read
    assert read('{"method": "ngram", "num_speculative_tokens": 3}') == read(
        {"method": "ngram", "num_speculative_tokens": 3, "model": None, "revision": None}
    )
    assert read(None) is read({}) is read("") is None
    lookup = [(4, None), (None, 3), (None, None), (5, 2)]
    for (most, least), resolved in zip(lookup, [(4, 4), (3, 3), (5, 5), (5, 2)], strict=True):
        options = {**NGRAM, "prompt_lookup_max": most, "prompt_lookup_min": least}
        spec = read(options)
        assert (spec.prompt_lookup_max, spec.prompt_lookup_min) == resolved
    assert read({"method": "suffix"}).num_speculative_tokens == 24
    table = read({**NGRAM, "num_speculative_tokens_per_batch_size": [[5, 8, 0], [1, 3, 2]]})
    assert [table.num_tokens_for(size) for size in (1, 3, 4, 5, 8, 9)] == [2, 2, 2, 0, 0, 0]
    args = EngineArgs(speculative_config=NGRAM)
    assert EngineArgs(**vars(args)).speculative_config == read(NGRAM)


@pytest.mark.parametrize(
    ("given_", "error", "message"),
    [
        ("{", ValueError, "not JSON"),
        (3, TypeError, "must be a dict"),
        ({"method": "n-gram"}, ValueError, "allowed: ngram, suffix, draft_model"),
        ({"method": "ngram"}, ValueError, "num_speculative_tokens is 0; allowed: 1 to 1000"),
        ({**NGRAM, "num_speculative_tokens": "3"}, TypeError, "must be an int"),
        ({**NGRAM, "prompt_lookup_max": 2, "prompt_lookup_min": 3}, ValueError, "Lower the first"),
        ({**NGRAM, "promt_lookup_max": 2}, TypeError, "Did you mean 'prompt_lookup_max'"),
        ({**NGRAM, "quantization": "fp8"}, ValueError, "allowed here: None"),
        ({**NGRAM, "draft_tensor_parallel_size": 2}, ValueError, "allowed here: None or 1"),
        ({**NGRAM, "rejection_sample_method": "block"}, ValueError, "strict, standard"),
        ({"method": "eagle", "num_speculative_tokens": 2}, ValueError, "needs a model"),
        *(
            ({**NGRAM, "num_speculative_tokens_per_batch_size": table}, ValueError, "list of")
            for table in ([1], [], [[1, 5, 2], [5, 9, 1]], [[2, 5, 1]], [[1, 3, 2], [6, 5, 1]])
        ),
    ],
)
def test_bad_options(given_: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        EngineArgs(speculative_config=given_)


def test_a_class_of_your_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(proposer, "Parrot", Parrot, raising=False)
    name = f"{proposer.__name__}.Parrot"
    options = {"method": "custom_class", "model": name, "num_speculative_tokens": 2}
    wanted = SamplingParams(temperature=0, max_tokens=6)
    with LLM(num_kv_blocks=32, speculative_config=options) as llm:
        [output] = llm.generate("Once", wanted, use_tqdm=False)
        assert output.metrics.num_drafts
    for model, message in (
        ("no.such.Class", r"no\.such\.Class.*cannot be imported"),
        ("broken_module.Class", r"cannot be imported \(ZeroDivisionError: division by zero\)"),
        (f"{proposer.__name__}.Proposer", r"Proposer.*, with a method propose"),
        ("os.system", r"function system.*; allowed with method 'custom_class': a subclass of "),
        ("os.PathLike", r"PathLike.*; allowed with method 'custom_class': a subclass of "),
        ("Foo", r"model is 'Foo'; allowed with method 'custom_class': package.module.ClassName"),
    ):
        with pytest.raises(ValueError, match=message):
            LLM(num_kv_blocks=32, speculative_config={**options, "model": model})


class Parrot(proposer.TokenProposer):  # type: ignore[name-defined, misc]
    """The example of the module."""

    def propose_one(self, seq_id: int, token_ids: np.ndarray, most: int) -> list[int]:
        return token_ids[-1:].tolist() * most


def test_without_the_chapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nanoserve.extras.speculative.config", None)
    with pytest.raises(ValueError, match=r"needs nanoserve/extras/speculative.*Leave"):
        EngineArgs(speculative_config=NGRAM)
    assert EngineArgs().speculative_config is None


def test_a_proposer_that_fails_brings_no_drafts(caplog: pytest.LogCaptureFixture) -> None:
    plain = plain_outputs()[0]
    llm = speculating_llm()
    with pytest.MonkeyPatch.context() as monkeypatch:
        proposer = llm.engine.executor.runner.proposer
        monkeypatch.setattr(proposer, "propose_one", lambda *known: 1 / 0)
        [output] = llm.generate([plain.prompt_token_ids], SamplingParams(**GREEDY), use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert "a proposer failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("ids", [[10**5], [2**40], [-1], [-1, 5], [-5]])
def test_an_id_that_is_no_token_is_not_drafted(ids: list[int]) -> None:
    """Behind a right draft; the model could not read it."""
    plain = plain_outputs()[0]
    futures = Future_()
    llm = speculating_llm()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(
            llm.engine.executor.runner.proposer,
            "propose_one",
            lambda seq_id, token_ids, most: [*futures.of(token_ids.tolist(), 1), *ids][:most],
        )
        wanted = SamplingParams(**GREEDY)
        [output] = llm.generate([plain.prompt_token_ids], wanted, use_tqdm=False)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
