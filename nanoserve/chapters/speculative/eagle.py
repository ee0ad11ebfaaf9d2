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
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from nanoserve.attention import KVCache, StepMetadata
from nanoserve.chapters.speculative.draft_model import DraftModelProposer, check_sizes
from nanoserve.layers import LayerConfig, RowParallelLinear, VocabParallelEmbedding
from nanoserve.model import CausalLM, Decoder
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig, read_json
from nanoserve.models.families import llama
from nanoserve.models.loader import build_and_fill
from nanoserve.models.shards import Shard
from nanoserve.models.weight_files import find_files, read_headers

if TYPE_CHECKING:
    from nanoserve.input_batch import InputBatch

ARCHITECTURES = ("LlamaForCausalLM", "EagleLlamaForCausalLM")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


class EagleModel(Model):
    """fc and decoder layers; embedding and head only if they are not the target's modules."""

    def __init__(
        self,
        config: ModelConfig,
        names: dict[str, str],
        max_model_len: int,
        layer_config: LayerConfig,
    ) -> None:
        """`names`: of this model's own tensors among EMBEDDING, HEAD and the bias of fc, those in
        the files."""
        super().__init__()
        hidden, self.names = config.hidden_size, names
        bias = "fc.bias" in names
        self.fc = RowParallelLinear(2 * hidden, hidden, bias=bias, layer_config=layer_config)
        decoder = Decoder(config, llama(config), max_model_len, layer_config)
        self.layers, self.rotary_emb = decoder.layers, decoder.rotary_emb
        self.layers[0].input_layernorm = nn.Identity()
        self.embed_tokens = decoder.embed_tokens if EMBEDDING in names else None
        self.lm_head = None
        if HEAD in names:
            self.lm_head = VocabParallelEmbedding(config.vocab_size, hidden, layer_config)

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
        x, rope = self.fc(torch.cat((embeddings, states), dim=-1)), self.rotary_emb(positions)
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

    def load(self, folder: Path) -> EagleModel:
        """The head, its weights filled. Embedding and language-model head are the target's own
        modules, if the head brings none; with several ranks, which share those, they are read once
        more, for rank 0. Raises ValueError if the folder has no such head, or one for another
        model."""
        runner, hf, target = (
            self.runner,
            read_json(folder / "config.json"),
            self.runner.model_config,
        )
        hf = {**hf, **hf.get("model", {})}  # of model_type "eagle"
        config = ModelConfig.from_folder(folder, hf)
        if config.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{folder} has the architecture {config.architecture}; EAGLE heads of these can "
                f"run: {', '.join(ARCHITECTURES)}."
            )
        check_sizes(folder, vars(config), target, "vocab_size", "hidden_size")
        tensors: dict[str, Any] = {}
        if runner.config.load_format != "dummy":
            tensors = read_headers(find_files(folder))
        names = {name: name for name in (EMBEDDING, HEAD, "fc.bias") if name in tensors}
        if runner.parallel.tp_size > 1:
            theirs = {EMBEDDING: "model.embed_tokens.weight", HEAD: "lm_head.weight"}
            if target.tie_word_embeddings:
                theirs[HEAD] = theirs[EMBEDDING]
            in_target = read_headers(find_files(target.path)) if tensors else {}
            names = {**theirs, **names}
            tensors |= {name: in_target[name] for name in names.values() if name in in_target}
        build = partial(EagleModel, config, names)
        model = build_and_fill(build, self.engine_config, folder, tensors, self.layer_config)
        self.embedding = model.embed_tokens or find_embedding(runner.model)
        return model

    def select_states(self, hidden: Tensor, firsts: np.ndarray, lengths: np.ndarray) -> Tensor:
        """The target's hidden states, `lengths` [num_seqs] rows from `firsts` [num_seqs] on."""
        offsets = (firsts - lengths.cumsum() + lengths).repeat(lengths)
        return hidden.index_select(0, self.send(np.arange(lengths.sum()) + offsets))

    def run_model(
        self, token_ids: Tensor, inputs: InputBatch, kv_caches: list[KVCache], states: Tensor
    ) -> Tensor:
        embeddings, positions = self.embedding(token_ids), inputs.tensors.positions
        return self.model(embeddings, positions, states, kv_caches, inputs.metadata)

    def compute_logits(self, states: Tensor) -> Tensor:
        """Guessed hidden states [num_rows, hidden] -> logits [num_rows, vocab_size]."""
        return (self.model.lm_head or self.runner.model).compute_logits(states)


def find_embedding(target: Any) -> nn.Module:
    """The target's: of a model of our own, or of transformers."""
    if isinstance(target, CausalLM):
        return target.model.embed_tokens
    embedding: nn.Module = target.body.get_input_embeddings()
    return embedding
