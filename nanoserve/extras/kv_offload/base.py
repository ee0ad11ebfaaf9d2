"""What do the parts of this chapter promise each other?

    core (scheduler) ---> KVConnectorBase        what can be loaded; which copies a step makes
    core (runner)    ---> KVConnectorWorker      makes these copies, on every rank
    KVConnectorBase  ---> OffloadingManager      which blocks are in the CPU tier, and where
    KVConnectorBase  ---> SecondaryTierManager   a tier below it: a folder, another engine

A block of the CPU tier is a *row* of bytes: the keys and values of block_size tokens, in all layers
and on all ranks. Only a step's copies go between KV blocks and rows. A tier below only moves bytes
between a row and itself, in threads of its own: no step waits for it.

        KV block  <--- copies of a step --->  row of the CPU tier  <--- threads --->  file, peer

Left out: one process of a tier for each rank. Ranks of one machine share the memory of the rows, so
that rank 0 moves the bytes of all (with ranks on several machines there are no tiers below).

vLLM: vllm/distributed/kv_transfer/kv_connector/v1/base.py, vllm/v1/kv_offload/base.py,
vllm/v1/kv_offload/tiering/base.py (V1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from nanoserve.block_manager import BlockHash
from nanoserve.sequence import BlockPair, SchedulerOutput, Sequence

if TYPE_CHECKING:
    import numpy as np

OffloadKey = BlockHash  # of a block in the CPU tier: the block manager's own, interned
Digest = bytes  # of a block below it: SHA-256, the same in every process (digests.py)


class KVConnectorMetadata(NamedTuple):
    """What a step copies between KV blocks and rows: from the connector to every rank's worker."""

    number: int  # of the step, among those that copy something: 1, 2, ...
    stores: tuple[BlockPair, ...] = ()  # (KV block, row): before anything overwrites the KV block
    loads: tuple[BlockPair, ...] = ()  # (row, KV block): before the step reads them
    saves: tuple[BlockPair, ...] = ()  # (KV block, row): after the step has computed them


class KVConnectorBase(ABC):
    """The scheduler's side of a connector (vLLM: KVConnectorBase_V1). Only the thread that runs
    steps calls it."""

    @abstractmethod
    def attach(self, seq: Sequence, params: Any) -> None:
        """A request is about to be added; `params`: its kv_transfer_params, or None. Raises
        ValueError or TypeError if they are not allowed. Any thread may call this, and may wait for
        a disk."""

    @abstractmethod
    def on_new_request(self, seq: Sequence) -> None:
        """A sequence was queued."""

    @abstractmethod
    def is_ready(self, seq: Sequence) -> bool:
        """Asked before a waiting sequence is admitted: is all there that it can get? False: it is
        on its way, and the sequence is passed over (V1's status WAITING_FOR_REMOTE_KVS)."""

    @abstractmethod
    def is_loading(self, seq: Sequence) -> bool:
        """Was False the last answer of `is_ready`? Any thread may ask."""

    @abstractmethod
    def get_num_new_matched_tokens(self, seq: Sequence, num_computed_tokens: int) -> int:
        """How many tokens of `seq` behind the `num_computed_tokens` that the prefix cache has can
        be loaded now. A multiple of block_size; the last token is never loaded.

        (vLLM's may also answer None, to be asked again, and says whether the load is asynchronous.
        Here `is_ready` comes before, and a step makes its own loads.)
        """

    @abstractmethod
    def update_state_after_alloc(
        self, seq: Sequence, block_ids: list[int], num_external_tokens: int
    ) -> None:
        """`seq` is admitted with the prefix cache's blocks, and with `block_ids` for the tokens of
        the last answer: the step that is being decided loads them."""

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata | None:
        """The copies of this step; None if there are none."""

    @abstractmethod
    def update_connector_output(self, metadata: KVConnectorMetadata | None) -> None:
        """A step was read, so its copies are made. Steps are read in their order."""

    @abstractmethod
    def request_finished(self, seq: Sequence, block_ids: Seq[int]) -> None:
        """`seq` has ended, and gives back its KV blocks (none, if it was waiting or swapped). May
        set seq.kv_transfer_params, which its request hands out. (vLLM's may keep the KV blocks
        until they are sent. Here rows are sent, and kept until then.)"""

    @abstractmethod
    def reset(self) -> None:
        """A step failed, and the block manager has forgotten all. Forget the copies of all steps
        that were not read."""

    @abstractmethod
    def reset_cache(self) -> bool:
        """Empty the prefix cache and the CPU tier, except for what a transfer uses. False, and no
        change, while a sequence holds blocks."""

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError unless the connector's records agree with each other."""

    @abstractmethod
    def close(self) -> None:
        """The engine is closed: let the tiers below end what they write, and release them."""


