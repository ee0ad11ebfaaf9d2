"""Which blocks leave the KV cache, and which come back?

The OffloadingConnector is the scheduler's side of the tiers. The CPU tier holds blocks that the
prefix cache has evicted, under the same interned hashes. With 4 KV blocks and 4 rows:

    step   what happens                     KV blocks      rows       copies of the step
    1      A needs 3 blocks                 a0 a1 a2 .                -
    2      A has ended; B needs 3           a0 b0 b1 b2    a2 a1      stores: a2, a1 (its end first)
    3      A comes again: a0 is there       a0 a1 a2 .     a2 a1 ...  loads: a1, a2; stores: b's

So a sequence is admitted with what the prefix cache has, then with what the rows have; the rest is
computed. It gets KV blocks and runs in the same step, whose head copies the rows: nobody waits.

*What is in a row, and when?* A store counts at once, for copies are made in the order of the steps.
If a step fails, the stores of all steps that were not read are forgotten. A row that a step in
flight reads or writes keeps its block until this step is read.

*Tiers below* (a disk, a peer) have blocks that are not in rows. Before a sequence that wants some
is admitted, threads read them into rows (tiering.py). Blocks go down as soon as a step has computed
them (`saves`), and not only when they are evicted: so they outlive a process.

What this is not: attention over more than fits the device. Swap (preemption_mode) is for sequences
that are preempted, offloading for prefixes that nobody uses just now.

vLLM: vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
vllm/v1/kv_offload/tiering/manager.py (V1).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve import __version__
from nanoserve.block_manager import BlockHash
from nanoserve.config import find_folder
from nanoserve.exceptions import brief
from nanoserve.extras.kv_offload.base import (
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorWorker,
    LookupResult,
    OffloadKey,
    PrimaryTier,
    SecondaryTierManager,
)
from nanoserve.extras.kv_offload.config import OffloadingConfig, load_tier
from nanoserve.extras.kv_offload.digests import BlockDigests, describe_files
from nanoserve.extras.kv_offload.manager import CPUOffloadingManager
from nanoserve.extras.kv_offload.tiering import TieringOffloadingManager
from nanoserve.inputs import refuse_transfer
from nanoserve.sequence import BlockPair, SchedulerOutput, Sequence

if TYPE_CHECKING:
    from nanoserve.engine import LLMEngine

RANK_TIMEOUT = 1.0  # seconds that other ranks get for a step's copies


def connect(engine: LLMEngine) -> None:
    """Give the engine and its scheduler their connector. Raises ValueError if a class of the user's
    has no place for one."""
    worker: Any = getattr(engine.executor, "kv_connector", None)
    pool = getattr(engine.block_manager, "pool", None)
    has_seams = {
        "scheduler_cls": hasattr(engine.scheduler, "connector"),
        "block_manager_cls": hasattr(pool, "on_evict"),
        "executor_cls": worker is not None,
    }
    if missing := [name for name, has_seam in has_seams.items() if not has_seam]:
        raise ValueError(
            f"kv_offloading_size (or kv_transfer_config) is set, and {missing[0]} is a class of "
            "yours that cannot copy blocks to another tier. Leave one of the two out."
        )
    engine.kv_connector = engine.scheduler.connector = OffloadingConnector(engine, worker)


class Transfers:
    """What one step copies."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.stores: dict[OffloadKey, BlockPair] = {}
        self.loads: list[tuple[OffloadKey, BlockPair]] = []
        self.saves: dict[OffloadKey, BlockPair] = {}

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads or self.saves)

    def as_metadata(self) -> KVConnectorMetadata:
        loads = tuple(pair for _, pair in self.loads)
        stores, saves = tuple(self.stores.values()), tuple(self.saves.values())
        return KVConnectorMetadata(self.number, stores, loads, saves)


