"""Speculative decoding changes the number of steps and nothing else: not one token, no logprob, no
block, whatever is drafted. With rejection sampling the distribution is that of plain decoding.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_ranks import thread_ranks  # noqa: F401 (a fixture)

from nanoserve import LLM, SamplingParams
from nanoserve.models.config import DEMO_MODEL
from nanoserve.sampler import SamplingBatch, choose_tokens, draw, sample, uniform_noise
from nanoserve.sequence import RequestError
from nanoserve.tools.check_blocks import check_blocks

pytest.importorskip("nanoserve.chapters.speculative")
from nanoserve.chapters.speculative import rejection
from nanoserve.chapters.speculative.config import SpeculativeConfig
from nanoserve.chapters.speculative.proposer import Proposer, find_ngram
from nanoserve.chapters.speculative.suffix import END, speculate

SLOW = pytest.mark.slow
MODELS = {name: DEMO_MODEL / name.split("_")[0] for name in ("draft_model", "medusa", "eagle")}
TARGET = {"model": str(DEMO_MODEL)}  # a draft model that is the target itself is always right
STANDARD = {"rejection_sample_method": "standard"}
SMALL = {"num_gpu_blocks_override": 30, "block_size": 4, "max_num_seqs": 7, "max_model_len": 96}
LAYOUTS: dict[str, dict[str, Any]] = {
    "roomy": {"num_gpu_blocks_override": 300},
    "recompute": {**SMALL, "max_num_batched_tokens": 24},  # and prompts come in chunks
    "swap": {**SMALL, "preemption_mode": "swap", "async_scheduling": True},
}
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0.0, "max_tokens": 20}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("Once upon a time there was a kind dog named Tom.", {**GREEDY, "logprobs": 2}),
    (TURN.format("Tell me a story."), {"temperature": 0.8, "top_p": 0.9, "logprobs": 0}),
    ("a b c a b c a b c a b", {"temperature": 1.1, "top_k": 12, "ignore_eos": True}),
    ("Mia and Pip and Mia", {**GREEDY, "min_tokens": 15, "bad_words": ["Tom", "the dog"]}),
    (TURN.format("Count from 3 to 14."), {"temperature": 0.9, "n": 3}),
    ("a b c a b c a b c a", {**GREEDY, "repetition_penalty": 1.2}),
    ("Once upon a time", {**GREEDY, "stop": ["and", "d"], "prompt_logprobs": 1}),
    ("Repeat: sun moon sun moon", {"temperature": 0.8, "n": 2, "min_tokens": 15}),
    ("What is 17 + 25?", {**GREEDY, "allowed_token_ids": [*range(300, 330)]}),
]


def make(method: str, layout: str, spec: dict[str, Any] | None = None, **options: Any) -> LLM:
    """Three drafts, if `spec`, which is more of speculative_config, does not say otherwise."""
    usual = {"method": method, "num_speculative_tokens": 3, "model": MODELS.get(method)}
    return LLM(speculative_config={**usual, **(spec or {})}, **LAYOUTS[layout], **options)


def ask(llm: LLM, prompt: Any, **fields: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**{**GREEDY, **fields}), use_tqdm=False)[0]


def answer(llm: LLM) -> list[Any]:
    wanted = [SamplingParams(**{"seed": 7, "max_tokens": 18, **each}) for _, each in REQUESTS]
    return llm.generate([prompt for prompt, _ in REQUESTS], wanted, use_tqdm=False)


@cache
def plain() -> list[Any]:
    with LLM(**LAYOUTS["roomy"]) as llm:
        return answer(llm)


def texts_of(output: Any) -> list[Any]:
    return [(each.token_ids, each.text, each.finish_reason) for each in output.outputs]


def logprobs_of(output: Any) -> list[float]:
    positions = [output.prompt_logprobs, *(each.logprobs for each in output.outputs)]
    entries = [entry for each in positions for entry in each or () if entry]
    return [value.logprob for entry in entries for value in entry.values()]


def check(llm: LLM, outputs: list[Any], only_greedy: bool = False) -> None:
    """The outputs are those of plain decoding, and no block is lost."""
    for output, expected, (_, fields) in zip(outputs, plain(), REQUESTS, strict=True):
        if fields["temperature"] == 0 or not only_greedy:
            assert texts_of(output) == texts_of(expected)
            assert logprobs_of(output) == pytest.approx(logprobs_of(expected), abs=1e-3)
    check_blocks(llm.engine.block_manager)
    assert not llm.engine.block_manager.block_tables


def counts(llm: LLM) -> np.ndarray:
    """Drafts that were accepted, and all."""
    scheduler: Any = llm.engine.scheduler
    return np.array([scheduler.num_accepted_tokens, scheduler.num_draft_tokens])


@pytest.fixture(autouse=True)
def no_trouble(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No proposer has failed, and no step: either would be made good, and not be seen."""
    yield
    assert not [each for each in caplog.get_records("call") if each.levelname != "INFO"]


