"""Classes that change the logits of a batch: what they are told, and what they change."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from nanoserve import LLM, SamplingParams
from nanoserve.chapters.logits_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from nanoserve.chapters.logits_processors.parts import PersistentBatch

FEW = {"num_gpu_blocks_override": 14, "block_size": 4, "max_num_seqs": 6, "max_model_len": 48}
PROMPTS = ["Once upon a time", "The", "Once upon a time there was a", "A"] * 3


class Bias(AdapterLogitsProcessor):
    """extra_args={"bias": {token id: value}} is logit_bias, written once more."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if not isinstance((sampling_params.extra_args or {}).get("bias", {}), dict):
            raise ValueError("bias must be a dict.")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        bias = (params.extra_args or {}).get("bias")
        return bias and partial(self.add, bias)

    @staticmethod
    def add(bias: dict[int, float], output: list[int], logits: Tensor) -> Tensor:
        for token_id, value in bias.items():
            logits[token_id] += value
        return logits


SEEN: list[tuple[Any, list[int]]] = []  # (what the request calls itself, output)


class Outputs(LogitsProcessor):
    """Writes down the output of each request before each of its tokens."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.scheduler_config.max_num_seqs and vllm_config.model_config.vocab_size
        self.rows: dict[int, tuple[Any, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            follow(self.rows, batch_update)

    def apply(self, logits: Tensor) -> Tensor:
        assert [*range(len(logits))] == sorted(self.rows)
        for params, output in self.rows.values():
            SEEN.append((params.extra_args["name"], [*output]))
        return logits


def follow(rows: dict[int, Any], update: BatchUpdate) -> None:
    """The rule that vLLM gives to authors: removed, then added, then moved."""
    for row in update.removed:
        del rows[row]
    for row, params, _, output in update.added:
        rows[row] = (params, output)
    for source, target, direction in update.moved:
        other = rows.pop(target, None)
        rows[target] = rows.pop(source)
        if direction is MoveDirectionality.SWAP:
            rows[source] = other


@pytest.mark.parametrize("options", [{}, FEW, {**FEW, "async_scheduling": True}], ids=str)
def test_an_adapter_changes_the_rows_of_its_requests(options: dict[str, Any]) -> None:
    biases = [{425: 4.0}, None, {300 + i: 20.0 for i in range(3)}, {260: -50.0}] * 3
    common = [{"seed": i, "n": 1 + i % 3, "max_tokens": 5 + i} for i in range(len(PROMPTS))]
    mine = [
        SamplingParams(**each, extra_args={"bias": bias} if bias else None)
        for each, bias in zip(common, biases, strict=True)
    ]
    theirs = [SamplingParams(**each, logit_bias=b) for each, b in zip(common, biases, strict=True)]
    with LLM(logits_processors=[Bias], **options) as llm, LLM() as plain:
        found = llm.generate(PROMPTS, mine, use_tqdm=False)
        wanted = plain.generate(PROMPTS, theirs, use_tqdm=False)
    for one, other in zip(found, wanted, strict=True):
        assert [o.token_ids for o in one.outputs] == [o.token_ids for o in other.outputs]


def test_a_processor_sees_the_output_so_far() -> None:
    SEEN.clear()
    params = [SamplingParams(max_tokens=9, extra_args={"name": i}) for i in range(len(PROMPTS))]
    name = f"{__name__}:Outputs"
    with LLM(logits_processors=[name], **FEW) as llm:
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for i, output in enumerate(outputs):
        tokens = output.outputs[0].token_ids
        assert [seen for name, seen in SEEN if name == i] == [
            tokens[:k] for k in range(len(tokens))
        ]


@given(st.lists(st.lists(st.integers(0, 9), unique=True), max_size=12))
def test_updates_lead_from_any_batch_to_any_other(steps: list[list[int]]) -> None:
    batch, rows = PersistentBatch(), dict[int, Any]()
    for number, seq_ids in enumerate(steps):
        requests = {i: (f"params of {i}", [], [number]) for i in seq_ids}
        update = batch.update(requests)
        if update is not None:
            follow(rows, update)
            assert update.batch_size == len(seq_ids)
        assert sorted(rows) == [*range(len(seq_ids))]
        assert [*batch.outputs] == seq_ids
        assert [rows[row][0] for row in sorted(rows)] == [f"params of {i}" for i in seq_ids]
        assert all(output == [number] for _, output in rows.values())


@pytest.mark.parametrize(
    "options",
    [
        {"logits_processors": ["json:JSONDecoder"]},
        {"logits_processors": ["no_such_module:Bias"]},
        {"logits_processors": [Bias], "runner": "pooling"},
        {"logits_processors": [Bias], "speculative_config": {"method": "ngram"}},
    ],
)
def test_what_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="logits_processors"):
        LLM(**options)


def test_parameters_are_checked_at_the_door() -> None:
    with LLM(logits_processors=[Bias]) as llm:
        with pytest.raises(ValueError, match="bias must be"):
            llm.generate("A", SamplingParams(extra_args={"bias": 5}))
        assert not llm.has_unfinished_requests()


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bias_goes_to_its_own_row(stages: int) -> None:
    """With two stages a later step is launched before the logits of this one are there."""
    biases = [{"bias": {i + 20: 50.0}} if i % 2 else None for i in range(4)]
    params = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args=bias)
        for bias in biases
    ]
    with LLM(logits_processors=[Bias], pipeline_parallel_size=stages) as llm:
        outputs = llm.generate(PROMPTS[:4], params, use_tqdm=False)
    with LLM() as plain:
        wanted = plain.generate(PROMPTS[:4], params, use_tqdm=False)
    for i in range(4):
        own = [i + 20] * 6 if i % 2 else wanted[i].outputs[0].token_ids
        assert outputs[i].outputs[0].token_ids == own
