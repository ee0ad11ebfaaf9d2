"""How does one layer guess what a whole model will think?

An EAGLE head guesses hidden states, not tokens: from the target's hidden state h[t] and the token
that was drawn from it, t+1, it computes something close to h[t+1], which the target's own head
turns into a token. One decoder layer is enough, since most of the work is in h[t] already.

    h[4], embedding of token 5  ->  fc  ->  layer  ->  g[5]  ->  target's head  ->  draft 6
    g[5], embedding of draft 6  ->  fc  ->  layer  ->  g[6]  ->  target's head  ->  draft 7

So at position t it reads h[t] and token t+1: the tokens are those of the target, shifted by one.
The first pass reads all positions that the target has read in this step, with the target's hidden
states; the others read one position each, with states of its own. Where its keys and values are,
and why they are right after swaps, copies and rejected drafts, stands in draft_model.py.

One thing differs: the last position of a block depends on the first token behind the block. So a
block that the prefix cache finds, and the last block of a prompt whose branches share it, may hold
at its last position what belongs to another next token. This makes a guess worse, never an output.

Checkpoint (as vLLM reads it): `fc.weight` [hidden, 2 * hidden], `layers.{i}.*` as in Llama without
the first input_layernorm, and, if they are not the target's, `embed_tokens.weight` and
`lm_head.weight`. config.json is that of a Llama, or one of model_type "eagle" that holds it as
"model".

Left out: EAGLE-2's trees of drafts; EAGLE-3, which reads hidden states of inner layers; heads of
other families than Llama.

vLLM: vllm/model_executor/models/eagle.py (V0); vllm/model_executor/models/llama_eagle.py,
vllm/v1/spec_decode/eagle.py (V1). Paper: EAGLE, arXiv 2401.15077.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.chapters.speculative.draft_model import (
    DraftModelProposer,
    check_hidden_size,
    check_vocab_size,
    whole,
)
from nanoserve.layers import LayerConfig, RotaryEmbedding, RowParallelLinear, VocabParallelEmbedding
from nanoserve.model import CausalLM, DecoderLayer, Stream
from nanoserve.models.base import Model
from nanoserve.models.checkpoint import OBJECT, read_architecture, read_json, read_key
from nanoserve.models.config import ModelConfig
from nanoserve.models.families import llama
from nanoserve.models.loader import build_and_fill
from nanoserve.models.rope import rope_frequencies
from nanoserve.models.shards import Shard
from nanoserve.models.weight_files import find_files, read_headers

if TYPE_CHECKING:
    from nanoserve.input_batch import InputBatch

ARCHITECTURES = ("LlamaForCausalLM", "EagleLlamaForCausalLM")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class NoNorm(nn.Module):
    """In place of the first norm of the first layer."""

    def add_and_norm(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """`x` twice: what the layer reads, and what its output is added to."""
        return x, x


class EagleModel(Model):
    """fc and decoder layers; embedding and head only if the checkpoint has its own."""

    def __init__(
        self,
        config: ModelConfig,
        own: set[str],
        names_in_target: dict[str, str],
        has_bias: bool,
        max_model_len: int,
        layer_config: LayerConfig,
    ) -> None:
        """`own`: EMBEDDING and HEAD, if the checkpoint has them. `names_in_target`: of those that
        are to be read from the target's files, the names there."""
        super().__init__()
        self.names_in_target = names_in_target
        self.embed_tokens: VocabParallelEmbedding | None = None
        self.lm_head: VocabParallelEmbedding | None = None
        hidden, sizes = config.hidden_size, (config.vocab_size, config.hidden_size)
        self.fc = RowParallelLinear(2 * hidden, hidden, bias=has_bias, layer_config=layer_config)
        family = llama(config)
        self.layers = nn.ModuleList(
            DecoderLayer(config, family, layer, layer_config) for layer in range(config.num_layers)
        )
        self.layers[0].input_layernorm = NoNorm()
        rope = dict(config.rope_parameters, max_position_embeddings=config.max_position_embeddings)
        rotary_dim = int(config.head_dim * rope["partial_rotary_factor"])
        frequencies, scaling = rope_frequencies(rotary_dim, rope, max_model_len)
        self.rotary_emb = RotaryEmbedding(frequencies, scaling, max_model_len, layer_config)
        if EMBEDDING in own or EMBEDDING in names_in_target:
            self.embed_tokens = VocabParallelEmbedding(*sizes, layer_config)
            self.embed_tokens.is_lm_head = False
        if HEAD in own or HEAD in names_in_target:
            self.lm_head = VocabParallelEmbedding(*sizes, layer_config)
            self.lm_head.is_embedding = False

    def forward(  # type: ignore[override]
        self,
        embeddings: Tensor,
        positions: Tensor,
        states: Tensor,
        kv_caches: list[KVCache],
        metadata: StepMetadata,
    ) -> Tensor:
        """Embeddings of tokens t+1 and hidden states of tokens t, [num_tokens, hidden] each, at
        positions t -> guessed hidden states of tokens t+1 [num_tokens, hidden]."""
        x: Stream = (self.fc(torch.cat((embeddings, states), dim=-1)), None)
        rope = self.rotary_emb(positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, rope, kv_cache, metadata)
        output, residual = x
        assert residual is not None
        return output + residual  # no norm: the target's hidden states are normalized ones

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """With the target's names for what is filled from the target's files."""
        for name, shard in super().shards():
            yield self.names_in_target.get(name, name), shard


