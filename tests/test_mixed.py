"""Everything at once: adapters, quantized weights, grammars, drafts, caches, preemption.

Each chapter is tested alone in its own file. Here one batch mixes them, and every request must get
the tokens that it gets alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from adapters import ALL, shapes_of, write_adapter

from nanoserve import LLM, SamplingParams
from nanoserve.config import DEMO_MODEL

pytest.importorskip("nanoserve.extras.quantization")
structured_output = pytest.importorskip("nanoserve.extras.structured_output")
lora = pytest.importorskip("nanoserve.extras.lora")

REGEX = r"[a-z]{2,5}( [a-z]{2,5}){2}\."
COMMON = "Once upon a time there was a small dog who lived near the sea. "
Request = tuple[str, SamplingParams, Any]
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> list[Request]:
    """Free and constrained, greedy and drawn, one completion and several, two adapters and none.
    Beginnings are shared; blocks of different adapters must not be."""
    folder, shapes = tmp_path_factory.mktemp("adapters"), shapes_of(DEMO_MODEL)
    adapters: list[Any] = [None]
    for number, options in enumerate([{"targets": ALL}, {"targets": ("q_proj", "v_proj")}], 1):
        path = write_adapter(folder / f"{number}", shapes, seed=number, **options)
        adapters.append(lora.LoRARequest(f"adapter {number}", number, path))
    found: list[Request] = []
    for number, adapter in enumerate([*adapters, *adapters]):
        prompt = COMMON + ["One day", "The dog", "Its name"][number % 3]
        settings: dict[str, Any] = {"seed": number, "max_tokens": 16, "n": 1 + number % 2}
        settings["temperature"] = 0.0 if number % 3 == 1 else 1.2
        if settings["temperature"] == 0:
            settings["n"] = 1
        found.append((prompt, SamplingParams(**settings), adapter))
        structured = structured_output.StructuredOutputsParams(regex=REGEX)
        settings |= {"structured_outputs": structured, "max_tokens": 30}
        found.append((prompt, SamplingParams(**settings), adapter))
    return found


def make_llm(quantization: str, **options: Any) -> LLM:
    fields = {"block_size": 4, "num_kv_blocks": 400, "max_num_seqs": 24, **options}
    return LLM(quantization=quantization, enable_lora=True, max_loras=2, **fields)


def run(llm: LLM, requests: list[Request]) -> list[Tokens]:
    """All at once."""
    prompts, params, adapters = (list(column) for column in zip(*requests, strict=True))
    outputs = llm.generate(prompts, params, lora_request=adapters, use_tqdm=False)
    for output, each in zip(outputs, params, strict=True):
        for completion in output.outputs:
            assert completion.finish_reason in ("stop", "length"), completion.stop_reason
            if each.structured_outputs is not None:
                assert re.fullmatch(REGEX, completion.text), completion.text
    block_manager = llm.engine.block_manager
    block_manager.check()
    assert block_manager.num_free_blocks == block_manager.num_blocks
    return [[each.token_ids for each in output.outputs] for output in outputs]


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
WAYS: dict[str, dict[str, Any]] = {
    "chunks, recompute": {"max_num_batched_tokens": 24, "num_kv_blocks": 60},
    "drafts": {"speculative_config": NGRAM},
    "overlap, swap": {
        "async_scheduling": True,
        "num_kv_blocks": 60,
        "preemption_mode": "swap",
    },
    "drafts, swap, chunks": {
        "speculative_config": NGRAM,
        "num_kv_blocks": 60,
        "preemption_mode": "swap",
        "max_num_batched_tokens": 32,
    },
}


@pytest.fixture(scope="module", params=["int8"])
def alone(request: pytest.FixtureRequest, requests: list[Request]) -> Iterator[tuple[str, Any]]:
    """The tokens of each request without any other."""
    with make_llm(request.param) as llm:
        yield request.param, [run(llm, [each])[0] for each in requests]


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens_as_alone(
    way: str, alone: tuple[str, list[Tokens]], requests: list[Request]
) -> None:
    quantization, expected = alone
    with make_llm(quantization, **WAYS[way]) as llm:
        assert run(llm, requests) == expected
        assert run(llm, requests[::-1])[::-1] == expected, "with what the cache holds now, too"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("quantization", ["int4", "fp8", None])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_other_weights_and_caches(
    quantization: str, kv_cache_dtype: str, way: str, requests: list[Request]
) -> None:
    """A cache of 8 bits turns the last bit of a key into a step of 1/127 at times, so that a draw
    near a border may differ in another batch: two requests of twelve at most."""
    with make_llm(quantization, kv_cache_dtype=kv_cache_dtype) as llm:
        expected = [run(llm, [each])[0] for each in requests]
    with make_llm(quantization, kv_cache_dtype=kv_cache_dtype, **WAYS[way]) as llm:
        found = run(llm, requests)
    num_other = sum(left != right for left, right in zip(found, expected, strict=True))
    assert num_other <= (0 if kv_cache_dtype == "auto" else 2)
