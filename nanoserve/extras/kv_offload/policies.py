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

LRU has two hits, ARC three. What the ghosts remember is bounded: t1 and b1 together have at most as
many blocks as there are rows, all four lists twice as many.

An access is a request that uses a block. If the block is here, that is `touch`. If it is not, the
request computes it, and it comes here later: `miss` and `insert`.

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

    def miss(self, key: Key) -> None:
        """A block is to come that is not here. Called before `evict`, if there is no free row."""
        return

    @abstractmethod
    def evict(self, key: Key, may_go: Callable[[Key, Block], bool]) -> Block | None:
        """Make room for the block `key`: evict one that may go. None, and no change, if there is
        none."""

    @abstractmethod
    def insert(self, key: Key, block: Block) -> None:
        """The block comes."""

    @abstractmethod
    def remove(self, key: Key) -> None:
        """A block goes, and this was no eviction: a transfer failed."""

    @abstractmethod
    def touch(self, key: Key) -> None:
        """A request uses the block, if it is here."""

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

    def evict(self, key: Key, may_go: Callable[[Key, Block], bool]) -> Block | None:
        victim = find_first(self.blocks, may_go)
        return None if victim is None else self.blocks.pop(victim)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.blocks)


def find_first(blocks: OrderedDict[Key, Block], may_go: Callable[[Key, Block], bool]) -> Key | None:
    """The first block that may go. Those before it are in use just now, so they go to the end: a
    search that began with them again for each block would take longer the more of them there are.
    """
    for _ in range(len(blocks)):
        key = next(iter(blocks))
        if may_go(key, blocks[key]):
            return key
        blocks.move_to_end(key)
    return None


class ARCPolicy(CachePolicy[Key]):
    """Adaptive Replacement Cache. (vLLM: ARCCachePolicy)

    Invariant: no key is in two lists; len(t1) + len(b1) <= capacity; all four have at most
    2 * capacity keys; 0 <= target_t1_size <= capacity.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.target_t1_size = 0.0  # p
        # The next to be evicted, or forgotten, first.
        self.t1: OrderedDict[Key, Block] = OrderedDict()
        self.t2: OrderedDict[Key, Block] = OrderedDict()
        self.b1: OrderedDict[Key, None] = OrderedDict()
        self.b2: OrderedDict[Key, None] = OrderedDict()

    def get(self, key: Key) -> Block | None:
        return self.t1.get(key) or self.t2.get(key)

    def miss(self, key: Key) -> None:
        """Learn from a ghost. The rarer a kind of ghost is, the more one of it counts."""
        b1, b2, target = len(self.b1), len(self.b2), self.target_t1_size
        if key in self.b1:
            self.target_t1_size = min(target + max(1.0, b2 / b1), float(self.capacity))
        elif key in self.b2:
            self.target_t1_size = max(target - max(1.0, b1 / b2), 0.0)

    def evict(self, key: Key, may_go: Callable[[Key, Block], bool]) -> Block | None:
        """REPLACE in the paper."""
        size, target = len(self.t1), self.target_t1_size
        from_t1 = size > target or (size == target and key in self.b2)
        lists = [(self.t1, self.b1), (self.t2, self.b2)]
        for blocks, ghosts in lists if from_t1 else reversed(lists):
            victim = find_first(blocks, may_go)
            if victim is not None:
                ghosts[victim] = None
                return blocks.pop(victim)
        return None

    def insert(self, key: Key, block: Block) -> None:
        is_ghost = key in self.b1 or key in self.b2  # then this is its second use
        self.b1.pop(key, None)
        self.b2.pop(key, None)
        (self.t2 if is_ghost else self.t1)[key] = block
        if len(self.t1) + len(self.b1) > self.capacity and self.b1:
            self.b1.popitem(last=False)
        lists = (self.t1, self.t2, self.b1, self.b2)
        if sum(len(each) for each in lists) > 2 * self.capacity and self.b2:
            self.b2.popitem(last=False)

    def remove(self, key: Key) -> None:
        del (self.t1 if key in self.t1 else self.t2)[key]

    def touch(self, key: Key) -> None:
        block = self.t1.pop(key, None) or self.t2.pop(key, None)
        if block is not None:
            self.t2[key] = block

    def __iter__(self) -> Iterator[Key]:
        yield from self.t1
        yield from self.t2


POLICIES: dict[str, type[CachePolicy]] = {"lru": LRUPolicy, "arc": ARCPolicy}


def touch_prefix(policy: CachePolicy[Key], keys: Iterable[Key]) -> None:
    """A request uses the blocks of a prefix, first block first. The last one is touched first, so
    that the prefix is evicted from its end: its beginning alone is of use, its end alone is not."""
    for key in reversed(list(keys)):
        policy.touch(key)
