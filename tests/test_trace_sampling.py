"""The pictures of the sampler and of a beam search: what they show is what the engine does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from nanoserve import LLM, SamplingParams, sampler
from nanoserve.extras import lesson, trace
from nanoserve.extras.beam_search import BeamSearch, BeamSearchParams
from nanoserve.extras.trace.beams import BeamTree
from nanoserve.extras.trace.sampling import STAGES

matplotlib = pytest.importorskip("matplotlib")

EVERYTHING = {
    "temperature": 0.7,
    "top_k": 9,
    "top_p": 0.95,
    "min_p": 0.01,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {7: 1.0},
    "allowed_token_ids": list(range(1000)),
    "logits_processors": [lambda output, logits: logits + 0.0],
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    matplotlib.use("agg")
    with lesson.small_llm(48) as small:
        yield small


@pytest.fixture(scope="module")
def question(llm: LLM) -> list[int]:
    return lesson.prompt(llm, "Name five animals.")


@pytest.fixture(autouse=True)
def closed_pictures() -> Iterator[None]:
    yield
    import matplotlib.pyplot as plt

    plt.close("all")


def texts() -> list[str]:
    """All texts of the pictures that were drawn, "" left out."""
    import matplotlib.pyplot as plt
    from matplotlib.text import Text

    figures = [plt.figure(number) for number in plt.get_fignums()]
    found = [text.get_text() for figure in figures for text in figure.findobj(Text)]
    return [text for text in found if text]


# -- token_path --


def test_the_stages_stand_in_the_order_of_the_engine(llm: LLM, question: list[int]) -> None:
    path = trace.token_path(llm, SamplingParams(**EVERYTHING), question, [5, 9])
    assert list(path.stages) == [
        "logits",
        "allowed_token_ids",
        "logit_bias",
        "logits_processors",
        "repetition_penalty 1.1, presence_penalty 0.5",
        "temperature 0.7",
        "min_p 0.01",
        "top_k 9, top_p 0.95",
    ]


def test_parameters_that_change_nothing_are_no_stage(llm: LLM, question: list[int]) -> None:
    path = trace.token_path(llm, SamplingParams(temperature=0), question)
    assert list(path.stages) == ["logits"]
    assert path.uniform is None
    assert path.token_id == int(path.stages["logits"].argmax())
    assert path.probs().tolist() == torch.eye(len(path.probs()))[path.token_id].tolist()


@pytest.mark.parametrize("seed", range(4))
def test_paths_tell_what_generate_says(llm: LLM, question: list[int], seed: int) -> None:
    """Token by token, for both branches of a request."""
    params = SamplingParams(temperature=1.3, presence_penalty=0.5, seed=seed, n=2, max_tokens=6)
    for done in llm.generate(question, params, use_tqdm=False)[0].outputs:
        output = list(done.token_ids)
        for i, token_id in enumerate(output):
            path = trace.token_path(llm, params, question, output[:i], branch=done.index)
            assert path.token_id == token_id


def test_a_penalty_lowers_what_was_said(llm: LLM, question: list[int]) -> None:
    said = llm.get_tokenizer().encode(" dog")
    path = trace.token_path(llm, SamplingParams(presence_penalty=2.0), question, said)
    change = path.stages["presence_penalty 2.0"] - path.stages["logits"]
    assert change.nonzero()[:, 0].tolist() == sorted(set(said))
    assert change[said].tolist() == pytest.approx([-2.0] * len(said), abs=1e-5)


def test_the_sampler_is_as_before(llm: LLM, question: list[int]) -> None:
    before = {name: getattr(sampler, name) for name in STAGES}
    with pytest.raises(ValueError, match="top_p"):
        trace.token_path(llm, SamplingParams(top_p=2), question)
    trace.token_path(llm, SamplingParams(), question)
    assert {name: getattr(sampler, name) for name in before} == before


# -- the pictures --


def test_a_picture_names_stages_tokens_and_the_draw(llm: LLM, question: list[int]) -> None:
    said = llm.get_tokenizer().encode("1. cat\n2. dog\n3.")
    path = trace.token_path(llm, SamplingParams(top_k=3, seed=3), question, said)
    trace.stages("One token", path, llm)
    found = texts()
    assert {"One token", "the model alone", "temperature 1.0", "top_k 3", "dog", "✕"} <= {*found}
    assert any(f"u = {path.uniform:.2f}" in text for text in found)
    trace.filters("Two", {"top_k 3": path, "again": path}, llm)
    assert "all others" in texts()


def test_streams_show_the_numbers_of_the_engine(llm: LLM, question: list[int]) -> None:
    params = SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=3)
    [output] = llm.generate(question, params, use_tqdm=False)
    trace.streams("Streams", {"alone": output}, 5, llm)
    found = texts()
    for done in output.outputs:
        for i in range(len(done.token_ids)):
            path = trace.token_path(llm, params, question, done.token_ids[:i], done.index)
            assert f"{path.uniform:.2f}" in found


def test_frequencies_need_no_more_than_counts(llm: LLM) -> None:
    probs = torch.tensor([0.5, 0.3, 0.2, 0.0])
    trace.frequencies("Counts", probs, torch.tensor([48, 32, 20, 0]), llm, top=3)
    assert "share of 100 draws" in texts()


def test_perplexity_is_that_of_the_log_probabilities(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate("Once upon a time", params, use_tqdm=False)
    assert output.prompt_logprobs is not None
    pairs = list(zip(output.prompt_token_ids, output.prompt_logprobs, strict=True))[1:]
    logprobs: list[Any] = [entry[token_id].logprob for token_id, entry in pairs if entry]
    assert trace.perplexity(output) == pytest.approx(math.exp(-np.mean(logprobs)))
    trace.surprise("Surprise", {"the text": output}, llm)
    assert {"the text", "Once", "upon", "–"} <= {*texts()}


# -- beams --


def test_a_tree_holds_what_the_search_kept(llm: LLM, question: list[int]) -> None:
    """Each round's beams were proposed by the beams of the round before; the best is the result."""
    search = BeamSearch("E", question, BeamSearchParams(3, 5), llm.engine)
    tree = BeamTree(search)
    llm.engine.add(search)
    while not search.is_finished:
        llm.step()
        if len(tree.rounds) == 3:
            trace.beam_blocks("In the middle", tree, llm)
            assert {"E.1", "E.2", "E.3"} <= {*texts()}
    assert len(tree.rounds) == 5
    parents: set[tuple[int, ...]] = {()}
    for nodes in tree.rounds:
        assert {node.tokens[:-1] for node in nodes} == parents
        assert all(len(node.tokens) == len(nodes[0].tokens) for node in nodes)
        parents = {node.tokens for node in nodes if node.fate == "kept"}
        assert len(parents) <= 3
    best = search.get_output().sequences[0]
    assert list(tree.best) == best.tokens[len(question) :]
    [node] = [node for node in tree.rounds[-1] if node.tokens == tree.best]
    assert node.cum_logprob == pytest.approx(best.cum_logprob)
    trace.beam_tree("The tree", tree, llm)
    assert f"{best.cum_logprob:.2f}".replace("-", "−") in texts()