class KVConnectorWorker(ABC):
    """A rank's side of a connector: makes the copies of the steps. The runner calls it in each step
    that has KVConnectorMetadata."""

    num_blocks: int  # rows
    row_bytes: int  # of all ranks
    # [num_blocks, bytes] uint8: all ranks' rows, in rank 0's process. None: not all are here.
    rows: np.ndarray | None

    @abstractmethod
    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Before the step computes: its stores, then its loads. (A GPU is only asked to.)"""

    @abstractmethod
    def wait_for_save(self) -> None:
        """After the step has computed, and a drafter has read its tokens: its saves. Whoever has
        the step's tokens has these, too, on this rank (a drafter's on a GPU: soon, see num_done).
        """

    @abstractmethod
    def num_done(self) -> int:
        """The number of the last step whose copies are made on all ranks."""


class LookupResult(Enum):
    """Is a block in a tier?"""

    MISS = "miss"
    HIT = "hit"
    HIT_PENDING = "pending"  # it is on its way there: a transfer has not ended
    RETRY = "retry"  # not known yet (a thread looks): ask again


class OffloadingManager(ABC):
    """The records of the CPU tier: which block is in which row. Invariant: a row that a transfer
    uses (between prepare_* and complete_*) keeps its block."""

    @abstractmethod
    def lookup(self, key: OffloadKey) -> LookupResult:
        """Is the block here, and whole?"""

    @abstractmethod
    def touch(self, keys: Iterable[OffloadKey]) -> None:
        """A request uses these blocks, of one prefix, first block first: evict them later."""

    @abstractmethod
    def prepare_load(self, keys: Iterable[OffloadKey]) -> list[int]:
        """The rows of these blocks, which must be here; none is evicted until complete_load."""

    @abstractmethod
    def complete_load(self, keys: Iterable[OffloadKey]) -> None:
        """The rows have been read."""

    @abstractmethod
    def prepare_store(self, key: OffloadKey) -> int | None:
        """A row to write a block into that is not here: a free one, or that of an evicted block.
        None if there is none. Pending until complete_store."""

    @abstractmethod
    def complete_store(self, keys: Iterable[OffloadKey], success: bool = True) -> None:
        """The rows have been written, or (success False) their content is not known: forget it."""


class TransferJob(NamedTuple):
    """Blocks that a tier below writes from rows, or reads into them."""

    job_id: int
    keys: tuple[Digest, ...]
    block_ids: tuple[int, ...]  # their rows
    seq_id: int | None = None  # for whom; None: blocks of any sequences


class JobResult(NamedTuple):
    """A job has ended: whole, in part, or not at all."""

    job_id: int
    successful_keys: Collection[Digest]  # what is in the tier (after a store), or in its row
    transfer_bytes: int = 0
    transfer_time: float = 0.0  # seconds


class PrimaryTier(NamedTuple):
    """What a tier below gets to know of the CPU tier."""

    rows: np.ndarray  # [num_blocks, bytes] uint8; rows[i] is contiguous, and a buffer
    # What must be equal in two engines so that a row of one means the same in the other: model,
    # dtype, block size, layers, ranks. Strings and numbers only.
    identity: Mapping[str, Any]
    kv_role: str = "kv_both"


class SecondaryTierManager(ABC):
    """A tier below the CPU tier. The constructor gets (primary: PrimaryTier, **options): what
    secondary_tiers says, without "type". It raises what read_options raises.

    The thread that runs steps calls all methods: none may wait for a disk or a network (but
    shutdown). The rows of a job belong to the tier from submit_* until get_finished_jobs names it.
    Each job is named once, whatever happens: an error is a job without successful keys.
    """

    tier_type: ClassVar[str]  # "fs", say: the label of its metrics
    cache_hit_source: ClassVar[str] = "disk"  # or "p2p": what requests find there is counted so

    @classmethod
    def read_options(cls, options: Mapping[str, Any]) -> Any:
        """Check the options. Of this chapter's own types they are checked before a model is loaded,
        too. Raises ValueError or TypeError."""
        return options

    @abstractmethod
    def lookup(self, key: Digest) -> LookupResult:
        """MISS, HIT or RETRY. (It may be gone when it is loaded: that is no error.)"""

    @abstractmethod
    def submit_store(self, job: TransferJob) -> None:
        """Begin to write these rows. Blocks that are in the tier already need no writing."""

    @abstractmethod
    def submit_load(self, job: TransferJob) -> None:
        """Begin to read these blocks into their rows."""

    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that have ended since the last call."""

    def touch(self, keys: Iterable[Digest]) -> None:
        """A request uses these blocks, first block first."""
        return

    def attach(self, seq: Sequence, params: Mapping[str, Any]) -> bool:
        """A request is about to be added whose kv_transfer_params are `params`. It may get a gate.
        False if they say nothing to this tier; raises ValueError if they are not allowed. Any
        thread may call this."""
        return False

    def on_new_request(self, seq: Sequence) -> None:
        """A sequence was queued."""
        return

    def wants(self, seq: Sequence) -> bool:
        """Should the blocks of `seq` go down as soon as they are computed?"""
        return True

    def request_finished(self, seq: Sequence) -> bool:
        """`seq` has ended. May set seq.kv_transfer_params. True (vLLM's delay_free): a submit_store
        with its seq_id follows now, of its first blocks, as far as they have a row (perhaps none);
        the rows keep them until that job has ended."""
        return False

    @abstractmethod
    def drain_jobs(self, timeout: float) -> None:
        """Wait until every job has ended, at most `timeout` seconds."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the threads. Nothing reads or writes a row any more when this returns."""