class EagleProposer(DraftModelProposer):
    """Drafts from an EAGLE head. Its states are guesses of the target's hidden states."""

    shift = 1
    model: EagleModel

    def load(self, folder: Path) -> EagleModel:
        """The head, its weights filled. Embedding and language-model head are the target's own
        modules, if the head brings none; with several ranks, which share those, they are read once
        more, for rank 0. Raises ValueError if the folder has no such head, or one for another
        model."""
        runner, config = self.runner, read_config(folder)
        target, is_dummy = runner.model_config, runner.config.load_format == "dummy"
        check_vocab_size(config.vocab_size, folder, target)
        check_hidden_size(config.hidden_size, folder, target)
        tensors = {} if is_dummy else read_headers(find_files(folder))
        own = {EMBEDDING, HEAD} & tensors.keys()
        names_in_target: dict[str, str] = {}
        if runner.parallel.tp_size > 1:
            in_target = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}
            if target.tie_word_embeddings:
                in_target[HEAD] = in_target[EMBEDDING]
            names_in_target = {name: in_target[name] for name in in_target if name not in own}
            if not is_dummy:
                theirs = read_headers(find_files(target.path))
                wanted = names_in_target.values() & theirs.keys()
                tensors |= {name: theirs[name] for name in wanted}
        build = partial(EagleModel, config, own, names_in_target, "fc.bias" in tensors)
        layer_config = whole(runner.layer_config)
        model = build_and_fill(build, runner.config, folder, tensors, layer_config)
        assert isinstance(model, EagleModel)
        self.embedding = model.embed_tokens or find_embedding(runner.model)
        return model

    def select_states(self, hidden: Tensor, firsts: np.ndarray, lengths: np.ndarray) -> Tensor:
        """The target's hidden states, `lengths` [num_seqs] rows from `firsts` [num_seqs] on."""
        offsets = (firsts - lengths.cumsum() + lengths).repeat(lengths)
        return hidden.index_select(0, self.send(np.arange(lengths.sum()) + offsets))

    def run_model(
        self, token_ids: Tensor, step: InputBatch, kv_caches: list[KVCache], states: Tensor
    ) -> Tensor:
        embeddings = self.embedding(token_ids)
        positions, metadata = step.tensors.positions, step.metadata
        return self.model(embeddings, positions, states, kv_caches, metadata)

    def compute_logits(self, states: Tensor) -> Tensor:
        """Guessed hidden states [num_rows, hidden] -> logits [num_rows, vocab_size]."""
        if self.model.lm_head is not None:
            return self.model.lm_head.compute_logits(states)
        return self.runner.model.compute_logits(states)


def find_embedding(target: Any) -> nn.Module:
    """The target's. Raises ValueError if it cannot be found."""
    if isinstance(target, CausalLM):
        return target.model.embed_tokens
    body: Any = getattr(target, "body", None)  # of a model of transformers
    if not hasattr(body, "get_input_embeddings"):
        raise ValueError(
            f"{type(target).__name__} does not say which of its modules is the embedding, and this "
            f"EAGLE head has no {EMBEDDING}. Give speculative_config a head that has it."
        )
    embedding: nn.Module = body.get_input_embeddings()
    return embedding


def read_config(folder: Path) -> ModelConfig:
    """The Llama that config.json describes. Raises ValueError if it describes anything else."""
    file = folder / "config.json"
    hf = read_json(file)
    inner = read_key(hf, "model", {}, file, {"model": OBJECT})
    config = ModelConfig.from_folder(folder, {**inner, **hf})
    if (name := read_architecture(inner or hf, file)) not in ARCHITECTURES:
        raise ValueError(
            f"{file} names the architecture {name!r}; EAGLE heads of these can run: "
            f"{', '.join(ARCHITECTURES)}."
        )
    return config
