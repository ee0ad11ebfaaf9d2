"""All that a request may ask for, end to end, compared with formulas on transformers' logits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import reference_logits

from nanoserve import LLM, SamplingParams
from nanoserve.engine import StepReport
from nanoserve.output_processor import CompletionOutput, RequestOutput
from nanoserve.sampler import uniform_noise
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.sequence import SchedulerOutput

STORY = "Once upon a time there was a little dog."
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
Requests = list[tuple[list[int], SamplingParams]]  # prompts and parameters
NEAR = 1e-4  # of the logits' standard deviation (greedy), or of probability (sampled)
DELTA, CUMULATIVE, FINAL_ONLY = (
    RequestOutputKind.DELTA,
    RequestOutputKind.CUMULATIVE,
    RequestOutputKind.FINAL_ONLY,
)


# -- what is right: the formulas, on transformers' logits --


def spellings(tokenizer: Any, word: str) -> list[list[int]]:
    """Token sequences that spell a bad word (vLLM's rule)."""
    alone = tokenizer.encode(word.lstrip(), add_special_tokens=False)
    spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
    if len(spaced) == len(alone) and spaced[0] != alone[0]:
        return [alone, spaced]
    return [alone]


def constrained(
    logits: np.ndarray,
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
    ends: set[int],
    bad_words: list[list[int]],
) -> np.ndarray:
    """One row of logits after every stage that can change its argmax."""
    row = logits.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        row[~np.isin(np.arange(len(row)), params.allowed_token_ids)] = -math.inf
    for *beginning, last in bad_words:
        if output[len(output) - len(beginning) :] == beginning:
            row[last] = -math.inf
    if len(output) < params.min_tokens:
        row[list(ends)] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] += bias
    for processor in params.logits_processors or ():
        row = processor(output, torch.from_numpy(row)).numpy()
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(output):
        row[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return row


def choices(row: np.ndarray, params: SamplingParams, noise: float) -> set[int]:
    """The tokens that may be chosen from a constrained row, near ties included."""
    if params.is_greedy:
        spread = row[np.isfinite(row)].std() if np.isfinite(row).sum() > 1 else 1.0
        return {int(t) for t in np.flatnonzero((row.max() - row) <= NEAR * spread)}
    weights = np.exp((row - row.max()) / params.temperature)
    weights[weights < params.min_p] = 0  # times the largest, which is 1
    order = np.argsort(-weights, kind="stable")
    weights[order[params.top_k or len(row) :]] = 0
    weights /= weights.sum()
    before = np.cumsum(weights[order]) - weights[order]
    weights[order[before >= params.top_p]] = 0
    sums = np.cumsum(weights / weights.sum())
    nearby = np.clip([noise - NEAR, noise, noise + NEAR], 0, 1 - 1e-12)
    return {int(token) for token in np.searchsorted(sums, nearby * sums[-1], side="right")}


def assert_right(
    llm: LLM, prompt: list[int], params: SamplingParams, completion: CompletionOutput
) -> None:
    """The formulas allow each token after the tokens before it, and the end of the output."""
    folder, output = llm.engine.model_config.path, completion.token_ids
    eos = llm.engine.model_config.eos_token_ids
    ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos)}
    bad = [ids for word in params.bad_words or () for ids in spellings(llm.get_tokenizer(), word)]
    rows = reference_logits(folder, prompt + output)[len(prompt) - 1 : -1].numpy()
    for i, (row, token) in enumerate(zip(rows, output, strict=True)):
        right = constrained(row, prompt, output[:i], params, ends, bad)
        noise = 0.0
        if params.seed is not None:
            where = (np.array([n]) for n in (params.seed, completion.index, len(prompt) + i))
            [noise] = uniform_noise(*where)
        allowed = choices(right, params, noise)
        assert token in allowed, f"token {i} is {token}, allowed: {allowed}"
    if completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str):
        assert output[-1] in ends
        assert completion.stop_reason == (
            output[-1] if output[-1] in (params.stop_token_ids or ()) else None
        )
    assert not ends & set(output[:-1])
    if completion.finish_reason == "length":
        assert len(output) == params.max_tokens


# -- helpers --


def run(llm: LLM, prompts: Any, params: Any, **options: Any) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False, **options)


def run_one(llm: LLM, prompt: Any, params: SamplingParams) -> CompletionOutput:
    return run(llm, prompt, params)[0].outputs[0]


def assert_idle(llm: LLM) -> None:
    """No block, row or state is left, in either pool."""
    manager = llm.engine.block_manager
    manager.check()
    for pool in (manager.pool, manager.cpu_pool):
        assert pool.num_free_blocks == pool.num_blocks
    assert not llm.has_unfinished_requests()
    assert not llm.engine.output_processor.requests
    assert not llm.engine.scheduler.sequences


@contextmanager
def watch(llm: LLM) -> Iterator[list[SchedulerOutput]]:
    """The steps that the engine runs meanwhile."""
    steps: list[SchedulerOutput] = []

    def listener(report: StepReport) -> None:
        steps.append(report.scheduler_output)

    llm.engine.step_listeners.append(listener)
    try:
        yield steps
    finally:
        llm.engine.step_listeners.remove(listener)


