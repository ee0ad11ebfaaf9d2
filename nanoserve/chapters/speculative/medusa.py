"""How do a few heads guess several tokens at once?

The hidden state from which the target draws the next token knows something about the tokens behind
it, too. Medusa heads read it out: head i is a small residual block and a language-model head, and
guesses the token i + 2 places ahead. All of them read the same hidden state, so one product each is
all that drafting costs: no forward pass, no keys, no values.

    target:   h[6]  ->  token 7
    head 0    h[6]  ->  draft 8        x + silu(W x), then logits
    head 1    h[6]  ->  draft 9
    head 2    h[6]  ->  draft 10

A head does not know which tokens were drafted before its own: that is why later heads are worse
guessers than a draft model or an EAGLE head.

Checkpoint (as vLLM reads it): `blocks.{i}.layers.{j}.weight` [hidden, hidden] (and `.bias` with
medusa_fc_bias), `lm_heads.{i}.weight` [vocab_size, hidden], or one `lm_head.weight` for all heads
with original_lm_head. Left out: trees of drafts, and a truncated vocabulary.

vLLM: vllm/spec_decode/medusa_worker.py (V0); vllm/v1/spec_decode/medusa.py,
vllm/model_executor/models/medusa.py (0.32). Paper: Medusa, arXiv 2401.10774.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.chapters.speculative.draft_model import Array, Drafted, ModelProposer, check_sizes
from nanoserve.layers import ColumnParallelLinear, LayerConfig, VocabParallelEmbedding
from nanoserve.model_runner import PendingOutput
from nanoserve.models.base import Model
from nanoserve.models.config import read_json
from nanoserve.models.loader import build_and_fill


class ResidualBlock(nn.Module):
    """x + silu(W x + b), one or more times."""

    def __init__(self, hf: dict[str, Any], layer_config: LayerConfig) -> None:
        super().__init__()
        size, bias = hf["hidden_size"], hf.get("medusa_fc_bias", False)
        number = hf.get("num_hidden_layers") or hf.get("medusa_num_layers") or 1
        self.layers = nn.ModuleList(
            ColumnParallelLinear(size, {str(i): size}, bias=bias, layer_config=layer_config)
            for i in range(number)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[num_rows, hidden] -> [num_rows, hidden]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaModel(Model):
    """All heads."""

    def __init__(self, hf: dict[str, Any], max_len: int, layer_config: LayerConfig) -> None:
        """hf: what config.json says."""
        super().__init__()
        number = hf.get("num_heads") or hf.get("medusa_num_heads") or 0
        sizes, self.logit_scale = (hf["vocab_size"], hf["hidden_size"]), hf.get("logit_scale", 1.0)
        self.blocks = nn.ModuleList(ResidualBlock(hf, layer_config) for _ in range(number))
        self.is_shared = hf.get("original_lm_head", False)
        if self.is_shared:
            self.lm_head = VocabParallelEmbedding(*sizes, layer_config)
        else:
            heads = (VocabParallelEmbedding(*sizes, layer_config) for _ in range(number))
            self.lm_heads = nn.ModuleList(heads)

    def forward(self, hidden: Tensor, head: int) -> Tensor:
        """The target's hidden states [num_rows, hidden] -> logits of the token `head` + 2 places
        ahead, [num_rows, vocab_size]."""
        lm_head = self.lm_head if self.is_shared else self.lm_heads[head]
        return lm_head.compute_logits(self.blocks[head](hidden)) * self.logit_scale


class MedusaProposer(ModelProposer):
    """Drafts from the target's hidden state of the last accepted token."""

    def load(self, folder: Path) -> Model:
        hf, most = read_json(folder / "config.json"), self.config.num_speculative_tokens
        check_sizes(folder, hf, self.runner.model_config, "vocab_size", "hidden_size")
        build, tensors = partial(MedusaModel, hf), self.read_headers(folder)
        model = build_and_fill(build, self.engine_config, folder, tensors, self.layer_config)
        if (number := len(model.blocks)) < most:
            raise ValueError(f"num_speculative_tokens is {most}: {folder} has {number} heads.")
        return model

    def draft(self, pending: PendingOutput, rows: Array, starts: Array, limits: Array) -> Drafted:
        """One draft from each head."""
        # The last token that the target has read and kept is the one before the newest.
        firsts = pending.input_batch.arrays.query_start_loc[:-1]
        lasts = firsts + self.runner.req_states.num_tokens[rows] - 2 - starts
        for ahead in range(limits.max(initial=0)):
            rest = (limits > ahead).nonzero()[0]
            hidden = pending.hidden.index_select(0, self.send(lasts[rest]))
            yield rows[rest], self.choose(self.model(hidden, ahead), rows[rest], ahead)
