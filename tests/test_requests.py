"""Everything a request may ask for, end to end, against transformers' logits and a slow loop."""

from __future__ import annotations

import math
import threading
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
from nanoserve.config import DEMO_MODEL
from nanoserve.output_processor import CompletionOutput, RequestOutput
from nanoserve.sampler import uniform_noise
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.sequence import SchedulerOutput

STORY = "Once upon a time there was a little dog."
SUM = [{"role": "user", "content": "What is 17 + 25?"}]
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
    """One row after every stage that can change its argmax, token by token."""
    row = logits.astype(np.float64).copy()
    for token in range(len(row)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            row[token] = -math.inf
        if any([*output, token][-len(word) :] == word for word in bad_words):
            row[token] = -math.inf
        if len(output) < params.min_tokens and token in ends:
            row[token] = -math.inf
        row[token] += (params.logit_bias or {}).get(token, 0.0)
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
    """Each token is what the definition allows after those before it, and the end is due."""
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
    """The steps that the engine decides meanwhile."""
    steps: list[SchedulerOutput] = []

    def listener(scheduler_output: SchedulerOutput, _: list[RequestOutput]) -> None:
        steps.append(scheduler_output)

    llm.engine.step_listeners.append(listener)
    try:
        yield steps
    finally:
        llm.engine.step_listeners.remove(listener)


def num_swapped(steps: list[SchedulerOutput]) -> int:
    return sum(len(step.blocks_to_swap_out) for step in steps)


def num_resumed(steps: list[SchedulerOutput]) -> int:
    """Sequences that the runner was told of again: they came back from preemption."""
    introduced = [new.seq_id for step in steps for new in step.new_sequences]
    return len(introduced) - len(set(introduced))


@pytest.fixture
def llm(demo_llm: LLM) -> Iterator[LLM]:
    """The shared engine on the demo model, found and left idle."""
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


def say_even(output_token_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A logits processor: after an even number of tokens, nothing but even ones."""
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
    "processors": {"logits_processors": [say_even]},
    "everything": {
        "presence_penalty": 0.6,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.2,
        "logit_bias": {40: 1.0, 45: -2.0, 3: 50},
        "allowed_token_ids": list(range(10, 300)),
        "min_tokens": 4,
        "stop_token_ids": [40, 41, 42],
        "logits_processors": [say_even],
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
    """A test of the tests: plain greedy tokens fail the check of every parameter that matters."""
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
    """Words of one token and of several, taken from what it would have said."""
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
        said = completion.token_ids
        assert ids not in [said[i : i + len(ids)] for i in range(len(said))]


def test_presence_and_frequency_do_not_see_the_prompt(tiny_llm: LLM) -> None:
    """The first token has no output behind it: only repetition_penalty can move it."""
    folder = tiny_llm.engine.model_config.path
    prompts = (np.random.default_rng(i).permutation(320)[:120].tolist() for i in range(20))
    firsts = ((p, int(reference_logits(folder, p)[-1].argmax())) for p in prompts)
    prompt, likeliest = next((p, first) for p, first in firsts if first in p)
    params = SamplingParams(temperature=0, max_tokens=1, presence_penalty=2, frequency_penalty=2)
    assert run_one(tiny_llm, prompt, params).token_ids == [likeliest]
    params = SamplingParams(temperature=0, max_tokens=1, repetition_penalty=50)
    assert run_one(tiny_llm, prompt, params).token_ids != [likeliest]


def test_a_processor_may_ask_for_the_prompt(tiny_llm: LLM) -> None:
    """With three parameters it is told the prompt, too; both kinds see all output so far."""
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
def test_logprobs_are_of_the_raw_logits(tiny_llm: LLM, number: int) -> None:
    """Whatever penalties, bias and filters make of them; for prompt and output."""
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
    [output] = run(tiny_llm, prompt, params)
    [completion] = output.outputs
    rows = reference_logits(tiny_llm.engine.model_config.path, prompt + completion.token_ids)
    number = 320 if number == -1 else number
    assert output.prompt_logprobs is not None
    assert completion.logprobs is not None
    assert output.prompt_logprobs[0] is None
    entries = [*output.prompt_logprobs[1:], *completion.logprobs]
    tokens = prompt[1:] + completion.token_ids
    for row, token, entry in zip(rows[:-1], tokens, entries, strict=True):
        assert_logprobs(entry, row, token, number, tiny_llm)
    total = sum(
        entry[token].logprob
        for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"long_prefill_token_threshold": 3},
        {"enable_prefix_caching": False},
        {"num_kv_blocks": 23},
        {"num_kv_blocks": 23, "preemption_mode": "swap"},
    ],
    ids=["whole", "budget", "threshold", "uncached", "recompute", "swap"],
)
def test_prompt_logprobs_whatever_the_chunks(
    llm: LLM, story_ids: list[int], options: dict[str, Any]
) -> None:
    """In one step or in chunks of odd sizes, of a prompt that is in the cache (and not read from
    it), and of requests that were pushed out by others."""
    prompts = [(story_ids * 9)[i : i + 75] for i in range(3)]
    params = SamplingParams(
        temperature=0, max_tokens=30, ignore_eos=True, prompt_logprobs=2, logprobs=1
    )
    settings = {"num_kv_blocks": 100, "block_size": 16, **options}
    if "num_kv_blocks" in options:
        settings["block_size"], settings["num_kv_blocks"] = 8, 30
    with LLM(**settings) as engine, watch(engine) as steps:
        run(engine, prompts, SamplingParams(max_tokens=1))
        outputs = run(engine, prompts, params)
        assert_idle(engine)
        if "num_kv_blocks" in options:
            assert num_swapped(steps) if "preemption_mode" in options else num_resumed(steps)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.num_cached_tokens == 0
        assert output.prompt_logprobs is not None
        rows = reference_logits(DEMO_MODEL, prompt)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for row, token, entry in zip(rows, prompt[1:], output.prompt_logprobs[1:], strict=False):
            assert entry is not None
            expected = row.log_softmax(-1)
            assert entry[token].logprob == pytest.approx(float(expected[token]), abs=2e-3)
            assert entry[int(row.argmax())].rank == 1
        assert output.outputs[0].token_ids == run_one(llm, prompt, params).token_ids


def test_no_cap_on_logprobs_if_the_engine_is_told_so(llm: LLM, tiny_llm: LLM) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        for number in (21, -1):
            with pytest.raises(ValueError, match=rf"{name} is {number}; this engine allows 20.*-1"):
                run(llm, STORY, SamplingParams(**{name: number}))
        assert run(llm, STORY, SamplingParams(max_tokens=1, **{name: 20}))
        with pytest.raises(ValueError, match=rf"{name} is 321; this engine allows 320"):
            run(tiny_llm, [5], SamplingParams(**{name: 321}))


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
    """At the first token, across a border, within one token, at the very last allowed token; the
    text and deltas end with it or before it, whatever the kind of output."""
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
        assert expected.startswith(output.outputs[0].text)
    assert output.outputs[0] == completion


def test_min_tokens_holds_back_every_end(llm: LLM, story_ids: list[int]) -> None:
    """EOS, stop ids and stop strings; with and without it."""
    chat = llm.get_tokenizer().apply_chat_template(SUM, tokenize=False, add_generation_prompt=True)
    greedy = SamplingParams(temperature=0, max_tokens=60)
    answer = run_one(llm, chat, greedy)
    assert answer.finish_reason == "stop"
    enough = len(answer.token_ids) + 3
    for at_least in (enough - 3, enough):
        later = run_one(llm, chat, replace(greedy, min_tokens=at_least, max_tokens=at_least + 40))
        assert later.token_ids[: len(answer.token_ids) - 1] == answer.token_ids[:-1]
        assert len(later.token_ids) >= at_least
        is_same = later.token_ids == answer.token_ids
        assert is_same == (at_least <= len(answer.token_ids) - 1) or at_least == enough - 3

    plain = run_one(llm, story_ids, replace(greedy, max_tokens=12, ignore_eos=True))
    stop_id = plain.token_ids[4]
    params = replace(greedy, max_tokens=12, stop_token_ids=[stop_id], ignore_eos=True)
    assert len(run_one(llm, story_ids, params).token_ids) == plain.token_ids.index(stop_id) + 1
    held = run_one(llm, story_ids, replace(params, min_tokens=8))
    assert stop_id not in held.token_ids[:8]
    assert len(held.token_ids) >= 8

    piece = llm.get_tokenizer().decode(plain.token_ids[2:4])
    params = replace(greedy, max_tokens=12, stop=[piece], ignore_eos=True)
    assert run_one(llm, story_ids, params).stop_reason == piece
    for at_least in (7, 12):
        held = run_one(llm, story_ids, replace(params, min_tokens=at_least))
        assert len(held.token_ids) > min(at_least, 11)
        assert held.token_ids == plain.token_ids[: len(held.token_ids)]  # held back, not forbidden


def test_a_stop_string_counts_right_after_min_tokens(llm: LLM, story_ids: list[int]) -> None:
    """What ends within the first min_tokens tokens does not count, the next token's text does."""
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


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("n", [1, 3])
def test_every_kind_of_output_tells_the_same(
    llm: LLM, story_ids: list[int], kind: RequestOutputKind, n: int
) -> None:
    """Deltas join to the final text; cumulative texts grow; nothing shown is taken back."""
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
            assert all(part.token_ids for part in parts), "a delta without news"
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
    """Each as the definition says; the first is the request with n=1, any n has the same ones."""
    [output] = run(llm, story_ids, BRANCHED)
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(tokens) for tokens in tokens_of(output)}) == 4
    assert len({tuple(tokens[:4]) for tokens in tokens_of(output)}) > 1  # early on
    for completion in output.outputs:
        assert_right(llm, story_ids, BRANCHED, completion)
    for n in (1, 2, 3):
        [fewer] = run(llm, story_ids, replace(BRANCHED, n=n))
        assert tokens_of(fewer) == tokens_of(output)[:n]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_seqs": 4},
        {"max_num_batched_tokens": 6, "max_num_seqs": 6},
        {"block_size": 4, "num_kv_blocks": 24},
        {"block_size": 4, "num_kv_blocks": 24, "enable_prefix_caching": False},
        {"block_size": 4, "num_kv_blocks": 24, "preemption_mode": "swap"},
        {"block_size": 4, "num_kv_blocks": 24, "preemption_mode": "swap", "num_cpu_blocks": 9},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "ample",
)
def test_a_branch_is_the_same_in_any_company(
    llm: LLM, story_ids: list[int], options: dict[str, Any]
) -> None:
    """Three requests with n=4 at once: each branch is what it is with the engine to itself."""
    prompts = [story_ids, story_ids[:9], story_ids[:5]]
    params = [replace(BRANCHED, seed=seed) for seed in (21, 22, 23)]
    params[1] = replace(params[1], repetition_penalty=1.3, frequency_penalty=0.5, logprobs=2)
    expected = [run(llm, *pair)[0] for pair in zip(prompts, params, strict=True)]
    with LLM(**{"num_kv_blocks": 64, **options}) as engine, watch(engine) as steps:
        outputs = run(engine, prompts, params)
        assert_idle(engine)
    assert [tokens_of(o) for o in outputs] == [tokens_of(o) for o in expected]
    for completion, alone in zip(outputs[1].outputs, expected[1].outputs, strict=True):
        assert completion.text == alone.text
        assert completion.cumulative_logprob == pytest.approx(alone.cumulative_logprob, abs=1e-3)
    if "num_kv_blocks" in options:
        assert num_resumed(steps) > 0
        assert bool(num_swapped(steps)) == (options.get("preemption_mode") == "swap")


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_prompt_is_computed_once(story_ids: list[int], enable_prefix_caching: bool) -> None:
    """n=4: the prompt's tokens, then four times all but the last of the output. Its last, partly
    filled block is copied by all branches but one."""
    prompt = story_ids[:10]
    with (
        LLM(num_kv_blocks=64, block_size=8, enable_prefix_caching=enable_prefix_caching) as engine,
        watch(engine) as steps,
    ):
        run(engine, prompt, BRANCHED)
    assert sum(step.total_num_scheduled_tokens for step in steps) == 10 + 4 * 11
    assert sum(len(step.blocks_to_copy) for step in steps) == 3
    assert len({pair[0] for step in steps for pair in step.blocks_to_copy}) == 1