def num_swapped(steps: list[SchedulerOutput]) -> int:
    return sum(len(step.blocks_to_swap_out) for step in steps)


def num_resumed(steps: list[SchedulerOutput]) -> int:
    """How often a sequence was sent to the runner again, because it had been preempted."""
    introduced = [new.seq_id for step in steps for new in step.new_sequences]
    return len(introduced) - len(set(introduced))


@pytest.fixture
def llm(demo_llm: LLM) -> Iterator[LLM]:
    """The shared engine on the demo model, idle before and after."""
    assert_idle(demo_llm)
    yield demo_llm
    assert_idle(demo_llm)


@pytest.fixture(scope="module")
def tiny_folder(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint("llama")


@pytest.fixture(scope="module")
def tiny_llm(tiny_folder: Path) -> Iterator[LLM]:
    """A random model without tokenizer: 320 tokens, 1 is EOS; block_size 4, ample blocks."""
    with LLM(tiny_folder, num_kv_blocks=200, block_size=4, max_logprobs=-1) as llm:
        yield llm
        assert_idle(llm)


@pytest.fixture(scope="module")
def story_ids(demo_llm: LLM) -> list[int]:
    return demo_llm.get_tokenizer().encode(STORY)


def prefer_even(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor: after an even number of tokens, prefer even ones, else odd ones."""
    logits[len(output_token_ids) % 2 :: 2] -= 3.0
    return logits


# -- each parameter against the definition --

PARAMETERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "presence": {"presence_penalty": 1.5},
    "presence_negative": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 0.7},
    "frequency_negative": {"frequency_penalty": -0.4},
    "repetition": {"repetition_penalty": 1.4},
    "repetition_below_1": {"repetition_penalty": 0.8},
    "all_penalties": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.15,
    },
    "bias": {"logit_bias": {7: 100, 8: -100, 9: 2.5}},
    "allowed": {"allowed_token_ids": [40, 7, 199, 300, 45]},
    "allowed_one": {"allowed_token_ids": [50]},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": list(range(10, 200))},
    "stop_ids": {"stop_token_ids": list(range(0, 320, 9))},
    "ignore_eos": {"ignore_eos": True},
    "processors": {"logits_processors": [prefer_even]},
    "everything": {
        "presence_penalty": 0.6,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {40: 1.0, 45: -2.0, 3: 50},
        "allowed_token_ids": list(range(10, 300)),
        "min_tokens": 4,
        "stop_token_ids": [40, 41, 42],
        "logits_processors": [prefer_even],
    },
}
SAMPLED = {"temperature": 0.8, "seed": 11, "top_k": 40, "top_p": 0.95, "min_p": 0.01}


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("is_greedy", [True, False])
def test_each_parameter_is_what_its_formula_says(
    llm: LLM, tiny_llm: LLM, story_ids: list[int], name: str, is_greedy: bool
) -> None:
    """On the demo model and on a random one, greedy and sampled."""
    how = {"temperature": 0} if is_greedy else SAMPLED
    params = SamplingParams(max_tokens=14, **how, **PARAMETERS[name])
    for engine, prompt in ((llm, story_ids), (tiny_llm, [7, 9, 40, 7, 45, 200])):
        assert_right(engine, prompt, params, run_one(engine, prompt, params))


def test_the_comparison_notices_what_was_not_applied(tiny_llm: LLM) -> None:
    """A test of assert_right: plain greedy tokens fail the check of the parameters that matter."""
    prompt = [7, 9, 40, 7, 45, 200]
    plain = run_one(tiny_llm, prompt, SamplingParams(temperature=0, max_tokens=14))
    noticed = []
    for name in PARAMETERS:
        try:
            params = SamplingParams(temperature=0, max_tokens=14, **PARAMETERS[name])
            assert_right(tiny_llm, prompt, params, plain)
        except AssertionError:
            noticed.append(name)
    assert {"bias", "allowed", "min_tokens", "processors", "everything"} <= set(noticed)
    assert "greedy" not in noticed


@pytest.mark.parametrize("is_greedy", [True, False])
def test_bad_words_are_never_completed(llm: LLM, story_ids: list[int], is_greedy: bool) -> None:
    """Words of one token and of several, taken from the output without bad words."""
    how = {"temperature": 0} if is_greedy else SAMPLED
    params = SamplingParams(max_tokens=24, ignore_eos=True, **how)
    plain = run_one(llm, story_ids, params)
    tokenizer = llm.get_tokenizer()
    bad = []
    for length in (1, 2, 3):
        windows = [plain.token_ids[i : i + length] for i in range(2, 24 - length)]
        words = [tokenizer.decode(ids).strip() for ids in windows]
        pairs = zip(words, windows, strict=True)
        bad += [word for word, ids in pairs if word and ids in spellings(tokenizer, word)][:2]
    assert any(len(spellings(tokenizer, word)[0]) > 1 for word in bad)
    params = replace(params, bad_words=bad)
    completion = run_one(llm, story_ids, params)
    assert completion.token_ids != plain.token_ids
    assert_right(llm, story_ids, params, completion)
    for ids in (ids for word in bad for ids in spellings(tokenizer, word)):
        tokens = completion.token_ids
        assert ids not in [tokens[i : i + len(ids)] for i in range(len(tokens))]


def test_presence_and_frequency_do_not_see_the_prompt(tiny_llm: LLM) -> None:
    """Before the first token there is no output: only repetition_penalty can change that token."""
    folder = tiny_llm.engine.model_config.path
    prompts = (np.random.default_rng(i).permutation(320)[:120].tolist() for i in range(20))
    firsts = ((p, int(reference_logits(folder, p)[-1].argmax())) for p in prompts)
    prompt, likeliest = next((p, first) for p, first in firsts if first in p)
    params = SamplingParams(temperature=0, max_tokens=1, presence_penalty=2, frequency_penalty=2)
    assert run_one(tiny_llm, prompt, params).token_ids == [likeliest]
    params = SamplingParams(temperature=0, max_tokens=1, repetition_penalty=50)
    assert run_one(tiny_llm, prompt, params).token_ids != [likeliest]


def test_a_processor_may_ask_for_the_prompt(tiny_llm: LLM) -> None:
    """A processor with three parameters gets the prompt too. Both kinds get all output so far."""
    calls: list[tuple[list[int], ...]] = []

    def two(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append((list(output),))
        return logits

    def three(prompt: list[int], output: list[int], logits: torch.Tensor) -> torch.Tensor:
        calls.append((list(prompt), list(output)))
        return logits

    params = SamplingParams(temperature=0, max_tokens=3, logits_processors=[two, three])
    tokens = run_one(tiny_llm, [5, 6, 7], replace(params, ignore_eos=True)).token_ids
    assert calls == [call for i in range(3) for call in ((tokens[:i],), ([5, 6, 7], tokens[:i]))]


# -- log-probabilities --


def assert_logprobs(entry: Any, row: torch.Tensor, token: int, number: int, llm: LLM) -> None:
    """The token first, then the likeliest, ranked; log_softmax of the raw logits."""
    expected = row.log_softmax(-1)
    assert next(iter(entry)) == token
    others = [t for t in entry if t != token]
    top = expected.topk(number).indices.tolist()
    assert len(entry) == len({token, *top})
    for token_id, logprob in entry.items():
        assert logprob.logprob == pytest.approx(float(expected[token_id]), abs=2e-3)
        assert logprob.rank == 1 + int((expected > expected[token_id]).sum())
        if llm.engine.tokenizer is not None:
            assert logprob.decoded_token == llm.get_tokenizer().decode([token_id])
    assert [entry[t].rank for t in others] == sorted(entry[t].rank for t in others)
    assert max((entry[t].rank for t in others), default=0) <= number


@pytest.mark.parametrize("number", [0, 1, 5, -1])
def test_logprobs_are_of_the_raw_logits(llm: LLM, tiny_llm: LLM, number: int) -> None:
    """Of prompt and output, before temperature, penalties, bias and filters. (The demo model's
    engine allows no -1.)"""
    prompt = [7, 9, 40, 7, 45, 200, 3, 17, 90]
    params = SamplingParams(
        temperature=1.5,
        seed=4,
        top_k=30,
        repetition_penalty=1.8,
        logit_bias={5: 20},
        allowed_token_ids=list(range(2, 60)),
        max_tokens=6,
        logprobs=number,
        prompt_logprobs=number,
    )
    for engine in (tiny_llm, llm)[: 2 if number >= 0 else 1]:
        [output] = run(engine, prompt, params)
        [completion] = output.outputs
        model = engine.engine.model_config
        rows = reference_logits(model.path, prompt + completion.token_ids)
        assert output.prompt_logprobs is not None
        assert completion.logprobs is not None
        assert output.prompt_logprobs[0] is None
        entries = [*output.prompt_logprobs[1:], *completion.logprobs]
        tokens = prompt[1:] + completion.token_ids
        for row, token, entry in zip(rows[:-1], tokens, entries, strict=True):
            assert_logprobs(entry, row, token, model.vocab_size if number < 0 else number, engine)
        pairs = zip(completion.logprobs, completion.token_ids, strict=True)
        total = sum(entry[token].logprob for entry, token in pairs)
        assert completion.cumulative_logprob == pytest.approx(total)
        [again] = run(engine, prompt * 4, params)
        assert again.num_cached_tokens == 0  # a prompt with logprobs is computed in full


# -- how a request ends --


def split_at(text: str, pieces: list[str], index: int) -> tuple[str, str]:
    """A string of two characters on each side of the border before piece `index`, and the text
    before its first occurrence."""
    border = len("".join(pieces[:index]))
    stop = text[border - 2 : border + 2]
    return stop, text[: text.index(stop)]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("where", ["first", "border", "inside", "last"])
def test_stop_strings_end_it_anywhere(
    llm: LLM, story_ids: list[int], include: bool, where: str
) -> None:
    """At the first token, across a border, within one token, at the last allowed token. The text
    ends with the stop string or before it, for every kind of output."""
    base = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    whole = run_one(llm, story_ids, base)
    pieces = [llm.get_tokenizer().decode([t]) for t in whole.token_ids]
    long = max(range(1, 15), key=lambda i: len(pieces[i]))
    stop, before = {
        "first": (whole.text[:1], ""),
        "border": split_at(whole.text, pieces, 5),
        "inside": (pieces[long][:-1], whole.text[: whole.text.index(pieces[long][:-1])]),
        "last": (whole.text[-3:], whole.text[: whole.text.index(whole.text[-3:])]),
    }[where]
    expected = before + (stop if include else "")
    params = replace(base, stop=["~~~~~~~~", stop], include_stop_str_in_output=include)
    completion = run_one(llm, story_ids, params)
    assert completion.text == expected
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
    decoded = llm.get_tokenizer().decode(completion.token_ids)
    assert stop in decoded
    assert stop not in llm.get_tokenizer().decode(completion.token_ids[:-1])
    deltas = list(llm.stream(story_ids, params))
    assert "".join(o.outputs[0].text for o in deltas) == expected
    for output in llm.stream(story_ids, params, output_kind=CUMULATIVE):
        assert expected.startswith(output.outputs[0].text)  # no text is taken back
    assert output.outputs[0] == completion


def test_min_tokens_holds_back_every_end(llm: LLM, story_ids: list[int]) -> None:
    """EOS ids and stop ids; with and without min_tokens. For stop strings see the next test."""
    chat = llm.get_tokenizer().apply_chat_template(SUM, tokenize=False, add_generation_prompt=True)
    greedy = SamplingParams(temperature=0, max_tokens=60)
    answer = run_one(llm, chat, greedy).token_ids
    assert run_one(llm, chat, replace(greedy, min_tokens=len(answer) - 1)).token_ids == answer
    for at_least in (len(answer), len(answer) + 3):
        later = run_one(llm, chat, replace(greedy, min_tokens=at_least)).token_ids
        assert later[: len(answer) - 1] == answer[:-1]
        assert later[len(answer) - 1] != answer[-1]
        assert len(later) >= at_least

    plain = run_one(llm, story_ids, replace(greedy, max_tokens=12, ignore_eos=True))
    stop_id = plain.token_ids[4]
    params = replace(greedy, max_tokens=12, stop_token_ids=[stop_id], ignore_eos=True)
    assert len(run_one(llm, story_ids, params).token_ids) == plain.token_ids.index(stop_id) + 1
    held = run_one(llm, story_ids, replace(params, min_tokens=8))
    assert stop_id not in held.token_ids[:8]
    assert len(held.token_ids) >= 8


def test_a_stop_string_counts_right_after_min_tokens(llm: LLM, story_ids: list[int]) -> None:
    """A stop string that ends within the first min_tokens tokens does not count."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = run_one(llm, story_ids, greedy)
    tokenizer = llm.get_tokenizer()
    for index in (3, 6):
        stop = tokenizer.decode(plain.token_ids[index : index + 1])
        before = tokenizer.decode(plain.token_ids[:index])
        if stop in before + stop[:-1]:
            continue
        for at_least, is_held in ((index, False), (index + 1, True)):
            params = replace(greedy, stop=[stop], min_tokens=at_least)
            completion = run_one(llm, story_ids, params)
            assert (len(completion.token_ids) == index + 1) != is_held
            assert completion.token_ids == plain.token_ids[: len(completion.token_ids)]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("n", [1, 3])
def test_every_kind_of_output_brings_the_same(
    llm: LLM, story_ids: list[int], kind: RequestOutputKind, n: int
) -> None:
    """Deltas join to the final text; cumulative texts grow."""
    params = SamplingParams(
        n=n, temperature=0.9, seed=3, max_tokens=15, stop=["e ", ". "], logprobs=1
    )
    [final] = run(llm, story_ids, params)
    assert [c.index for c in final.outputs] == list(range(n))
    outputs = list(llm.stream(story_ids, params, output_kind=kind))
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind is FINAL_ONLY:
        assert len(outputs) == 1
    for expected in final.outputs:
        parts = [c for o in outputs for c in o.outputs if c.index == expected.index]
        if kind is DELTA:
            assert "".join(part.text for part in parts) == expected.text
            assert [t for part in parts for t in part.token_ids] == expected.token_ids
            assert [e for part in parts for e in part.logprobs or ()] == expected.logprobs
            assert all(part.token_ids for part in parts), "a delta without new tokens"
        else:
            for earlier, later in pairwise(parts):
                assert later.text.startswith(earlier.text)
                assert later.token_ids[: len(earlier.token_ids)] == earlier.token_ids
            assert parts[-1] == expected
        reasons = [part.finish_reason for part in parts]
        assert reasons[-1] == expected.finish_reason is not None
        assert parts[-1].cumulative_logprob == expected.cumulative_logprob


# -- several completions of one prompt --

BRANCHED = SamplingParams(n=4, temperature=1.0, seed=21, max_tokens=12, ignore_eos=True)


def tokens_of(output: RequestOutput) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def test_n_completions_have_streams_of_their_own(llm: LLM, story_ids: list[int]) -> None:
    """Each by the formulas. Branch i is the same whatever n is."""
    [output] = run(llm, story_ids, BRANCHED)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in tokens_of(output)}) == 4
    assert len({tuple(tokens[:4]) for tokens in tokens_of(output)}) > 1  # early on
    for completion in output.outputs:
        assert_right(llm, story_ids, BRANCHED, completion)
    for n in (1, 2, 3):
        [fewer] = run(llm, story_ids, replace(BRANCHED, n=n))
        assert tokens_of(fewer) == tokens_of(output)[:n]
    penalised = replace(BRANCHED, repetition_penalty=1.3, frequency_penalty=0.2)
    [output] = run(llm, story_ids, penalised)
    for completion in output.outputs:
        assert_right(llm, story_ids, penalised, completion)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_prompt_is_computed_once(story_ids: list[int], enable_prefix_caching: bool) -> None:
    """n=4: the prompt's tokens, then four times all but the last output token. All branches but one
    copy the last, partly filled block of the prompt."""
    prompt = story_ids[:10]
    with (
        LLM(num_kv_blocks=64, block_size=8, enable_prefix_caching=enable_prefix_caching) as engine,
        watch(engine) as steps,
    ):
        run(engine, prompt, BRANCHED)
    assert sum(step.total_num_scheduled_tokens for step in steps) == 10 + 4 * 11
    assert sum(len(step.blocks_to_copy) for step in steps) == 3
    assert len({pair[0] for step in steps for pair in step.blocks_to_copy}) == 1


