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

vLLM: vllm/spec_decode/medusa_worker.py (V0); vllm/v1/spec_decode/medusa.py (V1);
vllm/model_executor/models/medusa.py. Paper: Medusa, arXiv 2401.10774.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from nanoserve.chapters.speculative.draft_model import (
    ModelProposer,
    check_hidden_size,
    check_vocab_size,
    whole,
)
from nanoserve.layers import ColumnParallelLinear, LayerConfig, VocabParallelEmbedding
from nanoserve.models.base import Model
from nanoserve.models.checkpoint import COUNT, FLAG, KEYS, LENGTH, POSITIVE, read_json, read_key
from nanoserve.models.config import resolve_folder
from nanoserve.models.loader import build_and_fill
from nanoserve.models.weight_files import find_files, read_headers
from nanoserve.sequence import ModelOutput

if TYPE_CHECKING:
    from nanoserve.chapters.speculative.config import SpeculativeConfig
    from nanoserve.model_runner import ModelRunner, PendingOutput

# What config.json may say, beside the keys that all models have.
MEDUSA_KEYS = KEYS | {
    "num_heads": COUNT,
    "medusa_num_heads": COUNT,  # another name
    "medusa_num_layers": KEYS["num_hidden_layers"],  # another name
    "medusa_fc_bias": FLAG,
    "original_lm_head": FLAG,
    "truncated_vocab_size": LENGTH,
    "logit_scale": POSITIVE,
}


@dataclass(frozen=True)
class MedusaConfig:
    """What config.json says."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    num_layers: int  # of each head's residual block
    has_bias: bool
    shares_lm_head: bool  # one language-model head for all
    logit_scale: float

    @classmethod
    def from_folder(cls, folder: Path) -> MedusaConfig:
        """Read `folder`/config.json. Raises ValueError for a file that is missing or describes
        something else, a value that is not allowed, and a truncated vocabulary."""
        file = folder / "config.json"
        read = partial(read_key, read_json(file), file=file, rules=MEDUSA_KEYS)
        config = cls(
            hidden_size=read("hidden_size", 0),
            vocab_size=read("vocab_size", 0),
            num_heads=read("num_heads", read("medusa_num_heads", 0)),
            num_layers=read("num_hidden_layers", read("medusa_num_layers", 1)),
            has_bias=read("medusa_fc_bias", False),
            shares_lm_head=read("original_lm_head", False),
            logit_scale=read("logit_scale", 1.0),
        )
        for name in ("hidden_size", "vocab_size", "num_heads"):
            if not getattr(config, name):
                raise ValueError(f"{file} has no '{name}', which Medusa heads must name.")
        if (size := read("truncated_vocab_size", config.vocab_size)) != config.vocab_size:
            raise ValueError(
                f"{file}: truncated_vocab_size is {size}, less than the vocab_size of "
                f"{config.vocab_size}; heads for a part of the vocabulary can't run here."
            )
        return config


class ResidualBlock(nn.Module):
    """x + silu(W x + b), one or more times."""

    def __init__(self, config: MedusaConfig, layer_config: LayerConfig) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.has_bias
        self.layers = nn.ModuleList(
            ColumnParallelLinear(size, {str(i): size}, bias=bias, layer_config=layer_config)
            for i in range(config.num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[num_rows, hidden] -> [num_rows, hidden]."""
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


def make_lm_head(config: MedusaConfig, layer_config: LayerConfig) -> VocabParallelEmbedding:
    lm_head = VocabParallelEmbedding(config.vocab_size, config.hidden_size, layer_config)
    lm_head.is_embedding = False
    return lm_head


class MedusaModel(Model):
    """All heads."""

    def __init__(self, config: MedusaConfig, max_model_len: int, layer_config: LayerConfig) -> None:
        super().__init__()
        self.logit_scale, num_heads = config.logit_scale, config.num_heads
        self.blocks = nn.ModuleList(ResidualBlock(config, layer_config) for _ in range(num_heads))
        self.lm_head: VocabParallelEmbedding | None = None
        if config.shares_lm_head:
            self.lm_head = make_lm_head(config, layer_config)
        else:
            self.lm_heads = nn.ModuleList(
                make_lm_head(config, layer_config) for _ in range(num_heads)
            )

    def forward(self, hidden: Tensor, head: int) -> Tensor:  # type: ignore[override]
        """The target's hidden states [num_rows, hidden] -> logits of the token `head` + 2 places
        ahead, [num_rows, vocab_size]."""
        lm_head: Any = self.lm_heads[head] if self.lm_head is None else self.lm_head
        logits: Tensor = lm_head.compute_logits(self.blocks[head](hidden))
        return logits * self.logit_scale


class MedusaProposer(ModelProposer):
    """Drafts from the target's hidden state of the last accepted token."""

    def __init__(self, runner: ModelRunner, config: SpeculativeConfig) -> None:
        super().__init__(runner, config)
        folder, target = resolve_folder(config.model, "speculative_config"), runner.model_config
        medusa = MedusaConfig.from_folder(folder)
        check_hidden_size(medusa.hidden_size, folder, target)
        check_vocab_size(medusa.vocab_size, folder, target)
        if medusa.num_heads < config.num_speculative_tokens:
            raise ValueError(
                f"num_speculative_tokens is {config.num_speculative_tokens}, and {folder} has "
                f"{medusa.num_heads} Medusa heads, one for each token. Lower it."
            )
        is_dummy = runner.config.load_format == "dummy"
        tensors = {} if is_dummy else read_headers(find_files(folder))
        build, layer_config = partial(MedusaModel, medusa), whole(runner.layer_config)
        self.model = build_and_fill(build, runner.config, folder, tensors, layer_config)

    def propose(
        self, pending: PendingOutput, output: ModelOutput, limits_of: dict[int, int]
    ) -> dict[int, tuple[int, ...]]:
        """One draft from each head. See Proposer."""
        inputs, hidden = pending.inputs, pending.hidden
        rows, starts, limits = self.begin(input_batch.step, output, limits_of)
        # The last token that the target has read and kept is the one before the newest.
        lasts = (
            input_batch.arrays.query_start_loc[:-1]
            + self.runner.req_states.num_tokens[rows]
            - 2
            - starts
        )
        for ahead in range(limits.max(initial=0)):
            rest = (limits > ahead).nonzero()[0]
            states = hidden.index_select(0, self.send(lasts[rest]))
            self.choose(self.model(states, ahead), rows[rest], ahead)
        return self.take_drafts()