def test_branches_know_what_was_cached(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = [5 + i % 7 for i in range(40)]
    assert run(llm, prompt, BRANCHED)[0].num_cached_tokens == 0
    assert run(llm, prompt, BRANCHED)[0].num_cached_tokens == 32


def test_one_branch_may_be_aborted(llm: LLM, story_ids: list[int]) -> None:
    """It stays as it is; the others go on as if nothing had been."""
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


def test_aborting_the_last_branch_brings_what_the_others_said(
    llm: LLM, story_ids: list[int]
) -> None:
    """All has ended then, and the output says so."""
    params = replace(BRANCHED, n=2, output_kind=FINAL_ONLY)
    [expected] = run(llm, story_ids, params)
    stop = next(t for t in expected.outputs[0].token_ids if t not in expected.outputs[1].token_ids)
    params = replace(params, stop_token_ids=[stop])
    llm.add_request("mine", story_ids, params)
    for _ in range(expected.outputs[0].token_ids.index(stop) + 1):
        assert llm.step() == []
    assert llm.abort_request("mine", 1)
    assert llm.has_unfinished_requests()
    [final] = llm.step()
    assert final.finished
    assert [c.finish_reason for c in final.outputs] == ["stop", "abort"]
    assert not llm.abort_request("mine")


def test_all_branches_are_aborted_with_their_request(llm: LLM, story_ids: list[int]) -> None:
    for num_steps in range(4):
        llm.add_request("mine", story_ids, BRANCHED)
        for _ in range(num_steps):
            llm.step()
        assert llm.abort_request("mine")
        assert_idle(llm)
        assert not llm.abort_request("mine")
        assert llm.step() == []


@pytest.mark.parametrize("n", [1, 3])
def test_aborting_all_branches_one_by_one_ends_the_request(
    llm: LLM, story_ids: list[int], n: int
) -> None:
    llm.add_request("mine", story_ids, replace(BRANCHED, n=n))
    llm.step()
    assert all(llm.abort_request("mine", index) for index in range(n))
    [final] = llm.step()
    assert final.finished
    assert [c.finish_reason for c in final.outputs] == ["abort"] * n
    assert_idle(llm)


# -- preemption, both kinds --


def crowd(story_ids: list[int]) -> tuple[list[list[int]], list[SamplingParams]]:
    """Five requests that do not fit beside each other in 24 blocks of 4."""
    prompts = [story_ids, story_ids[:7], [9, 8, 7, 6], story_ids[2:], story_ids]
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=2),
        SamplingParams(n=3, seed=5, max_tokens=20, frequency_penalty=0.6, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=36, repetition_penalty=1.3, min_tokens=30),
        SamplingParams(seed=6, max_tokens=20, prompt_logprobs=1, bad_words=["dog", "happy"]),
        SamplingParams(seed=7, top_p=0.9, max_tokens=24, logit_bias={300: 3}, ignore_eos=True),
    ]
    return prompts, params


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("mode", ["recompute", "swap", "swap_few_cpu_blocks"])
def test_preemption_changes_nothing(
    llm: LLM, story_ids: list[int], mode: str, enable_prefix_caching: bool
) -> None:
    """Tokens, texts and log-probabilities of greedy and seeded requests, of branches, of penalties
    that count what was said before; with too few CPU blocks, some are swapped, some computed."""
    prompts, params = crowd(story_ids)
    expected = [run(llm, *pair)[0] for pair in zip(prompts, params, strict=True)]
    options: dict[str, Any] = {"preemption_mode": mode[:4] if "swap" in mode else mode}
    if mode == "swap_few_cpu_blocks":
        options["num_cpu_blocks"] = 10
    with (
        LLM(
            num_kv_blocks=24, block_size=4, enable_prefix_caching=enable_prefix_caching, **options
        ) as engine,
        watch(engine) as steps,
    ):
        outputs = run(engine, prompts, params)
        assert_idle(engine)
    assert bool(num_swapped(steps)) == ("swap" in mode)
    assert num_resumed(steps) > 0
    assert any(output.metrics.num_preemptions for output in outputs)
    if mode == "swap":  # nothing is computed twice
        assert sum(len(step.blocks_to_swap_in) for step in steps) == num_swapped(steps)
        computed = sum(step.total_num_scheduled_tokens for step in steps)
        known = sum(
            len(output.prompt_token_ids) + sum(len(c.token_ids) - 1 for c in output.outputs)
            for output in outputs
        )
        assert computed <= known
    for output, alone in zip(outputs, expected, strict=True):
        for completion, other in zip(output.outputs, alone.outputs, strict=True):
            assert completion.token_ids == other.token_ids
            assert completion.text == other.text
            assert (completion.cumulative_logprob is None) == (other.cumulative_logprob is None)
            if completion.cumulative_logprob is not None:
                assert completion.cumulative_logprob == pytest.approx(
                    other.cumulative_logprob, abs=1e-3
                )
        assert (output.prompt_logprobs is None) == (alone.prompt_logprobs is None)
        for entry, other in zip(
            output.prompt_logprobs or (), alone.prompt_logprobs or (), strict=True
        ):
            assert entry is other is None or entry.keys() == other.keys()


