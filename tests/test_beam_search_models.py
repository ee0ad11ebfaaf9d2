"""Beam search on real models: against a naive loop over transformers' logits, and against
transformers' own search where its rule and vLLM's are the same."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import fail_row
from oracle import reference_logits, reference_model

from nanoserve import LLM, SamplingParams
from nanoserve.config import DEMO_MODEL
from nanoserve.engine import StepReport
from nanoserve.extras.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from nanoserve.sequence import SchedulerOutput

STORY = "Once upon a time there was a little dog."
NEAR = 1e-3  # scores nearer than this are a tie: sums of float32 log-probabilities


@cache
def naive_beam_search(
    folder: Path, prompt: tuple[int, ...], settings: tuple[Any, ...], eos_token_ids: frozenset[int]
) -> list[tuple[list[int], float]]:
    """(tokens, score), best first: the rule, with the whole text computed anew each time.
    settings: the fields of BeamSearchParams.

    Each beam has its 2 * beam_width likeliest tokens as candidates. Candidates that end in EOS are
    completed. The beam_width best of the others go on. After max_tokens steps all are completed.
    """

    params = BeamSearchParams(*settings)

    def score(tokens: list[int], total: float) -> float:
        length = len(tokens) - (tokens[-1] in eos_token_ids)
        return total / length**params.length_penalty

    if params.ignore_eos:
        eos_token_ids = frozenset()
    live, completed = [(list(prompt), 0.0)], []
    for _ in range(params.max_tokens):
        candidates = []
        for tokens, total in live:
            logprobs = reference_logits(folder, tokens)[-1].log_softmax(-1)
            likeliest = logprobs.topk(min(2 * params.beam_width, len(logprobs)))
            for logprob, token in zip(*map(torch.Tensor.tolist, likeliest), strict=True):
                beam = ([*tokens, token], total + logprob)
                (completed if token in eos_token_ids else candidates).append(beam)
        candidates.sort(key=lambda beam: score(*beam), reverse=True)
        live = candidates[: params.beam_width]
    ranked = [(tokens, score(tokens, total)) for tokens, total in completed + live]
    ranked.sort(key=lambda beam: beam[1], reverse=True)
    return ranked[: params.beam_width]


def assert_same_beams(
    output: BeamSearchOutput,
    expected: list[tuple[list[int], float]],
    score: Callable[[BeamSearchSequence], float],
) -> None:
    """The same texts in the same order; near ties may change places."""
    assert len(output.sequences) == len(expected)
    for beam, (_, right) in zip(output.sequences, expected, strict=True):
        assert score(beam) == pytest.approx(right, abs=NEAR)
    got = [beam.tokens for beam in output.sequences]
    for tokens, right in expected:
        if sum(abs(right - other) < NEAR for _, other in expected) == 1:
            assert got[expected.index((tokens, right))] == tokens
    assert len(set(map(tuple, got))) == len(got)


def assert_idle(llm: LLM) -> None:
    manager = llm.engine.block_manager
    manager.check()
    for pool in (manager.pool, manager.cpu_pool):
        assert pool.num_free_blocks == pool.num_blocks
    assert not llm.has_unfinished_requests()


def search_and_compare(llm: LLM, prompts: list[list[int]], params: BeamSearchParams) -> None:
    """Every prompt's beams are the naive loop's, and nothing is left in the engine."""
    eos = llm.engine.model_config.eos_token_ids

    def score(beam: BeamSearchSequence) -> float:
        ends = not params.ignore_eos and beam.tokens[-1] in eos
        return beam.cum_logprob / (len(beam.tokens) - ends) ** params.length_penalty

    outputs = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        folder, settings = llm.engine.model_config.path, astuple(params)
        expected = naive_beam_search(folder, tuple(prompt), settings, eos)
        assert_same_beams(output, expected, score)
        for beam in output.sequences:
            assert beam.tokens[: len(prompt)] == prompt
            ends = not params.ignore_eos and beam.tokens[-1] in eos
            assert beam.finish_reason == ("stop" if ends else None)  # vLLM has no reason here
            assert beam.orig_prompt["prompt_token_ids"] == prompt
            found = zip(beam.logprobs, beam.tokens[len(prompt) :], strict=True)
            total = sum(entry[token].logprob for entry, token in found)
            assert beam.cum_logprob == pytest.approx(total, abs=NEAR)
            assert ends or len(beam.tokens) == len(prompt) + params.max_tokens
    assert_idle(llm)


def folder_with_many_ends(make_checkpoint: Callable[..., Path]) -> Path:
    """A random model in which every eighth token ends a text."""
    return make_checkpoint("llama", eos_token_id=list(range(1, 320, 8)))


PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3, 2], [100, 200, 300, 7, 8]]


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"block_size": 1}])
def test_the_beams_are_those_of_a_naive_loop(
    make_checkpoint: Callable[..., Path], options: dict[str, Any]
) -> None:
    """Three prompts at once, on a model with many EOS tokens."""
    settings = {"num_kv_blocks": 200, "block_size": 4, **options}
    with LLM(folder_with_many_ends(make_checkpoint), **settings) as llm:
        for params in (
            BeamSearchParams(1, 6),
            BeamSearchParams(2, 7),
            BeamSearchParams(4, 6, length_penalty=0.0),
            BeamSearchParams(3, 6, temperature=0.7, length_penalty=2.0),
            BeamSearchParams(3, 5, ignore_eos=True, length_penalty=-1.0),
        ):
            search_and_compare(llm, PROMPTS, params)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("max_num_seqs", [4, 16])
def test_beams_that_push_each_other_out(
    make_checkpoint: Callable[..., Path], mode: str, max_num_seqs: int
) -> None:
    """Blocks, or places, are so few that beams must wait for each other: the same results."""
    steps: list[SchedulerOutput] = []
    with LLM(
        folder_with_many_ends(make_checkpoint),
        num_kv_blocks=11,
        block_size=2,
        max_num_seqs=max_num_seqs,
        preemption_mode=mode,
    ) as llm:
        llm.engine.step_listeners.append(lambda report: steps.append(report.scheduler_output))
        search_and_compare(llm, PROMPTS, BeamSearchParams(4, 6, length_penalty=0.5))
        # A beam that goes on starts with its parent's blocks, a beam that waited with none.
        new_sequences = [new for step in steps for new in step.new_sequences]
        num_waited = sum(len(new.token_ids) > 8 and not new.block_ids for new in new_sequences)
        num_swapped = sum(len(step.blocks_to_swap_out) for step in steps)
        assert num_waited + num_swapped > 0
        assert mode == "swap" or not num_swapped


def test_beams_of_the_demo_model(demo_llm: LLM) -> None:
    """With the text filled in; a text prompt and its token ids give the same."""
    tokenizer = demo_llm.get_tokenizer()
    prompt = tokenizer.encode(STORY)
    params = BeamSearchParams(3, 8)
    search_and_compare(demo_llm, [prompt], params)
    by_text, by_ids = demo_llm.beam_search([STORY, prompt], params)
    assert [beam.tokens for beam in by_text.sequences] == [b.tokens for b in by_ids.sequences]
    for beam in by_text.sequences:
        assert beam.text == tokenizer.decode(beam.tokens, skip_special_tokens=True)
        assert beam.text.startswith(STORY)
    [best] = demo_llm.beam_search(STORY, BeamSearchParams(1, 8))
    greedy = SamplingParams(temperature=0, max_tokens=8)
    [output] = demo_llm.generate(STORY, greedy, use_tqdm=False)
    assert best.sequences[0].tokens[len(prompt) :] == output.outputs[0].token_ids


def test_a_few_prompts_at_a_time(demo_llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    """concurrency_limit changes the company, not the beams; use_tqdm counts the rounds."""
    prompts = [STORY, "One day", {"prompt": "A cat"}]
    params = BeamSearchParams(2, 4)

    def tokens(outputs: list[BeamSearchOutput]) -> list[list[list[int]]]:
        return [[beam.tokens for beam in output.sequences] for output in outputs]

    expected = tokens(demo_llm.beam_search(prompts, params))
    assert tokens(demo_llm.beam_search(prompts, params, None, False, 2)) == expected
    assert capfd.readouterr().err == ""
    most: list[int] = []
    demo_llm.engine.step_listeners.append(lambda report: most.append(len(report.sequences)))
    one_by_one = demo_llm.beam_search(prompts, params, use_tqdm=True, concurrency_limit=1)
    assert tokens(one_by_one) == expected
    demo_llm.engine.step_listeners.clear()
    assert max(most) == 2
    assert "3/3" in capfd.readouterr().err
    with pytest.raises(ValueError, match="concurrency_limit is 0; allowed: None, or 1 or more"):
        demo_llm.beam_search(prompts, params, concurrency_limit=0)
    for limit in ("1", 1.5, True):
        with pytest.raises(TypeError, match="concurrency_limit must be None or an int, got"):
            demo_llm.beam_search(prompts, params, concurrency_limit=limit)  # type: ignore[arg-type]


def test_special_tokens_in_the_texts(demo_llm: LLM) -> None:
    """Are shown on request."""
    prompt = demo_llm.engine.input_processor.render_chat([{"role": "user", "content": "Hi"}], {})
    assert "<|im_start|>" in prompt
    for skip in (True, False):
        params = BeamSearchParams(1, 2, skip_special_tokens=skip)
        [beam] = demo_llm.beam_search(prompt, params)[0].sequences
        decoded = demo_llm.get_tokenizer().decode(beam.tokens, skip_special_tokens=skip)
        assert beam.text == decoded
        assert ("<|im_start|>" in decoded) == (not skip)


def search_of_transformers(folder: Path, prompt: list[int], num_beams: int, **options: Any) -> Any:
    """transformers' own beam search, ranked by log-probability alone."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        return reference_model(folder).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=num_beams,
            do_sample=False,
            length_penalty=0.0,
            early_stopping="never",
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )


@pytest.mark.parametrize("beam_width", [2, 4])
def test_where_the_rules_agree_transformers_finds_the_same(
    make_checkpoint: Callable[..., Path], demo_llm: LLM, beam_width: int
) -> None:
    """If no text can end before max_tokens, both keep the same beams."""
    folder = make_checkpoint("llama")
    options = {"num_return_sequences": beam_width, "max_new_tokens": 8, "eos_token_id": -1}
    with LLM(folder, num_kv_blocks=100) as tiny_llm:
        cases = [
            (tiny_llm, folder, [5, 6, 7]),
            (demo_llm, DEMO_MODEL, demo_llm.get_tokenizer().encode(STORY)),
        ]
        for llm, path, prompt in cases:
            found = search_of_transformers(path, prompt, beam_width, **options)
            params = BeamSearchParams(beam_width, 8, ignore_eos=True, length_penalty=0.0)
            [output] = llm.beam_search([prompt], params)
            expected = list(
                zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True)
            )
            assert_same_beams(output, expected, lambda beam: beam.cum_logprob)


def test_transformers_finds_nothing_likelier(make_checkpoint: Callable[..., Path]) -> None:
    """With EOS tokens the beams that go on are still the same. But transformers completes a text
    only if it is among the best of its step, and vLLM's rule completes every candidate."""
    folder = folder_with_many_ends(make_checkpoint)
    num_equal = 0
    with LLM(folder, num_kv_blocks=100) as llm:
        for prompt in PROMPTS:
            found = search_of_transformers(folder, prompt, 4, max_new_tokens=6)
            [output] = llm.beam_search([prompt], BeamSearchParams(4, 6, length_penalty=0.0))
            best = output.sequences[0]
            assert best.cum_logprob > float(found.sequences_scores[0]) - NEAR
            num_equal += found.sequences[0, : len(best.tokens)].tolist() == best.tokens
    assert num_equal > 0


