"""Invariant 1, end to end on the demo model: a request's tokens do not depend on anything but the
request. And invariant 4: engines in one process leave each other, and the process, alone."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.config import DEMO_MODEL
from nanoserve.sampler import SamplingBatch, sample, uniform_noise
from nanoserve.sequence import SchedulerOutput

NEAR_TIE = 1e-4  # of the logits' standard deviation, in float32


@dataclass(frozen=True)
class Request:
    """One request of the set that every test here serves again."""

    prompt_token_ids: list[int]
    params: SamplingParams


@lru_cache(maxsize=1)
def reference_model() -> Any:
    """The demo model in transformers, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()


@lru_cache(maxsize=1)
def make_requests() -> list[Request]:
    """Stories, sums and noise; 1 to about 170 tokens; greedy and sampled; common prefixes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    vocab_size = reference_model().config.vocab_size
    noise = random.Random(0)

    def chat(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    def greedy(max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=max_tokens)

    story = tokenizer.encode("Once upon a time there was a little dog. The dog was very happy.")
    random_ids = [noise.randrange(3, vocab_size) for _ in range(170)]
    sampled = [
        SamplingParams(temperature=0.8, seed=7, max_tokens=24),
        SamplingParams(temperature=1.0, top_p=0.9, seed=8, max_tokens=20),
        SamplingParams(temperature=1.2, top_k=12, seed=9, max_tokens=24),
        SamplingParams(temperature=0.9, top_k=30, top_p=0.95, min_p=0.02, seed=7, max_tokens=17),
    ]
    return [
        Request(story, greedy(24)),
        Request(chat("What is 17 + 25?"), greedy(20)),
        Request(story, sampled[0]),  # the same prompt as the first
        Request(chat("What is the capital of France?"), greedy(20)),
        Request(story[:9], sampled[1]),
        Request(random_ids, greedy(12)),
        Request(random_ids[:64], sampled[2]),  # whole blocks of 1, 4, 16 and 32 tokens
        Request(story[:1], greedy(30)),
        Request(random_ids[:33], greedy(16)),
        Request(chat("What is 17 + 25?"), sampled[3]),
        Request(story[:16], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)),
        Request(story, greedy(24)),  # the first once more
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What each request answers when it has the engine to itself."""
    with LLM(num_kv_blocks=64, enable_prefix_caching=False) as llm:
        return [
            llm.generate(request.prompt_token_ids, request.params, use_tqdm=False)[0]
            .outputs[0]
            .token_ids
            for request in make_requests()
        ]


# -- what "the same tokens" means --


@torch.inference_mode()
def reference_logits(token_ids: list[int]) -> Tensor:
    """Teacher-forced logits [num_tokens, vocab_size]: row i follows token_ids[: i + 1]."""
    return reference_model()(torch.tensor([token_ids])).logits[0].float()


def allowed_tokens(logits: Tensor, params: SamplingParams, position: int) -> set[int]:
    """The tokens that a sampler may choose from these logits, near ties included.

    Greedy: all within NEAR_TIE of the best. Sampled: what the request's random number of this
    position draws, it being moved by up to NEAR_TIE either way.
    """
    if params.is_greedy:
        gap = (logits.max() - logits) / logits.std()
        return set((gap < NEAR_TIE).nonzero()[:, 0].tolist())
    assert params.seed is not None
    [noise] = uniform_noise(np.array([params.seed]), np.array([0]), np.array([position]))
    uniform = torch.tensor([noise - NEAR_TIE, noise, noise + NEAR_TIE]).clamp(0, 1 - 1e-12)
    batch = SamplingBatch(
        temperature=torch.full((3,), params.temperature),
        top_k=torch.full((3,), params.top_k or logits.numel()),
        top_p=torch.full((3,), params.top_p),
        min_p=torch.full((3,), params.min_p),
        uniform=uniform.double(),
        num_logprobs=(None, None, None),
    )
    return set(sample(logits.expand(3, -1), batch).to_host().token_ids)


def assert_valid(request: Request, token_ids: list[int]) -> None:
    """Every token is what the reference allows after those before it; the end is where it is due.

    After a near tie two correct answers have nothing in common, so the comparison goes on
    teacher-forced, with the tokens that were chosen.
    """
    prompt, params = request.prompt_token_ids, request.params
    logits = reference_logits(prompt + token_ids)
    for i, token_id in enumerate(token_ids):
        allowed = allowed_tokens(logits[len(prompt) - 1 + i], params, len(prompt) + i)
        assert token_id in allowed, f"token {i} is {token_id}, allowed: {allowed}"
    eos_token_ids = {reference_model().config.eos_token_id}
    eos_token_ids |= set(np.atleast_1d(reference_model().generation_config.eos_token_id).tolist())
    ends = [i for i, token_id in enumerate(token_ids) if token_id in eos_token_ids]
    if ends and not params.ignore_eos:
        assert ends == [len(token_ids) - 1]
    else:
        assert len(token_ids) == params.max_tokens


