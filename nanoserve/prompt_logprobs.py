"""How likely was the prompt itself?

SamplingParams(prompt_logprobs=2) asks for the log-probability of each prompt token, and of the two
likeliest ones at its place. The step computes the hidden states of the prompt anyway; what is added
are their logits, in tiles, because a prompt of 4,096 tokens times a vocabulary of 151,936 would be
2.5 GB:

    chunk [a, b)      hidden a .. b - 1   ->  logits about tokens a + 1 .. b

Most requests ask for none. This is a part of ModelRunner.sample.

vLLM: vllm/model_executor/layers/sampler.py (V0); vllm/v1/worker/gpu_model_runner.py,
_get_prompt_logprobs_dict (V1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from nanoserve.input_batch import InputBatch
from nanoserve.sampler import LogprobsTensors, gather_logprobs
from nanoserve.sequence import PromptLogprobs, ScheduledSequence

LOGPROB_TILE = 64  # prompt positions whose logits are in memory at once


class PromptLogprobsTensors(NamedTuple):
    """Log-probabilities of one sequence's prompt tokens from position `start` on."""

    seq_id: int
    start: int
    tiles: list[LogprobsTensors]

    def map(self, function: Callable[[Tensor], Tensor]) -> PromptLogprobsTensors:
        """A copy with `function` applied to each tensor."""
        return self._replace(tiles=[tensors.map(function) for tensors in self.tiles])

    def to_host(self) -> PromptLogprobs:
        """As Python numbers. Waits for the device."""
        entries = tuple(entry for tensors in self.tiles for entry in tensors.to_host())
        return PromptLogprobs(self.start, entries)


def gather_prompt_logprobs(
    batch: InputBatch,
    scheduled: tuple[ScheduledSequence, ...],
    query_start_loc: np.ndarray,
    hidden: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
    rank: int,
) -> list[PromptLogprobsTensors]:
    """For each sequence that asks: log-probabilities of its prompt tokens in this step.

    Every rank adds its part of the logits (`compute_logits`); rank 0 has them whole.
    """
    result: list[PromptLogprobsTensors] = []
    starts = query_start_loc[:-1].tolist()
    for item, start in zip(scheduled, starts, strict=True):
        row = batch.row_of[item.seq_id]
        number = batch.num_prompt_logprobs.get(row)
        first = item.num_computed_tokens + 1
        end = min(first + item.num_scheduled_tokens, int(batch.num_prompt_tokens[row]))
        if number is None or end <= first:
            continue
        token_ids = batch.token_ids[row, first:end].astype(np.int64)
        targets = batch.staging.send(token_ids=token_ids)["token_ids"]
        tiles: list[LogprobsTensors] = []
        for offset in range(0, end - first, LOGPROB_TILE):
            tile = targets[offset : offset + LOGPROB_TILE]
            logits = compute_logits(hidden[start + offset : start + offset + len(tile)]).float()
            if rank == 0:
                tensors = gather_logprobs(logits, tile, (number,) * len(tile))
                assert tensors is not None, "every row of the tile asks"
                tiles.append(tensors)
        result.append(PromptLogprobsTensors(item.seq_id, first, tiles))
    return result
