"""Invariant 1, end to end on the demo model, in float32: a request's tokens depend on the request
alone.
Invariant 4: an engine changes neither another engine nor the process."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import reference_logits, reference_model
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.config import DEMO_MODEL
from nanoserve.sampler import SamplingBatch, sample, uniform_noise
from nanoserve.sequence import SchedulerOutput

NEAR_TIE = 1e-4  # of the logits' standard deviation, in float32


@dataclass(frozen=True)
class Request:
    """One request of the set that all tests here use."""

    prompt_token_ids: list[int]
    params: SamplingParams


@lru_cache(maxsize=1)
def make_requests() -> list[Request]:
    """Stories, sums and noise; 1 to about 170 tokens; greedy and sampled; common prefixes."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    vocab_size = reference_model(DEMO_MODEL).config.vocab_size
    noise = random.Random(0)

    def chat(question: str) -> list[int]:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    def greedy(max_tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=max_tokens)

    story = tokenizer.encode("Once upon a time there was a kind dog named Tom. He lived near the")
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
    """The tokens of each request with the engine to itself."""
    with LLM(num_kv_blocks=64, enable_prefix_caching=False) as llm:
        return [
            llm.generate(request.prompt_token_ids, request.params, use_tqdm=False)[0]
            .outputs[0]
            .token_ids
            for request in make_requests()
        ]


# -- the reference: teacher-forced logits of transformers --


