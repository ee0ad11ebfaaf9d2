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
vllm/v1/spec_decode/eagle.py (0.32). Paper: EAGLE, arXiv 2401.15077.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.chapters.speculative.draft_model import Array, DraftModelProposer, check_sizes
from nanoserve.input_batch import InputBatch
from nanoserve.layers import LayerConfig, RowParallelLinear, VocabParallelEmbedding
from nanoserve.model import CausalLM, Decoder
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig, read_json
from nanoserve.models.families import llama
from nanoserve.models.loader import build_and_fill
from nanoserve.models.shards import Shard

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class EagleModel(Model):
    """fc and decoder layers; embedding and head only if they are not the target's modules."""

    def __init__(
        self, config: ModelConfig, names: dict[str, str], max_len: int, layer_config: LayerConfig
    ) -> None:
        """names: of EMBEDDING, HEAD and the bias of fc those that are here -> their names in the
        files."""
        super().__init__()
        hidden, self.names, bias = config.hidden_size, names, "fc.bias" in names
        self.fc = RowParallelLinear(2 * hidden, hidden, bias=bias, layer_config=layer_config)
        decoder = Decoder(config, llama(config), max_len, layer_config)
        self.layers, self.rotary_emb = decoder.layers, decoder.rotary_emb
        self.layers[0].input_layernorm = nn.Identity()
        self.embed_tokens = decoder.embed_tokens if EMBEDDING in names else None
        self.lm_head = None
        if HEAD in names:
            self.lm_head = VocabParallelEmbedding(config.vocab_size, hidden, layer_config)

    def forward(
        self, x: Tensor, positions: Tensor, kv_caches: list[KVCache], metadata: StepMetadata
    ) -> Tensor:
        """Embeddings of tokens t+1 beside hidden states of tokens t [num_tokens, 2 * hidden], at
        positions t -> guessed hidden states of tokens t+1 [num_tokens, hidden]."""
        x, rope = self.fc(x), self.rotary_emb(positions)
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, rope, kv_cache, metadata)
        return x  # no norm: the target's hidden states are normalized ones

    def shards(self) -> Iterator[tuple[str, Shard]]:
        """With the target's names for what is filled from the target's files."""
        for name, shard in super().shards():
            yield self.names.get(name, name), shard


class EagleProposer(DraftModelProposer):
    """Drafts from an EAGLE head. Its states are guesses of the target's hidden states."""

    shift = 1

    def load(self, folder: Path) -> Model:
        """The head, its weights filled. Embedding and language-model head are the target's own
        modules, if the head brings none; with several ranks, which share those, they are read once
        more, for rank 0."""
        target, hf = self.runner.model_config, read_json(folder / "config.json")
        config = ModelConfig.from_folder(folder, {**hf, **hf.get("model", {})})
        check_sizes(folder, vars(config), target, "vocab_size", "hidden_size")
        tensors = self.read_headers(folder)
        names = {name: name for name in (EMBEDDING, HEAD, "fc.bias") if name in tensors}
        if self.runner.parallel.tp_size > 1:
            embedding, theirs = "model.embed_tokens.weight", self.read_headers(target.path)
            head = embedding if target.tie_word_embeddings else HEAD
            names = {EMBEDDING: embedding, HEAD: head, **names}
            tensors |= {name: theirs[name] for name in names.values() if name in theirs}
        build = partial(EagleModel, config, names)
        own = build_and_fill(build, self.engine_config, folder, tensors, self.layer_config)
        model: Any = self.runner.model  # one of ours, or of transformers
        is_own = isinstance(model, CausalLM)
        embedding = model.model.embed_tokens if is_own else model.body.get_input_embeddings()
        self.embedding = own.embed_tokens or embedding
        return own

    def select_states(self, hidden: Tensor, firsts: Array, lengths: Array) -> Tensor:
        """The target's hidden states, `lengths` [num_seqs] rows from `firsts` [num_seqs] on."""
        offsets = (firsts - lengths.cumsum() + lengths).repeat(lengths)
        return hidden.index_select(0, self.send(np.arange(lengths.sum()) + offsets))

    def run_model(self, x: Tensor, inputs: InputBatch, states: Tensor) -> Tensor:
        return super().run_model(torch.cat((self.embedding(x), states), dim=-1), inputs, states)

    def compute_logits(self, states: Tensor) -> Tensor:
        """Guessed hidden states [num_rows, hidden] -> logits [num_rows, vocab_size]."""
        return (self.model.lm_head or self.runner.model).compute_logits(states)
