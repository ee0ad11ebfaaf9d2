"""Which block leaves the CPU tier when another one needs its row?

*LRU* evicts the block that was not used for the longest time. A *scan* (many blocks, each used
once: a batch of long documents) then drives out everything, also what is used again and again.

*ARC* (Adaptive Replacement Cache) keeps the blocks in two lists, and remembers what it evicted in
two more, the "ghosts", which hold no rows:

    t1   used once, lately             b1   evicted from t1
    t2   used at least twice           b2   evicted from t2

`target_t1_size` (p in the paper) is how many rows t1 should have. A block that comes back soon
after it was evicted from t1 says that t1 is too small: p grows. One that comes back from b2 says
the contrary: p shrinks. So ARC learns from its mistakes where to be between LRU (all rows in t1)
and "what was used twice" (all in t2).

Three rows, eight accesses: a and b are used twice, then c, d and e are scanned, then a returns.
(Lists with the next to be evicted first; * is a hit.)

    access   LRU           ARC: t1         t2       b1
    a        a             a               -        -
    b        a b           a b             -        -
    a        b a *         b               a *      -        the second use: to t2
    b        a b *         -               a b *    -
    c        a b c         c               a b      -
    d        b c d         d               a b      c        t1 is larger than p = 0: c goes
    e        c d e         e               a b      c d      again: the scan drives out itself
    a        d e a         e               b a *    c d      LRU has just lost a: computed again

LRU has two hits, ARC three. (If b1 and b2 forget, is bounded as in the paper: t1 + b1 and t2 + b2
together are at most twice the rows.)

An access is a request that uses the block: of a block that is here `touch`, of one that is not here
`insert`, when it was computed and is stored.

Left out: policies of one's own by name (vLLM's cache_policy_module_path): subclass CachePolicy.

vLLM: vllm/v1/kv_offload/cpu/policies/. ARC: Megiddo and Modha, FAST 2003, figure 4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key")


@dataclass(slots=True)
class Block:
    """A block in the CPU tier (vLLM: ChunkStatus)."""

    block_id: int  # its row
    ref_cnt: int = 0  # transfers that use the row: it is not evicted
    is_ready: bool = False  # the row holds it, whole


class CachePolicy(ABC, Generic[Key]):
    """Which blocks are here, and in which order they leave."""

    def __init__(self, capacity: int) -> None:
        """`capacity`: rows."""
        self.capacity = capacity

    @abstractmethod
    def get(self, key: Key) -> Block | None:
        """The block, if it is here. No access: the order stays."""

    @abstractmethod
    def insert(self, key: Key, block: Block) -> None:
        """A block that is not here was computed, and comes."""

    @abstractmethod
    def remove(self, key: Key) -> None:
        """A block goes, and this was no eviction: a transfer failed."""

    @abstractmethod
    def touch(self, key: Key) -> None:
        """A request uses the block, which may be here or not."""

    @abstractmethod
    def evict(self, may_go: Callable[[Key, Block], bool]) -> tuple[Key, Block] | None:
        """Evict one block that may go; None, and no change, if there is none."""

    @abstractmethod
    def __iter__(self) -> Iterator[Key]:
        """All keys that are here, in no order."""

    def items(self) -> Iterator[tuple[Key, Block]]:
        """All that is here."""
        for key in self:
            block = self.get(key)
            assert block is not None
            yield key, block


class LRUPolicy(CachePolicy[Key]):
    """Least recently used. (vLLM: LRUCachePolicy)"""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.blocks: OrderedDict[Key, Block] = OrderedDict()  # the next to be evicted first

    def get(self, key: Key) -> Block | None:
        return self.blocks.get(key)

    def insert(self, key: Key, block: Block) -> None:
        self.blocks[key] = block

    def remove(self, key: Key) -> None:
        del self.blocks[key]

    def touch(self, key: Key) -> None:
        if key in self.blocks:
            self.blocks.move_to_end(key)

    def evict(self, may_go: Callable[[Key, Block], bool]) -> tuple[Key, Block] | None:
        key = first(self.blocks, may_go)
        return None if key is None else (key, self.blocks.pop(key))

    def __iter__(self) -> Iterator[Key]:
        return iter(self.blocks)


def first(blocks: OrderedDict[Key, Block], may_go: Callable[[Key, Block], bool]) -> Key | None:
    """The first block that may go."""
    return next((key for key, block in blocks.items() if may_go(key, block)), None)


POLICIES = {"lru": LRUPolicy}


def touch_prefix(policy: CachePolicy[Key], keys: Iterable[Key]) -> None:
    """A request uses the blocks of a prefix, first block first. The last one is touched first, so
    that the prefix is evicted from its end: its beginning alone is of use, its end alone is not."""
    for key in reversed(list(keys)):
        policy.touch(key)
