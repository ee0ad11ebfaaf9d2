"""How does one engine compute a prompt, and another one the answer?

*Disaggregated prefill*: long prompts make steps long, and everybody who gets tokens meanwhile waits
for them. So one engine (the producer) computes prompts, and another one (the consumer) goes on from
their keys and values. The peer is a tier below the CPU tier, as a disk is:

    producer   KV block --- a step's saves ---> row             row --- transport.py ---+
    consumer   KV block <-- a step's loads ---- row  <----------------------------------+

    producer   {"kv_connector": "OffloadingConnector", "kv_role": "kv_producer",
                "kv_connector_extra_config": {"cpu_bytes_to_use": 4_000_000_000,
                    "secondary_tiers": [{"type": "p2p", "port": 5710}]}}
    consumer   the same with "kv_role": "kv_consumer"

What happens is decided request by request, in kv_transfer_params (a field of the server's requests,
or SamplingParams.extra_args["kv_transfer_params"]), under vLLM's names:

    1  to the producer: max_tokens 1, {"remote_decoder": {"kv_request_id": "7"}}
    2  its output's kv_transfer_params: {"remote_prefiller": {"kv_request_id": "7",
                                         "remote_host": "localhost", "remote_port": 5710}}
    3  to the consumer: the same prompt, with what came in 2

The producer holds the rows of step 1, until the consumer has them, or for unbound_store_timeout_s.
In step 3 the sequence waits behind a gate (V1's WAITING_FOR_REMOTE_KVS) and holds no KV blocks: it
asks which blocks are held under this id, then they are read into rows. It computes what is left of
the prompt, at least its last token. proxy.py does all this for clients that know nothing of it.

*Who dies, harms no request.* What does not come from the producer (it was killed, it hangs, it has
dropped the rows) is computed by the consumer. If the consumer dies, the producer frees the rows
after unbound_store_timeout_s. Only an engine whose rows mean something else (another model, dtype,
block size, number of ranks) is an error: a request that names it ends with a ValueError.

    host, port                 where the producer listens: a port of this machine, which is a Unix
                               socket in socket_dir, so that nobody else's process can ask
    unbound_store_timeout_s    seconds that rows are held
    socket_dir                 (ours) a folder of this user; all engines' must be the same

Left out: engines on several machines, blocks that go before the prompt is computed, and asking any
engine for any prefix (vLLM's remote_kv_source).

vLLM: vllm/v1/kv_offload/tiering/p2p/manager.py P2PSecondaryTierManager (V1).
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from nanoserve.config import ABOVE_ZERO, check_number
from nanoserve.distributed.process import in_this_process
from nanoserve.exceptions import VLLMValidationError, brief
from nanoserve.extras.kv_offload.base import (
    Digest,
    JobResult,
    LookupResult,
    PrimaryTier,
    SecondaryTierManager,
    TransferJob,
)
from nanoserve.extras.kv_offload.config import drop_accepted
from nanoserve.extras.kv_offload.transport import (
    BROKEN,
    MAX_NAME,
    Reading,
    Source,
    Transport,
    describe_end,
    make_private,
)
from nanoserve.logger import init_logger, warning_once
from nanoserve.sequence import Sequence, SequenceStatus

logger = init_logger(__name__)

OPTIONS = ("host", "port", "unbound_store_timeout_s", "socket_dir")
# vLLM's other options, with the values that change nothing here.
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "backends": (None,),
    "num_threads": (),  # any
    "backpressure": (None,),
}
HOSTS = ("localhost", "127.0.0.1")
PORT = 5710
DECODER_KEYS = ("kv_request_id",)
PREFILLER_KEYS = ("kv_request_id", "remote_host", "remote_port")
COMPLETE = (SequenceStatus.FINISHED_STOPPED, SequenceStatus.FINISHED_LENGTH)


class P2PSecondaryTierManager(SecondaryTierManager):
    """Other engines of this machine as a tier below the CPU tier. Invariant: each job is named once
    by get_finished_jobs, and a row of a job is touched only before that."""

    tier_type: ClassVar[str] = "p2p"
    cache_hit_source: ClassVar[str] = "p2p"

    def __init__(self, primary: PrimaryTier, **options: Any) -> None:
        """Starts a thread; a producer listens. Raises ValueError or TypeError for a bad option, a
        folder that others may enter, or a port that is in use."""
        self.host, self.port, seconds, self.folder = self.read_options(options)
        self.role = primary.kv_role
        self._finished: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self.held = HeldBlocks(self._finished, seconds, primary.rows.shape[1])
        self._finishing: dict[int, str] = {}  # seq_id -> kv_request_id: a job for it comes
        self._asking: dict[int, RemotePrefill] = {}  # seq_id -> what it waits for
        self._offered: dict[Digest, Source] = {}  # what other engines hold for sequences here
        self._offers: dict[int, list[Digest]] = {}  # seq_id -> of these, those for this sequence
        make_private(self.folder)  # a consumer's, too: whoever owns it answers what it asks
        self._transport = Transport(primary.rows, primary.identity)
        self._end = weakref.finalize(self, in_this_process(self._transport.close))
        if self.role != "kv_consumer":
            try:
                self._transport.listen(self._path(self.port), self.held)
            except ValueError:
                self._end()
                raise

    @classmethod
    def read_options(cls, options: Mapping[str, Any]) -> tuple[str, int, float, Path]:
        """The values of OPTIONS, in this order."""
        options = drop_accepted("a tier of type 'p2p'", options, OPTIONS, ACCEPTED)
        if not hasattr(socket, "AF_UNIX"):
            raise ValueError("a tier of type 'p2p' needs Unix sockets: Linux or macOS.")
        address = check_address(options.get("host"), options.get("port"))
        seconds = options.get("unbound_store_timeout_s", 60.0)
        check_number("unbound_store_timeout_s", seconds, float, ABOVE_ZERO, 1e9, "more than 0")
        folder = options.get("socket_dir") or default_socket_dir()
        if not isinstance(folder, (str, Path)):
            raise TypeError(f"socket_dir must be a folder, got {brief(folder)}.")
        return *address, float(seconds), Path(folder).expanduser()

    def _path(self, port: int) -> Path:
        return self.folder / f"p2p-{port}.sock"

    # -- requests --

    def attach(self, seq: Sequence, params: Mapping[str, Any]) -> bool:
        decoder, prefiller = read_params(params)
        if decoder is not None and self.role == "kv_consumer":
            raise _error("remote_decoder", params, "this engine is a kv_consumer")
        if prefiller is not None:
            if self.role == "kv_producer":
                raise _error("remote_prefiller", params, "this engine is a kv_producer")
            source = Source(self._path(prefiller["remote_port"]), prefiller["kv_request_id"])
            seq.gates = (*seq.gates, RemotePrefill(self._transport, seq.seq_id, source))
        return True

    def on_new_request(self, seq: Sequence) -> None:
        for gate in seq.gates:
            if isinstance(gate, RemotePrefill) and gate.seq_id == seq.seq_id:
                self._asking[seq.seq_id] = gate

    def wants(self, seq: Sequence) -> bool:
        return kv_request_id(seq) is not None

    def request_finished(self, seq: Sequence) -> bool:
        self._asking.pop(seq.seq_id, None)
        for key in self._offers.pop(seq.seq_id, ()):
            self._offered.pop(key, None)
        name = kv_request_id(seq)
        if name is None or seq.branch or seq.status not in COMPLETE:
            return False
        where = {"remote_host": self.host, "remote_port": self.port}
        seq.kv_transfer_params = {"remote_prefiller": {"kv_request_id": name, **where}}
        self._finishing[seq.seq_id] = name
        return True

    # -- blocks --

    def lookup(self, key: Digest) -> LookupResult:
        return LookupResult.HIT if key in self._offered else LookupResult.MISS

    def submit_store(self, job: TransferJob) -> None:
        name = self._finishing.pop(job.seq_id, None) if job.seq_id is not None else None
        if name is None or not job.keys:
            self._finished.put(JobResult(job.job_id, job.keys))  # nobody comes for these
        else:
            self.held.hold(name, job)

    def submit_load(self, job: TransferJob) -> None:
        by_source: dict[Source, dict[Digest, int]] = {}
        for key, row in zip(job.keys, job.block_ids, strict=True):
            source = self._offered.pop(key)  # once: what fails is computed
            by_source.setdefault(source, {})[key] = row
        self.held.begin_load()
        self._transport.submit(self._load(job, by_source))

    async def _load(self, job: TransferJob, by_source: dict[Source, dict[Digest, int]]) -> None:
        """In the transport's thread."""
        start, good = time.perf_counter(), list[Digest]()
        try:
            await asyncio.gather(*(self._fetch(*item, good) for item in by_source.items()))
        finally:
            num_bytes = len(good) * self._transport.rows.shape[1]
            seconds = time.perf_counter() - start
            self._finished.put(JobResult(job.job_id, good, num_bytes, seconds))
            self.held.end_load()

    async def _fetch(self, source: Source, rows: dict[Digest, int], good: list[Digest]) -> None:
        try:
            await self._transport.fetch(source, rows, good)
        except Exception as error:
            warn(source, error)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        for seq_id, gate in [item for item in self._asking.items() if item[1].is_open()]:
            del self._asking[seq_id]
            self._offers[seq_id] = gate.answer or []
            self._offered.update(dict.fromkeys(self._offers[seq_id], gate.source))
        self.held.expire(time.monotonic())
        return [self._finished.get_nowait() for _ in range(self._finished.qsize())]

    def drain_jobs(self, timeout: float) -> None:
        """Rows that nobody reads just now are not held any longer."""
        self.held.expire()
        self.held.wait_idle(timeout)

    def shutdown(self) -> None:
        self._end()