# -- each as if it were alone --

MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "presence_penalty": 1.0, "logprobs": 3},
    {"seed": 1, "frequency_penalty": -0.5, "top_k": 9},
    {"seed": 2, "repetition_penalty": 1.5, "min_p": 0.05},
    {"seed": 3, "n": 3, "logit_bias": {260: 5, 300: -5}, "stop": ["the"]},
    {"temperature": 0, "allowed_token_ids": list(range(200, 500))},
    {"seed": 4, "temperature": 1.3, "bad_words": ["the", "little", "was a"]},
    {"temperature": 0, "min_tokens": 8, "stop_token_ids": list(range(3, 2000, 3))},
    {"seed": 5, "logits_processors": [say_even], "top_p": 0.8},
    {"temperature": 0, "prompt_logprobs": 2, "stop": [" a"], "include_stop_str_in_output": True},
    {"seed": 6, "detokenize": False, "ignore_eos": True, "n": 2, "presence_penalty": -1},
    {"seed": 7, "skip_special_tokens": False, "logprobs": 0, "prompt_logprobs": 0},
]


def assert_same_output(got: RequestOutput, expected: RequestOutput) -> None:
    """All that does not depend on the engine's history; log-probabilities rounded."""

    def rounded(entry: Any) -> Any:
        return entry and {t: (round(e.logprob, 2), e.decoded_token) for t, e in entry.items()}

    def comparable(output: RequestOutput) -> list[Any]:
        return [
            [replace(c, logprobs=None, cumulative_logprob=None) for c in output.outputs],
            [len(c.logprobs or ()) for c in output.outputs],
        ]

    assert comparable(got) == comparable(expected)
    for one, other in zip(got.outputs, expected.outputs, strict=True):
        for entry, right in zip(one.logprobs or (), other.logprobs or (), strict=True):
            assert entry.keys() == right.keys()
            assert all(entry[t].logprob == pytest.approx(right[t].logprob, abs=1e-3) for t in right)
    assert len(got.prompt_logprobs or ()) == len(expected.prompt_logprobs or ())


