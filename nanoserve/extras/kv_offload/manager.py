"""Which block is in which row of the CPU tier?

The CPUOffloadingManager is to rows what BlockPool is to KV blocks: it counts and touches no memory.
A row is free, or it has a block; then it is pending (a transfer writes it), ready, or in use by
transfers that read it. Only a ready block that no transfer uses can be evicted:

    free --prepare_store--> pending --complete_store--> ready <--prepare/complete_load--> in use
      ^                        |                          |
      +----- it failed --------+                          +---- prepare_store evicts it: another's

Left out: a threshold of uses before a block is stored (vLLM's store_threshold): ARC does better.

vLLM: vllm/v1/kv_offload/cpu/manager.py CPUOffloadingManager (V1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nanoserve.extras.kv_offload.base import LookupResult, OffloadingManager, OffloadKey
from nanoserve.extras.kv_offload.policies import POLICIES, Block, CachePolicy, touch_prefix


class CPUOffloadingManager(OffloadingManager):
    """The records of the CPU tier. Invariant: `check()` passes between any two calls."""

    def __init__(self, num_blocks: int, eviction_policy: str = "lru") -> None:
        """`num_blocks`: rows."""
        self.num_blocks = num_blocks
        self.policy: CachePolicy[OffloadKey] = POLICIES[eviction_policy](num_blocks)
        self.free_rows = list(range(num_blocks - 1, -1, -1))
        self.num_idle = 0  # blocks that no transfer uses: these can be evicted
        # Rows of blocks whose transfer failed: free when it is sure that nobody writes them still.
        self.quarantine: list[int] = []

    def lookup(self, key: OffloadKey) -> LookupResult:
        block = self.policy.get(key)
        if block is None:
            return LookupResult.MISS
        return LookupResult.HIT if block.is_ready else LookupResult.HIT_PENDING

    def touch(self, keys: Iterable[OffloadKey]) -> None:
        touch_prefix(self.policy, keys)

    def prepare_load(self, keys: Iterable[OffloadKey]) -> list[int]:
        blocks = [self._get(key) for key in keys]
        for block in blocks:
            self.num_idle -= block.ref_cnt == 0
            block.ref_cnt += 1
        return [block.block_id for block in blocks]

    def complete_load(self, keys: Iterable[OffloadKey]) -> None:
        for key in keys:
            self._release(self._get(key))

    def prepare_store(self, key: OffloadKey) -> int | None:
        assert self.policy.get(key) is None, "this block is here"
        self.policy.miss(key)
        if self.free_rows:
            row = self.free_rows.pop()
        elif not self.num_idle:
            return None  # at once: a slow disk may use all rows for long
        else:
            evicted = self.policy.evict(key, lambda _, block: block.ref_cnt == 0)
            assert evicted is not None, "an idle block is nowhere"
            self.num_idle -= 1
            row = evicted.block_id
        self.policy.insert(key, Block(row, ref_cnt=1))
        return row

    def complete_store(self, keys: Iterable[OffloadKey], success: bool = True) -> None:
        for key in keys:
            block = self._get(key)
            self._release(block)
            if success:
                block.is_ready = True
            else:
                assert block.ref_cnt == 0, "a row is read that was not written"
                self._forget(key)
                self.quarantine.append(block.block_id)

    def end_quarantine(self) -> None:
        """Nobody writes the rows of failed transfers any more."""
        self.free_rows += self.quarantine
        self.quarantine.clear()

    def reset_cache(self) -> None:
        """Forget all blocks that no transfer uses."""
        for key, block in list(self.policy.items()):
            if block.ref_cnt == 0:
                self._forget(key)
                self.free_rows.append(block.block_id)

    def _forget(self, key: OffloadKey) -> None:
        """An idle block goes."""
        self.policy.remove(key)
        self.num_idle -= 1

    def _get(self, key: OffloadKey) -> Block:
        block = self.policy.get(key)
        assert block is not None, "this block is not here"
        return block

    def _release(self, block: Block) -> None:
        assert block.ref_cnt > 0, f"row {block.block_id} released twice"
        block.ref_cnt -= 1
        self.num_idle += block.ref_cnt == 0

    def check(self, used: Counter[OffloadKey]) -> None:
        """Raise AssertionError unless each row is free, in quarantine or has one block, and each
        block is in as many transfers as `used` says."""
        blocks = dict(self.policy.items())
        rows = [block.block_id for block in blocks.values()]
        rows += self.free_rows + self.quarantine
        assert sorted(rows) == list(range(self.num_blocks)), f"rows lost or twice: {sorted(rows)}"
        for key, block in blocks.items():
            assert block.ref_cnt == used[key], f"row {block.block_id}: {block.ref_cnt} transfers"
            assert block.is_ready or block.ref_cnt, f"row {block.block_id}: nobody writes it"
        assert not used.keys() - blocks.keys(), "a transfer uses a block that is not here"
        assert self.num_idle == len(blocks) - len(used), f"{self.num_idle} idle blocks"
