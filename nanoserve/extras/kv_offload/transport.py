"""How does one engine ask another for blocks?

Through a Unix socket: a file that only its user can open, in a folder that only its user can enter.
Each question has a connection of its own. All numbers are little-endian:

    question   magic 8 | bytes of identity 4 | bytes of name 4 | number of keys 4
               identity | name | keys, 32 each
    answer     magic 8 | bytes of identity 4 | bytes of a row 8 | number 4
               identity, then
               no keys were given:  the digests that are held under this name, 32 each
               keys were given:     for each that is held: its index among them 4 | CRC-32 4 | row
    the end    1 byte: the asker has all

The *identity* is the tier's (PrimaryTier.identity): what must be equal so that a row means the same
here and there. Whoever finds another one sends nothing more, and the asker gets a ValueError that
says what differs.

Nothing of a message is executed, and no length is believed before it is compared with a limit. A
message that is not as above ends its connection, and so does a pause of PATIENCE. Both sides run in
one thread with an event loop: a peer that is dead, or hangs, holds up neither a step nor other
peers. One that hangs is left alone for PAUSE; then a single question finds out whether it still
does. So it holds up a request now and then, and not each of them.

vLLM: vllm/v1/kv_offload/tiering/p2p/: session/protocol.py, control/zmq.py, data/nixl.py (V1). There
the control goes over ZeroMQ and the rows over NIXL, also between machines.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import struct
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Awaitable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from nanoserve.exceptions import brief
from nanoserve.extras.kv_offload.base import Digest
from nanoserve.extras.kv_offload.files import lock_file
from nanoserve.interrupts import suppress
from nanoserve.logger import init_logger, warning_once

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import numpy as np

logger = init_logger(__name__)
Result = TypeVar("Result")

MAGIC = b"nanop2p1"
QUESTION = struct.Struct("<8sIII")
ANSWER = struct.Struct("<8sIQI")
ROW = struct.Struct("<II")
DIGEST_SIZE = 32
DONE = b"!"
MAX_IDENTITY, MAX_NAME, MAX_KEYS = 2**16, 256, 2**20  # bytes, bytes, keys
CHUNK = 2**20  # bytes that are on their way at once, if rows are smaller
PATIENCE = 5.0  # seconds without a byte, after which the other side counts as dead
PAUSE = 10.0  # seconds in which a peer that hangs is not asked
MAX_QUESTIONS = 32  # at once, to one peer

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# What ends a conversation. (Before Python 3.11 asyncio has a TimeoutError of its own.)
SILENT = (asyncio.TimeoutError, TimeoutError)
BROKEN = (OSError, EOFError, *SILENT, struct.error)


class Source(NamedTuple):
    """Where blocks are: an engine's socket, and the name under which they are held."""

    path: Path
    name: str


class Reading:
    """The rows that an answer may read."""

    def __init__(self, rows: Mapping[Digest, int]) -> None:
        self.rows = rows
        self.sent: tuple[Digest, ...] = ()  # what the asker has got, and has confirmed, in order


class Holder(Protocol):
    """What a server serves. Called in the transport's thread."""

    def reading(self, name: str) -> AbstractContextManager[Reading]:
        """The rows that are held under this name. They keep their blocks meanwhile."""


