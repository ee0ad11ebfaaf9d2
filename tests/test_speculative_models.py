"""Proposers that are models: what they compute, and that what they draft changes no output.

The oracle for their keys and values is a draft model that is the target itself: it must be right
always, whatever happened to the blocks before. The demo's own drafters are right often.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from nanoserve import LLM, RequestOutput, SamplingParams
from nanoserve.attention import StepMetadata
from nanoserve.config import DEMO_MODEL
from nanoserve.extras.speculative.eagle import EagleModel, read_config
from nanoserve.extras.speculative.medusa import MedusaConfig, MedusaModel
from nanoserve.layers import LayerConfig
from nanoserve.models.base import Model
from nanoserve.models.loader import Build, compare, fill_from_checkpoint
from nanoserve.models.weight_files import find_files, read_headers

DRAFT, MEDUSA, EAGLE = (DEMO_MODEL / name for name in ("draft", "medusa", "eagle"))


# -- what they compute --


def load(build: Build, folder: Path) -> Model:
    """With the plainest layers, in float32."""
    model, tensors = build(64, LayerConfig()), read_headers(find_files(folder))
    compare(model, tensors, folder)
    fill_from_checkpoint(model, tensors, use_tqdm=False)
    return model.eval()


def read_weights(folder: Path) -> dict[str, Tensor]:
    return {k: w.float() for k, w in load_file(folder / "model.safetensors").items()}


def test_medusa_heads_compute_what_the_paper_says() -> None:
    model = load(lambda n, c: MedusaModel(MedusaConfig.from_folder(MEDUSA), n, c), MEDUSA)
    weights = read_weights(MEDUSA)
    hidden = torch.randn(5, 128, generator=torch.Generator().manual_seed(0))
    for head in range(4):
        x = hidden
        for layer in range(2):
            x = x + F.silu(x @ weights[f"blocks.{head}.layers.{layer}.weight"].T)
        with torch.inference_mode():
            logits = model(hidden, head)
        assert torch.allclose(logits, x @ weights["lm_head.weight"].T, atol=1e-4)


def test_the_eagle_head_computes_what_the_paper_says() -> None:
    """A whole sequence at once, by matrix products and a mask, against paged attention."""
    config, length = read_config(EAGLE), 11
    model = load(lambda n, c: EagleModel(config, set(), {}, False, n, c), EAGLE)
    weights = read_weights(EAGLE)
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(length, 128, generator=generator)
    states = torch.randn(length, 128, generator=generator)

    def times(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"layers.0.{name}.weight"].T

    def norm(x: Tensor) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()
        return x * scale * weights["layers.0.post_attention_layernorm.weight"]

    angles = torch.outer(torch.arange(length), 10_000.0 ** (-torch.arange(0, 32, 2) / 32))
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rope(x: Tensor) -> Tensor:
        turned = torch.complex(x[..., :16], x[..., 16:]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    x = torch.cat((embeddings, states), -1) @ weights["fc.weight"].T
    q, k, v = (times(x, f"self_attn.{n}_proj").view(length, -1, 32) for n in "qkv")
    q, k, v = rope(q), rope(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / 32**0.5
    scores += torch.full((length, length), -torch.inf).triu(1)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    x = x + times(attended, "self_attn.o_proj")
    y = norm(x)
    y = times(F.silu(times(y, "mlp.gate_proj")) * times(y, "mlp.up_proj"), "mlp.down_proj")

    caches = [
        spec.allocate(3, 4, torch.float32, torch.device("cpu")) for spec in model.kv_cache_specs()
    ]
    metadata = StepMetadata(
        slot_mapping=torch.arange(length),
        block_table=torch.arange(3, dtype=torch.int32)[None],
        query_start_loc=torch.tensor([0, length], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
    )
    with torch.inference_mode():
        output = model(embeddings, torch.arange(length), states, caches, metadata)
    assert torch.allclose(output, x + y, atol=1e-4)


# -- in an engine --


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "seed": 7, "temperature": 0.0, **fields})


def chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


REQUESTS = [
    ("Once upon a time", params()),
    (chat("Count from 3 to 14."), params(temperature=0.9, top_p=0.95, n=3)),
    (chat("Make a JSON record: name Bodiga, age 12, pet parrot, colour blue."), params(logprobs=1)),
    (chat("Tell me a story."), params(temperature=1.0, seed=3)),
    (chat("Repeat after me: sun moon 4821 tree fox happy"), params(min_tokens=24, temperature=0.8, n=2)),
    ("Once upon a time there was a girl", params(temperature=0.7, top_k=20, ignore_eos=True)),
]
ROOMY = {"num_kv_blocks": 512, "max_num_batched_tokens": 2048}
# Prompts come in chunks, and sequences are preempted.
TIGHT = {
    "num_kv_blocks": 34,
    "block_size": 4,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 6,
    "max_model_len": 128,
}
LAYOUTS = {"roomy": ROOMY, "recompute": TIGHT, "swap": {**TIGHT, "preemption_mode": "swap"}}


def make_llm(method: str, folder: Path, layout: str, **options: Any) -> LLM:
    speculative_config = {"method": method, "model": str(folder), "num_speculative_tokens": 3}
    speculative_config |= options.pop("speculative", {})
    return LLM(speculative_config=speculative_config, **{**LAYOUTS[layout], **options})


def answer(llm: LLM, requests: list[tuple[str, SamplingParams]] = REQUESTS) -> list[RequestOutput]:
    prompts, fields = zip(*requests, strict=True)
    return llm.generate(list(prompts), list(fields), use_tqdm=False)


def tokens_of(outputs: list[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[tuple(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def expected(demo_llm: LLM) -> list[list[tuple[int, ...]]]:
    """What plain decoding gives."""
    return tokens_of(answer(demo_llm))


class Steps:
    """How many drafts an engine's steps verified, and how many it accepted."""

    def __init__(self, llm: LLM) -> None:
        self.num_drafts = self.num_accepted = 0
        proposer = llm.engine.executor.runner.proposer
        self.propose, proposer.propose = proposer.propose, self.count

    def count(self, step: Any, inputs: Any, hidden: Tensor, output: Any) -> Any:
        for item in step.scheduled:
            if item.draft_token_ids:
                self.num_drafts += len(item.draft_token_ids)
                self.num_accepted += len(output.sampled_token_ids[item.seq_id]) - 1
        return self.propose(step, inputs, hidden, output)