WAYS: list[Any] = [
    ("ngram", "recompute", {"prompt_lookup_min": 1}, 0.2),
    ("suffix", "swap", {"num_speculative_tokens": 8}, 0.3),
    (
        "draft_model",
        "recompute",
        {**TARGET, "num_speculative_tokens_per_batch_size": [[1, 5, 4], [6, 99, 0]]},
        1,
    ),
    ("medusa", "recompute", {}, 0.2),
    ("eagle", "swap", {"num_speculative_tokens": 5}, 0.3),
    pytest.param(("draft_model", "swap", {}, 0.2), marks=SLOW),
    pytest.param(("draft_model", "swap", TARGET | STANDARD, 1), marks=SLOW),
    pytest.param(("eagle", "recompute", {"draft_sample_method": "greedy"}, 0.4), marks=SLOW),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_outputs_of_plain_decoding(way: tuple[str, str, dict[str, Any], float]) -> None:
    """That the target is always right as its own drafter says that the drafter's keys and values
    are, whatever happened to their blocks; and under "standard" that each draft is compared with
    what it was drawn from: p = q."""
    method, layout, spec, least = way
    with make(method, layout, spec) as llm:
        check(llm, answer(llm))
        num_accepted, num_drafts = counts(llm)
        assert num_drafts > 30
        assert num_accepted >= least * num_drafts


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_rejection_sampling_of_greedy_requests_beside_sampled_ones(method: str) -> None:
    with make(method, "recompute", STANDARD) as llm:
        check(llm, answer(llm), only_greedy=True)
        assert counts(llm)[0] > 5


@pytest.mark.usefixtures("thread_ranks")
@pytest.mark.parametrize("method", ["ngram", pytest.param("eagle", marks=SLOW)])
def test_two_ranks_draft_what_one_drafts(method: str) -> None:
    """The other rank learns which drafts were accepted."""
    found = []
    for size in (1, 2):
        with make(method, "recompute", tensor_parallel_size=size) as llm:
            check(llm, answer(llm))
            found.append([*counts(llm)])
    assert found[0] == found[1] != [0, 0]


# -- any drafts --


class Adversary(Proposer):
    """Knows the future, and drafts what a test wants."""

    def propose_one(self, seq_id: int, token_ids: np.ndarray, most: int) -> list[int]:
        known = token_ids.tolist()
        texts = [o.prompt_token_ids + list(c.token_ids) for o in plain() for c in o.outputs]
        futures = [text[len(known) :] for text in texts if text[: len(known)] == known]
        return self.drafts([*max(futures, default=[], key=len), *[7] * most], len(known))


DRAFTS: dict[str, Callable[[list[int], int], list[int]]] = {
    "right": lambda future, at: future * 2,  # and far too many
    "wrong at times": lambda future, at: [t ^ ((at + i) % 3 < 1) for i, t in enumerate(future)],
    "ends": lambda future, at: [2 if i % 4 == 3 else token for i, token in enumerate(future)],
    "no tokens": lambda future, at: [future[0], [-1, 10**6][at % 2]],
    "fails": lambda future, at: future[: 3 // (at % 3)],
}  # fmt: skip


def test_any_drafts(caplog: pytest.LogCaptureFixture) -> None:
    """Also what is wrong with a proposer of one's own; and a step that fails, and an abort."""
    spec = {"model": f"{__name__}.Adversary", "num_speculative_tokens": 4}
    with make("custom_class", "recompute", spec) as llm:
        executor, proposer = llm.engine.executor, llm.engine.executor.runner.proposer
        for name, proposer.drafts in DRAFTS.items():
            before = counts(llm)
            check(llm, answer(llm))
            num_accepted, num_drafts = counts(llm) - before
            assert num_drafts > 30 or name == "no tokens"
            assert name != "right" or num_accepted > 0.9 * num_drafts
            assert ("a proposer failed" in caplog.text) == (name in ("no tokens", "fails"))
            caplog.clear()
        launch, number = executor.launch, iter(range(10**6))

        def disturb(step: Any) -> Any:
            if next(number) == 4:
                llm.abort_request("beside")
                raise RuntimeError("planted")
            return launch(step)

        executor.launch, proposer.drafts = disturb, DRAFTS["right"]
        llm.add_request("beside", "Once", SamplingParams(max_tokens=60))
        check(llm, answer(llm))
        assert "planted" in caplog.text
        caplog.clear()


def test_an_error_behind_a_draft_is_found_in_its_place(caplog: pytest.LogCaptureFixture) -> None:
    with make("draft_model", "roomy", TARGET) as llm:
        runner, expected = llm.engine.executor.runner, ask(llm, "Once upon a time")
        collect, place = runner.collect, len(expected.prompt_token_ids) + 7

        def plant(pending: Any, tokens: list[Any], output: Any) -> None:
            pairs = zip(pending.samples, tokens, strict=True)
            tokens = [RequestError("planted") if at[1] == place else token for at, token in pairs]
            collect(pending, tokens, output)

        runner.collect = plant
        [found] = ask(llm, "Once upon a time").outputs
        assert [found.stop_reason, "a proposer failed" in caplog.text] == ["planted", False]
        assert list(found.token_ids) == list(expected.outputs[0].token_ids)[:7]
        caplog.clear()


def test_no_slot_is_behind_the_longest_sequence() -> None:
    options = {"num_gpu_blocks_override": 40, "block_size": 1, "max_model_len": 40}
    spec = {"method": "eagle", "model": str(MODELS["eagle"]), "num_speculative_tokens": 9}
    found = []
    for config in (None, spec):
        with LLM(**options, speculative_config=config) as llm:
            found.append(texts_of(ask(llm, "a b a b a", max_tokens=99, ignore_eos=True)))
    assert found[0] == found[1]


def test_who_gets_drafts() -> None:
    """Not those whose processors or penalties read the tokens so far."""
    with make("ngram", "roomy", {"prompt_lookup_min": 1}) as llm:
        for fields in ({"presence_penalty": 0.5}, {"logits_processors": [lambda _, row: row]}):
            ask(llm, "a b a b a b a", **fields)
        assert counts(llm)[1] == 0
        ask(llm, "a b a b a b a", min_tokens=5, logit_bias={3: 1.0})
        assert counts(llm)[1] > 0


def test_an_earlier_answer_is_found_by_those_who_may_know_it() -> None:
    """A request with a salt learns from its own text only, and nobody learns from it."""
    num_right = []
    with make("suffix", "roomy", {"num_speculative_tokens": 8}) as llm:
        for salt in ("a", None, None, "a"):
            before, prompt = counts(llm), TURN.format("Tell me a story of a fox.")
            ask(llm, {"prompt": prompt, "cache_salt": salt}, max_tokens=50)
            num_right.append((counts(llm) - before)[0])
    assert num_right[0] == num_right[1] == num_right[3] < num_right[2] / 2


# -- n-grams and suffixes, by their definitions --

TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@given(text=TEXT, least=st.integers(1, 4), more=st.integers(0, 3))
def test_which_n_gram_is_found(text: list[int], least: int, more: int) -> None:
    """The longest match; of these the earliest, as in vLLM."""
    ends = [
        end
        for length in range(min(least + more, len(text) - 1), least - 1, -1)
        for end in range(length, len(text))
        if text[end - length : end] == text[len(text) - length :]
    ]
    assert find_ngram(np.array(text), least, least + more) == (ends[0] if ends else None)


def follow(texts: list[list[int]], context: list[int], limit: int, least: float) -> Any:
    """(score, drafts): by trying all places."""
    drafts, probability, score = [], 1.0, 0.0
    while len(drafts) < limit:
        size = len(context + drafts)
        places = [(text, i) for text in texts for i in range(size, len(text))]
        found = [text[i] for text, i in places if text[i - size : i] == context + drafts]
        token, count = Counter(found[::-1]).most_common(1)[0] if found else (0, 0)
        probability *= count / max(1, len(found))  # of equals the latest
        if not found or probability < least:
            break
        drafts, score = [*drafts, token], score + probability
    return score, drafts


@given(
    texts=st.lists(TEXT, min_size=1, max_size=3), depth=st.integers(2, 8),
    factor=st.sampled_from([0.0, 0.5, 1.0, 2.0]), least=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    other=st.lists(st.integers(0, 3), min_size=1, max_size=8),
)  # fmt: skip
def test_drafts_of_suffixes_are_those_of_a_search(
    texts: list[list[int]], depth: int, factor: float, least: float, other: list[int]
) -> None:
    limits = [min(int(factor * length), depth - length) for length in range(depth)]
    joined = np.array([token for text in texts for token in [*text, END]])
    for last in (texts[-1], other):
        lengths = range(min(depth - 1, len(last)), 0, -1)
        drafts = [follow(texts, last[-length:], limits[length], least) for length in lengths]
        best = max([*drafts, (0.0, [])], key=lambda draft: round(draft[0], 9))
        assert speculate(joined, np.array(last), limits, least) == (pytest.approx(best[0]), best[1])


# -- rejection sampling --

VOCAB, NUM_SEEDS = 4, 10_000
# Logits by the token before: of the target, and of a drafter that is often wrong.
P = torch.tensor([[1.0, 0.2, -0.5, 0.4], [0.0, 1.5, 0.3, -1], [0, 0, -99, 1], [2, 0, -1, 0.5]])
Q = torch.tensor([[0, 1.8, 0.7, 0.2], [1.2, 0.2, 1.5, -1.5], [-1.5, 0.7, 1, 0], [0, 0, 1.5, 0]])
STREAMS = {"uniform": 0, "accept": rejection.ACCEPT, "recover": rejection.RECOVER}
PLAIN = {"temperature": 1.0}
FILTERS = [PLAIN, {"temperature": 1.3, "top_k": 3}, {"temperature": 0.8, "top_p": 0.8}]


def excess(filters: dict[str, float]) -> float:
    """The chi-square statistic of three tokens after two drafts, divided by a limit that a right
    sampler exceeds with a probability below 1e-9 (Laurent and Massart 2000, lemma 1)."""
    rows = {name: torch.full((3 * NUM_SEEDS,), value) for name, value in filters.items()}

    def probs_of(logits: torch.Tensor) -> torch.Tensor:
        some = {name: values[: len(logits)] for name, values in rows.items()}
        return rejection.compute_probs(logits, SamplingBatch(**some))

    def noise(stream: int, *places: int) -> torch.Tensor:
        positions, seeds = np.repeat(places, NUM_SEEDS), np.tile(np.arange(NUM_SEEDS), len(places))
        return torch.from_numpy(uniform_noise(seeds, 0 * seeds + stream, positions))

    before, q = torch.zeros(3, NUM_SEEDS, dtype=torch.long), torch.zeros(3, NUM_SEEDS, VOCAB)
    for place in range(2):
        q[place] = probs_of(Q[before[place]])
        before[place + 1] = draw(q[place], noise(0, place))
    drafts = torch.cat([before[1:], torch.full((1, NUM_SEEDS), -1)])
    batch = rejection.DraftedBatch(
        draft_token_ids=drafts.flatten(),
        draft_probs=q.flatten(0, 1),
        **{name: noise(stream, 0, 1, 2) for name, stream in STREAMS.items()},
        **rows,
    )
    sampler = rejection.RejectionSampler(choose_tokens)
    found = sample(P[before.flatten()], batch, sampler).token_ids.view(3, -1)
    tokens, is_right = found[:1], torch.ones(NUM_SEEDS, dtype=torch.bool)
    for place in (1, 2):  # behind a wrong draft come the tokens of plain decoding
        is_right = is_right & (found[place - 1] == drafts[place - 1])
        alone = draw(probs_of(P[tokens[-1]]), noise(0, place))
        tokens = torch.cat([tokens, torch.where(is_right, found[place], alone)[None]])
    p = probs_of(P).double()
    expected = NUM_SEEDS * torch.einsum("a,ab,bc->abc", p[0], p, p).flatten()
    cells = (tokens[0] * VOCAB + tokens[1]) * VOCAB + tokens[2]
    observed, is_possible = cells.bincount(minlength=VOCAB**3), expected > 1e-6
    assert not observed[~is_possible].any()
    statistic = ((observed - expected) ** 2 / expected)[is_possible].sum()
    degrees, x = is_possible.sum() - 1, 9 * math.log(10)
    return float(statistic / (degrees + 2 * (degrees * x) ** 0.5 + 2 * x))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_joint_distribution_is_exact(filters: dict[str, float]) -> None:
    assert excess(filters) < 1


def test_a_mistake_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One random number that rejects and recovers."""
    works = rejection.rejection_sample
    mistake = lambda p, q, drafts, accept, recover: works(p, q, drafts, accept, accept)  # noqa: E731
    monkeypatch.setattr(rejection, "rejection_sample", mistake)
    assert excess(PLAIN) > 1


# -- what is refused, and what a drafter may be --


MISFITS: list[Any] = [
    ("draft_model", {"vocab_size": 2047}), ("medusa", {"hidden_size": 64}),
    ("medusa", {"num_heads": 2}), ("eagle", {"num_hidden_layers": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "changes"), MISFITS)
def test_drafters_that_do_not_fit(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MODELS[method], tmp_path / "drafter"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ValueError, match=str(folder)):
        make(method, "roomy", {"model": str(folder)})


def test_options() -> None:
    read = SpeculativeConfig.read
    assert read(json.dumps(NGRAM)) == read({**NGRAM, "model": None}) == read(read(NGRAM))
    assert read({"method": "suffix"}).num_speculative_tokens == 24
    config = read({**NGRAM, "prompt_lookup_min": 3})
    assert (config.prompt_lookup_min, config.prompt_lookup_max) == (3, 3)
    table = [[1, 3, 3], [4, 8, 1], [9, 99, 0]]
    config = read({**NGRAM, "num_speculative_tokens_per_batch_size": table})
    assert [config.num_tokens_for(size) for size in (1, 3, 4, 8, 9, 200)] == [3, 3, 1, 1, 0, 0]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
BAD: dict[str, Any] = {
    "promt_lookup_max": {**NGRAM, "promt_lookup_max": 2}, "n-gram": {**NGRAM, "method": "n-gram"},
    "num_speculative_tokens": {"method": "ngram"}, "model": {**NGRAM, "method": "eagle"},
    "num_spec": {**NGRAM, "num_speculative_tokens": "3"}, "speculative_config": [1],
    "prompt_lookup_min": {**NGRAM, "prompt_lookup_max": 2, "prompt_lookup_min": 3},
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_named(name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=name):
        SpeculativeConfig.read(BAD[name])