def test_more_completions_than_places(llm: LLM, story_ids: list[int]) -> None:
    """They are the same, and the whole blocks of the prompt are computed once."""
    params = replace(BRANCHED, logprobs=2, max_tokens=5)
    [expected] = run(llm, story_ids, params)
    for options in ({"max_num_seqs": 1}, {"max_num_seqs": 3, **FEW_BLOCKS}):
        with LLM(**{"num_kv_blocks": 64, "block_size": 4, **options}) as engine:
            with watch(engine) as steps:
                [output] = run(engine, story_ids, params)
            assert_same_output(output, expected)
            assert_idle(engine)
            alone = 4 - options["max_num_seqs"]  # branches that compute the prompt's rest again
            num_tokens = sum(step.total_num_scheduled_tokens for step in steps)
            rest = len(story_ids) - (len(story_ids) - 1) // 4 * 4
            if "num_kv_blocks" not in options:
                assert num_tokens == len(story_ids) + alone * rest + 4 * 4


def test_branches_know_what_was_cached(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = [5 + i % 7 for i in range(40)]
    assert run(llm, prompt, BRANCHED)[0].num_cached_tokens == 0
    assert run(llm, prompt, BRANCHED)[0].num_cached_tokens == 32


def test_one_branch_may_be_aborted(llm: LLM, story_ids: list[int]) -> None:
    """It keeps its output so far; the others get their tokens."""
    [expected] = run(llm, story_ids, BRANCHED)
    llm.add_request("mine", story_ids, BRANCHED)
    assert not llm.abort_request("mine", 1)  # it has not forked off yet
    llm.step()
    llm.step()
    free = llm.engine.block_manager.num_free_blocks
    assert llm.abort_request("mine", 2)
    assert llm.engine.block_manager.num_free_blocks > free  # at once
    while llm.has_unfinished_requests():
        outputs = llm.step()
    [final] = outputs
    assert final.finished
    assert [c.finish_reason for c in final.outputs] == ["length", "length", "abort", "length"]
    assert final.outputs[2].token_ids == expected.outputs[2].token_ids[:2]
    for index in (0, 1, 3):
        assert final.outputs[index] == expected.outputs[index]


# -- each as if it were alone --

MIXED: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0, "presence_penalty": 1.0, "logprobs": 3},
    {"seed": 1, "frequency_penalty": -0.5, "top_k": 9},
    {"seed": 2, "repetition_penalty": 1.5, "min_p": 0.05, "n": 4, "logprobs": 2},
    {"seed": 3, "n": 3, "logit_bias": {260: 5, 300: -5}, "stop": ["the"]},
    {"temperature": 0, "allowed_token_ids": list(range(200, 500))},
    {"seed": 4, "temperature": 1.3, "bad_words": ["the", "little", "was a"]},
    {"temperature": 0, "min_tokens": 8, "stop_token_ids": list(range(3, 2000, 3))},
    {"seed": 5, "logits_processors": [prefer_even], "top_p": 0.8},
    {"temperature": 0, "prompt_logprobs": 2, "stop": [" a"], "include_stop_str_in_output": True},
    {"seed": 6, "detokenize": False, "ignore_eos": True, "n": 2, "presence_penalty": -1},
    {"seed": 7, "skip_special_tokens": False, "logprobs": 0, "prompt_logprobs": 0},
]


