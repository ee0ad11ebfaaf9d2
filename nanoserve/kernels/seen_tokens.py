"""How do penalties know the tokens so far, without waiting for the CPU?

A penalty changes the logits of tokens that are in the prompt or in the output. Those tokens are
kept on the device, one row for each row of the RequestState. A row is filled when a token is first
sampled for it: then the CPU knows all of its tokens. Each later step adds the token that the device
sampled last, whether or not the token has reached the CPU.

A step reads the tokens of a row and not its whole vocabulary. Example, vocabulary 0 .. 9, prompt
[7 5 9 5], no output at first; then 7 and 8 are sampled:

    num_seen   token_ids              output_counts
    3          [5 7 9 5 5 5 ...]      [0 0 0 0 0 0 0 0 0 0]     filled: different tokens, in order
    4          [5 7 9 7 5 5 ...]      [0 0 0 0 0 0 0 1 0 0]
    5          [5 7 9 7 8 5 ...]      [0 0 0 0 0 0 0 1 1 0]

A token may be listed twice: both places read the same count. Behind the end a row repeats its first
token, so rows of different lengths are read as one rectangle.

Memory: 4 * (max_model_len + vocab_size) bytes a row, and max_num_seqs rows. It is allocated when
the first request with a penalty comes, and kept. On a GPU, kv_cache.profile_run has left room for
it, unless the user has set the size of the KV cache.

vLLM: vllm/model_executor/layers/utils.py get_token_bin_counts_and_mask, which counts all tokens
anew in each step (V0 and V1).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from nanoserve.input_batch import RequestState


def allocate_seen_tokens(
    num_rows: int, max_model_len: int, vocab_size: int, device: torch.device
) -> list[Tensor]:
    """Token ids [num_rows, max_model_len] and their counts [num_rows, vocab_size]."""
    widths = (max_model_len, vocab_size)
    return [torch.empty(num_rows, n, dtype=torch.int32, device=device) for n in widths]


class SeenTokens:
    """By row: the tokens of prompt and output, and how often each token is in the output.

    Invariant: `token_ids[row, :num_seen[row]]` holds each of the row's first num_counted tokens, of
    prompt and output, in flight or not; behind them stands its first one. `output_counts[row]`
    counts those of the output. Rows with num_counted 0 are not in use.
    """

    def __init__(self, batch: RequestState) -> None:
        """`batch` knows the rows' tokens on the CPU, and on the device the last one of each."""
        self.req_states = batch
        self.num_counted, self.num_seen = np.zeros((2, len(batch.token_ids)), np.int64)
        self.token_ids: Any = None  # Tensor [num_rows, max_model_len] int32
        self.output_counts: Any = None  # Tensor [num_rows, vocab_size] int32

    def remove(self, row: int) -> None:
        """The sequence of this row has left."""
        self.num_counted[row] = 0

    def update(self, rows: np.ndarray) -> None:
        """Before these rows are sampled: count the token that was sampled since the last time. A
        row that is sampled for the first time is filled."""
        states = self.req_states
        if self.token_ids is None:
            sizes = (*states.token_ids.shape, states.vocab_size)
            self.token_ids, self.output_counts = allocate_seen_tokens(*sizes, states.device)
        rows = np.unique(rows)  # a row that is about to fork comes n times
        for row in rows[self.num_counted[rows] == 0].tolist():
            self._fill(row)
        rows = rows[states.num_tokens[rows] > self.num_counted[rows]]
        if len(rows):
            known = states.token_ids[rows, states.num_tokens[rows] - 1].astype(np.int64)
            sent = states.send(rows=rows, positions=self.num_seen[rows], known=known)
            last_sampled = states.last_sampled_token_ids.index_select(0, sent["rows"])
            sampled = torch.where(sent["known"] < 0, last_sampled, sent["known"])
            self.token_ids.index_put_((sent["rows"], sent["positions"]), sampled.int())
            one = torch.ones_like(sampled, dtype=torch.int32)
            self.output_counts.index_put_((sent["rows"], sampled), one, accumulate=True)
            self.num_seen[rows] += 1
            self.num_counted[rows] += 1

    def _fill(self, row: int) -> None:
        states = self.req_states
        token_ids = states.token_ids[row, : states.num_tokens[row]]
        seen = np.unique(token_ids)  # int32
        output = token_ids[states.num_prompt_tokens[row] :]
        counts = np.bincount(output, minlength=int(seen[-1]) + 1)
        sent = states.send(seen=seen, counts=counts[seen].astype(np.int32))
        self.output_counts[row].zero_().index_copy_(0, sent["seen"].long(), sent["counts"])
        self.token_ids[row] = sent["seen"][0]
        self.token_ids[row, : len(seen)] = sent["seen"]
        self.num_counted[row], self.num_seen[row] = len(token_ids), len(seen)

    def gather(self, rows: np.ndarray) -> dict[str, Tensor]:
        """The tokens of each of k rows, and their counts: both [k, the largest num_seen]."""
        index = self.req_states.send(rows=rows)["rows"]
        token_ids = self.token_ids[:, : int(self.num_seen[rows].max())]
        token_ids = token_ids.index_select(0, index).long()
        counts = self.output_counts[index[:, None], token_ids]
        return {"token_ids": token_ids, "output_counts": counts}