class OffloadingConnector(KVConnectorBase):
    """The tiers of one engine. Invariant: `check()` passes between any two calls; when no sequence
    is left and all steps are read, no transfer uses a row."""

    def __init__(self, engine: LLMEngine, worker: KVConnectorWorker) -> None:
        self.config = OffloadingConfig.from_config(engine.config)
        self.engine, self.scheduler = engine, engine.scheduler
        self.block_manager = engine.block_manager
        self.worker = worker
        self.manager = CPUOffloadingManager(worker.num_blocks, self.config.eviction_policy)
        self.digests = BlockDigests()
        self.tiers = TieringOffloadingManager(self.manager, make_tiers(engine, self), self.digests)
        self.stats = self.tiers.stats
        self.next_step = Transfers(1)  # of the step that is being decided
        self.unread: deque[Transfers] = deque()  # steps whose copies may not be made yet
        self._num_read = 0  # the number of the last step that was read
        self._num_saved: dict[int, int] = {}  # seq_id -> its first blocks that were looked at
        self._matched: dict[OffloadKey, int] = {}  # the last answer, and the rows, which are kept
        self._bind()

    def _bind(self) -> None:
        """Hear of evictions."""
        self.block_manager.pool.on_evict = self.store_evicted

    # -- sequences --

    def attach(self, seq: Sequence, params: Any) -> None:
        if self.tiers.tiers:
            self.digests.note_adapter(seq)
        if params is None:
            return
        if not isinstance(params, Mapping):
            raise TypeError(f"kv_transfer_params must be a dict, got {brief(params)}.")
        if not any(tier.attach(seq, params) for tier in self.tiers.tiers):
            raise refuse_transfer(params)

    def on_new_request(self, seq: Sequence) -> None:
        for tier in self.tiers.tiers:
            tier.on_new_request(seq)

    def is_ready(self, seq: Sequence) -> bool:
        if not self.tiers.tiers or self.engine._search.is_on:
            return True  # a search for the cause of a failed step skips who is not ready
        return self.tiers.is_ready(seq, lambda: self._keys_behind_prefix_cache(seq))

    def is_loading(self, seq: Sequence) -> bool:
        return self.tiers.is_loading(seq)

    def _keys_behind_prefix_cache(self, seq: Sequence) -> list[OffloadKey]:
        if seq.sampling_params.skip_reading_prefix_cache:
            return []
        num_cached = len(self.block_manager.get_cached_blocks(seq))
        return self._keys(seq, num_cached)

    def _keys(self, seq: Sequence, start: int) -> list[OffloadKey]:
        """The hashes of its full blocks from `start` on, without the one that has the last token.
        get_cached_blocks has just computed them."""
        return seq.block_hashes[start : (seq.num_tokens - 1) // self.block_manager.block_size]

    def get_num_new_matched_tokens(self, seq: Sequence, num_computed_tokens: int) -> int:
        self._drop_match()
        if seq.sampling_params.skip_reading_prefix_cache:
            return 0
        size = self.block_manager.block_size
        keys = self._keys(seq, num_computed_tokens // size)
        keys = list(takewhile(self.is_loadable, keys))
        self._matched = dict(zip(keys, self.manager.prepare_load(keys), strict=True))
        return len(keys) * size

    def _drop_match(self) -> None:
        """The sequence of the last answer was not admitted."""
        self.manager.complete_load(self._matched)
        self._matched = {}

    def update_state_after_alloc(
        self, seq: Sequence, block_ids: list[int], num_external_tokens: int
    ) -> None:
        keys, self._matched = self._matched, {}
        pairs = zip(keys.values(), block_ids, strict=True)
        self.next_step.loads += zip(keys, pairs, strict=True)
        num_found = (seq.num_computed_tokens + num_external_tokens) // self.block_manager.block_size
        used = seq.block_hashes[:num_found]
        self.manager.touch(used)
        for tier in self.tiers.tiers:
            tier.touch([self.digests.get(key) for key in used])
        sources = self.tiers.release(seq.seq_id)
        if seq.metrics.scheduled_ts is None:  # its first admission
            self._count_hits(seq, num_external_tokens, [sources.get(key, "host") for key in keys])

    def _count_hits(self, seq: Sequence, num_external_tokens: int, sources: list[str]) -> None:
        """What a request has found outside of the device; `sources`: of each block."""
        seq.num_external_computed_tokens = num_external_tokens
        if not seq.sampling_params.skip_reading_prefix_cache:
            num_queried = seq.num_tokens - seq.num_computed_tokens
            self.stats.add("external_prefix_cache_queries", num_queried)
            self.stats.add("external_prefix_cache_hits", num_external_tokens)
        for source in sources:
            size = self.block_manager.block_size
            self.stats.add("prompt_tokens_cached_by_source", size, source)

    def request_finished(self, seq: Sequence, block_ids: Seq[int]) -> None:
        self._drop_match()
        self.tiers.release(seq.seq_id)
        self._num_saved.pop(seq.seq_id, None)
        for tier in self.tiers.tiers:
            if tier.request_finished(seq):
                self._wait_for_ranks()
                keys = seq.block_hashes[: len(block_ids)]
                held = takewhile(lambda key: self.manager.lookup(key) is LookupResult.HIT, keys)
                self.tiers.store(tier, list(held), seq.seq_id)

    def _wait_for_ranks(self) -> None:
        """Until all ranks have made the copies of the last step that was read: then its rows may go
        to another engine. (Rank 0 has its tokens, so the others are about to.)"""
        deadline = time.monotonic() + RANK_TIMEOUT
        while (
            self.unread and self.unread[0].number <= self._num_read and time.monotonic() < deadline
        ):
            time.sleep(0.0001)
            self.poll()

    def is_loadable(self, key: OffloadKey) -> bool:
        """Is the block in a row, or will a step have put it there before the next one?"""
        found = self.manager.lookup(key)
        if found is not LookupResult.HIT_PENDING:
            return found is LookupResult.HIT
        steps = (self.next_step, *self.unread)
        return any(key in step.stores or key in step.saves for step in steps)

    def store_evicted(self, block_id: int, block_hash: BlockHash) -> None:
        """The prefix cache evicts a block (BlockPool.on_evict): keep it, if there is a row."""
        if self.manager.lookup(block_hash) is LookupResult.MISS:
            row = self.manager.prepare_store(block_hash)
            if row is None:
                self.stats.add("kv_offload_allocation_failure", 1)
            else:
                self.next_step.stores[block_hash] = (block_id, row)

    # -- steps --

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        step = self.next_step
        for item in scheduler_output.scheduled if self.tiers.tiers else ():
            seq = self.scheduler.sequences[item.seq_id]
            if any(tier.wants(seq) for tier in self.tiers.tiers):
                self._save(seq)
        if not step:
            return None
        self.unread.append(step)
        self.next_step = Transfers(step.number + 1)
        return step.as_metadata()

    def _save(self, seq: Sequence) -> None:
        """Put the blocks that are new since the last step, and whole after this one, into rows."""
        start = self._num_saved.get(seq.seq_id, 0)
        cached_blocks = self.block_manager.pool.cached_blocks
        for key in seq.block_hashes[start:]:
            block_id = cached_blocks.get(key)
            if block_id is None:
                break
            start += 1
            if self.manager.lookup(key) is LookupResult.MISS:
                row = self.manager.prepare_store(key)
                if row is None:
                    self.stats.add("kv_offload_allocation_failure", 1)
                else:
                    self.next_step.saves[key] = (block_id, row)
        self._num_saved[seq.seq_id] = start

    def update_connector_output(self, metadata: KVConnectorMetadata | None) -> None:
        self.manager.end_quarantine()  # this step came after all that failed
        if metadata is not None:
            self._num_read = metadata.number
        self.poll()

    def poll(self) -> None:
        """Take note of what has ended. (Other ranks may be behind with the last step's saves.)"""
        num_done = min(self._num_read, self.worker.num_done()) if self.unread else 0
        while self.unread and self.unread[0].number <= num_done:
            step = self.unread.popleft()
            stored = [*step.stores, *step.saves]
            self.manager.complete_load(key for key, _ in step.loads)
            self.manager.complete_store(stored)
            self.tiers.cascade(stored)
            self.stats.add("kv_offload_load_bytes", len(step.loads) * self.worker.row_bytes)
            self.stats.add("kv_offload_store_bytes", len(stored) * self.worker.row_bytes)
        self.tiers.poll()

    def reset(self) -> None:
        self._drop_match()
        steps = [*self.unread, self.next_step]
        for step in steps:
            self.manager.complete_load(key for key, _ in step.loads)
        for step in steps:
            self.manager.complete_store([*step.stores, *step.saves], success=False)
        self.unread.clear()
        self.next_step = Transfers(self.next_step.number + 1)
        self._num_saved.clear()
        self._bind()

    def reset_cache(self) -> bool:
        if not self.block_manager.reset_prefix_cache():
            return False
        self.manager.reset_cache()
        return True

    def check(self) -> None:
        used = self.tiers.count_transfers()
        used.update(self._matched.keys())
        for step in (*self.unread, self.next_step):
            used.update([*step.stores, *step.saves, *(key for key, _ in step.loads)])
        self.manager.check(used)
        on_evict: Callable[..., object] | None = self.block_manager.pool.on_evict
        assert on_evict == self.store_evicted, "nobody hears of evictions"

    def close(self) -> None:
        self.poll()
        self.tiers.close()
        self.tiers.tiers.clear()  # they and the worker keep the rows in memory
        del self.worker


def make_tiers(engine: LLMEngine, connector: OffloadingConnector) -> list[SecondaryTierManager]:
    """The tiers below the CPU tier. Raises ValueError if they cannot be here."""
    wanted = connector.config.secondary_tiers
    rows = connector.worker.rows
    if not wanted:
        return []
    if rows is None:
        raise ValueError(
            "secondary_tiers need all ranks in memory that they share: on one machine, with Linux. "
            "Leave secondary_tiers out, or set tensor_parallel_size=1."
        )
    identity = describe_rows(engine, connector.worker.row_bytes)
    primary = PrimaryTier(rows, identity, connector.config.kv_role)
    tiers = []
    for each in wanted:
        options = dict(each)
        cls = load_tier(options.pop("type"), options.pop("module_path", None))
        tiers.append(cls(primary, **options))
    return tiers


def describe_rows(engine: LLMEngine, row_bytes: int) -> dict[str, str | int]:
    """What must be equal in two engines so that a row means the same (PrimaryTier.identity)."""
    config, model = engine.config, engine.model_config
    rope_length = config.max_model_len or 0  # some kinds of RoPE depend on it
    is_dummy = config.load_format == "dummy"
    drafter = getattr(config.speculative_config, "model", None)  # it has a KV cache, too
    draft_folder = find_folder(drafter) if drafter else None
    return {
        "nanoserve": __version__,
        "model_name": Path(config.model or model.path).name,
        "model": describe_files(model.path),
        "weights": f"dummy {config.seed}" if is_dummy else "of its files",
        "dtype": config.dtype if config.dtype != "auto" else f"auto on {config.device}",
        "kv_cache_dtype": config.kv_cache_dtype,
        "quantization": str(config.quantization),
        "speculative_config": str(config.speculative_config),
        "drafter": describe_files(draft_folder) if draft_folder else "",
        "max_model_len": rope_length,
        "block_size": config.block_size,
        "tensor_parallel_size": config.tensor_parallel_size,
        "row_bytes": row_bytes,
    }