@pytest.mark.parametrize("mode", ["ample", "recompute", "swap"])
def test_a_mixed_batch_gives_each_what_it_gets_alone(
    llm: LLM, story_ids: list[int], mode: str
) -> None:
    """Twelve requests, twelve sets of features, one batch; a row never sees its neighbour's."""
    params = [SamplingParams(max_tokens=16, **wish) for wish in MIXED]
    prompts = [story_ids[: 4 + i] for i in range(len(params))]
    expected = [run(llm, *pair)[0] for pair in zip(prompts, params, strict=True)]
    options: dict[str, Any] = {"num_kv_blocks": 200, "block_size": 4}
    if mode != "ample":
        options |= {"num_kv_blocks": 30, "preemption_mode": mode}
    with LLM(**options) as engine, watch(engine) as steps:
        outputs = run(engine, prompts, params)
        assert_idle(engine)
    assert (num_resumed(steps) > 0) == (mode != "ample")
    for got, right in zip(outputs, expected, strict=True):
        assert_same_output(got, right)


@st.composite
def wishes(draw: st.DrawFn) -> SamplingParams:
    """Any parameters that go together, for a vocabulary of 320."""
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
        logits_processors=draw(st.none() | st.just([say_even])),
        output_kind=draw(st.sampled_from(RequestOutputKind)),
    )


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    requests=st.lists(st.tuples(wishes(), st.integers(1, 20)), min_size=2, max_size=7),
    aborts=st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 2)), max_size=5),
    mode=st.sampled_from(["recompute", "swap"]),
    num_kv_blocks=st.integers(14, 30),
    num_cpu_blocks=st.integers(1, 20),
    enable_prefix_caching=st.booleans(),
    budget=st.sampled_from([6, 17, 400]),
)
def test_any_parameters_any_aborts_any_preemption(
    tiny_llm: LLM,
    requests: list[tuple[SamplingParams, int]],
    aborts: list[tuple[int, int | None]],
    mode: str,
    num_kv_blocks: int,
    num_cpu_blocks: int,
    enable_prefix_caching: bool,
    budget: int,
) -> None:
    """Whoever is not aborted gets what it gets alone; then all blocks of both pools are free."""
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

    with LLM(
        tiny_llm.engine.model_config.path,
        num_kv_blocks=num_kv_blocks,
        num_cpu_blocks=num_cpu_blocks if mode == "swap" else None,
        preemption_mode=mode,
        block_size=4,
        max_num_seqs=6,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
        max_logprobs=-1,
    ) as llm:
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
                continue  # as far as it came, it is a beginning
            assert tokens[key] == completion.token_ids
            assert reasons[key] == completion.finish_reason


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


