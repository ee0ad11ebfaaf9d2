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
vllm/v1/spec_decode/draft_model.py, llm_base_proposer.py (0.32). Papers: arXiv 2211.17192,
2302.01318.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanoserve.chapters.speculative.proposer import Drafts, Limits, Proposer
from nanoserve.distributed.parallel import ParallelState
from nanoserve.input_batch import InputBatch
from nanoserve.kernels.kv_cache import KVCacheSpec
from nanoserve.kernels.sampling import compute_probs
from nanoserve.kernels.selector import choose_kernels
from nanoserve.model_runner import PendingOutput
from nanoserve.models.base import Model
from nanoserve.models.config import ModelConfig, resolve_folder
from nanoserve.models.loader import load_model
from nanoserve.models.weight_files import TensorInfo, find_files, read_headers
from nanoserve.sampler import apply_constraints
from nanoserve.sampling_params import GREEDY_TEMPERATURE
from nanoserve.sequence import ModelOutput, ScheduledSequence, SchedulerOutput

Array = np.ndarray
Drafted = Iterator[tuple[Array, Tensor]]  # rows of RequestState, and a draft for each of them


class ModelProposer(Proposer):
    """What a draft model, Medusa heads and an EAGLE head share: the choice of drafts from logits,
    and their way to the CPU."""

    def __init__(self, *args: Any) -> None:
        """Raises ValueError if the folder has no such model, or one that does not fit the
        target."""
        super().__init__(*args)
        runner = self.runner
        # The model is whole on this rank.
        self.layer_config = replace(runner.layer_config, parallel=ParallelState())
        self.engine_config = replace(runner.config, model_impl="auto")
        self.model: Any = self.load(resolve_folder(self.config.model))
        like_target = replace(self.engine_config, attention_backend=runner.backend)
        choose_kernels(self.model, like_target, runner.device, runner.dtype)

    def load(self, folder: Path) -> Model:
        """The model of this folder, its weights filled."""
        raise NotImplementedError

    def read_headers(self, folder: Path) -> dict[str, TensorInfo]:
        """The tensors in the files of this folder; none if weights are to be random."""
        is_dummy = self.engine_config.load_format == "dummy"
        return {} if is_dummy else read_headers(find_files(folder))

    def draft(self, pending: PendingOutput, rows: Array, starts: Array, limits: Array) -> Drafted:
        """The first drafts, then the second ones, ... Of each sequence of the step, [num_seqs]
        int64 each: its row, the position of its first token in the step, and how many drafts it
        may get (0 if no token was sampled for it)."""
        raise NotImplementedError

    def propose(self, pending: PendingOutput, output: ModelOutput, limits: Limits) -> Drafts:
        """See Proposer. Waits for the device once."""
        states, self.draft_probs = self.runner.req_states, defaultdict(list)
        numbers = [
            (states.row_of[i], start, limits.get(i, 0) if i in output.sampled else 0)
            for i, start, *_ in pending.input_batch.step.scheduled
        ]
        passes = list(self.draft(pending, *np.array(numbers, np.int64).T))
        drafts: dict[int, list[int]] = defaultdict(list)
        if passes:
            rows, token_ids = zip(*passes, strict=True)
            seq_ids = states.seq_ids[np.concatenate(rows)].tolist()
            for seq_id, token_id in zip(seq_ids, torch.cat(token_ids).tolist(), strict=True):
                drafts[seq_id].append(token_id)
        return drafts

    def choose(self, logits: Tensor, rows: Array, ahead: int) -> Tensor:
        """The next draft of each row, from logits [num_rows, vocab_size]: its draft number `ahead`,
        from 0. [num_rows] int64."""
        states, config = self.runner.req_states, self.config
        positions = states.num_tokens[rows] + ahead
        batch = states.make_sampling_batch(rows, states.branches[rows], positions)
        logits = apply_constraints(logits.float(), batch)
        if config.draft_sample_method == "greedy":
            return logits.argmax(dim=-1)
        if config.rejection_sample_method == "standard" and not batch.is_greedy:
            probs = compute_probs(logits, batch)
            for i in (states.temperature[rows] >= GREEDY_TEMPERATURE).nonzero()[0].tolist():
                self.draft_probs[int(states.seq_ids[rows[i]])].append(probs[i])
        return self.runner.choose(logits, batch).token_ids

    def send(self, index: Array) -> Tensor:
        return self.runner.send(index=index)["index"]


