"""Value -> taken, or refused with which type and the field's name: params, options, requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from fakes import FakeRunner

from nanoserve import LLM, EngineConfig, SamplingParams

NAN, INF, BIG = float("nan"), float("inf"), 2**70
Table = dict[str, dict[Any, type[Exception] | None]]
# fmt: off
COUNT = {1: None, 7: None, 0: ValueError, -1: ValueError, 1.5: TypeError, "4": TypeError, BIG:
    ValueError}
OPTIONAL = {None: None, **COUNT}
SWITCH = {True: None, False: None, None: TypeError, 2: TypeError, "yes": TypeError}
OPTIONS: Table = {
    "max_model_len": {**OPTIONAL, 4096: ValueError}, "max_num_seqs": OPTIONAL,
    "num_gpu_blocks_override": OPTIONAL,
    "block_size": {**COUNT, None: TypeError}, "num_cpu_blocks": OPTIONAL, "kv_cache_memory_bytes":
    OPTIONAL,
    "max_num_batched_tokens": {300: None, **{v: t for v, t in OPTIONAL.items() if t}},
    "tensor_parallel_size": {0: ValueError, "2": TypeError},
    "seed": {0: None, -1: ValueError, None: TypeError, 2**63: ValueError},
    "gpu_memory_utilization": {0.5: None, 1.0: None, 0.0: ValueError, 1.1: ValueError, NAN:
    ValueError, "1": TypeError},
    "swap_space": {None: None, 0.5: None, 2: None, -1: ValueError, "1": TypeError},
    "long_prefill_token_threshold": {0: None, 5: None, -1: ValueError, 1.5: TypeError},
    "max_logprobs": {-1: None, 0: None, -2: ValueError, 0.5: TypeError},
    "enable_prefix_caching": SWITCH, "enable_chunked_prefill": SWITCH, "async_scheduling": SWITCH,
    "enforce_eager": SWITCH,
    "scheduling_policy": {"fcfs": None, "priority": None, "random": ValueError, None: ValueError, 5:
    ValueError},
    "preemption_mode": {"swap": None, "recompute": None, "SWAP": ValueError}, "kernels": {"plain":
    None, "slow": ValueError},
    "dtype": {"float32": None, "int4": ValueError}, "kv_cache_dtype": {"auto": None, "fp4":
    ValueError},
    "load_format": {"dummy": None, "pickle": ValueError}, "device": {"cpu": None, 5: TypeError,
    "abacus": ValueError},
    "model": {"/no/such/folder": ValueError, 5: TypeError}, "tokenizer": {None: None,
    "/no/such/folder": ValueError},
}
# known with the checkpoint or the machine
LATE = {("max_model_len", 4096), ("model", "/no/such/folder"), ("tokenizer", "/no/such/folder"),
    ("device", "abacus")}
PARAMS: Table = {
    "n": {**COUNT, 17000: ValueError, None: TypeError}, "temperature": {0: None, 0.5: None, -0.1:
    ValueError, NAN: ValueError, INF: ValueError, "1": TypeError, None: TypeError},
    "top_p": {1.0: None, 0.1: None, 0: ValueError, 1.01: ValueError, NAN: ValueError, None:
    TypeError},
    "top_k": {-1: None, 0: None, 5: None, -2: ValueError, 1.5: TypeError}, "min_p": {0: None, 1.0:
    None, -0.1: ValueError, 1.1: ValueError},
    "presence_penalty": {-2: None, 2: None, 2.1: ValueError, NAN: ValueError}, "frequency_penalty":
    {-2: None, -2.1: ValueError},
    "repetition_penalty": {0.5: None, 0: ValueError, -1: ValueError, NAN: ValueError},
    "seed": {None: None, 0: None, 2**63 - 1: None, 2**63: ValueError, -1: ValueError, 1.5:
    TypeError},
    "max_tokens": {None: None, 1: None, BIG: None, 0: ValueError, 1.5: TypeError}, "min_tokens": {0:
    None, 16: None, 17: ValueError, -1: ValueError},
    "logprobs": {None: None, 0: None, -1: None, -2: ValueError}, "prompt_logprobs": {5: None, -2:
    ValueError},
    "stop": {None: None, "a": None, ("a", "b"): None, (): None, ("",): TypeError, (1,): TypeError,
    5: TypeError, b"a": TypeError},
    "stop_token_ids": {(1, 2): None, ("a",): TypeError, 5: TypeError, (1.5,): TypeError},
    "bad_words": {("a",): None, "a": TypeError, (1,): TypeError},
    "allowed_token_ids": {(1,): None, (): ValueError, ("a",): TypeError}, "logits_processors":
    {(print,): None, (1,): TypeError, print: TypeError},
    "output_kind": {1: TypeError, None: TypeError},
}
REQUESTS: Table = {  # what this engine or model cannot serve, of values that are allowed elsewhere
    "logprobs": {20: None, 21: ValueError, -1: ValueError}, "prompt_logprobs": {20: None, 21:
    ValueError},
    "stop_token_ids": {(2047,): None, (2048,): ValueError, (-1,): ValueError}, "allowed_token_ids":
    {(2048,): ValueError},
}
PROMPTS = [
    ("a", None), ([1, 2], None), ((1, 2), None), ({"prompt": "a"}, None), ({"prompt_token_ids":
    [1]}, None), ("", ValueError), ([], ValueError),
    ([2048], ValueError), ([-1], ValueError), ([1.5], TypeError), (["a"], TypeError), ([True],
    TypeError), (None, TypeError), (5, TypeError),
    ({}, TypeError), (b"a", TypeError), ("\ud800", ValueError), ([1] * 2048, ValueError), ([1] *
    127, None), ([1] * 128, ValueError),
]
TOGETHER = [
    ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, ValueError), ({"swap_space": 1,
    "num_cpu_blocks": 4}, ValueError),
    ({"max_num_batched_tokens": 100, "max_model_len": 200, "enable_chunked_prefill": False},
    ValueError), ({"no_such_option": 1}, TypeError),
]
BAD_PARAMS = [
    {"n": 2, "temperature": 0}, {"min_tokens": 5, "max_tokens": 4}, {"stop": "a", "detokenize":
    False}, {"logit_bias": {1: NAN}}, {"logit_bias": {1: INF}},
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
        if table is not REQUESTS and any(
            type(value) in (int, float) and not wanted for value, wanted in each.items()
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


def test_room(engine: Any) -> None:
    """An output has a limit: what was asked for, max_model_len, and the KV cache."""
    process, asked = engine.input_processor.process, SamplingParams(max_tokens=None)
    assert process("a", [1] * 100, asked).max_tokens == 28
    assert process("a", [1] * 100, SamplingParams(max_tokens=7)).max_tokens == 7
    assert process("a", [1], asked).stop_token_ids >= {2}  # the EOS token
    assert process("a", [1], SamplingParams(ignore_eos=True)).stop_token_ids == frozenset()
    small = LLM(runner_cls=FakeRunner, num_gpu_blocks_override=2, block_size=4).llm_engine
    assert small.input_processor.process("a", [1] * 3, asked).max_tokens == 5