@pytest.fixture(scope="module")
def mixed(story_ids: list[int]) -> Requests:
    """Twelve requests with twelve sets of features, and prompts of 15 to 48 tokens."""
    params = [SamplingParams(max_tokens=16, **features) for features in MIXED]
    return [((story_ids * 4)[i : 4 * i + 15 - i], each) for i, each in enumerate(params)]


@pytest.fixture(scope="module")
def mixed_alone(demo_llm: LLM, mixed: Requests) -> list[RequestOutput]:
    """The output of each of them with the engine to itself."""
    return [run(demo_llm, *request)[0] for request in mixed]


def assert_same_output(got: RequestOutput, expected: RequestOutput) -> None:
    """All that does not depend on the engine's history. Log-probabilities may differ by rounding,
    so two nearly equal ones may change places."""
    without = {"logprobs": None, "cumulative_logprob": None}
    assert [replace(c, **without) for c in got.outputs] == [
        replace(c, **without) for c in expected.outputs
    ]
    pairs = [(got.prompt_logprobs, expected.prompt_logprobs)]
    for one, other in zip(got.outputs, expected.outputs, strict=True):
        assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
        pairs.append((one.logprobs, other.logprobs))
    for entries, right in pairs:
        for entry, other in zip(entries or (), right or (), strict=True):
            assert (entry or {}).keys() == (other or {}).keys()
            for token_id, logprob in (entry or {}).items():
                assert logprob.logprob == pytest.approx(other[token_id].logprob, abs=2e-3)