# -- living with the engine --


def test_the_bare_loop_gives_what_generate_gives(llm: LLM, story_ids: list[int]) -> None:
    params = [SamplingParams(max_tokens=10, **wish) for wish in MIXED]
    expected = run(llm, [story_ids] * len(params), params)
    for i, wish in enumerate(params):
        llm.engine.add_request(str(i), story_ids, replace(wish, output_kind=FINAL_ONLY))
    finals = {}
    while llm.engine.has_unfinished_requests():
        finals |= {output.request_id: output for output in llm.engine.step()}
    for i, right in enumerate(expected):
        assert_same_output(finals[str(i)], right)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ZeroDivisionError()])
@pytest.mark.parametrize("place", ["processor", "listener"])
def test_an_exception_in_generate_takes_its_own_requests_only(
    llm: LLM, story_ids: list[int], error: BaseException, place: str
) -> None:
    """In a logits processor or in an on_step listener, at whatever step: the others lose nothing,
    not even the outputs of that very step."""
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    expected = run_one(llm, story_ids, params).token_ids
    for when in (0, 1, 3, 7):
        calls = []

        def fail(*arguments: Any, when: int = when, calls: list[int] = calls) -> Any:
            calls.append(0)
            if len(calls) == when + 1:
                raise error
            return arguments[-1]

        llm.add_request("other", story_ids, replace(params, n=1))
        mine = params
        if place == "processor":
            mine = replace(params, logits_processors=[lambda output, logits, f=fail: f(logits)])
        else:
            llm.engine.step_listeners.append(fail)
        with pytest.raises(type(error)):
            run(llm, ["One day", story_ids], mine)
        llm.engine.step_listeners.clear()
        left = {seq.request_id for seq in llm.engine.scheduler.sequences.values()}
        assert left <= {"other"}
        outputs = []
        while llm.has_unfinished_requests():
            outputs += llm.step()
        assert {output.request_id for output in outputs} == {"other"}
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        assert counts == list(range(1, 9))
        assert outputs[-1].outputs[0].token_ids == expected
        assert_idle(llm)


