"""Beam search against transformers' logits: a loop that knows only the rule, and all texts."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from nanoserve import LLM
from nanoserve.chapters.beam_search import BeamSearchParams

VOCAB_SIZE, EOS = 7, 3
PROMPTS = [[5, 2, 1, 1, 6], [4], [5, 2, 1, 1, 0, 2]]


@pytest.fixture(scope="module")
def reference() -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
    config = Qwen3Config(vocab_size=VOCAB_SIZE, eos_token_id=EOS, **sizes, **heads)
    return Qwen3ForCausalLM(config).eval()


@pytest.fixture(scope="module")
def llm(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Few blocks: a wide search is preempted."""
    folder: Path = tmp_path_factory.mktemp("beams")
    reference.save_pretrained(folder)
    few = {"num_gpu_blocks_override": 12, "block_size": 2, "max_model_len": 16}
    with LLM(folder, dtype="float32", max_logprobs=-1, **few) as llm:
        yield llm


@torch.no_grad()
def logprobs_of(reference: Any, tokens: list[int]) -> list[float]:
    return reference(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).tolist()


def score(beam: tuple[list[int], float], params: BeamSearchParams) -> float:
    tokens, cum_logprob = beam
    length = len(tokens) - (tokens[-1] == EOS and not params.ignore_eos)
    return cum_logprob / length**params.length_penalty


def search(reference: Any, prompt: list[int], params: BeamSearchParams) -> list[Any]:
    """vLLM's rule, without an engine: (tokens, cumulative log-probability), best first."""
    beams, completed = [(prompt, 0.0)], []
    for _ in range(params.max_tokens):
        others = []
        for tokens, cum_logprob in beams:
            logprobs = logprobs_of(reference, tokens)
            likeliest = sorted(range(VOCAB_SIZE), key=lambda token: -logprobs[token])
            for token in likeliest[: 2 * params.beam_width]:
                is_over = token == EOS and not params.ignore_eos
                beam = ([*tokens, token], cum_logprob + logprobs[token])
                (completed if is_over else others).append(beam)
        beams = sorted(others, key=lambda beam: -score(beam, params))[: params.beam_width]
    return sorted(completed + beams, key=lambda beam: -score(beam, params))[: params.beam_width]


@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.parametrize(("width", "length", "penalty"), [(3, 8, 0.0), (4, 6, 1.0), (8, 3, -2.0)])
def test_the_beams_are_those_of_a_naive_loop(
    llm: LLM, reference: Any, width: int, length: int, penalty: float, ignore_eos: bool
) -> None:
    params = BeamSearchParams(width, length, ignore_eos, length_penalty=penalty)
    outputs = llm.beam_search(PROMPTS, params, concurrency_limit=width % 3 or None)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = search(reference, prompt, params)
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        for beam, (tokens, cum_logprob) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(cum_logprob, abs=1e-4)
            assert (beam.finish_reason == "stop") == (tokens[-1] == EOS and not params.ignore_eos)
            assert beam.orig_prompt["prompt_token_ids"] == prompt
            chosen = zip(tokens[len(prompt) :], beam.logprobs, strict=True)
            total = sum(candidates[token].logprob for token, candidates in chosen)
            assert beam.cum_logprob == pytest.approx(total)


def test_the_widest_search_finds_the_likeliest_of_all_texts(llm: LLM, reference: Any) -> None:
    params, prompt = BeamSearchParams(VOCAB_SIZE**2, 3, ignore_eos=True), PROMPTS[0]
    best, [output] = -torch.inf, llm.beam_search([prompt], params)
    for text in product(range(VOCAB_SIZE), repeat=2):
        cum_logprob = sum(logprobs_of(reference, [*prompt, *text[:i]])[text[i]] for i in (0, 1))
        best = max(best, cum_logprob + max(logprobs_of(reference, [*prompt, *text])))
    assert output.sequences[0].cum_logprob == pytest.approx(best, abs=1e-4)
    pool = llm.llm_engine.block_manager.pool
    assert len(pool.free_queue) == pool.num_blocks


def test_bad_searches_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="beam_width"):
        BeamSearchParams(0, 5)
    with pytest.raises(ValueError, match="max_tokens"):
        BeamSearchParams(2, 0)
    with pytest.raises(ValueError, match="empty"):
        llm.beam_search([[5], []], BeamSearchParams(2, 2))
    with LLM() as demo, pytest.raises(ValueError, match="max_logprobs"):
        demo.beam_search("Hi", BeamSearchParams(11, 5))
    with pytest.raises(TypeError, match="BeamSearchParams"):
        llm.beam_search([[5]], {"beam_width": 2})