FEW_BLOCKS = {"num_kv_blocks": 34}
SWAP = {**FEW_BLOCKS, "preemption_mode": "swap", "num_cpu_blocks": 200}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_seqs": 4},
        {"max_num_seqs": 7, "max_num_batched_tokens": 7},
        FEW_BLOCKS,
        {**FEW_BLOCKS, "enable_prefix_caching": False},
        SWAP,
        {**SWAP, "num_cpu_blocks": 10, "enable_prefix_caching": False},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "ample",
)
def test_a_request_gets_the_same_in_any_company(
    mixed: Requests,
    mixed_alone: list[RequestOutput],
    options: dict[str, Any],
) -> None:
    """Twelve requests at once: no feature touches a neighbour's row, neither chunks nor preemption
    nor forks change a token. With too few CPU blocks some are swapped, some computed again."""
    prompts, params = map(list, zip(*mixed, strict=True))
    options = {"num_kv_blocks": 400, "block_size": 4, **options}
    with LLM(**options) as engine, watch(engine) as steps:
        outputs = run(engine, prompts, params)
        assert_idle(engine)
    for output, alone in zip(outputs, mixed_alone, strict=True):
        assert_same_output(output, alone)
    is_crowded, swaps = options["num_kv_blocks"] < 400, "preemption_mode" in options
    assert (num_resumed(steps) > 0) == is_crowded
    assert any(output.metrics.num_preemptions for output in outputs) == is_crowded
    assert (num_swapped(steps) > 0) == swaps
    if options.get("num_cpu_blocks") == 200:  # no token is computed twice
        assert sum(len(step.blocks_to_swap_in) for step in steps) == num_swapped(steps)
        assert sum(step.total_num_scheduled_tokens for step in steps) <= sum(
            len(output.prompt_token_ids) + sum(len(c.token_ids) - 1 for c in output.outputs)
            for output in outputs
        )