def test_outputs_that_were_ready_when_a_listener_failed_come_next(
    llm: LLM, story_ids: list[int]
) -> None:
    """Even if they were the last there are."""
    llm.add_request("mine", story_ids, SamplingParams(max_tokens=1))

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    llm.engine.step_listeners.append(fail)
    with pytest.raises(ZeroDivisionError):
        llm.step()
    llm.engine.step_listeners.clear()
    assert llm.has_unfinished_requests()
    [output] = llm.step()
    assert (output.request_id, output.finished) == ("mine", True)
    assert not llm.has_unfinished_requests()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_failing_steps_in_a_crowd(llm: LLM, story_ids: list[int], mode: str) -> None:
    """Every tenth step fails, before or after its work, forks included, and every other one that
    swaps out: nobody knows then whether the blocks were copied."""
    prompts, params = crowd(story_ids)
    expected = [tokens_of(run(llm, *pair)[0]) for pair in zip(prompts, params, strict=True)]
    with LLM(num_kv_blocks=24, block_size=4, preemption_mode=mode) as engine:
        executor, calls = engine.engine.executor, []
        works = executor.execute_model

        def execute_model(scheduler_output: SchedulerOutput) -> Any:
            calls.append(scheduler_output)
            num_swaps = sum(bool(call.blocks_to_swap_out) for call in calls)
            if len(calls) % 20 == 3 or (scheduler_output.blocks_to_swap_out and num_swaps % 2):
                raise KeyboardInterrupt
            model_output = works(scheduler_output)
            if len(calls) % 20 == 13:
                raise KeyboardInterrupt
            return model_output

        executor.execute_model = execute_model
        for i, (prompt, wish) in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(i), prompt, replace(wish, output_kind=FINAL_ONLY))
        finals = {}
        while engine.has_unfinished_requests():
            with suppress(KeyboardInterrupt):
                finals |= {output.request_id: tokens_of(output) for output in engine.step()}
            engine.engine.block_manager.check()
        assert_idle(engine)
    assert [finals[str(i)] for i in range(len(prompts))] == expected
    assert (sum(bool(call.blocks_to_swap_out) for call in calls) > 2) == (mode == "swap")


