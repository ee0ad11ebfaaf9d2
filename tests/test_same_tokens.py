"""On the demo model: every setting gives the tokens of a plain run; and they are transformers'.

A chapter that is not installed is left out: test_seam.py runs these tests without each one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

import nanoserve
from nanoserve import LLM, LLMEngine, SamplingParams
from nanoserve.chapters import CHAPTERS as INSTALLED
from nanoserve.chapters import REFUSED

PROMPTS = [
    *["Once upon a time", "Once upon a time there was a", "The", [495, 496, 260]] * 2,
    "A",
    "I",
]
GRAMMARS = ({"regex": "[a-z]+( [a-z]+){2,4}"}, {"choice": ["a cat", "a car", "a dog"]})
if "structured_output" not in INSTALLED:
    GRAMMARS = (None, None)
GREEDY = {"temperature": 0, "max_tokens": 14}
PARAMS = [
    SamplingParams(**each)
    for each in (
        GREEDY,
        {"seed": 1, "max_tokens": 14},
        {"seed": 2, "n": 3, "max_tokens": 9},
        {**GREEDY, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
        {**GREEDY, "bad_words": ["the", "a little"], "logit_bias": {425: 2.0}},
        {**GREEDY, "stop": ["and"], "min_tokens": 4},
        {"seed": 3, "top_k": 5, "min_p": 0.1, "top_p": 0.9},
        {**GREEDY, "logprobs": 3, "prompt_logprobs": 2},
        {**GREEDY, "structured_outputs": GRAMMARS[0]},
        {"seed": 4, "structured_outputs": GRAMMARS[1]},
    )
]
FEW = {"num_gpu_blocks_override": 14, "block_size": 4, "max_num_seqs": 6, "max_model_len": 48}
CHUNKS = {"long_prefill_token_threshold": 3}
SETTINGS: list[dict[str, Any]] = [
    FEW,
    {**FEW, "preemption_mode": "swap"},
    {**FEW, "async_scheduling": True},
    {**FEW, **CHUNKS, "async_scheduling": True, "preemption_mode": "swap"},
    {"async_scheduling": True, "enable_prefix_caching": False},
    {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    {**FEW, "scheduling_policy": "priority", "num_cpu_blocks": 5, "preemption_mode": "swap"},
    {"attention_backend": "torch"},
    {"kernels": "fast"},
]
CHAPTERS: dict[str, dict[str, Any]] = {  # chapter -> its options; grammars are there without one
    "speculative": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "lora": {"enable_lora": True},  # and half of the requests have an adapter
    "kv_offload": {"kv_offloading_size": 0.01},
    "metrics": {"collect_metrics": True},
}
CHAPTERS = {name: options for name, options in CHAPTERS.items() if name in INSTALLED}
if "logits_processors" in INSTALLED:
    from nanoserve.chapters.logits_processors import AdapterLogitsProcessor

    class Nothing(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return True

        def new_req_logits_processor(self, params: SamplingParams) -> Any:
            return lambda output, logits: logits

    CHAPTERS["logits_processors"] = {"logits_processors": [Nothing]}  # sees all rows


def half_with_an_adapter() -> list[Any]:
    from nanoserve import LoRARequest

    folder = Path(nanoserve.__file__).parent / "demo" / "lora"
    return [LoRARequest("pirate", 1, str(folder)), None] * 5


class Counting(LLMEngine):
    """A failed step is computed again: the tokens would be right, and the step would be wrong."""

    num_failed = 0

    def recover(self, error: Exception | None) -> None:
        self.num_failed += error is not None
        super().recover(error)


def play(**options: Any) -> list[Any]:
    """Ids, text, reason and rounded logprobs; cold, and with a warm prefix cache."""
    adapters = half_with_an_adapter() if options.get("enable_lora") else None
    with LLM(engine_cls=Counting, **options) as llm:
        ask = partial(llm.generate, PROMPTS, PARAMS, use_tqdm=False, lora_request=adapters)
        cold, warm = ([*map(show, ask())] for _ in range(2))
        engine = llm.llm_engine
        assert differing(cold, warm) == []
        assert engine.num_failed == 0
        assert not any(engine.block_manager.pool.ref_counts)
        return cold


def differing(found: list[Any], wanted: list[Any]) -> list[int]:
    """Which requests differ. (pytest would take minutes to show how.)"""
    return [i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]]


def show(output: Any) -> list[Any]:
    shown: list[Any] = [(o.token_ids, o.text, o.finish_reason) for o in output.outputs]
    entries = [*(output.outputs[0].logprobs or ()), *(output.prompt_logprobs or ())]
    shown.append([{t: round(e.logprob, 3) for t, e in entry.items()} for entry in entries if entry])
    return shown


@cache
def plain(**chapter: Any) -> list[Any]:
    return play(attention_backend="reference", kernels="plain", **chapter)


@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_settings(options: Mapping[str, Any]) -> None:
    assert differing(play(**options), plain()) == []


PAIRS = [pair for pair in itertools.combinations(CHAPTERS, 2) if pair not in REFUSED]


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_chapters_in_pairs(pair: tuple[str, str]) -> None:
    wanted = plain(**CHAPTERS["lora"]) if "lora" in pair else plain()
    options = {**SETTINGS[len("".join(pair)) % 4], **CHAPTERS[pair[0]], **CHAPTERS[pair[1]]}
    assert differing(play(**options), wanted) == []


def test_all_chapters_together() -> None:
    chapters = CHAPTERS.keys() - {"logits_processors"}  # which do not go with drafts
    options = {name: value for each in chapters for name, value in CHAPTERS[each].items()}
    options |= {**FEW, "async_scheduling": True, "preemption_mode": "swap"}
    lora = CHAPTERS.get("lora", {})
    assert differing(play(**options), plain(**lora)) == []
    of_adapters = differing(plain(**lora), plain())
    assert of_adapters == [i for i in (0, 2, 4, 6, 8) if i in of_adapters]
    assert len(of_adapters) >= 4 or not lora


def test_a_sampled_request_is_the_same_in_any_company() -> None:
    with LLM(max_num_seqs=3, block_size=8) as llm:
        for number in (1, 2, 6, 9):
            alone = llm.generate(PROMPTS[number], PARAMS[number], use_tqdm=False)
            assert show(alone[0]) == plain()[number]


def test_tokens_and_logprobs_are_those_of_transformers() -> None:
    from transformers import AutoModelForCausalLM

    params = SamplingParams(**GREEDY, logprobs=3, prompt_logprobs=1)
    with LLM() as llm:
        folder = llm.llm_engine.model_config.path
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            right = model(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        named = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        for position, (token, entry) in enumerate(zip((prompt + tokens)[1:], named, strict=True)):
            row = right[position]
            assert {*entry} == {
                token,
                *row.topk(1 if position < len(prompt) - 1 else 3).indices.tolist(),
            }
            for each, found in entry.items():
                assert abs(found.logprob - row[each]) < 1e-3
                assert found.rank == 1 + (row > row[each]).sum()
            assert position < len(prompt) - 1 or row[token] >= row.max() - 1e-3
