"""Value -> taken, or refused with which type and the field's name: params, options, requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from fakes import FakeRunner

import nanoserve
from nanoserve import LLM, EngineConfig, SamplingParams

NAN, INF, BIG = float("nan"), float("inf"), 2**70
Table = dict[str, dict[Any, type[Exception] | None]]
# fmt: off
V, T = ValueError, TypeError
COUNT = {1: None, 7: None, 0: V, -1: V, 1.5: T, "4": T, BIG: V}
OPTIONAL = {None: None, **COUNT}
SWITCH = {True: None, False: None, None: T, 2: T, "yes": T}
OPTIONS: Table = {
    "max_model_len": {**OPTIONAL, 4096: V}, "max_num_seqs": OPTIONAL,
    "num_gpu_blocks_override": OPTIONAL, "block_size": {**COUNT, None: T},
    "num_cpu_blocks": OPTIONAL, "kv_cache_memory_bytes": OPTIONAL,
    "max_num_batched_tokens": {300: None, **{v: t for v, t in OPTIONAL.items() if t}},
    "tensor_parallel_size": {0: V, "2": T}, "seed": {0: None, -1: V, None: T, 2**63: V},
    "gpu_memory_utilization": {0.5: None, 1.0: None, 0.0: V, 1.1: V, NAN: V, "1": T},
    "swap_space": {None: None, 0.5: None, 2: None, -1: V, "1": T},
    "long_prefill_token_threshold": {0: None, 5: None, -1: V, 1.5: T},
    "max_logprobs": {-1: None, 0: None, -2: V, 0.5: T}, "enable_prefix_caching": SWITCH,
    "enforce_eager": SWITCH,
    "scheduling_policy": {"fcfs": None, "priority": None, "random": V, None: V, 5: V},
    "preemption_mode": {"swap": None, "recompute": None, "SWAP": V},
    "kernels": {"plain": None, "slow": V}, "dtype": {"float32": None, "int4": V},
    "kv_cache_dtype": {"auto": None, "fp4": V}, "load_format": {"dummy": None, "pickle": V},
    "device": {"cpu": None, 5: T, "abacus": V}, "model": {"/no/such/folder": V, 5: T},
    "tokenizer": {None: None, "/no/such/folder": V},
}
# known with the checkpoint or the machine
LATE = {
    ("max_model_len", 4096), ("model", "/no/such/folder"), ("tokenizer", "/no/such/folder"),
    ("device", "abacus"),
}
PARAMS: Table = {
    "n": {**COUNT, 17000: V, None: T},
    "temperature": {0: None, 0.5: None, -0.1: V, NAN: V, INF: V, "1": T, None: T},
    "top_p": {1.0: None, 0.1: None, 0: V, 1.01: V, NAN: V, None: T},
    "top_k": {-1: None, 0: None, 5: None, -2: V, 1.5: T},
    "min_p": {0: None, 1.0: None, -0.1: V, 1.1: V},
    "presence_penalty": {-2: None, 2: None, 2.1: V, NAN: V},
    "frequency_penalty": {-2: None, -2.1: V},
    "repetition_penalty": {0.5: None, 0: V, -1: V, NAN: V},
    "seed": {None: None, 0: None, 2**63 - 1: None, 2**63: V, -1: None, -2: V, 1.5: T},
    "max_tokens": {None: None, 1: None, BIG: None, 0: V, 1.5: T},
    "min_tokens": {0: None, 16: None, 17: V, -1: V},
    "logprobs": {None: None, 0: None, -1: None, -2: V}, "prompt_logprobs": {5: None, -2: V},
    "stop": {None: None, "a": None, ("a", "b"): None, (): None, ("",): T, (1,): T, 5: T, b"a": T},
    "stop_token_ids": {(1, 2): None, ("a",): T, 5: T, (1.5,): T},
    "bad_words": {("a",): None, "a": T, (1,): T},
    "allowed_token_ids": {(1,): None, (): V, ("a",): T},
    "logits_processors": {(print,): None, (1,): T, print: T}, "output_kind": {1: T, None: T},
    "ignore_eos": SWITCH, "detokenize": SWITCH, "skip_clone": SWITCH, "flat_logprobs": SWITCH,
}
# What this engine or model cannot serve, of values that are allowed elsewhere.
REQUESTS: Table = {
    "logprobs": {20: None, 21: V, -1: V}, "prompt_logprobs": {20: None, 21: V},
    "stop_token_ids": {(2047,): None, (2048,): V, (-1,): V}, "allowed_token_ids": {(2048,): V},
}
PROMPTS = [
    ("a", None), ([1, 2], None), ((1, 2), None), ({"prompt": "a"}, None),
    ({"prompt_token_ids": [1]}, None), ("", V), ([], V), ([2048], V), ([-1], V), ([1.5], T),
    (["a"], T), ([True], T), (None, T), (5, T), ({}, T), (b"a", T), ("\ud800", V), ([1] * 2048, V),
    ([1] * 127, None), ([1] * 128, V),
]
TOGETHER = [
    ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, V),
    ({"swap_space": 1, "num_cpu_blocks": 4}, V),
    ({"max_num_batched_tokens": 100, "max_model_len": 200, "enable_chunked_prefill": False}, V),
    ({"no_such_option": 1}, T),
]
BAD_PARAMS = [
    {"n": 2, "temperature": 0}, {"min_tokens": 5, "max_tokens": 4},
    {"stop": "a", "detokenize": False}, {"logit_bias": {1: NAN}}, {"logit_bias": {1: INF}},
]
# fmt: on


def check(wanted: type[Exception] | None, do: Callable[[], object], name: str = "") -> None:
    if wanted is None:
        do()
        return
    with pytest.raises(wanted) as caught:
        do()
    assert type(caught.value) is wanted
    assert name in str(caught.value)


def rows(table: Table) -> Iterator[tuple[str, Any, Any]]:
    """Each value; and True, which no number may be."""
    for name, each in table.items():
        yield from ((name, value, wanted) for value, wanted in each.items())
        if (
            table is not REQUESTS
            and "logprobs" not in name
            and any(type(value) in (int, float) and not wanted for value, wanted in each.items())
        ):
            yield (name, True, TypeError)


@pytest.fixture(scope="module")
def engine() -> Any:
    return LLM(runner_cls=FakeRunner, max_model_len=128).llm_engine


@pytest.mark.parametrize(("name", "value", "wanted"), rows(OPTIONS))
def test_options(name: str, value: Any, wanted: Any) -> None:
    if (name, value) not in LATE:
        check(wanted, lambda: EngineConfig(**{name: value}), name)
    if wanted is None or (name, value) in LATE:
        check(wanted, lambda: LLM(runner_cls=FakeRunner, **{name: value}))


@pytest.mark.parametrize(("name", "value", "wanted"), rows(PARAMS))
def test_params(name: str, value: Any, wanted: Any) -> None:
    check(wanted, lambda: SamplingParams(**{name: value}), name)
    params = SamplingParams()
    setattr(params, name, value)
    check(wanted, params.clone, name)  # assigned later: each request's clone is checked


@pytest.mark.parametrize(("name", "value", "wanted"), rows(REQUESTS))
def test_what_this_engine_serves(engine: Any, name: str, value: Any, wanted: Any) -> None:
    params = SamplingParams(**{name: value})
    check(wanted, lambda: engine.make_request("a", "b", params), name)


@pytest.mark.parametrize(("prompt", "wanted"), PROMPTS)
def test_prompts(engine: Any, prompt: Any, wanted: Any) -> None:
    check(wanted, lambda: engine.make_request("a", prompt, SamplingParams()))


def test_values_that_must_agree() -> None:
    for options, error in TOGETHER:
        make = partial(LLM, runner_cls=FakeRunner, **options)
        check(error, make, next(iter(options)))
    for params in BAD_PARAMS:
        check(ValueError, partial(SamplingParams, **params), next(iter(params)))


def test_what_a_value_becomes() -> None:
    greedy = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.5)
    assert (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    assert SamplingParams(temperature=1e-3).temperature == 0.01
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(seed=-1).seed is None and SamplingParams(logprobs=True).logprobs == 1
    assert SamplingParams(prompt_logprobs=True).prompt_logprobs == 1
    assert SamplingParams.from_optional(temperature=None, seed=5) == SamplingParams(seed=5)
    assert SamplingParams(prompt_logprobs=0).skip_reading_prefix_cache is True
    mine = {"stop": ["a"], "stop_token_ids": [1], "extra_args": {"mine": [1]}, "logit_bias": {1: 2}}
    params, clone = SamplingParams(**mine), SamplingParams(**mine).clone()
    for each in (mine["extra_args"]["mine"], *mine.values()):  # the caller edits what he gave
        each.clear()
    assert clone.stop == params.stop == ["a"] and clone.stop_token_ids == [1]
    assert clone.logit_bias == {1: 2.0} and clone.extra_args == {"mine": [1]}
    recommended = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "do_sample": True}
    made = SamplingParams.from_generation_config(recommended)
    assert (made.temperature, made.top_k, made.max_tokens, made.top_p) == (0.6, 20, 9, 1.0)
    with pytest.raises(ImportError):
        from nanoserve.sampling_params import NoSuchParams  # noqa: F401
    from nanoserve.sampling_params import BeamSearchParams as here

    assert here is nanoserve.BeamSearchParams


def test_room(engine: Any) -> None:
    """An output has a limit: what was asked for, max_model_len, and the KV cache."""
    process, asked = engine.input_processor.process, SamplingParams(max_tokens=None)
    assert process("a", [1] * 100, asked).max_tokens == 28
    assert process("a", [1] * 100, SamplingParams(max_tokens=7)).max_tokens == 7
    assert process("a", [1], asked).stop_token_ids >= {2}  # the EOS token
    assert process("a", [1], SamplingParams(ignore_eos=True)).stop_token_ids == frozenset()
    small = LLM(runner_cls=FakeRunner, num_gpu_blocks_override=2, block_size=4).llm_engine
    assert small.input_processor.process("a", [1] * 3, asked).max_tokens == 5