def test_other_requests_go_on(demo_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their outputs wait for step(), also if a search fails or is interrupted."""
    params = BeamSearchParams(3, 5)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = demo_llm.generate(STORY, greedy, use_tqdm=False)[0].outputs[0].token_ids
    demo_llm.add_request("other", STORY, greedy)
    [found] = demo_llm.beam_search("One day", params)
    [alone] = demo_llm.beam_search("One day", params)
    assert [b.tokens for b in found.sequences] == [b.tokens for b in alone.sequences]
    execute = demo_llm.engine.executor.execute_model

    def fail(scheduler_output: SchedulerOutput) -> Any:
        names = {seq.seq_id: seq.request_id for seq in demo_llm.engine.scheduler.running}
        for item in scheduler_output.scheduled:
            if names[item.seq_id] != "other" and item.num_computed_tokens:
                output = execute(scheduler_output)
                fail_row(output, item.seq_id, "no beam is possible")
                return output
        return execute(scheduler_output)

    monkeypatch.setattr(demo_llm.engine.executor, "execute_model", fail)
    with pytest.raises(RuntimeError, match="no beam is possible"):
        demo_llm.beam_search(["One day", STORY], params)
    monkeypatch.undo()

    def interrupt(_: StepReport) -> None:
        demo_llm.engine.step_listeners.clear()
        signal.raise_signal(signal.SIGINT)

    demo_llm.engine.step_listeners.append(interrupt)
    with pytest.raises(KeyboardInterrupt):
        demo_llm.beam_search(["One day", STORY], params)
    outputs = []
    while demo_llm.has_unfinished_requests():
        outputs += demo_llm.step()
    assert {output.request_id for output in outputs} == {"other"}
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 13))
    assert outputs[-1].outputs[0].token_ids == expected
    assert_idle(demo_llm)


def test_a_search_that_cannot_be_served_is_refused(demo_llm: LLM) -> None:
    """The good prompt beside a bad one is not queued either."""
    params = BeamSearchParams(3, 5)
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        ([STORY, ""], params, ValueError, "prompt is empty"),
        ([STORY, [5, 10**6]], params, ValueError, "1000000 is out of range"),
        (None, params, TypeError, "prompts must be a string"),
        (STORY, SamplingParams(), TypeError, "params must be BeamSearchParams"),
        (STORY, None, TypeError, "params must be BeamSearchParams"),
    ]
    for prompts, how, error, message in cases:
        with pytest.raises(error, match=message):
            demo_llm.beam_search(prompts, how)
        assert_idle(demo_llm)
    assert demo_llm.beam_search([], params) == []


def test_beams_fork_into_their_parents_places() -> None:
    """With just beam_width places and no prefix cache, no token is computed twice."""
    num_scheduled: list[int] = []
    with LLM(num_kv_blocks=64, max_num_seqs=4, enable_prefix_caching=False, device="cpu") as llm:
        llm.engine.step_listeners.append(
            lambda report: num_scheduled.append(report.scheduler_output.total_num_scheduled_tokens)
        )
        llm.beam_search(list(range(20, 40)), BeamSearchParams(4, 6, ignore_eos=True))
    assert num_scheduled == [20, 4, 4, 4, 4, 4]
