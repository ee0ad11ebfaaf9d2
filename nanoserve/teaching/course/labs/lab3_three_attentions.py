"""Lab 3: three attentions, one answer.

The definition, over keys that lie in a row; the same over keys in scattered blocks; and block by
block, without ever having all scores at once, as the fast kernels do. Read nanoserve/attention.py
first (the header and StepMetadata). Shapes stand in brackets.
"""

import torch
from torch import Tensor

from nanoserve.attention import AttentionBackend, KVCache, StepMetadata


def definition(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence.

    query [q, num_heads, dim], key [k, num_kv_heads, dim], value [k, num_kv_heads, value_dim]
    -> [q, num_heads, value_dim].

    The queries are the last q of the k tokens: query j stands at position k - q + j, and sees the
    keys up to its own position. Head h reads key head h // (num_heads // num_kv_heads). A score is
    scale * (query . key); the softmax of a query's scores weighs the values.
    """
    raise NotImplementedError("Task 3.1")


class MyGather(AttentionBackend):
    def attend(
        self, query: Tensor, kv_cache: KVCache, metadata: StepMetadata, *, scale: float, **_: object
    ) -> Tensor:
        """[num_tokens, num_heads, dim] -> [num_tokens, num_heads, value_dim].

        kv_cache is (keys, values), [num_blocks, block_size, num_kv_heads, dim] each. Sequence i has
        the tokens [query_start_loc[i], query_start_loc[i + 1]) of the step, seq_lens[i] keys, and
        the blocks block_table[i]. For each sequence: gather its keys and values, then call your
        definition. What stands behind the last key in the last block is not a number to be used.
        """
        raise NotImplementedError("Task 3.2")


def add_block(
    top: Tensor, total: Tensor, mixed: Tensor, score: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Online softmax: what is known of the keys so far, and one block more.

    top [heads, q, 1] is the largest score so far, total [heads, q, 1] the sum of exp(score - top),
    mixed [heads, q, dim] the sum of exp(score - top) * value. They begin as -inf, 0 and 0. score
    [heads, q, block], -inf where a key is hidden; value [heads, block, dim]. Returns the new three.
    mixed / total is the answer over all keys so far. When top rises, what was summed before is too
    large by a factor. While every key was hidden, top is -inf: mind -inf - -inf.
    """
    raise NotImplementedError("Task 3.3")


class MyOnline(AttentionBackend):
    def attend(
        self, query: Tensor, kv_cache: KVCache, metadata: StepMetadata, *, scale: float, **_: object
    ) -> Tensor:
        """As MyGather.attend, but one block of keys after the other, with add_block: no gather, and
        no more than block_size scores of a query at a time.
        """
        raise NotImplementedError("Task 3.4")


def show_softmax(scores: list[float]) -> list[float]:  # this one is written: try it
    """Softmax of a row, to compare with: show_softmax([1.0, 2.0])."""
    return torch.tensor(scores).softmax(dim=0).tolist()