def assert_same(request: Request, token_ids: list[int], expected: list[int]) -> None:
    """Equal token for token, or, where a near tie was broken otherwise, as good."""
    if token_ids != expected:
        assert_valid(request, token_ids)


def assert_all_same(outputs: list[Any], expected: list[list[int]]) -> None:
    for request, output, token_ids in zip(make_requests(), outputs, expected, strict=True):
        assert_same(request, output.outputs[0].token_ids, token_ids)


def generate_all(llm: LLM, priority: list[int] | None = None) -> list[Any]:
    """All requests at once, and every block free again afterwards."""
    requests = make_requests()
    outputs = llm.generate(
        [request.prompt_token_ids for request in requests],
        [request.params for request in requests],
        use_tqdm=False,
        priority=priority,
    )
    assert_all_free(llm)
    return outputs


def assert_all_free(llm: LLM) -> None:
    block_manager = llm.engine.block_manager
    block_manager.check()
    assert block_manager.num_free_blocks == block_manager.pool.num_blocks


# -- the reference itself --


def test_greedy_tokens_are_those_of_transformers(expected: list[list[int]]) -> None:
    """transformers' own generate loop says the same, one prompt at a time."""
    for request, token_ids in zip(make_requests(), expected, strict=True):
        if not request.params.is_greedy:
            continue
        input_ids = torch.tensor([request.prompt_token_ids])
        output = reference_model().generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=False,
            max_new_tokens=request.params.max_tokens,
            eos_token_id=-1 if request.params.ignore_eos else None,
        )
        assert_same(request, token_ids, output[0, len(request.prompt_token_ids) :].tolist())


def test_every_token_is_what_teacher_forcing_allows(expected: list[list[int]]) -> None:
    """Sampled ones too: logits of transformers, the sampler's formula, the request's noise."""
    for request, token_ids in zip(make_requests(), expected, strict=True):
        assert_valid(request, token_ids)


def test_the_comparison_notices_a_wrong_token(expected: list[list[int]]) -> None:
    """A test of the tests: one exchanged token, or one too few, is no near tie."""
    for request, token_ids in list(zip(make_requests(), expected, strict=True))[:3]:
        wrong = [*token_ids]
        wrong[3] = (wrong[3] + 1) % 1000
        with pytest.raises(AssertionError):
            assert_same(request, wrong, token_ids)
        with pytest.raises(AssertionError):
            assert_same(request, token_ids[:-1], token_ids)


# -- one setting at a time --