class HeldBlocks:
    """The rows that are held for other engines. Any thread may call."""

    def __init__(
        self, finished: queue.SimpleQueue[JobResult], seconds: float, row_bytes: int
    ) -> None:
        """`finished`: gets the jobs whose rows are held no longer, `seconds` later at most."""
        self._finished, self._seconds, self._row_bytes = finished, seconds, row_bytes
        self._changed = threading.Condition()
        self._held: dict[str, list[Held]] = {}  # by kv_request_id: one for each of its prompts
        self._num_loads = 0

    def hold(self, name: str, job: TransferJob) -> None:
        rows = dict(zip(job.keys, job.block_ids, strict=True))
        with self._changed:
            deadline = time.monotonic() + self._seconds
            self._held.setdefault(name, []).append(Held(job.job_id, rows, deadline))

    @contextmanager
    def reading(self, name: str) -> Iterator[Reading]:
        with self._changed:
            held = [each for each in self._held.get(name, ()) if not each.is_over]
            for each in held:
                each.num_readers += 1
        reading = Reading({key: row for each in held for key, row in each.rows.items()})
        try:
            yield reading
        finally:
            with self._changed:
                for each in held:
                    each.num_readers -= 1
                    # A prompt's last block is no other's, however many have its first ones.
                    if reading.sent and reading.sent[-1] in each.rows:
                        each.is_over, each.sent = True, reading.sent
                self._release(name)

    def expire(self, now: float = float("inf")) -> None:
        """Hold what has been held long enough no longer."""
        with self._changed:
            for name in list(self._held):
                for each in self._held[name]:
                    each.is_over |= now >= each.deadline
                self._release(name)

    def _release(self, name: str) -> None:
        kept = []
        for each in self._held.pop(name, ()):
            if each.num_readers or not each.is_over:
                kept.append(each)
            else:
                keys = tuple(each.rows) if each.sent else ()
                num_bytes = len(each.sent) * self._row_bytes
                self._finished.put(JobResult(each.job_id, keys, num_bytes))
        if kept:
            self._held[name] = kept
        self._changed.notify_all()

    def begin_load(self) -> None:
        """The other direction: blocks are on their way here."""
        with self._changed:
            self._num_loads += 1

    def end_load(self) -> None:
        with self._changed:
            self._num_loads -= 1
            self._changed.notify_all()

    def wait_idle(self, timeout: float) -> bool:
        """Wait until no row is held, and none is on its way."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._held or self._num_loads), timeout)


class Held:
    """The rows of one finished sequence."""

    def __init__(self, job_id: int, rows: dict[Digest, int], deadline: float) -> None:
        self.job_id, self.rows, self.deadline = job_id, rows, deadline
        self.num_readers = 0  # answers that are being sent
        self.is_over = False  # nobody may begin to read
        self.sent: tuple[Digest, ...] = ()  # what has gone to another engine


class RemotePrefill:
    """The gate of a sequence (sequence.Gate): closed until it is known which blocks of its prompt
    another engine holds."""

    def __init__(self, transport: Transport, seq_id: int, source: Source) -> None:
        self._transport, self.seq_id, self.source = transport, seq_id, source
        self.answer: list[Digest] | None = None  # None: not known yet

    def start(self, fail: Callable[[BaseException], object]) -> None:
        self._transport.submit(self._ask(fail))

    async def _ask(self, fail: Callable[[BaseException], object]) -> None:
        try:
            self.answer = await self._transport.list_blocks(self.source)
        except BROKEN as error:
            warn(self.source, error)
            self.answer = []
        except Exception as error:
            fail(error)

    def is_open(self) -> bool:
        return self.answer is not None


def warn(source: Source, error: BaseException) -> None:
    """Say once that blocks do not come from there."""
    text = f"no blocks come from the engine at {source.path}: {describe_end(error)}. "
    warning_once(logger, text + "Prompts are computed here.")


def default_socket_dir() -> Path:
    """A folder of this user."""
    return Path(tempfile.gettempdir()) / f"nanoserve-{os.getuid()}"


def check_address(host: Any, port: Any) -> tuple[str, int]:
    """The host and the port, as given or the default. Raises ValueError or TypeError."""
    host, port = HOSTS[0] if host is None else host, PORT if port is None else port
    if host not in HOSTS:
        raise ValueError(
            f"host is {brief(host)}; allowed: {' or '.join(HOSTS)}. Blocks go to engines of the "
            "same machine only."
        )
    check_number("port", port, int, 1, 65535, "1 to 65535")
    return host, port


def kv_request_id(seq: Sequence) -> str | None:
    """Under which id this sequence's blocks go to another engine; None: they do not."""
    params = (seq.sampling_params.extra_args or {}).get("kv_transfer_params") or {}
    decoder = params.get("remote_decoder")
    return None if decoder is None else decoder["kv_request_id"]