class DraftModelProposer(ModelProposer):
    """Drafts from a model that has keys and values of its own."""

    # At position p the draft model reads token p + shift. With 0, it reads the newest token too,
    # which is behind what the target has read.
    shift = 0

    def load(self, folder: Path) -> Model:
        config = ModelConfig.from_folder(folder)
        check_sizes(folder, vars(config), self.runner.model_config, "vocab_size")
        return load_model(self.engine_config, config, self.layer_config)

    def kv_cache_specs(self) -> list[KVCacheSpec]:
        return self.model.kv_cache_specs()

    def draft(self, pending: PendingOutput, rows: Array, starts: Array, limits: Array) -> Drafted:
        """Read what the target has read, then go on alone."""
        query_start_loc = pending.input_batch.arrays.query_start_loc
        newest = self.runner.req_states.num_tokens[rows] - 1  # positions of the last known tokens
        # What the target has read, less rejected drafts. (Where no token could be sampled: one.)
        kept = np.minimum(np.diff(query_start_loc), np.maximum(newest - starts, 1))
        lengths = kept + (limits > 0) * (1 - self.shift)
        states = self.select_states(pending.hidden, query_start_loc[:-1], kept)
        states = self.read(rows, starts, lengths, states)
        ends, last, token_ids = starts + lengths, lengths.cumsum() - 1, None
        for ahead in range(limits.max(initial=0)):
            rest = (limits > ahead).nonzero()[0]
            rows, limits, ends, last = rows[rest], limits[rest], ends[rest], last[rest]
            index = self.send(last)
            states = states.index_select(0, index)
            if token_ids is not None:
                token_ids, ones = token_ids.index_select(0, index), np.ones_like(rows)
                states = self.read(rows, ends + ahead - 1, ones, states, token_ids)
            token_ids = self.choose(self.compute_logits(states), rows, ahead)
            yield rows, token_ids
            last = np.arange(len(rows))

    def select_states(self, hidden: Tensor, firsts: Array, lengths: Array) -> Tensor:
        """What the first pass reads beside tokens: nothing of the target's hidden states."""
        return hidden

    def read(
        self, rows: Array, starts: Array, lengths: Array, states: Tensor, drafts: Any = None
    ) -> Tensor:
        """Run the draft model on `lengths` tokens of each row, from position `starts` on: on known
        tokens, or on `drafts`. Returns hidden states [sum(lengths), hidden]."""
        runner, places = self.runner, zip(starts.tolist(), lengths.tolist(), strict=True)
        step = SchedulerOutput(tuple(ScheduledSequence(0, *place, 0, []) for place in places))
        arrays = runner.gather_arrays(step, rows)
        known = runner.req_states.token_ids[arrays.token_rows, arrays.positions + self.shift]
        # A placeholder is left where no token could be sampled.
        arrays = replace(arrays, input_ids=known.astype(np.int64).clip(min=0))
        inputs = runner.send_inputs(step, arrays, None)
        token_ids = inputs.tensors.input_ids if drafts is None else drafts
        return self.run_model(token_ids, inputs, states)

    def run_model(self, x: Tensor, inputs: InputBatch, states: Tensor) -> Tensor:
        """One forward pass, on the drafter's own KV caches. x: token ids."""
        kv_caches = self.runner.kv_caches[-len(self.kv_cache_specs()) :]
        return self.model(x, inputs.tensors.positions, kv_caches, inputs.metadata)

    def compute_logits(self, states: Tensor) -> Tensor:
        """[num_rows, hidden] -> [num_rows, vocab_size]."""
        return self.model.compute_logits(states)


def check_sizes(folder: Path, found: Any, target: ModelConfig, *names: str) -> None:
    """Raise ValueError unless these sizes are those of the target."""
    for name in names:
        if (size := found.get(name)) != (wanted := getattr(target, name)):
            what = f"{folder} has {name} {size}, but {target.path} has {wanted}"
            raise ValueError(f"{what}. Give a drafter that was made for this model.")
