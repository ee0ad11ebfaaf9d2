"""Which layers share a block table?

Layers with the same attention: full, or the same sliding window. The groups have equally many
layers, so that a block of the pool suits each of them. Eight layers, "F" with full attention:

    layer        0   1   2   3   4   5   6   7
                 w   w   w   F   w   w   w   F
    group                        first tensor    second tensor
    0  full      layers 3, 7          3               7
    1  window    layers 0, 1          0               1
    2  window    layers 2, 4          2               4
    3  window    layers 5, 6          5               6

The first layers of all groups share one tensor of keys and values, the second layers another. A
block is the same row of both, and belongs to one group at a time. So it has a quarter of the bytes
of a block for all eight layers, and the memory holds four times as many.

vLLM: get_kv_cache_groups in vllm/v1/core/kv_cache_utils.py (V1; V0 has none).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanoserve.kernels.kv_cache import KVCacheSpec


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share a block table, and how many blocks they need."""

    layers: tuple[int, ...]
    window: int | None  # a query sees this many keys at most, its own included; None: all
    block_size: int
    max_chunk: int  # tokens of one sequence in one step at most

    @property
    def num_kept(self) -> int:
        """Tokens before the next one that stay. (One at least: its block may be full, and not yet
        known to the prefix cache.)"""
        return max(1, (self.window or 0) - 1)

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """How many blocks lie wholly behind the window of the next token.

        Window 6, block_size 4, 10 computed tokens: token 10 sees 5 .. 10, so block 0 is skipped.
        """
        if self.window is None:
            return 0
        return max(0, num_computed_tokens - self.num_kept) // self.block_size

    def most_blocks(self, num_tokens: int, num_computed_tokens: int = 0) -> int:
        """How many blocks a sequence of num_tokens holds at once, at most, from here to its end.

        A step needs what its first token sees, and its own tokens. Window 6, chunks of 4: 5 + 4
        tokens, which lie in 3 blocks of 4, at most.
        """
        num_blocks = -(-num_tokens // self.block_size)
        num_blocks -= self.num_skipped_blocks(num_computed_tokens)
        if self.window is None:
            return num_blocks
        return min(num_blocks, 1 - (1 - self.num_kept - self.max_chunk) // self.block_size)


def make_groups(specs: list[KVCacheSpec], block_size: int, max_chunk: int) -> list[KVCacheGroup]:
    """The groups of the layers with these specs, full attention first. Raises ValueError if the
    layers' keys or values differ in size.

    A group has as many layers as the rarest kind of attention, or as the most frequent one if that
    has hardly more. The last group of a kind may have fewer: then some rows of it lie idle.
    """
    if len({replace(spec, sliding_window=None) for spec in specs}) != 1:
        raise ValueError(
            "the layers of this model have keys and values of several sizes: their blocks do not "
            "fit one pool. Leave disable_hybrid_kv_cache_manager out."
        )
    kinds: dict[int | None, list[int]] = {}
    for layer, spec in enumerate(specs):
        kinds.setdefault(spec.sliding_window, []).append(layer)
    least, most = (choose(map(len, kinds.values())) for choose in (min, max))
    size = most if most < 1.25 * least else least
    return [
        KVCacheGroup(tuple(layers[start : start + size]), window, block_size, max_chunk)
        for window, layers in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
        for start in range(0, len(layers), size)
    ]