@st.composite
def any_params(draw: st.DrawFn) -> SamplingParams:
    """Any parameters that are allowed together, for a vocabulary of 320."""
    some_ids = st.lists(st.integers(0, 319), min_size=3, max_size=40)
    n = draw(st.sampled_from([1, 1, 2, 3]))
    max_tokens = draw(st.integers(1, 14))
    return SamplingParams(
        n=n,
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 1.5] if n == 1 else [0.7, 1.2])),
        seed=draw(st.integers(0, 99)),
        top_k=draw(st.sampled_from([0, 0, 5, 60])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.02])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.8, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.9])),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.none() | some_ids),
        logprobs=draw(st.sampled_from([None, None, 0, 3, -1])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 2])),
        logit_bias=draw(st.none() | st.dictionaries(st.integers(0, 319), st.floats(-5, 5))),
        allowed_token_ids=draw(st.none() | st.none() | some_ids),
        logits_processors=draw(st.none() | st.just([prefer_even])),
        output_kind=draw(st.sampled_from(RequestOutputKind)),
    )


ANYTHING = given(
    requests=st.lists(st.tuples(any_params(), st.integers(1, 20)), min_size=2, max_size=7),
    aborts=st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 2)), max_size=5),
    options=st.fixed_dictionaries(
        {
            "preemption_mode": st.sampled_from(["recompute", "swap"]),
            "num_kv_blocks": st.integers(14, 30),
            "num_cpu_blocks": st.integers(1, 20),
            "enable_prefix_caching": st.booleans(),
            "max_num_batched_tokens": st.sampled_from([6, 17, 400]),
        }
    ),
)
QUICKLY = settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
AT_LENGTH = settings(QUICKLY, max_examples=60)