def read_params(params: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """remote_decoder and remote_prefiller of a request's kv_transfer_params, if it has them. Raises
    ValueError for what is not allowed."""
    known = {"remote_decoder": DECODER_KEYS, "remote_prefiller": PREFILLER_KEYS}
    found: dict[str, dict[str, Any] | None] = dict.fromkeys(known)
    for name, value in params.items():
        if name not in known:
            raise _error(name, params, f"allowed: {' or '.join(known)}")
        if not isinstance(value, Mapping) or set(value) != set(known[name]):
            raise _error(name, params, f"it must be a dict with {', '.join(known[name])}")
        key = value["kv_request_id"]
        if not isinstance(key, str) or not 0 < len(key.encode(errors="replace")) <= MAX_NAME:
            raise _error(name, params, f"kv_request_id: 1 to {MAX_NAME} bytes of text")
        found[name] = dict(value)
    prefiller = found["remote_prefiller"]
    if prefiller is not None:
        try:
            check_address(prefiller["remote_host"], prefiller["remote_port"])
        except (TypeError, ValueError) as error:
            raise _error("remote_prefiller", params, f"remote_{error}") from None
    return found["remote_decoder"], prefiller


def _error(name: str, params: Mapping[str, Any], message: str) -> VLLMValidationError:
    text = f"kv_transfer_params has {brief(name)}: {brief(params.get(name))}; {message}."
    return VLLMValidationError(text, parameter="kv_transfer_params", value=params)