def allowed_tokens(logits: Tensor, params: SamplingParams, position: int) -> set[int]:
    """The tokens that a sampler may choose from these logits, near ties included.

    Greedy: all within NEAR_TIE of the best. Sampled: the tokens for this position's random number,
    and for numbers up to NEAR_TIE below and above.
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
    """The reference allows every token after the tokens before it, and the end of the output.

    After a near tie two correct outputs may differ completely. So the reference computes the logits
    for the tokens that were chosen (teacher forcing).
    """
    prompt, params = request.prompt_token_ids, request.params
    logits = reference_logits(DEMO_MODEL, prompt + token_ids)
    for i, token_id in enumerate(token_ids):
        allowed = allowed_tokens(logits[len(prompt) - 1 + i], params, len(prompt) + i)
        assert token_id in allowed, f"token {i} is {token_id}, allowed: {allowed}"
    model = reference_model(DEMO_MODEL)
    eos_token_ids = {model.config.eos_token_id}
    eos_token_ids |= set(np.atleast_1d(model.generation_config.eos_token_id).tolist())
    ends = [i for i, token_id in enumerate(token_ids) if token_id in eos_token_ids]
    if ends and not params.ignore_eos:
        assert ends == [len(token_ids) - 1]
    else:
        assert len(token_ids) == params.max_tokens


def assert_same(request: Request, token_ids: list[int], expected: list[int]) -> None:
    """Equal token for token, or valid if a near tie was decided differently."""
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


def test_every_token_is_what_teacher_forcing_allows(expected: list[list[int]]) -> None:
    """Greedy and sampled: logits of transformers, the sampler's formula, the request's noise."""
    for request, token_ids in zip(make_requests(), expected, strict=True):
        assert_valid(request, token_ids)


def test_the_comparison_notices_a_wrong_token(expected: list[list[int]]) -> None:
    """A test of assert_same: one exchanged or one missing token is no near tie."""
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
    "block_larger_than_all": {"num_kv_blocks": 12, "block_size": 256},
    "budget_5": {"num_kv_blocks": 100, "max_num_seqs": 5, "max_num_batched_tokens": 5},
    "long_prefill_threshold": {"num_kv_blocks": 100, "long_prefill_token_threshold": 7},
    "no_chunked_prefill": {
        "num_kv_blocks": 100,
        "enable_chunked_prefill": False,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
    },
}
SLOW_BATCHES: dict[str, dict[str, Any]] = {
    "two_at_a_time": {"num_kv_blocks": 100, "max_num_seqs": 2},
    "one_token_a_step": {"num_kv_blocks": 100, "max_num_seqs": 1, "max_num_batched_tokens": 1},
}


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, id=name) for name, options in BATCHES.items()),
        *(
            pytest.param(options, id=name, marks=pytest.mark.slow)
            for name, options in SLOW_BATCHES.items()
        ),
    ],
)
def test_a_setting_changes_no_token(options: dict[str, Any], expected: list[list[int]]) -> None:
    """All requests at once; then again, with the prefix cache that the first round leaves."""
    with LLM(**options) as llm:
        assert_all_same(generate_all(llm), expected)
        if options.get("enable_prefix_caching", True) and options.get("block_size", 16) < 256:
            warm = generate_all(llm)
            assert_all_same(warm, expected)
            assert any(output.num_cached_tokens for output in warm)


# Room for the longest request (182 tokens, 192 in blocks of 32), and little more.
CROWDED: dict[str, dict[str, Any]] = {
    "blocks_of_1": {"num_kv_blocks": 190, "block_size": 1},
    "blocks_of_16": {"num_kv_blocks": 12},
    "blocks_of_32": {"num_kv_blocks": 6, "block_size": 32},
    "no_prefix_caching": {"num_kv_blocks": 12, "enable_prefix_caching": False},
    "no_chunked_prefill": {
        "num_kv_blocks": 12,
        "enable_chunked_prefill": False,
        "max_model_len": 192,
    },
    "priority_policy": {"num_kv_blocks": 12, "scheduling_policy": "priority"},
}


@pytest.mark.parametrize("name", CROWDED)
def test_preemption_changes_no_token(name: str, expected: list[list[int]]) -> None:
    """So few blocks that requests preempt each other."""
    priority = [i % 3 for i in range(len(expected))] if name == "priority_policy" else None
    with LLM(**CROWDED[name]) as llm:
        outputs = generate_all(llm, priority)
        assert sum(output.metrics.num_preemptions for output in outputs) > 0
        assert_all_same(outputs, expected)


def test_seeds_drawn_by_the_engine_repeat_with_its_seed() -> None:
    """The engine draws the seeds of requests without one, so that runs can be repeated."""

    def texts(seed: int, **options: Any) -> list[str]:
        params = SamplingParams(temperature=1.0, max_tokens=12)
        with LLM(num_kv_blocks=64, seed=seed, **options) as llm:
            outputs = llm.generate(["Once upon a time"] * 3, params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    first = texts(1)
    assert first == texts(1, block_size=4, max_num_seqs=1)
    assert first != texts(2)
    assert len(set(first)) > 1  # each request has its own seed


# -- anything, at any moment --

VERBS = ["add", "add", "add", "step", "step", "step", "abort", "fail"]
ACTIONS = st.tuples(st.sampled_from(VERBS), st.integers(0, 1000))


@st.composite
def engine_options(draw: st.DrawFn) -> dict[str, Any]:
    """Settings with room for the longest request, and for none to many beside it."""
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


ANYTHING = given(options=engine_options(), actions=st.lists(ACTIONS, min_size=10, max_size=60))
QUICKLY = settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
AT_LENGTH = settings(QUICKLY, max_examples=40)


def check_any_actions(
    expected: list[list[int]], options: dict[str, Any], actions: list[tuple[str, int]]
) -> None:
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
        """A step that Ctrl-C interrupts, after its work or before."""
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


@QUICKLY
@ANYTHING
def test_requests_that_come_and_go_at_any_moment_get_their_tokens(
    expected: list[list[int]], **drawn: Any
) -> None:
    """Add, step, abort and fail at random, on an engine with random settings."""
    check_any_actions(expected, **drawn)


@pytest.mark.slow
@AT_LENGTH
@ANYTHING
def test_requests_that_come_and_go_at_length(expected: list[list[int]], **drawn: Any) -> None:
    check_any_actions(expected, **drawn)


# -- several engines --


def test_two_engines_step_by_step_in_turn(expected: list[list[int]], make_checkpoint: Any) -> None:
    """Two on the demo model with other settings and one on another model."""
    folder = make_checkpoint("llama")
    params = SamplingParams(temperature=0, max_tokens=10)
    with LLM(folder, num_kv_blocks=8) as llm:
        llama_tokens = llm.generate([5, 6, 7], params, use_tqdm=False)[0].outputs[0].token_ids
    chosen = range(0, len(expected), 3)
    with (
        LLM(num_kv_blocks=200, block_size=4) as first,
        LLM(num_kv_blocks=12, max_num_seqs=3, max_num_batched_tokens=19) as second,
        LLM(folder, num_kv_blocks=8) as third,
    ):
        third.add_request("llama", [5, 6, 7], params)
        for i in chosen:
            request = make_requests()[i]
            for llm in (first, second):
                llm.add_request(str(i), request.prompt_token_ids, request.params)
        finished: list[dict[str, list[int]]] = [{}, {}, {}]
        while any(llm.has_unfinished_requests() for llm in (first, second, third)):
            for llm, tokens in zip((first, second, third), finished, strict=True):
                for output in llm.step():
                    tokens[output.request_id] = output.outputs[0].token_ids
    assert finished[2] == {"llama": llama_tokens}
    for tokens in finished[:2]:
        assert len(tokens) == len(chosen)
        for i in chosen:
            assert_same(make_requests()[i], tokens[str(i)], expected[i])


def test_an_engine_leaves_the_process_as_it_was(make_checkpoint: Any) -> None:
    """No default dtype or device, no generator, no thread, no process group changes."""

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

    folder = make_checkpoint("llama")  # sets torch's generator
    with LLM(num_kv_blocks=16) as llm:  # imports, and what starts once
        llm.generate("Once", SamplingParams(max_tokens=2), use_tqdm=False)
    before = state()
    with LLM(num_kv_blocks=16, dtype="bfloat16", seed=3) as llm:
        llm.generate("Once", SamplingParams(max_tokens=4, top_p=0.9), use_tqdm=False)
        assert state() == before
        with LLM(folder, num_kv_blocks=8, load_format="dummy") as other:
            other.generate([5, 6], SamplingParams(max_tokens=4, seed=1), use_tqdm=False)
        assert state() == before
    assert state() == before


@pytest.mark.parametrize(
    "options",
    [{"attention_backend": "torch"}, {"attention_backend": "reference"}, {"enable_lora": True}],
)
def test_the_default_device_of_the_process_does_not_count(options: dict[str, Any]) -> None:
    """Whatever set_default_device says. (On "meta", tensors have no numbers.)"""
    if "enable_lora" in options:
        pytest.importorskip("nanoserve.extras.lora")
    params = [
        SamplingParams(temperature=0, max_tokens=8),
        SamplingParams(n=2, seed=1, max_tokens=8),
    ]
    tokens: list[Any] = []
    for default in ("cpu", "meta"):
        with torch.device(default), LLM(num_kv_blocks=32, **options) as llm:
            outputs = llm.generate(["Once upon a time"] * 8, params * 4, use_tqdm=False)
        tokens.append([[each.token_ids for each in output.outputs] for output in outputs])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_memory_of_a_dropped_engine_comes_back(is_closed: bool) -> None:
    """Closed while a variable still holds the LLM; or dropped without close(), during a request."""
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