def check_any_requests(
    tiny_llm: LLM,
    requests: list[tuple[SamplingParams, int]],
    aborts: list[tuple[int, int | None]],
    options: dict[str, Any],
) -> None:
    """Requests that are not aborted get their tokens; then all blocks of both pools are free."""
    prompts = [[(7 * i + j * j) % 300 + 2 for j in range(n)] for i, (_, n) in enumerate(requests)]
    expected = [
        run(tiny_llm, prompt, params)[0]
        for prompt, (params, _) in zip(prompts, requests, strict=True)
    ]
    tokens: dict[tuple[str, int], list[int]] = {}
    reasons: dict[tuple[str, int], str] = {}
    kinds = {str(i): params.output_kind for i, (params, _) in enumerate(requests)}

    def step(llm: LLM) -> None:
        for output in llm.step():
            for completion in output.outputs:
                key = output.request_id, completion.index
                before = tokens.get(key, []) if kinds[output.request_id] is DELTA else []
                tokens[key] = before + completion.token_ids
                if completion.finish_reason:
                    reasons[key] = completion.finish_reason
        llm.engine.block_manager.check()

    if options["preemption_mode"] != "swap":
        options = {**options, "num_cpu_blocks": None}
    folder = tiny_llm.engine.model_config.path
    with LLM(folder, block_size=4, max_num_seqs=6, max_logprobs=-1, **options) as llm:
        touched = set()
        for i, (params, _) in enumerate(requests):
            llm.add_request(str(i), prompts[i], params)
        for number, index in aborts:
            for _ in range(number % 4):
                step(llm)
            name = str(number % len(requests))
            if llm.abort_request(name, index):
                touched.add(name)
            llm.engine.block_manager.check()
        while llm.has_unfinished_requests():
            step(llm)
        assert_idle(llm)
    for i, output in enumerate(expected):
        for completion in output.outputs:
            key = str(i), completion.index
            if key[0] in touched and reasons.get(key) not in ("stop", "length"):
                continue
            assert tokens[key] == completion.token_ids
            assert reasons[key] == completion.finish_reason


@QUICKLY
@ANYTHING
def test_any_parameters_any_aborts_any_preemption(tiny_llm: LLM, **drawn: Any) -> None:
    check_any_requests(tiny_llm, **drawn)


@pytest.mark.slow
@AT_LENGTH
@ANYTHING
def test_any_parameters_at_length(tiny_llm: LLM, **drawn: Any) -> None:
    check_any_requests(tiny_llm, **drawn)


# -- chat --


def test_chat_opens_a_turn_or_continues_one(llm: LLM) -> None:
    """The prompt is the text that the template renders."""
    tokenizer = llm.get_tokenizer()
    greedy = SamplingParams(temperature=0, max_tokens=12)
    begun = [*SUM, {"role": "assistant", "content": "17 + 25"}]
    for messages, options in (
        (SUM, {"add_generation_prompt": True}),
        (SUM, {"add_generation_prompt": False}),
        (begun, {"add_generation_prompt": False, "continue_final_message": True}),
    ):
        [output] = llm.chat(messages, greedy, use_tqdm=False, **options)
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        assert output.prompt == text
        assert output.prompt_token_ids == tokenizer.encode(text, add_special_tokens=False)
        assert output.outputs[0] == run_one(llm, output.prompt_token_ids, greedy)
    assert text.endswith("17 + 25")
    both = llm.chat([SUM, begun], greedy, use_tqdm=False, add_generation_prompt=False)
    assert [output.prompt for output in both] == [
        tokenizer.apply_chat_template(messages, tokenize=False) for messages in (SUM, begun)
    ]
    assert llm.chat(SUM, greedy, use_tqdm=False)[0].prompt == tokenizer.apply_chat_template(
        SUM, tokenize=False, add_generation_prompt=True
    )


