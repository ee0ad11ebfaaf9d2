"""How does a small model guess for a large one?

The draft model is a checkpoint of its own, with the same vocabulary as the model that it guesses
for (the *target*). After each step it reads what the target has read, goes on alone for k tokens,
one forward pass each, and the target verifies the k tokens in its next step:

    step of the target     reads  t4 d5 d6 d7           accepts d5 and d6, samples t7
    first pass             reads  t4 t5 t6 t7  ->  d8   (t5 is d5, t6 is d6)
    two more passes        read   d8  ->  d9            d9  ->  d10
    next step              reads  t7 d8 d9 d10

*Where are its keys and values?* The layers of the draft model are further layers of the KV cache:
a block holds the keys and values of both models for the same tokens. So what the block manager and
the scheduler do with a block is right for both: a block that the prefix cache finds has both, a
copy moves both, a preemption forgets both. One rule makes this true: when a step ends, the draft
model has read exactly the positions that the target has read and kept. The first pass reads them,
prompts and tokens to be computed again included, and writes over what rejected drafts have left.
Behind them it writes into slots that the scheduler has allocated for it (num_lookahead_tokens);
the first pass after the next step writes over these, too.

*Which tokens does it draw?* With draft_sample_method "probabilistic" it draws as the request does:
with its temperature, its filters, and the very random number that the target will have at this
position (random numbers are functions of seed, branch and position). Two models that agree on the
probabilities draw the same token. So a draft model that is the target itself is always right, also
for requests that sample. Greedy requests, and all with "greedy", get the likeliest token. What a
request forbids is forbidden here, too (only that of bad words the last drafts are not known).

Drafts are made on rank 0, by a whole draft model; the other ranks get them with the next step. A
draft model that was made for shorter sequences than the target guesses worse behind their length.
Left out: CUDA graphs for the passes; a draft model with another vocabulary.

vLLM: vllm/spec_decode/multi_step_worker.py, draft_model_runner.py (V0);
vllm/v1/spec_decode/draft_model.py, llm_base_proposer.py (V1). Papers: arXiv 2211.17192, 2302.01318.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanoserve.attention import KVCache
from nanoserve.chapters.speculative.proposer import Proposer
from nanoserve.distributed.parallel import ParallelState
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.kernels.sampling import choose_tokens, compute_probs
from nanoserve.layers import LayerConfig
from nanoserve.models.base import Model
from nanoserve.models.checkpoint import MAX_INDEX_BYTES, read_json
from nanoserve.models.config import ModelConfig, resolve_folder
from nanoserve.models.loader import load_model
from nanoserve.sampler import apply_constraints
from nanoserve.sampling_params import GREEDY_TEMPERATURE
from nanoserve.sequence import ModelOutput, ScheduledSequence, SchedulerOutput

if TYPE_CHECKING:
    from nanoserve.chapters.speculative.config import SpeculativeConfig
    from nanoserve.input_batch import InputBatch
from nanoserve.model_runner import ModelRunner, PendingOutput


class ModelProposer(Proposer):
    """What a draft model, Medusa heads and an EAGLE head share: the choice of drafts from logits,
    and their way to the CPU."""

    def __init__(self, runner: ModelRunner, config: SpeculativeConfig) -> None:
        """Raises ValueError if the folder has no such model, or one that does not fit the
        target."""
        super().__init__(runner, config)
        self.is_probabilistic = config.draft_sample_method == "probabilistic"
        self._drafts: list[tuple[np.ndarray, Tensor]] = []  # (row of each, token of each)
        self._probs: dict[int, list[Tensor]] = defaultdict(list)  # row -> of each of its drafts

    def choose(self, logits: Tensor, rows: np.ndarray, ahead: int) -> Tensor:
        """The next draft of each row of `logits` [num_rows, vocab_size], which is its draft number
        `ahead`, from 0: [num_rows] int64."""
        batch = self.runner.req_states
        positions = batch.num_tokens[rows] + ahead
        sampling = batch.make_sampling_batch(rows, batch.branches[rows], positions)
        logits = apply_constraints(logits.float(), sampling)
        if not self.is_probabilistic:
            token_ids = logits.argmax(dim=-1)
        else:
            token_ids = choose_tokens(logits, sampling).token_ids
            drawn = (batch.temperature[rows] >= GREEDY_TEMPERATURE).nonzero()[0].tolist()
            if self.config.rejection_sample_method == "standard" and drawn:
                probs = compute_probs(logits, sampling)
                for i in drawn:  # of a greedy row none, whoever drafts beside it
                    self._probs[int(rows[i])].append(probs[i])
        self._drafts.append((rows, token_ids))
        return token_ids

    def take_drafts(self) -> dict[int, tuple[int, ...]]:
        """All drafts that were chosen since the last call, by seq_id. Waits for the device."""
        drafts, self._drafts = self._drafts, []
        probs, self._probs = self._probs, defaultdict(list)
        seq_ids = self.runner.req_states.seq_ids
        self.draft_probs = {int(seq_ids[row]): torch.stack(each) for row, each in probs.items()}
        result: dict[int, tuple[int, ...]] = {}
        if drafts:
            rows = np.concatenate([rows for rows, _ in drafts])
            token_ids = torch.cat([token_ids for _, token_ids in drafts]).tolist()
            for seq_id, token_id in zip(seq_ids[rows].tolist(), token_ids, strict=True):
                result[seq_id] = (*result.get(seq_id, ()), token_id)
        return result

    def begin(
        self, step: SchedulerOutput, output: ModelOutput, limits_of: dict[int, int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of each sequence of the step: its row, the position of its first token in the step, and
        how many drafts it may get (0 if no token was sampled for it); [num_seqs] int64 each."""
        self._drafts.clear()  # a call before this one may have failed
        self._probs.clear()
        row_of, sampled = self.runner.req_states.row_of, output.sampled
        numbers = [
            (
                row_of[item.seq_id],
                item.num_computed_tokens,
                limits_of.get(item.seq_id, 0) if item.seq_id in sampled else 0,
            )
            for item in step.scheduled
        ]
        rows, starts, limits = np.array(numbers, np.int64).reshape(-1, 3).T
        return rows, starts, limits

    def send(self, index: np.ndarray) -> Tensor:
        return self.runner.staging.send(index=index)["index"]