BATCHES: dict[str, dict[str, Any]] = {
    "ample": {"num_kv_blocks": 512},
    "no_prefix_caching": {"num_kv_blocks": 512, "enable_prefix_caching": False},
    "block_size_1": {"num_kv_blocks": 1500, "block_size": 1},
    "block_size_4": {"num_kv_blocks": 400, "block_size": 4},
    "block_size_32": {"num_kv_blocks": 100, "block_size": 32},
    "block_larger_than_all": {"num_kv_blocks": 12, "block_size": 256},
    "two_at_a_time": {"num_kv_blocks": 100, "max_num_seqs": 2},
    "one_token_a_step": {
        "num_kv_blocks": 100,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 1,
    },
    "budget_5": {"num_kv_blocks": 100, "max_num_seqs": 5, "max_num_batched_tokens": 5},
    "budget_16": {"num_kv_blocks": 100, "max_num_seqs": 12, "max_num_batched_tokens": 16},
    "budget_67": {"num_kv_blocks": 100, "max_num_seqs": 12, "max_num_batched_tokens": 67},
    "long_prefill_threshold": {"num_kv_blocks": 100, "long_prefill_token_threshold": 7},
    "no_chunked_prefill": {
        "num_kv_blocks": 100,
        "enable_chunked_prefill": False,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
    },
    "priority_policy": {"num_kv_blocks": 100, "scheduling_policy": "priority"},
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_setting_changes_no_token(name: str, expected: list[list[int]]) -> None:
    """All requests at once; then again, with whatever the prefix cache now holds."""
    with LLM(**BATCHES[name]) as llm:
        assert_all_same(generate_all(llm), expected)
        warm = generate_all(llm)
        assert_all_same(warm, expected)
        caches = llm.engine.config.enable_prefix_caching and llm.engine.config.block_size < 256
        assert any(output.num_cached_tokens for output in warm) == caches


# Room for the longest request (182 tokens, 192 in blocks of 32), and little more.
CROWDED: dict[str, dict[str, Any]] = {
    "blocks_of_1": {"num_kv_blocks": 190, "block_size": 1},
    "blocks_of_4": {"num_kv_blocks": 47, "block_size": 4},
    "blocks_of_16": {"num_kv_blocks": 12},
    "blocks_of_32": {"num_kv_blocks": 6, "block_size": 32},
    "no_prefix_caching": {"num_kv_blocks": 12, "enable_prefix_caching": False},
    "small_budget": {"num_kv_blocks": 12, "max_num_seqs": 8, "max_num_batched_tokens": 24},
    "no_chunked_prefill": {
        "num_kv_blocks": 12,
        "enable_chunked_prefill": False,
        "max_model_len": 192,
    },
    "priority_policy": {"num_kv_blocks": 12, "scheduling_policy": "priority"},
}


@pytest.mark.parametrize("name", CROWDED)
def test_preemption_changes_no_token(name: str, expected: list[list[int]]) -> None:
    """So few blocks that requests push each other out, and come back."""
    priority = [i % 3 for i in range(len(expected))] if name == "priority_policy" else None
    with LLM(**CROWDED[name]) as llm:
        outputs = generate_all(llm, priority)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert_all_same(outputs, expected)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_arrival_order_and_company_change_no_token(seed: int, expected: list[list[int]]) -> None:
    """Any subset, in any order, under any priorities."""
    chance = random.Random(seed)
    chosen = chance.sample(range(len(expected)), chance.randrange(3, len(expected)))
    requests = make_requests()
    with LLM(num_kv_blocks=24, max_num_seqs=5, scheduling_policy="priority") as llm:
        outputs = llm.generate(
            [requests[i].prompt_token_ids for i in chosen],
            [requests[i].params for i in chosen],
            use_tqdm=False,
            priority=[chance.randrange(-2, 3) for _ in chosen],
        )
        for i, output in zip(chosen, outputs, strict=True):
            assert_same(requests[i], output.outputs[0].token_ids, expected[i])


def test_seeds_drawn_by_the_engine_repeat_with_its_seed() -> None:
    """A request without a seed gets one by arrival, from the engine's: runs can be repeated."""

    def texts(seed: int, **options: Any) -> list[str]:
        params = SamplingParams(temperature=1.0, max_tokens=12)
        with LLM(num_kv_blocks=64, seed=seed, **options) as llm:
            outputs = llm.generate(["Once upon a time"] * 3, params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    first = texts(1)
    assert first == texts(1, block_size=4, max_num_seqs=1)
    assert first != texts(2)
    assert len(set(first)) > 1  # each request has a stream of its own


# -- anything, at any moment --

VERBS = ["add", "add", "add", "step", "step", "step", "abort", "fail"]
ACTIONS = st.tuples(st.sampled_from(VERBS), st.integers(0, 1000))


@st.composite
def engine_options(draw: st.DrawFn) -> dict[str, Any]:
    """Settings with room for the longest request, and from no room to plenty beside it."""
    block_size = draw(st.sampled_from([1, 4, 16, 32]))
    max_num_seqs = draw(st.integers(1, 8))
    options = {
        "block_size": block_size,
        "num_kv_blocks": -(-184 // block_size) + draw(st.integers(0, 400 // block_size)),
        "max_num_seqs": max_num_seqs,
        "enable_prefix_caching": draw(st.booleans()),
        "enable_chunked_prefill": draw(st.booleans()),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3, 40])),
        "max_model_len": 192,
    }
    smallest = max_num_seqs if options["enable_chunked_prefill"] else 192
    options["max_num_batched_tokens"] = draw(st.integers(smallest, 400))
    return options


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(options=engine_options(), actions=st.lists(ACTIONS, min_size=10, max_size=60))
def test_requests_that_come_and_go_at_any_moment_get_their_tokens(
    expected: list[list[int]], options: dict[str, Any], actions: list[tuple[str, int]]
) -> None:
    """The crank in the open: add, step and abort at random, on a random engine, whose steps fail
    now and then, with their work done or not."""
    requests = make_requests()
    added: dict[str, int] = {}  # request id -> index of the request
    aborted: set[str] = set()
    finished: dict[str, list[int]] = {}
    by_priority = options["scheduling_policy"] == "priority"

    def step(llm: LLM) -> None:
        for output in llm.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].token_ids
        llm.engine.block_manager.check()

    def fail(llm: LLM, is_late: bool) -> None:
        """A step that Ctrl-C interrupts."""
        executor = llm.engine.executor
        works = executor.execute_model

        def execute_model(scheduler_output: SchedulerOutput) -> None:
            if is_late:
                works(scheduler_output)
            raise KeyboardInterrupt

        executor.execute_model = execute_model
        try:
            with pytest.raises(KeyboardInterrupt):
                llm.step()
        finally:
            executor.execute_model = works
        llm.engine.block_manager.check()

    with LLM(**options) as llm:
        for verb, number in actions:
            unfinished = [name for name in added if name not in finished and name not in aborted]
            if verb == "add":
                name, i = f"request-{len(added)}", number % len(requests)
                priority = number % 5 if by_priority else 0
                llm.add_request(
                    name, requests[i].prompt_token_ids, requests[i].params, priority=priority
                )
                added[name] = i
            elif verb == "abort" and unfinished:
                name = unfinished[number % len(unfinished)]
                assert llm.abort_request(name)
                aborted.add(name)
                llm.engine.block_manager.check()
            elif verb == "fail" and unfinished:
                fail(llm, is_late=number % 2 == 1)
            else:
                for _ in range(number % 8):
                    step(llm)
        while llm.has_unfinished_requests():
            step(llm)
        assert_all_free(llm)

    assert finished.keys() == added.keys() - aborted
    for name, token_ids in finished.items():
        assert_same(requests[added[name]], token_ids, expected[added[name]])


