"""How do blocks get to the tiers below the CPU tier, and back?

Down: as soon as a step's copies are made, its rows go to every tier below (`cascade`).

Up: before the scheduler admits a waiting sequence it asks `is_ready`, which looks for the blocks of
its prompt, first block first, until one is nowhere:

    the prefix cache   b0 b1
    rows               .  .  b2 .  .  .         held: they keep their rows until it is admitted
    a disk             .  .  b2 b3 b4 .         b3 and b4 are read into rows, by threads
    to be computed     .  .  .  .  .  b5

While anything of that is on its way, the sequence is passed over, and holds no KV blocks (V1's
status WAITING_FOR_REMOTE_KVS). Then it is admitted as any other: what is in rows is loaded. A block
that could not be read, or does not come within LOAD_TIMEOUT, is computed; so is all behind it.

Two sequences that want the same blocks wait for one transfer. A row that a transfer uses keeps its
block. If there is no row for a block, it is not read (up), or not kept (down): nobody waits.

Left out: reading ahead of a sequence's turn by guesses, and blocks that go from tier to tier.

vLLM: vllm/v1/kv_offload/tiering/manager.py TieringOffloadingManager (V1).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from nanoserve.extras.kv_offload.base import (
    JobResult,
    LookupResult,
    OffloadKey,
    SecondaryTierManager,
    TransferJob,
)
from nanoserve.extras.kv_offload.digests import BlockDigests
from nanoserve.extras.kv_offload.manager import CPUOffloadingManager
from nanoserve.extras.kv_offload.stats import OffloadingConnectorStats
from nanoserve.sequence import Sequence

LOOK_AHEAD = 16  # blocks that a tier is asked for at once; the more of them are there, the more
LOAD_TIMEOUT = 30.0  # seconds that a sequence waits for its blocks
CLOSE_TIMEOUT = 10.0  # seconds that close() waits for what is on its way down


class Promotion:
    """What a waiting sequence gets from below."""

    def __init__(self, keys: Iterable[OffloadKey]) -> None:
        self.unknown = deque(keys)  # nobody has looked for them yet, first block first
        self.pending: set[OffloadKey] = set()  # on their way to a row
        self.held: dict[OffloadKey, str] = {}  # in a row, which keeps it: where it came from
        self.deadline = time.monotonic() + LOAD_TIMEOUT
        self.is_over = False  # nothing is on its way any more, or it is too late


class Job(NamedTuple):
    """A transfer between rows and a tier."""

    tier: SecondaryTierManager
    keys: dict[bytes, OffloadKey]  # by digest
    is_load: bool  # up
    seq_id: int | None  # for whom; None: blocks of any sequences


class TieringOffloadingManager:
    """The transfers between the CPU tier and the tiers below it."""

    def __init__(
        self,
        manager: CPUOffloadingManager,
        tiers: list[SecondaryTierManager],
        digests: BlockDigests,
    ) -> None:
        """`tiers`: the next one first."""
        self.manager, self.tiers, self.digests = manager, tiers, digests
        sources = ["host", *(tier.cache_hit_source for tier in tiers)]
        self.stats = OffloadingConnectorStats([tier.tier_type for tier in tiers], sources)
        self.promotions: dict[int, Promotion] = {}  # by seq_id
        self.jobs: dict[int, Job] = {}
        self._num_jobs = 0

    # -- down --

    def cascade(self, keys: Iterable[OffloadKey]) -> None:
        """Send blocks, whose rows are whole, to every tier."""
        keys = list(keys)
        for tier in self.tiers if keys else ():
            self.store(tier, keys)

    def store(
        self, tier: SecondaryTierManager, keys: list[OffloadKey], seq_id: int | None = None
    ) -> None:
        """Send blocks, whose rows are whole, to a tier: those of any sequences, or of one."""
        self._submit(tier, False, keys, self.manager.prepare_load(keys), seq_id)

    # -- up --

    def is_ready(self, seq: Sequence, find_keys: Callable[[], Iterable[OffloadKey]]) -> bool:
        """May the waiting `seq` be admitted? find_keys: the hashes of the blocks that it could
        load, first block first; called once."""
        self.poll()
        promotion = self.promotions.get(seq.seq_id)
        if promotion is None:
            promotion = self.promotions[seq.seq_id] = Promotion(find_keys())
        if promotion.unknown:
            self._look_up(seq.seq_id, promotion)
        is_late = time.monotonic() > promotion.deadline
        promotion.is_over = is_late or not (promotion.unknown or promotion.pending)
        return promotion.is_over

    def is_loading(self, seq: Sequence) -> bool:
        """Did `is_ready` last say no? Changes nothing: any thread may ask."""
        promotion = self.promotions.get(seq.seq_id)
        return promotion is not None and not promotion.is_over

    def _look_up(self, seq_id: int, promotion: Promotion) -> None:
        """Find out where the next blocks are, and begin to read those that are below."""
        found: defaultdict[SecondaryTierManager, list[OffloadKey]] = defaultdict(list)
        rows: dict[OffloadKey, int] = {}
        num_known = len(promotion.held) + len(promotion.pending)
        for key in islice(promotion.unknown, LOOK_AHEAD + num_known):
            self._find(key)  # its threads look for all of these at once
        while promotion.unknown:
            key = promotion.unknown[0]
            result, tier = self._find(key)
            if result is LookupResult.RETRY:
                break
            if tier is not None or result is LookupResult.MISS:
                self._count_lookup(tier)
            if tier is not None:
                row = self.manager.prepare_store(key)
                if row is None:
                    self.stats.add("kv_offload_allocation_failure", 1)
                    result = LookupResult.MISS
                else:
                    rows[key] = row
                    found[tier].append(key)
                    promotion.pending.add(key)
            elif result is LookupResult.HIT:
                self.manager.prepare_load([key])
                promotion.held[key] = "host"
            if result is LookupResult.MISS:
                promotion.unknown.clear()
            else:
                promotion.unknown.popleft()
        for tier, keys in found.items():
            self._submit(tier, True, keys, [rows[key] for key in keys], seq_id)

    def _find(self, key: OffloadKey) -> tuple[LookupResult, SecondaryTierManager | None]:
        """HIT (and the tier, if it is below), MISS, or RETRY."""
        result = self.manager.lookup(key)
        if result is not LookupResult.MISS:
            return (LookupResult.RETRY if result is LookupResult.HIT_PENDING else result), None
        for tier in self.tiers:
            result = tier.lookup(self.digests.get(key))
            if result is LookupResult.HIT:
                return result, tier
            if result is not LookupResult.MISS:
                return LookupResult.RETRY, None
        return LookupResult.MISS, None

    def _count_lookup(self, found_in: SecondaryTierManager | None) -> None:
        """A block is in this tier, or in none: this one and those above it were asked."""
        for tier in self.tiers:
            self.stats.add("kv_offload_tiering_chunk_queries", 1, tier.tier_type)
            if tier is found_in:
                self.stats.add("kv_offload_tiering_chunk_hits", 1, tier.tier_type)
                return

    def release(self, seq_id: int) -> dict[OffloadKey, str]:
        """The sequence is admitted, or has ended: its rows are held no longer. Returns where its
        blocks came from, as far as that is known."""
        promotion = self.promotions.pop(seq_id, None)
        if promotion is None:
            return {}
        self.manager.complete_load(promotion.held)
        return promotion.held

    # -- both --

    def _submit(
        self,
        tier: SecondaryTierManager,
        is_load: bool,
        keys: list[OffloadKey],
        rows: list[int],
        seq_id: int | None,
    ) -> None:
        self._num_jobs += 1
        by_digest = {self.digests.get(key): key for key in keys}
        self.jobs[self._num_jobs] = Job(tier, by_digest, is_load, seq_id)
        submit = tier.submit_load if is_load else tier.submit_store
        submit(TransferJob(self._num_jobs, tuple(by_digest), tuple(rows), seq_id))

    def poll(self) -> None:
        """Take note of the transfers that have ended."""
        for tier in self.tiers:
            for result in tier.get_finished_jobs():
                job = self.jobs.pop(result.job_id)
                self._count(job, result)
                if not job.is_load:
                    self.manager.complete_load(job.keys.values())
                    continue
                good = [job.keys[digest] for digest in result.successful_keys]
                bad = [key for key in job.keys.values() if key not in good]
                self.manager.complete_store(good)
                self.manager.complete_store(bad, success=False)
                promotion = self.promotions.get(job.seq_id) if job.seq_id is not None else None
                if promotion is not None:  # perhaps a later one, which has asked for other blocks
                    good = [key for key in good if key in promotion.pending]
                    promotion.pending.difference_update(job.keys.values())
                    self.manager.prepare_load(good)
                    promotion.held |= dict.fromkeys(good, tier.cache_hit_source)

    def _count(self, job: Job, result: JobResult) -> None:
        way, failure = ("read", "promotion") if job.is_load else ("write", "cascade")
        kind, add = job.tier.tier_type, self.stats.add
        add(f"kv_offload_tiering_{way}_bytes", result.transfer_bytes, kind)
        add(f"kv_offload_tiering_{way}_time", result.transfer_time, kind)
        is_whole = len(result.successful_keys) == len(job.keys)
        add(f"kv_offload_tiering_{failure}_job_failures", not is_whole, kind)

    def count_transfers(self) -> Counter[OffloadKey]:
        """How many transfers use each block's row."""
        used: Counter[OffloadKey] = Counter()
        for job in self.jobs.values():
            used.update(job.keys.values())
        for promotion in self.promotions.values():
            used.update(promotion.held.keys())
        return used

    def close(self) -> None:
        """Wait for what is on its way down, for CLOSE_TIMEOUT at most, then end the tiers."""
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for tier in self.tiers:
            tier.drain_jobs(max(0.0, deadline - time.monotonic()))
            tier.shutdown()
