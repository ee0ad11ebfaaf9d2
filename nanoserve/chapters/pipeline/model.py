"""What is a stage's share of a model?

The whole model is built, but the layers of other stages on torch's "meta" device, where a tensor
has a shape and no memory. Then they are taken out. Five layers on two stages:

    stage 0    embed_tokens, layers 0 1           receives token ids, sends hidden states
    stage 1    layers 2 3 4, norm, lm_head        receives hidden states, computes logits

(Without a head of its own the model computes its logits with the embedding: then both have it.)

vLLM: make_layers and PPMissingLayer in vllm/model_executor/models/utils.py (V0 and V1).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.chapters.pipeline.state import StageState
from nanoserve.layers import LayerConfig
from nanoserve.model import CausalLM, Decoder
from nanoserve.models.config import ModelConfig


@dataclass(frozen=True)
class StageConfig(LayerConfig):
    """A LayerConfig that builds the modules of other stages without memory."""

    foreign: tuple[str, ...] = ()  # their names

    def at(self, name: str) -> LayerConfig:
        config = super().at(name)
        is_foreign = config.prefix in self.foreign
        return replace(config, device=torch.device("meta")) if is_foreign else config


class StageDecoder(Decoder):
    """The part of a Decoder that belongs to one stage."""

    stage: StageState
    own: range  # its layers
    received: Tensor  # [max_num_batched_tokens, hidden], of the stage before

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        """[num_tokens] -> [num_tokens, hidden], for the next stage, or behind the norm."""
        is_first, rope = self.stage.is_first, self.rotary_emb(positions)
        x = self.embed_tokens(input_ids) if is_first else self.received[: len(input_ids)]
        for layer, kv_cache in zip(self.own, kv_caches, strict=False):  # then a drafter's own
            x = self.layers[layer](x, rope, kv_cache, metadata)
        return self.norm(x) if self.stage.is_last else x


def build_stage(
    build: Any, config: ModelConfig, layer_config: LayerConfig, stage: StageState, max_tokens: int
) -> CausalLM:
    """The stage's share of the model that `build` makes. A step has `max_tokens` at most."""
    own, is_tied = stage.layer_range(config.num_layers), config.tie_word_embeddings
    foreign = {f"model.layers.{i}" for i in range(config.num_layers) if i not in own}
    if not (stage.is_first or (stage.is_last and is_tied)):
        foreign.add("model.embed_tokens")
    if not (stage.is_last or is_tied):
        foreign.add("lm_head")
    model = build(StageConfig(**vars(layer_config), foreign=tuple(foreign)))
    names = {name for name, _ in model.shards()}
    for name in foreign:
        model.set_submodule(name, nn.Identity())
    model.foreign_names = frozenset(names - {name for name, _ in model.shards()})
    decoder = model.model
    decoder.__class__ = StageDecoder
    decoder.stage, decoder.own = stage, own
    decoder.received = layer_config.empty(max_tokens, config.hidden_size).data
    if not stage.is_last:  # asked for by a profile of a GPU's memory alone
        model.compute_logits = lambda hidden: hidden.new_zeros(len(hidden), config.vocab_size)
    return model
