"""Models of one's own: the example of the guide, run and checked against plain torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from nanoserve import LLM, SamplingParams
from nanoserve.config import EngineConfig, ModelConfig
from nanoserve.layers import LayerConfig
from nanoserve.models.base import Model
from nanoserve.models.decoder import LlamaForCausalLM
from nanoserve.models.loader import load_model
from nanoserve.models.registry import ModelRegistry
from nanoserve.parallel import ParallelState

MakeCheckpoint = Callable[..., Path]
GUIDE = Path(__file__).parent.parent / "nanoserve" / "GUIDE.md"
LAYERS, HEADS, HIDDEN, VOCAB = 2, 4, 32, 300
CONFIG = {
    "architectures": ["ToyForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "max_position_embeddings": 128,
}


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> type[ModelRegistry]:
    """The registry, restored after the test."""
    monkeypatch.setattr(ModelRegistry, "CLASSES", dict(ModelRegistry.CLASSES))
    return ModelRegistry


@pytest.fixture
def toy(registry: type[ModelRegistry], tmp_path: Path) -> Path:
    """The guide's block has run; a folder with random weights for its architecture."""
    text = GUIDE.read_text(encoding="utf-8").split("### Add your own model")[1]
    [block] = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    params = SamplingParams(temperature=0, max_tokens=5)
    exec(compile(block, "GUIDE.md", "exec"), {"LLM": LLM, "params": params})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (VOCAB, HIDDEN),
        "embed_positions.weight": (128, HIDDEN),
        "norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        for part in ("query", "key", "value", "out"):
            shapes[f"layers.{layer}.{part}.weight"] = (HIDDEN, HIDDEN)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def plain_logits(weights: dict[str, Tensor], token_ids: list[int]) -> Tensor:
    """The same model in a dozen lines of torch, with no cache: [num_tokens, vocab_size]."""
    embed = weights["embed.weight"]
    x = embed[token_ids] + weights["embed_positions.weight"][: len(token_ids)]
    for layer in range(LAYERS):
        q, k, v = (
            (x @ weights[f"layers.{layer}.{part}.weight"].T).view(-1, HEADS, 8).transpose(0, 1)
            for part in ("query", "key", "value")
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        x = x + y @ weights[f"layers.{layer}.out.weight"].T
    x = F.rms_norm(x, (HIDDEN,), weights["norm.weight"], 1e-6)
    return x @ embed.T


def test_the_example_of_the_guide_says_what_plain_torch_says(toy: Path) -> None:
    """In chunks, beside others, from the cache and after preemptions."""
    from safetensors.torch import load_file

    weights = load_file(toy / "model.safetensors")
    prompts = [[5], list(range(2, 40)), list(range(2, 30)), [7, 8, 9] * 9]
    params = SamplingParams(temperature=0, max_tokens=8)
    with LLM(toy, num_kv_blocks=14, block_size=4, max_num_batched_tokens=16, max_num_seqs=4) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert any(output.metrics.num_preemptions for output in outputs)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == 8
        logits = plain_logits(weights, prompt + tokens)[len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert ((logits.amax(1) - chosen) < 1e-4 * logits.std(1)).all()


def test_the_example_can_be_cut_among_ranks(toy: Path) -> None:
    """Its layers are nanoserve's own: each rank fills its part of every tensor."""
    model_config = ModelConfig.from_folder(toy)
    config = EngineConfig(max_model_len=64).resolve(model_config)
    layer_config = LayerConfig(parallel=ParallelState(1, 2))
    model = load_model(config, model_config, layer_config, use_tqdm=False)
    assert [spec.num_kv_heads for spec in model.kv_cache_specs()] == [2, 2]
    shapes = {name: tuple(shard.target.shape) for name, shard in model.shards()}
    assert shapes["layers.0.query.weight"] == (16, 32)
    assert shapes["layers.0.out.weight"] == (32, 16)


def test_a_registered_class_takes_the_place_of_ours(
    registry: type[ModelRegistry], make_checkpoint: MakeCheckpoint
) -> None:
    class Louder(LlamaForCausalLM):
        def compute_logits(self, hidden: Tensor) -> Tensor:
            return 2 * super().compute_logits(hidden)

    registry.register("LlamaForCausalLM", Louder)
    with LLM(make_checkpoint("llama"), num_kv_blocks=10) as llm:
        assert type(llm.engine.executor.runner.model) is Louder


@pytest.mark.parametrize(
    ("architecture", "model_cls", "words"),
    [
        ("X", nn.Linear, "class for X must be a subclass of nanoserve.models.base.Model"),
        ("X", "module:Class", "class for X must be a subclass"),
        ("", Model, "architecture must be a name"),
        (LlamaForCausalLM, "LlamaForCausalLM", "architecture must be a name"),
    ],
)
def test_what_cannot_be_registered_is_named(
    registry: type[ModelRegistry], architecture: Any, model_cls: Any, words: str
) -> None:
    before = registry.architectures()
    with pytest.raises(TypeError, match=words):
        registry.register(architecture, model_cls)
    assert registry.architectures() == before


def test_a_model_without_its_methods_says_so() -> None:
    empty = torch.empty(0)
    with pytest.raises(NotImplementedError):
        Model()(empty, empty, [], None)
    with pytest.raises(NotImplementedError):
        Model().compute_logits(empty)