# -- engines, plural --


def run_to_the_end(llm: LLM) -> Iterator[dict[str, list[int]]]:
    """Add every request, then a step at each next(); yields what has finished so far."""
    for i, request in enumerate(make_requests()):
        llm.add_request(str(i), request.prompt_token_ids, request.params)
    finished: dict[str, list[int]] = {}
    while llm.has_unfinished_requests():
        for output in llm.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].token_ids
        yield finished


def test_two_engines_step_by_step_in_turn(expected: list[list[int]], make_checkpoint: Any) -> None:
    """Two on the demo model with other settings and one on another model, interleaved."""
    folder = make_checkpoint("llama")
    params = SamplingParams(temperature=0, max_tokens=10)
    with LLM(folder, num_kv_blocks=8) as llm:
        llama_tokens = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids

    with (
        LLM(num_kv_blocks=200, block_size=4) as first,
        LLM(num_kv_blocks=12, max_num_seqs=3, max_num_batched_tokens=19) as second,
        LLM(folder, num_kv_blocks=8) as third,
    ):
        third.add_request("llama", [5, 6, 7], params)
        others = []
        runs = {0: run_to_the_end(first), 1: run_to_the_end(second)}
        results: dict[int, dict[str, list[int]]] = {}
        while runs or third.has_unfinished_requests():
            for number, run in list(runs.items()):
                finished = next(run, None)
                if finished is None:
                    del runs[number]
                else:
                    results[number] = finished
            others += third.step()
        for result in results.values():
            for i, request in enumerate(make_requests()):
                assert_same(request, result[str(i)], expected[i])
        assert others[-1].outputs[0].token_ids == llama_tokens


def test_an_engine_leaves_the_process_as_it_was(make_checkpoint: Any) -> None:
    """No default dtype or device, no generator, no thread, no process group is touched."""

    def state() -> dict[str, Any]:
        return {
            "dtype": torch.get_default_dtype(),
            "device": torch.get_default_device(),
            "torch generator": torch.random.get_rng_state().tolist(),
            "random generator": random.getstate(),
            "numpy generator": np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
            "torch threads": torch.get_num_threads(),
            "threads": threading.active_count(),
            "gradients": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "process group": (
                torch.distributed.is_available() and torch.distributed.is_initialized()
            ),
        }

    with LLM(num_kv_blocks=16) as llm:  # what is imported or started once, is
        llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
    before = state()
    with LLM(num_kv_blocks=16, dtype="bfloat16", seed=3) as llm:
        llm.generate("Once", SamplingParams(max_tokens=4, top_p=0.9), use_tqdm=False)
        assert state() == before
        with LLM(make_checkpoint("llama"), num_kv_blocks=8, load_format="dummy") as other:
            other.generate([5, 6], SamplingParams(max_tokens=4, seed=1), use_tqdm=False)
        assert state() == before
    assert state() == before


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_memory_of_a_dropped_engine_comes_back(is_closed: bool) -> None:
    """Closed, though the LLM is still held; or dropped, though never closed, in mid-request."""
    llm: LLM | None = LLM(num_kv_blocks=16)
    assert llm is not None
    llm.add_request("unfinished", [5, 6, 7], SamplingParams(max_tokens=9))
    llm.step()
    runner = llm.engine.executor.runner
    dead = [weakref.ref(runner), weakref.ref(runner.model), weakref.ref(runner.kv_caches[0][0])]
    del runner
    if is_closed:
        llm.close()
    else:
        llm = None
    gc.collect()
    assert [reference() for reference in dead] == [None, None, None]