def check_idle(llm: LLM) -> None:
    manager = llm.engine.block_manager
    manager.check()
    assert manager.num_free_blocks == manager.num_blocks


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_draft_model_that_is_the_target_is_always_right(
    layout: str, expected: list[list[tuple[int, ...]]]
) -> None:
    """Twice: the second time the prompts are found in the prefix cache."""
    with make_llm("draft_model", DEMO_MODEL, layout) as llm:
        steps = Steps(llm)
        for turn in range(2):
            outputs = answer(llm)
            assert tokens_of(outputs) == expected
            assert steps.num_accepted == steps.num_drafts > 100 * (turn + 1)
            check_idle(llm)
        assert any(output.num_cached_tokens for output in outputs) or layout != "roomy"
        assert any(output.metrics.num_preemptions for output in outputs) == (layout != "roomy")


@pytest.mark.parametrize("layout", ["roomy", "recompute", "swap"])
@pytest.mark.parametrize(
    ("method", "folder"), [("draft_model", DRAFT), ("medusa", MEDUSA), ("eagle", EAGLE)]
)
def test_drafts_change_no_token(
    method: str, folder: Path, layout: str, expected: list[list[tuple[int, ...]]]
) -> None:
    with make_llm(method, folder, layout) as llm:
        steps = Steps(llm)
        assert tokens_of(answer(llm)) == expected
        assert steps.num_accepted > 50
        check_idle(llm)