class Transport:
    """A thread that asks other engines, and answers them."""

    def __init__(self, rows: np.ndarray, identity: Mapping[str, Any]) -> None:
        """rows: [num_blocks, bytes] uint8."""
        self.rows = rows
        self.identity = json.dumps(dict(identity), sort_keys=True).encode()
        self._slots: defaultdict[Path, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(MAX_QUESTIONS)
        )
        self._paused: dict[Path, float] = {}  # peers that hang -> when to ask again
        self._holder: Holder | None = None
        self._server: asyncio.AbstractServer | None = None
        self._files: list[Any] = []  # what `listen` has opened, and the socket's path
        started: Future[asyncio.AbstractEventLoop] = Future()
        run = partial(asyncio.run, self._main(started))
        self._thread = threading.Thread(target=run, name="nanoserve-p2p", daemon=True)
        self._thread.start()
        self._loop = started.result()

    async def _main(self, started: Future[asyncio.AbstractEventLoop]) -> None:
        """The thread. When this ends, all that it does is cancelled."""
        self._is_over = asyncio.Event()
        started.set_result(asyncio.get_running_loop())
        await self._is_over.wait()
        if self._server is not None:
            self._server.close()

    def submit(self, work: Coroutine[Any, Any, Any]) -> None:
        """Let the thread do this. Any thread may call; after `close` nothing is done."""
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            work.close()

    def close(self) -> None:
        """End all connections. No row is read or written any more when this returns."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(PATIENCE)
        for file in self._files:
            if isinstance(file, Path):
                with suppress(OSError):
                    file.unlink()
            else:
                file.close()
        self._files.clear()

    # -- the side that asks --

    async def list_blocks(self, source: Source) -> list[Digest]:
        """The digests that are held under a name. Raises one of BROKEN if there is no answer, and
        ValueError if that engine's rows mean something else."""
        async with self._ask(source, ()) as (reader, writer, number):
            _check(number <= MAX_KEYS, "too many keys")
            data = await _wait(reader.readexactly(number * DIGEST_SIZE))
            writer.write(DONE)
        return _split(data)

    async def fetch(self, source: Source, rows: Mapping[Digest, int], good: list[Digest]) -> None:
        """Get these blocks into these rows. What has come is in `good`, also if this raises what
        list_blocks raises."""
        keys, size, missing = tuple(rows), self.rows.shape[1], dict(rows)
        async with self._ask(source, keys) as (reader, writer, number):
            _check(number <= len(keys), "more rows than keys")
            for start in range(0, number, self._num_rows):
                num_rows = min(self._num_rows, number - start)
                data = memoryview(await _wait(reader.readexactly(num_rows * (ROW.size + size))))
                for place in range(0, len(data), ROW.size + size):
                    index, checksum = ROW.unpack_from(data, place)
                    row = data[place + ROW.size :][:size]
                    is_asked_for = index < len(keys) and keys[index] in missing
                    _check(is_asked_for, "a row that nobody has asked for")
                    _check(zlib.crc32(row) == checksum, "a row with a wrong CRC-32")
                    memoryview(self.rows[missing.pop(keys[index])])[:] = row
                    good.append(keys[index])
            writer.write(DONE)

    @asynccontextmanager
    async def _ask(
        self, source: Source, keys: tuple[Digest, ...]
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, int]]:
        """The streams, and the number of what follows."""
        name = source.name.encode()
        async with self._slots[source.path], self._pausing(source.path):
            opening = asyncio.open_unix_connection(str(source.path), limit=self._limit)
            reader, writer = await _wait(opening)
            with closing(writer):
                writer.write(QUESTION.pack(MAGIC, len(self.identity), len(name), len(keys)))
                writer.write(self.identity + name + b"".join(keys))
                header = ANSWER.unpack(await _wait(reader.readexactly(ANSWER.size)))
                magic, identity_size, row_bytes, number = header
                _check(magic == MAGIC and identity_size <= MAX_IDENTITY, "an unknown answer")
                theirs = await _wait(reader.readexactly(identity_size))
                if theirs != self.identity:
                    raise ValueError(describe_difference(source, self.identity, theirs))
                _check(row_bytes == self.rows.shape[1], "rows of another size")
                yield reader, writer, number

    @asynccontextmanager
    async def _pausing(self, path: Path) -> AsyncIterator[None]:
        """Leave a peer that hangs alone for a while: raise TimeoutError at once."""
        now, until = time.monotonic(), self._paused.get(path)
        if until is not None:
            if now < until:
                raise TimeoutError
            self._paused[path] = now + PAUSE  # for others, while this question finds out
        try:
            yield
        except SILENT:
            self._paused[path] = time.monotonic() + PAUSE
            raise
        except BaseException:
            self._paused.pop(path, None)
            raise
        self._paused.pop(path, None)

    @property
    def _num_rows(self) -> int:
        """Rows that are waited for at once."""
        return max(1, CHUNK // int(self.rows.shape[1]))

    @property
    def _limit(self) -> int:
        """Bytes that wait in this process for who reads them."""
        return max(CHUNK, int(self.rows.shape[1]))

    # -- the side that answers --

    def listen(self, path: Path, holder: Holder) -> None:
        """Answer questions that come to this socket. Raises ValueError if it cannot be opened, or
        is another engine's."""
        self._holder = holder
        try:
            # Held until the process ends, however: then the socket's file is nobody's.
            lock = open(path.with_suffix(".lock"), "wb")  # noqa: SIM115
            self._files.append(lock)
            if not lock_file(lock, wait=False):
                raise ValueError(
                    f"another engine listens at {path}. Give each engine a port of its own."
                )
            path.unlink(missing_ok=True)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._files += [path, sock]
            sock.bind(str(path))
            path.chmod(0o600)
        except OSError as error:
            raise ValueError(
                f"the socket {path} cannot be opened ({error}). Give another socket_dir."
            ) from error
        starting = asyncio.start_unix_server(self._serve, sock=sock, limit=self._limit)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(PATIENCE)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        with closing(writer):
            try:
                await self._answer(reader, writer)
            except BROKEN as error:
                writer.transport.abort()  # what is not sent yet is not read any more
                warning_once(logger, f"another engine got no blocks: {describe_end(error)}.")

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        header = QUESTION.unpack(await _wait(reader.readexactly(QUESTION.size)))
        magic, identity_size, name_size, num_keys = header
        is_known = identity_size <= MAX_IDENTITY and name_size <= MAX_NAME and num_keys <= MAX_KEYS
        _check(magic == MAGIC and is_known, "an unknown question")
        theirs = await _wait(reader.readexactly(identity_size))
        name = (await _wait(reader.readexactly(name_size))).decode(errors="replace")
        keys = _split(await _wait(reader.readexactly(num_keys * DIGEST_SIZE)))
        assert self._holder is not None, "nothing to serve"
        with self._holder.reading(name if theirs == self.identity else "") as reading:
            wanted = {key: row for key in keys if (row := reading.rows.get(key)) is not None}
            number = len(wanted) if keys else len(reading.rows)
            size = self.rows.shape[1]
            writer.write(ANSWER.pack(MAGIC, len(self.identity), size, number) + self.identity)
            writer.write(b"" if keys else b"".join(reading.rows))
            for index, key in enumerate(keys):
                if key in wanted:
                    data = memoryview(self.rows[wanted[key]])
                    writer.write(ROW.pack(index, zlib.crc32(data)))
                    writer.write(data)
                    if writer.transport.get_write_buffer_size() > CHUNK:
                        await _wait(writer.drain())
            _check(await _wait(reader.readexactly(1)) == DONE, "no confirmation")
            reading.sent = tuple(wanted)


def _check(is_good: bool, what: str) -> None:
    if not is_good:
        raise OSError(f"it has sent {what}")


async def _wait(work: Awaitable[Result]) -> Result:
    """Wait for the other side. Raises TimeoutError after PATIENCE."""
    return await asyncio.wait_for(work, PATIENCE)


def _split(data: bytes) -> list[Digest]:
    return [data[i : i + DIGEST_SIZE] for i in range(0, len(data), DIGEST_SIZE)]


def make_private(folder: Path) -> None:
    """Make a folder that only this user can enter. Raises ValueError if it is not so, or is a link:
    to where, its owner decides."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ValueError(
            f"the folder {folder} cannot be opened ({error}). Give another socket_dir."
        ) from error
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not is_own or found.st_mode & 0o077:
        raise ValueError(
            f"{folder} is not a folder that user {os.getuid()} alone may enter. chmod 700 it, or "
            "give another socket_dir."
        )


def describe_end(error: BaseException) -> str:
    """What ended a conversation."""
    if isinstance(error, SILENT):
        return f"it has said nothing for {PATIENCE:g} s"
    return "it has ended" if isinstance(error, EOFError) else str(error) or type(error).__name__


def describe_difference(source: Source, ours: bytes, theirs: bytes) -> str:
    """The message for an engine with another identity."""
    here = json.loads(ours)
    try:
        there = dict(json.loads(theirs))
    except (ValueError, TypeError, RecursionError):
        there = {}
    differ = [
        f"{name} is {brief(there.get(name))} there and {brief(here[name])} here"
        for name in here
        if here[name] != there.get(name)
    ]
    shown = "; ".join(differ) or "it describes them in other words"
    return (
        f"the engine at {source.path} has other keys and values: {shown}. Start both engines with "
        "the same model and the same options for it."
    )