def test_tools_reach_the_template(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The template renders them."""
    tokenizer = llm.get_tokenizer()
    template = "{%- if tools %}{{ tools | tojson }}{% endif %}{{ messages[0]['content'] }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    tool = {
        "type": "function",
        "function": {"name": "add", "description": "Sum", "parameters": {"type": "object"}},
    }
    one = SamplingParams(max_tokens=1)
    [output] = llm.chat(SUM, one, use_tqdm=False, tools=[tool])
    assert '"name": "add"' in str(output.prompt)
    assert llm.chat(SUM, one, use_tqdm=False)[0].prompt == SUM[0]["content"]


# -- errors --


def fail_at_fourth(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output_token_ids) == 3:
        raise ZeroDivisionError("no")
    return logits


BROKEN: dict[str, tuple[Any, int, str]] = {
    "raises": (fail_at_fourth, 3, "a logits processor failed: ZeroDivisionError: no"),
    "no_token": (lambda output, logits: logits - math.inf, 0, "no token is possible"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("n", [1, 3])
def test_the_error_of_a_request_is_its_outcome(
    llm: LLM, story_ids: list[int], caplog: pytest.LogCaptureFixture, name: str, n: int
) -> None:
    """It has finish_reason "error", the message and the tokens so far. The other requests get
    exactly their tokens, and every output once."""
    processor, num_tokens, message = BROKEN[name]
    params = replace(BRANCHED, n=n)
    [plain] = run(llm, story_ids, params)
    llm.add_request("other", story_ids, replace(params, n=1))
    prompts = [story_ids, story_ids]
    good, bad = run(llm, prompts, [params, replace(params, logits_processors=[processor])])
    assert_same_output(good, plain)
    assert bad.finished
    assert len(bad.outputs) == n
    for completion, alone in zip(bad.outputs, plain.outputs, strict=False):
        assert completion.finish_reason == "error"
        assert message in str(completion.stop_reason)
        assert completion.token_ids == alone.token_ids[: len(completion.token_ids)]
        assert len(completion.token_ids) in (num_tokens, num_tokens + (n > 1 and num_tokens > 0))
    [record] = caplog.records
    assert message in record.getMessage()
    assert bad.request_id in record.getMessage()
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    assert {output.request_id for output in outputs} == {"other"}
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 13))
    assert outputs[-1].outputs[0].token_ids == plain.outputs[0].token_ids


def test_a_stream_ends_with_the_error_of_its_request(llm: LLM, story_ids: list[int]) -> None:
    """Deltas: three tokens, then the reason alone. The other prompt's deltas go on."""
    params = replace(BRANCHED, n=1)
    both = [replace(params, logits_processors=[fail_at_fourth]), params]
    deltas: dict[str, list[CompletionOutput]] = {}
    for output in llm.stream([story_ids, story_ids], both):
        deltas.setdefault(output.request_id, []).append(output.outputs[0])
    bad, good = deltas.values()
    assert [len(delta.token_ids) for delta in bad] == [1, 1, 1, 0]
    assert [delta.finish_reason for delta in bad] == [None, None, None, "error"]
    tokens = run_one(llm, story_ids, params).token_ids
    assert [token_id for delta in good for token_id in delta.token_ids] == tokens


@pytest.mark.parametrize("options", [FEW_BLOCKS, SWAP], ids=["recompute", "swap"])
def test_failing_steps_in_a_crowd(
    mixed: Requests,
    mixed_alone: list[RequestOutput],
    options: dict[str, Any],
) -> None:
    """Every tenth step fails, before or after its work, and every other step that swaps out (the
    blocks may or may not be copied then). step() raises the error as it is, and all outputs come
    all the same."""
    with LLM(block_size=4, **options) as engine:
        executor, calls = engine.engine.executor, []
        works = executor.execute_model

        def execute_model(scheduler_output: SchedulerOutput) -> Any:
            calls.append(scheduler_output)
            num_swaps = sum(bool(call.blocks_to_swap_out) for call in calls)
            if len(calls) % 20 == 3 or (scheduler_output.blocks_to_swap_out and num_swaps % 2):
                raise KeyboardInterrupt
            model_output = works(scheduler_output)
            if len(calls) % 20 == 13:
                raise RuntimeError("out of memory")
            return model_output

        executor.execute_model = execute_model
        for i, (prompt, params) in enumerate(mixed):
            engine.add_request(str(i), prompt, replace(params, output_kind=FINAL_ONLY))
        finals: dict[str, RequestOutput] = {}
        while engine.has_unfinished_requests():
            with suppress(KeyboardInterrupt, RuntimeError):
                finals |= {output.request_id: output for output in engine.step()}
            engine.engine.block_manager.check()
        assert_idle(engine)
    for i, alone in enumerate(mixed_alone):
        assert_same_output(finals[str(i)], alone)
    assert (sum(bool(call.blocks_to_swap_out) for call in calls) > 2) == (options is SWAP)


def test_close_frees_everything_in_the_middle(
    mixed: Requests,
) -> None:
    """Of waiting, running, forked and swapped requests."""
    with LLM(block_size=4, max_num_seqs=9, **SWAP) as engine:
        for i, (prompt, params) in enumerate(mixed):
            engine.add_request(str(i), prompt, params)
        while not engine.engine.scheduler.swapped:
            engine.step()
    assert_idle(engine)
    assert not hasattr(engine.engine.executor, "runner")


# -- metrics --


def test_moments_come_in_their_order(story_ids: list[int]) -> None:
    before = time.time()
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(num_kv_blocks=8, max_num_seqs=1) as engine:
        first, second = run(engine, [story_ids, story_ids], params)
    for metrics in (first.metrics, second.metrics):
        names = ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts", "finished_ts")
        moments = [getattr(metrics, name) for name in names]
        assert None not in moments
        assert moments == sorted(moments)
        assert before <= metrics.arrival_time <= time.time()  # wall clock
        assert metrics.num_generation_tokens == 5
        assert 0 <= metrics.queue_time <= metrics.first_token_latency
        total = metrics.last_token_ts - metrics.first_token_ts
        assert metrics.inter_token_latency(5) == pytest.approx(total / 4)
        assert metrics.inter_token_latency(1) is None
    assert second.metrics.queue_time >= first.metrics.first_token_latency
    assert second.metrics.scheduled_ts >= first.metrics.finished_ts
    assert second.num_cached_tokens == len(story_ids) // 16 * 16 - (len(story_ids) % 16 == 0) * 16


def test_metrics_of_an_output_are_a_snapshot(llm: LLM, story_ids: list[int]) -> None:
    """Later steps do not change an earlier output."""
    outputs = list(llm.stream(story_ids, SamplingParams(max_tokens=4, ignore_eos=True)))
    moments = [output.metrics.last_token_ts for output in outputs]
    assert len(set(moments)) == 4
    assert moments == sorted(moments)  # type: ignore[type-var]
    assert [o.metrics.finished_ts is None for o in outputs] == [True, True, True, False]
    assert len({output.metrics.first_token_ts for output in outputs}) == 1
