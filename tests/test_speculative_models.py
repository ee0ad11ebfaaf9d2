"""Proposers that are models: what they compute, and that what they draft changes no output.

The oracle for their keys and values is a draft model that is the target itself: it must be right
always, whatever happened to the blocks before. The demo's own drafters are right often.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import ThreadExecutor
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanoserve import LLM, RequestOutput, SamplingParams
from nanoserve.attention import StepMetadata
from nanoserve.config import DEMO_MODEL, find_folder
from nanoserve.extras.speculative import rejection
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
    (
        chat("Repeat after me: sun moon 4821 tree fox happy"),
        params(min_tokens=24, temperature=0.8, n=2),
    ),
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


@pytest.mark.parametrize(
    ("layout", "speculative"),
    [
        ("roomy", {}),
        ("roomy", {"rejection_sample_method": "standard"}),
        ("roomy", {"disable_by_batch_size": 7}),  # drafts come and go
        ("recompute", {"num_speculative_tokens": 5}),
        ("swap", {}),
    ],
)
def test_a_draft_model_that_is_the_target_is_always_right(
    layout: str, speculative: dict[str, Any], expected: list[list[tuple[int, ...]]]
) -> None:
    """Twice: the second time the prompts are found in the prefix cache. (RejectionSampler accepts a
    draft if both models give it the same probability.)"""
    with make_llm("draft_model", DEMO_MODEL, layout, speculative=speculative) as llm:
        steps = Steps(llm)
        for turn in range(2):
            outputs = answer(llm)
            assert tokens_of(outputs) == expected
            assert steps.num_accepted == steps.num_drafts > 20 * (turn + 1)
            check_idle(llm)
        assert any(output.num_cached_tokens for output in outputs) or layout != "roomy"
        assert any(output.metrics.num_preemptions for output in outputs) == (layout != "roomy")


MODELS = [("draft_model", DRAFT), ("medusa", MEDUSA), ("eagle", EAGLE)]
# EAGLE needs the most of the target: hidden states, embedding and head.
EAGLE_FIRST = [MODELS[2], *(pytest.param(*each, marks=pytest.mark.slow) for each in MODELS[:2])]


@pytest.mark.parametrize(
    ("method", "folder", "layout"),
    [
        ("draft_model", DRAFT, "recompute"),
        ("medusa", MEDUSA, "recompute"),
        *(("eagle", EAGLE, layout) for layout in LAYOUTS),
    ],
)
def test_drafts_change_no_token(
    method: str, folder: Path, layout: str, expected: list[list[tuple[int, ...]]]
) -> None:
    with make_llm(method, folder, layout) as llm:
        steps = Steps(llm)
        assert tokens_of(answer(llm)) == expected
        assert 50 < steps.num_accepted < steps.num_drafts
        check_idle(llm)


@pytest.mark.parametrize(("method", "folder"), EAGLE_FIRST)
def test_with_greedy_drafts_and_the_rejection_sampler_greedy_requests_stay(
    method: str, folder: Path, expected: list[list[tuple[int, ...]]]
) -> None:
    speculative = {"rejection_sample_method": "standard", "draft_sample_method": "greedy"}
    with make_llm(method, folder, "roomy", speculative=speculative) as llm:
        found = tokens_of(answer(llm))
        check_idle(llm)
    is_greedy = [fields.temperature == 0 for _, fields in REQUESTS]
    assert [f == e for f, e, each in zip(found, expected, is_greedy, strict=True) if each] == [
        True
    ] * sum(is_greedy)


def forbid_all(output_token_ids: list[int], logits: Tensor) -> Tensor:
    """No token is possible after the third."""
    return logits if len(output_token_ids) < 3 else logits - torch.inf


@pytest.mark.parametrize(("method", "folder"), EAGLE_FIRST)
def test_a_request_that_fails_takes_no_other_with_it(
    method: str,
    folder: Path,
    expected: list[list[tuple[int, ...]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = ("Once upon", params(logits_processors=[forbid_all]))
    with make_llm(method, folder, "roomy") as llm:
        found = answer(llm, [failing, *REQUESTS])
        assert found[0].outputs[0].finish_reason == "error"
        assert tokens_of(found[1:]) == expected
        check_idle(llm)
    assert "a step failed" not in caplog.text  # nothing was computed again


# Requests that run into max_model_len, beside one that goes on.
SHORT = {"max_model_len": 29, "block_size": 4}
SHORT_REQUESTS = [
    ("Once upon a time", params(max_tokens=60, ignore_eos=True)),
    ("Once upon a time there was", params(max_tokens=60, ignore_eos=True)),
    ("Tell", params(max_tokens=18, temperature=0.5)),
]


@pytest.fixture(scope="module")
def short_answers() -> list[list[tuple[int, ...]]]:
    with LLM(**ROOMY, **SHORT) as llm:
        return tokens_of(answer(llm, SHORT_REQUESTS))


@pytest.mark.parametrize(("method", "folder"), MODELS, ids=[method for method, _ in MODELS])
def test_drafts_up_to_the_end_of_the_model(
    method: str, folder: Path, short_answers: list[list[tuple[int, ...]]]
) -> None:
    with make_llm(method, folder, "roomy", **SHORT) as llm:
        assert tokens_of(answer(llm, SHORT_REQUESTS)) == short_answers
        check_idle(llm)


@pytest.mark.parametrize(("method", "folder"), EAGLE_FIRST)
def test_two_ranks_draft_what_one_drafts(
    method: str, folder: Path, expected: list[list[tuple[int, ...]]]
) -> None:
    """Rank 0 has the drafter. Nothing but the place of embedding and head differs."""
    found = []
    for options in ({}, {"tensor_parallel_size": 2, "executor_cls": ThreadExecutor}):
        with make_llm(method, folder, "swap", **options) as llm:
            steps = Steps(llm)
            assert tokens_of(answer(llm)) == expected
            found.append((steps.num_accepted, steps.num_drafts))
    assert found[0] == found[1]


@pytest.mark.parametrize(("method", "folder"), EAGLE_FIRST)
def test_drafts_for_a_model_of_transformers(
    method: str, folder: Path, expected: list[list[tuple[int, ...]]]
) -> None:
    with make_llm(method, folder, "recompute", model_impl="transformers") as llm:
        steps = Steps(llm)
        assert tokens_of(answer(llm, REQUESTS[:3])) == expected[:3]
        assert steps.num_accepted > 20


# -- checkpoints --


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    content = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def save_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def count_drafts(method: str, folder: Path) -> tuple[int, int]:
    with make_llm(method, folder, "roomy") as llm:
        steps = Steps(llm)
        answer(llm, REQUESTS[:4])
        return steps.num_accepted, steps.num_drafts


def test_an_eagle_head_with_its_own_embedding_and_head(tmp_path: Path) -> None:
    """In the older layout of config.json, with the target's tensors and a bias of 0."""
    folder = Path(shutil.copytree(EAGLE, tmp_path / "eagle"))
    llama = json.loads((folder / "config.json").read_text())
    llama["architectures"] = ["LlamaForCausalLM"]
    config = {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": llama}
    (folder / "config.json").write_text(json.dumps(config))
    table = load_file(DEMO_MODEL / "model.safetensors")["model.embed_tokens.weight"]
    weights = load_file(EAGLE / "model.safetensors") | {"fc.bias": torch.zeros(128)}
    save_weights(folder, weights | {"embed_tokens.weight": table, "lm_head.weight": table.clone()})
    assert count_drafts("eagle", folder) == count_drafts("eagle", EAGLE)


def test_medusa_heads_with_a_head_each(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(MEDUSA, tmp_path / "medusa"))
    change_config(folder, original_lm_head=None, num_heads=None, medusa_num_heads=3)
    change_config(folder, medusa_fc_bias=True)
    weights = load_file(MEDUSA / "model.safetensors")
    head = weights.pop("lm_head.weight")
    weights = {k: w for k, w in weights.items() if not k.startswith("blocks.3")}
    weights |= {k.replace("weight", "bias"): torch.zeros(128) for k in weights}
    save_weights(folder, weights | {f"lm_heads.{i}.weight": head.clone() for i in range(3)})
    assert count_drafts("medusa", folder) == count_drafts("medusa", MEDUSA)


def no_tensor(folder: Path, name: str) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights[name]
    save_weights(folder, weights)


def other_tokens(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"!":', '"!!":', 1))


REFUSALS: list[tuple[str, Path, Callable[[Path], None], str]] = [
    ("draft_model", DRAFT, lambda f: change_config(f, vocab_size=2047), "vocab_size of 2047.*2048"),
    ("draft_model", DRAFT, other_tokens, "different vocabularies"),
    ("draft_model", DRAFT, lambda f: no_tensor(f, "model.norm.weight"), "missing: model.norm.weig"),
    ("medusa", MEDUSA, lambda f: change_config(f, hidden_size=64), "hidden_size of 64.*is 128"),
    (
        "medusa",
        MEDUSA,
        lambda f: change_config(f, vocab_size=9, truncated_vocab_size=9),
        "size of 9",
    ),
    ("medusa", MEDUSA, lambda f: change_config(f, num_heads=2), "is 3, and .* has 2 Medusa heads"),
    ("medusa", MEDUSA, lambda f: change_config(f, num_heads="2"), "num_heads is '2'; allowed"),
    ("medusa", MEDUSA, lambda f: change_config(f, num_heads=None), "has no 'num_heads'"),
    ("medusa", MEDUSA, lambda f: change_config(f, truncated_vocab_size=99), "truncated_vocab_size"),
    ("medusa", MEDUSA, lambda f: no_tensor(f, "lm_head.weight"), "missing: lm_head.weight"),
    ("eagle", EAGLE, lambda f: change_config(f, hidden_size=64), "hidden_size of 64.*is 128"),
    ("eagle", EAGLE, lambda f: change_config(f, architectures=["EagleXForY"]), "EagleXForY"),
    ("eagle", EAGLE, lambda f: no_tensor(f, "fc.weight"), "missing: fc.weight"),
    ("eagle", EAGLE, lambda f: change_config(f, num_hidden_layers=2), "missing: layers.1"),
]


@pytest.mark.parametrize(("method", "source", "spoil", "message"), REFUSALS)
def test_what_does_not_fit_is_refused(
    method: str, source: Path, spoil: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "drafter"))
    spoil(folder)
    with pytest.raises(ValueError, match=message):
        make_llm(method, folder, "roomy")


def test_the_demos_drafters_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # in every folder, not only in the clone
    assert find_folder("nanoserve/demo/eagle") == EAGLE
    assert find_folder("nanoserve/demo/hydra") is None


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_no_slot_is_behind_the_longest_sequence(method: str) -> None:
    """Many drafts in blocks of one token, up to max_model_len."""
    folder = f"nanoserve/demo/{method.split('_')[0]}"
    speculative = {"method": method, "model": folder, "num_speculative_tokens": 9}
    options = {"num_kv_blocks": 200, "block_size": 1, "max_model_len": 48, "max_num_seqs": 2}
    wanted = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with LLM(**options, speculative_config=speculative) as llm:
        outputs = llm.generate(
            ["a b c a b c a b c a b", "Once upon a time"], wanted, use_tqdm=False
        )
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]
    assert all(output.metrics.num_preemptions == 0 for output in outputs)


def test_the_rejection_sampler_knows_what_each_draft_was_drawn_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A draft model that is the target itself: p = q at each position, so no draft is rejected."""
    speculative = {
        "method": "draft_model",
        "model": str(DEMO_MODEL),
        "num_speculative_tokens": 4,
        "rejection_sample_method": "standard",
    }
    wanted = [
        SamplingParams(temperature=1.5, top_k=40, seed=seed, max_tokens=20, ignore_eos=True)
        for seed in range(8)
    ]
    works = rejection.rejection_sample

    def check(target: Tensor, drafts: Tensor, draft: Tensor, *noise: Tensor) -> Tensor:
        assert torch.allclose(target[drafts >= 0], draft[drafts >= 0], atol=1e-4)
        return works(target, drafts, draft, *noise)

    monkeypatch.setattr(rejection, "rejection_sample", check)
    with LLM(num_kv_blocks=100, speculative_config=speculative) as llm:
        outputs = llm.generate(["Once upon a time"] * 8, wanted, use_tqdm=False)
    metrics = [output.metrics for output in outputs]
    assert all(each.num_accepted_tokens == each.num_draft_tokens > 0 for each in metrics)
