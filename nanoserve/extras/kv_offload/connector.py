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

*Tiers below* (a disk, a peer) have blocks that are not in rows. A waiting sequence then has a gate
(V1's status WAITING_FOR_REMOTE_KVS): threads read the blocks into rows first, and the sequence
holds no KV blocks meanwhile. What cannot be read is computed. Blocks go down as soon as a step has
computed them (`saves`), and not only when they are evicted: so they outlive a process.

What this is not: attention over more than fits the device. Swap (preemption_mode) is for sequences
that are preempted, offloading for prefixes that nobody uses just now.

vLLM: vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py,
vllm/v1/kv_offload/tiering/manager.py (V1).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import TYPE_CHECKING

from nanoserve.block_manager import BlockHash
from nanoserve.exceptions import brief
from nanoserve.extras.kv_offload.base import (
    KVConnectorBase,
    KVConnectorMetadata,
    KVConnectorWorker,
    LookupResult,
    OffloadKey,
)
from nanoserve.extras.kv_offload.config import (
    CONNECTORS,
    KVTransferConfig,
    OffloadingConfig,
    load_class,
)
from nanoserve.extras.kv_offload.manager import CPUOffloadingManager
from nanoserve.sequence import BlockPair, SchedulerOutput, Sequence

if TYPE_CHECKING:
    from nanoserve.engine import LLMEngine


def connect(engine: LLMEngine) -> None:
    """Give the engine's scheduler its connector. Raises ValueError if the engine's own classes have
    no place for one."""
    worker = getattr(engine.executor, "kv_connector", None)
    for what, seam in (("scheduler_cls", engine.scheduler), ("executor_cls", engine.executor)):
        has_seam = hasattr(seam, "connector") or (seam is engine.executor and worker)
        if not has_seam:
            raise ValueError(
                f"kv_offloading_size or kv_transfer_config is set, and {what} "
                f"{brief(type(seam).__name__)} cannot copy blocks to another tier. Leave one out."
            )
    transfer = engine.config.kv_transfer_config or KVTransferConfig()
    name = transfer.kv_connector or "OffloadingConnector"
    cls = load_class(CONNECTORS, "kv_transfer_config", name)
    engine.scheduler.connector = cls(engine, worker)


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
        self.scheduler, self.block_manager = engine.scheduler, engine.block_manager
        self.worker = worker
        self.manager = CPUOffloadingManager(worker.num_blocks, self.config.eviction_policy)
        self.next_step = Transfers(1)  # of the step that is being decided
        self.unread: deque[Transfers] = deque()  # steps whose copies may not be made yet
        self._num_read = 0  # the number of the last step that was read
        self._matched: tuple[OffloadKey, ...] = ()  # the last answer: not evicted now
        self._bind()

    def _bind(self) -> None:
        """Hear of evictions."""
        self.block_manager.pool.on_evict = self.store_evicted

    # -- sequences --

    def on_new_request(self, seq: Sequence) -> None:
        """No tiers below: nothing to wait for."""

    def get_num_new_matched_tokens(self, seq: Sequence, num_computed_tokens: int) -> int:
        size, self._matched = self.block_manager.block_size, ()
        if seq.sampling_params.skip_reading_prefix_cache:
            return 0
        # The block manager has just looked for these hashes; the last token is computed.
        hashes = seq.block_hashes[num_computed_tokens // size : (seq.num_tokens - 1) // size]
        self._matched = tuple(takewhile(self.is_loadable, hashes))
        return len(self._matched) * size

    def update_state_after_alloc(
        self, seq: Sequence, block_ids: list[int], num_external_tokens: int
    ) -> None:
        keys, self._matched = self._matched, ()
        assert len(keys) == len(block_ids), "not the blocks of the last answer"
        rows = self.manager.prepare_load(keys)
        pairs = zip(rows, block_ids, strict=True)
        self.next_step.loads += zip(keys, pairs, strict=True)
        num_found = (seq.num_computed_tokens + num_external_tokens) // self.block_manager.block_size
        self.manager.touch(seq.block_hashes[:num_found])

    def request_finished(self, seq: Sequence, block_ids: Seq[int]) -> None:
        """Nothing: its blocks stay in the prefix cache, and are stored when they leave it."""

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
            row = self.manager.prepare_store(block_hash, protected=self._matched)
            if row is not None:
                self.next_step.stores[block_hash] = (block_id, row)

    # -- steps --

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        step = self.next_step
        if not step:
            return None
        self.unread.append(step)
        self.next_step = Transfers(step.number + 1)
        return step.as_metadata()

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
            self.manager.complete_load(key for key, _ in step.loads)
            self.manager.complete_store([*step.stores, *step.saves])

    def reset(self) -> None:
        steps = [*self.unread, self.next_step]
        for step in steps:
            self.manager.complete_load(key for key, _ in step.loads)
        for step in steps:
            self.manager.complete_store([*step.stores, *step.saves], success=False)
        self.unread.clear()
        self.next_step = Transfers(self.next_step.number + 1)
        self._matched = ()
        self._bind()

    def reset_cache(self) -> None:
        self.manager.reset_cache()

    def check(self) -> None:
        used: Counter[OffloadKey] = Counter()
        for step in (*self.unread, self.next_step):
            used.update([*step.stores, *step.saves, *(key for key, _ in step.loads)])
        self.manager.check(used)
        on_evict: Callable[..., object] | None = self.block_manager.pool.on_evict
        assert on_evict == self.store_evicted, "nobody hears of evictions"

    def close(self) -> None:
        """Nothing is below the CPU tier, whose memory goes with the executor."""