def test_two_threads_are_noticed(llm: LLM, story_ids: list[int]) -> None:
    """The second is told; the first notices nothing."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = run_one(llm, story_ids, params).token_ids
    inside, done = threading.Event(), threading.Event()

    def wait(output: list[int], logits: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert done.wait(20)
        return logits

    results: list[RequestOutput] = []
    slow = replace(params, logits_processors=[wait])
    thread = threading.Thread(target=lambda: results.extend(run(llm, story_ids, slow)))
    thread.start()
    assert inside.wait(20)
    for call in (
        lambda: llm.step(),
        lambda: llm.add_request("other", story_ids, params),
        lambda: llm.abort_request("other"),
        lambda: run(llm, story_ids, params),
    ):
        with pytest.raises(RuntimeError, match=r"driven from another thread.*not thread-safe"):
            call()
    done.set()
    thread.join(20)
    assert results[0].outputs[0].token_ids == expected
    assert run_one(llm, story_ids, params).token_ids == expected


def test_a_listener_may_abort(llm: LLM, story_ids: list[int]) -> None:
    """Its own thread is in the engine already."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)

    def listener(_: SchedulerOutput, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.request_id == "mine" and len(output.outputs[0].token_ids) == 3:
                assert llm.abort_request("mine")

    llm.engine.step_listeners.append(listener)
    llm.add_request("mine", story_ids, params)
    llm.add_request("other", story_ids, params)
    outputs = []
    while llm.has_unfinished_requests():
        outputs += llm.step()
    llm.engine.step_listeners.clear()
    assert max(len(o.outputs[0].token_ids) for o in outputs if o.request_id == "mine") <= 3
    assert outputs[-1].request_id == "other"
    assert len(outputs[-1].outputs[0].token_ids) == 9


def test_close_gives_everything_back_in_the_middle(story_ids: list[int]) -> None:
    """Waiting, running, forked and swapped requests alike."""
    prompts, params = crowd(story_ids)
    with LLM(num_kv_blocks=24, block_size=4, preemption_mode="swap", max_num_seqs=6) as engine:
        for i, pair in enumerate(zip(prompts, params, strict=True)):
            engine.add_request(str(i), *pair)
        while not engine.engine.scheduler.swapped:
            engine.step()
    assert_idle(engine)
    assert not hasattr(engine.engine.executor, "runner")


# -- metrics --


def test_moments_come_in_their_order(story_ids: list[int]) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    with LLM(num_kv_blocks=8, max_num_seqs=1) as engine:
        first, second = run(engine, [story_ids, story_ids], params)
    for metrics in (first.metrics, second.metrics):
        moments = [
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.last_token_time,
            metrics.finished_time,
        ]
        assert None not in moments
        assert moments == sorted(moments)  # type: ignore[type-var]
        assert 0 <= metrics.queue_time <= metrics.time_to_first_token
        total = metrics.last_token_time - metrics.first_token_time
        assert metrics.inter_token_latency(5) == pytest.approx(total / 4)
        assert metrics.inter_token_latency(1) is None
    assert second.metrics.queue_time >= first.metrics.time_to_first_token
    assert second.metrics.first_scheduled_time >= first.metrics.finished_time
    assert second.num_cached_tokens == len(story_ids) // 16 * 16 - (len(story_ids) % 16 == 0) * 16


def test_metrics_of_an_output_are_a_snapshot(llm: LLM, story_ids: list[int]) -> None:
    """Later steps do not change what an earlier output said."""
    outputs = list(llm.stream(story_ids, SamplingParams(max_tokens=4, ignore_eos=True)))
    moments = [output.metrics.last_token_time for output in outputs]
    assert len(set(moments)) == 4
    assert moments == sorted(moments)  # type: ignore[type-var]
    assert [o.metrics.finished_time is None for o in outputs] == [True, True, True, False]
    assert len({output.metrics.first_token_time for output in outputs}) == 1


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemptions_are_counted(story_ids: list[int], mode: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with (
        LLM(num_kv_blocks=20, block_size=4, preemption_mode=mode) as engine,
        watch(engine) as steps,
    ):
        outputs = run(engine, [story_ids] * 3, params)
    assert outputs[0].metrics.num_preemptions == 0  # the first to come is the last to go
    assert sum(o.metrics.num_preemptions for o in outputs) == num_resumed(steps) > 0