class DraftModelProposer(ModelProposer):
    """Drafts from a model that has keys and values of its own."""

    # At position p the draft model reads token p + shift. With 0, it reads the newest token too,
    # which is behind what the target has read.
    shift = 0

    def __init__(self, runner: ModelRunner, config: SpeculativeConfig) -> None:
        super().__init__(runner, config)
        self.model = self.load(resolve_folder(config.model, "speculative_config"))

    def load(self, folder: Path) -> Model:
        """The draft model of this folder, its weights filled."""
        runner, draft_config = self.runner, ModelConfig.from_folder(folder)
        check_vocab_size(draft_config.vocab_size, folder, runner.model_config)
        check_tokenizer(folder, runner.model_config.path)
        config = replace(runner.config, quantization=None)  # that is the target's
        return load_model(config, draft_config, whole(runner.layer_config))

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return self.model.kv_cache_specs()

    def propose(
        self, pending: PendingOutput, output: ModelOutput, limits_of: dict[int, int]
    ) -> dict[int, tuple[int, ...]]:
        """Read what the target has read, then draft. See Proposer."""
        inputs, hidden = pending.inputs, pending.hidden
        rows, starts, limits = self.begin(input_batch.step, output, limits_of)
        firsts, sizes = (
            input_batch.arrays.query_start_loc[:-1],
            np.diff(input_batch.arrays.query_start_loc),
        )
        newest = self.runner.req_states.num_tokens[rows] - 1  # positions of the last known tokens
        kept = np.minimum(sizes, newest - starts)  # what the target has read, less rejected drafts
        lengths = kept + (limits > 0) * (1 - self.shift)
        states = self.read(rows, starts, lengths, self.select_states(hidden, firsts, kept))
        rest = limits.nonzero()[0]
        if not len(rest):
            return self.take_drafts()
        # From here on one token of each sequence that drafts.
        states = states.index_select(0, self.send(lengths.cumsum()[rest] - 1))
        rows, limits, ends = rows[rest], limits[rest], (starts + lengths)[rest]
        drafts = self.choose(self.compute_logits(states), rows, 0)
        for ahead in range(1, limits.max()):
            rest = (limits > ahead).nonzero()[0]
            if len(rest) < len(rows):
                index = self.send(rest)
                states, drafts = states.index_select(0, index), drafts.index_select(0, index)
                rows, limits, ends = rows[rest], limits[rest], ends[rest]
            states = self.read(rows, ends + ahead - 1, np.ones_like(rows), states, drafts)
            drafts = self.choose(self.compute_logits(states), rows, ahead)
        return self.take_drafts()

    def select_states(self, hidden: Tensor, firsts: np.ndarray, lengths: np.ndarray) -> Tensor:
        """What the first pass reads beside tokens: nothing of the target's hidden states."""
        return hidden

    def read(
        self,
        rows: np.ndarray,
        starts: np.ndarray,
        lengths: np.ndarray,
        states: Tensor,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """Run the draft model on `lengths` tokens of each row, from position `starts` on: on tokens
        of the batch, or on `token_ids`. Returns hidden states [sum(lengths), hidden]."""
        runner = self.runner
        scheduled = tuple(
            ScheduledSequence(0, start, length, 0, [])
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        )
        nothing = SchedulerOutput(scheduled)
        arrays = runner.gather_arrays(nothing, rows)
        if token_ids is None and self.shift:
            known = runner.req_states.token_ids[arrays.token_rows, arrays.positions + self.shift]
            # A placeholder is left where no token could be sampled.
            arrays = replace(arrays, input_ids=known.astype(np.int64).clip(min=0))
        step = runner.send_step(nothing, arrays, None)
        token_ids = step.tensors.input_ids if token_ids is None else token_ids
        return self.run_model(
            token_ids, step, runner.kv_caches[-len(self.kv_cache_specs()) :], states
        )

    def run_model(
        self, token_ids: Tensor, step: InputBatch, kv_caches: list[KVCache], states: Tensor
    ) -> Tensor:
        return self.model(token_ids, step.tensors.positions, kv_caches, step.metadata)

    def compute_logits(self, states: Tensor) -> Tensor:
        """[num_rows, hidden] -> [num_rows, vocab_size]."""
        return self.model.compute_logits(states)


def whole(layer_config: LayerConfig) -> LayerConfig:
    """For a model that is on this rank alone."""
    return replace(layer_config, parallel=ParallelState())


def check_vocab_size(vocab_size: int, folder: Path, target: ModelConfig) -> None:
    """Raise ValueError unless both have equally many tokens."""
    if vocab_size != target.vocab_size:
        raise ValueError(
            f"{folder} has a vocab_size of {vocab_size}, and that of {target.path}, for which it "
            f"is to guess, is {target.vocab_size}. Both must have the same tokens: give "
            "speculative_config a model of the same family."
        )


def check_hidden_size(hidden_size: int, folder: Path, target: ModelConfig) -> None:
    """Raise ValueError unless heads of this size can read the target's hidden states."""
    if hidden_size != target.hidden_size:
        raise ValueError(
            f"{folder} has heads for a hidden_size of {hidden_size}, and that of {target.path} is "
            f"{target.hidden_size}. Give speculative_config heads that were trained for this model."
        )


def check_tokenizer(draft: Path, target: Path) -> None:
    """Raise ValueError if both folders have a tokenizer.json, and one has another vocabulary."""
    files = [folder / "tokenizer.json" for folder in (draft, target)]
    if not all(map(os.path.lexists, files)):
        return
    vocabularies = []
    for file in files:
        content = read_json(file, MAX_INDEX_BYTES)
        model, added = content.get("model"), content.get("added_tokens")
        vocabularies.append((model.get("vocab") if isinstance(model, dict) else None, added))
    if vocabularies[0] != vocabularies[1]:
        raise ValueError(
            f"{files[0]} and {files[1]} have different vocabularies: the draft model would guess "
            "other tokens than it means. Give speculative_config a draft model of the same family."
        )
